"""One worker's part of a schedule: its operations with the messages they need, and whom it must reach. Pure data.

Concept: the schedule says which worker runs what in which order. The source of an operation's input and the destination
of its output follow from that, so messages are not separate operations. A worker needs no more of the schedule than its
:class:`Program`, whose size does not grow with the number of workers; the coordinator, which has the schedule, sends
each worker its own.

Contract: :func:`links` is symmetric, and has every pair of workers that exchange messages in a step of the schedule, in
its evaluations, and in what is run forward by the first worker of each stage. It holds no pairs of one stage.

Must not know: torch, connections, what a worker does with it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from lightning_recycle.planning.check_places import WorkerChecks, peers_to_connect, plan_checks
from lightning_recycle.planning.grid import Worker, global_index
from lightning_recycle.planning.ops import Op, OpKind
from lightning_recycle.planning.schedule import Schedule

__all__ = ["Program", "Programs", "Task", "links", "worker_program"]


_FEW_PIPELINES = 16


@dataclass(frozen=True, slots=True)
class Task:
    """An operation with everything the executor needs to know about it.

    Args:
        op: the operation.
        label: its readable name.
        index: the micro-batch's index in the global batch; -1 for REDUCE and STEP.
        source: rank of the worker whose message it waits for; None for none.
        destination: rank of the worker that gets its output; None for none.
        decoupled: for F and R, whether the micro-batch's weight gradients are computed in a separate W.
        recomputed: for F, whether an R computes it again.
    """

    op: Op
    label: str
    index: int = -1
    source: int | None = None
    destination: int | None = None
    decoupled: bool = False
    recomputed: bool = False


@dataclass(frozen=True, slots=True)
class Program:
    """What one worker must know of a schedule.

    Args:
        tasks: its tasks for one step, in order.
        neighbours: ranks of the workers of the stages before and after that it is connected with (:func:`links`).
        idle_peer: whether the schedule leaves a worker of its stage without micro-batches.
        decoupled: whether weight gradients may be computed apart from input gradients.
        checks: when it checks its peers, and is checked; None if it takes part in no checks.
        all_checks: the steps with checks of all stages, as their multiples: nobody applies such a step before all
            checks are over.
    """

    tasks: tuple[Task, ...] = ()
    neighbours: tuple[int, ...] = ()
    idle_peer: bool = False
    decoupled: bool = False
    checks: WorkerChecks | None = None
    all_checks: tuple[int, ...] = ()

    def has_checks(self, step: int) -> bool:
        """Whether workers of any stage check each other in ``step``."""
        return any(step % every == 0 for every in self.all_checks)

    def tasks_with_check(self, place: int) -> tuple[Task, ...]:
        """The tasks with a CHECK before that with the number ``place``."""
        op = Op(OpKind.CHECK, self.tasks[place].op.stage)
        return (*self.tasks[:place], Task(op, str(op)), *self.tasks[place:])


class Programs:
    """The programs of the workers of one schedule; what they have in common is found once.

    Args:
        schedule: the schedule.
        verify: the share of the time that checks of computations may take where they do not fit into idle times; 0 for
            no such checks.
    """

    def __init__(self, schedule: Schedule, verify: float = 0.0) -> None:
        self._schedule = schedule
        self._verifies, self._checks = verify > 0, plan_checks(schedule, verify)
        self._every = tuple(sorted({1 if checks.free else checks.every for checks in self._checks.values()}))
        self._links = links(schedule)
        self._idle_stages = {worker.stage for worker in schedule.idle_workers()}

    def of(self, worker: Worker) -> Program:
        """The program of ``worker``.

        Raises:
            PlanningError: if it is not part of the schedule.
        """
        grid = self._schedule.grid
        checks = self._checks.get(worker.stage)
        neighbours = {grid.rank(other) for other in self._links.get(worker, ())}
        if self._verifies:
            neighbours.update(map(grid.rank, peers_to_connect(self._schedule, worker)))
        return Program(
            worker_program(self._schedule, worker),
            tuple(sorted(neighbours)),
            worker.stage in self._idle_stages,
            self._schedule.problem.technique.decoupled,
            None if checks is None else checks.of(worker),
            self._every,
        )


def worker_program(schedule: Schedule, worker: Worker) -> tuple[Task, ...]:
    """The tasks of ``worker`` for one step, in order."""
    grid = schedule.grid
    program = schedule.program(worker)
    deferred = {op.microbatch for op in program if op.kind is OpKind.BACKWARD_WEIGHT}
    again = {op.microbatch for op in program if op.kind is OpKind.RECOMPUTE}
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
        split, twice = op.microbatch in deferred, op.microbatch in again
        tasks.append(Task(op, str(op), index, source, destination, decoupled=split, recomputed=twice))
    return tuple(tasks)


def links(schedule: Schedule) -> Mapping[Worker, frozenset[Worker]]:
    """For each worker, those of the stages before and after that it is connected with while the schedule runs.

    With few pipelines all workers of the one stage and the other, so that every plan for the same workers can be run
    without connecting again. With many, where each would need hundreds of connections: those that exchange messages;
    the next worker of the same pipeline, and where that is lost, all its peers; the first worker of each stage with
    that of the next.
    """
    stages = schedule.grid.stages
    if schedule.grid.pipelines <= _FEW_PIPELINES:
        by_stage = [frozenset(w for w in schedule.workers if w.stage == stage) for stage in range(-1, stages + 1)]
        return {worker: by_stage[worker.stage] | by_stage[worker.stage + 2] for worker in schedule.workers}
    found: dict[Worker, set[Worker]] = defaultdict(set)

    def link(one: Worker, other: Worker) -> None:
        found[one].add(other)
        found[other].add(one)

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
    return {worker: frozenset(others) for worker, others in found.items()}
