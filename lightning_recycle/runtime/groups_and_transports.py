"""Process groups of a generation, their rendezvous, and transports beside Gloo.

A worker connects only with workers that share a group with it, so costs do not grow with the number of workers. A
*meshed* group connects all of its members, for collectives; any other serves messages between two workers, and each
member numbers the others by itself. Each connection has proved that it leads to a worker of this run
(:mod:`~lightning_recycle.runtime.worker_links`) before it is handed to Gloo.

Headers, shapes, tags and waiting are Gloo's, on every device. A payload, tensors too large for their header, goes by
Gloo, or by the :class:`Transport` between workers that it *carries* payloads for; sums and broadcasts of groups if it
*takes* them.

Gloo adds up around a ring, in twice as many rounds as there are workers, with two thread wake-ups each: four workers on
two cores spent 1.3 ms of processor time each for 66 numbers. In a :class:`SmallAllreduce` every worker sends its part
to all others, in one round in the calling thread, and adds up in the order of the workers: the same bits everywhere.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import platform
import re
import select
import socket
import struct
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo, Store  # type: ignore[attr-defined]

from lightning_recycle.arguments import BOOLEAN, Check, OptionGroup, choice, is_number, option, suggests_options
from lightning_recycle.errors import ConfigurationError, ReCycleError
from lightning_recycle.runtime.wire import Channel, ValueLayout, sum_of_bytes
from lightning_recycle.runtime.worker_links import (
    Connecting,
    Gate,
    Link,
    NoAnswerError,
    OpenSockets,
    borrowed,
    drop_everything,
    inode_of,
)

_DOORBELLS = "127.0.0.1"
_DEVICES = "127.0.0.2"  # higher than that of the doorbells
_LOCAL_CONNECT = timedelta(seconds=5)  # the kernel answers in microseconds
_EVENT = re.compile(rb"^tfd:\s*(\d+) events:\s*([0-9a-f]+) data:\s*([0-9a-f]+)", re.MULTILINE)
_EPOLL_ADD, _EPOLL_DELETE = 1, 2  # from sys/epoll.h; Python's epoll objects cannot keep an event's data
_EPOLL_EVENT = "=IQ" if platform.machine() == "x86_64" else "@IQ"  # the kernel packs it on x86-64 only
_TRANSPORT = "GLOO_DEVICE_TRANSPORT"
_CONNECTS_AT_ONCE = {"lazy_init": False} if "lazy_init" in (ProcessGroupGloo.create_device.__doc__ or "") else {}
"""Arguments of a device; torch before 2.7 lacks the option, and connects at once."""

# A process of a DataLoader must not collect a group of a past generation: its destructor joins threads of the parent.
os.register_at_fork(after_in_child=gc.freeze)


class UnsupportedError(RuntimeError):
    """Gloo or the system is not as expected: groups cannot use given connections."""


class Device:
    """One of Gloo's event loops, for groups over given connections.

    Gloo's own listening sockets accept anyone who sends the next of some consecutive numbers, and end the process if
    they run out of descriptors (torch 2.13: ``haveConnection`` and ``handleEvents`` in its
    ``transport/tcp/listener.cc``). So they are *muted*. Gloo connects to *doorbells*, listening sockets of its own
    process, and these connections are exchanged, under the same descriptors, for authenticated ones.

    How: Gloo's store gives this process's own address with the port of a doorbell per peer. It is lower than that of
    Gloo's device, and the process with the higher address dials. Once the group exists, the events of Gloo's epoll
    instance (``/proc/self/fdinfo``) show its interest in each descriptor; ``dup2`` puts the other connection in place,
    and the same event is registered again. Any surprise raises :class:`UnsupportedError` before anything relies on it.

    Private API: ``ProcessGroupGloo`` and its ``_Options``, a ``Store`` in Python, the layout of the address that Gloo
    stores, its use of epoll.
    """

    def __init__(self) -> None:
        transport = os.environ.get(_TRANSPORT, "TCP")
        if transport.upper() != "TCP":
            raise UnsupportedError(f"{_TRANSPORT} is {transport!r}")
        try:
            before = set(os.listdir("/proc/self/fd"))
            self._device = ProcessGroupGloo.create_device(hostname=_DEVICES, **_CONNECTS_AT_ONCE)
            self._epoll = self._mute(set(os.listdir("/proc/self/fd")) - before)
            self._try()
        except (OSError, RuntimeError) as error:
            raise UnsupportedError(str(error)) from error

    def _mute(self, opened: Iterable[str]) -> int:
        """Mutes the device's listening socket; returns its epoll instance's descriptor."""
        for epoll in map(int, opened):
            try:
                events = _events(epoll)
            except FileNotFoundError:  # the listing's own descriptor, closed by now
                continue
            for listener in events:
                with borrowed(listener) as sock:
                    if sock is not None and _listens_for_gloo(sock):
                        drop_everything(sock)
                        return epoll
        raise UnsupportedError(f"no epoll instance waits for connections to {_DEVICES}")

    def _try(self) -> None:
        """Creates a group of two, of which the other does not exist."""
        ours, theirs = socket.socketpair()
        with theirs:
            self.create_group(0, 2, {1: ours})

    def create_group(self, rank: int, size: int, links: Mapping[int, socket.socket]) -> tuple[Any, dict[int, int]]:
        """A group of ``size`` processes, this one number ``rank``; its sockets' inodes.

        ``links``: the connection to each other member, by its number; Gloo owns them afterwards, and a failure closes
        them. The inodes are by descriptor.
        """
        with contextlib.ExitStack() as stack:
            for link in links.values():
                stack.enter_context(link)
            doorbells = {peer: stack.enter_context(socket.create_server((_DOORBELLS, 0))) for peer in links}
            ports = {peer: int(doorbell.getsockname()[1]) for peer, doorbell in doorbells.items()}
            store = _Neighbours(rank, ports)
            options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices, options._threads, options._timeout = [self._device], 1, _LOCAL_CONNECT
            group = ProcessGroupGloo(store, rank, size, options)
            peers = {port: peer for peer, port in ports.items()}
            sockets = {}
            for descriptor, event in _events(self._epoll).items():
                with borrowed(descriptor) as sock:
                    peer = None if sock is None else peers.pop(_dialed_port(sock), None)
                    if sock is None or peer is None:
                        continue  # of Gloo's own, or of another group
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # no farewell
                    inode = inode_of(links[peer].fileno())
                    _replace_descriptor(self._epoll, descriptor, event, links[peer])
                sockets[descriptor] = inode  # Gloo closes it at once if its peer is gone
            if peers:
                raise UnsupportedError(f"Gloo holds no connection for {len(peers)} of {len(links)} peers")
            return group, sockets


class _Neighbours(Store):
    """The store of a group whose other processes all seem to be doorbells here."""

    def __init__(self, rank: int, ports: Mapping[int, int]) -> None:
        super().__init__()
        self._rank, self._ports = rank, ports
        self._address = b""

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        self._address = value

    def get(self, key: str) -> bytes:
        peer = int(key.rsplit("/", 1)[-1])
        return self._address if peer == self._rank else _with_address(self._address, _DOORBELLS, self._ports[peer])

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        pass


def _with_address(info: bytes, host: str, port: int) -> bytes:
    """Gloo's published address of a process, with another address in it.

    Layout (``Rank::bytes`` of its ``transport/tcp/context.cc``): length and characters of the machine's name, length of
    the address, ``sockaddr_storage``, a number, and further numbers.
    """
    try:
        (name_length,) = struct.unpack_from("=Q", info)
        (length,) = struct.unpack_from("=Q", info, 8 + name_length)
        start = 16 + name_length
        family, address = struct.unpack_from("=H2x4s", info, start)
    except struct.error as error:
        raise UnsupportedError(f"the address that Gloo stores is too short: {info!r}") from error
    if length != 136 or family != socket.AF_INET or address != socket.inet_aton(_DEVICES):
        raise UnsupportedError(f"the address that Gloo stores is not as expected: {info!r}")
    return info[: start + 2] + struct.pack("!H4s", port, socket.inet_aton(host)) + info[start + 8 :]


# ---------------------------------------------------------------------- descriptors of Gloo


_Event: TypeAlias = tuple[int, int]
"""An event of an epoll instance, and its data."""


def _events(epoll: int) -> dict[int, _Event]:
    with open(f"/proc/self/fdinfo/{epoll}", "rb") as file:
        return {int(fd): (int(mask, 16), int(data, 16)) for fd, mask, data in _EVENT.findall(file.read())}


def _listens_for_gloo(sock: socket.socket) -> bool:
    if sock.family != socket.AF_INET or not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return False
    return bool(sock.getsockname()[0] == _DEVICES)


def _dialed_port(sock: socket.socket) -> int:
    """The doorbell's port that ``sock`` is connected to; 0 if there is none."""
    with contextlib.suppress(OSError):  # not connected
        if sock.family == socket.AF_INET:
            host, port = sock.getpeername()
            return int(port) if host == _DOORBELLS else 0
    return 0


