"""Messages between workers: connections, values between stages, sums in a stage.

All groups are raw Gloo objects of their generation (:mod:`~lightning_recycle.runtime.groups_and_transports`), without a
default process group, and separate for activations and gradients: with tags instead, Gloo's event loop spins while the
main thread holds a connection's lock (measured: half of its processor time). Connecting happens in a thread that can be
abandoned.

**Aborts.** Gloo's ``abort`` does nothing and a blocked ``wait`` cannot be interrupted (torch 2.13), so an abort, from
any thread, shuts down the groups' sockets, and every operation ends with a :class:`CommunicationError` within
milliseconds. Gloo then fails *pending* operations, but forgets those *under way*: a receive whose payload has begun to
arrive, and an incompletely written send (``Pair::signalException`` in its ``transport/tcp/pair.cc`` passes over ``rx_``
and the unbound buffers of ``tx_``). Therefore every message is followed by an empty one, for which the receiver waits:
it stays pending until it arrives, and a connection keeps the order. No worker waits for a send: its memory is released
when an answer shows that it has arrived. Collectives are checked every 0.1 s; one that does not end is abandoned with
its group, thread and tensor.

**Values** travel as one message with a header, packed, if they fit into the receiver's posted buffer; else the header
announces a payload. Gloo accepts messages shorter than the buffer (measured), so receives are posted without knowing
the shape. Both sides size the buffer of a tag by its last message in the generation, so steady shapes take one message.
A damaged value ends the attempt at a step, as a broken connection does; after two in a row the sender counts as
unreachable.

**Sums** of small tensors go without Gloo, some by the transport from device to device
(:mod:`~lightning_recycle.runtime.groups_and_transports`), others by Gloo through the host's memory.

**Objects** travel as a pickle and the bytes of their tensors, in values of some megabytes, each acknowledged, several
under way at a time. They arrive on the CPU, so neither side needs room on its device.
"""

from __future__ import annotations

import ctypes
import errno
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from itertools import count, repeat
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import AllreduceOptions, BroadcastOptions, ReduceOp

from lightning_recycle.devices import is_accelerator
from lightning_recycle.errors import ReCycleError
from lightning_recycle.runtime.groups_and_transports import (
    CommunicationError,
    Group,
    GroupFactory,
    GroupPlan,
    Rendezvous,
    SmallAllreduce,
    Transport,
    UnreachableError,
)
from lightning_recycle.runtime.machine_errors import is_machine_error
from lightning_recycle.runtime.wire import (
    MAX_TENSORS,
    Channel,
    HostMemory,
    Incoming,
    ReceiveBuffer,
    SendBuffer,
    Value,
    ValueLayout,
)
from lightning_recycle.runtime.worker_links import OpenSockets
from lightning_recycle.tensor_memory import memory_of, put_together, take_apart

if TYPE_CHECKING:  # it imports torch's DTensors, which takes long
    from lightning_recycle.runtime.position_mesh import PositionMesh

POLL_INTERVAL = timedelta(seconds=0.1)
"""Interval between checks whether the generation was aborted."""

LAST_POLL_INTERVAL = timedelta(milliseconds=10)
"""At a collective of an aborted generation."""

SMALL_BYTES = 64 * 1024
"""Posted for a tag before its first message."""

EXCHANGE_TAG = 1 << 24
"""Beyond any micro-batch; Gloo's tags have 32 bits."""

_TAGS = MAX_TENSORS + 3  # Gloo's tags per tag of a value: the message, its tensors, and the end of either
_PAYLOAD = 2  # the first of them that payloads use
_EMPTY_MESSAGE = torch.empty(0, dtype=torch.uint8)  # an empty message
_OPPOSITE = {Channel.ACTIVATIONS: Channel.GRADIENTS, Channel.GRADIENTS: Channel.ACTIVATIONS}
_PEER_ERRORS = (ConnectionError, TimeoutError, InterruptedError)  # OSErrors that say nothing of this machine
_TRANSLATED_ERRORS = (RuntimeError, OSError)  # that operations raise
_MACHINE_ERRNOS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)
_MOST_MESHED = 17  # workers of a stage that also sum without Gloo; more would need many sockets for few bytes each
_MESSAGE_LOOP, _STAGE_LOOP, _POSITION_LOOP = 0, 1, 2  # messages between stages must not wait behind a reduction
_CHUNK_BYTES = 32 * 1024 * 1024  # of a reduction: a network of 100 Mbit/s takes seconds for it
_DEVICE_CHUNK_BYTES = 128 * 1024 * 1024  # the same from device to device, where each part costs notes to and fro

