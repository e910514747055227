"""Workers that are silent, and workers that are processes, over real sockets."""

import contextlib
import os
import signal
import subprocess
import threading
import time
from multiprocessing.connection import wait

import pytest
from control_plane import PATIENCE, SILENCE, ControlPlane, beat, in_thread
from support.waiting import next_line

from lightning_recycle.control.client import EXIT_LOST_COORDINATOR, EXIT_STOPPED
from lightning_recycle.control.protocol.messages import Alive, Arrive, Hello, Regroup, Report, Stop
from lightning_recycle.control.protocol.recovery import WorkerStatus
from lightning_recycle.control.protocol.state import StageLost


@pytest.mark.parametrize("beats", [1, 0], ids=["after a heartbeat", "before its first heartbeat"])
def test_a_silent_worker_is_evicted_and_killed(strict: ControlPlane, beats: int) -> None:
    silent = strict.connection()
    silent.send(Hello(3, os.getpid()))
    for _ in range(beats):
        beat(silent, 3)
    members = strict.members(0, 1, 2)  # they need worker 3's report, or its eviction
    assert strict.processes[3].killed.is_set()
    assert [process.released.is_set() for process in strict.processes.values()] == [False, False, False, True]
    assert [event.worker for event in strict.events("failure")] == [(1, 1)]
    kinds = [event.kind for event in strict.coordinator.history if event.worker == (1, 1)]
    assert kinds == ["suspected", "evicted", "failure"]
    assert "silent for more than 1 s" in strict.events("failure")[0].details["cause"]
    assert members[0].client.roster == (0, 1, 2)
    assert isinstance(silent.receive(), Alive)
    assert isinstance(silent.receive(), Regroup)
    with pytest.raises((EOFError, OSError)):
        silent.receive()


def test_replicas_that_are_all_silent_are_waited_for_and_the_record_says_why(strict: ControlPlane) -> None:
    for rank in (0, 2):
        strict.client(rank)
    silent = [strict.connection() for _ in range(2)]
    for connection, rank in zip(silent, (1, 3), strict=True):
        connection.send(Hello(rank, os.getpid()))
    strict.until(lambda: len(strict.events("suspected")) == 2)
    for connection, rank in zip(silent, (1, 3), strict=True):
        beat(connection, rank)
    strict.until(lambda: len(strict.events("cleared")) == 2)
    assert [event.worker for event in strict.events("suspected")] == [(0, 1), (1, 1)]
    for suspected, cleared in zip(strict.events("suspected"), strict.events("cleared"), strict=True):
        assert suspected.details["cause"] == "it was silent for more than 1 s"
        assert suspected.details["waits"] == "no other worker that holds stage 1 is well"
        assert suspected.details["limit"] == 300.0
        assert cleared.worker == suspected.worker
        assert cleared.seconds > SILENCE
    assert strict.events("evicted") == strict.events("failure") == []


def test_replicas_that_stay_silent_end_the_run_after_their_bound() -> None:
    with ControlPlane(heartbeat_timeout=SILENCE, last_holder_timeout=3 * SILENCE) as plane:
        members = plane.members()
        for rank in (1, 3):
            members[rank].client.heartbeat_interval = 1000.0
        outcome = plane.coordinator.wait(PATIENCE)
        assert isinstance(outcome, StageLost)
        assert outcome.stage == 1
        assert set(outcome.causes.values()) == {
            "it was silent for more than 1 s; it was given 3 s because no other worker that holds stage 1 is well"
        }


def test_a_slow_worker_that_beats_is_not_evicted(strict: ControlPlane) -> None:
    members = strict.members()
    early = [in_thread(member.step) for member in members[:3]]
    with pytest.raises(TimeoutError):
        early[0].result(2 * SILENCE)  # worker 3 computes for long
    members[3].step()
    for future in early:
        future.result(PATIENCE)
    assert strict.events("failure") == []


def test_a_worker_that_stops_in_the_middle_of_a_message_is_evicted_and_the_others_go_on(strict: ControlPlane) -> None:
    """As a worker under SIGSTOP (or behind a dead link) that was sending its part of a checkpoint."""
    connection = strict.connection()
    connection.send(Hello(3, os.getpid()))
    beat(connection, 3)
    os.write(connection.fileno(), (5_000_000).to_bytes(4, "big") + b"x" * 1000)
    try:
        members = strict.members(0, 1, 2)
        assert members[0].client.roster == (0, 1, 2)
    finally:
        connection.close()  # lets a coordinator that is stuck go on


