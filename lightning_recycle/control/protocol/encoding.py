"""Encoding of messages: msgpack, with their type hints as the schema. Pure.

Concept: a *frame* is a header (which message, how many bytes follow) and a body (the message's fields). Decoding makes
nothing but data of the declared types: no byte from the network names a class or a function, so none can run anything.

Contract: :func:`decode` inverts :func:`encode` for every dataclass of
:mod:`~lightning_recycle.control.protocol.messages`, and raises :class:`BadMessageError` for every other input. How long
a message may be is known from its header, before its body is read. Both sides have the same :data:`SCHEMA`, which the
handshake compares.

Must not know: sockets, and what a message means. Whether it may be said is for
:mod:`~lightning_recycle.control.protocol.message_validation`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import numbers
import struct
from collections.abc import Callable, Iterator
from typing import Any, get_args, get_type_hints

import msgspec

from lightning_recycle.control.protocol import messages
from lightning_recycle.errors import ControlPlaneError, ReCycleError
from lightning_recycle.planning.program import Program

__all__ = ["HEADER_BYTES", "SCHEMA", "BadMessageError", "decode", "encode", "parse_header"]


class BadMessageError(ControlPlaneError):
    """Bytes that are no message, or a message that may not be sent here and now; its connection is closed."""


_HEADER = struct.Struct(">HQ")  # number of the message's type, bytes of its body
HEADER_BYTES = _HEADER.size

_HELLO_BYTES = 4096  # before it nobody knows who is there
_DATA_BYTES = 16 << 20  # numbers and names; a million losses fit
_PROGRAM_BYTES = 1 << 28  # of one worker; a task takes about a hundred
_OPAQUE_BYTES = 1 << 40  # checkpoints and results pass through: what the sender's memory holds


@dataclasses.dataclass(frozen=True)
class _Form:
    """Frame format of messages of one type.

    Args:
        message: the type.
        limit: the most bytes that the body may have.
        decoder: of the body.
    """

    message: type[Any]
    limit: int
    decoder: msgspec.msgpack.Decoder[Any]


def _form(message: type[Any]) -> _Form:
    hints = get_type_hints(message).values()
    limit = _PROGRAM_BYTES if any(_mentions(Program, hint) for hint in hints) else _DATA_BYTES
    if any(_mentions(bytes, hint) for hint in hints):
        limit = _OPAQUE_BYTES
    if message is messages.Hello:
        limit = _HELLO_BYTES
    return _Form(message, limit, msgspec.msgpack.Decoder(message))


def _mentions(kind: type[Any], hint: Any) -> bool:
    return hint is kind or any(_mentions(kind, part) for part in get_args(hint))


def _describe(kind: type[Any]) -> Iterator[str]:
    """A line for each field of a dataclass and of the dataclasses in it."""
    for name, hint in get_type_hints(kind).items():
        yield f"{kind.__qualname__}.{name}: {hint!r}"
        yield from _describe_parts(hint)


def _describe_parts(hint: Any) -> Iterator[str]:
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        yield from _describe(hint)
    for part in get_args(hint):
        yield from _describe_parts(part)


_TYPES: tuple[type[Any], ...] = tuple(
    value
    for value in vars(messages).values()
    if inspect.isclass(value) and dataclasses.is_dataclass(value) and value.__module__ == messages.__name__
)
_FORMS = tuple(_form(message) for message in _TYPES)
_NUMBERS = {message: number for number, message in enumerate(_TYPES)}

SCHEMA: bytes = hashlib.sha256("\n".join(line for kind in _TYPES for line in _describe(kind)).encode()).digest()[:16]
"""A digest of all messages, their fields and types: equal on two sides that understand each other."""


def encode(message: Any) -> bytearray:
    """The frame of ``message``.

    Raises:
        ReCycleError: if a field holds what its type does not allow.
    """
    number = _NUMBERS[type(message)]
    form = _FORMS[number]
    frame = bytearray(HEADER_BYTES)
    try:
        _ENCODER.encode_into(message, frame, HEADER_BYTES)
    except (TypeError, OverflowError, ValueError) as error:
        raise ReCycleError(f"{message!r:.500} cannot be sent: {error}. Give plain numbers and strings.") from error
    size = len(frame) - HEADER_BYTES
    if size > form.limit:
        raise ReCycleError(f"A {form.message.__name__} of {size} bytes cannot be sent: at most {form.limit} are read.")
    _HEADER.pack_into(frame, 0, number, size)
    return frame


def parse_header(header: bytes | bytearray | memoryview) -> tuple[type[Any], int]:
    """The type of the message that follows, and the bytes of its body.

    Raises:
        BadMessageError: for an unknown type, or more bytes than a message of that type may have.
    """
    number, size = _HEADER.unpack(header)
    if number >= len(_FORMS):
        raise BadMessageError(f"message type {number} does not exist")
    form = _FORMS[number]
    if size > form.limit:
        raise BadMessageError(f"a {form.message.__name__} of {size} bytes is too long: at most {form.limit} are read")
    return form.message, size


def decode(kind: type[Any], body: bytes | bytearray | memoryview) -> Any:
    """The message of type ``kind`` with the given body.

    Raises:
        BadMessageError: if the body is no such message.
    """
    form = _FORMS[_NUMBERS[kind]]
    try:
        return form.decoder.decode(body)
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
