"""On which nodes the workers of a grid go, so that the loss of one node costs at most one replica of each stage. Pure.

A pipeline gets a node of its own where one has room for all of its workers, else several nodes that no other pipeline
uses. Where even those do not suffice its workers go wherever there is room: a run with less safety is better than none.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Node", "homes", "needs_of_worker", "room", "stand_in"]


@dataclass(frozen=True)
class Node:
    """A node that takes workers.

    Args:
        name: Ray's id of it.
        free: what is free of each resource.
    """

    name: str
    free: Mapping[str, float]


def needs_of_worker(use_gpu: bool, given: Mapping[str, float] | None) -> dict[str, float]:
    """What is reserved of each resource for a worker: one CPU, perhaps one GPU, unless ``given`` says otherwise."""
    return {"CPU": 1.0, **({"GPU": 1.0} if use_gpu else {}), **(given or {})}


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
        needs: what one worker needs of each resource.
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


def stand_in(nodes: Sequence[Node], needs: Mapping[str, float], used: Collection[str]) -> str | None:
    """A node for one worker whose own node is gone: one that has room and is not in ``used``, the nodes of the other
    workers; None if there is none.
    """
    fitting = [node for node in nodes if node.name not in used and room(node, needs) > 0]
    return max(fitting, key=lambda node: room(node, needs)).name if fitting else None
