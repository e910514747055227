"""Cuts at a part of a layer: what they are, and who runs the layer."""

import math
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_recycle.planning.grid import Grid
from lightning_recycle.planning.layouts.fractional_cuts import (
    are_bounds,
    are_whole,
    bounds_of,
    held_ranges,
    rounded,
    shared_layers,
)


@pytest.mark.parametrize(
    ("bounds", "good"),
    [
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
    ],
)
def test_which_bounds_there_can_be(bounds: tuple[float, ...], good: bool) -> None:
    assert are_bounds(bounds) is good


def test_neighbours_hold_what_they_share() -> None:
    bounds = (0, 4.25, 8, 11.5, 16)
    assert held_ranges(bounds) == (range(5), range(4, 8), range(8, 12), range(11, 16))
    assert shared_layers(bounds) == {4: (0, 0.25), 11: (2, 0.5)}
    assert not are_whole(bounds)
    assert are_whole((0, 4, 8))


def test_rounded_bounds_can_be() -> None:
    assert rounded(4.1290322) == 4.13
    assert rounded(3.9999) == 4
    assert isinstance(rounded(3.9999), int)


def _bounds(widths: list[int]) -> tuple[float, ...]:
    """Of stages that are that many hundredths wide."""
    starts = (rounded(sum(widths[:stage]) / 100) for stage in range(len(widths)))
    return (*starts, sum(widths) // 100 + 2)


bounds_strategy = st.lists(st.integers(101, 600), min_size=1, max_size=8).map(_bounds)


@given(bounds=bounds_strategy, pipelines=st.integers(1, 5), microbatches=st.integers(1, 40))
def test_every_micro_batch_has_whole_bounds_of_its_own(
    bounds: tuple[float, ...], pipelines: int, microbatches: int
) -> None:
    grid = Grid(pipelines, len(bounds) - 1, microbatches)
    for index in range(pipelines * microbatches):
        own = bounds_of(bounds, index, grid)
        assert own[0] == 0
        assert own[-1] == bounds[-1]
        for bound, (stage, held) in zip(own, enumerate(held_ranges(bounds)), strict=False):
            assert held.start <= bound
            assert own[stage + 1] <= held.stop
    runs = [[bounds_of(bounds, m * pipelines + d, grid) for m in range(microbatches)] for d in range(pipelines)]
    for number, bound in enumerate(bounds):
        part = Fraction(round(bound * 100), 100) % 1
        earlier = [sum(own[number] - math.floor(bound) for own in of_pipeline) for of_pipeline in runs]
        assert all(abs(taken - part * microbatches) < 1 for taken in earlier)
        assert sum(earlier) == math.floor(part * microbatches * pipelines)  # Hermite's identity
        if part * microbatches >= 1:
            assert all(of_pipeline[-1][number] > bound for of_pipeline in runs)  # the last one runs it there


@given(bounds=bounds_strategy)
def test_each_stage_has_a_layer_of_its_own_if_the_bounds_can_be(bounds: tuple[float, ...]) -> None:
    if are_bounds(bounds):
        for begin, end in pairwise(bounds):
            assert math.ceil(begin) < math.floor(end)
