"""TCP connections between workers: reachability checks, and authenticated links.

Unaccepted connections fill the queue of a listening socket, until the kernel answers no more of them. A *filter* in the
kernel (classic BPF, without privileges) decides before that: :func:`drop_everything` lets nothing in; with
:func:`answer_only` the kernel answers every dialer and forgets it. A :class:`Doorbell` is a listening socket with such
a filter: even a busy or stopped process is reachable. :func:`unreachable` returns at once if all workers can be
reached, else at the end of its time, so that a lost packet does not count, and all get their results at the same time.

A *link* is one TCP connection between two workers, for one group of both. One of them dials the other's :class:`Gate`,
which is open only while its worker connects. Each side proves that it knows the key of the run, for this generation,
group and pair of ranks, and for fresh random numbers of both (SKID3, with HMAC-SHA256). A stranger takes no worker's
place: nothing is read after its first 64 bytes, and it is dropped. :func:`connect` returns all links of a worker or
none, and reads no byte beyond the handshake, a pair of generators without sockets:

    dialer -> acceptor   name of the link (a code that needs the key), random number
    acceptor -> dialer   random number, proof
    dialer -> acceptor   proof

The side that sends the final proof knows that the connection will be used, and the other learns it from that: a slow
attempt can be begun anew without the two sides holding different connections.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hmac
import logging
import os
import random
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Collection, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from lightning_recycle.engines.worker_environment import port_range
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


log = logging.getLogger(__name__)

_RANDOM = _CODE = 32  # bytes of a random number, and of a name or a proof
_OPENING, _ANSWER, _CLOSING = _CODE + _RANDOM, _RANDOM + _CODE, _CODE

_GATE_BACKLOG = 4096  # as many as Linux allows by default
_STRANGERS = 256  # callers without a name that are held at a time; the oldest goes
_ACCEPTED_AT_ONCE = 64  # before those that are connected get a turn
_ATTEMPT_SECONDS = 0.25  # after which a link is dialed again, and twice that the next time,
_LONGEST_ATTEMPT_SECONDS = 1.0  # up to this
_ATTEMPT_PAUSE = 0.02  # after an attempt that fails at once
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


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


# ---------------------------------------------------------------------- the handshake: pure


class Refusal(Exception):
    """The other side is not the expected worker."""


Talk: TypeAlias = Generator[bytes | int, bytes, Link]
"""One side of a handshake; raises :class:`Refusal` for a wrong proof.

Yields bytes to send, or the number of bytes needed next; returns the link.
"""


def dialing(key: bytes, generation: int, link: Link) -> Talk:
    """The dialing side of ``link``."""
    name, mine = name_of(key, generation, link), secrets.token_bytes(_RANDOM)
    yield name + mine
    answer = yield _ANSWER
    theirs, proof = answer[:_RANDOM], answer[_RANDOM:]
    if not hmac.compare_digest(proof, _proof(key, b"acceptor", name, mine, theirs)):
        raise Refusal("it answered without knowing the key of the run")
    yield _proof(key, b"dialer", name, mine, theirs)
    return link


def accepting(key: bytes, awaited: Mapping[bytes, Link]) -> Talk:
    """The accepting side; ``awaited``: this worker's links, by name."""
    opening = yield _OPENING
    name, theirs = opening[:_CODE], opening[_CODE:]
    link = awaited.get(name)
    if link is None:
        raise Refusal("it knows no name of a link that is awaited")
    mine = secrets.token_bytes(_RANDOM)
    yield mine + _proof(key, b"acceptor", name, theirs, mine)
    proof = yield _CLOSING
    if not hmac.compare_digest(proof, _proof(key, b"dialer", name, theirs, mine)):
        raise Refusal("it repeated the name of a link without knowing the key of the run")
    return link


def name_of(key: bytes, generation: int, link: Link) -> bytes:
    """The name of ``link``, which needs the key to compute."""
    return hmac.digest(key, f"link {generation} {link.dialer} {link.acceptor} {link.group}".encode(), "sha256")


