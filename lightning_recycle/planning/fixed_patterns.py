"""1F1B and ZB-H1: the fault-free schedules as fixed patterns.

Concept: in 1F1B stage s first runs S - s forwards, then alternates one backward, one forward, and drains; at most S - s
micro-batches are in flight on a worker, however many there are in an iteration. ZB-H1 is the same with a decoupled
backward, in which a weight gradient waits until its memory is needed: there is a W between backward and forward once
the stage holds as many micro-batches as it may, and when the forwards are done, backwards and weight gradients
alternate. With S micro-batches held it takes 3M + S - 1 slots at equal costs. At unequal costs no list schedule is as
short, because a W that fills a short idle time is in the way of the next backward.

Contract: without failures, every worker runs the micro-batches of its own pipeline in order. No stage warms up further
than the one before it, which would deadlock.

Must not know: failures, priorities.

Source: PipeDream-Flush (Narayanan et al., ICML'21, arXiv 2006.09503); Zero Bubble Pipeline Parallelism (Qi et al.,
ICLR'24, arXiv 2401.10241), section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_recycle.errors import PlanningError
from lightning_recycle.planning.problem import Problem
from lightning_recycle.planning.routing import reroute
from lightning_recycle.planning.schedule import Schedule
from lightning_recycle.planning.timing import BACKWARD, FORWARD, WEIGHT, Codes, assemble, best_timing, interleave

__all__ = ["one_f_one_b", "zero_bubble"]


def one_f_one_b(problem: Problem) -> Schedule:
    """The 1F1B schedule of a problem without failures; its technique has ``decoupled=False``.

    Where memory holds fewer than S - s the warm-up is shortened.

    Raises:
        PlanningError: when a worker has failed.
    """
    if problem.failed:
        failed = ", ".join(map(str, sorted(problem.failed)))
        raise PlanningError(f"1F1B cannot handle failures, but {failed} failed: use the planner 'heuristic'.")
    problem = replace(problem, technique=replace(problem.technique, decoupled=False))
    grid = problem.grid
    codes = Codes(problem, reroute(grid, ()), fused=True)
    programs: dict[int, list[int]] = {}
    limit = problem.counted().in_flight_limit
    warmup = grid.microbatches
    for stage in range(grid.stages):
        warmup = min(warmup, grid.stages - stage)
        if limit is not None:
            warmup = min(warmup, limit[stage])
        for pipeline in range(grid.pipelines):
            first = pipeline * grid.microbatches
            forwards = [codes.code(FORWARD, stage, first + m) for m in range(grid.microbatches)]
            backwards = [codes.code(BACKWARD, stage, first + m) for m in range(grid.microbatches)]
            program = forwards[:warmup]
            for m, backward in enumerate(backwards):
                program.append(backward)
                program += forwards[warmup + m : warmup + m + 1]
            programs[pipeline * grid.stages + stage] = program
    sequence = interleave(codes, programs)
    return assemble(codes, sequence, best_timing(codes, sequence))


def zero_bubble(codes: Codes, held: Sequence[int]) -> list[int]:
    """The operations of ZB-H1 in an order that respects their dependencies.

    Args:
        codes: the operations of a decoupled problem without failures.
        held: the most micro-batches a worker holds, per stage.
    """
    grid = codes.problem.grid
    programs: dict[int, list[int]] = {}
    most = grid.microbatches
    for stage in range(grid.stages):
        most = min(most, grid.stages - stage, held[stage])  # no further than the stage before, which would deadlock
        order = _pattern(grid.microbatches, most, held[stage])
        for pipeline in range(grid.pipelines):
            first = pipeline * grid.microbatches
            programs[pipeline * grid.stages + stage] = [codes.code(kind, stage, first + m) for kind, m in order]
    return interleave(codes, programs)


def _pattern(microbatches: int, warmup: int, held: int) -> list[tuple[int, int]]:
    """(kind, micro-batch) in the order of one stage."""
    order = [(FORWARD, m) for m in range(warmup)]
    forwards, weights = warmup, 0
    for m in range(microbatches):
        order.append((BACKWARD, m))
        if weights <= m and (forwards - weights == held or forwards == microbatches):
            order.append((WEIGHT, weights))
            weights += 1
        if forwards < microbatches:
            order.append((FORWARD, forwards))
            forwards += 1
    order += [(WEIGHT, m) for m in range(weights, microbatches)]
    return order
