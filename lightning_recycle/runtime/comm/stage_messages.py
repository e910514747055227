"""Values between stages: tensors with a header, whose receives are posted ahead.

A value travels as one message with a header, packed, if it fits into the receiver's posted buffer; else the header
announces its tensors as a payload, which a transport carries (:mod:`~lightning_recycle.runtime.comm.transports`). Gloo
accepts messages shorter than the buffer (measured), so receives are posted ahead without knowing the shape, and shapes
may change from micro-batch to micro-batch. Both sides size the buffer of a tag by its last message in the generation,
so with steady shapes every value is one message, unless the transport is faster.

When sockets are shut down, Gloo fails what is *pending*, but forgets what is *under way*: a receive whose payload has
begun to arrive, and a send that is not completely written, keep waiting until their timeout (``Pair::signalException``
in its ``transport/tcp/pair.cc`` passes over ``rx_`` and the unbound buffers of ``tx_``; the death of a peer in the
middle of a message does the same). Therefore

- every message is followed by an empty one, for which the receiver waits: without a payload it stays pending until it
  arrives, and a connection keeps the order;
- nothing waits for a send. What was sent is released when a message that came back shows that it has arrived.

A receive without its own timeout uses the one its group was created with, not one set later.

What arrives otherwise than it was sent (:mod:`~lightning_recycle.runtime.comm.wire`) ends the attempt at a step, as a
broken connection does, and the next one sends it again; if that fails, too, the sender counts as unreachable.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from lightning_recycle.runtime.comm.connections import Connections
from lightning_recycle.runtime.comm.groups import CommunicationError, UnreachableError
from lightning_recycle.runtime.comm.transports import TAGS, Channel, HostMemory, receive_all, send_all
from lightning_recycle.runtime.comm.wire import (
    HEADER_BYTES,
    LAYOUT_BYTES,
    Value,
    ValueLayout,
    sum_of_bytes,
    sum_of_tensors,
)

SMALL_BYTES = 64 * 1024
"""Posted for a tag before its first message."""

EXCHANGE_TAG = 1 << 24
"""Beyond any micro-batch; Gloo's tags have 32 bits."""

_OTHER = {Channel.ACTIVATIONS: Channel.GRADIENTS, Channel.GRADIENTS: Channel.ACTIVATIONS}


_Key: TypeAlias = tuple[Channel, int, int]
"""(channel, rank of the peer, tag)."""


class _Outbox:
    """A prepared message that carries a layout: with steady shapes, only the tensors need to be copied into it."""

    def __init__(self, layout: ValueLayout, packed: bool, packs_next: bool, memory: HostMemory) -> None:
        self.layout, self.packed, self.packs_next = layout, packed, packs_next
        self.message = memory.empty((layout.packed_bytes if packed else HEADER_BYTES,))
        self._bytes = self.message.numpy()
        self._bytes[:LAYOUT_BYTES] = np.frombuffer(layout.header(packed), dtype=np.uint8)
        self._sums = self._bytes[LAYOUT_BYTES:HEADER_BYTES].view(np.int64)
        self._sums[0] = sum_of_bytes(self._bytes[:LAYOUT_BYTES])
        self.views = layout.views(self.message) if packed else []

    def add_sum(self, tensors: Sequence[Tensor | None]) -> None:
        """The message has its tensors, or will be followed by ``tensors``."""
        self._sums[1] = sum_of_bytes(self._bytes[HEADER_BYTES:]) if self.packed else sum_of_tensors(tensors)


