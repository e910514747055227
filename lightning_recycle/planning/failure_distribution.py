"""Failure normalization, and contingencies that need a plan.

A failure costs nothing where the stage has idle time and memory to spare, and a lot where it does not. A healthy worker
can take over another stage by copying a peer's parameters, so only the *number* of failures is given; their
*distribution* over the stages is a choice (ReCycle, arXiv 2405.14009, section 4): the shortest period, then the most
memory left on the most loaded worker, then the least load altogether, then failures in late stages.

A distribution is judged by the lower bound of its period. Where plans do not meet that, with little memory or unequal
costs, true periods decide: they are asked for in the order of the bounds until no distribution left could be better.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from itertools import combinations, islice, pairwise, permutations
from math import comb, prod

from lightning_recycle.arguments import whole
from lightning_recycle.errors import ConfigurationError, PlanningError, counted
from lightning_recycle.planning.grid import Grid, Worker
from lightning_recycle.planning.heuristic_planner import heuristic
from lightning_recycle.planning.problem import Problem, stage_lower_bounds
from lightning_recycle.planning.routing import COMPACT_FROM, worth_compacting

_MOST_LISTED = 2_000  # distributions; where there are more, those near the chosen one are compared with it
_MOST_PERIODS = 64  # distributions whose true period `normalize` asks for


def normalize(
    problem: Problem,
    failures: int,
    *,
    period: Callable[[tuple[int, ...]], float] | None = None,
    most: int | None = None,
) -> tuple[int, ...]:
    """The number of failures of each stage so that ``failures`` in total cost least.

    Args:
        problem: the problem to be planned, for workers of equal speed; its failed workers do not count.
        failures: number of failed workers.
        period: the true period of a distribution, e.g. of the plan for its :func:`normalized_failures`; called at most
            ``_MOST_PERIODS`` times, once if that meets the least bound of all. By default the bounds alone decide.
        most: how many failures a stage may carry; by default all but one of its workers.

    Raises:
        ConfigurationError: when ``failures`` is not an integer of at least 0.
        PlanningError: when some stage would have no live worker.
    """
    whole("", "failures", failures)
    grid, problem = problem.grid, replace(problem, failed=frozenset(), worker_factors=())
    most = grid.lanes - 1 if most is None else min(most, grid.lanes - 1)
    if failures > grid.stages * most:
        raise PlanningError(
            f"failures={failures} leaves a stage of the grid {grid} without a worker, however they are distributed:"
            f" at most {grid.stages * most} can be planned for."
        )
    counts = range(most + 1)
    bounds: list[list[float]] = [[] for _ in range(grid.stages)]
    for count in counts:
        everywhere = replace(problem, failed=normalized_failures(grid, (count,) * grid.stages))
        for stage, bound in enumerate(stage_lower_bounds(everywhere)):
            bounds[stage].append(round(bound, 9))
    pressure = [[_memory_pressure(problem, s, count) for count in counts] for s in range(grid.stages)]
    caps = [most] * grid.stages
    # Both tables rise with the count, so the least possible maximum comes from dealing failures one by one.
    for table in (bounds, pressure):
        allowed = [row[: cap + 1] for row, cap in zip(table, caps, strict=True)]
        dealt = _dealt([row[1:] for row in allowed], failures)
        least = max(row[count] for row, count in zip(table, dealt, strict=True))
        caps = [sum(value <= least for value in row) - 1 for row in allowed]
    # The pressure is convex in the count, so the least sum comes from the smallest increments.
    increments = [
        [round(after - before, 8) for before, after in pairwise(row[: cap + 1])]
        for row, cap in zip(pressure, caps, strict=True)
    ]
    chosen = _dealt(increments, failures)
    if period is None:
        return chosen

    def rank(distribution: tuple[int, ...]) -> tuple[float, float, float, tuple[int, ...]]:
        """The criteria, in order; the first is the bound."""
        held = [pressure[stage][count] for stage, count in enumerate(distribution)]
        bound = max(bounds[stage][count] for stage, count in enumerate(distribution))
        return bound, max(held), round(sum(held), 9), distribution

    best, shortest = chosen, float("inf")
    rivals = [distribution for distribution in _rivals(grid, chosen) if max(distribution) <= most]
    for distribution in sorted(rivals, key=rank)[:_MOST_PERIODS]:
        if rank(distribution)[0] >= shortest:
            break
        found = round(period(distribution), 9)  # rounding must not decide between equally good ones
        if found < shortest:
            best, shortest = distribution, found
    return best


def _rivals(grid: Grid, chosen: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """``chosen`` and the distributions to compare: all, or those one failure away."""
    failures, most = sum(chosen), grid.lanes - 1
    if comb(failures + grid.stages - 1, failures) <= _MOST_LISTED:
        yield from distributions(grid, failures)
        return
    yield chosen
    for give, take in permutations(range(grid.stages), 2):
        if chosen[give] and chosen[take] < most:
            changed = list(chosen)
            changed[give] -= 1
            changed[take] += 1
            yield tuple(changed)


def distributions(grid: Grid, failures: int) -> Iterator[tuple[int, ...]]:
    """All ways to distribute ``failures`` that leave each stage a live worker."""

    def fill(stages: int, left: int) -> Iterator[tuple[int, ...]]:
        if stages == 0:
            if left == 0:
                yield ()
            return
        most = grid.lanes - 1
        for count in range(min(most, left), max(0, left - most * (stages - 1)) - 1, -1):
            yield from ((count, *rest) for rest in fill(stages - 1, left - count))

    return fill(grid.stages, failures)


def normalized_failures(grid: Grid, distribution: Sequence[int]) -> frozenset[Worker]:
    """Failed positions of a distribution: the last pipelines of each stage.

    The first pipelines stay whole (with the leader), and orphans of neighbouring stages stay together on their way.

    Raises:
        ConfigurationError: unless ``distribution`` has one number from 0 to D - 1 for each stage.
    """
    if len(distribution) != grid.stages or not all(0 <= count < grid.lanes for count in distribution):
        raise ConfigurationError(
            f"distribution={tuple(distribution)!r}: give {grid.stages} numbers of failures, one per stage, "
            f"each in 0..{grid.lanes - 1}."
        )
    return frozenset(
        Worker(pipeline, stage)
        for stage, count in enumerate(distribution)
        for pipeline in range(grid.lanes - count, grid.lanes)
    )


def roles(grid: Grid, failed: Collection[Worker], distribution: Sequence[int]) -> dict[Worker, Worker]:
    """Positions of the live workers in the plan for a distribution of failures.

    Workers stay where they are if they can; others change pipeline, which costs nothing because peers have the same
    state; as few as possible change stage.

    Raises:
        ConfigurationError: when the numbers of failures differ.
        PlanningError: when a stage has lost all its workers, and with them its state.
    """
    gone = normalized_failures(grid, distribution)
    if len(set(failed)) != len(gone):
        raise ConfigurationError(
            f"{counted(len(set(failed)), 'failed worker')}, but distribution={tuple(distribution)!r} is for"
            f" {len(gone)}."
        )
    positions: dict[Worker, Worker] = {}
    spare: list[Worker] = []
    vacant: list[Worker] = []
    for stage in range(grid.stages):
        peers = [Worker(d, stage) for d in range(grid.lanes)]
        live = [worker for worker in peers if worker not in failed]
        if not live:
            raise PlanningError(
                f"all {grid.lanes} replicas of stage {stage} have failed: no worker can copy its state. "
                "Restart from a checkpoint."
            )
        positions |= {worker: worker for worker in live if worker not in gone}
        free = [worker for worker in peers if worker not in gone and worker in failed]
        displaced = [worker for worker in live if worker in gone]
        positions |= dict(zip(displaced, free, strict=False))
        spare += displaced[len(free) :]
        vacant += free[len(displaced) :]
    positions |= dict(zip(spare, vacant, strict=True))
    return dict(sorted(positions.items()))


def _memory_pressure(problem: Problem, stage: int, failures: int) -> float:
    """Micro-batches that a worker tends to hold, S - s in 1F1B, relative to its limit."""
    grid = problem.grid
    most = [memory.most(stage, memory.after_forward[stage]) for memory in problem.memories]
    limit = min(most, default=float(grid.stages))
    return round((grid.stages - stage) * grid.pipelines / (grid.lanes - failures) / limit, 9)


def _dealt(steps: Sequence[Sequence[float]], failures: int) -> tuple[int, ...]:
    """Failures by stage, each dealt where the next step is smallest; on a tie, late."""
    counts = [0] * len(steps)
    queue = [(row[0], -stage) for stage, row in enumerate(steps) if row]
    heapify(queue)
    for _ in range(failures):
        stage = -heappop(queue)[1]
        counts[stage] += 1
        if counts[stage] < len(steps[stage]):
            heappush(queue, (steps[stage][counts[stage]], -stage))
    return tuple(counts)


_MOST_COMPARED = 100_000  # distributions
_JUDGED_OPERATIONS = 20_000  # up to that, a plan takes about a second, and normalization may ask for some


def usual_limit(grid: Grid, failed: Collection[Worker], *, measured: bool = False) -> tuple[int, ...] | None:
    """The in-flight limits of a run that was given none.

    At first those of fault-free 1F1B, for which any run has room. Once memory is ``measured``, bytes are the limit;
    without a failure, more than 2 S - 1 in flight bring nothing.
    """
    if not measured:
        return tuple(min(grid.microbatches, grid.stages - stage) for stage in range(grid.stages))
    return None if failed else (2 * grid.stages - 1,) * grid.stages


def contingencies(problem: Problem, failures: int, most: int) -> list[Problem]:
    """``problem`` with ``failures`` failed workers, for each of their distributions.

    At most ``most``, the likeliest. Where there are too many distributions to compare, those with at most one failure
    per stage, than which none is likelier.
    """
    grid = problem.grid

    def sets(distribution: tuple[int, ...]) -> int:
        return prod(comb(grid.lanes, count) for count in distribution)

    if comb(failures + grid.stages - 1, failures) <= _MOST_COMPARED:
        likeliest = heapq.nlargest(most, distributions(grid, failures), key=sets)
    else:
        spread = islice(combinations(range(grid.stages), failures), most) if grid.lanes > 1 else ()
        likeliest = [tuple(int(stage in chosen) for stage in range(grid.stages)) for chosen in spread]
    return [replace(problem, failed=normalized_failures(grid, distribution)) for distribution in likeliest]


def normalized_problem(problem: Problem, failures: int) -> Problem:
    """``problem`` with that *number* of failed workers, where they cost least.

    Where two distributions have the same bound, the heuristic's plans decide; on large grids only the bounds do, and
    those that are planned by lanes (:mod:`~lightning_recycle.planning.routing`) keep as many as they can.

    Raises:
        ConfigurationError: when ``failures`` is not an integer of at least 0.
        PlanningError: when a stage would have no live worker.
    """
    whole("", "failures", failures)
    grid = problem.grid

    def at(distribution: tuple[int, ...]) -> Problem:
        return replace(problem, failed=normalized_failures(grid, distribution))

    judged = failures and 3 * grid.global_microbatches * grid.stages <= _JUDGED_OPERATIONS
    period = (lambda distribution: heuristic(at(distribution)).period) if judged else None
    # Where plans are made by lanes, the stage with the most failures decides: none has more than an even share.
    most = -(-failures // grid.stages) if worth_compacting(problem, COMPACT_FROM) else None
    return at(normalize(problem, failures, period=period, most=most))


def next_failures(problem: Problem) -> list[frozenset[Worker]]:
    """Sets of failed workers after one more failure, one for each plan needed."""
    found = []
    for stage in range(problem.grid.stages):
        live = problem.live_workers(stage)
        if len(live) > 1:
            alike: dict[float, Worker] = {}
            for worker, factor in zip(live, problem.live_factors(stage), strict=True):
                alike.setdefault(factor, worker)
            found += [problem.failed | {worker} for worker in alike.values()]
    return found
