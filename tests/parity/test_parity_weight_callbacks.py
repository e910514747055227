"""Callbacks that average, freeze or thaw weights do what they do on one device."""

import functools
import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import same_script as same
import torch
from lightning.pytorch import callbacks as cb
from lightning.pytorch.callbacks.finetuning import BaseFinetuning
from same_script import STEPS_PER_EPOCH, Classifier, Run, Session, assert_same, on_a_grid, on_one_device
from support.growth import AwaitReplacement, rejoined
from support.sampling import sampled
from support.training import failures
from torch import Tensor, nn
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_recycle import LayerSpec
from lightning_recycle.callbacks import Fault, FaultInjectionCallback

EPOCHS = 4
AT_EPOCH_END = 12  # steps
WIDTHS = list(itertools.pairwise([8, 16, 16, 16, 16, 16, 4]))

# ---------------------------------------------------------------------- what is averaged


class Counter(nn.Module):
    """Passes its input on, with a buffer that is averaged like the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))
        self.scale: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Averaged(Classifier):
    """With a buffer, and a learning rate that a scheduler changes."""

    def configure_pipeline(self) -> list[Any]:
        layers = super().configure_pipeline()
        return [*layers[:1], Counter(), *layers[1:]]

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)}


class EveryEpoch(cb.WeightAveraging):
    """The equally weighted average of the weights after each epoch but the first."""

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return epoch_idx is not None and epoch_idx >= 1


AVERAGING: dict[str, Callable[[], cb.Callback]] = {
    "WeightAveraging by epoch": EveryEpoch,
    "EMAWeightAveraging": lambda: cb.EMAWeightAveraging(decay=0.8, update_starting_at_step=2),
    "EMAWeightAveraging without buffers": lambda: cb.EMAWeightAveraging(decay=0.5, use_buffers=False),
    "StochasticWeightAveraging": lambda: cb.StochasticWeightAveraging(0.05, swa_epoch_start=2, annealing_epochs=2),
}
EMA_AND_SWA = ["EMAWeightAveraging", "StochasticWeightAveraging"]

# ---------------------------------------------------------------------- what is frozen


class Frozen(Classifier):
    """Of six layers, those in ``frozen`` are not trained at first."""

    def __init__(self, *frozen: int) -> None:
        super().__init__()
        self.frozen = frozen

    def configure_pipeline(self) -> list[Any]:
        torch.manual_seed(0)
        layers = [nn.Linear(*width).double() for width in WIDTHS]
        for index in self.frozen:
            layers[index].requires_grad_(False)
        return layers

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


class Alternates(cb.Callback):
    """Trains weights in every other step, and biases always; all are in the optimizer."""

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        for parameter in module.parameters():
            parameter.requires_grad = parameter.dim() == 1 or trainer.global_step % 2 == 0


FREEZING: dict[str, tuple[Callable[[], Any], Callable[[], list[cb.Callback]]]] = {
    "the first stage is frozen": (lambda: Frozen(0, 1, 2), list),
    "the last stage is frozen": (lambda: Frozen(3, 4, 5), list),
    "BaseFinetuning": (Frozen, lambda: [Later()]),
    "requires_grad changes": (Frozen, lambda: [Alternates()]),
}
SCRIPTS = {**FREEZING, **{name: (Averaged, lambda make=make: [make()]) for name, make in AVERAGING.items()}}

# ---------------------------------------------------------------------- runs


class Validations(cb.Callback):
    """Keeps the validation loss of each epoch, in its state, so that the launching process has it."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_validation_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["val_loss"]))

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.losses = list(state_dict["losses"])


def training(
    name: str, *more: cb.Callback, stateful: bool = False, ckpt_path: Path | None = None, **trainer: Any
) -> same.Script:
    """Trains the module of ``name`` with its callbacks."""

    def script(session: Session) -> None:
        (module, callbacks), validations, data = SCRIPTS[name], Validations(), session.data
        session.run.module = module()
        run = session.trainer(callbacks=[*callbacks(), validations, *more], max_epochs=EPOCHS, **trainer)
        loader = (
            StatefulDataLoader(data.training().dataset, batch_size=data.batch_size) if stateful else data.training()
        )
        run.fit(session.run.module, loader, data.validation(), ckpt_path=ckpt_path)
        session.run.results["validations"] = validations.losses

    return script


@functools.cache
def on_one(name: str) -> Run:
    """On one device, without this strategy."""
    return on_one_device(training(name), Path(tempfile.mkdtemp()))


def names_by_group(run: Run) -> list[list[list[str]]]:
    """What the callbacks know of the optimizer after a run, on whatever grid."""
    callbacks = [callback for callback in run.trainer.callbacks if isinstance(callback, BaseFinetuning)]
    return [[group["params"] for group in callback._internal_optimizer_metadata.get(0, [])] for callback in callbacks]


def assert_same_training(one: Run, other: Run) -> None:
    assert_same(one.weights, other.weights)
    assert_same(one.metrics, other.metrics)
    assert_same(one.results["validations"], other.results["validations"])
    assert one.progress == other.progress
    assert names_by_group(one) == names_by_group(other)


def long(parameters: list[Any]) -> list[Any]:
    """The parameters, marked ``long`` too."""
    return [pytest.param(*each.values, marks=[*each.marks, pytest.mark.long]) for each in parameters]


