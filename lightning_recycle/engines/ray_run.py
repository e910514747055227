"""A run on Ray from its first actor to its last: starts workers, watches them, ends those without use.

It decides nothing about the training: that is the coordinator's. It decides how many workers to ask for, by a pure
function (:func:`~lightning_recycle.engines.ray_placement.staffing`) of the reports of coordinator and Ray. It lives in
the process that calls ``fit``: while it waits, or is late, the training goes on.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_recycle.control.client import EXIT_LEFT, EXIT_LOST_COORDINATOR
from lightning_recycle.control.joining.run_config import Overrides
from lightning_recycle.control.monitoring.history import Event
from lightning_recycle.control.network.addresses import shown
from lightning_recycle.control.protocol.state import Outcome
from lightning_recycle.engines import ray_cluster
from lightning_recycle.engines.interfaces import free_port
from lightning_recycle.engines.ray_actors import CoordinatorActor, Observation, Returned, WorkerActor
from lightning_recycle.engines.ray_cluster import Seat, Seats
from lightning_recycle.engines.ray_placement import Process, staffing
from lightning_recycle.errors import ControlPlaneError, ReCycleError
from lightning_recycle.planning.grid import Grid

__all__ = ["RayRun", "RunEnd"]

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.5  # between two looks at the nodes of the cluster
_OBSERVE_SECONDS = 5.0  # for which the coordinator's actor holds a question
_FIRST_DELAY, _LONGEST_DELAY = 0.5, 30.0  # seconds between a worker that failed to join and the next one
_OUTCOME_SECONDS = 5.0  # from the end of a worker to that of the run, if one follows from the other
_RESTART_SECONDS = 60.0  # for Ray to start the coordinator again
_RETURN_SECONDS = 60.0  # for workers to return to it, before one that it does not know is taken for given up
_FORGET_SECONDS = 5.0  # for the coordinator to remove its journal
_CALLS = 8  # that the coordinator's actor answers at the same time; one of them may wait


@dataclass(frozen=True)
class RunEnd:
    """How a run ended.

    Args:
        outcomes: the outcome and the events of each call of the Trainer.
        returned: the return value of the user's function, from the lowest rank on which it returned any.
    """

    outcomes: Sequence[tuple[Outcome, list[Event]]]
    returned: Any


@dataclass
class _Worker:
    actor: Any
    seat: Seat
    introduction: Any  # the reference to who it is
    call: Any  # the reference to how the user's function ended
    process: Process | None = None
    placed: bool = False  # whether it has been seen at a position of the run that is being served
    has_joined: bool = False  # or of any
    returns: bool = False  # whether it was at a position when the coordinator's process was lost


@dataclass
class RayRun:
    """Runs ``function(config)`` in one actor for each position of ``grid``.

    Args:
        name: the name of the run: its coordinator is the actor ``recycle-<name>``, its workers are ``recycle-<name>-1``
            and so on, in the order in which they are asked for.
        grid: the grid.
        needs: the amount of each resource that a worker needs.
        given: options that overrule the script's; the grid among them.
        function, config: the function of a worker, and its argument.
        environment: further variables of the workers.
        max_replacements: how often a worker may be replaced; None for any number.
    """

    name: str
    grid: Grid
    needs: Mapping[str, float]
    given: Overrides
    function: Callable[[Any], Any]
    config: Any
    environment: Mapping[str, str] = field(default_factory=dict)
    max_replacements: int | None = None

    def execute(self) -> RunEnd:
        """Runs to the end; whatever that is, nothing is left on the cluster.

        Raises:
            ControlPlaneError: if the coordinator is lost for good.
            ReCycleError: if workers cannot be kept alive.
            Exception: one that the function raised outside of the Trainer.
        """
        self._ray = ray_cluster.connect()
        self._workers: dict[int, _Worker] = {}
        self._keys = itertools.count()
        self._failures, self._not_before, self._requested = 0, 0.0, 0
        self._outcomes: list[tuple[Outcome, list[Event]]] = []
        self._return_by = 0.0  # when the workers must have found a coordinator that was started again
        self._took_part: frozenset[Process] = frozenset()  # in any of the runs that are over
        self._returned: dict[int, Any] = {}
        self._returning: list[Process] = []  # the workers on which the function has returned
        self._ranks: dict[Process, int] = {}  # of the workers, as last seen
        host = ray_cluster.node_address()
        self._address, self._key = (host, free_port(host)), os.urandom(32).hex()
        self._seats = Seats(self.grid, self.needs)
        self._coordinator: Any = None
        try:
            self._coordinator = self._start_coordinator()
            self._supervise()
            values = [self._returned[rank] for rank in sorted(self._returned)]
            return RunEnd(self._outcomes, next((value for value in values if value is not None), None))
        finally:
            self._close()

    def _start_coordinator(self) -> Any:
        """On the node of this process, with whose end the run ends anyway."""
        here = self._ray.get_runtime_context().get_node_id()
        actor = self._ray.remote(CoordinatorActor).options(
            name=f"recycle-{self.name}",
            num_cpus=0,
            max_restarts=-1,
            max_concurrency=_CALLS,
            scheduling_strategy=ray_cluster.on_node(here),
        )
        return actor.remote(self.grid, self._address, self._key.encode(), self.given, self.name)

    # ------------------------------------------------------------------ the loop

    def _supervise(self) -> None:
        seen = Observation()
        question = self._coordinator.observe.remote(seen.version, _OBSERVE_SECONDS)
        next_look, going, told = 0.0, frozenset[str](), dict[str, float]()
        while not self._is_over(seen):
            waited = [worker.call if worker.process else worker.introduction for worker in self._workers.values()]
            ready, _ = self._ray.wait([question, *waited], num_returns=1, timeout=_POLL_SECONDS)
            if question in ready:
                before, seen = seen, self._answer(question)
                question = self._coordinator.observe.remote(seen.version, _OBSERVE_SECONDS)
                if seen.process != before.process:  # who finds the coordinator again has its position still
                    self._return_by = time.monotonic() + _RETURN_SECONDS
                    for worker in self._workers.values():
                        worker.placed, worker.returns = False, worker.placed or worker.returns
                if seen.run != before.run:
                    for worker in self._workers.values():
                        worker.placed = worker.returns = False
                self._took_part |= seen.took_part
            self._take_outcomes(seen)
            self._look_at_workers(seen)
            now = time.monotonic()
            if now >= next_look:
                next_look, going = now + _POLL_SECONDS, ray_cluster.draining_nodes()
                told = {machine: at for machine, at in told.items() if machine in going}
                self._drop_lost_seats()
            if self._returning:
                self._end_latecomers(seen)
            elif seen.positions is not None:
                self._staff(seen.positions, going, told, now)

    def _is_over(self, seen: Observation) -> bool:
        if len(self._outcomes) < seen.over:
            return False
        if seen.failed:
            return True
        served = seen.positions is None or any(seen.positions.values())  # one that is ending tells its outcome soon
        return bool(self._returning) and not self._workers and not served

    def _answer(self, question: Any) -> Observation:
        try:
            answer: Observation = self._ray.get(question)
            return answer
        except self._ray.exceptions.RayActorError as error:
            log.warning("The process of the coordinator is lost: %s", str(error).partition("\n")[0])
        again = self._await_restart()
        log.warning("Ray has started the coordinator again.")
        return again

    def _await_restart(self) -> Observation:
        deadline = time.monotonic() + _RESTART_SECONDS
        while True:
            try:
                # The first observation of a process says nothing yet.
                seen: Observation = self._ray.get(self._coordinator.observe.remote(0, _OBSERVE_SECONDS))
                return seen
            except self._ray.exceptions.ActorUnavailableError as error:  # calls are refused until it is there
                if time.monotonic() > deadline:
                    raise ControlPlaneError(f"Ray did not start the coordinator again: {error}") from error
                time.sleep(_POLL_SECONDS)
            except self._ray.exceptions.RayActorError as error:
                raise ControlPlaneError(f"The coordinator's actor is lost: {error}") from error

    def _take_outcomes(self, seen: Observation) -> None:
        while (run := len(self._outcomes)) < seen.over:
            try:
                ended = self._ray.get(self._coordinator.outcome.remote(run))
            except self._ray.exceptions.RayActorError:  # the answer to what is asked all the time says what follows
                return
            if ended is None:
                raise ControlPlaneError(
                    "The coordinator's process was killed when the run had ended, before its results were taken. What"
                    " the workers saved is there: run again with the same name, and ckpt_path='last'."
                )
            self._outcomes.append(ended)

    # ------------------------------------------------------------------ workers

    def _look_at_workers(self, seen: Observation) -> None:
        """Notes which workers have started, ended (and how), and found a position."""
        if seen.positions is not None:
            self._ranks.update({process: rank for rank, process in seen.positions.items() if process is not None})
        waited = [reference for worker in self._workers.values() for reference in (worker.introduction, worker.call)]
        ready = set(self._ray.wait(waited, num_returns=len(waited), timeout=0.0)[0]) if waited else set()
        for key, worker in list(self._workers.items()):
            if key not in self._workers:
                continue  # it was ended while others were looked at
            try:
                if worker.process is None:
                    if worker.introduction not in ready:
                        continue
                    worker.process = self._ray.get(worker.introduction)
                if worker.call in ready:
                    self._on_returned(key, self._ray.get(worker.call), seen)
            except self._ray.exceptions.RayTaskError as error:
                self._on_raised(key, error, seen)
            except self._ray.exceptions.RayError as error:
                log.info("A worker has ended: %s", str(error).partition("\n")[0])
                self._forget(key)
            if seen.positions is not None and worker.process in seen.positions.values():
                worker.placed = worker.has_joined = True
                self._failures, self._not_before = 0, 0.0

    def _on_returned(self, key: int, returned: Returned, seen: Observation) -> None:
        worker = self._workers[key]
        if returned.status is None:
            assert worker.process is not None
            self._returned[self._ranks.get(worker.process, self.grid.num_workers)] = returned.value
            self._returning.append(worker.process)
            self._end(key)
            return
        self._forget(key)
        told = seen.failed or returned.status in (EXIT_LOST_COORDINATOR, EXIT_LEFT)
        if not told and not self._awaits_end(seen):
            raise ReCycleError(
                f"The function of RayReCycle.fit called sys.exit({returned.status!r}) before the run was over, so there"
                " is no result. To end training early, set trainer.should_stop = True."
            )

    def _end_latecomers(self, seen: Observation) -> None:
        """Ends workers that came too late to take part in any run that is over."""
        if self._took_part.issuperset(self._returning):  # that the run is over has been told
            for key in [key for key, worker in self._workers.items() if worker.process not in self._took_part]:
                self._end(key)

    def _awaits_end(self, seen: Observation) -> bool:
        """Whether a run has just failed, or does within a moment: its outcome says why workers end."""
        deadline = time.monotonic() + _OUTCOME_SECONDS
        while not seen.failed and (left := deadline - time.monotonic()) > 0:
            seen = self._answer(self._coordinator.observe.remote(seen.version, left))
        self._take_outcomes(seen)
        return seen.failed

    def _on_raised(self, key: int, error: Any, seen: Observation) -> None:
        """The function raised outside of the Trainer: that ends the run, unless others train already."""
        worker = self._workers[key]
        self._end(key)
        cause = getattr(error, "cause", None)
        if seen.begun and not worker.has_joined:
            log.warning("A replacement could not join, and another one is asked for: %s", error)
            return
        if isinstance(cause, Exception):
            raise cause from error
        raise error

    def _forget(self, key: int) -> None:
        """A worker has ended; one that never had a position makes the next one wait."""
        worker = self._workers.pop(key, None)
        if worker is not None and not worker.has_joined:
            self._failures += 1
            self._not_before = time.monotonic() + min(_LONGEST_DELAY, _FIRST_DELAY * 2 ** (self._failures - 1))

    def _end(self, key: int) -> None:
        worker = self._workers.pop(key)
        self._ray.kill(worker.actor, no_restart=True)

    # ------------------------------------------------------------------ missing workers

    def _staff(
        self, positions: Mapping[int, Process | None], going: frozenset[str], told: dict[str, float], now: float
    ) -> None:
        """Asks for workers, and ends those that are of no use."""
        processes = {key: worker.process for key, worker in self._workers.items()}
        returned = now > self._return_by
        placed = [key for key, worker in self._workers.items() if worker.placed or (worker.returns and returned)]
        todo = staffing(positions, processes, placed, going)
        for machine in todo.leave:
            if machine not in told:
                log.warning("Node %s is about to go: its workers leave at the next step boundary.", machine)
            if now >= told.get(machine, now) + _POLL_SECONDS or machine not in told:  # others may have joined there
                self._coordinator.ask_to_leave.remote(machine)
                told[machine] = now
        for key in todo.end:
            self._end(key)
        if now >= self._not_before:
            for _ in range(todo.request):
                self._request(going)

    def _request(self, going: frozenset[str]) -> None:
        self._requested += 1
        replacements = self._requested - self.grid.num_workers
        if self.max_replacements is not None and replacements > self.max_replacements:
            raise ReCycleError(f"More workers were lost than max_replacements={self.max_replacements} can replace.")
        seat = self._seats.take(
            [worker.seat for worker in self._workers.values()],
            going,
            [worker.process[0] for worker in self._workers.values() if worker.process is not None],
        )
        actor = ray_cluster.start_actor(
            WorkerActor, f"recycle-{self.name}-{self._requested}", self.needs, seat.group, seat.bundle
        )
        environment = {
            **self.environment,
            "RECYCLE_COORDINATOR": shown(self._address),
            "RECYCLE_KEY": self._key,
        }
        worker = _Worker(
            actor, seat, actor.introduce.remote(), actor.run.remote(environment, self.function, self.config)
        )
        self._workers[next(self._keys)] = worker

    def _drop_lost_seats(self) -> None:
        """Asks again, elsewhere, for workers that wait for a seat that will never be there."""
        taken = [worker.seat for worker in self._workers.values()]
        living = [worker.seat for worker in self._workers.values() if worker.process is not None]
        lost = self._seats.review(taken, living)
        for key in [key for key, worker in self._workers.items() if worker.seat in lost]:
            self._end(key)

    def _close(self) -> None:
        """Leaves nothing behind."""
        if self._coordinator is not None:
            with contextlib.suppress(self._ray.exceptions.RayError):  # it is gone, and its file stays
                self._ray.get(self._coordinator.forget.remote(), timeout=_FORGET_SECONDS)
            self._ray.kill(self._coordinator, no_restart=True)
        for key in list(self._workers):
            with contextlib.suppress(self._ray.exceptions.RayError):  # it is gone already
                self._end(key)
        self._seats.close()
