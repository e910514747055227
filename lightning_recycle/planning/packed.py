"""A schedule as a few blocks of bytes, to be sent to another process.

Concept: a pickle of a listed schedule has an object for every operation, and reading it is one call that lets no other
thread run until it is done: 8 s for 590,000 operations. Here a worker's operations are five arrays, which are read
at once; :func:`unpacked` makes the operations of one worker after the other, between which other threads run.

Contract: ``unpacked(pickle.loads(pickle.dumps(packed(schedule)))) == schedule``, to the last bit. A coded schedule,
which is small, stays what it is.

Must not know: connections, processes.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TypeAlias

from lightning_recycle.planning.coded import CodedSchedule
from lightning_recycle.planning.collector import collector_paused
from lightning_recycle.planning.grid import Microbatch, Worker
from lightning_recycle.planning.ops import Op, OpKind, ScheduledOp
from lightning_recycle.planning.problem import Problem
from lightning_recycle.planning.schedule import Schedule

__all__ = ["PackedSchedule", "packed", "unpacked"]

_KINDS = tuple(OpKind)
_NUMBERS = {kind: number for number, kind in enumerate(_KINDS)}
_NONE = -1  # the pipeline of an operation without micro-batch

_Columns: TypeAlias = tuple[bytes, "array[int]", "array[int]", "array[float]", "array[float]"]


@dataclass(frozen=True, slots=True)
class PackedSchedule:
    """A listed schedule: for each worker the kinds, pipelines, micro-batches, starts and ends of its operations."""

    problem: Problem
    workers: tuple[tuple[Worker, _Columns], ...]
    period: float


def packed(schedule: Schedule) -> PackedSchedule | CodedSchedule:
    """``schedule``, for a pickle that is read quickly."""
    if isinstance(schedule, CodedSchedule):
        return schedule
    workers = tuple((worker, _columns(operations)) for worker, operations in schedule.workers.items())
    return PackedSchedule(schedule.problem, workers, schedule.period)


def unpacked(schedule: PackedSchedule | CodedSchedule) -> Schedule:
    """What :func:`packed` was given."""
    if isinstance(schedule, CodedSchedule):
        return schedule
    with collector_paused():
        workers = {worker: _operations(worker.stage, columns) for worker, columns in schedule.workers}
    return Schedule(schedule.problem, workers, schedule.period)


def _columns(operations: tuple[ScheduledOp, ...]) -> _Columns:
    microbatches = [scheduled.op.microbatch for scheduled in operations]
    return (
        bytes(_NUMBERS[scheduled.op.kind] for scheduled in operations),
        array("l", [_NONE if microbatch is None else microbatch.pipeline for microbatch in microbatches]),
        array("l", [_NONE if microbatch is None else microbatch.index for microbatch in microbatches]),
        array("d", [scheduled.start for scheduled in operations]),
        array("d", [scheduled.end for scheduled in operations]),
    )


def _operations(stage: int, columns: _Columns) -> tuple[ScheduledOp, ...]:
    return tuple(
        ScheduledOp(Op(_KINDS[kind], stage, None if pipeline == _NONE else Microbatch(pipeline, index)), start, end)
        for kind, pipeline, index, start, end in zip(*columns, strict=True)
    )
