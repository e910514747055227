"""Wrong bits and values that are not finite: verdicts, and what follows for the run."""

from dataclasses import replace
from typing import Any

import pytest
from membership_feed import all_losses, feed, messages, records

from lightning_recycle.control.protocol import messages as m
from lightning_recycle.control.protocol import state as s
from lightning_recycle.control.protocol.fault_attribution import (
    EXCUSES_ALL,
    MAX_EXCUSED,
    Culprit,
    Finding,
    Undecided,
    decide_dispute,
    find_culprits,
    who_made_it,
)
from lightning_recycle.control.protocol.messages import FINITE, IS_FINITE, NOT_FINITE, WorkerStatus
from lightning_recycle.control.protocol.state import Checks, Dispute
from lightning_recycle.planning.grid import Grid, Positions

A, B, C, D = (bytes([letter]) * 16 for letter in b"abcd")


def holds(parameters: bytes, optimizer: bytes = D, interval: int = 5, device: str = "cuda:1") -> m.Checked:
    return m.Checked({"parameters": parameters, "optimizer state": optimizer}, interval, device)


@pytest.mark.parametrize(("told", "wrong"), [
    pytest.param([A, A, A], [], id="equal"),
    pytest.param([A], [], id="alone"),
    pytest.param([], [], id="nobody-told"),
    pytest.param([A, A, B], [2], id="two-against-one"),
    pytest.param([B, A, A], [0], id="the-first-is-wrong"),
    pytest.param([A, B, A, C], [1, 3], id="errors-do-not-agree"),
    pytest.param([A, B], None, id="one-against-one"),
    pytest.param([A, A, B, B], None, id="two-against-two"),
    pytest.param([A, B, C], None, id="all-differ"),
])  # fmt: skip
def test_the_largest_group_is_right_if_it_is_the_only_one_and_no_single_worker(told, wrong):
    verdict = find_culprits({rank: holds(one) for rank, one in enumerate(told)})
    if wrong is None:
        assert isinstance(verdict, Undecided)
        assert sorted(rank for group in verdict.groups for rank in group) == list(range(len(told)))
        assert verdict.kinds == ("parameters",)
    else:
        assert not isinstance(verdict, Undecided)
        assert [one.rank for one in verdict] == wrong


def test_what_is_wrong_is_named():
    found = find_culprits({0: holds(A), 1: holds(A, C, device="cpu:1"), 2: holds(A)})
    assert found == (Culprit(1, ("optimizer state",), (0, 2), "cpu:1"),)


GRID = Grid(3, 2, 2)  # ranks 0, 2 and 4 are stage 0
ALL = tuple(range(6))


def status_report(rank: int, generation: int, version: int, reduced: bool = False) -> m.Report:
    return m.Report(rank, generation, WorkerStatus(GRID.worker(rank).stage, version, reduced), begun=version)


def running(checks: Checks, live: tuple[int, ...] = ALL) -> s.MembershipState:
    state, _ = feed(
        replace(s.initial_state(GRID), checks=checks), *map(s.Joined, ALL), *(status_report(rank, 0, 0) for rank in ALL)
    )
    for number, gone in enumerate(sorted(set(ALL) - set(live)), 1):
        state, _ = feed(state, s.Lost(gone, "gone"))
        state, _ = feed(state, *(status_report(rank, number, 0) for rank in state.roster.ranks))
    return state.with_steps(summed=100)  # all losses are known


def told(rank: int, step: int, parameters: bytes | None = A) -> m.Applied:
    checked = None if parameters is None else holds(parameters)
    return m.Applied(rank, step, {}, facts=m.Facts(checked=checked))


def checked(state: s.MembershipState, step: int, wrong: dict[int, bytes]) -> tuple[s.MembershipState, list[s.Command]]:
    return feed(state, *(told(rank, step, wrong.get(rank, A)) for rank in state.roster.ranks))


def test_a_worker_that_holds_other_bits_than_its_peers_is_evicted_when_all_have_told():
    state = running(Checks())
    state, commands = feed(state, *(told(rank, 0, B if rank == 2 else A) for rank in ALL[:-1]))
    assert commands == []
    _, commands = feed(state, told(5, 0))
    (record,) = records(commands, "corruption")
    assert (record.rank, record.step) == (2, 0)
    assert record.details["kind"] == "parameters"
    assert (record.details["device"], record.details["since"], record.details["then"]) == ("cuda:1", -1, "evicted")
    assert [command.rank for command in commands if isinstance(command, s.Evict)] == [2]


