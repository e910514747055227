"""Step times from the planner, each planned once.

Contract: a step's duration is the period of the heuristic's schedule, which with the staggered optimizer can be shorter
than the makespan. Answers are kept for the life of the process: the same failures, costs and memory are never planned
again.

Must not know: policies.
"""

from __future__ import annotations

from functools import lru_cache

from lightning_recycle.planning import (
    Costs,
    Grid,
    HeuristicPlanner,
    Problem,
    Technique,
    normalize,
)

__all__ = ["DEFAULT_EFFORT", "distribution", "planned_seconds"]

DEFAULT_EFFORT = 100_000
"""Operations that the planner plays in search of a better schedule: at most 0.2 s for the paper's models on 32 GPUs,
and within 1 % of the step times found with eight times as many."""


@lru_cache(maxsize=65536)
def planned_seconds(problem: Problem, effort: int = DEFAULT_EFFORT) -> float:
    """Seconds between two steps under the heuristic's plan of ``problem``."""
    return HeuristicPlanner(effort).plan(problem).period


@lru_cache(maxsize=65536)
def distribution(
    grid: Grid, costs: Costs, failures: int, technique: Technique, in_flight_limit: tuple[int, ...] | None
) -> tuple[int, ...]:
    """How many failures each stage carries after failure normalization."""
    return normalize(grid, costs, failures, technique=technique, in_flight_limit=in_flight_limit)
