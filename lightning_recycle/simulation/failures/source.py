"""The interface of failure sources: a seeded stream of node failures and repairs.

Contract: :meth:`FailureSource.changes` returns all changes up to the end of the simulation in time order; the
same seed gives the same stream. A node that is down does not fail again. All nodes are up at time 0 unless a change
at time 0 says otherwise.

Must not know: what the nodes do.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Protocol, runtime_checkable

from lightning_recycle.simulation.cluster import Cluster
from lightning_recycle.simulation.units import as_ticks

__all__ = ["Change", "FailureSource", "Outage", "changes_of", "lifetimes"]


@dataclass(frozen=True, slots=True)
class Change:
    """At ``tick`` (nanoseconds) the nodes ``down`` go and the nodes ``up`` come back, all at once."""

    tick: int
    down: tuple[int, ...] = ()
    up: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Outage:
    """``nodes`` are down from ``begin`` to ``end`` (seconds); None: for good."""

    begin: float
    nodes: tuple[int, ...]
    end: float | None = None


@runtime_checkable
class FailureSource(Protocol):
    """A source of failures."""

    def changes(self, cluster: Cluster, duration: float, seed: int) -> tuple[Change, ...]:
        """All changes of the cluster's nodes within ``duration`` seconds."""
        ...


def changes_of(outages: Iterator[Outage] | list[Outage], duration: float) -> tuple[Change, ...]:
    """The changes of outages, which may overlap: a node is up again when its last outage has ended."""
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
