"""Maker of single plans: the questions, where each is answered, and a cache of the plans that are ready.

Concept: a question goes to the planning process or, where that is no use, to the background thread:

| plan | where it is made |
|---|---|
| by the heuristic, for a small grid | in the background thread; in need, at once |
| by the heuristic, for a large grid | in the planning process; in the thread when that is lost |
| by the planner that the user chose | in the planning process |

With ``split_backward="auto"`` every plan is fused until all stages have tried what splitting costs. From then on a
problem is asked with what B and W take; both plans are made, and the better one is kept
(:func:`~lightning_recycle.planning.splitting.choose_technique`). A plan counts as what it takes
without waiting for processors that workers share, but not as less than what keeps these busy.

A plan is kept under what it is for (:func:`~lightning_recycle.planning.rerouting.representative`), whoever has failed,
and given to the workers that need it by renaming.

Contract: questions are pure and picklable; the rest is usable from several threads. As many schedules are kept as
memory is set aside for, those used last, and always the fault-free one.

Must not know: which plans are wanted.
"""

from __future__ import annotations

import logging
import pickle
import threading
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

from lightning_recycle.control.plans.assumptions import Assumptions
from lightning_recycle.control.plans.planning_queue import InThread
from lightning_recycle.errors import ConfigurationError, PlanningError
from lightning_recycle.planning.child_process import ProcessLostError
from lightning_recycle.planning.compact_schedule import CompactSchedule
from lightning_recycle.planning.costs import cost_difference
from lightning_recycle.planning.grid import Grid, Worker
from lightning_recycle.planning.heuristic_planner import HeuristicPlanner
from lightning_recycle.planning.plan_library import PlanLibrary
from lightning_recycle.planning.planner import Planner, solve
from lightning_recycle.planning.problem import Problem
from lightning_recycle.planning.rerouting import alike, renamed, representative
from lightning_recycle.planning.schedule import PlanResult, Schedule
from lightning_recycle.planning.splitting import SplitCosts, TechniqueChoice, choose_technique

_KEPT_OPERATIONS = 2_000_000  # in the schedules that are kept; about 180 bytes each
_KEPT = 4_096  # choices; as many plans are never kept
_SAME_COSTS = 0.1  # of the mean operation: a plan for costs that differ less is not made again
_AS_GOOD = 0.001  # of a period: a stored plan that is so near to the lower bound needs no other

log = logging.getLogger(__name__)

_PlanKey: TypeAlias = tuple[frozenset[Worker], tuple[tuple[Worker, float], ...]]


def _operations(grid: Grid) -> int:
    return 3 * grid.global_microbatches * grid.stages


def newest(schedules: Sequence[Schedule]) -> int:
    """How many of ``schedules``, from the last one on, may be kept: at least one."""
    left, count = _KEPT_OPERATIONS, 0
    for schedule in reversed(schedules):
        left -= _held(schedule)
        if left < 0 and count:
            break
        count += 1
    return count


def _held(schedule: Schedule) -> int:
    """The operations that take as much memory as ``schedule``; for a compact one, which worker has which lane."""
    if isinstance(schedule, CompactSchedule):
        return len(schedule.workers)
    return _operations(schedule.grid)


@dataclass(frozen=True, slots=True)
class ReadyPlan:
    """A plan, and where it is from.

    Args:
        schedule: the plan.
        asked: the problem that it was made for; that of the plan has fused backwards if these were better.
        source: "library"; "ahead", made before it was needed; "made", when it was needed; or "better", found while
            another one ran.
        final: whether the planner that the user chose has nothing to add to it.
        seconds: how long it took to make it.
        backend: the planner that was asked, or "library".
    """

    schedule: Schedule
    asked: Problem
    source: str
    final: bool
    seconds: float = 0.0
    backend: str = "library"

    def serves(self, problem: Problem) -> bool:
        """Whether it is what planning ``problem`` would lead to, or nearly so."""
        is_near = cost_difference(self.asked.costs, problem.costs) <= _SAME_COSTS
        return is_near and alike(replace(self.asked, costs=problem.costs), problem)


