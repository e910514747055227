"""Side effects of steps and output hooks on the module's attributes, and which of them reach all workers.

Concept: a step, or a hook that sees an output, runs where its micro-batch was computed. Under DDP its changes of
attributes stay in that process, and so they do here, with three exceptions that travel with the record of the
micro-batch and are repeated on every worker in the order of the micro-batches:

- items *appended* to a list or deque that is an attribute, or a value of a dict that is an attribute: Lightning's idiom
  ``self.outputs.append(...)``, ``torch.cat(self.outputs)``, ``self.outputs.clear()`` sees all outputs on every worker;
- tensors that a training step *assigns*, such as ``self.hidden = hidden.detach()`` for the next step: each *slot* of
  the global batch (pipeline d, micro-batch m) has its own, in place whenever a step runs on that slot;
- tensors of the module that a training step writes, see :mod:`~lightning_recycle.session.slot_values`.

These are taken back after each micro-batch, so a step that runs again begins as it did, and none counts twice.

Contract: nothing is written into an object that an attribute holds, except lists, deques and dicts of these exact
types. When code outside of training steps assigns an attribute that has slots, or changes its tensors, its value holds
for all.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, TypeAlias

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_recycle.model.recording import RecordedModule
from lightning_recycle.runtime.checks.checksums import checksum
from lightning_recycle.session.object_attributes import INTERNAL_ATTRIBUTES
from lightning_recycle.session.slot_values import (
    MISSING,
    ModuleSlot,
    Same,
    SlotValues,
    Write,
    WrittenState,
    WrittenTensors,
    mark_of,
)
from lightning_recycle.tensor_memory import memory_address, on_device, pack_tensors, to_cpu, unpack_tensors
from lightning_recycle.torch_internals import buffers_of, tree_leaves, tree_map_only

__all__ = ["Append", "Assignment", "Effect", "HookSideEffects", "SideEffectState"]


_DICTS = (dict, defaultdict)
_CONTAINERS = (list, tuple, set, dict, deque, defaultdict, Counter)
_SHARED_BYTES = 1024 * 1024  # of an attribute that is copied to the other stages
_SHARED_ITEMS = 10_000
_MARKED_ITEMS = 64
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Append:
    """New items of a list: ``path`` is the attribute, and the key if that is a dict; ``items`` are packed."""

    path: tuple[Any, ...]
    kind: type[Any]
    items: bytes


@dataclass(frozen=True)
class Assignment:
    """A new value of an attribute for the next step of the slot; ``value`` is packed."""

    name: str
    value: bytes


Effect: TypeAlias = Append | Assignment | Write

SideEffectState: TypeAlias = tuple[list[str], list[str], dict[str, dict[int, Any]], WrittenState | None]
"""Names of attributes with lists that steps extended, and of those whose tensors they changed; values by slot; the
state of written tensors.
"""


class HookSideEffects:
    """The side effects on ``module``.

    Args:
        module: the user's module.
        alone: whether a step has one micro-batch in all; then there is nothing to put together.
        microbatches: the number of micro-batches of a step, if training steps may keep something for the next one.
        whole: whether this worker has the whole module, not one stage of it.

    Attributes:
        names: the attributes whose lists steps have extended.
        keeps_shares: whether steps have changed a number or tensor that stays on the worker.
        changed: with several stages, the attributes whose tensors steps have changed; others are the work of hooks,
            which run on all stages.
        slots: the values of attributes by slot; None if there are none.
        written: tensors that training steps write; None if they may not.
        slot: the micro-batch whose training step is about to run; None for other code.
    """

    def __init__(
        self, module: pl.LightningModule, alone: bool = False, microbatches: int | None = None, whole: bool = True
    ) -> None:
        self._module, self._alone = module, alone
        self.slots = SlotValues(self._attribute, deepcopy) if microbatches else None
        # By hand, each micro-batch has tensors of its own already.
        writes = microbatches and whole and not alone and module.automatic_optimization
        self.written = WrittenTensors(module) if writes else None
        self.slot: int | None = None
        self.names: set[str] = set()
        self.keeps_shares = False
        self.changed: set[str] = set()
        self._whole = whole
        self._internal = {*INTERNAL_ATTRIBUTES, *dir(RecordedModule)}
        self._told: set[str] = set()
        self._plain: dict[str, Any] | None = None  # numbers and texts when the step began
        self._runs_again = False

    # ------------------------------------------------------------------ on the worker that has the output

    def begin_step(self) -> None:
        """A batch of training or evaluation begins; what hooks have set until now stays if it runs again."""
        self._plain, self._runs_again = None, False

    def check_slots(self) -> None:
        """Forgets the values by slot of attributes that other code has changed; called before a step."""
        if self.slots is not None:
            self.slots.check()

    @contextmanager
    def noticed(self) -> Iterator[list[Effect]]:
        """Runs a block; lists what of its effects must reach all workers, and takes that back."""
        slot, self.slot = self.slot, None
        effects: list[Effect] = []
        if self._alone:
            yield effects
            return
        if self._runs_again and self._plain is not None:
            vars(self._module).update(self._plain)
        if self._runs_again or self._plain is None:
            self._plain = self._numbers()
        self._runs_again = False
        before = None if self.keeps_shares else self._marks()
        tensors = self._tensor_marks()
        if slot is None or self.slots is None:
            with self._appending(effects, False):
                yield effects
        else:
            with self._slot_in_place(slot), self._assigning(effects), self._appending(effects, True):
                if self.written is None:
                    yield effects
                else:
                    with self.written.in_place(slot, effects):
                        yield effects
        self.keeps_shares = self.keeps_shares or self._marks() != before
        self.changed.update(name for name, mark in self._tensor_marks().items() if mark != tensors.get(name))

    @contextmanager
    def _slot_in_place(self, slot: int) -> Iterator[None]:
        """Within the block, attributes have copies of the values of ``slot``."""
        assert self.slots is not None
        before = {name: self._attribute(name).get() for name in self.slots.names}
        for name in before:
            self._attribute(name).put(deepcopy(self.slots.get(name, slot)[1]))
        try:
            yield
        finally:
            for name, value in before.items():
                self._attribute(name).put(value)

    def _attribute(self, name: str) -> ModuleSlot:
        return ModuleSlot(self._module, name)

    def _attributes(self) -> dict[str, Any]:
        values = {**vars(self._module), **buffers_of(self._module)}
        return {name: value for name, value in values.items() if name not in self._internal}

    def _marks(self) -> dict[str, Any]:
        """Differ when a number or tensor was changed, also one in a short dict."""
        found = {}
        for name, value in self._attributes().items():
            if isinstance(value, (int, float, Tensor)):
                found[name] = mark_of(value)
            elif type(value) in _CONTAINERS and isinstance(value, dict) and len(value) <= _MARKED_ITEMS:
                found[name] = [Same(item) for item in value.values() if isinstance(item, (int, float))]
        return found

    def _tensor_marks(self) -> dict[str, Any]:
        """Of each attribute with tensors that no step is known to change; differ when a step changes them."""
        found = {}
        for name, value in {} if self._whole else self._attributes().items():
            if name in self.changed or name in self.names or self._has_slots(name) or not _has_tensors(value):
                continue
            tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
            if sum(tensor.nbytes for tensor in tensors) <= _SHARED_BYTES:  # larger ones are not shared
                written = [tensor for tensor in tensors if tensor.is_inference()]  # these have no version
                found[name] = mark_of(tensors), checksum(written) if written else b""
        return found

    @contextmanager
    def _appending(self, effects: list[Effect], keeps: bool) -> Iterator[None]:
        """Finds appended items; ``keeps``: whether a new list of tensors may be meant for the next step of the slot."""
        attributes = self._attributes()
        paths: set[tuple[Any, ...]] = {(name,) for name in attributes}
        paths |= {(name, key) for name, value in attributes.items() if type(value) in _DICTS for key in value}
        before = {path: (value, len(value), [*value][:: max(1, len(value) - 1)]) for path, value in _lists(attributes)}
        try:
            yield
        except BaseException:
            for value, length, _ in before.values():
                _shorten(value, length)
            raise
        seen: set[int] = set()
        after = self._attributes()
        for path, now in list(_lists(after)):
            old, length, ends = before.get(path, (None, 0, []))
            is_in_another_dict = len(path) > 1 and after[path[0]] is not attributes.get(path[0])
            if id(now) in seen or len(now) <= length or is_in_another_dict:
                continue
            seen.add(id(now))
            begins_alike = not length or (now[0] is ends[0] and now[length - 1] is ends[-1])
            if old is None:
                appended = path not in paths
            elif now is old or not keeps:
                appended = begins_alike
            else:  # another list: meant for the next step of the slot, unless it begins with the old items
                appended = begins_alike and length > 0 and not self._has_slots(path[0])
            packed = self._packed(path, list(now)[length:]) if appended else None
            if packed is not None:
                effects.append(Append(path, type(now), packed))
                if old is not None:
                    _shorten(old, length)
                self._put(path, old)

    @contextmanager
    def _assigning(self, effects: list[Effect]) -> Iterator[None]:
        """Finds assignments of a training step for the next one; lists that grew are taken back before."""
        before = self._attributes()
        marks = {name: mark_of(value) for name, value in before.items() if self._has_slots(name)}
        yield
        after = self._attributes()
        for name in {**before, **after}:
            value, old = after.get(name, MISSING), before.get(name, MISSING)
            if self._has_slots(name):
                changed = mark_of(value) != marks.get(name, mark_of(MISSING))
            else:
                changed = value is not old and any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))
            if changed and (packed := self._packed((name,), value)) is not None:
                effects.append(Assignment(name, packed))
                self._attribute(name).put(old)

    def _has_slots(self, name: str) -> bool:
        return self.slots is not None and name in self.slots.names

    def _packed(self, path: tuple[Any, ...], value: Any) -> bytes | None:
        """``value`` for the other workers; None if it cannot be pickled, and then stays where it is."""
        try:
            return pack_tensors(None if value is MISSING else tree_map_only(Tensor, to_cpu, value))
        except Exception as error:
            name = f"self.{path[0]}" + "".join(f"[{key!r}]" for key in path[1:])
            if name not in self._told:
                self._told.add(name)
                rank_zero_warn(
                    f"{name} got a value in a step or hook that sees one micro-batch which cannot be pickled"
                    f" ({type(error).__name__}: {error}). It stays on the worker that made it."
                )
            return None

    def _put(self, path: tuple[Any, ...], value: Any) -> None:
        """Puts ``value`` at ``path``; None: nothing was there."""
        owner: Any = vars(self._module) if len(path) == 1 else getattr(self._module, path[0])
        if value is None:
            owner.pop(path[-1], None)
        else:
            owner[path[-1]] = value

    def rewind(self) -> None:
        """The user's code that comes next sees parameters as they were when the step began."""
        if self.written is not None:
            self.written.rewind()

    @contextmanager
    def leaving_nothing(self, slot: int) -> Iterator[None]:
        """Within the block the step of ``slot`` runs to be compared: it counts nothing."""
        self.slot, plain = slot, self._numbers()
        try:
            yield
        finally:
            self.slot = None
            vars(self._module).update(plain)

    def _numbers(self) -> dict[str, Any]:
        return {n: v for n, v in vars(self._module).items() if type(v) in _PLAIN and n not in self._internal}

    def run_again(self) -> None:
        """The step may run again: numbers that its micro-batches have counted here would count twice."""
        self._runs_again = True

    # ------------------------------------------------------------------ on every worker

    def repeat(self, records: Sequence[Sequence[Effect]], slots: Sequence[int] | None = None) -> None:
        """Repeats the effects of the micro-batches of a step; ``slots``: their indices, if it was a training step."""
        device = self._module.device
        for effect in (effect for effects in records for effect in effects if isinstance(effect, Append)):
            self.names.add(effect.path[0])
            owner: Any = vars(self._module)
            for key in effect.path[:-1]:
                owner = owner.setdefault(key, {})
            target = owner.get(effect.path[-1])
            if type(target) is not effect.kind:
                target = owner[effect.path[-1]] = effect.kind()
            target.extend(on_device(unpack_tensors(effect.items), device))
        if slots is None or self._alone:
            return
        by_slot = dict(zip(slots, records, strict=True))
        if self.slots is not None:
            found: dict[str, dict[int, tuple[bool, Any]]] = defaultdict(dict)
            for slot, effects in by_slot.items():
                for new in (effect for effect in effects if isinstance(effect, Assignment)):
                    found[new.name][slot] = True, on_device(unpack_tensors(new.value), device)
            for name, values in found.items():
                self.slots.take(name, self._attribute(name), values, by_slot)
        if self.written is not None:
            self.written.take({i: [e for e in es if isinstance(e, Write)] for i, es in by_slot.items()})

    # ------------------------------------------------------------------ what stages and pipelines have in common

    def shares(self) -> dict[str, bytes]:
        """Numbers, tensors, and small containers of them in attributes, packed: what this worker has for itself. Of
        tensors those that steps have changed: hooks may keep some for each parameter of their stage.
        """
        found = {}
        views = self._views()
        for name, value in self._attributes().items():
            is_share = name not in {*self.names, *views} and not self._has_slots(name) and _is_data(value)
            is_share = is_share and (name in self.changed or not _has_tensors(value))
            if is_share and (packed := self._packed((name,), value)) is not None:
                found[name] = packed
        return {name: packed for name, packed in found.items() if len(packed) <= _SHARED_BYTES}

    def _views(self) -> set[str]:
        """The attributes that lie in the memory of parameters of this stage."""
        weights = {memory_address(parameter) for parameter in self._module.parameters()} - {0}
        tensors = {name: value for name, value in self._attributes().items() if isinstance(value, Tensor)}
        return {name for name, value in tensors.items() if memory_address(value) in weights}

    def load_shares(self, shares: Mapping[str, bytes]) -> None:
        """Takes over what :meth:`shares` returned on the last stage of the pipeline, where it differs."""
        mine, views = self.shares(), self._views()
        for name, packed in shares.items():
            if mine.get(name) != packed and name not in views:
                value = on_device(unpack_tensors(packed), self._module.device)
                self._attribute(name).put(value)

    # ------------------------------------------------------------------ a worker that joins

    def state(self) -> SideEffectState:
        """For a worker that joins, which has the module's attributes from elsewhere."""
        slots = {} if self.slots is None else self.slots.state()
        written = None if self.written is None else self.written.state()
        return sorted(self.names), sorted(self.changed), slots, written

    def load_state(self, state: SideEffectState) -> None:
        names, changed, slots, written = state
        self.names.update(names)
        self.changed.update(changed)
        if self.slots is not None:
            self.slots.load_state(slots, self._module.device)
        if self.written is not None and written is not None:
            self.written.load_state(written)


