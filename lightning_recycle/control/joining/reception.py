"""Reception: a coordinator's port, where workers meet and join their run.

Concept: the port is open for as long as the process lives. A connection is a *stranger* until its first message, then
:attr:`Reception.greet` decides about it. Between two runs the next one is unknown until a worker comes and asks for it:
workers are kept, and get a sign of life now and then. A run takes them over (:meth:`Reception.serve`) and decides about
later ones, until :meth:`Reception.take_back`.

Contract: used by one thread at a time: the one that waits for a first worker, then the coordinator's.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from lightning_recycle.control.network.connection import SIGN_SECONDS, EventLoop, NonBlockingConnection
from lightning_recycle.control.network.encoding import BadMessageError
from lightning_recycle.control.network.listener import Listener
from lightning_recycle.control.protocol import messages
from lightning_recycle.control.protocol.messages import StopReason

log = logging.getLogger(__name__)

FAREWELL_SECONDS = 1.0
"""For a worker to take the reason why it is sent away."""

_LOOK_SECONDS = 0.2

FirstMessage: TypeAlias = messages.Hello | messages.Returned
"""The first message of a connection."""


class Reception:
    """Listens at ``address``, and keeps the workers that come until there is a run for them.

    Args:
        address: where to listen.
        key: the key of the runs.
        workers: how many may come at the same time.

    Attributes:
        key: the key of the runs.
        loop: waits for all connections.
        listener: what accepts the connections.
        strangers: connections without a first message yet.
        greet: decides about a connection, and is given its first message.
        on_wake: called in the thread of the loop when it was woken.
        is_over: whether there will be no further run: workers that come may end, successfully.
        run: the run whose workers may return; empty for none, None for any.
        enrolled: sent to newcomers at once, so that they may return; None if they may not.

    Raises:
        ConfigurationError: if the address cannot be listened at.
    """

    def __init__(self, address: tuple[str, int], key: bytes, workers: int) -> None:
        self.key = key
        self.loop = EventLoop(self._on_wake)
        self.listener = Listener(address, key, workers, self.loop.wake)
        self.strangers: set[NonBlockingConnection] = set()
        self.greet: Callable[[NonBlockingConnection, FirstMessage], None] = self._keep
        self.on_wake: Callable[[], None] = _nothing
        self.is_over = False
        self.run: str | None = ""
        self.enrolled: messages.Enrolled | None = None
        self._met: list[tuple[NonBlockingConnection, FirstMessage]] = []
        self._next_sign = 0.0

    # ------------------------------------------------------------------ strangers

    def _on_wake(self) -> None:
        while not self.listener.accepted.empty():
            stranger = self.listener.accepted.get()
            self.strangers.add(stranger)
            self.loop.watch(stranger, partial(self._on_stranger, stranger))
        self.on_wake()

    @property
    def has_strangers(self) -> bool:
        """Whether some connection has no first message yet."""
        return bool(self.strangers) or not self.listener.accepted.empty()

    def _on_stranger(self, connection: NonBlockingConnection) -> None:
        """The first message of a connection, or a part of it."""
        try:
            connection.read()
            first = connection.inbox.take()
        except (EOFError, OSError, BadMessageError) as error:
            log.warning("Refused a connection: %s", error or "it left without a word")
            self.strangers.discard(connection)
            self.loop.forget(connection)
            connection.close()
            return
        if first is not None:
            self.strangers.discard(connection)
            self.loop.forget(connection)
            self.greet(connection, first)

    # ------------------------------------------------------------------ between two runs

    def _keep(self, connection: NonBlockingConnection, first: FirstMessage) -> None:
        if isinstance(first, messages.Returned) and self.run is not None and first.run != self.run:
            log.error(
                "%s returns to a run of which this coordinator knows nothing, and ends. With the file of its"
                " coordinator (--state) the run would have gone on: start it again from its newest checkpoint.",
                described(first).capitalize(),
            )
            connection.part(messages.Stop(StopReason.LOST), seconds=FAREWELL_SECONDS)
            return
        if isinstance(first, messages.Hello) and self.enrolled is not None:
            with contextlib.suppress(OSError):  # who reads from it sees that it is gone
                connection.send(self.enrolled)
        self._met.append((connection, first))
        self.loop.watch(connection, partial(self._on_kept, connection))

    def _on_kept(self, connection: NonBlockingConnection) -> None:
        """Heartbeats, for later, or the end of a worker."""
        try:
            connection.read()
        except (EOFError, OSError) as error:
            log.warning("A worker left before there was a run for it: %s", error or "without a word")
            self._met = [(known, first) for known, first in self._met if known is not connection]
            self.loop.forget(connection)
            connection.close()

    def first(self) -> FirstMessage:
        """Waits for a worker while there may be a further run; a worker that returns to one goes first."""
        while not self._met:
            self.look()
        return next((first for _, first in self._met if isinstance(first, messages.Returned)), self._met[0][1])

    @property
    def has_met(self) -> bool:
        """Whether a worker has come."""
        return bool(self._met)

    @property
    def returned(self) -> list[messages.Returned]:
        """The first messages of workers that have lost their coordinator, of the same run as the first."""
        found = [first for _, first in self._met if isinstance(first, messages.Returned)]
        return [first for first in found if first.run == found[0].run]

    def look(self) -> None:
        """Waits a moment for newcomers and their first messages, and sends signs of life."""
        self.loop.dispatch(self.loop.select(_LOOK_SECONDS))
        if self.is_over:  # the runs for which they came have finished
            self.send_away(messages.Stop(StopReason.FINISHED))
        if time.monotonic() >= self._next_sign:
            self._next_sign = time.monotonic() + SIGN_SECONDS
            for connection, _ in self._met:
                with contextlib.suppress(OSError):  # who reads from it sees that it is gone
                    connection.send(messages.Alive())

    def send_away(self, why: messages.Stop | messages.Unfit, returned_only: bool = False) -> None:
        """Sends ``why`` to all workers that are kept, or to those that return, and forgets them."""
        met, self._met = self._met, []
        for connection, first in met:
            if returned_only and not isinstance(first, messages.Returned):
                self._met.append((connection, first))
                continue
            if isinstance(why, messages.Unfit):
                log.warning("Refused %s: %s", described(first), why.why)
            self.loop.forget(connection)
            connection.part(why, seconds=FAREWELL_SECONDS)

    # ------------------------------------------------------------------ a run

    def serve(self, greet: Callable[[NonBlockingConnection, FirstMessage], None], on_wake: Callable[[], None]) -> None:
        """A run takes over: it decides about those that are kept and all that come later."""
        self.greet, self.on_wake = greet, on_wake
        met, self._met = self._met, []
        for connection, first in met:
            self.loop.forget(connection)
            greet(connection, first)
        self.loop.wake()  # others may have come in between

    def take_back(self) -> None:
        """The run is over, and its connections are closed: workers that come from now on wait for the next one."""
        self.greet, self.on_wake = self._keep, _nothing
        self.loop.close_connections(keep=self.strangers)
        self.loop.wake()

    def close(self) -> None:
        self.listener.close()
        self.loop.close()


def described(first: FirstMessage) -> str:
    """The sender of ``first``, in words."""
    return f"a worker (process {first.pid} of {first.node or 'a machine'})"


def _nothing() -> None: ...
