"""A schedule as columns of numbers: a plan for 1,536 workers has 600,000 operations, and each field has a name.

Concept: the operations of all workers, one after the other, field by field. Their stage is that of their worker.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from lightning_recycle.planning.grid import Microbatch, Worker
from lightning_recycle.planning.ops import Op, OpKind, ScheduledOp
from lightning_recycle.planning.problem import Problem
from lightning_recycle.planning.schedule import Schedule

__all__ = ["ScheduleColumns"]

_KINDS = tuple(OpKind)
_INDICES = {kind: index for index, kind in enumerate(_KINDS)}
_NO_MICROBATCH = -1


@contextlib.contextmanager
def _no_garbage() -> Iterator[None]:
    """Keeps the garbage collector away from objects that are all to stay: with 24 x 64 workers and 128 micro-batches it
    took 5 of 6 seconds.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(frozen=True, slots=True)
class ScheduleColumns:
    """One schedule.

    Args:
        problem: the planning problem.
        period: the schedule's period.
        workers: pipeline, stage and number of operations of each worker.
        kinds: the kinds of the operations, as indices of :class:`OpKind`.
        pipelines: of the micro-batches of the operations; -1 where there is none.
        indices: of the micro-batches.
        starts: the planned times.
        ends: likewise.
    """

    problem: Problem
    period: float
    workers: list[tuple[int, int, int]]
    kinds: bytes
    pipelines: list[int]
    indices: list[int]
    starts: list[float]
    ends: list[float]

    @classmethod
    def of(cls, schedule: Schedule) -> ScheduleColumns:
        """The columns of ``schedule``."""
        scheduled = [operation for operations in schedule.workers.values() for operation in operations]
        microbatches = [operation.op.microbatch for operation in scheduled]
        return cls(
            schedule.problem,
            schedule.period,
            [(worker.pipeline, worker.stage, len(operations)) for worker, operations in schedule.workers.items()],
            bytes(_INDICES[operation.op.kind] for operation in scheduled),
            [_NO_MICROBATCH if m is None else m.pipeline for m in microbatches],
            [_NO_MICROBATCH if m is None else m.index for m in microbatches],
            [operation.start for operation in scheduled],
            [operation.end for operation in scheduled],
        )

    def schedule(self) -> Schedule:
        """The schedule.

        Raises:
            ValueError: if the columns do not fit together.
        """
        columns = (self.kinds, self.pipelines, self.indices, self.starts, self.ends)
        if {len(column) for column in columns} != {sum(count for _, _, count in self.workers)}:
            raise ValueError("the columns of the schedule have different lengths")
        if self.kinds and max(self.kinds) >= len(_KINDS):
            raise ValueError(f"an operation has the unknown kind {max(self.kinds)}")
        pairs = zip(self.pipelines, self.indices, strict=True)
        shared = {pair: Microbatch(*pair) for pair in set(pairs) if pair[0] != _NO_MICROBATCH}
        rows = zip(*columns, strict=True)
        with _no_garbage():
            workers = {
                Worker(pipeline, stage): tuple(self._operations(rows, stage, count, shared))
                for pipeline, stage, count in self.workers
            }
        return Schedule(self.problem, workers, self.period)

    @staticmethod
    def _operations(
        rows: Iterator[tuple[int, int, int, float, float]],
        stage: int,
        count: int,
        microbatches: Mapping[tuple[int, int], Microbatch],
    ) -> Iterator[ScheduledOp]:
        # `count` first: zip would take a row too many.
        for _, (kind, pipeline, index, start, end) in zip(range(count), rows, strict=False):
            yield ScheduledOp(Op(_KINDS[kind], stage, microbatches.get((pipeline, index))), start, end)
