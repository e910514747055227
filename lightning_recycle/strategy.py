"""``Trainer(strategy="recycle")``: Lightning's requests, delegated.

In a worker its :class:`~lightning_recycle.session.session.Session` answers; in the launching process a
:class:`~lightning_recycle.launch.launcher.SupervisorLauncher`.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields, replace
from operator import attrgetter
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_recycle.arguments import shown_options, suggests_options
from lightning_recycle.control.monitoring.history import Event
from lightning_recycle.control.monitoring.logs import install_if_wanted
from lightning_recycle.control.options import RecoveryOptions, VerificationOptions
from lightning_recycle.data.step_sources import StepHandle, StepLoader
from lightning_recycle.devices import moved_in_place
from lightning_recycle.errors import OTHER_LIGHTNING, ConfigurationError, UnsupportedFeatureError, counted
from lightning_recycle.launch.launcher import SupervisorLauncher
from lightning_recycle.model.chain_parts import is_meant_to_be_cut
from lightning_recycle.planning.grid import Grid, Worker
from lightning_recycle.planning.planner import PlanningOptions
from lightning_recycle.planning.schedule import Schedule
from lightning_recycle.runtime.executor import Executor
from lightning_recycle.runtime.groups_and_transports import CommunicationOptions
from lightning_recycle.runtime.nccl.nccl_transport import check_transport
from lightning_recycle.session.checkpoint_callbacks import await_stage
from lightning_recycle.session.checkpoint_files import WholeCheckpointIO
from lightning_recycle.session.configuration import (
    OTHER_NAMES,
    CheckpointOptions,
    MonitoringOptions,
    Options,
    RayEngine,
    check_shards,
    plans_checked,
)
from lightning_recycle.session.gradient_clipping import RepeatableStep
from lightning_recycle.session.lightning_internals import (
    AFTER_SAVING,
    WrappingCheckpointIO,
    lower_on,
    set_device_mesh,
)
from lightning_recycle.session.optimizer_states import stepping_on_shards
from lightning_recycle.session.session import Session


@suggests_options
class ReCycleStrategy(ParallelStrategy):
    """Pipeline and data parallelism that survives failures, with the same result.

    ``devices * num_nodes`` workers form D pipelines of S stages. The DataLoader's ``batch_size`` is per pipeline and is
    split into M micro-batches.

    As data code expects, ``trainer.world_size`` is D, and ``trainer.global_rank`` the pipeline d of a worker, which its
    stages share; exactly one worker has ``trainer.is_global_zero``. A worker's position in ``grid`` is ``worker``, its
    number ``grid_rank``, which is ``d * S + s``.

    Args:
        pipeline_parallel_size: the number S of stages of a pipeline; by default 1, and 2 for a PipelineModule or with
            ``layers`` if the number of devices is even and at least 4.
        num_microbatches: the number M of micro-batches of a pipeline and step; by default 1 with one stage, else 2 S or
            the largest smaller divisor of the batch size, if that is known.
        tensor_parallel_size: the number of processes that hold each position of the grid together. ``configure_model``
            makes layers parallel over ``self.device_mesh["tensor_parallel"]``, as for Lightning's
            ``ModelParallelStrategy``.
        fsdp_size: the number of parts into which ``fully_shard`` divides the layers of a position. ``configure_model``
            calls it with ``mesh=self.device_mesh["data_parallel"]``. A position has ``tensor_parallel_size`` times as
            many processes. ``batch_size`` and ``trainer.world_size`` count these parts as pipelines.
        layers: the layers of an ordinary LightningModule that are distributed over stages; by default the
            ``nn.Sequential`` or ``nn.ModuleList`` that holds most of the parameters. A path such as ``"model.layers"``,
            or a list of paths in the order in which ``training_step`` calls them.
        seed: the seed of all randomness; by default the one given to ``seed_everything``, else 0.
        engine: where the workers run: "local", on this machine; "ray", on a Ray cluster; or a
            :class:`~lightning_recycle.RayEngine` with resources for each.
        planning: the plans: who makes them, from which costs, with which techniques and how much memory.
        recovery: replacements for lost workers, moves of layers, restarts.
        verification: how workers that compute wrong bits are found, and the response.
        checkpoints: how checkpoints are written, and where the result of a run is in the end.
        communication: how activations and gradients travel.
        monitoring: status page, metrics and summary of the run.

    Attributes:
        history: what happened in the newest ``fit``: a list of :class:`~lightning_recycle.Event`.
        schedules: after ``fit``, the schedule of each generation.
        missing_optimizers: after ``fit``, why the launching process has no optimizers, if it has none.
        missing_weights: after ``fit``, why the model in this process is not the trained one, if it is not.

    Raises:
        ConfigurationError: for values that cannot work.
    """

    strategy_name = "recycle"
    is_distributed = False  # for Lightning's samplers: the data is addressed, nothing may be injected
    owns_layers = True
    options_type = Options
    other_names = OTHER_NAMES

    def __init__(
        self,
        pipeline_parallel_size: int | None = None,
        num_microbatches: int | None = None,
        *,
        tensor_parallel_size: int = 1,
        fsdp_size: int = 1,
        layers: str | list[str] | None = None,
        seed: int | None = None,
        engine: Literal["local", "ray"] | RayEngine = "local",
        planning: PlanningOptions = PlanningOptions(),
        recovery: RecoveryOptions = RecoveryOptions(),
        verification: VerificationOptions = VerificationOptions(),
        checkpoints: CheckpointOptions = CheckpointOptions(),
        communication: CommunicationOptions = CommunicationOptions(),
        monitoring: MonitoringOptions = MonitoringOptions(),
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        install_if_wanted()  # before Lightning's first line
        super().__init__(accelerator=accelerator, checkpoint_io=checkpoint_io, precision_plugin=precision_plugin)
        self.options = Options(
            pipeline_parallel_size, num_microbatches, tensor_parallel_size, fsdp_size, layers, seed, engine, planning,
            recovery, verification, checkpoints, communication, monitoring,
        )  # fmt: skip
        self.num_nodes = 1  # Lightning sets it
        self._session: Session | None = None
        self.missing_optimizers: str | None = None
        self.missing_weights: str | None = None

    def __repr__(self) -> str:
        """The call that makes this strategy, without defaults."""
        return shown_options(self.options, type(self).__name__)

    def choose_grid(self, num_workers: int, batch_size: int | None = None) -> Grid:
        """The grid for ``num_workers`` devices; ``batch_size`` is per pipeline.

        Raises:
            ConfigurationError: if the devices cannot be divided into pipelines.
        """
        return self.options.choose_grid(num_workers, batch_size)

    # ------------------------------------------------------------------ the two kinds of processes

    @override
    def _configure_launcher(self) -> None:
        if self.parallel_devices:
            check_transport(self.options.communication.transport, self.root_device)
            lower_on(self.precision_plugin, self.root_device)
        positions = self.num_positions  # checked here, before anything is loaded; so are stages if they are known
        if self.options.pipeline_parallel_size is not None:
            self.choose_grid(positions)
        self._launcher = SupervisorLauncher(self)  # type: ignore[assignment]  # not of a private class

    @property
    @override
    def launcher(self) -> SupervisorLauncher | None:  # type: ignore[override]
        """None in a worker, where functions of the Trainer run at once."""
        return self._launcher if self._session is None else None  # type: ignore[return-value]

    @property
    def session(self) -> Session:
        """This worker's session; the launching process has none."""
        if self._session is None:
            raise AttributeError("Only a worker has this attribute, and the launching process is not a worker.")
        return self._session

    def enter(self, session: Session | None) -> None:
        """Makes this the strategy of a worker; with None, of the launching process again."""
        self._session = session

    @override
    def __getstate__(self) -> dict[str, Any]:
        # Workers make optimizers of their own, as each fit does on one device too.
        optimizers: dict[str, Any] = {"_optimizers": [], "_lightning_optimizers": [], "lr_scheduler_configs": []}
        return {**super().__getstate__(), **optimizers, "_session": None, "_launcher": None}

    @property
    @override
    def accelerator(self) -> Accelerator | None:
        return self._accelerator

    @accelerator.setter
    @override
    def accelerator(self, accelerator: Accelerator | None) -> None:
        if accelerator is not None and not isinstance(accelerator, Accelerator):
            raise ConfigurationError(OTHER_LIGHTNING)
        self._accelerator = accelerator

    @property
    def history(self) -> list[Event]:
        return [] if self.launcher is None else self.launcher.history

    @property
    def schedules(self) -> list[Schedule]:
        return [] if self.launcher is None else self.launcher.schedules

    # ------------------------------------------------------------------ who this is

    @property
    def executor(self) -> Executor | None:
        """Runs this worker's part of each step; None before ``setup``."""
        return getattr(self._session, "executor", None)

    @property
    def at_point(self) -> list[Callable[[str, int], None]]:
        """Called with ("setup", "recovery", "checkpoint" or "end") and the step."""
        return self.session.at_point

    @property
    def grid(self) -> Grid:
        """Pipelines, stages and micro-batches; only in a worker."""
        return self.session.grid

    @property
    def worker(self) -> Worker:
        """This worker's position; only in a worker."""
        return self.session.worker

    @property
    def global_batch_size(self) -> int:
        """Samples per step."""
        return self.session.loaders.global_batch_size

    @property
    def live_workers(self) -> tuple[int, ...]:
        """The ranks of the live workers of the current generation."""
        return () if self._session is None else self._session.collectives.live_workers

    @property
    def leader(self) -> int:
        """The rank of the worker that speaks for the run."""
        return self.session.collectives.leader

    @property
    def incarnation(self) -> int:
        """How many processes have held this worker's position before."""
        return 0 if self._session is None else self._session.place.incarnation

    @property
    def generation(self) -> int:
        """The number of the current generation; -1 before the first."""
        return -1 if self._session is None else self._session.client.generation

    @property
    def counters(self) -> Mapping[str, float]:
        """Totals of the run (failures, seconds of recovery, ...), equal on all workers."""
        return {} if self._session is None else self._session.client.member.counters

    def move_layers(self, sizes: Sequence[float]) -> None:
        """Asks for other layers in each stage, from the next step boundary on.

        For callbacks and hooks in ``fit``. One worker has to ask; if others ask for the same, it is asked once.

        Args:
            sizes: the number of layers of each stage, in order. Not whole, as in [2.5, 3.5], where neighbouring stages
                share a layer: half of the micro-batches run the third one on the first stage, the others on the second.
                That pays where to send them takes longer than a step.

        Raises:
            ConfigurationError: if there is no such layout, or layers cannot move, with the reason.
        """
        self.session.move_layers(sizes)

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[0 if self._session is None else self._session.place.device]

    @property
    def grid_rank(self) -> int:
        """Number of this worker's position in the grid: d * S + s."""
        return self.session.place.rank

    @property
    @override
    def global_rank(self) -> int:
        """The pipeline of this worker, the rank by which data code divides.

        0 in the launching process.
        """
        if self._session is None:
            return 0
        run = self._session.run
        return run.data_worker(self._session.place.rank).pipeline % run.data_grid.pipelines

    @property
    @override
    def local_rank(self) -> int:
        return 0 if self._session is None else self._session.local_rank

    @property
    @override
    def node_rank(self) -> int:
        return 0 if self._session is None else self._session.node_rank

    @property
    @override
    def world_size(self) -> int:
        """The number of pipelines: a step's batch is that many times the DataLoader's.

        It is the same in all processes, before, in and after a run, and stays when the run goes on with fewer
        pipelines.

        Raises:
            ConfigurationError: if the devices cannot be divided into pipelines.
        """
        if self._session is not None:
            return self._session.run.batch_pipelines
        module, devices = self.lightning_module, self.num_positions
        if module is not None:
            is_cut = is_meant_to_be_cut(module, self.options.layers)
            return self.options.choose_grid(devices, can_be_cut=is_cut).pipelines * self.options.fsdp_size
        grid = self.options.choose_grid(devices)
        options = self.options
        if options.pipeline_parallel_size is None and options.layers is None and grid.stages > 1:
            rank_zero_warn(
                f"trainer.world_size is {grid.pipelines}, the number of pipelines if the model is a PipelineModule;"
                f" with another one it will be {devices}, as many as devices. To be sure before the Trainer has its"
                " model, use ReCycleStrategy(pipeline_parallel_size=...)."
            )
        return grid.pipelines * options.fsdp_size

    @property
    def num_devices(self) -> int:
        """The number of workers that the run starts with."""
        return len(self.parallel_devices or [0]) * self.num_nodes

    @property
    def num_positions(self) -> int:
        """The number of positions that these workers hold.

        Raises:
            ConfigurationError: if the devices cannot be divided into positions.
        """
        members = self.options.members
        if self.num_devices % members:
            raise ConfigurationError(
                f"{counted(self.num_devices, 'device')} cannot be divided into positions of {members} processes"
                f" (tensor_parallel_size={self.options.tensor_parallel_size}, fsdp_size={self.options.fsdp_size}). Use"
                f" a number of devices that is a multiple of {members}."
            )
        return self.num_devices // members

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @property
    @override
    def is_global_zero(self) -> bool:
        """Whether this process speaks for the run: the supervisor, or the leader."""
        return self._session is None or self._session.collectives.is_leader

    # ------------------------------------------------------------------ a run

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self.session.keep_log_files()
        self.session.prepare_data_once()
        await_stage(self.session.trainer)

    @contextmanager
    @override
    def model_sharded_context(self) -> Iterator[None]:
        """The context of ``configure_model``, which makes layers parallel."""
        if self._session is None or self._session.mesh is None:
            yield
            return
        session, mesh, module = self._session, self._session.mesh, self.lightning_module
        assert module is not None
        set_device_mesh(module, mesh.mesh)
        with mesh.building_alone(), moved_in_place(self.root_device, module, shards=True), plans_checked(module):
            yield
        check_shards(module, session.run.mesh_sizes, warns=session.collectives.is_leader)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        self.session.setup()

    @override
    def model_to_device(self) -> None:
        assert self.lightning_module is not None
        with moved_in_place(self.root_device, self.lightning_module):
            self.lightning_module.to(self.root_device)

    @override
    def process_dataloader(self, dataloader: object) -> StepLoader | object:
        """In a worker the steps of a loader, else the loader itself.

        Raises:
            UnsupportedFeatureError: in the launching process, if a step takes batches of several pipelines.
        """
        if self._session is not None:
            return self._session.loaders.add(dataloader)
        if self.world_size > 1:
            raise UnsupportedFeatureError(
                "The loops of the Trainer read data in the workers, where a step takes a batch of each of"
                f" {self.world_size} pipelines. Ask for loaders and their lengths in a hook, or after fit."
            )
        return dataloader

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        return batch if isinstance(batch, StepHandle) else super().batch_to_device(batch, device, dataloader_idx)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.session.evaluate("validation", args)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.session.evaluate("test", args)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.session.evaluate("predict", args)

    def forward_whole(self, inputs: Sequence[Any]) -> Any:
        """The module's output, computed by all stages; all workers call it."""
        return self.session.forward_whole(inputs)

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """A backward pass of manual optimization, with its hooks called once."""
        if self._session is None or self._session.steps.manual is None:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        assert self.lightning_module is not None
        plugin, manual = self.precision_plugin, self._session.steps.manual
        with manual.hooks_once():
            closure_loss = plugin.pre_backward(closure_loss, self.lightning_module)
        plugin.backward(closure_loss, self.lightning_module, optimizer, *args, **kwargs)
        with manual.hooks_once():
            return plugin.post_backward(closure_loss, self.lightning_module)

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        """A step of the optimizer, on shards unless its hooks would see them."""
        is_sharded = self._session is not None and self._session.mesh is not None
        on_shards = stepping_on_shards if is_sharded and not RepeatableStep.is_watched([optimizer]) else nullcontext
        with on_shards(optimizer):
            return super().optimizer_step(optimizer, closure, *args, **kwargs)

    @override
    def on_train_start(self) -> None:
        # What exists by now lives as long as the process: a full garbage collection during a step can skip it.
        gc.collect()
        gc.freeze()

    @override
    def on_train_end(self) -> None:
        self.session.end_training()

    @override
    def on_exception(self, exception: BaseException) -> None:
        if self.launcher is not None:
            self.launcher.on_exception(exception)
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        if self._session is not None:
            self._session.close()
        with moved_in_place(self.root_device, self.lightning_module):
            super().teardown()

    # ------------------------------------------------------------------ collectives; the launching process is alone

    @override
    def barrier(self, name: str | None = None) -> None:
        if self._session is not None and not (name == AFTER_SAVING and self._session.saves_in_background):
            self._session.collectives.barrier(name)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj if self._session is None else self._session.collectives.broadcast(obj, src)

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return tensor if self._session is None else self._session.reduce(tensor, reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        return tensor[None] if self._session is None else self._session.all_gather(tensor, sync_grads)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return decision if self._session is None else self._session.collectives.decide(decision, all)

    # ------------------------------------------------------------------ checkpoints

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        """The user's, or one whose files are whole whenever the process dies."""
        if self._checkpoint_io is None:
            self._checkpoint_io = WholeCheckpointIO()
        elif isinstance(self._checkpoint_io, WrappingCheckpointIO):
            self._checkpoint_io.checkpoint_io = WholeCheckpointIO()  # Lightning's setter keeps the user's
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The model's state dict, or the stage's with sharded checkpoints."""
        return super().lightning_module_state_dict() if self._session is None else self._session.checkpoints.state()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if self._session is None:
            return super().optimizer_state(optimizer)
        return self._session.checkpoints.optimizer_state(optimizer)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        if self._session is None:
            return super().load_checkpoint(checkpoint_path, weights_only)
        # Lightning restores module and callbacks before setup(), so that on_fit_start sees them restored. What a stage
        # takes of a checkpoint is known from setup() on, which comes next in any case.
        self.session.setup()
        return self.session.checkpoints.load(checkpoint_path, weights_only)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self._session is None:
            return super().load_model_state_dict(checkpoint, strict)
        self.session.checkpoints.load_model_state(checkpoint, strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self._session is None:
            return super().load_optimizer_state_dict(checkpoint)
        self.session.checkpoints.load_optimizer_state(checkpoint)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        if self._session is not None:
            self._session.checkpoints.save(checkpoint, filepath, storage_options)
        elif self.launcher is None or self.launcher.may_save(checkpoint, filepath):
            super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        if self._session is None:
            super().remove_checkpoint(filepath)
        else:
            self._session.checkpoints.remove(filepath)


def _option(name: str) -> property:
    """An option as the user gave it; a new value is checked as at construction."""

    def assign(strategy: ReCycleStrategy, value: Any) -> None:
        strategy.options = replace(strategy.options, **{name: value})

    return property(attrgetter(f"options.{name}"), assign)


for _field in fields(Options):
    setattr(ReCycleStrategy, _field.name, _option(_field.name))

if (_other := sys.modules.get("pytorch_lightning.strategies")) is not None:
    _other.Strategy.register(ReCycleStrategy)  # its Trainer hands it an accelerator, and is told what to import
