"""Where a run's time went: scripted records, the simulator's own ledger as the judge, and any record whatever."""

import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_recycle.control.monitoring.history import PARTS, Event, Goodput, Phase
from lightning_recycle.simulation import Cause
from lightning_recycle.simulation.failures import as_ticks
from lightning_recycle.simulation.policy import Configuration, stopped
from lightning_recycle.simulation.simulated_run import Span, State, account

POSITIONS, USEFUL = 6, 4.0  # workers, and worker-seconds of F, B and W in a step


def test_the_causes_are_those_of_the_simulator_in_its_order():
    assert tuple(PARTS) == tuple(cause.value for cause in Cause)


def sums(account_: Goodput, now: float) -> dict[str, float]:
    return {cause: sum(by_phase.values()) for cause, by_phase in account_.seconds(now).items()}


class Run:
    """A record that is written by hand; the run begins at 100 s."""

    def __init__(self) -> None:
        self.account = Goodput(POSITIONS, 100.0)
        self.live = POSITIONS

    def at(self, time: float, kind: str, joining: bool = False, **fields: Any) -> None:
        self.account.happened(Event(kind, 100.0 + time, 0, 0, **fields), self.live, joining)

    def steps(self, begin: float, end: float, seconds: float) -> None:
        for number in range(1, round((end - begin) / seconds) + 1):
            self.at(begin + number * seconds, "step")

    def seconds(self, time: float) -> dict[str, dict[str, float]]:
        self.account.divide(USEFUL)
        return self.account.seconds(100.0 + time)


def scripted() -> Run:
    """10 s of start, 20 steps of 1 s, a death after 0.6 s of a step, 0.4 s of recovery, 8 steps of 1.25 s by five
    workers; then all wait 0.5 s for a replacement, and 10 steps of 1 s follow.
    """
    run = Run()
    run.at(9.9, "resumed", details={"redone": False})
    run.at(10.0, "regrouped")
    run.steps(10.0, 30.0, 1.0)
    run.account.divide(USEFUL)
    run.live = 5
    run.at(30.7, "failure", worker=(1, 0), seconds=0.1)  # it died at 30.6
    run.at(30.8, "resumed", details={"redone": True})
    run.at(31.0, "regrouped")
    run.steps(31.0, 41.0, 1.25)
    run.account.divide(USEFUL)
    run.at(41.0, "paused")
    run.live = 6
    run.at(41.1, "resumed", joining=True, details={"redone": False})
    run.at(41.2, "regrouped", joining=True)
    run.at(41.5, "rejoined")
    run.steps(41.5, 51.5, 1.0)
    return run


def test_a_scripted_record_is_accounted_for_as_the_simulator_would():
    def training(gpus: int, seconds: float) -> Configuration:
        return Configuration("train", seconds, 1, gpus, USEFUL)

    def span(begin: float, end: float, state: State, configuration: Configuration, live: int) -> Span:
        return Span(as_ticks(begin), as_ticks(end), state, "", configuration, live)

    six, five = training(6, 1.0), training(5, 1.25)
    spans = [
        span(0.0, 10.0, State.STOPPED, stopped("start"), 6),
        span(10.0, 30.0, State.TRAINING, six, 6),
        span(30.0, 30.6, State.LOST, six, 6),
        span(30.6, 31.0, State.PAUSED, five, 5),
        span(31.0, 41.0, State.TRAINING, five, 5),
        # The replacement lives from the pause on, in which it is given its state.
        span(41.0, 41.1, State.PAUSED, five, 5),
        span(41.1, 41.5, State.PAUSED, six, 6),
        span(41.5, 51.5, State.TRAINING, six, 6),
    ]
    simulated = account(spans, POSITIONS)
    measured = {cause: sum(by_phase.values()) for cause, by_phase in scripted().seconds(51.5).items()}
    assert measured == pytest.approx({cause.value: simulated.seconds(cause) for cause in Cause}, abs=1e-6)


def test_what_was_lost_is_told_by_phase():
    seconds = scripted().seconds(51.5)
    assert seconds["idle"]["starting"] == pytest.approx(60.0)
    assert seconds["redone"]["interrupted"] == pytest.approx(6 * 0.6)
    assert seconds["reconfiguring"] == pytest.approx({"recovering": 5 * 0.4, "joining": 5 * 0.1 + 6 * 0.4})
    assert seconds["failed"]["vacant"] == pytest.approx(0.4 + 10.0 + 0.1)
    assert seconds["useful"]["training"] == pytest.approx(38 * USEFUL)


