"""The launching process: a supervisor, not a rank.

It starts the workers, hosts the coordinator, waits, and takes the results. When a
worker dies nothing happens here but a line in the log; when the run cannot go on, or an exception of the user's ends
it, the remaining workers are stopped and the reason is raised.

Private Lightning API used here, and nowhere else: ``_Launcher``, ``_GlobalStateSnapshot``,
``_set_num_threads_if_needed``, the loops' ``_load_from_state_dict``, and ``call._call_callbacks_state_dict``.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.strategies.launchers.multiprocessing import _GlobalStateSnapshot
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerFn, TrainerState
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_recycle.callbacks import FaultInjectionCallback, HeartbeatCallback
from lightning_recycle.errors import (
    ConfigurationError,
    ControlPlaneError,
    InjectedFaultError,
    ReCycleError,
    StageLostError,
    UnsupportedFeatureError,
    WorkerStartError,
)
from lightning_recycle.module import PipelineModule, stage_layers
from lightning_recycle.planning.grid import Grid, Worker
from lightning_recycle.planning.library import PlanLibrary
from lightning_recycle.planning.problem import Technique
from lightning_recycle.planning.profile import Profile, load_profile, save_profile
from lightning_recycle.resilience import membership
from lightning_recycle.resilience.client import EXIT_STOPPED, ControlClient
from lightning_recycle.resilience.coordinator import Coordinator, CoordinatorOptions
from lightning_recycle.resilience.messages import Crash
from lightning_recycle.resilience.replanning import RunPlanner
from lightning_recycle.runtime.data import check_dataloader, die_with_parent

if TYPE_CHECKING:
    from lightning_recycle.strategy import ReCycleStrategy

__all__ = ["SupervisorLauncher"]

log = logging.getLogger(__name__)

_HOST = "127.0.0.1"
_EXIT_SECONDS = 10.0  # for a worker to leave after the run, before it is killed


@dataclass(frozen=True)
class _WorkerStart:
    """What a worker process is started with."""

    rank: int
    grid: Grid
    address: tuple[str, int]
    authkey: bytes
    heartbeat_interval: float
    payload_path: str
    supervisor_pid: int
    profiles: bool


@dataclass(frozen=True)
class _Extras:
    """What the leader tells besides the weights."""

    trainer_state: TrainerState
    callback_metrics: dict[str, Any]
    logged_metrics: dict[str, Any]
    callbacks: dict[str, Any]
    fit_loop: dict[str, Any]


class SupervisorLauncher(_Launcher):
    """Runs a Trainer function in worker processes and brings its results home."""

    def __init__(self, strategy: ReCycleStrategy) -> None:
        self._strategy = strategy
        self._workers: dict[int, _LocalWorker] = {}

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
        grid, heartbeat = self._prepare(trainer, args)
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
        measures = profile_path is not None and profile is None
        options = CoordinatorOptions(heartbeat_timeout=heartbeat.timeout)
        coordinator = Coordinator(grid, planner, options, host=_HOST, on_profile=partial(_write_profile, profile_path))
        context = _process_context()
        try:
            with _payload_file(
                (trainer, function, args, kwargs, _GlobalStateSnapshot.capture(), torch.get_default_dtype())
            ) as path:
                for rank in range(grid.num_workers):
                    start = _WorkerStart(
                        rank, grid, coordinator.address, coordinator.authkey, heartbeat.interval,
                        path, os.getpid(), measures,
                    )  # fmt: skip
                    self._workers[rank] = _LocalWorker(context, start)
                coordinator.start(self._workers)
                outcome = coordinator.wait()
        finally:
            self._end_workers(patience=_EXIT_SECONDS if _finished(coordinator) else 0.0)
            coordinator.close()
            strategy.history = coordinator.history
            strategy.schedules = coordinator.schedules
        if isinstance(outcome, membership.Finished):
            self._take_results(trainer, outcome.results)
            return None
        raise _error_of(outcome, grid, coordinator.history)

    @override
    def kill(self, signum: Any) -> None:
        """Lightning's SIGTERM handler calls this; the workers are told by the coordinator, not by signals."""

    # ------------------------------------------------------------------ before

    def _prepare(self, trainer: pl.Trainer, args: tuple[Any, ...]) -> tuple[Grid, HeartbeatCallback]:
        """Checks everything that can be checked without a worker, and settles what all workers must agree on."""
        strategy = self._strategy
        module = trainer.lightning_module
        assert trainer.state.fn is not None
        if trainer.state.fn != TrainerFn.FITTING:
            raise UnsupportedFeatureError(
                f"strategy='recycle' supports trainer.fit() only so far, not trainer.{trainer.state.fn.value}():"
                " use another Trainer on one device for that; the module works there unchanged."
            )
        if not isinstance(module, PipelineModule):
            raise ConfigurationError(
                f"strategy='recycle' needs a PipelineModule, got {type(module).__name__}. Derive your module from"
                " lightning_recycle.PipelineModule and return its layers from configure_pipeline()."
            )
        loaders = args[1] if len(args) > 1 else None
        if len(args) > 4 and args[4] is not None:
            raise UnsupportedFeatureError(
                f"ckpt_path={args[4]!r}: resuming is not supported yet. To start from the weights of a checkpoint, call"
                " model.load_state_dict(torch.load(path)['state_dict']) before fit."
            )
        batch_size = loaders.batch_size if isinstance(loaders, DataLoader) else None
        grid = strategy.choose_grid(strategy.world_size, batch_size)
        if loaders is not None and not isinstance(loaders, pl.LightningDataModule):
            check_dataloader(loaders, grid.microbatches)
        stage_layers(len(module.layers), grid.stages)
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

    # ------------------------------------------------------------------ after

    def _end_workers(self, patience: float) -> None:
        deadline = time.monotonic() + patience
        for worker in self._workers.values():
            worker.describe_exit(max(0.0, deadline - time.monotonic()))
        for worker in self._workers.values():
            worker.kill()
        for worker in self._workers.values():
            worker.describe_exit(_EXIT_SECONDS)
        self._workers.clear()

    def _take_results(self, trainer: pl.Trainer, results: Mapping[int, Any]) -> None:
        module = trainer.lightning_module
        assert isinstance(module, PipelineModule)
        state: dict[str, torch.Tensor] = {}
        extras: _Extras | None = None
        for _, (part, found) in sorted(results.items()):
            state.update(part)
            extras = found or extras
        assert extras is not None
        module.materialize()
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if name in state and tensor.dtype != state[name].dtype:  # trained in another precision than it was given in
                tensor.data = tensor.data.to(state[name].dtype)
        module.load_state_dict(state)
        trainer.state = extras.trainer_state
        trainer.callback_metrics.update(extras.callback_metrics)
        trainer.logged_metrics.update(extras.logged_metrics)
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint):  # it takes no results from another directory than its own
                callback.dirpath = extras.callbacks.get(callback.state_key, {}).get("dirpath", callback.dirpath)
        call._call_callbacks_load_state_dict(trainer, {"callbacks": extras.callbacks})
        _load_progress(trainer.fit_loop, extras.fit_loop)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_workers": {}}


