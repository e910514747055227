"""Failures at a rate per GPU or per node, as operators publish them.

Sources: Llama 3 (Dubey et al., arXiv 2407.21783, section 3.3.4): 419 unplanned interruptions in 54 days on 16,384
GPUs. Meta RSC-1 (Kokolis et al., HPCA'25, arXiv 2410.21680): 6.5 failures per 1,000 node-days, nodes of 8 GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from lightning_recycle.arguments import at_least
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.simulation.cluster import Cluster
from lightning_recycle.simulation.failures.source import Change, Outage, changes_of, lifetimes
from lightning_recycle.simulation.units import Duration, as_seconds

__all__ = ["LLAMA3_PER_GPU_DAY", "RSC1_PER_GPU_DAY", "FailureRate"]

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
        if self.repair is not None:
            object.__setattr__(self, "repair", as_seconds("FailureRate(repair)", self.repair, positive=True))

    def changes(self, cluster: Cluster, duration: float, seed: int) -> tuple[Change, ...]:
        """See :class:`FailureSource`."""
        per_second = float(self.rate) * self.scale * cluster.gpus_per_node / 86400

        def draw(random: Random) -> float:
            return random.expovariate(per_second)

        repair = None if self.repair is None else float(self.repair)
        found = lifetimes(cluster.nodes, duration, repair, seed, draw)
        return changes_of([Outage(begin, (node,), end) for begin, node, end in found], duration)
