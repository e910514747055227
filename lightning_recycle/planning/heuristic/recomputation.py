"""Recomputation of activations, where memory makes a plan slow.

Concept: a micro-batch whose F keeps only what the stage got (a checkpoint) leaves room for others; R, the same forward
again, takes what its backward needs shortly before that. It costs an F, so it is used only where memory is what makes
the plan slow, and for as few micro-batches as possible. The search for good orders need not know of it:

1. plan without it, and without the limit in bytes. Where the first is as short as the second, it is the answer;
2. the stages whose workers hold more in the second than they have are *tight*. Plan as if every F of a tight stage kept
   a checkpoint only, every backward took an F longer, and there were always room for one R;
3. put an R before each of these backwards. It waits for nothing, so it can run while its worker waits for the gradient;
4. take it back for every micro-batch whose activations fit into memory from F on.

At the last stage there is never an R: an F at the place of its R is as early for all workers, and needs no F before.

Contract: never worse than the plan without it; respects memory and the in-flight limits; at no time does a worker hold
more than the limit, the activations during an R included. Without ``Memory.checkpoint`` nothing is computed again.

Must not know: how plans are made. Internal to ``planning``.

Source: activation checkpointing (Chen et al., arXiv 1604.06174), by micro-batch as in GPipe (arXiv 1811.06965).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from lightning_recycle.planning.bounds import lower_bound
from lightning_recycle.planning.grid import Microbatch, Op, OpKind, ScheduledOp, Worker
from lightning_recycle.planning.memory import Memory
from lightning_recycle.planning.problem import Problem
from lightning_recycle.planning.schedule import Schedule
from lightning_recycle.planning.timing import retime

__all__ = ["with_recomputation"]

_SHARE = 0.25  # of the effort of a plan, for each of the others
_BACKWARDS = (OpKind.BACKWARD_INPUT, OpKind.BACKWARD)


def with_recomputation(problem: Problem, plan: Callable[[Problem, float], Schedule]) -> Schedule:
    """The best of the plans with and without recomputation.

    Args:
        problem: the problem.
        plan: makes a plan of a problem in which nothing may be computed again, with a share of the usual effort.
    """
    memory = problem.memory
    if memory is None or memory.checkpoint is None:
        return plan(problem, 1.0)
    best = plan(replace(problem, memory=replace(memory, checkpoint=None)), 1.0).under(problem)
    saves = [s for s in range(problem.grid.stages - 1) if memory.checkpoint[s] < memory.after_forward[s]]
    if not saves or _met(best, lower_bound(problem)):
        return best
    free = plan(replace(problem, memory=None), _SHARE).under(problem)
    if _met(best, free.period):
        return best
    if free.fits(problem):
        return free
    tight = frozenset(
        stage for stage in saves if max(map(free.peak_memory, problem.live_workers(stage))) > memory.capacity[stage]
    )
    reduced = _reduced(problem, memory, tight)
    if not tight or _met(best, lower_bound(reduced)):
        return best
    found = _with_room(_expanded(plan(reduced, _SHARE), problem, tight), memory)
    return best if _met(best, found.period) else found


def _met(schedule: Schedule, period: float) -> bool:
    return schedule.period <= period * (1 + 1e-9)


def _reduced(problem: Problem, memory: Memory, stages: frozenset[int]) -> Problem:
    """The problem in which each backward of ``stages`` begins with an R, for which memory is kept free."""
    assert memory.checkpoint is not None
    costs = problem.costs
    backward, capacity, held = list(costs.backward_input), list(memory.capacity), list(memory.after_forward)
    for stage in stages:
        backward[stage] += costs.forward[stage]
        capacity[stage] -= memory.after_forward[stage] - memory.checkpoint[stage]
        held[stage] = memory.checkpoint[stage]
    reduced = replace(memory, capacity=tuple(capacity), after_forward=tuple(held), checkpoint=None)
    return replace(problem, costs=replace(costs, backward_input=tuple(backward)), memory=reduced)


def _expanded(schedule: Schedule, problem: Problem, stages: frozenset[int]) -> Schedule:
    """A schedule of the reduced problem as one of ``problem``, with an R directly before each of the backwards."""

    def operations(worker: Worker) -> Iterator[Op]:
        for op in schedule.program(worker):
            if op.kind in _BACKWARDS and worker.stage in stages:
                yield Op(OpKind.RECOMPUTE, op.stage, op.microbatch)
            yield op

    technique = schedule.problem.technique  # 1F1B never splits
    programs = {worker: list(operations(worker)) for worker in schedule.live_workers}
    return _timed(replace(problem, technique=technique), programs)


def _with_room(schedule: Schedule, memory: Memory) -> Schedule:
    """The schedule without the R of those micro-batches whose activations fit into memory from F on."""
    programs = {}
    for worker in schedule.live_workers:
        program = schedule.program(worker)
        spared = _spared(program, memory, worker.stage)
        programs[worker] = [op for op in program if op.kind is not OpKind.RECOMPUTE or op.microbatch not in spared]
    return _timed(schedule.problem, programs)


def _spared(program: Sequence[Op], memory: Memory, stage: int) -> set[Microbatch | None]:
    """The micro-batches of one worker that need no R. Those go first whose R would come first, which is best for the
    number of them: each takes the same memory for an interval.
    """
    again = {op.microbatch: position for position, op in enumerate(program) if op.kind is OpKind.RECOMPUTE}
    forwards = {op.microbatch: position for position, op in enumerate(program) if op.kind is OpKind.FORWARD}
    room, more = memory.room(stage), memory.delta(OpKind.RECOMPUTE, stage, recomputed=True)
    held, now = [], 0.0  # in each operation; after the newest
    for op in program:
        before, now = now, now + memory.delta(op.kind, stage, op.microbatch in again)
        held.append(before + memory.needed(op.kind, stage))
    spared: set[Microbatch | None] = set()
    for microbatch, position in again.items():
        between = range(forwards[microbatch] + 1, position)  # F itself needs the same either way
        if all(held[at] + more <= room for at in between):
            spared.add(microbatch)
            for at in between:
                held[at] += more
    return spared


def _timed(problem: Problem, programs: dict[Worker, list[Op]]) -> Schedule:
    """The schedule of these programs, each operation as early as possible."""
    untimed = {worker: tuple(ScheduledOp(op, 0.0, 0.0) for op in ops) for worker, ops in programs.items()}
    return retime(Schedule(problem, untimed, 0.0), problem.costs)
