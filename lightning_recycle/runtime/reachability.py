"""Finds the other workers that this one can reach, by opening a TCP connection to each, used for nothing else.

Concept: a worker that wants to be found opens a :class:`Doorbell`, a listening socket whose connections are never
accepted. The system answers for the process, so even a busy or stopped process is reachable: the check tests both
directions of the way to it, not the process. As no connection is ever completed either
(:func:`~lightning_recycle.runtime.sockets.answer_only`), nobody can fill its queue to make a worker look unreachable.

Contract: :func:`unreachable` returns at once if all can be reached. Otherwise it keeps trying until its time is up, so
that a lost packet or a slightly late peer does not count, and workers that check at the same time get their results at
the same time.

Must not know: process groups, generations, the coordinator.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
import time
from collections.abc import Mapping

from lightning_recycle.runtime.sockets import address_of, answer_only, dial, listen

__all__ = ["CHECK_SECONDS", "Doorbell", "hang_up", "unreachable"]

CHECK_SECONDS = 1.4
"""How long to try to reach a worker. Linux resends the first packet of a connection after one second."""

_BACKLOG = 1024  # dialers that the system remembers; each worker makes one or a few
_REDIAL_SECONDS = 0.1  # between attempts that fail at once
_LOOK_SECONDS = 0.02  # between checks for cancellation


class Doorbell:
    """A listening socket at ``host``; close it when no worker needs to reach this one any more.

    ``ports``: those that it may use; None for any.
    """

    def __init__(self, host: str, ports: range | None = None) -> None:
        self._socket = listen(host, _BACKLOG, ports)
        with contextlib.suppress(OSError):  # without filters it answers as well, until its queue is full
            answer_only(self._socket)

    @property
    def address(self) -> bytes:
        """Its address, for :func:`unreachable` in other workers."""
        return address_of(self._socket)

    @property
    def port(self) -> int:
        port: int = self._socket.getsockname()[1]
        return port

    def close(self) -> None:
        self._socket.close()


def unreachable(
    addresses: Mapping[int, bytes], cancelled: threading.Event, seconds: float = CHECK_SECONDS
) -> tuple[int, ...]:
    """Tries to reach all workers at the same time.

    Args:
        addresses: addresses of the others' doorbells, by rank.
        cancelled: event that ends the check soon after it is set.
        seconds: duration of the check.

    Returns:
        The ranks that could not be reached, in order; meaningless if ``cancelled`` is set.
    """
    missing = set(addresses)
    dialled: dict[int, socket.socket] = {}
    deadline = time.monotonic() + seconds
    next_dial = 0.0
    with selectors.DefaultSelector() as selector:
        try:
            while missing and not cancelled.is_set():
                now = time.monotonic()
                if now >= next_dial:
                    next_dial = now + _REDIAL_SECONDS
                    for rank in missing - dialled.keys():
                        if (sock := dial(addresses[rank])) is not None:
                            dialled[rank] = sock
                            selector.register(sock, selectors.EVENT_WRITE, rank)
                for key, _ in selector.select(_LOOK_SECONDS):
                    with dialled.pop(key.data) as sock:
                        selector.unregister(sock)
                        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                            missing.discard(key.data)
                            hang_up(sock)
                if now >= deadline:  # after the check: this process may not have been running until now
                    break
        finally:
            for sock in dialled.values():
                sock.close()
    return tuple(sorted(missing))


def hang_up(sock: socket.socket) -> None:
    """Lets ``sock``, connected to a doorbell, end without a farewell when it is closed: nobody would answer it."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
