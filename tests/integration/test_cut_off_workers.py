"""Workers whose machine loses the coordinator's for good, or for a while: they do not live on, holding a device."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from machines import HERE, PORT, Machine, await_line, coordinator, with_a_cable
from outside_worker import Slow
from support.models import GLOBAL_BATCH, dataset
from support.training import difference, plain_loop

from lightning_recycle.control.client import EXIT_LOST_COORDINATOR
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.launch import outside_worker

STEPS = 40
TIMEOUT = 4.0  # seconds


@dataclass
class Cluster:
    """Two machines with a cable, a pipeline on each; the coordinator is on the first one."""

    near: Machine
    far: Machine
    near_workers: list[subprocess.Popen[str]]
    far_workers: list[subprocess.Popen[str]]
    coordinator: subprocess.Popen[str]
    output: Path

    def cut(self) -> None:
        self.near.ip("link", "set", "cable", "down")

    def mend(self) -> None:
        self.near.ip("link", "set", "cable", "up")

    def lose_far_workers(self, last_words: str, seconds: float) -> None:
        """Waits until both have ended for the lack of a coordinator, saying so."""
        for process in self.far_workers:
            said, _ = process.communicate(timeout=seconds)
            assert process.returncode == EXIT_LOST_COORDINATOR, said
            assert last_words in said

    def end(self, *processes: subprocess.Popen[str]) -> str:
        """Waits for the end of the training; returns the coordinator's record."""
        for process in processes:
            said, _ = process.communicate(timeout=120)
            assert process.returncode == 0, said
        weights, _ = torch.load(self.output, weights_only=True)
        assert difference(weights, plain_loop(Slow().double(), dataset(GLOBAL_BATCH * STEPS), STEPS)) < 1e-10
        record, _ = self.coordinator.communicate(timeout=30)
        assert self.coordinator.returncode == 0, record
        return record


@pytest.fixture
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A run that has begun its fifth step; the parameter is for how long the workers try to rejoin, in seconds."""
    near, far = Machine("n", "10.77.30.1"), Machine("f", "10.77.30.2")
    with with_a_cable(near, far):
        served = coordinator(near, 1, "--timeout", str(TIMEOUT), "--coordinator-timeout", "8", "--start-timeout", "90")
        output = tmp_path / "trained.pt"
        environment = {
            "RECYCLE_COORDINATOR": f"{near.address}:{PORT}",
            "RECYCLE_RECONNECT_SECONDS": "2",  # they are given up long before a cable is mended
            "RECYCLE_REJOIN_SECONDS": request.param,
        }
        script = [sys.executable, str(HERE / "outside_worker.py"), str(STEPS), "0.15", str(output)]
        script += ["await"] if request.param == "100" else []
        workers = [machine.start(*script, **environment) for machine in (near, near, far, far)]
        for process in workers:
            await_line(process, "step", 5)
        yield Cluster(near, far, workers[:2], workers[2:], served, output)


@pytest.mark.exhaustive
@pytest.mark.parametrize("cluster", ["0"], indirect=True)
def test_workers_that_are_cut_off_for_good_end(cluster: Cluster) -> None:
    cluster.cut()
    cluster.lose_far_workers("lost its connection to the coordinator", seconds=60)
    cluster.end(*cluster.near_workers)


@pytest.mark.long
@pytest.mark.parametrize("cluster", ["100"], indirect=True)
def test_workers_that_are_cut_off_for_a_while_come_back_as_spares(cluster: Cluster) -> None:
    cluster.cut()
    for process in cluster.far_workers:  # nobody else prints where its program begins
        await_line(process, "begins", 2)
    cluster.mend()
    for process in cluster.far_workers:
        await_line(process, "step", 6)
    record = cluster.end(*cluster.near_workers, *cluster.far_workers)
    assert record.count('"kind": "rejoined"') == 2, record


@pytest.mark.exhaustive
@pytest.mark.parametrize("cluster", ["3"], indirect=True)
def test_workers_that_cannot_come_back_in_time_end(cluster: Cluster) -> None:
    cluster.cut()
    cluster.lose_far_workers("could not get back into its run within 3 s", seconds=90)
    cluster.end(*cluster.near_workers)


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf"])
def test_how_long_to_try_must_be_a_number_of_seconds(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECYCLE_REJOIN_SECONDS", text)
    with pytest.raises(ConfigurationError, match=rf"RECYCLE_REJOIN_SECONDS='{text}': give a number of seconds"):
        outside_worker.rejoin_seconds()
