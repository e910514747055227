"""Workers that the launching process did not start: they wait as spares, and take the place of a lost one."""

import os
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from support.growth import AwaitReplacement, happened, rejoined
from support.models import GLOBAL_BATCH, Regression, dataset
from support.scripts import started
from support.training import committed_steps, difference, failures, fit, plain_loop
from support.waiting import PATIENCE, wait_for

from lightning_recycle import ConfigurationError
from lightning_recycle.callbacks import Fault
from lightning_recycle.control.network.listener import Listener

HERE = Path(__file__).parent
LENGTH = 16
DATA = dataset(GLOBAL_BATCH * LENGTH)


def train(*faults: Fault, **arguments: Any) -> tuple[Regression, Any]:
    """What the launching process and the workers outside all run."""
    model = Regression().double()
    arguments = {"max_steps": LENGTH, "data": DATA, "callbacks": [AwaitReplacement(range(6, LENGTH))], **arguments}
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


@pytest.mark.parametrize(("variables", "words"), [
    ({"RECYCLE_COORDINATOR": "127.0.0.1:9"}, ["RECYCLE_COORDINATOR=127.0.0.1:9", "RECYCLE_LISTEN"]),
    ({"RECYCLE_COORDINATOR": "somewhere"}, ["RECYCLE_COORDINATOR='somewhere'", "host:port"]),
    ({"RECYCLE_COORDINATOR": "127.0.0.1:9", "RECYCLE_KEY": ""}, ["RECYCLE_COORDINATOR is set, and RECYCLE_KEY is not"]),
    ({"RECYCLE_LISTEN": "127.0.0.1:0", "RECYCLE_KEY": ""}, ["RECYCLE_LISTEN is set, and RECYCLE_KEY is not set"]),
    ({"RECYCLE_COORDINATOR": "127.0.0.1:9", "RECYCLE_KEY": "guess me"}, ["RECYCLE_KEY has 8 bytes", "at least 16"]),
    ({"RECYCLE_LISTEN": "127.0.0.1:0", "RECYCLE_KEY": "guess me"}, ["RECYCLE_KEY has 8 bytes", "/dev/urandom"]),
])  # fmt: skip
def test_a_wrong_address_or_a_missing_key_is_refused(variables, words, monkeypatch):
    for name, value in {"RECYCLE_KEY": "any key of the run", **variables}.items():
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
        with pytest.raises(ConfigurationError, match="RECYCLE_KEY the same value"):
            train()
        assert listener.accepted.empty()
        assert wait_for(lambda: "refused a connection" in caplog.text, 5)
    finally:
        listener.close()
