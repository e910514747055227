"""A worker's side of the control plane.

Three threads share one connection: the main thread asks and waits, a receiver takes what the coordinator says (and is
the watcher: it interrupts the data plane the moment a new generation is announced), a heartbeat thread says that the
process lives and what it does. When the coordinator is gone the worker ends: nobody else may tell it what to do.

A worker that joins a running training is alone at first: its control collectives are answered with its own part. When
it is set up it says so (:meth:`ControlClient.wait_to_enter`) and becomes a member with the next step boundary.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import pickle
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Client
from typing import Any, NoReturn, TypeVar

from lightning_recycle.control.connection import MessageConnection
from lightning_recycle.control.protocol.messages import (
    Activity,
    Answer,
    Arrive,
    Assign,
    AtBoundary,
    Boundary,
    Commit,
    Committed,
    Confirm,
    Confirmed,
    Heartbeat,
    Hello,
    Leave,
    Pause,
    Paused,
    Publish,
    Ready,
    Regroup,
    Report,
    Resume,
    StepLoss,
    Stop,
)
from lightning_recycle.control.protocol.state import Finished
from lightning_recycle.errors import ControlPlaneError

__all__ = ["EXIT_LOST_COORDINATOR", "EXIT_STOPPED", "LEFT", "ControlClient", "Interrupted"]

log = logging.getLogger(__name__)

EXIT_STOPPED = 75  # told to leave; BSD's EX_TEMPFAIL
EXIT_LOST_COORDINATOR = 69  # BSD's EX_UNAVAILABLE

LEFT = "Left"
"""Reason of the Stop that a worker gets when it leaves at a step boundary, as it asked."""

_LOOKUP_SECONDS = 0.1  # between two looks at whether the connecting was cancelled
_LOSS_TIMEOUT = 300.0  # seconds; it is sent before the gradients that lead to a step

_T = TypeVar("_T")


class Interrupted(Exception):
    """A new generation was announced: leave what you do and regroup."""


class ControlClient:
    """The connection of a worker to the coordinator.

    Args:
        rank: of the worker; None if the coordinator is to say (see :meth:`await_assignment`).
        address: (host, port) of the coordinator.
        authkey: the run's.
        heartbeat_interval: seconds between two signs of life.
        joining: whether the training may have begun.
        survives: whether the process goes on when the results of the run are delivered.

    ``activity`` is set by the main thread and read by the heartbeat. ``on_interrupt`` is called from the receiver
    thread when a generation is announced, with the number of the one that is over; ``regroup`` from the main thread
    while it waits in :meth:`arrive`.
    """

    def __init__(
        self,
        rank: int | None,
        address: tuple[str, int],
        authkey: bytes,
        heartbeat_interval: float,
        joining: bool = False,
        survives: bool = False,
    ) -> None:
        self.rank = -1 if rank is None else rank
        self.joining = joining
        self._survives = survives
        self.generation = -1
        self.leader = -1
        self.leader_applied = -1
        self.roster: tuple[int, ...] = ()
        self.counters: Mapping[str, float] = {}
        self.activity = Activity(0, "start", "", time.monotonic())
        self.on_interrupt: Callable[[int], None] | None = None
        self.regroup: Callable[[], None] | None = None
        self.heartbeat_interval = heartbeat_interval
        self._connection = MessageConnection(Client(address, authkey=authkey))
        self._changed = threading.Condition()
        self._announced: Regroup | None = None
        self._resume: Resume | None = None
        self._committed: Committed | None = None
        self._answers: dict[int, Answer] = {}
        self._losses: dict[int, StepLoss] = {}
        self._published: dict[str, bytes] = {}
        self.next_collective = 0
        self._assignment: Assign | None = None
        self._confirmed = -1
        self.begun = -1  # the newest step that the main thread has begun
        self._paused_generation = -1
        self._newest_pause = (-1, -1)  # generation and number
        self._boundary: int | None = None
        self._plans: list[Boundary] = []  # of this generation, not begun yet
        self._leaving = False
        self._main_thread = threading.main_thread().ident
        self._wake_heartbeat = threading.Event()
        self._wants_to_leave = False
        self.send(Hello(rank, os.getpid(), joining, os.environ.get("RECYCLE_NODE") or socket.gethostname()))
        for target in (self._receive, self._beat):
            threading.Thread(target=target, name=f"recycle-{target.__name__.strip('_')}", daemon=True).start()

    # ------------------------------------------------------------------ main thread

    def send(self, message: Any) -> None:
        try:
            self._connection.send(message)
        except OSError:
            self._exit("lost its connection to the coordinator", EXIT_LOST_COORDINATOR)

    @property
    def interrupted(self) -> bool:
        """Whether a generation newer than the one this worker has entered is announced."""
        return self._announced is not None and self._announced.generation > self.generation

    def enter_generation(self) -> Regroup:
        """Takes note of the newest announced generation and returns it."""
        with self._changed:
            assert self._announced is not None
            self.generation, self.roster = self._announced.generation, self._announced.roster
            self.leader = self._announced.leader
            self._published.clear()
            self._plans.clear()
            return self._announced

    def begin_step(self, step: int) -> Any:
        """Says that this worker begins ``step`` now, or waits at its beginning if the roster is about to change there.

        Returns:
            The schedule that all go over to with this step; None if they keep the one that they have.

        Raises:
            Interrupted: when a generation was announced.
        """
        said = False
        while True:
            with self._changed:
                if self.interrupted:
                    raise Interrupted
                paused = self._paused_generation == self.generation and step > self.begun
                boundary = self._boundary if paused else None
                if not paused or (boundary is not None and step < boundary):
                    self.begun = max(self.begun, step)
                    return self._take_plan(step)
            if boundary is not None and not said:
                said = True
                self.send(AtBoundary(self.rank, self.generation, step))
            known = (self._paused_generation, boundary)
            self._wait(
                lambda known=known: True if (self._paused_generation, self._boundary) != known else None,  # type: ignore[misc]
                "the change of the roster",
                interruptible=True,
            )

    def _take_plan(self, step: int) -> Any:
        """The newest schedule that is to hold from ``step`` on, if there is one that has not been taken yet."""
        due = [plan for plan in self._plans if plan.step <= step]
        self._plans = self._plans[len(due) :]
        return due[-1].schedule if due else None

    def wait_to_enter(self) -> None:
        """Says that this worker is set up and waits until it is let in; then :meth:`enter_generation` is due."""
        self.send(Ready(self.rank))
        self._wait(lambda: self.interrupted or None, "a step boundary to enter at")
        self.joining = False

    def request_leave(self) -> None:
        """Asks to leave at the next step boundary; callable from a signal handler."""
        self._wants_to_leave = True
        self._wake_heartbeat.set()

    def confirm(self) -> None:
        """Returns if this worker is still a member; one that is not ends instead. Before anything that a worker
        outside the generation must not do.
        """
        number = self._confirmed + 1
        self.send(Confirm(self.rank, number))
        self._wait(lambda: True if self._confirmed >= number else None, "the word that it is a member")

    @property
    def local_host(self) -> str:
        """The address of this machine on the way to the coordinator."""
        return self._connection.local_host

    def await_assignment(self) -> Assign:
        """Waits for a position to become free and takes it."""
        found = self._wait(lambda: self._assignment, "a free position")
        self.rank = found.rank
        return found

    def await_announcement(self, timeout: float) -> None:
        """Waits for a generation newer than the current one.

        Raises:
            ControlPlaneError: after ``timeout`` seconds.
        """
        self._wait(lambda: self.interrupted or None, "a new generation", timeout=timeout)

    def report(self, report: Report) -> Resume:
        """Reports for the entered generation and waits for all others.

        Raises:
            Interrupted: when a newer generation was announced meanwhile.
        """
        self.send(replace(report, commit=_packed(report.commit)))

        def resume() -> Resume | None:
            found = self._resume
            return found if found is not None and found.generation == report.generation else None

        answer = self._wait(resume, "the others to report", interruptible=True)
        return replace(answer, commits=_unpacked(answer.commits))

    def commit(self, step: int, payload: Any) -> Committed:
        """Waits until every live worker is REDUCED in ``step``.

        Raises:
            Interrupted: when a generation was announced before that.
        """
        self.send(Commit(self.rank, self.generation, step, _packed(payload)))

        def committed() -> Committed | None:
            found = self._committed
            return found if found is not None and (found.generation, found.step) == (self.generation, step) else None

        answer = self._wait(committed, "the commit", interruptible=True)
        return replace(answer, payloads=_unpacked(answer.payloads))

    def await_loss(self, step: int) -> StepLoss:
        """Waits for the mean loss of ``step``, and what came with the losses.

        Raises:
            Interrupted: when a generation was announced before it came.
            ControlPlaneError: if it does not come although every micro-batch was computed.
        """
        found = self._wait(lambda: self._losses.get(step), "the loss", timeout=_LOSS_TIMEOUT, interruptible=True)
        self._losses = {known: value for known, value in self._losses.items() if known >= step}
        self.counters = found.counters
        return found

    def publish(self, key: str, value: bytes) -> None:
        """Makes ``value`` known to all workers of the generation."""
        self.send(Publish(self.rank, self.generation, key, value))
        with self._changed:
            self._published[key] = value

    def lookup(self, key: str, cancelled: threading.Event) -> bytes:
        """Waits for what a worker of the generation published; for a thread that connects.

        Raises:
            Interrupted: when ``cancelled`` is set, or a newer generation was announced before it came.
        """
        with self._changed:
            while key not in self._published:
                if self.interrupted or cancelled.is_set():
                    raise Interrupted
                self._changed.wait(_LOOKUP_SECONDS)
            return self._published[key]

    @contextmanager
    def waiting(self, what: str, coordinated: bool = False) -> Iterator[None]:
        """Says that the main thread waits for ``what`` within the block. What it did before begins anew after it: the
        time for which it waited does not count. ``coordinated``: it comes from the coordinator.
        """
        before = self.activity
        self.activity = Activity(before.step, before.operation, what, time.monotonic(), coordinated=coordinated)
        try:
            yield
        finally:
            self.activity = replace(before, since=time.monotonic())

    def progressed(self) -> None:
        """Says that what the main thread does, or waits for, has come a part further."""
        self.activity = replace(self.activity, since=time.monotonic())

    def arrive(self, name: str, payload: Any = None) -> Mapping[int, Any]:
        """Takes part in the next control collective; returns the payloads of the live workers by rank.

        Failures of others do not show: a regroup that is announced while waiting is carried out here.
        """
        if self.joining:
            return {self.rank: payload}
        number, self.next_collective = self.next_collective, self.next_collective + 1
        self.send(Arrive(self.rank, number, name, _packed(payload)))
        while True:
            try:
                # Before the executor exists there is nothing to regroup: the announcement waits until it does.
                ready = self.regroup is not None
                answer = self._wait(
                    lambda: self._answers.pop(number, None), f"collective {name!r}", interruptible=ready
                )
                self.leader = answer.leader
                return _unpacked(answer.payloads)
            except Interrupted:
                assert self.regroup is not None
                self.regroup()

    def arrive_in_generation(self, name: str, payload: Any) -> Mapping[int, Any]:
        """As :meth:`arrive`, but all payloads are of the present generation, and a regroup is left to the caller.

        Raises:
            Interrupted: when a generation was announced before the answer came: nobody has got one. Do what led to
                ``payload`` again, and arrive again.
        """
        number = self.next_collective
        self.send(Arrive(self.rank, number, name, _packed(payload), self.generation))
        answer = self._wait(lambda: self._answers.pop(number, None), f"collective {name!r}", interruptible=True)
        self.next_collective = number + 1
        self.leader = answer.leader
        return _unpacked(answer.payloads)

    def leave(self) -> None:
        """From now on the end of the connection is no failure."""
        self._leaving = True

    def _wait(
        self, ready: Callable[[], _T | None], what: str, timeout: float | None = None, interruptible: bool = False
    ) -> _T:
        deadline = None if timeout is None else time.monotonic() + timeout
        with self.waiting(what, coordinated=True), self._changed:
            while True:
                found = ready()
                if found is not None:
                    return found
                if interruptible and self.interrupted:
                    raise Interrupted
                if deadline is not None and time.monotonic() > deadline:
                    raise ControlPlaneError(f"Worker {self.rank} waited {timeout:g} s for {what} in vain.")
                self._changed.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))

    # ------------------------------------------------------------------ threads

    def _receive(self) -> None:
        while True:
            try:
                message = self._connection.receive()
            except (EOFError, OSError):
                self._exit("lost its connection to the coordinator", EXIT_LOST_COORDINATOR)
            if isinstance(message, Stop):
                if message.reason in (Finished.__name__, LEFT):
                    self._leaving = True  # the results are delivered, or others go on: nothing is left to do here
                spare = self.rank < 0  # it has nothing to go on with
                if self._survives and not spare and message.reason == Finished.__name__:
                    self._connection.close()
                    return
                self._exit(f"was told to stop ({message.reason})", EXIT_STOPPED)
            with self._changed:
                match message:
                    case Regroup():
                        self._announced = message
                    case Resume():
                        self._resume = message
                    case StepLoss():
                        self._losses[message.step] = message
                        self.leader_applied = max(self.leader_applied, message.leader_applied)
                    case Pause():
                        pause = (message.generation, message.number)
                        if pause > self._newest_pause:
                            self._newest_pause = pause
                            self._paused_generation, self._boundary = message.generation, None
                        begun = self.begun
                    case Boundary(schedule=None):
                        if message.generation == self._paused_generation:
                            self._boundary = message.step
                    case Boundary():
                        if message.generation == self._paused_generation:
                            self._paused_generation = -1  # nobody has to stop
                            self._plans.append(message)
                    case Confirmed():
                        self._confirmed = message.number
                    case Assign():
                        self._assignment = message
                    case Committed():
                        self._committed = message
                    case Publish():
                        if message.generation == self.generation:
                            self._published[message.key] = message.value
                    case Answer():
                        self._answers[message.number] = message
                self._changed.notify_all()
            if isinstance(message, Pause):
                self.send(Paused(self.rank, message.generation, begun, message.number))
            if isinstance(message, Regroup) and self.on_interrupt is not None:
                self.on_interrupt(message.generation - 1)

    def _beat(self) -> None:
        while not self._leaving:
            try:
                if self._wants_to_leave:
                    self._wants_to_leave = False
                    self._connection.send(Leave(self.rank))
                activity = self.activity
                seconds = time.monotonic() - activity.since
                debugged = _is_debugged(self._main_thread)
                self._connection.send(Heartbeat(self.rank, self.generation, activity, seconds, debugged))
            except OSError:
                return  # the receiver sees it too, and ends the process
            self._wake_heartbeat.wait(self.heartbeat_interval)
            self._wake_heartbeat.clear()

    def _exit(self, why: str, code: int) -> NoReturn:
        """Ends the process at once: its main thread may be blocked anywhere, and has nothing left to save."""
        if not self._leaving:  # it may be outside whose end nobody else notices: the supervisor's death, an eviction
            log.log(
                logging.WARNING if code == EXIT_LOST_COORDINATOR else logging.INFO,
                "Worker %d %s and ends. Either the run is over, or this worker was declared dead.",
                self.rank,
                why,
            )
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0 if self._leaving else code)


def _packed(payload: Any) -> bytes | None:
    """What the coordinator passes on without looking at it: it need not have the classes that are in it."""
    return None if payload is None else pickle.dumps(payload, protocol=pickle.HIGHEST_PROTOCOL)


def _unpacked(payloads: Mapping[int, Any]) -> dict[int, Any]:
    return {rank: pickle.loads(data) if isinstance(data, bytes) else data for rank, data in payloads.items()}


def _is_debugged(main_thread: int | None) -> bool:
    """Whether another process traces this one (gdb, strace), or its main thread is in Python's debugger.

    The stack comes from ``faulthandler``: ``sys._current_frames()`` can stop a process for ever (seen in Python 3.11.7;
    CPython's issue 106883). The collector may run inside it, and a finalizer let go of the GIL, while it holds the lock
    that another thread needs to start a thread.
    """
    try:
        with open("/proc/self/status") as status:
            if any(line.startswith("TracerPid:") and line.split()[1] != "0" for line in status):
                return True
    except OSError:
        pass  # no /proc on this system: debuggers of other processes are not seen
    if "bdb" not in sys.modules or not hasattr(os, "memfd_create"):
        return False
    with open(os.memfd_create("stacks"), "w+b") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        stacks = file.read().decode(errors="replace")
    stack = re.search(rf"^(?:Current t|T)hread 0x0*{main_thread or 0:x}\b.*\n((?:  .*\n)*)", stacks, re.MULTILINE)
    return stack is not None and re.search(r'^  File ".*\b[bp]db\.py", line', stack[1], re.MULTILINE) is not None
