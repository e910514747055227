"""Coordinator and clients over real sockets: the ordinary course, what is recorded and planned."""

import threading
from dataclasses import replace

import pytest
from control_plane import GRID, ControlPlane, die, fake_schedule, in_thread, together
from control_worker import Payload
from support.waiting import PATIENCE

from lightning_recycle.control.client import Interrupted, unpack
from lightning_recycle.control.protocol.state import RESULT, Finished
from lightning_recycle.errors import ControlPlaneError
from lightning_recycle.planning.grid import Worker
from lightning_recycle.planning.program import Programs


def test_workers_that_joined_get_the_same_roster_and_each_its_program(plane):
    members = plane.members()
    resumes = [member.resumes[0] for member in members]
    assert all(replace(resume, program=None) == replace(resumes[0], program=None) for resume in resumes)
    assert (resumes[0].generation, resumes[0].roster) == (0, (0, 1, 2, 3))
    programs = Programs(fake_schedule())
    assert [resume.program for resume in resumes] == [programs.of(worker) for worker in GRID.workers()]
    assert plane.coordinator.roster == (0, 1, 2, 3)
    assert plane.coordinator.schedules == [fake_schedule()]


def test_commits_wait_for_everybody_and_bring_one_payload_of_each_stage(plane):
    members = plane.members()
    early = [in_thread(m.client.commit, 0, Payload(m.client.rank)) for m in members[:3]]
    with pytest.raises(TimeoutError):
        early[0].result(0.2)
    last = members[3].client.commit(0, Payload(3))
    assert last == {0: Payload(0), 1: Payload(1)}
    assert all(future.result(PATIENCE) == last for future in early)


def test_results_stay_with_the_coordinator_and_end_the_run(plane):
    members = plane.members()
    parts = {0: "first stage", 1: "last stage", 2: None, 3: None}
    answers = together(*(lambda m=m: m.client.arrive(RESULT, parts[m.client.rank]) for m in members))
    assert all(answer == {0: True, 1: True, 2: False, 3: False} for answer in answers)
    outcome = plane.coordinator.wait(PATIENCE)
    assert isinstance(outcome, Finished)
    assert {rank: unpack(part) for rank, part in outcome.results.items()} == {0: "first stage", 1: "last stage"}


def test_waiting_for_the_end_is_bounded_when_asked(plane):
    assert plane.coordinator.wait(timeout=0.05) is None


def test_an_announcement_that_does_not_come_is_an_error_after_its_time(plane):
    client = plane.client(0)
    with pytest.raises(ControlPlaneError, match=r"Worker 0 waited 0\.1 s"):
        client.await_announcement(0.1)


# ---------------------------------------------------------------------- history


def test_plans_are_made_for_the_failed_workers_and_the_measured_times(plane):
    members = plane.members()
    together(*(member.step for member in members))
    plane.until(lambda: plane.events("step"))
    die(plane, members[0])
    together(*(member.step for member in members[1:]))
    assert plane.planner.asked == [(frozenset(), {}), (frozenset({Worker(0, 0)}), {0: {"F": 0.5}, 1: {"F": 0.5}})]


def test_plans_are_made_ahead_at_the_start_and_again_once_the_times_are_known(plane):
    members = plane.members()
    for _ in range(5):
        together(*(member.step for member in members))
    plane.until(lambda: len(plane.events("step")) == 5)
    assert plane.planner.ahead == [frozenset(), frozenset()]


def test_waiting_for_what_nobody_publishes_is_interrupted_by_a_loss(plane):
    members = plane.members()
    waiting = in_thread(members[0].client.lookup, ["address"], threading.Event())
    die(plane, members[3])
    with pytest.raises(Interrupted):
        waiting.result(PATIENCE)


def test_closing_before_the_start_is_harmless():
    ControlPlane().close()
