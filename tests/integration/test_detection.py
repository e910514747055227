"""Suspicion is not proof: what takes long is not a fault, and a worker is given up only where a peer can do its work.

Workers that are stuck are found; most places where they can be are in test_fault_kinds.py. The rules are judged in
tests/control, and that no hook is judged by a usual duration in test_hooks_take_their_time.py.
"""

import ctypes
import sys
import time
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from support.growth import happened
from support.models import Regression, dataset
from support.sampling import sampled
from support.training import TOLERANCE, committed_steps, difference, exact_fit, failures, fit, plain_loop, undisturbed
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_recycle.callbacks import Fault, HeartbeatCallback

TIMEOUT = 1.5  # seconds
LONG = 2.5 * TIMEOUT
STEP = 5  # the one that takes long


def watched(model: Regression, *faults: Fault, **arguments: Any) -> L.Trainer:
    """Trains with the heartbeat of these tests; the weights must be exact."""
    callbacks = [HeartbeatCallback(interval=0.2, timeout=TIMEOUT), *arguments.pop("callbacks", [])]
    run = fit(model, 2, 2, faults, callbacks=callbacks, **arguments)
    assert difference(model.state_dict(), plain_loop(Regression().double(), dataset())) < TOLERANCE
    assert committed_steps(run) == list(range(10))
    return run


def slow(model: Regression, *faults: Fault, **arguments: Any) -> L.Trainer:
    """As :func:`watched`, for as long as :data:`LONG`."""
    started = time.monotonic()
    run = watched(model, *faults, **arguments)
    assert time.monotonic() - started > LONG
    return run


def hold_gil(seconds: float) -> None:
    """Sleeps without letting another thread run, the heartbeat's for example, as some libraries do."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def compute_with_gil(seconds: float) -> None:
    """Computes without letting another thread run, as a long regular expression or collection of garbage does."""
    before, deadline = sys.getswitchinterval(), time.monotonic() + seconds
    sys.setswitchinterval(1e3)
    while time.monotonic() < deadline:
        pass
    sys.setswitchinterval(before)


@pytest.mark.long
def test_two_workers_that_are_stuck_at_once_are_found():
    run = watched(Regression().double(), Fault("deadlock", 1, 0, 4), Fault("deadlock", 0, 1, 4, "reduce"))
    assert sorted(failures(run)) == [(0, 1), (1, 0)]


@pytest.mark.long
def test_a_worker_that_is_stuck_in_an_operation_that_is_new_to_the_plan_is_found():
    """With 1F1B the backward is fused; the plan for a failure splits it, and nobody has measured a W before."""
    faults = [Fault("kill", 0, 0, 4), Fault("deadlock", 0, 1, 4, "backward_weight")]
    run = watched(Regression().double(), *faults, strategy={"planner": FusedAtFirst()})
    assert failures(run) == [(0, 0), (0, 1)]


class FusedAtFirst:
    """A planner that fuses the backward while nothing has failed."""

    def plan(self, problem: Any) -> Any:
        from lightning_recycle.planning import one_f_one_b, plan

        return plan(problem) if problem.failed else one_f_one_b(problem)


# ---------------------------------------------------------------------- what is not a fault


class LongFirstForward(nn.Tanh):
    """As when a model is compiled in its first step."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 1 and x.requires_grad:
            time.sleep(LONG)
        return super().forward(x)


class LongFirstStep(Regression):
    def configure_pipeline(self) -> list[Any]:
        layers = super().configure_pipeline()
        return [LongFirstForward() if isinstance(layer, nn.Tanh) else layer for layer in layers]


class SlowHook(L.Callback):
    """A hook that takes long once, on the workers ``ranks``."""

    def __init__(self, hook: str, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        setattr(self, hook, self._pause)

    def _pause(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == STEP and trainer.strategy.grid_rank in self.ranks:
            time.sleep(LONG)


class Stalling(TensorDataset):
    """Data on a file system that hangs for a moment."""

    def __getitem__(self, index: Any) -> Any:
        if index == 24 * 5:
            time.sleep(LONG)
        return super().__getitem__(index)


class LongCheckpoint(ModelCheckpoint):
    """On the leader the file system is slow."""

    def on_save_checkpoint(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.is_global_zero:
            time.sleep(LONG)


class LongEvaluation(Regression):
    def on_validation_output(self, output: Any, target: Any) -> None:
        time.sleep(LONG / 4)
        super().on_validation_output(output, target)


@pytest.mark.long
def test_a_slow_first_step_is_no_fault():
    assert undisturbed(slow(LongFirstStep().double()))


@pytest.mark.parametrize("pause", sampled(["hook", "data", "checkpoint", "validation"], 1))
@pytest.mark.long
def test_a_long_pause_outside_the_schedule_is_no_fault(pause, tmp_path):
    arguments: dict[str, Any] = {}
    model = Regression().double()
    if pause == "hook":
        arguments["callbacks"] = [SlowHook("on_train_batch_end", (3,))]
    elif pause == "data":
        arguments["data"] = Stalling(*dataset().tensors)
    elif pause == "checkpoint":
        arguments["callbacks"] = [LongCheckpoint(tmp_path, every_n_train_steps=5)]
        arguments["enable_checkpointing"] = True
    else:
        model = LongEvaluation().double()
        loader = DataLoader(dataset(24), batch_size=12)
        arguments.update(val=loader, val_check_interval=6, num_sanity_val_steps=0)
    assert undisturbed(slow(model, **arguments))


class LongForward(nn.Tanh):
    """So long that a heartbeat comes in the middle of it."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.25)
        return super().forward(x)


class LongLastStage(Regression):
    def configure_pipeline(self) -> list[Any]:
        return [*super().configure_pipeline()[:-1], LongForward(), nn.Linear(4, 1)]


@pytest.mark.long
def test_an_operation_that_begins_after_a_long_wait_is_no_fault():
    """The last stage waits for the first, for more than ten times as long as its forward takes."""
    options = {
        "callbacks": [HeartbeatCallback(interval=0.05, timeout=TIMEOUT), SlowHook("on_train_batch_end", (0,))],
        "max_steps": 7,
    }
    assert undisturbed(exact_fit(LongLastStage().double(), 2, 2, **options, strategy={"num_microbatches": 1}))


# ---------------------------------------------------------------------- all at once


class AllStall(L.Callback):
    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == STEP:
            hold_gil(LONG)


@pytest.mark.long
def test_a_stall_of_all_workers_at_once_is_waited_out():
    assert failures(slow(Regression().double(), callbacks=[AllStall()])) == []


# ---------------------------------------------------------------------- one alone


class HoldsGil(L.Callback):
    """One worker computes without letting another thread run."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == STEP and trainer.strategy.grid_rank == 3:
            compute_with_gil(self._seconds)


@pytest.mark.long
def test_a_worker_of_this_machine_that_computes_may_be_silent_for_twelve_seconds():
    run = fit(Regression().double(), 2, 2, callbacks=[HoldsGil(12.0)])
    assert failures(run) == []
    (waited,) = happened(run, "suspected")
    assert waited.details["waits"] == "its process computes"
    assert len(happened(run, "cleared")) == 1
