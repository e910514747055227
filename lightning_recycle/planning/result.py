"""A planner's result: a schedule, and how good it is known to be.

Contract: ``status`` is "optimal" only when ``lower_bound`` proves it; immutable.

Must not know: how the schedule was found, how it is stored.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_recycle.planning.bounds import lower_bound
from lightning_recycle.planning.schedule import Schedule

__all__ = ["TOLERANCE", "PlanResult", "proven"]

TOLERANCE = 1e-9
"""Relative: periods closer than this count as equal."""


@dataclass(frozen=True, slots=True)
class PlanResult:
    """A schedule and what is known about it.

    Args:
        schedule: the plan.
        backend: name of the planner.
        status: "optimal" when the period is the lower bound, else "feasible".
        lower_bound: a proven lower bound of the period with this routing, in the unit of the costs.
        seconds: planning time.
        warning: one line about a solver that was missing, crashed or ran out of time.
        log: the solver's output, if it was asked for.
    """

    schedule: Schedule
    backend: str
    status: str
    lower_bound: float
    seconds: float = 0.0
    warning: str | None = None
    log: str = ""

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
) -> PlanResult:
    """The result for ``schedule`` with the better of the analytic lower bound and ``bound``."""
    known = max(lower_bound(schedule.problem), bound or 0.0)
    period = schedule.period
    if known > period - TOLERANCE * period:
        known = period  # equal but for rounding
    return PlanResult(schedule, backend, "optimal" if known == period else "feasible", known, seconds, warning, log)
