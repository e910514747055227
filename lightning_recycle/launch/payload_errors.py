"""Error for a Trainer, model or data that cannot be sent to worker processes: it names the member at fault.

Members are pickled once more, one by one, from the argument of the Trainer's entry point down to the member in which
nothing else fails. Must not know: how workers are started.
"""

from __future__ import annotations

import inspect
import io
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any

from torch import Tensor

from lightning_recycle.errors import ConfigurationError

__all__ = ["not_sent"]

Dump = Callable[[Any, Any], None]
"""Pickles a value into a file."""


def not_sent(error: Exception, payload: Any, dump: Dump) -> ConfigurationError:
    """Error for a payload that cannot be pickled, with the path of the member that is to blame.

    Args:
        error: raised when it was pickled.
        payload: a tuple whose first item is the call of the Trainer.
        dump: pickles a part of it into a file.
    """
    where = _find_unpicklable(payload, dump)
    member = "The Trainer, model or data" if where is None else where
    return ConfigurationError(
        f"{member} cannot be sent to the worker processes: {type(error).__name__}: {error}."
        " Open files and connections in setup() instead of __init__, and keep what cannot be pickled out of the"
        " global variables that the functions of your script read."
    )


class _NullFile(io.RawIOBase):
    """Discards what is written."""

    def write(self, data: Any) -> int:
        return memoryview(data).nbytes


def _find_unpicklable(payload: Any, dump: Dump) -> str | None:
    """Path of the member that cannot be pickled, such as ``model.helpers['db']``; None if it is not found."""
    call = payload[0] if isinstance(payload, tuple) and payload else None
    roots = dict(getattr(call, "arguments", {}))
    trainer = getattr(call, "trainer", None)
    if trainer is not None:
        roots |= {"trainer.callbacks": trainer.callbacks, "trainer.loggers": trainer.loggers, "trainer": trainer}
    seen: set[int] = set()

    def path_from(path: str, value: Any) -> str | None:
        if id(value) in seen or isinstance(value, Tensor):
            return None
        seen.add(id(value))
        try:
            dump(value, _NullFile())
        except Exception:  # of whatever kind: the caller has the one that is reported
            inner = (path_from(f"{path}{step}", member) for step, member in _members(value))
            return next(filter(None, inner), path)
        return None

    return next(filter(None, (path_from(name, value) for name, value in roots.items())), None)


def _members(value: Any) -> Iterator[tuple[str, Any]]:
    """Objects that are pickled with ``value``, each with its path."""
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", member) for key, member in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"[{index}]", member) for index, member in enumerate(value))
    elif isinstance(value, FunctionType):
        variables = inspect.getclosurevars(value)
        for name, member in {**variables.globals, **variables.nonlocals}.items():
            yield f", which uses the variable {name}", member
    else:
        own = getattr(value, "__getstate__", None)  # objects have one from Python 3.11 on
        state = own() if callable(own) else getattr(value, "__dict__", None)
        for name, member in (state if isinstance(state, dict) else {}).items():
            if name == "_modules":
                yield from ((f".{child}", module) for child, module in member.items())
            else:
                yield f".{name}", member
