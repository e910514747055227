"""Turns a schedule into one worker's program: its operations with the messages they need. Pure data, no torch.

The schedule says which worker runs what in which order. The source of an operation's input and the destination of its
output follow from that, so messages are not separate operations.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_recycle.planning.grid import Worker, global_index
from lightning_recycle.planning.ops import Op, OpKind
from lightning_recycle.planning.schedule import Schedule

__all__ = ["Task", "worker_program"]


@dataclass(frozen=True, slots=True)
class Task:
    """An operation with everything the executor needs to know about it.

    Args:
        op: the operation.
        label: its readable name.
        index: the micro-batch's index in the global batch; -1 for REDUCE and STEP.
        source: rank of the worker whose message it waits for; None for none.
        destination: rank of the worker that gets its output; None for none.
        decoupled: for F, whether the micro-batch's weight gradients are computed in a separate W.
    """

    op: Op
    label: str
    index: int = -1
    source: int | None = None
    destination: int | None = None
    decoupled: bool = False


def worker_program(schedule: Schedule, worker: Worker) -> tuple[Task, ...]:
    """The tasks of ``worker`` for one step, in order."""
    grid = schedule.grid
    program = schedule.program(worker)
    deferred = {op.microbatch for op in program if op.kind is OpKind.BACKWARD_WEIGHT}
    tasks: list[Task] = []
    for op in program:
        if op.microbatch is None:
            tasks.append(Task(op, str(op)))
            continue
        before, after = (
            grid.rank(schedule.route(stage, op.microbatch)) if 0 <= stage < grid.stages else None
            for stage in (op.stage - 1, op.stage + 1)
        )
        if op.kind is OpKind.FORWARD:
            source, destination = before, after
        elif op.kind is OpKind.BACKWARD_WEIGHT:
            source, destination = None, None
        else:
            source, destination = after, before
        index = global_index(grid, op.microbatch)
        tasks.append(Task(op, str(op), index, source, destination, decoupled=op.microbatch in deferred))
    return tuple(tasks)
