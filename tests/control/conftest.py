"""Coordinators for the tests with real sockets; workers are threads there, or processes where they die or stop."""

import threading
from collections.abc import Iterator

import pytest
from control_plane import SILENCE, ControlPlane
from support.waiting import wait_for

from lightning_recycle.control.coordinator import failure_detector


@pytest.fixture
def plane() -> Iterator[ControlPlane]:
    with ControlPlane() as plane:
        yield plane


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> Iterator[ControlPlane]:
    """One that evicts a worker after a second of silence, also while it starts."""
    monkeypatch.setattr(failure_detector, "_LEAST_START_TIMEOUT", SILENCE)
    with ControlPlane(heartbeat_timeout=SILENCE) as plane:
        yield plane


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """Threads of a connection would outlive their test, and be found by the one that looks for such threads."""
    yield
    assert wait_for(lambda: not [t for t in threading.enumerate() if t.name in ("recycle-beat", "recycle-receive")])
