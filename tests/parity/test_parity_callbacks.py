"""Lightning's own callbacks do on a grid what they do on one device: decisions, files, states, logged values."""

import csv
import itertools
import os
import re
import signal
from collections.abc import Callable
from copy import deepcopy
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import same_script as same
import torch
from lightning.pytorch.callbacks import (
    BasePredictionWriter,
    Callback,
    DeviceStatsMonitor,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    ThroughputMonitor,
    Timer,
)
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger


class Overfitted(same.Classifier):
    """Its validation loss falls and rises, and its learning rate follows two schedulers."""

    def __init__(self) -> None:
        super().__init__(lr=0.4)
        self.save_hyperparameters({"lr": 0.4})

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        return [optimizer], same.schedules(optimizer)


class Kind(Enum):
    """Something that is loaded with ``weights_only=False`` alone."""

    NOTES = 1


class NotesRates(Callback):
    """Keeps the learning rate of every step, and the schedulers' states, as its own state."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.schedulers: list[Any] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        self.schedulers = [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]

    def state_dict(self) -> dict[str, Any]:
        return {"rates": self.rates, "schedulers": self.schedulers, "kind": Kind.NOTES}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rates, self.schedulers = state["rates"], state["schedulers"]


def batch_size(batch: Any) -> int:
    return len(batch[0])


def callbacks(root: Path) -> dict[str, Any]:
    return {
        "stopping": EarlyStopping("val_loss", patience=2),
        "best": ModelCheckpoint(
            root / "best", monitor="val_loss", save_top_k=2, save_last=True, filename="{epoch}-{val_loss:.4f}"
        ),
        "steps": ModelCheckpoint(root / "steps", every_n_train_steps=3, save_top_k=-1, save_weights_only=True),
        "timed": ModelCheckpoint(root / "timed", train_time_interval=timedelta(seconds=0), save_top_k=-1),
        "rates": NotesRates(),
        "monitor": LearningRateMonitor(log_momentum=True),
        "throughput": ThroughputMonitor(batch_size_fn=batch_size, window_size=2),
        "device": DeviceStatsMonitor(cpu_stats=True),
        "timer": Timer(duration="00:00:10:00"),
    }


def monitored(session: same.Session) -> None:
    made = callbacks(session.root)
    trainer = session.fit(
        Overfitted(),
        validates=True,
        max_epochs=20,
        log_every_n_steps=2,
        enable_checkpointing=True,
        logger=[
            CSVLogger(session.root, name="csv", version=0),
            TensorBoardLogger(session.root, name="board", version=0, default_hp_metric=False),
        ],
        callbacks=[*made.values(), session.diary()],
    )
    session.run.results["progress"] = session.run.progress
    session.run.results["weights"] = session.run.weights
    session.run.results["states"] = {  # as the fit left them; loading a checkpoint sets them back
        name: deepcopy(callback.state_dict()) for name, callback in made.items()
    }
    session.run.results["best"] = trainer.test(
        session.run.module, session.data.validation(), ckpt_path="best", weights_only=False, verbose=False
    )


runs = same.runs_of(monitored)


def states(runs: same.Runs, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The states of a callback after the fit, in the launching process."""
    return runs[0].results["states"][name], runs[1].results["states"][name]


def without_root(value: Any, run: same.Run) -> Any:
    """Paths relative to the folder of the run."""
    if isinstance(value, (str, Path)):
        return str(value).replace(str(run.root), "")
    if isinstance(value, dict):
        return {without_root(key, run): without_root(item, run) for key, item in value.items()}
    return value


@pytest.mark.long
def test_early_stopping_ends_the_training_at_the_same_epoch(runs: same.Runs) -> None:
    one, grid = states(runs, "stopping")
    assert 1 < one["stopped_epoch"] < 19, "the training did not stop early"
    same.assert_same(one, grid)
    assert runs[0].results["progress"] == runs[1].results["progress"]


def test_weights_are_the_same_after_all_that(runs: same.Runs) -> None:
    same.assert_same(runs[0].results["weights"], runs[1].results["weights"])


