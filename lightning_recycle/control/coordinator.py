"""The coordinator: the one authority over membership, in a thread of the supervisor.

A thin shell around the pure state machine of :mod:`~lightning_recycle.control.protocol.membership`: it turns
connections, process exits and clocks into events, and carries out the commands. It asks
:mod:`~lightning_recycle.control.watch` who is silent or stuck, :mod:`~lightning_recycle.control.vacancies` who fills an
empty position, and :mod:`~lightning_recycle.control.plans.run_plans` what all run.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from lightning_recycle.control.connection import SIGN_SECONDS, NonBlockingConnection
from lightning_recycle.control.handshake import check_key
from lightning_recycle.control.history import Event, History
from lightning_recycle.control.listener import Listener
from lightning_recycle.control.options import CoordinatorOptions, WorkerProcess
from lightning_recycle.control.plans.replanning import RunPlanner
from lightning_recycle.control.plans.run_plans import RunPlans
from lightning_recycle.control.protocol import membership, messages
from lightning_recycle.control.protocol import state as protocol
from lightning_recycle.control.protocol.admission import objection
from lightning_recycle.control.protocol.encoding import BadMessageError, encode
from lightning_recycle.control.protocol.messages import StopReason
from lightning_recycle.control.rendezvous import Rendezvous
from lightning_recycle.control.starts import Starts
from lightning_recycle.control.vacancies import Vacancies
from lightning_recycle.control.watch import Watch
from lightning_recycle.planning.grid import Grid, Worker
from lightning_recycle.planning.profile import Profile
from lightning_recycle.planning.program import Programs
from lightning_recycle.planning.schedule import Schedule

__all__ = ["Coordinator", "CoordinatorOptions", "WorkerProcess"]

log = logging.getLogger(__name__)

_FROM_OTHER_THREADS = (messages.Heartbeat, messages.Leave, messages.Paused, messages.Publish, messages.LookUp)
_PUBLISHED_BYTES = 4 << 20  # that a worker may publish in a generation
_STOP_SECONDS = 1.0  # for the loop to end; it may be telling the workers its last words
_TICK = 0.1  # seconds between two looks at the clock; everything else is event-driven
_REVIEW_SECONDS = 0.0004  # between two looks at all workers, for each; a look at one takes a thirtieth of that
_LAST_WORDS_SECONDS = 3.0  # at the end, for what the workers have not taken yet


class Coordinator:
    """Serves the control plane of one run.

    Args:
        grid: the grid of the run.
        planner: makes the schedules.
        options: time bounds, and how lost workers are replaced.
        host: the interface to listen on.
        port: the port to listen on; 0 for a free one.
        authkey: the key that workers must know, at least 16 bytes; random by default.
        on_profile: called in the coordinator's thread with the model's profile once all stages have measured.
        start_worker: starts a replacement for a rank, given its incarnation and the rank whose device it runs on; None
            if there are no replacements.
        setup: passed, unread, with its position to a worker that was started by hand.

    Use: create, start the workers with :attr:`address` and :attr:`authkey`, then :meth:`start`, :meth:`wait`,
    :meth:`close`.
    """

    def __init__(
        self,
        grid: Grid,
        planner: RunPlanner,
        options: CoordinatorOptions | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        authkey: bytes | None = None,
        on_profile: Callable[[Profile], None] = lambda _: None,
        start_worker: Callable[[int, int, int], WorkerProcess] | None = None,
        setup: messages.Payload | None = None,
    ) -> None:
        self.grid = grid
        self.options = options or CoordinatorOptions()
        self.authkey = os.urandom(32) if authkey is None else check_key(authkey, "authkey")
        self._history = History(grid)
        self._plans = RunPlans(grid, planner, self.options.drift, on_profile, self._wake)
        if self._plans.may_change:
            self._history.counters["replans"] = 0.0
        self._setup = setup
        self._wake_reader, self._wake_writer = os.pipe()
        self._wake_lock = threading.Lock()
        self._listener = Listener((host, port), self.authkey, grid.num_workers, self._wake)
        self._state = protocol.initial_state(grid, self.options.machine_error_retries)
        self._connections: dict[int, NonBlockingConnection] = {}
        self._pids: dict[NonBlockingConnection, int] = {}  # of the spares
        self._unread: list[int] = []  # whose inbox may hold messages that came before they had a position
        self._selector = selectors.DefaultSelector()
        self._processes: dict[int, WorkerProcess] = {}
        self._watch = Watch(grid, self.options)
        self._starts = Starts(grid)
        self._rendezvous = Rendezvous()
        self._shown: set[int] = set()  # were asked where they are, and are given up at the next tick
        self._vacancies = Vacancies(self.options, start_worker, self._wake, grid.stages)
        self._connected: set[int] = set()
        self._graces: dict[int, tuple[float, str]] = {}
        self._unreachable: list[int] = []  # could not be sent a message
        self._to_evict: list[protocol.Evict] = []
        self._next_review = 0.0
        self._review_seconds = max(_TICK, grid.num_workers * _REVIEW_SECONDS)
        self._fills = False  # whether a vacancy may be filled, or a spare be placed
        self._filled = self._state.live  # the workers when that was last tried
        self._order = sorted(range(grid.num_workers), key=lambda rank: (grid.worker(rank).stage, rank))
        self._next_sign = time.monotonic() + SIGN_SECONDS
        self._done = threading.Event()
        self._closing = False
        self._end_wanted = False
        self._thread = threading.Thread(target=self._serve, name="recycle-coordinator", daemon=True)

    @property
    def address(self) -> tuple[str, int]:
        return self._listener.address

    @property
    def roster(self) -> tuple[int, ...]:
        return self._state.roster

    @property
    def history(self) -> list[Event]:
        return self._history.events

    @property
    def schedules(self) -> list[Schedule]:
        return self._plans.schedules

    def start(self, processes: Mapping[int, WorkerProcess]) -> None:
        """Begins to serve and watches ``processes``, by rank, for their exit. Workers started by hand take positions
        without a process.
        """
        self._processes = dict(processes)
        for rank in processes:
            self._starts.began(rank, time.monotonic())
        if processes:
            self._watch.begin_start(time.monotonic())
        self._listener.start()
        self._thread.start()

    def wait(self, timeout: float | None = None) -> protocol.Outcome | None:
        """Waits for the end of the run; None if ``timeout`` seconds pass first."""
        self._done.wait(timeout)
        return self._state.outcome

    def end_at_boundary(self) -> None:
        """Asks the workers to end after the step that they are at, once they have saved what is wanted; see
        :meth:`wait`. Callable from any thread, but not from a signal handler.
        """
        self._end_wanted = True
        self._wake()

    def stop(self, patience: float = _STOP_SECONDS) -> None:
        """Stops serving: from now on the end of a worker is no loss, and nobody replaces it. The connections stay."""
        self._closing = True
        self._vacancies.stop()
        self._wake()
        if self._thread.is_alive():
            self._thread.join(patience)

    def close(self) -> None:
        """Stops serving and closes every connection."""
        self.stop(patience=_LAST_WORDS_SECONDS + 5.0)
        self._plans.close()
        self._listener.close()
        self._vacancies.close()
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, NonBlockingConnection):
                key.fileobj.close()
        self._selector.close()
        with self._wake_lock:
            for fd in (self._wake_reader, self._wake_writer):
                os.close(fd)
            self._wake_writer = -1

    # ------------------------------------------------------------------ the loop

    def _wake(self) -> None:
        """Wakes the loop to look at what other threads have for it."""
        with self._wake_lock:
            if self._wake_writer >= 0:
                os.write(self._wake_writer, b"x")

    def _serve(self) -> None:
        try:
            self._selector.register(self._wake_reader, selectors.EVENT_READ, self._on_wake)
            for rank, process in self._processes.items():
                self._watch_exit(rank, process)
            last_tick = time.monotonic()
            while not self._closing:
                for key, events in self._selector.select(_TICK):
                    if not self._is_registered(key):
                        continue
                    if events & selectors.EVENT_WRITE:
                        self._on_writable(key)
                        if not self._is_registered(key):
                            continue
                    if events & selectors.EVENT_READ:
                        key.data()
                now = time.monotonic()
                if now - last_tick > 10 * _TICK:  # this process itself was suspended: nobody's silence counts
                    self._watch.forgive(now)
                    for connection in self._connections.values():
                        connection.forgive(now)
                last_tick = now
                self._on_tick(now)
                while self._unread:
                    self._on_messages(self._unread.pop())
            self._say_last_words()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Ends the run for an error of the coordinator itself."""
        log.error("The coordinator failed", exc_info=error)
        self._finish(protocol.Failed(f"The coordinator failed: {type(error).__name__}: {error}"))

    def _is_registered(self, key: selectors.SelectorKey) -> bool:
        """Whether what an event is about has not been closed, or replaced, by an earlier one."""
        found = self._selector.get_map().get(key.fd)
        return found is not None and (found.fileobj, found.data) == (key.fileobj, key.data)

    def _on_tick(self, now: float) -> None:
        if self._state.outcome is not None:
            return
        if now >= self._next_review:  # not after every message: it looks at all workers
            self._next_review = now + self._review_seconds
            self._give_up_late(now)
            self._review(now)
            self._fills = True
        if now >= self._next_sign:
            self._next_sign = now + SIGN_SECONDS
            self._tell_everybody(messages.Alive())
        for generation, (deadline, reason) in list(self._graces.items()):
            if now > deadline:
                del self._graces[generation]
                self._handle(protocol.GraceElapsed(generation, reason))
        if self._fills or self._state.live is not self._filled:
            self._fills, self._filled = False, self._state.live
            self._fill_vacancies(now)

    def _give_up_late(self, now: float) -> None:
        """Evicts who is not where it should be by now; one that is late to connect first shows where it is."""
        for rank, cause in (self._watch.late(now, self._state) | self._watch.late_candidates(now)).items():
            self._evict(rank, cause)
        for rank, cause in self._starts.late(now, self._connections.keys()).items():
            if rank in self._shown:
                self._evict(rank, cause)
            else:
                self._shown.add(rank)
                self._processes[rank].show_stack()

    def _review(self, now: float) -> None:
        """Looks at who is silent or makes no progress, and does what follows."""
        seconds = self._plans.operation_seconds
        stalled = {rank: connection.stalled(now) for rank, connection in self._connections.items()}
        ruling = self._watch.review(now, self._state, stalled, seconds)
        for rank, waited in ruling.waits.items():
            self._history.suspect(rank, waited, self._state)
        for rank, lasted in ruling.cleared.items():
            self._history.clear(rank, lasted, self._state)
        for rank, given_up in ruling.evict.items():
            self._evict(rank, given_up.cause, {"seconds": given_up.seconds, "limit": given_up.limit})
        if self._watch.everybody_waits(now, self._state, seconds):
            reason = "a message was lost: all wait for each other, and nobody works."
            self._handle(protocol.GraceElapsed(self._state.generation, reason))

    # ------------------------------------------------------------------ workers come and go

    def _watch_exit(self, rank: int, process: WorkerProcess) -> None:
        self._selector.register(process.sentinel, selectors.EVENT_READ, partial(self._on_exit, rank))

    def _on_wake(self) -> None:
        os.read(self._wake_reader, 4096)
        while not self._listener.accepted.empty():
            stranger = self._listener.accepted.get()
            self._selector.register(stranger, selectors.EVENT_READ, partial(self._on_stranger, stranger))
        for rank, process in self._vacancies.take_started():
            if process is None:
                self._candidate_gone(rank)
            else:
                self._processes[rank] = process
                if rank not in self._connections:  # it may have been quicker than this thread
                    self._starts.began(rank, time.monotonic())
                self._watch_exit(rank, process)
        for plan in self._plans.better():
            self._handle(plan)
        if self._end_wanted:
            self._handle(protocol.EndWanted())

    def _on_stranger(self, connection: NonBlockingConnection) -> None:
        """The first message of a connection: it must be a worker's hello."""
        try:
            connection.read()
            hello = connection.inbox.take()
        except (EOFError, OSError, BadMessageError) as error:
            log.warning("Refused a connection: %s", error or "it left without a word")
            self._selector.unregister(connection)
            connection.close()
            return
        if hello is None:  # a part of it
            return
        self._selector.unregister(connection)
        if not self._fits(hello):
            log.warning("Refused a connection that began with %r", hello)
            connection.close()
            return
        if self._state.outcome is not None:
            with contextlib.suppress(OSError):  # it is gone already
                connection.send(messages.Stop(StopReason.of(self._state.outcome)))
        if hello.rank is None:
            connection.inbox.expects = messages.FROM_SPARES
            self._vacancies.spares.append((connection, hello.node))
            self._pids[connection] = hello.pid
            self._selector.register(connection, selectors.EVENT_READ, partial(self._on_spare, connection))
            self._fills = True
        else:
            self._history.introduce(hello.rank, hello.node, hello.pid)
            self._admit(hello.rank, connection, hello.joining)

    def _fits(self, hello: messages.Hello) -> bool:
        if hello.rank is None:
            return True
        if not 0 <= hello.rank < self.grid.num_workers or hello.rank in self._connections:
            return False
        return (hello.rank in self._state.live) is not hello.joining

    def _admit(self, rank: int, connection: NonBlockingConnection, joining: bool) -> None:
        connection.inbox.expects = messages.FROM_WORKERS
        self._connections[rank] = connection
        self._unread.append(rank)
        self._watch.heard(rank, time.monotonic())
        self._starts.connected(rank, time.monotonic())
        if joining:
            self._watch.expect(rank, time.monotonic())
        elif self._state.generation < 0:
            self._watch.begin_start(time.monotonic())
        self._selector.register(connection, selectors.EVENT_READ, partial(self._on_readable, rank))
        self._watch_unsent(connection)
        if not joining:
            self._handle(protocol.Joined(rank))

    def _on_spare(self, connection: NonBlockingConnection) -> None:
        """A worker without a position only shows that it lives, or that it is gone."""
        try:
            connection.read()
            while connection.inbox.take() is not None:
                pass
        except (EOFError, OSError, BadMessageError) as error:
            if isinstance(error, BadMessageError):
                log.warning("Closed the connection of a spare: %s.", error)
            self._selector.unregister(connection)
            self._vacancies.forget_spare(connection)
            self._pids.pop(connection, None)
            connection.close()

    def _place_spares(self) -> None:
        """Gives workers that were started by hand a position: of the first roster, or of a lost worker."""
        if not self._vacancies.spares:
            return
        joining = self._state.generation >= 0
        if joining:
            free = [rank for rank in self._state.vacant if not self._has_candidate(rank)]
        else:
            free = [r for r in sorted(self._state.live) if r not in self._processes and r not in self._connections]
        while placed := self._vacancies.place_spare(free):
            rank, connection, node = placed
            pid = self._pids.pop(connection)
            free.remove(rank)
            self._selector.unregister(connection)
            incarnation = self._vacancies.next_incarnation(rank) if joining else 0
            try:
                connection.send(self._assignment(rank, incarnation, joining))
            except OSError:
                self._vacancies.leave_node(rank)
                connection.close()
                continue
            self._history.introduce(rank, node, pid)
            self._admit(rank, connection, joining)

    def _assignment(self, rank: int, incarnation: int, joining: bool) -> messages.Assign:
        timeout = self.options.heartbeat_timeout
        return messages.Assign(rank, incarnation, joining, self.grid, timeout, self._setup)

    def _has_candidate(self, rank: int) -> bool:
        return rank in self._connections or rank in self._processes or self._vacancies.is_starting(rank)

    def _fill_vacancies(self, now: float) -> None:
        """Finds a worker for every empty position: a spare, a replacement, or a worker of another stage."""
        self._place_spares()
        if self._state.generation < 0:
            return
        for rank in self._state.vacant:
            if self._has_candidate(rank) or not self._vacancies.may_start(rank, now):
                continue
            if self.options.restart_workers:
                self._history.add("restarting", self._state, rank)
                self._vacancies.start(rank)
                self._watch.expect(rank, now)
            elif self._vacancies.may_move and not self._state.moves:
                mover = self._plans.propose_move(self._failed(), self.grid.worker(rank))
                if mover is not None:
                    self._handle(protocol.MovePlanned(rank, self.grid.rank(mover)))
                    self._vacancies.start(rank, on=self.grid.rank(mover))
                    self._watch.expect(rank, now)
                    return

    def _on_readable(self, rank: int) -> None:
        connection = self._connections[rank]
        try:
            connection.read()
        except (EOFError, OSError):
            self._gone(rank, self._describe_exit(rank) or "its connection to the coordinator broke")
            return
        self._on_messages(rank)

    def _on_messages(self, rank: int) -> None:
        """Handles what a worker's inbox holds. Whatever is wrong with a message costs its sender, and nobody else."""
        connection = self._connections.get(rank)
        try:
            while connection is not None and self._connections.get(rank) is connection:
                message = connection.inbox.take()
                if message is None:
                    return
                why = objection(self._state, rank, message)
                if why is not None:
                    raise BadMessageError(f"{type(message).__name__}: {why}")
                self._on_message(rank, message)
        except BadMessageError as error:
            log.warning("Closed the connection of worker %s: %s.", self.grid.worker(rank), error)
            self._gone(rank, f"it sent a message that no worker sends ({error})")
        except Exception as error:  # a defect of this package: the others go on, and the traceback says where it is
            log.exception("The coordinator could not handle a message of worker %s", self.grid.worker(rank))
            self._gone(rank, f"the coordinator could not handle its message ({type(error).__name__}: {error})")

    def _tell_everybody(self, message: Any) -> None:
        """Sends ``message`` to all workers, also to spares; one that is gone needs none."""
        frame = encode(message)
        for connection in [*self._connections.values(), *(spare for spare, _ in self._vacancies.spares)]:
            with contextlib.suppress(OSError):  # whoever reads from it sees that it is gone
                connection.send_frame(frame)
                self._watch_unsent(connection)

    def _on_writable(self, key: selectors.SelectorKey) -> None:
        """A worker takes messages again."""
        connection = key.fileobj
        assert isinstance(connection, NonBlockingConnection)
        with contextlib.suppress(OSError):  # whoever reads from it sees that it is gone
            connection.flush()
        self._watch_unsent(connection)

    def _watch_unsent(self, connection: NonBlockingConnection) -> None:
        """Waits for the moment when ``connection`` takes what it did not take at once."""
        key = self._selector.get_key(connection)
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent_since is not None else 0)
        if events != key.events:
            self._selector.modify(connection, events, key.data)

    def _say_last_words(self) -> None:
        """Lets the workers take what they have not taken yet: the answer with the results, and that the run is over."""
        deadline = time.monotonic() + _LAST_WORDS_SECONDS
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, NonBlockingConnection):
                with contextlib.suppress(OSError):  # the run is ending; a worker that is gone needs no message
                    key.fileobj.flush_within(max(0.0, deadline - time.monotonic()))

    def _on_exit(self, rank: int) -> None:
        cause = self._describe_exit(rank)
        if cause is None:
            return
        connection = self._connections.get(rank)
        if connection is not None:
            # What it said before it died; its last words may be the exception that ended it.
            with contextlib.suppress(EOFError, OSError):
                while self._connections.get(rank) is connection and connection.read():
                    self._on_messages(rank)
        self._gone(rank, cause)

    def _describe_exit(self, rank: int) -> str | None:
        process = self._processes.get(rank)
        return None if process is None else process.describe_exit(timeout=0.02)

    def _gone(self, rank: int, cause: str) -> None:
        """A worker or a candidate for a position is gone. Makes sure of it: it must not return and write."""
        process = self._processes.pop(rank, None)
        if process is not None:
            if process.sentinel in self._selector.get_map():
                self._selector.unregister(process.sentinel)
            process.kill()
            process.release()
        connection = self._connections.pop(rank, None)
        if connection is not None:
            self._selector.unregister(connection)
            connection.close()
        self._watch.forget(rank)
        self._starts.forget(rank)
        self._shown.discard(rank)
        self._vacancies.leave_node(rank)
        if rank in self._state.live:
            self._handle(protocol.Lost(rank, cause))
        elif process is not None or connection is not None:
            self._candidate_gone(rank)

    def _candidate_gone(self, rank: int) -> None:
        self._vacancies.failed(rank, time.monotonic())
        self._handle(protocol.CandidateLost(rank))

    def _evict(self, rank: int, cause: str, details: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Declares dead a worker that did not end by itself."""
        self._history.add("suspected", self._state, rank, {"cause": cause, **details})
        if rank in self._state.live:
            self._history.add("evicted", self._state, rank, {"cause": cause, **details})
        self._gone(rank, cause)

    def _dismiss(self, rank: int) -> None:
        """Dismisses a worker that leaves at a step boundary."""
        connection = self._connections.pop(rank, None)
        if connection is not None:
            self._selector.unregister(connection)
            with contextlib.suppress(OSError):  # it could not wait
                connection.send(messages.Stop(StopReason.LEFT))
                connection.flush_within(_TICK)
            connection.close()
        process = self._processes.pop(rank, None)
        if process is not None:
            self._selector.unregister(process.sentinel)
            process.release()
        self._watch.forget(rank)

    # ------------------------------------------------------------------ messages

    def _on_message(self, rank: int, message: Any) -> None:
        now = time.monotonic()
        self._watch.heard(rank, now)
        if not isinstance(message, _FROM_OTHER_THREADS):
            self._watch.acted(rank, now)
        match message:
            case messages.Heartbeat():
                self._watch.beat(rank, message, now)
                if not self._state.collectives:
                    return
            case messages.Connected():
                self._on_connected(message)
                return
            case messages.Profiled():
                self._plans.profiled(message)
                return
            case messages.Measured():
                self._plans.measured(message)
                return
            case messages.Publish():
                if self._rendezvous.published_bytes(rank) > _PUBLISHED_BYTES:
                    raise BadMessageError(f"it has published more than {_PUBLISHED_BYTES} bytes in a generation")
                self._answer(self._rendezvous.publish(message))
                return
            case messages.LookUp():
                self._answer(self._rendezvous.look_up(message))
                return
            case messages.FaultInjected():
                self._history.fault_injected(message)
                return
            case messages.Saved():
                self._history.add("saved", self._state, rank, {"path": message.path}, step=message.step)
                return
            case messages.Confirm():
                if rank in self._state.live:
                    self._send(protocol.Send((rank,), messages.Confirmed(message.number)))
                    self._evict_unreachable()
                return
            case messages.Report():
                self._watch.reported(rank)
            case messages.Ready():
                self._vacancies.succeeded(rank)
                self._watch.ready(rank)
            case messages.Leave() if rank not in self._state.live:  # it was about to join and has been told to end
                self._dismiss(rank)
                self._candidate_gone(rank)
                return
            case messages.Applied():
                self._watch.applied(rank)
                worker = self.grid.worker(rank)
                self._plans.applied(worker, message, rank == self._state.lead_of(worker.stage))
            case messages.Broken():
                log.debug("Worker %s: %s", self.grid.worker(rank), message)
            case messages.Raised():
                worker, text = self.grid.worker(rank), message.traceback.rstrip()
                log.warning("Worker %s raised an exception that may be a fault of its machine:\n%s", worker, text)
            case messages.Crash():
                log.debug("Worker %s: %s", self.grid.worker(rank), message)
                if message.fault:
                    self._gone(rank, message.summary)
                    return
        self._handle(message)

    def _answer(self, answers: Iterable[tuple[int, messages.Found]]) -> None:
        for rank, found in answers:
            self._send(protocol.Send((rank,), found))
        self._evict_unreachable()

    def _on_connected(self, message: messages.Connected) -> None:
        if message.generation != self._state.generation:
            return
        self._connected.add(message.rank)
        if self._connected >= self._state.live:
            self._history.connected(self._state)

    # ------------------------------------------------------------------ commands

    def _handle(self, event: protocol.MembershipEvent) -> None:
        self._apply(event)
        while self._to_evict:
            command = self._to_evict.pop(0)
            self._evict(command.rank, command.cause)
        self._evict_unreachable()

    def _evict_unreachable(self) -> None:
        while self._unreachable:
            rank = self._unreachable.pop()
            self._gone(rank, self._describe_exit(rank) or "it could not be sent a message")

    def _apply(self, event: protocol.MembershipEvent) -> None:
        self._state, commands = membership.transition(self._state, event)
        for command in commands:
            if isinstance(command, protocol.Send):
                self._send(command)
            elif isinstance(command, protocol.StartGrace):
                self._graces.setdefault(command.generation, (time.monotonic() + self.options.grace, command.reason))
            elif isinstance(command, protocol.Evict):
                self._to_evict.append(command)
            elif isinstance(command, protocol.Record):
                self._record(command)
            else:
                self._finish(command)

    def _send(self, command: protocol.Send) -> None:
        message, schedule = command.message, command.schedule
        if isinstance(message, messages.Resume):
            joining = [self.grid.worker(rank) for rank in self._state.joining]
            try:
                schedule = self._plans.begin_generation(self._failed(), joining, self._state.version)
            except Exception as error:  # whoever sent the last report is not to blame
                self._fail(error)
                return
            self._watch.end_regroup()
            self._connected = set()
        elif isinstance(message, messages.Boundary) and schedule is not None:
            self._plans.change(schedule, message.step)
        elif isinstance(message, messages.Regroup):
            self._watch.begin_regroup(time.monotonic())
            self._rendezvous.begin(message.generation)
        elif isinstance(message, messages.StepLoss):
            counters = {"live_workers": float(len(self._state.live)), **self._history.counters}
            newest = self._state.applied.get(self._state.leader, -1)
            message = replace(message, counters=counters, leader_applied=newest)
            self._history.add_loss(message.step, message.loss)
        programs = None if schedule is None else Programs(schedule)
        frame = encode(message) if programs is None else bytearray()
        # Stage 0 first: a step begins there, and with many workers on few cores the last to be told is late.
        told = frozenset(command.ranks)
        for rank in command.ranks if len(told) == 1 else (rank for rank in self._order if rank in told):
            connection = self._connections.get(rank)
            if connection is None:
                continue
            if programs is not None:
                frame = encode(replace(message, program=programs.of(self.grid.worker(rank))))
            try:
                connection.send_frame(frame)
            except OSError:
                self._unreachable.append(rank)
            else:
                self._watch_unsent(connection)

    def _failed(self) -> frozenset[Worker]:
        return frozenset(
            self.grid.worker(rank) for rank in range(self.grid.num_workers) if rank not in self._state.live
        )

    def _record(self, record: protocol.Record) -> None:
        if record.kind in ("failure", "moved"):
            self._vacancies.may_move = self.options.normalize and record.kind == "failure"
        if record.kind in ("left", "moved") and record.rank is not None:
            self._dismiss(record.rank)
        if record.kind == "resumed" and not self._history.has_steps:
            self._plans.plan_ahead()
        if record.kind == "resumed":
            record = replace(record, details={**record.details, "plan": self._plans.source})
        self._history.record(record, self._state)
        if record.kind == "step":
            self._plans.stepped(self._history.step_seconds)

    def _finish(self, outcome: protocol.Outcome) -> None:
        if self._state.outcome is None:
            self._state = replace(self._state, outcome=outcome)
        # Also after a success: a worker may be waiting for a generation that nobody needs any more.
        self._tell_everybody(messages.Stop(StopReason.of(outcome)))
        self._done.set()
