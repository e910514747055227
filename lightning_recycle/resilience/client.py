"""A worker's side of the control plane.

Three threads share one connection: the main thread asks and waits, a receiver takes what the coordinator says (and is
the
watcher: it interrupts the data plane the moment a new generation is announced), a heartbeat thread says that the
process lives and what it does. When the coordinator is gone the worker ends: nobody else may tell it what to do.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Client
from typing import Any, NoReturn, TypeVar

from lightning_recycle.errors import ControlPlaneError
from lightning_recycle.resilience.connection import MessageConnection
from lightning_recycle.resilience.membership import Finished
from lightning_recycle.resilience.messages import (
    Activity,
    Answer,
    Arrive,
    Commit,
    Committed,
    Heartbeat,
    Hello,
    Publish,
    Regroup,
    Report,
    Resume,
    StepLoss,
    Stop,
)

__all__ = ["EXIT_LOST_COORDINATOR", "EXIT_STOPPED", "ControlClient", "Interrupted"]

log = logging.getLogger(__name__)

EXIT_STOPPED = 75  # told to leave; BSD's EX_TEMPFAIL
EXIT_LOST_COORDINATOR = 69  # BSD's EX_UNAVAILABLE

_LOSS_TIMEOUT = 300.0  # seconds; it is sent before the gradients that lead to a step

_T = TypeVar("_T")


class Interrupted(Exception):
    """A new generation was announced: leave what you do and regroup."""


class ControlClient:
    """The connection of worker ``rank`` to the coordinator at ``address``.

    ``activity`` is set by the main thread and read by the heartbeat. ``on_interrupt`` is called from the receiver
    thread when a generation is announced, with the number of the one that is over; ``regroup`` from the main thread
    while it waits in :meth:`arrive`.
    """

    def __init__(self, rank: int, address: tuple[str, int], authkey: bytes, heartbeat_interval: float) -> None:
        self.rank = rank
        self.generation = -1
        self.roster: tuple[int, ...] = ()
        self.activity = Activity(0, "start", "", time.monotonic())
        self.on_interrupt: Callable[[int], None] | None = None
        self.regroup: Callable[[], None] | None = None
        self._heartbeat_interval = heartbeat_interval
        self._connection = MessageConnection(Client(address, authkey=authkey))
        self._changed = threading.Condition()
        self._announced: Regroup | None = None
        self._resume: Resume | None = None
        self._committed: Committed | None = None
        self._answers: dict[int, Mapping[int, Any]] = {}
        self._losses: dict[int, float] = {}
        self._published: dict[str, bytes] = {}
        self._next_collective = 0
        self._leaving = False
        self.send(Hello(rank, os.getpid()))
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
            self._published.clear()
            return self._announced

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
        self.send(report)

        def resume() -> Resume | None:
            found = self._resume
            return found if found is not None and found.generation == report.generation else None

        return self._wait(resume, "the others to report", interruptible=True)

    def commit(self, step: int, payload: Any) -> Committed:
        """Waits until every live worker is REDUCED in ``step``.

        Raises:
            Interrupted: when a generation was announced before that.
        """
        self.send(Commit(self.rank, self.generation, step, payload))

        def committed() -> Committed | None:
            found = self._committed
            return found if found is not None and (found.generation, found.step) == (self.generation, step) else None

        return self._wait(committed, "the commit", interruptible=True)

    def await_loss(self, step: int) -> float:
        """Waits for the mean loss of ``step``.

        Raises:
            Interrupted: when a generation was announced before it came.
            ControlPlaneError: if it does not come although every micro-batch was computed.
        """
        loss = self._wait(lambda: self._losses.get(step), "the loss", timeout=_LOSS_TIMEOUT, interruptible=True)
        self._losses = {known: value for known, value in self._losses.items() if known >= step}
        return loss

    def publish(self, key: str, value: bytes) -> None:
        """Makes ``value`` known to all workers of the generation."""
        self.send(Publish(self.rank, self.generation, key, value))
        with self._changed:
            self._published[key] = value

    def lookup(self, key: str) -> bytes:
        """Waits for what a worker of the generation published.

        Raises:
            Interrupted: when a newer generation was announced before it came.
        """
        return self._wait(lambda: self._published.get(key), f"{key} of a peer", interruptible=True)

    def arrive(self, name: str, payload: Any = None) -> Mapping[int, Any]:
        """Takes part in the next control collective; returns the payloads of the live workers by rank.

        Failures of others do not show: a regroup that is announced while waiting is carried out here.
        """
        number, self._next_collective = self._next_collective, self._next_collective + 1
        self.send(Arrive(self.rank, number, name, payload))
        while True:
            try:
                # Before the executor exists there is nothing to regroup: the announcement waits until it does.
                ready = self.regroup is not None
                return self._wait(lambda: self._answers.pop(number, None), f"collective {name!r}", interruptible=ready)
            except Interrupted:
                assert self.regroup is not None
                self.regroup()

    def leave(self) -> None:
        """From now on the end of the connection is no failure."""
        self._leaving = True

    def _wait(
        self, ready: Callable[[], _T | None], what: str, timeout: float | None = None, interruptible: bool = False
    ) -> _T:
        before = self.activity
        self.activity = Activity(before.step, before.operation, what, time.monotonic())
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            with self._changed:
                while True:
                    found = ready()
                    if found is not None:
                        return found
                    if interruptible and self.interrupted:
                        raise Interrupted
                    if deadline is not None and time.monotonic() > deadline:
                        raise ControlPlaneError(f"Worker {self.rank} waited {timeout:g} s for {what} in vain.")
                    self._changed.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        finally:
            self.activity = before

    # ------------------------------------------------------------------ threads

    def _receive(self) -> None:
        while True:
            try:
                message = self._connection.receive()
            except (EOFError, OSError):
                self._exit("lost its connection to the coordinator", EXIT_LOST_COORDINATOR)
            if isinstance(message, Stop):
                if message.reason == Finished.__name__:
                    self._leaving = True  # the results are delivered: nothing is left to do in this process
                self._exit(f"was told to stop ({message.reason})", EXIT_STOPPED)
            with self._changed:
                match message:
                    case Regroup():
                        self._announced = message
                    case Resume():
                        self._resume = message
                    case StepLoss():
                        self._losses[message.step] = message.loss
                    case Committed():
                        self._committed = message
                    case Publish():
                        if message.generation == self.generation:
                            self._published[message.key] = message.value
                    case Answer():
                        self._answers[message.number] = message.payloads
                self._changed.notify_all()
            if isinstance(message, Regroup) and self.on_interrupt is not None:
                self.on_interrupt(message.generation - 1)

    def _beat(self) -> None:
        while not self._leaving:
            try:
                self._connection.send(Heartbeat(self.rank, self.generation, self.activity))
            except OSError:
                return  # the receiver sees it too, and ends the process
            time.sleep(self._heartbeat_interval)

    def _exit(self, why: str, code: int) -> NoReturn:
        """Ends the process at once: its main thread may be blocked anywhere, and has nothing left to save."""
        if not self._leaving:
            log.info("Worker %d %s and ends.", self.rank, why)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0 if self._leaving else code)
