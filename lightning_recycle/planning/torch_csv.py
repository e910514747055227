"""Fault-free plans as ``torch.distributed.pipelining`` reads them.

Concept: ``_PipelineScheduleRuntime._load_csv(file, format="compute_only")`` takes a line for each rank of a pipeline,
with the actions of that rank in order: stage, kind and micro-batch, as in ``0F0``. Kinds are F; B for a backward in one
piece; I and W for its two parts. The runtime inserts the messages. The pipelines of a grid are alike, so the lines of
one serve all; reducing gradients and stepping the optimizer is left to the caller, as in torch.

Contract: torch binds a stage to one rank of its pipeline and computes no forward again, so plans that need either are
refused.

Must not know: torch.
"""

from __future__ import annotations

from os import PathLike

from lightning_recycle.errors import PlanningError
from lightning_recycle.files import write_atomically
from lightning_recycle.planning.grid import Worker
from lightning_recycle.planning.ops import OpKind
from lightning_recycle.planning.problem import Problem
from lightning_recycle.planning.schedule import Schedule

__all__ = ["check_torch_runs", "save_torch_csv"]

_LETTERS = {
    OpKind.FORWARD: "F",
    OpKind.BACKWARD: "B",
    OpKind.BACKWARD_INPUT: "I",
    OpKind.BACKWARD_WEIGHT: "W",
}


def check_torch_runs(problem: Problem) -> None:
    """Raises PlanningError if plans for ``problem`` re-route micro-batches or compute forwards again."""
    if problem.failed or problem.worker_factors:
        raise PlanningError(
            "a plan with failed or slow workers re-routes micro-batches between pipelines, and"
            " torch.distributed.pipelining binds each stage to one rank: write a plan with failures=0, or format=json."
        )
    if problem.memory is not None and problem.memory.checkpoint is not None:
        raise PlanningError(
            "a plan may compute forwards again (memory.checkpoint), and the schedules of torch.distributed.pipelining"
            " cannot: write a plan with memory.checkpoint=null, or format=json."
        )


def save_torch_csv(path: str | PathLike[str], schedule: Schedule) -> None:
    """Write the lines of one pipeline, atomically: line s holds the actions of stage s on micro-batches 0 to M - 1.

    Raises:
        PlanningError: when torch cannot run the schedule, or the file cannot be written.
    """
    check_torch_runs(schedule.problem)
    lines = []
    for stage in range(schedule.grid.stages):
        actions = []
        for op in schedule.program(Worker(0, stage)):
            if op.microbatch is not None:
                if op.microbatch.pipeline != 0:
                    raise PlanningError(f"{op} of another pipeline runs in pipeline 0: write the plan as format=json.")
                actions.append(f"{stage}{_LETTERS[op.kind]}{op.microbatch.index}")
        lines.append(",".join(actions))
    try:
        write_atomically(path, "\n".join(lines) + "\n")
    except OSError as error:
        raise PlanningError(f"cannot write the plan to {path}: {error.strerror or error}.") from error
