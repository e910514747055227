"""The running example of the paper: 3 pipelines, 4 stages, 6 micro-batches, equal costs, one dead worker."""

from itertools import combinations

import pytest

from lightning_recycle import planning

GRID = planning.Grid(pipelines=3, stages=4, microbatches=6)
FUSED = planning.Technique(split_backward=False, staggered=False)
SPLIT = planning.Technique(split_backward=True, staggered=False)
STAGGERED = planning.Technique(split_backward=True, staggered=True)


def solve(technique: planning.Technique, *failed: tuple[int, int], limit: int | None = None) -> planning.Schedule:
    limits = None if limit is None else (limit,) * GRID.stages
    workers = frozenset(planning.Worker(*position) for position in failed)
    return planning.plan(planning.Problem(GRID, planning.Costs.uniform(4), workers, technique, limits))


def test_fault_free_1f1b_takes_27_slots_and_holds_at_most_s_minus_stage_microbatches():
    schedule = planning.one_f_one_b(planning.Problem(GRID, planning.Costs.uniform(4), technique=FUSED))
    assert (schedule.period, schedule.makespan) == (27, 27)
    assert [schedule.peak_in_flight(planning.Worker(0, s)) for s in range(4)] == [4, 3, 2, 1]


def test_fault_free_fused_plan_is_1f1b():
    assert solve(FUSED) == planning.one_f_one_b(planning.Problem(GRID, planning.Costs.uniform(4), technique=FUSED))


@pytest.mark.parametrize(
    ("technique", "makespan", "period"),
    [(FUSED, 36, 36), (SPLIT, 29, 29), (STAGGERED, 29, 27)],
    ids=["adaptive", "split_backward", "staggered"],
)
def test_each_technique_brings_the_dead_worker_of_stage_2_closer_to_free(technique, makespan, period):
    """With the plain rule, as in the paper; a better order brings the fused backward to 33."""
    problem = planning.Problem(GRID, planning.Costs.uniform(4), frozenset({planning.Worker(1, 2)}), technique)
    schedule = planning.plan(problem, planning.HeuristicPlanner(effort=0))
    assert (schedule.makespan, schedule.period) == (makespan, period)


# The optimum for a failure in stage 0, 1, 2, 3, from a constraint solver.
TABLE = [
    (FUSED, None, (29, 30, 33, 36)),
    (SPLIT, None, (27, 28, 29, 30)),
    (STAGGERED, None, (27, 27, 27, 27)),
    (FUSED, 4, (36, 33, 33, 36)),
    (SPLIT, 4, (30, 29, 29, 30)),
    (STAGGERED, 4, (30, 28, 29, 30)),
]


@pytest.mark.parametrize(
    ("technique", "limit", "stage", "slots"),
    [(technique, limit, stage, slots[stage]) for technique, limit, slots in TABLE for stage in range(4)],
)
def test_every_plan_of_the_table_is_optimal(technique, limit, stage, slots):
    schedule = solve(technique, (1, stage), limit=limit)
    assert planning.lower_bound(schedule.problem) <= schedule.period == slots
    if (technique, limit) == (STAGGERED, None):
        assert schedule.makespan == planning.makespan_lower_bound(schedule.problem) == 27 + stage
    assert max(map(schedule.peak_in_flight, schedule.live_workers)) <= (limit or 18)


def test_fault_free_split_backwards_reach_zero_bubble():
    assert solve(SPLIT).makespan == 21
    assert solve(SPLIT, limit=4).makespan == 21
    assert solve(STAGGERED).period == 19
    assert solve(STAGGERED, limit=7).period == 19


def test_two_failures_in_different_stages_cost_no_more_than_one():
    for first, second in combinations(GRID.workers(), 2):
        if first.stage != second.stage and (first.pipeline, second.pipeline) in ((0, 0), (0, 1)):  # they are alike
            failed = (first.pipeline, first.stage), (second.pipeline, second.stage)
            assert solve(STAGGERED, *failed).period == 27


def test_only_one_replica_of_a_stage_left():
    schedule = solve(STAGGERED, (0, 2), (1, 2))
    assert schedule.period == 54  # 18 micro-batches of 3 slots each on one worker
    assert {schedule.route(2, microbatch) for microbatch in GRID.all_microbatches()} == {planning.Worker(2, 2)}
