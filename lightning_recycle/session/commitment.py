"""What the stages must know of each other before they step: the norm of the whole gradient, or that it overflowed.

A run that needs nothing of that has the staggered optimizer: a stage steps as soon as its own gradient is complete. In
the others all stages commit each step together, and the plans that such a run asks for are plans with that barrier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_recycle.model.parts import ModelParts
from lightning_recycle.session.loss_scaling import scaler_of

__all__ = ["Needs", "needs_of", "steps_alone"]


@dataclass(frozen=True)
class Needs:
    """What each step needs to know of the gradients of all stages.

    Args:
        norm: their norm.
        overflow: whether one of them has an infinity or a NaN.
    """

    norm: bool
    overflow: bool

    @property
    def together(self) -> bool:
        """Whether the stages must commit a step together."""
        return self.norm or self.overflow


def needs_of(trainer: pl.Trainer, module: pl.LightningModule) -> Needs:
    """What the steps of ``module`` need under ``trainer``; the same in every process."""
    clips = trainer.gradient_clip_val is not None and trainer.gradient_clip_algorithm != "value"
    return Needs(
        norm=clips or is_overridden("configure_gradient_clipping", module),
        overflow=scaler_of(trainer) is not None,
    )


def steps_alone(trainer: pl.Trainer, parts: ModelParts, stages: Sequence[range]) -> bool:
    """Whether a stage can step before the others hold their gradients.

    Args:
        trainer: the Trainer.
        parts: the module's parts, described.
        stages: the parts of each stage.
    """
    return not (needs_of(trainer, parts.module).together or parts.optimizes_itself or parts.ties(stages))
