"""Nothing plans on once a run is over."""

import threading

import pytest
from support.waiting import wait_for

from lightning_recycle.control.plans.run_planner import RunPlanner
from lightning_recycle.planning import Costs, Grid, Problem, Schedule, Technique, plan
from lightning_recycle.planning.cancellation import Cancelled, cancelled_by

LARGE = Grid(8, 8, 32)
SMALL = Grid(2, 2, 2)


class Slow:
    """A planner that needs a minute for each plan: it looks for a good one again and again."""

    def __init__(self) -> None:
        self.began = threading.Event()

    def plan(self, problem: Problem) -> Schedule:
        self.began.set()
        for _ in range(100_000):
            found = plan(problem)
        return found


def test_a_planner_that_is_closed_leaves_no_thread() -> None:
    slow = Slow()
    planner = RunPlanner(SMALL, slow, Technique())
    planner.plan_ahead(frozenset(), {})
    assert slow.began.wait(60)
    planner.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "recycle-plan-ahead"]


def test_a_closed_planner_that_has_nothing_to_do_leaves_no_thread() -> None:
    planner = RunPlanner(SMALL, "heuristic", Technique())
    planner.plan_ahead(frozenset(), {})
    assert wait_for(lambda: planner._ahead.idle, 60)
    planner.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "recycle-plan-ahead"]


def plan_again_and_again(problem: Problem, planner: str) -> None:
    while True:
        plan(problem, planner)


@pytest.mark.parametrize(("grid", "planner"), [(LARGE, "heuristic"), (Grid(3, 4, 6), "highs")])
def test_what_is_not_wanted_is_given_up(grid: Grid, planner: str) -> None:
    unwanted = threading.Event()
    threading.Timer(0.2, unwanted.set).start()
    with cancelled_by(unwanted), pytest.raises(Cancelled):
        plan_again_and_again(Problem(grid, Costs.uniform(grid.stages)), planner)