class _Inbox:
    """The buffer posted for a tag, and the layout of its last message."""

    def __init__(self, capacity: int, memory: HostMemory) -> None:
        self.message = memory.empty((capacity,))
        self._bytes = self.message.numpy()
        self._sums = self._bytes[LAYOUT_BYTES:HEADER_BYTES].view(np.int64)
        self._header = b""
        self.layout: ValueLayout | None = None
        self.next_capacity = capacity
        self.packed = False
        self.views: list[Tensor | None] = []

    def read_header(self, capacity: Callable[[ValueLayout], int]) -> bool:
        """Whether the header arrived as it was sent; ``capacity``: of the buffer after a message of a layout."""
        header = self._bytes[:LAYOUT_BYTES].tobytes()
        if header != self._header:
            if sum_of_bytes(self._bytes[:LAYOUT_BYTES]) != self._sums[0]:
                return False
            self._header = header
            self.layout, self.packed = ValueLayout.parse(header)
            self.next_capacity = capacity(self.layout)
            self.views = self.layout.views(self.message) if self.packed else []
        return True

    def is_whole(self, tensors: Sequence[Tensor | None]) -> bool:
        """Whether the tensors, in the message or after it, arrived as they were sent."""
        assert self.layout is not None
        if not self.packed:
            return int(self._sums[1]) in (0, sum_of_tensors(tensors))
        return int(self._sums[1]) == sum_of_bytes(self._bytes[HEADER_BYTES : self.layout.packed_bytes])


@dataclass(eq=False)
class Incoming:
    """A posted receive; ``note``: what the sender has noted beside the value, once that is received."""

    key: _Key
    inbox: _Inbox
    work: Any
    end: Any
    note: bytes = b""


