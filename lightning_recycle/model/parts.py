"""A user's module as a grid sees it: parts in order, cut into stages, and a loss.

Any LightningModule with one stage is one part (:class:`ModelParts`). A :class:`~lightning_recycle.PipelineModule` has
one part per layer (:class:`LayerParts`), any other module one per layer of its chain
(:class:`~lightning_recycle.model.chain_parts.ChainParts`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, TypeAlias

import lightning.pytorch as pl
import torch
from lightning.pytorch.loops.optimization.manual import ManualResult
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from typing_extensions import override

from lightning_recycle.errors import ConfigurationError, UnsupportedFeatureError
from lightning_recycle.model.chains import seeing_one_stage
from lightning_recycle.model.layers import AbsentLayer, Tie, layer_ranges, set_weights, split_name, ties_between_stages
from lightning_recycle.model.module import PipelineModule
from lightning_recycle.model.recorded_module import BatchIndices, RecordedStep, StepRecorder, call_at
from lightning_recycle.planning.planner import Partition

Run: TypeAlias = Literal["training", "evaluation", "forward"]
"""A training step's F, an evaluation, or a call outside of steps."""


class ModelParts:
    """A module divided into parts, the units of stages: here all of it is one part.

    Its loss must be a mean over the samples of a micro-batch for the result of one device; with ``num_microbatches=1``
    (the default) any loss is as under ``ddp``. ``optimizes_itself``: its step runs backward passes and steps
    optimizers, without a schedule.
    """

    loss_name = "training_step"
    """The user's function that computes the loss."""
    loss_is_optional = True
    """Whether a micro-batch may have no loss, and then adds nothing to the gradient."""
    takes_target = False
    """Whether parts take the previous stage's message in one argument, then targets."""
    whole = ""
    """Why neighbouring stages cannot share a part; empty if they can."""

    def __init__(self, module: pl.LightningModule) -> None:
        self.module = module
        self.optimizes_itself = not module.automatic_optimization
        is_users = is_overridden("backward", module, pl.LightningModule)
        self.loss_backward: Callable[[Tensor], None] | None = module.backward if is_users else None
        self._taken: Any = None  # what the newest step recorded

    # ------------------------------------------------------------------ before a run

    def check(self) -> None:
        """Raises UnsupportedFeatureError for features that the strategy would ignore."""
        for name in ("training_step", "validation_step", "test_step", "predict_step"):
            step = getattr(self.module, name, None)
            if step is not None and is_param_in_hook_signature(step, "dataloader_iter", explicit=True):
                raise UnsupportedFeatureError(
                    f"strategy='recycle' does not support {type(self.module).__name__}.{name}(dataloader_iter): batches"
                    " are read by their address. Take (batch, batch_idx)."
                )

    def describe(self) -> None:
        """Finds the parts."""

    def cut(self, num_stages: int, partition: Partition) -> tuple[range, ...]:
        assert num_stages == 1, "with several stages a module has other parts"
        return layer_ranges(1, 1, "count" if len(partition) == 1 else partition)

    def without_storage(self) -> pl.LightningModule:
        """A copy of the whole model, for its shapes only."""
        return self.module

    # ------------------------------------------------------------------ in a worker

    def keep(self, stages: Sequence[range], stage: int) -> None:
        """Drops all that ``stage`` does not need; ``stages``: the parts of each."""

    def path(self, index: int) -> str:
        """The name of a part that is a layer, in a state dict."""
        raise NotImplementedError(f"{type(self).__name__} has one part, which is not a layer")

    def shared_layers(self) -> tuple[tuple[int, ...], ...]:
        """Groups of parts that share a weight."""
        return ()

    def unwatched(self, *layers: int) -> AbstractContextManager[Sequence[nn.Module]]:
        """Within the block these layers can be pickled as the user's."""
        raise NotImplementedError(f"{type(self).__name__} has one part, which is not a layer")

    def exchange(self, stages: Sequence[range], stage: int, layers: Mapping[int, nn.Module]) -> None:
        """Takes new ``layers``, drops all that this ``stage`` no longer needs."""
        raise NotImplementedError(f"{type(self).__name__} has one part, which is not a layer")

    def build(self, owned: Iterable[int] | None = None, seed: int | None = None) -> None:
        """Builds recipes of the parts ``owned`` or of all."""

    def check_parameters(self, stage: int, num_stages: int) -> None:
        """Raises ConfigurationError for a stage without parameters, or strays.

        One part has all of them; frozen ones may be evaluated, or thawed by a callback.
        """

    def is_elsewhere(self, name: str) -> bool:
        """Whether ``name``, of the whole model's state dict, belongs to another stage."""
        return False

    def is_of_layer(self, name: str) -> bool:
        """Whether submodule ``name`` is in a layer; others are on every worker."""
        return False

    def writes(self, name: str) -> bool:
        """Whether this stage writes ``name``, which one stage writes."""
        return True

    def ties(self, stages: Sequence[range]) -> tuple[Tie, ...]:
        """The parameters that several stages hold.

        Of parts that neighbouring stages share the local ones, at least.
        """
        return ()

    def modules(self, run: Run, owned: range, recorder: StepRecorder) -> Sequence[nn.Module]:
        if run == "forward":
            return []
        if run == "training":
            return [_TrainingStep(self.module, recorder, self._take)]
        self._evaluation = _EvaluationStep(self.module, recorder, self._take)
        return [self._evaluation]

    def among(self, modules: Sequence[nn.Module], held: range, own: range) -> Sequence[nn.Module]:
        """The part of ``modules``, which run the parts ``held``, that runs ``own``.

        Valid until the next call: each stage with a shared layer runs its own micro-batches.
        """
        raise NotImplementedError(f"{type(self).__name__} runs all of its parts")

    def record_forward(self, recorder: StepRecorder, output: Any) -> bytes:
        """Recording of a call outside of steps, with its output as ``result``."""
        return self.record_training(recorder, output, None, samples=1)

    def split(self, batch: Any, index: int) -> tuple[Any, Any]:
        """A collated micro-batch -> (input of the first part, target of the loss)."""
        return (batch, index), None

    def loss(self, output: Any, target: Any) -> Tensor | None:
        """The mean loss over a micro-batch; None if it is to have none."""
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if loss is None and output is not None:
            raise ConfigurationError(
                f"{type(self.module).__name__}.training_step() returned a dict without a loss; it must have it as"
                " 'loss'."
            )
        if loss is None:
            rank_zero_warn(
                f"{type(self.module).__name__}.training_step() returned None. If this was on purpose, ignore this"
                " warning: the batch, or the micro-batch of it, adds nothing to the gradient."
            )
        return loss

    @property
    def records_training(self) -> bool:
        return True

    def record_training(self, recorder: StepRecorder, output: Any, target: Any, samples: int) -> bytes:
        """Recording of the user's code on a micro-batch in training."""
        taken, self._taken = self._taken, None
        return recorder.dump(taken, samples)

    def on_loss(self, loss: Tensor, index: int) -> None:
        """The mean loss of the step ``index`` of an epoch is known."""

    def begin_evaluation(
        self, kind: str, arguments: tuple[Any, ...]
    ) -> tuple[Callable[[Any], tuple[Any, Any]], Callable[[StepRecorder, Any, Any, int], bytes]]:
        """Prepares a batch of "validation", "test" or "predict".

        ``arguments``: Lightning's for the step after the batch. Returns :meth:`split` without ``index``, and
        :meth:`record_training`, for this batch.
        """
        self._evaluation.kind, self._evaluation.arguments = kind, arguments
        return lambda batch: ((batch,), None), self.record_training

    def _take(self, recording: Any) -> None:
        self._taken = recording

    # ------------------------------------------------------------------ after a run

    def rebuild(self, state: Mapping[str, Any]) -> None:
        """Makes a module that holds only one stage whole again, with ``state``."""
        set_weights(self.module, state)


