"""A LightningModule whose layers are a sequence that can be cut into pipeline stages.

The layers live in ``self.layers``, an ``nn.ModuleList`` with one entry per layer of the whole model on every worker.
Entries that a worker does not own are parameterless :class:`AbsentLayer` placeholders, so names in a state dict are
``layers.<index>...`` on every grid and ``self.parameters()`` is local to the stage.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from typing_extensions import Self, override

from lightning_recycle.errors import ConfigurationError
from lightning_recycle.model.layers import AbsentLayer, LayerSpec, needed_elsewhere, share, tie
from lightning_recycle.model.weights import merge_groups, set_weights, shared_parameters, split_name
from lightning_recycle.randomness import generator_states, set_generator_states

__all__ = ["LayeredModule", "global_seed"]


def global_seed() -> int:
    """Returns the seed given to ``seed_everything``, or 0."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))


class LayeredModule(pl.LightningModule):
    """Owns ``layers``: they are described once, on first access, and built where they are needed."""

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
        """Returns groups of names that are one parameter, e.g. ``[("layers.0.weight", "layers.9.logits.weight")]``.

        Needed for layers given as :class:`LayerSpec`; parameters that concrete modules share are detected. Called
        once, after :meth:`configure_pipeline`. The members of a group must have the same shape.
        """
        return ()

    # ------------------------------------------------------------------ layers

    @override
    def configure_model(self) -> None:
        """Builds the layers that exist only as specs; under the pipeline strategy only those of this stage."""
        self._build_layers()
        if self._fabric is None and self._trainer is not None and getattr(self.trainer.strategy, "owns_layers", False):
            return  # the strategy's setup keeps the layers of this stage and materialises those
        self.materialize()

    def _build_layers(self) -> nn.ModuleList:
        """Calls configure_pipeline() once and registers the result."""
        if "layers" in self._modules:
            return self._modules["layers"]  # type: ignore[return-value]
        states = generator_states()
        try:
            described = self.configure_pipeline()
        except BaseException:
            set_generator_states(states)  # another attempt draws the same initial weights
            raise
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
        self._modules["layers"] = layers  # add_module() would look the name up first, and so recurse
        try:
            groups = merge_groups([*shared_parameters(list(layers)), *map(self._checked_group, self.tied_parameters())])
            tie(layers, groups)
        except BaseException:
            del self._modules["layers"]  # the next access meets the same error, not half-built layers
            raise
        self._tied = groups
        return layers

    def materialize(self, indices: Iterable[int] | None = None, seed: int | None = None) -> None:
        """Builds layers given as :class:`LayerSpec`, and ties their parameters.

        A parameter tied to one of a layer that is not here starts with that layer's values: it is built briefly too, if
        it is a LayerSpec.

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
        self._modules.pop("layers", None)
        self.materialize()
        for name, tensor in [*self.named_parameters(), *self.named_buffers()]:
            if name in state:
                tensor.data = tensor.data.to(state[name].dtype)
        set_weights(self, state)
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

    def exchange_layers(self, indices: range, layers: Mapping[int, nn.Module]) -> None:
        """Takes ``layers`` from another process, and drops every layer outside ``indices``."""
        for index, layer in layers.items():
            self.layers[index] = layer
        share(self.layers, self._tied, layers.keys())
        self.keep_layers(indices)

    def without_storage(self) -> Self:
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
        double = object.__new__(type(self))
        double.__dict__.update(self.__dict__)
        double.__dict__["_modules"] = {**self._modules, "layers": copies}
        double.__dict__["_device"] = torch.device("meta")
        return double

    def tied_groups(self) -> tuple[tuple[str, ...], ...]:
        """The names of each parameter that several layers share, in the order of the layers, whoever owns these.

        The answer is the same in every process. On one device and within a stage the members of a group are one object.
        Across stages every stage owns a copy, and the runtime must keep the copies equal;
        :mod:`lightning_recycle.model.weights` says how.
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

    # Everything below makes ``layers`` exist on first access, whichever method of nn.Module asks for it. Lightning
    # walks through the modules when it attaches a Trainer, before the setup() hooks: what needs these has to wait.

    def _attach(self, trainer: pl.Trainer | None) -> None:
        self._awaits_setup = trainer is not None
        pl.LightningModule.trainer.fset(self, trainer)  # type: ignore[attr-defined]

    trainer = property(pl.LightningModule.trainer.fget, _attach)  # type: ignore[attr-defined]

    def _build_layers_if_possible(self) -> None:
        try:
            self._build_layers()
        except ConfigurationError:
            raise  # what it returned is wrong, and will be
        except Exception:
            if not self._awaits_setup:
                raise
            # Otherwise configure_model() calls it again, after setup(), and raises what it raises then.

    def __getattr__(self, name: str) -> Any:
        if name == "layers" and "layers" not in self.__dict__.get("_modules", {}):
            return self._build_layers()
        return super().__getattr__(name)

    @override
    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        self._build_layers_if_possible()
        yield from super().named_modules(*args, **kwargs)

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
        self.materialize(index for index in range(len(layers)) if str(index) in prefixes)
        return super().load_state_dict(state_dict, *args, **kwargs)

    @override
    def _apply(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        self._build_layers_if_possible()
        return super()._apply(fn, *args, **kwargs)
