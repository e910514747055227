"""Flags and callbacks mean for a PipelineModule what they mean on one device."""

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import same_script as same
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from ordinary_callbacks import CALLBACKS
from ordinary_data import DATA
from ordinary_flags import FLAGS, fits
from ordinary_loggers import LOGGERS
from ordinary_runs import Case, Script, Session, all_differences, calls, on_a_grid, on_one_device, validated_at
from torch import nn
from torch.utils.data import DataLoader, Dataset

RECORDS = same.GLOBAL_BATCH * same.STEPS_PER_EPOCH + 3


class Records(Dataset[dict[str, torch.Tensor]]):
    """Samples that are dicts."""

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x = torch.full((8,), index / len(self), dtype=torch.float64)
        return {"x": x, "y": torch.tensor(index % 4)}


class OfRecords(same.Classifier):
    def split_batch(self, batch: Any) -> tuple[Any, Any]:
        return batch["x"], batch["y"]

    def predict_input(self, batch: Any) -> Any:
        return batch["x"]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("seen_x", batch["x"].sum(), on_step=True, on_epoch=True)


def with_records(**loader: Any) -> Script:
    def script(session: Session) -> None:
        module, trainer = session.prepared(OfRecords()), session.trainer(max_epochs=1)
        made = DataLoader(Records(), batch_size=session.data.batch_size, **loader)
        # On one device a smaller last batch would be trained on, too; a grid leaves it out.
        training = DataLoader(Records(), batch_size=session.data.batch_size, **{**loader, "drop_last": True})
        trainer.fit(module, training, made)
        session.run.results["fit"] = session.run.metrics
        session.run.results["predict"] = trainer.predict(module, made)

    return script


