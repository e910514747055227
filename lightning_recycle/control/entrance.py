"""Who comes to a coordinator: strangers, workers, spares, and those who return to a coordinator that was started again.

Concept: whoever knows the key is a stranger until it has said what it is. A worker with a position is admitted; one
without waits as a spare; one that was here before returns, if :mod:`~lightning_recycle.control.readmission` knows it.
All others are told why not, or just let go.

Contract: used by the coordinator's thread. Whatever a stranger says costs it its connection, and nobody else.

Must not know: what those who are in say.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping
from functools import partial
from typing import Protocol

from lightning_recycle.control.connection import NonBlockingConnection
from lightning_recycle.control.event_loop import EventLoop
from lightning_recycle.control.journal import Journal, Process
from lightning_recycle.control.protocol import messages
from lightning_recycle.control.protocol.admission import objection_to_return
from lightning_recycle.control.protocol.encoding import BadMessageError
from lightning_recycle.control.protocol.messages import StopReason
from lightning_recycle.control.protocol.state import MembershipState
from lightning_recycle.control.readmission import Place, Readmission, describe
from lightning_recycle.control.reception import Reception
from lightning_recycle.control.vacancies import Vacancies
from lightning_recycle.planning.grid import Grid

__all__ = ["Entrance", "Inside"]

log = logging.getLogger(__name__)

_FAREWELL_SECONDS = 0.1  # for a worker that is let go to take the reason


class Inside(Protocol):
    """What the entrance leads to."""

    @property
    def state(self) -> MembershipState: ...

    @property
    def connections(self) -> Mapping[int, NonBlockingConnection]:
        """Of all workers with a position, by rank."""

    def admit(self, rank: int, connection: NonBlockingConnection, process: Process, joining: bool) -> None:
        """A worker takes its position."""

    def readmit(self, connection: NonBlockingConnection, returned: messages.Returned, place: Place) -> None:
        """A worker has returned to what it was."""

    def assign_again(self, rank: int, connection: NonBlockingConnection, hello: messages.Hello) -> None:
        """A worker was given a position by an earlier coordinator, and has not heard of it."""


class Entrance:
    """Greets whoever comes.

    Args:
        grid: the grid of the run.
        inside: who is in.
        loop: watches the connections.
        vacancies: keeps the spares.
        reception: judges workers by what the run is to be; None if all fit.
        journal: of earlier coordinators of the run; None if there can be none.
        readmission: judges those that return.

    Attributes:
        strangers: how many have not said yet what they are.
        has_met: whether a worker has been let in.
        has_ended_before: whether the run had ended before an earlier coordinator was killed: who returns is told how.
    """

    def __init__(
        self,
        grid: Grid,
        inside: Inside,
        loop: EventLoop,
        vacancies: Vacancies,
        reception: Reception | None = None,
        journal: Journal | None = None,
        readmission: Readmission | None = None,
    ) -> None:
        self.strangers = 0
        self.has_met = False
        self.has_ended_before = inside.state.outcome is not None
        self._grid, self._inside, self._loop, self._vacancies = grid, inside, loop, vacancies
        self._reception, self._journal, self._readmission = reception, journal, readmission
        self._has_new_spare = False

    def take_new_spare(self) -> bool:
        """Whether a spare has come since the last call."""
        came, self._has_new_spare = self._has_new_spare, False
        return came

    def open(self, stranger: NonBlockingConnection) -> None:
        """Waits for what ``stranger`` says."""
        self.strangers += 1
        self._loop.watch(stranger, partial(self._on_stranger, stranger))

    def _on_stranger(self, connection: NonBlockingConnection) -> None:
        """The first message of a connection: it must be a worker's hello."""
        try:
            connection.read()
            hello = connection.inbox.take()
        except (EOFError, OSError, BadMessageError) as error:
            log.warning("Refused a connection: %s", error or "it left without a word")
            self.strangers -= 1
            self._loop.forget(connection)
            connection.close()
            return
        if hello is None:  # a part of it
            return
        self.strangers -= 1
        self._loop.forget(connection)
        self.greet(connection, hello)

    def greet(self, connection: NonBlockingConnection, hello: messages.Hello | messages.Returned) -> None:
        """Lets a worker in that has said ``hello``, if it can be one of this run."""
        if self._readmission is not None:
            with contextlib.suppress(OSError):  # whoever reads from it sees that it is gone
                connection.send(self._readmission.enrolled)
        if isinstance(hello, messages.Returned):
            self._greet_returned(connection, hello)
            return
        if self.has_ended_before:
            connection.close()  # it waits for the next run, which begins in a moment
            return
        if not self._fits(hello):
            log.warning("Refused a connection that began with %r", hello)
            connection.close()
            return
        if self._reception is not None and not self._reception.suits(connection, hello):
            return
        self.has_met = True
        outcome = self._inside.state.outcome
        if outcome is not None:
            with contextlib.suppress(OSError):  # it is gone already
                connection.send(messages.Stop(StopReason.of(outcome)))
        rank = None if self._readmission is None else self._readmission.position(self._inside.state, hello)
        if self._readmission is not None and rank is not None and rank not in self._inside.connections:
            self._readmission.heard(time.monotonic())
            self._inside.assign_again(rank, connection, hello)
        elif hello.rank is None:
            connection.inbox.expects = messages.FROM_SPARES
            self._vacancies.spares.append((connection, describe(hello)))
            self._loop.watch(connection, partial(self._on_spare, connection))
            self._has_new_spare = True
        else:
            self._inside.admit(hello.rank, connection, describe(hello), hello.joining)

    def _fits(self, hello: messages.Hello) -> bool:
        if hello.rank is None:
            return True
        if not 0 <= hello.rank < self._grid.num_workers or hello.rank in self._inside.connections:
            return False
        return (hello.rank in self._inside.state.live) is not hello.joining

    def _greet_returned(self, connection: NonBlockingConnection, returned: messages.Returned) -> None:
        """A worker that has lost its coordinator, or thinks so."""
        readmission, rank, state = self._readmission, returned.rank, self._inside.state
        place, why = Place.LOST, "this coordinator does not survive its end" if readmission is None else None
        if readmission is not None:
            why = objection_to_return(self._grid, returned)
            if why is None:
                place = readmission.judge(state, self._inside.connections.keys(), returned)
        if readmission is None or state.outcome is not None or place in (Place.LEFT, Place.LOST):
            self._dismiss(connection, returned, place)
            log.warning("Worker at rank %d wants to return and is told to end: %s.", rank, why or place.value)
            return
        self.has_met = True
        readmission.heard(time.monotonic())
        self._inside.readmit(connection, returned, place)

    def _dismiss(self, connection: NonBlockingConnection, returned: messages.Returned, place: Place) -> None:
        """Tells a worker that it has nothing to return to; one that was there at the end of the run, how it ended."""
        journal = self._journal
        over = None if journal is None or journal.kept is None else journal.kept.over
        reason, last = StopReason.LEFT if place is Place.LEFT else StopReason.LOST, None
        if over is not None and journal is not None and returned.run == journal.run:
            held = journal.processes.get(returned.rank)
            if held is not None and held.token == returned.token:
                reason, last = over.reason, over.answer
        with contextlib.suppress(OSError):  # it is gone already
            if last is not None and returned.next_collective <= last.number:
                connection.send(last)
            connection.send(messages.Stop(reason))
            connection.flush_within(_FAREWELL_SECONDS)
        connection.close()

    def _on_spare(self, connection: NonBlockingConnection) -> None:
        """A worker without a position only shows that it lives, or that it is gone."""
        try:
            connection.read()
            while connection.inbox.take() is not None:
                pass
        except (EOFError, OSError, BadMessageError) as error:
            if isinstance(error, BadMessageError):
                log.warning("Closed the connection of a spare: %s.", error)
            self._loop.forget(connection)
            self._vacancies.forget_spare(connection)
            connection.close()
