"""Options, the setup of a run, and what Trainer, data and module must be like.

All is checked before a step is run; docs/trainer_flags.md lists what is supported, with the reasons for the rest.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from operator import attrgetter
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.utilities import CombinedLoader, rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import Optimizer, SparseAdam

from lightning_recycle.arguments import (
    BOOLEAN,
    PATH,
    SECONDS,
    SWITCH,
    Check,
    OptionGroup,
    choice,
    integer,
    is_integer,
    is_number,
    option,
    require,
    shown_options,
    suggests_options,
)
from lightning_recycle.control.network.addresses_and_keys import http_address
from lightning_recycle.control.options import RecoveryOptions, VerificationOptions
from lightning_recycle.data.dataloaders import check_combination, check_dataloader
from lightning_recycle.devices import GRAPH_MAKER
from lightning_recycle.engines.worker_environment import Discovered
from lightning_recycle.errors import ConfigurationError, UnsupportedFeatureError, counted, suggestion
from lightning_recycle.model.chains import LayerPaths
from lightning_recycle.model.layers import names_by_parameter
from lightning_recycle.model.module import PipelineModule
from lightning_recycle.planning.grid import Grid, Positions, Worker
from lightning_recycle.planning.planner import PlanningOptions
from lightning_recycle.runtime.groups_and_transports import CommunicationOptions
from lightning_recycle.runtime.machine_errors import suspicion_of
from lightning_recycle.runtime.stage import can_be_reset, fully_sharded_modules
from lightning_recycle.session.lightning_internals import mode_of, saves_on_exception, synchronises_batchnorm
from lightning_recycle.tensor_memory import DATA_PARALLEL, TENSOR_PARALLEL, is_divided_by
from lightning_recycle.torch_internals import fsdp_parameters, is_compiled, tree_leaves

LARGE_BYTES = 1_000_000_000
"""Weights and optimizer states, of all stages together, from which on a result is large for workers elsewhere."""

FILE_BYTES = 50_000_000
"""The same for workers of this machine: files take less memory than messages."""


_BANDWIDTH = Check(
    lambda value: value is None or is_number(value, 0.0, above=True),
    "give a number of MB per second, more than 0, or None for no limit",
)
_SIGNALS = Check(
    lambda value: isinstance(value, bool) or (value is not None and PATH.accepts(value)),
    "use True, False or the path of a file",
)


@suggests_options
@dataclass(frozen=True)
class CheckpointOptions(OptionGroup):
    """How checkpoints are written, and where the result of a run is in the end.

    Args:
        save_distributed_checkpoint: whether a checkpoint is a folder to which each stage writes its part, instead of
            one file. ``python -m lightning.pytorch.utilities.consolidate_checkpoint`` turns such a folder into a file.
        background: whether checkpoints are written while the training goes on; "auto" unless your
            ``on_save_checkpoint`` sees the state of the whole model. At the step boundary one worker of each stage
            copies its state, and all go on. A checkpoint counts when it is complete. With True that hook sees the state
            of a stage.
        bandwidth: the most MB per second that a worker writes or sends for a checkpoint in the background; by default
            no limit.
        save_on_signal: whether SIGTERM, SIGUSR1 or Ctrl-C to the launching process ends ``fit`` with a checkpoint at
            the next step boundary. With True it is where Lightning keeps those of preempted jobs, ``hpc_ckpt_N.ckpt``
            in the Trainer's ``default_root_dir``, so that ``fit(ckpt_path="hpc")`` resumes it; a path names the file. A
            second signal ends the run at once.
        signal_timeout: seconds for such a checkpoint, then the run ends without it; and for a checkpoint in the
            background to wait for the one before, then it is skipped.
        on_checkpoint_error: when a checkpoint cannot be written, such as on a full disk: "warn", or "raise" an error
            that ends the run. The error is :class:`~lightning_recycle.errors.CheckpointError`. Earlier files are kept.
        gather_result: whether the launching process has the trained weights and optimizers after ``fit``; "auto" unless
            they exceed 1 GB and workers may be on other machines. They then stay in the workers, and are in their
            checkpoints. False: they stay, whatever their size. True: they come, also to each worker that is started by
            hand.

    Raises:
        ConfigurationError: for values that cannot work.
    """

    save_distributed_checkpoint: bool = option(False, BOOLEAN)
    background: Literal["auto"] | bool = option("auto", SWITCH)
    bandwidth: float | None = option(None, _BANDWIDTH)
    save_on_signal: bool | str | os.PathLike[str] = option(False, _SIGNALS)
    signal_timeout: float = option(60.0, SECONDS)
    on_checkpoint_error: Literal["warn", "raise"] = option("warn", choice("warn", "raise"))
    gather_result: Literal["auto"] | bool = option("auto", SWITCH)


_STATUS = Check(
    lambda value: isinstance(value, (bool, str)) or value in range(65536),
    "use True or False, or give 'host:port' or a port of at most 65535",
)


@suggests_options
@dataclass(frozen=True)
class MonitoringOptions(OptionGroup):
    """Status page, metrics and summary of a run.

    Args:
        status: whether ``recycle-status`` finds the run, or where its page is. ``"host:port"``, or a port of this
            machine, serves its page, ``/status`` and ``/metrics`` there as well, to all that can connect; so does the
            environment variable ``RECYCLE_HTTP`` with True. False for neither.
        run_metrics: whether loggers, the progress bar and callbacks see ``recycle/...`` metrics of the run itself, such
            as ``recycle/live_workers``.
        run_summary: whether ``fit`` ends with some lines on steps, loss, failures and the time that these cost.

    Raises:
        ConfigurationError: for values that cannot work.
    """

    status: bool | int | str = option(True, _STATUS)
    run_metrics: bool = option(False, BOOLEAN)
    run_summary: bool = option(True, BOOLEAN)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.status, bool):
            http_address(str(self.status), "MonitoringOptions(status)")


def _are_layers(value: Any) -> bool:
    names = [value] if isinstance(value, str) else value
    is_list = names is None or (isinstance(names, Sequence) and len(names) > 0)
    return is_list and all(isinstance(name, str) and name for name in names or ())


_LAYERS = Check(_are_layers, "give the path of a submodule, such as 'model.layers', or a list of paths")
_SEED = Check(
    lambda value: value is None or (is_integer(value) and abs(value) < 2**63), "give an integer of 64 bits, or None"
)
_AMOUNTS = Check(
    lambda value: value is None or (isinstance(value, Mapping) and all(is_number(n, 0.0) for n in value.values())),
    "give a mapping such as {'CPU': 1}, with a number of at least 0 for each resource",
)


@suggests_options
@dataclass(frozen=True)
class RayEngine(OptionGroup):
    """Workers as actors of Ray: ``ReCycleStrategy(engine=RayEngine(...))``.

    Args:
        resources_per_worker: what Ray reserves for a worker, by the name of the resource; by default one CPU, and one
            GPU unless the Trainer's accelerator is the CPU.

    Raises:
        ConfigurationError: for values that cannot work.
    """

    resources_per_worker: Mapping[str, float] | None = option(None, _AMOUNTS)


_ENGINE = Check(
    lambda value: value in ("local", "ray") or isinstance(value, RayEngine),
    "use 'local', 'ray' or RayEngine(...)",
    ("local", "ray"),
)


OTHER_NAMES = {
    **dict.fromkeys(("num_stages", "stages", "pp", "pp_size"), "Write pipeline_parallel_size={}"),
    **dict.fromkeys(("tp", "tp_size", "tensor_parallel"), "Write tensor_parallel_size={}"),
    **dict.fromkeys(("microbatches", "micro_batches", "chunks", "num_chunks"), "Write num_microbatches={}"),
    **dict.fromkeys(
        ("pipelines", "num_pipelines", "dp", "dp_size", "data_parallel_size"),
        "The number of pipelines follows from the Trainer's: devices * num_nodes = pipelines * pipeline_parallel_size",
    ),
    **dict.fromkeys(("num_workers", "workers", "world_size"), "Workers are the Trainer's devices * num_nodes"),
    **dict.fromkeys(("timeout", "heartbeat_timeout"), "Give the Trainer callbacks=[HeartbeatCallback(timeout={})]"),
    **dict.fromkeys(
        ("gradient_accumulation", "gradient_accumulation_steps", "accumulate_grad_batches"),
        "Give the Trainer accumulate_grad_batches={}",
    ),
    **dict.fromkeys(
        ("micro_batch_size", "microbatch_size"), "Write num_microbatches=N, for micro-batches of batch_size / N samples"
    ),
    **dict.fromkeys(("find_unused_parameters", "static_graph"), "Parameters without a gradient need no option here"),
    **dict.fromkeys(
        ("process_group_backend", "backend"), "Write communication=CommunicationOptions(transport='gloo' or 'nccl')"
    ),
    "precision": "Give the Trainer precision={}",
    "heartbeat": "Give the Trainer callbacks=[HeartbeatCallback(...)]",
}
"""Names that people give to options of the strategy, each with its remedy."""


@dataclass(frozen=True)
class Options(OptionGroup):
    """All options of the user.

    The arguments are described in :class:`~lightning_recycle.ReCycleStrategy`.

    Raises:
        ConfigurationError: for values that cannot work.
    """

    _owner = "ReCycleStrategy"

    pipeline_parallel_size: int | None = option(None, integer(1, otherwise="for the default"))
    num_microbatches: int | None = option(None, integer(1, otherwise="for the default"))
    tensor_parallel_size: int = option(1, integer(1))
    fsdp_size: int = option(1, integer(1))
    layers: LayerPaths = option(None, _LAYERS)
    seed: int | None = option(None, _SEED)
    engine: Literal["local", "ray"] | RayEngine = option("local", _ENGINE)
    planning: PlanningOptions = PlanningOptions()
    recovery: RecoveryOptions = RecoveryOptions()
    verification: VerificationOptions = VerificationOptions()
    checkpoints: CheckpointOptions = CheckpointOptions()
    communication: CommunicationOptions = CommunicationOptions()
    monitoring: MonitoringOptions = MonitoringOptions()

    def __post_init__(self) -> None:
        super().__post_init__()
        for item in fields(self):
            kind = type(item.default)
            given = getattr(self, item.name)
            if issubclass(kind, OptionGroup) and not isinstance(given, kind):
                if isinstance(given, OptionGroup):
                    shown = shown_options(given, type(given).__name__)
                    raise ConfigurationError(f"{self._owner}({item.name}={shown}): give {kind.__name__}(...).")
                self._refuse(item.name, f"give {kind.__name__}(...)")
        suspicion_of(self.recovery.machine_errors)
        numbers = ("num_pipelines", "min_pipelines", "max_pipelines")
        self.refuse_with_members(
            {
                "VerificationOptions(verify=...)": bool(self.verification.verify),
                **{f"RecoveryOptions({name}=...)": getattr(self.recovery, name) is not None for name in numbers},
                "RecoveryOptions(rebalance='always')": self.recovery.rebalance == "always",
            }
        )
        if self.recovery.num_pipelines is not None:
            self.choose_grid(0)
        if self.ray is not None:
            require("ray", f"{self._owner}(engine={self.engine!r})")

    def refuse_with_members(self, refused: Mapping[str, bool]) -> None:
        """Raises UnsupportedFeatureError for the first of these features in use, by name.

        Positions of a single process have them all.
        """
        for what in (name for name, is_used in refused.items() if is_used and self.members > 1):
            raise UnsupportedFeatureError(
                f"Positions of several processes (tensor_parallel_size={self.tensor_parallel_size},"
                f" fsdp_size={self.fsdp_size}) do not support {what} yet. Remove it, or set both to 1."
            )

    @property
    def mesh_sizes(self) -> tuple[int, int]:
        """Sizes of the mesh of a position: FSDP shards, tensor parallelism."""
        return self.fsdp_size, self.tensor_parallel_size

    @property
    def members(self) -> int:
        return math.prod(self.mesh_sizes)

    @property
    def ray(self) -> RayEngine | None:
        if isinstance(self.engine, RayEngine):
            return self.engine
        return RayEngine() if self.engine == "ray" else None

    @property
    def is_remote(self) -> bool:
        """Whether workers run on other machines, whose devices this process does not see."""
        return self.ray is not None

    def choose_grid(self, num_workers: int, batch_size: int | None = None, can_be_cut: bool = True) -> Grid:
        """The grid for ``num_workers`` devices; :meth:`~.ReCycleStrategy.choose_grid`.

        ``can_be_cut``: whether the model can have several stages.
        """
        stages, pipelines = self.pipeline_parallel_size, self.recovery.num_pipelines
        if pipelines is not None:
            stages = stages or 1
            num_workers = pipelines * stages
        if stages is None:
            stages = 2 if can_be_cut and num_workers % 2 == 0 and num_workers >= 4 else 1
        if num_workers % stages:
            fitting = [str(s) for s in range(1, num_workers // 2 + 1) if num_workers % s == 0] or ["1"]
            members = self.members
            of_members = f" of {members} processes each" if members > 1 else ""
            raise ConfigurationError(
                f"{counted(num_workers * members, 'device')} cannot be divided into pipelines of"
                f" pipeline_parallel_size={stages} stages{of_members}. Use {2 * stages * members} devices or another"
                f" multiple of {stages * members}, or pipeline_parallel_size={' or '.join(fitting)}."
            )
        microbatches = self.num_microbatches
        if microbatches is None:
            microbatches = 2 * stages if stages > 1 else 1
            if batch_size is not None:
                microbatches = max(m for m in range(1, microbatches + 1) if batch_size % m == 0)
        pipelines = num_workers // stages
        return Grid(pipelines, stages, microbatches, self.recovery.lanes(pipelines, microbatches))


class ResultRoute(Enum):
    """Route of a run's result to the launching process.

    A small one comes in messages through the coordinator. Of a large one, each stage on the same machine leaves its
    part in a file that is mapped into memory, without a second copy; elsewhere it stays, unless the user wants it.
    """

    MESSAGES = "messages"
    FILES = "files"
    STAYS = "stays"


@dataclass(frozen=True)
class Gathering:
    """The facts that decide on the route of the result.

    ``large_bytes``: the least size of a large result. ``folder``: for its files, made on first use; None without a
    place.
    """

    wanted: Literal["auto"] | bool = "auto"
    large_bytes: int = LARGE_BYTES
    local: bool = False
    folder: str | None = None

    @property
    def depends_on_size(self) -> bool:
        """Whether :meth:`route` asks for the size."""
        return self.wanted is not False and (self.local or self.wanted == "auto")

    def route(self, size: int) -> ResultRoute:
        """Route of a result of ``size`` bytes."""
        if self.wanted is False:
            return ResultRoute.STAYS
        if not self.depends_on_size or size < self.large_bytes:
            return ResultRoute.MESSAGES
        return ResultRoute.FILES if self.local else ResultRoute.STAYS


@dataclass(frozen=True)
class RunSetup:
    """Settings that all workers of a run share.

    Args:
        batch_pipelines: the number of pipelines that the DataLoader's ``batch_size`` was meant for, as in
            :attr:`data_grid`.
        outsiders: whether some workers' processes may go on afterwards: all workers then exchange the whole model at
            the end.
        has_run: whether this Trainer has had workers before.
        may_restart: whether it begins again from its newest checkpoint when a stage is lost; then checkpoints hold
            users' objects. ``restarts``: whether it does so now.
        staggered: whether a stage steps before the others hold their gradients: the user's option, unless the stages
            must exchange facts first.
        mesh_sizes: of a position, FSDP shards and tensor parallelism.
        name: differs from that of any other run; its restarts keep it.
    """

    grid: Grid
    heartbeat_interval: float
    parts: tuple[range, ...]
    batch_pipelines: int
    weights_only: bool | None
    profiles: bool = False
    outsiders: bool = False
    has_run: bool = False
    may_restart: bool = False
    restarts: bool = False
    staggered: bool = True
    gathering: Gathering = field(default_factory=Gathering)
    mesh_sizes: tuple[int, int] = (1, 1)
    name: str = field(default_factory=lambda: uuid.uuid4().hex, compare=False)

    @property
    def positions(self) -> Positions:
        return Positions(self.grid, math.prod(self.mesh_sizes))

    @property
    def data_grid(self) -> Grid:
        """The grid by which data is divided.

        Members that FSDP divides a position among read batches of their own, so each of them counts as a pipeline.
        """
        grid, shards = self.grid, self.mesh_sizes[0]
        return replace(grid, pipelines=grid.pipelines * shards, lanes=grid.lanes * shards)

    def data_worker(self, rank: int) -> Worker:
        """The place of ``rank`` in :attr:`data_grid`."""
        positions, (shards, tensor) = self.positions, self.mesh_sizes
        place = positions.position(rank)
        return Worker(place.pipeline * shards + positions.member(rank) // tensor, place.stage)


@dataclass(frozen=True)
class WorkerIdentity:
    """Identity of a worker in a run.

    ``incarnation``: number of earlier processes at its position. ``host``: its address for data.
    """

    rank: int
    incarnation: int
    device: int
    host: str = "127.0.0.1"


_UNRESOLVED = re.compile(r"Parallelize plan key ('.*?') could not be resolved")
_GRAPHED = "make_graphed_callables.<locals>"  # in the name of the forward of what it returns
_REPLACED = (
    "precision_plugin",
    "fit_loop",
    "fit_loop.epoch_loop",
    "fit_loop.epoch_loop.automatic_optimization",
    "fit_loop.epoch_loop.manual_optimization",
)
"""Parts of the Trainer in whose place this package works, or by whose methods it does not go."""

_LIGHTNING = ("lightning.pytorch.", "pytorch_lightning.", "lightning_recycle.")
_PRECISIONS = ("32-true", "64-true", "bf16-true", "bf16-mixed", "16-mixed")


def check_trainer(trainer: pl.Trainer, outside: Discovered | None, is_remote: bool) -> None:
    """Refuses settings of the Trainer that the strategy cannot honour.

    Raises ConfigurationError if the Trainer has no device for this worker.
    """
    precision = trainer.precision
    if precision not in _PRECISIONS:
        raise UnsupportedFeatureError(
            f"strategy='recycle' does not support precision={precision!r}: it is untested. Use one of"
            f" {', '.join(map(repr, _PRECISIONS))}.{suggestion(precision, _PRECISIONS)}"
        )
    if trainer.num_nodes != 1 and outside is None and not is_remote:
        raise UnsupportedFeatureError(
            f"strategy='recycle' cannot start workers on num_nodes={trainer.num_nodes} machines by itself: start this"
            " script with recycle-run, or a recycle-coordinator and this script once for each worker, with"
            " RECYCLE_COORDINATOR=host:port; or use ReCycleStrategy(engine='ray')."
        )
    if synchronises_batchnorm(trainer):
        raise UnsupportedFeatureError(
            "strategy='recycle' does not support sync_batchnorm=True: there is no process group to synchronise over,"
            " and BatchNorm sees one micro-batch. Use LayerNorm, GroupNorm or RMSNorm, or leave sync_batchnorm=False."
        )
    _check_finders(trainer)
    for path in _REPLACED:
        part = type(attrgetter(path)(trainer))
        if not part.__module__.startswith(_LIGHTNING):
            raise UnsupportedFeatureError(
                f"strategy='recycle' does not support {part.__name__} as trainer.{path}: it does that part of the work"
                " itself. Use hooks of the module or of callbacks instead."
            )
    integer(1).checked("Trainer", "accumulate_grad_batches", trainer.accumulate_grad_batches)
    if outside is not None:
        outside.check_device(trainer.num_devices)
        for callback in filter(saves_on_exception, trainer.checkpoint_callbacks):
            raise UnsupportedFeatureError(
                f"strategy='recycle' does not support {type(callback).__name__} on exceptions in a worker that was"
                " started by hand or by a cluster manager: only a launching process can make all workers save. Use"
                " ModelCheckpoint(every_n_train_steps=...)."
            )


def _check_finders(trainer: pl.Trainer) -> None:
    """Raises UnsupportedFeatureError for callbacks that tune."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, LearningRateFinder):
            search, value = "lr_find", "learning rate"
        elif isinstance(callback, BatchSizeFinder):
            search, value = "scale_batch_size", "batch size (of one pipeline)"
        else:
            continue
        raise UnsupportedFeatureError(
            f"strategy='recycle' does not support {type(callback).__name__} and Tuner.{search}, whose trials rewind a"
            f" training within one process. Tune on one device first, Tuner(Trainer(devices=1)).{search}(model, ...),"
            f" and give this run the {value} that it finds."
        )


