"""Who adopts what: even, spread over the iteration, by speed; one plan serves all sets of failures that are alike."""

from collections import Counter
from dataclasses import replace
from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_recycle import planning
from lightning_recycle.errors import PlanningError
from lightning_recycle.planning import Grid, Microbatch, Worker, reroute
from lightning_recycle.planning.routing import alike, renamed, representative

GRID = Grid(3, 4, 6)
UNIT = planning.Costs.uniform(4)


def test_orphans_of_several_failures_in_one_stage_are_dealt_in_the_order_of_arrival():
    route = reroute(Grid(4, 1, 2), {Worker(0, 0), Worker(2, 0)})[0]
    adopted = [(Microbatch(0, 0), 1), (Microbatch(2, 0), 3), (Microbatch(0, 1), 1), (Microbatch(2, 1), 3)]
    assert [(microbatch, route[microbatch].pipeline) for microbatch, _ in adopted] == adopted


def test_a_slow_worker_gives_up_microbatches_spread_over_the_iteration():
    route = reroute(GRID, (), {Worker(1, 2): 2.0})[2]
    moved = {
        microbatch: worker.pipeline for microbatch, worker in route.items() if worker.pipeline != microbatch.pipeline
    }
    # 18 micro-batches: shares 7, 4, 7 end at 7, 8, 7; two leave. 8, 3, 7 would end at 8, 6, 7.
    assert Counter(route.values())[Worker(1, 2)] * 2.0 <= 8
    assert set(moved) <= {Microbatch(1, m) for m in range(6)}
    assert reroute(GRID, (), {Worker(1, 2): 2.0})[1] == reroute(GRID, ())[1]


def test_a_fast_peer_adopts_more_and_not_all_at_once():
    grid = Grid(3, 1, 12)
    route = reroute(grid, {Worker(0, 0)}, {Worker(1, 0): 0.5})[0]
    assert Counter(route.values()) == {Worker(1, 0): 24, Worker(2, 0): 12}
    route = reroute(grid, {Worker(0, 0)}, {Worker(1, 0): 0.75})[0]
    adopted = [route[Microbatch(0, m)].pipeline for m in range(12)]
    assert Counter(adopted) == {1: 9, 2: 3}  # 21 x 0.75 = 15.75 and 15
    assert max(len(run) for run in "".join(map(str, adopted)).split("2")) <= 4


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from([0.5, 1.0, 1.25, 2.0, 3.0]), min_size=2, max_size=3), st.integers(1, 5), st.booleans())
def test_no_assignment_has_a_smaller_slowest_worker(speeds, microbatches, fails):
    grid = Grid(len(speeds) + fails, 1, microbatches)
    failed = {Worker(len(speeds), 0)} if fails else set()
    factors = {Worker(d, 0): factor for d, factor in enumerate(speeds)}
    loads = Counter(reroute(grid, failed, factors)[0].values())
    total = grid.global_microbatches
    slowest = max(loads[worker] * factor for worker, factor in factors.items())
    best = min(
        max(count * factor for count, factor in zip(counts, speeds, strict=True))
        for counts in product(range(total + 1), repeat=len(speeds))
        if sum(counts) == total
    )
    assert sum(loads.values()) == total
    assert slowest == best


# -- renaming: one plan for each distribution over the stages ----------------------------------------------------------


@st.composite
def pairs(draw: st.DrawFn) -> tuple[planning.Problem, planning.Problem]:
    """Two problems that differ in who has failed and who is slow, not in how many of each stage."""
    grid = planning.Grid(draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 4)))
    costs = planning.Costs.uniform(grid.stages, 1.0, draw(st.sampled_from([1.0, 1.5])), communication=0.1)
    sides: tuple[tuple[set[planning.Worker], dict[planning.Worker, float]], ...] = ((set(), {}), (set(), {}))
    for stage in range(grid.stages):
        failed = draw(st.integers(0, grid.pipelines - 1))
        slow = draw(st.lists(st.sampled_from([2.0, 3.0]), max_size=grid.pipelines - failed))
        for gone, factors in sides:
            order = draw(st.permutations([planning.Worker(d, stage) for d in range(grid.pipelines)]))
            gone |= set(order[:failed])
            factors |= dict(zip(order[failed:], slow, strict=False))
    limit = draw(st.sampled_from([None, (grid.stages + 1,) * grid.stages]))
    technique = planning.Technique(split_backward=draw(st.booleans()), staggered=draw(st.booleans()))
    one, other = (
        planning.Problem(grid, costs, frozenset(gone), technique, limit, tuple(factors.items()))
        for gone, factors in sides
    )
    return one, other


@settings(max_examples=75, deadline=None)
@given(pairs())
def test_a_renamed_plan_is_a_valid_plan_of_the_same_value(problems):
    one, other = problems
    assert alike(one, other)
    assert representative(one) == representative(other)
    schedule = planning.heuristic(one, 0)
    mapped = renamed(schedule, other)
    planning.validate(mapped)  # which knows nothing of renaming
    assert mapped.problem == other
    assert (mapped.period, mapped.makespan) == (schedule.period, schedule.makespan)
    for stage in range(one.grid.stages):
        peaks = [sorted(s.peak_in_flight(w) for w in s.problem.live_workers(stage)) for s in (schedule, mapped)]
        assert peaks[0] == peaks[1]
    assert renamed(schedule, one) is schedule


def local(schedule: planning.Schedule) -> int:
    """How many forwards run where their micro-batch is at home."""
    return sum(
        op.kind is planning.OpKind.FORWARD and op.microbatch is not None and op.microbatch.pipeline == worker.pipeline
        for worker in schedule.live_workers
        for op in schedule.program(worker)
    )


def test_one_plan_for_each_distribution_serves_all_pairs():
    plans: dict[planning.Problem, planning.Schedule] = {}
    for pair in combinations(GRID.workers(), 2):
        problem = planning.Problem(GRID, UNIT, frozenset(pair))
        key = representative(problem)
        if key not in plans:
            plans[key] = planning.heuristic(key, 0)
        mapped = renamed(plans[key], problem)
        planning.validate(mapped)
        assert set(mapped.workers) == set(GRID.workers()) - set(pair)
        assert local(mapped) >= 4 * 3 * 6 - 2 * 2 * 6, "one worker per failure runs others' micro-batches, at most"
    assert len(plans) == 10, "4 stages that lose two, 6 pairs of stages"


def test_a_plan_for_another_distribution_is_refused():
    plan = planning.heuristic(planning.Problem(GRID, UNIT, frozenset({planning.Worker(2, 1)})), 0)
    with pytest.raises(PlanningError, match=r"failures \(0, 1, 0, 0\) by stage is none for \(0, 0, 1, 0\)"):
        renamed(plan, replace(plan.problem, failed=frozenset({planning.Worker(2, 2)})))
    with pytest.raises(PlanningError, match="plan again"):
        renamed(plan, replace(plan.problem, costs=planning.Costs.uniform(4, 2.0)))
