"""Attribution of faults: whose exceptions are, and which links are broken."""

import random
import time
from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import pytest
from membership_feed import ALL, GRID, all_losses, applied, feed, messages, records, reports, running

from lightning_recycle.control.protocol import messages as m
from lightning_recycle.control.protocol import state as s
from lightning_recycle.control.protocol.fault_attribution import (
    OUTSIDE,
    Pair,
    Remembered,
    Verdict,
    choose_evictions,
    judge,
    remember,
)
from lightning_recycle.control.protocol.member import Member

EVICT, AGAIN, OWN = Verdict.EVICT, Verdict.AGAIN, Verdict.OWN


def raised(rank: int = 0, generation: int = 0, step: int = 5, operation: str = "F 0", **options: Any) -> m.Raised:
    return m.Raised(rank, generation, step, operation, "OSError: [Errno 5]", "", **{**EXACT, **options})


EXACT = {"exact": True, "sticky": False}
INEXACT = {"exact": False, "sticky": False}
STICKY = {"exact": False, "sticky": True}

NOTHING: tuple[Remembered, ...] = ()
HERE = Remembered(9, 0, 0, (5, "F 0"), 5)
SAME_STEP = replace(HERE, place=(5, "B 3"))
LONG_AGO = replace(HERE, place=(2, "F 0"), version=2)
OTHER_STAGE = replace(HERE, stage=1)
IN_A_HOOK = Remembered(9, 0, 0, (OUTSIDE, "in hook, a.py:3"), 2)
HOOK = {"step": OUTSIDE, "operation": "in hook, a.py:3", "exact": False}


@pytest.mark.parametrize(
    ("what", "past", "has_peer", "retries", "verdict"),
    [
        (EXACT, NOTHING, True, 1, EVICT),
        (INEXACT, NOTHING, True, 1, EVICT),
        (STICKY, NOTHING, True, 1, EVICT),
        (EXACT, NOTHING, False, 1, AGAIN),  # the last holder
        (INEXACT, NOTHING, False, 1, OWN),
        (STICKY, NOTHING, False, 1, OWN),
        (EXACT, (HERE,), True, 1, OWN),  # it follows the work
        (EXACT, (HERE,), False, 1, OWN),
        (STICKY, (HERE,), True, 1, OWN),
        (EXACT, (HERE,), True, 2, AGAIN),  # not a second worker for one cause
        (EXACT, (HERE, HERE), True, 2, OWN),
        (EXACT, (SAME_STEP,), True, 1, AGAIN),  # storage that is gone for all
        (INEXACT, (SAME_STEP,), True, 1, OWN),
        (STICKY, (SAME_STEP,), True, 1, EVICT),  # devices are not shared
        (EXACT, (SAME_STEP, SAME_STEP), True, 1, OWN),
        (STICKY, (SAME_STEP, SAME_STEP), True, 1, OWN),
        (EXACT, (LONG_AGO,) * 9, True, 1, EVICT),
        (EXACT, (LONG_AGO,) * 9, False, 1, AGAIN),
        (EXACT, (OTHER_STAGE,), True, 1, EVICT),  # a whole machine: one worker of each stage
        (HOOK, NOTHING, True, 1, EVICT),
        (HOOK, (IN_A_HOOK,), True, 1, OWN),  # a peer came to the same line, steps later
        (HOOK, (replace(IN_A_HOOK, place=(OUTSIDE, "in hook, b.py:7")),), True, 1, EVICT),
        (HOOK, NOTHING, False, 1, OWN),
        (EXACT, NOTHING, True, 0, OWN),  # switched off
        (STICKY, NOTHING, True, 0, OWN),
    ],
)
def test_the_verdict(
    what: dict[str, Any], past: tuple[Remembered, ...], has_peer: bool, retries: int, verdict: Verdict
) -> None:
    assert judge(raised(**what), stage=0, version=5, past=past, has_peer=has_peer, retries=retries) is verdict


