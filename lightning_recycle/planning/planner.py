"""Planners by name, exact planners, and the usual call, ``plan(problem)``.

A planner turns a problem into a schedule; "heuristic" is the default. :func:`plan` and :func:`solve` never return a
schedule that the validator rejects.

The exact planners "cbc", "highs" and "gurobi" ask a solver where the heuristic's plan is well above the analytic lower
bound, and small enough. The solver runs in a process of its own (solvers crash and overrun their limits), which reports
bounds and solutions as it finds them. A solution counts only after its order has been timed again, validated and
compared; a better one is then searched for less memory. A plan is never worse than the heuristic's, never takes longer
than the time limit (plus the heuristic's own time and ``GRACE``), and a solver that is missing, crashes or runs out of
time is only a warning.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

from rich.console import Console

from lightning_recycle.arguments import at_least, require, whole
from lightning_recycle.errors import ConfigurationError, PlanningError
from lightning_recycle.planning.child_process import run_in_child
from lightning_recycle.planning.heuristic_planner import HeuristicPlanner, heuristic, with_memory_descent
from lightning_recycle.planning.problem import Problem
from lightning_recycle.planning.schedule import NOT_ASKED, PlanResult, Schedule, SolverUse, best_of, proven
from lightning_recycle.planning.time_indexed_problem import (
    TimeIndexedProblem,
    discretize,
    schedule_from_placements,
)
from lightning_recycle.planning.validation import validate

log = logging.getLogger(__name__)

GRACE = 3.0
"""Seconds beyond the time limit after which a solver's process is killed."""


@dataclass(frozen=True, slots=True)
class SolverTask:
    """The task of finding a shorter schedule, or proving that there is none."""

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


@dataclass(slots=True)
class SolverOutcome:
    """A solver's answer."""

    bound: float | None = None
    """In the unit of the costs."""
    schedules: list[Schedule] = field(default_factory=list)
    """Valid schedules that it found."""
    failure: str | None = None
    """A few words, or None when the solver ended by itself."""
    use: SolverUse = NOT_ASKED


def run_solver(task: SolverTask, on_progress: Callable[[SolverOutcome], object]) -> SolverOutcome:
    """Runs a solver on ``task`` in a process of its own.

    Reports: ("bound", in the unit of the costs, or None), ("solution", placements), ("call", 1) for each model solved
    and ("seconds", its time). ``on_progress`` is called after each.
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

    outcome.failure = run_in_child(SOLVE, task, receive, task.time_limit + GRACE)
    return outcome


BACKENDS = "cbc", "highs", "gurobi"
"""Names of the exact planners."""

SOLVE = "lightning_recycle.planning.milp:solve"
"""The function that runs in the solver's process."""


