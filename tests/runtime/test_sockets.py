"""Which other workers can be reached: over real sockets of this machine."""

import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from lightning_recycle.runtime.comm.connections import CHECK_SECONDS, Doorbell, unreachable

SHORT = 0.5  # seconds
NEVER = threading.Event()


@pytest.fixture
def doorbells() -> Iterator[list[Doorbell]]:
    opened = [Doorbell("127.0.0.1") for _ in range(3)]
    yield opened
    for doorbell in opened:
        doorbell.close()


@pytest.fixture
def silent() -> Iterator[bytes]:
    """The address of a socket whose queue is full: it drops what comes, as a cut link does."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        host, port = server.getsockname()
        waiting = [socket.socket() for _ in range(4)]
        for client in waiting:
            client.setblocking(False)
            client.connect_ex((host, port))
        yield f"{host} {port}".encode()
        for client in waiting:
            client.close()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_if_all_can_be_reached_that_is_known_at_once(doorbells: list[Doorbell]) -> None:
    began = time.monotonic()
    assert unreachable({rank: bell.address for rank, bell in enumerate(doorbells)}, NEVER) == ()
    assert time.monotonic() - began < CHECK_SECONDS / 2


def test_a_doorbell_answers_without_its_process_however_often(doorbells: list[Doorbell]) -> None:
    for _ in range(100):
        assert unreachable({0: doorbells[0].address}, NEVER) == ()


def test_strangers_cannot_fill_the_queue_of_a_doorbell(doorbells: list[Doorbell]) -> None:
    """Or its worker would look unreachable, and be evicted."""
    host, port = doorbells[0].address.decode().split()
    for _ in range(1100):  # what is accepted later stays in the queue, although it is closed
        socket.create_connection((host, int(port)), timeout=5).close()
    assert unreachable({0: doorbells[0].address}, NEVER) == ()


def test_who_refuses_or_is_silent_is_unreachable_when_the_time_is_up(doorbells: list[Doorbell], silent: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        refuses = f"127.0.0.1 {gone.getsockname()[1]}".encode()
    addresses = {5: silent, 2: refuses, 0: doorbells[0].address}
    began = time.monotonic()
    assert unreachable(addresses, NEVER, SHORT) == (2, 5)
    assert SHORT <= time.monotonic() - began < SHORT + 0.4


def test_who_is_a_little_late_is_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    late: list[socket.socket] = []
    timer = threading.Timer(0.2, lambda: late.append(socket.create_server(("127.0.0.1", port))))
    timer.start()
    assert unreachable({0: f"127.0.0.1 {port}".encode()}, NEVER) == ()
    timer.join()
    late[0].close()


def test_who_is_there_is_reached_even_if_the_process_was_stopped_until_the_time_was_up(
    doorbells: list[Doorbell],
) -> None:
    assert unreachable({rank: bell.address for rank, bell in enumerate(doorbells)}, NEVER, 0.0) == ()


def test_a_cancelled_check_ends_soon(silent: bytes) -> None:
    cancelled = threading.Event()
    threading.Timer(0.1, cancelled.set).start()
    began = time.monotonic()
    unreachable({0: silent}, cancelled)
    assert time.monotonic() - began < 0.5


def test_a_check_leaves_no_descriptor(doorbells: list[Doorbell], silent: bytes) -> None:
    before = descriptors()
    for _ in range(3):
        unreachable({0: silent, 1: doorbells[0].address, 2: b"127.0.0.1 1"}, NEVER, 0.1)
    assert descriptors() == before


def test_an_address_of_ip_version_6_will_do() -> None:
    try:
        doorbell = Doorbell("::1")
    except OSError:
        pytest.skip("this machine has no IP version 6")
    assert unreachable({0: doorbell.address}, NEVER) == ()
    doorbell.close()
