"""Loggers lose no row and open no second version when the leader dies."""

import csv
import functools
import threading
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.utilities import rank_zero_only
from support.models import GLOBAL_BATCH, Regression, dataset
from support.training import on_one_device, trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_recycle.callbacks import Fault

pytestmark = pytest.mark.long

EPOCH = 4  # steps


class Logged(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"width": 16})

    def on_training_output(self, output: Tensor, target: Tensor) -> None:
        self.log("output", output.mean(), on_step=True, on_epoch=True)

    def on_train_epoch_end(self) -> None:
        self.log("epochs", float(self.current_epoch + 1))


def rows(directory: Path) -> list[dict[str, str]]:
    """What the CSV logger wrote, without what one device does not have."""
    with open(directory / "metrics.csv", newline="") as file:
        return [{k: v for k, v in row.items() if v and not k.startswith("recycle/")} for row in csv.DictReader(file)]


def numbers(found: list[dict[str, str]]) -> list[dict[str, Any]]:
    return [{key: pytest.approx(float(value), abs=1e-12) for key, value in row.items()} for row in found]


def test_a_logger_that_the_script_has_used_before_goes_on_after_the_leader_and_in_the_next_run(tmp_path):
    """As scripts do that log hyper-parameters themselves: then workers get a writer that has seen no rows."""
    found = []
    for name, lightning in (
        ("one", on_one_device),
        ("grid", lambda **kwargs: trainer(2, 2, [Fault("kill", 0, 1, 2)], **kwargs)),
    ):
        logger = CSVLogger(tmp_path / name)
        logger.log_hyperparams({"width": 16})
        run: L.Trainer = lightning(logger=logger, log_every_n_steps=1, max_epochs=1, max_steps=-1)
        size = GLOBAL_BATCH if run.num_devices == 1 else GLOBAL_BATCH // 2
        data, model = DataLoader(dataset(GLOBAL_BATCH * EPOCH), batch_size=size), Logged().double()
        run.fit(model, data)
        run.test(model, data, verbose=False)
        found.append(rows(tmp_path / name / "lightning_logs" / "version_0"))
    one, grid = found
    assert len(one) == EPOCH + 2
    assert [{key: float(value) for key, value in row.items()} for row in grid] == numbers(one)


class Tells(L.LightningModule):
    """Its steps tell the logger themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(1, 1).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.logger.log_metrics({"seen": float(batch_idx)}, step=batch_idx)
        if batch_idx == 0:
            self.logger.log_hyperparams({"first": 1})
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


@pytest.mark.parametrize("lost", [None, 0])
def test_what_a_step_tells_a_logger_is_written_once(tmp_path, lost):
    faults = [] if lost is None else [Fault("kill", lost, 0, 3, at="reduce")]
    logger = CSVLogger(tmp_path, version=0)
    run = trainer(2, 1, faults, {"num_microbatches": 2}, logger=logger, max_epochs=1, max_steps=-1)
    run.fit(Tells(), DataLoader(torch.arange(48.0, dtype=torch.float64)[:, None], batch_size=4))
    directory = Path(logger.log_dir)
    found = [(row["step"], row["seen"]) for row in rows(directory) if "seen" in row]
    assert [(int(step), float(value)) for step, value in found] == [(step, float(step)) for step in range(6)]
    assert "first: 1" in (directory / "hparams.yaml").read_text()


class InMemory(Logger):
    """Keeps rows for the script that reads them after ``fit``, and what cannot be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, float]] = []
        self.status, self.lock = "", None

    name = version = "memory"

    def log_hyperparams(self, *_: Any) -> None:
        """They are in the script."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if rank_zero_only.rank == 0:
            self.lock = self.lock or threading.Lock()
            self.rows.append(metrics)

    def finalize(self, status: str) -> None:
        self.status = status


def test_what_a_logger_of_ones_own_keeps_is_there_after_fit():
    found = []
    for lightning in (on_one_device, functools.partial(trainer, 2, 1, [Fault("kill", 1, 0, 2)])):
        run = lightning(logger=InMemory(), log_every_n_steps=1, max_epochs=1, max_steps=-1)
        size = GLOBAL_BATCH if run.num_devices == 1 else GLOBAL_BATCH // 2
        run.fit(Logged().double(), DataLoader(dataset(GLOBAL_BATCH * EPOCH), batch_size=size))
        kept = [{k: v for k, v in row.items() if not k.startswith("recycle/")} for row in run.logger.rows]
        found.append((kept, run.logger.status))
    (one, status), (grid, its_status) = found
    assert (grid, its_status) == (numbers(one), status)
    assert len(one) > EPOCH
