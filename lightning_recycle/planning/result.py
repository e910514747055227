"""Plan results: a schedule, what is proven of it, and which of two plans is better.

Concept: who was asked and who found the plan are two things. An exact planner begins with the heuristic's plan; unless
its solver found a better one, the plan is the heuristic's, and a solver that did not run has calls 0.

Of two plans the faster is better. Plans whose periods differ by at most 0.1 % are equally fast. Of these the shorter
makespan counts, with the same allowance, then the memory on the tightest worker, as a fraction of what a worker of its
stage has, then the sum over all workers. Memory is in bytes where the problem has sizes, otherwise in micro-batches in
flight: one measure for every problem, :func:`measure_of`. A search for plans with less memory, by rules or by a solver,
minimises what :func:`demand_of` returns, under the period that it has found.

Contract: ``status`` is "optimal" only when ``lower_bound`` proves it; immutable; pure.

Must not know: how the schedule was found, how it is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from lightning_recycle.planning.compact_schedule import CompactSchedule
from lightning_recycle.planning.costs import Memory
from lightning_recycle.planning.problem import Problem, lower_bound
from lightning_recycle.planning.schedule import Schedule

__all__ = [
    "EQUALLY_FAST",
    "NOT_ASKED",
    "TOLERANCE",
    "PlanResult",
    "SolverUse",
    "best_of",
    "demand_of",
    "is_better",
    "measure_of",
    "proven",
]

TOLERANCE = 1e-9
"""Relative: periods closer than this count as equal."""


@dataclass(frozen=True, slots=True)
class SolverUse:
    """Calls and seconds of a solver for a plan.

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
    return PlanResult(schedule, backend, status, known, seconds, warning, found_by or backend, solver)


EQUALLY_FAST = 1e-3
"""Relative difference up to which two periods, or two makespans, count as equal."""


def measure_of(problem: Problem) -> Memory:
    """The memory by which plans of a problem are compared: its own in bytes, else one of 1 in which a micro-batch takes
    1 from F to W or BW.
    """
    return problem.memory or Memory.counting((1,) * problem.grid.stages)


def demand_of(schedule: Schedule) -> tuple[float, float]:
    """Demand of a plan on the workers' memory.

    Returns:
        The peak on the tightest worker, as a fraction of its stage's capacity (without sizes in bytes: micro-batches in
        flight), and the sum of all workers' peaks, in bytes (micro-batches).
    """
    if isinstance(schedule, CompactSchedule):  # lanes are alike, but for a micro-batch
        tightest, total = demand_of(schedule.lane.schedule())
        return tightest, total * schedule.workers.places.lanes
    memory = measure_of(schedule.problem)
    peaks = [(worker.stage, schedule.peak(worker, memory)) for worker in schedule.live_workers]
    return max(peak / memory.capacity[stage] for stage, peak in peaks), sum(peak for _, peak in peaks)


def best_of(schedules: Sequence[Schedule]) -> Schedule:
    """The best of several plans for the same problem; the first of those that are equally good."""
    fast = _fastest(schedules, attrgetter("period"))
    short = _fastest(fast, attrgetter("makespan"))

    def criteria(schedule: Schedule) -> tuple[float, ...]:  # rounding must not decide
        return tuple(round(value, 9) for value in (*demand_of(schedule), schedule.period, schedule.makespan))

    return min(short, key=criteria)


def _fastest(schedules: Sequence[Schedule], seconds: Callable[[Schedule], float]) -> list[Schedule]:
    least = min(map(seconds, schedules)) * (1 + EQUALLY_FAST)
    return [schedule for schedule in schedules if seconds(schedule) <= least]


def is_better(one: Schedule, other: Schedule) -> bool:
    """Whether ``one`` is the better of two plans for the same problem; False if they are equally good."""
    return one is not other and best_of([other, one]) is one
