"""Operations: the vocabulary of a schedule.

Concept: a worker's part of an iteration is a sequence of operations. The planner orders them, the executor runs them,
the simulator times them and the pictures draw them; all four share these types.

Contract: immutable values. ``OpKind`` is a ``str`` so its value is the name used in plan files.

Must not know: who executes an operation (the schedule says), how it is executed, torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from lightning_recycle.planning.grid import Microbatch

__all__ = ["Op", "OpKind", "ScheduledOp"]


class OpKind(str, Enum):
    """What a worker does with one micro-batch (F, R, B, W, BW) or once per iteration (REDUCE, STEP)."""

    FORWARD = "F"
    RECOMPUTE = "R"
    """The same forward again, before the micro-batch's backward. Where there is an R, its F kept a checkpoint: what the
    stage got, and nothing else."""
    BACKWARD_INPUT = "B"
    """Gradient with respect to the stage's input: the stage before waits for it."""
    BACKWARD_WEIGHT = "W"
    """Gradient with respect to the stage's parameters: nothing waits for it before REDUCE, so it fits into bubbles."""
    BACKWARD = "BW"
    """Both, fused: backward without decoupling."""
    REDUCE = "REDUCE"
    """All-reduce of the stage's gradients among its live workers: what the last W or BW has not hidden of it."""
    STEP = "STEP"
    """Optimizer step of the stage."""
    CHECK = "C"
    """A micro-batch of another worker of the stage once more, to compare the results. In no schedule: a pass puts it
    into the program of a worker (:mod:`~lightning_recycle.planning.check_places`)."""

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class Op:
    """One operation at ``stage``; ``microbatch`` is None for REDUCE and STEP."""

    kind: OpKind
    stage: int
    microbatch: Microbatch | None = None

    def __str__(self) -> str:
        return f"{self.kind}{'' if self.microbatch is None else self.microbatch}@{self.stage}"


@dataclass(frozen=True, slots=True)
class ScheduledOp:
    """An operation with its planned times from the start of the iteration, in the unit of the costs."""

    op: Op
    start: float
    end: float

    @property
    def duration(self) -> float:
        """``end - start``."""
        return self.end - self.start
