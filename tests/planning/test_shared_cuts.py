"""Where to cut if stages may share layers: against every cut there is, to a part of a layer."""

import itertools
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_recycle.planning import Grid, LayerCosts, Problem, Technique, Worker
from lightning_recycle.planning.layouts.cuts import SharedStages, fastest_shared, smooth_counts
from lightning_recycle.planning.layouts.fractional_cuts import are_bounds, parts_of, shared_layers
from lightning_recycle.planning.layouts.layer_costs import layer_moves
from lightning_recycle.planning.layouts.layout_search import plan_layout

STEP = 0.05  # of the cuts that are tried


@st.composite
def situations(draw: Any) -> SharedStages:
    count = draw(st.integers(2, 5))
    stages = draw(st.integers(1, min(3, count)))
    seconds = st.integers(1, 4).map(float)
    work = draw(st.lists(seconds, min_size=count, max_size=count))
    once = draw(st.sampled_from([0.0, 0.5]))
    shares = draw(st.lists(st.sampled_from([4.0, 6.0, 8.0]), min_size=stages, max_size=stages))
    most = draw(st.sampled_from([count, 3]))
    fits = None if most == count else (lambda _, begin, end: math.ceil(end) - math.floor(begin) <= most)
    return SharedStages(work, [once] * count, [once] * count, draw(st.sampled_from([0.0, 0.25])), shares, fits)


def every_cut(stages: SharedStages) -> list[tuple[float, ...]]:
    count, inner = len(stages.work), len(stages.shares) - 1
    places = [round(STEP * n, 2) for n in range(1, round(count / STEP))]
    found = [(0, *bounds, count) for bounds in itertools.combinations(places, inner)]
    return [bounds for bounds in found if are_bounds(bounds)]


def largest(stages: SharedStages, bounds: tuple[float, ...]) -> float:
    return max(stages.load(stage, bounds[stage], bounds[stage + 1]) for stage in range(len(stages.shares)))


@settings(max_examples=60, deadline=None)
@given(stages=situations(), slack=st.sampled_from([0.0, 0.02, 0.2]))
def test_no_cut_is_faster(stages: SharedStages, slack: float) -> None:
    fit = [
        bounds
        for bounds in every_cut(stages)
        if stages.fits is None or all(stages.fits(s, a, b) for s, (a, b) in enumerate(itertools.pairwise(bounds)))
    ]
    found = fastest_shared(stages, slack)
    if found is None:
        assert not fit
        return
    bounds, load = found
    assert are_bounds(bounds)
    assert load == pytest.approx(largest(stages, bounds))
    best = min(largest(stages, each) for each in fit)
    assert load <= best * (1 + slack) * (1 + 1e-5)
    as_fast = [len(shared_layers(each)) for each in fit if largest(stages, each) <= load]
    assert len(shared_layers(bounds)) <= min(as_fast, default=len(bounds))


def test_equal_loads_where_whole_layers_have_none() -> None:
    stages = SharedStages([1.0] * 32, [0.0] * 32, [0.0] * 32, 0.0, [128 / 3, *[32.0] * 7])
    found = fastest_shared(stages)
    assert found is not None
    assert found[1] == pytest.approx(32 * 128 / 31, rel=2e-3)


def test_the_same_speed_with_fewer_shared_layers_is_preferred() -> None:
    stages = SharedStages([1.0] * 12, [0.0] * 12, [0.0] * 12, 0.0, [4.0] * 3)
    assert fastest_shared(stages) == ((0, 4, 8, 12), 16.0)


def layers(count: int, **more: Any) -> LayerCosts:
    return LayerCosts((1.0,) * count, (1.0,) * count, (1.0,) * count, parameter_bytes=(8.0,) * count, **more)


def test_stages_take_their_parts_and_hold_the_whole() -> None:
    costs = layers(6, reduce=(0.5,) * 6, optimizer=(0.25,) * 6, held_bytes=(2.0,) * 6, memory_limit=100.0)
    found = costs.costs((0, 2.25, 6))
    assert found.forward == (2.25, 3.75)
    assert found.reduce == (0.5 * 3, 0.5 * 4)
    assert found.optimizer == (0.75, 1.0)
    memory = costs.memory((0, 2.25, 6))
    assert memory is not None
    assert memory.fixed == (3 * 8 + 2, 4 * 8 + 2)
    assert memory.after_forward == (4.5, 7.5)
    assert [sum(part.values()) for part in parts_of((0, 2.25, 6))] == [2.25, 3.75]


