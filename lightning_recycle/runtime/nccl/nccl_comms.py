"""NCCL's communicators of a generation, and a reserve for the next one.

Beginning a communicator is slow: members meet and explore devices and networks. So in the background workers begin the
next generation's likely ones: each pair, and each group complete and without any one member. The complete part of this
*reserve* is kept at the end of a generation, as nothing was ever launched on it; all else is aborted together, as a
single abort would wait for the device. The next generation uses communicators that all of their members have kept
(:func:`kept_by_all`), and begins the rest.

The first member *founds* a communicator: it makes the unique id, and invites the others by notes. No worker waits for a
communicator before it has begun all wanted ones, as others may begin them in another order.
"""

from __future__ import annotations

import logging
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

import torch
from torch import Tensor

from lightning_recycle.runtime.nccl.nccl_library import UNIQUE_ID_BYTES, NcclComm, NcclError, NcclLibrary

log = logging.getLogger(__name__)

_PAIR = -1
_WANTED, _RESERVED = 253, 252  # the channels of invitations
_MOST_WITHOUT = 8  # members of a group that has a reserve for the loss of each


@dataclass(eq=False)
class PendingOp:
    """``tensors`` that are launched one after the other, and live as long as this.

    Each is launched when the one before has ended: a kernel behind a waiting one would hold up others in the same queue
    of the hardware, perhaps the awaited ones. ``launch`` takes one tensor, and may leave ``comm`` in progress; then
    nothing may be called.
    """

    comm: NcclComm
    tensors: Sequence[Tensor]
    launch: Callable[[Tensor], None]
    stream: torch.cuda.Stream
    launched: int = 0
    end: torch.cuda.Event | None = None  # behind the newest of them

    def proceed(self, library: NcclLibrary) -> bool:
        """Launches as far as possible; whether the device has done all of it."""
        while not library.in_progress(self.comm):  # what is in progress is not on the stream yet
            if self.launched > 0:
                self.end = self.end or self.stream.record_event()
                if not self.end.query():
                    return False
            if self.launched == len(self.tensors):
                return True
            self.launch(self.tensors[self.launched])
            self.launched, self.end = self.launched + 1, None
        return False


Key: TypeAlias = tuple[int, int]
"""(channel, tag) of a payload, unique on its way from one worker to another.

In collectives the group's number is the tag; in invitations the communicator's.
"""

_NOTE = struct.Struct("=BBIQQ")


class Kind(IntEnum):
    """Kinds of notes between workers."""

    OFFER = 1  # the sender has a payload
    GO = 2  # the receiver has begun to receive it
    READY = 3  # a member of a group has what the group is to do next
    START = 4  # all members have
    INVITE = 5  # the founder of a communicator has begun it; its unique id follows


@dataclass(frozen=True)
class Note:
    """A message about a payload or communicator; ``digest``: of the agreed layout."""

    kind: Kind
    key: Key
    number: int
    digest: int
    body: bytes = b""

    def encode(self) -> bytes:
        return _NOTE.pack(self.kind, *self.key, self.number, self.digest) + self.body

    @classmethod
    def decode_all(cls, data: bytearray) -> list[Note]:
        """Takes the complete notes from the beginning of ``data``; ValueError if damaged."""
        notes, start = [], 0
        while len(data) - start >= _NOTE.size:
            kind, channel, tag, number, digest = _NOTE.unpack_from(data, start)
            end = start + _NOTE.size + (UNIQUE_ID_BYTES if kind == Kind.INVITE else 0)
            if end > len(data):
                break
            notes.append(cls(Kind(kind), (channel, tag), number, digest, bytes(data[start + _NOTE.size : end])))
            start = end
        del data[:start]
        return notes


@dataclass(frozen=True, order=True)
class Place:
    """Identity of a communicator.

    ``ranks``: its members, in order; the first founds it. ``kind`` separates those with the same members.
    """

    ranks: tuple[int, ...]
    kind: int

    @property
    def name(self) -> str:
        """The place as text, the same on all members."""
        return f"{self.kind}:{'-'.join(map(str, self.ranks))}"

    @property
    def founder(self) -> int:
        return self.ranks[0]


@dataclass(frozen=True)
class Kept:
    """A communicator; ``digest`` tells it from others in its place."""

    comm: NcclComm
    digest: int


def pair(sender: int, receiver: int) -> Place:
    """The communicator for messages from ``sender`` to ``receiver``."""
    return Place((sender, receiver), _PAIR)


def group_places(rosters: Mapping[str, tuple[int, ...]]) -> dict[str, Place]:
    """The communicators of groups, by name; the same on all members."""
    count: Counter[tuple[int, ...]] = Counter()
    places = {}
    for name, roster in sorted(rosters.items()):
        places[name] = Place(roster, count[roster])
        count[roster] += 1
    return places


def successors(rank: int, peers: Collection[int], rosters: Mapping[str, tuple[int, ...]]) -> list[Place]:
    """Communicators that the next generation may need, with all workers or one less."""
    found = {place for peer in peers for place in (pair(rank, peer), pair(peer, rank))}
    found |= set(group_places(rosters).values())
    small = {name: roster for name, roster in rosters.items() if len(roster) <= _MOST_WITHOUT}
    for lost in {member for roster in small.values() for member in roster} - {rank}:
        left = {name: tuple(member for member in roster if member != lost) for name, roster in small.items()}
        found |= set(group_places({name: roster for name, roster in left.items() if len(roster) > 1}).values())
    return sorted(found)


