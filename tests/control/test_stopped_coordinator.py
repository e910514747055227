"""A coordinator that is merely stopped is waited for: its machine answers, so nobody is cut off; but not forever."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

from control_plane import PATIENCE, in_thread, together
from control_worker import Member
from support.thread_client import ThreadClient
from support.waiting import next_line

from lightning_recycle.control.client import EXIT_LOST_COORDINATOR

KEY = "the key of this test"
STOPPED = 4.0  # seconds
QUIET = 3.0  # seconds of silence until workers give a coordinator up


@contextlib.contextmanager
def coordinator(*further: str) -> Iterator[tuple[subprocess.Popen[str], tuple[str, int]]]:
    """A coordinator in a process of its own, and its address."""
    options = ["--listen", "127.0.0.1:0", "--pipelines", "2", "--stages", "2", "--microbatches", "1", "--runs", "1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "lightning_recycle.control.coordinator.standalone", *options, *further],
        env={**os.environ, "RECYCLE_KEY": KEY},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        host, _, port = next_line(process).split()[-1].rpartition(":")
        yield process, (host, int(port))
    finally:
        process.kill()
        process.communicate()


def begun(address: tuple[str, int]) -> tuple[list[ThreadClient], list[Member]]:
    """Four workers after their first step."""
    clients = [ThreadClient(None, address, KEY.encode(), 0.05) for _ in range(4)]
    assert sorted(found.rank for found in together(*(client.await_assignment for client in clients))) == [0, 1, 2, 3]
    members = [Member(client, 2) for client in clients]
    together(*(member.join for member in members))
    together(*(member.step for member in members))
    return clients, members


def test_workers_outlive_a_stop_of_the_coordinator_even_in_the_middle_of_a_large_message() -> None:
    with coordinator() as (process, address):
        clients, members = begun(address)
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


def test_workers_give_up_a_coordinator_that_stays_silent_for_longer_than_its_timeout() -> None:
    with coordinator("--coordinator-timeout", str(QUIET)) as (process, address):
        clients, members = begun(address)
        process.send_signal(signal.SIGSTOP)
        time.sleep(QUIET / 4)
        process.send_signal(signal.SIGCONT)
        together(*(member.step for member in members))
        time.sleep(2 * QUIET)  # it says nothing but that it lives
        together(*(member.step for member in members))
        process.send_signal(signal.SIGSTOP)
        stopped = time.monotonic()
        assert all(client.exited.wait(PATIENCE) for client in clients)
        assert {client.exit_code for client in clients} == {EXIT_LOST_COORDINATOR}
        assert QUIET / 2 < time.monotonic() - stopped < 3 * QUIET
