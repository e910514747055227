"""Grids with more lanes than pipelines: the same micro-batches on more workers."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_recycle.errors import ConfigurationError, PlanningError
from lightning_recycle.planning import Costs, ExactPlanner, Grid, Problem, Technique, Worker, lower_bound, plan
from lightning_recycle.planning.failure_distribution import next_failures, normalized_problem
from lightning_recycle.planning.list_scheduling import one_f_one_b
from lightning_recycle.planning.plan_library import load_plan, save_plan
from lightning_recycle.planning.routing import renamed
from lightning_recycle.planning.validation import validate
from lightning_recycle.visualize.charts import gantt_svg


def loads(schedule: object, stage: int) -> list[int]:
    """The micro-batches of each live worker of a stage."""
    problem = schedule.problem
    routes = Counter(schedule.route(stage, m) for m in problem.grid.all_microbatches())
    return sorted(routes[worker] for worker in problem.live_workers(stage))


def test_a_grid_has_as_many_lanes_as_pipelines_unless_it_says_more():
    assert Grid(3, 4, 6) == Grid(3, 4, 6, 3)
    grid = Grid(3, 4, 6, lanes=5)
    assert (grid.num_workers, grid.global_microbatches, str(grid)) == (20, 18, "3 x 4 x 6 on 5 lanes")
    assert Worker(4, 3) in grid
    assert Worker(5, 0) not in grid
    assert {m.pipeline for m in grid.all_microbatches()} == {0, 1, 2}


@pytest.mark.parametrize(("lanes", "words"), [(2, "lanes=2"), (19, "there are 18 micro-batches for them")])
def test_lanes_for_fewer_pipelines_or_more_microbatches_than_there_are_are_refused(lanes, words):
    with pytest.raises(ConfigurationError, match=words):
        Grid(3, 4, 6, lanes=lanes)


@pytest.mark.parametrize("split", [False, True])
def test_the_period_falls_with_each_lane_as_the_bound_does(split):
    periods = []
    for lanes in range(3, 7):
        problem = Problem(Grid(3, 4, 8, lanes), Costs.uniform(4), technique=Technique(split_backward=split))
        schedule = plan(problem)
        assert max(loads(schedule, 2)) - min(loads(schedule, 2)) <= 1
        assert lower_bound(problem) <= schedule.period <= 1.05 * lower_bound(problem)
        periods.append(schedule.period)
    assert periods == sorted(periods, reverse=True)
    assert periods[-1] < (0.65 if split else 0.75) * periods[0]


@pytest.mark.parametrize("stages", [1, 3])
def test_vacant_lanes_change_nothing(stages):
    costs = Costs.uniform(stages)
    alone = plan(Problem(Grid(3, stages, 4), costs))
    vacant = frozenset(Worker(lane, stage) for lane in (3, 4) for stage in range(stages))
    schedule = plan(Problem(Grid(3, stages, 4, 5), costs, vacant))
    assert (schedule.workers, schedule.period) == (alone.workers, alone.period)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_whoever_is_there_every_microbatch_is_run_once_and_no_worker_has_more_than_its_share(data):
    pipelines, stages = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    microbatches = data.draw(st.integers(2, 4))
    lanes = data.draw(st.integers(pipelines, min(2 * pipelines + 1, pipelines * microbatches)))
    grid = Grid(pipelines, stages, microbatches, lanes)
    keep = [data.draw(st.integers(0, lanes - 1)) for _ in range(stages)]
    some = data.draw(st.sets(st.sampled_from(grid.workers())))
    failed = frozenset(worker for worker in some if worker.pipeline != keep[worker.stage])
    problem = Problem(grid, Costs.uniform(stages, communication=0.25), failed)
    schedule = plan(problem)
    validate(schedule)
    assert schedule.period >= lower_bound(problem) - 1e-9
    for stage in range(stages):
        live = len(problem.live_workers(stage))
        assert max(loads(schedule, stage)) <= -(-grid.global_microbatches // live) + 1


def test_a_plan_for_one_lost_worker_serves_for_any_other_of_its_stage():
    problem = Problem(Grid(2, 2, 4, 3), Costs.uniform(2), frozenset({Worker(2, 1)}))
    schedule = plan(problem)
    for lane in (0, 1):
        other = renamed(schedule, Problem(problem.grid, problem.costs, frozenset({Worker(lane, 1)})))
        validate(other)
        assert other.period == schedule.period
        assert Worker(lane, 1) not in other.workers


def test_failures_are_distributed_over_all_lanes():
    problem = Problem(Grid(2, 3, 4, 4), Costs.uniform(3))
    assert len(next_failures(problem)) == 3
    assert len(normalized_problem(problem, 7).failed) == 7
    with pytest.raises(PlanningError, match="failures=10 leaves a stage"):
        normalized_problem(problem, 10)


def test_a_plan_file_keeps_the_lanes(tmp_path):
    for grid in (Grid(2, 2, 4, 3), Grid(2, 2, 4)):
        schedule = plan(Problem(grid, Costs.uniform(2)))
        path = tmp_path / f"{grid.lanes}.json"
        save_plan(path, schedule)
        assert load_plan(path).schedule.problem == schedule.problem


def test_1f1b_is_refused_by_name():
    with pytest.raises(PlanningError, match="1F1B runs each pipeline on a lane of its own, not 2 x 2 x 4 on 3 lanes"):
        one_f_one_b(Problem(Grid(2, 2, 4, 3), Costs.uniform(2)))


def test_an_exact_planner_finds_nothing_better_than_what_there_is():
    problem = Problem(Grid(2, 2, 2, 3), Costs.uniform(2))
    schedule = ExactPlanner("highs", time_limit=20).plan(problem)
    validate(schedule)
    assert lower_bound(problem) <= schedule.period <= plan(problem).period


def test_a_picture_has_a_row_for_each_worker():
    shown = gantt_svg(plan(Problem(Grid(2, 2, 4, 3), Costs.uniform(2))))
    assert all(f"worker ({lane}, {stage})" in shown for lane in range(3) for stage in range(2))
