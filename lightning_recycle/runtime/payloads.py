"""The order in which payloads are launched on a device: who offers, who is told to go, what is under way.

Concept: NCCL has no tags, a transfer occupies its stream until both sides are in it, and one whose other side never
comes occupies it until it is aborted. So nothing is launched before it is certain that the other side does the same.
The sender *offers* a payload once the device has computed it. The receiver, which knows from the header what comes and
has a free buffer for it, answers with a *go*, one at a time, and launches its receive; the sender launches payloads in
the order in which it is told to. Offers and goes are notes of some bytes between processors.

Why nobody waits in a circle: a worker has one receive under way, which is at the head of its stream, and one send, to
a worker whose receive is under way. So each send that was launched ends, and after it the one behind it in the queue.
Streams of their own for several receives would not do: each kernel occupies one, and CUDA may put two streams in one
queue of the hardware.

Why the order is the same on both sides: each directed pair of workers has a communicator of its own, and on it both
sides follow the receiver's goes. One communicator for both directions would not do: it runs its kernels in the order of
their launches, and a send of each side would wait for the receive behind the other's.

Contract: one thread calls :meth:`Payloads.advance` and everything else here, again and again while it returns True.
What was received counts once :attr:`Receiving.finished` is set, which happens after the device has said that it is
there, and never once :meth:`Payloads.abort` was called. Tensors live as long as the device may use them.

Must not know: threads, sockets, CUDA, what a payload is for.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

import torch
from torch import Tensor

from lightning_recycle.runtime.device_streams import Event, Stream, Streams
from lightning_recycle.runtime.nccl import NcclComm, NcclError, NcclLibrary

__all__ = ["NOTE_BYTES", "Key", "Kind", "Note", "Payloads", "Receiving", "Sending"]

Key: TypeAlias = tuple[int, int]
"""(channel, tag) of a payload. Only one under the same key is on its way from one worker to another."""

_SENDER, _RECEIVER = 0, 1  # ranks in the communicator of a directed pair
_FIRST: Key = (255, 0)  # of the payload by which a pair is connected
_NOTE = struct.Struct("=BBIQQ")
NOTE_BYTES = _NOTE.size


class Kind(IntEnum):
    """What a note says."""

    OFFER = 1  # the sender has a payload
    GO = 2  # the receiver has begun to receive it


@dataclass(frozen=True)
class Note:
    """What workers tell each other of a payload.

    Args:
        kind: what is said.
        key: of the payload.
        number: of the payload, among those of its sender.
        digest: tells its layout from others; both sides must mean the same.
    """

    kind: Kind
    key: Key
    number: int
    digest: int

    def encode(self) -> bytes:
        """The note, as NOTE_BYTES bytes."""
        return _NOTE.pack(self.kind, *self.key, self.number, self.digest)

    @classmethod
    def decode(cls, data: bytes) -> Note:
        """The counterpart of :meth:`encode`.

        Raises:
            ValueError: for bytes that are no note.
        """
        kind, channel, tag, number, digest = _NOTE.unpack(data)
        return cls(Kind(kind), (channel, tag), number, digest)


@dataclass(eq=False)
class Sending:
    """A payload to send: ``tensors``, contiguous, once ``ready`` is done."""

    peer: int
    key: Key
    digest: int
    tensors: Sequence[Tensor]
    ready: Event
    number: int = -1


@dataclass(eq=False)
class Receiving:
    """A payload to receive: into ``tensors``, contiguous, once ``free`` is done."""

    peer: int
    key: Key
    digest: int
    tensors: Sequence[Tensor]
    free: Event
    finished: bool = False


@dataclass(eq=False)
class _Transfer:
    """Tensors that are launched one after the other. Each call may leave the communicator in progress."""

    comm: NcclComm
    tensors: Sequence[Tensor]
    launch: Callable[[NcclComm, Tensor, int, Stream], None]
    peer: int  # its rank in the communicator
    stream: Stream
    launched: int = 0
    end: Event | None = None
    receiving: Receiving | None = None

    def proceed(self, library: NcclLibrary) -> bool:
        """Launches what can be launched; returns whether all is there."""
        if library.in_progress(self.comm):
            return False
        while self.launched < len(self.tensors):
            self.launch(self.comm, self.tensors[self.launched], self.peer, self.stream)
            self.launched += 1
            if library.in_progress(self.comm):
                return False
        if self.end is None:
            self.end = self.stream.record()  # not before: what is in progress is not on the stream yet
        return self.end.query()


class Payloads:
    """The payloads of one worker in one generation.

    Args:
        rank: of this worker.
        generation: which generation.
        library: NCCL.
        streams: of the device.
        outgoing: whom it may send to, and the unique id of the communicator for that.
        incoming: whom it may receive from, likewise.
        device: where tensors are.
        tell: sends a note to a worker.
        on_change: called when something has finished.

    Attributes:
        connected: whether something has gone over every communicator, so that the next payload finds it connected.
        lost: workers that can be told nothing any more; nothing is launched for them.
    """

    def __init__(
        self,
        rank: int,
        generation: int,
        library: NcclLibrary,
        streams: Streams,
        outgoing: Mapping[int, bytes],
        incoming: Mapping[int, bytes],
        device: torch.device,
        tell: Callable[[int, Note], None],
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._rank, self._generation = rank, generation
        self._library, self._tell, self._on_change = library, tell, on_change
        self.connected = False
        self.lost: set[int] = set()
        self._aborted = False
        self._streams = streams
        self._send_stream, self._receive_stream = streams.create(), streams.create()
        self._ids = [(outgoing, _SENDER), (incoming, _RECEIVER)]
        self._outgoing: dict[int, NcclComm] = {}
        self._incoming: dict[int, NcclComm] = {}
        self._beginning: list[NcclComm] = []
        self._first: list[Receiving] | None = None
        self._device = device
        self._number = 0
        self._computing: deque[Sending] = deque()  # not offered yet
        self._offered: dict[tuple[int, int], Sending] = {}  # by peer and number
        self._told_to_go: deque[Sending] = deque()
        self._sending: _Transfer | None = None
        self._wanted: dict[tuple[int, Key], Receiving] = {}
        self._offers: dict[tuple[int, Key], Note] = {}  # from whom, the oldest first
        self._receiving: _Transfer | None = None

    # what is asked for

    def send(self, sending: Sending) -> None:
        """Sends a payload when its receiver wants it."""
        sending.number = self._number
        self._number += 1
        self._computing.append(sending)

    def receive(self, receiving: Receiving) -> None:
        """Receives a payload when its sender has it."""
        self._wanted[receiving.peer, receiving.key] = receiving

    def hear(self, peer: int, note: Note) -> None:
        """Takes a note of worker ``peer``.

        Raises:
            NcclError: if it makes no sense.
        """
        if note.kind is Kind.OFFER and (peer, note.key) not in self._offers:
            self._offers[peer, note.key] = note
            return
        sending = self._offered.pop((peer, note.number), None)
        if sending is None or (sending.key, sending.digest) != (note.key, note.digest):
            raise NcclError(f"Worker {peer} tells worker {self._rank} of {note}, which does not fit what is under way.")
        self._told_to_go.append(sending)

    # what follows

    def advance(self) -> bool:
        """Does what can be done now. Returns whether to call it again soon, since the device does not call.

        Raises:
            NcclError: if something has failed.
            RuntimeError: if the device is lost.
        """
        if not self.connected:
            self._connect()
        self._offer()
        self._receiving = self._proceed(self._receiving)
        if self._receiving is None:
            self._receiving = self._proceed(self._go())
        self._sending = self._proceed(self._sending)
        while self._sending is None and self._told_to_go:
            self._sending = self._proceed(self._begin_send(self._told_to_go.popleft()))
        under_way = self._sending or self._receiving or self._computing or self._beginning
        return bool(under_way) or self._next_offer(free=False) is not None

    def _begin(self) -> None:
        """Begins all communicators before any is waited for, as others may begin them in another order."""
        comms = (self._outgoing, self._incoming)
        for (ids, rank), begun in zip(self._ids, comms, strict=True):
            for peer, unique_id in ids.items():
                begun[peer] = self._library.init(unique_id, 2, rank)
                self._beginning.append(begun[peer])
        self._ids = []

    def _connect(self) -> None:
        if self._ids:
            self._begin()
        self._beginning = [comm for comm in self._beginning if self._library.in_progress(comm)]
        if self._beginning:
            return
        if self._first is None:
            # The first transfer over a communicator connects it, which takes long and needs both sides: at once, and
            # not when a failure makes a route of it.
            self._first = []
            for peer in sorted(self._outgoing):
                value = torch.tensor([self._generation, self._rank], device=self._device)
                self.send(Sending(peer, _FIRST, 0, [value], self._streams.current.record()))
            for peer in sorted(self._incoming):
                empty = torch.empty(2, dtype=torch.int64, device=self._device)
                self._first.append(Receiving(peer, _FIRST, 0, [empty], self._streams.current.record()))
                self.receive(self._first[-1])
        here = all(receiving.finished for receiving in self._first)
        if here and not (self._computing or self._offered or self._told_to_go or self._sending):
            for receiving in self._first:
                if (found := receiving.tensors[0].tolist()) != [self._generation, receiving.peer]:
                    raise NcclError(
                        f"The communicator from worker {receiving.peer} in generation {self._generation} leads to"
                        f" [generation, worker] {found}."
                    )
            self.connected = True
            self._on_change()

    def _offer(self) -> None:
        while self._computing and self._computing[0].ready.query():
            sending = self._computing.popleft()
            self._offered[sending.peer, sending.number] = sending
            self._tell(sending.peer, Note(Kind.OFFER, sending.key, sending.number, sending.digest))

    def _next_offer(self, free: bool = True) -> tuple[int, Key] | None:
        """The oldest offer of something that is wanted and, if asked for, whose buffer the device no longer uses."""
        for place, note in self._offers.items():
            receiving = self._wanted.get(place)
            if receiving is None or receiving.digest != note.digest or receiving.peer in self.lost:
                continue
            if not free or receiving.free.query():
                return place
        return None

    def _go(self) -> _Transfer | None:
        """Begins a receive, if one can begin."""
        place = self._next_offer()
        if place is None:
            return None
        note, receiving = self._offers.pop(place), self._wanted.pop(place)
        # Before the launch, as the first one on a communicator is in progress until the other side has begun, too.
        self._tell(receiving.peer, Note(Kind.GO, note.key, note.number, note.digest))
        return _Transfer(
            self._incoming[receiving.peer],
            receiving.tensors,
            self._library.receive,
            _SENDER,
            self._receive_stream,
            receiving=receiving,
        )

    def _begin_send(self, sending: Sending) -> _Transfer:
        return _Transfer(
            self._outgoing[sending.peer],
            sending.tensors,
            self._library.send,
            _RECEIVER,
            self._send_stream,
        )

    def _proceed(self, transfer: _Transfer | None) -> _Transfer | None:
        """Proceeds with ``transfer``; returns what is left of it."""
        if transfer is None or not transfer.proceed(self._library):
            return transfer
        if transfer.receiving is not None:
            transfer.receiving.finished = True
            self._on_change()
        return None

    # the end

    def abort(self) -> None:
        """Ends everything; returns when the device uses none of the tensors any more. Everybody aborts: a worker's
        transfer with one that has aborted would otherwise never end.
        """
        if self._aborted:
            return
        self._aborted = True
        self._library.group_start()
        for comm in (*self._outgoing.values(), *self._incoming.values()):
            self._library.abort(comm)
        self._library.group_end()
        self._sending = self._receiving = None
