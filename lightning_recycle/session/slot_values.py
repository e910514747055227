"""Values of a module by slot, for places in which the micro-batches of a step leave different values.

A place is a parameter or buffer anywhere in the module, or an attribute of the module itself. A slot is the global
index of a micro-batch (pipeline d, micro-batch m).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, TypeAlias

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from lightning_recycle.session.tensor_codec import on_device

__all__ = [
    "MISSING",
    "AttributePlace",
    "Missing",
    "Place",
    "Same",
    "SlotValues",
    "TensorPlace",
    "Value",
    "mark_of",
    "untrained_marks",
    "untrained_places",
    "values_of",
]

_KEEPING_OWN = ("torch.ao.", "torchmetrics.")  # packages whose modules have statistics or states as buffers
_TYPES = (Tensor, nn.Parameter, nn.Buffer)

Value: TypeAlias = Tensor | None


@dataclass(frozen=True)
class TensorPlace:
    """A parameter or buffer of a module."""

    module: nn.Module
    name: str

    def get(self) -> Value:
        """The parameter's data, or the buffer itself."""
        parameter = self.module._parameters.get(self.name)
        return self.module._buffers.get(self.name) if parameter is None else parameter.data

    def put(self, value: Value) -> None:
        parameter = self.module._parameters.get(self.name)
        if parameter is None:
            self.module._buffers[self.name] = value
        elif value is not None:
            parameter.data = value

    @property
    def is_parameter(self) -> bool:
        return self.name in self.module._parameters

    def mark(self) -> tuple[int, int]:
        """Differs when it was assigned, or written by a way that autograd counts."""
        tensor = self.module._parameters.get(self.name, self.module._buffers.get(self.name))
        if tensor is None or tensor.is_inference():
            return (0, 0)
        return tensor.data_ptr(), tensor._version


class Place(Protocol):
    """A place in the module that has a value."""

    def get(self) -> Any: ...

    def put(self, value: Any) -> None: ...

    def mark(self) -> Any:
        """Differs when other code has assigned or written the value."""


class SlotValues:
    """Values of places by slot, for those in which the micro-batches of a step leave different values.

    Other code sees the value of the last slot. When it assigns or writes a place, its value holds for all slots.

    Args:
        find: returns the place of a name, if there is any.
        copy: copies a value.
    """

    def __init__(self, find: Callable[[str], Place | None], copy: Callable[[Any], Any]) -> None:
        self._find, self._copy = find, copy
        self._values: dict[str, dict[int, tuple[bool, Any]]] = {}  # (whether this worker has it, the value)
        self._marks: dict[str, Any] = {}

    @property
    def names(self) -> frozenset[str]:
        """The places that have a value for each slot."""
        return frozenset(self._values)

    def check(self) -> None:
        """Forgets the values of places that other code has changed; called before a step."""
        for name in list(self._values):
            place = self._find(name)
            if place is None or place.mark() != self._marks[name]:
                del self._values[name], self._marks[name]

    def get(self, name: str, slot: int) -> tuple[bool, Any]:
        """Whether this worker has the value of ``slot``, and the value, not copied."""
        return self._values[name].get(slot, (False, None))

    def take(self, name: str, place: Place, found: Mapping[int, tuple[bool, Any]], slots: Iterable[int]) -> None:
        """Takes new values of a place; slots without any keep theirs, at first the value of the step's beginning."""
        if name not in self._values:
            self._values[name] = dict.fromkeys(slots, (True, place.get()))
        self._values[name].update(found)
        here = [slot for slot, (is_here, _) in found.items() if is_here]
        if here:
            place.put(self._copy(found[max(here)][1]))
        self._marks[name] = place.mark()

    def state(self) -> dict[str, dict[int, tuple[bool, Any]]]:
        """The values, for a worker that joins; it has the module, with the value that other code sees, already."""
        self.check()
        return {name: dict(values) for name, values in self._values.items()}

    def load_state(self, state: Mapping[str, Mapping[int, tuple[bool, Any]]], device: torch.device) -> None:
        """Restores the values that :meth:`state` returned."""
        self._values, self._marks = {}, {}
        for name, values in state.items():
            if (place := self._find(name)) is not None:
                self._values[name] = {slot: (is_here, on_device(v, device)) for slot, (is_here, v) in values.items()}
                self._marks[name] = place.mark()


def untrained_marks(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Marks of all :func:`untrained_places`, by name."""
    return {name: place.mark() for name, place in untrained_places(module)}


def untrained_places(module: nn.Module) -> Iterator[tuple[str, TensorPlace]]:
    """The parameters that are not trained and the buffers, by name, each once."""
    seen: set[int] = set()
    for prefix, part in module.named_modules():
        keeps_own = isinstance(part, _NormBase) or type(part).__module__.startswith(_KEEPING_OWN)
        parameters = [(name, p) for name, p in part._parameters.items() if p is not None and not p.requires_grad]
        for name, tensor in (*parameters, *(() if keeps_own else part._buffers.items())):
            if id(tensor) in seen or is_lazy(tensor) or (tensor is not None and type(tensor) not in _TYPES):
                continue  # not in this stage, or of a library that looks after it
            if tensor is not None:
                seen.add(id(tensor))
            yield f"{prefix}.{name}" if prefix else name, TensorPlace(part, name)


class Missing(Enum):
    """The value of an attribute that does not exist; the same object in all processes."""

    MISSING = "missing"


MISSING = Missing.MISSING


class AttributePlace:
    """An attribute or buffer of the module itself, as a place of values by slot."""

    def __init__(self, module: pl.LightningModule, name: str) -> None:
        self._module, self._name = module, name

    def get(self) -> Any:
        return _space(self._module, self._name).get(self._name, MISSING)

    def put(self, value: Any) -> None:
        """Sets it past the module's own ``__setattr__``."""
        space = _space(self._module, self._name)
        if value is MISSING:
            space.pop(self._name, None)
        else:
            space[self._name] = value

    def mark(self) -> list[Any]:
        return mark_of(self.get())


def values_of(module: pl.LightningModule) -> dict[str, Any]:
    """The attributes and buffers of the module itself."""
    return {**vars(module), **module._buffers}


def _space(module: pl.LightningModule, name: str) -> dict[str, Any]:
    buffers: dict[str, Any] = module._buffers
    return buffers if name in buffers else vars(module)


def mark_of(value: Any) -> list[Any]:
    """Differs when ``value`` holds other objects or its tensors were written to; holds them, so their ids stay."""
    leaves = tree_leaves(value)
    versions = [leaf._version if isinstance(leaf, Tensor) and not leaf.is_inference() else 0 for leaf in leaves]
    return [*map(Same, leaves), versions]


class Same:
    """Equal to another if both hold the same object, or equal numbers or texts."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Same):
            return NotImplemented
        mine, theirs = self._value, other._value
        return mine is theirs or (type(mine) is type(theirs) and isinstance(mine, (int, float, str)) and mine == theirs)
