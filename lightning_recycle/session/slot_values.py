"""The values in a module's tree that code changes: found by comparison, taken back, and put in place.

Concept: the tree is made of *cells*, objects that hold values and can be written: the tables of each module (attributes,
buffers, parameters, children), dicts, lists, deques, sets, arrays, generators of random numbers, and objects of plain
attributes in them. A *place* is a cell and a key in it, or the whole cell where its order counts. Before a block of the
user's code a :class:`ValueTree` knows what each cell holds; afterwards it compares, by identity and for plain values by
equality. Cells are written in place, so whoever else refers to one sees the same.

A tensor is a value, not a cell: backward may need the very one that a forward has left. So a tensor that is written
gets a copy in its places while the block runs, and comes back to them. Which are written shows in the first steps after
a tensor was found, when all have copies and are compared; afterwards the others are looked at by the number of writes
that autograd counts, and small ones bit by bit. *Trained* parameters may not be written at all.

Must not know: steps, slots, workers.
"""

from __future__ import annotations

import math
import pickle
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from operator import is_
from typing import Any, TypeAlias

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader
from torchmetrics import Metric

from lightning_recycle.errors import UnsupportedFeatureError
from lightning_recycle.runtime.checks.checksums import checksum
from lightning_recycle.session.object_attributes import (
    INTERNAL_ATTRIBUTES,
    MODULE_TABLES,
    OF_ONE_PROCESS,
    is_node,
    is_own,
    slots_of,
    vars_of,
)
from lightning_recycle.tensor_memory import is_sharded, memory_address
from lightning_recycle.torch_internals import NormBase, buffers_of, modules_of, parameters_of, version_of

__all__ = ["ABSENT", "WHOLE", "Found", "Path", "Place", "ValueTree", "name_of"]

Path: TypeAlias = tuple[Any, ...]
"""The name of a module, one of its tables, and the keys that lead from there to a cell."""

Place: TypeAlias = tuple[Path, Any]
"""A cell, and a key in it or WHOLE."""

WHOLE = "<whole>"


class Absent(Enum):
    """The value of a place that holds nothing; the same object in all processes."""

    ABSENT = "absent"


ABSENT = Absent.ABSENT

_ATTRIBUTES, _BUFFERS, _PARAMETERS, _CHILDREN = "", "buffers", "parameters", "children"
_ATOMS = (bool, int, float, complex, str, bytes, type(None))
_TENSORS = (Tensor, nn.Parameter, nn.Buffer)
_NOT_LOOKED_INTO = (*OF_ONE_PROCESS, DataLoader, pl.LightningDataModule, pl.Callback, nn.Module)
_KEEPING_OWN = ("torch.ao.", "torchmetrics.")  # packages whose modules have statistics or states of their own
_STATISTICS = ("running_mean", "running_var")
_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}  # hooks, tables
_INTERNAL = (INTERNAL_ATTRIBUTES | frozenset(MODULE_TABLES)) - {"training"}

_MOST_CELLS = 10_000
_LOOKS_INTO = 1_000  # items of a container: those of longer ones are not looked into
_WATCHED_STEPS = 3  # in which all tensors are compared, after they were found
_WATCHED_BYTES = 256 * 1024 * 1024  # that have copies then, besides twice the trained parameters
_KEPT_BYTES = 4 * 1024 * 1024  # of a tensor that has a copy later, too
_LOOKED_AT_BYTES = 1024 * 1024  # of a tensor without a count of writes that is compared while others are looked at
_COMPARED_BYTES = 4096  # of a tensor that is compared each time


# ---------------------------------------------------------------------- cells


@dataclass(frozen=True)
class _Kind:
    """How a cell without keys is read and written.

    Args:
        read: holder -> what it holds, by itself.
        write: makes a holder hold that.
        same: whether a holder still holds it.
        sets: sets one item, if items can be tensors.
    """

    read: Callable[[Any], Any]
    write: Callable[[Any, Any], None]
    same: Callable[[Any, Any], bool]
    sets: bool = False


def _same_items(holder: Any, items: list[Any]) -> bool:
    return len(holder) == len(items) and all(map(is_, holder, items))


def _write_list(holder: list[Any], items: list[Any]) -> None:
    holder[:] = items


def _refill(holder: Any, items: Any) -> None:
    holder.clear()
    (holder.extend if isinstance(holder, deque) else holder.update)(items)