@dataclass(frozen=True, slots=True)
class ExactPlanner:
    """A planner that asks a solver.

    Args:
        backend: the solver: "cbc", "highs" or "gurobi" (python-mip, the extra ``milp``).
        time_limit: seconds the solver may take.
        threads: number of the solver's threads.
        max_variables: largest model in slots to build. Durations are rounded to longer slots to stay below it; if even
            that is too large, no solver is asked.
        least_gap: if the heuristic's plan is at most this fraction above the lower bound, no solver is asked.
        max_operations: nor for a plan with more operations than this, the closing ones included.

    Raises:
        ConfigurationError: when a value is impossible, or the extra is not installed.
    """

    backend: str = "highs"
    time_limit: float = 60.0
    threads: int = 1
    max_variables: int = 40_000
    least_gap: float = 1e-3
    max_operations: int = 8_000

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ConfigurationError(f"ExactPlanner(backend={self.backend!r}): give one of {', '.join(BACKENDS)}.")
        require("milp", f"The planner {self.backend!r}")
        at_least("ExactPlanner", "time_limit", self.time_limit)
        whole("ExactPlanner", "threads", self.threads, 1)
        whole("ExactPlanner", "max_variables", self.max_variables, 1)
        at_least("ExactPlanner", "least_gap", self.least_gap)
        whole("ExactPlanner", "max_operations", self.max_operations)

    def plan(self, problem: Problem) -> Schedule:
        """The schedule of :meth:`solve`; a warning is logged."""
        result = self.solve(problem)
        if result.warning is not None:
            log.warning("%s", result.warning)
        return result.schedule

    def solve(self, problem: Problem) -> PlanResult:
        """The best schedule found, with its proof and history."""
        started = time.monotonic()
        schedule = heuristic(problem)
        return self.improve(schedule, time.monotonic() - started, found_by="heuristic")

    def improve(self, schedule: Schedule, seconds: float = 0.0, found_by: str = "given") -> PlanResult:
        """The best schedule found, at least as good as ``schedule``.

        Args:
            schedule: a valid schedule.
            seconds: time already spent on it, to be counted in the result.
            found_by: who found it, for the result if the solver finds nothing better.
        """
        started = time.monotonic() - seconds
        first = proven(schedule, self.backend, found_by=found_by)
        task = self._not_worth_asking(first) or self._task(first)
        if isinstance(task, str):
            log.info("planner %s: not asked, %s.", self.backend, task)
            return replace(first, seconds=time.monotonic() - started, solver=SolverUse(reason=task))

        asked = time.monotonic()

        def show(outcome: SolverOutcome) -> None:
            best = min(each.period for each in (schedule, *outcome.schedules))
            bound = min(best, max(first.lower_bound, outcome.bound or 0.0))
            gap = 100 * (best / bound - 1) if bound > 0.0 else 0.0
            left = max(0.0, asked + self.time_limit - time.monotonic())
            line.update(f"{self.backend}: period {best:g}, bound {bound:g}, gap {gap:.2g} %, {left:.0f} s left")

        with Console(stderr=True).status("") as line:  # a line on a terminal, nothing elsewhere
            show(SolverOutcome())
            outcome = run_solver(task, show)
        best = best_of([schedule, *outcome.schedules])
        if best is not schedule:
            best = with_memory_descent(best)
        result = proven(
            best,
            self.backend,
            outcome.bound,
            found_by=found_by if best is schedule else self.backend,
            solver=outcome.use,
        )
        warning = None
        if outcome.failure is not None:
            kept = "the best plan it found" if best is not schedule else "the heuristic's plan"
            warning = f"planner {self.backend}: {outcome.failure}. Keeping {kept}, {_gap(result)}."
        elif result.status != "optimal" and time.monotonic() - started >= self.time_limit:
            warning = f"planner {self.backend}: not finished after {self.time_limit:g} s; the plan is {_gap(result)}."
        return replace(result, seconds=time.monotonic() - started, warning=warning)

    def _not_worth_asking(self, first: PlanResult) -> str | None:
        """Why no solver is asked; None if one is."""
        if first.status == "optimal":
            return "the plan meets the lower bound"
        if first.gap <= self.least_gap:
            return f"the plan is {_gap(first)}, and least_gap={self.least_gap:g}"
        operations = first.schedule.num_operations
        if operations > self.max_operations:
            return (
                f"{operations:,} operations are more than max_operations={self.max_operations:,}, up to which a "
                f"solver has improved plans; the plan is {_gap(first)}"
            )
        if any(first.schedule.recomputed(worker) for worker in first.schedule.workers):
            return f"it knows nothing of forwards that are computed again; the plan is {_gap(first)}"
        try:
            first.schedule.problem.counted()
        except PlanningError as error:
            return f"it splits every backward, for which there is no memory ({error}); the plan is {_gap(first)}"
        return None

    def _task(self, first: PlanResult) -> SolverTask | str:
        """The task in slots; why there is none, where the model would be too large."""
        problem = self._discretize(first)
        if problem is None:
            return f"its model would be larger than max_variables={self.max_variables:,}"
        lower = math.ceil(first.lower_bound / problem.slot - 1e-6)
        upper = math.ceil(first.schedule.period / problem.slot - 1e-6)
        if not problem.exact:
            # Rounding moves both ends; what a length in slots amounts to is known once its order has been timed.
            upper, lower = math.ceil(1.05 * upper) + 1, math.floor(0.95 * lower)
        return SolverTask(
            backend=self.backend,
            schedule=first.schedule,
            problem=problem,
            lower=lower,
            upper=upper,
            time_limit=self.time_limit,
            threads=self.threads,
            max_variables=self.max_variables,
        )

    def _discretize(self, first: PlanResult) -> TimeIndexedProblem | None:
        # The search begins at the lower bound and stops at lengths whose models are too large.
        for slots in (self.max_variables, None):
            problem = discretize(first.schedule, slots)
            fits = problem.variables(math.ceil(first.lower_bound / problem.slot)) <= self.max_variables
            if fits and (problem.exact or slots is None):
                return problem
        return None


