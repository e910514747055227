"""Asks the planner that the user chose, in a process of the lowest priority.

Concept: a solver may take minutes, and the machine is the training's. The process gets the processor time that nobody
else wants (``nice`` 19), and ends with the wish for its plan (:mod:`~lightning_recycle.planning.cancellation`) or after
``SEARCH_SECONDS``. A planner that cannot be sent to another process plans in the calling thread.

Must not know: what becomes of the plan.
"""

from __future__ import annotations

import logging
import time

from lightning_recycle.errors import PlanningError
from lightning_recycle.planning.exact.exact_planner import ExactPlanner
from lightning_recycle.planning.heuristic.heuristic_planner import HeuristicPlanner
from lightning_recycle.planning.planner import Planner, solve
from lightning_recycle.planning.problem import Problem
from lightning_recycle.planning.result import PlanResult
from lightning_recycle.planning.solve_elsewhere import solve_elsewhere

__all__ = ["SEARCH_SECONDS", "search"]

log = logging.getLogger(__name__)

SEARCH_SECONDS = 600.0
"""The longest search for one plan."""


def search(problem: Problem, planner: Planner) -> PlanResult:
    """The plan of ``planner``.

    Raises:
        Cancelled: if it is not wanted any more.
        PlanningError: when there is none, or not in time.
    """
    started = time.monotonic()
    found = solve_elsewhere(problem, planner, time_limit=SEARCH_SECONDS, yields=True)
    if isinstance(found, PlanResult):
        return found
    if isinstance(planner, (ExactPlanner, HeuristicPlanner)) or time.monotonic() - started >= SEARCH_SECONDS:
        raise PlanningError(f"{found.failure}.")
    log.info("The planner %r cannot plan in a process of its own (%s): it plans in a thread.", planner, found.failure)
    return solve(problem, planner)
