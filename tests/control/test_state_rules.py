"""The rules that every state of the protocol keeps are checked, and a state that breaks one is named."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from membership_feed import ALL, feed, running, running_without_3

from lightning_recycle.control.protocol import messages
from lightning_recycle.control.protocol import state as s
from lightning_recycle.control.protocol.member import Member
from lightning_recycle.control.protocol.membership import transition
from lightning_recycle.control.protocol.messages import StepState, WorkerStatus
from lightning_recycle.control.protocol.state import Standing

BROKEN: dict[str, Callable[[s.MembershipState], s.MembershipState]] = {
    "who waits to be let in is out of the roster": lambda state: state.with_roster(ready=frozenset({1})),
    "who joins, leaves or ends is live": lambda state: state.with_roster(leaving=frozenset({7})),
    "no stage is lost": lambda state: state.with_roster(live=frozenset({0, 2}), joined=frozenset()),
    "the leader is live": lambda state: state.with_roster(leader=9),
    "each column has a worker with its state": lambda state: state.with_roster(joining=frozenset({0, 2})),
    "all have reported": lambda state: state.with_generation(reports={}),
    "broken pairs are of live workers, in order": lambda state: state.with_generation(broken_pairs=frozenset({(1, 0)})),
    "none has begun the step at the boundary": lambda state: state.with_generation(
        pause=s.PauseState(begun=dict.fromkeys(ALL, 3), boundary=3)
    ),
    "no step is applied before its loss is known": lambda state: state.with_steps(applied={0: 0}),
    "a collective is answered once all have arrived": lambda state: state.with_collectives(
        open={0: {rank: messages.Arrive(rank, 0, "barrier", None) for rank in ALL}}
    ),
    "generations are numbered upwards": lambda state: state.with_generation(number=0, regrouping=False),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_a_state_that_breaks_a_rule_is_named(rule):
    before = running() if rule != "generations are numbered upwards" else running_without_3()
    with pytest.raises(AssertionError, match=rule):
        s.validate(before, BROKEN[rule](before))


def test_every_transition_and_every_message_of_the_tests_is_checked():
    assert s.VALIDATES
    with pytest.raises(AssertionError, match="no step is applied before its loss is known"):
        transition(running(), messages.Applied(0, 0, {}))
    member = Member(0, joining=False)
    with pytest.raises(AssertionError, match="a generation is announced before all resume in it"):
        member.receive(messages.Resume(1, (0,), messages.Decision(0, frozenset(), ()), None, {}))


@pytest.mark.parametrize(("status", "state"), [
    (WorkerStatus(0, 4, False), StepState.RUNNING),
    (WorkerStatus(0, 5, False), StepState.RUNNING),
    (WorkerStatus(0, 5, True), StepState.REDUCED),
    (WorkerStatus(0, 6, False, speculative=True), StepState.SPECULATIVE),
    (WorkerStatus(0, 6, True), StepState.APPLIED),
    (WorkerStatus(0, 7, False, speculative=True), StepState.APPLIED),
])  # fmt: skip
def test_the_state_of_a_worker_in_step_5(status, state):
    assert status.state_in(5) is state


def test_each_rank_has_one_standing():
    state = running_without_3()
    assert [state.standing(rank) for rank in ALL] == [Standing.LIVE] * 3 + [Standing.VACANT]
    assert s.initial_state(state.positions.grid).standing(0) is Standing.AWAITED
    assert feed(state, messages.Ready(3))[0].standing(3) is Standing.READY
    assert replace(state, returned={}).standing(0) is Standing.AWAITED
    assert state.with_roster(dismissed={3: (1, 2)}).standing(3) is Standing.BARRED
