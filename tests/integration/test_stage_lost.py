"""All replicas of a stage are lost: one clear error, or another start from the newest checkpoint that can be read."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from support.growth import happened
from support.models import GLOBAL_BATCH, Regression, dataset
from support.sampling import sampled
from support.training import exact_fit, failures, fit
from support.waiting import PATIENCE

from lightning_recycle import StageLostError
from lightning_recycle.callbacks import Fault

LENGTH = 14
LARGE = 1_000_000  # bytes of a tensor that no replacement gets, as it has it
DATA = dataset(GLOBAL_BATCH * LENGTH)


def await_file(path: Path) -> None:
    """A checkpoint is complete some time after the step."""
    deadline = time.monotonic() + PATIENCE
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)


class Damage(L.Callback):
    """Does something to the newest checkpoint right before the stage is lost."""

    def __init__(self, how: str, directory: Path) -> None:
        self._how, self._directory = how, directory

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        path = self._directory / "step=8.ckpt"
        if trainer.global_step != 9 or not trainer.is_global_zero or trainer.strategy.incarnation:
            return
        await_file(path)
        if self._how == "removed":
            path.unlink()
        elif self._how == "cut":
            os.truncate(path, path.stat().st_size // 2)
        elif self._how == "overwritten":
            with open(path, "r+b") as file:
                file.seek(path.stat().st_size // 2)
                file.write(b"\xff" * 512)


def lose_stage(directory: Path, how: str, pipelines: int = 2, stage: int = 0) -> L.Trainer:
    """Trains exactly, and loses ``stage`` in steps 10 and 11; checkpoints are of steps 4, 8 and 12."""
    checkpoints = ModelCheckpoint(directory, every_n_train_steps=4, save_top_k=-1, filename="{step}")
    faults = [Fault("kill", d, stage, 10 + d % 2) for d in range(pipelines)]
    options = {"callbacks": [Damage(how, directory), checkpoints], "enable_checkpointing": True}
    strategy = {"on_stage_lost": "restart"}
    return exact_fit(Regression().double(), pipelines, 2, faults, DATA, max_steps=LENGTH, strategy=strategy, **options)


@pytest.mark.parametrize(
    ("how", "step"), sampled([("intact", 8), ("removed", 4), ("cut", 4), ("overwritten", 4)], 1, rest=pytest.mark.long)
)
def test_training_starts_again_from_the_newest_checkpoint_that_is_whole(how, step, tmp_path):
    run = lose_stage(tmp_path, how)
    (lost,) = happened(run, "stage_lost")
    assert lost.details["stage"] == 0
    after = run.strategy.history[run.strategy.history.index(lost) + 1 :]
    assert [event.step for event in after if event.kind == "step"] == list(range(step, LENGTH))
    assert run.strategy.schedules[-1].grid == run.strategy.schedules[0].grid  # the devices are all there
    assert len(failures(run)) == 2, "nobody is missing after the restart"
    assert run.global_step == LENGTH
    assert [event.step for event in happened(run, "saved")] == ([4, 8, 12] if step == 8 else [4, 8, 8, 12])


class Dies(L.Callback):
    """The first stage ends in a step, in each process that comes there."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 6 and trainer.strategy.worker.stage == 0:
            await_file(self._directory / "step=4.ckpt")
            (self._directory / f"died-{trainer.strategy.incarnation}").touch()
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(("max_restarts", "why"), sampled([
    (0, r"killed by SIGKILL.*same place after 2 restarts in a row \(the newest step before it is [45]\)"),
    (2, r"restarted 2 times from the checkpoint of step 4 .*max_restarts"),
], 1, rest=pytest.mark.long))  # fmt: skip
def test_a_loss_that_comes_back_without_a_newer_checkpoint_ends_the_run(max_restarts, why, tmp_path):
    checkpoints = ModelCheckpoint(tmp_path, every_n_train_steps=4, save_top_k=-1, filename="{step}")
    with pytest.raises(StageLostError, match=why):
        fit(
            Regression().double(), 1, 2, data=DATA, max_steps=LENGTH,
            strategy={"on_stage_lost": "restart", "max_restarts": max_restarts},
            callbacks=[Dies(tmp_path), checkpoints], enable_checkpointing=True,
        )  # fmt: skip
    assert len(list(tmp_path.glob("died-*"))) == 3


@pytest.mark.parametrize("background", sampled([False, True], 1, rest=pytest.mark.long))
def test_by_default_it_starts_again_from_a_checkpoint_that_a_run_can_go_on_from(background, tmp_path):
    whole = ModelCheckpoint(tmp_path, every_n_train_steps=4, save_top_k=-1, filename="{step}")
    weights = ModelCheckpoint(tmp_path, "w-{step}", every_n_train_steps=5, save_top_k=-1, save_weights_only=True)
    faults = [Fault("kill", d, 0, step=6) for d in range(2)]
    options: dict[str, Any] = {"callbacks": [whole, weights], "enable_checkpointing": True}
    strategy = {"background": background}
    run = exact_fit(Regression().double(), 2, 1, faults, DATA, max_steps=LENGTH, strategy=strategy, **options)
    (lost,) = happened(run, "stage_lost")
    after = run.strategy.history[run.strategy.history.index(lost) + 1 :]
    assert [event.step for event in after if event.kind == "step"] == list(range(4, LENGTH))
    assert "objects" in torch.load(tmp_path / "step=4.ckpt")["lightning_recycle"]
    assert "lightning_recycle" not in torch.load(tmp_path / "w-step=5.ckpt")


def test_large_data_of_the_training_is_there_after_the_restart(tmp_path):
    """A checkpoint names what has not changed since the run began; DataLoaders exist only when the training begins."""
    data = dataset(LARGE // dataset(1).tensors[0].nbytes + 1)
    saving = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1, filename="{step}")
    run = exact_fit(
        Regression().double(), 1, 1, [Fault("kill", 0, 0, 4)], data, max_steps=6, callbacks=[saving],
        enable_checkpointing=True,
    )  # fmt: skip
    assert len(happened(run, "stage_lost")) == 1


@pytest.mark.parametrize(
    ("saving", "on_stage_lost"), [({"save_weights_only": True}, "auto"), ({}, "raise")], ids=["weights", "raise"]
)
def test_otherwise_the_loss_is_an_error_by_default(saving, on_stage_lost, tmp_path):
    checkpoints = ModelCheckpoint(tmp_path, every_n_train_steps=4, save_top_k=-1, filename="{step}", **saving)
    options: dict[str, Any] = {"callbacks": [checkpoints], "enable_checkpointing": True}
    strategy = {"on_stage_lost": on_stage_lost}
    with pytest.raises(StageLostError, match=r"as a run with a ModelCheckpoint does by itself"):
        fit(Regression().double(), 1, 1, [Fault("kill", 0, 0, 6)], data=DATA, strategy=strategy, **options)


def test_without_a_checkpoint_the_loss_is_an_error():
    faults = [Fault("kill", 0, 1, 2), Fault("kill", 1, 1, 3)]
    with pytest.raises(StageLostError, match=r"All replicas of stage 1 are lost") as caught:
        fit(Regression().double(), 2, 2, faults, strategy={"on_stage_lost": "restart"})
    assert "ModelCheckpoint" in str(caught.value)
    assert "let ReCycleStrategy(on_stage_lost" not in str(caught.value), "that is set"
