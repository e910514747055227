"""The graph of the user's objects, carried from one process to another.

Both processes have the same *roots* (the module, callbacks, the data module, DataLoaders). Every object with plain
attributes that is reached from them is a *node*, named by its path. A pack holds the attributes of all nodes in one
pickle: references between nodes are paths, tensors are listed beside it, and *anchors* (the Trainer, loggers) are names
for the receiver's own. The receiver writes into its own nodes, lists, dicts, tensors, generators and variables of local
functions, and makes only what it lacks, so references to its objects stay valid.

Contract: the sender's objects are not changed. An attribute in which something cannot be pickled stays behind as a
whole, and the receiver keeps its own. A tensor or array of over a megabyte that has not changed since the run began is
not sent.
"""

from __future__ import annotations

import io
import os
import pickle
import zlib
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import repeat
from types import FunctionType, MappingProxyType, MethodType
from typing import Any, TypeAlias
from weakref import ref

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.hooks import RemovableHandle
from torchmetrics import Metric, MetricCollection
from torchmetrics.wrappers import MetricTracker
from typing_extensions import override

from lightning_recycle.data.dataloaders import is_stream, yields_batches
from lightning_recycle.data.step_sources import StepLoader
from lightning_recycle.devices import DeviceThread, is_accelerator
from lightning_recycle.errors import ReCycleError
from lightning_recycle.model.layers import weights_of
from lightning_recycle.pickling import MainModule, MainPickler, content_of, parametrize_class, reduced_array
from lightning_recycle.randomness import GENERATORS
from lightning_recycle.session.lightning_internals import (
    combined_loaders,
    fit_loops,
    lightning_optimizers,
    loaders_of,
    read_loaders,
)
from lightning_recycle.session.object_attributes import (
    MISSING,
    MODULE_TABLES,
    PROCESS_BOUND_TYPES,
    TableKey,
    attributes_of,
    class_of,
    function_with,
    hooks_of,
    is_bound_to_process,
    is_local,
    is_node,
    is_weight,
    put_hooks,
    table_of,
    tables_of,
    tensors_of,
    vars_of,
)
from lightning_recycle.tensor_memory import is_sharded, local_part, memory_address, to_cpu
from lightning_recycle.torch_internals import tree_map, version_of

Path: TypeAlias = str
"""A root and the attributes, keys and indices that lead from it to an object, such as ``module.net[0].p``."""

_LARGE = 1_000_000  # bytes
_PIECE = 16 * 1024 * 1024  # bytes that one thread reads
_LOOKS_INTO = 10_000  # items of a container: those of longer ones are data
_CONTAINERS = (list, tuple, dict, OrderedDict, defaultdict, deque)
_METRICS = {Metric, MetricCollection, MetricTracker}  # isinstance() asks each subclass of an abstract class
_HOOKS = "<hooks>"  # the name of a node's hook tables among its attributes
_TABLES = (*(f".{name}" for name in MODULE_TABLES), f".{_HOOKS}", "callbacks.callbacks")  # they are written in place


@dataclass(frozen=True)
class ObjectPack:
    """A graph's state: a pickle of nodes, tensors by index, paths of unchanged data."""

    data: bytes
    tensors: list[Tensor]
    unchanged_paths: frozenset[Path] = frozenset()

    def on_cpu(self) -> ObjectPack:
        return replace(self, tensors=[to_cpu(tensor) for tensor in self.tensors])


class LargeData:
    """Large tensors and arrays at the start of a run, to find the unchanged later."""

    def __init__(self, values: Mapping[Path, Any]) -> None:
        self._values = dict(values)
        self._signs: dict[Path, Any] = {}
        self._reader = DeviceThread(self._read, "recycle-large-data")
        if self._values:
            self._reader.start()  # an array is read as a whole

    def _read(self) -> None:
        for path, value in self._values.items():
            self._signs[path] = _fingerprint(value)

    def unchanged(self) -> dict[int, Path]:
        """Original paths of unchanged data, by id."""
        if self._values:
            self._reader.join()
        return {id(value): path for path, value in self._values.items() if _fingerprint(value) == self._signs[path]}


