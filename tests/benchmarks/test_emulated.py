from dataclasses import replace

import pytest
from emulated import CASES, measure

from lightning_recycle.planning import Grid

pytestmark = pytest.mark.long


def test_cases_with_a_goal_are_those_of_the_design():
    assert {case.name: case.planned_slots() for case in CASES if case.has_goal} == {
        "fault-free, 1F1B": 27,
        "(1, 2) dead, split backward": 29,
    }


def test_a_step_of_sleeping_operations_takes_about_as_long_as_planned():
    (case,) = (case for case in CASES if case.name == "fault-free, 1F1B")
    measured = measure(case, steps=2, warmup=1, slot=0.005)
    assert measured.slots == 27
    assert measured.seconds.low > 27 * 0.9 * 0.005  # nothing was skipped; how much longer it takes depends on the load
    assert measured.mean_sleep == pytest.approx(0.005, rel=0.2)


def test_a_run_finds_out_that_splitting_wins():
    """The layers sleep, so that slots are idle although all workers share the cores."""
    (case,) = (case for case in CASES if case.split_backward == "auto")
    measured = measure(replace(case, grid=Grid(2, 2, 4)), steps=2, warmup=40, slot=0.02)
    assert measured.slots < 15, "1F1B takes 15"