@pytest.mark.parametrize(("name", "joins", "stages"), [
    *sampled(itertools.product(FREEZING, [9], [2]), 1),
    *long(sampled(itertools.product(AVERAGING, [5, 10], [1, 2]), 3)),
])  # fmt: skip
def test_the_same_though_the_donor_of_a_replacement_dies(name, joins, stages, tmp_path):
    """What the new worker holds is then all that there is of the first stage."""
    faults = [Fault("kill", 1, 0, step=joins - 3), Fault("kill", 0, 0, step=joins + 2)]
    more = [FaultInjectionCallback(faults), AwaitReplacement([joins])]
    run = on_a_grid(training(name, *more), tmp_path, stages=stages, max_restarts=10)
    assert rejoined(run.trainer)[:1] == [(1, 0)]
    assert failures(run.trainer) == [(1, 0), (0, 0)]
    assert_same_training(on_one(name), run)


# ---------------------------------------------------------------------- layers that are recipes


class InRecipes(Frozen):
    """With layers that no process builds but the workers of their stage, after the callbacks' ``setup``."""

    def configure_pipeline(self) -> list[Any]:
        return [LayerSpec(nn.Linear, *width) for width in WIDTHS]


class CopiesWhatItOwns(cb.Callback):
    """Fails if the callback that averages has copied more than the layers of the stage."""

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        (averaging,) = (c for c in trainer.callbacks if isinstance(c, cb.WeightAveraging))
        copied = [name for name, _ in averaging._average_model.module.named_parameters()]
        assert copied == [name for name, _ in module.named_parameters()]
        assert len(copied) <= 6  # of 12


def with_recipes(*callbacks: cb.Callback, epochs: int) -> same.Script:
    def script(session: Session) -> None:
        session.run.module = InRecipes().double()
        trainer = session.trainer(max_epochs=epochs, callbacks=list(callbacks))
        trainer.fit(session.run.module, session.data.training())

    return script


def test_layers_that_are_built_later_are_frozen_too(tmp_path):
    fresh = InRecipes().double()
    fresh.materialize()
    found = on_a_grid(with_recipes(Later(), epochs=1), tmp_path).weights
    for name, value in fresh.state_dict().items():
        assert torch.equal(found[name], value) == (name.split(".")[1] in "0123"), name


@pytest.mark.long
def test_no_worker_copies_more_than_its_stage(tmp_path):
    whole, pieces = (
        on_a_grid(
            with_recipes(cb.EMAWeightAveraging(decay=0.8), CopiesWhatItOwns(), epochs=2), tmp_path, **grid
        ).weights
        for grid in ({"stages": 2}, {"stages": 3, "num_microbatches": 4})
    )
    assert_same(whole, pieces)


# ---------------------------------------------------------------------- checkpoints


@functools.cache
def checkpoints_of(name: str, writer: str) -> Path:
    """The checkpoints of a training, of every second step."""
    root = Path(tempfile.mkdtemp())
    saves = cb.ModelCheckpoint(root / "saved", "{step}", every_n_train_steps=2, save_top_k=-1)
    script = training(name, saves, stateful=writer.endswith("stateful"), enable_checkpointing=True)
    if writer.startswith("one device"):
        on_one_device(script, root)
    else:
        on_a_grid(script, root, save_distributed_checkpoint=writer == "sharded")
    return root / "saved"


@functools.cache
def resumed_on_one_device(name: str, step: int) -> Run:
    """With the sample that follows, also in the middle of an epoch."""
    stateful = step % STEPS_PER_EPOCH > 0  # at the end of an epoch, such a loader has no more samples to resume with
    path = checkpoints_of(name, "one device, stateful" if stateful else "one device") / f"step={step}.ckpt"
    return on_one_device(training(name, stateful=stateful, ckpt_path=path), Path(tempfile.mkdtemp()))


SAVED = ["the first stage is frozen", "BaseFinetuning"]


@pytest.mark.parametrize("name", [*sampled(SAVED, 1), *long(sampled(AVERAGING, 1))])
def test_checkpoints_hold_what_those_of_one_device_hold(name):
    one, grid = (checkpoints_of(name, writer) for writer in ("one device", "one file"))
    for step in (2, AT_EPOCH_END, 14):
        expected, found = (torch.load(folder / f"step={step}.ckpt", weights_only=False) for folder in (one, grid))
        for checkpoint in (expected, found):
            kept = {k: v for k, v in checkpoint["callbacks"].items() if "Averaging" in k or k == "Later"}
            checkpoint["callbacks"] = kept
            del checkpoint["loops"]
        assert found.pop("lightning_recycle")  # from which a run goes on
        assert_same(expected, found)


WRITTEN = (("one device", 6), ("one file", AT_EPOCH_END), ("one file", 14), ("sharded", 6))


@pytest.mark.long
@pytest.mark.parametrize(("name", "writer", "step"), [
    ("the first stage is frozen", "one file", AT_EPOCH_END),
    ("BaseFinetuning", "one file", 14),  # what it has thawed is frozen after any resume
    *sampled([(name, *written) for name in EMA_AND_SWA for written in WRITTEN], 3),
])  # fmt: skip
def test_a_checkpoint_resumes_on_another_grid(name, writer, step, tmp_path):
    path = checkpoints_of(name, writer) / f"step={step}.ckpt"
    resumed = on_a_grid(training(name, ckpt_path=path), tmp_path, stages=3, num_microbatches=4)
    # Lightning itself leaves out the end of the epoch when it resumes from a checkpoint of its last batch.
    undisturbed = (writer, step) == ("one file", AT_EPOCH_END)
    expected = on_one(name) if undisturbed else resumed_on_one_device(name, step)
    assert_same_training(expected, resumed)
