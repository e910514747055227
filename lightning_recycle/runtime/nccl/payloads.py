"""Payloads between two workers, on devices: the order of their launches.

NCCL has no tags, and a transfer occupies its stream until both sides are in it. So nothing is launched before it is
certain that the other side does the same. The sender *offers* a payload once the device has computed it. The receiver,
which knows from the header what comes and has memory for it, answers with a *go*, one at a time, and launches its
receive; the sender launches payloads in the order of the goes. Offers and goes are notes of some bytes between
processors.

Why no workers wait in a circle: a worker has one receive under way, at the head of its stream, and one send, to a
worker whose receive is under way. So each send that was launched ends, and after it the one behind it. Streams of their
own for several receives would not do: CUDA may put two streams in one queue of the hardware. The order is the same on
both sides, as each directed pair of workers has a communicator of its own; one for both directions would run its
kernels in the order of their launches, and a send of each side would wait for the receive behind the other's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_recycle.runtime.nccl.nccl_comms import Comms, pair
from lightning_recycle.runtime.nccl.nccl_library import Event, NcclError, NcclLibrary, Streams
from lightning_recycle.runtime.nccl.pending_op import Key, Kind, Note, PendingOp

_SENDER, _RECEIVER = 0, 1  # ranks in the communicator of a directed pair
_FIRST: Key = (255, 0)  # of the payload by which a pair is connected


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
    """A payload to receive into contiguous ``tensors``, whose memory nothing uses yet."""

    peer: int
    key: Key
    digest: int
    tensors: Sequence[Tensor]
    finished: bool = False


class Payloads:
    """The payloads of one worker in one generation, driven by one thread.

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
        comms: Comms,
        peers: Collection[int],
        device: torch.device,
        tell: Callable[[int, Note], None],
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._rank, self._generation = rank, generation
        self._library, self._tell, self._on_change = library, tell, on_change
        self.connected = False
        self.lost: set[int] = set()
        self._streams = streams
        self._send_stream, self._receive_stream = streams.create(), streams.create()
        self._comms, self._peers = comms, sorted(peers)
        self._first: list[Receiving] | None = None
        self._device = device
        self._number = 0
        self._computing: deque[Sending] = deque()  # not offered yet
        self._offered: dict[tuple[int, int], Sending] = {}  # by peer and number
        self._told_to_go: deque[Sending] = deque()
        self._sending: PendingOp | None = None
        self._wanted: dict[tuple[int, Key], Receiving] = {}
        self._offers: dict[tuple[int, Key], Note] = {}  # from whom, the oldest first
        self._receiving: tuple[Receiving, PendingOp] | None = None

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
        """Does what can be done now; returns whether to call it again soon.

        Raises:
            NcclError: if something has failed.
            RuntimeError: if the device is lost.
        """
        if not self.connected:
            self._connect()
        self._offer()
        self._proceed_with_receive()
        if self._receiving is None:
            self._go()
        self._proceed_with_sends()
        return bool(self._sending or self._receiving or self._computing or self._first is None)

    def _connect(self) -> None:
        if not self._comms.is_ready:
            return
        if self._first is None:
            # The first transfer over a communicator connects it, which takes long and needs both sides: at once, and
            # not when a failure makes a route of it.
            self._first = []
            for peer in self._peers:
                value = torch.tensor([self._generation, self._rank], device=self._device)
                self.send(Sending(peer, _FIRST, 0, [value], self._streams.current.record()))
            for peer in self._peers:
                self._first.append(Receiving(peer, _FIRST, 0, [self._streams.empty((2,), torch.int64)]))
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

    def _next_offer(self) -> tuple[int, Key] | None:
        """The oldest offer of something that is wanted."""
        for place, note in self._offers.items():
            receiving = self._wanted.get(place)
            if receiving is not None and receiving.digest == note.digest and receiving.peer not in self.lost:
                return place
        return None

    def _go(self) -> None:
        """Begins a receive, if one can begin."""
        place = self._next_offer()
        if place is None:
            return
        note, receiving = self._offers.pop(place), self._wanted.pop(place)
        # Before the launch, as the first one on a communicator is in progress until the other side has begun, too.
        self._tell(receiving.peer, Note(Kind.GO, note.key, note.number, note.digest))
        comm, library, stream = self._comms.of(pair(receiving.peer, self._rank)), self._library, self._receive_stream
        launched = PendingOp(
            comm, receiving.tensors, lambda tensor: library.receive(comm, tensor, _SENDER, stream), stream
        )
        self._receiving = receiving, launched
        self._proceed_with_receive()

    def _proceed_with_receive(self) -> None:
        if self._receiving is None:
            return
        receiving, launched = self._receiving
        if launched.proceed(self._library):
            self._receiving = None
            receiving.finished = True
            self._on_change()

    def _proceed_with_sends(self) -> None:
        while True:
            if self._sending is not None and self._sending.proceed(self._library):
                self._sending = None
            if self._sending is not None or not self._told_to_go:
                return
            sending = self._told_to_go.popleft()
            self._sending = self._begin_send(sending)

    def _begin_send(self, sending: Sending) -> PendingOp:
        comm, library, stream = self._comms.of(pair(self._rank, sending.peer)), self._library, self._send_stream
        return PendingOp(comm, sending.tensors, lambda tensor: library.send(comm, tensor, _RECEIVER, stream), stream)

    # the end

    def drop(self) -> None:
        """Releases the tensors, once the communicators were aborted."""
        self._sending = self._receiving = None
