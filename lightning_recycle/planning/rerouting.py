"""Re-routing: which live worker runs each micro-batch of a stage after failures.

Where a micro-batch's home worker is alive, it stays at home; otherwise a data-parallel peer adopts it. The numbers are
chosen so that the busiest peer finishes as early as possible: an even split, or in proportion to the speeds where they
differ, in which case a slow worker also gives some of its own away. Adopted micro-batches are dealt like cards, in the
order in which they will arrive, so that each peer's extra work and memory are spread over the iteration. (The in-flight
limit is the same for all workers of a stage, so it never makes one peer a better choice than another.) The largest
(micro-batches x factor) is as small as possible; with equal speeds, loads differ by at most one and only orphans move.

Contract: a pure, deterministic function, which every worker computes alike without communication.

Must not know: how schedules are made.

Source: ReCycle (arXiv 2405.14009), section 3, adaptive pipelining. Unequal speeds: min-max assignment of identical
jobs to uniform machines, solved exactly by the greedy rule "next job where it ends first".
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from heapq import heapify, heapreplace

from lightning_recycle.errors import PlanningError
from lightning_recycle.planning.grid import Grid, Microbatch, Worker

__all__ = ["reroute"]


def reroute(
    grid: Grid, failed: Collection[Worker], factors: Mapping[Worker, float] | None = None
) -> tuple[dict[Microbatch, Worker], ...]:
    """For each stage, the live worker that executes each of the D * M micro-batches there.

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
    workers = [Worker(d, stage) for d in range(grid.pipelines)]
    live = [d for d, worker in enumerate(workers) if worker not in failed]
    if not live:
        raise PlanningError(f"stage {stage} has no live worker to route micro-batches to.")
    route = {microbatch: workers[microbatch.pipeline] for microbatch in microbatches}
    shares = _shares(grid, {d: factors.get(workers[d], 1.0) for d in live})
    keeps = {d: min(grid.microbatches, shares[d]) for d in live}
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
    """The number of micro-batches for each pipeline's worker that minimizes the largest share x factor."""
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