def _same_ordered(holder: Any, items: list[Any]) -> bool:
    same = len(holder) == len(items)
    return same and all(key == k and value is v for (key, value), (k, v) in zip(holder.items(), items, strict=True))


def _write_array(holder: np.ndarray, values: np.ndarray) -> None:
    holder[...] = values


def _same_array(holder: np.ndarray, values: np.ndarray) -> bool:
    return holder.shape == values.shape and holder.dtype == values.dtype and holder.tobytes() == values.tobytes()


def _by_state(read: Callable[[Any], Any], write: Callable[[Any, Any], None]) -> _Kind:
    return _Kind(
        lambda holder: pickle.dumps(read(holder)),
        lambda holder, data: write(holder, pickle.loads(data)),
        lambda holder, data: pickle.dumps(read(holder)) == data,
    )


def _set_bits(holder: np.random.Generator, state: Any) -> None:
    holder.bit_generator.state = state


_LIST, _DEQUE = _Kind(list, _write_list, _same_items, True), _Kind(list, _refill, _same_items, True)
_ORDERED = _Kind(lambda holder: list(holder.items()), _refill, _same_ordered)
_SET = _Kind(set, _refill, lambda holder, items: bool(holder == items))
_ARRAY = _Kind(np.copy, _write_array, _same_array)
_GENERATORS: tuple[tuple[type[Any], _Kind], ...] = (
    (torch.Generator, _by_state(lambda g: g.get_state().numpy(), lambda g, s: g.set_state(torch.from_numpy(s)))),
    (random.Random, _by_state(random.Random.getstate, random.Random.setstate)),
    (np.random.Generator, _by_state(lambda g: g.bit_generator.state, _set_bits)),
    (np.random.RandomState, _by_state(lambda g: g.get_state(legacy=False), np.random.RandomState.set_state)),
)


def _kind_of(value: Any) -> _Kind | None:
    """How ``value`` is read as a whole; None if it is no such cell."""
    if type(value) is list:
        return _LIST
    if isinstance(value, deque):
        return _DEQUE
    if isinstance(value, OrderedDict):
        return _ORDERED
    if isinstance(value, set):
        return _SET
    if isinstance(value, np.ndarray):
        return None if value.dtype.hasobject or not value.flags.writeable else _ARRAY
    return next((kind for base, kind in _GENERATORS if isinstance(value, base)), None)


class _Whole:
    """A cell whose order counts, or that has no keys."""

    def __init__(self, path: Path, holder: Any, kind: _Kind) -> None:
        self.path, self.holder, self.kind = path, holder, kind
        self.content = kind.read(holder)

    def is_same(self) -> bool:
        return self.kind.same(self.holder, self.content)

    def read(self) -> None:
        self.content = self.kind.read(self.holder)

    def changes(self) -> Iterator[tuple[Any, Any, Any]]:
        """(key, value before, value now) of what is not as in ``content``."""
        yield WHOLE, self.content, self.kind.read(self.holder)

    def put(self, key: Any, value: Any) -> None:
        if key == WHOLE:
            self.kind.write(self.holder, value)
        else:
            self.holder[key] = value

    def get(self, key: Any) -> Any:
        if key == WHOLE:
            return self.kind.read(self.holder)
        return self.holder[key] if self.kind is _ORDERED or key < len(self.holder) else ABSENT

    def items(self) -> Iterable[tuple[Any, Any]]:
        if self.kind in (_LIST, _DEQUE):
            return enumerate(self.content)
        return self.content if self.kind is _ORDERED else ()


