"""Planning by lanes: one lane is planned, and is the plan of all.

Concept: with n lanes (:mod:`~lightning_recycle.planning.lanes`) the busiest worker runs ceil(D M / n) micro-batches, as
many as in any plan: a stage with n live workers cannot do with less. What lanes waste are the workers beyond n of the
stages that have lost fewer. So they cost nothing where the stage that decides the period is one of those with the most
failures, as with equal costs or with failures normalized to all stages alike, and at most 1 - n / D of the time
elsewhere. A lane has no failures, and 1 / n of the operations: it is planned in a second, however many lanes there are,
and better than a large grid in the same time.

Contract: deterministic. The same lane is planned once in a process.

Must not know: how a lane is planned.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable

from lightning_recycle.planning.bounds import lower_bound
from lightning_recycle.planning.coded import CodedSchedule, coded
from lightning_recycle.planning.lanes import Lane, lane_problem
from lightning_recycle.planning.problem import Problem
from lightning_recycle.planning.schedule import Schedule

__all__ = ["CODED_FROM", "LanePlanner", "good_enough", "worth_coding"]

CODED_FROM = 100_000
"""Operations from which on plans are made by lanes: listing so many one by one takes seconds."""

_MOST_LISTED = 2_000_000  # operations that a plan may list one by one: half a minute of planning, and 400 MB
_GOOD = 1.01  # of the lower bound: up to here no plan that lists its operations is looked for beside the lanes'
_KEPT = 32  # lanes; about 100 kB each


def worth_coding(problem: Problem, least: int) -> bool:
    """Whether ``problem`` has at least ``least`` operations, and workers of equal speed in more than one pipeline."""
    return _operations(problem) >= least and problem.grid.pipelines > 1 and not problem.worker_factors


def good_enough(schedule: CodedSchedule) -> bool:
    """Whether nothing else should be looked for: the plan is near the lower bound, or a longer list takes too much."""
    problem = schedule.problem
    return _operations(problem) > _MOST_LISTED or schedule.period <= _GOOD * lower_bound(problem)


def _operations(problem: Problem) -> int:
    grid = problem.grid
    return (3 if problem.technique.decoupled else 2) * grid.global_microbatches * grid.stages


class LanePlanner:
    """Plans lanes with ``plan_lane`` and keeps the newest ones."""

    def __init__(self, plan_lane: Callable[[Problem, int], Schedule]) -> None:
        self._plan_lane = plan_lane
        self._kept: OrderedDict[Hashable, Lane] = OrderedDict()
        self._lock = threading.Lock()

    def plan(self, problem: Problem, effort: int) -> CodedSchedule:
        """The schedule for ``problem`` by lanes; ``effort`` is passed on.

        Raises:
            PlanningError: when a lane has no plan, or workers differ in speed.
        """
        key = lane_problem(problem), effort
        with self._lock:
            lane = self._kept.pop(key, None)
        if lane is None:
            lane = Lane.of(self._plan_lane(*key))
        with self._lock:
            self._kept[key] = lane
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return coded(problem, lane)
