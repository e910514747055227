"""Data that is read without a random number."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset, default_collate

from lightning_recycle.data.dataloaders import draws_nothing

ROWS = TensorDataset(torch.arange(8.0), torch.arange(8))


class Noisy(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)[0] + torch.rand(()) + random.random() + np.random.rand()


class Fuzzy(Tensor):
    """A tensor with code of the user's."""


class Own(Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        return torch.rand(())


def jitter(samples: list[Any]) -> Any:
    return default_collate(samples)


@pytest.mark.parametrize(
    "dataset",
    [ROWS, Subset(ROWS, [1, 2]), ConcatDataset([ROWS, ROWS]), StackDataset(ROWS, ROWS), StackDataset(a=ROWS)],
    ids=lambda dataset: type(dataset).__name__,
)
def test_rows_of_tensors_draw_nothing(dataset):
    assert draws_nothing(dataset, default_collate)
    assert not draws_nothing(dataset, jitter)


@pytest.mark.parametrize("dataset", [
    Noisy(torch.zeros(8)),
    Own(),
    TensorDataset(torch.zeros(4).as_subclass(Fuzzy)),
    Subset(Noisy(torch.zeros(8)), [1]),
    ConcatDataset([ROWS, Noisy(torch.zeros(8))]),
    StackDataset(ROWS, Noisy(torch.zeros(8))),
], ids=lambda dataset: type(dataset).__name__)  # fmt: skip
def test_the_code_of_users_may_draw(dataset):
    assert not draws_nothing(dataset, default_collate)
