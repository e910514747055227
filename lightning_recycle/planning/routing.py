"""Re-routing: which live worker executes each micro-batch at each stage.

Concept: at a stage where a micro-batch's home worker is alive, it stays at home; otherwise a data-parallel peer
adopts it. Orphans are dealt like cards, in the order in which they will arrive, so that the load of two live peers
differs by at most one micro-batch and each peer's adopted work is spread over the iteration.

Contract: a pure function of grid and failures: every worker computes the same answer without talking.

Must not know: costs, time, memory (a memory- and speed-aware variant belongs to the full planner).

Source: ReCycle (arXiv 2405.14009), section 3, adaptive pipelining.
"""

from __future__ import annotations

from collections.abc import Collection

from lightning_recycle.errors import PlanningError
from lightning_recycle.planning.grid import Grid, Microbatch, Worker

__all__ = ["reroute", "reroute_stage"]


def reroute(grid: Grid, failed: Collection[Worker]) -> tuple[dict[Microbatch, Worker], ...]:
    """For each stage, the live worker that executes each of the D * M micro-batches there.

    Raises:
        PlanningError: when a stage has no live worker.
    """
    return tuple(reroute_stage(grid, stage, failed) for stage in range(grid.stages))


def reroute_stage(grid: Grid, stage: int, failed: Collection[Worker]) -> dict[Microbatch, Worker]:
    """:func:`reroute` for one stage."""
    live = [d for d in range(grid.pipelines) if Worker(d, stage) not in failed]
    if not live:
        raise PlanningError(f"stage {stage} has no live worker to route micro-batches to.")
    alive = set(live)
    route = {microbatch: Worker(microbatch.pipeline, stage) for microbatch in grid.all_microbatches()}
    orphans = [
        Microbatch(d, m) for m in range(grid.microbatches) for d in range(grid.pipelines) if d not in alive
    ]  # by index first: the order in which they arrive
    for turn, microbatch in enumerate(orphans):
        route[microbatch] = Worker(live[turn % len(live)], stage)
    return route
