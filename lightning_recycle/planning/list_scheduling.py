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
        forward_first: per stage; a worker with fewer micro-batches than this between F and B runs an F before a B. If
            there is no room for the F, it runs a W before a B, to make room. Without this rule only W would be left
            before the last gradient.
        patience: a worker waits idle for the next backward if that costs less than so many times the backward's wait
            for an F (first number) or a W (second) begun now; 0 for never.
    """

    ages: Sequence[int]
    forward_first: tuple[int, ...]
    patience: tuple[float, float] = (0.0, 0.0)
    express: Express = NO_EXPRESS


def play_list_schedule(codes: Codes, rule: Rule, limit: Sequence[int]) -> tuple[list[int], int]:
    """Plays one list schedule: the order of operations, the sum of peaks in flight.

    ``limit``: the most micro-batches in flight on a worker, per stage. Raises PlanningError when a worker has no memory
    for a micro-batch.
    """
    state = _ScheduleSimulation(codes, rule, limit)
    state.run()
    return state.sequence, sum(state.peak)


class _ScheduleSimulation:
    """An iteration that is played forward in time; lists are by the worker's rank."""

    def __init__(self, codes: Codes, rule: Rule, limit: Sequence[int]) -> None:
        workers = range(codes.problem.grid.num_workers)
        self.codes, self.stages, self.last = codes, codes.stages, codes.stages - 1
        self.num_microbatches = codes.n
        self.communication = codes.problem.costs.communication
        # Ready operations, as num_microbatches * age + micro-batch: older micro-batches go first.
        self.forwards: list[list[int]] = [[] for _ in workers]
        self.backwards: list[list[int]] = [[] for _ in workers]
        self.weights: list[list[int]] = [[] for _ in workers]
        self.priorities = [age * codes.n + number for number, age in enumerate(rule.ages)]
        self.busy = [False] * len(workers)
        self.in_flight, self.peak = [0] * len(workers), [0] * len(workers)  # micro-batches from F to the end of W
        self.awaiting_backward = [0] * len(workers)  # micro-batches between F and B
        self.forward_first, self.limit = rule.forward_first, limit
        positive = [time for row in codes.times for time in set(row) if time > 0.0]
        self.tolerance = 1e-9 * min(positive, default=1.0)  # times that differ only by rounding are the same moment
        memory = codes.problem.memory
        self.free_memory = None if memory is None else _FreeMemory(codes, memory)
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
        stage, count = rank % self.stages, self.num_microbatches
        forwards, backwards, weights = self.forwards[rank], self.backwards[rank], self.weights[rank]
        fits = self.in_flight[rank] < self.limit[stage]
        if self.free_memory is not None:
            fits = fits and self.free_memory.fits_forward(rank, stage, forwards[0] % count if forwards else None)
        urgent = self.awaiting_backward[rank] < self.forward_first[stage]
        if self.arrivals is not None:
            urgent = urgent or self.arrivals.is_last_forward(rank)
        if forwards and urgent and (fits or weights):
            kind, ready = (FORWARD, forwards) if fits else (WEIGHT, weights)
        elif backwards:
            kind, ready = BACKWARD, backwards
            if self.free_memory is not None and not self.codes.fused:
                kind = self.free_memory.backward_kind(rank, stage, backwards[0] % count)
        elif forwards and fits:
            kind, ready = FORWARD, forwards
        elif weights:
            kind, ready = WEIGHT, weights
        else:
            return
        seconds = self.codes.times[kind * self.stages + stage][ready[0] % count]
        if self.arrivals is not None:
            takes_forward = fits and (kind == WEIGHT or (urgent and kind != FORWARD))
            if self.arrivals.are_worth_waiting_for(rank, kind, self.now, seconds, takes_forward):
                return
        self._begin(rank, kind, heappop(ready) % count, seconds)

    def _begin(self, rank: int, kind: int, number: int, seconds: float) -> None:
        stage, end = rank % self.stages, self.now + seconds
        if kind == FORWARD:
            self.awaiting_backward[rank] += 1
            self.in_flight[rank] += 1
            self.peak[rank] = max(self.peak[rank], self.in_flight[rank])
        elif kind != WEIGHT:
            self.awaiting_backward[rank] -= 1
        if self.free_memory is not None:
            self.free_memory.take(rank, kind, stage, number)
        if self.arrivals is not None:
            self.arrivals.begin(rank, kind, number, end + self.communication)
        self.busy[rank] = True
        code = self.codes.code(kind, stage, number)
        self.sequence.append(code)
        heappush(self.events, (end, code))

    def _end(self, code: int) -> None:
        key, number = divmod(code, self.num_microbatches)
        kind, stage = divmod(key, self.stages)
        rank = self.codes.ranks[key][number]
        self.busy[rank] = False
        self.awake.add(rank)
        if kind == BACKWARD and not self.codes.fused:
            heappush(self.weights[rank], self.priorities[number])
        elif kind != FORWARD:
            self.in_flight[rank] -= 1
        elif stage == self.last:
            heappush(self.backwards[rank], self.priorities[number])
        if kind == WEIGHT or stage == (self.last if kind == FORWARD else 0):
            return
        if self.communication > 0.0:
            heappush(self.events, (self.now + self.communication, code + self.codes.size))
        else:
            self._arrive(code)

    def _arrive(self, code: int) -> None:
        """The result of an operation arrives at the stage that waits for it."""
        key, number = divmod(code, self.num_microbatches)
        kind, stage = divmod(key, self.stages)
        is_forward = kind == FORWARD
        rank = self.codes.ranks[stage + 1 if is_forward else stage - 1][number]
        if self.arrivals is not None:
            self.arrivals.arrive(rank, is_forward)
        heappush((self.forwards if is_forward else self.backwards)[rank], self.priorities[number])
        self.awake.add(rank)


