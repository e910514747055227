"""The model for OR-tools' CP-SAT: start times as integers, one interval for each operation and host.

The mathematics, in the order of :mod:`milp`.

Sets
    operations (o, k): the k-th micro-batch of family o's group through operation o; hosts of o with duration p_ow.
Variables
    start[o, k] in slots; period (with the staggered optimizer) or makespan; begin[s] of each stage (staggered).
    on[k, s, w]: whether the k-th micro-batch of a family runs on host w at stage s; 1 where there is one host.
Constraints
    routing       sum over w of on[k, s, w] = 1; of pipelines that are alike, the first runs the most
    order         start[o, k] + p_o <= start[o, k+1] in a family with one route, else only at stage 0's forwards
    dependencies  start[o, k] >= start[a(o), k] + p_a(o) + lag
    no overlap    the intervals of a worker, present if on
    memory        the intervals from F to the end of W (BW), present if on, at most ``limit`` at once
    REDUCE, STEP  after every W (BW) of the stage
    staggered     begin[s] <= start of every F; begin[s] + period >= end of the stage's STEP
Objective
    minimise the period or makespan, which lies in ``lower .. upper - 1``.

The plan known so far is the hint.

Contract: as :mod:`milp`; runs in the solver's process.
"""

from __future__ import annotations

import time
from typing import Any

from lightning_recycle.planning.slots import Placement, SlotProblem, placements
from lightning_recycle.planning.solver_process import Report, SolverTask, SolverUnavailableError, proven_length
from lightning_recycle.planning.timing import FORWARD

__all__ = ["solve"]


def solve(task: SolverTask, report: Report) -> None:
    """Minimise the length below ``task.upper``; report bounds and solutions."""
    deadline = time.monotonic() + task.time_limit
    problem = task.problem
    assert problem is not None
    bound = _minimize(task, problem, task.lower, task.upper, task.time_limit, report, 1)
    parts = problem.stages
    if bound is None or not problem.exact or not problem.staggered or parts == 1 or bound <= task.lower:
        return
    # Periods can be fractions of a slot, see milp.
    left = deadline - time.monotonic()
    if left > 0.1:
        _minimize(task, problem.refined(parts), (bound - 1) * parts + 1, bound * parts, left, report, parts)


def _minimize(
    task: SolverTask, problem: SlotProblem, lower: int, upper: int, seconds: float, report: Report, parts: int
) -> int | None:
    """The smallest length in slots (``upper`` if none is shorter); None when time ran out."""
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise SolverUnavailableError(f"{error}; pip install 'lightning-recycle[cpsat]'") from error

    def prove(bound: int) -> None:
        if problem.exact and problem.complete:
            report("bound", proven_length(problem, bound, parts) * problem.slot * parts)

    if lower > upper - 1 or any(window.last < window.first for window in problem.windows(upper - 1)):
        prove(upper)
        return upper
    model = _Model(task, problem, lower, upper - 1, cp_model)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = task.threads
    solver.parameters.random_seed = task.seed
    solver.parameters.log_search_progress = task.log

    class Found(cp_model.CpSolverSolutionCallback):
        def on_solution_callback(self) -> None:
            report("solution", model.placements(self.value))

    report("call", 1)
    started = time.monotonic()
    status = solver.solve(model.cp, Found())
    report("seconds", time.monotonic() - started)
    if status == cp_model.MODEL_INVALID:
        raise AssertionError(model.cp.validate())
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE, cp_model.INFEASIBLE):
        if solver.best_objective_bound > lower:
            prove(round(solver.best_objective_bound))
        return None
    bound = upper if status == cp_model.INFEASIBLE else round(solver.best_objective_bound)
    if bound > lower:
        prove(bound)
    return None if status == cp_model.FEASIBLE else bound


