"""Compact schedules: one lane's plan is that of all lanes, and equal to the list of all operations in every answer."""

import json
import pickle
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_properties import problems

from lightning_recycle import planning
from lightning_recycle.errors import PlanningError
from lightning_recycle.planning import timing
from lightning_recycle.planning.failure_distribution import next_failures
from lightning_recycle.planning.plan_library import plan_to_json, read_plan
from lightning_recycle.planning.program import worker_program
from lightning_recycle.planning.routing import (
    CompactSchedule,
    Lane,
    LanePlaces,
    compact,
    lane_problem,
    lanes_of,
    renamed,
)
from lightning_recycle.planning.schedule import staggered_period

CLOSE = 1e-6
EFFORT = 500
LARGE = planning.Grid(256, 64, 256)
UNEQUAL = planning.Costs.uniform(64, 1.0, 1.1, 0.9, communication=0.1)


def plan_by_lanes(problem: planning.Problem) -> CompactSchedule:
    return compact(problem, Lane.of(planning.heuristic(lane_problem(problem), EFFORT)))


@st.composite
def compact_schedules(draw: st.DrawFn) -> CompactSchedule:
    return plan_by_lanes(replace(draw(problems()), worker_factors=()))


@settings(max_examples=30, deadline=None)
@given(compact_schedules())
def test_it_answers_as_the_list_of_all_its_operations_does(schedule):
    problem, every = schedule.problem, schedule.expand()
    planning.validate(every)
    planning.validate(schedule)
    assert type(every) is planning.Schedule
    assert dict(schedule.workers) == every.workers
    assert schedule.live_workers == every.live_workers
    assert abs(schedule.makespan - every.makespan) < CLOSE
    if problem.technique.staggered:
        assert abs(schedule.period - staggered_period(every.workers)) < CLOSE
    assert schedule.num_operations == sum(map(len, every.workers.values()))
    for worker in every.live_workers:
        assert schedule.program(worker) == every.program(worker)
        assert schedule.peak_in_flight(worker) == every.peak_in_flight(worker)
        assert worker_program(schedule, worker) == worker_program(every, worker)
        if problem.memory is not None:
            assert schedule.peak_memory(worker) == every.peak_memory(worker)
    for stage in range(problem.grid.stages):
        for microbatch in problem.grid.all_microbatches():
            assert schedule.route(stage, microbatch) == every.route(stage, microbatch)
    assert set(schedule.exchanges()) == set(every.exchanges())
    assert schedule.idle_workers() == every.idle_workers()
    tighter = replace(problem, in_flight_limit=(2,) * problem.grid.stages)
    assert schedule.fits(problem)
    assert schedule.fits(tighter) == every.fits(tighter)


@settings(max_examples=50, deadline=None)
@given(compact_schedules())
def test_it_survives_a_plan_file_and_pickle(schedule):
    assert read_plan(json.loads(json.dumps(plan_to_json(schedule)))).schedule == schedule
    assert pickle.loads(pickle.dumps(schedule)) == schedule


@settings(max_examples=50, deadline=None)
@given(compact_schedules(), st.sampled_from([0.5, 1.0, 3.0]))
def test_other_costs_give_it_the_times_of_the_listed_schedule(schedule, factor):
    costs = schedule.problem.costs
    other = replace(costs, forward=tuple(factor * cost + 0.1 for cost in costs.forward), communication=0.3)
    later, listed = planning.retime(schedule, other), planning.retime(schedule.expand(), other)
    assert isinstance(later, CompactSchedule)
    planning.validate(later)
    assert abs(later.period - listed.period) < CLOSE


CHANGES: list[Callable[[Lane, random.Random], Lane]] = []


def change(function: Callable[[Lane, random.Random], Lane]) -> Callable[[Lane, random.Random], Lane]:
    CHANGES.append(function)
    return function


def with_stage(lane: Lane, stage: int, **columns: object) -> Lane:
    changed = replace(lane.stages[stage], **columns)
    return replace(lane, stages=(*lane.stages[:stage], changed, *lane.stages[stage + 1 :]))


@change
def two_operations_change_places(lane: Lane, draw: random.Random) -> Lane:
    stage = draw.randrange(len(lane.stages))
    kinds = bytearray(lane.stages[stage].kinds)
    place = draw.randrange(len(kinds) - 1)
    kinds[place], kinds[place + 1] = kinds[place + 1], kinds[place]
    return with_stage(lane, stage, kinds=bytes(kinds))


