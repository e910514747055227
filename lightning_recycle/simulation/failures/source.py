"""The interface of failure sources: a seeded stream of node failures and repairs, and of nodes that get slow or wrong.

Contract: :meth:`FailureSource.changes` returns all changes up to the end of the simulation in time order; the
same seed gives the same stream. A node that is down does not fail again. All nodes are up, as fast as usual and right
at time 0 unless a change at time 0 says otherwise.

Must not know: what the nodes do.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Protocol, runtime_checkable

from lightning_recycle.arguments import fraction
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.simulation.cluster import Cluster
from lightning_recycle.simulation.units import as_ticks

__all__ = ["Change", "Corruption", "FailureSource", "Outage", "Slowdown", "changes_of", "lifetimes"]


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
