"""A description of everything that can be reached from a Trainer: path -> value, to compare two workers.

Objects are described once, at the first path that leads to them; tensors by shape, dtype and their numbers.
"""

import enum
import types
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import PurePath
from typing import Any

import lightning as L
import torch
from torch import Tensor

_VALUES = (bool, int, float, complex, str, bytes, type(None), enum.Enum, torch.dtype, torch.device, PurePath, range)
_NAMED = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)


def describe(trainer: L.Trainer, skip: Iterable[str]) -> dict[str, str]:
    """What ``trainer`` holds; nothing from a path or class on whose name matches a pattern in ``skip``."""
    patterns = tuple(skip)
    seen: dict[int, tuple[str, Any]] = {}
    found: dict[str, str] = {}
    waiting: list[tuple[str, Any]] = [
        ("trainer", trainer),
        ("module", trainer.lightning_module),
        ("optimizers", trainer.optimizers),
        ("schedulers", trainer.lr_scheduler_configs),
        ("precision", trainer.precision_plugin),
    ]
    for path, value in waiting:  # it grows: the shortest path comes first
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        if any(fnmatchcase(path, pattern) or fnmatchcase(name, pattern) for pattern in patterns):
            continue
        if isinstance(value, _VALUES):
            found[path] = repr(value)
        elif isinstance(value, _NAMED):
            found[path] = f"{value.__module__ if hasattr(value, '__module__') else ''}.{value.__name__}"
        elif isinstance(value, Tensor):
            found[path] = f"{tuple(value.shape)} {value.dtype} {value.detach().flatten().tolist()}"
            waiting += [(f"{path}.grad", value.grad)] if value.is_leaf and value.grad is not None else []
        elif id(value) in seen and not isinstance(value, types.MethodType):  # each access to a method makes another one
            found[path] = f"the same as {seen[id(value)][0]}"
        else:
            seen[id(value)] = (path, value)  # kept, so that the id stays its own
            children = list(_children(path, value))
            size = "" if hasattr(value, "__dict__") else f" of {len(children)}"
            found[path] = f"{type(value).__name__}{size}"
            waiting += children
    return found


def differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> dict[str, tuple[str | None, str | None]]:
    """Where two descriptions differ, and what each has there."""
    return {
        path: (ours.get(path), theirs.get(path))
        for path in sorted(ours.keys() | theirs.keys())
        if ours.get(path) != theirs.get(path)
    }


def _children(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, types.MethodType):
        yield f"{path}.__self__", value.__self__
        yield f"{path}.__func__", value.__func__
    elif isinstance(value, Mapping):
        keys = list(value)
        yield from ((f"{path}[{_key(key, i)}]", value[key]) for i, key in enumerate(keys))
    elif isinstance(value, (list, tuple)) or type(value).__name__ == "deque":
        yield from ((f"{path}[{index}]", item) for index, item in enumerate(value))
    elif isinstance(value, (set, frozenset)):
        yield from ((f"{path}{{{item!r}}}", True) for item in sorted(value, key=repr))
    yield from ((f"{path}.{name}", item) for name, item in getattr(value, "__dict__", {}).items())


def _key(key: Any, index: int) -> str:
    return repr(key) if isinstance(key, _VALUES) else f"key {index}"
