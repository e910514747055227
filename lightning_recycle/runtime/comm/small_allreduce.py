"""Sums of small tensors over plain connections between peers.

Gloo adds up around a ring, in twice as many rounds as there are workers, with two thread wake-ups each: four workers on
two cores spent 1.3 ms of processor time each for 66 numbers. Here every worker sends its part to all others, in one
round in the calling thread, and adds up in the order of the workers: the same bits everywhere. Each part has the number
of its sum, its length and a sum of its bytes (:mod:`~lightning_recycle.runtime.comm.wire`).
"""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_recycle.runtime.comm.wire import sum_of_bytes

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


@dataclass(eq=False)
class _Transfer:
    """Bytes left to be sent to, or received from, another worker."""

    move: Callable[[memoryview], int]
    left: memoryview

    def proceed(self) -> bool:
        """Moves bytes without blocking; returns whether nothing is left."""
        try:
            moved = self.move(self.left)
        except BlockingIOError:
            return False
        if moved == 0:
            raise ConnectionResetError("the other side has ended the connection")
        self.left = self.left[moved:]
        return not self.left


class SmallAllreduce:
    """The connections of a worker to all others of its stage.

    ``links``: by number, non-blocking; the mesh closes them. ``timeout``: seconds without progress after which a sum
    fails.
    """

    def __init__(self, rank: int, links: Mapping[int, socket.socket], timeout: float) -> None:
        self._rank, self._links, self._timeout = rank, dict(links), timeout
        self._sums = 0
        self._parts: dict[tuple[int, torch.dtype], _SumMessages] = {}

    def takes(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is small enough; the same on all workers."""
        return tensor.numel() * tensor.element_size() * len(self._links) <= _MOST_BYTES

    def sum(self, tensor: Tensor) -> None:
        """Overwrites ``tensor``, contiguous and on the CPU, with the sum over all workers.

        Raises OSError if a connection ends, nothing moves for too long, or a peer sums something else.
        """
        key = (tensor.numel(), tensor.dtype)
        parts = self._parts.get(key)
        if parts is None:
            parts = self._parts[key] = _SumMessages(*key, self._rank, self._links)
        expected = self._sums, tensor.numel() * tensor.element_size()
        self._sums += 1
        parts.values[self._rank].copy_(tensor.view(-1))
        _HEADER.pack_into(parts.bytes[self._rank], 0, *expected, parts.total(self._rank))
        self._exchange(parts)
        for peer in self._links:
            number, size, total = _HEADER.unpack_from(parts.bytes[peer])
            if (number, size) != expected:
                raise ConnectionError(f"sum {number} of {size} bytes came for {expected}")
            if total != parts.total(peer):
                raise ConnectionError(f"the part of worker {peer} is damaged: other bits arrived than were sent")
        first, second, *others = parts.values.values()
        total = torch.add(first, second)
        for other in others:
            total.add_(other)
        tensor.view(-1).copy_(total)

    def _exchange(self, parts: _SumMessages) -> None:
        mine = parts.bytes[self._rank]
        sends = {sock: _Transfer(sock.send, mine) for sock in self._links.values()}
        receives = {sock: _Transfer(sock.recv_into, parts.bytes[peer]) for peer, sock in self._links.items()}
        while True:
            for transfers in (sends, receives):
                for sock, transfer in list(transfers.items()):
                    if transfer.proceed():
                        del transfers[sock]
            if not sends and not receives:
                return
            self._await(sends, receives)

    def _await(self, sends: Mapping[socket.socket, _Transfer], receives: Mapping[socket.socket, _Transfer]) -> None:
        """Returns when bytes can be moved, or a connection has ended.

        With nothing left to send, it waits for one part at a time: a wake-up for each costs more than it helps.
        """
        awaited = receives.keys() if sends else list(receives)[:1]
        poll = select.poll()
        for sock in sends.keys() | receives.keys():
            reads = select.POLLIN if sock in awaited else 0
            writes = select.POLLOUT if sock in sends else 0
            poll.register(sock, reads | writes | (select.POLLRDHUP if sock in receives else 0))
        if not poll.poll(1e3 * self._timeout):
            raise TimeoutError(f"no part of a sum has moved for {self._timeout:g} s")

    def close(self) -> None:
        for sock in self._links.values():
            sock.close()
