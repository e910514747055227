"""What users see when workers die, when everything dies, and when it is their own code that fails."""

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from support.models import Regression, dataset
from support.process_tree import worker_processes
from support.sampling import sampled
from support.training import exact_fit, failures, fit
from torch import Tensor

from lightning_recycle import StageLostError
from lightning_recycle.callbacks import Fault


class UserBug(Exception):
    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code

    def __reduce__(self) -> Any:
        return UserBug, (self.args[0], self.code)


class Unpicklable(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


class BrokenLoss(Regression):
    def __init__(self, error: str) -> None:
        super().__init__()
        self.error = error

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        if self.trainer.global_step == 2:
            if self.error == "bug":
                raise UserBug("a bug in loss", 42)
            raise Unpicklable(1, 2)
        return super().loss(output, target)


def kill_at_random(seed: int) -> threading.Thread:
    """Kills one worker from outside, at a random moment of the run: while it starts, trains or ends."""

    def kill() -> None:
        rng = random.Random(seed)
        while not worker_processes():
            time.sleep(0.01)
        time.sleep(rng.uniform(0.0, 3.0))
        victims = worker_processes()
        if len(victims) == 4:
            os.kill(rng.choice(victims), signal.SIGKILL)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("seed", sampled(range(6), 1))
def test_a_worker_killed_from_outside_at_any_moment_changes_nothing(seed: int) -> None:
    thread = kill_at_random(seed)
    run = exact_fit(Regression().double(), 2, 2, data=dataset(24 * 60), max_steps=60)
    thread.join(10)
    assert len(failures(run)) <= 1


def test_the_loss_of_a_stage_is_one_clear_error() -> None:
    with pytest.raises(StageLostError, match=r"stage 1 .*newest checkpoint"):
        fit(Regression().double(), 2, 2, [Fault("kill", 0, 1, step=2), Fault("kill", 1, 1, step=5, at="reduce")])


@pytest.mark.long
def test_the_loss_of_the_only_pipeline_is_one_clear_error() -> None:
    with pytest.raises(StageLostError, match="stage 0"):
        fit(Regression().double(), 1, 2, [Fault("kill", 0, 0, step=2)])


def test_a_users_exception_surfaces_once_as_itself_and_quickly() -> None:
    started = time.monotonic()
    with pytest.raises(UserBug, match="a bug in loss") as caught:
        fit(BrokenLoss("bug").double(), 2, 2)
    assert caught.value.code == 42
    assert "in loss" in str(caught.value.__cause__)
    assert "In worker" in str(caught.value.__cause__)
    assert time.monotonic() - started < 15


@pytest.mark.long
def test_an_exception_whose_init_takes_other_arguments_surfaces_as_itself() -> None:
    with pytest.raises(Unpicklable, match="1 and 2"):
        fit(BrokenLoss("unpicklable").double(), 2, 2)


def test_the_leaders_death_keeps_metrics_and_progress(tmp_path: Path) -> None:
    from lightning.pytorch.loggers import CSVLogger

    logger = CSVLogger(tmp_path, name="", version="", flush_logs_every_n_steps=1)
    options: dict[str, Any] = {"logger": logger, "log_every_n_steps": 1, "enable_progress_bar": True}
    run = exact_fit(Regression().double(), 2, 2, [Fault("kill", 0, 1, step=5)], **options)
    rows = (tmp_path / "metrics.csv").read_text().splitlines()
    header = rows[0].split(",")
    assert [int(row.split(",")[header.index("step")]) for row in rows[1:]] == list(range(10))
    assert float(run.callback_metrics["recycle/live_workers"]) == 3
    assert "train_loss" in run.callback_metrics
