"""Process groups of a generation, and the rendezvous of their processes.

Contract: :meth:`GroupFactory.create` returns all groups that a worker is in, or raises. A worker connects with those
who share a group with it and asks for their addresses alone, so what it costs does not grow with the number of workers.
A *meshed* group connects all of its members with each other, as collectives need it. A group that is not meshed serves
messages between two workers: each has its own set of others in it, and numbers them by itself, as Gloo's messages do
not tell by which number their sender goes. Before a byte of Gloo's passes, each connection has proved that it leads to
a worker of this run (:mod:`~lightning_recycle.runtime.comm.peer_auth`), and then it is handed to Gloo
(:mod:`~lightning_recycle.runtime.comm.gloo`). Gloo would connect by itself, and take any dialer; where the other way
is not possible on some worker, it has to, and the log says so.

The workers find each other through a :class:`Rendezvous` instead of a ``TCPStore``: its waits can be interrupted, while
a client of a TCPStore asks the name server for the name of its peer, which took 5 s where there is none. If it is in
doubt whether all can reach each other, they check before they connect
(:mod:`~lightning_recycle.runtime.comm.sockets`): connecting takes longer, and only one side of a pair may notice.

A worker may also have plain links to the members of a group, and no group over them (:class:`GroupPlan`).

Must not know: what the groups and links are for.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Protocol

from torch.distributed.distributed_c10d import PrefixStore, Store

from lightning_recycle.engines.discovery import port_range
from lightning_recycle.errors import ReCycleError
from lightning_recycle.runtime.comm.gloo import Device, UnsupportedError, create_group, open_device
from lightning_recycle.runtime.comm.peer_auth import Gate, Link, connect
from lightning_recycle.runtime.comm.sockets import Doorbell, OpenSockets, inode_of, open_sockets, unreachable

__all__ = ["CommunicationError", "Group", "GroupFactory", "GroupPlan", "Rendezvous", "UnreachableError"]

log = logging.getLogger(__name__)

_CONNECT_TIMEOUT = timedelta(seconds=5)  # once the addresses are known
_NO_GATE = b"-"  # the address of a worker whose Gloo connects by itself


class CommunicationError(ReCycleError):
    """A message could not be exchanged: a peer is gone, or the generation was aborted."""


class UnreachableError(CommunicationError):
    """This worker cannot reach the workers ``ranks``."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        super().__init__(f"There is no connection to the workers of rank {', '.join(map(str, ranks))}.")
        self.ranks = ranks


class Rendezvous(Protocol):
    """Where workers of a generation find each other: a place to publish addresses and wait for those of others."""

    def publish(self, key: str, value: bytes) -> None: ...

    def lookup(self, keys: Sequence[str], cancelled: threading.Event) -> list[bytes]:
        """The values of ``keys``, once all are there; raises to stop connecting, soon after ``cancelled`` is set."""


class _Store(Store):
    """A :class:`Rendezvous` as the store that Gloo requires, for one generation."""

    def __init__(self, rendezvous: Rendezvous, cancelled: threading.Event) -> None:
        super().__init__()
        self._rendezvous, self._cancelled = rendezvous, cancelled

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        if self._cancelled.is_set():
            raise RuntimeError("The generation is over.")
        self._rendezvous.publish(key, value)

    def get(self, key: str) -> bytes:
        return self.get_all([key])[0]

    def get_all(self, keys: Sequence[str]) -> list[bytes]:
        return self._rendezvous.lookup(keys, self._cancelled)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self.get_all(keys)


@dataclass(frozen=True)
class GroupPlan:
    """A process group to create.

    Args:
        name: the same on all members.
        ranks: of the members, in order; if it is not meshed, those that this worker exchanges messages with, and its
            own.
        loop: the number of its event loop; None for links between its members that stay what they are, and no process
            group over them. There are none to those whose Gloo connects by itself.
        meshed: whether all members are connected with each other.
    """

    name: str
    ranks: tuple[int, ...]
    loop: int | None = 0
    meshed: bool = True


class Group:
    """Created process groups under one name: usually one, and several where Gloo had to connect by itself.

    Attributes:
        whole: the one with all members, for collectives; None if the group is not meshed.
        places: for each other member, the process group that has it, and its number there.
        links: for each other member, by its number, or by its rank if the group is not meshed, a connection that does
            not block; if the plan asks for links.
    """

    def __init__(self) -> None:
        self.whole: Any = None
        self.places: dict[int, tuple[Any, int]] = {}
        self.links: dict[int, socket.socket] = {}

    def add(self, process_group: Any, ranks: Sequence[int], meshed: bool) -> None:
        """``process_group`` has the members ``ranks``, in this order."""
        self.places.update((rank, (process_group, number)) for number, rank in enumerate(ranks))
        if meshed:
            self.whole = process_group

    def with_more(self, other: Group) -> Group:
        """The group that leads to the members of both."""
        both = Group()
        both.whole = self.whole if other.whole is None else other.whole
        both.places, both.links = {**self.places, **other.places}, {**self.links, **other.links}
        return both

    @property
    def process_groups(self) -> list[Any]:
        return list({id(found): found for found, _ in self.places.values()}.values())


