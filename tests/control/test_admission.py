"""Who may come back to a coordinator that was started again, and how long the others are waited for."""

import os
import subprocess
import sys
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from lightning_recycle.control.coordinator.admission import Readmission, ReturnStanding
from lightning_recycle.control.journal import Journal, JournaledState
from lightning_recycle.control.options import CoordinatorOptions
from lightning_recycle.control.protocol.member import Member
from lightning_recycle.control.protocol.membership import returned_events
from lightning_recycle.control.protocol.messages import EndRun, Leave, Process, Returned
from lightning_recycle.control.protocol.state import Roster
from lightning_recycle.planning.grid import Grid
from lightning_recycle.processes import has_ended, process_space

GRID = Grid(2, 2, 1)
OPTIONS = CoordinatorOptions()


def revived(folder: Path, kept: JournaledState | None, **processes: Process) -> tuple[Readmission, Journal]:
    """After a coordinator that has written ``kept``; ``processes`` by "r" and rank."""
    first = Journal(folder / "state", b"the key of this test")
    if kept is not None:
        tokens = {rank: Process(f"token {rank}", 0, "") for rank in kept.roster.live}
        first.write(kept, {**tokens, **{int(name[1:]): one for name, one in processes.items()}})
    journal = Journal(folder / "state", b"the key of this test")
    return Readmission(journal, GRID, OPTIONS, 90.0), journal


def returned(journal: Journal, rank: int, **fields: Any) -> Returned:
    process = Process(fields.pop("token", f"token {rank}"), 1, "a node")
    return Returned(rank, process, **{"run": journal.run, "generation": 2, **fields})


KEPT = JournaledState(2, Roster(frozenset({0, 1, 3}), leader=1))


@pytest.mark.parametrize(("rank", "fields", "place"), [
    (0, {}, ReturnStanding.MEMBER),
    (0, {"token": "of one that was given up"}, ReturnStanding.LOST),
    (0, {"token": "of one that has left", "leave": Leave(0)}, ReturnStanding.LEFT),
    (0, {"run": "another one"}, ReturnStanding.LOST),
    (2, {}, ReturnStanding.LOST),
    (2, {"leave": Leave(2)}, ReturnStanding.LEFT),
    (2, {"generation": -1, "joining": True}, ReturnStanding.CANDIDATE),
    (2, {"generation": 2, "joining": True}, ReturnStanding.LOST),
    (2, {"generation": -1}, ReturnStanding.LOST),
    (4, {}, ReturnStanding.LOST),
    (-1, {}, ReturnStanding.LOST),
])  # fmt: skip
def test_who_returns_is_what_was_written_down(tmp_path, rank, fields, place):
    readmission, journal = revived(tmp_path, KEPT)
    assert readmission.judge(readmission.state(), (), returned(journal, rank, **fields)) is place
    assert readmission.judge(readmission.state(), (rank,), returned(journal, rank, **fields)) in (
        ReturnStanding.LOST,
        ReturnStanding.LEFT,
    )


@pytest.mark.parametrize("wish", [Leave(1), Leave(1, with_run=True), EndRun(1)])
def test_what_a_signal_asked_for_is_asked_again(wish):
    member = Member(1, joining=False)
    member.record_sent(wish)
    assert list(chain(*returned_events(member.report_return(process=Process("", 1), run="")))) == [wish]


def test_whoever_comes_when_all_have_returned_is_lost(tmp_path):
    readmission, journal = revived(tmp_path, KEPT)
    begun = replace(readmission.state(), returned=None)
    assert readmission.judge(begun, (), returned(journal, 0)) is ReturnStanding.LOST


def test_before_the_first_generation_workers_keep_the_positions_that_they_have(tmp_path):
    readmission, journal = revived(tmp_path, None)
    state = readmission.state()
    assert readmission.judge(state, (), returned(journal, 2, generation=-1)) is ReturnStanding.STARTER
    assert readmission.judge(state, (2,), returned(journal, 2, generation=-1)) is ReturnStanding.LOST
    assert not readmission.may_place(100.0), "others say first which positions they have"
    assert readmission.may_place(105.0)


def test_a_missing_worker_is_waited_for_like_a_silent_one(tmp_path):
    readmission, journal = revived(tmp_path, KEPT)
    state = readmission.state()
    assert not readmission.late(389.0, state), "nobody has returned yet: the network may be slow"
    assert readmission.late(391.0, state).keys() == {0, 1, 3}
    readmission.heard(100.0)
    state = state.updated(returned={1: returned(journal, 1)})
    assert not readmission.late(104.0, state)
    assert readmission.late(106.0, state).keys() == {3}, "nobody else may hold stage 0"
    assert readmission.late(401.0, state).keys() == {0, 3}


def test_a_process_that_has_ended_is_not_waited_for(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    space = process_space()
    gone, here = Process("token 0", ended.pid, "", space), Process("token 1", os.getpid(), "", space)
    readmission, journal = revived(tmp_path, KEPT, r0=gone, r1=here)
    readmission.heard(100.0)
    state = replace(readmission.state(), returned={3: returned(journal, 3)})
    assert readmission.late(100.0, state) == {0: "its process ended while the coordinator was gone"}
    assert has_ended(ended.pid, space)
    assert not has_ended(ended.pid, "another machine")
    assert not has_ended(os.getpid(), space)
