"""Operations of NCCL on a device, and the notes by which workers agree on them."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

from torch import Tensor

from lightning_recycle.runtime.nccl.nccl_library import UNIQUE_ID_BYTES, Event, NcclComm, NcclLibrary, Stream


@dataclass(eq=False)
class PendingOp:
    """``tensors`` that are launched one after the other, and live as long as this.

    Each is launched when the one before has ended: a kernel behind one that waits for others would hold up what CUDA
    puts into the same queue of the hardware, which may be what those wait for.

    Args:
        comm: the communicator. Each call may leave it in progress, and then nothing may be called.
        launch: the call, with one of them.
    """

    comm: NcclComm
    tensors: Sequence[Tensor]
    launch: Callable[[Tensor], None]
    stream: Stream
    launched: int = 0
    end: Event | None = None  # behind the newest of them

    def proceed(self, library: NcclLibrary) -> bool:
        """Launches what can be launched; returns whether the device has done all of it.

        Raises:
            NcclError: if the communicator has failed.
            RuntimeError: if the device is lost.
        """
        while not library.in_progress(self.comm):  # what is in progress is not on the stream yet
            if self.launched > 0:
                self.end = self.end or self.stream.record()
                if not self.end.query():
                    return False
            if self.launched == len(self.tensors):
                return True
            self.launch(self.tensors[self.launched])
            self.launched, self.end = self.launched + 1, None
        return False


Key: TypeAlias = tuple[int, int]
"""(channel, tag) of a payload. Only one under the same key is on its way from one worker to another. Of what a group
does together: the number of the group is the tag; of an invitation: that of the communicator."""

_NOTE = struct.Struct("=BBIQQ")


class Kind(IntEnum):
    """What a note says."""

    OFFER = 1  # the sender has a payload
    GO = 2  # the receiver has begun to receive it
    READY = 3  # a member of a group has what the group is to do next
    START = 4  # all members have
    INVITE = 5  # the founder of a communicator has begun it; its unique id follows


@dataclass(frozen=True)
class Note:
    """A message between workers about a payload, a collective or a communicator.

    Args:
        digest: tells its layout from others; all sides must mean the same.
    """

    kind: Kind
    key: Key
    number: int
    digest: int
    body: bytes = b""

    def encode(self) -> bytes:
        """The note as bytes."""
        return _NOTE.pack(self.kind, *self.key, self.number, self.digest) + self.body

    @classmethod
    def decode_all(cls, data: bytearray) -> list[Note]:
        """Takes the complete notes from the beginning of ``data``.

        Raises:
            ValueError: for bytes that are no note.
        """
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
