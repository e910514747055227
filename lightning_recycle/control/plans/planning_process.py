"""A process that answers questions about plans, beside the coordinator's interpreter.

Concept: planning is Python that does not end for seconds, and a thread that does it holds up the loop of the
coordinator: by 5 ms each time that the loop wakes up, by 2 s where one call handles a large schedule. So questions are
answered here, one at a time. The process starts with the first question, imports no torch, and ends with the process
that asks. Each question has a thread of its own there, with the processor time that nothing else wants (``nice`` 19)
unless workers wait for the answer.

| event | consequence |
|---|---|
| the question is interrupted | the process may go on with the next one; it is killed if it has not given up in 1 s |
| the process dies, or shows no sign of life for 10 s | :class:`ProcessLostError`; the next question starts another |
| it was lost five times | :class:`ProcessLostError` at once, for the rest of the run |
| there is no answer within ``TIME_LIMIT`` | it is killed; :class:`~lightning_recycle.errors.PlanningError` |
| question or answer cannot be pickled | :class:`UnsendableError` |

Contract: :meth:`PlanningProcess.ask` is called from one thread, :meth:`PlanningProcess.close` from any.

Must not know: what is asked, which question comes first.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import queue
import signal
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from typing import Any, Protocol

from lightning_recycle.errors import PlanningError
from lightning_recycle.planning.cancellation import Cancelled, cancelled_by
from lightning_recycle.planning.child_process import exit_reason, lowest_priority, start_server

__all__ = [
    "LOOK_SECONDS",
    "TIME_LIMIT",
    "PlanningProcess",
    "ProcessLostError",
    "Question",
    "UnsendableError",
]

TIME_LIMIT = 600.0
"""Seconds for one answer."""

LOOK_SECONDS = 0.05
"""Between checks whether a question was interrupted."""

SILENCE_SECONDS = 10.0  # without a sign of life of the process: it is lost
_START_SECONDS = 30.0  # for its first sign of life
_BEAT_SECONDS = 1.0
_GIVE_UP_SECONDS = 1.0  # from the interruption of a question to the end of a process that goes on with it
_END_SECONDS = 10.0  # for its connection to be seen closed
_ALIVE = b"alive"
_MOST_LOSSES = 5  # in a run; it is no use to start again what dies each time

log = logging.getLogger(__name__)


class Question(Protocol):
    """A pure question: the same answer wherever it is asked."""

    def answer(self) -> Any:
        """The answer; what takes long asks :mod:`~lightning_recycle.planning.cancellation` now and then."""
        ...


class ProcessLostError(PlanningError):
    """The process died, is stuck, or cannot be started."""


class UnsendableError(ProcessLostError):
    """The question cannot be sent to another process: it holds an object of a class that only this one has."""


class PlanningProcess:
    """The planning process of a run; another one replaces it when it is lost."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self._losses = 0
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Process id, while there is a process."""
        child = self._child
        return None if child is None else child.process.pid

    def ask(self, question: Question, interrupted: threading.Event, *, urgent: bool = False) -> Any:
        """The answer to ``question``.

        Args:
            question: the question, picklable.
            interrupted: once it is set, the question is given up.
            urgent: whether workers wait for the answer.

        Raises:
            Cancelled: when ``interrupted`` is set, or the run is over.
            PlanningError: when there is no answer, or not in time.
            ProcessLostError: when the process was lost.
            UnsendableError: when the question cannot be sent.
        """
        try:
            task = pickle.dumps(question)
        except Exception as error:  # whatever a user's class raises when it is pickled
            raise UnsendableError(f"the planner cannot be sent to another process: {error}") from error
        child = self._running()
        try:
            kind, value = child.ask(task, urgent, interrupted)
        except ProcessLostError:
            if self._closed:
                raise Cancelled from None
            self._losses += 1
            raise
        if kind == "answer":
            return value
        raise (UnsendableError if kind == "unreadable" else PlanningError)(value)

    def close(self) -> None:
        """Ends the process; a question under way is cancelled."""
        with self._lock:
            self._closed = True
            if self._child is not None:
                self._child.end("the run is over")

    def _running(self) -> _Child:
        with self._lock:
            if self._closed:
                raise Cancelled
            if self._child is None or self._child.lost is not None:
                if self._losses >= _MOST_LOSSES:
                    raise ProcessLostError(f"it has ended {self._losses} times")
                try:
                    self._child = _Child()
                except OSError as error:
                    self._losses += 1
                    raise ProcessLostError(f"it could not be started: {error}") from error
            return self._child


class _Child:
    """One process; ``lost`` is the reason why it cannot be asked any more."""

    def __init__(self) -> None:
        self.lost: str | None = None
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the process has ended
        self.process, self._connection = start_server(f"{__name__}:serve", self._output)
        self._heard = 0.0  # of time.monotonic(): the newest message; 0 before the first one
        self._received: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._listener = threading.Thread(target=self._listen, name="recycle-planning-process", daemon=True)
        self._listener.start()

    def ask(self, task: bytes, urgent: bool, interrupted: threading.Event) -> tuple[str, Any]:
        """The answer to the question in ``task``, with its kind."""
        asked = time.monotonic()
        # A large question fills the buffer, and a process that is stuck never empties it.
        sender = threading.Thread(target=self._send, args=("ask", urgent, task), daemon=True)
        sender.start()
        while True:
            with contextlib.suppress(queue.Empty):
                kind, value = self._received.get(timeout=LOOK_SECONDS)
                if kind == "lost":
                    raise ProcessLostError(value)
                return kind, value
            now = time.monotonic()
            if interrupted.is_set():
                self._give_up(sender)
                raise Cancelled
            silence = SILENCE_SECONDS if self._heard else _START_SECONDS
            if now - max(asked, self._heard) > silence:
                reason = f"it showed no sign of life for {silence:g} s"
                self.end(reason)
                raise ProcessLostError(reason)
            if now - asked > TIME_LIMIT:
                reason = "it ran past its time limit and was stopped"
                self.end(reason)
                raise PlanningError(reason)

    def _give_up(self, sender: threading.Thread) -> None:
        """Makes the process free for the next question, or ends it."""
        if not sender.is_alive():
            self._send("give up")
            with contextlib.suppress(queue.Empty):
                self._received.get(timeout=_GIVE_UP_SECONDS if self._heard else _START_SECONDS)
                return
        self.end("it went on with a question that was given up")

    def end(self, reason: str) -> None:
        """Ends the process."""
        self.lost = self.lost or reason
        self.process.kill()
        self.process.wait()
        self._listener.join(_END_SECONDS)

    def _send(self, *message: Any) -> None:
        with contextlib.suppress(OSError):  # the listener says why
            self._connection.send(message)

    def _listen(self) -> None:
        """Passes messages on until the process has ended."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                frame = self._connection.recv_bytes()
                self._heard = time.monotonic()
                if frame == _ALIVE:
                    continue
                try:
                    message = pickle.loads(frame)
                except Exception as error:  # a class that only the process could import
                    message = "unreadable", f"the answer cannot be read here: {error}"
                self._received.put(message)
        self.process.kill()  # if it has only closed the connection
        code = self.process.wait()
        with self._output as output, self._connection:
            output.seek(max(0, output.seek(0, os.SEEK_END) - 1000))
            said = output.read().decode(errors="replace").strip().splitlines()[-1:]
        self.lost = self.lost or exit_reason(code) + "".join(f": {line[:200]}" for line in said)
        self._received.put(("lost", self.lost))


