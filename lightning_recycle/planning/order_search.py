"""Large neighbourhood search: better orders, a part of the plan at a time, then the whole of it.

Concept: a solver cannot order a thousand operations from nothing, but it can order the sixty around one moment, or all
of two micro-batches, in a second. Each such part is a model (:mod:`order_model`) that asks for a shorter period than
that of the plan so far; where there is one, it becomes the plan. Parts grow while they are decided quickly. When
everything is free, the answer "no" is a proof.

The plan so far is not the solver's start solution, since it does not satisfy the model: its period is the cutoff.

Contract: deterministic but for the clock; runs in the solver's process and reports what it finds.

Must not know: the mathematics of the model.

Source: large neighbourhood search (Shaw, CP 1998).
"""

from __future__ import annotations

import time
from contextlib import suppress
from random import Random

from lightning_recycle.errors import PlanningError
from lightning_recycle.planning.bounds import lower_bound
from lightning_recycle.planning.mip_models import new_model, optimize
from lightning_recycle.planning.order_model import ContradictionError, OrderModel, Orders
from lightning_recycle.planning.result import TOLERANCE
from lightning_recycle.planning.schedule import Schedule
from lightning_recycle.planning.slots import Placement, schedule_from_placements
from lightning_recycle.planning.solver_process import Report, SolverTask

__all__ = ["improve_orders"]

_LEAST_GAIN = 1e-4  # of the period: the least improvement worth another solve
_FIRST_OPEN, _MOST_OPEN = 40, 2_000  # pairs of operations whose order is open in a model
_OPEN_PER_MOVER = 60
_SECONDS = 5.0  # for one part
_QUICK = 1.0  # seconds: parts decided faster than this grow
_GROWTH, _CREEP, _SHRINKAGE = 1.3, 1.05, 0.7


def improve_orders(task: SolverTask, schedule: Schedule, deadline: float, report: Report) -> tuple[Schedule, bool]:
    """The best schedule found, and whether it is proven that none is better.

    Args:
        task: the solver and its settings.
        schedule: the plan to start from.
        deadline: of ``time.monotonic()``.
        report: receives solutions and the solver's use.
    """
    return _Search(task, schedule, deadline, report).run()


