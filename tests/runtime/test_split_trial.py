"""What a worker tries to find out what splitting backwards costs."""

import itertools
import time
from pathlib import Path

import pytest
import torch

from lightning_recycle.planning.grid import Microbatch, Op, OpKind
from lightning_recycle.planning.profile import SplitTrial
from lightning_recycle.planning.program import Task
from lightning_recycle.runtime.executor.profiling import SplitTrials, processors_of

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
