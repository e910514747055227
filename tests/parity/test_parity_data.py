"""Data modules, the hooks that convert batches, and loaders of all kinds give what they give on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from same_script import (
    GLOBAL_BATCH,
    STEPS_PER_EPOCH,
    TOLERANCE,
    Classifier,
    Run,
    Session,
    assert_same,
    difference,
    on_a_grid,
    on_one_device,
    run_both,
)
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset


class ConvertingData(L.LightningDataModule):
    """Loaders for all phases, and all hooks that convert a batch on its way to the device."""

    def __init__(self, session: Session) -> None:
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


def converted(session: Session) -> None:
    data = ConvertingData(session)
    trainer = session.trainer(max_epochs=1)
    session.run.module = Classifier()
    trainer.fit(session.run.module, datamodule=data)
    results = session.run.results
    results["fit"] = session.run.metrics
    results["test"] = trainer.test(session.run.module, datamodule=data, verbose=False)
    results["predict"] = trainer.predict(session.run.module, datamodule=data)


@pytest.fixture(scope="module")
def converted_runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run]:
    return run_both(converted, tmp_path_factory.mktemp("converted"))


def test_the_hooks_that_convert_batches_see_every_sample_once(converted_runs: tuple[Run, Run], tmp_path: Path) -> None:
    one, grid = converted_runs
    assert_same(one.weights, grid.weights)
    unconverted = on_one_device(lambda s: s.fit(Classifier(), max_epochs=1) and None, tmp_path)
    assert difference(unconverted.weights, grid.weights) > 1e-4, "the hooks made no difference"


@pytest.mark.parametrize("entry", ["fit", "test", "predict"])
def test_every_phase_reads_the_loaders_of_a_data_module(converted_runs: tuple[Run, Run], entry: str) -> None:
    one, grid = (run.results[entry] for run in converted_runs)
    assert one
    assert_same(one, grid)


def test_each_of_several_validation_loaders_has_its_own_value(converted_runs: tuple[Run, Run]) -> None:
    names = {"val_loss/dataloader_idx_0", "val_loss/dataloader_idx_1"}
    assert names < converted_runs[1].results["fit"].keys()


class NoisyOnTheDevice(Classifier):
    """Augments whole batches, when they are on the device."""

    def on_after_batch_transfer(self, batch: list[Tensor], dataloader_idx: int) -> list[Tensor]:
        return [batch[0] + 0.1 * torch.randn_like(batch[0]), batch[1]]


def augmented(session: Session) -> None:
    session.fit(NoisyOnTheDevice(), max_epochs=2)


def test_what_a_batch_hook_draws_depends_on_the_data_alone(tmp_path: Path) -> None:
    for name in ("2x2", "again"):
        (tmp_path / name).mkdir()
    grid = on_a_grid(augmented, tmp_path / "2x2")
    again = on_a_grid(augmented, tmp_path / "again", staggered=False, decoupled=False)
    assert_same(grid.weights, again.weights)


class Records(Dataset[dict[str, Tensor]]):
    """Samples that are dicts."""

    def __len__(self) -> int:
        return GLOBAL_BATCH * STEPS_PER_EPOCH + 3

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = torch.full((8,), index / len(self), dtype=torch.float64)
        return {"x": x, "y": torch.tensor(index % 4)}


class OfRecords(Classifier):
    def split_batch(self, batch: Any) -> tuple[Any, Any]:
        return batch["x"], batch["y"]

    def predict_input(self, batch: Any) -> Any:
        return batch["x"]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("seen_x", batch["x"].sum(), on_step=True, on_epoch=True)


def with_records(**loader: Any) -> Callable[[Session], None]:
    def script(session: Session) -> None:
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
    one, grid = run_both(with_records(**loader), tmp_path)
    assert_same(one.weights, grid.weights)
    assert one.results["fit"]["seen_x_epoch"] != 0
    assert_same(one.results, grid.results, TOLERANCE)
    # Whatever drop_last says, a prediction is of all samples.
    assert sum(map(len, grid.results["predict"])) == GLOBAL_BATCH * STEPS_PER_EPOCH + 3


class Stream(IterableDataset[dict[str, Tensor]]):
    """The records one after another; an epoch begins where the one before stopped."""

    def __init__(self) -> None:
        self.read = 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while self.read < len(Records()):
            self.read += 1
            yield Records()[self.read - 1]
        self.read = 0

    def state_dict(self) -> dict[str, int]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.read = state["read"]


class StreamData(L.LightningDataModule):
    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> Any:
        return DataLoader(Stream(), batch_size=self.batch_size, drop_last=True)

    def val_dataloader(self) -> Any:
        return DataLoader(Stream(), batch_size=self.batch_size)


def streamed(session: Session) -> None:
    data = StreamData(session.data.batch_size)
    module = session.run.module = OfRecords()
    trainer = session.trainer(max_steps=2 * STEPS_PER_EPOCH, val_check_interval=2, check_val_every_n_epoch=None)
    trainer.fit(module, datamodule=data)
    session.run.results["fit"] = session.run.metrics
    session.run.results["predict"] = trainer.predict(module, data.val_dataloader())


def test_a_stream_that_does_not_know_its_length_trains_and_validates_the_same(tmp_path: Path) -> None:
    one, grid = run_both(streamed, tmp_path)
    assert_same(one.weights, grid.weights)
    assert_same(one.results, grid.results, TOLERANCE)
    assert grid.results["fit"]["seen_x_epoch"] != 0
