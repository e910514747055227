"""Gradients of several batches for one step of the optimizer: batch by batch what Lightning does on one device."""

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import same_script as same
import torch
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from support.growth import AwaitReplacement, rejoined
from support.sampling import sampled
from support.training import failures

from lightning_recycle.callbacks import Fault, FaultInjectionCallback

BATCHES = 7
"""Of an epoch."""


class Ordinary(same.Classifier):
    """Learning rates change with every step of the optimizer; hooks look at gradients and counters."""

    def on_after_backward(self) -> None:
        gradients = [p.grad.abs().max() for p in self.parameters() if p.grad is not None]
        self.log("largest", self.trainer.strategy.reduce(torch.stack(gradients).max(), reduce_op="max"))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Data(same.Data):
    def training(self) -> Any:
        return self.loader(same.GLOBAL_BATCH * BATCHES)


def trains(scheduling: dict[int, int] | None = None, **trainer: Any) -> Callable[[same.Session], None]:
    def script(session: same.Session) -> None:
        callbacks = [session.diary(), LearningRateMonitor("step"), *trainer.get("callbacks", ())]
        if scheduling is not None:
            callbacks.append(GradientAccumulationScheduler(scheduling))
        session.data.training = Data(session.data.batch_size).training
        session.fit(
            Ordinary(),
            validates=True,
            **{
                "max_epochs": 2,
                "log_every_n_steps": 1,
                "logger": CSVLogger(session.root, name="logs", version=0),
                **trainer,
                "callbacks": callbacks,
            },
        )
        run = session.run
        run.results["estimated"] = run.trainer.estimated_stepping_batches
        run.results["counts"] = run.trainer.fit_loop.epoch_loop.state_dict()["batch_progress"]
        run.results["factor"] = run.trainer.accumulate_grad_batches
        run.results["val_check_batch"] = run.trainer.val_check_batch

    return script


CASES: dict[str, Callable[[same.Session], None]] = {
    "an epoch that is not a multiple": trains(accumulate_grad_batches=3),
    "more batches than an epoch has": trains(accumulate_grad_batches=10),
    "a limit that is not a multiple": trains(accumulate_grad_batches=2, limit_train_batches=5),
    "a fraction of an epoch": trains(accumulate_grad_batches=2, limit_train_batches=0.5),
    "validations between": trains(accumulate_grad_batches=3, val_check_interval=2),
    "validations over epochs": trains(accumulate_grad_batches=2, val_check_interval=5, check_val_every_n_epoch=None),
    "steps that end in an epoch": trains(accumulate_grad_batches=3, max_epochs=-1, max_steps=4),
    "clipping": trains(accumulate_grad_batches=3, gradient_clip_val=0.05),
    "clipping by value": trains(accumulate_grad_batches=2, gradient_clip_val=0.01, gradient_clip_algorithm="value"),
    "overfitting": trains(accumulate_grad_batches=2, overfit_batches=3),
    "a schedule": trains({0: 1, 1: 3, 2: 2}, max_epochs=3),
    "a schedule that ends": trains({0: 4, 1: 1}, gradient_clip_val=0.05),
}


def assert_the_same(one: same.Run, grid: same.Run) -> None:
    same.assert_same(one.diary("callback"), grid.diary("callback"), where="hooks")
    same.assert_same(one.weights, grid.weights, where="weights")
    same.assert_same(one.metrics, grid.metrics, same.FLOAT32_TOLERANCE, where="metrics")
    same.assert_same(one.results, grid.results, where="results")
    assert one.progress == grid.progress
    assert one.files() == grid.files()


@pytest.mark.parametrize("name", sampled(CASES, 1))
def test_every_batch_is_what_it_is_on_one_device(tmp_path, name):
    one, grid = same.run_both(CASES[name], tmp_path)
    assert_the_same(one, grid)


# ---------------------------------------------------------------------- with failures

WINDOWS = 3  # batches of a step: 0-2, 3-5 and 6 of each epoch


def dies(*faults: Fault, **trainer: Any) -> Callable[[same.Session], None]:
    """Batches are the steps of the schedule, by which faults are numbered."""

    def script(session: same.Session) -> None:
        callbacks = [FaultInjectionCallback(list(faults)), AwaitReplacement([1, 4])] if faults else []
        trains(accumulate_grad_batches=WINDOWS, callbacks=callbacks, **trainer)(session)

    return script