def serve(connection: Connection) -> None:
    """The process: answers questions, each in a thread, until the connection is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks, and that ends this one
    sending = threading.Lock()
    unwanted = threading.Event()

    def send(frame: bytes) -> None:
        with sending, contextlib.suppress(OSError):  # the connection is closed: the loop below sees it
            connection.send_bytes(frame)

    def beat() -> None:
        while True:
            send(_ALIVE)
            time.sleep(_BEAT_SECONDS)

    def answer(urgent: bool, task: bytes, unwanted: threading.Event) -> None:
        found = _answered(urgent, task, unwanted)
        try:
            frame = pickle.dumps(found)
        except Exception as error:  # whatever a user's class raises when it is pickled
            frame = pickle.dumps(("unreadable", f"the answer cannot be sent to another process: {error}"))
        send(frame)

    threading.Thread(target=beat, daemon=True).start()
    while True:
        try:
            kind, *rest = connection.recv()
        except (EOFError, OSError):
            return
        if kind == "give up":
            unwanted.set()
            continue
        unwanted = threading.Event()
        threading.Thread(target=answer, args=(*rest, unwanted), daemon=True).start()


def _answered(urgent: bool, task: bytes, unwanted: threading.Event) -> tuple[str, Any]:
    if not urgent:
        _lower_priority_of_this_thread()
    try:
        question: Question = pickle.loads(task)
    except Exception as error:  # a class of the user's script, which this process does not import
        return "unreadable", f"the planner cannot be read in another process: {error}"
    try:
        with cancelled_by(unwanted):
            return "answer", question.answer()
    except Cancelled:
        return "given up", None
    except Exception as error:  # of a user's planner, too: the run has to do without this plan
        return "failed", " ".join(str(error).split()) or type(error).__name__


def _lower_priority_of_this_thread() -> None:
    if not hasattr(os, "setpriority"):
        lowest_priority()
        return
    with contextlib.suppress(OSError):  # then it competes with the others
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
