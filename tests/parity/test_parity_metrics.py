"""What is logged and measured on a grid equals what is logged and measured on one device, on every worker."""

import csv
import json
import os
from pathlib import Path
from typing import Any

import pytest
import same_script as same
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from metered import LOGGING_HOOKS, LogsEverywhere, LogsEverywhereToo, Metered


class NotesMetrics(Callback):
    """Writes down the metrics that callbacks see, in each process, whenever callbacks decide by them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _note(self, trainer: Any, *_: Any) -> None:
        if trainer.state.fn != "fit":
            return
        self.folder.mkdir(exist_ok=True)
        seen = {k: float(v) for k, v in trainer.callback_metrics.items() if k != "recycle/recovery_seconds"}
        with open(self.folder / f"{getattr(trainer.strategy, 'grid_rank', 0)}-{os.getpid()}", "a") as file:
            file.write(json.dumps(seen, sort_keys=True) + "\n")

    on_train_batch_end = on_validation_end = on_train_epoch_end = _note


def measured(session: same.Session) -> None:
    module = Metered()
    logger = CSVLogger(session.root, name="logs", version=0)
    trainer = session.fit(
        module,
        validates=True,
        max_epochs=2,
        logger=logger,
        log_every_n_steps=2,
        callbacks=[NotesMetrics(session.root / "notes")],
    )
    results = session.run.results
    results["fit"] = session.run.metrics
    results["logged"] = {k: float(v) for k, v in trainer.logged_metrics.items() if not k.startswith("recycle/")}
    results["bar"] = {k: float(v) for k, v in trainer.progress_bar_metrics.items() if not k.startswith("recycle/")}
    results["validate"] = trainer.validate(module, session.data.validation(), verbose=False)
    results["test"] = trainer.test(module, [session.data.validation(), session.data.loader(3, seed=3)], verbose=False)
    results["predict"] = trainer.predict(module, [session.data.validation(), session.data.loader(3, seed=3)])
    trainer.predict(module, session.data.validation(), return_predictions=False)


measured_runs = same.runs_of(measured)


FIT_METRICS = [
    "train_accuracy_step", "train_accuracy_epoch", "train_mean", "out_mean_step", "out_mean_epoch", "out_max",
    "out_min", "seen_step", "seen_epoch", "val_loss", "val_accuracy", "val_accuracy_by_hand", "val_perplexity",
    "val_mean_metric", "collected_precision", "collected_recall", "collected_auroc", "val_step_and_epoch_epoch",
    "val_max", "val_min", "val_sum",
]  # fmt: skip


@pytest.mark.parametrize("name", FIT_METRICS)
def test_a_metric_of_fit_equals_that_of_one_device(measured_runs: same.Runs, name: str) -> None:
    one, grid = (run.results["fit"] for run in measured_runs)
    same.assert_same(one[name], grid[name], same.FLOAT32_TOLERANCE, name)


def test_callbacks_see_the_same_names(measured_runs: same.Runs) -> None:
    one, grid = (run.results["fit"] for run in measured_runs)
    assert one.keys() == grid.keys()
    assert set(FIT_METRICS) < one.keys()


def test_losses_are_exact(measured_runs: same.Runs) -> None:
    one, grid = (run.results["fit"] for run in measured_runs)
    same.assert_same(one["train_loss"], grid["train_loss"], same.TOLERANCE)
    same.assert_same(one["val_loss"], grid["val_loss"], same.TOLERANCE)


def test_weights_are_exact(measured_runs: same.Runs) -> None:
    one, grid = measured_runs
    same.assert_same(one.weights, grid.weights)
    assert one.progress == grid.progress == (2, 8)


@pytest.mark.parametrize("where", ["logged", "bar"])
def test_loggers_and_the_progress_bar_see_the_same(measured_runs: same.Runs, where: str) -> None:
    one, grid = (run.results[where] for run in measured_runs)
    assert one, "nothing was shown"
    same.assert_same(one, grid, same.FLOAT32_TOLERANCE)


@pytest.mark.parametrize("entry", ["validate", "test"])
def test_an_evaluation_returns_the_same(measured_runs: same.Runs, entry: str) -> None:
    one, grid = (run.results[entry] for run in measured_runs)
    assert len(one) == {"validate": 1, "test": 2}[entry]
    assert len(one[0]) > 8
    same.assert_same(one, grid, same.FLOAT32_TOLERANCE)


def test_predictions_are_the_same_batch_by_batch(measured_runs: same.Runs) -> None:
    one, grid = (run.results["predict"] for run in measured_runs)
    assert [len(batch["class"]) for batch in one[0]] == [8, 8, same.VALIDATION_SAMPLES - 16]
    assert [type(batch["logits"]) for loader in grid for batch in loader] == [tuple] * 4
    same.assert_same(one, grid)


def test_every_worker_sees_the_same_metrics_when_callbacks_decide(measured_runs: same.Runs) -> None:
    found = {path.name.split("-")[0]: path.read_text() for path in (measured_runs[1].root / "notes").iterdir()}
    assert len(found) == same.PIPELINES * same.STAGES
    assert len(found["0"].splitlines()) > 8
    assert len(set(found.values())) == 1


def rows(run: same.Run) -> list[dict[str, str]]:
    with open(run.root / "logs" / "version_0" / "metrics.csv") as file:
        return [{k: v for k, v in row.items() if not k.startswith("recycle/")} for row in csv.DictReader(file)]


def test_the_csv_logger_has_the_same_rows(measured_runs: same.Runs) -> None:
    one, grid = (rows(run) for run in measured_runs)
    numbers = [[{k: float(v) if v else None for k, v in row.items()} for row in rows] for rows in (one, grid)]
    assert len(one) > 5
    same.assert_same(*numbers, tolerance=same.FLOAT32_TOLERANCE)


def everywhere(session: same.Session) -> None:
    session.fit(LogsEverywhere(), validates=True, max_epochs=2, callbacks=[LogsEverywhereToo()])


def test_values_can_be_logged_in_every_hook_where_lightning_allows_it(tmp_path: Path) -> None:
    one, grid = same.run_both(everywhere, tmp_path)
    expected = {
        f"{who}/{hook}"
        for who in ("module", "callback")
        for hook in LOGGING_HOOKS
        if "test" not in hook and "predict" not in hook
    }
    assert expected <= {name.removesuffix("_epoch") for name in one.metrics}
    same.assert_same(one.metrics, grid.metrics)
