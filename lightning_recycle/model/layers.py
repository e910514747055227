"""Layers: recipes, placeholders, layers of stages, and weights that layers share.

A process builds only the layers of its own stage. A :class:`LayerSpec` is a layer's recipe; an :class:`AbsentLayer`
keeps its place, its recipe and requests meanwhile. A *group* of tied weights is the names of one parameter, in the
order of the layers. Across stages, every stage owns a *copy*; copies start equal, see the same gradient, and step with
the same options, as do layers that neighbouring stages share. The runtime does this for each :class:`Tie`:

1. **Gradient.** REDUCE sums it over the workers of all stages that hold a copy, with the same bits on all of them. (On
   one device, autograd adds the uses in another order.)
2. **Norm**, and any other count over all parameters: counted once, on :attr:`Tie.owner`.
3. **Commit.** A stage that holds a copy cannot STEP before REDUCE has finished on the other holders.
4. **Optimizer state.** A merged state has the owner's copy at the owner's position and skips the others; a loaded state
   gives every copy the group's. The copies must be in parameter groups with equal options.
5. **State dict.** Every stage writes its own names, with equal values; of a shared layer, the earlier stage.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import prune
from typing_extensions import override

from lightning_recycle.errors import ConfigurationError, UnsupportedFeatureError, counted
from lightning_recycle.planning.layer_cuts import even_cuts, held_ranges
from lightning_recycle.planning.planner import Partition
from lightning_recycle.randomness import derive_seed
from lightning_recycle.tensor_memory import part_like
from lightning_recycle.torch_internals import parameters_of


@dataclass(frozen=True, slots=True)
class Tie:
    """One parameter of which several stages own a copy.

    ``names``: as in a state dict, in the order of the layers; ``copies``: (stage, first of the names on that stage).
    """

    names: tuple[str, ...]
    copies: tuple[tuple[int, str], ...]

    @property
    def owner(self) -> int:
        """The stage that counts the parameter: the first that holds it."""
        return self.copies[0][0]

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages that hold a copy, in order."""
        return tuple(stage for stage, _ in self.copies)


def ties_between_stages(groups: Iterable[Sequence[str]], ranges: Sequence[range]) -> tuple[Tie, ...]:
    """The ties across stages; within a stage the parameter is one object.

    A name of a layer that several stages share may be alone in its group.
    """
    ties = []
    for group in groups:
        copies: dict[int, str] = {}
        for name in group:
            layer, _ = split_name(name)
            for stage in (stage for stage, layers in enumerate(ranges) if layer in layers):
                copies.setdefault(stage, name)
        if len(copies) > 1:
            ties.append(Tie(tuple(group), tuple(sorted(copies.items()))))
    return tuple(ties)


def split_name(name: str) -> tuple[int, str]:
    """``"layers.3.norm.weight"`` -> (3, ``"norm.weight"``); else ConfigurationError."""
    head, _, rest = name.partition(".") if isinstance(name, str) else ("", "", "")
    index, _, inner = rest.partition(".")
    if head != "layers" or not index.isdecimal() or not inner:
        raise ConfigurationError(
            f"{name!r} is not the name of a layer's parameter; tied_parameters() must return names as in a state dict,"
            " such as 'layers.0.weight'."
        )
    return int(index), inner


def shared_parameters(layers: Sequence[nn.Module]) -> list[tuple[str, ...]]:
    """The names of parameters that are one object in several of ``layers``."""
    named = (
        (f"layers.{index}.{inner}", parameter)
        for index, layer in enumerate(layers)
        for inner, parameter in layer.named_parameters(remove_duplicate=False)
    )
    return [tuple(group) for group in names_by_parameter(named) if len({split_name(name)[0] for name in group}) > 1]


def names_by_parameter(named: Iterable[tuple[str, Tensor]]) -> list[list[str]]:
    """The names of each parameter in ``named``, one or several, in its order."""
    names: dict[int, list[str]] = {}
    for name, parameter in named:
        names.setdefault(id(parameter), []).append(name)
    return list(names.values())