def check_members(trainer: pl.Trainer, options: Options) -> None:
    """Refuses features that positions of several processes lack."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    averages = (StochasticWeightAveraging, WeightAveraging, ModelPruning, BaseFinetuning)
    used = [type(callback).__name__ for callback in callbacks if isinstance(callback, averages)]
    refused = {
        "manual optimization": not trainer.lightning_module.automatic_optimization,
        "precision='16-mixed'": trainer.precision == "16-mixed",
        f"the callback {', '.join(used)}": bool(used),
    }
    options.refuse_with_members(refused)
    module = trainer.lightning_module
    builds_layers = PipelineModule if isinstance(module, PipelineModule) else pl.LightningModule
    if not is_overridden("configure_model", module, builds_layers):
        sizes = {"tensor_parallel_size": options.tensor_parallel_size, "fsdp_size": options.fsdp_size}
        given = ", ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)
        raise ConfigurationError(
            f"With {given}, {type(module).__name__} needs a configure_model() that divides its layers"
            " over self.device_mesh, or the processes of a position would do the same work: call parallelize_module()"
            " or fully_shard() there, or leave the option out."
        )


def check_shards(module: pl.LightningModule, sizes: tuple[int, int], warns: bool) -> None:
    """Refuses a ``fully_shard()`` that steps cannot use or redo."""
    name, tensor = type(module).__name__, sizes[1]
    sharded = list(fully_sharded_modules(module.modules()))
    if sharded and not can_be_reset():
        raise UnsupportedFeatureError(
            f"{name}.configure_model() calls fully_shard(), and torch {torch.__version__} cannot begin a step again in"
            " which a worker was lost. Use torch 2.13 or newer, or tensor_parallel_size instead of fsdp_size."
        )
    if module in sharded:
        raise UnsupportedFeatureError(
            f"{name}.configure_model() calls fully_shard(self), whose forward a step does not call. Shard its layers:"
            " fully_shard(self.model, mesh=self.device_mesh['data_parallel'])."
        )
    if warns and tensor > 1 and not any(is_divided_by(p, TENSOR_PARALLEL) for p in module.parameters()):
        rank_zero_warn(
            f"configure_model() of {name} makes no layer parallel over self.device_mesh['tensor_parallel']:"
            f" {tensor} processes of each position do the same work."
        )


def check_sharded_layers(module: pl.LightningModule, is_elsewhere: Callable[[str], bool], shards: int) -> None:
    """Checks FSDP2's result on the layers of this stage.

    Raises:
        ConfigurationError: for parameters that the members of a position would train apart.
        UnsupportedFeatureError: if layers of several stages are sharded as one module.
    """
    name = type(module).__name__
    unsharded = [
        n
        for n, p in module.named_parameters()
        if p.requires_grad and not is_divided_by(p, DATA_PARALLEL) and not is_elsewhere(n)
    ]
    if shards > 1 and unsharded:
        raise ConfigurationError(
            f"With fsdp_size={shards} the members of a position compute different samples, and configure_model() of"
            f" {name} leaves parameters that each of them would train alone: {', '.join(unsharded[:5])}. Call"
            " fully_shard(..., mesh=self.device_mesh['data_parallel']) for the modules that have them, or freeze them."
            " (A LayerSpec is built later; make layers under torch.device('meta') instead.)"
        )
    own_parameters, names = set(module.parameters()), {submodule: path for path, submodule in module.named_modules()}
    for submodule in fully_sharded_modules(module.modules()):
        if not own_parameters.issuperset(fsdp_parameters(submodule)):
            raise UnsupportedFeatureError(
                f"configure_model() calls fully_shard() for {name}.{names[submodule]}, whose layers are on several"
                " stages: call it for each layer instead."
            )


@contextlib.contextmanager
def plans_checked(module: pl.LightningModule) -> Iterator[None]:
    """Refuses plans of ``parallelize_module()`` that have no effect.

    Raises ConfigurationError if they name modules that do not exist, and no layer is made parallel in the block (torch
    warns of each such name and goes on), or if tied weights are separated there.
    """
    names = names_by_parameter(module.named_parameters(remove_duplicate=False))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:  # with the user's filters
        warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    found = [match[1] for warning in caught if (match := _UNRESOLVED.match(str(warning.message)))]
    if found and not any(is_divided_by(p, TENSOR_PARALLEL) for p in module.parameters()):
        raise ConfigurationError(
            f"{type(module).__name__}.configure_model() makes no layer parallel: its plan names {', '.join(found)}, and"
            " the module that it gives to parallelize_module() has no such parts. Name them from that module on, as in"
            " its named_modules()."
        )
    now = dict(module.named_parameters(remove_duplicate=False))
    for tied in names:
        if all(name in now for name in tied) and len({id(now[name]) for name in tied}) > 1:
            raise ConfigurationError(
                f"{type(module).__name__}.configure_model() separates the tied weights {' and '.join(tied)}:"
                f" parallelize_module() makes a parameter of each. Tie them again after it: self.{tied[1]} ="
                f" self.{tied[0]}. Call fully_shard() for one module that has both."
            )


def check_data_hook(module: pl.LightningModule, hook: str) -> None:
    """Raises ConfigurationError unless ``module`` has this ``hook`` for its data."""
    if not is_overridden(hook, module):
        raise ConfigurationError(
            f"The Trainer was given no data, and {type(module).__name__} has no {hook}(): give a DataLoader, as in"
            " trainer.fit(model, DataLoader(...)), or datamodule=..., or implement that method."
        )


def check_loaders(loaders: Any, microbatches: int | None) -> None:
    """Refuses data without addresses."""
    found = loaders_in(loaders)
    for loader in found:
        check_dataloader(loader, microbatches)
    if microbatches is not None or (isinstance(loaders, CombinedLoader) and mode_of(loaders) != "sequential"):
        check_combination(found)


def loaders_in(loaders: Any) -> list[Any]:
    """The single loaders of an argument of the Trainer's entry point."""
    if loaders is None or isinstance(loaders, pl.LightningDataModule):
        return []
    return list(loaders.flattened if isinstance(loaders, CombinedLoader) else tree_leaves(loaders))


