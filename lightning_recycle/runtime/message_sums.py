"""Sums that tell whether a message arrived as it was sent.

Concept: the 64-bit words of a message are added up, by its sender and by its receiver. A flipped bit, or any other
change within one word, shows; changes in several words cancel with a probability of about 2^-64 if they are random. TCP
has a sum of 16 bits of its own, which misses one in 65,536, and none where a message never leaves the machine.

Contract: only memory of the host is looked at: nobody waits for a device. 0 stands for a message that has no sum.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

import numpy as np
from torch import Tensor

from lightning_recycle.tensor_memory import memory_of

__all__ = ["sum_of_bytes", "sum_of_tensors"]

_WORD = 8
_MODULUS = (1 << 63) - 1  # a signed number that is not 0 remains


def sum_of_bytes(data: bytes | np.ndarray) -> int:
    """The sum of contiguous bytes, from 1 to 2^63 - 1."""
    each = np.frombuffer(data, dtype=np.uint8)
    whole = each.size // _WORD * _WORD
    total = int(np.add.reduce(each[:whole].view(np.uint64))) if whole else 0
    return (total + int.from_bytes(each[whole:].tobytes(), sys.byteorder)) % _MODULUS + 1


def sum_of_tensors(tensors: Iterable[Tensor | None]) -> int:
    """The sum of the bits of all tensors, whatever their shapes; 0 if one is not in memory of the host."""
    total = 0
    for tensor in tensors:
        if tensor is None:
            continue
        if tensor.device.type != "cpu":
            return 0
        if tensor.numel():
            flat = memory_of(tensor.detach().resolve_conj().resolve_neg().contiguous())
            total = total * 3 + sum_of_bytes(flat.numpy())
    return total % _MODULUS + 1
