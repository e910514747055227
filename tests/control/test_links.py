"""Whom to evict when live workers cannot reach each other, compared with all that could be done."""

import random
import time
from collections.abc import Collection, Iterator
from itertools import combinations, product

import pytest

from lightning_recycle.control.protocol.fault_attribution import Pair, choose_evictions

SQUARE = [(0, 2), (1, 3)]  # stages 0 and 1 of two pipelines


def all_choices(pairs: Collection[Pair], holders: list[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
    """All sets of workers without which no pair is left and each stage is held, the smallest first."""
    ranks = sorted({rank for pair in pairs for rank in pair})
    for size in range(len(ranks) + 1):
        for evicted in combinations(ranks, size):
            repaired = all(a in evicted or b in evicted for a, b in pairs)
            if repaired and all(set(stage) - set(evicted) for stage in holders):
                yield evicted


def check(pairs: Collection[Pair], holders: list[tuple[int, ...]], leader: int) -> None:
    chosen, choices = choose_evictions(pairs, holders, leader), list(all_choices(pairs, holders))
    if chosen is None:
        assert not choices
    else:
        assert chosen in choices
        assert len(chosen) == len(choices[0])


@pytest.mark.parametrize(
    ("pairs", "leader", "evicted"),
    [
        ([], 1, ()),
        ([(0, 2)], 1, (2,)),
        ([(1, 3)], 1, (3,)),
        ([(1, 3)], 3, (1,)),
        ([(0, 1)], 1, (0,)),
        ([(0, 1), (1, 2)], 1, (1,)),
        ([(0, 3), (2, 3)], 1, (3,)),
        ([(0, 1), (2, 3)], 1, (0, 3)),
        ([(0, 2), (1, 3)], 1, (2, 3)),
        ([(0, 1), (0, 3), (1, 2), (2, 3)], 1, None),
        ([(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)], 1, None),
    ],
)
def test_on_two_pipelines_of_two_stages(pairs: list[Pair], leader: int, evicted: tuple[int, ...] | None) -> None:
    assert choose_evictions(pairs, SQUARE, leader) == evicted


def test_who_is_in_most_pairs_goes_even_if_it_is_the_leader() -> None:
    assert choose_evictions([(0, 1), (1, 2), (1, 3)], SQUARE, leader=1) == (1,)


def test_the_last_holder_of_a_stage_stays() -> None:
    assert choose_evictions([(0, 1)], [(0,), (1, 3)], leader=1) == (1,)
    assert choose_evictions([(0, 1)], [(0, 2), (1,)], leader=3) == (0,)
    assert choose_evictions([(0, 1)], [(0,), (1,)], leader=1) is None


def test_who_joins_and_holds_nothing_yet_goes_first() -> None:
    assert choose_evictions([(0, 2)], [(2,), (1, 3)], leader=1) == (0,)
    assert choose_evictions([(0, 3)], [(2, 3), (1,)], leader=1) == (0,)


@pytest.mark.parametrize("leader", range(4))
def test_every_case_of_two_pipelines_of_two_stages(leader: int) -> None:
    links = list(combinations(range(4), 2))
    for broken in product((False, True), repeat=len(links)):
        pairs = [pair for pair, is_broken in zip(links, broken, strict=True) if is_broken]
        for holders in (SQUARE, [(0,), (1, 3)], [(0, 2), (3,)], [(2,), (1,)]):
            check(pairs, holders, leader)


@pytest.mark.parametrize(("pipelines", "stages"), [(2, 3), (3, 2), (3, 3), (4, 2), (8, 1)])
def test_many_cases_of_larger_grids(pipelines: int, stages: int) -> None:
    chance = random.Random(pipelines)
    links = list(combinations(range(pipelines * stages), 2))
    for _ in range(400):
        pairs = chance.sample(links, chance.randint(0, min(len(links), 12)))
        holders = [tuple(range(stage, pipelines * stages, stages)) for stage in range(stages)]
        if chance.random() < 0.5:  # somebody has just joined
            stage = chance.randrange(stages)
            holders[stage] = holders[stage][1:]
        check(pairs, holders, leader=chance.randrange(pipelines * stages))


def test_the_same_pairs_in_another_order_give_the_same() -> None:
    pairs = [(0, 1), (2, 3), (4, 5), (1, 2), (0, 5), (3, 4)]
    holders = [(0, 2, 4), (1, 3, 5)]
    chosen = {choose_evictions(random.Random(seed).sample(pairs, len(pairs)), holders, 1) for seed in range(20)}
    assert len(chosen) == 1


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("number", [40, 400])
def test_a_grid_of_64_with_many_broken_links_is_decided_in_time(number: int, seed: int) -> None:
    pairs = random.Random(seed).sample(list(combinations(range(64), 2)), number)
    began = time.monotonic()
    chosen = choose_evictions(pairs, [tuple(range(stage, 64, 4)) for stage in range(4)], leader=3)
    assert time.monotonic() - began < 5
    assert chosen is None or all(a in chosen or b in chosen for a, b in pairs)


def test_a_network_that_falls_in_two_halves_costs_one_of_them() -> None:
    one, other = range(32), range(32, 64)
    chosen = choose_evictions(list(product(one, other)), [tuple(range(stage, 64, 4)) for stage in range(4)], leader=3)
    assert chosen == tuple(other)