def check_trained(module: pl.LightningModule, trains: bool) -> None:
    """Raises ConfigurationError unless a stage has something to train."""
    if not trains:
        raise ConfigurationError(
            f"No parameter of {type(module).__name__} requires a gradient, so there is nothing to train: set"
            " requires_grad = True for those that are to be trained."
        )


def check_loss(module: pl.LightningModule) -> None:
    """Raises ConfigurationError for a PipelineModule without loss."""
    if isinstance(module, PipelineModule) and type(module).loss is PipelineModule.loss and "loss" not in vars(module):
        raise ConfigurationError(
            f"{type(module).__name__} must implement loss(self, output, target), the mean over a micro-batch, to be"
            " trained. (A submodule self.loss = ... is hidden by the method: give it another name, and call it there.)"
        )


def check_graphs(module: pl.LightningModule, stages: int) -> None:
    """Refuses pipeline layers that torch replays from one CUDA graph.

    Such a graph has one set of activations. In a pipeline the next micro-batch goes forward before the previous one has
    come back, and its gradients would be those of other activations, without an error.
    """
    graphed = (name for name, part in module.named_modules() if _GRAPHED in getattr(part.forward, "__qualname__", ""))
    if stages > 1 and (name := next(graphed, None)) is not None:
        raise UnsupportedFeatureError(
            f"{type(module).__name__}.{name} was made by {GRAPH_MAKER}, which has room for the"
            " activations of one micro-batch; a pipeline has several in flight. Use torch.compile(layer,"
            ' mode="reduce-overhead"), or one stage.'
        )


