"""Compact schedules: one lane's program and a formula for any number of lanes; columns of numbers for other processes.

Concept: where all lanes run the same program, a schedule is that program and a formula for who is in which lane
(:mod:`~lightning_recycle.planning.replicated_pipelines`). A :class:`CodedSchedule` is a
:class:`~lightning_recycle.planning.schedule.Schedule` like any other to its readers: a worker's operations are decoded
when they are asked for, in about a millisecond. Asking for all, as :meth:`CodedSchedule.expand` does, takes what a plan
that lists every operation takes: 12 us and 180 bytes for each.

One lane is planned, and is the plan of all (:class:`LanePlanner`). With n lanes the busiest worker runs ceil(D M / n)
micro-batches, as many as in any plan: a stage with n live workers cannot do with less. Lanes waste the workers beyond n
of the stages that have lost fewer. So they cost nothing where the stage that decides the period is one of those with
the most failures, as with equal costs or with failures normalized to all stages alike, and at most 1 - n / D of the
time elsewhere. A lane has no failures, and 1 / n of the operations: it is planned in a second, however many lanes there
are, and better than a large grid in the same time.

A listed schedule is sent to another process as a few blocks of bytes (:func:`packed`): its pickle has an object for
every operation, and reading that lets no other thread run until it is done: 8 s for 590,000 operations.
``unpacked(pickle.loads(pickle.dumps(packed(schedule)))) == schedule``, to the last bit.

Contract: immutable, picklable; equal to :meth:`~CodedSchedule.expand` in every answer. Makespan, peaks and routes
follow from the lane without decoding every worker. The schedule of another set of failed workers with as many lanes is
the same lane: renaming costs nothing. The same lane is planned once in a process.

Must not know: how a lane is planned.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeAlias

from lightning_recycle.errors import PlanningError
from lightning_recycle.planning.bounds import lower_bound
from lightning_recycle.planning.grid import Microbatch, Op, OpKind, ScheduledOp, Worker
from lightning_recycle.planning.problem import Problem
from lightning_recycle.planning.replicated_pipelines import Lane, LanePlaces, lane_problem, lanes_of
from lightning_recycle.planning.schedule import BODIES, Schedule, gc_paused, plan_schema, problem_of

__all__ = [
    "CODED_FROM",
    "CodedSchedule",
    "LanePlanner",
    "LaneWorkers",
    "PackedSchedule",
    "coded",
    "good_enough",
    "packed",
    "read_schedule",
    "unpacked",
    "worth_coding",
]


class LaneWorkers(Mapping[Worker, tuple[ScheduledOp, ...]]):
    """The operations of every live worker of ``problem``, decoded when they are asked for."""

    def __init__(self, problem: Problem, lane: Lane) -> None:
        self.lane = lane
        self.places = LanePlaces(problem.grid, problem.failed, lanes_of(problem))
        self._failed = problem.failed

    def __getitem__(self, worker: Worker) -> tuple[ScheduledOp, ...]:
        if worker not in self:
            raise KeyError(worker)
        return self.lane.scheduled(worker.stage, self._microbatches(worker))

    def __contains__(self, worker: object) -> bool:
        return worker in self.places.grid and worker not in self._failed

    def __iter__(self) -> Iterator[Worker]:
        return (worker for worker in self.places.grid.workers() if worker not in self._failed)

    def __len__(self) -> int:
        return self.places.grid.num_workers - len(self._failed)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, LaneWorkers):
            return (self.places.grid, self._failed, self.lane) == (other.places.grid, other._failed, other.lane)
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def program(self, worker: Worker) -> tuple[Op, ...]:
        """What a live worker executes."""
        return self.lane.program(worker.stage, self._microbatches(worker))

    def _microbatches(self, worker: Worker) -> list[Microbatch]:
        lane = self.places.lane(worker)
        return [] if lane is None else self.places.microbatches(lane)


@dataclass(frozen=True)
class CodedSchedule(Schedule):
    """A schedule whose lanes all run one program; make one with :func:`coded`."""

    workers: LaneWorkers = field(hash=False)

    @property
    def lane(self) -> Lane:
        """The program of all lanes."""
        return self.workers.lane

    @property
    def num_operations(self) -> int:
        """The number of operations of all workers."""
        total = 2 * len(self.workers)
        for lane_length, lanes in self._lengths():
            for stage in range(self.grid.stages):
                total += lanes * sum(number < lane_length for number in self.lane.operations(stage).numbers)
        return total

    @cached_property
    def makespan(self) -> float:
        """Time from the start of an iteration's first operation to the end of its last, from empty to empty."""
        return self.lane.makespan

    def program(self, worker: Worker) -> tuple[Op, ...]:
        """What ``worker`` executes, in order, without times."""
        self._check(worker)
        return self.workers.program(worker)

    def route(self, stage: int, microbatch: Microbatch) -> Worker:
        """The worker that executes ``microbatch`` at ``stage``."""
        grid = self.grid
        inside = 0 <= microbatch.pipeline < grid.pipelines and 0 <= microbatch.index < grid.microbatches
        if not (inside and 0 <= stage < grid.stages):
            raise PlanningError(f"the schedule has no forward of micro-batch {microbatch} at stage {stage}.")
        return self._row(self.workers.places.lane_of(microbatch))[stage]

    def exchanges(self) -> Iterator[tuple[Worker, Worker]]:
        """The pairs of workers of consecutive stages that exchange messages in a step: neighbours in a lane."""
        for lane in range(self.workers.places.lanes):
            yield from pairwise(self._row(lane))

    def idle_workers(self) -> frozenset[Worker]:
        """The live workers that run no micro-batch: those in no lane."""
        return frozenset(worker for worker in self.workers if self.workers.places.lane(worker) is None)

    def peak_in_flight(self, worker: Worker) -> int:
        """The most micro-batches ``worker`` holds at once, counted from the start of F to the end of W or BW."""
        self._check(worker)
        lane = self.workers.places.lane(worker)
        if lane is None:
            return 0
        key = worker.stage, self.workers.places.count(lane)
        if key not in self._peaks:
            self._peaks[key] = super().peak_in_flight(worker)
        return self._peaks[key]

    def fits(self, problem: Problem) -> bool:
        """Whether no worker holds more than the memory of ``problem`` and its in-flight limits allow."""
        one = replace(problem, grid=self.lane.problem.grid, failed=frozenset(), worker_factors=())
        return self.lane.schedule().fits(one)

    def expand(self) -> Schedule:
        """The same schedule with the operations of all workers."""
        with gc_paused():
            return Schedule(self.problem, {worker: self.workers[worker] for worker in self.workers}, self.period)

    def serves(self, problem: Problem) -> bool:
        """Whether the lanes of ``problem`` are those of this schedule, whichever workers are in them."""
        return not problem.worker_factors and lane_problem(problem) == self.lane.problem

    def under(self, problem: Problem) -> CodedSchedule:
        """The same operations and times as a schedule for ``problem``, whose costs and workers are the same."""
        return coded(problem, replace(self.lane, problem=lane_problem(problem)))

    def _recorded(self, columns: bool) -> dict[str, Any]:
        """The lane, instead of the operations of all workers."""
        return {"schema": plan_schema(self.problem, "lane"), "lane": self.lane.to_json()}

    def __reduce__(self) -> tuple[Any, ...]:
        return coded, (self.problem, self.lane)

    def _row(self, lane: int) -> tuple[Worker, ...]:
        """The workers of a lane, by stage."""
        row = self._rows.get(lane)
        if row is None:
            stages = range(self.grid.stages)
            row = self._rows[lane] = tuple(self.workers.places.worker(lane, stage) for stage in stages)
        return row

    @cached_property
    def _rows(self) -> dict[int, tuple[Worker, ...]]:
        return {}

    @cached_property
    def _peaks(self) -> dict[tuple[int, int], int]:
        return {}

    def _lengths(self) -> list[tuple[int, int]]:
        """How many micro-batches lanes run, and how many lanes run so many."""
        places = self.workers.places
        full = self.lane.microbatches
        short = sum(places.count(lane) < full for lane in range(places.lanes))
        return [(full, places.lanes - short), (full - 1, short)]

    def _check(self, worker: Worker) -> None:
        if worker not in self.workers:
            state = "has failed" if worker in self.failed else "is not part"
            raise PlanningError(f"worker {worker} {state} in this schedule, so it runs nothing.")


