"""Preparation of a run: its call, checks without workers, the cut of the model.

If ``configure_pipeline()`` needs results of ``setup()``, the launching process prepares the data and calls the
``setup()`` hooks as one device does, describes the layers, and then forgets the hooks' results: the workers call them
again.
"""

from __future__ import annotations

import inspect
import logging
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim import Optimizer

from lightning_recycle.callbacks import FaultInjectionCallback, HeartbeatCallback
from lightning_recycle.data.dataloaders import batch_size_of
from lightning_recycle.engines.worker_environment import Discovered
from lightning_recycle.errors import ConfigurationError, UnsupportedFeatureError, counted
from lightning_recycle.files import why_not_writable
from lightning_recycle.model.chain_parts import is_meant_to_be_cut, parts_of
from lightning_recycle.model.parts import ModelParts
from lightning_recycle.planning.costs import Profile, load_profile
from lightning_recycle.planning.grid import Grid, Positions
from lightning_recycle.planning.planner import PlanningOptions
from lightning_recycle.session import configuration
from lightning_recycle.session.checkpoint_callbacks import check_pruning, check_weight_averaging
from lightning_recycle.session.configuration import FILE_BYTES, LARGE_BYTES, Gathering, Options, RunSetup
from lightning_recycle.session.gradient_clipping import steps_alone
from lightning_recycle.session.lightning_internals import attach_data, call_setup_hooks
from lightning_recycle.session.session import Session

log = logging.getLogger(__name__)

_OF_THE_MODEL = ("_tied", "_trainer")  # what describing the layers and attaching the Trainer leave in the module


_EVALUATED = {
    TrainerFn.VALIDATING: "val_dataloaders",
    TrainerFn.TESTING: "test_dataloaders",
    TrainerFn.PREDICTING: "predict_dataloaders",
}


@dataclass(frozen=True)
class TrainerCall:
    """A call of ``function``, a bound method of ``trainer`` behind ``fit`` or others."""

    trainer: pl.Trainer
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self) -> Any:
        return self.function(*self.args, **self.kwargs)

    @property
    def fits(self) -> bool:
        return self.trainer.state.fn == TrainerFn.FITTING

    @property
    def arguments(self) -> dict[str, Any]:
        return inspect.signature(self.function).bind(*self.args, **self.kwargs).arguments

    @property
    def loaders(self) -> Any:
        """The argument with the DataLoaders of this function, of training if it trains."""
        return self.arguments.get("train_dataloaders" if self.fits else "dataloaders")

    @property
    def data(self) -> dict[str, Any]:
        """The data among the arguments, by name: ``datamodule``, and DataLoaders."""
        given = self.arguments
        data = {name: value for name, value in given.items() if name.endswith("dataloaders") or name == "datamodule"}
        for name, value in data.items():
            if isinstance(value, pl.LightningDataModule):  # Lightning takes it instead of loaders, too
                return {**data, name: None, "datamodule": value}
        return data

    def from_checkpoint(self, path: Any) -> TrainerCall:
        bound = inspect.signature(self.function).bind(*self.args, **self.kwargs)
        bound.arguments["ckpt_path"] = path
        return replace(self, args=bound.args, kwargs=bound.kwargs)

    def attach_data(self) -> None:
        """Links module, data and Trainer here, as the function does in workers."""
        assert self.trainer.state.fn is not None
        names = {"dataloaders": _EVALUATED.get(self.trainer.state.fn, "")}
        data = {names.get(name, name): value for name, value in self.data.items()}
        attach_data(self.trainer, data)


class ConfiguredStrategy(Protocol):
    """Strategy of the Trainer, as far as a run needs it before and after its steps."""

    optimizers: list[Optimizer]
    lr_scheduler_configs: list[LRSchedulerConfig]
    missing_optimizers: str | None
    missing_weights: str | None

    @property
    def options(self) -> Options: ...

    @property
    def num_devices(self) -> int: ...

    @property
    def num_positions(self) -> int: ...

    def enter(self, session: Session | None) -> None: ...