class _Model:
    """The model for lengths from ``lower`` to ``longest``; ``starts[o][k]`` is start[o, k]."""

    def __init__(self, task: SolverTask, problem: SlotProblem, lower: int, longest: int, cp_model: Any) -> None:
        self.problem, self.longest = problem, longest
        self.windows = problem.windows(longest)
        self.cp = cp_model.CpModel()
        self.length = self.cp.new_int_var(lower, longest, "length")
        self.on: dict[tuple[int, int, int, int], Any] = {}
        self.starts: list[list[Any]] = []
        self.ends: list[list[Any]] = []
        self._hosts()
        self._operations()
        self._order_and_dependencies()
        self._memory_and_period()
        self.cp.minimize(self.length)
        self._hint(task)

    def _hosts(self) -> None:
        problem = self.problem
        for op in problem.ops:
            if op.kind == FORWARD and len(op.hosts) > 1:
                for k in range(op.count):
                    chosen = [self.cp.new_bool_var("on") for _ in op.hosts]
                    self.cp.add_exactly_one(chosen)
                    self.on.update(
                        ((op.group, k, op.stage, rank), on) for (rank, _), on in zip(op.hosts, chosen, strict=True)
                    )
        for one, other in problem.alike:
            self.cp.add(self._share(one) >= self._share(other))

    def _share(self, worker: int) -> Any:
        """The number of micro-batches that a worker runs."""
        alone = sum(
            op.count for op in self.problem.ops if op.kind == FORWARD and len(op.hosts) == 1 and op.worker == worker
        )
        return alone + sum(on for (_, _, _, rank), on in self.on.items() if rank == worker)

    def _operations(self) -> None:
        by_worker: dict[int, list[Any]] = {}
        for op, window in zip(self.problem.ops, self.windows, strict=True):
            single = len(op.hosts) == 1
            row: list[Any] = []
            ends: list[Any] = []
            for k in range(op.count):
                # Within one route, those before and after it need their time on the worker too.
                ahead = (k, op.count - 1 - k) if single and self._one_route(op.group) else (0, 0)
                first = window.first + ahead[0] * op.duration
                last = window.last - ahead[1] * op.duration
                # An empty domain is a contradiction, which the solver reports as infeasible.
                start = self.cp.new_int_var(min(first, last), last, f"start_{op.kind}_{op.stage}_{op.group}_{k}")
                self.cp.add(start >= first)
                row.append(start)
                if len({duration for _, duration in op.hosts}) == 1:
                    end: Any = start + op.duration
                else:
                    end = self.cp.new_int_var(first, last + max(duration for _, duration in op.hosts), "end")
                ends.append(end)
                for rank, duration in op.hosts:
                    on = 1 if single else self.on[op.group, k, op.stage, rank]
                    run = self.cp.new_optional_interval_var(start, duration, end, on, "run")
                    by_worker.setdefault(rank, []).append(run)
            self.starts.append(row)
            self.ends.append(ends)
        for intervals in by_worker.values():
            self.cp.add_no_overlap(intervals)

    def _one_route(self, group: int) -> bool:
        return all(len(op.hosts) == 1 for op in self.problem.ops if op.group == group)

    def _order_and_dependencies(self) -> None:
        problem = self.problem
        one_route = [self._one_route(group) for group in range(len(problem.groups))]
        for op, row, ends in zip(problem.ops, self.starts, self.ends, strict=True):
            for k in range(op.count - 1):
                if one_route[op.group]:
                    self.cp.add(ends[k] <= row[k + 1])
                elif (op.kind, op.stage) == (FORWARD, 0):
                    self.cp.add(row[k] <= row[k + 1])
            if op.source is not None:
                for k in range(op.count):
                    self.cp.add(row[k] >= self.ends[op.source][k] + op.lag)

    def _memory_and_period(self) -> None:
        problem, longest = self.problem, self.longest
        releases = {(op.group, op.stage): i for i, op in enumerate(problem.ops) if op.kind == problem.release_kind}
        begin: list[Any] = [0] * problem.stages
        if problem.staggered:
            begin = [0, *(self.cp.new_int_var(0, 2 * longest, f"begin_{s}") for s in range(1, problem.stages))]
        held: dict[int, list[Any]] = {}
        for op, row in zip(problem.ops, self.starts, strict=True):
            if op.kind != FORWARD:
                continue
            ends = self.ends[releases[op.group, op.stage]]
            for k in range(op.count):
                if problem.limits is not None:
                    size = self.cp.new_int_var(0, 2 * longest, "size")
                    for rank, _ in op.hosts:
                        on = 1 if len(op.hosts) == 1 else self.on[op.group, k, op.stage, rank]
                        hold = self.cp.new_optional_interval_var(row[k], size, ends[k], on, "hold")
                        held.setdefault(rank, []).append(hold)
                if problem.staggered:
                    self.cp.add(begin[op.stage] <= row[k])
                self.cp.add(self.length >= ends[k] + problem.tails[op.stage] - begin[op.stage])
        for rank, intervals in held.items():
            assert problem.limits is not None
            limit = problem.limits[rank % problem.stages]
            if len(intervals) > limit:
                self.cp.add_cumulative(intervals, [1] * len(intervals), limit)

    def _hint(self, task: SolverTask) -> None:
        """The plan known so far, with the micro-batches of a family in the order of their first forwards."""
        problem = self.problem
        known = {(kind, stage, number): (rank, start) for kind, stage, number, rank, start in placements(task.schedule)}
        order = [sorted(f, key=lambda number: known[FORWARD, 0, number][1]) for f in problem.families]
        for op, row in zip(problem.ops, self.starts, strict=True):
            for k, number in enumerate(order[problem.groups[op.group]]):
                rank, start = known[op.kind, op.stage, number]
                self.cp.add_hint(row[k], round(start / problem.slot))
                if op.kind == FORWARD and len(op.hosts) > 1:
                    for host, _ in op.hosts:
                        self.cp.add_hint(self.on[op.group, k, op.stage, host], host == rank)

    def placements(self, value: Any) -> list[Placement]:
        """The solution; ``value`` gives a variable's."""
        problem = self.problem
        found: list[Placement] = []
        for op, row in zip(problem.ops, self.starts, strict=True):
            for k, number in enumerate(problem.families[problem.groups[op.group]]):
                rank = op.worker
                if len(op.hosts) > 1:
                    rank = next(r for r, _ in op.hosts if value(self.on[op.group, k, op.stage, r]))
                found.append((op.kind, op.stage, number, rank, float(value(row[k]))))
        return found
