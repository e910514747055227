"""A plan that workers wait for, made in a thread while the coordinator goes on serving.

Must not know: how it is made, and what becomes of it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from lightning_recycle.planning.cancellation import Cancelled, cancelled_by
from lightning_recycle.planning.problem import Problem
from lightning_recycle.planning.schedule import Schedule

__all__ = ["PlanInNeed"]

log = logging.getLogger(__name__)


class PlanInNeed:
    """The plan for ``problem``, which begins to be made.

    Args:
        problem: what is planned.
        make: makes the plan.
        done: called from another thread when it is there, or there is none.

    Attributes:
        schedule: the plan, once :attr:`is_done`; None if it could not be made.
    """

    def __init__(self, problem: Problem, make: Callable[[Problem], Schedule], done: Callable[[], None]) -> None:
        self.problem = problem
        self.schedule: Schedule | None = None
        self._make, self._tell = make, done
        self._unwanted, self._done = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="recycle-plan-in-need", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether there is nothing left to wait for."""
        return self._done.is_set()

    def serves(self, problem: Problem) -> bool:
        """Whether it is made for the failed and slow workers of ``problem``."""
        own = self.problem
        return (own.failed, own.worker_factors) == (problem.failed, problem.worker_factors)

    def give_up(self) -> None:
        """Nobody waits for it any more."""
        self._unwanted.set()

    def join(self, seconds: float) -> bool:
        """Whether it has ended, at the latest after so many seconds."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            with cancelled_by(self._unwanted):
                self.schedule = self._make(self.problem)
        except Cancelled:
            return
        except Exception:  # who asks for the plan makes it again, and sees what is wrong with it
            log.exception("A plan that is needed could not be made")
        self._done.set()
        self._tell()
