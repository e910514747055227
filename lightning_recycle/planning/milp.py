"""The mixed-integer model, through python-mip: CBC, HiGHS or Gurobi.

The mathematics. The length T of the iteration (with the staggered optimizer: its period) is fixed, and the model asks
whether a schedule of that length exists. The smallest such T is found by a search between the lower bound and the
heuristic's plan: T below the bound is excluded, T from the heuristic's on is known. Asking for one T at a time keeps
the model small, because T gives every operation a window, and the answer certain: an infeasible T is a proof.

Sets
    operations o: (group of interchangeable micro-batches, F / B / W / BW, stage), see :mod:`slots`; n_o micro-batches,
    duration p_o, worker w(o), source a(o) whose result it needs after a lag; slots t.
Variables
    N[o, t]: how many of the group have started o by slot t (integer, 0..n_o): start times and order in one. Outside
    the window of o it is the constant 0 or n_o.
    begun[s, t] (staggered only): whether stage s has begun its iteration by slot t (binary).
Constraints
    time          N[o, t-1] <= N[o, t]
    dependencies  N[o, t] <= N[a(o), t - lag - p_a(o)]       within a stage, and across stages with communication
    no overlap    sum over o of worker w of N[o, t] - N[o, t - p_o] <= 1
    memory        sum over groups on w of N[F, t] - N[W, t - p_W] <= limit           (BW for W when fused)
    REDUCE, STEP  part of the windows: every W ends before the stage's REDUCE and STEP fit into T
    staggered     N[F, t] <= n * begun[s, t];   N[W, t + T - tail_s - p_W] >= n * begun[s, t]
                  a stage ends REDUCE and STEP at most T after its start, where its next iteration begins
Objective
    the smallest T; for one T there is none.

Measured on the running example (benchmarks/planner.py --solvers, HiGHS, one core): starting from the worst possible
plan, every entry's optimum is found and proven in at most 3 s of processor time, except one in 11 s. A model with one
binary for each operation of each micro-batch and slot has 5,293 columns instead of 984 and takes 42 s for the decoupled
plan of 29 slots, which this one finds in 2 s.

Contract: runs in the solver's process (:mod:`solver_process`); reports bounds and solutions as it finds them, so a
time limit loses nothing.

Must not know: costs in seconds, how the caller uses the result.

Source: ReCycle (arXiv 2405.14009), section 4, for the problem; step variables of time-indexed scheduling as in
Artigues (Operations Research Letters 45, 2017), merged over identical jobs.
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, field
from typing import Any

import mip

from lightning_recycle.planning.slots import SlotProblem
from lightning_recycle.planning.solver_process import Report, SolverTask, SolverUnavailableError, proven_length
from lightning_recycle.planning.timing import FORWARD

__all__ = ["solve"]

_NAMES = {"cbc": mip.CBC, "highs": mip.HIGHS, "gurobi": mip.GUROBI}
_FIRST_SHARE = 0.4  # of the remaining time for one length; if undecided then, the search turns to longer ones


class _InfeasibleError(Exception):
    """A constraint without variables is violated."""


def solve(task: SolverTask, report: Report) -> None:
    """Search for the smallest length in ``task.lower .. task.upper - 1``; report bounds and solutions."""
    deadline = time.monotonic() + task.time_limit
    # A python-mip model that is garbage-collected while cffi parses a declaration waits forever for cffi's lock, which
    # this thread holds. So models are only collected between two solves, in _decide.
    gc.disable()
    search = _Search(task, report, deadline)
    bound = search.run(task.problem, task.lower, task.upper - 1, 1)
    if task.problem.staggered and task.problem.exact and bound is not None and bound > task.lower:
        # A period is the mean of a cycle through at most S stages, so that fractions of a slot down to 1/S can occur.
        parts = task.problem.stages
        if parts > 1:
            search.run(task.problem.refined(parts), (bound - 1) * parts + 1, bound * parts - 1, parts)


@dataclass
class _Search:
    task: SolverTask
    report: Report
    deadline: float

    def run(self, problem: SlotProblem, low: int, high: int, parts: int) -> int | None:
        """Decide lengths from ``low`` to ``high``; the smallest feasible one (``high`` + 1: none; None: undecided)."""
        proven = low  # no length below has a schedule
        undecided: int | None = None
        length, step = low, 1
        while length <= high:
            remaining = self.deadline - time.monotonic()
            if remaining <= 0.1 or problem.variables(length) > self.task.max_variables:
                return None
            share = remaining if length == high else max(_FIRST_SHARE * remaining, min(5.0, remaining))
            starts = self._decide(problem, length, share)
            if starts is None:
                undecided = length
                low = length + 1
            elif starts:
                self.report("solution", [[start / parts for start in row] for row in starts])
                high, step = length - 1, 1
            else:  # then no shorter length has a schedule either
                proven, undecided = length + 1, None
                low = length + 1
                if problem.exact:
                    self.report("bound", proven_length(problem, proven, parts))
            # From the bottom, where bounds are usually tight, in growing steps: longer lengths have larger models.
            length, step = min(low + step - 1, max(low, high)), 2 * step
        return proven if undecided is None else None

    def _decide(self, problem: SlotProblem, length: int, seconds: float) -> list[list[int]] | None:
        """Starts of all operations for this length; an empty list if there are none, None if time is up."""
        started = time.monotonic()
        gc.collect()
        try:
            model = _Model(problem, length, self.task)
        except _InfeasibleError:
            return []
        seconds -= time.monotonic() - started
        if seconds <= 0.0:
            return None
        status = model.mip.optimize(max_seconds=seconds)
        if status in (mip.OptimizationStatus.OPTIMAL, mip.OptimizationStatus.FEASIBLE):
            return model.starts()
        if status in (mip.OptimizationStatus.INFEASIBLE, mip.OptimizationStatus.INT_INFEASIBLE):
            return []
        return None


@dataclass
class _Model:
    """The model for one length; ``counts[o][t - first]`` is N[o, t]."""

    problem: SlotProblem
    length: int
    task: SolverTask
    mip: Any = field(init=False)
    counts: list[list[Any]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.mip = _new_model(self.task)
        self.windows = self.problem.windows(self.length)
        self._variables()
        self._time_and_dependencies()
        self._workers()
        if self.problem.staggered:
            self._stages()

    def _variables(self) -> None:
        for op, window in zip(self.problem.ops, self.windows, strict=True):
            if window.last < window.first:
                raise _InfeasibleError
            row: list[Any] = []
            for t in range(window.first, window.last):
                least, most = 0, op.count
                if op.duration:
                    most = min(most, (t - window.first) // op.duration + 1)
                    least = max(least, op.count + (t - window.last) // op.duration)
                if least > most:
                    raise _InfeasibleError
                row.append(least if least == most else self.mip.add_var(lb=least, ub=most, var_type=mip.INTEGER))
            if op.duration and op.count > (window.last - window.first) // op.duration + 1:
                raise _InfeasibleError
            self.counts.append(row)

    def _started(self, index: int, t: int) -> Any:
        """N[index, t]."""
        window = self.windows[index]
        if t < window.first:
            return 0
        return self.problem.ops[index].count if t >= window.last else self.counts[index][t - window.first]

    def _at_most(self, left: Any, right: Any) -> None:
        difference = left - right
        if isinstance(difference, (int, float)):
            if difference > 1e-9:
                raise _InfeasibleError
        elif not difference.expr:
            if difference.const > 1e-9:
                raise _InfeasibleError
        else:
            self.mip.add_constr(difference <= 0)

    def _time_and_dependencies(self) -> None:
        for index, (op, window) in enumerate(zip(self.problem.ops, self.windows, strict=True)):
            for t in range(window.first, window.last + 1):
                now = self._started(index, t)
                if t > window.first:
                    self._at_most(self._started(index, t - 1), now)
                if op.source is not None:
                    source = self.problem.ops[op.source]
                    self._at_most(now, self._started(op.source, t - op.lag - source.duration))

    def _workers(self) -> None:
        """No overlap and memory."""
        problem = self.problem
        by_worker: dict[int, list[int]] = {}
        for index, op in enumerate(problem.ops):
            by_worker.setdefault(op.worker, []).append(index)
        for indices in by_worker.values():
            ops = [problem.ops[index] for index in indices]
            stage = ops[0].stage
            begin = min(self.windows[index].first for index in indices)
            end = max(self.windows[index].last + op.duration for index, op in zip(indices, ops, strict=True))
            for t in range(begin, end + 1):
                self._at_most(self._running(indices, t), 1)
                for index, op in zip(indices, ops, strict=True):
                    if op.duration == 0:  # it may not start in the middle of another operation
                        starting = self._started(index, t) - self._started(index, t - 1)
                        self._at_most(starting + op.count * self._running(indices, t, since=1), op.count)
                if problem.limits is not None:
                    held = mip.xsum(
                        self._started(index, t) if op.kind == FORWARD else -1 * self._started(index, t - op.duration)
                        for index, op in zip(indices, ops, strict=True)
                        if op.kind in (FORWARD, problem.release_kind)
                    )
                    self._at_most(held, problem.limits[stage])

    def _running(self, indices: list[int], t: int, since: int = 0) -> Any:
        """Operations that run during slot t and have started by ``t - since``."""
        return mip.xsum(
            self._started(index, t - since) - self._started(index, t - self.problem.ops[index].duration)
            for index in indices
            if self.problem.ops[index].duration > since
        )

    def _stages(self) -> None:
        """The staggered optimizer: each stage's iteration ends at most ``length`` after its start."""
        problem, length = self.problem, self.length
        for stage in range(problem.stages):
            forwards = [i for i, op in enumerate(problem.ops) if op.stage == stage and op.kind == FORWARD]
            releases = [i for i, op in enumerate(problem.ops) if op.stage == stage and op.kind == problem.release_kind]
            begin = min(self.windows[index].first for index in forwards)
            end = max(self.windows[index].last for index in forwards)
            earlier: Any = 0
            for t in range(begin, end + 1):
                begun = 1 if stage == 0 else self.mip.add_var(var_type=mip.BINARY)
                self._at_most(earlier, begun)
                for index in forwards:
                    self._at_most(self._started(index, t), problem.ops[index].count * begun)
                for index in releases:
                    op = problem.ops[index]
                    done = self._started(index, t + length - problem.tails[stage] - op.duration)
                    self._at_most(op.count * begun, done)
                earlier = begun

    def starts(self) -> list[list[int]]:
        """For each operation, the starts of its micro-batches in ascending order."""
        found: list[list[int]] = []
        for index, (op, window) in enumerate(zip(self.problem.ops, self.windows, strict=True)):
            times: list[int] = []
            for t in range(window.first, window.last + 1):
                count = self._started(index, t)
                count = count if isinstance(count, int) else round(count.x)
                times += [t] * (count - len(times))
            assert len(times) == op.count
            found.append(times)
        return found


def _new_model(task: SolverTask) -> Any:
    """An empty model of the solver that the task names."""
    try:
        model = mip.Model(solver_name=_NAMES[task.backend])
    except (ImportError, OSError, mip.exceptions.MipBaseException) as error:
        reason = " ".join(str(error).split()).partition(". ")[0]
        raise SolverUnavailableError(f"python-mip cannot load it ({reason.rstrip('.')})") from error
    model.verbose = int(task.log)
    model.threads = task.threads
    model.seed = task.seed
    return model