def _lists(attributes: Mapping[str, Any]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The lists that steps may append to, with their paths."""
    for name, value in attributes.items():
        if _is_list(value):
            yield (name,), value
        elif type(value) in _DICTS:
            yield from (((name, key), item) for key, item in list(value.items()) if _is_list(item))


def _has_tensors(value: Any) -> bool:
    """Whether it is a tensor, or a container that begins with one or with one that does."""
    while type(value) in _CONTAINERS and value:
        value = next(iter(value.values() if isinstance(value, dict) else value))
    return isinstance(value, Tensor)


def _is_data(value: Any, depth: int = 4) -> bool:
    """Whether it is a number, a text, a tensor, an array, or a container of them that is not long."""
    if isinstance(value, _PLAIN):
        return True
    if type(value) is Tensor and value.layout is not torch.strided:
        return False
    if type(value) is Tensor or isinstance(value, np.ndarray):
        return value.nbytes <= _SHARED_BYTES
    if not depth or not isinstance(value, (list, tuple, set, dict, deque)) or len(value) > _SHARED_ITEMS:
        return False
    items = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    return type(value) in _CONTAINERS and all(_is_data(item, depth - 1) for item in items)


def _is_list(value: Any) -> bool:
    return type(value) is list or (type(value) is deque and value.maxlen is None)


def _shorten(value: Any, length: int) -> None:
    while len(value) > length:
        value.pop()
