"""The user's model: a LightningModule whose layers are a sequence that can be cut into pipeline stages.

The layers live in ``self.layers``, an ``nn.ModuleList`` with one entry per layer of the whole model on every worker.
Entries that a worker does not own are parameterless :class:`AbsentLayer` placeholders, so names in a state dict are
``layers.<index>...`` on every grid and ``self.parameters()`` is local to the stage.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_recycle.errors import ConfigurationError
from lightning_recycle.runtime.randomness import derive_seed

__all__ = ["AbsentLayer", "LayerSpec", "PipelineModule", "global_seed"]


def global_seed() -> int:
    """Returns the seed given to ``seed_everything``, or 0."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))


class LayerSpec:
    """A recipe for a layer, so that no worker has to hold layers that it does not own.

    Args:
        cls: a subclass of ``nn.Module`` (or a callable that returns a module).
        *args, **kwargs: the arguments of its constructor.

    The layer is built with torch's generator seeded from (seed, layer index): the same weights on every grid.
    """

    def __init__(self, cls: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> None:
        if not callable(cls):
            raise ConfigurationError(
                f"LayerSpec expects a class or a callable that builds a layer, got {cls!r}."
                " Write LayerSpec(nn.Linear, 8, 8), not LayerSpec(nn.Linear(8, 8))."
            )
        self.cls, self.args, self.kwargs = cls, args, kwargs

    def build(self, index: int, seed: int) -> nn.Module:
        """Builds the layer.

        Raises:
            ConfigurationError: if the constructor fails or returns no module.
        """
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(derive_seed(seed, index))
            try:
                layer = self.cls(*self.args, **self.kwargs)
            except Exception as error:
                raise ConfigurationError(
                    f"Layer {index}, {self!r}, cannot be built: {type(error).__name__}: {error}."
                    " Check the arguments in configure_pipeline()."
                ) from error
        if not isinstance(layer, nn.Module):
            raise ConfigurationError(f"Layer {index}, {self!r}, built a {type(layer).__name__}, not an nn.Module.")
        return layer

    def __repr__(self) -> str:
        arguments = [repr(a) for a in self.args] + [f"{k}={v!r}" for k, v in self.kwargs.items()]
        return f"LayerSpec({', '.join([getattr(self.cls, '__name__', repr(self.cls)), *arguments])})"


class AbsentLayer(nn.Module):
    """A layer that is not in this process: not built yet, or owned by another stage."""

    def __init__(self, spec: LayerSpec | None = None) -> None:
        super().__init__()
        self.spec = spec
        self.dtype: torch.dtype | None = (
            None  # what a conversion such as model.double() asked for before the layer exists
        )

    def build(self, index: int, seed: int) -> nn.Module:
        """Builds the layer that this one stands for."""
        assert self.spec is not None
        layer = self.spec.build(index, seed)
        return layer if self.dtype is None else layer.to(self.dtype)

    @override
    def _apply(self, fn: Any, recurse: bool = True) -> AbsentLayer:
        probe = torch.empty(0, dtype=self.dtype or torch.get_default_dtype())
        converted = fn(probe)
        if converted.dtype != probe.dtype:
            self.dtype = converted.dtype
        return self

    @override
    def forward(self, *_: Any) -> Tensor:
        raise RuntimeError(f"{self!r} was called in a process that does not own it.")

    @override
    def extra_repr(self) -> str:
        return repr(self.spec) if self.spec is not None else ""


class PipelineModule(pl.LightningModule):
    """A LightningModule for :class:`~lightning_recycle.ReCycleStrategy`; trains unchanged on one device too.

    Implement :meth:`configure_pipeline`, :meth:`loss` and ``configure_optimizers`` (which sees the parameters of one
    stage). A layer that returns a tuple passes its items as positional arguments to the next layer.
    """

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

    def on_training_loss(self, loss: Tensor) -> None:
        """Called once per step with the mean loss of the global batch; logs it as ``train_loss``."""
        self.log("train_loss", loss, prog_bar=True)

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
        loss = self.loss(self(*inputs) if isinstance(inputs, tuple) else self(inputs), target)
        self.on_training_loss(loss.detach())
        return loss

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
        return layers

    def materialize(self, indices: Iterable[int] | None = None, seed: int | None = None) -> None:
        """Builds layers given as :class:`LayerSpec`.

        Args:
            indices: which layers; by default all.
            seed: of the initialisation; by default the one given to ``seed_everything``, else 0.
        """
        layers = self._build_layers()
        for index in range(len(layers)) if indices is None else indices:
            layer = layers[index]
            if isinstance(layer, AbsentLayer) and layer.spec is not None:
                built = layer.build(index, global_seed() if seed is None else seed)
                layers[index] = built.train(self.training)

    def keep_layers(self, indices: range) -> None:
        """Replaces every layer outside ``indices`` by a placeholder and frees it."""
        layers = self._build_layers()
        for index in range(len(layers)):
            if index not in indices:
                layers[index] = AbsentLayer()

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


def stage_layers(num_layers: int, num_stages: int) -> tuple[range, ...]:
    """Cuts ``num_layers`` layers into ``num_stages`` contiguous parts whose sizes differ by at most one.

    Later stages get the larger parts: the first holds more micro-batches in flight.

    Raises:
        ConfigurationError: if there are fewer layers than stages.
    """
    if num_layers < num_stages:
        raise ConfigurationError(
            f"The model has {num_layers} layers, fewer than pipeline_parallel_size={num_stages} stages."
            f" Use pipeline_parallel_size={num_layers} or less, or split the model into more layers in"
            " configure_pipeline()."
        )
    bounds = [num_layers * stage // num_stages for stage in range(num_stages + 1)]
    return tuple(range(bounds[stage], bounds[stage + 1]) for stage in range(num_stages))
