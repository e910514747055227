"""The constraint model of a :class:`TimeIndexedProblem`, for OR-tools' CP-SAT.

Sets
    f, s, k, w    families, stages, kinds, workers; m: micro-batches; o: the k of micro-batch m at stage s
Variables
    start[o]      in slots
    on[m,s,w]     whether host w runs m at stage s; 1 where there is one host
    begin[s]      with the staggered optimizer: when stage s begins; else 0
    length        the period (without the staggered optimizer: the makespan)
Constraints
    routing       sum over w of on[m,s,w] = 1
    order         in a family with one route, each kind of operation in the order of the micro-batches; else only the
                  forwards of stage 0
    dependencies  start[o] >= start[a(o)] + p[a(o)] + lag
    no overlap    the intervals of a worker, present if on
    memory        the intervals from F to the end of W, present if on, at most L[s] at once
    period        begin[s] <= start of every F;  begin[s] + length >= end of W + r[s]
Objective
    the least length

The plan known so far is a solution of the model, and the complete hint: CP-SAT finds its first solution there, and
improves it by large neighbourhood search. (Asked for less than its length at once, it found nothing within minutes
where durations are unequal, because it only begins to search neighbourhoods once it has a solution.)

Contract: as :mod:`milp`; runs in the solver's process.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

from lightning_recycle.arguments import install_command
from lightning_recycle.planning.child_process import Report, UnavailableError
from lightning_recycle.planning.exact.exact_planner import SolverTask, improve
from lightning_recycle.planning.exact.time_indexed_problem import Placement, TimeIndexedProblem
from lightning_recycle.planning.timing import FORWARD

_THREADS_FOR_ALL = 8
"""With so many threads CP-SAT gives each of its main methods one."""


def solve(task: SolverTask, report: Report) -> None:
    """See :func:`improve`."""
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise UnavailableError(f"{error}; {install_command('cpsat')}") from error
    improve(task, report, _CpSatSearch(task, report, cp_model))


@dataclass
class _CpSatSearch:
    task: SolverTask
    report: Report
    cp_model: Any

    def shorten(
        self, problem: TimeIndexedProblem, low: int, high: int, known: list[Placement], deadline: float
    ) -> tuple[int | None, list[Placement]]:
        """Minimise the length from ``high`` down."""
        model = _CpSatModel(self.cp_model, problem, known, low, high)
        model.cp.minimize(model.length)

        def prove(bound: float) -> None:
            self.report("bound", problem.bound(math.ceil(bound - 1e-6)))

        solver = self.cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = max(0.0, deadline - time.monotonic())
        solver.parameters.num_workers = self.task.threads
        # Few threads take turns with all methods, neighbourhood search among them, instead of one each.
        solver.parameters.interleave_search = self.task.threads < _THREADS_FOR_ALL
        solver.parameters.random_seed = 0
        solver.best_bound_callback = prove
        report, best = self.report, known

        class OnSolution(self.cp_model.CpSolverSolutionCallback):  # type: ignore[name-defined]
            def on_solution_callback(self) -> None:
                nonlocal best
                if self.value(model.length) < high:
                    best = model.placements(self.value)
                    report("solution", best)

        report("call", 1)
        started = time.monotonic()
        status = solver.solve(model.cp, OnSolution())
        report("seconds", time.monotonic() - started)
        if status == self.cp_model.MODEL_INVALID:
            raise AssertionError(model.cp.validate())
        # Without a solution none is as short as the known plan, which rounded durations can make longer.
        bound = high if status == self.cp_model.INFEASIBLE else round(solver.best_objective_bound)
        if bound > low:
            prove(bound)
        return (bound if status in (self.cp_model.OPTIMAL, self.cp_model.INFEASIBLE) else None), best


class _CpSatModel:
    """The model for lengths from ``low`` to ``high``, with a known plan as hint."""

    def __init__(self, cp_model: Any, problem: TimeIndexedProblem, known: list[Placement], low: int, high: int) -> None:
        self.problem, self.cp = problem, cp_model.CpModel()
        self.horizon = 2 * high
        rows = problem.in_whole_slots(known)
        self.known = {(kind, stage, number): (rank, start) for kind, stage, number, rank, start in rows}
        period, begins = problem.lengths(rows)
        self.length = self._variable(low, high, period)
        self.begin = [
            self._variable(0, self.horizon, b) if s and problem.staggered else 0 for s, b in enumerate(begins)
        ]
        self.start: dict[tuple[int, int, int], Any] = {}
        self.end: dict[tuple[int, int, int], Any] = {}
        self.on: dict[tuple[int, int, int], Any] = {}
        self.running: dict[int, list[Any]] = {rank: [] for rank in problem.workers}
        self.holding: dict[int, list[Any]] = {rank: [] for rank in problem.workers}
        for family in problem.families:
            self._family(family.microbatches, family.hosts, family.one_route)
        for intervals in self.running.values():
            self.cp.add_no_overlap(intervals)
        if problem.limits is not None:
            for rank, intervals in self.holding.items():
                self.cp.add_cumulative(intervals, [1] * len(intervals), problem.most_held(rank))

    def _variable(self, low: int, high: int, known: int) -> Any:
        """An integer with the value that it has in the known plan, which rounded durations can put above ``high``."""
        variable = self.cp.new_int_var(low, max(low, high), "")
        if low < high:
            self.cp.add_hint(variable, known)
        return variable

    def _family(self, numbers: tuple[int, ...], hosts: tuple[tuple[int, ...], ...], one_route: bool) -> None:
        problem = self.problem
        # The known plan in the order of the model; on one route micro-batches are interchangeable at each operation.
        members = sorted(numbers, key=lambda number: self.known[FORWARD, 0, number][1])
        like = {step: [self.known[(*step, number)] for number in members] for step in problem.steps}
        if one_route:
            like = {step: sorted(row, key=lambda each: each[1]) for step, row in like.items()}
        for k, number in enumerate(numbers):
            for stage, ranks in enumerate(hosts):
                for rank in ranks:
                    runs = like[FORWARD, stage][k][0] == rank
                    self.on[number, stage, rank] = self._variable(0, 1, runs) if len(ranks) > 1 else 1
                if len(ranks) > 1:
                    self.cp.add_exactly_one(self.on[number, stage, rank] for rank in ranks)
            for kind, stage in problem.steps:
                self._operation(kind, stage, number, hosts[stage], like[kind, stage][k][1])
                if k and (one_route or (kind, stage) == (FORWARD, 0)):
                    before = self.end if one_route else self.start
                    self.cp.add(before[kind, stage, numbers[k - 1]] <= self.start[kind, stage, number])
            for stage, ranks in enumerate(hosts):
                rank, release = like[problem.release, stage][k]
                known = release + problem.durations[problem.release, rank] - like[FORWARD, stage][k][1]
                self._held(stage, number, ranks, known)

    def _operation(self, kind: int, stage: int, number: int, ranks: tuple[int, ...], known: int) -> None:
        problem = self.problem
        start = self.start[kind, stage, number] = self._variable(0, self.horizon, known)
        lasts = {rank: problem.durations[kind, rank] for rank in ranks}
        for rank, slots in lasts.items():
            on = self.on[number, stage, rank]
            self.running[rank].append(self.cp.new_optional_fixed_size_interval_var(start, slots, on, ""))
        self.end[kind, stage, number] = start + sum(self.on[number, stage, rank] * lasts[rank] for rank in ranks)
        source = problem.source((kind, stage))
        if source is not None:
            self.cp.add(start >= self.end[(*source[0], number)] + source[1])

    def _held(self, stage: int, number: int, ranks: tuple[int, ...], known: int) -> None:
        """Memory and period."""
        first, last = self.start[FORWARD, stage, number], self.start[self.problem.release, stage, number]
        self.cp.add(self.begin[stage] <= first)
        end = self.end[self.problem.release, stage, number] + self.problem.closing[stage]
        self.cp.add(end <= self.begin[stage] + self.length)
        self.cp.add(end <= self.horizon)
        for rank in ranks:
            on, lasts = self.on[number, stage, rank], self.problem.durations[self.problem.release, rank]
            size = self._variable(0, self.horizon, known)
            self.holding[rank].append(self.cp.new_optional_interval_var(first, size, last + lasts, on, ""))

    def placements(self, value: Any) -> list[Placement]:
        """The solution, with starts in the unit of the costs; ``value`` gives a variable's value."""
        host = {(number, stage): rank for (number, stage, rank), on in self.on.items() if value(on)}
        return [
            (kind, stage, number, host[number, stage], self.problem.slot * value(start))
            for (kind, stage, number), start in self.start.items()
        ]
