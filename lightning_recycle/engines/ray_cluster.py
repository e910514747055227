"""Ray's nodes, which of them are about to go, and the placement groups in which the workers of a run sit.

A worker that is lost gets the bundle of its predecessor, which is still reserved. If the node of that is gone, or about
to go, its replacement gets a placement group of its own, so that Ray, and with it the autoscaler, sees single requests:
wherever there is room first, there goes a worker.

The one module that touches what Ray does not promise: ``GlobalState.get_draining_nodes``, which Ray Train and Ray Serve
use for the same question, and ``available_resources_per_node``. Ray is imported when the first run needs it.
"""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_recycle.engines.ray_placement import Node, homes, stand_in
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.planning.grid import Grid

__all__ = [
    "Seat",
    "Seats",
    "alive_nodes",
    "connect",
    "draining_nodes",
    "import_ray",
    "node_address",
    "nodes_of_bundles",
    "on_node",
    "reserve",
    "schedulable_nodes",
    "start_actor",
    "within",
]

log = logging.getLogger(__name__)

_NODE_LABEL = "ray.io/node-id"  # which Ray gives each node


def import_ray() -> Any:
    """The package ``ray``.

    Raises:
        ConfigurationError: if it is not installed.
    """
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ConfigurationError(
            "Ray is not installed here: pip install 'lightning-recycle[ray]', on every node."
        ) from error


def connect() -> Any:
    """The package ``ray``, connected to a cluster: the one that it is connected to, or that RAY_ADDRESS names, or one
    of this machine.

    Raises:
        ConfigurationError: if it is not installed, or is connected as a client, from outside of the cluster.
    """
    ray = import_ray()
    if not ray.is_initialized():
        ray.init()
    if ray.util.client.ray.is_connected():
        raise ConfigurationError(
            "This process is connected to Ray as a client (ray://...), and a run lives as long as its connection does:"
            " submit the script to the cluster instead (ray job submit -- python script.py)."
        )
    return ray


def schedulable_nodes() -> list[Node]:
    """The nodes that take new workers, with their free resources."""
    state = importlib.import_module("ray._private.state")
    going = draining_nodes()
    free: Mapping[str, Mapping[str, float]] = state.available_resources_per_node()
    return [Node(name, free.get(name, {})) for name in sorted(alive_nodes()) if name not in going]


def alive_nodes() -> frozenset[str]:
    """The ids of the nodes that Ray takes for alive."""
    return frozenset(node["NodeID"] for node in import_ray().nodes() if node["Alive"])


def draining_nodes() -> frozenset[str]:
    """The ids of the nodes that are about to go: a user called ``ray drain-node``, the autoscaler wants them back, or
    their cloud has given notice.
    """
    return frozenset(importlib.import_module("ray._private.state").state.get_draining_nodes())


def reserve(needs: Mapping[str, float], count: int, home: Sequence[str] | None) -> Any:
    """A placement group with a bundle for each of ``count`` workers, close together, which Ray provides when it can.

    Args:
        needs: the amount of each resource that a worker needs.
        count: how many bundles.
        home: the node of each bundle; by default Ray chooses, and sees to it that more nodes come if it can.
    """
    selectors = None if home is None else [{_NODE_LABEL: name} for name in home]
    group = import_ray().util.placement_group
    return group([dict(needs)] * count, strategy="PACK", bundle_label_selector=selectors)


def nodes_of_bundles(group: Any) -> dict[int, str]:
    """The node of each bundle of ``group`` that has one."""
    placement_group_table = importlib.import_module("ray.util.placement_group").placement_group_table
    found: Mapping[int, str] = placement_group_table(group).get("bundles_to_node_id", {})
    return {bundle: name for bundle, name in found.items() if name}


def within(group: Any, bundle: int) -> Any:
    """The scheduling strategy of an actor that lives in a bundle of a placement group."""
    strategies = importlib.import_module("ray.util.scheduling_strategies")
    return strategies.PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)


def start_actor(kind: type[Any], name: str, needs: Mapping[str, float], group: Any, bundle: int) -> Any:
    """An actor of the class ``kind`` that lives once, with ``needs`` of each resource, in a bundle of a group."""
    amounts = dict(needs)
    remote = import_ray().remote(kind)
    options = remote.options(
        num_cpus=amounts.pop("CPU", 0),
        num_gpus=amounts.pop("GPU", 0),
        memory=amounts.pop("memory", None),
        resources=amounts,
        max_restarts=0,
        name=name,
        scheduling_strategy=within(group, bundle),
    )
    return options.remote()


def on_node(name: str) -> Any:
    """The scheduling strategy of an actor that lives on one node."""
    strategies = importlib.import_module("ray.util.scheduling_strategies")
    return strategies.NodeAffinitySchedulingStrategy(name, soft=False)


def node_address() -> str:
    """The address at which other nodes reach this one."""
    address: str = import_ray().util.get_node_ip_address()
    return address


# ---------------------------------------------------------------------- seats of workers


_LOOK_SECONDS = 1.0  # between two looks at groups that are not there yet
_HOME_SECONDS = 10.0  # for Ray to reserve a free node; then workers may be anywhere


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
        return nodes_of_bundles(self.handle)

    def seats(self) -> list[Seat]:
        return [Seat(self.handle, bundle) for bundle in range(self.count)]


class Seats:
    """The placement groups of a run on ``grid``, whose workers need ``needs`` of each resource."""

    def __init__(self, grid: Grid, needs: Mapping[str, float]) -> None:
        self._needs, self._stages = needs, grid.stages
        self._groups: list[_Group] = []
        found = homes(schedulable_nodes(), needs, grid.pipelines, grid.stages)
        for home in found:
            self._reserve(grid.stages, home)
        if None in found and len(alive_nodes()) > 1:
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
            import_ray().wait([waiting[0].handle.ready()], timeout=_LOOK_SECONDS)
        return True

    def take(self, taken: Collection[Seat], going: Collection[str], used: Collection[str]) -> Seat:
        """A seat for a worker: one that is free, or a new one.

        Args:
            taken: the seats of the other workers.
            going: the nodes that are about to go.
            used: the nodes of the other workers.
        """
        alive = alive_nodes() - frozenset(going)
        for group in self._groups:
            free = [seat for seat in group.seats() if seat not in taken]
            nodes = group.nodes() if free else {}
            for seat in free:
                name = nodes.get(seat.bundle, group.home[seat.bundle] if group.home else None)
                if name is None or name in alive:
                    return seat
        name = stand_in(schedulable_nodes(), self._needs, used)
        return Seat(self._reserve(1, None if name is None else [name]), 0)

    def review(self, taken: Collection[Seat], living: Collection[Seat]) -> list[Seat]:
        """Lets go of what is of no use any more; returns the seats among ``taken`` whose workers must be asked for
        again, because no worker will ever sit there.

        Args:
            taken: the seats of all workers.
            living: the seats of those that have started.
        """
        alive, lost, now = alive_nodes(), list[Seat](), time.monotonic()
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
        handle = reserve(self._needs, count, home)
        self._groups.append(_Group(handle, count, home, time.monotonic()))
        return handle


def _remove(group: _Group) -> None:
    import_ray().util.remove_placement_group(group.handle)
