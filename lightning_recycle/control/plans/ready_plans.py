"""Plans that are ready: one for each distribution of failures, whoever has failed.

Concept: a plan is kept under what it is for (:func:`~lightning_recycle.planning.routing.representative`) and given to
the workers that need it by renaming. With each comes where it is from, and whether it is from the planner that the user
chose.

Contract: usable from several threads; keeps as many schedules as memory is set aside for, those used last, and always
the fault-free one.

Must not know: how plans are made.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from lightning_recycle.planning.compact_schedule import CompactSchedule
from lightning_recycle.planning.grid import Grid, Worker
from lightning_recycle.planning.problem import Problem
from lightning_recycle.planning.routing import renamed, representative
from lightning_recycle.planning.schedule import Schedule

__all__ = ["PlanKey", "ReadyPlan", "ReadyPlans", "key_of", "newest", "schedules_kept"]

_KEPT_OPERATIONS = 2_000_000  # in the schedules that are kept; about 180 bytes each

PlanKey: TypeAlias = tuple[frozenset[Worker], tuple[tuple[Worker, float], ...]]


def schedules_kept(grid: Grid) -> int:
    """How many schedules of ``grid`` are kept: a run may see any number, and large ones take 100 MB each."""
    return max(1, _KEPT_OPERATIONS // (3 * grid.global_microbatches * grid.stages))


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
    return 3 * schedule.grid.global_microbatches * schedule.grid.stages


@dataclass(frozen=True, slots=True)
class ReadyPlan:
    """A plan, and where it is from.

    Args:
        schedule: the plan.
        source: "library"; "ahead", made before it was needed; "made", when it was needed; or "better", found while
            another one ran.
        final: whether the planner that the user chose has nothing to add to it.
    """

    schedule: Schedule
    source: str
    final: bool


class ReadyPlans:
    """The plans that are kept for a run on ``grid``."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._plans: dict[PlanKey, ReadyPlan] = {}  # the one used last is the last
        self._lock = threading.Lock()

    def find(self, problem: Problem) -> ReadyPlan | None:
        """The plan for the failed and slow workers of ``problem``, whatever its costs and limits are."""
        key = key_of(problem)
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
        key = key_of(plan.schedule.problem)
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
            largest = max((_held(plan.schedule) for plan in self._plans.values()), default=0)
        return max(1, _KEPT_OPERATIONS // largest) if largest else schedules_kept(self._grid)


def key_of(problem: Problem) -> PlanKey:
    """What all plans have in common that one can be made of another by renaming workers."""
    common = representative(problem)
    return common.failed, common.worker_factors