KILLS = {
    "in the middle of a step": [Fault("kill", 0, 1, step=4, at="forward")],
    "where the optimizer steps": [Fault("kill", 1, 0, step=5, at="optimizer")],
    "after a batch was added": [Fault("kill", 1, 1, step=4, at="optimizer", when="after")],
    "in reductions": [Fault("kill", 0, 0, step=3, at="reduce"), Fault("kill", 1, 1, step=11, at="reduce")],
    "at the end of an epoch": [Fault("kill", 1, 0, step=6, at="reduce", when="after")],
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Callable[..., same.Run]:
    @functools.cache
    def run(**trainer: Any) -> same.Run:
        return same.on_one_device(dies(**trainer), tmp_path_factory.mktemp("one"))

    return run


@pytest.mark.parametrize(("name", "clipped"), sampled(itertools.product(KILLS, [False, True]), 1, seed=15))
def test_what_earlier_batches_have_added_survives_a_kill_and_reaches_the_replacement(alone, tmp_path, name, clipped):
    options = {"gradient_clip_val": 0.05} if clipped else {}
    grid = same.on_a_grid(dies(*KILLS[name], **options), tmp_path, max_restarts=10)
    one = alone(**options)
    assert failures(grid.trainer) == [(fault.pipeline, fault.stage) for fault in KILLS[name]]
    assert len(rejoined(grid.trainer)) == len(KILLS[name])
    same.assert_same(one.weights, grid.weights)
    same.assert_same(one.metrics, grid.metrics, same.FLOAT32_TOLERANCE)
    assert one.progress == grid.progress


# ---------------------------------------------------------------------- settings that a hook changes


class WithoutHooks(same.Classifier):
    """Its stages step speculatively, or alone."""

    configure_optimizers = Ordinary.configure_optimizers


class Changes(Callback):
    """Changes settings of the Trainer at the second epoch's start."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for name, value in self.settings.items() if trainer.current_epoch == 1 else ():
            setattr(trainer, name, value)


CLIPS = {"gradient_clip_val": 0.05}
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "clipping begins": ({}, CLIPS),
    "clipping ends": (CLIPS, {"gradient_clip_val": None}),
    "another norm": (CLIPS, {"gradient_clip_val": 0.01}),
    "clipping by value": (CLIPS, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "clipping by norm": ({**CLIPS, "gradient_clip_algorithm": "value"}, {"gradient_clip_algorithm": "norm"}),
    "accumulation begins": (CLIPS, {"accumulate_grad_batches": 3}),
}


@pytest.mark.parametrize(("name", "kill"), sampled(itertools.product(CHANGES, [False, True]), 1, seed=4))
def test_settings_that_a_hook_changes_hold_from_then_on(tmp_path, name, kill):
    at_first, later = CHANGES[name]

    def script(session: same.Session, *faults: Fault) -> None:
        callbacks = [Changes(later), *([FaultInjectionCallback(faults)] if faults else [])]
        session.data.training = Data(session.data.batch_size).training
        session.fit(WithoutHooks(), max_epochs=2, callbacks=callbacks, **at_first)

    one = same.on_one_device(script, tmp_path / "one")
    faults = [Fault("kill", 1, 0, step=9, at="optimizer")] if kill else []
    grid = same.on_a_grid(lambda session: script(session, *faults), tmp_path / "grid")
    assert len(failures(grid.trainer)) == len(faults)
    same.assert_same(one.weights, grid.weights)
    assert one.progress == grid.progress


# ---------------------------------------------------------------------- resuming


def resumes(path: Path) -> Callable[[same.Session], None]:
    def script(session: same.Session) -> None:
        data = Data(session.data.batch_size)
        session.run.module = Ordinary()
        scheduler = GradientAccumulationScheduler({0: 2, 1: 3})
        session.trainer(max_epochs=2, callbacks=[scheduler]).fit(
            session.run.module, data.training(), ckpt_path=path, weights_only=True
        )

    return script


@pytest.mark.parametrize("batch", sampled([4, 7, 10], 1))
def test_a_run_resumes_after_a_step_of_several_batches_with_the_factor_of_its_epoch(tmp_path, batch):
    path = tmp_path / "saved.ckpt"
    whole = same.on_a_grid(trains({0: 2, 1: 3}, callbacks=[same.SavesAt(batch, path)]), tmp_path / "whole")
    resumed = same.on_a_grid(resumes(path), tmp_path)
    same.assert_same(whole.weights, resumed.weights)
    assert whole.progress == resumed.progress