class Originals:
    """What a worker's objects held when it began: tensors, arrays, lists and dicts.

    What code puts in their places is new for the receiver, too: whoever holds the old ones there keeps their values.
    """

    def __init__(self, values: Iterable[Any]) -> None:
        # Tensors and arrays may go when nothing else holds them.
        self._refs = {id(each): ref(each) if isinstance(each, (Tensor, np.ndarray)) else each for each in values}

    def __contains__(self, value: Any) -> bool:
        found = self._refs.get(id(value))
        return (found() if isinstance(found, ref) else found) is value


class ObjectGraph:
    """The objects that are reached from ``roots`` when it is made.

    Args:
        roots: the objects that both processes have, by name.
        anchors: objects that are not carried, by name, unless they are roots.
        whole: whether modules are whole in both processes: with parameters, buffers, and submodules and
            LightningModules (such as copies) that are no roots.
        skipped: paths of attributes that stay behind.
        bound: further classes of objects that belong to their process, and stay behind.
        optimizers: whether optimizers and schedulers are carried, with their states; otherwise they belong to their
            process, too, and only hooks of roots are carried.
        originals: None: all that it holds is original.

    Attributes:
        values: tensors, arrays and containers by path, other than parameters, buffers and tables of modules.
        large: tensors and arrays of over a megabyte among them.
    """

    def __init__(
        self,
        roots: Mapping[str, Any],
        anchors: Mapping[str, Any],
        whole: bool = True,
        skipped: Collection[Path] = (),
        bound: tuple[type[Any], ...] = (),
        optimizers: bool = False,
        originals: Originals | None = None,
    ) -> None:
        self._whole, self._skipped, self._optimizers = whole, frozenset(skipped), optimizers
        self._originals = originals
        self._bound = (*PROCESS_BOUND_TYPES, *bound, *(() if whole else (pl.LightningModule,)))
        self._bound += () if optimizers else (Optimizer, LRScheduler)
        self._roots = {name: value for name, value in roots.items() if value is not None}
        root_ids = set(map(id, self._roots.values()))
        self._anchors = {n: value for n, value in anchors.items() if value is not None and id(value) not in root_ids}
        self._names = {id(value): name for name, value in self._anchors.items()}
        self._nodes: dict[Path, Any] = {}
        self._paths: dict[int, Path] = {}
        self.values: dict[Path, Any] = {}
        for name, root in self._roots.items():
            self._visit(name, root)

    def _visit(self, path: Path, value: Any) -> None:
        waiting = [(path, value)]
        while waiting:
            path, value = waiting.pop()
            if id(value) not in self._names and path not in self._roots and is_bound_to_process(value):
                self._anchors[path], self._names[id(value)] = value, path
            if id(value) in self._names or id(value) in self._paths:
                continue
            if isinstance(value, (Tensor, np.ndarray)):
                if not is_weight(path) and not isinstance(value, nn.Parameter):  # torch moves none with weak references
                    self.values[path] = value
            elif path in self._roots or (is_node(value) and not isinstance(value, self._bound)):
                self._nodes[path], self._paths[id(value)] = value, path
                state = self._state(path, value)
                if isinstance(value, Optimizer):
                    state.pop("state", None)  # it is written in each step: data that stays the same is elsewhere
                waiting += [(f"{path}.{name}", item) for name, item in reversed(state.items())]
            elif type(value) in _CONTAINERS and len(value) <= _LOOKS_INTO:
                items = list(value.items() if isinstance(value, dict) else enumerate(value))
                holds_weakly = any(isinstance(item, ref) for _, item in items)  # to parameters, as torch's RNNs
                if type(value) is not tuple and not holds_weakly and not path.endswith(_TABLES):
                    self.values[path] = value
                waiting += [(f"{path}[{key!r}]", item) for key, item in reversed(items)]

    @cached_property
    def large(self) -> dict[Path, Any]:
        return {p: v for p, v in self.values.items() if isinstance(v, (Tensor, np.ndarray)) and _is_large_data(v)}

    def is_original(self, value: Any) -> bool:
        return self._originals is None or value in self._originals

    def nodes_of(self, *kinds: type[Any]) -> dict[Path, Any]:
        return {path: node for path, node in self._nodes.items() if isinstance(node, kinds)}

    def _state(self, path: Path, node: Any) -> dict[str, Any]:
        """The attributes of a node that are carried, and its hooks."""
        found = self._attributes(path, node)
        if isinstance(node, (nn.Module, Optimizer)) and (hooks := hooks_of(node)):
            found[_HOOKS] = hooks
        if self._skipped:
            found = {name: value for name, value in found.items() if f"{path}.{name}" not in self._skipped}
        return found

    def _attributes(self, path: Path, node: Any) -> dict[str, Any]:
        if isinstance(node, Optimizer) and not self._optimizers:
            return {}
        # A module is whole in both processes; so is a metric that no module has registered.
        is_metric = not _METRICS.isdisjoint(type(node).__mro__)
        return attributes_of(node, self._whole or (is_metric and path not in self._roots))

    @cached_property
    def _tables(self) -> dict[int, tuple[Path, TableKey]]:
        """The places of the hook tables of all nodes, by id."""
        owners = {path: node for path, node in self._nodes.items() if isinstance(node, (nn.Module, Optimizer))}
        return {id(table): (path, key) for path, owner in owners.items() for key, table in tables_of(owner)}

    @cached_property
    def _weights(self) -> _Weights:
        return _Weights({p: node for p, node in self._nodes.items() if isinstance(node, nn.Module)})

    # ------------------------------------------------------------------ the sender

    def pack(self, unchanged: Mapping[int, Path] = MappingProxyType({})) -> ObjectPack:
        """The state of all nodes; tensors are not copied.

        ``unchanged``: paths of tensors and arrays that the receiver has, by id; they are not sent.
        """
        states = {path: self._state(path, node) for path, node in self._nodes.items()}
        left_behind: dict[Path, set[str]] = {}
        for owner, _, name in (path.rpartition(".") for path in self._skipped):
            left_behind.setdefault(owner, set()).add(name)
        new = {path: value for path, value in self.values.items() if not self.is_original(value)}
        packed = self._dump((states, left_behind, [*new.values()]), unchanged)
        if packed is None:
            for path, names in self._unpicklable(states, unchanged).items():
                left_behind.setdefault(path, set()).update(names)
            for path, names in left_behind.items():
                states[path] = {name: value for name, value in states.get(path, {}).items() if name not in names}
                left = tuple(f"{path}.{name}" for name in names)
                new = {place: value for place, value in new.items() if not place.startswith(left)}
            packed = self._dump((states, left_behind, [*new.values()]), unchanged)
            assert packed is not None, "each attribute could be pickled by itself"
        return packed

    def unpicklable(self) -> dict[str, type[Any]]:
        """The attributes that cannot be carried, by path, and the type of each."""
        states = {path: self._state(path, node) for path, node in self._nodes.items()}
        unchanged = {id(value): path for path, value in self.large.items()}
        if self._dump(states, unchanged) is not None:
            return {}
        found = self._unpicklable(states, unchanged)
        return {f"{path}.{name}": type(states[path][name]) for path, names in found.items() for name in names}

    def _unpicklable(
        self, states: Mapping[Path, dict[str, Any]], unchanged: Mapping[int, Path]
    ) -> dict[Path, set[str]]:
        left_behind: dict[Path, set[str]] = {}
        for path, state in states.items():
            if self._dump(state, unchanged) is None:
                left_behind[path] = {name for name, value in state.items() if self._dump(value, unchanged) is None}
        return left_behind

    def _dump(self, value: Any, unchanged: Mapping[int, Path]) -> ObjectPack | None:
        file = io.BytesIO()
        pickler = _GraphPickler(self, file, unchanged)
        try:
            pickler.dump(value)
        except Exception:  # whatever the user's classes raise: it cannot travel
            return None
        return ObjectPack(file.getvalue(), pickler.tensors, frozenset(pickler.used))

    # ------------------------------------------------------------------ the receiver

    def update(self, packed: ObjectPack, device: torch.device, large: Mapping[Path, Any] | None = None) -> None:
        """Makes the nodes of this process equal to the sender's.

        ``large``: this process's tensors and arrays that were not sent, by path. Raises ReCycleError if one is missing.
        """
        loader = _GraphUnpickler(self, packed, large or {}, device)
        states, left_behind, new = loader.load()
        _Update(self, loader, new).write(states, left_behind)
        for handle, tables in loader.handles:
            first, *others = (ref(table_of(loader.made.get(path, self._nodes.get(path)), key)) for path, key in tables)
            handle.hooks_dict_ref, handle.extra_dict_ref = first, tuple(others)


