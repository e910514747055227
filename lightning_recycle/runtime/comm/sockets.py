"""TCP sockets: addresses, filters of connections, reachable workers.

Unaccepted connections fill the queue of a listening socket, until the kernel answers no more of them. A *filter* in the
kernel (classic BPF, without privileges) decides before that: :func:`drop_everything` lets nothing in; with
:func:`answer_only` the kernel answers every dialer and forgets it.

A :class:`Doorbell` is a listening socket with such a filter. The system answers for the process, so even a busy or
stopped process is reachable. :func:`unreachable` returns at once if all workers can be reached, else at the end of its
time, so that a lost packet or a slightly late peer does not count, and all get their results at the same time.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import random
import selectors
import socket
import struct
import threading
import time
from collections.abc import Iterable, Mapping

from lightning_recycle.errors import ConfigurationError

# From asm-generic/socket.h; the socket module does not have it.
_SO_ATTACH_FILTER = 26

# Classic BPF: (code, jump if true, jump if false, constant). A filter sees a segment from its TCP header on.
_LOAD_BYTE, _JUMP_IF_ANY_BIT, _JUMP_IF_EQUAL, _AND, _RETURN = 0x30, 0x45, 0x15, 0x54, 0x06
_EVERYTHING, _NOTHING = 0xFFFF_FFFF, 0  # bytes of a segment that pass
_FLAGS = 13  # offset of the flags in a TCP header
_SYN, _RST, _ACK = 0x02, 0x04, 0x10

_DROP_EVERYTHING = ((_RETURN, 0, 0, _NOTHING),)
_ANSWER_ONLY = (
    (_LOAD_BYTE, 0, 0, _FLAGS),
    (_JUMP_IF_ANY_BIT, 2, 0, _RST),
    (_AND, 0, 0, _SYN | _ACK),
    (_JUMP_IF_EQUAL, 0, 1, _SYN),
    (_RETURN, 0, 0, _EVERYTHING),
    (_RETURN, 0, 0, _NOTHING),
)


# ---------------------------------------------------------------------- addresses


def listen(host: str, backlog: int, ports: range | None = None) -> socket.socket:
    """A socket that listens at a free port of ``host``, a name or an address.

    Raises ConfigurationError if none of ``ports`` is free.
    """
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    if ports is None:
        return socket.create_server(address, family=family, backlog=backlog)
    # From any of them on: with many workers on a machine most of the first ones are taken.
    start = random.SystemRandom().randrange(len(ports))
    for port in (*ports[start:], *ports[:start]):
        try:
            return socket.create_server((address[0], port, *address[2:]), family=family, backlog=backlog)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise ConfigurationError(
        f"RECYCLE_PORTS={ports[0]}-{ports[-1]}: none of these {len(ports)} ports is free at {host}. A worker listens at"
        " two at a time: give three for each worker of a machine, that no other program uses."
    )


def address_of(listener: socket.socket) -> bytes:
    """Address of ``listener`` for :func:`dial` in other processes."""
    host, port = listener.getsockname()[:2]
    return f"{host} {port}".encode()


def dial(address: bytes) -> socket.socket | None:
    """Starts to connect; None if that fails at once, as without a route.

    The socket does not block; it is writable when it is connected or has failed.
    """
    host, port = address.decode().rsplit(" ", 1)
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setblocking(False)
    if sock.connect_ex((host, int(port))) in (0, errno.EINPROGRESS):
        return sock
    sock.close()
    return None


# ---------------------------------------------------------------------- filters


def drop_everything(sock: socket.socket) -> None:
    """Lets no segment reach ``sock``, nor sockets accepted by it."""
    _attach(sock, _DROP_EVERYTHING)


def answer_only(listener: socket.socket) -> None:
    """Has the system answer every dialer of ``listener``, and let nothing else in.

    No connection is ever complete. Beyond many incomplete ones Linux answers statelessly (SYN cookies, on by default).
    """
    _attach(listener, _ANSWER_ONLY)


def _attach(sock: socket.socket, program: tuple[tuple[int, int, int, int], ...]) -> None:
    instructions = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    descriptor = struct.pack("HP", len(program), ctypes.addressof(instructions))
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, descriptor)


# ---------------------------------------------------------------------- sockets of other owners


def inode_of(descriptor: int) -> int:
    """The identity of a socket, unlike that of a later one under the same descriptor."""
    return os.fstat(descriptor).st_ino


class OpenSockets:
    """Sockets of other owners, to be cut off all at once, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inodes: dict[int, int] = {}
        self._cut = False

    def add(self, inodes: Mapping[int, int]) -> None:
        """Adds sockets, descriptor -> inode; after :meth:`cut` they are cut off at once."""
        with self._lock:
            self._inodes.update(inodes)
            cut = self._cut
        if cut:
            _shut_down(inodes.items())

    def cut(self) -> None:
        """Ends the connections, in both directions; the descriptors stay open."""
        with self._lock:
            self._cut = True
            sockets = list(self._inodes.items())
        _shut_down(sockets)


