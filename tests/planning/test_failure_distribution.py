"""Failure normalization: the best distribution and the fewest moves to it; the problems a run may have to plan for."""

from collections.abc import Collection
from dataclasses import replace
from functools import cache, partial
from itertools import combinations, product
from math import comb, prod
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_recycle import planning as p
from lightning_recycle.errors import ConfigurationError, PlanningError
from lightning_recycle.planning import failure_distribution
from lightning_recycle.planning.failure_distribution import contingencies, next_failures, normalized_problem
from lightning_recycle.planning.routing import representative

GRID = p.Grid(3, 4, 6)
UNIT = p.Costs.uniform(4)
BASE = p.Problem(GRID, UNIT)


def distributions(grid: p.Grid, failures: int) -> list[tuple[int, ...]]:
    return [d for d in product(range(grid.pipelines), repeat=grid.stages) if sum(d) == failures]


@pytest.mark.parametrize("technique", [p.Technique(), p.Technique(staggered=False), p.Technique(False, False)], ids=str)
@pytest.mark.parametrize("limit", [None, (4, 4, 4, 4)])
def test_no_distribution_has_a_smaller_bound(technique, limit):
    for failures in range(9):
        chosen = p.normalize(p.Problem(GRID, UNIT, frozenset(), technique, limit), failures)
        assert sum(chosen) == failures
        bounds = {
            d: p.lower_bound(p.Problem(GRID, UNIT, p.normalized_failures(GRID, d), technique, limit))
            for d in distributions(GRID, failures)
        }
        assert bounds[chosen] == min(bounds.values())


def test_without_limit_a_failure_goes_where_memory_is_most_free():
    assert p.normalize(BASE, 1) == (0, 0, 0, 1)
    assert p.normalize(BASE, 3) == (0, 1, 1, 1)
    assert p.normalize(BASE, 5) == (1, 1, 1, 2)


def test_without_staggering_a_failure_goes_where_the_way_out_is_short():
    chosen = p.normalize(p.Problem(GRID, UNIT, technique=p.Technique(staggered=False)), 1)
    assert chosen == (1, 0, 0, 0)
    assert p.plan(p.Problem(GRID, UNIT, p.normalized_failures(GRID, chosen), p.Technique(staggered=False))).period == 27


def test_the_true_period_decides_between_equal_bounds():
    """With 4 in flight the optimum is 28 for a failure in stage 1 and 29 in stage 2, the bound 28 for both."""
    limited = replace(BASE, in_flight_limit=(4, 4, 4, 4))

    def period(distribution: tuple[int, ...]) -> float:
        return p.plan(replace(limited, failed=p.normalized_failures(GRID, distribution))).period

    assert p.normalize(limited, 1) == (0, 0, 1, 0)
    assert p.normalize(limited, 1, period=period) == (0, 1, 0, 0)


def test_a_bound_that_no_plan_meets_is_not_believed(monkeypatch):
    """Costs and memory of a GPT-3 6.7B on 4 x 8 A100: by bounds and memory the failure belongs to stage 6."""
    monkeypatch.setattr(failure_distribution, "heuristic", partial(p.heuristic, effort=50_000))  # else it takes seconds
    grid = p.Grid(4, 8, 32)
    costs = p.Costs.uniform(8, 0.2026, 0.2178, 0.1875, 0.1999, 0.0133, communication=0.00135)
    base = p.Problem(grid, costs, in_flight_limit=(15,) * 8)
    assert p.normalize(base, 1) == (0, 0, 0, 0, 0, 0, 1, 0)
    problem = normalized_problem(base, 1)
    assert p.plan(problem).period == pytest.approx(p.lower_bound(problem))
    single = (replace(base, failed=frozenset({p.Worker(3, stage)})) for stage in range(8))
    assert p.lower_bound(problem) == min(map(p.lower_bound, single))