class ReadyPlans:
    """The plans that are kept for a run on ``grid``."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._plans: dict[_PlanKey, ReadyPlan] = {}  # the one used last is the last
        self._lock = threading.Lock()

    def find(self, problem: Problem) -> ReadyPlan | None:
        """The plan for the failed and slow workers of ``problem``, whatever its costs and limits are."""
        key = _key_of(problem)
        with self._lock:
            found = self._plans.pop(key, None)
            if found is None:
                return None
            self._plans[key] = found
        own = found.schedule.problem
        schedule = renamed(found.schedule, replace(own, failed=problem.failed, worker_factors=problem.worker_factors))
        return replace(found, schedule=schedule)

    def keep(self, plan: ReadyPlan) -> None:
        """Keeps a plan; beyond the limit forgets the least recently used one, but never the fault-free plan."""
        key = _key_of(plan.schedule.problem)
        with self._lock:
            self._plans.pop(key, None)
            self._plans[key] = plan
            forgettable = [key for key in self._plans if key != (frozenset(), ())]
            kept = newest([self._plans[key].schedule for key in forgettable])
            for key in forgettable[: len(forgettable) - kept]:
                del self._plans[key]

    @property
    def capacity(self) -> int:
        """How many plans like the largest one here can be kept."""
        with self._lock:
            largest = max((_held(plan.schedule) for plan in self._plans.values()), default=_operations(self._grid))
        return max(1, _KEPT_OPERATIONS // largest)


def _key_of(problem: Problem) -> _PlanKey:
    """Properties that plans share if one can be made of another by renaming workers."""
    common = representative(problem)
    return common.failed, common.worker_factors


# ---------------------------------------------------------------------- questions


PlanAnswer: TypeAlias = tuple[PlanResult, TechniqueChoice | None]
"""A plan, and the comparison of split with fused backwards, if that was asked."""


def make_plan(problem: Problem, planner: Planner, splitting: SplitCosts | None = None) -> PlanAnswer:
    """The plan of ``planner`` for ``problem``.

    Args:
        problem: the problem; with ``splitting``, with the costs of split backwards.
        planner: the planner.
        splitting: the costs of splitting, if the better of the plans with split and with fused backwards is wanted.

    Raises:
        PlanningError: when there is none.
    """
    if splitting is None or not problem.technique.split_backward:
        return solve(problem, planner), None
    return choose_technique(problem, splitting, partial(solve, planner=planner))


class PlanMaker:
    """The planners of a run, and the library of its plans.

    Args:
        planner: the planner that the user chose.
        library: where plans are looked for and stored.
        is_large: whether plans of the heuristic are made in the planning process.

    Attributes:
        chosen: the planner that the user chose.
        quick: the planner of plans ahead and in need: the chosen one if it is the heuristic, else the heuristic.
        library: as above; None once its plans are for other times than those of the run.
    """

    def __init__(self, planner: Planner, library: PlanLibrary | None, is_large: bool) -> None:
        self.chosen = planner
        self.quick = planner if isinstance(planner, HeuristicPlanner) else HeuristicPlanner()
        self.library = library
        self._choices: dict[_PlanKey, TechniqueChoice] = {}
        self.is_large = is_large

    @property
    def improves(self) -> bool:
        """Whether the chosen planner may find better plans than the quick one."""
        return self.quick is not self.chosen

    def choice(self, problem: Problem) -> TechniqueChoice | None:
        """The newest choice between split and fused backwards for the failed and slow workers of ``problem``."""
        return self._choices.get(_key_of(problem))

    def as_chosen(self, problem: Problem, assumed: Assumptions) -> Problem:
        """``problem`` with fused backwards, if these were chosen for its failed and slow workers."""
        choice = self.choice(problem)
        if assumed.splitting is None or choice is None or choice.splits:
            return problem
        return assumed.splitting.of_fused(problem)

    def make_at_once(self, problem: Problem, assumed: Assumptions, planner: Planner, source: str) -> ReadyPlan:
        """The plan of ``planner``, made in this thread.

        Raises:
            PlanningError: when there is none.
        """
        answer = make_plan(problem, assumed.planner(planner), assumed.splitting)
        return self._learn(problem, planner, source, answer)

    def make(self, problem: Problem, assumed: Assumptions, source: str) -> Generator[Any, Any, ReadyPlan]:
        """The plan of the quick planner, as a part of a job."""
        question = partial(make_plan, problem, assumed.planner(self.quick), assumed.splitting)
        answer = None
        if self.is_large:
            try:
                answer = yield question
            except ProcessLostError as error:
                log.warning("The planning process is no use (%s): planning in a thread of the coordinator.", error)
        if answer is None:
            answer = yield InThread(question)
        return self._learn(problem, self.quick, source, answer)

    def search(self, problem: Problem, assumed: Assumptions, source: str) -> Generator[Any, Any, ReadyPlan]:
        """The plan of the chosen planner for the technique that was chosen, as a part of a job."""
        asked = self.as_chosen(problem, assumed)
        answer = yield partial(make_plan, asked, assumed.planner(self.chosen))
        return replace(self._learn(asked, self.chosen, source, answer), asked=problem)

    def stored(self, problem: Problem, *, needed: bool = False) -> ReadyPlan | None:
        """The plan in the library; ``needed``: workers wait for it."""
        library = self.library  # another thread may take it away meanwhile
        if library is None:
            return None
        stored = library.lookup(problem)
        if stored is None:
            failed = ", ".join(map(str, sorted(problem.failed))) or "no failure"
            level = logging.WARNING if needed else logging.INFO
            log.log(level, "The plan library has none for %s: %s.", failed, library.miss(problem))
            return None
        is_final = stored.gap <= _AS_GOOD or library.has(problem)
        return ReadyPlan(stored.schedule, stored.schedule.problem, "library", is_final)

    def _learn(self, problem: Problem, planner: Planner, source: str, answer: PlanAnswer) -> ReadyPlan:
        """Keeps the choice of an answer; stores the plan of the chosen planner, unless the library has one as good."""
        (result, choice), library = answer, self.library
        if choice is not None:
            self._choices[_key_of(problem)] = choice
            while len(self._choices) > _KEPT:
                del self._choices[next(iter(self._choices))]
        if result.warning is not None:
            log.warning("%s", result.warning)
        if library is not None and planner is self.chosen:
            try:
                stored = library.get(problem)
                if stored is None or result.schedule.period < stored.period * (1 - _AS_GOOD):
                    library.put(result)
            except PlanningError as error:  # the plan is good, whether it can be stored or not
                log.warning("%s", error)
        is_final = planner is self.chosen
        return ReadyPlan(result.schedule, problem, source, is_final, result.seconds, result.backend)


def check_travels(planner: Planner) -> None:
    """Raises ConfigurationError for a planner of a class that the planning process cannot import, or with a lock.

    The heuristic, also a user's version of it, plans in this process where it has to.
    """
    if isinstance(planner, HeuristicPlanner):
        return
    why = ""
    try:
        pickle.dumps(planner)
    except Exception as error:  # whatever a user's class raises
        why = str(error)
    if type(planner).__module__ == "__main__":
        why = "its class is in the script"
    if why:
        raise ConfigurationError(
            f"planner={planner!r} plans in a process beside the coordinator, and cannot be sent there: {why}. Define"
            " its class in a module that can be imported, without open files or locks."
        )