class NotANumber(nn.Module):
    """Adds zero, but the gradient of its parameter is NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(8, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (0.0 * self.scale).sqrt()


class HasNaN(same.Classifier):
    def configure_pipeline(self) -> list[Any]:
        return [NotANumber(), *super().configure_pipeline()]


def predicted_all(run: same.Run) -> bool:
    """Whatever drop_last says, a prediction is of all samples."""
    return run.results["fit"]["seen_x_epoch"] != 0 and sum(map(len, run.results["predict"])) == RECORDS


CASES: dict[str, Case] = {
    **FLAGS,
    **CALLBACKS,
    **LOGGERS,
    **DATA,
    "batches that are dicts": Case((), with_records(drop_last=True), predicted_all),
    "batches that are dicts, read by a process": Case((), with_records(num_workers=1), predicted_all),
    "a norm that is no number": Case((), fits(pipeline=HasNaN, max_steps=1, gradient_clip_val=0.1),
        lambda run: all(weight.isnan().all() for weight in run.weights.values()), ignored=("weights", "attributes")),
    "grad_norm, together": replace(LOGGERS["grad_norm"], strategy={"staggered": False}),
    "no training": Case((), fits(limit_train_batches=0), lambda run: calls(run, "on_train_start") == 0),
    "limit_val_batches=0": Case((), fits(limit_val_batches=0), lambda run: calls(run, "on_validation_start") == 0),
    "no validation": Case((), fits(validates=False), lambda run: calls(run, "on_validation_start") == 0),
}  # fmt: skip
ALWAYS = ["limit_test_batches", "overfit_batches", "runs of one Trainer", "batches that are dicts", "EarlyStopping"]
ALWAYS += ["grad_norm", "torchmetrics", "a norm that is no number"]
LONG = ["inference_mode of a test", "barebones", "PyTorchProfiler", "resuming"]
LONG += ["fast_dev_run", "gradient_clip_val", "grad_norm, together"]
LONG += ["detect_anomaly", "OnExceptionCheckpoint", "profiler", "self.log in steps and hooks"]
LONG += ["TensorBoardLogger with the graph", "gradient_clip_algorithm", "use_distributed_sampler"]
LONG += ["BasePredictionWriter"]
LONG += ["val_check_interval", "plugins", "reload_dataloaders_every_n_epochs", "a data module"]
VARIATIONS = ["no training", "no validation", "limit_train_batches", "limit_val_batches", "limit_val_batches=0"]
VARIATIONS += ["num_sanity_val_steps", "check_val_every_n_epoch", "max_steps"]
VARIATIONS += ["min_epochs", "deterministic and benchmark", "outputs collected in attributes"]
VARIATIONS += ["batches that are dicts, read by a process"]


@pytest.mark.parametrize("name", [
    *ALWAYS,
    *(pytest.param(name, marks=pytest.mark.long) for name in LONG),
    *(pytest.param(name, marks=pytest.mark.exhaustive) for name in VARIATIONS),
])  # fmt: skip
def test_a_flag_means_the_same(tmp_path, name):
    case = CASES[name]
    one = on_one_device(case, tmp_path / "one", pipeline=True)
    grid = on_a_grid(case, same.STAGES, "none", tmp_path / "grid", pipeline=True)
    for run in (one, grid):
        assert case.claim(run), f"{name} did not do what it says"
    found = all_differences(case, one, grid, None)
    assert not found, "\n".join(found)


# ---------------------------------------------------------------------- what needs a script of its own


class Raises(Callback):
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 3:
            raise ArithmeticError("the user's own")


def test_an_exception_of_the_user_leaves_no_checkpoint_and_says_so(tmp_path, caplog):
    def script(session: same.Session) -> None:
        savers = [
            OnExceptionCheckpoint(session.root / "any"),
            ModelCheckpoint(session.root, "model", save_on_exception=True, every_n_train_steps=10_000),
        ]
        with pytest.raises(ArithmeticError):
            session.fit(same.Classifier(), callbacks=[Raises(), *savers], enable_checkpointing=True)

    assert same.on_a_grid(script, tmp_path).files() == []
    assert "No checkpoint is written for this error" in caplog.text


class Slow(Callback):
    def __init__(self, seconds: float = 0.1) -> None:
        self.seconds = seconds
        self.moments: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        time.sleep(self.seconds)
        self.moments.append(time.monotonic())


def stopped_by_the_clock(session: same.Session) -> None:
    session.fit(same.Classifier(), max_time={"seconds": 3}, callbacks=[Slow(0.3), session.diary()])


def test_max_time_stops_all_workers_at_the_same_step(tmp_path):
    one, grid = same.run_both(stopped_by_the_clock, tmp_path)
    assert 2 <= one.progress[1] <= 10  # not so many as the clock allows on a busy machine
    assert 2 <= grid.progress[1] <= 10
    steps = {len(grid.diary("callback", rank)) for rank in range(same.PIPELINES * same.STAGES)}
    assert len(steps) == 1
    alone = same.on_one_device(lambda s: s.fit(same.Classifier(), max_steps=grid.progress[1]) and None, tmp_path)
    same.assert_same(alone.weights, grid.weights)


INTERVAL = 0.25  # seconds


def validated_by_the_clock(session: same.Session) -> None:
    session.fit(
        same.Classifier(), validates=True, val_check_interval={"seconds": INTERVAL}, check_val_every_n_epoch=None,
        max_steps=8, callbacks=[Slow(), session.diary()],
    )  # fmt: skip


def test_a_val_check_interval_in_seconds_validates_on_all_workers_at_the_same_step(tmp_path):
    grid = same.on_a_grid(validated_by_the_clock, tmp_path)
    (slow,) = (callback for callback in grid.trainer.callbacks if isinstance(callback, Slow))
    assert 1 <= len(validated_at(grid)) <= 2 + (slow.moments[-1] - slow.moments[0]) / INTERVAL
    for rank in range(same.PIPELINES * same.STAGES):
        same.assert_same(grid.diary("callback"), grid.diary("callback", rank))


class NaN(same.Classifier):
    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return super().loss(output, target) + (output - output).sum().abs().sqrt()  # its gradient is not a number


def anomalous(session: same.Session) -> None:
    try:
        session.fit(NaN(), detect_anomaly=True, max_steps=2, callbacks=[session.diary()])
    except RuntimeError as error:
        session.run.results["error"] = str(error)


def exceptions_told(run: same.Run) -> Iterator[str]:
    """The lines of all processes for the hook that callbacks get an exception by."""
    for path in (run.root / "diary").iterdir():
        yield from (line for line in path.read_text().splitlines() if "on_exc" in line)


@pytest.mark.filterwarnings("ignore:(?s).*Error detected in")
def test_detect_anomaly_raises_the_same_error_in_the_launching_process(tmp_path):
    one, grid = same.run_both(anomalous, tmp_path)
    assert "returned nan values" in one.results["error"]
    assert one.results["error"] == grid.results["error"]
    assert [len(list(exceptions_told(run))) for run in (one, grid)] == [1, 1], "once, in the launching process"
