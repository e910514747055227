"""Checkpoints that are written while the training goes on are those that it would wait for; so is what it trains."""

import contextlib
import itertools
import os
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from saving import EVERY, LENGTH, checkpoints, listed, saves, wait_until_written
from support.growth import AwaitReplacement, happened, rejoined
from support.models import GLOBAL_BATCH, Regression
from support.sampling import sampled
from support.training import exact_fit, samples_for, trainer
from support.waiting import PATIENCE
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_recycle.callbacks import Fault
from lightning_recycle.errors import StageLostError
from lightning_recycle.session import checkpoints as checkpoints_module
from lightning_recycle.session.checkpoint_files import WholeCheckpointIO, damage

WRITER_DIES = Fault("kill", pipeline=0, stage=1, step=4, at="checkpoint")


class SavesAtStart(L.Callback):
    """Saves before the first step, in each process."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_fit_start(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self._path)


@pytest.mark.long
@pytest.mark.parametrize("grid", sampled([((2, 1),), ((2, 2),)], 1, rest=pytest.mark.long), ids=str)
def test_a_replacement_leaves_alone_what_the_others_have_saved_before_it_came(grid, tmp_path):
    callbacks = [SavesAtStart(tmp_path / "start.ckpt"), AwaitReplacement((LENGTH - 1,))]
    run = saves(grid, callbacks, [Fault("kill", 0, 0, step=2)], strategy={"max_restarts": 2}, default_root_dir=tmp_path)
    assert rejoined(run) == [(0, 0)]
    assert [event.step for event in happened(run, "saved")] == [0, LENGTH]
    assert torch.load(tmp_path / "start.ckpt", weights_only=False)["global_step"] == 0


# ---------------------------------------------------------------------- memory, and hooks that see checkpoints


class NoMemory(L.Callback):
    """A worker finds no memory for copies."""

    def on_train_start(self, *_: Any) -> None:
        checkpoints_module.free_bytes = lambda peers: 100.0


@pytest.mark.parametrize(
    ("sharded", "kills"), sampled(itertools.product([False, True], repeat=2), 1, rest=pytest.mark.long)
)
def test_training_waits_for_a_checkpoint_of_whose_state_no_copy_fits(sharded, kills, tmp_path, caplog):
    faults = [WRITER_DIES] if kills else []
    run = saves((2, 2), [NoMemory(), *checkpoints(tmp_path)], faults, sharded, background="auto")
    assert len(happened(run, "failure")) == kills
    assert listed(tmp_path) == ["last.ckpt", "linked", "step=10.ckpt", "step=8.ckpt"]
    for path in tmp_path.rglob("*.ckpt"):
        assert damage(path) is None
    exact_fit(Regression().double(), 1, 2, ckpt_path=tmp_path / "step=8.ckpt", max_steps=LENGTH)
    assert "no memory for a copy of the state" in caplog.text


class SeesCheckpoints(L.Callback):
    """Counts the weights of a checkpoint."""

    def on_save_checkpoint(self, trainer: L.Trainer, module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["weights"] = len(checkpoint["state_dict"])


class ReadsItsOwn(ModelCheckpoint):
    """Reads each checkpoint when it has saved it."""

    @override
    def on_train_batch_end(self, trainer: L.Trainer, *arguments: Any) -> None:
        super().on_train_batch_end(trainer, *arguments)
        if trainer.global_step % EVERY == 0:
            assert self.best_model_path.endswith(f"step={trainer.global_step}.ckpt")
            assert damage(self.best_model_path) is None


@pytest.mark.parametrize("kind", sampled(["hook", "subclass"], 1, rest=pytest.mark.long))
def test_code_that_needs_all_of_a_checkpoint_at_once_has_it(kind, tmp_path):
    saving = (ReadsItsOwn if kind == "subclass" else ModelCheckpoint)(tmp_path, "{step}", every_n_train_steps=EVERY)
    run = saves((1, 2), [saving, *([SeesCheckpoints()] if kind == "hook" else [])], background="auto")
    found = torch.load(tmp_path / f"step={LENGTH}.ckpt", weights_only=False)
    assert not happened(run, "checkpoint_begun")
    assert found.get("weights", len(found["state_dict"])) == len(found["state_dict"]) > 2


# ---------------------------------------------------------------------- how often, and how fast


def test_holders_write_no_faster_than_they_may(tmp_path):
    saving = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=-1)
    run = saves((1, 2), [saving], background="auto", steps=2, strategy={"bandwidth": 0.05})
    (begun,), (saved,) = happened(run, "checkpoint_begun"), happened(run, "saved")
    assert saved.time - begun.time > 0.9 * (tmp_path / "step=2.ckpt").stat().st_size / 50_000


# ---------------------------------------------------------------------- storage that is slow


class SlowIO(WholeCheckpointIO):
    """Writes a checkpoint only when the training is further than it: when ``further`` exists."""

    def __init__(self, further: Path) -> None:
        self.further = further

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, *arguments: Any, **options: Any) -> None:
        deadline = time.monotonic() + PATIENCE
        while not self.further.exists():
            assert time.monotonic() < deadline, "the training waits for the checkpoint"
            time.sleep(0.01)
        super().save_checkpoint(checkpoint, path, *arguments, **options)


class IsFurther(L.Callback):
    def __init__(self, further: Path) -> None:
        self._further = further

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 6:
            self._further.touch()


@pytest.mark.parametrize(
    "wraps", [False, pytest.param(True, marks=pytest.mark.long)], ids=["plain", "AsyncCheckpointIO"]
)
def test_training_goes_on_while_storage_is_slow(wraps, tmp_path):
    slow: Any = SlowIO(tmp_path / "further")
    saving = ModelCheckpoint(tmp_path / "saved", "{step}", every_n_train_steps=4, save_top_k=-1)
    strategy = {"checkpoint_io": AsyncCheckpointIO(slow) if wraps else slow}
    run = saves((2, 2), [saving, IsFurther(tmp_path / "further")], steps=8, strategy=strategy)
    assert [event.step for event in happened(run, "saved")] == [4, 8]
    assert sorted(os.listdir(tmp_path / "saved")) == ["step=4.ckpt", "step=8.ckpt"]


class WaitsFromStepSeven(L.Callback):
    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step >= 7:
            wait_until_written(trainer)


class ReadsAtOnce(L.Callback):
    """Reads what it has saved; other workers may be further when it does."""

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        path = Path(trainer.default_root_dir) / f"{trainer.global_step}.ckpt"
        trainer.save_checkpoint(path)
        assert damage(path) is None


@pytest.mark.parametrize("sharded", sampled([True, False], 1, rest=pytest.mark.long))
def test_a_checkpoint_that_a_hook_saves_is_there_when_it_goes_on(sharded, tmp_path):
    strategy = {"background": True, "save_distributed_checkpoint": sharded}
    options: Any = {"default_root_dir": tmp_path, "strategy": strategy}
    exact_fit(Regression().double(), 1, 2, max_steps=3, callbacks=[ReadsAtOnce()], **options)
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["1.ckpt", "2.ckpt", "3.ckpt"]


def test_a_checkpoint_is_left_out_if_the_one_before_takes_too_long(tmp_path):
    further = tmp_path / "further"
    saving = ModelCheckpoint(tmp_path / "saved", "{step}", every_n_train_steps=2, save_top_k=-1)
    strategy = {"signal_timeout": 0.5, "checkpoint_io": SlowIO(further)}
    run = saves((2, 1), [saving, IsFurther(further), WaitsFromStepSeven()], strategy=strategy)
    assert [event.step for event in happened(run, "saved")] == [2, 8, 10]
    assert sorted(os.listdir(tmp_path / "saved")) == ["step=10.ckpt", "step=2.ckpt", "step=8.ckpt"]


class BrokenIO(WholeCheckpointIO):
    @override
    def save_checkpoint(self, *arguments: Any, **options: Any) -> None:
        raise RuntimeError("this plugin is broken")


def test_an_error_of_a_plugin_ends_the_run_and_is_no_fault_of_the_machine(tmp_path):
    saving = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2)
    run = trainer(
        2, 1, max_steps=LENGTH, callbacks=[saving, LambdaCallback(on_train_batch_start=wait_until_written)],
        enable_checkpointing=True, strategy={"background": True, "checkpoint_io": BrokenIO()},
    )  # fmt: skip
    with pytest.raises(Exception, match="this plugin is broken"):
        run.fit(Regression().double(), DataLoader(samples_for(LENGTH), batch_size=GLOBAL_BATCH // 2))
    assert not happened(run, "retried")
    assert not happened(run, "evicted")


class Uploads(CSVLogger):
    """Reads what it is told of."""

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        assert damage(checkpoint_callback.best_model_path) is None
        (Path(self.root_dir) / f"told of {Path(checkpoint_callback.best_model_path).name}").touch()


def test_loggers_are_told_of_complete_checkpoints(tmp_path):
    saving = ModelCheckpoint(tmp_path / "saved", "{step}", every_n_train_steps=2)
    saves((1, 2), [saving], logger=Uploads(tmp_path))
    told = sorted(path.name for path in tmp_path.rglob("told of *"))
    assert told == [f"told of step={step}.ckpt" for step in (10, 2, 4, 6, 8)]


class AtTheEnd(WholeCheckpointIO):
    """Writes the checkpoint of step 6 when the run is over, because a stage was lost; makes ``begun`` before."""

    def __init__(self, begun: Path) -> None:
        self._begun = begun

    @override
    def save_checkpoint(self, checkpoint: Any, *arguments: Any, **options: Any) -> None:
        if checkpoint["global_step"] == 6:
            self._begun.touch()
            deadline = time.monotonic() + PATIENCE
            while not NotesClient.client._is_finishing_saves and time.monotonic() < deadline:
                time.sleep(0.01)
        super().save_checkpoint(checkpoint, *arguments, **options)


class NotesClient(L.Callback):
    """Lets :class:`AtTheEnd` know its client. When that has begun, the training goes on to step 7, which may raise."""

    def __init__(self, begun: Path, raises: bool) -> None:
        self._begun, self._raises = begun, raises

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        type(self).client = trainer.strategy.session.client
        deadline = time.monotonic() + PATIENCE
        while trainer.global_step == 7 and not self._begun.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        if trainer.global_step == 7 and self._raises:
            raise UserError


class UserError(Exception):
    pass


@pytest.mark.parametrize("end", [*sampled(["lost", "restarted"], 1), "raised"])
def test_a_checkpoint_that_is_being_written_is_completed_however_the_run_ends(end, tmp_path):
    begun = tmp_path / "begun"
    saving = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=3, save_last="link")
    options: dict[str, Any] = {"background": True, "checkpoint_io": AtTheEnd(begun), "signal_timeout": PATIENCE}
    faults = [] if end == "raised" else [Fault("kill", pipeline=0, stage=0, step=7)]
    run = trainer(
        1, 2, faults, max_steps=8, enable_checkpointing=True, callbacks=[saving, NotesClient(begun, end == "raised")],
        strategy={**options, "on_stage_lost": "restart" if end == "restarted" else "raise"},
    )  # fmt: skip
    loader = DataLoader(samples_for(LENGTH), batch_size=GLOBAL_BATCH)
    errors = {"lost": pytest.raises(StageLostError), "raised": pytest.raises(UserError)}
    with errors.get(end, contextlib.nullcontext()):
        run.fit(Regression().double(), loader)
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["last.ckpt", "step=6.ckpt"]
    assert damage(tmp_path / "step=6.ckpt") is None
    assert os.readlink(tmp_path / "last.ckpt") == "step=6.ckpt"
    if end == "restarted":
        assert [event.step for event in happened(run, "step")] == [0, 1, 2, 3, 4, 5, 6, 6, 7]
