"""Losses over real sockets, by whatever they are noticed; disturbances; silent workers."""

import contextlib
import os
from multiprocessing.connection import wait

import pytest
from control_plane import SILENCE, ControlPlane, beat, die, in_thread, together
from control_worker import Member
from support.waiting import PATIENCE

from lightning_recycle.control.client import EXIT_RAISED, EXIT_STOPPED
from lightning_recycle.control.options import HeartbeatTimeouts, RecoveryOptions
from lightning_recycle.control.protocol.messages import Alive, Broken, Crash, Hello, Process, Regroup, Stop
from lightning_recycle.control.protocol.state import Crashed, Failed, StageLost
from lightning_recycle.errors import ControlPlaneError


def test_who_has_reported_an_error_waits_for_no_collective(plane):
    """As in an ``on_exception`` hook of a process that joined, which runs after that report."""
    client = plane.members()[3].client
    client.leave(EXIT_RAISED)
    with pytest.raises(ControlPlaneError, match="no one answers collective 'barrier'"):
        client.arrive("barrier", None)


def test_an_exception_of_the_users_ends_the_run_even_if_its_process_is_already_gone(plane):
    members = plane.members()
    crash = Crash(2, False, "ValueError: bad", b"", "Traceback")
    members[2].client.send(crash)
    die(plane, members[2], "it exited with code 1")
    assert plane.coordinator.wait(PATIENCE) == Crashed(crash)


def test_an_exception_of_the_infrastructure_ends_connection_and_process_at_once(plane):
    members = plane.members()
    members[3].client.leave()  # in this process only: as a worker whose interpreter is still shutting down
    members[3].client.send(Crash(3, True, "InjectedFaultError: as asked", None, "Traceback"))
    together(*(member.step for member in members[:3]))
    assert plane.processes[3].killed.is_set()
    assert members[3].client.exited.wait(PATIENCE)
    (failure,) = plane.events("failure")
    assert (failure.worker, failure.details["cause"]) == ((1, 1), "InjectedFaultError: as asked")
    assert members[0].client.member.roster == (0, 1, 2)


def test_the_log_shows_why_a_worker_failed_before_it_could_join(plane, caplog):
    members = plane.members()
    die(plane, members[3])
    together(*(member.step for member in members[:3]))
    newcomer = plane.client(3, joining=True)
    newcomer.leave()
    newcomer.send(Crash(3, True, "ValueError: bad", None, "Traceback\nValueError: bad"))
    plane.until(lambda: "A new worker (1, 1) failed before it could join:\nTraceback\nValueError: bad" in caplog.text)


def test_a_plan_that_cannot_be_made_ends_the_run_with_its_reason():
    with ControlPlane() as plane:
        plane.planner.error = RuntimeError("no plan for this")
        for rank in range(4):
            in_thread(Member(plane.client(rank), 2).join)
        outcome = plane.coordinator.wait(PATIENCE)
        assert isinstance(outcome, Failed)
        assert "no plan for this" in outcome.reason


def test_live_workers_whose_connection_broke_regroup_and_one_that_another_still_cannot_reach_is_evicted(plane):
    members = plane.members()
    members[0].client.send(Broken(0, 0, "connection reset"))
    plane.until(lambda: all(member.client.is_interrupted for member in members))
    together(*(member.step for member in members))
    (disturbance,) = plane.events("disturbance")
    assert disturbance.details["cause"] == "worker (0, 0): connection reset"
    assert plane.events("failure") == []
    assert all(member.client.member.roster == (0, 1, 2, 3) for member in members)
    members[0].client.send(Broken(0, 1, "no connection", (2,)))
    plane.until(lambda: all(members[rank].client.is_interrupted for rank in (0, 1, 3)))
    together(*(members[rank].step for rank in (0, 1, 3)))
    assert plane.processes[2].killed.is_set()
    assert all(members[rank].client.member.roster == (0, 1, 3) for rank in (0, 1, 3))
    cause = "it and worker (0, 0) cannot reach each other"
    for kind in ("suspected", "evicted", "failure"):
        (event,) = plane.events(kind)
        assert (event.worker, event.details["cause"]) == ((1, 0), cause)


