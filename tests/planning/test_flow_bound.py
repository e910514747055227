"""The bound from three stages holds for every plan, and is above what each stage enforces alone where it should be."""

from random import Random

import pytest

from lightning_recycle import planning as p
from lightning_recycle.errors import PlanningError
from lightning_recycle.planning.bounds import StageWork, flow_bound, stage_lower_bounds


def crowded(seed: int) -> p.Problem | None:
    """A problem whose middle stages have lost workers, with any of the planner's limits; None if it has no plan."""
    draw = Random(seed)
    grid = p.Grid(*draw.choice([(3, 3, 3), (3, 4, 3), (5, 3, 4), (3, 5, 4), (2, 6, 6)]))
    stages, live = range(grid.stages), list(grid.workers())

    def per_stage(*values: float) -> tuple[float, ...]:
        return tuple(draw.choice(values) for _ in stages)

    middle = draw.randrange(1, grid.stages - 1)
    failed = {p.Worker(d, middle) for d in range(draw.randint(1, grid.pipelines - 1))}
    live = [worker for worker in live if worker not in failed]
    closing = per_stage(0.0, 0.4)
    backward, weight = per_stage(0.5, 1.0, 1.3), per_stage(0.0, 0.5, 1.0)
    costs = p.Costs(per_stage(0.5, 1.0, 2.0), backward, weight, closing, closing, draw.choice([0.0, 0.1, 1.0]))
    memory = None
    if draw.random() < 0.4:
        held = per_stage(1.0, 2.0)
        checkpoint = tuple(0.3 * size for size in held) if draw.random() < 0.4 else None
        memory = p.Memory(per_stage(4.0, 6.0), (0.0,) * grid.stages, held, per_stage(0.5, 2.0, 3.0), checkpoint)
    limit = tuple(draw.randint(1, grid.stages + 1) for _ in stages) if draw.random() < 0.4 else None
    factors = ((draw.choice(live), 1.5),) if draw.random() < 0.2 else ()
    technique = p.Technique(decoupled=draw.random() < 0.7, staggered=draw.random() < 0.7)
    try:
        return p.Problem(grid, costs, frozenset(failed), technique, limit, factors, memory)
    except PlanningError:
        return None


@pytest.mark.parametrize("part", range(3))
def test_no_plan_beats_the_bound(part: int) -> None:
    judged = 0
    for seed in range(part * 25, part * 25 + 25):
        problem = crowded(seed)
        if problem is None:
            continue
        try:
            plan = p.heuristic(problem, 3_000)
        except PlanningError:
            continue
        judged += 1
        assert p.lower_bound(problem) <= plan.period + 1e-9, seed
        assert p.makespan_lower_bound(problem) <= plan.makespan + 1e-9, seed
    assert judged >= 12


def test_stages_that_lost_workers_are_seen_between_those_that_did_not() -> None:
    """12 x 32 x 64: stages 9 to 27 have lost a worker each; load and detour alone give 210."""
    failed = frozenset(p.Worker(0, stage) for stage in range(9, 28))
    costs = p.Costs.uniform(32, 1.0, 1.1, 0.9, communication=0.1)
    problem = p.Problem(p.Grid(12, 32, 64), costs, failed)
    assert max(stage_lower_bounds(problem)) == pytest.approx(210.0)
    assert p.lower_bound(problem) == pytest.approx(211.698, abs=1e-3)
    no_longer = p.Problem(p.Grid(12, 32, 64), costs, failed, in_flight_limit=(63,) * 32)
    assert p.lower_bound(no_longer) >= p.lower_bound(problem)


def test_three_stages_by_hand() -> None:
    """8 micro-batches; the middle has one worker of two; F = B = 1, no W, no communication.

    At the end, d = 0, all 8 F and all 8 B have passed the middle, whose one worker begins at 1.
    """
    two = StageWork(2, 1.0, 1.0, 0.0, 0.0, 8)
    one = StageWork(1, 1.0, 1.0, 0.0, 0.0, 8)
    assert flow_bound([two, one, two], 0.0, 8, staggered=True) == 17.0
    assert flow_bound([two, one], 0.0, 8, staggered=True) == 0.0
