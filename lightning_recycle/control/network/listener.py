"""Accepting connections that know the key, and the loop that reads them.

:class:`Listener` accepts connections and hands out those that know the key. One thread serves all strangers, so they
cost a descriptor each: each has a bounded time for the whole handshake, and their number is bounded. An address is
*known* if a worker has come from there, or if it is loopback; others may have a few connections in the handshake. Of
too many in all, one from an unknown address or without a word goes, the longest waiting first: a side with the key is
done within milliseconds. The log has each reason of a host once.

:class:`EventLoop` calls back for readable connections, exits of processes, and wake-ups; events about connections that
the same round closed are dropped.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import queue
import selectors
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, TypeAlias

from lightning_recycle.control.network.addresses_and_keys import accept, listen_at, shown
from lightning_recycle.control.network.connection import (
    HANDSHAKE_SECONDS,
    FrameBuffer,
    Handshake,
    NonBlockingConnection,
    Refused,
    Role,
    VersionMismatch,
)
from lightning_recycle.control.protocol.messages import FIRST

log = logging.getLogger(__name__)

_STRANGERS = 64  # at the same time, besides one for each worker
_STRANGERS_PER_ADDRESS = 16  # of an address that is not known
_BACKLOG = 4096  # connections that wait to be accepted; more than that, systems seldom allow
_ADDRESSES = 4096  # that are remembered as not known
_ACCEPTS = 128  # at a time, before those that speak are heard again
_LONGEST_SELECT = 1.0  # seconds
_MOST_LOGGED = 64  # reasons of hosts
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: nothing is left of the connection


class _Stranger:
    """A connection whose other side has proved nothing yet."""

    def __init__(self, sock: socket.socket, address: tuple[str, int], handshake: Handshake, deadline: float) -> None:
        self.socket = sock
        self.address = address
        self.handshake = handshake
        self.deadline = deadline
        self.speaks = False


class Listener:
    """Port at ``address`` that hands out authenticated connections; 0: a free one.

    ``workers``: how many may come at the same time. ``wake``: called in the listener's thread when :attr:`accepted` has
    a new connection; may be replaced. Raises ConfigurationError if the address cannot be listened at.
    """

    def __init__(self, address: tuple[str, int], key: bytes, workers: int, wake: Callable[[], None]) -> None:
        self.accepted: queue.SimpleQueue[NonBlockingConnection] = queue.SimpleQueue()
        self._key = key
        self.wake = wake
        self._max_strangers = workers + _STRANGERS
        self._closing = False
        self._lock = threading.Lock()
        self._strangers: dict[int, _Stranger] = {}  # by descriptor, in the order in which they came
        self._pending: Counter[str] = Counter()  # how many of them come from an address
        self._known: dict[str, bool] = {}  # addresses
        self._refusals: set[tuple[str, str]] = set()  # hosts and reasons of refusals
        self._loop = EventLoop(on_wake=lambda: None)
        self._socket = listen_at(address, backlog=max(_BACKLOG, workers))
        self._socket.setblocking(False)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self._loop.watch(self._socket.fileno(), self._accept_all)
        self._thread = threading.Thread(target=self._serve, name="recycle-acceptor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        with self._lock:
            self._closing = True
        self._loop.wake()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)
        self._socket.close()
        for stranger in self._strangers.values():
            stranger.socket.close()
        self._loop.close()
        while not self.accepted.empty():
            self.accepted.get().close()

    def _serve(self) -> None:
        while not self._closing:
            self._loop.dispatch(self._loop.select(_LONGEST_SELECT))
            now = time.monotonic()
            while self._strangers and now > (oldest := next(iter(self._strangers.values()))).deadline:
                self._refuse(oldest, f"it proved nothing within {HANDSHAKE_SECONDS:g} s")

    def _accept_all(self) -> None:
        for _ in range(_ACCEPTS):
            if not self._accept():
                break

    def _accept(self) -> bool:
        """Accepts a connection, if one waits; returns whether one did.

        One more from an address with too many goes at once; with too many in all, the oldest unknown silent one does.
        """
        accepted = accept(self._socket, "The coordinator")
        if accepted is None:
            return False
        sock, (host, port, *_) = accepted
        sock.setblocking(False)
        is_one_of_many = not self._knows(host) and self._pending[host] >= _STRANGERS_PER_ADDRESS
        if is_one_of_many or _has_left(sock):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            sock.close()
            self._log_refusal((host, port), "too many others came from there" if is_one_of_many else "it left")
            return True
        if len(self._strangers) >= self._max_strangers:
            goes = min(self._strangers.values(), key=lambda one: (self._knows(one.address[0]), one.speaks))
            self._refuse(goes, "too many others came after it")
        handshake = Handshake(Role.COORDINATOR, self._key)
        self._strangers[sock.fileno()] = stranger = _Stranger(
            sock, (host, port), handshake, time.monotonic() + HANDSHAKE_SECONDS
        )
        self._pending[host] += 1
        self._loop.watch(sock.fileno(), partial(self._listen_to, stranger))
        self._listen_to(stranger)  # a worker has mostly said something by now
        return True

    def _knows(self, host: str) -> bool:
        """Whether a worker has come from there, or this machine."""
        known = self._known.get(host)
        if known is None:
            if len(self._known) > _ADDRESSES:
                self._known = {address: True for address, is_known in self._known.items() if is_known}
            known = self._known[host] = ipaddress.ip_address(host.partition("%")[0]).is_loopback
        return known

    def _listen_to(self, stranger: _Stranger) -> None:
        """Reads a stranger's part of the handshake; admits or refuses it when decided."""
        try:
            data = stranger.socket.recv(4096)
            if not data:
                raise ConnectionError("it left")
            if not stranger.speaks:
                _say(stranger, stranger.handshake.greeting)
            stranger.speaks = True
            _say(stranger, stranger.handshake.receive(data))
        except (BlockingIOError, InterruptedError):
            return
        except (OSError, Refused) as error:
            self._refuse(stranger, str(error), logging.ERROR if isinstance(error, VersionMismatch) else logging.WARNING)
            return
        if stranger.handshake.done:
            self._admit(stranger)

    def _admit(self, stranger: _Stranger) -> None:
        self._forget(stranger)
        self._known[stranger.address[0]] = True
        try:
            connection = NonBlockingConnection(stranger.socket, FrameBuffer(FIRST, stranger.handshake.rest))
        except OSError:  # it has gone again
            stranger.socket.close()
            return
        with self._lock:
            if self._closing:
                connection.close()
                return
            self.accepted.put(connection)
        self.wake()

    def _refuse(self, stranger: _Stranger, why: str, level: int = logging.WARNING) -> None:
        self._log_refusal(stranger.address, why, level)
        self._forget(stranger)
        with contextlib.suppress(OSError):
            stranger.socket.shutdown(socket.SHUT_WR)
        stranger.socket.close()

    def _log_refusal(self, address: tuple[str, int], why: str, level: int = logging.WARNING) -> None:
        if (address[0], why) not in self._refusals and len(self._refusals) < _MOST_LOGGED:
            self._refusals.add((address[0], why))
            log.log(level, "The coordinator refused a connection from %s: %s.", shown(address), why)

    def _forget(self, stranger: _Stranger) -> None:
        del self._strangers[stranger.socket.fileno()]
        self._pending[stranger.address[0]] -= 1
        if not self._pending[stranger.address[0]]:
            del self._pending[stranger.address[0]]
        self._loop.forget(stranger.socket.fileno())


