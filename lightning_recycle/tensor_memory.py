"""The memory of a tensor, to be hashed, summed, pickled or sent."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

__all__ = ["has_plain_memory", "memory_address", "memory_of"]


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