class _Weights:
    """Parameters and buffers of ``modules``, and tensors that share their memory."""

    def __init__(self, modules: Mapping[Path, nn.Module]) -> None:
        tensors = {
            (path, name): tensor
            for path, module in modules.items()
            for name, tensor in tensors_of(module).items()
            if memory_address(tensor)
        }
        self._ids = {id(tensor) for tensor in tensors.values()}
        self._names: dict[int, tuple[Path, str]] = {}
        for name, tensor in tensors.items():
            self._names.setdefault(memory_address(tensor), name)

    def shared(self, tensor: Tensor) -> tuple[Path, str] | None:
        """The name of a weight whose memory ``tensor`` has, unless it is a weight itself."""
        return None if id(tensor) in self._ids else self._names.get(memory_address(tensor))


class _GraphPickler(MainPickler):
    def __init__(self, graph: ObjectGraph, file: io.BytesIO, unchanged: Mapping[int, Path]) -> None:
        super().__init__(file, MainModule(imported=True))
        self._graph, self._unchanged_paths = graph, unchanged
        self.tensors: list[Tensor] = []
        self.used: set[Path] = set()  # of ``unchanged``
        self._indices: dict[int, int] = {}

    @override
    def persistent_id(self, obj: Any) -> Any:
        graph, key = self._graph, id(obj)
        if key in graph._names:
            return "anchor", graph._names[key]
        if key in graph._paths:
            return "node", graph._paths[key], class_of(obj)
        if key in self._unchanged_paths:
            self.used.add(self._unchanged_paths[key])
            return "unchanged", self._unchanged_paths[key]
        if type(obj) in (Tensor, nn.Parameter) and obj.layout is torch.strided:
            if key not in self._indices:
                self._indices[key] = len(self.tensors)
                self.tensors.append(obj.detach())
            parameter = type(obj) is nn.Parameter, obj.requires_grad
            return "tensor", self._indices[key], is_accelerator(obj.device), *parameter, graph._weights.shared(obj)
        if type(obj) is torch.device and is_accelerator(obj):
            return "device", None
        if isinstance(obj, RemovableHandle) and obj.hooks_dict_ref() is not None:
            tables = [table for each in (obj.hooks_dict_ref, *obj.extra_dict_ref) if (table := each()) is not None]
            return "handle", obj.id, [graph._tables[id(table)] for table in tables]
        if isinstance(obj, graph._bound):
            raise TypeError(f"{type(obj).__name__} belongs to this process")
        return None


