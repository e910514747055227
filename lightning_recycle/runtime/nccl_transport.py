"""Payloads, sums and broadcasts from device to device, by NCCL.

Concept: one thread per generation, the *courier*, owns everything of NCCL: it connects the communicators, hears and
tells notes over plain links to the neighbours and the leaders of groups, and launches what
:mod:`~lightning_recycle.runtime.traffic` says. So no call of NCCL is made by two threads at a time, a send leaves
although the main thread is computing, and an abort is not held up by whatever the main thread waits for. The main
thread hands over what it wants, and waits on the processor until that is there: nothing that an aborted transfer has
left behind is ever computed with.

Contract: as :class:`~lightning_recycle.runtime.transports.Transport`. Two workers use NCCL if each has a device of its
own, a link leads from one to the other, and something has gone over all of their communicators; a group does if that
holds for all members. Else Gloo does it. All sides decide that from what all have published. Unique ids are published
once per worker and generation.

Not tried with a device: see docs/gpu.md.

Must not know: schedules, and what a payload or a sum is for.
"""

from __future__ import annotations

import contextlib
import json
import logging
import select
import selectors
import socket
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_recycle.errors import ConfigurationError
from lightning_recycle.runtime.device_streams import Streams
from lightning_recycle.runtime.group_payloads import Collective, GroupPayloads, Members
from lightning_recycle.runtime.groups import CommunicationError, Group, GroupPlan, Rendezvous
from lightning_recycle.runtime.nccl import SUMMED, NcclError, NcclLibrary
from lightning_recycle.runtime.payload_notes import NOTE_BYTES, Note
from lightning_recycle.runtime.payloads import Payloads, Receiving, Sending
from lightning_recycle.runtime.traffic import Traffic
from lightning_recycle.runtime.transports import Channel, GlooTransport, Rosters
from lightning_recycle.runtime.wire import Layout

__all__ = ["NcclTransport"]

log = logging.getLogger(__name__)

_LINKS = "payloads"  # name of the group of links
_PACKED_BYTES = 64 * 1024  # what is smaller is there by Gloo before two notes have gone to and fro
_POLL_SECONDS = 50e-6, 500e-6  # between two looks at a device that is busy; one takes 36 us of Python's lock (measured)
_POLL_SHARE = 0.05  # of the time since something happened, in between: so little later is noticed what takes long
_MOST_SELECTED = 1024  # FD_SETSIZE
_LOOK_SECONDS = 0.1  # between checks of what nobody is woken up for
_ABORT_SECONDS = 10.0  # what an abort may take; it waits for the device, which is asked to stop
_TRIAL_SECONDS = 120.0  # to connect, where Gloo can do it instead; NCCL takes seconds, some of them in large networks
_CHANNELS = {channel: number for number, channel in enumerate(Channel)}


@dataclass
class _Agreement:
    """What a worker does by NCCL in a generation.

    Args:
        outgoing: the workers that it sends to, and the unique id of the communicator for that.
        incoming: those that it receives from, likewise.
        groups: its groups, by name.
        obstacles: why not with others.
    """

    outgoing: dict[int, bytes] = field(default_factory=dict)
    incoming: dict[int, bytes] = field(default_factory=dict)
    groups: dict[str, Members] = field(default_factory=dict)
    obstacles: list[str] = field(default_factory=list)

    @property
    def peers(self) -> set[int]:
        """All other workers that it has a communicator with."""
        return set(self.outgoing).union(*(members.ranks for members in self.groups.values()))