def warn_of_lost_compilation(module: pl.LightningModule) -> None:
    """Warns of modules that were compiled in place in the launching process."""
    kind = type(module).__name__
    names = [f"{kind}.{name}" if name else kind for name, part in module.named_modules() if is_compiled(part)]
    if names:
        rank_zero_warn(
            f"{', '.join(names[:3])}{' ...' if len(names) > 3 else ''} will run without being"
            " compiled: module.compile() holds in the process that calls it. Call it in configure_model(), which"
            " workers run, or use torch.compile(module), which they get."
        )


@contextlib.contextmanager
def several_optimizers_refused(module: pl.LightningModule) -> Iterator[None]:
    """Raises ConfigurationError for several optimizers of a PipelineModule."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(module, PipelineModule) or "multiple optimizers" not in str(error):
            raise
        raise ConfigurationError(
            f"{type(module).__name__}.configure_optimizers() returned several optimizers; a PipelineModule has one,"
            " with any number of parameter groups. Several optimizers need a LightningModule with manual optimization"
            " and one stage (pipeline_parallel_size=1)."
        ) from None


def check_optimizers(optimizers: list[Optimizer], several: bool = False) -> None:
    """Refuses a module without optimizer, with several unless they may be, or sparse.

    Raises ConfigurationError or UnsupportedFeatureError.
    """
    if not optimizers or (len(optimizers) > 1 and not several) or not optimizers[0].param_groups:
        raise ConfigurationError(
            "configure_optimizers() returned no optimizer; the strategy needs"
            f" {'at least' if several else 'exactly'} one (with any number of parameter groups): return for example"
            " torch.optim.AdamW(self.parameters())."
        )
    for optimizer in optimizers if not several else ():
        if isinstance(optimizer, SparseAdam):
            raise UnsupportedFeatureError(
                "configure_optimizers() returned SparseAdam, which needs sparse gradients; the strategy adds them up in"
                " dense buffers. Use torch.optim.Adam, and sparse=False in embeddings."
            )
