"""Event loop of the coordinator's thread: sockets, process exits, wake-ups.

Contract: used by one thread, except for :meth:`EventLoop.wake`. An event about what an earlier callback of the same
round has closed, or put in the place of it, is not delivered.

Must not know: what messages say.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias

from lightning_recycle.control.network.connection import NonBlockingConnection

__all__ = ["EventLoop"]

_Found: TypeAlias = "Sequence[tuple[selectors.SelectorKey, int]]"


class EventLoop:
    """Calls back for what is watched.

    Args:
        on_wake: called in the loop's thread after :meth:`wake`, once for several calls.
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
        """Waits for the moment when ``connection`` takes what it did not take at once."""
        key = self._selector.get_key(connection)
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent_since is not None else 0)
        if events != key.events:
            self._selector.modify(connection, events, key.data)

    # ------------------------------------------------------------------ one round

    def select(self, timeout: float) -> _Found:
        """Waits at most ``timeout`` seconds for something to :meth:`dispatch`."""
        return self._selector.select(timeout)

    def dispatch(self, found: _Found) -> None:
        """Calls back for what was found."""
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
        """Whether what an event is about has not been closed, or replaced, by an earlier one."""
        found = self._selector.get_map().get(key.fd)
        return found is not None and (found.fileobj, found.data) == (key.fileobj, key.data)

    def _flush(self, connection: Any) -> None:
        """A worker takes messages again."""
        with contextlib.suppress(OSError):  # whoever reads from it sees that it is gone
            connection.flush()
        self.watch_unsent(connection)

    # ------------------------------------------------------------------ the end

    def flush_all(self, seconds: float) -> None:
        """Waits at most ``seconds`` until all connections have taken what there is for them."""
        deadline = time.monotonic() + seconds
        for connection in self._connections():
            with contextlib.suppress(OSError):  # it is the end; a worker that is gone needs no message
                connection.flush_within(max(0.0, deadline - time.monotonic()))

    def close_connections(self, keep: Collection[NonBlockingConnection] = ()) -> None:
        """Closes all connections that are watched, except those in ``keep``."""
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
