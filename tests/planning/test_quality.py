"""How good the heuristic's plans are: against the zero-bubble schedules, lower bounds and the clock."""

import time
from random import Random

import pytest

from lightning_recycle.planning import (
    Costs,
    Grid,
    Problem,
    Schedule,
    Technique,
    Worker,
    heuristic,
    lower_bound,
    normalized_problem,
    plan,
    validate,
)
from lightning_recycle.planning.list_scheduling import EdgePriority, Rule, play_list_schedule
from lightning_recycle.planning.routing import reroute
from lightning_recycle.planning.timing import Codes, assemble, best_timing

BARRIER = Technique(staggered=False)


@pytest.mark.parametrize("stages", range(2, 10))
def test_with_s_in_flight_no_worse_than_zb_h1(stages: int) -> None:
    for microbatches in (stages, stages + 1, stages + 2, 2 * stages, 2 * stages + 1, 4 * stages):
        for pipelines in (1, 3):
            grid = Grid(pipelines, stages, microbatches)
            problem = Problem(grid, Costs.uniform(stages), technique=BARRIER, in_flight_limit=(stages,) * stages)
            assert plan(problem).makespan <= 3 * microbatches + stages - 1


@pytest.mark.parametrize("stages", range(2, 10))
def test_with_2s_minus_1_in_flight_the_period_is_the_work_of_a_worker(stages: int) -> None:
    for microbatches in (2 * stages - 1, 2 * stages, 2 * stages + 1, 4 * stages):
        limit = (2 * stages - 1,) * stages
        problem = Problem(Grid(1, stages, microbatches), Costs.uniform(stages), in_flight_limit=limit)
        assert plan(problem).period <= 3 * microbatches + 1


def unequal(stages: int, spread: float) -> Costs:
    """F : B : W = 1 : 1.1 : 0.9, communication 0.2; stages differ by up to ``spread``."""
    factor = [1 + spread * (2 * Random(31 * stages + stage).random() - 1) for stage in range(stages)]
    forward, backward, weight = (tuple(share * f for f in factor) for share in (1.0, 1.1, 0.9))
    return Costs(forward, backward, weight, (0.0,) * stages, (0.0,) * stages, 0.2)


def cases(count: int) -> list[tuple[Grid, Worker | None, bool]]:
    """Grids up to 8 x 8 x 32 with M >= 4 S, without failure and with one, without limit and with 2 S - 1."""
    draw = Random(3)
    found = [
        (Grid(d, s, m), Worker(draw.randrange(d), draw.randrange(s)) if fails else None, limited)
        for d in (1, 2, 4, 8)
        for s in (1, 2, 4, 8)
        for m in sorted({4 * s, 8 * s, 32})
        for fails in (False, True)
        for limited in (False, True)
        if m <= 32 and (d > 1 or not fails)
    ]
    draw.shuffle(found)
    return found[:count]


@pytest.mark.parametrize("spread", [0.0, 0.1], ids=["equal stages", "unequal stages"])
@pytest.mark.parametrize("count", [10, pytest.param(10_000, marks=pytest.mark.exhaustive)])
def test_long_iterations_stay_close_to_the_lower_bound(spread: float, count: int) -> None:
    """At most 1% without a limit; with 2 S - 1 in flight at most 3%, but for one case in fifty, which is below 4%."""
    gaps = {}
    for grid, failed, limited in cases(count):
        limit = (2 * grid.stages - 1,) * grid.stages if limited else None
        workers = frozenset() if failed is None else frozenset({failed})
        problem = Problem(grid, unequal(grid.stages, spread), workers, in_flight_limit=limit)
        gaps[grid, failed, limited] = plan(problem).period / lower_bound(problem) - 1
    assert {case: gap for case, gap in gaps.items() if not case[2] and gap > 0.01} == {}
    limited = {case: gap for case, gap in gaps.items() if case[2]}
    assert {case: gap for case, gap in limited.items() if gap > 0.04} == {}
    assert sum(gap > 0.03 for gap in limited.values()) <= len(limited) / 50


def large(pipelines: int, stages: int, microbatches: int, part: float, seed: int) -> Problem:
    grid = Grid(pipelines, stages, microbatches)
    workers = list(grid.workers())
    Random(seed).shuffle(workers)
    return Problem(grid, Costs.uniform(stages), frozenset(workers[: int(part * len(workers))]))


def timed(problem: Problem) -> tuple[Schedule, float]:
    begin = time.process_time()
    return heuristic(problem), time.process_time() - begin


def test_384_workers_with_failures_are_planned_at_the_bound() -> None:
    schedule, seconds = timed(large(12, 32, 64, 0.05, seed=1))
    assert schedule.period <= 1.02 * lower_bound(schedule.problem)
    assert seconds < 10


@pytest.mark.parametrize(("limit", "gap"), [(None, 0.02), pytest.param(63, 0.065, marks=pytest.mark.long), (32, 0.081)])
def test_nothing_is_held_up_at_every_stage_on_its_way(limit: int | None, gap: float) -> None:
    """Without waiting for backwards that are about to arrive, 3.6 % without a limit and 8.8 % with 63: on the way of
    the first and the last gradient through 32 stages, half an operation is in the way at each. With 32, 13.3 % without
    waiting for forwards in the second half."""
    grid, costs = Grid(8, 32, 64), Costs.uniform(32, 1.0, 1.1, 0.9, communication=0.1)
    limits = None if limit is None else (limit,) * 32
    problem = normalized_problem(Problem(grid, costs, in_flight_limit=limits), 13)
    schedule = heuristic(problem, 150_000)
    validate(schedule)
    assert schedule.period <= (1 + gap) * lower_bound(problem)


@pytest.mark.parametrize("seed", range(20))
def test_express_micro_batches_leave_a_plan_valid(seed: int) -> None:
    """Whatever is waited for: every operation is played, in an order that keeps to memory."""
    draw = Random(seed)
    grid = Grid(draw.randint(1, 3), draw.randint(2, 5), draw.randint(2, 7))
    failed = frozenset({Worker(0, draw.randrange(grid.stages))} if grid.pipelines > 1 else ())
    costs = Costs.uniform(grid.stages, 1.0, 1.1, 0.9, communication=draw.choice([0.0, 0.1, 1.5]))
    limit = (draw.randint(1, grid.stages + 1),) * grid.stages
    problem = Problem(grid, costs, failed, Technique(split_backward=draw.random() < 0.7), limit)
    codes = Codes(problem, reroute(grid, failed), fused=not problem.technique.split_backward)
    rule = Rule(
        [microbatch.index for microbatch in grid.all_microbatches()],
        forward_first=(draw.randint(0, 4),) * grid.stages,
        patience=(draw.choice([0.0, 0.5]),) * 2,
        edge_priority=EdgePriority(*(draw.randint(0, 9) for _ in range(4)), patience=draw.choice([0.5, 1.6, 10.0])),
    )
    order, _ = play_list_schedule(codes, rule, limit)
    validate(assemble(codes, order, best_timing(codes, order)))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("pipelines", "part", "limit"), [(24, 0.05, 10), (32, 0.25, 30)])
@pytest.mark.parametrize("seed", range(3))
def test_thousands_of_workers_are_planned_in_seconds(pipelines: int, part: float, limit: float, seed: int) -> None:
    schedule, seconds = timed(large(pipelines, 64, 128, part, seed))
    assert schedule.period <= 1.02 * lower_bound(schedule.problem)
    assert seconds < limit