def _gap(result: PlanResult) -> str:
    if result.status == "optimal":
        return "optimal"
    return f"at most {100 * result.gap:.2g}% above the optimum"


@runtime_checkable
class Planner(Protocol):
    """Anything with a ``plan`` method."""

    def plan(self, problem: Problem) -> Schedule:
        """A schedule for ``problem``, made once for all workers.

        Raises:
            PlanningError: when there is none.
        """
        ...


_REGISTRY: dict[str, Callable[[], Planner]] = {
    "heuristic": HeuristicPlanner,
    **{backend: partial(ExactPlanner, backend) for backend in BACKENDS},
}


def register_planner(name: str, factory: Callable[[], Planner]) -> None:
    """Make ``factory()`` available as ``planner=name``.

    Raises:
        ConfigurationError: when the name is taken.
    """
    if name in _REGISTRY:
        raise ConfigurationError(f"a planner named {name!r} exists already: choose another name.")
    _REGISTRY[name] = factory


def available_planners() -> tuple[str, ...]:
    """The names that :func:`get_planner` knows."""
    return tuple(sorted(_REGISTRY))


def get_planner(planner: str | Planner) -> Planner:
    """The planner of that name; a planner is returned unchanged.

    Raises:
        ConfigurationError: when the name is unknown.
    """
    if isinstance(planner, str):
        if planner not in _REGISTRY:
            raise ConfigurationError(f"unknown planner {planner!r}: choose one of {', '.join(available_planners())}.")
        return _REGISTRY[planner]()
    if not isinstance(planner, Planner):
        raise ConfigurationError(
            f"{planner!r} is not a planner: give a name, e.g. 'heuristic', or an object with a method plan(problem)."
        )
    return planner


def plan(problem: Problem, planner: str | Planner = "heuristic") -> Schedule:
    """The validated schedule of ``problem``.

    Raises:
        ConfigurationError: when the planner is unknown.
        PlanningError: when there is no schedule, or the planner returned an invalid one.
    """
    result = solve(problem, planner)
    if result.warning is not None:
        log.warning("%s", result.warning)
    return result.schedule


def solve(problem: Problem, planner: str | Planner = "heuristic") -> PlanResult:
    """Like :func:`plan`, with bound, status, time and warnings.

    Raises:
        ConfigurationError: when the planner is unknown.
        PlanningError: when there is no schedule, or the planner returned an invalid one.
    """
    chosen = get_planner(planner)
    started = time.monotonic()
    if isinstance(chosen, ExactPlanner):
        result = chosen.solve(problem)
    else:
        name = "heuristic" if isinstance(chosen, HeuristicPlanner) else type(chosen).__name__
        schedule = chosen.plan(problem)
        result = proven(schedule, name, seconds=time.monotonic() - started)
    validate(result.schedule)
    return result
