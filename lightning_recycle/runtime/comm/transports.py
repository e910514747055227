"""Transports of payloads: tensors that are too large for their header.

Concept: headers, shapes, tags and waiting are Gloo's, on every device. A payload is announced by its header, and then
goes by the transport. :class:`Transport` sends one message per tensor, by way of the processor's memory;
:class:`~lightning_recycle.runtime.nccl.nccl_transport.NcclTransport` goes from device to device, and so do the sums and
broadcasts of groups that it says it takes.

Contract: :meth:`Transport.connect` is called in a thread that may be left behind, :meth:`Transport.abort` in any. After
an abort all waits end with an exception within milliseconds. Other methods are called by the thread that exchanges
messages.

A device copies to and from *pinned* memory of the host by itself, and to other memory by way of a small buffer of its
driver. To pin memory takes long, so torch keeps what is no longer used for the next time, once the device is done with
it (:class:`HostMemory`). On a CPU all of this is ordinary memory. Not tried with a device: see docs/gpu.md.

Must not know: schedules, and what a payload is for.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from lightning_recycle.arguments import is_number
from lightning_recycle.devices import is_accelerator
from lightning_recycle.option_table import BOOLEAN, Check, OptionGroup, choice, option, suggests_options
from lightning_recycle.runtime.comm.groups import CommunicationError, Group, GroupPlan, Rendezvous
from lightning_recycle.runtime.comm.wire import MAX_TENSORS, ValueLayout

TAGS = MAX_TENSORS + 3  # Gloo's tags per tag of a value: the message, its tensors, and the end of either
_PAYLOAD = 2  # the first of them that payloads use
_PACKED_BYTES = 4 * 1024 * 1024  # above this, copying into one message costs more than a second message
_NOTHING = torch.empty(0, dtype=torch.uint8)  # an empty message

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


class Channel(Enum):
    """The directions between stages: activations one way, gradients the other."""

    ACTIVATIONS = "activations"
    GRADIENTS = "gradients"


Rosters: TypeAlias = Mapping[str, tuple[int, ...]]
"""The ranks of the members of groups, in order, by the groups' names."""


class Transport:
    """Carries the payloads of one worker as messages of Gloo, generation after generation.

    Attributes:
        connect_seconds: how long :meth:`connect` may take without anybody being able to tell what it waits for.
    """

    connect_seconds = 0.0

    def __init__(self, timeout: timedelta, memory: HostMemory) -> None:
        self._timeout, self._memory = timeout, memory
        self._lock = threading.Lock()
        self._groups: dict[Channel, Group] = {}

    @property
    def in_one_order(self) -> bool:
        """Whether a collective of one group waits for those of other groups that were begun before."""
        return False

    def plans(self, ranks: tuple[int, ...], rosters: Rosters) -> Sequence[GroupPlan]:
        """The connections that it needs to exchange payloads with ``ranks``, and for the collectives of ``rosters``,
        besides the groups of the channels and those that Gloo has for these.
        """
        return ()

    def connect(
        self,
        generation: int,
        rosters: Rosters,
        groups: Mapping[str, Group],
        rendezvous: Rendezvous,
        cancelled: threading.Event,
    ) -> None:
        """Connects with the workers that ``groups`` lead to, until ``cancelled`` is set; that ends everything later.

        Args:
            groups: created as :meth:`plans` asks, with those of the channels.

        Raises:
            CommunicationError: if it is set: the next generation may be connected by now, and stays so.
        """
        with self._lock:
            if cancelled.is_set():
                raise CommunicationError(f"Generation {generation} was aborted.")
            self._groups = {channel: groups.get(channel.value, Group()) for channel in Channel}

    def packed_bytes(self, peer: int) -> int:
        """Up to which size a value travels packed behind its header, to and from worker ``peer``."""
        return _PACKED_BYTES

    def carries(self, peer: int) -> bool:
        """Whether payloads to and from worker ``peer`` go from device to device; the same on both sides."""
        return False

    def send(
        self, channel: Channel, layout: ValueLayout, tensors: Sequence[Tensor], destination: int, tag: int
    ) -> list[tuple[Any, Tensor]]:
        """Starts to send ``tensors``. What it returns must be kept until they have arrived."""
        staged = [self._memory.staged(tensor).contiguous() for tensor in tensors]
        return send_all(self._groups[channel], staged, destination, tag * TAGS + _PAYLOAD)

    def receive(self, channel: Channel, layout: ValueLayout, source: int, tag: int) -> list[Tensor | None]:
        """Waits for the tensors of a value whose header has come."""
        tensors = layout.empty(self._memory.empty)
        full = [t for t in tensors if t is not None]
        *works, end = receive_all(self._groups[channel], full, source, tag * TAGS + _PAYLOAD)
        end.wait(self._timeout)
        for work in works:
            work.wait(self._timeout)
        return tensors

    def takes(self, roster: str, tensor: Tensor) -> bool:
        """Whether collectives of ``tensor`` in a group go by this transport, and not by Gloo's; the same on all
        members.
        """
        return False

    def begin_collective(self, roster: str, tensor: Tensor, root: int | None = None) -> Any:
        """Begins to replace the contiguous ``tensor`` by its sum over a group, or by that of rank ``root``. All members
        begin the same ones in the same order, and those of several groups in orders that agree.

        Until :meth:`end_collective`, or the end of the generation, ``tensor`` must not be touched.
        """
        raise NotImplementedError

    def end_collective(self, begun: Any) -> None:
        """Waits for what :meth:`begin_collective` has returned."""
        raise NotImplementedError

    def prepare(self) -> None:
        """The generation goes well: begins in the background what the next one will need. Called once in it."""

    def abort(self) -> None:
        """Called once ``cancelled`` is set; the sockets are cut by the connections that they belong to."""

    def close(self) -> None:
        """Drops everything of the generation, which is over, but what the next one can use."""
        self._groups = {}

    def end(self) -> None:
        """Drops everything; there is no next generation."""
        self.close()


def send_all(group: Group, tensors: Sequence[Tensor], destination: int, base: int) -> list[tuple[Any, Tensor]]:
    """Starts to send ``tensors`` and an empty message as one, under the tags from ``base`` on."""
    send, rank = group.process_group.send, group.places[destination]
    return [(send([t], rank, base + part), t) for part, t in enumerate([*tensors, _NOTHING])]


def receive_all(group: Group, tensors: Sequence[Tensor], source: int, base: int) -> list[Any]:
    """The counterpart of :func:`send_all`; the last must be waited for first."""
    receive, rank = group.process_group.recv, group.places[source]
    return [receive([t], rank, base + part) for part, t in enumerate([*tensors, _NOTHING])]


class HostMemory:
    """Memory of the host, for the exchange of tensors of ``device``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def empty(self, shape: Sequence[int], dtype: torch.dtype = torch.uint8) -> Tensor:
        """A new, uninitialised tensor of the host."""
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=is_accelerator(self._device))

    def staged(self, tensor: Tensor) -> Tensor:
        """``tensor`` if it is on the host, else a contiguous copy of it there, which is complete."""
        if tensor.device.type == "cpu":
            return tensor
        copy = self.empty(tensor.shape, tensor.dtype)
        copy.copy_(tensor)
        return copy

    def on_device(self, tensor: Tensor, is_reused: bool) -> Tensor:
        """A copy of ``tensor`` on the device, or itself on a CPU.

        Args:
            is_reused: whether its memory is written again. If not, the copy need not be complete: torch keeps the
                memory until it is.
        """
        return tensor.to(self._device, non_blocking=not is_reused)
