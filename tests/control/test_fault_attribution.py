"""Attribution of faults: whose exceptions are, and which links are broken."""

import random
import time
from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import pytest
from membership_feed import ALL, GRID, all_losses, feed, given, messages, report, reports, running, running_without_3

from lightning_recycle.control.protocol import messages as m
from lightning_recycle.control.protocol import state as s
from lightning_recycle.control.protocol.fault_attribution import (
    MAX_DISTURBANCES,
    Verdict,
    choose_evictions,
    judge_exception,
    remember_exception,
)
from lightning_recycle.control.protocol.messages import OUTSIDE, Adoption, Decision
from lightning_recycle.control.protocol.state import Pair, Remembered

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


@pytest.mark.parametrize(("what", "past", "has_peer", "retries", "verdict"), [
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
])  # fmt: skip
def test_the_verdict(what, past, has_peer, retries, verdict):
    assert judge_exception(raised(**what), stage=0, version=5, past=past, has_peer=has_peer, retries=retries) is verdict


def test_what_was_raised_long_ago_is_forgotten():
    past = remember_exception(raised(3, 4), 1, 5, ())
    assert past == (Remembered(3, 4, 1, (5, "F 0"), 5),)
    assert remember_exception(raised(), 0, 1005, past)[0] == past[0]
    assert past[0] not in remember_exception(raised(), 0, 1006, past)


# ---------------------------------------------------------------------- the state machine


def test_the_worker_is_evicted_and_the_cause_names_the_exception_and_the_work():
    state, commands = feed(running(), raised(2, step=0))
    assert commands == [s.Evict(2, "it raised OSError: [Errno 5] (F 0 of step 0)")]
    state, commands = feed(state, s.Lost(2, commands[0].cause))
    assert messages(commands, m.Regroup) == [m.Regroup(1, (0, 1, 3), 1)]


def test_before_the_workers_have_met_an_exception_is_the_users_own():
    given(s.initial_state(GRID), *map(s.Joined, ALL)).when(raised(2, 0)).then(m.Judged(0, own=True))


# ---------------------------------------------------------------------- broken connections without a death


def disturb(state: s.MembershipState) -> tuple[s.MembershipState, list[s.Command]]:
    """A connection breaks between live workers and all of them report again."""
    generation = state.generation.number
    state, commands = feed(state, m.Broken(0, generation, "connection reset"), s.GraceElapsed(generation, "reset"))
    if state.outcome is None:
        state, more = feed(state, *reports(state.roster.ranks, generation + 1, state.steps.version))
        commands += more
    return state, commands


def test_disturbances_in_a_row_are_given_up_with_an_error_that_names_the_step():
    state = running()
    for _ in range(MAX_DISTURBANCES):
        state, _ = disturb(state)
        assert state.outcome is None
    state, _ = disturb(state)
    assert isinstance(state.outcome, s.Failed)
    assert "step 0, at last because: reset" in state.outcome.reason
    assert "reach each other" not in state.outcome.reason


# ---------------------------------------------------------------------- live workers that cannot reach each other


def test_a_worker_that_reaches_nobody_is_evicted_for_all_of_them():
    state, _ = disturb(running())
    said = [m.Broken(rank, 1, "no connection", (1,)) for rank in (0, 2, 3)]
    _, commands = feed(state, *said, s.GraceElapsed(1, "reset"))
    assert commands[-1:] == [s.Evict(1, "it and workers (0, 0) and (1, 0) and (1, 1) cannot reach each other")]


def test_who_alone_has_what_the_others_need_stays():
    """Worker 0 has nothing to compute. It missed the end of the reduction of step 0; stage 1 has step 1 behind it."""
    versions = {0: 0, 1: 2, 2: 1, 3: 2}
    state, _ = feed(running(), all_losses(0), all_losses(1), m.Broken(0, 0, "reset"), s.GraceElapsed(0, "reset"))
    state, commands = feed(state, *(report(rank, 1, version) for rank, version in versions.items()))
    assert messages(commands, m.Resume)[0].decision == Decision(1, frozenset({1}), (Adoption(0, 0, 2),))
    _, commands = feed(state, m.Broken(0, 1, "no connection", (2,)), s.GraceElapsed(1, "reset"))
    assert commands[-1:] == [s.Evict(0, "it and worker (1, 0) cannot reach each other")]


def test_where_no_eviction_helps_the_error_names_the_workers():
    """Worker 3 is lost, so worker 1 is all that stage 1 has, and worker 0 cannot reach it; then 2 cannot, either."""
    state = running_without_3()
    for number in range(MAX_DISTURBANCES + 1):
        generation = state.generation.number
        unreachable = m.Broken(1, generation, "no connection", (0, 2)) if number else m.Broken(1, generation, "reset")
        state, commands = feed(state, unreachable, s.GraceElapsed(generation, "reset"))
        assert not any(isinstance(command, s.Evict) for command in commands)
        if state.outcome is None:
            state, _ = feed(state, *reports((0, 1, 2), generation + 1))
    assert isinstance(state.outcome, s.Failed)
    assert "(0, 0) and (0, 1), (0, 1) and (1, 0)" in state.outcome.reason


# ---------------------------------------------------------------------- who is evicted for broken links

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


@pytest.mark.parametrize(("pairs", "leader", "evicted"), [
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
])  # fmt: skip
def test_on_two_pipelines_of_two_stages(pairs, leader, evicted):
    assert choose_evictions(pairs, SQUARE, leader) == evicted


def test_who_joins_and_holds_nothing_yet_goes_first():
    assert choose_evictions([(0, 2)], [(2,), (1, 3)], leader=1) == (0,)
    assert choose_evictions([(0, 3)], [(2, 3), (1,)], leader=1) == (0,)


@pytest.mark.parametrize(("pipelines", "stages"), [(2, 3), (3, 2), (3, 3), (4, 2), (8, 1)])
def test_many_cases_of_larger_grids(pipelines, stages):
    chance = random.Random(pipelines)
    links = list(combinations(range(pipelines * stages), 2))
    for _ in range(400):
        pairs = chance.sample(links, chance.randint(0, min(len(links), 12)))
        holders = [tuple(range(stage, pipelines * stages, stages)) for stage in range(stages)]
        if chance.random() < 0.5:  # somebody has just joined
            stage = chance.randrange(stages)
            holders[stage] = holders[stage][1:]
        check(pairs, holders, leader=chance.randrange(pipelines * stages))


def test_the_same_pairs_in_another_order_give_the_same():
    pairs = [(0, 1), (2, 3), (4, 5), (1, 2), (0, 5), (3, 4)]
    holders = [(0, 2, 4), (1, 3, 5)]
    chosen = {choose_evictions(random.Random(seed).sample(pairs, len(pairs)), holders, 1) for seed in range(20)}
    assert len(chosen) == 1


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("number", [40, 400])
def test_a_grid_of_64_with_many_broken_links_is_decided_in_time(number, seed):
    pairs = random.Random(seed).sample(list(combinations(range(64), 2)), number)
    began = time.monotonic()
    chosen = choose_evictions(pairs, [tuple(range(stage, 64, 4)) for stage in range(4)], leader=3)
    assert time.monotonic() - began < 5
    assert chosen is None or all(a in chosen or b in chosen for a, b in pairs)


def test_a_network_that_falls_in_two_halves_costs_one_of_them():
    one, other = range(32), range(32, 64)
    chosen = choose_evictions(list(product(one, other)), [tuple(range(stage, 64, 4)) for stage in range(4)], leader=3)
    assert chosen == tuple(other)
