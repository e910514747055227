"""Averages of the weights, kept by Lightning's callbacks, are those of one device: in validation, in checkpoints, after
``fit``, whoever dies and whoever joins.
"""

import functools
import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from same_script import (
    GLOBAL_BATCH,
    PIPELINES,
    STEPS_PER_EPOCH,
    Classifier,
    Data,
    Run,
    Session,
    assert_same,
    on_one_device,
    run_both,
)
from support.growth import AwaitReplacement, rejoined
from support.options import recycle_strategy
from support.sampling import sampled
from support.scripts import consolidated
from support.training import failures
from torch import Tensor, nn
from torch.nn import functional
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_recycle import LayerSpec
from lightning_recycle.callbacks import Fault, FaultInjectionCallback

pytestmark = pytest.mark.long

EPOCHS = 4
AT_EPOCH_END = 12  # steps


class Counter(nn.Module):
    """Passes its input on, with a buffer that is averaged like the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))
        self.scale: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Averaged(Classifier):
    """With a buffer, a learning rate that a scheduler changes, and metrics of each epoch's validation."""

    def configure_pipeline(self) -> list[Any]:
        layers = super().configure_pipeline()
        return [*layers[:1], Counter(), *layers[1:]]

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)}


class EveryEpoch(WeightAveraging):
    """The equally weighted average of the weights after each epoch but the first."""

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return epoch_idx is not None and epoch_idx >= 1


