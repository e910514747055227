"""The model for OR-tools' CP-SAT: start times as integers, one interval for each operation.

The mathematics, in the order of :mod:`milp`.

Sets
    operations (o, k): the k-th micro-batch of a group through operation o, in the group's fixed order.
Variables
    start[o, k] in slots; period (with the staggered optimizer) or makespan; begin[s] of each stage (staggered).
Constraints
    order         start[o, k] + p_o <= start[o, k+1]
    dependencies  start[o, k] >= start[a(o), k] + p_a(o) + lag
    no overlap    the intervals of a worker
    memory        the intervals from F to the end of W (BW), at most ``limit`` at once
    REDUCE, STEP  after every W (BW) of the stage
    staggered     begin[s] <= start of every F; begin[s] + period >= end of the stage's STEP
Objective
    minimise the period or makespan, which lies in ``lower .. upper - 1``.

Contract: as :mod:`milp`; runs in the solver's process.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from lightning_recycle.planning.solver_process import Report, SolverTask, SolverUnavailableError, proven_length
from lightning_recycle.planning.timing import FORWARD

__all__ = ["solve"]


def solve(task: SolverTask, report: Report) -> None:
    """Minimise the length below ``task.upper``; report bounds and solutions."""
    deadline = time.monotonic() + task.time_limit
    bound = _minimize(task, report, 1)
    problem, parts = task.problem, task.problem.stages
    if bound is None or not problem.exact or not problem.staggered or parts == 1 or bound <= task.lower:
        return
    # Periods can be fractions of a slot, see milp.
    left = deadline - time.monotonic()
    if left > 0.1:
        finer = replace(
            task,
            problem=problem.refined(parts),
            lower=(bound - 1) * parts + 1,
            upper=bound * parts,
            time_limit=left,
        )
        _minimize(finer, report, parts)


def _minimize(task: SolverTask, report: Report, parts: int) -> int | None:
    """The smallest length in slots (``task.upper`` if none is shorter); None when time ran out."""
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise SolverUnavailableError(f"{error}; pip install 'lightning-recycle[cpsat]'") from error

    problem = task.problem
    longest = task.upper - 1
    windows = problem.windows(longest)
    if task.lower > longest or any(window.last < window.first for window in windows):
        report("bound", proven_length(task.problem, task.upper, parts))
        return task.upper
    model = cp_model.CpModel()
    length = model.new_int_var(task.lower, longest, "length")

    starts: list[list[Any]] = []
    by_worker: dict[int, list[Any]] = {}
    for op, window in zip(problem.ops, windows, strict=True):
        row: list[Any] = []
        for k in range(op.count):
            first = window.first + k * op.duration
            last = window.last - (op.count - 1 - k) * op.duration
            if last < first:
                report("bound", proven_length(task.problem, task.upper, parts))
                return task.upper
            row.append(model.new_int_var(first, last, f"start_{op.kind}_{op.stage}_{op.microbatches[k]}"))
        starts.append(row)
        by_worker.setdefault(op.worker, []).extend(
            model.new_fixed_size_interval_var(start, op.duration, "run") for start in row
        )

    for op, row in zip(problem.ops, starts, strict=True):
        for k in range(op.count - 1):
            model.add(row[k] + op.duration <= row[k + 1])
        if op.source is not None:
            source = problem.ops[op.source]
            for k in range(op.count):
                model.add(row[k] >= starts[op.source][k] + source.duration + op.lag)
    for intervals in by_worker.values():
        model.add_no_overlap(intervals)

    releases = {(op.group, op.stage): index for index, op in enumerate(problem.ops) if op.kind == problem.release_kind}
    held: dict[int, list[Any]] = {}
    begin: list[Any] = [0] * problem.stages
    if problem.staggered:
        begin = [0, *(model.new_int_var(0, 2 * longest, f"begin_{s}") for s in range(1, problem.stages))]
    for op, row in zip(problem.ops, starts, strict=True):
        if op.kind != FORWARD:
            continue
        index = releases[op.group, op.stage]
        release = problem.ops[index]
        if problem.limits is not None and problem.limits[op.stage] < sum(
            other.count for other in problem.ops if other.worker == op.worker and other.kind == FORWARD
        ):
            for k in range(op.count):
                end = starts[index][k] + release.duration
                size = model.new_int_var(0, 2 * longest, "held")
                held.setdefault(op.worker, []).append(model.new_interval_var(row[k], size, end, "hold"))
        if problem.staggered:
            model.add(begin[op.stage] <= row[0])
        closing = starts[index][-1] + release.duration + problem.tails[op.stage]
        model.add(length >= closing - begin[op.stage])
    for op in problem.ops:
        if op.kind == FORWARD and op.worker in held:
            assert problem.limits is not None
            intervals = held.pop(op.worker)
            model.add_cumulative(intervals, [1] * len(intervals), problem.limits[op.stage])

    model.minimize(length)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = task.time_limit
    solver.parameters.num_workers = task.threads
    solver.parameters.random_seed = task.seed
    solver.parameters.log_search_progress = task.log

    class Found(cp_model.CpSolverSolutionCallback):
        def on_solution_callback(self) -> None:
            report("solution", [[self.value(start) / parts for start in row] for row in starts])

    status = solver.solve(model, Found())
    if status == cp_model.MODEL_INVALID:
        raise AssertionError(model.validate())
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE, cp_model.INFEASIBLE):
        return None
    bound = task.upper if status == cp_model.INFEASIBLE else round(solver.best_objective_bound)
    if bound > task.lower:
        report("bound", proven_length(task.problem, bound, parts))
    return None if status == cp_model.FEASIBLE else bound
