"""What a training step keeps in attributes for the next one: each slot of the batch has its own.

Concept: truncated backpropagation through time keeps ``self.hidden = hidden.detach()`` for the next step. Under DDP
each process has its own. Here each *slot* of the global batch (pipeline d, micro-batch m) has, whoever computes it: an
attribute that a step assigns gets a value for each slot, which travels with the step's records to all workers, and is
in place when a step runs on that slot. Everywhere else (hooks, validation) it is what the last slot assigned.

Contract: when code outside of training steps assigns such an attribute, or changes its tensors in place, its new value
holds for all slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_recycle.session.changes import MISSING, Change, Kind, received, repeat_change

__all__ = ["Slots"]


class Slots:
    """The values of ``module``'s attributes by slot; slots are global indices of micro-batches."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._values: dict[str, dict[int, Any]] = {}
        self._common: dict[str, Any] = {}  # what is seen elsewhere, as it was when the values were taken

    @property
    def names(self) -> frozenset[str]:
        """The attributes that have a value for each slot."""
        return frozenset(self._values)

    def check(self) -> None:
        """Forgets the values of attributes that other code has assigned or changed since; called before a step."""
        for name in list(self._values):
            if _mark(self._get(name)) != self._common[name]:
                del self._values[name], self._common[name]

    @contextmanager
    def in_place(self, slot: int) -> Iterator[None]:
        """Within the block, attributes have the values of ``slot``."""
        before = {name: self._get(name) for name in self._values}
        for name, values in self._values.items():
            self._put(name, values[slot])
        try:
            yield
        finally:
            for name, value in before.items():
                self._put(name, value)

    @contextmanager
    def taking(self, records: Mapping[int, Sequence[Change]]) -> Iterator[None]:
        """Takes what the steps of all slots did to their own values, and then, in the block, to the common ones."""
        for changes in records.values():
            for change in changes:
                if _is_assigned(change) and (name := change.path[0][1]) not in self._values:
                    self._values[name] = dict.fromkeys(records, self._get(name))
        for slot, changes in records.items():
            own = [change for change in changes if change.path[0][1] in self._values]
            if own:
                with self.in_place(slot):
                    for change in own:
                        repeat_change(self._module, deepcopy(change), _device(self._module))
                    for name in {change.path[0][1] for change in own}:
                        self._values[name][slot] = self._get(name)
        yield
        self._common = {name: _mark(self._get(name)) for name in self._values}

    def _space(self, name: str) -> dict[str, Any]:
        buffers: dict[str, Any] = self._module._buffers
        return buffers if name in buffers else vars(self._module)

    def _get(self, name: str) -> Any:
        return self._space(name).get(name, MISSING)

    def _put(self, name: str, value: Any) -> None:
        if value is MISSING:
            self._space(name).pop(name, None)
        else:
            self._space(name)[name] = value

    def state(self) -> dict[str, dict[int, Any]]:
        """For a worker that joins."""
        self.check()
        return {
            name: {slot: value for slot, value in values.items() if value is not MISSING}
            for name, values in self._values.items()
        }

    def load_state(self, state: Mapping[str, Mapping[int, Any]], slots: int) -> None:
        """Restores what :meth:`state` returned, once the attributes are what they were there.

        Args:
            state: the values.
            slots: the number of slots.
        """
        device = _device(self._module)
        self._values = {
            name: {slot: received(deepcopy(values.get(slot, MISSING)), device) for slot in range(slots)}
            for name, values in state.items()
        }
        self._common = {name: _mark(self._get(name)) for name in self._values}


def _is_assigned(change: Change) -> bool:
    """Whether a step gave an attribute of the module a value that has nothing to do with that of other slots."""
    if len(change.path) > 1 or change.kind not in (Kind.ASSIGN, Kind.CREATE):
        return False
    return change.kind is Kind.ASSIGN or not isinstance(change.value, (list, dict, set))  # these are put together


def _mark(value: Any) -> list[Any]:
    """Differs when ``value`` is another object, or its tensors were written to. The objects are held, so that their ids
    stay theirs.
    """
    versions = [
        leaf._version if isinstance(leaf, Tensor) and not leaf.is_inference() else 0 for leaf in tree_leaves(value)
    ]
    return [*map(_Same, tree_leaves(value)), versions]


class _Same:
    """Equal to another if both hold the same object, or equal numbers or texts."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Same):
            return NotImplemented
        mine, theirs = self._value, other._value
        return mine is theirs or (type(mine) is type(theirs) and isinstance(mine, (int, float, str)) and mine == theirs)


def _device(module: nn.Module) -> torch.device:
    return module.device  # type: ignore[return-value]  # every LightningModule has one