@dataclass(frozen=True)
class PreparedRun:
    """A checked run, before its workers are started."""

    call: TrainerCall
    setup: RunSetup
    heartbeat: HeartbeatCallback
    options: Options
    num_devices: int

    @property
    def samples_per_step(self) -> int | None:
        """Samples of a step; None if unknown before the data is loaded."""
        if not self.call.fits or self.call.trainer.accumulate_grad_batches != 1:
            return None
        sizes = [batch_size_of(loader) for loader in configuration.loaders_in(self.call.loaders)]
        return sizes[0] * self.setup.batch_pipelines if len(sizes) == 1 and sizes[0] is not None else None

    def find_profile(self) -> tuple[Path | None, Profile | None]:
        """Path and content of the profile; ConfigurationError for other numbers of stages."""
        wanted, grid = self.options.planning.profile, self.setup.grid
        if wanted is None:
            return None, None
        if wanted == "auto":
            return Path(self.call.trainer.default_root_dir) / "profile.json", None
        path = Path(wanted)
        if path.is_dir():
            raise ConfigurationError.for_option("PlanningOptions", "profile", str(path), "give a file, not a folder")
        if not path.exists():
            rank_zero_info(f"profile={str(path)!r}: there is no such file; it will be measured and written there.")
            return path, None
        profile = load_profile(path)
        if len(profile.stages) != grid.stages:
            raise ConfigurationError(
                f"The profile {path} has {counted(len(profile.stages), 'stage')}, the grid {grid.stages}: use"
                f" pipeline_parallel_size={len(profile.stages)}, or another path to measure again."
            )
        return path, profile


def prepare(
    call: TrainerCall, strategy: ConfiguredStrategy, outside: Discovered | None, has_run: bool = False
) -> PreparedRun:
    """Checks everything that needs no worker, and settles the workers' common setup.

    ``outside``: the place of this process in another's run; ``has_run``: whether this Trainer has had workers before.
    Raises ConfigurationError or UnsupportedFeatureError if the run cannot start.
    """
    trainer, options = call.trainer, strategy.options
    module = trainer.lightning_module
    module.trainer = trainer  # from now on what describing the layers raises is raised once, below
    assert trainer.state.fn is not None
    configuration.check_trainer(trainer, outside, options.is_remote)
    if call.loaders is None and call.data.get("datamodule") is None:
        configuration.check_data_hook(module, _EVALUATED.get(trainer.state.fn, "train_dataloaders").removesuffix("s"))
    sizes = [size for loader in configuration.loaders_in(call.loaders) if (size := batch_size_of(loader)) is not None]
    batch_size = math.gcd(*sizes) if sizes else None
    is_cut = is_meant_to_be_cut(module, options.layers)
    grid = options.choose_grid(strategy.num_positions, batch_size, can_be_cut=is_cut)
    parts = parts_of(module, grid.stages, options.layers)
    parts.check()
    _describe(parts, call, outside is not None)
    check_weight_averaging(trainer, parts)
    check_pruning(trainer, grid.stages)
    if options.members > 1:
        configuration.check_members(trainer, options)
    if outside is None and not options.is_remote:
        _check_devices(strategy.num_devices, grid, options)
    configuration.check_loaders(call.loaders, grid.microbatches if call.fits else None)
    if call.fits:
        configuration.check_loss(module)
        configuration.check_loaders(call.arguments.get("val_dataloaders"), None)
    stages = parts.cut(grid.stages, options.planning.partition)
    if options.members > 1 and parts.ties(stages):
        raise UnsupportedFeatureError(
            "strategy='recycle' does not support weights that are tied across stages where several processes hold a"
            " position. Use pipeline_parallel_size=1, or do not tie them."
        )
    if outside is None:
        _check_folders(options.planning)
    configuration.warn_of_lost_compilation(module)
    heartbeat = _prepare_callbacks(trainer, Positions(grid, math.prod(options.mesh_sizes)))
    for logger in trainer.loggers:
        _ = logger.version  # chosen here; otherwise every new leader would choose a new one
    if None in (options.pipeline_parallel_size, options.num_microbatches):
        log.info(
            "Grid: %d pipelines x %d stages, %d micro-batches per pipeline.",
            grid.pipelines,
            grid.stages,
            grid.microbatches,
        )
    if grid.pipelines == 1:
        log.warning(
            "With devices=%d and %s each stage has one worker: the run survives no failure. Use at least devices=%d.",
            grid.stages,
            counted(grid.stages, "stage"),
            2 * grid.stages,
        )
    if grid.stages == 1 and options.layers is not None:
        log.warning("layers=%r has no effect: pipeline_parallel_size is 1.", options.layers)
    if grid.lanes == 1 and options.verification.verify:
        log.warning("verify=%s has no effect: no stage has two workers.", options.verification.verify)
    listens = "RECYCLE_LISTEN" in os.environ
    local = not listens and not options.is_remote
    gathered = options.checkpoints.gather_result
    if gathered == "auto" and options.members > 1 and all(p.is_meta for p in module.parameters()):
        gathered = False  # no process is to have room for the weights; this one has none, or no layers yet
    setup = RunSetup(
        grid,
        heartbeat.interval,
        stages,
        grid.pipelines * options.fsdp_size,
        call.arguments.get("weights_only"),
        outsiders=listens,
        has_run=has_run,
        may_restart=outside is None and call.fits and _may_restart(trainer, options.recovery.on_stage_lost),
        staggered=options.planning.technique.staggered and (not call.fits or steps_alone(trainer, parts, stages)),
        gathering=Gathering(gathered, FILE_BYTES if local else LARGE_BYTES, local),
        mesh_sizes=options.mesh_sizes,
    )
    return PreparedRun(call, setup, heartbeat, options, strategy.num_devices)


