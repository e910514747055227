"""Training steps of one worker: run by Lightning's loops and an executor.

The loops (:mod:`~lightning_recycle.session.loops`) and the executor
(:class:`~lightning_recycle.runtime.commit_reports.ExecutorCallbacks`) call its methods.
"""

from __future__ import annotations

import logging
import math
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_recycle.control.protocol.control_collectives import StopPlace
from lightning_recycle.control.protocol.messages import AfterStep, Facts, Restored
from lightning_recycle.control.protocol.state import ENDED
from lightning_recycle.data.step_sources import StepHandle
from lightning_recycle.engines.slurm import requeue
from lightning_recycle.errors import UnsupportedFeatureError
from lightning_recycle.model.parts import ModelParts
from lightning_recycle.model.recorded_module import RecordedModule
from lightning_recycle.runtime.commit_reports import StepResult
from lightning_recycle.runtime.gradients import AccumulationPart
from lightning_recycle.runtime.machine_errors import suspicion_of
from lightning_recycle.runtime.stage_bundle import StageBundle, StageTies
from lightning_recycle.runtime.verification import StateChecks, optimizer_options
from lightning_recycle.session.checkpoint_callbacks import CallbackCheckpoints, remember_saves
from lightning_recycle.session.gradient_clipping import (
    RepeatableStep,
    clip_factor,
    complete_norms,
    may_change_gradients,
    norm_limit,
    norm_of_all,
    overflow_of_all,
    scaler_of,
    sees_old_gradients,
)
from lightning_recycle.session.lightning_internals import (
    batches_so_far,
    ends_step,
    path_of_ended_run,
    saves_on_exception,
)
from lightning_recycle.session.manual_steps import ManualSteps
from lightning_recycle.session.microbatch_changes import MicrobatchEffects
from lightning_recycle.session.optimizer_states import parameters_by_name, trained_by_name, unoptimized_parameters
from lightning_recycle.session.output_recorder import OutputRecorder
from lightning_recycle.session.stage_layers import StageBuilder, StageLayers
from lightning_recycle.session.step_loaders import StepLoaders
from lightning_recycle.session.worker_context import Preemption, StopRequests, WorkerContext
from lightning_recycle.session.worker_snapshot import StepBoundary, WorkerSnapshot, WorkerState
from lightning_recycle.tensor_memory import local_part
from lightning_recycle.torch_internals import foreach_mul_, hooks_after_accumulation

log = logging.getLogger(__name__)


