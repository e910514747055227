"""Failures that take several nodes at once: a rack, a switch, a spot market."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from lightning_recycle.arguments import fraction, whole
from lightning_recycle.simulation.cluster import Cluster
from lightning_recycle.simulation.failures.source import Change, Outage, changes_of
from lightning_recycle.simulation.units import Duration, as_seconds

__all__ = ["Correlated"]


@dataclass(frozen=True)
class Correlated:
    """A Poisson process of events; each takes one node or, with some probability, a whole group of neighbours.

    The default probability is that of the AWS p3 spot trace: half of its preemption events take several nodes.

    Args:
        mtbf: mean time between events.
        group: neighbouring nodes (numbers k * group to (k + 1) * group - 1) that can fail together.
        probability: probability that an event takes all of the group's live nodes.
        repair: time until the nodes of an event are back; None for never.
    """

    mtbf: Duration = "2h"
    group: int = 4
    probability: float = 0.5
    repair: Duration | None = "4h"

    def __post_init__(self) -> None:
        object.__setattr__(self, "mtbf", as_seconds("Correlated(mtbf)", self.mtbf, positive=True))
        whole("Correlated", "group", self.group, 1)
        fraction("Correlated", "probability", self.probability)
        if self.repair is not None:
            object.__setattr__(self, "repair", as_seconds("Correlated(repair)", self.repair, positive=True))

    def changes(self, cluster: Cluster, duration: float, seed: int) -> tuple[Change, ...]:
        """See :class:`FailureSource`."""
        random = Random(seed)
        back: dict[int, float] = {}
        outages: list[Outage] = []
        time = 0.0
        while True:
            time += random.expovariate(1.0 / float(self.mtbf))
            if time >= duration:
                return changes_of(outages, duration)
            live = [node for node in range(cluster.nodes) if back.get(node, 0.0) <= time]
            if not live:
                continue
            first = random.choice(live)
            together = random.random() < self.probability
            hit = tuple(node for node in live if node // self.group == first // self.group) if together else (first,)
            end = None if self.repair is None else time + float(self.repair)
            back |= dict.fromkeys(hit, float("inf") if end is None else end)
            outages.append(Outage(time, hit, end))
