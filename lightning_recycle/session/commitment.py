"""What the stages must know of each other before they step: the norm of the whole gradient, or that it overflowed.

A run that needs nothing of that has the staggered optimizer: a stage steps as soon as its own gradient is complete. So
has one that can learn it afterwards (:mod:`~lightning_recycle.session.guesses`). In the others all stages commit each
step together, and the plans that such a run asks for are plans with that barrier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_recycle.model.parts import ModelParts
from lightning_recycle.session.guesses import may_guess
from lightning_recycle.session.loss_scaling import scaler_of

__all__ = ["Needs", "needs_of", "steps_alone"]


@dataclass(frozen=True)
class Needs:
    """What each step needs to know of the gradients of all stages.

    Args:
        norm: their norm.
        overflow: whether one of them has an infinity or a NaN.
        afterwards: whether it may be known after the step, which is corrected if need be.
    """

    norm: bool
    overflow: bool
    afterwards: bool

    @property
    def together(self) -> bool:
        """Whether the stages must commit a step together."""
        return (self.norm or self.overflow) and not self.afterwards


def needs_of(trainer: pl.Trainer, module: pl.LightningModule, stages: int) -> Needs:
    """What the steps of ``module``, cut into ``stages``, need under ``trainer``; the same in every process."""
    clips = trainer.gradient_clip_val is not None and trainer.gradient_clip_algorithm != "value"
    overflow = scaler_of(trainer) is not None
    return Needs(
        norm=clips or is_overridden("configure_gradient_clipping", module),
        overflow=overflow,
        afterwards=not overflow and stages > 1 and may_guess(trainer, module),
    )


def steps_alone(trainer: pl.Trainer, parts: ModelParts, stages: Sequence[range]) -> bool:
    """Whether a stage can step before the others hold their gradients.

    Args:
        trainer: the Trainer.
        parts: the module's parts, described.
        stages: the parts of each stage.
    """
    return not (needs_of(trainer, parts.module, len(stages)).together or parts.optimizes_itself or parts.ties(stages))
