"""One worker under Lightning: set up, followed through the functions of the Trainer, and released.

It is created once the process knows its place, before Lightning begins. What needs the model and the optimizer exists
from Lightning's ``strategy.setup()`` on, which calls :meth:`Session.setup`. Its parts do the work: the sources of steps
(:mod:`~lightning_recycle.session.step_loaders`), the stage (:mod:`~lightning_recycle.session.stage_builder`), training
steps (:mod:`~lightning_recycle.session.training_steps`), checkpoints, and the transfer of state to a replacement.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.utilities import rank_zero_warn

from lightning_recycle.control.protocol.messages import LayoutWanted
from lightning_recycle.data.steps import StepHandle
from lightning_recycle.errors import ConfigurationError, UnsupportedFeatureError
from lightning_recycle.model.chain_parts import parts_of
from lightning_recycle.model.parts import ModelParts
from lightning_recycle.model.recording import RecordedModule, recorded, restore_class
from lightning_recycle.randomness import quicken
from lightning_recycle.runtime.executor.executor import Executor
from lightning_recycle.runtime.stage.stage_bundle import StageBundle, StageTies
from lightning_recycle.session.background_saves import BackgroundSaves
from lightning_recycle.session.checkpoints import Checkpoints, users_save_hook
from lightning_recycle.session.collectives import WorkerContext, watch_process_group
from lightning_recycle.session.commit_requirements import complete_norms
from lightning_recycle.session.hook_side_effects import HookSideEffects
from lightning_recycle.session.interruption import Preemption, SaveAndEnd
from lightning_recycle.session.lightning_internals import prepare_data_within, spare_moves
from lightning_recycle.session.loggers import LogRelay, keep_files
from lightning_recycle.session.loops import PipelineFitLoop, adapt_connector
from lightning_recycle.session.manual_steps import ManualSteps
from lightning_recycle.session.object_attributes import number_hooks
from lightning_recycle.session.optimizer_states import parameters_by_name
from lightning_recycle.session.outputs import OutputRecorder
from lightning_recycle.session.replica_checks import copies_differ, sums_of_copies
from lightning_recycle.session.reporting_callbacks import (
    keep_monitors_going,
    keep_reports_apart,
    leave_saves_alone,
    show_progress_bar,
    show_whole_run,
    undo_failed_saves,
)
from lightning_recycle.session.snapshot import StateTransfer
from lightning_recycle.session.stage_builder import StageBuilder, build_layers
from lightning_recycle.session.step_loaders import StepLoaders
from lightning_recycle.session.training_steps import TrainingSteps
from lightning_recycle.session.weight_callbacks import WeightCallbacks
from lightning_recycle.session.whole_forward import WholeForward

log = logging.getLogger(__name__)


class Session:
    """One worker.

    Args:
        context: its context, before Lightning begins.

    Attributes:
        collectives: this worker's collectives.
        mesh: that of this worker's position, if it has several members.
        callbacks: the Trainer's callbacks when this worker began.
        at_point: called with a point of the run ("setup", "recovery", "checkpoint", "end") and the step.
        loaders: the sources of steps.
        weights: the callbacks that change weights.
        node_rank: the number of this machine; that of the leader, when the run began, is 0. 0 in a replacement.
        local_rank: the number of its device; while data is prepared, 0 in the worker that does that for its machine.
        manual: runs the steps of a module that optimizes by itself; None for others.
        module: the module with the parts of this stage; like what follows it exists from :meth:`setup` on.
        parts: its division into stages.
        executor: runs the steps.
        steps: the training steps.
        checkpoints: this worker's part in checkpoints.
    """

    module: RecordedModule
    parts: ModelParts
    executor: Executor
    steps: TrainingSteps
    checkpoints: Checkpoints
    _relay: LogRelay

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self.trainer = trainer = context.trainer
        self.options, self.run, self.place, self.client = context.options, context.run, context.place, context.client
        self.mesh = context.mesh
        self.collectives = context.collectives
        self.grid, self.worker = context.grid, context.worker
        self.at_point: list[Callable[[str, int], None]] = []
        self.callbacks = list(trainer.callbacks)  # type: ignore[attr-defined]
        number_hooks(self.place.rank, self.place.incarnation)
        self.loaders = StepLoaders(context)
        self.weights = WeightCallbacks(trainer)
        self.manual: ManualSteps | None = None
        self.node_rank, self.local_rank = 0, self.place.device
        self._preemption = Preemption(context)
        self._dataloader_idx = 0  # of the current evaluation
        self._has_warned = False  # of copies that differ
        self._follow_leader()

    def leave(self) -> None:
        """The run is over, but this process goes on as the launching process of the next one."""
        complete_norms(None)
        rank_zero_only.rank = 0  # type: ignore[attr-defined]
        leave_saves_alone(self.trainer)
        self._preemption.release()
        restore_class(self.module)

    def reach(self, point: str, step: int) -> None:
        """Calls the hooks :attr:`at_point`."""
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
                self.executor.judge_error(error)
            raise

    # ------------------------------------------------------------------ setup

    def keep_log_files(self) -> None:
        """Lets the Trainer's loggers go on after an earlier run, as in one process, and each worker's profiler write
        files of its own.
        """
        if self.grid.num_workers > 1:
            keep_reports_apart(self.trainer)
        if self.run.has_run and self.collectives.is_leader:
            keep_files(self.trainer.loggers)

    def prepare_data_once(self) -> None:
        """Lets one worker of each machine prepare data: the leader on its own one, so that ``is_global_zero`` and
        ``rank_zero_only`` hold where Lightning asks for ``local_rank`` and ``node_rank``. A replacement asks nobody: it
        prepares data if its device is the first.
        """
        if self.client.joining or self.grid.num_workers * self.run.positions.members == 1:
            return
        places = self.collectives.gather_all("machines", (self.client.node, self.place.device))
        leader = self.collectives.leader
        order = sorted(places, key=lambda rank: (rank != leader, places[rank][1], rank))
        first: dict[str, int] = {}
        for rank in order:
            first.setdefault(places[rank][0], rank)
        self.node_rank = list(first).index(self.client.node)
        prepares = first[self.client.node] == self.place.rank
        prepare_data_within(self.trainer, partial(self._local_rank_of, 0 if prepares else max(1, self.place.device)))

    @contextmanager
    def _local_rank_of(self, preparing: int) -> Iterator[None]:
        self.local_rank = preparing
        try:
            yield
        finally:
            self.local_rank = self.place.device

    def setup(self) -> None:
        """Builds this stage of the model, and the parts that run it, when it is first called."""
        if hasattr(self, "executor"):
            return
        trainer, strategy, context = self.trainer, self.trainer.strategy, self._context
        assert strategy.accelerator is not None
        self.module = module = recorded(trainer.lightning_module)
        self.parts = parts_of(module, self.grid.stages, self.options.layers)
        strategy.accelerator.setup(trainer)
        show_whole_run(trainer, self.parts, self.collectives)
        adapt_connector(trainer, self._share_attributes)
        spare_moves()
        quicken()
        build_layers(context, self.parts, self.weights)
        self._recorder = self._make_recorder()
        self.loaders.setup(module)
        ties = StageTies(self.parts.ties(self.run.parts), self.worker.stage, parameters_by_name(module))
        self._ties = ties
        self._name_norms(ties)
        self.steps = self._make_steps(ties)
        self.collectives.settle = self.executor.settle_newest
        self._whole_forward = WholeForward(self.parts, self._recorder, module, self.collectives, self.executor)
        self.weights.connect(self.checkpoints, context.seed)
        undo_failed_saves(trainer, self.checkpoints)
        self._relay = LogRelay(context, self.executor, module)
        self._recorder.on_logger_call = self._relay.on_call
        self.client.on_leader = self._lead
        _ = trainer.log_dir  # asks all workers; in steps, which use it to save images, the answer is known
        if context.fitting:
            PipelineFitLoop.install(trainer, self.steps)
            self.steps.ending = SaveAndEnd(context, self.steps, self._preemption)
        if self.client.joining:
            trainer.num_sanity_val_steps = 0  # the others are past it
        self.reach("setup", 0)

    def _make_recorder(self) -> OutputRecorder:
        module, microbatches = self.module, self.run.data_grid.global_microbatches
        alone = microbatches == self.grid.num_workers == 1
        side_effects = HookSideEffects(module, alone, microbatches)
        recorder = OutputRecorder(module, side_effects, shared=self.grid.num_workers > 1)
        self.collectives.keeps = lambda: (side_effects.keeps_shares, bool(side_effects.names))
        self.collectives.is_in_step = lambda: module.recorded_logs is not None
        watch_process_group(self.collectives.is_in_step, of_members=self.mesh is not None)
        return recorder

    def _make_steps(self, ties: StageTies) -> TrainingSteps:
        context, trainer = self._context, self.trainer
        steps = TrainingSteps(context, self.parts, self._recorder, self.loaders, self._preemption, self.reach)
        builder = StageBuilder(context, self.parts, self._recorder)
        if context.fitting and self.parts.optimizes_itself:
            self.executor, self.manual = builder.manual_executor(ties, steps)
        else:
            steps.layers = builder.layers(steps.left_gradients, self._has_other_layers)
            self.executor = builder.executor(ties, steps)
        if not self.parts.optimizes_itself:  # otherwise the plugin sees all there is
            plugin = trainer.strategy.precision_plugin
            plugin.clip_grad_by_norm = steps.clip_grad_by_norm  # type: ignore[method-assign]
            plugin.clip_grad_by_value = steps.clip_grad_by_value  # type: ignore[method-assign]
        steps.executor = self.executor
        steps.resume_seed = self.resume_seed
        background = self._background_saves() if context.fitting else None
        if background is not None:
            self.client.complete_saves = background.await_thread
        steps.transfer = transfer = StateTransfer(context, self.module, self._recorder, steps, self.weights, background)
        self.checkpoints = steps.checkpoints = Checkpoints(
            context, self.parts, self.executor, ties.copies, self.reach, transfer, background
        )
        return steps

    def _background_saves(self) -> BackgroundSaves | None:
        """Decides whether this run saves in the background; None if all wait for checkpoints."""
        wanted = self.options.checkpoints
        by_stage = wanted.save_distributed_checkpoint or self.grid.stages == 1
        if wanted.background == "auto" and not by_stage and (hook := users_save_hook(self.trainer)):
            if self.collectives.is_leader:
                log.info(
                    "The training waits for checkpoints, so that %s sees the whole model. With"
                    " CheckpointOptions(background=True) it does not wait, and the hook sees the part of one stage.",
                    hook,
                )
            return None
        if not wanted.background or self.mesh is not None:
            return None
        return BackgroundSaves(self._context)

    def resume_seed(self, seed: int) -> None:
        """Makes ``seed``, that of a checkpoint, the seed of this run, before its first step."""
        context = self._context
        if seed == context.seed:
            return
        if self.collectives.is_leader:
            log.warning(
                "The checkpoint was written with seed %d, and this run was given seed %d: it goes on with seed %d, so"
                " that it reads the rest of the epoch in the same order and draws the same random numbers.",
                *(seed, context.own_seed, seed),
            )
        context.resumed_seed = seed
        self.loaders.reseed(seed)
        self.executor.runner.stage.seed = seed
        self.weights.prune_by(seed)

    def _name_norms(self, ties: StageTies) -> None:
        """Lets hooks see norms of gradients over all stages."""
        if self.mesh is not None:
            complete_norms(_refuse_norms)
        elif self.grid.stages > 1:
            stage = self.worker.stage
            names = {id(p): name for name, p in self.module.named_parameters()}
            copies = ties.copies
            for name, p in parameters_by_name(self.module).items():
                names[id(p)] = copies.get((stage, name), names[id(p)])
            complete_norms(self.collectives.gather_stages, names)

    def _has_other_layers(self, bundle: StageBundle) -> None:
        """The layers of this worker have changed."""
        self._ties = bundle.ties
        self._name_norms(bundle.ties)
        self.checkpoints.copies = bundle.ties.copies
        self.steps.forget_newest()

    @property
    def saves_in_background(self) -> bool:
        """Whether the training does not wait for checkpoints that are asked for now."""
        return hasattr(self, "checkpoints") and self.checkpoints.in_background is not None

    # ------------------------------------------------------------------ training

    def move_layers(self, sizes: Sequence[float]) -> None:
        """Asks for a layout in which the stages have that many layers."""
        layers = self.steps.layers if hasattr(self, "steps") else None
        if layers is None:
            raise ConfigurationError(
                "Layers move while fit trains a module in several stages by a schedule, only then."
            )
        self.client.send(LayoutWanted(self.place.rank, layers.layout_of(sizes)))

    def end_training(self) -> None:
        """Waits until every stage has applied the last step; from then on no step can be redone."""
        self.checkpoints.end_training()
        self.reach("end", self.executor.version)
        self.collectives.barrier("end of training")

    def close(self) -> None:
        """The module may leave its device: no data is read any more, and nobody refers to its weights."""
        self.loaders.close()
        if hasattr(self, "_recorder"):
            self._recorder.side_effects.forget_values()
        if self.manual is not None:
            self.manual.state.forget_values()

    def _share_attributes(self) -> None:
        """The workers of a pipeline take over the attributes of its last stage; copies of parameters are compared."""
        if self.grid.stages == 1:
            return
        last, side_effects = self.worker.stage == self.grid.stages - 1, self._recorder.side_effects
        sums = {} if self.mesh is not None else sums_of_copies(self._ties, parameters_by_name(self.module))
        answers = self.collectives.gather("attributes", (side_effects.shares() if last else None, sums))
        found = {rank: share for rank, (share, _) in answers.items()}
        stage = self.collectives.positions.stage
        text = copies_differ((stage(rank), sums) for rank, (_, sums) in answers.items())
        if text and not self._has_warned:
            self._has_warned = True
            rank_zero_warn(text)
        grid, place = self.run.data_grid, self.run.data_worker(self.place.rank)
        shares = {grid.worker(rank).pipeline: share for rank, share in sorted(found.items()) if share is not None}
        if not last and shares:
            side_effects.load_shares(shares.get(place.pipeline, next(iter(shares.values()))))

    # ------------------------------------------------------------------ evaluation

    def evaluate(self, kind: str, step: tuple[Any, ...]) -> Any:
        """Runs a batch through the pipelines; returns what the user's code returned for it, on every worker.

        Args:
            kind: "validation", "test" or "predict".
            step: (batch, its index, and the DataLoader's index if there are several).
        """
        handle: StepHandle = step[0]
        if handle.index == 0:
            self.loaders.compare(handle.loader.loaders)
        handle.loader.dataloader_idx = self._dataloader_idx = step[2] if len(step) > 2 else 0
        self.reach("validation", self.executor.version)
        split, record = self.parts.begin_evaluation(kind, step[1:])
        self._recorder.side_effects.begin_step()
        with self.module.logging_allowed(False):
            records = self.executor.evaluate(handle, split, partial(self.steps.record, record))
        with self._context.forward_context():
            returned = self._recorder.replay(records, on_step=False)
        is_one = self.run.data_grid.global_microbatches == 1
        return returned.predicted(is_one) if kind == "predict" else returned.joined()

    def forward_whole(self, inputs: Sequence[Any]) -> Any:
        """The output of the whole model; see :class:`~lightning_recycle.session.whole_forward.WholeForward`."""
        if not hasattr(self, "_whole_forward"):
            raise UnsupportedFeatureError(
                f"{type(self.trainer.lightning_module).__name__} was called, as in self(x), when this worker had one"
                " stage of it and was not connected to the others yet, as in configure_optimizers(). Call it before,"
                " in setup(), or from on_fit_start on."
            )
        return self._whole_forward(inputs)

    # ------------------------------------------------------------------ leadership

    def _lead(self) -> None:
        """A new generation is complete, or an answer came in one: this worker may have become the leader."""
        was_leader = rank_zero_only.rank == 0  # type: ignore[attr-defined]
        self._follow_leader()
        if self.collectives.is_leader and not was_leader:
            log.info("Worker %s speaks for the run from now on.", self.worker)
            show_progress_bar(self.trainer, self._dataloader_idx)
            keep_monitors_going(self.trainer, self.steps.first_batch)
            self._relay.take_over()
            if self.checkpoints.background is not None:
                self.checkpoints.background.name_files()

    def _follow_leader(self) -> None:
        rank_zero_only.rank = 0 if self.collectives.is_leader else max(1, self.place.rank)  # type: ignore[attr-defined]


def _refuse_norms(*_: Any) -> list[Any]:
    raise UnsupportedFeatureError(
        "grad_norm() is not supported where several processes hold a position: a worker has parts of gradients. With"
        " Trainer(gradient_clip_val=...) they are clipped by the norm of all."
    )
