"""Random failures: nodes that fail, get slow or compute wrong results, drawn from a seed.

Contract: see :class:`~lightning_recycle.simulation.failures.FailureSource`.

Sources of rates: Llama 3 (Dubey et al., arXiv 2407.21783, section 3.3.4): 419 unplanned interruptions in 54 days on
16,384 GPUs. Meta RSC-1 (Kokolis et al., HPCA'25, arXiv 2410.21680): 6.5 failures per 1,000 node-days, nodes of 8 GPUs.

Sources of slow and wrong nodes: slow computation lasts 10 minutes on average and, with slow networks, delayed 16 of 27
large jobs by 35 % on average in a cluster of 10,000 GPUs (Greyhound: Wu et al., USENIX ATC'25; Falcon, arXiv
2410.12588). Silent corruption interrupted Llama 3's pre-training 6 times (table 5), and is expected every week or two
by Gemini's (arXiv 2312.11805). How long it goes unnoticed is not published: ``noticed`` is an assumption.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from lightning_recycle.arguments import at_least, fraction
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.simulation.cluster import Cluster
from lightning_recycle.simulation.failures import Change, Corruption, Outage, Slowdown, changes_of
from lightning_recycle.simulation.units import Duration, keep_seconds

__all__ = [
    "LLAMA3_PER_GPU_DAY",
    "RSC1_PER_GPU_DAY",
    "CorruptNodes",
    "FailedFraction",
    "FailureRate",
    "Poisson",
    "Regular",
    "SlowNodes",
]


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
        keep_seconds(self, "mtbf", "repair", positive=True)

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


LLAMA3_PER_GPU_DAY = 419 / (54 * 16384)
"""4.74e-4 per GPU and day: one in 50,700 GPU-hours."""
RSC1_PER_GPU_DAY = 6.5 / 1000 / 8
"""8.1e-4 per GPU and day: one in 29,500 GPU-hours."""

_RATES = {"llama3": LLAMA3_PER_GPU_DAY, "rsc1": RSC1_PER_GPU_DAY}


@dataclass(frozen=True)
class FailureRate:
    """Independent exponential lifetimes: a node with g GPUs fails at g times the rate of a GPU.

    Args:
        rate: failures per GPU and day, or "llama3" or "rsc1".
        repair: time until a failed node is back; None for never.
        scale: factor by which the rate is multiplied.
    """

    rate: float | str = "llama3"
    repair: Duration | None = "4h"
    scale: float = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.rate, str):
            if self.rate not in _RATES:
                raise ConfigurationError(
                    f"FailureRate(rate={self.rate!r}): give failures per GPU and day, or one of {', '.join(_RATES)}."
                )
            object.__setattr__(self, "rate", _RATES[self.rate])
        at_least("FailureRate", "rate", self.rate, above=True)
        at_least("FailureRate", "scale", self.scale, above=True)
        keep_seconds(self, "repair", positive=True)

    def changes(self, cluster: Cluster, duration: float, seed: int) -> tuple[Change, ...]:
        """See :class:`FailureSource`."""
        per_second = float(self.rate) * self.scale * cluster.gpus_per_node / 86400

        def draw(random: Random) -> float:
            return random.expovariate(per_second)

        repair = None if self.repair is None else float(self.repair)
        found = lifetimes(cluster.nodes, duration, repair, seed, draw)
        return changes_of([Outage(begin, (node,), end) for begin, node, end in found], duration)


def lifetimes(
    units: int, duration: float, repair: float | None, seed: int, draw: Callable[[Random], float]
) -> Iterator[tuple[float, int, float | None]]:
    """(failure time, unit, repair time) of units that fail independently, each after a random time of operation.

    Args:
        units: number of units.
        duration: time at which to stop, in seconds.
        repair: seconds until a failed unit is as good as new; None for never.
        seed: seed of the generator.
        draw: draws a time until failure, in seconds.
    """
    random = Random(seed)
    queue = [(draw(random), unit) for unit in range(units)]
    heapq.heapify(queue)
    while queue:
        time, unit = heapq.heappop(queue)
        if time >= duration:
            return
        back = None if repair is None else time + repair
        yield time, unit, back
        if back is not None:
            heapq.heappush(queue, (back + draw(random), unit))


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
        keep_seconds(self, "interval", positive=True)
        fraction("Regular", "most", self.most)
        keep_seconds(self, "repair", positive=True)

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
        keep_seconds(self, "within")

    def count(self, nodes: int) -> int:
        """Number of nodes that fail, of ``nodes``: 1 % of 32 is one node, which is 3.1 %."""
        return max(round(self.part * nodes), int(self.part > 0))

    def changes(self, cluster: Cluster, duration: float, seed: int) -> tuple[Change, ...]:
        """See :class:`FailureSource`."""
        count = self.count(cluster.nodes)
        nodes = Random(seed).sample(range(cluster.nodes), count)
        times = [float(self.within) * (number + 1) / count for number in range(count)]
        return changes_of([Outage(time, (node,)) for time, node in zip(times, nodes, strict=True)], duration)


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
        keep_seconds(self, "mtbf", "length", positive=True)
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
        keep_seconds(self, "mtbf", "noticed", "repair", positive=True)

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
