"""Loggers lose no row and open no second version when the leader dies."""

import csv
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.loggers import CSVLogger
from support.models import GLOBAL_BATCH, Regression, dataset
from support.training import failures, on_one_device, trainer
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


def train(directory: Path, lightning: Any) -> L.Trainer:
    run: L.Trainer = lightning(logger=CSVLogger(directory), log_every_n_steps=1, max_epochs=2, max_steps=-1)
    size = GLOBAL_BATCH if run.num_devices == 1 else GLOBAL_BATCH // 2
    data = dataset(GLOBAL_BATCH * EPOCH)
    run.fit(Logged().double(), DataLoader(data, batch_size=size), DataLoader(dataset(40), batch_size=size))
    return run


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> list[dict[str, str]]:
    directory = tmp_path_factory.mktemp("one")
    train(directory, on_one_device)
    found = rows(directory / "lightning_logs" / "version_0")
    assert len(found) == 2 * (EPOCH + 2)  # every step, and of each epoch the validation and the end
    return found


@pytest.mark.parametrize("faults", [
    (),
    (Fault("kill", 0, 1, 2),),
    (Fault("kill", 0, 1, 2, at="optimizer", when="after"),),
    (Fault("kill", 0, 1, EPOCH - 1, at="reduce"),),
    (Fault("kill", 0, 1, at="validation", step=EPOCH),),
    (Fault("kill", 0, 1, at="end"),),
    (Fault("preempt", 0, 1, 2),),
], ids=["no fault", "forward", "applied", "end of an epoch", "validation", "end", "departure"])  # fmt: skip
def test_the_rows_are_those_of_one_device_whenever_the_leader_goes(faults, expected, tmp_path):
    run = train(tmp_path, lambda **kwargs: trainer(2, 2, faults, **kwargs))
    assert failures(run) == [(f.pipeline, f.stage) for f in faults if f.kind == "kill"]
    (version,) = (tmp_path / "lightning_logs").iterdir()
    assert version.name == "version_0"
    assert [{key: float(value) for key, value in row.items()} for row in rows(version)] == numbers(expected)
    assert "width: 16" in (version / "hparams.yaml").read_text()


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