def test_a_worker_that_does_not_read_is_evicted_and_the_others_go_on(strict: ControlPlane) -> None:
    deaf = strict.connection()
    deaf.send(Hello(3, os.getpid()))
    stop = threading.Event()

    def serve() -> None:
        """Reports like everybody, then stops altogether while it should take a large answer."""
        beat(deaf, 3)
        message = deaf.receive()
        assert isinstance(message, Regroup)
        deaf.send(Report(3, 0, WorkerStatus(strict.grid.worker(3).stage, 0, False)))
        deaf.send(Arrive(3, 0, "state", None))
        stop.wait(PATIENCE)

    server = in_thread(serve)
    members = strict.members(0, 1, 2)
    large = os.urandom(20_000_000)
    futures = [in_thread(m.client.arrive, "state", large if m.client.rank == 0 else None) for m in members]
    try:
        for future in futures:
            assert future.result(PATIENCE / 2)[0] == large
        strict.until(lambda: strict.processes[3].killed.is_set(), seconds=5 * SILENCE)
    finally:
        stop.set()
        server.exception(PATIENCE)
        deaf.close()


# ---------------------------------------------------------------------- processes


def line(child: subprocess.Popen[str]) -> str:
    return str(next_line(child).strip())


def test_a_killed_process_is_noticed_by_its_connection_and_the_others_finish(plane: ControlPlane) -> None:
    children = [plane.child(rank, steps=30, pause=0.02) for rank in range(4)]
    assert line(children[1]) == "hello"
    assert line(children[1]) == "step 1"
    children[1].send_signal(signal.SIGKILL)
    children[1].wait(10)
    for rank in (0, 2, 3):
        assert children[rank].stdout is not None
        lines = [line(children[rank]) for _ in range(32)]
        assert lines == ["hello", *(f"step {n}" for n in range(1, 31)), "answer [0, 2, 3]"]
    assert [event.worker for event in plane.events("failure")] == [(0, 1)]
    steps = [event.step for event in plane.events("step")]
    assert steps == list(range(30)), "every step once, in order"


def test_a_stopped_process_is_evicted_for_its_silence_and_ends_when_it_wakes() -> None:
    # A process that starves on a busy machine is not silent for so long.
    with ControlPlane(heartbeat_timeout=4.0) as plane:
        children = [plane.child(rank, steps=5, pause=0.1) for rank in range(4)]
        assert [line(children[3]) for _ in range(2)] == ["hello", "step 1"]
        children[3].send_signal(signal.SIGSTOP)
        for rank in (0, 1, 2):
            assert [line(children[rank]) for _ in range(7)][-1] == "answer [0, 1, 2]"
        assert plane.processes[3].killed.is_set()
        assert "silent" in plane.events("failure")[0].details["cause"]
        children[3].send_signal(signal.SIGCONT)
        assert children[3].wait(10) == EXIT_LOST_COORDINATOR


def test_processes_end_when_the_coordinator_is_gone(plane: ControlPlane) -> None:
    children = [plane.child(rank, steps=1) for rank in range(4)]
    for child in children:
        assert [line(child) for _ in range(2)] == ["hello", "step 1"]
    plane.coordinator.close()
    started = time.monotonic()
    assert [child.wait(10) for child in children] == [EXIT_LOST_COORDINATOR] * 4
    assert time.monotonic() - started < 2.0
    plane.coordinator.close = lambda: None  # type: ignore[method-assign]


def test_processes_end_when_they_are_told_to_stop(plane: ControlPlane) -> None:
    children = [plane.child(rank, steps=1000, pause=0.01) for rank in range(4)]
    assert [line(child) for child in children] == ["hello"] * 4
    plane.until(lambda: plane.events("resumed"))
    for rank in (1, 3):
        children[rank].kill()
    assert isinstance(plane.coordinator.wait(PATIENCE), StageLost)
    assert [children[rank].wait(10) for rank in (0, 2)] == [EXIT_STOPPED] * 2


def test_a_worker_that_joins_after_the_end_is_told_so(plane: ControlPlane) -> None:
    plane.processes[1].die("first")
    plane.processes[3].die("second")
    assert isinstance(plane.coordinator.wait(PATIENCE), StageLost)
    late = plane.connection()
    late.send(Hello(0, os.getpid()))
    assert wait([late], timeout=5.0), "it hears nothing"
    with contextlib.suppress(EOFError):  # a closed connection tells as much
        assert isinstance(late.receive(), Stop)
