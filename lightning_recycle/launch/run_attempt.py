"""Attempt of a run: the workers of a grid and their coordinator, start to end.

A run has one attempt, and another one after each loss of a stage that it is restarted from.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lightning_recycle.callbacks import PlanMonitor
from lightning_recycle.control.client import pack
from lightning_recycle.control.coordinator.coordinator import Coordinator
from lightning_recycle.control.monitoring.history import Event
from lightning_recycle.control.monitoring.monitor import Monitor, served
from lightning_recycle.control.network import addresses
from lightning_recycle.control.network.keys import key_from_environment
from lightning_recycle.control.options import CoordinatorOptions, WorkerProcess, other_device
from lightning_recycle.control.plans.plan_provider import PlanProvider
from lightning_recycle.control.protocol.state import Crashed, Failed, Finished, Outcome, StageLost
from lightning_recycle.devices import ray_resource
from lightning_recycle.launch.ray_workers import RayWorkerGroup, free_slots, needs_of_worker
from lightning_recycle.launch.run_preparation import PreparedRun
from lightning_recycle.launch.worker_group import LocalWorkerGroup, WorkerGroup
from lightning_recycle.launch.worker_payload import Settings
from lightning_recycle.launch.worker_process import WorkerStart, worker_main
from lightning_recycle.planning.costs import Profile, save_profile
from lightning_recycle.planning.grid import Positions, Worker
from lightning_recycle.planning.plan_library import PlanLibrary
from lightning_recycle.planning.schedule import Schedule
from lightning_recycle.session.configuration import WorkerIdentity

log = logging.getLogger(__name__)

_HOST = "127.0.0.1"
_ALL_INTERFACES = {"0.0.0.0": _HOST, "::": "::1"}  # where workers of this machine reach a listener at all of them
INCARNATIONS_PER_START = 1_000_000
"""Above any attempt's incarnations of a position, so they identify the attempt."""

_LOOK_SECONDS = 0.1  # between two looks whether a signal has come
_EXIT_SECONDS = 10.0  # for a worker to leave after the run, before it is killed


class EndSignals:
    """SIGTERM and Ctrl-C end a run within the block, like exceptions.

    In the main thread only. ``gracefully`` (also for SIGUSR1), the first signal is only ``received``, and the main
    thread acts upon it; a second one ends the run at once. Ctrl-C is left alone if it is ignored, as in a background
    job, or has a handler of the user's.
    """

    def __init__(self, gracefully: bool) -> None:
        self.gracefully = gracefully
        self.received: signal.Signals | None = None
        self._shielded = False
        self._before: dict[signal.Signals, Any] = {}

    def error(self) -> BaseException:
        """KeyboardInterrupt, or SystemExit with 128 + the signal's number."""
        assert self.received is not None
        return KeyboardInterrupt() if self.received == signal.SIGINT else SystemExit(128 + self.received)

    @contextlib.contextmanager
    def shielded(self) -> Iterator[None]:
        """Within the block, a cleanup of seconds at most, signals are only recorded."""
        self._shielded = True
        try:
            yield
        finally:
            self._shielded = False

    def _receive(self, signum: int, frame: Any) -> None:
        first = self.received is None
        if first:
            self.received = signal.Signals(signum)
        if not self._shielded and not (first and self.gracefully):
            raise self.error()

    def __enter__(self) -> EndSignals:
        if threading.current_thread() is threading.main_thread():
            wanted = [signal.SIGTERM]
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                wanted.append(signal.SIGINT)
            if self.gracefully:
                wanted.append(signal.SIGUSR1)
            self._before = {signum: signal.signal(signum, self._receive) for signum in wanted}
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)


