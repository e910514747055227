"""Training steps of one worker: run by Lightning's loops and an executor.

Lightning's loops (:mod:`~lightning_recycle.session.loops`) call some of its methods. The executor calls those of
:class:`~lightning_recycle.runtime.executor.executor_callbacks.ExecutorCallbacks`, for what only Lightning and the
user's module know.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_recycle.control.protocol.messages import AfterStep, Facts, Restored
from lightning_recycle.data.steps import StepHandle
from lightning_recycle.errors import UnsupportedFeatureError
from lightning_recycle.model.parts import ModelParts
from lightning_recycle.model.recording import RecordedModule
from lightning_recycle.runtime.executor.executor import Executor
from lightning_recycle.runtime.executor.executor_callbacks import StepResult
from lightning_recycle.runtime.machine_errors import suspicion_of
from lightning_recycle.runtime.stage.gradients import Share
from lightning_recycle.session.checkpoints import Checkpoints
from lightning_recycle.session.collectives import WorkerContext
from lightning_recycle.session.commit_requirements import (
    OptimizerStep,
    clip_factor,
    may_change_gradients,
    norm_of_all,
    overflow_of_all,
    scaler_of,
    sees_old_gradients,
)
from lightning_recycle.session.hook_side_effects import MicrobatchEffects
from lightning_recycle.session.interruption import Preemption, SaveAndEnd, StopRequests
from lightning_recycle.session.lightning_internals import batches_so_far
from lightning_recycle.session.loops import ProgressSnapshot, ends_step
from lightning_recycle.session.optimizer_states import trained_by_name
from lightning_recycle.session.outputs import OutputRecorder
from lightning_recycle.session.replica_checks import StateChecks, optimizer_options
from lightning_recycle.session.reporting_callbacks import remember_saves
from lightning_recycle.session.snapshot import StateTransfer, WorkerSnapshot
from lightning_recycle.session.stage_layers import StageLayers
from lightning_recycle.session.step_completion import Boundary
from lightning_recycle.session.step_loaders import StepLoaders
from lightning_recycle.tensor_memory import local_part
from lightning_recycle.torch_internals import foreach_mul_

log = logging.getLogger(__name__)


class TrainingSteps:
    """The training steps of one worker, and the executor's questions to its process.

    Attributes:
        first_batch: the number of batches that the Trainer had trained on before this run.
    """

    executor: Executor
    resume_seed: Callable[[int], None]
    transfer: StateTransfer
    checkpoints: Checkpoints
    ending: SaveAndEnd
    _handle: StepHandle  # of the current step

    def __init__(
        self,
        context: WorkerContext,
        parts: ModelParts,
        recorder: OutputRecorder,
        loaders: StepLoaders,
        preemption: Preemption,
        reach: Callable[[str, int], None],
    ) -> None:
        self._context, self._trainer, self._client = context, context.trainer, context.client
        self._parts, self._recorder, self.loaders = parts, recorder, loaders
        self._preemption, self._reach = preemption, reach
        self._suspicion = suspicion_of(context.options.recovery.machine_errors)
        self._checks = StateChecks(context.device_name, context.options.verification.steps_asked_for)
        self.layers: StageLayers | None = None
        self.records_outputs = parts.records_training
        self.first_batch = 0
        self.after_step = AfterStep.GO_ON
        self.stop_requests = StopRequests(context, self)
        self._gradient_norm = self._newest_loss = 0.0
        self._newest_step = OptimizerStep()
        self._zeroes_next = True  # what parameters hold is zeroed before the next gradients are added
        self._names_of_trained: tuple[list[str], float] = [], 0.0  # and their digest
        self._progress: dict[int, ProgressSnapshot] = {}  # of the current step and the one before
        double = any(p.dtype is torch.float64 for p in parts.module.parameters())
        self._loss_dtype = torch.float64 if double else torch.float32

    @property
    def _module(self) -> RecordedModule:
        module = self._parts.module
        assert isinstance(module, RecordedModule)
        return module

    @property
    def _optimizers(self) -> list[Optimizer]:
        return self._trainer.strategy.optimizers

    # ------------------------------------------------------------------ for Lightning's loops

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return self._context.seed

    def enter_training(self) -> None:
        """Enters the first epoch; a joining worker waits until it is let in."""
        # After an earlier fit of this Trainer the steps are numbered on too, as their numbers decide on randomness.
        begun = batches_so_far(self._trainer)
        self.first_batch = begun.completed
        restored = begun.started or self.checkpoints.restored_steps
        self._preemption.take_sigterm()
        self.transfer.begin_training(self.checkpoints.restored_objects)
        if self._client.joining:
            self.executor.join()
        elif restored:
            self.executor.version = restored
            self._client.send(Restored(self._context.place.rank, restored))
        if (completion := self.checkpoints.resume()) is not None:
            remember_saves(self._trainer, completion["saves"])
            self.checkpoints.finish_boundary(completion)
        self.checkpoints.begin_training()

    def run_step(self, handle: StepHandle, apply: Callable[[StepResult], None], share: Share) -> StepResult:
        self._handle = handle
        self.transfer.complete()  # its donor waited here, after the same hooks
        self._follow_parameters()
        self._zeroes_next = share.begins
        scaler = scaler_of(self._trainer)

        def apply_with_hooks(result: StepResult) -> None:
            if self.checkpoints.background is not None:
                self.checkpoints.background.finish_copies()
            self._recorder.side_effects.ends_step(self.executor.statistics(number))
            if any(result.outputs.values()):
                self._recorder.repeat_changes(result.outputs, on_step=True)
            self._newest_loss = result.loss
            # Before a hook asks for the norm, its gradients are unscaled.
            self._gradient_norm = result.gradient_norm / (1.0 if scaler is None else scaler.get_scale())
            with self._module.logging_allowed(True), overflow_of_all(scaler, result.overflow):
                apply(result)
            if result.check_next:
                self._checks.announce(number + 1)

        number = self.executor.version
        self._progress = {n: progress for n, progress in self._progress.items() if n == number - 1}
        self._progress[number] = ProgressSnapshot.of(self._trainer)
        self._recorder.side_effects.begin_step(number)
        with self._module.logging_allowed(False):
            result = self.executor.run_step(handle, apply_with_hooks, share)
        self._zeroes_next = share.ends
        self.checkpoints.take_up()
        self.after_step = result.after_step
        if self.layers is not None:
            self.layers.applied()
        return result

    def left_gradients(self) -> Mapping[nn.Parameter, Tensor]:
        """Gradients that count for later steps, or that hooks may see."""
        if not self._module.automatic_optimization:  # it zeroes them itself
            return {p: p.grad for p in self._module.parameters() if p.grad is not None}
        if self._zeroes_next and not sees_old_gradients(self._trainer, self._module):
            return {}
        return self.executor.gradients.held()

    def _follow_parameters(self) -> None:
        """The parameters are those that the module and its optimizer have now.

        Raises:
            UnsupportedFeatureError: if they have, with several stages.
        """
        if self._parts.optimizes_itself:
            return
        named = trained_by_name(self._module, self._optimizers)
        names, parameters = [*named], [*named.values()]
        if names != self._names_of_trained[0]:
            self._names_of_trained = names, float(zlib.crc32(repr(names).encode()))
        known = self.executor.gradients.parameters
        if [*map(id, parameters)] == [*map(id, known)]:
            return
        if self._context.grid.stages > 1:
            old = set(map(id, known))
            new = ", ".join(name for name, parameter in named.items() if id(parameter) not in old)
            raise UnsupportedFeatureError(
                f"A hook has changed the parameters ({f'new: {new}' if new else 'some are gone'}), which it cannot with"
                " several stages: do that in __init__() or configure_model(), or use pipeline_parallel_size=1."
            )
        self.executor.train(parameters)

    def settle(self) -> None:
        self.executor.settle_newest()

    def at_boundary(self, boundary: Boundary) -> None:
        """The step is over as far as ``boundary``: what was to be saved in it is written."""
        with self.checkpoints.at_boundary(boundary):
            if ends_step(self._trainer):
                self.checkpoints.ask_again()
            if boundary is Boundary.BATCH:
                self.ending.end(self._trainer)

    def ends_after_batch(self) -> bool:
        """Whether the run ends after this batch.

        Not between batches whose gradients one step takes together.
        """
        return self.after_step is AfterStep.END and ends_step(self._trainer)

    def as_loss(self, value: float) -> Tensor:
        return torch.tensor(value, dtype=self._loss_dtype, device=self._context.device)

    def log_step(self, handle: StepHandle, loss: Tensor, outputs: Mapping[int, bytes]) -> Any:
        returned = None
        if any(outputs.values()):
            with self._context.forward_context():
                found = self._recorder.replay(outputs, on_step=True)
            if any(value is not None for value in found.values):
                returned = found.joined(handle.loader.divisions(handle, found.samples))
        self._parts.on_loss(loss, handle.index)
        return returned

    # ------------------------------------------------------------------ for the executor: micro-batches

    def split(self, data: Any, index: int) -> tuple[Any, Any]:
        return self._parts.split(data, index)

    def begin_whole_step(self, index: int) -> None:
        """Enters the slot of a micro-batch whose step runs as a whole, in turns."""
        self._recorder.side_effects.slot = index

    def microbatch(self, index: int, statistics: Sequence[Tensor]) -> AbstractContextManager[MicrobatchEffects]:
        return self._recorder.side_effects.microbatch(index, statistics)

    def computing_again(self, index: int) -> AbstractContextManager[None]:
        return self._recorder.side_effects.again(index)

    def record_output(self, output: Any, target: Any, samples: int) -> bytes:
        return self.record(self._parts.record_training, output, target, samples)

    def record(self, record: Callable[..., bytes], output: Any, target: Any, samples: int) -> bytes:
        """Records what the user's code does with an output, as in a step on one device."""
        with self._context.forward_context():
            return record(self._recorder, output, target, samples)

    # ------------------------------------------------------------------ for the executor: generations

    def is_suspect(self, error: Exception) -> bool:
        return self._suspicion(error)

    def on_generation(self) -> None:
        if self._client.generation == 0:
            self._checks.announce(self.executor.version)
        self._client.on_leader()

    def on_recovery(self, step: int, is_applied: bool) -> None:
        self._recorder.side_effects.run_again()
        self._checks.announce(step + is_applied)
        self._reach("recovery", step)

    # ------------------------------------------------------------------ for the executor: applied steps

    @contextmanager
    def as_in_step(self, step: int) -> Iterator[None]:
        with self._recorder.side_effects.as_in_step(step), self._progress[step].again(self._trainer):
            yield

    def describe_step(self, step: int) -> Facts:
        counters, options, inputs = self._numbers()
        checked = None
        if self._checks.is_due(step) and self.executor.is_settled:
            with self._client.busy("a check of the parameters"):
                checked = self._checks.check(step, self._module, self._optimizers)
        return Facts(counters, options, checked, inputs)

    def describe(self) -> dict[str, Any]:
        """The values, by name, that a copy of this worker must have at a step's start."""
        self._follow_parameters()
        counters, options, inputs = self._numbers()
        return {**counters, **options, **inputs, **self._checks.sums(self._module, self._optimizers)}

    def _numbers(self) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
        """Numbers equal on all workers, on a stage, and where gradients are summed."""
        trainer = self._trainer
        counters: dict[str, float] = {
            "trainer.global_step": trainer.global_step,
            "trainer.current_epoch": trainer.current_epoch,
        }
        inputs: dict[str, float] = {}
        if digest_of_data := self._handle.loader.digest(self._handle):
            inputs["the digest of the samples read so far, the same for every process that reads,"] = digest_of_data
        if self.stop_requests.agreed:
            counters["trainer.should_stop"] = trainer.should_stop
        options = optimizer_options(self._optimizers)
        if self._context.grid.stages == 1 and not self._parts.optimizes_itself:
            inputs["the names of the parameters, which hooks can change,"] = self._names_of_trained[1]
        if (scaler := scaler_of(trainer)) is not None:
            inputs["loss scale"] = scaler.get_scale()
        return counters, options, inputs

    def not_optimized(self) -> list[nn.Parameter]:
        groups = (group for optimizer in self._optimizers for group in optimizer.param_groups)
        optimized = {id(parameter) for group in groups for parameter in group["params"]}
        return [parameter for parameter in self._module.parameters() if id(parameter) not in optimized]

    def must_know(self, step: int) -> bool:
        return self._checks.is_due(step) or self._newest_step.is_watched(self._optimizers)

    def keep_optimizer(self) -> None:
        self._newest_step.keep(self._optimizers)

    def step_again(self, norm: float) -> None:
        loss = self.as_loss(self._newest_loss)
        self._newest_step.again(self._optimizers, clip_factor(self._clip_val, norm), lambda: loss)

    @property
    def _clip_val(self) -> float:
        assert self._trainer.gradient_clip_val is not None
        return float(self._trainer.gradient_clip_val)

    def leaves_gradients_alone(self, norm: float) -> bool:
        """Whether gradients of that norm, over all stages, are not clipped."""
        return clip_factor(self._clip_val, norm) >= 1.0

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clips by the norm over all stages, which the plugin itself does not see.

        The commit has delivered it, unless hooks may have changed gradients since.
        """
        plugin, mesh = self._trainer.strategy.precision_plugin, self._context.mesh
        norm = self._gradient_norm
        if mesh is None and may_change_gradients(self._trainer, self._module):
            norm = norm_of_all(self._trainer, plugin.main_params(optimizer))
        scale = clip_factor(clip_val, norm)
        grads = [p.grad for p in plugin.main_params(optimizer) if p.grad is not None]
        if grads and not scale >= 1.0:  # a norm that is NaN reaches all parameters, as on one device
            foreach_mul_([local_part(grad) for grad in grads], scale)

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clips each value, in shards where there are any."""
        for parameter in self._trainer.strategy.precision_plugin.main_params(optimizer):
            if parameter.grad is not None:
                local_part(parameter.grad).clamp_(-clip_val, clip_val)

    def forget_newest(self) -> None:
        """The layers of this worker have changed: no optimizer steps again."""
        self._newest_step = OptimizerStep()

    def held_tensors(self) -> Iterator[Tensor]:
        """Tensors held from step to step besides parameters and gradients."""
        yield from self._module.buffers()
        yield from self._newest_step.tensors()
        for optimizer in self._optimizers:
            for state in optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, Tensor))

    # ------------------------------------------------------------------ for the executor: state of peers

    def take_snapshot(self) -> WorkerSnapshot:
        return self.transfer.take()

    def restore_snapshot(self, snapshot: WorkerSnapshot) -> None:
        self.transfer.restore(snapshot)
