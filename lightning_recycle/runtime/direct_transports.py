"""Transports beside Gloo: from device to device, and plain sockets for small sums.

Headers, shapes, tags and waiting are Gloo's, on every device. A payload, tensors too large for their header, goes by
Gloo, or by the :class:`Transport` between workers that it *carries* payloads for; sums and broadcasts of groups if it
*takes* them.

Gloo adds up around a ring, in twice as many rounds as there are workers, with two thread wake-ups each: four workers on
two cores spent 1.3 ms of processor time each for 66 numbers. In a :class:`SmallAllreduce` every worker sends its part
to all others, in one round in the calling thread, and adds up in the order of the workers: the same bits everywhere.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from lightning_recycle.arguments import BOOLEAN, Check, OptionGroup, choice, is_number, option, suggests_options
from lightning_recycle.runtime.groups import Group, GroupPlan, Rendezvous
from lightning_recycle.runtime.wire import Channel, ValueLayout, sum_of_bytes

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
        transport: what carries activations and gradients: "gloo", through the processors' memory, or "nccl"
            (experimental), from device to device. NCCL needs a CUDA device for every worker. It is tried before
            anything depends on it, and Gloo is used where it fails. NCCL has been tried with an imitation only, not
            with devices.
        bucket_cap_mb: the MiB of a bucket of gradients, as in ``DistributedDataParallel``; None for 25. The gradients
            of a stage are summed over its workers in buckets of at most that size (a larger gradient is one of its
            own), each as soon as the last backward of a step has completed it, while the rest is computed.
        standby_connections: whether NCCL's communicators for the next failure are begun in the background. Connecting
            again need not wait for them then. They take memory of the device.

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
        """Whether payloads to and from ``peer`` go this way; the same on both sides."""
        return False

    def send(
        self, channel: Channel, layout: ValueLayout, tensors: Sequence[Tensor], destination: int, tag: int
    ) -> None:
        raise NotImplementedError

    def receive(self, channel: Channel, layout: ValueLayout, source: int, tag: int) -> list[Tensor | None]:
        """Waits for the tensors of a value whose header has come."""
        raise NotImplementedError

    def takes(self, roster: str, tensor: Tensor) -> bool:
        """Whether collectives of ``tensor`` go this way; the same on all members."""
        return False

    def begin_collective(self, roster: str, tensor: Tensor, root: int | None = None) -> Any:
        """Begins to replace ``tensor`` by its sum over a group, or by rank ``root``'s.

        All members begin the same ones in the same order, across groups in orders that agree. Until
        :meth:`end_collective`, or the end of the generation, the contiguous ``tensor`` must not be touched.
        """
        raise NotImplementedError

    def end_collective(self, handle: Any) -> None:
        raise NotImplementedError

    def prepare(self) -> None:
        """Begins the next generation's connections in the background; called once in each."""

    def abort(self) -> None:
        """Called once ``cancelled`` is set; the owner of the sockets cuts them."""

    def close(self) -> None:
        """Drops all of the ended generation that the next one cannot use."""

    def end(self) -> None:
        """Drops everything; there is no next generation."""


_MOST_BYTES = 256 * 1024  # that a worker sends to all others together; above, Gloo is as fast or faster (measured)
_HEADER = struct.Struct("=QQQ8x")  # number of the sum, bytes that follow, their sum; a multiple of the largest item


class _SumMessages:
    """Buffers for sums of ``numel`` numbers: of this worker, and from each peer."""

    def __init__(self, numel: int, dtype: torch.dtype, rank: int, peers: Mapping[int, socket.socket]) -> None:
        size = _HEADER.size + numel * dtype.itemsize
        messages = {number: torch.empty(size, dtype=torch.uint8) for number in (rank, *peers)}
        self.bytes = {number: message.numpy().data for number, message in messages.items()}
        self.values = {number: message[_HEADER.size :].view(dtype) for number, message in sorted(messages.items())}
        self._data = {number: message[_HEADER.size :].numpy() for number, message in messages.items()}

    def total(self, number: int) -> int:
        """The sum of the bytes of a part, for its header."""
        return sum_of_bytes(self._data[number])


def _move(move: Callable[[socket.socket, memoryview], int], remaining: dict[socket.socket, memoryview]) -> None:
    """Sends or receives what is ``remaining`` by socket, without blocking."""
    for sock, view in list(remaining.items()):
        try:
            moved = move(sock, view)
        except BlockingIOError:
            continue
        if moved == 0:
            raise ConnectionResetError("the other side has ended the connection")
        if moved == len(view):
            del remaining[sock]
        else:
            remaining[sock] = view[moved:]


class SmallAllreduce:
    """The connections of a worker to all others of its stage.

    ``links``: by number, non-blocking; the mesh closes them. ``timeout``: seconds without progress after which a sum
    fails.
    """

    def __init__(self, rank: int, links: Mapping[int, socket.socket], timeout: float) -> None:
        self._rank, self._links, self._timeout = rank, dict(links), timeout
        self._sums = 0
        self._messages_by_size: dict[tuple[int, torch.dtype], _SumMessages] = {}

    def takes(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is small enough; the same on all workers."""
        return tensor.numel() * tensor.element_size() * len(self._links) <= _MOST_BYTES

    def sum(self, tensor: Tensor) -> None:
        """Overwrites ``tensor``, contiguous and on the CPU, with the sum over all workers.

        Raises OSError if a connection ends, nothing moves for too long, or a peer sums something else.
        """
        key = (tensor.numel(), tensor.dtype)
        messages = self._messages_by_size.get(key)
        if messages is None:
            messages = self._messages_by_size[key] = _SumMessages(*key, self._rank, self._links)
        expected = self._sums, tensor.numel() * tensor.element_size()
        self._sums += 1
        messages.values[self._rank].copy_(tensor.view(-1))
        _HEADER.pack_into(messages.bytes[self._rank], 0, *expected, messages.total(self._rank))
        self._exchange(messages)
        for peer in self._links:
            number, size, total = _HEADER.unpack_from(messages.bytes[peer])
            if (number, size) != expected:
                raise ConnectionError(f"sum {number} of {size} bytes came for {expected}")
            if total != messages.total(peer):
                raise ConnectionError(f"the part of worker {peer} is damaged: other bits arrived than were sent")
        first, second, *others = messages.values.values()
        total = torch.add(first, second)
        for other in others:
            total.add_(other)
        tensor.view(-1).copy_(total)

    def _exchange(self, parts: _SumMessages) -> None:
        sends = dict.fromkeys(self._links.values(), parts.bytes[self._rank])
        receives = {sock: parts.bytes[peer] for peer, sock in self._links.items()}
        while True:
            _move(socket.socket.send, sends)
            _move(socket.socket.recv_into, receives)
            if not sends and not receives:
                return
            self._await(sends, receives)

    def _await(self, sends: Collection[socket.socket], receives: Collection[socket.socket]) -> None:
        """Returns when bytes can be moved, or a connection has ended.

        With nothing left to send, it waits for one part at a time: a wake-up for each costs more than it helps.
        """
        awaited = receives if sends else list(receives)[:1]
        poll = select.poll()
        for sock in {*sends, *receives}:
            reads = select.POLLIN if sock in awaited else 0
            writes = select.POLLOUT if sock in sends else 0
            poll.register(sock, reads | writes | (select.POLLRDHUP if sock in receives else 0))
        if not poll.poll(1e3 * self._timeout):
            raise TimeoutError(f"no part of a sum has moved for {self._timeout:g} s")

    def close(self) -> None:
        for sock in self._links.values():
            sock.close()