@pytest.mark.parametrize("name", ["best", "steps", "timed"])
def test_model_checkpoint_writes_the_same_files_and_keeps_the_same_state(runs: same.Runs, name: str) -> None:
    one, grid = (without_root(run.results["states"][name], run) for run in runs)
    assert one["best_model_path"]
    same.assert_same(one, grid)
    files = [[file for file in run.files() if file.startswith(name)] for run in runs]
    assert len(files[0]) >= 3
    assert files[0] == files[1]


def test_model_checkpoint_keeps_the_two_best_and_the_last(runs: same.Runs) -> None:
    names = sorted(path.name for path in (runs[1].root / "best").iterdir())
    assert names[-1] == "last.ckpt"
    assert len(names) == 3
    assert all(re.match(r"epoch=\d+-val_loss=\d\.\d{4}\.ckpt", name) for name in names[:2])


COMPARED_IN_CHECKPOINTS = ("epoch", "global_step", "state_dict", "optimizer_states", "lr_schedulers", "loops")


@pytest.mark.parametrize("name", ["best/last.ckpt", "steps/epoch=0-step=3.ckpt"])
def test_a_checkpoint_of_the_grid_is_that_of_one_device(runs: same.Runs, name: str) -> None:
    one, grid = (torch.load(run.root / name, weights_only=False) for run in runs)
    assert one.keys() == grid.keys()
    own = grid["loops"]["fit_loop"]["state_dict"]  # beside what Lightning's own loop has
    assert all(isinstance(own.pop(name), int) for name in ("seed", "global_batch_size"))
    for key in set(COMPARED_IN_CHECKPOINTS) & one.keys():
        same.assert_same(one[key], grid[key], where=key)
    assert one["hyper_parameters"] == grid["hyper_parameters"] == {"lr": 0.4}


def test_the_best_checkpoint_is_found_by_name(runs: same.Runs) -> None:
    one, grid = (run.results["best"] for run in runs)
    same.assert_same(one, grid, same.TOLERANCE)
    best = runs[1].results["states"]["best"]["best_model_score"]
    assert grid[0]["test_loss"] == pytest.approx(float(best), rel=1e-10)


def test_learning_rates_follow_the_schedulers_step_by_step(runs: same.Runs) -> None:
    one, grid = states(runs, "rates")
    assert len(set(one["rates"])) == len(one["rates"]) > 8, "the rate changes in every step"
    assert one["schedulers"][2]["last_epoch"] > 2
    same.assert_same(one, grid)


def test_the_plateau_scheduler_decided_by_the_monitored_loss(runs: same.Runs) -> None:
    rates = states(runs, "rates")[1]["rates"]
    falls = [after / before for before, after in itertools.pairwise(rates)]
    assert min(falls) < 0.51, "it never reduced the rate"


# ---------------------------------------------------------------------- loggers

TIMED = re.compile(r"time|per_sec|DeviceStats|it/s")


def csv_rows(run: same.Run) -> list[dict[str, Any]]:
    with open(run.root / "csv" / "version_0" / "metrics.csv") as file:
        rows = [{k: v for k, v in row.items() if not k.startswith("recycle/")} for row in csv.DictReader(file)]
    return [{k: float(v) for k, v in row.items() if v and not TIMED.search(k)} for row in rows]


def test_the_csv_logger_writes_the_same_rows(runs: same.Runs) -> None:
    one, grid = (csv_rows(run) for run in runs)
    assert {"train_loss", "val_loss", "every_step", "every_epoch", "on_plateau"} <= {key for row in one for key in row}
    same.assert_same(one, grid)


def board(run: same.Run) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(run.root / "board" / "version_0"))
    accumulator.Reload()
    tags = [tag for tag in accumulator.Tags()["scalars"] if not tag.startswith("recycle/") and not TIMED.search(tag)]
    return {tag: [(event.step, event.value) for event in accumulator.Scalars(tag)] for tag in tags}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_tensorboard_logger_writes_the_same_values(runs: same.Runs) -> None:
    one, grid = (board(run) for run in runs)
    assert {"train_loss", "val_loss", "every_step"} <= one.keys()
    same.assert_same(one, grid, 1e-6)  # TensorBoard keeps float32


