"""The thread, the links and the agreement of the transport over NCCL: two workers in one process, imitated devices."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

import pytest
import torch
from support.fake_nccl import FakeDevice, LocalNetwork
from support.waiting import wait_for
from torch import Tensor

from lightning_recycle.errors import ConfigurationError
from lightning_recycle.runtime import nccl_transport as module
from lightning_recycle.runtime.groups import CommunicationError, Group
from lightning_recycle.runtime.machine_errors import is_device_error
from lightning_recycle.runtime.nccl_transport import NcclTransport
from lightning_recycle.runtime.transports import Channel, GlooTransport
from lightning_recycle.runtime.wire import Layout

VALUE = torch.arange(20_000.0)
LAYOUT = Layout.of(VALUE)
FORWARD = Channel.ACTIVATIONS
AT_ONCE = 2.0  # seconds, on a machine with other things to do
GLOO_PACKS = GlooTransport(timedelta(seconds=1)).packed_bytes(0)


class Meeting:
    """A rendezvous in this process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def publish(self, key: str, value: bytes) -> None:
        self._values[key] = value

    def lookup(self, keys: Sequence[str], cancelled: threading.Event) -> list[bytes]:
        while not all(key in self._values for key in keys):
            if cancelled.wait(0.001):
                raise CommunicationError("cancelled")
        return [self._values[key] for key in keys]


class Pair:
    """Workers 0 and 1, which are connected with each other."""

    def __init__(
        self,
        names: Sequence[str] = ("first", "second"),
        with_nccl: Sequence[bool] = (True, True),
        required: bool = False,
    ) -> None:
        network, meeting = LocalNetwork(), Meeting()
        self.devices = [FakeDevice(network, threaded=True) for _ in range(2)]
        self.cancelled = [threading.Event() for _ in range(2)]
        self.links = list(socket.socketpair())
        self.transports = [
            NcclTransport(
                rank,
                torch.device("cpu"),
                device if with_nccl[rank] else None,
                device,
                names[rank],
                GlooTransport(timedelta(seconds=1)),
                required,
            )
            for rank, device in enumerate(self.devices)
        ]
        self.errors: list[Exception] = []

        def connect(rank: int) -> None:
            links, channel = Group(), Group()
            links.links = {1 - rank: self.links[rank]}
            self.links[rank].setblocking(False)
            channel.places = {0: (None, 0), 1: (None, 1)}
            groups = {module._LINKS: links, **{each.value: channel for each in Channel}}
            try:
                self.transports[rank].connect(0, groups, meeting, self.cancelled[rank])
            except Exception as error:
                self.errors.append(error)

        threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def abort(self, rank: int) -> None:
        self.cancelled[rank].set()
        self.transports[rank].abort()

    def close(self) -> None:
        for rank in range(2):
            self.cancelled[rank].set()
            self.transports[rank].close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    assert not pair.errors
    yield pair
    pair.close()


class Waiting:
    """A receive of worker 1 that is waited for in a thread of its own."""

    def __init__(self, pair: Pair) -> None:
        self.error: Exception | None = None
        self.tensors: list[Tensor | None] = []

        def receive() -> None:
            try:
                self.tensors = pair.transports[1].receive(FORWARD, LAYOUT, 0, 3)
            except Exception as error:
                self.error = error

        self.thread = threading.Thread(target=receive)
        self.thread.start()

    def end(self) -> Exception:
        self.thread.join(AT_ONCE)
        assert not self.thread.is_alive()
        assert self.error is not None
        return self.error


def test_a_payload_goes_from_one_to_the_other(pair: Pair) -> None:
    waiting = Waiting(pair)
    pair.transports[0].send(FORWARD, LAYOUT, [VALUE], 1, 3)
    waiting.thread.join(10)
    (received,) = waiting.tensors
    assert received is not None
    assert torch.equal(received, VALUE)


@pytest.mark.parametrize(
    "how", [{"names": ("same", "same")}, {"with_nccl": (True, False)}], ids=["one device", "no nccl"]
)
def test_workers_that_cannot_use_nccl_agree_on_gloo(how: dict[str, tuple[str, str]]) -> None:
    pair = Pair(**how)  # type: ignore[arg-type]
    assert not pair.errors
    assert [transport.packed_bytes(1 - rank) for rank, transport in enumerate(pair.transports)] == [GLOO_PACKS] * 2
    assert all(link.fileno() == -1 for link in pair.links), "nobody needs them"
    pair.close()


