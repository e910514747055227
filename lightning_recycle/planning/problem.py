"""The planning problem, a planner's input, and lower bounds for all of its plans.

Equal problems have the same plan. Lower bounds of period and makespan consider one worker of one stage with its share
of the micro-batches, the best one for the stage's workers, and hold whatever the routing:

- *Load*: it must run F, B and W of all of them, one at a time.
- *Round trip*: until its first gradient comes back it can only run forwards, as many as fit into memory; with a fused
  backward it can, after its last forward, only run the backwards of micro-batches that it still holds.
- *Memory*: with room for c micro-batches between F and B, the (k + c)-th forward waits for a B, at the earliest that of
  the k-th, which comes a round trip after its forward. With room for c between F and W it waits for a W in the same
  way, and all but c weight gradients come before the last forward. Each takes at least the smallest of its sizes.
- *Head and tail*: from the start of an earlier stage until the first forward arrives here, and from the last B here
  until the earlier stage has stepped. The time in between does not fit into that stage's period either.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heapify, heapreplace

from lightning_recycle.arguments import is_integer, is_number
from lightning_recycle.errors import ConfigurationError, PlanningError, counted
from lightning_recycle.planning.costs import Costs, Memory
from lightning_recycle.planning.grid import Grid, OpKind, Worker


@dataclass(frozen=True, slots=True)
class Technique:
    """Switches of ReCycle's techniques; re-routing is always on.

    Args:
        split_backward: a backward may be split into B and W, which the plan decides for each; otherwise all are
            fused (BW, which costs B + W).
        staggered: each stage steps its optimizer when its own gradients are reduced; consecutive iterations overlap.
    """

    split_backward: bool = True
    staggered: bool = True


@dataclass(frozen=True, slots=True)
class Problem:
    """One planning problem.

    Args:
        grid: the grid (D, S, M).
        costs: durations, with one value for each of the grid's stages.
        failed: the dead workers.
        technique: the techniques that may be used.
        in_flight_limit: the most micro-batches a worker of each stage may hold at once (from the start of F to the
            end of W or BW), one value per stage; None for no limit.
        worker_factors: factors by which F, B, W and STEP take longer on a worker than the stage's costs, e.g. 2.0 at
            half the speed; 1 for workers not named. REDUCE is unaffected. A mapping or pairs; kept as sorted pairs,
            without factors of 1.
        memory: what a worker of each stage has and what micro-batches need, in bytes; None for no limit. With
            ``in_flight_limit`` both hold.

    Raises:
        ConfigurationError: when a value is impossible.
        PlanningError: when no plan exists: every replica of a stage has failed, or a worker cannot hold one
            micro-batch.
    """

    grid: Grid
    costs: Costs
    failed: frozenset[Worker] = frozenset()
    technique: Technique = field(default_factory=Technique)
    in_flight_limit: tuple[int, ...] | None = None
    worker_factors: tuple[tuple[Worker, float], ...] = ()
    memory: Memory | None = None

    def __post_init__(self) -> None:
        grid = self.grid
        _check_stages("costs are", self.costs.stages, grid)
        object.__setattr__(self, "failed", frozenset(self.failed))
        for worker in sorted(self.failed):
            _check_worker("failed worker {} is", worker, grid)
        for stage, live in enumerate(self.live_counts()):
            if not live:
                raise PlanningError(
                    f"all {grid.lanes} replicas of stage {stage} have failed: its parameters are gone and "
                    "no plan exists. Restart from a checkpoint."
                )
        if self.in_flight_limit is not None:
            limits = tuple(self.in_flight_limit)
            object.__setattr__(self, "in_flight_limit", limits)
            if len(limits) != grid.stages or not all(is_integer(n, 1) for n in limits):
                raise ConfigurationError(
                    f"in_flight_limit={limits!r}: give {grid.stages} integers of at least 1, one per stage, or None."
                )

        object.__setattr__(self, "worker_factors", _factors(grid, self.worker_factors))
        if self.memory is not None:
            _check_stages("memory is", self.memory.stages, grid)
            self.memory.check()

    def factor(self, worker: Worker) -> float:
        """The factor by which operations take longer on ``worker`` than its stage's costs."""
        return next((factor for slow, factor in self.worker_factors if slow == worker), 1.0)

    def duration(self, kind: OpKind, worker: Worker) -> float:
        """Duration of an operation of ``kind`` on ``worker``, in the unit of the costs."""
        cost = self.costs.of(kind, worker.stage)
        return cost if kind is OpKind.REDUCE else cost * self.factor(worker)

    @property
    def memories(self) -> tuple[Memory, ...]:
        """All limits of memory, the one in micro-batches included."""
        counted = () if self.in_flight_limit is None else (Memory.counting(self.in_flight_limit),)
        return counted if self.memory is None else (*counted, self.memory)

    @property
    def measure(self) -> Memory:
        """The memory by which plans are compared: in bytes, else by micro-batches."""
        return self.memory or Memory.counting((1,) * self.grid.stages)

    def counted(self) -> Problem:
        """The problem with a limit in micro-batches that keeps within its bytes.

        Raises PlanningError when a worker cannot hold one micro-batch whose backward is split.
        """
        if self.memory is None:
            return self
        memory = self.memory
        if not self.technique.split_backward:
            memory = replace(memory, after_backward=(0,) * memory.stages)
        fit = memory.in_flight_limit(self.grid.global_microbatches)
        limit = fit if self.in_flight_limit is None else tuple(map(min, fit, self.in_flight_limit))
        return replace(self, in_flight_limit=limit, memory=None)

    def live_factors(self, stage: int) -> tuple[float, ...]:
        """Factors of the live workers of ``stage``, by pipeline."""
        factors = dict(self.worker_factors)
        return tuple(factors.get(worker, 1.0) for worker in self.live_workers(stage))

    @property
    def stays_home(self) -> bool:
        """Whether workers run only micro-batches of their own pipeline."""
        return not self.failed and not self.worker_factors and self.grid.lanes == self.grid.pipelines

    def without_vacant_lanes(self) -> Problem:
        """The same problem without the last lanes whose workers have all failed."""
        grid = self.grid
        lanes = max(grid.pipelines, 1 + max(worker.pipeline for worker in self.live_workers()))
        if lanes == grid.lanes:
            return self
        failed = frozenset(worker for worker in self.failed if worker.pipeline < lanes)
        return replace(self, grid=replace(grid, lanes=lanes), failed=failed)

    def live_counts(self) -> tuple[int, ...]:
        """Number of live workers of each stage."""
        lost = Counter(worker.stage for worker in self.failed)
        return tuple(self.grid.lanes - lost[stage] for stage in range(self.grid.stages))

    def live_workers(self, stage: int | None = None) -> tuple[Worker, ...]:
        """Live workers in rank order, of all stages or of one."""
        workers = self.grid.workers() if stage is None else (Worker(d, stage) for d in range(self.grid.lanes))
        return tuple(worker for worker in workers if worker not in self.failed)


