"""Chains of layers in an ordinary LightningModule, and tensors they keep beside.

A *chain* is a list of submodules that the module's steps call once each, in order, each with the previous one's result.
It is found by structure alone, or named by the user; :mod:`~lightning_recycle.model.call_trace` checks it while the
steps run.

*Side values* are tensors, such as a loss, that a layer or its hook puts into attributes, lists or dicts of the layer
and the modules around the chain. A :class:`SideRecorder` looks there before and after each layer; new ones are sent
with the layer's output, and the last stage puts them into the same place; in training only those that autograd follows.
Tensors of more than :data:`LARGEST` bytes are not sent, only their places.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_recycle.errors import ConfigurationError, counted

LayerPaths: TypeAlias = str | Sequence[str] | None
"""Paths of the chain's layers; None for a chain that is to be found.

That of an ``nn.Sequential`` or ``nn.ModuleList`` stands for its entries.
"""

_CLEARLY = 2  # the container that holds this many times what all others hold is the chain
_REMEDY = (
    "Name the layers that training_step() calls one after another, as in ReCycleStrategy(layers='model.layers') or"
    " layers=['encoder', 'decoder'] (an nn.Sequential or nn.ModuleList stands for its entries), or use"
    " pipeline_parallel_size=1"
)


@dataclass(frozen=True)
class Chain:
    """The layers of a module, in order, by path.

    ``whole``: for each layer but the first, whether it gets the previous one's whole result, as in an
    ``nn.Sequential``; otherwise the first item of a tuple.
    """

    paths: tuple[str, ...]
    whole: tuple[bool, ...]

    def holds(self, name: str) -> int | None:
        """The index of the layer to which the weight or submodule ``name`` belongs."""
        return next((i for i, path in enumerate(self.paths) if name == path or name.startswith(f"{path}.")), None)


def find_chain(module: nn.Module, num_stages: int, layers: LayerPaths = None) -> Chain:
    """The chain that the user names, or the only one that ``module`` can have.

    Raises ConfigurationError if there is none with at least ``num_stages`` layers, or if several may be meant.
    """
    kind = type(module).__name__
    layers = _largest_container(module, num_stages) if layers is None else layers
    paths = [path for name in ([layers] if isinstance(layers, str) else layers) for path in _entries(module, name)]
    if len(paths) < num_stages:
        raise ConfigurationError(
            f"layers={layers!r} names {counted(len(paths), 'layer')} of {kind}, fewer than"
            f" pipeline_parallel_size={num_stages} stages: {', '.join(paths) or 'none'}. {_REMEDY}."
        )
    modules = [module.get_submodule(path) for path in paths]
    for index, layer in enumerate(modules):
        for other in range(index):
            if layer is modules[other]:
                raise ConfigurationError(
                    f"{paths[other]} and {paths[index]} of {kind} are the same module; a chain calls each once, so that"
                    f" it can be on one stage. {_REMEDY}."
                )
            inner, outer = sorted((paths[index], paths[other]), key=len, reverse=True)
            if inner.startswith(f"{outer}."):
                raise ConfigurationError(
                    f"layers={layers!r} names {outer!r} of {kind}, and {inner!r} within it: name one of them."
                )
    return Chain(tuple(paths), tuple(_is_whole(module, one, next_) for one, next_ in pairwise(paths)))


def _entries(module: nn.Module, path: str) -> list[str]:
    kind = type(module).__name__
    try:
        named = module.get_submodule(path)
    except AttributeError as error:
        known = [name for name, _ in module.named_modules() if name.count(".") <= path.count(".") and name]
        raise ConfigurationError(
            f"layers={path!r}: {kind} has no submodule of that name ({error}). It has"
            f" {', '.join(known[:12])}{', ...' if len(known) > 12 else ''}. Modules that are made in setup() or"
            " configure_model() do not exist yet when the model is cut: make them in __init__()."
        ) from None
    if not path or isinstance(named, nn.ModuleDict):
        raise ConfigurationError(
            f"layers={path!r} is {'the whole module' if not path else 'an nn.ModuleDict'}; name the layers in it, in"
            " the order in which training_step() calls them."
        )
    if not isinstance(named, (nn.Sequential, nn.ModuleList)):
        return [path]
    return [f"{path}.{name}" for name, _ in named.named_children()]


def _is_whole(module: nn.Module, one: str, other: str) -> bool:
    parents = {path.rpartition(".")[0] for path in (one, other)}
    return len(parents) == 1 and isinstance(module.get_submodule(parents.pop()), nn.Sequential)


# ---------------------------------------------------------------------- a chain without names


def _largest_container(module: nn.Module, num_stages: int) -> list[str]:
    """The container with most parameters, as a list of one path.

    Raises ConfigurationError if there is none, or no clear one.
    """
    kind = type(module).__name__
    sizes = {path: size for path, size in _containers(module, "", num_stages) if size}
    if not sizes:
        raise ConfigurationError(
            f"{kind} cannot be cut into pipeline_parallel_size={num_stages} stages: it has no nn.Sequential or"
            f" nn.ModuleList of at least {num_stages} layers (those without parameters count, too). {_REMEDY}. A"
            " PipelineModule can be cut anywhere."
        )
    largest = max(sizes, key=lambda path: sizes[path])
    others = [path for path in sizes if path != largest]
    if sizes[largest] < _CLEARLY * sum(sizes[path] for path in others):
        described = ", ".join(f"{path!r} ({size:,} parameters)" for path, size in sizes.items())
        raise ConfigurationError(
            f"{kind} can be cut into pipeline_parallel_size={num_stages} stages in several places: {described}."
            f" {_REMEDY}."
        )
    return [largest]


def _containers(module: nn.Module, path: str, num_stages: int) -> Iterator[tuple[str, int]]:
    for name, child in module.named_children():
        inner = f"{path}.{name}" if path else name
        if isinstance(child, (nn.Sequential, nn.ModuleList)) and len(list(child.children())) >= num_stages:
            yield inner, sum(1 if is_lazy(p) else p.numel() for p in child.parameters())
        else:
            yield from _containers(child, inner, num_stages)


LARGEST = 1 << 16
_MOST_ITEMS = 256  # a longer list or dict holds data
_OF_MODULES = frozenset(vars(nn.Module()))
_Place: TypeAlias = tuple[str, str, Any]
_recorder: SideRecorder | None = None


@dataclass(frozen=True)
class SideValue:
    """A tensor and its place.

    Args:
        path: of the module with the attribute, in the user's module.
        name: of the attribute.
        key: of the item, where the attribute is a list or dict; None for the attribute itself.
        is_appended: whether the item is new in a list.
        fresh: the class of the list or dict, if the layer has made it.
        value: None if it is too large to be sent.
    """

    path: str
    name: str
    key: Any
    is_appended: bool
    fresh: type[Any] | None
    value: Tensor | None

    def __str__(self) -> str:
        attribute = f"{self.path}.{self.name}" if self.path else self.name
        return attribute if self.key is None else f"{attribute}[{self.key!r}]"


class SideRecorder:
    """Side values ``found`` by layer, for one micro-batch on a stage."""

    def __init__(self, around: Mapping[str, nn.Module]) -> None:
        self.found: dict[int, list[SideValue]] = {}
        self._around = around
        self._before: dict[_Place, Tensor] = {}
        self._containers: dict[int, tuple[Any, int]] = {}  # by id, with their lengths
        self._appended: list[tuple[Any, Tensor]] = []

    @contextmanager
    def on(self) -> Iterator[None]:
        """Within the block layers report to this recorder; lists are restored after it."""
        global _recorder
        previous, _recorder = _recorder, self
        try:
            yield
        finally:
            _recorder = previous
            for items, tensor in self._appended:
                kept = [item for item in items if item is not tensor]
                items.clear()
                items.extend(kept)

    def begin(self, layer: nn.Module, path: str) -> None:
        self._before, self._containers = {}, {}
        for place, container, tensor in self._tensors(layer, path):
            if tensor is not None:
                self._before[place] = tensor
            if container is not None:
                self._containers[id(container)] = container, len(container)

    def end(self, layer: nn.Module, path: str, index: int) -> None:
        seen = set()
        for place, container, tensor in self._tensors(layer, path):
            if tensor is None or self._before.get(place) is tensor or (id(container), place[2]) in seen:
                continue
            # Where autograd does not follow, it cannot be told from others.
            if tensor.grad_fn is None and (torch.is_grad_enabled() or not tensor.is_floating_point()):
                continue
            if container is not None:  # which several modules may share
                seen.add((id(container), place[2]))
            _, length = self._containers.get(id(container), (None, 0))
            is_appended = isinstance(container, (list, deque)) and place[2] >= length
            fresh = type(container) if container is not None and id(container) not in self._containers else None
            if is_appended:
                self._appended.append((container, tensor))
            fits = tensor.numel() * tensor.element_size() <= LARGEST
            self.found.setdefault(index, []).append(SideValue(*place, is_appended, fresh, tensor if fits else None))
        self._before, self._containers = {}, {}

    def _tensors(self, layer: nn.Module, path: str) -> Iterator[tuple[_Place, Any, Tensor | None]]:
        """(place, list or dict there, tensor); None for an empty list or dict."""
        for where, module in chain(self._around.items(), layer.named_modules(prefix=path)):
            attributes = vars(module)
            for name in [name for name in attributes if name not in _OF_MODULES]:
                value = attributes[name]
                if isinstance(value, Tensor):
                    yield (where, name, None), None, value
                elif isinstance(value, (list, deque, dict)) and len(value) <= _MOST_ITEMS:
                    if not value:
                        yield (where, name, None), value, None
                    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                        if isinstance(item, Tensor):
                            yield (where, name, key), value, item


def active_recorder() -> SideRecorder | None:
    """The recorder to which layers report."""
    return _recorder
