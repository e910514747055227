"""ModelCheckpoint as if a checkpoint that could not be written had not been asked for.

Concept: Lightning's ModelCheckpoint records a new checkpoint as the best or the last one before it is written, and then
deletes the one that it replaces. If the new one could not be written, the record is undone and nothing is deleted; all
workers do the same, because all know of the failure. A link to the last checkpoint is replaced in one step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_recycle.errors import CheckpointError
from lightning_recycle.session.checkpoints import Checkpoints

__all__ = ["leave_saves_alone", "undo_failed_saves"]

_SAVES = ("_save_topk_checkpoint", "_save_last_checkpoint", "on_exception")
_LINK = "_link_checkpoint"
_RECORD = (  # what ModelCheckpoint changes while it saves
    "best_k_models",
    "best_model_path",
    "best_model_score",
    "current_score",
    "kth_best_model_path",
    "kth_value",
    "last_model_path",
    "_last_checkpoint_saved",
    "_last_global_step_saved",
)


def undo_failed_saves(trainer: pl.Trainer, checkpoints: Checkpoints) -> None:
    """From now on the Trainer's ModelCheckpoint callbacks forget what could not be written, and keep the one before."""

    def link(_: pl.Trainer, target: str, path: str) -> None:
        checkpoints.link(target, path)

    leave_saves_alone(trainer)  # of an earlier run of this process
    for callback in _model_checkpoints(trainer):
        for name in _SAVES:
            setattr(callback, name, partial(_save_or_undo, callback, checkpoints, getattr(callback, name)))
        setattr(callback, _LINK, link)


def leave_saves_alone(trainer: pl.Trainer) -> None:
    """Takes back :func:`undo_failed_saves`."""
    for callback in _model_checkpoints(trainer):
        for name in (*_SAVES, _LINK):
            vars(callback).pop(name, None)


def _save_or_undo(
    callback: ModelCheckpoint, checkpoints: Checkpoints, save: Callable[..., None], *arguments: Any
) -> None:
    record = {name: getattr(callback, name) for name in _RECORD}
    record["best_k_models"] = dict(record["best_k_models"])  # the callback changes it in place
    try:
        with checkpoints.noticed():
            save(*arguments)
    except CheckpointError:
        if checkpoints.raises:
            raise
        for name, value in record.items():
            setattr(callback, name, value)


def _model_checkpoints(trainer: pl.Trainer) -> list[ModelCheckpoint]:
    return [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
