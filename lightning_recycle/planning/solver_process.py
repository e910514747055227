"""A solver's task and its answer; each solve is a child process.

Concept: solvers are native libraries. They crash, overrun their limits, and conflict (importing ortools before
highspy breaks highspy). A solver reports bounds and solutions as it finds them, so nothing is lost when its process
ends early.

Contract: :func:`run_solver` returns within the time limit plus ``GRACE`` seconds and never raises because of the
solver.

Must not know: the mathematics.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_recycle.planning.child_process import Report, UnavailableError, run_in_child
from lightning_recycle.planning.result import NOT_ASKED, SolverUse
from lightning_recycle.planning.schedule import Schedule
from lightning_recycle.planning.slots import Placement, SlotProblem

__all__ = ["GRACE", "Report", "SolverOutcome", "SolverTask", "SolverUnavailableError", "proven_length", "run_solver"]

GRACE = 3.0
"""Seconds beyond the time limit after which a solver's process is killed."""

SolverUnavailableError = UnavailableError


@dataclass(frozen=True, slots=True)
class SolverTask:
    """Find a schedule with a shorter period than ``schedule``, or prove that there is none."""

    backend: str
    schedule: Schedule
    """The best plan known."""
    problem: SlotProblem | None
    """The problem in slots; None where it has too many of them."""
    lower: int
    """In slots: no schedule is shorter."""
    upper: int
    """In slots: lengths from here on are of no interest."""
    time_limit: float
    """Seconds."""
    threads: int
    max_variables: int
    """The largest model to build."""
    seed: int = 0
    log: bool = False

    def slots_below(self, period: float) -> int:
        """``upper``, for a plan with this period."""
        assert self.problem is not None
        if not self.problem.exact:
            return self.upper
        return min(self.upper, math.ceil(period / self.problem.slot - 1e-6))


@dataclass(slots=True)
class SolverOutcome:
    """A solver's answer."""

    bound: float | None = None
    """In the unit of the costs."""
    solutions: list[list[Placement]] = field(default_factory=list)
    failure: str | None = None
    """A few words, or None when the solver ended by itself."""
    log: str = ""
    use: SolverUse = NOT_ASKED


def run_solver(entry: str, task: SolverTask) -> SolverOutcome:
    """Run the function ``entry`` ("module:function") on ``task``.

    It reports ("bound", in the unit of the costs), ("solution", placements of all operations), ("call", 1) for each
    model that the solver is given and ("seconds", what it took).
    """
    outcome = SolverOutcome()

    def receive(kind: str, value: Any) -> None:
        if kind == "bound":
            outcome.bound = value if outcome.bound is None else max(value, outcome.bound)
        elif kind == "call":
            outcome.use = replace(outcome.use, calls=outcome.use.calls + value)
        elif kind == "seconds":
            outcome.use = replace(outcome.use, seconds=outcome.use.seconds + value)
        else:
            outcome.solutions.append(value)

    end = run_in_child(entry, task, receive, task.time_limit + GRACE)
    outcome.failure, outcome.log = end.failure, end.log
    return outcome


def proven_length(problem: SlotProblem, length: int, parts: int) -> float:
    """The bound, in slots of the task, when no schedule of ``problem`` is shorter than ``length`` whole slots.

    Start times, and so a makespan, are whole slots without loss. The smallest period of an order of operations is
    the mean of a cycle through at most S stages (:mod:`timing`), hence a whole number divided by at most S.

    Args:
        problem: the problem of the task, refined into ``parts``.
        length: the length in slots of ``problem``.
        parts: slots of ``problem`` per slot of the task; 1 or S.
    """
    if not problem.staggered:
        return length / parts
    # The smallest such fraction above (length - 1) / parts, which has no schedule.
    return min(((length - 1) * part // parts + 1) / part for part in range(1, problem.stages + 1))
