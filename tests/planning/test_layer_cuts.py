"""Cuts: what they are, who runs a shared layer, and the fastest ones against every cut there is."""

import itertools
import math
import operator
from fractions import Fraction
from itertools import combinations, pairwise, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_recycle.planning import Grid, LayerCosts, Problem, Technique, Worker, layer_cuts
from lightning_recycle.planning.layouts import plan_layout
from lightning_recycle.planning.problem import least_maximum

SECONDS = st.sampled_from([0.0, 0.1, 0.5, 1.0, 1.3, 4.0])
CLOSE = 2e-6
STEP = 0.05  # of the cuts with shared layers that are tried


@pytest.mark.parametrize(("bounds", "good"), [
    ((0, 4, 8), True),
    ((0, 4.25, 8), True),
    ((0, 1, 2, 3), True),
    ((0, 1.5, 2.5, 4), False),  # the second stage has no layer of its own
    ((0, 0.5, 2), False),
    ((0, 1.5, 3.5, 5), True),
    ((0, 4.333333, 8), False),
    ((0, 4.25, 8.5), False),
    ((1, 4, 8), False),
    ((0, 8, 4), False),
    ((0,), False),
    ((0, math.nan, 8), False),
    ((0, "4", 8), False),
    ((0, True, 2), False),
])  # fmt: skip
def test_which_bounds_there_can_be(bounds, good):
    assert layer_cuts.are_bounds(bounds) is good


def test_neighbours_hold_what_they_share():
    bounds = (0, 4.25, 8, 11.5, 16)
    assert layer_cuts.held_ranges(bounds) == (range(5), range(4, 8), range(8, 12), range(11, 16))
    assert layer_cuts.shared_layers(bounds) == {4: (0, 0.25), 11: (2, 0.5)}
    assert not layer_cuts.are_whole(bounds)
    assert layer_cuts.are_whole((0, 4, 8))


def test_rounded_bounds_can_be():
    assert layer_cuts.rounded(4.1290322) == 4.13
    assert layer_cuts.rounded(3.9999) == 4
    assert isinstance(layer_cuts.rounded(3.9999), int)


def _bounds(widths: list[int]) -> tuple[float, ...]:
    """Of stages that are that many hundredths wide."""
    starts = (layer_cuts.rounded(sum(widths[:stage]) / 100) for stage in range(len(widths)))
    return (*starts, sum(widths) // 100 + 2)


bounds_strategy = st.lists(st.integers(101, 600), min_size=1, max_size=8).map(_bounds)


@given(bounds=bounds_strategy, pipelines=st.integers(1, 5), microbatches=st.integers(1, 40))
def test_every_micro_batch_has_whole_bounds_of_its_own(bounds, pipelines, microbatches):
    grid = Grid(pipelines, len(bounds) - 1, microbatches)
    for index in range(pipelines * microbatches):
        own = layer_cuts.bounds_of(bounds, index, grid)
        assert own[0] == 0
        assert own[-1] == bounds[-1]
        for bound, (stage, held) in zip(own, enumerate(layer_cuts.held_ranges(bounds)), strict=False):
            assert held.start <= bound
            assert own[stage + 1] <= held.stop
    runs = [
        [layer_cuts.bounds_of(bounds, m * pipelines + d, grid) for m in range(microbatches)] for d in range(pipelines)
    ]
    for number, bound in enumerate(bounds):
        part = Fraction(round(bound * 100), 100) % 1
        earlier = [sum(own[number] - math.floor(bound) for own in of_pipeline) for of_pipeline in runs]
        assert all(abs(taken - part * microbatches) < 1 for taken in earlier)
        assert sum(earlier) == math.floor(part * microbatches * pipelines)  # Hermite's identity
        if part * microbatches >= 1:
            assert all(of_pipeline[-1][number] > bound for of_pipeline in runs)  # the last one runs it there


@st.composite
def whole_stages(draw: st.DrawFn) -> tuple[layer_cuts.Stages, list[int]]:
    """Stages of up to seven layers, and the most layers of each."""
    stages = draw(st.integers(1, 4))
    layers = draw(st.integers(stages, 7))
    work = draw(st.lists(SECONDS, min_size=layers, max_size=layers))
    once = draw(st.lists(SECONDS, min_size=layers, max_size=layers))
    busiest = draw(st.lists(st.sampled_from([1.0, 1.5, 3.0, 9.0]), min_size=stages, max_size=stages))
    rooms = [draw(st.integers(1, layers)) for _ in range(stages)]
    return layer_cuts.Stages(work, once, busiest, lambda s, i, j: j - i <= rooms[s]), rooms


def every_whole_cut(stages: layer_cuts.Stages, rooms: list[int]) -> list[tuple[float, tuple[int, ...]]]:
    """Bottleneck and bounds of every partition that is allowed."""
    found = []
    for inner in combinations(range(1, len(stages.work)), len(stages.busiest) - 1):
        cuts = (0, *inner, len(stages.work))
        ranges = list(enumerate(pairwise(cuts)))
        if all(end - begin <= rooms[stage] for stage, (begin, end) in ranges):
            found.append((max(stages.load(s, i, j) for s, (i, j) in ranges), cuts))
    return found


def test_layers_that_take_time_once_in_a_step_alone_are_cut():
    found = layer_cuts.fastest_cut(layer_cuts.Stages([0.0, 0.0], [1.0, 3.0], [1.0, 1.0]))
    assert (found.cuts, found.bottleneck) == ((0, 1, 2), 3.0)


@settings(max_examples=60, deadline=None)
@given(whole_stages())
def test_the_bottleneck_is_the_least_of_all_partitions(case):
    stages, rooms = case
    all_of_them = every_whole_cut(stages, rooms)
    found = layer_cuts.fastest_cut(stages)
    if not all_of_them:
        assert found is None
        return
    assert found.bottleneck <= min(all_of_them)[0] * (1 + CLOSE) + CLOSE
    assert found.cuts in {cuts for _, cuts in all_of_them}


@given(st.integers(1, 12), st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.0]), min_size=1, max_size=4))
def test_the_least_maximum_is_that_of_the_best_distribution(microbatches, factors):
    least = min(
        max(held * factor for held, factor in zip(split, factors, strict=True))
        for split in product(range(microbatches + 1), repeat=len(factors))
        if sum(split) == microbatches
    )
    assert least_maximum(operator.mul, microbatches, factors) == least


