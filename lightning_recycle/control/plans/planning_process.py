"""A process that makes plans for the coordinator, whose own interpreter is left alone.

Concept: planning is Python that does not end for seconds, and a thread that does it holds up the loop of the
coordinator: by 5 ms each time that the loop wakes up, by 2 s where one call handles a large schedule. So plans are
asked for here. The process starts with the first question and imports no torch. Plans made ahead get the processor time
that nobody else wants (``nice`` 19, for the thread that makes them); one that workers wait for gets its share.

Contract: :meth:`PlanningProcess.solve` is callable from any thread, and gives the plan that
:func:`~lightning_recycle.planning.planner.solve` would give here. No wait is unbounded: a process that is dead, or
shows no life for ``SILENCE_SECONDS``, is killed, and :class:`ProcessLostError` is raised; the next question starts
another one, up to ``_MOST_STARTS``. It ends with the process that asks.

Must not know: what plans are for.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import pickle
import queue
import signal
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

from lightning_recycle.errors import PlanningError, ReCycleError
from lightning_recycle.planning import cancellation
from lightning_recycle.planning.child_process import exit_reason, lowest_priority, start_server
from lightning_recycle.planning.planner import Planner, solve
from lightning_recycle.planning.problem import Problem
from lightning_recycle.planning.result import PlanResult

__all__ = ["SILENCE_SECONDS", "PlanningProcess", "ProcessLostError"]

SILENCE_SECONDS = 10.0
"""Without a sign of life of the process: it is given up."""

_BEAT_SECONDS = 1.0
_LOOK_SECONDS = 0.05  # between checks whether a plan is still wanted
_END_SECONDS = 10.0  # for its connection to be seen closed
_MOST_STARTS = 5  # of the process, in a run; it is no use to start again what dies each time

log = logging.getLogger(__name__)


class ProcessLostError(ReCycleError):
    """The process cannot plan: it died, is stuck, or cannot be sent the planner."""


class PlanningProcess:
    """Makes plans in a process of its own, which the first question starts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self._starts = 0
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The process, while there is one."""
        child = self._child
        return None if child is None else child.process.pid

    def solve(self, problem: Problem, planner: Planner, *, urgent: bool = False) -> PlanResult:
        """The plan of ``planner``.

        Args:
            problem: the problem to plan.
            planner: the planner, picklable.
            urgent: whether somebody waits for it.

        Raises:
            Cancelled: if it is not wanted any more (:mod:`~lightning_recycle.planning.cancellation`).
            PlanningError: if there is none.
            ProcessLostError: if it has to be made elsewhere.
        """
        cancellation.check()
        try:
            task = pickle.dumps((problem, planner))
        except Exception as error:  # whatever a user's class raises when it is pickled
            raise ProcessLostError(f"the planner cannot be sent to another process: {error}") from error
        return self._running().solve(task, urgent)

    def close(self) -> None:
        """Ends the process; whoever waits for a plan gets a :class:`ProcessLostError`."""
        with self._lock:
            self._closed = True
            if self._child is not None:
                self._child.end()

    def _running(self) -> _Child:
        with self._lock:
            if self._closed:
                raise ProcessLostError("the run is over")
            if self._child is None or self._child.lost is not None:
                if self._starts == _MOST_STARTS:
                    raise ProcessLostError(f"it has ended {_MOST_STARTS} times")
                self._starts += 1
                try:
                    self._child = _Child()
                except OSError as error:
                    raise ProcessLostError(f"it could not be started: {error}") from error
            return self._child


class _Child:
    """One such process; ``lost`` says why it is none any more."""

    def __init__(self) -> None:
        self.lost: str | None = None
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the process has ended
        self.process, self._connection = start_server(f"{__name__}:serve", self._output)
        self._numbers = itertools.count()
        self._sending = threading.Lock()
        self._answers: dict[int, queue.SimpleQueue[tuple[str, Any]]] = {}
        self._heard = time.monotonic()
        self._listener = threading.Thread(target=self._listen, name="recycle-planning-process", daemon=True)
        self._listener.start()

    def solve(self, task: bytes, urgent: bool) -> PlanResult:
        """See :meth:`PlanningProcess.solve`; ``task``: problem and planner."""
        number = next(self._numbers)
        answer: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._answers[number] = answer
        cancelled = cancellation.current()
        try:
            self._send("solve", number, urgent, task)
            while True:
                try:
                    kind, value = answer.get(timeout=_LOOK_SECONDS)
                    break
                except queue.Empty:
                    pass
                if cancelled is not None and cancelled.is_set():
                    self._send("give up", number)
                    raise cancellation.Cancelled
                if self.lost is not None:
                    raise ProcessLostError(self.lost)
                if time.monotonic() - self._heard > SILENCE_SECONDS:
                    self.lost = f"it showed no sign of life for {SILENCE_SECONDS:g} s"
                    self.process.kill()
        finally:
            del self._answers[number]
        if kind == "plan":
            result: PlanResult = value
            return result
        raise (PlanningError if kind == "none" else ProcessLostError)(value)

    def end(self) -> None:
        """Ends the process."""
        self.lost = "the run is over"
        self.process.kill()
        self.process.wait()
        self._listener.join(_END_SECONDS)  # its connection is closed

    def _send(self, *message: Any) -> None:
        try:
            with self._sending:
                self._connection.send(message)
        except OSError as error:
            raise ProcessLostError(self.lost or f"its connection broke: {error}") from error

    def _listen(self) -> None:
        """Passes answers on until the process has ended."""
        try:
            while True:
                kind, number, value = self._connection.recv()
                self._heard = time.monotonic()
                answer = self._answers.get(number)
                if answer is not None:  # it is still wanted
                    answer.put((kind, value))
        except (EOFError, OSError, pickle.UnpicklingError):
            pass
        self.process.kill()  # if it has only closed the connection
        code = self.process.wait()
        with self._output as output, self._connection:
            if self.lost is None:
                output.seek(max(0, output.seek(0, os.SEEK_END) - 1000))
                said = output.read().decode(errors="replace").strip().splitlines()[-1:]
                self.lost = exit_reason(code) + "".join(f": {line[:200]}" for line in said)


def serve(connection: Connection) -> None:
    """The process: answers questions, each in a thread, until the connection is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one that asks, and that ends this one
    sending = threading.Lock()
    wanted: dict[int, threading.Event] = {}

    def say(kind: str, number: int, value: Any = None) -> None:
        with sending, contextlib.suppress(OSError):  # nobody is there any more: the loop below sees it
            connection.send((kind, number, value))

    def beat() -> None:
        while True:
            time.sleep(_BEAT_SECONDS)
            say("alive", -1)

    def answer(number: int, urgent: bool, task: bytes) -> None:
        if not urgent:
            _lowest_priority_of_this_thread()
        try:
            problem, planner = pickle.loads(task)
        except Exception as error:  # a class of the user's script, which this process does not import
            say("unable", number, f"the planner cannot be read in another process: {error}")
            return
        try:
            with cancellation.cancelled_by(wanted[number]):
                result = solve(problem, planner)
            say("plan", number, result)
        except cancellation.Cancelled:
            pass  # nobody waits for an answer
        except Exception as error:  # of a planner of the user's, too: whoever asked has to live without a plan
            say("none", number, " ".join(str(error).split()) or type(error).__name__)
        finally:
            del wanted[number]

    threading.Thread(target=beat, daemon=True).start()
    while True:
        try:
            kind, number, *rest = connection.recv()
        except (EOFError, OSError):
            return
        if kind == "solve":
            wanted[number] = threading.Event()
            threading.Thread(target=answer, args=(number, *rest), daemon=True).start()
        elif number in wanted:
            wanted[number].set()


def _lowest_priority_of_this_thread() -> None:
    if not hasattr(os, "setpriority"):
        lowest_priority()
        return
    with contextlib.suppress(OSError):  # then it competes with the others
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
