"""The table of workers: who cannot be reached is lost, but what it has said counts."""

import socket
from typing import Any

import pytest

from lightning_recycle.control.coordinator.worker_table import WorkerTable
from lightning_recycle.control.network.connection import FrameBuffer, NonBlockingConnection, encode
from lightning_recycle.control.network.listener import EventLoop
from lightning_recycle.control.protocol.messages import (
    FROM_WORKERS,
    Crash,
    MembershipConfirmed,
    MembershipQuery,
    Process,
)


@pytest.mark.parametrize("answers", [0, 1, 1000])
def test_last_words_that_came_with_what_could_not_be_answered_count(answers):
    """Or the exception of a user's code ends a worker, and the others train on."""
    crash = Crash(0, False, "ValueError: bad", b"", "Traceback")
    heard: list[Any] = []
    lost: list[tuple[int, str]] = []

    def on_messages(rank: int) -> None:
        while rank in table.connections and (message := connection.inbox.take()) is not None:
            heard.append(message)
            if isinstance(message, MembershipQuery):
                table.post([rank], encode(MembershipConfirmed(message.number)))
                table.lose_unreachable()

    def on_lost(rank: int, cause: str) -> None:
        table.drop(rank)
        lost.append((rank, cause))

    loop = EventLoop(lambda: None)
    table = WorkerTable(loop, on_messages, on_lost, {})
    here, there = socket.socketpair()
    connection = NonBlockingConnection(here, FrameBuffer(FROM_WORKERS))
    table.connect(0, connection, Process("", 1, ""))
    asked = [MembershipQuery(0, number) for number in range(answers)]
    there.sendall(b"".join(map(encode, [*asked, crash])))
    there.close()
    for _ in range(2):
        loop.dispatch(loop.select(0.0))
    loop.close()
    assert heard == [*asked, crash]
    assert lost == [(0, "its connection to the coordinator broke")]


def test_any_number_of_workers_may_be_found_lost_at_once():
    """As when a switch fails: each loss is told to workers that cannot be reached either."""
    lost: list[int] = []

    def on_lost(rank: int, cause: str) -> None:
        table.drop(rank)
        lost.append(rank)
        table.post([*table.connections], encode(MembershipConfirmed(0)))
        table.lose_unreachable()

    loop = EventLoop(lambda: None)
    table = WorkerTable(loop, lambda rank: None, on_lost, {})
    for rank in range(400):
        here, there = socket.socketpair()
        table.connect(rank, NonBlockingConnection(here, FrameBuffer(FROM_WORKERS)), Process("", 1, ""))
        there.close()
    loop.dispatch(loop.select(0.0))
    loop.close()
    assert sorted(lost) == list(range(400))
