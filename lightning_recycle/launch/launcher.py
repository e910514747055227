"""The launching process: a supervisor, not a rank.

It starts the workers, hosts the coordinator, waits, and takes the results. A run has one :class:`RunAttempt`, and
another one after each loss of a whole stage that it is restarted from, with the newest checkpoint. A process with
``RECYCLE_COORDINATOR`` in its environment becomes a worker of that run.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info

from lightning_recycle.arguments import unknown_variables
from lightning_recycle.callbacks import PlanMonitor
from lightning_recycle.control.client import pack
from lightning_recycle.control.coordinator.coordinator import Coordinator
from lightning_recycle.control.monitoring.history import Event, summary
from lightning_recycle.control.monitoring.logs import install_if_wanted
from lightning_recycle.control.monitoring.monitor import Monitor, served
from lightning_recycle.control.network import addresses_and_keys as addresses
from lightning_recycle.control.network.addresses_and_keys import key_from_environment
from lightning_recycle.control.options import CoordinatorOptions, WorkerProcess, other_device
from lightning_recycle.control.plans.plan_provider import PlanProvider
from lightning_recycle.control.protocol.messages import Crash
from lightning_recycle.control.protocol.state import Crashed, Ended, Failed, Finished, Outcome, StageLost
from lightning_recycle.devices import ray_resource
from lightning_recycle.engines.worker_environment import check_copies, check_workers_environment, discover
from lightning_recycle.errors import (
    ConfigurationError,
    ReCycleError,
    StageLostError,
    UnsupportedFeatureError,
    WorkerStartError,
)
from lightning_recycle.launch.ray_workers import RayWorkerGroup, free_slots, needs_of_worker
from lightning_recycle.launch.resume_and_restart import (
    RestartPolicy,
    choose_last,
    folders_of_saves,
    newest_saved,
    settle_checkpoint,
)
from lightning_recycle.launch.run_preparation import ConfiguredStrategy, PreparedRun, TrainerCall, prepare
from lightning_recycle.launch.run_results import WHY_NO_WEIGHTS, MissingWeightsGuard, take_results
from lightning_recycle.launch.worker_group import LocalWorkerGroup, WorkerGroup
from lightning_recycle.launch.worker_payload import Settings, ignore_deprecations_of_lightning, is_internal
from lightning_recycle.launch.worker_process import WorkerStart, run_outside, worker_main
from lightning_recycle.pickling import exit_if_importing
from lightning_recycle.planning.costs import Profile, save_profile
from lightning_recycle.planning.grid import Positions, Worker
from lightning_recycle.planning.plan_library import PlanLibrary
from lightning_recycle.planning.schedule import Schedule
from lightning_recycle.processes import name_process
from lightning_recycle.session.configuration import WorkerIdentity
from lightning_recycle.session.lightning_internals import mark_saved, saves_on_exception
from lightning_recycle.session.reporting import show_cursor

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
        with patch.object(self, "_shielded", True):
            yield

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
    """One attempt of a run; adds to ``history`` and ``schedules`` when it has ended."""

    def __init__(
        self, run: PreparedRun, number: int, signals: EndSignals, history: list[Event], schedules: list[Schedule]
    ) -> None:
        self._run, self._number, self._signals = run, number, signals
        self._history, self._schedules = history, schedules
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
        status = options.monitoring.status
        setting = "RECYCLE_HTTP" if status is True else f"MonitoringOptions({status=})"
        with served(monitor, *_shown_at(status), setting), self._make_group() as group:
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
        self._history += self._coordinator.history
        self._schedules += self._coordinator.schedules


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


def _shown_at(status: bool | int | str) -> tuple[tuple[str, int] | None, bool]:
    """The run's address for others, and whether it is shown on this machine."""
    if not isinstance(status, bool):
        return addresses.http_address(str(status), "MonitoringOptions(status)"), True
    return addresses.http_address_from_environment() if status else None, status


def _write_profile(path: Path | None, profile: Profile) -> None:
    assert path is not None, "only runs with a place for it measure a profile"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_profile(path, profile)
    except OSError as error:  # the training is worth more; the next run measures again
        log.warning("The measured profile could not be written to %s: %s", path, error)
        return
    log.info("The measured profile is in %s.", path)


