"""Connections of the control plane: messages over sockets, and the event loop.

Concept: messages are assembled from the pieces that arrive (:class:`Inbox`). A worker's threads block in
:class:`MessageConnection`. The coordinator has one thread for all workers, so a worker that stops in the middle of a
message must not hold it up: :class:`NonBlockingConnection` keeps what is incomplete, both ways. :class:`EventLoop`
calls back for readable connections, exits of processes, and wake-ups; events about connections that the same round
closed are dropped.

Contract: a broken connection is an OSError or EOFError, bytes that are no message a
:class:`~lightning_recycle.control.network.wire_format.BadMessageError`; after either it is to be closed. The
coordinator sends a sign of life to all at least every :data:`SIGN_SECONDS`, with the silence that it may keep
(:meth:`MessageConnection.limit_quiet`). A machine that does not answer breaks the connection, a merely stopped process
does not: its kernel answers.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import select
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, TypeAlias

from lightning_recycle.control.network.wire_format import (
    HEADER_BYTES,
    SCHEMA,
    VERSION,
    BadMessageError,
    Handshake,
    Refused,
    Role,
    decode,
    encode,
    parse_header,
)
from lightning_recycle.control.protocol.messages import TO_WORKERS

log = logging.getLogger(__name__)

_ANSWER_SECONDS = 30.0  # until a worker's machine that does not answer counts as gone
_READ = 64 << 10  # bytes
_LONG_READ = 1 << 20  # bytes, of a message that is known to have as many

SIGN_SECONDS = 10.0
"""Between two signs of life of the coordinator, at most."""

_QUIET_SECONDS = 60.0  # of silence until a worker gives the coordinator up, if that has not said another limit yet
_LOOKS = 10  # in that time; if this process was stopped itself, that counts as one of them

HANDSHAKE_SECONDS = 20.0
"""For the whole handshake: a busy machine starts many workers at the same time."""


class _Socket:
    """Socket options and ends of both sides."""

    def __init__(self, sock: socket.socket, inbox: Inbox) -> None:
        self.inbox = inbox
        self._socket = sock
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def local_host(self) -> str:
        return str(self._socket.getsockname()[0])

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # wakes a thread that reads; perhaps the other side was first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _break_without_answer(sock: socket.socket) -> None:
    """Breaks the connection when the other machine's kernel stops answering."""
    options = {"TCP_USER_TIMEOUT": 1000 * _ANSWER_SECONDS, "TCP_KEEPIDLE": _ANSWER_SECONDS / 2}
    options["TCP_KEEPINTVL"] = _ANSWER_SECONDS / 6
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in options.items():
        if hasattr(socket, name):  # not on every system; there the connection breaks later
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), int(value))


