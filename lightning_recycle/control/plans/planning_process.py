"""A process that answers questions about plans, beside the coordinator's interpreter.

Concept: planning is Python that does not end for seconds, and a thread that does it holds up the loop of the
coordinator: by 5 ms each time that the loop wakes up, by 2 s where one call handles a large schedule. So questions are
answered here, one at a time. The process starts with the first question, imports no torch, and ends with the process
that asks. Each question has a thread of its own there, with the processor time that nothing else wants (``nice`` 19)
unless workers wait for the answer.

| event | consequence |
|---|---|
| the question is interrupted | the process is killed; the next question starts another in a third of a second |
| the process dies, or shows no sign of life for 10 s | :class:`ProcessLostError`; the next question starts another |
| it died while nothing was asked | the next question starts another |
| it was lost five times | :class:`ProcessLostError` at once, for the rest of the run |
| there is no answer within ``_TIME_LIMIT`` | it is killed; :class:`~lightning_recycle.errors.PlanningError` |
| question or answer cannot be pickled | :class:`~lightning_recycle.errors.PlanningError` |

Contract: used by one thread.

Must not know: what is asked, which question comes first.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import struct
import subprocess
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from typing import Any, Protocol

from lightning_recycle.errors import PlanningError
from lightning_recycle.planning.child_process import Cancelled, exit_reason, lowest_priority, start_server

__all__ = [
    "PlanningProcess",
    "ProcessLostError",
    "Question",
]

_TIME_LIMIT = 600.0  # seconds for one answer
_LOOK_SECONDS = 0.05  # between checks whether a question was interrupted
SILENCE_SECONDS = 10.0  # without a sign of life of the process: it is lost
_START_SECONDS = 30.0  # for its first sign of life
_BEAT_SECONDS = 1.0
_END_SECONDS = 3.0  # from closing its connection to killing it
_ALIVE = b"alive"
_MOST_LOSSES = 5  # in a run; it is no use to start again what dies each time


class Question(Protocol):
    """A pure question: the same answer wherever it is asked."""

    def answer(self) -> Any:
        """The answer; what takes long asks :mod:`~lightning_recycle.planning.child_process` now and then."""
        ...


class ProcessLostError(PlanningError):
    """The process died, is stuck, or cannot be started."""


class PlanningProcess:
    """The planning process of a run; another one replaces it when it has ended."""

    def __init__(self) -> None:
        self._child: _Child | None = None
        self._losses = 0

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
            Cancelled: when ``interrupted`` is set.
            PlanningError: when there is no answer, or not in time, or question or answer cannot be sent.
            ProcessLostError: when the process was lost.
        """
        try:
            task = pickle.dumps((question, urgent))
        except Exception as error:  # whatever a user's class raises when it is pickled
            raise PlanningError(f"the planner cannot be sent to another process: {error}") from error
        while True:
            child = self._running()
            try:
                kind, value = child.ask(task, interrupted)
                break
            except (EOFError, OSError) as error:
                self._losses += 1
                reason = child.reason(error)
                self.close()
                if not child.was_idle:
                    raise ProcessLostError(reason) from error
            except BaseException:  # it is not free for the next question
                self.close()
                raise
        if kind == "answer":
            return value
        raise PlanningError(value)

    def close(self) -> None:
        """Ends the process."""
        child, self._child = self._child, None
        if child is not None:
            child.end()

    def _running(self) -> _Child:
        if self._child is None or not self._child.is_alive:
            self.close()
            if self._losses >= _MOST_LOSSES:
                raise ProcessLostError(f"it has ended {self._losses} times")
            try:
                self._child = _Child()
            except OSError as error:
                self._losses += 1
                raise ProcessLostError(f"it could not be started: {error}") from error
        return self._child


