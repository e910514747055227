"""Tensors that layers of a chain keep beside what they return, such as a loss.

With several stages the layer may run on one worker and the user's step look for the value on another. So a
:class:`SideRecorder` looks at attributes, lists and dicts of a layer and of the modules around the chain before and
after each layer; what is new there is sent with the layer's output, and the last stage puts it into the same place. In
training only what autograd follows is sent. Tensors of more than :data:`LARGEST` bytes are not sent, only their places.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

LARGEST = 1 << 16
_MOST_ITEMS = 256  # a longer list or dict holds data
_OF_MODULES = frozenset(vars(nn.Module()))
_Place: TypeAlias = tuple[str, str, Any]
_recorder: SideRecorder | None = None


@dataclass(frozen=True)
class SideValue:
    """A tensor and its place.

    Args:
        path: of the module that has the attribute, in the user's module.
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
            if tensor.grad_fn is None and not _is_evaluated(tensor):
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


def _is_evaluated(tensor: Tensor) -> bool:
    """Whether ``tensor`` was computed where autograd does not follow."""
    return not torch.is_grad_enabled() and tensor.is_floating_point()
