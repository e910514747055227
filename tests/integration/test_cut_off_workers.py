"""Workers whose machine loses the coordinator's for good: they do not live on, holding a device."""

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
from support.waiting import PATIENCE

from lightning_recycle.control.client import EXIT_LOST_COORDINATOR

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

    def lose_far_workers(self, last_words: str, seconds: float) -> None:
        """Waits until both have ended for the lack of a coordinator, saying so."""
        for process in self.far_workers:
            said, _ = process.communicate(timeout=seconds)
            assert process.returncode == EXIT_LOST_COORDINATOR, said
            assert last_words in said

    def end(self, *processes: subprocess.Popen[str]) -> str:
        """Waits for the end of the training; returns the coordinator's record."""
        for process in processes:
            said, _ = process.communicate(timeout=PATIENCE)
            assert process.returncode == 0, said
        weights, _ = torch.load(self.output, weights_only=True)
        assert difference(weights, plain_loop(Slow().double(), dataset(GLOBAL_BATCH * STEPS), STEPS)) < 1e-10
        record, _ = self.coordinator.communicate(timeout=PATIENCE)
        assert self.coordinator.returncode == 0, record
        return record


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A run that has begun its fifth step."""
    near, far = Machine("n", "10.77.30.1"), Machine("f", "10.77.30.2")
    with with_a_cable(near, far):
        served = coordinator(near, 1, "--timeout", str(TIMEOUT), "--coordinator-timeout", "8", "--start-timeout", "90")
        output = tmp_path / "trained.pt"
        environment = {
            "RECYCLE_COORDINATOR": f"{near.address}:{PORT}",
            "RECYCLE_CONNECT_SECONDS": "2",
        }
        script = [sys.executable, str(HERE / "outside_worker.py"), str(STEPS), "0.15", str(output)]
        workers = [machine.start(*script, **environment) for machine in (near, near, far, far)]
        for process in workers:
            await_line(process, "step", 5)
        yield Cluster(near, far, workers[:2], workers[2:], served, output)


@pytest.mark.exhaustive
def test_workers_that_are_cut_off_for_good_end(cluster: Cluster) -> None:
    cluster.cut()
    cluster.lose_far_workers("lost its connection to the coordinator", seconds=60)
    cluster.end(*cluster.near_workers)
