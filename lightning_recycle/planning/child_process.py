"""Child processes: work with a hard time limit, and questions about plans.

Solvers crash, and planning is Python that runs for seconds and would hold up the coordinator's loop by 5 ms at each of
its turns. So both run in a process that imports no torch and ends with its parent. Not ``multiprocessing``: that
imports the caller's main module in the child, a training script.

:func:`run_in_child` calls a function in a new process; the caller receives every message that was sent before the
process ended. :class:`PlanningProcess` answers one question at a time, at ``nice`` 19 unless workers wait for the
answer. A process that was interrupted, died, or gave no sign of life for 10 s is replaced at the next question, in a
third of a second; after five losses, questions fail at once. A question without an answer within ``_TIME_LIMIT`` fails,
as does one that cannot be pickled.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from multiprocessing.connection import Connection, Pipe
from typing import Any, TypeAlias

from lightning_recycle.errors import PlanningError, ReCycleError

_cancels: ContextVar[threading.Event | None] = ContextVar("cancelled", default=None)


class Cancelled(BaseException):
    """The plan is not wanted any more; handlers of planners' errors let it pass."""


@contextmanager
def cancelled_by(event: threading.Event) -> Iterator[None]:
    """Gives up planning in the block, where :func:`check_cancelled` is called."""
    token = _cancels.set(event)
    try:
        yield
    finally:
        _cancels.reset(token)


def check_cancelled() -> None:
    """Raises :class:`Cancelled` if the plan being made is no longer wanted."""
    event = _cancels.get()
    if event is not None and event.is_set():
        raise Cancelled


_LOG_BYTES = 10_000  # the end of the process's output, of which the last line is shown
# PYTHONPATH has the path of this process; the working directory, which Python puts before it, may hold another package.
_START = (
    "import sys; sys.path[:] = filter(None, sys.path);"
    f" from {__name__} import answer_questions; answer_questions(int(sys.argv[1]))"
)
_END_SECONDS = 3.0  # from closing its connection to the end of the process
_LOWEST_PRIORITY = 19
_LOOK_SECONDS = 0.05  # between checks whether it is still wanted

Reporter: TypeAlias = Callable[[str, Any], None]
"""``report(kind, value)`` sends a message to the caller."""


class UnavailableError(PlanningError):
    """Something that the function needs is not installed, or cannot be loaded."""


def run_in_child(entry: str, argument: Any, on_message: Reporter, time_limit: float = math.inf) -> str | None:
    """Calls ``entry`` ("module:function") in a child process; why it failed, or None.

    The function gets ``argument`` and a :data:`Reporter`; its messages go to ``on_message``. It must be importable with
    the ``sys.path`` of this process, and is killed after ``time_limit`` seconds. Raises :class:`Cancelled`.
    """
    interrupted = _cancels.get() or threading.Event()
    try:
        task = _packed(partial(_call, entry, argument), urgent=True, reports=True)
        child = _Child()
    except (PlanningError, OSError) as error:
        return str(error)
    try:
        kind, value = child.ask(task, interrupted, time_limit, on_message)
    except PlanningError as error:
        return str(error)
    except (EOFError, OSError) as error:
        return child.reason(error)
    finally:
        child.end()
    return None if kind == "answer" else str(value)


def _call(entry: str, argument: Any, report: Reporter) -> None:
    module, _, function = entry.partition(":")
    try:
        getattr(importlib.import_module(module), function)(argument, report)
    except (UnavailableError, ImportError) as error:
        raise PlanningError(f"it is not available: {error}") from error


def _packed(question: Callable[..., Any], urgent: bool, reports: bool = False) -> bytes:
    try:
        return pickle.dumps((question, urgent, reports))
    except Exception as error:  # whatever a user's class raises when it is pickled
        raise PlanningError(f"the planner cannot be sent to another process: {error}") from error


# ---------------------------------------------------------------------- questions

_TIME_LIMIT = 600.0  # seconds for one answer
SILENCE_SECONDS = 10.0  # without a sign of life of the process: it is lost
_START_SECONDS = 30.0  # for its first sign of life
_BEAT_SECONDS = 1.0
_ALIVE = b"alive"
_MOST_LOSSES = 5  # in a run; it is no use to start again what dies each time


Question: TypeAlias = Callable[[], Any]
"""A pure question, picklable: it returns the same answer wherever it is called."""


class ProcessLostError(PlanningError):
    """The process died, is stuck, or cannot be started."""


class UnexpectedError(PlanningError):
    """A defect: an exception from outside this package, with its ``trace`` as text."""

    def __init__(self, reason: str, trace: str) -> None:
        super().__init__(reason, trace)
        self.trace = trace

    def __str__(self) -> str:
        return str(self.args[0])


class PlanningProcess:
    """The planning process of a run; another one replaces it when it has ended."""

    def __init__(self) -> None:
        self._child: _Child | None = None
        self._losses = 0

    @property
    def pid(self) -> int | None:
        child = self._child
        return None if child is None else child.process.pid

    def ask(self, question: Question, interrupted: threading.Event, *, urgent: bool = False) -> Any:
        """The answer to a picklable question; ``urgent``: workers wait for it.

        Raises:
            Cancelled: once ``interrupted`` is set.
            PlanningError: no answer, or not in time; question or answer cannot be pickled.
            UnexpectedError: the question raised an exception from outside this package.
            ProcessLostError: the process was lost.
        """
        task = _packed(question, urgent)
        while True:
            child = self._running()
            try:
                kind, value = child.ask(task, interrupted, _TIME_LIMIT)
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
        raise value

    def close(self) -> None:
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
                raise ProcessLostError(str(error)) from error
        return self._child


