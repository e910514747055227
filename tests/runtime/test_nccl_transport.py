"""The thread, the links and the agreement of the transport over NCCL: two workers in one process, imitated devices."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.fake_nccl import FakeEvent
from support.waiting import wait_for
from torch import Tensor
from transport_world import World

from lightning_recycle import CommunicationOptions
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.runtime.groups_and_transports import CommunicationError, Transport
from lightning_recycle.runtime.machine_errors import is_device_error
from lightning_recycle.runtime.nccl import nccl_transport
from lightning_recycle.runtime.nccl import nccl_transport as module
from lightning_recycle.runtime.nccl.nccl_library import NcclError
from lightning_recycle.runtime.nccl.nccl_transport import NcclTransport, transport_for
from lightning_recycle.runtime.wire import Channel, ValueLayout

VALUE = torch.arange(20_000.0)
LAYOUT = ValueLayout.of(VALUE)
FORWARD = Channel.ACTIVATIONS
STAGE = "stage0"
AT_ONCE = 2.0  # seconds, on a machine with other things to do
GLOO_PACKS = Transport().packed_bytes(0)


def connected(
    breaks: Callable[[World], None] = lambda pair: None, abort_after: float | None = None, **options: Any
) -> tuple[World, list[Exception]]:
    """Workers 0 and 1 in their first generation, and what was raised."""
    pair = World({STAGE: (0, 1)}, 2, **options)
    breaks(pair)
    return pair, pair.connect(abort_after)


@pytest.fixture
def pair() -> Iterator[World]:
    pair, errors = connected()
    assert not errors
    yield pair
    pair.stop()


class Waiting:
    """Something that worker 1 waits for in a thread of its own; by default, a receive."""

    def __init__(self, pair: World, what: Callable[[NcclTransport], list[Tensor | None]] | None = None) -> None:
        self.error: Exception | None = None
        self.tensors: list[Tensor | None] = []

        def wait() -> None:
            try:
                self.tensors = (what or receive)(pair.transports[1])
            except Exception as error:
                self.error = error

        self.thread = threading.Thread(target=wait)
        self.thread.start()

    def end(self) -> Exception:
        self.thread.join(AT_ONCE)
        assert not self.thread.is_alive()
        assert self.error is not None
        return self.error


def receive(transport: NcclTransport) -> list[Tensor | None]:
    return transport.receive(FORWARD, LAYOUT, 0, 3)


def replace(transport: NcclTransport, root: int | None = None) -> list[Tensor | None]:
    """The sum of both workers' values, or the value of ``root``."""
    assert transport.takes(STAGE, VALUE)
    value = VALUE * (transport._rank + 1)
    transport.end_collective(transport.begin_collective(STAGE, value, root))
    return [value]


def test_a_payload_arrives_while_the_device_computes(pair):
    device = pair.devices[1]
    device.current.wait(FakeEvent(device))  # which never is
    waiting = Waiting(pair)
    pair.transports[0].send(FORWARD, LAYOUT, [VALUE], 1, 3)
    waiting.thread.join(10)
    assert torch.equal(waiting.tensors[0], VALUE)


def test_both_have_the_sum_and_what_one_of_them_has(pair):
    for root, factor in ((None, 3), (0, 1), (1, 2)):
        waiting = Waiting(pair, lambda transport, root=root: replace(transport, root))
        (mine,) = replace(pair.transports[0], root)
        waiting.thread.join(10)
        for found in (mine, *waiting.tensors):
            assert torch.equal(found, VALUE * factor)


def test_small_tensors_and_those_that_nccl_cannot_sum_go_another_way(pair):
    transport = pair.transports[0]
    assert not transport.takes(STAGE, VALUE[:100])
    assert not transport.takes(STAGE, VALUE.bool())
    assert not transport.takes(STAGE, VALUE.to("meta"))
    assert not transport.takes("stage7", VALUE)