def kept_by_all(
    wanted: Iterable[Place], kept: Mapping[Place, Kept], digests: Mapping[int, Mapping[str, int]]
) -> dict[Place, Kept]:
    """The communicators of ``kept`` that all of their members have kept.

    ``digests``: by member, this one included, the digests of its kept ones by name of place.
    """
    return {
        place: kept[place]
        for place in wanted
        if place in kept and all(digests[rank].get(place.name) == kept[place].digest for rank in place.ranks)
    }


class _Batch:
    """Communicators that are begun together."""

    def __init__(self, rank: int, library: NcclLibrary, channel: int, send_note: Callable[[int, Note], None]) -> None:
        self._rank, self._library, self._channel, self._send_note = rank, library, channel, send_note
        self._awaited: dict[int, Place] = {}  # to which somebody else will invite, by number
        self._invitations: dict[int, bytes] = {}  # that came too early
        self.comms: dict[Place, Kept] = {}

    @property
    def has_begun(self) -> bool:
        return not self._awaited

    def begin(self, places: Iterable[Place]) -> None:
        """Begins the communicators of ``places``, as their founders invite."""
        for place in places:
            number = _number(place)
            if place.founder == self._rank:
                self._invite(place)
            elif number in self._invitations:
                self._join(place, self._invitations.pop(number))
            else:
                self._awaited[number] = place

    def take_note(self, note: Note) -> None:
        number = note.key[1]
        if number in self._awaited:
            self._join(self._awaited.pop(number), note.body)
        else:
            self._invitations[number] = note.body

    def _invite(self, place: Place) -> None:
        unique_id = self._library.unique_id()
        self._join(place, unique_id)
        key: Key = (self._channel, _number(place))
        for member in place.ranks[1:]:
            self._send_note(member, Note(Kind.INVITE, key, 0, 0, unique_id))

    def _join(self, place: Place, unique_id: bytes) -> None:
        comm = self._library.init(unique_id, len(place.ranks), place.ranks.index(self._rank))
        self.comms[place] = Kept(comm, zlib.crc32(unique_id))


class Comms:
    """One worker's communicators in a generation; ``outdated`` ones are aborted first."""

    def __init__(
        self,
        rank: int,
        library: NcclLibrary,
        send_note: Callable[[int, Note], None],
        wanted: Collection[Place],
        kept: Mapping[Place, Kept],
        outdated: Iterable[Kept] = (),
    ) -> None:
        self._library = library
        self._outdated = [each.comm for each in outdated]
        self._wanted = _Batch(rank, library, _WANTED, send_note)
        self._wanted.comms.update(kept)
        self._to_begin = [place for place in sorted(wanted) if place not in kept]
        self._reserve = _Batch(rank, library, _RESERVED, send_note)
        self._is_ready = self._has_begun = False

    def of(self, place: Place) -> NcclComm:
        """The communicator of ``place``, which is wanted and begun."""
        return self._wanted.comms[place].comm

    @property
    def is_ready(self) -> bool:
        """Whether all communicators of this generation can be used."""
        if not self._is_ready and self._has_begun and self._wanted.has_begun:
            self._is_ready = not any(self._library.in_progress(kept.comm) for kept in self._wanted.comms.values())
        return self._is_ready

    def begin(self) -> None:
        """Begins the communicators of this generation, when called for the first time."""
        if not self._has_begun:
            self._has_begun = True
            outdated, self._outdated = self._outdated, []
            abort_together(self._library, outdated)
            self._wanted.begin(self._to_begin)

    def reserve(self, places: Iterable[Place]) -> None:
        """Begins the reserve, in the background. Called once."""
        self._unharmed(lambda: self._reserve.begin(places))

    def take_note(self, note: Note) -> None:
        if note.key[0] == _WANTED:
            self._wanted.take_note(note)
        else:
            self._unharmed(lambda: self._reserve.take_note(note))

    def _unharmed(self, begin: Callable[[], None]) -> None:
        try:
            begin()
        except NcclError as error:  # the generation needs nothing of this, and the next one begins what is missing
            log.debug("A communicator for the next generation cannot begin: %s", error)

    def abort(self) -> dict[Place, Kept]:
        """Ends all but the complete reserve, which is returned, once the device is done."""
        kept = {place: reserved for place, reserved in self._reserve.comms.items() if self._is_complete(reserved)}
        used = [each.comm for each in self._wanted.comms.values()]
        incomplete = [each.comm for place, each in self._reserve.comms.items() if place not in kept]
        abort_together(self._library, [*used, *incomplete, *self._outdated])
        return kept

    def _is_complete(self, reserved: Kept) -> bool:
        try:
            return not self._library.in_progress(reserved.comm)
        except RuntimeError:  # it has failed, or the device is lost, which the abort says
            return False


def abort_together(library: NcclLibrary, comms: Iterable[NcclComm]) -> None:
    """Aborts ``comms`` at once: the end of one waits for the kernels of all."""
    library.group_start()
    for comm in comms:
        library.abort(comm)
    library.group_end()


def _number(place: Place) -> int:
    return zlib.crc32(place.name.encode())