def test_it_is_known_after_which_step_the_peers_were_equal():
    state, _ = checked(running(Checks()), 0, {})
    state, _ = feed(state, *(told(rank, 1, None) for rank in ALL))
    _, commands = checked(state, 2, {3: B})
    (record,) = records(commands, "corruption")
    assert (record.rank, record.step, record.details["since"]) == (3, 2, 0)


def test_with_raise_the_run_ends_and_names_worker_and_step():
    state, commands = checked(running(Checks("raise")), 0, {2: B})
    assert isinstance(state.outcome, s.Failed)
    assert "(1, 0) holds wrong bits: after step 0 its parameters" in state.outcome.reason
    assert not any(isinstance(command, s.Evict) for command in commands)


def test_two_that_differ_are_both_distrusted():
    state, commands = checked(running(Checks(), live=(0, 1, 2, 3)), 0, {2: B})
    assert isinstance(state.outcome, s.StageLost)
    assert (state.outcome.stage, sorted(state.outcome.causes)) == (0, [0, 2])
    (record,) = records(commands, "corruption")
    assert (record.rank, record.details["proof"]) == (None, "undecided")
    state, _ = checked(running(Checks("raise"), live=(0, 1, 2, 3)), 0, {2: B})
    assert isinstance(state.outcome, s.Failed)


@pytest.mark.parametrize("policy", ["evict", "raise"])
@pytest.mark.parametrize(("newcomers", "wrong", "dismissed"), [
    pytest.param({2: 4}, {2: B}, [2], id="one-against-one"),
    pytest.param({0: 4}, {2: B}, [0], id="whoever-was-there-before"),
    pytest.param({0: 4, 1: 4}, {2: B, 3: C}, [0, 1], id="two-stages"),
    pytest.param({2: 4}, {}, [], id="equal"),
])  # fmt: skip
def test_in_its_first_check_a_newcomer_is_wrong(policy, newcomers, wrong, dismissed):
    state = running(Checks(policy, agreed=3), live=(0, 1, 2, 3)).with_roster(newcomers=newcomers)
    state, commands = checked(state, 0, wrong)
    assert state.outcome is None
    assert records(commands, "corruption") == []
    found = records(commands, "dismissed")
    assert [record.rank for record in found] == dismissed
    assert [command.rank for command in commands if isinstance(command, s.Evict)] == dismissed
    assert all("after step 0 its parameters differ from its peers'" in record.details["cause"] for record in found)


def test_a_newcomer_with_another_rate_and_other_bits_goes_before_the_rest_is_compared():
    state = running(Checks(agreed=3)).with_roster(newcomers={2: 4})
    facts = {rank: m.Facts({}, {"lr": 2.0 if rank == 2 else 1.0}, holds(B if rank == 2 else A)) for rank in ALL}
    state, commands = feed(state, *(m.Applied(rank, 0, {}, facts=facts[rank]) for rank in ALL))
    assert [record.rank for record in records(commands, "dismissed")] == [2]
    state, _ = feed(state, s.Lost(2, "dismissed"), *(status_report(rank, 1, 1) for rank in ALL if rank != 2))
    assert state.checks.checksums.keys() == {0}
    state, commands = feed(state, *(told(rank, 1, None) for rank in ALL if rank != 2))
    assert (state.checks.checksums, state.checks.agreed) == ({}, 0)
    assert not records(commands, "corruption")


def test_once_it_was_compared_nobody_knows_whose_memory_errs():
    state = running(Checks(agreed=4), live=(0, 1, 2, 3)).with_roster(newcomers={2: 4})
    state, commands = checked(state, 0, {2: B})
    assert isinstance(state.outcome, s.StageLost)
    assert records(commands, "dismissed") == []


def test_originals_are_judged_among_themselves():
    state = running(Checks(agreed=3)).with_roster(newcomers={4: 4})
    state, _ = checked(state, 0, {4: B, 2: B})  # two of stage 0 hold the same, one of them from the other
    assert isinstance(state.outcome, s.StageLost)


def at_boundary(state: s.MembershipState, step: int) -> tuple[s.MembershipState, list[s.Command]]:
    """All answer the pause in ``step`` - 1 and stop at ``step``."""
    generation, number = state.generation.number, state.generation.pause.number
    state, _ = feed(state, *(m.Paused(rank, generation, step - 1, number) for rank in state.roster.ranks))
    state, _ = feed(state, *(told(rank, step - 1, None) for rank in state.roster.ranks))
    state, _ = feed(state, *(m.Reached(rank, generation, m.Milestone.AT_BOUNDARY, step) for rank in state.roster.ranks))
    return feed(state, *(status_report(rank, state.generation.number, step) for rank in state.roster.ranks))


