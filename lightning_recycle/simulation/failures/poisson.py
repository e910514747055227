"""Failures of the whole cluster with a mean time between failures."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from lightning_recycle.simulation.cluster import Cluster
from lightning_recycle.simulation.failures.source import Change, Outage, changes_of
from lightning_recycle.simulation.units import Duration, as_seconds

__all__ = ["Poisson"]


@dataclass(frozen=True)
class Poisson:
    """A Poisson process: some node of the cluster fails every ``mtbf`` on average, each live one equally likely.

    As in the paper's experiments, the rate is that of the cluster: it does not fall while nodes are down.

    Args:
        mtbf: mean time between failures.
        repair: time until a failed node is back; None for never.
    """

    mtbf: Duration = "2h"
    repair: Duration | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "mtbf", as_seconds("Poisson(mtbf)", self.mtbf, positive=True))
        if self.repair is not None:
            object.__setattr__(self, "repair", as_seconds("Poisson(repair)", self.repair, positive=True))

    def changes(self, cluster: Cluster, duration: float, seed: int) -> tuple[Change, ...]:
        """See :class:`FailureSource`."""
        random = Random(seed)
        repair = None if self.repair is None else float(self.repair)
        back: dict[int, float] = {}  # down nodes, with the time of their return
        outages: list[Outage] = []
        time = 0.0
        while True:
            time += random.expovariate(1.0 / float(self.mtbf))
            if time >= duration:
                return changes_of(outages, duration)
            live = [node for node in range(cluster.nodes) if back.get(node, 0.0) <= time]
            if live:
                node = random.choice(live)
                back[node] = float("inf") if repair is None else time + repair
                outages.append(Outage(time, (node,), None if repair is None else time + repair))
