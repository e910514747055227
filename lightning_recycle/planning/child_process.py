"""Work in processes of its own, with hard time limits, and work that is given up.

Concept: the function takes one picklable argument and ``report``, with which it sends picklable messages while it
runs. The caller receives every message sent before the child ended, whatever ended it. Not ``multiprocessing``:
that imports the caller's main module in the child, which may be a training script.

A thread that makes plans names with :func:`cancelled_by` what cancels them; what takes long in making one calls
:func:`check_cancelled` now and then. A planner that never does is waited for.

Contract: :func:`run_in_child` returns within ``time_limit`` seconds (plus start and end), never raises because
of the child, and leaves no process behind. A child whose parent dies ends at once.

Must not know: solvers, plans.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
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
from typing import IO, Any, TypeAlias

from lightning_recycle.errors import PlanningError

__all__ = [
    "Cancelled",
    "ChildExit",
    "Report",
    "UnavailableError",
    "cancelled_by",
    "check_cancelled",
    "exit_reason",
    "lowest_priority",
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


def lowest_priority() -> None:
    """Gives this process, and what it starts, the processor time that nobody else wants."""
    with contextlib.suppress(OSError):  # then it merely competes with the others
        os.nice(_LOWEST_PRIORITY)


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
        last = log.strip().splitlines()[-1:]
        failure = exit_reason(child.returncode) + (f": {last[0][:200]}" if last else "")
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


def exit_reason(code: int) -> str:
    """Why a process is taken for dead whose exit code is ``code``."""
    return f"it crashed (signal {-code})" if code < 0 else f"it ended without an answer (exit code {code})"


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