class _Table:
    """A cell of values by key: a dict, or the attributes of an object."""

    def __init__(self, path: Path, holder: Any, hidden: frozenset[str] = frozenset()) -> None:
        self.path, self.holder, self._hidden = path, holder, hidden
        self._is_dict = isinstance(holder, dict)
        self._slots = () if self._is_dict or isinstance(holder, nn.Module) else tuple(slots_of(type(holder)))
        self._values: list[Any] = []
        self.content: dict[Any, Any] = {}
        self.read()

    @property
    def _dict(self) -> dict[Any, Any]:
        if self._is_dict:
            return self.holder  # type: ignore[no-any-return]
        values = vars_of(self.holder)
        if self._slots:
            named = {name: getattr(self.holder, name, ABSENT) for name in self._slots}
            return {**values, **{name: value for name, value in named.items() if value is not ABSENT}}
        return values

    def is_same(self) -> bool:
        values = self._dict
        if len(values) == len(self._values) and all(map(is_, values.values(), self._values)):
            return not self._is_dict or values.keys() == self.content.keys()
        return not any(True for _ in self.changes())

    def read(self) -> None:
        values = self._dict
        self._values = list(values.values())
        self.content = {key: value for key, value in values.items() if key not in self._hidden}

    def changes(self) -> Iterator[tuple[Any, Any, Any]]:
        now, before = self._dict, self.content
        for key in [*before, *(key for key in now if key not in before and key not in self._hidden)]:
            new, old = now.get(key, ABSENT), before.get(key, ABSENT)
            if new is not old and not _equal_atoms(new, old):
                yield key, old, new

    def put(self, key: Any, value: Any) -> None:
        if key in self._slots:
            (object.__delattr__(self.holder, key) if value is ABSENT else object.__setattr__(self.holder, key, value))
        elif value is ABSENT:
            self._dict.pop(key, None)
        else:
            self._dict[key] = value

    def get(self, key: Any) -> Any:
        return self._dict.get(key, ABSENT)

    def items(self) -> Iterable[tuple[Any, Any]]:
        return self.content.items()


_Cell: TypeAlias = _Whole | _Table


def _equal_atoms(one: Any, other: Any) -> bool:
    if type(one) is not type(other) or not isinstance(one, _ATOMS):
        return False
    return one == other or (isinstance(one, float) and math.isnan(one) and math.isnan(other))


def name_of(place: Place) -> str:
    """The name of a place, for people."""
    (module, _, *keys), key = place
    parts = [module, *map(str, keys), *([] if key == WHOLE else [str(key)])]
    return ".".join(part for part in parts if part)


@dataclass
class Found:
    """A place that holds something else than before.

    Args:
        place: which one.
        before, now: its values.
        items: those that a list has more than before, at its end; None if that is not all.
        was_made: whether the list was made, or replaced by a longer one.
    """

    place: Place
    before: Any
    now: Any
    items: list[Any] | None = None
    was_made: bool = False


# ---------------------------------------------------------------------- tensors in places


@dataclass
class _Held:
    """A tensor that is not trained, and the cells and keys that hold it.

    Args:
        tensor: the tensor.
        places: where it is; a key of None is in a tuple there, which cannot hold another one.
        left: the steps in which it is still compared.
        is_written: whether a block has written it.
    """

    tensor: Tensor
    places: list[tuple[_Cell, Any]]
    left: int = _WATCHED_STEPS
    is_written: bool = False
    version: int = 0
    copy: Tensor | None = None  # equal to it when a block begins
    running: Tensor | None = None  # in its places while a block runs
    is_given: bool = False  # a block has another value in its places

    @property
    def is_fixed(self) -> bool:
        return any(key is None for _, key in self.places)

    def put(self, value: Any) -> None:
        for cell, key in self.places:
            if key is not None:
                cell.put(key, value)

    def mark(self) -> int:
        return -1 if self.tensor.is_inference() else version_of(self.tensor)


@torch.no_grad()
def _clone(tensor: Tensor, storages: dict[int, tuple[Any, Tensor]]) -> Tensor:
    """A copy; those of views of one storage are views of one storage."""
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        made = tensor.detach().clone()
    else:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if storage.nbytes() <= tensor.nbytes or not address:
            made = tensor.detach().clone()
        else:
            if address not in storages:
                storages[address] = storage.clone(), tensor
            made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            made.set_(storages[address][0], tensor.storage_offset(), tensor.size(), tensor.stride())
    if isinstance(tensor, nn.Parameter):
        parameter = nn.Parameter(made, requires_grad=False)
        vars(parameter).update(vars(tensor))
        return parameter
    if type(tensor) is nn.Buffer:
        return nn.Buffer(made, persistent=tensor.persistent)
    return made.requires_grad_(tensor.requires_grad) if tensor.requires_grad else made


