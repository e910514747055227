"""What has to be sent to go from one layout to another, and how long that takes.

Concept: a worker that is to hold layers it does not have gets each from a live worker that holds it now. Copies of
different workers run at the same time; each link carries its sends and its receives at once, so the busiest direction
of a link decides. Owners of a layer take turns, the one with the least to send so far first.

Contract: pure, deterministic; every worker computes the same answer.

Must not know: how state is copied, schedules, torch.

Units: bytes, seconds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from lightning_recycle.errors import PlanningError
from lightning_recycle.planning.fractional_cuts import held_ranges
from lightning_recycle.planning.grid import Grid, Worker

__all__ = ["LayerMove", "Traffic", "layer_moves", "traffic"]


@dataclass(frozen=True, order=True, slots=True)
class LayerMove:
    """A layer that a worker gets.

    Args:
        layer: its index.
        source: the worker that sends it, by its position before the change.
        receiver: the worker that gets it, by its position before the change.
    """

    layer: int
    source: Worker
    receiver: Worker


@dataclass(frozen=True, slots=True)
class Traffic:
    """What moves amount to.

    Args:
        total: bytes of all moves.
        busiest: the most bytes that one worker sends, or that one receives.
        copied: number of moves.
    """

    total: float = 0.0
    busiest: float = 0.0
    copied: int = 0

    def seconds(self, bandwidth: float, latency: float) -> float:
        """Until the last copy has arrived; without a known ``bandwidth`` the latency alone."""
        if not self.copied:
            return 0.0
        return latency + (self.busiest / bandwidth if bandwidth else 0.0)


def layer_moves(
    grid: Grid,
    failed: Collection[Worker],
    before: Sequence[float],
    after: Sequence[float],
    roles: Mapping[Worker, Worker] | None = None,
    state_bytes: Sequence[float] | None = None,
) -> tuple[LayerMove, ...]:
    """The copies that take all live workers from the cuts ``before`` to the cuts ``after``.

    Args:
        grid: the grid.
        failed: vacant positions before the change.
        before, after: bounds of the stages, as in :mod:`~lightning_recycle.planning.layer_costs`.
        roles: the new position of each live worker; by default all stay.
        state_bytes: bytes of each layer, by which owners share the sends; by default all are equal.

    Raises:
        PlanningError: when a layer has no live owner.
    """
    gone = set(failed)
    owners: list[list[Worker]] = [[] for _ in range(grid.stages)]
    for worker in grid.workers():
        if worker not in gone:
            owners[worker.stage].append(worker)
    had, gets = held_ranges(before), held_ranges(after)
    sent: defaultdict[Worker, float] = defaultdict(float)
    found = []
    for stage in range(grid.stages):
        for worker in owners[stage]:
            target = (roles or {}).get(worker, worker).stage
            for layer in gets[target]:
                if layer in had[stage]:
                    continue
                stages = [other for other in range(grid.stages) if layer in had[other]]
                holders = [holder for other in stages for holder in owners[other]]
                if not holders:
                    raise PlanningError(
                        f"layer {layer} has no live owner: all {grid.pipelines} replicas of stage "
                        f"{' and '.join(map(str, stages))} have failed. Restart from a checkpoint."
                    )
                source = min(holders, key=lambda holder: (sent[holder], holder))
                sent[source] += 1 if state_bytes is None else state_bytes[layer]
                found.append(LayerMove(layer, source, worker))
    return tuple(found)


def traffic(moves: Collection[LayerMove], state_bytes: Sequence[float]) -> Traffic:
    """The bytes of ``moves``, given those of each layer."""
    sent: defaultdict[Worker, float] = defaultdict(float)
    received: defaultdict[Worker, float] = defaultdict(float)
    for move in moves:
        sent[move.source] += state_bytes[move.layer]
        received[move.receiver] += state_bytes[move.layer]
    return Traffic(sum(received.values()), max(0.0, *received.values(), *sent.values()), len(moves))
