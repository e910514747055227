"""Payloads between two workers, on devices: the order of their launches.

NCCL has no tags, and a transfer occupies its stream until both sides are in it. So nothing is launched before the other
side surely does the same. The sender *offers* a payload once the device has computed it. The receiver, which knows the
header and has memory, answers with a *go*, one at a time, and launches its receive; the sender launches payloads in the
order of the goes. Offers and goes are small notes between processors.

Why no workers wait in a circle: a worker has one receive under way, at the head of its stream, and one send, to a
worker whose receive is under way. So each launched send ends, and after it the one behind it. Streams of their own for
several receives would not do: CUDA may put two streams in one queue of the hardware. Each directed pair of workers has
a communicator, so the order is the same on both sides; with one for both directions a send of each side would wait for
the receive behind the other's.
"""

from __future__ import annotations

import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_recycle.runtime.nccl.nccl_comms import Comms, Key, Kind, Note, PendingOp, Place, pair
from lightning_recycle.runtime.nccl.nccl_library import CudaStreams, NcclError, NcclLibrary

_SENDER, _RECEIVER = 0, 1  # ranks in the communicator of a directed pair
_FIRST: Key = (255, 0)  # of the payload by which a pair is connected


@dataclass(eq=False)
class Sending:
    """A payload to send: ``tensors``, contiguous, once ``ready`` is done."""

    peer: int
    key: Key
    digest: int
    tensors: Sequence[Tensor]
    ready: torch.cuda.Event
    number: int = -1


@dataclass(eq=False)
class Receiving:
    """A payload to receive into contiguous, unused ``tensors``."""

    peer: int
    key: Key
    digest: int
    tensors: Sequence[Tensor]
    finished: bool = False


@dataclass(frozen=True)
class Side:
    """Context of one worker in one generation, for its payloads and collectives."""

    rank: int
    generation: int
    library: NcclLibrary
    streams: CudaStreams
    comms: Comms
    device: torch.device
    send_note: Callable[[int, Note], None]
    on_change: Callable[[], None] = lambda: None


class _Traffic:
    """Launches of one worker in one generation, driven by one thread.

    ``connected``: whether every communicator was used. ``lost``: workers that can no longer be notified; nothing is
    launched with them.
    """

    def __init__(self, side: Side) -> None:
        self._rank, self._generation = side.rank, side.generation
        self._library, self._streams, self._comms, self._device = side.library, side.streams, side.comms, side.device
        self._send_note, self._on_change = side.send_note, side.on_change
        self.connected = False
        self.lost: set[int] = set()


class Payloads(_Traffic):
    """The payloads between one worker and its peers."""

    def __init__(self, side: Side, peers: Collection[int]) -> None:
        super().__init__(side)
        self._send_stream, self._receive_stream = self._streams.create(), self._streams.create()
        self._peers = sorted(peers)
        self._first: list[Receiving] | None = None
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

    def take_note(self, peer: int, note: Note) -> None:
        if note.kind is Kind.OFFER and (peer, note.key) not in self._offers:
            self._offers[peer, note.key] = note
            return
        sending = self._offered.pop((peer, note.number), None)
        if sending is None or (sending.key, sending.digest) != (note.key, note.digest):
            raise NcclError(f"Worker {peer} tells worker {self._rank} of {note}, which does not fit what is under way.")
        self._told_to_go.append(sending)

    # what follows

    def advance(self) -> bool:
        """Does all possible work; returns whether to call it again soon."""
        if not self.connected:
            self._connect()
        self._offer()
        self._proceed_with_receive()
        if self._receiving is None:
            self._accept_offer()
        self._proceed_with_sends()
        return bool(self._sending or self._receiving or self._computing or self._first is None)

    def _connect(self) -> None:
        """Connects each peer's communicator by a first transfer, and checks who answers."""
        if not self._comms.is_ready:
            return
        if self._first is None:
            # The first transfer over a communicator connects it, which takes long and needs both sides: at once, and
            # not when a failure makes a route of it.
            self._first = []
            for peer in self._peers:
                value = torch.tensor([self._generation, self._rank], device=self._device)
                self.send(Sending(peer, _FIRST, 0, [value], self._streams.current.record_event()))
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
            self._send_note(sending.peer, Note(Kind.OFFER, sending.key, sending.number, sending.digest))

    def _next_offer(self) -> tuple[int, Key] | None:
        """The oldest offer of a wanted payload."""
        for offer, note in self._offers.items():
            receiving = self._wanted.get(offer)
            if receiving is not None and receiving.digest == note.digest and receiving.peer not in self.lost:
                return offer
        return None

    def _accept_offer(self) -> None:
        offer = self._next_offer()
        if offer is None:
            return
        note, receiving = self._offers.pop(offer), self._wanted.pop(offer)
        # Before the launch, as the first one on a communicator is in progress until the other side has begun, too.
        self._send_note(receiving.peer, Note(Kind.GO, note.key, note.number, note.digest))
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


