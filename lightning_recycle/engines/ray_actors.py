"""What of a run is seen in Ray's dashboard, and by whatever reads Ray's metrics: gauges, with the run as their tag."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lightning_recycle.control.coordinator.coordinator import Coordinator, Positions
from lightning_recycle.control.coordinator.journal import Journal, default_path
from lightning_recycle.control.coordinator.run_server import Serving
from lightning_recycle.control.coordinator.standalone import allow_descriptors
from lightning_recycle.control.joining.reception import Reception
from lightning_recycle.control.joining.run_config import Overrides, RunConfig, complete_settings, where
from lightning_recycle.control.monitoring.history import Event
from lightning_recycle.control.protocol.messages import RunRequest, Unfit
from lightning_recycle.control.protocol.state import Failed, Finished, Outcome
from lightning_recycle.engines.ray_cluster import import_ray, node_address
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.planning.grid import Grid

__all__ = [
    "CoordinatorActor",
    "Observation",
    "RayServing",
    "Returned",
    "RunGauges",
    "WorkerActor",
    "describe_process",
    "environment_of_worker",
]

_GAUGES = {
    "live_workers": "Workers that take part in the training",
    "steps": "Optimizer steps that are committed",
    "failures": "Workers that were lost so far",
    "recovery_seconds": "Seconds from failures to the next commit, so far",
    "redone_steps": "Steps that were run again, so far",
    "rejoined_workers": "Replacements that joined, so far",
}
_GOODPUT = "Share of the time since the first step that no recovery took"


class RunGauges:
    """The gauges ``recycle_...`` of the run ``name``."""

    def __init__(self, name: str) -> None:
        gauge = importlib.import_module("ray.util.metrics").Gauge
        described = {**_GAUGES, "goodput": _GOODPUT}
        self._gauges = {key: gauge(f"recycle_{key}", text, ("run",)) for key, text in described.items()}
        for shown in self._gauges.values():
            shown.set_default_tags({"run": name})
        self._began: float | None = None

    def show(self, counters: Mapping[str, float]) -> None:
        """Takes the coordinator's counters."""
        for key in _GAUGES:
            self._gauges[key].set(counters[key])
        if self._began is None and counters.get("steps"):
            self._began = time.monotonic()
        lasted = 0.0 if self._began is None else time.monotonic() - self._began
        lost = counters.get("recovery_seconds", 0.0)
        self._gauges["goodput"].set(1.0 - min(1.0, lost / lasted) if lasted else 1.0)


log = logging.getLogger(__name__)

_OTHER_DESCRIPTORS = 256  # besides one for each worker


@dataclass(frozen=True)
class Observation:
    """Report of the coordinator's actor on its run.

    Args:
        version: grows with every change of the rest.
        process: the id of the actor's process: Ray may have started another one.
        run: the number of the run that is being served, from 0.
        positions: the worker of each; None while no run is being served.
        begun: whether all workers of the run have been there: its training goes on.
        over: the runs that are over so far.
        failed: whether the newest of these did not finish.
        took_part: the processes that were there at the end of one of them.
    """

    version: int = 0
    process: int = 0
    run: int = 0
    positions: dict[int, tuple[str, int] | None] | None = None
    begun: bool = False
    over: int = 0
    failed: bool = False
    took_part: frozenset[tuple[str, int]] = frozenset()


class RayServing(Serving):
    """Serves the runs of a script on Ray, which all have the grid of ``RayReCycle``."""

    def settle(self, wants: RunRequest | None) -> RunConfig:
        why = self._objection(wants)
        if why is not None:
            raise ConfigurationError(why)
        terms = super().settle(wants)
        return replace(terms, overruled=() if wants is None else _overruled(self.given, wants))

    def difference(self, terms: RunConfig, wants: RunRequest | None) -> Unfit | None:
        why = self._objection(wants)
        return super().difference(terms, wants) if why is None else Unfit(why)

    def _objection(self, wants: RunRequest | None) -> str | None:
        """Why RayReCycle cannot serve a script."""
        grid = self.given.grid
        if wants is None or grid is None:
            return None
        if wants.needs_launcher:
            return (
                f"{', '.join(wants.needs_launcher)} needs a launching process, which RayReCycle has"
                " none of: leave it out, or use ReCycleStrategy(engine='ray')."
            )
        own = wants.grid if wants.microbatches_given else replace(wants.grid, microbatches=grid.microbatches)
        if own == grid:
            return None
        return (
            f"This script wants a grid of {own}, RayReCycle has {grid} (pipelines x stages x micro-batches): give its"
            " ReCycleStrategy **ray_worker().strategy_arguments and its Trainer **ray_worker().trainer_arguments."
        )