class TrainingSteps:
    """The training steps of one worker, and the executor's questions to its process.

    Args:
        preemption: signals that ask the worker to leave or the run to end.
        at_fault_point: called with a point of the run ("recovery", "checkpoint") and the step, for fault injection.

    Attributes:
        layers: this stage's layers as they move; None if they may not.
        manual: the steps of manual optimization; None without it.
    """

    _handle: StepHandle  # of the current step

    def __init__(
        self,
        context: WorkerContext,
        parts: ModelParts,
        recorder: OutputRecorder,
        loaders: StepLoaders,
        preemption: Preemption,
        at_fault_point: Callable[[str, int], None],
    ) -> None:
        self._context, self._trainer, self._client = context, context.trainer, context.client
        assert isinstance(parts.module, RecordedModule)
        self.module, self.parts, self.recorder, self.loaders = parts.module, parts, recorder, loaders
        self._preemption, self._at_fault_point = preemption, at_fault_point
        self._suspicion = suspicion_of(context.options.recovery.machine_errors)
        self._checks = StateChecks(context.device_name, context.options.verification.steps_asked_for)
        self.records_outputs = parts.records_training
        self._after_step = AfterStep.GO_ON
        self._stop_requests = StopRequests(context)
        self._gradient_norm = self._newest_loss = 0.0
        self._newest_step = RepeatableStep()
        self._speculative_limit = math.inf  # the norm limit of a speculative step
        self._zeroes_gradients_next = True  # what parameters hold is zeroed before the next gradients are added
        self._trained_names: tuple[list[str], float] = [], 0.0  # and their digest
        self._progress: dict[int, ProgressSnapshot] = {}  # of the current step and the one before
        double = any(p.dtype is torch.float64 for p in self.module.parameters())
        self._loss_dtype = torch.float64 if double else torch.float32
        self.ties = StageTies(parts.ties(context.run.parts), context.worker.stage, parameters_by_name(self.module))
        self._show_whole_norms()
        self.layers: StageLayers | None = None
        self.manual: ManualSteps | None = None
        builder = StageBuilder(context, parts, recorder)
        if context.fitting and parts.optimizes_itself:
            self.executor, self.manual = builder.manual_executor(self.ties, self)
        else:
            self.layers = builder.layers(self.left_gradients, self._on_new_layers)
            self.executor = builder.executor(
                self.ties, self, self.layers, self.leaves_gradients_alone, self.held_tensors
            )
        if not parts.optimizes_itself:  # otherwise the plugin sees all there is
            plugin = self._trainer.strategy.precision_plugin
            plugin.clip_grad_by_norm = self._clip_grad_by_norm  # type: ignore[method-assign]
            plugin.clip_grad_by_value = self._clip_grad_by_value  # type: ignore[method-assign]
        context.collectives.confirm_step = self.confirm_step
        self.worker_state = WorkerState(
            context, self.module, recorder, self.executor, self._stop_requests, self.left_gradients, self.describe
        )
        copies = self.ties.copies
        self.checkpoints = CallbackCheckpoints(context, parts, self.executor, copies, at_fault_point, self.worker_state)

    def _show_whole_norms(self) -> None:
        """Makes ``grad_norm`` in hooks cover the gradients of all stages."""
        context = self._context
        if context.mesh is not None:
            complete_norms(_refuse_norms)
        elif context.grid.stages > 1:
            names = {id(p): name for name, p in self.module.named_parameters()}
            for name, p in parameters_by_name(self.module).items():
                names[id(p)] = self.ties.copies.get((context.worker.stage, name), names[id(p)])
            complete_norms(context.collectives.gather_stages, names)

    def _on_new_layers(self, bundle: StageBundle) -> None:
        """Called when this worker's layers have changed: no optimizer step is redone."""
        self.ties = bundle.ties
        self._show_whole_norms()
        self.checkpoints.copies = bundle.ties.copies
        self._newest_step = RepeatableStep()

    @property
    def _optimizers(self) -> list[Optimizer]:
        return self._trainer.strategy.optimizers

    # ------------------------------------------------------------------ for Lightning's loops

    @property
    def seed(self) -> int:
        return self._context.seed

    def resume_seed(self, seed: int) -> None:
        """Makes a checkpoint's ``seed`` that of this run, before its first step."""
        context = self._context
        if seed == context.seed:
            return
        if context.collectives.is_leader:
            log.warning(
                "The checkpoint was written with seed %d, and this run was given seed %d: it goes on with seed %d, so"
                " that it reads the rest of the epoch in the same order and draws the same random numbers.",
                *(seed, context.own_seed, seed),
            )
        context.resumed_seed = seed
        self.loaders.reseed(seed)
        self.executor.runner.stage.seed = seed
        self.checkpoints.weights.prune_by(seed)

    def agree_to_stop(self, place: StopPlace) -> None:
        self._stop_requests.agree(place, self.executor.version, self._after_step)

    def enter_training(self) -> None:
        """Enters the first epoch; a joining worker waits until it may enter."""
        # After an earlier fit of this Trainer the steps are numbered on too, as their numbers decide on randomness.
        batches = batches_so_far(self._trainer)
        restored = batches.started or self.checkpoints.restored_steps
        self._preemption.take_sigterm()
        self.worker_state.begin_training(self.checkpoints.restored_objects)
        if self._client.is_joining:
            self.executor.join()
        elif restored:
            self.executor.version = restored
            self._client.send(Restored(self._context.place.rank, restored))
        if (completion := self.checkpoints.resume()) is not None:
            remember_saves(self._trainer, completion["saves"])
            self.checkpoints.finish_boundary(completion)
        self.checkpoints.begin_training()

    def run_step(self, handle: StepHandle, apply: Callable[[StepResult], None], share: AccumulationPart) -> StepResult:
        """Runs the training step of ``handle``, with all that its end needs.

        ``apply`` is Lightning's optimizer step; it is called after the effects of all micro-batches' hooks are repeated
        here. ``share``: the step's part of an accumulation.
        """
        self._handle = handle
        handle.refuse_changes()
        saves = self.worker_state.finish_joining()  # its donor waited here, after the same hooks
        if saves is not None:
            self.checkpoints.saves.enter(saves)
        self._follow_parameters()
        self._zeroes_gradients_next = share.begins
        scaler = scaler_of(self._trainer)

        def apply_with_hooks(result: StepResult) -> None:
            self.checkpoints.saves.finish_copies()
            self.recorder.microbatch_changes.ends_step(self.executor.runner.gradients.statistics(number))
            if any(result.outputs.values()):
                self.recorder.repeat_changes(result.outputs, on_step=True)
            self._newest_loss = result.loss
            # Before a hook asks for the norm, its gradients are unscaled.
            self._gradient_norm = result.gradient_norm / (1.0 if scaler is None else scaler.get_scale())
            with self.module.logging_allowed(True), overflow_of_all(scaler, result.overflow):
                apply(result)
            if result.check_next:
                self._checks.announce(number + 1)

        number = self.executor.version
        self._progress = {n: progress for n, progress in self._progress.items() if n == number - 1}
        self._progress[number] = ProgressSnapshot.of(self._trainer)
        self.recorder.microbatch_changes.begin_step(number)
        with self.module.logging_allowed(False):
            result = self.executor.run_step(handle, apply_with_hooks, share)
        self._zeroes_gradients_next = share.ends
        self.checkpoints.apply_outcome()
        self._after_step = result.after_step
        if self.layers is not None:
            self.layers.applied()
        return result

    def left_gradients(self) -> Mapping[nn.Parameter, Tensor]:
        """Gradients that count for later steps, or that hooks may see."""
        if not self.module.automatic_optimization:  # it zeroes them itself
            return {p: p.grad for p in self.module.parameters() if p.grad is not None}
        if self._zeroes_gradients_next and not sees_old_gradients(self._trainer, self.module):
            return {}
        return self.executor.runner.gradients.held()

    def _follow_parameters(self) -> None:
        """Follows changed parameters; UnsupportedFeatureError with several stages."""
        if self.parts.optimizes_itself:
            return
        self.executor.runner.stage.clear()  # layers of FSDP that a hook has run hold gathered parameters
        named = trained_by_name(self.module, self._optimizers)
        names, parameters = [*named], [*named.values()]
        if names != self._trained_names[0]:
            self._trained_names = names, float(zlib.crc32(repr(names).encode()))
        old_ids = [*map(id, self.executor.runner.gradients.parameters)]
        if [*map(id, parameters)] == old_ids:
            return
        if self._context.grid.stages > 1:
            new = ", ".join(name for name, parameter in named.items() if id(parameter) not in old_ids)
            raise UnsupportedFeatureError(
                f"A hook has changed the parameters ({f'new: {new}' if new else 'some are gone'}), which it cannot with"
                " several stages: do that in __init__() or configure_model(), or use pipeline_parallel_size=1."
            )
        self.executor.runner.replace_parameters(parameters)

    def confirm_step(self) -> None:
        """Waits until the newest step is not speculative any more."""
        self.executor.confirm_newest()

    def at_boundary(self, boundary: StepBoundary) -> None:
        """The step is over up to ``boundary``: its checkpoints are written."""
        with self.checkpoints.at_boundary(boundary):
            ends_epoch = self._trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
            last = StepBoundary.EPOCH if ends_epoch else StepBoundary.VALIDATION
            if boundary is last and ends_step(self._trainer):  # unless the callback has saved in this step
                self.checkpoints.ask_again()
            if boundary is StepBoundary.BATCH and self._ends_after_batch():
                self._end_run()

    def _ends_after_batch(self) -> bool:
        """Whether the run ends after this batch, never amid batches of one step."""
        return self._after_step is AfterStep.END and ends_step(self._trainer)

    def _end_run(self) -> None:
        """Saves, and ends this worker with all others, after a step that is the last."""
        trainer, collectives, options = self._trainer, self._context.collectives, self._context.options.checkpoints
        # There is no later step after which a checkpoint that is lost could be asked for again.
        with self.checkpoints.in_foreground():
            self.checkpoints.ask_again()
            for callback in trainer.callbacks:  # type: ignore[attr-defined]
                if saves_on_exception(callback):
                    callback.on_exception(trainer, trainer.lightning_module, SIGTERMException())
            path, setting = None, options.save_on_signal
            if not isinstance(setting, bool):
                path = os.fspath(setting)
            elif setting or self._preemption.resumes:
                path = path_of_ended_run(trainer)
            path = collectives.broadcast(path)  # a number in it is found by looking into the folder
            if path is not None:
                trainer.save_checkpoint(path)
        for logger in trainer.loggers:
            logger.finalize("failed")  # as Lightning does when a run is interrupted: it writes what it holds
        if collectives.decide(self._preemption.requeue_wanted, all_agree=False):
            collectives.by_leader("requeue", self._requeue)
        collectives.gather(ENDED, None)  # the coordinator ends all workers instead of answering

    def _requeue(self) -> None:
        with self._client.busy("requeue"):
            requeue(self._context.options.checkpoints.signal_timeout)

    def as_loss(self, value: float) -> Tensor:
        """``value`` as a step would return it: the dtype of the parameters, on the device."""
        return torch.tensor(value, dtype=self._loss_dtype, device=self._context.device)

    def log_step(self, handle: StepHandle, loss: Tensor, outputs: Mapping[int, bytes]) -> Any:
        """Logs for a step what its micro-batches have; returns ``training_step``'s result."""
        returned = None
        if any(outputs.values()):
            with self._context.forward_context():
                found = self.recorder.replay(outputs, on_step=True)
            if any(value is not None for value in found.values):
                returned = found.joined(handle.loader.divisions(handle, found.samples))
        self.parts.on_loss(loss, handle.index)
        return returned

    # ------------------------------------------------------------------ for the executor: micro-batches

    # Documented in ExecutorCallbacks, as the methods below that have no docstring.

    def split(self, data: Any, index: int) -> tuple[Any, Any]:
        return self.parts.split(data, index)

    def microbatch(self, index: int, statistics: Sequence[Tensor]) -> AbstractContextManager[MicrobatchEffects]:
        return self.recorder.microbatch_changes.microbatch(index, statistics)

    def recomputing(self, index: int) -> AbstractContextManager[None]:
        return self.recorder.microbatch_changes.again(index)

    def record_output(self, output: Any, target: Any, samples: int) -> bytes:
        return self.record(self.parts.record_training, output, target, samples)

    def record(self, record: Callable[..., bytes], output: Any, target: Any, samples: int) -> bytes:
        """Records the user's code on an output, as in a step on one device."""
        with self._context.forward_context():
            return record(self.recorder, output, target, samples)

    # ------------------------------------------------------------------ for the executor: generations

    def is_suspect(self, error: Exception) -> bool:
        return self._suspicion(error)

    def on_generation(self) -> None:
        if self._client.generation == 0:
            self._checks.announce(self.executor.version)
        self._client.on_leader()

    def on_recovery(self, step: int, is_applied: bool) -> None:
        self.recorder.microbatch_changes.run_again()
        if self.executor.version in self._progress:  # otherwise the newest step is applied
            self.loaders.take_back_changes(self._handle)
        self._checks.announce(step + is_applied)
        self._at_fault_point("recovery", step)

    # ------------------------------------------------------------------ for the executor: applied steps

    @contextmanager
    def as_in_step(self, step: int) -> Iterator[None]:
        with self.recorder.microbatch_changes.as_in_step(step), self._progress[step].again(self._trainer):
            yield

    def describe_step(self, step: int) -> Facts:
        counters, options, inputs = self._facts()
        checked = None
        if self._checks.is_due(step) and self.executor.runner.is_confirmed:
            with self._client.busy("a check of the parameters"):
                checked = self._checks.check(step, self.module, self._optimizers)
        return Facts(counters, options, checked, inputs)

    def describe(self) -> dict[str, Any]:
        """The values, by name, that a copy of this worker must have at a step's start."""
        self._follow_parameters()
        counters, options, inputs = self._facts()
        return {**counters, **options, **inputs, **self._checks.sums(self.module, self._optimizers)}

    def _facts(self) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
        """Numbers equal on all workers: counters and, last, inputs; between: a stage's."""
        trainer = self._trainer
        counters: dict[str, float] = {
            "trainer.global_step": trainer.global_step,
            "trainer.current_epoch": trainer.current_epoch,
        }
        inputs: dict[str, float] = {}
        if digest_of_data := self._handle.loader.digest(self._handle):
            inputs["the digest of the samples read so far (seed each shuffle of the data)"] = digest_of_data
        if self._stop_requests.agreed:
            counters["trainer.should_stop"] = trainer.should_stop
        options = optimizer_options(self._optimizers)
        if self._context.grid.stages > 1:
            counters[
                "the number of parameter groups of the optimizer (make the same on each stage, empty ones too)"
            ] = sum(len(optimizer.param_groups) for optimizer in self._optimizers)
        if self._context.grid.stages == 1 and not self.parts.optimizes_itself:
            inputs["the names of the parameters, which hooks can change,"] = self._trained_names[1]
        if (scaler := scaler_of(trainer)) is not None:
            inputs["loss scale"] = scaler.get_scale()
        return counters, options, inputs

    def unoptimized_parameters(self) -> list[nn.Parameter]:
        return unoptimized_parameters(self.module, self._optimizers)

    def forbids_speculation(self, step: int) -> bool:
        accumulates = self._trainer.accumulate_grad_batches != 1  # by a hook, otherwise no run with it speculates
        return accumulates or self._checks.is_due(step) or self._newest_step.is_watched(self._optimizers)

    def keep_optimizer_state(self) -> None:
        self._hooks_change_gradients()  # refuses what a step cannot be repeated with
        self._speculative_limit = norm_limit(self._trainer)  # hooks may change it before the step is confirmed
        self._newest_step.keep(self._optimizers)

    def step_again(self, norm: float) -> None:
        loss = self.as_loss(self._newest_loss)
        self._newest_step.repeat(self._optimizers, clip_factor(self._speculative_limit, norm), lambda: loss)

    @cached_property
    def _overrides_change_gradients(self) -> bool:
        return may_change_gradients(self._trainer, self.module)

    def _hooks_change_gradients(self) -> bool:
        has_hooks = any(hooks_after_accumulation(self.module.parameters()))
        if has_hooks and not self._overrides_change_gradients and self._context.grid.stages > 1:
            raise UnsupportedFeatureError(
                "A parameter has a hook (register_post_accumulate_grad_hook), and Trainer(gradient_clip_val=...) clips"
                " by the norm of all stages, which do not know of it. Change gradients in on_after_backward() instead."
            )
        return has_hooks or self._overrides_change_gradients

    def leaves_gradients_alone(self, norm: float) -> bool:
        """Whether gradients of that norm, over all stages, are not clipped."""
        limit = norm_limit(self._trainer) if self.executor.runner.is_confirmed else self._speculative_limit
        return math.isinf(limit) or clip_factor(limit, norm) >= 1.0

    def _clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clips by the norm over all stages, which the plugin itself does not see.

        The commit has delivered it, unless hooks may have changed gradients since, or made the Trainer clip.
        """
        plugin, mesh = self._trainer.strategy.precision_plugin, self._context.mesh
        norm, is_known = self._gradient_norm, self.executor.runner.rules.norm
        if mesh is not None and not is_known:
            raise UnsupportedFeatureError(
                "A hook has set trainer.gradient_clip_val, and a worker has parts of gradients: where several processes"
                " hold a position, give it to the Trainer when you make it, math.inf for no limit at first."
            )
        if mesh is None and (not is_known or self._hooks_change_gradients()):
            norm = norm_of_all(self._trainer, plugin.main_params(optimizer))
        scale = clip_factor(clip_val, norm)
        grads = [p.grad for p in plugin.main_params(optimizer) if p.grad is not None]
        if grads and not scale >= 1.0:  # a norm that is NaN reaches all parameters, as on one device
            foreach_mul_([local_part(grad) for grad in grads], scale)

    def _clip_grad_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clips each value, in shards where there are any."""
        for parameter in self._trainer.strategy.precision_plugin.main_params(optimizer):
            if parameter.grad is not None:
                local_part(parameter.grad).clamp_(-clip_val, clip_val)

    def held_tensors(self) -> Iterator[Tensor]:
        """Tensors kept from step to step, apart from parameters and gradients."""
        yield from self.module.buffers()
        yield from self._newest_step.tensors()
        for optimizer in self._optimizers:
            for state in optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, Tensor))

    # ------------------------------------------------------------------ for the executor: state of peers

    def take_snapshot(self) -> WorkerSnapshot:
        return self.worker_state.snapshot(self.checkpoints.saves.state())

    def restore_snapshot(self, snapshot: WorkerSnapshot) -> None:
        self.worker_state.restore(snapshot)


