"""Trainer flags mean on a grid what they mean on one device: one row per flag, one run on each for every row.

Whatever the flag, the hooks of the leader (order, arguments, losses, progress), the weights, the metrics and the files
are those of one device; and each row says what the flag itself must have done, so that none passes by doing nothing.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import same_script as same
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.io import TorchCheckpointIO
from support.training import difference
from torch.utils.data import DataLoader, Sampler


def calls(run: same.Run, hook: str) -> int:
    return Counter(name for name, _, _ in run.diary("callback"))[hook]


def validated_at(run: same.Run) -> list[int]:
    """The global steps at which validations began, without the sanity check."""
    entries = run.diary("callback")
    return [step for hook, (_, step, stage), _ in entries if hook == "on_validation_start" and "SANITY" not in stage]


@dataclass(frozen=True)
class Flag:
    """A row of the table.

    Args:
        trainer: arguments of the Trainer.
        claim: what must be true of either run.
        module: makes the module.
        validates: whether there is validation data.
        callbacks: makes further callbacks.
    """

    trainer: dict[str, Any]
    claim: Callable[[same.Run], Any]
    module: Callable[[], Any] = same.Classifier
    validates: bool = True
    callbacks: Callable[[], list[Any]] = field(default=list)


class StopsAtOnce(Callback):
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.should_stop = True


class Ordered(Sampler[int]):
    """The user's own order: backwards."""

    def __len__(self) -> int:
        return same.GLOBAL_BATCH * same.STEPS_PER_EPOCH

    def __iter__(self) -> Iterator[int]:
        return iter(reversed(range(len(self))))


class SetsValuesInModules(same.Classifier):
    """Notes what a flag set for the whole process."""

    def on_train_start(self) -> None:
        self.log("deterministic", float(torch.are_deterministic_algorithms_enabled()), on_epoch=True, on_step=False)
        self.log("benchmark", float(torch.backends.cudnn.benchmark), on_epoch=True, on_step=False)
        self.log("anomaly", float(torch.is_anomaly_enabled()), on_epoch=True, on_step=False)


def norm_of_clipped(run: same.Run) -> float:
    return difference(run.weights, same.Classifier().state_dict())


FLAGS: dict[str, Flag] = {
    "limit_train_batches=3": Flag(
        {"limit_train_batches": 3, "max_epochs": 2}, lambda run: calls(run, "on_train_batch_end") == 6
    ),
    "limit_train_batches=0.5, limit_val_batches=0.7": Flag(
        {"limit_train_batches": 0.5, "limit_val_batches": 0.7, "max_epochs": 1, "num_sanity_val_steps": 0},
        lambda run: (calls(run, "on_train_batch_end"), calls(run, "on_validation_batch_end")) == (2, 2),
    ),
    "limit_train_batches=0": Flag(
        {"limit_train_batches": 0, "max_epochs": 1}, lambda run: calls(run, "on_train_start") == 0
    ),
    "limit_val_batches=2, num_sanity_val_steps=1": Flag(
        {"limit_val_batches": 2, "num_sanity_val_steps": 1, "max_epochs": 2},
        lambda run: calls(run, "on_validation_batch_end") == 1 + 2 * 2,
    ),
    "limit_val_batches=0": Flag(
        {"limit_val_batches": 0, "max_epochs": 1}, lambda run: calls(run, "on_validation_start") == 0
    ),
    "num_sanity_val_steps=-1": Flag(
        {"num_sanity_val_steps": -1, "max_epochs": 1}, lambda run: calls(run, "on_validation_batch_end") == 3 + 3
    ),
    "check_val_every_n_epoch=2": Flag(
        {"check_val_every_n_epoch": 2, "max_epochs": 4}, lambda run: validated_at(run) == [8, 16]
    ),
    "val_check_interval=0.5": Flag(
        {"val_check_interval": 0.5, "max_epochs": 2}, lambda run: validated_at(run) == [2, 4, 6, 8]
    ),
    "val_check_interval=3, check_val_every_n_epoch=None": Flag(
        {"val_check_interval": 3, "check_val_every_n_epoch": None, "max_steps": 10},
        lambda run: validated_at(run) == [3, 6, 9],
    ),
    "overfit_batches=2": Flag(
        {"overfit_batches": 2, "max_epochs": 2},
        lambda run: calls(run, "on_train_batch_end") == 4 and calls(run, "on_validation_batch_end") >= 4,
    ),
    "fast_dev_run=True": Flag(
        {"fast_dev_run": True}, lambda run: (run.progress, calls(run, "on_validation_batch_end")) == ((1, 1), 1)
    ),
    "fast_dev_run=2": Flag(
        {"fast_dev_run": 2}, lambda run: (run.progress, calls(run, "on_validation_batch_end")) == ((1, 2), 2)
    ),
    "gradient_clip_val=0.01": Flag(
        {"gradient_clip_val": 0.01, "max_epochs": 1},
        lambda run: 0 < norm_of_clipped(run) < 4 * 0.1 * 0.01 * 4,
    ),
    "gradient_clip_val=0.001, gradient_clip_algorithm='value'": Flag(
        {"gradient_clip_val": 0.001, "gradient_clip_algorithm": "value", "max_epochs": 1},
        lambda run: 0 < norm_of_clipped(run) < 4 * 0.1 * 0.001 * 4,
    ),
    "max_steps=5": Flag({"max_steps": 5}, lambda run: run.progress[1] == 5),
    "min_steps=6": Flag(
        {"min_steps": 6, "max_epochs": 5}, lambda run: run.progress[1] == 6, callbacks=lambda: [StopsAtOnce()]
    ),
    "min_epochs=2": Flag(
        {"min_epochs": 2, "max_epochs": 5}, lambda run: run.progress == (2, 8), callbacks=lambda: [StopsAtOnce()]
    ),
    "deterministic=True": Flag(
        {"deterministic": True, "max_epochs": 1},
        lambda run: run.metrics["deterministic"] == 1.0,
        module=SetsValuesInModules,
    ),
    "detect_anomaly=True": Flag(
        {"detect_anomaly": True, "max_epochs": 1}, lambda run: run.metrics["anomaly"] == 1.0, module=SetsValuesInModules
    ),
    "benchmark=True": Flag(
        {"benchmark": True, "max_epochs": 1}, lambda run: run.metrics["benchmark"] == 1.0, module=SetsValuesInModules
    ),
    "no validation data": Flag(
        {"max_epochs": 1}, lambda run: calls(run, "on_validation_start") == 0, validates=False
    ),
}  # fmt: skip