def _overruled(given: Overrides, wants: RunRequest) -> tuple[str, ...]:
    """Differences between the arguments of RayReCycle and the script, in words."""
    script = complete_settings(wants)
    return tuple(
        f"{where(name)} is {script.get(name)!r} in the script, and {value!r} in"
        f" RayReCycle({name.rpartition('.')[2]}=...)"
        for name, value in given.settings.items()
        if value != script.get(name)
    )


class _ObservedServing(RayServing):
    """Serving that reports to the coordinator's actor."""

    def __init__(
        self, actor: CoordinatorActor, reception: Reception, given: Overrides, journal: Journal | None
    ) -> None:
        super().__init__(reception, given, journal, takes_results=True, on_positions=actor.on_positions)
        self._actor = actor

    def on_begin(self, terms: RunConfig, coordinator: Coordinator) -> None:
        self._actor.on_begin(terms, coordinator)

    def on_look(self, coordinator: Coordinator) -> None:
        self._actor.on_look(coordinator)

    def on_end(self, coordinator: Coordinator, outcome: Outcome | None) -> None:
        self._actor.on_end(coordinator, outcome)


class CoordinatorActor:
    """Serves the runs of a script.

    Args:
        grid: the grid of every run.
        address: where it listens; also after Ray has started it again.
        key: the key of the runs.
        given: what the user told ``RayReCycle``, with the grid; the script says the rest.
        name: the name of the run, in metrics.
    """

    def __init__(self, grid: Grid, address: tuple[str, int], key: bytes, given: Overrides, name: str) -> None:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
        self._grid, self._address, self._key, self._given = grid, address, key, given
        self._gauges = RunGauges(name)
        self._changed = threading.Condition()
        self._seen = Observation(process=os.getpid())
        self._coordinator: Coordinator | None = None
        self._terms: RunConfig | None = None
        self._journal: Journal | None = None
        self._is_ending = False  # whether the run that is served had ended in an earlier process
        self._ended: dict[int, tuple[Outcome, list[Event]]] = {}  # by the number of the run; what this process has seen
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

    def outcome(self, run: int) -> tuple[Outcome, list[Event]] | None:
        """How a run ended, and what happened in it. Its results leave this process with that. None if they were in an
        earlier process, which was killed.
        """
        if run not in self._ended:
            return None
        outcome, events = self._ended[run]
        if isinstance(outcome, Finished):
            self._ended[run] = Finished({}), events
        return outcome, events

    def history(self) -> list[Event]:
        """The events of the run that is being served."""
        coordinator = self._coordinator
        return [] if coordinator is None else list(coordinator.history)

    def terms(self) -> RunConfig | None:
        """The configuration of the newest run; None as long as no worker has come."""
        return self._terms

    def forget(self) -> None:
        """All is over, and this actor is about to be killed: removes what it wrote down."""
        journal = self._journal
        if journal is not None:
            journal.remove()

    def _tell(self, **changes: Any) -> None:
        with self._changed:
            self._seen = replace(self._seen, version=self._seen.version + 1, **changes)
            self._changed.notify_all()

    # ------------------------------------------------------------------ the thread that serves

    def _serve(self) -> None:
        what = "The coordinator could not be started"
        try:
            with contextlib.closing(Reception(self._address, self._key, self._grid.num_workers)) as reception:
                what = "The coordinator failed"
                self._journal = _journal(self._address, self._key)
                serving = _ObservedServing(self, reception, self._given, self._journal)
                self._go_on(serving)
                while not self._seen.failed:
                    if serving.meet():
                        serving.serve()
                        serving.begin_next()
                    self._go_on(serving)
        except Exception as error:
            log.exception(what)
            self._end(Failed(f"{what}: {type(error).__name__}: {error}"), [])

    def _go_on(self, serving: Serving) -> None:
        """The next run is about to be served, or the one that an earlier process served."""
        over, failed = len(serving.statuses), any(serving.statuses)
        kept = None if self._journal is None else self._journal.kept
        # One that is ending tells its outcome soon; until then nobody needs to know who is missing.
        self._is_ending = kept is not None and kept.over is not None
        positions = None if failed or self._is_ending else dict.fromkeys(range(self._grid.num_workers))
        begun = kept is not None and kept.has_resumed
        self._tell(run=over, over=over, failed=failed, positions=positions, begun=begun)

    def on_begin(self, terms: RunConfig, coordinator: Coordinator) -> None:
        self._terms, self._coordinator = terms, coordinator

    def on_look(self, coordinator: Coordinator) -> None:
        self._gauges.show(coordinator.counters)
        if not self._seen.begun and any(event.kind == "resumed" for event in coordinator.history[:64]):
            self._tell(begun=True)

    def on_end(self, coordinator: Coordinator, outcome: Outcome | None) -> None:
        self._coordinator = None
        if outcome is not None:
            self._end(outcome, list(coordinator.history))

    def on_positions(self, positions: Positions) -> None:
        if self._seen.positions is not None:  # not of a run that is over
            self._tell(positions=dict(positions))

    def _end(self, outcome: Outcome, events: list[Event]) -> None:
        run, seen = self._seen.over, self._seen
        if not self._is_ending:  # otherwise its results were in the earlier process
            self._ended[run] = outcome, events
        there = {process for process in (seen.positions or {}).values() if process is not None}
        if self._journal is not None:
            there |= {(process.node, process.pid) for process in self._journal.processes.values()}
        failed = not isinstance(outcome, Finished)
        took_part = seen.took_part | there
        self._tell(run=run + 1, positions=None, begun=False, over=run + 1, failed=failed, took_part=took_part)