class NcclTransport:
    """Payloads and collectives by NCCL, and by Gloo where workers cannot use it.

    Args:
        rank: of this worker.
        device: where payloads are received.
        library: NCCL; a text that says why this worker has none.
        streams: of the device.
        name: of the device; no two workers have one of the same name if each has its own.
        gloo: for workers that cannot be reached by NCCL.
        required: whether that is an error instead.
    """

    connect_seconds = _TRIAL_SECONDS + _ABORT_SECONDS

    def __init__(
        self,
        rank: int,
        device: torch.device,
        library: NcclLibrary | str,
        streams: Streams,
        name: str,
        gloo: GlooTransport,
        required: bool = False,
    ) -> None:
        self._rank, self._device, self._library, self._streams = rank, device, library, streams
        self._name, self._gloo, self._required = name, gloo, required
        self._has_explained = False
        self._lock = threading.Lock()
        self._courier: _Courier | None = None
        self._usable: tuple[frozenset[int], frozenset[str]] = frozenset(), frozenset()  # peers, and groups

    def plans(self, ranks: tuple[int, ...], rosters: Rosters) -> Sequence[GroupPlan]:
        led = {rank for roster in rosters.values() for rank in roster if self._rank == roster[0]}
        leaders = {roster[0] for roster in rosters.values()}
        return [GroupPlan(_LINKS, tuple(sorted({*ranks, *led, *leaders})), None, meshed=False)]

    def connect(
        self,
        generation: int,
        rosters: Rosters,
        groups: Mapping[str, Group],
        rendezvous: Rendezvous,
        cancelled: threading.Event,
    ) -> None:
        self._gloo.connect(generation, rosters, groups, rendezvous, cancelled)
        links = groups.get(_LINKS, Group()).links
        rosters = {name: roster for name, roster in rosters.items() if len(roster) > 1}
        neighbours = {rank for channel in Channel for rank in groups.get(channel.value, Group()).places} - {self._rank}
        meeting = _Meeting(generation, self._rank, neighbours.union(*rosters.values()) - {self._rank}, rendezvous)
        if not meeting.others:
            return
        agreed = self._agree(meeting, neighbours, rosters, links, cancelled)
        if self._required and agreed.obstacles:
            raise ConfigurationError(
                f"Worker {self._rank} cannot use NCCL as it should: {'; '.join(agreed.obstacles)}. Each worker needs a"
                " device of its own (LOCAL_RANK), and connections that prove who is at the other end. Or choose"
                ' ReCycleStrategy(transport="auto").'
            )
        for peer in set(links) - agreed.peers:
            links.pop(peer).close()
        failure: Exception | None = None
        if agreed.peers:
            courier = self._start(generation, agreed, links, cancelled)
            if self._required:
                courier.wait_for(lambda: courier.connected)
                self._use(generation, agreed.outgoing, agreed.groups, cancelled)
                return
            failure = self._try(courier, cancelled)
        self._decide(meeting, agreed, failure, cancelled)

    def _use(
        self, generation: int, peers: Collection[int], groups: Collection[str], cancelled: threading.Event
    ) -> None:
        with self._lock:
            if cancelled.is_set():  # and the next generation may be connected already
                raise CommunicationError(f"Generation {generation} was aborted.")
            self._usable = frozenset(peers), frozenset(groups)

    def _start(
        self,
        generation: int,
        agreed: _Agreement,
        links: Mapping[int, socket.socket],
        cancelled: threading.Event,
    ) -> _Courier:
        library = self._library
        assert not isinstance(library, str)
        groups = {_number(name): members for name, members in agreed.groups.items()}

        def traffic(tell: Callable[[int, Note], None], on_change: Callable[[], None]) -> Traffic:
            common, rest = (self._rank, generation, library, self._streams), (self._device, tell, on_change)
            pairs = Payloads(*common, agreed.outgoing, agreed.incoming, *rest)
            return Traffic(library, pairs, GroupPayloads(*common, groups, *rest))

        with self._lock:
            if cancelled.is_set():  # and the next generation may be connecting already
                raise CommunicationError(f"Generation {generation} was aborted.")
            self._courier = courier = _Courier(traffic, generation, self._streams, links, cancelled)
        courier.start()
        return courier

    def _agree(
        self,
        meeting: _Meeting,
        neighbours: Collection[int],
        rosters: Rosters,
        links: Mapping[int, socket.socket],
        cancelled: threading.Event,
    ) -> _Agreement:
        """What can be done by NCCL, from what all have published about themselves."""
        own: dict[str, Any] = {"device": None, "why": "", "links": sorted(links), "pairs": {}, "groups": {}}
        try:
            if isinstance(self._library, str):
                raise NcclError(self._library)
            pairs = {str(peer): self._library.unique_id().hex() for peer in sorted(links) if peer in neighbours}
            led = [name for name, roster in sorted(rosters.items()) if roster[0] == self._rank]
            own |= {"groups": {name: self._library.unique_id().hex() for name in led}, "pairs": pairs}
            own["device"] = self._name
        except RuntimeError as error:
            if self._required:
                raise
            self._library = own["why"] = str(error)
        cards = {self._rank: own, **meeting.exchange("nccl", own, cancelled)}
        agreed = _Agreement()
        for peer in sorted(neighbours):
            pair = sorted((self._rank, peer))  # so that both find the same
            if obstacle := _obstacle(cards, pair, pair[0], pair[1:]):
                agreed.obstacles.append(obstacle)
                continue
            agreed.outgoing[peer] = bytes.fromhex(own["pairs"][str(peer)])
            agreed.incoming[peer] = bytes.fromhex(cards[peer]["pairs"][str(self._rank)])
        for name, roster in sorted(rosters.items()):
            if obstacle := _obstacle(cards, roster, roster[0], roster[1:]):
                agreed.obstacles.append(obstacle)
                continue
            agreed.groups[name] = Members(roster, bytes.fromhex(cards[roster[0]]["groups"][name]))
        return agreed

    def _try(self, courier: _Courier, cancelled: threading.Event) -> Exception | None:
        """Connects, where Gloo can do it instead; returns why it does not work, if it does not.

        Raises:
            CommunicationError: if the generation is aborted.
            RuntimeError: if the device is lost.
        """
        try:
            courier.wait_for(lambda: courier.connected, courier.linked, _TRIAL_SECONDS)
        except (RuntimeError, CommunicationError, TimeoutError) as error:  # also CUDA's: perhaps only NCCL's use of it
            if cancelled.is_set():
                raise
            with self._lock:
                self._courier = None
            courier.end()
            self._streams.check()
            return error
        return None

    def _decide(
        self, meeting: _Meeting, agreed: _Agreement, failure: Exception | None, cancelled: threading.Event
    ) -> None:
        """What goes by NCCL, now that all have tried it: what works for all who take part in it. A worker for which it
        does not work does not try again in later generations.
        """
        is_own = not isinstance(failure, CommunicationError)  # and no consequence of another's
        mine = "" if failure is None else str(failure)
        failures = {self._rank: (mine, is_own), **meeting.exchange("nccl-works", (mine, is_own), cancelled)}
        working = {rank for rank, (why, _) in failures.items() if not why}
        agreed.obstacles += [f"worker {rank}: {why}" for rank, (why, own) in sorted(failures.items()) if why and own]
        if mine and is_own:
            self._library = mine
        peers = [peer for peer in agreed.outgoing if {peer, self._rank} <= working]
        groups = [name for name, members in agreed.groups.items() if set(members.ranks) <= working]
        self._use(meeting.generation, peers, groups, cancelled)
        if (agreed.obstacles or mine) and not self._has_explained:
            self._has_explained = True
            log.warning(
                "Worker %d: some or all payloads and sums go by Gloo, through host memory: %s.",
                self._rank,
                "; ".join(agreed.obstacles or [mine]),
            )

    # what is carried

    def _courier_to(self, peer: int) -> _Courier | None:
        return self._courier if peer in self._usable[0] else None

    def packed_bytes(self, peer: int) -> int:
        return self._gloo.packed_bytes(peer) if self._courier_to(peer) is None else _PACKED_BYTES

    def send(
        self, channel: Channel, layout: Layout, tensors: Sequence[Tensor], destination: int, tag: int
    ) -> list[tuple[Any, Tensor]]:
        courier = self._courier_to(destination)
        if courier is None:
            return self._gloo.send(channel, layout, tensors, destination, tag)
        payload = [tensor.to(self._device).contiguous() for tensor in tensors if tensor.numel() > 0]
        ready = self._streams.current.record()
        courier.send(Sending(destination, (_CHANNELS[channel], tag), _digest(layout), payload, ready))
        return []  # the courier keeps them

    def receive(self, channel: Channel, layout: Layout, source: int, tag: int) -> list[Tensor | None]:
        courier = self._courier_to(source)
        if courier is None:
            return self._gloo.receive(channel, layout, source, tag)
        tensors = layout.empty(self._streams.empty)
        payload = [tensor for tensor in tensors if tensor is not None and tensor.numel() > 0]
        courier.receive(Receiving(source, (_CHANNELS[channel], tag), _digest(layout), payload))
        return tensors

    def takes(self, roster: str, tensor: Tensor) -> bool:
        is_here = tensor.device.type == self._device.type and tensor.is_contiguous()
        large = tensor.nbytes > _PACKED_BYTES
        return roster in self._usable[1] and is_here and large and tensor.dtype in SUMMED

    def begin_collective(self, roster: str, tensor: Tensor, root: int | None = None) -> Any:
        courier = self._courier
        assert courier is not None, "it is taken only while there is one"
        collective = Collective(_number(roster), tensor, root, self._streams.current.record())
        courier.begin(collective)
        return courier, collective

    def end_collective(self, begun: tuple[_Courier, Collective]) -> None:
        courier, collective = begun
        courier.wait_for(lambda: collective.finished, courier.members(collective.group))

    # the end

    def abort(self) -> None:
        courier = self._courier
        if courier is not None:
            courier.wake()

    def close(self) -> None:
        """Waits until the device uses none of the generation's tensors any more.

        Raises:
            RuntimeError: if that takes too long. This process cannot go on with its device.
        """
        with self._lock:
            courier, self._courier = self._courier, None
            self._usable = frozenset(), frozenset()
        if courier is not None:
            courier.end()
        self._gloo.close()


