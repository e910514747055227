"""The user's options, what follows from them for all workers of a run, and the place of one worker."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_recycle.arguments import is_integer, is_number
from lightning_recycle.control.network.addresses import http_address
from lightning_recycle.control.plans.layout_choice import Adapt
from lightning_recycle.control.protocol.corruption import POLICIES
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.model.chains import Pipeline
from lightning_recycle.model.partition import Partition
from lightning_recycle.planning.grid import Grid
from lightning_recycle.planning.layouts.technique_selection import Switch
from lightning_recycle.planning.library import PlanLibrary
from lightning_recycle.planning.planner import Planner, get_planner
from lightning_recycle.planning.problem import Technique
from lightning_recycle.planning.profile import MemoryLimit, check_memory_limit
from lightning_recycle.runtime.machine_errors import MachineErrors, suspicion_of
from lightning_recycle.session.result_policy import Gathering, GatherResult

__all__ = ["Options", "Place", "RunSetup"]

_BUCKET_CAP_MB = 25.0  # as in DistributedDataParallel


@dataclass(frozen=True)
class Options:
    """What the user configured; the arguments are described in :class:`~lightning_recycle.ReCycleStrategy`.

    Raises:
        ConfigurationError: for values that cannot work.
    """

    pipeline_parallel_size: int | None
    num_microbatches: int | None
    planner: str | Planner
    plan_library: str | os.PathLike[str] | PlanLibrary | None
    partition: Partition
    layer_seconds: list[float] | None
    profile: str | os.PathLike[str] | None
    decoupled: Switch
    staggered: Switch
    shadow: str
    restart_workers: bool
    max_restarts: int
    normalize: bool
    on_stage_lost: str
    in_flight_limit: int | None
    save_distributed_checkpoint: bool
    seed: int | None
    save_on_signal: bool | str | os.PathLike[str]
    signal_timeout: float
    start_timeout: float
    machine_errors: MachineErrors
    machine_error_retries: int
    on_checkpoint_error: str
    run_metrics: bool
    run_summary: bool
    pipeline: Pipeline = None
    memory: MemoryLimit = "auto"
    activation_checkpointing: str = "auto"
    bucket_cap_mb: float | None = None
    transport: str = "gloo"
    standby_connections: bool = True
    gather_result: GatherResult = "auto"
    status: bool | str = True
    engine: str = "local"
    resources_per_worker: Mapping[str, float] | None = None
    adapt: Adapt = "auto"
    on_corruption: str = "evict"
    check_every: int | str = "auto"
    verify: float = 0.0

    def __post_init__(self) -> None:
        for name in ("pipeline_parallel_size", "num_microbatches", "in_flight_limit"):
            if getattr(self, name) is not None and not is_integer(getattr(self, name), 1):
                self._refuse(name, "give an integer of at least 1, or None")
        for name in ("signal_timeout", "start_timeout"):
            if not is_number(getattr(self, name), 0.0, above=True):
                self._refuse(name, "give a number of seconds, more than 0")
        if self.bucket_cap_mb is not None and not is_number(self.bucket_cap_mb, 0.0, above=True):
            self._refuse("bucket_cap_mb", "give a number of MiB, more than 0, or None for 25")
        for name in ("max_restarts", "machine_error_retries"):
            if not is_integer(getattr(self, name), 0):
                self._refuse(name, "give an integer of at least 0")
        if self.check_every != "auto" and not is_integer(self.check_every, 0):
            self._refuse("check_every", "give 'auto', a number of steps, or 0 for no checks")
        if not is_number(self.verify, 0.0) or self.verify > 1:
            self._refuse("verify", "give a share of the time between 0 (no checks) and 1")
        suspicion_of(self.machine_errors)
        if not isinstance(self.status, bool):
            http_address(str(self.status), "ReCycleStrategy(status)")
        for name, choices in (
            ("shadow", ("device", "host")),
            ("on_stage_lost", ("raise", "restart")),
            ("on_checkpoint_error", ("warn", "raise")),
            ("activation_checkpointing", ("auto", "never")),
            ("transport", ("gloo", "nccl")),
            ("adapt", ("auto", "reroute", "layers")),
            ("engine", ("local", "ray")),
            ("on_corruption", POLICIES),
        ):
            if getattr(self, name) not in choices:
                self._refuse(name, f"use {' or '.join(map(repr, choices))}")
        if not isinstance(self.standby_connections, bool):
            self._refuse("standby_connections", "use True or False")
        for name in ("gather_result", "decoupled", "staggered"):
            if getattr(self, name) not in ("auto", True, False):
                self._refuse(name, "use 'auto', True or False")
        if not all(is_number(amount, 0.0) for amount in (self.resources_per_worker or {}).values()):
            self._refuse("resources_per_worker", "give a number of at least 0 for each resource")
        check_memory_limit(self.memory)
        get_planner(self.planner)
        names = [self.pipeline] if isinstance(self.pipeline, str) else self.pipeline
        is_list = names is None or (isinstance(names, Sequence) and len(names) > 0)
        if not is_list or not all(isinstance(name, str) and name for name in names or ()):
            self._refuse("pipeline", "give the path of a submodule, such as 'model.layers', or a list of paths")

    @property
    def bucket_bytes(self) -> float:
        """The most bytes of a bucket of gradients."""
        return (_BUCKET_CAP_MB if self.bucket_cap_mb is None else self.bucket_cap_mb) * 2**20

    @property
    def technique(self) -> Technique:
        """The techniques that may be used; where ``decoupled`` is "auto", plans choose."""
        return Technique(decoupled=bool(self.decoupled), staggered=bool(self.staggered))

    def tries_splitting(self, stages: int) -> bool:
        """Whether workers try what it costs to split the backwards that plans fuse."""
        return self.decoupled == "auto" and stages > 1  # one stage has no idle slots

    def choose_grid(self, num_workers: int, batch_size: int | None = None, can_be_cut: bool = True) -> Grid:
        """The grid for ``num_workers`` devices: see :meth:`~lightning_recycle.ReCycleStrategy.choose_grid`.

        ``can_be_cut``: whether the model can have several stages.
        """
        stages = self.pipeline_parallel_size
        if stages is None:
            stages = 2 if can_be_cut and num_workers % 2 == 0 and num_workers >= 4 else 1
        if num_workers % stages:
            divisors = [s for s in range(1, num_workers + 1) if num_workers % s == 0]
            raise ConfigurationError(
                f"{num_workers} devices cannot be divided into pipelines of pipeline_parallel_size={stages} stages."
                f" Use a number of devices that is a multiple of {stages}, or pipeline_parallel_size from {divisors}."
            )
        microbatches = self.num_microbatches
        if microbatches is None:
            microbatches = 2 * stages if stages > 1 else 1
            if batch_size is not None:
                microbatches = max(m for m in range(1, microbatches + 1) if batch_size % m == 0)
        return Grid(num_workers // stages, stages, microbatches)

    def _refuse(self, name: str, remedy: str) -> None:
        raise ConfigurationError(f"ReCycleStrategy({name}={getattr(self, name)!r}): {remedy}.")

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "plan_library": None}  # it holds a lock, and no worker plans


@dataclass(frozen=True)
class RunSetup:
    """What is the same for all workers of a run.

    Args:
        grid: the grid of the run.
        heartbeat_interval: seconds between two heartbeats.
        parts: the layers of each stage.
        batch_pipelines: the number of pipelines that the DataLoader's ``batch_size`` was meant for.
        weights_only: the argument of the Trainer's entry point.
        profiles: whether the model is to be measured.
        outsiders: whether there may be workers whose process goes on afterwards: all workers then exchange the whole
            model in the end.
        has_run: whether this Trainer has had workers before.
        restarts: whether it begins again, after the loss of a stage.
        staggered: whether a stage steps before the others hold their gradients: the user's option, unless the stages
            must know something of each other first.
        gathering: where the weights go in the end.
    """

    grid: Grid
    heartbeat_interval: float
    parts: tuple[range, ...]
    batch_pipelines: int
    weights_only: bool | None
    profiles: bool = False
    outsiders: bool = False
    has_run: bool = False
    restarts: bool = False
    staggered: bool = True
    gathering: Gathering = field(default_factory=Gathering)


@dataclass(frozen=True)
class Place:
    """What differs between the workers of a run.

    Args:
        rank: position in the grid.
        incarnation: 0 for the first process of its position, 1 for its replacement, ...
        device: index of its device.
        host: the address at which it exchanges data.
    """

    rank: int
    incarnation: int
    device: int
    host: str = "127.0.0.1"
