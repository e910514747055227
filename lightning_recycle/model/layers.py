"""Layers: recipes and placeholders for those that do not exist yet, the stages that they are on, shared parameters.

Concept: a pipeline is a list of layers, of which a process builds only those of its own stage. A :class:`LayerSpec`
says how one is built; an :class:`AbsentLayer` keeps its place, its recipe and what was requested of it meanwhile.

Must not know: processes, Lightning.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from itertools import accumulate
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_recycle.arguments import is_integer
from lightning_recycle.errors import ConfigurationError, UnsupportedFeatureError
from lightning_recycle.model.weights import split_name
from lightning_recycle.planning.cuts import even_cuts, held_ranges
from lightning_recycle.planning.planning_options import Partition
from lightning_recycle.randomness import derive_seed
from lightning_recycle.torch_internals import parameters_of


class LayerSpec:
    """A recipe for a layer, so that no worker needs to hold layers that it does not own.

    Args:
        cls: subclass of ``nn.Module`` (or a callable that returns a module).
        *args, **kwargs: arguments of its constructor.

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
            ConfigurationError: if the constructor fails or does not return a module.
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

    def build_without_storage(self, index: int) -> nn.Module:
        """Builds the layer on torch's meta device if possible, for callers that only need shapes."""
        try:
            with torch.device("meta"):
                return self.build(index, seed=0)
        except ConfigurationError:
            return self.build(index, seed=0)  # an error in the recipe itself occurs here too

    def __repr__(self) -> str:
        arguments = [repr(a) for a in self.args] + [f"{k}={v!r}" for k, v in self.kwargs.items()]
        return f"LayerSpec({', '.join([getattr(self.cls, '__name__', repr(self.cls)), *arguments])})"


class AbsentLayer(nn.Module):
    """Stands for a layer that this process has not built: it has no parameters.

    Args:
        spec: its recipe, if there is one.
        name: its name in the module, for messages.

    Attributes:
        elsewhere: whether the layer belongs to another stage and must not be built here.
        dtype: the type requested by a conversion such as ``model.double()`` before the layer exists.
        kept: parameters of the layer, by name in it, to which unbuilt layers of this stage are tied.
        refusal: while code runs that sees the layers of one stage where it may mean all, its error for an attribute.
    """

    refusal: ClassVar[Callable[[str], Exception] | None] = None

    def __init__(self, spec: LayerSpec | None = None, name: str = "this layer") -> None:
        super().__init__()
        self.spec, self.name = spec, name
        self.elsewhere = spec is None
        self.dtype: torch.dtype | None = None
        self.kept: dict[str, nn.Parameter] = {}

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if AbsentLayer.refusal is not None:  # no AttributeError, which hasattr() would take for an answer
                raise AbsentLayer.refusal(f"uses {self.name}.{name}, which is on another stage") from None
            place = "belongs to another stage" if self.elsewhere else "has not been built yet"
            raise AttributeError(
                f"{self.name} has no {name!r} here, as it {place}: configure_optimizers() and hooks run on every worker"
                " and find the parameters of its own stage in self.parameters() and self.named_parameters(), which have"
                " the names of the whole model."
            ) from None

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
        for parameter in self.kept.values():
            parameter.data = fn(parameter.data)
        return self

    @override
    def forward(self, *_: Any) -> Tensor:
        raise UnsupportedFeatureError(
            f"{self!r} stands for a layer of another stage, which this worker does not have. Call the whole model,"
            " self(x), in a hook that all workers run: it is evaluated by all stages together."
        )

    @override
    def extra_repr(self) -> str:
        return repr(self.spec) if self.spec is not None else ""


# ---------------------------------------------------------------------- stages


def even_parts(num_layers: int, num_stages: int) -> tuple[range, ...]:
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
    return held_ranges(even_cuts(num_layers, num_stages))


def stage_layers(num_layers: int, num_stages: int, partition: Partition = "count") -> tuple[range, ...]:
    """The layers of each stage.

    Args:
        num_layers: number of layers of the model.
        num_stages: number of stages, S.
        partition: ``"count"``, numbers of layers that differ by at most one; or the number of layers of each stage,
            such as ``[3, 5, 4]``.

    Raises:
        ConfigurationError: if there are fewer layers than stages, or the partition does not fit the model.
    """
    even = even_parts(num_layers, num_stages)
    if partition == "count":
        return even
    sizes: Any = partition
    if isinstance(sizes, str) or not isinstance(sizes, Sequence) or not all(is_integer(size, 1) for size in sizes):
        raise ConfigurationError(
            f"partition={sizes!r}: use 'count', or the number of layers of each stage, as in [3, 5, 4]."
        )
    if len(sizes) != num_stages:
        raise ConfigurationError(
            f"partition={sizes!r} describes {len(sizes)} stages; pipeline_parallel_size is {num_stages}."
        )
    if sum(sizes) != num_layers:
        raise ConfigurationError(f"partition={sizes!r} distributes {sum(sizes)} layers; the model has {num_layers}.")
    return held_ranges((0, *accumulate(sizes)))


