"""Exact planners: the heuristic's plan, improved or proven optimal by a solver.

Concept: a solver is asked only what arithmetic cannot answer. If the heuristic's plan meets the
analytic lower bound, no solver is needed. Otherwise the solver searches between the two in its own process; what it
finds counts only after its order of operations has been timed again, validated and compared.

Contract: never worse than the heuristic, never longer than the time limit (plus the heuristic's own time and
``solver_process.GRACE``), never an exception because of a solver: a solver that is missing, crashes or runs out of
time is a warning, and the best plan so far is the result. "Optimal" is with respect to the routing (:mod:`routing`).

Must not know: the model (:mod:`milp`, :mod:`cpsat`).
"""

from __future__ import annotations

import logging
import math
import os
import time
from dataclasses import dataclass

from lightning_recycle.arguments import at_least, whole
from lightning_recycle.errors import ConfigurationError, PlanningError
from lightning_recycle.planning.heuristic import heuristic
from lightning_recycle.planning.problem import Problem
from lightning_recycle.planning.result import TOLERANCE, PlanResult, proven
from lightning_recycle.planning.schedule import Schedule
from lightning_recycle.planning.slots import SlotProblem, discretize, schedule_from_starts
from lightning_recycle.planning.solver_process import SolverOutcome, SolverTask, run_solver
from lightning_recycle.planning.validation import validate

__all__ = ["BACKENDS", "ExactPlanner"]

log = logging.getLogger(__name__)

BACKENDS = {
    "cbc": "lightning_recycle.planning.milp:solve",
    "highs": "lightning_recycle.planning.milp:solve",
    "gurobi": "lightning_recycle.planning.milp:solve",
    "cpsat": "lightning_recycle.planning.cpsat:solve",
}
"""Names of the exact planners, and the function that each runs in the solver's process."""

_FINE = 100_000  # slots per iteration for a solver whose model does not grow with them