def _replace_descriptor(epoll: int, descriptor: int, event: _Event, link: socket.socket) -> None:
    """Puts ``link`` under ``descriptor``, with the same event in ``epoll``."""
    link.setblocking(False)
    if link.family != socket.AF_UNIX:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # Not left to dup2: a process that is forked now would keep the old connection, and its event, alive.
    _epoll_control(epoll, _EPOLL_DELETE, descriptor, None)
    os.dup2(link.fileno(), descriptor, inheritable=False)
    _epoll_control(epoll, _EPOLL_ADD, descriptor, event)


def _epoll_control(epoll: int, operation: int, descriptor: int, event: _Event | None) -> None:
    argument = None if event is None else struct.pack(_EPOLL_EVENT, *event)
    if _libc.epoll_ctl(epoll, operation, descriptor, argument) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"epoll_ctl: {os.strerror(number)}")


_libc = ctypes.CDLL(None, use_errno=True)

_CONNECT_SECONDS = 5.0  # once the addresses are known


class CommunicationError(ReCycleError):
    """A message could not be exchanged: a peer is gone, or the generation was aborted."""


class UnreachableError(CommunicationError):
    """This worker cannot reach the workers ``ranks``."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        super().__init__(f"There is no connection to the workers of rank {', '.join(map(str, ranks))}.")
        self.ranks = ranks


class Rendezvous(Protocol):
    """Store in which workers of a generation publish and look up addresses."""

    def publish(self, key: str, value: bytes) -> None: ...

    def lookup(self, keys: Sequence[str], cancelled: threading.Event) -> list[bytes]:
        """The values of ``keys``, once all are there; raises after ``cancelled`` is set."""


@dataclass(frozen=True)
class GroupPlan:
    """A process group of ``ranks``, in order; if not meshed, of a worker's partners.

    ``loop``: the number of its event loop; None for plain links without a process group. ``meshed``: all members are
    connected with each other.
    """

    name: str
    ranks: tuple[int, ...]
    loop: int | None = 0
    meshed: bool = True


@dataclass
class Group:
    """A process group, or the links of a plan without one.

    ``whole``: the same for collectives, if meshed. ``places``: the number of each member. ``links``: if planned, a
    non-blocking connection to each other member, by number, or by rank if not meshed.
    """

    process_group: Any = None
    whole: Any = None
    places: dict[int, int] = field(default_factory=dict)
    links: dict[int, socket.socket] = field(default_factory=dict)


class GroupFactory:
    """Creates the process groups of one worker, generation after generation.

    ``loops``: number of event loops; messages of different loops do not wait for each other. ``timeout``: of every
    operation. Raises ConfigurationError
    where Gloo cannot work over authenticated connections.
    """

    def __init__(
        self, rank: int, host: str, rendezvous: Rendezvous, key: bytes, loops: int, timeout: timedelta
    ) -> None:
        self._rank, self._host, self._rendezvous, self._key, self._timeout = rank, host, rendezvous, key, timeout
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
        check_links: bool,
        cancelled: threading.Event,
        sockets: Callable[[GroupPlan], OpenSockets],
    ) -> dict[str, Group]:
        """The groups of ``plans`` that have other members, by name.

        ``check_links``: raise UnreachableError for workers that do not answer. ``sockets`` gets each socket of a plan's
        group once it is Gloo's.
        """
        plans = [plan for plan in plans if len(plan.ranks) > 1]
        others = sorted({rank for plan in plans for rank in plan.ranks} - {self._rank})
        if not others:
            return {}
        prefix = f"generation{generation}/gate"

        rank = self._rank
        needed = [Link.between(plan.name, rank, other) for plan in plans for other in plan.ranks if other != rank]
        with contextlib.closing(Gate(self._host)) as gate:
            self._rendezvous.publish(f"{prefix}{rank}", gate.address)
            gates = self._rendezvous.lookup([f"{prefix}{other}" for other in others], cancelled)
            addresses = dict(zip(others, gates, strict=True))
            try:
                connecting = Connecting(gate, self._key, generation, rank, needed, addresses)
                connected = connecting.run(cancelled, _CONNECT_SECONDS)
            except NoAnswerError as error:
                if check_links and error.silent:
                    raise UnreachableError(error.silent) from error
                raise
        groups = {}
        with contextlib.ExitStack() as stack:
            for sock in connected.values():
                stack.enter_context(sock)
            for plan in plans:
                peers = {
                    plan.ranks.index(link.other(rank)): sock
                    for link, sock in connected.items()
                    if link.group == plan.name
                }
                if plan.loop is None:
                    names = range(len(plan.ranks)) if plan.meshed else plan.ranks
                    links = {names[peer]: sock.dup() for peer, sock in peers.items()}
                    sockets(plan).add({link.fileno(): inode_of(link.fileno()) for link in links.values()})
                    groups[plan.name] = Group(links=links)
                    continue
                group, opened = self._devices[plan.loop].create_group(plan.ranks.index(rank), len(plan.ranks), peers)
                group._set_default_timeout(self._timeout)
                sockets(plan).add(opened)
                places = {member: number for number, member in enumerate(plan.ranks)}
                groups[plan.name] = Group(group, group if plan.meshed else None, places)
        return groups

    def create_alone(self, loop: int) -> Any:
        """A process group of this worker alone, on event loop ``loop``."""
        return self._devices[loop].create_group(0, 1, {})[0]


PACKED_BYTES = 4 * 1024 * 1024
"""Above this, copying into one message costs more than a second message."""

_BUCKET_CAP_MB = 25.0  # as in DistributedDataParallel
_IS_MIB = Check(
    lambda value: value is None or is_number(value, 0.0, above=True),
    "give a number of MiB, more than 0, or None for 25",
)


@suggests_options
@dataclass(frozen=True)
class CommunicationOptions(OptionGroup):
    """How activations and gradients travel.

    Args:
        transport: what carries activations and gradients: "gloo", through the processors' memory, or "nccl"
            (experimental), from device to device. NCCL needs a CUDA device for every worker. It is tried before
            anything depends on it, and Gloo is used where it fails. NCCL has been tried with an imitation only, not
            with devices.
        bucket_cap_mb: the MiB of a bucket of gradients, as in ``DistributedDataParallel``; None for 25. The gradients
            of a stage are summed over its workers in buckets of at most that size (a larger gradient is one of its
            own), each as soon as the last backward of a step has completed it, while the rest is computed.
        standby_connections: whether NCCL's communicators for the next failure are begun in the background. Connecting
            again need not wait for them then. They take memory of the device.

    Raises:
        ConfigurationError: for values that cannot work.
    """

    transport: Literal["gloo", "nccl"] = option("gloo", choice("gloo", "nccl"))
    bucket_cap_mb: float | None = option(None, _IS_MIB)
    standby_connections: bool = option(True, BOOLEAN)

    @property
    def bucket_bytes(self) -> float:
        """The most bytes of a bucket of gradients."""
        return (_BUCKET_CAP_MB if self.bucket_cap_mb is None else self.bucket_cap_mb) * 2**20


Rosters: TypeAlias = Mapping[str, tuple[int, ...]]
"""The ranks of the members of groups, in order, by the groups' names."""


