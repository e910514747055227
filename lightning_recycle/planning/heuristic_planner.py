"""The list-scheduling heuristic: a good plan for any failures, immediately.

It plays the iteration forward in time under a priority rule and searches for the best rule
(:mod:`~lightning_recycle.planning.list_scheduling`), then for an order that is as fast with less memory, and fuses the
backwards that were split for nothing. Where memory makes that slow, forwards may be computed again
(:func:`with_recomputation`). Identical pipelines, as without failures, are planned once and copied. Where workers
differ in speed, two distributions of the micro-batches are searched. Plans are deterministic and keep within memory and
in-flight limits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import sub

from lightning_recycle.arguments import whole
from lightning_recycle.errors import PlanningError
from lightning_recycle.planning.costs import Memory
from lightning_recycle.planning.grid import Grid, Microbatch, Op, OpKind, ScheduledOp, Worker
from lightning_recycle.planning.list_scheduling import Search, Solution, fixed_pattern, one_f_one_b, with_least_memory
from lightning_recycle.planning.problem import Problem, lower_bound
from lightning_recycle.planning.routing import (
    COMPACT_FROM,
    CompactSchedule,
    Lane,
    compact,
    good_enough,
    lane_problem,
    reroute,
    worth_compacting,
)
from lightning_recycle.planning.schedule import Schedule, gc_paused, is_better
from lightning_recycle.planning.timing import (
    BACKWARD,
    FORWARD,
    FUSED,
    WEIGHT,
    Codes,
    MicrobatchVariation,
    Timing,
    assemble,
    best_timing,
    operations_of,
    retime,
)

DEFAULT_EFFORT = 800_000
"""Operations to play: about 1 s, 0.1 s for small grids; larger ones get few rules."""

_SLOWNESS_POWER = 1.5
"""Power of the workers' factors in the other distribution at unequal speeds.

A slow worker gets fewer micro-batches than its speed suggests: the pipeline also waits for its single operations.
"""

# Divisor of the effort for the other distribution.
_SLOWNESS_EFFORT_DIVISOR = 4


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

    1F1B applies without failure, slow worker, split or further lanes. Otherwise the result is the best schedule found,
    in the order of :mod:`~lightning_recycle.planning.schedule`: period, makespan, memory.

    Args:
        problem: the problem to plan.
        effort: number of operations to play in total; 0 for the plain rule alone, "backward, then forward, then weight
            gradient, oldest first", under which the paper's techniques can be compared.
        compact_from: number of operations from which on all lanes get one plan
            (:mod:`~lightning_recycle.planning.routing`), if that is near the lower bound or a full plan would
            take too long.
    """
    if (fewer := problem.without_vacant_lanes()) is not problem:
        return heuristic(fewer, effort, compact_from).expand().under(problem)
    if not worth_compacting(problem, compact_from):
        return _plan_with_recomputation(problem, effort)
    with gc_paused():
        by_lanes = compact(problem, _plan_lane(lane_problem(problem), effort))
    if good_enough(by_lanes):
        return by_lanes
    listed = _plan_with_recomputation(problem, effort)
    return listed if is_better(listed, by_lanes) else by_lanes


def heuristic_with_variation(
    schedule: Schedule, variation: MicrobatchVariation, effort: int = DEFAULT_EFFORT
) -> tuple[Schedule, Timing]:
    """A schedule where stages share layers, planned by the costs of each micro-batch.

    ``schedule`` is for the mean micro-batch and lists all operations; the result is at most 0.1 % slower if
    its order fits into memory with these costs. Returns the schedule with the times of the mean micro-batch, and the
    real times. If more micro-batches are in flight than fit in the mean, its problem has their number as a limit
    instead of the memory.
    """
    problem = exact = schedule.problem
    if problem.memory is not None:
        fixed = map(sub, problem.memory.fixed, variation.reserved)
        exact = replace(problem, memory=replace(problem.memory, fixed=tuple(fixed)))
    codes, sequence = operations_of(schedule, exact, variation)
    with gc_paused():
        found = _best_solution(codes, effort, [sequence] if _fits(codes, sequence) else [])
    mean = Codes(problem, codes.routes, fused=codes.fused)
    schedule = assemble(mean, found.sequence, best_timing(mean, found.sequence))
    return schedule if schedule.fits(problem) else _with_counted_limit(schedule), found.timing


