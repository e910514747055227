"""Asks the planner that the user chose, in a process of the lowest priority.

Concept: a solver may take minutes, and the machine is the training's. The process gets the processor time that nobody
else wants (``nice`` 19), and ends with the wish for its plan (:mod:`~lightning_recycle.planning.cancellation`) or after
``SEARCH_SECONDS``. A planner that cannot be sent to another process plans in the calling thread.

Must not know: what becomes of the plan.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from typing import Any

from lightning_recycle.errors import PlanningError, ReCycleError
from lightning_recycle.planning.child_process import Report, run_in_child
from lightning_recycle.planning.exact import ExactPlanner
from lightning_recycle.planning.heuristic import HeuristicPlanner
from lightning_recycle.planning.planner import Planner, solve
from lightning_recycle.planning.problem import Problem
from lightning_recycle.planning.result import PlanResult

__all__ = ["SEARCH_SECONDS", "lowest_priority", "search"]

log = logging.getLogger(__name__)

SEARCH_SECONDS = 600.0
"""The longest search for one plan."""

_LOWEST_PRIORITY = 19


def lowest_priority() -> None:
    """Gives this process, and what it starts, the processor time that nobody else wants."""
    with contextlib.suppress(OSError):  # then it merely competes with the others
        os.nice(_LOWEST_PRIORITY)


def search(problem: Problem, planner: Planner) -> PlanResult:
    """The plan of ``planner``.

    Raises:
        Cancelled: if it is not wanted any more.
        PlanningError: when there is none, or not in time.
    """
    received: list[tuple[str, Any]] = []
    started = time.monotonic()
    end = run_in_child(
        f"{__name__}:_child",
        (problem, planner),
        lambda kind, value: received.append((kind, value)),
        time_limit=SEARCH_SECONDS,
    )
    for kind, value in received:
        if kind == "result":
            return value  # type: ignore[no-any-return]
        raise PlanningError(str(value))
    if isinstance(planner, (ExactPlanner, HeuristicPlanner)) or time.monotonic() - started >= SEARCH_SECONDS:
        raise PlanningError(f"{end.failure}.")
    log.info("The planner %r cannot plan in a process of its own (%s): it plans in a thread.", planner, end.failure)
    return solve(problem, planner)


def _child(task: tuple[Problem, Planner], report: Report) -> None:
    lowest_priority()
    try:
        report("result", solve(*task))
    except ReCycleError as error:
        report("error", " ".join(str(error).split()))