@dataclass(frozen=True)
class _Meeting:
    """Where this worker and ``others`` tell each other something, in a generation."""

    generation: int
    rank: int
    others: set[int]
    rendezvous: Rendezvous

    def exchange(self, what: str, mine: Any, cancelled: threading.Event) -> dict[int, Any]:
        """What the others say, by rank."""
        prefix, others = f"generation{self.generation}/{what}", sorted(self.others)
        self.rendezvous.publish(f"{prefix}{self.rank}", json.dumps(mine).encode())
        answers = self.rendezvous.lookup([f"{prefix}{rank}" for rank in others], cancelled)
        return {rank: json.loads(answer) for rank, answer in zip(others, answers, strict=True)}


def _obstacle(cards: Mapping[int, Any], ranks: Sequence[int], hub: int, linked: Sequence[int]) -> str:
    """Why workers ``ranks`` cannot have a communicator, or an empty text. ``hub`` must have links to ``linked``."""
    without = [rank for rank in ranks if cards[rank]["device"] is None]
    if without:
        return f"worker {without[0]}: {cards[without[0]]['why']}"
    owners: dict[str, int] = {}
    for rank in ranks:
        if (owner := owners.setdefault(cards[rank]["device"], rank)) != rank:
            return f"workers {owner} and {rank} share a device"
    missing = set(linked) - set(cards[hub]["links"])
    return f"worker {hub} has no link to worker {min(missing)}" if missing else ""


