"""Contingencies: which problems a run may have to plan for, the likeliest first.

Concept: who fails is chance, but plans are needed only for distributions of failures over the stages
(:mod:`~lightning_recycle.planning.renaming`): S for one failure, about S^2 / 2 for two. A distribution is as likely
as it has sets of workers.

Contract: pure functions. What is planned offline for a library and what a run asks for come from here alike.

Must not know: how plans are made or stored.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection
from dataclasses import replace
from itertools import combinations, islice
from math import comb, prod

from lightning_recycle.arguments import whole
from lightning_recycle.planning.grid import Grid, Worker
from lightning_recycle.planning.heuristic import heuristic
from lightning_recycle.planning.lane_planning import CODED_FROM, worth_coding
from lightning_recycle.planning.normalization import distributions, normalize, normalized_failures
from lightning_recycle.planning.problem import Problem

__all__ = ["contingencies", "most_in_a_stage", "next_failures", "normalized_problem", "usual_limit"]

_MOST_COMPARED = 100_000  # distributions
_JUDGED_OPERATIONS = 20_000  # up to that, a plan takes about a second, and normalization may ask for some


def usual_limit(grid: Grid, failed: Collection[Worker], *, measured: bool = False) -> tuple[int, ...] | None:
    """The in-flight limits of a run that was given none.

    Before a run has measured its memory: what fault-free 1F1B holds in each stage, whoever has ``failed``; a run that
    begins at all has room for that. Once it has (``measured``), bytes are the limit; without a failure, more than
    2 S - 1 in flight bring nothing.
    """
    if not measured:
        return tuple(min(grid.microbatches, grid.stages - stage) for stage in range(grid.stages))
    return None if failed else (2 * grid.stages - 1,) * grid.stages


def contingencies(problem: Problem, failures: int, most: int) -> list[Problem]:
    """``problem`` with that number of failed workers, for each of their distributions over the stages.

    Args:
        problem: the fault-free problem.
        failures: the number of failed workers.
        most: the most problems wanted; the likeliest are kept. Where there are too many distributions to compare, those
            with one failure in each of some stages, than which none is likelier.
    """
    grid = problem.grid

    def sets(distribution: tuple[int, ...]) -> int:
        return prod(comb(grid.pipelines, count) for count in distribution)

    if comb(failures + grid.stages - 1, failures) <= _MOST_COMPARED:
        likeliest = heapq.nlargest(most, distributions(grid, failures), key=sets)
    else:
        spread = islice(combinations(range(grid.stages), failures), most) if grid.pipelines > 1 else ()
        likeliest = [tuple(int(stage in chosen) for stage in range(grid.stages)) for chosen in spread]
    return [replace(problem, failed=normalized_failures(grid, distribution)) for distribution in likeliest]


def normalized_problem(problem: Problem, failures: int) -> Problem:
    """``problem`` with that *number* of failed workers, in the stages where they cost least (failure normalization).

    Where two distributions have the same bound, the heuristic's plans decide; on large grids only the bounds do, and
    those that are planned by lanes (:mod:`~lightning_recycle.planning.lane_planning`) keep as many as they can.

    Raises:
        ConfigurationError: when ``failures`` is not an integer of at least 0.
        PlanningError: when a stage would have no live worker.
    """
    grid = problem.grid

    def at(distribution: tuple[int, ...]) -> Problem:
        return replace(problem, failed=normalized_failures(grid, distribution))

    judged = failures and 3 * grid.global_microbatches * grid.stages <= _JUDGED_OPERATIONS
    distribution = normalize(
        grid,
        problem.costs,
        failures,
        technique=problem.technique,
        in_flight_limit=problem.in_flight_limit,
        memory=problem.memory,
        period=(lambda distribution: heuristic(at(distribution)).period) if judged else None,
        most=most_in_a_stage(problem, failures),
    )
    return at(distribution)


def most_in_a_stage(problem: Problem, failures: int) -> int | None:
    """How many of ``failures`` workers a stage may carry if they are distributed; None for any number.

    Where plans are made by lanes, the stage with the most failures decides about all: then no more than an even share.
    """
    whole("", "failures", failures)
    return -(-failures // problem.grid.stages) if worth_coding(problem, CODED_FROM) else None


def next_failures(problem: Problem) -> list[frozenset[Worker]]:
    """Who has failed after one more failure: for each different plan that is then needed, one set of workers."""
    found = []
    for stage in range(problem.grid.stages):
        live = problem.live_workers(stage)
        if len(live) > 1:
            alike: dict[float, Worker] = {}
            for worker, factor in zip(live, problem.live_factors(stage), strict=True):
                alike.setdefault(factor, worker)
            found += [problem.failed | {worker} for worker in alike.values()]
    return found
