"""The data of the template: scikit-learn's handwritten digits."""

from typing import Any

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split


class DigitsData(L.LightningDataModule):
    """Images of 8 x 8 pixels, split into those to learn, to validate and to test with.

    Args:
        batch_size: of all devices together.
        num_workers: processes that read, of each device.
    """

    def __init__(self, batch_size: int = 64, num_workers: int = 0) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.batch_size_per_device = batch_size
        self.parts: list[Any] = []

    def prepare_data(self) -> None:
        load_digits()  # the template downloads here

    def setup(self, stage: str | None = None) -> None:
        if self.trainer is not None:
            if self.hparams["batch_size"] % self.trainer.world_size != 0:
                raise RuntimeError(
                    f"Batch size ({self.hparams['batch_size']}) is not divisible by the number of devices"
                    f" ({self.trainer.world_size})."
                )
            self.batch_size_per_device = self.hparams["batch_size"] // self.trainer.world_size
        if not self.parts:
            digits = load_digits()
            images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
            data = TensorDataset(images, torch.tensor(digits.target))
            self.parts = random_split(data, [1280, 256, 261], generator=torch.Generator().manual_seed(42))

    def _loader(self, data: Dataset[Any], shuffle: bool = False) -> DataLoader[Any]:
        return DataLoader(data, self.batch_size_per_device, shuffle=shuffle, num_workers=self.hparams["num_workers"])

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.parts[0], shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.parts[1])

    def test_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.parts[2])
