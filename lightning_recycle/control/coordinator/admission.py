"""Admission of workers: the port where they come, and the decision about each.

Reception: the port is open as long as the process lives. A connection is a *stranger* until its first message. Between
two runs workers are kept, with signs of life, until a worker asks for the next one; a run takes them over and decides
about later ones (:meth:`Reception.serve`, :meth:`Reception.take_back`).

Admission: a worker with a position is admitted, one without waits as a spare, and one that returns needs its token in
the earlier coordinator's journal (:class:`Readmission`). Others get the reason, or are let go; lost workers learn of
it. Before the first generation only the workers' reported positions count.

Contract: one thread at a time. A bad first message costs its own connection alone. A missing member is given up like a
silent one, or at once if its process, on this machine, is gone.

Must not know: messages of members.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection
from enum import Enum
from functools import partial
from typing import Any, TypeAlias

from lightning_recycle.control.coordinator.worker_table import Vacancies, WorkerTable
from lightning_recycle.control.journal import Journal, revived_state
from lightning_recycle.control.network.connection import SIGN_SECONDS, BadMessageError, NonBlockingConnection
from lightning_recycle.control.network.listener import EventLoop, Listener
from lightning_recycle.control.options import CoordinatorOptions
from lightning_recycle.control.protocol import messages
from lightning_recycle.control.protocol.messages import Process, StopReason
from lightning_recycle.control.protocol.state import MembershipState, initial_state
from lightning_recycle.planning.grid import Grid
from lightning_recycle.processes import has_ended

log = logging.getLogger(__name__)

FAREWELL_SECONDS = 1.0
"""For a worker to take the reason why it is sent away."""

_LOOK_SECONDS = 0.2

FirstMessage: TypeAlias = messages.Hello | messages.Returned
"""The first message of a connection."""


class Reception:
    """Listening port of runs; keeps workers that connect while no run goes on.

    ``workers``: how many may connect at the same time. Raises ConfigurationError if the address cannot be listened at.

    Attributes:
        strangers: connections without a first message yet.
        greet: decides about a connection by its first message.
        on_wake: called in the thread of the loop when it was woken.
        is_over: whether there will be no further run: workers that come may end, successfully.
        run: the run whose workers may return; empty for none.
        enrolled: sent to newcomers at once, so that they may return; None if they may not.
    """

    def __init__(self, address: tuple[str, int], key: bytes, workers: int) -> None:
        self.key = key
        self.loop = EventLoop(self._on_wake)
        self.listener = Listener(address, key, workers, self.loop.wake)
        self.strangers: set[NonBlockingConnection] = set()
        self.greet: Callable[[NonBlockingConnection, FirstMessage], None] = self._keep
        self.on_wake: Callable[[], None] = _nothing
        self.is_over = False
        self.run = ""
        self.enrolled: messages.Enrolled | None = None
        self._callers: list[tuple[NonBlockingConnection, FirstMessage]] = []
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
        if isinstance(first, messages.Returned) and first.run != self.run:
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
        self._callers.append((connection, first))
        self.loop.watch(connection, partial(self._on_kept, connection))

    def _on_kept(self, connection: NonBlockingConnection) -> None:
        """Heartbeats, for later, or the end of a worker."""
        try:
            connection.read()
        except (EOFError, OSError) as error:
            log.warning("A worker left before there was a run for it: %s", error or "without a word")
            self._callers = [caller for caller in self._callers if caller[0] is not connection]
            self.loop.forget(connection)
            connection.close()

    def await_first(self) -> FirstMessage:
        """Waits for a worker while a further run is possible; returning workers go first."""
        while not self._callers:
            self.look()
        return next((first for _, first in self._callers if isinstance(first, messages.Returned)), self._callers[0][1])

    @property
    def has_met(self) -> bool:
        return bool(self._callers)

    @property
    def has_returned(self) -> bool:
        return any(isinstance(first, messages.Returned) for _, first in self._callers)

    def look(self) -> None:
        """Waits a moment for newcomers and their first messages, and sends signs of life."""
        self.loop.dispatch(self.loop.select(_LOOK_SECONDS))
        if self.is_over:  # the runs for which they came have finished
            self.send_away(messages.Stop(StopReason.FINISHED))
        if time.monotonic() >= self._next_sign:
            self._next_sign = time.monotonic() + SIGN_SECONDS
            for connection, _ in self._callers:
                with contextlib.suppress(OSError):  # who reads from it sees that it is gone
                    connection.send(messages.Alive())

    def send_away(self, why: messages.Stop | messages.Unfit) -> None:
        """Sends ``why`` to the kept workers, and forgets them."""
        callers, self._callers = self._callers, []
        for connection, first in callers:
            if isinstance(why, messages.Unfit):
                log.warning("Refused %s: %s", described(first), why.why)
            self.loop.forget(connection)
            connection.part(why, seconds=FAREWELL_SECONDS)

    # ------------------------------------------------------------------ a run

    def serve(self, greet: Callable[[NonBlockingConnection, FirstMessage], None], on_wake: Callable[[], None]) -> None:
        """A run takes over: it decides about the kept workers and all that come later."""
        self.greet, self.on_wake = greet, on_wake
        callers, self._callers = self._callers, []
        for connection, first in callers:
            self.loop.forget(connection)
            greet(connection, first)
        self.loop.wake()  # others may have come in between

    def take_back(self) -> None:
        """Takes the port back from a finished run; later workers wait for the next one."""
        self.greet, self.on_wake = self._keep, _nothing
        self.loop.close_connections(keep=self.strangers)
        self.loop.wake()

    def close(self) -> None:
        self.listener.close()
        self.loop.close()


def described(first: FirstMessage) -> str:
    """The sender of ``first``, in words."""
    return f"a worker (process {first.process.pid} of {first.process.node or 'a machine'})"


def _nothing() -> None: ...


_SHORT_FAREWELL_SECONDS = 0.1  # during a run, when many may return at once


class Admission:
    """Decides about each connection by its first message.

    ``admit`` lets a worker take its position, given rank, connection, process and whether it joins; ``readmit`` lets a
    worker return. ``vacancies`` keeps the spares. ``objection``: why a worker cannot take part; None if it can.
    ``readmission``: None if there was no earlier coordinator.

    Attributes:
        has_ended_before: whether the run had ended under an earlier coordinator: returning workers learn how.
    """

    def __init__(
        self,
        state: Callable[[], MembershipState],
        workers: WorkerTable,
        admit: Callable[[int, NonBlockingConnection, Process, bool], None],
        readmit: Callable[[NonBlockingConnection, messages.Returned, ReturnStanding], None],
        loop: EventLoop,
        vacancies: Vacancies,
        objection: Callable[[messages.Hello], messages.Unfit | None],
        readmission: Readmission | None,
    ) -> None:
        self.has_met = False
        self.has_ended_before = state().outcome is not None
        self._state, self._workers, self._admit, self._readmit = state, workers, admit, readmit
        self._loop, self._vacancies = loop, vacancies
        self._objection, self._readmission = objection, readmission

    def greet(self, connection: NonBlockingConnection, hello: FirstMessage) -> None:
        """Admits a worker that has said ``hello``, if it can be one of this run."""
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
        unfit = self._objection(hello)
        if unfit is not None:
            log.warning("Refused %s: %s", described(hello), unfit.why)
            connection.part(unfit, seconds=FAREWELL_SECONDS)
            return
        self.has_met = True
        outcome = self._state().outcome
        if outcome is not None:
            with contextlib.suppress(OSError):  # it is gone already
                connection.send(messages.Stop(StopReason.of(outcome)))
        if hello.rank is None:
            connection.inbox.expects = messages.FROM_SPARES
            self._vacancies.spares.append((connection, hello.process))
            self._loop.watch(connection, partial(self._on_spare, connection))
        else:
            self._admit(hello.rank, connection, hello.process, hello.joining)

    def _fits(self, hello: messages.Hello) -> bool:
        """Whether the position that a worker claims is free for it."""
        if hello.rank is None:
            return True
        if not 0 <= hello.rank < self._state().positions.num_workers or hello.rank in self._workers.connections:
            return False
        return (hello.rank in self._state().roster.live) is not hello.joining

    def _greet_returned(self, connection: NonBlockingConnection, returned: messages.Returned) -> None:
        """A worker that has lost its coordinator, or assumes so."""
        readmission, rank, state = self._readmission, returned.rank, self._state()
        if readmission is None:
            why = "this coordinator does not survive its end"
            self._send_off(connection, rank, why, messages.Stop(StopReason.LOST))
            return
        standing = readmission.judge(state, self._workers.connections.keys(), returned)
        if state.outcome is not None or standing in (ReturnStanding.LEFT, ReturnStanding.LOST):
            self._send_off(connection, rank, standing.value, *readmission.farewell(returned, standing))
            return
        self.has_met = True
        readmission.heard(time.monotonic())
        self._readmit(connection, returned, standing)

    def _send_off(self, connection: NonBlockingConnection, rank: int, why: str, *last_messages: Any) -> None:
        connection.part(*last_messages, seconds=_SHORT_FAREWELL_SECONDS)
        log.warning("Worker %s wants to return and has to end: %s.", self._state().positions.name(rank), why)

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


class ReturnStanding(Enum):
    """Standing of a worker that returns."""

    MEMBER = "it holds a position of the roster"
    STARTER = "it was given a position, and the training has not begun"
    CANDIDATE = "it was to join"
    LEFT = "it has left, as it asked"
    LOST = "it was given up, or is of another run"


class Readmission:
    """Judges workers that return to a restarted coordinator, by its journal."""

    def __init__(self, journal: Journal, grid: Grid, options: CoordinatorOptions, now: float, members: int = 1) -> None:
        self._journal = journal
        self._grid = grid
        self._members = members
        self._options = options
        self.enrolled = messages.Enrolled(journal.run)
        self._journaled_processes = dict(journal.processes)
        self._since = now  # or since the newest worker returned
        self._holds_until = float("inf") if journal.is_continued and self.state().generation.number < 0 else 0.0

    def state(self) -> MembershipState:
        """The state to begin with: that of the journal, if it has one."""
        written, retries = self._journal.kept, self._options.recovery.machine_error_retries
        if written is None:
            return initial_state(self._grid, retries, self._members)
        return revived_state(self._grid, written, retries, self._members)

    def judge(self, state: MembershipState, connected: Collection[int], returned: messages.Returned) -> ReturnStanding:
        """Standing of the sender of ``returned``, with these positions ``connected``."""
        rank = returned.rank
        if returned.run != self._journal.run or not 0 <= rank < state.positions.num_workers:
            return ReturnStanding.LOST
        is_free = rank not in connected
        if state.generation.number < 0:
            is_starter = is_free and rank in state.roster.live and returned.generation < 0
            return ReturnStanding.STARTER if is_starter else ReturnStanding.LOST
        if rank in state.roster.live:
            known = self._journaled_processes.get(rank)
            is_held = known is not None and known.token == returned.process.token
            is_it = state.returned is not None and is_free and is_held
            return ReturnStanding.MEMBER if is_it else ReturnStanding.LEFT if returned.leave else ReturnStanding.LOST
        if returned.leave:
            return ReturnStanding.LEFT
        was_to_join = returned.joining and returned.generation < 0
        return ReturnStanding.CANDIDATE if is_free and was_to_join else ReturnStanding.LOST

    def farewell(
        self, returned: messages.Returned, standing: ReturnStanding
    ) -> tuple[messages.Answer | messages.Stop, ...]:
        """Last words to a worker that cannot return: the run's outcome if it was there."""
        journal, kept = self._journal, self._journal.kept
        process = journal.processes.get(returned.rank) if returned.run == journal.run else None
        if kept is None or kept.over is None or process is None or process.token != returned.process.token:
            return (messages.Stop(StopReason.LEFT if standing is ReturnStanding.LEFT else StopReason.LOST),)
        answer, stop = kept.over.answer, messages.Stop(kept.over.reason)
        return (stop,) if answer is None or returned.next_collective > answer.number else (answer, stop)

    def heard(self, now: float) -> None:
        self._since = now

    def may_place(self, now: float) -> bool:
        """Whether spares may get positions: workers that have one report it first."""
        if self._holds_until == float("inf"):
            self._holds_until = now + self._options.heartbeat.timeout
        return now >= self._holds_until

    def late(self, now: float, state: MembershipState) -> dict[int, str]:
        """Workers that are not waited for any more, with the reason."""
        if state.returned is None:
            return {}
        options, late = self._options, {}
        returned = {rank for rank in state.returned if rank in state.roster.live - state.roster.joining}
        stages = {position.stage for position in state.positions.whole(returned)}
        for rank in sorted(state.roster.live - state.returned.keys()):
            has_peer = state.positions.stage(rank) in stages
            limit = options.heartbeat.timeout if has_peer else options.heartbeat.last_holder_timeout
            process = self._journaled_processes.get(rank)
            if process is not None and has_ended(process.pid, process.space):
                late[rank] = "its process ended while the coordinator was gone"
            elif now - self._since > limit:
                late[rank] = f"it did not return within {limit:g} s after the coordinator was started again"
        return late
