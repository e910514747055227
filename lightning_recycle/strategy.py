"""``Trainer(strategy="recycle")``: what Lightning asks of a strategy, answered by the control plane and the executor.

In the launching process the strategy only configures: its launcher starts the workers and waits. In a worker it owns
the executor. Collectives of Lightning's (barrier, broadcast, reduce, ...) go through the coordinator, which makes them
transparent to failures; there is no torch process group that they could use.
"""

from __future__ import annotations

import csv
import gc
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_recycle.errors import ConfigurationError, UnsupportedFeatureError
from lightning_recycle.loops import PipelineEpochLoop
from lightning_recycle.module import PipelineModule, global_seed, stage_layers
from lightning_recycle.planning.grid import Grid, Worker
from lightning_recycle.planning.planner import get_planner
from lightning_recycle.planning.schedule import Schedule
from lightning_recycle.resilience.client import ControlClient
from lightning_recycle.resilience.membership import RESULT, leader, stage_leads
from lightning_recycle.resilience.messages import Event
from lightning_recycle.runtime.communicator import Communicator
from lightning_recycle.runtime.data import MicrobatchLoader, StepHandle
from lightning_recycle.runtime.executor import Executor, StepResult
from lightning_recycle.runtime.gradients import GradientBuffers
from lightning_recycle.runtime.profiling import StageProfiler
from lightning_recycle.runtime.stage import Stage

