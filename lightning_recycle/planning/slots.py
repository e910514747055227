"""The planning problem in time slots, with interchangeable micro-batches merged: the input of exact solvers.

Concept: micro-batches with the same hosts at every stage form a *family*; which of them is which does not matter. Where
its home is alive and as fast as its peers, a micro-batch has one host; else every live peer of the stage may run it,
and who does is a decision. A *group* is the part of a family that takes one route (*spread* into routes, for models
that count), or the whole family with all its hosts (*gathered*, for models that choose for each micro-batch). Within a
group of one route it does not matter which micro-batch is which: take any schedule, and for
every operation assign its sorted start times to the micro-batches of the group in a fixed order. Nothing else changes:

- a worker is busy at the same times, and holds equally many micro-batches at every moment;
- if operation ``b`` needs ``a``, then ``a_j + p <= b_j`` for every member j, hence also for the sorted times: the k-th
  smallest ``b`` has k members with ``a`` at most that much earlier, so the k-th smallest ``a`` is.

So some optimal schedule sends every group first in, first out through every operation. A solver need not place the
operations of each micro-batch, only decide *how many* take a route, and how many of these have started an operation by
a given time. This keeps the model small: the running example has 4 groups instead of 18 micro-batches.

A backward that is decoupled is never fused here: a fused one takes as long as B and W together, so B with W directly
behind it, on the same worker, is as good for everybody and better for who waits for the input gradient.

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
from itertools import pairwise, product
from typing import TypeAlias

from lightning_recycle.planning.coupling import coupled
from lightning_recycle.planning.grid import Worker
from lightning_recycle.planning.ops import OpKind
from lightning_recycle.planning.problem import Problem
from lightning_recycle.planning.schedule import Schedule
from lightning_recycle.planning.timing import BACKWARD, FORWARD, WEIGHT, Codes, assemble, best_timing, interleave

__all__ = [
    "Placement",
    "SlotOp",
    "SlotProblem",
    "Window",
    "common_slot",
    "discretize",
    "families",
    "placements",
    "schedule_from_placements",
]

_KINDS = {
    OpKind.FORWARD: FORWARD,
    OpKind.BACKWARD_INPUT: BACKWARD,
    OpKind.BACKWARD: BACKWARD,
    OpKind.BACKWARD_WEIGHT: WEIGHT,
}

_MOST_ROUTES = 24  # of one family

Placement: TypeAlias = tuple[int, int, int, int, float]
"""Kind, stage and micro-batch number of an operation, the rank that runs it, and its start, in any unit."""


@dataclass(frozen=True, slots=True)
class SlotOp:
    """One kind of operation of one group at one stage: up to ``count`` operations."""

    group: int
    kind: int
    """FORWARD, BACKWARD (B, or BW when fused) or WEIGHT of :mod:`timing`."""
    stage: int
    hosts: tuple[tuple[int, int], ...]
    """The workers that may run it: rank, and duration there in slots. One if the group is a route."""
    count: int
    """Number of micro-batches in the group's family."""
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
    def worker(self) -> int:
        """Rank of the (first) worker."""
        return self.hosts[0][0]

    @property
    def duration(self) -> int:
        """In slots, on the fastest host."""
        return min(duration for _, duration in self.hosts)


