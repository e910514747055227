"""Payloads, sums and broadcasts from device to device, by NCCL; experimental.

One thread per generation calls NCCL, exchanges notes with the neighbours and the leaders of groups, and launches
:class:`NcclOps`' decisions. So no two threads call NCCL at a time, a send leaves although the main thread is computing,
and an abort is not held up by its waits. The main thread hands over requests and waits; an aborted one counts as never
done, whatever the device reports.

NCCL is tried in each generation before anything depends on it. Two workers use it if each has a device of its own, a
link joins them, and something has gone over all of their communicators; a group if that holds for all members. Else
Gloo does it, and the log has the reason. All sides decide that from the same published facts. A kept communicator is
used if all of its members have kept it; if it does not work all connect once more, without kept ones. The rest of this
package is private to it. Not tried with a device: see docs/gpu.md.
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
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lightning_recycle.errors import ConfigurationError
from lightning_recycle.runtime.groups_and_transports import (
    CommunicationError,
    CommunicationOptions,
    Group,
    GroupPlan,
    Rendezvous,
    Rosters,
    Transport,
)
from lightning_recycle.runtime.nccl.nccl_comms import (
    Comms,
    Kept,
    Kind,
    Note,
    Place,
    abort_together,
    group_places,
    kept_by_all,
    pair,
    successors,
)
from lightning_recycle.runtime.nccl.nccl_library import SUMMED, CudaStreams, NcclLibrary, device_name
from lightning_recycle.runtime.nccl.transfer_order import Collective, GroupPayloads, Payloads, Receiving, Sending, Side
from lightning_recycle.runtime.wire import Channel, ValueLayout

log = logging.getLogger(__name__)


class NcclOps:
    """The communicators of one worker in one generation, and their traffic.

    Called by the thread alone. Results count once *finished*, confirmed by the device, and never after :meth:`abort`.
    Tensors live as long as the device may use them.
    """

    def __init__(self, comms: Comms, pairs: Payloads, groups: GroupPayloads) -> None:
        self._comms, self.pairs, self.groups = comms, pairs, groups
        self._aborted = False

    @property
    def connected(self) -> bool:
        """Whether something has gone over every communicator."""
        return self.pairs.connected and self.groups.connected

    @property
    def lost(self) -> set[int]:
        """Workers that can no longer be notified."""
        return self.pairs.lost

    def lose(self, rank: int) -> None:
        """Launches nothing more with worker ``rank``."""
        self.pairs.lost.add(rank)
        self.groups.lost.add(rank)

    def take_note(self, peer: int, note: Note) -> None:
        if note.kind is Kind.INVITE:
            self._comms.take_note(note)
        else:
            (self.pairs if note.kind in (Kind.OFFER, Kind.GO) else self.groups).take_note(peer, note)

    def advance(self) -> bool:
        """Does all possible work; returns whether to call it again soon."""
        self._comms.begin()
        pairs, groups = self.pairs.advance(), self.groups.advance()
        return pairs or groups

    def reserve(self, places: Iterable[Place]) -> None:
        """Begins communicators for the next generation, in the background. Called once."""
        self._comms.reserve(places)

    def abort(self) -> dict[Place, Kept]:
        """Ends everything once the device is done with it; returns the kept communicators.

        All workers must abort: a transfer with one that has aborted would otherwise never end.
        """
        if self._aborted:
            return {}
        self._aborted = True
        kept = self._comms.abort()
        self.pairs.drop()
        self.groups.drop()
        return kept


ABORT_SECONDS = 10.0  # what an abort may take; it waits for the device, which is asked to stop
_POLL_SECONDS = 50e-6, 500e-6  # between two looks at a device that is busy; one takes 36 us of Python's lock (measured)
_POLL_SHARE = 0.05  # of the time since something happened, in between: so little later is noticed what takes long
_MOST_SELECTED = 1024  # FD_SETSIZE
_LOOK_SECONDS = 0.1  # between checks of what nobody is woken up for


class NcclThread:
    """The thread that owns the communicators of one generation.

    ``traffic`` makes the operations, given callbacks for notes and for finished work. ``kept``: communicators for the
    next generation, complete after the end.
    """

    def __init__(
        self,
        traffic: Callable[[Callable[[int, Note], None], Callable[[], None]], NcclOps],
        generation: int,
        streams: CudaStreams,
        links: Mapping[int, socket.socket],
        cancelled: threading.Event,
    ) -> None:
        self._generation, self._cancelled, self._streams = generation, cancelled, streams
        self.linked = frozenset(links)
        self._links = {peer: _Link(sock) for peer, sock in links.items()}
        self._traffic = traffic(self._send_note, self._notify)
        self.kept: dict[Place, Kept] = {}
        self._is_over = threading.Event()
        self._asked: deque[Callable[[], None]] = deque()  # by the main thread
        self._changed = threading.Condition()
        self._moved = time.monotonic()  # when something happened
        self._failure: Exception | None = None
        self._selector = selectors.EpollSelector()
        self._alarm, self._bell = socket.socketpair()
        self._bell.setblocking(False)
        self._alarm.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="recycle-nccl", daemon=True)

    @property
    def connected(self) -> bool:
        """Whether something has gone over all communicators."""
        return self._traffic.connected

    def start(self) -> None:
        self._thread.start()

    # the main thread

    def members(self, group: int) -> Collection[int]:
        return self._traffic.groups.members(group)

    def begin(self, collective: Collective) -> None:
        self._ask(lambda: self._traffic.groups.begin(collective))

    def send(self, sending: Sending) -> None:
        self._ask(lambda: self._traffic.pairs.send(sending))

    def receive(self, receiving: Receiving) -> None:
        """Returns when ``receiving`` is there."""
        self._ask(lambda: self._traffic.pairs.receive(receiving))
        self.wait_for(lambda: receiving.finished, (receiving.peer,))

    def reserve(self, places: Iterable[Place]) -> None:
        """See :meth:`NcclOps.reserve`."""
        self._ask(lambda: self._traffic.reserve(places))

    def _ask(self, request: Callable[[], None]) -> None:
        self._asked.append(request)
        self.wake()

    def wake(self) -> None:
        with contextlib.suppress(OSError):  # full, so it has been rung; or closed, as the thread has ended
            self._bell.send(b"!")
        self._notify()

    def wait_for(
        self, condition: Callable[[], bool], peers: Collection[int] = (), timeout: float | None = None
    ) -> None:
        """Waits for ``condition``, for which workers ``peers`` must stay connected.

        Raises CommunicationError after an abort or the loss of a peer, TimeoutError after ``timeout`` seconds, and
        RuntimeError for NCCL or a lost device.
        """
        began = time.monotonic()
        with self._changed:
            while True:
                # In this order: what an abort ends is not there, whatever the device says.
                is_met = condition()
                if self._cancelled.is_set():
                    raise CommunicationError(f"Generation {self._generation} was aborted.")
                if self._failure is not None:
                    raise self._failure
                if is_met:
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
        self._is_over.set()
        self.wake()
        if self._thread.ident is not None:
            self._thread.join(ABORT_SECONDS)
        if self._thread.is_alive():
            raise RuntimeError(
                f"CUDA error, presumably: NCCL has not aborted generation {self._generation} within"
                f" {ABORT_SECONDS:.0f} s, so this process cannot use its device any more."
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
            self.kept = self._traffic.abort()
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
                self._traffic.take_note(key.data, note)
            if link.ended:
                self._selector.unregister(link.socket)
                self._traffic.lose(key.data)
                self._notify()

    def _select(self, timeout: float) -> list[tuple[selectors.SelectorKey, int]]:
        """Ready connections, after ``timeout`` seconds at most.

        epoll counts milliseconds; ``select`` does not, and takes the epoll instance for one descriptor, if its number
        is small.
        """
        descriptor = self._selector.fileno()
        if timeout >= 1e-3 or descriptor >= _MOST_SELECTED:
            return self._selector.select(timeout)
        select.select([descriptor], [], [], timeout)
        return self._selector.select(0)

    def _send_note(self, peer: int, note: Note) -> None:
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
        """Sends without blocking; the rest leaves with the next look."""
        if not self._outgoing or self.ended:
            return
        try:
            del self._outgoing[: self.socket.send(self._outgoing)]
        except BlockingIOError:
            pass
        except OSError:  # reading tells
            self._outgoing.clear()

    def notes(self) -> list[Note]:
        try:
            data = self.socket.recv(64 * 1024)
        except BlockingIOError:
            return []
        except OSError:  # ended by the other side, or cut off by an abort
            data = b""
        self.ended = not data
        self._incoming += data
        return Note.decode_all(self._incoming)


def _poll_seconds(waited: float) -> float:
    """Interval between looks at the device after ``waited`` seconds without events."""
    return min(max(_POLL_SHARE * waited, _POLL_SECONDS[0]), _POLL_SECONDS[1])


_LINKS = "payloads"  # name of the group of links
_PACKED_BYTES = 64 * 1024  # what is smaller is there by Gloo before two notes have gone to and fro
_TRIAL_SECONDS = 120.0  # to connect, where Gloo can do it instead; NCCL takes seconds, some of them in large networks
_KEPT_SECONDS = 10.0  # the same if all communicators are there already
_CHANNELS = {channel: number for number, channel in enumerate(Channel)}


@dataclass
class _Agreement:
    """A worker's agreement with the others on the use of NCCL in a generation.

    ``obstacles``: reasons for Gloo. ``kept``: digests of communicators kept from the generation before, by rank and
    place.
    """

    rank: int
    neighbours: set[int] = field(default_factory=set)
    rosters: dict[str, tuple[int, ...]] = field(default_factory=dict)
    obstacles: list[str] = field(default_factory=list)
    kept: dict[int, Mapping[str, int]] = field(default_factory=dict)

    @property
    def peers(self) -> set[int]:
        """All workers with which this worker is to share a communicator."""
        return self.neighbours.union(*self.rosters.values()) - {self.rank}

    @property
    def groups(self) -> dict[str, Place]:
        return group_places(self.rosters)

    @property
    def places(self) -> list[Place]:
        pairs = (place for peer in self.neighbours for place in (pair(self.rank, peer), pair(peer, self.rank)))
        return sorted({*pairs, *self.groups.values()})


class NcclTransport(Transport):
    """Payloads and collectives by NCCL, and by Gloo where workers cannot use it.

    ``library``: NCCL, or the reason for its lack. ``name``: of the device; equal for workers that share one.

    Attributes:
        obstacles: why something goes by Gloo, as the workers agreed when they connected last.
    """

    connect_seconds = _TRIAL_SECONDS + ABORT_SECONDS

    def __init__(
        self,
        rank: int,
        device: torch.device,
        library: NcclLibrary | str,
        streams: CudaStreams,
        name: str,
        reserves: bool = True,
    ) -> None:
        self._rank, self._device, self._library, self._streams = rank, device, library, streams
        self._name, self._reserves = name, reserves
        self.obstacles: list[str] = []
        self._has_explained = False
        self._lock = threading.Lock()
        self._thread: NcclThread | None = None
        self._usable = _Agreement(rank)
        self._kept: dict[Place, Kept] = {}  # of the generation before

    def plans(self, ranks: tuple[int, ...], rosters: Rosters) -> Sequence[GroupPlan]:
        # The second of a group founds what takes its place without the first.
        led = {rank for roster in rosters.values() for rank in roster if self._rank in roster[:2]}
        leaders = {rank for roster in rosters.values() for rank in roster[:2]}
        return [GroupPlan(_LINKS, tuple(sorted({*ranks, *led, *leaders})), None, meshed=False)]

    def connect(
        self,
        generation: int,
        rosters: Rosters,
        groups: Mapping[str, Group],
        rendezvous: Rendezvous,
        cancelled: threading.Event,
    ) -> None:
        links = groups.get(_LINKS, Group()).links
        rosters = {name: roster for name, roster in rosters.items() if len(roster) > 1}
        neighbours = {rank for channel in Channel for rank in groups.get(channel.value, Group()).places} - {self._rank}
        others = neighbours.union(*rosters.values()) - {self._rank}
        if not others:
            return
        meeting = _Meeting(generation, self._rank, others, rendezvous, cancelled)
        agreed = self._agree(meeting, neighbours, rosters, links)
        for peer in set(links) - agreed.peers:
            links.pop(peer).close()
        with self._lock:
            meeting.raise_if_cancelled()
            kept, self._kept = self._kept, {}
            used = kept_by_all(agreed.places, kept, agreed.kept)
            outdated = [each for place, each in kept.items() if place not in used]
            thread = self._thread = self._start(meeting, agreed, used, outdated, links)
        failure = None if thread is None else self._try(thread, bool(used), cancelled)
        self._decide(meeting, agreed, failure)

    def _start(
        self,
        meeting: _Meeting,
        agreed: _Agreement,
        used: Mapping[Place, Kept],
        outdated: Collection[Kept],
        links: Mapping[int, socket.socket],
    ) -> NcclThread | None:
        """Starts the thread that transfers by NCCL; None if no peer can.

        ``used``: communicators of an earlier generation that all members have kept; ``outdated``: others, to be
        aborted.
        """
        library = self._library
        if not agreed.peers:
            if outdated and not isinstance(library, str):
                abort_together(library, (each.comm for each in outdated))
            return None
        assert not isinstance(library, str)
        groups, generation = {_number(name): place for name, place in agreed.groups.items()}, meeting.generation

        def traffic(send_note: Callable[[int, Note], None], on_change: Callable[[], None]) -> NcclOps:
            comms = Comms(self._rank, library, send_note, agreed.places, used, outdated)
            side = Side(self._rank, generation, library, self._streams, comms, self._device, send_note, on_change)
            return NcclOps(comms, Payloads(side, agreed.neighbours), GroupPayloads(side, groups))

        thread = NcclThread(traffic, generation, self._streams, links, meeting.cancelled)
        thread.start()
        return thread

    def _agree(
        self, meeting: _Meeting, neighbours: Collection[int], rosters: Rosters, links: Collection[int]
    ) -> _Agreement:
        """The possible uses of NCCL, from all workers' published facts."""
        own_card: dict[str, Any] = {
            "device": None if isinstance(self._library, str) else self._name,
            "why": self._library if isinstance(self._library, str) else "",
            "links": sorted(links),
            "kept": {place.name: kept.digest for place, kept in self._kept.items()},
        }
        cards = {self._rank: own_card, **meeting.exchange("nccl", own_card)}
        agreed = _Agreement(self._rank, kept={rank: card["kept"] for rank, card in cards.items()})
        for peer in sorted(neighbours):
            if obstacle := _obstacle(cards, sorted((self._rank, peer))):  # so that both find the same
                agreed.obstacles.append(obstacle)
            else:
                agreed.neighbours.add(peer)
        for name, roster in sorted(rosters.items()):
            if obstacle := _obstacle(cards, roster):
                agreed.obstacles.append(obstacle)
            else:
                agreed.rosters[name] = roster
        return agreed

    def _try(self, thread: NcclThread, uses_kept: bool, cancelled: threading.Event) -> Exception | None:
        """Connects; the reason if it does not work and Gloo can replace it.

        ``uses_kept``: with communicators begun earlier, which may have become useless.
        """
        try:
            thread.wait_for(lambda: thread.connected, thread.linked, _KEPT_SECONDS if uses_kept else _TRIAL_SECONDS)
        except (RuntimeError, CommunicationError, TimeoutError) as error:  # also CUDA's: perhaps only NCCL's use of it
            if cancelled.is_set():
                raise
            with self._lock:
                self._thread = None
            thread.end()
            self._streams.check()
            if uses_kept:
                raise CommunicationError(f"Communicators that were begun earlier do not work: {error}") from error
            return error
        return None

    def _decide(self, meeting: _Meeting, agreed: _Agreement, failure: Exception | None) -> None:
        """Uses NCCL where it works for all; a worker where it fails never tries again."""
        is_own = not isinstance(failure, CommunicationError)  # and no consequence of another's
        failed = "" if failure is None else str(failure)
        failures = {self._rank: (failed, is_own), **meeting.exchange("nccl-works", (failed, is_own))}
        working = {rank for rank, (why, _) in failures.items() if not why}
        agreed.obstacles += [f"worker {rank}: {why}" for rank, (why, own) in sorted(failures.items()) if why and own]
        if failed and is_own:
            self._library = failed
        usable = replace(
            agreed,
            neighbours={peer for peer in agreed.neighbours if {peer, self._rank} <= working},
            rosters={name: roster for name, roster in agreed.rosters.items() if set(roster) <= working},
        )
        with self._lock:
            meeting.raise_if_cancelled()
            self._usable = usable
        self.obstacles = agreed.obstacles
        if (agreed.obstacles or failed) and not self._has_explained:
            self._has_explained = True
            log.warning(
                "Worker %d: some or all payloads and sums go by Gloo, through host memory: %s.",
                self._rank,
                "; ".join(agreed.obstacles or [failed]),
            )

    # what is carried

    @property
    def _connected(self) -> NcclThread:
        assert self._thread is not None, "it carries and takes only while there is one"
        return self._thread

    def packed_bytes(self, peer: int) -> int:
        return _PACKED_BYTES if self.carries(peer) else super().packed_bytes(peer)

    def carries(self, peer: int) -> bool:
        return self._thread is not None and peer in self._usable.neighbours

    def send(
        self, channel: Channel, layout: ValueLayout, tensors: Sequence[Tensor], destination: int, tag: int
    ) -> None:
        payload = [tensor.to(self._device).contiguous() for tensor in tensors if tensor.numel() > 0]
        ready = self._streams.current.record_event()
        self._connected.send(Sending(destination, (_CHANNELS[channel], tag), _digest(layout), payload, ready))

    def receive(self, channel: Channel, layout: ValueLayout, source: int, tag: int) -> list[Tensor | None]:
        tensors = layout.empty(self._streams.empty)
        payload = [tensor for tensor in tensors if tensor is not None and tensor.numel() > 0]
        self._connected.receive(Receiving(source, (_CHANNELS[channel], tag), _digest(layout), payload))
        return tensors

    @property
    def in_one_order(self) -> bool:
        return bool(self._usable.rosters)

    def takes(self, roster: str, tensor: Tensor) -> bool:
        is_here = tensor.device.type == self._device.type and tensor.is_contiguous()
        large = tensor.nbytes > _PACKED_BYTES
        return roster in self._usable.rosters and is_here and large and tensor.dtype in SUMMED

    def begin_collective(self, roster: str, tensor: Tensor, root: int | None = None) -> Any:
        thread = self._connected
        collective = Collective(_number(roster), tensor, root, self._streams.current.record_event())
        thread.begin(collective)
        return thread, collective

    def end_collective(self, handle: tuple[NcclThread, Collective]) -> None:
        thread, collective = handle
        thread.wait_for(lambda: collective.finished, thread.members(collective.group))

    # the end

    def prepare(self) -> None:
        thread, usable = self._thread, self._usable
        if thread is not None and self._reserves:
            thread.reserve(successors(self._rank, usable.neighbours, usable.rosters))

    def abort(self) -> None:
        thread = self._thread
        if thread is not None:
            thread.wake()

    def close(self) -> None:
        """Waits until the device uses none of the generation's tensors any more.

        Raises RuntimeError if that takes too long: this process cannot go on with its device.
        """
        with self._lock:
            thread, self._thread = self._thread, None
            self._usable = _Agreement(self._rank)
        if thread is not None:
            thread.end()
            self._kept |= thread.kept

    def end(self) -> None:
        self.close()
        kept, self._kept = self._kept, {}
        if kept and not isinstance(self._library, str):
            abort_together(self._library, (each.comm for each in kept.values()))


