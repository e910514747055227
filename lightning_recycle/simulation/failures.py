"""Failures of nodes, drawn, replayed or given; and durations such as "30min".

:meth:`FailureSource.changes` returns all changes in time order, the same for the same seed. A node that is down does
not fail again. All nodes are up at time 0 unless a change at time 0 says otherwise. Inside the simulator, time is a
whole number of nanoseconds (*ticks*), so sums are exact.

Rates: Llama 3 (arXiv 2407.21783, section 3.3.4), 419 unplanned interruptions in 54 days on 16,384 GPUs; Meta RSC-1
(arXiv 2410.21680), 6.5 failures per 1,000 node-days, nodes of 8 GPUs.
"""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate, count, takewhile
from random import Random
from typing import Protocol, runtime_checkable

from lightning_recycle.arguments import at_least, fraction, is_number, whole
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.simulation.training_model import Cluster
from lightning_recycle.traces import load_trace

Duration = float | int | str
"""Seconds, or a number with a unit: ms, s, min, h, d."""

TICKS_PER_SECOND = 1_000_000_000

_UNITS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_PATTERN = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def as_seconds(name: str, value: Duration, *, positive: bool = False, owner: str = "") -> float:
    """``value`` in seconds.

    Args:
        name: name of the setting, for the error; ``owner``: class or function that has it.
        value: seconds, or text such as ``"30min"``.
        positive: whether 0 is refused.

    Raises:
        ConfigurationError: when it is not a duration, negative or not finite.
    """
    seconds = math.nan
    if isinstance(value, str):
        match = _PATTERN.fullmatch(value)
        if match and match[2].lower() in _UNITS:
            seconds = float(match[1]) * _UNITS[match[2].lower()]
    elif is_number(value):
        seconds = float(value)
    if not math.isfinite(seconds) or seconds < 0 or (positive and seconds == 0):
        least = "above 0" if positive else "of at least 0"
        raise ConfigurationError.for_option(owner, name, value, f"give a duration {least}, e.g. 90, '30min' or '6h'")
    return seconds


def keep_seconds(settings: object, *names: str, positive: bool = False) -> None:
    """Replaces the durations ``names`` of a frozen dataclass by seconds.

    None stays None where the field allows it. Raises ConfigurationError as :func:`as_seconds`.
    """
    optional = {field.name for field in fields(settings) if "None" in str(field.type)}  # type: ignore[arg-type]
    for name in names:
        value = getattr(settings, name)
        if value is not None or name not in optional:
            seconds = as_seconds(name, value, positive=positive, owner=type(settings).__name__)
            object.__setattr__(settings, name, seconds)


def as_ticks(seconds: float) -> int:
    """Seconds in whole nanoseconds, rounded."""
    return round(seconds * TICKS_PER_SECOND)


@dataclass(frozen=True, slots=True)
class Outage:
    """``nodes`` are down from ``begin`` to ``end`` (seconds); None: for good."""

    begin: float
    nodes: tuple[int, ...]
    end: float | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """Nodes that fail and come back at ``tick`` (nanoseconds), all at once."""

    tick: int
    down: tuple[int, ...] = ()
    up: tuple[int, ...] = ()


@runtime_checkable
class FailureSource(Protocol):
    """A source of failures."""

    def changes(self, cluster: Cluster, duration: float, seed: int) -> tuple[Change, ...]:
        """All changes of the cluster's nodes within ``duration`` seconds."""
        ...


def changes_of(outages: Iterable[Outage], duration: float) -> tuple[Change, ...]:
    """The changes of outages, which may overlap: a node is up after its last outage."""
    marks: dict[int, dict[int, int]] = {}
    for outage in outages:
        for when, step in ((outage.begin, 1), (outage.end, -1)):
            if when is not None and when < duration:
                at = marks.setdefault(as_ticks(when), {})
                for node in outage.nodes:
                    at[node] = at.get(node, 0) + step
    broken: dict[int, int] = {}
    found = []
    for tick in sorted(marks):
        down: list[int] = []
        up: list[int] = []
        for node, step in sorted(marks[tick].items()):
            before = broken.get(node, 0)
            broken[node] = before + step
            if (before == 0) != (broken[node] == 0):
                (down if before == 0 else up).append(node)
        if down or up:
            found.append(Change(tick, tuple(down), tuple(up)))
    return tuple(found)


