"""Weibull lifetimes: nodes that fail early (infant mortality) or late (wear)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

from lightning_recycle.arguments import at_least
from lightning_recycle.simulation.cluster import Cluster
from lightning_recycle.simulation.failures.source import Change, Outage, changes_of, lifetimes
from lightning_recycle.simulation.units import Duration, as_seconds

__all__ = ["Weibull"]


@dataclass(frozen=True)
class Weibull:
    """Nodes fail independently, each after a Weibull time; a repaired node is as good as new.

    Source: Schroeder and Gibson, "A large-scale study of failures in high-performance computing systems" (DSN'06): a
    shape of 0.7 to 0.8 fits times between failures of a node.

    Args:
        mean: mean time until a node fails.
        shape: below 1, the failure rate falls with age; at 1, lifetimes are exponential; above 1, the rate rises.
        repair: time until a failed node is back; None for never.
    """

    mean: Duration = "64h"
    shape: float = 0.7
    repair: Duration | None = "4h"

    def __post_init__(self) -> None:
        object.__setattr__(self, "mean", as_seconds("Weibull(mean)", self.mean, positive=True))
        at_least("Weibull", "shape", self.shape, above=True)
        if self.repair is not None:
            object.__setattr__(self, "repair", as_seconds("Weibull(repair)", self.repair, positive=True))

    def changes(self, cluster: Cluster, duration: float, seed: int) -> tuple[Change, ...]:
        """See :class:`FailureSource`."""
        scale = float(self.mean) / math.gamma(1 + 1 / self.shape)

        def draw(random: Random) -> float:
            return random.weibullvariate(scale, self.shape)

        repair = None if self.repair is None else float(self.repair)
        found = lifetimes(cluster.nodes, duration, repair, seed, draw)
        return changes_of([Outage(begin, (node,), end) for begin, node, end in found], duration)