class _Courier:
    """The thread that owns the communicators of one generation.

    Args:
        traffic: makes all that goes over them, given how it tells notes and that something has finished.
        generation: the number of the generation.
        streams: of the device.
        links: the connections to the workers that it exchanges notes with.
        cancelled: set when the generation is aborted.

    Attributes:
        linked: those workers.
        connected: whether something has gone over all communicators.
    """

    def __init__(
        self,
        traffic: Callable[[Callable[[int, Note], None], Callable[[], None]], Traffic],
        generation: int,
        streams: Streams,
        links: Mapping[int, socket.socket],
        cancelled: threading.Event,
    ) -> None:
        self._generation, self._cancelled, self._streams = generation, cancelled, streams
        self.linked = frozenset(links)
        self._links = {peer: _Link(sock) for peer, sock in links.items()}
        self._traffic = traffic(self._tell, self._notify)
        self._is_over = threading.Event()
        self._asked: deque[Callable[[], None]] = deque()  # by the main thread
        self._changed = threading.Condition()
        self._moved = time.monotonic()  # when something happened
        self._failure: Exception | None = None
        self._selector = selectors.EpollSelector()
        self._alarm, self._bell = socket.socketpair()
        self._bell.setblocking(False)
        self._alarm.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="recycle-courier", daemon=True)

    @property
    def connected(self) -> bool:
        return self._traffic.connected

    def start(self) -> None:
        self._thread.start()

    # the main thread

    def members(self, group: int) -> Collection[int]:
        """Of group number ``group``."""
        return self._traffic.groups.members(group)

    def begin(self, collective: Collective) -> None:
        """Has ``collective`` done."""
        self._ask(lambda: self._traffic.groups.begin(collective))

    def send(self, sending: Sending) -> None:
        """Has ``sending`` sent."""
        self._ask(lambda: self._traffic.pairs.send(sending))

    def receive(self, receiving: Receiving) -> None:
        """Returns when ``receiving`` is there.

        Raises:
            CommunicationError: if the generation was aborted, or the sender is gone.
            RuntimeError: if the device is lost.
        """
        self._ask(lambda: self._traffic.pairs.receive(receiving))
        self.wait_for(lambda: receiving.finished, (receiving.peer,))

    def _ask(self, request: Callable[[], None]) -> None:
        self._asked.append(request)
        self.wake()

    def wake(self) -> None:
        """Has the thread look at what has changed."""
        with contextlib.suppress(OSError):  # full, so it has been rung; or closed, as the thread has ended
            self._bell.send(b"!")
        self._notify()

    def wait_for(
        self, condition: Callable[[], bool], peers: Collection[int] = (), timeout: float | None = None
    ) -> None:
        """Waits for ``condition``, as long as it can come to be: workers ``peers`` must be there for it.

        Raises:
            CommunicationError: if the generation is aborted, or one of them is gone.
            TimeoutError: after ``timeout`` seconds.
            RuntimeError: of NCCL, or of a device that is lost.
        """
        began = time.monotonic()
        with self._changed:
            while True:
                # In this order: what an abort ends is not there, whatever the device says.
                there = condition()
                if self._cancelled.is_set():
                    raise CommunicationError(f"Generation {self._generation} was aborted.")
                if self._failure is not None:
                    raise self._failure
                if there:
                    return
                for peer in peers:
                    if peer in self._traffic.lost:
                        raise CommunicationError(f"Generation {self._generation}: the link to worker {peer} has ended.")
                if timeout is not None and time.monotonic() - began > timeout:
                    raise TimeoutError(f"not all communicators were connected after {timeout:g} s")
                self._changed.wait(_LOOK_SECONDS)

    def _notify(self) -> None:
        self._moved = time.monotonic()
        with self._changed:
            self._changed.notify_all()

    def end(self) -> None:
        """Ends the thread."""
        self._is_over.set()
        self.wake()
        if self._thread.ident is not None:
            self._thread.join(_ABORT_SECONDS)
        if self._thread.is_alive():
            raise RuntimeError(
                f"CUDA error, presumably: NCCL has not aborted generation {self._generation} within"
                f" {_ABORT_SECONDS:.0f} s, so this process cannot use its device any more."
            )

    # its own thread

    def _run(self) -> None:
        try:
            self._streams.use()
            self._selector.register(self._alarm, selectors.EVENT_READ, None)
            for peer, link in self._links.items():
                self._selector.register(link.socket, selectors.EVENT_READ, peer)
            while not (self._cancelled.is_set() or self._is_over.is_set()):
                while self._asked:
                    self._asked.popleft()()
                busy = self._traffic.advance()
                self._listen(_poll_seconds(time.monotonic() - self._moved) if busy else _LOOK_SECONDS)
        except Exception as error:  # the main thread raises it
            self._failure = error
        finally:
            self._notify()
            self._end()

    def _end(self) -> None:
        try:
            self._traffic.abort()
        except Exception as error:  # of a device that is lost; what failed first says more
            self._failure = self._failure or error
        finally:
            self._selector.close()
            for sock in (self._alarm, self._bell, *(link.socket for link in self._links.values())):
                sock.close()
            self._notify()

    def _listen(self, timeout: float) -> None:
        for link in self._links.values():
            link.flush()
        for key, _ in self._select(timeout):
            self._moved = time.monotonic()
            if key.data is None:
                self._alarm.recv(4096)
                continue
            link = self._links[key.data]
            for note in link.notes():
                self._traffic.hear(key.data, note)
            if link.ended:
                self._selector.unregister(link.socket)
                self._traffic.lose(key.data)
                self._notify()

    def _select(self, timeout: float) -> list[tuple[selectors.SelectorKey, int]]:
        """What has come, after ``timeout`` seconds at most. epoll counts milliseconds; ``select`` does not, and takes
        the epoll instance for one descriptor, if that has a small number.
        """
        descriptor = self._selector.fileno()
        if timeout >= 1e-3 or descriptor >= _MOST_SELECTED:
            return self._selector.select(timeout)
        select.select([descriptor], [], [], timeout)
        return self._selector.select(0)

    def _tell(self, peer: int, note: Note) -> None:
        self._links[peer].put(note)