def _proof(key: bytes, side: bytes, name: bytes, dialers: bytes, acceptors: bytes) -> bytes:
    return hmac.digest(key, side + name + dialers + acceptors, "sha256")


# ---------------------------------------------------------------------- connecting


class Gate:
    """The port at which a worker is dialed by the others, while it connects."""

    def __init__(self, host: str) -> None:
        self.socket = listen(host, _GATE_BACKLOG, port_range())
        self.socket.setblocking(False)

    @property
    def address(self) -> bytes:
        """Address for :func:`connect` in other workers."""
        return address_of(self.socket)

    def close(self) -> None:
        self.socket.close()


def connect(
    gate: Gate,
    key: bytes,
    generation: int,
    rank: int,
    links: Collection[Link],
    addresses: Mapping[int, bytes],
    cancelled: threading.Event,
    seconds: float,
) -> dict[Link, socket.socket]:
    """Non-blocking sockets, without delay, for all ``links`` of this worker at once.

    Raises InterruptedError if ``cancelled``, or TimeoutError that names the ranks without connection. ``addresses``:
    the others' gates.
    """
    with selectors.DefaultSelector() as selector:
        work = _Connecting(gate, key, generation, rank, set(links), addresses, selector)
        try:
            deadline = time.monotonic() + seconds
            while work.missing:
                if cancelled.is_set():
                    raise InterruptedError(f"Connecting generation {generation} was cancelled.")
                work.redial()
                for ready, _ in selector.select(_LOOK_SECONDS):
                    work.proceed(ready)
                if time.monotonic() > deadline and work.missing:
                    ranks = sorted({link.other(rank) for link in work.missing})
                    raise TimeoutError(f"no connection to rank {', '.join(map(str, ranks))} within {seconds:g} s")
            return work.take()
        finally:
            work.close()


@dataclass(eq=False)
class _Conversation:
    """A connection in handshake, for ``link`` if dialed here, else from ``peer``."""

    socket: socket.socket
    talk: Talk
    link: Link | None = None
    peer: str = ""
    deadline: float = 0.0  # of an attempt to dial
    named: bool = False  # the other side has said something right
    wanted: bytes | int = field(init=False)
    received: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        self.wanted = next(self.talk)

    def proceed(self) -> Link | None:
        """Sends and receives without blocking; returns the link at the end."""
        try:
            while True:
                if isinstance(self.wanted, bytes):
                    if self.socket.send(self.wanted) < len(self.wanted):  # an empty buffer holds much more
                        raise ConnectionError("the connection takes no data")
                    self.wanted = next(self.talk)
                else:
                    data = self.socket.recv(self.wanted - len(self.received))
                    if not data:
                        raise ConnectionError("the other side hung up")
                    self.received += data
                    if len(self.received) == self.wanted:
                        self.wanted = self.talk.send(bytes(self.received))
                        self.received.clear()
                        self.named = True
        except BlockingIOError:
            return None
        except StopIteration as end:
            link: Link = end.value
            return link


