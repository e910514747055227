"""Processes beside this one: work with a hard time limit, questions about plans, and work that is given up.

*Work* (:func:`run_in_child`): a function in a process of its own takes one picklable argument and ``report``, with
which it sends picklable messages while it runs. The caller receives every message sent before the child ended, whatever
ended it. Not ``multiprocessing``: that imports the caller's main module in the child, which may be a training script.

*Questions* (:class:`PlanningProcess`): planning is Python that does not end for seconds, and a thread that does it
holds up the loop of the coordinator: by 5 ms each time that the loop wakes up, by 2 s where one call handles a large
schedule. So one process answers one question at a time. It starts with the first question, imports no torch, and ends
with the process that asks. Each question has a thread of its own there, with the processor time that nothing else wants
(``nice`` 19) unless workers wait for the answer.

| event | consequence |
|---|---|
| the question is interrupted | the process is killed; the next question starts another in a third of a second |
| the process dies, or shows no sign of life for 10 s | :class:`ProcessLostError`; the next question starts another |
| it died while nothing was asked | the next question starts another |
| it was lost five times | :class:`ProcessLostError` at once, for the rest of the run |
| there is no answer within ``_TIME_LIMIT`` | it is killed; :class:`~lightning_recycle.errors.PlanningError` |
| question or answer cannot be pickled | :class:`~lightning_recycle.errors.PlanningError` |

A thread that makes plans names with :func:`cancelled_by` what cancels them; what takes long in making one calls
:func:`check_cancelled` now and then. A planner that never does is waited for.

Contract: :func:`run_in_child` returns within ``time_limit`` seconds (plus start and end), never raises because of the
child, and leaves no process behind. A child whose parent dies ends at once. One thread uses a planning process.

Must not know: solvers, plans; which question comes first.
"""

from __future__ import annotations

import contextlib
import importlib
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import IO, Any, Protocol, TypeAlias

from lightning_recycle.errors import PlanningError

__all__ = [
    "Cancelled",
    "ChildExit",
    "PlanningProcess",
    "ProcessLostError",
    "Question",
    "Report",
    "UnavailableError",
    "cancelled_by",
    "check_cancelled",
    "run_in_child",
    "start_server",
]

_cancels: ContextVar[threading.Event | None] = ContextVar("cancelled", default=None)


class Cancelled(BaseException):
    """The plan is not wanted any more. No error: whoever handles errors of planners must let it pass."""


@contextmanager
def cancelled_by(event: threading.Event) -> Iterator[None]:
    """Planning in the block, in this thread, is given up once ``event`` is set."""
    token = _cancels.set(event)
    try:
        yield
    finally:
        _cancels.reset(token)


def check_cancelled() -> None:
    """Raises :class:`Cancelled` if the plan that is being made is not wanted any more."""
    event = _cancels.get()
    if event is not None and event.is_set():
        raise Cancelled


_LOG_BYTES = 1_000_000  # the end of the child's output that is kept
# PYTHONPATH has the path of this process; the working directory, which Python puts before it, may hold another package.
_START = (
    "import sys; sys.path[:] = filter(None, sys.path);"
    f" from {__name__} import {{main}}; {{main}}(int(sys.argv[1]), sys.argv[2])"
)
_END_SECONDS = 3.0  # from closing its connection to killing it
_LOWEST_PRIORITY = 19
_LOOK_SECONDS = 0.05  # between checks whether it is still wanted

Report: TypeAlias = Callable[[str, Any], None]
"""``report(kind, value)`` sends a message to the caller."""


class UnavailableError(PlanningError):
    """Something that the function needs is not installed, or cannot be loaded."""


@dataclass(frozen=True, slots=True)
class ChildExit:
    """How a child ended: ``failure`` in a few words, None when the function returned; ``log`` is what it printed."""

    failure: str | None
    log: str


def run_in_child(
    entry: str,
    argument: Any,
    on_message: Report,
    time_limit: float | None = None,
) -> ChildExit:
    """Call the function ``entry`` ("module:function") with ``argument`` and a :data:`Report` in a child process.

    Args:
        entry: the function, importable with the ``sys.path`` of this process.
        argument: its argument, picklable.
        on_message: called here for each message of the child.
        time_limit: seconds after which the child is killed; None for no limit.

    Raises:
        Cancelled: if the plan for which it runs is given up .
    """
    deadline = None if time_limit is None else time.monotonic() + time_limit
    try:
        payload = pickle.dumps(argument)
    except Exception as error:  # whatever a user's class raises when it is pickled
        return ChildExit(f"it cannot be sent to another process: {error}", "")
    with tempfile.TemporaryFile() as output:
        try:
            child, ours = _started("_main", entry, output)
        except OSError as error:
            return ChildExit(f"its process could not be started: {error}", "")
        try:
            answered, failure = _listen(ours, payload, on_message, deadline, child, _cancels.get())
        finally:
            if child.poll() is None:
                child.kill()
            child.wait()
            ours.close()
        check_cancelled()
        log = _tail(output)
    if not answered and failure is None:
        failure = _exit_reason(child.returncode, log)
    return ChildExit(failure, log)


