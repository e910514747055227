"""The list-scheduling heuristic: a good plan for any failures, at once.

Concept: play the iteration forward in time. Whenever a worker is free it takes, of what is ready, a backward first
(other workers wait for it), then a forward (if memory allows), then a weight gradient, which thereby sinks into
bubbles. Older micro-batches go first. A rule has three knobs: per stage a soft number of micro-batches in flight
from which weight gradients go before forwards, and a hard one at which no forward starts; and the order of the
micro-batches. Several settings are played, then random ones until the lower bound is met or the effort is spent,
and the best result is kept.

Contract: deterministic; respects the in-flight limit; never deadlocks: the last stage can always finish what it has
begun, hence always takes new micro-batches sooner or later, hence so does the stage before it, and so on. O(n log
n) for n operations.

Must not know: the validator (which is written from the definition, independently), exact solvers.

Source: ReCycle (arXiv 2405.14009), sections 3 and 4, for the three techniques.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from random import Random

from lightning_recycle.errors import ConfigurationError
from lightning_recycle.planning.bounds import lower_bound
from lightning_recycle.planning.one_f_one_b import one_f_one_b
from lightning_recycle.planning.problem import Problem
from lightning_recycle.planning.routing import reroute
from lightning_recycle.planning.schedule import Schedule
from lightning_recycle.planning.timing import BACKWARD, FORWARD, WEIGHT, Codes, Timing, assemble, best_timing

__all__ = ["DEFAULT_EFFORT", "HeuristicPlanner", "heuristic"]

DEFAULT_EFFORT = 100_000
"""Operations to play in search of a better schedule: about 0.1 s. Grids with more of them get the plain rule only."""

_MOST_RESTARTS = 1_000
_SEED = 24_051_4009


@dataclass(frozen=True, slots=True)
class _Rule:
    """How to choose among what is ready."""

    soft: tuple[int, ...]
    """Per stage: with this many micro-batches in flight, W goes before F."""
    hard: tuple[int, ...]
    """Per stage: with this many micro-batches in flight, no F starts."""
    ages: tuple[int, ...]
    """Per micro-batch, numbered d * M + m: lower goes first."""


@dataclass(frozen=True, slots=True)
class HeuristicPlanner:
    """The planner "heuristic"; see :func:`heuristic` for ``effort``."""

    effort: int = DEFAULT_EFFORT

    def __post_init__(self) -> None:
        if not isinstance(self.effort, int) or self.effort < 0:
            raise ConfigurationError(
                f"HeuristicPlanner(effort={self.effort!r}): give a number of operations, at least 0."
            )

    def plan(self, problem: Problem) -> Schedule:
        """See :func:`heuristic`."""
        return heuristic(problem, self.effort)


def heuristic(problem: Problem, effort: int = DEFAULT_EFFORT) -> Schedule:
    """A schedule for ``problem``: 1F1B without failures and decoupling, else the best of several list schedules.

    Best means the smallest period (with the staggered optimizer, else makespan), then the smallest makespan, then the
    fewest micro-batches in flight.

    Args:
        problem: what to plan.
        effort: number of operations to play in total; the plain rule is played in any case.
    """
    if not problem.failed and not problem.technique.decoupled:
        return one_f_one_b(problem)
    codes = Codes(problem, reroute(problem.grid, problem.failed), fused=not problem.technique.decoupled)
    bound = lower_bound(problem) * (1 + 1e-9)
    operations = problem.grid.global_microbatches * problem.grid.stages * (3 if problem.technique.decoupled else 2)
    plays = max(1, effort // operations)
    best: tuple[tuple[float, float, int], list[int], Timing] | None = None
    for play, (rule, is_restart) in enumerate(_rules(problem)):
        if play >= plays or (is_restart and best is not None and best[0][0] <= bound):
            break
        sequence, held = _play(codes, rule)
        timing = best_timing(codes, sequence)
        goal = timing.period if problem.technique.staggered else timing.makespan
        # Rounding must not decide between equally good schedules.
        score = (round(goal, 9), round(timing.makespan, 9), held)
        if best is None or score < best[0]:
            best = score, sequence, timing
    assert best is not None  # at least one play
    return assemble(codes, best[1], best[2])


def _rules(problem: Problem) -> Iterator[tuple[_Rule, bool]]:
    """The rules to try, the plain one first, and whether they are the random ones."""
    grid = problem.grid
    stages = range(grid.stages)
    limit = problem.in_flight_limit or (grid.global_microbatches,) * grid.stages
    oldest_first = tuple(microbatch.index for microbatch in grid.all_microbatches())
    yield _Rule(limit, limit, oldest_first), False
    for factor in (1, 2):
        for extra in (0, 1):
            target = tuple(min(limit[s], factor * (grid.stages - s) + extra) for s in stages)
            yield _Rule(target, limit, oldest_first), False
            yield _Rule(limit, target, oldest_first), False
            yield _Rule(target, target, oldest_first), False
    if not problem.technique.decoupled and problem.in_flight_limit is None:
        return  # "adaptive pipelining alone" stays the plain rule that the other techniques are compared with
    # Random.random() gives the same numbers in every Python version; its other methods need not.
    draw = Random(_SEED).random
    for restart in range(_MOST_RESTARTS):
        hard = limit if restart % 3 == 0 else tuple((n + 1) // 2 + int(draw() * (n // 2 + 1)) for n in limit)
        soft = tuple(1 + int(draw() * n) for n in hard)
        spread = 4.0 if restart % 2 else 1.5  # how many places a micro-batch may move
        drawn = [age + draw() * spread for age in oldest_first]
        ages = [0] * len(drawn)
        for age, number in enumerate(sorted(range(len(drawn)), key=drawn.__getitem__)):
            ages[number] = age
        yield _Rule(soft, hard, tuple(ages)), True


def _play(codes: Codes, rule: _Rule) -> tuple[list[int], int]:
    """One list schedule: its operations in order of start, and the sum of the workers' peaks of micro-batches held."""
    grid, comm = codes.problem.grid, codes.problem.costs.communication
    n, stages, last = codes.n, codes.stages, codes.stages - 1
    ranks, durations, fused = codes.ranks, codes.durations, codes.fused
    workers = grid.num_workers
    # What is ready on each worker, as n * age + micro-batch, so that older micro-batches go first.
    tickets = [age * n + number for number, age in enumerate(rule.ages)]
    forwards: list[list[int]] = [[] for _ in range(workers)]
    backwards: list[list[int]] = [[] for _ in range(workers)]
    weights: list[list[int]] = [[] for _ in range(workers)]
    busy = [False] * workers
    in_flight, peak = [0] * workers, [0] * workers
    soft = [rule.soft[rank % stages] for rank in range(workers)]
    hard = [rule.hard[rank % stages] for rank in range(workers)]
    # Events: an operation ends (its code), or its result arrives at the next stage (code + size).
    size = codes.size
    events: list[tuple[float, int]] = []
    positive = [d for d in durations if d > 0.0]
    together = 1e-9 * min(positive, default=1.0)  # times that differ only by rounding are one moment
    sequence: list[int] = []
    record = sequence.append
    awake: set[int] = set()
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
            if backwards[rank]:
                number = heappop(backwards[rank]) % n
                kind = BACKWARD
            elif forwards[rank] and in_flight[rank] < (soft[rank] if weights[rank] else hard[rank]):
                number = heappop(forwards[rank]) % n
                kind = FORWARD
                in_flight[rank] += 1
                if in_flight[rank] > peak[rank]:
                    peak[rank] = in_flight[rank]
            elif weights[rank]:
                number = heappop(weights[rank]) % n
                kind = WEIGHT
            else:
                continue
            key = kind * stages + stage
            code = key * n + number
            busy[rank] = True
            record(code)
            heappush(events, (now + durations[key], code))
        awake.clear()
        if not events:
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
                heappush(forwards[rank], tickets[number])
            else:
                rank = ranks[stage - 1][number]
                heappush(backwards[rank], tickets[number])
            awake.add(rank)
