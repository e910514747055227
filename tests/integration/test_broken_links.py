"""Of two workers that do not reach each other one goes; the weights are exact."""

import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from machines import Machine, await_line, coordinator, join, namespaces, worker
from outside_worker import error
from support.training import TOLERANCE
from support.waiting import PATIENCE

from lightning_recycle.control.client import EXIT_LOST_COORDINATOR

STEPS = 40
TIMEOUT = 4.0  # seconds; it is noticed after twice that that everybody waits
GO_ON = 30.0  # seconds until the others go on


@dataclass
class Cluster:
    """Four machines with a worker each, by rank, around a hub with the coordinator."""

    hub: Machine
    machines: dict[int, Machine]
    workers: dict[int, subprocess.Popen[str]]
    coordinator: subprocess.Popen[str]
    output: Path

    def drop(self, a: int, b: int) -> None:
        """From now on the hub drops without a word what rank ``a`` sends to rank ``b``."""
        source, destination = self.machines[a].address, self.machines[b].address
        self.hub.ip("rule", "add", "from", source, "to", destination, "blackhole")

    def cut(self, rank: int) -> None:
        """Takes the cable of rank ``rank`` away: nothing reaches it any more, the coordinator neither."""
        self.machines[rank].ip("link", "set", "cable", "down")

    def end(self, evicted: int, others: tuple[int, ...]) -> str:
        """Waits for the end; ``evicted`` must have been told, and ``others`` have trained. Returns the record."""
        said = {rank: self.workers[rank].communicate(timeout=PATIENCE)[0] for rank in (*others, evicted)}
        codes = {rank: self.workers[rank].returncode for rank in (*others, evicted)}
        assert codes == {evicted: EXIT_LOST_COORDINATOR, **dict.fromkeys(others, 0)}, said
        assert error(self.output, STEPS) < TOLERANCE
        record = self.coordinator.communicate(timeout=PATIENCE)[0]
        assert self.coordinator.returncode == 0, record
        return record


@pytest.fixture
def cluster(tmp_path) -> Iterator[Cluster]:
    """A run that has begun its fifth step."""
    hub = Machine("h", "10.77.20.1")
    spokes = [Machine(letter, f"10.77.{20 + number}.2") for number, letter in enumerate("abcd")]
    with namespaces(hub, *spokes):
        join(hub, spokes)
        served = coordinator(hub, 1, "--timeout", str(TIMEOUT), "--coordinator-timeout", "30", "--start-timeout", "90")
        output = tmp_path / "trained.pt"
        started = [worker(spoke, hub.address, STEPS, 0.15, output) for spoke in spokes]
        ranks = [await_line(process, "rank") for process in started]
        for process in started:
            await_line(process, "step", 5)
        yield Cluster(
            hub, dict(zip(ranks, spokes, strict=True)), dict(zip(ranks, started, strict=True)), served, output
        )


def seconds_until_they_go_on(process: subprocess.Popen[str]) -> float:
    """Until a worker of a run that is cut begins a step that it cannot have begun before."""
    began = time.monotonic()
    await_line(process, "step", await_line(process, "step") + 15)
    return time.monotonic() - began


@pytest.mark.long
def test_peers_that_lose_each_other_in_the_middle_of_the_network(cluster):
    """Nothing passes between the workers of stage 0, and nobody is told: their packets are lost."""
    cluster.drop(0, 2)
    cluster.drop(2, 0)
    assert seconds_until_they_go_on(cluster.workers[0]) < GO_ON
    record = cluster.end(evicted=2, others=(0, 1, 3))
    assert "it and worker (0, 0) cannot reach each other" in record


@pytest.mark.exhaustive
def test_a_worker_without_a_route_to_the_next_stage(cluster):
    """One way only: worker (1, 0) has no way to worker (1, 1)."""
    cluster.machines[2].ip("route", "add", "blackhole", cluster.machines[3].address)
    assert seconds_until_they_go_on(cluster.workers[0]) < GO_ON
    record = cluster.end(evicted=3, others=(0, 1, 2))
    assert "it and worker (1, 0) cannot reach each other" in record


@pytest.mark.exhaustive
def test_a_link_that_nobody_used_is_missed_when_another_worker_dies(cluster):
    """Worker (0, 0) has nothing for worker (1, 1) until its own peer dies; it is then the last one of its stage."""
    cluster.drop(0, 3)
    cluster.drop(3, 0)
    await_line(cluster.workers[0], "step", await_line(cluster.workers[0], "step") + 3)
    cluster.workers[2].send_signal(signal.SIGKILL)
    assert seconds_until_they_go_on(cluster.workers[0]) < GO_ON
    assert "it and worker (0, 0) cannot reach each other" in cluster.end(evicted=3, others=(0, 1))


@pytest.mark.exhaustive
def test_a_worker_that_is_cut_off_for_good_does_not_live_on(cluster):
    cluster.cut(2)
    assert seconds_until_they_go_on(cluster.workers[0]) < GO_ON
    cluster.end(evicted=2, others=(0, 1, 3))
