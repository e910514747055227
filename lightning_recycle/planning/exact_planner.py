"""Exact planners: a solver searches for a shorter period, in whole slots of time.

The planners "cbc", "highs" and "gurobi" ask a solver where the heuristic's plan is well above the analytic lower bound,
and small enough. The solver runs in a process of its own (solvers crash and overrun their limits), which reports bounds
and solutions as it finds them. A solution counts only after its order has been timed again, validated and compared; a
better one is then searched for less memory. A plan is never worse than the heuristic's, never takes longer than the
time limit (plus the heuristic's own time and ``GRACE``), and a solver that is missing, crashes or runs out of time is
only a warning.

``docs/planner.md``, "The model", has sets, parameters and constraints. Here micro-batches with the same hosts at every
stage are a *family* f, and a choice of one host for each stage is a *route*. Some optimal schedule sends every route
first in, first out through every operation: take any schedule, and for every operation assign its sorted start times to
the micro-batches of the route in a fixed order. If operation ``b`` needs ``a``, then ``a_j + p <= b_j`` for every
member j, hence also for the sorted times.

Where all durations are multiples of a common slot, whole slots lose nothing. Otherwise durations are rounded to a
longer slot; the solver's *order* is then timed again with the real durations, and its bound is not used. Memory in
bytes becomes the number of micro-batches that fits in any order. Backwards that were split for nothing are fused at the
end.
"""

from __future__ import annotations

import importlib
import logging
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product
from typing import Any, TypeAlias

from lightning_recycle.arguments import at_least, choice, require, whole
from lightning_recycle.errors import ConfigurationError, PlanningError
from lightning_recycle.planning.child_process import run_in_child
from lightning_recycle.planning.grid import OpKind, Worker
from lightning_recycle.planning.heuristic_planner import (
    heuristic,
    with_fused_backwards,
    with_memory_descent,
)
from lightning_recycle.planning.problem import Problem
from lightning_recycle.planning.schedule import PlanResult, Schedule, SolverUse, best_of, proven
from lightning_recycle.planning.timing import BACKWARD, FORWARD, WEIGHT, Codes, assemble, best_timing, interleave
from lightning_recycle.planning.validation import validate

log = logging.getLogger(__name__)

