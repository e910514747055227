"""Authenticated TCP connections between workers, and sockets of other owners.

A *link* is one TCP connection between two workers, for one group of both. One of them dials the other's :class:`Gate`,
which is open only while its worker connects, and names the link by a code that needs the key of the run. Then each side
proves, as to the coordinator (:class:`~lightning_recycle.control.network.connection.Handshake`), that it knows the key
for this generation, group and pair of ranks. A stranger takes no worker's place: nothing is read after its first 32
bytes, and it is dropped. :class:`Connecting` returns all links of a worker or none. The dialer proves last, so it knows
that the connection will be used, and the acceptor learns it from that: a slow attempt can be begun anew without the two
sides holding different connections.

The kernel answers a dialer even for a busy or stopped process. So a worker whose gate does not answer cannot be reached
(:class:`NoAnswerError`); any other missing link may have been too slow.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import hmac
import logging
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Collection, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from lightning_recycle.control.network.connection import (
    GREETING_BYTES,
    PROOF_BYTES,
    Handshake,
    Refused,
    Role,
)
from lightning_recycle.engines.worker_environment import port_range
from lightning_recycle.errors import ConfigurationError

log = logging.getLogger(__name__)

_T = TypeVar("_T")

# From asm-generic/socket.h; the socket module does not have it.
_SO_ATTACH_FILTER = 26

_DROP_EVERYTHING = struct.pack("HBBI", 0x06, 0, 0, 0)  # classic BPF: of each segment 0 bytes pass


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
        " one while it connects: give two for each worker of a machine, that no other program uses."
    )


def _run(main: Coroutine[Any, Any, _T]) -> _T:
    """Runs ``main`` in an event loop of its own, beside any loop of the user's code.

    ``asyncio.run()`` would take away the first, and refuse the second.
    """

    def run() -> _T:
        loop = asyncio.new_event_loop()
        with contextlib.closing(loop):
            return loop.run_until_complete(main)

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run()
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


async def _connected(address: bytes) -> socket.socket:
    """A non-blocking socket, without delay, that is connected to a :class:`Gate`."""
    host, port = address.decode().rsplit(" ", 1)
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    with _closed_on_error(sock):
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
    return sock


@contextlib.contextmanager
def _closed_on_error(sock: socket.socket) -> Iterator[None]:
    try:
        yield
    except BaseException:
        sock.close()
        raise


async def _ended(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancels ``tasks``, and returns when they have ended."""
    # Again and again: until Python 3.12 wait_for() loses a cancellation that comes when what it waits for has failed.
    while left := [task for task in tasks if not task.done()]:
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=_LOOK_SECONDS)
    await asyncio.gather(*tasks, return_exceptions=True)


# ---------------------------------------------------------------------- sockets of other owners


def drop_everything(sock: socket.socket) -> None:
    """Lets no segment reach ``sock``, nor sockets accepted by it."""
    program = ctypes.create_string_buffer(_DROP_EVERYTHING)
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program)))


def inode_of(descriptor: int) -> int:
    """The identity of a socket, unlike that of a later one under the same descriptor."""
    return os.fstat(descriptor).st_ino


@contextlib.contextmanager
def borrowed(descriptor: int) -> Iterator[socket.socket | None]:
    """The socket behind ``descriptor``, which keeps its owner; None if there is none.

    It is not duplicated, as others count descriptors.
    """
    try:
        sock = socket.socket(fileno=descriptor)
    except OSError:  # closed, or something else
        yield None
        return
    try:
        yield sock
    finally:
        sock.detach()


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


_LOOK_SECONDS = 0.02  # between checks for cancellation
_NAME_BYTES = 32
_GATE_BACKLOG = 4096  # as many as Linux allows by default
_STRANGERS = 256  # callers without a name that are held at a time; the oldest goes
_ACCEPTED_AT_ONCE = 64  # before those that are connected get a turn
_ATTEMPT_SECONDS = 0.25  # after which a link is dialed again, and twice that the next time,
_LONGEST_ATTEMPT_SECONDS = 1.0  # up to this
_ATTEMPT_PAUSE = 0.02  # after an attempt that fails at once
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
_SHORTAGE_SECONDS = 1.0  # without descriptors, with no stranger left to drop, until the worker gives up


