"""Step times: of 1F1B and of the planner's schedules, each planned once.

``1f1b``: fused backward, one optimizer step for all stages. ``planned``: the planner's schedule with a split backward
and a staggered optimizer, within the workers' memory, where it is faster than 1F1B. A step takes the period of the
heuristic's schedule; the first after a stop takes longer, up to the makespan, because the pipelines are empty. Results
are cached for the life of the process.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Literal, get_args

from lightning_recycle.planning import (
    Costs,
    Grid,
    HeuristicPlanner,
    LayerCosts,
    Problem,
    Technique,
    normalize,
    normalized_failures,
)
from lightning_recycle.planning.layout_candidates import Judgement, judgement_of, with_variation
from lightning_recycle.planning.schedule import Schedule
from lightning_recycle.planning.timing import MicrobatchVariation
from lightning_recycle.simulation.training_model import MeasuredModel, TrainingModel, one_f_one_b_seconds

DEFAULT_EFFORT = 100_000
"""Operations that the planner plays: at most 0.2 s for the paper's models.

Step times are within 1 % of those with eight times as many.
"""


_MOST_JUDGED = 5_000
"""Operations of an iteration; some dozens of plans of this size take seconds."""

_JUDGED_SHARE = 5
"""Divisor of the effort for plans that choose among distributions."""


@lru_cache(maxsize=16)
def planned_schedule(problem: Problem, effort: int = DEFAULT_EFFORT) -> Schedule:
    """The heuristic's plan of ``problem``."""
    return HeuristicPlanner(effort).plan(problem)


@lru_cache(maxsize=65536)
def planned_step(problem: Problem, effort: int = DEFAULT_EFFORT) -> Judgement:
    """A step under the heuristic's plan of ``problem``."""
    return replace(judgement_of(planned_schedule(problem, effort)), schedule=None)


@lru_cache(maxsize=65536)
def distribution(problem: Problem, failures: int, effort: int = DEFAULT_EFFORT) -> tuple[int, ...]:
    """Failures of each stage after failure normalization.

    By the periods of the plans, as in a run, up to ``_MOST_JUDGED`` operations; else, or without effort, by lower
    bounds.
    """
    grid = problem.grid

    def period(spread: tuple[int, ...]) -> float:
        judged = replace(problem, failed=normalized_failures(grid, spread))
        return planned_step(judged, effort // _JUDGED_SHARE).period

    judged = failures and effort and 3 * grid.global_microbatches * grid.stages <= _MOST_JUDGED
    return normalize(problem, failures, period=period if judged else None)


ScheduleName = Literal["1f1b", "planned"]

SCHEDULES: tuple[str, ...] = get_args(ScheduleName)


def pipeline_step(
    schedule: str,
    costs: Costs,
    microbatches: int,
    in_flight_limit: tuple[int, ...] | None = None,
    effort: int = DEFAULT_EFFORT,
) -> Judgement:
    """A step of one whole pipeline under ``schedule``, one of ``SCHEDULES``.

    ``in_flight_limit``: for the planned schedule. Where it admits no micro-batch, 1F1B is assumed to fit, as the policy
    has decided to run this pipeline.
    """
    usual = Judgement(one_f_one_b_seconds(costs, microbatches))
    if schedule == "1f1b" or (in_flight_limit and min(in_flight_limit) < 1):
        return usual
    limit = None if in_flight_limit is None else tuple(min(most, microbatches) for most in in_flight_limit)
    problem = Problem(Grid(1, costs.stages, microbatches), costs, frozenset(), Technique(True, True), limit)
    return min(usual, planned_step(problem, effort))


def unmovable(model: TrainingModel) -> str:
    """Why the layers of ``model`` cannot move; empty if they can."""
    return "the stages were measured as a whole" if isinstance(model, MeasuredModel) else ""


@lru_cache(maxsize=256)
def layer_costs(model: TrainingModel) -> LayerCosts:
    """Costs of each unit of ``model`` with the replicas of the fault-free grid."""
    count = model.stages if unmovable(model) else model.units
    costs = model.costs() if unmovable(model) else model.costs((1,) * count)
    return LayerCosts(
        forward=costs.forward,
        backward_input=costs.backward_input,
        backward_weight=costs.backward_weight,
        reduce=costs.reduce,
        optimizer=costs.optimizer,
        output_bytes=(model.microbatch * model.transformer.boundary_bytes(),) * count,
        held_bytes=(model.activation_bytes(1 / count),) * count,
        parameter_bytes=(model.state_bytes(1 / count),) * count,
        memory_limit=model.memory_bytes,
        bandwidth=model.network_bandwidth,
        latency=model.network_latency,
    )


@lru_cache(maxsize=4096)
def step_judgement(problem: Problem, variation: MicrobatchVariation | None, effort: int) -> Judgement:
    """A step of the planner's schedule, or of 1F1B if faster and nothing has failed.

    ``problem`` has the mean costs of micro-batches; ``variation``: differences where stages share layers.
    """
    if variation is not None:
        schedule = planned_schedule(problem, effort)
        return replace(with_variation(Judgement(schedule.period, schedule=schedule), variation, effort), schedule=None)
    step = planned_step(problem, effort)
    if problem.failed or problem.technique != Technique():
        return step
    return min(step, Judgement(one_f_one_b_seconds(problem.costs, problem.grid.microbatches)))
