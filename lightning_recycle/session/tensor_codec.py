"""Pickles of many small tensors.

Concept: torch writes every storage in a pickle as a file of its own, which takes longer than all else that a small
record costs. Here a tensor on the CPU is its bytes. Two tensors that share memory get memory of their own.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_recycle.tensor_memory import has_plain_memory, memory_of

__all__ = ["pack_tensors", "unpack_tensors"]


def pack_tensors(value: Any) -> bytes:
    """Pickles ``value``; raises what ``pickle`` raises."""
    file = io.BytesIO()
    _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


def unpack_tensors(data: bytes) -> Any:
    """The value that :func:`pack_tensors` was given."""
    return pickle.loads(data)


class _Pickler(pickle.Pickler):
    @override
    def reducer_override(self, obj: Any) -> tuple[Callable[..., Any], tuple[Any, ...]] | Any:
        if type(obj) is not Tensor or obj.requires_grad or not has_plain_memory(obj):
            return NotImplemented
        data = memory_of(obj.contiguous()).numpy().tobytes()
        return _tensor, (data, obj.dtype, tuple(obj.shape))


def _tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