def test_the_loggers_write_the_same_files_in_one_version(runs: same.Runs) -> None:
    one, grid = (
        [re.sub(r"tfevents.*", "tfevents", file) for file in run.files("best", "steps", "timed")] for run in runs
    )
    assert "csv/version_0/hparams.yaml" in one
    assert set(one) == set(grid)
    assert grid.count("board/version_0/events.out.tfevents") >= 1


def test_the_learning_rate_monitor_logs_momentum_too(runs: same.Runs) -> None:
    assert any("momentum" in key for row in csv_rows(runs[1]) for key in row)


def columns(run: same.Run, words: str) -> set[str]:
    with open(run.root / "csv" / "version_0" / "metrics.csv") as file:
        return {key for key in next(csv.reader(file)) if words in key}


def logged(run: same.Run, name: str) -> list[float]:
    with open(run.root / "csv" / "version_0" / "metrics.csv") as file:
        return [float(row[name]) for row in csv.DictReader(file) if row[name]]


def test_the_throughput_monitor_counts_the_samples_of_all_workers(runs: same.Runs) -> None:
    one, grid = (columns(run, "per_sec") for run in runs)
    assert "train/device/samples_per_sec" in one
    assert one == grid
    for kind in ("train", "validate"):
        one_samples, grid_samples = (logged(run, f"{kind}/samples") for run in runs)
        assert one_samples == grid_samples
    assert logged(runs[1], "train/samples")[0] == 2 * same.GLOBAL_BATCH
    samples, batches = (logged(runs[1], f"train/device/{what}_per_sec") for what in ("samples", "batches"))
    same.assert_same(samples, [same.GLOBAL_BATCH * b for b in batches], 1e-6)


def test_the_device_stats_monitor_logs_the_same_columns(runs: same.Runs) -> None:
    one, grid = (columns(run, "DeviceStatsMonitor") for run in runs)
    assert len(one) > 3
    assert one == grid


def test_the_timer_measures_the_training(runs: same.Runs) -> None:
    one, grid = (state["time_elapsed"] for state in states(runs, "timer"))
    assert one.keys() == grid.keys()
    for times in (one, grid):
        assert 0 < times["train"] < 60


def test_every_worker_comes_to_the_same_decisions(runs: same.Runs) -> None:
    diaries = [path.read_text() for path in (runs[1].root / "diary").glob("callback-*")]
    assert len(diaries) == 2 * same.PIPELINES * same.STAGES  # of the fit and of the test
    assert sorted(map(diaries.count, diaries)) == [same.PIPELINES * same.STAGES] * len(diaries)


# ---------------------------------------------------------------------- predictions


class Writer(BasePredictionWriter):
    """Writes predictions and the indices of their samples."""

    def __init__(self, folder: Path, interval: Any) -> None:
        super().__init__(interval)
        self.folder = folder

    def write_on_batch_end(
        self, trainer: Any, module: Any, prediction: Any, indices: Any, batch: Any, batch_idx: int, loader: int
    ) -> None:
        self.folder.mkdir(exist_ok=True)
        self._write(f"batch-{loader}-{batch_idx}.pt", (prediction, indices, batch[0], batch[1].sum()))

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
        self.folder.mkdir(exist_ok=True)
        self._write("epoch.pt", (predictions, indices))

    def _write(self, name: str, value: Any) -> None:
        with open(self.folder / name, "xb") as file:  # fails if another worker has written it
            torch.save(value, file)


def predicted(session: same.Session) -> None:
    trainer = session.trainer(callbacks=[Writer(session.root / "predictions", "batch_and_epoch")])
    loaders = [session.data.validation(), session.data.loader(5, seed=3)]
    session.run.results["predict"] = trainer.predict(same.Classifier(), loaders)


predicted_runs = same.runs_of(predicted)


def test_a_prediction_writer_writes_each_file_once(predicted_runs: same.Runs) -> None:
    one, grid = (run.files() for run in predicted_runs)
    assert len(one) == 3 + 1 + 1
    assert one == grid


@pytest.mark.parametrize("name", ["batch-0-0.pt", "batch-0-2.pt", "batch-1-0.pt", "epoch.pt"])
def test_a_prediction_writer_gets_the_same_predictions_and_indices(predicted_runs: same.Runs, name: str) -> None:
    one, grid = (torch.load(run.root / "predictions" / name) for run in predicted_runs)
    same.assert_same(one, grid)


