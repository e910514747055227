"""Process groups of a generation, and the rendezvous of their processes.

A worker connects with those that share a group with it and asks for their addresses alone, so the costs do not grow
with the number of workers. A *meshed* group connects all of its members with each other, as collectives need it. A
group that is not meshed serves messages between two workers: each has its own set of others in it, and numbers them by
itself. Before a byte of Gloo's passes, each connection has proved that it leads to a worker of this run
(:mod:`~lightning_recycle.runtime.comm.peer_auth`); then it is handed to Gloo.

If it is in doubt whether all can reach each other, they check before they connect
(:mod:`~lightning_recycle.runtime.comm.sockets`): connecting takes longer, and only one side of a pair may notice.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from lightning_recycle.errors import ConfigurationError, ReCycleError
from lightning_recycle.runtime.comm.gloo import Device, UnsupportedError
from lightning_recycle.runtime.comm.peer_auth import Gate, Link, connect
from lightning_recycle.runtime.comm.sockets import Doorbell, OpenSockets, inode_of, unreachable

_CONNECT_SECONDS = 5.0  # once the addresses are known


class CommunicationError(ReCycleError):
    """A message could not be exchanged: a peer is gone, or the generation was aborted."""


class UnreachableError(CommunicationError):
    """This worker cannot reach the workers ``ranks``."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        super().__init__(f"There is no connection to the workers of rank {', '.join(map(str, ranks))}.")
        self.ranks = ranks


class Rendezvous(Protocol):
    """Where the workers of a generation publish and look up addresses."""

    def publish(self, key: str, value: bytes) -> None: ...

    def lookup(self, keys: Sequence[str], cancelled: threading.Event) -> list[bytes]:
        """The values of ``keys``, once all are there; raises after ``cancelled`` is set."""


@dataclass(frozen=True)
class GroupPlan:
    """A process group to create.

    Args:
        ranks: of the members, in order; if it is not meshed, those that this worker exchanges messages with, and its
            own.
        loop: the number of its event loop; None for links between its members that stay what they are, and no process
            group over them.
        meshed: whether all members are connected with each other.
    """

    name: str
    ranks: tuple[int, ...]
    loop: int | None = 0
    meshed: bool = True


@dataclass
class Group:
    """A process group, or the links of a plan without one.

    Attributes:
        whole: the same for collectives; None if the group is not meshed.
        places: the number of each member in it.
        links: for each other member, by its number, or by its rank if the group is not meshed, a connection that does
            not block; if the plan asks for links.
    """

    process_group: Any = None
    whole: Any = None
    places: dict[int, int] = field(default_factory=dict)
    links: dict[int, socket.socket] = field(default_factory=dict)


class GroupFactory:
    """Creates the process groups of one worker, generation after generation.

    Args:
        loops: number of event loops; a message does not wait behind those of another loop.

    Raises:
        ConfigurationError: where Gloo cannot work over connections that have proved who is at the other end.
    """

    def __init__(self, rank: int, host: str, rendezvous: Rendezvous, key: bytes, loops: int) -> None:
        self._rank, self._host, self._rendezvous, self._key = rank, host, rendezvous, key
        try:
            self._devices = [Device() for _ in range(loops)]
        except UnsupportedError as error:
            raise ConfigurationError(
                f"Workers cannot be connected here: {error}. Gloo's connections are authenticated, which needs Linux"
                " with /proc and socket filters (not gVisor), GLOO_DEVICE_TRANSPORT unset or TCP, and a torch that this"
                " package is tested with."
            ) from error

    def create(
        self,
        generation: int,
        plans: Sequence[GroupPlan],
        doorbell: Doorbell | None,
        cancelled: threading.Event,
        sockets: Callable[[GroupPlan], OpenSockets],
    ) -> dict[str, Group]:
        """The groups of ``plans`` that have other members, by name.

        Args:
            doorbell: where the others can see whether they reach this worker, if all are to check that first.
            sockets: what gets the sockets of a plan's group, each as soon as it is Gloo's.
        """
        plans = [plan for plan in plans if len(plan.ranks) > 1]
        others = sorted({rank for plan in plans for rank in plan.ranks} - {self._rank})
        if not others:
            return {}
        prefix = f"generation{generation}"

        def exchange(what: str, value: bytes) -> dict[int, bytes]:
            if cancelled.is_set():
                raise RuntimeError("The generation is over.")
            self._rendezvous.publish(f"{prefix}/{what}{self._rank}", value)
            found = self._rendezvous.lookup([f"{prefix}/{what}{rank}" for rank in others], cancelled)
            return dict(zip(others, found, strict=True))

        if doorbell is not None:
            missing = unreachable(exchange("doorbell", doorbell.address), cancelled)
            if missing and not cancelled.is_set():
                raise UnreachableError(missing)
        with contextlib.closing(Gate(self._host)) as gate:
            return self._create_over_links(generation, plans, gate, exchange("gate", gate.address), cancelled, sockets)

    def create_alone(self, loop: int) -> Any:
        """A process group of this worker alone; ``loop``: the number of its event loop."""
        return self._devices[loop].create_group(0, 1, {})[0]

    def _create_over_links(
        self,
        generation: int,
        plans: Sequence[GroupPlan],
        gate: Gate,
        addresses: Mapping[int, bytes],
        cancelled: threading.Event,
        sockets: Callable[[GroupPlan], OpenSockets],
    ) -> dict[str, Group]:
        wanted = [
            Link.between(plan.name, self._rank, rank) for plan in plans for rank in plan.ranks if rank != self._rank
        ]
        key, rank = self._key, self._rank
        connected = connect(gate, key, generation, rank, wanted, addresses, cancelled, _CONNECT_SECONDS)
        gate.close()  # all are connected
        groups = {}
        with contextlib.ExitStack() as stack:
            for sock in connected.values():
                stack.enter_context(sock)
            for plan in plans:
                peers = {
                    plan.ranks.index(link.other(self._rank)): sock
                    for link, sock in connected.items()
                    if link.group == plan.name
                }
                if plan.loop is None:
                    names = range(len(plan.ranks)) if plan.meshed else plan.ranks
                    links = {names[peer]: sock.dup() for peer, sock in peers.items()}
                    sockets(plan).add({link.fileno(): inode_of(link.fileno()) for link in links.values()})
                    groups[plan.name] = Group(links=links)
                    continue
                group, opened = self._devices[plan.loop].create_group(
                    plan.ranks.index(self._rank), len(plan.ranks), peers
                )
                sockets(plan).add(opened)
                places = {member: number for number, member in enumerate(plan.ranks)}
                groups[plan.name] = Group(group, group if plan.meshed else None, places)
        return groups
