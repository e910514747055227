"""What runs in Ray's actors: the coordinator of a run, and its workers. Neither needs torch by itself.

The coordinator's actor serves one run after the other, as ``recycle-coordinator`` does: a script may fit, then test. A
worker's actor calls the user's function once, in its main thread, and lives no longer than that: who is cut off from
the run, evicted or told to leave ends with the process, and another actor takes its place.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lightning_recycle.control.coordinator import Coordinator, Positions
from lightning_recycle.control.history import Event
from lightning_recycle.control.options import CoordinatorOptions
from lightning_recycle.control.plans.replanning import RunPlanner
from lightning_recycle.control.protocol.state import Failed, Finished, Outcome
from lightning_recycle.control.standalone import allow_descriptors
from lightning_recycle.engines.ray_cluster import import_ray, node_address
from lightning_recycle.engines.ray_metrics import RunGauges
from lightning_recycle.planning.grid import Grid
from lightning_recycle.planning.problem import Technique

__all__ = ["CoordinatorActor", "Observation", "Returned", "WorkerActor", "describe_process", "environment_of_worker"]

log = logging.getLogger(__name__)

_OTHER_DESCRIPTORS = 256  # besides one for each worker
_METRICS_SECONDS = 1.0  # between two updates of the metrics


@dataclass(frozen=True)
class Observation:
    """What the coordinator's actor tells.

    Args:
        version: grows with every change of the rest.
        run: the number of the run that is being served, from 0.
        positions: who is there; None while no run is being served.
        begun: whether all workers of the run have been there: its training goes on.
        over: the runs that are over so far.
        failed: whether the newest of these did not finish.
        took_part: the processes that were there at the end of one of them.
    """

    version: int = 0
    run: int = 0
    positions: dict[int, tuple[str, int] | None] | None = None
    begun: bool = False
    over: int = 0
    failed: bool = False
    took_part: frozenset[tuple[str, int]] = frozenset()


class CoordinatorActor:
    """Serves the runs of a script.

    Args:
        grid: the grid of every run.
        address: where it listens; also after Ray has started it again.
        key: the key of the runs.
        planner: the name of the planner.
        technique: which techniques plans use.
        options: its time bounds.
        name: the name of the run, in metrics.
    """

    def __init__(
        self,
        grid: Grid,
        address: tuple[str, int],
        key: bytes,
        planner: str,
        technique: Technique,
        options: CoordinatorOptions,
        name: str,
    ) -> None:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
        self._grid, self._address, self._key = grid, address, key
        self._planner, self._technique, self._options = planner, technique, options
        self._gauges = RunGauges(name)
        self._changed = threading.Condition()
        self._seen = Observation()
        self._coordinator: Coordinator | None = None
        self._runs: list[tuple[Outcome, list[Event]]] = []
        allow_descriptors(grid.num_workers + _OTHER_DESCRIPTORS)
        threading.Thread(target=self._serve, name="recycle-runs", daemon=True).start()

    def process_id(self) -> int:
        """The id of the coordinator's process, on its node."""
        return os.getpid()

    def observe(self, known: int, timeout: float) -> Observation:
        """What there is to see as soon as it is another than version ``known``, or after ``timeout`` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._seen.version != known, timeout)
            return self._seen

    def ask_to_leave(self, host: str) -> None:
        """Asks the workers of a machine to leave at the next step boundary."""
        coordinator = self._coordinator
        if coordinator is not None:
            coordinator.ask_to_leave(host)

    def outcome(self, run: int) -> tuple[Outcome, list[Event]]:
        """How a run ended, and what happened in it. Its results leave this process with that."""
        outcome, events = self._runs[run]
        if isinstance(outcome, Finished):
            self._runs[run] = Finished({}), events
        return outcome, events

    def history(self) -> list[Event]:
        """What has happened in the run that is being served."""
        coordinator = self._coordinator
        return [] if coordinator is None else list(coordinator.history)

    def _tell(self, **changes: Any) -> None:
        with self._changed:
            self._seen = replace(self._seen, version=self._seen.version + 1, **changes)
            self._changed.notify_all()

    def _serve(self) -> None:
        while not self._seen.failed:
            try:
                self._serve_run()
            except Exception as error:
                log.exception("The coordinator could not be started")
                self._end(Failed(f"The coordinator could not be started: {type(error).__name__}: {error}"), [])

    def _serve_run(self) -> None:
        planner = RunPlanner(self._grid, self._planner, self._technique)
        planner.prepare()
        host, port = self._address
        coordinator = Coordinator(
            self._grid,
            planner,
            self._options,
            host,
            port,
            self._key,
            on_positions=self._on_positions,
            staggered=self._technique.staggered,
        )
        self._coordinator = coordinator
        self._tell(positions=dict.fromkeys(range(self._grid.num_workers)))
        try:
            coordinator.start({})
            while (outcome := coordinator.wait(_METRICS_SECONDS)) is None:
                self._gauges.show(coordinator.counters)
                if not self._seen.begun and any(event.kind == "resumed" for event in coordinator.history[:64]):
                    self._tell(begun=True)
            self._end(outcome, list(coordinator.history))
        finally:
            self._coordinator = None
            coordinator.close()  # which takes a while: the workers are told

    def _end(self, outcome: Outcome, events: list[Event]) -> None:
        self._runs.append((outcome, events))
        over, failed = len(self._runs), not isinstance(outcome, Finished)
        there = {process for process in (self._seen.positions or {}).values() if process is not None}
        took_part = self._seen.took_part | there
        self._tell(run=over, positions=None, begun=False, over=over, failed=failed, took_part=took_part)

    def _on_positions(self, positions: Positions) -> None:
        if self._coordinator is not None and self._seen.positions is not None:  # not of a run that is over
            self._tell(positions=dict(positions))


@dataclass(frozen=True)
class Returned:
    """How the user's function came to its end.

    Args:
        value: what it returned.
        status: None if it returned, else what it called ``sys.exit`` with.
    """

    value: Any
    status: Any = None


def describe_process() -> tuple[str, int]:
    """Ray's id of this node, and the id of this process."""
    return import_ray().get_runtime_context().get_node_id(), os.getpid()


def environment_of_worker() -> dict[str, str]:
    """What a worker must find in its environment about this process, whose variables of another run are taken away."""
    for variable in ("RECYCLE_LISTEN", "RECYCLE_KEY_FILE", "RECYCLE_REJOIN_SECONDS"):
        os.environ.pop(variable, None)  # an actor cannot be replaced by a new run of a program: another one comes
    node, _ = describe_process()
    return {"RECYCLE_NODE": node, "RECYCLE_HOST": node_address(), "RECYCLE_ENGINE": "ray", "LOCAL_RANK": "0"}


class WorkerActor:
    """One worker of a run."""

    def introduce(self) -> tuple[str, int]:
        return describe_process()

    def run(self, environment: Mapping[str, str], function: Callable[[Any], Any], config: Any) -> Returned:
        """Calls ``function(config)`` with what a worker must find in its environment.

        The device is the first that this process sees: Ray shows it only those that it assigned.
        """
        os.environ.update({**environment, **environment_of_worker()})
        try:
            return Returned(function(config))
        except SystemExit as error:  # Ray would take it for the wish to end the actor, and nobody heard the status
            return Returned(None, 0 if error.code is None else error.code)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