def test_different_collectives_of_the_members_are_an_error_of_their_leader(pair):
    waiting = Waiting(pair, lambda transport: replace(transport, 1))
    with pytest.raises(NcclError, match="different collectives"):
        replace(pair.transports[0])
    assert isinstance(waiting.end(), CommunicationError)


def break_call(rank: int, call: str, error: Exception) -> Callable[[World], None]:
    """Lets a call of NCCL fail on a worker."""

    def fail(*_: object) -> None:
        raise error

    return lambda pair: setattr(pair.devices[rank], call, fail)


def stay_in_progress(pair: World) -> None:
    pair.devices[1].in_progress = lambda comm: True


def add_nothing(pair: World) -> None:
    real = pair.devices[1].all_reduce
    pair.devices[1].all_reduce = lambda comm, tensor, stream: real(comm, tensor.zero_(), stream)


def assert_gloo(pair: World) -> None:
    """Everything goes by Gloo."""
    assert [transport.packed_bytes(1 - rank) for rank, transport in enumerate(pair.transports)] == [GLOO_PACKS] * 2
    assert not any(transport.takes(STAGE, VALUE) for transport in pair.transports)


CUDA_ERROR = RuntimeError("CUDA error in ncclCommInitRankConfig: peer access is not supported")
FALLS_BACK: dict[str, dict[str, Any]] = {
    "one device": {"names": ("same", "same")},
    "no nccl": {"without_nccl": {1}},
    "connecting takes too long": {"breaks": stay_in_progress},
    "a wrong sum": {"breaks": add_nothing},
    "an error of CUDA": {"breaks": break_call(1, "init", CUDA_ERROR)},
}


@pytest.mark.parametrize("how", FALLS_BACK.values(), ids=FALLS_BACK)
def test_workers_that_cannot_use_nccl_agree_on_gloo(how, monkeypatch):
    monkeypatch.setattr(module, "_TRIAL_SECONDS", 0.2 if how.get("breaks") is stay_in_progress else 60.0)
    pair, errors = connected(**how)
    assert not errors
    assert_gloo(pair)
    if "breaks" not in how:
        assert all(link.fileno() == -1 for links in pair.links for link in links.values()), "nobody needs them"
    pair.stop()


@pytest.mark.parametrize("call", ["unique_id", "init", "send", "receive", "all_reduce", "in_progress"])
@pytest.mark.parametrize("rank", [0, 1])
def test_workers_that_find_that_nccl_does_not_work_agree_on_gloo_and_say_why_once(call, rank, caplog):
    def said() -> list[str]:
        return [record.getMessage() for record in caplog.records if "go by Gloo" in record.getMessage()]

    pair, errors = connected(break_call(rank, call, NcclError("the network is down")))
    assert not errors
    assert_gloo(pair)
    assert not any(device.comms or device.violations for device in pair.devices)
    assert len(said()) == 2
    assert all(f"worker {rank}: the network is down" in text for text in said())
    assert not pair.connect()
    assert_gloo(pair)
    assert len(said()) == 2
    pair.stop()


def lose_device(pair: World) -> None:
    break_call(1, "init", CUDA_ERROR)(pair)
    pair.devices[1].is_lost = True


FAILS: dict[str, tuple[dict[str, Any], set[type[Exception]]]] = {
    "a lost device": ({"breaks": lose_device}, {CommunicationError, RuntimeError}),
    "an abort": ({"breaks": stay_in_progress}, {CommunicationError}),
}


@pytest.mark.parametrize(("how", "kinds"), FAILS.values(), ids=FAILS)
def test_what_gloo_cannot_replace_ends_the_trial_with_an_error(how, kinds):
    pair, errors = connected(**how, abort_after=0.2)
    assert len(errors) == 2
    assert {type(error) for error in errors} == kinds
    assert any(map(is_device_error, errors)) is (RuntimeError in kinds)
    pair.stop()


