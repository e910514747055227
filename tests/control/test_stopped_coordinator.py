"""A coordinator that is merely stopped is waited for: its machine answers, so nobody is cut off."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from control_plane import PATIENCE, in_thread, together
from control_worker import Member
from support.thread_client import ThreadClient

KEY = "the key of this test"
LIMIT = 1.0  # seconds without an answer of the coordinator's machine
STOPPED = 4.0  # seconds

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def coordinator() -> Iterator[tuple[subprocess.Popen[str], tuple[str, int]]]:
    """A coordinator in a process of its own, and its address."""
    options = ["--listen", "127.0.0.1:0", "--pipelines", "2", "--stages", "2", "--microbatches", "1", "--runs", "1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "lightning_recycle.control.standalone", *options],
        env={**os.environ, "RECYCLE_KEY": KEY},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        host, _, port = process.stdout.readline().split()[-1].rpartition(":")
        yield process, (host, int(port))
    finally:
        process.kill()
        process.communicate()


def test_workers_outlive_a_stop_of_the_coordinator_even_in_the_middle_of_a_large_message(
    coordinator: tuple[subprocess.Popen[str], tuple[str, int]],
) -> None:
    process, address = coordinator
    clients = [ThreadClient(None, address, KEY.encode(), 0.05) for _ in range(4)]
    assert sorted(found.rank for found in together(*(client.await_assignment for client in clients))) == [0, 1, 2, 3]
    for client in clients:
        client.limit_silence(LIMIT)
    members = [Member(client, 2) for client in clients]
    together(*(member.join for member in members))
    together(*(member.step for member in members))
    process.send_signal(signal.SIGSTOP)
    large = os.urandom(30_000_000)  # more than both buffers
    arrivals = [in_thread(client.arrive, "state", large) for client in clients[:1]]
    arrivals += [in_thread(client.arrive, "state", None) for client in clients[1:]]
    time.sleep(STOPPED)
    process.send_signal(signal.SIGCONT)
    for arrival in arrivals:
        assert arrival.result(PATIENCE)[clients[0].rank] == large
    together(*(member.step for member in members))
    assert not [client for client in clients if client.exited.is_set()]
    for client in clients:
        client.leave()
    process.kill()
    assert all(client.exited.wait(PATIENCE) for client in clients)