class _FreeMemory:
    """Free bytes of each worker, as operations change them."""

    def __init__(self, codes: Codes, memory: Memory) -> None:
        self.changes = codes.bytes_of(memory)
        self.mean_sizes = memory.after_forward
        self.free = [memory.room(rank % codes.stages) for rank in range(codes.problem.grid.num_workers)]

    def fits_forward(self, rank: int, stage: int, number: int | None) -> bool:
        """Whether F of micro-batch ``number`` fits; None: of the mean micro-batch."""
        size = self.mean_sizes[stage] if number is None else self.changes[FORWARD][stage][number]
        return size <= self.free[rank]

    def backward_kind(self, rank: int, stage: int, number: int) -> int:
        """BACKWARD if memory until its W fits, else FUSED."""
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
        """The earliest result under way to ``rank`` has arrived."""
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


def fixed_pattern(codes: Codes, limit: Sequence[int] | None) -> list[int]:
    """The operations of 1F1B (ZB-H1 if backwards are split), by dependencies.

    ``limit``: the most micro-batches in flight on a worker, per stage.
    """
    grid = codes.problem.grid
    limit = limit or (grid.microbatches,) * grid.stages
    programs: dict[int, list[int]] = {}
    most = grid.microbatches
    for stage in range(grid.stages):
        most = min(most, grid.stages - stage, limit[stage])  # no further than the stage before, which would deadlock
        order = _pattern(grid.microbatches, most, None if codes.fused else limit[stage])
        for pipeline in range(grid.pipelines):
            first = pipeline * grid.microbatches
            programs[pipeline * grid.stages + stage] = [codes.code(kind, stage, first + m) for kind, m in order]
    return interleave(codes, programs)


def _pattern(microbatches: int, warmup: int, limit: int | None) -> list[tuple[int, int]]:
    """(kind, micro-batch) in a stage's order; ``limit``: None for fused backwards."""
    order = [(FORWARD, m) for m in range(warmup)]
    forwards, weights = warmup, 0
    for m in range(microbatches):
        order.append((BACKWARD, m))
        if limit is not None and weights <= m and (forwards - weights == limit or forwards == microbatches):
            order.append((WEIGHT, weights))
            weights += 1
        if forwards < microbatches:
            order.append((FORWARD, forwards))
            forwards += 1
    if limit is not None:
        order += [(WEIGHT, m) for m in range(weights, microbatches)]
    return order