@change
def an_operation_has_another_time(lane: Lane, draw: random.Random) -> Lane:
    stage = draw.randrange(len(lane.stages))
    starts, ends = lane.stages[stage].starts[:], lane.stages[stage].ends[:]
    place, by = draw.randrange(len(starts)), draw.choice([-1.0, -0.1, 0.0, 0.1, float("nan")])
    starts[place] += by
    ends[place] += by if draw.random() < 0.8 else 0.0
    return with_stage(lane, stage, starts=starts, ends=ends)


@change
def two_microbatches_change_places(lane: Lane, draw: random.Random) -> Lane:
    stage = draw.randrange(len(lane.stages))
    indices = lane.stages[stage].indices[:]
    one, other = draw.randrange(len(indices) - 2), draw.randrange(len(indices) - 2)
    indices[one], indices[other] = indices[other], indices[one] if draw.random() < 0.8 else indices[other]
    return with_stage(lane, stage, indices=indices)


@change
def less_memory(lane: Lane, draw: random.Random) -> Lane:
    limit = tuple(draw.randint(1, 4) for _ in lane.stages)
    return replace(lane, problem=replace(lane.problem, in_flight_limit=limit))


@change
def another_technique(lane: Lane, draw: random.Random) -> Lane:
    technique = planning.Technique(draw.random() < 0.5, draw.random() < 0.5)
    return replace(lane, problem=replace(lane.problem, technique=technique))


@settings(max_examples=75, deadline=None)
@given(compact_schedules(), st.sampled_from(CHANGES), st.integers(0, 1000), st.sampled_from([1.0, 0.9, 1.1]))
def test_the_check_of_its_lane_agrees_with_that_of_all_operations(schedule, changed, seed, scale):
    lane = changed(schedule.lane, random.Random(seed))
    problem = replace(schedule.problem, in_flight_limit=lane.problem.in_flight_limit, technique=lane.problem.technique)
    damaged = compact(problem, lane)
    damaged = replace(damaged, period=damaged.period * scale)
    assert is_valid(damaged) == is_valid(damaged.expand())


def is_valid(schedule: planning.Schedule) -> bool:
    try:
        planning.validate(schedule)
    except planning.InvalidScheduleError:
        return False
    return True


@settings(max_examples=50, deadline=None)
@given(problems())
def test_every_live_worker_and_every_microbatch_is_in_one_lane(problem):
    grid, lanes = problem.grid, lanes_of(problem)
    places = LanePlaces(grid, problem.failed, lanes)
    workers = Counter(places.worker(lane, stage) for lane in range(lanes) for stage in range(grid.stages))
    assert set(workers.values()) == {1}
    assert not problem.failed & workers.keys()
    assert {worker: places.lane(worker) for worker in workers} == {
        places.worker(lane, stage): lane for lane in range(lanes) for stage in range(grid.stages)
    }
    idle = set(problem.live_workers()) - workers.keys()
    assert {places.lane(worker) for worker in idle} <= {None}
    found = [microbatch for lane in range(lanes) for microbatch in places.microbatches(lane)]
    assert Counter(found) == Counter(grid.all_microbatches())
    assert all(places.lane_of(microbatch) == lane for lane in range(lanes) for microbatch in places.microbatches(lane))
    counts = [places.count(lane) for lane in range(lanes)]
    assert max(counts) - min(counts) <= 1
    # Who measures for a stage, and who leads, has work: the first live worker of every stage.
    assert all(places.lane(problem.live_workers(stage)[0]) is not None for stage in range(grid.stages))


def test_it_serves_whoever_has_failed_in_the_stage():
    grid = planning.Grid(5, 3, 4)
    schedule = plan_by_lanes(
        planning.Problem(grid, planning.Costs.uniform(3), frozenset({planning.Worker(4, 1), planning.Worker(3, 1)}))
    )
    for failed in ({(0, 1), (2, 1)}, {(0, 0), (1, 2), (3, 1), (2, 1)}):
        problem = replace(schedule.problem, failed=frozenset(planning.Worker(*place) for place in failed))
        other = renamed(schedule, problem)
        assert isinstance(other, CompactSchedule)
        assert other.lane is schedule.lane
        planning.validate(other.expand())
    with pytest.raises(PlanningError, match="plan again"):
        renamed(schedule, replace(schedule.problem, failed=frozenset({planning.Worker(0, 1)})))


