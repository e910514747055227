"""One queue of questions about plans, answered one after the other while the coordinator serves.

Concept: a *job* is a generator that yields pure questions and gets their answers. There is one job of each
:class:`Urgency`; a newer one replaces it. The most urgent job goes on, in a thread of its own; its questions are
answered in the planning process (:mod:`~lightning_recycle.planning.child_process`), so that the coordinator's
interpreter is free. A question that a more urgent job interrupts is asked again afterwards.

| urgency | questions | replaced or dropped |
|---|---|---|
| NEEDED | the plan that workers wait for | when other workers have failed |
| AHEAD | plans for the failures that may come next | when roster, costs, memory or layout have changed |
| LAYOUT | the best layout for those who train | with the next change of roster |
| DRIFT | a plan for the times of now | with the next question |
| SEARCH | better plans by the planner that the user chose | as AHEAD |

A question for which a process is no use is yielded as :class:`InThread`: the thread answers it. What a job finds it
publishes; the coordinator is woken and takes it.

Contract: every wait has a bound, whatever becomes of the process (see there), and no job can end the thread. After
:meth:`PlanningQueue.close` there is no process and no thread.

Must not know: what is asked.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import traceback
from collections.abc import Callable, Generator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeAlias

from lightning_recycle.errors import PlanningError
from lightning_recycle.planning.child_process import Cancelled, PlanningProcess, Question, UnexpectedError, cancelled_by

_END_SECONDS = 30.0  # for a user's version of the heuristic that does not look whether its plan is wanted

log = logging.getLogger(__name__)


class Urgency(IntEnum):
    """Which job goes first."""

    NEEDED = 0
    AHEAD = 1
    LAYOUT = 2
    DRIFT = 3
    SEARCH = 4


@dataclass(frozen=True)
class InThread:
    """A question for the heuristic, which looks now and then whether it is still wanted: answered in this process."""

    question: Question


Job: TypeAlias = Generator[Question | InThread | None, Any, None]
"""Yields questions and gets the answers, or :class:`~lightning_recycle.errors.PlanningError` where there is none. None
is no question, but a moment in which a more urgent job may go first.
"""


class _Begun:
    """A job, and the question that it waits for."""

    def __init__(self, urgency: Urgency, job: Job) -> None:
        self.urgency, self._job = urgency, job
        self.interrupted = threading.Event()  # its question is given up
        self.dropped = False
        self._question: Question | InThread | None = None

    def go_on(self, answer: Callable[[Question | InThread], Any]) -> None:
        """Has the question answered, and gets the next one.

        Raises:
            Cancelled: by ``answer``; the question is asked again next time.
            StopIteration: when the job has ended.
        """
        try:
            found = None if self._question is None else answer(self._question)
        except PlanningError as error:
            if not self.dropped:
                self._question = self._job.throw(error)
        else:
            if not self.dropped:
                self._question = self._job.send(found)


class PlanningQueue:
    """The questions of one run.

    Attributes:
        wake: called from another thread when :meth:`take` has something, or a job has come to its end.
    """

    def __init__(self) -> None:
        self.wake: Callable[[], None] = lambda: None
        self._process = PlanningProcess()
        self._published: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._jobs: dict[Urgency, _Begun] = {}
        self._current: _Begun | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Id of the planning process, while there is one."""
        return self._process.pid

    def begin(self, urgency: Urgency, job: Job) -> None:
        """Begins ``job``, which replaces the one of the same urgency; interrupts those that are less urgent."""
        with self._changed:
            if self._closed:
                return
            self._drop(urgency)
            self._jobs[urgency] = _Begun(urgency, job)
            if self._current is not None and self._current.urgency > urgency:
                self._current.interrupted.set()
            self._changed.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="recycle-planner", daemon=True)
                self._thread.start()

    def drop(self, urgency: Urgency) -> None:
        """Gives up on the job of that urgency, if there is one."""
        with self._changed:
            self._drop(urgency)

    def publish(self, found: Any) -> None:
        """Passes a result to :meth:`take`; called by jobs."""
        self._published.put(found)
        self.wake()

    def take(self) -> list[Any]:
        """All that was published since the last call."""
        found = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._published.get_nowait())
        return found

    def close(self) -> None:
        """Gives up on all jobs, and waits until process and thread have ended."""
        with self._changed:
            self._closed = True
            for urgency in Urgency:
                self._drop(urgency)
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(_END_SECONDS)
        self._process.close()

    def _drop(self, urgency: Urgency) -> None:
        dropped = self._jobs.pop(urgency, None)
        if dropped is not None:
            dropped.dropped = True
            dropped.interrupted.set()

    def _run(self) -> None:
        while (job := self._most_urgent()) is not None:
            try:
                job.go_on(lambda question, job=job: self._answer(question, job))  # type: ignore[misc]
                continue
            except Cancelled:
                continue  # asked again, unless it was dropped
            except StopIteration:
                pass
            except Exception:  # the others must go on
                log.exception("Planning ended early")
            with self._changed:
                if self._jobs.get(job.urgency) is job:
                    del self._jobs[job.urgency]

    def _most_urgent(self) -> _Begun | None:
        """The job to go on with; None at the end of the run."""
        with self._changed:
            self._current = None
            while not self._jobs and not self._closed:
                self._changed.wait()
            if self._closed:
                return None
            job = self._current = self._jobs[min(self._jobs)]
            job.interrupted.clear()
            return job

    def _answer(self, question: Question | InThread, job: _Begun) -> Any:
        if not isinstance(question, InThread):
            return self._process.ask(question, job.interrupted, urgent=job.urgency == Urgency.NEEDED)
        try:
            with cancelled_by(job.interrupted):
                return question.question()
        except PlanningError:
            raise
        except Exception as error:  # the run has to do without this plan
            raise UnexpectedError(str(error) or repr(error), traceback.format_exc()) from error
