"""Values with tensors on their way between workers: on the CPU, on a device, pickled.

Pickles: torch writes every storage in a pickle as a file of its own, which takes longer than all else that a small
record costs. Here a tensor on the CPU is its bytes. Two tensors that share memory get memory of their own.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from typing_extensions import override

from lightning_recycle.tensor_memory import has_plain_memory, memory_of

__all__ = ["on_device", "pack_tensors", "to_cpu", "unpack_tensors"]


def to_cpu(value: Any, copies: bool = True) -> Any:
    """``value`` with its tensors on the CPU in storages of their own, fit for pickling.

    Args:
        value: anything; only dicts, lists and tuples are looked into.
        copies: whether a tensor that is like that already is copied, too.
    """
    if isinstance(value, Tensor):
        tensor = value.detach().cpu()
        return tensor.clone() if copies or tensor.untyped_storage().nbytes() != tensor.nbytes else tensor
    if isinstance(value, Mapping):
        return {key: to_cpu(item, copies) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(to_cpu(item, copies) for item in value)
    return value


def on_device(value: Any, device: torch.device) -> Any:
    """``value`` with its tensors on ``device``, also those in its containers; a tensor that is there is not copied."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), value)


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