class Link(NamedTuple):
    """A connection: its group, the rank that dials, and the rank that accepts."""

    group: str
    dialer: int
    acceptor: int

    @classmethod
    def between(cls, group: str, a: int, b: int) -> Link:
        """The link between ranks ``a`` and ``b``; each rank dials about half of its links."""
        low, high = sorted((a, b))
        return cls(group, low, high) if (low + high) % 2 else cls(group, high, low)

    def other(self, rank: int) -> int:
        return self.acceptor if rank == self.dialer else self.dialer

    def code(self, purpose: str, key: bytes, generation: int) -> bytes:
        """The link's "name" or "key" (``purpose``), computed with the key of the run."""
        text = f"{purpose} of link {generation} {self.dialer} {self.acceptor} {self.group}"
        return hmac.digest(key, text.encode(), "sha256")


# ---------------------------------------------------------------------- connecting


class Gate:
    """The port at which a worker is dialed by the others, while it connects."""

    def __init__(self, host: str) -> None:
        self.socket = listen(host, _GATE_BACKLOG, port_range())
        self.socket.setblocking(False)
        name, port, *_ = self.socket.getsockname()
        self.address = f"{name} {port}".encode()

    def close(self) -> None:
        self.socket.close()


class NoAnswerError(TimeoutError):
    """Links are missing; ``silent``: the ranks whose system has not answered."""

    def __init__(self, reason: str, silent: tuple[int, ...]) -> None:
        super().__init__(reason)
        self.silent = silent


