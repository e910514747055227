"""Schedules as data: which worker runs which operation, in which order and when.

Concept: the times of one iteration for each live worker, plus the *period*: iteration k is the same, shifted by k *
period. Without the staggered optimizer, an iteration begins when the previous one has ended everywhere (period =
makespan); with it, a stage begins once it has stepped its own optimizer, so an iteration's warm-up overlaps the
cool-down of the previous one and the period can be shorter than the makespan.

Contract: immutable. A worker's operations are listed in the order of execution (which is the order of their starts);
the executor needs only that order and :meth:`Schedule.route`; times are for planning, simulation and pictures. A
Schedule is not necessarily correct: :func:`lightning_recycle.planning.validation.validate` checks that.

Must not know: how it was made, how it is run, torch.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from lightning_recycle.errors import PlanningError, ReCycleError
from lightning_recycle.planning.bounds import lower_bound as analytic_lower_bound
from lightning_recycle.planning.grid import Grid, Microbatch, Op, OpKind, ScheduledOp, Worker
from lightning_recycle.planning.memory import Memory
from lightning_recycle.planning.problem import Costs, Problem, Technique

__all__ = ["BODIES", "PLAN_SCHEMA", "Schedule", "gc_paused", "plan_schema", "problem_of", "staggered_period"]


@contextmanager
def gc_paused() -> Iterator[None]:
    """No automatic collection inside the block; changes nothing if it was off already."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


PLAN_SCHEMA = 1
"""The first version of the plan file's format; a reader refuses versions that it does not know."""

BODIES = {PLAN_SCHEMA: "workers", 2: "lane", 3: "workers", 4: "lane"}
"""By version of the plan file's format, where the operations are: those of all workers, or those of a lane
(:mod:`~lightning_recycle.planning.compact_schedule`). Versions 3 and 4 may compute forwards again and reduce gradients
in buckets."""

_KINDS = {kind.value: kind for kind in OpKind}


