"""Compact schedules: one lane's program, and a formula for the workers of lanes.

Where every stage has at least n live workers there are n *lanes*, sets of one live worker of each stage, that share
nothing but REDUCE. All micro-batches are dealt to lanes, and each lane runs the plan of a single pipeline, so a plan
for thousands of workers is as small as one for a pipeline. Another set of failed workers with as many lanes has the
same plan. A compact schedule equals :meth:`~CompactSchedule.expand` in every answer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from lightning_recycle.errors import PlanningError
from lightning_recycle.planning.grid import Grid, Microbatch, Op, ScheduledOp, Worker
from lightning_recycle.planning.problem import Problem, lower_bound
from lightning_recycle.planning.schedule import KINDS, OperationColumns, Schedule, gc_paused, schedule_of_columns

COMPACT_FROM = 100_000
"""Operations from which on plans are made by lanes."""

_MOST_LISTED = 2_000_000  # operations that a plan may list one by one: half a minute of planning, and 400 MB
_GOOD = 1.01  # of the lower bound: up to here no plan that lists its operations is looked for beside the lanes'


def worth_compacting(problem: Problem, least: int) -> bool:
    """Whether a problem is large, of several pipelines, and all lanes are alike."""
    grid = problem.grid
    are_alike = grid.lanes == grid.pipelines and not problem.worker_factors
    return _operations(problem) >= least and grid.pipelines > 1 and are_alike


def good_enough(schedule: CompactSchedule) -> bool:
    """Whether no full plan is needed: it would gain too little or take too long."""
    problem = schedule.problem
    return _operations(problem) > _MOST_LISTED or schedule.period <= _GOOD * lower_bound(problem)


def _operations(problem: Problem) -> int:
    grid = problem.grid
    return (3 if problem.technique.split_backward else 2) * grid.global_microbatches * grid.stages


def lanes_of(problem: Problem) -> int:
    """Number of lanes: the fewest live workers of any stage."""
    return min(problem.live_counts())


def lane_problem(problem: Problem) -> Problem:
    """The problem of the fullest lane; PlanningError when workers differ in speed."""
    if problem.worker_factors:
        raise PlanningError("workers of unequal speed have no common plan: plan each operation on its own.")
    most = -(-problem.grid.global_microbatches // lanes_of(problem))
    return replace(problem, grid=Grid(1, problem.grid.stages, most), failed=frozenset())


@dataclass(frozen=True)
class Lane:
    """Operations of a lane by stage; a micro-batch's index is its number in the lane."""

    problem: Problem
    stages: tuple[OperationColumns, ...]

    @classmethod
    def of(cls, schedule: Schedule) -> Lane:
        """The lane of a plan for one pipeline."""
        stages = range(schedule.grid.stages)
        return cls(schedule.problem, tuple(OperationColumns.of(schedule.workers[Worker(0, stage)]) for stage in stages))

    @property
    def microbatches(self) -> int:
        return self.problem.grid.microbatches

    def schedule(self) -> Schedule:
        columns = {Worker(0, stage): each for stage, each in enumerate(self.stages)}
        return schedule_of_columns(self.problem, columns, self.period)

    def operations(self, stage: int, names: Sequence[Microbatch]) -> tuple[ScheduledOp, ...]:
        """Operations of the worker of ``stage``, without micro-batches beyond ``names``."""
        columns, count = self.stages[stage], len(names)
        rows = zip(columns.kinds, columns.indices, columns.starts, columns.ends, strict=True)
        return tuple(
            ScheduledOp(Op(KINDS[kind], stage, None if index < 0 else names[index]), start, end)
            for kind, index, start, end in rows
            if index < count
        )

    @cached_property
    def period(self) -> float:
        """Period of all lanes, whatever their number."""
        if not self.problem.technique.staggered:
            return self.makespan
        return max(stage.ends[-1] - stage.starts[0] for stage in self.stages)

    @cached_property
    def makespan(self) -> float:
        return max(stage.ends[-1] for stage in self.stages) - min(stage.starts[0] for stage in self.stages)


