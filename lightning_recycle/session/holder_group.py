"""Messages between the workers that hold copies of the stages for a checkpoint.

Contract: no wait outlives the worker that it waits for. A part of another step is refused.

Must not know: what a part holds.
"""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lightning_recycle.control.client import ControlClient
from lightning_recycle.control.protocol.member import Interrupted
from lightning_recycle.control.protocol.positions import Positions
from lightning_recycle.files import Pace, temporary_path
from lightning_recycle.session.checkpoint_files import local_path

_PIECE = 1 << 20  # bytes that are sent in one message: what else the connection carries waits
_WINDOW = 4  # pieces under way
_FAILED = "failed"


class GivenUp(Exception):
    """Why a checkpoint cannot be completed."""


@dataclass
class HolderGroup:
    """Messages between the holders of one batch, from their threads.

    Args:
        ranks: the holder of each stage; the last one is the writer.
        since: a generation in which they were alive.
        request: which checkpoint of the batch is being written.
        is_wanted: whether all others still wait for the batch.
    """

    client: ControlClient
    positions: Positions
    number: int
    version: int
    ranks: tuple[int, ...]
    since: int
    pace: Pace = field(default_factory=Pace)
    request: int = 0
    is_wanted: bool = True
    _messages: int = 0

    def __post_init__(self) -> None:
        self.rank, self.writer = self.client.rank, self.ranks[-1]
        self._returns = self.client.returns

    @property
    def is_leader(self) -> bool:
        """Whether this worker is the writer."""
        return self.rank == self.writer

    @property
    def is_column_leader(self) -> bool:
        """Whether this worker has a part of the state."""
        return self.rank in self.ranks

    def gather_all(self, name: str, value: Any) -> Mapping[int, Any]:
        """The values of all holders, by rank.

        Raises:
            GivenUp: if one is lost.
        """
        others = [rank for rank in self.ranks if rank != self.rank]
        self._messages += 1
        question, answer = f"{name} {self._messages}", f"answer {self._messages}"
        if self.is_leader:
            parts = {rank: self._take(rank, question) for rank in others}
            found = {rank: self._of_this_step(*part) for rank, part in parts.items()}
            found[self.rank] = value
            for rank in others:
                self._give(rank, answer, found)
            return found
        self._give(self.writer, question, (self.version, value))
        return self._take(self.writer, answer)  # type: ignore[no-any-return]

    def _of_this_step(self, version: int, value: Any) -> Any:
        if version != self.version:
            raise GivenUp(f"a worker gave its state after {version} steps, and it is to hold {self.version}")
        return value

    def send(self, value: Any) -> None:
        """Sends ``value`` to the writer, in pieces, as the writer takes them."""
        pieces = _Pieces(self)
        try:
            stream = io.BufferedWriter(pieces, _PIECE)
            torch.save((self.version, value), stream)
            stream.close()
        except RuntimeError:  # torch ends its archive after an exception of the stream, too, and finds a part missing
            if pieces.given_up is not None:
                raise pieces.given_up from None
            raise

    def receive(self, rank: int, path: Any) -> Any:
        """The value that ``rank`` sends.

        Its tensors lie in a nameless file beside ``path``, or in TMPDIR if that is not on this machine.
        """
        spool = temporary_path(local_path(path) or Path(tempfile.gettempdir()) / "part")
        spool.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(spool, "xb") as file:
                number = 0
                while piece := self._take(rank, f"piece {number}"):
                    file.write(piece)
                    number += 1
                    self._give(rank, f"taken {number}", None)
            return self._of_this_step(*torch.load(spool, map_location="cpu", mmap=True, weights_only=False))
        finally:
            spool.unlink(missing_ok=True)

    def fail(self, why: str) -> None:
        """Lets all other holders know that this one has given up."""
        for rank in self.ranks:
            if rank != self.rank:
                self.client.give(rank, self.number, f"{self.request} {_FAILED}", why)

    def confirm(self, temporary: Path | None = None) -> None:
        """Returns if this worker may go on.

        With ``temporary``, where the whole file is, announces it: from then on it counts.

        Raises:
            GivenUp: if it is not wanted any more.
        """
        self._check()
        if temporary is None:
            self.client.confirm(in_background=True)
        else:
            self.client.announce(self.number, self.request, os.path.abspath(temporary))

    def _check(self) -> None:
        if not self.is_wanted:
            raise GivenUp("workers were lost meanwhile, or do not wait for it any more")

    def end(self) -> None:
        """Nothing is taken any more."""
        self.is_wanted = False
        self.client.forget_parcels(self.number)

    def _give(self, rank: int, key: str, value: Any) -> None:
        self._check()  # after ``value`` was made
        self.client.give(rank, self.number, f"{self.request} {key}", value)

    def _take(self, rank: int, key: str) -> Any:
        try:
            return self.client.take(rank, self.number, f"{self.request} {key}", self.since, self._goes_on)
        except Interrupted:
            raise GivenUp(self._why(rank)) from None

    def _goes_on(self) -> bool:
        return self.is_wanted and self.client.returns == self._returns and self._failed() is None

    def _failed(self) -> int | None:
        failed = f"{self.request} {_FAILED}"
        return next((rank for rank in self.ranks if self.client.has_parcel(rank, self.number, failed)), None)

    def _why(self, rank: int) -> str:
        failed = self._failed()
        if failed is not None:
            return str(self.client.take(failed, self.number, f"{self.request} {_FAILED}", self.since, lambda: True))
        if self.client.returns != self._returns:
            return "the coordinator was started again, and parts of it were under way"
        return f"the worker of rank {rank} was lost, which had a part of it"


class _Pieces(io.RawIOBase):
    """A file whose content goes to the writer."""

    def __init__(self, group: HolderGroup) -> None:
        self._group, self._number = group, 0
        self.given_up: GivenUp | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        piece = bytes(memoryview(data)[:_PIECE])  # a copy of a whole tensor would keep Python's lock for too long
        self._send(piece)
        return len(piece)

    def close(self) -> None:
        if not self.closed:
            self._send(b"")
            super().close()

    def _send(self, piece: bytes) -> None:
        group = self._group
        group.pace.spend(len(piece))
        try:
            group._give(group.writer, f"piece {self._number}", piece)
            self._number += 1
            if self._number > _WINDOW:
                group._take(group.writer, f"taken {self._number - _WINDOW}")
        except GivenUp as error:
            self.given_up = error
            raise
