"""Wire format: the handshake that proves the key, and frames of messages. Pure.

*Handshake*: each side sends a greeting (version, schema of messages, random number) at once. The worker answers with an
HMAC-SHA256 of its role and both greetings under the key, then the coordinator with its own: a proof is good for one
connection, direction and version, and the key is never sent. Before the proof only bytes of a fixed number are read.

*Frame*: a header (message type, length) and a body of fields, msgpack with the messages' type hints as the schema.
Decoding makes only data of declared types: no byte from the network names a class or function, so none can run code.

Contract: feed :meth:`Handshake.receive` and send what it returns, until :attr:`Handshake.done`; the owner of the
sockets bounds time and strangers. An unusable key is a :class:`~lightning_recycle.errors.ConfigurationError` with the
remedy, without the key. :func:`decode` inverts :func:`encode`, and raises :class:`BadMessageError` for all other input.

Must not know: sockets, clocks, meanings of messages.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import inspect
import json
import numbers
import os
import stat
import struct
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import msgspec

from lightning_recycle.arguments import __version__
from lightning_recycle.control.protocol import messages
from lightning_recycle.errors import ConfigurationError, ControlPlaneError, ReCycleError


class BadMessageError(ControlPlaneError):
    """Bytes that are no message, or one that may not come here; ends a connection."""


_HEADER = struct.Struct(">HQ")  # number of the message's type, bytes of its body
HEADER_BYTES = _HEADER.size

_TYPES: tuple[type[Any], ...] = tuple(
    value
    for value in vars(messages).values()
    if inspect.isclass(value) and dataclasses.is_dataclass(value) and value.__module__ == messages.__name__
)
_NUMBERS = {message: number for number, message in enumerate(_TYPES)}
_DECODERS = {message: msgspec.msgpack.Decoder(message) for message in _TYPES}

SCHEMA: bytes = hashlib.sha256(
    json.dumps(msgspec.json.schema_components(_TYPES), sort_keys=True, default=repr).encode()
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
    if number >= len(_TYPES):
        raise BadMessageError(f"message type {number} does not exist")
    return _TYPES[number], size


def decode(kind: type[Any], body: bytes | bytearray | memoryview) -> Any:
    """The message of type ``kind`` with the given body; BadMessageError if it is none."""
    try:
        return _DECODERS[kind].decode(body)
    # RecursionError: nested too deeply. ReCycleError: a grid that cannot be.
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError, ReCycleError) as error:
        raise BadMessageError(f"no {kind.__name__}: {error}") from error


def _plain(value: Any) -> Any:
    """NumPy scalars and other subclasses of msgpack's types, as the latter."""
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


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)


# Dynamically: this package imports nothing above itself.
VERSION = __version__
"""The version of this package."""

KEY_BYTES = 16
"""The least that a key may have."""

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


def check_key(key: bytes, name: str) -> bytes:
    """``key`` of at least 16 bytes; else ConfigurationError with the setting ``name``."""
    if len(key) < KEY_BYTES:
        raise ConfigurationError(
            f"{name} has {len(key)} bytes, which can be guessed: give one of at least {KEY_BYTES}, for example"
            f' {name}="$(head -c 32 /dev/urandom | base64)".'
        )
    return key


class Handshake:
    """One side of one handshake.

    Attributes:
        greeting: the bytes to send first.
        done: whether the other side has proved the key.
        rest: bytes that arrived after its proof.
    """

    def __init__(self, role: Role, key: bytes, version: str, schema: bytes) -> None:
        self.greeting = _GREETING.pack(_MAGIC, version.encode()[:32], schema, os.urandom(32))
        self.done = False
        self.rest = b""
        self._role = role
        self._key = key
        self._version = version
        self._schema = schema
        self._received = b""
        self._transcript = b""

    @property
    def met(self) -> bool:
        """Whether the other side has announced the same version."""
        return bool(self._transcript)

    def receive(self, data: bytes) -> bytes:
        """Takes in what arrived; returns what to send.

        Raises VersionMismatch for another version, Refused for another protocol or key.
        """
        self._received += data
        answer = b""
        if not self._transcript:
            if not _MAGIC.startswith(self._received[: len(_MAGIC)]):
                raise Refused("the other side is no lightning_recycle")
            if len(self._received) < GREETING_BYTES:
                return answer
            greeting, self._received = self._received[:GREETING_BYTES], self._received[GREETING_BYTES:]
            self._meet(greeting)
            if self._role is Role.WORKER:
                answer = self._proof(self._role)
        if len(self._received) >= PROOF_BYTES and not self.done:
            proof, self.rest = self._received[:PROOF_BYTES], self._received[PROOF_BYTES:]
            if not hmac.compare_digest(proof, self._proof(self._role.other)):
                raise Refused("the other side has another key")
            self.done = True
            if self._role is Role.COORDINATOR:
                answer = self._proof(self._role)
        return answer

    def _meet(self, greeting: bytes) -> None:
        _, version, schema, _ = _GREETING.unpack(greeting)
        theirs = version.rstrip(b"\x00").decode("ascii", errors="replace")
        if (theirs, schema) != (self._version, self._schema):
            sides = {self._role: (self._version, self._schema), self._role.other: (theirs, schema)}
            named = {
                role: f"lightning-recycle {name!r} (messages {digest.hex()[:8]})"
                for role, (name, digest) in sides.items()
            }
            raise VersionMismatch(
                f"the worker runs {named[Role.WORKER]}, the coordinator {named[Role.COORDINATOR]}:"
                " install the same version on both sides"
            )
        both = (self.greeting, greeting) if self._role is Role.WORKER else (greeting, self.greeting)
        self._transcript = b"".join(both)

    def _proof(self, role: Role) -> bytes:
        return hmac.digest(self._key, role.value + b"\x00" + self._transcript, "sha256")


_MOST_BYTES = 4096  # of a file with a key
_KEY, _KEY_FILE = "RECYCLE_KEY", "RECYCLE_KEY_FILE"


def key_from_environment(environ: Mapping[str, str] = os.environ) -> bytes:
    """The secret of a run, from ``RECYCLE_KEY`` or else from the key file.

    Raises ConfigurationError if neither variable is set, the key is shorter than 16 bytes, or others may read the file.
    """
    key = environ.get(_KEY, "")
    if key:
        return check_key(key.encode(), _KEY)
    path = environ.get(_KEY_FILE, "")
    if path:
        return check_key(_read(path), f"{_KEY_FILE}={path}")
    raise ConfigurationError(
        "RECYCLE_KEY is not set: give the coordinator and all workers the same secret, for example"
        ' RECYCLE_KEY="$(head -c 32 /dev/urandom | base64)", or RECYCLE_KEY_FILE, a file with it.'
    )


def _read(path: str) -> bytes:
    """The key in the file at ``path``, stripped."""
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o077:
                raise ConfigurationError(
                    f"{_KEY_FILE}={path}: others may read or write it (mode {stat.S_IMODE(status.st_mode):04o}), and"
                    f" who knows the key can run code in the workers: chmod 600 {path}; for a secret that Kubernetes"
                    " mounts, defaultMode: 0400."
                )
            return file.read(_MOST_BYTES).strip()
    except OSError as error:
        raise ConfigurationError(f"{_KEY_FILE}={path} cannot be read: {error.strerror or error}.") from error
