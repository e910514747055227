"""Both sides prove that they know the key and speak the same version; strangers cost a bounded time and number."""

import contextlib
import select
import socket
import threading
import time
from collections.abc import Iterator
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.waiting import wait_for

from lightning_recycle import __version__
from lightning_recycle.control.coordinator.coordinator import Coordinator
from lightning_recycle.control.network import connection as connection_module
from lightning_recycle.control.network import listener as listener_module
from lightning_recycle.control.network.connection import SCHEMA, Handshake, Refused, Role, VersionMismatch, connect
from lightning_recycle.control.network.listener import _STRANGERS_PER_ADDRESS, Listener
from lightning_recycle.errors import ConfigurationError

KEY = b"the key of the run"
OTHER = b"another key of a run"


def side(role: Role, key: bytes = KEY, version: str = __version__, schema: bytes = SCHEMA) -> Handshake:
    with patch.multiple(connection_module, __version__=version, SCHEMA=schema):
        return Handshake(role, key)


def shake(worker: Handshake, coordinator: Handshake) -> None:
    """Passes what one says to the other until both are silent."""
    to_coordinator, to_worker = worker.greeting, coordinator.greeting
    while to_coordinator or to_worker:
        to_worker, to_coordinator = (
            coordinator.receive(to_coordinator) if to_coordinator else b"",
            worker.receive(to_worker) if to_worker else b"",
        )


@pytest.mark.parametrize("wrong", [Role.WORKER, Role.COORDINATOR])
def test_another_key_is_refused_by_whoever_hears_its_proof_first(wrong):
    worker, coordinator = (side(role, OTHER if role is wrong else KEY) for role in Role)
    with pytest.raises(Refused, match="another key"):
        shake(worker, coordinator)
    assert not worker.done
    assert not coordinator.done


def test_another_version_is_named_by_both_sides():
    worker, coordinator = side(Role.WORKER, version="1.0"), side(Role.COORDINATOR, version="1.1")
    words = r"worker runs lightning-recycle '1\.0'.*coordinator lightning-recycle '1\.1'.*install the same version"
    for one, other in ((worker, coordinator), (coordinator, worker)):
        with pytest.raises(VersionMismatch, match=words):
            one.receive(other.greeting)


def test_other_messages_of_the_same_version_are_refused():
    worker, coordinator = side(Role.WORKER), side(Role.COORDINATOR, schema=b"s" * 16)
    with pytest.raises(VersionMismatch, match="messages 73737373"):
        worker.receive(coordinator.greeting)


def test_what_a_side_said_proves_nothing_when_it_is_said_back():
    """A stranger without the key that mirrors every byte."""
    coordinator = side(Role.COORDINATOR)
    with pytest.raises(Refused):
        coordinator.receive(coordinator.greeting + coordinator.receive(coordinator.greeting) + bytes(32))


def test_a_proof_of_another_connection_is_refused():
    worker, coordinator = side(Role.WORKER), side(Role.COORDINATOR)
    overheard = worker.greeting + worker.receive(coordinator.greeting)
    assert coordinator.receive(overheard)
    with pytest.raises(Refused):
        side(Role.COORDINATOR).receive(overheard)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(data=st.binary(max_size=200), pieces=st.lists(st.integers(1, 50), max_size=10), greets=st.booleans())
def test_any_bytes_are_no_proof(data, pieces, greets):
    coordinator = side(Role.COORDINATOR)
    data = (side(Role.WORKER).greeting if greets else b"") + data
    try:
        for size in pieces:
            coordinator.receive(data[:size])
            data = data[size:]
        coordinator.receive(data)
    except Refused:
        pass
    assert not coordinator.done


def test_the_handshake_may_come_in_pieces_with_the_first_message_behind_it():
    worker, coordinator = side(Role.WORKER), side(Role.COORDINATOR)
    said = worker.greeting + worker.receive(coordinator.greeting) + b"hello"
    for byte in said:
        coordinator.receive(bytes([byte])) if not coordinator.done else None
    assert coordinator.done
    whole = side(Role.COORDINATOR)
    worker = side(Role.WORKER)
    whole.receive(worker.greeting + worker.receive(whole.greeting) + b"hello")
    assert (whole.done, whole.rest) == (True, b"hello")


# ---------------------------------------------------------------------- the listener


class Door:
    """A listener for four workers."""

    def __init__(self) -> None:
        self.woken = threading.Event()
        self.listener = Listener(("127.0.0.1", 0), KEY, 4, self.woken.set)
        self.strangers: list[socket.socket] = []

    def stranger(self, source: str = "127.0.0.1") -> socket.socket:
        self.strangers.append(socket.create_connection(self.listener.address, source_address=(source, 0)))
        return self.strangers[-1]


