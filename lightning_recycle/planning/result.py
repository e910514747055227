"""A planner's result: a schedule, how good it is known to be, and whose it is.

Concept: who was asked and who found the plan are two things. An exact planner begins with the heuristic's plan; unless
its solver found a better one, the plan is the heuristic's, and a solver that did not run has calls 0.

Contract: ``status`` is "optimal" only when ``lower_bound`` proves it; immutable.

Must not know: how the schedule was found, how it is stored.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_recycle.planning.bounds import lower_bound
from lightning_recycle.planning.schedule import Schedule

__all__ = ["NOT_ASKED", "TOLERANCE", "PlanResult", "SolverUse", "proven"]

TOLERANCE = 1e-9
"""Relative: periods closer than this count as equal."""


@dataclass(frozen=True, slots=True)
class SolverUse:
    """What a solver did for a plan.

    Args:
        calls: number of models it was given.
        seconds: time it spent on them, building the models included.
        reason: why it was not asked; empty if it was, or if the planner has no solver.
    """

    calls: int = 0
    seconds: float = 0.0
    reason: str = ""


NOT_ASKED = SolverUse()


@dataclass(frozen=True, slots=True)
class PlanResult:
    """A schedule and what is known about it.

    Args:
        schedule: the plan.
        backend: name of the planner that was asked.
        status: "optimal" when the period is the lower bound, else "feasible".
        lower_bound: a proven lower bound of the period, whatever the re-routing, in the unit of the costs.
        seconds: planning time.
        warning: one line about a solver that was missing, crashed or ran out of time.
        log: the solver's output, if it was asked for.
        found_by: name of the planner whose schedule this is: ``backend``, or "heuristic" where its solver was not asked
            or found nothing better; "given" where it was to improve a plan and did not.
        solver: what the solver did.
    """

    schedule: Schedule
    backend: str
    status: str
    lower_bound: float
    seconds: float = 0.0
    warning: str | None = None
    log: str = ""
    found_by: str = "unknown"
    solver: SolverUse = NOT_ASKED

    @property
    def gap(self) -> float:
        """The largest possible distance of the period from the optimum, as a fraction of the lower bound."""
        return self.schedule.period / self.lower_bound - 1.0 if self.lower_bound > 0.0 else 0.0


def proven(
    schedule: Schedule,
    backend: str,
    bound: float | None = None,
    *,
    seconds: float = 0.0,
    warning: str | None = None,
    log: str = "",
    found_by: str | None = None,
    solver: SolverUse = NOT_ASKED,
) -> PlanResult:
    """The result for ``schedule`` with the better of the analytic lower bound and ``bound``.

    ``found_by`` is ``backend`` if it is not given.
    """
    known = max(lower_bound(schedule.problem), bound or 0.0)
    period = schedule.period
    if known > period - TOLERANCE * period:
        known = period  # equal but for rounding
    status = "optimal" if known == period else "feasible"
    return PlanResult(schedule, backend, status, known, seconds, warning, log, found_by or backend, solver)