class _Child:
    """One process.

    Attributes:
        was_idle: whether there was no sign of life since it was asked, after an earlier answer: it had ended before.
    """

    def __init__(self) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the process has ended
        self.process, self._connection = start_server(f"{__name__}:serve", self._output)
        self._began = self.was_idle = False
        # Neither a question that a stuck process does not read nor half an answer is waited for without a bound.
        with socket.socket(fileno=os.dup(self._connection.fileno())) as ours:
            for bound in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                ours.setsockopt(socket.SOL_SOCKET, bound, struct.pack("ll", int(SILENCE_SECONDS), 0))

    def ask(self, task: bytes, interrupted: threading.Event) -> tuple[str, Any]:
        """The answer to the question in ``task``, with its kind.

        Raises:
            EOFError, OSError: when the process has ended or is stuck.
        """
        asked = heard = time.monotonic()
        is_sent = False
        while True:
            if self._began and not is_sent:
                self._connection.send_bytes(task)
                is_sent = True
            if self._connection.poll(_LOOK_SECONDS):
                frame = self._connection.recv_bytes()
                heard, self._began = time.monotonic(), True
                self.was_idle = frame != _ALIVE
                if self.was_idle:
                    return _read(frame)
            now = time.monotonic()
            if interrupted.is_set():
                raise Cancelled
            if now - heard > (bound := SILENCE_SECONDS if self._began else _START_SECONDS):
                raise TimeoutError(f"it showed no sign of life for {bound:g} s")
            if now - asked > _TIME_LIMIT:
                raise PlanningError("it ran past its time limit and was stopped")

    @property
    def is_alive(self) -> bool:
        """Whether it can be asked."""
        try:
            while self._connection.poll():
                self._connection.recv_bytes()  # a sign of life
        except (EOFError, OSError):
            return False
        return True

    def reason(self, error: Exception) -> str:
        """Why nothing can be asked any more, after ``error`` of its connection."""
        if isinstance(error, TimeoutError):
            return str(error)
        if isinstance(error, BlockingIOError):
            return f"it read or wrote nothing for {SILENCE_SECONDS:g} s"
        try:
            code = self.process.wait(_END_SECONDS)  # its connection is closed a little before
        except subprocess.TimeoutExpired:
            return "it closed its connection"
        self._output.seek(max(0, self._output.seek(0, os.SEEK_END) - 1000))
        last = self._output.read().decode(errors="replace").strip().splitlines()[-1:]
        return exit_reason(code) + "".join(f": {line[:200]}" for line in last)

    def end(self) -> None:
        """Ends the process."""
        self.process.kill()
        self.process.wait()
        self._connection.close()
        self._output.close()


def _read(frame: bytes) -> tuple[str, Any]:
    try:
        message: tuple[str, Any] = pickle.loads(frame)
    except Exception as error:  # a class that only the process could import
        return "failed", f"the answer cannot be read here: {error}"
    return message


def serve(connection: Connection) -> None:
    """The process: answers questions until the connection is closed."""
    # Ctrl-C, and what a cluster manager sends to all processes, are for the process that asks, and that ends this one.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(EOFError, OSError):
        while True:
            connection.send_bytes(_ALIVE)
            task = connection.recv_bytes()
            answers: list[bytes] = []
            thread = threading.Thread(target=_answer, args=(task, answers), daemon=True)
            thread.start()
            while thread.is_alive():
                connection.send_bytes(_ALIVE)
                thread.join(_BEAT_SECONDS)
            connection.send_bytes(answers[0])


def _answer(task: bytes, answers: list[bytes]) -> None:
    """Appends a pickle of the answer, with its kind."""
    try:
        question, urgent = pickle.loads(task)
    except Exception as error:  # a class of the user's script, which this process does not import
        answers.append(pickle.dumps(("failed", f"the planner cannot be read in another process: {error}")))
        return
    if not urgent:
        _lower_priority_of_this_thread()
    kind, value = "answer", None
    try:
        value = question.answer()
    except Exception as error:  # of a user's planner, too: the run has to do without this plan
        kind, value = "failed", " ".join(str(error).split()) or type(error).__name__
    try:
        answers.append(pickle.dumps((kind, value)))
    except Exception as error:  # whatever a user's class raises when it is pickled
        answers.append(pickle.dumps(("failed", f"the answer cannot be sent to another process: {error}")))


def _lower_priority_of_this_thread() -> None:
    if not hasattr(os, "setpriority"):
        lowest_priority()
        return
    with contextlib.suppress(OSError):  # then it competes with the others
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