class _GraphUnpickler(pickle.Unpickler):
    def __init__(self, graph: ObjectGraph, packed: ObjectPack, large: Mapping[Path, Any], device: torch.device) -> None:
        super().__init__(io.BytesIO(packed.data))
        self._anchors, self._nodes, self._tensors = graph._anchors, graph._nodes, packed.tensors
        self._large, self._device = large, device
        self._loaded_tensors: dict[int, Tensor] = {}
        self.made: dict[Path, Any] = {}
        self.shared: dict[int, tuple[Path, str] | None] = {}  # by the id of a tensor
        self.handles: list[tuple[RemovableHandle, list[tuple[Path, TableKey]]]] = []

    @override
    def persistent_load(self, pid: Any) -> Any:
        """This worker's object, or a tensor of the pack, for a name of the pickler's."""
        kind, name, *details = pid
        if kind == "anchor":
            return self._anchors.get(name, self._nodes.get(name, MISSING))
        if kind == "node":
            return self._node(name, details[0])
        if kind == "unchanged":
            if name not in self._large:
                if not any(name.startswith((f"{path}.", f"{path}[")) for path in self._nodes):
                    return MISSING  # below a root that is not here yet, such as a DataLoader before the training
                raise ReCycleError(f"This worker has no {name}, which its peer has had since the run began.")
            return self._large[name]
        if kind == "handle":
            handle = object.__new__(RemovableHandle)
            handle.id = name
            self.handles.append((handle, details[0]))
            return handle
        if kind == "device":
            return self._device
        if name not in self._loaded_tensors:
            on_device, is_parameter, requires_grad, shared = details
            tensor = self._tensors[name].to(self._device if on_device else "cpu", copy=True)
            self._loaded_tensors[name] = (
                nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)
            )
            self.shared[id(self._loaded_tensors[name])] = shared
        return self._loaded_tensors[name]

    def _node(self, path: Path, kind: type[Any]) -> Any:
        present = self._nodes.get(path, MISSING)
        if present is not MISSING and class_of(present) is kind:
            return present
        if path not in self.made:
            self.made[path] = made = object.__new__(kind)
            if issubclass(kind, nn.Module):  # the attributes that are not carried
                (pl.LightningModule if issubclass(kind, pl.LightningModule) else nn.Module).__init__(made)
            if issubclass(kind, Metric):  # which wraps its methods
                made.__setstate__({})
            if issubclass(kind, Optimizer):  # its hook tables
                Optimizer.__setstate__(made, {"defaults": {}, "state": defaultdict(dict), "param_groups": []})
        return self.made[path]


