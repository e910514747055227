"""Models whose workers exchange payloads and sums by the imitated NCCL: whoever imports this module does."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lightning_recycle import CommunicationOptions
from lightning_recycle.runtime.communicator import EXCHANGE_TAG
from lightning_recycle.runtime.groups_and_transports import Transport
from lightning_recycle.runtime.wire import Channel, ValueLayout
from lightning_recycle.session import stage_layers
from support.fake_nccl import FakeDevice, SocketNetwork
from support.imitated_transport import Required
from support.models import Decode, Encode, Regression

WIDTH = 5_000  # so that a micro-batch of two samples is larger than what Gloo carries with its header


class CountingTransport(Required):
    """Counts what it is given."""

    sent = 0
    states = 0  # parts of the state for a joining worker that were received
    kept = 0  # communicators that were there already when a generation began
    collectives: ClassVar[list[tuple[str, int | None]]] = []  # the group and the root of each
    devices: ClassVar[dict[int, FakeDevice]] = {}  # by rank: that of this process

    def send(self, channel: Channel, layout: ValueLayout, tensors: Any, destination: int, tag: int) -> None:
        CountingTransport.sent += 1
        super().send(channel, layout, tensors, destination, tag)

    def receive(self, channel: Channel, layout: ValueLayout, source: int, tag: int) -> Any:
        CountingTransport.states += tag > EXCHANGE_TAG
        return super().receive(channel, layout, source, tag)

    def _start(self, generation: int, agreed: Any, used: Any, *rest: Any) -> Any:
        CountingTransport.kept += len(used)
        return super()._start(generation, agreed, used, *rest)

    def begin_collective(self, roster: str, tensor: Tensor, root: int | None = None) -> Any:
        CountingTransport.collectives.append((roster, root))
        return super().begin_collective(roster, tensor, root)


def imitated(options: CommunicationOptions, rank: int, device: torch.device) -> Transport:
    """The counterpart of ``transport_for``."""
    fake = CountingTransport.devices[rank] = FakeDevice(SocketNetwork(), threaded=True)
    return CountingTransport(rank, device, fake, fake, f"device {rank}", options.standby_connections)


stage_layers.transport_for = imitated


class Wide(Regression):
    """Two wide stages; a worker ends the run if its payloads went another way."""

    def configure_pipeline(self) -> list[Any]:
        torch.manual_seed(0)
        return [nn.Linear(8, 16), nn.Linear(16, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)]

    def on_train_end(self) -> None:
        assert CountingTransport.sent > 0
        if sum(parameter.nbytes for parameter in self.parameters()) > 1e6:  # less is summed without any library
            assert any(roster.startswith("stage") for roster, _ in CountingTransport.collectives)


class Prepared(Wide):
    """A worker ends the run if a failure has found nothing prepared."""

    def on_train_end(self) -> None:
        super().on_train_end()
        assert CountingTransport.kept > 0


class Joined(Wide):
    """A replacement ends the run if its state has not come from device to device."""

    def on_train_end(self) -> None:
        if any(parameter.nbytes > 100_000 for parameter in self.parameters()):  # less goes by Gloo
            assert self.trainer.strategy.incarnation == 0 or CountingTransport.states > 0


class Sticky(Wide):
    """A wide model in which the device of worker ``rank`` is lost in the step ``step``."""

    def __init__(self, rank: int, step: int) -> None:
        super().__init__()
        self.rank, self.step = rank, step

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.step and self.rank in CountingTransport.devices:
            CountingTransport.devices[self.rank].is_lost = True


class WideTied(Regression):
    """The first and the last stage share a wide weight."""

    def configure_pipeline(self) -> list[Any]:
        torch.manual_seed(0)
        encode = Encode(WIDTH, 8, 30)
        return [encode, nn.Tanh(), nn.Tanh(), Decode(encode)]

    def on_train_end(self) -> None:
        roots = {root for roster, root in CountingTransport.collectives if roster.startswith("tie-")}
        assert roots == {None}, "one sum over the workers of both stages"


class WideShared(Wide):
    """A wide layer that both stages come to share; a worker ends the run if its gradient was summed otherwise."""

    def on_train_end(self) -> None:
        super().on_train_end()
        assert ("tie-0-1", None) in CountingTransport.collectives
