"""The coordinator's actor without Ray: what its runs are to be, and how it goes on where another process was killed."""

import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.waiting import wait_for

from lightning_recycle import RayReCycle
from lightning_recycle.control.coordinator.journal import Journal, Process, default_path
from lightning_recycle.control.joining.reception import Reception
from lightning_recycle.control.joining.run_config import Overrides
from lightning_recycle.control.plans.drift import DriftOptions
from lightning_recycle.control.protocol.coordinator_restart import Kept, Over
from lightning_recycle.control.protocol.messages import RunRequest, StopReason
from lightning_recycle.control.protocol.state import Failed
from lightning_recycle.engines import ray_actors
from lightning_recycle.engines.interfaces import free_port
from lightning_recycle.engines.ray_actors import CoordinatorActor, Observation, RayServing
from lightning_recycle.engines.ray_run import RayRun
from lightning_recycle.errors import ConfigurationError, ControlPlaneError
from lightning_recycle.planning.grid import Grid

GRID = Grid(2, 2, 6)
KEY = b"the key of this test"
WANTS = RunRequest(
    "fit",
    GRID,
    True,
    {
        "heartbeat.timeout": 7.0,
        "heartbeat.last_holder_timeout": 70.0,
        "planning.memory": 0.5,
        "planning.split_backward": True,
        "monitor.threshold": 0.2,
        "monitor.window": 9,
        "monitor.horizon_steps": 90,
    },
)


def wanting(**settings: Any) -> RunRequest:
    """A request with changed settings of planning."""
    return replace(
        WANTS, settings={**WANTS.settings, **{f"planning.{name}": value for name, value in settings.items()}}
    )


PATIENCE = 30.0


def serving(reception: Reception, **options: Any) -> RayServing:
    """What serves a ``RayReCycle`` with ``options``."""
    return RayServing(reception, RayReCycle(2, 2, 6, **options)._given, None)


@pytest.fixture
def reception() -> Any:
    made = Reception(("127.0.0.1", 0), KEY, workers=4)
    yield made
    made.close()


def test_the_script_says_what_ray_recycle_leaves_open(reception: Reception) -> None:
    terms = serving(reception).settle(WANTS)
    assert (terms.wants, terms.overruled) == (WANTS, ())
    assert terms.options().heartbeat_timeout == 7.0
    assert terms.options().drift == DriftOptions(0.2, 9, 90)


def test_arguments_of_ray_recycle_count_and_a_contradiction_is_said(reception: Reception) -> None:
    terms = serving(reception, timeout=9.0, split_backward=True, planner="heuristic").settle(WANTS)
    assert terms.wants.settings == {
        **WANTS.settings,
        "heartbeat.timeout": 9.0,
        "planning.planner": "heuristic",
    }
    assert terms.overruled == (
        "HeartbeatCallback(timeout=...) is 7.0 in the script, and 9.0 in RayReCycle(timeout=...)",
    )


@pytest.mark.parametrize(
    ("wants", "words"),
    [
        (replace(WANTS, grid=Grid(2, 2, 3)), r"a grid of 2 x 2 x 3, RayReCycle has 2 x 2 x 6 .*strategy_arguments"),
        (
            replace(WANTS, needs_launcher=("RecoveryOptions(move_workers=True)",)),
            r"\(move_workers=True\) needs a launching process",
        ),
        (wanting(memory=0.25), r"memory=\.\.\.\)\) is 0\.25 in this script, and 0\.5 in the run"),
    ],
)
def test_a_worker_whose_script_differs_is_told_why(reception: Reception, wants: RunRequest, words: str) -> None:
    serves = serving(reception)
    unfit = serves.difference(serves.settle(WANTS), wants)
    assert unfit is not None
    with pytest.raises(ConfigurationError, match=words):
        raise ConfigurationError(unfit.why)
    if wants.settings == WANTS.settings:  # the first one with such a script is told the same
        with pytest.raises(ConfigurationError, match=words):
            serves.settle(wants)