def _say(stranger: _Stranger, data: bytes) -> None:
    """Sends ``data``, which fits any buffer."""
    with contextlib.suppress(BlockingIOError):
        if not data or stranger.socket.send(data) == len(data):
            return
    raise ConnectionError("it takes nothing")


def _has_left(sock: socket.socket) -> bool:
    """Whether the other side has closed the connection without a word."""
    try:
        return not sock.recv(1, socket.MSG_PEEK)
    except (BlockingIOError, InterruptedError):
        return False
    except OSError:
        return True


# ---------------------------------------------------------------------- the event loop

_Found: TypeAlias = "Sequence[tuple[selectors.SelectorKey, int]]"


class EventLoop:
    """Calls back for watched sources.

    ``on_wake``: called in the loop's thread after :meth:`wake`, once for several calls.
    """

    def __init__(self, on_wake: Callable[[], None]) -> None:
        self._selector = selectors.DefaultSelector()
        self._on_wake = on_wake
        self._reader, self._writer = os.pipe()
        self._lock = threading.Lock()
        self.watch(self._reader, self._drain)

    def wake(self) -> None:
        """Makes the loop call ``on_wake``. Callable from any thread, also after the end."""
        with self._lock:
            if self._writer >= 0:
                os.write(self._writer, b"x")

    def _drain(self) -> None:
        os.read(self._reader, 4096)
        self._on_wake()

    # ------------------------------------------------------------------ what is watched

    def watch(self, source: int | NonBlockingConnection, callback: Callable[[], object]) -> None:
        """Calls ``callback`` whenever ``source`` can be read from."""
        self._selector.register(source, selectors.EVENT_READ, callback)

    def forget(self, source: int | NonBlockingConnection) -> None:
        """Watches ``source`` no longer; it must be watched."""
        self._selector.unregister(source)

    def watches(self, source: int | NonBlockingConnection) -> bool:
        return source in self._selector.get_map()

    def watch_unsent(self, connection: NonBlockingConnection) -> None:
        key = self._selector.get_key(connection)
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent_since is not None else 0)
        if events != key.events:
            self._selector.modify(connection, events, key.data)

    # ------------------------------------------------------------------ one round

    def select(self, timeout: float) -> _Found:
        """Waits at most ``timeout`` seconds for something to :meth:`dispatch`."""
        return self._selector.select(timeout)

    def dispatch(self, found: _Found) -> None:
        for key, events in found:
            if not self._is_current(key):
                continue
            if events & selectors.EVENT_WRITE:
                self._flush(key.fileobj)
                if not self._is_current(key):
                    continue
            if events & selectors.EVENT_READ:
                key.data()

    def _is_current(self, key: selectors.SelectorKey) -> bool:
        """Whether an event's connection was not closed or replaced in the same round."""
        found = self._selector.get_map().get(key.fd)
        return found is not None and (found.fileobj, found.data) == (key.fileobj, key.data)

    def _flush(self, connection: Any) -> None:
        with contextlib.suppress(OSError):  # whoever reads from it sees that it is gone
            connection.flush()
        self.watch_unsent(connection)

    # ------------------------------------------------------------------ the end

    def flush_all(self, seconds: float) -> None:
        """Waits until all connections have taken their frames, at most ``seconds``."""
        deadline = time.monotonic() + seconds
        for connection in self._connections():
            with contextlib.suppress(OSError):  # it is the end; a worker that is gone needs no message
                connection.flush_within(max(0.0, deadline - time.monotonic()))

    def close_connections(self, keep: Collection[NonBlockingConnection] = ()) -> None:
        for connection in self._connections():
            if connection not in keep:
                self.forget(connection)
                connection.close()

    def close(self) -> None:
        """Closes all connections that are watched, and itself."""
        self.close_connections()
        self._selector.close()
        with self._lock:
            for descriptor in (self._reader, self._writer):
                os.close(descriptor)
            self._writer = -1

    def _connections(self) -> list[NonBlockingConnection]:
        keys = list(self._selector.get_map().values())
        return [key.fileobj for key in keys if isinstance(key.fileobj, NonBlockingConnection)]