_GROUPS = 254  # the channel of notes about groups
_TRIAL_NUMBERS = 1 << 18  # summed to connect a group: NCCL connects what it uses for sums of about this size (1 MiB)


@dataclass(eq=False)
class Collective:
    """Replaces ``tensor``, contiguous, once ``ready`` is done.

    By the sum over all members, if ``root`` is None, else by rank ``root``'s.
    """

    group: int
    tensor: Tensor
    root: int | None
    ready: torch.cuda.Event
    finished: bool = False
    number: int = -1

    @property
    def digest(self) -> int:
        """Digest of the meaning, equal on all members."""
        return zlib.crc32(repr((self.root, self.tensor.numel(), self.tensor.dtype)).encode())


@dataclass
class _State:
    """A worker's count of one group's collectives: asked for, ready, to be started."""

    begun: int = 0  # collectives that it was asked for
    told: int = 0  # those for which it has said that it is ready
    may_start: int = 0  # those that all members are ready for
    ready: dict[int, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    """On the leader: number of a collective -> rank of a ready member -> digest."""


class GroupPayloads(_Traffic):
    """The collectives of one worker; an aborted sum is undefined.

    A collective occupies a member's device until all members are in it, for ever if one never comes, and the n-th calls
    of all members belong together. So each member reports to the *leader*, the group communicator's founder, that it is
    *ready* for its next one, once its device has computed its part; the leader, once all are, has them *start*. The
    order of a group is that of the requests, the same on all members.

    Why no workers wait in a circle: all workers are asked in orders that agree with one order of all collectives, so
    the first unfinished one becomes ready everywhere, and every member launches it, or has done so. Transfers between
    two workers are on other streams, and end without any collective. The device needs room for three of NCCL's kernels
    at a time: a send, a receive and a collective. NCCL's documentation asks for one order of all operations of all
    communicators, because waiting kernels may leave no room for others ("Using multiple NCCL communicators
    concurrently"); between pipelines any such order makes transfers wait for sums. A kernel takes one multiprocessor
    per channel, which ``NCCL_MAX_CTAS`` limits; that three fit has not been tried on a device.

    The same bits everywhere: NCCL adds each part of a tensor in one place, and passes the sum on (rings, trees, and
    sums within a switch). Only memory registered as a symmetric window is added in several places; none is.
    """

    def __init__(self, side: Side, groups: Mapping[int, Place]) -> None:
        super().__init__(side)
        self._stream = self._streams.create()
        self._groups = dict(groups)
        self._states = {group: _State() for group in groups}
        self._first: list[Collective] | None = None
        self._asked: deque[Collective] = deque()
        self._under_way: PendingOp | None = None  # the first of those

    def members(self, group: int) -> tuple[int, ...]:
        return self._groups[group].ranks

    # what is asked for

    def begin(self, collective: Collective) -> None:
        """Launches ``collective`` in its turn, once all members are ready."""
        state = self._states[collective.group]
        collective.number = state.begun
        state.begun += 1
        self._asked.append(collective)

    def take_note(self, peer: int, note: Note) -> None:
        group = note.key[1]
        members = self._groups.get(group)
        if members is None or peer not in members.ranks or note.key[0] != _GROUPS:
            raise NcclError(f"Worker {peer} tells worker {self._rank} of {note}, whose group it is not in.")
        if note.kind is Kind.READY and self._rank == members.founder:
            self._note_ready(group, peer, note.number, note.digest)
        elif note.kind is Kind.START and peer == members.founder:
            self._states[group].may_start = note.number + 1
        else:
            raise NcclError(f"Worker {peer} tells worker {self._rank} of {note}, which does not lead.")

    # what follows

    def advance(self) -> bool:
        """Does all possible work; returns whether to call it again soon."""
        if not self.connected:
            self._connect()
        self._proceed()
        is_computing = not self._report_ready()
        return self._under_way is not None or is_computing or self._first is None

    def _connect(self) -> None:
        if self._first is None:
            if not self._comms.is_ready:
                return
            self._first = []
            # The order of the numbers is one of all groups.
            for group in sorted(self._groups):
                value = self._trial_value(1)
                self._first.append(Collective(group, value, None, self._streams.current.record_event()))
                self.begin(self._first[-1])
        if all(collective.finished for collective in self._first):
            for collective in self._first:
                ranks = self._groups[collective.group].ranks
                if not torch.equal(collective.tensor, self._trial_value(len(ranks))):
                    raise NcclError(
                        f"A communicator of workers {ranks} does not sum, in generation {self._generation}."
                    )
            self.connected = True
            self._on_change()

    def _trial_value(self, times: int) -> Tensor:
        value = torch.full((_TRIAL_NUMBERS,), float(times), device=self._device)
        value[0] *= self._generation
        return value

    def _report_ready(self) -> bool:
        """Reports readiness for a group's first collectives; whether all are computed."""
        for collective in self._asked:
            state = self._states[collective.group]
            if collective.group != self._asked[0].group:
                break
            if collective.number < state.told:
                continue
            if not collective.ready.query():
                return False
            state.told += 1
            leader = self._groups[collective.group].founder
            if self._rank == leader:
                self._note_ready(collective.group, self._rank, collective.number, collective.digest)
            else:
                key: Key = (_GROUPS, collective.group)
                self._send_note(leader, Note(Kind.READY, key, collective.number, collective.digest))
        return True

    def _note_ready(self, group: int, rank: int, number: int, digest: int) -> None:
        """A member is ready; the last one starts all, if each can be notified."""
        members, state = self._groups[group], self._states[group]
        ready = state.ready[number]
        ready[rank] = digest
        if len(set(ready.values())) > 1:
            raise NcclError(f"Workers {members.ranks} have begun different collectives (sizes, dtypes, or kinds).")
        if len(ready) < len(members.ranks) or not self.lost.isdisjoint(members.ranks):
            return
        del state.ready[number]
        for member in members.ranks[1:]:
            self._send_note(member, Note(Kind.START, (_GROUPS, group), number, digest))
        state.may_start = number + 1

    def _proceed(self) -> None:
        while self._asked:
            self._report_ready()
            first = self._asked[0]
            if self._under_way is None:
                if first.number >= self._states[first.group].may_start:
                    return
                self._under_way = self._begin(first)
            if not self._under_way.proceed(self._library):
                return
            self._under_way = None
            self._asked.popleft()
            first.finished = True
            self._on_change()

    def _begin(self, collective: Collective) -> PendingOp:
        comm, library, stream = self._comms.of(self._groups[collective.group]), self._library, self._stream

        def launch(tensor: Tensor) -> None:
            if collective.root is None:
                library.all_reduce(comm, tensor, stream)
            else:
                library.broadcast(comm, tensor, self._groups[collective.group].ranks.index(collective.root), stream)

        return PendingOp(comm, [collective.tensor], launch, stream)

    # the end

    def drop(self) -> None:
        """Releases the tensors, once the communicators were aborted."""
        self._under_way = None
        self._asked.clear()