def _library(library: Any, planner: Any) -> PlanLibrary | None:
    return library if library is None or isinstance(library, PlanLibrary) else PlanLibrary(library, planner)


def _write_profile(path: Path | None, profile: Profile) -> None:
    assert path is not None, "only runs with a place for it measure a profile"
    path.parent.mkdir(parents=True, exist_ok=True)
    save_profile(path, profile)
    log.info("The measured profile is in %s.", path)


def _finished(coordinator: Coordinator) -> bool:
    return isinstance(coordinator.wait(timeout=0), membership.Finished)


def _error_of(outcome: Any, grid: Grid, history: list[Any]) -> BaseException:
    if isinstance(outcome, membership.StageLost):
        causes = "; ".join(f"worker {grid.worker(rank)}: {cause}" for rank, cause in sorted(outcome.causes.items()))
        if not any(event.kind == "step" for event in history) and not any(event.kind == "resumed" for event in history):
            return WorkerStartError(
                f"The workers of stage {outcome.stage} ended before training began ({causes}). See their output above;"
                " a script without `if __name__ == '__main__':` is a common reason."
            )
        return StageLostError(
            f"All {grid.pipelines} replicas of stage {outcome.stage} are lost ({causes}); its parameters exist"
            " nowhere any"
            " more. Start again from the newest checkpoint, and use more pipelines (more devices, or a smaller"
            " pipeline_parallel_size) to survive more failures."
        )
    if isinstance(outcome, membership.Crashed):
        return _exception_from(outcome.crash, grid)
    if isinstance(outcome, membership.Failed):
        return ReCycleError(outcome.reason)
    return ReCycleError(f"The run ended in an unknown way: {outcome!r}.")


class _WorkerTraceback(Exception):
    """The traceback of an exception in a worker, shown as the cause of the same exception raised here."""

    def __init__(self, worker: Worker, text: str) -> None:
        self.text = f'\n"""\nIn worker {worker}:\n{text}"""'

    def __str__(self) -> str:
        return self.text


def _exception_from(crash: Crash, grid: Grid) -> BaseException:
    error: BaseException | None = None
    if crash.exception is not None:
        try:
            error = pickle.loads(crash.exception)
        except Exception as reason:  # an exception class whose pickle does not load: its text is all that is left
            log.debug("The worker's exception could not be loaded: %s", reason)
    if error is None:
        error = ReCycleError(crash.summary)
    error.__cause__ = _WorkerTraceback(grid.worker(crash.rank), crash.traceback)
    return error


