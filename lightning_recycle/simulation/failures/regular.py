"""Failures at fixed intervals, as in controlled experiments."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from lightning_recycle.arguments import fraction
from lightning_recycle.simulation.cluster import Cluster
from lightning_recycle.simulation.failures.source import Change, Outage, changes_of
from lightning_recycle.simulation.units import Duration, as_seconds

__all__ = ["Regular"]


@dataclass(frozen=True)
class Regular:
    """Every ``interval``, one node fails, drawn from the live ones.

    Source: the public traces of Oobleck's evaluation (``6h.csv`` to ``10m.csv``) are of this kind: 30 nodes, one
    removed after each interval, 15 in total, none of which comes back.

    Args:
        interval: time between two failures; the first comes after one interval.
        most: largest fraction of the nodes that fail.
        repair: time until a failed node is back; None for never.
    """

    interval: Duration = "2h"
    most: float = 0.5
    repair: Duration | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "interval", as_seconds("Regular(interval)", self.interval, positive=True))
        fraction("Regular", "most", self.most)
        if self.repair is not None:
            object.__setattr__(self, "repair", as_seconds("Regular(repair)", self.repair, positive=True))

    def changes(self, cluster: Cluster, duration: float, seed: int) -> tuple[Change, ...]:
        """See :class:`FailureSource`."""
        random = Random(seed)
        interval = float(self.interval)
        back: dict[int, float] = {}
        outages = []
        number = 1
        while number * interval < duration:
            time = number * interval
            live = [node for node in range(cluster.nodes) if back.get(node, 0.0) <= time]
            if cluster.nodes - len(live) < int(self.most * cluster.nodes):
                node = random.choice(live)
                end = None if self.repair is None else time + float(self.repair)
                back[node] = float("inf") if end is None else end
                outages.append(Outage(time, (node,), end))
            number += 1
        return changes_of(outages, duration)
