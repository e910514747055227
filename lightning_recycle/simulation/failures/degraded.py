"""Nodes that do not fail but are slow for a while, or compute wrong results without saying so.

Sources: slow computation lasts 10 minutes on average and, with slow networks, delayed 16 of 27 large jobs by 35 % on
average in a cluster of 10,000 GPUs (Greyhound: Wu et al., USENIX ATC'25; Falcon, arXiv 2410.12588). Silent corruption
interrupted Llama 3's pre-training 6 times in 54 days on 16,384 GPUs (arXiv 2407.21783, table 5), and is expected every
week or two by Gemini's (arXiv 2312.11805). Nobody says how long it goes unnoticed: ``noticed`` is an assumption.

Contract: see :class:`FailureSource`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from lightning_recycle.simulation.cluster import Cluster
from lightning_recycle.simulation.failures.source import Change, Corruption, Slowdown, changes_of
from lightning_recycle.simulation.units import Duration, as_seconds

__all__ = ["CorruptNodes", "SlowNodes"]


@dataclass(frozen=True)
class SlowNodes:
    """A Poisson process: some node of the cluster gets slow every ``mtbf`` on average, each equally likely.

    Args:
        mtbf: mean time between two of these.
        speed: part of the usual speed at which the node computes.
        length: mean time for which it does so (exponential).
    """

    mtbf: Duration = "2h"
    speed: float = 0.5
    length: Duration = "10min"

    def __post_init__(self) -> None:
        object.__setattr__(self, "mtbf", as_seconds("SlowNodes(mtbf)", self.mtbf, positive=True))
        object.__setattr__(self, "length", as_seconds("SlowNodes(length)", self.length, positive=True))
        Slowdown(0.0, (), self.speed)  # refuses impossible speeds here, not later

    def changes(self, cluster: Cluster, duration: float, seed: int) -> tuple[Change, ...]:
        """See :class:`FailureSource`."""
        random = Random(seed)
        slowdowns = []
        for time in _times(random, float(self.mtbf), duration):
            node = random.randrange(cluster.nodes)
            slowdowns.append(Slowdown(time, (node,), self.speed, time + random.expovariate(1 / float(self.length))))
        return changes_of((), duration, slowdowns)


@dataclass(frozen=True)
class CorruptNodes:
    """A Poisson process: some node begins to compute wrong results every ``mtbf`` on average, each equally likely.

    Args:
        mtbf: mean time between two of these.
        noticed: time until it is found where results are not checked; None for never.
        repair: time from then until the node is back; None for never.
    """

    mtbf: Duration = "2h"
    noticed: Duration | None = "1h"
    repair: Duration | None = "4h"

    def __post_init__(self) -> None:
        object.__setattr__(self, "mtbf", as_seconds("CorruptNodes(mtbf)", self.mtbf, positive=True))
        for name in ("noticed", "repair"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, as_seconds(f"CorruptNodes({name})", value, positive=True))

    def changes(self, cluster: Cluster, duration: float, seed: int) -> tuple[Change, ...]:
        """See :class:`FailureSource`."""
        random = Random(seed)
        noticed, repair = (None if each is None else float(each) for each in (self.noticed, self.repair))
        times = _times(random, float(self.mtbf), duration)
        found = [Corruption(time, random.randrange(cluster.nodes), noticed, repair) for time in times]
        return changes_of((), duration, corruptions=found)


def _times(random: Random, mtbf: float, duration: float) -> Iterator[float]:
    time = random.expovariate(1 / mtbf)
    while time < duration:
        yield time
        time += random.expovariate(1 / mtbf)
