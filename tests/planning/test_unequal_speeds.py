"""Plans for workers of unequal speed: valid, better than plans that ignore it, the same where there is none."""

import hashlib
import json
from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_properties import problems

from lightning_recycle import planning as p

EFFORT = 10_000
CLOSE = 1e-6
UNEVEN = p.Costs((1.0, 1.3, 0.9, 1.1), (1.0, 1.2, 1.1, 0.7), (0.9, 1.0, 0.8, 1.0), (0.4,) * 4, (0.2,) * 4, 0.2)


def orders(schedule: p.Schedule) -> dict[p.Worker, tuple[object, ...]]:
    return {worker: schedule.program(worker) for worker in schedule.live_workers}


def loads(schedule: p.Schedule) -> Counter[p.Worker]:
    return Counter({w: sum(op.kind is p.OpKind.FORWARD for op in schedule.program(w)) for w in schedule.live_workers})


def test_a_plan_is_better_than_the_one_that_takes_all_workers_for_equally_fast():
    """Seeded: 24 grids with one slow worker; none loses."""
    gains = []
    for seed in range(24):
        draw = Random(seed)
        grid = p.Grid(draw.randint(2, 4), draw.randint(2, 5), draw.randint(3, 8))
        slow = p.Worker(draw.randrange(grid.pipelines), draw.randrange(grid.stages))
        problem = p.Problem(
            grid,
            p.Costs.uniform(grid.stages, 1.0, 1.1, 0.9, communication=0.1),
            technique=p.Technique(draw.random() < 0.7, draw.random() < 0.7),
            in_flight_limit=(grid.stages + draw.randint(0, 2),) * grid.stages if draw.random() < 0.6 else None,
            worker_factors={slow: draw.choice((1.3, 1.5, 2.0))},
        )
        ignorant = p.retime(
            p.heuristic(replace(problem, worker_factors=()), EFFORT), problem.costs, problem.worker_factors
        )
        gains.append(ignorant.period / p.heuristic(problem, EFFORT).period - 1)
    assert min(gains) >= -1e-3
    assert sum(gains) / len(gains) > 0.05


@settings(max_examples=40, deadline=None)
@given(problems(), st.sampled_from([0.5, 2.0]))
def test_factors_of_the_dead_and_factors_of_one_change_no_order(problem, factor):
    plain = replace(problem, worker_factors=())
    named = {worker: factor if worker in problem.failed else 1.0 for worker in problem.grid.workers()}
    schedule = p.heuristic(replace(problem, worker_factors=named), EFFORT)
    if not problem.technique.split_backward and not problem.failed:
        assert schedule == p.heuristic(plain, EFFORT)
    assert orders(schedule) == orders(p.heuristic(plain, EFFORT))


@pytest.mark.parametrize(("problem", "digest"), [
    (p.Problem(p.Grid(3, 4, 6), p.Costs.uniform(4), frozenset({p.Worker(1, 2)})), "217f33240d314fcc"),
    (p.Problem(p.Grid(3, 4, 6), UNEVEN, frozenset({p.Worker(0, 1), p.Worker(2, 3)}), p.Technique(), (5, 5, 4, 4)),
     "f13a12b1c45a9e63"),
    (p.Problem(p.Grid(2, 2, 4), p.Costs.uniform(2), in_flight_limit=(3, 3)), "21813906c29f19f5"),
    (p.Problem(p.Grid(2, 3, 4), p.Costs.uniform(3), frozenset({p.Worker(0, 0)}), p.Technique(False, True)),
     "623f21334f16c25c"),
], ids=["running example", "uneven costs", "healthy", "fused"])  # fmt: skip
def test_orders_at_equal_speeds_are_those_of_before_there_were_others(problem, digest):
    """A change of the heuristic itself changes these digests, too: then write the new ones here."""
    schedule = p.heuristic(problem)
    text = json.dumps([[str(w), [str(op) for op in schedule.program(w)]] for w in schedule.live_workers])
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == digest


def test_a_little_slowness_moves_nothing():
    problem = p.Problem(p.Grid(3, 3, 6), p.Costs.uniform(3), worker_factors={p.Worker(0, 1): 1.05})
    assert loads(p.heuristic(problem))[p.Worker(0, 1)] == 6


def test_the_work_alone_does_not_decide_how_much_a_slow_worker_gets():
    """With two micro-batches even one of them on the worker that takes three times as long holds up the pipeline."""
    slow = p.Worker(1, 1)
    problem = p.Problem(p.Grid(3, 4, 2), p.Costs.uniform(4), in_flight_limit=(7,) * 4, worker_factors={slow: 3.0})
    least_work = p.reroute(problem.grid, (), {slow: 3.0})[1]
    assert Counter(least_work.values())[slow] == 1  # 9 slots on it, and 9 on the other two
    schedule = p.heuristic(problem)
    assert loads(schedule)[slow] == 0
    assert schedule.period == 12
