"""The launching process: a supervisor, not a rank.

It starts the workers, hosts the coordinator, waits, and takes the results. When a worker dies it only writes a line to
the log, or starts a replacement; when the run cannot go on, or an exception in the user's code ends it, it stops the
remaining workers and raises the reason. After the loss of a whole stage it can start again from the
newest checkpoint.

A process with ``RECYCLE_COORDINATOR`` in its environment is no supervisor: it becomes a worker of the run that listens
there.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import logging
import math
import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import lightning.pytorch as pl
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim import Optimizer
from typing_extensions import override

from lightning_recycle.callbacks import FaultInjectionCallback, HeartbeatCallback, PlanMonitor
from lightning_recycle.control.coordinator.coordinator import Coordinator, CoordinatorOptions
from lightning_recycle.control.joining.run_config import WorkerProcess
from lightning_recycle.control.joining.vacancies import FILE_NAME, Quarantine
from lightning_recycle.control.monitoring.history import Event
from lightning_recycle.control.monitoring.json_logs import install_if_wanted
from lightning_recycle.control.monitoring.monitor import Monitor
from lightning_recycle.control.monitoring.status_server import served
from lightning_recycle.control.network.addresses import (
    address_from,
    http_address,
    http_address_from_environment,
    machine_name,
)
from lightning_recycle.control.network.handshake import key_from_environment
from lightning_recycle.control.payload import pack
from lightning_recycle.control.plans.run_planner import RunPlanner
from lightning_recycle.control.protocol.messages import Assign
from lightning_recycle.control.protocol.state import Ended, Finished, Outcome, StageLost
from lightning_recycle.data.batching import batch_size_of
from lightning_recycle.engines.discovery import Discovered, check_copies, discover
from lightning_recycle.engines.ray_placement import needs_of_worker
from lightning_recycle.errors import ConfigurationError, UnsupportedFeatureError
from lightning_recycle.launch.lazy_model_setup import describe
from lightning_recycle.launch.local_workers import Crew
from lightning_recycle.launch.outcome import error_of, summary
from lightning_recycle.launch.resume import RestartPolicy, newest_saved, settle_checkpoint, start_from
from lightning_recycle.launch.run_request import run_request_of
from lightning_recycle.launch.signals import EndSignals
from lightning_recycle.launch.trainer_results import Untrained, take_results
from lightning_recycle.launch.worker_group import AnyCrew
from lightning_recycle.launch.worker_payload import Settings
from lightning_recycle.launch.worker_process import WorkerStart, run_outside, worker_main
from lightning_recycle.launch.worker_results import Call
from lightning_recycle.model.cutting import is_meant_to_be_cut, parts_of
from lightning_recycle.pickling import end_import
from lightning_recycle.planning.grid import Grid
from lightning_recycle.planning.library import PlanLibrary
from lightning_recycle.planning.profile import Profile, load_profile, save_profile
from lightning_recycle.planning.schedule import Schedule
from lightning_recycle.session.commit_requirements import steps_alone
from lightning_recycle.session.configuration import Options, Place, RunSetup
from lightning_recycle.session.interruption import saved_already, saves_on_exception
from lightning_recycle.session.reporting_callbacks import show_cursor
from lightning_recycle.session.requirements import check_loaders, check_trainer, loaders_in, warn_of_lost_compilation
from lightning_recycle.session.result_policy import FILE_BYTES, LARGE_BYTES, Gathering
from lightning_recycle.session.weight_callbacks import check_pruning, check_weight_averaging

__all__ = ["INCARNATIONS_PER_START", "SupervisorLauncher"]

log = logging.getLogger(__name__)

_HOST = "127.0.0.1"
_ALL_INTERFACES = {"0.0.0.0": _HOST, "::": "::1"}  # where workers of this machine reach who listens at all of them
INCARNATIONS_PER_START = 1_000_000
"""More than one position can have in one attempt, so a worker's incarnation tells which attempt it belongs to."""

_LOOK_SECONDS = 0.1  # between two looks whether a signal has come
_EXIT_SECONDS = 10.0  # for a worker to leave after the run, before it is killed
_VAL_LOADERS = 2  # position of val_dataloaders among the arguments of Trainer._fit_impl


