"""ZB-H1: the fault-free schedule with a decoupled backward, as a fixed pattern.

Concept: like 1F1B, but a weight gradient waits until its memory is needed. Stage s warms up with S - s forwards, then
alternates one backward, one forward, with a W in between once the stage holds as many micro-batches as it may; when the
forwards are done, backwards and weight gradients alternate. With S micro-batches held it takes 3M + S - 1 slots at
equal costs. At unequal costs no list schedule is as short, because a W that fills a short idle time is in the way of
the next backward.

Contract: without failures, every worker runs the micro-batches of its own pipeline in order. Internal to ``planning``:
a start for the heuristic's search.

Must not know: failures, priorities.

Source: Zero Bubble Pipeline Parallelism (Qi et al., ICLR'24, arXiv 2401.10241), section 3.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_recycle.planning.timing import BACKWARD, FORWARD, WEIGHT, Codes, interleave

__all__ = ["zero_bubble"]


def zero_bubble(codes: Codes, held: Sequence[int]) -> list[int]:
    """The operations of the schedule in an order that respects their dependencies.

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
