"""What a hook collects in the module's own attributes, noticed, taken back, and repeated on every worker.

Concept: Lightning's idiom is ``self.outputs.append(...)`` for each batch, ``torch.cat(self.outputs)`` in
``on_validation_epoch_end``, and ``.clear()``. A hook that sees outputs runs where they were computed, so its worker
would hold a part. Instead, the attributes are compared before and after the hook. The difference is taken back, travels
with what the hook logged, and is repeated on every worker in the order of the micro-batches: all hold all of it.

What is noticed, in attributes of the module and in lists, dicts and objects that they hold: items that were added to
lists, dicts and sets; numbers and tensors that were added to; tensors that got further rows or new values in place; and
attributes that were assigned without a look at what they were. Anything else that shows is an error, because it depends
on what other workers have seen: a removed item, ``self.best = max(self.best, x)``, an array that changed. What lies
outside the module (globals, callbacks) does not show.

An added item is held by every worker and travels through the coordinator to each; nothing else is kept beyond the step.
"""

from __future__ import annotations

import dis
import inspect
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import is_
from types import CodeType
from typing import Any, TypeAlias

import lightning.pytorch as pl
import numpy as np
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_recycle.errors import UnsupportedFeatureError
from lightning_recycle.model.module import PipelineModule
from lightning_recycle.model.recorded import RecordedModule
from lightning_recycle.session.batch_slots import Slots
from lightning_recycle.session.changes import (
    MISSING,
    Change,
    Kind,
    Path,
    item_of,
    received,
    repeat_change,
    same,
    sent,
    shown,
)
from lightning_recycle.session.followed import Followed, Origin

__all__ = ["COPIED_ELEMENTS", "Collected", "CollectedState", "is_plain_object"]

CollectedState: TypeAlias = tuple[dict[str, Any], dict[str, dict[int, Any]]]
"""Attributes by name, and their values by slot."""


COPIED_ELEMENTS = 65536  # of a tensor: larger ones, such as masks, are seldom what a hook collects in place
_LOOKS_INTO = 64  # items of a list or dict: what a hook changes within longer ones is replaced, not changed inside
_OWN_ITEMS = 1024  # of containers of an object that the module holds: longer ones are data, such as a vocabulary
_DEPENDS = "its new value depends on its old one, and not only by a sum"
_DEPTH = 4  # of containers and objects in one another
_REMEDY = (
    "Other workers may have computed the micro-batches before. Append what you need to a list and evaluate it in"
    " on_validation_epoch_end() or its like, add to a number or tensor (+=), log with reduce_fx='max', or use a"
    " torchmetrics object."
)


@dataclass(frozen=True)
class _Place:
    """A value before a hook, and what is needed to see whether it changed."""

    path: Path
    owner: Any  # a list or dict; of attributes, the dict that holds them
    key: Any
    value: Any
    copy: Any


@dataclass(frozen=True)
class _Namespace:
    """The attributes of an object before a hook."""

    path: Path
    attributes: dict[str, Any]
    names: frozenset[str]


