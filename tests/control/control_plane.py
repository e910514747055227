"""A coordinator and what a test gives it: fake processes, a fake planner, clients in threads."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any

from control_worker import Member
from support.scripts import COORDINATOR
from support.thread_client import ThreadClient
from support.waiting import PATIENCE, next_line

from lightning_recycle.control.client import pack
from lightning_recycle.control.coordinator.coordinator import Coordinator
from lightning_recycle.control.monitoring.history import Event
from lightning_recycle.control.network.addresses_and_keys import address_from
from lightning_recycle.control.network.connection import MessageConnection, connect
from lightning_recycle.control.options import CoordinatorOptions, HeartbeatTimeouts, RecoveryOptions
from lightning_recycle.control.plans.assumptions import Assumptions
from lightning_recycle.control.plans.plan_provider import PlanningQueue
from lightning_recycle.control.protocol.messages import Activity, Heartbeat
from lightning_recycle.planning.costs import Costs
from lightning_recycle.planning.grid import Grid, Worker
from lightning_recycle.planning.heuristic_planner import HeuristicPlanner
from lightning_recycle.planning.planner import PlanningOptions
from lightning_recycle.planning.problem import Problem
from lightning_recycle.planning.schedule import Schedule

TIMEOUT = 15.0  # seconds, of coordinators
SILENCE = 1.0  # heartbeat timeout of these tests
KEY = "the key of this test"
GRID = Grid(2, 2, 1)  # ranks 0 and 2 are stage 0, ranks 1 and 3 stage 1


class FakeProcess:
    """What the coordinator watches instead of a process."""

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


def fake_schedule(failed: frozenset[Worker] = frozenset(), grid: Grid = GRID) -> Schedule:
    """A schedule in which nobody does anything."""
    workers = {worker: () for worker in grid.workers() if worker not in failed}
    return Schedule(Problem(grid, Costs.uniform(grid.stages), failed), workers, 1.0)


class Untimed(Assumptions):
    """Leaves schedules alone, in which nobody does anything."""

    def retime(self, schedule: Schedule, seconds: Any) -> Schedule:
        return schedule


class FakePlanner:
    """Gives the coordinator schedules; remembers the requests."""

    source = "made"

    def __init__(self, grid: Grid = GRID) -> None:
        self.grid = grid
        self.background = PlanningQueue()
        self.planner = HeuristicPlanner()
        self.assumptions = Untimed(grid, PlanningOptions(), None, False)
        self.asked: list[tuple[frozenset[Worker], dict[int, dict[str, float]]]] = []
        self.ahead: list[frozenset[Worker]] = []
        self.error: Exception | None = None

    def request_plan(self, failed: frozenset[Worker], seconds: Any) -> bool:
        return True

    def plan(self, failed: frozenset[Worker], seconds: Mapping[int, Mapping[str, float]]) -> Schedule:
        if self.error is not None:
            raise self.error
        self.asked.append((failed, {stage: dict(times) for stage, times in seconds.items()}))
        return fake_schedule(failed, self.grid)

    def plan_ahead(self, failed: frozenset[Worker], seconds: Any, running: Schedule | None = None) -> None:
        self.ahead.append(failed)

    def choice(self, problem: Problem) -> None:
        return None

    def close(self) -> None:
        self.background.close()


class ControlPlane:
    """A coordinator with the workers that a test gives it."""

    def __init__(
        self, grid: Grid = GRID, planner: Any = None, of_position: int = 1, grows: bool = False, **options: Any
    ) -> None:
        self.processes = {rank: FakeProcess() for rank in range(grid.num_workers * of_position)}
        self.planner = FakePlanner(grid) if planner is None else planner
        all_options: Any = CoordinatorOptions(
            **{
                "heartbeat": HeartbeatTimeouts(TIMEOUT),
                "report_timeout": TIMEOUT,
                "grace": 0.1,
                "recovery": RecoveryOptions(rebalance="never", start_timeout=TIMEOUT),
                **options,
            }
        )
        setup = pack("for who is started by hand")
        start: Any = self._start_worker if all_options.recovery.max_restarts or grows else None
        self.coordinator = Coordinator(
            grid, self.planner, all_options, start_worker=start, setup=setup, members=of_position, grows=grows
        )
        self.columns = grid.stages * of_position
        self.started: list[tuple[int, int]] = []
        self.replacements: list[FakeProcess] = []
        self.grid = grid
        self.clients: list[ThreadClient] = []
        self.raw: list[MessageConnection] = []
        self._closed = False

    def start(self) -> None:
        self.coordinator.start(self.processes)

    def __enter__(self) -> ControlPlane:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start_worker(self, rank: int, incarnation: int) -> FakeProcess:
        self.started.append((rank, incarnation))
        self.replacements.append(FakeProcess())
        return self.replacements[-1]

    def client(self, rank: int | None, joining: bool = False, node: str = "") -> ThreadClient:
        client = ThreadClient(rank, self.coordinator.address, self.coordinator.authkey, 0.05, joining, node=node)
        self.clients.append(client)
        return client

    def members(self, *ranks: int) -> list[Member]:
        """Members that have joined; all ranks of the grid by default."""
        members = [Member(self.client(rank), self.columns) for rank in ranks or self.processes]
        together(*(member.join for member in members))
        return members

    def connection(self) -> MessageConnection:
        """A connection that has the key and sends what the test sends."""
        connection = connect(self.coordinator.address, self.coordinator.authkey)
        self.raw.append(connection)
        return connection

    def events(self, kind: str) -> list[Event]:
        return [event for event in self.coordinator.history if event.kind == kind]

    def until(self, condition: Callable[[], Any], seconds: float = PATIENCE) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"waited without success; history: {self.coordinator.history}"
            time.sleep(0.005)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for client in self.clients:
            client.leave()
        self.coordinator.close()
        for client in self.clients:
            assert client.exited.wait(PATIENCE), "its receiver thread must not read from descriptors of the next test"
        for connection in self.raw:
            connection.close()
        for process in (*self.processes.values(), *self.replacements):
            process.close()


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
    """Runs each function in a thread; returns the results."""
    futures = [in_thread(function) for function in functions]
    return [future.result(PATIENCE) for future in futures]


def die(plane: ControlPlane, member: Member, cause: str = "it was killed by SIGKILL") -> None:
    """Ends a member like a process: its connection is closed and its sentinel fires."""
    member.client.leave()
    plane.processes[member.client.rank].die(cause)


def beat(connection: MessageConnection | ThreadClient, rank: int) -> None:
    connection.send(Heartbeat(rank, -1, Activity(0, "start")))


def standalone(listen: str, *options: str, **streams: Any) -> subprocess.Popen[str]:
    """``recycle-coordinator`` in a process of its own."""
    command = [*COORDINATOR, "--listen", listen, *options]
    env = {**os.environ, "RECYCLE_KEY": KEY}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True, **streams)


@contextlib.contextmanager
def listening(*options: str, listen: str = "127.0.0.1:0") -> Iterator[tuple[subprocess.Popen[str], tuple[str, int]]]:
    """``recycle-coordinator``, and its address."""
    process = standalone(listen, *options)
    try:
        yield process, address_from(next_line(process).split()[-1], "address")
    finally:
        process.kill()
        process.communicate()
