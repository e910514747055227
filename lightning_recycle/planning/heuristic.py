"""The list-scheduling heuristic: a good plan for any failures, immediately.

Concept: play the iteration forward in time under a priority rule (see ``list_scheduling``), search for the rule with
the best result (see ``rule_search``), then for small changes of its order (see ``local_search``), and fuse the
backwards that were split for nothing (see ``coupling``). Where memory makes that slow, forwards may be computed again
(see ``recomputation``). Identical pipelines, as without failures, are planned once
and copied. Where workers differ in speed, the search also covers how many micro-batches each of them runs: the
distribution that balances the work best is not always best for the pipeline as a whole.

Contract: deterministic; respects the memory and the in-flight limit; with effort, never worse than the plan that
assumes equally fast workers, nor than the one under the limit in micro-batches that bytes amount to; with ``effort=0``,
the plain rule alone.

Must not know: the validator (which is written from the definition, independently), exact solvers.

Source: ReCycle (arXiv 2405.14009), sections 3 and 4, for the three techniques.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import add, sub

from lightning_recycle.arguments import is_integer, whole
from lightning_recycle.errors import ConfigurationError, PlanningError
from lightning_recycle.planning.bounds import lower_bound, makespan_lower_bound
from lightning_recycle.planning.coded import CodedSchedule
from lightning_recycle.planning.collector import collector_paused
from lightning_recycle.planning.coupling import coupled
from lightning_recycle.planning.grid import Grid
from lightning_recycle.planning.lane_planning import CODED_FROM, LanePlanner, good_enough, worth_coding
from lightning_recycle.planning.local_search import local_search
from lightning_recycle.planning.one_f_one_b import one_f_one_b
from lightning_recycle.planning.problem import Problem
from lightning_recycle.planning.recomputation import with_recomputation
from lightning_recycle.planning.routing import reroute
from lightning_recycle.planning.rule_search import Solution, goal_of, search
from lightning_recycle.planning.schedule import Schedule
from lightning_recycle.planning.timing import Codes, Timing, assemble, best_timing, operations_of, retime
from lightning_recycle.planning.turns import Turns
from lightning_recycle.planning.zero_bubble import zero_bubble

__all__ = ["DEFAULT_EFFORT", "HeuristicPlanner", "PlannerInTurns", "heuristic", "heuristic_in_turns"]

DEFAULT_EFFORT = 800_000
"""Operations to play in search of a better schedule: at most about 1 s, and 0.1 s for small grids. Grids with more
operations than this get only a few rules."""

_LOCAL_SHARE = 2
"""A change of the local search counts as so many plays of the whole."""

_LEANINGS = (1.2, 1.5, 2.0)
"""Other distributions at unequal speeds: each worker's factor is raised to this power, so that a slow worker gets fewer
micro-batches than its speed suggests. In one of eight random small grids that was better, by up to a third, because the
pipeline also waits for the slow worker's individual operations. Giving it more was never better."""


@dataclass(frozen=True, slots=True)
class HeuristicPlanner:
    """The planner "heuristic"; see :func:`heuristic` for its settings."""

    effort: int = DEFAULT_EFFORT
    coded_from: int = CODED_FROM

    def __post_init__(self) -> None:
        whole("HeuristicPlanner", "coded_from", self.coded_from)
        if not is_integer(self.effort, 0):
            raise ConfigurationError(
                f"HeuristicPlanner(effort={self.effort!r}): give a number of operations of at least 0."
            )

    def plan(self, problem: Problem) -> Schedule:
        """See :func:`heuristic`."""
        return heuristic(problem, self.effort, self.coded_from)


def heuristic(problem: Problem, effort: int = DEFAULT_EFFORT, coded_from: int = CODED_FROM) -> Schedule:
    """A schedule for ``problem``: 1F1B where it applies (no failure, slow worker or decoupling), else a list schedule.

    Among the schedules found, it has the smallest period (with the staggered optimizer, else makespan), then the
    smallest makespan, then the fewest micro-batches in flight.

    Args:
        problem: the problem to plan.
        effort: number of operations to play in total; 0 for the plain rule alone, "backward, then forward, then weight
            gradient, oldest first", under which the paper's techniques can be compared.
        coded_from: number of operations from which on all lanes get one plan
            (:mod:`~lightning_recycle.planning.lane_planning`), if that is near the lower bound or a plan that lists
            all operations would take too long.
    """
    if not worth_coding(problem, coded_from):
        return _listed(problem, effort)
    with collector_paused():
        coded = _lanes.plan(problem, effort)
    return coded if good_enough(coded) else min(coded, _listed(problem, effort), key=_score)