class Collected:
    """What hooks and steps that see one micro-batch collect in the attributes of ``module``.

    Args:
        module: the user's module.
        alone: whether a step has one micro-batch in all; then there is nothing to put together, and nothing is noticed.
        microbatches: the number of micro-batches of a step, if training steps may keep something for the next one.

    Attributes:
        names: the attributes that hooks have changed so far.
        slots: what training steps keep, by micro-batch; None if they may not.
        slot: the micro-batch whose training step is about to run; None for other code.
    """

    def __init__(self, module: pl.LightningModule, alone: bool = False, microbatches: int | None = None) -> None:
        self._module = module
        self._alone = alone
        self._microbatches = microbatches or 0
        self.slots = Slots(module) if microbatches else None
        self.slot: int | None = None
        self._internal = {*vars(pl.LightningModule()), *dir(RecordedModule), "_param_requires_grad_state"}
        self._rebound = set(_rebound_names(type(module)))
        self._told: set[str] = set()
        self.names: set[str] = set()

    # ------------------------------------------------------------------ on the worker that has the output

    @contextmanager
    def noticed(self) -> Iterator[list[Change]]:
        """Runs a block, takes back what it did to the attributes, and lists that in the list that it yields.

        Raises:
            UnsupportedFeatureError: if it cannot be repeated elsewhere.
        """
        slot, self.slot = self.slot, None
        if self._alone:
            yield []
        elif slot is None or self.slots is None:
            with self._noticed(False) as changes:
                yield changes
        else:
            with self.slots.in_place(slot), self._noticed(True) as changes:
                yield changes

    @contextmanager
    def _noticed(self, keeps: bool) -> Iterator[list[Change]]:
        """As :meth:`noticed`; ``keeps``: whether new values of tensors may depend on old ones."""
        changes: list[Change] = []
        places: list[_Place] = []
        namespaces: list[_Namespace] = []
        self._survey(places, namespaces)
        followed = Followed()
        follows = False
        for number, place in enumerate(places):
            if isinstance(place.value, Tensor):
                followed.follow_tensor(place.value, number)
                follows = True
            elif self._is_rebound(place):
                place.owner[place.key] = followed.follow_number(place.value, number)
                follows = True
        try:
            if follows:
                with followed:
                    yield changes
            else:
                yield changes
        except BaseException:
            self._compare(places, followed, lambda *_: None, lambda *_: None, keeps)
            for namespace in namespaces:
                for name in set(namespace.attributes) - namespace.names:
                    del namespace.attributes[name]
            raise
        refused: list[str] = []
        self._compare(
            places,
            followed,
            lambda path, kind, value: changes.append(Change(path, kind, value)),
            lambda path, why: refused.append(f"{shown(path)}: {why}"),
            keeps,
        )
        for namespace in namespaces:
            for name in set(namespace.attributes) - namespace.names:
                if namespace.path or name not in self._internal:
                    path = (*namespace.path, (True, name))
                    changes.append(Change(path, Kind.CREATE, namespace.attributes.pop(name)))
        if refused:
            raise UnsupportedFeatureError(
                f"A hook or step that sees one micro-batch changed {'; '.join(refused)}. {_REMEDY}"
            )
        changes[:] = [Change(c.path, c.kind, sent(c.value)) for c in changes]

    def _is_rebound(self, place: _Place) -> bool:
        """Whether code may bind a new number there. Numbers that only ``__init__`` sets stay what they are: some
        compilers know only Python's own.
        """
        return type(place.value) in (int, float) and (len(place.path) > 1 or place.key in self._rebound)

    def _attributes(self) -> list[dict[str, Any]]:
        """Where the attributes of the module are."""
        return [vars(self._module), self._module._buffers]

    def _survey(self, places: list[_Place], namespaces: list[_Namespace]) -> None:
        seen: set[int] = set()
        for attributes in self._attributes():
            namespaces.append(_Namespace((), attributes, frozenset(attributes)))
            for name in [name for name in attributes if name not in self._internal]:
                places += _visit(((True, name),), attributes, name, _DEPTH, namespaces, seen, None)

    def _compare(
        self,
        places: Sequence[_Place],
        followed: Followed,
        found: Callable[[Path, Kind, Any], None],
        refuse: Callable[[Path, str], None],
        keeps: bool,
    ) -> None:
        """Reports what differs, and restores it: inner places first, so that outer ones find their items again."""
        for number, place in reversed(list(enumerate(places))):
            now = item_of(place.owner, place.key)
            if now is MISSING:
                refuse(place.path, "it was removed")
            elif isinstance(place.value, (list, deque)):
                _compare_lists(place, now, found, refuse)
            elif isinstance(place.value, dict):
                _compare_dicts(place, now, found, refuse)
            elif isinstance(place.value, set):
                _compare_sets(place, now, found, refuse)
            elif isinstance(place.value, Tensor):
                _compare_tensors(place, now, followed, number, found, refuse, keeps and len(place.path) == 1)
            elif isinstance(place.value, np.ndarray):
                if now is not place.value or not np.array_equal(
                    now, place.copy, equal_nan=place.copy.dtype.kind == "f"
                ):
                    refuse(place.path, "a NumPy array cannot be followed; make it a tensor")
                place.value[...] = place.copy
            elif isinstance(place.value, Metric):
                if place.value.update_count != place.copy:
                    refuse(
                        place.path, "a torchmetrics object must be an attribute of the module, or in an nn.ModuleDict"
                    )
            elif self._is_rebound(place):
                _compare_numbers(place, now, followed, number, found, refuse)
            elif now is not place.value and not same(now, place.value):
                if type(place.value) in (int, float):
                    refuse(place.path, "the number was not changed in a method of the module")
                else:
                    found(place.path, Kind.ASSIGN, now)
            _put(place.owner, place.key, place.value)

    # ------------------------------------------------------------------ on every worker

    def repeat(self, records: Sequence[Sequence[Change]], slots: Sequence[int] | None = None) -> None:
        """Does what was done with the micro-batches of a step, in their order; ``slots``: their indices, if it was in
        training steps.
        """
        if slots is not None and self.slots is not None and not self._alone:
            with self.slots.taking(dict(zip(slots, records, strict=True))):
                self._repeat(records)
        else:
            self._repeat(records)

    def _repeat(self, records: Sequence[Sequence[Change]]) -> None:
        assigned: set[Path] = set()
        for changes in records:
            for change in changes:
                self.names.add(change.path[0][1])
                replaced = repeat_change(self._module, change, self._module.device)
                if change.kind is Kind.CREATE or change.path in assigned:
                    self._tell_of_loss(change, replaced)
                if change.kind is Kind.ASSIGN:
                    assigned.add(change.path)

    def _tell_of_loss(self, change: Change, replaced: Any) -> None:
        """Warns once of an attribute for which a micro-batch assigns another value than an earlier one of its step."""
        name = shown(change.path)
        counts = change.kind is Kind.CREATE and isinstance(change.value, (int, float))  # or so it may be meant
        if not counts and self.slots is not None and change.path[0][1] in self.slots.names:
            return  # the next step finds its own
        if replaced is MISSING or name in self._told or (same(replaced, change.value) and not counts):
            return
        self._told.add(name)
        rank_zero_warn(
            f"{name} was assigned in a hook that sees the output of one micro-batch: it keeps the value of the last"
            " micro-batch of a step. If it is to collect something, start with a number, tensor or list (not with"
            " None or nothing) and add to that."
        )

    def state(self) -> CollectedState:
        """What hooks and steps have changed, for a worker that joins."""
        attributes = {n: space[n] for n in sorted(self.names) for space in self._attributes() if n in space}
        return attributes, {} if self.slots is None else self.slots.state()

    def load_state(self, state: CollectedState) -> None:
        attributes, slots = state
        for name, value in attributes.items():
            setattr(self._module, name, received(value, self._module.device))
        self.names.update(attributes)
        if self.slots is not None:
            self.slots.load_state(slots, self._microbatches)


