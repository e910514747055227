"""Messages between workers, over torch's process groups.

Contract: :meth:`Communicator.configure` connects the workers of one generation, :meth:`Communicator.abort` (from any
thread) makes every blocked or later operation raise :class:`CommunicationError` within milliseconds. There is no
default process group: all groups are raw objects under a store prefix of their generation. Where all workers of a
generation wait, with nothing under way, and the same ones go on, the next one keeps the connections.

Gloo's own ``abort`` does nothing and a blocked ``wait`` cannot be interrupted (torch 2.13), so an abort shuts down the
sockets of the groups (:mod:`~lightning_recycle.runtime.comm.groups` makes both). Gloo then fails
what is *pending*, but forgets what is *under way*: a receive whose payload has begun to arrive, and a send that is not
completely written, keep waiting until their timeout (``Pair::signalException`` in its ``transport/tcp/pair.cc`` passes
over ``rx_`` and the unbound buffers of ``tx_``; the death of a peer in the middle of a message does the same).
Therefore

- every message is followed by an empty one, for which the receiver waits: without a payload it stays pending until it
  arrives, and a connection keeps the order;
- nothing waits for a send. What was sent is released when a message that came back shows that it has arrived;
- a collective of Gloo's, which sends and receives inside, is checked every 0.1 s, and a group with one that does not
  end is abandoned with its thread, which ends at the timeout; its tensor then belongs to that thread;
- connecting happens in a thread that can be abandoned, too.

A receive without its own timeout uses the one its group was created with, not one set later.

Activations and gradients have separate groups. Gloo would keep them apart by tag, but its event loop spins while the
main thread holds the lock of a connection on which data arrives (measured: half of its processor time).

What is small is summed without Gloo (:mod:`~lightning_recycle.runtime.comm.small_allreduce`), over connections of its
own.

A value travels as one message with a header, packed, if it fits into the receiver's posted buffer; else the header
announces its tensors as a payload, which a transport carries (:mod:`~lightning_recycle.runtime.comm.transports`). Gloo
accepts messages shorter than the buffer (measured), so receives are posted ahead without knowing the shape, and shapes
may change from micro-batch to micro-batch. Both sides size the buffer of a tag by its last message in the generation,
so with steady shapes every value is one message, unless the transport is faster.

What arrives otherwise than it was sent (:mod:`~lightning_recycle.runtime.comm.wire`) ends the attempt at a step, as
a broken connection does, and the next one sends it again; if that fails, too, the sender counts as unreachable.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.distributed.distributed_c10d import AllreduceOptions, BroadcastOptions, ReduceOp

from lightning_recycle.engines.discovery import port_range
from lightning_recycle.errors import ReCycleError
from lightning_recycle.runtime.comm.groups import (
    CommunicationError,
    Group,
    GroupFactory,
    GroupPlan,
    Rendezvous,
    UnreachableError,
)
from lightning_recycle.runtime.comm.small_allreduce import SmallAllreduce
from lightning_recycle.runtime.comm.sockets import Doorbell, OpenSockets
from lightning_recycle.runtime.comm.transports import (
    TAGS,
    Channel,
    GlooTransport,
    HostMemory,
    Transport,
    receive_all,
    send_all,
)
from lightning_recycle.runtime.comm.wire import HEADER_BYTES, LAYOUT_BYTES, Layout, Value, sum_of_bytes, sum_of_tensors
from lightning_recycle.runtime.machine_errors import is_machine_error

__all__ = [
    "PARTS_AT_ONCE",
    "Channel",
    "CommunicationError",
    "Communicator",
    "Incoming",
    "Reduction",
    "UnreachableError",
]

PARTS_AT_ONCE = 16
"""How many parts of a transfer may be under way between two workers."""

_SMALL_BYTES = 64 * 1024  # posted for a tag before its first message
_EXCHANGE_TAG = 1 << 24  # beyond any micro-batch; Gloo's tags have 32 bits
_TRANSFER_TAG = (_EXCHANGE_TAG + 1) * TAGS
_CHUNK_BYTES = 32 * 1024 * 1024  # of a reduction: a network of 100 Mbit/s takes seconds for it
_DEVICE_CHUNK_BYTES = 128 * 1024 * 1024  # the same from device to device, where each part costs notes to and fro
_OF_THIS_MACHINE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)
_OF_PEERS = (ConnectionError, TimeoutError, InterruptedError)  # OSErrors that say nothing of this machine
_LOOK = timedelta(seconds=0.1)  # between checks whether the generation was aborted
_LAST_LOOK = timedelta(milliseconds=10)  # at a collective of an aborted generation
_MOST_MESHED = 17  # workers of a stage that also sum without Gloo; more would need many sockets for few bytes each
_MESSAGE_LOOP, _STAGE_LOOP = 0, 1  # messages between stages must not wait behind a reduction


_OTHER = {Channel.ACTIVATIONS: Channel.GRADIENTS, Channel.GRADIENTS: Channel.ACTIVATIONS}


_Key: TypeAlias = tuple[Channel, int, int]
"""(channel, rank of the peer, tag)."""


class _Outbox:
    """A prepared message that carries a layout: with steady shapes, only the tensors need to be copied into it."""

    def __init__(self, layout: Layout, packed: bool, memory: HostMemory) -> None:
        self.layout, self.packed = layout, packed
        self.message = memory.empty((layout.packed_bytes if packed else HEADER_BYTES,))
        self._bytes = self.message.numpy()
        self._bytes[:LAYOUT_BYTES] = np.frombuffer(layout.header(packed), dtype=np.uint8)
        self._sums = self._bytes[LAYOUT_BYTES:HEADER_BYTES].view(np.int64)
        self._sums[0] = sum_of_bytes(self._bytes[:LAYOUT_BYTES])
        self.views = layout.views(self.message) if packed else []

    def add_sum(self, tensors: Sequence[Tensor | None]) -> None:
        """The message has its tensors, or will be followed by ``tensors``."""
        self._sums[1] = sum_of_bytes(self._bytes[HEADER_BYTES:]) if self.packed else sum_of_tensors(tensors)


class _Inbox:
    """The buffer posted for a tag, and the layout of its last message."""

    def __init__(self, capacity: int, memory: HostMemory) -> None:
        self.message = memory.empty((capacity,))
        self._bytes = self.message.numpy()
        self._sums = self._bytes[LAYOUT_BYTES:HEADER_BYTES].view(np.int64)
        self._header = b""
        self.layout: Layout | None = None
        self.packed = False
        self.views: list[Tensor | None] = []

    def read_header(self) -> bool:
        """Whether the header arrived as it was sent."""
        header = self._bytes[:LAYOUT_BYTES].tobytes()
        if header != self._header:
            if sum_of_bytes(self._bytes[:LAYOUT_BYTES]) != self._sums[0]:
                return False
            self._header = header
            self.layout, self.packed = Layout.parse(header)
            self.views = self.layout.views(self.message) if self.packed else []
        return True

    def is_whole(self, tensors: Sequence[Tensor | None]) -> bool:
        """Whether the tensors, in the message or after it, arrived as they were sent."""
        assert self.layout is not None
        if not self.packed:
            return int(self._sums[1]) in (0, sum_of_tensors(tensors))
        return int(self._sums[1]) == sum_of_bytes(self._bytes[HEADER_BYTES : self.layout.packed_bytes])


@dataclass(frozen=True, eq=False)
class Incoming:
    """A posted receive."""

    key: _Key
    inbox: _Inbox
    work: Any
    end: Any


@dataclass(frozen=True, eq=False)
class Reduction:
    """A sum over one stage or several, or a broadcast, that is under way.

    Args:
        group: of Gloo.
        parts: each a view of the tensor, what Gloo exchanges, and its work.
        carried: what the transport has begun instead.
    """

    group: Any = None
    parts: tuple[tuple[Tensor, Tensor, Any], ...] = ()
    carried: tuple[Any, ...] = ()


class Communicator:
    """The process groups of the current generation.

    Args:
        rank: rank of this worker in the grid.
        host: address at which other workers reach this one.
        device: device of received tensors; tensors on devices other than the CPU are staged through the CPU.
        rendezvous: where workers find each other.
        key: what only the workers of this run know; they prove it to each other before they exchange anything else.
        timeout: limit of any single operation, in seconds.
        transport: what carries payloads, the same kind on all workers; by default Gloo.

    Attributes:
        on_progress: called when a part of a collective or a transfer, which may take long, has arrived, and while a
            transport connects that takes long.
        alter_next: what it makes of the tensors of the next value is sent instead of them, as if they had changed on
            their way, for fault injection; None for none.
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
    ) -> None:
        self._rank = rank
        self._host = host
        self._timeout = timedelta(seconds=timeout)
        self.device = device
        self._memory = HostMemory(device)
        self.on_progress: Callable[[], None] = lambda: None
        self.alter_next: Callable[[Any], Any] | None = None
        self._factory = GroupFactory(rank, host, rendezvous, key, loops=2)
        self._rendezvous = rendezvous
        self._transport: Transport = GlooTransport(self._timeout, self._memory) if transport is None else transport
        self._lock = threading.Lock()
        self._cancelled = threading.Event()  # set when the generation is aborted
        self._aborted_generation = -1
        self._generation = -1
        self._sockets = OpenSockets()
        self._doorbell: Doorbell | None = None
        self._groups: dict[Channel, Group] = {}
        self._stage_name = ""
        self._rosters: dict[str, Group] = {}  # Gloo's groups for collectives, of the stage and of its ties
        self._mesh: SmallAllreduce | None = None
        # What must stay alive until it has arrived, of this step and the previous one.
        self._sent: dict[_Key, list[tuple[Any, Tensor]]] = {}
        self._sent_before: dict[_Key, list[tuple[Any, Tensor]]] = {}
        self._inboxes: dict[_Key, _Inbox] = {}
        self._outboxes: dict[_Key, _Outbox] = {}
        self._is_prepared = False  # for the next generation
        self._damagers: set[int] = set()  # ranks of which a message has been damaged in this step

    # ------------------------------------------------------------------ life cycle

    def configure(
        self,
        generation: int,
        neighbours: Collection[int],
        stage_roster: Sequence[int],
        tie_rosters: Mapping[tuple[int, ...], Sequence[int]] | None = None,
        check_links: bool = False,
        keeps: bool = False,
    ) -> None:
        """Connects this worker with those that it exchanges messages with, each of whom does the same, and for
        reductions the workers of its stage.

        Args:
            generation: the generation.
            neighbours: ranks of the grid that this worker exchanges messages with; its own does not matter.
            stage_roster: ranks of the workers of its stage, itself included.
            tie_rosters: for the sums of tied gradients, the ranks of the stages that hold a tie, by these stages (this
                worker's only).
            check_links: whether each worker, all or none of them, first checks whether it can reach the others.
            keeps: whether the connections of the generation before stay, all of them on all workers, which are the same
                as then and have nothing under way: only what is missing is connected.

        Raises:
            ConfigurationError: if the transport cannot be used with one of them.
            UnreachableError: if it cannot, after :data:`~lightning_recycle.runtime.comm.sockets.CHECK_SECONDS`.
            CommunicationError: if a worker is gone or the generation is aborted meanwhile.
        """
        if keeps and not self._transport.keeps_connections:
            self.abort(generation - 1)
            keeps = False
        self._close_generation(keeps)
        doorbell = self._doorbell = Doorbell(self._host, port_range()) if check_links else None
        with self._lock:
            if not keeps:
                self._cancelled, self._sockets = threading.Event(), OpenSockets()
            cancelled, sockets = self._cancelled, self._sockets
            self._generation = generation
            if self._aborted_generation >= generation:
                cancelled.set()
        ties = {_tie(stages): tuple(sorted(ranks)) for stages, ranks in sorted((tie_rosters or {}).items())}
        stage = self._stage_name = f"stage{min(stage_roster)}"
        rosters = {stage: tuple(sorted(stage_roster)), **ties}
        reached = tuple(sorted({*neighbours, self._rank}))
        plans = [GroupPlan(channel.value, reached, _MESSAGE_LOOP, meshed=False) for channel in Channel]
        plans += self._transport.plans(reached, rosters)
        plans += [GroupPlan(name, ranks, _STAGE_LOOP) for name, ranks in rosters.items()]
        if len(stage_roster) <= _MOST_MESHED and self._mesh is None:
            plans.append(GroupPlan(f"{stage}-mesh", rosters[stage], None))
        groups = {channel.value: group for channel, group in self._groups.items()} | self._rosters
        missing = [self._missing(plan, groups.get(plan.name, Group())) for plan in plans]
        errors: list[BaseException] = []
        begun: list[float] = []  # when the transport was asked to connect
        done = threading.Event()

        def connect() -> None:
            try:
                for name, group in self._factory.create(generation, missing, doorbell, cancelled, sockets).items():
                    groups[name] = groups.get(name, Group()).with_more(group)
                begun.append(time.monotonic())
                self._transport.connect(generation, rosters, groups, self._rendezvous, cancelled)
            except BaseException as error:  # handed to the thread that waits
                errors.append(error)
            finally:
                done.set()

        threading.Thread(target=connect, name="recycle-connect", daemon=True).start()
        while not done.wait(_LOOK.total_seconds()):
            self._check()  # abandons the thread, which ends when its connections time out
            if begun and time.monotonic() - begun[0] < self._transport.connect_seconds:
                self.on_progress()  # or all who wait for it would be told to connect again
        for error in errors:
            if isinstance(error, ReCycleError) or (is_machine_error(error) and not isinstance(error, _OF_PEERS)):
                raise error
            raise CommunicationError(f"Connecting generation {generation} failed: {error}") from error
        links = groups.pop(f"{stage}-mesh", Group()).links
        if links:
            self._mesh = SmallAllreduce(sorted(stage_roster).index(self._rank), links, self._timeout.total_seconds())
        for group in groups.values():
            for process_group in group.process_groups:
                process_group._set_default_timeout(self._timeout)
        self._check()
        self._groups = {channel: groups.get(channel.value, Group()) for channel in Channel}
        self._rosters.update({name: groups.get(name, Group()) for name in rosters})

    def _missing(self, plan: GroupPlan, kept: Group) -> GroupPlan:
        """``plan`` without the workers with whom this one is connected, in ``kept``: a meshed group has all or none."""
        return replace(plan, ranks=tuple(r for r in plan.ranks if r == self._rank or r not in kept.places))

    def abort(self, generation: int) -> None:
        """Makes all operations of ``generation`` and earlier ones fail. Callable from any thread, more than once."""
        with self._lock:
            self._aborted_generation = max(self._aborted_generation, generation)
            if self._generation <= generation:
                self._cancelled.set()
                self._sockets.cut()
                self._transport.abort()

    def close(self) -> None:
        """Drops everything. The caller must not be inside an operation."""
        self._close_generation()
        self._transport.end()

    def _close_generation(self, keeps: bool = False) -> None:
        """Drops what belongs to the generation; ``keeps``: but its connections."""
        if not keeps:
            with self._lock:
                self._cancelled.set()
                self._sockets.cut()
        if self._doorbell is not None:
            self._doorbell.close()
            self._doorbell = None
        self._is_prepared = False
        self._inboxes.clear()
        self._outboxes.clear()
        if keeps:
            return
        self._sent, self._sent_before = {}, {}
        self._groups = {}
        self._rosters = {}
        if self._mesh is not None:
            self._mesh.close()
            self._mesh = None
        self._transport.close()

    # ------------------------------------------------------------------ values between stages

    def post_receive(self, channel: Channel, source: int, tag: int) -> Incoming:
        """Posts the receive of a value from rank ``source``; several may be open, told apart by ``tag``.

        The buffer of (channel, source, tag) is reused: what was received into it must no longer be needed.
        """
        key = (channel, source, tag)
        inbox = self._inboxes.get(key)
        if inbox is None:
            inbox = self._inboxes[key] = _Inbox(_SMALL_BYTES, self._memory)
        elif inbox.layout is not None and inbox.message.nbytes != self._capacity(inbox.layout, source):
            inbox = self._inboxes[key] = _Inbox(self._capacity(inbox.layout, source), self._memory)
        with self._translated():
            work, end = receive_all(self._groups[channel], [inbox.message], source, tag * TAGS)
        return Incoming(key, inbox, work, end)

    def receive(self, incoming: Incoming) -> Value:
        """Waits for a posted value. It may share memory with the posted buffer: see :meth:`post_receive`."""
        inbox = incoming.inbox
        channel, source, tag = incoming.key
        with self._translated():
            incoming.end.wait(self._timeout)
            incoming.work.wait(self._timeout)
        if not inbox.read_header():
            raise self.damaged(source)
        assert inbox.layout is not None
        with self._translated():
            tensors = inbox.views if inbox.packed else self._transport.receive(channel, inbox.layout, source, tag)
        if not inbox.is_whole(tensors):
            raise self.damaged(source)
        # It was sent after this worker's message under that tag in the other direction had arrived.
        answered = (_OTHER[channel], source, tag)
        self._sent.pop(answered, None)
        self._sent_before.pop(answered, None)
        if self.device.type != "cpu":
            is_reused = inbox.packed
            tensors = [None if t is None else self._memory.on_device(t, is_reused) for t in tensors]
        value: Value = inbox.layout.value(tensors)
        return value

    def send(self, channel: Channel, value: Value, destination: int, tag: int) -> None:
        """Starts to send ``value`` to rank ``destination``; its tensors must not change.

        The previous message under (channel, destination, tag) must have arrived: in a schedule the next one depends
        on what was computed from it.
        """
        key = (channel, destination, tag)
        layout = Layout.of(value)
        outbox = self._outboxes.get(key)
        capacity = _SMALL_BYTES if outbox is None else self._capacity(outbox.layout, destination)
        packed = layout.packed_bytes <= capacity
        if outbox is None or outbox.layout != layout or outbox.packed != packed:
            outbox = self._outboxes[key] = _Outbox(layout, packed, self._memory)
        tensors: Sequence[Tensor | None] = value if isinstance(value, tuple) else (value,)
        if packed:
            for view, tensor in zip(outbox.views, tensors, strict=True):
                if view is not None and tensor is not None:
                    view.copy_(tensor.detach())
        outbox.add_sum(tensors)
        if self.alter_next is not None:
            tensors = self._altered(outbox, tensors)
        with self._translated():
            group = self._groups[channel]
            sent = send_all(group, [outbox.message], destination, tag * TAGS)
            if not packed:
                payload = [tensor.detach() for tensor in tensors if tensor is not None]
                sent += self._transport.send(channel, layout, payload, destination, tag)
        self._sent[key] = sent
        self._sent_before.pop(key, None)

    def _altered(self, outbox: _Outbox, tensors: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """What is sent instead of ``tensors``, as if it had changed on its way."""
        assert self.alter_next is not None
        altered: tuple[Tensor | None, ...] = self.alter_next(tuple(tensors))
        self.alter_next = None
        for view, tensor in zip(outbox.views, altered, strict=False):
            if view is not None and tensor is not None:
                view.copy_(tensor.detach())
        return altered

    def damaged(self, source: int) -> CommunicationError:
        """The error of a message from rank ``source`` that is not what was sent: it is sent again in the next attempt
        at the step, and if that fails, too, there is no connection.
        """
        if source in self._damagers:
            return UnreachableError((source,))
        self._damagers.add(source)
        return CommunicationError(f"A message of rank {source} is damaged: other bits arrived than were sent.")

    def buffers(self) -> list[Tensor]:
        """The buffers that stay from step to step; received values may share their memory."""
        return [box.message for boxes in (self._inboxes, self._outboxes) for box in boxes.values()]

    def end_step(self) -> None:
        """Releases what was sent before the last call: all participants of a step received it before they proceeded."""
        self._sent_before, self._sent = self._sent, {}
        self._damagers.clear()
        if not self._is_prepared:
            self._is_prepared = True
            self._transport.prepare()

    def _capacity(self, last: Layout, peer: int) -> int:
        """Size of the buffer for a tag whose last message had this layout; sender and receiver agree on it."""
        return min(max(last.packed_bytes, _SMALL_BYTES), self._transport.packed_bytes(peer))

    def exchange(self, peer: int, size: int, initiate: bool) -> None:
        """Sends ``size`` bytes to rank ``peer`` and waits until they come back, or sends them back."""
        if initiate:
            self.send(Channel.ACTIVATIONS, torch.empty(size, dtype=torch.uint8), peer, _EXCHANGE_TAG)
            self.receive(self.post_receive(Channel.GRADIENTS, peer, _EXCHANGE_TAG))
        else:
            value = self.receive(self.post_receive(Channel.ACTIVATIONS, peer, _EXCHANGE_TAG))
            self.send(Channel.GRADIENTS, value, peer, _EXCHANGE_TAG)

    # ------------------------------------------------------------------ within a stage, or several

    def all_reduce(self, tensor: Tensor) -> None:
        """Sums ``tensor`` in place over the live workers of this stage; the same bits on all of them."""
        if self._mesh is None or not self._mesh.takes(tensor):
            self.end_all_reduce(self.begin_all_reduce(tensor))
            return
        with self._translated():
            staged = tensor.cpu()
            try:
                self._mesh.sum(staged)
            except OSError as error:
                if error.errno in _OF_THIS_MACHINE:
                    raise
                raise ConnectionError(f"a sum over the stage: {error}") from error
            if staged is not tensor:
                tensor.copy_(staged)
        self.on_progress()

    def sums_at_once(self, tensor: Tensor) -> bool:
        """Whether :meth:`all_reduce` sums ``tensor`` without Gloo; the same on all workers of the stage."""
        return self._mesh is not None and self._mesh.takes(tensor)

    @property
    def sums_in_one_order(self) -> bool:
        """Whether sums of one group may wait for those of another that were begun before."""
        return self._transport.in_one_order

    @property
    def has_peers(self) -> bool:
        """Whether the stage has other live workers."""
        return self._stage.whole is not None

    @property
    def _stage(self) -> Group:
        return self._rosters.get(self._stage_name, Group())

    def begin_all_reduce(self, tensor: Tensor, stages: tuple[int, ...] = ()) -> Reduction:
        """Begins a sum as that of :meth:`all_reduce`, in the background; over the workers of ``stages``, which hold a
        tie, if they are given. Until :meth:`end_all_reduce` nobody may touch ``tensor``, which is contiguous.

        All workers of a group begin the same sums and broadcasts in the same order; with :attr:`sums_in_one_order` also
        those of several groups, in orders that agree.
        """
        return self._begin(_tie(stages) if stages else self._stage_name, tensor)

    def begin_broadcast(self, tensor: Tensor, stages: tuple[int, ...], source: int) -> Reduction:
        """The same, but ``tensor`` is overwritten with that of rank ``source``."""
        return self._begin(_tie(stages) if stages else self._stage_name, tensor, source)

    def _begin(self, roster: str, tensor: Tensor, source: int | None = None) -> Reduction:
        self._check()
        group = self._rosters.get(roster, Group())
        whole = group.whole
        if whole is None:
            return Reduction()
        if self._transport.takes(roster, tensor):
            with self._translated():
                begin, parts = self._transport.begin_collective, _parts(tensor, _DEVICE_CHUNK_BYTES)
                return Reduction(carried=tuple(begin(roster, part, source) for part in parts))
        options: Any = AllreduceOptions() if source is None else BroadcastOptions()
        if source is None:
            start, options.reduceOp = whole.allreduce, ReduceOp.SUM
        else:
            start, options.rootRank = whole.broadcast, group.places[source][1]
        with self._translated():
            staged = ((part, self._memory.staged(part)) for part in _parts(tensor))
            return Reduction(whole, tuple((part, copy, start([copy], options)) for part, copy in staged))

    def end_all_reduce(self, reduction: Reduction) -> None:
        """Waits until the tensor holds the sum, or what was broadcast."""
        for begun in reduction.carried:
            self._end_carried(begun)
        for part, staged, work in reduction.parts:
            self._end_part(reduction.group, part, staged, work)

    def abandon(self, reduction: Reduction) -> bool:
        """Gives up a reduction of an earlier generation, whose connections are closed. Returns whether its tensor's
        memory is free again: not if the sum goes on there, as one of Gloo's may.
        """
        for part, staged, work in reduction.parts:
            try:
                work.wait(_LAST_LOOK)
            except RuntimeError:  # its own error, or it goes on
                if not work.is_completed():
                    _keep_for_ever(reduction.group)
                    if staged is part:
                        return False
        return True

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Overwrites ``tensor`` in place with that of rank ``source`` of the same stage."""
        self.end_all_reduce(self.begin_broadcast(tensor, (), source))

    def _end_carried(self, begun: Any) -> None:
        with self._translated():
            self._transport.end_collective(begun)
        self.on_progress()

    def _end_part(self, group: Any, part: Tensor, staged: Tensor, work: Any) -> None:
        with self._translated():
            self._wait_for(group, work)
            if staged is not part:
                part.copy_(staged)
        self.on_progress()

    def _wait_for(self, group: Any, work: Any) -> None:
        """Waits for a collective, which may not notice that its sockets are shut down."""
        while True:
            aborted = self._aborted_generation >= self._generation
            try:
                work.wait(_LAST_LOOK if aborted else _LOOK)
                return
            except RuntimeError:
                if work.is_completed():
                    work.wait(_LOOK)  # raises its own error, or has ended right after the check
                    return
                if aborted:
                    _keep_for_ever(group)
                    self._check()

    # ------------------------------------------------------------------ transfers of state

    def carries(self, tensor: Tensor, destination: int) -> bool:
        """Whether ``tensor`` is better sent to rank ``destination`` from device to device."""
        is_here = tensor.device.type == self.device.type
        return is_here and tensor.nbytes > _SMALL_BYTES and self._transport.carries(destination)

    def send_part(self, part: Tensor, destination: int, number: int, carried: bool) -> tuple[Tensor, Any]:
        """Starts to send the bytes ``part`` to rank ``destination``, which knows how many there are.

        Args:
            part: contiguous; it must not change until it has arrived.
            destination: who gets it.
            number: of the parts that were sent before in this transfer; of :data:`PARTS_AT_ONCE` parts under way no
                two may have the same one, modulo that.
            carried: whether it goes from device to device; the other side must know that, too.

        Returns:
            What is sent, which is on the host unless it is carried; and what :meth:`await_arrival` waits for.
        """
        tag = _tag_of_part(number)
        with self._translated():
            staged = part if carried else self._memory.staged(part)
            (arrived,) = receive_all(self._groups[Channel.GRADIENTS], [], destination, tag)
            if carried:
                what = Channel.ACTIVATIONS, Layout.of(part), [part], destination, tag // TAGS
                sent = self._transport.send(*what)
            else:
                sent = send_all(self._groups[Channel.ACTIVATIONS], [staged], destination, tag)
        return staged, (arrived, sent)

    def await_arrival(self, under_way: Any) -> None:
        """Waits until what :meth:`send_part` sends has arrived."""
        arrived, _ = under_way  # what it has sent must be kept until here
        with self._translated():
            arrived.wait(self._timeout)
        self.on_progress()

    def post_part(self, part: Tensor, source: int, number: int) -> Any:
        """Posts the receive of ``part``, contiguous and on the CPU, from rank ``source``; ``number`` as there."""
        with self._translated():
            return receive_all(self._groups[Channel.ACTIVATIONS], [part], source, _tag_of_part(number))

    def await_part(self, posted: Any, source: int, number: int) -> None:
        """Waits for a part that was posted."""
        work, end = posted
        with self._translated():
            end.wait(self._timeout)
            work.wait(self._timeout)
            self._acknowledge(source, number)

    def receive_carried_part(self, part: Tensor, source: int, number: int) -> None:
        """Fills ``part``, contiguous and on the CPU, with one that goes from device to device."""
        with self._translated():
            what = Channel.ACTIVATIONS, Layout.of(part), source, _tag_of_part(number) // TAGS
            (found,) = self._transport.receive(*what)
            assert found is not None
            part.copy_(found)
            self._acknowledge(source, number)

    def _acknowledge(self, source: int, number: int) -> None:
        tag = _tag_of_part(number)
        self._sent[Channel.GRADIENTS, source, tag] = send_all(self._groups[Channel.GRADIENTS], [], source, tag)
        self.on_progress()

    # ------------------------------------------------------------------ errors

    def _check(self) -> None:
        if self._aborted_generation >= self._generation:
            raise CommunicationError(f"Generation {self._generation} was aborted.")

    @contextlib.contextmanager
    def _translated(self) -> Any:
        self._check()
        try:
            yield
        except (RuntimeError, OSError) as error:
            # Of the device, or of a DataLoader's process, whose end is told by a signal.
            if is_machine_error(error) and not isinstance(error, _OF_PEERS):
                raise
            raise CommunicationError(f"Generation {self._generation}: {error}") from error


def _keep_for_ever(group: Any) -> None:
    """Because its destructor would wait for the thread that is inside a collective."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _tie(stages: tuple[int, ...]) -> str:
    """The name of the group of the ties that ``stages`` hold."""
    return "-".join(["tie", *map(str, stages)])


def _parts(tensor: Tensor, most_bytes: int = _CHUNK_BYTES) -> tuple[Tensor, ...]:
    """A contiguous ``tensor`` in parts that collectives take at once."""
    parts: tuple[Tensor, ...] = tensor.view(-1).split(most_bytes // tensor.element_size())
    return parts


def _tag_of_part(number: int) -> int:
    return _TRANSFER_TAG + number % PARTS_AT_ONCE * TAGS
