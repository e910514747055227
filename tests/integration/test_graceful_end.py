"""A signal to the launching process ends the run with a checkpoint, if one is wanted, from which it can be resumed."""

import csv
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loggers import CSVLogger
from support.growth import Meanwhile
from support.models import GLOBAL_BATCH, Scheduled, dataset
from support.process_tree import worker_processes
from support.sampling import sampled
from support.training import difference, fit, plain_loop, trainer
from torch.utils.data import DataLoader

from lightning_recycle.callbacks import Fault

pytestmark = pytest.mark.long

STEPS_OF_ALL = 400
RESUMED_STEPS = 5
STATUS = {signal.SIGTERM: 143, signal.SIGUSR1: 138, signal.SIGINT: 1}  # Lightning turns Ctrl-C into an exit with 1


class Paced(L.Callback):
    """Makes a run last, and tells the test when it is at its step ``tell``."""

    def __init__(self, directory: Path, tell: int = 3, seconds: float = 0.05) -> None:
        self._directory, self._tell, self._seconds = directory, tell, seconds

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self._tell and trainer.is_global_zero:
            (self._directory / "reached").touch()
        time.sleep(self._seconds)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Lightning ignores Ctrl-C after the first one."""
    before = {number: signal.getsignal(number) for number in STATUS}
    yield
    assert signal.getsignal(signal.SIGTERM) == before[signal.SIGTERM]
    assert signal.getsignal(signal.SIGUSR1) == before[signal.SIGUSR1]
    signal.signal(signal.SIGINT, before[signal.SIGINT])


def interrupt(
    tmp_path: Path, act: Callable[[], None], status: int, val: Any = None, **kwargs: Any
) -> tuple[L.Trainer, Scheduled]:
    """A fit during which ``act`` is called; it ends with ``status``."""
    model = Scheduled().double()
    callbacks = [*kwargs.pop("callbacks", []), Paced(tmp_path)]
    run = trainer(2, 2, callbacks=callbacks, max_steps=STEPS_OF_ALL, default_root_dir=tmp_path, **kwargs)
    loader = DataLoader(dataset(GLOBAL_BATCH * STEPS_OF_ALL), batch_size=GLOBAL_BATCH // 2)
    with Meanwhile((tmp_path / "reached").exists, lambda _: act()), pytest.raises(SystemExit) as ended:
        run.fit(model, loader, val)
    assert ended.value.code == status
    assert not worker_processes()
    return run, model


def check_resumed(ckpt_path: Any, tmp_path: Path, batches: int = 1, **kwargs: Any) -> None:
    """The run goes on from the checkpoint to the weights of one that was never interrupted."""
    model = Scheduled().double()
    data = dataset(GLOBAL_BATCH * STEPS_OF_ALL)
    steps = int(torch.load(only_file(tmp_path), weights_only=True)["global_step"]) + RESUMED_STEPS
    kwargs |= {"accumulate_grad_batches": batches, "default_root_dir": tmp_path}
    assert fit(model, 2, 2, data=data, max_steps=steps, ckpt_path=ckpt_path, **kwargs).global_step == steps
    expected = plain_loop(Scheduled().double(), data, steps, global_batch=batches * GLOBAL_BATCH)
    assert difference(model.state_dict(), expected) < 1e-10


def only_file(tmp_path: Path) -> Path:
    (path,) = tmp_path.rglob("*.ckpt")
    return path


def send(signum: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), signum)


@pytest.mark.parametrize("signum", sampled([signal.SIGTERM, signal.SIGINT], 1), ids=["SIGTERM", "SIGINT"])
def test_the_checkpoint_is_where_lightning_looks_for_that_of_a_preempted_job(signum, tmp_path, caplog):
    interrupt(tmp_path, send(signum), STATUS[signum], strategy={"save_on_signal": True})
    assert only_file(tmp_path).name == "hpc_ckpt_1.ckpt"
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert signum.name in line
    assert str(only_file(tmp_path)) in line
    check_resumed("hpc", tmp_path)


@pytest.mark.parametrize("kind", ["path", "OnExceptionCheckpoint", "ModelCheckpoint"])
def test_what_the_user_asked_for_is_written(kind, tmp_path):
    path = tmp_path / "preempted.ckpt"
    asked: dict[str, Any] = {
        "path": {"strategy": {"save_on_signal": path}},
        "OnExceptionCheckpoint": {"callbacks": [OnExceptionCheckpoint(tmp_path, "preempted")]},
        "ModelCheckpoint": {"callbacks": [ModelCheckpoint(tmp_path, "preempted", save_on_exception=True)]},
    }
    interrupt(tmp_path, send(signal.SIGUSR1), STATUS[signal.SIGUSR1], enable_checkpointing=True, **asked[kind])
    assert only_file(tmp_path) == path or kind == "path"  # there Lightning adds its own ModelCheckpoint
    check_resumed(path, tmp_path)


def test_with_accumulation_the_run_ends_when_the_optimizer_has_stepped(tmp_path):
    options = {"accumulate_grad_batches": 7, "strategy": {"save_on_signal": True}}
    interrupt(tmp_path, send(signal.SIGTERM), 143, **options)
    saved = torch.load(only_file(tmp_path), weights_only=True)["loops"]["fit_loop"]
    assert saved["epoch_loop.batch_progress"]["total"]["ready"] % 7 == 0
    check_resumed("hpc", tmp_path, batches=7)


def test_the_last_step_is_logged(tmp_path):
    path = tmp_path / "preempted.ckpt"
    logger = CSVLogger(tmp_path, version="run")
    strategy = {"save_on_signal": path}
    interrupt(tmp_path, send(signal.SIGTERM), 143, logger=logger, log_every_n_steps=1, strategy=strategy)
    with open(Path(logger.log_dir) / "metrics.csv", newline="") as file:
        logged = [int(row["step"]) for row in csv.DictReader(file) if row["train_loss"]]
    assert logged == list(range(int(torch.load(path, weights_only=True)["global_step"])))


def test_a_second_signal_ends_the_run_at_once(tmp_path):
    def twice() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)

    hang = Fault("deadlock", 0, 0, step=3)
    interrupt(tmp_path, twice, 143, faults=[hang], strategy={"save_on_signal": True})
    assert not list(tmp_path.rglob("*.ckpt"))


def test_a_run_that_cannot_save_in_time_ends_and_says_so(tmp_path, caplog):
    hang = Fault("deadlock", 0, 0, step=3)
    options = {"save_on_signal": True, "signal_timeout": 1.0}
    interrupt(tmp_path, send(signal.SIGTERM), 143, faults=[hang], strategy=options)
    assert "none was complete within 1 s" in caplog.text


def test_a_worker_dies_meanwhile(tmp_path):
    def kill_and_end() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(worker_processes()[1], signal.SIGKILL)

    interrupt(tmp_path, kill_and_end, 143, strategy={"save_on_signal": True})
    check_resumed("hpc", tmp_path)


@pytest.mark.parametrize("background", [False, True])
def test_the_leader_dies_while_it_writes(background, tmp_path):
    hooked = Fault("kill", 0, 1, at="checkpoint")
    strategy = {"save_on_signal": True, "background": background}
    interrupt(tmp_path, send(signal.SIGTERM), 143, faults=[hooked], strategy=strategy)
    check_resumed("hpc", tmp_path)


def test_without_a_checkpoint_to_write_the_run_ends_at_once(tmp_path, caplog):
    with caplog.at_level("INFO"):
        interrupt(tmp_path, send(signal.SIGTERM), 143)
    assert "There is no checkpoint; CheckpointOptions(save_on_signal=True) writes one." in caplog.text
    assert not [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
