"""The planning problem: what a planner is asked.

Concept: a grid, what each operation costs, which workers are dead, how much memory there is, and which of ReCycle's
techniques may be used. Two equal problems have the same plan.

Contract: frozen, hashable, validated on construction; every error names the wrong value and the remedy.

Must not know: how schedules are computed, torch.

Units: costs are in seconds, or in any unit used consistently ("slots"); memory is in micro-batches in flight.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from lightning_recycle.errors import ConfigurationError, PlanningError
from lightning_recycle.planning.grid import Grid, Worker
from lightning_recycle.planning.ops import OpKind

__all__ = ["Costs", "Problem", "Technique"]

_PER_STAGE = ("forward", "backward_input", "backward_weight", "reduce", "optimizer")


@dataclass(frozen=True, slots=True)
class Costs:
    """Durations per stage, and the time for a message between neighbouring stages.

    Args:
        forward: F of one micro-batch, one value per stage.
        backward_input: B of one micro-batch, one value per stage.
        backward_weight: W of one micro-batch, one value per stage.
        reduce: REDUCE of the stage's gradients, one value per stage.
        optimizer: STEP, one value per stage.
        communication: from the end of an operation until its result is at the next or previous stage.

    Raises:
        ConfigurationError: when a value is negative, not finite or missing.
    """

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    reduce: tuple[float, ...]
    optimizer: tuple[float, ...]
    communication: float = 0.0

    def __post_init__(self) -> None:
        for name in _PER_STAGE:
            values = getattr(self, name)
            if not isinstance(values, Iterable) or isinstance(values, str):
                raise ConfigurationError(f"Costs({name}={values!r}): give one number per stage, e.g. [1.0, 1.0].")
            object.__setattr__(self, name, tuple(_cost(name, value) for value in values))
        object.__setattr__(self, "communication", _cost("communication", self.communication))
        lengths = {name: len(getattr(self, name)) for name in _PER_STAGE}
        if len(set(lengths.values())) > 1 or self.stages == 0:
            raise ConfigurationError(f"Costs have different numbers of stages, {lengths}: give one per stage each.")

    @classmethod
    def uniform(
        cls,
        stages: int,
        forward: float = 1.0,
        backward_input: float = 1.0,
        backward_weight: float = 1.0,
        reduce: float = 0.0,
        optimizer: float = 0.0,
        communication: float = 0.0,
    ) -> Costs:
        """The same costs for every one of ``stages`` stages."""
        return cls(
            forward=(forward,) * stages,
            backward_input=(backward_input,) * stages,
            backward_weight=(backward_weight,) * stages,
            reduce=(reduce,) * stages,
            optimizer=(optimizer,) * stages,
            communication=communication,
        )

    @property
    def stages(self) -> int:
        """Number of stages that have costs."""
        return len(self.forward)

    def of(self, kind: OpKind, stage: int) -> float:
        """Duration of an operation of ``kind`` at ``stage``."""
        if kind is OpKind.FORWARD:
            return self.forward[stage]
        if kind is OpKind.BACKWARD_INPUT:
            return self.backward_input[stage]
        if kind is OpKind.BACKWARD_WEIGHT:
            return self.backward_weight[stage]
        if kind is OpKind.BACKWARD:
            return self.backward_input[stage] + self.backward_weight[stage]
        return self.reduce[stage] if kind is OpKind.REDUCE else self.optimizer[stage]


@dataclass(frozen=True, slots=True)
class Technique:
    """ReCycle's switches. Adaptive re-routing of dead workers' micro-batches is always on.

    Args:
        decoupled: split backward into B and W; otherwise one fused BW that costs B + W.
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
        failed: dead workers.
        technique: which techniques may be used.
        in_flight_limit: most micro-batches that a worker of each stage may hold at once (from the start of F to the
            end of W or BW), one value per stage; None for no limit.

    Raises:
        ConfigurationError: when a value is impossible.
        PlanningError: when every replica of a stage has failed, so that no plan exists.
    """

    grid: Grid
    costs: Costs
    failed: frozenset[Worker] = frozenset()
    technique: Technique = field(default_factory=Technique)
    in_flight_limit: tuple[int, ...] | None = None

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
        for stage in range(grid.stages):
            if not self.live_workers(stage):
                raise PlanningError(
                    f"all {grid.pipelines} replicas of stage {stage} have failed: its parameters are gone and "
                    "no plan exists. Restart from a checkpoint."
                )
        if self.in_flight_limit is not None:
            limits = tuple(self.in_flight_limit)
            object.__setattr__(self, "in_flight_limit", limits)
            if len(limits) != grid.stages or not all(isinstance(n, int) and n >= 1 for n in limits):
                raise ConfigurationError(
                    f"in_flight_limit={limits!r}: give {grid.stages} integers of at least 1, one per stage, or None."
                )

    def live_workers(self, stage: int | None = None) -> tuple[Worker, ...]:
        """The workers that have not failed: all in rank order, or those of one stage by pipeline."""
        if stage is None:
            return tuple(worker for worker in self.grid.workers() if worker not in self.failed)
        peers = (Worker(d, stage) for d in range(self.grid.pipelines))
        return tuple(worker for worker in peers if worker not in self.failed)


def _cost(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise ConfigurationError(f"Costs({name}): {value!r} is no duration; give a finite number of at least 0.")
    return float(value)