class SupervisorLauncher:
    """Runs a Trainer function in worker processes and takes its results.

    ``history`` and ``schedules`` (by generation) are those of the newest ``fit``; before the first, of the newest run.
    """

    def __init__(self, strategy: ConfiguredStrategy) -> None:
        self.history: list[Event] = []
        self.schedules: list[Schedule] = []
        self._strategy = strategy
        self._interrupted = False
        self._said_how_it_ended = False
        self._has_run = False
        self._has_fitted = False
        self._missing_weights: MissingWeightsGuard | None = None

    @property
    def is_interactive_compatible(self) -> bool:
        return True  # workers are no forks of this process, and get what the notebook defines by value

    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        """Runs ``function``, a bound method of ``trainer``, in every worker.

        Raises:
            StageLostError: when all replicas of a stage died.
            ConfigurationError: for errors that show before anything starts.
            CheckpointError: if the checkpoint to resume from is damaged.
            Exception: the user's own exception from a worker, with that worker's traceback.
        """
        assert trainer is not None
        install_if_wanted()
        ignore_deprecations_of_lightning()
        exit_if_importing()
        outside = discover()
        if outside is None:
            check_copies()
            check_workers_environment()
            for warning in [] if self._has_run else unknown_variables():
                log.warning("%s", warning)
        else:
            name_process("recycle worker")  # for a recycle-run, too: it takes Ctrl-C from now on
        self._interrupted, self._said_how_it_ended = True, False
        call = TrainerCall(trainer, function, args, kwargs)
        if self._missing_weights is not None:
            self._missing_weights.check(trainer.lightning_module, call.arguments.get("ckpt_path"))
        run = prepare(call, self._strategy, outside, self._has_run)
        if outside is None:
            return self._supervise(run)
        returned = run_outside(outside, replace(run, call=choose_last(run.call)))
        self._interrupted = False
        self._note_missing_weights(trainer, is_one_stage=True)
        return returned

    def _supervise(self, run: PreparedRun) -> Any:
        """Runs the function in workers that this process starts; returns its result.

        Keeps the records of the newest ``fit`` over other runs. After an error nothing is saved here: the state was in
        workers.
        """
        run = replace(run, call=settle_checkpoint(run.call))
        trainer, fits = run.call.trainer, run.call.fits
        self._has_fitted |= fits
        fit_records = self.history, self.schedules
        self.history, self.schedules = [], []
        savers = fits and any(map(saves_on_exception, trainer.checkpoint_callbacks))
        if fits:
            self._strategy.optimizers, self._strategy.lr_scheduler_configs = [], []  # of an earlier fit
        saves = savers or (fits and bool(run.options.checkpoints.save_on_signal))
        try:
            with EndSignals(gracefully=saves) as signals, _folder_for_results() as folder:
                setup = replace(run.setup, gathering=replace(run.setup.gathering, folder=folder))
                return self._launch(replace(run, setup=setup), signals)
        except BaseException:
            show_cursor(trainer)
            if savers and signals.received is None:
                log.warning(
                    "No checkpoint is written for this error: the state was in the workers, and they have"
                    " ended. ModelCheckpoint(every_n_train_steps=...) writes while they live."
                )
            mark_saved(trainer)
            run.call.attach_data()  # a data module has on_exception, too
            raise
        finally:
            if self._has_fitted and not fits:
                self.history, self.schedules = fit_records

    def _launch(self, run: PreparedRun, signals: EndSignals) -> Any:
        policy, restarts = RestartPolicy(run.setup.positions, run.options.recovery), run.setup.may_restart
        if restarts and run.options.recovery.on_stage_lost == "auto":
            workers = "workers of a stage" if run.setup.grid.stages > 1 else "workers"
            rank_zero_info(
                f"Should all {workers} be lost, the run starts again from its newest checkpoint;"
                " RecoveryOptions(on_stage_lost='raise') ends it instead."
            )
        for number in itertools.count():
            outcome = RunAttempt(run, number, signals, self.history, self.schedules).run()
            self._has_run = True
            if isinstance(outcome, Finished):
                return self._take_results(run, outcome, signals)
            if signals.received is not None and (outcome is None or isinstance(outcome, Ended)):
                log.warning("%s: %s", signals.received.name, self._how_it_ended(outcome))
                self._said_how_it_ended = True
                raise signals.error()
            if not isinstance(outcome, StageLost) or not restarts or signals.received is not None:
                raise error_of(outcome, run.setup.positions, self.history)
            run = self._restarted(run, policy, outcome)

    def _take_results(self, run: PreparedRun, outcome: Finished, signals: EndSignals) -> Any:
        self._interrupted = False
        returned = take_results(run.call, outcome.results)
        if run.call.fits:
            self._note_missing_weights(run.call.trainer, is_one_stage=False)
            if run.options.monitoring.run_summary:
                for line in summary(self.history, run.setup.positions):
                    rank_zero_info(line)
        if signals.received is not None:
            log.warning("%s: the run was at its end; its results are here.", signals.received.name)
            raise signals.error()
        return returned

    def _restarted(self, run: PreparedRun, policy: RestartPolicy, outcome: StageLost) -> PreparedRun:
        """The run that restarts from the newest checkpoint; StageLostError without one."""
        positions = run.setup.positions
        trainer = run.call.trainer
        folders = folders_of_saves(trainer)
        checkpoint = newest_saved(self.history, trainer.strategy.checkpoint_io, run.setup.name, folders)
        saved = max((event.step for event in self.history if event.kind == "saved"), default=0)
        lost_at = next((event.step for event in reversed(self.history) if event.kind in ("step", "resumed")), -1)
        start = policy.next_start(None if checkpoint is None else saved, devices_left(run), lost_at)
        if isinstance(start, str):
            raise error_of(outcome, positions, self.history, start)
        again = f"The run starts again from {checkpoint} with {start.workers} workers of each stage"
        log.warning("%s", error_of(outcome, positions, self.history, again))
        # weights_only: this run wrote the file itself.
        setup = replace(run.setup, grid=start.grid, weights_only=False, has_run=True, restarts=True)
        least = None if start.least == start.grid.pipelines else start.least
        recovery = replace(run.options.recovery, min_pipelines=least)
        options = replace(run.options, recovery=recovery)
        return replace(run, call=run.call.from_checkpoint(checkpoint), setup=setup, options=options)

    def _note_missing_weights(self, trainer: pl.Trainer, is_one_stage: bool) -> None:
        """Remembers, and warns, if the trained weights have stayed in the workers."""
        self._missing_weights = None
        if self._strategy.missing_weights is not None:
            self._missing_weights = MissingWeightsGuard(trainer.lightning_module, is_one_stage)
            log.warning("The model in this process is not the trained one: %s.", self._strategy.missing_weights)

    def _how_it_ended(self, outcome: Outcome | None) -> str:
        saved = [event for event in self.history if event.kind == "saved"]
        newest = next((event.step for event in reversed(self.history) if event.kind == "step"), None)
        if outcome is None:
            seconds = self._strategy.options.checkpoints.signal_timeout
            why = f"ended without a checkpoint, as none was complete within {seconds:g} s (signal_timeout)"
        else:
            why = "ended before its first step" if newest is None else f"ended after step {newest + 1}"
        if not saved:
            was_set = outcome is None or newest is None or self._strategy.options.checkpoints.save_on_signal
            remedy = "" if was_set else "; CheckpointOptions(save_on_signal=True) writes one"
            return f"the run {why}. There is no checkpoint{remedy}."
        return f"the run {why}. Its newest checkpoint, of step {saved[-1].step}, is {saved[-1].details['path']}."

    def may_save(self, checkpoint: Mapping[str, Any], path: Any) -> bool:
        """Whether this process has the weights to write ``checkpoint``.

        Raises UnsupportedFeatureError if its weights or its optimizers' states did not come home.
        """
        if self._interrupted:
            if not any(event.kind == "saved" and event.details["path"] == os.fspath(path) for event in self.history):
                log.warning("%s is not written: the run failed, and its newest weights were in the workers.", path)
            return False
        if self._strategy.missing_weights is not None:
            raise UnsupportedFeatureError(
                f"trainer.save_checkpoint({os.fspath(path)!r}) was called after fit in a process without the trained"
                f" weights: {WHY_NO_WEIGHTS}. Let a ModelCheckpoint callback write them in time (save_last=True; with"
                " save_distributed_checkpoint=True no process needs all of them), or use"
                " CheckpointOptions(gather_result=True)."
            )
        if "optimizer_states" in checkpoint and self._strategy.missing_optimizers is not None:
            raise UnsupportedFeatureError(
                f"trainer.save_checkpoint({os.fspath(path)!r}) was called in the launching process, which has the"
                f" weights but not the optimizers: {self._strategy.missing_optimizers}. Use"
                " trainer.save_checkpoint(..., weights_only=True), or a ModelCheckpoint callback."
            )
        return True

    def on_exception(self, exception: BaseException) -> None:
        """Logs the end of the run, if a signal ended this process."""
        terminated = isinstance(exception, SystemExit) and exception.code == 128 + signal.SIGTERM
        if (terminated or isinstance(exception, KeyboardInterrupt)) and not self._said_how_it_ended:
            how = self._how_it_ended(Ended())
            rank_zero_info(how[0].upper() + how[1:])

    def kill(self, signum: Any) -> None:
        """Lightning's SIGTERM handler: workers obey the coordinator, not signals."""