@dataclass(frozen=True, slots=True)
class ExactPlanner:
    """A planner that asks a solver.

    Args:
        backend: the solver: "cbc", "highs", "gurobi" (python-mip) or "cpsat" (OR-tools, the extra ``cpsat``).
        time_limit: seconds the solver may take.
        threads: number of the solver's threads; by default 1, for CP-SAT one per core (at most 8).
        max_variables: largest model to build. Durations are rounded to longer slots to stay below it; if even that
            is too large, the heuristic's plan is the result.
        log: keep the solver's output in the result.

    Raises:
        ConfigurationError: when a value is impossible.
    """

    backend: str = "highs"
    time_limit: float = 60.0
    threads: int | None = None
    max_variables: int = 40_000
    log: bool = False

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ConfigurationError(f"ExactPlanner(backend={self.backend!r}): give one of {', '.join(BACKENDS)}.")
        at_least("ExactPlanner", "time_limit", self.time_limit)
        if self.threads is not None:
            whole("ExactPlanner", "threads", self.threads, 1)
        whole("ExactPlanner", "max_variables", self.max_variables, 1)

    def plan(self, problem: Problem) -> Schedule:
        """The schedule of :meth:`solve`; a warning is logged."""
        result = self.solve(problem)
        if result.warning is not None:
            log.warning("%s", result.warning)
        return result.schedule

    def solve(self, problem: Problem) -> PlanResult:
        """The best schedule found, with what is known about it."""
        started = time.monotonic()
        schedule = heuristic(problem)
        return self.improve(schedule, time.monotonic() - started)

    def improve(self, schedule: Schedule, seconds: float = 0.0) -> PlanResult:
        """The best schedule found with the routing of ``schedule``, at least as good as it.

        Args:
            schedule: a valid schedule.
            seconds: time already spent on it, to be counted in the result.
        """
        started = time.monotonic() - seconds
        problem = schedule.problem
        first = proven(schedule, self.backend)
        if first.status == "optimal":
            return proven(schedule, self.backend, seconds=time.monotonic() - started)
        try:
            problem.counted()
        except PlanningError as error:
            return proven(
                first.schedule,
                self.backend,
                seconds=time.monotonic() - started,
                warning=f"planner {self.backend}: it splits every backward, for which there is no memory ({error}) "
                f"Keeping the heuristic's plan, {_gap(first)}.",
            )
        slots = self._discretize(first)
        if slots is None:
            return proven(
                first.schedule,
                self.backend,
                seconds=time.monotonic() - started,
                warning=f"{problem.grid} with these costs is too large for {self.backend} (more than "
                f"{self.max_variables} variables): keeping the current plan, {_gap(first)}. "
                "max_variables raises the limit.",
            )
        outcome = run_solver(BACKENDS[self.backend], self._task(slots, first))
        best = _best(first.schedule, slots, outcome)
        # With memory in bytes the solver had less room than there is.
        holds = slots.exact and problem.memory is None
        bound = outcome.bound * slots.slot if outcome.bound is not None and holds else None
        result = proven(best, self.backend, bound)
        warning = None
        if outcome.failure is not None:
            kept = "the heuristic's plan" if best is first.schedule else "the best plan it found"
            warning = f"planner {self.backend}: {outcome.failure}. Keeping {kept}, {_gap(result)}."
        elif result.status != "optimal" and time.monotonic() - started >= self.time_limit:
            warning = f"planner {self.backend}: not finished after {self.time_limit:g} s; the plan is {_gap(result)}."
        return proven(
            best,
            self.backend,
            bound,
            seconds=time.monotonic() - started,
            warning=warning,
            log=outcome.log if self.log else "",
        )

    def _discretize(self, first: PlanResult) -> SlotProblem | None:
        """The slots to use; None where the model would be too large."""
        schedule = first.schedule
        if self.backend == "cpsat":  # its variables are times: their number does not depend on the slots
            problem = discretize(schedule, _FINE, coarse=False)
            return problem if 2 * sum(op.count for op in problem.ops) <= self.max_variables else None
        # The search begins at the lower bound and stops at lengths whose models are too large.
        max_slots, busiest = self.max_variables, max(len(ops) for ops in schedule.workers.values())
        for _ in range(6):
            problem = discretize(schedule, max_slots)
            shortest = _slots(first.lower_bound, problem)
            # With less than half a slot per operation, nothing of the durations is left.
            if not problem.exact and shortest < 0.5 * busiest:
                return None
            # With rounded durations the search needs room above the bound.
            length = shortest if problem.exact else math.ceil(1.15 * shortest)
            shrink = self.max_variables / max(1, problem.variables(length))
            if shrink >= 1.0:
                return problem
            max_slots = int(0.9 * shrink * schedule.makespan / problem.slot)
        return None

    def _task(self, slots: SlotProblem, first: PlanResult) -> SolverTask:
        upper = _slots(first.schedule.period, slots)
        lower = math.ceil(first.lower_bound / slots.slot - 1e-6)
        if not slots.exact:
            # Rounding moves both ends; what a length in slots amounts to is known once its order has been timed.
            upper, lower = math.ceil(1.05 * upper) + 1, math.floor(0.95 * lower)
        threads = self.threads or (min(8, os.cpu_count() or 1) if self.backend == "cpsat" else 1)
        return SolverTask(self.backend, slots, lower, upper, self.time_limit, threads, self.max_variables, log=self.log)


def _slots(period: float, slots: SlotProblem) -> int:
    return math.ceil(period / slots.slot - 1e-6)


def _best(schedule: Schedule, slots: SlotProblem, outcome: SolverOutcome) -> Schedule:
    """The better of the heuristic's schedule and the solver's, the former if they are equal."""
    best = schedule
    for starts in outcome.solutions:
        try:
            candidate = schedule_from_starts(schedule, slots, starts)
            if candidate.period < best.period * (1.0 - TOLERANCE):
                validate(candidate)
                best = candidate
        except PlanningError as error:
            # Possible where rounding or operations without duration leave an order open; the plan so far stands.
            log.info("A solution of the solver was not usable: %s", error)
    return best


def _gap(result: PlanResult) -> str:
    if result.status == "optimal":
        return "optimal"
    return f"at most {100 * result.gap:.2g}% above the optimum"
