"""What tests of checkpoints share: callbacks that save, and that look at what is saved."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from support.models import Regression
from support.training import exact_fit
from support.waiting import PATIENCE

from lightning_recycle.callbacks import Fault
from lightning_recycle.session.checkpoint_files import damage

LENGTH, EVERY = 10, 2


def saves(
    grid: tuple[int, int], callbacks: Sequence[L.Callback], faults: Sequence[Fault] = (), sharded: bool = False,
    background: Any = True, steps: int = LENGTH, strategy: dict[str, Any] | None = None, **arguments: Any,
) -> L.Trainer:  # fmt: skip
    """Trains exactly, by default while the checkpoints are written."""
    options = {"save_distributed_checkpoint": sharded, "background": background, **(strategy or {})}
    return exact_fit(
        Regression().double(), *grid, faults, max_steps=steps, callbacks=callbacks, enable_checkpointing=True,
        strategy=options, **arguments,
    )  # fmt: skip


def checkpoints(folder: Path) -> list[L.Callback]:
    options: dict[str, Any] = {"monitor": "step", "mode": "max", "every_n_train_steps": EVERY}
    return [
        ModelCheckpoint(folder, "{step}", save_top_k=2, save_last=True, **options),
        ModelCheckpoint(folder / "linked", "{step}", save_top_k=1, save_last="link", every_n_train_steps=EVERY),
    ]


def listed(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


class CompleteOnly(L.Callback):
    """What a callback of the Trainer remembers as a checkpoint is there and whole, whenever it is read."""

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        for callback in trainer.checkpoint_callbacks:
            assert isinstance(callback, ModelCheckpoint)
            for path in {*callback.best_k_models, callback.best_model_path, callback.last_model_path} - {""}:
                assert damage_if_replaced_meanwhile(path) is None, path


def damage_if_replaced_meanwhile(path: str) -> str | None:
    """The damage of a checkpoint whose writer may just put a new one in its place: a folder then has no name for a
    moment, and a reader who began with the old one finds files of the new one.
    """
    deadline = time.monotonic() + PATIENCE
    while True:
        before = _identity(path)
        found = damage(path)
        is_same = before is not None and before == _identity(path)
        if found is None or is_same or time.monotonic() > deadline:
            return found


def _identity(path: str) -> int | None:
    try:
        return os.stat(path).st_ino
    except FileNotFoundError:
        return None


def wait_until_written(trainer: L.Trainer, *_: Any) -> None:
    """Waits until this worker has done its part in a checkpoint."""
    saves = trainer.strategy.session.checkpoints.saves
    deadline = time.monotonic() + PATIENCE
    while saves.batch and not saves.batch.is_written and time.monotonic() < deadline:
        time.sleep(0.01)
