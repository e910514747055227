"""Workers that the launching process did not start: they wait as spares, and take the place of a lost one."""

import json
import os
import signal
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from support.growth import AwaitReplacement, Marks, Meanwhile, happened, mark_of, rejoined
from support.models import GLOBAL_BATCH, Regression, dataset
from support.scripts import started
from support.training import committed_steps, difference, failures, fit, plain_loop, undisturbed
from support.waiting import PATIENCE, wait_for

from lightning_recycle import ConfigurationError
from lightning_recycle.callbacks import Fault, HeartbeatCallback
from lightning_recycle.control.network.listener import Listener

HERE = Path(__file__).parent
LENGTH = 16
DATA = dataset(GLOBAL_BATCH * LENGTH)


def train(*faults: Fault, **arguments: Any) -> tuple[Regression, Any]:
    """What the launching process and the workers outside all run."""
    model = Regression().double()
    callbacks = [Marks(Path(os.environ["MARKS"])), *arguments.pop("callbacks", [AwaitReplacement(range(6, LENGTH))])]
    arguments = {"max_steps": LENGTH, "data": DATA, "callbacks": callbacks, **arguments}
    return model, fit(model, 2, 2, list(faults), **arguments)


SCRIPT = """
from test_workers_from_outside import train
if __name__ == '__main__':
    model, _ = train()
    print('weights', sum(float(value.sum()) for value in model.state_dict().values()))
"""


def spare(
    port: int, key: str = "the key of this test", script: str = SCRIPT
) -> AbstractContextManager[subprocess.Popen[str]]:
    """A process that runs :func:`train` as a worker of the run at ``port``, for which it waits."""
    environment = {k: v for k, v in os.environ.items() if k != "RECYCLE_LISTEN"}
    environment |= {"RECYCLE_COORDINATOR": f"127.0.0.1:{port}", "RECYCLE_KEY": key}
    return started([sys.executable, "-c", script], cwd=HERE, env=environment)


@pytest.mark.long
def test_a_worker_from_outside_takes_the_place_of_a_lost_one(port):
    with spare(port) as process:
        model, run = train(Fault("kill", 1, 0, step=2))
        output, errors = process.communicate(timeout=PATIENCE)
    assert rejoined(run) == failures(run) == [(1, 0)]
    assert not happened(run, "restarting")
    assert difference(model.state_dict(), plain_loop(Regression().double(), DATA, LENGTH)) < 1e-10
    assert committed_steps(run) == list(range(LENGTH))
    assert process.returncode == 0, errors
    # Its script goes on after the training, with the whole trained model.
    total = sum(float(value.sum()) for value in model.state_dict().values())
    assert float(output.split("weights")[1]) == pytest.approx(total, rel=1e-10)


def spares(coordinator: int) -> int:
    """How many wait, by the run of the process ``coordinator``; 0 if it does not answer in time, as under load."""
    command = [str(Path(sys.executable).with_name("recycle-status")), "--json", str(coordinator)]
    done = subprocess.run(command, capture_output=True, check=False, timeout=PATIENCE)
    return 0 if done.returncode else len(json.loads(done.stdout)["spares"])


class AwaitSpare(L.Callback):
    """In the middle of the training, waits until a fifth process is let in; a connection alone may come too late."""

    def __init__(self) -> None:
        self._coordinator = os.getpid()

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        wait_for(lambda: trainer.global_step != 8 or spares(self._coordinator) == 1, 60)


@pytest.mark.long
def test_a_spare_that_nobody_needed_ends_with_the_run(port):
    with spare(port) as process:
        _, run = train(callbacks=[AwaitSpare()])
        _, errors = process.communicate(timeout=PATIENCE)
    assert undisturbed(run)
    assert process.returncode == 0, errors


@pytest.mark.long
def test_an_evicted_worker_from_outside_that_wakes_up_is_fenced(port, tmp_path):
    """Nobody can kill it where it is; but the connection that would let it back in is gone."""
    callbacks = [AwaitReplacement([6], pace=0.1), HeartbeatCallback(interval=0.2, timeout=1.5)]
    data = dataset(GLOBAL_BATCH * 30)
    with spare(port) as process, Meanwhile(lambda: mark_of(tmp_path, 2, 1), lambda pid: os.kill(pid, signal.SIGSTOP)):
        model, run = train(Fault("kill", 1, 0, step=2), callbacks=callbacks, data=data, max_steps=30)
        os.kill(process.pid, signal.SIGCONT)
        _, errors = process.communicate(timeout=PATIENCE)
    assert [event.worker for event in happened(run, "evicted")] == [(1, 0)]
    assert difference(model.state_dict(), plain_loop(Regression().double(), data, 30)) < 1e-10
    assert process.returncode > 0
    assert "connection to the coordinator" in errors


@pytest.mark.parametrize(("variables", "words"), [
    ({"RECYCLE_COORDINATOR": "127.0.0.1:9"}, ["RECYCLE_COORDINATOR=127.0.0.1:9", "RECYCLE_LISTEN"]),
    ({"RECYCLE_COORDINATOR": "somewhere"}, ["RECYCLE_COORDINATOR='somewhere'", "host:port"]),
    ({"RECYCLE_COORDINATOR": "127.0.0.1:9", "RECYCLE_KEY": ""}, ["RECYCLE_COORDINATOR is set, and RECYCLE_KEY is not"]),
    ({"RECYCLE_LISTEN": "127.0.0.1:0", "RECYCLE_KEY": ""}, ["RECYCLE_LISTEN is set, and RECYCLE_KEY is not set"]),
    ({"RECYCLE_COORDINATOR": "127.0.0.1:9", "RECYCLE_KEY": "guess me"}, ["RECYCLE_KEY has 8 bytes", "at least 16"]),
    ({"RECYCLE_LISTEN": "127.0.0.1:0", "RECYCLE_KEY": "guess me"}, ["RECYCLE_KEY has 8 bytes", "/dev/urandom"]),
])  # fmt: skip
def test_a_wrong_address_or_a_missing_key_is_refused(variables, words, monkeypatch):
    for name, value in {"RECYCLE_KEY": "any key of the run", "MARKS": ".", **variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RECYCLE_CONNECT_SECONDS", "0.5")  # to wait for one that starts late
    with pytest.raises(ConfigurationError) as caught:
        train()
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_wrong_key_is_refused_on_both_sides(monkeypatch, caplog):
    listener = Listener(("127.0.0.1", 0), b"the key of the run", workers=4, wake=lambda: None)
    listener.start()
    try:
        monkeypatch.setenv("RECYCLE_COORDINATOR", f"127.0.0.1:{listener.address[1]}")
        monkeypatch.setenv("RECYCLE_KEY", "another key of a run")
        monkeypatch.setenv("MARKS", ".")
        with pytest.raises(ConfigurationError, match="RECYCLE_KEY the same value"):
            train()
        assert listener.accepted.empty()
        assert wait_for(lambda: "refused a connection" in caplog.text, 5)
    finally:
        listener.close()