class Validations(L.Callback):
    """Keeps the validation loss of each epoch, in its state, so that the launching process has it."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_validation_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["val_loss"]))

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.losses = list(state_dict["losses"])


CALLBACKS: dict[str, Callable[[], L.Callback]] = {
    "WeightAveraging": WeightAveraging,
    "WeightAveraging by epoch": EveryEpoch,
    "EMAWeightAveraging": lambda: EMAWeightAveraging(decay=0.8, update_starting_at_step=2),
    "EMAWeightAveraging without buffers": lambda: EMAWeightAveraging(decay=0.5, use_buffers=False),
    "StochasticWeightAveraging": lambda: StochasticWeightAveraging(0.05, swa_epoch_start=2, annealing_epochs=2),
    "StochasticWeightAveraging linear": lambda: StochasticWeightAveraging(
        [0.02], swa_epoch_start=0.5, annealing_strategy="linear", device=None
    ),
}


def training(name: str, *more: L.Callback, epochs: int = EPOCHS, **fit: Any) -> Callable[[Session], None]:
    """A script that trains with the averaging callback ``name``."""

    def script(session: Session) -> None:
        validations = Validations()
        callbacks = [CALLBACKS[name](), validations, *more]
        module = Averaged()
        session.run.module = module
        trainer = session.trainer(callbacks=callbacks, max_epochs=epochs, **fit.get("trainer", {}))
        data = session.data
        stateful = fit.get("stateful", False)
        loader = (
            StatefulDataLoader(data.training().dataset, batch_size=data.batch_size) if stateful else data.training()
        )
        trainer.fit(module, loader, data.validation(), ckpt_path=fit.get("ckpt_path"))
        session.run.results["validations"] = validations.losses
        session.run.results["callback"] = callbacks[0].state_dict()

    return script


def assert_same_training(one: Run, other: Run) -> None:
    assert_same(one.weights, other.weights)
    assert_same(one.metrics, other.metrics)
    assert_same(one.results["validations"], other.results["validations"])
    assert one.progress == other.progress


@pytest.mark.parametrize("name", sampled(CALLBACKS, 2))
def test_averages_are_those_of_one_device(name: str, tmp_path: Path) -> None:
    one, grid = run_both(training(name), tmp_path)
    assert_same_training(one, grid)
    assert len(one.results["validations"]) == EPOCHS + 1  # with the sanity check


def test_the_averages_of_lightning_are_not_the_last_weights(tmp_path: Path) -> None:
    def plain(session: Session) -> None:
        session.fit(Averaged(), validates=True, max_epochs=EPOCHS)

    (tmp_path / "plain").mkdir()
    last = on_one_device(plain, tmp_path / "plain")
    for name in CALLBACKS:
        (tmp_path / name).mkdir()
        averaged = on_one_device(training(name), tmp_path / name)
        with pytest.raises(AssertionError):
            assert_same(averaged.weights, last.weights, tolerance=1e-3)


def on_grid(script: Callable[[Session], None], root: Path, stages: int = 2, **strategy: Any) -> Run:
    """As :func:`on_a_grid`, on 2 x ``stages`` workers."""
    arguments = {"pipeline_parallel_size": stages, "num_microbatches": 2, **strategy}
    run = Run(None, None, root)

    def choose() -> dict[str, Any]:
        return {"devices": PIPELINES * stages, "strategy": recycle_strategy(**arguments)}

    root.mkdir(exist_ok=True)
    script(Session(root, choose, Data(GLOBAL_BATCH // PIPELINES), run))
    return run


@functools.cache
def undisturbed(name: str) -> Run:
    """On one device, without this strategy."""
    return on_one_device(training(name), Path(tempfile.mkdtemp()))


@pytest.mark.parametrize("name", sampled(["EMAWeightAveraging", "StochasticWeightAveraging"], 1))
def test_averages_on_one_stage_are_those_of_one_device(name: str, tmp_path: Path) -> None:
    assert_same_training(undisturbed(name), on_grid(training(name), tmp_path, stages=1))


FAULTS = {
    "in a step": [Fault("kill", 1, 0, step=6)],
    "the leader": [Fault("kill", 0, 1, step=9)],
    "in a validation": [Fault("kill", 1, 1, step=8, at="validation")],
    # The other stage has applied this step, its last before a validation, and serves it from there.
    "while others validate": [Fault("kill", 1, 0, step=2 * STEPS_PER_EPOCH - 1, at="reduce")],
    "in the last step": [Fault("kill", 0, 0, step=EPOCHS * STEPS_PER_EPOCH - 1, at="reduce")],
}


@pytest.mark.parametrize(
    ("name", "faults"), sampled(itertools.product(["EMAWeightAveraging", "StochasticWeightAveraging"], FAULTS), 1)
)
def test_averages_are_those_of_one_device_though_a_worker_dies(name: str, faults: str, tmp_path: Path) -> None:
    run = on_grid(training(name, FaultInjectionCallback(FAULTS[faults])), tmp_path)
    assert len(failures(run.trainer)) == 1
    assert_same_training(undisturbed(name), run)


class InRecipes(Averaged):
    """With layers that no process builds but the workers of their stage."""

    def configure_pipeline(self) -> list[Any]:
        widths = [8, 16, 16, 16, 16, 16, 4]
        return [LayerSpec(nn.Linear, *width) for width in itertools.pairwise(widths)]


class CopiesWhatItOwns(L.Callback):
    """Fails if the callback that averages has copied more than the layers of the stage."""

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        (averaging,) = (c for c in trainer.callbacks if isinstance(c, WeightAveraging))  # type: ignore[attr-defined]
        assert averaging._average_model is not None
        copied = [name for name, _ in averaging._average_model.module.named_parameters()]
        assert copied == [name for name, _ in module.named_parameters()]
        assert len(copied) <= 6  # of 12


def test_no_worker_copies_more_than_its_stage(tmp_path: Path) -> None:
    def script(session: Session) -> None:
        session.run.module = InRecipes().double()
        callbacks = [EMAWeightAveraging(decay=0.8), CopiesWhatItOwns()]
        session.trainer(callbacks=callbacks, max_epochs=2).fit(session.run.module, session.data.training())

    whole = on_grid(script, tmp_path, stages=2).weights
    pieces = on_grid(script, tmp_path, stages=3, num_microbatches=4).weights
    assert_same(whole, pieces)


@pytest.mark.parametrize(
    ("name", "joins", "stages"),
    sampled(
        itertools.product(
            ["WeightAveraging by epoch", "EMAWeightAveraging", "StochasticWeightAveraging"], [5, 10], [1, 2]
        ),
        3,
    ),
)
def test_who_joins_goes_on_with_the_averages_of_its_donor(name: str, joins: int, stages: int, tmp_path: Path) -> None:
    """The donor dies next, so what the new worker holds is all that there is of the first stage."""
    faults = [Fault("kill", 1, 0, step=joins - 3), Fault("kill", 0, 0, step=joins + 2)]
    more = [FaultInjectionCallback(faults), AwaitReplacement([joins])]
    run = on_grid(training(name, *more), tmp_path, stages, max_restarts=10)
    assert rejoined(run.trainer)[:1] == [(1, 0)]
    assert failures(run.trainer) == [(1, 0), (0, 0)]
    assert_same_training(undisturbed(name), run)


class Ordinary(L.LightningModule):
    """No PipelineModule: the model and its own steps."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(*Averaged().configure_pipeline())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return functional.cross_entropy(self.model(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", functional.cross_entropy(self.model(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("name", sampled(["EMAWeightAveraging", "StochasticWeightAveraging"], 1))
def test_averages_of_an_ordinary_module_are_those_of_one_device(name: str, tmp_path: Path) -> None:
    def script(session: Session) -> None:
        more = [FaultInjectionCallback([Fault("kill", 0, 0, step=6)])] if session.data.batch_size < GLOBAL_BATCH else []
        session.fit(Ordinary(), validates=True, callbacks=[CALLBACKS[name](), *more], max_epochs=EPOCHS)

    (tmp_path / "one").mkdir()
    one = on_one_device(script, tmp_path / "one")
    grid = on_grid(script, tmp_path / "grid", stages=1)
    assert failures(grid.trainer) == [(0, 0)]
    assert_same(one.weights, grid.weights)
    assert_same(one.metrics, grid.metrics)


# ---------------------------------------------------------------------- checkpoints


def saving(root: Path) -> tuple[ModelCheckpoint, dict[str, Any]]:
    """A callback that saves every second step, and the arguments of the Trainer that it needs."""
    callback = ModelCheckpoint(root / "saved", "{step}", every_n_train_steps=2, save_top_k=-1)
    return callback, {"enable_checkpointing": True}


def saved_by(run: Callable[..., Run], name: str, root: Path, stateful: bool = False, **strategy: Any) -> Path:
    root.mkdir(exist_ok=True)
    callback, arguments = saving(root)
    run(training(name, callback, trainer=arguments, stateful=stateful), root, **strategy)
    return root / "saved"


AVERAGED = ["WeightAveraging", "EMAWeightAveraging", "StochasticWeightAveraging"]


@pytest.mark.parametrize("name", sampled(AVERAGED, 1))
def test_checkpoints_hold_what_those_of_one_device_hold(name: str, tmp_path: Path) -> None:
    one = saved_by(on_one_device, name, tmp_path / "one")
    grid = saved_by(on_grid, name, tmp_path / "grid")
    for step in (2, 10, 14):
        expected, found = (torch.load(folder / f"step={step}.ckpt", weights_only=False) for folder in (one, grid))
        for checkpoint in (expected, found):
            checkpoint["callbacks"] = {k: v for k, v in checkpoint["callbacks"].items() if "Averaging" in k}
            del checkpoint["loops"]
        assert found.pop("lightning_recycle_objects")  # from which the run would start again
        assert_same(expected, found)


@functools.cache
def checkpoints_of(name: str, writer: str) -> Path:
    """The checkpoints of a training; a sharded one is there consolidated, too."""
    folder = Path(tempfile.mkdtemp())
    if writer.startswith("one device"):
        return saved_by(on_one_device, name, folder, stateful=writer.endswith("stateful"))
    saved = saved_by(on_grid, name, folder, save_distributed_checkpoint=writer == "sharded")
    if writer == "sharded":
        path = saved / f"step={AT_EPOCH_END}.ckpt"
        consolidated(path, Path(f"{path}.consolidated"))
    return saved


@functools.cache
def resumed_on_one_device(name: str, step: int) -> Run:
    """With the sample that follows, also in the middle of an epoch."""
    stateful = step % STEPS_PER_EPOCH > 0  # at the end of an epoch, such a loader has no more samples to resume with
    path = checkpoints_of(name, "one device, stateful" if stateful else "one device") / f"step={step}.ckpt"
    return on_one_device(training(name, ckpt_path=path, stateful=stateful), Path(tempfile.mkdtemp()))


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "writer"),
    sampled(
        [
            ("EMAWeightAveraging", "one file"),
            ("EMAWeightAveraging", "sharded"),
            ("StochasticWeightAveraging", "sharded"),
        ],
        1,
    ),
)
def test_a_checkpoint_resumes_on_one_device(name: str, writer: str, tmp_path: Path) -> None:
    """As from its own; at the end of an epoch, since one device does not find its place in the data of a grid."""
    path = checkpoints_of(name, writer) / f"step={AT_EPOCH_END}.ckpt"
    path = Path(f"{path}.consolidated") if writer == "sharded" else path
    resumed = on_one_device(training(name, ckpt_path=path), tmp_path)
    assert_same_training(resumed_on_one_device(name, AT_EPOCH_END), resumed)


@pytest.mark.parametrize(
    ("name", "writer", "step"),
    sampled(
        [
            (name, *written)
            for name in ("EMAWeightAveraging", "StochasticWeightAveraging")
            for written in (("one device", 6), ("one file", AT_EPOCH_END), ("one file", 14), ("sharded", 6))
        ],
        3,
    ),
)
def test_a_checkpoint_resumes_on_another_grid(name: str, writer: str, step: int, tmp_path: Path) -> None:
    path = checkpoints_of(name, writer) / f"step={step}.ckpt"
    resumed = on_grid(training(name, ckpt_path=path), tmp_path, stages=3, num_microbatches=4)
    assert_same_training(resumed_on_one_device(name, step), resumed)
