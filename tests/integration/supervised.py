"""A training script that is started as a process of its own: ``supervised.py DIRECTORY [restart] [impatient]``.

It saves after every step, and with ``restart`` it replaces lost workers. With ``impatient`` workers give up a silent
launching process after :data:`IMPATIENCE` seconds.
"""

import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from support.models import GLOBAL_BATCH, Regression, dataset
from support.training import fit

from lightning_recycle.callbacks import HeartbeatCallback

BALLAST = 1_000_000  # numbers of 8 bytes, so that writing a checkpoint takes a while
IMPATIENCE = 2.0  # seconds


class Heavy(L.Callback):
    """Makes a run last, and its checkpoints big."""

    def on_train_batch_end(self, *_: Any) -> None:
        time.sleep(0.02)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["ballast"] = torch.ones(BALLAST, dtype=torch.float64)


def main(directory: Path, restart_workers: bool, impatient: bool) -> None:
    newest = ModelCheckpoint(directory, every_n_train_steps=1, save_top_k=2, monitor="step", mode="max")
    fit(
        Regression().double(), 2, 2, data=dataset(GLOBAL_BATCH * 1000), max_steps=1000,
        strategy={"max_restarts": 10 if restart_workers else 0, "on_stage_lost": "raise" if impatient else "auto"},
        callbacks=[Heavy(), newest, HeartbeatCallback(coordinator_timeout=IMPATIENCE if impatient else 60.0)],
        enable_checkpointing=True,
    )  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]), "restart" in sys.argv[2:], "impatient" in sys.argv[2:])
