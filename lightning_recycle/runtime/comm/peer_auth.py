"""Authenticated connections between the workers of a generation.

Concept: a *link* is one TCP connection between two workers, for one of the groups that both are in. One of the two
dials the other's :class:`Gate`. Before the connection is handed out, each side has proved to the other that it knows
the key of the run, for this generation, this group and these two ranks, and for random numbers that both chose a moment
ago. So a stranger without the key can open connections and send bytes, but takes no worker's place: nothing is read
after its first 64 bytes, and it is dropped.

Contract: :func:`connect` returns all links of a worker or none. It reads no byte beyond the handshake, so a link can be
used as if it had just been opened. A gate is open only while its worker connects: between two generations, and
during one, no worker listens.

The handshake (SKID3, with HMAC-SHA256) is a pair of generators without sockets, :func:`dialing` and :func:`accepting`:

    dialer -> acceptor   name of the link (a code that needs the key), random number
    acceptor -> dialer   random number, proof
    dialer -> acceptor   proof

The side that sends the final proof knows that the connection will be used, and the other learns it from that: an
attempt that takes too long can be given up and begun anew, without the two sides holding different connections.

Must not know: Gloo, what is sent over a link, the coordinator.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Generator, Mapping
from typing import NamedTuple, TypeAlias

from lightning_recycle.engines.discovery import port_range
from lightning_recycle.runtime.comm.sockets import address_of, listen

__all__ = ["Gate", "Link", "Refusal", "accepting", "connect", "dialing", "name_of"]

log = logging.getLogger(__name__)

_RANDOM = _CODE = 32  # bytes of a random number, and of a name or a proof
_OPENING, _ANSWER, _CLOSING = _CODE + _RANDOM, _RANDOM + _CODE, _CODE

_BACKLOG = 4096  # as many as Linux allows by default
_STRANGERS = 256  # callers without a name that are held at a time; the oldest goes
_ATTEMPT_SECONDS = 0.25  # after which a link is dialed again, and twice that the next time,
_LONGEST_ATTEMPT_SECONDS = 1.0  # up to this
_REDIAL_SECONDS = 0.02  # between two attempts
_LOOK_SECONDS = 0.02  # between checks for cancellation
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


class Link(NamedTuple):
    """A connection: the group that it is for, the rank that dials, and the rank that accepts."""

    group: str
    dialer: int
    acceptor: int

    @classmethod
    def between(cls, group: str, a: int, b: int) -> Link:
        """The link between the ranks ``a`` and ``b``; both get the same, and of many pairs each dials about half."""
        low, high = sorted((a, b))
        return cls(group, low, high) if (low + high) % 2 else cls(group, high, low)

    def other(self, rank: int) -> int:
        return self.acceptor if rank == self.dialer else self.dialer


# ---------------------------------------------------------------------- the handshake: pure


class Refusal(Exception):
    """The other side is not the worker that it should be."""


Talk: TypeAlias = Generator[bytes | int, bytes, Link]
"""One side of a handshake: yields bytes to send, or the number of bytes that it needs next; returns the link.

