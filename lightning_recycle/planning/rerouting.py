"""Re-routing and renaming: the runners of dead workers' micro-batches.

*Re-routing*: a micro-batch stays with its live home worker; otherwise a data-parallel peer adopts it. Workers of
further lanes take an equal share of all. The largest (micro-batches x factor) is minimal, by the greedy rule "next job
where it ends first"; with equal speeds, loads differ by at most one and only orphans move. Adopted micro-batches are
dealt like cards, in the order in which they will arrive.

*Renaming*: a schedule depends on the number of failed workers of each stage, not on which they are. A permutation of
the live peers makes it one for other failed workers, with the same order, times and memory. One permutation of whole
pipelines comes first, which keeps data and neighbours local; only workers that it would put in the place of a failed
one take another. A slow worker's part goes to a worker of the same factor.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from heapq import heapify, heapreplace

from lightning_recycle.errors import PlanningError
from lightning_recycle.planning.compact_schedule import CompactSchedule, compact
from lightning_recycle.planning.grid import Grid, Microbatch, Op, ScheduledOp, Worker
from lightning_recycle.planning.problem import Problem
from lightning_recycle.planning.schedule import Schedule, gc_paused


def reroute(
    grid: Grid, failed: Collection[Worker], factors: Mapping[Worker, float] | None = None
) -> tuple[dict[Microbatch, Worker], ...]:
    """For each stage, the worker that runs each of the D * M micro-batches there.

    Args:
        grid: the grid.
        failed: the dead workers.
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
        raise PlanningError(
            f"the plan for failures {_counts(schedule.problem)} by stage is none for {_counts(problem)}, or other "
            "things of the two problems differ: plan again."
        )
    pipelines = _pipelines(schedule.problem, problem)
    places = _places(schedule.problem, problem, pipelines)
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
    """By pipeline of ``old``, the one of ``new`` whose marked workers fit best."""
    marks_of_old, marks_of_new = _marks(old), _marks(new)
    free = dict.fromkeys(range(old.grid.lanes))
    chosen: dict[int, int] = {}
    # Those with the most marks are the hardest to place; there are few with any.
    for pipeline, marks in sorted(marks_of_old.items(), key=lambda item: (-len(item[1]), item[0])):
        candidates = [other for other in marks_of_new if other in free]
        best = max(
            candidates,
            key=lambda other: (len(marks & marks_of_new[other]), -len(marks ^ marks_of_new[other]), other == pipeline),
            default=None,
        )
        if best is not None and marks & marks_of_new[best]:
            chosen[pipeline] = best
            del free[best]
    left = [pipeline for pipeline in range(old.grid.lanes) if pipeline not in chosen]
    for pipeline in left:
        if pipeline in free:
            chosen[pipeline] = pipeline
            del free[pipeline]
    rest = iter(free)
    return [chosen[pipeline] if pipeline in chosen else next(rest) for pipeline in range(old.grid.lanes)]


def _marks(problem: Problem) -> dict[int, set[tuple[int, float]]]:
    """The stages of each pipeline whose worker has failed or is slow."""
    marks: dict[int, set[tuple[int, float]]] = {}
    factors = [(worker, factor) for worker, factor in problem.worker_factors if worker not in problem.failed]
    for worker, speed in [*((worker, _FAILED) for worker in problem.failed), *factors]:
        marks.setdefault(worker.pipeline, set()).add((worker.stage, speed))
    return marks


def _places(old: Problem, new: Problem, pipelines: list[int]) -> dict[Worker, Worker]:
    """By live worker of ``old``, the worker of ``new`` that runs its part."""
    places: dict[Worker, Worker] = {}
    for stage, (before, after) in enumerate(zip(_columns(old), _columns(new), strict=True)):
        free: dict[float, list[int]] = {}
        displaced = []
        taken = set()
        for pipeline, speed in enumerate(before):
            target = pipelines[pipeline]
            if speed == after[target]:
                taken.add(target)
                if speed != _FAILED:
                    places[Worker(pipeline, stage)] = Worker(target, stage)
            elif speed != _FAILED:
                displaced.append(pipeline)
        for pipeline, speed in enumerate(after):
            if pipeline not in taken:
                free.setdefault(speed, []).append(pipeline)
        for pipeline in displaced:
            places[Worker(pipeline, stage)] = Worker(free[before[pipeline]].pop(0), stage)
    return places


def _counts(problem: Problem) -> tuple[int, ...]:
    return tuple(sum(worker.stage == stage for worker in problem.failed) for stage in range(problem.grid.stages))
