"""Messages from pieces: what has arrived of a stream of frames. Pure.

Concept: bytes go in as the network delivers them (:meth:`Inbox.feed`), messages come out once they are complete
(:meth:`Inbox.take`). Only what has arrived is kept: a header that announces a terabyte costs nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from lightning_recycle.control.protocol.encoding import HEADER_BYTES, BadMessageError, decode, parse_header

__all__ = ["Inbox"]


class Inbox:
    """Puts messages together from pieces.

    Attributes:
        expects: the types of messages that may arrive; a header that announces another one is an error before its body
            is read.
    """

    def __init__(self, expects: Collection[type[Any]], data: bytes = b"") -> None:
        self.expects = expects
        self._buffer = bytearray(data)
        self._announced: tuple[type[Any], int] | None = None

    @property
    def missing(self) -> int:
        """How many bytes of the current message are known to be missing."""
        if self._announced is None:
            return max(0, HEADER_BYTES - len(self._buffer))
        return max(0, self._announced[1] - len(self._buffer))

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def take(self) -> Any | None:
        """The next message, if it is complete.

        Raises:
            BadMessageError: if what arrived is none that may be here.
        """
        if self._announced is None:
            if len(self._buffer) < HEADER_BYTES:
                return None
            self._announced = parse_header(self._take(HEADER_BYTES))
            if self._announced[0] not in self.expects:
                raise BadMessageError(f"a {self._announced[0].__name__} may not be sent here")
        kind, size = self._announced
        if len(self._buffer) < size:
            return None
        with memoryview(self._buffer) as view, view[:size] as body:
            message = decode(kind, body)
        del self._buffer[:size]
        self._announced = None
        return message

    def _take(self, size: int) -> bytes:
        taken = bytes(self._buffer[:size])
        del self._buffer[:size]
        return taken
