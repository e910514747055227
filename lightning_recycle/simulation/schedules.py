"""The schedule of a whole pipeline: 1F1B, or the planner's.

Concept: which schedule a pipeline runs has nothing to do with what happens to it when a worker fails. So that policies
can be compared with each other and not with each other's schedules, all take their steps from here.

- ``1f1b``: fused backward, one optimizer step for all stages.
- ``planned``: the planner's schedule with a split backward and a staggered optimizer, within the workers' memory,
  where it is faster than 1F1B.

Contract: pure, cached by what it calls.

Must not know: policies, failures.
"""

from __future__ import annotations

from typing import Literal, get_args

from lightning_recycle.planning import Costs, Grid, Problem, Technique
from lightning_recycle.simulation.planned_steps import DEFAULT_EFFORT, PlannedStep, planned_step
from lightning_recycle.simulation.training_model import one_f_one_b_seconds

__all__ = ["SCHEDULES", "ScheduleName", "pipeline_step"]

ScheduleName = Literal["1f1b", "planned"]

SCHEDULES: tuple[str, ...] = get_args(ScheduleName)


def pipeline_step(
    schedule: str,
    costs: Costs,
    microbatches: int,
    in_flight_limit: tuple[int, ...] | None = None,
    effort: int = DEFAULT_EFFORT,
) -> PlannedStep:
    """A step of one whole pipeline.

    Args:
        schedule: one of ``SCHEDULES``.
        costs: seconds of the pipeline's stages.
        microbatches: micro-batches of this pipeline in a step.
        in_flight_limit: the most micro-batches that fit into a worker of each stage, for the planned schedule. Where
            one does not even hold a single one, 1F1B is assumed to fit (the policy has decided that this pipeline
            runs).
        effort: effort of the planner.
    """
    usual = PlannedStep(one_f_one_b_seconds(costs, microbatches))
    if schedule == "1f1b" or (in_flight_limit and min(in_flight_limit) < 1):
        return usual
    limit = None if in_flight_limit is None else tuple(min(most, microbatches) for most in in_flight_limit)
    problem = Problem(Grid(1, costs.stages, microbatches), costs, frozenset(), Technique(True, True), limit)
    return min(usual, planned_step(problem, effort))
