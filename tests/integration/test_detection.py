"""Suspicion is not proof: what takes long is no fault, and a worker is given up only if a healthy peer can do its work.

Workers that are stuck are found; most places where they can be are in test_fault_kinds.py.
"""

import ctypes
import itertools
import sys
import time
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from support.growth import happened
from support.models import GLOBAL_BATCH, Regression, dataset
from support.sampling import sampled
from support.training import TOLERANCE, committed_steps, difference, exact_fit, failures, fit, plain_loop, undisturbed
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_recycle.callbacks import Fault, HeartbeatCallback

TIMEOUT = 1.5  # seconds
LONG = 2.5 * TIMEOUT
STEP = 5  # the one that takes long


def watched(model: Regression, *faults: Fault, pipelines: int = 2, **arguments: Any) -> L.Trainer:
    """Trains with the heartbeat of these tests; the weights must be exact."""
    callbacks = [HeartbeatCallback(interval=0.2, timeout=TIMEOUT), *arguments.pop("callbacks", [])]
    run = fit(model, pipelines, 2, faults, callbacks=callbacks, **arguments)
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
def test_two_workers_that_are_stuck_at_once_are_found() -> None:
    run = watched(Regression().double(), Fault("deadlock", 1, 0, 4), Fault("deadlock", 0, 1, 4, "reduce"))
    assert sorted(failures(run)) == [(0, 1), (1, 0)]


@pytest.mark.long
def test_a_worker_that_is_stuck_in_an_operation_that_is_new_to_the_plan_is_found() -> None:
    """With 1F1B the backward is fused; the plan for a failure splits it, and nobody has measured a W before."""
    faults = [Fault("kill", 0, 0, 4), Fault("deadlock", 0, 1, 4, "backward_weight")]
    run = watched(Regression().double(), *faults, strategy={"planner": FusedAtFirst()})
    assert failures(run) == [(0, 0), (0, 1)]


class FusedAtFirst:
    """A planner that fuses the backward while nothing has failed."""

    def plan(self, problem: Any) -> Any:
        from lightning_recycle.planning import one_f_one_b, plan

        return plan(problem) if problem.failed else one_f_one_b(problem)


# ---------------------------------------------------------------------- what is no fault


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
def test_a_slow_first_step_is_no_fault() -> None:
    assert undisturbed(slow(LongFirstStep().double()))


@pytest.mark.parametrize("pause", sampled(["hook", "data", "checkpoint", "validation"], 1))
@pytest.mark.long
def test_a_long_pause_outside_the_schedule_is_no_fault(pause: str, tmp_path: Any) -> None:
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
def test_an_operation_that_begins_after_a_long_wait_is_no_fault() -> None:
    """The last stage waits for the first, for more than ten times as long as its forward takes."""
    options = {
        "callbacks": [HeartbeatCallback(interval=0.05, timeout=TIMEOUT), SlowHook("on_train_batch_end", (0,))],
        "max_steps": 7,
    }
    assert undisturbed(exact_fit(LongLastStage().double(), 2, 2, **options, strategy={"num_microbatches": 1}))


# ---------------------------------------------------------------------- users' code around an operation


class SlowClipping(Regression):
    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        if self.trainer.global_step == STEP:
            time.sleep(LONG)


class SlowOutputs(Regression):
    def on_training_output(self, output: Tensor, target: Tensor) -> None:
        if self.trainer.global_step == STEP and self.trainer.strategy.grid_rank == 3 and not hasattr(self, "paused"):
            self.paused = True
            time.sleep(LONG)


class RarelyExpensive(torch.optim.AdamW):
    """As one that computes a new preconditioner every few steps."""

    calls = 0

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        result = super().step(closure)
        self.calls += 1
        if self.calls == STEP + 1:
            time.sleep(LONG)
        return result


class WithRarelyExpensive(Regression):
    def configure_optimizers(self) -> Any:
        return RarelyExpensive(self.parameters(), lr=1e-2)


