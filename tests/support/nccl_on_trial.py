"""A model whose workers try the imitated NCCL, which fails on one of them: whoever imports this module does."""

from typing import Any

import torch
from torch import nn

from lightning_recycle import CommunicationOptions
from lightning_recycle.runtime.groups_and_transports import Transport
from lightning_recycle.runtime.nccl.nccl_library import NcclError
from lightning_recycle.runtime.nccl.nccl_transport import NcclTransport
from lightning_recycle.session import stage_layers
from support.fake_nccl import FakeComm, FakeDevice, SocketNetwork
from support.models import Regression

BROKEN = 1  # the rank of the worker on which it fails
WIDTH = 20_000


class Broken(FakeDevice):
    def init(self, unique_id: bytes, size: int, rank: int) -> FakeComm:
        raise NcclError("there is no network")


made: list[NcclTransport] = []


def on_trial(options: CommunicationOptions, rank: int, device: torch.device) -> Transport:
    """The counterpart of ``transport_for`` with "nccl"."""
    fake = (Broken if rank == BROKEN else FakeDevice)(SocketNetwork(), threaded=True)
    made.append(NcclTransport(rank, device, fake, fake, f"device {rank}"))
    return made[-1]


stage_layers.transport_for = on_trial


class OnTrial(Regression):
    """Two wide stages."""

    def configure_pipeline(self) -> list[Any]:
        torch.manual_seed(0)
        return [nn.Linear(8, 16), nn.Linear(16, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)]

    def on_train_end(self) -> None:
        (transport,) = made
        peers, groups = transport._usable.neighbours, transport._usable.rosters
        # After the kill of rank 2 the others use it, who had given it up with the broken one.
        assert peers == {BROKEN: set(), 0: {3}, 3: {0}}[transport._rank]
        assert not groups, "two of one stage are left, of whom one cannot"
