"""The planning problem: a planner's input.

Concept: a grid, what each operation costs, which workers are dead or slow, how much memory there is, and which of
ReCycle's techniques may be used. Equal problems have the same plan.

Contract: frozen, hashable, validated on construction; every error names the wrong value and the remedy.

Must not know: how schedules are computed, torch.

Units: costs are in seconds, or in any unit used consistently ("slots"); memory is in bytes, or in micro-batches in
flight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from lightning_recycle.arguments import is_integer, is_number
from lightning_recycle.errors import ConfigurationError, PlanningError
from lightning_recycle.planning.costs import Costs
from lightning_recycle.planning.grid import Grid, OpKind, Worker
from lightning_recycle.planning.memory import Memory

__all__ = ["Costs", "Problem", "Technique"]


@dataclass(frozen=True, slots=True)
class Technique:
    """ReCycle's switches. Adaptive re-routing of dead workers' micro-batches is always on.

    Args:
        decoupled: a backward may be split into B and W, which the plan decides for each; otherwise all are fused (BW,
            which costs B + W).
        staggered: each stage steps its optimizer when its own gradients are reduced; consecutive iterations overlap.
    """

    decoupled: bool = True
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
        if self.costs.stages != grid.stages:
            raise ConfigurationError(
                f"costs are given for {self.costs.stages} stages, the grid {grid} has {grid.stages}: "
                "give one value per stage."
            )
        object.__setattr__(self, "failed", frozenset(self.failed))
        for worker in sorted(self.failed):
            if worker not in grid:
                raise ConfigurationError(
                    f"failed worker {worker} is outside the grid {grid}: "
                    f"its pipeline must be in 0..{grid.pipelines - 1} and its stage in 0..{grid.stages - 1}."
                )
        for stage, live in enumerate(self.live_counts()):
            if not live:
                raise PlanningError(
                    f"all {grid.pipelines} replicas of stage {stage} have failed: its parameters are gone and "
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
            if self.memory.stages != grid.stages:
                raise ConfigurationError(
                    f"memory is given for {self.memory.stages} stages, the grid {grid} has {grid.stages}: "
                    "give one value per stage."
                )
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
        """Every limit of memory that holds, the one in micro-batches included."""
        counted = () if self.in_flight_limit is None else (Memory.counting(self.in_flight_limit),)
        return counted if self.memory is None else (*counted, self.memory)

    def counted(self) -> Problem:
        """The problem with a limit in micro-batches alone, which no schedule of it can exceed in bytes.

        Raises:
            PlanningError: when a worker cannot hold one micro-batch whose backward is split.
        """
        if self.memory is None:
            return self
        memory = self.memory
        if not self.technique.decoupled:
            memory = replace(memory, after_backward=(0,) * memory.stages)
        fit = memory.in_flight_limit(self.grid.global_microbatches)
        limit = fit if self.in_flight_limit is None else tuple(map(min, fit, self.in_flight_limit))
        return replace(self, in_flight_limit=limit, memory=None)

    def live_factors(self, stage: int) -> tuple[float, ...]:
        """The factors of the workers of ``stage`` that have not failed, by pipeline."""
        factors = dict(self.worker_factors)
        return tuple(factors.get(worker, 1.0) for worker in self.live_workers(stage))

    def live_counts(self) -> tuple[int, ...]:
        """Number of live workers of each stage."""
        lost = Counter(worker.stage for worker in self.failed)
        return tuple(self.grid.pipelines - lost[stage] for stage in range(self.grid.stages))

    def live_workers(self, stage: int | None = None) -> tuple[Worker, ...]:
        """The workers that have not failed: all in rank order, or those of one stage by pipeline."""
        if stage is None:
            return tuple(worker for worker in self.grid.workers() if worker not in self.failed)
        peers = (Worker(d, stage) for d in range(self.grid.pipelines))
        return tuple(worker for worker in peers if worker not in self.failed)


def _factors(
    grid: Grid, given: Mapping[Worker, float] | tuple[tuple[Worker, float], ...]
) -> tuple[tuple[Worker, float], ...]:
    factors = dict(given)
    for worker, factor in factors.items():
        if worker not in grid:
            raise ConfigurationError(
                f"worker_factors names {worker}, outside the grid {grid}: its pipeline must be in "
                f"0..{grid.pipelines - 1} and its stage in 0..{grid.stages - 1}."
            )
        if not is_number(factor, 0, above=True):
            raise ConfigurationError(f"worker_factors[{worker}]={factor!r}: give a finite number above 0, e.g. 2.0.")
    return tuple(sorted((worker, float(factor)) for worker, factor in factors.items() if factor != 1))
