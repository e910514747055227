"""The control plane with many workers: how long they take to start, to commit a step, to agree after a failure.

    python benchmarks/control_plane.py                    # 64, 250, 500, 1000 and 2000 workers
    python benchmarks/control_plane.py --workers 500 --profile

The workers are fake: they speak the protocol over real sockets to the real coordinator, in a few processes of many
workers each, and compute nothing. So the time of the workers' own side is not that of a real run, in which each has a
processor; what counts is the coordinator's processor time, which is given beside each duration. The phases:

- start: from the first connection until the last worker knows that all are connected;
- step: mean of some steps, from the first loss until all have applied the last one;
- agree: one worker is killed; until the last of the others has its part of the new generation's plan (Resume);
- connect: until all others have told that they are connected (they asked for their neighbours' addresses).
"""

from __future__ import annotations

import argparse
import cProfile
import multiprocessing
import os
import pstats
import selectors
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from lightning_recycle.control.coordinator.coordinator import Coordinator, CoordinatorOptions
from lightning_recycle.control.coordinator.standalone import allow_descriptors
from lightning_recycle.control.network.connection import MessageConnection, connect
from lightning_recycle.control.options import HeartbeatTimeouts, RecoveryOptions
from lightning_recycle.control.plans.plan_provider import PlanProvider
from lightning_recycle.control.protocol import messages
from lightning_recycle.control.protocol.member import Member
from lightning_recycle.control.protocol.messages import WorkerStatus
from lightning_recycle.planning.grid import Grid
from lightning_recycle.planning.planner import PlanningOptions

_STAGES = 8
_MICROBATCHES = 2
_PROCESSES = 4
_STEPS = 5
_PATIENCE = 300.0  # seconds for any phase
_BEAT_SECONDS = 10.0  # where a phase takes long because the machine is busy, heartbeats would be most of it
_ADDRESS = b"192.168.100.100 54321"
_KEY = b"the key of a benchmark"


@dataclass
class FakeWorker:
    """What an executor says to the coordinator, without a model."""

    grid: Grid
    connection: MessageConnection
    member: Member = field(init=False)
    version: int = 0
    connected: int = -1  # the newest generation whose neighbours it knows
    steps: int = 0  # how many it is to run in all
    wanted: list[str] = field(default_factory=list)  # the keys of those that it connects with

    def __post_init__(self) -> None:
        self.member = Member(-1)
        self.say(messages.Hello(None, messages.Process("", os.getpid(), node=f"of process {os.getpid()}")))

    @property
    def rank(self) -> int:
        return self.member.rank

    @property
    def stage(self) -> int:
        return self.grid.worker(self.rank).stage

    def say(self, message: Any) -> None:
        self.connection.send(message)

    def beat(self) -> None:
        activity = messages.Activity(self.version, "waits", "steps")
        self.say(messages.Heartbeat(self.rank, self.member.generation, activity, 0.0, self.member.begun))

    def hear(self, message: Any) -> None:
        for reply in self.member.receive(message):
            self.say(reply)
        match message:
            case messages.Regroup():
                self.member.enter()
                status, member = WorkerStatus(self.stage, self.version, False), self.member
                self.say(messages.Report(self.rank, member.generation, status, None, member.begun))
            case messages.Resume():
                self.find_others(message)
            case messages.Found():
                self.end_connecting()
            case messages.StepLoss():
                self.apply(message.step)

    def find_others(self, resume: messages.Resume) -> None:
        """What a worker that connects says: where it is, and whom it wants to reach."""
        assert resume.program is not None
        peers = (rank for rank in resume.roster if rank % self.grid.stages == self.stage)
        self.wanted = [f"gate{rank}" for rank in {*peers, *resume.program.neighbours} - {self.rank}]
        self.say(self.member.publish(f"gate{self.rank}", _ADDRESS))
        if (question := self.member.look_up(self.wanted)) is not None:
            self.say(question)

    def end_connecting(self) -> None:
        if self.connected < self.member.generation and all(map(self.member.published_value, self.wanted)):
            self.connected = self.member.generation
            self.say(messages.Reached(self.rank, self.connected, messages.Milestone.CONNECTED))
            self.begin_step()

    def begin_step(self) -> None:
        """Begins the next step, if there is to be one: those of the last stage tell their losses."""
        if self.version >= self.steps or self.connected < self.member.generation:
            return
        answer = self.member.begin(self.version)
        for reply in answer.replies:
            self.say(reply)
        if answer.pause is None and self.stage == self.grid.stages - 1:
            first = self.grid.worker(self.rank).pipeline * self.grid.microbatches
            indices = range(first, first + self.grid.microbatches)
            if self.rank == min(r for r in self.member.roster if r % self.grid.stages == self.stage):
                indices = range(self.grid.global_microbatches)  # also those of lost pipelines
            self.say(messages.Losses(self.rank, self.version, dict.fromkeys(indices, 1.0)))

    def apply(self, step: int) -> None:
        if step != self.version:
            return
        self.version += 1
        seconds = {"F": 0.1, "B": 0.1, "W": 0.1, "REDUCE": 0.1, "STEP": 0.1}
        facts = messages.Facts({"global_step": self.version, "epoch": 0}, {"digest": 5})
        self.say(messages.Applied(self.rank, step, seconds, seconds, facts))
        self.begin_step()