_Key: TypeAlias = tuple[Channel, int, int]
"""(channel, rank of the peer, tag)."""


@dataclass(frozen=True, eq=False)
class Reduction:
    """A sum over one stage or several, or a broadcast, that is under way.

    ``parts``: (view of the tensor, tensor that Gloo exchanges, its work). ``carried``: collectives of the transport.
    """

    group: Any = None
    parts: tuple[tuple[Tensor, Tensor, Any], ...] = ()
    carried: tuple[Any, ...] = ()


class Communicator:
    """Messages, sums and connections of one worker; only :meth:`abort` is thread-safe.

    Args:
        host: address at which other workers reach this one.
        device: device of received tensors; the CPU stages tensors of other devices.
        key: secret of the run, which workers prove to each other before any other message.
        timeout: seconds for any single operation.
        transport: carries payloads from device to device, the same kind on all workers; by default none.
        mesh: the mesh of the worker's position, if that has several members.

    Attributes:
        on_progress: called when a part of a long collective or transfer arrives, and while a transport connects.
        waiting: the context of a wait for the other members of the position, given its description.
        alter_next: changes the tensors of the next value on its way, for fault injection.
        lose_sibling: called when a collective of the position fails that outlives the generation.
        seconds_for_siblings: seconds of the position's collectives so far.
        translated: the context of an operation; errors of peers and network become a CommunicationError.
    """

    def __init__(
        self,
        rank: int,
        host: str,
        device: torch.device,
        rendezvous: Rendezvous,
        key: bytes,
        timeout: float = 1800.0,
        transport: Transport | None = None,
        mesh: PositionMesh | None = None,
    ) -> None:
        self.rank, self.device, self.mesh = rank, device, mesh
        self.memory = HostMemory(device)
        self.transport = Transport() if transport is None else transport
        self.on_progress: Callable[[], None] = lambda: None
        self.waiting: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext()
        self.alter_next: Callable[[Any], Any] | None = None
        self.seconds_for_siblings = 0.0
        self.generation = -1
        self.translated, self._in_hook = _Translated(self), _Translated(self, in_hook=True)
        self._timeout = timedelta(seconds=timeout)
        self.lose_sibling: Callable[[CommunicationError], None] = lambda _: None
        self._rendezvous = rendezvous
        self._factory = GroupFactory(rank, host, rendezvous, key, 2 if mesh is None else 3, self._timeout)
        self._channels: dict[Channel, Group] = {}
        self._collective_groups: dict[str, Group] = {}  # Gloo's groups for collectives, of the stage and of its ties
        self._stage = ""  # the name of the stage's
        self._small: SmallAllreduce | None = None
        self._lock = threading.Lock()
        self._cancelled = threading.Event()  # set when the generation is aborted
        self._aborted_generation = -1
        self._sockets, self._position_sockets = OpenSockets(), OpenSockets()
        self._position: frozenset[int] = frozenset()  # the members of this worker's
        self._position_is_cut = False
        self._is_prepared = False  # for the next generation
        # Memory of sends that may not have arrived, of this step and the previous one.
        self._send_memory: dict[_Key, list[tuple[Any, Tensor]]] = {}
        self._send_memory_before: dict[_Key, list[tuple[Any, Tensor]]] = {}
        self._inboxes: dict[_Key, ReceiveBuffer] = {}
        self._outboxes: dict[_Key, SendBuffer] = {}
        self._damagers: set[int] = set()  # ranks of which a message has been damaged in this step

    # ------------------------------------------------------------------ generations

    def configure(
        self,
        generation: int,
        neighbours: Collection[int],
        stage_roster: Sequence[int],
        tie_rosters: Mapping[tuple[int, ...], Sequence[int]] = MappingProxyType({}),
        check_links: bool = False,
        position: Sequence[int] = (),
    ) -> None:
        """Connects this worker with its neighbours and its stage, which do the same.

        ``tie_rosters``: by this worker's stages that hold a tie, their ranks. ``check_links``: name workers that do not
        answer. ``position``: with a mesh, the ranks of its members, in order.

        Raises:
            ConfigurationError: if the transport cannot be used with one of them.
            UnreachableError: if ``check_links``, and a worker's system does not answer for some seconds.
            CommunicationError: if a worker is gone or the generation is aborted meanwhile.
        """
        self._end()
        with self._lock:
            cancelled, sockets = self._cancelled, self._sockets = threading.Event(), OpenSockets()
            position_sockets = self._position_sockets = OpenSockets()
            self._position, self._position_is_cut = frozenset(position), self._aborted_generation >= generation
            self.generation = generation
            if self._position_is_cut:
                cancelled.set()
        stage = self._stage = f"stage{min(stage_roster)}"
        rosters = {stage: tuple(sorted(stage_roster))}
        rosters |= {_tie_name(stages): tuple(sorted(ranks)) for stages, ranks in sorted(tie_rosters.items())}
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
        transport_began: list[float] = []  # when the transport was asked to connect
        done = threading.Event()

        def sockets_of(plan: GroupPlan) -> OpenSockets:
            return position_sockets if plan.loop == _POSITION_LOOP else sockets

        def connect() -> None:
            try:
                groups.update(self._factory.create(generation, plans, check_links, cancelled, sockets_of))
                transport_began.append(time.monotonic())
                self.transport.connect(generation, rosters, groups, self._rendezvous, cancelled)
            except BaseException as error:  # handed to the thread that waits
                errors.append(error)
            finally:
                done.set()

        threading.Thread(target=connect, name="recycle-connect", daemon=True).start()
        while not done.wait(POLL_INTERVAL.total_seconds()):
            self.raise_if_aborted()  # abandons the thread, which ends when its connections time out
            if transport_began and time.monotonic() - transport_began[0] < self.transport.connect_seconds:
                self.on_progress()  # or all that wait for it would have to connect again
        for error in errors:
            if isinstance(error, ReCycleError) or (is_machine_error(error) and not isinstance(error, _PEER_ERRORS)):
                raise error
            raise CommunicationError(f"Connecting generation {generation} failed: {error}") from error
        if links := groups.pop(f"{stage}-mesh", Group()).links:
            self._small = SmallAllreduce(rosters[stage].index(self.rank), links, self._timeout.total_seconds())
        self.raise_if_aborted()
        self._channels = {channel: groups.get(channel.value, Group()) for channel in Channel}
        self._collective_groups = {name: groups.get(name, Group()) for name in rosters}
        if self.mesh is not None:
            alone = self._factory.create_alone(_POSITION_LOOP)
            self.mesh.connect(position, groups, alone, self._await_members)

    def abort(self, generation: int, in_hook: Collection[int] = ()) -> None:
        """Makes all operations up to ``generation`` fail, from any thread.

        If all members of the position are in ``in_hook``, its collectives in hooks go on.
        """
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
        """Drops everything. The caller must not be inside an operation."""
        self._end()
        self.transport.end()

    def _end(self) -> None:
        with self._lock:
            self._cancelled.set()
            self._position_is_cut = True
            self._sockets.cut()
            self._position_sockets.cut()
        self._is_prepared = False
        self._inboxes, self._outboxes, self._send_memory, self._send_memory_before = {}, {}, {}, {}
        self._channels, self._collective_groups = {}, {}
        if self.mesh is not None:
            self.mesh.disconnect()
        if self._small is not None:
            self._small.close()
            self._small = None
        self.transport.close()

    def raise_if_aborted(self, in_hook: bool = False) -> None:
        """Raises CommunicationError after an abort; ``in_hook``: also for hooks."""
        if self._is_aborted(in_hook):
            raise CommunicationError(f"Generation {self.generation} was aborted.")

    def _is_aborted(self, in_hook: bool) -> bool:
        return self._aborted_generation >= self.generation and (self._position_is_cut or not in_hook)

    def translate(self, error: Exception) -> NoReturn:
        """Raises a CommunicationError for ``error``, if it is of a peer or the network."""
        # Errors of the device are not translated, nor of a DataLoader's process, whose end a signal reports.
        if is_machine_error(error) and not isinstance(error, _PEER_ERRORS):
            raise error
        raise CommunicationError(f"Generation {self.generation}: {error}") from error

    # ------------------------------------------------------------------ the position

    @property
    def parts(self) -> tuple[int, int]:
        """This worker's part of each micro-batch: its number, and their count."""
        return (0, 1) if self.mesh is None else self.mesh.parts

    def exchange(self, numbers: Sequence[float], data: bytes) -> list[tuple[list[float], bytes]]:
        """Contributions of all workers that compute parts of the same micro-batches."""
        if self.mesh is None or self.parts[1] == 1:
            return [(list(numbers), data)]
        with self.translated:
            return self.mesh.exchange(numbers, data)

    def meet_siblings(self) -> None:
        if self.mesh is not None:
            with self.translated:
                self.mesh.meet()

    def _await_members(self, group: Any, work: Any, in_hook: bool) -> None:
        """Waits for a collective of the position; ``in_hook``: it outlives the generation."""
        started, is_refused = time.monotonic(), self._is_aborted(in_hook)
        try:
            with self.waiting("the other members of its position"):
                self._await_collective(group, work, in_hook)
            if is_refused:  # it began after the abort: that it has ended here does not say that it has elsewhere
                self.raise_if_aborted(in_hook)
        except CommunicationError as error:
            if in_hook:
                self.lose_sibling(error)
            raise
        finally:
            self.seconds_for_siblings += time.monotonic() - started
        self.on_progress()

    def _await_collective(self, group: Any, work: Any, in_hook: bool = False) -> None:
        """Waits for a collective of Gloo's, which may not notice that its sockets are cut."""
        while True:
            aborted = self._is_aborted(in_hook)
            try:
                work.wait(LAST_POLL_INTERVAL if aborted else POLL_INTERVAL)
                return
            except RuntimeError:
                if aborted or work.is_completed():
                    break
        if not work.is_completed():
            _keep_for_ever(group)
        with self._in_hook if in_hook else self.translated:
            work.wait(POLL_INTERVAL)  # raises its own error, or has ended right after the poll

    # ------------------------------------------------------------------ values between stages

    def post_receive(self, channel: Channel, source: int, tag: int) -> Incoming:
        """Posts the receive of a value from rank ``source``; several may be open by tag.

        The buffer of (channel, source, tag) is reused: its previous value must no longer be needed.
        """
        key = (channel, source, tag)
        inbox = self._inboxes.get(key)
        capacity = SMALL_BYTES if inbox is None else inbox.next_capacity
        if inbox is None or inbox.message.nbytes != capacity:
            inbox = self._inboxes[key] = ReceiveBuffer(capacity, self.memory)
        if self._aborted_generation >= self.generation:
            self.raise_if_aborted()
        try:
            work, end = self._receive_all(channel, (inbox.message,), source, tag * _TAGS)
        except _TRANSLATED_ERRORS as error:
            self.translate(error)
        return Incoming(channel, source, tag, inbox, work, end)

    def receive(self, incoming: Incoming, to_device: bool = True) -> Value:
        """Waits for a posted value, which may share memory with the posted buffer.

        ``to_device``: whether tensors that come by way of the host are moved to the device.
        """
        inbox, channel, source, tag = incoming.inbox, incoming.channel, incoming.source, incoming.tag
        if self._aborted_generation >= self.generation:
            self.raise_if_aborted()
        try:
            incoming.end.wait(self._timeout)
            incoming.work.wait(self._timeout)
            is_right, tensors = inbox.read_header(lambda layout: self._capacity(layout, source)), inbox.views
            if is_right and inbox.layout is not None and not inbox.packed:
                tensors = self._receive_payload(channel, inbox.layout, source, tag)
        except _TRANSLATED_ERRORS as error:
            self.translate(error)
        if inbox.layout is None or not is_right or not inbox.is_whole(tensors):
            raise self._damaged(source)
        # It was sent after this worker's message under that tag in the other direction had arrived.
        answered = (_OPPOSITE[channel], source, tag)
        self._send_memory.pop(answered, None)
        self._send_memory_before.pop(answered, None)
        if to_device and is_accelerator(self.device):
            tensors = [None if t is None else self.memory.on_device(t, inbox.packed) for t in tensors]
        if inbox.layout.has_note:
            incoming.note = inbox.layout.note(tensors)
        value: Value = inbox.layout.value(tensors)
        return value

    def send(self, channel: Channel, value: Value, destination: int, tag: int, note: bytes = b"") -> None:
        """Starts to send ``value`` and a note for the receiver; tensors must not change.

        The previous message under (channel, destination, tag) must have arrived: in a schedule the next depends on it.
        """
        key = (channel, destination, tag)
        bits = torch.frombuffer(bytearray(note), dtype=torch.uint8).to(self.device) if note else None
        layout = ValueLayout.of(value, bits)
        outbox = self._outboxes.get(key)
        if outbox is None or outbox.layout != layout or outbox.packed != outbox.packs_next:
            size, capacity = layout.packed_bytes, self._capacity(layout, destination)
            before = SMALL_BYTES if outbox is None else self._capacity(outbox.layout, destination)
            outbox = self._outboxes[key] = SendBuffer(layout, size <= before, size <= capacity, self.memory)
        tensors: Sequence[Tensor | None] = value if isinstance(value, tuple) else (value,)
        tensors = tensors if bits is None else (*tensors, bits)
        outbox.pack(tensors)
        outbox.add_sum(tensors)
        if self.alter_next is not None:  # as if they had changed on their way
            tensors, self.alter_next = self.alter_next(tuple(tensors)), None
            outbox.pack(tensors)
        if self._aborted_generation >= self.generation:
            self.raise_if_aborted()
        try:
            sent = self._send_all(channel, (outbox.message,), destination, tag * _TAGS)
            if not outbox.packed:
                payload = [tensor.detach() for tensor in tensors if tensor is not None]
                if self.transport.carries(destination):
                    self.transport.send(channel, layout, payload, destination, tag)
                else:
                    staged = [self.memory.staged(tensor).contiguous() for tensor in payload]
                    sent += self._send_all(channel, staged, destination, tag * _TAGS + _PAYLOAD)
        except _TRANSLATED_ERRORS as error:
            self.translate(error)
        self._send_memory[key] = sent
        self._send_memory_before.pop(key, None)

    def echo(self, peer: int, size: int, initiate: bool) -> None:
        """Sends ``size`` bytes to ``peer`` and waits for their return, or returns them."""
        if initiate:
            self.send(Channel.ACTIVATIONS, torch.empty(size, dtype=torch.uint8), peer, EXCHANGE_TAG)
            self.receive(self.post_receive(Channel.GRADIENTS, peer, EXCHANGE_TAG))
        else:
            value = self.receive(self.post_receive(Channel.ACTIVATIONS, peer, EXCHANGE_TAG))
            self.send(Channel.GRADIENTS, value, peer, EXCHANGE_TAG)

    def end_step(self) -> None:
        """Releases sends before the last call, which all participants have received."""
        self._send_memory_before, self._send_memory = self._send_memory, {}
        self._damagers.clear()
        if not self._is_prepared:  # the generation goes well
            self._is_prepared = True
            self.transport.prepare()

    def buffers(self) -> list[Tensor]:
        """Buffers that stay from step to step; received values may share their memory."""
        return [box.message for boxes in (self._inboxes, self._outboxes) for box in boxes.values()]

    def release_buffers(self, peer: int, tags: Collection[int]) -> None:
        """Forgets the buffers for ``tags`` with ``peer``, which does the same."""
        for boxes in (self._inboxes, self._outboxes):
            for key in [key for key in boxes if key[1] == peer and key[2] in tags]:
                del boxes[key]

    def _capacity(self, last: ValueLayout, peer: int) -> int:
        """Size of a tag's buffer after a message of layout ``last``, alike on both sides."""
        return min(max(last.packed_bytes, SMALL_BYTES), self.transport.packed_bytes(peer))

    def _receive_payload(self, channel: Channel, layout: ValueLayout, source: int, tag: int) -> list[Tensor | None]:
        if self.transport.carries(source):
            return self.transport.receive(channel, layout, source, tag)
        tensors = layout.empty(self.memory.empty)
        full = [t for t in tensors if t is not None]
        *works, end = self._receive_all(channel, full, source, tag * _TAGS + _PAYLOAD)
        for work in (end, *works):
            work.wait(self._timeout)
        return tensors

    def _send_all(
        self, channel: Channel, tensors: Sequence[Tensor], destination: int, base: int
    ) -> list[tuple[Any, Tensor]]:
        """Starts to send ``tensors`` and an empty message, under tags from ``base`` on."""
        group = self._channels[channel]
        send, place = group.process_group.send, group.places[destination]
        return [(send([t], place, base + part), t) for part, t in enumerate([*tensors, _EMPTY_MESSAGE])]

    def _receive_all(self, channel: Channel, tensors: Sequence[Tensor], source: int, base: int) -> list[Any]:
        """Counterpart of :meth:`_send_all`; the last item must be waited for first."""
        group = self._channels[channel]
        places = repeat(group.places[source])
        return [*map(group.process_group.recv, zip((*tensors, _EMPTY_MESSAGE)), places, count(base))]

    def _damaged(self, source: int) -> CommunicationError:
        """The error of a damaged message, which the next attempt sends again."""
        if source in self._damagers:
            return UnreachableError((source,))
        self._damagers.add(source)
        return CommunicationError(f"A message of rank {source} is damaged: other bits arrived than were sent.")

    # ------------------------------------------------------------------ sums

    def all_reduce(self, tensor: Tensor) -> None:
        """Sums ``tensor`` in place over this stage's live workers; the same bits on all."""
        if self._small is None or not self._small.takes(tensor):
            self.end_collective(self.begin_collective(tensor))
            return
        with self.translated:
            staged = tensor.cpu()
            try:
                self._small.sum(staged)
            except OSError as error:
                if error.errno in _MACHINE_ERRNOS:
                    raise
                raise ConnectionError(f"a sum over the stage: {error}") from error
            if staged is not tensor:
                tensor.copy_(staged)
        self.on_progress()

    def sums_at_once(self, tensor: Tensor) -> bool:
        """Whether :meth:`all_reduce` sums ``tensor`` without Gloo, on all workers."""
        return self._small is not None and self._small.takes(tensor)

    @property
    def has_peers(self) -> bool:
        return self._collective_groups.get(self._stage, Group()).whole is not None

    def begin_collective(self, tensor: Tensor, stages: tuple[int, ...] = (), source: int | None = None) -> Reduction:
        """Begins a sum in the background over this stage, or the ``stages`` of a tie.

        With ``source``, ``tensor`` is overwritten by that rank's instead. Until :meth:`end_collective` the contiguous
        ``tensor`` must not be touched. All workers of a group begin the same ones in the same order; with a transport
        ``in_one_order`` also across groups, in orders that agree.
        """
        self.raise_if_aborted()
        roster = _tie_name(stages) if stages else self._stage
        group = self._collective_groups.get(roster, Group())
        if group.whole is None:
            return Reduction()
        if self.transport.takes(roster, tensor):
            with self.translated:
                begin, parts = self.transport.begin_collective, _collective_parts(tensor, _DEVICE_CHUNK_BYTES)
                return Reduction(carried=tuple(begin(roster, part, source) for part in parts))
        options: Any = AllreduceOptions() if source is None else BroadcastOptions()
        if source is None:
            start, options.reduceOp = group.whole.allreduce, ReduceOp.SUM
        else:
            start, options.rootRank = group.whole.broadcast, group.places[source]
        with self.translated:
            staged = ((part, self.memory.staged(part)) for part in _collective_parts(tensor, _CHUNK_BYTES))
            return Reduction(group.whole, tuple((part, copy, start([copy], options)) for part, copy in staged))

    def end_collective(self, reduction: Reduction) -> None:
        """Waits until the tensor holds the sum, or the broadcast values."""
        for operation in reduction.carried:
            with self.translated:
                self.transport.end_collective(operation)
            self.on_progress()
        for part, staged, work in reduction.parts:
            self._await_collective(reduction.group, work)
            if staged is not part:
                part.copy_(staged)
            self.on_progress()

    def abandon(self, reduction: Reduction) -> bool:
        """Gives up a reduction with closed connections; whether its memory is free."""
        for part, staged, work in reduction.parts:
            try:
                work.wait(LAST_POLL_INTERVAL)
            except RuntimeError:  # its own error, or it goes on
                if not work.is_completed():
                    _keep_for_ever(reduction.group)
                    if staged is part:
                        return False
        return True