class Configured(Protocol):
    """What the launcher asks of the strategy."""

    optimizers: list[Optimizer]
    lr_scheduler_configs: list[LRSchedulerConfig]
    missing_optimizers: str | None
    missing_weights: str | None

    @property
    def options(self) -> Options: ...

    @property
    def num_devices(self) -> int: ...

    def choose_grid(self, num_workers: int, batch_size: int | None = None) -> Grid: ...


class SupervisorLauncher(_Launcher):
    """Runs a Trainer function in worker processes and brings its results home.

    Args:
        strategy: the Trainer's strategy.

    Attributes:
        history: what happened in the newest ``fit``; before the first, in the newest run.
        schedules: the schedules of the same run, one per generation.
    """

    def __init__(self, strategy: Configured) -> None:
        self.history: list[Event] = []
        self.schedules: list[Schedule] = []
        self._strategy = strategy
        self._interrupted = False
        self._said_how_it_ended = False
        self._has_run = False
        self._has_fitted = False
        self._outside: Discovered | None = None  # what this process is in the run of another one
        self._untrained: Untrained | None = None

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        return True  # workers are no forks of this process, and get what the notebook defines by value

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        """Runs ``function(*args, **kwargs)``, a bound method of ``trainer``, in every worker.

        Raises:
            StageLostError: when all replicas of a stage died.
            ConfigurationError: for errors that show before anything starts.
            CheckpointError: if the checkpoint to resume from is damaged.
            Exception: the user's own exception from a worker, with that worker's traceback.
        """
        assert trainer is not None
        install_if_wanted()
        end_import()
        self._outside = discover()
        if self._outside is None:
            check_copies()
        return self._supervise((trainer, function, args, kwargs))

    def _supervise(self, call: Call) -> Any:
        """Runs ``call`` and brings home what it leaves; or takes part in the run of another launching process."""
        trainer, function, args, kwargs = call
        self._interrupted, self._said_how_it_ended = True, False
        given = inspect.signature(function).bind(*args, **kwargs).arguments
        if self._untrained is not None:
            self._untrained.check(trainer.lightning_module, given.get("ckpt_path"))
        weights_only = given.get("weights_only")
        setup, heartbeat = self._prepare((trainer, function, args, kwargs), weights_only)
        if self._outside is not None:
            returned = run_outside(
                self._outside,
                partial(_outside_setup, setup),
                run_request_of(trainer, self._strategy.options, setup, heartbeat),
                (trainer, function, args, kwargs),
            )
            self._interrupted = False
            self._note_missing_weights(trainer, one_stage=True)
            return returned
        args, kwargs = settle_checkpoint(trainer, function, (args, kwargs))
        fitting = trainer.state.fn == TrainerFn.FITTING
        self._has_fitted |= fitting
        of_fit = self.history, self.schedules
        self.history, self.schedules = [], []
        savers = fitting and any(map(saves_on_exception, trainer.checkpoint_callbacks))
        if fitting:
            self._strategy.optimizers, self._strategy.lr_scheduler_configs = [], []  # of an earlier fit
        saves = savers or (fitting and bool(self._strategy.options.save_on_signal))
        try:
            with EndSignals(gracefully=saves) as signals, _folder_for_results() as folder:
                setup = replace(setup, gathering=replace(setup.gathering, folder=folder))
                return self._launch((trainer, function, args, kwargs), setup, heartbeat, signals)
        except BaseException:
            show_cursor(trainer)
            if savers and signals.received is None:
                log.warning(
                    "No checkpoint is written for this error: what is to be saved was in the workers, and they have"
                    " ended. ModelCheckpoint(every_n_train_steps=...) writes while they live."
                )
            saved_already(trainer)
            raise
        finally:
            if self._has_fitted and not fitting:
                self.history, self.schedules = of_fit

    def _launch(self, call: Call, setup: RunSetup, heartbeat: HeartbeatCallback, signals: EndSignals) -> Any:
        """Runs the workers, again after the loss of a stage if that is wanted; brings home what they leave."""
        trainer, function, args, kwargs = call
        fitting = trainer.state.fn == TrainerFn.FITTING
        policy = RestartPolicy(setup.grid, self._strategy.options.max_restarts)
        for attempt in itertools.count():
            outcome = self._run((trainer, function, args, kwargs), setup, heartbeat, attempt, signals)
            self._has_run = True
            if isinstance(outcome, Finished):
                self._interrupted = False
                returned = take_results((trainer, function, args, kwargs), outcome.results)
                if fitting:
                    self._note_missing_weights(trainer, one_stage=False)
                if fitting and self._strategy.options.run_summary:
                    for line in summary(self.history, setup.grid):
                        rank_zero_info(line)
                if signals.received is not None:
                    log.warning("%s: the run was at its end; its results are here.", signals.received.name)
                    raise signals.error()
                return returned
            if signals.received is not None and (outcome is None or isinstance(outcome, Ended)):
                log.warning("%s: %s", signals.received.name, self._how_it_ended(outcome))
                self._said_how_it_ended = True
                raise signals.error()
            restarts = isinstance(outcome, StageLost) and self._strategy.options.on_stage_lost == "restart" and fitting
            if not restarts or signals.received is not None:
                raise error_of(outcome, setup.grid, self.history)
            checkpoint = newest_saved(self.history, trainer.strategy.checkpoint_io)
            saved = max((event.step for event in self.history if event.kind == "saved"), default=0)
            grid = policy.next_grid(None if checkpoint is None else saved, self._devices_left(trainer, setup.grid))
            if isinstance(grid, str):
                raise error_of(outcome, setup.grid, self.history, grid)
            again = f"The run starts again from {checkpoint} with {grid.pipelines} pipelines"
            log.warning("%s", error_of(outcome, setup.grid, self.history, again))
            args, kwargs = start_from(function, (args, kwargs), checkpoint)
            # This run wrote the file itself.
            setup = replace(setup, grid=grid, weights_only=False, has_run=True, restarts=True)

    def _devices_left(self, trainer: pl.Trainer, grid: Grid) -> int:
        """How many workers of ``grid`` can be started now."""
        options = self._strategy.options
        use_gpu = trainer.strategy.root_device.type != "cpu"
        room = _room_of(options.engine, needs_of_worker(use_gpu, options.resources_per_worker), grid.num_workers)
        return len(self._devices(trainer)[2]) if room is None else room

    def _note_missing_weights(self, trainer: pl.Trainer, one_stage: bool) -> None:
        """Remembers, and says, whether the trained weights have stayed in the workers."""
        self._untrained = None
        if self._strategy.missing_weights is not None:
            self._untrained = Untrained(trainer.lightning_module, one_stage)
            log.warning("The model in this process is not the trained one: %s.", self._strategy.missing_weights)

    def _how_it_ended(self, outcome: Outcome | None) -> str:
        """Where a run that a signal ended can be resumed, in words."""
        saved = [event for event in self.history if event.kind == "saved"]
        newest = next((event.step for event in reversed(self.history) if event.kind == "step"), None)
        if outcome is None:
            seconds = self._strategy.options.signal_timeout
            why = f"ended without a checkpoint, as none was complete within {seconds:g} s (signal_timeout)"
        else:
            why = "ended before its first step" if newest is None else f"ended after step {newest + 1}"
        if not saved:
            return f"the run {why}. There is no checkpoint."
        return f"the run {why}. Its newest checkpoint, of step {saved[-1].step}, is {saved[-1].details['path']}."

    def _await_end(self, coordinator: Coordinator, signals: EndSignals) -> Outcome | None:
        """How the run ended; None if a signal ends it and its checkpoint is not complete in time."""
        # A graceful handler only leaves a note. The handler of a signal that comes just before a wait runs after it, so
        # no wait is long.
        while not signals.gracefully or signals.received is None:
            outcome = coordinator.wait(_LOOK_SECONDS)
            if outcome is not None:
                return outcome
        coordinator.end_at_boundary()
        return coordinator.wait(self._strategy.options.signal_timeout)

    def _run(
        self, call: Call, setup: RunSetup, heartbeat: HeartbeatCallback, attempt: int, signals: EndSignals
    ) -> Outcome | None:
        """Runs the workers of a grid once; returns how it ended."""
        options, trainer, grid = self._strategy.options, call[0], setup.grid
        fitting = trainer.state.fn == TrainerFn.FITTING  # otherwise there are no step boundaries to enter at
        profile_path, profile = self._find_profile(trainer, grid)
        setup = replace(setup, profiles=profile_path is not None and profile is None)
        planner = RunPlanner(
            grid,
            options.planner,
            replace(options.technique, staggered=setup.staggered),
            options.in_flight_limit,
            costs=None if profile is None else profile.costs(),
            library=_library(options.plan_library, options.planner),
            memory=options.memory,
            recompute=options.activation_checkpointing == "auto",
            chooses_split=options.decoupled == "auto" and fitting,
        )
        planner.prepare()
        coordinator_options = CoordinatorOptions(
            heartbeat_timeout=heartbeat.timeout,
            last_holder_timeout=heartbeat.last_holder_timeout,
            coordinator_timeout=heartbeat.coordinator_timeout,
            start_timeout=options.start_timeout,
            restart_workers=options.restart_workers and fitting,
            max_restarts=options.max_restarts,
            normalize=options.normalize and fitting,
            adapt=options.adapt if fitting else "reroute",
            machine_error_retries=options.machine_error_retries,
            on_corruption=options.on_corruption,
            verify=float(options.verify),
            check_every=0 if options.check_every == "auto" else int(options.check_every),
            drift=PlanMonitor.options_of(trainer) if fitting else None,
        )
        quarantine, devices, absent = self._quarantine(call, grid)
        listen = setup.outsiders
        monitor, (shows, http) = (
            Monitor(Path(sys.argv[0]).name, _samples_per_step(call, setup)),
            _shown_at(options.status),
        )
        payload, use_gpu = (call, Settings.capture()), trainer.strategy.root_device.type != "cpu"
        resources = needs_of_worker(use_gpu, options.resources_per_worker)
        with (
            served(monitor, http, shows),
            _crew_of(options.engine, worker_main, payload, grid, resources, options.start_timeout) as crew,
        ):
            host, port = address_from(os.environ["RECYCLE_LISTEN"], "RECYCLE_LISTEN") if listen else (crew.host, 0)

            def start(rank: int, incarnation: int, device: int, joining: bool = True) -> WorkerProcess:
                incarnation += attempt * INCARNATIONS_PER_START  # what happened to a position once has happened
                address = coordinator.address
                if listen and address[0] in _ALL_INTERFACES:
                    address = (_ALL_INTERFACES[address[0]] if crew.host == _HOST else crew.host, address[1])
                argument = WorkerStart(
                    Place(rank, incarnation, devices[device]),
                    joining,
                    setup,
                    address,
                    coordinator.authkey,
                    crew.payload,
                )
                return crew.start(argument, f"recycle-worker-{rank}")

            coordinator = Coordinator(
                grid,
                planner,
                coordinator_options,
                host=host,
                port=port,
                authkey=key_from_environment() if listen else None,
                on_profile=partial(_write_profile, profile_path),
                start_worker=start,
                setup=pack(setup),
                quarantine=quarantine,
            )
            outcome: Outcome | None = None
            try:
                ranks = (rank for rank in range(grid.num_workers) if rank not in absent)
                workers = {rank: start(rank, 0, rank, joining=False) for rank in ranks}
                coordinator.start(workers, absent)
                crew.attend(coordinator)
                monitor.show(coordinator)
                outcome = self._await_end(coordinator, signals)
            finally:
                with signals.shielded():
                    monitor.show(None)
                    if not isinstance(outcome, Finished):
                        coordinator.stop()  # before the workers are killed: these are no failures to be told
                    crew.end(patience=_EXIT_SECONDS if isinstance(outcome, Finished) else 0.0)
                    coordinator.close()
                    self.history = [*self.history, *coordinator.history]
                    self.schedules = [*self.schedules, *coordinator.schedules]
        if signals.received is not None and not signals.gracefully:
            raise signals.error()  # it came while this run was being cleaned up
        return outcome

    def _devices(self, trainer: pl.Trainer) -> tuple[Quarantine, dict[int, str], list[int]]:
        """The quarantine of a run, the names of the devices, and those that it does not hold."""
        keeps = self._strategy.options.engine == "local" and trainer.state.fn == TrainerFn.FITTING
        quarantine = Quarantine(Path(trainer.default_root_dir) / FILE_NAME if keeps else None)
        kind = trainer.strategy.root_device.type
        names = {device: f"{kind}:{device}" for device in range(self._strategy.num_devices)}
        return quarantine, names, [device for device in names if not quarantine.holds(machine_name(), names[device])]

    def _quarantine(self, call: Call, grid: Grid) -> tuple[Quarantine, dict[int, int], dict[int, str]]:
        """The quarantine of a run; the device of each position; and why positions stay empty, as their devices are out
        and there are no others.
        """
        count = grid.num_workers
        quarantine, names, well = self._devices(call[0])
        out = names.keys() - set(well)
        for device in sorted(out):
            log.warning("No worker is started on %s: %s.", names[device], quarantine.why(names[device]))
        if len(well) >= count:
            return quarantine, dict(enumerate(well[:count])), {}
        return quarantine, {r: r for r in range(count)}, {r: quarantine.why(names[r]) for r in range(count) if r in out}

    def may_save(self, checkpoint: Mapping[str, Any], path: Any) -> bool:
        """Whether this process can write ``checkpoint``: it has the weights of a run that ended well.

        Raises:
            UnsupportedFeatureError: if what it should have did not come home: the weights, the optimizers' states.
        """
        if self._interrupted:
            if not any(event.kind == "saved" and event.details["path"] == os.fspath(path) for event in self.history):
                log.warning("%s is not written: the run failed, and its newest weights were in the workers.", path)
            return False
        if self._strategy.missing_weights is not None:
            Untrained.refuse_to_save(path)
        if "optimizer_states" in checkpoint and self._strategy.missing_optimizers is not None:
            raise UnsupportedFeatureError(
                f"trainer.save_checkpoint({os.fspath(path)!r}) was called in the launching process, which has the"
                f" weights but not the optimizers: {self._strategy.missing_optimizers}. Use"
                " trainer.save_checkpoint(..., weights_only=True), or a ModelCheckpoint callback."
            )
        return True

    def on_exception(self, exception: BaseException) -> None:
        """Lightning handles an error of this process, or has told the user that Ctrl-C came."""
        if isinstance(exception, KeyboardInterrupt) and not self._said_how_it_ended:
            how = self._how_it_ended(Ended())
            rank_zero_info(how[0].upper() + how[1:])

    @override
    def kill(self, signum: Any) -> None:
        """Called by Lightning's SIGTERM handler. Does nothing: the coordinator tells the workers, not signals."""

    # ------------------------------------------------------------------ before

    def _prepare(self, call: Call, weights_only: bool | None) -> tuple[RunSetup, HeartbeatCallback]:
        """Checks everything that needs no worker, and settles what all workers must agree on."""
        trainer, _, args, _ = call
        options = self._strategy.options
        module = trainer.lightning_module
        assert trainer.state.fn is not None
        fitting = trainer.state.fn == TrainerFn.FITTING
        check_trainer(trainer, self._outside)
        loaders = args[1] if len(args) > 1 else None
        sizes = [size for loader in loaders_in(loaders) if (size := batch_size_of(loader)) is not None]
        batch_size = math.gcd(*sizes) if sizes else None
        is_cut = is_meant_to_be_cut(module, options.pipeline)
        grid = options.choose_grid(self._strategy.num_devices, batch_size, can_be_cut=is_cut)
        parts = parts_of(module, grid.stages, options.pipeline)
        parts.check()
        describe(parts, call, self._outside is not None)
        check_weight_averaging(trainer, parts)
        check_pruning(trainer, grid.stages)
        check_loaders(loaders, grid.microbatches if fitting else None)
        if fitting:
            check_loaders(args[_VAL_LOADERS], None)
        stages = parts.cut(grid.stages, options.partition, options.layer_seconds)
        warn_of_lost_compilation(module)
        heartbeat = next((c for c in trainer.callbacks if isinstance(c, HeartbeatCallback)), None)  # type: ignore[attr-defined]
        if heartbeat is None:
            heartbeat = HeartbeatCallback()
            trainer.callbacks.append(heartbeat)  # type: ignore[attr-defined]
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, FaultInjectionCallback):
                callback.check(grid)
        for logger in trainer.loggers:
            _ = logger.version  # chosen here; otherwise every new leader would choose a new one
        if None in (options.pipeline_parallel_size, options.num_microbatches):
            log.info(
                "Grid: %d pipelines x %d stages, %d micro-batches per pipeline.",
                grid.pipelines,
                grid.stages,
                grid.microbatches,
            )
        listens = "RECYCLE_LISTEN" in os.environ
        local = not listens and options.engine == "local"
        setup = RunSetup(
            grid,
            heartbeat.interval,
            stages,
            grid.pipelines,
            weights_only,
            outsiders=listens,
            has_run=self._has_run,
            staggered=options.technique.staggered and (not fitting or steps_alone(trainer, parts, stages)),
            gathering=Gathering(options.gather_result, FILE_BYTES if local else LARGE_BYTES, local),
        )
        return setup, heartbeat

    def _find_profile(self, trainer: pl.Trainer, grid: Grid) -> tuple[Path | None, Profile | None]:
        """The path of the profile, and the profile that is already there."""
        wanted = self._strategy.options.profile
        if wanted is None:
            return None, None
        if wanted == "auto":
            return Path(trainer.default_root_dir) / "profile.json", None
        path = Path(wanted)
        if not path.exists():
            return path, None
        profile = load_profile(path)
        if len(profile.stages) != grid.stages:
            raise ConfigurationError(
                f"The profile {path} has {len(profile.stages)} stages, the grid {grid.stages}: use"
                f" pipeline_parallel_size={len(profile.stages)}, or another path to measure again."
            )
        return path, profile


