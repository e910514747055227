"""What this package asks Ray: its nodes, which of them are about to go, and bundles of resources on them.

The one module that touches what Ray does not promise: ``GlobalState.get_draining_nodes``, which Ray Train and Ray Serve
use for the same question, and ``available_resources_per_node``. Ray is imported when the first run needs it.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_recycle.engines.ray_placement import Node
from lightning_recycle.errors import ConfigurationError

__all__ = [
    "alive_nodes",
    "connect",
    "draining_nodes",
    "import_ray",
    "node_address",
    "nodes",
    "nodes_of_bundles",
    "on_node",
    "reserve",
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


def nodes() -> list[Node]:
    """The nodes that take new workers, with what is free there."""
    state = importlib.import_module("ray._private.state")
    going = draining_nodes()
    free: Mapping[str, Mapping[str, float]] = state.available_resources_per_node()
    return [Node(name, free.get(name, {})) for name in sorted(alive_nodes()) if name not in going]


def alive_nodes() -> frozenset[str]:
    """The ids of the nodes that Ray takes for alive."""
    return frozenset(node["NodeID"] for node in import_ray().nodes() if node["Alive"])


def draining_nodes() -> frozenset[str]:
    """The ids of the nodes that are about to go: somebody called ``ray drain-node``, the autoscaler wants them back, or
    their cloud has given notice.
    """
    return frozenset(importlib.import_module("ray._private.state").state.get_draining_nodes())


def reserve(needs: Mapping[str, float], count: int, home: Sequence[str] | None) -> Any:
    """A placement group with a bundle for each of ``count`` workers, close together, which Ray provides when it can.

    Args:
        needs: what a worker needs of each resource.
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
