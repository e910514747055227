"""1F1B: the fault-free baseline with fused backward and bounded memory.

Concept: stage s first runs S - s forwards, then alternates one backward, one forward, and drains. At most S - s
micro-batches are in flight on a worker, however many there are in an iteration.

Contract: for problems without failures. The result's technique has ``decoupled=False``, since that is what was
planned.

Must not know: failures, priorities.

Source: PipeDream-Flush (Narayanan et al., ICML'21, arXiv 2006.09503).
"""

from __future__ import annotations

from dataclasses import replace

from lightning_recycle.errors import PlanningError
from lightning_recycle.planning.problem import Problem
from lightning_recycle.planning.routing import reroute
from lightning_recycle.planning.schedule import Schedule
from lightning_recycle.planning.timing import BACKWARD, FORWARD, Codes, assemble, best_timing, interleave

__all__ = ["one_f_one_b"]


def one_f_one_b(problem: Problem) -> Schedule:
    """The 1F1B schedule of a problem without failures.

    Where memory holds fewer than S - s the warm-up is shortened. No stage warms up further than the one
    before it, which would deadlock.

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
