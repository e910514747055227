"""One plan serves all sets of failed workers with the same distribution over the stages."""

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_recycle import planning as p
from lightning_recycle.errors import PlanningError
from lightning_recycle.planning.rerouting import alike, renamed, representative

GRID = p.Grid(3, 4, 6)
UNIT = p.Costs.uniform(4)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[p.Problem, p.Problem]:
    """Two problems that differ in who has failed and who is slow, not in how many of each stage."""
    grid = p.Grid(draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 4)))
    costs = p.Costs.uniform(grid.stages, 1.0, draw(st.sampled_from([1.0, 1.5])), communication=0.1)
    sides: tuple[tuple[set[p.Worker], dict[p.Worker, float]], ...] = ((set(), {}), (set(), {}))
    for stage in range(grid.stages):
        failed = draw(st.integers(0, grid.pipelines - 1))
        slow = draw(st.lists(st.sampled_from([2.0, 3.0]), max_size=grid.pipelines - failed))
        for gone, factors in sides:
            order = draw(st.permutations([p.Worker(d, stage) for d in range(grid.pipelines)]))
            gone |= set(order[:failed])
            factors |= dict(zip(order[failed:], slow, strict=False))
    limit = draw(st.sampled_from([None, (grid.stages + 1,) * grid.stages]))
    technique = p.Technique(split_backward=draw(st.booleans()), staggered=draw(st.booleans()))
    one, other = (
        p.Problem(grid, costs, frozenset(gone), technique, limit, tuple(factors.items())) for gone, factors in sides
    )
    return one, other


@settings(max_examples=75, deadline=None)
@given(pairs())
def test_a_renamed_plan_is_a_valid_plan_of_the_same_value(problems: tuple[p.Problem, p.Problem]) -> None:
    one, other = problems
    assert alike(one, other)
    assert representative(one) == representative(other)
    schedule = p.heuristic(one, 0)
    mapped = renamed(schedule, other)
    p.validate(mapped)  # which knows nothing of renaming
    assert mapped.problem == other
    assert (mapped.period, mapped.makespan) == (schedule.period, schedule.makespan)
    for stage in range(one.grid.stages):
        peaks = [sorted(s.peak_in_flight(w) for w in s.problem.live_workers(stage)) for s in (schedule, mapped)]
        assert peaks[0] == peaks[1]
    assert renamed(schedule, one) is schedule


def local(schedule: p.Schedule) -> int:
    """How many forwards run where their micro-batch is at home."""
    return sum(
        op.kind is p.OpKind.FORWARD and op.microbatch is not None and op.microbatch.pipeline == worker.pipeline
        for worker in schedule.live_workers
        for op in schedule.program(worker)
    )


def test_after_one_failure_every_other_worker_keeps_its_own_microbatches() -> None:
    plan = p.heuristic(p.Problem(GRID, UNIT, frozenset({p.Worker(2, 1)})))
    mapped = renamed(plan, replace(plan.problem, failed=frozenset({p.Worker(0, 1)})))
    p.validate(mapped)
    assert local(mapped) == local(plan) == 4 * 3 * 6 - 6


def test_one_plan_for_each_distribution_serves_all_pairs() -> None:
    plans: dict[p.Problem, p.Schedule] = {}
    for pair in combinations(GRID.workers(), 2):
        problem = p.Problem(GRID, UNIT, frozenset(pair))
        key = representative(problem)
        if key not in plans:
            plans[key] = p.heuristic(key, 0)
        mapped = renamed(plans[key], problem)
        p.validate(mapped)
        assert set(mapped.workers) == set(GRID.workers()) - set(pair)
        assert local(mapped) >= 4 * 3 * 6 - 2 * 2 * 6, "one worker per failure runs others' micro-batches, at most"
    assert len(plans) == 10, "4 stages that lose two, 6 pairs of stages"


def test_a_plan_for_another_distribution_is_refused() -> None:
    plan = p.heuristic(p.Problem(GRID, UNIT, frozenset({p.Worker(2, 1)})), 0)
    with pytest.raises(PlanningError, match=r"failures \(0, 1, 0, 0\) by stage is none for \(0, 0, 1, 0\)"):
        renamed(plan, replace(plan.problem, failed=frozenset({p.Worker(2, 2)})))
    with pytest.raises(PlanningError, match="plan again"):
        renamed(plan, replace(plan.problem, costs=p.Costs.uniform(4, 2.0)))
