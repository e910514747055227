"""Tracks what a block of user code changes in a module, and undoes it.

Concept: the tree is made of *cells*, objects that hold values: the tables of each module (attributes, buffers,
parameters, children), and in them dicts, lists, deques, sets, arrays, generators of random numbers, and objects of
plain attributes. A *place* is a cell and a key in it, or the whole cell where its order counts. A :class:`ValueTree`
knows what each cell holds before a block of the user's code; afterwards it compares, by identity, plain values by
equality. Cells are written in place, so all that refer to one see the same.

A tensor is a value, not a cell: backward may need the very one that a forward has left. So a tensor that blocks write
has a copy in its places while a block runs, and comes back to them. In the first steps after a tensor was found it has
a copy and is compared; later autograd's number of writes shows changes, and of small tensors the bits. *Trained*
parameters may not be written at all.

Must not know: steps, micro-batches, workers.
"""

from __future__ import annotations

import math
import pickle
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from operator import attrgetter, is_
from typing import Any, NamedTuple, TypeAlias

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader
from torchmetrics import Metric

from lightning_recycle.errors import UnsupportedFeatureError
from lightning_recycle.randomness import GENERATORS
from lightning_recycle.runtime.stage import fully_sharded_modules
from lightning_recycle.session.object_attributes import (
    INTERNAL_ATTRIBUTES,
    MODULE_TABLES,
    PROCESS_BOUND_TYPES,
    is_node,
    is_own,
    slots_of,
    vars_of,
)
from lightning_recycle.tensor_memory import checksum, is_sharded, memory_address
from lightning_recycle.torch_internals import (
    NormBase,
    buffers_of,
    fsdp_places,
    modules_of,
    parameters_of,
    version_of,
    versions_of,
)

CellPath: TypeAlias = tuple[Any, ...]
"""The name of a module, one of its tables, and the keys that lead from there to a cell."""

CellKey: TypeAlias = tuple[CellPath, Any]
"""A *place*: the path of a cell, and a key in it or WHOLE."""

WHOLE = "<whole>"


class Absent(Enum):
    """Value of a place that holds nothing; the same object in all processes."""

    ABSENT = "absent"


ABSENT = Absent.ABSENT

_requires_grad = attrgetter("requires_grad")  # by map(): no frame for each of the parameters
_ATTRIBUTES, _BUFFERS, _PARAMETERS, _CHILDREN = "", "buffers", "parameters", "children"
_ATOMS = (bool, int, float, complex, str, bytes, type(None))
_TENSOR_TYPES = (Tensor, nn.Parameter, nn.Buffer)
_OPAQUE_TYPES = (*PROCESS_BOUND_TYPES, DataLoader, pl.LightningDataModule, pl.Callback, nn.Module)
_STATEFUL_PACKAGES = ("torch.ao.", "torchmetrics.")  # packages whose modules have statistics or states of their own
_STATISTICS = ("running_mean", "running_var")
_MODULE_INTERNALS = frozenset(vars(nn.Module())) - {"training"}  # hooks, tables
_ROOT_INTERNALS = (INTERNAL_ATTRIBUTES | frozenset(MODULE_TABLES)) - {"training"}

_MAX_CELLS = 10_000
_MAX_ITEMS = 1_000  # items of a container: those of longer ones are not looked into
_WATCHED_STEPS = 3  # in which all tensors are compared, after they were found
_WATCHED_BYTES = 256 * 1024 * 1024  # that have copies then, besides twice the trained parameters
_ALWAYS_COPIED_BYTES = 4 * 1024 * 1024  # of a tensor that has a copy later, too
_ALWAYS_COMPARED_BYTES = 4096  # of a tensor that is compared each time; others in turn


# ---------------------------------------------------------------------- cells


class _CellAccess(NamedTuple):
    """Functions that read, restore and compare the content of a cell as one value."""

    read: Callable[[Any], Any]
    write: Callable[[Any, Any], None]
    equals: Callable[[Any, Any], bool]


def _refill(container: Any, items: Any) -> None:
    container.clear()
    (container.update if isinstance(container, (dict, set)) else container.extend)(items)


def _same_items(container: Any, items: list[Any]) -> bool:
    return len(container) == len(items) and all(map(is_, container, items))


def _same_order(container: Any, items: list[Any]) -> bool:
    pairs = zip(container.items(), items, strict=False)
    return len(container) == len(items) and all(key == k and value is v for (key, value), (k, v) in pairs)