def random_case(number: int) -> tuple[p.Problem, int]:
    """A fault-free problem and a number of failures."""
    draw = Random(f"normalization {number}")
    grid, failures = p.Grid(2, 1, 1), 2
    while failures > grid.stages * (grid.pipelines - 1):
        grid = p.Grid(draw.randint(2, 4), draw.randint(2, 5), draw.randint(2, 8))
        failures = draw.randint(1, 3)

    def durations() -> tuple[float, ...]:
        return tuple(round(draw.uniform(0.5, 1.5), 2) for _ in range(grid.stages))

    costs = p.Costs.uniform(grid.stages)
    if draw.random() < 0.5:
        closing = (0.2,) * grid.stages, (0.1,) * grid.stages
        costs = p.Costs(durations(), durations(), durations(), *closing, communication=draw.choice((0.0, 0.1)))
    limit = draw.choice((None, grid.stages, grid.stages + 2))
    technique = p.Technique(staggered=draw.random() < 0.7)
    limits = None if limit is None else (limit,) * grid.stages
    return p.Problem(grid, costs, technique=technique, in_flight_limit=limits), failures


BOUNDS_MISLEAD = (5, 160, 243, 284)


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(number, marks=pytest.mark.long if number in BOUNDS_MISLEAD else pytest.mark.exhaustive)
        for number in range(296)
    ],
)
def test_no_distribution_has_a_better_plan_than_the_chosen_one(number):
    problem, failures = random_case(number)
    grid = problem.grid

    @cache
    def period(distribution: tuple[int, ...]) -> float:
        return p.heuristic(replace(problem, failed=p.normalized_failures(grid, distribution)), 20_000).period

    chosen = p.normalize(problem, failures, period=period)
    asked = period.cache_info().misses
    every = distributions(grid, failures)
    best = min(map(period, every))
    assert period(chosen) <= best * (1 + 1e-9)
    assert asked <= len(every)
    if number in BOUNDS_MISLEAD:
        assert period(p.normalize(problem, failures)) > best * (1 + 1e-9)


def test_periods_are_asked_for_until_no_bound_is_below_the_best():
    base = p.Problem(GRID, UNIT, in_flight_limit=(4, 4, 4, 4))
    periods = {d: 40.0 + number for number, d in enumerate(distributions(GRID, 2))}
    best = (0, 1, 1, 0)
    periods[best] = p.lower_bound(replace(base, failed=p.normalized_failures(GRID, best)))
    asked: list[tuple[int, ...]] = []

    def period(distribution: tuple[int, ...]) -> float:
        asked.append(distribution)
        return periods[distribution]

    assert p.normalize(base, 2, period=period) == best
    bounds = {d: p.lower_bound(replace(base, failed=p.normalized_failures(GRID, d))) for d in periods}
    assert [bounds[d] for d in asked] == sorted(bounds[d] for d in asked)
    assert {d for d, bound in bounds.items() if bound < periods[best]} <= set(asked)


def test_many_distributions_are_searched_near_the_chosen_one():
    problem, asked = p.Problem(p.Grid(8, 16, 4), p.Costs.uniform(16)), []

    def period(distribution: tuple[int, ...]) -> float:
        asked.append(distribution)
        return 1000.0 + len(asked)

    chosen = p.normalize(problem, 8)
    assert p.normalize(problem, 8, period=period) == asked[0] == chosen
    assert len(asked) == 64
    assert all(sum(abs(a - b) for a, b in zip(d, chosen, strict=True)) == 2 for d in asked[1:])


def test_failures_go_to_stages_with_little_work():
    costs = p.Costs((1.0, 0.5, 1.0), (1.0, 0.5, 1.0), (1.0, 0.5, 1.0), (0.0,) * 3, (0.0,) * 3)
    assert p.normalize(p.Problem(p.Grid(4, 3, 12), costs), 2) == (0, 2, 0)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_plans_of_normalized_failures_reach_the_chosen_bound(data):
    grid = p.Grid(data.draw(st.integers(2, 3)), data.draw(st.integers(1, 4)), data.draw(st.integers(4, 8)))
    failures = data.draw(st.integers(0, grid.stages * (grid.pipelines - 1)))
    costs = p.Costs.uniform(grid.stages, communication=data.draw(st.sampled_from([0.0, 0.2])))
    chosen = p.normalize(p.Problem(grid, costs), failures)
    problem = p.Problem(grid, costs, p.normalized_failures(grid, chosen))
    assert p.plan(problem).period <= 1.1 * p.lower_bound(problem)
    assert p.distribution_of(grid, problem.failed) == chosen


