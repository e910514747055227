"""Attributes and hooks of a user's object that are carried to another process.

Concept: an object of plain attributes is carried as these, a module with its parameters, buffers and submodules. torch
keeps hooks in *tables*, dicts from a number to a function; a handle removes a hook by table and number. Hooks of this
package in a table belong to the process and are left alone. Users' attributes of a parameter are a table, too.

Contract: tables are changed in place, so handles stay valid. Numbers count up in each process; :func:`number_hooks`
gives each worker a range, so that hooks of a donor and of its replacement never have the same number.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any, TypeAlias
from unittest.mock import NonCallableMock

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ProgressBar, Timer
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch.utils.hooks import RemovableHandle

from lightning_recycle.data.step_sources import StepHandle
from lightning_recycle.model.layers import AbsentLayer
from lightning_recycle.model.recorded_module import RecordedModule
from lightning_recycle.pickling import written_class
from lightning_recycle.runtime.stage import unsharded_class

TableKey: TypeAlias = tuple[str, str]
"""The name of a parameter, empty for the owner itself, and the name of the table."""

HookTables: TypeAlias = dict[TableKey, dict[Any, Any]]

_PARAMETER_TABLES = ("__dict__", "_backward_hooks", "_post_accumulate_grad_hooks")


def _table_names(owner: Any) -> tuple[str, ...]:
    return tuple(name for name, value in vars(owner).items() if isinstance(value, dict) and "_hooks" in name)


_MODULE_TABLES = _table_names(nn.Module())
_OPTIMIZER_TABLES = _table_names(torch.optim.SGD([nn.Parameter(torch.empty(0))], lr=0.0))


def number_hooks(rank: int, incarnation: int) -> None:
    """Starts the numbers of the hooks of this process in the range of this worker."""
    RemovableHandle.next_id = max(RemovableHandle.next_id, (incarnation << 48) + ((rank + 1) << 32))


def tables_of(owner: Any) -> Iterator[tuple[TableKey, dict[Any, Any]]]:
    """The hook tables of a module, with those of its parameters, or of an optimizer."""
    values = vars(owner)
    for name in _MODULE_TABLES if isinstance(owner, nn.Module) else _OPTIMIZER_TABLES:
        if name in values:
            yield ("", name), values[name]
    for parameter_name, parameter in values.get("_parameters", {}).items():
        for name in _PARAMETER_TABLES:
            if (table := getattr(parameter, name, None)) is not None:
                yield (parameter_name, name), table


def table_of(owner: Any, key: TableKey) -> dict[Any, Any]:
    """The table with this key, made if the parameter has none yet."""
    parameter_name, name = key
    holder = owner._parameters[parameter_name] if parameter_name else owner
    if getattr(holder, name, None) is None:
        setattr(holder, name, OrderedDict())
    table: dict[Any, Any] = getattr(holder, name)
    return table


def hooks_of(owner: Any) -> HookTables:
    """Non-empty tables of hooks that users registered on a module or an optimizer."""
    filled = [(key, table) for key, table in tables_of(owner) if table]
    ours = _process_hooks(table for _, table in filled)
    found = {key: {number: hook for number, hook in table.items() if number not in ours} for key, table in filled}
    return {key: table for key, table in found.items() if table}


def put_hooks(owner: Any, hooks: Mapping[TableKey, Mapping[Any, Any]]) -> None:
    """Replaces the hooks that users registered on ``owner`` by ``hooks``."""
    tables = dict(tables_of(owner))
    ours = _process_hooks(tables.values())
    for key in {**tables, **hooks}:
        table = table_of(owner, key)
        own_hooks = {number: hook for number, hook in table.items() if number in ours}
        table.clear()
        table.update({**hooks.get(key, {}), **own_hooks})


def _process_hooks(tables: Iterable[Mapping[Any, Any]]) -> set[int]:
    """Numbers of hooks that belong to the process: this package's, and of sharding."""
    return {
        number
        for table in tables
        for number, hook in table.items()
        if callable(hook) and origin(hook).startswith(("lightning_recycle.", "torch.distributed."))
    }


def origin(function: Any) -> str:
    """The name of the module whose code a callable runs, whatever it is wrapped in."""
    while isinstance(function, partial):
        function = function.func
    if isinstance(function, MethodType):
        function = function.__func__
    names = getattr(function, "__globals__", None)
    return str(type(function).__module__ if names is None else names.get("__name__", ""))


def is_local(function: FunctionType) -> bool:
    """Whether a user's function travels with its variables and defaults, not by name."""
    return "<" in function.__qualname__ and origin(function).partition(".")[0] not in _FRAMEWORKS


def function_with(function: FunctionType, cells: tuple[CellType, ...]) -> FunctionType:
    """A copy of ``function`` with these variables."""
    copy = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    for name in ("__kwdefaults__", "__dict__", "__qualname__", "__module__", "__doc__", "__annotations__"):
        setattr(copy, name, getattr(function, name))
    return copy


MODULE_TABLES = ("_parameters", "_buffers", "_modules")
"""Attributes of a module that hold what it registers."""


def is_weight(path: str) -> bool:
    """Whether a parameter or buffer is at ``path``: ``.data`` counts no write."""
    return "._parameters[" in path or "._buffers[" in path


_MODULE_CONTENTS = (*MODULE_TABLES, "_non_persistent_buffers_set", "training")


