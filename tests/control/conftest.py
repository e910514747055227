"""Coordinators for the tests with real sockets; workers are threads there, or processes where they die or stop."""

from collections.abc import Iterator

import pytest
from control_plane import SILENCE, ControlPlane

from lightning_recycle.control import watch


@pytest.fixture
def plane() -> Iterator[ControlPlane]:
    with ControlPlane() as plane:
        yield plane


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> Iterator[ControlPlane]:
    """One that evicts a worker after a second of silence, also while it starts."""
    monkeypatch.setattr(watch, "_LEAST_START_TIMEOUT", SILENCE)
    with ControlPlane(heartbeat_timeout=SILENCE) as plane:
        yield plane
