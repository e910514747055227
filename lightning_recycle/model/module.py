"""The user's model: a LightningModule whose layers are a sequence that can be cut into pipeline stages.

The layers live in ``self.layers``, an ``nn.ModuleList`` with one entry per layer of the whole model on every worker.
Entries that a worker does not own are parameterless :class:`AbsentLayer` placeholders, so names in a state dict are
``layers.<index>...`` on every grid and ``self.parameters()`` is local to the stage.
"""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from typing_extensions import override

from lightning_recycle.data.steps import StepHandle
from lightning_recycle.errors import ConfigurationError, UnsupportedFeatureError
from lightning_recycle.model.layers import AbsentLayer, LayerSpec, needed_elsewhere, tie
from lightning_recycle.model.tying import merge_groups, shared_parameters, split_name

if TYPE_CHECKING:
    from lightning_recycle.model.sequential import SequentialPipeline

__all__ = ["AbsentLayer", "LayerSpec", "PipelineModule", "global_seed"]


_LOG_SIGNATURE = inspect.signature(pl.LightningModule.log)


def global_seed() -> int:
    """Returns the seed given to ``seed_everything``, or 0."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))


class PipelineModule(pl.LightningModule):
    """A LightningModule for :class:`~lightning_recycle.ReCycleStrategy`; trains unchanged on one device too.

    Implement :meth:`configure_pipeline`, :meth:`loss` and ``configure_optimizers`` (which sees the parameters of one
    stage).

    **What passes between layers.** A layer that returns a tuple passes its items as positional arguments to the next
    layer. Where a stage ends these may be tensors of any dtype (gradients flow through floating-point and complex ones)
    and of shapes that differ from micro-batch to micro-batch, and, inside a tuple, None.

    **Tied weights.** A parameter that several layers use, such as an input embedding and the output projection, is tied
    by being the same object in concrete modules, or by name with :meth:`tied_parameters`. It counts once for the
    optimizer, and all its names are in the state dict. Its initial values are those of its first concrete layer; if
    all are given as :class:`LayerSpec`, those of the first.

    **Buffers** belong to their layer. What depends on the data of a micro-batch only is as on one device. Running
    statistics, as BatchNorm's, are not: a forward in training mode normalises with the statistics of its *micro-batch*
    (of batch_size / M samples), and updates the running ones of the worker that runs it. Peers therefore hold different
    ones. LayerNorm, GroupNorm and RMSNorm have no such state and are exact on every grid.
    """

    _tied: tuple[tuple[str, ...], ...] = ()
    recorded_logs: list[tuple[str, Any, dict[str, Any]]] | None = None
    """While a hook runs whose logging is put down instead of done: (name, value, further arguments)."""
    _may_log = True

    # ------------------------------------------------------------------ what the user implements

    def configure_pipeline(self) -> nn.Sequential | Sequence[nn.Module | LayerSpec]:
        """Returns the layers of the whole model, in order."""
        raise ConfigurationError(
            f"{type(self).__name__} must implement configure_pipeline() and return an nn.Sequential or a list of"
            " nn.Module and LayerSpec."
        )

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
        """Called with the output of the last layer in training: log values, or update metrics. Does nothing."""

    def on_validation_output(self, output: Any, target: Any) -> None:
        """Called with the output of the last layer in validation; logs the loss as ``val_loss``."""
        self.log("val_loss", self.loss(output, target), prog_bar=True)

    def on_test_output(self, output: Any, target: Any) -> None:
        """Called with the output of the last layer in a test; logs the loss as ``test_loss``."""
        self.log("test_loss", self.loss(output, target), prog_bar=True)

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

    def tied_parameters(self) -> Iterable[Sequence[str]]:
        """Returns groups of names of parameters that are one, e.g. ``[("layers.0.weight", "layers.9.logits.weight")]``.

        Needed for layers given as :class:`LayerSpec`; that concrete modules share a parameter is seen by itself. Called
        once, after :meth:`configure_pipeline`. The members of a group must have the same shape.
        """
        return ()

    @classmethod
    def from_sequential(
        cls,
        model: nn.Sequential,
        loss: Callable[[Any, Any], Tensor],
        optimizer: Callable[..., Any] | tuple[Callable[..., Any], Callable[..., Any]],
    ) -> SequentialPipeline:
        """Makes a pipeline of the children of ``model``, each of which is a layer.

        Args:
            model: is used, not copied. As in ``nn.Sequential``, a layer gets what the one before returned as its only
                argument, a tuple too.
            loss: (output, target) -> mean over the micro-batch, a scalar; or an ``nn.Module`` without parameters.
            optimizer: parameters -> optimizer, such as ``functools.partial(torch.optim.AdamW, lr=1e-3)``; it may also
                return (optimizer, scheduler). Or a pair of (parameters -> optimizer, optimizer -> scheduler).

        Raises:
            ConfigurationError: if one of them is something else.
        """
        from lightning_recycle.model.sequential import SequentialPipeline

        if issubclass(cls, SequentialPipeline):
            return cls(model, loss, optimizer)
        if cls is not PipelineModule:
            raise ConfigurationError(
                f"{cls.__name__}.from_sequential() would ignore what {cls.__name__} defines. Call"
                " PipelineModule.from_sequential(), or derive the class from"
                " lightning_recycle.model.sequential.SequentialPipeline to override hooks."
            )
        return SequentialPipeline(model, loss, optimizer)

    # ------------------------------------------------------------------ one device

    @override
    def forward(self, *inputs: Any) -> Any:
        """Runs all layers in this process."""
        self.materialize()
        value: Any = inputs if len(inputs) > 1 else inputs[0]
        for layer in self.layers:
            value = layer(*value) if isinstance(value, tuple) else layer(value)
        return value

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The step on one device; :class:`~lightning_recycle.ReCycleStrategy` runs its schedule instead."""
        inputs, target = self.split_batch(batch)
        output = self(*inputs) if isinstance(inputs, tuple) else self(inputs)
        loss = self.loss(output, target)
        if is_overridden("on_training_output", self, PipelineModule):
            with torch.no_grad():
                self.on_training_output(_detached(output), target)
        self.on_training_loss(loss.detach())
        return loss

    @override
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Validation on one device; the strategy runs its schedule instead."""
        self._evaluate(batch, self.on_validation_output)

    @override
    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """A test on one device; the strategy runs its schedule instead."""
        self._evaluate(batch, self.on_test_output)

    @override
    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        """Prediction on one device; the strategy runs its schedule instead."""
        inputs = self.predict_input(batch)
        return self.on_predict_output(self(*inputs) if isinstance(inputs, tuple) else self(inputs))

    def _evaluate(self, batch: Any, hook: Callable[[Any, Any], None]) -> None:
        inputs, target = self.split_batch(batch)
        hook(self(*inputs) if isinstance(inputs, tuple) else self(inputs), target)

    @override
    def log(self, *args: Any, **kwargs: Any) -> None:
        """As in Lightning; in a hook that sees outputs it is put down, and done on all workers with the whole step."""
        if self.recorded_logs is None:
            if not self._may_log:
                raise UnsupportedFeatureError(
                    f"self.log({args[0] if args else kwargs.get('name')!r}, ...) was called while micro-batches are"
                    " computed, in loss(), split_batch() or a layer: this worker has seen a part of the batch only."
                    " Log it in on_training_output(), on_validation_output() or on_test_output()."
                )
            super().log(*args, **kwargs)
            return
        bound = _LOG_SIGNATURE.bind(self, *args, **kwargs)
        bound.apply_defaults()
        arguments = {key: value for key, value in bound.arguments.items() if key != "self"}
        self.recorded_logs.append((arguments.pop("name"), arguments.pop("value"), arguments))

    @contextmanager
    def logging_allowed(self, allowed: bool) -> Iterator[None]:
        """Whether ``self.log`` works within the block, outside the hooks that see outputs."""
        before, self._may_log = self._may_log, allowed
        try:
            yield
        finally:
            self._may_log = before

    @override
    def _on_before_batch_transfer(self, batch: Any, dataloader_idx: int = 0) -> Any:
        """The hook is for data; what Lightning's loops hold is an address."""
        return batch if isinstance(batch, StepHandle) else super()._on_before_batch_transfer(batch, dataloader_idx)

    @override
    def configure_model(self) -> None:
        """Builds the layers that exist as specs only; under the pipeline strategy those of this stage."""
        self._build_layers()
        if self._fabric is None and self._trainer is not None and getattr(self.trainer.strategy, "owns_layers", False):
            return  # the strategy's setup keeps the layers of this stage and materialises those
        self.materialize()

    # ------------------------------------------------------------------ layers

    def _build_layers(self) -> nn.ModuleList:
        """Calls configure_pipeline() once and registers the result."""
        if "layers" in self._modules:
            return self._modules["layers"]  # type: ignore[return-value]
        described = self.configure_pipeline()
        if not isinstance(described, (nn.Sequential, nn.ModuleList, list, tuple)):
            raise ConfigurationError(
                f"{type(self).__name__}.configure_pipeline() returned a {type(described).__name__};"
                " return an nn.Sequential, or a list of nn.Module and LayerSpec."
            )
        entries = list(described)
        if not entries:
            raise ConfigurationError(f"{type(self).__name__}.configure_pipeline() returned no layers.")
        layers = nn.ModuleList()
        for index, entry in enumerate(entries):
            if isinstance(entry, LayerSpec):
                layers.append(AbsentLayer(entry))
            elif isinstance(entry, nn.Module):
                layers.append(entry)
            else:
                raise ConfigurationError(
                    f"{type(self).__name__}.configure_pipeline() returned {entry!r} as layer {index}; every layer must"
                    " be an nn.Module or a LayerSpec."
                )
        self._modules["layers"] = layers  # add_module() would look the name up first, and so come back here
        try:
            groups = merge_groups([*shared_parameters(list(layers)), *map(self._checked_group, self.tied_parameters())])
            tie(layers, groups)
        except BaseException:
            del self._modules["layers"]  # the next access meets the same error, not layers half made
            raise
        self._tied = groups
        return layers

    def materialize(self, indices: Iterable[int] | None = None, seed: int | None = None) -> None:
        """Builds layers given as :class:`LayerSpec`, and ties their parameters.

        A parameter tied to one of a layer that is not here starts as there: that layer is built too, for a moment, if
        it is a LayerSpec.

        Args:
            indices: which layers; by default all that belong to this process.
            seed: of the initialisation; by default the one given to ``seed_everything``, else 0.
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
        """Makes a module of which only a stage is left whole again, with ``state``."""
        training = self.training
        self._modules.pop("layers", None)
        self.materialize()
        for name, tensor in [*self.named_parameters(), *self.named_buffers()]:
            if name in state:
                tensor.data = tensor.data.to(state[name].dtype)
        self.load_state_dict(state)
        self.train(training)

    def keep_layers(self, indices: range) -> None:
        """Replaces every layer outside ``indices`` by a placeholder and frees it; :meth:`tied_groups` stay known."""
        layers = self._build_layers()
        kept = needed_elsewhere(layers, self._tied, indices)
        for index in range(len(layers)):
            if index not in indices:
                layer = layers[index]
                if not isinstance(layer, AbsentLayer):
                    layers[index] = layer = AbsentLayer()
                layer.elsewhere = True
                layer.kept.update(kept.get(index, {}))

    def without_storage(self) -> PipelineModule:
        """A copy of the whole model whose parameters are on torch's meta device: for what only looks at shapes."""
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
        double: PipelineModule = object.__new__(type(self))
        double.__dict__.update(self.__dict__)
        double.__dict__["_modules"] = {**self._modules, "layers": copies}
        double.__dict__["_device"] = torch.device("meta")
        return double

    def tied_groups(self) -> tuple[tuple[str, ...], ...]:
        """The names of each parameter that several layers share, in the order of the layers, whoever owns these.

        The answer is the same in every process. On one device and within a stage the members of a group are one object.
        Across stages every stage owns a copy, and the run time must keep the copies equal; what that takes is written
        in :mod:`lightning_recycle.model.tying`.
        """
        self._build_layers()
        return self._tied

    def _checked_group(self, group: Sequence[str]) -> tuple[str, ...]:
        if isinstance(group, str) or len(set(group)) < 2:
            raise ConfigurationError(
                f"{type(self).__name__}.tied_parameters() returned the group {group!r}; a group is at least two"
                " different names, such as ('layers.0.weight', 'layers.9.weight')."
            )
        count = len(self._modules["layers"])  # type: ignore[arg-type]
        for name in group:
            if split_name(name)[0] >= count:
                raise ConfigurationError(
                    f"{type(self).__name__}.tied_parameters() names {name!r}; the model has {count} layers."
                )
        return tuple(group)

    # Everything below makes ``layers`` exist on first access, whichever of nn.Module's doors it comes through.

    def __getattr__(self, name: str) -> Any:
        if name == "layers" and "layers" not in self.__dict__.get("_modules", {}):
            return self._build_layers()
        return super().__getattr__(name)

    @override
    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        self._build_layers()
        yield from super().named_modules(*args, **kwargs)

    @override
    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        self._build_layers()
        return super().named_children()

    @override
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self._build_layers()
        return super().state_dict(*args, **kwargs)

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        layers = self._build_layers()
        prefixes = {key.split(".")[1] for key in state_dict if key.startswith("layers.")}
        self.materialize(index for index in range(len(layers)) if str(index) in prefixes)
        return super().load_state_dict(state_dict, *args, **kwargs)

    @override
    def _apply(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        self._build_layers()
        return super()._apply(fn, *args, **kwargs)


def _detached(output: Any) -> Any:
    if isinstance(output, tuple):
        return tuple(_detached(item) for item in output)
    return output.detach() if isinstance(output, Tensor) else output
