"""A module whose trained weights have stayed in the workers: who would take it for the trained one is told.

Concept: after such a ``fit`` the module is what it was before, or in a worker that was started by hand one stage of the
model. Nothing shows that, so the launcher keeps a note, until somebody loads weights into the module.

Must not know: why they stay.
"""

from __future__ import annotations

import os
import weakref
from typing import Any

import lightning.pytorch as pl

from lightning_recycle.errors import UnsupportedFeatureError

__all__ = ["WEIGHTS_STAY", "Untrained"]

WEIGHTS_STAY = (
    "they stay in the workers (ReCycleStrategy(gather_result=...)), and in the checkpoints that these have written"
)
"""Why a process has no trained weights."""


class Untrained:
    """The note about ``module``; ``one_stage``: it is one stage of the model, and can not run again."""

    def __init__(self, module: pl.LightningModule, one_stage: bool) -> None:
        self._module = weakref.ref(module)
        self._one_stage = one_stage
        self._versions = _versions(module)

    def check(self, module: pl.LightningModule, ckpt_path: Any) -> None:
        """
        Raises:
            UnsupportedFeatureError: if ``module`` is to run as if it were trained.
        """
        if module is not self._module() or _versions(module) != self._versions:
            return
        if self._one_stage:
            raise UnsupportedFeatureError(
                f"After fit this {type(module).__name__} is one stage of the model, and the trained weights are not in"
                f" this process: {WEIGHTS_STAY}. Make a new one and give ckpt_path=..., or use"
                " ReCycleStrategy(gather_result=True)."
            )
        if ckpt_path is None:
            raise UnsupportedFeatureError(
                f"The trained weights of this {type(module).__name__} are not in this process: {WEIGHTS_STAY}. Give"
                " ckpt_path='best', 'last' or a path, load weights into it, or use"
                " ReCycleStrategy(gather_result=True)."
            )

    @staticmethod
    def refuse_to_save(path: Any) -> None:
        """
        Raises:
            UnsupportedFeatureError: always.
        """
        raise UnsupportedFeatureError(
            f"trainer.save_checkpoint({os.fspath(path)!r}) was called after fit in a process without the trained"
            f" weights: {WEIGHTS_STAY}. Let a ModelCheckpoint callback write them in time (save_last=True; with"
            " save_distributed_checkpoint=True no process needs all of them), or use"
            " ReCycleStrategy(gather_result=True)."
        )


def _versions(module: pl.LightningModule) -> int:
    """A number that changes when something is written to the parameters."""
    return sum(parameter._version for parameter in module.parameters())
