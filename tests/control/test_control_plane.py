"""Coordinator and clients over real sockets: the ordinary course, what is recorded and planned."""

import threading

import pytest
from control_plane import die, in_thread, together
from support.waiting import PATIENCE

from lightning_recycle.control.client import Interrupted
from lightning_recycle.errors import ControlPlaneError
from lightning_recycle.planning.grid import Worker


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
