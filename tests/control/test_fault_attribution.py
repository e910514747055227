"""Whose a suspected exception is, the machine's or the user's: a table of the policy, and the states around it."""

from dataclasses import replace
from typing import Any

import pytest
from membership_feed import ALL, GRID, all_losses, applied, feed, messages, records, reports, running

from lightning_recycle.control.protocol import messages as m
from lightning_recycle.control.protocol import state as s
from lightning_recycle.control.protocol.fault_attribution import OUTSIDE, Remembered, Verdict, judge, remember
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
