"""Modules and callbacks of situations in which users of Lightning and of data packages were surprised. Workers import
this module.
"""

from typing import Any

import lightning as L
import small_training as small
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader


class Scheduled(small.Perceptron):
    """The number of steps is read where the schedule is made, before a resumed loader gets its state."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Manual(small.Perceptron):
    """Keeps the weights from before each step, which Lightning's ModelCheckpoint then saves."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.layer = self.layers
        self.saved_models: dict[int, Any] = {}

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.saved_models = {batch_idx: {name: value.clone() for name, value in self.layer.state_dict().items()}}
        loss = (self.layers(batch["x"]) - batch["y"]).square().mean()
        self.log("loss", loss)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", (self.layers(batch["x"]) - batch["y"]).square().mean())


class SometimesLogged(small.Perceptron):
    """Keys that not every batch, or not every part of one, has."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx % 2:
            self.log("odd", batch["x"].mean(), on_step=False, on_epoch=True)
        if batch["x"][0, 0] > 0:
            self.log("positive", batch["x"].mean(), on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("every", batch["x"].mean())
        if batch_idx == 1:
            self.log("second", batch["x"].mean())


class BatchFromWorldSize(L.LightningDataModule):
    def train_dataloader(self) -> DataLoader[Any]:
        rows = [small.as_tensors(row) for row in small.as_rows()]
        return DataLoader(rows, batch_size=small.GLOBAL_BATCH // self.trainer.world_size)


class LiveLists(L.Callback):
    """Its state is the list that it goes on to fill."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.steps.append(trainer.global_step)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}


class LeavesTheEpoch(small.Perceptron):
    """After two batches, on all workers or on one."""

    def __init__(self, alone: bool) -> None:
        super().__init__()
        self.alone = alone

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        leaves = batch_idx == 2 and (not self.alone or self.trainer.global_rank == 1)
        return -1 if leaves else None


def with_an_empty_loader(size: int) -> CombinedLoader:
    rows = [small.as_tensors(row) for row in small.as_rows()]
    return CombinedLoader([DataLoader([], batch_size=size), DataLoader(rows, batch_size=size)], "max_size_cycle")