def _serve(grid: Grid, count: int, address: tuple[str, int], commands: Connection) -> None:
    """``count`` workers in one process, which does what it is told: ``steps`` to run, or who is ``kill``ed."""
    commands.send({})  # what it imports is imported
    commands.recv()
    with selectors.DefaultSelector() as selector:
        selector.register(commands, selectors.EVENT_READ, None)
        workers: dict[int, FakeWorker] = {}
        waiting = list(range(count))
        next_beat = time.monotonic() + _BEAT_SECONDS
        reported: dict[str, Any] = {}
        resumed_at = 0.0
        while True:
            if waiting:  # one after the other, and meanwhile those before it live
                number = waiting.pop(0)
                workers[number] = FakeWorker(grid, connect(address, _KEY, timeout=_PATIENCE))
                selector.register(workers[number].connection, selectors.EVENT_READ, number)
            for key, _ in selector.select(0.0 if waiting else 0.05):
                if key.data is None:
                    kind, value = commands.recv()
                    if kind == "end":
                        return
                    if kind == "steps":
                        for worker in workers.values():
                            worker.steps = value
                            worker.begin_step()
                    else:
                        for number in [n for n, worker in workers.items() if worker.rank == value]:
                            selector.unregister(workers[number].connection)
                            workers.pop(number).connection.close()
                    continue
                worker = workers[key.data]
                try:
                    message = worker.connection.receive()
                    while message is not None:
                        if isinstance(message, messages.Resume):
                            resumed_at = time.monotonic()
                        worker.hear(message)
                        message = worker.connection.inbox.take()
                except (EOFError, OSError):
                    return
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + _BEAT_SECONDS
                for worker in workers.values():
                    worker.beat()
            state = {
                "connected": min((w.connected for w in workers.values()), default=99) if not waiting else -1,
                "version": min((w.version for w in workers.values()), default=10**9),
                "resumed": min((_resumed(w) for w in workers.values()), default=99),
                "resumed_at": resumed_at,
            }
            if state != reported:
                reported = state
                commands.send(state)


def _resumed(worker: FakeWorker) -> int:
    return worker.member.generation if worker.member.resume_message() is not None else -1


