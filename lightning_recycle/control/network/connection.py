"""Connections of the control plane: a handshake, frames of messages, sockets.

*Handshake*: each side sends a greeting (version, schema of messages, random number) at once. The worker answers with an
HMAC-SHA256 of its role and both greetings under the key, then the coordinator with its own: a proof is good for one
connection, direction and version, and the key is never sent. Before the proof only bytes of a fixed number are read.

*Frame*: a header (message type, length) and a body of fields, msgpack with the messages' type hints as the schema.
Decoding makes only data of declared types: no byte from the network names a class or function, so none can run code.

*Sockets*: messages are assembled from the pieces that arrive (:class:`FrameBuffer`). A worker's threads block in
:class:`MessageConnection`. The coordinator has one thread for all workers, so a worker that stops in the middle of a
message must not hold it up: :class:`NonBlockingConnection` keeps what is incomplete, both ways.

Contract: a broken connection is an OSError or EOFError, bytes that are no message a :class:`BadMessageError`; after
either it is to be closed. The coordinator sends a sign of life to all at least every :data:`SIGN_SECONDS`, with the
silence that it may keep (:meth:`MessageConnection.limit_quiet`). A machine that does not answer breaks the connection,
a merely stopped process does not: its kernel answers.

Must not know: meanings of messages.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import logging
import numbers
import os
import random
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from enum import Enum
from typing import Any

import msgspec

from lightning_recycle.arguments import __version__
from lightning_recycle.control.protocol.messages import TO_WORKERS, TYPES
from lightning_recycle.errors import ControlPlaneError, ReCycleError

log = logging.getLogger(__name__)


# ---------------------------------------------------------------------- frames


class BadMessageError(ControlPlaneError):
    """Bytes that are no message, or one that may not come here; ends a connection."""


_HEADER = struct.Struct(">HQ")  # number of the message's type, bytes of its body
HEADER_BYTES = _HEADER.size

_NUMBERS = {message: number for number, message in enumerate(TYPES)}
_DECODERS = {message: msgspec.msgpack.Decoder(message) for message in TYPES}

SCHEMA: bytes = hashlib.sha256(
    json.dumps(msgspec.json.schema_components(TYPES), sort_keys=True, default=repr).encode()
).digest()[:16]
"""A digest of all messages, their fields and types: equal on two sides that understand each other."""


def encode(message: Any) -> bytearray:
    """The frame of ``message``; raises ReCycleError for fields of other types."""
    frame = bytearray(HEADER_BYTES)
    try:
        _ENCODER.encode_into(message, frame, HEADER_BYTES)
    except (TypeError, OverflowError, ValueError) as error:
        raise ReCycleError(f"{message!r:.500} cannot be sent: {error}. Give plain numbers and strings.") from error
    _HEADER.pack_into(frame, 0, _NUMBERS[type(message)], len(frame) - HEADER_BYTES)
    return frame


def parse_header(header: bytes | bytearray | memoryview) -> tuple[type[Any], int]:
    """The message type and the bytes of its body; BadMessageError if unknown."""
    number, size = _HEADER.unpack(header)
    if number >= len(TYPES):
        raise BadMessageError(f"message type {number} does not exist")
    return TYPES[number], size


def decode(kind: type[Any], body: bytes | bytearray | memoryview) -> Any:
    """The message of type ``kind`` with the given body; BadMessageError if it is none."""
    try:
        return _DECODERS[kind].decode(body)
    # RecursionError: nested too deeply. ReCycleError: a grid that cannot be.
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError, ReCycleError) as error:
        raise BadMessageError(f"no {kind.__name__}: {error}") from error


def _to_plain_types(value: Any) -> Any:
    """Converts NumPy scalars and subclasses of msgpack types to msgpack types."""
    conversions: tuple[tuple[type[Any], Callable[[Any], Any]], ...] = (
        (numbers.Integral, int),
        (numbers.Real, float),
        (str, str),
        (bytes, bytes),
    )
    for kind, convert in conversions:
        if isinstance(value, kind):
            return convert(value)
    raise TypeError(f"a {type(value).__name__} is no plain data")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_to_plain_types)


# ---------------------------------------------------------------------- the handshake


_MAGIC = b"recycle\x00"
_GREETING = struct.Struct(">8s32s16s32s")  # magic, version, schema, random number
GREETING_BYTES, PROOF_BYTES = _GREETING.size, 32


class Refused(ControlPlaneError):
    """The other side does not know the key, or speaks another protocol."""


class VersionMismatch(Refused):
    """The other side runs another version of this package."""


class Role(Enum):
    """Side of a connection; part of the proof, so no side is answered with its own.

    The worker proves first: the coordinator's proof shows that the connection will be used.
    """

    WORKER = b"worker"
    COORDINATOR = b"coordinator"

    @property
    def other(self) -> Role:
        return Role.COORDINATOR if self is Role.WORKER else Role.WORKER


class Handshake:
    """One side of one handshake.

    Attributes:
        greeting: the bytes to send first.
        done: whether the other side has proved the key.
        rest: bytes that arrived after its proof.
    """

    def __init__(self, role: Role, key: bytes) -> None:
        self.greeting = _GREETING.pack(_MAGIC, __version__.encode()[:32], SCHEMA, os.urandom(32))
        self.done = False
        self.rest = b""
        self._role = role
        self._key = key
        self._input = b""
        self._transcript = b""

    @property
    def met(self) -> bool:
        """Whether the other side has announced the same version."""
        return bool(self._transcript)

    def receive(self, data: bytes) -> bytes:
        """Takes in what arrived; returns what to send.

        Raises VersionMismatch for another version, Refused for another protocol or key.
        """
        self._input += data
        answer = b""
        if not self._transcript:
            if not _MAGIC.startswith(self._input[: len(_MAGIC)]):
                raise Refused("the other side is no lightning_recycle")
            if len(self._input) < GREETING_BYTES:
                return answer
            greeting, self._input = self._input[:GREETING_BYTES], self._input[GREETING_BYTES:]
            self._meet(greeting)
            if self._role is Role.WORKER:
                answer = self._proof(self._role)
        if len(self._input) >= PROOF_BYTES and not self.done:
            proof, self.rest = self._input[:PROOF_BYTES], self._input[PROOF_BYTES:]
            if not hmac.compare_digest(proof, self._proof(self._role.other)):
                raise Refused("the other side has another key")
            self.done = True
            if self._role is Role.COORDINATOR:
                answer = self._proof(self._role)
        return answer

    def _meet(self, greeting: bytes) -> None:
        if _GREETING.unpack(self.greeting)[1:3] != _GREETING.unpack(greeting)[1:3]:
            named = {self._role: _version_in(self.greeting), self._role.other: _version_in(greeting)}
            raise VersionMismatch(
                f"the worker runs {named[Role.WORKER]}, the coordinator {named[Role.COORDINATOR]}:"
                " install the same version on both sides"
            )
        both = (self.greeting, greeting) if self._role is Role.WORKER else (greeting, self.greeting)
        self._transcript = b"".join(both)

    def _proof(self, role: Role) -> bytes:
        return hmac.digest(self._key, role.value + b"\x00" + self._transcript, "sha256")


def _version_in(greeting: bytes) -> str:
    _, version, schema, _ = _GREETING.unpack(greeting)
    name = version.rstrip(b"\x00").decode("ascii", errors="replace")
    return f"lightning-recycle {name!r} (messages {schema.hex()[:8]})"


# ---------------------------------------------------------------------- sockets


_ANSWER_SECONDS = 30.0  # until a worker's machine that does not answer counts as gone
_READ = 64 << 10  # bytes
_LONG_READ = 1 << 20  # bytes, of a message that is known to have as many

SIGN_SECONDS = 10.0
"""Between two signs of life of the coordinator, at most."""

_QUIET_SECONDS = 60.0  # of silence until a worker gives the coordinator up, if that has not said another limit yet
_POLLS = 10  # in that time; if this process was stopped itself, that counts as one of them

HANDSHAKE_SECONDS = 20.0
"""For the whole handshake: a busy machine starts many workers at the same time."""


class _Socket:
    """Base of both ends of a connection: socket options and closing."""

    def __init__(self, sock: socket.socket, inbox: FrameBuffer) -> None:
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

    def __init__(self, sock: socket.socket, inbox: FrameBuffer, quiet: float = _QUIET_SECONDS) -> None:
        super().__init__(sock, inbox)
        self.heard = time.monotonic()
        self._quiet = 0.0
        self.limit_quiet(quiet)
        self._send_lock = threading.Lock()

    def limit_quiet(self, seconds: float) -> None:
        """Bounds silence: :meth:`receive` fails after ``seconds`` without a message."""
        if seconds == self._quiet:
            return
        self._quiet, look = seconds, max(1e-3, seconds / _POLLS)
        option = struct.pack("ll", int(look), int(look % 1 * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, option)

    def abandon(self) -> None:
        """Closes the connection, also while another thread uses it."""
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
                if looks >= _POLLS:
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

    def __init__(self, sock: socket.socket, inbox: FrameBuffer) -> None:
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
        """Sends unsent bytes as far as the other side takes them; raises OSError, too."""
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

    def restart_send_timer(self, now: float) -> None:
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
    handshake = Handshake(Role.WORKER, key)
    try:
        sock.sendall(handshake.greeting)
        while not handshake.done:
            if (left := deadline - time.monotonic()) <= 0:
                raise TimeoutError("the coordinator did not finish the handshake in time")
            sock.settimeout(left)
            if not (data := sock.recv(4096)):
                why = "it has another key" if handshake.met else "it has too many strangers at the moment, or is ending"
                raise Refused(f"the coordinator closed the connection during the handshake; perhaps {why}")
            sock.sendall(handshake.receive(data))
        sock.settimeout(None)
        return MessageConnection(sock, FrameBuffer(TO_WORKERS, handshake.rest))
    except BaseException:
        sock.close()
        raise


class FrameBuffer:
    """Assembles messages from the pieces of their frames.

    ``expects``: the allowed types; a header of another type is an error before its body is read.
    """

    def __init__(self, expects: Collection[type[Any]], data: bytes = b"") -> None:
        self.expects = expects
        self._buffer = bytearray(data)
        self._frame_header: tuple[type[Any], int] | None = None

    @property
    def missing(self) -> int:
        """Number of bytes of the current message that are known to be missing."""
        if self._frame_header is None:
            return max(0, HEADER_BYTES - len(self._buffer))
        return max(0, self._frame_header[1] - len(self._buffer))

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def take(self) -> Any | None:
        """The next complete message, or None; raises BadMessageError for any other."""
        if self._frame_header is None:
            if len(self._buffer) < HEADER_BYTES:
                return None
            self._frame_header = parse_header(self._buffer[:HEADER_BYTES])
            del self._buffer[:HEADER_BYTES]
            if self._frame_header[0] not in self.expects:
                raise BadMessageError(f"a {self._frame_header[0].__name__} may not be sent here")
        kind, size = self._frame_header
        if len(self._buffer) < size:
            return None
        with memoryview(self._buffer) as view, view[:size] as body:
            message = decode(kind, body)
        del self._buffer[:size]
        self._frame_header = None
        return message


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
