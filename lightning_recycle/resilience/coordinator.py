"""The coordinator: the one authority over membership, in a thread of the supervisor.

A thin shell around the pure state machine of :mod:`~lightning_recycle.resilience.membership`: it turns connections,
process exits and clocks into events, and carries out the commands. It plans, too: every generation's schedule is made
here, so that no two workers can disagree about it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from typing import Any, Protocol

from lightning_recycle.planning.grid import Grid
from lightning_recycle.planning.profile import Profile
from lightning_recycle.planning.schedule import Schedule
from lightning_recycle.resilience import membership
from lightning_recycle.resilience.connection import MessageConnection
from lightning_recycle.resilience.membership import (
    Failed,
    GraceElapsed,
    Joined,
    Lost,
    Outcome,
    Record,
    Send,
    StartGrace,
)
from lightning_recycle.resilience.messages import (
    Applied,
    Broken,
    Connected,
    Crash,
    Event,
    FaultInjected,
    Heartbeat,
    Hello,
    Profiled,
    Publish,
    Regroup,
    Report,
    Resume,
    Stop,
)
from lightning_recycle.resilience.replanning import RunPlanner

__all__ = ["Coordinator", "CoordinatorOptions", "WorkerProcess"]

log = logging.getLogger(__name__)

_STEPS_BEFORE_PLANNING_AHEAD = 3  # the first ones are slower than the rest
_TICK = 0.1  # seconds between looks at the clock; everything else is event-driven


class WorkerProcess(Protocol):
    """What the coordinator must know of a local worker process."""

    @property
    def sentinel(self) -> int: ...

    def describe_exit(self, timeout: float) -> str | None:
        """Returns how the process ended, or None if it is still alive after ``timeout`` seconds."""

    def kill(self) -> None: ...


@dataclass(frozen=True)
class CoordinatorOptions:
    """Bounds of the control plane, in seconds.

    Args:
        heartbeat_timeout: silence after which a worker is declared dead.
        start_timeout: for all workers to join.
        report_timeout: for all survivors to stop and report; longer than any single operation.
        grace: between a broken connection and the regrouping of workers that are all alive.
    """

    heartbeat_timeout: float = 5.0
    start_timeout: float = 300.0
    report_timeout: float = 300.0
    grace: float = 0.5


class Coordinator:
    """Serves the control plane of one run.

    Args:
        grid: the positions of the run.
        planner: makes the schedules.
        options: time bounds.
        host: the interface to listen on.
        on_profile: called, in the coordinator's thread, with the profile of the model once all stages have measured.

    Use: create, start the workers with :attr:`address` and :attr:`authkey`, then :meth:`start`, :meth:`wait`,
    :meth:`close`.
    """

    def __init__(
        self,
        grid: Grid,
        planner: RunPlanner,
        options: CoordinatorOptions | None = None,
        host: str = "127.0.0.1",
        on_profile: Callable[[Profile], None] = lambda _: None,
    ) -> None:
        self.grid = grid
        self.options = options or CoordinatorOptions()
        self.authkey = os.urandom(32)
        self.history: list[Event] = []
        self.schedules: list[Schedule] = []
        self.operation_seconds: dict[int, dict[str, float]] = {}
        self._planner = planner
        self._on_profile = on_profile
        self._profiled: dict[int, Profiled] = {}
        self._steps_in_generation = 0
        self._listener = socket.create_server((host, 0), backlog=max(16, grid.num_workers))
        self._accepted: queue.SimpleQueue[MessageConnection] = queue.SimpleQueue()
        self._wake_reader, self._wake_writer = os.pipe()
        self._wake_lock = threading.Lock()
        self._state = membership.initial_state(grid)
        self._connections: dict[int, MessageConnection] = {}
        self._selector = selectors.DefaultSelector()
        self._processes: dict[int, WorkerProcess] = {}
        self._last_heard: dict[int, float] = {}
        self._connected: set[int] = set()
        self._have_reported: set[int] = set()  # ever; before its first report a worker sets up, which may take long
        self._injected: dict[int, FaultInjected] = {}
        self._failure_time: float | None = None
        self._recovering = False  # survivors have agreed where to go on, and have not committed a step since
        self._last_step_time: float | None = None
        self._regroup_deadline: float | None = None
        self._graces: dict[int, float] = {}
        self._unreachable: list[int] = []
        self._done = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="recycle-coordinator", daemon=True)
        self._acceptor = threading.Thread(target=self._accept, name="recycle-acceptor", daemon=True)

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._listener.getsockname()[:2]
        return str(host), int(port)

    @property
    def roster(self) -> tuple[int, ...]:
        return self._state.roster

    def start(self, processes: Mapping[int, WorkerProcess]) -> None:
        """Begins to serve; ``processes`` are watched for their exit, by rank."""
        self._processes = dict(processes)
        self._regroup_deadline = time.monotonic() + self.options.start_timeout
        self._acceptor.start()
        self._thread.start()

    def wait(self, timeout: float | None = None) -> Outcome | None:
        """Waits for the end of the run; None if ``timeout`` seconds pass before."""
        self._done.wait(timeout)
        return self._state.outcome

    def close(self) -> None:
        """Ends the service and closes every connection."""
        with self._wake_lock:
            self._closing = True
            os.write(self._wake_writer, b"x")
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)
        self._planner.close()
        self._retime_newest()
        with contextlib.suppress(OSError):  # not connected, says the system, and ends the accept all the same
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        if self._acceptor.is_alive():
            self._acceptor.join(timeout=5.0)
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, MessageConnection):
                key.fileobj.close()
        self._selector.close()
        for fd in (self._wake_reader, self._wake_writer):
            os.close(fd)

    # ------------------------------------------------------------------ threads

    def _accept(self) -> None:
        while not self._closing:
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if not self._closing:
                    log.warning("The coordinator could not accept a connection: %s", error)
                    time.sleep(_TICK)
                continue
            threading.Thread(target=self._welcome, args=(sock,), name="recycle-welcome", daemon=True).start()

    def _welcome(self, sock: socket.socket) -> None:
        """Lets in whoever knows the key; in a thread of its own, for a stranger may say nothing."""
        connection = MessageConnection(Connection(sock.detach()))
        connection.set_timeout(self.options.heartbeat_timeout)
        try:
            connection.authenticate(self.authkey)
        except (AuthenticationError, EOFError, OSError) as error:
            log.warning("The coordinator refused a connection: %s", error)
            connection.close()
            return
        with self._wake_lock:
            if self._closing:
                connection.close()
                return
            self._accepted.put(connection)
            os.write(self._wake_writer, b"x")

    def _serve(self) -> None:
        try:
            self._selector.register(self._wake_reader, selectors.EVENT_READ, self._on_wake)
            for rank, process in self._processes.items():
                self._selector.register(process.sentinel, selectors.EVENT_READ, partial(self._on_exit, rank))
            last_tick = time.monotonic()
            while not self._closing:
                for key, _ in self._selector.select(_TICK):
                    if self._selector.get_map().get(key.fileobj) is not None:  # not closed by an earlier one
                        key.data()
                now = time.monotonic()
                if now - last_tick > 10 * _TICK:  # this process itself was stopped: nobody's silence counts
                    self._last_heard = dict.fromkeys(self._last_heard, now)
                last_tick = now
                self._on_tick(now)
        except Exception as error:
            log.exception("The coordinator failed")
            self._finish(Failed(f"The coordinator failed: {type(error).__name__}: {error}"))

    # ------------------------------------------------------------------ inputs

    def _on_wake(self) -> None:
        os.read(self._wake_reader, 4096)
        while not self._accepted.empty():
            stranger = self._accepted.get()
            self._selector.register(stranger, selectors.EVENT_READ, partial(self._on_stranger, stranger))

    def _on_stranger(self, connection: MessageConnection) -> None:
        """The first message of a connection: it must be a worker's hello."""
        self._selector.unregister(connection)
        try:
            hello = connection.receive()
        except (EOFError, OSError):
            connection.close()
            return
        if not isinstance(hello, Hello) or hello.rank not in self._state.live or hello.rank in self._connections:
            log.warning("Refused a connection that began with %r", hello)
            connection.close()
            return
        if self._state.outcome is not None:
            with contextlib.suppress(OSError):  # it went away by itself
                connection.send(Stop(type(self._state.outcome).__name__))
        self._connections[hello.rank] = connection
        self._last_heard[hello.rank] = time.monotonic()
        self._selector.register(connection, selectors.EVENT_READ, partial(self._on_readable, hello.rank))
        self._handle(Joined(hello.rank))

    def _on_readable(self, rank: int) -> None:
        try:
            message = self._connections[rank].receive()
        except (EOFError, OSError):
            self._evict(rank, self._describe_exit(rank) or "its connection to the coordinator broke")
            return
        self._on_message(rank, message)

    def _on_message(self, rank: int, message: Any) -> None:
        match message:
            case Heartbeat():
                self._last_heard[rank] = time.monotonic()
                return
            case Connected():
                self._on_connected(message)
                return
            case Profiled():
                self._collect_profile(message)
                return
            case Publish():
                if message.generation == self._state.generation:
                    self._send(Send(tuple(r for r in self._state.roster if r != rank), message))
                    self._evict_unreachable()
                return
            case FaultInjected():
                self._injected[rank] = message
                return
            case Report():
                self._have_reported.add(rank)
            case Applied():
                if rank == membership.stage_leads(self.grid, self._state.roster).get(self.grid.worker(rank).stage):
                    self.operation_seconds[self.grid.worker(rank).stage] = dict(message.operation_seconds)
            case Broken() | Crash():
                log.debug("Worker %s: %s", self.grid.worker(rank), message)
        self._handle(message)

    def _collect_profile(self, message: Profiled) -> None:
        self._profiled.setdefault(self.grid.worker(message.rank).stage, message)
        if len(self._profiled) == self.grid.stages:
            parts = [self._profiled[stage] for stage in range(self.grid.stages)]
            links = [part for part in parts if part.bandwidth]
            self._on_profile(
                Profile(
                    stages=tuple(part.stage for part in parts),
                    latency=max((link.latency for link in links), default=0.0),
                    bandwidth=min((link.bandwidth for link in links), default=0.0),
                    steps=min(part.steps for part in parts),
                )
            )
            self._profiled = {}

    def _on_exit(self, rank: int) -> None:
        cause = self._describe_exit(rank)
        if cause is None:
            return
        self._selector.unregister(self._processes[rank].sentinel)
        connection = self._connections.get(rank)
        if connection is not None:
            # What it said before it died; its last words may be the exception that ended it.
            with contextlib.suppress(EOFError, OSError), selectors.DefaultSelector() as unread:
                unread.register(connection, selectors.EVENT_READ)
                while unread.select(0):
                    self._on_message(rank, connection.receive())
        self._disconnect(rank)
        self._handle(Lost(rank, cause))

    def _disconnect(self, rank: int) -> None:
        connection = self._connections.pop(rank, None)
        if connection is not None:
            self._selector.unregister(connection)
            connection.close()

    def _describe_exit(self, rank: int) -> str | None:
        process = self._processes.get(rank)
        return None if process is None else process.describe_exit(timeout=0.02)

    def _on_tick(self, now: float) -> None:
        for rank in self._state.roster:
            heard = self._last_heard.get(rank)
            if heard is not None and now - heard > self.options.heartbeat_timeout:
                self._evict(rank, f"it was silent for more than {self.options.heartbeat_timeout:g} s")
        for generation, deadline in list(self._graces.items()):
            if now > deadline:
                del self._graces[generation]
                self._handle(GraceElapsed(generation))
        if self._regroup_deadline is not None and now > self._regroup_deadline:
            self._regroup_deadline = None
            state = self._state
            if state.generation < 0:
                for rank in sorted(state.live - state.joined):
                    self._evict(rank, f"it did not start within {self.options.start_timeout:g} s")
            elif state.regrouping:
                for rank in sorted(self._have_reported & state.live - state.reports.keys()):
                    self._evict(rank, f"it did not stop for a regroup within {self.options.report_timeout:g} s")

    def _evict(self, rank: int, cause: str) -> None:
        """Declares a worker dead and makes it so: an evicted worker must not come back and write."""
        if rank in self._processes:
            self._processes[rank].kill()
        self._disconnect(rank)
        self._handle(Lost(rank, cause))

    # ------------------------------------------------------------------ commands

    def _handle(self, event: membership.Event) -> None:
        self._apply(event)
        self._evict_unreachable()

    def _evict_unreachable(self) -> None:
        while self._unreachable:
            rank = self._unreachable.pop()
            self._evict(rank, self._describe_exit(rank) or "it took no message")

    def _apply(self, event: membership.Event) -> None:
        self._state, commands = membership.transition(self._state, event)
        for command in commands:
            if isinstance(command, Send):
                self._send(command)
            elif isinstance(command, StartGrace):
                self._graces.setdefault(command.generation, time.monotonic() + self.options.grace)
            elif isinstance(command, Record):
                self._record(command)
            else:
                self._finish(command)

    def _send(self, command: Send) -> None:
        message = command.message
        if isinstance(message, Resume):
            schedule = self._schedule()
            message = replace(message, schedule=schedule)
            self._regroup_deadline = None
            self._connected = set()
        elif isinstance(message, Regroup):
            self._regroup_deadline = time.monotonic() + self.options.report_timeout
        data = MessageConnection.encode(message)
        # Stage 0 first: a step begins there, and with many workers on few cores the last to hear is late.
        for rank in sorted(command.ranks, key=lambda rank: (self.grid.worker(rank).stage, rank)):
            connection = self._connections.get(rank)
            if connection is None:
                continue
            try:
                connection.send_encoded(data)
            except OSError:  # gone, or stopped with a full buffer: a message cut short cannot be completed later
                self._unreachable.append(rank)

    def _schedule(self) -> Schedule:
        failed = frozenset(
            self.grid.worker(rank) for rank in range(self.grid.num_workers) if rank not in self._state.live
        )
        self._retime_newest()
        schedule = self._planner.plan(failed, self.operation_seconds)
        self.schedules.append(schedule)
        self._steps_in_generation = 0
        return schedule

    def _retime_newest(self) -> None:
        """Gives the schedule of the generation that ends the times that were measured in it."""
        if self.schedules and self._steps_in_generation:
            self.schedules[-1] = self._planner.retime(self.schedules[-1], self.operation_seconds)

    def _finish(self, outcome: Outcome) -> None:
        if self._state.outcome is None:
            self._state = replace(self._state, outcome=outcome)
        # Also when all went well: a worker may be waiting for a generation that nobody needs any more.
        for connection in self._connections.values():
            with contextlib.suppress(OSError):  # the run is ending; who is gone needs no message
                connection.send(Stop(type(outcome).__name__))
        self._done.set()

    # ------------------------------------------------------------------ history

    def _record(self, record: Record) -> None:
        now = time.time()
        details = dict(record.details)
        seconds: float | None = None
        worker: tuple[int, int] | None = None
        if record.rank is not None:
            position = self.grid.worker(record.rank)
            worker = (position.pipeline, position.stage)
        if record.kind == "failure":
            injected = self._injected.get(record.rank) if record.rank is not None else None
            died = injected.time if injected is not None else now
            seconds = now - died
            details["kind"] = injected.kind if injected is not None else "unknown"
            if injected is not None:
                details["operation"] = injected.operation
            if self._failure_time is None:
                self._failure_time = died
            log.warning(
                "Worker %s was lost at step %d: %s. Live workers: %d of %d.",
                position,
                record.step,
                details["cause"],
                len(self._state.live),
                self.grid.num_workers,
            )
        elif record.kind == "step":
            seconds = now - self._last_step_time if self._last_step_time is not None else None
            self._last_step_time = now
            self._steps_in_generation += 1
            if self._steps_in_generation == _STEPS_BEFORE_PLANNING_AHEAD:
                self._planner.plan_ahead(self.schedules[-1].failed, self.operation_seconds)
        elif record.kind == "resumed":
            if not self._last_step_time:
                self._planner.plan_ahead(self.schedules[-1].failed, self.operation_seconds)
            if self._failure_time is not None:
                seconds = now - self._failure_time
                self._recovering = True
            else:
                self._last_step_time = now
        self._append(Event(record.kind, now, self._state.generation, record.step, worker, seconds, details))
        if record.kind == "step" and self._recovering and self._failure_time is not None:
            self._recovering = False
            recovered = now - self._failure_time
            self._append(Event("recovered", now, self._state.generation, record.step, None, recovered))
            self._failure_time = None

    def _on_connected(self, message: Connected) -> None:
        if message.generation != self._state.generation:
            return
        self._connected.add(message.rank)
        if self._connected >= self._state.live:
            seconds = time.time() - self._failure_time if self._failure_time is not None else None
            roster = self._state.roster
            self._append(
                Event(
                    "regrouped", time.time(), message.generation, self._state.version, None, seconds, {"roster": roster}
                )
            )

    def _append(self, event: Event) -> None:
        self.history.append(event)
