"""Tensors to be hashed, summed, pickled or sent: their memory, and any value as tensors and the bytes that are left."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from typing_extensions import override

__all__ = ["has_plain_memory", "memory_address", "memory_of", "put_together", "take_apart"]


def memory_of(tensor: Tensor, dtype: torch.dtype = torch.uint8) -> Tensor:
    """The memory of a contiguous ``tensor`` as a vector of ``dtype``, without a copy."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(dtype)  # a single element may have any stride


def has_plain_memory(tensor: Tensor) -> bool:
    """Whether the memory of ``tensor`` on the CPU, with its shape and strides, is all that it is."""
    is_strided = tensor.device.type == "cpu" and tensor.layout is torch.strided
    return is_strided and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())


def memory_address(tensor: Tensor) -> int:
    """The address of the storage of ``tensor``, which views of it share; 0 if it has none."""
    if tensor.layout is not torch.strided or is_lazy(tensor) or tensor.device.type == "meta":
        return 0
    return tensor.untyped_storage().data_ptr()


# ---------------------------------------------------------------------- any value as tensors and the rest


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
