"""Coded schedules: a plan for any number of workers, in the space of a plan for one lane.

Concept: where all lanes run the same program, a schedule is that program and a formula for who is in which lane
(:mod:`~lightning_recycle.planning.lanes`). A :class:`CodedSchedule` is a
:class:`~lightning_recycle.planning.schedule.Schedule` like any other to whoever asks for a worker's operations: they
are decoded then, in about a millisecond. Asking for all, as :meth:`CodedSchedule.expand` does, takes what a plan that
lists every operation takes: 12 us and 180 bytes for each.

Contract: immutable, picklable; equal to :meth:`~CodedSchedule.expand` in every answer. What a whole schedule is asked
for, makespan, peaks, routes, follows from the lane without decoding every worker. The schedule of another set of failed
workers with as many lanes is the same lane: renaming costs nothing.

Must not know: how the lane's plan was made, files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from lightning_recycle.errors import PlanningError
from lightning_recycle.planning.collector import collector_paused
from lightning_recycle.planning.grid import Microbatch, Worker
from lightning_recycle.planning.lanes import Lane, LanePlaces, lane_problem, lanes_of
from lightning_recycle.planning.ops import Op, ScheduledOp
from lightning_recycle.planning.problem import Problem
from lightning_recycle.planning.schedule import BODIES, Schedule, plan_schema, problem_of

__all__ = ["CodedSchedule", "LaneWorkers", "coded", "read_schedule"]


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
        with collector_paused():
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
