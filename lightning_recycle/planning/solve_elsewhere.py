"""A plan made in a process of its own, which leaves this one's interpreter, and if wanted its processor time, alone.

Must not know: why, or what becomes of the plan where there is none.
"""

from __future__ import annotations

from typing import Any

from lightning_recycle.errors import PlanningError, ReCycleError
from lightning_recycle.planning.child_process import ChildExit, Report, lowest_priority, run_in_child
from lightning_recycle.planning.planner import Planner, solve
from lightning_recycle.planning.problem import Problem
from lightning_recycle.planning.result import PlanResult

__all__ = ["solve_elsewhere"]


def solve_elsewhere(
    problem: Problem, planner: Planner, *, time_limit: float | None = None, yields: bool = False
) -> PlanResult | ChildExit:
    """The plan of ``planner``; or how its process ended, if it said nothing of a plan, as when it took too long, or the
    planner cannot be sent to another process.

    Args:
        problem: the problem to plan.
        planner: the planner.
        time_limit: seconds after which the process is killed; None for no limit.
        yields: whether the process takes only the processor time that nobody else wants.

    Raises:
        Cancelled: if the plan is given up (:mod:`~lightning_recycle.planning.cancellation`).
        PlanningError: when there is no plan.
    """
    received: list[tuple[str, Any]] = []
    end = run_in_child(
        f"{__name__}:_child",
        (problem, planner, yields),
        lambda kind, value: received.append((kind, value)),
        time_limit=time_limit,
    )
    for kind, value in received:
        if kind == "result":
            return value  # type: ignore[no-any-return]
        raise PlanningError(str(value))
    return end


def _child(task: tuple[Problem, Planner, bool], report: Report) -> None:
    problem, planner, yields = task
    if yields:
        lowest_priority()
    try:
        report("result", solve(problem, planner))
    except ReCycleError as error:
        report("error", " ".join(str(error).split()) or type(error).__name__)
