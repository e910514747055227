"""A training that saves after every step: ``supervised.py DIRECTORY [restart]``."""

import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from support.models import GLOBAL_BATCH, Regression, dataset
from support.training import fit

BALLAST = 1_000_000  # numbers of 8 bytes, so that writing a checkpoint takes a while


class Heavy(L.Callback):
    """Makes a run last, and its checkpoints big."""

    def on_train_batch_end(self, *_: Any) -> None:
        time.sleep(0.02)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["ballast"] = torch.ones(BALLAST, dtype=torch.float64)


def main(directory: Path, max_restarts: int) -> None:
    newest = ModelCheckpoint(directory, every_n_train_steps=1, save_top_k=2, monitor="step", mode="max")
    fit(
        Regression().double(), 2, 2, data=dataset(GLOBAL_BATCH * 1000), max_steps=1000,
        strategy={"max_restarts": max_restarts}, callbacks=[Heavy(), newest], enable_checkpointing=True,
    )  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]), 10 if "restart" in sys.argv[2:] else 0)
