"""One worker under Lightning: all that its process holds while a function of the Trainer runs in it.

It is created once the process knows its place, before Lightning begins. What needs the model and the optimizer exists
from Lightning's ``strategy.setup()`` on, which calls :meth:`Session.setup`. The executor runs the steps; it asks this
object, its host, for what only Lightning and the user's module know.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.loops.progress import _ProcessedTracker
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_recycle.control.client import ControlClient
from lightning_recycle.control.protocol.control_collectives import StopPlace
from lightning_recycle.control.protocol.layout_change import ranges
from lightning_recycle.control.protocol.messages import AfterStep, Cuts, Facts, LayoutWanted, Restored
from lightning_recycle.data.batching import batching_of, is_stream, promises_nothing, yields_batches
from lightning_recycle.data.iterable_style import StreamLoader
from lightning_recycle.data.map_style import MicrobatchLoader
from lightning_recycle.data.prebatched import BatchIterableLoader, GivenBatchLoader
from lightning_recycle.data.sample_order import compare
from lightning_recycle.data.steps import SampleLoader, StepHandle, StepLoader
from lightning_recycle.engines.slurm import requeue
from lightning_recycle.errors import ConfigurationError, UnsupportedFeatureError
from lightning_recycle.model.cutting import parts_of
from lightning_recycle.model.module import global_seed
from lightning_recycle.model.parts import ModelParts
from lightning_recycle.model.recorded import RecordedModule, as_it_was, recorded
from lightning_recycle.planning.layouts.fractional_cuts import are_whole, bounds_of
from lightning_recycle.randomness import layer_randomness, quicken, seeded_everything
from lightning_recycle.runtime.comm.communicator import Communicator
from lightning_recycle.runtime.executor.executor import Executor
from lightning_recycle.runtime.executor.executor_callbacks import StepResult
from lightning_recycle.runtime.executor.profiling import StageProfiler
from lightning_recycle.runtime.executor.speculative_commit import CommitRules
from lightning_recycle.runtime.executor.step_measurements import StepMeasurements
from lightning_recycle.runtime.executor.step_runner import StepRunner
from lightning_recycle.runtime.executor.whole_steps import WholeStepRunner
from lightning_recycle.runtime.machine_errors import suspicion_of
from lightning_recycle.runtime.nccl.transport_choice import transport_for
from lightning_recycle.runtime.stage.gradients import GradientBuffers, Share
from lightning_recycle.runtime.stage.stage import Stage
from lightning_recycle.runtime.stage.stage_bundle import StageBundle, StageTies
from lightning_recycle.session.checkpoints import Checkpoints, leave_saves_alone, undo_failed_saves
from lightning_recycle.session.collectives import Collectives, watch_process_group
from lightning_recycle.session.commit_requirements import (
    OptimizerStep,
    clip_factor,
    commit_requirements,
    complete_norms,
    may_change_gradients,
    overflow_of_all,
    scaler_of,
)
from lightning_recycle.session.configuration import Options, Place, RunSetup
from lightning_recycle.session.interruption import Preemption, SaveAndEnd, StopRequests
from lightning_recycle.session.loggers import LogRelay, keep_files, spare_moves
from lightning_recycle.session.loops import (
    PipelineFitLoop,
    ProgressSnapshot,
    call_before_epoch_end,
    ends_step,
    tell_batch_sizes,
)
from lightning_recycle.session.manual_steps import ManualSteps
from lightning_recycle.session.microbatch_state import ManualStepState
from lightning_recycle.session.object_attributes import number_hooks
from lightning_recycle.session.object_graph import LargeData, ObjectPack
from lightning_recycle.session.outputs import OutputRecorder
from lightning_recycle.session.replica_checks import (
    StageState,
    StateChecks,
    load_stage_state,
    optimizer_options,
    stage_state,
)
from lightning_recycle.session.reporting_callbacks import (
    keep_monitors_going,
    keep_reports_apart,
    show_progress_bar,
    show_whole_run,
)
from lightning_recycle.session.requirements import check_graphs, check_optimizers, check_trained
from lightning_recycle.session.snapshot import WorkerSnapshot, join_before_batch, restore_snapshot, take_snapshot
from lightning_recycle.session.stage_layers import StageLayers
from lightning_recycle.session.user_objects import user_graph, weights_by_name, weights_for
from lightning_recycle.session.weight_callbacks import (
    Finetuning,
    Pruning,
    WeightAverages,
    empty_optimizers,
    has_recipes,
)
from lightning_recycle.session.whole_forward import WholeForward
from lightning_recycle.session.written_tensors import untrained_marks

__all__ = ["Session"]

log = logging.getLogger(__name__)

_TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class Session:
    """One worker.

    Args:
        options: the user's options.
        run: what all workers have in common.
        place: this worker's place.
        client: its connection to the coordinator.
        trainer: the Trainer of this process.

    Attributes:
        collectives: this worker's collectives.
        callbacks: the Trainer's callbacks when this worker began.
        at_point: called with a point of the run ("setup", "recovery", "checkpoint", "end") and the step.
        module: the module with the parts of this stage; like what follows it exists from :meth:`setup` on.
        parts: how it is cut into stages.
        stop_requests: what is agreed about ``trainer.should_stop``.
        averages: the averages of this stage's weights that callbacks keep.
        finetuning: callbacks that freeze parameters and train them later.
        pruning: callbacks that mask parameters.
        executor: runs the steps.
        records_outputs: whether the module has a hook that sees outputs in training.
        checkpoints: this worker's part in checkpoints.
        manual: runs the steps of a module that optimizes by itself; None for others.
    """

    module: RecordedModule
    parts: ModelParts
    executor: Executor
    checkpoints: Checkpoints

    def __init__(
        self, options: Options, run: RunSetup, place: Place, client: ControlClient, trainer: pl.Trainer
    ) -> None:
        self.options, self.run, self.place, self.client, self.trainer = options, run, place, client, trainer
        self.collectives = Collectives(run.grid, client)
        self.grid, self.worker = run.grid, self.collectives.worker
        self.at_point: list[Callable[[str, int], None]] = []
        self.callbacks = list(trainer.callbacks)  # type: ignore[attr-defined]
        number_hooks(place.rank, place.incarnation)
        self._suspicion = suspicion_of(options.machine_errors)
        self._fitting = trainer.state.fn == TrainerFn.FITTING
        self._loaders: list[StepLoader] = []
        self._gradient_norm = 0.0
        self._newest_loss = 0.0
        self._newest_step = OptimizerStep()
        self._watched_steps = 0
        self._first_batch = 0  # of this run, if the Trainer has trained before
        self._joined_with: WorkerSnapshot | None = None
        self._large_data = LargeData({})
        self._after_step = AfterStep.GO_ON  # what all do after the newest step
        self.stop_requests = StopRequests(trainer, client, lambda: self.executor.version, lambda: self._after_step)
        self.averages = WeightAverages(trainer)
        self.finetuning = Finetuning(trainer)
        self.pruning = Pruning(trainer)
        self._preemption = Preemption(trainer, client, fitting=self._fitting)
        self._layers: StageLayers | None = None
        self._device_name = f"{trainer.strategy.root_device.type}:{place.device}"
        self._checks = StateChecks(
            self._device_name, None if options.check_every == "auto" else int(options.check_every)
        )
        self._progress: dict[int, ProgressSnapshot] = {}  # of the current step and the one before
        self._handle: StepHandle  # of the current step
        self._dataloader_idx = 0  # of the current evaluation
        self.manual: ManualSteps | None = None
        self._follow_leader()

    def leave(self) -> None:
        """The run is over, but this process goes on as the launching process of the next one."""
        complete_norms(None)
        rank_zero_only.rank = 0  # type: ignore[attr-defined]
        leave_saves_alone(self.trainer)
        self._preemption.release()
        as_it_was(self.module)

    def reach(self, point: str, step: int) -> None:
        for hook in self.at_point:
            hook(point, step)

    @contextmanager
    def settled(self) -> Iterator[None]:
        """An exception that leaves the block is the user's own: if a fault of the machine may explain it and others can
        go on without this worker, the process ends in the block.
        """
        try:
            yield
        except Exception as error:
            if hasattr(self, "executor") and not self.client.joining:  # otherwise no member has met it
                self.executor.settle(error)
            raise

    # ------------------------------------------------------------------ setup

    def keep_log_files(self) -> None:
        """Lets the Trainer's loggers go on after an earlier run, as in one process, and each worker's profiler write
        files of its own.
        """
        if self.grid.num_workers > 1:
            keep_reports_apart(self.trainer)
        if self.run.has_run and self.collectives.leads:
            keep_files(self.trainer.loggers)

    def setup(self) -> None:
        """Builds this stage of the model, and what runs it, when it is first called."""
        if hasattr(self, "executor"):
            return
        trainer, strategy = self.trainer, self.trainer.strategy
        assert strategy.accelerator is not None
        self.module = module = recorded(trainer.lightning_module)
        self.parts = parts_of(module, self.grid.stages, self.options.pipeline)
        strategy.accelerator.setup(trainer)
        show_whole_run(trainer, self.parts, self.grid)
        tell_batch_sizes(trainer)
        if self.grid.stages > 1:
            call_before_epoch_end(trainer, self._share_attributes)
        spare_moves()
        quicken()
        self._build_model()
        microbatches = self.grid.global_microbatches
        self._alone = microbatches == 1
        slots = microbatches if self.parts.keeps_between_steps else None
        alone, whole = self._alone and self.grid.num_workers == 1, self.grid.stages == 1
        self._recorder = OutputRecorder(module, alone, slots, whole)
        side_effects = self._recorder.collected
        self.collectives.keeps = lambda: (side_effects.keeps_shares, bool(side_effects.names))
        self.collectives.is_in_step = lambda: module.recorded_logs is not None
        watch_process_group(self.collectives.is_in_step)
        self.records_outputs = self.parts.records_training
        double = any(p.dtype is torch.float64 for p in module.parameters())
        self._loss_dtype = torch.float64 if double else torch.float32
        sources = [source for source in (module, getattr(trainer, "datamodule", None)) if source is not None]
        overridden = any(is_overridden(hook, source) for hook in _TRANSFER_HOOKS for source in sources)
        self._transfers = strategy.root_device.type != "cpu" or overridden
        ties = StageTies(self.parts.ties(self.run.parts), self.worker.stage, dict(module.named_parameters()))
        self._name_norms(ties)
        self.executor = self._build_executor(ties)
        self.collectives.settle = self.executor.settle_newest
        self._whole_forward = WholeForward(self.parts, self._recorder, module, self.collectives, self.executor)
        self.checkpoints = Checkpoints(
            self.parts,
            self.collectives,
            self.executor,
            ties.copies,
            sharded=self.options.save_distributed_checkpoint,
            raises=self.options.on_checkpoint_error == "raise",
            weights_only=self.run.weights_only,
            reach=self.reach,
            objects=self._pack_objects if self.options.on_stage_lost == "restart" else None,
            take_objects=self._take_objects if self.run.restarts else None,
        )
        self.averages.connect(self.checkpoints)
        self.finetuning.connect(self.collectives, ties.copies)
        self.pruning.connect(self._seed)
        undo_failed_saves(trainer, self.checkpoints)
        self._relay = LogRelay(trainer, self.collectives, self.executor, module)
        self._recorder.on_logger_call = self._relay.on_call
        _ = trainer.log_dir  # asks all workers; in steps, which use it to save images, the answer is known
        if self._fitting:
            PipelineFitLoop.install(trainer, self)
            self._save_when_ending()
        if self.client.joining:
            trainer.num_sanity_val_steps = 0  # the others are past it
        self.reach("setup", 0)

    def _name_norms(self, ties: StageTies) -> None:
        """Lets hooks see norms of gradients over all stages."""
        if self.grid.stages > 1:
            stage = self.worker.stage
            names = {id(p): ties.copies.get((stage, name), name) for name, p in self.module.named_parameters()}
            complete_norms(self.collectives.gather_stages, names)

    def _has_other_layers(self, bundle: StageBundle) -> None:
        """The layers of this worker have changed."""
        self._name_norms(bundle.ties)
        self.checkpoints.copies = bundle.ties.copies
        self._newest_step = OptimizerStep()

    def _save_when_ending(self) -> None:
        callbacks = self.trainer.callbacks  # type: ignore[attr-defined]
        callbacks[:] = [callback for callback in callbacks if not isinstance(callback, SaveAndEnd)]  # of an earlier run
        self._ending = SaveAndEnd(
            self.options.save_on_signal, self.collectives, self._ends_after_batch, self._preemption, self._requeue
        )
        callbacks.append(self._ending)

    def _requeue(self) -> None:
        with self.client.busy("requeue"):
            requeue(self.options.signal_timeout)

    def _build_model(self) -> None:
        """Builds the layers of this stage, on the device, and their optimizer."""
        trainer, strategy = self.trainer, self.trainer.strategy
        owned = self.run.parts[self.worker.stage]
        self.parts.keep(self.run.parts, self.worker.stage)
        unbuilt = has_recipes(self.module)
        with strategy.precision_plugin.module_init_context():
            self.parts.build(owned, self._seed)
        if unbuilt:
            self.finetuning.freeze(self.module)
        self.averages.copy_stage(self.module)
        strategy.model = strategy.precision_plugin.convert_module(self.module)
        strategy.model_to_device()
        self.parts.check_parameters(self.worker.stage, self.grid.stages)
        if self._fitting:
            check_graphs(self.module, self.grid.stages)
            with empty_optimizers():
                strategy.setup_optimizers(trainer)
        strategy.setup_precision_plugin()
        if self._fitting:
            check_optimizers(strategy.optimizers, several=self.parts.optimizes_itself)
        if self._fitting and self.grid.stages > 1:
            trains = any(parameter.requires_grad for parameter in self.module.parameters())
            check_trained(self.module, self.collectives.decide(trains, all_agree=False) or self.client.joining)
        if not self.parts.optimizes_itself:  # otherwise the plugin sees all there is
            strategy.precision_plugin.clip_grad_by_norm = self._clip_grad_by_norm  # type: ignore[method-assign]

    def _hold(
        self, cuts: Cuts, ties: StageTies, accumulated: Mapping[nn.Parameter, Tensor] = MappingProxyType({})
    ) -> StageBundle:
        """What runs the parts of this worker under the layout ``cuts``, which are there."""
        device, owned = self.trainer.strategy.root_device, ranges(cuts)[self.worker.stage]
        by_itself = self._fitting and self.parts.optimizes_itself
        # Only fit trains them, and only by the schedule has this strategy something to keep for each.
        parameters = list(self.module.parameters()) if self._fitting and not by_itself else []
        training_parts = self.parts.training_parts(owned, self._recorder)
        scaler = scaler_of(self.trainer)
        stage = Stage(
            training_parts,
            owned.start,
            self._seed,
            device,
            loss=self.parts.loss if self.worker.stage == self.grid.stages - 1 else None,
            forward_context=self._forward_context,
            evaluation_layers=self.parts.evaluation_parts(owned, self._recorder),
            forward_layers=self.parts.forward_parts(owned, self._recorder),
            loss_name=self.parts.loss_name,
            loss_backward=self.parts.loss_backward,
            loss_is_optional=self.parts.loss_is_optional,
            takes_target=self.parts.takes_target,
            scale_loss=None if scaler is None else scaler.scale,
            sharing=None if are_whole(cuts) else partial(self._among, cuts, owned),
        )
        several = self.grid.num_workers > 1  # otherwise nobody ever wants them
        lends_copies = several and self._fitting and may_change_gradients(self.trainer, self.module)
        gradients = GradientBuffers(parameters, device, self.options.bucket_bytes, lends_copies, ties.holders)
        return StageBundle(stage, parameters, gradients, ties, accumulated)

    def _among(
        self, cuts: Cuts, held: range, modules: Sequence[nn.Module], microbatch: int | None
    ) -> tuple[Sequence[nn.Module], int]:
        """Of ``modules``, which run the parts ``held``, those of a micro-batch under the layout ``cuts``."""
        bounds = [math.floor(bound) for bound in cuts]
        if microbatch is not None:
            bounds = [*bounds_of(cuts, microbatch, self.grid)]
        own = range(*bounds[self.worker.stage : self.worker.stage + 2])
        return self.parts.among(modules, held, own), own.start

    def _build_executor(self, ties: StageTies) -> Executor:
        trainer, module, device = self.trainer, self.module, self.trainer.strategy.root_device
        by_itself = self._fitting and self.parts.optimizes_itself
        held = self._hold((0, *(part.stop for part in self.run.parts)), ties)
        common = (
            self.worker,
            self.grid,
            self.client,
            Communicator(
                self.place.rank,
                self.place.host,
                device,
                self.client,
                self.client.key_for("connections"),
                transport=transport_for(
                    self.options.transport, self.place.rank, device, self.options.standby_connections
                ),
            ),
            held,
            self,
        )
        if by_itself:
            if self.options.verify:
                rank_zero_warn(
                    f"verify={self.options.verify} has no effect: {type(trainer.lightning_module).__name__} has manual"
                    " optimization, and what it steps cannot be computed a second time."
                )
            self.manual = ManualSteps(
                trainer,
                held.stage.layers[0],
                self.begin_microbatch,
                lambda output, samples: self.record_output(output, None, samples),
                self._forward_context,
                self._seed,
                self.grid.global_microbatches,
            )
            return Executor(WholeStepRunner(*common, body=self.manual, state=ManualStepState(trainer)))
        needs = commit_requirements(trainer, module, self.grid.stages)
        if self._fitting and self.grid.stages > 1:
            self._layers = StageLayers(
                trainer,
                self.parts,
                self.worker.stage,
                self.run.parts,
                device,
                self._hold,
                lambda: self.executor.accumulated.sums,
                self._has_other_layers,
                self.place.rank,
                self.client.send,
                measures=self.options.adapt != "reroute" and not self.client.joining,
            )
        rules = CommitRules(
            norm=needs.norm,
            overflow=needs.overflow,
            staggered=self.run.staggered,
            presumes=self._leaves_gradients_alone if needs.afterwards else None,
        )
        measurements = StepMeasurements(
            self.client,
            device,
            profiler=StageProfiler(held.parameters) if self.run.profiles else None,
            held=self._held_besides if held.parameters else None,
            tries_splitting=self._fitting and self.options.tries_splitting(self.grid.stages),
        )
        runner = StepRunner(
            *common,
            rules,
            measurements,
            shadow_on_host=self.options.shadow == "host",
            device_name=self._device_name,
        )
        return Executor(runner, self._layers)

    def _held_besides(self) -> Iterator[torch.Tensor]:
        """The tensors that stay from step to step besides parameters and gradients: buffers, and optimizer states with
        those before the newest step.
        """
        yield from self.module.buffers()
        yield from self._newest_step.tensors()
        for optimizer in self.trainer.strategy.optimizers:
            for state in optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, torch.Tensor))

    @property
    def _seed(self) -> int:
        return global_seed() if self.options.seed is None else self.options.seed

    def _forward_context(self) -> AbstractContextManager[Any]:
        return self.trainer.strategy.precision_plugin.train_step_context() or nullcontext()

    def _clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clips by the norm over all stages, which the commit delivered; the plugin itself sees one stage only."""
        scale = clip_factor(clip_val, self._gradient_norm)
        plugin = self.trainer.strategy.precision_plugin
        grads = [p.grad for p in plugin.main_params(optimizer) if p.grad is not None]
        if grads and not scale >= 1.0:  # a norm that is NaN reaches all parameters, as on one device
            torch._foreach_mul_(grads, scale)

    def _leaves_gradients_alone(self, norm: float) -> bool:
        """Whether gradients of that norm, over all stages, are not clipped."""
        assert self.trainer.gradient_clip_val is not None
        return clip_factor(self.trainer.gradient_clip_val, norm) >= 1.0

    # ------------------------------------------------------------------ data

    def process_dataloader(self, dataloader: Any) -> StepLoader:
        """A source of steps that reads what ``dataloader`` would read."""
        if isinstance(dataloader, StepLoader):  # in the user's CombinedLoader, where Lightning has put it
            dataloader = dataloader.dataloader
        training, grid, worker, seed = self.trainer.training, self.grid, self.worker, self._seed
        steps: dict[str, Any] = {"batch_pipelines": self.run.batch_pipelines, "evaluation": not training}
        loader: StepLoader
        if yields_batches(dataloader):
            loader = BatchIterableLoader(dataloader, grid, seed, **steps)
            if training and grid.num_workers > 1:
                rank_zero_warn(
                    f"{type(dataloader).__name__} yields batches, so there are no samples to divide: every worker"
                    " iterates over it, which must give the same batches each time, and each of the"
                    f" {self.run.batch_pipelines} pipelines trains on all of them, as under DDP. Use a"
                    " DataLoader over samples to share the work."
                )
        elif is_stream(dataloader):
            loader = StreamLoader(dataloader, grid, seed, **steps)
            if grid.num_workers > 1 and promises_nothing(dataloader):
                rank_zero_warn(
                    f"{type(dataloader.dataset).__name__} is an IterableDataset without state. Every worker reads all"
                    " of it, and a worker that joins, or a run that resumes, reads the epoch again up to its place:"
                    " it must give the same samples each time, in every process, or the run ends with an error. Give"
                    " it state_dict() and load_state_dict(), or __getitem__() and __len__(), to save that reading."
                )
        else:
            kind = MicrobatchLoader if batching_of(dataloader)[0] is not None else GivenBatchLoader
            reads = worker.stage in (0, grid.stages - 1)
            loader = kind(dataloader, grid, worker.pipeline, seed, prefetch=reads, **steps)
            if loader.left_out:
                rank_zero_warn(
                    f"Each epoch of the training leaves out {loader.left_out}. Give it drop_last=True if that is"
                    " what you want."
                )
        if lost := loader.lost_state:
            rank_zero_warn(
                f"{', '.join(lost)} of the sampler is an iterator, whose place cannot be copied: a replacement reads"
                " this epoch in the order of the others, but later epochs in its own, and a resumed run draws another"
                " order. Keep a number of the epoch, a generator or a list instead."
            )
        loader.prepare = self._on_device
        self._loaders.append(loader)
        return loader

    def training_loaders(self, loaders: Sequence[StepLoader]) -> None:
        """These are the loaders of the training from now on: what others have read ahead is not needed."""
        for old in [loader for loader in self._loaders if not loader.evaluation and loader not in loaders]:
            old.close()
            self._loaders.remove(old)

    def compare_data(self, loaders: Sequence[StepLoader]) -> None:
        """Before the first step of an epoch: all workers must be about to read the same.

        Raises:
            ConfigurationError: on all workers, if they are not.
        """
        if self.grid.num_workers > 1 and any(facts := [loader.facts() for loader in loaders]):
            compare(self.collectives.gather("data", facts).values())

    def close_loaders(self) -> None:
        for loader in self._loaders:
            loader.close()

    @property
    def global_batch_size(self) -> int:
        """Samples per step, of the first loader if there are several; 0 if no loader says how many."""
        training = (loader for loader in self._loaders if not loader.evaluation)
        return next((loader.global_batch_size for loader in training if isinstance(loader, SampleLoader)), 0)

    def _on_device(self, data: Any, seed: int, dataloader_idx: int) -> Any:
        """Converts and moves a collated batch with the user's hooks; what they draw depends on the data's address."""
        data = self.trainer.strategy.precision_plugin.convert_input(data)
        if not self._transfers:
            return data
        device, module = self.trainer.strategy.root_device, self.module
        with seeded_everything() as reseed, layer_randomness(device) as generator:
            reseed(seed)
            generator.manual_seed(seed)
            data = pl.LightningModule._on_before_batch_transfer(module, data, dataloader_idx)
            return module._apply_batch_transfer_handler(data, device, dataloader_idx)

    # ------------------------------------------------------------------ training

    def enter_training(self) -> None:
        """Before the first epoch: a worker that joins a running training waits until it is let in."""
        # After an earlier fit of this Trainer the steps are numbered on too, as their numbers decide on randomness.
        client, begun = self.client, self.trainer.fit_loop.epoch_loop.batch_progress.total
        assert isinstance(begun, _ProcessedTracker)
        self._first_batch = begun.completed
        restored = begun.started or self.checkpoints.restored_steps
        self._preemption.take_sigterm()
        if self.checkpoints.restored_objects is not None:
            self._take_objects(self.checkpoints.restored_objects, {})
        if self.grid.pipelines > 1 or self.checkpoints.objects is not None:
            self._look_at_objects()
        if client.joining:
            self.executor.join()
        elif restored:
            self.executor.version = restored
            client.send(Restored(self.place.rank, restored))

    def _look_at_objects(self) -> None:
        """Notes the large data of the user's objects as it is now, and names what a replacement would not get."""
        graph = user_graph(self.trainer)
        self._large_data = LargeData(graph.large)
        if self.collectives.leads and (stays := graph.unpicklable()):
            log.warning(
                "A worker that replaces a lost one makes these attributes itself, as they cannot be pickled: %s.",
                ", ".join(f"{path} ({kind.__name__})" for path, kind in stays.items()),
            )

    def _take_objects(self, objects: ObjectPack, state: Mapping[str, Tensor]) -> None:
        """The user's objects become what they were; ``state``: has buffers that hooks made."""
        graph, device = user_graph(self.trainer), self.trainer.strategy.root_device
        given = {name: tensor.to(device) for name, tensor in state.items()}
        graph.update(objects, device, {**graph.large, **weights_for(self.module, given)})

    def _pack_objects(self) -> ObjectPack:
        weights = {id(tensor): name for name, tensor in weights_by_name(self.module).items()}
        return user_graph(self.trainer).pack({**self._large_data.unchanged(), **weights}).on_cpu()

    def run_step(self, handle: StepHandle, apply: Callable[[StepResult], None], share: Share) -> StepResult:
        if self._joined_with is not None:  # its donor waited here, after the same hooks
            restore_snapshot(self.trainer, self.averages, self._joined_with, self._large)
            self.executor.accumulated.load_state(self._joined_with.accumulated)
            self._recorder.collected.load_state(self._joined_with.collected)
            self._joined_with, self.client.member.joining = None, False

        scaler = scaler_of(self.trainer)

        def apply_with_hooks(result: StepResult) -> None:
            self._recorder.collected.rewind()
            self._tell_of_writes(marks)
            # Whoever asks for the norm has unscaled gradients before him.
            self._newest_loss = result.loss
            self._gradient_norm = result.gradient_norm / (1.0 if scaler is None else scaler.get_scale())
            with self.module.logging_allowed(True), overflow_of_all(scaler, result.overflow):
                apply(result)
            if result.check_next:
                self._checks.announce(number + 1)

        number, self._handle = self.executor.version, handle
        watches = self._watched_steps < 3 and self._recorder.collected.written is None and self.manual is None
        self._watched_steps += 1
        marks = untrained_marks(self.module) if watches else {}
        self._progress = {n: moment for n, moment in self._progress.items() if n == number - 1}
        self._progress[number] = ProgressSnapshot.of(self.trainer)
        self._recorder.collected.begin_step()
        with self.module.logging_allowed(False):
            result = self.executor.run_step(handle, apply_with_hooks, share)
        self._after_step = result.after_step
        if self._layers is not None:
            self._layers.applied()
        return result

    def _tell_of_writes(self, before: Mapping[str, tuple[int, int]]) -> None:
        now = untrained_marks(self.module) if before else {}
        written = [name for name, mark in before.items() if now.get(name, mark) != mark]
        if written and self.grid.global_microbatches > 1:
            log.warning(
                "Worker %s: %s %s written while micro-batches are computed, once for each, on top of each other: the"
                " result depends on num_microbatches and on failures. Write in on_train_batch_end(), which runs once"
                " per step, or train a LightningModule with pipeline_parallel_size=1, where that is taken care of.",
                self.worker,
                ", ".join(written[:5]) + (", ..." if len(written) > 5 else ""),
                "is" if len(written) == 1 else "are",
            )
            self._watched_steps = 3

    def _share_attributes(self) -> None:
        """The workers of a pipeline take over the attributes of its last stage."""
        last = self.worker.stage == self.grid.stages - 1
        found = self.collectives.gather("attributes", self._recorder.collected.shares() if last else None)
        shares = {self.grid.worker(rank).pipeline: share for rank, share in sorted(found.items()) if share is not None}
        if not last and shares:
            self._recorder.collected.load_shares(shares.get(self.worker.pipeline, next(iter(shares.values()))))

    def settle(self) -> None:
        """Returns when the parameters are what they will be."""
        self.executor.settle_newest()

    def move_layers(self, sizes: Sequence[float]) -> None:
        if self._layers is None:
            raise ConfigurationError(
                "Layers move while fit trains a module in several stages by a schedule, only then."
            )
        cuts = self._layers.layout_of(sizes)
        self.client.send(LayoutWanted(self.place.rank, cuts))

    def agree_on_stop(self, place: StopPlace) -> None:
        self.stop_requests.agree(place)

    def end_step(self) -> None:
        """The step is logged; a run that was told to end ends here."""
        self._ending.end(self.trainer)

    def _ends_after_batch(self) -> bool:
        """Whether the run was told to end. Not between batches whose gradients one step takes together, since no
        checkpoint holds what they have added up to.
        """
        return self._after_step is AfterStep.END and ends_step(self.trainer)

    def as_loss(self, value: float) -> Tensor:
        """The step's mean loss as Lightning sees it on one device: a scalar of the dtype that the model computes in."""
        return torch.tensor(value, dtype=self._loss_dtype, device=self.trainer.strategy.root_device)

    def log_step(self, index: int, loss: Tensor, outputs: Mapping[int, bytes]) -> Any:
        """Logs what the module's code did with the micro-batches of the training step ``index`` of an epoch; returns
        what it returned besides the loss.
        """
        returned = None
        if any(outputs.values()):
            with self._forward_context():
                returned = self._recorder.replay(outputs, on_step=True).joined()
        self.parts.on_loss(loss, index)
        return returned

    def end_training(self) -> None:
        """Waits until every stage has applied the last step; from then on no step can be redone."""
        self.reach("end", self.executor.version)
        self.collectives.barrier("end of training")

    # ------------------------------------------------------------------ evaluation

    def evaluate(self, kind: str, step: tuple[Any, ...]) -> Any:
        """Runs a batch through the pipelines; returns what the user's code returned for it, on every worker.

        Args:
            kind: "validation", "test" or "predict".
            step: (batch, its index, and the DataLoader's index if there are several).
        """
        handle: StepHandle = step[0]
        if handle.index == 0:
            self.compare_data(handle.loader.loaders)
        handle.loader.dataloader_idx = self._dataloader_idx = step[2] if len(step) > 2 else 0
        self.reach("validation", self.executor.version)
        split, record = self.parts.begin_evaluation(kind, step[1:])
        self._recorder.collected.begin_step()
        with self.module.logging_allowed(False):
            records = self.executor.evaluate(handle, split, partial(self._record, record))
        with self._forward_context():
            returned = self._recorder.replay(records, on_step=False)
        return returned.predicted(self._alone) if kind == "predict" else returned.joined()

    def forward_whole(self, inputs: Sequence[Any]) -> Any:
        """The output of the whole model; see :class:`~lightning_recycle.session.whole_forward.WholeForward`."""
        if not hasattr(self, "_whole_forward"):
            raise UnsupportedFeatureError(
                f"{type(self.trainer.lightning_module).__name__} was called, as in self(x), when this worker had one"
                " stage of it and was not connected to the others yet, as in configure_optimizers(). Call it before,"
                " in setup(), or from on_fit_start on."
            )
        return self._whole_forward(inputs)

    def _record(self, record: Callable[..., bytes], output: Any, target: Any, samples: int) -> bytes:
        """Records what the user's code does with an output, as in a step on one device."""
        with self._forward_context():
            return record(self._recorder, output, target, samples)

    # ------------------------------------------------------------------ what the executor asks

    def split(self, data: Any, index: int) -> tuple[Any, Any]:
        if self._recorder.collected.slots is not None:
            self._recorder.collected.slots.check()
        return self.parts.split(data, index)

    def begin_microbatch(self, index: int) -> None:
        self._recorder.collected.slot = index

    def computing_again(self, index: int) -> AbstractContextManager[None]:
        return self._recorder.collected.leaving_nothing(index)

    def record_output(self, output: Any, target: Any, samples: int) -> bytes:
        return self._record(self.parts.record_training, output, target, samples)

    def is_suspect(self, error: Exception) -> bool:
        return self._suspicion(error)

    def on_generation(self) -> None:
        """A new generation is complete: this worker may have become the leader."""
        was_leader = rank_zero_only.rank == 0  # type: ignore[attr-defined]
        if self.client.generation == 0 and hasattr(self, "executor"):
            self._checks.announce(self.executor.version)
        self._follow_leader()
        if self.collectives.leads and not was_leader:
            log.info("Worker %s speaks for the run from now on.", self.worker)
            show_progress_bar(self.trainer, self._dataloader_idx)
            keep_monitors_going(self.trainer, self._first_batch)
            self._relay.take_over()

    def _follow_leader(self) -> None:
        rank_zero_only.rank = 0 if self.collectives.leads else max(1, self.place.rank)  # type: ignore[attr-defined]

    def on_recovery(self, step: int) -> None:
        self._recorder.collected.run_again()
        self._checks.announce(step + 1)  # some may have applied ``step`` already
        self.reach("recovery", step)

    def as_in_step(self, step: int) -> AbstractContextManager[None]:
        return self._progress[step].again(self.trainer)

    def describe_step(self, step: int) -> Facts:
        trainer = self.trainer
        counters: dict[str, float] = {
            "trainer.global_step": trainer.global_step,
            "trainer.current_epoch": trainer.current_epoch,
        }
        inputs: dict[str, float] = {}
        if digest_of_data := self._handle.loader.digest(self._handle):
            inputs["the digest of the samples read so far, the same for every process that reads,"] = digest_of_data
        if self.stop_requests.agreed:
            counters["trainer.should_stop"] = trainer.should_stop
        options = optimizer_options(trainer.strategy.optimizers)
        if (scaler := scaler_of(trainer)) is not None:
            inputs["loss scale"] = scaler.get_scale()
        checked = None
        if self._checks.is_due(step) and self.executor.is_settled:
            with self.client.busy("a check of the parameters"):
                checked = self._checks.check(step, self.module, trainer.strategy.optimizers)
        return Facts(counters, options, checked, inputs)

    def must_know(self, step: int) -> bool:
        return self._checks.is_due(step) or self._newest_step.is_watched(self.trainer.strategy.optimizers)

    def keep_optimizer(self) -> None:
        self._newest_step.keep(self.trainer.strategy.optimizers)

    def step_again(self, norm: float) -> None:
        assert self.trainer.gradient_clip_val is not None
        factor = clip_factor(self.trainer.gradient_clip_val, norm)
        loss = self.as_loss(self._newest_loss)
        self._newest_step.again(self.trainer.strategy.optimizers, factor, lambda: loss)

    def stage_state(self) -> StageState:
        return stage_state(self.module, self.trainer.strategy.optimizers)

    def load_stage_state(self, state: StageState) -> None:
        load_stage_state(self.module, self.trainer.strategy.optimizers, state)

    def take_snapshot(self) -> WorkerSnapshot:
        return take_snapshot(
            self.trainer,
            self.averages,
            self.client.member.next_collective,
            self._recorder.collected.state(),
            self.executor.accumulated.state(),
            self._large_data,
            self.stop_requests.agreed,
        )

    def restore_snapshot(self, snapshot: WorkerSnapshot) -> None:
        member = self.client.member
        # Loaders and the hooks of this batch ask all workers something; the others are past that, and this one answers
        # itself until it has come to the step.
        member.joining = True
        self._large = join_before_batch(self.trainer, self.averages, snapshot)
        member.next_collective = snapshot.next_collective
        self.finetuning.joined()
        self.stop_requests.agreed = snapshot.stop_agreed
        self._recorder.collected.load_state(snapshot.collected)
        self._joined_with = snapshot
