"""The report, computed from histories made by hand."""

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from lightning_recycle.control.monitoring.history import Event
from lightning_recycle.planning import Costs, Grid, Problem, Schedule, Worker, heuristic

from report import (
    Failure,
    Losses,
    Phase,
    find_failures,
    find_phases,
    read_losses,
    render,
    summarize_losses,
    write_pictures,
)


def failure(died: float, detected: float, worker: tuple[int, int], step: int) -> Event:
    return Event("failure", detected, 0, step, worker, detected - died, {"kind": "kill", "cause": "signal 9"})


HISTORY = [
    Event("regrouped", 99.0, 0, 0, details={"roster": (0, 1, 2, 3)}),
    Event("step", 100.0, 0, 0, seconds=3.0),
    Event("step", 100.2, 0, 1, seconds=0.2),
    Event("step", 100.6, 0, 2, seconds=0.4),
    Event("step", 100.8, 0, 3, seconds=0.2),
    failure(100.9, 100.91, (1, 0), step=4),
    Event("regrouped", 101.0, 1, 4, seconds=0.1, details={"roster": (0, 1, 3)}),
    Event("step", 101.4, 1, 4, seconds=0.6),
    Event("recovered", 101.4, 1, 4, seconds=0.5),
    Event("step", 101.9, 1, 5, seconds=0.5),
]


@pytest.fixture(scope="module")
def schedules() -> list[Schedule]:
    grid, costs = Grid(2, 2, 4), Costs.uniform(2)
    return [heuristic(Problem(grid, costs)), heuristic(Problem(grid, costs, failed=frozenset({Worker(1, 0)})))]


def rendered(*arguments: Any) -> str:
    buffer = io.StringIO()
    Console(width=120, file=buffer).print(render(*arguments))
    return buffer.getvalue()


def test_failure_reports_the_times_of_what_followed():
    (found,) = find_failures(HISTORY)
    assert (found.worker, found.kind, found.cause, found.step) == ((1, 0), "kill", "signal 9", 4)
    assert found.detected_after == pytest.approx(0.01)
    assert found.regrouped_after == pytest.approx(0.1)
    assert found.recovered_after == pytest.approx(0.5)


def test_two_failures_at_once_are_detected_each_and_recovered_together():
    history = [failure(10.0, 10.4, (0, 1), step=2), failure(10.1, 10.5, (1, 0), step=2), Event("recovered", 11.0, 1, 2)]
    first, second = find_failures(history)
    assert (first.detected_after, second.detected_after) == (pytest.approx(0.4), pytest.approx(0.4))
    assert (first.recovered_after, second.recovered_after) == (pytest.approx(1.0), pytest.approx(0.9))
    (found,) = find_failures(history[:1])  # it ended the run
    assert (found.regrouped_after, found.recovered_after) == (None, None)


def test_phases_are_medians_without_the_first_step_of_a_generation(schedules):
    assert [phase.steps for phase in find_phases(HISTORY[:7], schedules)] == [4], "the second has committed nothing"
    assert find_phases(HISTORY, schedules) == [
        Phase(0, live_workers=4, steps=4, step_seconds=0.2, planned_seconds=schedules[0].period),
        Phase(1, live_workers=3, steps=2, step_seconds=0.5, planned_seconds=schedules[1].period),
    ]


def test_phase_without_a_steady_step_or_a_schedule_says_so():
    assert find_phases(HISTORY[1:2], []) == [Phase(0, None, 1, None, None)]
    assert find_phases(HISTORY[:2], []) == [Phase(0, 4, 1, None, None)]


def test_phase_takes_the_newest_schedule_of_its_live_workers(schedules):
    replanned = heuristic(replace(schedules[0].problem, costs=Costs.uniform(2, forward=2.0)))
    assert find_phases(HISTORY, [*schedules, replanned])[0].planned_seconds == replanned.period


def test_losses_are_those_of_the_first_step_and_the_mean_of_the_last(tmp_path):
    file = tmp_path / "metrics.csv"
    file.write_text("epoch,step,train_loss,other\n0,0,5.0,\n0,1,4.0,\n0,1,,1\n0,2,3.0,\n0,3,2.0,\n")
    losses = read_losses(file)
    assert losses == {0: 5.0, 1: 4.0, 2: 3.0, 3: 2.0}
    assert summarize_losses(losses, window=2) == Losses(first=5.0, last=2.5)
    assert summarize_losses(read_losses(tmp_path / "missing.csv")) is None


def test_report_shows_the_failure_and_both_rates(schedules):
    text = rendered(summarize_losses({0: 5.5, 4: 2.0}), find_failures(HISTORY), find_phases(HISTORY, schedules), 1000)
    for shown in ("5.500", "pipeline 1, stage 0", "signal 9", "10 ms", "500 ms", "5.00", "5,000", "2.00", "2,000"):
        assert shown in text


def test_report_of_unknown_times_shows_dashes():
    text = rendered(None, [Failure(None, "exception", "?", 3, None, None, None)], [Phase(0, None, 1, None, None)], 1)
    assert "exception" in text
    assert "-" in text
    assert rendered(None, [], [], 1000).strip() == ""


def test_pictures_show_the_fault_free_and_the_rerouted_schedule(schedules, tmp_path):
    (svg,) = write_pictures(schedules, tmp_path)
    assert svg == tmp_path / "schedules.svg"
    assert "fault-free" in svg.read_text()
    assert "without (1, 0)" in svg.read_text()


def test_a_run_without_a_failure_has_one_schedule(schedules, tmp_path):
    assert [path.suffix for path in write_pictures(schedules[:1], tmp_path)] == [".svg"]
    assert "without" not in (tmp_path / "schedules.svg").read_text()
    assert write_pictures([], tmp_path) == []