class StageMessages:
    """The values that one worker exchanges with others.

    Attributes:
        alter_next: what it makes of the tensors of the next value is sent instead of them, as if they had changed on
            their way, for fault injection; None for none.
    """

    def __init__(self, connections: Connections) -> None:
        self.alter_next: Callable[[Any], Any] | None = None
        self._connections = connections
        # What must stay alive until it has arrived, of this step and the previous one.
        self._sent: dict[_Key, list[tuple[Any, Tensor]]] = {}
        self._sent_before: dict[_Key, list[tuple[Any, Tensor]]] = {}
        self._inboxes: dict[_Key, _Inbox] = {}
        self._outboxes: dict[_Key, _Outbox] = {}
        self._damagers: set[int] = set()  # ranks of which a message has been damaged in this step

    def begin_generation(self) -> None:
        """Forgets the messages of the generation before."""
        self._inboxes.clear()
        self._outboxes.clear()
        self._sent, self._sent_before = {}, {}

    def post_receive(self, channel: Channel, source: int, tag: int) -> Incoming:
        """Posts the receive of a value from rank ``source``; several may be open, told apart by ``tag``.

        The buffer of (channel, source, tag) is reused: what was received into it must no longer be needed.
        """
        key = (channel, source, tag)
        inbox = self._inboxes.get(key)
        capacity = SMALL_BYTES if inbox is None else inbox.next_capacity
        if inbox is None or inbox.message.nbytes != capacity:
            inbox = self._inboxes[key] = _Inbox(capacity, self._connections.memory)
        with self._connections.translated:
            work, end = receive_all(self._connections.channels[channel], [inbox.message], source, tag * TAGS)
        return Incoming(key, inbox, work, end)

    def receive(self, incoming: Incoming, to_device: bool = True) -> Value:
        """Waits for a posted value. It may share memory with the posted buffer: see :meth:`post_receive`.

        Args:
            to_device: whether tensors that come by way of the host are moved to the device.
        """
        inbox = incoming.inbox
        channel, source, tag = incoming.key
        with self._connections.translated:
            incoming.end.wait(self._connections.timeout)
            incoming.work.wait(self._connections.timeout)
            is_right, tensors = inbox.read_header(lambda layout: self._capacity(layout, source)), inbox.views
            if is_right and inbox.layout is not None and not inbox.packed:
                tensors = self._connections.transport.receive(channel, inbox.layout, source, tag)
        if inbox.layout is None or not is_right or not inbox.is_whole(tensors):
            raise self.damaged(source)
        # It was sent after this worker's message under that tag in the other direction had arrived.
        answered = (_OTHER[channel], source, tag)
        self._sent.pop(answered, None)
        self._sent_before.pop(answered, None)
        if to_device and self._connections.device.type != "cpu":
            is_reused = inbox.packed
            tensors = [None if t is None else self._connections.memory.on_device(t, is_reused) for t in tensors]
        incoming.note = inbox.layout.note(tensors)
        value: Value = inbox.layout.value(tensors)
        return value

    def send(self, channel: Channel, value: Value, destination: int, tag: int, note: bytes = b"") -> None:
        """Starts to send ``value``, and a note for the receiver, to rank ``destination``; its tensors must not change.

        The previous message under (channel, destination, tag) must have arrived: in a schedule the next one depends
        on what was computed from it.
        """
        key = (channel, destination, tag)
        device = self._connections.device
        bits = torch.frombuffer(bytearray(note), dtype=torch.uint8).to(device) if note else None
        layout = ValueLayout.of(value, bits)
        outbox = self._outboxes.get(key)
        if outbox is None or outbox.layout != layout or outbox.packed != outbox.packs_next:
            size, capacity = layout.packed_bytes, self._capacity(layout, destination)
            before = SMALL_BYTES if outbox is None else self._capacity(outbox.layout, destination)
            outbox = _Outbox(layout, size <= before, size <= capacity, self._connections.memory)
            self._outboxes[key] = outbox
        packed = outbox.packed
        tensors: Sequence[Tensor | None] = value if isinstance(value, tuple) else (value,)
        tensors = tensors if bits is None else (*tensors, bits)
        if packed:
            for view, tensor in zip(outbox.views, tensors, strict=True):
                if view is not None and tensor is not None:
                    view.copy_(tensor.detach())
        outbox.add_sum(tensors)
        if self.alter_next is not None:
            tensors = self._altered(outbox, tensors)
        with self._connections.translated:
            group = self._connections.channels[channel]
            sent = send_all(group, [outbox.message], destination, tag * TAGS)
            if not packed:
                payload = [tensor.detach() for tensor in tensors if tensor is not None]
                sent += self._connections.transport.send(channel, layout, payload, destination, tag)
        self._sent[key] = sent
        self._sent_before.pop(key, None)

    def _altered(self, outbox: _Outbox, tensors: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """The tensors that are sent instead of ``tensors``, as if those had changed on their way."""
        assert self.alter_next is not None
        altered: tuple[Tensor | None, ...] = self.alter_next(tuple(tensors))
        self.alter_next = None
        for view, tensor in zip(outbox.views, altered, strict=False):
            if view is not None and tensor is not None:
                view.copy_(tensor.detach())
        return altered

    def damaged(self, source: int) -> CommunicationError:
        """The error of a message from rank ``source`` that is not what was sent: it is sent again in the next attempt
        at the step, and if that fails, too, there is no connection.
        """
        if source in self._damagers:
            return UnreachableError((source,))
        self._damagers.add(source)
        return CommunicationError(f"A message of rank {source} is damaged: other bits arrived than were sent.")

    def buffers(self) -> list[Tensor]:
        """The buffers that stay from step to step; received values may share their memory."""
        return [box.message for boxes in (self._inboxes, self._outboxes) for box in boxes.values()]

    def end_step(self) -> None:
        """Releases what was sent before the last call: all participants of a step received it before they proceeded."""
        self._sent_before, self._sent = self._sent, {}
        self._damagers.clear()
        self._connections.prepare_next()

    def _capacity(self, last: ValueLayout, peer: int) -> int:
        """Size of the buffer for a tag whose last message had this layout; sender and receiver agree on it."""
        return min(max(last.packed_bytes, SMALL_BYTES), self._connections.transport.packed_bytes(peer))

    def exchange(self, peer: int, size: int, initiate: bool) -> None:
        """Sends ``size`` bytes to rank ``peer`` and waits until they come back, or sends them back."""
        if initiate:
            self.send(Channel.ACTIVATIONS, torch.empty(size, dtype=torch.uint8), peer, EXCHANGE_TAG)
            self.receive(self.post_receive(Channel.GRADIENTS, peer, EXCHANGE_TAG))
        else:
            value = self.receive(self.post_receive(Channel.ACTIVATIONS, peer, EXCHANGE_TAG))
            self.send(Channel.GRADIENTS, value, peer, EXCHANGE_TAG)

    def release_buffers(self, peer: int, tags: Collection[int]) -> None:
        """Forgets the buffers for ``tags`` to and from rank ``peer``, which does the same; all has arrived."""
        for boxes in (self._inboxes, self._outboxes):
            for key in [key for key in boxes if key[1] == peer and key[2] in tags]:
                del boxes[key]
