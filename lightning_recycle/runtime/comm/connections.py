"""Connections of a worker in one generation.

Contract: :meth:`Connections.configure` connects the workers of a generation. :meth:`Connections.abort`, from any
thread, ends every operation over them with a :class:`CommunicationError`, within milliseconds. There is no default
process group: all groups are raw objects of their generation.

Gloo's own ``abort`` does nothing and a blocked ``wait`` cannot be interrupted (torch 2.13), so an abort shuts down the
sockets of the groups (:mod:`~lightning_recycle.runtime.comm.groups` makes both). Connecting happens in a thread that
can be abandoned.

Activations and gradients have separate groups. Gloo would keep them apart by tag, but its event loop spins while the
main thread holds the lock of a connection on which data arrives (measured: half of its processor time).

Must not know: what the connections carry.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from lightning_recycle.engines.discovery import port_range
from lightning_recycle.errors import ReCycleError
from lightning_recycle.runtime.comm.gloo import set_timeout
from lightning_recycle.runtime.comm.groups import CommunicationError, Group, GroupFactory, GroupPlan, Rendezvous
from lightning_recycle.runtime.comm.small_allreduce import SmallAllreduce
from lightning_recycle.runtime.comm.sockets import Doorbell, OpenSockets
from lightning_recycle.runtime.comm.transports import Channel, HostMemory, Transport
from lightning_recycle.runtime.machine_errors import is_machine_error

if TYPE_CHECKING:  # it imports torch's DTensors, which takes long
    from lightning_recycle.runtime.comm.position_mesh import PositionMesh

LOOK = timedelta(seconds=0.1)
"""Between checks whether the generation was aborted."""

LAST_LOOK = timedelta(milliseconds=10)
"""At a collective of an aborted generation."""

_OF_PEERS = (ConnectionError, TimeoutError, InterruptedError)  # OSErrors that say nothing of this machine
_MOST_MESHED = 17  # workers of a stage that also sum without Gloo; more would need many sockets for few bytes each
_MESSAGE_LOOP, _STAGE_LOOP, _POSITION_LOOP = 0, 1, 2  # messages between stages must not wait behind a reduction


class Connections:
    """The connections of a worker; arguments as of :class:`~lightning_recycle.runtime.comm.communicator.Communicator`.

    Attributes:
        on_progress: called when a part of a collective or a transfer, which may take long, has arrived, and while a
            transport connects that takes long.
        waiting: the context of a wait for the other members of this worker's position.
        lose_sibling: called when a collective of the position fails that must not end with the generation.
    """

    def __init__(
        self,
        rank: int,
        host: str,
        device: torch.device,
        rendezvous: Rendezvous,
        key: bytes,
        timeout: float,
        transport: Transport | None,
        mesh: PositionMesh | None,
    ) -> None:
        self.rank = rank
        self.timeout = timedelta(seconds=timeout)
        self.device = device
        self.memory = HostMemory(device)
        self.transport = Transport(self.timeout, self.memory) if transport is None else transport
        self.on_progress: Callable[[], None] = lambda: None
        self.waiting: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext()
        self.lose_sibling: Callable[[CommunicationError], None] = lambda _: None
        self.channels: dict[Channel, Group] = {}
        self.rosters: dict[str, Group] = {}
        self.stage_name = ""
        self.small_allreduce: SmallAllreduce | None = None
        self.generation = -1
        self.seconds_for_siblings = 0.0
        self.translated, self._in_hook = _Translated(self), _Translated(self, in_hook=True)
        self._host, self._rendezvous = host, rendezvous
        self.mesh = mesh
        self._factory = GroupFactory(rank, host, rendezvous, key, loops=2 if mesh is None else 3)
        self._lock = threading.Lock()
        self._cancelled = threading.Event()  # set when the generation is aborted
        self._aborted_generation = -1
        self._sockets, self._position_sockets = OpenSockets(), OpenSockets()
        self._position: frozenset[int] = frozenset()  # the members of this worker's
        self._position_is_cut = False
        self._doorbell: Doorbell | None = None
        self._is_prepared = False  # for the next generation

    def configure(
        self,
        generation: int,
        neighbours: Collection[int],
        stage_roster: Sequence[int],
        tie_rosters: Mapping[tuple[int, ...], Sequence[int]],
        check_links: bool,
        position: Sequence[int] = (),
    ) -> None:
        """Connects this worker: see :meth:`~lightning_recycle.runtime.comm.communicator.Communicator.configure`."""
        self._drop()
        doorbell = self._doorbell = Doorbell(self._host, port_range()) if check_links else None
        with self._lock:
            cancelled, sockets = self._cancelled, self._sockets = threading.Event(), OpenSockets()
            position_sockets = self._position_sockets = OpenSockets()
            self._position, self._position_is_cut = frozenset(position), self._aborted_generation >= generation
            self.generation = generation
            if self._position_is_cut:
                cancelled.set()
        ties = {tie_name(stages): tuple(sorted(ranks)) for stages, ranks in sorted(tie_rosters.items())}
        stage = self.stage_name = f"stage{min(stage_roster)}"
        rosters = {stage: tuple(sorted(stage_roster)), **ties}
        reached = tuple(sorted({*neighbours, self.rank}))
        plans = [GroupPlan(channel.value, reached, _MESSAGE_LOOP, meshed=False) for channel in Channel]
        plans += self.transport.plans(reached, rosters)
        plans += [GroupPlan(name, ranks, _STAGE_LOOP) for name, ranks in rosters.items()]
        if len(stage_roster) <= _MOST_MESHED:
            plans.append(GroupPlan(f"{stage}-mesh", rosters[stage], None))
        if self.mesh is not None:
            plans += self.mesh.plans(position, _POSITION_LOOP)
        groups: dict[str, Group] = {}
        errors: list[BaseException] = []
        begun: list[float] = []  # when the transport was asked to connect
        done = threading.Event()

        def connect() -> None:
            try:
                groups.update(
                    self._factory.create(
                        generation,
                        plans,
                        doorbell,
                        cancelled,
                        lambda plan: position_sockets if plan.loop == _POSITION_LOOP else sockets,
                    )
                )
                begun.append(time.monotonic())
                self.transport.connect(generation, rosters, groups, self._rendezvous, cancelled)
            except BaseException as error:  # handed to the thread that waits
                errors.append(error)
            finally:
                done.set()

        threading.Thread(target=connect, name="recycle-connect", daemon=True).start()
        while not done.wait(LOOK.total_seconds()):
            self.check()  # abandons the thread, which ends when its connections time out
            if begun and time.monotonic() - begun[0] < self.transport.connect_seconds:
                self.on_progress()  # or all that wait for it would have to connect again
        for error in errors:
            if isinstance(error, ReCycleError) or (is_machine_error(error) and not isinstance(error, _OF_PEERS)):
                raise error
            raise CommunicationError(f"Connecting generation {generation} failed: {error}") from error
        links = groups.pop(f"{stage}-mesh", Group()).links
        if links:
            self.small_allreduce = SmallAllreduce(
                sorted(stage_roster).index(self.rank), links, self.timeout.total_seconds()
            )
        for group in groups.values():
            if group.process_group is not None:
                set_timeout(group.process_group, self.timeout)
        self.check()
        self.channels = {channel: groups.get(channel.value, Group()) for channel in Channel}
        self.rosters = {name: groups.get(name, Group()) for name in rosters}
        if self.mesh is not None:
            alone = self._factory.create_alone(_POSITION_LOOP)
            self.mesh.connect(position, groups, alone, self._await_members)

    def meet_siblings(self) -> None:
        """Waits until all members of this worker's position are here."""
        if self.mesh is not None:
            with self.translated:
                self.mesh.meet()

    def _await_members(self, group: Any, work: Any, in_hook: bool) -> None:
        """Waits for a collective of this worker's position; ``in_hook``: it goes on when the generation ends."""
        started = time.monotonic()
        try:
            with self.waiting("the other members of its position"):
                self.await_collective(group, work, in_hook)
        except CommunicationError as error:
            if in_hook:
                self.lose_sibling(error)
            raise
        finally:
            self.seconds_for_siblings += time.monotonic() - started
        self.on_progress()

    def abort(self, generation: int, in_hook: Collection[int] = ()) -> None:
        """Ends the generation: see :meth:`~lightning_recycle.runtime.comm.communicator.Communicator.abort`."""
        with self._lock:
            self._aborted_generation = max(self._aborted_generation, generation)
            if self.generation <= generation:
                self._cancelled.set()
                self._sockets.cut()
                if not self._position or not self._position.issubset(in_hook):
                    self._position_is_cut = True
                    self._position_sockets.cut()
                self.transport.abort()

    def close(self) -> None:
        """Drops everything, after :meth:`end`."""
        self._drop()
        self.transport.end()

    def end(self) -> None:
        """Ends the generation. :meth:`configure` or :meth:`close` comes next."""
        with self._lock:
            self._cancelled.set()
            self._position_is_cut = True
            self._sockets.cut()
            self._position_sockets.cut()
        if self._doorbell is not None:
            self._doorbell.close()
            self._doorbell = None
        self._is_prepared = False

    def _drop(self) -> None:
        self.channels = {}
        self.rosters = {}
        if self.mesh is not None:
            self.mesh.disconnect()
        if self.small_allreduce is not None:
            self.small_allreduce.close()
            self.small_allreduce = None
        self.transport.close()

    def await_collective(self, group: Any, work: Any, in_hook: bool = False) -> None:
        """Waits for a collective of Gloo's, which may not notice that its sockets are cut. Arguments and errors as
        of :meth:`check`.
        """
        while True:
            aborted = self.is_aborted and (self._position_is_cut or not in_hook)
            try:
                work.wait(LAST_LOOK if aborted else LOOK)
                return
            except RuntimeError:
                if aborted or work.is_completed():
                    break
        if not work.is_completed():
            keep_for_ever(group)
        with self._in_hook if in_hook else self.translated:
            work.wait(LOOK)  # raises its own error, or has ended right after the look

    def prepare_next(self) -> None:
        """The generation goes well: the transport begins what the next one will need, once."""
        if not self._is_prepared:
            self._is_prepared = True
            self.transport.prepare()

    @property
    def is_aborted(self) -> bool:
        """Whether the generation was aborted."""
        return self._aborted_generation >= self.generation

    def check(self, in_hook: bool = False) -> None:
        """Raises CommunicationError if the generation was aborted; ``in_hook``: for collectives in hooks, too."""
        if self.is_aborted and (self._position_is_cut or not in_hook):
            raise CommunicationError(f"Generation {self.generation} was aborted.")


class _Translated:
    """The context of operations: errors of peers and of the network become a CommunicationError."""

    __slots__ = ("_connections", "_in_hook")

    def __init__(self, connections: Connections, in_hook: bool = False) -> None:
        self._connections, self._in_hook = connections, in_hook

    def __enter__(self) -> None:
        self._connections.check(self._in_hook)

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        # Errors of the device are not translated, nor of a DataLoader's process, whose end a signal reports.
        if isinstance(error, (RuntimeError, OSError)) and (isinstance(error, _OF_PEERS) or not is_machine_error(error)):
            raise CommunicationError(f"Generation {self._connections.generation}: {error}") from error


def keep_for_ever(group: Any) -> None:
    """Because its destructor would wait for the thread that is inside a collective."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def tie_name(stages: tuple[int, ...]) -> str:
    """The name of the group of the ties that ``stages`` hold."""
    return "-".join(["tie", *map(str, stages)])
