"""A script of ``pytorch_lightning``: ``python other_lightning.py FOLDER STRATEGY [KILLED_STEP]``."""

import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Data(pl.LightningDataModule):
    def train_dataloader(self) -> DataLoader[Any]:
        x = torch.linspace(0, 1, 48 * 4, dtype=torch.float64).reshape(48, 4)
        return DataLoader(TensorDataset(x, x.mean(1, keepdim=True)), batch_size=16 // self.trainer.world_size)

    val_dataloader = train_dataloader


class Net(pl.LightningModule):
    def __init__(self, killed_step: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        self.killed_step = killed_step

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_rank == 1 and self.global_step == self.killed_step:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


if __name__ == "__main__":
    folder, name = Path(sys.argv[1]), sys.argv[2]
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    options: dict[str, Any] = {"devices": 1}
    if name != "one":
        from lightning_recycle import ReCycleStrategy

        options = {"devices": 2, "strategy": "recycle" if name == "name" else ReCycleStrategy()}
    pl.seed_everything(1)
    callbacks = [ModelCheckpoint(folder, filename="last", monitor="val_loss"), EarlyStopping("val_loss")]
    callbacks.append(LearningRateMonitor())
    logger = CSVLogger(folder)
    trainer = pl.Trainer(accelerator="cpu", max_epochs=2, callbacks=callbacks, logger=logger, **options)
    module = Net(int(sys.argv[3]) if len(sys.argv) > 3 else -1)
    trainer.fit(module, datamodule=Data())
    value = float(trainer.callback_metrics["val_loss"])
    failures = [e.worker for e in getattr(trainer.strategy, "history", []) if e.kind == "failure"]
    restored = Net.load_from_checkpoint(callbacks[0].best_model_path, killed_step=-1)
    assert all(torch.equal(a, b) for a, b in zip(restored.parameters(), module.parameters(), strict=True))
    assert isinstance(trainer.optimizers[0], torch.optim.Adam)
    assert trainer.validate(module, datamodule=Data(), verbose=False)[0]["val_loss"] == value
    print(f"val_loss={value!r} failures={len(failures)}")
