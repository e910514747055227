"""Tables of the hooks that users register on modules, parameters and optimizers, and attributes of parameters.

Concept: torch keeps hooks in *tables*, dicts from a number to a function, and a handle removes a hook by its table and
number. A table also holds hooks of this package, which belong to the process and are left alone. The attributes that
users give to a parameter are a table, too.

Contract: tables are changed in place, so handles stay valid. Numbers count up in each process; :func:`number_hooks`
gives each worker a range of numbers, so that hooks of a donor and of its replacement never have the same number.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from types import MethodType
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

__all__ = ["HookTables", "TableKey", "hooks_of", "number_hooks", "origin", "put_hooks", "table_of", "tables_of"]

TableKey: TypeAlias = tuple[str, str]
"""The name of a parameter, empty for the owner itself, and the name of the table."""

HookTables: TypeAlias = dict[TableKey, dict[Any, Any]]

_OF_PARAMETERS = ("__dict__", "_backward_hooks", "_post_accumulate_grad_hooks")


def _names(owner: Any) -> tuple[str, ...]:
    return tuple(name for name, value in vars(owner).items() if isinstance(value, dict) and "_hooks" in name)


_OF_MODULES = _names(nn.Module())
_OF_OPTIMIZERS = _names(torch.optim.SGD([nn.Parameter(torch.empty(0))], lr=0.0))


def number_hooks(rank: int, incarnation: int) -> None:
    """Starts the numbers of the hooks of this process in the range of this worker."""
    RemovableHandle.next_id = max(RemovableHandle.next_id, (incarnation << 48) + ((rank + 1) << 32))


def tables_of(owner: Any) -> Iterator[tuple[TableKey, dict[Any, Any]]]:
    """The hook tables of a module, with those of its parameters, or of an optimizer."""
    values = vars(owner)
    for name in _OF_MODULES if isinstance(owner, nn.Module) else _OF_OPTIMIZERS:
        if name in values:
            yield ("", name), values[name]
    for parameter_name, parameter in values.get("_parameters", {}).items():
        for name in _OF_PARAMETERS:
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
    """The hooks that users registered on ``owner``, a module or an optimizer; only tables that have any."""
    filled = [(key, table) for key, table in tables_of(owner) if table]
    ours = _ours(table for _, table in filled)
    found = {key: {number: hook for number, hook in table.items() if number not in ours} for key, table in filled}
    return {key: table for key, table in found.items() if table}


def put_hooks(owner: Any, hooks: Mapping[TableKey, Mapping[Any, Any]]) -> None:
    """Replaces the hooks that users registered on ``owner`` by ``hooks``."""
    tables = dict(tables_of(owner))
    ours = _ours(tables.values())
    for key in {**tables, **hooks}:
        table = table_of(owner, key)
        kept = {number: hook for number, hook in table.items() if number in ours}
        table.clear()
        table.update({**hooks.get(key, {}), **kept})


def _ours(tables: Iterable[Mapping[Any, Any]]) -> set[int]:
    """The numbers of the hooks of this package."""
    return {
        number
        for table in tables
        for number, hook in table.items()
        if callable(hook) and origin(hook).startswith("lightning_recycle.")
    }


def origin(function: Any) -> str:
    """The name of the module whose code a callable runs, whatever it is wrapped in."""
    while isinstance(function, partial):
        function = function.func
    if isinstance(function, MethodType):
        function = function.__func__
    names = getattr(function, "__globals__", None)
    return str(type(function).__module__ if names is None else names.get("__name__", ""))
