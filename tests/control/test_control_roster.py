"""The roster grows and shrinks over real sockets: replacements, spares, and workers that leave."""

import os
import time
from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest
from control_plane import ControlPlane, die, in_thread, together
from control_worker import Member
from support.waiting import PATIENCE

from lightning_recycle.control.client import EXIT_LOST_COORDINATOR, unpack
from lightning_recycle.control.options import RecoveryOptions
from lightning_recycle.control.protocol.messages import Hello, Process
from lightning_recycle.planning.grid import Grid


def run_to(version: int, members: list[Member]) -> list[Future[Any]]:
    """Lets each of ``members`` step up to ``version``, in a thread of its own."""

    def run(member: Member) -> None:
        while member.version < version:
            member.step()

    return [in_thread(run, member) for member in members]


def has_boundary(plane: ControlPlane) -> bool:
    """Whether all have been asked to stop, and have heard it."""
    pause = plane.coordinator._state.generation.pause
    return pause is not None and pause.boundary is not None


def results(futures: list[Future[Any]]) -> list[Any]:
    return [future.result(PATIENCE) for future in futures]


def test_what_is_left_of_a_position_ends_so_that_it_is_started_again():
    """At once: the run is not over."""
    with ControlPlane(Grid(2, 1, 1), of_position=2) as plane:
        members = plane.members()
        die(plane, members[0])
        results(run_to(3, members[2:]))
        assert members[1].client.exited.wait(PATIENCE)
        assert members[1].client.exit_code == EXIT_LOST_COORDINATOR
        (released,) = plane.events("released")
        assert released.worker == (0, 0)
        states = [position.state.value for position in plane.coordinator.view().status.positions]
        assert states == ["lost", "vacant", "live", "live"]


def on_machines(plane: ControlPlane) -> list[Member]:
    """Members that have joined, two on each machine."""
    members = [Member(plane.client(rank, node=f"machine {rank // 2}"), 2) for rank in range(4)]
    together(*(member.join for member in members))
    return members


def test_the_workers_of_a_machine_leave_at_a_step_boundary_when_that_is_asked(plane):
    members = on_machines(plane)
    results(run_to(2, members))
    plane.coordinator.ask_to_leave("machine 1")
    plane.coordinator.ask_to_leave("a machine that nobody is on")
    plane.until(lambda: has_boundary(plane))
    run_to(3, members[2:])
    results(run_to(5, members[:2]))
    assert sorted(event.worker or () for event in plane.events("left")) == [(1, 0), (1, 1)]
    assert [*plane.events("failure"), *plane.events("redone")] == []


def test_a_worker_started_by_hand_gets_the_position_that_is_free(plane):
    members = plane.members()
    spare = plane.client(None, joining=True)
    waiting = in_thread(spare.await_assignment)
    with pytest.raises(TimeoutError):
        waiting.result(0.3)
    die(plane, members[2])
    found = waiting.result(PATIENCE)
    assert (found.rank, found.incarnation, found.joining) == (2, 1, True)
    assert unpack(found.setup) == "for who is started by hand"
    assert spare.rank == 2


def test_a_spare_that_goes_away_is_not_given_a_position(plane):
    members = plane.members()
    gone = plane.connection()
    gone.send(Hello(None, Process("", os.getpid()), True))
    plane.until(lambda: plane.coordinator._vacancies.spares)
    gone.close()
    plane.until(lambda: not plane.coordinator._vacancies.spares)
    stays = plane.client(None, joining=True)
    die(plane, members[2])
    assert in_thread(stays.await_assignment).result(PATIENCE).rank == 2


def test_replacements_are_started_for_the_lost_as_often_as_allowed():
    with ControlPlane(recovery=RecoveryOptions(max_restarts=2)) as plane:
        die(plane, plane.members()[3])
        plane.until(lambda: len(plane.started) == 1)
        plane.until(lambda: 3 in plane.coordinator._workers.processes)
        plane.replacements[0].die("it exited with code 1")
        plane.until(lambda: len(plane.started) == 2)
        plane.until(lambda: 3 in plane.coordinator._workers.processes)
        plane.replacements[1].die("it exited with code 1")
        plane.until(lambda: 3 not in plane.coordinator._workers.processes)
        time.sleep(0.7)  # the first wait is half a second
        assert plane.started == [(3, 1), (3, 2)]
        assert [event.worker for event in plane.events("restarting")] == [(1, 1), (1, 1)]
        assert len(plane.events("failure")) == 1, "who was never let in is not a failure"


def test_where_a_run_grows_a_worker_that_left_has_a_successor_that_replaces_none():
    """Those that are lost have none, as none may be replaced."""
    with ControlPlane(grows=True) as plane:
        members = plane.members()
        results(run_to(2, members))
        members[3].client.request_leave()
        plane.until(lambda: has_boundary(plane))
        running = run_to(3, members)
        plane.until(lambda: plane.started == [(3, 1)])
        results(running[:3])
        assert [event.worker for event in plane.events("growing")] == [(1, 1)]
        die(plane, members[2])
        results(run_to(4, members[:2]))
        assert plane.started == [(3, 1)]
        assert plane.events("restarting") == []


def test_a_replacement_that_does_not_become_ready_in_time_is_given_up_for_the_next_one():
    with ControlPlane(recovery=RecoveryOptions(max_restarts=10, start_timeout=1.0)) as plane:
        die(plane, plane.members()[3])
        plane.until(lambda: plane.replacements)
        plane.until(lambda: plane.replacements[0].killed.is_set(), seconds=3.0)  # it never says hello
        plane.until(lambda: len(plane.replacements) > 1)


@pytest.mark.parametrize(("rank", "joining"), [(3, True), (4, True), (-1, False)], ids=["taken", "outside", "negative"])
def test_who_claims_a_position_that_it_cannot_have_is_refused(plane, rank, joining):
    members = plane.members()
    stranger = plane.connection()
    stranger.send(Hello(rank, Process("", os.getpid()), joining))
    with pytest.raises((EOFError, OSError)):
        stranger.receive()
    together(*(member.step for member in members))
    assert plane.events("failure") == []


def test_only_a_member_is_told_that_it_is_one(plane):
    members = plane.members()
    together(*(partial(member.client.await_membership) for member in members))
    joiner = plane.client(3, joining=True)  # the position is taken
    confirming = in_thread(joiner.await_membership)
    assert joiner.exited.wait(PATIENCE)
    assert joiner.exit_code == EXIT_LOST_COORDINATOR
    assert not confirming.done() or confirming.exception() is not None
