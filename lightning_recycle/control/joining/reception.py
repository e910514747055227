"""Where a standalone coordinator meets its workers before their run is known.

Concept: the port is open for as long as the process lives. Between two runs nobody knows what the next one is to be,
until a worker comes and says so. Whoever comes is kept, told now and then that somebody is there, and handed over to
the run's :class:`~lightning_recycle.control.coordinator.coordinator.Coordinator` once that exists; from then on the
coordinator takes newcomers itself and asks :meth:`Reception.suits` about each.

Contract: used by one thread at a time: the one that waits for a first worker, then the coordinator's, until
:meth:`Reception.take_back`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import threading
import time
from collections.abc import Callable

from lightning_recycle.control.network.connection import SIGN_SECONDS, NonBlockingConnection
from lightning_recycle.control.network.listener import Listener
from lightning_recycle.control.protocol import messages
from lightning_recycle.control.protocol.encoding import BadMessageError
from lightning_recycle.control.protocol.messages import StopReason

__all__ = ["Reception"]

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.2
_REFUSAL_SECONDS = 1.0  # for a worker to take the reason why it is refused


class Reception:
    """Listens at ``address`` and keeps the workers that come until there is a run for them.

    Args:
        address: where to listen.
        key: the key of the runs.
        workers: how many may come at the same time.

    Attributes:
        key: the key of the runs.
        listener: what accepts the connections.
        objection: says why a worker cannot take part in the run that is served; None if it can.
        is_over: whether there will be no further run: whoever comes may end, successfully.
        run: the run whose workers may return; empty for none, None for any.
        enrolled: what newcomers are told at once, so that they may return; None if they may not.

    Raises:
        ConfigurationError: if nobody can listen there.
    """

    def __init__(self, address: tuple[str, int], key: bytes, workers: int) -> None:
        self.key = key
        self._reader, self._writer = os.pipe()
        self.listener = Listener(address, key, workers, self._wake)
        self.objection: Callable[[messages.Hello], messages.Unfit | None] = lambda hello: None
        self.is_over = False
        self.run: str | None = ""
        self.enrolled: messages.Enrolled | None = None
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._reader, selectors.EVENT_READ)
        self._met: list[tuple[NonBlockingConnection, messages.Hello | messages.Returned]] = []
        self._next_sign = 0.0
        self.listener.start()

    def first(self) -> messages.Hello | messages.Returned:
        """Waits for a worker that says hello while there may be a further run; who returns to one goes first."""
        while not self._met:
            self.look()
        return next((said for _, said in self._met if isinstance(said, messages.Returned)), self._met[0][1])

    @property
    def has_met(self) -> bool:
        """Whether a worker has come."""
        return bool(self._met)

    @property
    def returned(self) -> list[messages.Returned]:
        """What those of the same run as the first say that have lost their coordinator."""
        said = [one for _, one in self._met if isinstance(one, messages.Returned)]
        return [one for one in said if one.run == said[0].run]

    def send_returned_away(self) -> None:
        """Tells those that return that there is nothing to return to."""
        met, self._met = self._met, []
        for connection, said in met:
            if isinstance(said, messages.Returned):
                self._send_away(connection)
            else:
                self._met.append((connection, said))

    @property
    def has_returned(self) -> bool:
        """Whether one of them returns to :attr:`run`."""
        return any(isinstance(said, messages.Returned) for _, said in self._met)

    def attend(self, work: threading.Thread) -> None:
        """Goes on receiving while ``work`` runs."""
        while work.is_alive():
            self.look()

    def refuse_all(self, why: str) -> None:
        """Tells everybody who has come that there is no run for them, and forgets them."""
        for connection, hello in self._met:
            self._refuse(connection, hello, messages.Unfit(why))
        self._met = []

    def hand_over(self) -> list[tuple[NonBlockingConnection, messages.Hello | messages.Returned]]:
        """Those who have come, with their first messages, for a coordinator that serves them from now on."""
        met, self._met = self._met, []
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, NonBlockingConnection):
                self._selector.unregister(key.fileobj)
                if all(key.fileobj is not connection for connection, _ in met):  # has not said hello yet
                    self.listener.accepted.put(key.fileobj)
        return met

    def suits(self, connection: NonBlockingConnection, hello: messages.Hello) -> bool:
        """Whether a worker can take part in the run that is served; if not, it is told why and let go."""
        why = self.objection(hello)
        if why is None:
            return True
        self._refuse(connection, hello, why)
        return False

    def take_back(self) -> None:
        """The run is over: who comes from now on waits for the next one."""
        self.listener.wake = self._wake
        self.objection = lambda hello: None
        self._wake()

    def close(self) -> None:
        self.listener.close()
        for connection in self.hand_over():
            connection[0].close()
        self._selector.close()
        for descriptor in (self._reader, self._writer):
            os.close(descriptor)

    # ------------------------------------------------------------------ receiving

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # it is being closed
            os.write(self._writer, b"x")

    def look(self) -> None:
        """Waits a moment for newcomers and what they say, and shows everybody that somebody is here."""
        for key, _ in self._selector.select(_LOOK_SECONDS):
            if key.fd == self._reader:
                os.read(self._reader, 4096)
            else:
                self._hear(key.fileobj)  # type: ignore[arg-type]
        while not self.listener.accepted.empty():
            self._selector.register(self.listener.accepted.get(), selectors.EVENT_READ)
        self._dismiss_if_over()
        if time.monotonic() >= self._next_sign:
            self._next_sign = time.monotonic() + SIGN_SECONDS
            for connection, _ in self._met:
                with contextlib.suppress(OSError):  # who reads from it sees that it is gone
                    connection.send(messages.Alive())

    def _hear(self, connection: NonBlockingConnection) -> None:
        try:
            connection.read()
            if any(connection is known for known, _ in self._met):
                return  # heartbeats, for later
            hello = connection.inbox.take()
        except (EOFError, OSError, BadMessageError) as error:
            log.warning("A worker left before there was a run for it: %s", error or "without a word")
            self._selector.unregister(connection)
            connection.close()
            self._met = [(known, said) for known, said in self._met if known is not connection]
            return
        if isinstance(hello, messages.Returned) and self.run is not None and hello.run != self.run:
            self._send_away(connection)
        elif hello is not None:
            if isinstance(hello, messages.Hello) and self.enrolled is not None:
                with contextlib.suppress(OSError):  # who reads from it sees that it is gone
                    connection.send(self.enrolled)
            self._met.append((connection, hello))

    def _send_away(self, connection: NonBlockingConnection) -> None:
        """There is nothing to which this worker could return."""
        with contextlib.suppress(OSError):  # it has gone by itself
            connection.send(messages.Stop(StopReason.LOST))
            connection.flush_within(_REFUSAL_SECONDS)
        self._selector.unregister(connection)
        connection.close()

    def _dismiss_if_over(self) -> None:
        """Lets everybody go: the runs for which they came have finished."""
        if not self.is_over:
            return
        for connection, _ in self._met:
            with contextlib.suppress(OSError):  # it has gone by itself
                connection.send(messages.Stop(StopReason.FINISHED))
                connection.flush_within(_REFUSAL_SECONDS)
            self._selector.unregister(connection)
            connection.close()
        self._met = []

    def _refuse(
        self, connection: NonBlockingConnection, hello: messages.Hello | messages.Returned, why: messages.Unfit
    ) -> None:
        log.warning("Refused a worker (process %d of %s): %s", hello.pid, hello.node or "a machine", why.why)
        with contextlib.suppress(OSError):  # it has gone by itself
            connection.send(why)
            connection.flush_within(_REFUSAL_SECONDS)
        if any(key.fileobj is connection for key in self._selector.get_map().values()):
            self._selector.unregister(connection)
        connection.close()
