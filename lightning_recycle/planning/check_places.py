"""Where workers check each other's computations: a pass over a finished schedule. Pure data.

Concept: the workers of a stage hold the same parameters, so each can compute a micro-batch of another once more, and
must get the same bits. A worker is *checked* on the first micro-batch whose weight gradient it computes: then usually
nothing else is in its gradients yet. Its peer does so in a CHECK of its own before REDUCE, so that nothing is committed
that was found wrong. Peers take turns (:func:`partners`).

Contract: no planner, validator or plan file knows of checks; the schedule stays as it is, and a CHECK is put between
its operations. It is *free* if it fits into an idle time: between two operations, or before REDUCE if the worker idles
afterwards for as long. If it is free for all workers of a stage, they check in every step; otherwise so seldom that
it takes at most the allowed share of the time. Nobody STEPs before all CHECKs of all stages are over, as a wrong
activation or gradient has been handed on by then: what that costs where stages STEP at their own time counts, too. A
stage with one worker is not checked, nor is a schedule in lanes (:mod:`~lightning_recycle.planning.coded`): a place for
each of its workers would have to be looked for.

Must not know: torch, how results are compared.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_recycle.planning.coded import CodedSchedule
from lightning_recycle.planning.grid import Worker
from lightning_recycle.planning.ops import OpKind, ScheduledOp
from lightning_recycle.planning.schedule import Schedule

__all__ = ["StageChecks", "partners", "peers_to_connect", "plan_checks"]

_COMPLETING = (OpKind.BACKWARD_WEIGHT, OpKind.BACKWARD)
_COMPUTING = (OpKind.FORWARD, OpKind.BACKWARD_INPUT, *_COMPLETING)
_TOLERANCE = 1e-9  # of a time
_FARTHEST = 8  # places between two workers that check each other: what a worker connects with does not grow


@dataclass(frozen=True, slots=True)
class StageChecks:
    """The checks of one stage.

    Args:
        ranks: its workers, in order.
        every: a check is in each step that is a multiple of this.
        places: for each worker the number of operations before its CHECK.
        costs: seconds by which they make a step longer at most; 0 if all of them are in idle times, and nobody has to
            wait for them.
    """

    ranks: tuple[int, ...]
    every: int
    places: Mapping[Worker, int]
    costs: float

    @property
    def free(self) -> bool:
        """Whether they cost nothing."""
        return self.costs <= _TOLERANCE


def plan_checks(schedule: Schedule, share: float) -> dict[int, StageChecks]:
    """The checks of each stage that has some.

    Args:
        schedule: the schedule.
        share: the share of the time that checks may take where they are not free; 0 for no checks at all.
    """
    if share <= 0 or isinstance(schedule, CodedSchedule):
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
    found: dict[int, StageChecks] = {}
    for stage, workers in stages.items():
        programs = {worker: schedule.workers[worker] for worker in workers}
        ready = [_ready(operations) for operations in programs.values()]
        if len(workers) < 2 or None in ready:  # a worker without micro-batches has nothing to be checked on
            continue
        latest = max(time for time in ready if time is not None)
        seconds = max(_duration(operations) for operations in programs.values())
        places = {
            worker: _place(operations, latest, seconds, operations[0].start + schedule.period if staggered else barrier)
            for worker, operations in programs.items()
        }
        waited = max(0.0, max(end for _, _, end in places.values()) - last_moment)
        costs = max(waited, 0.0 if all(fits for _, fits, _ in places.values()) else seconds)
        ranks = tuple(sorted(schedule.grid.rank(worker) for worker in workers))
        found[stage] = StageChecks(ranks, 1, {worker: place for worker, (place, _, _) in places.items()}, costs)
    # In the same steps, whose checks then delay the same next step.
    dearest = max((checks.costs for checks in found.values()), default=0.0)
    every = max(1, math.ceil(dearest / (share * schedule.period) - _TOLERANCE))
    return {stage: checks if checks.free else replace(checks, every=every) for stage, checks in found.items()}


def partners(ranks: Sequence[int], rank: int, turn: int) -> tuple[int, int]:
    """Whom ``rank`` checks, and who checks it, in check number ``turn``: after ``len(ranks) - 1`` checks every worker
    has been checked by every other one, or with many after 8 by the 8 before it.
    """
    place, count = ranks.index(rank), len(ranks)
    distance = 1 + turn % min(count - 1, _FARTHEST)
    return ranks[(place + distance) % count], ranks[(place - distance) % count]


def peers_to_connect(schedule: Schedule, worker: Worker) -> frozenset[Worker]:
    """The workers of its stage that ``worker`` exchanges records with, in this plan or another one for the same workers
    that begins in passing.
    """
    if isinstance(schedule, CodedSchedule):
        return frozenset()
    peers = [other for other in schedule.live_workers if other.stage == worker.stage]
    place, most = peers.index(worker), min(len(peers) - 1, _FARTHEST)
    near = (peers[(place + sign * distance) % len(peers)] for distance in range(1, most + 1) for sign in (1, -1))
    return frozenset(near) - {worker}


def _ready(operations: Sequence[ScheduledOp]) -> float | None:
    """When the micro-batch is done on which a worker is checked; None if it has none."""
    return next((one.end for one in operations if one.op.kind in _COMPLETING), None)


def _duration(operations: Sequence[ScheduledOp]) -> float:
    """What it takes to compute one micro-batch once more."""
    first = next(one.op.microbatch for one in operations if one.op.kind in _COMPLETING)
    return sum(one.duration for one in operations if one.op.microbatch == first and one.op.kind in _COMPUTING)


def _reduce(operations: Sequence[ScheduledOp]) -> ScheduledOp:
    return next(one for one in operations if one.op.kind is OpKind.REDUCE)


def _after_reduce(operations: Sequence[ScheduledOp]) -> float:
    """What a worker does after REDUCE, in seconds."""
    return sum(one.duration for one in operations[operations.index(_reduce(operations)) + 1 :])


def _place(operations: Sequence[ScheduledOp], ready: float, seconds: float, end: float) -> tuple[int, bool, float]:
    """The place of a CHECK of ``seconds`` that begins after ``ready``, whether it fits there, and when it is over.
    ``end``: when the worker goes on after REDUCE, with the next step if nobody waits for others, else when all are
    REDUCED.
    """
    reduce = operations.index(_reduce(operations))
    for index in range(1, reduce):
        begin = max(ready, operations[index - 1].end)
        if operations[index].start - begin >= seconds - _TOLERANCE:
            return index, True, begin + seconds
    rest = _after_reduce(operations) if end > operations[-1].end else 0.0
    fits = end - operations[reduce].end - rest >= seconds - _TOLERANCE
    return reduce, fits, max(ready, operations[reduce - 1].end if reduce else 0.0) + seconds
