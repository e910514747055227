"""Memory of a worker: its fixed part, and the bytes each operation adds or frees.

Concept: parameters, gradients, optimizer state and buffers are held whatever the schedule; the rest is for
micro-batches. Memory follows from the operations: F takes what the micro-batch's backward needs (``after_forward``), B
replaces that by what its W still needs (``after_backward``, which may be more: a linear layer keeps its input *and* the
gradient of its output), W frees the rest, and BW frees everything without the detour. The most that a worker holds is
therefore a property of the order of its operations, and of whether each backward is split.

A limit in micro-batches is the same with sizes of 1 (:meth:`Memory.counting`).

Contract: frozen, validated; deltas in :meth:`Memory.delta` are the only place that knows what an operation does to
memory. An operation takes memory at its start and frees it at its end.

Where a forward is computed again, F keeps less at its end (``checkpoint``), and R takes what F would have kept.

Must not know: schedules, torch.

Units: bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lightning_recycle.arguments import is_number
from lightning_recycle.errors import ConfigurationError, PlanningError
from lightning_recycle.planning.grid import OpKind

__all__ = ["Memory"]

_ROUNDING = 1e-9  # of the capacity; sums of bytes that are not whole numbers are not exact


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of one worker of each stage; all in bytes, one number per stage.

    Args:
        capacity: the memory of a worker.
        fixed: memory used without any micro-batch: parameters, gradients, optimizer state, the shadow of the
            last step, buffers.
        after_forward: memory held for one micro-batch between the start of F and the end of B or BW.
        after_backward: memory held for one micro-batch between B and the end of W (0 for a fused backward).
        checkpoint: memory held for one micro-batch between the end of F and R, where its forward is computed again;
            None if none may be.

    Raises:
        ConfigurationError: when a number is negative or missing.
    """

    capacity: tuple[float, ...]
    fixed: tuple[float, ...]
    after_forward: tuple[float, ...]
    after_backward: tuple[float, ...]
    checkpoint: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("capacity", "fixed", "after_forward", "after_backward", "checkpoint"):
            values = getattr(self, name)
            if values is None and name == "checkpoint":
                continue
            if not isinstance(values, Iterable) or isinstance(values, str):
                raise ConfigurationError(f"Memory({name}={values!r}): give one number of bytes per stage.")
            values = tuple(values)
            if len(values) != len(self.capacity) or not values:
                raise ConfigurationError(
                    f"Memory({name}) has {len(values)} numbers, capacity has {len(self.capacity)}: give one per stage."
                )
            if not all(is_number(value, 0) for value in values):
                raise ConfigurationError(f"Memory({name}={values!r}): give finite numbers of bytes, at least 0.")
            object.__setattr__(self, name, values)

    @classmethod
    def counting(cls, limits: Sequence[int]) -> Memory:
        """The memory in which a worker of stage s can hold ``limits[s]`` micro-batches from F to W or BW."""
        ones = (1,) * len(limits)
        return cls(tuple(limits), (0,) * len(limits), ones, ones)

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.capacity)

    def room(self, stage: int) -> float:
        """Bytes of a worker of ``stage`` that are free for micro-batches, with an allowance for rounding."""
        return self.capacity[stage] - self.fixed[stage] + _ROUNDING * self.capacity[stage]

    def delta(self, kind: OpKind, stage: int, recomputed: bool = False) -> float:
        """Bytes that a worker of ``stage`` holds more after an operation of ``kind`` than before it; ``recomputed``:
        whether its micro-batch has an R.
        """
        held = self.after_forward[stage]
        kept = held if self.checkpoint is None else self.checkpoint[stage]
        if kind is OpKind.FORWARD and recomputed:
            return kept
        if kind is OpKind.RECOMPUTE:
            return held - kept
        return sum(self.parts(kind, stage))

    def parts(self, kind: OpKind, stage: int) -> tuple[float, float]:
        """:meth:`delta` of a micro-batch that is not computed again: what is held from F to B, and from B to W."""
        held, waiting = self.after_forward[stage], self.after_backward[stage]
        if kind is OpKind.FORWARD:
            return held, 0.0
        if kind is OpKind.BACKWARD_INPUT:
            return -held, waiting
        if kind is OpKind.BACKWARD_WEIGHT:
            return 0.0, -waiting
        return (-held if kind is OpKind.BACKWARD else 0.0), 0.0

    def needed(self, kind: OpKind, stage: int) -> float:
        """Bytes that a worker of ``stage`` holds more in an operation of ``kind`` than before it."""
        if kind is OpKind.FORWARD:
            return max(self.after_forward[stage], self.delta(kind, stage, recomputed=True))
        return max(0.0, self.delta(kind, stage))

    def least(self, stage: int) -> float:
        """The fewest bytes that one micro-batch may hold after F, whether it is computed again or not."""
        held = self.after_forward[stage]
        return held if self.checkpoint is None else min(held, self.checkpoint[stage])

    def most(self, stage: int, each: float) -> float:
        """Number of micro-batches of ``each`` bytes that fit into a worker of ``stage``; infinite for 0 bytes."""
        return self.room(stage) // each if each else float("inf")

    def check(self) -> None:
        """Raises PlanningError when a stage has no room for one micro-batch: then no plan exists."""
        for stage in range(self.stages):
            self._check(stage, self.after_forward[stage])

    def in_flight_limit(self, most: int) -> tuple[int, ...]:
        """The number of micro-batches that fit into a worker of each stage whatever the order of its operations.

        Args:
            most: the limit where micro-batches need no memory, e.g. D * M.

        Raises:
            PlanningError: when a stage has no room for one micro-batch.
        """
        limits = []
        for stage in range(self.stages):
            each = max(self.after_forward[stage], self.after_backward[stage])
            self._check(stage, each)
            limits.append(int(min(most, self.most(stage, each))))
        return tuple(limits)

    def _check(self, stage: int, each: float) -> None:
        if self.room(stage) < each:
            raise PlanningError(
                f"a worker of stage {stage} has {self.capacity[stage]:,.0f} bytes, needs {self.fixed[stage]:,.0f} "
                f"without and {each:,.0f} more with one micro-batch: use smaller micro-batches, more stages or more "
                "memory."
            )
