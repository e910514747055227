"""A short number for all that was read of a stream, by which two readers find out that they read something else.

It depends on tensors, arrays, numbers and texts; of any other object only its type counts, since its pickle may differ
between processes that hold the same.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_recycle.tensor_memory import memory_of

__all__ = ["add_sample"]

_EXACT = (bool, int, float, complex, str, bytes, type(None))


def add_sample(digest: int, sample: Any) -> int:
    """The digest (63 bits) of what ``digest`` is of (0: nothing), followed by ``sample``."""
    found = hashlib.blake2b(digest.to_bytes(8, "little"), digest_size=8)
    for leaf in tree_leaves(sample):
        found.update(type(leaf).__qualname__.encode())
        if isinstance(leaf, Tensor):
            found.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
            found.update(_bytes_of(leaf))
        elif isinstance(leaf, (np.ndarray, np.generic)):
            found.update(f"{leaf.dtype}{leaf.shape}".encode())
            if not leaf.dtype.hasobject:
                found.update(leaf.tobytes())
        elif isinstance(leaf, _EXACT):
            found.update(repr(leaf).encode())
    return int.from_bytes(found.digest(), "little") >> 1


def _bytes_of(tensor: Tensor) -> Any:
    """What can be hashed of ``tensor``, without a copy where that is possible."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return b""
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return memory_of(tensor).numpy()
