"""The Tuner, and the callbacks that tune, find on workers what they find on one device, and leave nothing behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, Callback, LearningRateFinder
from lightning.pytorch.tuner import Tuner, batch_size_scaling
from same_script import (
    GLOBAL_BATCH,
    PIPELINES,
    Classifier,
    Data,
    Run,
    Session,
    assert_same,
    on_a_grid,
    on_one_device,
    samples,
)
from support.training import QUIET
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_recycle import ReCycleStrategy, UnsupportedFeatureError
from lightning_recycle.launch.launcher import SupervisorLauncher

RATES = 20
ATE_TOO_MUCH = "CUDA out of memory. Tried to allocate 20.00 MiB"


class Plain(L.LightningModule):
    """The same as an ordinary module."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.lr = lr
        self.layers = nn.Sequential(*Classifier(lr).configure_pipeline())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.layers(x), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))

    configure_optimizers = Classifier.configure_optimizers


class Counted(Callback):
    """Tells how often the user's own callbacks see a batch: not in a trial."""

    batches = 0

    def on_train_batch_end(self, *args: Any) -> None:
        self.batches += 1


def find_a_rate_and_fit(session: Session, make: Any = Classifier, **kwargs: Any) -> None:
    counted = Counted()
    trainer = session.trainer(max_steps=6, max_epochs=20, callbacks=[counted], logger=True, enable_checkpointing=True)
    model = session.run.module = make()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = Tuner(trainer).lr_find(model, session.data.training(), min_lr=1e-3, num_training=RATES, **kwargs)
    session.run.results.update(
        results=found.results,
        suggestion=found.suggestion(),
        lr=model.lr,
        progress=(trainer.current_epoch, trainer.global_step, trainer.should_stop, counted.batches),
        files=[path.name for path in session.root.rglob("*") if path.is_file() and "diary" not in path.parts],
        state=str(trainer.state.status),
        settings=(trainer.max_steps, trainer.limit_val_batches, len(trainer.callbacks), type(trainer.logger).__name__),
        history=list(getattr(trainer.strategy, "history", [])),
    )
    assert_same(before, model.state_dict())
    trainer.fit(model, session.data.training())
    session.run.results["after"] = (trainer.global_step, counted.batches)


def on_ordinary(script: Any, root: Path) -> Run:
    """On a grid with one stage."""
    run = Run(None, None, root)
    data = Data(GLOBAL_BATCH // PIPELINES)
    script(Session(root, lambda: {"devices": PIPELINES, "strategy": "recycle"}, data, run))
    return run


COMPARED = ("results", "suggestion", "lr", "progress", "state", "settings", "after")


@pytest.mark.parametrize("make", [Classifier, Plain])
def test_the_learning_rate_finder_finds_what_it_finds_on_one_device(tmp_path: Path, make: Any) -> None:
    def script(session: Session) -> None:
        find_a_rate_and_fit(session, make)

    one = on_one_device(script, tmp_path / "one")
    grid = (on_ordinary if make is Plain else on_a_grid)(script, tmp_path / "grid")
    assert one.results["suggestion"] is not None
    for name in COMPARED:
        if name == "settings":  # the grid has a HeartbeatCallback too, once it has run
            assert one.results[name][:2] == grid.results[name][:2]
            continue
        assert_same(one.results[name], grid.results[name], where=name)
    assert grid.results["files"] == []
    assert grid.results["history"] == []
    assert_same(one.weights, grid.weights)


def test_a_callback_finds_the_rate_that_the_fit_uses(tmp_path: Path) -> None:
    def script(session: Session) -> None:
        finder = LearningRateFinder(min_lr=1e-3, num_training_steps=RATES)
        session.fit(Classifier(), max_steps=6, callbacks=[finder])
        session.run.results["found"] = finder.optimal_lr.results
        assert finder in session.run.trainer.callbacks

    one, grid = on_one_device(script, tmp_path / "one"), on_a_grid(script, tmp_path / "grid")
    assert_same(one.results, grid.results)
    assert one.module.lr == pytest.approx(grid.module.lr, rel=1e-12)
    assert_same(one.weights, grid.weights)


class Sized(Plain):
    """Its memory holds ``room`` samples of a process."""

    def __init__(self, room: int, samples: int = 200) -> None:
        super().__init__()
        self.room, self.samples, self.batch_size, self.starts = room, samples, 4, 0

    def train_dataloader(self) -> Any:
        return DataLoader(samples(self.samples), batch_size=self.batch_size)

    val_dataloader = train_dataloader

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if len(batch[0]) > self.room:
            raise torch.OutOfMemoryError(ATE_TOO_MUCH)
        return super().training_step(batch, batch_idx)


def test_the_batch_size_is_that_of_one_device(tmp_path: Path) -> None:
    def script(session: Session) -> None:
        model = session.run.module = Sized(room=25)
        trainer = session.trainer(max_steps=4, max_epochs=10)
        found = Tuner(trainer).scale_batch_size(model, init_val=8)
        session.run.results.update(found=found, attribute=model.batch_size, steps=trainer.global_step)
        trainer.fit(model)
        session.run.results["fitted"] = (trainer.global_step, trainer.train_dataloader.batch_size)

    one, grid = on_one_device(script, tmp_path), on_ordinary(script, tmp_path)
    assert one.results == grid.results
    assert one.results["found"] == 16


def room_for(room: int, data: int, tried: list[int]) -> Any:
    """Trials without workers: ``room`` samples fit, of ``data`` that there are."""

    def trial(launcher: Any, call: Any) -> Any:
        trainer = call[0]
        size = trainer.lightning_module.batch_size
        tried.append(size)
        if size > room:
            raise torch.OutOfMemoryError(ATE_TOO_MUCH)
        return SimpleNamespace(callbacks={trainer.callbacks[-1].state_key: {"samples": data, "loaders": 1}})

    return trial


@pytest.fixture
def _collects_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_size_scaling, "garbage_collection_cuda", lambda: None)


