"""Hooks have no usual duration: no code of the user around an operation is judged by how long that usually takes."""

import inspect
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from support.growth import AwaitReplacement, rejoined
from support.models import Scheduled, dataset
from support.training import failures, fit
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from lightning_recycle.callbacks import Fault


def check(trainer: L.Trainer | None, name: str) -> None:
    """Ends the run if ``name`` is called within an operation that may take ten times its usual duration only."""
    session: Any = getattr(getattr(trainer, "strategy", None), "_session", None)
    if session is not None and session.client.activity.kind:  # None in the launching process
        raise AssertionError(f"{name} runs within {session.client.activity}")


def checked(original: Callable[..., Any], trainer_of: Callable[[Any], L.Trainer | None]) -> Callable[..., Any]:
    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        check(trainer_of(self), original.__name__)
        return original(self, *args, **kwargs)

    return hook


def of_module(module: Any) -> L.Trainer | None:
    return None if module._trainer is None else module.trainer  # without it the attribute raises


def hooks_of(cls: type) -> dict[str, Callable[..., Any]]:
    """The functions of ``cls`` that are named like hooks."""
    functions = dict(inspect.getmembers(cls, inspect.isfunction))
    return {name: function for name, function in functions.items() if name.startswith("on_")}


class CheckedData(TensorDataset):
    trainer: L.Trainer | None = None

    def __getitem__(self, index: Any) -> Any:
        check(CheckedData.trainer, "__getitem__")
        return super().__getitem__(index)


class CheckedCallback(L.Callback):
    """Every hook of a callback."""

    trainer: L.Trainer | None = None

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.trainer = CheckedData.trainer = trainer

    @override
    def state_dict(self) -> dict[str, Any]:
        check(self.trainer, "state_dict")
        return {"something": 1}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        check(self.trainer, "load_state_dict")


for name, function in hooks_of(L.Callback).items():
    setattr(CheckedCallback, name, checked(function, lambda callback: callback.trainer))


class CheckedOptimizer(torch.optim.SGD):
    trainer: L.Trainer | None = None

    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        check(self.trainer, "optimizer.step")
        return super().step(closure)


class CheckedModel(Scheduled):
    """The hooks of a module, and what else a step calls of the user's."""

    def configure_optimizers(self) -> Any:
        configured = super().configure_optimizers()
        optimizer = CheckedOptimizer(self.parameters(), lr=0.1)
        optimizer.trainer = of_module(self)
        configured["optimizer"] = configured["lr_scheduler"]["scheduler"].optimizer = optimizer
        return configured

    def on_training_output(self, output: Tensor, target: Tensor) -> None:
        check(of_module(self), "on_training_output")
        self.log("error", (output - target).abs().mean(), on_epoch=True)


MORE = (
    "split_batch", "transfer_batch_to_device", "configure_gradient_clipping", "optimizer_step", "lr_scheduler_step",
    "log",
)  # fmt: skip
for name in {*hooks_of(L.LightningModule), *MORE}:
    setattr(CheckedModel, name, checked(getattr(CheckedModel, name), of_module))


class CheckedLogger(CSVLogger):
    trainer: L.Trainer | None = None


for name in ("log_metrics", "save", "log_hyperparams", "after_save_checkpoint"):
    setattr(CheckedLogger, name, checked(getattr(CSVLogger, name), lambda logger: logger.trainer))


class TellLogger(L.Callback):
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        for logger in trainer.loggers:
            logger.trainer = trainer


def test_no_code_of_the_users_around_an_operation_runs_within_one_that_has_a_usual_duration(tmp_path):
    """Through a validation, checkpoints, the leader's death, a recovery and a rejoin."""
    callbacks = [TellLogger(), CheckedCallback(), ModelCheckpoint(tmp_path, every_n_train_steps=3)]
    run = fit(
        CheckedModel().double(), 2, 2, [Fault("kill", 0, 1, 4)], CheckedData(*dataset().tensors),
        callbacks=[*callbacks, AwaitReplacement([8])],
        val=DataLoader(dataset(24), batch_size=12), val_check_interval=5, enable_checkpointing=True,
        logger=CheckedLogger(tmp_path), log_every_n_steps=1, strategy={"max_restarts": 10},
    )  # fmt: skip
    assert failures(run) == rejoined(run) == [(0, 1)]
    assert run.global_step == 10
