"""List scheduling under a priority rule, the search for the rule; 1F1B and ZB-H1.

*List scheduling*: a free worker takes a ready operation, older micro-batches first. The rule decides which kind goes
first, from the number of the worker's micro-batches between F and B. A backward that may be split is run as B at once
and W later, or as BW where B would exceed the memory. A worker that expects a backward soon may stay idle until then. A
schedule keeps within the limits and never deadlocks: the last stage can always finish its micro-batches (BW takes no
memory), so it takes new ones, so the stage before it does too, and so on.

*Fixed patterns*, without failures: in 1F1B (PipeDream-Flush, arXiv 2006.09503) stage s first runs S - s forwards, then
alternates one backward, one forward, and drains. ZB-H1 (arXiv 2401.10241) is the same with a split backward, in which a
weight gradient waits until its memory is needed; with S micro-batches held it takes 3M + S - 1 slots at equal costs. No
stage warms up further than the one before it, which would deadlock.

*Search*: a hill climb finds up to which stage forwards go first (*split*: early stages feed the pipeline, late stages
the gradients), how many micro-batches the other stages have under way before they prefer backwards (*keep*), whether a
worker waits for a backward about to arrive (*patience*), and whether the first gradient and the last micro-batches wait
at any stage (*edge priority*). Random changes of single stages and micro-batches follow, kept if not worse, by a seeded
generator, until the goal is met or the effort is spent.

*Memory descent*: an eager plan holds many times the micro-batches that its period needs, so it is searched again under
less and less memory (``Problem.measure``): first the tightest worker, by bisection over a fraction of every worker's
memory; then the sum, stage by stage from the one that holds most. It takes at most an eighth of the effort and makes
neither period nor makespan more than 0.1 % longer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import inf
from random import Random
from typing import NamedTuple

from lightning_recycle.errors import PlanningError
from lightning_recycle.planning.child_process import check_cancelled
from lightning_recycle.planning.costs import Costs, Memory
from lightning_recycle.planning.problem import Problem, lower_bound
from lightning_recycle.planning.routing import reroute
from lightning_recycle.planning.schedule import EQUALLY_FAST, Schedule
from lightning_recycle.planning.timing import (
    BACKWARD,
    FORWARD,
    FUSED,
    WEIGHT,
    Codes,
    Timing,
    assemble,
    best_timing,
    interleave,
)


@dataclass(frozen=True, slots=True)
class EdgePriority:
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


NO_EDGE_PRIORITY = EdgePriority()


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
    edge_priority: EdgePriority = NO_EDGE_PRIORITY


def play_list_schedule(codes: Codes, rule: Rule, limit: Sequence[int]) -> tuple[list[int], int]:
    """Plays one list schedule: the order of operations, the sum of peaks in flight.

    ``limit``: the most micro-batches in flight on a worker, per stage. Raises PlanningError when a worker has no memory
    for a micro-batch.
    """
    return _ScheduleSimulation(codes, rule, limit).run()


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
        is_patient = any(rule.patience) or rule.edge_priority != NO_EDGE_PRIORITY
        self.arrivals = _Arrivals(codes, rule, self.tolerance) if is_patient else None
        # An operation ends (its code), or its result arrives at the next stage (code + size).
        self.events: list[tuple[float, int]] = []
        self.awake: set[int] = set()  # workers that may begin an operation
        self.now = 0.0
        self.sequence: list[int] = []

    def run(self) -> tuple[list[int], int]:
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
                return self.sequence, sum(self.peak)
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
        self.codes, self.tolerance = codes, tolerance
        self.edge_priority, self.patience = rule.edge_priority, rule.patience
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
        return self.forwards_left[rank] <= self.edge_priority.last_forwards_first

    def are_worth_waiting_for(self, rank: int, kind: int, now: float, seconds: float, takes_forward: bool) -> bool:
        """Whether to stay idle instead of beginning an operation of so many ``seconds``."""
        forwards, backwards = self.forwards[rank], self.backwards[rank]
        if takes_forward and forwards and self.forwards_left[rank] <= self.edge_priority.awaited:
            idle = forwards[0] - now
            if idle < self.edge_priority.patience * (seconds - idle) - self.tolerance:
                return True
        if not backwards or kind not in (FORWARD, WEIGHT):
            return False
        patience = self.patience[kind == WEIGHT]
        if kind == FORWARD and self.is_last_forward(rank):
            patience = 0.0
        elif (
            self.backwards_begun[rank] < self.edge_priority.first_backwards
            or self.backwards_left[rank] <= self.edge_priority.last_backwards
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


_SEED = 1
# Instead of beginning a W, or an F or W. With F : B : W = 1 : 1.1 : 0.9, 0.25 and 1 are worse, any cost is far worse.
_PATIENCES = ((0.0, 0.0), (0.5, 0.5))
_EDGE_PATIENCE = (0.3, 0.7)  # the same where forwards are awaited too
# Of the micro-batches that a stage can send out until its first gradient comes back. 24 x 64 x 128 with 5 % failed and
# F : B : W = 1 : 1.1 : 0.9: 3.5 % above the lower bound instead of 4.5 %.
_KEEP = 0.85
# What is urgent, of the micro-batches of a pipeline, and what is kept then, of those in a round trip. The same grid
# with S in flight: 2.8 % above the lower bound instead of 6.2 %.
_EDGE_BACKWARDS, _EDGE_FORWARDS, _AWAITED_FORWARDS, _AWAITING = 1 / 32, 0.3, 0.5, 1.6
_EDGE_KEEP = 0.6087
_FEWEST_PLAYS, _FEWEST_PATIENT_PLAYS = 3, 2  # however large the grid; those with patience take longer
_MOST_FRUITLESS = 400  # plays in a row without a better schedule


@dataclass(frozen=True, slots=True)
class Solution:
    """An order of operations, its times, and its rule; a smaller ``score`` is better."""

    score: tuple[float, float, int]
    rule: Rule | None
    sequence: list[int]
    timing: Timing
    plays: int = 0

    @classmethod
    def of(cls, codes: Codes, rule: Rule | None, sequence: list[int], timing: Timing, peaks: int = 0) -> Solution:
        """The solution with its score: period (else makespan), makespan, ``peaks``.

        ``peaks``: the sum of the workers' peaks of micro-batches; fewer leave more freedom to change the order.
        """
        length = timing.period if codes.problem.technique.staggered else timing.makespan
        # Rounding must not decide between equally good schedules.
        return cls((round(length, 9), round(timing.makespan, 9), peaks), rule, sequence, timing)


class _Point(NamedTuple):
    """A position of the hill climb: a number of stages, and indices of the rest."""

    split: int = 0
    patience: int = 0
    keep: int = 0
    edge_priority: int = 0


class Search:
    """Searches the best list schedule that ``effort`` operations buy.

    With 0 that is the plain rule's. ``goal``: sufficient period (without the staggered optimizer makespan) and
    makespan; by default a period at the lower bound.
    """

    def __init__(self, codes: Codes, effort: int, goal: Sequence[float] | None = None) -> None:
        problem, grid = codes.problem, codes.problem.grid
        self.codes = codes
        self.stages = grid.stages
        # Where micro-batches differ, fewer or more of them fit into memory than of the mean one.
        bounded = problem if codes.variation is None else replace(problem, memory=None)
        self.goal = goal or (lower_bound(bounded) * (1 + 1e-9), inf)
        operations = (2 if codes.fused else 3) * grid.stages * grid.global_microbatches
        self.has_few_plays = 0 < effort < 10 * operations
        self.fruitless = 0
        self.best: Solution | None = None
        self.best_by_rule: Solution | None = None
        """The best one from a rule, which the search varies."""
        # Random.random() gives the same numbers in every Python version; its other methods need not.
        self.draw = Random(_SEED).random

        self.ages = tuple(microbatch.index for microbatch in grid.all_microbatches())
        self.limit = _most_held(codes)
        # At equal durations all operations begin and end together: nothing is ever in the way of a backward.
        costs = problem.costs
        work = {*costs.forward, *costs.backward_input, *(() if codes.fused else costs.backward_weight)}
        uneven = len(work) > 1 or costs.communication or problem.worker_factors
        self.patiences: tuple[tuple[float, float], ...] = _PATIENCES if uneven else _PATIENCES[:1]
        self.keeps: list[tuple[int, ...]] = [(0,) * self.stages]
        self.edge_priorities = [NO_EDGE_PRIORITY]
        if uneven and self.stages > 1:
            trips = _round_trips(problem.costs, codes.durations)
            self.keeps.append(tuple(round(_KEEP * trip) for trip in trips))
            own, counts = _round_trips(problem.costs, codes.durations, itself=True), problem.live_counts()
            share = _EDGE_KEEP * grid.pipelines
            self.keeps.append(tuple(int(share * trip / live) for trip, live in zip(own, counts, strict=True)))
            self.patiences = (*_PATIENCES, _EDGE_PATIENCE)
            backwards = max(1, round(_EDGE_BACKWARDS * grid.microbatches))
            forwards, awaited = (int(share * grid.microbatches) for share in (_EDGE_FORWARDS, _AWAITED_FORWARDS))
            self.edge_priorities += [
                EdgePriority(backwards, backwards),
                EdgePriority(1, backwards, forwards, awaited, _AWAITING),
            ]
        fewest = _FEWEST_PATIENT_PLAYS if uneven else _FEWEST_PLAYS
        self.plays_left = max(1 if goal else fewest, effort // operations) if effort else 1
        self.plays = 0

    def run(self, starts: Iterable[list[int]] = (), first_rule: Rule | None = None) -> Solution:
        """The best solution found.

        ``starts``: other valid orders of all operations to try after the first rule. ``first_rule``: a rule to begin
        with, as far as the limits of the problem admit it.
        """
        first = _Point()
        if self.has_few_plays and len(self.keeps) > 1:  # the better guess then; patience alone comes second
            short = self.limit[0] < self.keeps[1][0]
            limited = int(self.limit[0] < self.codes.n)  # without a limit the first gradient is in time anyway
            patient = first._replace(patience=len(_PATIENCES) - 1, keep=1, edge_priority=limited)
            first = self._awaiting_point if short else patient
        if first_rule is not None:
            self._try(first_rule)
        if not self._is_finished:
            self._try(self._template(first))
        for sequence in starts:
            # The goal is not a bound where micro-batches differ: a given order may be faster.
            if not self._is_finished or self.codes.variation is not None:
                self._judge(sequence, None)  # of equally fast orders a given one is preferred
        self._climb(first)
        current = self.best_by_rule
        assert current is not None  # the first rule's
        while not self._is_finished:
            assert current.rule is not None
            solution = self._try(self._changed(current.rule))
            if solution.score <= current.score:
                current = solution
        assert self.best is not None
        return replace(self.best, plays=self.plays)

    @property
    def _is_finished(self) -> bool:
        met = self.best is not None and self.best.score[0] <= self.goal[0] and self.best.score[1] <= self.goal[1]
        return met or self.plays_left <= 0 or self.fruitless >= _MOST_FRUITLESS

    def _try(self, rule: Rule) -> Solution:
        sequence, sum_of_peaks = play_list_schedule(self.codes, rule, self.limit)
        solution = self._judge(sequence, rule, sum_of_peaks)
        if self.best_by_rule is None or solution.score < self.best_by_rule.score:
            self.best_by_rule = solution
        return solution

    def _judge(self, sequence: list[int], rule: Rule | None, sum_of_peaks: int = 0) -> Solution:
        check_cancelled()
        self.plays_left -= 1
        self.plays += 1
        # The exact period of a schedule that cannot become the start of further changes does not matter.
        hopeless = self.best_by_rule.score[0] + 1e-9 if self.best_by_rule else None
        solution = Solution.of(self.codes, rule, sequence, best_timing(self.codes, sequence, hopeless), sum_of_peaks)
        self.fruitless += 1
        if self.best is None or solution.score < self.best.score:
            self.best, self.fruitless = solution, 0
        return solution

    @property
    def _awaiting_point(self) -> _Point:
        """Where forwards are awaited: best where memory holds them back."""
        return _Point(0, len(self.patiences) - 1, len(self.keeps) - 1, len(self.edge_priorities) - 1)

    def _template(self, point: _Point) -> Rule:
        forward_first = self.limit[: point.split] + self.keeps[point.keep][point.split :]
        return Rule(self.ages, forward_first, self.patiences[point.patience], self.edge_priorities[point.edge_priority])

    def _climb(self, current: _Point) -> None:
        """Improves the numbers of a point, already played, one by one from a few starts."""
        seen = {current}

        def better(point: _Point) -> bool:
            nonlocal current
            if point in seen or self._is_finished:
                return False
            seen.add(point)
            before = self.best_by_rule
            self._try(self._template(point))
            if self.best_by_rule is not before:
                current = point
            return self.best_by_rule is not before

        stages = self.stages
        patient = range(1, min(len(self.patiences), len(_PATIENCES)))
        for start in (
            *(_Point(patience=patience) for patience in reversed(patient)),
            *(_Point(split) for split in (0, stages // 2, stages, 1)),
            # The last: where memory is short, keeping changes nothing, and plays are better spent on the others.
            *(_Point(patience=patient[-1], keep=keep) for keep in range(1, len(self.keeps))),
            *((self._awaiting_point,) if len(self.edge_priorities) > 1 else ()),
        ):
            better(start)
        while any(better(point) for point in self._neighbours(current)):
            pass

    def _neighbours(self, point: _Point) -> Iterator[_Point]:
        stages = self.stages
        splits = range(stages + 1) if stages <= 8 else sorted({0, 1, *(stages * k // 8 for k in range(9))})
        yield from (point._replace(split=split) for split in sorted(splits, key=lambda split: abs(split - point.split)))
        yield from (point._replace(patience=patience) for patience in range(len(self.patiences)))
        yield from (point._replace(keep=keep) for keep in range(len(self.keeps)))
        yield from (point._replace(edge_priority=edge_priority) for edge_priority in range(len(self.edge_priorities)))

    def _changed(self, rule: Rule) -> Rule:
        """``rule`` with random changes, or a random template, or micro-batches shuffled."""
        draw, stages = self.draw, self.stages
        kind = draw()
        if kind < 0.15:
            return self._template(_Point(int(draw() * (stages + 1))))
        if kind < 0.3:
            spread = 4.0 if kind < 0.2 else 1.5
            return replace(rule, ages=_ranks([age + draw() * spread for age in self.ages]))
        first, ages = list(rule.forward_first), [float(age) for age in rule.ages]
        for _ in range(1 + int(draw() * 2)):
            stage, choice = int(draw() * stages), draw()
            if choice < 0.2:
                first[stage] = 0 if first[stage] else self.limit[stage]
            elif choice < 0.7:
                # Beyond twice the number of stages, a count has no effect worth searching.
                first[stage] = int(draw() * (min(self.limit[stage], 2 * stages + 1) + 1))
            else:
                ages[int(draw() * len(ages))] += (draw() - 0.5) * 4.0
        return replace(rule, ages=_ranks(ages), forward_first=tuple(first))


def _most_held(codes: Codes) -> tuple[int, ...]:
    """Per stage, the most micro-batches that a worker can hold at any moment."""
    grid = codes.problem.grid
    most = [float(grid.global_microbatches)] * grid.stages
    for memory in codes.problem.memories:
        for stage, after_forward in enumerate(memory.after_forward):
            each = after_forward if codes.fused else min(after_forward, memory.after_backward[stage])
            if codes.variation is not None and memory is codes.problem.memory:
                least = (
                    min(ratios[stage] for ratios in part) for part in (codes.variation.held, codes.variation.waiting)
                )
                each *= min(least)
            most[stage] = min(most[stage], memory.most(stage, each))
    return tuple(map(int, most))


def _round_trips(costs: Costs, durations: Sequence[float], itself: bool = False) -> tuple[float, ...]:
    """Per stage, the forwards that fit until the gradient of the first one arrives.

    ``itself``: count F and B of the stage itself, too.
    """
    stages, trip, trips = costs.stages, 0.0, []
    for stage in reversed(range(stages)):
        forward, backward = durations[FORWARD * stages + stage], durations[BACKWARD * stages + stage]
        own = forward + backward + 2 * costs.communication
        trips.append((trip + own * itself) / forward if forward else 0.0)
        trip += own
    return tuple(reversed(trips))


def _ranks(values: list[float]) -> tuple[int, ...]:
    """For each value, the number of distinct smaller ones."""
    rank = {value: number for number, value in enumerate(sorted(set(values)))}
    return tuple(rank[value] for value in values)


_DESCENT_SHARE = 8  # the effort of the search is so many times that of the descent
_LEVEL_PLAYS = 60  # for one level of all workers
_STAGE_PLAYS = 2  # for one level of a stage
_FINENESS = 4  # levels in bytes for each micro-batch


def with_least_memory(codes: Codes, solution: Solution, effort: int) -> Solution:
    """A solution as fast, with the least memory found; ``effort``: that of the search."""
    return _Descent(codes, solution, effort).run()


class _Descent:
    def __init__(self, codes: Codes, solution: Solution, effort: int) -> None:
        self.codes, self.best = codes, solution
        self.memory = codes.problem.measure
        self.goal = tuple(length * (1 + EQUALLY_FAST) for length in solution.score[:2])
        self.operations = (2 if codes.fused else 3) * codes.stages * codes.n
        self.plays = effort // _DESCENT_SHARE // self.operations
        self.peaks = codes.peaks(solution.sequence, self.memory)
        largest = [max(of_stage) for of_stage in codes.bytes_of(self.memory)[0]]
        self.least = [fixed + each for fixed, each in zip(self.memory.fixed, largest, strict=True)]
        fineness = 1 if codes.problem.memory is None else _FINENESS
        self.step = min(each / all for each, all in zip(largest, self.memory.capacity, strict=True)) / fineness

    def run(self) -> Solution:
        """The best solution once no level is left, or no play."""
        capacity, stages = self.memory.capacity, range(self.codes.stages)
        low = max(self.least[s] / capacity[s] for s in stages) - self.step
        while self.plays > 0 and self.level - low > self.step * (1 + 1e-9):
            middle = (low + self.level) / 2
            if not self.found([middle * each for each in capacity], _LEVEL_PLAYS):
                low = middle
        for stage in sorted(stages, key=lambda s: -self.peaks[s] / capacity[s]):
            lowest, step = self.least[stage] - self.step * capacity[stage], self.step * capacity[stage]
            while self.plays > 0 and self.peaks[stage] - lowest > step * (1 + 1e-9):
                middle = (lowest + self.peaks[stage]) / 2
                if not self.found([middle if s == stage else self.peaks[s] for s in stages], _STAGE_PLAYS):
                    lowest = middle
        return self.best

    @property
    def level(self) -> float:
        """The peak on the tightest worker, as a fraction of what it has."""
        return max(peak / all for peak, all in zip(self.peaks, self.memory.capacity, strict=True))

    def found(self, limits: Sequence[float], plays: int) -> bool:
        """Whether a plan is as fast within these peaks; keeps it."""
        plays = min(plays, self.plays)
        try:
            problem = self.limited(limits)
            if self.codes.variation is None and lower_bound(problem) > self.goal[0]:
                return False
            search = Search(self.codes.under(problem), plays * self.operations, self.goal)
            found = search.run(first_rule=self.best.rule)
        except PlanningError:  # not even one micro-batch
            return False
        self.plays -= found.plays
        if found.score[0] > self.goal[0] or found.score[1] > self.goal[1]:
            return False
        self.best = found
        self.peaks = self.codes.peaks(found.sequence, self.memory)
        return True

    def limited(self, limits: Sequence[float]) -> Problem:
        """The problem limited to these peaks; PlanningError if a micro-batch exceeds them."""
        problem = self.codes.problem
        if problem.memory is not None:
            return replace(problem, memory=replace(problem.memory, capacity=tuple(limits)))
        whole = [int(limit + 1e-9) for limit in limits]
        if min(whole) < 1:
            raise PlanningError("a worker cannot hold one micro-batch.")
        limit = problem.in_flight_limit or whole
        return replace(problem, in_flight_limit=tuple(map(min, whole, limit)))
