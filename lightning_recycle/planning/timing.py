"""Timing: from the order of the operations to their times and the period.

Every operation starts as soon as its worker is free and its input has arrived. With the staggered optimizer the orders
also determine the smallest period: the largest mean weight of a cycle "stage s begins ... stage s steps, next
iteration", found by policy iteration (Howard). Work is done on integers, ``code = (kind * S + stage) * N + microbatch``
with N = D * M, so that a 600,000-operation schedule takes seconds.

Where stages share layers (:mod:`~lightning_recycle.planning.layer_cuts`), each micro-batch has costs of its own. The
gradients of a shared layer are summed over the workers of both stages, and neither steps before the other has all
weight gradients of the layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from lightning_recycle.errors import PlanningError
from lightning_recycle.planning.costs import Costs, Memory
from lightning_recycle.planning.grid import Microbatch, Op, OpKind, ScheduledOp, Worker
from lightning_recycle.planning.problem import Problem
from lightning_recycle.planning.routing import CompactSchedule, Lane, compact
from lightning_recycle.planning.schedule import Schedule, staggered_period

ByStage: TypeAlias = tuple[float, ...]


@dataclass(frozen=True)
class SharedLayer:
    """A layer that ``stage`` and the next hold, with its part of that stage's REDUCE.

    ``earlier`` and ``later``: numbers d * M + m of the micro-batches that run it on either stage.
    """

    stage: int
    reduce: float
    earlier: tuple[int, ...]
    later: tuple[int, ...]


@dataclass(frozen=True)
class MicrobatchVariation:
    """Differences between micro-batches, in the order of d * M + m, by stage.

    Args:
        forward: duration of F, relative to the mean.
        backward_input, backward_weight: the same for B and W; of a fused backward, the first of them.
        held: memory from F to B, relative to the mean.
        waiting: memory from B to W.
        reserved: bytes by stage that a problem for the mean micro-batch keeps free because of these differences.
    """

    forward: tuple[ByStage, ...]
    backward_input: tuple[ByStage, ...]
    backward_weight: tuple[ByStage, ...]
    held: tuple[ByStage, ...]
    waiting: tuple[ByStage, ...]
    layers: tuple[SharedLayer, ...]
    reserved: ByStage

    def alike_in_memory(self) -> MicrobatchVariation:
        """The same with the mean's memory for each micro-batch."""
        ones = tuple((1.0,) * len(ratios) for ratios in self.held)
        return replace(self, held=ones, waiting=ones, reserved=(0.0,) * len(self.reserved))


WorkerFactors: TypeAlias = Mapping[Worker, float] | tuple[tuple[Worker, float], ...]
"""See ``Problem.worker_factors``."""

FORWARD, BACKWARD, WEIGHT, FUSED, RECOMPUTE = 0, 1, 2, 3, 4
"""Kinds within a code; BACKWARD is BW where no backward is split."""

_ROUND_LIMIT = 40  # passes over all operations in the search for the period; small grids need 3 to 6
_MOST_EXPANDED = 2_000_000  # operations of a compact schedule that are listed one by one, at about 180 bytes
_OPERATION_BUDGET = 8_000_000  # the same for large grids: about 5 s