def _check_stages(what: str, stages: int, grid: Grid) -> None:
    if stages != grid.stages:
        raise ConfigurationError(
            f"{what} given for {counted(stages, 'stage')}, the grid {grid} has {grid.stages}: give one value per stage."
        )


def _check_worker(what: str, worker: Worker, grid: Grid) -> None:
    if worker not in grid:
        raise ConfigurationError(
            f"{what.format(worker)} outside the grid {grid}: its pipeline must be in 0..{grid.lanes - 1} and its stage"
            f" in 0..{grid.stages - 1}."
        )


def _factors(
    grid: Grid, given: Mapping[Worker, float] | tuple[tuple[Worker, float], ...]
) -> tuple[tuple[Worker, float], ...]:
    factors = dict(given)
    for worker, factor in factors.items():
        _check_worker("worker_factors names {},", worker, grid)
        if not is_number(factor, 0, above=True):
            raise ConfigurationError(f"worker_factors[{worker}]={factor!r}: give a finite number above 0, e.g. 2.0.")
    return tuple(sorted((worker, float(factor)) for worker, factor in factors.items() if factor != 1))


def distribution_of(grid: Grid, failed: Collection[Worker]) -> tuple[int, ...]:
    """The number of failed workers in each stage."""
    return tuple(sum(worker.stage == stage for worker in failed) for stage in range(grid.stages))


