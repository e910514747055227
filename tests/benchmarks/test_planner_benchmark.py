"""The planners against a judge that shares no code with them (benchmarks/planning_judge.py)."""

import importlib.util

import pytest
from planning_judge import HARD, judged, random_problem
from support.sampling import sampled

from lightning_recycle.planning import ExactPlanner, heuristic, lower_bound

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("ortools"), reason="the judge needs OR-tools")

# Some that the judge decides in a few seconds.
DECIDED = [4, 16, 20, 24]


@pytest.mark.parametrize("seed", sampled(DECIDED, 1))
def test_bounds_and_plans_agree_with_the_judge_s_optimum(seed):
    problem = random_problem(seed)
    schedule = heuristic(problem)
    optimum, bound = judged(problem, 60.0, schedule.period)
    assert lower_bound(problem) <= optimum * (1 + 1e-9)
    assert optimum <= schedule.period * (1 + 1e-9)
    if bound < optimum:
        pytest.skip("the judge did not finish on this machine")
    assert schedule.period <= 1.03 * optimum
    result = ExactPlanner("highs", time_limit=60.0, least_gap=0.0).improve(schedule)
    assert result.lower_bound <= optimum * (1 + 1e-9)
    if result.status == "optimal":
        assert result.schedule.period == pytest.approx(optimum)


@pytest.mark.parametrize("problem", HARD.values(), ids=list(HARD))
def test_a_hard_problem_is_one_for_which_a_solver_is_asked(problem):
    assert heuristic(problem).period > 1.01 * lower_bound(problem)