def sharing(work: list[float], once: float, counts: list[float], fits: Any = None) -> layer_cuts.Stages:
    """Stages of one worker each that may share layers, with that many micro-batches."""
    return layer_cuts.Stages(work, [once] * len(work), counts, fits, shares_layers=True)


@st.composite
def sharing_stages(draw: Any) -> layer_cuts.Stages:
    count = draw(st.integers(2, 5))
    stages = draw(st.integers(1, min(3, count)))
    work = draw(st.lists(st.integers(1, 4).map(float), min_size=count, max_size=count))
    once = draw(st.sampled_from([0.0, 1.0]))
    counts = draw(st.lists(st.sampled_from([4.0, 6.0, 8.0]), min_size=stages, max_size=stages))
    most = draw(st.sampled_from([count, 3]))
    fits = None if most == count else (lambda _, begin, end: math.ceil(end) - math.floor(begin) <= most)
    return sharing(work, once, counts, fits)


def every_cut(stages: layer_cuts.Stages) -> list[tuple[float, ...]]:
    count, inner = len(stages.work), len(stages.busiest) - 1
    places = [round(STEP * n, 2) for n in range(1, round(count / STEP))]
    found = [(0, *bounds, count) for bounds in itertools.combinations(places, inner)]
    return [bounds for bounds in found if layer_cuts.are_bounds(bounds)]


def largest(stages: layer_cuts.Stages, bounds: tuple[float, ...]) -> float:
    return max(stages.load(stage, *ends) for stage, ends in enumerate(pairwise(bounds)))


@settings(max_examples=30, deadline=None)
@given(stages=sharing_stages(), slack=st.sampled_from([0.0, 0.02, 0.2]))
def test_no_cut_with_shared_layers_is_faster(stages, slack):
    fit = [
        bounds
        for bounds in every_cut(stages)
        if stages.fits is None or all(stages.fits(s, a, b) for s, (a, b) in enumerate(pairwise(bounds)))
    ]
    best = layer_cuts.fastest_cut(stages)
    if best is None:
        assert not fit
        return
    found = stages.within(best.bottleneck * (1 + slack))
    assert layer_cuts.are_bounds(found.cuts)
    assert found.bottleneck == pytest.approx(largest(stages, found.cuts))
    least = min(largest(stages, each) for each in fit)
    assert found.bottleneck <= least * (1 + slack) * (1 + 1e-5)
    as_fast = [len(layer_cuts.shared_layers(each)) for each in fit if largest(stages, each) <= found.bottleneck]
    assert len(layer_cuts.shared_layers(found.cuts)) <= min(as_fast, default=len(found.cuts))