def _is_like(value: Tensor, old: Tensor) -> bool:
    same = value.shape == old.shape and value.dtype == old.dtype and value.device == old.device
    return same and value.layout is old.layout and not old.is_inference()


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether they are equal to the bit, or nearly so: NaN is equal to NaN."""
    if one.dtype != other.dtype or one.device != other.device or one.shape != other.shape:
        return False
    if torch.equal(one, other):
        return True
    return one.is_floating_point() and checksum([one]) == checksum([other])


# ---------------------------------------------------------------------- the tree


class ValueTree:
    """The values of ``module``.

    Args:
        module: the user's module.
        internal: names of attributes of the module itself that are not the user's.
        whole: whether it is the tree of all submodules, with tensors; else the attributes of the module itself.
    """

    def __init__(self, module: pl.LightningModule, internal: Iterable[str] = (), whole: bool = True) -> None:
        self._module, self._whole = module, whole
        self._hidden = _INTERNAL | frozenset(internal)
        self._cells: dict[Path, _Cell] = {}
        self._by_id: dict[int, Path] = {}
        self._held: dict[int, _Held] = {}
        self._trained: list[tuple[str, nn.Parameter]] = []
        self._sums: list[bytes] = []
        self._trained_left, self._trained_key = 0, ()
        self._is_stale = True
        self._has_budget = True
        self._touched: list[tuple[_Cell, Any, Any]] = []  # (cell, key, value) to be put back
        self._turn = 0
        self._noted: list[Place] = []  # changes that were found, and not told yet

    # ------------------------------------------------------------------ finding cells

    def _walk(self) -> None:
        self._cells, self._by_id, self._is_stale = {}, {}, False
        before, self._held = self._held, {}
        seen: set[int] = set()
        todo: list[tuple[Path, Any]] = []
        modules = dict(self._modules("", self._module, set())) if self._whole else {"": self._module}
        for name, part in modules.items():
            hidden = self._hidden if part is self._module else _OF_MODULES
            self._add(_Table((name, _ATTRIBUTES), part, hidden), part, seen, todo)
            self._add(_Table((name, _BUFFERS), buffers_of(part)), buffers_of(part), seen, todo)
            if self._whole:
                self._add(_Table((name, _PARAMETERS), parameters_of(part)), parameters_of(part), seen, todo)
                self._add(_Table((name, _CHILDREN), modules_of(part)), modules_of(part), seen, [])
            self._by_id[id(part)] = (name,)
        while todo and len(self._cells) < _MOST_CELLS:
            path, value = todo.pop()
            if id(value) in seen:
                continue
            if (kind := _kind_of(value)) is not None:
                self._add(_Whole(path, value, kind), value, seen, todo)
            elif isinstance(value, dict):
                self._add(_Table(path, value), value, seen, todo)
            elif isinstance(value, tuple):
                seen.add(id(value))
                todo += [((*path, number), item) for number, item in enumerate(value[:_LOOKS_INTO])]
            elif not isinstance(value, _NOT_LOOKED_INTO) and is_node(value) and not is_own(value):
                self._add(_Table(path, value), value, seen, todo)
        for key, held in self._held.items():
            if (old := before.get(key)) is not None and old.tensor is held.tensor:
                held.left, held.is_written, held.copy = old.left, old.is_written, old.copy
        self._find_trained()
        self._find_budget()

    def _modules(self, prefix: str, module: nn.Module, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
        """The modules whose values are looked at, each once."""
        seen.add(id(module))
        yield prefix, module
        for name, child in modules_of(module).items():
            if child is None or id(child) in seen or isinstance(child, Metric) or is_own(child):
                continue
            if not type(child).__module__.startswith(_KEEPING_OWN):
                yield from self._modules(f"{prefix}.{name}" if prefix else name, child, seen)

    def _add(self, cell: _Cell, value: Any, seen: set[int], todo: list[tuple[Path, Any]]) -> None:
        seen.add(id(value))
        self._cells[cell.path] = cell
        self._by_id.setdefault(id(cell.holder), cell.path)
        items = list(cell.items())
        if len(items) > _LOOKS_INTO and len(cell.path) > 2:
            return
        for key, item in items:
            if isinstance(item, _ATOMS):
                continue
            if isinstance(item, Tensor):
                self._hold(item, cell, key)
            elif isinstance(item, tuple):
                for leaf in item[:_LOOKS_INTO]:
                    if isinstance(leaf, Tensor):
                        self._hold(leaf, cell, None)
                todo.append(((*cell.path, key), item))
            elif type(item).__module__ != "builtins" or isinstance(item, (list, dict, set)):
                todo.append(((*cell.path, key), item))

    def _hold(self, tensor: Tensor, cell: _Cell, key: Any) -> None:
        if not self._whole or type(tensor) not in _TENSORS or is_lazy(tensor) or is_sharded(tensor):
            return
        if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
            return
        if isinstance(cell, _Whole) and not cell.kind.sets:
            key = None
        if tensor.grad_fn is not None:
            return  # belongs to the graph of a step; autograd forbids to write what it needs
        if id(tensor) in self._held:
            self._held[id(tensor)].places.append((cell, key))
        else:
            self._held[id(tensor)] = held = _Held(tensor, [(cell, key)])
            held.version = held.mark()

    def _find_trained(self) -> None:
        parameters = self._module.named_parameters() if self._whole else ()
        self._trained = [(n, p) for n, p in parameters if p.requires_grad and not is_lazy(p) and not is_sharded(p)]
        key = tuple(id(parameter) for _, parameter in self._trained)
        if key != self._trained_key:
            self._trained_key, self._trained_left = key, _WATCHED_STEPS
        weights = {memory_address(parameter) for _, parameter in self._trained} - {0}
        self._held = {k: h for k, h in self._held.items() if memory_address(h.tensor) not in weights}

    def _find_budget(self) -> None:
        trained = sum(parameter.nbytes for _, parameter in self._trained)
        self._has_budget = sum(h.tensor.nbytes for h in self._held.values()) <= 2 * trained + _WATCHED_BYTES

    # ------------------------------------------------------------------ places

    def get(self, place: Place) -> Any:
        """The value of a place; of a parameter its data. Raises KeyError if the tree has no such cell."""
        return self._cell(place[0]).get(place[1])

    @torch.no_grad()
    def put(self, place: Place, value: Any) -> None:
        """Makes ``value`` that of a place. A tensor that is there is written, if it can be."""
        cell, key = self._cell(place[0]), place[1]
        old = cell.get(key)
        held = self._held.get(id(old)) if isinstance(old, Tensor) else None
        if held is not None and isinstance(value, Tensor) and _is_like(value, old):
            old.data.copy_(value)
            held.version, held.copy = held.mark(), None
            return
        if isinstance(old, nn.Parameter) and isinstance(value, Tensor):
            old.data = value.detach()
            return
        cell.put(key, value)
        cell.read()
        if isinstance(value, Tensor):
            self._hold(value, cell, key)
        self._is_stale |= not isinstance(value, (*_ATOMS, Tensor))

    def _cell(self, path: Path) -> _Cell:
        if path not in self._cells and self._is_stale:
            self._noted = self.absorb()
        return self._cells[path]

    def is_statistic(self, place: Place) -> bool:
        """Whether the place holds a running statistic of a layer that normalises."""
        (_, *keys), name = place
        if keys != [_BUFFERS] or not isinstance(value := self.get(place), Tensor) or not value.is_floating_point():
            return False
        return name in _STATISTICS or isinstance(self.referent(place[0][:1]), NormBase)

    def reference(self, value: Any) -> Path | None:
        """The path of a module or a cell, which other workers have as well; None of all other objects."""
        path = self._by_id.get(id(value))
        if path is None or (len(path) > 1 and self._cells[path].holder is not value):
            return None
        return path

    def referent(self, path: Path) -> Any:
        """The object with that path."""
        if len(path) == 1:
            return dict(self._module.named_modules())[path[0]]
        return self._cell(path).holder

    # ------------------------------------------------------------------ a block of the user's code

    def absorb(self) -> list[Place]:
        """What other code has changed since holds; returns where. Called before a block."""
        changed, self._noted = self._noted, []
        for cell in list(self._cells.values()):
            if cell.is_same():
                continue
            for key, _, now in list(cell.changes()):
                changed.append((cell.path, key))
                for value in now if isinstance(cell, _Whole) and cell.kind.sets else (now,):
                    if isinstance(value, Tensor):
                        self._hold(value, cell, key if key != WHOLE else None)
                    elif not isinstance(value, _ATOMS) and id(value) not in self._by_id:
                        self._is_stale = True
            cell.read()
        if self._is_stale:
            self._walk()
        for held in list(self._held.values()):
            if not all(key is None or cell.get(key) is held.tensor for cell, key in held.places):
                held.places = [(cell, key) for cell, key in held.places if key is None or cell.get(key) is held.tensor]
                if not held.places:
                    del self._held[id(held.tensor)]
                    continue
            if held.version != held.mark():
                changed += [(cell.path, key) for cell, key in held.places if key is not None]
                held.version, held.copy = held.mark(), None
        return changed

    def begin_step(self) -> None:
        """Tensors are looked at with less care the more steps have not written them."""
        for held in self._held.values():
            held.left = max(0, held.left - 1)
            held.copy = None  # ``.data`` may have been written, which nothing counts
        self._trained_left = max(0, self._trained_left - 1)
        self._sums = []

    @torch.no_grad()
    def begin(self, values: Mapping[Place, Any], looks_only: bool = False) -> None:
        """A block begins, with ``values`` in their places. :meth:`end` takes that back.

        Call :meth:`absorb` before. ``looks_only``: what the block does to tensors stays.
        """
        self._touched, self._given, self._looks_only = [], list(values), looks_only
        storages: dict[int, tuple[Any, Tensor]] = {}
        given: set[int] = set()
        for place, value in values.items():
            cell, key = self._cell(place[0]), place[1]
            old = cell.get(key)
            held = self._held.get(id(old)) if isinstance(old, Tensor) else None
            for where, at in [(cell, key)] if held is None else held.places:
                if at is not None:
                    self._touch(where, at, value)
            if held is not None:
                given.add(id(old))
        for held in self._held.values():
            held.running, held.is_given = None, id(held.tensor) in given
            if held.is_given:
                continue
            wanted = held.is_written or (held.left > 0 and self._has_budget)
            if wanted and self._whole and not held.is_fixed:
                held.running = _clone(held.tensor, storages)
                for cell, key in held.places:
                    self._touch(cell, key, held.running)
            elif held.copy is None and held.tensor.nbytes <= (_LOOKED_AT_BYTES if looks_only else _KEPT_BYTES):
                held.copy = held.tensor.detach().clone() if not looks_only or held.tensor.is_inference() else None
        for cell in {id(cell): cell for cell, _, _ in self._touched}.values():
            cell.read()
        self._versions = [version_of(parameter) for _, parameter in self._trained]
        self._compares_trained = self._trained_left > 0 and not self._sums
        if self._compares_trained:
            self._sums = [checksum([parameter]) for _, parameter in self._trained]

    def _touch(self, cell: _Cell, key: Any, value: Any) -> None:
        self._touched.append((cell, key, cell.get(key)))
        cell.put(key, value)

    @torch.no_grad()
    def end(self) -> list[Found]:
        """The block is over: what it has changed, and what it made of the values that it was given.

        All places hold again what they held before :meth:`begin`.
        """
        contents = {cell.path: cell.content for cell in self._cells.values() if isinstance(cell, _Whole)}
        changed = self._changes()
        found = {
            (cell.path, key): self._found(cell, key, before, now, contents) for cell, key, before, now in changed
        }
        for place in self._given:
            now = self._cells[place[0]].get(place[1])
            found.setdefault(place, Found(place, ABSENT, now))
            found[place].items = None
        for held in self._held.values():
            if not held.is_given and (write := self._write_of(held)) is not None:
                found[write.place] = write
        self._take_back(changed)
        self._refuse_trained()
        self._turn += 1
        return list(found.values())

    def abandon(self) -> None:
        """The block has raised an exception: :meth:`end`, without what it has changed."""
        self._take_back(self._changes())

    def end_looking(self, stays: Callable[[Found], bool]) -> list[Found]:
        """As :meth:`end`, but what ``stays`` is true of stays as it is, as do tensors."""
        contents = {cell.path: cell.content for cell in self._cells.values() if isinstance(cell, _Whole)}
        found = []
        for cell, key, before, now in self._changes():
            one = self._found(cell, key, before, now, contents)
            found.append(one)
            if not stays(one):
                cell.put(key, before)
            cell.read()
            self._is_stale |= not isinstance(now, (*_ATOMS, Tensor)) and isinstance(cell, _Table)
        for held in self._held.values():
            cell, key = held.places[0]
            if held.version != held.mark() or (held.copy is not None and not _equal(held.copy, held.tensor)):
                found.append(Found((cell.path, WHOLE if key is None else key), held.tensor, held.tensor))
            held.version, held.copy = held.mark(), None
        return found

    def _changes(self) -> list[tuple[_Cell, Any, Any, Any]]:
        cells = [cell for cell in self._cells.values() if not cell.is_same()]
        return [(cell, *change) for cell in cells for change in cell.changes()]

    def _take_back(self, changed: list[tuple[_Cell, Any, Any, Any]]) -> None:
        for cell, key, before, _ in changed:
            cell.put(key, before)
        for cell, key, value in reversed(self._touched):
            cell.put(key, value)
        for cell in {id(cell): cell for cell, *_ in (*changed, *self._touched)}.values():
            cell.read()
        self._touched = []
        for held in self._held.values():
            held.running = None

    def _found(self, cell: _Cell, key: Any, before: Any, now: Any, contents: Mapping[Path, Any]) -> Found:
        found = Found((cell.path, key), before, now)
        if isinstance(cell, _Whole):
            if cell.kind is _LIST or (cell.kind is _DEQUE and cell.holder.maxlen is None):
                found.items = _appended(before, now)
        elif type(now) is list or (type(now) is deque and now.maxlen is None):
            found.was_made = True
            if before is ABSENT:
                found.items = list(now)
            elif type(before) is type(now):
                found.items = _appended(contents.get((*cell.path, key), list(before)), list(now))
        return found

    def _write_of(self, held: _Held) -> Found | None:
        """What a block has written into a tensor."""
        if held.running is not None:
            running, held.running = held.running, None
            if _equal(running, held.tensor):
                return None
            place = next(((c.path, k) for c, k in held.places if k is not None and c.get(k) is running), None)
            held.is_written = True
            return None if place is None else Found(place, held.tensor, running)
        cell, key = held.places[0]
        if held.version == held.mark():
            if held.copy is None or (held.copy.nbytes > _COMPARED_BYTES and not self._is_turn_of(held)):
                return None
            if _equal(held.copy, held.tensor):
                return None
        if held.copy is None:
            self._refuse_late(held, (cell.path, key))
        if key is not None and cell.get(key) is not held.tensor:  # given another one, or assigned
            return None
        now = held.tensor.detach().clone()
        assert held.copy is not None
        held.tensor.copy_(held.copy)  # autograd counts that, should the step's graph need what was written
        held.version, held.is_written = held.mark(), True
        return Found((cell.path, key if key is not None else WHOLE), held.tensor, now)

    def _is_turn_of(self, held: _Held) -> bool:
        return id(held) % 7 == self._turn % 7

    def _refuse_late(self, held: _Held, place: Place) -> None:
        raise UnsupportedFeatureError(
            f"{name_of(place)} ({held.tensor.nbytes:,} bytes) was written in a training step, and was not before, or is"
            " among too many tensors that are not trained to compare all: micro-batches would write on top of each"
            " other. Write it in on_train_batch_end(), which runs once per step."
        )

    def _refuse_trained(self) -> None:
        for (name, parameter), version in zip(self._trained, self._versions, strict=True):
            if version_of(parameter) != version:
                self._refuse_write(name)
        if self._compares_trained:
            for (name, parameter), before in zip(self._trained, self._sums, strict=True):
                if checksum([parameter]) != before:
                    self._refuse_write(name)

    def _refuse_write(self, name: str) -> None:
        raise UnsupportedFeatureError(
            f"{name} is trained, and was written while a micro-batch was computed: each micro-batch would write it again,"
            " on top of the others. Decay or clamp weights in on_train_batch_end() or on_before_zero_grad(), which run"
            " once per step; initialise what depends on data, as the first call of an ActNorm, by one call of the module"
            " before fit()."
        )

    # ------------------------------------------------------------------ outside of steps

    def contents(self) -> list[tuple[Any, Any]]:
        """What the cells hold, for :meth:`restore`."""
        return [(cell, cell.content) for cell in self._cells.values()]

    def restore(self, contents: list[tuple[Any, Any]]) -> None:
        """The cells hold again what :meth:`contents` returned."""
        for cell, content in contents:
            if isinstance(cell, _Whole):
                if not cell.kind.same(cell.holder, content):
                    cell.put(WHOLE, content)
            else:
                now = cell._dict
                for key in [*content, *(key for key in now if key not in content and key not in cell._hidden)]:
                    if now.get(key, ABSENT) is not content.get(key, ABSENT):
                        cell.put(key, content.get(key, ABSENT))
            cell.read()


def _appended(before: list[Any], now: list[Any]) -> list[Any] | None:
    longer = len(now) > len(before) and all(map(is_, before, now))
    return now[len(before) :] if longer else None
