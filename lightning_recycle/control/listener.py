"""Accepts connections and admits those that know the key. Knows nothing of what they carry."""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection

from lightning_recycle.control.connection import MessageConnection

__all__ = ["Listener"]

log = logging.getLogger(__name__)

_PAUSE_AFTER_ERROR = 0.1  # seconds


class Listener:
    """Listens on ``(host, port)`` (port 0: a free one) and hands out authenticated connections.

    Args:
        address: where to listen.
        authkey: the key that the other side must know.
        timeout: seconds that one read or write of a connection may take.
        backlog: connections that may wait to be accepted.
        wake: called in one of the listener's threads when :attr:`accepted` has a new connection.
    """

    def __init__(
        self, address: tuple[str, int], authkey: bytes, timeout: float, backlog: int, wake: Callable[[], None]
    ) -> None:
        self.accepted: queue.SimpleQueue[MessageConnection] = queue.SimpleQueue()
        self._authkey = authkey
        self._timeout = timeout
        self._wake = wake
        self._closing = False
        self._lock = threading.Lock()
        self._socket = socket.create_server(address, backlog=max(16, backlog))
        self._thread = threading.Thread(target=self._accept, name="recycle-acceptor", daemon=True)

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._socket.getsockname()[:2]
        return str(host), int(port)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        with self._lock:
            self._closing = True
        with contextlib.suppress(OSError):  # the system says "not connected", yet ends the accept
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)
        while not self.accepted.empty():
            self.accepted.get().close()

    def _accept(self) -> None:
        while not self._closing:
            try:
                sock, _ = self._socket.accept()
            except OSError as error:
                if not self._closing:
                    log.warning("The coordinator could not accept a connection: %s", error)
                    time.sleep(_PAUSE_AFTER_ERROR)
                continue
            threading.Thread(target=self._welcome, args=(sock,), name="recycle-welcome", daemon=True).start()

    def _welcome(self, sock: socket.socket) -> None:
        """Admits a peer that knows the key; in a thread of its own, since a stranger may say nothing."""
        connection = MessageConnection(Connection(sock.detach()))
        connection.set_timeout(self._timeout)
        try:
            connection.authenticate(self._authkey)
        except (AuthenticationError, EOFError, OSError) as error:
            log.warning("The coordinator refused a connection: %s", error)
            connection.close()
            return
        with self._lock:
            if self._closing:
                connection.close()
                return
            self.accepted.put(connection)
        self._wake()