def coded(problem: Problem, lane: Lane) -> CodedSchedule:
    """The schedule for ``problem`` in which every lane runs the program of ``lane``.

    Raises:
        PlanningError: when ``lane`` is for another problem than its lanes'.
    """
    if lane.problem != lane_problem(problem):
        raise PlanningError(
            f"a lane with {lane.microbatches} micro-batches, or other costs or limits, is none of the "
            f"{lanes_of(problem)} lanes of {problem.grid}: plan again."
        )
    return CodedSchedule(problem, LaneWorkers(problem, lane), lane.period)


def read_schedule(plan: Mapping[str, Any]) -> Schedule:
    """The schedule in a plan file's content, coded or not. It is not validated.

    Raises:
        PlanningError: as :meth:`Schedule.from_plan`.
    """
    problem = problem_of(plan)
    if BODIES[plan["schema"]] != "lane":
        return Schedule.from_plan(plan)
    try:
        schedule = coded(problem, Lane.from_json(plan["lane"], lane_problem(problem)))
        claimed = float(plan["period"])
    except PlanningError as error:
        raise PlanningError(f"the plan is damaged: {error}") from error
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise PlanningError(f"the plan is damaged ({error!r}): compute it again.") from error
    return replace(schedule, period=claimed)


CODED_FROM = 100_000
"""Operations from which on plans are made by lanes: listing so many one by one takes seconds."""

