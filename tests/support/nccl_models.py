"""A model whose workers exchange payloads by the imitated NCCL: whoever imports this module does."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from lightning_recycle.runtime.nccl_transport import NcclTransport
from lightning_recycle.runtime.transports import Channel, GlooTransport, Transport
from lightning_recycle.runtime.wire import Layout
from lightning_recycle.session import session
from support.fake_nccl import FakeDevice, SocketNetwork
from support.models import Regression

WIDTH = 5_000  # so that a micro-batch of two samples is larger than what Gloo carries with its header


class CountingTransport(NcclTransport):
    """Counts what it is given."""

    sent = 0

    def send(
        self, channel: Channel, layout: Layout, tensors: Any, destination: int, tag: int
    ) -> list[tuple[Any, Tensor]]:
        assert self._courier_to(destination) is not None, "it would go by Gloo"
        CountingTransport.sent += 1
        return super().send(channel, layout, tensors, destination, tag)


def imitated(option: str, rank: int, device: torch.device) -> Transport:
    """The counterpart of ``transport_for``."""
    fake = FakeDevice(SocketNetwork(), threaded=True)
    gloo = GlooTransport(timedelta(seconds=60))
    return CountingTransport(rank, device, fake, fake, f"device {rank}", gloo, required=True)


session.transport_for = imitated


class Wide(Regression):
    """Two wide stages; a worker ends the run if its payloads went another way."""

    def configure_pipeline(self) -> list[Any]:
        torch.manual_seed(0)
        return [nn.Linear(8, 16), nn.Linear(16, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)]

    def on_train_end(self) -> None:
        assert CountingTransport.sent > 0
