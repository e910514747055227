"""Seconds of operations."""

from typing import Any

import pytest
import torch

from lightning_recycle.planning.grid import OpKind
from lightning_recycle.runtime.step_measurements import Timings

CUDA = torch.device("cuda", 0)


class Device:
    """A stream whose work is done when the test says so; its clock is that of what is asked of it."""

    def __init__(self) -> None:
        self.enqueued = self.done = 0.0  # milliseconds
        self.waited: list[float] = []
        self.events = 0

    def work(self, milliseconds: float) -> None:
        self.enqueued += milliseconds


class Event:
    def __init__(self, device: Device) -> None:
        self.device, self.at = device, -1.0
        device.events += 1

    def record(self) -> None:
        self.at = self.device.enqueued

    def query(self) -> bool:
        return self.device.done >= self.at

    def synchronize(self) -> None:
        self.device.done = max(self.device.done, self.at)
        self.device.waited.append(self.at)

    def elapsed_time(self, later: "Event") -> float:
        assert self.query()
        assert later.query(), "asked for before the device has come there"
        return later.at - self.at


@pytest.fixture
def device(monkeypatch) -> Device:
    found = Device()

    def event(enable_timing: bool) -> Event:
        assert enable_timing
        return Event(found)

    def synchronize(*_: Any) -> None:
        raise AssertionError("the host waits for the device")

    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(torch.cuda, "current_stream", synchronize)
    return found


def test_the_host_prepares_the_next_operation_while_the_device_computes(device):
    timings = Timings(CUDA)
    for kind, milliseconds in ((OpKind.FORWARD, 20.0), (OpKind.FORWARD, 40.0), (OpKind.BACKWARD, 60.0)):
        with timings.of[kind]:
            device.work(milliseconds)
        device.work(5.0)  # between two operations
    device.done = 70.0
    assert timings.take_step() == pytest.approx({"F": 0.03})
    device.done = device.enqueued
    assert timings.take_step() == pytest.approx({"BW": 0.06})
    assert timings.seconds == pytest.approx({"F": 0.024, "BW": 0.06})
    assert not device.waited


def test_a_worker_that_is_about_to_wait_for_others_has_no_work_of_its_own_left(device):
    timings, progress = Timings(CUDA), []
    for _ in range(3):
        with timings.of[OpKind.FORWARD]:
            device.work(10.0)
    timings.await_device(lambda: progress.append(device.done))
    assert progress == [10.0, 20.0, 30.0]
    timings.await_device(lambda: progress.append(device.done))
    assert len(progress) == 3
    assert timings.take_step() == pytest.approx({"F": 0.01})


def test_events_are_used_again(device):
    timings = Timings(CUDA)
    for _ in range(10):
        with timings.of[OpKind.FORWARD]:
            device.work(10.0)
        timings.await_device(lambda: None)
    assert device.events == 2


def test_an_operation_that_raised_does_not_count(device):
    timings = Timings(CUDA)
    with pytest.raises(KeyError), timings.of[OpKind.FORWARD]:
        raise KeyError
    device.done = 1.0
    assert timings.take_step() == {}
