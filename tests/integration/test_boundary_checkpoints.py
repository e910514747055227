"""A checkpoint is a step boundary: a run that restarts or resumes from one does all that the undisturbed run does."""

import functools
import itertools
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from saving import listed, wait_until_written
from support.growth import Meanwhile, happened
from support.models import dataset
from support.sampling import sampled
from support.training import TOLERANCE, difference, grid_trainer
from support.waiting import PATIENCE
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader
from torchmetrics import MeanSquaredError

from lightning_recycle.callbacks import Fault

BATCH, BATCHES, EPOCHS = 8, 6, 3
"""Samples of a global batch; batches of an epoch, with a validation after each third; epochs."""

SCHEDULES = ("step", "epoch", "plateau on a mean", "plateau of steps", "plateau on a validation", "chained", "warm-up")
MATRIX = list(itertools.product(SCHEDULES, (1, 2), (False, True), (1, 2)))
"""Kind of scheduler, stages, folders or files, batches of a step of the optimizer."""


class Scheduled(L.LightningModule):
    """Logs its loss; ``schedule``: what decides its learning rate. At the end of a batch it changes what it trains."""

    def __init__(self, schedule: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.schedule = schedule
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 1)).double()
        self.error = MeanSquaredError()
        self.register_buffer("ended", torch.zeros((), dtype=torch.float64))

    def training_step(self, batch: Any, _: int) -> Tensor:
        output = self.net(batch[0])
        loss = nn.functional.mse_loss(output, batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.error(output, batch[1])
        self.log("error", self.error, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        self.log("val", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        """Lightning calls it when callbacks have saved."""
        self.ended += 1
        for parameter in self.parameters():
            parameter.data.mul_(0.999)  # as many do, which autograd does not count
        for state in self.trainer.optimizers[0].state.values():
            state["exp_avg"].data.mul_(0.9)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        plateau = functools.partial(
            lr_scheduler.ReduceLROnPlateau, optimizer, factor=0.7, patience=0, threshold=0.2, cooldown=1
        )
        if self.schedule == "warm-up":
            return optimizer
        if self.schedule in ("step", "epoch"):
            chosen: dict[str, Any] = {"scheduler": lr_scheduler.StepLR(optimizer, 2, 0.8), "interval": self.schedule}
        elif self.schedule == "chained":
            parts = [lr_scheduler.LinearLR(optimizer, 0.3, total_iters=5), lr_scheduler.ExponentialLR(optimizer, 0.95)]
            chosen = {"scheduler": lr_scheduler.ChainedScheduler(parts, optimizer), "interval": "step"}
        elif self.schedule == "plateau of steps":
            chosen = {"scheduler": plateau(), "interval": "step", "monitor": "loss_step"}
        else:
            monitor = "val" if "validation" in self.schedule else "loss_epoch"
            chosen = {"scheduler": plateau(), "interval": "epoch", "monitor": monitor, "strict": False}
        return {"optimizer": optimizer, "lr_scheduler": chosen}

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
        optimizer.step(closure=closure)
        if self.schedule == "warm-up":
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 * min(1.0, (self.trainer.global_step + 1) / 12)


class Diary(L.Callback):
    """Notes each hook with the counters, a random number, the rate and the values that are logged there."""

    def __init__(self) -> None:
        self.rows: list[tuple[Any, ...]] = []

    def state_dict(self) -> dict[str, Any]:
        return {"rows": list(self.rows)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rows = list(state_dict["rows"])

    def _note(self, hook: str, trainer: L.Trainer) -> None:
        if not trainer.sanity_checking:
            values = {name: float(value) for name, value in trainer.callback_metrics.items()}
            rate = trainer.optimizers[0].param_groups[0]["lr"]
            drawn = float(torch.rand(()))
            self.rows.append((hook, trainer.global_step, trainer.current_epoch, drawn, rate, values))

    def on_train_epoch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._note("epoch start", trainer)

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._note("batch start", trainer)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._note("batch end", trainer)

    def on_validation_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._note("validation end", trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._note("epoch end", trainer)


class Die(L.Callback):
    """Ends each worker that comes to ``batch``, counted over all epochs, for the first time; ``waits``: once it has
    written its part of what was asked for.
    """

    def __init__(self, batch: int, waits: bool) -> None:
        self._batch, self._waits = batch, waits

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.fit_loop.total_batch_idx == self._batch and not trainer.strategy.incarnation:
            if self._waits:
                wait_until_written(trainer)
            os.kill(os.getpid(), signal.SIGKILL)


def savers(folder: Path) -> list[ModelCheckpoint]:
    return [
        ModelCheckpoint(
            folder / "steps", "{step}", monitor="loss_step", save_top_k=2, save_last=True, every_n_train_steps=2
        ),
        ModelCheckpoint(folder / "best", "{epoch}-{step}", monitor="val", save_last="link"),
        ModelCheckpoint(folder / "all", "{epoch}-{step}", every_n_train_steps=1, save_top_k=-1),
        ModelCheckpoint(folder / "epochs", "{epoch}-{step}", save_on_train_epoch_end=True, save_top_k=-1),
    ]


def run(
    schedule: str,
    stages: int,
    sharded: bool,
    batches: int,
    folder: Path,
    *others: L.Callback,
    ckpt_path: Path | None = None,
    **saving: Any,
) -> tuple[L.Trainer, Diary, dict[str, Tensor]]:
    L.seed_everything(1, verbose=False)
    pipelines, diary, module = 3 - stages, Diary(), Scheduled(schedule)
    options = {"save_distributed_checkpoint": sharded, "num_microbatches": 4 // pipelines, **saving}
    trainer = grid_trainer(
        pipelines, stages, (), options, callbacks=[diary, *others, *savers(folder)], max_epochs=EPOCHS,
        val_check_interval=0.5, accumulate_grad_batches=batches, enable_checkpointing=True,
    )  # fmt: skip
    train = DataLoader(dataset(BATCH * BATCHES), batch_size=BATCH // pipelines, shuffle=True)
    trainer.fit(module, train, DataLoader(dataset(2 * BATCH), batch_size=BATCH // pipelines), ckpt_path=ckpt_path)
    return trainer, diary, module.state_dict()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Callable[..., tuple[Path, Any]]:
    """The folder of the undisturbed run of a case, and that run."""

    @functools.cache
    def of(*case: Any, **saving: Any) -> tuple[Path, Any]:
        folder = tmp_path_factory.mktemp("known")
        return folder, run(*case, folder, **saving)

    return of


def assert_same_run(found: tuple[L.Trainer, Diary, dict[str, Tensor]], known: Any) -> None:
    assert len(found[1].rows) == len(known[1].rows)
    for one, other in zip(found[1].rows, known[1].rows, strict=True):
        assert one[:4] == other[:4]
        assert one[4:] == (pytest.approx(other[4], rel=1e-6), pytest.approx(other[5], rel=1e-6)), other
    assert difference(found[2], known[2]) < TOLERANCE


def left_by(run: tuple[L.Trainer, Diary, Any], folder: Path) -> Any:
    """The files, and what the callbacks remember of them."""
    files = {path.name: listed(path) for path in sorted(folder.iterdir()) if path.is_dir()}
    links = {path.name: path.exists() and os.path.basename(os.path.realpath(path)) for path in folder.rglob("last*")}
    remembered = [
        sorted(map(os.path.basename, (callback.best_model_path, callback.last_model_path, *callback.best_k_models)))
        for callback in run[0].checkpoint_callbacks
        if isinstance(callback, ModelCheckpoint)
    ]
    return files, links, remembered


@pytest.mark.parametrize(
    ("schedule", "stages", "sharded", "batches", "kill"),
    sampled([(*case, n) for case in MATRIX for n in range(4)], 1, 12),
)
def test_a_run_whose_workers_are_all_killed_goes_on_as_if_nothing_had_happened(
    schedule, stages, sharded, batches, kill, undisturbed, tmp_path
):
    draws = random.Random(f"{schedule} {stages} {sharded} {batches} {kill}")
    dies = Die(draws.randrange(2 * batches, BATCHES * EPOCHS), waits=draws.random() < 0.7)
    case = (schedule, stages, sharded, batches)
    folder, known = undisturbed(*case)
    found = run(*case, tmp_path, dies)
    assert happened(found[0], "stage_lost")
    assert_same_run(found, known)
    assert left_by(found, tmp_path) == left_by(known, folder)


@pytest.mark.parametrize(
    ("schedule", "stages", "sharded", "batches", "background"),
    sampled([(*case, background) for case in MATRIX for background in (True, False)], 1, 5),
)
def test_a_run_that_resumes_from_any_checkpoint_is_the_one_that_wrote_it(
    schedule, stages, sharded, batches, background, undisturbed, tmp_path
):
    case = (schedule, stages, sharded, batches)
    folder, known = undisturbed(*case, background=background)
    draws = random.Random(f"{case} {background}")
    path = draws.choice([*(folder / draws.choice(("all", "best", "epochs"))).glob("epoch*.ckpt")])
    print("resumes from", path)  # shown of a test that fails
    assert_same_run(run(schedule, draws.choice([1, 2]), sharded, batches, tmp_path, ckpt_path=path), known)


class Saves(L.Callback):
    """Saves by itself after each batch."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self._folder / "own" / f"{trainer.fit_loop.total_batch_idx}.ckpt")


@pytest.mark.parametrize("every_n_epochs", sampled([1, 5], 1, rest=pytest.mark.long))
def test_a_restart_prefers_a_whole_step_to_what_a_hook_saved_in_the_middle_of_one(every_n_epochs, tmp_path, caplog):
    callbacks = [ModelCheckpoint(tmp_path, every_n_epochs=every_n_epochs), Saves(tmp_path), Die(2 * BATCHES - 1, False)]
    trainer = grid_trainer(2, 1, callbacks=callbacks, max_epochs=EPOCHS, enable_checkpointing=True)
    trainer.fit(Scheduled("epoch"), DataLoader(dataset(BATCH * BATCHES), batch_size=BATCH // 2))
    (lost,) = happened(trainer, "stage_lost")
    after = trainer.strategy.history[trainer.strategy.history.index(lost) + 1 :]
    first = next(event.step for event in after if event.kind == "step")
    assert first == (BATCHES if every_n_epochs == 1 else 2 * BATCHES - 1)
    assert any("before its step was over" in line for line in caplog.messages) is (every_n_epochs == 5)


class Reaches(L.Callback):
    """Makes a file at the beginning of a batch, and takes its time from then on."""

    def __init__(self, path: Path, batch: int) -> None:
        self._path, self._batch = path, batch

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.fit_loop.total_batch_idx >= self._batch:
            self._path.touch()
            time.sleep(0.2)


def test_a_run_that_a_signal_ends_is_the_undisturbed_one_when_it_is_resumed(undisturbed, tmp_path):
    case = ("plateau of steps", 2, True, 1)  # of which the run that is killed is, too
    path, reached = tmp_path / "ended.ckpt", tmp_path / "reached"
    signals = Meanwhile(reached.exists, lambda _: os.kill(os.getpid(), signal.SIGTERM))
    with signals, pytest.raises(SystemExit):
        run(*case, tmp_path / "ended", Reaches(reached, BATCHES - 2), save_on_signal=path)
    assert_same_run(run(*case, tmp_path / "resumed", ckpt_path=path), undisturbed(*case)[1])


class Padded(Scheduled):
    """Takes a second to write at 4 MB/s."""

    def __init__(self, schedule: str) -> None:
        super().__init__(schedule)
        self.register_buffer("pad", torch.zeros(500_000, dtype=torch.float64))


class LeaderDies(L.Callback):
    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        is_due = trainer.fit_loop.total_batch_idx == self.batch
        if is_due and trainer.is_global_zero and not trainer.strategy.incarnation:
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_checkpoint_that_was_given_up_is_asked_for_again_where_a_step_of_the_optimizer_ends(tmp_path):
    saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = grid_trainer(
        3, 1, callbacks=[saver, LeaderDies(4)], max_epochs=1, accumulate_grad_batches=2, enable_checkpointing=True,
        strategy={"bandwidth": 4.0},
    )  # fmt: skip
    trainer.fit(Padded("warm-up"), DataLoader(dataset(12 * 3 * 4), batch_size=4))
    assert happened(trainer, "checkpoint_given_up")
    files = {path.name: torch.load(path, weights_only=True) for path in tmp_path.glob("*.ckpt")}
    batches = {name: file["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"] for name, file in files.items()}
    assert batches
    assert all(counts["ready"] % 2 == 0 for counts in batches.values()), batches


def test_a_save_of_a_step_with_its_own_metrics_precedes_that_of_a_lost_checkpoint(tmp_path):
    saver = ModelCheckpoint(tmp_path, "{step}", monitor="val", save_top_k=-1)
    loader, module = DataLoader(dataset(12), batch_size=4), Padded("warm-up")
    trainer = grid_trainer(
        3, 1, callbacks=[saver, LeaderDies(1)], max_epochs=4, enable_checkpointing=True, strategy={"bandwidth": 4.0}
    )
    trainer.fit(module, loader, loader)
    assert happened(trainer, "checkpoint_given_up")
    assert listed(tmp_path) == ["step=2.ckpt", "step=3.ckpt", "step=4.ckpt"]
    samples, targets = loader.dataset[:]
    for path, score in saver.best_k_models.items():
        module.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
        assert float(nn.functional.mse_loss(module.net(samples), targets)) == pytest.approx(float(score), rel=1e-4)


def test_the_next_leader_deletes_what_the_lost_one_may_not_have_deleted(tmp_path):
    begins = Waits(tmp_path)  # until the checkpoint is whole, so that its step is the next
    fault = Fault("kill", 0, 0, 2, "optimizer")
    saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=1, monitor="step", mode="max")
    trainer = grid_trainer(3, 1, [fault], callbacks=[saver, begins], max_steps=5, enable_checkpointing=True)
    trainer.fit(Scheduled("warm-up"), DataLoader(dataset(12 * 5), batch_size=4))
    assert happened(trainer, "failure")
    assert listed(tmp_path) == [os.path.basename(saver.best_model_path)]


class Waits(L.Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        deadline = time.monotonic() + PATIENCE
        while trainer.global_step == 2 and not self.folder.joinpath(f"step={trainer.global_step}.ckpt").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
