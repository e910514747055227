"""Who connects: with the key of the run, and nobody else, whatever he sends; and who does not answer."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count, islice
from typing import Any

import pytest
from support.strangers import attack, knock
from support.waiting import PATIENCE, wait_for

from lightning_recycle.control.network.connection import GREETING_BYTES, PROOF_BYTES, Handshake, Role
from lightning_recycle.runtime import worker_links
from lightning_recycle.runtime.worker_links import Connecting, Gate, Link, NoAnswerError

SHORT = 0.5  # seconds
NEVER = threading.Event()


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


def connect(*given: Any) -> dict[Link, socket.socket]:
    *about, cancelled, seconds = given
    return Connecting(*about).run(cancelled, seconds)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


KEY, OTHER_KEY = b"the key of this run", b"the key of another"
LINK = Link("activations", 0, 1)


# ---------------------------------------------------------------------- the handshake


def address_of(gate: Gate) -> tuple[str, int]:
    host, port = gate.socket.getsockname()
    return host, port


@pytest.fixture
def gates() -> Iterator[list[Gate]]:
    opened = [Gate("127.0.0.1") for _ in range(3)]
    yield opened
    for gate in opened:
        gate.close()


class Acceptor:
    """A worker that awaits ``LINK`` in vain at ``gate``, for a while, and what a stranger there says and hears."""

    def __init__(self, gate: Gate, seconds: float = 1.0) -> None:
        self._pool = ThreadPoolExecutor(1)
        self.result = self._pool.submit(connect, gate, KEY, 3, 1, [LINK], {}, NEVER, seconds)
        self.stranger = socket.create_connection(address_of(gate), timeout=5)

    def hear(self, size: int) -> bytes:
        data = b""
        while len(data) < size and (more := self.stranger.recv(size - len(data))):
            data += more
        return data

    def refuses(self) -> None:
        with contextlib.suppress(ConnectionResetError):
            assert self.stranger.recv(1) == b""
        self.stranger.close()
        with pytest.raises(TimeoutError, match="no connection to rank 0"):
            self.result.result()


NAME = LINK.code("name", KEY, 3)


def test_the_codes_of_a_link_need_the_key_and_are_of_one_generation_and_direction() -> None:
    others = [("key", KEY, 3), ("name", OTHER_KEY, 3), ("name", KEY, 2)]
    codes = {NAME, *(LINK.code(*other) for other in others)}
    codes |= {other.code("name", KEY, 3) for other in (Link("activations", 1, 0), Link("gradients", 0, 1))}
    assert len(codes) == 6


def test_a_dialer_that_is_not_awaited_is_refused(gates: list[Gate], caplog: pytest.LogCaptureFixture) -> None:
    acceptor = Acceptor(gates[1])
    acceptor.stranger.sendall(LINK.code("name", KEY, 2))
    acceptor.refuses()
    assert "it knows no name of a link that is awaited" in caplog.text


def test_who_has_overheard_the_name_needs_the_key(gates: list[Gate], caplog: pytest.LogCaptureFixture) -> None:
    acceptor = Acceptor(gates[1])
    stranger = Handshake(Role.COORDINATOR, OTHER_KEY)
    acceptor.stranger.sendall(NAME)
    greeting = acceptor.hear(GREETING_BYTES)
    acceptor.stranger.sendall(stranger.greeting)
    acceptor.hear(PROOF_BYTES)
    stranger.receive(greeting)
    acceptor.stranger.sendall(stranger._proof(Role.COORDINATOR))
    acceptor.refuses()
    assert "the other side has another key" in caplog.text


def test_a_dialer_refuses_who_does_not_know_the_key() -> None:
    """Such as a process that has got the port of a worker that died."""
    heard = []
    with socket.create_server(("127.0.0.1", 0)) as server, contextlib.closing(Gate("127.0.0.1")) as gate:
        host, port = server.getsockname()
        with ThreadPoolExecutor(1) as pool:
            dialer = pool.submit(connect, gate, KEY, 3, 0, [LINK], {1: f"{host} {port}".encode()}, NEVER, 1.0)
            sock, _ = server.accept()
            with sock:
                sock.settimeout(5)
                impostor = Handshake(Role.WORKER, OTHER_KEY)
                sock.sendall(impostor.greeting)
                assert sock.recv(32, socket.MSG_WAITALL) == NAME
                sock.sendall(impostor.receive(sock.recv(GREETING_BYTES, socket.MSG_WAITALL)))
                heard.append(sock.recv(PROOF_BYTES))
            with pytest.raises(TimeoutError, match="no connection to rank 1"):
                dialer.result()
    assert heard == [b""], "it proves nothing to an impostor"


def test_of_many_pairs_each_side_dials_about_half() -> None:
    links = {Link.between("stage0", a, b) for a in range(8) for b in range(8) if a != b}
    assert len(links) == 28
    dials = [sum(link.dialer == rank for link in links) for rank in range(8)]
    assert max(dials) - min(dials) <= 2


# ---------------------------------------------------------------------- connections


class Workers:
    """Three workers in threads, which connect to each other for two groups."""

    def __init__(self, gates: list[Gate], generation: int = 3) -> None:
        self.gates, self.generation = gates, generation
        self.cancelled = threading.Event()
        self._pool = ThreadPoolExecutor(len(gates))

    def links(self, rank: int) -> list[Link]:
        return [Link.between(group, rank, other) for group in "ab" for other in range(3) if other != rank]

    def start(self, rank: int, seconds: float = PATIENCE, key: bytes = KEY) -> Future[dict[Link, socket.socket]]:
        addresses = {other: gate.address for other, gate in enumerate(self.gates) if other != rank}
        links = self.links(rank)
        return self._pool.submit(
            connect, self.gates[rank], key, self.generation, rank, links, addresses, self.cancelled, seconds
        )


def check_connected(results: list[dict[Link, socket.socket]]) -> None:
    """What goes in at one end of a link comes out at the other, and nothing else does."""
    for rank, links in enumerate(results):
        assert len(links) == 4
        for link, sock in links.items():
            sock.sendall(f"{rank} {link}".encode())
    for rank, links in enumerate(results):
        for link, sock in links.items():
            sock.settimeout(5)
            assert sock.recv(1000) == f"{link.other(rank)} {link}".encode()
    for links in results:
        for sock in links.values():
            sock.close()


@pytest.mark.parametrize("inputs", [2_000, pytest.param(50_000, marks=pytest.mark.exhaustive)])
def test_workers_connect_among_strangers(gates: list[Gate], inputs: int, caplog: pytest.LogCaptureFixture) -> None:
    """They come before, while and after the workers do, and hold their connections."""
    workers = Workers(gates)
    draw = random.Random(20_261_122)
    held: list[socket.socket] = []
    futures: list[Future[dict[Link, socket.socket]]] = []
    tried = 0
    while tried < inputs:
        if len(futures) < 2 and tried >= len(futures) * inputs / 3:
            futures.append(workers.start(len(futures), seconds=600.0))
        knocked, kept, _ = attack(address_of(draw.choice(gates)), draw)
        tried += knocked
        held += kept
        while len(held) > 500:
            held.pop(0).close()
    futures.append(workers.start(2, seconds=600.0))
    check_connected([future.result(PATIENCE) for future in futures])
    assert "that were not from workers of this run; the first was from 127.0.0.1 port" in caplog.text
    for sock in held:
        sock.close()


def test_a_queue_that_strangers_have_filled_is_emptied() -> None:
    gate, other = Gate("127.0.0.1"), Gate("127.0.0.1")
    gate.socket.listen(8)  # a small one
    link = Link("a", 1, 0)
    waiting = []
    for _ in range(30):
        waiting.append(socket.socket())
        waiting[-1].setblocking(False)
        waiting[-1].connect_ex(gate.socket.getsockname())
    with ThreadPoolExecutor(2) as pool, contextlib.ExitStack() as stack:
        for closing in (gate, other):
            stack.callback(closing.close)
        dialer = pool.submit(connect, other, KEY, 0, 1, [link], {0: gate.address}, NEVER, PATIENCE)
        time.sleep(0.3)
        acceptor = pool.submit(connect, gate, KEY, 0, 0, [link], {1: other.address}, NEVER, PATIENCE)
        for future in (dialer, acceptor):
            for sock in future.result().values():
                sock.close()
    for sock in waiting:
        sock.close()


def test_strangers_do_not_use_up_the_descriptors() -> None:
    """A process that has hardly any left drops strangers to take in a worker."""
    gate, other = Gate("127.0.0.1"), Gate("127.0.0.1")
    link = Link("a", 1, 0)
    strangers = [knock(address_of(gate)) for _ in range(60)]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    try:
        with ThreadPoolExecutor(2) as pool:
            # A worker is another process; here it has its descriptors before they become few.
            dialer = pool.submit(connect, other, KEY, 0, 1, [link], {0: gate.address}, NEVER, PATIENCE)
            assert wait_for(lambda: len(os.listdir("/proc/self/fd")) >= used + 2)
            resource.setrlimit(resource.RLIMIT_NOFILE, (used + 20, limits[1]))
            acceptor = pool.submit(connect, gate, KEY, 0, 0, [link], {1: other.address}, NEVER, PATIENCE)
            for future in (dialer, acceptor):
                for sock in future.result().values():
                    sock.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for stranger in (*strangers, gate, other):
            if stranger is not None:
                stranger.close()


@pytest.mark.parametrize("dials", [True, False])
def test_a_worker_without_descriptors_says_so_and_blames_nobody(gates: list[Gate], dials: bool) -> None:
    rank, other = (1, 0) if dials else (0, 1)
    links = [Link(group, 1, 0) for group in "abc"]
    callers = [] if dials else [socket.create_connection(address_of(gates[rank])) for _ in links]
    for link, caller in zip(links, callers, strict=False):
        caller.sendall(link.code("name", KEY, 3))  # no strangers, whom it would drop
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = {int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")}
    *_, highest = islice(filter(lambda number: number not in opened, count()), 4)  # of an event loop, and one link
    with ThreadPoolExecutor(1) as pool:
        pool.submit(descriptors).result()
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, limits[1]))
            result = pool.submit(connect, gates[rank], KEY, 3, rank, links, {other: gates[other].address}, NEVER, 5.0)
            with pytest.raises(OSError, match="Too many open files"):
                result.result()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            for caller in callers:
                caller.close()


def test_who_has_another_key_is_named_when_the_time_is_up(gates: list[Gate]) -> None:
    workers = Workers(gates)
    futures = [workers.start(rank, 1.0, KEY if rank else OTHER_KEY) for rank in range(3)]
    for rank, ranks in enumerate(["1, 2", "0", "0"]):
        with pytest.raises(TimeoutError, match=f"no connection to rank {ranks} within 1 s"):
            futures[rank].result()


def test_who_does_not_answer_is_told_from_who_is_slow(gates: list[Gate], silent: bytes) -> None:
    """A process that is stopped has its connections accepted by the kernel: it is for its silence to betray it."""
    with socket.create_server(("127.0.0.1", 0)) as gone:
        refuses = f"127.0.0.1 {gone.getsockname()[1]}".encode()
    addresses = {1: silent, 2: refuses, 3: gates[0].address}
    links = [Link("activations", 0, rank) for rank in addresses]
    before = descriptors()
    for _ in range(2):
        began = time.monotonic()
        with pytest.raises(NoAnswerError, match="no connection to rank 1, 2, 3 within") as caught:
            connect(gates[1], KEY, 3, 0, links, addresses, NEVER, SHORT)
        assert caught.value.silent == (1, 2)
        assert SHORT <= time.monotonic() - began < SHORT + 0.4
    assert descriptors() <= before  # an earlier test may have left one to the garbage collector


def test_addresses_of_ip_version_6_will_do() -> None:
    try:
        with contextlib.closing(Gate("::1")) as one, contextlib.closing(Gate("::1")) as other:
            with ThreadPoolExecutor(1) as pool:
                accepted = pool.submit(connect, other, KEY, 3, 1, [LINK], {}, NEVER, PATIENCE)
                dialed = connect(one, KEY, 3, 0, [LINK], {1: other.address}, NEVER, PATIENCE)
            for sock in (dialed[LINK], accepted.result()[LINK]):
                sock.close()
    except OSError:
        pytest.skip("this machine has no IP version 6")


def test_the_loop_of_the_users_code_stays_and_may_run(gates: list[Gate]) -> None:
    def connected() -> dict[Link, socket.socket]:
        return connect(gates[0], KEY, 3, 0, [], {}, NEVER, PATIENCE)

    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        assert connected() == {}
        assert asyncio.get_event_loop() is loop

        async def script() -> dict[Link, socket.socket]:
            return connected()

        assert loop.run_until_complete(script()) == {}
    finally:
        asyncio.set_event_loop(None)
        loop.close()


def test_a_task_that_loses_a_cancellation_ends() -> None:
    """As ``asyncio.wait_for()`` did in CPython before 3.12 (gh-86296)."""

    async def run() -> None:
        async def loses_the_first() -> None:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(PATIENCE)
            await asyncio.sleep(PATIENCE)

        task = asyncio.create_task(loses_the_first())
        await asyncio.sleep(0)
        await worker_links._ended([task])
        assert task.cancelled()

    asyncio.run(asyncio.wait_for(run(), PATIENCE))


def test_cancelling_ends_connecting_and_leaves_nothing_open(gates: list[Gate]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    workers = Workers(gates)
    futures = [workers.start(rank) for rank in range(2)]
    time.sleep(0.1)
    began = time.monotonic()
    workers.cancelled.set()
    for future in futures:
        with pytest.raises(InterruptedError):
            future.result()
    assert time.monotonic() - began < 1.0
    assert len(os.listdir("/proc/self/fd")) == before