_MOST_LISTED = 2_000_000  # operations that a plan may list one by one: half a minute of planning, and 400 MB
_GOOD = 1.01  # of the lower bound: up to here no plan that lists its operations is looked for beside the lanes'
_KEPT = 32  # lanes; about 100 kB each


def worth_coding(problem: Problem, least: int) -> bool:
    """Whether ``problem`` has at least ``least`` operations, and workers of equal speed in more than one pipeline."""
    return _operations(problem) >= least and problem.grid.pipelines > 1 and not problem.worker_factors


def good_enough(schedule: CodedSchedule) -> bool:
    """Whether nothing else should be looked for: the plan is near the lower bound, or a longer list takes too much."""
    problem = schedule.problem
    return _operations(problem) > _MOST_LISTED or schedule.period <= _GOOD * lower_bound(problem)


def _operations(problem: Problem) -> int:
    grid = problem.grid
    return (3 if problem.technique.decoupled else 2) * grid.global_microbatches * grid.stages


class LanePlanner:
    """Plans lanes with ``plan_lane`` and keeps the newest ones."""

    def __init__(self, plan_lane: Callable[[Problem, int], Schedule]) -> None:
        self._plan_lane = plan_lane
        self._kept: OrderedDict[Hashable, Lane] = OrderedDict()
        self._lock = threading.Lock()

    def plan(self, problem: Problem, effort: int) -> CodedSchedule:
        """The schedule for ``problem`` by lanes; ``effort`` is passed on.

        Raises:
            PlanningError: when a lane has no plan, or workers differ in speed.
        """
        key = lane_problem(problem), effort
        with self._lock:
            lane = self._kept.pop(key, None)
        if lane is None:
            lane = Lane.of(self._plan_lane(*key))
        with self._lock:
            self._kept[key] = lane
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return coded(problem, lane)


_OP_KINDS = tuple(OpKind)
_NUMBERS = {kind: number for number, kind in enumerate(_OP_KINDS)}
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
    workers = tuple((worker, _packed_columns(operations)) for worker, operations in schedule.workers.items())
    return PackedSchedule(schedule.problem, workers, schedule.period)


def unpacked(schedule: PackedSchedule | CodedSchedule) -> Schedule:
    """What :func:`packed` was given."""
    if isinstance(schedule, CodedSchedule):
        return schedule
    with gc_paused():
        workers = {worker: _unpacked_operations(worker.stage, columns) for worker, columns in schedule.workers}
    return Schedule(schedule.problem, workers, schedule.period)


def _packed_columns(operations: tuple[ScheduledOp, ...]) -> _Columns:
    microbatches = [scheduled.op.microbatch for scheduled in operations]
    return (
        bytes(_NUMBERS[scheduled.op.kind] for scheduled in operations),
        array("l", [_NONE if microbatch is None else microbatch.pipeline for microbatch in microbatches]),
        array("l", [_NONE if microbatch is None else microbatch.index for microbatch in microbatches]),
        array("d", [scheduled.start for scheduled in operations]),
        array("d", [scheduled.end for scheduled in operations]),
    )


def _unpacked_operations(stage: int, columns: _Columns) -> tuple[ScheduledOp, ...]:
    return tuple(
        ScheduledOp(Op(_OP_KINDS[kind], stage, None if pipeline == _NONE else Microbatch(pipeline, index)), start, end)
        for kind, pipeline, index, start, end in zip(*columns, strict=True)
    )