def test_a_worker_that_does_not_start_is_given_up_and_killed():
    with ControlPlane(recovery=RecoveryOptions(start_timeout=2.0)) as plane:
        members = plane.members(0, 1, 2)
        assert plane.processes[3].killed.is_set()
        assert members[0].client.member.roster == (0, 1, 2)
        assert "did not start within 2 s" in plane.events("failure")[0].details["cause"]


def test_a_worker_that_does_not_stop_for_a_regroup_is_evicted():
    with ControlPlane(report_timeout=2.0) as plane:
        members = plane.members()
        die(plane, members[3])
        plane.until(lambda: members[0].client.is_interrupted and members[1].client.is_interrupted)
        together(members[0].regroup, members[1].regroup)  # worker 2 beats, and does not report
        assert plane.processes[2].killed.is_set()
        assert "did not stop for a regroup" in plane.events("failure")[-1].details["cause"]
        assert members[0].client.member.roster == (0, 1)


# ---------------------------------------------------------------------- silent workers


@pytest.mark.parametrize("beats", [1, 0], ids=["after a heartbeat", "before its first heartbeat"])
def test_a_silent_worker_is_evicted_and_killed(strict, beats):
    silent = strict.connection()
    silent.send(Hello(3, Process("", os.getpid())))
    for _ in range(beats):
        beat(silent, 3)
    members = strict.members(0, 1, 2)  # they need worker 3's report, or its eviction
    assert strict.processes[3].killed.is_set()
    assert [process.released.is_set() for process in strict.processes.values()] == [False, False, False, True]
    assert [event.worker for event in strict.events("failure")] == [(1, 1)]
    kinds = [event.kind for event in strict.coordinator.history if event.worker == (1, 1)]
    assert kinds == ["suspected", "evicted", "failure"]
    assert "silent for more than 1 s" in strict.events("failure")[0].details["cause"]
    assert members[0].client.member.roster == (0, 1, 2)
    assert isinstance(silent.receive(), Alive)
    assert isinstance(silent.receive(), Regroup)
    with pytest.raises((EOFError, OSError)):
        silent.receive()


def test_replicas_that_are_all_silent_are_waited_for_until_their_bound_and_the_record_says_why():
    with ControlPlane(heartbeat=HeartbeatTimeouts(SILENCE, 3 * SILENCE)) as plane:
        members = plane.members()
        silent = [members[rank].client for rank in (1, 3)]
        for client in silent:
            client.heartbeat_interval = 1000.0
        plane.until(lambda: len(plane.events("suspected")) == 2)

        def is_seen() -> bool:
            positions = plane.coordinator.view().status.positions
            return [position.state.value for position in positions if position.cause] == ["suspected"] * 2

        plane.until(is_seen)
        for client in silent:
            beat(client, client.rank)
        plane.until(lambda: len(plane.events("cleared")) == 2)
        why = "no other worker that holds stage 1 is well"
        for suspected, cleared in zip(plane.events("suspected"), plane.events("cleared"), strict=True):
            assert suspected.details["cause"] == "it was silent for more than 1 s"
            assert (suspected.details["waits"], suspected.details["limit"]) == (why, 3 * SILENCE)
            assert cleared.worker == suspected.worker
            assert cleared.seconds > SILENCE
        assert plane.events("evicted") == plane.events("failure") == []
        outcome = plane.coordinator.wait(PATIENCE)
        cause = f"it was silent for more than 1 s; it was given 3 s because {why}"
        assert outcome == StageLost(1, {1: cause, 3: cause})
        assert all(members[rank].client.exited.wait(PATIENCE) for rank in (0, 2))
        assert {members[rank].client.exit_code for rank in (0, 2)} == {EXIT_STOPPED}


def test_a_worker_that_joins_after_the_end_is_told_so(plane):
    plane.processes[1].die("first")
    plane.processes[3].die("second")
    assert isinstance(plane.coordinator.wait(PATIENCE), StageLost)
    late = plane.connection()
    late.send(Hello(0, Process("", os.getpid())))
    assert wait([late], timeout=5.0), "it hears nothing"
    with contextlib.suppress(EOFError):  # a closed connection tells as much
        assert isinstance(late.receive(), Stop)