def _shut_down(sockets: Iterable[tuple[int, int]]) -> None:
    for descriptor, inode in sockets:
        # Their owner closes them in threads of its own, and their numbers go to whatever is opened next: so take hold
        # of it first, and look whether it is the right one then. (The other way round, on a busy machine, aborts
        # shut down connections to DataLoader processes that were opened at that moment.)
        try:
            held = os.dup(descriptor)
        except OSError as error:
            if error.errno != errno.EBADF:
                raise  # out of descriptors: what waits cannot be interrupted, and this worker must end
            continue  # closed
        try:
            if inode_of(held) == inode:
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(held)) as sock:
                    sock.shutdown(socket.SHUT_RDWR)  # an OSError means that it is no longer connected
        finally:
            os.close(held)


CHECK_SECONDS = 1.4
"""For one worker; Linux resends the first packet of a connection after one second."""

_BACKLOG = 1024  # dialers that the system remembers; each worker makes one or a few
_REDIAL_SECONDS = 0.1  # between attempts that fail at once
_LOOK_SECONDS = 0.02  # between checks for cancellation


class Doorbell:
    """A listening socket at ``host`` and one of ``ports``, for reachability checks."""

    def __init__(self, host: str, ports: range | None = None) -> None:
        self._socket = listen(host, _BACKLOG, ports)
        with contextlib.suppress(OSError):  # without filters it answers as well, until its queue is full
            answer_only(self._socket)

    @property
    def address(self) -> bytes:
        """Address for :func:`unreachable` in other workers."""
        return address_of(self._socket)

    @property
    def port(self) -> int:
        port: int = self._socket.getsockname()[1]
        return port

    def close(self) -> None:
        self._socket.close()


def unreachable(
    addresses: Mapping[int, bytes], cancelled: threading.Event, seconds: float = CHECK_SECONDS
) -> tuple[int, ...]:
    """The ranks that could not be reached, in order; meaningless if ``cancelled``.

    ``addresses``: the other workers' doorbells, by rank; all are tried at the same time.
    """
    missing = set(addresses)
    dialled: dict[int, socket.socket] = {}
    deadline = time.monotonic() + seconds
    next_dial = 0.0
    with selectors.DefaultSelector() as selector:
        try:
            while missing and not cancelled.is_set():
                now = time.monotonic()
                if now >= next_dial:
                    next_dial = now + _REDIAL_SECONDS
                    for rank in missing - dialled.keys():
                        if (sock := dial(addresses[rank])) is not None:
                            dialled[rank] = sock
                            selector.register(sock, selectors.EVENT_WRITE, rank)
                for key, _ in selector.select(_LOOK_SECONDS):
                    with dialled.pop(key.data) as sock:
                        selector.unregister(sock)
                        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                            missing.discard(key.data)
                            hang_up(sock)
                if now >= deadline:  # after the check: this process may not have been running until now
                    break
        finally:
            for sock in dialled.values():
                sock.close()
    return tuple(sorted(missing))


def hang_up(sock: socket.socket) -> None:
    """Has ``sock``, connected to a doorbell, close without a farewell."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
