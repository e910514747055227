"""Lightning's own callbacks do on a grid what they do on one device: decisions, files, states, logged values."""

import itertools
from copy import deepcopy
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any

import ordinary_runs
import pytest
import same_script as same
import torch
from lightning.pytorch import callbacks as cb
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from ordinary_callbacks import batch_size, callback


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


class NotesRates(cb.Callback):
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


def callbacks(root: Path) -> dict[str, Any]:
    return {
        "stopping": cb.EarlyStopping("val_loss", patience=2),
        "best": cb.ModelCheckpoint(
            root / "best", monitor="val_loss", save_top_k=2, save_last=True, filename="{epoch}-{val_loss:.4f}"
        ),
        "steps": cb.ModelCheckpoint(root / "steps", every_n_train_steps=3, save_top_k=-1, save_weights_only=True),
        "timed": cb.ModelCheckpoint(root / "timed", train_time_interval=timedelta(seconds=0), save_top_k=-1),
        "rates": NotesRates(),
        "monitor": cb.LearningRateMonitor(log_momentum=True),
        "throughput": cb.ThroughputMonitor(batch_size_fn=batch_size, window_size=2),
        "device": cb.DeviceStatsMonitor(cpu_stats=True),
        "timer": cb.Timer(duration="00:00:10:00"),
    }


def monitored(session: ordinary_runs.Session) -> None:
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
        callbacks=list(made.values()),
    )
    session.run.results["progress"] = session.run.progress
    session.run.results["weights"] = session.run.weights
    session.run.results["states"] = {  # as the fit left them; loading a checkpoint sets them back
        name: ordinary_runs.without_root(deepcopy(callback.state_dict()), session.root)
        for name, callback in made.items()
        if name != "timer"
    }
    session.run.results["best"] = trainer.test(
        session.run.module, session.data.validation(), ckpt_path="best", weights_only=False, verbose=False
    )


MONITORED = ordinary_runs.Case(
    (),
    monitored,
    lambda run: 1 < run.results["states"]["stopping"]["stopped_epoch"] < 19,
    ignored=("results",),  # they are compared to the last digit
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> same.Runs:
    root = tmp_path_factory.mktemp("monitored")
    return ordinary_runs.on_one_device(MONITORED, root / "one"), ordinary_runs.on_a_grid(
        MONITORED, same.STAGES, "none", root / "grid"
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_all_that_callbacks_and_loggers_leave_is_that_of_one_device(runs):
    one, grid = runs
    assert MONITORED.claim(grid), "the training did not stop early"
    same.assert_same(one.results, grid.results)
    same.assert_same(ordinary_runs.csv_rows(one), ordinary_runs.csv_rows(grid))
    same.assert_same(ordinary_runs.board(one), ordinary_runs.board(grid), 1e-6)  # TensorBoard keeps float32
    assert set(ordinary_runs.diaries(grid)) == set(range(same.PIPELINES * same.STAGES)), "every worker decides"
    found = ordinary_runs.all_differences(MONITORED, one, grid, None)
    assert not found, "\n".join(found)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_each_callback_and_each_logger_has_done_its_part(runs):
    states, names = runs[1].results["states"], ordinary_runs.files(runs[1])
    assert all(states[name]["best_model_path"] for name in ("best", "steps", "timed"))
    assert all(sum(file.startswith(f"{name}/") for file in names) >= 3 for name in ("best", "steps", "timed"))
    assert {"csv/version_0/hparams.yaml", "board/version_0/events.out.tfevents"} <= names
    assert {"train_loss", "val_loss", "every_step"} <= ordinary_runs.board(runs[1]).keys()
    seen = ordinary_runs.columns(runs[1])
    assert {"train_loss", "val_loss", "every_step", "every_epoch", "on_plateau"} <= seen
    assert any("momentum" in name for name in seen)
    assert sum("DeviceStatsMonitor" in name for name in seen) > 3
    assert 0 < callback(runs[1], cb.Timer).time_elapsed() < 60
    rates = states["rates"]["rates"]
    assert min(after / before for before, after in itertools.pairwise(rates)) < 0.51, "the plateau reduced no rate"


class Raises(cb.Callback):
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 3:
            raise ArithmeticError("the user's own")


def test_an_exception_of_the_user_leaves_no_checkpoint_and_says_so(tmp_path, caplog):
    def script(session: same.Session) -> None:
        savers = [
            cb.OnExceptionCheckpoint(session.root / "any"),
            cb.ModelCheckpoint(session.root, "model", save_on_exception=True, every_n_train_steps=10_000),
        ]
        with pytest.raises(ArithmeticError):
            session.fit(same.Classifier(), callbacks=[Raises(), *savers], enable_checkpointing=True)

    assert same.on_a_grid(script, tmp_path).files() == []
    assert "No checkpoint is written for this error" in caplog.text
