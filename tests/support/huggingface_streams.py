"""A stream of Hugging Face's ``datasets`` for tests with real processes; workers import it."""

from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from torch import Tensor

from support.models import dataset

if TYPE_CHECKING:
    from datasets import IterableDataset


def shuffled(num_samples: int) -> "IterableDataset":
    """The samples of ``support.models.dataset``, of which a buffer of ten is kept and drawn from."""
    from datasets import Dataset  # slow, and not needed by most who import this module

    x, y = dataset(num_samples)[:]
    rows = Dataset.from_dict({"x": x.tolist(), "y": y.tolist()})
    return rows.to_iterable_dataset(num_shards=3).shuffle(seed=2, buffer_size=10)


def collate(rows: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
    return tuple(torch.tensor([row[name] for row in rows], dtype=torch.float64) for name in "xy")


class AnotherOrder(L.Callback):
    """In each epoch, as the documentation of ``datasets`` says."""

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.train_dataloader.dataset.set_epoch(trainer.current_epoch)
