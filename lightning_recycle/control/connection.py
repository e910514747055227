"""Messages over a ``multiprocessing.connection``."""

from __future__ import annotations

import os
import socket
import struct
import threading
from multiprocessing.connection import (
    Connection,
    answer_challenge,
    deliver_challenge,
)
from typing import Any

from lightning_recycle.control.protocol import encoding

__all__ = ["MessageConnection"]


class MessageConnection:
    """One end of a duplex channel of messages; :meth:`send` may be called from any thread."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._send_lock = threading.Lock()
        with socket.socket(fileno=os.dup(connection.fileno())) as sock:
            if sock.family in (socket.AF_INET, socket.AF_INET6):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def local_host(self) -> str:
        """The address of this end."""
        with socket.socket(fileno=os.dup(self._connection.fileno())) as sock:
            return str(sock.getsockname()[0])

    def set_timeout(self, seconds: float) -> None:
        """Bounds each read and write, so that a peer that stops in the middle of a message cannot block this process.

        A read or write that takes longer raises OSError; the connection is unusable then.
        """
        value = struct.pack("ll", int(seconds), int(seconds % 1 * 1_000_000))
        with socket.socket(fileno=os.dup(self._connection.fileno())) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)

    def authenticate(self, key: bytes) -> None:
        """The server's side of the handshake of ``multiprocessing.connection.Client``.

        Raises:
            AuthenticationError, EOFError, OSError: if the other side does not know the key or the protocol.
        """
        deliver_challenge(self._connection, key)
        answer_challenge(self._connection, key)

    def fileno(self) -> int:
        return self._connection.fileno()

    @staticmethod
    def encode(message: Any) -> bytearray:
        return encoding.encode(message)

    def send(self, message: Any) -> None:
        """Raises OSError when the other side is gone."""
        self.send_encoded(self.encode(message))

    def send_encoded(self, data: bytes | bytearray) -> None:
        """Sends what :meth:`encode` made, for a message to many; raises like :meth:`send`."""
        with self._send_lock:
            self._connection.send_bytes(data)

    def receive(self) -> Any:
        """Blocks for the next message; raises EOFError or OSError when the other side is gone, and BadMessageError."""
        frame = memoryview(self._connection.recv_bytes())
        kind, size = encoding.parse_header(frame[: encoding.HEADER_BYTES])
        return encoding.decode(kind, frame[encoding.HEADER_BYTES :][:size])

    def close(self) -> None:
        self._connection.close()
