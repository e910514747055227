"""Ray's nodes: those that take workers, and the placement of a grid's workers.

The loss of one node costs at most one replica of each stage. A pipeline gets a node of its own where one has room for
all of its positions, else several nodes without other pipelines, else any room. A replacement goes to the node of its
predecessor, unless that is gone or about to go; then to an unused one, else wherever Ray has room. The members of a
position go to the same node.

The one module that touches Ray's private state. Ray is imported when the first run needs it.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_recycle.arguments import install_command, is_number
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.option_table import Check, OptionGroup, option, suggests_options

_AMOUNTS = Check(
    lambda value: all(is_number(amount, 0.0) for amount in (value or {}).values()),
    "give a number of at least 0 for each resource",
)


@suggests_options
@dataclass(frozen=True)
class RayEngine(OptionGroup):
    """Workers as actors of Ray: ``ReCycleStrategy(engine=RayEngine(...))``.

    Args:
        resources_per_worker: what Ray reserves for a worker, by the name of the resource; by default one CPU, and one
            GPU unless the Trainer's accelerator is the CPU.

    Raises:
        ConfigurationError: for values that cannot work.
    """

    resources_per_worker: Mapping[str, float] | None = option(None, _AMOUNTS)


@dataclass(frozen=True)
class Node:
    """A node that takes workers: its id, and the free amount of each resource."""

    name: str
    free: Mapping[str, float]


def needs_of_worker(accelerator: str | None, given: Mapping[str, float] | None) -> dict[str, float]:
    """Resources that are reserved for a worker, unless ``given`` says otherwise."""
    return {"CPU": 1.0, **({} if accelerator is None else {accelerator: 1.0}), **(given or {})}


def room(node: Node, needs: Mapping[str, float]) -> int:
    """Number of workers with these needs that fit into ``node``."""
    fits = (int(node.free.get(name, 0.0) / amount + 1e-9) for name, amount in needs.items() if amount > 0)
    return min(fits, default=1_000_000)


def pipeline_nodes(
    nodes: Sequence[Node], needs: Mapping[str, float], pipelines: int, stages: int
) -> list[tuple[str, ...] | None]:
    """For each pipeline the node of each of its workers; None for any room."""
    left = {node.name: room(node, needs) for node in nodes}
    chosen: list[tuple[str, ...] | None] = []
    for _ in range(pipelines):
        home = _pipeline_node(left, stages)
        for name in home or ():
            left.pop(name, None)
        chosen.append(home)
    return chosen


def _pipeline_node(left: Mapping[str, int], stages: int) -> tuple[str, ...] | None:
    """The smallest node with room for ``stages`` workers, else as few as possible."""
    whole = [name for name in left if left[name] >= stages]
    if whole:
        return (min(whole, key=lambda name: left[name]),) * stages
    home: list[str] = []
    for name in sorted(left, key=lambda name: -left[name]):
        home += [name] * min(left[name], stages - len(home))
    return tuple(home) if len(home) == stages else None


def nodes_with_room(nodes: Sequence[Node], needs: Mapping[str, float], taken: Iterable[str]) -> Iterator[str | None]:
    """Nodes of further positions: each the one with most room left, or None."""
    left = Counter({node.name: room(node, needs) for node in nodes})
    left.subtract(taken)
    while True:
        name = max(sorted(left), key=left.__getitem__, default=None)
        if name is None or left[name] < 1:
            name = None
        else:
            left[name] -= 1
        yield name


def replacement_node(nodes: Sequence[Node], needs: Mapping[str, float], used: Collection[str]) -> str | None:
    """A node with room for a worker, none of the ``used`` ones; None if none."""
    fitting = [node for node in nodes if node.name not in used and room(node, needs) > 0]
    return max(fitting, key=lambda node: room(node, needs)).name if fitting else None


# ---------------------------------------------------------------------- Ray


def import_ray() -> Any:
    """The package ``ray``; ConfigurationError if it is not installed."""
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ConfigurationError(f"Ray is not installed here: {install_command('ray')}, on every node.") from error


def connect() -> Any:
    """The package ``ray``, connected to its cluster, RAY_ADDRESS's, or a local one.

    Raises ConfigurationError if it is missing, or connected as a client from outside of the cluster.
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
    free: Mapping[str, Mapping[str, float]] = state.available_resources_per_node()
    return [Node(name, free.get(name, {})) for name in sorted(staying_nodes())]


def alive_nodes() -> frozenset[str]:
    """The ids of the nodes that Ray takes for alive."""
    return frozenset(node["NodeID"] for node in import_ray().nodes() if node["Alive"])


def draining_nodes() -> frozenset[str]:
    """The ids of nodes about to go: drained, given back, or announced by the cloud."""
    return frozenset(importlib.import_module("ray._private.state").state.get_draining_nodes())


def staying_nodes() -> frozenset[str]:
    """The ids of the alive nodes that are not about to go."""
    return alive_nodes() - draining_nodes()


def start_actor(kind: type[Any], name: str, needs: Mapping[str, float], node: str | None, waits: bool) -> Any:
    """An actor of class ``kind`` that lives once, on ``node`` or any.

    If ``waits``, it waits for room on that node, and fails if that is gone; else it goes elsewhere.
    """
    amounts = dict(needs)
    strategies = importlib.import_module("ray.util.scheduling_strategies")
    options = (
        import_ray()
        .remote(kind)
        .options(
            num_cpus=amounts.pop("CPU", 0),
            num_gpus=amounts.pop("GPU", 0),
            memory=amounts.pop("memory", None),
            resources=amounts,
            max_restarts=0,
            name=name,
            scheduling_strategy="DEFAULT"
            if node is None
            else strategies.NodeAffinitySchedulingStrategy(node, soft=not waits, _spill_on_unavailable=not waits),
        )
    )
    return options.remote()


def node_address() -> str:
    """The address at which other nodes reach this one."""
    address: str = import_ray().util.get_node_ip_address()
    return address