def _journal(address: tuple[str, int], key: bytes) -> Journal | None:
    """The journal of the coordinator at ``address``, on this node; None if it cannot be written."""
    try:
        journal = Journal(default_path(address), key)
    except ConfigurationError as error:
        log.warning("This run does not survive the process of its coordinator: %s", error)
        return None
    log.info("Its state is in %s.", journal.path)
    if journal.is_continued:
        log.warning("This coordinator goes on with run %s, whose coordinator was killed.", journal.run)
    return journal


@dataclass(frozen=True)
class Returned:
    """How the user's function came to its end.

    Args:
        value: its return value.
        status: None if it returned, else what it called ``sys.exit`` with.
    """

    value: Any
    status: Any = None


def describe_process() -> tuple[str, int]:
    """Ray's id of this node, and the id of this process."""
    return import_ray().get_runtime_context().get_node_id(), os.getpid()


def environment_of_worker() -> dict[str, str]:
    """Variables of a worker about this process, whose variables of another run are taken away."""
    for variable in ("RECYCLE_LISTEN", "RECYCLE_KEY_FILE", "RECYCLE_REJOIN_SECONDS"):
        os.environ.pop(variable, None)  # an actor cannot be replaced by a new run of a program: another one comes
    node, _ = describe_process()
    return {"RECYCLE_NODE": node, "RECYCLE_HOST": node_address(), "RECYCLE_ENGINE": "ray", "LOCAL_RANK": "0"}


class WorkerActor:
    """One worker of a run."""

    def introduce(self) -> tuple[str, int]:
        return describe_process()

    def run(self, environment: Mapping[str, str], function: Callable[[Any], Any], config: Any) -> Returned:
        """Calls ``function(config)`` in the environment of a worker.

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
