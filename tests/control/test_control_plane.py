"""Coordinator and clients over real sockets; workers are threads here, or processes where they die or stop."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, wait
from pathlib import Path
from typing import Any

import pytest
from control_worker import Member, Payload, ThreadClient

from lightning_recycle.control import watch
from lightning_recycle.control.client import EXIT_LOST_COORDINATOR, EXIT_STOPPED, Interrupted
from lightning_recycle.control.connection import MessageConnection
from lightning_recycle.control.coordinator import Coordinator, CoordinatorOptions
from lightning_recycle.control.history import Event
from lightning_recycle.control.protocol.messages import (
    Activity,
    Arrive,
    Broken,
    Crash,
    FaultInjected,
    Heartbeat,
    Hello,
    Losses,
    Regroup,
    Report,
    Stop,
)
from lightning_recycle.control.protocol.recovery import WorkerStatus
from lightning_recycle.control.protocol.state import RESULT, Crashed, Failed, Finished, StageLost
from lightning_recycle.errors import ControlPlaneError
from lightning_recycle.planning.grid import Grid, Worker

PATIENCE = 15.0  # seconds for what must happen
pytestmark = pytest.mark.timeout(60)
SILENCE = 1.0  # heartbeat timeout of these tests
GRID = Grid(2, 2, 1)  # ranks 0 and 2 are stage 0, ranks 1 and 3 stage 1


class FakeProcess:
    """What the coordinator watches in the place of a process."""

    def __init__(self) -> None:
        self.sentinel, self._writer = os.pipe()
        self._cause: str | None = None
        self._ended = threading.Event()
        self.killed = threading.Event()
        self.released = threading.Event()

    def describe_exit(self, timeout: float) -> str | None:
        self._ended.wait(timeout)
        return self._cause

    def kill(self) -> None:
        self.killed.set()
        self.die("it was killed by SIGKILL")

    def die(self, cause: str) -> None:
        if self._cause is None:
            self._cause = cause
            self._ended.set()
            os.close(self._writer)

    def release(self) -> None:
        self.released.set()

    def close(self) -> None:
        self.die("end of the test")
        os.close(self.sentinel)


@dataclass(frozen=True)
class FakeSchedule:
    failed: frozenset[Worker]


class FakePlanner:
    """What the coordinator asks for schedules; remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[frozenset[Worker], dict[int, dict[str, float]]]] = []
        self.ahead: list[frozenset[Worker]] = []
        self.error: Exception | None = None

    def plan(self, failed: frozenset[Worker], seconds: Mapping[int, Mapping[str, float]]) -> FakeSchedule:
        if self.error is not None:
            raise self.error
        self.asked.append((failed, {stage: dict(times) for stage, times in seconds.items()}))
        return FakeSchedule(failed)

    def retime(self, schedule: FakeSchedule, seconds: Any) -> FakeSchedule:
        return schedule

    def plan_ahead(self, failed: frozenset[Worker], seconds: Any) -> None:
        self.ahead.append(failed)

    def close(self) -> None: ...


