"""What a record amounts to: bounded however long it is."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_recycle.control.monitoring.history import Digest, Event, Rates


def step(number: int, time: float, seconds: float | None = 1.0, loss: float = 0.5) -> Event:
    return Event("step", time, 0, number, None, seconds, {"loss": loss})


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # on a busy machine
@given(st.lists(st.floats(0.0, 50.0), max_size=200), st.integers(1, 12))
def test_rates_cover_the_whole_run_and_count_every_step(gaps: list[float], limit: int) -> None:
    rates, now = Rates(1000.0, limit), 1000.0
    for gap in gaps:
        now += gap
        rates.step(now)
    series = rates.series(now)
    assert len(series) <= limit
    assert rates.began + len(series) * rates.width >= now
    passed = now - rates.began - (len(series) - 1) * rates.width
    steps = sum(series[:-1]) * rates.width + series[-1] * max(0.5, passed)
    assert steps == pytest.approx(len(gaps))


def test_a_million_events_are_kept_in_bounds() -> None:
    digest = Digest(4, 0.0)
    for number in range(20_000):
        digest.add(step(number, float(number)), 4, False)
        digest.add(Event("saved", float(number), 0, number), 4, False)
        digest.add(Event("failure", float(number), 0, number, (0, 0), 0.0, {"cause": "killed"}), 4, False)
    assert len(digest.events) <= 200
    assert len(digest.failures) <= 20
    assert digest.counts["saved"] == digest.counts["step"] == 20_000
    assert (digest.step, digest.loss) == (19_999, 0.5)


def test_the_time_of_a_step_is_that_of_the_present_plan_without_what_held_it_up() -> None:
    digest = Digest(4, 0.0)
    assert digest.step_seconds is None
    for number in range(3):
        digest.add(step(number, number + 1.0), 4, False)
    assert digest.step_seconds == 1.0
    digest.add(Event("resumed", 9.0, 1, 3, details={"plan": "ahead"}), 3, False)
    assert (digest.step_seconds, digest.found_by) == (None, "ahead")
    digest.add(step(3, 10.0, seconds=7.0), 3, False)  # with the recovery
    digest.add(step(4, 12.0, seconds=2.0), 3, False)
    assert digest.step_seconds == 2.0


def test_a_suspicion_lasts_until_it_is_cleared_or_proven() -> None:
    digest = Digest(4, 0.0)
    waits = {"cause": "silence", "seconds": 5.0, "waits": "it is the last"}
    for worker in ((0, 0), (0, 1)):
        digest.add(Event("suspected", 10.0, 0, 1, worker, None, waits), 4, False)
    assert digest.suspected == {(0, 0): (5.0, "silence"), (0, 1): (5.0, "silence")}
    digest.add(Event("cleared", 11.0, 0, 1, (0, 0), 6.0), 4, False)
    digest.add(Event("failure", 12.0, 0, 1, (0, 1), 0.0, {"cause": "silence"}), 3, False)
    assert digest.suspected == {}