def lower_bound(problem: Problem) -> float:
    """A lower bound of the period, in the unit of the costs."""
    return max(stage_lower_bounds(problem))


def makespan_lower_bound(problem: Problem) -> float:
    """A lower bound of the makespan of one iteration, in the unit of the costs."""
    bounds = _Bounds(problem)
    return max(map(bounds.makespan, range(problem.grid.stages)))


def stage_lower_bounds(problem: Problem) -> tuple[float, ...]:
    """For each stage, the lower bound of the period by its own work."""
    bounds = _Bounds(problem)
    of_stage = bounds.period if problem.technique.staggered else bounds.makespan
    return tuple(of_stage(stage) for stage in range(problem.grid.stages))


class _Bounds:
    def __init__(self, problem: Problem) -> None:
        costs, comm = problem.costs, problem.costs.communication
        self.problem = problem
        self.stages = problem.grid.stages
        self.fused = not problem.technique.split_backward
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
        # After its last B a stage with split backwards still has that micro-batch's W to do.
        self.closing = [
            self._stepped(0.0 if self.fused else costs.backward_weight[s] * fastest[s], s) for s in range(self.stages)
        ]
        self.inner = [self._least(partial(self._inner, s), s) for s in range(self.stages)]
        self.own = [self._stepped(self._least(partial(self._span, s), s), s) for s in range(self.stages)]

    def _stepped(self, seconds: float, stage: int) -> float:
        """``seconds``, and those until all workers of ``stage`` have reduced and stepped."""
        costs = self.problem.costs
        return seconds + costs.of(OpKind.REDUCE, stage) + costs.optimizer[stage] * max(self.factors[stage])

    def period(self, stage: int) -> float:
        """The least period for the work of ``stage``, for it and the stages before."""
        return max(self.own[stage], *(self._detour(before, stage) for before in range(stage)), 0.0)

    def makespan(self, stage: int) -> float:
        """Like the period, plus the way to the waiting stage."""
        detours = (self.forward_to[before] + self._detour(before, stage) for before in range(stage))
        return max(self.forward_to[stage] + self.own[stage], *detours, 0.0)

    def _detour(self, stage: int, later: int) -> float:
        """From the first F at ``stage`` through a worker of stage ``later`` to the STEP."""
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
        """The most of ``count`` micro-batches from F to B (BW), and from F to W (BW)."""
        until_backward = until_weight = float(count)
        for memory in self.memories:
            held = memory.least(stage)
            least = held if self.fused else min(held, memory.after_backward[stage])
            until_backward = min(until_backward, memory.most(stage, held))
            until_weight = min(until_weight, memory.most(stage, least))
        return int(until_backward), int(until_weight)

    def _wait(self, stage: int, count: int, factor: float) -> tuple[float, float]:
        """The least idle time, and the least time from the first F to the last."""
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
        """The smallest possible maximum of ``time(count, factor)`` over the workers."""
        return least_maximum(time, self.problem.grid.global_microbatches, self.factors[stage])


def least_maximum(time: Callable[[int, float], float], microbatches: int, factors: Sequence[float]) -> float:
    """The smallest maximum of ``time(count, factor)`` over workers that share work.

    Requires that no time is longer for a lower count.
    """
    if min(factors) == max(factors):
        return time(-(-microbatches // len(factors)), factors[0])
    queue = [(time(1, factor), 1, factor) for factor in factors]
    heapify(queue)
    worst = 0.0
    for _ in range(microbatches):  # each goes where it hurts least
        worst, count, factor = queue[0]
        heapreplace(queue, (time(count + 1, factor), count + 1, factor))
    return worst