@dataclass(frozen=True)
class Schedule:
    """One iteration of training for one problem.

    Args:
        problem: the planning problem, including the failed workers.
        workers: the operations of each live worker in order of execution; failed workers have no entry.
        period: time between the same operation of two consecutive iterations, in the unit of the costs.
    """

    problem: Problem
    workers: Mapping[Worker, tuple[ScheduledOp, ...]] = field(hash=False)
    period: float

    @property
    def grid(self) -> Grid:
        """The problem's grid."""
        return self.problem.grid

    @property
    def failed(self) -> frozenset[Worker]:
        """The dead workers."""
        return self.problem.failed

    @property
    def live_workers(self) -> tuple[Worker, ...]:
        """The workers that execute this schedule, in rank order."""
        return tuple(sorted(self.workers))

    @property
    def num_operations(self) -> int:
        """The number of operations of all workers."""
        return sum(len(ops) for ops in self.workers.values())

    @cached_property
    def makespan(self) -> float:
        """Time from the start of an iteration's first operation to the end of its last, from empty to empty."""
        begin = min((ops[0].start for ops in self.workers.values() if ops), default=0.0)
        return max((ops[-1].end for ops in self.workers.values() if ops), default=0.0) - begin

    def program(self, worker: Worker) -> tuple[Op, ...]:
        """What ``worker`` executes, in order, without times."""
        return tuple(scheduled.op for scheduled in self._ops(worker))

    def route(self, stage: int, microbatch: Microbatch) -> Worker:
        """The worker that executes ``microbatch`` at ``stage``."""
        try:
            return self._routes[stage, microbatch]
        except KeyError:
            raise PlanningError(f"the schedule has no forward of micro-batch {microbatch} at stage {stage}.") from None

    def under(self, problem: Problem) -> Schedule:
        """The same operations and times as a schedule for ``problem``, whose costs and workers are the same."""
        return replace(self, problem=problem)

    def expand(self) -> Schedule:
        """The schedule with its operations listed for every worker: itself, unless it is coded."""
        return self

    def exchanges(self) -> Iterator[tuple[Worker, Worker]]:
        """The pairs of workers of consecutive stages that exchange messages in a step; a pair may come repeatedly."""
        for worker, operations in self.workers.items():
            for scheduled in operations if worker.stage < self.grid.stages - 1 else ():
                microbatch = scheduled.op.microbatch
                if scheduled.op.kind is OpKind.FORWARD and microbatch is not None:
                    yield worker, self.route(worker.stage + 1, microbatch)

    def idle_workers(self) -> frozenset[Worker]:
        """The live workers that run no micro-batch."""
        return frozenset(
            worker
            for worker, operations in self.workers.items()
            if all(scheduled.op.microbatch is None for scheduled in operations)
        )

    def recomputed(self, worker: Worker) -> frozenset[Microbatch]:
        """The micro-batches whose forward ``worker`` computes again before their backward."""
        kept = (op.microbatch for op in self.program(worker) if op.kind is OpKind.RECOMPUTE)
        return frozenset(microbatch for microbatch in kept if microbatch is not None)

    def peak_in_flight(self, worker: Worker) -> int:
        """The most micro-batches ``worker`` holds at once, counted from the start of F to the end of W or BW."""
        count = peak = 0
        for op in self.program(worker):
            if op.kind is OpKind.FORWARD:
                count += 1
                peak = max(peak, count)
            elif op.kind in (OpKind.BACKWARD_WEIGHT, OpKind.BACKWARD):
                count -= 1
        return peak

    def fits(self, problem: Problem) -> bool:
        """Whether no worker holds more than the memory of ``problem`` and its in-flight limits allow."""
        return all(
            self.peak(worker, memory) <= memory.fixed[worker.stage] + memory.room(worker.stage)
            for memory in problem.memories
            for worker in self.workers
        )

    def peak_memory(self, worker: Worker) -> float:
        """The most bytes that ``worker`` holds at once, with what it holds without micro-batches.

        Raises:
            PlanningError: when the problem does not say what micro-batches need.
        """
        memory = self.problem.memory
        if memory is None:
            raise PlanningError("the problem has no sizes in bytes: give Problem(memory=Memory(...)).")
        return self.peak(worker, memory)

    def peak(self, worker: Worker, memory: Memory) -> float:
        """The most that ``worker`` holds at once, in the unit of ``memory``, which says what each operation takes."""
        held = peak = memory.fixed[worker.stage]
        program = self.program(worker)
        recomputed = {op.microbatch for op in program if op.kind is OpKind.RECOMPUTE}
        for op in program:
            peak = max(peak, held + memory.needed(op.kind, worker.stage))
            held += memory.delta(op.kind, worker.stage, op.microbatch in recomputed)
        return peak

    def to_plan(
        self,
        *,
        backend: str = "heuristic",
        status: str | None = None,
        lower_bound: float | None = None,
        columns: bool = False,
    ) -> dict[str, Any]:
        """The plan file's content, ready for ``json.dump``.

        Args:
            backend: name of the planner that made the schedule.
            status: "optimal" or "feasible"; by default what the lower bound proves.
            lower_bound: proven bound of the period; by default the analytic one.
            columns: whether to write a worker's operations field by field, as the plan library does, instead of one
                object for each: a tenth of the size, and faster to read. :meth:`from_plan` reads both.
        """
        problem, costs = self.problem, self.problem.costs
        # Only where there are slow workers, so that all other plans stay the same.
        factors = [[worker.pipeline, worker.stage, factor] for worker, factor in problem.worker_factors]
        bound = analytic_lower_bound(problem) if lower_bound is None else lower_bound
        if status is None:
            status = "optimal" if self.period <= bound * (1 + 1e-9) else "feasible"
        return {
            "grid": {
                "pipelines": self.grid.pipelines,
                "stages": self.grid.stages,
                "microbatches": self.grid.microbatches,
            },
            "failed": [[worker.pipeline, worker.stage] for worker in sorted(self.failed)],
            "costs": {
                "forward": list(costs.forward),
                "backward_input": list(costs.backward_input),
                "backward_weight": list(costs.backward_weight),
                "reduce": list(costs.reduce),
                "optimizer": list(costs.optimizer),
                "communication": costs.communication,
                **({"buckets": list(costs.buckets)} if costs.buckets else {}),
            },
            "in_flight_limit": None if problem.in_flight_limit is None else list(problem.in_flight_limit),
            "technique": {"decoupled": problem.technique.decoupled, "staggered": problem.technique.staggered},
            "backend": backend,
            "status": status,
            "lower_bound": bound,
            "period": self.period,
            "makespan": self.makespan,
            **self._recorded(columns),
            **({"worker_factors": factors} if factors else {}),
            **({} if problem.memory is None else {"memory": _memory_record(problem.memory)}),
        }

    def _recorded(self, columns: bool) -> dict[str, Any]:
        """The operations in a plan file's content, and the version of their format."""
        workers = [
            {
                "pipeline": worker.pipeline,
                "stage": worker.stage,
                "ops": (_to_columns if columns else _to_records)(self.workers[worker]),
            }
            for worker in self.live_workers
        ]
        return {"schema": plan_schema(self.problem, "workers"), "workers": workers}

    @classmethod
    def from_plan(cls, plan: Mapping[str, Any]) -> Schedule:
        """The inverse of :meth:`to_plan`. The result is not validated: call ``validate`` on what you did not write.

        Raises:
            PlanningError: when ``plan`` is not a plan, or has a schema that this version cannot read.
        """
        problem = problem_of(plan)
        if BODIES[plan["schema"]] != "workers":
            raise PlanningError(f"a plan with schema {plan['schema']} does not list its operations: use load_plan.")
        try:
            with gc_paused():
                workers = {
                    Worker(entry["pipeline"], entry["stage"]): _from_columns(entry["ops"], entry["stage"])
                    if isinstance(entry["ops"], Mapping)
                    else tuple(_scheduled_op(record, entry["stage"]) for record in entry["ops"])
                    for entry in plan["workers"]
                }
            return cls(problem, workers, float(plan["period"]))
        except (KeyError, TypeError, ValueError) as error:
            raise PlanningError(f"the plan is damaged ({error!r}): compute it again.") from error

    def _ops(self, worker: Worker) -> tuple[ScheduledOp, ...]:
        try:
            return self.workers[worker]
        except KeyError:
            state = "has failed" if worker in self.failed else "is not part"
            raise PlanningError(f"worker {worker} {state} in this schedule, so it runs nothing.") from None

    @cached_property
    def _routes(self) -> dict[tuple[int, Microbatch], Worker]:
        return {
            (scheduled.op.stage, scheduled.op.microbatch): worker
            for worker, ops in self.workers.items()
            for scheduled in ops
            if scheduled.op.kind is OpKind.FORWARD and scheduled.op.microbatch is not None
        }


