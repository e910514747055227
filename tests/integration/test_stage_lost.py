"""All replicas of a stage are lost: one clear error, or another start from the newest checkpoint that can be read."""

import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from support.growth import happened
from support.models import GLOBAL_BATCH, Regression, dataset
from support.training import exact_fit, fit

from lightning_recycle import StageLostError
from lightning_recycle.callbacks import Fault

LENGTH = 14
DATA = dataset(GLOBAL_BATCH * LENGTH)


class Damage(L.Callback):
    """Does something to the newest checkpoint right before the stage is lost."""

    def __init__(self, how: str, directory: Path) -> None:
        self._how, self._directory = how, directory

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        path = self._directory / "step=8.ckpt"
        strategy: Any = trainer.strategy
        if trainer.global_step != 9 or not trainer.is_global_zero or strategy.incarnation:
            return
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


@pytest.mark.parametrize(("how", "step"), [("intact", 8), ("removed", 4), ("cut", 4), ("overwritten", 4)])
def test_training_starts_again_from_the_newest_checkpoint_that_is_whole(how: str, step: int, tmp_path: Path) -> None:
    run = lose_stage(tmp_path, how)
    (lost,) = happened(run, "stage_lost")
    assert lost.details["stage"] == 0
    after = run.strategy.history[run.strategy.history.index(lost) + 1 :]
    assert [event.step for event in after if event.kind == "step"] == list(range(step, LENGTH))
    assert run.strategy.schedules[-1].grid.pipelines == 1  # the two workers that are left
    assert run.global_step == LENGTH
    assert [event.step for event in happened(run, "saved")] == ([4, 8, 12] if step == 8 else [4, 8, 8, 12])


def test_as_many_pipelines_go_on_as_the_survivors_allow(tmp_path: Path) -> None:
    run = lose_stage(tmp_path, "intact", pipelines=4, stage=1)
    assert run.strategy.schedules[-1].grid.pipelines == 2


def test_without_a_checkpoint_the_loss_is_an_error() -> None:
    faults = [Fault("kill", 0, 1, 2), Fault("kill", 1, 1, 3)]
    with pytest.raises(StageLostError, match=r"All 2 replicas of stage 1 are lost"):
        fit(Regression().double(), 2, 2, faults, strategy={"on_stage_lost": "restart"})