class ControlPlane:
    """A coordinator with the workers that a test gives it."""

    def __init__(
        self, grid: Grid = GRID, start_worker: Callable[[int, int, int], Any] | None = None, **options: float
    ) -> None:
        self.processes = {rank: FakeProcess() for rank in range(grid.num_workers)}
        defaults = {"heartbeat_timeout": PATIENCE, "start_timeout": PATIENCE, "report_timeout": PATIENCE, "grace": 0.1}
        self.planner = FakePlanner()
        all_options = CoordinatorOptions(**{**defaults, **options})  # type: ignore[arg-type]
        self.coordinator = Coordinator(
            grid,
            self.planner,
            all_options,
            start_worker=start_worker,
            setup="for who is started by hand",  # type: ignore[arg-type]
        )
        self.grid = grid
        self.clients: list[ThreadClient] = []
        self.raw: list[MessageConnection] = []
        self.children: list[subprocess.Popen[str]] = []
        self._closed = False

    def start(self) -> None:
        self.coordinator.start(self.processes)

    def client(self, rank: int | None, joining: bool = False) -> ThreadClient:
        client = ThreadClient(rank, self.coordinator.address, self.coordinator.authkey, 0.05, joining)
        self.clients.append(client)
        return client

    def members(self, *ranks: int) -> list[Member]:
        """Members that have joined; all ranks of the grid by default."""
        members = [Member(self.client(rank), self.grid.stages) for rank in ranks or range(self.grid.num_workers)]
        together(*(member.join for member in members))
        return members

    def connection(self) -> MessageConnection:
        """A connection that has the key and says what the test says."""
        connection = MessageConnection(Client(self.coordinator.address, authkey=self.coordinator.authkey))
        self.raw.append(connection)
        return connection

    def child(self, rank: int, steps: int = 0, pause: float = 0.0) -> subprocess.Popen[str]:
        """A worker in a process of its own. Its exit is known by its connection only."""
        host, port = self.coordinator.address
        code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import control_worker as w; w.main()"
        numbers = [rank, self.grid.stages, steps, pause]
        command = [sys.executable, "-c", code, host, str(port), self.coordinator.authkey.hex(), *map(str, numbers)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.children.append(child)
        return child

    def events(self, kind: str) -> list[Event]:
        return [event for event in self.coordinator.history if event.kind == kind]

    def until(self, condition: Callable[[], Any], seconds: float = PATIENCE) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"waited in vain; history: {self.coordinator.history}"
            time.sleep(0.005)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for child in self.children:
            child.kill()
            child.wait(10)
            assert child.stdout is not None
            child.stdout.close()
        for client in self.clients:
            client.leave()
        self.coordinator.close()
        for client in self.clients:
            assert client.exited.wait(PATIENCE), "its receiver thread must not read from descriptors of the next test"
        for connection in self.raw:
            connection.close()
        for process in self.processes.values():
            process.close()


@pytest.fixture
def plane() -> Iterator[ControlPlane]:
    plane = ControlPlane()
    plane.start()
    yield plane
    plane.close()


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> Iterator[ControlPlane]:
    """One that evicts a worker after a second of silence, also while it starts."""
    monkeypatch.setattr(watch, "_LEAST_START_TIMEOUT", SILENCE)
    plane = ControlPlane(heartbeat_timeout=SILENCE)
    plane.start()
    yield plane
    plane.close()


def in_thread(function: Callable[..., Any], *args: Any) -> Future[Any]:
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def together(*functions: Callable[[], Any]) -> list[Any]:
    """Runs each in a thread; returns their results."""
    futures = [in_thread(function) for function in functions]
    return [future.result(PATIENCE) for future in futures]


def die(plane: ControlPlane, member: Member, cause: str = "it was killed by SIGKILL") -> None:
    """As a process that ends: its connection is closed and its sentinel fires."""
    member.client.leave()
    plane.processes[member.client.rank].die(cause)


# ---------------------------------------------------------------------- the ordinary course


def test_workers_that_joined_get_the_same_roster_and_schedule(plane: ControlPlane) -> None:
    members = plane.members()
    resumes = [member.resumes[0] for member in members]
    assert all(resume == resumes[0] for resume in resumes)
    assert (resumes[0].generation, resumes[0].roster) == (0, (0, 1, 2, 3))
    assert resumes[0].schedule == FakeSchedule(frozenset())
    assert plane.coordinator.roster == (0, 1, 2, 3)
    assert plane.coordinator.schedules == [FakeSchedule(frozenset())]


def test_commits_wait_for_everybody_and_bring_one_payload_of_each_stage(plane: ControlPlane) -> None:
    members = plane.members()
    early = [in_thread(m.client.commit, 0, Payload(m.client.rank)) for m in members[:3]]
    with pytest.raises(TimeoutError):
        early[0].result(0.2)
    last = members[3].client.commit(0, Payload(3))
    assert last.payloads == {0: Payload(0), 1: Payload(1)}
    assert all(future.result(PATIENCE) == last for future in early)


def test_collectives_answer_everybody_with_the_payloads_of_all(plane: ControlPlane) -> None:
    members = plane.members()
    for number in range(20):
        answers = together(*(partial(m.client.arrive, f"round {number}", (number, m.client.rank)) for m in members))
        assert all(answer == {rank: (number, rank) for rank in range(4)} for answer in answers)


def test_payloads_of_5_megabytes_reach_everybody(plane: ControlPlane) -> None:
    members = plane.members()
    large = os.urandom(5_000_000)
    answers = together(*(lambda m=m: m.client.arrive("state", (m.client.rank, large)) for m in members))
    for answer in answers:
        assert answer == {rank: (rank, large) for rank in range(4)}


def test_results_stay_with_the_coordinator_and_end_the_run(plane: ControlPlane) -> None:
    members = plane.members()
    parts = {0: "first stage", 1: "last stage", 2: None, 3: None}
    answers = together(*(lambda m=m: m.client.arrive(RESULT, parts[m.client.rank]) for m in members))
    assert all(answer == {0: True, 1: True, 2: False, 3: False} for answer in answers)
    outcome = plane.coordinator.wait(PATIENCE)
    assert isinstance(outcome, Finished)
    assert {rank: pickle.loads(part) for rank, part in outcome.results.items()} == {0: "first stage", 1: "last stage"}


def test_waiting_for_the_end_is_bounded_when_asked(plane: ControlPlane) -> None:
    assert plane.coordinator.wait(timeout=0.05) is None


def test_an_announcement_that_does_not_come_is_an_error_after_its_time(plane: ControlPlane) -> None:
    client = plane.client(0)
    with pytest.raises(ControlPlaneError, match=r"Worker 0 waited 0\.1 s"):
        client.await_announcement(0.1)


# ---------------------------------------------------------------------- losses


def test_a_process_exit_is_a_loss_with_its_cause(plane: ControlPlane) -> None:
    members = plane.members()
    die(plane, members[3], "it exited with code 1")
    together(*(member.step for member in members[:3]))
    (failure,) = plane.events("failure")
    assert (failure.worker, failure.details["cause"]) == ((1, 1), "it exited with code 1")
    assert all(m.resumes[-1].roster == (0, 1, 2) for m in members[:3])
    assert all(m.resumes[-1].schedule == FakeSchedule(frozenset({Worker(1, 1)})) for m in members[:3])


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
    plane.until(lambda: len(plane.coordinator._state.collectives.get(0, ())) == 3)
    die(plane, members[3])
    assert [future.result(PATIENCE) for future in waiting] == [{0: 0, 1: 1, 2: 2}] * 3
    assert all(member.client.generation == 1 for member in members[:3])


def test_a_loss_interrupts_a_commit_and_the_others_apply_the_step(plane: ControlPlane) -> None:
    members = plane.members()
    waiting = [in_thread(member.step) for member in members[:3]]
    plane.until(lambda: len(plane.coordinator._state.commits) == 3)
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
    plane = ControlPlane()
    plane.planner.error = RuntimeError("no plan for this")
    plane.start()
    try:
        for rank in range(4):
            member = Member(plane.client(rank), 2)
            in_thread(member.join)
        outcome = plane.coordinator.wait(PATIENCE)
        assert isinstance(outcome, Failed)
        assert "no plan for this" in outcome.reason
    finally:
        plane.close()


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
    plane = ControlPlane(start_timeout=2.0)
    plane.start()
    try:
        members = plane.members(0, 1, 2)
        assert plane.processes[3].killed.is_set()
        assert members[0].client.roster == (0, 1, 2)
        assert "did not start within 2 s" in plane.events("failure")[0].details["cause"]
    finally:
        plane.close()


def test_a_worker_that_does_not_stop_for_a_regroup_is_evicted() -> None:
    plane = ControlPlane(report_timeout=2.0)
    plane.start()
    try:
        members = plane.members()
        die(plane, members[3])
        plane.until(lambda: members[0].client.interrupted and members[1].client.interrupted)
        together(members[0].regroup, members[1].regroup)  # worker 2 beats, and does not report
        assert plane.processes[2].killed.is_set()
        assert "did not stop for a regroup" in plane.events("failure")[-1].details["cause"]
        assert members[0].client.roster == (0, 1)
    finally:
        plane.close()


# ---------------------------------------------------------------------- the roster grows and shrinks


def run_to(version: int, members: list[Member]) -> list[Future[Any]]:
    """Lets each of ``members`` step up to ``version``, in a thread of its own."""

    def run(member: Member) -> None:
        while member.version < version:
            member.step()

    return [in_thread(run, member) for member in members]


def has_boundary(plane: ControlPlane) -> bool:
    """Whether all have been asked to stop, and have heard it."""
    pause = plane.coordinator._state.pause
    return pause is not None and pause.boundary is not None


def results(futures: list[Future[Any]]) -> list[Any]:
    return [future.result(PATIENCE) for future in futures]


def test_a_replacement_joins_at_a_step_boundary_and_nothing_is_redone(plane: ControlPlane) -> None:
    members = plane.members()
    die(plane, members[3])
    results(run_to(1, members[:3]))
    joiner = Member(plane.client(3, joining=True), 2)
    entering = in_thread(joiner.enter)
    plane.until(lambda: has_boundary(plane))
    running = run_to(6, members[:3])
    entering.result(PATIENCE)
    assert joiner.resumes[0].donors == {3: 1}
    assert (joiner.version, joiner.client.roster) == (1, (0, 1, 2, 3))
    results([*running, *run_to(6, [joiner])])
    plane.until(lambda: len(plane.events("step")) == 6)
    assert [event.step for event in plane.events("step")] == list(range(6))
    (lost,) = plane.events("failure")
    redone = [event for event in plane.events("redone") if event.generation > lost.generation]
    assert redone == []  # nobody had begun the step at which it joined; the death may have met them in the first one
    (rejoined,) = plane.events("rejoined")
    (paused,) = plane.events("paused")
    assert (rejoined.worker, rejoined.step) == ((1, 1), 1)
    assert rejoined.seconds == pytest.approx(rejoined.time - paused.time, abs=0.01)
    answers = together(*(partial(m.client.arrive, "end", m.client.rank) for m in [*members[:3], joiner]))
    assert answers == [{0: 0, 1: 1, 2: 2, 3: 3}] * 4
    assert plane.coordinator.schedules[-1] == FakeSchedule(frozenset()), "the plan of before"


def test_a_worker_that_is_told_to_end_leaves_at_a_step_boundary_and_its_process_ends_well(plane: ControlPlane) -> None:
    members = plane.members()
    results(run_to(2, members))
    members[3].client.request_leave()
    plane.until(lambda: has_boundary(plane))
    run_to(3, [members[3]])
    results(run_to(5, members[:3]))
    assert members[3].client.exited.wait(PATIENCE)
    assert members[3].client.exit_code == 0
    assert (members[3].version, members[0].client.roster) == (2, (0, 1, 2))
    (left,) = plane.events("left")
    assert (left.worker, left.step) == ((1, 1), 2)
    assert [*plane.events("failure"), *plane.events("redone")] == []
    assert not plane.processes[3].killed.is_set()


def test_a_leader_that_was_lost_is_not_leader_again_when_it_comes_back(plane: ControlPlane) -> None:
    members = plane.members()
    assert {member.client.leader for member in members} == {1}
    die(plane, members[1])
    survivors = [members[0], members[2], members[3]]
    results(run_to(1, survivors))
    joiner = Member(plane.client(1, joining=True), 2)
    entering = in_thread(joiner.enter)
    plane.until(lambda: has_boundary(plane))
    running = run_to(3, survivors)
    entering.result(PATIENCE)
    results([*running, *run_to(3, [joiner])])
    assert {member.client.leader for member in [*survivors, joiner]} == {3}


def test_a_worker_started_by_hand_gets_the_position_that_is_free(plane: ControlPlane) -> None:
    members = plane.members()
    spare = plane.client(None, joining=True)
    waiting = in_thread(spare.await_assignment)
    with pytest.raises(TimeoutError):
        waiting.result(0.3)
    die(plane, members[2])
    found = waiting.result(PATIENCE)
    assert (found.rank, found.incarnation, found.joining, found.setup) == (2, 1, True, "for who is started by hand")
    assert spare.rank == 2


def test_a_spare_that_goes_away_is_not_given_a_position(plane: ControlPlane) -> None:
    members = plane.members()
    gone = plane.connection()
    gone.send(Hello(None, os.getpid(), True))
    plane.until(lambda: plane.coordinator._vacancies.spares)
    gone.close()
    plane.until(lambda: not plane.coordinator._vacancies.spares)
    stays = plane.client(None, joining=True)
    die(plane, members[2])
    assert in_thread(stays.await_assignment).result(PATIENCE).rank == 2


def test_replacements_are_started_for_the_lost_as_often_as_allowed() -> None:
    started: list[tuple[int, int, int]] = []
    processes: list[FakeProcess] = []

    def start_worker(rank: int, incarnation: int, device: int) -> FakeProcess:
        started.append((rank, incarnation, device))
        processes.append(FakeProcess())
        return processes[-1]

    plane = ControlPlane(start_worker=start_worker, restart_workers=True, max_restarts=2)
    plane.start()
    try:
        members = plane.members()
        die(plane, members[3])
        plane.until(lambda: len(started) == 1)
        plane.until(lambda: 3 in plane.coordinator._processes)
        processes[0].die("it exited with code 1")
        plane.until(lambda: len(started) == 2)
        plane.until(lambda: 3 in plane.coordinator._processes)
        processes[1].die("it exited with code 1")
        plane.until(lambda: 3 not in plane.coordinator._processes)
        time.sleep(0.7)  # the first wait is half a second
        assert started == [(3, 1, 3), (3, 2, 3)]
        assert [event.worker for event in plane.events("restarting")] == [(1, 1), (1, 1)]
        assert len(plane.events("failure")) == 1, "who was never let in is no failure"
    finally:
        plane.close()
        for process in processes:
            process.close()


def test_a_replacement_that_does_not_become_ready_in_time_is_given_up_for_the_next_one() -> None:
    processes: list[FakeProcess] = []

    def start_worker(rank: int, incarnation: int, device: int) -> FakeProcess:
        processes.append(FakeProcess())
        return processes[-1]

    plane = ControlPlane(start_worker=start_worker, restart_workers=True, start_timeout=1.0)
    plane.start()
    try:
        members = plane.members()
        die(plane, members[3])
        plane.until(lambda: processes)
        plane.until(lambda: processes[0].killed.is_set(), seconds=3.0)  # it never says hello
        plane.until(lambda: len(processes) > 1)
    finally:
        plane.close()
        for process in processes:
            process.close()


@pytest.mark.parametrize(("rank", "joining"), [(3, True), (4, True), (-1, False)], ids=["taken", "outside", "negative"])
def test_who_claims_a_position_that_it_cannot_have_is_refused(plane: ControlPlane, rank: int, joining: bool) -> None:
    members = plane.members()
    stranger = plane.connection()
    stranger.send(Hello(rank, os.getpid(), joining))
    with pytest.raises((EOFError, OSError)):
        stranger.receive()
    together(*(member.step for member in members))
    assert plane.events("failure") == []


def test_only_a_member_is_told_that_it_is_one(plane: ControlPlane) -> None:
    members = plane.members()
    together(*(partial(member.client.confirm) for member in members))
    joiner = plane.client(3, joining=True)  # the position is taken
    confirming = in_thread(joiner.confirm)
    assert joiner.exited.wait(PATIENCE)
    assert joiner.exit_code == EXIT_LOST_COORDINATOR
    assert not confirming.done() or confirming.exception() is not None


# ---------------------------------------------------------------------- silence


def beat(connection: MessageConnection, rank: int) -> None:
    connection.send(Heartbeat(rank, 0, Activity(0, "start", "", time.monotonic())))


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
    assert isinstance(silent.receive(), Regroup)
    with pytest.raises((EOFError, OSError)):
        silent.receive()


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


# ---------------------------------------------------------------------- strangers


def test_a_stranger_without_the_key_is_refused_and_the_service_goes_on(plane: ControlPlane) -> None:
    for _ in range(3):
        with pytest.raises((AuthenticationError, EOFError, ConnectionError)):
            Client(plane.coordinator.address, authkey=b"wrong")
    assert len(plane.members()) == 4


@pytest.mark.parametrize(
    "says",
    [b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x00\x00\x00\x04abcd", b"\xff" * 64],
    ids=["silence", "http", "a wrong answer", "noise"],
)
@pytest.mark.parametrize("stays", [True, False], ids=["and stays", "and leaves"])
def test_a_stranger_that_speaks_another_protocol_does_not_block_the_service(
    plane: ControlPlane, says: bytes, stays: bool
) -> None:
    stranger = socket.create_connection(plane.coordinator.address)
    stranger.sendall(says)
    if not stays:
        stranger.close()
    joining = in_thread(plane.members)
    try:
        assert len(joining.result(3.0)) == 4
    finally:
        stranger.close()


def test_a_connection_with_the_key_that_does_not_introduce_itself_is_ignored(plane: ControlPlane) -> None:
    connection = plane.connection()
    beat(connection, 0)
    connection.send(Broken(0, 0, "not mine to say"))
    members = plane.members()
    together(*(member.step for member in members))
    plane.until(lambda: plane.events("step"))
    assert [event.kind for event in plane.coordinator.history] == ["resumed", "regrouped", "step"]


# ---------------------------------------------------------------------- processes


def line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


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
    plane = ControlPlane(heartbeat_timeout=4.0)  # a process that starves on a busy machine is not silent for so long
    plane.start()
    try:
        children = [plane.child(rank, steps=5, pause=0.1) for rank in range(4)]
        assert [line(children[3]) for _ in range(2)] == ["hello", "step 1"]
        children[3].send_signal(signal.SIGSTOP)
        for rank in (0, 1, 2):
            assert [line(children[rank]) for _ in range(7)][-1] == "answer [0, 1, 2]"
        assert plane.processes[3].killed.is_set()
        assert "silent" in plane.events("failure")[0].details["cause"]
        children[3].send_signal(signal.SIGCONT)
        assert children[3].wait(10) == EXIT_LOST_COORDINATOR
    finally:
        plane.close()


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


# ---------------------------------------------------------------------- history


def test_history_tells_a_failure_from_its_detection_to_the_next_committed_step(plane: ControlPlane) -> None:
    members = plane.members()
    together(*(member.step for member in members))
    announced = time.time()
    members[2].client.send(FaultInjected(2, "kill", "F(0, 0)@0", announced))
    die(plane, members[2])
    survivors = [members[0], members[1], members[3]]
    plane.until(lambda: all(member.client.interrupted for member in survivors))
    for _ in range(2):
        together(*(member.step for member in survivors))
    plane.until(lambda: len(plane.events("step")) == 3)
    kinds = [event.kind for event in plane.coordinator.history]
    recovery = ["failure", "resumed", "regrouped", "step", "recovered"]
    assert kinds == ["resumed", "regrouped", "step", *recovery, "step"]
    _, _, first, failure, resumed, regrouped, second, recovered, third = plane.coordinator.history
    assert [event.generation for event in (first, resumed, second, recovered, third)] == [0, 1, 1, 1, 1]
    steps = [event.step for event in (first, failure, resumed, second, recovered, third)]
    assert steps == [0, 1, 1, 1, 1, 2]
    assert failure.worker == (1, 0)
    assert (failure.details["kind"], failure.details["operation"]) == ("kill", "F(0, 0)@0")
    moments = [failure.seconds, resumed.seconds, regrouped.seconds, recovered.seconds]
    assert all(moment is not None for moment in moments)
    assert 0 < moments[0] < moments[1] <= moments[2] < moments[3] < PATIENCE  # type: ignore[operator]
    assert recovered.time - announced == pytest.approx(recovered.seconds, abs=0.01)
    assert resumed.details["roster"] == regrouped.details["roster"] == (0, 1, 3)
    assert third.seconds == pytest.approx(third.time - second.time, abs=0.01)


def test_plans_are_made_for_the_failed_workers_and_the_measured_times(plane: ControlPlane) -> None:
    members = plane.members()
    together(*(member.step for member in members))
    plane.until(lambda: plane.events("step"))
    die(plane, members[0])
    together(*(member.step for member in members[1:]))
    assert plane.planner.asked == [(frozenset(), {}), (frozenset({Worker(0, 0)}), {0: {"F": 0.5}, 1: {"F": 0.5}})]


def test_plans_are_made_ahead_at_the_start_and_again_once_the_times_are_known(plane: ControlPlane) -> None:
    members = plane.members()
    for _ in range(5):
        together(*(member.step for member in members))
    plane.until(lambda: len(plane.events("step")) == 5)
    assert plane.planner.ahead == [frozenset(), frozenset()]


def test_what_a_worker_publishes_reaches_the_others_of_its_generation(plane: ControlPlane) -> None:
    members = plane.members()
    members[2].client.publish("address", b"of 2")
    assert together(*(partial(m.client.lookup, "address", threading.Event()) for m in members)) == [b"of 2"] * 4


def test_waiting_for_what_nobody_publishes_is_interrupted_by_a_loss(plane: ControlPlane) -> None:
    members = plane.members()
    waiting = in_thread(members[0].client.lookup, "address", threading.Event())
    die(plane, members[3])
    with pytest.raises(Interrupted):
        waiting.result(PATIENCE)


def test_the_mean_loss_of_a_step_is_known_to_all_when_all_its_parts_are(plane: ControlPlane) -> None:
    members = plane.members()
    waiting = [in_thread(member.client.await_loss, 0) for member in members]
    members[1].client.send(Losses(1, 0, {0: 1.0}))
    members[3].client.send(Losses(3, 0, {1: 4.0}))
    assert [future.result(PATIENCE).loss for future in waiting] == [2.5] * 4


def test_closing_before_the_start_is_harmless() -> None:
    plane = ControlPlane()
    plane.close()
