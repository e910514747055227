"""Varuna: every change of the cluster restarts the job with a new depth, from the newest checkpoint.

Source: Athlur et al., EuroSys'22 (arXiv 2111.04007) and its public repository (microsoft/varuna). Checkpoints as in the
``restart`` policy.

Assumptions:

- For each depth P that divides the cut points (the layers), D = floor(G / P) pipelines with the largest micro-batch
  that fits, at most ``largest_microbatch`` (durations here are proportional to it, so a larger one only adds bubbles);
  the depth with the shortest simulated step wins.
- Activations are recomputed: B includes F, which counts as redone.
- The global batch stays the same.
- The job is relaunched both for failures and for returning nodes; the public scripts take 60 to 120 s.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from lightning_recycle.arguments import at_least, whole
from lightning_recycle.simulation.policies.policy import Configuration, Context, Happening, Loss, Reaction, stopped
from lightning_recycle.simulation.policies.workers import live_workers, pauses
from lightning_recycle.simulation.training_model import TrainingModel, one_f_one_b_seconds
from lightning_recycle.simulation.units import Duration, as_seconds

__all__ = ["Varuna"]


@dataclass(frozen=True)
class Varuna:
    """Varuna.

    Args:
        relaunch: seconds to restart the job, besides reading the checkpoint.
        detection: seconds from a failure to its detection.
        checkpoint_every: time between checkpoints.
        storage: bytes/s for writing and reading, per GPU of the fault-free grid.
        largest_microbatch: most samples in a micro-batch; None for the size at which the model was calibrated.
    """

    relaunch: Duration = 90.0
    detection: Duration = 5.0
    checkpoint_every: Duration = "10min"
    storage: float = 1e9 / 32
    largest_microbatch: int | None = None

    def __post_init__(self) -> None:
        for name in ("relaunch", "detection", "checkpoint_every"):
            object.__setattr__(self, name, as_seconds(f"Varuna({name})", getattr(self, name)))
        at_least("Varuna", "checkpoint_every", self.checkpoint_every, above=True)
        at_least("Varuna", "storage", self.storage, above=True)
        if self.largest_microbatch is not None:
            whole("Varuna", "largest_microbatch", self.largest_microbatch, 1)

    @property
    def ignores_failures(self) -> bool:
        """No."""
        return False

    def checkpoint_seconds(self, context: Context) -> float:
        """Seconds to write or read one checkpoint."""
        return context.model.transformer.state_bytes() / (self.storage * context.model.gpus)

    def begin(self, context: Context, live: frozenset[int]) -> Reaction:
        """See :class:`Policy`."""
        return Reaction(self._configuration(context, live_workers(context, live)))

    def react(self, context: Context, current: Configuration, happening: Happening) -> Reaction | None:
        """See :class:`Policy`."""
        used = current.layout
        assert isinstance(used, frozenset)
        workers = live_workers(context, happening.live)
        files = self.checkpoint_seconds(context)
        if not used.issubset(workers):
            found = self._configuration(context, workers)
            steps = pauses(detect=float(self.detection), relaunch=float(self.relaunch), load=files)
            return Reaction(found, steps if found.running else (), Loss.CHECKPOINT)
        found = self._configuration(context, workers)
        if not happening.up or not found.running or found.throughput <= current.throughput:
            return None
        if not current.running:
            return Reaction(found, pauses(relaunch=float(self.relaunch), load=files))
        steps = pauses(checkpoint=files, relaunch=float(self.relaunch), load=files)
        return Reaction(found, steps, at_boundary=True)

    def _configuration(self, context: Context, workers: tuple[int, ...]) -> Configuration:
        model = context.model
        limit = self.largest_microbatch or model.microbatch
        layout = morph(replace(model, recompute=True, throughput=None), len(workers), limit)
        if layout is None:
            return stopped("does not fit", frozenset())
        pipelines, stages, microbatch, seconds = layout
        return Configuration(
            f"varuna, {pipelines} x {stages}, micro-batch {microbatch}",
            seconds,
            model.global_batch,
            pipelines * stages * model.tensor_parallel,
            model.useful_gpu_seconds,
            model.global_batch * model.sample_seconds[0] * model.tensor_parallel,
            float(self.checkpoint_every),
            self.checkpoint_seconds(context),
            frozenset(workers[: pipelines * stages]),
        )


@lru_cache(maxsize=4096)
def morph(model: TrainingModel, workers: int, largest: int) -> tuple[int, int, int, float] | None:
    """(D, P, micro-batch, seconds of a step) of the fastest depth on that many workers; None when none fits.

    Args:
        model: the model, with ``recompute``.
        workers: number of live workers.
        largest: most samples in a micro-batch.
    """
    best: tuple[int, int, int, float] | None = None
    layers = model.transformer.layers
    for depth in (depth for depth in range(1, layers + 1) if layers % depth == 0):
        pipelines = min(workers // depth, model.global_batch)
        size = _largest_fitting(model, depth, largest) if pipelines else 0
        if not size:
            continue
        shape = replace(model, pipelines=1, stages=depth, microbatch=size, global_batch=size)
        micro = -(-model.global_batch // (pipelines * size))
        seconds = one_f_one_b_seconds(shape.costs(pipelines=pipelines), micro)
        if best is None or seconds < best[3]:
            best = (pipelines, depth, size, seconds)
    return best


def _largest_fitting(model: TrainingModel, depth: int, largest: int) -> int:
    """Samples of the largest micro-batch of which ``depth`` can be in flight; 0 when not even one sample fits."""
    free = model.memory_bytes - model.state_bytes(1 / depth)
    shape = model.transformer
    # Inputs of the layers for each micro-batch in flight, and one layer being recomputed.
    held = depth * shape.activation_bytes(recompute=True) / depth + shape.activation_bytes() / shape.layers
    held /= model.tensor_parallel
    size = largest
    while size and size * held > free:
        size //= 2
    return size
