"""Placement of a grid's workers on Ray's nodes, and their number: pure functions.

Placement: the loss of one node costs at most one replica of each stage. A pipeline gets a node of its own where one has
room for all of its workers, else several nodes that no other pipeline uses. Where even those do not suffice its workers
go wherever there is room: a run with less safety is better than none.

Staffing: the coordinator reports who is at which position; the engine knows its workers by machine and process id, and
the machines that are about to go. Every empty position needs a worker that is on its way. So does one whose worker is
about to leave: its replacement then waits as a spare, and takes over at the boundary where the other leaves. The same
rule brings the first workers of a run: at its begin all positions are empty.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from lightning_recycle.arguments import is_number
from lightning_recycle.option_table import Check, OptionGroup, option, suggests_options

__all__ = [
    "Node",
    "Process",
    "RayEngine",
    "Staffing",
    "homes",
    "needs_of_worker",
    "room",
    "staffing",
    "stand_in",
]

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


def needs_of_worker(use_gpu: bool, given: Mapping[str, float] | None) -> dict[str, float]:
    """Resources that are reserved for a worker: one CPU, perhaps one GPU, unless ``given`` says otherwise."""
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


def stand_in(nodes: Sequence[Node], needs: Mapping[str, float], used: Collection[str]) -> str | None:
    """A node for one worker whose own node is gone: one that has room and is not in ``used``, the nodes of the other
    workers; None if there is none.
    """
    fitting = [node for node in nodes if node.name not in used and room(node, needs) > 0]
    return max(fitting, key=lambda node: room(node, needs)).name if fitting else None


# ---------------------------------------------------------------------- how many


Process: TypeAlias = tuple[str, int]
"""The name of a machine, and a process id there."""


@dataclass(frozen=True)
class Staffing:
    """Requests that follow from the staff of a run.

    Args:
        request: the number of workers to ask for.
        leave: the machines whose workers are to leave at a step boundary.
        end: the workers to end at once: the run has given them up, or has no use for them.
    """

    request: int
    leave: frozenset[str]
    end: frozenset[int]


def staffing(
    positions: Mapping[int, Process | None],
    workers: Mapping[int, Process | None],
    placed: Collection[int],
    going: Collection[str],
) -> Staffing:
    """Staffing by the workers and their positions.

    Args:
        positions: by rank the process there, None for an empty position.
        workers: by their keys the workers that were asked for and have not ended; None for one that has not started.
        placed: the keys of those that have been seen at a position.
        going: the machines that are about to go.
    """
    there = {process for process in positions.values() if process is not None}
    vacant = sum(process is None for process in positions.values())
    leaving = [process for process in there if process[0] in going]
    given_up = {key for key in placed if key in workers and workers[key] not in there}
    idle = {key for key, process in workers.items() if key not in given_up and process not in there}
    stranded = {key for key in idle if _machine(workers[key]) in going}
    request = vacant + len(leaving) - len(idle - stranded)
    return Staffing(
        max(0, request), frozenset(machine for machine, _ in leaving), frozenset(given_up) | frozenset(stranded)
    )


def _machine(process: Process | None) -> str | None:
    return None if process is None else process[0]