class _Update:
    """Writes received states into the nodes of a graph; ``new`` replaced originals."""

    def __init__(self, graph: ObjectGraph, loader: _GraphUnpickler, new: list[Any]) -> None:
        self._graph, self._nodes, self._weights = graph, graph._nodes, graph._weights
        self._made, self._shared = loader.made, loader.shared
        self._counterparts: dict[int, Any] = {}  # by id of what was received: what stands for it here
        self._known = {id(node) for nodes in (graph._nodes, graph._anchors, loader.made) for node in nodes.values()}
        self._claimed_ids: set[int] = set()
        self._received: list[Any] = [new]  # keeps ids unique
        self._new_ids = set(map(id, new))

    def write(self, states: Mapping[Path, dict[str, Any]], left_behind: Mapping[Path, set[str]]) -> None:
        existing = ((path, self._made.get(path, self._nodes.get(path))) for path in states)
        nodes = {path: node for path, node in existing if node is not None}
        hooks = {path: states[path].pop(_HOOKS, {}) for path in nodes}
        for path, node in nodes.items():  # weights have their names here: whatever else leads to them comes later
            for name in ("_parameters", "_buffers") if isinstance(node, nn.Module) else ():
                if name in states[path]:
                    self.merge(vars_of(node)[name], states[path][name])
        for path, node in nodes.items():
            self._write(node, self._graph._attributes(path, node), states[path], left_behind.get(path, set()))
        for path, node in nodes.items():  # all parameters are what they are going to be
            if isinstance(node, (nn.Module, Optimizer)) and _HOOKS not in left_behind.get(path, set()):
                tables = {key: self.merge(MISSING, table) for key, table in hooks[path].items()}
                put_hooks(node, tables)
            if isinstance(node, nn.Module):
                parametrize_class(node)

    def _write(self, node: Any, before: Mapping[str, Any], state: dict[str, Any], left_behind: set[str]) -> None:
        for name in before.keys() - state.keys() - left_behind:
            object.__delattr__(node, name) if name not in vars_of(node) else vars_of(node).pop(name)
        for name, value in state.items():
            if value is MISSING:
                continue
            now = self.merge(before.get(name, MISSING), value)
            if name in vars_of(node) or hasattr(node, "__dict__"):
                vars_of(node)[name] = now
            else:
                object.__setattr__(node, name, now)

    def merge(self, old: Any, new: Any) -> Any:
        """Local counterpart of received ``new``: ``old`` itself if it can hold the value."""
        if new is MISSING and isinstance(old, self._graph._bound):
            return old  # it belongs to this process, like the sender's to its own
        if id(new) in self._counterparts:
            return self._counterparts[id(new)]
        if old is new or old is MISSING or type(old) is not type(new) or id(old) in self._claimed_ids:
            old = None
        if id(new) in self._new_ids and self._graph.is_original(old):
            old = copy(old) if type(old) in _CONTAINERS else None  # with the same items, which may be no new ones
        merge_kind = next((merge for kinds, merge in _MERGES if type(new) in kinds), None)
        if is_sharded(new):
            merge_kind = _Update.merge_sharded
        if merge_kind is None:
            return new
        self._received.append(new)
        return merge_kind(self, old, new)

    def claim(self, old: Any, new: Any) -> Any:
        """Makes local ``old`` stand for received ``new``, and nothing else; returns it."""
        self._claimed_ids.add(id(old))
        self._counterparts[id(new)] = old
        return old

    def merge_tensor(self, old: Tensor | None, new: Tensor) -> Any:
        fits = old is not None and old.shape == new.shape and old.dtype == new.dtype and old.layout == new.layout
        # An attribute may be a view of a weight here and not there: spectral_norm() before and after its first forward.
        if not fits or old is None or _is_expanded(old) or self._weights.shared(old) != self._shared.get(id(new)):
            return self.claim(new, new)  # at every place where the sender has this one
        return self._overwritten(old, new)

    def merge_sharded(self, old: Any, new: Any) -> Any:
        if old is None or old.shape != new.shape or old.dtype != new.dtype or old.placements != new.placements:
            return self.claim(new, new)
        return self._overwritten(old, new)

    def _overwritten(self, old: Tensor, new: Tensor) -> Tensor:
        self.claim(old, new)
        with torch.no_grad():
            local_part(old).copy_(local_part(new))  # its version shows that it has changed since the run began
        if old.requires_grad != new.requires_grad and old.is_leaf:
            old.requires_grad = new.requires_grad
        return old

    def merge_array(self, old: Any, new: Any) -> Any:
        fits = old is not None and old.shape == new.shape and old.dtype == new.dtype
        if not fits or not old.flags.writeable or old.dtype.hasobject:
            return self.claim(new, new)
        np.copyto(old, new)
        return self.claim(old, new)

    def merge_items(self, old: Any, new: Any) -> Any:
        """Merges item by item, into ``old`` itself unless they are tuples."""
        pairs = zip([*(old or ()), *repeat(MISSING, len(new))], new, strict=False)
        if type(new) is tuple:
            return tuple(self.merge(*pair) for pair in pairs)
        target = self.claim(new if old is None else old, new)
        found = [self.merge(*pair) for pair in pairs]
        target.clear()
        target.extend(value for value in found if value is not MISSING)
        return target

    def merge_mapping(self, old: Any, new: Any) -> Any:
        """Merges by key into ``old``, in the order of ``new``."""
        target = self.claim(new if old is None else old, new)
        own = {key: self.merge(MISSING, key) if isinstance(key, Tensor) else key for key in new}
        found = {
            own[key]: self.merge(MISSING if old is None else old.get(own[key], MISSING), value)
            for key, value in new.items()
        }
        target.clear()
        target.update({key: value for key, value in found.items() if value is not MISSING})
        return target

    def merge_function(self, old: Any, new: Any) -> Any:
        """A local function, with the variables that others of this process share with it."""
        if not is_local(new):
            return new
        target = old if old is not None and old.__code__ == new.__code__ else new
        own_cells, received_cells = target.__closure__ or (), new.__closure__ or ()
        filled = []
        for own_cell, received_cell in zip(own_cells, received_cells, strict=True):
            if id(received_cell) not in self._counterparts:
                self._received.append(received_cell)
                self.claim(received_cell if id(own_cell) in self._claimed_ids else own_cell, received_cell)
                filled.append(received_cell)
        cells = tuple(self._counterparts[id(received_cell)] for received_cell in received_cells)
        if any(cell is not own_cell for cell, own_cell in zip(cells, own_cells, strict=True)):
            target = function_with(target, cells)
        self.claim(target, new)
        for received_cell in filled:
            cell = self._counterparts[id(received_cell)]
            content = content_of(cell)
            for value in content_of(received_cell):
                if value is not MISSING:
                    cell.cell_contents = self._local_counterpart(content[0] if content else MISSING, value)
        for name in ("__defaults__", "__kwdefaults__", "__dict__"):
            setattr(target, name, self.merge(getattr(target, name), getattr(new, name)))
        return target

    def merge_method(self, old: Any, new: Any) -> Any:
        function = self.merge(MISSING if old is None else old.__func__, new.__func__)
        return MethodType(function, self._local_counterpart(MISSING if old is None else old.__self__, new.__self__))

    def _local_counterpart(self, old: Any, new: Any) -> Any:
        """Local counterpart of an object that only a closure or bound method refers to."""
        if id(new) in self._counterparts or id(new) in self._known or not is_node(new):
            return self.merge(old, new)
        self._received.append(new)
        is_free = id(old) not in self._claimed_ids and id(old) not in self._known
        target = self.claim(old if type(old) is type(new) and is_free else new, new)
        self._write(target, attributes_of(target), attributes_of(new), set())
        return target

    def merge_partial(self, old: Any, new: Any) -> Any:
        target = self.claim(new if old is None else old, new)
        names = ("func", "args", "keywords", "__dict__")
        target.__setstate__(tuple(self.merge(getattr(target, name), getattr(new, name)) for name in names))
        return target

    def merge_generator(self, old: Any, new: Any) -> Any:
        if old is not None:
            read, write = next((get, put) for kind, get, put in GENERATORS if isinstance(new, kind))
            write(old, read(new))
        return self.claim(new if old is None else old, new)