def test_where_nccl_is_required_that_is_an_error_that_names_the_remedy() -> None:
    pair = Pair(names=("same", "same"), required=True)
    assert [type(error) for error in pair.errors] == [ConfigurationError] * 2
    assert "LOCAL_RANK" in str(pair.errors[0])
    pair.close()


def hang(pair: Pair) -> Waiting:
    """A receive that is on the device of worker 1, whose sender's device stands still."""
    waiting = Waiting(pair)
    payloads = pair.transports[0]._courier._payloads  # type: ignore[union-attr]
    payloads._begin_send = lambda sending: None  # type: ignore[method-assign, assignment, return-value]
    pair.transports[0].send(FORWARD, LAYOUT, [VALUE], 1, 3)
    courier = pair.transports[1]._courier
    assert courier is not None
    wait_for(lambda: courier._payloads._receiving is not None, 5)
    return waiting


@pytest.mark.parametrize("begin", [Waiting, hang], ids=["not offered", "on the device"])
def test_an_abort_ends_a_wait_at_once(pair: Pair, begin: Callable[[Pair], Waiting]) -> None:
    waiting = begin(pair)
    pair.abort(1)
    assert isinstance(waiting.end(), CommunicationError)
    started = time.monotonic()
    pair.close()
    assert time.monotonic() - started < AT_ONCE
    assert not any(device.comms for device in pair.devices), "everybody has aborted"
    assert not any(device.violations for device in pair.devices)


@pytest.mark.parametrize("begin", [Waiting, hang], ids=["not offered", "on the device"])
def test_a_sender_that_is_gone_ends_a_wait(pair: Pair, begin: Callable[[Pair], Waiting]) -> None:
    waiting = begin(pair)
    pair.abort(0)
    assert isinstance(waiting.end(), CommunicationError)


@pytest.mark.parametrize("begin", [Waiting, hang], ids=["not offered", "on the device"])
def test_a_device_that_is_lost_is_told_to_the_one_that_waits(pair: Pair, begin: Callable[[Pair], Waiting]) -> None:
    waiting = begin(pair)
    pair.devices[1].is_lost = True
    pair.transports[1]._courier.wake()  # type: ignore[union-attr]
    if begin is hang:
        assert is_device_error(waiting.end())
    else:
        pair.abort(1)  # nothing is asked of the device meanwhile
        assert isinstance(waiting.end(), CommunicationError)


def test_a_worker_whose_abort_does_not_end_has_lost_its_device(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ABORT_SECONDS", 0.2)
    returns = threading.Event()
    real = pair.devices[1].group_end
    monkeypatch.setattr(pair.devices[1], "group_end", lambda: (returns.wait(), real()))
    pair.abort(1)
    with pytest.raises(RuntimeError, match="has not aborted generation 0") as caught:
        pair.transports[1].close()
    assert is_device_error(caught.value)
    returns.set()


def test_who_comes_too_late_to_connect_does_not_take_the_place_of_the_next_generation(pair: Pair) -> None:
    courier, meeting = pair.transports[0]._courier, Meeting()
    ours, theirs = socket.socketpair()
    links = Group()
    links.links = {1: ours}
    meeting.publish("generation7/nccl1", json.dumps({"device": "second", "ids": {"0": "00"}}).encode())
    cancelled = threading.Event()
    cancelled.set()
    with theirs, pytest.raises(CommunicationError, match="Generation 7 was aborted"):
        pair.transports[0].connect(7, {module._LINKS: links}, meeting, cancelled)
    assert pair.transports[0]._courier is courier


def test_neither_does_one_who_comes_too_late_over_gloo() -> None:
    gloo, past, now = GlooTransport(timedelta(seconds=1)), threading.Event(), threading.Event()
    groups = {each.value: Group() for each in Channel}
    gloo.connect(2, groups, Meeting(), now)
    past.set()
    with pytest.raises(CommunicationError, match="Generation 1 was aborted"):
        gloo.connect(1, {}, Meeting(), past)
    assert gloo._groups[FORWARD] is groups[FORWARD.value]