def test_equal_loads_where_whole_layers_have_none():
    found = layer_cuts.fastest_cut(sharing([1.0] * 32, 0.0, [128 / 3, *[32.0] * 7]))
    assert found.bottleneck == pytest.approx(32 * 128 / 31, rel=2e-3)


def layers(count: int, **more: Any) -> LayerCosts:
    return LayerCosts((1.0,) * count, (1.0,) * count, (1.0,) * count, parameter_bytes=(8.0,) * count, **more)


def test_stages_take_their_parts_and_hold_the_whole():
    costs = layers(6, reduce=(0.5,) * 6, optimizer=(0.25,) * 6, held_bytes=(2.0,) * 6, memory_limit=100.0)
    found = costs.costs((0, 2.25, 6))
    assert found.forward == (2.25, 3.75)
    assert found.reduce == (0.5 * 3, 0.5 * 4)
    assert found.optimizer == (0.75, 1.0)
    memory = costs.memory((0, 2.25, 6))
    assert memory.fixed == (3 * 8 + 2, 4 * 8 + 2)
    assert memory.after_forward == (4.5, 7.5)
    assert [sum(part.values()) for part in layer_cuts.parts_of((0, 2.25, 6))] == [2.25, 3.75]


def test_what_stages_take_says_what_layers_take():
    costs = LayerCosts((1.0, 2.0, 3.0, 1.0, 2.0), (1.0,) * 5, (2.0,) * 5, reduce=(0.5,) * 5)
    cuts = (0, 2.25, 5)
    again = LayerCosts.from_stages(costs.costs(cuts), cuts, weights=costs.forward)
    assert again.forward == pytest.approx(costs.forward)


def test_micro_batches_have_costs_and_sizes_of_their_own():
    costs, grid = layers(6, held_bytes=(1.0,) * 6, waiting_bytes=(2.0,) * 6, reduce=(0.5,) * 6), Grid(2, 2, 4)
    variation = costs.variation((0, 2.5, 6), grid)
    forward = [(2.5 * first, 3.5 * second) for first, second in variation.forward]
    assert {(round(first), round(second)) for first, second in forward} == {(2, 4), (3, 3)}
    assert sum(first for first, _ in forward) / len(forward) == pytest.approx(2.5)
    assert (
        variation.forward
        == variation.backward_input
        == variation.backward_weight
        == variation.held
        == variation.waiting
    )
    assert variation.reserved == (1.0, 1.0)
    (layer,) = variation.layers
    assert (layer.stage, layer.reduce) == (0, pytest.approx(1 / 3))
    assert {*layer.earlier, *layer.later} == set(range(8))
    assert all(round(forward[number][0]) == 3 for number in layer.earlier)
    assert costs.variation((0, 3, 6), grid) is None


def test_only_what_a_stage_lacks_is_sent():
    grid = Grid(2, 2, 4)
    moves = layer_cuts.transfers(grid, range(4), (0, 3, 6), (0, 3.5, 6))
    assert {(move.layers, grid.worker(move.receiver).stage) for move in moves} == {((3,), 0)}
    assert not layer_cuts.transfers(grid, range(4), (0, 3.5, 6), (0, 3, 6))
    back = layer_cuts.transfers(grid, (0, 2), (0, 3.5, 6), (0, 4, 6))
    assert not back  # the first stage has the layer that it gets for good


def test_a_shared_layer_is_chosen_where_steps_get_shorter_by_the_times_of_every_micro_batch():
    grid, costs, cuts = Grid(3, 2, 6), layers(6), (0, 3, 6)
    problem = Problem(grid, costs.costs(cuts), frozenset({Worker(0, 1)}), Technique())
    whole = plan_layout(problem, costs, cuts, next_change=1e6, whole="they cannot")
    found = plan_layout(problem, costs, cuts, next_change=1e6)
    assert layer_cuts.shared_layers(found.chosen.cuts)
    assert found.chosen.period < whole.chosen.period
    assert "3.6" in str(found.chosen)
    judgement = found.chosen.judgement
    assert found.chosen.period <= judgement.schedule.period * 1.02  # nobody waits for gradients


def test_shared_layers_need_memory():
    grid, cuts = Grid(3, 2, 6), (0, 3, 6)
    costs = layers(6, held_bytes=(1.0,) * 6, memory_limit=3 * 8 + 4 * 3.0)  # no room for a fourth layer
    problem = Problem(grid, costs.costs(cuts), frozenset({Worker(0, 1)}), Technique())
    found = plan_layout(problem, costs, cuts, next_change=1e6)
    assert found.chosen is found.reroute
