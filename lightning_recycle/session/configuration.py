"""Options of checkpoints, monitoring and strategy, and the setup of a run."""

from __future__ import annotations

import math
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any, Literal

from lightning_recycle.arguments import (
    BOOLEAN,
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
    suggests_options,
)
from lightning_recycle.control.network.addresses import http_address
from lightning_recycle.control.options import RecoveryOptions, VerificationOptions
from lightning_recycle.errors import ConfigurationError, UnsupportedFeatureError, counted
from lightning_recycle.model.chains import LayerPaths
from lightning_recycle.planning.grid import Grid, Positions, Worker
from lightning_recycle.planning.planner import PlanningOptions
from lightning_recycle.runtime.direct_transports import CommunicationOptions
from lightning_recycle.runtime.machine_errors import suspicion_of

LARGE_BYTES = 1_000_000_000
"""Weights and optimizer states, of all stages together, from which on a result is large for workers elsewhere."""

FILE_BYTES = 50_000_000
"""The same for workers of this machine: files take less memory than messages."""


_BANDWIDTH = Check(
    lambda value: value is None or is_number(value, 0.0, above=True),
    "give a number of MB per second, more than 0, or None for no limit",
)
_SIGNALS = Check(lambda value: isinstance(value, (bool, str, os.PathLike)), "use True, False or the path of a file")


@suggests_options
@dataclass(frozen=True)
class CheckpointOptions(OptionGroup):
    """How checkpoints are written, and where the result of a run is in the end.

    Args:
        save_distributed_checkpoint: whether a checkpoint is a folder to which each stage writes its part, instead of
            one file. ``python -m lightning.pytorch.utilities.consolidate_checkpoint`` turns such a folder into a file.
        background: whether checkpoints are written while the training goes on. At the step boundary one worker of each
            stage copies its state, and all go on. A checkpoint counts when it is complete. "auto": all wait only where
            your ``on_save_checkpoint`` sees the state of the whole model; with True it sees that of a stage.
        bandwidth: the most MB per second that a worker writes or sends for a checkpoint in the background.
        save_on_signal: whether SIGTERM, SIGUSR1 or Ctrl-C to the launching process ends ``fit`` with a checkpoint at
            the next step boundary. With True it is where Lightning keeps those of preempted jobs, ``hpc_ckpt_N.ckpt``
            in the Trainer's ``default_root_dir``, so that ``fit(ckpt_path="hpc")`` resumes it; a path names the file. A
            second signal ends the run at once.
        signal_timeout: seconds for such a checkpoint; then the run ends without it.
        on_checkpoint_error: when a checkpoint cannot be written, such as on a full disk: "warn", or "raise" an error
            that ends the run. The error is :class:`~lightning_recycle.errors.CheckpointError`. Earlier files are kept.
        gather_result: whether the launching process has the trained weights and optimizers after ``fit``. "auto": yes,
            but if they exceed 1 GB where workers are started by hand, they stay in the workers, and are in their
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
        status: whether ``recycle-status`` of this user finds the run on this machine. ``"host:port"``, or a port of
            this machine, serves its page, ``/status`` and ``/metrics`` there as well, to all that can connect; so does
            the environment variable ``RECYCLE_HTTP`` with True. False for neither.
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
    """All that the user configured.

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
            if issubclass(kind, OptionGroup) and not isinstance(getattr(self, item.name), kind):
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
        parts: the layers of each stage.
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
