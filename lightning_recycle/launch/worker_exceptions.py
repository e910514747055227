"""Exceptions on their way from a worker to the launching process, with class, attributes, causes and contexts.

Python's own pickles of exceptions call the class with ``args`` again. That fails where ``__init__`` takes other
arguments than it hands on, and changes the message where it makes one of them. So a class with an ``__init__`` of its
own is rebuilt without calling it, unless it says itself how it is pickled.

They also leave out the exceptions that one was raised from. Here all that belong together, members of groups included,
are pickled one by one, so whatever one of them holds does not keep the others from arriving.
"""

from __future__ import annotations

import builtins
import contextlib
import os
import pickle
from pathlib import Path
from traceback import StackSummary, TracebackException
from types import FunctionType
from typing import Any

import lightning.fabric
import lightning.pytorch
import torch

from lightning_recycle.pickling import MainPickler, dumps

__all__ = ["dump_exception", "from_users_code", "restore_chain"]

_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class that is not built into Python
_GROUP: Any = getattr(builtins, "BaseExceptionGroup", ())  # of Python 3.11
_CHAIN = "_recycle_chain"


def dump_exception(error: BaseException) -> bytes | None:
    """Pickle of ``error`` without the members that cannot be pickled; None if its class cannot be."""
    errors = _all_of(error)
    packed: dict[int, Any] = {}
    for each in errors:
        _pack(each, packed)
    if isinstance(packed[id(error)], _StandIn):
        return None
    links = [
        (packed[id(each)], packed.get(id(each.__cause__)), packed.get(id(each.__context__)), each.__suppress_context__)
        for each in errors
        if each.__cause__ is not None or each.__context__ is not None
    ]
    with contextlib.suppress(Exception):
        return _dumps(_Linked(packed[id(error)], links) if links else packed[id(error)])
    return None


def restore_chain(error: BaseException) -> None:
    """Moves the cause that ``error`` was given in this process behind those that it had in the worker."""
    chain = vars(error).pop(_CHAIN, None)
    if chain is None:
        return
    given, last, seen = error.__cause__, error, set()
    _link(error, *chain)
    while id(last) not in seen:
        seen.add(id(last))
        shown = last.__cause__ or (None if last.__suppress_context__ else last.__context__)
        if shown is None:
            object.__setattr__(last, "__cause__", given)
            return
        last = shown


def _all_of(error: BaseException) -> list[BaseException]:
    """``error``, the members of groups, and those that each was raised from."""
    found: dict[int, BaseException] = {}
    left: list[BaseException | None] = [error]
    while left:
        each = left.pop()
        if each is not None and id(each) not in found:
            found[id(each)] = each
            left += [each.__cause__, each.__context__, *_members(each)]
    return list(found.values())


def _members(error: BaseException) -> tuple[BaseException, ...]:
    return error.exceptions if isinstance(error, _GROUP) else ()


def _pack(error: BaseException, packed: dict[int, Any]) -> Any:
    """What is pickled for ``error``: itself, or what stands for it; remembered in ``packed`` by id."""
    if id(error) not in packed:
        members = [_pack(member, packed) for member in _members(error)]
        changed = any(new is not old for new, old in zip(members, _members(error), strict=True))
        packed[id(error)] = error if not changed and _can_be_sent(error) else _reduced(error, members)
    return packed[id(error)]


def _reduced(error: BaseException, members: list[Any]) -> _Reduced:
    args = (error.args[0], members) if members else tuple(a if _can_be_sent(a) else repr(a) for a in error.args)
    reduced = _Reduced(type(error), args, {k: v for k, v in _state(error).items() if _can_be_sent(v)})
    return reduced if _can_be_sent(reduced) else _StandIn(error)


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


class _StandIn(_Reduced):
    """An exception of the built-in class next to that of ``error``, which cannot be pickled."""

    def __init__(self, error: BaseException) -> None:
        kind = _builtin(type(error))
        super().__init__(Exception if issubclass(kind, _GROUP) else kind, (f"{type(error).__name__}: {error}",), {})


class _Linked:
    """Stands in a pickle for ``error`` and those that it was raised from.

    ``links``: exception, its cause, its context, and whether the context is suppressed.
    """

    def __init__(self, error: Any, links: list[tuple[Any, Any, Any, bool]]) -> None:
        self._parts = error, links

    def __reduce__(self) -> tuple[Any, ...]:
        return _linked, self._parts


def _linked(error: BaseException, links: list[tuple[BaseException, Any, Any, bool]]) -> BaseException:
    for each, *chain in links:
        _link(each, *chain)
        if each is error:
            object.__setattr__(error, _CHAIN, tuple(chain))
    return error


def _link(error: BaseException, cause: BaseException | None, context: BaseException | None, suppressed: bool) -> None:
    for name, value in (("__cause__", cause), ("__context__", context), ("__suppress_context__", suppressed)):
        object.__setattr__(error, name, value)


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


def _builtin(kind: type[BaseException]) -> type[BaseException]:
    return next(base for base in kind.__mro__ if not base.__flags__ & _HEAP_TYPE)


def _new(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    builtin = _builtin(kind)
    error: BaseException = builtin.__new__(kind, *args)
    with contextlib.suppress(TypeError):  # of other arguments than the built-in class takes
        builtin.__init__(error, *args)  # fills what it keeps besides args
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


# ---------------------------------------------------------------------- tracebacks


_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
_PACKAGES = (lightning.fabric, lightning.pytorch, torch)
_LIBRARIES = [f"{Path(str(package.__file__)).parent}{os.sep}" for package in _PACKAGES]
_INTERNAL = (_PACKAGE, *_LIBRARIES, str(contextlib.__file__))


def from_users_code(error: BaseException) -> str:
    """The formatted traceback of ``error`` and of the exceptions that it was raised from."""
    shown = TracebackException.from_exception(error)
    links: list[TracebackException | None] = [shown]
    while links:
        link = links.pop()
        if link is not None:  # a chain that has a loop is cut by the standard library
            link.stack = _from_users_code(link.stack)
            links += [link.__cause__, link.__context__, *(getattr(link, "exceptions", None) or ())]
    return "".join(shown.format())


def _from_users_code(stack: StackSummary) -> StackSummary:
    users = (index for index, frame in enumerate(stack) if not frame.filename.startswith(_INTERNAL))
    first = next(users, None)
    if first is None:
        return stack
    *called, raised = stack[first:]
    return StackSummary.from_list([*(frame for frame in called if not frame.filename.startswith(_PACKAGE)), raised])
