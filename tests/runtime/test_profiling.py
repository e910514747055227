"""Seconds of operations, and the trial of a split backward."""

import itertools
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_recycle.planning.grid import Microbatch, Op, OpKind
from lightning_recycle.planning.program import Task
from lightning_recycle.planning.splitting import SplitTrial
from lightning_recycle.runtime.executor.profiling import SplitTrials, Timings, processors_of

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
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    found = Device()

    def event(enable_timing: bool) -> Event:
        assert enable_timing
        return Event(found)

    def synchronize(*_: Any) -> None:
        raise AssertionError("the host waits for the device")

    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(torch.cuda, "current_stream", synchronize)
    return found


def test_the_host_prepares_the_next_operation_while_the_device_computes(device: Device) -> None:
    timings = Timings()
    for kind, milliseconds in ((OpKind.FORWARD, 20.0), (OpKind.FORWARD, 40.0), (OpKind.BACKWARD, 60.0)):
        with timings.measure(kind, CUDA):
            device.work(milliseconds)
        device.work(5.0)  # between two operations
    device.done = 70.0
    assert timings.take_step() == pytest.approx({"F": 0.03})
    device.done = device.enqueued
    assert timings.take_step() == pytest.approx({"BW": 0.06})
    assert timings.seconds == pytest.approx({"F": 0.024, "BW": 0.06})
    assert not device.waited


def test_a_worker_that_is_about_to_wait_for_others_has_no_work_of_its_own_left(device: Device) -> None:
    timings, progress = Timings(), []
    for _ in range(3):
        with timings.measure(OpKind.FORWARD, CUDA):
            device.work(10.0)
    timings.await_device(lambda: progress.append(device.done))
    assert progress == [10.0, 20.0, 30.0]
    timings.await_device(lambda: progress.append(device.done))
    assert len(progress) == 3
    assert timings.take_step() == pytest.approx({"F": 0.01})


def test_events_are_used_again(device: Device) -> None:
    timings = Timings()
    for _ in range(10):
        with timings.measure(OpKind.FORWARD, CUDA):
            device.work(10.0)
        timings.await_device(lambda: None)
    assert device.events == 2


def test_an_operation_that_raised_does_not_count(device: Device) -> None:
    timings = Timings()
    with pytest.raises(KeyError), timings.measure(OpKind.FORWARD, CUDA):
        raise KeyError
    device.done = 1.0
    assert timings.take_step() == {}


def test_on_a_cpu_an_operation_takes_what_the_clock_says() -> None:
    timings = Timings()
    with timings.measure(OpKind.FORWARD, torch.device("cpu"), lambda seconds: None):
        pass
    assert 0 <= timings.take_step()["F"] < 1


CPU = torch.device("cpu")
F, BW, B, W = OpKind.FORWARD, OpKind.BACKWARD, OpKind.BACKWARD_INPUT, OpKind.BACKWARD_WEIGHT


def program(count: int, decoupled: bool = False, recomputed: bool = False) -> list[Task]:
    ops = [(Op(F, 0, Microbatch(0, index)), index) for index in range(count)]
    return [Task(op, str(op), index, decoupled=decoupled, recomputed=recomputed) for op, index in ops]


def compute(seconds: float) -> None:
    """Keeps a core busy."""
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


def run(trials: SplitTrials, step: int, count: int, seconds: float = 0.0, **flags: bool) -> list[bool]:
    """A step, in which a split micro-batch computes twice as long; returns which are split."""
    trials.begin(step, program(count, **flags))
    for index in range(count):
        for kind in (F, B, W) if trials.splits(index) else (F, BW):
            with trials.operation(kind, index):
                compute(seconds * (2 if kind in (B, W) else 1))
    return [trials.splits(index) for index in range(count)]


def until_done(trials: SplitTrials, count: int, seconds: float = 0.0) -> SplitTrial:
    for step in range(10):
        run(trials, step, count, seconds)
        if (result := trials.result()) is not None:
            return result
    raise AssertionError("the trial does not end")


def test_every_other_micro_batch_is_split_after_two_steps() -> None:
    trials = SplitTrials(CPU)
    split = [run(trials, step, 3) for step in range(4)]
    assert split == [[False] * 3, [False] * 3, [True, False, True], [False, True, False]]
    assert trials.result() is None, "it is not over"


def test_a_step_that_runs_again_and_a_part_of_one_count_once() -> None:
    trials = SplitTrials(CPU)
    for _ in range(3):
        run(trials, 0, 2)
    trials.begin(None, program(2))
    assert not trials.splits(0)
    run(trials, 1, 2)
    assert run(trials, 2, 2) == [True, False]


@pytest.mark.parametrize("flags", [{"decoupled": True}, {"recomputed": True}])
def test_what_the_plan_splits_or_computes_again_is_not_tried(flags: dict[str, bool]) -> None:
    trials = SplitTrials(CPU)
    assert not any(any(run(trials, step, 2, **flags)) for step in range(8))
    assert trials.result() is None


@pytest.mark.parametrize("count", [1, 2, 5])
def test_both_are_measured_however_many_micro_batches_there_are(count: int) -> None:
    result = until_done(SplitTrials(CPU), count, seconds=0.002)
    assert result.busy_fused == pytest.approx(0.004, rel=0.5)
    assert result.busy_split == pytest.approx(0.010, rel=0.5)
    assert result.longer > 1.5
    assert result.processors >= 0.1


def test_what_sleeps_takes_time_and_keeps_nobody_busy() -> None:
    trials = SplitTrials(CPU)
    for step in range(6):
        trials.begin(step, program(2))
        for index in range(2):
            for kind in (F, B, W) if trials.splits(index) else (F, BW):
                with trials.operation(kind, index):
                    time.sleep(0.005)
    result = trials.result()
    assert result is not None
    assert min(*result.fused, *result.split) > 0.004
    assert result.busy_split < 0.005


def test_waiting_between_two_clocks_is_not_taken_from_an_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread may lose its core after one clock was read and before the other, again and again."""
    hours = itertools.count(start=0.0, step=3600.0)
    monkeypatch.setattr("lightning_recycle.runtime.executor.profiling._seconds_waited", lambda: next(hours))
    result = until_done(SplitTrials(CPU), 2, seconds=0.002)
    assert result.fused + result.split == pytest.approx((0.002, 0.002, 0.002, 0.004, 0.004), rel=0.5)


def test_a_control_group_may_pay_for_less_than_the_cores_there_are(tmp_path: Path) -> None:
    quota = tmp_path / "cpu.max"
    place, cores = processors_of(CPU, quota)
    quota.write_text("max 100000\n")
    assert processors_of(CPU, quota) == (place, cores)
    quota.write_text("50000 100000\n")
    assert processors_of(CPU, quota) == (place, 0.5)