_MERGES: tuple[tuple[Any, Callable[[_Update, Any, Any], Any]], ...] = (
    ((Tensor, nn.Parameter), _Update.merge_tensor),
    ((np.ndarray,), _Update.merge_array),
    ((list, tuple, deque), _Update.merge_items),
    ((dict, OrderedDict, defaultdict), _Update.merge_mapping),
    ((FunctionType,), _Update.merge_function),
    ((MethodType,), _Update.merge_method),
    ((partial,), _Update.merge_partial),
    (tuple(kind for kind, *_ in GENERATORS), _Update.merge_generator),
)


def _is_large_data(value: Any) -> bool:
    if isinstance(value, Tensor):
        plain = type(value) is Tensor and value.layout is torch.strided and not value.is_inference()
        return plain and value.nbytes >= _LARGE
    return not value.dtype.hasobject and value.nbytes >= _LARGE and reduced_array(value) is NotImplemented


def _is_expanded(tensor: Tensor) -> bool:
    """Whether several elements are one, and cannot be written."""
    return tensor.layout is torch.strided and any(
        s == 0 and n > 1 for s, n in zip(tensor.stride(), tensor.shape, strict=True)
    )


def _fingerprint(value: Any) -> Any:
    """Fingerprint of the contents of a large tensor or array."""
    if isinstance(value, Tensor):
        return value.data_ptr(), value.shape, version_of(value)
    data = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    pieces = [data[begin : begin + _PIECE].data for begin in range(0, len(data), _PIECE)]
    with ThreadPoolExecutor(min(len(pieces), os.cpu_count() or 1)) as pool:  # it runs without the GIL
        return value.shape, tuple(pool.map(zlib.crc32, pieces))


