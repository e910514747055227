"""More workers than the batch has pipelines, with all else that a run can do: one of them is killed each time."""

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from support.growth import happened
from support.models import GLOBAL_BATCH, GLOBAL_MICROBATCHES, Regression, dataset
from support.options import recycle_strategy
from support.sampling import sampled
from support.streams import Stream
from support.training import QUIET, TOLERANCE, difference, failures, on_one_device
from test_moving_layers import Move
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_recycle.callbacks import Fault, FaultInjectionCallback

PIPELINES, LANES, LENGTH = 2, 4, 14
NUMBERS = {"num_pipelines": PIPELINES, "min_pipelines": 1, "max_pipelines": LANES}
SAMPLES = 9 * GLOBAL_BATCH + 7  # of a stream, with a smaller last batch in each epoch
KILLED = (3, 0)


class Measuring(Regression):
    """Measures and predicts."""

    def on_training_loss(self, loss: Tensor) -> None:
        self.log("train_loss", loss, on_step=False, on_epoch=True)

    def on_validation_output(self, output: Tensor, target: Tensor) -> None:
        self.log("val_error", (output - target).square().mean())

    def on_test_output(self, output: Tensor, target: Tensor) -> None:
        self.log("test_error", (output - target).abs().mean())

    def on_predict_output(self, output: Tensor) -> Tensor:
        return 2 * output


class Manual(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward((self.net(batch[0]) - batch[1]).square().mean())
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def loader(pipelines: int, stream: bool = False) -> DataLoader[Any]:
    data: Any = Stream(SAMPLES) if stream else dataset(GLOBAL_BATCH * LENGTH)
    return DataLoader(data, batch_size=GLOBAL_BATCH // pipelines, drop_last=True)


def on_lanes(
    stages: int = 2, faults: tuple[Fault, ...] = (Fault("kill", *KILLED, step=3, at="backward_input"),), **options: Any
) -> L.Trainer:
    """A Trainer on four lanes."""
    callbacks = [FaultInjectionCallback(list(faults)), *options.pop("callbacks", ())]
    wanted = {**NUMBERS, "num_microbatches": GLOBAL_MICROBATCHES // PIPELINES, **options.pop("strategy", {})}
    strategy = recycle_strategy(pipeline_parallel_size=stages, **wanted)
    settings = {"max_steps": LENGTH, "max_epochs": -1, **QUIET, **options}
    return L.Trainer(accelerator="cpu", devices=LANES * stages, strategy=strategy, callbacks=callbacks, **settings)


def logged(run: L.Trainer) -> dict[str, float]:
    return {n: float(value) for n, value in run.callback_metrics.items() if not n.startswith("recycle/")}


@dataclass(frozen=True)
class With:
    """What else the run does; by default one worker above the pipelines is lost."""

    strategy: dict[str, Any] = field(default_factory=dict)
    callbacks: tuple[Any, ...] = ()
    model: Callable[[], Any] = Measuring
    stages: int = 2
    stream: bool = False
    faults: tuple[Fault, ...] = (Fault("kill", *KILLED, step=3, at="backward_input"),)
    check: Callable[[L.Trainer], bool] = lambda run: failures(run) == [KILLED]


WITH = {
    "layers that move": With(
        callbacks=(Move({2: (4, 2), 6: (1, 5)}),), check=lambda run: len(happened(run, "layers_moved")) == 2
    ),
    "layers that may move": With({"rebalance": "always"}),
    "verification": With({"verify": 1.0}),
    "a stream": With(stream=True),
    "manual optimization": With(model=Manual, stages=1, faults=(Fault("kill", *KILLED, step=3),)),
}


@pytest.mark.parametrize("what", sampled(WITH, 1, rest=pytest.mark.long))
def test_a_worker_above_the_pipelines_is_lost(what):
    """Replacements, clipping and checkpoints are in chaos runs of this kind."""
    case = WITH[what]
    run = on_lanes(case.stages, case.faults, strategy=dict(case.strategy), callbacks=case.callbacks)
    model, alone = case.model().double(), case.model().double()
    run.fit(model, loader(PIPELINES, case.stream))
    reference = on_one_device(max_steps=LENGTH, max_epochs=-1)
    reference.fit(alone, loader(1, case.stream))
    assert difference(model.state_dict(), alone.state_dict()) < TOLERANCE
    assert run.global_step == reference.global_step == LENGTH
    assert logged(run) == pytest.approx(logged(reference), rel=1e-10)
    assert case.check(run), run.strategy.history


class KilledAt(L.Callback):
    """Ends the worker of ``rank`` at a batch of an evaluation."""

    def __init__(self, rank: int, batch: int) -> None:
        self._rank, self._batch = rank, batch

    def _on_batch(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int, *_: Any) -> None:
        if (trainer.strategy.grid_rank, batch_idx) == (self._rank, self._batch):
            os.kill(os.getpid(), signal.SIGKILL)

    on_validation_batch_start = on_test_batch_start = on_predict_batch_start = _on_batch


EVALUATIONS: dict[str, Callable[[L.Trainer, Any, Any], Any]] = {
    "validate": lambda run, model, data: run.validate(model, data, verbose=False),
    "test": lambda run, model, data: run.test(model, data, verbose=False),
    "predict": lambda run, model, data: torch.cat(run.predict(model, data)),
    "validation in fit": lambda run, model, data: [(run.fit(model, data, data), logged(run))[1]],
}


@pytest.mark.parametrize("what", sampled(EVALUATIONS, 1, rest=pytest.mark.long))
@pytest.mark.parametrize("rank", sampled([6, 7, 0], 1, rest=pytest.mark.long))
def test_a_worker_is_lost_in_an_evaluation(what, rank):
    found = EVALUATIONS[what](on_lanes(faults=(), callbacks=[KilledAt(rank, 2)]), Measuring().double(), loader(2))
    alone = EVALUATIONS[what](on_one_device(max_steps=LENGTH), Measuring().double(), loader(1))
    if isinstance(alone, Tensor):
        assert float((found - alone).abs().max()) < TOLERANCE
    else:
        assert found[0] == pytest.approx(alone[0], rel=1e-10)


def complete_checkpoint(trainer: L.Trainer, *_: Any) -> None:
    if trainer.global_step == 6:
        trainer.strategy.session.checkpoints.complete()


def test_a_stage_that_is_lost_starts_again_with_as_many_workers_as_there_are(tmp_path):
    """By default, as there are checkpoints; more lanes than pipelines are used again."""
    saving = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=4, save_top_k=-1)
    faults = tuple(Fault("kill", lane, 0, step=6 + lane % 2) for lane in range(LANES))
    completes = LambdaCallback(on_train_batch_start=complete_checkpoint)
    run = on_lanes(1, faults, callbacks=[saving, completes], enable_checkpointing=True)
    model, alone = Measuring().double(), Measuring().double()
    run.fit(model, loader(PIPELINES))
    on_one_device(max_steps=LENGTH).fit(alone, loader(1))
    assert difference(model.state_dict(), alone.state_dict()) < TOLERANCE
    assert len(happened(run, "stage_lost")) == 1
    assert len(run.strategy.schedules[-1].live_workers) == LANES