def _check_devices(devices: int, grid: Grid, options: Options) -> None:
    """Raises ConfigurationError for too few devices to begin, or too many."""
    if options.recovery.num_pipelines is None:
        return  # the grid is made of them
    least = options.recovery.min_pipelines or grid.pipelines
    complete = devices // grid.stages
    if devices > grid.num_workers:
        raise ConfigurationError(
            f"devices={devices} are more than the {counted(grid.num_workers, 'position')} of"
            f" num_pipelines={grid.pipelines} with {counted(grid.stages, 'stage')}: use"
            f" devices={grid.num_workers}, or num_pipelines={complete}."
        )
    if complete < least:
        fewer = f", or RecoveryOptions(min_pipelines={complete})" if complete else ""
        raise ConfigurationError(
            f"devices={devices} hold {complete} pipelines of {grid.stages} stages, and the run begins with {least}: use"
            f" devices={least * grid.stages}{fewer}."
        )


def _check_folders(planning: PlanningOptions) -> None:
    """Raises ConfigurationError if plans or a new profile cannot be written."""
    profile = None if planning.profile == "auto" else planning.profile
    for name, path in {"plan_library": planning.plan_library, "profile": profile}.items():
        if path is not None and (why := why_not_writable(path, is_folder=name == "plan_library")):
            raise ConfigurationError.for_option("PlanningOptions", name, str(path), f"{why}, or leave it out")


def _may_restart(trainer: pl.Trainer, on_stage_lost: str) -> bool:
    """Whether a run begins again from its newest checkpoint when a stage is lost."""
    whole = (c for c in trainer.checkpoint_callbacks if not getattr(c, "save_weights_only", False))
    return on_stage_lost == "restart" or (on_stage_lost == "auto" and any(whole))


def _prepare_callbacks(trainer: pl.Trainer, positions: Positions) -> HeartbeatCallback:
    """Checks the callbacks of ``trainer``; returns its, or a new, heartbeat."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    heartbeats = [callback for callback in callbacks if isinstance(callback, HeartbeatCallback)]
    if len(heartbeats) > 1:
        raise ConfigurationError(
            f"The Trainer has {len(heartbeats)} HeartbeatCallbacks, and a run follows one: give one."
        )
    if not heartbeats:
        heartbeats = [HeartbeatCallback()]
        callbacks += heartbeats
    for callback in callbacks:
        if isinstance(callback, FaultInjectionCallback):
            callback.check(positions)
    return heartbeats[0]


def _describe(parts: ModelParts, call: TrainerCall, is_outside: bool) -> None:
    """Finds the parts of the model; ``is_outside``: in a worker from outside.

    Raises ConfigurationError if they cannot be parts, or need ``setup()`` in a worker started by hand; and the user's
    own exceptions, also after ``setup()``.
    """
    try:
        parts.describe()
        return
    except ConfigurationError:
        raise  # what was described is wrong
    except Exception as error:  # raised again below, unless setup() makes what it lacks
        if is_outside:
            raise ConfigurationError(
                f"{type(parts.module).__name__}.configure_pipeline() raised {type(error).__name__}: {error}. In workers"
                " that are started by hand it cannot wait for setup(), as all would prepare the data at once: give the"
                " module what it needs as arguments."
            ) from error
        log.info("configure_pipeline() is called again after setup(): %s: %s", type(error).__name__, error)
    trainer, module = call.trainer, parts.module
    call.attach_data()
    datamodule = trainer.datamodule  # type: ignore[attr-defined]
    with _restoring(module), _restoring(datamodule):
        call_setup_hooks(trainer)
        parts.describe()


@contextmanager
def _restoring(owner: Any) -> Iterator[None]:
    """Restores the attributes and layers of ``owner`` at the end of the block.

    Objects made by setup() may be large, or open.
    """
    before = {} if owner is None else dict(vars(owner))
    try:
        yield
    finally:
        if owner is not None:
            parts_of_model = {name: value for name, value in vars(owner).items() if name in _OF_THE_MODEL}
            vars(owner).clear()
            vars(owner).update({**before, **parts_of_model})
