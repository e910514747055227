"""Queue of questions about plans, answered while the coordinator serves.

Concept: a *job* is a generator that yields pure questions and gets their answers; a newer one replaces that of its
:class:`Urgency`. The most urgent job goes on, in a thread; the planning process answers
(:mod:`~lightning_recycle.planning.child_process`), or the thread itself for :class:`InThread`. Interrupted questions
are asked again. Jobs publish results, which the coordinator is woken to take.

| urgency | questions | replaced or dropped |
|---|---|---|
| NEEDED | the plan that workers wait for | when other workers have failed |
| AHEAD | plans for the failures that may come next | when roster, costs, memory or layout have changed |
| LAYOUT | the best layout for the workers that train | with the next change of roster |
| DRIFT | a plan for the present times | with the next question |

Contract: every wait has a bound, and no job can end the thread. After :meth:`PlanningQueue.close` there is no process
and no thread.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class InThread:
    """A question for the heuristic, answered in this process; it can be interrupted."""

    question: Question


Job: TypeAlias = Generator[Question | InThread | None, Any, None]
"""Yields questions and gets the answers, or :class:`~lightning_recycle.errors.PlanningError` where there is none. None
is no question, but a moment in which a more urgent job may go first.
"""


@dataclass(eq=False)
class _StartedJob:
    """A job, and the question that it waits for."""

    urgency: Urgency
    job: Job
    question: Question | InThread | None = None
    interrupted: threading.Event = field(default_factory=threading.Event)
    """Set: the question is given up."""
    dropped: bool = False


class PlanningQueue:
    """The questions of one run.

    ``wake``: called from another thread when :meth:`take` has something, or a job has ended.
    """

    def __init__(self) -> None:
        self.wake: Callable[[], None] = lambda: None
        self._process = PlanningProcess()
        self._published: list[Any] = []
        self._changed = threading.Condition()
        self._jobs: dict[Urgency, _StartedJob] = {}
        self._current: _StartedJob | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def begin(self, urgency: Urgency, job: Job) -> None:
        """Begins ``job`` instead of the one of that urgency; interrupts less urgent ones."""
        with self._changed:
            if self._closed:
                return
            self._drop(urgency)
            self._jobs[urgency] = _StartedJob(urgency, job)
            if self._current is not None and self._current.urgency > urgency:
                self._current.interrupted.set()
            self._changed.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="recycle-planner", daemon=True)
                self._thread.start()

    def drop(self, urgency: Urgency) -> None:
        with self._changed:
            self._drop(urgency)

    def publish(self, found: Any) -> None:
        """Passes a result to :meth:`take`; called by jobs."""
        with self._changed:
            self._published.append(found)
        self.wake()

    def take(self) -> list[Any]:
        """All results since the last call."""
        with self._changed:
            taken, self._published = self._published, []
        return taken

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
        while (started := self._most_urgent()) is not None:
            try:
                self._advance(started)
                continue
            except Cancelled:
                continue  # asked again, unless it was dropped
            except StopIteration:
                pass
            except Exception:  # the others must go on
                log.exception("Planning ended early")
            with self._changed:
                if self._jobs.get(started.urgency) is started:
                    del self._jobs[started.urgency]

    def _most_urgent(self) -> _StartedJob | None:
        """The job to go on with; None at the end of the run."""
        with self._changed:
            self._current = None
            while not self._jobs and not self._closed:
                self._changed.wait()
            if self._closed:
                return None
            begun = self._current = self._jobs[min(self._jobs)]
            begun.interrupted.clear()
            return begun

    def _advance(self, started: _StartedJob) -> None:
        """Has the job's question answered, and gets the next one.

        Raises Cancelled when the question was given up, StopIteration when the job has ended.
        """
        answer, error = None, None
        try:
            answer = self._answer(started)
        except PlanningError as caught:
            error = caught
        if not started.dropped:
            started.question = started.job.send(answer) if error is None else started.job.throw(error)

    def _answer(self, started: _StartedJob) -> Any:
        question = started.question
        if question is None:
            return None
        if not isinstance(question, InThread):
            return self._process.ask(question, started.interrupted, urgent=started.urgency == Urgency.NEEDED)
        try:
            with cancelled_by(started.interrupted):
                return question.question()
        except PlanningError:
            raise
        except Exception as error:  # the run has to do without this plan
            raise UnexpectedError(str(error) or repr(error), traceback.format_exc()) from error
