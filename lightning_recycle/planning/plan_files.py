"""Plan files: ``plan.json``, read and written, and the CSV of ``torch.distributed.pipelining``.

Concept: ``plan.json`` is the content of :meth:`Schedule.to_plan`, documented in docs/planner.md. For torch,
``_PipelineScheduleRuntime._load_csv(file, format="compute_only")`` takes a line for each rank of a pipeline, with the
actions of that rank in order: stage, kind and micro-batch, as in ``0F0``. Kinds are F; B for a backward in one piece; I
and W for its two parts. The runtime inserts the messages. The pipelines of a grid are alike, so the lines of one serve
all; reducing gradients and stepping the optimizer is left to the caller, as in torch.

Contract: written atomically; what :func:`load_plan` returns has passed the validator, and a status or bound that the
schedule contradicts is an error. Every error is one line that names the file and says what to do. Torch binds a stage
to one rank of its pipeline and computes no forward again, so plans that need either are refused as CSV.

Must not know: planners, the plan library's keys, torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from os import PathLike
from typing import Any

from lightning_recycle.arguments import is_integer, is_number
from lightning_recycle.errors import PlanningError
from lightning_recycle.files import write_atomically, write_json
from lightning_recycle.planning.compact_schedule import read_schedule
from lightning_recycle.planning.grid import OpKind, Worker
from lightning_recycle.planning.problem import Problem
from lightning_recycle.planning.result import TOLERANCE, PlanResult, SolverUse, proven
from lightning_recycle.planning.schedule import Schedule
from lightning_recycle.planning.validation import InvalidScheduleError, validate

__all__ = ["check_torch_runs", "load_plan", "plan_to_json", "read_plan", "save_plan", "save_torch_csv"]


def plan_to_json(result: PlanResult | Schedule, *, columns: bool = False) -> dict[str, Any]:
    """The content of the plan file. A bare schedule counts as the heuristic's. ``columns``: as ``Schedule.to_plan``."""
    if isinstance(result, Schedule):
        result = proven(result, "heuristic")
    plan = result.schedule.to_plan(
        backend=result.backend, status=result.status, lower_bound=result.lower_bound, columns=columns
    )
    use = result.solver
    solver = {"calls": use.calls, "seconds": use.seconds, "reason": use.reason}
    return {**plan, "gap": result.gap, "found_by": result.found_by, "solver": solver}


def save_plan(path: str | PathLike[str], result: PlanResult | Schedule) -> None:
    """Write ``plan.json``, atomically.

    Raises:
        PlanningError: when the file cannot be written.
    """
    try:
        write_json(path, plan_to_json(result))
    except OSError as error:
        raise PlanningError(f"cannot write the plan to {path}: {error.strerror or error}.") from error


def load_plan(path: str | PathLike[str]) -> PlanResult:
    """Read and validate a plan file.

    Raises:
        PlanningError: when the file cannot be read, is damaged, of a newer schema, or its schedule breaks a rule.
    """
    try:
        with open(path, encoding="utf-8") as file:
            data = json.load(file)
    except OSError as error:
        raise PlanningError(f"cannot read the plan {path}: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise PlanningError(f"the plan {path} is damaged, it is not JSON ({error}): compute it again.") from error
    try:
        return read_plan(data)
    except InvalidScheduleError as error:
        raise PlanningError(
            f"the plan {path} breaks {len(error.violations)} rule(s), the first: {error.violations[0]}. "
            "Compute it again."
        ) from error
    except PlanningError as error:
        raise PlanningError(f"{path}: {error}") from error


def read_plan(data: Any) -> PlanResult:
    """The validated plan from the content of a plan file.

    Raises:
        PlanningError: as for :func:`load_plan`.
    """
    if not isinstance(data, Mapping):
        raise PlanningError("the plan is damaged: a JSON object is expected. Compute it again.")
    schedule = read_schedule(data)
    backend, status, bound = data.get("backend"), data.get("status"), data.get("lower_bound")
    if not isinstance(backend, str) or status not in ("optimal", "feasible"):
        raise PlanningError(f"the plan is damaged (backend {backend!r}, status {status!r}): compute it again.")
    if not is_number(bound):
        raise PlanningError(f"the plan is damaged (lower_bound {bound!r}): compute it again.")
    validate(schedule)
    claimed = data.get("makespan")
    if not is_number(claimed) or abs(claimed - schedule.makespan) > TOLERANCE * max(1.0, claimed):
        raise PlanningError(f"the plan is damaged (makespan {claimed!r} is not its schedule's): compute it again.")
    if bound > schedule.period * (1 + TOLERANCE):
        raise PlanningError(f"the plan is damaged (its period is below its lower_bound {bound:g}): compute it again.")
    if status == "optimal" and bound < schedule.period * (1 - TOLERANCE):
        raise PlanningError("the plan is damaged (called optimal above its lower_bound): compute it again.")
    found_by = data.get("found_by")
    if not isinstance(found_by, str):
        raise PlanningError(f"the plan is damaged (found_by {found_by!r}): compute it again.")
    solver = _solver_use(data.get("solver"))
    # The bound is not computed again: that takes longer than all else here.
    return PlanResult(schedule, backend, status, float(bound), found_by=found_by, solver=solver)


def _solver_use(data: Any) -> SolverUse:
    """What the file says of the solver."""
    try:
        use = SolverUse(**data)
    except TypeError as error:
        raise PlanningError(f"the plan is damaged (solver {data!r}): compute it again.") from error
    if not (is_integer(use.calls, 0) and is_number(use.seconds, 0) and isinstance(use.reason, str)):
        raise PlanningError(f"the plan is damaged (solver {data!r}): compute it again.")
    return use


_TORCH_LETTERS = {
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
                actions.append(f"{stage}{_TORCH_LETTERS[op.kind]}{op.microbatch.index}")
        lines.append(",".join(actions))
    try:
        write_atomically(path, "\n".join(lines) + "\n")
    except OSError as error:
        raise PlanningError(f"cannot write the plan to {path}: {error.strerror or error}.") from error
