"""Where the workers of a run on Ray sit: bundles of placement groups, one group for each pipeline.

A worker that is lost gets the bundle of its predecessor, which is still reserved. If the node of that is gone, or about
to go, its replacement gets a placement group of its own, so that Ray, and with it the autoscaler, sees what is wanted
one by one: wherever there is room first, there goes a worker.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_recycle.engines import ray_cluster
from lightning_recycle.engines.ray_placement import homes, stand_in
from lightning_recycle.planning.grid import Grid

__all__ = ["Seat", "Seats"]

log = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0  # between two looks at groups that are not there yet
_HOME_SECONDS = 10.0  # for Ray to reserve what was free on a node; then it may be anywhere


@dataclass(frozen=True)
class Seat:
    """The place of one worker: a bundle of a placement group."""

    group: Any
    bundle: int


@dataclass
class _Group:
    """A placement group; ``home``: the nodes that were asked for, by bundle."""

    handle: Any
    count: int
    home: Sequence[str] | None
    since: float

    def nodes(self) -> Mapping[int, str]:
        """The node of each bundle, as far as it is known."""
        return ray_cluster.nodes_of_bundles(self.handle)

    def seats(self) -> list[Seat]:
        return [Seat(self.handle, bundle) for bundle in range(self.count)]


class Seats:
    """The placement groups of a run on ``grid``, whose workers need ``needs`` of each resource."""

    def __init__(self, grid: Grid, needs: Mapping[str, float]) -> None:
        self._needs, self._stages = needs, grid.stages
        self._groups: list[_Group] = []
        found = homes(ray_cluster.nodes(), needs, grid.pipelines, grid.stages)
        for home in found:
            self._reserve(grid.stages, home)
        if None in found and len(ray_cluster.alive_nodes()) > 1:
            log.warning(
                "%d of %d pipelines have no node of their own with room for them now: Ray places these wherever it"
                " finds room, and the loss of one node may cost several replicas of a stage.",
                found.count(None),
                len(found),
            )

    def await_room(self, seconds: float) -> bool:
        """Waits until every seat is reserved; returns whether that is so after ``seconds``."""
        deadline = time.monotonic() + seconds
        while waiting := [group for group in self._groups if len(group.nodes()) < group.count]:
            if time.monotonic() > deadline:
                return False
            self.review([], [])
            ray_cluster.import_ray().wait([waiting[0].handle.ready()], timeout=_LOOK_SECONDS)
        return True

    def take(self, taken: Collection[Seat], going: Collection[str], used: Collection[str]) -> Seat:
        """A seat for a worker: one that is free, or a new one.

        Args:
            taken: the seats of the other workers.
            going: the nodes that are about to go.
            used: the nodes of the other workers.
        """
        alive = ray_cluster.alive_nodes() - frozenset(going)
        for group in self._groups:
            free = [seat for seat in group.seats() if seat not in taken]
            nodes = group.nodes() if free else {}
            for seat in free:
                name = nodes.get(seat.bundle, group.home[seat.bundle] if group.home else None)
                if name is None or name in alive:
                    return seat
        name = stand_in(ray_cluster.nodes(), self._needs, used)
        return Seat(self._reserve(1, None if name is None else [name]), 0)

    def review(self, taken: Collection[Seat], living: Collection[Seat]) -> list[Seat]:
        """Lets go of what is of no use any more; returns the seats among ``taken`` whose workers must be asked for
        again, because nobody will ever sit there.

        Args:
            taken: the seats of all workers.
            living: the seats of those that have started.
        """
        alive, lost, now = ray_cluster.alive_nodes(), list[Seat](), time.monotonic()
        for group in list(self._groups):
            seats = group.seats()
            if any(seat in living for seat in seats):
                continue
            nodes = group.nodes()
            gone = any(name not in alive for name in [*nodes.values(), *(group.home or ())])
            late = group.home is not None and not nodes and now - group.since > _HOME_SECONDS
            idle = group.count < self._stages and not any(seat in taken for seat in seats)
            if gone or late or idle:
                self._groups.remove(group)
                _remove(group)
                lost += [seat for seat in seats if seat in taken]
            if late and not gone:
                log.info("What was free on a node is not any more; workers go wherever there is room.")
                self._reserve(group.count, None)
        return lost

    def has(self, seat: Seat) -> bool:
        """Whether ``seat`` has not been let go of."""
        return any(group.handle is seat.group for group in self._groups)

    def close(self) -> None:
        """Gives everything back."""
        for group in self._groups:
            _remove(group)
        self._groups = []

    def _reserve(self, count: int, home: Sequence[str] | None) -> Any:
        handle = ray_cluster.reserve(self._needs, count, home)
        self._groups.append(_Group(handle, count, home, time.monotonic()))
        return handle


def _remove(group: _Group) -> None:
    ray_cluster.import_ray().util.remove_placement_group(group.handle)
