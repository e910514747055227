"""Exceptions on their way from a worker to the launching process, with their class and attributes.

Python's own pickles of exceptions call the class with ``args`` again. That fails where ``__init__`` takes other
arguments than it hands on, and changes the message where it makes one of them. So a class with an ``__init__`` of its
own is rebuilt without calling it, unless it says itself how it is pickled.
"""

from __future__ import annotations

import contextlib
import pickle
from types import FunctionType
from typing import Any

from lightning_recycle.main_module import MainPickler, dumps

__all__ = ["dump_exception"]

_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class that is not built into Python


def dump_exception(error: BaseException) -> bytes | None:
    """Pickle of ``error`` without the members that cannot be pickled; None if its class cannot be."""
    with contextlib.suppress(Exception):
        return _dumps(error)
    with contextlib.suppress(Exception):
        args = tuple(arg if _can_be_sent(arg) else repr(arg) for arg in error.args)
        return _dumps(_Reduced(type(error), args, {k: v for k, v in _state(error).items() if _can_be_sent(v)}))
    return None


class _Pickler(MainPickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, BaseException) and _has_own_init(type(value)):
            return _Reduced(type(value), value.args, _state(value)).__reduce__()
        return super().reducer_override(value)


class _Reduced:
    """Stands in a pickle for an exception of ``kind``."""

    def __init__(self, kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> None:
        self._parts = kind, args, state

    def __reduce__(self) -> tuple[Any, ...]:
        kind, args, state = self._parts
        return _new, (kind, args), state, None, None, _set_state


def _has_own_init(kind: type[BaseException]) -> bool:
    own_pickles = isinstance(kind.__reduce__, FunctionType) or isinstance(kind.__reduce_ex__, FunctionType)
    return isinstance(kind.__init__, FunctionType) and not own_pickles


def _state(error: BaseException) -> dict[str, Any]:
    """The attributes of ``error`` in its dictionary and in slots."""
    slots = {name: getattr(error, name) for name in _slots(type(error)) if hasattr(error, name)}
    if isinstance(error, OSError | ImportError):  # kept outside of both
        kept = ("filename", "filename2", "name", "path")
        slots |= {name: getattr(error, name) for name in kept if getattr(error, name, None) is not None}
    return {**slots, **vars(error)}


def _slots(kind: type) -> list[str]:
    named = [vars(base).get("__slots__", ()) for base in kind.__mro__]
    return [name for names in named for name in ((names,) if isinstance(names, str) else names)]


def _new(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    builtin = next(base for base in kind.__mro__ if not base.__flags__ & _HEAP_TYPE)
    error: BaseException = builtin.__new__(kind, *args)
    with contextlib.suppress(TypeError):  # of other arguments than the built-in class takes
        builtin.__init__(error, *args)  # type: ignore[misc]  # fills what it keeps besides args
    object.__setattr__(error, "args", args)  # a frozen dataclass refuses its own
    return error


def _set_state(error: BaseException, state: dict[str, Any]) -> None:
    for name, value in state.items():
        object.__setattr__(error, name, value)


def _dumps(value: Any) -> bytes:
    """Pickles ``value`` and tries to load it."""
    data = dumps(value, _Pickler)
    pickle.loads(data)
    return data


def _can_be_sent(value: Any) -> bool:
    try:
        _dumps(value)
    except Exception:
        return False
    return True