def start_server(entry: str, output: IO[bytes]) -> tuple[subprocess.Popen[bytes], Connection]:
    """Starts a process that calls the function ``entry`` ("module:function") with a connection to this one, and ends
    when it returns. It should when the connection is closed.

    Args:
        entry: the function, importable with the ``sys.path`` of this process.
        output: a file for what it prints.

    Raises:
        OSError: if it cannot be started.
    """
    return _started("_serve", entry, output)


def _started(main: str, entry: str, output: IO[bytes]) -> tuple[subprocess.Popen[bytes], Connection]:
    """A process that runs ``main`` of this module, and the connection with it."""
    ours, theirs = Pipe()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    try:
        child = subprocess.Popen(
            [sys.executable, "-c", _START.format(main=main), str(theirs.fileno()), entry],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=[theirs.fileno()],
            env=environment,
        )
    except OSError:
        ours.close()
        raise
    finally:
        theirs.close()
    return child, ours


def _listen(
    connection: Any,
    payload: bytes,
    on_message: Report,
    deadline: float | None,
    child: subprocess.Popen[bytes],
    cancelled: threading.Event | None,
) -> tuple[bool, str | None]:
    """Pass messages on until the child ends or time is up; whether it announced its end, and what went wrong."""
    try:
        connection.send_bytes(payload)
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if cancelled is not None:
                if cancelled.is_set():
                    return False, "it was no longer wanted"
                left = _LOOK_SECONDS if left is None else min(left, _LOOK_SECONDS)
            if not connection.poll(left):
                if deadline is not None and time.monotonic() >= deadline:
                    return False, "it ran past its time limit and was stopped"
                continue
            kind, value = connection.recv()
            if kind == "end":
                return True, value
            on_message(kind, value)
    except (EOFError, OSError, pickle.UnpicklingError):
        with contextlib.suppress(subprocess.TimeoutExpired):  # then the caller kills it
            child.wait(timeout=_END_SECONDS)
        return False, None


def _exit_reason(code: int, log: str) -> str:
    """Why a process is taken for dead whose exit code is ``code``, with the last line of what it printed."""
    reason = f"it crashed (signal {-code})" if code < 0 else f"it ended without an answer (exit code {code})"
    return reason + "".join(f": {line[:200]}" for line in log.strip().splitlines()[-1:])


def _tail(file: Any) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _LOG_BYTES))
    return bytes(file.read()).decode(errors="replace")


def _serve(descriptor: int, entry: str) -> None:
    """A child that serves."""
    module, _, function = entry.partition(":")
    getattr(importlib.import_module(module), function)(Connection(descriptor))
    os._exit(0)  # as in _main


def _main(descriptor: int, entry: str) -> None:
    """The child."""
    connection = Connection(descriptor)
    payload = connection.recv_bytes()

    def end_with_the_parent() -> None:
        with contextlib.suppress(EOFError, OSError):
            connection.recv()  # nothing more is ever sent: this returns when the parent is gone
        os._exit(1)

    threading.Thread(target=end_with_the_parent, daemon=True).start()

    sending = threading.Lock()  # a solver may report from several threads

    def report(kind: str, value: Any) -> None:
        with sending:
            connection.send((kind, value))

    module, _, function = entry.partition(":")
    failure = None
    try:
        getattr(importlib.import_module(module), function)(pickle.loads(payload), report)
    except (UnavailableError, ImportError) as error:
        failure = f"it is not available: {' '.join(str(error).split())}"
    except MemoryError:
        failure = "it ran out of memory"
    sys.stdout.flush()
    report("end", failure)
    # Not an orderly exit: a library's own threads and clean-up must not hold up the answer.
    os._exit(0)


# ---------------------------------------------------------------------- questions

_TIME_LIMIT = 600.0  # seconds for one answer
SILENCE_SECONDS = 10.0  # without a sign of life of the process: it is lost
_START_SECONDS = 30.0  # for its first sign of life
_BEAT_SECONDS = 1.0
_ALIVE = b"alive"
_MOST_LOSSES = 5  # in a run; it is no use to start again what dies each time


class Question(Protocol):
    """A pure question: the same answer wherever it is asked."""

    def answer(self) -> Any:
        """The answer; what takes long asks :func:`check_cancelled` now and then."""
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
        self.process, self._connection = start_server(f"{__name__}:answer_questions", self._output)
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
        return _exit_reason(code, _tail(self._output))

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


def answer_questions(connection: Connection) -> None:
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
        with contextlib.suppress(OSError):  # then it competes with the others
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
    kind, value = "answer", None
    try:
        value = question.answer()
    except Exception as error:  # of a user's planner, too: the run has to do without this plan
        kind, value = "failed", " ".join(str(error).split()) or type(error).__name__
    try:
        answers.append(pickle.dumps((kind, value)))
    except Exception as error:  # whatever a user's class raises when it is pickled
        answers.append(pickle.dumps(("failed", f"the answer cannot be sent to another process: {error}")))
