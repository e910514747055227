"""Mixed-integer model of a :class:`TimeIndexedProblem` for CBC, HiGHS and Gurobi.

The length T of the iteration (with the staggered optimizer: its period) is fixed: "is there a schedule of length T?"
Asking for one T at a time, between the lower bound and the best plan known, gives every operation a window, which keeps
models small; an infeasible T is a proof.

Sets          f, g, w, t: families of m[f] micro-batches; their routes; workers; slots
              o: the operations k of route g at stage s, on worker w(o), with duration p[o] and source a(o)
Variables     n[g]: micro-batches that take route g (integer)
              N[o,t]: how many of them have started o by slot t (integer); outside the window of o 0 or n[g]
              begun[s,t]: with the staggered optimizer, whether stage s has begun by slot t (binary)
Constraints   routing       sum over the routes of family f of n[g] = m[f]
              time          N[o,t-1] <= N[o,t]
              dependencies  N[o,t] <= N[a(o), t - lag - p[a(o)]]
              no overlap    sum over o of worker w of N[o,t] - N[o, t - p[o]] <= 1
              memory        sum over g on w of N[F,t] - N[W, t - p[W]] <= L[s]
              period        part of the windows: every W ends before the stage's REDUCE and STEP fit into T
              staggered     N[F,t] <= m[f] begun[s,t];  n[g] - N[W, t + T - r[s] - p[W]] <= m[f] (1 - begun[s,t])

Source: ReCycle (arXiv 2405.14009), section 4; step variables of time-indexed scheduling as in Artigues (Operations
Research Letters 45, 2017), merged over identical jobs.
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import mip

from lightning_recycle.planning.child_process import Reporter, UnavailableError
from lightning_recycle.planning.exact_planner import Placement, SolverTask, StageOp, TimeIndexedProblem
from lightning_recycle.planning.timing import FORWARD

_NAMES = {"cbc": mip.CBC, "highs": mip.HIGHS, "gurobi": mip.GUROBI}
_REMEDIES = {
    "cbc": "pip install --force-reinstall mip",
    "highs": "pip install 'highsbox>=1.10'",
    "gurobi": "install Gurobi and set GUROBI_HOME",
}
_FIRST_SHARE = 0.5  # of the remaining time for one length; if undecided then, the search turns to longer ones


class _InfeasibleError(Exception):
    """A constraint without variables is violated."""


def solve(task: SolverTask, report: Reporter) -> None:
    """Find a shorter period; solutions and bounds are reported as they are found."""
    deadline = time.monotonic() + task.planner.time_limit
    problem, search = task.problem, _MilpSearch(task, report)
    length = search.shorten(problem, task.lower, task.upper, deadline)
    if length is not None and problem.exact and problem.staggered and problem.stages > 1 and length > task.lower:
        fine = problem.refined()  # periods can be fractions of a slot
        search.shorten(fine, (length - 1) * fine.parts + 1, length * fine.parts, deadline)


@dataclass
class _MilpSearch:
    task: SolverTask
    report: Reporter

    def shorten(self, problem: TimeIndexedProblem, low: int, high: int, deadline: float) -> int | None:
        """Decides lengths from ``low`` to below ``high``; the smallest feasible one.

        ``high``: there is none; None: undecided.
        """
        undecided, length, step = False, low, 1
        while length < high:
            remaining = deadline - time.monotonic()
            if remaining <= 0.1 or problem.variables(length) > self.task.planner.max_variables:
                return None
            share = remaining if length == high - 1 else max(_FIRST_SHARE * remaining, min(5.0, remaining))
            found = self._ask(problem, length, time.monotonic() + share)
            if found:
                high, step = length, 1
            elif found is None:
                low, undecided = length + 1, True
            else:  # then no shorter length has a schedule either
                low, undecided = length + 1, False
                self.report("bound", problem.bound(low))
            # From the bottom, where bounds are usually tight, in growing steps: longer lengths have larger models.
            length, step = min(low + step - 1, max(low, high - 1)), 2 * step
        return None if undecided else low

    def _ask(self, problem: TimeIndexedProblem, length: int, deadline: float) -> bool | None:
        """Whether there is a plan of this length, which is reported; None if time is up."""
        try:
            model = _MilpModel(problem, length, self.task)
        except _InfeasibleError:
            return False
        feasible = self._optimize(model, deadline)
        if feasible:
            self.report("solution", model.placements())
        return feasible

    def _optimize(self, model: _MilpModel, deadline: float) -> bool | None:
        """Whether the model has a solution; None when time is up."""
        self.report("call", 1)
        started = time.monotonic()
        status = model.mip.optimize(max_seconds=max(0.0, deadline - started))
        self.report("seconds", time.monotonic() - started)
        if status in (mip.OptimizationStatus.OPTIMAL, mip.OptimizationStatus.FEASIBLE):
            return True
        if status in (mip.OptimizationStatus.INFEASIBLE, mip.OptimizationStatus.INT_INFEASIBLE):
            return False
        return None


def _empty_model(task: SolverTask) -> Any:
    """A model of the task's solver; UnavailableError when python-mip cannot load it."""
    # A model that is collected while cffi parses a declaration waits forever for cffi's lock, which this thread
    # holds: so the automatic collector is off while models are built and solved, and old ones are collected here.
    gc.disable()
    gc.collect()
    try:
        model = mip.Model(solver_name=_NAMES[task.planner.backend])
    except (ImportError, OSError, mip.exceptions.MipBaseException) as error:
        reason = " ".join(str(error).split()).partition(". ")[0].rstrip(".")
        found = ", ".join(
            f"{name} {_version(name)}" for name in ("highsbox", "highspy") if task.planner.backend == "highs"
        )
        remedy = _REMEDIES[task.planner.backend]
        raise UnavailableError(
            f"python-mip {_version('mip')} cannot load it ({reason}{found and '; '}{found}): {remedy}"
        ) from error
    model.verbose = 0
    model.threads = task.planner.threads
    model.seed = 0
    return model


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "is not installed"


