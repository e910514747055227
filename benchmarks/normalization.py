"""Failure normalization against brute force: every distribution of the failures is planned.

    .venv/bin/python benchmarks/normalization.py              # all cases, minutes
    .venv/bin/python benchmarks/normalization.py --cases 20

Each case is a small grid with costs, memory and technique from a seeded generator. The distribution that ``normalize``
chooses, by bounds alone and with the plans' true periods, is compared with the best of all.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from functools import cache
from random import Random

from lightning_recycle.planning import Costs, Grid, Problem, Technique, heuristic, normalize, normalized_failures
from lightning_recycle.planning.normalization import distributions

CASES = 296
EFFORT = 20_000  # of the heuristic, for each plan


@dataclass(frozen=True, slots=True)
class Found:
    """One case: how much longer the chosen distribution's period is than the best, as a fraction.

    Args:
        by_bounds: chosen by bounds alone.
        by_periods: chosen with true periods.
        plans: how many plans that took.
        distributions: how many there are.
    """

    by_bounds: float
    by_periods: float
    plans: int
    distributions: int


def case(number: int) -> tuple[Problem, int]:
    """A fault-free problem and a number of failures."""
    draw = Random(f"normalization {number}")
    grid, failures = Grid(2, 1, 1), 2
    while failures > grid.stages * (grid.pipelines - 1):
        grid = Grid(draw.randint(2, 4), draw.randint(2, 5), draw.randint(2, 8))
        failures = draw.randint(1, 3)
    stages = range(grid.stages)

    def durations() -> tuple[float, ...]:
        return tuple(round(draw.uniform(0.5, 1.5), 2) for _ in stages)

    costs = Costs.uniform(grid.stages)
    if draw.random() < 0.5:
        closing = (0.2,) * grid.stages, (0.1,) * grid.stages
        costs = Costs(durations(), durations(), durations(), *closing, communication=draw.choice((0.0, 0.1)))
    limit = draw.choice((None, grid.stages, grid.stages + 2))
    technique = Technique(staggered=draw.random() < 0.7)
    limits = None if limit is None else (limit,) * grid.stages
    return Problem(grid, costs, technique=technique, in_flight_limit=limits), failures


def compare(problem: Problem, failures: int) -> Found:
    """Plans every distribution of ``failures``."""

    @cache
    def period(distribution: tuple[int, ...]) -> float:
        return heuristic(replace(problem, failed=normalized_failures(problem.grid, distribution)), EFFORT).period

    asked = []

    def counted(distribution: tuple[int, ...]) -> float:
        asked.append(distribution)
        return period(distribution)

    arguments = (problem.grid, problem.costs, failures)
    options = {"technique": problem.technique, "in_flight_limit": problem.in_flight_limit}
    by_bounds = normalize(*arguments, **options)  # type: ignore[arg-type]
    by_periods = normalize(*arguments, **options, period=counted)  # type: ignore[arg-type]
    every = list(distributions(problem.grid, failures))
    best = min(map(period, every))
    return Found(period(by_bounds) / best - 1, period(by_periods) / best - 1, len(asked), len(every))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=CASES, help=f"how many (default: {CASES})")
    found = [compare(*case(number)) for number in range(parser.parse_args().cases)]
    for name in ("by_bounds", "by_periods"):
        excesses = [getattr(each, name) for each in found]
        worse, most = sum(excess > 1e-9 for excess in excesses), max(excesses)
        print(f"{name}: {worse} of {len(found)} not the best, at most {100 * most:.1f} % longer")
    plans, every = (sum(getattr(each, name) for each in found) / len(found) for name in ("plans", "distributions"))
    print(f"plans per case: {plans:.2f} (at most {max(each.plans for each in found)}) for {every:.1f} distributions")


if __name__ == "__main__":
    main()