def test_what_was_raised_long_ago_is_forgotten() -> None:
    past = remember(raised(3, 4), 1, 5, ())
    assert past == (Remembered(3, 4, 1, (5, "F 0"), 5),)
    assert remember(raised(), 0, 1005, past)[0] == past[0]
    assert past[0] not in remember(raised(), 0, 1006, past)


# ---------------------------------------------------------------------- the state machine


def test_the_worker_is_evicted_and_the_cause_names_the_exception_and_the_work() -> None:
    state, commands = feed(running(), raised(2, step=0))
    assert commands == [s.Evict(2, "it raised OSError: [Errno 5] (F 0 of step 0)")]
    state, commands = feed(state, s.Lost(2, commands[0].cause))
    assert messages(commands, m.Regroup) == [m.Regroup(1, (0, 1, 3), 1)]


def test_a_peer_that_raises_at_the_same_work_is_told_that_it_is_the_users_own() -> None:
    state, _ = feed(running(), raised(2, step=0), s.Lost(2, ""), *reports((0, 1, 3), 1))
    state, commands = feed(state, raised(0, 1, step=0))
    assert commands == [s.Send((0,), m.Judged(1, own=True))]
    _state, commands = feed(state, m.Crash(0, False, "OSError", None, ""))
    assert isinstance(commands[0], s.Crashed)


def test_the_last_holder_of_a_stage_does_the_work_again_in_a_new_generation_of_the_same_workers() -> None:
    state, _ = feed(running(), s.Lost(2, "gone"), *reports((0, 1, 3), 1))
    state, commands = feed(state, raised(0, 1, step=0))
    assert commands[0] == s.Send((0,), m.Judged(1, own=False))
    assert records(commands, "retried")[0].rank == 0
    assert messages(commands, m.Regroup) == [m.Regroup(2, (0, 1, 3), 1)]
    _state, commands = feed(state, *reports((0, 1, 3), 2), raised(0, 2, step=0))
    assert messages(commands, m.Judged) == [m.Judged(2, own=True)]


def test_a_worker_that_raised_before_it_saw_a_new_generation_needs_no_other() -> None:
    state, _ = feed(running(), s.Lost(2, "gone"))
    assert state.generation.number == 1
    _state, commands = feed(state, raised(0, 0, step=0))
    assert messages(commands, m.Judged) == [m.Judged(0, own=False)]
    assert messages(commands, m.Regroup) == []


def test_what_is_said_twice_counts_once() -> None:
    state, _ = feed(running(), s.Lost(2, "gone"), *reports((0, 1, 3), 1), raised(0, 1, step=0))
    assert feed(state, raised(0, 1, step=0)) == (state, [])


def test_before_the_workers_have_met_an_exception_is_the_users_own() -> None:
    state, _ = feed(s.initial_state(GRID), *map(s.Joined, ALL))
    _state, commands = feed(state, raised(2, 0))
    assert messages(commands, m.Judged) == [m.Judged(0, own=True)]


def test_a_worker_that_joins_is_always_evicted() -> None:
    state, _ = feed(running(), all_losses(0), s.Lost(3, "gone"), *reports((0, 1, 2), 1), m.Ready(3))
    begun = [m.Paused(rank, 1, 0) for rank in (0, 1, 2)]
    state, _ = feed(
        state, *begun, *applied((0, 1, 2), 0), *(m.Reached(rank, 1, m.Milestone.AT_BOUNDARY, 1) for rank in (0, 1, 2))
    )
    state, _ = feed(state, *reports((0, 1, 2), 2, 1), *reports((3,), 2, -1))
    assert state.roster.joining == {3}
    for past in ((), (Remembered(1, 1, 1, (5, "F 0"), 1),)):
        _, commands = feed(state.with_faults(raised=past), raised(3, 2, exact=True))
        assert [type(command) for command in commands] == [s.Evict]


def test_a_member_takes_only_the_verdict_of_its_generation() -> None:
    member = Member(0)
    for generation in (0, 1):
        member.receive(m.Regroup(generation, ALL))
        member.enter()
        assert member.judged() is None
        member.receive(m.Judged(generation, own=True))
        assert member.judged() == m.Judged(generation, own=True)


# ---------------------------------------------------------------------- broken links

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
