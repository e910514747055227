"""Which problems a run may have to plan for."""

from dataclasses import replace
from itertools import combinations
from math import comb, prod

import pytest

from lightning_recycle import planning as p
from lightning_recycle.planning.normalization import contingencies, next_failures, usual_limit
from lightning_recycle.planning.rerouting import representative

GRID = p.Grid(3, 4, 6)
BASE = p.Problem(GRID, p.Costs.uniform(4))


@pytest.mark.parametrize("failures", [0, 1, 2, 3, 8])
def test_every_set_of_failed_workers_that_leaves_a_plan_is_alike_one_of_them(failures: int) -> None:
    found = contingencies(BASE, failures, most=1000)
    assert all(len(problem.failed) == failures for problem in found)
    assert len(set(found)) == len(found)
    possible = set()
    for failed in combinations(GRID.workers(), failures):
        if max(p.distribution_of(GRID, failed)) < GRID.pipelines:
            possible.add(representative(replace(BASE, failed=frozenset(failed))))
    assert possible == set(found)


def test_the_likeliest_come_first() -> None:
    def sets(problem: p.Problem) -> int:
        return prod(comb(3, count) for count in p.distribution_of(GRID, problem.failed))

    every = contingencies(BASE, 4, most=1000)
    assert contingencies(BASE, 4, most=5) == every[:5]
    assert [sets(problem) for problem in every] == sorted(map(sets, every), reverse=True)


def test_more_than_can_be_listed_are_spread_over_the_stages() -> None:
    large = p.Problem(p.Grid(24, 64, 2), p.Costs.uniform(64))
    found = contingencies(large, 8, most=20)
    assert len(set(found)) == 20
    assert {max(p.distribution_of(large.grid, problem.failed)) for problem in found} == {1}
    assert contingencies(large, 70, most=20) == []


def test_the_next_failures_are_one_for_each_plan_that_may_be_needed() -> None:
    failed = frozenset({p.Worker(0, 1), p.Worker(2, 1)})
    slow = {p.Worker(1, 0): 2.0, p.Worker(2, 3): 3.0}
    problem = replace(BASE, failed=failed, worker_factors=slow)
    found = next_failures(problem)
    assert all(failed < more and len(more) == 3 for more in found)
    # Stage 1 has one worker left; stages 0 and 3 have a slow worker and others.
    assert [next(iter(more - failed)).stage for more in found] == [0, 0, 2, 3, 3]

    def needed(more: frozenset[p.Worker]) -> p.Problem:
        factors = {worker: factor for worker, factor in slow.items() if worker not in more}
        return representative(replace(BASE, failed=more, worker_factors=factors))

    survivors = [worker for worker in problem.live_workers() if worker.stage != 1]
    assert {needed(failed | {worker}) for worker in survivors} == {needed(more) for more in found}


def test_a_run_without_a_limit_has_that_of_1f1b_until_it_has_measured_its_memory() -> None:
    assert usual_limit(GRID, ()) == usual_limit(GRID, [p.Worker(0, 0)]) == (4, 3, 2, 1)
    assert usual_limit(GRID, (), measured=True) == (7, 7, 7, 7)
    assert usual_limit(GRID, [p.Worker(0, 0)], measured=True) is None
