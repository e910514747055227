"""What a hook did to the attributes of a module, as data: told, sent, and done again on every worker.

:mod:`~lightning_recycle.session.collected` finds it.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lightning_recycle.session.optimizer_states import to_cpu

__all__ = ["MISSING", "Change", "Kind", "Path", "item_of", "received", "repeat_change", "same", "sent", "shown"]

MISSING = object()
"""In the place of a value where there is none."""


class Kind(Enum):
    """What was done to the value at a place."""

    EXTEND = "extend"  # a list or deque; the value: further items
    UPDATE = "update"  # a set; the value: further items
    ADD = "add"  # a number or tensor; the value: the difference
    ROWS = "rows"  # a tensor; the value: further rows
    WRITE = "write"  # a tensor; the value: (where, what) as tensors
    CREATE = "create"  # nothing was there
    ASSIGN = "assign"


Path: TypeAlias = tuple[tuple[bool, Any], ...]
"""From the module: (whether it is an attribute, its name or key or index), and so on inwards."""


@dataclass(frozen=True)
class Change:
    """One thing that a hook did."""

    path: Path
    kind: Kind
    value: Any


def item_of(owner: Any, key: Any) -> Any:
    """The item of a dict or list, or :data:`MISSING`."""
    if isinstance(owner, dict):
        return owner.get(key, MISSING)
    return owner[key] if key < len(owner) else MISSING


def same(one: Any, other: Any) -> bool:
    """Whether two values are certainly equal."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())
    return one is other or (type(one) is type(other) and isinstance(one, (str, bool, int, float)) and one == other)


def shown(path: Path) -> str:
    """A path as the user would write it."""
    return "self" + "".join(f".{key}" if is_attribute else f"[{key!r}]" for is_attribute, key in path)


def sent(value: Any) -> Any:
    """``value`` as it can leave this process: tensors on the CPU, numbers that are followed no more."""
    if isinstance(value, defaultdict):
        copy: defaultdict[Any, Any] = defaultdict(value.default_factory)
        copy.update({key: sent(item) for key, item in value.items()})
        return copy
    if type(value) in (dict, list, tuple):
        return {k: sent(v) for k, v in value.items()} if isinstance(value, dict) else type(value)(map(sent, value))
    return to_cpu(getattr(value, "plain", value) if isinstance(value, (int, float)) else value)


def received(value: Any, device: torch.device) -> Any:
    """What :func:`sent` made, with its tensors on ``device``."""
    if isinstance(value, Tensor):
        return value.to(device)
    if type(value) in (list, tuple, deque):
        return type(value)(received(item, device) for item in value)
    if isinstance(value, dict):
        for key, item in list(value.items()):
            value[key] = received(item, device)
    return value


def repeat_change(module: nn.Module, change: Change, device: torch.device) -> Any:
    """Does ``change``; returns the value that it replaced by another without regard to it, if any."""
    owner: Any = module
    for is_attribute, key in change.path[:-1]:
        owner = getattr(owner, key) if is_attribute else owner[key]
    is_attribute, key = change.path[-1]
    now = getattr(owner, key, MISSING) if is_attribute else item_of(owner, key)
    value = received(change.value, device)
    if change.kind is Kind.CREATE and now is not MISSING:  # an earlier micro-batch of this step has created it
        new = _merged(now, value, _counts(owner))
    else:
        new = _after(change.kind, now, value)
    if new is now:
        return MISSING
    if is_attribute:
        setattr(owner, key, new)
    else:
        owner[key] = new
    return now if new is value else MISSING


def _counts(owner: Any) -> bool:
    """Whether a new item of ``owner`` begins with zero and is added to."""
    return isinstance(owner, Counter) or (isinstance(owner, defaultdict) and owner.default_factory in (int, float))


def _merged(now: Any, value: Any, counts: bool) -> Any:
    """What two micro-batches created at the same place."""
    if isinstance(now, (list, deque)) and isinstance(value, (list, deque)):
        now.extend(value)
        return now
    if isinstance(now, set) and isinstance(value, set):
        now.update(value)
        return now
    if isinstance(now, dict) and isinstance(value, dict):
        for key, item in value.items():
            now[key] = _merged(now[key], item, _counts(now)) if key in now else item
        return now
    return now + value if counts else value


def _after(kind: Kind, now: Any, value: Any) -> Any:
    """The value after a change; ``now`` itself if it was changed in place."""
    match kind:
        case Kind.EXTEND:
            now.extend(value)
            return now
        case Kind.UPDATE:
            now.update(value)
            return now
        case Kind.ADD:
            if isinstance(now, Tensor) and isinstance(value, Tensor) and now.shape == value.shape:
                return now.add_(value) if now.dtype == value.dtype else now + value
            return now + value
        case Kind.ROWS:
            return torch.cat([now, value])
        case Kind.WRITE:
            where, what = value
            now[where] = what
            return now
        case _:
            return value