def merge_groups(groups: Iterable[Iterable[str]]) -> tuple[tuple[str, ...], ...]:
    """Joins groups with a common name, and sorts names by layer."""
    order: dict[str, int] = {}
    group_of: dict[str, set[str]] = {}
    for group in groups:
        joined: set[str] = set()
        for name in group:
            order.setdefault(name, len(order))
            joined |= group_of.get(name, {name})
        for name in joined:
            group_of[name] = joined

    def place(name: str) -> tuple[int, int]:
        return split_name(name)[0], order[name]

    distinct: Mapping[int, set[str]] = {id(group): group for group in group_of.values()}
    merged = [tuple(sorted(group, key=place)) for group in distinct.values()]
    return tuple(sorted(merged, key=lambda group: place(group[0])))


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and persistent buffers of ``module`` by name, not copied."""
    state: dict[str, Tensor] = nn.Module.state_dict(module)
    return state


def non_state_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers outside the state dict, not copied."""
    state, tensors = weights_of(module), [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor for name, tensor in tensors if name not in state and not is_lazy(tensor)}


def set_non_state_tensors(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Puts the tensors of :func:`non_state_tensors` into a module of the same form."""
    for name, tensor in tensors.items():
        owner, _, attribute = name.rpartition(".")
        holder = module.get_submodule(owner)
        if isinstance(getattr(holder, attribute, None), Tensor):
            getattr(holder, attribute).data = tensor.clone()
        else:
            holder.register_buffer(attribute, tensor.clone(), persistent=False)


def set_weights(module: nn.Module, weights: Mapping[str, Any], with_dtypes: bool = False) -> None:
    """Copies the weights of :func:`weights_of` into a module of the same form.

    ``with_dtypes``: whether the module's tensors get the weights' dtypes, too.
    """
    for name, tensor in [*module.named_parameters(), *module.named_buffers()] if with_dtypes else ():
        if name in weights:
            tensor.data = tensor.data.to(weights[name].dtype)
    nn.Module.load_state_dict(module, own_parts(module, weights))


def own_parts(module: nn.Module, weights: Mapping[str, Any]) -> dict[str, Any]:
    """``weights`` by name; of tensors that are sharded in ``module`` its parts."""
    own = weights_of(module)
    return {name: part_like(value, own[name]) if name in own else value for name, value in weights.items()}


class LayerSpec:
    """A recipe for a layer, built only by the workers that own it.

    Args:
        cls: subclass of ``nn.Module`` (or a callable that returns a module).
        *args, **kwargs: arguments of its constructor.

    The layer is built with torch's generator seeded from (seed, layer index): the same weights on every grid.
    """

    def __init__(self, cls: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> None:
        if not callable(cls) or isinstance(cls, nn.Module):
            raise ConfigurationError(
                f"LayerSpec expects a class or a callable that builds a layer, got {cls!r}."
                " Write LayerSpec(nn.Linear, 8, 8): the class itself, then its arguments."
            )
        self.cls, self.args, self.kwargs = cls, args, kwargs

    def build(self, index: int, seed: int) -> nn.Module:
        """Builds the layer; ConfigurationError if that fails, or it is not a module."""
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
            raise ConfigurationError(
                f"Layer {index}, {self!r}, built an object of type {type(layer).__name__}, not an nn.Module."
            )
        return layer

    def build_without_storage(self, index: int) -> nn.Module:
        """Builds the layer on torch's meta device if possible."""
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

    Attributes:
        elsewhere: whether the layer belongs to another stage and must not be built here.
        dtype: the type requested by a conversion such as ``model.double()`` before the layer exists.
        refusal: if set, makes the error raised for an attribute of an absent layer. Set while code runs that may take
            one stage's layers for all.
    """

    refusal: ClassVar[Callable[[str], Exception] | None] = None

    def __init__(self, spec: LayerSpec | None = None, name: str = "this layer") -> None:
        super().__init__()
        self.spec, self.name = spec, name
        self.elsewhere = spec is None
        self.dtype: torch.dtype | None = None

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
        raise UnsupportedFeatureError(
            f"{self!r} stands for a layer of another stage, which this worker does not have. Call the whole model,"
            " self(x), in a hook that all workers run: it is evaluated by all stages together."
        )

    @override
    def extra_repr(self) -> str:
        return repr(self.spec) if self.spec is not None else ""


def has_recipes(module: nn.Module) -> bool:
    """Whether some layers of this stage are not built yet."""
    return any(isinstance(layer, AbsentLayer) and not layer.elsewhere for layer in module.modules())


def take_pruned_form(module: nn.Module, names: Collection[str]) -> None:
    """Masks the parameters that are masked in a state dict with ``names``, only them."""
    for path, submodule in module.named_modules():
        prefix = f"{path}." if path else ""
        for name in [name for name, value in parameters_of(submodule).items() if value is not None]:
            plain = name.removesuffix("_orig")
            if name == plain and f"{prefix}{name}_orig" in names and f"{prefix}{name}_mask" in names:
                prune.identity(submodule, name)
            elif name != plain and hasattr(submodule, plain + "_mask") and f"{prefix}{plain}" in names:
                prune.remove(submodule, plain)


# ---------------------------------------------------------------------- stages


def even_parts(num_layers: int, num_stages: int) -> tuple[range, ...]:
    """Contiguous parts of ``num_layers`` whose sizes differ by at most one.

    Later stages get the larger parts: the first holds more micro-batches in flight. Raises ConfigurationError for fewer
    layers than stages.
    """
    if num_layers < num_stages:
        raise ConfigurationError(
            f"The model has {counted(num_layers, 'layer')}, fewer than pipeline_parallel_size={num_stages} stages."
            f" Use pipeline_parallel_size={num_layers}{' or less' if num_layers > 1 else ''}, or split the model into"
            " more layers in configure_pipeline()."
        )
    return held_ranges(even_cuts(num_layers, num_stages))


def layer_ranges(num_layers: int, num_stages: int, partition: Partition = "count") -> tuple[range, ...]:
    """The layers of each stage; ``partition``: "count" for even parts, or their sizes.

    Raises ConfigurationError for fewer layers than stages, or a partition that does not fit the model.
    """
    even = even_parts(num_layers, num_stages)
    if partition == "count":
        return even
    if len(partition) != num_stages:
        raise ConfigurationError(
            f"PlanningOptions(partition={partition!r}) describes {counted(len(partition), 'stage')};"
            f" pipeline_parallel_size is {num_stages}: give a number for each stage."
        )
    if (layers := sum(partition)) != num_layers:
        raise ConfigurationError(
            f"PlanningOptions(partition={partition!r}) distributes {counted(layers, 'layer')}; the model has"
            f" {num_layers}: give numbers with that sum."
        )
    return held_ranges((0, *accumulate(partition)))


# ---------------------------------------------------------------------- tied parameters


def tie(layers: nn.ModuleList, groups: Iterable[Sequence[str]], built: Container[int] = (), seed: int = 0) -> None:
    """Makes one object of the members of each group that are here.

    The parameter that stays is that of a layer that was here before; if there is none, of the group's first layer,
    which is built temporarily if it is not among the just ``built`` layers. So initial values do not depend on which
    layers a process has.
    Raises ConfigurationError for a name without parameter, or different shapes.
    """
    absent = {index: layer for index, layer in enumerate(layers) if isinstance(layer, AbsentLayer)}
    borrowed: dict[int, nn.Module] = {}  # layers of other stages, built for their values
    for group in groups:
        members = [(name, *split_name(name)) for name in group]
        local = [member for member in members if member[1] not in absent]
        older = [member for member in local if member[1] not in built]
        if not local:
            continue
        if older:
            source = _parameter(layers[older[0][1]], *older[0])
        else:
            first = members[0][1]
            if first in absent and first not in borrowed:
                borrowed[first] = absent[first].build(first, seed)
            source = _parameter(borrowed.get(first, layers[first]), *members[0])
        for name, index, inner in local:
            parameter = _parameter(layers[index], name, index, inner)
            if parameter.shape != source.shape:
                raise ConfigurationError(
                    f"{name} of shape {tuple(parameter.shape)} cannot be tied to {group[0]}: the shape of the tied"
                    f" parameter is {tuple(source.shape)}. Change the layers, or what tied_parameters() returns."
                )
            if parameter is not source:
                _replace(layers[index], parameter, source)


def share(module: nn.Module, groups: Iterable[Sequence[str]], arrived_names: Sequence[str]) -> None:
    """Makes one object of the parameters in each group that ``module`` has.

    The parameter that stays is one that was here before, if any: its name does not begin with one of ``arrived_names``.
    All have the same values.
    """
    parameters = {name: p for name, p in module.named_parameters(remove_duplicate=False) if not p.is_meta}
    for group in groups:
        local = [name for name in group if name in parameters]
        local.sort(key=lambda name: name.startswith(tuple(arrived_names)))
        for name in local[1:]:
            if parameters[name] is not parameters[local[0]]:
                _replace(module, parameters[name], parameters[local[0]])


def layers_tied_to(indices: Collection[int], groups: Iterable[Sequence[str]]) -> set[int]:
    """``indices``, and the layers that share a parameter with one of them."""
    tied = ({split_name(name)[0] for name in group} for group in groups)
    return set(indices).union(*(layers for layers in tied if not layers.isdisjoint(indices)))


def _replace(layer: nn.Module, parameter: nn.Parameter, other: nn.Parameter) -> None:
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