class Codes:
    """Integer names of the operations of a problem, and tables for inner loops.

    ``key = code // n = kind * S + stage``; tables are indexed by key, or by key and micro-batch number ``d * M + m``.
    Waits for a backward look at the code of BACKWARD; a FUSED one is recorded there too, ``to_backward`` further. So
    far from a RECOMPUTE is the WEIGHT, for which nothing waits.
    """

    def __init__(
        self,
        problem: Problem,
        routes: Sequence[Mapping[Microbatch, Worker]],
        *,
        fused: bool,
        variation: MicrobatchVariation | None = None,
    ) -> None:
        grid, costs = problem.grid, problem.costs
        self.problem = problem
        self.fused = fused
        self.variation = variation
        self.stages = grid.stages
        self.n = grid.global_microbatches
        self.size = 5 * self.stages * self.n
        self.to_backward = (BACKWARD - FUSED) * self.stages * self.n
        self.first_fused = FUSED * self.stages
        """The lowest key of FUSED."""
        self.microbatches = tuple(grid.all_microbatches())
        self.routes = routes
        rank_of = [[grid.rank(routes[s][mb]) for mb in self.microbatches] for s in range(self.stages)]
        self.ranks: list[list[int]] = rank_of * 5
        self.durations = _durations(costs, fused)
        factors = {grid.rank(worker): factor for worker, factor in problem.worker_factors}
        rows = [[d] * self.n for d in self.durations] if variation is None else _by_microbatch(costs, variation, fused)
        self.times: list[list[float]] = [
            [duration * factors.get(rank, 1.0) for duration, rank in zip(row, ranks, strict=True)] if factors else row
            for row, ranks in zip(rows, self.ranks, strict=True)
        ]
        """By key and micro-batch: the duration on the worker that executes it."""
        self.steps = [costs.optimizer[s] * max(problem.live_factors(s)) for s in range(self.stages)]
        """Per stage, until the last worker has stepped."""
        self.closing: list[float] = [costs.of(OpKind.REDUCE, s) + self.steps[s] for s in range(self.stages)]
        """Per stage, from the last gradient until the last worker has stepped."""
        # Where the input comes from, as an offset of the code; 0: from the same worker.
        last = self.stages - 1
        self.input_offset: list[int] = [
            *(-self.n if s else 0 for s in range(self.stages)),
            *(self.n if s < last else 0 for s in range(self.stages)),
            *(0 for _ in range(self.stages)),
            *(self.n + self.to_backward if s < last else 0 for s in range(self.stages)),
            *(0 for _ in range(self.stages)),
        ]

    def bytes_of(self, memory: Memory) -> list[list[list[float]]]:
        """Change of memory by an operation, by kind (F, B, W, BW), stage and micro-batch.

        ``memory`` is in bytes, or in micro-batches, which are all alike.
        """
        found: list[list[list[float]]] = []
        fused = OpKind.BACKWARD
        for kind in (OpKind.FORWARD, fused if self.fused else OpKind.BACKWARD_INPUT, OpKind.BACKWARD_WEIGHT, fused):
            found.append([])
            for stage in range(self.stages):
                held, waiting = memory.parts(kind, stage)
                if self.variation is None or memory is not self.problem.memory:
                    found[-1].append([held + waiting] * self.n)
                else:
                    pairs = zip(self.variation.held, self.variation.waiting, strict=True)
                    found[-1].append([held * h[stage] + waiting * w[stage] for h, w in pairs])
        return found

    def peaks(self, sequence: Iterable[int], memory: Memory) -> list[float]:
        """By stage, the most that a worker holds at once, in the unit of ``memory``."""
        taken = self.bytes_of(memory)
        held = list(memory.fixed) * self.problem.grid.lanes
        peaks = list(memory.fixed)
        for code in sequence:
            key, number = divmod(code, self.n)
            kind, stage = divmod(key, self.stages)
            rank = self.ranks[key][number]
            held[rank] += taken[kind][stage][number]
            peaks[stage] = max(peaks[stage], held[rank])
        return peaks

    def under(self, problem: Problem) -> Codes:
        """The same operations on the same workers, of another problem."""
        return Codes(problem, self.routes, fused=self.fused, variation=self.variation)

    def code(self, kind: int, stage: int, microbatch: int) -> int:
        return (kind * self.stages + stage) * self.n + microbatch


def _durations(costs: Costs, fused: bool) -> list[float]:
    both = tuple(b + w for b, w in zip(costs.backward_input, costs.backward_weight, strict=True))
    backward = both if fused else costs.backward_input
    return [*costs.forward, *backward, *costs.backward_weight, *both, *costs.forward]


