"""A coordinator in a process of its own stops, or is killed and started again; its workers are threads of the test."""

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from control_plane import KEY, in_thread, listening, standalone, together
from control_worker import Member
from support.thread_client import ThreadClient
from support.waiting import PATIENCE, next_line

from lightning_recycle.control.client import EXIT_LOST_COORDINATOR
from lightning_recycle.control.network.addresses_and_keys import free_port
from lightning_recycle.control.protocol.messages import RunRequest
from lightning_recycle.planning.grid import Grid

WANTS = RunRequest("fit", Grid(2, 2, 1), microbatches_given=True)
LONG = 100.0  # seconds for what must happen, on whatever machine


class Restarted:
    """A coordinator of a 2 x 2 grid at a fixed address."""

    def __init__(self, folder: Path) -> None:
        self.address = ("127.0.0.1", free_port("127.0.0.1"))
        self.folder = folder
        self.process: subprocess.Popen[str] | None = None
        self.clients: list[ThreadClient] = []

    def start(self) -> None:
        listen, state = f"127.0.0.1:{self.address[1]}", str(self.folder / "state.log")
        with (self.folder / "record.txt").open("ab") as record:
            self.process = standalone(listen, "--runs", "1", "--state", state, stderr=record)
        next_line(self.process)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()

    def client(self, patience: float = LONG) -> ThreadClient:
        options: Any = {"patience": patience, "survives": True, "wants": WANTS}
        self.clients.append(ThreadClient(None, self.address, KEY.encode(), 0.05, **options))
        return self.clients[-1]

    @property
    def record(self) -> str:
        return (self.folder / "record.txt").read_text()


@pytest.fixture
def coordinator(tmp_path) -> Iterator[Restarted]:
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
    member = Member(client, 2).join() if not client.is_joining else Member(client, 2).enter()
    told: list[object] = []
    while member.version < steps:
        begins(member.version)
        member.step()
        told.append((member.version, sorted(client.arrive(f"after step {member.version}", member.version).items())))
    told.append(sorted(client.arrive("result", (client.rank,)).items()))
    return told


def test_workers_agree_whenever_the_coordinator_was_killed(coordinator):
    steps, newest = 40, 0

    def begins(step: int) -> None:
        nonlocal newest
        newest = max(newest, step)
        time.sleep(0.01)

    trained = [in_thread(train, coordinator.client(), steps, begins) for _ in range(4)]
    chance = random.Random(3)
    # A worker ends if its coordinator dies before it was taken in; whoever starts workers starts another one.
    deadline = time.monotonic() + LONG
    while any(client._enrolled is None for client in coordinator.clients) and time.monotonic() < deadline:
        time.sleep(0.005)
    for kill in range(3):
        deadline = time.monotonic() + LONG
        while newest < kill * 10 and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(0.1 * chance.random())
        coordinator.kill()
        coordinator.start()
    first, *others = [future.result(LONG) for future in trained]
    assert all(other == first for other in others)
    assert [told[0] for told in first[:-1]] == list(range(1, steps + 1))
    assert '"kind": "failure"' not in coordinator.record
    assert coordinator.process.wait(LONG) == 0, coordinator.record


def test_a_worker_gives_up_a_coordinator_that_does_not_come_back(coordinator):
    clients = [coordinator.client(patience=1.0) for _ in range(4)]
    for client in clients:
        client.await_assignment()
    coordinator.kill()
    assert all(client.exited.wait(LONG) for client in clients)
    assert {client.exit_code for client in clients} == {EXIT_LOST_COORDINATOR}


def test_workers_outlive_a_stop_of_the_coordinator_even_in_the_middle_of_a_large_message():
    with listening("--runs", "1") as (process, address):
        clients = [ThreadClient(None, address, KEY.encode(), 0.05, wants=WANTS) for _ in range(4)]
        together(*(client.await_assignment for client in clients))
        members = [Member(client, 2) for client in clients]
        together(*(member.join for member in members))
        together(*(member.step for member in members))
        process.send_signal(signal.SIGSTOP)
        large = os.urandom(30_000_000)  # more than both buffers
        arrivals = [in_thread(client.arrive, "state", large) for client in clients[:1]]
        arrivals += [in_thread(client.arrive, "state", None) for client in clients[1:]]
        time.sleep(1.0)
        process.send_signal(signal.SIGCONT)
        for arrival in arrivals:
            assert arrival.result(PATIENCE)[clients[0].rank] == large
        together(*(member.step for member in members))
        assert not [client for client in clients if client.exited.is_set()]
        for client in clients:
            client.leave()
        process.kill()
        assert all(client.exited.wait(PATIENCE) for client in clients)
