"""Programs of workers: their part of a schedule, messages, and checks of peers.

*Messages*: the source of an operation's input and the destination of its output follow from the schedule, so a worker
needs only its :class:`Program`. :func:`links` is symmetric and has every pair of neighbouring stages' workers that
exchange messages in a step, in evaluations, and in forwards by the first workers.

*Checks*: workers of a stage hold the same parameters, so a peer can compute a micro-batch once more, in a CHECK before
REDUCE, and must get the same bits. Peers take turns (:func:`partners`), and micro-batches are drawn, so that errors at
a fixed place meet a check. A CHECK is *free* if it fits into an idle time: every step has one where possible. All
micro-batches have their turn in further steps, so seldom that these take at most the allowed share of the time. No
worker STEPs before all CHECKs of all stages are over. Stages with one worker, or one without micro-batches, have no
checks, nor have compact schedules.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

from lightning_recycle.planning.grid import Op, OpKind, ScheduledOp, Worker, global_index
from lightning_recycle.planning.routing import CompactSchedule
from lightning_recycle.planning.schedule import Schedule

COMPLETING = (OpKind.BACKWARD_WEIGHT, OpKind.BACKWARD)
_COMPUTING = (OpKind.FORWARD, OpKind.BACKWARD_INPUT, *COMPLETING)
_TOLERANCE = 1e-9  # of a time
_FARTHEST = 8  # ranks between two workers that check each other: what a worker connects with does not grow


@dataclass(frozen=True, slots=True)
class WorkerChecks:
    """Which micro-batch this worker verifies in a step, and when.

    Micro-batches have the order of their weight gradients on this worker; if it has fewer than its peers, they repeat.
    ``ranks``: its stage's workers, itself among them. Steps that are a multiple of ``every`` may check any micro-batch,
    others the ``free`` ones. ``operations_before``: for each micro-batch the number of its operations before the CHECK.
    """

    ranks: tuple[int, ...]
    every: int
    free: tuple[int, ...]
    operations_before: tuple[int, ...]

    @property
    def spacing(self) -> int:
        """Each step that is a multiple of this has a check."""
        return 1 if self.free else self.every

    def drawn(self, step: int) -> int | None:
        """The micro-batch checked in ``step`` on all workers, or None."""
        if step % self.spacing:
            return None
        candidates = range(len(self.operations_before)) if step % self.every == 0 else self.free
        digest = hashlib.blake2b(step.to_bytes(8, "little"), digest_size=8).digest()
        return candidates[int.from_bytes(digest, "little") % len(candidates)]

    def partners(self, step: int, rank: int) -> tuple[int, int]:
        """The peer that ``rank`` checks in ``step``, and the peer that checks it."""
        return partners(self.ranks, rank, step // self.spacing)


@dataclass(frozen=True, slots=True)
class StageChecks:
    """The checks of one stage.

    Steps that are a multiple of ``every`` may check any micro-batch. ``operations_before``: for each worker and
    micro-batch the number of operations before its CHECK. ``costs``: seconds by which each micro-batch's CHECKs
    lengthen a step at most; 0 if all are in idle times.
    """

    ranks: tuple[int, ...]
    every: int
    operations_before: Mapping[Worker, tuple[int, ...]]
    costs: tuple[float, ...]

    @property
    def free(self) -> tuple[int, ...]:
        """Micro-batches whose check costs nothing."""
        return tuple(number for number, costs in enumerate(self.costs) if costs <= _TOLERANCE)

    def of(self, worker: Worker) -> WorkerChecks:
        return WorkerChecks(self.ranks, self.every, self.free, self.operations_before[worker])


def plan_checks(schedule: Schedule, share: float) -> dict[int, StageChecks]:
    """The checks of each stage that has some.

    ``share``: the share of the time that checks may take where they are not free; 0 for no checks at all.
    """
    if share <= 0 or isinstance(schedule, CompactSchedule):
        return {}
    stages: dict[int, list[Worker]] = defaultdict(list)
    for worker in schedule.live_workers:
        stages[worker.stage].append(worker)
    staggered = schedule.problem.technique.staggered
    barrier = max((_reduce(operations).end for operations in schedule.workers.values()), default=0.0)
    # The latest moment at which each may STEP without a delay of its next step.
    moments = [
        max(_reduce(operations).end, operations[0].start + schedule.period - _after_reduce(operations))
        for operations in schedule.workers.values()
    ]
    last_moment = min(moments, default=0.0) if staggered else barrier
    by_stage: dict[int, StageChecks] = {}
    for stage, workers in stages.items():
        programs = {worker: schedule.workers[worker] for worker in workers}
        completed = [[one.end for one in row if one.op.kind in COMPLETING] for row in programs.values()]
        if len(workers) < 2 or [] in completed:  # a worker without micro-batches has nothing to be checked on
            continue
        count = max(map(len, completed))
        ready = list(accumulate((max(row[k % len(row)] for row in completed) for k in range(count)), max))
        seconds = max(_duration(operations) for operations in programs.values())
        planned = {
            worker: _checks(operations, ready, seconds, operations[0].start + schedule.period if staggered else barrier)
            for worker, operations in programs.items()
        }
        costs = []
        for each in zip(*planned.values(), strict=True):
            waited = max(0.0, max(check.end for check in each) - last_moment)
            costs.append(max(waited, 0.0 if all(check.fits for check in each) else seconds))
        ranks = tuple(sorted(schedule.grid.rank(worker) for worker in workers))
        by_stage[stage] = StageChecks(
            ranks, 1, {worker: tuple(c.operations_before for c in row) for worker, row in planned.items()}, tuple(costs)
        )
    # In the same steps, whose checks then delay the same next step.
    dearest = max((max(checks.costs) for checks in by_stage.values()), default=0.0)
    every = max(1, math.ceil(dearest / (share * schedule.period) - _TOLERANCE))
    return {
        stage: checks if len(checks.free) == len(checks.costs) else replace(checks, every=every)
        for stage, checks in by_stage.items()
    }


def partners(ranks: Sequence[int], rank: int, turn: int) -> tuple[int, int]:
    """The peers that ``rank`` checks, and is checked by, in check ``turn``.

    After ``len(ranks) - 1`` checks every worker has been checked by every other one, or with many after 8 by the 8
    before it.
    """
    index, count = ranks.index(rank), len(ranks)
    distance = 1 + turn % min(count - 1, _FARTHEST)
    return ranks[(index + distance) % count], ranks[(index - distance) % count]


def peers_to_connect(schedule: Schedule, worker: Worker) -> frozenset[Worker]:
    """Peers with which ``worker`` exchanges records, in any plan of these workers."""
    if isinstance(schedule, CompactSchedule):
        return frozenset()
    peers = [other for other in schedule.live_workers if other.stage == worker.stage]
    index, most = peers.index(worker), min(len(peers) - 1, _FARTHEST)
    near = (peers[(index + sign * distance) % len(peers)] for distance in range(1, most + 1) for sign in (1, -1))
    return frozenset(near) - {worker}


def _duration(operations: Sequence[ScheduledOp]) -> float:
    """Seconds of computing one micro-batch once more."""
    first = next(one.op.microbatch for one in operations if one.op.kind in COMPLETING)
    return sum(one.duration for one in operations if one.op.microbatch == first and one.op.kind in _COMPUTING)


def _reduce(operations: Sequence[ScheduledOp]) -> ScheduledOp:
    return next(one for one in operations if one.op.kind is OpKind.REDUCE)


def _after_reduce(operations: Sequence[ScheduledOp]) -> float:
    return sum(one.duration for one in operations[operations.index(_reduce(operations)) + 1 :])


class _Check(NamedTuple):
    """A planned CHECK: operations before it, whether it fits there, and when it ends."""

    operations_before: int
    fits: bool
    end: float


def _checks(operations: Sequence[ScheduledOp], ready: Sequence[float], seconds: float, end: float) -> list[_Check]:
    """The CHECKs that begin after ``ready``, which rises.

    ``end``: when the worker goes on after REDUCE, with the next step if no worker waits, else when all are REDUCED.
    """
    reduce = operations.index(_reduce(operations))
    remaining = _after_reduce(operations) if end > operations[-1].end else 0.0
    fits = end - operations[reduce].end - remaining >= seconds - _TOLERANCE
    planned: list[_Check] = []
    index = 1
    for earliest in ready:
        while index < reduce:
            begin = max(earliest, operations[index - 1].end)
            if operations[index].start - begin >= seconds - _TOLERANCE:
                planned.append(_Check(index, True, begin + seconds))
                break
            index += 1
        else:
            begin = max(earliest, operations[reduce - 1].end if reduce else 0.0)
            planned.append(_Check(reduce, fits, begin + seconds))
    return planned


_FEW_PIPELINES = 16


@dataclass(frozen=True, slots=True)
class Task:
    """An operation with the executor's needs: peers, and its kind of backward.

    ``index``: the micro-batch's in the global batch; -1 for REDUCE and STEP. ``source`` and ``destination``: ranks of
    the sender of its input and the receiver of its output. ``split_backward``: for F and R, weight gradients are in a
    separate W. ``recomputed``: for F, an R computes it again.
    """

    op: Op
    label: str
    index: int = -1
    source: int | None = None
    destination: int | None = None
    split_backward: bool = False
    recomputed: bool = False


@dataclass(frozen=True, slots=True)
class Program:
    """One worker's part of a schedule.

    ``neighbours``: ranks of the connected workers of the stages before and after (:func:`links`). ``idle_peer``: a
    worker of its stage has no micro-batches. ``split_backward``: weight gradients may be computed apart. ``checks``: of
    peers and by peers. ``all_checks``: intervals n: some stage checks in each step divisible by n; in such a step no
    worker STEPs before all checks are over.
    """

    tasks: tuple[Task, ...] = ()
    neighbours: tuple[int, ...] = ()
    idle_peer: bool = False
    split_backward: bool = False
    checks: WorkerChecks | None = None
    all_checks: tuple[int, ...] = ()

    def renamed(self, rank: Callable[[int], int], part: int = 0, parts: int = 1) -> Program:
        """The same program, which must have no checks, between workers of other ranks.

        ``rank``: old -> new. It computes part ``part`` of each micro-batch, ``parts`` of which replace one of a larger
        grid.
        """

        def new_rank(old: int | None) -> int | None:
            return None if old is None else rank(old)

        def rename_task(task: Task) -> Task:
            task = replace(task, source=new_rank(task.source), destination=new_rank(task.destination))
            microbatch = task.op.microbatch
            if parts == 1 or microbatch is None:
                return task
            microbatch = replace(microbatch, pipeline=microbatch.pipeline * parts + part)
            return replace(task, op=replace(task.op, microbatch=microbatch), index=task.index * parts + part)

        return replace(self, tasks=tuple(map(rename_task, self.tasks)), neighbours=tuple(map(rank, self.neighbours)))

    def has_checks(self, step: int) -> bool:
        """Whether workers of any stage check each other in ``step``."""
        return any(step % every == 0 for every in self.all_checks)

    def tasks_with_check(self, index: int) -> tuple[Task, ...]:
        """The tasks with a CHECK before task number ``index``."""
        op = Op(OpKind.CHECK, self.tasks[index].op.stage)
        return (*self.tasks[:index], Task(op, str(op)), *self.tasks[index:])


class Programs:
    """Programs of the workers of one schedule; common parts are found once.

    ``verify``: the share of the time for checks that do not fit into idle times; 0 for no checks.
    """

    def __init__(self, schedule: Schedule, verify: float = 0.0) -> None:
        self._schedule = schedule
        self._verifies, self._checks = verify > 0, plan_checks(schedule, verify)
        self._every = tuple(sorted({1 if checks.free else checks.every for checks in self._checks.values()}))
        self._links = links(schedule)
        self._idle_stages = {worker.stage for worker in schedule.idle_workers()}

    def of(self, worker: Worker) -> Program:
        """The program of ``worker``; PlanningError if it is not part of the schedule."""
        grid = self._schedule.grid
        checks = self._checks.get(worker.stage)
        neighbours = {grid.rank(other) for other in self._links.get(worker, ())}
        if self._verifies:
            neighbours.update(map(grid.rank, peers_to_connect(self._schedule, worker)))
        return Program(
            worker_program(self._schedule, worker),
            tuple(sorted(neighbours)),
            worker.stage in self._idle_stages,
            self._schedule.problem.technique.split_backward,
            None if checks is None else checks.of(worker),
            self._every,
        )


def worker_program(schedule: Schedule, worker: Worker) -> tuple[Task, ...]:
    """The tasks of ``worker`` for one step, in order."""
    grid = schedule.grid
    program = schedule.program(worker)
    deferred = {op.microbatch for op in program if op.kind is OpKind.BACKWARD_WEIGHT}
    recomputed = {op.microbatch for op in program if op.kind is OpKind.RECOMPUTE}
    tasks: list[Task] = []
    for op in program:
        if op.microbatch is None:
            tasks.append(Task(op, str(op)))
            continue
        before, after = (
            grid.rank(schedule.route(stage, op.microbatch)) if 0 <= stage < grid.stages else None
            for stage in (op.stage - 1, op.stage + 1)
        )
        if op.kind is OpKind.FORWARD:
            source, destination = before, after
        elif op.kind in (OpKind.BACKWARD_WEIGHT, OpKind.RECOMPUTE):
            source, destination = None, None
        else:
            source, destination = after, before
        index = global_index(grid, op.microbatch)
        split, is_recomputed = op.microbatch in deferred, op.microbatch in recomputed
        tasks.append(Task(op, str(op), index, source, destination, split_backward=split, recomputed=is_recomputed))
    return tuple(tasks)


def links(schedule: Schedule) -> Mapping[Worker, frozenset[Worker]]:
    """Workers of neighbouring stages with which each worker is connected.

    With few pipelines all workers of both stages, so that every plan for them runs without connecting again. With many,
    pairs that exchange messages; the next worker of the same pipeline, and where that is lost, all its peers; the first
    worker of each stage with that of the next.
    """
    stages = schedule.grid.stages
    if schedule.grid.lanes <= _FEW_PIPELINES:
        by_stage = [frozenset(w for w in schedule.workers if w.stage == stage) for stage in range(-1, stages + 1)]
        return {worker: by_stage[worker.stage] | by_stage[worker.stage + 2] for worker in schedule.workers}
    linked: dict[Worker, set[Worker]] = defaultdict(set)

    def link(one: Worker, other: Worker) -> None:
        linked[one].add(other)
        linked[other].add(one)

    for one, other in schedule.exchanges():
        link(one, other)
    live: dict[int, list[Worker]] = defaultdict(list)
    for worker in schedule.live_workers:
        live[worker.stage].append(worker)
        for stage in (worker.stage - 1, worker.stage + 1):
            if 0 <= stage < stages and (neighbour := Worker(worker.pipeline, stage)) in schedule.workers:
                link(worker, neighbour)
    for lost in schedule.failed:
        for stage in (lost.stage - 1, lost.stage + 1):
            if (neighbour := Worker(lost.pipeline, stage)) in schedule.workers:
                for peer in live[lost.stage]:
                    link(neighbour, peer)
    for stage in range(stages - 1):
        if live[stage] and live[stage + 1]:
            link(live[stage][0], live[stage + 1][0])
    return {worker: frozenset(others) for worker, others in linked.items()}
