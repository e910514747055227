"""What a run plans for: ahead and in need, from a library, better ones in time, and for workers of unequal speed."""

import logging
import threading
from dataclasses import replace
from itertools import combinations

import pytest
from slow_planners import Failing
from support.planning_in_background import is_idle
from support.waiting import wait_for

from lightning_recycle import planning
from lightning_recycle.control.plans import plan_provider
from lightning_recycle.control.plans.plan_provider import PlanProvider, ReadyPlans
from lightning_recycle.planning.exact_planner import ExactPlanner
from lightning_recycle.planning.failure_distribution import contingencies, usual_limit
from lightning_recycle.planning.schedule import PlanResult, proven
from lightning_recycle.planning.timing import best_timing, operations_of

GRID = planning.Grid(3, 2, 4)
SLOW = planning.Worker(1, 1)
ALL: frozenset[planning.Worker] = frozenset()
MEASURED = {stage: {"F": 2.0, "B": 2.0, "W": 2.0, "REDUCE": 0.5, "STEP": 1.0} for stage in range(2)}


@pytest.fixture
def planner(open_planner) -> PlanProvider:
    planner = open_planner(GRID)
    planner.prepare()
    return planner


def adopted(planner: PlanProvider, slow: planning.Worker = SLOW) -> planning.Schedule:
    problem = replace(planner.plan(ALL, {}).problem, costs=planning.Costs.uniform(2, 2.0), worker_factors={slow: 2.0})
    schedule = planning.heuristic(problem)
    planner.adopt(schedule)
    return schedule


def test_an_adopted_plan_is_the_plan_for_its_workers(planner):
    schedule = adopted(planner)
    assert planner.plan(ALL, MEASURED) is schedule


def test_plans_for_failures_know_who_is_slow_and_what_operations_take(planner):
    adopted(planner)
    problem = planner.plan(frozenset({planning.Worker(0, 1)}), {}).problem
    assert problem.worker_factors == ((SLOW, 2.0),)
    assert problem.costs == planning.Costs.uniform(2, 2.0)


def test_the_speed_of_the_dead_does_not_matter(planner):
    adopted(planner)
    assert planner.plan(frozenset({SLOW}), {}).problem.worker_factors == ()


def test_another_process_in_the_place_of_a_slow_worker_is_not_taken_for_slow(planner):
    before = planner.plan(ALL, {})
    adopted(planner)
    planner.assumptions.forget([SLOW])
    assert planner.plan(ALL, {}) is before
    schedule = adopted(planner)
    planner.assumptions.forget([planning.Worker(0, 0)])
    assert planner.plan(ALL, {}) is schedule


def test_what_a_slow_worker_measured_counts_once(planner):
    """The times of a stage are those that its first worker measured, which may be the slow one."""
    slow = planning.Worker(0, 1)
    schedule = adopted(planner, slow)
    seconds = {0: MEASURED[0], 1: {name: 2 * t if name != "REDUCE" else t for name, t in MEASURED[1].items()}}
    timed = planner.assumptions.retime(schedule, seconds)
    assert timed.problem.worker_factors == ((slow, 2.0),)
    assert timed.problem.costs == replace(planning.Costs.uniform(2, 2.0, 2.0, 2.0, 0.5, 1.0))


def test_a_long_run_keeps_the_plans_that_it_needed_last_and_the_fault_free_one(planner, monkeypatch):
    before = planner.plan(ALL, {})
    monkeypatch.setattr(plan_provider, "_KEPT_OPERATIONS", 2 * 3 * GRID.global_microbatches * GRID.stages)
    first, second, third = (
        planning.heuristic(replace(before.problem, failed=frozenset(workers)))
        for workers in (
            [planning.Worker(0, 0)],
            [planning.Worker(0, 1)],
            [planning.Worker(1, 0), planning.Worker(0, 1)],
        )
    )
    planner.adopt(first)
    planner.adopt(second)
    assert planner.plan(first.failed, {}) is first
    planner.adopt(third)
    assert planner.plan(first.failed, {}) is first
    assert planner.plan(third.failed, {}) is third
    assert planner.plan(second.failed, {}) is not second
    assert planner.plan(ALL, {}) is before


def test_planning_ahead_for_every_failure_takes_one_plan_for_each_distribution(open_planner):
    asked: list[planning.Problem] = []

    class Counted(planning.HeuristicPlanner):
        def plan(self, problem: planning.Problem) -> planning.Schedule:
            asked.append(problem)
            return super().plan(problem)

    grid = planning.Grid(4, 3, 2)
    planner = open_planner(grid, Counted())
    planner.prepare()
    planner.plan_ahead(ALL, {})
    assert wait_for(lambda: is_idle(planner.background), 60)
    distributions = {planning.distribution_of(grid, problem.failed) for problem in asked}
    assert len(asked) == len(distributions) == 1 + 3, "none, one of 3 stages"
    for failed in map(frozenset, combinations(grid.workers(), 1)):
        schedule = planner.plan(failed, {})
        assert planner.source == "ahead"
        assert schedule.failed == failed
        planning.validate(schedule)
    planner.plan_ahead(frozenset({planning.Worker(2, 1)}), {})
    assert wait_for(lambda: is_idle(planner.background), 60)
    assert len(asked) == 4 + 3, "one more in any stage"


class Patient:
    """A planner that can be sent to another process, and finds better plans than :class:`Poor`."""

    def plan(self, problem: planning.Problem) -> planning.Schedule:
        return planning.heuristic(problem)


