"""Checkpoints: what one grid wrote another grid, or one device, goes on from, exactly."""

import functools
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from support.models import GLOBAL_BATCH, AutoEncoder, Regression, Scheduled, dataset
from support.sampling import sampled
from support.scripts import consolidated
from support.training import difference, on_one_device, trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_recycle import PipelineModule
from lightning_recycle.callbacks import Fault

EPOCH = 4  # steps
DATA = GLOBAL_BATCH * EPOCH
ONE_DEVICE = (1, 1)


class Grouped(Regression):
    """Weights and biases in groups of their own."""

    def configure_optimizers(self) -> Any:
        weights = [p for p in self.parameters() if p.dim() > 1]
        biases = [p for p in self.parameters() if p.dim() == 1]
        groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=1e-2)


MODELS: dict[str, type[PipelineModule]] = {
    "plain": Regression,
    "scheduled": Scheduled,
    "grouped": Grouped,
    "tied": AutoEncoder,
}


def run(
    model: PipelineModule,
    grid: tuple[int, int],
    epochs: int,
    directory: Path | None = None,
    ckpt_path: Path | None = None,
    faults: tuple[Fault, ...] = (),
) -> dict[str, Tensor]:
    """Trains on ``grid`` (or one device, without this strategy), writes a checkpoint every second step."""
    options: dict[str, Any] = {"max_epochs": epochs, "max_steps": -1}
    callbacks: list[L.Callback] = []
    if directory is not None:
        callbacks.append(ModelCheckpoint(directory, "{step}", every_n_train_steps=2, save_top_k=-1))
        options["enable_checkpointing"] = True
    if grid == ONE_DEVICE:
        lightning = on_one_device(callbacks=callbacks, **options)
    else:
        lightning = trainer(*grid, faults, callbacks=callbacks, **options)
    lightning.fit(model, DataLoader(dataset(DATA), batch_size=GLOBAL_BATCH // grid[0]), ckpt_path=ckpt_path)
    return model.state_dict()


@functools.cache
def uninterrupted(name: str) -> dict[str, Tensor]:
    return run(MODELS[name]().double(), ONE_DEVICE, 2)


@pytest.mark.parametrize(("name", "writer", "step", "reader"), sampled([
    ("plain", (2, 2), EPOCH, ONE_DEVICE),
    ("plain", (2, 2), 6, (1, 3)),
    ("scheduled", ONE_DEVICE, 2, (2, 2)),
    ("scheduled", (2, 2), 6, (2, 2)),
    ("grouped", (1, 2), 2, (2, 3)),
    ("grouped", (2, 3), EPOCH, ONE_DEVICE),
    ("grouped", ONE_DEVICE, EPOCH, (2, 2)),
    ("tied", (2, 2), EPOCH, ONE_DEVICE),
    ("tied", ONE_DEVICE, 6, (1, 3)),
], 2, rest=pytest.mark.long))  # fmt: skip
def test_resuming_from_any_grids_checkpoint_on_any_other_equals_the_uninterrupted_run(
    name, writer, step, reader, tmp_path
):
    run(MODELS[name]().double(), writer, 2, tmp_path)
    resumed = run(MODELS[name]().double(), reader, 2, ckpt_path=tmp_path / f"step={step}.ckpt")
    assert difference(resumed, uninterrupted(name)) < 1e-10


def test_checkpoints_are_read_without_pickle_and_by_load_from_checkpoint(tmp_path):
    trained = run(Regression().double(), (2, 2), 1, tmp_path)
    path = tmp_path / f"step={EPOCH}.ckpt"
    saved = torch.load(path, weights_only=True)
    assert difference(saved["state_dict"], trained) == 0.0
    loaded = Regression.load_from_checkpoint(path, weights_only=True)
    assert difference(loaded.double().state_dict(), trained) < 1e-6  # it was made in single precision
    assert saved["global_step"] == EPOCH


def sharded(
    directory: Path, model: PipelineModule, faults: tuple[Fault, ...] = (), epochs: int = 2
) -> dict[str, Tensor]:
    callback = ModelCheckpoint(directory, "{step}", every_n_train_steps=2, save_top_k=-1)
    options: dict[str, Any] = {"max_epochs": epochs, "max_steps": -1, "enable_checkpointing": True}
    strategy = {"save_distributed_checkpoint": True, "background": not faults}  # then the others write it again
    lightning = trainer(2, 2, faults, strategy=strategy, callbacks=[callback], **options)
    lightning.fit(model, DataLoader(dataset(DATA), batch_size=GLOBAL_BATCH // 2))
    return model.state_dict()


@pytest.mark.long
@pytest.mark.parametrize("name", ["scheduled", "tied"])
def test_a_sharded_checkpoint_resumes_on_another_grid_and_consolidated_on_one_device(name, tmp_path):
    sharded(tmp_path, MODELS[name]().double())
    folder = tmp_path / f"step={EPOCH}.ckpt"
    files = sorted(path.name for path in folder.iterdir())
    assert files == [".metadata", "__0_0.distcp", "__1_0.distcp", "manifest.json", "meta.pt"]
    resumed = run(MODELS[name]().double(), (1, 3), 2, ckpt_path=tmp_path / "step=6.ckpt")
    assert difference(resumed, uninterrupted(name)) < 1e-10
    one = consolidated(folder, tmp_path / "one.ckpt")
    resumed = run(MODELS[name]().double(), ONE_DEVICE, 2, ckpt_path=one)
    assert difference(resumed, uninterrupted(name)) < 1e-10


@pytest.mark.parametrize("faults", [
    (Fault("kill", 0, 1, at="checkpoint", step=4),),
    pytest.param((Fault("kill", 0, 0, 3, at="optimizer", when="after"), Fault("kill", 1, 1, 5)),
        marks=pytest.mark.long),
], ids=["the leader while it writes", "others"])  # fmt: skip
def test_a_sharded_checkpoint_is_complete_though_its_writers_die(faults, tmp_path):
    sharded(tmp_path, Regression().double(), faults)
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"step={step}.ckpt" for step in (2, 4, 6, 8)]
    resumed = run(Regression().double(), (2, 2), 2, ckpt_path=tmp_path / "step=4.ckpt")
    assert difference(resumed, uninterrupted("plain")) < 1e-10


def test_a_checkpoint_of_another_model_is_refused_with_the_difference(tmp_path):
    run(Regression().double(), (1, 2), 1, tmp_path)
    with pytest.raises(RuntimeError, match=r"(?s)^ckpt_path='.*/step=2\.ckpt': .*(layers\.0\.weight|Missing key)"):
        run(AutoEncoder().double(), (2, 2), 2, ckpt_path=tmp_path / "step=2.ckpt")
