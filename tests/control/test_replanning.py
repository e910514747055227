"""What a run plans for once its workers turned out to be of unequal speed."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from lightning_recycle.control.plans import replanning
from lightning_recycle.control.plans.replanning import RunPlanner, schedules_kept
from lightning_recycle.planning import Costs, Grid, Schedule, Technique, Worker, heuristic

GRID = Grid(3, 2, 4)
SLOW = Worker(1, 1)
ALL: frozenset[Worker] = frozenset()
MEASURED = {stage: {"F": 2.0, "B": 2.0, "W": 2.0, "REDUCE": 0.5, "STEP": 1.0} for stage in range(2)}


@pytest.fixture
def planner() -> Iterator[RunPlanner]:
    planner = RunPlanner(GRID, "heuristic", Technique())
    planner.prepare()
    yield planner
    planner.close()


def adopted(planner: RunPlanner, slow: Worker = SLOW) -> Schedule:
    problem = replace(planner.plan(ALL, {}).problem, costs=Costs.uniform(2, 2.0), worker_factors={slow: 2.0})  # type: ignore[arg-type]
    schedule = heuristic(problem)
    planner.adopt(schedule)
    return schedule


def test_an_adopted_plan_is_the_plan_for_its_workers(planner: RunPlanner) -> None:
    schedule = adopted(planner)
    assert planner.plan(ALL, MEASURED) is schedule


def test_plans_for_failures_know_who_is_slow_and_what_operations_take(planner: RunPlanner) -> None:
    adopted(planner)
    problem = planner.plan(frozenset({Worker(0, 1)}), {}).problem
    assert problem.worker_factors == ((SLOW, 2.0),)
    assert problem.costs == Costs.uniform(2, 2.0)


def test_the_speed_of_the_dead_does_not_matter(planner: RunPlanner) -> None:
    adopted(planner)
    assert planner.plan(frozenset({SLOW}), {}).problem.worker_factors == ()


def test_another_process_in_the_place_of_a_slow_worker_is_not_taken_for_slow(planner: RunPlanner) -> None:
    before = planner.plan(ALL, {})
    adopted(planner)
    planner.forget([SLOW])
    assert planner.plan(ALL, {}) is before
    schedule = adopted(planner)
    planner.forget([Worker(0, 0)])
    assert planner.plan(ALL, {}) is schedule


def test_what_a_slow_worker_measured_counts_once(planner: RunPlanner) -> None:
    """The times of a stage are those that its first worker measured, which may be the slow one."""
    slow = Worker(0, 1)
    schedule = adopted(planner, slow)
    seconds = {0: MEASURED[0], 1: {name: 2 * t if name != "REDUCE" else t for name, t in MEASURED[1].items()}}
    timed = planner.retime(schedule, seconds)
    assert timed.problem.worker_factors == ((slow, 2.0),)
    assert timed.problem.costs == replace(Costs.uniform(2, 2.0, 2.0, 2.0, 0.5, 1.0))


def test_a_long_run_keeps_the_plans_that_it_needed_last_and_the_fault_free_one(
    planner: RunPlanner, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = planner.plan(ALL, {})
    monkeypatch.setattr(replanning, "_KEPT_OPERATIONS", 2 * 3 * GRID.global_microbatches * GRID.stages)
    first, second, third = (
        heuristic(replace(before.problem, failed=frozenset({worker})))
        for worker in (Worker(0, 0), Worker(0, 1), Worker(1, 0))
    )
    planner.adopt(first)
    planner.adopt(second)
    assert planner.plan(first.failed, {}) is first
    planner.adopt(third)
    assert planner.plan(first.failed, {}) is first
    assert planner.plan(second.failed, {}) is not second
    assert planner.plan(third.failed, {}) is third
    assert planner.plan(ALL, {}) is before


def test_at_least_one_schedule_is_kept_of_any_grid() -> None:
    assert schedules_kept(Grid(3, 4, 6)) > 1000
    assert schedules_kept(Grid(64, 64, 1024)) == 1