# ---------------------------------------------------------------------- comparing


def _rebound_names(kind: type) -> Iterator[str]:
    """The attributes that methods of a user's class bind, those of ``__init__`` apart."""
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] in ("lightning", "torch") or base in (PipelineModule, RecordedModule):
            continue
        for name, method in vars(base).items():
            code = getattr(inspect.unwrap(method), "__code__", None) if callable(method) else None
            if code is not None and name != "__init__":
                yield from _bound_in(code)


def _bound_in(code: CodeType) -> Iterator[str]:
    yield from (step.argval for step in dis.get_instructions(code) if step.opname == "STORE_ATTR")
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _bound_in(inner)


def _visit(
    path: Path,
    owner: Any,
    key: Any,
    depth: int,
    namespaces: list[_Namespace],
    seen: set[int],
    longest: int | None,
) -> Iterator[_Place]:
    """The places at and within ``owner[key]``, outer ones first; adds the namespaces of objects to ``namespaces``.

    An object that has two names, as its id in ``seen`` shows, has one place.
    """
    value = owner[key]
    copy: Any = None
    inner: list[tuple[Path, Any, Any]] = []
    if not isinstance(value, (int, float, str)):
        if value is not None and id(value) in seen:
            return
        seen.add(id(value))
    if isinstance(value, (list, deque, dict, set)):
        if longest is not None and len(value) > longest:
            return
        copy = _shallow_copy(value)
        if len(value) <= _LOOKS_INTO and not isinstance(value, set) and getattr(value, "maxlen", None) is None:
            keys = list(value) if isinstance(value, dict) else range(len(value))
            inner = [((*path, (False, k)), value, k) for k in keys]
    elif isinstance(value, Tensor):
        copy = _TensorCopy.of(value)
    elif isinstance(value, np.ndarray):
        copy = value.copy()
    elif isinstance(value, Metric):
        copy = value.update_count
    elif is_plain_object(value) and depth:
        attributes, longest = vars(value), _OWN_ITEMS
        namespaces.append(_Namespace(path, attributes, frozenset(attributes)))
        inner = [((*path, (True, name)), attributes, name) for name in attributes]
    yield _Place(path, owner, key, value, copy)
    if depth:
        for place in inner:
            yield from _visit(*place, depth - 1, namespaces, seen, longest)


@dataclass(frozen=True)
class _TensorCopy:
    """What is needed to see whether a tensor was written to, and to restore it; large ones are not copied."""

    version: int
    values: Tensor | None

    @classmethod
    def of(cls, tensor: Tensor) -> _TensorCopy:
        version = _version(tensor)
        is_copied = version < 0 or tensor.numel() <= COPIED_ELEMENTS
        return cls(version, tensor.detach().clone() if is_copied else None)


def _version(tensor: Tensor) -> int:
    """Grows whenever ``tensor`` is written to; -1 if torch does not count that."""
    return -1 if tensor.is_inference() else tensor._version


