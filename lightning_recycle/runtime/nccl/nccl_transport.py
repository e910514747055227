"""Payloads, sums and broadcasts from device to device, by NCCL; experimental.

NCCL is tried in each generation before anything depends on it. Two workers use it if each has a device of its own, a
link joins them, and something has gone over all of their communicators; a group if that holds for all members. Else
Gloo does it, and the log has the reason. All sides decide that from the same published facts. A kept communicator is
used if all of its members have kept it; if it does not work all connect once more, without kept ones. The rest of this
package is private to it. Not tried with a device: see docs/gpu.md.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lightning_recycle.errors import ConfigurationError
from lightning_recycle.runtime.direct_transports import CommunicationOptions, Rosters, Transport
from lightning_recycle.runtime.groups import CommunicationError, Group, GroupPlan, Rendezvous
from lightning_recycle.runtime.nccl.nccl_comms import (
    Comms,
    Kept,
    Note,
    Place,
    abort_together,
    group_places,
    kept_by_all,
    pair,
    successors,
)
from lightning_recycle.runtime.nccl.nccl_library import SUMMED, CudaStreams, NcclLibrary, device_name
from lightning_recycle.runtime.nccl.nccl_thread import ABORT_SECONDS, NcclOps, NcclThread
from lightning_recycle.runtime.nccl.transfer_order import Collective, GroupPayloads, Payloads, Receiving, Sending, Side
from lightning_recycle.runtime.wire import Channel, ValueLayout

log = logging.getLogger(__name__)

_LINKS = "payloads"  # name of the group of links
_PACKED_BYTES = 64 * 1024  # what is smaller is there by Gloo before two notes have gone to and fro
_TRIAL_SECONDS = 120.0  # to connect, where Gloo can do it instead; NCCL takes seconds, some of them in large networks
_KEPT_SECONDS = 10.0  # the same if all communicators are there already
_CHANNELS = {channel: number for number, channel in enumerate(Channel)}


@dataclass
class _Agreement:
    """Use of NCCL by a worker in a generation.

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

    ``library``: NCCL, or the reason for its lack; with ``required`` an error. ``name``: of the device; equal for
    workers that share one.
    """

    connect_seconds = _TRIAL_SECONDS + ABORT_SECONDS

    def __init__(
        self,
        rank: int,
        device: torch.device,
        library: NcclLibrary | str,
        streams: CudaStreams,
        name: str,
        required: bool = False,
        reserves: bool = True,
    ) -> None:
        self._rank, self._device, self._library, self._streams = rank, device, library, streams
        self._name, self._required, self._reserves = name, required, reserves
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
        meeting = _Meeting(generation, self._rank, neighbours.union(*rosters.values()) - {self._rank}, rendezvous)
        if not meeting.others:
            return
        agreed = self._agree(meeting, neighbours, rosters, links, cancelled)
        if self._required and agreed.obstacles:
            raise ConfigurationError(
                f"Worker {self._rank} cannot use NCCL as it should: {'; '.join(agreed.obstacles)}. Each worker needs a"
                " device of its own (LOCAL_RANK), and connections that prove who is at the other end. Or choose"
                ' CommunicationOptions(transport="gloo").'
            )
        for peer in set(links) - agreed.peers:
            links.pop(peer).close()
        with self._lock:
            if cancelled.is_set():  # and the next generation may be connecting already
                raise CommunicationError(f"Generation {generation} was aborted.")
            kept, self._kept = self._kept, {}
            used = kept_by_all(agreed.places, kept, agreed.kept)
            outdated = [each for place, each in kept.items() if place not in used]
            thread = self._thread = self._start(generation, agreed, used, outdated, links, cancelled)
        failure = None if thread is None else self._try(thread, bool(used), cancelled)
        if self._required:
            self._use(generation, agreed, cancelled)
        else:
            self._decide(meeting, agreed, failure, cancelled)

    def _use(self, generation: int, agreed: _Agreement, cancelled: threading.Event) -> None:
        with self._lock:
            if cancelled.is_set():  # and the next generation may be connected already
                raise CommunicationError(f"Generation {generation} was aborted.")
            self._usable = agreed

    def _start(
        self,
        generation: int,
        agreed: _Agreement,
        used: Mapping[Place, Kept],
        outdated: Collection[Kept],
        links: Mapping[int, socket.socket],
        cancelled: threading.Event,
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
        groups = {_number(name): place for name, place in agreed.groups.items()}

        def traffic(send_note: Callable[[int, Note], None], on_change: Callable[[], None]) -> NcclOps:
            comms = Comms(self._rank, library, send_note, agreed.places, used, outdated)
            side = Side(self._rank, generation, library, self._streams, comms, self._device, send_note, on_change)
            return NcclOps(comms, Payloads(side, agreed.neighbours), GroupPayloads(side, groups))

        thread = NcclThread(traffic, generation, self._streams, links, cancelled)
        thread.start()
        return thread

    def _agree(
        self,
        meeting: _Meeting,
        neighbours: Collection[int],
        rosters: Rosters,
        links: Mapping[int, socket.socket],
        cancelled: threading.Event,
    ) -> _Agreement:
        """The possible uses of NCCL, from all workers' published facts."""
        own_card: dict[str, Any] = {
            "device": None if isinstance(self._library, str) else self._name,
            "why": self._library if isinstance(self._library, str) else "",
            "links": sorted(links),
            "kept": {place.name: kept.digest for place, kept in self._kept.items()},
        }
        cards = {self._rank: own_card, **meeting.exchange("nccl", own_card, cancelled)}
        agreed = _Agreement(self._rank, kept={rank: card["kept"] for rank, card in cards.items()})
        for peer in sorted(neighbours):
            pair = sorted((self._rank, peer))  # so that both find the same
            if obstacle := _obstacle(cards, pair, pair[0], pair[1:]):
                agreed.obstacles.append(obstacle)
                continue
            agreed.neighbours.add(peer)
        for name, roster in sorted(rosters.items()):
            if obstacle := _obstacle(cards, roster, roster[0], roster[1:]):
                agreed.obstacles.append(obstacle)
                continue
            agreed.rosters[name] = roster
        return agreed

    def _try(self, thread: NcclThread, uses_kept: bool, cancelled: threading.Event) -> Exception | None:
        """Connects; the reason if it does not work and Gloo can replace it.

        ``uses_kept``: with communicators begun earlier, which may have become useless.
        """
        try:
            if uses_kept or not self._required:
                limit = _KEPT_SECONDS if uses_kept else _TRIAL_SECONDS
                thread.wait_for(lambda: thread.connected, thread.linked, limit)
            else:
                thread.wait_for(lambda: thread.connected)
        except (RuntimeError, CommunicationError, TimeoutError) as error:  # also CUDA's: perhaps only NCCL's use of it
            if cancelled.is_set() or (self._required and not uses_kept):
                raise
            with self._lock:
                self._thread = None
            thread.end()
            self._streams.check()
            if uses_kept:
                raise CommunicationError(f"Communicators that were begun earlier do not work: {error}") from error
            return error
        return None

    def _decide(
        self, meeting: _Meeting, agreed: _Agreement, failure: Exception | None, cancelled: threading.Event
    ) -> None:
        """Uses NCCL where it works for all; a worker where it fails never tries again."""
        is_own = not isinstance(failure, CommunicationError)  # and no consequence of another's
        failed = "" if failure is None else str(failure)
        failures = {self._rank: (failed, is_own), **meeting.exchange("nccl-works", (failed, is_own), cancelled)}
        working = {rank for rank, (why, _) in failures.items() if not why}
        agreed.obstacles += [f"worker {rank}: {why}" for rank, (why, own) in sorted(failures.items()) if why and own]
        if failed and is_own:
            self._library = failed
        usable = replace(
            agreed,
            neighbours={peer for peer in agreed.neighbours if {peer, self._rank} <= working},
            rosters={name: roster for name, roster in agreed.rosters.items() if set(roster) <= working},
        )
        self._use(meeting.generation, usable, cancelled)
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

    def exchange(self, what: str, value: Any, cancelled: threading.Event) -> dict[int, Any]:
        """The others' contributions, by rank."""
        prefix, others = f"generation{self.generation}/{what}", sorted(self.others)
        self.rendezvous.publish(f"{prefix}{self.rank}", json.dumps(value).encode())
        answers = self.rendezvous.lookup([f"{prefix}{rank}" for rank in others], cancelled)
        return {rank: json.loads(answer) for rank, answer in zip(others, answers, strict=True)}


def _obstacle(cards: Mapping[int, Any], ranks: Sequence[int], hub: int, linked: Sequence[int]) -> str:
    """Why ``ranks`` cannot have a communicator; ``hub`` needs links to ``linked``."""
    without = [rank for rank in ranks if cards[rank]["device"] is None]
    if without:
        return f"worker {without[0]}: {cards[without[0]]['why']}"
    owners: dict[str, int] = {}
    for rank in ranks:
        if (owner := owners.setdefault(cards[rank]["device"], rank)) != rank:
            return f"workers {owner} and {rank} share a device"
    missing = set(linked) - set(cards[hub]["links"])
    return f"worker {hub} has no link to worker {min(missing)}" if missing else ""


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