def one_at_a_time(problem: planning.Problem) -> planning.Schedule:
    """A valid plan, and a bad one."""
    alone = planning.heuristic(replace(problem, in_flight_limit=(1,) * problem.grid.stages), effort=0)
    return replace(alone, problem=problem)


class Poor(planning.HeuristicPlanner):
    """The planner at once, so bad that every other one finds better plans."""

    def plan(self, problem: planning.Problem) -> planning.Schedule:
        return one_at_a_time(problem)


def test_a_users_planner_plans_ahead_and_improves_what_the_heuristic_made_in_need(open_planner, monkeypatch):
    monkeypatch.setattr(plan_provider, "HeuristicPlanner", Poor)
    planner = open_planner(planning.Grid(2, 3, 4), Patient())
    planner.prepare()
    failed = frozenset({planning.Worker(0, 1)})
    needed = planner.plan(failed, {})
    assert planner.source == "made"
    assert needed == one_at_a_time(needed.problem)
    woken = threading.Event()
    planner.background.wake = woken.set
    planner.plan_ahead(failed, {}, running=needed)
    assert woken.wait(60)
    (better,) = planner.background.take()
    assert better.schedule == planning.heuristic(needed.problem)
    assert better.schedule.period < needed.period
    assert wait_for(lambda: is_idle(planner.background), 60)
    assert planner.plan(failed, {}) == better.schedule
    assert planner.source == "better"
    following = planner.plan(failed | {planning.Worker(1, 2)}, {})
    assert planner.source == "ahead"
    assert following.period == planning.heuristic(following.problem).period


def test_a_planner_that_fails_leaves_the_heuristics_plan_and_is_not_asked_again(open_planner, caplog):
    planner = open_planner(planning.Grid(2, 2, 2), Failing())
    for _ in range(2):
        planner.plan_ahead(ALL, {})
        assert wait_for(lambda: is_idle(planner.background), 60)
    messages = [record.getMessage() for record in caplog.records]
    assert (
        len([message for message in messages if "found no plan for the failure of (0, 0): no licence" in message]) == 1
    )
    planner.plan(frozenset({planning.Worker(1, 0)}), {})
    assert planner.source == "ahead"


def test_a_solver_is_asked_before_the_run_alone(open_planner, monkeypatch):
    asked: list[planning.Problem] = []

    def solve(planner: ExactPlanner, problem: planning.Problem) -> PlanResult:
        asked.append(problem)
        return proven(planning.heuristic(problem), planner.backend)

    monkeypatch.setattr(ExactPlanner, "solve", solve)
    planner = open_planner(planning.Grid(2, 2, 2), "highs")
    planner.prepare()
    schedule = planner.plan(ALL, {})
    planner.plan_ahead(ALL, {}, schedule)
    assert wait_for(lambda: is_idle(planner.background), 60)
    planner.plan(frozenset({planning.Worker(1, 0)}), {})
    assert planner.source == "ahead"
    assert asked == [schedule.problem]


def test_a_plan_of_the_library_needs_no_planner(open_planner, tmp_path, caplog):
    """Neither the fault-free one, nor the next ones; where there is none, it is said why."""
    base = planning.Problem(GRID, planning.Costs.uniform(2, 0.01))
    problems = [base, *contingencies(base, 1, 99), *contingencies(base, 2, 99)]
    limited = [replace(problem, in_flight_limit=usual_limit(GRID, problem.failed)) for problem in problems]
    planning.PlanLibrary(tmp_path, "heuristic").compute(limited)
    planner = open_planner(GRID, costs=base.costs, library=planning.PlanLibrary(tmp_path))
    planner.prepare()
    sources = {}
    with caplog.at_level(logging.WARNING):
        for failed in ((), *combinations(GRID.workers(), 1), *combinations(GRID.workers(), 2)):
            planner.plan(frozenset(failed), {})
            sources[failed] = planner.source
        assert set(sources.values()) == {"library"}
        assert caplog.records == []
        planner.plan(frozenset({planning.Worker(0, 0), planning.Worker(1, 0), planning.Worker(2, 1)}), {})
    assert planner.source == "made"
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "The plan library has none for (0, 0), (1, 0), (2, 1): no plan for these failures, "
    )


def test_at_least_one_schedule_is_kept_of_any_grid():
    assert ReadyPlans(planning.Grid(3, 4, 6)).capacity > 1000
    assert ReadyPlans(planning.Grid(64, 64, 1024)).capacity == 1


# ---------------------------------------------------------------------- layers that stages share


def test_plans_of_a_layout_with_shared_layers_are_made_for_micro_batches_that_differ(open_planner):
    grid, cuts = planning.Grid(3, 2, 8), (0, 2.4, 5)
    slots = (1.0,) * 5
    layers = planning.LayerCosts(slots, slots, slots)
    split, fused = (layers.variation(cuts, grid, split_backward=split_backward) for split_backward in (True, False))
    assert split is not None
    assert fused is not None
    seconds = {
        stage: {"F": costs, "B": costs, "W": costs, "REDUCE": 0.0, "STEP": 0.0}
        for stage, costs in enumerate(layers.costs(cuts).forward)
    }
    found = []
    for variation in (None, (split, fused)):
        planner = open_planner(grid, "heuristic", memory="3 micro-batches")
        planner.prepare()
        planner.assumptions.relaid(seconds, None, variation)
        planner.begin_anew(None)
        schedule = planner.plan(frozenset({planning.Worker(1, 1)}), seconds)
        planning.validate(schedule)
        codes, sequence = operations_of(schedule, schedule.problem, split)
        found.append(best_timing(codes, sequence).period)
    mean, varied = found
    assert varied < mean