class _Crowd:
    """The processes of all fake workers."""

    def __init__(self, grid: Grid, address: tuple[str, int]) -> None:
        context = multiprocessing.get_context("spawn")
        self._states: dict[int, Mapping[str, Any]] = {}
        self._pipes = []
        self._processes = []
        for number in range(_PROCESSES):
            mine, theirs = context.Pipe()
            count = len(range(number, grid.num_workers, _PROCESSES))
            process = context.Process(target=_serve, args=(grid, count, address, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)
        for pipe in self._pipes:
            pipe.recv()

    def tell(self, kind: str, value: Any = None) -> None:
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.send((kind, value))

    def until(self, what: str, value: int) -> float:
        """Waits until all have ``what`` of at least ``value``; returns when the last one had its Resume."""
        deadline = time.monotonic() + _PATIENCE
        while any(self._states.get(n, {}).get(what, -1) < value for n in range(_PROCESSES)):
            for number, pipe in enumerate(self._pipes):
                while pipe.poll():
                    self._states[number] = pipe.recv()
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {what} {value} within {_PATIENCE:g} s: {self._states}")
            time.sleep(0.005)
        return max(float(state["resumed_at"]) for state in self._states.values())

    def close(self) -> None:
        self.tell("end")
        for process in self._processes:
            process.join(10.0)


def measure(workers: int, profile: bool) -> dict[str, tuple[float, float]]:
    """Phase -> (seconds that passed, seconds of the coordinator's processor time)."""
    grid = Grid(workers // _STAGES, _STAGES, _MICROBATCHES)
    planner = PlanProvider(grid, PlanningOptions(split_backward=True))
    planner.prepare()
    victim = grid.num_workers // 2 + 1
    planner.plan(frozenset({grid.worker(victim)}), {})  # as if made ahead
    timeouts = HeartbeatTimeouts(_PATIENCE, _PATIENCE)
    recovery = RecoveryOptions(rebalance="never", start_timeout=_PATIENCE)
    coordinator = Coordinator(
        grid,
        planner,
        CoordinatorOptions(timeouts, report_timeout=_PATIENCE, recovery=recovery),
        authkey=_KEY,
    )
    profiler = cProfile.Profile()
    if profile:
        serve = coordinator._serve
        coordinator._thread._target = lambda: profiler.runcall(serve)  # type: ignore[attr-defined]
    coordinator._plans.plan_ahead = lambda: None  # type: ignore[method-assign] # takes processor time, not messages
    coordinator.start({})
    found: dict[str, tuple[float, float]] = {}
    crowd = _Crowd(grid, coordinator.address)
    try:
        began, used = time.monotonic(), time.process_time()
        crowd.tell("begin")

        def phase(name: str, end: float | None = None, parts: int = 1) -> None:
            now = time.monotonic() if end is None else end
            found[name] = ((now - began) / parts, (time.process_time() - used) / parts)

        crowd.until("connected", 0)
        phase("start")
        began, used = time.monotonic(), time.process_time()
        crowd.tell("steps", _STEPS)
        crowd.until("version", _STEPS)
        phase("step", parts=_STEPS)
        time.sleep(0.5)
        began, used = time.monotonic(), time.process_time()
        crowd.tell("kill", victim)
        phase("agree", crowd.until("resumed", 1))
        crowd.until("connected", 1)
        phase("connect")
    finally:
        coordinator.stop()  # from now on nobody is lost
        crowd.close()
        coordinator.close()
    if profile:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(25)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[64, 250, 500, 1000, 2000])
    parser.add_argument("--profile", action="store_true", help="also print where the coordinator's time goes")
    options = parser.parse_args()
    allow_descriptors(2 * max(options.workers) + 256)
    print(f"{os.cpu_count()} processors; seconds that passed (seconds of the coordinator's processor time)")
    print(f"{'workers':>8}" + "".join(f"{name:>22}" for name in ("start", "step", "agree", "connect")))
    for workers in options.workers:
        found = measure(workers, options.profile)
        print(f"{workers:>8}" + "".join(f"{f'{a:.3f} ({b:.3f})':>22}" for a, b in found.values()), flush=True)


if __name__ == "__main__":
    main()
