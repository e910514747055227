"""The planning problem in time slots, with interchangeable micro-batches merged: the input of exact solvers.

Concept: routing decides which worker runs each micro-batch at each stage. Micro-batches with the same route (and the
same durations on it) form a *group*, and within a group it does not matter which is which: take any schedule, and for
every operation assign its sorted start times to the micro-batches of the group in a fixed order. Nothing else changes:

- a worker is busy at the same times, and holds equally many micro-batches at every moment;
- if operation ``b`` needs ``a``, then ``a_j + p <= b_j`` for every member j, hence also for the sorted times: the k-th
  smallest ``b`` has k members with ``a`` at most that much earlier, so the k-th smallest ``a`` is.

So some optimal schedule sends every group first in, first out through every operation. A solver need not place the
operations of each micro-batch, only decide *how many* of a group have started an operation by a given time. This keeps
the model small: the running example has 4 groups instead of 18 micro-batches.

Times are integers, in units of a slot. Where all durations are multiples of a common slot, the orders of operations
lose nothing: start times are sums of durations. Otherwise durations are rounded to a longer slot;
the solver's *order* is then timed again with the real durations, and its bound is not used.

Memory in bytes becomes the number of micro-batches that fits whatever the order; a solver may then miss schedules that
fit, and its bound says nothing about them. Every backward is split, or none; what was split for nothing is fused at the
end.

Contract: pure data and arithmetic, deterministic; picklable, for the solver's process.

Must not know: any solver, or how long solving takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from lightning_recycle.planning.coupling import coupled
from lightning_recycle.planning.grid import Worker
from lightning_recycle.planning.ops import OpKind
from lightning_recycle.planning.schedule import Schedule
from lightning_recycle.planning.timing import BACKWARD, FORWARD, WEIGHT, Codes, assemble, best_timing, interleave

__all__ = ["SlotOp", "SlotProblem", "Window", "common_slot", "discretize", "schedule_from_starts"]

_KINDS = {
    OpKind.FORWARD: FORWARD,
    OpKind.BACKWARD_INPUT: BACKWARD,
    OpKind.BACKWARD: BACKWARD,
    OpKind.BACKWARD_WEIGHT: WEIGHT,
}


@dataclass(frozen=True, slots=True)
class SlotOp:
    """One kind of operation of one group at one stage: ``len(microbatches)`` operations, first in, first out."""

    group: int
    kind: int
    """FORWARD, BACKWARD (B, or BW when fused) or WEIGHT of :mod:`timing`."""
    stage: int
    worker: int
    """Rank of the worker that runs it."""
    duration: int
    """In slots."""
    microbatches: tuple[int, ...]
    """Numbers ``d * M + m`` of the group's micro-batches in the order in which they go."""
    source: int | None
    """Index of the operation whose k-th result the k-th of these needs."""
    lag: int
    """Slots from the end of the source until its result is here."""
    head: int
    """No start before this slot."""
    to_end: int
    """The fewest slots from a start until the end of the iteration at stage 0 (staggered: of all B there and then its
    own W, REDUCE and STEP), own duration included. W and BW with the staggered optimizer: until their own stage's
    STEP has ended."""

    @property
    def count(self) -> int:
        """Number of operations."""
        return len(self.microbatches)