def plan_schema(problem: Problem, body: str) -> int:
    """The oldest version of the plan file's format that can say all of a plan for ``problem``; ``body`` as in
    :data:`BODIES`.
    """
    newer = bool(problem.costs.buckets) or (problem.memory is not None and problem.memory.checkpoint is not None)
    versions = sorted(version for version, has in BODIES.items() if has == body)
    return versions[-1 if newer else 0]


def problem_of(plan: Mapping[str, Any]) -> Problem:
    """What a plan file's content is the plan of, in any schema.

    Raises:
        PlanningError: when it does not say so, or has a schema that this version cannot read.
    """
    schema = plan.get("schema") if isinstance(plan, Mapping) else None
    if schema not in list(BODIES):
        raise PlanningError(
            f"a plan with schema {schema!r} cannot be read: this version reads schemas {min(BODIES)} to "
            f"{max(BODIES)}. Compute the plan again, or update lightning-recycle."
        )
    try:
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
    except ReCycleError as error:
        raise PlanningError(f"the plan is damaged: {error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise PlanningError(f"the plan is damaged ({error!r}): compute it again.") from error


def staggered_period(workers: Mapping[Worker, tuple[ScheduledOp, ...]]) -> float:
    """The smallest shift at which each stage's next iteration begins only after its STEP of this one.

    A STEP comes after everything else of its stage, so this also keeps operations of consecutive iterations from
    overlapping on any worker.
    """
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    for worker, ops in workers.items():
        stage = worker.stage
        if ops:
            first[stage] = min(first.get(stage, ops[0].start), ops[0].start)
            last[stage] = max(last.get(stage, ops[-1].end), ops[-1].end)
    return max((last[stage] - first[stage] for stage in first), default=0.0)


def _memory_record(memory: Memory) -> dict[str, Any]:
    return {name: value for name, value in asdict(memory).items() if value is not None}


def _to_records(operations: Sequence[ScheduledOp]) -> list[dict[str, Any]]:
    return [
        {
            "op": scheduled.op.kind.value,
            "pipeline": None if (mb := scheduled.op.microbatch) is None else mb.pipeline,
            "microbatch": None if mb is None else mb.index,
            "start": scheduled.start,
            "end": scheduled.end,
        }
        for scheduled in operations
    ]


_COLUMNS = ("op", "pipeline", "microbatch", "start", "end")


def _to_columns(operations: Sequence[ScheduledOp]) -> dict[str, Any]:
    microbatches = [scheduled.op.microbatch for scheduled in operations]
    return {
        "op": " ".join(scheduled.op.kind.value for scheduled in operations),
        "pipeline": [None if mb is None else mb.pipeline for mb in microbatches],
        "microbatch": [None if mb is None else mb.index for mb in microbatches],
        "start": [scheduled.start for scheduled in operations],
        "end": [scheduled.end for scheduled in operations],
    }


def _from_columns(columns: Mapping[str, Any], stage: int) -> tuple[ScheduledOp, ...]:
    kinds, *others = (columns[name] for name in _COLUMNS)
    return tuple(
        ScheduledOp(
            Op(_KINDS[kind], stage, None if pipeline is None else Microbatch(pipeline, index)), float(start), float(end)
        )
        for kind, pipeline, index, start, end in zip(kinds.split(), *others, strict=True)
    )


def _scheduled_op(record: Mapping[str, Any], stage: int) -> ScheduledOp:
    microbatch = None if record["pipeline"] is None else Microbatch(record["pipeline"], record["microbatch"])
    return ScheduledOp(Op(OpKind(record["op"]), stage, microbatch), float(record["start"]), float(record["end"]))