class Transport:
    """Base of transports, which carries nothing; abort ends waits in milliseconds.

    :meth:`connect` is called in a thread that may be left behind, :meth:`abort` in any; other methods in the thread
    that exchanges messages. ``connect_seconds``: limit of :meth:`connect` without progress.
    """

    connect_seconds = 0.0

    @property
    def in_one_order(self) -> bool:
        """Whether a collective waits for earlier ones of other groups."""
        return False

    def plans(self, ranks: tuple[int, ...], rosters: Rosters) -> Sequence[GroupPlan]:
        """Connections needed beside Gloo's, to reach ``ranks`` and ``rosters``."""
        return ()

    def connect(
        self,
        generation: int,
        rosters: Rosters,
        groups: Mapping[str, Group],
        rendezvous: Rendezvous,
        cancelled: threading.Event,
    ) -> None:
        """Connects with the workers of ``groups`` (:meth:`plans`), until ``cancelled``."""

    def packed_bytes(self, peer: int) -> int:
        """Largest value that travels to and from ``peer`` packed behind its header."""
        return PACKED_BYTES

    def carries(self, peer: int) -> bool:
        """Whether payloads to and from ``peer`` go this way; the same on both sides."""
        return False

    def send(
        self, channel: Channel, layout: ValueLayout, tensors: Sequence[Tensor], destination: int, tag: int
    ) -> None:
        raise NotImplementedError

    def receive(self, channel: Channel, layout: ValueLayout, source: int, tag: int) -> list[Tensor | None]:
        """Waits for the tensors of a value whose header has come."""
        raise NotImplementedError

    def takes(self, roster: str, tensor: Tensor) -> bool:
        """Whether collectives of ``tensor`` go this way; the same on all members."""
        return False

    def begin_collective(self, roster: str, tensor: Tensor, root: int | None = None) -> Any:
        """Begins to replace ``tensor`` by its sum over a group, or by rank ``root``'s.

        All members begin the same ones in the same order, across groups in orders that agree. Until
        :meth:`end_collective`, or the end of the generation, the contiguous ``tensor`` must not be touched.
        """
        raise NotImplementedError

    def end_collective(self, handle: Any) -> None:
        raise NotImplementedError

    def prepare(self) -> None:
        """Begins the next generation's connections in the background; called once in each."""

    def abort(self) -> None:
        """Called once ``cancelled`` is set; the owner of the sockets cuts them."""

    def close(self) -> None:
        """Drops all of the ended generation that the next one cannot use."""

    def end(self) -> None:
        """Drops everything; there is no next generation."""