_VALUES = (type, int, float, complex, str, bytes, bytearray, tuple, list, dict, set, frozenset, BaseException, Tensor)
_HEAP_TYPE = 1 << 9  # of type.__flags__: made by a class statement
_SHOWING = ("rich", "tqdm")  # libraries whose objects hold a terminal
_FRAMEWORKS = ("lightning_recycle", "lightning", "pytorch_lightning", "torch", "torchmetrics")
MISSING = object()
PROCESS_BOUND_TYPES = (pl.Trainer, _BaseDataLoaderIter, NonCallableMock)
"""Classes of objects that belong to a process; they are not carried."""


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of ``module`` itself, by name."""
    tensors = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def class_of(node: Any) -> type[Any]:
    """The class that the user has written."""
    kind: type[Any] = getattr(type(node), "_disguised_from", None) or written_class(node)
    return unsharded_class(kind)


def is_node(value: Any) -> bool:
    """Whether ``value`` is an object of attributes, writable into one of its class."""
    kind = type(value)
    if isinstance(value, _VALUES) or not _is_python(kind) or not (hasattr(value, "__dict__") or slots_of(kind)):
        return False
    if isinstance(value, (nn.Module, Optimizer, DataLoader)):
        return True
    params = getattr(kind, "__dataclass_params__", None)
    if (callable(value) and kind.__module__ in ("builtins", "functools", "types")) or (params and params.frozen):
        return False
    plain = all(getattr(kind, name) is getattr(object, name) for name in ("__reduce_ex__", "__reduce__"))
    state = getattr(kind, "__getstate__", None) is getattr(object, "__getstate__", None)
    return plain and state and not hasattr(kind, "__setstate__")


def _is_python(kind: type[Any]) -> bool:
    """Whether objects of ``kind`` have only attributes: no base of it is written in C."""
    return all(base is object or base.__flags__ & _HEAP_TYPE for base in kind.__mro__)


def is_own(value: Any) -> bool:
    """Whether ``value`` is part of its process: this package's, or a terminal's bar."""
    own = type(value).__module__.startswith("lightning_recycle.") and not isinstance(value, (type, StepHandle))
    shows = any(base.__module__.partition(".")[0] in _SHOWING for base in type(value).__mro__)
    return isinstance(value, AbsentLayer) or shows or (own and not isinstance(value, nn.Module))


def slots_of(kind: type[Any]) -> list[str]:
    """The attributes of objects of ``kind`` that lie in slots."""
    names = [(base, name) for base in kind.__mro__ for name in _as_names(vars(base).get("__slots__", ()))]
    return [_mangled(base, name) for base, name in names if name not in ("__dict__", "__weakref__")]


def _mangled(owner: type[Any], name: str) -> str:
    is_private = name.startswith("__") and not name.endswith("__")
    return f"_{owner.__name__.lstrip('_')}{name}" if is_private else name


def _as_names(slots: Any) -> Sequence[str]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def vars_of(owner: Any) -> dict[str, Any]:
    """The attributes of ``owner`` that lie in a dict, not in slots."""
    return getattr(owner, "__dict__", {})


def attributes_of(owner: Any, whole: bool = True) -> dict[str, Any]:
    """Carried attributes of ``owner``, without methods replaced by frameworks.

    ``whole``: with parameters, buffers and submodules.
    """
    kind, hidden = type(owner), _process_attributes(owner)
    if not whole and isinstance(owner, nn.Module):
        hidden = hidden | {*_MODULE_CONTENTS}
    names = [name for name in vars_of(owner) if not name.startswith(_OF_SHARDED_MODULES)]
    if isinstance(owner, Optimizer):  # parameters of no module are found by their places in groups
        names.sort(key=lambda name: name != "param_groups")
    found = {name: vars_of(owner)[name] for name in names if name not in hidden}
    for name in slots_of(kind):
        if (value := getattr(owner, name, MISSING)) is not MISSING:
            found[name] = value
    return {name: value for name, value in found.items() if not _is_wrapped(kind, name, value)}


def _is_wrapped(kind: type[Any], name: str, value: Any) -> bool:
    """Whether ``value`` is a framework's replacement of a method of ``kind``."""
    is_method = callable(value) and callable(getattr(kind, name, None))
    return is_method and origin(value).partition(".")[0] in _FRAMEWORKS


def _process_attributes(owner: Any) -> frozenset[str]:
    """Attributes that the process itself keeps in an object."""
    if isinstance(owner, pl.LightningModule):
        return _OF_LIGHTNING_MODULES
    if isinstance(owner, Optimizer):
        return frozenset(_OPTIMIZER_TABLES)
    if isinstance(owner, nn.RNNBase):
        return _OF_MODULES | {"_flat_weight_refs"}  # weak references to parameters that it has
    return _OF_MODULES if isinstance(owner, nn.Module) else frozenset()


_OF_MODULES = frozenset({*vars(nn.Module())} - {*_MODULE_CONTENTS})


INTERNAL_ATTRIBUTES = frozenset({*vars(pl.LightningModule()), *vars(RecordedModule), "_param_requires_grad_state"})
"""Attributes of a LightningModule that are not the user's."""

# Prefix of the attributes in which ``fully_shard`` keeps its state.
_OF_SHARDED_MODULES = "__composable_api"

_OF_LIGHTNING_MODULES = INTERNAL_ATTRIBUTES - {*_MODULE_CONTENTS}


def is_bound_to_process(callback: Any) -> bool:
    """Whether a callback's attributes belong to its process: the state dict travels."""
    return isinstance(callback, (ProgressBar, Timer)) or is_own(callback)