@pytest.mark.usefixtures("_collects_quickly")
@pytest.mark.parametrize("mode", ["power", "binsearch"])
def test_the_search_is_that_of_one_device(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    one = L.Trainer(accelerator="cpu", devices=1, max_steps=1, **QUIET)
    expected = Tuner(one).scale_batch_size(Sized(25), mode=mode, init_val=4)
    tried: list[int] = []
    monkeypatch.setattr(SupervisorLauncher, "_try", room_for(25, 200, tried))
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy="recycle", max_steps=1, **QUIET)
    model = Sized(25)
    assert Tuner(trainer).scale_batch_size(model, mode=mode, init_val=4) == model.batch_size == expected
    assert len(tried) == len(set(tried))


class Cut(Classifier):
    batch_size = 4


@pytest.mark.usefixtures("_collects_quickly")
@pytest.mark.parametrize(
    ("room", "data", "mode", "found"),
    [(25, 400, "power", 16), (25, 400, "binsearch", 20), (1000, 100, "power", 48), (3, 400, "power", 4)],
    ids=["multiples of the micro-batches", "also in between", "no more than there is", "the smallest"],
)
def test_a_batch_size_is_one_that_pipelines_can_train_with(
    monkeypatch: pytest.MonkeyPatch, room: int, data: int, mode: str, found: int
) -> None:
    tried: list[int] = []
    monkeypatch.setattr(SupervisorLauncher, "_try", room_for(room, data, tried))
    strategy = ReCycleStrategy(pipeline_parallel_size=2, num_microbatches=4)
    trainer = L.Trainer(accelerator="cpu", devices=4, strategy=strategy, max_steps=1, **QUIET)
    model = Cut()
    assert Tuner(trainer).scale_batch_size(model, mode=mode, init_val=2, max_trials=12) == model.batch_size == found
    assert all(size % 4 == 0 for size in tried)


def test_another_error_of_a_trial_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def trial(launcher: Any, call: Any) -> Any:
        raise RuntimeError("a mistake")

    monkeypatch.setattr(SupervisorLauncher, "_try", trial)
    finder = BatchSizeFinder()
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy="recycle", callbacks=[finder], **QUIET)
    before = trainer.limit_train_batches, trainer.max_steps, trainer.strategy.options
    with pytest.raises(RuntimeError, match="a mistake"):
        trainer.fit(Sized(25))
    assert before == (trainer.limit_train_batches, trainer.max_steps, trainer.strategy.options)
    assert finder in trainer.callbacks


class Killed(Plain):
    """A worker dies in the middle of the first run of its folder, which is the trial."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        mark, strategy = self.folder / "killed", self.trainer.strategy
        if self.trainer.global_step == 7 and strategy.grid_rank == 1 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)


def test_a_worker_that_dies_in_a_trial_changes_nothing(tmp_path: Path) -> None:
    def script(session: Session) -> None:
        model = session.run.module = Killed(tmp_path) if session.run.root.name == "grid" else Plain()
        trainer = session.trainer(max_steps=6, max_epochs=20)
        found = Tuner(trainer).lr_find(model, session.data.training(), min_lr=1e-3, num_training=RATES)
        session.run.results.update(found=found.results, lr=model.lr)

    (tmp_path / "one").mkdir()
    one, grid = on_one_device(script, tmp_path / "one"), on_ordinary(script, tmp_path / "grid")
    assert (tmp_path / "killed").exists()
    assert_same(one.results, grid.results)


class AtMilestones(LearningRateFinder):
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.lr_find(trainer, pl_module)


def test_a_trial_in_the_middle_of_a_run_is_refused() -> None:
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy="recycle", callbacks=[AtMilestones()], **QUIET)
    with pytest.raises(UnsupportedFeatureError, match=r"AtMilestones.on_train_epoch_start.*before the run begins"):
        trainer.fit(Plain(), Data(4).training())
