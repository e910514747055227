"""A coordinator in a process of its own is killed and started again; its workers are threads of the test."""

import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from control_plane import in_thread
from control_worker import Member
from support.thread_client import ThreadClient
from support.waiting import next_line

from lightning_recycle.control.client import EXIT_LOST_COORDINATOR

KEY = "the key of this test"
LONG = 100.0  # seconds for what must happen, on whatever machine


class Restarted:
    """A coordinator of a 2 x 2 grid at a fixed address."""

    def __init__(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.address = ("127.0.0.1", int(free.getsockname()[1]))
        self.folder = folder
        self.process: subprocess.Popen[str] | None = None
        self.clients: list[ThreadClient] = []

    def start(self, *options: str) -> None:
        command = [sys.executable, "-m", "lightning_recycle.control.coordinator.standalone", "--runs", "1"]
        command += ["--listen", f"127.0.0.1:{self.address[1]}", "--pipelines", "2", "--stages", "2"]
        command += ["--microbatches", "1", "--state", str(self.folder / "state.log"), *options]
        with (self.folder / "record.txt").open("ab") as record:
            self.process = subprocess.Popen(
                command, env={**os.environ, "RECYCLE_KEY": KEY}, stdout=subprocess.PIPE, stderr=record, text=True
            )
        next_line(self.process)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def client(self, patience: float = LONG) -> ThreadClient:
        self.clients.append(ThreadClient(None, self.address, KEY.encode(), 0.05, patience=patience, survives=True))
        return self.clients[-1]

    @property
    def record(self) -> str:
        return (self.folder / "record.txt").read_text()


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Restarted]:
    made = Restarted(tmp_path)
    try:
        made.start()
        yield made
    finally:
        for client in made.clients:
            client.leave()
        made.kill()


def train(client: ThreadClient, steps: int, begins: Callable[[int], None]) -> list[object]:
    """What one worker does; returns what all told each other after each step."""
    client.await_assignment()
    member = Member(client, 2).join() if not client.joining else Member(client, 2).enter()
    told: list[object] = []
    while member.version < steps:
        begins(member.version)
        member.step()
        told.append((member.version, sorted(client.arrive(f"after step {member.version}", member.version).items())))
    told.append(sorted(client.arrive("result", (client.rank,)).items()))
    return told


def test_workers_agree_whenever_the_coordinator_was_killed(coordinator: Restarted) -> None:
    steps, newest = 60, 0

    def begins(step: int) -> None:
        nonlocal newest
        newest = max(newest, step)
        time.sleep(0.01)

    trained = [in_thread(train, coordinator.client(), steps, begins) for _ in range(4)]
    chance = random.Random(3)
    for kill in range(5):
        deadline = time.monotonic() + LONG
        while newest < kill * 10 and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(0.1 * chance.random())
        coordinator.kill()
        coordinator.start()
    first, *others = [future.result(LONG) for future in trained]
    assert all(other == first for other in others)
    assert [told[0] for told in first[:-1]] == list(range(1, steps + 1))  # type: ignore[index]
    assert '"kind": "failure"' not in coordinator.record
    assert coordinator.process is not None
    assert coordinator.process.wait(LONG) == 0, coordinator.record


def test_a_worker_gives_up_a_coordinator_that_does_not_come_back(coordinator: Restarted) -> None:
    clients = [coordinator.client(patience=1.0) for _ in range(4)]
    for client in clients:
        client.await_assignment()
    coordinator.kill()
    assert all(client.exited.wait(LONG) for client in clients)
    assert {client.exit_code for client in clients} == {EXIT_LOST_COORDINATOR}
