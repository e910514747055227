"""The mixed-integer model, through python-mip: CBC, HiGHS or Gurobi.

The mathematics. The length T of the iteration (with the staggered optimizer: its period) is fixed, and the model asks
whether a schedule of that length exists. The smallest such T is found by a search between the lower bound and the
best plan known: T below the bound is excluded, T from that plan's on is known. Asking for one T at a time keeps
the model small, because T gives every operation a window, and the answer certain: an infeasible T is a proof.

Sets
    families f of m_f interchangeable micro-batches; groups g, the routes of a family; operations o: (group, F / B / W
    / BW, stage), see :mod:`slots`, with family f(o), group g(o), duration p_o, worker w(o), and source a(o) whose
    result it needs after a lag; slots t.
Variables
    n[g]: how many micro-batches of its family take route g (integer).
    N[o, t]: how many of them have started o by slot t (integer): start times and order in one. Outside the window of o
    it is 0 or n[g(o)].
    begun[s, t] (staggered only): whether stage s has begun its iteration by slot t (binary).
Constraints
    routing       sum over the groups of family f of n[g] = m_f; of pipelines that are alike, the first runs the most
    time          N[o, t-1] <= N[o, t]
    dependencies  N[o, t] <= N[a(o), t - lag - p_a(o)]       within a stage, and across stages with communication
    no overlap    sum over o of worker w of N[o, t] - N[o, t - p_o] <= 1
    memory        sum over groups on w of N[F, t] - N[W, t - p_W] <= limit           (BW for W when fused)
    REDUCE, STEP  part of the windows: every W ends before the stage's REDUCE and STEP fit into T
    staggered     N[F, t] <= m_f * begun[s, t];   n[g] - N[W, t + T - tail_s - p_W] <= m_f * (1 - begun[s, t])
                  a stage ends REDUCE and STEP at most T after its start, where its next iteration begins
Objective
    the smallest T; for one T there is none.

It proves, but grows with the slots. Where durations have no long common slot, or it does not finish, the time is better
spent on orders (:mod:`order_search`), which have no slots: so each gets its share. Small models in slots come first;
before large ones come the orders, because a better plan also leaves fewer lengths to exclude.

Contract: runs in the solver's process (:mod:`solver_process`); reports bounds and solutions as it finds them, so a
time limit loses nothing.

Must not know: costs in seconds, how the caller uses the result.

Source: ReCycle (arXiv 2405.14009), section 4, for the problem; step variables of time-indexed scheduling as in
Artigues (Operations Research Letters 45, 2017), merged over identical jobs.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import mip

from lightning_recycle.errors import PlanningError
from lightning_recycle.planning.mip_models import new_model, optimize
from lightning_recycle.planning.order_search import improve_orders
from lightning_recycle.planning.schedule import Schedule
from lightning_recycle.planning.slots import Placement, SlotProblem, schedule_from_placements
from lightning_recycle.planning.solver_process import Report, SolverTask, proven_length
from lightning_recycle.planning.timing import FORWARD

__all__ = ["solve"]

_FIRST_SHARE = 0.4  # of the remaining time for one length; if undecided then, the search turns to longer ones
_SMALL = 2_500  # variables of a model in slots that is usually decided in seconds: then the slots come first
_ORDERS_FIRST = 0.25  # of the time, for orders before the slots; what the slots leave goes to orders again
_SLOTS, _ROUNDED_SLOTS = 0.75, 0.2  # of the time that is left then; rounded durations prove nothing


class _InfeasibleError(Exception):
    """A constraint without variables is violated."""


def solve(task: SolverTask, report: Report) -> None:
    """Search for a schedule with a period below that of ``task.schedule``; report bounds and solutions."""
    deadline = time.monotonic() + task.time_limit
    began = time.monotonic()
    best, finished = task.schedule, False
    in_slots = task.problem
    if in_slots is None or not in_slots.exact or in_slots.variables(task.lower) > _SMALL:
        best, finished = improve_orders(task, best, began + _ORDERS_FIRST * task.time_limit, report)
    if in_slots is not None and not finished:
        share = _SLOTS if in_slots.exact else _ROUNDED_SLOTS
        search = _Search(task, report, time.monotonic() + share * (deadline - time.monotonic()))
        finished = search.prove(in_slots, task.slots_below(best.period))
        best = min([best, *search.found], key=lambda schedule: schedule.period)
    if not finished:
        improve_orders(task, best, deadline, report)


@dataclass
class _Search:
    task: SolverTask
    report: Report
    deadline: float
    found: list[Schedule] = field(default_factory=list)

    def prove(self, problem: SlotProblem, upper: int) -> bool:
        """Decide the lengths below ``upper``; whether the best plan found, or the one known, is optimal."""
        bound = self.run(problem, self.task.lower, upper - 1, 1)
        if bound is None or not problem.exact or not problem.complete:
            return False
        parts = problem.stages
        if not problem.staggered or bound <= self.task.lower or parts == 1:
            return True
        # A period is the mean of a cycle through at most S stages, so that fractions of a slot down to 1/S can occur.
        return self.run(problem.refined(parts), (bound - 1) * parts + 1, bound * parts - 1, parts) is not None

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
            placements = self._decide(problem, length, share)
            if placements is None:
                undecided = length
                low = length + 1
            elif placements:
                self.report("solution", placements)
                with suppress(PlanningError):  # rounded durations can leave an order open; the caller looks at it too
                    self.found.append(schedule_from_placements(self.task.schedule, placements))
                high, step = length - 1, 1
            else:  # then no shorter length has a schedule either
                proven, undecided = length + 1, None
                low = length + 1
                if problem.exact and problem.complete:
                    self.report("bound", proven_length(problem, proven, parts) * problem.slot * parts)
            # From the bottom, where bounds are usually tight, in growing steps: longer lengths have larger models.
            length, step = min(low + step - 1, max(low, high)), 2 * step
        return proven if undecided is None else None

    def _decide(self, problem: SlotProblem, length: int, seconds: float) -> list[Placement] | None:
        """A schedule of this length; an empty list if there is none, None if time is up."""
        started = time.monotonic()
        try:
            model = _Model(problem, length, self.task)
        except _InfeasibleError:
            return []
        seconds -= time.monotonic() - started
        if seconds <= 0.0:
            return None
        feasible = optimize(model.mip, seconds, self.report)
        if feasible is None:
            return None
        return problem.placements(model.starts()) if feasible else []


@dataclass
class _Model:
    """The model for one length; ``counts[o][t - first]`` is N[o, t]."""

    problem: SlotProblem
    length: int
    task: SolverTask
    mip: Any = field(init=False)
    sizes: list[Any] = field(init=False, default_factory=list)
    counts: list[list[Any]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.mip = new_model(self.task)
        self.windows = self.problem.windows(self.length)
        self._sizes()
        self._variables()
        self._time_and_dependencies()
        self._workers()
        if self.problem.staggered:
            self._stages()

    def _sizes(self) -> None:
        """n[g], their sums, and the symmetry between pipelines."""
        problem = self.problem
        most = [len(problem.families[family]) for family in problem.groups]
        for op, window in zip(problem.ops, self.windows, strict=True):
            fit = (window.last - window.first) // op.duration + 1 if op.duration else op.count
            most[op.group] = min(most[op.group], fit) if window.last >= window.first else 0
        of_family: dict[int, list[int]] = {}
        for group, family in enumerate(problem.groups):
            of_family.setdefault(family, []).append(group)
        self.sizes = [0] * len(most)
        for family, groups in of_family.items():
            count = len(problem.families[family])
            if sum(max(0, most[group]) for group in groups) < count:
                raise _InfeasibleError
            if len(groups) == 1:
                self.sizes[groups[0]] = count
                continue
            for group in groups:
                self.sizes[group] = self.mip.add_var(lb=0, ub=max(0, most[group]), var_type=mip.INTEGER)
            self.mip.add_constr(mip.xsum(self.sizes[group] for group in groups) == count)
        for one, other in problem.alike:
            self._at_most(self._share(other), self._share(one))

    def _share(self, worker: int) -> Any:
        """The number of micro-batches that a worker runs."""
        groups = {op.group for op in self.problem.ops if op.worker == worker}
        return mip.xsum(self.sizes[group] for group in sorted(groups))

    def _variables(self) -> None:
        for op, window in zip(self.problem.ops, self.windows, strict=True):
            size = self.sizes[op.group]
            known = isinstance(size, int)
            row: list[Any] = []
            for t in range(window.first, window.last):
                least, most = 0, op.count
                if op.duration:
                    most = min(most, (t - window.first) // op.duration + 1)
                    least = max(least, op.count + (t - window.last) // op.duration) if known else 0
                if least > most:
                    raise _InfeasibleError
                row.append(least if least == most else self.mip.add_var(lb=least, ub=most, var_type=mip.INTEGER))
            self.counts.append(row)

    def _started(self, index: int, t: int) -> Any:
        """N[index, t]."""
        window = self.windows[index]
        if t < window.first:
            return 0
        if t >= window.last:
            return self.sizes[self.problem.ops[index].group]
        return self.counts[index][t - window.first]

    def _at_most(self, left: Any, right: Any) -> None:
        difference = _minus(left, right)
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
                        starting = _minus(self._started(index, t), self._started(index, t - 1))
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
            _minus(self._started(index, t - since), self._started(index, t - self.problem.ops[index].duration))
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
                    size = self.sizes[op.group]
                    done = self._started(index, t + length - problem.tails[stage] - op.duration)
                    self._at_most(_minus(size, done), op.count * (1 - begun))
                earlier = begun

    def starts(self) -> list[list[int]]:
        """For each operation, the starts of its micro-batches in ascending order."""
        found: list[list[int]] = []
        for index, window in enumerate(self.windows):
            times: list[int] = []
            for t in range(window.first, max(window.first, window.last) + 1):
                count = self._started(index, t)
                count = count if isinstance(count, int) else round(count.x)
                times += [t] * (count - len(times))
            found.append(times)
        return found


def _minus(left: Any, right: Any) -> Any:
    """The difference; python-mip's operator makes -1 times the variable of a variable minus itself."""
    return 0 if left is right else left - right