def test_a_script_that_leaves_the_micro_batches_open_takes_those_of_ray_recycle(reception: Reception) -> None:
    wants = replace(WANTS, grid=Grid(2, 2, 2), microbatches_given=False)
    assert serving(reception).settle(wants).grid == GRID


# ---------------------------------------------------------------------- another process


class _NoGauges:
    def __init__(self, name: str) -> None: ...


def started_again(monkeypatch: pytest.MonkeyPatch, folder: Path, kept: Kept) -> CoordinatorActor:
    """An actor where another one has written down ``kept``, whose workers are all gone."""
    monkeypatch.setattr(ray_actors, "RunGauges", _NoGauges)
    monkeypatch.setenv("XDG_STATE_HOME", str(folder))
    address = ("127.0.0.1", free_port("127.0.0.1"))
    before = Journal(default_path(address), KEY)
    before.write(kept, {rank: Process(f"token {rank}", 100 + rank, "node") for rank in kept.live})
    before.close()
    return CoordinatorActor(GRID, address, KEY, Overrides(2, 2, 6), "test")


def test_an_actor_that_is_started_again_asks_for_workers_of_the_same_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    actor = started_again(monkeypatch, tmp_path, Kept(3, (0, 1, 2), 0, has_resumed=True))
    seen = actor.observe(0, PATIENCE)
    assert seen == Observation(1, os.getpid(), positions=dict.fromkeys(range(4)), begun=True)
    actor.forget()
    assert not list(tmp_path.rglob("coordinator-*"))


def test_an_error_while_it_serves_is_not_called_one_of_its_start_and_closes_its_port(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(self: RayServing) -> bool:
        raise RuntimeError("no room on the device")

    monkeypatch.setattr(RayServing, "meet", fail)
    monkeypatch.setattr(ray_actors, "RunGauges", _NoGauges)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    address = ("127.0.0.1", free_port("127.0.0.1"))
    actor = CoordinatorActor(GRID, address, KEY, Overrides(2, 2, 6), "test")
    assert wait_for(lambda: actor.observe(-1, 0.0).failed, PATIENCE)
    ended = actor.outcome(0)
    assert ended is not None
    assert ended[0] == Failed("The coordinator failed: RuntimeError: no room on the device")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, PATIENCE).close()


def test_a_port_that_is_taken_is_an_error_of_its_start(monkeypatch: pytest.MonkeyPatch, reception: Reception) -> None:
    monkeypatch.setattr(ray_actors, "RunGauges", _NoGauges)
    actor = CoordinatorActor(GRID, reception.listener.address, KEY, Overrides(2, 2, 6), "test")
    assert wait_for(lambda: actor.observe(-1, 0.0).failed, PATIENCE)
    ended = actor.outcome(0)
    assert ended is not None
    assert "could not be started" in str(ended[0])


def test_results_of_a_process_that_was_killed_are_missed_with_a_word(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    actor = started_again(monkeypatch, tmp_path, Kept(3, (0, 1, 2, 3), 0, over=Over(StopReason.CRASHED, "it crashed")))
    assert actor.observe(0, PATIENCE).positions is None  # nobody is to be asked for
    assert wait_for(lambda: actor.observe(-1, 0.0).failed, PATIENCE)
    seen = actor.observe(-1, 0.0)
    assert (seen.over, seen.failed) == (1, True)
    assert actor.outcome(0) is None

    class Ray:
        """What RayRun asks it for an outcome."""

        exceptions: Any = type("exceptions", (), {"RayActorError": OSError})

        def get(self, reference: Any) -> Any:
            return reference

    run = RayRun("test", GRID, {}, Overrides(2, 2, 6), print, None)
    run._ray, run._outcomes = Ray(), []
    run._coordinator = type("Actor", (), {"outcome": type("Call", (), {"remote": staticmethod(actor.outcome)})})
    with pytest.raises(ControlPlaneError, match="before its results were taken"):
        run._take_outcomes(seen)
