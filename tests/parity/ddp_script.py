"""The same script under DDP with two processes: ``python ddp_script.py ddp|recycle folder``."""

import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from same_script import GLOBAL_BATCH, PIPELINES, Classifier, Data
from support.training import QUIET
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from lightning_recycle import ReCycleStrategy


class Synchronized(Classifier):
    """Logs as a module for DDP must."""

    def on_training_loss(self, loss: Tensor) -> None:
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)

    def on_validation_output(self, output: Tensor, target: Tensor) -> None:
        self.log("val_loss", self.loss(output, target), sync_dist=True)
        self.log("val_max", output.max(), sync_dist=True, reduce_fx="max")


def strategy(name: str) -> dict[str, Any]:
    if name == "ddp":
        return {"strategy": "ddp", "devices": PIPELINES}
    return {"strategy": ReCycleStrategy(pipeline_parallel_size=2, num_microbatches=2), "devices": 2 * PIPELINES}


def sharded(trainer: L.Trainer, loader: DataLoader[Any], shuffle: bool) -> DataLoader[Any]:
    """The loader as a user of DDP writes it: the sampler gives each process its share."""
    sampler = DistributedSampler(loader.dataset, trainer.world_size, trainer.global_rank, shuffle=shuffle, seed=3)
    return DataLoader(loader.dataset, batch_size=loader.batch_size, sampler=sampler)


if __name__ == "__main__":
    torch.set_num_threads(1)
    name, root = sys.argv[1], Path(sys.argv[2])
    data = Data(GLOBAL_BATCH // PIPELINES)  # the batch size is per process, and per pipeline
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=2, accumulate_grad_batches=2, gradient_clip_val=0.2, default_root_dir=root,
        **{**QUIET, "enable_checkpointing": True, **strategy(name)},
    )  # fmt: skip
    module = Synchronized()
    validation = sharded(trainer, data.loader(4 * GLOBAL_BATCH, seed=2), shuffle=False)
    trainer.fit(module, sharded(trainer, data.training(), shuffle=True), validation)
    if trainer.is_global_zero:
        metrics = {k: v for k, v in trainer.callback_metrics.items() if not k.startswith("recycle/")}
        torch.save((module.state_dict(), metrics, trainer.current_epoch, trainer.global_step), root / "left.pt")
