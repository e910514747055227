"""Streams for the tests that train with real processes; in a module of their own, so that workers can import them."""

import os
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from support.models import dataset


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """The samples of :func:`dataset`, shared out among the processes that read; an epoch begins where the one before
    stopped, and with the first sample after the last one: at once if it is ``endless``.
    """

    def __init__(self, num_samples: int, endless: bool = False) -> None:
        self.samples = dataset(num_samples)
        self.endless = endless
        self.read = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        info = get_worker_info()
        first, stride = (0, 1) if info is None else (info.id, info.num_workers)
        while True:
            while first + self.read * stride < len(self.samples):
                self.read += 1
                yield self.samples[first + (self.read - 1) * stride]
            self.read = 0
            if not self.endless:
                return

    def state_dict(self) -> dict[str, Any]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.read = state["read"]


class WithoutState(Stream):
    """Every epoch begins with the first sample."""

    state_dict = load_state_dict = None

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.read = 0
        return super().__iter__()


class SaysNothing(WithoutState):
    """For a DataLoader that promises nothing either."""


class ByProcess(SaysNothing):
    """Every process reads something else."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for x, y in super().__iter__():
            yield x + os.getpid(), y