@dataclass(frozen=True)
class TraceReplay:
    """Nodes come and go as in a trace.

    Trace node i stands for the cluster nodes from i * (cluster nodes) / (trace's peak), rounded down, to that of node
    i + 1: the cluster is full when the trace is at its peak, and one departure may take several nodes.

    Args:
        trace: a name from ``lightning_recycle.traces.available_traces()``, or the path of a file in the same formats.
        start: time of the trace at which the simulation begins.
    """

    trace: str = "aws-p3"
    start: Duration = 0.0

    def __post_init__(self) -> None:
        load_trace(self.trace, type(self).__name__)  # refuses unknown names here, not later
        keep_seconds(self, "start")

    def changes(self, cluster: Cluster, duration: float, seed: int) -> tuple[Change, ...]:
        trace = load_trace(self.trace)
        start, peak = float(self.start), trace.peak
        down_since: dict[int, float] = dict.fromkeys(range(peak), 0.0)
        outages = []

        def outage(place: int, begin: float, end: float | None) -> None:
            first, last = place * cluster.nodes // peak, (place + 1) * cluster.nodes // peak
            if first < last and (end is None or end > begin):
                outages.append(Outage(begin, tuple(range(first, last)), end))

        for event in trace.events:
            time = max(0.0, event.time - start)
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
    """

    outages: Sequence[Outage] = field(default=())

    def __post_init__(self) -> None:
        given = tuple(
            outage if isinstance(outage, Outage) else Outage(outage[0], tuple(outage[1]), outage[2])
            for outage in self.outages
        )
        object.__setattr__(self, "outages", given)

    def changes(self, cluster: Cluster, duration: float, seed: int) -> tuple[Change, ...]:
        for node in (node for outage in self.outages for node in outage.nodes):
            if whole("Scripted", "node", node) >= cluster.nodes:
                raise ConfigurationError(f"Scripted: there is no node {node} in a cluster of {cluster.nodes}.")
        return changes_of(self.outages, duration)


def _one_by_one(
    times: Iterable[float], random: Random, cluster: Cluster, duration: float, repair: float, most: int
) -> tuple[Change, ...]:
    """At each of ``times`` a live node fails, while fewer than ``most`` are down."""
    back: dict[int, float] = {}  # down nodes, with the time of their return
    outages: list[Outage] = []
    for time in takewhile(lambda time: time < duration, times):
        live = [node for node in range(cluster.nodes) if back.get(node, 0.0) <= time]
        if cluster.nodes - len(live) < most:
            node = random.choice(live)
            back[node] = time + repair
            outages.append(Outage(time, (node,), back[node]))
    return changes_of(outages, duration)


def _seconds_to_return(repair: Duration | None) -> float:
    return math.inf if repair is None else float(repair)


@dataclass(frozen=True)
class Poisson:
    """A Poisson process: some node of the cluster fails every ``mtbf`` on average.

    Each live node is equally likely. As in the paper's experiments, the rate is that of the cluster: it does not fall
    while nodes are down.

    Args:
        mtbf: mean time between failures.
        repair: time until a failed node is back; None for never.
    """

    mtbf: Duration = "2h"
    repair: Duration | None = None

    def __post_init__(self) -> None:
        keep_seconds(self, "mtbf", "repair", positive=True)

    def changes(self, cluster: Cluster, duration: float, seed: int) -> tuple[Change, ...]:
        random = Random(seed)
        times = accumulate(random.expovariate(1.0 / float(self.mtbf)) for _ in count())
        return _one_by_one(times, random, cluster, duration, _seconds_to_return(self.repair), cluster.nodes)


LLAMA3_PER_GPU_DAY = 419 / (54 * 16384)
"""4.74e-4 per GPU and day: one in 50,700 GPU-hours."""
RSC1_PER_GPU_DAY = 6.5 / 1000 / 8
"""8.1e-4 per GPU and day: one in 29,500 GPU-hours."""

_RATES = {"llama3": LLAMA3_PER_GPU_DAY, "rsc1": RSC1_PER_GPU_DAY}


@dataclass(frozen=True)
class FailureRate:
    """Independent exponential lifetimes: g GPUs fail at g times the rate of a GPU.

    Args:
        rate: failures per GPU and day, or "llama3" or "rsc1".
        repair: time until a failed node is back; None for never.
    """

    rate: float | str = "llama3"
    repair: Duration | None = "4h"

    def __post_init__(self) -> None:
        if isinstance(self.rate, str):
            if self.rate not in _RATES:
                remedy = f"give failures per GPU and day, or one of {', '.join(_RATES)}"
                raise ConfigurationError.for_option("FailureRate", "rate", self.rate, remedy, _RATES)
            object.__setattr__(self, "rate", _RATES[self.rate])
        at_least("FailureRate", "rate", self.rate, above=True)
        keep_seconds(self, "repair", positive=True)

    def changes(self, cluster: Cluster, duration: float, seed: int) -> tuple[Change, ...]:
        per_second = float(self.rate) * cluster.gpus_per_node / 86400
        repair, random = _seconds_to_return(self.repair), Random(seed)
        queue = [(random.expovariate(per_second), node) for node in range(cluster.nodes)]  # next failures
        heapq.heapify(queue)
        outages: list[Outage] = []
        while queue and queue[0][0] < duration:
            time, node = heapq.heappop(queue)
            outages.append(Outage(time, (node,), time + repair))
            if repair < math.inf:
                heapq.heappush(queue, (time + repair + random.expovariate(per_second), node))
        return changes_of(outages, duration)


@dataclass(frozen=True)
class Regular:
    """Every ``interval`` a node fails, until half of them are down; none comes back.

    Nodes are drawn from the live ones. The public traces of Oobleck's evaluation (``6h.csv`` to ``10m.csv``) are of
    this kind: 30 nodes, one removed after each interval, 15 in total.

    Args:
        interval: time between two failures; the first comes after one interval.
    """

    interval: Duration = "2h"

    def __post_init__(self) -> None:
        keep_seconds(self, "interval", positive=True)

    def changes(self, cluster: Cluster, duration: float, seed: int) -> tuple[Change, ...]:
        times = map(float(self.interval).__mul__, count(1))
        return _one_by_one(times, Random(seed), cluster, duration, math.inf, cluster.nodes // 2)


@dataclass(frozen=True)
class FailedFraction:
    """``part`` of the nodes fail at the very beginning and stay down.

    Args:
        part: fraction of the nodes, e.g. 0.01, 0.05, 0.1; rounded to whole nodes, at least one where it is above 0.
    """

    part: float = 0.05

    def __post_init__(self) -> None:
        fraction("FailedFraction", "part", self.part)

    def count(self, nodes: int) -> int:
        """Number of nodes that fail, of ``nodes``: 1 % of 32 is one node, which is 3.1 %."""
        return max(round(self.part * nodes), int(self.part > 0))

    def changes(self, cluster: Cluster, duration: float, seed: int) -> tuple[Change, ...]:
        nodes = Random(seed).sample(range(cluster.nodes), self.count(cluster.nodes))
        return changes_of([Outage(0.0, tuple(nodes))] if nodes else [], duration)
