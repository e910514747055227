"""Schedules: the operations of each worker with their times, and proofs.

A schedule has one iteration's times for each live worker, in the order of execution; iteration k is shifted by k *
*period*. Without the staggered optimizer, an iteration begins when the previous one has ended everywhere (period =
makespan); with it, a stage begins once it has stepped its own optimizer. A schedule need not be correct: see
:func:`lightning_recycle.planning.validation.validate`.

*Of two plans* the shorter period is better, then the shorter makespan, both with an allowance of 0.1 %, then the memory
on the tightest worker, as a fraction of its stage's, then the sum over all workers (:attr:`Schedule.demand`).
"""

from __future__ import annotations

import gc
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from typing import Any

from lightning_recycle.errors import PlanningError
from lightning_recycle.planning.costs import Memory
from lightning_recycle.planning.grid import Grid, Microbatch, Op, OpKind, ScheduledOp, Worker
from lightning_recycle.planning.problem import Problem, lower_bound


@contextmanager
def gc_paused() -> Iterator[None]:
    """No automatic garbage collection inside the block.

    A schedule of 2,000 workers has a million small objects, no garbage, which CPython's collector traverses each time
    their number has grown by a quarter: 4.4 s instead of 2.2 s to validate 590,000 operations.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


KINDS = tuple(OpKind)
"""The kinds of operations, by their number in :class:`OperationColumns`."""

_NUMBERS = {kind: number for number, kind in enumerate(KINDS)}
_NAMES = [kind.value for kind in KINDS]
_NUMBERS_BY_NAME = {name: number for number, name in enumerate(_NAMES)}
_NONE = -1  # the pipeline and index of an operation without micro-batch


@dataclass(frozen=True, slots=True)
class OperationColumns:
    """Operations of one worker, field by field: for files, pickles and checks.

    Unpickling an object for every operation lets no other thread run, 8 s for 590,000; five blocks of bytes are read at
    once. ``kinds`` are numbers of :data:`KINDS`; ``pipelines`` and ``indices`` are -1 for no micro-batch; times are in
    the unit of the costs.
    """

    kinds: bytes
    pipelines: array[int]
    indices: array[int]
    starts: array[float]
    ends: array[float]

    @classmethod
    def of(cls, operations: Sequence[ScheduledOp]) -> OperationColumns:
        microbatches = [scheduled.op.microbatch for scheduled in operations]
        return cls(
            bytes(_NUMBERS[scheduled.op.kind] for scheduled in operations),
            array("l", [_NONE if microbatch is None else microbatch.pipeline for microbatch in microbatches]),
            array("l", [_NONE if microbatch is None else microbatch.index for microbatch in microbatches]),
            array("d", [scheduled.start for scheduled in operations]),
            array("d", [scheduled.end for scheduled in operations]),
        )

    def operations(self, stage: int) -> tuple[ScheduledOp, ...]:
        rows = zip(self.kinds, self.pipelines, self.indices, self.starts, self.ends, strict=True)
        return tuple(
            ScheduledOp(Op(KINDS[kind], stage, None if index < 0 else Microbatch(pipeline, index)), start, end)
            for kind, pipeline, index, start, end in rows
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "op": " ".join(map(_NAMES.__getitem__, self.kinds)),
            "pipeline": list(self.pipelines),
            "microbatch": list(self.indices),
            "start": list(self.starts),
            "end": list(self.ends),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> OperationColumns:
        """The inverse of :meth:`to_json`.

        Raises KeyError, TypeError, ValueError or OverflowError for damaged ``data``.
        """
        pipelines, indices = array("l", data["pipeline"]), array("l", data["microbatch"])
        kinds = bytes(map(_NUMBERS_BY_NAME.__getitem__, data["op"].split()))
        columns = cls(kinds, pipelines, indices, array("d", data["start"]), array("d", data["end"]))
        if {len(getattr(columns, each)) for each in ("pipelines", "indices", "starts", "ends")} != {len(kinds)}:
            raise ValueError("columns of operations differ in length")
        return columns


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
        """Workers of this schedule, in rank order."""
        return tuple(sorted(self.workers))

    @property
    def num_operations(self) -> int:
        """The number of operations of all workers."""
        return sum(len(ops) for ops in self.workers.values())

    @cached_property
    def makespan(self) -> float:
        """Time from the first start of an iteration to its last end."""
        begin = min((ops[0].start for ops in self.workers.values() if ops), default=0.0)
        return max((ops[-1].end for ops in self.workers.values() if ops), default=0.0) - begin

    def program(self, worker: Worker) -> tuple[Op, ...]:
        """The operations of ``worker``, in order, without times."""
        self._check(worker)
        return tuple(scheduled.op for scheduled in self.workers[worker])

    def route(self, stage: int, microbatch: Microbatch) -> Worker:
        """The worker that executes ``microbatch`` at ``stage``."""
        try:
            return self._routes[stage, microbatch]
        except KeyError:
            raise PlanningError(f"the schedule has no forward of micro-batch {microbatch} at stage {stage}.") from None

    def under(self, problem: Problem) -> Schedule:
        """The same operations and times for a problem with equal costs and workers."""
        return replace(self, problem=problem)

    def expand(self) -> Schedule:
        """The schedule with the operations of every worker; itself unless compact."""
        return self

    def exchanges(self) -> Iterator[tuple[Worker, Worker]]:
        """Pairs of workers that exchange messages in a step, possibly repeated."""
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
        """Micro-batches whose forward ``worker`` computes again before their backward."""
        kept = (op.microbatch for op in self.program(worker) if op.kind is OpKind.RECOMPUTE)
        return frozenset(microbatch for microbatch in kept if microbatch is not None)

    def peak_in_flight(self, worker: Worker) -> int:
        """Most micro-batches that ``worker`` holds at once, from F to the end of W or BW."""
        return int(self.peak(worker, Memory.counting((1,) * self.grid.stages)))

    def fits(self, problem: Problem) -> bool:
        """Whether no worker exceeds the memory and in-flight limits of ``problem``."""
        return all(
            self.peak(worker, memory) <= memory.fixed[worker.stage] + memory.room(worker.stage)
            for memory in problem.memories
            for worker in self.workers
        )

    def peak_memory(self, worker: Worker) -> float:
        """Most bytes that ``worker`` holds at once, fixed memory included.

        Raises:
            PlanningError: when the problem has no sizes in bytes.
        """
        memory = self.problem.memory
        if memory is None:
            raise PlanningError("the problem has no sizes in bytes: give Problem(memory=Memory(...)).")
        return self.peak(worker, memory)

    def peak(self, worker: Worker, memory: Memory) -> float:
        """The most that ``worker`` holds at once, in the unit of ``memory``."""
        held = peak = memory.fixed[worker.stage]
        program = self.program(worker)
        recomputed = {op.microbatch for op in program if op.kind is OpKind.RECOMPUTE}
        for op in program:
            peak = max(peak, held + memory.needed(op.kind, worker.stage))
            held += memory.delta(op.kind, worker.stage, op.microbatch in recomputed)
        return peak

    @property
    def demand(self) -> tuple[float, float]:
        """Memory of the tightest worker, as a fraction, and of all workers in sum.

        Without sizes in bytes, micro-batches in flight count.
        """
        memory = self.problem.measure
        peaks = [(worker.stage, self.peak(worker, memory)) for worker in self.live_workers]
        return max(peak / memory.capacity[stage] for stage, peak in peaks), sum(peak for _, peak in peaks)

    def __reduce__(self) -> tuple[Any, ...]:
        columns = {worker: OperationColumns.of(operations) for worker, operations in self.workers.items()}
        return schedule_of_columns, (self.problem, columns, self.period)

    def _check(self, worker: Worker) -> None:
        if worker not in self.workers:
            state = "has failed" if worker in self.failed else "is not part"
            raise PlanningError(f"worker {worker} {state} in this schedule, so it runs nothing.")

    @cached_property
    def _routes(self) -> dict[tuple[int, Microbatch], Worker]:
        return {
            (scheduled.op.stage, scheduled.op.microbatch): worker
            for worker, ops in self.workers.items()
            for scheduled in ops
            if scheduled.op.kind is OpKind.FORWARD and scheduled.op.microbatch is not None
        }


def schedule_of_columns(problem: Problem, columns: Mapping[Worker, OperationColumns], period: float) -> Schedule:
    """The schedule whose workers have these operations."""
    with gc_paused():
        return Schedule(problem, {worker: each.operations(worker.stage) for worker, each in columns.items()}, period)


def staggered_period(workers: Mapping[Worker, tuple[ScheduledOp, ...]]) -> float:
    """The smallest period at which each stage begins only after its STEP.

    A STEP comes last in its stage, so no worker's consecutive iterations overlap either.
    """
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    for worker, ops in workers.items():
        stage = worker.stage
        if ops:
            first[stage] = min(first.get(stage, ops[0].start), ops[0].start)
            last[stage] = max(last.get(stage, ops[-1].end), ops[-1].end)
    return max((last[stage] - first[stage] for stage in first), default=0.0)


# ---------------------------------------------------------------------- results

TOLERANCE = 1e-9
"""Relative: periods closer than this count as equal."""


@dataclass(frozen=True, slots=True)
class SolverUse:
    """Calls and seconds of a solver for a plan, or the reason why it was not asked."""

    calls: int = 0
    seconds: float = 0.0
    reason: str = ""


NOT_ASKED = SolverUse()


@dataclass(frozen=True, slots=True)
class PlanResult:
    """A schedule, its proof and its history.

    Args:
        schedule: the plan.
        backend: name of the planner that was asked.
        lower_bound: a proven lower bound of the period, whatever the re-routing, in the unit of the costs.
        seconds: planning time.
        warning: one line about a solver that was missing, crashed or ran out of time.
        found_by: name of the planner whose schedule this is: ``backend``, or "heuristic" where its solver was not asked
            or found nothing better; "given" where it was to improve a plan and did not.
        solver: the solver's calls.
    """

    schedule: Schedule
    backend: str
    lower_bound: float
    seconds: float = 0.0
    warning: str | None = None
    found_by: str = "unknown"
    solver: SolverUse = NOT_ASKED

    @property
    def status(self) -> str:
        """Either "optimal", if the period is the lower bound, or "feasible"."""
        return "optimal" if self.lower_bound >= self.schedule.period * (1 - TOLERANCE) else "feasible"

    @property
    def gap(self) -> float:
        """The largest possible distance from the optimum, relative to the lower bound."""
        return self.schedule.period / self.lower_bound - 1.0 if self.lower_bound > 0.0 else 0.0


def proven(
    schedule: Schedule,
    backend: str,
    bound: float | None = None,
    *,
    seconds: float = 0.0,
    found_by: str | None = None,
    solver: SolverUse = NOT_ASKED,
) -> PlanResult:
    """The result for ``schedule`` with the better of the two lower bounds.

    ``found_by`` is by default ``backend``.
    """
    known = max(lower_bound(schedule.problem), bound or 0.0)
    period = schedule.period
    if known > period - TOLERANCE * period:
        known = period  # equal but for rounding
    return PlanResult(schedule, backend, known, seconds, found_by=found_by or backend, solver=solver)


EQUALLY_FAST = 1e-3
"""Relative difference up to which two periods, or two makespans, count as equal."""


def best_of(schedules: Sequence[Schedule]) -> Schedule:
    """The best of several plans for one problem; the first of equally good ones."""
    fast = _fastest(schedules, attrgetter("period"))
    short = _fastest(fast, attrgetter("makespan"))

    def criteria(schedule: Schedule) -> tuple[float, ...]:  # rounding must not decide
        return tuple(round(value, 9) for value in (*schedule.demand, schedule.period, schedule.makespan))

    return min(short, key=criteria)


def _fastest(schedules: Sequence[Schedule], seconds: Callable[[Schedule], float]) -> list[Schedule]:
    least = min(map(seconds, schedules)) * (1 + EQUALLY_FAST)
    return [schedule for schedule in schedules if seconds(schedule) <= least]


def is_better(one: Schedule, other: Schedule) -> bool:
    """Whether ``one`` is the better of two plans; False if they are equally good."""
    return one is not other and best_of([other, one]) is one