@contextlib.contextmanager
def _folder_for_results() -> Iterator[str | None]:
    """The path of a folder that workers make for large results, or None."""
    try:
        folder = os.path.join(tempfile.gettempdir(), f"recycle-result-{uuid.uuid4().hex}")
    except OSError:  # nothing can be written anywhere: the result comes in messages
        folder = None
    try:
        yield folder
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)  # usually it was not needed


# ---------------------------------------------------------------------- errors


def error_of(outcome: Any, positions: Positions, history: Sequence[Event], remedy: str | None = None) -> BaseException:
    """The exception for ``outcome``, with ``remedy`` for a lost stage."""
    if isinstance(outcome, StageLost):
        causes = outcome.causes_in(positions)
        if not any(event.kind in ("step", "resumed") for event in history):
            return WorkerStartError(
                f"The workers of stage {outcome.stage} ended before training began ({causes}). See their output above;"
                " a script that comes to trainer.fit() outside of its `if __name__ == '__main__':` when workers"
                " import it is a common reason."
            )
        if remedy is None:
            remedy = (
                "Start again from the newest checkpoint, as a run with a ModelCheckpoint does by itself unless"
                " RecoveryOptions(on_stage_lost='raise'), and use more pipelines (more devices, or a smaller"
                " pipeline_parallel_size) to survive more failures"
            )
        return StageLostError(
            f"All replicas of stage {outcome.stage} are lost ({causes}); its parameters"
            f" exist nowhere else. {remedy[0].upper()}{remedy[1:]}."
        )
    if isinstance(outcome, Crashed):
        return _exception_from(outcome.crash, positions)
    if isinstance(outcome, Failed):
        return ReCycleError(outcome.reason)
    return ReCycleError(f"The run ended in an unknown way: {outcome!r}.")