def _load_progress(loop: _Loop, state: dict[str, Any], prefix: str = "") -> None:
    """Sets the counters of ``loop`` and its children without marking it as restarting, as ``load_state_dict`` would."""
    loop._load_from_state_dict(dict(state), prefix)
    for name, child in vars(loop).items():
        if isinstance(child, _Loop):
            _load_progress(child, state, f"{prefix}{name}.")


# ---------------------------------------------------------------------- processes


def _process_context() -> BaseContext:
    """Fork server with the slow imports done once; where there is none, spawn."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lightning_recycle.strategy", "lightning_recycle.launcher"])
    return context


@contextlib.contextmanager
def _payload_file(payload: Any) -> Iterator[str]:
    """Writes what every worker needs to a file of this user's, once, instead of through a pipe per worker."""
    try:
        data = pickle.dumps(payload)
    except Exception as error:
        raise ConfigurationError(
            f"The Trainer, model or data cannot be sent to the worker processes: {type(error).__name__}: {error}."
            " Define classes and functions at module level, and open files and connections in setup() instead of"
            " __init__."
        ) from error
    fd, path = tempfile.mkstemp(prefix="lightning_recycle_", suffix=".pickle")
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        yield path
    finally:
        os.unlink(path)


class _LocalWorker:
    """A worker process on this machine."""

    def __init__(self, context: BaseContext, start: _WorkerStart) -> None:
        # Not daemonic: DataLoader processes are its children.
        self._process = context.Process(  # type: ignore[attr-defined]
            target=_worker_main, args=(start,), name=f"recycle-worker-{start.rank}", daemon=False
        )
        try:
            self._process.start()
        except RuntimeError as error:
            if "bootstrapping phase" in str(error):
                raise WorkerStartError(
                    "The script that calls trainer.fit() is imported again by the workers and has no main guard."
                    " Put the code that runs under: if __name__ == '__main__':"
                ) from error
            raise
        self.sentinel: int = self._process.sentinel

    def describe_exit(self, timeout: float) -> str | None:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            return None
        if code < 0:
            return f"it was killed by {signal.Signals(-code).name}"
        return "it was told to stop" if code == EXIT_STOPPED else f"it exited with code {code}"

    def kill(self) -> None:
        if self._process.exitcode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()


def _worker_main(start: _WorkerStart) -> None:
    """The life of a worker process."""
    die_with_parent()
    _watch_supervisor(start.supervisor_pid)
    warnings.filterwarnings(
        "ignore", message=r".*treespec, LeafSpec.*"
    )  # Lightning 2.6 on newer torch, in every worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the supervisor decides
    if "fork" in multiprocessing.get_all_start_methods():
        # A fork server's child would start one of its own for DataLoader processes, which outlives a killed worker.
        multiprocessing.set_start_method("fork", force=True)
    client = ControlClient(start.rank, start.address, start.authkey, start.heartbeat_interval)
    try:
        with open(start.payload_path, "rb") as file:
            trainer, function, args, kwargs, global_states, default_dtype = pickle.load(file)
        global_states.restore()
        torch.set_default_dtype(default_dtype)
        _set_num_threads_if_needed(num_processes=start.grid.num_workers)
        from lightning_recycle.strategy import WorkerContext

        strategy = trainer.strategy
        strategy.enter_worker(WorkerContext(start.rank, start.grid, client, _HOST, start.profiles))
        function(*args, **kwargs)
        strategy.deliver_result(lambda: _extras(trainer))
        client.leave()
    except BaseException as error:
        _report_crash(client, start.rank, error)
        sys.exit(1)


def _watch_supervisor(pid: int) -> None:
    """Ends this process soon after the supervisor: covers the time before it is connected and a death of the fork
    server's.
    """

    def watch() -> None:
        while True:
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                os._exit(EXIT_STOPPED)
            time.sleep(1.0)

    threading.Thread(target=watch, name="recycle-supervisor-watch", daemon=True).start()


def _report_crash(client: ControlClient, rank: int, error: BaseException) -> None:
    """Tells the coordinator why this worker ends; the supervisor decides whether it shows the traceback."""
    fault = isinstance(error, (InjectedFaultError, ControlPlaneError))
    text = "".join(traceback.format_exception(error))
    summary = f"{type(error).__name__}: {error}"
    try:
        dumped = pickle.dumps(error)
        pickle.loads(dumped)
        data: bytes | None = dumped
    except Exception:  # its class cannot be pickled or loaded: the summary and the traceback must do
        data = None
    client.send(Crash(rank, fault, summary, data, text))
    client.leave()


def _extras(trainer: pl.Trainer) -> _Extras:
    def plain(metrics: Mapping[str, Any]) -> dict[str, Any]:
        return {k: v.detach().cpu().clone() if isinstance(v, torch.Tensor) else v for k, v in metrics.items()}

    return _Extras(
        trainer.state,
        plain(trainer.callback_metrics),
        plain(trainer.logged_metrics),
        call._call_callbacks_state_dict(trainer),
        trainer.fit_loop.state_dict(),
    )