__all__ = ["ReCycleStrategy", "WorkerContext"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerContext:
    """What a worker process knows before Lightning starts in it."""

    rank: int
    grid: Grid
    client: ControlClient
    host: str
    profiles: bool


class ReCycleStrategy(ParallelStrategy):
    """Pipeline and data parallelism that goes on, with the same result, when workers die.

    ``devices * num_nodes`` workers form D pipelines of S stages; the rank of the worker at pipeline d, stage s is
    ``d * S + s``. The DataLoader's ``batch_size`` is per pipeline and is split into M micro-batches.

    Args:
        pipeline_parallel_size: S. By default 2 when the number of devices is even and at least 4, else 1.
        num_microbatches: M. By default 2 * S (or the largest divisor of the batch size below, where that is known).
        planner: name of the planner, or an object with ``plan(problem)``.
        plan_library: a directory (or :class:`~lightning_recycle.planning.library.PlanLibrary`) where plans are looked
            for before they are made, and stored. Use it with a ``profile``: plans are found by their costs.
        profile: "auto" measures the model in the first steps and writes ``profile.json`` to the Trainer's
            ``default_root_dir``. A path is read for the costs of all plans if it exists, else measured and written.
        decoupled: split the backward, so that weight gradients fill idle slots.
        staggered: a stage steps its optimizer when its own gradient is complete, so that the next step begins there
            while others end this one. Costs a copy of the stage's parameters and of its gradients. With clipping by
            norm every stage waits for all others all the same.
        in_flight_limit: the most micro-batches that a worker may hold between F and W; by default 2 * S - 1 without a
            failure and no limit with one.
        seed: of all randomness; by default the one given to ``seed_everything``, else 0.

    Attributes:
        history: after ``fit``, what happened: a list of :class:`~lightning_recycle.resilience.messages.Event`.
        schedules: after ``fit``, the schedule of each generation.

    Raises:
        ConfigurationError: for values that cannot work.
    """

    strategy_name = "recycle"
    is_distributed = False  # for Lightning's samplers: the data is addressed, nothing may be injected
    owns_layers = True

    def __init__(
        self,
        pipeline_parallel_size: int | None = None,
        num_microbatches: int | None = None,
        planner: Any = "heuristic",
        plan_library: Any = None,
        profile: str | os.PathLike[str] | None = None,
        decoupled: bool = True,
        staggered: bool = True,
        in_flight_limit: int | None = None,
        seed: int | None = None,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(accelerator=accelerator, checkpoint_io=checkpoint_io, precision_plugin=precision_plugin)
        for name, value in (
            ("pipeline_parallel_size", pipeline_parallel_size),
            ("num_microbatches", num_microbatches),
            ("in_flight_limit", in_flight_limit),
        ):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ConfigurationError(f"ReCycleStrategy({name}={value!r}): give an integer of at least 1, or None.")
        get_planner(planner)
        self.pipeline_parallel_size = pipeline_parallel_size
        self.num_microbatches = num_microbatches
        self.planner = planner
        self.plan_library = plan_library
        self.profile = profile
        self.decoupled = decoupled
        self.staggered = staggered
        self.in_flight_limit = in_flight_limit
        self.seed = seed
        self.history: list[Event] = []
        self.schedules: list[Schedule] = []
        self.executor: Executor | None = None
        self.gradient_norm = 0.0
        self._context: WorkerContext | None = None
        self._loader: MicrobatchLoader | None = None
        self._transfers = True

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        """The name is registered by importing the package."""

    # ------------------------------------------------------------------ the grid

    def choose_grid(self, num_workers: int, batch_size: int | None = None) -> Grid:
        """Returns the grid for ``num_workers`` devices; ``batch_size`` (per pipeline) helps to choose M if it is known.

        Raises:
            ConfigurationError: if the devices cannot be divided into pipelines.
        """
        stages = self.pipeline_parallel_size
        if stages is None:
            stages = 2 if num_workers % 2 == 0 and num_workers >= 4 else 1
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

    @property
    def grid(self) -> Grid:
        assert self._context is not None, "the grid is known in the workers"
        return self._context.grid

    @property
    def worker(self) -> Worker:
        """The position of this worker."""
        return self.grid.worker(self.global_rank)

    @property
    def live_workers(self) -> tuple[int, ...]:
        """Ranks of the live workers of the current generation."""
        if self._context is None:
            return ()
        return self._context.client.roster or tuple(range(self.grid.num_workers))

    @property
    def global_batch_size(self) -> int:
        """Samples per step."""
        assert self._loader is not None
        return int(self._loader.batch_size) * self.grid.pipelines

    # ------------------------------------------------------------------ processes

    @override
    def _configure_launcher(self) -> None:
        from lightning_recycle.launcher import SupervisorLauncher

        self._launcher = SupervisorLauncher(self)

    def enter_worker(self, context: WorkerContext) -> None:
        """Makes this copy of the strategy the one of a worker process."""
        self._context = context
        self._launcher = None
        self._follow_leader()

    def _follow_leader(self) -> None:
        rank_zero_only.rank = 0 if self.is_global_zero else max(1, self.global_rank)  # type: ignore[attr-defined]

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    @override
    def global_rank(self) -> int:
        return self._context.rank if self._context is not None else 0

    @property
    @override
    def local_rank(self) -> int:
        return self.global_rank

    @property
    @override
    def node_rank(self) -> int:
        return 0

    @property
    @override
    def world_size(self) -> int:
        return len(self.parallel_devices) if self.parallel_devices else 1

    @property
    @override
    def is_global_zero(self) -> bool:
        """Whether this process speaks for the run: the leader, which changes when it dies; the supervisor before."""
        return self._context is None or self.global_rank == leader(self.grid, self.live_workers)

    # ------------------------------------------------------------------ setup

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self._context is not None
        assert self.accelerator is not None
        module = self.lightning_module
        assert isinstance(module, PipelineModule)
        check_trainer(trainer)
        self.accelerator.setup(trainer)
        context, worker, grid = self._context, self.worker, self.grid
        seed = global_seed() if self.seed is None else self.seed
        owned = stage_layers(len(module.layers), grid.stages)[worker.stage]
        module.keep_layers(owned)
        with self.precision_plugin.module_init_context():
            module.materialize(owned, seed)
        self.model = self.precision_plugin.convert_module(module)
        self.model_to_device()
        check_parameters(module, worker, grid)
        self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        check_optimizers(self.optimizers)
        self.precision_plugin.clip_grad_by_norm = self._clip_grad_by_norm  # type: ignore[method-assign]

        is_last = worker.stage == grid.stages - 1
        parameters = list(module.parameters())
        stage = Stage(
            [module.layers[i] for i in owned],
            owned.start,
            seed,
            self.root_device,
            loss=module.loss if is_last else None,
            forward_context=self._forward_context,
        )
        hooks = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
        sources = [source for source in (module, getattr(trainer, "datamodule", None)) if source is not None]
        self._transfers = self.root_device.type != "cpu" or any(is_overridden(h, s) for h in hooks for s in sources)
        self.executor = Executor(
            worker,
            grid,
            context.client,
            Communicator(context.rank, context.host, self.root_device, context.client),
            stage,
            parameters,
            GradientBuffers(parameters, self.root_device),
            self._split,
            staggered=self.staggered,
            profiler=StageProfiler(parameters) if context.profiles else None,
            needs_norm=trainer.gradient_clip_val is not None or is_overridden("configure_gradient_clipping", module),
        )
        self.executor.on_generation = lambda: self._on_generation(trainer)
        PipelineEpochLoop.install(trainer)

    def _forward_context(self) -> AbstractContextManager[Any]:
        return self.precision_plugin.train_step_context() or nullcontext()

    @override
    def model_to_device(self) -> None:
        assert self.lightning_module is not None
        self.lightning_module.to(self.root_device)

    @override
    def process_dataloader(self, dataloader: object) -> MicrobatchLoader:
        needs_data = self.worker.stage in (0, self.grid.stages - 1)
        seed = global_seed() if self.seed is None else self.seed
        self._loader = MicrobatchLoader(dataloader, self.grid, self.worker.pipeline, seed, prefetch=needs_data)
        return self._loader

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        return batch if isinstance(batch, StepHandle) else super().batch_to_device(batch, device, dataloader_idx)

    def _split(self, data: Any) -> tuple[Any, Any]:
        """A collated micro-batch -> (input, target) on the device."""
        module = self.lightning_module
        assert isinstance(module, PipelineModule)
        data = self.precision_plugin.convert_input(data)
        if self._transfers:
            data = super().batch_to_device(data, self.root_device)
        return module.split_batch(data)

    # ------------------------------------------------------------------ a step

    def run_step(self, handle: StepHandle, apply: Callable[[StepResult], None]) -> StepResult:
        assert self.executor is not None
        assert self._loader is not None
        return self.executor.run_step(self._loader, handle, apply)

    def as_loss(self, value: float) -> Tensor:
        """The step's mean loss as Lightning sees it on one device: a scalar of the dtype that the model computes in."""
        assert self.lightning_module is not None
        double = any(p.dtype is torch.float64 for p in self.lightning_module.parameters())
        return torch.tensor(value, dtype=torch.float64 if double else torch.float32, device=self.root_device)

    def _clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clips by the norm over all stages, which the commit brought; the plugin's own sees one stage only."""
        scale = min(1.0, clip_val / (self.gradient_norm + 1e-6))  # the formula of torch.nn.utils.clip_grad_norm_
        grads = [p.grad for p in self.precision_plugin.main_params(optimizer) if p.grad is not None]
        if grads and scale < 1.0:
            torch._foreach_mul_(grads, scale)

    def _on_generation(self, trainer: pl.Trainer) -> None:
        """A new generation is complete: this worker may have become the leader."""
        was_leader = rank_zero_only.rank == 0  # type: ignore[attr-defined]
        self._follow_leader()
        if self.is_global_zero and not was_leader:
            log.info("Worker %s speaks for the run from now on.", self.worker)
            _show_progress_bar(trainer)
            _keep_metrics_files(trainer)

    # ------------------------------------------------------------------ control collectives

    def _gather(self, name: str, value: Any) -> Mapping[int, Any]:
        if self._context is None:
            return {0: value}
        return self._context.client.arrive(name, value)

    def _leader_of(self, payloads: Mapping[int, Any]) -> int:
        return leader(self.grid, tuple(payloads)) if self._context is not None else 0

    @override
    def barrier(self, name: str | None = None) -> None:
        self._gather(f"barrier {name or ''}", None)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Returns the object of worker ``src``; 0 means the leader, which every rank can be."""
        payloads = self._gather("broadcast", _to_cpu(obj))
        source = src if src != 0 and src in payloads else self._leader_of(payloads)
        return obj if source == self.global_rank else payloads[source]

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        values = torch.stack([torch.as_tensor(v) for _, v in sorted(self._gather("reduce", _to_cpu(tensor)).items())])
        name = str(reduce_op or "sum").rsplit(".", 1)[-1].lower()
        operations: dict[str, Callable[[Tensor], Tensor]] = {
            "sum": lambda v: v.sum(0),
            "mean": lambda v: v.mean(0) if v.is_floating_point() else v.float().mean(0),
            "avg": lambda v: v.float().mean(0),
            "min": lambda v: v.amin(0),
            "max": lambda v: v.amax(0),
        }
        if name not in operations:
            raise UnsupportedFeatureError(
                f"reduce_op={reduce_op!r} is not supported; use one of {', '.join(operations)}."
            )
        return operations[name](values).to(tensor.device)

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        if sync_grads:
            raise UnsupportedFeatureError("all_gather(sync_grads=True) is not supported: it would bypass the schedule.")
        return torch.stack([v for _, v in sorted(self._gather("all_gather", _to_cpu(tensor)).items())]).to(
            tensor.device
        )

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        decisions = [bool(d) for d in self._gather("decision", bool(decision)).values()]
        return decisions.count(True) == len(decisions) if all else any(decisions)

    # ------------------------------------------------------------------ state

    def _gather_stages(self, name: str, part: Callable[[], Any]) -> list[Any]:
        """Returns one part of each stage, in order, on all workers; asks again if a speaker dies on the way."""
        while True:
            speaks = stage_leads(self.grid, self.live_workers)[self.worker.stage] == self.global_rank
            payloads = self._gather(name, (part(),) if speaks else None)
            parts = {
                self.grid.worker(rank).stage: value[0] for rank, value in sorted(payloads.items()) if value is not None
            }
            if len(parts) == self.grid.stages:
                return [parts[stage] for stage in range(self.grid.stages)]

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The state dict of the whole model, on every worker."""
        assert self.lightning_module is not None
        module = self.lightning_module
        merged: dict[str, Any] = {}
        for part in self._gather_stages("model state", lambda: _to_cpu(module.state_dict())):
            merged.update(part)
        return merged

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer state of the whole model, parameters numbered in the order of the layers."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer._optimizer
        return merge_optimizer_states(self._gather_stages("optimizer state", lambda: _to_cpu(optimizer.state_dict())))

    def deliver_result(self, extras: Callable[[], Any]) -> None:
        """Brings this worker's part of the result to the coordinator: (state dict of the stage, ``extras()`` of
        the leader).
        """
        assert self._context is not None
        assert self.lightning_module is not None
        while True:
            roster = self.live_workers
            part = None
            if stage_leads(self.grid, roster)[self.worker.stage] == self.global_rank:
                part = (_to_cpu(self.lightning_module.state_dict()), extras() if self.is_global_zero else None)
            delivered = self._gather(RESULT, part)
            if {self.grid.worker(rank).stage for rank, yes in delivered.items() if yes} == set(range(self.grid.stages)):
                return

    @override
    def on_train_start(self) -> None:
        # What exists by now lives as long as the process: a full garbage collection in the middle of a step need not
        # walk through it.
        gc.collect()
        gc.freeze()

    @override
    def on_train_end(self) -> None:
        """Waits until every stage has applied the last step; from then on no step can be redone."""
        self.barrier("end of training")

    @override
    def teardown(self) -> None:
        if self._loader is not None:
            self._loader.close()
        super().teardown()

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        return {**state, "executor": None, "_context": None, "_loader": None, "_launcher": None, "plan_library": None}


# ---------------------------------------------------------------------- checks


def check_trainer(trainer: pl.Trainer) -> None:
    """Raises UnsupportedFeatureError for settings of the Trainer that this version does not honour."""
    precision = trainer.precision
    unsupported = {
        f"precision={precision!r}": (
            precision not in ("32-true", "64-true"),
            "use '32-true' or '64-true'",
        ),
        f"accumulate_grad_batches={trainer.accumulate_grad_batches}": (
            trainer.accumulate_grad_batches != 1,
            "use more micro-batches instead: ReCycleStrategy(num_microbatches=...) and a larger batch_size",
        ),
        "a validation loop inside fit": (
            trainer.enable_validation,
            "pass limit_val_batches=0 and validate afterwards on one device",
        ),
        f"num_nodes={trainer.num_nodes}": (trainer.num_nodes != 1, "use one node"),
        "manual optimization": (
            not trainer.lightning_module.automatic_optimization,
            "leave automatic_optimization = True",
        ),
        "StochasticWeightAveraging": (
            any(
                type(c).__name__ in ("StochasticWeightAveraging", "WeightAveraging", "EMAWeightAveraging")
                for c in _callbacks(trainer)
            ),
            "remove the callback",
        ),
    }
    for what, (present, remedy) in unsupported.items():
        if present:
            raise UnsupportedFeatureError(f"strategy='recycle' does not support {what} yet: {remedy}.")


def _callbacks(trainer: pl.Trainer) -> list[Any]:
    return list(trainer.callbacks)  # type: ignore[attr-defined]


def check_parameters(module: PipelineModule, worker: Worker, grid: Grid) -> None:
    """Raises ConfigurationError if a stage has nothing to train, or a parameter lies outside the layers."""
    outside = [name for name, _ in module.named_parameters() if not name.startswith("layers.")]
    if outside:
        raise ConfigurationError(
            f"{type(module).__name__} has parameters outside its pipeline: {', '.join(outside[:5])}. Every parameter"
            " must"
            " belong to a layer returned by configure_pipeline(); create modules there, not as attributes in __init__."
        )
    if not any(p.requires_grad for p in module.parameters()):
        raise ConfigurationError(
            f"Stage {worker.stage} of {grid.stages} has no trainable parameter. Use a smaller"
            " pipeline_parallel_size, or"
            " arrange the layers in configure_pipeline() so that every stage gets one."
        )


def check_optimizers(optimizers: list[Optimizer]) -> None:
    """Raises ConfigurationError unless there is one optimizer (Lightning itself refuses several)."""
    if len(optimizers) != 1 or not optimizers[0].param_groups:
        raise ConfigurationError(
            "configure_optimizers() returned no optimizer; the strategy needs exactly one (with any number of parameter"
            " groups): return for example torch.optim.AdamW(self.parameters())."
        )


def merge_optimizer_states(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Joins the state dicts of the stages' optimizers into that of one optimizer over all layers in order.

    Args:
        parts: one per stage, with the same number of parameter groups.

    Raises:
        ConfigurationError: if the stages have different numbers of groups.
    """
    num_groups = {len(part["param_groups"]) for part in parts}
    if len(num_groups) > 1:
        raise ConfigurationError(
            f"The stages' optimizers have different numbers of parameter groups {sorted(num_groups)}: create the"
            " same groups"
            " on every stage in configure_optimizers(), empty ones included."
        )
    state: dict[int, Any] = {}
    groups: list[dict[str, Any]] = []
    next_index = 0
    for group_index in range(num_groups.pop()):
        indices: list[int] = []
        for part in parts:
            for old in part["param_groups"][group_index]["params"]:
                if old in part["state"]:
                    state[next_index] = part["state"][old]
                indices.append(next_index)
                next_index += 1
        groups.append({**parts[0]["param_groups"][group_index], "params": indices})
    return {"state": state, "param_groups": groups}


# ---------------------------------------------------------------------- small things


def _to_cpu(value: Any) -> Any:
    """A copy of ``value`` with its tensors on the CPU in storages of their own, fit for pickling."""
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, Mapping):
        return {key: _to_cpu(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(_to_cpu(item) for item in value)
    return value


def _show_progress_bar(trainer: pl.Trainer) -> None:
    """Lets the progress bar of a new leader take over where the old leader's ended."""
    bar = trainer.progress_bar_callback
    if bar is None:
        return
    bar.enable()
    bar.on_train_start(trainer, trainer.lightning_module)
    bar.on_train_epoch_start(trainer, trainer.lightning_module)


def _keep_metrics_files(trainer: pl.Trainer) -> None:
    """Makes the CSV loggers of a new leader append: on its first use ``CSVLogger`` deletes what the old leader
    wrote.
    """
    from lightning.pytorch.loggers import CSVLogger

    for logger in trainer.loggers:
        if isinstance(logger, CSVLogger) and logger._experiment is None:
            path = f"{logger.log_dir}/metrics.csv"
            try:
                with open(path, newline="") as file:
                    written = file.read()
            except FileNotFoundError:
                continue  # nothing was written yet
            writer = logger.experiment
            with open(path, "w", newline="") as file:
                file.write(written)
            writer.metrics_keys = next(csv.reader(written.splitlines()), [])