def _by_state(read: Callable[[Any], Any], write: Callable[[Any, Any], None]) -> _CellAccess:
    return _CellAccess(
        lambda container: pickle.dumps(read(container)),
        lambda container, data: write(container, pickle.loads(data)),
        lambda container, data: pickle.dumps(read(container)) == data,
    )


_ITEMS = _CellAccess(list, _refill, _same_items)
_ACCESS_BY_TYPE: tuple[tuple[type[Any], _CellAccess], ...] = (
    (list, _ITEMS),
    (deque, _ITEMS),
    (OrderedDict, _CellAccess(lambda container: list(container.items()), _refill, _same_order)),
    (set, _CellAccess(set, _refill, lambda container, items: bool(container == items))),
    (np.ndarray, _CellAccess(np.copy, np.copyto, lambda a, b: a.shape == b.shape and a.tobytes() == b.tobytes())),
    *((base, _by_state(read, write)) for base, read, write in GENERATORS),
)


def _access_of(value: Any) -> _CellAccess | None:
    if isinstance(value, np.ndarray) and (value.dtype.hasobject or not value.flags.writeable):
        return None
    return next((access for base, access in _ACCESS_BY_TYPE if isinstance(value, base)), None)


class _WholeCell:
    """A cell compared as a whole: list, deque, set, array, OrderedDict or generator."""

    def __init__(self, path: CellPath, container: Any, access: _CellAccess) -> None:
        self.path, self.container, self.access = path, container, access
        self.all_values: list[Any] = []
        self.remember()

    def is_same(self) -> bool:
        return self.access.equals(self.container, self.content)

    def remember(self) -> None:
        self.content = self.access.read(self.container)

    def changes(self) -> Iterator[tuple[Any, Any, Any]]:
        """(key, value before, value now) of differences to ``content``."""
        yield WHOLE, self.content, self.access.read(self.container)

    def put(self, key: Any, value: Any) -> None:
        if key == WHOLE:
            self.access.write(self.container, value)
        else:
            self.container[key] = value

    def get(self, key: Any) -> Any:
        if key == WHOLE:
            return self.access.read(self.container)
        return self.container[key] if isinstance(self.container, dict) or key < len(self.container) else ABSENT

    def items(self) -> Iterable[tuple[Any, Any]]:
        if self.access is _ITEMS:
            return enumerate(self.content)
        return self.content if isinstance(self.container, dict) else ()


class _KeyedCell:
    """A cell of values by key: a dict, or the attributes of an object.

    ``content``: the values when it was last read; ``all_values``: with the hidden ones.
    """

    content: dict[Any, Any]
    _keys: set[Any]

    def __init__(self, path: CellPath, container: Any, hidden: frozenset[str] = frozenset()) -> None:
        self.path, self.container, self._hidden = path, container, hidden
        self._slots = [] if isinstance(container, (dict, nn.Module)) else slots_of(type(container))
        self.remember()

    @property
    def values(self) -> dict[Any, Any]:
        """All present values: the dict itself, or a new one where there are slots."""
        if isinstance(self.container, dict):
            return self.container
        values: dict[Any, Any] = getattr(self.container, "__dict__", {})
        if not self._slots:
            return values
        container = self.container
        return {**values, **{name: getattr(container, name) for name in self._slots if hasattr(container, name)}}

    def is_same(self) -> bool:
        values = self.container if isinstance(self.container, dict) else self.values
        if values.keys() == self._keys and all(map(is_, map(values.get, self.content), self.content.values())):
            return True
        if any(True for _ in self.changes()):
            return False
        self._keys = set(values)  # hidden ones differ
        return True

    def remember(self) -> None:
        values = self.values
        self.all_values, self._keys = list(values.values()), set(values)
        self.content = {key: value for key, value in values.items() if key not in self._hidden}

    def changes(self) -> Iterator[tuple[Any, Any, Any]]:
        now, before = self.values, self.content
        for key in [*before, *(key for key in now if key not in before and key not in self._hidden)]:
            new, old = now.get(key, ABSENT), before.get(key, ABSENT)
            if new is not old and not _equal_atoms(new, old):
                yield key, old, new

    def put(self, key: Any, value: Any) -> None:
        if key in self._slots:
            if value is not ABSENT:
                object.__setattr__(self.container, key, value)
            elif hasattr(self.container, key):
                object.__delattr__(self.container, key)
            return
        own = self.container if isinstance(self.container, dict) else vars_of(self.container)
        if value is ABSENT:
            own.pop(key, None)
        else:
            own[key] = value

    def get(self, key: Any) -> Any:
        return self.values.get(key, ABSENT)

    def items(self) -> Iterable[tuple[Any, Any]]:
        return self.content.items()


