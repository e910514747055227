"""Whose a value is that is not finite, and how often that is asked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from membership_feed import feed, messages, records

from lightning_recycle.control.protocol import messages as m
from lightning_recycle.control.protocol import state as s
from lightning_recycle.control.protocol.corruption import (
    EXCUSES_ALL,
    FINITE,
    IS_FINITE,
    MAX_EXCUSED,
    NOT_FINITE,
    Checks,
    Culprit,
    Dispute,
)
from lightning_recycle.control.protocol.corruption_response import who_made_it
from lightning_recycle.control.protocol.message_validation import objection
from lightning_recycle.control.protocol.recovery import WorkerStatus
from lightning_recycle.planning.grid import Grid

GRID = Grid(3, 2, 2)  # ranks 0, 2 and 4 are stage 0
ALL = tuple(range(6))
YES, NO = {"output": b"a" * 16, FINITE: IS_FINITE}, {"output": b"b" * 16, FINITE: NOT_FINITE}


@pytest.mark.parametrize(
    ("votes", "is_the_device"),
    [
        pytest.param({0: (NO, True), 1: (YES, True)}, True, id="of-two-the-peer-gets-finite-ones"),
        pytest.param({0: (YES, True), 1: (YES, True), 2: (YES, True)}, True, id="it-does-not-come-again"),
        pytest.param({0: (NO, True), 1: (NO, True), 2: (NO, True)}, False, id="all-get-it"),
        pytest.param({0: (NO, True), 1: (NO, True), 2: (YES, True)}, False, id="no-majority-of-the-peers"),
        pytest.param({0: (NO, True), 1: (YES, True), 2: (YES, False)}, False, id="not-deterministic"),
        pytest.param({0: (NO, True)}, False, id="no-peer"),
    ],
)
def test_it_is_the_devices_if_its_peers_get_finite_values(votes: Any, is_the_device: bool) -> None:
    found = who_made_it(Dispute(3, 1, 0, 0, {0: NO}, votes, {0: "cuda:0"}))
    assert isinstance(found, Culprit) is is_the_device
    if isinstance(found, Culprit):
        assert (found.rank, found.kinds, found.device) == (0, ("output",), "cuda:0")


def report(rank: int, state: s.MembershipState, version: int) -> m.Report:
    status = WorkerStatus(GRID.worker(rank).stage, version, False)
    return m.Report(rank, state.generation.number, status, begun=version)


def resumed(
    state: s.MembershipState, ahead: tuple[int, ...] = ()
) -> tuple[s.MembershipState, m.Resume, tuple[Any, ...]]:
    state, commands = feed(state, *(report(rank, state, int(rank in ahead)) for rank in state.roster.ranks))
    return state, messages(commands, m.Resume)[0], commands


def inspecting(policy: str = "evict") -> s.MembershipState:
    state, _ = feed(replace(s.initial_state(GRID), checks=Checks(policy)), *map(s.Joined, ALL))
    state, _, _ = resumed(state)
    state, commands = feed(state, m.NotFinite(1, state.generation.number, 0, "loss", 3))
    assert [record.details["then"] for record in records(commands, "not_finite")] == ["inspected"]
    state, resume, _ = resumed(state)
    assert (resume.inspects, resume.excused) == (0, -1)
    return state


def own(state: s.MembershipState) -> m.Disputed:
    return m.Disputed(2, state.generation.number, 0, 3, 2, NO, NO, "cuda:1")


def test_a_worker_that_makes_it_of_finite_values_is_judged_by_its_peers() -> None:
    state, _ = feed(inspecting(), own(inspecting()))
    state, resume, _ = resumed(state)
    assert resume.vote == m.Vote(0, 2, (0, 2, 4))
    votes = {0: YES, 2: NO, 4: YES}
    state, commands = feed(
        state, *(m.Voted(r, state.generation.number, one, True, f"cuda:{r}") for r, one in votes.items())
    )
    assert [command.rank for command in commands if isinstance(command, s.Evict)] == [2]
    (record,) = records(commands, "corruption")
    assert "made a value that is not finite of finite ones in the output" in record.details["cause"]
    state, _ = feed(state, s.Lost(2, "evicted"))
    assert resumed(state)[1].inspects == -1


def test_what_its_peers_get_too_is_kept() -> None:
    state, _ = feed(inspecting(), own(inspecting()))
    state, _, _ = resumed(state)
    state, commands = feed(state, *(m.Voted(rank, state.generation.number, NO, True) for rank in (0, 2, 4)))
    assert [record.details["then"] for record in records(commands, "not_finite")] == ["kept"]
    _, resume, _ = resumed(state)
    assert (resume.inspects, resume.excused, resume.vote) == (-1, 0, None)


def test_what_nobody_makes_is_the_datas() -> None:
    state, commands = feed(inspecting(), m.NotFinite(3, inspecting().generation.number, 0, "loss", 1))
    assert [record.details["then"] for record in records(commands, "not_finite")] == ["kept"]
    assert resumed(state)[1].excused == 0


def test_a_stage_that_has_gone_on_cannot_vote_and_the_value_is_kept() -> None:
    state, _ = feed(inspecting(), own(inspecting()))
    _, resume, commands = resumed(state, ahead=(0, 2, 4))
    assert (resume.vote, resume.excused) == (None, 0)
    assert [record.details["then"] for record in records(commands, "not_finite")] == ["kept"]


def test_a_model_that_often_has_such_values_is_not_asked_any_more() -> None:
    state = inspecting()
    for _ in range(MAX_EXCUSED):
        state, _ = feed(state, m.NotFinite(3, state.generation.number, state.checks.inspects, "loss", 1))
        state, resume, _ = resumed(state)
        state, _ = feed(state, m.NotFinite(3, state.generation.number, resume.excused + 1, "loss", 1))
        if resume.excused < EXCUSES_ALL:
            state, _, _ = resumed(state)
    assert resume.excused == EXCUSES_ALL


@pytest.mark.parametrize("change", [{"microbatch": 6}, {"microbatch": -2}, {"step": 9}, {"generation": 7}, {"rank": 5}])
def test_what_no_worker_can_have_met_is_refused(change: dict[str, int]) -> None:
    state = inspecting()
    met = m.NotFinite(1, state.generation.number, 0, "loss", 3)
    assert objection(state, 1, met) is None
    assert objection(state, 1, replace(met, **change)) is not None