@dataclass(frozen=True)
class _Meeting:
    """Exchanges between this worker and ``others``, in a generation."""

    generation: int
    rank: int
    others: set[int]
    rendezvous: Rendezvous
    cancelled: threading.Event

    def raise_if_cancelled(self) -> None:
        """Raises CommunicationError if the next generation may be connecting already."""
        if self.cancelled.is_set():
            raise CommunicationError(f"Generation {self.generation} was aborted.")

    def exchange(self, what: str, value: Any) -> dict[int, Any]:
        """The others' contributions, by rank."""
        prefix, others = f"generation{self.generation}/{what}", sorted(self.others)
        self.rendezvous.publish(f"{prefix}{self.rank}", json.dumps(value).encode())
        answers = self.rendezvous.lookup([f"{prefix}{rank}" for rank in others], self.cancelled)
        return {rank: json.loads(answer) for rank, answer in zip(others, answers, strict=True)}


def _obstacle(cards: Mapping[int, Any], ranks: Sequence[int]) -> str:
    """Why ``ranks`` cannot have a communicator; the first needs links to the others."""
    without = [rank for rank in ranks if cards[rank]["device"] is None]
    if without:
        return f"worker {without[0]}: {cards[without[0]]['why']}"
    owners: dict[str, int] = {}
    for rank in ranks:
        if (owner := owners.setdefault(cards[rank]["device"], rank)) != rank:
            return f"workers {owner} and {rank} share a device"
    missing = set(ranks[1:]) - set(cards[ranks[0]]["links"])
    return f"worker {ranks[0]} has no link to worker {min(missing)}" if missing else ""


def _number(roster: str) -> int:
    """The number of a group, the same on all members."""
    return zlib.crc32(roster.encode())


def _digest(layout: ValueLayout) -> int:
    return zlib.crc32(layout.header(packed=False))


def check_transport(option: str, device: torch.device) -> None:
    """Checks that ``CommunicationOptions(transport=option)`` is possible on a device."""
    if option == "nccl" and device.type != "cuda":
        raise ConfigurationError(
            "CommunicationOptions(transport='nccl') carries tensors of CUDA devices, and this run is on"
            f" {device.type!r}: use transport='gloo', the default, or Trainer(accelerator='gpu')."
        )


def transport_for(options: CommunicationOptions, rank: int, device: torch.device) -> Transport:
    """The transport of worker ``rank``, whose tensors are on ``device``.

    Raises ConfigurationError if it is "nccl", and there is no CUDA device or no library.
    """
    check_transport(options.transport, device)
    if options.transport == "gloo":
        return Transport()
    library = NcclLibrary()
    return NcclTransport(
        rank,
        device,
        library,
        CudaStreams(device),
        device_name(device),
        reserves=options.standby_connections,
    )
