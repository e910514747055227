"""The transport over NCCL, over the imitation of NCCL between processes."""

import torch

from lightning_recycle.runtime.nccl.nccl_transport import NcclTransport
from support.fake_nccl import FakeDevice, SocketNetwork


def imitated(rank: int, device: torch.device) -> NcclTransport:
    """That of worker ``rank``, which must be used."""
    fake = FakeDevice(SocketNetwork(), threaded=True)
    return NcclTransport(rank, device, fake, fake, f"device {rank}", required=True)
