"""Failures by cause: how often each happens, what it takes with it, and how long its repair takes.

Concept: a cause strikes a node, a rack or a switch (all nodes below it at once), so that failures are correlated as the
machines are wired. It takes them out, makes them slow for a while, or makes them compute wrong results. Some nodes may
be *lemons*, which fail more often than others although all look alike.

Source: the causes and their numbers are those of Llama 3's pre-training (Dubey et al., arXiv 2407.21783, table 5: 419
unplanned interruptions in 54 days on 16,384 GPUs). That table has neither repair times nor how many nodes each cause
took: the scopes and repairs of ``LLAMA3_CAUSES`` are assumptions, four hours for what needs hands, an hour for cables
and switches, ten minutes for what a new process cures. Silent data corruption goes on for an hour until somebody
notices, which is an assumption as well; its six interruptions are those that were noticed.

Contract: see :class:`FailureSource`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random
from typing import Any, Literal

from lightning_recycle.arguments import at_least, fraction, whole
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.simulation.cluster import Cluster
from lightning_recycle.simulation.failures.source import Change, Corruption, Outage, Slowdown, changes_of
from lightning_recycle.simulation.units import Duration, as_seconds

__all__ = ["LLAMA3_CAUSES", "FailureCause", "FailureCauses"]

_GPU_DAYS = 54 * 16384


@dataclass(frozen=True)
class FailureCause:
    """One cause of failures.

    Args:
        name: in a few words.
        count: how often it struck in 54 days on 16,384 GPUs.
        scope: what it takes: "node", "rack" or "switch".
        repair: time until that is back, or as fast as before; None for never.
        effect: "down"; "slow": computes at ``speed``; "wrong": computes wrong results until that is found.
        speed: part of the usual speed, where the effect is "slow".
        noticed: time until wrong results are found where nothing checks them; None for never.
    """

    name: str
    count: float
    scope: Literal["node", "rack", "switch"] = "node"
    repair: Duration | None = "4h"
    effect: Literal["down", "slow", "wrong"] = "down"
    speed: float = 0.5
    noticed: Duration | None = "1h"

    def __post_init__(self) -> None:
        at_least("FailureCause", "count", self.count)
        if self.scope not in ("node", "rack", "switch"):
            raise ConfigurationError(f"FailureCause(scope={self.scope!r}): give 'node', 'rack' or 'switch'.")
        if self.repair is not None:
            object.__setattr__(self, "repair", as_seconds("FailureCause(repair)", self.repair, positive=True))
        if self.noticed is not None:
            object.__setattr__(self, "noticed", as_seconds("FailureCause(noticed)", self.noticed, positive=True))
        if self.effect not in ("down", "slow", "wrong"):
            raise ConfigurationError(f"FailureCause(effect={self.effect!r}): give 'down', 'slow' or 'wrong'.")
        Slowdown(0.0, (), self.speed)  # refuses impossible speeds here, not later


LLAMA3_CAUSES = (
    FailureCause("faulty GPU", 148),
    FailureCause("GPU memory (HBM3)", 72),
    FailureCause("software bug", 54, repair="10min"),
    FailureCause("network switch or cable", 35, "rack", "1h"),
    FailureCause("host maintenance", 32),
    FailureCause("GPU SRAM", 19),
    FailureCause("GPU system processor", 17),
    FailureCause("network interface", 7),
    FailureCause("NCCL watchdog timeout", 7, repair="10min"),
    FailureCause("silent data corruption", 6, effect="wrong"),
    FailureCause("GPU thermal interface or sensor", 6),
    FailureCause("SSD", 3),
    FailureCause("power supply", 3),
    FailureCause("server chassis", 2),
    FailureCause("IO expansion board", 2),
    FailureCause("dependency", 2, repair="10min"),
    FailureCause("CPU", 2),
    FailureCause("system memory", 2),
)


@dataclass(frozen=True)
class FailureCauses:
    """Independent causes, each a Poisson process at the published rate per GPU.

    Args:
        causes: FailureCause objects, or mappings with their arguments.
        scale: factor by which all rates are multiplied.
        rack: nodes below a rack's switch.
        switch: racks below the next switch.
        lemons: fraction of the nodes that fail more often, above 0 at least one; which ones depends on the seed.
        lemon_factor: how much more often. The rate of the whole cluster does not change.
    """

    causes: Sequence[FailureCause | Mapping[str, Any]] = LLAMA3_CAUSES
    scale: float = 1.0
    rack: int = 4
    switch: int = 8
    lemons: float = 0.0
    lemon_factor: float = 10.0

    def __post_init__(self) -> None:
        given = tuple(cause if isinstance(cause, FailureCause) else FailureCause(**cause) for cause in self.causes)
        object.__setattr__(self, "causes", given)
        at_least("FailureCauses", "scale", self.scale, above=True)
        whole("FailureCauses", "rack", self.rack, 1)
        whole("FailureCauses", "switch", self.switch, 1)
        fraction("FailureCauses", "lemons", self.lemons)
        at_least("FailureCauses", "lemon_factor", self.lemon_factor, 1.0)

    def changes(self, cluster: Cluster, duration: float, seed: int) -> tuple[Change, ...]:
        """See :class:`FailureSource`."""
        random = Random(seed)
        nodes = range(cluster.nodes)
        count = max(1, round(self.lemons * cluster.nodes)) if self.lemons else 0
        lemons = frozenset(random.sample(nodes, count))
        weights = list(accumulate(self.lemon_factor if node in lemons else 1.0 for node in nodes))
        strikes: list[tuple[float, int, FailureCause]] = []
        for cause in self.causes:
            assert isinstance(cause, FailureCause)
            per_second = self.scale * cause.count / _GPU_DAYS * cluster.gpus / 86400
            time = random.expovariate(per_second) if per_second else duration
            while time < duration:
                # A unit is struck as often as it has GPUs: that of a node drawn by weight.
                strikes.append((time, random.choices(nodes, cum_weights=weights)[0], cause))
                time += random.expovariate(per_second)
        back: dict[int, float] = {}
        outages: list[Outage] = []
        slowdowns: list[Slowdown] = []
        corruptions: list[Corruption] = []
        for time, first, cause in sorted(strikes, key=lambda strike: strike[:2]):
            if back.get(first, 0.0) > time:
                continue  # what is down does not fail again
            size = {"node": 1, "rack": self.rack, "switch": self.rack * self.switch}[cause.scope]
            hit = tuple(n for n in nodes if n // size == first // size and back.get(n, 0.0) <= time)
            repair = None if cause.repair is None else float(cause.repair)
            end = None if repair is None else time + repair
            if cause.effect == "slow":
                slowdowns.append(Slowdown(time, hit, cause.speed, end))
                continue
            if cause.effect == "wrong":
                noticed = None if cause.noticed is None else float(cause.noticed)
                corruptions += [Corruption(time, node, noticed, repair) for node in hit]
                continue
            back |= dict.fromkeys(hit, float("inf") if end is None else end)
            outages.append(Outage(time, hit, end))
        return changes_of(outages, duration, slowdowns, corruptions)