def with_memory_descent(schedule: Schedule) -> Schedule:
    """A plan as fast as ``schedule``, which lists all operations, with less memory."""
    codes, sequence = operations_of(schedule, schedule.problem)
    with gc_paused():
        found = _best_schedule(codes, DEFAULT_EFFORT, [sequence])
    return found if found.period <= schedule.period * (1 + 1e-9) else schedule


def _with_counted_limit(schedule: Schedule) -> Schedule:
    """The schedule with the peaks of its micro-batches in flight as its limit."""
    problem = schedule.problem
    peaks = [max(map(schedule.peak_in_flight, problem.live_workers(stage))) for stage in range(problem.grid.stages)]
    return schedule.under(replace(problem, memory=None, in_flight_limit=tuple(peaks)))


@dataclass(frozen=True, slots=True)
class VariedPlanner:
    """A heuristic planner where stages share layers, within the mean's memory."""

    planner: HeuristicPlanner
    split: MicrobatchVariation
    fused: MicrobatchVariation

    def plan(self, problem: Problem) -> Schedule:
        schedule = self.planner.plan(problem)
        if isinstance(schedule, CompactSchedule):
            return schedule
        variation = (self.split if problem.technique.split_backward else self.fused).alike_in_memory()
        return heuristic_with_variation(schedule, variation, self.planner.effort)[0]


def _plan_with_recomputation(problem: Problem, effort: int) -> Schedule:
    return with_recomputation(problem, lambda other, share: _plan_without_recomputation(other, int(effort * share)))


def _plan_without_recomputation(problem: Problem, effort: int) -> Schedule:
    if problem.stays_home and not problem.technique.split_backward:
        return one_f_one_b(problem)
    with gc_paused():
        return _search_list_schedule(problem, effort)


@lru_cache(maxsize=32)  # about 100 kB each
def _plan_lane(problem: Problem, effort: int) -> Lane:
    return Lane.of(_plan_with_recomputation(problem, effort))


def _best_schedule(codes: Codes, effort: int, starts: Sequence[list[int]] = ()) -> Schedule:
    solution = _best_solution(codes, effort, starts)
    return assemble(codes, solution.sequence, solution.timing)