def test_predictions_have_one_item_per_sample(predicted_runs: same.Runs) -> None:
    predictions = predicted_runs[1].results["predict"]
    assert [len(torch.cat(of_loader)) for of_loader in predictions] == [same.VALIDATION_SAMPLES, 5]


# ---------------------------------------------------------------------- profilers


def profiled(profiler: Callable[[Path], Any]) -> Callable[[same.Session], None]:
    def script(session: same.Session) -> None:
        session.fit(same.Classifier(), validates=True, max_epochs=1, profiler=profiler(session.root))

    return script


def simple(root: Path) -> Any:
    return L.pytorch.profilers.SimpleProfiler(root, "simple")


def advanced(root: Path) -> Any:
    return L.pytorch.profilers.AdvancedProfiler(root, "advanced")


def pytorch(root: Path) -> Any:
    return L.pytorch.profilers.PyTorchProfiler(root, "pytorch", export_to_chrome=True)


ACTIONS = (
    "run_training_epoch",
    "run_training_batch",
    "[Callback]ModelSummary",
    "[LightningModule]Classifier.optimizer_step",
    "Strategy.training_step",
    "Strategy.validation_step",
)


@pytest.mark.parametrize("profiler", [simple, pytest.param(advanced, marks=pytest.mark.exhaustive)])
def test_a_profiler_reports_the_same_actions(tmp_path: Path, profiler: Callable[[Path], Any]) -> None:
    one, grid = same.run_both(profiled(profiler), tmp_path)
    name = profiler.__name__
    assert one.files() == [f"fit-{name}.txt"]
    assert grid.files() == [f"fit-{name}-{rank}.txt" for rank in range(same.PIPELINES * same.STAGES)]  # as with DDP
    texts = [(one.root / f"fit-{name}.txt").read_text(), (grid.root / f"fit-{name}-1.txt").read_text()]
    for text in texts:
        for action in ACTIONS:
            assert action in text or action.startswith("[Callback]"), action


@pytest.mark.long
def test_the_pytorch_profiler_writes_a_trace_with_the_operations_of_the_layers(tmp_path: Path) -> None:
    one, grid = same.run_both(profiled(pytorch), tmp_path)
    for run in (one, grid):
        traces = [file for file in run.files() if file.endswith(".json")]
        assert traces
        assert all("aten::linear" in (run.root / trace).read_text() for trace in traces)
    assert len([file for file in one.files() if file.endswith(".json")]) * same.PIPELINES * same.STAGES == len(
        [file for file in grid.files() if file.endswith(".json")]
    )


class EndsTheRun(Callback):
    """Sends SIGTERM to the process that called ``fit``, as a scheduler does; or raises."""

    def __init__(self, raises: bool = False) -> None:
        self.caller, self.raises = os.getpid(), raises

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 3 and self.raises:
            raise ArithmeticError("the user's own")
        if trainer.global_step == 3 and trainer.is_global_zero:
            os.kill(self.caller, signal.SIGTERM)


def interrupted(raises: bool) -> same.Script:
    def script(session: same.Session) -> None:
        savers = [
            OnExceptionCheckpoint(session.root / "any"),
            ModelCheckpoint(session.root, "model", save_on_exception=True, every_n_train_steps=10_000),
        ]
        with pytest.raises(ArithmeticError if raises else SystemExit):
            session.fit(
                same.Classifier(),
                max_steps=10_000,
                callbacks=[EndsTheRun(raises), *savers],
                enable_checkpointing=True,
            )

    return script


def test_checkpoints_on_exceptions_are_written_when_a_signal_ends_the_run(tmp_path: Path) -> None:
    one, grid = same.run_both(interrupted(raises=False), tmp_path)
    assert one.files() == grid.files() == ["any/on_exception.ckpt", "model.ckpt"]
    steps = {torch.load(grid.root / name, weights_only=True)["global_step"] for name in grid.files()}
    assert len(steps) == 1, "of one step boundary"


def test_an_exception_of_the_user_leaves_no_checkpoint_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    grid = same.on_a_grid(interrupted(raises=True), tmp_path)
    assert grid.files() == []
    assert "No checkpoint is written for this error" in caplog.text
