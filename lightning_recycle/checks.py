"""What can be seen to be wrong before a step is run, and the errors that say so."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from torch.optim import Optimizer

from lightning_recycle.errors import ConfigurationError, UnsupportedFeatureError
from lightning_recycle.module import PipelineModule
from lightning_recycle.planning.grid import Grid, Worker

__all__ = ["check_optimizers", "check_parameters", "check_trainer"]


def check_trainer(trainer: pl.Trainer) -> None:
    """Raises UnsupportedFeatureError for settings of the Trainer that this version does not honour."""
    precision = trainer.precision
    unsupported = {
        f"precision={precision!r}": (
            precision not in ("32-true", "64-true"),
            "use '32-true' or '64-true'",
        ),
        f"accumulate_grad_batches={trainer.accumulate_grad_batches}": (
            trainer.accumulate_grad_batches != 1,
            "use more micro-batches instead: ReCycleStrategy(num_microbatches=...) and a larger batch_size",
        ),
        f"num_nodes={trainer.num_nodes}": (trainer.num_nodes != 1, "use one node"),
        "manual optimization": (
            not trainer.lightning_module.automatic_optimization,
            "leave automatic_optimization = True",
        ),
        "StochasticWeightAveraging": (
            any(
                type(c).__name__ in ("StochasticWeightAveraging", "WeightAveraging", "EMAWeightAveraging")
                for c in _callbacks(trainer)
            ),
            "remove the callback",
        ),
    }
    for what, (present, remedy) in unsupported.items():
        if present:
            raise UnsupportedFeatureError(f"strategy='recycle' does not support {what} yet: {remedy}.")


def _callbacks(trainer: pl.Trainer) -> list[Any]:
    return list(trainer.callbacks)  # type: ignore[attr-defined]


def check_parameters(module: PipelineModule, worker: Worker, grid: Grid) -> None:
    """Raises ConfigurationError if a stage has nothing to train, or a parameter lies outside the layers."""
    outside = [name for name, _ in module.named_parameters() if not name.startswith("layers.")]
    if outside:
        raise ConfigurationError(
            f"{type(module).__name__} has parameters outside its pipeline: {', '.join(outside[:5])}. Every parameter"
            " must belong to a layer returned by configure_pipeline(); create modules there, not as attributes in"
            " __init__."
        )
    if not any(p.requires_grad for p in module.parameters()):
        raise ConfigurationError(
            f"Stage {worker.stage} of {grid.stages} has no trainable parameter. Use a smaller"
            " pipeline_parallel_size, or arrange the layers in configure_pipeline() so that every stage gets one."
        )


def check_optimizers(optimizers: list[Optimizer]) -> None:
    """Raises ConfigurationError unless there is one optimizer (Lightning itself refuses several)."""
    if len(optimizers) != 1 or not optimizers[0].param_groups:
        raise ConfigurationError(
            "configure_optimizers() returned no optimizer; the strategy needs exactly one (with any number of parameter"
            " groups): return for example torch.optim.AdamW(self.parameters())."
        )