@dataclass(frozen=True, slots=True)
class Window:
    """When the operations of a :class:`SlotOp` may start: none before ``first``, all of them by ``last``."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class SlotProblem:
    """A planning problem with its routing, in slots.

    ``exact`` says whether the slots represent all durations without rounding.
    """

    ops: tuple[SlotOp, ...]
    stages: int
    fused: bool
    staggered: bool
    tails: tuple[int, ...]
    """REDUCE plus STEP, per stage."""
    limits: tuple[int, ...] | None
    """The most micro-batches in flight per worker, by stage."""
    slot: float
    exact: bool

    def refined(self, factor: int) -> SlotProblem:
        """The same problem with each slot divided into ``factor``."""
        ops = tuple(
            replace(
                op,
                duration=op.duration * factor,
                lag=op.lag * factor,
                head=op.head * factor,
                to_end=op.to_end * factor,
            )
            for op in self.ops
        )
        return replace(self, ops=ops, tails=tuple(t * factor for t in self.tails), slot=self.slot / factor)

    @property
    def release_kind(self) -> int:
        """The kind of operation after which a micro-batch is no longer held: WEIGHT, or BACKWARD when fused."""
        return BACKWARD if self.fused else WEIGHT

    def windows(self, length: int) -> list[Window]:
        """Start windows of every operation when the iteration (staggered: the period) is at most ``length`` slots.

        Without staggering everything ends by ``length``. With it, time counts from the start of stage 0. Stage 0 ends
        by ``length``, so every B, which leads to a B at stage 0, has its deadline from there. Stage s begins early
        enough for the F and B of its busiest worker to precede that deadline, and ends at most ``length`` after it
        began.
        """
        if not self.staggered:
            return [Window(op.head, length - op.to_end) for op in self.ops]
        deadline = [0] * self.stages  # of B, by stage
        load: dict[int, int] = {}  # F and B of each worker
        for op in self.ops:
            if op.kind == BACKWARD:
                deadline[op.stage] = max(deadline[op.stage], length - (op.to_end - op.duration))
            if op.kind != WEIGHT:
                load[op.worker] = load.get(op.worker, 0) + op.count * op.duration
        stage_end = [length] * self.stages
        for stage in range(1, self.stages):
            busiest = max(load[op.worker] for op in self.ops if op.stage == stage)
            stage_end[stage] = deadline[stage] - busiest + length
        return [Window(op.head, (stage_end[op.stage] if op.kind == WEIGHT else length) - op.to_end) for op in self.ops]

    def variables(self, length: int) -> int:
        """Number of (operation, slot) pairs that are open when the iteration has ``length`` slots."""
        return sum(max(0, window.last - window.first) for window in self.windows(length))


def common_slot(durations: Iterable[float]) -> float:
    """The longest slot that divides all (decimal) durations; 0.0 when all are zero."""
    fractions = [Fraction(repr(float(duration))) for duration in durations if duration > 0]
    if not fractions:
        return 0.0
    denominator = math.lcm(*(fraction.denominator for fraction in fractions))
    numerator = math.gcd(*(int(fraction * denominator) for fraction in fractions))
    return float(Fraction(numerator, denominator))


def discretize(schedule: Schedule, max_slots: int, *, coarse: bool = True) -> SlotProblem:
    """The problem of ``schedule`` in slots, with the routing and the durations that the schedule has.

    Args:
        schedule: any valid schedule of the problem, usually the heuristic's.
        max_slots: the most slots its makespan may be divided into; if the common slot of all durations is shorter,
            durations are rounded to a longer one.
        coarse: whether to round to about one slot per operation. Measured with F : B : W = 1 : 1.087 : 0.912, the order
            that HiGHS then finds is within 1.5% of the best known after 1 to 4 s; with two to four slots per operation
            it is no better after up to 18 s, or there is none.
    """
    problem, stages = schedule.problem, range(schedule.grid.stages)
    comm = problem.costs.communication
    durations = _durations(schedule)
    times = [time for by_microbatch in durations.values() for time in by_microbatch.values()]
    closing = [
        (
            problem.costs.reduce[stage],
            max(problem.duration(OpKind.STEP, worker) for worker in problem.live_workers(stage)),
        )
        for stage in stages
    ]
    tails = [sum(pair) for pair in closing]
    every = {*times, *(time for pair in closing for time in pair), comm}
    slot = common_slot(every)
    horizon = schedule.makespan
    exact = slot > 0.0 and horizon / slot <= max_slots
    if not exact:
        if coarse and sum(times) > 0.0:
            max_slots = max(1, min(max_slots, int(horizon * len(times) / sum(times))))
        slot = _rounding_slot(times, horizon, max_slots)

    def slots(duration: float) -> int:
        return round(duration / slot)

    return _build(schedule, durations, slots(comm), tuple(map(slots, tails)), slot, exact)


def _durations(schedule: Schedule) -> dict[tuple[int, int], dict[int, float]]:
    """Duration by (kind, stage), then micro-batch number."""
    per_pipeline = schedule.grid.microbatches
    found: dict[tuple[int, int], dict[int, float]] = {}
    # Solvers split every backward or none; the schedule may have fused some.
    split = schedule.problem.technique.decoupled
    kinds = (OpKind.FORWARD, *((OpKind.BACKWARD_INPUT, OpKind.BACKWARD_WEIGHT) if split else (OpKind.BACKWARD,)))
    for worker, ops in schedule.workers.items():
        duration = {_KINDS[kind]: schedule.problem.duration(kind, worker) for kind in kinds}
        for scheduled in ops:
            op = scheduled.op
            if op.kind is OpKind.FORWARD and op.microbatch is not None:
                number = op.microbatch.pipeline * per_pipeline + op.microbatch.index
                for kind, seconds in duration.items():
                    found.setdefault((kind, op.stage), {})[number] = seconds
    return found


def _rounding_slot(times: Sequence[float], horizon: float, max_slots: int) -> float:
    """The slot, not shorter than ``horizon / max_slots``, that distorts the durations least."""
    shortest = max(horizon / max(1, max_slots), 1e-12)
    positive = sorted({time for time in times if time > 0.0})
    candidates = {shortest}
    for time in positive[:: max(1, len(positive) // 16)]:
        parts = int(time / shortest)
        candidates |= {time / part for part in range(max(1, parts - 8), parts + 1)} if parts else set()

    def distortion(slot: float) -> tuple[float, float]:
        return sum(abs(max(1, round(time / slot)) * slot / time - 1.0) for time in positive), slot

    return min(candidates, key=distortion)


def _build(
    schedule: Schedule,
    durations: dict[tuple[int, int], dict[int, float]],
    comm: int,
    tails: tuple[int, ...],
    slot: float,
    exact: bool,
) -> SlotProblem:
    problem, grid = schedule.problem, schedule.grid
    stages, last = grid.stages, grid.stages - 1
    fused = (WEIGHT, 0) not in durations
    kinds = (FORWARD, BACKWARD) if fused else (FORWARD, BACKWARD, WEIGHT)
    groups: dict[tuple[tuple[Worker, ...], tuple[int, ...]], list[int]] = {}
    for number, microbatch in enumerate(grid.all_microbatches()):
        route = tuple(schedule.route(stage, microbatch) for stage in range(stages))
        lengths = tuple(_at_least_one(durations[k, s][number], slot) for k in kinds for s in range(stages))
        groups.setdefault((route, lengths), []).append(number)
    ops: list[SlotOp] = []
    for group, ((route, lengths), numbers) in enumerate(groups.items()):
        base = len(ops)
        index = {(k, s): base + i * stages + s for i, k in enumerate(kinds) for s in range(stages)}
        length = {(k, s): lengths[i * stages + s] for i, k in enumerate(kinds) for s in range(stages)}
        source: dict[tuple[int, int], tuple[int, int] | None] = {}
        head: dict[tuple[int, int], int] = {}
        to_end: dict[tuple[int, int], int] = {}
        path = [(FORWARD, s) for s in range(stages)] + [(BACKWARD, s) for s in reversed(range(stages))]
        before: tuple[int, int] | None = None
        for at in path:
            source[at] = before
            head[at] = 0 if before is None else head[before] + length[before] + comm * (before[1] != at[1])
            before = at
        for s in range(stages):
            if not fused:
                source[WEIGHT, s] = (BACKWARD, s)
                head[WEIGHT, s] = head[BACKWARD, s] + length[BACKWARD, s]
                to_end[WEIGHT, s] = length[WEIGHT, s] + tails[s]
            own_end = to_end.get((WEIGHT, s), tails[s])
            if s == 0:
                to_end[BACKWARD, s] = length[BACKWARD, s] + own_end
            else:
                through = comm + to_end[BACKWARD, s - 1]
                # When staggered, a later stage may end after the first: its own closing gives B no deadline.
                after = through if problem.technique.staggered else max(own_end, through)
                to_end[BACKWARD, s] = length[BACKWARD, s] + after
        for s in reversed(range(stages)):
            following = to_end[BACKWARD, s] if s == last else comm + to_end[FORWARD, s + 1]
            to_end[FORWARD, s] = length[FORWARD, s] + following
        for at, position in index.items():
            origin = source[at]
            ops.append(
                SlotOp(
                    group=group,
                    kind=at[0],
                    stage=at[1],
                    worker=grid.rank(route[at[1]]),
                    duration=length[at],
                    microbatches=tuple(numbers),
                    source=None if origin is None else index[origin],
                    lag=comm if origin is not None and origin[1] != at[1] else 0,
                    head=head[at],
                    to_end=to_end[at],
                )
            )
            assert position == len(ops) - 1
    return SlotProblem(
        tuple(ops), stages, fused, problem.technique.staggered, tails, problem.counted().in_flight_limit, slot, exact
    )


def _at_least_one(duration: float, slot: float) -> int:
    """In slots; rounding must not let an operation vanish."""
    return max(1, round(duration / slot)) if duration > 0.0 else 0


def schedule_from_starts(schedule: Schedule, problem: SlotProblem, starts: Sequence[Sequence[float]]) -> Schedule:
    """The schedule with the *order* of these starts and the real durations, everything as early as it can be.

    Args:
        schedule: the one that ``problem`` was made from.
        problem: what the solver was given.
        starts: for each of ``problem.ops``, the starts of its operations in ascending order.

    Raises:
        PlanningError: when the order contradicts the dependencies.
    """
    grid = schedule.grid
    microbatches = tuple(grid.all_microbatches())
    routes = [{mb: schedule.route(stage, mb) for mb in microbatches} for stage in range(grid.stages)]
    codes = Codes(schedule.problem, routes, fused=problem.fused)
    # At equal starts, operations without duration go first, in the order in which data flows.
    rows: dict[int, list[tuple[float, bool, int, int, int]]] = {}
    for op, times in zip(problem.ops, starts, strict=True):
        flow = op.kind * grid.stages + (op.stage if op.kind == FORWARD else grid.stages - op.stage)
        for turn, (number, start) in enumerate(zip(op.microbatches, times, strict=True)):
            row = (start, op.duration > 0, flow, turn, codes.code(op.kind, op.stage, number))
            rows.setdefault(op.worker, []).append(row)
    programs = {rank: [row[-1] for row in sorted(rows[rank])] for rank in sorted(rows)}
    sequence = interleave(codes, programs)
    return assemble(codes, *coupled(codes, sequence, best_timing(codes, sequence)))