def weights_by_name(module: pl.LightningModule) -> dict[Path, Tensor]:
    """Tensors in the state dict of ``module``, which travel outside of packs."""
    weights = weights_of(module)
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {f"weight {name}": tensor for name, tensor in tensors if name in weights}


def weights_for(module: pl.LightningModule, state: Mapping[str, Tensor]) -> dict[Path, Tensor]:
    """Substitutes from ``module`` for weights that were left out of a pack.

    Where it has none of that name and shape, those of ``state``.
    """
    given = {f"weight {name}": tensor for name, tensor in state.items()}
    own = [(name, tensor) for name, tensor in weights_by_name(module).items() if not is_lazy(tensor)]
    return {**given, **{name: t for name, t in own if name not in given or given[name].shape == t.shape}}


def user_graph(trainer: pl.Trainer, training: TrainingParts | None = None) -> ObjectGraph:
    """The graph of module, callbacks, data module, DataLoaders and hooks.

    ``training``: carries optimizers and schedulers, for peers with the same layers.
    """
    loops = fit_loops(trainer)
    loaders = {f"{name} loader {i}": value for name in loops for i, value in _dataloaders_by_index(loops[name]).items()}
    streams = streams_among(loaders)
    roots = {
        **_objects(trainer, include_weight_averaging=training is not None),
        **{name: loader for name, loader in loaders.items() if name not in streams},
        **_optimizers(trainer),
        "callbacks": CallbackList(trainer.callbacks),  # type: ignore[attr-defined]
        "training": training,
    }
    anchors = {**process_anchors(trainer, optimizers=training is None), **_callbacks(trainer), **streams}
    originals = trainer.strategy.session.originals  # type: ignore[attr-defined]
    return ObjectGraph(roots, anchors, optimizers=training is not None, originals=originals)