async def _heard(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        if not (more := await asyncio.get_running_loop().sock_recv(sock, count - len(data))):
            raise ConnectionError("the other side hung up")
        data += more
    return data


async def _prove(sock: socket.socket, role: Role, key: bytes) -> None:
    """One side of a handshake; reads nothing beyond it. Raises Refused."""
    loop, handshake = asyncio.get_running_loop(), Handshake(role, key)
    await loop.sock_sendall(sock, handshake.greeting)
    for size in (GREETING_BYTES, PROOF_BYTES):
        await loop.sock_sendall(sock, handshake.receive(await _heard(sock, size)))


class Connecting:
    """Makes all connections of a worker at once.

    ``addresses``: the others' gates.
    """

    def __init__(
        self,
        gate: Gate,
        key: bytes,
        generation: int,
        rank: int,
        links: Collection[Link],
        addresses: Mapping[int, bytes],
    ) -> None:
        self._gate, self._key, self._generation, self._rank = gate, key, generation, rank
        self._addresses, self._missing = addresses, set(links)
        self._awaited = {link.code("name", key, generation): link for link in links if link.acceptor == rank}
        self._silent = {link.acceptor for link in links if link.dialer == rank}
        self._established: dict[Link, socket.socket] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._nameless: dict[asyncio.Task[Any], str] = {}  # callers, in the order in which they came
        self._strangers: list[str] = []
        self._shortage: tuple[float, OSError] | None = None  # since when there are no descriptors

    def run(self, cancelled: threading.Event, seconds: float) -> dict[Link, socket.socket]:
        """Non-blocking sockets, without delay, for all links.

        Raises:
            InterruptedError: if ``cancelled``.
            NoAnswerError: names the ranks without connection.
            OSError: if this process runs out of descriptors.
        """
        return _run(self._establish(cancelled, seconds))

    async def _establish(self, cancelled: threading.Event, seconds: float) -> dict[Link, socket.socket]:
        self._complete = asyncio.Event()
        self._tasks = {asyncio.create_task(self._dial(link)) for link in self._missing if link.dialer == self._rank}
        asyncio.get_running_loop().add_reader(self._gate.socket, self._accept)
        deadline = time.monotonic() + seconds
        try:
            while self._missing:
                if cancelled.is_set():
                    raise InterruptedError(f"Connecting generation {self._generation} was cancelled.")
                if self._shortage and time.monotonic() - self._shortage[0] > _SHORTAGE_SECONDS:
                    raise self._shortage[1]
                if time.monotonic() > deadline:
                    ranks = sorted({link.other(self._rank) for link in self._missing})
                    missing = ", ".join(map(str, ranks))
                    raise NoAnswerError(
                        f"no connection to rank {missing} within {seconds:g} s", tuple(sorted(self._silent))
                    )
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._complete.wait(), _LOOK_SECONDS)
            done, self._established = self._established, {}
            return done
        finally:
            self._strangers += [f"{peer}: it said nothing" for peer in self._nameless.values()]
            asyncio.get_running_loop().remove_reader(self._gate.socket)
            await _ended(self._tasks)
            for sock in self._established.values():
                sock.close()
            if self._strangers:
                log.warning(
                    "Generation %d: worker %d refused %d connections that were not from workers of this run; the first"
                    " was from %s.",
                    self._generation,
                    self._rank,
                    len(self._strangers),
                    self._strangers[0],
                )

    def _take(self, link: Link, sock: socket.socket) -> None:
        if link not in self._missing:
            sock.close()  # it is connected: this attempt was given up
            return
        self._missing.discard(link)
        self._established[link], self._shortage = sock, None
        if not self._missing:
            self._complete.set()

    async def _dial(self, link: Link) -> None:
        """Dials until ``link`` is there: strangers may fill the queue for a moment."""
        patience = _ATTEMPT_SECONDS
        while True:
            try:
                return self._take(link, await asyncio.wait_for(self._call(link), patience))
            except (Refused, asyncio.TimeoutError):
                pass
            except OSError as error:  # or the other side has ended, or hung up to be dialed again
                self._note_shortage(error)
            patience = min(2 * patience, _LONGEST_ATTEMPT_SECONDS)
            await asyncio.sleep(_ATTEMPT_PAUSE)

    async def _call(self, link: Link) -> socket.socket:
        sock = await _connected(self._addresses[link.acceptor])
        self._silent.discard(link.acceptor)
        with _closed_on_error(sock):
            await asyncio.get_running_loop().sock_sendall(sock, link.code("name", self._key, self._generation))
            await _prove(sock, Role.COORDINATOR, link.code("key", self._key, self._generation))
        return sock

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                sock, (host, port, *_) = self._gate.socket.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if self._note_shortage(error):
                    return
                continue  # a connection may end before it is accepted
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            caller = asyncio.create_task(self._answer(sock, f"{host} port {port}"))
            self._tasks.add(caller)
            self._nameless[caller] = f"{host} port {port}"
            caller.add_done_callback(self._forget)
            self._evict(_STRANGERS)

    async def _answer(self, sock: socket.socket, peer: str) -> None:
        try:
            with _closed_on_error(sock):
                link = self._awaited.get(await _heard(sock, _NAME_BYTES))
                if link is None:
                    raise Refused("it knows no name of a link that is awaited")
                self._nameless.pop(asyncio.current_task(), None)  # type: ignore[arg-type]
                await _prove(sock, Role.WORKER, link.code("key", self._key, self._generation))
                self._take(link, sock)
        except Refused as error:
            self._strangers.append(f"{peer}: {error}")
        except OSError:
            pass  # the other side has ended, or hung up to dial again

    def _forget(self, caller: asyncio.Task[Any]) -> None:
        self._tasks.discard(caller)
        self._nameless.pop(caller, None)

    def _note_shortage(self, error: OSError) -> bool:
        """Whether descriptors are used up, even once strangers have been dropped."""
        if error.errno not in _OUT_OF_DESCRIPTORS:
            return False
        if self._evict(0):
            self._shortage = None
            return False
        self._shortage = self._shortage or (time.monotonic(), error)
        return True

    def _evict(self, at_most: int) -> bool:
        """Drops the oldest nameless callers beyond ``at_most``; whether there were any."""
        surplus = list(islice(self._nameless, max(0, len(self._nameless) - at_most)))
        for caller in surplus:
            self._strangers.append(f"{self._nameless.pop(caller)}: it said nothing")
            caller.cancel()
        return bool(surplus)
