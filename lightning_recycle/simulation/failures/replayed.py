"""Failures as they happened: availability traces of public clouds, and changes given one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_recycle.arguments import at_least, whole
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.simulation.cluster import Cluster
from lightning_recycle.simulation.failures.source import Change, Corruption, Outage, Slowdown, changes_of
from lightning_recycle.simulation.units import Duration, as_seconds
from lightning_recycle.traces import load_trace

__all__ = ["Scripted", "TraceReplay"]


@dataclass(frozen=True)
class TraceReplay:
    """Nodes come and go as in a trace.

    Trace node i stands for the cluster nodes from i * (cluster nodes) / (trace's peak), rounded down, to that of node
    i + 1: the cluster is full when the trace is at its peak, and one departure may take several nodes.

    Args:
        trace: a name from ``lightning_recycle.traces.available_traces()``, or the path of a file in the same formats.
        start: time of the trace at which the simulation begins.
        speed: seconds of the trace per simulated second.
    """

    trace: str = "aws-p3"
    start: Duration = 0.0
    speed: float = 1.0

    def __post_init__(self) -> None:
        load_trace(self.trace)  # refuses unknown names here, not later
        object.__setattr__(self, "start", as_seconds("TraceReplay(start)", self.start))
        at_least("TraceReplay", "speed", self.speed, above=True)

    def changes(self, cluster: Cluster, duration: float, seed: int) -> tuple[Change, ...]:
        """See :class:`FailureSource`; nothing is random."""
        trace = load_trace(self.trace)
        start, peak = float(self.start), trace.peak
        down_since: dict[int, float] = dict.fromkeys(range(peak), 0.0)
        outages = []

        def outage(place: int, begin: float, end: float | None) -> None:
            first, last = place * cluster.nodes // peak, (place + 1) * cluster.nodes // peak
            if first < last and (end is None or end > begin):
                outages.append(Outage(begin, tuple(range(first, last)), end))

        for event in trace.events:
            time = max(0.0, (event.time - start) / self.speed)
            if event.up:
                outage(event.node, down_since.pop(event.node), time)
            else:
                down_since[event.node] = time
        for place, since in down_since.items():
            outage(place, since, None)
        return changes_of(outages, duration)


@dataclass(frozen=True)
class Scripted:
    """Outages given one by one, for tests and for questions about a known incident.

    Args:
        outages: Outage objects, or (begin, nodes, end) with times in seconds and None for an outage without end.
        slowdowns: Slowdown objects, or (begin, nodes, speed, end).
        corruptions: Corruption objects, or (begin, node, noticed, repair).
    """

    outages: Sequence[Outage] = field(default=())
    slowdowns: Sequence[Slowdown] = field(default=())
    corruptions: Sequence[Corruption] = field(default=())

    def __post_init__(self) -> None:
        given = tuple(
            outage if isinstance(outage, Outage) else Outage(outage[0], tuple(outage[1]), outage[2])
            for outage in self.outages
        )
        slow = tuple(
            each if isinstance(each, Slowdown) else Slowdown(each[0], tuple(each[1]), each[2], each[3])
            for each in self.slowdowns
        )
        wrong = tuple(each if isinstance(each, Corruption) else Corruption(*each) for each in self.corruptions)
        for name, value in (("outages", given), ("slowdowns", slow), ("corruptions", wrong)):
            object.__setattr__(self, name, value)

    def changes(self, cluster: Cluster, duration: float, seed: int) -> tuple[Change, ...]:
        """See :class:`FailureSource`."""
        named = [node for outage in self.outages for node in outage.nodes]
        named += [node for slowdown in self.slowdowns for node in slowdown.nodes]
        for node in (*named, *(corruption.node for corruption in self.corruptions)):
            if whole("Scripted", "node", node) >= cluster.nodes:
                raise ConfigurationError(f"Scripted: there is no node {node} in a cluster of {cluster.nodes}.")
        return changes_of(self.outages, duration, self.slowdowns, self.corruptions)