@pytest.mark.parametrize(("every", "steps"), [(0, 5), (7, 7)])
def test_the_next_check_is_announced_with_the_loss_of_the_step_before(every, steps):
    state, _ = feed(running(Checks(every=every)), all_losses(0))
    state = state.updated(positions=Positions(replace(GRID, microbatches=1))).with_steps(summed=1)
    state, _ = checked(state, 0, {})
    announced = []
    for step in range(1, 20):
        state, commands = feed(state, m.Losses(1, step, dict.fromkeys(range(3), 0.5)))
        announced += [loss.step + 1 for loss in messages(commands, m.StepLoss) if loss.check_next]
        state, _ = feed(state, *(told(rank, step, A if step in announced else None) for rank in ALL))
    assert announced == list(range(steps, 21, steps))


# ---------------------------------------------------------------------- computations

X, Y, Z = ({"output": letter} for letter in (A, B, C))


def dispute(claims: dict[int, Any], votes: dict[int, Any]) -> Dispute:
    recorder, accused = claims
    return Dispute(4, 7, recorder, accused, claims, votes, {accused: "cuda:1"})


@pytest.mark.parametrize(("claims", "votes", "found"), [
    pytest.param({0: X, 1: Y}, {0: (X, True), 1: (Y, True), 2: (X, True)}, [1], id="wrong-each-time"),
    pytest.param({0: X, 1: Y}, {0: (X, True), 1: (X, True), 2: (X, True)}, [1], id="wrong-once"),
    pytest.param({0: Y, 1: X}, {0: (X, True), 1: (X, True), 2: (X, True)}, [0], id="the-checker-was-wrong"),
    pytest.param({0: X, 1: Y}, {0: (X, True), 1: (Z, False), 2: (X, True)}, [1], id="wrong-in-another-way"),
    pytest.param({0: X, 1: Y}, {0: (X, True), 1: (X, True)}, [1], id="of-two-wrong-once"),
    pytest.param({0: X, 1: Y}, {0: (X, True), 1: (Z, False)}, [1], id="of-two-the-one-that-repeats-nothing"),
    pytest.param({0: X, 1: Y}, {0: (X, True), 1: (Y, True)}, Finding.UNDECIDED, id="of-two-wrong-each-time"),
    pytest.param({0: X, 1: Y}, {0: (X, True), 1: (Y, True), 2: (Z, True)}, Finding.INCOMPARABLE,
        id="three-kinds-of-machines"),
    pytest.param({0: X, 1: Y}, {0: (X, False), 1: (Y, False), 2: (X, True)}, Finding.INCOMPARABLE,
        id="not-deterministic"),
    pytest.param({0: Z, 1: Y}, {0: (X, True), 1: (X, True), 2: (X, True)}, [0, 1], id="both-were-wrong"),
    pytest.param({0: X, 1: Y}, {0: (X, True), 1: (X, True), 2: ({}, True), 3: ({}, True)}, [1],
        id="others-have-no-say"),
])  # fmt: skip
def test_whoever_claimed_other_bits_than_the_majority_gets_was_wrong(claims, votes, found):
    verdict = decide_dispute(dispute(claims, votes))
    assert verdict is found if isinstance(found, Finding) else [one.rank for one in verdict] == found


def disputed(rank: int, other: int, state: s.MembershipState, step: int = 0) -> m.Disputed:
    return m.Disputed(rank, state.generation.number, step, 3, other, X, Y, "cuda:1")


def vote_under_way(policy: str = "evict") -> s.MembershipState:
    state = running(Checks(policy))
    state, commands = feed(state, disputed(0, 2, state))
    (record,) = records(commands, "disputed")
    assert (record.details["of"], record.details["kind"]) == ((1, 0), "output")
    assert record.details["cause"] == "got another output than worker (1, 0)"
    assert len(messages(commands, m.Regroup)) == 1
    state, commands = feed(state, *(status_report(rank, 1, 0) for rank in ALL))
    assert messages(commands, m.Resume)[0].vote == m.Vote(0, (0, 2, 4))
    return state


def test_a_value_that_is_not_finite_is_no_difference_to_a_peer() -> None:
    state = running(Checks())
    bits = {**X, m.FINITE: m.NOT_FINITE}
    _, commands = feed(state, replace(disputed(2, 2, state), mine=bits, theirs=bits))
    (record,) = records(commands, "disputed")
    assert (record.details["kind"], record.details["cause"]) == (m.FINITE, "made a value that is not finite")


