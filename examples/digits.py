"""Used by train_vision.py and others: scikit-learn's handwritten digits, 1,797 images of 8 x 8 in 10 classes.

They are read in :meth:`Digits.setup`, so workers receive a pickled recipe instead of the images.
"""

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset


def read_digits() -> TensorDataset:
    """All images, float32 (1797, 1, 8, 8) from 0 to 1, and their classes, int64 (1797,).

    Raises:
        ModuleNotFoundError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("the digits come with scikit-learn: pip install scikit-learn") from error
    images, classes = load_digits(return_X_y=True)
    return TensorDataset(
        torch.from_numpy(images).float().div(16).view(-1, 1, 8, 8),
        torch.from_numpy(classes).long(),
    )


class Digits(L.LightningDataModule):
    """Shuffled digits to train with, and every n-th one to validate with.

    Args:
        batch_size: Images per batch; with ``strategy="recycle"`` that is per pipeline and step.
        validation_every: One of this many images is kept for validation.
        num_workers: Data-loading processes of each worker; 0 loads in the worker itself.
    """

    def __init__(self, batch_size: int = 8, validation_every: int = 5, num_workers: int = 0) -> None:
        super().__init__()
        if validation_every < 2:
            raise ValueError(f"validation_every={validation_every} keeps no image to train with; give 2 or more")
        self.batch_size = batch_size
        self.validation_every = validation_every
        self.num_workers = num_workers
        self._all: TensorDataset | None = None

    def setup(self, stage: str) -> None:
        """Read the images, once per process."""
        if self._all is None:
            self._all = read_digits()

    def train_dataloader(self) -> DataLoader[tuple[torch.Tensor, ...]]:
        """Batches of (images, classes), (batch, 1, 8, 8) and (batch,)."""
        return DataLoader(
            self._part(validation=False),
            batch_size=self.batch_size,
            shuffle=True,
            drop_last=True,
            num_workers=self.num_workers,
        )

    def val_dataloader(self) -> DataLoader[tuple[torch.Tensor, ...]]:
        """All validation batches, in order."""
        return DataLoader(self._part(validation=True), batch_size=self.batch_size, num_workers=self.num_workers)

    def _part(self, validation: bool) -> Dataset[tuple[torch.Tensor, ...]]:
        if self._all is None:
            raise RuntimeError("call setup() before asking for a dataloader")
        indices = range(len(self._all))
        return Subset(self._all, [i for i in indices if (i % self.validation_every == 0) == validation])