@pytest.mark.parametrize(
    ("share", "costs", "limit"), [(0.01, UNEQUAL, None), pytest.param(0.05, UNEQUAL, 127, marks=pytest.mark.exhaustive)]
)
def test_16384_workers_get_a_plan_near_the_bound(tmp_path, share, costs, limit):
    limits = None if limit is None else (limit,) * LARGE.stages
    problem = planning.Problem(LARGE, costs, in_flight_limit=limits)
    problem = planning.normalized_problem(problem, round(share * LARGE.num_workers))
    result = planning.solve(problem)
    assert isinstance(result.schedule, CompactSchedule)
    assert lanes_of(problem) == LARGE.pipelines - -(-len(problem.failed) // LARGE.stages), "failures are spread evenly"
    assert result.gap < 0.016
    path = tmp_path / "plan.json"
    planning.save_plan(path, result)
    assert path.stat().st_size < 3_000_000
    assert planning.load_plan(path).schedule == result.schedule
    planning.validate(result.schedule.lane.schedule())  # as listed
    worker = planning.Worker(17, 40)
    operations = Counter(op.kind for op in result.schedule.program(worker) if op.microbatch is not None)
    assert operations[planning.OpKind.FORWARD] in (
        problem.grid.global_microbatches // lanes_of(problem) + n for n in (0, 1)
    )


def test_after_a_failure_the_next_plans_are_there_at_once():
    """However many distributions there are, they have one lane."""
    problem = planning.Problem(planning.Grid(64, 8, 128), planning.Costs.uniform(8))
    plans = [planning.heuristic(replace(problem, failed=failed)) for failed in next_failures(problem)]
    assert len(plans) == 8
    assert len({id(plan.lane) for plan in plans if isinstance(plan, CompactSchedule)}) == 1


def test_a_library_stores_and_finds_it(tmp_path):
    problem = planning.Problem(
        planning.Grid(64, 8, 128), planning.Costs.uniform(8), frozenset({planning.Worker(3, 4), planning.Worker(9, 6)})
    )
    library = planning.PlanLibrary(tmp_path)
    stored = planning.solve(problem)
    assert library.put(stored).stat().st_size < 100_000
    other = replace(problem, failed=frozenset({planning.Worker(0, 4), planning.Worker(1, 6)}))
    found = planning.PlanLibrary(tmp_path).get(other)
    assert isinstance(found, CompactSchedule)
    assert (found.problem, found.lane, found.period) == (other, stored.schedule.lane, stored.schedule.period)
    slower = replace(other, costs=planning.Costs.uniform(8, 1.1))
    retimed = planning.PlanLibrary(tmp_path).get(slower)
    assert isinstance(retimed, CompactSchedule)
    planning.validate(retimed)


DAMAGE: dict[str, Callable[[dict], object]] = {
    "no lane": lambda plan: plan.pop("lane"),
    "a stage less": lambda plan: plan["lane"].pop(),
    "no operations": lambda plan: plan["lane"][0].update(op=""),
    "unknown operations": lambda plan: plan["lane"][0].update(op="F Q"),
    "a column less": lambda plan: plan["lane"][0].pop("end"),
    "a short column": lambda plan: plan["lane"][0]["start"].pop(),
    "micro-batches without end": lambda plan: plan["lane"][0]["microbatch"].__setitem__(0, 10**30),
    "a word for a number": lambda plan: plan["lane"][0]["start"].__setitem__(0, "soon"),
    "another period": lambda plan: plan.update(period=plan["period"] - 1),
    "another number of failures": lambda plan: plan["problem"].update(
        failed=[{"pipeline": pipeline, "stage": 0} for pipeline in range(3)]
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_plan_is_refused(tmp_path, name):
    path = tmp_path / "plan.json"
    planning.save_plan(
        path,
        plan_by_lanes(
            planning.Problem(planning.Grid(5, 3, 4), planning.Costs.uniform(3), frozenset({planning.Worker(1, 1)}))
        ),
    )
    plan = json.loads(path.read_text())
    assert plan["schema"] == 1
    DAMAGE[name](plan)
    path.write_text(json.dumps(plan))
    with pytest.raises(PlanningError, match=r"plan\.json"):
        planning.load_plan(path)


def test_workers_of_unequal_speed_are_planned_one_by_one(monkeypatch):
    problem = planning.Problem(
        planning.Grid(4, 2, 4), planning.Costs.uniform(2), worker_factors={planning.Worker(0, 0): 2.0}
    )
    assert not isinstance(planning.heuristic(problem, EFFORT, compact_from=0), CompactSchedule)
    with pytest.raises(PlanningError, match="unequal speed"):
        lane_problem(problem)
    schedule = plan_by_lanes(replace(problem, worker_factors=()))
    slower = planning.retime(schedule, problem.costs, problem.worker_factors)
    planning.validate(slower)
    assert slower.period > schedule.period
    assert schedule.fits(problem)
    monkeypatch.setattr(timing, "_MOST_EXPANDED", 10)
    with pytest.raises(PlanningError, match=r"unequal speed.*more than 10"):
        planning.retime(schedule, problem.costs, problem.worker_factors)