@pytest.fixture
def doors() -> Iterator[list[Door]]:
    opened: list[Door] = []
    yield opened
    for door in opened:
        door.listener.close()
        for stranger in door.strangers:
            stranger.close()


def open_door(doors: list[Door]) -> Door:
    doors.append(Door())
    doors[-1].listener.start()
    return doors[-1]


def is_closed(stranger: socket.socket) -> bool:
    """Whether the other side has closed the connection, perhaps after it has said something."""
    stranger.settimeout(10.0)
    try:
        while stranger.recv(4096):
            pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True


def test_a_stranger_that_says_a_byte_now_and_then_has_no_more_time_than_a_silent_one(doors, monkeypatch):
    monkeypatch.setattr(listener_module, "HANDSHAKE_SECONDS", 1.0)
    door = open_door(doors)
    slow, sent = door.stranger(), 0
    with contextlib.suppress(OSError):
        for byte in side(Role.WORKER).greeting[:-1]:
            slow.sendall(bytes([byte]))
            sent += 1
            time.sleep(0.1)
    assert sent < 87, "it could speak as long as it liked"


def test_strangers_are_bounded_and_do_not_keep_a_worker_out(doors, monkeypatch):
    monkeypatch.setattr(listener_module, "_STRANGERS", 1)
    door = open_door(doors)
    strangers = [door.stranger() for _ in range(20)]
    worker = connect(door.listener.address, KEY)
    assert door.listener.accepted.get(timeout=10)
    assert all(is_closed(stranger) for stranger in strangers[:14])
    threads = [thread for thread in threading.enumerate() if thread.name == "recycle-welcome"]
    assert not threads, "a stranger costs no thread"
    worker.close()


def test_who_has_spoken_stays_while_others_come_and_say_nothing(doors, monkeypatch):
    monkeypatch.setattr(listener_module, "_STRANGERS", 1)
    door = open_door(doors)
    worker, sock = side(Role.WORKER), door.stranger()
    sock.sendall(worker.greeting)
    proof = worker.receive(sock.recv(4096))
    silent = [door.stranger() for _ in range(20)]
    assert all(is_closed(stranger) for stranger in silent[:14])
    sock.sendall(proof)
    assert door.listener.accepted.get(timeout=10)


def test_an_address_that_is_not_known_has_few_connections_and_those_of_others_stay(doors):
    door = open_door(doors)
    door.listener._known["127.0.0.2"] = door.listener._known["127.0.0.3"] = False  # as if they were elsewhere
    others = [door.stranger("127.0.0.3") for _ in range(3)]
    flood = [door.stranger("127.0.0.2") for _ in range(200)]
    assert all(is_closed(stranger) for stranger in flood[_STRANGERS_PER_ADDRESS:])
    kept = [*others, *flood[:_STRANGERS_PER_ADDRESS]]
    assert not select.select(kept, [], [], 0.3)[0], "some were closed"
    connect(door.listener.address, KEY).close()


def test_a_known_address_is_not_bounded_by_who_else_comes_from_there(doors):
    door = open_door(doors)
    door.listener._known["127.0.0.2"] = False

    def knock() -> None:
        worker, sock = side(Role.WORKER), door.stranger("127.0.0.2")
        sock.sendall(worker.greeting)
        sock.sendall(worker.receive(sock.recv(4096)))
        assert door.listener.accepted.get(timeout=10)

    knock()
    flood = [door.stranger("127.0.0.2") for _ in range(2 * _STRANGERS_PER_ADDRESS)]
    assert not select.select(flood, [], [], 0.3)[0], "some were closed"
    knock()


def test_refusals_do_not_fill_the_log(doors, caplog):
    door = open_door(doors)
    for _ in range(300):
        door.stranger().close()
    worker = connect(door.listener.address, KEY)
    assert door.listener.accepted.get(timeout=10)
    worker.close()

    def lines() -> list[str]:
        return [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]

    assert wait_for(lambda: any("from 127.0.0.1:" in line and line.endswith("it left.") for line in lines()), 10)
    assert len(lines()) < 4


def test_a_worker_of_another_version_says_which_versions_differ(doors, monkeypatch, caplog):
    door = open_door(doors)
    worker = side(Role.WORKER, version="9.9")
    monkeypatch.setattr(connection_module, "Handshake", lambda *_: worker)
    with pytest.raises(VersionMismatch, match=rf"'9\.9'.*'{__version__}'"):
        connect(door.listener.address, KEY)
    assert wait_for(lambda: "'9.9'" in caplog.text and repr(__version__) in caplog.text, 10)


def test_a_key_that_can_be_guessed_is_refused():
    with pytest.raises(ConfigurationError, match=r"authkey has 9 bytes.*at least 16.*/dev/urandom"):
        Coordinator(None, None, authkey=b"too short")
