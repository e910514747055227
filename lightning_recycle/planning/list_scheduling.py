"""List scheduling under a priority rule, and the fixed patterns 1F1B and ZB-H1.

*List scheduling*: a free worker takes a ready operation, older micro-batches first. The rule decides which kind goes
first, from the number of the worker's micro-batches between F and B. A backward that may be split is run as B at once
and W later, or as BW where B would exceed the memory. A worker that expects a backward soon may stay idle until then. A
schedule keeps within the limits and never deadlocks: the last stage can always finish its micro-batches (BW takes no
memory), so it takes new ones, so the stage before it does too, and so on.

*Fixed patterns*, without failures: in 1F1B (PipeDream-Flush, arXiv 2006.09503) stage s first runs S - s forwards, then
alternates one backward, one forward, and drains. ZB-H1 (arXiv 2401.10241) is the same with a split backward, in which a
weight gradient waits until its memory is needed; with S micro-batches held it takes 3M + S - 1 slots at equal costs. No
stage warms up further than the one before it, which would deadlock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import inf

from lightning_recycle.errors import PlanningError
from lightning_recycle.planning.costs import Memory
from lightning_recycle.planning.problem import Problem
from lightning_recycle.planning.routing import reroute
from lightning_recycle.planning.schedule import Schedule
from lightning_recycle.planning.timing import BACKWARD, FORWARD, FUSED, WEIGHT, Codes, assemble, best_timing, interleave


@dataclass(frozen=True, slots=True)
class Express:
    """Operations that nothing may delay: first gradient and last micro-batches.

    The first ``first_backwards`` and the last ``last_backwards`` B are waited for, whatever else could begin. The last
    ``last_forwards_first`` F go before any B. ``awaited`` of the last F are waited for before operations that the
    rule puts behind them, if that costs less than ``patience`` times their own wait.
    """

    first_backwards: int = 0
    last_backwards: int = 0
    last_forwards_first: int = 0
    awaited: int = 0
    patience: float = 0.0


NO_EXPRESS = Express()


@dataclass(frozen=True, slots=True)
class Rule:
    """Priorities among the operations that are ready.

    Args:
        ages: per micro-batch, numbered d * M + m; lower goes first.
        forward_first: per stage; with fewer micro-batches than this between F and B, an F goes before a B, as does a W
            that makes room for it; otherwise only W would be left before the last gradient.
        patience: a worker waits idle for the next backward if that costs less than so many times the backward's wait
            for an F (first number) or a W (second) begun now; 0 for never.
    """

    ages: Sequence[int]
    forward_first: tuple[int, ...]
    patience: tuple[float, float] = (0.0, 0.0)
    express: Express = NO_EXPRESS


def play(codes: Codes, rule: Rule, limit: Sequence[int]) -> tuple[list[int], int]:
    """The order of one list schedule's operations, and the sum of the peaks held.

    ``limit``: the most micro-batches of a worker, per stage. Raises PlanningError when a worker has no room for one.
    """
    state = _ScheduleSimulation(codes, rule, limit)
    state.run()
    return state.sequence, sum(state.peak)


class _ScheduleSimulation:
    """An iteration that is played forward in time; workers by rank."""

    def __init__(self, codes: Codes, rule: Rule, limit: Sequence[int]) -> None:
        stages, n, workers = codes.stages, codes.n, range(codes.problem.grid.num_workers)
        self.codes, self.stages, self.n, self.last = codes, stages, n, stages - 1
        self.communication = codes.problem.costs.communication
        # Ready operations, as n * age + micro-batch: older micro-batches go first.
        self.forwards: list[list[int]] = [[] for _ in workers]
        self.backwards: list[list[int]] = [[] for _ in workers]
        self.weights: list[list[int]] = [[] for _ in workers]
        self.priorities = [age * n + number for number, age in enumerate(rule.ages)]
        self.busy = [False] * len(workers)
        self.held, self.peak = [0] * len(workers), [0] * len(workers)
        self.waiting = [0] * len(workers)  # between F and B
        self.forward_first, self.limit = rule.forward_first, limit
        positive = [time for row in codes.times for time in set(row) if time > 0.0]
        self.tolerance = 1e-9 * min(positive, default=1.0)  # times that differ only by rounding are the same moment
        memory = codes.problem.memory
        self.room = None if memory is None else _Room(codes, memory)
        is_patient = any(rule.patience) or rule.express != NO_EXPRESS
        self.arrivals = _Arrivals(codes, rule, self.tolerance) if is_patient else None
        # An operation ends (its code), or its result arrives at the next stage (code + size).
        self.events: list[tuple[float, int]] = []
        self.awake: set[int] = set()  # workers that may begin an operation
        self.now = 0.0
        self.sequence: list[int] = []

    def run(self) -> None:
        events, awake, size, tolerance = self.events, self.awake, self.codes.size, self.tolerance
        for number, rank in enumerate(self.codes.ranks[FORWARD]):
            heappush(self.forwards[rank], self.priorities[number])
            awake.add(rank)
        while True:
            for rank in awake:
                if not self.busy[rank]:
                    self._begin_next(rank)
            awake.clear()
            if not events:
                if any(self.forwards):
                    raise PlanningError("a worker has no room for a micro-batch: it takes more than the mean one.")
                return
            self.now = events[0][0]
            while events and events[0][0] <= self.now + tolerance:
                self.now, event = heappop(events)
                if event < size:
                    self._end(event)
                else:
                    self._arrive(event - size)

    def _begin_next(self, rank: int) -> None:
        """Begins an operation on an idle worker, if one is ready and need not wait."""
        stage, n = rank % self.stages, self.n
        forwards, backwards, weights = self.forwards[rank], self.backwards[rank], self.weights[rank]
        fits = self.held[rank] < self.limit[stage]
        if self.room is not None:
            fits = fits and self.room.has_for_forward(rank, stage, forwards[0] % n if forwards else None)
        urgent = self.waiting[rank] < self.forward_first[stage]
        if self.arrivals is not None:
            urgent = urgent or self.arrivals.is_last_forward(rank)
        if forwards and urgent and (fits or weights):
            kind, ready = (FORWARD, forwards) if fits else (WEIGHT, weights)
        elif backwards:
            kind, ready = BACKWARD, backwards
            if self.room is not None and not self.codes.fused:
                kind = self.room.backward_kind(rank, stage, backwards[0] % n)
        elif forwards and fits:
            kind, ready = FORWARD, forwards
        elif weights:
            kind, ready = WEIGHT, weights
        else:
            return
        seconds = self.codes.times[kind * self.stages + stage][ready[0] % n]
        if self.arrivals is not None:
            takes_forward = fits and (kind == WEIGHT or (urgent and kind != FORWARD))
            if self.arrivals.are_worth_waiting_for(rank, kind, self.now, seconds, takes_forward):
                return
        self._begin(rank, kind, heappop(ready) % n, seconds)

    def _begin(self, rank: int, kind: int, number: int, seconds: float) -> None:
        stage, end = rank % self.stages, self.now + seconds
        if kind == FORWARD:
            self.waiting[rank] += 1
            self.held[rank] += 1
            self.peak[rank] = max(self.peak[rank], self.held[rank])
        elif kind != WEIGHT:
            self.waiting[rank] -= 1
        if self.room is not None:
            self.room.take(rank, kind, stage, number)
        if self.arrivals is not None:
            self.arrivals.begin(rank, kind, number, end + self.communication)
        self.busy[rank] = True
        code = self.codes.code(kind, stage, number)
        self.sequence.append(code)
        heappush(self.events, (end, code))

    def _end(self, code: int) -> None:
        key, number = divmod(code, self.n)
        kind, stage = divmod(key, self.stages)
        rank = self.codes.ranks[key][number]
        self.busy[rank] = False
        self.awake.add(rank)
        if kind == BACKWARD and not self.codes.fused:
            heappush(self.weights[rank], self.priorities[number])
        elif kind != FORWARD:
            self.held[rank] -= 1
        elif stage == self.last:
            heappush(self.backwards[rank], self.priorities[number])
        if kind == WEIGHT or stage == (self.last if kind == FORWARD else 0):
            return
        if self.communication > 0.0:
            heappush(self.events, (self.now + self.communication, code + self.codes.size))
        else:
            self._arrive(code)

    def _arrive(self, code: int) -> None:
        """The result of an operation arrives at the next or previous stage."""
        key, number = divmod(code, self.n)
        kind, stage = divmod(key, self.stages)
        is_forward = kind == FORWARD
        rank = self.codes.ranks[stage + 1 if is_forward else stage - 1][number]
        if self.arrivals is not None:
            self.arrivals.arrive(rank, is_forward)
        heappush((self.forwards if is_forward else self.backwards)[rank], self.priorities[number])
        self.awake.add(rank)


class _Room:
    """Free bytes of each worker, as operations change them."""

    def __init__(self, codes: Codes, memory: Memory) -> None:
        self.changes = codes.bytes_of(memory)
        self.usual = memory.after_forward
        self.free = [memory.room(rank % codes.stages) for rank in range(codes.problem.grid.num_workers)]

    def has_for_forward(self, rank: int, stage: int, number: int | None) -> bool:
        """Whether F of a micro-batch, by default of the mean one, fits."""
        size = self.usual[stage] if number is None else self.changes[FORWARD][stage][number]
        return size <= self.free[rank]

    def backward_kind(self, rank: int, stage: int, number: int) -> int:
        """BACKWARD if what its W needs fits, else FUSED."""
        left = self.free[rank] - self.changes[BACKWARD][stage][number]
        return FUSED if left < min(0.0, self.free[rank]) else BACKWARD

    def take(self, rank: int, kind: int, stage: int, number: int) -> None:
        """An operation begins; memory that it frees counts as free from then on."""
        self.free[rank] -= self.changes[kind][stage][number]


class _Arrivals:
    """Results under way to each worker, for which it may stay idle."""

    def __init__(self, codes: Codes, rule: Rule, tolerance: float) -> None:
        self.codes, self.express, self.patience, self.tolerance = codes, rule.express, rule.patience, tolerance
        workers = range(codes.problem.grid.num_workers)
        self.forwards: list[list[float]] = [[] for _ in workers]
        self.backwards: list[list[float]] = [[] for _ in workers]
        self.forwards_left, self.backwards_left, self.backwards_begun = ([0] * len(workers) for _ in range(3))
        for row in codes.ranks[: codes.stages]:
            for rank in row:
                self.forwards_left[rank] += 1
                self.backwards_left[rank] += 1

    def is_last_forward(self, rank: int) -> bool:
        """Whether the next F is one of the last, which go before any B."""
        return self.forwards_left[rank] <= self.express.last_forwards_first

    def are_worth_waiting_for(self, rank: int, kind: int, now: float, seconds: float, takes_forward: bool) -> bool:
        """Whether to stay idle instead of beginning an operation of so many ``seconds``."""
        forwards, backwards = self.forwards[rank], self.backwards[rank]
        if takes_forward and forwards and self.forwards_left[rank] <= self.express.awaited:
            idle = forwards[0] - now
            if idle < self.express.patience * (seconds - idle) - self.tolerance:
                return True
        if not backwards or kind not in (FORWARD, WEIGHT):
            return False
        patience = self.patience[kind == WEIGHT]
        if kind == FORWARD and self.is_last_forward(rank):
            patience = 0.0
        elif (
            self.backwards_begun[rank] < self.express.first_backwards
            or self.backwards_left[rank] <= self.express.last_backwards
        ):
            patience = inf
        idle = backwards[0] - now
        remaining = seconds - idle
        return remaining > self.tolerance and idle < patience * remaining

    def begin(self, rank: int, kind: int, number: int, arrival: float) -> None:
        """An operation begins, whose result arrives at ``arrival``."""
        stages = self.codes.stages
        stage = rank % stages
        if kind == FORWARD:
            self.forwards_left[rank] -= 1
            if stage < stages - 1:
                heappush(self.forwards[self.codes.ranks[stage + 1][number]], arrival)
        elif kind != WEIGHT:
            self.backwards_begun[rank] += 1
            self.backwards_left[rank] -= 1
            if stage:
                heappush(self.backwards[self.codes.ranks[stage - 1][number]], arrival)

    def arrive(self, rank: int, is_forward: bool) -> None:
        heappop((self.forwards if is_forward else self.backwards)[rank])


def one_f_one_b(problem: Problem) -> Schedule:
    """The 1F1B schedule of a problem without failures, with fused backwards.

    Where memory holds fewer than S - s the warm-up is shortened.

    Raises:
        PlanningError: when a worker has failed, or there are more lanes than pipelines.
    """
    if problem.failed:
        failed = ", ".join(map(str, sorted(problem.failed)))
        raise PlanningError(f"1F1B cannot handle failures, but {failed} failed: use the planner 'heuristic'.")
    if problem.grid.lanes != problem.grid.pipelines:
        raise PlanningError(f"1F1B runs each pipeline on a lane of its own, not {problem.grid}: use 'heuristic'.")
    problem = replace(problem, technique=replace(problem.technique, split_backward=False))
    codes = Codes(problem, reroute(problem.grid, ()), fused=True)
    sequence = fixed_pattern(codes, problem.counted().in_flight_limit)
    return assemble(codes, sequence, best_timing(codes, sequence))


def fixed_pattern(codes: Codes, held: Sequence[int] | None) -> list[int]:
    """The operations of 1F1B (ZB-H1 if backwards are split), by dependencies.

    ``held``: the most micro-batches of a worker, per stage.
    """
    grid = codes.problem.grid
    held = held or (grid.microbatches,) * grid.stages
    programs: dict[int, list[int]] = {}
    most = grid.microbatches
    for stage in range(grid.stages):
        most = min(most, grid.stages - stage, held[stage])  # no further than the stage before, which would deadlock
        order = _pattern(grid.microbatches, most, None if codes.fused else held[stage])
        for pipeline in range(grid.pipelines):
            first = pipeline * grid.microbatches
            programs[pipeline * grid.stages + stage] = [codes.code(kind, stage, first + m) for kind, m in order]
    return interleave(codes, programs)


def _pattern(microbatches: int, warmup: int, held: int | None) -> list[tuple[int, int]]:
    """(kind, micro-batch) in a stage's order; ``held``: None for fused backwards."""
    order = [(FORWARD, m) for m in range(warmup)]
    forwards, weights = warmup, 0
    for m in range(microbatches):
        order.append((BACKWARD, m))
        if held is not None and weights <= m and (forwards - weights == held or forwards == microbatches):
            order.append((WEIGHT, weights))
            weights += 1
        if forwards < microbatches:
            order.append((FORWARD, forwards))
            forwards += 1
    if held is not None:
        order += [(WEIGHT, m) for m in range(weights, microbatches)]
    return order
