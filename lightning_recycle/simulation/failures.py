"""Failures of nodes: the interface of failure sources, replayed failures, and the state of all nodes.

Contract: :meth:`FailureSource.changes` returns all changes up to the end of the simulation in time order; the
same seed gives the same stream. A node that is down does not fail again. All nodes are up, as fast as usual and right
at time 0 unless a change at time 0 says otherwise. Repairs after wrong results and slow nodes that are left out depend
on the run: :class:`Health` has them and the source's changes, so that there is one answer to which nodes are live
(``live``) and one to which the policy has (``counted``: the live ones without those left out).

Must not know: the work of the nodes, policies, how time advances.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from lightning_recycle.arguments import at_least, fraction, whole
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.simulation.cluster import Cluster
from lightning_recycle.simulation.results import Event
from lightning_recycle.simulation.units import TICKS_PER_SECOND, Duration, as_ticks, keep_seconds
from lightning_recycle.traces import load_trace

__all__ = [
    "Change",
    "Corruption",
    "FailureSource",
    "Health",
    "Outage",
    "Scripted",
    "Slowdown",
    "TraceReplay",
    "Wrong",
    "changes_of",
]


@dataclass(frozen=True, slots=True)
class Outage:
    """``nodes`` are down from ``begin`` to ``end`` (seconds); None: for good."""

    begin: float
    nodes: tuple[int, ...]
    end: float | None = None


@dataclass(frozen=True, slots=True)
class Slowdown:
    """``nodes`` compute at ``speed`` times their usual speed from ``begin`` to ``end`` (seconds); None: for good."""

    begin: float
    nodes: tuple[int, ...]
    speed: float
    end: float | None = None

    def __post_init__(self) -> None:
        fraction("Slowdown", "speed", self.speed)
        if not self.speed:
            raise ConfigurationError("Slowdown(speed=0): a node that does nothing has failed; give an Outage.")


@dataclass(frozen=True, slots=True)
class Corruption:
    """``node`` computes wrong results from ``begin`` (seconds) until it is found.

    Args:
        begin: seconds.
        node: the node.
        noticed: seconds until it is found, where nothing is checked; None for never.
        repair: seconds from then until the node is back; None for never.
    """

    begin: float
    node: int
    noticed: float | None = None
    repair: float | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """At ``tick`` (nanoseconds), all at once.

    Args:
        tick: when.
        down: nodes that fail.
        up: nodes that come back.
        speeds: (node, speed) of nodes that are now that fast; 1 is the usual speed.
        wrong: nodes that begin to compute wrong results.
    """

    tick: int
    down: tuple[int, ...] = ()
    up: tuple[int, ...] = ()
    speeds: tuple[tuple[int, float], ...] = ()
    wrong: tuple[Corruption, ...] = ()


@runtime_checkable
class FailureSource(Protocol):
    """A source of failures."""

    def changes(self, cluster: Cluster, duration: float, seed: int) -> tuple[Change, ...]:
        """All changes of the cluster's nodes within ``duration`` seconds."""
        ...


def changes_of(
    outages: Iterable[Outage],
    duration: float,
    slowdowns: Iterable[Slowdown] = (),
    corruptions: Iterable[Corruption] = (),
) -> tuple[Change, ...]:
    """The changes of outages and the rest, which may overlap.

    A node is up again when its last outage has ended, and as slow as the worst of its slowdowns.
    """
    marks: dict[int, dict[int, int]] = {}
    for outage in outages:
        for when, step in ((outage.begin, 1), (outage.end, -1)):
            if when is not None and when < duration:
                at = marks.setdefault(as_ticks(when), {})
                for node in outage.nodes:
                    at[node] = at.get(node, 0) + step
    paces: dict[int, list[tuple[bool, Slowdown]]] = {}
    for slowdown in slowdowns:
        for when, begins in ((slowdown.begin, True), (slowdown.end, False)):
            if when is not None and when < duration:
                paces.setdefault(as_ticks(when), []).append((begins, slowdown))
    wrong: dict[int, list[Corruption]] = {}
    for corruption in corruptions:
        if corruption.begin < duration:
            wrong.setdefault(as_ticks(corruption.begin), []).append(corruption)
    broken: dict[int, int] = {}
    slow: list[Slowdown] = []
    speeds: dict[int, float] = {}
    found = []
    for tick in sorted({*marks, *paces, *wrong}):
        down: list[int] = []
        up: list[int] = []
        for node, step in sorted(marks.get(tick, {}).items()):
            before = broken.get(node, 0)
            broken[node] = before + step
            if (before == 0) != (broken[node] == 0):
                (down if before == 0 else up).append(node)
        changed: set[int] = set()
        for begins, slowdown in sorted(paces.get(tick, ()), key=lambda pace: pace[0]):
            changed.update(slowdown.nodes)
            if begins:
                slow.append(slowdown)
            else:
                slow.remove(slowdown)
        now = {node: min((each.speed for each in slow if node in each.nodes), default=1.0) for node in sorted(changed)}
        news = tuple((node, speed) for node, speed in now.items() if speed != speeds.get(node, 1.0))
        speeds |= now
        change = Change(tick, tuple(down), tuple(up), news, tuple(wrong.get(tick, ())))
        if change != Change(tick):
            found.append(change)
    return tuple(found)


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
        keep_seconds(self, "start")
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