# ---------------------------------------------------------------------- tied parameters


def tie(layers: nn.ModuleList, groups: Iterable[Sequence[str]], built: Container[int] = (), seed: int = 0) -> None:
    """Makes one object of the local members of each group.

    The parameter that stays is that of a layer that was already here; else that of one that has gone; else that of the
    first member's recipe, built temporarily if it is not among ``built``. So the initial values do not depend on which
    layers a process holds.

    Args:
        layers: layers of the whole model.
        groups: groups of names of the same parameter, in the order of the layers.
        built: indices of the layers that have just been built.
        seed: seed of the initialisation.

    Raises:
        ConfigurationError: if a name is not that of a parameter, or the shapes differ.
    """
    absent = {index: layer for index, layer in enumerate(layers) if isinstance(layer, AbsentLayer)}
    borrowed: dict[int, nn.Module] = {}  # layers of other stages, built for their values
    for group in groups:
        members = [(name, *split_name(name)) for name in group]
        here = [member for member in members if member[1] not in absent]
        older = [member for member in here if member[1] not in built]
        gone = [absent[i].kept[inner] for _, i, inner in members if i in absent and inner in absent[i].kept]
        if not here:
            continue
        if older:
            source = _parameter(layers[older[0][1]], *older[0])
        elif gone:
            source = gone[0]
        else:
            first = members[0][1]
            if first in absent and first not in borrowed:
                borrowed[first] = absent[first].build(first, seed)
            source = _parameter(borrowed.get(first, layers[first]), *members[0])
        for name, index, inner in here:
            parameter = _parameter(layers[index], name, index, inner)
            if parameter.shape != source.shape:
                raise ConfigurationError(
                    f"{name} of shape {tuple(parameter.shape)} cannot be tied to {group[0]}: the shape of the tied"
                    f" parameter is {tuple(source.shape)}. Change the layers, or what tied_parameters() returns."
                )
            if parameter is not source:
                _replace(layers[index], parameter, source)
        if all(absent[index].elsewhere for _, index, _ in members if index in absent):  # nothing waits for it any more
            for _, index, inner in members:
                if index in absent:
                    absent[index].kept.pop(inner, None)


def share(layers: nn.ModuleList, groups: Iterable[Sequence[str]], came: Container[int]) -> None:
    """Makes one object of the members of each group that are here: that of a layer that was here before, if there is
    one. All have the same values.

    Args:
        layers: layers of the whole model.
        groups: as for :func:`tie`.
        came: indices of the layers that have just come.
    """
    for group in groups:
        members = [(name, *split_name(name)) for name in group]
        here = [member for member in members if not isinstance(layers[member[1]], AbsentLayer)]
        here.sort(key=lambda member: member[1] in came)
        if len(here) > 1:
            source = _parameter(layers[here[0][1]], *here[0])
            for name, index, inner in here[1:]:
                parameter = _parameter(layers[index], name, index, inner)
                if parameter is not source:
                    _replace(layers[index], parameter, source)


def needed_elsewhere(
    layers: nn.ModuleList, groups: Iterable[Sequence[str]], indices: Container[int]
) -> dict[int, dict[str, nn.Parameter]]:
    """Remains of departing layers outside ``indices``: values for recipes inside that are tied to them.

    Returns:
        The parameters of each layer, by their names in it.
    """
    found: dict[int, dict[str, nn.Parameter]] = {}
    for group in groups:
        members = [(index, inner, layers[index]) for index, inner in map(split_name, group)]
        waiting = any(index in indices and isinstance(layer, AbsentLayer) for index, _, layer in members)
        present = [(index, inner, layer) for index, inner, layer in members if not isinstance(layer, AbsentLayer)]
        if waiting and present and not any(index in indices for index, _, _ in present):
            index, inner, layer = present[0]
            found.setdefault(index, {})[inner] = layer.get_parameter(inner)
    return found


def _replace(layer: nn.Module, parameter: nn.Parameter, other: nn.Parameter) -> None:
    """Replaces ``parameter`` by ``other`` wherever ``layer`` uses it."""
    for module in layer.modules():
        for attribute, found in parameters_of(module).items():
            if found is parameter:
                setattr(module, attribute, other)


def _parameter(layer: nn.Module, name: str, index: int, inner: str) -> nn.Parameter:
    try:
        return layer.get_parameter(inner)
    except AttributeError as error:
        raise ConfigurationError(
            f"tied_parameters() names {name!r}, but layer {index} ({type(layer).__name__}) has no such parameter; it"
            f" has {', '.join(found for found, _ in layer.named_parameters()) or 'none'}."
        ) from error
