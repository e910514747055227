"""Data and samplers that tests of the order of samples share."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler


class Numbers(Dataset[Tensor]):
    """Sample i is ``first`` + i."""

    def __init__(self, size: int, first: int = 0) -> None:
        self.size, self.first = size, first

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Any) -> Tensor:
        return torch.as_tensor(index) + self.first


class Counts(Sampler[int]):
    """Counts its epochs in an attribute of its class; each has an order of its own."""

    epoch = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter(torch.randperm(self.size, generator=torch.Generator().manual_seed(self.epoch)).tolist())


class Told(Sampler[int]):
    """Has its order in an attribute, rotated by the epoch; lists the epochs set."""

    def __init__(self, size: int) -> None:
        self.order = list(range(size))
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[int]:
        first = self.epochs[-1]
        return iter(self.order[first:] + self.order[:first])
