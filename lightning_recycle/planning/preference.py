"""Which of two plans is better: the faster one; of equally fast ones, the one that asks for less memory.

Concept: plans whose periods differ by at most 0.1 % are equally fast. Of these the shorter makespan counts, with the
same allowance, then the memory on the tightest worker, as a fraction of what a worker of its stage has, then the sum
over all workers. Memory is in bytes where the problem has sizes, otherwise in micro-batches in flight: one measure for
every problem, :func:`measure_of`. A search for plans with less memory, by rules or by a solver, minimises what
:func:`demand_of` returns, under the period that it has found.

Contract: pure.

Must not know: how plans are made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter

from lightning_recycle.planning.coded import CodedSchedule
from lightning_recycle.planning.memory import Memory
from lightning_recycle.planning.problem import Problem
from lightning_recycle.planning.schedule import Schedule

__all__ = ["EQUALLY_FAST", "best_of", "demand_of", "is_better", "measure_of"]

EQUALLY_FAST = 1e-3
"""Relative difference up to which two periods, or two makespans, count as equal."""


def measure_of(problem: Problem) -> Memory:
    """The memory by which plans of a problem are compared: its own in bytes, else one of 1 in which a micro-batch takes
    1 from F to W or BW.
    """
    return problem.memory or Memory.counting((1,) * problem.grid.stages)


def demand_of(schedule: Schedule) -> tuple[float, float]:
    """What a plan asks of the workers' memory.

    Returns:
        The peak on the tightest worker, as a fraction of its stage's capacity (without sizes in bytes: micro-batches in
        flight), and the sum of all workers' peaks, in bytes (micro-batches).
    """
    if isinstance(schedule, CodedSchedule):  # lanes are alike, but for a micro-batch
        tightest, total = demand_of(schedule.lane.schedule())
        return tightest, total * schedule.workers.places.lanes
    memory = measure_of(schedule.problem)
    peaks = [(worker.stage, schedule.peak(worker, memory)) for worker in schedule.live_workers]
    return max(peak / memory.capacity[stage] for stage, peak in peaks), sum(peak for _, peak in peaks)


def best_of(schedules: Sequence[Schedule]) -> Schedule:
    """The best of several plans for the same problem; the first of those that are equally good."""
    fast = _fastest(schedules, attrgetter("period"))
    short = _fastest(fast, attrgetter("makespan"))

    def criteria(schedule: Schedule) -> tuple[float, ...]:  # rounding must not decide
        return tuple(round(value, 9) for value in (*demand_of(schedule), schedule.period, schedule.makespan))

    return min(short, key=criteria)


def _fastest(schedules: Sequence[Schedule], seconds: Callable[[Schedule], float]) -> list[Schedule]:
    least = min(map(seconds, schedules)) * (1 + EQUALLY_FAST)
    return [schedule for schedule in schedules if seconds(schedule) <= least]


def is_better(one: Schedule, other: Schedule) -> bool:
    """Whether ``one`` is the better of two plans for the same problem; False if they are equally good."""
    return one is not other and best_of([other, one]) is one
