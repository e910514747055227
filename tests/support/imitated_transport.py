"""The transport over NCCL, over the imitation of NCCL between processes."""

from typing import Any

import torch

from lightning_recycle.errors import ConfigurationError
from lightning_recycle.runtime.nccl.nccl_transport import NcclTransport
from support.fake_nccl import FakeDevice, SocketNetwork


class Required(NcclTransport):
    """It ends with an error where something would go by Gloo."""

    def connect(self, *arguments: Any) -> None:
        super().connect(*arguments)
        if self.obstacles:
            raise ConfigurationError(f"worker {self._rank}: {self.obstacles}")


def imitated(rank: int, device: torch.device) -> NcclTransport:
    """That of worker ``rank``, which must be used."""
    fake = FakeDevice(SocketNetwork(), threaded=True)
    return Required(rank, device, fake, fake, f"device {rank}")
