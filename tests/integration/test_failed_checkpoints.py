"""A checkpoint that cannot be written leaves those before, on disk and in every callback's memory; training goes on."""

import logging
import os
import resource
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from saving import CompleteOnly, checkpoints, saves, wait_until_written
from support.growth import happened

from lightning_recycle.errors import CheckpointError

FULL = range(5, 9)  # the steps at whose beginning the disk is full: the checkpoints of steps 6 and 8 fail
FILE = (True, False)
FOLDER = pytest.param(True, True, marks=pytest.mark.long)
WAITING = [pytest.param(False, True, marks=pytest.mark.long), pytest.param(False, False, marks=pytest.mark.exhaustive)]


class FullDisk(L.Callback):
    """While it lasts no file of a worker can grow beyond four kilobytes. What workers warn of goes to ``log``."""

    def __init__(self, log: Path) -> None:
        self._log = log

    def setup(self, *_: Any, **__: Any) -> None:
        logging.getLogger("lightning_recycle").addHandler(logging.FileHandler(self._log))

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        wait_until_written(trainer)
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096 if trainer.global_step in FULL else most, most))


class SameEverywhere(L.Callback):
    """After each step: what ModelCheckpoint remembers is the same on all workers, and on the disk."""

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        for callback in trainer.checkpoint_callbacks:
            assert isinstance(callback, ModelCheckpoint)
            record = {
                **callback.state_dict(),
                "saved": callback._last_checkpoint_saved,
                "score": callback.current_score,
            }
            records = {str(value) for value in strategy.session.collectives.gather("records", str(record)).values()}
            assert len(records) == 1, records
            for path in {*callback.best_k_models, callback.best_model_path, callback.last_model_path} - {""}:
                assert os.path.exists(path), path
        if trainer.global_step == 9:
            (newest, _) = trainer.checkpoint_callbacks
            assert isinstance(newest, ModelCheckpoint)
            assert sorted(map(os.path.basename, newest.best_k_models)) == ["step=2.ckpt", "step=4.ckpt"]
            assert newest._last_global_step_saved == 4


@pytest.mark.parametrize(("background", "sharded"), [FILE, FOLDER, *WAITING])
def test_a_full_disk_costs_that_checkpoint_and_keeps_the_ones_before(background, sharded, tmp_path, tmp_path_factory):
    log = tmp_path_factory.mktemp("log") / "workers.log"
    callbacks = [*checkpoints(tmp_path), FullDisk(log), CompleteOnly() if background else SameEverywhere()]
    run = saves((1 if background else 2, 2), callbacks, sharded=sharded, background=background)
    assert {event.step for event in happened(run, "saved")} == {2, 4, 10}
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "linked", "step=10.ckpt", "step=4.ckpt"]
    assert sorted(os.listdir(tmp_path / "linked")) == ["last.ckpt", "step=10.ckpt"]
    assert os.readlink(tmp_path / "linked" / "last.ckpt") == "step=10.ckpt"
    (newest, _) = run.checkpoint_callbacks
    assert isinstance(newest, ModelCheckpoint)
    assert sorted(map(os.path.basename, newest.best_k_models)) == ["step=10.ckpt", "step=4.ckpt"]
    if background:
        assert {event.step for event in happened(run, "checkpoint_given_up")} == {6, 8}
        assert "File too large" in happened(run, "checkpoint_given_up")[0].details["cause"]
        return
    errors = log.read_text()
    assert str(tmp_path / "step=6.ckpt") in errors
    assert "MB to write" in errors
    assert "File too large" in errors
    assert "the training goes on" in errors


@pytest.mark.parametrize(("background", "sharded"), [FILE, *WAITING])
def test_a_full_disk_ends_the_run_if_wanted(background, sharded, tmp_path, tmp_path_factory):
    callbacks = [*checkpoints(tmp_path), FullDisk(tmp_path_factory.mktemp("log") / "workers.log")]
    with pytest.raises(CheckpointError, match=r"step=6\.ckpt .*MB to write, \S+ \wB free.*File too large"):
        saves((1, 2), callbacks, sharded=sharded, background=background, strategy={"on_checkpoint_error": "raise"})
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "linked", "step=2.ckpt", "step=4.ckpt"]
