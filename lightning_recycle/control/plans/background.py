"""Looks for a better plan while the training goes on: in a process of the lowest priority, one at a time.

Nothing here holds up the coordinator: it asks, and is woken when the answer is there. The process gets the processor
time that nobody else wants (``nice`` 19); it is stopped when the run ends or another question is asked.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from lightning_recycle.control.plans.asking import Asking
from lightning_recycle.control.plans.drift import Proposal, Question, propose
from lightning_recycle.errors import ReCycleError
from lightning_recycle.planning.child_process import Report, lowest_priority, run_in_child

__all__ = ["BackgroundPlanning"]

log = logging.getLogger(__name__)


class BackgroundPlanning:
    """Answers questions about plans.

    Args:
        planner: a planner or its name; the heuristic replaces one that cannot be sent to another process.
        wake: called from another thread when an answer is there.
    """

    def __init__(self, planner: Any, wake: Callable[[], None]) -> None:
        self._planner = planner
        self._asking: Asking[tuple[Question, Proposal | None]] = Asking("recycle-background", wake)

    def ask(self, question: Question) -> None:
        """Begins to look for an answer; gives up on an earlier question."""
        self._asking.ask(partial(self._answer, question))

    def take_answers(self) -> list[tuple[Question, Proposal | None]]:
        """What has been found since the last call; None where there is no answer."""
        return self._asking.take_answers()

    def close(self) -> None:
        """Gives up and leaves no process behind."""
        self._asking.close()

    def _answer(self, question: Question, cancelled: threading.Event) -> tuple[Question, Proposal | None] | None:
        started = time.monotonic()
        received: list[Any] = []
        for planner in (self._planner, "heuristic"):
            task = (question, planner)
            end = run_in_child(f"{__name__}:_child", task, lambda _, value: received.append(value), cancelled=cancelled)
            if received or cancelled.is_set() or planner == "heuristic":
                break
            log.info("The planner %r cannot run in the background (%s); the heuristic does.", planner, end.failure)
        if cancelled.is_set():
            return None
        proposal = received[0] if received else None
        if isinstance(proposal, Proposal):
            return question, replace(proposal, seconds=time.monotonic() - started)
        log.warning("No plan was found for the times that the operations take now: %s", proposal or end.failure)
        return question, None


def _child(task: tuple[Question, Any], report: Report) -> None:
    lowest_priority()
    try:
        report("proposal", propose(*task))
    except ReCycleError as error:
        report("error", str(error))
