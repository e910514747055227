"""One worker under Lightning: setup, run, release."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.utilities import rank_zero_warn

from lightning_recycle.control.protocol.messages import LayoutWanted
from lightning_recycle.data.step_sources import StepHandle
from lightning_recycle.errors import ConfigurationError, UnsupportedFeatureError
from lightning_recycle.model.chain_parts import parts_of
from lightning_recycle.model.parts import ModelParts
from lightning_recycle.model.recorded_module import CallResult, RecordedModule, make_recorded, restore_class
from lightning_recycle.runtime.executor import Executor
from lightning_recycle.runtime.verification import alike, copies_differ, fingerprint, sums_of_copies
from lightning_recycle.session.checkpoint_callbacks import CallbackCheckpoints, leave_saves_alone
from lightning_recycle.session.gradient_clipping import complete_norms
from lightning_recycle.session.lightning_internals import prepare_data_within, skip_needless_moves
from lightning_recycle.session.loops import PipelineFitLoop, patch_logger_connector
from lightning_recycle.session.microbatch_changes import MicrobatchChanges
from lightning_recycle.session.object_attributes import number_hooks
from lightning_recycle.session.object_graph import Originals
from lightning_recycle.session.optimizer_states import parameters_by_name
from lightning_recycle.session.output_recorder import OutputRecorder
from lightning_recycle.session.reporting import (
    LogRelay,
    keep_file,
    keep_monitors_going,
    keep_reports_apart,
    show_progress_bar,
    show_whole_run,
)
from lightning_recycle.session.stage_layers import build_layers
from lightning_recycle.session.step_loaders import StepLoaders
from lightning_recycle.session.training_steps import TrainingSteps
from lightning_recycle.session.worker_context import (
    ALONE,
    Preemption,
    WorkerCollectives,
    WorkerContext,
    watch_process_group,
)

log = logging.getLogger(__name__)


class Session:
    """One worker; its stage exists from Lightning's ``strategy.setup()`` on.

    Attributes:
        mesh: that of this worker's position, if it has several members.
        callbacks: the Trainer's callbacks when this worker began.
        originals: what the user's objects held then, where the launching process gets them back.
        at_point: called with a point of the run ("setup", "recovery", "checkpoint", "end") and the step.
        node_rank: the number of this machine; 0 for that of the first leader, and in a replacement.
        local_rank: the number of its device; while data is prepared, 0 in the worker that does that for its machine.
    """

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self.trainer = trainer = context.trainer
        self.options, self.run, self.place, self.client = context.options, context.run, context.place, context.client
        self.mesh = context.mesh
        self.collectives = context.collectives
        self.grid, self.worker = context.grid, context.worker
        self.at_point: list[Callable[[str, int], None]] = []
        self.callbacks = list(trainer.callbacks)  # type: ignore[attr-defined]
        self.originals: Originals | None = None
        number_hooks(self.place.rank, self.place.incarnation)
        self.loaders = StepLoaders(context)
        self.node_rank, self.local_rank = 0, self.place.device
        self._preemption = Preemption(context)
        self._steps: TrainingSteps | None = None
        self._whole_forward: WholeForward | None = None
        self._dataloader_idx = 0  # of the current evaluation
        self._has_warned = False  # of copies that differ
        self._has_warned_of_numbers = False
        self._follow_leader()

    @property
    def steps(self) -> TrainingSteps:
        """The training steps; like the next properties there from :meth:`setup` on."""
        if self._steps is None:
            raise AttributeError("This worker has no stage of the model before setup().")
        return self._steps

    @property
    def module(self) -> RecordedModule:
        return self.steps.module

    @property
    def parts(self) -> ModelParts:
        return self.steps.parts

    @property
    def executor(self) -> Executor:
        return self.steps.executor

    @property
    def checkpoints(self) -> CallbackCheckpoints:
        return self.steps.checkpoints

    def leave(self) -> None:
        """Releases the process, which is then the launching process of the next run."""
        complete_norms(None)
        rank_zero_only.rank = 0  # type: ignore[attr-defined]
        leave_saves_alone(self.trainer)
        self._preemption.release()
        restore_class(self.module)

    def at_fault_point(self, point: str, step: int) -> None:
        for hook in self.at_point:
            hook(point, step)

    @contextmanager
    def errors_judged(self) -> Iterator[None]:
        """Ends the process in the block if a fault of the machine may explain an error.

        Where the others can go on without this worker. An exception that leaves the block is the user's own.
        """
        try:
            yield
        except Exception as error:
            if self._steps is not None and not self.client.is_joining:  # otherwise no member has met it
                self.executor.judge_error(error)
            raise

    # ------------------------------------------------------------------ setup

    def keep_log_files(self) -> None:
        """Makes loggers append to files of an earlier run, and profilers write their own."""
        if self.grid.num_workers > 1:
            keep_reports_apart(self.trainer)
        if self.run.has_run and self.collectives.is_leader:
            for logger in self.trainer.loggers:
                keep_file(logger)

    def prepare_data_once(self) -> None:
        """Lets one worker of each machine prepare data, the leader on its own.

        So ``is_global_zero`` and ``rank_zero_only`` hold where Lightning asks for ``local_rank`` and ``node_rank``. A
        replacement asks no other worker: it prepares data if its device is the first.
        """
        if self.client.is_joining or self.grid.num_workers * self.run.positions.members == 1:
            return
        places = self.collectives.gather_all("machines", (self.client.node, self.place.device))
        leader = self.collectives.leader
        order = sorted(places, key=lambda rank: (rank != leader, places[rank][1], rank))
        first: dict[str, int] = {}
        for rank in order:
            first.setdefault(places[rank][0], rank)
        self.node_rank = list(first).index(self.client.node)
        prepares = first[self.client.node] == self.place.rank
        local_rank = 0 if prepares else max(1, self.place.device)
        prepare_data_within(self.trainer, partial(patch.object, self, "local_rank", local_rank))

    def setup(self) -> None:
        """Builds this stage of the model and its parts on the first call."""
        if self._steps is not None:
            return
        trainer, strategy, context = self.trainer, self.trainer.strategy, self._context
        assert strategy.accelerator is not None
        module = make_recorded(trainer.lightning_module)
        parts = parts_of(module, self.grid.stages, self.options.layers)
        strategy.accelerator.setup(trainer)
        show_whole_run(trainer, parts, self.collectives)
        patch_logger_connector(trainer, self._share_attributes)
        skip_needless_moves()
        watch_process_group(self.collectives.is_in_step, of_members=self.mesh is not None)
        build_layers(context, parts)
        grid = self.run.data_grid
        alone = grid.global_microbatches == self.grid.num_workers == 1
        microbatch_changes = MicrobatchChanges(module, alone, grid.global_microbatches, grid.microbatches)
        relay = LogRelay(context, module, lambda: self.executor.version)
        recorder = OutputRecorder(module, microbatch_changes, self.grid.num_workers > 1, relay.on_call)
        self.loaders.setup(module)
        self._steps = TrainingSteps(context, parts, recorder, self.loaders, self._preemption, self.at_fault_point)
        self._whole_forward = WholeForward(self.steps, self.collectives)
        self.client.on_leader = partial(self._take_leadership, relay)
        _ = trainer.log_dir  # asks all workers; in steps, which use it to save images, the answer is known
        if context.fitting:
            PipelineFitLoop.install(trainer, self.steps)
        if self.client.is_joining:
            trainer.num_sanity_val_steps = 0  # the others are past it
        self.at_fault_point("setup", 0)

    @property
    def saves_in_background(self) -> bool:
        return self._steps is not None and self.checkpoints.in_background

    # ------------------------------------------------------------------ training

    def move_layers(self, sizes: Sequence[float]) -> None:
        layers = None if self._steps is None else self._steps.layers
        if layers is None:
            raise ConfigurationError(
                "Layers move while fit trains a module in several stages by a schedule, only then."
            )
        self.client.send(LayoutWanted(self.place.rank, layers.layout_of(sizes)))

    def end_training(self) -> None:
        """Waits until every stage has applied the last step."""
        self.checkpoints.end_training()
        self.at_fault_point("end", self.executor.version)
        self.collectives.barrier("end of training")

    def close(self) -> None:
        """Stops reading data and drops references to weights, which may then move."""
        self.loaders.close()
        if self._steps is not None:
            self._steps.recorder.microbatch_changes.forget_values()
            if self._steps.manual is not None:
                self._steps.manual.state.forget_values()

    def _share_attributes(self) -> None:
        """The workers of a pipeline take over the attributes of its last stage."""
        if self.grid.stages == 1:
            return
        last, microbatch_changes = self.worker.stage == self.grid.stages - 1, self.steps.recorder.microbatch_changes
        sums = {} if self.mesh is not None else sums_of_copies(self.steps.ties, parameters_by_name(self.module))
        answers = self.collectives.gather("attributes", (microbatch_changes.shares() if last else None, sums))
        found = {rank: share for rank, (share, _) in answers.items()}
        stage = self.collectives.positions.stage
        text = copies_differ((stage(rank), sums) for rank, (_, sums) in answers.items())
        if text and not self._has_warned:
            self._has_warned = True
            rank_zero_warn(text)
        grid, place = self.run.data_grid, self.run.data_worker(self.place.rank)
        shares = {grid.worker(rank).pipeline: share for rank, share in sorted(found.items()) if share is not None}
        if not last and shares:
            microbatch_changes.load_shares(shares.get(place.pipeline, next(iter(shares.values()))))

    def reduce(self, tensor: Any, reduce_op: Any) -> Any:
        """Combines ``tensor`` of all workers; adds shares of evaluations in attributes."""
        shares = lists = False
        if self._steps is not None:
            microbatch_changes = self._steps.recorder.microbatch_changes
            shares, lists = microbatch_changes.keeps_shares, bool(microbatch_changes.names)
        self._warn_of_kept_numbers(if_alike="sum" in str(reduce_op).lower())
        return self.collectives.reduce(tensor, reduce_op, shares, lists)

    def all_gather(self, tensor: torch.Tensor, sync_grads: bool) -> torch.Tensor:
        """A row for each live worker."""
        self._warn_of_kept_numbers()
        return self.collectives.all_gather(tensor, sync_grads)

    def _warn_of_kept_numbers(self, if_alike: bool = False) -> None:
        """Warns once that no worker has its own share of what training steps keep.

        ``if_alike``: also if micro-batches change it alike.
        """
        if self._has_warned_of_numbers or self._steps is None or not self.trainer.training:
            return
        kept = self._steps.recorder.microbatch_changes.kept_numbers(if_alike)
        if kept:
            self._has_warned_of_numbers = True
            rank_zero_warn(
                "A value is combined over workers (sync_dist=True, all_gather), and training steps change"
                f" {', '.join(kept)}. What training steps keep is the same on all workers, as one micro-batch left it,"
                " so no combination of it is that of the whole batch. Log sums in the step, self.log(...,"
                " reduce_fx='sum'), or append to a list in an attribute, which is whole on every worker."
            )

    # ------------------------------------------------------------------ evaluation

    def evaluate(self, kind: str, step: tuple[Any, ...]) -> Any:
        """Runs a batch through the pipelines; returns its result on every worker."""
        handle: StepHandle = step[0]
        handle.refuse_changes()
        if handle.index == 0:
            self.loaders.compare(handle.loader.loaders)
        handle.loader.dataloader_idx = self._dataloader_idx = step[2] if len(step) > 2 else 0
        self.at_fault_point("validation", self.executor.version)
        split, record = self.parts.begin_evaluation(kind, step[1:])
        self.steps.recorder.microbatch_changes.begin_step()
        with self.module.logging_allowed(False):
            records = self.executor.evaluate(handle, split, partial(self.steps.record, record))
        with self._context.forward_context():
            returned = self.steps.recorder.replay(records, on_step=False)
        is_one = self.run.data_grid.global_microbatches == 1
        return returned.predicted(is_one) if kind == "predict" else returned.joined()

    def forward_whole(self, inputs: Sequence[Any]) -> Any:
        """Runs ``self(x)`` outside of steps through all stages; all workers call it."""
        if self._whole_forward is None:
            raise UnsupportedFeatureError(
                f"{type(self.trainer.lightning_module).__name__} was called, as in self(x), when this worker had one"
                " stage of it and was not connected to the others yet, as in configure_optimizers(). Call it before,"
                " in setup(), or from on_fit_start on."
            )
        return self._whole_forward(inputs)

    # ------------------------------------------------------------------ leadership

    def _take_leadership(self, relay: LogRelay) -> None:
        """Takes over leadership if a new generation has made this worker the leader."""
        was_leader = rank_zero_only.rank == 0  # type: ignore[attr-defined]
        self._follow_leader()
        if self.collectives.is_leader and not was_leader:
            log.info("Worker %s speaks for the run from now on.", self.worker)
            show_progress_bar(self.trainer, self._dataloader_idx)
            keep_monitors_going(self.trainer)
            relay.take_over()
            self.checkpoints.saves.take_over()

    def _follow_leader(self) -> None:
        rank_zero_only.rank = 0 if self.collectives.is_leader else max(1, self.place.rank)  # type: ignore[attr-defined]


class WholeForward:
    """``self(x)`` outside of steps: all workers run the whole model together.

    Hooks run on every worker alike, so each calls ``self(x)`` at the same place with the same ``x``. There are no
    gradients. Draws depend on (seed, step, number of the call since that step, layer). Where only some workers call it,
    the coordinator ends the run.
    """

    def __init__(self, steps: TrainingSteps, collectives: WorkerCollectives) -> None:
        self._steps, self._collectives = steps, collectives
        self._parts, self._recorder, self._module = steps.parts, steps.recorder, steps.module
        self._version = -1
        self._calls = 0  # since that version

    def __call__(self, inputs: Sequence[Any]) -> Any:
        """The output of the whole model, on every worker.

        ``inputs``: of the first of the parts that run, and the target of the last one. Raises UnsupportedFeatureError
        in code that sees one micro-batch and in a joining worker, ConfigurationError if workers were given different
        inputs.
        """
        self._refuse_here()
        number = self._meet(inputs)
        value = inputs[0] if len(inputs) == 1 else tuple(inputs)
        microbatch_changes = self._recorder.microbatch_changes
        keeps_shares = microbatch_changes.keeps_shares
        with torch.no_grad():
            done, notes = self._steps.executor.forward_whole(
                value, -1 - number, microbatch_changes.outside, partial(self._parts.record_forward, self._recorder)
            )
        for note in notes:
            microbatch_changes.repeat_outside(note)
        microbatch_changes.keeps_shares = keeps_shares  # what forward() keeps for itself is no part of a sum
        (output,) = self._recorder.replay({0: done}, on_step=False).values
        return move_data_to_device(output.value if isinstance(output, CallResult) else output, self._module.device)

    def _refuse_here(self) -> None:
        name = type(self._module).__name__
        if self._module.sees_one_microbatch:
            raise UnsupportedFeatureError(
                f"{name} was called, as in self(x), by code that sees one micro-batch: loss(), split_batch(), a layer,"
                " or a hook that sees outputs. This worker holds one stage of the model, and the others do not run that"
                " code. Use the output that the hook gets; call self(x) in a hook that all workers run, such as"
                " on_train_batch_end or on_validation_epoch_end."
            )
        if self._collectives.client.is_joining:
            raise UnsupportedFeatureError(ALONE.format(what=f"{name} was called, as in self(x)"))

    def _meet(self, inputs: Sequence[Any]) -> int:
        """Waits for all workers; returns the number of this call."""
        if self._version != self._steps.executor.version:
            self._version, self._calls = self._steps.executor.version, 0
        own_print = fingerprint(inputs)
        numbers, all_prints = zip(*self._collectives.gather("self(x)", (self._calls, own_print)).values(), strict=True)
        if not all(alike(other_print, own_print) for other_print in all_prints):
            raise ConfigurationError(
                f"{type(self._module).__name__} was called, as in self(x), with inputs that differ between the workers,"
                " which evaluate it together. Make them the same on all: from what every worker has (batch,"
                " self.trainer.datamodule, what hooks collected), or drawn by a torch.Generator with a seed of its own;"
                " not from what one worker has, such as its rank, its clock, or what it read alone."
            )
        number: int = max(numbers)  # one that has joined since the step has counted fewer
        self._calls = number + 1
        return number
