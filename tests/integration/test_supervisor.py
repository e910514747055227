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

import lightning as L
import psutil
import pytest
import torch
from supervised import BALLAST
from support.growth import Meanwhile
from support.models import GLOBAL_BATCH, Regression, dataset
from support.process_tree import descendants, is_alive, worker_processes
from support.sampling import sampled
from support.scripts import started
from support.training import exact_fit, trainer
from support.waiting import PATIENCE, wait_for
from torch.utils.data import DataLoader

HERE = Path(__file__).parent


class Slow(L.Callback):
    """Makes a run last."""

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        time.sleep(0.1)


@contextlib.contextmanager
def supervised(directory: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """The script of ``supervised``, once it has written a few checkpoints."""
    command = [sys.executable, str(HERE / "supervised.py"), str(directory), *options]
    with started(command, env={**os.environ, "TMPDIR": str(directory.parent)}) as process:
        wait_for(lambda: process.poll() is not None or len(list(directory.glob("*.ckpt"))) >= 2, PATIENCE)
        assert process.poll() is None, process.communicate()[1]
        yield process


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


@pytest.mark.long
def test_a_killed_launching_process_takes_its_workers_with_it(tmp_path):
    directory = tmp_path / "checkpoints"
    with supervised(directory) as process:
        workers = worker_processes(process.pid)
        process.kill()
        check_end(workers, directory)


@pytest.mark.long
@pytest.mark.parametrize("at", sampled(["start", "training"], 1, seed=1))
def test_ctrl_c_in_a_terminal_tells_no_failures(at, tmp_path):
    """It reaches every process of the job: the fork server and what it forks, too."""
    directory = tmp_path / "checkpoints"
    script = [sys.executable, str(HERE / "supervised.py"), str(directory), "restart"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(script, **pipes, start_new_session=True) as process:
        if at == "start":
            assert wait_for(lambda: descendants(process.pid) or any_fork_server(process.pid), PATIENCE)
        else:
            assert wait_for(lambda: len(list(directory.glob("*.ckpt"))) >= 2, PATIENCE)
        os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    for words in ("Traceback", "was lost", "could not be started", "connection", "failure"):
        assert words not in output, output


def any_fork_server(pid: int) -> bool:
    return any("forkserver" in " ".join(child.cmdline()) for child in psutil.Process(pid).children())


@pytest.mark.long
def test_a_job_in_the_background_ignores_ctrl_c(tmp_path):
    """As any program of Unix that was started with SIGINT ignored."""
    directory = tmp_path / "checkpoints"
    command = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, str(HERE / "supervised.py"), str(directory)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert wait_for(lambda: len(list(directory.glob("*.ckpt"))) >= 2, PATIENCE)
        os.killpg(process.pid, signal.SIGINT)
        newest = max(directory.iterdir())
        assert wait_for(lambda: max(directory.iterdir()) != newest, 30), "it goes on"
        process.terminate()
        process.communicate(timeout=PATIENCE)
    assert process.returncode == 143


@pytest.mark.parametrize(
    "signum", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)], ids=["SIGINT", "SIGTERM"]
)
def test_after_an_interrupted_fit_another_one_works(signum):
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