SAMPLED = {  # in the normal run; the others are variations of these
    "limit_train_batches=0.5, limit_val_batches=0.7",
    "val_check_interval=3, check_val_every_n_epoch=None",
    "overfit_batches=2",
    "fast_dev_run=2",
    "gradient_clip_val=0.01",
    "gradient_clip_val=0.001, gradient_clip_algorithm='value'",
    "min_steps=6",
    "detect_anomaly=True",
}


def script_of(flag: Flag) -> Callable[[same.Session], None]:
    def script(session: same.Session) -> None:
        session.fit(
            flag.module(), validates=flag.validates, callbacks=[session.diary(), *flag.callbacks()], **flag.trainer
        )

    return script


@pytest.fixture
def settings_of_the_process() -> Iterator[None]:
    """A Trainer sets some of torch's globals and leaves them."""
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = False


@pytest.mark.usefixtures("settings_of_the_process")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in SAMPLED else [pytest.mark.exhaustive]) for n in FLAGS]
)
def test_a_flag_means_the_same(tmp_path: Path, name: str) -> None:
    one, grid = same.run_both(script_of(FLAGS[name]), tmp_path)
    for run in (one, grid):
        assert FLAGS[name].claim(run), f"{name} did not do what it says"
    same.assert_same(one.diary("callback"), grid.diary("callback"), where="hooks")
    same.assert_same(one.weights, grid.weights, where="weights")
    same.assert_same(one.metrics, grid.metrics, where="metrics")
    assert one.progress == grid.progress
    assert one.files() == grid.files()


# ---------------------------------------------------------------------- flags that need a script of their own


class Slow(Callback):
    def __init__(self) -> None:
        self.moments: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        time.sleep(0.1)
        self.moments.append(time.monotonic())


def stopped_by_the_clock(session: same.Session) -> None:
    session.fit(same.Classifier(), max_time={"seconds": 1}, callbacks=[Slow(), session.diary()])


def test_max_time_stops_all_workers_at_the_same_step(tmp_path: Path) -> None:
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
        same.Classifier(),
        validates=True,
        val_check_interval={"seconds": INTERVAL},
        check_val_every_n_epoch=None,
        max_steps=8,
        callbacks=[Slow(), session.diary()],
    )


def test_a_val_check_interval_in_seconds_validates_on_all_workers_at_the_same_step(tmp_path: Path) -> None:
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


@pytest.mark.filterwarnings("ignore:(?s).*Error detected in")
def test_detect_anomaly_raises_the_same_error_in_the_launching_process(tmp_path: Path) -> None:
    one, grid = same.run_both(anomalous, tmp_path)
    assert "returned nan values" in one.results["error"]
    assert one.results["error"] == grid.results["error"]
    told = [
        [line for path in (run.root / "diary").iterdir() for line in path.read_text().splitlines() if "on_exc" in line]
        for run in (one, grid)
    ]
    assert len(told[0]) == len(told[1]) == 1, "callbacks are told once, in the launching process"