class MessageConnection(_Socket):
    """A worker's end: :meth:`send` in any thread, :meth:`receive` in one.

    ``heard``: when something last arrived, in seconds of the monotonic clock.
    """

    def __init__(self, sock: socket.socket, inbox: Inbox, quiet: float = _QUIET_SECONDS) -> None:
        super().__init__(sock, inbox)
        self.heard = time.monotonic()
        self._quiet = 0.0
        self.limit_quiet(quiet)
        self._send_lock = threading.Lock()

    def limit_quiet(self, seconds: float) -> None:
        """Bounds silence: :meth:`receive` fails after ``seconds`` without a message."""
        if seconds == self._quiet:
            return
        self._quiet, look = seconds, max(1e-3, seconds / _LOOKS)
        option = struct.pack("ll", int(look), int(look % 1 * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, option)

    def abandon(self) -> None:
        """Closes it, also while another thread uses it."""
        with contextlib.suppress(OSError):  # perhaps the other side was first
            self._socket.shutdown(socket.SHUT_RDWR)
        with self._send_lock:  # who sends has noticed: its descriptor may become that of another connection now
            self._socket.close()

    def send(self, message: Any) -> None:
        """Sends a message.

        Raises OSError when the other side is gone, ReCycleError for a message that cannot be sent.
        """
        self.send_bytes(encode(message))

    def send_bytes(self, frame: bytes | bytearray) -> None:
        """Sends the bytes of frames; raises OSError when the other side is gone."""
        with self._send_lock:
            self._socket.sendall(frame)

    def receive(self) -> Any:
        """Blocks for the next message.

        Raises EOFError or OSError when the other side is gone, and BadMessageError.
        """
        looks = 0
        while (message := self.inbox.take()) is None:
            try:
                data = self._socket.recv(max(_READ, min(self.inbox.missing, _LONG_READ)))
            except BlockingIOError:
                looks += 1
                if looks >= _LOOKS:
                    raise TimeoutError(f"the other side was silent for {self._quiet:g} s") from None
                continue
            looks = 0
            if not data:
                raise EOFError
            self.heard = time.monotonic()
            self.inbox.feed(data)
        return message


class NonBlockingConnection(_Socket):
    """The coordinator's end, used by its thread alone.

    ``unsent_since``: since when unsent frames wait, in seconds of the monotonic clock; None if all was sent.
    """

    def __init__(self, sock: socket.socket, inbox: Inbox) -> None:
        super().__init__(sock, inbox)
        sock.setblocking(False)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            _break_without_answer(sock)
        self.unsent_since: float | None = None
        self._unsent: deque[memoryview] = deque()

    def read(self) -> int:
        """Reads a bounded part of what has arrived into the inbox; returns its bytes.

        Raises EOFError or OSError when the other side is gone.
        """
        try:
            data = self._socket.recv(max(_READ, min(self.inbox.missing, _LONG_READ)))
        except (BlockingIOError, InterruptedError):
            return 0
        if not data:
            raise EOFError
        self.inbox.feed(data)
        return len(data)

    def send(self, message: Any) -> None:
        self.send_frame(encode(message))

    def send_frame(self, frame: bytes | bytearray) -> None:
        """Sends a frame as far as the other side takes it; the rest is for :meth:`flush`.

        Raises OSError when the other side is gone.
        """
        self._unsent.append(memoryview(frame))
        self.flush()

    def flush(self) -> None:
        """Sends the rest as far as it is taken; raises like :meth:`send_frame`."""
        while self._unsent:
            data = self._unsent.popleft()
            try:
                sent = self._socket.send(data)
            except (BlockingIOError, InterruptedError):
                self._unsent.appendleft(data)
                if self.unsent_since is None:
                    self.unsent_since = time.monotonic()
                return
            self.unsent_since = None
            if sent < len(data):
                self._unsent.appendleft(data[sent:])
        self.unsent_since = None

    def stalled(self, now: float) -> float:
        """Seconds for which the other side has taken nothing of its unsent frames."""
        return 0.0 if self.unsent_since is None else now - self.unsent_since

    def forgive(self, now: float) -> None:
        """Restarts the clock of unsent frames: this process could not send until now."""
        if self.unsent_since is not None:
            self.unsent_since = now

    def part(self, *words: Any, seconds: float) -> None:
        """Sends last ``words``, for at most ``seconds``, and closes the connection."""
        with contextlib.suppress(OSError):  # it is gone already
            for message in words:
                self.send(message)
            self.flush_within(seconds)
        self.close()

    def flush_within(self, seconds: float) -> None:
        """Waits at most ``seconds`` until all is sent; raises like :meth:`send_frame`."""
        deadline = time.monotonic() + seconds
        self.flush()
        while self._unsent and (left := deadline - time.monotonic()) > 0:
            select.select([], [self._socket], [], left)
            self.flush()


def connect(address: tuple[str, int], key: bytes, timeout: float = HANDSHAKE_SECONDS) -> MessageConnection:
    """A worker's connection to the coordinator at ``address``, after the handshake.

    ``timeout``: seconds for the connection and the whole handshake.

    Raises:
        VersionMismatch: if the coordinator runs another version.
        Refused: if it has another key, or none listens there.
        OSError: if it cannot be reached.
    """
    deadline = time.monotonic() + timeout
    sock = socket.create_connection(address, timeout=timeout)
    handshake = Handshake(Role.WORKER, key, VERSION, SCHEMA)
    try:
        sock.sendall(handshake.greeting)
        for data in _pieces(sock, deadline, handshake):
            sock.sendall(handshake.receive(data))
        sock.settimeout(None)
        return MessageConnection(sock, Inbox(TO_WORKERS, handshake.rest))
    except BaseException:
        sock.close()
        raise


def _pieces(sock: socket.socket, deadline: float, handshake: Handshake) -> Iterator[bytes]:
    """Bytes that arrive until ``handshake`` is done."""
    while not handshake.done:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the coordinator did not finish the handshake in time")
        sock.settimeout(left)
        data = sock.recv(4096)
        if not data:
            why = "it has another key" if handshake.met else "it has too many strangers at the moment, or is ending"
            raise Refused(f"the coordinator closed the connection during the handshake; perhaps {why}")
        yield data


class Inbox:
    """Assembles messages from pieces.

    ``expects``: the allowed types; a header of another type is an error before its body is read.
    """

    def __init__(self, expects: Collection[type[Any]], data: bytes = b"") -> None:
        self.expects = expects
        self._buffer = bytearray(data)
        self._announced: tuple[type[Any], int] | None = None

    @property
    def missing(self) -> int:
        """Number of bytes of the current message that are known to be missing."""
        if self._announced is None:
            return max(0, HEADER_BYTES - len(self._buffer))
        return max(0, self._announced[1] - len(self._buffer))

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def take(self) -> Any | None:
        """The next complete message, or None; raises BadMessageError for any other."""
        if self._announced is None:
            if len(self._buffer) < HEADER_BYTES:
                return None
            self._announced = parse_header(self._take(HEADER_BYTES))
            if self._announced[0] not in self.expects:
                raise BadMessageError(f"a {self._announced[0].__name__} may not be sent here")
        kind, size = self._announced
        if len(self._buffer) < size:
            return None
        with memoryview(self._buffer) as view, view[:size] as body:
            message = decode(kind, body)
        del self._buffer[:size]
        self._announced = None
        return message

    def _take(self, size: int) -> bytes:
        taken = bytes(self._buffer[:size])
        del self._buffer[:size]
        return taken


_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 0.5  # seconds between two attempts
_ATTEMPT_SECONDS = 5.0  # for one; a machine that does not answer may be another one by the next


def connections(
    address: tuple[str, int], key: bytes, seconds: float, is_wanted: Callable[[], bool]
) -> Iterator[MessageConnection]:
    """Connections to ``address`` by ``key``, one after the other, for ``seconds``."""
    deadline, pause = time.monotonic() + seconds, _FIRST_PAUSE
    while is_wanted() and (left := deadline - time.monotonic()) > 0:
        # Refused: the one before may still be ending, or another one may be there for a moment.
        with contextlib.suppress(OSError, Refused):
            yield connect(address, key, timeout=min(left, _ATTEMPT_SECONDS))
        time.sleep(pause * random.uniform(0.5, 1.0))
        pause = min(1.5 * pause, _LONGEST_PAUSE)


# ---------------------------------------------------------------------- the event loop

_Found: TypeAlias = "Sequence[tuple[selectors.SelectorKey, int]]"


class EventLoop:
    """Calls back for watched sources.

    ``on_wake``: called in the loop's thread after :meth:`wake`, once for several calls.
    """

    def __init__(self, on_wake: Callable[[], None]) -> None:
        self._selector = selectors.DefaultSelector()
        self._on_wake = on_wake
        self._reader, self._writer = os.pipe()
        self._lock = threading.Lock()
        self.watch(self._reader, self._drain)

    def wake(self) -> None:
        """Makes the loop call ``on_wake``. Callable from any thread, also after the end."""
        with self._lock:
            if self._writer >= 0:
                os.write(self._writer, b"x")

    def _drain(self) -> None:
        os.read(self._reader, 4096)
        self._on_wake()

    # ------------------------------------------------------------------ what is watched

    def watch(self, source: int | NonBlockingConnection, callback: Callable[[], object]) -> None:
        """Calls ``callback`` whenever ``source`` can be read from."""
        self._selector.register(source, selectors.EVENT_READ, callback)

    def forget(self, source: int | NonBlockingConnection) -> None:
        """Watches ``source`` no longer; it must be watched."""
        self._selector.unregister(source)

    def watches(self, source: int | NonBlockingConnection) -> bool:
        return source in self._selector.get_map()

    def watch_unsent(self, connection: NonBlockingConnection) -> None:
        """Watches until ``connection`` takes its unsent frames."""
        key = self._selector.get_key(connection)
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent_since is not None else 0)
        if events != key.events:
            self._selector.modify(connection, events, key.data)

    # ------------------------------------------------------------------ one round

    def select(self, timeout: float) -> _Found:
        """Waits at most ``timeout`` seconds for something to :meth:`dispatch`."""
        return self._selector.select(timeout)

    def dispatch(self, found: _Found) -> None:
        for key, events in found:
            if not self._is_current(key):
                continue
            if events & selectors.EVENT_WRITE:
                self._flush(key.fileobj)
                if not self._is_current(key):
                    continue
            if events & selectors.EVENT_READ:
                key.data()

    def _is_current(self, key: selectors.SelectorKey) -> bool:
        """Whether an event's connection was not closed or replaced in the same round."""
        found = self._selector.get_map().get(key.fd)
        return found is not None and (found.fileobj, found.data) == (key.fileobj, key.data)

    def _flush(self, connection: Any) -> None:
        with contextlib.suppress(OSError):  # whoever reads from it sees that it is gone
            connection.flush()
        self.watch_unsent(connection)

    # ------------------------------------------------------------------ the end

    def flush_all(self, seconds: float) -> None:
        """Waits until all connections have taken their frames, at most ``seconds``."""
        deadline = time.monotonic() + seconds
        for connection in self._connections():
            with contextlib.suppress(OSError):  # it is the end; a worker that is gone needs no message
                connection.flush_within(max(0.0, deadline - time.monotonic()))

    def close_connections(self, keep: Collection[NonBlockingConnection] = ()) -> None:
        for connection in self._connections():
            if connection not in keep:
                self.forget(connection)
                connection.close()

    def close(self) -> None:
        """Closes all connections that are watched, and itself."""
        self.close_connections()
        self._selector.close()
        with self._lock:
            for descriptor in (self._reader, self._writer):
                os.close(descriptor)
            self._writer = -1

    def _connections(self) -> list[NonBlockingConnection]:
        keys = list(self._selector.get_map().values())
        return [key.fileobj for key in keys if isinstance(key.fileobj, NonBlockingConnection)]