class RunAttempt:
    """One attempt of a run; ``history`` and ``schedules`` are there once it has ended."""

    def __init__(self, run: PreparedRun, number: int, signals: EndSignals) -> None:
        self.history: list[Event] = []
        self.schedules: list[Schedule] = []
        self._run, self._number, self._signals = run, number, signals
        self._profile_path, self._profile = run.find_profile()
        self._setup = replace(run.setup, profiles=self._profile_path is not None and self._profile is None)
        self._group: WorkerGroup
        self._coordinator: Coordinator

    def run(self) -> Outcome | None:
        """Runs the workers to their end; None if a signal ended them without checkpoint."""
        options = self._run.options
        planner = self._planner()
        planner.prepare()
        monitor = Monitor(Path(sys.argv[0]).name, self._run.samples_per_step)
        shows, http = _shown_at(options.monitoring.status)
        with (
            served(monitor, http, shows),
            self._make_group() as group,
        ):
            self._group = group
            self._coordinator = self._make_coordinator(planner)
            outcome: Outcome | None = None
            try:
                self._coordinator.start(self._start_workers())
                group.attend(self._coordinator)
                monitor.show(self._coordinator.view)
                outcome = self._await_end()
            finally:
                with self._signals.shielded():
                    monitor.show(None)
                    self._end(outcome)
        path, measures = self._profile_path, self._setup.profiles and self._run.call.fits
        if measures and isinstance(outcome, Finished) and path is not None and not path.exists():
            log.warning("No profile was measured for %s: the run ended before its ninth step.", path)
        if self._signals.received is not None and not self._signals.gracefully:
            raise self._signals.error()  # it came while this run was being cleaned up
        return outcome

    def _planner(self) -> PlanProvider:
        planning = self._run.options.planning
        folder = planning.plan_library
        return PlanProvider(
            self._setup.grid,
            replace(planning, staggered=self._setup.staggered),
            costs=None if self._profile is None else self._profile.costs(),
            library=None if folder is None else PlanLibrary(folder, planning.planner),
            chooses_split=self._run.call.fits,
        )

    def _coordinator_options(self) -> CoordinatorOptions:
        options, fits = self._run.options, self._run.call.fits
        recovery = options.recovery if fits else options.recovery.without_changes()
        if options.members > 1:
            recovery = replace(recovery, rebalance="never")  # layers of several processes stay where they are
        return CoordinatorOptions(  # without training there are no step boundaries to enter at
            heartbeat=self._run.heartbeat.timeouts,
            recovery=recovery,
            verification=options.verification,
            drift=PlanMonitor.options_of(self._run.call.trainer) if fits else None,
        )

    def _make_group(self) -> WorkerGroup:
        """The worker group on the engine of the run.

        Raises ConfigurationError if the Trainer cannot be pickled, or the engine is not installed; WorkerStartError if
        there is no room for the workers in time.
        """
        options, payload = self._run.options, (self._run.call, Settings.capture())
        if options.ray is not None:
            positions, timeout = self._setup.positions, options.recovery.start_timeout
            least = options.recovery.least(positions.grid.pipelines)
            return RayWorkerGroup(worker_main, payload, positions, _needs(self._run), timeout, least)
        return LocalWorkerGroup(worker_main, payload)

    def _make_coordinator(self, planner: PlanProvider) -> Coordinator:
        listens = self._setup.outsiders
        host, port = self._group.host, 0
        if listens:
            host, port = addresses.address_from(os.environ["RECYCLE_LISTEN"], "RECYCLE_LISTEN")
        return Coordinator(
            self._setup.grid,
            planner,
            self._coordinator_options(),
            host=host,
            port=port,
            authkey=key_from_environment(needed_by="RECYCLE_LISTEN") if listens else None,
            on_profile=partial(_write_profile, self._profile_path),
            start_worker=self._start_worker,
            setup=pack(self._setup),
            members=self._setup.positions.members,
            grows=self._run.options.is_remote,
            objection=lambda hello: other_device(self._run.call.trainer.strategy.root_device.type, hello.wants),
        )

    def _start_workers(self) -> dict[int, WorkerProcess]:
        count = self._setup.positions.num_workers
        if not self._run.options.is_remote:
            count = min(count, self._run.num_devices)
        started = {rank: self._start_worker(rank, 0, joining=False) for rank in range(count)}
        return {rank: process for rank, process in started.items() if rank not in self._group.without_room}

    def _start_worker(self, rank: int, incarnation: int, joining: bool = True) -> WorkerProcess:
        """Starts the worker of position ``rank``."""
        incarnation += self._number * INCARNATIONS_PER_START  # what happened to a position once has happened
        address = self._coordinator.address
        if self._setup.outsiders and address[0] in _ALL_INTERFACES:
            host = _ALL_INTERFACES[address[0]] if self._group.host == _HOST else self._group.host
            address = (host, address[1])
        place = WorkerIdentity(rank, incarnation, _device_of(rank, self._setup.positions))
        start = WorkerStart(place, joining, self._setup, address, self._coordinator.authkey, self._group.payload)
        return self._group.start(start, f"recycle-worker-{rank}")

    def _await_end(self) -> Outcome | None:
        """Outcome of the run; None if a signal's checkpoint is not complete in time."""
        # A graceful handler only leaves a note. The handler of a signal that comes just before a wait runs after it, so
        # no wait is long.
        while not self._signals.gracefully or self._signals.received is None:
            outcome = self._coordinator.wait(_LOOK_SECONDS)
            if outcome is not None:
                return outcome
        self._coordinator.end_at_boundary()
        return self._coordinator.wait(self._run.options.checkpoints.signal_timeout)

    def _end(self, outcome: Outcome | None) -> None:
        if isinstance(outcome, Finished):
            self._group.end(self._coordinator.member_processes(), _EXIT_SECONDS)
        else:
            self._coordinator.stop()  # before the workers are killed: these are no failures
            completes = isinstance(outcome, StageLost | Crashed | Failed)  # others are told to stop at once
            writers = self._coordinator.writer_processes() if completes else []
            self._group.end(writers, self._run.options.checkpoints.signal_timeout)
        self._coordinator.close()
        self.history, self.schedules = list(self._coordinator.history), list(self._coordinator.schedules)


def devices_left(run: PreparedRun) -> int:
    """Number of workers of ``run`` that can be started when none are left."""
    if run.options.ray is not None:
        positions = run.setup.positions
        needs = {name: positions.members * amount for name, amount in _needs(run).items()}
        return positions.members * free_slots(needs, positions.grid.num_workers)
    return run.num_devices


def _device_of(rank: int, positions: Positions) -> int:
    """The index of the device of position ``rank``.

    The leader has the first: code means one process by ``local_rank == 0`` and ``is_global_zero``.
    """
    leader = positions.rank(Worker(0, positions.grid.stages - 1))
    return {0: leader, leader: 0}.get(rank, rank)


def _needs(run: PreparedRun) -> dict[str, float]:
    given = None if run.options.ray is None else run.options.ray.resources_per_worker
    return needs_of_worker(ray_resource(run.call.trainer.strategy.root_device), given)


def _shown_at(status: bool | int | str) -> tuple[bool, tuple[str, int] | None]:
    """Whether the run is shown on this machine, and its address for others."""
    if not isinstance(status, bool):
        return True, addresses.http_address(str(status), "MonitoringOptions(status)")
    return status, addresses.http_address_from_environment() if status else None


def _write_profile(path: Path | None, profile: Profile) -> None:
    assert path is not None, "only runs with a place for it measure a profile"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_profile(path, profile)
    except OSError as error:  # the training is worth more; the next run measures again
        log.warning("The measured profile could not be written to %s: %s", path, error)
        return
    log.info("The measured profile is in %s.", path)
