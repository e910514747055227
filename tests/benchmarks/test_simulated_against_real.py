from dataclasses import replace

import pytest
import simulated_against_real

from lightning_recycle.control.monitoring.history import Event
from lightning_recycle.planning import Grid, Worker

EXAMPLE = simulated_against_real.Scenario("running example", Grid(3, 4, 6), ((Worker(1, 2), 5),), slot=1.0)
ABSENCE = simulated_against_real.Absence(rank=6, steps=5, into_step=9.0, seconds=100.0)  # rank 6 is worker (1, 2)
STEPS = 20
FAILURE = simulated_against_real.DETECTION + simulated_against_real.REGROUP
# Techniques; slots of a step, of the first one after the failure, of the others before the rejoin, of the first one
# after it; seconds for all steps.
EXPECTED = [
    # 5 steps, 9 s lost, detection and regrouping; 4 steps without the worker (the fourth ends 132 s after its death);
    # the rejoin; 11 steps.
    (False, False, 27, 33, 33, 27, 5 * 27 + 9 + FAILURE + 4 * 33 + simulated_against_real.REJOIN + 11 * 27),
    # The fourth ends 116 s after the death.
    (True, False, 21, 29, 29, 21, 5 * 21 + 9 + FAILURE + 4 * 29 + simulated_against_real.REJOIN + 11 * 21),
    # Steps overlap by two slots, but not the first one after a stop. The fourth ends 110 s after the death.
    (
        True,
        True,
        19,
        27 + 2,
        27,
        19 + 2,
        5 * 19 + 9 + FAILURE + 2 + 4 * 27 + simulated_against_real.REJOIN + 2 + 11 * 19,
    ),
]


def lived_through(usual, redone, degraded, entered):
    """The commits of a history with ``ABSENCE``, and its two stops."""
    times = [usual * (number + 1.0) for number in range(ABSENCE.steps)]
    died = times[-1] + ABSENCE.into_step
    times.append(died + FAILURE + redone)
    recovered = times[-1]
    while times[-1] < died + ABSENCE.seconds:  # a rejoin waits for the end of the step
        times.append(times[-1] + degraded)
    paused = times[-1]
    times.append(paused + simulated_against_real.REJOIN + entered)
    stops = ((died, recovered), (paused, times[-1]))
    while len(times) < STEPS:
        times.append(times[-1] + usual)
    return simulated_against_real.RealRun(tuple(times), (ABSENCE,), stops)


@pytest.mark.parametrize(("split_backward", "staggered", "usual", "redone", "degraded", "entered", "seconds"), EXPECTED)
def test_the_running_example_takes_what_a_hand_computes(
    split_backward, staggered, usual, redone, degraded, entered, seconds
):
    scenario = replace(EXAMPLE, split_backward=split_backward, staggered=staggered)
    result = simulated_against_real.simulated(scenario, [ABSENCE], 1000.0)
    assert simulated_against_real.seconds_for(result, 18 * STEPS) == pytest.approx(seconds, abs=1e-6)
    assert result.accounting.total == 12 * 1000 * 10**9
    assert result.accounting.failed == 100 * 10**9
    assert result.accounting.redone == 9 * 12 * 10**9

    real = lived_through(usual, redone, degraded, entered)
    assert real.seconds == pytest.approx(seconds)
    found = simulated_against_real.compare(scenario, real)
    assert found.ratio == pytest.approx(1.0)
    assert found.within_goal
    assert found.with_overhead > found.simulated
    assert [phase.name for phase in found.phases] == ["all work", "1 failed", "all work"]
    assert [stop.name for stop in found.stops] == ["failure", "rejoin"]
    assert sum(phase.steps for phase in found.phases) == STEPS - 2
    for each in (*found.phases, *found.stops):
        assert each.real == pytest.approx(each.simulated)


@pytest.mark.parametrize(("away", "degraded"), [(103.5, 4), (104.5, 5)])
def test_a_rejoin_waits_for_a_step_that_only_one_worker_has_begun(away, degraded):
    # The fourth step without the worker ends 110 s after its death; 6 s before, the first worker is through with it.
    result = simulated_against_real.simulated(EXAMPLE, [replace(ABSENCE, seconds=away - FAILURE)], 1000.0)
    seconds = 5 * 19 + 9 + FAILURE + 2 + degraded * 27 + simulated_against_real.REJOIN + 2 + 19
    assert simulated_against_real.seconds_for(result, 18 * (5 + degraded + 1)) == pytest.approx(seconds, abs=1e-6)


def test_a_simulated_run_that_is_too_short_is_refused():
    with pytest.raises(ValueError, match="not 360"):
        simulated_against_real.seconds_for(simulated_against_real.simulated(EXAMPLE, [], 100.0), 360)


def test_a_second_failure_falls_into_the_step_that_the_first_has_delayed():
    other = simulated_against_real.Absence(rank=1, steps=7, into_step=4.0, seconds=500.0)
    result = simulated_against_real.simulated(replace(EXAMPLE, staggered=False), [ABSENCE, other], 1000.0)
    died = 5 * 21 + 9 + FAILURE + 2 * 29 + 4
    assert [event.time for event in result.events] == pytest.approx([114, died, 214, died + 500])


def test_failures_and_rejoins_are_read_from_a_history():
    def step(number, time):
        return Event("step", time, 0, number, None, 1.0)

    history = [
        *(step(number, 1000.0 + number) for number in range(6)),
        Event("failure", 1005.5, 0, 6, (1, 2), 0.1),
        Event("regrouped", 1005.6, 1, 6),
        step(6, 1007.0),
        step(7, 1008.5),
        Event("paused", 1008.6, 1, 8),
        Event("regrouped", 1008.7, 2, 8),
        step(8, 1010.0),
        step(9, 1011.0),
    ]
    found = simulated_against_real.read_history(history, EXAMPLE.grid, {6: 1008.0})
    assert found.commits == pytest.approx((1, 2, 4, 5.5, 7, 8))  # since the commit of the last step of the warm-up
    (absence,) = found.absences
    assert (absence.rank, absence.steps) == (6, 2)
    assert (absence.into_step, absence.seconds) == (pytest.approx(0.4), pytest.approx(2.6))
    assert found.stops == (pytest.approx((2.4, 4)), pytest.approx((5.5, 7)))
    assert found.undisturbed == (pytest.approx((1, 1)), pytest.approx((1.5,)), pytest.approx((1,)))
