"""The list-scheduling heuristic: a good plan for any failures, immediately.

It plays the iteration forward in time under a priority rule (:mod:`list_scheduling`), searches for the best rule
(:mod:`rule_search`), then for an order that is as fast with less memory, and fuses the backwards that were split for
nothing; where memory makes that slow, forwards may be computed again (:mod:`refinement`). Identical pipelines, as
without failures, are planned once and copied. Where workers differ in speed, two distributions of the micro-batches are
searched. Plans are deterministic and keep within memory and in-flight limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import sub

from lightning_recycle.arguments import whole
from lightning_recycle.errors import PlanningError
from lightning_recycle.planning.compact_schedule import (
    COMPACT_FROM,
    CompactSchedule,
    Lane,
    compact,
    good_enough,
    lane_problem,
    worth_compacting,
)
from lightning_recycle.planning.grid import Grid
from lightning_recycle.planning.list_scheduling import one_f_one_b, zero_bubble
from lightning_recycle.planning.problem import Problem, lower_bound
from lightning_recycle.planning.refinement import with_fused_backwards, with_least_memory, with_recomputation
from lightning_recycle.planning.rerouting import reroute
from lightning_recycle.planning.rule_search import Solution, search
from lightning_recycle.planning.schedule import Schedule, gc_paused, is_better
from lightning_recycle.planning.timing import Codes, MicrobatchVariation, Timing, assemble, best_timing, operations_of

DEFAULT_EFFORT = 800_000
"""Operations to play in search of a schedule: about 1 s, 0.1 s for small grids.

Grids with more operations than this get only a few rules.
"""

_LEANING = 1.5
"""Power of the workers' factors in the other distribution at unequal speeds.