class GroupFactory:
    """Creates the process groups of one worker, generation after generation.

    Args:
        rank: rank of this worker in the grid.
        host: address at which other workers reach this one.
        rendezvous: where workers find each other.
        key: what only the workers of this run know; they prove it to each other.
        loops: number of event loops; a message does not wait behind those of another loop.
    """

    def __init__(self, rank: int, host: str, rendezvous: Rendezvous, key: bytes, loops: int) -> None:
        self._rank, self._host, self._rendezvous, self._key = rank, host, rendezvous, key
        self._loops = loops
        self._devices: list[Device] = []
        try:
            self._devices = [Device() for _ in range(loops)]
        except UnsupportedError as error:
            log.warning(
                "Connections between workers are not authenticated, because %s: anybody who reaches their ports can "
                "take the place of a worker. Keep strangers off this machine and its network.",
                error,
            )
        self._open_devices: list[Any] = []  # at which Gloo connects by itself

    def create(
        self,
        generation: int,
        plans: Sequence[GroupPlan],
        doorbell: Doorbell | None,
        cancelled: threading.Event,
        sockets: OpenSockets,
    ) -> dict[str, Group]:
        """The groups of ``plans`` that have other members, by name.

        Args:
            generation: distinguishes the groups from earlier ones.
            plans: groups that this worker is in; their other members create them at about the same time.
            doorbell: where the others can see whether they reach this worker, if all are to check that first.
            cancelled: ends creating the groups, soon after it is set.
            sockets: gets the groups' sockets, each as soon as it is Gloo's.

        Raises:
            UnreachableError: if some cannot be reached.
            RuntimeError, OSError: if connecting fails or was cancelled.
        """
        plans = [plan for plan in plans if len(plan.ranks) > 1]
        others = sorted({rank for plan in plans for rank in plan.ranks} - {self._rank})
        if not others:
            return {}
        store, prefix = _Store(self._rendezvous, cancelled), f"generation{generation}"

        def exchange(what: str, value: bytes) -> dict[int, bytes]:
            store.set(f"{prefix}/{what}{self._rank}", value)
            return dict(zip(others, store.get_all([f"{prefix}/{what}{rank}" for rank in others]), strict=True))

        if doorbell is not None:
            missing = unreachable(exchange("doorbell", doorbell.address), cancelled)
            if missing and not cancelled.is_set():
                raise UnreachableError(missing)
        groups = {plan.name: Group() for plan in plans}
        with contextlib.closing(Gate(self._host)) as gate:
            addresses = exchange("gate", gate.address if self._devices else _NO_GATE)
            without = {rank for rank, address in addresses.items() if address == _NO_GATE or not self._devices}
            linked, others_connect = self._divided(plans, without)
            if linked:
                self._create_over_links(groups, generation, linked, gate, addresses, cancelled, sockets)
        for name, plan in others_connect:
            created = self._let_gloo_connect(PrefixStore(f"{prefix}/{plan.name}", store), plan, sockets)
            groups[name].add(created, plan.ranks, plan.meshed)
        return groups

    def _divided(
        self, plans: Sequence[GroupPlan], without: Collection[int]
    ) -> tuple[list[GroupPlan], list[tuple[str, GroupPlan]]]:
        """What is created over links, and where Gloo connects by itself because some, ``without`` gates, cannot: a
        meshed group as a whole, and one for each two workers otherwise. The latter in an order that is the same on all
        workers, since each waits for its other members; with the names of the plans that they belong to.
        """
        linked, others = [], []
        for plan in plans:
            if plan.meshed:
                if set(plan.ranks).isdisjoint(without):
                    linked.append(plan)
                elif plan.loop is not None:
                    others.append((plan.name, plan))
                continue
            reached = tuple(rank for rank in plan.ranks if rank not in without)
            if len(reached) > 1:
                linked.append(replace(plan, ranks=reached))
            if plan.loop is None:
                continue
            for rank in set(plan.ranks) & set(without):
                pair = (min(rank, self._rank), max(rank, self._rank))
                others.append((plan.name, replace(plan, name=f"{plan.name}{pair[0]}-{pair[1]}", ranks=pair)))
        return linked, sorted(others, key=lambda named: (named[1].ranks, named[1].name))

    def _create_over_links(
        self,
        groups: Mapping[str, Group],
        generation: int,
        plans: Sequence[GroupPlan],
        gate: Gate,
        addresses: Mapping[int, bytes],
        cancelled: threading.Event,
        sockets: OpenSockets,
    ) -> None:
        wanted = [
            Link.between(plan.name, self._rank, rank) for plan in plans for rank in plan.ranks if rank != self._rank
        ]
        limit = _CONNECT_TIMEOUT.total_seconds()
        connected = connect(gate, self._key, generation, self._rank, wanted, addresses, cancelled, limit)
        gate.close()  # all are connected
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
                    links = groups[plan.name].links = {names[peer]: sock.dup() for peer, sock in peers.items()}
                    sockets.add({link.fileno(): inode_of(link.fileno()) for link in links.values()})
                    continue
                group, opened = self._devices[plan.loop].create_group(
                    plan.ranks.index(self._rank), len(plan.ranks), peers
                )
                sockets.add(opened)
                groups[plan.name].add(group, plan.ranks, plan.meshed)

    def _let_gloo_connect(self, store: Store, plan: GroupPlan, sockets: OpenSockets) -> Any:
        assert plan.loop is not None, "there are no links where Gloo connects by itself"
        if not self._open_devices:
            if (ports := port_range()) is not None:
                log.warning(
                    "Gloo listens at ports that the system chooses, not at those of RECYCLE_PORTS=%d-%d: it has to"
                    " connect by itself here.",
                    ports[0],
                    ports[-1],
                )
            self._open_devices = [open_device(self._host) for _ in range(self._loops)]
        before = open_sockets()
        group = create_group(
            store, plan.ranks.index(self._rank), len(plan.ranks), self._open_devices[plan.loop], _CONNECT_TIMEOUT
        )
        sockets.add(dict(open_sockets().items() - before.items()))
        return group