_Cell: TypeAlias = _WholeCell | _KeyedCell


def _equal_atoms(a: Any, b: Any) -> bool:
    if type(a) is not type(b) or not isinstance(a, _ATOMS):
        return False
    return a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


def name_of(cell_key: CellKey) -> str:
    """The name of a place, for people."""
    (module, _, *keys), key = cell_key
    parts = [module, *map(str, keys), "" if key == WHOLE else str(key)]
    return ".".join(part for part in parts if part)


@dataclass
class CellChange:
    """A place with another value than before.

    ``items``: if a list or deque was only appended to, the new items; else None.
    """

    cell_key: CellKey
    before: Any
    now: Any
    items: list[Any] | None = None


def _appended_items(before: Any, now: Any) -> list[Any] | None:
    """The items of ``now`` after those of ``before``; None if others come first."""
    longer = len(now) > len(before) and all(map(is_, before, now))
    return list(now)[len(before) :] if longer else None


def _can_append(value: Any) -> bool:
    return type(value) is list or (isinstance(value, deque) and value.maxlen is None)


# ---------------------------------------------------------------------- tensors in places


@dataclass
class _TrackedTensor:
    """An untrained tensor in the tree, and what is known of writes to it.

    Attributes:
        places: the cells and keys that hold it.
        write_count: autograd's number of writes to it when its state was last accepted.
        watch_steps: the number of steps in which its content is still compared.
        is_written: whether a block has written it.
        is_in_tuple: whether a tuple holds it, which cannot hold a stand-in.
        shares_memory: whether another tensor is a view of its memory.
        copy: its accepted content; None if none is kept.
        stand_in: the copy that is in its places while a block runs.
    """

    tensor: Tensor
    places: list[tuple[_Cell, Any]]
    write_count: int
    watch_steps: int = _WATCHED_STEPS
    is_written: bool = False
    is_in_tuple: bool = False
    shares_memory: bool = False
    copy: Tensor | None = None
    stand_in: Tensor | None = None

    @property
    def cell_key(self) -> CellKey:
        cell, key = self.places[0]
        return cell.path, key

    def accept_state(self) -> None:
        """Makes the present state the one to compare with."""
        self.write_count, self.copy = _count_writes(self.tensor), None