def heuristic_in_turns(schedule: Schedule, turns: Turns, effort: int = DEFAULT_EFFORT) -> tuple[Schedule, Timing]:
    """A schedule where stages share layers, planned by what each micro-batch takes.

    Args:
        schedule: one for the mean micro-batch, which lists all operations; what is found is no worse.
        turns: how micro-batches differ.
        effort: see :func:`heuristic`.

    Returns:
        The schedule, with the times of the mean micro-batch, and the times of its operations as they are. If more
        micro-batches are in flight than the memory has room for in the mean, its problem has their number as a limit
        instead of the memory.
    """
    problem = exact = schedule.problem
    if problem.memory is not None:
        fixed = map(sub, problem.memory.fixed, turns.reserved)
        exact = replace(problem, memory=replace(problem.memory, fixed=tuple(fixed)))
    codes, sequence = operations_of(schedule, exact, turns)
    timing, fits = best_timing(codes, sequence), _fits(codes, sequence)
    with collector_paused():
        codes, found = _best(codes, effort, [sequence] if fits else [])
    if fits and (timing.period, timing.makespan) <= (found.timing.period, found.timing.makespan):
        return schedule, timing
    mean = Codes(problem, codes.routes, fused=codes.fused)
    schedule = assemble(mean, found.sequence, best_timing(mean, found.sequence))
    return schedule if schedule.fits(problem) else _counted(schedule), found.timing


def _counted(schedule: Schedule) -> Schedule:
    """The schedule with a limit of as many micro-batches as it has in flight, instead of memory."""
    problem = schedule.problem
    peaks = [max(map(schedule.peak_in_flight, problem.live_workers(stage))) for stage in range(problem.grid.stages)]
    return schedule.under(replace(problem, memory=None, in_flight_limit=tuple(peaks)))


@dataclass(frozen=True, slots=True)
class PlannerInTurns:
    """A heuristic planner for stages that share layers, within the memory that problems give to the mean micro-batch.

    Args:
        planner: for the mean micro-batch.
        split: how micro-batches differ, where backwards may be split.
        fused: the same where they are not.
    """

    planner: HeuristicPlanner
    split: Turns
    fused: Turns

    def plan(self, problem: Problem) -> Schedule:
        """See :func:`heuristic_in_turns`."""
        schedule = self.planner.plan(problem)
        if isinstance(schedule, CodedSchedule):
            return schedule
        turns = (self.split if problem.technique.decoupled else self.fused).alike_in_memory()
        return heuristic_in_turns(schedule, turns, self.planner.effort)[0]


def _listed(problem: Problem, effort: int) -> Schedule:
    """The plan that lists every operation."""
    return with_recomputation(problem, lambda other, share: _planned(other, int(effort * share)))


def _planned(problem: Problem, effort: int) -> Schedule:
    """As :func:`_listed`, for a problem in which nothing is computed again."""
    if not problem.failed and not problem.worker_factors and not problem.technique.decoupled:
        return one_f_one_b(problem)
    with collector_paused():
        if effort and any(factor != 1 for s in range(problem.grid.stages) for factor in problem.live_factors(s)):
            return _at_unequal_speeds(problem, effort)
        return _list_schedule(problem, effort)


_lanes = LanePlanner(_listed)


def _at_unequal_speeds(problem: Problem, effort: int) -> Schedule:
    """The best plan over several distributions of the micro-batches, and the plan for workers of equal speed."""
    goal = lower_bound(problem) * (1 + 1e-9)
    best: Schedule | None = None
    for schedule in _distributions(problem, effort):
        if best is None or _score(schedule) < _score(best):
            best = schedule
        if best.period <= goal:
            break
    assert best is not None
    return best