class _Connecting:
    """The connections of :func:`connect`, while it runs."""

    def __init__(
        self,
        gate: Gate,
        key: bytes,
        generation: int,
        rank: int,
        missing: set[Link],
        addresses: Mapping[int, bytes],
        selector: selectors.BaseSelector,
    ) -> None:
        self.missing = missing
        self._gate, self._key, self._generation, self._rank = gate, key, generation, rank
        self._addresses, self._selector = addresses, selector
        self._awaited = {name_of(key, generation, link): link for link in missing if link.acceptor == rank}
        self._done: dict[Link, socket.socket] = {}
        self._callers: dict[_Conversation, None] = {}  # in the order in which they came
        self._calls: dict[Link, _Conversation] = {}
        self._patience = dict.fromkeys(missing, _ATTEMPT_SECONDS)
        self._not_before = dict.fromkeys(missing, 0.0)
        self._strangers: list[str] = []
        selector.register(gate.socket, selectors.EVENT_READ)

    # dialing

    def redial(self) -> None:
        """Dials links without a dial under way, or with one for too long.

        Strangers may fill the other's queue for a moment.
        """
        now = time.monotonic()
        for link in self.missing:
            if link.dialer != self._rank or now < self._not_before[link]:
                continue
            call = self._calls.get(link)
            if call is not None:
                if now < call.deadline:
                    continue
                self._drop(call)
            self._not_before[link] = now + _ATTEMPT_PAUSE
            sock = dial(self._addresses[link.acceptor])
            if sock is None:
                continue
            call = _Conversation(
                sock, dialing(self._key, self._generation, link), link, deadline=now + self._patience[link]
            )
            self._patience[link] = min(2 * self._patience[link], _LONGEST_ATTEMPT_SECONDS)
            self._calls[link] = call
            self._selector.register(sock, selectors.EVENT_WRITE, call)

    # both

    def proceed(self, ready: selectors.SelectorKey) -> None:
        """Proceeds with a socket that is ready."""
        if ready.fileobj is self._gate.socket:
            self._accept()
        elif ready.data in self._callers or ready.data in self._calls.values():  # not dropped since
            self._converse(ready.data)

    def _converse(self, conversation: _Conversation) -> None:
        sock = conversation.socket
        try:
            link = conversation.proceed()
        except Refusal as error:
            if conversation.link is None:
                self._note(conversation, str(error))
            self._drop(conversation)
        except OSError:  # the other side has ended, or hung up to dial again; links are dialed again, too
            self._drop(conversation)
        else:
            if link is None:
                self._selector.modify(sock, selectors.EVENT_READ, conversation)
            elif link not in self.missing:
                self._drop(conversation)  # it is connected: this attempt was given up
            else:
                self._forget(conversation)
                self.missing.discard(link)
                self._done[link] = sock

    # accepting

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                sock, (host, port, *_) = self._gate.socket.accept()
            except BlockingIOError:
                return
            except OSError as error:
                # A connection may end before it is accepted; one who waits longer makes room for one who waits less.
                if error.errno in _OUT_OF_DESCRIPTORS and not self._evict(0):
                    return
                continue
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            caller = _Conversation(sock, accepting(self._key, self._awaited), peer=f"{host} port {port}")
            self._callers[caller] = None
            self._selector.register(sock, selectors.EVENT_READ, caller)
            self._converse(caller)  # perhaps it has spoken already
            self._evict(_STRANGERS)

    def _evict(self, at_most: int) -> bool:
        """Drops the oldest nameless callers beyond ``at_most``; whether there were any."""
        nameless = [caller for caller in self._callers if not caller.named] if len(self._callers) > at_most else []
        surplus = nameless[: max(0, len(nameless) - at_most)]
        for caller in surplus:
            self._note(caller, "it said nothing")
            self._drop(caller)
        return bool(surplus)

    # ending

    def _note(self, caller: _Conversation, why: str) -> None:
        self._strangers.append(f"{caller.peer}: {why}")

    def _forget(self, conversation: _Conversation) -> None:
        self._selector.unregister(conversation.socket)
        self._callers.pop(conversation, None)
        if conversation.link is not None and self._calls.get(conversation.link) is conversation:
            del self._calls[conversation.link]

    def _drop(self, conversation: _Conversation) -> None:
        self._forget(conversation)
        conversation.socket.close()

    def take(self) -> dict[Link, socket.socket]:
        """Hands out the links; :meth:`close` leaves them open."""
        done, self._done = self._done, {}
        return done

    def close(self) -> None:
        for caller in self._callers:
            if not caller.named and not caller.received:
                self._note(caller, "it said nothing")
        for conversation in (*self._callers, *self._calls.values()):
            conversation.socket.close()
        for sock in self._done.values():
            sock.close()
        if self._strangers:
            log.warning(
                "Generation %d: worker %d refused %d connections that were not from workers of this run; the first was "
                "from %s.",
                self._generation,
                self._rank,
                len(self._strangers),
                self._strangers[0],
            )
