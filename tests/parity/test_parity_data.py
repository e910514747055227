"""Data modules, the hooks that convert batches, and loaders of all kinds give what they give on one device."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import same_script as same
import torch
from support.training import difference
from torch import Tensor
from torch.utils.data import DataLoader, Dataset


class ConvertingData(L.LightningDataModule):
    """Loaders for all phases, and all hooks that convert a batch on its way to the device."""

    def __init__(self, session: same.Session) -> None:
        super().__init__()
        self.data = session.data
        self.answer = 0

    def train_dataloader(self) -> Any:
        return self.data.training()

    def val_dataloader(self) -> Any:
        return [self.data.validation(), self.data.loader(5, seed=3)]

    def test_dataloader(self) -> Any:
        return self.data.loader(11, seed=4)

    def predict_dataloader(self) -> Any:
        return self.data.loader(11, seed=5)

    def on_before_batch_transfer(self, batch: list[Tensor], dataloader_idx: int) -> list[Tensor]:
        return [batch[0] * 2, batch[1]]

    def transfer_batch_to_device(self, batch: list[Tensor], device: torch.device, dataloader_idx: int) -> list[Tensor]:
        batch = super().transfer_batch_to_device(batch, device, dataloader_idx)
        return [batch[0] + 1, batch[1]]

    def on_after_batch_transfer(self, batch: list[Tensor], dataloader_idx: int) -> list[Tensor]:
        return [batch[0] + dataloader_idx * 0.5, batch[1]]


def converted(session: same.Session) -> None:
    data = ConvertingData(session)
    trainer = session.trainer(max_epochs=1)
    session.run.module = same.Classifier()
    trainer.fit(session.run.module, datamodule=data)
    results = session.run.results
    results["fit"] = session.run.metrics
    results["test"] = trainer.test(session.run.module, datamodule=data, verbose=False)
    results["predict"] = trainer.predict(session.run.module, datamodule=data)


converted_runs = same.runs_of(converted)


def test_the_hooks_that_convert_batches_see_every_sample_once(converted_runs: same.Runs, tmp_path: Path) -> None:
    one, grid = converted_runs
    same.assert_same(one.weights, grid.weights)
    unconverted = same.on_one_device(lambda s: s.fit(same.Classifier(), max_epochs=1) and None, tmp_path)
    assert difference(unconverted.weights, grid.weights) > 1e-4, "the hooks made no difference"


@pytest.mark.parametrize("entry", ["fit", "test", "predict"])
def test_every_phase_reads_the_loaders_of_a_data_module(converted_runs: same.Runs, entry: str) -> None:
    one, grid = (run.results[entry] for run in converted_runs)
    assert one
    same.assert_same(one, grid)


def test_each_of_several_validation_loaders_has_its_own_value(converted_runs: same.Runs) -> None:
    names = {"val_loss/dataloader_idx_0", "val_loss/dataloader_idx_1"}
    assert names < converted_runs[1].results["fit"].keys()


class NoisyOnTheDevice(same.Classifier):
    """Augments whole batches, when they are on the device."""

    def on_after_batch_transfer(self, batch: list[Tensor], dataloader_idx: int) -> list[Tensor]:
        return [batch[0] + 0.1 * torch.randn_like(batch[0]), batch[1]]


def augmented(session: same.Session) -> None:
    session.fit(NoisyOnTheDevice(), max_epochs=2)


def test_what_a_batch_hook_draws_depends_on_the_data_alone(tmp_path: Path) -> None:
    for name in ("2x2", "again"):
        (tmp_path / name).mkdir()
    grid = same.on_a_grid(augmented, tmp_path / "2x2")
    again = same.on_a_grid(augmented, tmp_path / "again", staggered=False, split_backward=False)
    same.assert_same(grid.weights, again.weights)


class Records(Dataset[dict[str, Tensor]]):
    """Samples that are dicts."""

    def __len__(self) -> int:
        return same.GLOBAL_BATCH * same.STEPS_PER_EPOCH + 3

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = torch.full((8,), index / len(self), dtype=torch.float64)
        return {"x": x, "y": torch.tensor(index % 4)}


class OfRecords(same.Classifier):
    def split_batch(self, batch: Any) -> tuple[Any, Any]:
        return batch["x"], batch["y"]

    def predict_input(self, batch: Any) -> Any:
        return batch["x"]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("seen_x", batch["x"].sum(), on_step=True, on_epoch=True)


def with_records(**loader: Any) -> Callable[[same.Session], None]:
    def script(session: same.Session) -> None:
        module = session.run.module = OfRecords()
        trainer = session.trainer(max_epochs=1)
        made = DataLoader(Records(), batch_size=session.data.batch_size, **loader)
        # On one device a smaller last batch would be trained on, too; a grid leaves it out.
        training = DataLoader(Records(), batch_size=session.data.batch_size, **{**loader, "drop_last": True})
        trainer.fit(module, training, made)
        session.run.results["fit"] = session.run.metrics
        session.run.results["predict"] = trainer.predict(module, made)

    return script


@pytest.mark.parametrize(
    "loader",
    [{"drop_last": True}, pytest.param({"num_workers": 1}, marks=pytest.mark.exhaustive)],
    ids=["drop_last", "num_workers"],
)
def test_batches_that_are_dicts_and_arguments_of_the_loader(tmp_path: Path, loader: dict[str, Any]) -> None:
    one, grid = same.run_both(with_records(**loader), tmp_path)
    same.assert_same(one.weights, grid.weights)
    assert one.results["fit"]["seen_x_epoch"] != 0
    same.assert_same(one.results, grid.results, same.TOLERANCE)
    # Whatever drop_last says, a prediction is of all samples.
    assert sum(map(len, grid.results["predict"])) == same.GLOBAL_BATCH * same.STEPS_PER_EPOCH + 3
