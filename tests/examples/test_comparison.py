"""The comparison, computed from histories made by hand."""

import io
from typing import Any

import pytest
from rich.console import Console

from lightning_recycle.control.monitoring.history import Event

from comparison import Measured, measure, render_comparison


def step(number: int, time: float, generation: int = 0, seconds: float = 1.0) -> Event:
    return Event("step", time, generation, number, seconds=seconds)


def regrouped(time: float, generation: int, *roster: int) -> Event:
    return Event("regrouped", time, generation, 0, details={"roster": roster})


def lost(time: float, number: int, generation: int = 1) -> Event:
    return Event("failure", time, generation, number, (1, 0), 0.25, {"kind": "kill", "cause": "signal 9"})


FAULT_FREE = [regrouped(0.0, 0, 0, 1, 2, 3), step(0, 5.0), step(1, 6.0), step(2, 7.0), step(3, 8.0)]
FAILURE = [
    *FAULT_FREE[:3],
    lost(6.5, 2),
    Event("redone", 6.5, 1, 2),
    regrouped(6.75, 1, 0, 1, 3),
    step(2, 8.25, 1, 2.25),
    step(3, 10.25, 1, 2.0),
]
REJOIN = [*FAILURE, regrouped(10.5, 2, 0, 1, 2, 3), step(4, 11.5, 2, 1.25), step(5, 12.75, 2, 1.25)]
RESTART = [
    *FAULT_FREE[:4],  # checkpoint after step 0; steps 1 and 2 are committed, 3 is under way
    lost(7.5, 3),
    lost(7.5, 3),
    Event("stage_lost", 7.5, 1, 3),
    regrouped(9.0, 0, 0, 1, 2, 3),
    step(1, 11.0),
    step(2, 12.0),
    step(3, 13.0),
]
LOSSES = {0: 3.0, 1: 2.0}


def test_fault_free_run_has_one_step_time_and_loses_nothing():
    assert measure("fault-free", FAULT_FREE, LOSSES) == Measured("fault-free", 4, 1.0, None, 0, None, 3.0, 2.0)


def test_failure_is_one_step_again_and_the_time_until_it_is_committed():
    assert measure("failure", FAILURE, LOSSES) == Measured("failure", 3, 1.0, 2.0, 1, 2.0, 5.25, 2.0)


def test_rejoin_ends_with_all_workers_and_their_step_time():
    found = measure("rejoin", REJOIN, {})
    assert (found.workers, found.step_after, found.redone, found.last_loss) == (4, 1.25, 1, None)


def test_restart_repeats_what_the_checkpoint_did_not_know():
    found = measure("restart", RESTART, LOSSES)
    assert found.redone == 3
    assert found.stalled == pytest.approx(13.0 - 7.25)
    assert (found.workers, found.total) == (4, 8.0)


def test_step_that_was_rolled_forward_is_not_counted_as_redone():
    history = [event for event in FAILURE if event.kind != "redone"]
    assert measure("failure", history, {}).redone == 0


def rendered(*runs: Measured) -> str:
    buffer = io.StringIO()
    Console(width=80, file=buffer).print(render_comparison(runs))
    return buffer.getvalue()


def test_table_fits_a_terminal_and_compares_with_the_first_run():
    histories: dict[str, Any] = {"fault-free": FAULT_FREE, "failure": FAILURE, "rejoin": REJOIN, "restart": RESTART}
    runs = [measure(name, history, LOSSES) for name, history in histories.items()]
    text = rendered(*runs)
    for shown in (*histories, "1000 ms", "2000 ms", "5.75 s", "5.2 s", "x 1.75", "2.00000", "0.0e+00"):
        assert shown in text
    assert "…" not in text


def test_table_without_losses_or_failure_shows_dashes():
    text = rendered(measure("fault-free", FAULT_FREE, {}), measure("failure", FAULT_FREE, {}))
    assert "-" in text
    assert "restart" not in text
