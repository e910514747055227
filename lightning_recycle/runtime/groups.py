"""The process groups of a generation: who is in which, and how their processes find each other and connect.

Contract: :meth:`GroupFactory.create` returns all groups that a worker is in, or raises. Before a byte of Gloo's passes,
each connection has proved that it leads to a worker of this run (:mod:`~lightning_recycle.runtime.gates`), and then it
is handed to Gloo (:mod:`~lightning_recycle.runtime.gloo`). Gloo would connect by itself, and take whoever dials; where
the other way is not possible on some worker, it has to, and the log says so.

The workers find each other through a :class:`Rendezvous` instead of a ``TCPStore``: its waits can be interrupted, while
a client of a TCPStore asks the name server for the name of its peer, which took 5 s where there is none. If it is in
doubt whether all can reach each other, they check before they connect
(:mod:`~lightning_recycle.runtime.reachability`): connecting takes longer, and only one side of a pair may notice.

Must not know: what the groups are for.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

from torch.distributed.distributed_c10d import PrefixStore, Store

from lightning_recycle.errors import ReCycleError
from lightning_recycle.runtime.gates import Gate, Link, connect
from lightning_recycle.runtime.gloo import Device, UnsupportedError, create_group, open_device
from lightning_recycle.runtime.reachability import Doorbell, unreachable
from lightning_recycle.runtime.sockets import OpenSockets, open_sockets

__all__ = ["CommunicationError", "GroupFactory", "GroupPlan", "Rendezvous", "UnreachableError"]

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

    def lookup(self, key: str, cancelled: threading.Event) -> bytes:
        """Waits for ``key``; raises to stop connecting, soon after ``cancelled`` is set at the latest."""


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
        return self._rendezvous.lookup(key, self._cancelled)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self._rendezvous.lookup(key, self._cancelled)


@dataclass(frozen=True)
class GroupPlan:
    """A process group to create: its name, the ranks of its members in order, and the number of its event loop."""

    name: str
    ranks: tuple[int, ...]
    loop: int = 0


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
        roster: Sequence[int],
        doorbell: Doorbell | None,
        cancelled: threading.Event,
        sockets: OpenSockets,
    ) -> dict[str, Any]:
        """The groups of ``plans`` that have other members, by name.

        Args:
            generation: distinguishes the groups from earlier ones.
            plans: groups that this worker is in.
            roster: the workers of the generation, who all create their groups at about the same time.
            doorbell: where the others can see whether they reach this worker, if all are to check that first.
            cancelled: ends creating the groups, soon after it is set.
            sockets: gets the groups' sockets, each as soon as it is Gloo's.

        Raises:
            UnreachableError: if some cannot be reached.
            RuntimeError, OSError: if connecting fails or was cancelled.
        """
        others = [rank for rank in roster if rank != self._rank]
        if not others:
            return {}
        plans = [plan for plan in plans if len(plan.ranks) > 1]
        store, prefix = _Store(self._rendezvous, cancelled), f"generation{generation}"

        def exchange(what: str, value: bytes) -> dict[int, bytes]:
            store.set(f"{prefix}/{what}{self._rank}", value)
            return {rank: store.get(f"{prefix}/{what}{rank}") for rank in others}

        if doorbell is not None:
            missing = unreachable(exchange("doorbell", doorbell.address), cancelled)
            if missing and not cancelled.is_set():
                raise UnreachableError(missing)
        with contextlib.closing(Gate(self._host)) as gate:
            addresses = exchange("gate", gate.address if self._devices else _NO_GATE)
            if _NO_GATE not in addresses.values() and self._devices:
                return self._create_over_links(generation, plans, gate, addresses, cancelled, sockets)
        return self._let_gloo_connect(lambda plan: PrefixStore(f"{prefix}/{plan.name}", store), plans, sockets)

    def _create_over_links(
        self,
        generation: int,
        plans: Sequence[GroupPlan],
        gate: Gate,
        addresses: Mapping[int, bytes],
        cancelled: threading.Event,
        sockets: OpenSockets,
    ) -> dict[str, Any]:
        links = [
            Link.between(plan.name, self._rank, rank) for plan in plans for rank in plan.ranks if rank != self._rank
        ]
        limit = _CONNECT_TIMEOUT.total_seconds()
        connected = connect(gate, self._key, generation, self._rank, links, addresses, cancelled, limit)
        gate.close()  # nobody has anything to ask any more
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
                group, opened = self._devices[plan.loop].create_group(
                    plan.ranks.index(self._rank), len(plan.ranks), peers
                )
                sockets.add(opened)
                groups[plan.name] = group
        return groups

    def _let_gloo_connect(
        self, store_for: Callable[[GroupPlan], Store], plans: Sequence[GroupPlan], sockets: OpenSockets
    ) -> dict[str, Any]:
        if not self._open_devices:
            self._open_devices = [open_device(self._host) for _ in range(self._loops)]
        groups = {}
        for plan in plans:
            before = open_sockets()
            groups[plan.name] = create_group(
                store_for(plan),
                plan.ranks.index(self._rank),
                len(plan.ranks),
                self._open_devices[plan.loop],
                _CONNECT_TIMEOUT,
            )
            sockets.add(dict(open_sockets().items() - before.items()))
        return groups