def _by_microbatch(costs: Costs, variation: MicrobatchVariation, fused: bool) -> list[list[float]]:
    split = (costs.forward, variation.forward), (costs.backward_input, variation.backward_input)
    weight = costs.backward_weight, variation.backward_weight
    forward, backward, weights = (
        [[usual * ratios[stage] for ratios in each] for stage, usual in enumerate(of_stages)]
        for of_stages, each in (*split, weight)
    )
    both = [[b + w for b, w in zip(*rows, strict=True)] for rows in zip(backward, weights, strict=True)]
    return [*forward, *(both if fused else backward), *weights, *both, *forward]


@dataclass(frozen=True, slots=True)
class Timing:
    """Start times of the operations of one sequence, by code, and the period."""

    starts: list[float]
    stage_begin: list[float]
    stage_end: list[float]
    source: list[int]
    """By stage, the stage whose begin determines its end (critical path)."""

    @property
    def makespan(self) -> float:
        return max(self.stage_end) - min(self.stage_begin)

    @property
    def period(self) -> float:
        """See :func:`staggered_period`."""
        return max(end - begin for begin, end in zip(self.stage_begin, self.stage_end, strict=True))


def interleave(codes: Codes, programs: Mapping[int, Sequence[int]]) -> list[int]:
    """One sequence of all operations; PlanningError if the programs wait in a cycle."""
    n, offsets = codes.n, codes.input_offset
    done = [False] * codes.size
    position = dict.fromkeys(programs, 0)
    waiting: dict[int, int] = {}
    sequence: list[int] = []
    runnable = list(programs)
    while runnable:
        rank = runnable.pop()
        program, at = programs[rank], position[rank]
        while at < len(program):
            code = program[at]
            offset = offsets[code // n]
            if offset and not done[code + offset]:
                waiting[code + offset] = rank
                break
            sequence.append(code)
            if code // n >= codes.first_fused:
                code += codes.to_backward
            done[code] = True
            at += 1
            if code in waiting:
                runnable.append(waiting.pop(code))
        position[rank] = at
    stuck = [codes.problem.grid.worker(rank) for rank in programs if position[rank] < len(programs[rank])]
    if stuck:
        raise PlanningError(f"these workers wait for one another forever: {', '.join(map(str, stuck))}.")
    return sequence


def earliest(codes: Codes, sequence: Sequence[int], begin: Sequence[float]) -> Timing:
    """The earliest times if stage s may begin at ``begin[s]``."""
    n, comm = codes.n, codes.problem.costs.communication
    ranks, times, offsets = codes.ranks, codes.times, codes.input_offset
    stages, first_fused, to_backward = codes.stages, codes.first_fused, codes.to_backward
    workers = codes.problem.grid.num_workers
    free = [begin[rank % stages] for rank in range(workers)]
    first: list[float] = [-1.0] * workers
    # The stage whose begin determines a time travels with it along the longest path.
    free_source = [rank % stages for rank in range(workers)]
    starts, ends, sources = [0.0] * codes.size, [0.0] * codes.size, [0] * codes.size
    for code in sequence:
        key, microbatch = divmod(code, n)
        rank = ranks[key][microbatch]
        start, source = free[rank], free_source[rank]
        if offset := offsets[key]:
            ready = ends[code + offset] + comm
            if ready > start:
                start = ready
                source = free_source[rank] = sources[code + offset]
        if first[rank] < 0.0:
            first[rank] = start
        starts[code] = start
        end = free[rank] = start + times[key][microbatch]
        if key >= first_fused:
            code += to_backward
        ends[code] = end
        sources[code] = source
    stage_begin, stage_end, stage_source = [], [], []
    for stage in range(stages):
        live = [rank for rank in range(stage, workers, stages) if first[rank] >= 0.0]
        slowest = max(live, key=lambda rank: (free[rank], -rank))
        stage_begin.append(min(first[rank] for rank in live))
        stage_end.append(free[slowest] + codes.closing[stage])
        stage_source.append(free_source[slowest])
    if codes.variation is not None:
        _await_others(codes, codes.variation, ends, sources, stage_end, stage_source)
    return Timing(starts, stage_begin, stage_end, stage_source)


def _await_others(
    codes: Codes,
    variation: MicrobatchVariation,
    ends: Sequence[float],
    sources: Sequence[int],
    stage_end: list[float],
    stage_source: list[int],
) -> None:
    """Stages that share a layer step together; changes the last two arguments."""
    n, stages = codes.n, codes.stages
    for layer in variation.layers:
        for stage, other, microbatches in (
            (layer.stage, layer.stage + 1, layer.later),
            (layer.stage + 1, layer.stage, layer.earlier),
        ):
            # A W is behind its B; a backward that is not split has the place of B alone.
            kinds = ((WEIGHT * stages + other) * n, (BACKWARD * stages + other) * n)
            last = max((kind + m for m in microbatches for kind in kinds), key=ends.__getitem__, default=-1)
            if last < 0:
                continue
            reduce = layer.reduce * codes.problem.costs.of(OpKind.REDUCE, layer.stage)
            end = ends[last] + reduce + codes.steps[stage]
            if end > stage_end[stage]:
                stage_end[stage], stage_source[stage] = end, sources[last]


def best_timing(codes: Codes, sequence: Sequence[int], hopeless: float | None = None) -> Timing:
    """The earliest times; with the staggered optimizer those of the least period.

    ``sequence`` respects the dependencies; above the period ``hopeless`` the exact value does not matter.
    """
    stages = codes.stages
    timing = earliest(codes, sequence, [0.0] * stages)
    if not codes.problem.technique.staggered:
        return timing
    rounds = min(_ROUND_LIMIT, max(3, _OPERATION_BUDGET // max(1, len(sequence))))
    best, period = timing, 0.0
    begin = [0.0] * stages
    latest = timing
    for _ in range(rounds):
        if latest.period < best.period:
            best = latest
        weights = [latest.stage_end[s] - begin[latest.source[s]] for s in range(stages)]
        period = max(period, _largest_cycle_mean(latest.source, weights))
        if hopeless is not None and period > hopeless:
            break
        tolerance = 1e-12 * max(1.0, latest.makespan)
        delayed = [max(b, end - period) for b, end in zip(begin, latest.stage_end, strict=True)]
        if all(new <= old + tolerance for new, old in zip(delayed, begin, strict=True)):
            break
        begin = delayed
        latest = earliest(codes, sequence, begin)
    if latest.period < best.period:
        best = latest
    return best


def assemble(codes: Codes, sequence: Sequence[int], timing: Timing) -> Schedule:
    """The schedule of a timed sequence, with REDUCE and STEP added."""
    problem, n, stages = codes.problem, codes.n, codes.stages
    grid, costs = problem.grid, problem.costs
    backward = OpKind.BACKWARD if codes.fused else OpKind.BACKWARD_INPUT
    kinds = (OpKind.FORWARD, backward, OpKind.BACKWARD_WEIGHT, OpKind.BACKWARD, OpKind.RECOMPUTE)
    origin = min(timing.stage_begin)
    lists: dict[int, list[ScheduledOp]] = {grid.rank(worker): [] for worker in problem.live_workers()}
    for code in sequence:
        key, number = divmod(code, n)
        kind, stage = divmod(key, stages)
        start = timing.starts[code] - origin
        op = Op(kinds[kind], stage, codes.microbatches[number])
        lists[codes.ranks[key][number]].append(ScheduledOp(op, start, start + codes.times[key][number]))
    for stage in range(stages):
        live = [grid.rank(worker) for worker in problem.live_workers(stage)]
        reduce_start = max((lists[rank][-1].end for rank in live if lists[rank]), default=0.0)
        step_start = reduce_start + costs.of(OpKind.REDUCE, stage)
        reduce = ScheduledOp(Op(OpKind.REDUCE, stage), reduce_start, step_start)
        for rank in live:
            step_end = step_start + problem.duration(OpKind.STEP, grid.worker(rank))
            lists[rank] += (reduce, ScheduledOp(Op(OpKind.STEP, stage), step_start, step_end))
    workers = {grid.worker(rank): tuple(ops) for rank, ops in lists.items()}
    schedule = Schedule(problem, workers, staggered_period(workers))
    if not problem.technique.staggered:
        schedule = Schedule(problem, workers, schedule.makespan)
    return schedule


def retime(
    schedule: Schedule,
    costs: Costs,
    worker_factors: WorkerFactors | None = None,
) -> Schedule:
    """The same orders of operations under other costs.

    Args:
        schedule: the schedule whose orders to keep.
        costs: the new costs of the operations.
        worker_factors: factors by which operations take longer on a worker; by default the schedule's.

    Raises:
        PlanningError: when a compact schedule is too large to be timed for workers of unequal speed.
    """
    factors = schedule.problem.worker_factors if worker_factors is None else worker_factors
    if isinstance(schedule, CompactSchedule):
        new = replace(schedule.problem, costs=costs, worker_factors=factors)  # type: ignore[arg-type]
        if not new.worker_factors:
            return compact(new, Lane.of(retime(schedule.lane.schedule(), costs)))
        if schedule.num_operations > _MOST_EXPANDED:
            raise PlanningError(
                f"a compact plan of {schedule.num_operations:,} operations cannot be timed for workers of unequal "
                f"speed: its lanes then differ, and more than {_MOST_EXPANDED:,} operations are not listed one by one."
            )
        schedule = schedule.expand()
    problem = replace(schedule.problem, costs=costs, worker_factors=factors)  # type: ignore[arg-type]
    codes, sequence = operations_of(schedule, problem)
    return assemble(codes, sequence, best_timing(codes, sequence))


def operations_of(
    schedule: Schedule, problem: Problem, variation: MicrobatchVariation | None = None
) -> tuple[Codes, list[int]]:
    """The operations of a schedule in its order, with the costs of ``problem``."""
    grid = schedule.grid
    microbatches = tuple(grid.all_microbatches())
    routes = [{mb: schedule.route(stage, mb) for mb in microbatches} for stage in range(grid.stages)]
    fused = not problem.technique.split_backward
    codes = Codes(problem, routes, fused=fused, variation=variation)
    kind_codes = {
        OpKind.FORWARD: FORWARD,
        OpKind.BACKWARD: BACKWARD if fused else FUSED,
        OpKind.BACKWARD_INPUT: BACKWARD,
        OpKind.BACKWARD_WEIGHT: WEIGHT,
        OpKind.RECOMPUTE: RECOMPUTE,
    }
    programs = {
        grid.rank(worker): [
            codes.code(kind_codes[op.kind], op.stage, op.microbatch.pipeline * grid.microbatches + op.microbatch.index)
            for op in schedule.program(worker)
            if op.microbatch is not None
        ]
        for worker in schedule.live_workers
    }
    return codes, interleave(codes, programs)


def _largest_cycle_mean(source: Sequence[int], weights: Sequence[float]) -> float:
    """Largest mean weight of the cycles of a graph with one edge per stage."""
    best = 0.0
    seen = [0] * len(source)
    for start in range(len(source)):
        node, mark = start, start + 1
        while not seen[node]:
            seen[node] = mark
            node = source[node]
        if seen[node] == mark:
            total, length, at = weights[node], 1, source[node]
            while at != node:
                total, length, at = total + weights[at], length + 1, source[at]
            best = max(best, total / length)
    return best
