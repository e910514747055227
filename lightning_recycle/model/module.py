"""The user's model: what it computes besides its layers, on one device and in a pipeline.

:class:`PipelineModule` is what users derive from; :class:`SequentialPipeline` makes one of any ``nn.Sequential``.

An adapted model has no ``configure_optimizers`` of its own. A worker's optimizer sees the parameters of its stage,
which exist only in the worker, so users pass an :data:`OptimizerFactory`, not an optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_recycle.errors import ConfigurationError
from lightning_recycle.model.layered import LayeredModule, global_seed
from lightning_recycle.model.layers import AbsentLayer, LayerSpec
from lightning_recycle.model.recording import BatchPlace, RecordedModule, call_at, call_here

__all__ = [
    "AbsentLayer",
    "LayerSpec",
    "OptimizerFactory",
    "PipelineModule",
    "SequentialPipeline",
    "check_factory",
    "global_seed",
    "make_optimizers",
]

OptimizerFactory: TypeAlias = Callable[..., Any] | tuple[Callable[..., Any], Callable[..., Any]]
"""Parameters -> optimizer or (optimizer, scheduler); or the pair (parameters -> optimizer, optimizer -> scheduler)."""

_EXAMPLE = "functools.partial(torch.optim.AdamW, lr=1e-3)"


def check_factory(factory: object) -> None:
    """Raises ConfigurationError unless ``factory`` is an :data:`OptimizerFactory`."""
    if isinstance(factory, Optimizer):
        raise ConfigurationError(
            f"optimizer={type(factory).__name__}(...) is an optimizer; each stage makes its own from its parameters:"
            f" pass a function that makes one, such as {_EXAMPLE}."
        )
    parts = factory if isinstance(factory, tuple) else (factory,)
    if len(parts) > 2 or not parts or not all(callable(part) for part in parts):
        raise ConfigurationError(
            f"optimizer={factory!r}: pass a function from parameters to an optimizer, such as {_EXAMPLE}, or a pair"
            " of that and a function from the optimizer to a scheduler."
        )


def make_optimizers(factory: OptimizerFactory, parameters: Iterable[nn.Parameter]) -> dict[str, Any]:
    """Makes what ``configure_optimizers`` returns.

    Returns:
        ``{"optimizer": ...}``, and ``"lr_scheduler"`` if there is one (stepped once per epoch, unless the factory gives
        Lightning's dictionary with an ``interval``).

    Raises:
        ConfigurationError: unless the factory returns an optimizer, or an optimizer and a scheduler.
    """
    make_optimizer, *make_scheduler = factory if isinstance(factory, tuple) else (factory,)
    made = make_optimizer(list(parameters))
    parts = list(made) if isinstance(made, (tuple, list)) else [made]
    if not parts or len(parts) + len(make_scheduler) > 2 or not isinstance(parts[0], Optimizer):
        raise ConfigurationError(
            f"The optimizer factory returned {made!r}; it must return an optimizer, or (optimizer, scheduler) if no"
            " scheduler factory is given."
        )
    parts += [make(parts[0]) for make in make_scheduler]
    return dict(zip(("optimizer", "lr_scheduler"), parts, strict=False))


class PipelineModule(RecordedModule, LayeredModule):
    """A LightningModule for :class:`~lightning_recycle.ReCycleStrategy`; trains unchanged on one device too.

    Implement :meth:`configure_pipeline`, :meth:`loss` and ``configure_optimizers`` (which sees the parameters of one
    stage).

    **What passes between layers.** A layer that returns a tuple passes its items as positional arguments to the next
    layer. Between stages these may be tensors of any dtype (gradients flow through floating-point and complex ones) and
    of shapes that vary between micro-batches, and, inside a tuple, None.

    **Tied weights.** A parameter that several layers use, such as an input embedding and the output projection, is tied
    by being the same object in concrete modules, or by name with :meth:`tied_parameters`. The optimizer sees it once,
    and all its names are in the state dict. Its initial values are those of its first concrete layer; if all are given
    as :class:`LayerSpec`, those of the first.

    **Which batch.** The methods that see a batch or its output, and :meth:`on_training_loss`, may have the parameters
    ``batch_idx`` and ``dataloader_idx``, which are then given by name: ``def loss(self, output, target, batch_idx)``.

    **Buffers** belong to their layer. What depends only on the data of a micro-batch is as on one device. Running
    statistics, such as BatchNorm's, are not: a forward in training mode normalises with the statistics of its
    *micro-batch* (of batch_size / M samples), and updates the running statistics of the worker that runs it, so peers
    hold different ones. LayerNorm, GroupNorm and RMSNorm have no such state and are exact on every grid.
    """

    # ------------------------------------------------------------------ what the user implements

    def loss(self, output: Any, target: Any) -> Tensor:
        """Returns the mean loss over a micro-batch, a scalar."""
        raise ConfigurationError(f"{type(self).__name__} must implement loss(output, target).")

    def split_batch(self, batch: Any) -> tuple[Any, Any]:
        """Splits what the DataLoader collated into (input of the first layer, target of the loss)."""
        if isinstance(batch, (tuple, list)) and len(batch) == 2:
            return batch[0], batch[1]
        raise ConfigurationError(
            f"{type(self).__name__}.split_batch() got a {type(batch).__name__}"
            f"{f' of length {len(batch)}' if isinstance(batch, (tuple, list)) else ''} and expects (input, target)."
            " Override split_batch(batch) to return the two."
        )

    # Hooks that see outputs run on the worker that computed them, for one micro-batch at a time, without gradients.
    # What they log and update metrics with is gathered from all micro-batches and is the same on every worker.

    def on_training_output(self, output: Any, target: Any) -> None:
        """Called with the last layer's output in training: log values, or update metrics. By default does nothing."""

    def on_validation_output(self, output: Any, target: Any) -> None:
        """Called with the output of the last layer in validation; logs the loss as ``val_loss``."""
        self.log("val_loss", call_here(self.loss, output, target), prog_bar=True)

    def on_test_output(self, output: Any, target: Any) -> None:
        """Called with the output of the last layer in a test; logs the loss as ``test_loss``."""
        self.log("test_loss", call_here(self.loss, output, target), prog_bar=True)

    def on_predict_output(self, output: Any) -> Any:
        """Returns the prediction for the output of the last layer: tensors whose first dimension counts samples, or
        tuples, lists and dicts of them. By default the output itself.
        """
        return output

    def predict_input(self, batch: Any) -> Any:
        """Returns the input of the first layer for what the DataLoader collated, in ``predict``: the first of a pair,
        else the batch itself.
        """
        return batch[0] if isinstance(batch, (tuple, list)) and len(batch) == 2 else batch

    def on_training_loss(self, loss: Tensor) -> None:
        """Called once per step with the mean loss of the global batch; logs it as ``train_loss``."""
        self.log("train_loss", loss, prog_bar=True)

    @classmethod
    def from_sequential(
        cls,
        model: nn.Sequential,
        loss: Callable[[Any, Any], Tensor],
        optimizer: Callable[..., Any] | tuple[Callable[..., Any], Callable[..., Any]],
    ) -> SequentialPipeline:
        """Makes a pipeline of the children of ``model``, each of which is a layer.

        Args:
            model: used, not copied. As in ``nn.Sequential``, a layer gets what the previous one returned as its only
                argument, even a tuple.
            loss: (output, target) -> mean over the micro-batch, a scalar; or an ``nn.Module`` without parameters.
            optimizer: parameters -> optimizer, such as ``functools.partial(torch.optim.AdamW, lr=1e-3)``; it may also
                return (optimizer, scheduler). Or a pair of (parameters -> optimizer, optimizer -> scheduler).

        Raises:
            ConfigurationError: if one of them is something else.
        """
        if issubclass(cls, SequentialPipeline):
            return cls(model, loss, optimizer)
        if cls is not PipelineModule:
            raise ConfigurationError(
                f"{cls.__name__}.from_sequential() would ignore what {cls.__name__} defines. Call"
                " PipelineModule.from_sequential(), or derive the class from"
                " lightning_recycle.model.module.SequentialPipeline to override hooks."
            )
        return SequentialPipeline(model, loss, optimizer)

    # ------------------------------------------------------------------ one device

    @override
    def forward(self, *inputs: Any) -> Any:
        """Runs all layers: here, or where a worker has only those of one stage, on all workers together.

        There all must call it with the same inputs, outside of steps; the result is the same on all, without gradients.
        """
        self.materialize()
        if any(isinstance(layer, AbsentLayer) for layer in self.layers) and self._trainer is not None:
            return self.trainer.strategy.forward_whole(inputs)
        value: Any = inputs if len(inputs) > 1 else inputs[0]
        for layer in self.layers:
            value = layer(*value) if isinstance(value, tuple) else layer(value)
        return value

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The step on one device; :class:`~lightning_recycle.ReCycleStrategy` runs its schedule instead."""
        place = BatchPlace(batch_idx)
        inputs, target = call_at(place, self.split_batch, batch)
        output = self(*inputs) if isinstance(inputs, tuple) else self(inputs)
        loss: Tensor = call_at(place, self.loss, output, target)
        if is_overridden("on_training_output", self, PipelineModule):
            with torch.no_grad():
                call_at(place, self.on_training_output, _detached(output), target)
        call_at(place, self.on_training_loss, loss.detach())
        return loss

    @override
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Validation on one device; the strategy runs its schedule instead."""
        self._evaluate(BatchPlace(batch_idx, dataloader_idx), batch, self.on_validation_output)

    @override
    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """A test on one device; the strategy runs its schedule instead."""
        self._evaluate(BatchPlace(batch_idx, dataloader_idx), batch, self.on_test_output)

    @override
    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        """Prediction on one device; the strategy runs its schedule instead."""
        place = BatchPlace(batch_idx, dataloader_idx)
        inputs = call_at(place, self.predict_input, batch)
        output = self(*inputs) if isinstance(inputs, tuple) else self(inputs)
        return call_at(place, self.on_predict_output, output)

    def _evaluate(self, place: BatchPlace, batch: Any, hook: Callable[..., None]) -> None:
        inputs, target = call_at(place, self.split_batch, batch)
        call_at(place, hook, self(*inputs) if isinstance(inputs, tuple) else self(inputs), target)


class SequentialPipeline(PipelineModule):
    """The children of an ``nn.Sequential`` as layers, with a loss and an optimizer.

    What :meth:`PipelineModule.from_sequential` makes; its arguments are described there. Names in the state dict are
    those of the model, prefixed with ``layers.``. A 1-tuple reaches the next layer as its item.

    To load from a checkpoint, pass the same arguments:
    ``SequentialPipeline.load_from_checkpoint(path, model=..., loss=..., optimizer=...)``.

    Raises:
        ConfigurationError: if an argument is of the wrong kind.
    """

    def __init__(self, model: nn.Sequential, loss: Callable[[Any, Any], Tensor], optimizer: OptimizerFactory) -> None:
        super().__init__()
        if not isinstance(model, nn.Sequential):
            raise ConfigurationError(
                f"from_sequential() got a {type(model).__name__} as model; it takes an nn.Sequential. For other models"
                " derive a class from PipelineModule and return the layers from configure_pipeline()."
            )
        if isinstance(loss, type) or not callable(loss):
            raise ConfigurationError(
                f"from_sequential() got loss={loss!r}; pass a function of (output, target), such as"
                " torch.nn.functional.cross_entropy, or a module, such as nn.CrossEntropyLoss()."
            )
        if isinstance(loss, nn.Module) and any(True for _ in loss.parameters()):
            raise ConfigurationError(
                f"The loss {type(loss).__name__} has parameters; only layers can have any. Make it the last layer,"
                " followed by a loss function."
            )
        check_factory(optimizer)
        self.criterion = loss
        self._optimizer = optimizer
        self._children = list(model)
        for layer in self._children:
            layer.register_forward_pre_hook(_pack)
        self._build_layers()
        self._children = []  # the layers of other stages are to be freed

    @override
    def configure_pipeline(self) -> list[nn.Module]:
        return self._children

    @override
    def loss(self, output: Any, target: Any) -> Tensor:
        return self.criterion(output, target)

    @override
    def configure_optimizers(self) -> Any:
        return make_optimizers(self._optimizer, self.parameters())


def _pack(layer: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """A forward pre-hook: several arguments are one tuple that the previous layer returned."""
    return arguments if len(arguments) == 1 else (arguments,)


def _detached(output: Any) -> Any:
    if isinstance(output, tuple):
        return tuple(_detached(item) for item in output)
    return output.detach() if isinstance(output, Tensor) else output