@dataclass
class _MilpModel:
    """The model for one length.

    ``counts[g][k, s]`` is N[o,t] from the first slot of its window on.
    """

    problem: TimeIndexedProblem
    length: int
    task: SolverTask
    mip: Any = field(init=False)
    sizes: list[Any] = field(init=False)
    counts: list[dict[StageOp, list[Any]]] = field(init=False)

    def __post_init__(self) -> None:
        self.mip = _empty_model(self.task)
        self.routes = self.problem.routes()
        self.windows = [self.problem.windows(route, self.length) for route in self.routes]
        self._routing()
        self.counts = [self._counts(g) for g in range(len(self.routes))]
        self._time_and_dependencies()
        for rank in self.problem.workers:
            self._worker(rank)
        if self.problem.staggered:
            self._stages()

    def _duration(self, g: int, step: StageOp) -> int:
        return self.problem.durations[step[0], self.routes[g].hosts[step[1]]]

    def _count(self, g: int) -> int:
        """m[f]: the micro-batches of route g's family."""
        return len(self.problem.families[self.routes[g].family].microbatches)

    def _routing(self) -> None:
        """n[g], and their sums; what is known is not a variable."""
        self.sizes = []
        for g in range(len(self.routes)):
            most = self._count(g)
            for step, (first, last) in self.windows[g].items():
                lasts = self._duration(g, step)
                most = max(0, min(most, (last - first) // lasts + 1 if lasts else most if last >= first else 0))
            hosts = self.problem.families[self.routes[g].family].hosts
            size = self._count(g) if all(len(ranks) == 1 for ranks in hosts) else None
            if size is not None and size > most:
                raise _InfeasibleError
            self.sizes.append(self.mip.add_var(lb=0, ub=most, var_type=mip.INTEGER) if size is None else size)
        for f, family in enumerate(self.problem.families):
            sizes = [size for size, route in zip(self.sizes, self.routes, strict=True) if route.family == f]
            if not isinstance(sizes[0], int):
                self.mip.add_constr(mip.xsum(sizes) == len(family.microbatches))

    def _counts(self, g: int) -> dict[StageOp, list[Any]]:
        """N[o,t] of a route."""
        rows: dict[StageOp, list[Any]] = {}
        known = isinstance(self.sizes[g], int)
        count = self.sizes[g] if known else self._count(g)
        for step, (first, last) in self.windows[g].items():
            row = rows[step] = []
            lasts = self._duration(g, step)
            for t in range(first, last):
                most = min(count, (t - first) // lasts + 1) if lasts else count
                least = max(0, count + (t - last) // lasts) if lasts and known else 0
                if least > most:
                    raise _InfeasibleError
                row.append(least if least == most else self.mip.add_var(lb=least, ub=most, var_type=mip.INTEGER))
        return rows

    def _started(self, g: int, step: StageOp, t: int) -> Any:
        """N[o,t]."""
        first, last = self.windows[g][step]
        if t < first:
            return 0
        return self.sizes[g] if t >= last else self.counts[g][step][t - first]

    def _at_most(self, left: Any, right: Any) -> None:
        difference = _minus(left, right)
        if isinstance(difference, mip.LinExpr) and difference.expr:
            self.mip.add_constr(difference <= 0)
        elif (difference.const if isinstance(difference, mip.LinExpr) else difference) > 1e-9:
            raise _InfeasibleError

    def _time_and_dependencies(self) -> None:
        for g, windows in enumerate(self.windows):
            for step, (first, last) in windows.items():
                source = self.problem.source(step)
                for t in range(first, last + 1):
                    now = self._started(g, step, t)
                    if t > first:
                        self._at_most(self._started(g, step, t - 1), now)
                    if source is not None:
                        before, lag = source
                        self._at_most(now, self._started(g, before, t - lag - self._duration(g, before)))

    def _worker(self, rank: int) -> None:
        """No overlap and memory of a worker."""
        problem, stage = self.problem, rank % self.problem.stages
        ops = [
            (g, step, self._duration(g, step))
            for g, route in enumerate(self.routes)
            if route.hosts[stage] == rank
            for step in problem.steps
            if step[1] == stage
        ]
        begin = min((self.windows[g][step][0] for g, step, _ in ops), default=0)
        end = max((self.windows[g][step][1] + lasts for g, step, lasts in ops), default=-1)
        for t in range(begin, end + 1):
            self._at_most(self._running(ops, t), 1)
            for g, step, lasts in ops:
                if lasts == 0:  # it may not start in the middle of another operation
                    starting = _minus(self._started(g, step, t), self._started(g, step, t - 1))
                    self._at_most(starting + self._count(g) * self._running(ops, t, since=1), self._count(g))
            if problem.limits is not None:
                forwards = mip.xsum(self._started(g, step, t) for g, step, _ in ops if step[0] == FORWARD)
                released = mip.xsum(
                    self._started(g, step, t - lasts) for g, step, lasts in ops if step[0] == problem.release
                )
                self._at_most(forwards - released, problem.most_held(rank))

    def _running(self, ops: list[tuple[int, StageOp, int]], t: int, since: int = 0) -> Any:
        """Operations that run during slot t and have started by ``t - since``."""
        return mip.xsum(
            _minus(self._started(g, step, t - since), self._started(g, step, t - lasts))
            for g, step, lasts in ops
            if lasts > since
        )

    def _stages(self) -> None:
        """The staggered optimizer: a stage ends at most ``length`` after its start."""
        problem, groups = self.problem, range(len(self.routes))
        for stage in range(problem.stages):
            forward, release = (FORWARD, stage), (problem.release, stage)
            begin = min(self.windows[g][forward][0] for g in groups)
            end = max(self.windows[g][forward][1] for g in groups)
            earlier: Any = 0
            for t in range(begin, end + 1):
                begun = 1 if stage == 0 else self.mip.add_var(var_type=mip.BINARY)
                self._at_most(earlier, begun)
                due = t + self.length - problem.closing[stage]
                for g in groups:
                    self._at_most(self._started(g, forward, t), self._count(g) * begun)
                    done = self._started(g, release, due - self._duration(g, release))
                    self._at_most(_minus(self.sizes[g], done), self._count(g) * (1 - begun))
                earlier = begun

    def placements(self) -> list[Placement]:
        """The solution, with starts in the unit of the costs."""
        starts = [{step: self._starts(g, step) for step in windows} for g, windows in enumerate(self.windows)]
        placed: list[Placement] = []
        for f, family in enumerate(self.problem.families):
            groups = [g for g, route in enumerate(self.routes) if route.family == f]
            members: dict[int, list[int]] = {g: [] for g in groups}
            arrivals = sorted((t, g) for g in groups for t in starts[g][FORWARD, 0])
            for number, (_, g) in zip(family.microbatches, arrivals, strict=True):
                members[g].append(number)
            placed += [
                (*step, number, self.routes[g].hosts[step[1]], self.problem.slot * t)
                for g in groups
                for step, times in starts[g].items()
                for number, t in zip(members[g], times, strict=True)
            ]
        return placed

    def _starts(self, g: int, step: StageOp) -> list[int]:
        times: list[int] = []
        first, last = self.windows[g][step]
        for t in range(first, max(first, last) + 1):
            count = self._started(g, step, t)
            times += [t] * ((count if isinstance(count, int) else round(count.x)) - len(times))
        return times


def _minus(left: Any, right: Any) -> Any:
    """``left - right``; python-mip turns x - x into -1 x."""
    return 0 if left is right else left - right