_MOST_BYTES = 256 * 1024  # that a worker sends to all others together; above, Gloo is as fast or faster (measured)
_HEADER = struct.Struct("=QQQ8x")  # number of the sum, bytes that follow, their sum; a multiple of the largest item


class _SumMessages:
    """Buffers for sums of ``numel`` numbers: of this worker, and from each peer."""

    def __init__(self, numel: int, dtype: torch.dtype, rank: int, peers: Mapping[int, socket.socket]) -> None:
        size = _HEADER.size + numel * dtype.itemsize
        messages = {number: torch.empty(size, dtype=torch.uint8) for number in (rank, *peers)}
        self.bytes = {number: message.numpy().data for number, message in messages.items()}
        self.values = {number: message[_HEADER.size :].view(dtype) for number, message in sorted(messages.items())}
        self._data = {number: message[_HEADER.size :].numpy() for number, message in messages.items()}

    def total(self, number: int) -> int:
        """The sum of the bytes of a part, for its header."""
        return sum_of_bytes(self._data[number])


def _transfer(move: Callable[[socket.socket, memoryview], int], remaining: dict[socket.socket, memoryview]) -> None:
    """Sends or receives what is ``remaining`` by socket, without blocking."""
    for sock, view in list(remaining.items()):
        try:
            moved = move(sock, view)
        except BlockingIOError:
            continue
        if moved == 0:
            raise ConnectionResetError("the other side has ended the connection")
        if moved == len(view):
            del remaining[sock]
        else:
            remaining[sock] = view[moved:]