It raises :class:`Refusal` if the other side proves nothing."""


def dialing(key: bytes, generation: int, link: Link) -> Talk:
    """The side of the worker that dialed ``link``."""
    name, mine = name_of(key, generation, link), secrets.token_bytes(_RANDOM)
    yield name + mine
    answer = yield _ANSWER
    theirs, proof = answer[:_RANDOM], answer[_RANDOM:]
    if not hmac.compare_digest(proof, _proof(key, b"acceptor", name, mine, theirs)):
        raise Refusal("it answered without knowing the key of the run")
    yield _proof(key, b"dialer", name, mine, theirs)
    return link


def accepting(key: bytes, awaited: Mapping[bytes, Link]) -> Talk:
    """The side of the worker that was dialed and waits for the links ``awaited``, by their names."""
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
    """The name of ``link``, which only those who know the key can compute."""
    return hmac.digest(key, f"link {generation} {link.dialer} {link.acceptor} {link.group}".encode(), "sha256")


def _proof(key: bytes, side: bytes, name: bytes, dialers: bytes, acceptors: bytes) -> bytes:
    return hmac.digest(key, side + name + dialers + acceptors, "sha256")


# ---------------------------------------------------------------------- connecting


class Gate:
    """The port at ``host`` at which a worker is dialed by the others; close it once it is connected."""

    def __init__(self, host: str) -> None:
        self.socket = listen(host, _BACKLOG, port_range())
        self.socket.setblocking(False)

    @property
    def address(self) -> bytes:
        """Its address, for :func:`connect` in other workers."""
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
    """Connects all ``links`` of this worker at the same time.

    Args:
        gate: where the others dial this worker; it stays open.
        key: the key that all workers share.
        generation: distinguishes these links from earlier ones.
        rank: the rank of this worker; it is an end of each link.
        links: what to connect; the others connect their parts of it at about the same time.
        addresses: addresses of the others' gates, by rank.
        cancelled: event that ends connecting soon after it is set.
        seconds: limit.

    Returns:
        Sockets that do not block, without delay for small messages.

    Raises:
        InterruptedError: if ``cancelled`` was set.
        TimeoutError: names the ranks that could not be connected in time.
    """
    work = _Connecting(gate, key, generation, rank, set(links), addresses)
    try:
        asyncio.run(work.run(cancelled, seconds))
    except BaseException:
        for sock in work.done.values():
            sock.close()
        raise
    finally:
        if work.strangers:
            log.warning(
                "Generation %d: worker %d refused %d connections that were not from workers of this run; the first was "
                "from %s.",
                generation,
                rank,
                len(work.strangers),
                work.strangers[0],
            )
    return work.done


class _Connecting:
    """The connections of :func:`connect`, while it runs.

    Attributes:
        missing: the links that are not connected yet.
        done: the others.
        strangers: who was refused, and why.
    """

    def __init__(
        self,
        gate: Gate,
        key: bytes,
        generation: int,
        rank: int,
        missing: set[Link],
        addresses: Mapping[int, bytes],
    ) -> None:
        self.missing = missing
        self.done: dict[Link, socket.socket] = {}
        self.strangers: list[str] = []
        self._gate, self._key, self._generation, self._rank, self._addresses = gate, key, generation, rank, addresses
        self._awaited = {name_of(key, generation, link): link for link in missing if link.acceptor == rank}
        self._callers: dict[asyncio.Task[None], bool] = {}  # in the order in which they came; whether they have a name

    async def run(self, cancelled: threading.Event, seconds: float) -> None:
        """Returns when all links are connected."""
        deadline = time.monotonic() + seconds
        work = {asyncio.create_task(self._dial(link)) for link in self.missing if link.dialer == self._rank}
        work.add(asyncio.create_task(self._accept()))
        self._is_complete = asyncio.get_running_loop().create_future()
        while self.missing:
            if cancelled.is_set():
                raise InterruptedError(f"Connecting generation {self._generation} was cancelled.")
            if time.monotonic() > deadline:
                ranks = sorted({link.other(self._rank) for link in self.missing})
                raise TimeoutError(f"no connection to rank {', '.join(map(str, ranks))} within {seconds:g} s")
            awaited = {self._is_complete, *work}
            ended, _ = await asyncio.wait(awaited, timeout=_LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            for each in work & ended:
                each.result()  # raises what no other attempt can mend
            work -= ended

    def _connected(self, link: Link, sock: socket.socket) -> None:
        self.missing.discard(link)
        self.done[link] = sock
        if not self.missing:
            self._is_complete.set_result(None)

    async def _dial(self, link: Link) -> None:
        """Dials until it is connected: strangers may fill the other's queue for a moment."""
        host, port = self._addresses[link.acceptor].decode().rsplit(" ", 1)
        patience = _ATTEMPT_SECONDS
        while True:
            sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
            try:
                sock.setblocking(False)
                attempt = self._call(sock, (host, int(port)), dialing(self._key, self._generation, link))
                await asyncio.wait_for(attempt, patience)
            except (OSError, Refusal, asyncio.TimeoutError):
                sock.close()
            except asyncio.CancelledError:
                sock.close()
                raise
            else:
                self._connected(link, sock)
                return
            patience = min(2 * patience, _LONGEST_ATTEMPT_SECONDS)
            await asyncio.sleep(_REDIAL_SECONDS)

    async def _call(self, sock: socket.socket, address: tuple[str, int], talk: Talk) -> None:
        await asyncio.get_running_loop().sock_connect(sock, address)
        await _converse(sock, talk)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, (host, port, *_) = await loop.sock_accept(self._gate.socket)
            except OSError as error:
                # A connection may end before it is accepted; one who waits longer makes room for one who waits less.
                if error.errno in _OUT_OF_DESCRIPTORS:
                    self._evict(0)
                    await asyncio.sleep(_REDIAL_SECONDS)
                continue
            caller = asyncio.create_task(self._answer(sock, f"{host} port {port}"))
            self._callers[caller] = False
            self._evict(_STRANGERS)
            await asyncio.sleep(0)  # those that are connected get a turn

    def _evict(self, at_most: int) -> None:
        """Drops the oldest callers without a name if there are more than ``at_most``."""
        if len(self._callers) > at_most:
            nameless = [caller for caller, has_name in self._callers.items() if not has_name]
            for caller in nameless[: max(0, len(nameless) - at_most)]:
                caller.cancel()

    async def _answer(self, sock: socket.socket, peer: str) -> None:
        caller = asyncio.current_task()
        assert caller is not None

        def named() -> None:
            self._callers[caller] = True

        try:
            link = await _converse(sock, accepting(self._key, self._awaited), named)
            if link in self.missing:  # otherwise it is connected: this attempt was given up
                self._connected(link, sock)
        except Refusal as error:
            self.strangers.append(f"{peer}: {error}")
        except OSError:
            pass  # the other side has ended, or hung up to dial again
        except asyncio.CancelledError:
            if not self._callers[caller]:
                self.strangers.append(f"{peer}: it did not say who it is")
            raise
        finally:
            del self._callers[caller]
            if sock not in self.done.values():
                sock.close()


async def _converse(sock: socket.socket, talk: Talk, named: Callable[[], None] = lambda: None) -> Link:
    """Has the handshake over ``sock``; ``named``: called once the other side has said something right.

    Raises:
        Refusal: if it does not end well.
        OSError: if the connection has ended.
    """
    loop = asyncio.get_running_loop()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    wanted, has_name = next(talk), False
    try:
        while True:
            if isinstance(wanted, bytes):
                await loop.sock_sendall(sock, wanted)
                wanted = next(talk)
                continue
            received = b""
            while len(received) < wanted:
                data = await loop.sock_recv(sock, wanted - len(received))
                if not data:
                    raise ConnectionError("the other side hung up")
                received += data
            wanted = talk.send(received)
            if not has_name:
                has_name = True
                named()
    except StopIteration as end:
        link: Link = end.value
        return link
