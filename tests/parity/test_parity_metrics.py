"""What is logged and measured on a grid equals what is logged and measured on one device, on every worker."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import same_script as same
from lightning.pytorch.callbacks import Callback
from metered import Metered
from ordinary_runs import Case, Session, all_differences, csv_rows, on_a_grid, on_one_device


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


def measured(session: Session) -> None:
    module, data, results = session.prepared(Metered()), session.data, session.run.results
    trainer = session.trainer(max_epochs=2, callbacks=[NotesMetrics(session.root / "diary" / "notes")])
    trainer.fit(module, data.training(), data.validation())
    results["fit"] = session.run.metrics
    results["logged"] = {k: float(v) for k, v in trainer.logged_metrics.items() if not k.startswith("recycle/")}
    results["bar"] = {k: float(v) for k, v in trainer.progress_bar_metrics.items() if not k.startswith("recycle/")}
    results["validate"] = trainer.validate(module, data.validation(), verbose=False)
    results["test"] = trainer.test(module, [data.validation(), data.loader(3, seed=3)], verbose=False)
    results["predict"] = trainer.predict(module, [data.validation(), data.loader(3, seed=3)])
    trainer.predict(module, data.validation(), return_predictions=False)


FIT_METRICS = {
    "train_accuracy_step", "train_accuracy_epoch", "train_mean", "out_mean_step", "out_mean_epoch", "out_max",
    "out_min", "seen_step", "seen_epoch", "val_loss", "val_accuracy", "val_accuracy_by_hand", "val_perplexity",
    "val_mean_metric", "collected_precision", "collected_recall", "collected_auroc", "val_step_and_epoch_epoch",
    "val_max", "val_min", "val_sum",
}  # fmt: skip
# Attributes are those of test_parity_after_fit.py.
MEASURED = Case((), measured, lambda run: run.results["fit"].keys() >= FIT_METRICS, ignored=("attributes",))


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> same.Runs:
    one, grid = (tmp_path_factory.mktemp(name) for name in ("one", "grid"))
    return on_one_device(MEASURED, one), on_a_grid(MEASURED, same.STAGES, "none", grid)


def test_all_that_is_measured_and_logged_is_that_of_one_device(runs):
    one, grid = runs
    assert MEASURED.claim(one)
    assert one.progress == (2, 8)
    assert len(csv_rows(one)) > 5
    assert [len(one.results[name]) for name in ("validate", "test")] == [1, 2]
    assert len(one.results["validate"][0]) > 8
    assert [len(batch["class"]) for batch in one.results["predict"][0]] == [8, 8, same.VALIDATION_SAMPLES - 16]
    assert [type(batch["logits"]) for loader in grid.results["predict"] for batch in loader] == [tuple] * 4
    found = all_differences(MEASURED, one, grid, None)
    assert not found, "\n".join(found)
    for loss in ("train_loss", "val_loss"):
        same.assert_same(one.results["fit"][loss], grid.results["fit"][loss])


def test_every_worker_sees_the_same_metrics_when_callbacks_decide(runs):
    notes = runs[1].root / "diary" / "notes"
    found = {path.name.split("-")[0]: path.read_text() for path in notes.iterdir()}
    assert len(found) == same.PIPELINES * same.STAGES
    assert len(found["0"].splitlines()) > 8
    assert len(set(found.values())) == 1
