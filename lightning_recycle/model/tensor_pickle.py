"""Any value as tensors and the bytes that are left of it without them, and back."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from typing_extensions import override

__all__ = ["put_together", "take_apart"]


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, is_apart: Callable[[Any], bool]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []
        self._numbers: dict[int, int] = {}
        self._is_apart = is_apart

    @override
    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, Tensor) or not self._is_apart(obj):
            return None
        if id(obj) not in self._numbers:
            self._numbers[id(obj)] = len(self.tensors)
            self.tensors.append(obj)
        return self._numbers[id(obj)]


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: Sequence[Any]) -> None:
        super().__init__(file)
        self._tensors = tensors

    @override
    def persistent_load(self, pid: int) -> Any:
        return self._tensors[pid]


def take_apart(value: Any, is_apart: Callable[[Tensor], bool] = lambda tensor: True) -> tuple[bytes, list[Tensor]]:
    """Pickles ``value`` without its tensors of which ``is_apart`` is true; each of those comes once.

    Raises:
        Exception: whatever an object raises that cannot be pickled.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, is_apart)
    pickler.dump(value)
    return file.getvalue(), pickler.tensors


def put_together(data: bytes, tensors: Sequence[Any]) -> Any:
    """The inverse of :func:`take_apart`, with ``tensors`` in the places of its."""
    return _Unpickler(io.BytesIO(data), tensors).load()
