"""The nodes as they are: which are down, slow or wrong, and which the policy counts on.

Concept: a failure source says what happens to nodes; repairs after wrong results and slow nodes that are left out
depend on the run. Both end up here, so that there is one answer to who is live (``live``) and one to whom the policy
has (``counted``: the live ones without those left out).

Contract: ticks; every change returns what it means for the policy.

Must not know: what a policy does about it, how time advances.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from lightning_recycle.simulation.failures import Change, Corruption
from lightning_recycle.simulation.results import Event
from lightning_recycle.simulation.units import TICKS_PER_SECOND, as_ticks

__all__ = ["Health", "Wrong"]


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
