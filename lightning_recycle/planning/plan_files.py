"""Plan files: ``plan.json``, and the CSV of ``torch.distributed.pipelining``.

The format of ``plan.json`` is documented in docs/planner.md; what :func:`load_plan` returns has passed the validator,
and every error is one line that names the file and the remedy. For torch,
``_PipelineScheduleRuntime._load_csv(file, format="compute_only")`` takes a line for each rank of a pipeline, with its
actions in order: stage, kind (F; B for a backward in one piece; I and W for its two parts) and micro-batch, as in
``0F0``. Torch binds a stage to one rank of its pipeline and computes no forward again, so plans that need either are
refused as CSV.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from os import PathLike
from typing import Any

from lightning_recycle.arguments import is_integer, is_number
from lightning_recycle.errors import PlanningError, ReCycleError
from lightning_recycle.files import read_json, refusing, write_atomically, write_json
from lightning_recycle.planning.compact_schedule import CompactSchedule, Lane, compact, lane_problem
from lightning_recycle.planning.costs import Costs, Memory
from lightning_recycle.planning.grid import Grid, OpKind, Worker
from lightning_recycle.planning.problem import Problem, Technique
from lightning_recycle.planning.schedule import (
    TOLERANCE,
    OperationColumns,
    PlanResult,
    Schedule,
    SolverUse,
    proven,
    schedule_of_columns,
)
from lightning_recycle.planning.validation import InvalidScheduleError, validate

PLAN_SCHEMA = 1
"""Version of the plan file's format; a reader refuses unknown versions."""


def problem_to_json(problem: Problem) -> dict[str, Any]:
    """The problem's part of a plan file."""
    # Only where there are slow workers, a limit in bytes, or further lanes, so that all other plans stay the same.
    factors = [[worker.pipeline, worker.stage, factor] for worker, factor in problem.worker_factors]
    grid = {name: size for name, size in asdict(problem.grid).items() if name != "lanes"}
    if problem.grid.lanes != problem.grid.pipelines:
        grid["lanes"] = problem.grid.lanes
    memory = {} if problem.memory is None else {k: v for k, v in asdict(problem.memory).items() if v is not None}
    return {
        "grid": grid,
        "failed": [[worker.pipeline, worker.stage] for worker in sorted(problem.failed)],
        "costs": {name: _plain(value) for name, value in asdict(problem.costs).items()},
        "in_flight_limit": _plain(problem.in_flight_limit),
        "technique": asdict(problem.technique),
        **({"worker_factors": factors} if factors else {}),
        **({"memory": memory} if memory else {}),
    }


def plan_to_json(result: PlanResult | Schedule) -> dict[str, Any]:
    """The content of the plan file; a bare schedule counts as the heuristic's."""
    if isinstance(result, Schedule):
        result = proven(result, "heuristic")
    schedule, use = result.schedule, result.solver
    return {
        "schema": PLAN_SCHEMA,
        **problem_to_json(schedule.problem),
        "backend": result.backend,
        "status": result.status,
        "lower_bound": result.lower_bound,
        "gap": result.gap,
        "found_by": result.found_by,
        "solver": {"calls": use.calls, "seconds": use.seconds, "reason": use.reason},
        "period": schedule.period,
        "makespan": schedule.makespan,
        **_body(schedule),
    }


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _body(schedule: Schedule) -> dict[str, Any]:
    """The operations: those of all workers, or those of a lane."""
    if isinstance(schedule, CompactSchedule):
        lane = schedule.lane
        return {"lane": {"microbatches": lane.microbatches, "stages": [each.to_json() for each in lane.stages]}}
    workers = [
        {
            "pipeline": worker.pipeline,
            "stage": worker.stage,
            "ops": OperationColumns.of(schedule.workers[worker]).to_json(),
        }
        for worker in schedule.live_workers
    ]
    return {"workers": workers}


def _problem_of(plan: Mapping[str, Any]) -> Problem:
    """The problem that a plan file's content is a plan of.

    Raises:
        PlanningError: when it has none, or a schema that this version cannot read.
    """
    schema = plan.get("schema") if isinstance(plan, Mapping) else None
    if schema != PLAN_SCHEMA:
        raise PlanningError(
            f"a plan with schema {schema!r} cannot be read: this version reads schema {PLAN_SCHEMA}. Compute the plan "
            "again, or update lightning-recycle."
        )
    with _damage_reported():
        limit, memory = plan["in_flight_limit"], plan.get("memory")
        return Problem(
            grid=Grid(**plan["grid"]),
            costs=Costs(**plan["costs"]),
            failed=frozenset(Worker(*position) for position in plan["failed"]),
            technique=Technique(**plan["technique"]),
            in_flight_limit=None if limit is None else tuple(limit),
            worker_factors=tuple((Worker(d, s), factor) for d, s, factor in plan.get("worker_factors", ())),
            memory=None if memory is None else Memory(**memory),
        )


def read_schedule(plan: Mapping[str, Any]) -> Schedule:
    """The schedule in a plan file's content. It is not validated.

    Raises:
        PlanningError: when ``plan`` is not a plan, or has a schema that this version cannot read.
    """
    problem = _problem_of(plan)
    with _damage_reported():
        period = float(plan["period"])
        if "lane" in plan:
            stages = tuple(OperationColumns.from_json(stage) for stage in plan["lane"]["stages"])
            one = lane_problem(problem)
            if plan["lane"]["microbatches"] != one.grid.microbatches or len(stages) != one.grid.stages:
                raise PlanningError(f"its lane is none of the grid {one.grid}")
            return replace(compact(problem, Lane(one, stages)), period=period)
        columns = {
            Worker(entry["pipeline"], entry["stage"]): OperationColumns.from_json(entry["ops"])
            for entry in plan["workers"]
        }
        return schedule_of_columns(problem, columns, period)


@contextmanager
def _damage_reported() -> Iterator[None]:
    """Errors of damaged content as PlanningError."""
    try:
        yield
    except ReCycleError as error:
        raise PlanningError(f"the plan is damaged: {error}") from error
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise PlanningError(f"the plan is damaged ({error!r}): compute it again.") from error


def save_plan(path: str | PathLike[str], result: PlanResult | Schedule) -> None:
    """Write ``plan.json``, atomically.

    Raises:
        PlanningError: when the file cannot be written.
    """
    with refusing(f"write the plan to {path}", PlanningError):
        write_json(path, plan_to_json(result))


def load_plan(path: str | PathLike[str]) -> PlanResult:
    """Read and validate a plan file.

    Raises:
        PlanningError: when the file cannot be read, is damaged, of a newer schema, or its schedule breaks a rule.
    """
    data = read_json(path, "the plan", "compute it again", PlanningError)
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
    """The use of the solver as the file has it."""
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
    """Raises PlanningError for plans that re-route or compute forwards again."""
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
    """Write one pipeline's actions on micro-batches 0 to M - 1, a line per stage.

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
    with refusing(f"write the plan to {path}", PlanningError):
        write_atomically(path, "\n".join(lines) + "\n")
