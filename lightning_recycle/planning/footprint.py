"""Footprints: what workers measured of their memory, and the limits that follow for plans.

Concept: a run measures itself. Each worker reports once what its device (or machine) has, what it holds between two
steps, and what one micro-batch adds. From the footprints of all workers follows the :class:`Memory` of a plan, for any
set of failed workers: peers are alike, so the largest of a stage counts, and the smallest share of a device.

Contract: pure functions and frozen data, validated.

Must not know: how anything was measured, torch.

Units: bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Literal, TypeAlias

from lightning_recycle.arguments import is_integer, is_number, whole
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.planning.grid import Grid, Worker
from lightning_recycle.planning.memory import Memory

__all__ = ["Footprint", "MemoryLimit", "check_memory_limit", "memory_of"]

MemoryLimit: TypeAlias = float | int | Literal["auto"]
"""Bytes of a worker that the training may hold, as an integer; a fraction of its share of the device; or "auto"."""

_AUTO = 0.9
"""Of the share of a device. The rest is for what is not measured: temporary tensors within an operation (on CUDA they
are), messages on their way, and what an allocator cannot use."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """What one worker measured.

    Args:
        place: the device or machine whose memory it uses; workers with the same place share it.
        capacity: what that has.
        overhead: what the worker's process needs there besides tensors: libraries, a CUDA context.
        fixed: its tensors between two steps: parameters, buffers, gradients, optimizer state, the previous version.
        messages: buffers for the messages of one micro-batch, which stay from step to step.
        after_forward: what one micro-batch holds from F on.
        after_backward: what one micro-batch holds from B on, until W.
        checkpoint: what one micro-batch holds from F on, until R, if its forward is computed again.
        temporary: what an operation takes besides while it runs, at most; 0 if that is not known.
    """

    place: str
    capacity: int
    overhead: int
    fixed: int
    messages: int
    after_forward: int
    after_backward: int
    checkpoint: int
    temporary: int = 0

    def __post_init__(self) -> None:
        for item in fields(self)[1:]:
            whole("Footprint", item.name, getattr(self, item.name))


def check_memory_limit(limit: MemoryLimit) -> None:
    """Raises ConfigurationError if ``limit`` is none."""
    if limit == "auto" or is_integer(limit, 1):
        return
    if isinstance(limit, float) and is_number(limit, 0, above=True) and limit <= 1.0:
        return
    raise ConfigurationError(
        f'ReCycleStrategy(memory={limit!r}): give "auto", a number of bytes per worker as an integer, or a fraction of '
        "the device of at most 1.0."
    )


def memory_of(
    grid: Grid,
    failed: Collection[Worker],
    footprints: Mapping[Worker, Footprint],
    limit: MemoryLimit,
    *,
    recompute: bool = False,
) -> Memory:
    """The memory of a worker of each stage while ``failed`` are gone.

    Args:
        grid: the grid.
        failed: the dead workers; their micro-batches, and the messages of these, are their peers'.
        footprints: of at least one worker of each stage.
        limit: what may be used of a device.
        recompute: whether forwards may be computed again.
    """
    sharing = Counter(footprint.place for footprint in footprints.values())
    by_stage: list[list[Footprint]] = [[] for _ in range(grid.stages)]
    for worker, footprint in footprints.items():
        by_stage[worker.stage].append(footprint)
    live = Counter(worker.stage for worker in grid.workers() if worker not in failed)
    capacity, fixed = [], []
    for stage, found in enumerate(by_stage):
        capacity.append(min(_allowed(footprint, sharing[footprint.place], limit) for footprint in found))
        most = -(-grid.global_microbatches // max(1, live[stage]))
        own = max(footprint.fixed + footprint.temporary for footprint in found)  # one operation runs at a time
        fixed.append(own + most * max(footprint.messages for footprint in found))
    return Memory(
        tuple(capacity),
        tuple(fixed),
        tuple(max(footprint.after_forward for footprint in found) for found in by_stage),
        tuple(max(footprint.after_backward for footprint in found) for found in by_stage),
        tuple(max(footprint.checkpoint for footprint in found) for found in by_stage) if recompute else None,
    )


def _allowed(footprint: Footprint, sharing: int, limit: MemoryLimit) -> float:
    """Bytes of tensors that a worker may hold."""
    if limit == "auto":
        limit = _AUTO
    if isinstance(limit, int):
        return limit
    return max(0.0, limit * footprint.capacity / sharing - footprint.overhead)
