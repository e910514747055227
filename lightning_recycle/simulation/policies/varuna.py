"""Varuna: every change of the cluster restarts the job with a new depth, from the newest checkpoint.

Source: Athlur et al., EuroSys'22 (arXiv 2111.04007) and its public repository (microsoft/varuna), which writes a
checkpoint every 10 min while training stands still; here it has the checkpoints of all policies.

Assumptions:

- For each depth P that divides the cut points (the layers), D = floor(G / P) pipelines with the largest micro-batch
  that fits, at most that of the model (durations here are proportional to it, so a larger one only adds bubbles);
  the depth with the shortest simulated step wins.
- Activations are recomputed: B includes F, which counts as redone.
- The global batch stays the same.
- The job is restarted both for failures and for returning nodes; the public scripts take 60 to 120 s, hence
  ``restart``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from lightning_recycle.simulation.planned_steps import DEFAULT_EFFORT, PlannedStep
from lightning_recycle.simulation.policies.common import CommonPolicy, pauses
from lightning_recycle.simulation.policies.policy import Configuration, Context, Happening, Loss, Reaction, stopped
from lightning_recycle.simulation.policies.workers import crowded, crowding, live_workers, nodes_of
from lightning_recycle.simulation.schedules import pipeline_step
from lightning_recycle.simulation.training_model import TrainingModel
from lightning_recycle.simulation.units import Duration

__all__ = ["Varuna"]


@dataclass(frozen=True)
class Varuna(CommonPolicy):
    """Varuna. Takes the arguments of ``CommonPolicy``, and:

    Args:
        restart: seconds to restart the job.
    """

    restart: Duration = 90.0

    def begin(self, context: Context, live: frozenset[int]) -> Reaction:
        """See :class:`Policy`."""
        return Reaction(self._configuration(context, live_workers(context, live)))

    def react(self, context: Context, current: Configuration, happening: Happening) -> Reaction | None:
        """See :class:`Policy`."""
        used = current.layout
        assert isinstance(used, frozenset)
        workers = live_workers(context, happening.live)
        if not used.issubset(workers):
            found = self._configuration(context, workers)
            steps = self.restarting(context, broken=True)
            return Reaction(found, steps if found.running else (), Loss.CHECKPOINT)
        found = self._configuration(context, workers)
        if not happening.up or not found.running or found.throughput <= current.throughput:
            return None
        again = self.restarting(context, broken=False)
        if not current.running:
            return Reaction(found, again)
        costs = self.checkpoint_costs(context)
        steps = (*pauses(checkpoint=costs.stall + costs.writing), *again)
        return Reaction(found, steps, at_boundary=True, saved=True)

    def _configuration(self, context: Context, workers: tuple[int, ...]) -> Configuration:
        model = context.model
        again = replace(model, recompute=True, throughput=None)
        layout = morph(again, len(workers), self.schedule, self.effort)
        if layout is None:
            return stopped("does not fit", frozenset())
        pipelines, stages, microbatch, step = layout
        used = workers[: pipelines * stages]
        factor = crowding(context, (used[begin : begin + stages] for begin in range(0, len(used), stages)))
        if factor != 1.0:
            *_, step = morph(again, len(workers), self.schedule, self.effort, factor) or layout
        found = Configuration(
            f"varuna, {pipelines} x {stages}, micro-batch {microbatch}",
            step.seconds,
            model.global_batch,
            pipelines * stages * model.tensor_parallel,
            model.useful_gpu_seconds,
            model.global_batch * model.sample_seconds[0] * model.tensor_parallel,
            layout=frozenset(used),
            fill_seconds=step.fill,
            lead_seconds=step.lead,
            nodes=nodes_of(context, used),
        )
        return self.with_checkpoints(context, found)


@lru_cache(maxsize=4096)
def morph(
    model: TrainingModel,
    workers: int,
    schedule: str = "1f1b",
    effort: int = DEFAULT_EFFORT,
    factor: float = 1.0,
) -> tuple[int, int, int, PlannedStep] | None:
    """(D, P, micro-batch, step) of the fastest depth on that many workers; None when none fits.

    Args:
        model: the model, with ``recompute``.
        workers: number of live workers.
        schedule: schedule of the pipelines; the depth is chosen by 1F1B, as Varuna's own simulator does.
        effort: effort of the planner.
        factor: by which messages take longer in the end; the depth is chosen as if they did not.
    """
    best: tuple[int, int, int, PlannedStep] | None = None
    chosen: tuple[TrainingModel, int] | None = None
    layers = model.transformer.layers
    for depth in (depth for depth in range(1, layers + 1) if layers % depth == 0):
        pipelines = min(workers // depth, model.global_batch)
        size = _largest_fitting(model, depth) if pipelines else 0
        if not size:
            continue
        shape = replace(model, pipelines=1, stages=depth, microbatch=size, global_batch=size)
        micro = -(-model.global_batch // (pipelines * size))
        step = pipeline_step("1f1b", shape.costs(pipelines=pipelines), micro)
        if best is None or step < best[3]:
            best, chosen = (pipelines, depth, size, step), (shape, micro)
    if best is None or chosen is None:
        return None
    shape, micro = chosen
    costs = crowded(shape.costs(pipelines=best[0]), factor)
    # Its own micro-batches at most S deep, as many as 1F1B holds, which is what _largest_fitting has checked.
    limit = (shape.stages,) * shape.stages
    return (*best[:3], pipeline_step(schedule, costs, micro, limit, effort))


def _largest_fitting(model: TrainingModel, depth: int) -> int:
    """Samples of the largest micro-batch of which ``depth`` can be in flight; 0 when not even one sample fits."""
    free = model.memory_bytes - model.state_bytes(1 / depth)
    shape = model.transformer
    # Inputs of the layers for each micro-batch in flight, and one layer being recomputed.
    held = depth * shape.activation_bytes(recompute=True) / depth + shape.activation_bytes() / shape.layers
    held /= model.tensor_parallel
    size = model.microbatch
    while size and size * held > free:
        size //= 2
    return size