def voted(state: s.MembershipState, sums: dict[int, Any]) -> list[m.Voted]:
    return [m.Voted(rank, state.generation.number, one, device=f"cuda:{rank}") for rank, one in sums.items()]


def test_a_vote_evicts_who_was_wrong_and_its_loss_begins_the_next_generation():
    state = vote_under_way()
    state, commands = feed(state, *voted(state, {0: X, 2: Y, 4: X}))
    assert [command.rank for command in commands if isinstance(command, s.Evict)] == [2]
    (record,) = records(commands, "corruption")
    assert (record.rank, record.step, record.details["proof"], record.details["device"]) == (
        2,
        0,
        "computation",
        "cuda:2",
    )
    assert not messages(commands, m.Regroup)
    _, commands = feed(state, s.Lost(2, "evicted"))
    assert len(messages(commands, m.Regroup)) == 1


def test_who_got_something_else_twice_is_evicted_without_a_vote():
    state = running(Checks())
    state, commands = feed(state, disputed(2, 2, state))
    assert [command.rank for command in commands if isinstance(command, s.Evict)] == [2]
    (record,) = records(commands, "corruption")
    assert (record.rank, record.details["device"], record.details["kind"]) == (2, "cuda:1", "output")
    assert "and got something else twice" in record.details["cause"]
    _, commands = feed(state, s.Lost(2, "evicted"))
    assert len(messages(commands, m.Regroup)) == 1
    assert feed(state, replace(disputed(4, 4, state), generation=state.generation.number + 1))[1] == []


def test_with_raise_a_vote_ends_the_run():
    state = vote_under_way("raise")
    state, _ = feed(state, *voted(state, {0: X, 2: Y, 4: X}))
    assert isinstance(state.outcome, s.Failed)
    assert "(1, 0) computes wrong results" in state.outcome.reason


def test_if_a_voter_is_lost_the_others_vote_again():
    state = vote_under_way()
    state, _ = feed(state, *voted(state, {0: X}), s.Lost(4, "gone"))
    state, commands = feed(state, *(status_report(rank, 2, 0) for rank in state.roster.ranks))
    assert messages(commands, m.Resume)[0].vote == m.Vote(0, (0, 2))
    state, commands = feed(state, *voted(state, {0: X, 2: X}))
    assert [command.rank for command in commands if isinstance(command, s.Evict)] == [2]


@pytest.mark.parametrize("lost", [0, 2])
def test_if_one_of_the_two_is_lost_there_is_no_dispute_any_more(lost):
    state = vote_under_way()
    state, _ = feed(state, s.Lost(lost, "gone"))
    state, commands = feed(state, *(status_report(rank, 2, 0) for rank in state.roster.ranks))
    assert messages(commands, m.Resume)[0].vote is None
    assert state.checks.dispute is None


def test_what_cannot_be_compared_is_not_compared_any_more_and_everybody_goes_on():
    state = vote_under_way()
    state, commands = feed(state, *voted(state, {0: X, 2: Y, 4: Z}))
    assert len(records(commands, "incomparable")) == 1
    assert len(messages(commands, m.Regroup)) == 1
    assert (state.checks.comparable, state.outcome) == (False, None)
    state = vote_under_way()
    varying = [replace(vote, varies="layer 3") for vote in voted(state, {0: X, 2: Y})]
    state, commands = feed(state, *varying, *voted(state, {4: X}))
    assert records(commands, "incomparable")[0].details == {"cause": "layer 3 gives other bits each time"}
    state = running(Checks())
    state, commands = feed(state, m.Incomparable(1, "layer 3"), m.Incomparable(3, "layer 4"))
    assert len(records(commands, "incomparable")) == len(messages(commands, m.Regroup)) == 1


def test_of_two_that_stay_with_different_results_the_run_says_so():
    state = running(Checks(), live=(0, 1, 2, 3))
    state, _ = feed(state, disputed(0, 2, state))
    state, _ = feed(state, *(status_report(rank, state.generation.number, 0) for rank in state.roster.ranks))
    state, _ = feed(state, *voted(state, {0: X, 2: Y}))
    assert isinstance(state.outcome, s.Failed)
    assert "it is unknown which of them is right" in state.outcome.reason


# ---------------------------------------------------------------------- values that are not finite

YES, NO = {"output": b"a" * 16, FINITE: IS_FINITE}, {"output": b"b" * 16, FINITE: NOT_FINITE}


