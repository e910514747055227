"""Process groups of a generation, and the rendezvous of their processes.

A worker connects only with workers that share a group with it, so costs do not grow with the number of workers. A
*meshed* group connects all of its members, for collectives; any other serves messages between two workers, and each
member numbers the others by itself. Each connection has proved that it leads to a worker of this run
(:mod:`~lightning_recycle.runtime.worker_links`) before it is handed to Gloo.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import platform
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol, TypeAlias

from torch.distributed import ProcessGroupGloo, Store  # type: ignore[attr-defined]

from lightning_recycle.errors import ConfigurationError, ReCycleError
from lightning_recycle.runtime.worker_links import (
    Gate,
    Link,
    NoAnswerError,
    OpenSockets,
    connect,
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
                with _borrowed(listener) as sock:
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
                with _borrowed(descriptor) as sock:
                    peer = None if sock is None else peers.pop(_dialed_port(sock), None)
                    if sock is None or peer is None:
                        continue  # of Gloo's own, or of another group
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # no farewell
                    inode = inode_of(links[peer].fileno())
                    _exchange(self._epoll, descriptor, event, links[peer])
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


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket | None]:
    """The socket behind ``descriptor``, which keeps its owner; None if there is none."""
    try:
        sock = socket.socket(fileno=descriptor)
    except OSError:  # closed, or something else
        yield None
        return
    try:
        yield sock
    finally:
        sock.detach()


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


def _exchange(epoll: int, descriptor: int, event: _Event, link: socket.socket) -> None:
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
                connected = connect(gate, self._key, generation, rank, needed, addresses, cancelled, _CONNECT_SECONDS)
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
