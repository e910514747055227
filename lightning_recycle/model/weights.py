"""Tied weights: parameters that several layers use as one, such as an input embedding and the output projection.

Concept: a *group* is the names of one parameter, in the order of the layers. On one device all of them are one object.
On a grid the layers may lie on different stages; then every such stage owns a *copy*, and the copies stay equal because
they start equal, see the same gradient, and step with the same options. So it is with the parameters of a layer that
neighbouring stages share (:mod:`~lightning_recycle.planning.cuts`): each of its names is a group of
its own.

What the runtime must do for each :class:`Tie`:

1. **Gradient.** REDUCE sums it over the workers of all stages that hold a copy, in one sum that gives the same bits to
   all of them, so that copies never drift apart. (On one device, autograd adds the uses in another order: equal up to
   rounding.)
2. **Norm.** Count the summed gradient once, on :attr:`Tie.owner`, the stage of the first copy: the other stages leave
   it out of their squared norm. The same goes for anything else counted over all parameters (number of
   parameters, weight norms, non-finite gradients).
3. **Commit.** A stage that holds a copy cannot STEP before REDUCE has finished on the other holders. A peer's reduced
   gradient that is adopted after a failure must be the one *after* the sum, or be summed again.
4. **Optimizer state.** On one device the optimizer sees the parameter once, at its first position. So a merged state
   holds the state of the owner's copy at the owner's position and skips the others, in ``params`` and ``state`` alike;
   when a state is loaded, every copy gets that of the group. The copies must be in parameter groups with equal options
   (a rule by shape, such as "matrices decay", is safe; a rule by name is not).
5. **State dict.** Nothing: every stage writes its own names, with equal values, as one device does; names of a layer
   that two stages share, the earlier one.
6. **Rejoin, adoption of parameters.** Nothing: a copy is a parameter of its stage like any other.

Must not know: where layers come from, processes.

The weights of a module (:func:`weights_of`) are all of them, whatever its own ``state_dict`` leaves out or renames,
such as a backbone that is not trained: a worker that joins and the launching process must get everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_recycle.errors import ConfigurationError
from lightning_recycle.tensor_memory import part_like


@dataclass(frozen=True, slots=True)
class Tie:
    """One parameter of which several stages own a copy.

    Args:
        names: all its names, as in a state dict, in the order of the layers.
        copies: (stage, first of the names on that stage) for each stage that owns a copy, in order; at least two.
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


def ties_between_stages(groups: Iterable[Sequence[str]], parts: Sequence[range]) -> tuple[Tie, ...]:
    """The ties across stages; within a stage the parameter is one object and needs nothing.

    Args:
        groups: as :meth:`~lightning_recycle.PipelineModule.tied_groups` returns them; a name of a layer that several
            stages share may be alone.
        parts: the layers of each stage.
    """
    found = []
    for group in groups:
        copies: dict[int, str] = {}
        for name in group:
            layer, _ = split_name(name)
            for stage in (stage for stage, part in enumerate(parts) if layer in part):
                copies.setdefault(stage, name)
        if len(copies) > 1:
            found.append(Tie(tuple(group), tuple(sorted(copies.items()))))
    return tuple(found)


def split_name(name: str) -> tuple[int, str]:
    """``"layers.3.norm.weight"`` -> (3, ``"norm.weight"``).

    Raises:
        ConfigurationError: if it is not the name of a layer's parameter.
    """
    head, _, rest = name.partition(".") if isinstance(name, str) else ("", "", "")
    index, _, inner = rest.partition(".")
    if head != "layers" or not index.isdecimal() or not inner:
        raise ConfigurationError(
            f"{name!r} is not the name of a layer's parameter; tied_parameters() must return names as in a state dict,"
            " such as 'layers.0.weight'."
        )
    return int(index), inner


def shared_parameters(layers: Sequence[nn.Module]) -> list[tuple[str, ...]]:
    """The names of parameters that are one object in several of ``layers``, in the order of the layers."""
    named = (
        (f"layers.{index}.{inner}", parameter)
        for index, layer in enumerate(layers)
        for inner, parameter in layer.named_parameters(remove_duplicate=False)
    )
    return [tuple(group) for group in names_by_parameter(named) if len({split_name(name)[0] for name in group}) > 1]


def names_by_parameter(named: Iterable[tuple[str, Tensor]]) -> list[list[str]]:
    """The names of each parameter of which ``named`` has one or several, in its order."""
    names: dict[int, list[str]] = {}
    for name, parameter in named:
        names.setdefault(id(parameter), []).append(name)
    return list(names.values())


def merge_groups(groups: Iterable[Iterable[str]]) -> tuple[tuple[str, ...], ...]:
    """Joins groups that have a name in common, and sorts: names by layer, groups by their first name."""
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


def tensors_beside(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of ``module`` that its state dict does not hold, by name, not copied."""
    known = weights_of(module)
    return {n: t for n, t in [*module.named_parameters(), *module.named_buffers()] if n not in known and not is_lazy(t)}


def set_tensors_beside(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Puts what :func:`tensors_beside` found in a module of the same form into ``module``."""
    for name, tensor in tensors.items():
        owner, _, attribute = name.rpartition(".")
        part = module.get_submodule(owner)
        if isinstance(getattr(part, attribute, None), Tensor):
            getattr(part, attribute).data = tensor.clone()
        else:
            part.register_buffer(attribute, tensor.clone(), persistent=False)


def set_weights(module: nn.Module, weights: Mapping[str, Any]) -> None:
    """Copies what :func:`weights_of` found in a module of the same form into ``module``."""
    nn.Module.load_state_dict(module, own_parts(module, weights))


def own_parts(module: nn.Module, weights: Mapping[str, Any]) -> dict[str, Any]:
    """``weights`` by name; of tensors that are sharded in ``module`` its parts."""
    held = weights_of(module)
    return {name: part_like(value, held[name]) if name in held else value for name, value in weights.items()}
