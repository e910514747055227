"""The memory of a tensor, to be hashed, summed, pickled or sent."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["memory_of"]


def memory_of(tensor: Tensor, dtype: torch.dtype = torch.uint8) -> Tensor:
    """The memory of a contiguous ``tensor`` as a vector of ``dtype``, without a copy."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(dtype)  # a single element may have any stride
