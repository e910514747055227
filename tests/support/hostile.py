"""Strategies of hypothesis for what a stranger may say."""

import dataclasses
import os
import socket
import types
from collections.abc import Mapping
from enum import Enum
from typing import Any, Union, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from lightning_recycle.control.network import connection as net
from lightning_recycle.control.protocol import messages
from lightning_recycle.planning.costs import Footprint, StageProfile
from lightning_recycle.planning.grid import Grid
from lightning_recycle.planning.split_backward import SplitTrial

_LEAVES: dict[Any, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    # Around what a run has, where damage is subtle, and at the ends of what can be sent.
    int: st.integers(-2, 8) | st.integers(-(2**63), 2**63 - 1),
    float: st.floats(0, 10) | st.floats(),
    str: st.text(max_size=20),
    bytes: st.binary(max_size=20),
    type(None): st.none(),
}
_SIZES: dict[Any, st.SearchStrategy[Any]] = {float: st.floats(0, 1e6), int: st.integers(0, 2**40)}


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a type hint of a message's field."""
    if hint in _LEAVES:
        return _LEAVES[hint]
    if hint is StageProfile:  # it checks its values
        sizes = {name: _SIZES.get(hint, st.none() | _SIZES[int]) for name, hint in get_type_hints(StageProfile).items()}
        return st.builds(StageProfile, **sizes)
    if hint is Footprint:  # likewise
        return st.builds(Footprint, st.text(max_size=20), *[_SIZES[int]] * 7)
    if hint is SplitTrial:  # likewise
        seconds = st.floats(1.0, 10.0)
        pair, three = st.tuples(seconds, seconds), st.tuples(seconds, seconds, seconds)
        return st.builds(SplitTrial, pair, three, seconds, seconds, st.text(max_size=20), seconds, st.floats(0.0, 1.0))
    if hint is Grid:
        return st.builds(Grid, *[st.integers(1, 3)] * 3)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return st.sampled_from(list(hint))
    if dataclasses.is_dataclass(hint):
        return st.builds(hint, **{name: values_of(part) for name, part in get_type_hints(hint).items()})
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return st.one_of(*(values_of(part) for part in parts))
    if origin is Mapping:
        return st.dictionaries(values_of(parts[0]), values_of(parts[1]), max_size=3)
    if origin is frozenset:
        return st.frozensets(values_of(parts[0]), max_size=3)
    if origin is tuple and parts[1:] == (...,):
        return st.lists(values_of(parts[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*(values_of(part) for part in parts))
    raise NotImplementedError(f"{hint!r}: a message has a field that is no data, or this function needs another case")


def any_message() -> st.SearchStrategy[Any]:
    """Any message, of either side, with any content."""
    return st.sampled_from(messages.TYPES).flatmap(values_of)


def damaged_frames() -> st.SearchStrategy[bytes]:
    """Frames of messages with some bytes replaced, cut off or added; now and then none."""
    return st.builds(
        _damage,
        any_message().map(lambda message: bytes(net.encode(message))),
        st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 255)), max_size=4),
        st.integers(0, 40) | st.just(0),
        st.binary(max_size=10) | st.just(b""),
    )


def _damage(frame: bytes, replaced: list[tuple[int, int]], cut: int, added: bytes) -> bytes:
    data = bytearray(frame)
    for place, value in replaced:
        data[place % len(data)] = value
    return bytes(data[: max(1, len(data) - cut)]) + added


def bytes_like_frames() -> st.SearchStrategy[bytes]:
    """Any bytes, and any bytes behind a header that fits them or announces more."""
    headers = st.builds(
        lambda number, size: number.to_bytes(2, "big") + size.to_bytes(net.HEADER_BYTES - 2, "big"),
        st.integers(0, len(messages.TYPES) + 1),
        st.integers(0, 100) | st.integers(0, 2**64 - 1),
    )
    return st.binary(max_size=300) | st.builds(lambda head, body: head + body, headers, st.binary(max_size=100))


def hostile_inputs() -> st.SearchStrategy[tuple[list[Any], bool, bool]]:
    """What a stranger says on one connection, whether he knows the key, and, if not, whether he knows the protocol."""
    said = st.one_of(
        any_message(),
        damaged_frames(),
        bytes_like_frames(),
        st.builds(messages.Hello, st.none() | st.integers(-1, 4), values_of(messages.Process), st.booleans()),
    )
    return st.tuples(st.lists(said, max_size=4), st.booleans(), st.booleans())


def assault(address: tuple[str, int], key: bytes, hostile: tuple[list[Any], bool, bool]) -> None:
    """Opens a connection to a coordinator, says what :func:`hostile_inputs` made, and closes it."""
    items, has_key, greets = hostile
    if has_key:
        try:
            connection = net.connect(address, key)
        except (OSError, net.Refused):  # it is ending
            return
    else:
        stranger = socket.create_connection(address)
        connection = net.MessageConnection(stranger, net.FrameBuffer(()))
        if greets:
            stranger.sendall(net.Handshake(net.Role.WORKER, os.urandom(16)).greeting)
    try:
        for item in items:
            connection.send_bytes(item if isinstance(item, bytes) else net.encode(item))
    except OSError:  # it has been refused already
        pass
    connection.close()
