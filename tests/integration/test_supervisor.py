"""The end of the launching process, in whatever way, is the end of its workers, and leaves nothing half done."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from supervised import BALLAST
from support.growth import Meanwhile
from support.models import GLOBAL_BATCH, Regression, dataset
from support.process_tree import is_alive, worker_processes
from support.training import exact_fit, trainer
from support.waiting import wait_for
from test_failures import Slow
from torch.utils.data import DataLoader

from lightning_recycle.callbacks import HeartbeatCallback

HERE = Path(__file__).parent


@contextlib.contextmanager
def supervised(directory: Path) -> Iterator[subprocess.Popen[str]]:
    """The script of ``supervised``, once it has written a few checkpoints."""
    process = subprocess.Popen(
        [sys.executable, str(HERE / "supervised.py"), str(directory)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(directory.parent)},
    )
    try:
        wait_for(lambda: process.poll() is not None or len(list(directory.glob("*.ckpt"))) >= 2, 90)
        assert process.poll() is None, process.communicate()[1]
        yield process
    finally:
        process.kill()
        process.communicate()


def check_end(workers: list[int], directory: Path, seconds: float = 5.0) -> None:
    """All ``workers`` end soon, and what bears the name of a checkpoint is one, to its last byte."""
    assert len(workers) == 4
    assert wait_for(lambda: not any(map(is_alive, workers)), seconds)
    files = [path for path in directory.iterdir() if not path.name.startswith(".")]  # what was being written is hidden
    assert files
    assert all(path.suffix == ".ckpt" for path in files)
    for path in files:
        saved = torch.load(path, weights_only=True)
        assert len(saved["ballast"]) == BALLAST
        assert saved["state_dict"].keys() == Regression().state_dict().keys()


def test_a_killed_launching_process_takes_its_workers_with_it(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    with supervised(directory) as process:
        workers = worker_processes(process.pid)
        process.kill()
        check_end(workers, directory)


@pytest.mark.parametrize(
    "signum",
    [
        pytest.param(signal.SIGTERM, id="SIGTERM"),
        pytest.param(signal.SIGINT, id="SIGINT", marks=pytest.mark.exhaustive),
    ],
)
def test_a_launching_process_told_to_end_cleans_up(signum: signal.Signals, tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    with supervised(directory) as process:
        workers = worker_processes(process.pid)
        process.send_signal(signum)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == (143 if signum == signal.SIGTERM else 1)
        check_end(workers, directory, seconds=1.0)
    assert "Traceback" not in errors
    assert not list(tmp_path.glob("lightning_recycle_*"))  # what the workers were started with


def test_a_stopped_launching_process_goes_on_where_it_was() -> None:
    """As by Ctrl-Z, or in a debugger: the workers wait for it, and nobody is declared dead."""

    def stop(_: Any) -> None:
        script = f"import os, time; os.kill({os.getpid()}, 19); time.sleep(3); os.kill({os.getpid()}, 18)"
        subprocess.run([sys.executable, "-S", "-c", script], check=True)

    data = dataset(GLOBAL_BATCH * 30)
    callbacks = [HeartbeatCallback(interval=0.2, timeout=1.5), Slow()]
    with Meanwhile(lambda: len(worker_processes()) == 4, lambda found: (time.sleep(1.5), stop(found))):
        run = exact_fit(Regression().double(), 2, 2, data=data, max_steps=30, callbacks=callbacks)
    assert {event.kind for event in run.strategy.history} == {"resumed", "regrouped", "step"}
    assert max(event.seconds or 0 for event in run.strategy.history) > 2.5  # it really was stopped


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_after_an_interrupted_fit_another_one_works(signum: signal.Signals) -> None:
    def interrupt(_: Any) -> None:
        time.sleep(0.5)
        os.kill(os.getpid(), signum)

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    temporary = set(Path(tempfile.gettempdir()).glob("lightning_recycle_*"))
    try:
        with Meanwhile(lambda: len(worker_processes()) == 4, interrupt), pytest.raises(SystemExit):
            trainer(2, 2, callbacks=[Slow()], max_steps=1000).fit(
                Regression().double(), DataLoader(dataset(GLOBAL_BATCH * 1000), batch_size=12)
            )
        assert not worker_processes()
        assert signal.getsignal(signal.SIGTERM) == handlers[signal.SIGTERM]
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert set(Path(tempfile.gettempdir()).glob("lightning_recycle_*")) <= temporary
    exact_fit(Regression().double(), 2, 2)