class TrainingParts:
    """The parts of a Trainer that hooks may replace, as one object.

    ``loaders``: of training and validation, once read: the user's, and how they are combined. ``streams``: which of the
    two read streams.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self.optimizers = trainer.strategy.optimizers
        self.schedulers = trainer.strategy.lr_scheduler_configs
        found = {name: loop for name, loop in fit_loops(trainer).items() if loaders_of(loop)}
        self.loaders = {name: _users_loaders(*combined_loaders(loop)) for name, loop in found.items()}
        self.streams = frozenset(name for name, loop in found.items() if streams_among(_dataloaders_by_index(loop)))

    def install_in(self, trainer: pl.Trainer) -> None:
        """Installs these optimizers and schedulers in ``trainer``."""
        strategy = trainer.strategy
        if [wrapper.optimizer for wrapper in lightning_optimizers(trainer)] != self.optimizers:
            strategy.optimizers = self.optimizers
        strategy.lr_scheduler_configs = self.schedulers

    def read_loaders(self, trainer: pl.Trainer) -> None:
        for name, value in self.loaders.items():
            read_loaders(trainer, name, None if name in self.streams else value)


def _users_loaders(loaders: Any, mode: Any) -> tuple[Any, Any]:
    return tree_map(lambda loader: loader.dataloader if isinstance(loader, StepLoader) else loader, loaders), mode


def _dataloaders_by_index(loop: Any) -> dict[str, Any]:
    return {str(i): loader.dataloader for i, loader in enumerate(loaders_of(loop)) if isinstance(loader, StepLoader)}


class CallbackList:
    """The callbacks of a Trainer, as one object."""

    def __init__(self, callbacks: list[Any]) -> None:
        self.callbacks = callbacks


def callback_graph(trainer: pl.Trainer, callbacks: Sequence[Any]) -> ObjectGraph:
    """The graph of ``callbacks`` alone, with neither the module nor its parts."""
    module, callback_ids = trainer.lightning_module, {id(callback) for callback in callbacks}
    anchors = {
        **process_anchors(trainer),
        **{f"module {name}": part for name, part in module.named_modules()},
        **{f"weight {name}": tensor for name, tensor in [*module.named_parameters(), *module.named_buffers()]},
        "datamodule": getattr(trainer, "datamodule", None),
        **_callbacks(trainer),
    }
    roots = {name: callback for name, callback in _callbacks(trainer).items() if id(callback) in callback_ids}
    return ObjectGraph(roots, anchors)


def metric_parts(trainer: pl.Trainer) -> dict[Path, Metric | MetricCollection | MetricTracker]:
    """The torchmetrics objects reachable from module, callbacks and data module."""
    graph = ObjectGraph(_objects(trainer), {**process_anchors(trainer), **_callbacks(trainer)})
    return graph.nodes_of(Metric, MetricCollection, MetricTracker)


def streams_among(loaders: Mapping[str, Any]) -> dict[str, Any]:
    """Streams among ``loaders``, by name, and their datasets."""
    streams = {name: loader for name, loader in loaders.items() if yields_batches(loader) or is_stream(loader)}
    return {**streams, **{f"{name}.dataset": getattr(loader, "dataset", None) for name, loader in streams.items()}}


def _objects(trainer: pl.Trainer, include_weight_averaging: bool = False) -> dict[str, Any]:
    """Module, data module, and callbacks that do not belong to their process."""
    others = () if include_weight_averaging else (StochasticWeightAveraging,)
    callbacks = {
        name: value
        for name, value in _callbacks(trainer).items()
        if not (is_bound_to_process(value) or isinstance(value, others))
    }
    return {"module": trainer.lightning_module, **callbacks, "datamodule": getattr(trainer, "datamodule", None)}


def _callbacks(trainer: pl.Trainer) -> dict[str, Any]:
    """The callbacks that all workers had when they began."""
    session: Any = trainer.strategy.session  # type: ignore[attr-defined]
    return {f"callback {i}": callback for i, callback in enumerate(session.callbacks)}


def _optimizers(trainer: pl.Trainer) -> dict[str, Any]:
    return {f"optimizer {i}": optimizer for i, optimizer in enumerate(trainer.optimizers)}


def process_anchors(trainer: pl.Trainer, optimizers: bool = True) -> dict[str, Any]:
    """Objects that belong to the Trainer of a process."""
    excluded = (type(trainer.lightning_module), pl.LightningDataModule)
    parts = {name: value for name, value in vars(trainer).items() if hasattr(value, "__dict__")}
    schedulers = {f"scheduler {i}": config.scheduler for i, config in enumerate(trainer.lr_scheduler_configs)}
    return {
        "trainer": trainer,
        **{f"trainer.{name}": value for name, value in parts.items() if not isinstance(value, excluded)},
        "strategy": trainer.strategy,
        "precision": trainer.precision_plugin,
        **{f"logger {i}": logger for i, logger in enumerate(trainer.loggers)},
        **{f"optimizer of Lightning {i}": optimizer for i, optimizer in enumerate(lightning_optimizers(trainer))},
        **(_optimizers(trainer) if optimizers else {}),
        **(schedulers if optimizers else {}),
    }
