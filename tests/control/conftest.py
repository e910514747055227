"""Coordinators for the tests with real sockets, whose workers are threads."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from control_plane import SILENCE, ControlPlane
from support.waiting import wait_for

from lightning_recycle.control.coordinator import failure_detector
from lightning_recycle.control.options import HeartbeatTimeouts
from lightning_recycle.control.plans.plan_provider import PlanProvider
from lightning_recycle.planning.grid import Grid
from lightning_recycle.planning.planner import PlanningOptions


@pytest.fixture
def plane() -> Iterator[ControlPlane]:
    with ControlPlane() as plane:
        yield plane


@pytest.fixture
def strict(monkeypatch) -> Iterator[ControlPlane]:
    """One that evicts a worker after a second of silence, also while it starts."""
    monkeypatch.setattr(failure_detector, "_MIN_START_TIMEOUT", SILENCE)
    with ControlPlane(heartbeat=HeartbeatTimeouts(SILENCE)) as plane:
        yield plane


@pytest.fixture
def open_planner() -> Iterator[Callable[..., PlanProvider]]:
    """Makes planners, which end with the test."""
    with contextlib.ExitStack() as stack:

        def make(
            grid: Grid, planner: Any = "heuristic", costs: Any = None, library: Any = None, **options: Any
        ) -> PlanProvider:
            planning = PlanningOptions(**{"planner": planner, "split_backward": True, **options})
            made = PlanProvider(grid, planning, costs, library)
            stack.callback(made.close)
            return made

        yield make


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """Threads of a connection would outlive their test, and be found by the one that looks for such threads."""
    yield
    assert wait_for(lambda: not [t for t in threading.enumerate() if t.name in ("recycle-beat", "recycle-receive")])
