"""``Trainer(strategy="recycle")``: what Lightning asks of a strategy, answered by the control plane and the executor.

In the launching process the strategy only configures: its launcher starts the workers and waits. In a worker it owns
the executor. What it knows of the other workers is in :mod:`~lightning_recycle.session.collectives`, checkpoints are in
:mod:`~lightning_recycle.session.checkpoints`.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_recycle.control.history import Event
from lightning_recycle.control.protocol.messages import Facts, Restored
from lightning_recycle.data.addressed import MicrobatchLoader
from lightning_recycle.data.batching import is_stream
from lightning_recycle.data.steps import StepHandle, StepLoader
from lightning_recycle.data.streams import StreamLoader
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.model.module import PipelineModule, global_seed
from lightning_recycle.model.tying import ties_between_stages
from lightning_recycle.planning.grid import Grid
from lightning_recycle.planning.library import PlanLibrary
from lightning_recycle.planning.planner import Planner, get_planner
from lightning_recycle.planning.schedule import Schedule
from lightning_recycle.randomness import layer_randomness, seeded_everything
from lightning_recycle.runtime.communicator import Communicator
from lightning_recycle.runtime.executor import Executor, StepResult
from lightning_recycle.runtime.gradients import GradientBuffers
from lightning_recycle.runtime.profiling import StageProfiler
from lightning_recycle.runtime.stage import Stage
from lightning_recycle.runtime.ties import TieExchange
from lightning_recycle.session.checkpoints import CheckpointingStrategy
from lightning_recycle.session.checks import check_batch, check_optimizers, check_parameters
from lightning_recycle.session.collectives import WorkerContext
from lightning_recycle.session.comparison import DIGEST_EVERY, digest, optimizer_options
from lightning_recycle.session.lightning_callbacks import keep_monitors_going, show_whole_run
from lightning_recycle.session.loggers import LogRelay, keep_files
from lightning_recycle.session.loops import PipelineFitLoop, count_in_steps, tell_batch_sizes
from lightning_recycle.session.outputs import OutputRecorder, concatenate
from lightning_recycle.session.snapshot import WorkerSnapshot, join_before_batch, restore_snapshot, take_snapshot
from lightning_recycle.session.takeover import show_progress_bar

__all__ = ["ReCycleStrategy"]

log = logging.getLogger(__name__)


class ReCycleStrategy(CheckpointingStrategy):
    """Pipeline and data parallelism that goes on, with the same result, when workers die.

    ``devices * num_nodes`` workers form D pipelines of S stages; the rank of the worker at pipeline d, stage s is
    ``d * S + s``. The DataLoader's ``batch_size`` is per pipeline and is split into M micro-batches.

    Args:
        pipeline_parallel_size: S. By default 2 when the number of devices is even and at least 4, else 1.
        num_microbatches: M. By default 2 * S (or the largest divisor of the batch size below, where that is known).
        planner: name of the planner, or an object with ``plan(problem)``.
        plan_library: a directory (or :class:`~lightning_recycle.planning.library.PlanLibrary`) where plans are looked
            for before they are made, and stored. Use it with a ``profile``: plans are found by their costs.
        partition: which layers a stage gets: equal numbers of them ("count"), of parameters ("parameters"), of seconds
            ("profile", with ``layer_seconds``), or the number of layers of each stage, such as ``[3, 5, 4]``.
        layer_seconds: of each layer, see :func:`~lightning_recycle.model.partition.measure_layer_seconds`.
        profile: "auto" measures the model in the first steps and writes ``profile.json`` to the Trainer's
            ``default_root_dir``. A path is read for the costs of all plans if it exists, else measured and written.
        decoupled: split the backward, so that weight gradients fill idle slots.
        staggered: a stage steps its optimizer when its own gradient is complete, so that the next step begins there
            while others end this one. Costs a copy of the stage's parameters and of its gradients. With clipping by
            norm every stage waits for all others all the same.
        shadow: where the parameters of the version before are kept, "device" or "host"; there are none with
            ``staggered=False``.
        restart_workers: whether a lost worker is replaced by a new process, which gets its state from a peer.
        max_restarts: the most replacements in the whole run.
        normalize: whether a healthy worker moves to another stage if failures are distributed badly and there is no
            replacement.
        on_stage_lost: "raise" StageLostError when all replicas of a stage are lost, or "restart" from the newest
            checkpoint with as many pipelines as the surviving devices allow.
        in_flight_limit: the most micro-batches that a worker may hold between F and W; by default 2 * S - 1 without a
            failure and no limit with one.
        save_distributed_checkpoint: write checkpoints as folders, to which each stage writes its own part, instead of
            one file; ``python -m lightning.pytorch.utilities.consolidate_checkpoint`` makes one file of such a folder.
        seed: of all randomness; by default the one given to ``seed_everything``, else 0.

    Attributes:
        history: after ``fit``, what happened: a list of :class:`~lightning_recycle.control.history.Event`.
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
        planner: str | Planner = "heuristic",
        plan_library: str | os.PathLike[str] | PlanLibrary | None = None,
        partition: Literal["count", "parameters", "profile"] | list[int] = "count",
        layer_seconds: list[float] | None = None,
        profile: str | os.PathLike[str] | None = None,
        decoupled: bool = True,
        staggered: bool = True,
        shadow: Literal["device", "host"] = "device",
        restart_workers: bool = False,
        max_restarts: int = 10,
        normalize: bool = False,
        on_stage_lost: Literal["raise", "restart"] = "raise",
        in_flight_limit: int | None = None,
        save_distributed_checkpoint: bool = False,
        seed: int | None = None,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(
            save_distributed_checkpoint=save_distributed_checkpoint,
            accelerator=accelerator,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        for name, value in (
            ("pipeline_parallel_size", pipeline_parallel_size),
            ("num_microbatches", num_microbatches),
            ("in_flight_limit", in_flight_limit),
        ):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ConfigurationError(f"ReCycleStrategy({name}={value!r}): give an integer of at least 1, or None.")
        for name, choice, choices in (
            ("shadow", shadow, ("device", "host")),
            ("on_stage_lost", on_stage_lost, ("raise", "restart")),
        ):
            if choice not in choices:
                raise ConfigurationError(f"ReCycleStrategy({name}={choice!r}): use {' or '.join(map(repr, choices))}.")
        if not isinstance(max_restarts, int) or isinstance(max_restarts, bool) or max_restarts < 0:
            raise ConfigurationError(f"ReCycleStrategy(max_restarts={max_restarts!r}): give an integer of at least 0.")
        get_planner(planner)
        self.pipeline_parallel_size = pipeline_parallel_size
        self.num_microbatches = num_microbatches
        self.planner = planner
        self.plan_library = plan_library
        self.partition = partition
        self.layer_seconds = layer_seconds
        self.profile = profile
        self.decoupled = decoupled
        self.staggered = staggered
        self.num_nodes = 1  # Lightning sets it
        self.shadow = shadow
        self.restart_workers = restart_workers
        self.max_restarts = max_restarts
        self.normalize = normalize
        self.on_stage_lost = on_stage_lost
        self.in_flight_limit = in_flight_limit
        self.seed = seed
        self.history: list[Event] = []
        self.schedules: list[Schedule] = []
        self.gradient_norm = 0.0
        self.has_run = False
        """Whether there were workers of this strategy's before."""
        self.dataloader_idx = 0
        """Of the evaluation that is under way."""
        self._loader: StepLoader | None = None
        self._transfers = True
        self._records_training = False
        self._loss_dtype: torch.dtype | None = None
        self._loaders: list[StepLoader] = []
        self._batches_per_step = 1
        self._count_in_batches: Callable[[], None] = _nothing
        self._relay: LogRelay | None = None
        self._recorder: OutputRecorder | None = None
        self._joined_with: WorkerSnapshot | None = None
        self._digested = -1

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
    def global_batch_size(self) -> int:
        """Samples per step."""
        assert self._loader is not None
        return self._loader.global_batch_size

    # ------------------------------------------------------------------ processes

    @override
    def _configure_launcher(self) -> None:
        from lightning_recycle.launch.launcher import SupervisorLauncher

        self._launcher = SupervisorLauncher(self)

    def enter_worker(self, context: WorkerContext) -> None:
        """Makes this copy of the strategy the one of a worker process."""
        self._context = context
        self._launcher = None
        self._follow_leader()
        # Every PipelineModule has a validation_step, whether validation is wanted or not.
        warnings.filterwarnings("ignore", "You defined a `validation_step` but have no `val_dataloader`")

    def leave_worker(self) -> None:
        """The run is over, but this process goes on, as the launching process of the next."""
        self.executor = self._context = self._relay = self._recorder = None
        self._loaders, self._ties, self._restored_steps = [], TieExchange(), 0
        self._loader = None
        self._count_in_batches()
        self._configure_launcher()
        rank_zero_only.rank = 0  # type: ignore[attr-defined]

    # ------------------------------------------------------------------ setup

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        assert self.lightning_module is not None
        if self.has_run and self.is_global_zero:  # the Trainer's loggers go on, as they do in one process
            keep_files(self.lightning_module.trainer.loggers)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self._context is not None
        assert self.accelerator is not None
        module = self.lightning_module
        assert isinstance(module, PipelineModule)
        self.accelerator.setup(trainer)
        show_whole_run(trainer, module)
        tell_batch_sizes(trainer)
        context, worker, grid = self._context, self.worker, self.grid
        seed = global_seed() if self.seed is None else self.seed
        owned = context.parts[worker.stage]
        self._absent = frozenset(range(len(module.layers))).difference(owned)
        module.keep_layers(owned)
        with self.precision_plugin.module_init_context():
            module.materialize(owned, seed)
        self.model = self.precision_plugin.convert_module(module)
        self.model_to_device()
        check_parameters(module, worker, grid)
        fitting = trainer.state.fn == TrainerFn.FITTING
        self._batches_per_step = trainer.accumulate_grad_batches if fitting else 1
        if fitting:
            self._count_in_batches = count_in_steps(trainer)
        if fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fitting:
            check_optimizers(self.optimizers)
        self.precision_plugin.clip_grad_by_norm = self._clip_grad_by_norm  # type: ignore[method-assign]
        self._recorder = OutputRecorder(module)
        self._ties = TieExchange(
            ties_between_stages(module.tied_groups(), context.parts), worker.stage, dict(module.named_parameters())
        )

        is_last = worker.stage == grid.stages - 1
        parameters = list(module.parameters()) if fitting else []  # nothing else trains them
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
        self._loss_dtype = None
        self.executor = Executor(
            worker,
            grid,
            context.client,
            Communicator(context.rank, context.host, self.root_device, context.client),
            stage,
            parameters,
            GradientBuffers(parameters, self.root_device),
            self,
            staggered=self.staggered,
            shadow_on_host=self.shadow == "host",
            profiler=StageProfiler(parameters) if context.profiles else None,
            ties=self._ties,
            needs_norm=is_overridden("configure_gradient_clipping", module)
            or (trainer.gradient_clip_val is not None and trainer.gradient_clip_algorithm != "value"),
        )
        executor = self.executor
        self._relay = LogRelay(
            trainer, lambda: self.is_global_zero, lambda: executor.version, lambda: context.client.leader_applied
        )
        self._records_training = is_overridden("on_training_output", module, PipelineModule)
        if fitting:
            PipelineFitLoop.install(trainer)
        if context.client.joining:
            trainer.num_sanity_val_steps = 0  # the others are past it
        self._reach("setup", 0)

    def enter_training(self) -> None:
        """Before the first epoch: a worker that joins a running training waits until it is let in."""
        assert self._context is not None
        assert self.executor is not None
        client = self._context.client
        if threading.current_thread() is threading.main_thread():
            # In the place of Lightning's handler: a worker that is told to end leaves at the next step boundary.
            signal.signal(signal.SIGTERM, lambda *_: client.request_leave())
        if client.joining:
            self.executor.join()
        elif self._restored_steps:
            self.executor.version = self._restored_steps
            client.send(Restored(self.global_rank, self._restored_steps))

    # ------------------------------------------------------------------ what the executor asks

    def take_snapshot(self) -> WorkerSnapshot:
        assert self._context is not None
        assert self.lightning_module is not None
        return take_snapshot(self.lightning_module.trainer, self._context.client.member.next_collective)

    def restore_snapshot(self, snapshot: WorkerSnapshot) -> None:
        assert self._context is not None
        assert self.lightning_module is not None
        member = self._context.client.member
        member.joining = True  # what loaders ask all workers when they are read, this one answers itself
        join_before_batch(self.lightning_module.trainer, snapshot)
        member.joining = False
        member.next_collective = snapshot.next_collective
        self._joined_with = snapshot

    def describe_step(self, step: int) -> Facts:
        module = self.lightning_module
        assert module is not None
        trainer = module.trainer
        counters = {
            "trainer.global_step": trainer.global_step,
            "trainer.current_epoch": trainer.current_epoch,
            "trainer.should_stop": trainer.should_stop,
        }
        options = optimizer_options(self.optimizers)
        if step % DIGEST_EVERY == 0 or self._digested != self.generation:
            self._digested = self.generation
            options["digest of the parameters"] = digest(module.parameters())
        return Facts(counters, options)

    def on_recovery(self, step: int) -> None:
        self._reach("recovery", step)

    def record_output(self, output: Any, target: Any, samples: int) -> bytes | None:
        module = self.lightning_module
        assert isinstance(module, PipelineModule)
        if not self._records_training:
            return None
        return self._record(module.on_training_output, output, target, samples)

    def _forward_context(self) -> AbstractContextManager[Any]:
        return self.precision_plugin.train_step_context() or nullcontext()

    @override
    def model_to_device(self) -> None:
        assert self.lightning_module is not None
        self.lightning_module.to(self.root_device)

    @override
    def process_dataloader(self, dataloader: object) -> StepLoader:
        seed = global_seed() if self.seed is None else self.seed
        assert self._context is not None
        assert self.lightning_module is not None
        training = self.lightning_module.trainer.training
        if training and self._loader is not None:  # the Trainer reloads: what the old one reads ahead is not wanted
            self._loader.close()
            self._loaders.remove(self._loader)
        options: dict[str, Any] = {
            "batch_pipelines": self._context.batch_pipelines,
            "evaluation": not training,
            "batches_per_step": self._batches_per_step if training else 1,
        }
        loader: StepLoader
        if is_stream(dataloader):
            loader = StreamLoader(dataloader, self.grid, seed, **options)
        else:
            needs_data = self.worker.stage in (0, self.grid.stages - 1)
            loader = MicrobatchLoader(dataloader, self.grid, self.worker.pipeline, seed, prefetch=needs_data, **options)
        loader.prepare = partial(self._on_device, loader)
        if training and loader.unused_samples >= loader.global_batch_size / loader.batches_per_step:
            rank_zero_warn(
                f"The last {loader.unused_samples} samples of each epoch are left out: they do not fill a step of"
                f" {loader.global_batch_size} samples (accumulate_grad_batches={loader.batches_per_step})."
            )
        self._loaders.append(loader)
        if training:
            self._loader = loader
        return loader

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        return batch if isinstance(batch, StepHandle) else super().batch_to_device(batch, device, dataloader_idx)

    def split(self, data: Any) -> tuple[Any, Any]:
        """A micro-batch -> (input, target)."""
        module = self.lightning_module
        assert isinstance(module, PipelineModule)
        return module.split_batch(data)

    def _on_device(self, loader: StepLoader, data: Any, seed: int) -> Any:
        """Converts and moves what was collated, by the user's hooks; what these draw depends on the data's address."""
        assert self.lightning_module is not None
        data = self.precision_plugin.convert_input(data)
        if not self._transfers:
            return data
        with seeded_everything() as reseed, layer_randomness(self.root_device) as generator:
            reseed(seed)
            generator.manual_seed(seed)
            data = self.lightning_module._on_before_batch_transfer(data, loader.dataloader_idx)
            return super().batch_to_device(data, self.root_device, loader.dataloader_idx)

    # ------------------------------------------------------------------ a step

    def run_step(self, handle: StepHandle, apply: Callable[[StepResult], None]) -> StepResult:
        assert self.executor is not None
        module = self.lightning_module
        assert isinstance(module, PipelineModule)

        def apply_with_hooks(result: StepResult) -> None:
            with module.logging_allowed(True):
                apply(result)

        if self._joined_with is not None:  # here its donor waited; hooks have done in both what they do before
            restore_snapshot(module.trainer, self._joined_with)
            self._joined_with = None
        with module.logging_allowed(False):
            return self.executor.run_step(handle, apply_with_hooks)

    def replay_outputs(self, outputs: Mapping[int, bytes]) -> None:
        """Logs what the module's hook did with the outputs of a training step."""
        if outputs:
            assert self._recorder is not None
            with self._forward_context():
                self._recorder.replay(outputs, on_step=True)

    def _record(self, hook: Callable[..., Any], output: Any, target: Any, samples: int) -> bytes:
        """Calls a hook that sees outputs, as in a step on one device; what it did is for the recorder's replay."""
        assert self._recorder is not None
        with self._forward_context():
            return self._recorder.record(hook, output, target, samples=samples)

    # ------------------------------------------------------------------ evaluation

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> None:
        module = self.lightning_module
        assert isinstance(module, PipelineModule)
        self._evaluate(args, module.on_validation_output)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> None:
        module = self.lightning_module
        assert isinstance(module, PipelineModule)
        self._evaluate(args, module.on_test_output)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        module = self.lightning_module
        assert isinstance(module, PipelineModule)
        return concatenate(
            self._evaluate(
                args,
                lambda output, _: module.on_predict_output(output),
                lambda data: (module.predict_input(data), None),
            )
        )

    def _evaluate(
        self,
        step: tuple[Any, ...],
        hook: Callable[[Any, Any], Any],
        split: Callable[[Any], tuple[Any, Any]] | None = None,
    ) -> list[Any]:
        """Runs a batch through the pipelines; returns what ``hook`` returned for each micro-batch, on every worker.

        Args:
            step: (batch, its index, and that of the DataLoader if there are several).
            hook: called with (output, target).
            split: turns a micro-batch into (input, target).
        """
        assert self.executor is not None
        assert self._recorder is not None
        module = self.lightning_module
        assert isinstance(module, PipelineModule)
        handle = step[0]
        check_batch(handle)
        handle.loader.dataloader_idx = self.dataloader_idx = step[2] if len(step) > 2 else 0
        self._reach("validation", self.executor.version)
        with module.logging_allowed(False):
            records = self.executor.evaluate(
                handle,
                split or self.split,
                lambda output, target, samples: self._record(hook, output, target, samples),
            )
        with self._forward_context():
            return self._recorder.replay(records, on_step=False)

    def as_loss(self, value: float) -> Tensor:
        """The step's mean loss as Lightning sees it on one device: a scalar of the dtype that the model computes in."""
        if self._loss_dtype is None:  # walking through all parameters in every step costs a small model 3 % of it
            assert self.lightning_module is not None
            double = any(p.dtype is torch.float64 for p in self.lightning_module.parameters())
            self._loss_dtype = torch.float64 if double else torch.float32
        return torch.tensor(value, dtype=self._loss_dtype, device=self.root_device)

    def _clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clips by the norm over all stages, which the commit brought; the plugin's own sees one stage only."""
        scale = min(1.0, clip_val / (self.gradient_norm + 1e-6))  # the formula of torch.nn.utils.clip_grad_norm_
        grads = [p.grad for p in self.precision_plugin.main_params(optimizer) if p.grad is not None]
        if grads and scale < 1.0:
            torch._foreach_mul_(grads, scale)

    def on_generation(self) -> None:
        """A new generation is complete: this worker may have become the leader."""
        was_leader = rank_zero_only.rank == 0  # type: ignore[attr-defined]
        self._follow_leader()
        if self.is_global_zero and not was_leader:
            log.info("Worker %s speaks for the run from now on.", self.worker)
            assert self.lightning_module is not None
            trainer = self.lightning_module.trainer
            show_progress_bar(trainer, self.dataloader_idx)
            keep_monitors_going(trainer)
            assert self._relay is not None
            self._relay.take_over()

    @override
    def on_train_start(self) -> None:
        # What exists by now lives as long as the process: a full garbage collection in the middle of a step need not
        # walk through it.
        gc.collect()
        gc.freeze()

    @override
    def on_train_end(self) -> None:
        """Waits until every stage has applied the last step; from then on no step can be redone."""
        self._reach("end", self.executor.version if self.executor is not None else 0)
        self.barrier("end of training")

    @override
    def teardown(self) -> None:
        for loader in self._loaders:
            loader.close()
        super().teardown()

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        return {
            **state,
            "executor": None,
            "at_point": [],
            "_context": None,
            "_loader": None,
            "_launcher": None,
            "_recorder": None,
            "_relay": None,
            "_count_in_batches": _nothing,
            "_ties": TieExchange(),
            "_loaders": [],
            "plan_library": None,
        }


def _nothing() -> None:
    """What there is to undo where nothing was done."""
