"""A thread that makes plans which nobody waits for, and drops them for more urgent ones.

Concept: the work is an iterator; each of its steps makes one plan. New work replaces the old: the plan under way is
given up (:mod:`~lightning_recycle.planning.cancellation`).

Must not know: which plans, and how they are made.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

from lightning_recycle.planning.cancellation import Cancelled, cancelled_by

__all__ = ["PlanningAhead"]

log = logging.getLogger(__name__)

_END_SECONDS = 30.0  # for a planner of the user's, which does not know that its plan is not wanted any more


class PlanningAhead:
    """Does the newest work in a thread, which the first work starts."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._work: Iterator[None] | None = None
        self._cancelled = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None

    @property
    def idle(self) -> bool:
        """Whether all that was begun is done."""
        return self._work is None

    def begin(self, work: Iterator[None]) -> None:
        """Begins with ``work``; gives up what was begun before."""
        with self._changed:
            if self._closed:
                return
            self._cancelled.set()
            self._cancelled, self._work = threading.Event(), work
            self._changed.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="recycle-plan-ahead", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Gives up the plan that is being made, and waits until the thread has ended."""
        with self._changed:
            self._closed = True
            self._cancelled.set()
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(_END_SECONDS)
            if self._thread.is_alive():
                log.warning("A planner has not ended after %g s and is left behind.", _END_SECONDS)

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._work is None and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                work, cancelled = self._work, self._cancelled
            assert work is not None
            try:
                with cancelled_by(cancelled):
                    for _ in work:
                        if cancelled.is_set():
                            break
            except Cancelled:
                pass  # for newer work, or for the end
            except Exception:  # a failure without a plan gets one at once: this thread must go on
                log.exception("Planning ahead ended early")
            with self._changed:
                if self._work is work:
                    self._work = None
