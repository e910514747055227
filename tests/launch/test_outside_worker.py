"""How long a worker from outside tries to reach its coordinator."""

import errno
import logging
import socket
import time

import pytest

from lightning_recycle.control.network.connection import Refused, VersionMismatch
from lightning_recycle.engines.worker_environment import check_workers_environment
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.launch import worker_process

PASSING = [
    ConnectionRefusedError("nobody listens yet"),
    socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
    OSError(errno.EHOSTUNREACH, "No route to host"),
    TimeoutError("timed out"),
]


@pytest.fixture
def paused(monkeypatch) -> list[float]:
    """The pauses between attempts, which take no time here."""
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    return pauses


@pytest.mark.parametrize("error", PASSING, ids=lambda error: type(error).__name__)
def test_what_may_pass_is_waited_for_at_growing_intervals(error, paused, caplog):
    attempts = iter([error] * 8)

    def connect() -> str:
        for failure in attempts:
            raise failure
        return "connected"

    with caplog.at_level(logging.WARNING):
        assert worker_process.retry_connecting(connect, 60.0, "node:1") == "connected"
    assert len(paused) == 8
    assert paused[0] <= 0.2 < 1.0 <= paused[-1] <= 2.0
    assert len(caplog.records) == 1, "said once"
    assert "No coordinator can be reached at node:1 yet" in caplog.text


def test_after_the_deadline_the_newest_error_is_raised(paused):
    def connect() -> None:
        raise ConnectionRefusedError("still nobody")

    with pytest.raises(ConnectionRefusedError, match="still nobody"):
        worker_process.retry_connecting(connect, 0.0, "node:1")
    assert paused == []


@pytest.mark.parametrize("error", [Refused("another key"), VersionMismatch("another version")])
def test_what_does_not_pass_is_raised_at_once(error, paused):
    def connect() -> None:
        raise error

    with pytest.raises(type(error)):
        worker_process.retry_connecting(connect, 60.0, "node:1")
    assert paused == []


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf"])
def test_how_long_to_try_is_a_number_of_seconds(text, monkeypatch):
    monkeypatch.setenv("RECYCLE_CONNECT_SECONDS", text)
    with pytest.raises(ConfigurationError, match=f"RECYCLE_CONNECT_SECONDS='{text}'"):
        check_workers_environment()