def _search_list_schedule(problem: Problem, effort: int) -> Schedule:
    codes = _route_codes(problem)
    if not problem.stays_home:
        first = _best_schedule(codes, effort)
        skewed = _route_codes(problem, _SLOWNESS_POWER)
        if not effort or skewed.routes == codes.routes or first.period <= lower_bound(problem) * (1 + 1e-9):
            return first
        other = _best_schedule(skewed, effort // _SLOWNESS_EFFORT_DIVISOR)
        return other if is_better(other, first) else first
    # All pipelines are alike, so plan one.
    grid = problem.grid
    one_pipeline = _route_codes(replace(problem, grid=Grid(1, grid.stages, grid.microbatches)))
    sequence: list[int] = []
    for code in _best_solution(one_pipeline, effort).sequence:
        key, microbatch = divmod(code, grid.microbatches)
        sequence += range(key * codes.n + microbatch, (key + 1) * codes.n, grid.microbatches)
    return assemble(codes, sequence, best_timing(codes, sequence))


def _best_solution(codes: Codes, effort: int, starts: Sequence[list[int]] = ()) -> Solution:
    """The best order of the operations; ``starts`` are orders that fit into memory."""
    solution = Search(codes, effort).run([*starts, *_zero_bubble_start(codes)])
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
        order = fixed_pattern(codes, problem.counted().in_flight_limit)
    except PlanningError:  # it splits every backward, for which there is no memory
        return []
    return [order] if _fits(codes, order) else []


def _route_codes(problem: Problem, power: float = 1.0) -> Codes:
    """The operations, routed as if workers' factors were raised to ``power``."""
    routes = reroute(problem.grid, problem.failed, {w: factor**power for w, factor in problem.worker_factors})
    return Codes(problem, routes, fused=not problem.technique.split_backward)


def with_fused_backwards(codes: Codes, sequence: list[int], timing: Timing) -> tuple[list[int], Timing]:
    """The sequence and its times with the backwards fused that were split for nothing.

    One BW is a little cheaper than B + W and holds less in between. At stage 0, where no stage waits, it takes the
    place of B if no F comes in between; elsewhere W must directly follow B, and end before the stage before begins its
    own backward.
    """
    if codes.fused:
        return sequence, timing
    pairs = _idle_splits(codes, sequence, timing.starts)
    if not pairs:
        return sequence, timing
    to_fused, to_weight = (FUSED - BACKWARD) * codes.stages * codes.n, (WEIGHT - BACKWARD) * codes.stages * codes.n
    weights = {code + to_weight for code in pairs}
    fused = [code + to_fused if code in pairs else code for code in sequence if code not in weights]
    again = best_timing(codes, fused)
    staggered = codes.problem.technique.staggered
    before, after = (each.period if staggered else each.makespan for each in (timing, again))
    # With very many operations, times are not always those of the smallest period.
    return (fused, again) if after <= before * (1 + 1e-9) else (sequence, timing)


def _idle_splits(codes: Codes, sequence: Sequence[int], starts: Sequence[float]) -> set[int]:
    """The codes of those B that may as well be BW."""
    n, stages, ranks, times = codes.n, codes.stages, codes.ranks, codes.times
    communication = codes.problem.costs.communication
    to_weight, to_fused = (WEIGHT - BACKWARD) * stages * n, (FUSED - BACKWARD) * stages * n
    previous = [-1] * codes.problem.grid.num_workers  # the last operation of each worker so far
    since_forward: list[set[int]] = [set() for _ in previous]  # at stage 0: the B since the last F
    fusible: set[int] = set()
    for code in sequence:
        key, number = divmod(code, n)
        kind, stage = divmod(key, stages)
        rank = ranks[key][number]
        if kind == WEIGHT:
            backward = code - to_weight
            if stage == 0:
                if backward in since_forward[rank]:
                    fusible.add(backward)
            elif previous[rank] == backward:
                # The operation of the stage before that waits, which is either B or BW; the other one has no start.
                waiting = max(starts[backward - n], starts[backward - n + to_fused])
                if starts[code] + times[key][number] + communication <= waiting:
                    fusible.add(backward)
        elif stage == 0:
            if kind == FORWARD:
                since_forward[rank].clear()
            else:
                since_forward[rank].add(code)
        previous[rank] = code
    return fusible


_AGAIN_SHARE = 0.25  # of the effort of a plan, for each plan with and without a limit in bytes
_BACKWARDS = (OpKind.BACKWARD_INPUT, OpKind.BACKWARD)


def with_recomputation(problem: Problem, plan: Callable[[Problem, float], Schedule]) -> Schedule:
    """The best of the plans with and without recomputation (arXiv 1604.06174).

    R costs an F, so it is used only where memory makes the plan slow, and for as few micro-batches as possible:

    1. Plan without it, with and without the limit in bytes. Equally fast plans end the search.
    2. Stages whose workers exceed their memory in the second are *tight*. Plan as if every F of a tight stage kept only
       a checkpoint, every backward took an F longer, and there were always room for one R.
    3. Put an R before each of these backwards. It waits for nothing, so it can run while its worker waits for the
       gradient.
    4. Take it back for every micro-batch whose activations fit into memory from F on.

    The last stage never has an R: an F in its place is as early for all workers. ``plan`` makes a plan without
    recomputation, with a share of the usual effort.
    """
    memory = problem.memory
    if memory is None or memory.checkpoint is None:
        return plan(problem, 1.0)
    best = plan(replace(problem, memory=replace(memory, checkpoint=None)), 1.0).under(problem)
    saves = [s for s in range(problem.grid.stages - 1) if memory.checkpoint[s] < memory.after_forward[s]]
    if not saves or _reaches_period(best, lower_bound(problem)):
        return best
    free = plan(replace(problem, memory=None), _AGAIN_SHARE).under(problem)
    if _reaches_period(best, free.period):
        return best
    if free.fits(problem):
        return free
    tight = frozenset(
        stage for stage in saves if max(map(free.peak_memory, problem.live_workers(stage))) > memory.capacity[stage]
    )
    reduced = _reduced_problem(problem, memory, tight)
    if not tight or _reaches_period(best, lower_bound(reduced)):
        return best
    found = _drop_needless_recomputations(_insert_recomputations(plan(reduced, _AGAIN_SHARE), problem, tight), memory)
    return best if _reaches_period(best, found.period) else found


def _reaches_period(schedule: Schedule, period: float) -> bool:
    return schedule.period <= period * (1 + 1e-9)


def _reduced_problem(problem: Problem, memory: Memory, stages: frozenset[int]) -> Problem:
    """The problem with an R, and memory for it, in each backward of ``stages``."""
    assert memory.checkpoint is not None
    costs = problem.costs
    backward, capacity, held = list(costs.backward_input), list(memory.capacity), list(memory.after_forward)
    for stage in stages:
        backward[stage] += costs.forward[stage]
        capacity[stage] -= memory.after_forward[stage] - memory.checkpoint[stage]
        held[stage] = memory.checkpoint[stage]
    reduced = replace(memory, capacity=tuple(capacity), after_forward=tuple(held), checkpoint=None)
    return replace(problem, costs=replace(costs, backward_input=tuple(backward)), memory=reduced)


def _insert_recomputations(schedule: Schedule, problem: Problem, stages: frozenset[int]) -> Schedule:
    """A schedule of the reduced problem as one of ``problem``, with R before B."""

    def operations(worker: Worker) -> Iterator[Op]:
        for op in schedule.program(worker):
            if op.kind in _BACKWARDS and worker.stage in stages:
                yield Op(OpKind.RECOMPUTE, op.stage, op.microbatch)
            yield op

    technique = schedule.problem.technique  # 1F1B never splits
    programs = {worker: list(operations(worker)) for worker in schedule.live_workers}
    return _retime(replace(problem, technique=technique), programs)


def _drop_needless_recomputations(schedule: Schedule, memory: Memory) -> Schedule:
    """The schedule without the R of micro-batches that fit into memory from F on."""
    programs = {}
    for worker in schedule.live_workers:
        program = schedule.program(worker)
        spared = _needless_recomputations(program, memory, worker.stage)
        programs[worker] = [op for op in program if op.kind is not OpKind.RECOMPUTE or op.microbatch not in spared]
    return _retime(schedule.problem, programs)


def _needless_recomputations(program: Sequence[Op], memory: Memory, stage: int) -> set[Microbatch | None]:
    """The micro-batches of one worker that need no R; taking the first back is best."""
    recomputed = {op.microbatch: position for position, op in enumerate(program) if op.kind is OpKind.RECOMPUTE}
    forwards = {op.microbatch: position for position, op in enumerate(program) if op.kind is OpKind.FORWARD}
    room, extra = memory.room(stage), memory.delta(OpKind.RECOMPUTE, stage, recomputed=True)
    occupied, current = [], 0.0  # in each operation; after the newest
    for op in program:
        before, current = current, current + memory.delta(op.kind, stage, op.microbatch in recomputed)
        occupied.append(before + memory.needed(op.kind, stage))
    spared: set[Microbatch | None] = set()
    for microbatch, position in recomputed.items():
        between = range(forwards[microbatch] + 1, position)  # F itself needs the same either way
        if all(occupied[at] + extra <= room for at in between):
            spared.add(microbatch)
            for at in between:
                occupied[at] += extra
    return spared


def _retime(problem: Problem, programs: dict[Worker, list[Op]]) -> Schedule:
    untimed = {worker: tuple(ScheduledOp(op, 0.0, 0.0) for op in ops) for worker, ops in programs.items()}
    return retime(Schedule(problem, untimed, 0.0), problem.costs)