@dataclass
class Wrong:
    """A node whose wrong results nobody has found.

    Args:
        node: the node.
        since: tick of the first wrong result that is part of the state; None while there is none.
        noticed: tick at which it is found where nothing is checked; None for never.
        repair: seconds until the node is back after that; None for never.
    """

    node: int
    since: int | None
    noticed: int | None
    repair: float | None


class Health:
    """The state of all nodes.

    Args:
        nodes: number of nodes.
    """

    def __init__(self, nodes: int) -> None:
        self._all = frozenset(range(nodes))
        self._broken: set[int] = set()
        self._repairs: list[tuple[int, int]] = []  # (tick, node) of nodes taken out for wrong results
        self._in_repair: set[int] = set()
        self._left_out: set[int] = set()
        self.speeds: dict[int, float] = {}
        """Of the slow nodes."""
        self.wrong: list[Wrong] = []
        self.live = self._all
        self.counted = self._all
        self.events: list[Event] = []

    @property
    def next_repair(self) -> int | None:
        """When the next node is back from a repair after wrong results."""
        return self._repairs[0][0] if self._repairs else None

    def apply(self, change: Change) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What the source says; returns the nodes that the policy has lost and got."""
        self._broken.difference_update(change.up)
        self._broken.update(change.down)
        for node, speed in change.speeds:
            self.speeds[node] = speed
            if speed == 1.0:
                del self.speeds[node]
            self._left_out.discard(node)
        return self._changed(change.tick)

    def begins_wrong(self, found: Corruption, tick: int, *, counts: bool) -> None:
        """A node begins to compute wrong results; ``counts``: these are part of the state at once."""
        noticed = None if found.noticed is None else tick + as_ticks(found.noticed)
        self.wrong.append(Wrong(found.node, tick if counts else None, noticed, found.repair))
        self.events.append(Event(tick / TICKS_PER_SECOND, "wrong", (found.node,)))

    def found(self, wrong: Wrong, tick: int) -> tuple[int, ...]:
        """A wrong node is found and taken out; returns the nodes that the policy has lost."""
        self.wrong.remove(wrong)
        self.events.append(Event(tick / TICKS_PER_SECOND, "found", (wrong.node,)))
        if wrong.node in self.live:
            self._in_repair.add(wrong.node)
            if wrong.repair is not None:
                heapq.heappush(self._repairs, (tick + as_ticks(wrong.repair), wrong.node))
        return self._changed(tick)[0]

    def repaired(self, tick: int) -> tuple[int, ...]:
        """Repairs that are over; returns the nodes that the policy has got."""
        while self._repairs and self._repairs[0][0] <= tick:
            self._in_repair.discard(heapq.heappop(self._repairs)[1])
        return self._changed(tick)[1]

    def leave_out(self, nodes: Iterable[int], tick: int) -> None:
        """The policy goes on without these slow nodes."""
        self._left_out.update(nodes)
        self._changed(tick)

    def undone(self, since: int) -> None:
        """The state is that of tick ``since``: later wrong results are gone."""
        for each in self.wrong:
            if each.since is not None and each.since >= since:
                each.since = None

    def resumed(self, tick: int) -> None:
        """Training goes on: wrong nodes that work are part of it."""
        self.wrong = [each for each in self.wrong if each.since is not None or each.node in self.counted]
        for each in self.wrong:
            each.since = tick if each.since is None else each.since

    def _changed(self, tick: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        live, counted = self.live, self.counted
        self.live = self._all - self._broken - self._in_repair
        self.counted = self.live - self._left_out
        for kind, nodes in (("failure", live - self.live), ("repair", self.live - live)):
            if nodes:
                self.events.append(Event(tick / TICKS_PER_SECOND, kind, tuple(sorted(nodes))))
        return tuple(sorted(counted - self.counted)), tuple(sorted(self.counted - counted))
