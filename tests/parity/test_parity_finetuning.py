"""Frozen parameters, frozen stages and parameters that are trained later: the same weights as on one device."""

import functools
import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, Callback, ModelCheckpoint
from lightning.pytorch.callbacks.finetuning import BaseFinetuning
from same_script import STEPS_PER_EPOCH, Classifier, Run, Session, assert_same, on_a_grid, on_one_device
from support.growth import AwaitReplacement, rejoined
from support.sampling import sampled
from support.training import failures
from torch import nn

from lightning_recycle import LayerSpec
from lightning_recycle.callbacks import Fault, FaultInjectionCallback

EPOCHS = 4


class Frozen(Classifier):
    """Of six layers, those in ``frozen`` are not trained at first."""

    def __init__(self, *frozen: int) -> None:
        super().__init__()
        self.frozen = frozen

    def configure_pipeline(self) -> list[Any]:
        torch.manual_seed(0)
        widths = [8, 16, 16, 16, 16, 16, 4]
        layers = [nn.Linear(*width).double() for width in itertools.pairwise(widths)]
        for index in self.frozen:
            layers[index].requires_grad_(False)
        return layers

    @property
    def backbone(self) -> Any:
        return self.layers[:4]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(filter(lambda p: p.requires_grad, self.parameters()), lr=1e-2)


class Later(BaseFinetuning):
    """Trains the first layers from the second epoch on, and the rest of them from the third."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.layers[:4])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.layers[2:4], optimizer, lr=5e-3)
        elif epoch == 2:
            self.unfreeze_and_add_param_group(pl_module.layers[:2], optimizer)


class Alternates(Callback):
    """Trains weights in every other step, and biases always; all are in the optimizer."""

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        for parameter in module.parameters():
            parameter.requires_grad = parameter.dim() == 1 or trainer.global_step % 2 == 0


def training(
    module: Callable[[], Frozen], callbacks: Callable[[], list[Callback]] = list, *more: Callback, **fit: Any
) -> Callable[[Session], None]:
    def script(session: Session) -> None:
        session.run.module = module()
        trainer = session.trainer(callbacks=[*callbacks(), *more], max_epochs=EPOCHS, **fit.get("trainer", {}))
        data = session.data
        trainer.fit(session.run.module, data.training(), data.validation(), ckpt_path=fit.get("ckpt_path"))

    return script


SCRIPTS: dict[str, tuple[Callable[[], Frozen], Callable[[], list[Callback]]]] = {
    "the first stage is frozen": (lambda: Frozen(0, 1, 2), list),
    "the last stage is frozen": (lambda: Frozen(3, 4, 5), list),
    "parts are frozen": (lambda: Frozen(1, 4), list),
    "BaseFinetuning": (Frozen, lambda: [Later()]),
    "BackboneFinetuning": (Frozen, lambda: [BackboneFinetuning(unfreeze_backbone_at_epoch=1)]),
    "requires_grad changes": (Frozen, lambda: [Alternates()]),
}


@functools.cache
def on_one(name: str) -> Run:
    return on_one_device(training(*SCRIPTS[name]), Path(tempfile.mkdtemp()))


def assert_same_training(one: Run, other: Run) -> None:
    assert_same(one.weights, other.weights)
    assert_same(one.metrics, other.metrics)
    assert one.progress == other.progress
    assert names_by_group(one) == names_by_group(other)


def names_by_group(run: Run) -> list[list[list[str]]]:
    """What the callbacks know of the optimizer after a run, on whatever grid."""
    callbacks = [callback for callback in run.trainer.callbacks if isinstance(callback, BaseFinetuning)]
    return [[group["params"] for group in callback._internal_optimizer_metadata.get(0, [])] for callback in callbacks]


@pytest.mark.parametrize("name", sampled(SCRIPTS, 2))
def test_what_is_not_trained_is_left_alone_and_the_rest_is_as_on_one_device(name: str, tmp_path: Path) -> None:
    run = on_a_grid(training(*SCRIPTS[name]), tmp_path)
    assert_same_training(on_one(name), run)


def test_frozen_layers_keep_their_weights(tmp_path: Path) -> None:
    initial = Frozen().state_dict()
    found = on_a_grid(training(lambda: Frozen(0, 1, 2)), tmp_path).weights
    for name, value in initial.items():
        assert torch.equal(found[name], value) == (name.split(".")[1] in "012"), name


class InRecipes(Frozen):
    """With layers that no process builds but the workers of their stage, after the callbacks' ``setup``."""

    def configure_pipeline(self) -> list[Any]:
        widths = [8, 16, 16, 16, 16, 16, 4]
        return [LayerSpec(nn.Linear, *width) for width in itertools.pairwise(widths)]