def _distributions(problem: Problem, effort: int) -> Iterator[Schedule]:
    """A plan for each distribution, the most promising one first."""
    codes = _codes(problem)
    tried = [codes.routes]
    first = _solve(codes, effort)
    yield first
    if first.period > _load(Codes(problem, reroute(problem.grid, problem.failed), fused=codes.fused)) * (1 + 1e-9):
        equal = _planned(replace(problem, worker_factors=()), effort)
        yield retime(equal, problem.costs, problem.worker_factors)
    for power in _LEANINGS:
        codes = _codes(problem, power)
        if codes.routes not in tried:
            tried.append(codes.routes)
            yield _solve(codes, effort // 4)


def _solve(codes: Codes, effort: int) -> Schedule:
    codes, solution = _best(codes, effort)
    return assemble(codes, solution.sequence, solution.timing)


def _polished(codes: Codes, solution: Solution, effort: int) -> tuple[Codes, Solution]:
    """The solution after a local search, which may re-route, if it is not known to be optimal."""
    goal = goal_of(codes)
    tries = effort // (_LOCAL_SHARE * len(solution.sequence))
    if solution.score[0] <= goal or not tries:
        return codes, solution
    codes, sequence, timing = local_search(codes, solution.sequence, solution.timing, goal, tries)
    return codes, replace(solution, sequence=sequence, timing=timing)


def _load(codes: Codes) -> float:
    """The work of the busiest worker: no period is shorter."""
    load = [0.0] * codes.problem.grid.num_workers
    for key, times in enumerate(codes.times[: (2 if codes.fused else 3) * codes.stages]):
        for rank, seconds in zip(codes.ranks[key], times, strict=True):
            load[rank] += seconds
    return max(load)


def _score(schedule: Schedule) -> tuple[float, float]:
    # Rounding must not decide between equally good schedules.
    return round(schedule.period, 9), round(schedule.makespan, 9)


def _list_schedule(problem: Problem, effort: int) -> Schedule:
    codes = _codes(problem)
    if problem.failed or problem.worker_factors:
        return _solve(codes, effort)
    # All pipelines are alike, so plan one.
    grid = problem.grid
    one = _codes(replace(problem, grid=Grid(1, grid.stages, grid.microbatches)))
    _, solution = _best(one, effort)  # nothing is re-routed without failures
    sequence: list[int] = []
    for code in solution.sequence:
        key, number = divmod(code, grid.microbatches)
        sequence += range(key * codes.n + number, (key + 1) * codes.n, grid.microbatches)
    return assemble(codes, sequence, best_timing(codes, sequence))


def _best(codes: Codes, effort: int, starts: Sequence[list[int]] = ()) -> tuple[Codes, Solution]:
    """The best routes and order of the operations, with backwards split where that is of use; ``starts`` are orders
    that fit into memory.
    """
    codes, solution = _polished(codes, _within_memory(codes, effort, starts), effort)
    sequence, timing = coupled(codes, solution.sequence, solution.timing)
    return codes, replace(solution, sequence=sequence, timing=timing)


def _within_memory(codes: Codes, effort: int, starts: Sequence[list[int]] = ()) -> Solution:
    """The best order that fits into memory: never worse than under the limit in micro-batches that bytes amount to."""
    problem = codes.problem
    memory = problem.memory
    if memory is None or not effort:
        return _found(codes, effort, starts)
    try:
        if codes.turns is None:
            counted = problem.counted()
        else:  # so many micro-batches fit, whichever these are
            fixed = map(add, memory.fixed, codes.turns.reserved)
            counted = replace(problem, memory=replace(memory, fixed=tuple(fixed))).counted()
    except PlanningError:  # no backward of some stage can be split, which a number of micro-batches cannot express
        return _found(codes, effort, starts)
    first = _found(codes.under(counted), effort, starts)
    if not _fits(codes, first.sequence):  # they are not all alike
        return _found(codes, effort, starts)
    met = first.score[0] <= goal_of(codes)
    same = codes.turns is None and (codes.fused or memory.after_forward == memory.after_backward)
    if met or same or counted.in_flight_limit == (codes.n,) * codes.stages:
        return first
    return _found(codes, effort // 2, [first.sequence])


def _fits(codes: Codes, sequence: Sequence[int]) -> bool:
    """Whether no worker holds more bytes than it has, whichever micro-batches these are of."""
    memory = codes.problem.memory
    if memory is None:
        return True
    stages, n = codes.stages, codes.n
    of_kind = codes.bytes_of(memory)
    room = [memory.room(rank % stages) for rank in range(codes.problem.grid.num_workers)]
    for code in sequence:
        key, number = divmod(code, n)
        kind, stage = divmod(key, stages)
        rank = codes.ranks[key][number]
        room[rank] -= of_kind[kind][stage][number]
        if room[rank] < 0:
            return False
    return True


def _found(codes: Codes, effort: int, starts: Sequence[list[int]] = ()) -> Solution:
    """The result of the search; ``starts``: orders of all operations to compare with."""
    problem = codes.problem
    if not problem.failed and not problem.worker_factors and not codes.fused:
        usual = (order for order in _zero_bubble_starts(codes) if codes.turns is None or _fits(codes, order))
        solution = search(codes, effort, chain(starts, usual))
    else:
        solution = search(codes, effort, starts)
    if problem.technique.staggered and effort and solution.score[0] > makespan_lower_bound(problem) * (1 + 1e-9):
        # The search without the staggered optimizer may have been luckier; its order is as good with it.
        barrier = replace(problem, technique=replace(problem.technique, staggered=False))
        again = _found(codes.under(barrier), effort, starts)
        timing = best_timing(codes, again.sequence)
        if round(timing.period, 9) < solution.score[0]:
            return replace(again, timing=timing)
    return solution


def _codes(problem: Problem, power: float = 1.0) -> Codes:
    """The operations, distributed as if the workers' factors were their powers of ``power``."""
    routes = reroute(problem.grid, problem.failed, {w: factor**power for w, factor in problem.worker_factors})
    return Codes(problem, routes, fused=not problem.technique.decoupled)


def _zero_bubble_starts(codes: Codes) -> Iterator[list[int]]:
    """ZB-H1 and relatives with a longer warm-up, as memory allows."""
    stages, microbatches = codes.stages, codes.problem.grid.microbatches
    try:
        limit = codes.problem.counted().in_flight_limit or (microbatches,) * stages
    except PlanningError:  # they split every backward, for which there is no memory
        return
    for slope, less in ((1.0, 0), (2.0, 1), (1.5, 0), (2.0, 0), (2.5, 0)):
        warmup = [max(1, int(slope * (stages - stage)) - less) for stage in range(stages)]
        yield zero_bubble(codes, warmup, limit)
        yield zero_bubble(codes, warmup, [min(w, n) for w, n in zip(warmup, limit, strict=True)])
