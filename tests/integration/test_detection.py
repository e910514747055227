"""Workers that hang or are stuck are found by one bound; work that takes long is not taken for it."""

import time
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from support.growth import causes, happened
from support.models import Regression, dataset
from support.sampling import sampled
from support.training import TOLERANCE, committed_steps, difference, exact_fit, failures, fit, plain_loop, undisturbed
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_recycle.callbacks import Fault, HeartbeatCallback

TIMEOUT = 1.5  # seconds
LONG = 2.5 * TIMEOUT


def watched(model: Regression, *faults: Fault, **arguments: Any) -> L.Trainer:
    """Trains with the heartbeat of these tests; the weights must be exact."""
    callbacks = [HeartbeatCallback(interval=0.2, timeout=TIMEOUT), *arguments.pop("callbacks", [])]
    run = fit(model, 2, 2, faults, callbacks=callbacks, **arguments)
    assert difference(model.state_dict(), plain_loop(Regression().double(), dataset())) < TOLERANCE
    assert committed_steps(run) == list(range(10))
    return run


@pytest.mark.parametrize("at", sampled(["forward", "backward_input", "backward_weight", "reduce", "optimizer"], 1))
def test_a_worker_that_is_stuck_is_found_although_its_heartbeat_goes_on(at: str) -> None:
    run = watched(Regression().double(), Fault("deadlock", 1, 1, 4, at))
    assert failures(run) == [(1, 1)]
    (event,) = happened(run, "failure")
    assert "without waiting for anybody" in event.details["cause"]
    assert TIMEOUT <= event.seconds < TIMEOUT + 5


def test_a_worker_that_is_stuck_in_a_recovery_is_found() -> None:
    run = watched(Regression().double(), Fault("kill", 1, 0, 4), Fault("deadlock", 1, 1, at="recovery"))
    assert failures(run) == [(1, 0), (1, 1)]
    assert "without waiting for anybody" in causes(run)[1]


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


class LongHook(L.Callback):
    """On one worker only, as on the leader that writes something."""

    def __init__(self, rank: int = 3) -> None:
        self.rank = rank

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.strategy.grid_rank == self.rank and trainer.global_step == 5:
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
    started = time.monotonic()
    assert undisturbed(watched(LongFirstStep().double()))
    assert time.monotonic() - started > LONG  # it really was slow


@pytest.mark.parametrize("pause", sampled(["hook", "data", "checkpoint", "validation"], 1))
def test_a_long_pause_outside_the_schedule_is_no_fault(pause: str, tmp_path: Any) -> None:
    arguments: dict[str, Any] = {}
    model = Regression().double()
    if pause == "hook":
        arguments["callbacks"] = [LongHook()]
    elif pause == "data":
        arguments["data"] = Stalling(*dataset().tensors)
    elif pause == "checkpoint":
        arguments["callbacks"] = [LongCheckpoint(tmp_path, every_n_train_steps=5)]
        arguments["enable_checkpointing"] = True
    else:
        model = LongEvaluation().double()
        loader = DataLoader(dataset(24), batch_size=12)
        arguments.update(val=loader, val_check_interval=6, num_sanity_val_steps=0)
    started = time.monotonic()
    assert undisturbed(watched(model, **arguments))
    assert time.monotonic() - started > LONG


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
    options = {"callbacks": [HeartbeatCallback(interval=0.05, timeout=TIMEOUT), LongHook(rank=0)], "max_steps": 7}
    assert undisturbed(exact_fit(LongLastStage().double(), 2, 2, **options, strategy={"num_microbatches": 1}))


def test_a_worker_that_is_five_times_slower_is_no_fault() -> None:
    assert undisturbed(watched(Regression().double(), Fault("slow", 0, 1, 3, factor=5.0, steps=4)))