class ReloadedData(L.LightningDataModule):
    """Other data in every epoch."""

    def __init__(self, session: same.Session) -> None:
        super().__init__()
        self.data = session.data

    def train_dataloader(self) -> Any:
        return self.data.loader(same.GLOBAL_BATCH * 2, seed=10 + self.trainer.current_epoch)

    def val_dataloader(self) -> Any:
        return self.data.loader(5, seed=20 + self.trainer.current_epoch)


def reloaded(session: same.Session) -> None:
    trainer = session.trainer(max_epochs=3, reload_dataloaders_every_n_epochs=1, callbacks=[session.diary()])
    session.run.module = same.Classifier()
    trainer.fit(session.run.module, datamodule=ReloadedData(session))


def test_reload_dataloaders_every_n_epochs_reads_the_new_data(tmp_path: Path) -> None:
    one, grid = same.run_both(reloaded, tmp_path)
    losses = [args[0]["loss"] for hook, _, args in one.diary("callback") if hook == "on_train_batch_end"]
    assert len(losses) == 6
    same.assert_same(one.diary("callback"), grid.diary("callback"))
    same.assert_same(one.weights, grid.weights)


def in_the_users_order(session: same.Session) -> None:
    trainer = session.trainer(max_epochs=1, use_distributed_sampler=False, callbacks=[session.diary()])
    loader = session.data.training()
    session.run.module = same.Classifier()
    trainer.fit(session.run.module, DataLoader(loader.dataset, batch_size=session.data.batch_size, sampler=Ordered()))


def test_use_distributed_sampler_false_keeps_the_users_sampler(tmp_path: Path) -> None:
    one, grid = same.run_both(in_the_users_order, tmp_path)
    same.assert_same(one.diary("callback"), grid.diary("callback"))
    same.assert_same(one.weights, grid.weights)
    ordered = same.on_one_device(lambda s: s.fit(same.Classifier(), max_epochs=1) and None, tmp_path)
    assert difference(ordered.weights, grid.weights) > 1e-6, "the order made no difference"


def barebones(session: same.Session) -> None:
    session.fit(same.Classifier(), validates=True, barebones=True, max_epochs=1)


def test_barebones_trains_the_same_and_writes_nothing(tmp_path: Path) -> None:
    one, grid = same.run_both(barebones, tmp_path)
    same.assert_same(one.weights, grid.weights)
    assert one.files() == grid.files() == []


def limited(session: same.Session) -> None:
    trainer = session.trainer(limit_test_batches=1, limit_predict_batches=0.7)
    module = same.Classifier()
    session.run.results["test"] = trainer.test(module, session.data.validation(), verbose=False)
    session.run.results["predict"] = trainer.predict(module, session.data.validation())


def test_limits_of_tests_and_predictions_are_those_of_one_device(tmp_path: Path) -> None:
    one, grid = same.run_both(limited, tmp_path)
    assert [len(batch) for batch in grid.results["predict"]] == [same.GLOBAL_BATCH] * 2
    same.assert_same(one.results, grid.results)


class NotingCheckpointIO(TorchCheckpointIO):
    """Leaves a note beside each checkpoint."""

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint, path, storage_options)
        with open(f"{path}.note", "a") as file:
            file.write("saved\n")


def with_a_plugin(session: same.Session) -> None:
    session.fit(
        same.Classifier(),
        max_epochs=1,
        enable_checkpointing=True,
        plugins=[NotingCheckpointIO()],
        logger=CSVLogger(session.root, name="logs", version=0),
        enable_autolog_hparams=False,
    )


def test_a_checkpoint_plugin_is_used_once_and_hyperparameters_are_not_logged_when_switched_off(tmp_path: Path) -> None:
    one, grid = same.run_both(with_a_plugin, tmp_path)
    assert one.files() == grid.files()
    assert "logs/version_0/hparams.yaml" not in grid.files()
    [note] = [file for file in grid.files() if file.endswith(".note")]
    assert (grid.root / note).read_text() == "saved\n"


class NotesInference(same.Classifier):
    def on_validation_output(self, output: torch.Tensor, target: torch.Tensor) -> None:
        self.log("inference", float(torch.is_inference_mode_enabled()))
        self.log("grad", float(torch.is_grad_enabled()))


def inference(enabled: bool) -> Callable[[same.Session], None]:
    def script(session: same.Session) -> None:
        trainer = session.trainer(inference_mode=enabled)
        session.run.results["validate"] = trainer.validate(NotesInference(), session.data.validation(), verbose=False)

    return script


@pytest.mark.parametrize("enabled", [True, pytest.param(False, marks=pytest.mark.long)])
def test_inference_mode_is_that_of_the_flag_in_the_workers(tmp_path: Path, enabled: bool) -> None:
    one, grid = same.run_both(inference(enabled), tmp_path)
    assert one.results["validate"] == [{"inference": float(enabled), "grad": 0.0}]
    same.assert_same(one.results, grid.results)
