"""Of equally fast plans the one that asks for the least memory, in micro-batches and in bytes."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from test_properties import problems

from lightning_recycle import planning as p
from lightning_recycle.planning.heuristic_planner import heuristic_with_variation
from lightning_recycle.planning.layer_cuts import LayerCosts
from lightning_recycle.planning.list_scheduling import Search, with_least_memory
from lightning_recycle.planning.routing import reroute
from lightning_recycle.planning.schedule import EQUALLY_FAST, is_better
from lightning_recycle.planning.timing import Codes, assemble

EFFORT = 40_000


def lost(pipelines: int, stages: int, microbatches: int, *failed: tuple[int, int], **changes: object) -> p.Problem:
    places = frozenset(p.Worker(*place) for place in failed)
    return p.Problem(p.Grid(pipelines, stages, microbatches), p.Costs.uniform(stages), places, **changes)


def peaks(schedule: p.Schedule) -> list[int]:
    """By stage, the most micro-batches of a worker."""
    stages = range(schedule.grid.stages)
    return [max(map(schedule.peak_in_flight, schedule.problem.live_workers(stage))) for stage in stages]


@pytest.mark.parametrize(("problem", "times", "enough"), [
    (lost(2, 2, 8, (1, 1), technique=p.Technique(split_backward=False)), (51, 51), (2, 1)),
    (lost(2, 2, 8, (1, 1)), (48, 49), (3, 3)),
    (lost(4, 4, 16, (1, 1)), (66, 67), (5, 5, 5, 5)),
    (lost(4, 4, 16, (1, 2)), (66, 68), (5, 5, 5, 5)),
    (lost(3, 4, 12, (0, 0), (1, 3)), (54, 57), (8, 8, 8, 8)),
    (lost(3, 4, 12, (1, 0), (2, 2)), (54, 57), (8, 8, 8, 8)),
    (lost(3, 4, 6, (1, 2)), (27, 29), (6, 6, 6, 6)),
    (lost(3, 4, 6), (19, 21), (6, 6, 6, 6)),
], ids=lambda value: f"{value.grid} {len(value.failed)} lost" if isinstance(value, p.Problem) else "")  # fmt: skip
def test_the_default_plan_holds_no_more_than_its_period_needs(problem, times, enough):
    """Eager plans of the same period and makespan hold up to 22 micro-batches on a worker."""
    schedule = p.heuristic(problem)
    p.validate(schedule)
    assert schedule.period <= times[0] * (1 + 1e-9)
    assert schedule.makespan <= times[1] * (1 + 1e-9)
    assert all(held <= most for held, most in zip(peaks(schedule), enough, strict=True)), peaks(schedule)


@pytest.mark.parametrize("after_backward", [0.0, 0.5, 1.6])
def test_bytes_are_what_counts_where_a_problem_has_them(after_backward):
    """Each stage has other sizes; the tightest worker is the one with the least room, not the one with most bytes."""
    memory = p.Memory((100.0, 60.0, 100.0, 200.0), (10.0, 5.0, 20.0, 90.0), (4.0, 3.0, 2.0, 5.0), (after_backward,) * 4)
    problem = lost(3, 4, 12, (1, 2), memory=memory)
    schedule = p.heuristic(problem)
    p.validate(schedule)
    roomy = p.heuristic(replace(problem, memory=None))
    assert schedule.period <= roomy.period * (1 + EQUALLY_FAST)
    tightest, total = schedule.demand
    held = {worker: schedule.peak_memory(worker) for worker in schedule.live_workers}
    assert tightest == max(bytes_ / memory.capacity[worker.stage] for worker, bytes_ in held.items())
    assert total == sum(held.values())
    assert tightest < 0.6


@settings(max_examples=30, deadline=None)
@given(problems())
def test_less_memory_never_costs_time(problem):
    """Slow workers, limits in bytes and micro-batches, with and without techniques."""
    codes = Codes(problem, reroute(problem.grid, problem.failed, dict(problem.worker_factors)),
                  fused=not problem.technique.split_backward)  # fmt: skip
    eager = Search(codes, EFFORT).run()
    calm = with_least_memory(codes, eager, EFFORT)
    before, after = (assemble(codes, each.sequence, each.timing) for each in (eager, calm))
    p.validate(after)
    for was, now in ((before.period, after.period), (before.makespan, after.makespan)):
        assert now <= was * (1 + EQUALLY_FAST) + 1e-9
    assert after.demand[0] <= before.demand[0] * (1 + 1e-9)


def test_micro_batches_that_differ_are_held_by_their_own_bytes():
    grid, cuts, slots = p.Grid(2, 2, 8), (0, 2.5, 5), (1.0,) * 5
    layers = LayerCosts(slots, slots, slots, held_bytes=slots, parameter_bytes=slots, memory_limit=40.0)
    problem = p.Problem(grid, layers.costs(cuts), frozenset({p.Worker(1, 1)}), memory=layers.memory(cuts))
    variation = layers.variation(cuts, grid)
    assert variation is not None
    schedule, _ = heuristic_with_variation(p.heuristic(problem), variation)
    assert max(peaks(schedule)) <= 4


def test_a_limit_below_the_largest_micro_batch_is_no_plan():
    """The mean one has room; a plan that left out the others would be far shorter than the bound."""
    grid, cuts, slots = p.Grid(3, 3, 6), (0, 4.94, 12.65, 15), (0.01,) * 15
    bytes_ = (1e8,) * 15
    layers = LayerCosts(
        slots, slots, slots, held_bytes=bytes_, waiting_bytes=(5e7,) * 15, parameter_bytes=bytes_, memory_limit=1.875e9
    )
    failed = frozenset(p.Worker(*place) for place in ((0, 2), (1, 2), (2, 0)))
    problem = p.Problem(grid, layers.costs(cuts), failed, memory=layers.memory(cuts))
    variation = layers.variation(cuts, grid)
    assert variation is not None
    schedule, timing = heuristic_with_variation(p.heuristic(problem), variation)
    assert timing.period >= 0.03 * 18 * 2.35
    p.validate(schedule)


def test_the_plan_of_a_lane_is_calm_too():
    """64 stages, 26,000 operations in a lane: a few plays suffice for half."""
    schedule = p.heuristic(p.Problem(p.Grid(8, 32, 64), p.Costs.uniform(32)), compact_from=10_000)
    assert schedule.period == p.lower_bound(schedule.problem)
    assert max(peaks(schedule)) < 64
    assert schedule.demand == schedule.expand().demand


def test_a_shorter_period_beats_memory_and_less_memory_beats_a_tenth_of_a_per_mille():
    problem = lost(2, 2, 8, (1, 1))
    schedule = p.heuristic(problem)
    eager = p.heuristic(problem, 0)
    assert problem.measure.capacity == (1, 1)
    assert schedule.demand[0] == max(peaks(schedule))
    assert (eager.period, eager.makespan) == (schedule.period, schedule.makespan)
    assert is_better(schedule, eager)
    assert not is_better(eager, schedule)
    assert not is_better(schedule, schedule)
    assert is_better(replace(schedule, period=schedule.period * 1.0005), eager)
    assert not is_better(replace(schedule, period=schedule.period * 1.002), eager)
