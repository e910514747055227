"""Analytic lower bounds of period and makespan: what no schedule can beat.

Concept: consider one worker of one stage with its share of the micro-batches.

- *Load*: it must run F, B and W of all of them, one at a time.
- *Round trip*: until its first gradient comes back from the later stages it can only run forwards, as many as fit into
  memory; with a fused backward it can, after its last forward, only run the backwards of what it still holds.
- *Memory*: with room for c micro-batches between F and B, the (k + c)-th forward waits for a B, at the earliest that of
  the k-th, which comes a round trip after its forward. With room for c between F and W it waits for a W in the same
  way, and all but c weight gradients come before the last forward. Each takes at least the smallest of its sizes,
  which is that of a checkpoint where forwards may be computed again.
- *Head and tail*: from the start of an earlier stage until the first forward arrives here, and from the last B here
  until the earlier stage has stepped. What happens in between does not fit into that stage's period either.

The share is the best one for the stage's workers: an even split, or in proportion to their speeds.

Contract: pure; valid for every schedule that the validator accepts, whatever the routing; never above the optimum and
often equal to it (without a memory limit it is tight for the decoupled running example).

Must not know: any scheduler.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from heapq import heapify, heapreplace

from lightning_recycle.planning.grid import OpKind
from lightning_recycle.planning.problem import Problem

__all__ = ["lower_bound", "makespan_lower_bound", "stage_lower_bounds"]


def lower_bound(problem: Problem) -> float:
    """A lower bound of the period, in the unit of the costs."""
    return max(stage_lower_bounds(problem))


def makespan_lower_bound(problem: Problem) -> float:
    """A lower bound of the makespan of one iteration, in the unit of the costs."""
    bounds = _Bounds(problem)
    return max(map(bounds.makespan, range(problem.grid.stages)))


def stage_lower_bounds(problem: Problem) -> tuple[float, ...]:
    """For each stage, the lower bound of the period that its own work enforces, whatever fails in other stages."""
    bounds = _Bounds(problem)
    of_stage = bounds.period if problem.technique.staggered else bounds.makespan
    return tuple(of_stage(stage) for stage in range(problem.grid.stages))


class _Bounds:
    def __init__(self, problem: Problem) -> None:
        costs, comm = problem.costs, problem.costs.communication
        self.problem = problem
        self.stages = problem.grid.stages
        self.fused = not problem.technique.decoupled
        self.memories = problem.memories
        self.factors = (
            [problem.live_factors(s) for s in range(self.stages)]
            if problem.worker_factors
            else [(1.0,) * live for live in problem.live_counts()]
        )
        fastest = [min(factors) for factors in self.factors]
        # Distances between stages, for a micro-batch that never waits and always meets the fastest worker.
        self.forward_to, self.backward_to = [0.0], [0.0]  # from stage 0 to s, and back
        for stage in range(self.stages):
            backward = costs.backward_input[stage] + (costs.backward_weight[stage] if self.fused else 0.0)
            self.forward_to.append(self.forward_to[-1] + costs.forward[stage] * fastest[stage] + comm)
            self.backward_to.append(self.backward_to[-1] + backward * fastest[stage] + comm)
        # After its last B a stage with decoupled backward still has that micro-batch's W to do.
        self.closing = [
            (0.0 if self.fused else costs.backward_weight[s] * fastest[s])
            + costs.of(OpKind.REDUCE, s)
            + costs.optimizer[s] * max(self.factors[s])
            for s in range(self.stages)
        ]
        self.inner = [self._least(partial(self._inner, s), s) for s in range(self.stages)]
        self.own = [
            self._least(partial(self._span, s), s)
            + costs.of(OpKind.REDUCE, s)
            + costs.optimizer[s] * max(self.factors[s])
            for s in range(self.stages)
        ]

    def period(self, stage: int) -> float:
        """The least period that the work of ``stage`` allows, for itself and for the stages before it."""
        return max(self.own[stage], *(self._detour(before, stage) for before in range(stage)), 0.0)

    def makespan(self, stage: int) -> float:
        """Like the period, plus the way to the stage that waits."""
        detours = (self.forward_to[before] + self._detour(before, stage) for before in range(stage))
        return max(self.forward_to[stage] + self.own[stage], *detours, 0.0)

    def _detour(self, stage: int, later: int) -> float:
        """From the first F at ``stage`` through all F and B of a worker of stage ``later`` to the STEP of ``stage``."""
        way = self.forward_to[later] - self.forward_to[stage] + self.backward_to[later] - self.backward_to[stage]
        return way + self.inner[later] + self.closing[stage]

    def _round_trip(self, stage: int) -> float:
        """From the end of an F until its gradient can arrive here."""
        forward = self.forward_to[self.stages] - self.forward_to[stage + 1]
        backward = self.backward_to[self.stages] - self.backward_to[stage + 1]
        return forward + backward

    def _work(self, stage: int, factor: float) -> tuple[float, float, float]:
        costs = self.problem.costs
        forward, backward, weight = costs.forward[stage], costs.backward_input[stage], costs.backward_weight[stage]
        return forward * factor, backward * factor, weight * factor

    def _windows(self, stage: int, count: int) -> tuple[int, int]:
        """The most of ``count`` micro-batches between F and the end of B (BW), and between F and the end of W (BW)."""
        until_backward = until_weight = float(count)
        for memory in self.memories:
            held = memory.least(stage)
            least = held if self.fused else min(held, memory.after_backward[stage])
            until_backward = min(until_backward, memory.most(stage, held))
            until_weight = min(until_weight, memory.most(stage, least))
        return int(until_backward), int(until_weight)

    def _wait(self, stage: int, count: int, factor: float) -> tuple[float, float]:
        """The least idle time and the least time from the first F to the last, for ``count`` micro-batches."""
        forward, backward, weight = self._work(stage, factor)
        round_trip = self._round_trip(stage)
        until_backward, until_weight = self._windows(stage, count)
        first = max(0.0, round_trip - (until_backward - 1) * forward)
        last = max(0.0, round_trip - (until_weight - 1) * (backward + weight))
        # Disjoint unless all forwards come before the first backward, for which there must be memory.
        idle = first + last if until_backward < count else max(first, last)

        def to_last(window: int, release: float) -> float:
            rounds, rest = divmod(count - 1, window)
            return rounds * (forward + round_trip + release) + rest * forward

        to_backward = to_last(until_backward, backward + (weight if self.fused else 0.0))
        return idle, max(to_backward, to_last(until_weight, backward + weight))

    def _span(self, stage: int, count: int, factor: float) -> float:
        """From the first F to the last W or BW of a worker with ``count`` micro-batches."""
        if not count:
            return 0.0
        forward, backward, weight = self._work(stage, factor)
        idle, to_last = self._wait(stage, count, factor)
        chain = to_last + forward + self._round_trip(stage) + backward + weight
        return max(count * (forward + backward + weight) + idle, chain)

    def _inner(self, stage: int, count: int, factor: float) -> float:
        """From the first F to the last B or BW of a worker with ``count`` micro-batches."""
        if not count or self.fused:
            return self._span(stage, count, factor)
        forward, backward, weight = self._work(stage, factor)
        early = max(0, count - self._windows(stage, count)[1])  # W that come before the last F
        idle, to_last = self._wait(stage, count, factor)
        chain = to_last + forward + self._round_trip(stage) + backward
        return max(count * (forward + backward) + early * weight + idle, chain)

    def _least(self, time: Callable[[int, float], float], stage: int) -> float:
        """The smallest possible maximum of ``time(count, factor)`` over the stage's workers."""
        factors, total = self.factors[stage], self.problem.grid.global_microbatches
        if min(factors) == max(factors):
            return time(-(-total // len(factors)), factors[0])
        # Each micro-batch goes where it hurts least: optimal, because times only grow with the count.
        queue = [(time(1, factor), 1, factor) for factor in factors]
        heapify(queue)
        worst = 0.0
        for _ in range(total):
            worst, count, factor = queue[0]
            heapreplace(queue, (time(count + 1, factor), count + 1, factor))
        return worst