def test_a_step_that_survives_the_failure_is_not_redone():
    run = Run()
    run.at(0.0, "regrouped")
    run.live = 5
    run.at(0.5, "failure", worker=(1, 0))
    run.at(0.6, "resumed", details={"redone": False})
    run.at(0.7, "regrouped")
    run.at(1.0, "step")
    seconds = run.seconds(1.0)
    assert seconds["redone"]["interrupted"] == 0.0
    assert seconds["useful"]["training"] + seconds["bubble"]["training"] == pytest.approx(6 * 0.5 + 5 * 0.3)


def test_silence_counts_from_its_beginning():
    """A hang shows seconds later: nobody trained in them."""
    run = Run()
    run.at(0.0, "regrouped")
    run.steps(0.0, 10.0, 1.0)
    run.at(15.5, "suspected", worker=(1, 0), details={"seconds": 5.0})
    run.at(15.5, "evicted", worker=(1, 0), details={"seconds": 5.0})
    run.live = 5
    run.at(15.5, "failure", worker=(1, 0))
    run.at(15.6, "resumed", details={"redone": True})
    run.at(16.0, "regrouped")
    seconds = run.seconds(16.0)
    assert seconds["reconfiguring"]["recovering"] == pytest.approx(5 * 5.5)
    assert seconds["redone"]["interrupted"] == pytest.approx(6 * 0.5)


def test_a_worker_that_was_waited_for_held_all_up():
    run = Run()
    run.at(0.0, "regrouped")
    run.at(1.0, "step")
    run.at(7.0, "suspected", worker=(0, 1), details={"seconds": 5.0, "waits": "it is the last"})
    run.at(9.0, "cleared", worker=(0, 1), seconds=7.0)
    run.at(10.0, "step")
    seconds = run.seconds(10.0)
    assert seconds["reconfiguring"]["recovering"] == pytest.approx(6 * 7.0)
    assert seconds["useful"]["training"] + seconds["bubble"]["training"] == pytest.approx(6 * 3.0)


def test_the_present_step_is_not_accounted_for_until_it_is_committed():
    """A failure may still show that it is lost, and a counter must not go back."""
    run = Run()
    run.at(0.0, "regrouped")
    run.at(1.0, "step")
    before = run.seconds(1.0)
    assert run.seconds(1.9) == before
    assert run.account.phase is Phase.TRAINING


def test_spares_are_idle():
    run = Run()
    run.at(0.0, "regrouped")
    run.account.spares_are(2, 101.0)
    run.account.spares_are(2, 103.0)
    run.account.spares_are(1, 104.0)
    assert run.seconds(6.0)["idle"]["spare"] == pytest.approx(2 * 3.0 + 1 * 2.0)


KINDS = ["step", "failure", "resumed", "regrouped", "paused", "rejoined", "suspected", "cleared", "evicted"]
KINDS += ["disturbance", "left", "replanned", "redone", "recovered", "saved", "stage_lost"]

ENTRIES = st.tuples(
    st.sampled_from(KINDS),
    st.floats(-1.0, 10.0),  # a clock may be set back
    st.integers(0, POSITIONS),
    st.booleans(),
    st.none() | st.floats(0.0, 20.0),
    st.booleans(),
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # on a busy machine
@given(st.lists(ENTRIES, max_size=30), st.floats(0.0, 50.0))
def test_whatever_happens_counters_only_grow_and_no_second_is_counted_twice(entries, useful):
    run, now, newest = Run(), 0.0, 0.0
    before = {cause: dict.fromkeys(phases, 0.0) for cause, phases in PARTS.items()}
    for kind, passed, live, joining, seconds, redone in entries:
        now, run.live = now + passed, live
        newest = max(newest, now)
        details = {"seconds": seconds or 0.0, "redone": redone}
        run.at(now, kind, joining, seconds=seconds, worker=(0, 0), details=details)
        run.account.divide(useful)
        after = run.account.seconds(100.0 + newest)
        for cause, by_phase in after.items():
            assert all(by_phase[phase] >= before[cause][phase] for phase in by_phase), cause
        before = after
    total = sum(sums(run.account, 100.0 + newest).values())
    assert total <= POSITIONS * newest * (1 + 1e-9) + 1e-6
    run.at(newest, "step")
    run.at(newest, "resumed")
    run.account.divide(0.0)
    run.at(newest, "step")
    run.account.divide(0.0)
    assert math.isclose(sum(sums(run.account, 100.0 + newest).values()), POSITIONS * newest, abs_tol=1e-6)
