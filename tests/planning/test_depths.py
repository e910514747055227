"""Pipelines of different depth against every form there is."""

from itertools import combinations_with_replacement

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_recycle.errors import PlanningError
from lightning_recycle.planning.depths import Form, best_cut, form_of, forms, judged_form, shared
from lightning_recycle.planning.layer_costs import LayerCosts
from lightning_recycle.planning.layout_judging import Judgement

SECONDS = st.sampled_from([0.3, 1.0, 1.7, 4.0])


@given(st.integers(1, 12), st.lists(SECONDS, min_size=1, max_size=4))
def test_shares_have_the_least_maximum(total: int, seconds: list[float]) -> None:
    if total < len(seconds):
        with pytest.raises(PlanningError, match="too few"):
            shared(total, seconds)
        return
    found = shared(total, seconds)
    assert sum(found) == total
    assert min(found) >= 1
    least = min(
        max(share * each for share, each in zip(split, seconds, strict=True)) for split in _splits(total, len(seconds))
    )
    assert max(share * each for share, each in zip(found, seconds, strict=True)) == pytest.approx(least)


def _splits(total: int, parts: int):
    if parts == 1:
        yield (total,)
        return
    for first in range(1, total - parts + 2):
        for rest in _splits(total - first, parts - 1):
            yield (first, *rest)


@settings(max_examples=60, deadline=None)
@given(st.lists(SECONDS, min_size=2, max_size=6), st.integers(1, 8), st.integers(2, 4))
def test_the_first_form_is_the_fastest_of_all_with_many_micro_batches(
    seconds: list[float], workers: int, usual: int
) -> None:
    layers = LayerCosts(tuple(seconds), tuple(seconds), tuple(seconds))
    total = 2000  # so many that rounding of the shares does not matter
    found = forms(layers, workers, total, usual=usual)
    every = [
        form_of(layers, depths, total)
        for count in range(1, workers + 1)
        for depths in combinations_with_replacement(range(1, len(seconds) + 1), count)
        if sum(depths) <= workers
    ]
    assert found[0].period <= min(form.period for form in every if form is not None) * 1.01
    for form in found:
        assert sum(form.microbatches) == total
        assert form.workers <= workers


def test_memory_decides_how_shallow_a_pipeline_may_be() -> None:
    layers = LayerCosts(
        (1.0,) * 8, (1.0,) * 8, (1.0,) * 8, held_bytes=(1.0,) * 8, parameter_bytes=(9.0,) * 8, memory_limit=25.0
    )
    assert best_cut(layers, 3) is None
    cuts, slowest = best_cut(layers, 4) or ((), 0.0)
    assert (cuts, slowest) == ((0, 2, 4, 6, 8), 6.0)
    assert {depth for form in forms(layers, 8, 32, usual=4) for depth in form.depths} <= {4, 5, 6, 7, 8}
    assert form_of(layers, (4, 3), 32) is None


def test_shares_follow_what_the_schedules_take() -> None:
    layers = LayerCosts((1.0,) * 4, (1.0,) * 4, (1.0,) * 4)
    form = form_of(layers, (2, 2), 20)
    assert form is not None
    assert form.microbatches == (10, 10)
    assert str(form) == "2 x 2"

    def slow_second(cuts: tuple, share: int, pipelines: int) -> Judgement:
        return Judgement(6.0 * share * (2.0 if share < 10 else 1.0))

    uneven = form_of(layers, (4, 2), 18)
    assert uneven is not None
    assert uneven.microbatches == (12, 6)
    judged = judged_form(uneven, slow_second)
    assert judged.period == 72.0
    assert sum(judged.microbatches) == 18


def test_pipelines_that_are_cut_at_other_places_wait_for_each_other() -> None:
    """Stages begin an F behind the one before, which is a slot per layer, and end after 60 slots."""

    def judge(cuts: tuple, share: int, pipelines: int) -> Judgement:
        return Judgement(60.0, spans=tuple((float(begin), begin + 60.0) for begin in cuts[:-1]))

    alike = Form(((0, 4, 8), (0, 4, 8)), (10, 10), 1.0)
    assert judged_form(alike, judge).period == 60.0
    # Stages that share a layer: 0 and 0, 3 and 0, 3 and 4, 6 and 4. They begin 0, 3, -1 and 2 slots behind the other.
    unlike = Form(((0, 3, 6, 8), (0, 4, 8)), (10, 10), 1.0)
    assert judged_form(unlike, judge).period == pytest.approx(60.0 + (3 + 1) / 2)