class _Link:
    """Notes over a connection that does not block."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.ended = False
        self._outgoing, self._incoming = bytearray(), bytearray()

    def put(self, note: Note) -> None:
        self._outgoing += note.encode()
        self.flush()

    def flush(self) -> None:
        """Sends what it can. What is left is sent with the next look, since notes never fill a connection for long."""
        if not self._outgoing or self.ended:
            return
        try:
            del self._outgoing[: self.socket.send(self._outgoing)]
        except BlockingIOError:
            pass
        except OSError:  # reading tells
            self._outgoing.clear()

    def notes(self) -> list[Note]:
        """What has come."""
        try:
            data = self.socket.recv(64 * 1024)
        except BlockingIOError:
            return []
        except OSError:  # ended by the other side, or cut off by an abort
            data = b""
        self.ended = not data
        self._incoming += data
        whole = len(self._incoming) // NOTE_BYTES * NOTE_BYTES
        notes, self._incoming = self._incoming[:whole], self._incoming[whole:]
        return [Note.decode(bytes(notes[start : start + NOTE_BYTES])) for start in range(0, whole, NOTE_BYTES)]


def _poll_seconds(waited: float) -> float:
    """How long to wait for the device, if nothing has happened for ``waited`` seconds."""
    return min(max(_POLL_SHARE * waited, _POLL_SECONDS[0]), _POLL_SECONDS[1])


def _number(roster: str) -> int:
    """The number of a group, the same on all members."""
    return zlib.crc32(roster.encode())


def _digest(layout: Layout) -> int:
    return zlib.crc32(layout.header(packed=False))