@st.composite
def accidents(draw: st.DrawFn) -> tuple[p.Grid, frozenset[p.Worker], tuple[int, ...]]:
    grid = p.Grid(draw(st.integers(1, 4)), draw(st.integers(1, 4)), 4)
    failed: set[p.Worker] = set()
    for stage in range(grid.stages):
        failed |= {
            p.Worker(d, stage) for d in draw(st.sets(st.integers(0, grid.pipelines - 1), max_size=grid.pipelines - 1))
        }
    wanted = draw(st.sampled_from(distributions(grid, len(failed))))
    return grid, frozenset(failed), wanted


def changes_of_stage(grid: p.Grid, failed: Collection[p.Worker], wanted: tuple[int, ...]) -> int:
    """Workers that have to copy the state of another stage."""
    return sum(worker.stage != place.stage for worker, place in p.roles(grid, failed, wanted).items())


@settings(max_examples=100, deadline=None)
@given(accidents())
def test_roles_are_a_bijection_onto_the_live_positions_with_the_fewest_moves(case):
    grid, failed, wanted = case
    taken = p.roles(grid, failed, wanted)
    live = set(grid.workers()) - failed
    assert set(taken) == live
    assert set(taken.values()) == set(grid.workers()) - p.normalized_failures(grid, wanted)
    assert len(set(taken.values())) == len(taken)
    now = p.distribution_of(grid, failed)
    least = sum(max(0, have - want) for have, want in zip(now, wanted, strict=True))
    assert changes_of_stage(grid, failed, wanted) == least


@pytest.mark.parametrize(("make", "error", "message"), [
    (lambda: p.normalize(BASE, -1), ConfigurationError, "failures=-1.*at least 0"),
    (lambda: p.normalize(BASE, 9), PlanningError, "failures=9 leaves.*at most 8"),
    (lambda: p.normalized_failures(GRID, (3, 0, 0, 0)), ConfigurationError, r"0\.\.2"),
    (lambda: p.normalized_failures(GRID, (1, 0)), ConfigurationError, "4 numbers"),
    (lambda: p.roles(GRID, {p.Worker(0, 0)}, (1, 1, 0, 0)), ConfigurationError, "1 failed worker, but.*for 2"),
    (lambda: p.roles(GRID, {p.Worker(d, 0) for d in range(3)}, (1, 1, 1, 0)), PlanningError,
     "all 3 replicas of stage 0"),
])  # fmt: skip
def test_bad_input_names_the_value_and_the_remedy(make, error, message):
    with pytest.raises(error, match=message):
        make()


# -- contingencies ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failures", [0, 1, 2, 3, 8])
def test_every_set_of_failed_workers_that_leaves_a_plan_is_alike_one_of_them(failures):
    found = contingencies(BASE, failures, most=1000)
    assert all(len(problem.failed) == failures for problem in found)
    assert len(set(found)) == len(found)
    possible = set()
    for failed in combinations(GRID.workers(), failures):
        if max(p.distribution_of(GRID, failed)) < GRID.pipelines:
            possible.add(representative(replace(BASE, failed=frozenset(failed))))
    assert possible == set(found)


def test_the_likeliest_come_first():
    def sets(problem: p.Problem) -> int:
        return prod(comb(3, count) for count in p.distribution_of(GRID, problem.failed))

    every = contingencies(BASE, 4, most=1000)
    assert contingencies(BASE, 4, most=5) == every[:5]
    assert [sets(problem) for problem in every] == sorted(map(sets, every), reverse=True)


def test_more_than_can_be_listed_are_spread_over_the_stages():
    large = p.Problem(p.Grid(24, 64, 2), p.Costs.uniform(64))
    found = contingencies(large, 8, most=20)
    assert len(set(found)) == 20
    assert {max(p.distribution_of(large.grid, problem.failed)) for problem in found} == {1}
    assert contingencies(large, 70, most=20) == []


def test_the_next_failures_are_one_for_each_plan_that_may_be_needed():
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


def test_a_run_without_a_limit_has_that_of_1f1b_until_it_has_measured_its_memory():
    usual_limit = failure_distribution.usual_limit
    assert usual_limit(GRID, ()) == usual_limit(GRID, [p.Worker(0, 0)]) == (4, 3, 2, 1)
    assert usual_limit(GRID, (), measured=True) == (7, 7, 7, 7)
    assert usual_limit(GRID, [p.Worker(0, 0)], measured=True) is None