class _Search:
    def __init__(self, task: SolverTask, schedule: Schedule, deadline: float, report: Report) -> None:
        self.task, self.best, self.deadline, self.report = task, schedule, deadline, report
        # Random.random() gives the same numbers in every Python version; its other methods need not.
        self.draw = Random(task.seed).random
        self.goal = lower_bound(schedule.problem) * (1 + TOLERANCE)
        self.orders = Orders(schedule)
        self.open = float(_FIRST_OPEN)
        self.whole: int | None = None
        """Open orders if everything is free; None if not known for the present plan."""

    def run(self) -> tuple[Schedule, bool]:
        """See :func:`improve_orders`."""
        while self.best.period > self.goal and time.monotonic() < self.deadline - 0.1:
            if self._whole_fits():
                answer = self._ask(set(range(len(self.orders))), self._movers(), self.deadline - time.monotonic())
                if answer is False:
                    self.report("bound", self.best.period if self._in_slots() else self._target())
                    return self.best, self._in_slots()
            else:
                answer = self._ask(*self._part(), _SECONDS)
            if answer is None:
                self.open = max(_FIRST_OPEN / 2, self.open * _SHRINKAGE)
        return self.best, self.best.period <= self.goal

    def _in_slots(self) -> bool:
        return self.task.problem is not None and self.task.problem.exact

    def _target(self) -> float:
        """The period to ask for. In slots, no other value lies between it and the present one."""
        period = self.best.period
        problem = self.task.problem
        if problem is None or not problem.exact:
            return period * (1 - _LEAST_GAIN)
        # Two different fractions of a slot with denominators up to S are at least 1 / S^2 apart.
        finest = problem.slot / (problem.stages**2 if problem.staggered else 1)
        return period - finest / 2

    def _movers(self) -> set[tuple[int, int]]:
        """Every micro-batch and stage where there is a choice."""
        orders = self.orders
        return {(number, stage) for op, (_, stage, number) in enumerate(orders.keys) if len(orders.hosts[op]) > 1}

    def _whole_fits(self) -> bool:
        """Whether the whole plan is small enough to be the next part."""
        if self.whole is None:
            try:
                everything = OrderModel(self.orders, range(len(self.orders)), self._movers(), self._target())
                self.whole = len(everything.pairs)
            except ContradictionError:
                self.whole = 0
        return self.whole <= self.open

    def _ask(self, free: set[int], movers: set[tuple[int, int]], seconds: float) -> bool | None:
        """Look for a shorter period with this part free; whether there was one, None if it was not decided."""
        began = time.monotonic()
        try:
            model = OrderModel(self.orders, free, movers, self._target())
            if len(model.pairs) > _MOST_OPEN:
                return None
            solver = new_model(self.task)
            model.write(solver)
        except ContradictionError:
            self.open = min(_MOST_OPEN, self.open * _CREEP)
            return False
        seconds = min(seconds, self.deadline - time.monotonic())
        if seconds <= 0.0:
            return None
        feasible = optimize(solver, seconds, self.report)
        if feasible:
            self._adopt(model.placements())
        if feasible is not None and time.monotonic() - began < _QUICK:
            self.open = min(_MOST_OPEN, self.open * _GROWTH)
        return feasible

    def _adopt(self, placements: list[Placement]) -> None:
        # Operations without duration can leave an order open that then contradicts a dependency.
        with suppress(PlanningError):
            found = schedule_from_placements(self.best, placements)
            if found.period < self.best.period:
                self.best, self.orders, self.whole = found, Orders(found), None
                self.report("solution", placements)

    def _part(self) -> tuple[set[int], set[tuple[int, int]]]:
        """A random part with about the wanted number of open orders: around a moment, of some micro-batches, or of
        some workers."""
        choice = self.draw()
        if choice < 0.4:
            return self._around_a_moment(), set()
        if choice < 0.8:
            return self._microbatches()
        return self._workers(), set()

    def _around_a_moment(self) -> set[int]:
        orders = self.orders
        centre = orders.starts[int(self.draw() * len(orders))]
        near = sorted(range(len(orders)), key=lambda op: abs(orders.starts[op] - centre))
        # Pairs on a worker: with k operations on each of w workers, w k^2 / 2.
        workers = len(set(orders.ranks))
        return set(near[: int((2 * self.open * workers) ** 0.5) + 2])

    def _microbatches(self) -> tuple[set[int], set[tuple[int, int]]]:
        orders = self.orders
        rerouted = sorted({key[2] for op, key in enumerate(orders.keys) if len(orders.hosts[op]) > 1})
        everyone = sorted({key[2] for key in orders.keys})
        per_microbatch = max(1, len(orders) // len(everyone))
        per_worker = len(orders) / len(set(orders.ranks))
        count = max(1, int(self.open / (per_microbatch * per_worker / 4)))
        chosen: set[int] = set()
        while len(chosen) < min(count, len(everyone)):
            pool = rerouted if rerouted and self.draw() < 0.5 else everyone
            chosen.add(pool[int(self.draw() * len(pool))])
            if len(chosen) >= len(rerouted) and self.draw() < 0.3:
                break
        free = {op for op, key in enumerate(orders.keys) if key[2] in chosen}
        movers = sorted(mover for mover in self._movers() if mover[0] in chosen)
        # A mover opens its order against everything on each host: a few are enough for one model.
        movers.sort(key=lambda _: self.draw())
        return free, set(movers[: max(1, int(self.open / _OPEN_PER_MOVER))])

    def _workers(self) -> set[int]:
        orders = self.orders
        ranks = sorted(set(orders.ranks))
        chosen = {ranks[int(self.draw() * len(ranks))] for _ in range(max(1, int(self.open / 100)))}
        return {op for op, rank in enumerate(orders.ranks) if rank in chosen}