class SmallAllreduce:
    """The connections of a worker to all others of its stage.

    ``links``: by number, non-blocking; the mesh closes them. ``timeout``: seconds without progress after which a sum
    fails.
    """

    def __init__(self, rank: int, links: Mapping[int, socket.socket], timeout: float) -> None:
        self._rank, self._links, self._timeout = rank, dict(links), timeout
        self._sums = 0
        self._messages_by_size: dict[tuple[int, torch.dtype], _SumMessages] = {}

    def takes(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is small enough; the same on all workers."""
        return tensor.numel() * tensor.element_size() * len(self._links) <= _MOST_BYTES

    def sum(self, tensor: Tensor) -> None:
        """Overwrites ``tensor``, contiguous and on the CPU, with the sum over all workers.

        Raises OSError if a connection ends, nothing moves for too long, or a peer sums something else.
        """
        key = (tensor.numel(), tensor.dtype)
        messages = self._messages_by_size.get(key)
        if messages is None:
            messages = self._messages_by_size[key] = _SumMessages(*key, self._rank, self._links)
        expected = self._sums, tensor.numel() * tensor.element_size()
        self._sums += 1
        messages.values[self._rank].copy_(tensor.view(-1))
        _HEADER.pack_into(messages.bytes[self._rank], 0, *expected, messages.total(self._rank))
        self._exchange(messages)
        for peer in self._links:
            number, size, total = _HEADER.unpack_from(messages.bytes[peer])
            if (number, size) != expected:
                raise ConnectionError(f"sum {number} of {size} bytes came for {expected}")
            if total != messages.total(peer):
                raise ConnectionError(f"the part of worker {peer} is damaged: other bits arrived than were sent")
        first, second, *others = messages.values.values()
        total = torch.add(first, second)
        for other in others:
            total.add_(other)
        tensor.view(-1).copy_(total)

    def _exchange(self, parts: _SumMessages) -> None:
        sends = dict.fromkeys(self._links.values(), parts.bytes[self._rank])
        receives = {sock: parts.bytes[peer] for peer, sock in self._links.items()}
        while True:
            _transfer(socket.socket.send, sends)
            _transfer(socket.socket.recv_into, receives)
            if not sends and not receives:
                return
            self._await(sends, receives)

    def _await(self, sends: Collection[socket.socket], receives: Collection[socket.socket]) -> None:
        """Returns when bytes can be moved, or a connection has ended.

        With nothing left to send, it waits for one part at a time: a wake-up for each costs more than it helps.
        """
        awaited = receives if sends else list(receives)[:1]
        poll = select.poll()
        for sock in {*sends, *receives}:
            reads = select.POLLIN if sock in awaited else 0
            writes = select.POLLOUT if sock in sends else 0
            poll.register(sock, reads | writes | (select.POLLRDHUP if sock in receives else 0))
        if not poll.poll(1e3 * self._timeout):
            raise TimeoutError(f"no part of a sum has moved for {self._timeout:g} s")

    def close(self) -> None:
        for sock in self._links.values():
            sock.close()
