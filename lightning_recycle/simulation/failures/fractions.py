"""A fixed fraction of the nodes has failed: throughput at 1, 5 or 10 % failures."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from lightning_recycle.arguments import fraction
from lightning_recycle.simulation.cluster import Cluster
from lightning_recycle.simulation.failures.source import Change, Outage, changes_of
from lightning_recycle.simulation.units import Duration, as_seconds

__all__ = ["FailedFraction"]


@dataclass(frozen=True)
class FailedFraction:
    """Nodes fail one by one, evenly spaced, until ``part`` of them are gone; none comes back.

    Args:
        part: fraction of the nodes, e.g. 0.01, 0.05, 0.1; rounded to whole nodes, at least one where it is above 0.
        within: time by which all have failed; with 0, all fail at the very beginning, so the run's throughput is that
            of the failed fraction.
    """

    part: float = 0.05
    within: Duration = 0.0

    def __post_init__(self) -> None:
        fraction("FailedFraction", "part", self.part)
        object.__setattr__(self, "within", as_seconds("FailedFraction(within)", self.within))

    def count(self, nodes: int) -> int:
        """Number of nodes that fail, of ``nodes``: 1 % of 32 is one node, which is 3.1 %."""
        return max(round(self.part * nodes), int(self.part > 0))

    def changes(self, cluster: Cluster, duration: float, seed: int) -> tuple[Change, ...]:
        """See :class:`FailureSource`."""
        count = self.count(cluster.nodes)
        nodes = Random(seed).sample(range(cluster.nodes), count)
        times = [float(self.within) * (number + 1) / count for number in range(count)]
        return changes_of([Outage(time, (node,)) for time, node in zip(times, nodes, strict=True)], duration)