def _refuse_norms(*_: Any) -> list[Any]:
    raise UnsupportedFeatureError(
        "grad_norm() is not supported where several processes hold a position: a worker has parts of gradients. With"
        " Trainer(gradient_clip_val=...) they are clipped by the norm of all."
    )


# ---------------------------------------------------------------------- counters of a step


@dataclass(frozen=True)
class ProgressSnapshot:
    """The counters of a step; ``batch``: in the epoch, counted from 1."""

    steps: int
    epoch: int
    batch: int

    @classmethod
    def of(cls, trainer: pl.Trainer) -> ProgressSnapshot:
        loop = trainer.fit_loop
        steps = loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total
        return cls(steps.completed, loop.epoch_progress.current.completed, loop.epoch_loop.batch_progress.current.ready)

    def restore(self, trainer: pl.Trainer) -> None:
        loop = trainer.fit_loop
        loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.completed = self.steps
        loop.epoch_progress.current.completed = self.epoch
        loop.epoch_loop.batch_progress.current.ready = self.batch

    @contextmanager
    def again(self, trainer: pl.Trainer) -> Iterator[None]:
        """Within the block the counters of ``trainer`` are those of this snapshot."""
        now = ProgressSnapshot.of(trainer)
        self.restore(trainer)
        try:
            yield
        finally:
            now.restore(trainer)
