"""The loss scale of ``16-mixed``: one scale, and one decision about each step, for the whole model.

The precision plugin scales, unscales, skips steps and adapts the scale as on one device: each worker has a scaler of
its own. They stay alike because each decides from the same: whether the gradient of *any* stage overflowed, which the
stages tell each other before they step. A stage alone would see its own part only, and step while another skips.

Contract: the last stage scales the loss of each micro-batch, so gradients travel and are reduced scaled. The scale
changes in steps only, which all stages commit together: a step that is redone has the scale that it had.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from torch.amp import GradScaler
from torch.optim import Optimizer

__all__ = ["overflow_of_all", "restore_scale", "scaler_of"]


def scaler_of(trainer: pl.Trainer) -> GradScaler | None:
    """The scaler of the Trainer's precision, if there is one and it scales."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return scaler if scaler is not None and scaler.is_enabled() else None


@contextmanager
def overflow_of_all(scaler: GradScaler | None, overflow: bool) -> Iterator[None]:
    """Within the block the scaler finds an overflow if the gradient of any stage has one.

    Args:
        scaler: the scaler of this worker; None if the loss is not scaled.
        overflow: whether the gradient of any stage has an infinity or a NaN.
    """
    if scaler is None:
        yield
        return
    unscale = scaler._unscale_grads_

    def unscale_and_tell(
        optimizer: Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        # Nothing is found where nothing is trained; a scaler wants to have looked at something.
        found = unscale(optimizer, inv_scale, found_inf, allow_fp16) or {found_inf.device: found_inf}
        for one in found.values() if overflow else ():
            one.fill_(1.0)
        return found

    # What torch's own scaler for sharded gradients overrides, too; it concerns optimizers that unscale by themselves.
    scaler._unscale_grads_ = unscale_and_tell  # type: ignore[method-assign]
    try:
        yield
    finally:
        del scaler._unscale_grads_


def restore_scale(trainer: pl.Trainer, state: dict[str, Any]) -> None:
    """Loads the state of the precision plugin, also in the middle of a step whose gradients were unscaled already."""
    scaler = scaler_of(trainer)
    if scaler is not None:
        scaler.scale(torch.zeros((), device=trainer.strategy.root_device))  # now it has a scale to be updated
        scaler.update(float(state["scale"]))  # and forgets what it has found so far
    trainer.precision_plugin.load_state_dict(state)