@pytest.mark.parametrize(("votes", "is_the_device"), [
    pytest.param({0: (NO, True), 1: (YES, True)}, True, id="of-two-the-peer-gets-finite-ones"),
    pytest.param({0: (YES, True), 1: (YES, True), 2: (YES, True)}, True, id="it-does-not-come-again"),
    pytest.param({0: (NO, True), 1: (NO, True), 2: (NO, True)}, False, id="all-get-it"),
    pytest.param({0: (NO, True), 1: (NO, True), 2: (YES, True)}, False, id="no-majority-of-the-peers"),
    pytest.param({0: (NO, True), 1: (YES, True), 2: (YES, False)}, False, id="not-deterministic"),
    pytest.param({0: (NO, True)}, False, id="no-peer"),
])  # fmt: skip
def test_it_is_the_devices_if_its_peers_get_finite_values(votes, is_the_device):
    found = who_made_it(Dispute(3, 1, 0, 0, {0: NO}, votes, {0: "cuda:0"}))
    assert isinstance(found, Culprit) is is_the_device
    if isinstance(found, Culprit):
        assert (found.rank, found.kinds, found.device) == (0, ("output",), "cuda:0")


def resumed(
    state: s.MembershipState, ahead: tuple[int, ...] = ()
) -> tuple[s.MembershipState, m.Resume, tuple[Any, ...]]:
    state, commands = feed(
        state, *(status_report(rank, state.generation.number, int(rank in ahead)) for rank in state.roster.ranks)
    )
    return state, messages(commands, m.Resume)[0], commands


def inspecting(policy: str = "evict") -> s.MembershipState:
    state, _ = feed(replace(s.initial_state(GRID), checks=Checks(policy)), *map(s.Joined, ALL))
    state, _, _ = resumed(state)
    state, commands = feed(state, m.NotFinite(1, state.generation.number, 0, 3))
    assert [record.details["then"] for record in records(commands, "not_finite")] == ["inspected"]
    state, resume, _ = resumed(state)
    assert (resume.inspects, resume.excused) == (0, -1)
    return state


def own(state: s.MembershipState) -> m.Disputed:
    return m.Disputed(2, state.generation.number, 0, 3, 2, NO, NO, "cuda:1")


def test_a_worker_that_makes_it_of_finite_values_is_judged_by_its_peers():
    state, _ = feed(inspecting(), own(inspecting()))
    state, resume, _ = resumed(state)
    assert resume.vote == m.Vote(2, (0, 2, 4))
    state, commands = feed(state, *voted(state, {0: YES, 2: NO, 4: YES}))
    assert [command.rank for command in commands if isinstance(command, s.Evict)] == [2]
    (record,) = records(commands, "corruption")
    assert "made a value that is not finite of finite ones in the output" in record.details["cause"]
    state, _ = feed(state, s.Lost(2, "evicted"))
    assert resumed(state)[1].inspects == -1


def test_what_its_peers_get_too_is_kept():
    state, _ = feed(inspecting(), own(inspecting()))
    state, _, _ = resumed(state)
    state, commands = feed(state, *(m.Voted(rank, state.generation.number, NO) for rank in (0, 2, 4)))
    assert [record.details["then"] for record in records(commands, "not_finite")] == ["kept"]
    _, resume, _ = resumed(state)
    assert (resume.inspects, resume.excused, resume.vote) == (-1, 0, None)


def test_what_nobody_makes_is_the_datas():
    state, commands = feed(inspecting(), m.NotFinite(3, inspecting().generation.number, 0, 1))
    assert [record.details["then"] for record in records(commands, "not_finite")] == ["kept"]
    assert resumed(state)[1].excused == 0


def test_a_stage_that_has_gone_on_cannot_vote_and_the_value_is_kept():
    state, _ = feed(inspecting(), own(inspecting()))
    _, resume, commands = resumed(state, ahead=(0, 2, 4))
    assert (resume.vote, resume.excused) == (None, 0)
    assert [record.details["then"] for record in records(commands, "not_finite")] == ["kept"]


def test_a_model_that_often_has_such_values_is_not_asked_any_more():
    state = inspecting()
    for _ in range(MAX_EXCUSED):
        state, _ = feed(state, m.NotFinite(3, state.generation.number, state.checks.inspects, 1))
        state, resume, _ = resumed(state)
        state, _ = feed(state, m.NotFinite(3, state.generation.number, resume.excused + 1, 1))
        if resume.excused < EXCUSES_ALL:
            state, _, _ = resumed(state)
    assert resume.excused == EXCUSES_ALL