def _shallow_copy(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else set(value) if isinstance(value, set) else list(value)


def is_plain_object(value: Any) -> bool:
    """Whether ``value`` is an object of the user's own with attributes, such as a meter."""
    package = type(value).__module__.partition(".")[0]
    return hasattr(value, "__dict__") and not (
        isinstance(value, (type, nn.Module)) or callable(value) or package in ("torch", "lightning", "torchmetrics")
    )


def _put(owner: Any, key: Any, value: Any) -> None:
    if isinstance(owner, dict) or key < len(owner):
        owner[key] = value


def _compare_lists(place: _Place, now: Any, found: Any, refuse: Any) -> None:
    old, kept = place.value, len(place.copy)
    if not isinstance(now, (list, deque)):
        found(place.path, Kind.ASSIGN, now)
    elif len(now) < kept or getattr(now, "maxlen", None) is not None:
        if list(now) != place.copy:
            refuse(place.path, "items were removed")
    elif now is old or _begins_with(now, place.copy):
        items = list(now)
        if not all(map(is_, place.copy, items)):  # long lists grow, and this is quick
            for index, (before, after) in enumerate(zip(place.copy, items, strict=False)):
                if not _is_item(before, after):
                    found((*place.path, (False, index)), Kind.ASSIGN, after)
        if len(items) > kept:
            found(place.path, Kind.EXTEND, items[kept:])
    elif {id(getattr(item, "plain", item)) for item in now} & set(map(id, place.copy)):
        refuse(place.path, _DEPENDS)
    else:
        found(place.path, Kind.ASSIGN, now)
    if len(old) != kept or not all(map(is_, place.copy, old)):
        old.clear()
        old.extend(place.copy)


def _is_item(before: Any, after: Any) -> bool:
    """Whether an item is the same; it may be a number that was followed."""
    return before is after or getattr(after, "plain", MISSING) is before


def _begins_with(items: Any, first: list[Any]) -> bool:
    return len(items) >= len(first) and (all(map(is_, first, items)) or all(map(_is_item, first, items)))


def _compare_dicts(place: _Place, now: Any, found: Any, refuse: Any) -> None:
    old = place.value
    if not isinstance(now, dict):
        found(place.path, Kind.ASSIGN, now)
    elif any(key not in now for key in place.copy):
        refuse(place.path, "items were removed")
    else:
        kept = len(now) == len(place.copy) and all(map(is_, place.copy.values(), now.values()))
        for key, value in [] if kept else list(now.items()):
            if key not in place.copy:
                found((*place.path, (False, key)), Kind.CREATE, value)
            elif not _is_item(place.copy[key], value):
                found((*place.path, (False, key)), Kind.ASSIGN, value)
    if len(old) != len(place.copy) or not all(map(is_, place.copy.values(), old.values())):
        old.clear()
        old.update(place.copy)


def _compare_sets(place: _Place, now: Any, found: Any, refuse: Any) -> None:
    if not isinstance(now, set):
        found(place.path, Kind.ASSIGN, now)
    elif place.copy - now:
        refuse(place.path, "items were removed")
    elif now - place.copy:
        found(place.path, Kind.UPDATE, now - place.copy)
    if place.value != place.copy:
        place.value.clear()
        place.value.update(place.copy)


def _compare_tensors(
    place: _Place, now: Any, followed: Followed, number: int, found: Any, refuse: Any, keeps: bool
) -> None:
    old, before = place.value, place.copy.values
    origin = followed.origin(now)
    written = place.copy.version < 0 or place.copy.version != _version(old)
    changed = written and (before is None or not same(old, before))
    if now is old and not changed:
        return
    if number in followed.read and keeps and not (changed and before is None):
        found(place.path, Kind.ASSIGN, now.detach().clone() if now is old else now)
    elif number in followed.read:
        refuse(place.path, _DEPENDS)
    elif changed and before is None:
        refuse(place.path, f"a tensor of {old.numel():,} elements is too large to be followed")
    elif now is old and number in followed.overwritten:
        where = old != before
        found(place.path, Kind.WRITE, (where, old[where]))
    elif now is old or origin == (number, Origin.SUM):
        found(place.path, Kind.ADD, now - (old if before is None else before))
    elif origin == (number, Origin.CONCATENATION):
        found(place.path, Kind.ROWS, now[len(old) :])
    else:
        found(place.path, Kind.ASSIGN, now)
    if changed and before is not None:
        old.copy_(before)


def _compare_numbers(place: _Place, now: Any, followed: Followed, number: int, found: Any, refuse: Any) -> None:
    if followed.origin(now) == (number, Origin.SUM):
        difference = getattr(now, "plain", now) - place.value
        if isinstance(difference, Tensor) or difference:
            found(place.path, Kind.ADD, difference)
    elif number in followed.read:
        refuse(place.path, _DEPENDS)
    else:
        found(place.path, Kind.ASSIGN, getattr(now, "plain", now))
