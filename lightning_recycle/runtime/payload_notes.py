"""What workers tell each other before they launch something on their devices, as bytes."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

__all__ = ["NOTE_BYTES", "Key", "Kind", "Note"]

Key: TypeAlias = tuple[int, int]
"""(channel, tag) of a payload. Only one under the same key is on its way from one worker to another. Of what a group
does together: the number of the group is the tag."""

_NOTE = struct.Struct("=BBIQQ")
NOTE_BYTES = _NOTE.size


class Kind(IntEnum):
    """What a note says."""

    OFFER = 1  # the sender has a payload
    GO = 2  # the receiver has begun to receive it
    READY = 3  # a member of a group has what the group is to do next
    START = 4  # all members have


@dataclass(frozen=True)
class Note:
    """What workers tell each other of a payload.

    Args:
        kind: what is said.
        key: of the payload.
        number: of the payload, among those of its sender or its group.
        digest: tells its layout from others; all sides must mean the same.
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