def test_what_stages_take_says_what_layers_take() -> None:
    costs = LayerCosts((1.0, 2.0, 3.0, 1.0, 2.0), (1.0,) * 5, (2.0,) * 5, reduce=(0.5,) * 5)
    cuts = (0, 2.25, 5)
    again = LayerCosts.from_stages(costs.costs(cuts), cuts, weights=costs.forward)
    assert again.forward == pytest.approx(costs.forward)


def test_micro_batches_have_costs_and_sizes_of_their_own() -> None:
    costs, grid = layers(6, held_bytes=(1.0,) * 6, waiting_bytes=(2.0,) * 6, reduce=(0.5,) * 6), Grid(2, 2, 4)
    turns = costs.turns((0, 2.5, 6), grid)
    assert turns is not None
    forward = [(2.5 * first, 3.5 * second) for first, second in turns.forward]
    assert {(round(first), round(second)) for first, second in forward} == {(2, 4), (3, 3)}
    assert sum(first for first, _ in forward) / len(forward) == pytest.approx(2.5)
    assert turns.forward == turns.backward_input == turns.backward_weight == turns.held == turns.waiting
    assert turns.reserved == (1.0, 1.0)
    (layer,) = turns.layers
    assert (layer.stage, layer.reduce) == (0, pytest.approx(1 / 3))
    assert {*layer.earlier, *layer.later} == set(range(8))
    assert all(round(forward[number][0]) == 3 for number in layer.earlier)
    assert costs.turns((0, 3, 6), grid) is None


def test_only_what_a_stage_lacks_is_sent() -> None:
    grid = Grid(2, 2, 4)
    moves = layer_moves(grid, (), (0, 3, 6), (0, 3.5, 6))
    assert {(move.layer, move.receiver.stage) for move in moves} == {(3, 0)}
    assert not layer_moves(grid, (), (0, 3.5, 6), (0, 3, 6))
    back = layer_moves(grid, (Worker(0, 1), Worker(1, 1)), (0, 3.5, 6), (0, 4, 6))
    assert not back  # the first stage has the layer that it gets for good


def test_a_shared_layer_is_chosen_where_steps_get_shorter_by_the_times_of_every_micro_batch() -> None:
    grid, costs, cuts = Grid(3, 2, 6), layers(6), (0, 3, 6)
    problem = Problem(grid, costs.costs(cuts), frozenset({Worker(0, 1)}), Technique())
    whole = plan_layout(problem, costs, cuts, next_change=1e6, ways=("layers",), whole="they cannot")
    found = plan_layout(problem, costs, cuts, next_change=1e6, ways=("layers",))
    assert shared_layers(found.chosen.layout.cuts)
    assert found.chosen.period < whole.chosen.period
    assert "3.6" in str(found.chosen.layout)
    assert found.chosen.bound <= found.chosen.period
    judgement = found.chosen.judgement
    assert judgement is not None
    assert judgement.schedule is not None
    assert found.chosen.period <= judgement.schedule.period * 1.02  # nobody waits for gradients


def test_shared_layers_need_memory() -> None:
    grid, cuts = Grid(3, 2, 6), (0, 3, 6)
    costs = layers(6, held_bytes=(1.0,) * 6, memory_limit=3 * 8 + 4 * 3.0)  # no room for a fourth layer
    problem = Problem(grid, costs.costs(cuts), frozenset({Worker(0, 1)}), Technique())
    found = plan_layout(problem, costs, cuts, next_change=1e6, ways=("layers",))
    assert found.chosen is found.reroute


@given(total=st.integers(4, 40), pipelines=st.integers(1, 6), stages=st.integers(1, 4), missing=st.integers(0, 12))
def test_smooth_counts_are_the_best_there_are(total: int, pipelines: int, stages: int, missing: int) -> None:
    workers = pipelines * stages - missing
    if workers < stages:
        return
    table = [math.inf, *(float(-(-total // n)) for n in range(1, pipelines + 1))]
    found = smooth_counts(table, stages, workers)
    every = [
        counts
        for counts in itertools.combinations_with_replacement(range(1, pipelines + 1), stages)
        if sum(counts) == workers
    ]
    assert set(found) <= set(every)

    def speed(counts: tuple[int, ...]) -> float:
        return sum(1 / table[n] for n in counts)

    assert max(map(speed, found)) == pytest.approx(max(map(speed, every)))


def test_numbers_of_workers_that_divide_the_micro_batches_are_preferred() -> None:
    """128 micro-batches: 5 workers run 26 instead of 25.6 of them, 6 run 22 instead of 21.3, 4 and 8 no more."""
    table = [math.inf, *(float(-(-128 // n)) for n in range(1, 9))]
    assert (4, 4, 5, 8) in smooth_counts(table, 4, 21)
