"""List scheduling under a priority rule, and the fixed patterns 1F1B and ZB-H1.

*List scheduling*: a free worker takes an operation that is ready there: a forward, a backward or a weight gradient,
older micro-batches first. The rule decides which kind goes first, from the number of micro-batches that the worker
holds. A backward that may be split is run as B at once and W later, or as BW where B would take more memory than there
is. A worker that expects a backward soon may stay idle until it arrives. A schedule never holds more than the rule's
hard numbers, nor more bytes than the problem's memory, and never deadlocks: the last stage can always finish its
micro-batches (BW takes no memory), so it takes new ones, so the stage before it does too, and so on.

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
from lightning_recycle.planning.problem import Problem
from lightning_recycle.planning.rerouting import reroute
from lightning_recycle.planning.schedule import Schedule
from lightning_recycle.planning.timing import BACKWARD, FORWARD, FUSED, WEIGHT, Codes, assemble, best_timing, interleave

_NO_BYTES: tuple[list[list[float]], list[list[float]], list[list[float]]] = [], [], []


@dataclass(frozen=True, slots=True)
class Express:
    """Operations that nothing may delay.

    They are the first gradient, without which stages with little memory are idle, and the way of the last micro-batches
    to the last stage and back, after which the step is over.

    Args:
        first_backwards: how many of the first backwards are waited for, whatever else could begin.
        last_backwards: the same for the last ones.
        forward_first: how many of the last F go before any B.
        awaited: how many of the last F are waited for where they would go before what could begin instead, if that
            costs less than ``patience`` times what they would wait.
        patience: see ``awaited``.
    """

    first_backwards: int = 0
    last_backwards: int = 0
    forward_first: int = 0
    awaited: int = 0
    patience: float = 0.0


NO_EXPRESS = Express()


@dataclass(frozen=True, slots=True)
class Rule:
    """Priorities among the operations that are ready.

    Args:
        soft: per stage; with this many micro-batches held, W goes before F.
        hard: per stage; with this many micro-batches held, no F starts.
        ahead: per stage; with this many micro-batches between their F and their B, no F starts.
        ages: per micro-batch, numbered d * M + m; lower goes first.
        forward_first: per stage; whether an F that may start goes before a B, as does a W that makes room for it.
        keep: per stage; with fewer micro-batches than this between their F and their B, `forward_first` holds; None for
            0 everywhere. A stage that lets them become few has nothing but W to do at the end, between its last F and
            the gradient of that F.
        patience: a worker stays idle until the next backward arrives if that costs it less time than so many times
            what the backward would wait for an F (the first number) or a W (the second) begun now; 0 for never.
        express: what is not to wait at all, at the beginning and at the end.
    """

    soft: tuple[int, ...]
    hard: tuple[int, ...]
    ahead: tuple[int, ...]
    ages: Sequence[int]
    forward_first: tuple[bool, ...]
    patience: tuple[float, float] = (0.0, 0.0)
    keep: tuple[int, ...] | None = None
    express: Express = NO_EXPRESS


def play(codes: Codes, rule: Rule) -> tuple[list[int], int]:
    """One list schedule: the order of its operations, and the sum of the peaks held.

    Raises:
        PlanningError: when micro-batches differ and a worker has no room for one of them.
    """
    grid, comm = codes.problem.grid, codes.problem.costs.communication
    n, stages, last = codes.n, codes.stages, codes.stages - 1
    ranks, times, fused = codes.ranks, codes.times, codes.fused
    workers = grid.num_workers
    # What is ready on each worker, as n * age + micro-batch, so that older micro-batches go first.
    tickets = [age * n + number for number, age in enumerate(rule.ages)]
    forwards: list[list[int]] = [[] for _ in range(workers)]
    backwards: list[list[int]] = [[] for _ in range(workers)]
    weights: list[list[int]] = [[] for _ in range(workers)]
    busy = [False] * workers
    in_flight, peak = [0] * workers, [0] * workers
    # F that may still start until a B: `ahead`, less those under way.
    credit = [rule.ahead[rank % stages] for rank in range(workers)]
    soft = [min(rule.soft[rank % stages], rule.hard[rank % stages]) for rank in range(workers)]
    hard = [rule.hard[rank % stages] for rank in range(workers)]
    # Above this credit an F that may start goes before a B.
    keep = rule.keep or (0,) * stages
    urgent_above = [
        0 if rule.forward_first[stage] else max(0, rule.ahead[stage] - keep[stage]) for stage in range(stages)
    ] * grid.lanes
    memory = codes.problem.memory
    bounded = memory is not None
    # By stage and micro-batch: bytes that F takes; those that B takes in addition; and what W frees.
    for_forward, for_backward, for_weight = _NO_BYTES
    room, usual = [0.0] * workers, [0.0] * stages
    if memory is not None:
        for_forward, for_backward, for_weight, _ = codes.bytes_of(memory)
        room = [memory.room(rank % stages) for rank in range(workers)]
        usual = list(memory.after_forward)
    # When backwards will arrive that are under way, if anybody is to wait for them.
    express = rule.express
    expressed = express != NO_EXPRESS
    patient = any(rule.patience) or expressed
    for_f, for_w = rule.patience
    expected: list[list[float]] = [[] for _ in range(workers if patient else 0)]
    # The same of forwards, and what each worker has still to begin and has begun, if any are express.
    coming: list[list[float]] = [[] for _ in range(workers if expressed else 0)]
    forwards_left, backwards_left, backwards_begun = [0] * workers, [0] * workers, [0] * workers
    if expressed:
        for row in ranks[:stages]:
            for rank in row:
                forwards_left[rank] += 1
                backwards_left[rank] += 1
    # Events: an operation ends (its code), or its result arrives at the next stage (code + size).
    size = codes.size
    events: list[tuple[float, int]] = []
    awake: set[int] = set()
    positive = [time for row in times for time in set(row) if time > 0.0]
    together = 1e-9 * min(positive, default=1.0)  # times that differ only by rounding are the same moment
    sequence: list[int] = []
    record = sequence.append
    for number in range(n):
        rank = ranks[FORWARD][number]
        heappush(forwards[rank], tickets[number])
        awake.add(rank)
    now = 0.0
    while True:
        for rank in awake:
            if busy[rank]:
                continue
            stage = rank % stages
            held = in_flight[rank]
            may_forward = forwards[rank] and credit[rank] > 0
            fits, size_next = held < hard[rank], 0.0
            if bounded:
                size_next = for_forward[stage][forwards[rank][0] % n] if forwards[rank] else usual[stage]
                fits = fits and size_next <= room[rank]
            urgent = credit[rank] > urgent_above[rank] or (expressed and forwards_left[rank] <= express.forward_first)
            if may_forward and urgent and (fits or weights[rank]):
                kind = FORWARD if fits else WEIGHT
            elif backwards[rank]:
                kind = BACKWARD
                if bounded and not fused:
                    left = room[rank] - for_backward[stage][backwards[rank][0] % n]
                    if left < min(0.0, room[rank]):
                        kind = FUSED
            elif may_forward and fits and (held < soft[rank] or not weights[rank]):
                kind = FORWARD
            elif weights[rank]:
                kind = WEIGHT
            else:
                continue
            if (
                expressed
                and coming[rank]
                and forwards_left[rank] <= express.awaited
                and (kind == WEIGHT or (urgent and kind != FORWARD))
                and fits
                and credit[rank] > 0
            ):
                waiting = weights[rank] if kind == WEIGHT else backwards[rank]
                idle = coming[rank][0] - now
                if idle < express.patience * (times[kind * stages + stage][waiting[0] % n] - idle) - together:
                    continue
            if patient and expected[rank] and kind in (FORWARD, WEIGHT):
                waiting, most = (forwards[rank], for_f) if kind == FORWARD else (weights[rank], for_w)
                if expressed:
                    if kind == FORWARD and forwards_left[rank] <= express.forward_first:
                        most = 0.0
                    elif (
                        backwards_begun[rank] < express.first_backwards
                        or backwards_left[rank] <= express.last_backwards
                    ):
                        most = inf
                idle = expected[rank][0] - now
                left = times[kind * stages + stage][waiting[0] % n] - idle
                if left > together and idle < most * left:
                    continue
            if kind == FORWARD:
                number = heappop(forwards[rank]) % n
                credit[rank] -= 1
                if expressed:
                    forwards_left[rank] -= 1
                    if stage < last:
                        heappush(coming[ranks[stage + 1][number]], now + times[kind * stages + stage][number] + comm)
                in_flight[rank] = held = held + 1
                if held > peak[rank]:
                    peak[rank] = held
                if bounded:
                    room[rank] -= for_forward[stage][number]
            elif kind == WEIGHT:
                number = heappop(weights[rank]) % n
                if bounded:
                    room[rank] -= for_weight[stage][number]
            else:
                number = heappop(backwards[rank]) % n
                backwards_begun[rank] += 1
                backwards_left[rank] -= 1
                credit[rank] += 1
                if bounded:  # a worker runs one operation at a time: what this one frees may as well count at once
                    room[rank] -= for_backward[stage][number] if kind == BACKWARD else -for_forward[stage][number]
            key = kind * stages + stage
            code = key * n + number
            if patient and stage and kind in (BACKWARD, FUSED):
                heappush(expected[ranks[stage - 1][number]], now + times[key][number] + comm)
            busy[rank] = True
            record(code)
            heappush(events, (now + times[key][number], code))
        awake.clear()
        if not events:
            if any(forwards):
                raise PlanningError("a worker has no room for a micro-batch: it takes more than the mean one.")
            return sequence, sum(peak)
        now = events[0][0]
        while events and events[0][0] <= now + together:
            now, event = heappop(events)
            arrival, code = divmod(event, size)
            key, number = divmod(code, n)
            kind, stage = divmod(key, stages)
            if not arrival:
                rank = ranks[key][number]
                busy[rank] = False
                awake.add(rank)
                if kind == BACKWARD and not fused:
                    heappush(weights[rank], tickets[number])
                elif kind != FORWARD:
                    in_flight[rank] -= 1
                elif stage == last:
                    heappush(backwards[rank], tickets[number])
                if kind == WEIGHT or stage == (last if kind == FORWARD else 0):
                    continue
                if comm > 0.0:
                    heappush(events, (now + comm, event + size))
                    continue
            if kind == FORWARD:
                rank = ranks[stage + 1][number]
                if expressed:
                    heappop(coming[rank])
                heappush(forwards[rank], tickets[number])
            else:
                rank = ranks[stage - 1][number]
                if patient:
                    heappop(expected[rank])
                heappush(backwards[rank], tickets[number])
            awake.add(rank)


def one_f_one_b(problem: Problem) -> Schedule:
    """The 1F1B schedule of a problem without failures, with fused backwards.

    Where memory holds fewer than S - s the warm-up is shortened.

    Raises:
        PlanningError: when a worker has failed.
    """
    if problem.failed:
        failed = ", ".join(map(str, sorted(problem.failed)))
        raise PlanningError(f"1F1B cannot handle failures, but {failed} failed: use the planner 'heuristic'.")
    if problem.grid.lanes != problem.grid.pipelines:
        raise PlanningError(f"1F1B runs each pipeline on a lane of its own, not {problem.grid}: use 'heuristic'.")
    problem = replace(problem, technique=replace(problem.technique, split_backward=False))
    grid = problem.grid
    codes = Codes(problem, reroute(grid, ()), fused=True)
    programs: dict[int, list[int]] = {}
    limit = problem.counted().in_flight_limit
    warmup = grid.microbatches
    for stage in range(grid.stages):
        warmup = min(warmup, grid.stages - stage)
        if limit is not None:
            warmup = min(warmup, limit[stage])
        for pipeline in range(grid.pipelines):
            first = pipeline * grid.microbatches
            forwards = [codes.code(FORWARD, stage, first + m) for m in range(grid.microbatches)]
            backwards = [codes.code(BACKWARD, stage, first + m) for m in range(grid.microbatches)]
            program = forwards[:warmup]
            for m, backward in enumerate(backwards):
                program.append(backward)
                program += forwards[warmup + m : warmup + m + 1]
            programs[pipeline * grid.stages + stage] = program
    sequence = interleave(codes, programs)
    return assemble(codes, sequence, best_timing(codes, sequence))


def zero_bubble(codes: Codes, held: Sequence[int]) -> list[int]:
    """The operations of ZB-H1 in an order that respects their dependencies.

    ``held`` is the most micro-batches that a worker may hold, per stage.
    """
    grid = codes.problem.grid
    programs: dict[int, list[int]] = {}
    most = grid.microbatches
    for stage in range(grid.stages):
        most = min(most, grid.stages - stage, held[stage])  # no further than the stage before, which would deadlock
        order = _pattern(grid.microbatches, most, held[stage])
        for pipeline in range(grid.pipelines):
            first = pipeline * grid.microbatches
            programs[pipeline * grid.stages + stage] = [codes.code(kind, stage, first + m) for kind, m in order]
    return interleave(codes, programs)


def _pattern(microbatches: int, warmup: int, held: int) -> list[tuple[int, int]]:
    """(kind, micro-batch) in the order of one stage."""
    order = [(FORWARD, m) for m in range(warmup)]
    forwards, weights = warmup, 0
    for m in range(microbatches):
        order.append((BACKWARD, m))
        if weights <= m and (forwards - weights == held or forwards == microbatches):
            order.append((WEIGHT, weights))
            weights += 1
        if forwards < microbatches:
            order.append((FORWARD, forwards))
            forwards += 1
    order += [(WEIGHT, m) for m in range(weights, microbatches)]
    return order
