"""What the planner for layouts needs of a training model: costs of each layer, and steps from the planner.

Contract: pure, cached. A model whose stages were measured as a whole has one part for each of them.

Must not know: policies.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from lightning_recycle.planning import LayerCosts, Problem, Technique
from lightning_recycle.planning.layouts.layout_candidates import Judgement, in_turns
from lightning_recycle.planning.timing import Turns
from lightning_recycle.simulation.measured import MeasuredModel
from lightning_recycle.simulation.planned_steps import planned_schedule, planned_step
from lightning_recycle.simulation.training_model import TrainingModel, one_f_one_b_seconds

__all__ = ["layer_costs", "step_judgement", "unmovable"]


def unmovable(model: TrainingModel) -> str:
    """Why the layers of ``model`` cannot move; empty if they can."""
    return "the stages were measured as a whole" if isinstance(model, MeasuredModel) else ""


@lru_cache(maxsize=256)
def layer_costs(model: TrainingModel, pipelines: int | None = None) -> LayerCosts:
    """Costs of each unit of ``model`` with that many replicas, by default those of the fault-free grid."""
    count = model.stages if unmovable(model) else model.units
    costs = model.costs() if unmovable(model) else model.costs((1,) * count, pipelines)
    parts = model.parts(model.even() if unmovable(model) else (1,) * count)
    return LayerCosts(
        forward=costs.forward,
        backward_input=costs.backward_input,
        backward_weight=costs.backward_weight,
        reduce=costs.reduce,
        optimizer=costs.optimizer,
        output_bytes=(model.microbatch * model.transformer.boundary_bytes() / model.tensor_parallel,) * count,
        held_bytes=tuple(model.activation_bytes(part.activations) for part in parts),
        parameter_bytes=tuple(model.state_bytes(part.parameters) for part in parts),
        memory_limit=model.memory_bytes,
        bandwidth=model.network_bandwidth,
        latency=model.network_latency,
    )


def step_judgement(problem: Problem, turns: Turns | None, effort: int) -> Judgement:
    """A step of the planner's schedule, or of 1F1B where that is faster and nothing has failed.

    Args:
        problem: with the mean costs of micro-batches.
        turns: how these differ, where stages share layers.
        effort: of the planner.
    """
    if turns is not None:
        return _in_turns(problem, turns, effort)
    step = planned_step(problem, effort)
    if not problem.failed and problem.technique == Technique():
        usual = one_f_one_b_seconds(problem.costs, problem.grid.microbatches)
        if usual < step.seconds:
            return Judgement(usual)
    return Judgement(step.seconds, step.fill, step.lead, planned_schedule(problem, effort))


@lru_cache(maxsize=4096)
def _in_turns(problem: Problem, turns: Turns, effort: int) -> Judgement:
    schedule = planned_schedule(problem, effort)
    return replace(in_turns(Judgement(schedule.period, schedule=schedule), turns, effort), schedule=None)