def _count_writes(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else version_of(tensor)


def _clone(entry: _TrackedTensor, storages: dict[int, Any]) -> Tensor:
    """A copy; ``storages``: those copied so far, so that copies of views share memory."""
    tensor = entry.tensor
    if entry.shares_memory:
        storage = tensor.untyped_storage()
        copied = storages.setdefault(storage.data_ptr(), None) or storage.clone()
        storages[storage.data_ptr()] = copied
        copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        copy.set_(copied, tensor.storage_offset(), tensor.size(), tensor.stride())
    else:
        copy = tensor.detach().clone()
    if type(tensor) is nn.Parameter:
        copy = nn.Parameter(copy, requires_grad=False)
        vars(copy).update(vars(tensor))
    elif type(tensor) is nn.Buffer:
        copy = nn.Buffer(copy, persistent=tensor.persistent)
    return copy.requires_grad_(tensor.requires_grad)


def _equal_tensors(a: Tensor, b: Tensor) -> bool:
    """Equality of tensors; a NaN equals one with the same bits."""
    if a.dtype != b.dtype or a.device != b.device or a.shape != b.shape:
        return False
    return torch.equal(a, b) or ((a.is_floating_point() or a.is_complex()) and checksum([a]) == checksum([b]))


# ---------------------------------------------------------------------- the tree


class ValueTree:
    """Finds what a block of user code changes in ``module``, and undoes it.

    Use: :meth:`absorb`, :meth:`begin`, run the block, :meth:`end` or :meth:`abandon`.

    Args:
        internal: names of attributes of the module itself that are not the user's.
        with_submodules: whether all submodules are in the tree; else only attributes and buffers of the module itself.

    Attributes:
        statistics: running statistics of normalising layers, by place.
    """

    def __init__(self, module: pl.LightningModule, internal: Iterable[str] = (), with_submodules: bool = True) -> None:
        self._module, self._with_submodules = module, with_submodules
        self._hidden = _ROOT_INTERNALS | frozenset(internal)
        self._cells: dict[CellPath, _Cell] = {}
        self._paths: dict[int, CellPath] = {}
        self._single_cells: list[_Cell] = []
        self._module_tables: list[_KeyedCell] = []  # of modules, but for those in ``_single_cells``: compared at once
        self._table_dicts: list[dict[Any, Any]] = []  # of ``_module_tables``
        self._table_values: list[Any] = []  # of ``_table_dicts`` when they were last read; empty: to be collected
        self._tracked: dict[int, _TrackedTensor] = {}
        self.statistics: dict[CellKey, Tensor] = {}
        self._trained: dict[str, nn.Parameter] = {}
        self._trained_write_counts: list[int] = []  # of ``_trained`` when the block began
        self._trained_watch_steps = _WATCHED_STEPS  # steps in whose first block the content of ``_trained`` is compared
        self._trained_checksums: list[bytes] = []  # of ``_trained`` when such a block began
        # ``_compares_trained``: whether the present block, or else the next one, is such a block
        self._copies_fit_budget = self._tree_is_stale = self._compares_trained = True
        self._places_are_stale = False  # whether tensors may have left their places since they were looked up there
        self._replaced: list[tuple[_Cell, Any, Any]] = []  # (cell, key, value) to be put back
        self._block_keys: list[CellKey] = []
        self._unreported_keys: list[CellKey] = []  # changed, to be returned by the next :meth:`absorb`
        self._num_blocks = 0

    # ------------------------------------------------------------------ finding cells

    def _rebuild(self) -> None:
        """Builds the tree again: cells, tensors that are not trained, and trained ones.

        Tensors that were in the tree before keep their record of writes. ``_single_cells`` are compared one by one,
        the values of ``_module_tables`` together.
        """
        self._cells, self._paths, self._tree_is_stale = {}, {}, False
        tracked_before, self._tracked = self._tracked, {}
        pending: list[tuple[CellPath, Any]] = []
        gathered: dict[nn.Module, set[str]] = defaultdict(set)  # by FSDP2, in a forward that may have begun
        modules = [*self._walk_modules("", self._module, set())]
        for module in fully_sharded_modules(module for _, module in modules):
            for owner, parameter in fsdp_places(module):
                gathered[owner].add(parameter)
        for name, module in modules:
            hidden = self._hidden if module is self._module else _MODULE_INTERNALS
            self._add_cell(_KeyedCell((name, _ATTRIBUTES), module, hidden), pending)
            self._add_cell(_KeyedCell((name, _BUFFERS), buffers_of(module)), pending)
            if self._with_submodules:
                parameters = _KeyedCell((name, _PARAMETERS), parameters_of(module), frozenset(gathered[module]))
                self._add_cell(parameters, pending)
                self._add_cell(_KeyedCell((name, _CHILDREN), modules_of(module)), [])
            self._paths[id(module)] = (name,)
        root_cells = [*self._cells.values()][:2]
        self._module_tables = [cell for cell in [*self._cells.values()][2:] if isinstance(cell, _KeyedCell)]
        while pending and len(self._cells) < _MAX_CELLS:
            path, value = pending.pop()
            if id(value) in self._paths:
                continue
            if (access := _access_of(value)) is not None:
                self._add_cell(_WholeCell(path, value, access), pending)
            elif isinstance(value, tuple):
                self._paths[id(value)] = ()
                pending += [((*path, number), item) for number, item in enumerate(value[:_MAX_ITEMS])]
            elif isinstance(value, dict) or (
                not isinstance(value, _OPAQUE_TYPES) and is_node(value) and not is_own(value)
            ):
                self._add_cell(_KeyedCell(path, value), pending)
        self.statistics = {}
        for (name, *table), cell in self._cells.items():
            for key, value in cell.items() if table == [_BUFFERS] else ():
                is_statistic = key in _STATISTICS or isinstance(self._module.get_submodule(name), NormBase)
                if is_statistic and id(value) in self._tracked and value.is_floating_point():
                    self.statistics[cell.path, key] = value
                    self._tracked[id(value)].is_written = True  # by a way that nothing counts
        self._single_cells = [*root_cells, *[*self._cells.values()][2 + len(self._module_tables) :]]
        self._table_values, self._table_dicts = [], [cell.values for cell in self._module_tables]
        tables = [(cell.path[0], cell.items()) for cell in self._module_tables if cell.path[1] == _PARAMETERS]
        named = {id(p): (f"{path}.{name}" if path else name, p) for path, items in tables for name, p in items}
        trained = {n: p for n, p in named.values() if p is not None and p.requires_grad and not is_lazy(p)}
        trained = {name: parameter for name, parameter in trained.items() if not is_sharded(parameter)}
        if [*map(id, trained.values())] != [*map(id, self._trained.values())]:
            self._trained, self._trained_watch_steps, self._compares_trained = trained, _WATCHED_STEPS, True
        addresses = {memory_address(parameter) for parameter in trained.values()} - {0}
        self._tracked = {
            i: entry for i, entry in self._tracked.items() if memory_address(entry.tensor) not in addresses
        }
        first_by_memory: dict[int, _TrackedTensor] = {}
        for key, entry in self._tracked.items():
            first_view = first_by_memory.setdefault(memory_address(entry.tensor) or key, entry)
            entry.shares_memory = first_view.shares_memory = first_view is not entry or first_view.shares_memory
            if (earlier := tracked_before.get(key)) is not None and earlier.tensor is entry.tensor:
                entry.watch_steps, entry.is_written = earlier.watch_steps, earlier.is_written or entry.is_written
        nbytes = sum(entry.tensor.nbytes for entry in self._tracked.values())
        self._copies_fit_budget = nbytes <= _WATCHED_BYTES + 2 * sum(parameter.nbytes for parameter in trained.values())

    def _walk_modules(self, prefix: str, module: nn.Module, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
        seen.add(id(module))
        yield prefix, module
        for name, child in modules_of(module).items() if self._with_submodules else ():
            if child is None or id(child) in seen or isinstance(child, Metric) or is_own(child):
                continue
            if not type(child).__module__.startswith(_STATEFUL_PACKAGES):
                yield from self._walk_modules(f"{prefix}.{name}" if prefix else name, child, seen)

    def _add_cell(self, cell: _Cell, pending: list[tuple[CellPath, Any]]) -> None:
        """Adds ``cell`` and its tensors; ``pending`` gets the values to look into."""
        self._cells[cell.path] = cell
        self._paths.setdefault(id(cell.container), cell.path)
        items = list(cell.items())
        for key, item in items if len(items) <= _MAX_ITEMS else ():
            if str(key).startswith("__composable_api"):  # FSDP's, whose memory comes and goes
                continue
            if isinstance(item, tuple):
                for leaf in item[:_MAX_ITEMS]:
                    self._track(leaf, cell, key, is_in_tuple=True)
            self._track(item, cell, key)
            if not isinstance(item, (*_ATOMS, Tensor)):
                pending.append(((*cell.path, key), item))

    def _track(self, tensor: Any, cell: _Cell, key: Any, is_in_tuple: bool = False) -> None:
        """Tracks ``tensor`` at ``key`` of ``cell``, unless it is none, or trained."""
        if type(tensor) not in _TENSOR_TYPES or is_lazy(tensor) or is_sharded(tensor) or tensor.grad_fn is not None:
            return  # what belongs to the graph of a step is not written
        if tensor.layout is torch.strided and tensor.untyped_storage().nbytes() < tensor.nbytes:
            return  # a number that stands for many, or memory that was freed
        if not tensor.requires_grad:  # a leaf that does is trained, by whomever
            entry = self._tracked.setdefault(id(tensor), _TrackedTensor(tensor, [], _count_writes(tensor)))
            entry.places.append((cell, key))
            entry.is_in_tuple |= is_in_tuple

    # ------------------------------------------------------------------ places

    def has(self, cell_key: CellKey) -> bool:
        """Whether the tree has that cell: other stages have other modules."""
        if cell_key[0] not in self._cells and self._tree_is_stale:
            self._unreported_keys = self.absorb()
        return cell_key[0] in self._cells

    def get(self, cell_key: CellKey) -> Any:
        """The value of a place; ABSENT if it has none."""
        return self._cells[cell_key[0]].get(cell_key[1])

    @torch.no_grad()
    def put(self, cell_key: CellKey, value: Any) -> None:
        """Puts ``value`` into a place; writes into the tensor there if possible."""
        cell, key = self._cells[cell_key[0]], cell_key[1]
        old = cell.get(key)
        entry = self._tracked.get(id(old)) if isinstance(old, Tensor) and isinstance(value, Tensor) else None
        if entry is not None and not old.is_inference() and old.shape == value.shape and old.dtype == value.dtype:
            old.data.copy_(value)
            entry.accept_state()
        elif isinstance(old, nn.Parameter) and isinstance(value, Tensor):
            old.data = value.detach()
        else:
            cell.put(key, value)
            self._remember_cell(cell)
            self._track(value, cell, key)
            self._places_are_stale = True
            self._tree_is_stale |= not isinstance(value, (*_ATOMS, Tensor))

    def reference(self, value: Any) -> CellPath | None:
        """Path of a module or cell, else None; TypeError for a module not in the tree."""
        path = self._paths.get(id(value))
        if path and self.referent(path) is value:
            return path
        if isinstance(value, nn.Module):
            raise TypeError(f"a {type(value).__name__} is made in the step; make it in __init__()")
        return None

    def referent(self, path: CellPath) -> Any:
        """The module or cell of :meth:`reference`."""
        return self._module.get_submodule(path[0]) if len(path) == 1 else self._cells[path].container

    # ------------------------------------------------------------------ a block of the user's code

    def absorb(self) -> list[CellKey]:
        """Makes the present state the one that a block's changes are compared with.

        Called before a block. Returns the places that other code has changed since: new values in cells, and tensors
        written in place. Builds the tree again if it has new containers, or weights were frozen or thawed; forgets
        tensors that are in no place any more.
        """
        changed, self._unreported_keys = self._unreported_keys, []
        changed_cells = self._changed_cells()
        places_moved, self._places_are_stale = self._places_are_stale or bool(changed_cells), False
        for cell in changed_cells:
            for key, _, value in list(cell.changes()):
                changed.append((cell.path, key))
                for item in value if isinstance(cell, _WholeCell) and cell.access is _ITEMS else (value,):
                    if isinstance(item, Tensor) and key != WHOLE:
                        self._track(item, cell, key)
                    self._tree_is_stale |= not isinstance(item, (*_ATOMS, Tensor)) and id(item) not in self._paths
            self._remember_cell(cell)
        frozen = [entry.tensor for entry in self._tracked.values() if type(entry.tensor) is nn.Parameter]
        trained = self._trained.values()
        if self._tree_is_stale or any(map(_requires_grad, frozen)) or not all(map(_requires_grad, trained)):
            self._rebuild()
        for entry in list(self._tracked.values()):
            if places_moved and not entry.is_in_tuple:  # else the tuple is what changes
                entry.places = [(cell, key) for cell, key in entry.places if cell.get(key) is entry.tensor]
            if not entry.places:
                del self._tracked[id(entry.tensor)]
            elif entry.write_count != _count_writes(entry.tensor):
                changed += [(cell.path, key) for cell, key in entry.places]
                entry.accept_state()
        return changed

    def _changed_cells(self) -> list[_Cell]:
        """The cells that differ from when they were last read."""
        changed = [cell for cell in self._single_cells if not cell.is_same()]
        if not self._table_values:
            self._table_values = [*chain.from_iterable(cell.all_values for cell in self._module_tables)]
        is_same = sum(map(len, self._table_dicts)) == len(self._table_values) and all(
            map(is_, chain.from_iterable(map(dict.values, self._table_dicts)), self._table_values)
        )
        return changed if is_same else [*changed, *(cell for cell in self._module_tables if not cell.is_same())]

    def _remember_cell(self, cell: _Cell) -> None:
        cell.remember()
        self._table_values = []

    def begin_step(self) -> None:
        """Begins a step: counts down the steps in which tensors are compared."""
        for entry in self._tracked.values():
            entry.watch_steps = max(0, entry.watch_steps - 1)
            entry.copy = None  # ``.data`` may have been written, which nothing counts
        self._trained_watch_steps = max(0, self._trained_watch_steps - 1)
        self._compares_trained = self._trained_watch_steps > 0

    @torch.no_grad()
    def begin(self, values: Mapping[CellKey, Any]) -> None:
        """Begins a block, with ``values`` put into their places; after :meth:`absorb`.

        :meth:`end` returns what the block has made of each.
        """
        self._replaced, self._block_keys = [], list(values)
        replaced: set[int] = set()
        storages: dict[int, Any] = {}
        for cell_key, value in values.items():
            cell, key = self._cells[cell_key[0]], cell_key[1]
            entry = self._tracked.get(id(cell.get(key)))
            replaced.add(id(entry))
            self._replace_in_places([(cell, key)] if entry is None or entry.is_in_tuple else entry.places, value)
        for entry in self._tracked.values():
            is_watched = entry.is_written or (entry.watch_steps > 0 and self._copies_fit_budget)
            if id(entry) in replaced:
                entry.copy = None
            elif is_watched and self._with_submodules and not entry.is_in_tuple:
                entry.stand_in = _clone(entry, storages)
                self._replace_in_places(entry.places, entry.stand_in)
            elif entry.copy is None and (is_watched or entry.tensor.nbytes <= _ALWAYS_COPIED_BYTES):
                entry.copy = entry.tensor.detach().clone()
        for cell in {id(cell): cell for cell, _, _ in self._replaced}.values():
            self._remember_cell(cell)
        self._trained_write_counts = versions_of(self._trained.values())
        if self._compares_trained:
            self._trained_checksums = self._compute_checksums()

    def _compute_checksums(self) -> list[bytes]:
        return [checksum([parameter]) for parameter in self._trained.values()]

    def _replace_in_places(self, places: Iterable[tuple[_Cell, Any]], value: Any) -> None:
        """Puts ``value`` into ``places`` until the block is over."""
        for cell, key in places:
            self._replaced.append((cell, key, cell.get(key)))
            cell.put(key, value)

    @torch.no_grad()
    def end(self) -> list[CellChange]:
        """Ends the block; returns its changes, and one for each place of :meth:`begin`.

        All places hold again what they held before :meth:`begin`.
        """
        changed, changes = self._changes()
        for cell_key in self._block_keys:
            changes.setdefault(cell_key, CellChange(cell_key, ABSENT, self.get(cell_key))).items = None
        for entry in self._tracked.values():
            if (write := self._take_write(entry)) is not None:
                changes[write.cell_key] = write
        self._undo(changed)
        now: list[Any] = versions_of(self._trained.values())
        before: list[Any] = self._trained_write_counts
        if now == before and self._compares_trained:
            now, before, self._compares_trained = self._compute_checksums(), self._trained_checksums, False
        if now != before:
            name = next(name for name, a, b in zip(self._trained, now, before, strict=True) if a != b)
            raise UnsupportedFeatureError(
                f"{name} requires a gradient, and was written while a micro-batch was computed: each micro-batch would"
                " write it, on top of the others. Decay or clamp weights in on_train_batch_end() or"
                " on_before_zero_grad(), which run once per step; initialise what depends on data, as the first call of"
                " an ActNorm does, by one call of the module before fit(); give what is not trained, such as a target"
                " network, requires_grad_(False)."
            )
        self._num_blocks += 1
        return list(changes.values())

    def abandon(self) -> None:
        """Ends the block and undoes its changes, as far as copies allow.

        Writes stay to trained parameters, to tensors of which no copy is kept, and by ``.data`` to those without a
        stand-in.
        """
        self._undo(self._changes()[0])
        self._compares_trained = False
        for entry in self._tracked.values():
            entry.stand_in = None
            if entry.copy is not None and entry.write_count != _count_writes(entry.tensor):
                self._rewrite(entry, entry.copy)

    def changes_outside(self, keeps: Callable[[CellChange], bool]) -> list[CellChange]:
        """Changes by other code since :meth:`absorb`.

        Undoes new values in cells unless ``keeps`` is true of them; writes into tensors are returned, not undone.
        """
        changed, changes = self._changes()
        for cell, key, before, _ in changed:
            if not keeps(changes[cell.path, key]):
                cell.put(key, before)
        # Nothing counts writes to these.
        written = [entry.cell_key for entry in self._tracked.values() if entry.tensor.is_inference()]
        for cell_key in (*self.absorb(), *written):
            changes.setdefault(cell_key, CellChange(cell_key, self.get(cell_key), self.get(cell_key)))
        return list(changes.values())

    def _changes(self) -> tuple[list[tuple[_Cell, Any, Any, Any]], dict[CellKey, CellChange]]:
        """(cell, key, value before, value now) of all changes in cells; the same by place."""
        changed = [(cell, *change) for cell in self._changed_cells() for change in cell.changes()]
        return changed, {(change[0].path, change[1]): self._change_of(*change) for change in changed}

    def _undo(self, changed: list[tuple[_Cell, Any, Any, Any]]) -> None:
        """Undoes ``changed``, and the replacements made when the block began."""
        for cell, key, before, _ in changed:
            cell.put(key, before)
        for cell, key, value in reversed(self._replaced):
            cell.put(key, value)
        for cell in {id(cell): cell for cell, *_ in (*changed, *self._replaced)}.values():
            self._remember_cell(cell)
        self._replaced = []

    def _change_of(self, cell: _Cell, key: Any, before: Any, now: Any) -> CellChange:
        items = None
        if key == WHOLE and _can_append(cell.container):
            items = _appended_items(before, now)
        elif key != WHOLE and _can_append(now) and (before is ABSENT or type(before) is type(now)):
            old_cell = self._cells.get((*cell.path, key))
            items = _appended_items(() if before is ABSENT else before if old_cell is None else old_cell.content, now)
        return CellChange((cell.path, key), before, now, items)

    def _take_write(self, entry: _TrackedTensor) -> CellChange | None:
        """Undoes the block's write to a tensor, and returns it; None if there is none.

        A stand-in is compared with the tensor; without a stand-in, the tensor with its copy. Raises
        UnsupportedFeatureError for a write that cannot be undone, or repeated elsewhere.
        """
        stand_in, entry.stand_in = entry.stand_in, None
        if stand_in is not None:
            places = [(cell.path, key) for cell, key in entry.places if cell.get(key) is stand_in]
            if type(stand_in) is nn.Parameter and stand_in.requires_grad:
                raise UnsupportedFeatureError(
                    f"{name_of(entry.cell_key)}.requires_grad was set in a training step."
                    " Set it before, in a hook such as on_train_batch_start(), which all workers run."
                )
            if not places or _equal_tensors(stand_in, entry.tensor):
                return None
            entry.is_written = True
            return CellChange(places[0], entry.tensor, stand_in)
        is_counted = entry.write_count != (write_count := _count_writes(entry.tensor))
        is_in_turn = id(entry) % _COMPARE_EVERY == self._num_blocks % _COMPARE_EVERY
        is_compared_now = is_in_turn or entry.tensor.nbytes <= _ALWAYS_COMPARED_BYTES
        if not is_counted and (entry.copy is None or not is_compared_now):
            return None
        if entry.copy is None:
            raise UnsupportedFeatureError(
                f"{name_of(entry.cell_key)} was written in a training step, and not in the first ones, or is among too"
                " many tensors that are not trained to compare all: micro-batches would write on top of each other."
                " Write it in on_train_batch_end(), which runs once per step."
            )
        if _equal_tensors(entry.copy, entry.tensor):
            entry.write_count = write_count
            return None
        if entry.is_in_tuple:
            raise UnsupportedFeatureError(
                f"A tensor in the tuple {name_of(entry.cell_key)} was written in a training step. Assign a new"
                " tuple, or keep it in a list."
            )
        now = entry.tensor.detach().clone()
        self._rewrite(entry, entry.copy)
        entry.is_written = True
        return CellChange(entry.cell_key, entry.tensor, now)

    def _rewrite(self, entry: _TrackedTensor, copy: Tensor) -> None:
        entry.tensor.copy_(copy)  # autograd counts that, should the step's graph need what was written
        entry.write_count = _count_writes(entry.tensor)

    # ------------------------------------------------------------------ outside of blocks

    def tensors(self) -> list[Tensor]:
        """The tensors in the tree that are not trained, and may be written."""
        self.absorb()
        return [entry.tensor for entry in self._tracked.values() if entry.write_count >= 0]

    def contents(self) -> list[tuple[Any, Any]]:
        """(cell, content) of all cells, for :meth:`restore`."""
        self.absorb()
        return [(cell, cell.content) for cell in self._cells.values()]

    def restore(self, contents: list[tuple[Any, Any]]) -> None:
        for cell, content in contents:
            if cell.content is not content or not cell.is_same():
                cell.content, cell.all_values = content, []
                for key, before, _ in list(cell.changes()):
                    cell.put(key, before)
                self._remember_cell(cell)
                self._places_are_stale = True


_COMPARE_EVERY = 7  # blocks, of which tensors take turns to be compared
