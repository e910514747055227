"""Steps on the guess that clipping changes nothing, and what corrects one that was wrong.

Concept: clipping by norm needs the norm of all stages. A stage that waits for it loses what the staggered optimizer
gains. So it steps as if nothing were clipped when that is likely, and learns afterwards what the others hold. If the
norm was too large after all, the optimizer steps once more from where it was, with clipped gradients.

Contract: a correction concerns parameters and optimizer states alone. Lightning and the user's hooks have seen the
step, once; what they have changed since (learning rates) stays as it is. That is right only if nobody changes gradients
or parameters in a step, or looks at them between it and the next forward. Where somebody may, no stage guesses
(:func:`may_guess`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import callbacks as known
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import Optimizer

from lightning_recycle.session.step_state import OptimizerState

__all__ = ["OptimizerStep", "clip_factor", "may_change_gradients", "may_guess"]

_HOOKS = (
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_train_batch_start",
    "on_before_zero_grad",
)
_OF_STEP = ("configure_gradient_clipping", "optimizer_step", "lr_scheduler_step")
_BLIND: tuple[type[pl.Callback], ...] = (
    known.DeviceStatsMonitor,
    known.EarlyStopping,
    known.LearningRateMonitor,
    known.ModelCheckpoint,  # it asks all workers for their parameters, which waits for the truth
    known.ModelSummary,
    known.RichModelSummary,
    known.RichProgressBar,
    known.ThroughputMonitor,
    known.Timer,
    known.TQDMProgressBar,
)
"""Lightning's callbacks that look at neither in these hooks; a subclass may."""


def may_guess(trainer: pl.Trainer, module: pl.LightningModule) -> bool:
    """Whether a stage of several may step before it knows the norm by which gradients are clipped."""
    accumulates = trainer.accumulate_grad_batches != 1 or any(
        isinstance(callback, known.GradientAccumulationScheduler)
        for callback in trainer.callbacks  # type: ignore[attr-defined]
    )
    if not trainer.gradient_clip_val or trainer.gradient_clip_algorithm == "value" or accumulates:
        return False
    if any(is_overridden(hook, module, pl.LightningModule) for hook in (*_HOOKS, *_OF_STEP)):
        return False
    return not any(map(_may_look, trainer.callbacks))  # type: ignore[attr-defined]


def _may_look(callback: pl.Callback) -> bool:
    if type(callback) in _BLIND or type(callback).__module__.startswith("lightning_recycle."):
        return False
    return any(is_overridden(hook, callback, pl.Callback) for hook in _HOOKS)


def may_change_gradients(trainer: pl.Trainer, module: pl.LightningModule) -> bool:
    """Whether the user's code may change gradients between the backward and the optimizer; clipping aside, before which
    all stages hold theirs, or which changes nothing the second time.
    """
    hooks = ("on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")
    if any(is_overridden(hook, module, pl.LightningModule) for hook in (*hooks, *_OF_STEP[:2])):
        return True
    return any(
        is_overridden(hook, callback, pl.Callback)
        for hook in hooks
        for callback in trainer.callbacks  # type: ignore[attr-defined]
        if type(callback) not in _BLIND and not type(callback).__module__.startswith("lightning_recycle.")
    )


def clip_factor(clip_val: float, norm: float) -> float:
    """By what clipping multiplies gradients, if that is less than 1: the formula of torch's ``clip_grad_norm_``."""
    return clip_val / (norm + 1e-6)


class OptimizerStep:
    """The newest step of the optimizers, which may have to be made again."""

    def __init__(self) -> None:
        self._before: list[OptimizerState] = []

    def tensors(self) -> Iterator[Tensor]:
        """What it keeps copies of."""
        return (tensor for state in self._before for tensor in state.tensors())

    @staticmethod
    def is_watched(optimizers: list[Optimizer]) -> bool:
        """Whether somebody sees each call of an optimizer's ``step``."""
        return any(o._optimizer_step_pre_hooks or o._optimizer_step_post_hooks for o in optimizers)

    @torch.no_grad()
    def keep(self, optimizers: list[Optimizer]) -> None:
        """Copies their states; called right before they step. As much memory as the states take."""
        old: list[OptimizerState | None] = [*self._before, *([None] * len(optimizers))]
        self._before = [OptimizerState(o, kept) for o, kept in zip(optimizers, old, strict=False)]

    def again(self, optimizers: list[Optimizer], factor: float, loss: Callable[[], Any]) -> None:
        """Steps again with gradients that are multiplied by ``factor``, from parameters that are as they were; options
        such as learning rates are first what they were, and then what they are now.
        """
        for optimizer, before in zip(optimizers, self._before, strict=True):
            now = OptimizerState(optimizer, None, options_only=True)
            with torch.no_grad():
                before.rewind()
                _multiply([p for group in optimizer.param_groups for p in group["params"]], factor)
            optimizer.step(closure=loss)
            now.rewind_options()


def _multiply(parameters: list[Tensor], factor: float) -> None:
    """Gives ``parameters`` other gradients; the old ones stay in their memory, as a peer may need them."""
    trained = [p for p in parameters if p.grad is not None]
    grads = torch._foreach_mul([p.grad for p in trained if p.grad is not None], factor)
    for parameter, grad in zip(trained, grads, strict=True):
        parameter.grad = grad