@pytest.mark.long
@pytest.mark.parametrize(
    ("hook", "ranks"),
    sampled(itertools.product(["on_before_backward", "on_before_optimizer_step"], [(0, 1, 2, 3), (3,)]), 1),
)
def test_a_slow_hook_around_the_optimizer_is_no_fault(hook: str, ranks: tuple[int, ...]) -> None:
    assert undisturbed(slow(Regression().double(), callbacks=[SlowHook(hook, ranks)]))


@pytest.mark.long
@pytest.mark.parametrize("model", sampled([SlowClipping, WithRarelyExpensive, SlowOutputs], 1))
def test_slow_code_of_the_user_around_an_operation_is_no_fault(model: type[Regression]) -> None:
    assert undisturbed(slow(model().double()))


# ---------------------------------------------------------------------- one slow micro-batch


class SlowSample(Regression):
    """The loss of one sample takes long wherever it is computed; ``pause`` is how."""

    pause = staticmethod(time.sleep)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        slow = dataset().tensors[1][GLOBAL_BATCH * STEP]
        if (target == slow).any():
            self.pause(LONG)
        return super().loss(output, target)


class StallingSample(SlowSample):
    pause = staticmethod(hold_gil)


@pytest.mark.long
@pytest.mark.parametrize(("model", "pipelines"), sampled(itertools.product([SlowSample, StallingSample], [1, 2, 3]), 1))
def test_one_slow_micro_batch_takes_out_one_worker_at_most(model: type[Regression], pipelines: int) -> None:
    """A peer redoes it, and is as slow: that is the micro-batch's fault, not the peer's."""
    run = slow(model().double(), pipelines=pipelines)
    assert len(failures(run)) <= min(1, pipelines - 1)


# ---------------------------------------------------------------------- all at once


class Stalls(nn.Tanh):
    """Holds the interpreter for long once, on each worker that has this layer."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += x.requires_grad or x.grad_fn is not None or self.training
        if self.calls == 20:
            hold_gil(LONG)
        return super().forward(x)


class OneStageStalls(Regression):
    def configure_pipeline(self) -> list[Any]:
        return [Stalls() if isinstance(layer, nn.Tanh) else layer for layer in super().configure_pipeline()]


class AllStall(L.Callback):
    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == STEP:
            hold_gil(LONG)


@pytest.mark.long
def test_a_stall_of_all_workers_at_once_is_waited_out() -> None:
    assert failures(slow(Regression().double(), callbacks=[AllStall()])) == []


@pytest.mark.long
def test_a_stall_of_all_replicas_of_a_stage_is_waited_out_and_the_record_says_so() -> None:
    run = slow(OneStageStalls().double())
    assert failures(run) == []
    assert happened(run, "evicted") == []


@pytest.mark.long
def test_the_last_worker_of_a_stage_may_stall() -> None:
    faults = [Fault("kill", 0, 0, 2), Fault("kill", 1, 1, 3)]
    run = slow(Regression().double(), *faults, callbacks=[AllStall()])
    assert failures(run) == [(0, 0), (1, 1)]


# ---------------------------------------------------------------------- one alone


class HoldsGil(L.Callback):
    """One worker computes without letting another thread run."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        if trainer.global_step == STEP and strategy.grid_rank == 3:
            compute_with_gil(self._seconds)


@pytest.mark.long
def test_a_worker_of_this_machine_that_computes_may_be_silent_for_twelve_seconds() -> None:
    run = fit(Regression().double(), 2, 2, callbacks=[HoldsGil(12.0)])
    assert failures(run) == []
    (waited,) = happened(run, "suspected")
    assert waited.details["waits"] == "its process computes"
    assert len(happened(run, "cleared")) == 1


@pytest.mark.long
def test_a_worker_that_computes_in_silence_is_given_up_after_ten_times_the_timeout() -> None:
    callbacks = [HeartbeatCallback(interval=0.2, timeout=1.0), HoldsGil(100.0)]
    run = fit(Regression().double(), 2, 2, callbacks=callbacks)
    assert failures(run) == [(1, 1)]
    (evicted,) = happened(run, "evicted")
    assert evicted.details["limit"] == 10.0
    assert 10.0 < evicted.details["seconds"] < 15.0
    assert "because its process computes" in evicted.details["cause"]
