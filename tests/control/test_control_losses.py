"""Losses over real sockets, by whatever they are noticed, and disturbances without one."""

import os
import socket
import time
from collections.abc import Mapping
from typing import Any

from control_plane import GRID, PATIENCE, ControlPlane, die, fake_schedule, in_thread, together
from control_worker import Member

from lightning_recycle.control.client import EXIT_STOPPED
from lightning_recycle.control.options import RecoveryOptions
from lightning_recycle.control.protocol.messages import Activity, Broken, Crash, Heartbeat, Hello
from lightning_recycle.control.protocol.state import Crashed, Failed, StageLost
from lightning_recycle.planning.grid import Worker
from lightning_recycle.planning.program import Programs


def test_a_process_exit_is_a_loss_with_its_cause(plane: ControlPlane) -> None:
    members = plane.members()
    die(plane, members[3], "it exited with code 1")
    together(*(member.step for member in members[:3]))
    (failure,) = plane.events("failure")
    assert (failure.worker, failure.details["cause"]) == ((1, 1), "it exited with code 1")
    assert (failure.host, failure.pid) == (socket.gethostname(), os.getpid())
    assert all(m.resumes[-1].roster == (0, 1, 2) for m in members[:3])
    programs = Programs(fake_schedule(frozenset({Worker(1, 1)})))
    assert [m.resumes[-1].program for m in members[:3]] == [programs.of(GRID.worker(rank)) for rank in range(3)]


def test_a_closed_connection_is_a_loss(plane: ControlPlane) -> None:
    connection = plane.connection()
    connection.send(Hello(3, os.getpid()))
    connection.send(Heartbeat(3, -1, Activity(0, "start", "", time.monotonic())))
    connection.close()
    assert plane.members(0, 1, 2)[0].client.roster == (0, 1, 2)
    assert plane.events("failure")[0].details["cause"] == "its connection to the coordinator broke"


def arrive_and_step(member: Member) -> Mapping[int, Any]:
    answer = member.client.arrive("barrier", member.client.rank)
    member.step()
    return answer


def test_arrive_survives_a_loss_in_the_middle(plane: ControlPlane) -> None:
    members = plane.members()
    waiting = [in_thread(arrive_and_step, m) for m in members[:3]]
    plane.until(lambda: len(plane.coordinator._state.collectives.open.get(0, ())) == 3)
    die(plane, members[3])
    assert [future.result(PATIENCE) for future in waiting] == [{0: 0, 1: 1, 2: 2}] * 3
    assert all(member.client.generation == 1 for member in members[:3])


def test_a_loss_interrupts_a_commit_and_the_others_apply_the_step(plane: ControlPlane) -> None:
    members = plane.members()
    waiting = [in_thread(member.step) for member in members[:3]]
    plane.until(lambda: len(plane.coordinator._state.generation.commits) == 3)
    die(plane, members[3])
    for future in waiting:
        future.result(PATIENCE)
    assert [member.version for member in members[:3]] == [1, 1, 1]
    plane.until(lambda: plane.events("step"))
    assert [event.step for event in plane.events("step")] == [0]
    assert [member.resumes[-1].decision.version for member in members[:3]] == [1, 1, 1]


def test_losing_a_stage_stops_the_others_with_one_reason(plane: ControlPlane) -> None:
    members = plane.members()
    die(plane, members[1], "first")
    die(plane, members[3], "second")
    assert plane.coordinator.wait(PATIENCE) == StageLost(1, {1: "first", 3: "second"})
    for member in (members[0], members[2]):
        assert member.client.exited.wait(PATIENCE)
        assert member.client.exit_code == EXIT_STOPPED


def test_an_exception_of_the_users_ends_the_run_even_if_its_process_is_already_gone(plane: ControlPlane) -> None:
    members = plane.members()
    crash = Crash(2, False, "ValueError: bad", b"", "Traceback")
    members[2].client.send(crash)
    die(plane, members[2], "it exited with code 1")
    assert plane.coordinator.wait(PATIENCE) == Crashed(crash)


def test_an_exception_of_the_infrastructure_ends_connection_and_process_at_once(plane: ControlPlane) -> None:
    members = plane.members()
    members[3].client.leave()  # in this process only: as a worker whose interpreter is still shutting down
    members[3].client.send(Crash(3, True, "InjectedFaultError: as asked", None, "Traceback"))
    together(*(member.step for member in members[:3]))
    assert plane.processes[3].killed.is_set()
    assert members[3].client.exited.wait(PATIENCE)
    (failure,) = plane.events("failure")
    assert (failure.worker, failure.details["cause"]) == ((1, 1), "InjectedFaultError: as asked")
    assert members[0].client.roster == (0, 1, 2)


def test_a_plan_that_cannot_be_made_ends_the_run_with_its_reason() -> None:
    with ControlPlane() as plane:
        plane.planner.error = RuntimeError("no plan for this")
        for rank in range(4):
            in_thread(Member(plane.client(rank), 2).join)
        outcome = plane.coordinator.wait(PATIENCE)
        assert isinstance(outcome, Failed)
        assert "no plan for this" in outcome.reason


def test_live_workers_whose_connection_broke_regroup_after_the_grace(plane: ControlPlane) -> None:
    members = plane.members()
    members[0].client.send(Broken(0, 0, "connection reset"))
    plane.until(lambda: all(member.client.interrupted for member in members))
    together(*(member.step for member in members))
    (disturbance,) = plane.events("disturbance")
    assert disturbance.details["cause"] == "worker (0, 0): connection reset"
    assert plane.events("failure") == []
    assert all(member.client.roster == (0, 1, 2, 3) for member in members)


def test_a_live_worker_that_another_cannot_reach_is_evicted_and_killed(plane: ControlPlane) -> None:
    members = plane.members()
    members[0].client.send(Broken(0, 0, "connection reset"))
    plane.until(lambda: all(member.client.interrupted for member in members))
    together(*(member.regroup for member in members))
    members[0].client.send(Broken(0, 1, "no connection", (2,)))
    plane.until(lambda: all(members[rank].client.interrupted for rank in (0, 1, 3)))
    together(*(members[rank].step for rank in (0, 1, 3)))
    assert plane.processes[2].killed.is_set()
    assert all(members[rank].client.roster == (0, 1, 3) for rank in (0, 1, 3))
    cause = "it and worker (0, 0) cannot reach each other"
    for kind in ("suspected", "evicted", "failure"):
        (event,) = plane.events(kind)
        assert (event.worker, event.details["cause"]) == ((1, 0), cause)


def test_a_worker_that_does_not_start_is_given_up_and_killed() -> None:
    with ControlPlane(recovery=RecoveryOptions(start_timeout=2.0)) as plane:
        members = plane.members(0, 1, 2)
        assert plane.processes[3].killed.is_set()
        assert members[0].client.roster == (0, 1, 2)
        assert "did not start within 2 s" in plane.events("failure")[0].details["cause"]


def test_a_worker_that_does_not_stop_for_a_regroup_is_evicted() -> None:
    with ControlPlane(report_timeout=2.0) as plane:
        members = plane.members()
        die(plane, members[3])
        plane.until(lambda: members[0].client.interrupted and members[1].client.interrupted)
        together(members[0].regroup, members[1].regroup)  # worker 2 beats, and does not report
        assert plane.processes[2].killed.is_set()
        assert "did not stop for a regroup" in plane.events("failure")[-1].details["cause"]
        assert members[0].client.roster == (0, 1)
