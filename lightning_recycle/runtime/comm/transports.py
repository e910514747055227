"""Options of the communication, and transports from device to device.

Headers, shapes, tags and waiting are Gloo's, on every device. A payload, tensors too large for their header, goes by
Gloo, or by the transport between workers that it *carries* payloads for; sums and broadcasts of groups if it *takes*
them.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from torch import Tensor

from lightning_recycle.arguments import is_number
from lightning_recycle.option_table import BOOLEAN, Check, OptionGroup, choice, option, suggests_options
from lightning_recycle.runtime.comm.groups import Group, GroupPlan, Rendezvous
from lightning_recycle.runtime.comm.wire import Channel, ValueLayout

PACKED_BYTES = 4 * 1024 * 1024
"""Above this, copying into one message costs more than a second message."""

_BUCKET_CAP_MB = 25.0  # as in DistributedDataParallel
_IS_MIB = Check(
    lambda value: value is None or is_number(value, 0.0, above=True),
    "give a number of MiB, more than 0, or None for 25",
)


@suggests_options
@dataclass(frozen=True)
class CommunicationOptions(OptionGroup):
    """How activations and gradients travel.

    Args:
        transport: what carries activations and gradients between stages, and sums gradients within them: "gloo", by way
            of the processors' memory, or "nccl", which is experimental: from device to device, where every worker has a
            CUDA device of its own. It is tried before anything depends on it, and Gloo is used where it fails. NCCL has
            been tried with an imitation only, not with devices.
        bucket_cap_mb: as in ``DistributedDataParallel``: the gradients of a stage are summed over its workers in
            buckets of at most so many MiB (a larger gradient is one of its own), each as soon as the last backward of a
            step has completed it, while the rest is computed. None for 25.
        standby_connections: whether NCCL's communicators that the next failure will need are begun in the background
            while all goes well, so that connecting again need not wait for them. They take memory of the device.

    Raises:
        ConfigurationError: for values that cannot work.
    """

    transport: Literal["gloo", "nccl"] = option("gloo", choice("gloo", "nccl"))
    bucket_cap_mb: float | None = option(None, _IS_MIB)
    standby_connections: bool = option(True, BOOLEAN)

    @property
    def bucket_bytes(self) -> float:
        """The most bytes of a bucket of gradients."""
        return (_BUCKET_CAP_MB if self.bucket_cap_mb is None else self.bucket_cap_mb) * 2**20


Rosters: TypeAlias = Mapping[str, tuple[int, ...]]
"""The ranks of the members of groups, in order, by the groups' names."""


class Transport:
    """A transport that carries nothing; an abort ends all waits within milliseconds.

    :meth:`connect` is called in a thread that may be left behind, :meth:`abort` in any; other methods in the thread
    that exchanges messages. ``connect_seconds``: limit of :meth:`connect` without progress.
    """

    connect_seconds = 0.0

    @property
    def in_one_order(self) -> bool:
        """Whether a collective waits for earlier ones of other groups."""
        return False

    def plans(self, ranks: tuple[int, ...], rosters: Rosters) -> Sequence[GroupPlan]:
        """Connections needed beside Gloo's, to reach ``ranks`` and ``rosters``."""
        return ()

    def connect(
        self,
        generation: int,
        rosters: Rosters,
        groups: Mapping[str, Group],
        rendezvous: Rendezvous,
        cancelled: threading.Event,
    ) -> None:
        """Connects with the workers of ``groups`` (:meth:`plans`), until ``cancelled``."""

    def packed_bytes(self, peer: int) -> int:
        """Largest value that travels to and from ``peer`` packed behind its header."""
        return PACKED_BYTES

    def carries(self, peer: int) -> bool:
        """Whether it carries payloads to and from ``peer``; the same on both sides."""
        return False

    def send(
        self, channel: Channel, layout: ValueLayout, tensors: Sequence[Tensor], destination: int, tag: int
    ) -> None:
        raise NotImplementedError

    def receive(self, channel: Channel, layout: ValueLayout, source: int, tag: int) -> list[Tensor | None]:
        """Waits for the tensors of a value whose header has come."""
        raise NotImplementedError

    def takes(self, roster: str, tensor: Tensor) -> bool:
        """Whether it does collectives of ``tensor`` in a group; the same on all members."""
        return False

    def begin_collective(self, roster: str, tensor: Tensor, root: int | None = None) -> Any:
        """Begins to replace ``tensor`` by its sum over a group, or by rank ``root``'s.

        All members begin the same ones in the same order, across groups in orders that agree. Until
        :meth:`end_collective`, or the end of the generation, the contiguous ``tensor`` must not be touched.
        """
        raise NotImplementedError

    def end_collective(self, begun: Any) -> None:
        raise NotImplementedError

    def prepare(self) -> None:
        """Begins the next generation's connections in the background; called once in each."""

    def abort(self) -> None:
        """Called once ``cancelled`` is set; the owner of the sockets cuts them."""

    def close(self) -> None:
        """Drops all of the ended generation that the next one cannot use."""

    def end(self) -> None:
        """Drops everything; there is no next generation."""
