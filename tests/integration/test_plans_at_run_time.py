"""Profiles, plan libraries and planners as the strategy uses them."""

import json
from pathlib import Path

import pytest
from support.models import Regression, dataset
from support.training import exact_fit, failures, fit

from lightning_recycle import ConfigurationError
from lightning_recycle.callbacks import Fault
from lightning_recycle.planning import Problem, Schedule, Worker, one_f_one_b, plan
from lightning_recycle.planning.profile import load_profile


def test_the_first_steps_measure_a_profile_that_plans_later_runs(tmp_path: Path) -> None:
    exact_fit(Regression().double(), 2, 2, default_root_dir=tmp_path, strategy={"profile": "auto"})
    path = tmp_path / "profile.json"
    profile = load_profile(path)
    assert len(profile.stages) == 2
    assert all(
        s.forward > 0 and s.backward_input > 0 and s.backward_weight > 0 and s.optimizer > 0 for s in profile.stages
    )
    # Stage 0 ends in a layer of width 16: 2 samples of float64.
    assert profile.stages[0].output_bytes == 2 * 16 * 8
    assert profile.stages[0].activation_bytes >= 2 * (8 + 16) * 8  # the inputs of its two linear layers
    assert 0 < profile.latency < 0.1
    assert profile.bandwidth > 1e6
    run = fit(Regression().double(), 2, 2, strategy={"profile": path})
    assert run.strategy.schedules[0].problem.costs.communication > 0
    with pytest.raises(ConfigurationError, match=r"2 stages, the grid 3: .*pipeline_parallel_size=2"):
        fit(Regression().double(), 2, 3, strategy={"profile": path})


def test_plans_are_taken_from_the_library_and_added_to_it(tmp_path: Path) -> None:
    library = tmp_path / "plans"
    fit(Regression().double(), 2, 2, data=dataset(24 * 60), max_steps=60, strategy={"plan_library": library})
    stored = sorted(library.glob("*.json"))
    assert len(stored) == 5  # fault-free, and each of the four workers lost
    times = [path.stat().st_mtime_ns for path in stored]
    run = exact_fit(Regression().double(), 2, 2, [Fault("kill", 1, 0, step=5)], strategy={"plan_library": library})
    assert failures(run) == [(1, 0)]
    assert [path.stat().st_mtime_ns for path in stored] == times


def test_a_damaged_plan_is_reported_and_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    library = tmp_path / "plans"
    fit(Regression().double(), 2, 2, strategy={"plan_library": library})
    for path in library.glob("*.json"):
        path.write_text(json.dumps({"plan": "none"}))
    exact_fit(Regression().double(), 2, 2, [Fault("kill", 1, 0, step=5)], strategy={"plan_library": library})
    assert "not used and will be computed again" in caplog.text


class OneByOne:
    """A planner of a user's: 1F1B while nothing fails."""

    def plan(self, problem: Problem) -> Schedule:
        return plan(problem) if problem.failed else one_f_one_b(problem)


def test_a_users_planner_is_asked(tmp_path: Path) -> None:
    run = exact_fit(Regression().double(), 2, 2, [Fault("kill", 0, 0, step=5)], strategy={"planner": OneByOne()})
    assert not run.strategy.schedules[0].problem.technique.decoupled
    assert run.strategy.schedules[1].failed == {Worker(0, 0)}