def test_layers_that_are_built_later_are_frozen_too(tmp_path: Path) -> None:
    def script(session: Session) -> None:
        session.run.module = InRecipes().double()
        session.trainer(max_epochs=1, callbacks=[Later()]).fit(session.run.module, session.data.training())

    fresh = InRecipes().double()
    fresh.materialize()
    found = on_a_grid(script, tmp_path).weights
    for name, value in fresh.state_dict().items():
        assert torch.equal(found[name], value) == (name.split(".")[1] in "0123"), name


FAULTS = {
    "in a step": Fault("kill", 1, 0, step=6),
    "the leader": Fault("kill", 0, 1, step=9),
    # The other stage has applied the step and waits in its hook for the one that comes next.
    "before a change": Fault("kill", 1, 0, step=STEPS_PER_EPOCH - 1, at="optimizer"),
}


@pytest.mark.parametrize(
    ("name", "fault"),
    sampled(itertools.product(["the first stage is frozen", "the last stage is frozen", "BaseFinetuning"], FAULTS), 1),
)
def test_the_same_though_a_worker_dies(name: str, fault: str, tmp_path: Path) -> None:
    run = on_a_grid(training(*SCRIPTS[name], FaultInjectionCallback([FAULTS[fault]])), tmp_path)
    assert len(failures(run.trainer)) == 1
    assert_same_training(on_one(name), run)


@pytest.mark.parametrize("name", sampled(["the first stage is frozen", "BaseFinetuning", "requires_grad changes"], 1))
def test_the_same_though_the_donor_of_a_replacement_dies(name: str, tmp_path: Path) -> None:
    faults = [Fault("kill", 1, 0, step=5), Fault("kill", 0, 0, step=11)]
    more = [FaultInjectionCallback(faults), AwaitReplacement([9])]
    run = on_a_grid(training(*SCRIPTS[name], *more), tmp_path, max_restarts=10)
    assert rejoined(run.trainer)[:1] == [(1, 0)]
    assert failures(run.trainer) == [(1, 0), (0, 0)]
    assert_same_training(on_one(name), run)


@pytest.mark.parametrize("name", sampled(["the first stage is frozen", "BaseFinetuning"], 1))
def test_checkpoints_hold_what_those_of_one_device_hold(name: str, tmp_path: Path) -> None:
    """And resume on one device and on a grid, where they do what one device does with its own."""
    saved = {}
    for kind, run in (("one", on_one_device), ("grid", on_a_grid)):
        (tmp_path / kind).mkdir()
        keep = ModelCheckpoint(tmp_path / kind, "{step}", every_n_train_steps=4, save_top_k=-1)
        run(training(*SCRIPTS[name], keep, trainer={"enable_checkpointing": True}), tmp_path / kind)
        saved[kind] = tmp_path / kind / "step=12.ckpt"
    one, grid = (torch.load(path, weights_only=False) for path in saved.values())
    for checkpoint in (one, grid):
        checkpoint["callbacks"] = {k: v for k, v in checkpoint["callbacks"].items() if k == "Later"}
        del checkpoint["loops"]
    assert grid.pop("lightning_recycle_objects")  # from which the run would start again
    assert_same(one, grid)
    (tmp_path / "expected").mkdir()
    expected = on_one_device(training(*SCRIPTS[name], ckpt_path=saved["one"]), tmp_path / "expected")
    for kind, run in (("one", on_one_device), ("grid", on_a_grid)):
        folder = tmp_path / f"resumed on {kind}"
        folder.mkdir()
        assert_same_training(expected, run(training(*SCRIPTS[name], ckpt_path=saved["grid"]), folder))
