"""The launching process: a supervisor, not a rank.

It starts the workers, hosts the coordinator, waits, and takes the results. When a worker dies nothing happens here but
a line in the log, or the start of a replacement; when the run cannot go on, or an exception of the user's ends it, the
remaining workers are stopped and the reason is raised. After the loss of a whole stage it can start again from the
newest checkpoint.

A process with ``RECYCLE_COORDINATOR`` in its environment is no supervisor: it becomes a worker of the run that listens
there.

Private Lightning API used here, and nowhere else: ``_Launcher``.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import logging
import os
import signal
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_recycle.callbacks import FaultInjectionCallback, HeartbeatCallback, PlanMonitor
from lightning_recycle.control.coordinator import Coordinator, CoordinatorOptions
from lightning_recycle.control.plans.drift import DriftOptions
from lightning_recycle.control.plans.replanning import RunPlanner
from lightning_recycle.control.protocol.state import Finished, Outcome, StageLost
from lightning_recycle.control.standalone import address_from, key_from_environment
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.launch.processes import Crew, LocalWorker
from lightning_recycle.launch.results import error_of, take_results
from lightning_recycle.launch.worker_process import RunSetup, WorkerStart, global_state, run_outside, worker_main
from lightning_recycle.model.module import PipelineModule
from lightning_recycle.model.partition import stage_layers
from lightning_recycle.planning.grid import Grid
from lightning_recycle.planning.library import PlanLibrary
from lightning_recycle.planning.problem import Technique
from lightning_recycle.planning.profile import Profile, load_profile, save_profile
from lightning_recycle.session.checks import check_loaders, check_module, check_trainer

if TYPE_CHECKING:
    from lightning_recycle.strategy import ReCycleStrategy

__all__ = ["INCARNATIONS_PER_START", "SupervisorLauncher"]

log = logging.getLogger(__name__)

_HOST = "127.0.0.1"
INCARNATIONS_PER_START = 1_000_000
"""More than the processes of one position in one attempt: how a worker knows which attempt it belongs to."""

_EXIT_SECONDS = 10.0  # for a worker to leave after the run, before it is killed
_VAL_LOADERS = 2  # position of val_dataloaders among the arguments of Trainer._fit_impl
_CKPT_PATH = 4  # position of ckpt_path among the arguments of Trainer._fit_impl


class SupervisorLauncher(_Launcher):
    """Runs a Trainer function in worker processes and brings its results home."""

    def __init__(self, strategy: ReCycleStrategy) -> None:
        self._strategy = strategy

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        return False  # classes defined in a notebook cannot be imported by the workers

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        """Runs ``function(*args, **kwargs)``, a bound method of ``trainer``, in every worker.

        Raises:
            StageLostError: when all replicas of a stage died.
            ConfigurationError: for what can be seen to be wrong before anything starts.
            Exception: the user's own, raised in a worker, with that worker's traceback.
        """
        assert trainer is not None
        strategy = self._strategy
        strategy.interrupted = True
        grid, heartbeat = self._prepare(trainer, args)
        strategy.weights_only = inspect.signature(function).bind(*args, **kwargs).arguments.get("weights_only")
        if "RECYCLE_COORDINATOR" in os.environ:
            returned = run_outside(
                address_from(os.environ["RECYCLE_COORDINATOR"], "RECYCLE_COORDINATOR"),
                key_from_environment(),
                os.environ.get("RECYCLE_HOST"),
                partial(self._own_setup, trainer, grid, heartbeat),
                trainer,
                function,
                args,
                kwargs,
            )
            strategy.interrupted = False
            return returned
        strategy.history, strategy.schedules = [], []
        batch_pipelines = grid.pipelines
        for attempt in itertools.count():
            outcome, survivors = self._run(function, args, kwargs, trainer, grid, heartbeat, batch_pipelines, attempt)
            strategy.has_run = True
            if isinstance(outcome, Finished):
                strategy.interrupted = False
                return take_results(trainer, outcome.results)
            error = error_of(outcome, grid, strategy.history)
            fitting = trainer.state.fn == TrainerFn.FITTING
            if not isinstance(outcome, StageLost) or strategy.on_stage_lost != "restart" or not fitting:
                raise error
            smaller, checkpoint = _smaller_grid(grid, survivors), _newest_checkpoint(strategy)
            if smaller is None or checkpoint is None:
                raise error
            log.warning("%s Going on from %s with %d pipelines.", error, checkpoint, smaller.pipelines)
            grid, args = smaller, (*args[:_CKPT_PATH], checkpoint, *args[_CKPT_PATH + 1 :])
            strategy.weights_only = False  # the file is this run's own

    def _run(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        trainer: pl.Trainer,
        grid: Grid,
        heartbeat: HeartbeatCallback,
        batch_pipelines: int,
        attempt: int,
    ) -> tuple[Outcome | None, int]:
        """Runs the workers of ``grid`` once; returns how it ended, and how many workers were alive then."""
        strategy = self._strategy
        technique = Technique(decoupled=strategy.decoupled, staggered=strategy.staggered)
        profile_path, profile = self._find_profile(trainer, grid)
        planner = RunPlanner(
            grid,
            strategy.planner,
            technique,
            strategy.in_flight_limit,
            costs=None if profile is None else profile.costs(),
            library=_library(strategy.plan_library, strategy.planner),
        )
        planner.prepare()
        module = trainer.lightning_module
        assert isinstance(module, PipelineModule)
        setup = RunSetup(
            grid,
            heartbeat.interval,
            profile_path is not None and profile is None,
            batch_pipelines=batch_pipelines,
            parts=stage_layers(module, grid.stages, strategy.partition, strategy.layer_seconds),
            outsiders="RECYCLE_LISTEN" in os.environ,
        )
        fitting = trainer.state.fn == TrainerFn.FITTING  # else there are no steps to enter between
        options = CoordinatorOptions(
            heartbeat_timeout=heartbeat.timeout,
            restart_workers=strategy.restart_workers and fitting,
            max_restarts=strategy.max_restarts,
            normalize=strategy.normalize and fitting,
            drift=_drift_options(trainer) if fitting else None,
        )
        listen = "RECYCLE_LISTEN" in os.environ
        host, port = address_from(os.environ["RECYCLE_LISTEN"], "RECYCLE_LISTEN") if listen else (_HOST, 0)
        with Crew(worker_main, (trainer, function, args, kwargs, global_state())) as crew:

            def start(rank: int, incarnation: int, device: int, joining: bool = True) -> LocalWorker:
                incarnation += attempt * INCARNATIONS_PER_START  # whatever happened to a position once has happened
                address = coordinator.address
                if listen and address[0] == "0.0.0.0":
                    address = (_HOST, address[1])
                argument = WorkerStart(
                    rank, incarnation, device, joining, setup, address, coordinator.authkey,
                    crew.payload_path, os.getpid(),
                )  # fmt: skip
                return crew.start(argument, f"recycle-worker-{rank}")

            coordinator = Coordinator(
                grid,
                planner,
                options,
                host=host,
                port=port,
                authkey=key_from_environment() if listen else None,
                on_profile=partial(_write_profile, profile_path),
                start_worker=start,
                setup=setup,
            )
            outcome: Outcome | None = None
            try:
                with _sigterm_raises():
                    workers = {rank: start(rank, 0, rank, joining=False) for rank in range(grid.num_workers)}
                    coordinator.start(workers)
                    outcome = coordinator.wait()
            finally:
                crew.end(patience=_EXIT_SECONDS if isinstance(outcome, Finished) else 0.0)
                coordinator.close()
                strategy.history = [*strategy.history, *coordinator.history]
                strategy.schedules = [*strategy.schedules, *coordinator.schedules]
        return outcome, len(coordinator.roster)

    def _own_setup(self, trainer: pl.Trainer, grid: Grid, heartbeat: HeartbeatCallback, wanted: Grid) -> RunSetup:
        """What a worker outside runs with when the coordinator knows the grid only."""
        strategy, module = self._strategy, trainer.lightning_module
        assert isinstance(module, PipelineModule)
        if (grid.pipelines, grid.stages) != (wanted.pipelines, wanted.stages) or (
            strategy.num_microbatches not in (None, wanted.microbatches)
        ):
            raise ConfigurationError(
                f"This script wants a grid of {grid}, the coordinator has {wanted} (pipelines x stages x"
                " micro-batches): use the same devices * num_nodes, pipeline_parallel_size and num_microbatches"
                " in both."
            )
        parts = stage_layers(module, wanted.stages, strategy.partition, strategy.layer_seconds)
        return RunSetup(wanted, heartbeat.interval, False, wanted.pipelines, parts, outsiders=True)

    @override
    def kill(self, signum: Any) -> None:
        """Lightning's SIGTERM handler calls this; the workers are told by the coordinator, not by signals."""

    # ------------------------------------------------------------------ before

    def _prepare(self, trainer: pl.Trainer, args: tuple[Any, ...]) -> tuple[Grid, HeartbeatCallback]:
        """Checks everything that can be checked without a worker, and settles what all workers must agree on."""
        strategy = self._strategy
        module = trainer.lightning_module
        assert trainer.state.fn is not None
        fitting = trainer.state.fn == TrainerFn.FITTING
        if not isinstance(module, PipelineModule):
            raise ConfigurationError(
                f"strategy='recycle' needs a PipelineModule, got {type(module).__name__}. Derive your module from"
                " lightning_recycle.PipelineModule and return its layers from configure_pipeline()."
            )
        check_trainer(trainer)
        check_module(module)
        loaders = args[1] if len(args) > 1 else None
        batch_size = loaders.batch_size if isinstance(loaders, DataLoader) else None
        grid = strategy.choose_grid(strategy.world_size * trainer.num_nodes, batch_size)
        check_loaders(loaders, grid.microbatches if fitting else None)
        if fitting:
            check_loaders(args[_VAL_LOADERS], None)
            grid = replace(grid, microbatches=grid.microbatches * trainer.accumulate_grad_batches)
        stage_layers(module, grid.stages, strategy.partition, strategy.layer_seconds)
        heartbeat = next((c for c in trainer.callbacks if isinstance(c, HeartbeatCallback)), None)  # type: ignore[attr-defined]
        if heartbeat is None:
            heartbeat = HeartbeatCallback()
            trainer.callbacks.append(heartbeat)  # type: ignore[attr-defined]
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, FaultInjectionCallback):
                callback.check(grid)
        for logger in trainer.loggers:
            _ = logger.version  # chosen here, or every new leader would choose a new one
        if None in (strategy.pipeline_parallel_size, strategy.num_microbatches):
            log.info(
                "Grid: %d pipelines x %d stages, %d micro-batches per pipeline.",
                grid.pipelines,
                grid.stages,
                grid.microbatches,
            )
        return grid, heartbeat

    def _find_profile(self, trainer: pl.Trainer, grid: Grid) -> tuple[Path | None, Profile | None]:
        """Where the profile is to be, and what is there already."""
        wanted = self._strategy.profile
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


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Within the block SIGTERM ends this process like an exception, so that workers and files are taken care of."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(signum: int, frame: Any) -> None:
        raise SystemExit(128 + signum)

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _smaller_grid(grid: Grid, workers: int) -> Grid | None:
    """The grid with as many pipelines as ``workers`` allow that computes the same global micro-batches, if any."""
    fitting = (
        d for d in range(min(workers // grid.stages, grid.pipelines), 0, -1) if grid.global_microbatches % d == 0
    )
    pipelines = next(fitting, None)
    if pipelines is None:
        return None
    return Grid(pipelines, grid.stages, grid.global_microbatches // pipelines)


def _drift_options(trainer: pl.Trainer) -> DriftOptions | None:
    """Whether and when the plan is to change because operations take other times than it assumes."""
    monitors = (c.options for c in trainer.callbacks if isinstance(c, PlanMonitor))  # type: ignore[attr-defined]
    return next(monitors, None)


def _newest_checkpoint(strategy: ReCycleStrategy) -> str | None:
    """The newest checkpoint of this run that is still there and whole."""
    saved = [str(event.details["path"]) for event in strategy.history if event.kind == "saved"]
    checksums = isinstance(strategy.checkpoint_io, TorchCheckpointIO)
    return next((path for path in reversed(saved) if _is_whole(path, checksums)), None)


def _is_whole(path: str, checksums: bool) -> bool:
    """Whether a checkpoint is what was written. With ``checksums`` a file is a zip archive, as torch writes them."""
    if not checksums or not os.path.isfile(path):
        return os.path.exists(path)
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except (OSError, zipfile.BadZipFile):
        log.warning("The checkpoint %s is damaged; the one before it is taken.", path)
        return False


def _library(library: Any, planner: Any) -> PlanLibrary | None:
    return library if library is None or isinstance(library, PlanLibrary) else PlanLibrary(library, planner)


def _write_profile(path: Path | None, profile: Profile) -> None:
    assert path is not None, "only runs with a place for it measure a profile"
    path.parent.mkdir(parents=True, exist_ok=True)
    save_profile(path, profile)
    log.info("The measured profile is in %s.", path)
