"""Gloo's process groups over connections that were made by others.

Gloo connects its processes by itself. Its listening sockets accept anyone who sends the next of some consecutive
numbers for the process that is expected, and end the whole process if they run out of descriptors (torch 2.13:
``haveConnection`` and ``handleEvents`` in its ``transport/tcp/listener.cc``). So they are *muted* here: nothing reaches
them. Instead Gloo connects to ports of its own process, where nothing listens
(:class:`~lightning_recycle.runtime.comm.sockets.Doorbell`), and these connections are exchanged, under the same
descriptors, for connections that are known to lead to the right peers.

How: the addresses that Gloo reads from its store are this process's own, with the port of a doorbell per peer. They are
lower than that of Gloo's device, and the process with the higher address dials. Once the group exists, the events of
Gloo's epoll instance (``/proc/self/fdinfo``) show what it waits for on each descriptor; ``dup2`` puts the other
connection in place, and the same event is registered again. :class:`Device` raises :class:`UnsupportedError` where any
of this is not as expected, before anything relies on it.

Private API used here: ``ProcessGroupGloo`` and its ``_Options``, a ``Store`` in Python, the layout of the address that
Gloo stores, its use of epoll.
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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import ProcessGroupGloo, Store  # type: ignore[attr-defined]

from lightning_recycle.runtime.comm.sockets import Doorbell, drop_everything, hang_up, inode_of

_DOORBELLS = "127.0.0.1"
_DEVICES = "127.0.0.2"  # higher than that of the doorbells
_LOCAL_CONNECT = timedelta(seconds=5)  # the kernel answers in microseconds
_EVENT = re.compile(rb"^tfd:\s*(\d+) events:\s*([0-9a-f]+) data:\s*([0-9a-f]+)", re.MULTILINE)
_EPOLL_ADD, _EPOLL_DELETE = 1, 2  # from sys/epoll.h; Python's epoll objects cannot keep an event's data
_EPOLL_EVENT = "=IQ" if platform.machine() == "x86_64" else "@IQ"  # the kernel packs it on x86-64 only
_TRANSPORT = "GLOO_DEVICE_TRANSPORT"
_CONNECTS_AT_ONCE = {"lazy_init": False} if "lazy_init" in (ProcessGroupGloo.create_device.__doc__ or "") else {}
"""Arguments of a device; torch before 2.7 has none for it, and connects at once."""

# A process of a DataLoader must not collect a group of a past generation: its destructor joins threads of the parent.
os.register_at_fork(after_in_child=gc.freeze)


class UnsupportedError(RuntimeError):
    """Gloo or the system is not as expected: groups cannot use given connections."""


class Device:
    """One of Gloo's event loops, for groups over given connections."""

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
        """Creates a group of ``size`` processes, in which this one has number ``rank``.

        Args:
            links: the connection to each of the others, by its number in the group. They are Gloo's afterwards, and
                closed if this fails.

        Returns:
            The group, and its sockets: descriptor -> inode.
        """
        with contextlib.ExitStack() as stack:
            for link in links.values():
                stack.enter_context(link)
            doorbells = {peer: stack.enter_context(contextlib.closing(Doorbell(_DOORBELLS))) for peer in links}
            store = _Neighbours(rank, {peer: doorbell.port for peer, doorbell in doorbells.items()})
            options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices, options._threads, options._timeout = [self._device], 1, _LOCAL_CONNECT
            group = ProcessGroupGloo(store, rank, size, options)
            peers = {doorbell.port: peer for peer, doorbell in doorbells.items()}
            sockets = {}
            for descriptor, event in _events(self._epoll).items():
                with _borrowed(descriptor) as sock:
                    peer = None if sock is None else peers.pop(_dialed_port(sock), None)
                    if sock is None or peer is None:
                        continue  # of Gloo's own, or of another group
                    hang_up(sock)
                    inode = inode_of(links[peer].fileno())
                    _exchange(self._epoll, descriptor, event, links[peer])
                sockets[descriptor] = inode  # Gloo closes it at once if its peer is gone
            if peers:
                raise UnsupportedError(f"Gloo holds no connection for {len(peers)} of {len(links)} peers")
            return group, sockets


def set_timeout(group: Any, timeout: timedelta) -> None:
    """Bounds every operation of ``group`` from now on."""
    group._set_default_timeout(timeout)


class _Neighbours(Store):
    """The store of a group whose other processes all seem to be doorbells here."""

    def __init__(self, rank: int, ports: Mapping[int, int]) -> None:
        super().__init__()
        self._rank, self._ports = rank, ports
        self._own = b""

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        self._own = value

    def get(self, key: str) -> bytes:
        peer = int(key.rsplit("/", 1)[-1])
        return self._own if peer == self._rank else _with_address(self._own, _DOORBELLS, self._ports[peer])

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        pass


def _with_address(info: bytes, host: str, port: int) -> bytes:
    """Gloo's published address of a process, with another address in it.

    It is ``Rank::bytes`` of its ``transport/tcp/context.cc``: the length and the characters of the name of the machine,
    the length of the address, ``sockaddr_storage`` and a number, and further numbers.
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


@dataclass(frozen=True)
class _Event:
    """An event that an epoll instance waits for, and the data that it hands out."""

    mask: int
    data: int


def _events(epoll: int) -> dict[int, _Event]:
    """The events that an epoll instance waits for, by descriptor."""
    with open(f"/proc/self/fdinfo/{epoll}", "rb") as file:
        return {int(fd): _Event(int(mask, 16), int(data, 16)) for fd, mask, data in _EVENT.findall(file.read())}


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
    argument = None if event is None else struct.pack(_EPOLL_EVENT, event.mask, event.data)
    if _libc.epoll_ctl(epoll, operation, descriptor, argument) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"epoll_ctl: {os.strerror(number)}")


_libc = ctypes.CDLL(None, use_errno=True)