def _outside_setup(setup: RunSetup, assignment: Assign) -> RunSetup:
    """The setup of a worker that somebody else started, of a coordinator that brings none."""
    staggered = setup.staggered and assignment.staggered
    return replace(
        setup,
        grid=assignment.grid,
        staggered=staggered,
        outsiders=True,
        gathering=replace(setup.gathering, local=False),
    )


@contextlib.contextmanager
def _folder_for_results() -> Iterator[str | None]:
    """The path of a folder that workers make for what is large; None if there is no place for it."""
    try:
        folder = os.path.join(tempfile.gettempdir(), f"recycle-result-{uuid.uuid4().hex}")
    except OSError:  # nothing can be written anywhere: the result comes in messages
        folder = None
    try:
        yield folder
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)  # usually it was not needed


def _shown_at(status: bool | str) -> tuple[bool, tuple[str, int] | None]:
    """Whether this user finds the run on this machine, and the address at which it is served to others."""
    if isinstance(status, str):
        return True, http_address(status, "ReCycleStrategy(status)")
    return status, http_address_from_environment() if status else None


def _samples_per_step(call: Call, setup: RunSetup) -> int | None:
    """How many samples a step has; None if that does not show before the data is loaded."""
    trainer, _, args, _ = call
    if trainer.state.fn != TrainerFn.FITTING or trainer.accumulate_grad_batches != 1:
        return None
    sizes = [batch_size_of(loader) for loader in loaders_in(args[1] if len(args) > 1 else None)]
    return sizes[0] * setup.batch_pipelines if len(sizes) == 1 and sizes[0] is not None else None


