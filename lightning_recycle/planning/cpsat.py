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
    minimise the period or makespan, which lies in ``lower .. upper``.

The plan known so far is a solution of the model, of length ``upper``, and the complete hint: CP-SAT finds its first
solution there, and improves it by large neighbourhood search. (Asked for less than ``upper`` at once, it found nothing
within minutes where durations are unequal, because it only begins to search neighbourhoods once it has a solution.)

Contract: as :mod:`milp`; runs in the solver's process.
"""

from __future__ import annotations

import math
import time
from typing import Any

from lightning_recycle.planning.grid import Grid
from lightning_recycle.planning.slots import Placement, SlotProblem, placements
from lightning_recycle.planning.solver_process import Report, SolverTask, SolverUnavailableError, proven_length
from lightning_recycle.planning.timing import BACKWARD, FORWARD

__all__ = ["solve"]

_THREADS_FOR_ALL = 8
"""With so many threads CP-SAT gives each of its main methods one."""


def solve(task: SolverTask, report: Report) -> None:
    """Minimise the length from ``task.upper`` down; report bounds and solutions."""
    deadline = time.monotonic() + task.time_limit
    problem = task.problem
    assert problem is not None
    known = placements(task.schedule)
    bound, best = _minimize(task, problem, task.lower, task.upper, deadline, report, 1, known)
    parts = problem.stages
    if bound is None or not problem.exact or not problem.staggered or parts == 1 or bound <= task.lower:
        return
    # Periods can be fractions of a slot, see milp.
    if deadline - time.monotonic() > 0.1:
        _minimize(task, problem.refined(parts), (bound - 1) * parts + 1, bound * parts, deadline, report, parts, best)


def _minimize(
    task: SolverTask,
    problem: SlotProblem,
    lower: int,
    upper: int,
    deadline: float,
    report: Report,
    parts: int,
    known: list[Placement],
) -> tuple[int | None, list[Placement]]:
    """The smallest length in slots, at most ``upper``, or None when time ran out; and the best solution, ``known`` if
    none is shorter than ``upper``. Starts of placements are in the unit of the costs."""
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise SolverUnavailableError(f"{error}; pip install 'lightning-recycle[cpsat]'") from error

    def prove(bound: int) -> None:
        if problem.exact and problem.complete:
            report("bound", proven_length(problem, bound, parts) * problem.slot * parts)

    if lower > upper - 1 or any(window.last < window.first for window in problem.windows(upper - 1)):
        prove(upper)
        return upper, known
    model = _Model(problem, task.schedule.grid, lower, upper, cp_model)
    model.hint(known)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = max(0.0, deadline - time.monotonic())
    solver.parameters.num_workers = task.threads
    # Few threads take turns with all methods, neighbourhood search among them, instead of one each.
    solver.parameters.interleave_search = task.threads < _THREADS_FOR_ALL
    solver.parameters.random_seed = task.seed
    solver.parameters.log_search_progress = task.log
    best = known

    class Found(cp_model.CpSolverSolutionCallback):
        def on_solution_callback(self) -> None:
            nonlocal best
            if self.value(model.length) < upper:
                best = model.placements(self.value)
                report("solution", best)

    report("call", 1)
    started = time.monotonic()
    status = solver.solve(model.cp, Found())
    report("seconds", time.monotonic() - started)
    if status == cp_model.MODEL_INVALID:
        raise AssertionError(model.cp.validate())
    # Without a solution none is as short as the known plan, which rounded durations can make longer.
    bound = upper if status == cp_model.INFEASIBLE else round(solver.best_objective_bound)
    if bound > lower:
        prove(bound)
    return (bound if status in (cp_model.OPTIMAL, cp_model.INFEASIBLE) else None), best


class _Model:
    """The model for lengths from ``lower`` to ``longest``; ``starts[o][k]`` is start[o, k]."""

    def __init__(self, problem: SlotProblem, grid: Grid, lower: int, longest: int, cp_model: Any) -> None:
        self.problem, self.grid, self.longest = problem, grid, longest
        self.windows = problem.windows(longest)
        self.cp = cp_model.CpModel()
        self.length = self.cp.new_int_var(lower, longest, "length")
        self.on: dict[tuple[int, int, int, int], Any] = {}
        self.begin: list[Any] = [0] * problem.stages
        self.held: list[tuple[Any, int, int, int]] = []
        """How long a micro-batch is held, and the indices of its F and release and its place in them."""
        self.starts: list[list[Any]] = []
        self.ends: list[list[Any]] = []
        self._hosts()
        self._operations()
        self._order_and_dependencies()
        self._memory_and_period()
        self.cp.minimize(self.length)

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
        if problem.staggered:
            self.begin = [0, *(self.cp.new_int_var(0, 2 * longest, f"begin_{s}") for s in range(1, problem.stages))]
        held: dict[int, list[Any]] = {}
        for index, (op, row) in enumerate(zip(problem.ops, self.starts, strict=True)):
            if op.kind != FORWARD:
                continue
            release = releases[op.group, op.stage]
            ends = self.ends[release]
            for k in range(op.count):
                if problem.limits is not None:
                    size = self.cp.new_int_var(0, 2 * longest, "size")
                    self.held.append((size, index, release, k))
                    for rank, _ in op.hosts:
                        on = 1 if len(op.hosts) == 1 else self.on[op.group, k, op.stage, rank]
                        hold = self.cp.new_optional_interval_var(row[k], size, ends[k], on, "hold")
                        held.setdefault(rank, []).append(hold)
                if problem.staggered:
                    self.cp.add(self.begin[op.stage] <= row[k])
                self.cp.add(self.length >= ends[k] + problem.tails[op.stage] - self.begin[op.stage])
        for rank, intervals in held.items():
            assert problem.limits is not None
            limit = problem.limits[rank % problem.stages]
            if len(intervals) > limit:
                self.cp.add_cumulative(intervals, [1] * len(intervals), limit)

    def hint(self, known: list[Placement]) -> None:
        """A value for each variable from a plan with starts in the unit of the costs."""
        problem = self.problem
        rank_of, row_of = self._first_busiest(known)
        at = {
            (kind, stage, number): (rank_of.get(rank, rank), start)
            for kind, stage, number, rank, start in self._in_whole_slots(known)
        }
        values: list[list[int]] = []
        durations: list[list[int]] = []
        for op in problem.ops:
            family = [row_of.get(number, number) for number in problem.families[problem.groups[op.group]]]
            family.sort(key=lambda number: at[FORWARD, 0, number][1])
            placed = [at[op.kind, op.stage, number] for number in family]
            if self._one_route(op.group):  # interchangeable at each operation
                placed.sort(key=lambda rank_and_start: rank_and_start[1])
            values.append([start for _, start in placed])
            hosts = dict(op.hosts)
            durations.append([hosts.get(rank, op.duration) for rank, _ in placed])
            if op.kind == FORWARD and len(op.hosts) > 1:
                for k, (rank, _) in enumerate(placed):
                    for host, _ in op.hosts:
                        self.cp.add_hint(self.on[op.group, k, op.stage, host], host == rank)
        begin, length = [math.inf] * problem.stages, 0.0
        for index, op in enumerate(problem.ops):
            for k, start in enumerate(values[index]):
                self.cp.add_hint(self.starts[index][k], start)
                if len({duration for _, duration in op.hosts}) > 1:
                    self.cp.add_hint(self.ends[index][k], start + durations[index][k])
            if op.kind == FORWARD and problem.staggered and op.stage:
                begin[op.stage] = min(begin[op.stage], *values[index])
        for index, op in enumerate(problem.ops):
            if op.kind == problem.release_kind:
                since = begin[op.stage] if problem.staggered and op.stage else 0
                end = max(start + lasts for start, lasts in zip(values[index], durations[index], strict=True))
                length = max(length, end + problem.tails[op.stage] - since)
        for size, forward, release, k in self.held:
            self.cp.add_hint(size, values[release][k] + durations[release][k] - values[forward][k])
        if problem.staggered:
            for variable, first in zip(self.begin[1:], begin[1:], strict=True):
                self.cp.add_hint(variable, int(first))
        self.cp.add_hint(self.length, int(length))

    def _in_whole_slots(self, known: list[Placement]) -> list[tuple[int, int, int, int, int]]:
        """The same order with starts in whole slots.

        Where durations are whole slots, it is enough to round starts down: that breaks no constraint. Where durations
        are rounded, operations also wait for those before them.
        """
        stages, last = self.grid.stages, self.grid.stages - 1
        lasts = {(op.kind, rank): duration for op in self.problem.ops for rank, duration in op.hosts}
        lag = max((op.lag for op in self.problem.ops), default=0)
        origin = min(row[-1] for row in known)
        free: dict[int, int] = {}
        ends: dict[tuple[int, int, int], int] = {}
        found = []

        def flow(row: Placement) -> tuple[float, bool, int]:
            kind, stage, _, rank, start = row
            return start, lasts[kind, rank] > 0, kind * stages + (stage if kind == FORWARD else stages - stage)

        for kind, stage, number, rank, start in sorted(known, key=flow):
            if kind == FORWARD:
                ready = ends[FORWARD, stage - 1, number] + lag if stage else 0
            elif kind == BACKWARD and stage < last:
                ready = ends[BACKWARD, stage + 1, number] + lag
            else:
                ready = ends[kind - 1, stage, number]
            begin = max(math.floor((start - origin) / self.problem.slot + 1e-6), ready, free.get(rank, 0))
            ends[kind, stage, number] = free[rank] = begin + lasts[kind, rank]
            found.append((kind, stage, number, rank, begin))
        return found

    def _first_busiest(self, known: list[Placement]) -> tuple[dict[int, int], dict[int, int]]:
        """Exchange pipelines that are alike so that the first run the most, as the model asks.

        Returns:
            For a rank of the plan, the one that runs its part in the hint; for a micro-batch of the hint, the one of
            the plan whose times it takes. Those that stay are missing.
        """
        alike = list(dict.fromkeys(rank for pair in self.problem.alike for rank in pair))
        share = {rank: sum(row[0] == FORWARD and row[3] == rank for row in known) for rank in alike}
        stages, count = self.grid.stages, self.grid.microbatches
        rank_of: dict[int, int] = {}
        row_of: dict[int, int] = {}
        for new, old in zip(alike, sorted(alike, key=lambda rank: -share[rank]), strict=True):
            if new != old:
                to, source = new // stages, old // stages
                rank_of.update((source * stages + s, to * stages + s) for s in range(stages))
                row_of.update((to * count + m, source * count + m) for m in range(count))
        return rank_of, row_of

    def placements(self, value: Any) -> list[Placement]:
        """The solution, with starts in the unit of the costs; ``value`` gives a variable's value."""
        problem = self.problem
        found: list[Placement] = []
        for op, row in zip(problem.ops, self.starts, strict=True):
            for k, number in enumerate(problem.families[problem.groups[op.group]]):
                rank = op.worker
                if len(op.hosts) > 1:
                    rank = next(r for r, _ in op.hosts if value(self.on[op.group, k, op.stage, r]))
                found.append((op.kind, op.stage, number, rank, problem.slot * value(row[k])))
        return found
