"""Messages as bytes and back: every message survives, and nothing else becomes one."""

import pickle
import sys
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from support.hostile import bytes_like_frames, damaged_frames, values_of

from lightning_recycle.control import client
from lightning_recycle.control.network.connection import HEADER_BYTES, BadMessageError, decode, encode, parse_header
from lightning_recycle.control.protocol import messages
from lightning_recycle.errors import ReCycleError

_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]


def transfer(message: Any) -> Any:
    """``message`` as the other side gets it."""
    frame = bytes(encode(message))
    kind, size = parse_header(frame[:HEADER_BYTES])
    assert (kind, size) == (type(message), len(frame) - HEADER_BYTES)
    return decode(kind, frame[HEADER_BYTES:])


def same(a: Any, b: Any) -> bool:
    """Equal with equal types, NaN included; sets have no order."""
    return type(a) is type(b) and repr(_sorted(a)) == repr(_sorted(b))


def _sorted(value: Any) -> Any:
    return msgspec.to_builtins(value, order="deterministic", builtin_types=(bytes,))


@pytest.mark.parametrize("kind", messages.TYPES, ids=lambda kind: kind.__name__)
def test_every_message_arrives_as_it_was_sent(kind):
    @settings(max_examples=20, deadline=None, suppress_health_check=_SLOW, derandomize=True)
    @given(message=values_of(kind))
    def check(message: Any) -> None:
        assert same(transfer(message), message)

    check()


@settings(max_examples=500, deadline=None, suppress_health_check=_SLOW, derandomize=True)
@given(frame=damaged_frames() | bytes_like_frames())
def test_other_bytes_are_refused_or_a_message(frame):
    if len(frame) < HEADER_BYTES:
        return
    try:
        kind, size = parse_header(frame[:HEADER_BYTES])
        message = decode(kind, frame[HEADER_BYTES:][:size])
    except BadMessageError:
        return
    assert same(transfer(message), message)


def test_every_message_has_a_side_that_may_say_it():
    said = {*messages.FROM_WORKERS, *messages.FROM_SPARES, *messages.TO_WORKERS, *messages.FIRST}
    parts = {messages.Activity, messages.Checked, messages.Facts, messages.Vote, messages.RunRequest}
    parts |= {messages.LayerFacts, messages.Profiled, messages.SaveFailure, messages.SaveStatus}
    parts |= {
        messages.WorkerStatus,
        messages.Adoption,
        messages.Decision,
        messages.FromWorker,
        messages.ToWorker,
        messages.Process,
    }
    assert set(messages.TYPES) - said == parts, "parts of other messages"


def test_scalars_of_numpy_are_sent_as_numbers():
    facts: Any = messages.Facts({"step": np.int64(3)}, {"lr": np.float64(0.5)})
    assert same(transfer(facts), messages.Facts({"step": 3}, {"lr": 0.5}))


@pytest.mark.parametrize(
    "message",
    [messages.Facts({"step": 2**70}), messages.SaveBegun(0, 1, 1, 0, object(), ())],
    ids=["too large a number", "no data"],
)
def test_what_cannot_be_sent_is_an_error_of_the_sender(message):
    with pytest.raises(ReCycleError, match=r"(?s)cannot be sent.*Give plain numbers"):
        encode(message)


def test_a_message_of_deeply_nested_lists_is_refused():
    with pytest.raises(BadMessageError):
        decode(messages.Heartbeat, b"\x91" * 1_000_000)
    unknown_field = b"\x81\xa1x" + b"\x91" * 1_000_000  # is skipped, but not with the stack of the process
    with pytest.raises(BadMessageError):
        decode(messages.Heartbeat, unknown_field)


def test_a_message_with_a_grid_that_cannot_be_is_refused():
    body = bytes(encode(messages.Assign(0, 0, False, messages.Grid(2, 2, 2))))[HEADER_BYTES:]
    with pytest.raises(BadMessageError, match=r"no Assign: .*pipelines"):
        decode(messages.Assign, body.replace(b"pipelines\x02", b"pipelines\x00"))


def test_payloads_come_back_and_large_ones_travel_in_pieces(monkeypatch):
    assert client.pack(None) is None
    assert client.unpack(None) is None
    assert client.unpack(True) is True
    monkeypatch.setattr(client, "_PIECE", 10)
    packed = client.pack({"weights": "x" * 100})
    assert {len(piece) for piece in packed[:-1]} == {10}
    assert client.unpack(packed) == {"weights": "x" * 100}
    assert client.unpack_all({3: packed, 4: None}) == {3: {"weights": "x" * 100}, 4: None}


def test_the_coordinator_has_no_way_to_open_a_pickle():
    opened: list[str] = []
    for name in (
        "coordinator.coordinator",
        "network.connection",
        "network.listener",
        "coordinator.standalone",
        "coordinator.admission",
        "coordinator.worker_table",
        "protocol.membership",
    ):
        module = f"lightning_recycle.control.{name}"
        __import__(module)
        opened += [f"{name}.{key}" for key, value in vars(sys.modules[module]).items() if value in _OPENERS]
    assert not opened


_OPENERS: list[Any] = [pickle, pickle.loads, pickle.load, client.unpack, client.unpack_all, client]