def _library(library: Any, planner: Any) -> PlanLibrary | None:
    return library if library is None or isinstance(library, PlanLibrary) else PlanLibrary(library, planner)


def _write_profile(path: Path | None, profile: Profile) -> None:
    assert path is not None, "only runs with a place for it measure a profile"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_profile(path, profile)
    except OSError as error:  # the training is worth more; the next run measures again
        log.warning("The measured profile could not be written to %s: %s", path, error)
        return
    log.info("The measured profile is in %s.", path)


def _crew_of(
    engine: str,
    target: Callable[[Any], None],
    payload: Any,
    grid: Grid,
    resources: Mapping[str, float],
    start_timeout: float,
) -> AnyCrew:
    """A crew of the workers that ``engine`` starts.

    Args:
        engine: "local" or "ray".
        target: what a worker runs; takes one argument.
        payload: what every worker needs.
        grid: the grid of the run.
        resources: what a worker needs, for an engine that shares out resources.
        start_timeout: seconds that an engine may take to have room for all workers.

    Raises:
        ConfigurationError: if the payload cannot be pickled, or the engine is not installed.
        WorkerStartError: if there is no room for the workers in time.
    """
    if engine == "ray":
        from lightning_recycle.launch.ray_workers import RayCrew

        return RayCrew(target, payload, grid, resources, start_timeout)
    return Crew(target, payload)


def _room_of(engine: str, resources: Mapping[str, float], wanted: int) -> int | None:
    """How many workers ``engine`` has room for when none of a run are left, ``wanted`` at most; None if that is not the
    engine's to say, as with the devices of this machine, which do not go.
    """
    if engine == "ray":
        from lightning_recycle.launch.ray_workers import room_in_cluster

        return room_in_cluster(resources, wanted)
    return None