class WorkerTraceback(Exception):
    """A worker's traceback, shown as the cause of the same exception raised here."""

    __module__ = "builtins"  # so Python shows its name without that of a module

    def __init__(self, worker: str, text: str) -> None:
        self.text = f"In worker {worker}:\n\n{text}"

    def __str__(self) -> str:
        return self.text


def _exception_from(crash: Crash, positions: Positions) -> BaseException:
    error: BaseException | None = None
    if crash.exception is not None:
        try:
            error = pickle.loads(crash.exception)
        except Exception as reason:  # a class whose pickle does not load: only its text is left
            log.debug("The worker's exception could not be loaded: %s", reason)
    has_remedy = isinstance(error, (ConfigurationError, UnsupportedFeatureError))  # its message is enough
    if isinstance(error, SystemExit):
        worker = positions.name(crash.rank)
        if not error.code:  # this process would report success, without a result
            error = ReCycleError(
                f"Worker {worker} called sys.exit({'' if error.code is None else error.code}) before the run was over,"
                " so there is no result. To end training early, set trainer.should_stop = True."
            )
        else:  # it ends this process with that status, as it would on one device, and shows no traceback
            log.error("Worker %s called sys.exit(%r):\n%s", worker, error.code, crash.traceback)
    if error is None:
        error = ReCycleError(crash.summary)
    if not (has_remedy and is_internal(crash.traceback)):
        error.__cause__ = WorkerTraceback(positions.name(crash.rank), crash.traceback)
    return error
