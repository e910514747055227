"""A LightningModule whose layers are a sequence, to be cut into pipeline stages.

The layers live in ``self.layers``, an ``nn.ModuleList`` with one entry per layer of the whole model on every worker.
Entries that a worker does not own are parameterless :class:`AbsentLayer` placeholders, so names in a state dict are
``layers.<index>...`` on every grid and ``self.parameters()`` is local to the stage.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from typing_extensions import Self, override

from lightning_recycle.errors import ConfigurationError, counted
from lightning_recycle.model.layers import (
    AbsentLayer,
    LayerSpec,
    layers_tied_to,
    merge_groups,
    set_weights,
    share,
    shared_parameters,
    split_name,
    tie,
)
from lightning_recycle.model.recorded_module import BatchIndices, RecordedModule, call_at, call_here
from lightning_recycle.randomness import generator_states, set_generator_states
from lightning_recycle.torch_internals import modules_of


def global_seed() -> int:
    """Returns the seed given to ``seed_everything``, or 0."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))


class PipelineModule(RecordedModule):
    """A LightningModule of layers in a sequence; trains unchanged on one device too.

    Implement :meth:`configure_pipeline`, :meth:`loss` and ``configure_optimizers`` (which sees the parameters of one
    stage).

    **What passes between layers.** A layer that returns a tuple passes its items as positional arguments to the next
    layer. Between stages these may be tensors of any dtype (gradients flow through floating-point and complex ones) and
    of shapes that vary between micro-batches, and, inside a tuple, None.

    **Tied weights.** A parameter that several layers use, such as an input embedding and the output projection, is tied
    by being the same object in concrete modules, or by name with :meth:`tied_parameters`. The optimizer sees it once,
    and all its names are in the state dict. Its initial values are those of its first concrete layer; if all are given
    as :class:`LayerSpec`, those of the first. A LayerSpec that is tied to a concrete layer is built with that.

    **Which batch.** The methods that see a batch or its output, and :meth:`on_training_loss`, may have the parameters
    ``batch_idx`` and ``dataloader_idx``, which are then given by name: ``def loss(self, output, target, batch_idx)``.

    **Buffers** belong to their layer. What depends only on the data of a micro-batch is as on one device. Running
    statistics, such as BatchNorm's, are not: a forward in training mode normalises with the statistics of its
    *micro-batch* (of batch_size / M samples), and the running statistics become the mean of what all micro-batches
    leave. LayerNorm, GroupNorm and RMSNorm have no such state and are exact on every grid.
    """

    _tied: tuple[tuple[str, ...], ...] = ()
    _awaits_setup = False
    """Whether a Trainer was attached, so that configure_model() is to come."""

    # ------------------------------------------------------------------ what the user implements

    def configure_pipeline(self) -> nn.Sequential | Sequence[nn.Module | LayerSpec]:
        """Returns the layers of the whole model, in order.

        Called once, before ``setup()``; if it raises, as it needs what ``setup()`` of the module or the data module
        makes (``self.trainer.datamodule.num_classes``), again after that. Until then the module has no layers.
        """
        raise ConfigurationError(
            f"{type(self).__name__} must implement configure_pipeline() and return an nn.Sequential or a list of"
            " nn.Module and LayerSpec."
        )

    def tied_parameters(self) -> Iterable[Sequence[str]]:
        """Groups of names that are one parameter.

        For example ``[("layers.0.weight", "layers.9.logits.weight")]``. Needed for layers given as :class:`LayerSpec`;
        parameters that concrete modules share are detected. Called once, after :meth:`configure_pipeline`. The members
        of a group must have the same shape.
        """
        return ()

    def loss(self, output: Any, target: Any) -> Tensor:
        """Returns the mean loss over a micro-batch, a scalar."""
        raise ConfigurationError(f"{type(self).__name__} must implement loss(output, target).")

    def split_batch(self, batch: Any) -> tuple[Any, Any]:
        """Splits a collated batch into (input of the first layer, target of the loss)."""
        if isinstance(batch, (tuple, list)) and len(batch) == 2:
            return batch[0], batch[1]
        raise ConfigurationError(
            f"{type(self).__name__}.split_batch() got an object of type {type(batch).__name__}"
            f"{f' of length {len(batch)}' if isinstance(batch, (tuple, list)) else ''} and expects (input, target)."
            " Override split_batch(batch) to return the two."
        )

    # Hooks that see outputs run on the worker that computed them, for one micro-batch at a time, without gradients.
    # What they log and update metrics with is gathered from all micro-batches and is the same on every worker.

    def on_training_output(self, output: Any, target: Any) -> None:
        """Called with the last layer's output, to log or update metrics."""

    def on_validation_output(self, output: Any, target: Any) -> None:
        """Called with the last layer's output; logs the loss as ``val_loss``."""
        self.log("val_loss", call_here(self.loss, output, target), prog_bar=True)

    def on_test_output(self, output: Any, target: Any) -> None:
        """Called with the last layer's output; logs the loss as ``test_loss``."""
        self.log("test_loss", call_here(self.loss, output, target), prog_bar=True)

    def on_predict_output(self, output: Any) -> Any:
        """The prediction for the last layer's output; by default the output.

        Tensors whose first dimension counts samples, or tuples, lists and dicts of them.
        """
        return output

    def predict_input(self, batch: Any) -> Any:
        """The first layer's input in ``predict``: the first of a pair, else the batch."""
        return batch[0] if isinstance(batch, (tuple, list)) and len(batch) == 2 else batch

    def on_training_loss(self, loss: Tensor) -> None:
        """Called with the global batch's mean loss; logs it as ``train_loss``."""
        self.log("train_loss", loss, prog_bar=True)

    # ------------------------------------------------------------------ one device

    @override
    def forward(self, *inputs: Any) -> Any:
        """Runs all layers, here or on all workers together.

        In a worker with one stage, all must call it with the same inputs, outside of steps; the result is the same on
        all, without gradients.
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
        """The step on one device; the strategy runs its schedule instead."""
        indices = BatchIndices(batch_idx)
        inputs, target = call_at(indices, self.split_batch, batch)
        output = self(*inputs) if isinstance(inputs, tuple) else self(inputs)
        loss: Tensor = call_at(indices, self.loss, output, target)
        if is_overridden("on_training_output", self, PipelineModule):
            with torch.no_grad():
                call_at(indices, self.on_training_output, _detached(output), target)
        call_at(indices, self.on_training_loss, loss.detach())
        return loss

    @override
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Validation on one device; the strategy runs its schedule instead."""
        self._evaluate(BatchIndices(batch_idx, dataloader_idx), batch, self.on_validation_output)

    @override
    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """A test on one device; the strategy runs its schedule instead."""
        self._evaluate(BatchIndices(batch_idx, dataloader_idx), batch, self.on_test_output)

    @override
    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        """Prediction on one device; the strategy runs its schedule instead."""
        indices = BatchIndices(batch_idx, dataloader_idx)
        inputs = call_at(indices, self.predict_input, batch)
        output = self(*inputs) if isinstance(inputs, tuple) else self(inputs)
        return call_at(indices, self.on_predict_output, output)

    def _evaluate(self, indices: BatchIndices, batch: Any, hook: Callable[..., None]) -> None:
        inputs, target = call_at(indices, self.split_batch, batch)
        call_at(indices, hook, self(*inputs) if isinstance(inputs, tuple) else self(inputs), target)

    # ------------------------------------------------------------------ layers

    @override
    def configure_model(self) -> None:
        """Builds the layers given as specs; with the strategy only this stage's."""
        self._build_layers()
        if self._fabric is None and self._trainer is not None and getattr(self.trainer.strategy, "owns_layers", False):
            return  # the strategy's setup keeps the layers of this stage and materialises those
        self.materialize()

    def _build_layers(self) -> nn.ModuleList:
        if "layers" in modules_of(self):
            return modules_of(self)["layers"]  # type: ignore[return-value]
        states = generator_states()
        try:
            described = self.configure_pipeline()
        except BaseException:
            set_generator_states(states)  # another attempt draws the same initial weights
            raise
        if not isinstance(described, (nn.Sequential, nn.ModuleList, list, tuple)):
            raise ConfigurationError(
                f"{type(self).__name__}.configure_pipeline() returned an object of type {type(described).__name__};"
                " return an nn.Sequential, or a list of nn.Module and LayerSpec."
            )
        entries = list(described)
        if not entries:
            raise ConfigurationError(
                f"{type(self).__name__}.configure_pipeline() returned no layers: return at least one."
            )
        layers = nn.ModuleList()
        for index, entry in enumerate(entries):
            if isinstance(entry, LayerSpec):
                layers.append(AbsentLayer(entry, f"self.layers[{index}]"))
            elif isinstance(entry, nn.Module):
                layers.append(entry)
            else:
                made = f" Write {entry.__name__}(...)." if isinstance(entry, type) else ""
                raise ConfigurationError(
                    f"{type(self).__name__}.configure_pipeline() returned {entry!r} as layer {index}; every layer must"
                    f" be an nn.Module or a LayerSpec.{made}"
                )
        modules_of(self)["layers"] = layers  # add_module() would look the name up first, and so recurse
        try:
            groups = merge_groups([*shared_parameters(list(layers)), *map(self._checked_group, self.tied_parameters())])
            tie(layers, groups)
            self._tied = groups
            here = [index for index, layer in enumerate(layers) if not isinstance(layer, AbsentLayer)]
            self.materialize(layers_tied_to(here, groups))  # so that a stage needs no other one's values
        except BaseException:
            del modules_of(self)["layers"]  # the next access meets the same error, not half-built layers
            raise
        return layers

    def materialize(self, indices: Iterable[int] | None = None, seed: int | None = None) -> None:
        """Builds layers given as :class:`LayerSpec`, and ties their parameters.

        A parameter tied to one of a layer that is not here starts with that layer's values: it is built briefly too.

        Args:
            indices: which layers; by default all that belong to this process.
            seed: the seed of the initialisation; by default the one given to ``seed_everything``, else 0.
        """
        layers = self._build_layers()
        seed = global_seed() if seed is None else seed
        absent: dict[int, AbsentLayer] = {}
        for index in range(len(layers)) if indices is None else indices:
            layer = layers[index]
            if isinstance(layer, AbsentLayer) and not layer.elsewhere:
                layers[index] = layer.build(index, seed).train(self.training)
                absent[index] = layer
        if absent:
            try:
                tie(layers, self._tied, absent, seed)
            except BaseException:
                for index, layer in absent.items():  # the next attempt meets the same error
                    layers[index] = layer
                raise

    def rebuild(self, state: Mapping[str, Any]) -> None:
        """Makes a module that holds only one stage whole again, with ``state``."""
        training = self.training
        modules_of(self).pop("layers", None)
        self.materialize()
        set_weights(self, state, with_dtypes=True)
        self.train(training)

    def keep_layers(self, indices: range) -> None:
        """Replaces every layer outside ``indices`` by a placeholder and frees it."""
        layers = self._build_layers()
        for index in range(len(layers)):
            if index not in indices:
                layer = layers[index]
                if not isinstance(layer, AbsentLayer):
                    layers[index] = layer = AbsentLayer(name=f"self.layers[{index}]")
                layer.elsewhere = True

    def exchange_layers(self, indices: range, layers: Mapping[int, nn.Module]) -> None:
        """Takes ``layers`` of another process; drops all outside ``indices``."""
        for index, layer in layers.items():
            self.layers[index] = layer
        share(self, self._tied, [f"layers.{index}." for index in layers])
        self.keep_layers(indices)

    def without_storage(self) -> Self:
        """A copy with its parameters on torch's meta device, for shapes only."""
        layers = self._build_layers()
        copied: dict[int, Any] = {}  # the memo of deepcopy: tensors that are in it already are not copied
        for tensor in (*layers.parameters(), *layers.buffers()):
            if not isinstance(tensor, UninitializedParameter):
                empty = tensor.detach().to("meta")
                is_parameter = isinstance(tensor, nn.Parameter)
                copied[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
        copies = nn.ModuleList()
        for index, layer in enumerate(layers):
            if isinstance(layer, AbsentLayer) and layer.spec is not None:
                built = layer.spec.build_without_storage(index).train(self.training)
                copies.append(built if layer.dtype is None else built.to(layer.dtype))
            else:
                copies.append(copy.deepcopy(layer, copied))
        tie(copies, self._tied)
        double = object.__new__(type(self))
        double.__dict__.update(self.__dict__)
        double.__dict__["_modules"] = {**modules_of(self), "layers": copies}
        double.__dict__["_device"] = torch.device("meta")
        return double

    def tied_groups(self) -> tuple[tuple[str, ...], ...]:
        """The names of each parameter that several layers share, by layer.

        The same on every worker. Within a stage the members of a group are one object; across stages every stage owns a
        copy, see :mod:`lightning_recycle.model.layers`.
        """
        self._build_layers()
        return self._tied

    def _checked_group(self, group: Sequence[str]) -> tuple[str, ...]:
        if isinstance(group, str) or len(set(group)) < 2:
            raise ConfigurationError(
                f"{type(self).__name__}.tied_parameters() returned the group {group!r}; a group is at least two"
                " different names, such as ('layers.0.weight', 'layers.9.weight')."
            )
        count = len(modules_of(self)["layers"])  # type: ignore[arg-type]
        for name in group:
            if split_name(name)[0] >= count:
                raise ConfigurationError(
                    f"{type(self).__name__}.tied_parameters() names {name!r}; the model has {counted(count, 'layer')}."
                )
        return tuple(group)

    # Everything below makes ``layers`` exist on first access, whichever method of nn.Module asks for it. Lightning
    # walks through the modules when it attaches a Trainer, before the setup() hooks: what needs these has to wait.

    def _attach(self, trainer: pl.Trainer | None) -> None:
        self._awaits_setup = trainer is not None
        pl.LightningModule.trainer.fset(self, trainer)  # type: ignore[attr-defined]

    trainer = property(pl.LightningModule.trainer.fget, _attach)  # type: ignore[attr-defined]

    def _build_layers_if_possible(self) -> None:
        try:
            self._build_layers()
        except Exception:
            if not self._awaits_setup:
                raise
            # Otherwise the run raises it: from configure_model(), after setup(); or it has, and Lightning cleans up.

    def __getattr__(self, name: str) -> Any:
        if name == "layers" and "layers" not in self.__dict__.get("_modules", {}):
            return self._build_layers()
        return super().__getattr__(name)

    @override
    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        self._build_layers_if_possible()
        found: Iterator[tuple[str, nn.Module]] = super().named_modules(*args, **kwargs)
        return found

    @override
    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        self._build_layers_if_possible()
        return super().named_children()

    @override
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self._build_layers()
        return super().state_dict(*args, **kwargs)

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        layers = self._build_layers()
        prefixes = {key.split(".")[1] for key in state_dict if key.startswith("layers.")}
        self.materialize(layers_tied_to([i for i in range(len(layers)) if str(i) in prefixes], self._tied))
        return super().load_state_dict(state_dict, *args, **kwargs)

    @override
    def _apply(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        self._build_layers_if_possible()
        return super()._apply(fn, *args, **kwargs)


def _detached(output: Any) -> Any:
    if isinstance(output, tuple):
        return tuple(_detached(item) for item in output)
    return output.detach() if isinstance(output, Tensor) else output
