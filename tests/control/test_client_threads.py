"""A worker without its receiver or its heartbeat would be deaf, or seem dead: the end of such a thread is its end."""

import errno
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from support.thread_client import ThreadClient

from lightning_recycle.control import client as client_module
from lightning_recycle.control.client import describe_error
from lightning_recycle.control.network.connection import FrameBuffer, MessageConnection, encode
from lightning_recycle.control.protocol import messages
from lightning_recycle.control.protocol.messages import FROM_WORKERS, TO_WORKERS, Crash, Heartbeat, Hello, Regroup


@pytest.fixture
def theirs(monkeypatch) -> Iterator[MessageConnection]:
    """The coordinator's end of the connection that the next client opens."""
    ours, theirs = socket.socketpair()
    theirs.settimeout(10.0)
    monkeypatch.setattr(client_module, "connect", lambda *_: MessageConnection(ours, FrameBuffer(TO_WORKERS)))
    connection = MessageConnection(theirs, FrameBuffer((Hello, *FROM_WORKERS)))
    yield connection
    connection.close()


def last_words(theirs: MessageConnection) -> Crash:
    while True:
        message = theirs.receive()  # in vain: TimeoutError
        if isinstance(message, Crash):
            return message


def test_a_worker_whose_receiver_cannot_interrupt_ends_and_says_why(theirs):
    client = ThreadClient(0, ("", 0), b"", heartbeat_interval=60.0)

    def interrupt(*_: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    client.on_interrupt = interrupt
    theirs.send(Regroup(0, (0,)))
    crash = last_words(theirs)
    assert (crash.fault, crash.summary) == (
        True,
        "its thread recycle-receive raised OSError: [Errno 24] Too many open files",
    )
    assert client.exited.wait(10.0)
    assert client.exit_code == 1


def test_a_worker_whose_heartbeat_stops_ends_and_says_why(theirs, monkeypatch):
    def beat(*_: Any) -> Heartbeat:
        raise MemoryError

    monkeypatch.setattr(messages, "Heartbeat", beat)
    client = ThreadClient(0, ("", 0), b"", heartbeat_interval=0.1)
    crash = last_words(theirs)
    assert (crash.fault, crash.summary) == (True, "its thread recycle-beat raised MemoryError")
    assert client.exited.wait(10.0)


def test_an_exception_is_told_even_if_its_words_are_no_unicode():
    summary, text = describe_error(ValueError("no such file: /data/\udcff.png"))
    encode(Crash(0, False, summary, None, text))
    assert summary == "ValueError: no such file: /data/\\udcff.png"


def test_a_worker_takes_over_as_soon_as_an_answer_names_it_as_leader(theirs):
    """What hooks log next is its to write."""
    client = ThreadClient(1, ("", 0), b"", heartbeat_interval=60.0)
    seen: list[int] = []
    client.on_leader = lambda: seen.append(client.member.leader)
    for number, leader in enumerate((0, 0, 1)):
        theirs.send(messages.Answer(number, {}, leader))
        client.arrive("barrier")
    assert seen == [0, 1]