def _shared_with_previous(stages: Sequence[range], stage: int) -> tuple[int, ...]:
    return tuple(layer for layer in stages[stage] if stage and layer in stages[stage - 1])


_REPLACED_STEPS = {  # method of a PipelineModule -> what to override instead
    "training_step": "loss(), split_batch() and on_training_output()",
    "validation_step": "on_validation_output()",
    "test_step": "on_test_output()",
    "predict_step": "predict_input() and on_predict_output()",
    "backward": "nothing: the schedule runs the backward of each stage",
    "optimizer_zero_grad": "nothing: gradients are zeroed at the start of each step",
}


@dataclass(frozen=True)
class _StepTarget:
    value: Any
    indices: BatchIndices


_LOSS_REMEDY = (
    "loss() runs on the last stage. Let the layers pass on what it needs of others, as an item of the tuple that they"
    " return; a penalty on weights is the optimizer's weight_decay, or use pipeline_parallel_size=1."
)


class LayerParts(ModelParts):
    """Parts of a :class:`.PipelineModule`: one for each layer."""

    module: PipelineModule
    loss_name = "loss"
    loss_is_optional = False

    def __init__(self, module: PipelineModule) -> None:
        super().__init__(module)
        self._of_others: tuple[int, ...] = ()  # parts that an earlier stage holds, too

    @override
    def check(self) -> None:
        if not self.module.automatic_optimization:
            raise UnsupportedFeatureError(
                f"strategy='recycle' does not support manual optimization of {type(self.module).__name__}, whose"
                " backward is the schedule's: leave automatic_optimization = True, or derive it from LightningModule"
                " and use pipeline_parallel_size=1."
            )
        for name, remedy in _REPLACED_STEPS.items():
            if is_overridden(name, self.module, PipelineModule):
                raise UnsupportedFeatureError(
                    f"strategy='recycle' never calls {type(self.module).__name__}.{name}(), it runs its schedule"
                    f" instead. Remove it and override {remedy}."
                )

    @override
    def describe(self) -> None:
        self.module.tied_groups()

    @override
    def cut(self, num_stages: int, partition: Partition) -> tuple[range, ...]:
        return layer_ranges(len(self.module.layers), num_stages, partition)

    @override
    def without_storage(self) -> pl.LightningModule:
        return self.module.without_storage()

    @override
    def keep(self, stages: Sequence[range], stage: int) -> None:
        self._of_others = _shared_with_previous(stages, stage)
        self.module.keep_layers(stages[stage])

    @override
    def path(self, index: int) -> str:
        return f"layers.{index}"

    @override
    def writes(self, name: str) -> bool:
        return not any(name.startswith(f"{self.path(index)}.") for index in self._of_others)

    @override
    def shared_layers(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(sorted({split_name(name)[0] for name in group})) for group in self.module.tied_groups())

    @override
    def unwatched(self, *layers: int) -> AbstractContextManager[Sequence[nn.Module]]:
        return nullcontext([self.module.layers[index] for index in layers])

    @override
    def exchange(self, stages: Sequence[range], stage: int, layers: Mapping[int, nn.Module]) -> None:
        self._of_others = _shared_with_previous(stages, stage)
        self.module.exchange_layers(stages[stage], layers)

    @override
    def build(self, owned: Iterable[int] | None = None, seed: int | None = None) -> None:
        self.module.materialize(owned, seed)

    @override
    def check_parameters(self, stage: int, num_stages: int) -> None:
        module = self.module
        outside = [name for name, _ in module.named_parameters() if not name.startswith("layers.")]
        if outside:
            raise ConfigurationError(
                f"{type(module).__name__} has parameters outside its pipeline: {', '.join(outside[:5])}. Every"
                " parameter must belong to a layer returned by configure_pipeline(); create modules there, not as"
                " attributes in __init__."
            )
        if not any(True for _ in module.parameters()):
            raise ConfigurationError(
                f"Stage {stage} of {num_stages} has no parameters. Use a smaller pipeline_parallel_size, or"
                " arrange the layers in configure_pipeline() so that every stage gets one."
            )

    @override
    def is_elsewhere(self, name: str) -> bool:
        parts = name.split(".", 2)
        if parts[0] != "layers" or len(parts) < 3 or not parts[1].isdigit():
            return False
        index = int(parts[1])
        return index < len(self.module.layers) and isinstance(self.module.layers[index], AbsentLayer)

    @override
    def is_of_layer(self, name: str) -> bool:
        return name.startswith("layers.")

    @override
    def ties(self, stages: Sequence[range]) -> tuple[Tie, ...]:
        groups = self.module.tied_groups()
        known = {name for group in groups for name in group}
        shared = [layer for before, after in pairwise(stages) for layer in before if layer in after]
        found = [name for i in shared for name, _ in self.module.layers[i].named_parameters(prefix=self.path(i))]
        return ties_between_stages([*groups, *((name,) for name in found if name not in known)], stages)

    @override
    def modules(self, run: Run, owned: range, recorder: StepRecorder) -> Sequence[nn.Module]:
        return [self.module.layers[index] for index in owned]

    @override
    def among(self, modules: Sequence[nn.Module], held: range, own: range) -> Sequence[nn.Module]:
        return modules[own.start - held.start : own.stop - held.start]

    @override
    def record_forward(self, recorder: StepRecorder, output: Any) -> bytes:
        return recorder.record(lambda: output, samples=1)

    @override
    def split(self, batch: Any, index: int) -> tuple[Any, Any]:
        indices = BatchIndices(index)
        inputs, target = call_at(indices, self.module.split_batch, batch)
        return inputs, _StepTarget(target, indices)

    @override
    def loss(self, output: Any, target: _StepTarget) -> Tensor:
        module = self.module
        name = f"{type(module).__name__}.loss()"
        with seeing_one_stage(module.layers, name, _LOSS_REMEDY, next(module.parameters())):
            return call_at(target.indices, module.loss, output, target.value)  # type: ignore[no-any-return]

    @property
    @override
    def records_training(self) -> bool:
        return is_overridden("on_training_output", self.module, PipelineModule)

    @override
    def record_training(self, recorder: StepRecorder, output: Any, target: _StepTarget, samples: int) -> bytes:
        hook = self.module.on_training_output
        return recorder.record(call_at, target.indices, hook, output, target.value, samples=samples)

    @override
    def on_loss(self, loss: Tensor, index: int) -> None:
        call_at(BatchIndices(index), self.module.on_training_loss, loss)

    @override
    def begin_evaluation(
        self, kind: str, arguments: tuple[Any, ...]
    ) -> tuple[Callable[[Any], tuple[Any, Any]], Callable[[StepRecorder, Any, Any, int], bytes]]:
        module, indices = self.module, BatchIndices(*arguments)
        has_targets, hook = kind != "predict", getattr(module, f"on_{kind}_output")

        def split(batch: Any) -> tuple[Any, Any]:
            if not has_targets:
                return call_at(indices, module.predict_input, batch), None
            parts: tuple[Any, Any] = call_at(indices, module.split_batch, batch)
            return parts

        def record(recorder: StepRecorder, output: Any, target: Any, samples: int) -> bytes:
            given = (output, target) if has_targets else (output,)
            return recorder.record(call_at, indices, hook, *given, samples=samples)

        return split, record

    @override
    def rebuild(self, state: Mapping[str, Any]) -> None:
        self.module.rebuild(state)


class _TrainingStep(RecordedStep):
    def __init__(self, module: pl.LightningModule, recorder: StepRecorder, take: Callable[[Any], None]) -> None:
        super().__init__(module, recorder, take)
        self._takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)

    @override
    def forward(self, batch: Any, index: int) -> Any:
        with self.recorded() as recording:
            output = self.module.training_step(batch, *([index] if self._takes_index else []))
            if not self.module.automatic_optimization:
                recording.result = ManualResult.from_training_step_output(output).asdict()
            elif isinstance(output, Mapping):
                recording.result = {key: value for key, value in output.items() if key != "loss"}
        return output


class _EvaluationStep(RecordedStep):
    kind = "validation"
    arguments: tuple[Any, ...] = ()

    @override
    def forward(self, batch: Any) -> Any:
        with self.recorded() as recording, torch.no_grad():
            recording.result = getattr(self.module, f"{self.kind}_step")(batch, *self.arguments)
        return recording.result