GRACE = 3.0
"""Seconds beyond the time limit after which a solver's process is killed."""


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
        ConfigurationError: when a value is impossible, or the extra or Gurobi is not installed.
    """

    backend: str = "highs"
    time_limit: float = 60.0
    threads: int = 1
    max_variables: int = 40_000
    least_gap: float = 1e-3
    max_operations: int = 8_000

    def __post_init__(self) -> None:
        choice(*BACKENDS).checked("ExactPlanner", "backend", self.backend)
        require("milp", f"The planner {self.backend!r}")
        if self.backend == "gurobi" and not importlib.import_module("mip.gurobi").has_gurobi:
            raise ConfigurationError(
                "The planner 'gurobi' needs Gurobi, which python-mip does not find: install it, and set GUROBI_HOME."
            )
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
        task = self._reason_not_to_solve(first) or self._task(first)
        if isinstance(task, str):
            log.info("planner %s: not asked, %s.", self.backend, task)
            return replace(first, seconds=time.monotonic() - started, solver=SolverUse(reason=task))

        schedules, bound, use = [schedule], 0.0, SolverUse()

        def receive(kind: str, value: Any) -> None:
            nonlocal bound, use
            if kind == "bound":
                bound = max(bound, value or 0.0)
            elif kind == "call":
                use = replace(use, calls=use.calls + value)
            elif kind == "seconds":
                use = replace(use, seconds=use.seconds + value)
            else:
                try:
                    solution = schedule_from_placements(schedule, value)
                    validate(solution)
                    schedules.append(solution)
                except PlanningError as error:
                    # Possible where rounding or operations without duration leave an order open.
                    log.info("A solution of the solver was not usable: %s", error)

        failure = run_in_child(SOLVE, task, receive, self.time_limit + GRACE)
        best = best_of(schedules)
        if best is not schedule:
            best = with_memory_descent(best)
        finder = found_by if best is schedule else self.backend
        result = proven(best, self.backend, bound, found_by=finder, solver=use)
        warning = None
        if failure is not None:
            kept = "the best plan it found" if best is not schedule else "the heuristic's plan"
            warning = f"planner {self.backend}: {failure}. Keeping {kept}, {_gap(result)}."
        elif result.status != "optimal" and time.monotonic() - started >= self.time_limit:
            warning = f"planner {self.backend}: not finished after {self.time_limit:g} s; the plan is {_gap(result)}."
        return replace(result, seconds=time.monotonic() - started, warning=warning)

    def _reason_not_to_solve(self, first: PlanResult) -> str | None:
        """Reason not to call a solver; None to call it."""
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
        return SolverTask(self, problem, lower, upper)

    def _discretize(self, first: PlanResult) -> TimeIndexedProblem | None:
        # The search begins at the lower bound and stops at lengths whose models are too large.
        for slots in (self.max_variables, None):
            problem = discretize(first.schedule, slots)
            fits = problem.variables(math.ceil(first.lower_bound / problem.slot)) <= self.max_variables
            if fits and (problem.exact or slots is None):
                return problem
        return None


@dataclass(frozen=True, slots=True)
class SolverTask:
    """The task of finding a shorter schedule, or proving that there is none.

    ``lower`` and ``upper`` in slots: no schedule is shorter; lengths from there on are of no interest.
    """

    planner: ExactPlanner
    problem: TimeIndexedProblem
    lower: int
    upper: int


def _gap(result: PlanResult) -> str:
    if result.status == "optimal":
        return "optimal"
    return f"at most {100 * result.gap:.2g}% above the optimum"


# -- the problem in slots ----------------------------------------------------------------------------------------------

StageOp: TypeAlias = tuple[int, int]
"""Kind (FORWARD, BACKWARD or WEIGHT of :mod:`timing`) and stage."""

Placement: TypeAlias = tuple[int, int, int, int, float]
"""Kind, stage, micro-batch ``d * M + m``, rank and start (in any unit)."""

Hosts: TypeAlias = tuple[tuple[int, ...], ...]
"""For each stage, the ranks that may run a micro-batch."""


@dataclass(frozen=True, slots=True)
class Family:
    """Interchangeable micro-batches, by number, and their hosts H[f,s] by stage."""

    microbatches: tuple[int, ...]
    hosts: Hosts


@dataclass(frozen=True, slots=True)
class Route:
    """One host for each stage, which some of a family's micro-batches may take."""

    family: int
    hosts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TimeIndexedProblem:
    """A planning problem in slots; the names are those of the model.

    ``exact``: slots represent all durations without rounding; ``complete``: every re-routing and all of the memory is
    in it. Only with both is its bound one of the problem. ``parts``: slots in a whole one, see :meth:`refined`.
    """

    families: tuple[Family, ...]
    durations: Mapping[tuple[int, int], int]
    communication: int
    closing: tuple[int, ...]
    limits: tuple[int, ...] | None
    fused: bool
    staggered: bool
    slot: float
    exact: bool
    complete: bool
    parts: int = 1

    @property
    def stages(self) -> int:
        return len(self.closing)

    @property
    def release(self) -> int:
        """The kind of operation that frees a micro-batch: WEIGHT, or BACKWARD when fused."""
        return BACKWARD if self.fused else WEIGHT

    @property
    def workers(self) -> tuple[int, ...]:
        return tuple(rank for kind, rank in self.durations if kind == FORWARD)

    @property
    def steps(self) -> tuple[StageOp, ...]:
        """All steps of a micro-batch, each behind the one that it needs."""
        stages = range(self.stages)
        path = [(FORWARD, s) for s in stages] + [(BACKWARD, s) for s in reversed(stages)]
        return tuple(path if self.fused else path + [(WEIGHT, s) for s in stages])

    def source(self, step: StageOp) -> tuple[StageOp, int] | None:
        """The step whose result this one needs, and how long that takes to arrive."""
        kind, stage = step
        if kind == WEIGHT:
            return (BACKWARD, stage), 0
        if kind == BACKWARD:
            last = stage == self.stages - 1
            return ((FORWARD, stage), 0) if last else ((BACKWARD, stage + 1), self.communication)
        return ((FORWARD, stage - 1), self.communication) if stage else None

    def most_held(self, rank: int) -> int:
        total = sum(len(family.microbatches) for family in self.families)
        return total if self.limits is None else min(total, self.limits[rank % self.stages])

    def refined(self) -> TimeIndexedProblem:
        """The same problem with each slot divided into S.

        A period is the mean of a cycle through at most S stages (:mod:`timing`), hence a whole number divided by at
        most S.
        """
        parts = self.stages
        return replace(
            self,
            durations={key: duration * parts for key, duration in self.durations.items()},
            communication=self.communication * parts,
            closing=tuple(slots * parts for slots in self.closing),
            slot=self.slot / parts,
            parts=parts,
        )

    def bound(self, length: int) -> float | None:
        """Lower bound of the period if no schedule is shorter than ``length`` slots."""
        if not (self.exact and self.complete):
            return None
        if not self.staggered:
            return length * self.slot
        # The smallest fraction above (length - 1) / parts, which has no schedule.
        slots = min(((length - 1) * n // self.parts + 1) / n for n in range(1, self.stages + 1))
        return slots * self.slot * self.parts

    def routes(self) -> list[Route]:
        return [Route(f, hosts) for f, family in enumerate(self.families) for hosts in product(*family.hosts)]

    def windows(self, route: Route, length: int) -> dict[StageOp, tuple[int, int]]:
        """First and last start of a route's steps if the period is at most ``length``."""
        first: dict[StageOp, int] = {}
        last: dict[StageOp, int] = {}
        lasts = {step: self.durations[step[0], route.hosts[step[1]]] for step in self.steps}
        for step in self.steps:
            source = self.source(step)
            first[step] = first[source[0]] + lasts[source[0]] + source[1] if source is not None else 0
        ends = self._stage_ends(length)
        for step in self.steps:
            last[step] = (ends[step[1]] if step[0] != FORWARD else max(ends)) - lasts[step]
            if step[0] == self.release:
                last[step] -= self.closing[step[1]]
        for step in reversed(self.steps):
            source = self.source(step)
            if source is not None:
                before, lag = source
                last[before] = min(last[before], last[step] - lag - lasts[before])
        return {step: (first[step], last[step]) for step in self.steps}

    def _stage_ends(self, length: int) -> list[int]:
        """The latest end of STEP of each stage; time counts from the start of stage 0.

        Every B leads to one at stage 0, which ends by ``length``. A later stage begins early enough for the F and B of
        its busiest worker to precede that, and ends at most ``length`` after it began.
        """
        if not self.staggered:
            return [length] * self.stages
        shortest = {
            step: min(self.durations[step[0], rank] for rank in self.workers if rank % self.stages == step[1])
            for step in self.steps
        }
        count = sum(len(family.microbatches) for family in self.families)
        due = length - self.closing[0] - (0 if self.fused else shortest[WEIGHT, 0])
        ends = [length]
        for stage in range(1, self.stages):
            due -= shortest[BACKWARD, stage - 1] + self.communication
            peers = sum(rank % self.stages == stage for rank in self.workers)
            busiest = -(-count // peers) * (shortest[FORWARD, stage] + shortest[BACKWARD, stage])
            ends.append(min(length + due - busiest, 2 * length))
        return ends

    def variables(self, length: int) -> int:
        """Number of (step of a route, slot) pairs that a period of ``length`` leaves open."""
        windows = (self.windows(route, length) for route in self.routes())
        return sum(max(0, last - first) for each in windows for first, last in each.values())


def _flow(kind: int, stage: int, stages: int) -> int:
    """At equal starts, operations without duration go in the order of data flow."""
    return kind * stages + (stage if kind == FORWARD else stages - stage)


def common_slot(durations: Iterable[float]) -> float:
    """The longest slot that divides all (decimal) durations; 0.0 when all are zero."""
    fractions = [Fraction(repr(float(duration))) for duration in durations if duration > 0]
    if not fractions:
        return 0.0
    denominator = math.lcm(*(fraction.denominator for fraction in fractions))
    numerator = math.gcd(*(int(fraction * denominator) for fraction in fractions))
    return float(Fraction(numerator, denominator))


_MOST_ROUTES = 24  # of a family: models grow with them


def discretize(schedule: Schedule, max_slots: int | None) -> TimeIndexedProblem:
    """The problem of a valid schedule in slots.

    Where a family has more than ``_MOST_ROUTES``, only the schedule's are kept, and the result is not ``complete``. If
    the common slot would divide the makespan into more than ``max_slots``, durations are rounded to a longer one. None:
    about one slot for each operation, with which HiGHS finds an order within 1.5 % of the best known after 1 to 4 s (F
    : B : W = 1 : 1.087 : 0.912); with two to four it is no better after up to 18 s, or there is none.
    """
    problem, stages = schedule.problem, range(schedule.grid.stages)
    fused = not problem.technique.split_backward
    times = {
        (kind, problem.grid.rank(worker)): _duration(problem, kind, worker, fused)
        for kind in ((FORWARD, BACKWARD) if fused else (FORWARD, BACKWARD, WEIGHT))
        for worker in problem.live_workers()
    }
    closing = [
        (
            problem.costs.of(OpKind.REDUCE, stage),
            max(problem.duration(OpKind.STEP, w) for w in problem.live_workers(stage)),
        )
        for stage in stages
    ]
    comm, horizon = problem.costs.communication, schedule.makespan
    slot = common_slot({*times.values(), *(time for pair in closing for time in pair), comm})
    if max_slots is None:
        max_slots = max(1, int(horizon * len(times) / max(sum(times.values()), 1e-12)))
    exact = slot > 0.0 and horizon / slot <= max_slots
    if not exact:
        slot = max(horizon / max_slots, 1e-12)
    found = _families(schedule)
    complete = all(math.prod(map(len, hosts)) <= _MOST_ROUTES for hosts in found)
    if not complete:
        found = _families(schedule, reroute=False)
    return TimeIndexedProblem(
        families=tuple(Family(tuple(numbers), hosts) for hosts, numbers in found.items()),
        # Rounding must not let an operation vanish.
        durations={key: max(1, round(time / slot)) if time > 0.0 else 0 for key, time in times.items()},
        communication=round(comm / slot),
        closing=tuple(round(sum(pair) / slot) for pair in closing),
        limits=problem.counted().in_flight_limit,
        fused=fused,
        staggered=problem.technique.staggered,
        slot=slot,
        exact=exact,
        complete=complete and problem.memory is None,
    )


def _families(schedule: Schedule, *, reroute: bool = True) -> dict[Hosts, list[int]]:
    """The micro-batches by their hosts; without ``reroute`` the schedule's hosts."""
    problem, grid = schedule.problem, schedule.grid
    live = [problem.live_workers(stage) for stage in range(grid.stages)]
    uneven = [len({problem.factor(worker) for worker in workers}) > 1 for workers in live]
    found: dict[Hosts, list[int]] = {}
    for number, microbatch in enumerate(grid.all_microbatches()):
        hosts = []
        for stage, workers in enumerate(live):
            home = Worker(microbatch.pipeline, stage)
            moves = reroute and (uneven[stage] or home in problem.failed or grid.lanes != grid.pipelines)
            hosts.append(tuple(map(grid.rank, workers if moves else (schedule.route(stage, microbatch),))))
        found.setdefault(tuple(hosts), []).append(number)
    return found


def _duration(problem: Problem, kind: int, worker: Worker, fused: bool) -> float:
    if kind == BACKWARD:
        return problem.duration(OpKind.BACKWARD if fused else OpKind.BACKWARD_INPUT, worker)
    return problem.duration(OpKind.FORWARD if kind == FORWARD else OpKind.BACKWARD_WEIGHT, worker)


def schedule_from_placements(schedule: Schedule, placements: Iterable[Placement]) -> Schedule:
    """The schedule with the routes and the *order* of these starts, timed again.

    Raises PlanningError when the order contradicts the dependencies.
    """
    problem, grid, rows = schedule.problem, schedule.grid, list(placements)
    microbatches = tuple(grid.all_microbatches())
    routes = [{mb: schedule.route(stage, mb) for mb in microbatches} for stage in range(grid.stages)]
    for _, stage, number, rank, _ in rows:
        routes[stage][microbatches[number]] = grid.worker(rank)
    fused = not problem.technique.split_backward
    codes = Codes(problem, routes, fused=fused)
    programs: dict[int, list[tuple[float, bool, int, int, int]]] = {}
    for kind, stage, number, rank, start in rows:
        lasts = _duration(problem, kind, grid.worker(rank), fused) > 0.0
        programs.setdefault(rank, []).append(
            (start, lasts, _flow(kind, stage, grid.stages), number, codes.code(kind, stage, number))
        )
    ordered = {rank: [row[-1] for row in sorted(programs[rank])] for rank in sorted(programs)}
    sequence = interleave(codes, ordered)
    return assemble(codes, *with_fused_backwards(codes, sequence, best_timing(codes, sequence)))
