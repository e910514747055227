"""Step times from the planner, each planned once.

Contract: a step's duration is the period of the heuristic's schedule, which with the staggered optimizer can be shorter
than the makespan; the first step after a stop takes longer by the difference, because the pipelines are empty. Results
are cached for the life of the process: the same failures, costs and memory are never planned twice.

Must not know: policies.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from lightning_recycle.planning import HeuristicPlanner, Problem, normalize, normalized_failures
from lightning_recycle.planning.compact_schedule import CodedSchedule
from lightning_recycle.planning.schedule import Schedule

__all__ = ["DEFAULT_EFFORT", "PlannedStep", "distribution", "planned_schedule", "planned_seconds", "planned_step"]

DEFAULT_EFFORT = 100_000
"""Operations the planner plays in search of a better schedule: at most 0.2 s for the paper's models on 32 GPUs,
and within 1 % of the step times found with eight times as many."""


_MOST_JUDGED = 5_000
"""Operations of an iteration; some dozens of plans of this size take seconds. The paper's models have up to 3,072."""

_JUDGED_SHARE = 5
"""To choose among distributions, plans get this part of the effort."""


class PlannedStep(NamedTuple):
    """A step of a plan; all in seconds. Without the staggered optimizer steps do not overlap.

    Args:
        seconds: duration of a step in steady state.
        fill: extra time of the first step, which begins with empty pipelines.
        lead: how long before a step's end the first worker finishes it and begins the next one.
    """

    seconds: float
    fill: float = 0.0
    lead: float = 0.0

    def longer(self, seconds: float) -> PlannedStep:
        """The same step, longer by ``seconds``."""
        return self._replace(seconds=self.seconds + seconds)


@lru_cache(maxsize=16)
def planned_schedule(problem: Problem, effort: int = DEFAULT_EFFORT) -> Schedule:
    """The heuristic's plan of ``problem``."""
    return HeuristicPlanner(effort).plan(problem)


@lru_cache(maxsize=65536)
def planned_step(problem: Problem, effort: int = DEFAULT_EFFORT) -> PlannedStep:
    """A step under the heuristic's plan of ``problem``."""
    schedule = planned_schedule(problem, effort)
    if not problem.technique.staggered:
        return PlannedStep(schedule.period)
    if isinstance(schedule, CodedSchedule):  # its lanes are alike
        schedule = schedule.lane.schedule()
    ends = [operations[-1].end for operations in schedule.workers.values() if operations]
    fill = max(0.0, schedule.makespan - schedule.period)
    return PlannedStep(schedule.period, fill, max(ends) - min(ends))


def planned_seconds(problem: Problem, effort: int = DEFAULT_EFFORT) -> float:
    """Seconds between two steps under the heuristic's plan of ``problem``."""
    return planned_step(problem, effort).seconds


@lru_cache(maxsize=65536)
def distribution(problem: Problem, failures: int, effort: int = DEFAULT_EFFORT) -> tuple[int, ...]:
    """How many failures each stage carries after failure normalization.

    By the periods of the plans, as in a run, up to ``_MOST_JUDGED`` operations; else, or without effort, by lower
    bounds alone.

    Args:
        problem: the fault-free problem.
        failures: the number of failed workers.
        effort: of the plan that is wanted.
    """
    grid = problem.grid

    def period(spread: tuple[int, ...]) -> float:
        return planned_seconds(replace(problem, failed=normalized_failures(grid, spread)), effort // _JUDGED_SHARE)

    judged = failures and effort and 3 * grid.global_microbatches * grid.stages <= _MOST_JUDGED
    return normalize(
        grid,
        problem.costs,
        failures,
        technique=problem.technique,
        in_flight_limit=problem.in_flight_limit,
        period=period if judged else None,
    )
