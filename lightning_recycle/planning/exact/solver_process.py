"""A solver's task and its answer; each solve is a child process.

Concept: solvers are native libraries. They crash, overrun their limits, and conflict (importing ortools before highspy
breaks highspy). A solver reports bounds and solutions as it finds them, so nothing is lost when its process ends early.

Contract: :func:`run_solver` returns within the time limit plus ``GRACE`` seconds and never raises because of the
solver.

Must not know: the mathematics.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from lightning_recycle.errors import PlanningError
from lightning_recycle.planning.child_process import Report, UnavailableError, run_in_child
from lightning_recycle.planning.exact.time_indexed_problem import (
    Placement,
    TimeIndexedProblem,
    placements,
    schedule_from_placements,
)
from lightning_recycle.planning.result import NOT_ASKED, SolverUse
from lightning_recycle.planning.schedule import Schedule
from lightning_recycle.planning.validation import validate

__all__ = [
    "GRACE",
    "Report",
    "Solver",
    "SolverOutcome",
    "SolverTask",
    "SolverUnavailableError",
    "improve",
    "run_solver",
]

log = logging.getLogger(__name__)

GRACE = 3.0
"""Seconds beyond the time limit after which a solver's process is killed."""

_PERIOD_SHARE = 0.8  # of the time limit, at most; the rest is for memory
_MEMORY_SECONDS = 5.0  # at least, if there is time; else memory takes as long as the period did

SolverUnavailableError = UnavailableError


@dataclass(frozen=True, slots=True)
class SolverTask:
    """Find a schedule with a shorter period than ``schedule``, or prove that there is none; then one that holds less
    memory."""

    backend: str
    schedule: Schedule
    """The best plan known."""
    problem: TimeIndexedProblem
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


class Solver(Protocol):
    """Two questions about a :class:`TimeIndexedProblem`; solutions and bounds are reported as they are found."""

    def shorten(
        self, problem: TimeIndexedProblem, low: int, high: int, known: list[Placement], deadline: float
    ) -> tuple[int | None, list[Placement]]:
        """Find the smallest length.

        Args:
            problem: the problem.
            low: no schedule is shorter, in slots.
            high: the length of ``known``, in slots.
            known: the best plan known, with starts in the unit of the costs.
            deadline: of ``time.monotonic()``.

        Returns:
            The smallest length, None if that is not decided; and the best plan.
        """
        ...

    def lighten(
        self, problem: TimeIndexedProblem, length: int, makespan: int, known: list[Placement], deadline: float
    ) -> None:
        """Report plans of at most this period and makespan that hold less than ``known``."""
        ...


def improve(task: SolverTask, report: Report, solver: Solver) -> None:
    """Shorten the period, then lighten the memory of the best plan; runs in the solver's process."""
    started = time.monotonic()
    problem, known = task.problem, placements(task.schedule)
    if task.lower < task.upper:
        deadline = started + _PERIOD_SHARE * task.time_limit
        length, known = solver.shorten(problem, task.lower, task.upper, known, deadline)
        if length is not None and problem.exact and problem.staggered and problem.stages > 1 and length > task.lower:
            # Periods can be fractions of a slot.
            fine = problem.refined()
            _, shorter = solver.shorten(fine, (length - 1) * fine.parts + 1, length * fine.parts, known, deadline)
            if shorter is not known:
                problem, known = fine, shorter
        now = time.monotonic()
        deadline = min(now + max(_MEMORY_SECONDS, now - started), started + task.time_limit)
    else:
        deadline = started + task.time_limit
    period, makespan, _ = problem.lengths(problem.in_whole_slots(known))
    solver.lighten(problem, period, makespan, known, deadline)


@dataclass(slots=True)
class SolverOutcome:
    """A solver's answer."""

    bound: float | None = None
    """In the unit of the costs."""
    schedules: list[Schedule] = field(default_factory=list)
    """Those that it found, valid ones alone."""
    failure: str | None = None
    """A few words, or None when the solver ended by itself."""
    use: SolverUse = NOT_ASKED


def run_solver(entry: str, task: SolverTask, on_progress: Callable[[SolverOutcome], object]) -> SolverOutcome:
    """Run the function ``entry`` ("module:function") on ``task``.

    It reports ("bound", in the unit of the costs, or None), ("solution", placements of all operations), ("call", 1) for
    each model that the solver is given and ("seconds", what it took); ``on_progress`` is called after each report.
    """
    outcome = SolverOutcome()

    def receive(kind: str, value: Any) -> None:
        if kind == "bound":
            outcome.bound = max((bound for bound in (value, outcome.bound) if bound is not None), default=None)
        elif kind == "call":
            outcome.use = replace(outcome.use, calls=outcome.use.calls + value)
        elif kind == "seconds":
            outcome.use = replace(outcome.use, seconds=outcome.use.seconds + value)
        else:
            try:
                schedule = schedule_from_placements(task.schedule, value)
                validate(schedule)
                outcome.schedules.append(schedule)
            except PlanningError as error:
                # Possible where rounding or operations without duration leave an order open; the plan so far stands.
                log.info("A solution of the solver was not usable: %s", error)
        on_progress(outcome)

    outcome.failure = run_in_child(entry, task, receive, task.time_limit + GRACE).failure
    return outcome