class _Child:
    """One process; ``was_idle``: no sign of life since its last answer."""

    def __init__(self) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the process has ended
        self._connection, child_end = Pipe()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _START, str(child_end.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                pass_fds=[child_end.fileno()],
                env=environment,
            )
        except OSError as error:
            self._connection.close()
            self._output.close()
            raise OSError(f"it could not be started: {error}") from error
        finally:
            child_end.close()
        self._began = self.was_idle = False
        # Neither a question that a stuck process does not read nor half an answer is waited for without a bound.
        with socket.socket(fileno=os.dup(self._connection.fileno())) as own_end:
            for bound in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                own_end.setsockopt(socket.SOL_SOCKET, bound, struct.pack("ll", int(SILENCE_SECONDS), 0))

    def ask(
        self, task: bytes, interrupted: threading.Event, time_limit: float, on_message: Reporter | None = None
    ) -> tuple[str, Any]:
        """The answer to the question in ``task``, with its kind.

        ``on_message`` gets the reports of code that may hold the interpreter: then no silence is too long. Raises
        EOFError or OSError when the process has ended or is stuck.
        """
        asked_at = heard_at = time.monotonic()
        is_sent = False
        while True:
            if self._began and not is_sent:
                self._connection.send_bytes(task)
                is_sent = True
            if self._connection.poll(_LOOK_SECONDS):
                kind, value = _read(self._connection.recv_bytes())
                heard_at, self._began = time.monotonic(), True
                self.was_idle = kind in ("answer", "failed")
                if self.was_idle:
                    return kind, value
                if kind == "report" and on_message is not None:
                    on_message(*value)
            now = time.monotonic()
            if interrupted.is_set():
                raise Cancelled
            bound = SILENCE_SECONDS if self._began else _START_SECONDS
            if on_message is None and now - heard_at > bound:
                raise TimeoutError(f"it showed no sign of life for {bound:g} s")
            if now - asked_at > time_limit:
                raise PlanningError("it ran past its time limit and was stopped")

    @property
    def is_alive(self) -> bool:
        try:
            while self._connection.poll():
                self._connection.recv_bytes()  # a sign of life
        except (EOFError, OSError):
            return False
        return True

    def reason(self, error: Exception) -> str:
        """Why nothing can be asked any more, after ``error`` of the connection."""
        if isinstance(error, TimeoutError):
            return str(error)
        if isinstance(error, BlockingIOError):
            return f"it read or wrote nothing for {SILENCE_SECONDS:g} s"
        try:
            code = self.process.wait(_END_SECONDS)  # its connection is closed a little before
        except subprocess.TimeoutExpired:
            return "it closed its connection"
        reason = f"it crashed (signal {-code})" if code < 0 else f"it ended without an answer (exit code {code})"
        size = self._output.seek(0, os.SEEK_END)
        self._output.seek(max(0, size - _LOG_BYTES))
        printed = self._output.read().decode(errors="replace").strip().splitlines()
        return reason + "".join(f": {line[:200]}" for line in printed[-1:])

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._connection.close()
        self._output.close()


def _read(frame: bytes) -> tuple[str, Any]:
    if frame == _ALIVE:
        return "alive", None
    try:
        message: tuple[str, Any] = pickle.loads(frame)
    except Exception as error:  # a class that only the process could import
        return "failed", PlanningError(f"the answer cannot be read here: {error}")
    return message


def answer_questions(descriptor: int) -> None:
    """Entry point of the process: answers until the connection is closed."""
    # Ctrl-C, and what a cluster manager sends to all processes, are for the process that asks, and that ends this one.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    connection, sending = Connection(descriptor), threading.Lock()  # a solver may report from several threads

    def send(frame: bytes) -> None:
        with sending:
            connection.send_bytes(frame)

    with contextlib.suppress(EOFError, OSError):
        while True:
            send(_ALIVE)
            thread = threading.Thread(target=_answer, args=(connection.recv_bytes(), send), daemon=True)
            thread.start()
            while thread.is_alive():
                send(_ALIVE)
                thread.join(_BEAT_SECONDS)
    os._exit(0)  # not an orderly exit: a library's own threads and clean-up must not hold up the end


def _answer(task: bytes, send: Callable[[bytes], None]) -> None:
    def reply(kind: str, value: Any) -> None:
        try:
            frame = pickle.dumps((kind, value))
        except Exception as error:  # whatever a user's class raises when it is pickled
            frame = pickle.dumps(("failed", PlanningError(f"the answer cannot be sent to another process: {error}")))
        send(frame)

    try:
        question, urgent, reports = pickle.loads(task)
    except Exception as error:  # a class of the user's script, which this process does not import
        reply("failed", PlanningError(f"the planner cannot be read in another process: {error}"))
        return
    if not urgent:
        with contextlib.suppress(OSError):  # then it competes with the others
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
    try:
        value = question(lambda *message: reply("report", message)) if reports else question()
    except BaseException as error:  # of a user's planner or a solver, too: whoever asks has to do without the answer
        text = " ".join(str(error).split())
        is_ours = isinstance(error, ReCycleError)
        reason = ": ".join(filter(None, ("" if is_ours and text else type(error).__name__, text)))
        reply("failed", PlanningError(reason) if is_ours else UnexpectedError(reason, traceback.format_exc()))
    else:
        reply("answer", value)
