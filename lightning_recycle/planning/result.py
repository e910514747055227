"""What a planner hands back: a schedule, and how good it is known to be.

Contract: ``status`` is "optimal" only when ``lower_bound`` proves it; immutable.

Must not know: how the schedule was found, how it is stored.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_recycle.planning.bounds import lower_bound
from lightning_recycle.planning.schedule import Schedule

__all__ = ["TOLERANCE", "PlanResult", "proven"]

TOLERANCE = 1e-9
"""Relative: periods closer than this are equal, the rest is rounding."""


@dataclass(frozen=True, slots=True)
class PlanResult:
    """A schedule with its pedigree.

    Args:
        schedule: the plan itself.
        backend: name of the planner that was asked.
        status: "optimal" when the period is the lower bound, else "feasible".
        lower_bound: no schedule with this routing has a shorter period; in the unit of the costs.
        seconds: that planning took.
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
        """How far the period can at most be from the optimum, as a fraction of the lower bound."""
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
    """The result of ``schedule`` with the better of the analytic lower bound and ``bound``."""
    known = max(lower_bound(schedule.problem), bound or 0.0)
    period = schedule.period
    if known > period - TOLERANCE * period:
        known = period  # equal but for rounding
    return PlanResult(schedule, backend, "optimal" if known == period else "feasible", known, seconds, warning, log)