class _Translated:
    """Context of operations: errors of peers and network become CommunicationErrors."""

    __slots__ = ("_communicator", "_in_hook")

    def __init__(self, communicator: Communicator, in_hook: bool = False) -> None:
        self._communicator, self._in_hook = communicator, in_hook

    def __enter__(self) -> None:
        if self._communicator._aborted_generation >= self._communicator.generation:
            self._communicator.raise_if_aborted(self._in_hook)

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, _TRANSLATED_ERRORS):
            self._communicator.translate(error)


def _keep_for_ever(group: Any) -> None:
    """Leaks ``group``: its destructor would wait for a thread inside a collective."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _tie_name(stages: tuple[int, ...]) -> str:
    return "-".join(["tie", *map(str, stages)])


def _collective_parts(tensor: Tensor, most_bytes: int) -> tuple[Tensor, ...]:
    """A contiguous ``tensor`` in parts for single collectives."""
    parts: tuple[Tensor, ...] = tensor.view(-1).split(most_bytes // tensor.element_size())
    return parts


_PART_BYTES = 4 * 1024 * 1024  # on a network of 100 Mbit/s less than a second
_PARTS_AT_ONCE = 16
_PART_TAGS = range(EXCHANGE_TAG + 1, EXCHANGE_TAG + 1 + _PARTS_AT_ONCE)
_ACKNOWLEDGEMENT = torch.empty(0, dtype=torch.uint8)


def send_object(communicator: Communicator, value: Any, destination: int) -> None:
    """Sends ``value`` to rank ``destination``; returns when it has arrived."""
    # Parameters are pickled whole: they arrive as what they are.
    skeleton, tensors = take_apart(value, lambda tensor: type(tensor) is Tensor and tensor.layout is torch.strided)
    layouts = [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors]
    head = torch.frombuffer(bytearray(pickle.dumps((skeleton, layouts))), dtype=torch.uint8)
    _send_in_pieces(communicator, [torch.tensor([len(head)])], destination)
    _send_in_pieces(communicator, [head], destination)
    _send_in_pieces(communicator, [t.detach().resolve_conj().resolve_neg().contiguous() for t in tensors], destination)


def receive_object(communicator: Communicator, source: int) -> Any:
    """Receives an object from rank ``source``; tensors arrive on the CPU."""
    size = torch.empty(1, dtype=torch.int64)
    _receive_in_pieces(communicator, [size], source)
    head = torch.empty(int(size), dtype=torch.uint8)
    _receive_in_pieces(communicator, [head], source)
    skeleton, layouts = pickle.loads(head.numpy().tobytes())
    tensors = [torch.empty(shape, dtype=dtype) for dtype, shape in layouts]
    _receive_in_pieces(communicator, tensors, source)
    return put_together(skeleton, tensors)


def _send_in_pieces(communicator: Communicator, tensors: Sequence[Tensor], destination: int) -> None:
    """Sends the bytes of contiguous ``tensors``; returns when they have arrived."""
    by_device = communicator.transport.carries(destination)
    receipts: deque[Any] = deque()
    for number, piece in enumerate(_message_pieces(tensors)):
        if number >= _PARTS_AT_ONCE:
            communicator.receive(receipts.popleft())
        with communicator.translated:
            value = tuple(t.to(communicator.device) if by_device else communicator.memory.staged(t) for t in piece)
        tag = _PART_TAGS[number % _PARTS_AT_ONCE]
        receipts.append(communicator.post_receive(Channel.GRADIENTS, destination, tag))
        communicator.send(Channel.ACTIVATIONS, value, destination, tag)
        communicator.on_progress()
    for receipt in receipts:
        communicator.receive(receipt)
        communicator.on_progress()
    communicator.release_buffers(destination, _PART_TAGS)


def _receive_in_pieces(communicator: Communicator, tensors: Sequence[Tensor], source: int) -> None:
    """Fills contiguous CPU ``tensors`` with the bytes of :func:`_send_in_pieces`."""
    parts = _message_pieces(tensors)
    posted = deque(communicator.post_receive(Channel.ACTIVATIONS, source, tag) for tag in _PART_TAGS[: len(parts)])
    for number, part in enumerate(parts):
        tag = _PART_TAGS[number % _PARTS_AT_ONCE]
        for place, found in zip(part, communicator.receive(posted.popleft(), to_device=False), strict=True):
            place.copy_(found)
        if number + _PARTS_AT_ONCE < len(parts):
            posted.append(communicator.post_receive(Channel.ACTIVATIONS, source, tag))
        communicator.send(Channel.GRADIENTS, _ACKNOWLEDGEMENT, source, tag)
        communicator.on_progress()
    communicator.release_buffers(source, _PART_TAGS)


def _message_pieces(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """The bytes of contiguous ``tensors`` in pieces, grouped into messages."""
    found: list[list[Tensor]] = []
    room = 0
    for tensor in tensors:
        for piece in memory_of(tensor).split(_PART_BYTES) if tensor.numel() else ():
            if piece.nbytes > room or len(found[-1]) == MAX_TENSORS:
                found.append([])
                room = _PART_BYTES
            found[-1].append(piece)
            room -= piece.nbytes
    return found
