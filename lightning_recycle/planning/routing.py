"""Routing: which worker runs each micro-batch, and one plan for alike workers.

*Re-routing*: a micro-batch stays with its live home worker; otherwise a data-parallel peer adopts it. Workers of
further lanes take an equal share of all. The largest (micro-batches x factor) is minimal, by the greedy rule "next job
where it ends first"; with equal speeds, loads differ by at most one and only orphans move. Adopted micro-batches are
dealt like cards, in the order in which they will arrive.

*Renaming*: a schedule depends on the number of failed workers of each stage, not on which they are. A permutation of
the live peers makes it one for other failed workers, with the same order, times and memory. One permutation of whole
pipelines comes first, which keeps data and neighbours local; only workers that it would put in the place of a failed
one take another. A slow worker's part goes to a worker of the same factor.

*Compact schedules*: where every stage has at least n live workers there are n *lanes*, sets of one live worker of each
stage, that share nothing but REDUCE. All micro-batches are dealt to lanes, and each lane runs the plan of a single
pipeline, so a plan for thousands of workers is as small as one for a pipeline. Another set of failed workers with as
many lanes has the same plan. A compact schedule equals :meth:`~CompactSchedule.expand` in every answer.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heapify, heapreplace
from itertools import pairwise
from typing import Any

from lightning_recycle.errors import PlanningError
from lightning_recycle.planning.grid import Grid, Microbatch, Op, ScheduledOp, Worker
from lightning_recycle.planning.problem import Problem, distribution_of, lower_bound
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
        substitutes = {}
        free = [self.lanes] * self.grid.stages
        for lost in sorted(self._failed):
            if lost.pipeline >= self.lanes:
                break
            stage = lost.stage
            while Worker(free[stage], stage) in self._failed:
                free[stage] += 1
            substitutes[lost] = Worker(free[stage], stage)
            free[stage] += 1
        return substitutes

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
        per_lane = self.grid.microbatches
        first = lane * self._extra + min(lane, self.longer)
        others = range(first, first + self.count(lane) - per_lane)
        return [
            *(Microbatch(lane, index) for index in range(per_lane)),
            *(Microbatch(self.lanes + number // per_lane, number % per_lane) for number in others),
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


def reroute(
    grid: Grid, failed: Collection[Worker], factors: Mapping[Worker, float] | None = None
) -> tuple[dict[Microbatch, Worker], ...]:
    """For each stage, the worker that runs each of the D * M micro-batches there.

    Args:
        factors: factors by which a worker's operations take longer; 1 for workers not named.

    Raises:
        PlanningError: when a stage has no live worker.
    """
    microbatches = tuple(grid.all_microbatches())
    return tuple(_reroute(grid, stage, failed, factors or {}, microbatches) for stage in range(grid.stages))


def _reroute(
    grid: Grid,
    stage: int,
    failed: Collection[Worker],
    factors: Mapping[Worker, float],
    microbatches: tuple[Microbatch, ...],
) -> dict[Microbatch, Worker]:
    workers = [Worker(d, stage) for d in range(grid.lanes)]
    live = [d for d, worker in enumerate(workers) if worker not in failed]
    if not live:
        raise PlanningError(f"stage {stage} has no live worker to route micro-batches to.")
    route = {microbatch: workers[microbatch.pipeline] for microbatch in microbatches}
    shares = _shares(grid, {d: factors.get(workers[d], 1.0) for d in live})
    keeps = {d: min(grid.microbatches, shares[d]) if d < grid.pipelines else 0 for d in live}
    leaving = {d: grid.microbatches - keeps.get(d, 0) for d in range(grid.pipelines)}
    homeless = [  # by index first: the order in which they arrive
        microbatches[d * grid.microbatches + m]
        for m in range(grid.microbatches)
        for d, count in leaving.items()
        if count and (m + 1) * count // grid.microbatches > m * count // grid.microbatches  # spread evenly
    ]
    quotas = {d: shares[d] - keeps[d] for d in live}
    if max(quotas.values()) - min(quotas.values()) <= 1 and list(quotas.values()) == sorted(quotas.values())[::-1]:
        for turn, microbatch in enumerate(homeless):  # same result as the rule below, in a hundredth of the time
            route[microbatch] = workers[live[turn % len(live)]]
        return route
    given = dict.fromkeys(live, 0)
    for turn, microbatch in enumerate(homeless, start=1):
        # The peer furthest behind its share of those dealt so far, in whole numbers.
        peer = max(live, key=lambda d: (quotas[d] * turn - given[d] * len(homeless), -d))
        given[peer] += 1
        route[microbatch] = workers[peer]
    return route


def _shares(grid: Grid, factors: Mapping[int, float]) -> dict[int, int]:
    """Micro-batches of each worker, with the least largest share x factor."""
    total = grid.global_microbatches
    even, rest = divmod(total, len(factors))
    if len(set(factors.values())) == 1:
        return {d: even + (turn < rest) for turn, d in enumerate(factors)}
    shares = dict.fromkeys(factors, 0)
    # When each would finish one more; on a tie, workers that run their own go first, so that nothing moves.
    queue = [(factor, False, d) for d, factor in factors.items()]
    heapify(queue)
    for _ in range(total):
        d = queue[0][2]
        shares[d] += 1
        heapreplace(queue, (factors[d] * (shares[d] + 1), shares[d] >= grid.microbatches, d))
    return shares


# ---------------------------------------------------------------------- renaming

_FAILED = math.inf


def representative(problem: Problem) -> Problem:
    """One problem for all that are :func:`alike`, failures last, slow workers before."""
    if not problem.failed and not problem.worker_factors:
        return problem
    failed, factors = set(), {}
    for stage, column in enumerate(_columns(problem)):
        for pipeline, speed in enumerate(sorted(column)):
            if speed == _FAILED:
                failed.add(Worker(pipeline, stage))
            elif speed != 1:
                factors[Worker(pipeline, stage)] = speed
    return replace(problem, failed=frozenset(failed), worker_factors=tuple(sorted(factors.items())))


def alike(one: Problem, other: Problem) -> bool:
    """Whether a schedule for one of them, :func:`renamed`, is one for the other."""
    return representative(one) == representative(other)


def renamed(schedule: Schedule, problem: Problem) -> Schedule:
    """The same schedule on the workers of ``problem``; itself if nothing changes.

    Raises PlanningError when more than the failed and slow workers differ.
    """
    if schedule.problem == problem:
        return schedule
    if isinstance(schedule, CompactSchedule) and schedule.serves(problem):
        return compact(problem, schedule.lane)
    if not alike(schedule.problem, problem):
        planned, asked = (distribution_of(each.grid, each.failed) for each in (schedule.problem, problem))
        raise PlanningError(
            f"the plan for failures {planned} by stage is none for {asked}, or other things of the two problems"
            " differ: plan again."
        )
    pipelines = _pipelines(schedule.problem, problem)
    places = _match_workers(schedule.problem, problem, pipelines)
    grid = problem.grid
    keeps_homes = grid.lanes == grid.pipelines  # otherwise not every worker has micro-batches of its own
    names = [
        None if old == new or not keeps_homes else [Microbatch(new, index) for index in range(grid.microbatches)]
        for old, new in enumerate(pipelines)
    ]
    with gc_paused():
        workers = {
            places[worker]: tuple(_renamed_op(scheduled, names) for scheduled in operations)
            for worker, operations in schedule.workers.items()
        }
    return Schedule(problem, dict(sorted(workers.items())), schedule.period)


def _renamed_op(scheduled: ScheduledOp, names: Sequence[Sequence[Microbatch] | None]) -> ScheduledOp:
    op = scheduled.op
    others = None if op.microbatch is None else names[op.microbatch.pipeline]
    if op.microbatch is None or others is None:
        return scheduled
    return ScheduledOp(Op(op.kind, op.stage, others[op.microbatch.index]), scheduled.start, scheduled.end)


def _columns(problem: Problem) -> list[list[float]]:
    """By stage and pipeline, the factor of the worker; infinite if it has failed."""
    grid = problem.grid
    columns = [[1.0] * grid.lanes for _ in range(grid.stages)]
    for worker, factor in problem.worker_factors:
        columns[worker.stage][worker.pipeline] = factor
    for worker in problem.failed:
        columns[worker.stage][worker.pipeline] = _FAILED
    return columns


def _pipelines(old: Problem, new: Problem) -> list[int]:
    """Pipelines of ``new`` that take the part of those of ``old``, by the latter."""
    marks = _marks(old), _marks(new)
    changed = [d for d in range(old.grid.lanes) if marks[0].get(d) != marks[1].get(d)]
    befores, afters = (
        sorted(changed, key=lambda d: (-len(own.get(d, ())), sorted(own.get(d, ())), d)) for own in marks
    )
    chosen = list(range(old.grid.lanes))
    for before, after in zip(befores, afters, strict=True):
        chosen[before] = after
    return chosen


def _marks(problem: Problem) -> dict[int, set[tuple[int, float]]]:
    """The stages of each pipeline whose worker has failed or is slow."""
    marks: dict[int, set[tuple[int, float]]] = {}
    factors = [(worker, factor) for worker, factor in problem.worker_factors if worker not in problem.failed]
    for worker, speed in [*((worker, _FAILED) for worker in problem.failed), *factors]:
        marks.setdefault(worker.pipeline, set()).add((worker.stage, speed))
    return marks


def _match_workers(old: Problem, new: Problem, pipelines: list[int]) -> dict[Worker, Worker]:
    """By live worker of ``old``, the worker of ``new`` that runs its part."""
    places: dict[Worker, Worker] = {}
    for stage, (old_speeds, new_speeds) in enumerate(zip(_columns(old), _columns(new), strict=True)):
        free: dict[float, list[int]] = {}
        displaced = []
        used = set()
        for pipeline, speed in enumerate(old_speeds):
            target = pipelines[pipeline]
            if speed == new_speeds[target]:
                used.add(target)
                if speed != _FAILED:
                    places[Worker(pipeline, stage)] = Worker(target, stage)
            elif speed != _FAILED:
                displaced.append(pipeline)
        for pipeline, speed in enumerate(new_speeds):
            if pipeline not in used:
                free.setdefault(speed, []).append(pipeline)
        for pipeline in displaced:
            places[Worker(pipeline, stage)] = Worker(free[old_speeds[pipeline]].pop(0), stage)
    return places
