"""Encoding of messages: msgpack, with their type hints as the schema. Pure.

Concept: a *frame* is a header (which message, how many bytes follow) and a body (the message's fields). Decoding makes
nothing but data of the declared types: no byte from the network names a class or a function, so none can run anything.

Contract: :func:`decode` inverts :func:`encode` for every dataclass of
:mod:`~lightning_recycle.control.protocol.messages`, and raises :class:`BadMessageError` for every other input. Both
sides have the same :data:`SCHEMA`, which the handshake compares.

Must not know: sockets, and what a message means.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import numbers
import struct
from collections.abc import Callable
from typing import Any

import msgspec

from lightning_recycle.control.protocol import messages
from lightning_recycle.errors import ControlPlaneError, ReCycleError


class BadMessageError(ControlPlaneError):
    """Bytes that are no message, or a message that may not be sent here and now; its connection is closed."""


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
    """The frame of ``message``.

    Raises:
        ReCycleError: if a field holds what its type does not allow.
    """
    frame = bytearray(HEADER_BYTES)
    try:
        _ENCODER.encode_into(message, frame, HEADER_BYTES)
    except (TypeError, OverflowError, ValueError) as error:
        raise ReCycleError(f"{message!r:.500} cannot be sent: {error}. Give plain numbers and strings.") from error
    _HEADER.pack_into(frame, 0, _NUMBERS[type(message)], len(frame) - HEADER_BYTES)
    return frame


def parse_header(header: bytes | bytearray | memoryview) -> tuple[type[Any], int]:
    """The type of the message that follows, and the bytes of its body.

    Raises:
        BadMessageError: for an unknown type.
    """
    number, size = _HEADER.unpack(header)
    if number >= len(_TYPES):
        raise BadMessageError(f"message type {number} does not exist")
    return _TYPES[number], size


def decode(kind: type[Any], body: bytes | bytearray | memoryview) -> Any:
    """The message of type ``kind`` with the given body.

    Raises:
        BadMessageError: if the body is no such message.
    """
    try:
        return _DECODERS[kind].decode(body)
    # RecursionError: nested too deeply. ReCycleError: a grid that cannot be.
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError, ReCycleError) as error:
        raise BadMessageError(f"no {kind.__name__}: {error}") from error


def _plain(value: Any) -> Any:
    """NumPy's scalars and other subclasses of what msgpack has."""
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
