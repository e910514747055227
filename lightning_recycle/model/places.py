"""Which batch a hook of the user's is called for, given by name to hooks that name it.

Concept: as in Lightning, ``batch_idx`` and ``dataloader_idx`` are optional parameters of the hooks of a
``PipelineModule``. A hook that one of them calls, such as ``loss``, is given the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, NamedTuple

__all__ = ["BatchPlace", "call_at", "call_here"]


class BatchPlace(NamedTuple):
    """The fields are the names of the parameters.

    Args:
        batch_idx: index of the batch in the epoch, or of the step where a step takes several batches.
        dataloader_idx: index of the DataLoader in an evaluation of several.
    """

    batch_idx: int
    dataloader_idx: int = 0


_here: ContextVar[BatchPlace | None] = ContextVar("place of the batch", default=None)


def call_at(place: BatchPlace, hook: Callable[..., Any], *args: Any) -> Any:
    """Calls ``hook(*args)`` for the batch at ``place``, with those of its fields that the hook's signature names."""
    token = _here.set(place)
    try:
        return call_here(hook, *args)
    finally:
        _here.reset(token)


def call_here(hook: Callable[..., Any], *args: Any) -> Any:
    """As :func:`call_at`, for the batch of the hook that calls this; outside of one, as the user would call it."""
    place = _here.get()
    named = _named(getattr(hook, "__func__", hook)) if place is not None else ()
    return hook(*args, **{name: getattr(place, name) for name in named})


@lru_cache(maxsize=256)
def _named(function: Callable[..., Any]) -> tuple[str, ...]:
    parameters = inspect.signature(function).parameters
    given_by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return tuple(name for name in BatchPlace._fields if name in parameters and parameters[name].kind in given_by_name)