def hang(pair: World) -> Waiting:
    """A receive that is on the device of worker 1, whose sender's device stands still."""
    waiting = Waiting(pair)
    payloads = pair.transports[0]._thread._traffic.pairs
    payloads._begin_send = lambda sending: None
    pair.transports[0].send(FORWARD, LAYOUT, [VALUE], 1, 3)
    thread = pair.transports[1]._thread
    wait_for(lambda: thread._traffic.pairs._receiving is not None, 5)
    return waiting


def sum_alone(pair: World) -> Waiting:
    """A sum for which worker 0 is not ready."""
    waiting, thread = Waiting(pair, replace), pair.transports[1]._thread
    (state,) = thread._traffic.groups._states.values()
    wait_for(lambda: state.told == 2, 5)  # the first one was that by which they connected
    return waiting


def hang_in_a_sum(pair: World) -> Waiting:
    """A sum that is on the device of worker 1, while that of worker 0 stands still."""
    waiting = Waiting(pair, replace)
    pair.devices[0].all_reduce = lambda comm, tensor, stream: None
    pair.transports[0].begin_collective(STAGE, VALUE.clone())
    thread = pair.transports[1]._thread
    wait_for(lambda: thread._traffic.groups._under_way is not None, 5)
    return waiting


BEGIN = {"not offered": Waiting, "on the device": hang, "not ready": sum_alone, "in a sum": hang_in_a_sum}


@pytest.mark.parametrize("begin", BEGIN.values(), ids=BEGIN)
def test_an_abort_ends_a_wait_at_once(pair, begin):
    waiting = begin(pair)
    pair.abort(1)
    assert isinstance(waiting.end(), CommunicationError)
    started = time.monotonic()
    pair.stop()
    assert time.monotonic() - started < AT_ONCE
    assert not any(device.comms for device in pair.devices), "everybody has aborted"
    assert not any(device.violations for device in pair.devices)


@pytest.mark.parametrize("begin", BEGIN.values(), ids=BEGIN)
def test_a_device_that_is_lost_is_told_to_the_one_that_waits(pair, begin):
    waiting = begin(pair)
    pair.devices[1].is_lost = True
    pair.transports[1]._thread.wake()
    if begin in (hang, hang_in_a_sum):
        assert is_device_error(waiting.end())
    else:
        pair.abort(1)  # nothing is asked of the device meanwhile
        assert isinstance(waiting.end(), CommunicationError)


def test_a_worker_whose_abort_does_not_end_has_lost_its_device(pair, monkeypatch):
    monkeypatch.setattr(nccl_transport, "ABORT_SECONDS", 0.2)
    returns = threading.Event()
    real = pair.devices[1].group_end
    monkeypatch.setattr(pair.devices[1], "group_end", lambda: (returns.wait(), real()))
    pair.abort(1)
    with pytest.raises(RuntimeError, match="has not aborted generation 0") as caught:
        pair.transports[1].close()
    assert is_device_error(caught.value)
    returns.set()


def test_a_device_that_takes_long_is_looked_at_less_often():
    seconds = [nccl_transport._poll_seconds(waited) for waited in (0.0, 0.0005, 0.004, 0.1, 10.0)]
    assert seconds == pytest.approx([50e-6, 50e-6, 200e-6, 500e-6, 500e-6])


def test_gloo_is_for_every_device_and_nccl_needs_its_library(monkeypatch):
    for device in ("cpu", "cuda"):
        assert isinstance(transport_for(CommunicationOptions(), 0, torch.device(device, 0)), Transport)

    def missing() -> None:
        raise ConfigurationError("There is no NCCL here")

    monkeypatch.setattr("lightning_recycle.runtime.nccl.nccl_transport.NcclLibrary", missing)
    with pytest.raises(ConfigurationError, match="There is no NCCL here"):
        transport_for(CommunicationOptions(transport="nccl"), 0, torch.device("cuda", 0))
