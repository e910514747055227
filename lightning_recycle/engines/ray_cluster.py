"""Ray's nodes: which of them take workers, which are about to go, and on which the workers of a grid are placed.

Placement: the loss of one node costs at most one replica of each stage. A pipeline gets a node of its own where one has
room for all of its positions, else several nodes that no other pipeline uses. Where even those do not suffice its
positions go wherever there is room: a run with less safety is better than none. A replacement goes to the node of its
predecessor; if that is gone, or about to go, to one that no other worker uses, else wherever Ray has room. The members
of a position go to the same node.

The one module that touches what Ray does not promise: ``GlobalState.get_draining_nodes``, which Ray Train and Ray Serve
use for the same question, ``available_resources_per_node``, and the spilling of actors from a node without room. Ray is
imported when the first run needs it.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_recycle.arguments import is_number
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.extras import install_command
from lightning_recycle.option_table import Check, OptionGroup, option, suggests_options

_AMOUNTS = Check(
    lambda value: all(is_number(amount, 0.0) for amount in (value or {}).values()),
    "give a number of at least 0 for each resource",
)


@suggests_options
@dataclass(frozen=True)
class RayEngine(OptionGroup):
    """Workers as actors of a Ray cluster, see the page on Ray: ``ReCycleStrategy(engine=RayEngine(...))``.

    Args:
        resources_per_worker: what Ray reserves for a worker, by the name of the resource; by default one CPU, and one
            GPU unless the Trainer's accelerator is the CPU.

    Raises:
        ConfigurationError: for values that cannot work.
    """

    resources_per_worker: Mapping[str, float] | None = option(None, _AMOUNTS)


@dataclass(frozen=True)
class Node:
    """A node that takes workers.

    Args:
        name: Ray's id of it.
        free: the free amount of each resource.
    """

    name: str
    free: Mapping[str, float]


def needs_of_worker(accelerator: str | None, given: Mapping[str, float] | None) -> dict[str, float]:
    """Resources that are reserved for a worker: one CPU, perhaps one device of the kind
    ``accelerator``, a resource of Ray, unless ``given`` says otherwise."""
    return {"CPU": 1.0, **({} if accelerator is None else {accelerator: 1.0}), **(given or {})}


def room(node: Node, needs: Mapping[str, float]) -> int:
    """How many workers fit into ``node`` that need so much of each resource; very many if they need nothing."""
    fits = (int(node.free.get(name, 0.0) / amount + 1e-9) for name, amount in needs.items() if amount > 0)
    return min(fits, default=1_000_000)


def homes(
    nodes: Sequence[Node], needs: Mapping[str, float], pipelines: int, stages: int
) -> list[tuple[str, ...] | None]:
    """For each pipeline the node of each of its workers; None for one that goes wherever there is room.

    Args:
        nodes: the nodes that take workers.
        needs: the amount of each resource that a worker needs.
        pipelines: how many pipelines there are.
        stages: how many workers each of them has.
    """
    left = {node.name: room(node, needs) for node in nodes}
    chosen: list[tuple[str, ...] | None] = []
    for _ in range(pipelines):
        home = _home(left, stages)
        for name in home or ():
            left.pop(name, None)
        chosen.append(home)
    return chosen


def _home(left: Mapping[str, int], stages: int) -> tuple[str, ...] | None:
    """The smallest node that has room for ``stages`` workers, else as few nodes as possible; ``left``: their rooms."""
    whole = [name for name in left if left[name] >= stages]
    if whole:
        return (min(whole, key=lambda name: left[name]),) * stages
    home: list[str] = []
    for name in sorted(left, key=lambda name: -left[name]):
        home += [name] * min(left[name], stages - len(home))
    return tuple(home) if len(home) == stages else None


def beside_others(nodes: Sequence[Node], needs: Mapping[str, float], taken: Iterable[str]) -> Iterator[str | None]:
    """Where further positions go, one after the other: the node with most room beside those of ``taken`` and of
    before; None if there is none.
    """
    left = Counter({node.name: room(node, needs) for node in nodes})
    left.subtract(taken)
    while True:
        name = max(sorted(left), key=left.__getitem__, default=None)
        if name is None or left[name] < 1:
            name = None
        else:
            left[name] -= 1
        yield name


def stand_in(nodes: Sequence[Node], needs: Mapping[str, float], used: Collection[str]) -> str | None:
    """A node for one worker whose own node is gone: one that has room and is not in ``used``, the nodes of the other
    workers; None if there is none.
    """
    fitting = [node for node in nodes if node.name not in used and room(node, needs) > 0]
    return max(fitting, key=lambda node: room(node, needs)).name if fitting else None


# ---------------------------------------------------------------------- Ray


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
        raise ConfigurationError(f"Ray is not installed here: {install_command('ray')}, on every node.") from error


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
    free: Mapping[str, Mapping[str, float]] = state.available_resources_per_node()
    return [Node(name, free.get(name, {})) for name in sorted(staying_nodes())]


def alive_nodes() -> frozenset[str]:
    """The ids of the nodes that Ray takes for alive."""
    return frozenset(node["NodeID"] for node in import_ray().nodes() if node["Alive"])


def draining_nodes() -> frozenset[str]:
    """The ids of the nodes that are about to go: a user called ``ray drain-node``, the autoscaler wants them back, or
    their cloud has given notice.
    """
    return frozenset(importlib.import_module("ray._private.state").state.get_draining_nodes())


def staying_nodes() -> frozenset[str]:
    """The ids of the alive nodes that are not about to go."""
    return alive_nodes() - draining_nodes()


def start_actor(kind: type[Any], name: str, needs: Mapping[str, float], node: str | None, waits: bool) -> Any:
    """An actor of the class ``kind`` that lives once, where Ray has room for it.

    Args:
        kind: the class.
        name: the actor's name.
        needs: the amount of each resource that it needs.
        node: the node on which it should live; None for any.
        waits: whether it waits for room on that node, and fails if that is gone; else it goes elsewhere.
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
