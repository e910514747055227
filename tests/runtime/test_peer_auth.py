"""Links: who knows the key connects, and nobody else, whatever he sends."""

import contextlib
import os
import random
import resource
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.strangers import attack, knock
from support.waiting import wait_for

from lightning_recycle.runtime.comm.connections import Gate, Link, Refusal, Talk, accepting, connect, dialing, name_of

KEY, OTHER_KEY = b"the key of this run", b"the key of another"
LINK = Link("activations", 0, 1)
NEVER = threading.Event()
PATIENCE = 20.0  # seconds


def converse(dialer: Talk, acceptor: Talk) -> tuple[Link, Link]:
    """Lets the two sides of a handshake talk to the end."""
    sides = {dialer: next(dialer), acceptor: next(acceptor)}
    other = {dialer: acceptor, acceptor: dialer}
    said: dict[Talk, bytes] = {dialer: b"", acceptor: b""}
    links: dict[Talk, Link] = {}
    while len(links) < 2:
        for side in (dialer, acceptor):
            try:
                while side not in links:
                    wanted = sides[side]
                    if isinstance(wanted, bytes):
                        said[side] += wanted
                        sides[side] = next(side)
                    elif len(said[other[side]]) >= wanted:
                        heard = said[other[side]]
                        said[other[side]] = heard[wanted:]
                        sides[side] = side.send(heard[:wanted])
                    else:
                        break
            except StopIteration as end:
                links[side] = end.value
    assert not any(said.values())  # nothing is left that would be taken for a message
    return links[dialer], links[acceptor]


def awaited(*links: Link, key: bytes = KEY, generation: int = 3) -> dict[bytes, Link]:
    return {name_of(key, generation, link): link for link in links}


# ---------------------------------------------------------------------- the handshake


def test_who_knows_the_key_connects() -> None:
    others = [Link("activations", 2, 1), Link("gradients", 0, 1)]
    assert converse(dialing(KEY, 3, LINK), accepting(KEY, awaited(LINK, *others))) == (LINK, LINK)


@pytest.mark.parametrize(
    "talk",
    [dialing(OTHER_KEY, 3, LINK), dialing(KEY, 2, LINK), dialing(KEY, 3, Link("activations", 1, 0))],
    ids=["another key", "an earlier generation", "another link"],
)
def test_a_dialer_that_is_not_awaited_is_refused(talk: Talk) -> None:
    with pytest.raises(Refusal):
        converse(talk, accepting(KEY, awaited(LINK)))


def test_a_dialer_refuses_who_does_not_know_the_key() -> None:
    """Such as a process that has got the port of a worker that died."""
    impostor = accepting(OTHER_KEY, awaited(LINK))  # it has seen the name
    with pytest.raises(Refusal):
        converse(dialing(KEY, 3, LINK), impostor)


def test_what_was_overheard_does_not_open_another_connection() -> None:
    first = dialing(KEY, 3, LINK)
    opening = next(first)
    assert isinstance(opening, bytes)
    acceptor = accepting(KEY, awaited(LINK))
    next(acceptor)
    answer = acceptor.send(opening)
    next(first)
    assert isinstance(answer, bytes)
    closing = first.send(answer)
    assert isinstance(closing, bytes)

    again = accepting(KEY, awaited(LINK))
    next(again)
    assert again.send(opening) != answer
    next(again)
    with pytest.raises(Refusal):
        again.send(closing)


def test_the_proof_of_one_side_is_not_that_of_the_other() -> None:
    """Or a stranger could have a worker prove to itself."""
    dialer = dialing(KEY, 3, LINK)
    opening = next(dialer)
    next(dialer)
    acceptor = accepting(KEY, awaited(LINK))
    next(acceptor)
    assert isinstance(opening, bytes)
    answer = acceptor.send(opening)
    assert isinstance(answer, bytes)
    next(acceptor)
    with pytest.raises(Refusal):
        acceptor.send(answer[32:])


@given(st.binary(min_size=64, max_size=64), st.binary(min_size=32, max_size=32), st.booleans())
@example(bytes(64), bytes(32), True)
def test_no_bytes_make_up_for_the_key(opening: bytes, closing: bytes, named: bool) -> None:
    acceptor = accepting(KEY, awaited(LINK))
    assert next(acceptor) == 64
    if named:
        acceptor.send(name_of(KEY, 3, LINK) + opening[32:])
        next(acceptor)
    with pytest.raises(Refusal):
        acceptor.send(closing if named else opening)
    dialer = dialing(KEY, 3, LINK)
    next(dialer)
    next(dialer)
    with pytest.raises(Refusal):
        dialer.send(opening)


def test_of_many_pairs_each_side_dials_about_half() -> None:
    links = {Link.between("stage0", a, b) for a in range(8) for b in range(8) if a != b}
    assert len(links) == 28
    dials = [sum(link.dialer == rank for link in links) for rank in range(8)]
    assert max(dials) - min(dials) <= 2


# ---------------------------------------------------------------------- connections


@pytest.fixture
def gates() -> Iterator[list[Gate]]:
    opened = [Gate("127.0.0.1") for _ in range(3)]
    yield opened
    for gate in opened:
        gate.close()


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


def address_of(gate: Gate) -> tuple[str, int]:
    host, port = gate.socket.getsockname()
    return host, port


@pytest.mark.parametrize("late", [0.0, 0.4])  # seconds; the second is longer than an attempt
def test_workers_connect(gates: list[Gate], late: float) -> None:
    workers = Workers(gates)
    futures = []
    for rank in range(3):
        futures.append(workers.start(rank))
        time.sleep(late)
    check_connected([future.result() for future in futures])


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


@pytest.mark.long
def test_workers_connect_while_others_flood_their_gates(gates: list[Gate]) -> None:
    ended = threading.Event()

    def flood(gate: Gate) -> None:
        held: list[socket.socket] = []
        while not ended.is_set():
            if (sock := knock(address_of(gate))) is not None:
                held.append(sock)
            if len(held) > 200:
                held.pop(0).close()
        for sock in held:
            sock.close()

    threads = [threading.Thread(target=flood, args=(gate,)) for gate in gates]
    for thread in threads:
        thread.start()
    try:
        for generation in range(3):
            workers = Workers(gates, generation)
            futures = [workers.start(rank, seconds=120.0) for rank in range(3)]
            check_connected([future.result() for future in futures])
    finally:
        ended.set()
        for thread in threads:
            thread.join()


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


def test_who_has_another_key_is_named_when_the_time_is_up(gates: list[Gate]) -> None:
    workers = Workers(gates)
    futures = [workers.start(rank, 1.0, KEY if rank else OTHER_KEY) for rank in range(3)]
    for rank, ranks in enumerate(["1, 2", "0", "0"]):
        with pytest.raises(TimeoutError, match=f"no connection to rank {ranks} within 1 s"):
            futures[rank].result()


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