A slow worker gets fewer micro-batches than its speed suggests, because the pipeline also waits for its individual
operations.
"""

_LEANING_SHARE = 4
"""The effort is so many times that for the other distribution."""


@dataclass(frozen=True, slots=True)
class HeuristicPlanner:
    """The planner "heuristic"; see :func:`heuristic` for its settings."""

    effort: int = DEFAULT_EFFORT
    compact_from: int = COMPACT_FROM

    def __post_init__(self) -> None:
        whole("HeuristicPlanner", "compact_from", self.compact_from)
        whole("HeuristicPlanner", "effort", self.effort)

    def plan(self, problem: Problem) -> Schedule:
        """See :func:`heuristic`."""
        return heuristic(problem, self.effort, self.compact_from)


def heuristic(problem: Problem, effort: int = DEFAULT_EFFORT, compact_from: int = COMPACT_FROM) -> Schedule:
    """A schedule for ``problem``: 1F1B where it applies, else a list schedule.

    1F1B applies without failure, slow worker or split. Among the schedules found, the result has the smallest period
    (with the staggered optimizer, else makespan), then the smallest makespan, then the least memory on the tightest
    worker, then in the sum: see :mod:`~lightning_recycle.planning.schedule`.

    Args:
        problem: the problem to plan.
        effort: number of operations to play in total; 0 for the plain rule alone, "backward, then forward, then weight
            gradient, oldest first", under which the paper's techniques can be compared.
        compact_from: number of operations from which on all lanes get one plan
            (:mod:`~lightning_recycle.planning.compact_schedule`), if that is near the lower bound or a plan that lists
            all operations would take too long.
    """
    if (fewer := problem.without_vacant_lanes()) is not problem:
        return heuristic(fewer, effort, compact_from).expand().under(problem)
    if not worth_compacting(problem, compact_from):
        return _listed(problem, effort)
    with gc_paused():
        by_lanes = compact(problem, _lane(lane_problem(problem), effort))
    if good_enough(by_lanes):
        return by_lanes
    listed = _listed(problem, effort)
    return listed if is_better(listed, by_lanes) else by_lanes


def heuristic_with_variation(
    schedule: Schedule, variation: MicrobatchVariation, effort: int = DEFAULT_EFFORT
) -> tuple[Schedule, Timing]:
    """A schedule where stages share layers, planned by what each micro-batch takes.

    Args:
        schedule: a schedule for the mean micro-batch, which lists all operations; the result is at most 0.1 % slower.

    Returns:
        The schedule, with the times of the mean micro-batch, and the real times of its operations. If more
        micro-batches are in flight than the memory has room for in the mean, its problem has their number as a limit
        instead of the memory.
    """
    problem = exact = schedule.problem
    if problem.memory is not None:
        fixed = map(sub, problem.memory.fixed, variation.reserved)
        exact = replace(problem, memory=replace(problem.memory, fixed=tuple(fixed)))
    codes, sequence = operations_of(schedule, exact, variation)
    with gc_paused():
        found = _best(codes, effort, [sequence] if _fits(codes, sequence) else [])
    mean = Codes(problem, codes.routes, fused=codes.fused)
    schedule = assemble(mean, found.sequence, best_timing(mean, found.sequence))
    return schedule if schedule.fits(problem) else _counted(schedule), found.timing


def with_memory_descent(schedule: Schedule) -> Schedule:
    """A plan as fast as ``schedule``, which lists all operations, with less memory."""
    codes, sequence = operations_of(schedule, schedule.problem)
    with gc_paused():
        found = _solved(codes, DEFAULT_EFFORT, [sequence])
    return found if found.period <= schedule.period * (1 + 1e-9) else schedule


def _counted(schedule: Schedule) -> Schedule:
    """The schedule with the peaks of its micro-batches in flight as its limit."""
    problem = schedule.problem
    peaks = [max(map(schedule.peak_in_flight, problem.live_workers(stage))) for stage in range(problem.grid.stages)]
    return schedule.under(replace(problem, memory=None, in_flight_limit=tuple(peaks)))


@dataclass(frozen=True, slots=True)
class VariedPlanner:
    """A heuristic planner for stages that share layers.

    Plans keep within the memory that problems give to the mean micro-batch. ``split`` and ``fused`` are the variations
    where backwards may be split, and where they are not.
    """

    planner: HeuristicPlanner
    split: MicrobatchVariation
    fused: MicrobatchVariation

    def plan(self, problem: Problem) -> Schedule:
        """See :func:`heuristic_with_variation`."""
        schedule = self.planner.plan(problem)
        if isinstance(schedule, CompactSchedule):
            return schedule
        variation = (self.split if problem.technique.split_backward else self.fused).alike_in_memory()
        return heuristic_with_variation(schedule, variation, self.planner.effort)[0]


def _listed(problem: Problem, effort: int) -> Schedule:
    """The plan that lists every operation."""
    return with_recomputation(problem, lambda other, share: _planned(other, int(effort * share)))


def _planned(problem: Problem, effort: int) -> Schedule:
    """As :func:`_listed`, for a problem in which nothing is computed again."""
    if problem.stays_home and not problem.technique.split_backward:
        return one_f_one_b(problem)
    with gc_paused():
        return _list_schedule(problem, effort)


@lru_cache(maxsize=32)  # about 100 kB each
def _lane(problem: Problem, effort: int) -> Lane:
    """The lane that solves ``problem``, of :func:`lane_problem`."""
    return Lane.of(_listed(problem, effort))


def _solved(codes: Codes, effort: int, starts: Sequence[list[int]] = ()) -> Schedule:
    solution = _best(codes, effort, starts)
    return assemble(codes, solution.sequence, solution.timing)


def _list_schedule(problem: Problem, effort: int) -> Schedule:
    codes = _codes(problem)
    if not problem.stays_home:
        first = _solved(codes, effort)
        leaning = _codes(problem, _LEANING)
        if not effort or leaning.routes == codes.routes or first.period <= lower_bound(problem) * (1 + 1e-9):
            return first
        other = _solved(leaning, effort // _LEANING_SHARE)
        return other if is_better(other, first) else first
    # All pipelines are alike, so plan one.
    grid = problem.grid
    one = _codes(replace(problem, grid=Grid(1, grid.stages, grid.microbatches)))
    sequence: list[int] = []
    for code in _best(one, effort).sequence:
        key, number = divmod(code, grid.microbatches)
        sequence += range(key * codes.n + number, (key + 1) * codes.n, grid.microbatches)
    return assemble(codes, sequence, best_timing(codes, sequence))


def _best(codes: Codes, effort: int, starts: Sequence[list[int]] = ()) -> Solution:
    """The best order of the operations; ``starts`` are orders that fit into memory."""
    solution = search(codes, effort, [*starts, *_zero_bubble_start(codes)])
    if effort:
        solution = with_least_memory(codes, solution, effort)
    sequence, timing = with_fused_backwards(codes, solution.sequence, solution.timing)
    return Solution.of(codes, solution.rule, sequence, timing)


def _fits(codes: Codes, sequence: Sequence[int]) -> bool:
    """Whether no worker exceeds its memory, with the bytes of each micro-batch."""
    memory = codes.problem.memory
    if memory is None:
        return True
    peaks = codes.peaks(sequence, memory)
    return all(peak <= memory.fixed[stage] + memory.room(stage) for stage, peak in enumerate(peaks))


def _zero_bubble_start(codes: Codes) -> list[list[int]]:
    """ZB-H1, if there is no failure and memory for it."""
    problem = codes.problem
    if not problem.stays_home or codes.fused:
        return []
    try:
        limit = problem.counted().in_flight_limit or (problem.grid.microbatches,) * codes.stages
    except PlanningError:  # it splits every backward, for which there is no memory
        return []
    order = zero_bubble(codes, limit)
    return [order] if _fits(codes, order) else []


def _codes(problem: Problem, power: float = 1.0) -> Codes:
    """The operations, routed as if workers' factors were raised to ``power``."""
    routes = reroute(problem.grid, problem.failed, {w: factor**power for w, factor in problem.worker_factors})
    return Codes(problem, routes, fused=not problem.technique.split_backward)