class LanePlaces:
    """Workers and micro-batches of each lane: O(D S) to make, O(1) to ask.

    With n lanes, the first n pipelines are the lanes. Lane l runs its home's micro-batches, (l, 0) to (l, M - 1), and a
    share of the other pipelines'. If worker (l, s) has failed, a live worker of stage s of another pipeline replaces
    it: stage s has at least n live workers. Workers left over only take part in REDUCE and STEP.

    The (D - n) M micro-batches of the other pipelines are numbered by pipeline and index and dealt in runs: with q, r =
    divmod(D M, n), lane l gets q - M of them, and one more if l < r, so that

        number x is in lane  x // (q - M + 1)                        if x < r (q - M + 1)
                             r + (x - r (q - M + 1)) // (q - M)      otherwise.

    That the first pipelines stay keeps the stages' leaders at work, and one failure more changes few lanes.
    """

    def __init__(self, grid: Grid, failed: Collection[Worker], lanes: int) -> None:
        self.grid = grid
        self.lanes = lanes
        self._failed = frozenset(failed)
        self._share, self.longer = divmod(grid.global_microbatches, lanes)
        self._extra = self._share - grid.microbatches  # of the micro-batches of the others, at least

    @cached_property
    def _adopted(self) -> dict[Worker, int]:
        """Lanes of the workers outside their home."""
        return {worker: place.pipeline for place, worker in self._substitutes.items()}

    @cached_property
    def _substitutes(self) -> dict[Worker, Worker]:
        """The worker that replaces each failed worker of a lane's home."""
        found = {}
        free = [self.lanes] * self.grid.stages
        for place in sorted(self._failed):
            if place.pipeline >= self.lanes:
                break
            stage = place.stage
            while Worker(free[stage], stage) in self._failed:
                free[stage] += 1
            found[place] = Worker(free[stage], stage)
            free[stage] += 1
        return found

    def lane(self, worker: Worker) -> int | None:
        """The lane of a live worker; None if it is in none."""
        return worker.pipeline if worker.pipeline < self.lanes else self._adopted.get(worker)

    def worker(self, lane: int, stage: int) -> Worker:
        home = Worker(lane, stage)
        return self._substitutes.get(home, home)

    def count(self, lane: int) -> int:
        return self._share + (lane < self.longer)

    def microbatches(self, lane: int) -> list[Microbatch]:
        """The micro-batches of a lane, by their numbers within it."""
        own = self.grid.microbatches
        first = lane * self._extra + min(lane, self.longer)
        others = range(first, first + self.count(lane) - own)
        return [
            *(Microbatch(lane, index) for index in range(own)),
            *(Microbatch(self.lanes + number // own, number % own) for number in others),
        ]

    def lane_of(self, microbatch: Microbatch) -> int:
        if microbatch.pipeline < self.lanes:
            return microbatch.pipeline
        number = (microbatch.pipeline - self.lanes) * self.grid.microbatches + microbatch.index
        in_longer = self.longer * (self._extra + 1)
        if number < in_longer:
            return number // (self._extra + 1)
        return self.longer + (number - in_longer) // self._extra


class LaneWorkers(Mapping[Worker, tuple[ScheduledOp, ...]]):
    """Operations of every live worker, decoded when read."""

    def __init__(self, problem: Problem, lane: Lane) -> None:
        self.lane = lane
        self.places = LanePlaces(problem.grid, problem.failed, lanes_of(problem))
        self._failed = problem.failed

    def __getitem__(self, worker: Worker) -> tuple[ScheduledOp, ...]:
        if worker not in self:
            raise KeyError(worker)
        lane = self.places.lane(worker)
        return self.lane.operations(worker.stage, [] if lane is None else self.places.microbatches(lane))

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


@dataclass(frozen=True)
class CompactSchedule(Schedule):
    """A schedule whose lanes all run one program; make one with :func:`compact`."""

    workers: LaneWorkers = field(hash=False)

    @property
    def lane(self) -> Lane:
        return self.workers.lane

    @property
    def num_operations(self) -> int:
        places = self.workers.places
        shortest = places.count(places.lanes - 1)
        lanes = (
            places.lanes if index < shortest else places.longer
            for s in self.lane.stages
            for index in s.indices
            if index >= 0
        )
        return 2 * len(self.workers) + sum(lanes)

    @cached_property
    def makespan(self) -> float:
        return self.lane.makespan

    def route(self, stage: int, microbatch: Microbatch) -> Worker:
        grid = self.grid
        inside = 0 <= microbatch.pipeline < grid.pipelines and 0 <= microbatch.index < grid.microbatches
        if not (inside and 0 <= stage < grid.stages):
            raise PlanningError(f"the schedule has no forward of micro-batch {microbatch} at stage {stage}.")
        return self.workers.places.worker(self.workers.places.lane_of(microbatch), stage)

    def exchanges(self) -> Iterator[tuple[Worker, Worker]]:
        places, stages = self.workers.places, range(self.grid.stages)
        for lane in range(places.lanes):
            yield from pairwise(places.worker(lane, stage) for stage in stages)

    def idle_workers(self) -> frozenset[Worker]:
        return frozenset(worker for worker in self.workers if self.workers.places.lane(worker) is None)

    def peak_in_flight(self, worker: Worker) -> int:
        self._check(worker)
        lane = self.workers.places.lane(worker)
        if lane is None:
            return 0
        key = worker.stage, self.workers.places.count(lane)
        if key not in self._peaks:
            self._peaks[key] = super().peak_in_flight(worker)
        return self._peaks[key]

    def fits(self, problem: Problem) -> bool:
        one = replace(problem, grid=self.lane.problem.grid, failed=frozenset(), worker_factors=())
        return self.lane.schedule().fits(one)

    @property
    def demand(self) -> tuple[float, float]:
        """Demand on memory; lanes differ only by a micro-batch."""
        tightest, total = self.lane.schedule().demand
        return tightest, total * self.workers.places.lanes

    def expand(self) -> Schedule:
        with gc_paused():
            return Schedule(self.problem, {worker: self.workers[worker] for worker in self.workers}, self.period)

    def serves(self, problem: Problem) -> bool:
        """Whether the lanes of ``problem`` are this schedule's, whatever their workers."""
        is_of_lanes = problem.grid.lanes == self.grid.lanes and not problem.worker_factors
        return is_of_lanes and lane_problem(problem) == self.lane.problem

    def under(self, problem: Problem) -> CompactSchedule:
        return compact(problem, replace(self.lane, problem=lane_problem(problem)))

    def __reduce__(self) -> tuple[Any, ...]:
        return compact, (self.problem, self.lane)

    @cached_property
    def _peaks(self) -> dict[tuple[int, int], int]:
        return {}


def compact(problem: Problem, lane: Lane) -> CompactSchedule:
    """The schedule for ``problem`` in which every lane runs the program of ``lane``.

    Raises PlanningError when ``lane`` is for another problem.
    """
    if lane.problem != lane_problem(problem):
        raise PlanningError(
            f"a lane with {lane.microbatches} micro-batches, or other costs or limits, is none of the "
            f"{lanes_of(problem)} lanes of {problem.grid}: plan again."
        )
    return CompactSchedule(problem, LaneWorkers(problem, lane), lane.period)