@dataclass(frozen=True, slots=True)
class Window:
    """When the operations of a :class:`SlotOp` may start: none before ``first``, all of them by ``last``."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class SlotProblem:
    """A planning problem in slots.

    ``exact`` says whether the slots represent all durations without rounding, ``complete`` whether every re-routing is
    in it: only if both hold is a bound of it one of the problem.
    """

    ops: tuple[SlotOp, ...]
    families: tuple[tuple[int, ...], ...]
    """Numbers ``d * M + m`` of the micro-batches of each family."""
    groups: tuple[int, ...]
    """The family of each group."""
    alike: tuple[tuple[int, int], ...]
    """Pairs of ranks whose pipelines may be exchanged as a whole: we may ask that the first runs at least as many."""
    peers: tuple[int, ...]
    """Live workers, per stage."""
    fused: bool
    staggered: bool
    tails: tuple[int, ...]
    """REDUCE plus STEP, per stage."""
    limits: tuple[int, ...] | None
    """The most micro-batches in flight per worker, by stage."""
    slot: float
    exact: bool
    complete: bool

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.tails)

    def refined(self, factor: int) -> SlotProblem:
        """The same problem with each slot divided into ``factor``."""
        ops = tuple(
            replace(
                op,
                hosts=tuple((rank, duration * factor) for rank, duration in op.hosts),
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

    def decided(self, group: int) -> bool:
        """Whether the group is its whole family, so that its size is known."""
        return self.groups.count(self.groups[group]) == 1

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
        for op in self.ops:
            if op.kind == BACKWARD:
                deadline[op.stage] = max(deadline[op.stage], length - (op.to_end - op.duration))
        busiest = self._least_load()
        stage_end = [length, *(deadline[stage] - busiest[stage] + length for stage in range(1, self.stages))]
        return [Window(op.head, (stage_end[op.stage] if op.kind == WEIGHT else length) - op.to_end) for op in self.ops]

    def _least_load(self) -> list[int]:
        """The F and B that the busiest worker of each stage has at least, in slots."""
        forced: dict[int, int] = {}  # by worker: what no other may run
        shortest: dict[tuple[int, int, int], int] = {}  # family, kind, stage: one operation on its fastest host
        for op in self.ops:
            if op.kind == WEIGHT:
                continue
            key = self.groups[op.group], op.kind, op.stage
            shortest[key] = min(shortest.get(key, op.duration), op.duration)
            if self.decided(op.group) and len(op.hosts) == 1:
                forced[op.worker] = forced.get(op.worker, 0) + op.count * op.duration
        total = [0] * self.stages
        for (family, _, stage), duration in shortest.items():
            total[stage] += len(self.families[family]) * duration
        least = [-(-load // peers) for load, peers in zip(total, self.peers, strict=True)]
        for rank, load in forced.items():
            least[rank % self.stages] = max(least[rank % self.stages], load)
        return least

    def variables(self, length: int) -> int:
        """Number of (operation, slot) pairs that are open when the iteration has ``length`` slots."""
        return sum(max(0, window.last - window.first) for window in self.windows(length))

    def placements(self, starts: Sequence[Sequence[int]]) -> list[Placement]:
        """What the starts of the operations, each in ascending order, amount to; groups are routes."""
        first = {op.group: starts[index] for index, op in enumerate(self.ops) if (op.kind, op.stage) == (FORWARD, 0)}
        members: dict[int, list[int]] = {group: [] for group in first}
        for family, numbers in enumerate(self.families):
            arrivals = sorted((t, g) for g, times in first.items() if self.groups[g] == family for t in times)
            for number, (_, group) in zip(numbers, arrivals, strict=True):
                members[group].append(number)
        return [
            (op.kind, op.stage, number, op.worker, start)
            for op, times in zip(self.ops, starts, strict=True)
            for number, start in zip(members[op.group], times, strict=True)
        ]


def common_slot(durations: Iterable[float]) -> float:
    """The longest slot that divides all (decimal) durations; 0.0 when all are zero."""
    fractions = [Fraction(repr(float(duration))) for duration in durations if duration > 0]
    if not fractions:
        return 0.0
    denominator = math.lcm(*(fraction.denominator for fraction in fractions))
    numerator = math.gcd(*(int(fraction * denominator) for fraction in fractions))
    return float(Fraction(numerator, denominator))


def discretize(schedule: Schedule, max_slots: int, *, coarse: bool = True, spread: bool = True) -> SlotProblem:
    """The problem of ``schedule`` in slots.

    Args:
        schedule: any valid schedule of the problem, usually the heuristic's.
        max_slots: the most slots its makespan may be divided into; if the common slot of all durations is shorter,
            durations are rounded to a longer one.
        coarse: whether to round to about one slot per operation. Measured with F : B : W = 1 : 1.087 : 0.912, the order
            that HiGHS then finds is within 1.5% of the best known after 1 to 4 s; with two to four slots per operation
            it is no better after up to 18 s, or there is none.
        spread: whether each route of a family is a group of its own; otherwise a group has several hosts. Where a
            family has more than 24 routes, only the schedule's are kept, and the result is not ``complete``.
    """
    problem, stages = schedule.problem, range(schedule.grid.stages)
    comm = problem.costs.communication
    fused = not problem.technique.decoupled
    times = _work(schedule)
    closing = [
        (
            problem.costs.of(OpKind.REDUCE, stage),
            max(problem.duration(OpKind.STEP, worker) for worker in problem.live_workers(stage)),
        )
        for stage in stages
    ]
    every = {*times, *(time for pair in closing for time in pair), comm}
    slot = common_slot(every)
    horizon = schedule.makespan
    exact = slot > 0.0 and horizon / slot <= max_slots
    if not exact:
        if coarse and sum(times) > 0.0:
            max_slots = max(1, min(max_slots, int(horizon * len(times) / sum(times))))
        slot = _rounding_slot(times, horizon, max_slots)

    def duration(kind: int, rank: int) -> int:
        return _at_least_one(_duration(problem, kind, rank, fused), slot)

    tails = tuple(round(sum(pair) / slot) for pair in closing)
    found, complete = families(schedule), True
    if spread and any(math.prod(map(len, hosts)) > _MOST_ROUTES for hosts in found):
        found, complete = families(schedule, reroute=False), False
    ops: list[SlotOp] = []
    groups: list[int] = []
    for family, (hosts, numbers) in enumerate(found.items()):
        for route in product(*hosts) if spread else [hosts]:
            ranks = tuple((rank,) if isinstance(rank, int) else rank for rank in route)
            table = {
                (kind, stage): tuple((rank, duration(kind, rank)) for rank in ranks[stage])
                for kind in ((FORWARD, BACKWARD) if fused else (FORWARD, BACKWARD, WEIGHT))
                for stage in stages
            }
            ops += _operations(
                table, len(ops), len(groups), len(numbers), round(comm / slot), tails, problem.technique.staggered
            )
            groups.append(family)
    return SlotProblem(
        ops=tuple(ops),
        families=tuple(map(tuple, found.values())),
        groups=tuple(groups),
        alike=_alike(problem) if complete else (),
        peers=tuple(len(problem.live_workers(stage)) for stage in stages),
        fused=fused,
        staggered=problem.technique.staggered,
        tails=tails,
        limits=problem.counted().in_flight_limit,
        slot=slot,
        exact=exact,
        complete=complete,
    )


def families(schedule: Schedule, *, reroute: bool = True) -> dict[tuple[tuple[int, ...], ...], list[int]]:
    """The micro-batches, as numbers ``d * M + m``, by their hosts: for each stage the ranks that may run them.

    Args:
        schedule: a valid schedule.
        reroute: whether a micro-batch without a home, or at a stage with workers of different speed, may go to any
            live peer; otherwise all stay where the schedule has them.
    """
    problem, grid = schedule.problem, schedule.grid
    live = [problem.live_workers(stage) for stage in range(grid.stages)]
    uneven = [len({problem.factor(worker) for worker in workers}) > 1 for workers in live]
    found: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for number, microbatch in enumerate(grid.all_microbatches()):
        hosts = []
        for stage, workers in enumerate(live):
            home = Worker(microbatch.pipeline, stage)
            now = schedule.route(stage, microbatch)
            moves = reroute and (uneven[stage] or home in problem.failed)
            hosts.append(tuple(map(grid.rank, workers)) if moves else (grid.rank(now),))
        found.setdefault(tuple(hosts), []).append(number)
    return found


def _alike(problem: Problem) -> tuple[tuple[int, int], ...]:
    """At the first stage where micro-batches are re-routed: the workers of consecutive pipelines without any failure
    or slow worker. Exchanging two such pipelines changes nothing."""
    special = {worker.pipeline for worker in problem.failed} | {worker.pipeline for worker, _ in problem.worker_factors}
    stage = min((worker.stage for worker in problem.failed), default=0)
    grid = problem.grid
    plain = [grid.rank(Worker(d, stage)) for d in range(grid.pipelines) if d not in special]
    return tuple(pairwise(plain))


def _work(schedule: Schedule) -> list[float]:
    """The duration of every F, B and W, or F and BW where backwards are not decoupled."""
    problem = schedule.problem
    split = (OpKind.BACKWARD_INPUT, OpKind.BACKWARD_WEIGHT) if problem.technique.decoupled else (OpKind.BACKWARD,)
    return [
        problem.duration(kind, worker)
        for worker, ops in schedule.workers.items()
        for scheduled in ops
        if scheduled.op.kind is OpKind.FORWARD
        for kind in (OpKind.FORWARD, *split)
    ]


def _duration(problem: Problem, kind: int, rank: int, fused: bool) -> float:
    worker = problem.grid.worker(rank)
    if kind == FORWARD:
        return problem.duration(OpKind.FORWARD, worker)
    if kind == WEIGHT:
        return problem.duration(OpKind.BACKWARD_WEIGHT, worker)
    return problem.duration(OpKind.BACKWARD if fused else OpKind.BACKWARD_INPUT, worker)


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


def _operations(
    hosts: dict[tuple[int, int], tuple[tuple[int, int], ...]],
    base: int,
    group: int,
    count: int,
    comm: int,
    tails: tuple[int, ...],
    staggered: bool,
) -> list[SlotOp]:
    """The operations of one group, given (rank, duration) of the hosts by (kind, stage); the first gets index
    ``base``."""
    stages, last = len(tails), len(tails) - 1
    fused = (WEIGHT, 0) not in hosts
    length = {at: min(duration for _, duration in options) for at, options in hosts.items()}
    index = {at: base + position for position, at in enumerate(hosts)}
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
            to_end[BACKWARD, s] = length[BACKWARD, s] + (through if staggered else max(own_end, through))
    for s in reversed(range(stages)):
        following = to_end[BACKWARD, s] if s == last else comm + to_end[FORWARD, s + 1]
        to_end[FORWARD, s] = length[FORWARD, s] + following
    return [
        SlotOp(
            group=group,
            kind=at[0],
            stage=at[1],
            hosts=options,
            count=count,
            source=None if (origin := source[at]) is None else index[origin],
            lag=comm if origin is not None and origin[1] != at[1] else 0,
            head=head[at],
            to_end=to_end[at],
        )
        for at, options in hosts.items()
    ]


def _at_least_one(duration: float, slot: float) -> int:
    """In slots; rounding must not let an operation vanish."""
    return max(1, round(duration / slot)) if duration > 0.0 else 0


def placements(schedule: Schedule) -> list[Placement]:
    """Where and when each operation runs; a fused backward of a decoupled problem counts as B and W in a row."""
    problem, grid = schedule.problem, schedule.grid
    found: list[Placement] = []
    for worker, ops in schedule.workers.items():
        for scheduled in ops:
            op, start = scheduled.op, scheduled.start
            if op.microbatch is None:
                continue
            number = op.microbatch.pipeline * grid.microbatches + op.microbatch.index
            found.append((_KINDS[op.kind], op.stage, number, grid.rank(worker), start))
            if op.kind is OpKind.BACKWARD and problem.technique.decoupled:
                end = start + problem.duration(OpKind.BACKWARD_INPUT, worker)
                found.append((WEIGHT, op.stage, number, grid.rank(worker), end))
    return found


def schedule_from_placements(schedule: Schedule, placements: Iterable[Placement]) -> Schedule:
    """The schedule with the routes and the *order* of these starts and the real durations, all as early as can be.

    Args:
        schedule: any schedule of the problem.
        placements: one for each F, B (BW) and W.

    Raises:
        PlanningError: when the order contradicts the dependencies.
    """
    problem, grid, rows = schedule.problem, schedule.grid, list(placements)
    microbatches = tuple(grid.all_microbatches())
    routes = [{mb: schedule.route(stage, mb) for mb in microbatches} for stage in range(grid.stages)]
    for _, stage, number, rank, _ in rows:
        routes[stage][microbatches[number]] = grid.worker(rank)
    fused = not problem.technique.decoupled
    codes = Codes(problem, routes, fused=fused)
    # At equal starts, operations without duration go first, in the order in which data flows.
    programs: dict[int, list[tuple[float, bool, int, int, int]]] = {}
    for kind, stage, number, rank, start in rows:
        flow = kind * grid.stages + (stage if kind == FORWARD else grid.stages - stage)
        lasts = _duration(problem, kind, rank, fused) > 0.0
        programs.setdefault(rank, []).append((start, lasts, flow, number, codes.code(kind, stage, number)))
    ordered = {rank: [row[-1] for row in sorted(programs[rank])] for rank in sorted(programs)}
    sequence = interleave(codes, ordered)
    return assemble(codes, *coupled(codes, sequence, best_timing(codes, sequence)))
