"""Compact schedules: the program of one lane, replicated on any number of lanes.

Concept: D pipelines in which some workers have failed still have n whole *lanes*, n = min over the stages of the live
workers there: sets of one live worker of each stage. If the D * M micro-batches are dealt evenly to them and each stays
in its lane from the first stage to the last, all lanes do the same work in the same order at the same times: ceil(D * M
/ n) micro-batches, or one fewer. The plan of one lane, for a grid of one pipeline without failures, is then the plan of
all, whatever n is. Which workers and micro-batches a lane has is a formula, so that no plan has to list them
(:class:`LanePlaces`).

A :class:`CompactSchedule` is a :class:`~lightning_recycle.planning.schedule.Schedule` like any other to its readers: a
worker's operations are decoded when they are asked for, in about a millisecond. Asking for all, as
:meth:`CompactSchedule.expand` does, takes what a plan that lists every operation takes: 12 us and 180 bytes for each.

With n lanes the busiest worker runs as many micro-batches as in any plan: a stage with n live workers cannot do with
less. Lanes waste the workers beyond n of the stages that have lost fewer. So they cost nothing where the stage that
decides the period is one of those with the most failures, as with equal costs or with failures normalized to all stages
alike, and at most 1 - n / D of the time elsewhere. A lane has no failures, and 1 / n of the operations: it is planned
in a second, however many lanes there are, and better than a large grid in the same time.

Contract: immutable, picklable; equal to :meth:`~CompactSchedule.expand` in every answer. Makespan, peaks and routes
follow from the lane without decoding every worker. The schedule of another set of failed workers with as many lanes is
the same lane: renaming costs nothing.

Must not know: how a lane is planned.
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
"""Operations from which on plans are made by lanes: listing so many one by one takes seconds."""

_MOST_LISTED = 2_000_000  # operations that a plan may list one by one: half a minute of planning, and 400 MB
_GOOD = 1.01  # of the lower bound: up to here no plan that lists its operations is looked for beside the lanes'


def worth_compacting(problem: Problem, least: int) -> bool:
    """Whether ``problem`` has at least ``least`` operations, several pipelines, and no slow worker or further lane."""
    grid = problem.grid
    are_alike = grid.lanes == grid.pipelines and not problem.worker_factors
    return _operations(problem) >= least and grid.pipelines > 1 and are_alike


def good_enough(schedule: CompactSchedule) -> bool:
    """Whether nothing else should be looked for: the plan is near the lower bound, or a longer list takes too much."""
    problem = schedule.problem
    return _operations(problem) > _MOST_LISTED or schedule.period <= _GOOD * lower_bound(problem)


def _operations(problem: Problem) -> int:
    grid = problem.grid
    return (3 if problem.technique.split_backward else 2) * grid.global_microbatches * grid.stages


def lanes_of(problem: Problem) -> int:
    """Number of lanes: the live workers of the stage with the fewest."""
    return min(problem.live_counts())


def lane_problem(problem: Problem) -> Problem:
    """The problem of a lane: one pipeline without failures, with as many micro-batches as the fullest lane runs.

    Raises:
        PlanningError: when workers differ in speed; then their lanes do, too.
    """
    if problem.worker_factors:
        raise PlanningError("workers of unequal speed have no common plan: plan each operation on its own.")
    most = -(-problem.grid.global_microbatches // lanes_of(problem))
    return replace(problem, grid=Grid(1, problem.grid.stages, most), failed=frozenset())


@dataclass(frozen=True)
class Lane:
    """One lane's part of a plan.

    Args:
        problem: see :func:`lane_problem`.
        stages: the operations of each stage's worker, REDUCE and STEP included; the index of a micro-batch is its
            number within the lane.
    """

    problem: Problem
    stages: tuple[OperationColumns, ...]

    @classmethod
    def of(cls, schedule: Schedule) -> Lane:
        """The lane of a plan for one pipeline."""
        stages = range(schedule.grid.stages)
        return cls(schedule.problem, tuple(OperationColumns.of(schedule.workers[Worker(0, stage)]) for stage in stages))

    @property
    def microbatches(self) -> int:
        """The number of micro-batches."""
        return self.problem.grid.microbatches

    def schedule(self) -> Schedule:
        """The plan for one pipeline."""
        columns = {Worker(0, stage): each for stage, each in enumerate(self.stages)}
        return schedule_of_columns(self.problem, columns, self.period)

    def operations(self, stage: int, names: Sequence[Microbatch]) -> tuple[ScheduledOp, ...]:
        """The operations of the worker of ``stage``, in order.

        Args:
            stage: the stage.
            names: the lane's micro-batches; if they are fewer than the lane's program has, the rest is left out.
        """
        columns, count = self.stages[stage], len(names)
        rows = zip(columns.kinds, columns.indices, columns.starts, columns.ends, strict=True)
        return tuple(
            ScheduledOp(Op(KINDS[kind], stage, None if index < 0 else names[index]), start, end)
            for kind, index, start, end in rows
            if index < count
        )

    @cached_property
    def period(self) -> float:
        """Time between two iterations of all lanes, whatever their number."""
        if not self.problem.technique.staggered:
            return self.makespan
        return max(stage.ends[-1] - stage.starts[0] for stage in self.stages)

    @cached_property
    def makespan(self) -> float:
        """From the first start to the last end of an iteration."""
        return max(stage.ends[-1] for stage in self.stages) - min(stage.starts[0] for stage in self.stages)


class LanePlaces:
    """Workers and micro-batches of each lane: O(D S) to make, O(1) to ask.

    With n lanes, the first n pipelines are the lanes, in their order; the others give their workers. Lane l runs
    its home's micro-batches, (l, 0) to (l, M - 1), and then as many of those of the others as are its share. If worker
    (l, s) has failed, the lane's worker of stage s is one of the others' that are alive: there are enough, because
    stage s has at least n live workers. Workers that are left over have nothing to do but REDUCE and STEP.

    The (D - n) M micro-batches of the others are numbered by pipeline and index and dealt in runs: with q, r =
    divmod(D M, n), lane l gets q - M of them, and one more if l < r, so that

        number x of the others is in lane  x // (q - M + 1)                        if x < r (q - M + 1)
                                           r + (x - r (q - M + 1)) // (q - M)      otherwise.

    That the first pipelines stay keeps the leaders of stages at work, and as pipelines are given up from the last on,
    one failure more changes few lanes.

    Args:
        grid: the grid.
        failed: the dead workers.
        lanes: the number of lanes, at most the live workers of any stage.
    """

    def __init__(self, grid: Grid, failed: Collection[Worker], lanes: int) -> None:
        self.grid = grid
        self.lanes = lanes
        self._failed = frozenset(failed)
        self._share, self.longer = divmod(grid.global_microbatches, lanes)
        self._extra = self._share - grid.microbatches  # of the micro-batches of the others, at least

    @cached_property
    def _adopted(self) -> dict[Worker, int]:
        """The lanes of the workers outside their home, and by (lane, stage) who replaces the failed worker there."""
        return {worker: place.pipeline for place, worker in self._substitutes.items()}

    @cached_property
    def _substitutes(self) -> dict[Worker, Worker]:
        """For each failed worker of a lane's home, who is in its place."""
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
        """The worker of ``stage`` of a lane."""
        home = Worker(lane, stage)
        return self._substitutes.get(home, home)

    def count(self, lane: int) -> int:
        """Number of micro-batches of a lane."""
        return self._share + (lane < self.longer)

    def microbatches(self, lane: int) -> list[Microbatch]:
        """The micro-batches of a lane, in the order of their numbers within it."""
        own = self.grid.microbatches
        first = lane * self._extra + min(lane, self.longer)
        others = range(first, first + self.count(lane) - own)
        return [
            *(Microbatch(lane, index) for index in range(own)),
            *(Microbatch(self.lanes + number // own, number % own) for number in others),
        ]

    def lane_of(self, microbatch: Microbatch) -> int:
        """The lane that runs a micro-batch."""
        if microbatch.pipeline < self.lanes:
            return microbatch.pipeline
        number = (microbatch.pipeline - self.lanes) * self.grid.microbatches + microbatch.index
        in_longer = self.longer * (self._extra + 1)
        if number < in_longer:
            return number // (self._extra + 1)
        return self.longer + (number - in_longer) // self._extra


class LaneWorkers(Mapping[Worker, tuple[ScheduledOp, ...]]):
    """The operations of every live worker of ``problem``, decoded when they are asked for."""

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
        """The program of all lanes."""
        return self.workers.lane

    @property
    def num_operations(self) -> int:
        """The number of operations of all workers."""
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
        """Time from the start of an iteration's first operation to the end of its last, from empty to empty."""
        return self.lane.makespan

    def route(self, stage: int, microbatch: Microbatch) -> Worker:
        """The worker that executes ``microbatch`` at ``stage``."""
        grid = self.grid
        inside = 0 <= microbatch.pipeline < grid.pipelines and 0 <= microbatch.index < grid.microbatches
        if not (inside and 0 <= stage < grid.stages):
            raise PlanningError(f"the schedule has no forward of micro-batch {microbatch} at stage {stage}.")
        return self.workers.places.worker(self.workers.places.lane_of(microbatch), stage)

    def exchanges(self) -> Iterator[tuple[Worker, Worker]]:
        """The pairs of workers of consecutive stages that exchange messages in a step: neighbours in a lane."""
        places, stages = self.workers.places, range(self.grid.stages)
        for lane in range(places.lanes):
            yield from pairwise(places.worker(lane, stage) for stage in stages)

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

    @property
    def demand(self) -> tuple[float, float]:
        """The demand on the workers' memory; lanes are alike, but for a micro-batch."""
        tightest, total = self.lane.schedule().demand
        return tightest, total * self.workers.places.lanes

    def expand(self) -> Schedule:
        """The same schedule with the operations of all workers."""
        with gc_paused():
            return Schedule(self.problem, {worker: self.workers[worker] for worker in self.workers}, self.period)

    def serves(self, problem: Problem) -> bool:
        """Whether the lanes of ``problem`` are those of this schedule, whichever workers are in them."""
        is_of_lanes = problem.grid.lanes == self.grid.lanes and not problem.worker_factors
        return is_of_lanes and lane_problem(problem) == self.lane.problem

    def under(self, problem: Problem) -> CompactSchedule:
        """The same operations and times as a schedule for ``problem``, whose costs and workers are the same."""
        return compact(problem, replace(self.lane, problem=lane_problem(problem)))

    def __reduce__(self) -> tuple[Any, ...]:
        return compact, (self.problem, self.lane)

    @cached_property
    def _peaks(self) -> dict[tuple[int, int], int]:
        return {}


def compact(problem: Problem, lane: Lane) -> CompactSchedule:
    """The schedule for ``problem`` in which every lane runs the program of ``lane``.

    Raises:
        PlanningError: when ``lane`` is for another problem than its lanes'.
    """
    if lane.problem != lane_problem(problem):
        raise PlanningError(
            f"a lane with {lane.microbatches} micro-batches, or other costs or limits, is none of the "
            f"{lanes_of(problem)} lanes of {problem.grid}: plan again."
        )
    return CompactSchedule(problem, LaneWorkers(problem, lane), lane.period)
