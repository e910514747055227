"""Finds the other workers that this one can reach, by opening a TCP connection to each, used for nothing else.

Concept: a worker that wants to be found opens a :class:`Doorbell`, a listening socket whose connections are never
accepted. The system answers for the process, so even a busy or stopped process is reachable: the check tests both
directions of the way to it, not the process.

Contract: :func:`unreachable` returns at once if all can be reached. Otherwise it keeps trying until its time is up, so
that a lost packet or a slightly late peer does not count, and workers that check at the same time get their results at
the same time.

Must not know: process groups, generations, the coordinator.
"""

from __future__ import annotations

import errno
import selectors
import socket
import threading
import time
from collections.abc import Mapping

__all__ = ["CHECK_SECONDS", "Doorbell", "unreachable"]

CHECK_SECONDS = 1.4
"""How long to try to reach a worker. Linux resends the first packet of a connection after one second."""

_BACKLOG = 1024  # connections the system completes for a process; each worker makes one or a few
_REDIAL_SECONDS = 0.1  # between attempts that fail at once
_LOOK_SECONDS = 0.02  # between checks for cancellation


class Doorbell:
    """A listening socket at ``host``; close it when no worker needs to reach this one any more."""

    def __init__(self, host: str) -> None:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        self._socket = socket.create_server(address, family=family, backlog=_BACKLOG)

    @property
    def address(self) -> bytes:
        """Its address, for :func:`unreachable` in other workers."""
        host, port = self._socket.getsockname()[:2]
        return f"{host} {port}".encode()

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
                        if (sock := _dial(addresses[rank])) is not None:
                            dialled[rank] = sock
                            selector.register(sock, selectors.EVENT_WRITE, rank)
                for key, _ in selector.select(_LOOK_SECONDS):
                    with dialled.pop(key.data) as sock:
                        selector.unregister(sock)
                        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                            missing.discard(key.data)
                if now >= deadline:  # after the check: this process may not have been running until now
                    break
        finally:
            for sock in dialled.values():
                sock.close()
    return tuple(sorted(missing))


def _dial(address: bytes) -> socket.socket | None:
    """Starts to connect; None if there is no route."""
    host, port = address.decode().rsplit(" ", 1)
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setblocking(False)
    if sock.connect_ex((host, int(port))) in (0, errno.EINPROGRESS):
        return sock
    sock.close()
    return None
