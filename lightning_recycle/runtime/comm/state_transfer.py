"""Transfers of any object between workers, as a pickle and tensors beside it.

Large tensors of a device go from device to device where the transport can do that; they all arrive on the CPU, a part
after the other, so neither side needs room for them on its device.

Concept: the bytes of all tensors, one after another, travel in parts. Several are under way at a time, so
neither a part nor a tensor waits until the one before has been acknowledged. Both sides add up each part while others
are under way, and the sums follow at the end.

Contract: the receiver knows how many bytes come next, from what has come before or by itself. What arrives otherwise
than it was sent is an error at :meth:`ByteReceiver.end`; a use of some of it before that has a sum of its own.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_recycle.runtime.comm.communicator import Communicator
from lightning_recycle.runtime.comm.stage_messages import EXCHANGE_TAG, SMALL_BYTES
from lightning_recycle.runtime.comm.transports import TAGS, Channel, receive_all, send_all
from lightning_recycle.runtime.comm.wire import Layout, sum_of_bytes, sum_of_tensors
from lightning_recycle.tensor_memory import memory_of, put_together, take_apart

__all__ = ["PARTS_AT_ONCE", "ByteReceiver", "ByteSender", "receive_object", "send_object"]

PARTS_AT_ONCE = 16
"""Parts of a transfer that may be under way between two workers."""

_TRANSFER_TAG = (EXCHANGE_TAG + 1) * TAGS
_PART_BYTES = 8 * 1024 * 1024  # on a network of 100 Mbit/s less than a second
_CARRIED_BYTES = 32 * 1024 * 1024  # from device to device, where each part costs notes to and fro
_BYTES_AT_ONCE = 64 * 1024 * 1024  # a device's go through as much of the host's memory


def send_object(communicator: Communicator, value: Any, destination: int) -> None:
    """Sends ``value`` to rank ``destination``; returns when it has arrived.

    Raises:
        CommunicationError: if the generation is aborted.
    """
    # Parameters are pickled whole: they arrive as what they are.
    skeleton, tensors = take_apart(value, lambda tensor: type(tensor) is Tensor and tensor.layout is torch.strided)
    exchange = _Parts(communicator)
    carried = [exchange.carries(tensor, destination) for tensor in tensors]
    layouts = [(t.dtype, tuple(t.shape), by_device) for t, by_device in zip(tensors, carried, strict=True)]
    head = torch.frombuffer(bytearray(pickle.dumps((skeleton, layouts))), dtype=torch.uint8)
    stream = ByteSender(communicator, destination)
    stream.put(torch.tensor([len(head), ~len(head), sum_of_tensors([head])], dtype=torch.int64))
    stream.put(head)
    for tensor, by_device in zip(tensors, carried, strict=True):
        stream.put(tensor, by_device)
    stream.end()


def receive_object(communicator: Communicator, source: int) -> Any:
    """Receives an object that rank ``source`` sends with :func:`send_object`; tensors arrive on the CPU.

    Raises:
        CommunicationError: if the generation is aborted, or something arrives otherwise than it was sent.
    """
    stream = ByteReceiver(communicator, source)
    size = torch.empty(3, dtype=torch.int64)
    stream.take(size)
    stream.wait()
    length, inverted, total = size.tolist()
    if length != ~inverted:
        raise communicator.messages.damaged(source)
    head = torch.empty(length, dtype=torch.uint8)
    stream.take(head)
    stream.wait()
    if sum_of_tensors([head]) != total:
        raise communicator.messages.damaged(source)
    skeleton, layouts = pickle.loads(head.numpy().tobytes())
    tensors = []
    for dtype, shape, by_device in layouts:
        tensors.append(torch.empty(shape, dtype=dtype))
        stream.take(tensors[-1], by_device)
    stream.end()
    return put_together(skeleton, tensors)


class ByteSender:
    """Sends bytes to rank ``destination``."""

    def __init__(self, communicator: Communicator, destination: int) -> None:
        self._exchange, self._destination = _Parts(communicator), destination
        self._under_way: deque[tuple[int, Any]] = deque()
        self._sums: list[int] = []

    def put(self, tensor: Tensor, carried: bool = False) -> None:
        """Begins to send the bytes of ``tensor``, which must not change until :meth:`end`; ``carried``: from device to
        device, which the other side must know.

        Raises:
            CommunicationError: if the generation is aborted.
        """
        for part in _parts(tensor.detach().resolve_conj().resolve_neg().contiguous(), carried):
            while self._under_way and (
                len(self._under_way) == PARTS_AT_ONCE or self._bytes + part.nbytes > _BYTES_AT_ONCE
            ):
                self._await_oldest()
            staged, sent = self._exchange.send_part(part, self._destination, len(self._sums), carried)
            self._under_way.append((part.nbytes, sent))
            self._sums.append(_sum(staged, carried))

    def end(self) -> None:
        """Returns when all has arrived."""
        self.put(_trailer(self._sums))
        while self._under_way:
            self._await_oldest()

    @property
    def _bytes(self) -> int:
        return sum(size for size, _ in self._under_way)

    def _await_oldest(self) -> None:
        _, sent = self._under_way.popleft()
        self._exchange.await_arrival(sent)


class ByteReceiver:
    """Receives what rank ``source`` sends by a :class:`ByteSender`."""

    def __init__(self, communicator: Communicator, source: int) -> None:
        self._communicator, self._source = communicator, source
        self._exchange = _Parts(communicator)
        self._posted: deque[tuple[Tensor, int, Any]] = deque()
        self._count = 0
        self._sums: list[int] = []

    def take(self, tensor: Tensor, carried: bool = False) -> None:
        """The next bytes go to ``tensor``, contiguous and on the CPU; they are there after :meth:`wait`.

        Raises:
            CommunicationError: if the generation is aborted.
        """
        for part in _parts(tensor, carried):
            if carried or len(self._posted) == PARTS_AT_ONCE:
                self._await(0 if carried else PARTS_AT_ONCE - 1)
            number, self._count = self._count, self._count + 1
            if carried:
                self._exchange.receive_carried_part(part, self._source, number)
                self._sums.append(_sum(part, carried))
            else:
                self._posted.append((part, number, self._exchange.post_part(part, self._source, number)))

    def wait(self) -> None:
        """Returns when all that was taken is there."""
        self._await(0)

    def end(self) -> None:
        """Returns when all is there as it was sent.

        Raises:
            CommunicationError: if it is not, or the generation is aborted.
        """
        self.wait()
        expected = _trailer(self._sums)
        told = torch.empty_like(expected)
        self.take(told)
        self.wait()
        if not torch.equal(told, expected):
            raise self._communicator.messages.damaged(self._source)

    def _await(self, most: int) -> None:
        """Waits until at most ``most`` parts are under way."""
        while len(self._posted) > most:
            part, number, posted = self._posted.popleft()
            self._exchange.await_part(posted, self._source, number)
            self._sums.append(_sum(part, carried=False))


class _Parts:
    """The parts of transfers that one worker exchanges."""

    def __init__(self, communicator: Communicator) -> None:
        self._connections, self._messages = communicator.connections, communicator.messages

    def carries(self, tensor: Tensor, destination: int) -> bool:
        """Whether ``tensor`` is better sent to rank ``destination`` from device to device."""
        is_here = tensor.device.type == self._connections.device.type
        return is_here and tensor.nbytes > SMALL_BYTES and self._connections.transport.carries(destination)

    def send_part(self, part: Tensor, destination: int, number: int, carried: bool) -> tuple[Tensor, Any]:
        """Starts to send the bytes ``part`` to rank ``destination``, which knows how many there are.

        Args:
            part: contiguous; it must not change until it has arrived.
            destination: who gets it.
            number: of the parts that were sent before in this transfer; of :data:`PARTS_AT_ONCE` parts under way no
                two may have the same one, modulo that.
            carried: whether it goes from device to device; the other side must know that, too.

        Returns:
            What is sent, which is on the host unless it is carried; and what :meth:`await_arrival` waits for.
        """
        tag = _tag_of_part(number)
        with self._connections.translated():
            staged = part if carried else self._connections.memory.staged(part)
            (arrived,) = receive_all(self._connections.channels[Channel.GRADIENTS], [], destination, tag)
            if carried:
                what = Channel.ACTIVATIONS, Layout.of(part), [part], destination, tag // TAGS
                sent = self._connections.transport.send(*what)
            else:
                sent = send_all(self._connections.channels[Channel.ACTIVATIONS], [staged], destination, tag)
        return staged, (arrived, sent)

    def await_arrival(self, under_way: Any) -> None:
        """Waits until what :meth:`send_part` sends has arrived."""
        arrived, _ = under_way  # what it has sent must be kept until here
        with self._connections.translated():
            arrived.wait(self._connections.timeout)
        self._connections.on_progress()

    def post_part(self, part: Tensor, source: int, number: int) -> Any:
        """Posts the receive of ``part``, contiguous and on the CPU, from rank ``source``; ``number`` as there."""
        with self._connections.translated():
            return receive_all(self._connections.channels[Channel.ACTIVATIONS], [part], source, _tag_of_part(number))

    def await_part(self, posted: Any, source: int, number: int) -> None:
        """Waits for a part that was posted."""
        work, end = posted
        with self._connections.translated():
            end.wait(self._connections.timeout)
            work.wait(self._connections.timeout)
            self._acknowledge(source, number)

    def receive_carried_part(self, part: Tensor, source: int, number: int) -> None:
        """Fills ``part``, contiguous and on the CPU, with one that goes from device to device."""
        with self._connections.translated():
            what = Channel.ACTIVATIONS, Layout.of(part), source, _tag_of_part(number) // TAGS
            (found,) = self._connections.transport.receive(*what)
            assert found is not None
            part.copy_(found)
            self._acknowledge(source, number)

    def _acknowledge(self, source: int, number: int) -> None:
        tag = _tag_of_part(number)
        sent = send_all(self._connections.channels[Channel.GRADIENTS], [], source, tag)
        self._messages.keep_until_answered(Channel.GRADIENTS, source, tag, sent)
        self._connections.on_progress()


def _parts(tensor: Tensor, carried: bool) -> Iterator[Tensor]:
    """The memory of a contiguous ``tensor`` in parts, as bytes."""
    if tensor.numel():
        yield from memory_of(tensor).split(_CARRIED_BYTES if carried else _PART_BYTES)


def _sum(part: Tensor, carried: bool) -> int:
    """The sum of the bytes of a part; 0 for those that go from device to device."""
    return 0 if carried else sum_of_bytes(part.numpy())


def _trailer(sums: list[int]) -> Tensor:
    return torch.tensor(sums, dtype=torch.int64)


def _tag_of_part(number: int) -> int:
    return _TRANSFER_TAG + number % PARTS_AT_ONCE * TAGS
