"""Samplers that tests of the order of samples share."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler


class Counts(Sampler[int]):
    """Counts its epochs in an attribute that its class has; each has an order of its own.

    Args:
        size: the number of samples.
    """

    epoch = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter(torch.randperm(self.size, generator=torch.Generator().manual_seed(self.epoch)).tolist())
