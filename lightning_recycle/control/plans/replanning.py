"""Plans for a running training, whichever workers have failed.

The coordinator asks here when a generation begins. The fault-free plan is made before the workers start; plans for
every next single failure are made ahead, in a thread, by the planner that the user chose; a failure without a plan gets
the heuristic's at once. Costs come from a profile or, without one, from what the run has measured so far; once a plan
for other times is adopted (:mod:`~lightning_recycle.control.plans.drift`), they are that plan's.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from lightning_recycle.planning import (
    Costs,
    Grid,
    Problem,
    Schedule,
    Technique,
    Worker,
    distribution_of,
    lower_bound,
    normalize,
    plan,
    retime,
)
from lightning_recycle.planning.cancellation import Cancelled, cancelled_by
from lightning_recycle.planning.library import PlanLibrary

__all__ = ["OperationSeconds", "RunPlanner", "costs_from", "schedules_kept"]

log = logging.getLogger(__name__)

OperationSeconds: TypeAlias = Mapping[int, Mapping[str, float]]
"""Mean seconds of each kind of operation, by stage and name; empty before the first step."""

_KEPT_OPERATIONS = 2_000_000  # in the schedules that are kept; about 180 bytes each
_AHEAD_BUDGET = 20.0  # seconds that planning ahead may take, estimated from the first plan
_END_SECONDS = 30.0  # for a planner of the user's, which does not know that its plan is not wanted any more
_MOVE_SECONDS = 1.0  # for which a move to another stage holds everybody up, roughly
_MOVE_HORIZON = 1000  # steps within which it must pay
_MOVE_GAIN = 0.05  # of the period, at least: measured times are not exact

_Factors: TypeAlias = tuple[tuple[Worker, float], ...]


def costs_from(seconds: OperationSeconds, stages: int) -> Costs:
    """Costs in seconds from measured operations; one slot each while a stage has not measured all of its operations.

    A fused backward (BW) counts as half B, half W.
    """
    needed = ({"F", "B", "W"}, {"F", "BW"})
    if any(not any(names <= seconds.get(stage, {}).keys() for names in needed) for stage in range(stages)):
        return Costs.uniform(stages)

    def of(name: str, fused_share: float = 0.0) -> tuple[float, ...]:
        return tuple(seconds[s].get(name, fused_share * seconds[s].get("BW", 0.0)) for s in range(stages))

    return Costs(of("F"), of("B", 0.5), of("W", 0.5), of("REDUCE"), of("STEP"))


def schedules_kept(grid: Grid) -> int:
    """How many schedules of ``grid`` are kept: a run may see any number, and large ones take 100 MB each."""
    return max(1, _KEPT_OPERATIONS // (3 * grid.global_microbatches * grid.stages))


class RunPlanner:
    """Makes the schedules of one run.

    Args:
        grid: the grid of the run.
        planner: a planner or its name.
        technique: what the runtime can do.
        in_flight_limit: the limit per worker; by default 2 * S - 1 without a failure, none with one.
        costs: of the operations, in seconds; measured by default (one slot each before anything is measured).
        library: where plans are looked for and stored. Its plans are found by their costs, so without ``costs`` plans
            are made for one slot each.
    """

    def __init__(
        self,
        grid: Grid,
        planner: Any,
        technique: Technique,
        in_flight_limit: int | None = None,
        costs: Costs | None = None,
        library: PlanLibrary | None = None,
    ) -> None:
        self._grid = grid
        self._planner = planner
        self._technique = technique
        self._in_flight_limit = in_flight_limit
        self._costs = Costs.uniform(grid.stages) if costs is None and library is not None else costs
        self._library = library
        self._factors: _Factors = ()
        self._ahead: dict[tuple[frozenset[Worker], _Factors], Schedule] = {}
        self._plan_seconds = 0.0
        self._changed = threading.Condition()
        self._request: tuple[list[frozenset[Worker]], OperationSeconds] | None = None
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None  # started by the first request

    def prepare(self) -> None:
        """Makes the fault-free plan, with the planner that the user chose, however long that takes."""
        self._ahead[frozenset(), ()] = self._make(frozenset(), {}, self._planner, ())

    def plan(self, failed: frozenset[Worker], seconds: OperationSeconds) -> Schedule:
        """The schedule for ``failed``: the one made ahead or stored, or at once the heuristic's."""
        factors = _of_live(self._factors, failed)
        with self._changed:
            found = self._ahead.pop((failed, factors), None)
            if found is not None:
                self._ahead[failed, factors] = found  # now the last to be forgotten
                return found
        return self._make(failed, seconds, "heuristic", factors)

    def _keep(self, failed: frozenset[Worker], factors: _Factors, schedule: Schedule) -> None:
        """Keeps a plan; beyond the limit forgets the least recently used one, but never the fault-free plan."""
        with self._changed:
            self._ahead.pop((failed, factors), None)
            self._ahead[failed, factors] = schedule
            forgettable = [key for key in self._ahead if key != (frozenset(), ())]
            for key in forgettable[: -schedules_kept(self._grid)]:
                del self._ahead[key]

    def adopt(self, schedule: Schedule) -> None:
        """Plans for the times that ``schedule`` assumes from now on, and keeps it as the plan for its workers."""
        problem = schedule.problem
        self._costs, self._factors, self._library = problem.costs, problem.worker_factors, None
        self._keep(schedule.failed, _of_live(self._factors, schedule.failed), schedule)

    def forget(self, workers: Iterable[Worker]) -> None:
        """New processes hold the positions ``workers``: nothing is known of their speed."""
        gone = frozenset(workers)
        self._factors = tuple((worker, factor) for worker, factor in self._factors if worker not in gone)

    @property
    def planner(self) -> Any:
        """The planner that the user chose."""
        return self._planner

    @property
    def communication(self) -> float:
        """Seconds that a message between neighbouring stages takes, as far as known."""
        return self._costs.communication if self._costs is not None else 0.0

    def _make(self, failed: frozenset[Worker], seconds: OperationSeconds, planner: Any, factors: _Factors) -> Schedule:
        limit = self._in_flight_limit
        if limit is None and not failed:
            limit = 2 * self._grid.stages - 1
        problem = Problem(
            grid=self._grid,
            costs=self._costs or costs_from(seconds, self._grid.stages),
            failed=failed,
            technique=self._technique,
            in_flight_limit=None if limit is None else (limit,) * self._grid.stages,
            worker_factors=factors,
        )
        library = self._library  # another thread may adopt a plan meanwhile
        if library is not None and (stored := library.get(problem)) is not None:
            return stored
        started = time.monotonic()
        schedule = plan(problem, planner)
        self._plan_seconds = time.monotonic() - started
        if library is not None and planner is self._planner:
            library.put(schedule)
        return schedule

    def retime(self, schedule: Schedule, seconds: OperationSeconds) -> Schedule:
        """Returns ``schedule`` with the times that follow from the measured operations."""
        if not seconds:
            return schedule
        problem, measured = schedule.problem, {}
        for stage, by_name in seconds.items():
            lead = min(problem.live_workers(stage))  # the worker that measured them
            factor = problem.factor(lead)
            measured[stage] = {name: value if name == "REDUCE" else value / factor for name, value in by_name.items()}
        return retime(schedule, replace(costs_from(measured, self._grid.stages), communication=self.communication))

    def propose_move(self, failed: frozenset[Worker], vacant: Worker, seconds: OperationSeconds) -> Worker | None:
        """A healthy worker of another stage that should take the position ``vacant``, if there is one.

        There is one if failure normalization prefers the failure in another stage and the shorter period pays for the
        transfer (see ``_MOVE_SECONDS``). Nobody moves before the operations are measured.
        """
        costs = self._costs or costs_from(seconds, self._grid.stages)
        if len(seconds) < self._grid.stages and self._costs is None:
            return None
        actual = distribution_of(self._grid, failed)
        wanted = normalize(self._grid, costs, len(failed), technique=self._technique)
        if wanted[vacant.stage] >= actual[vacant.stage]:
            return None

        def period(gone: frozenset[Worker]) -> float:
            return lower_bound(Problem(self._grid, costs, gone, self._technique))

        movers = [
            worker
            for worker in reversed(self._grid.workers())  # the leader is among the first pipelines
            if worker not in failed and wanted[worker.stage] > actual[worker.stage]
        ]
        if not movers:
            return None
        best = min(movers, key=lambda mover: period(failed - {vacant} | {mover}))
        now = period(failed)
        gain = now - period(failed - {vacant} | {best})
        return best if gain > _MOVE_GAIN * now and gain * _MOVE_HORIZON > _MOVE_SECONDS else None

    def plan_ahead(self, failed: frozenset[Worker], seconds: OperationSeconds) -> None:
        """Begins to plan for every failure that may follow ``failed``; replaces an earlier request."""
        survivors = [worker for worker in self._grid.workers() if worker not in failed]
        candidates = [
            failed | {worker} for worker in survivors if any(peer not in failed for peer in self._grid.peers(worker))
        ]
        affordable = min(int(_AHEAD_BUDGET / max(self._plan_seconds, 1e-3)), schedules_kept(self._grid))
        if len(candidates) > affordable:
            log.info("Planning ahead for %d of %d possible failures.", affordable, len(candidates))
        with self._changed:
            self._request = (candidates[:affordable], {stage: dict(by_name) for stage, by_name in seconds.items()})
            self._changed.notify()
            if self._thread is None and not self._closed.is_set():
                self._thread = threading.Thread(target=self._plan_requests, name="recycle-plan-ahead", daemon=True)
                self._thread.start()

    def _plan_requests(self) -> None:
        """The planning thread: works on the newest request."""
        with contextlib.suppress(Cancelled), cancelled_by(self._closed):
            self._plan_newest_requests()

    def _plan_newest_requests(self) -> None:
        while True:
            with self._changed:
                while self._request is None and not self._closed.is_set():
                    self._changed.wait()
                if self._closed.is_set():
                    return
                request = self._request
            assert request is not None
            for candidate in request[0]:
                if self._request is not request or self._closed.is_set():
                    break
                try:
                    factors = _of_live(self._factors, candidate)
                    self._keep(candidate, factors, self._make(candidate, request[1], self._planner, factors))
                except Exception as error:  # a failure without a plan gets one at once: this thread must go on
                    log.warning("No plan could be made ahead for the failure of %s: %s", sorted(candidate), error)
            else:
                with self._changed:
                    if self._request is request:
                        self._request = None

    def close(self) -> None:
        """Stops planning ahead: gives up the plan that is being made, and waits until the thread has ended."""
        with self._changed:
            self._closed.set()
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(_END_SECONDS)
            if self._thread.is_alive():
                log.warning("The planner %r has not ended after %g s and is left behind.", self._planner, _END_SECONDS)


def _of_live(factors: _Factors, failed: frozenset[Worker]) -> _Factors:
    return tuple((worker, factor) for worker, factor in factors if worker not in failed)
