"""Memory of the host through which tensors of a device travel.

Concept: a device copies to and from *pinned* memory by itself, and to other memory by way of a small buffer of its
driver. To pin memory takes long, so torch keeps what is no longer used for the next time, once the device is done with
it. On a CPU all of this is ordinary memory.

Not tried with a device: see docs/gpu.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["HostMemory"]


class HostMemory:
    """What a worker needs of the host's memory to exchange tensors of ``device``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def empty(self, shape: Sequence[int], dtype: torch.dtype = torch.uint8) -> Tensor:
        """A new, uninitialised tensor of the host."""
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=self._device.type == "cuda")

    def staged(self, tensor: Tensor) -> Tensor:
        """``tensor`` if it is on the host, else a contiguous copy of it there, which is complete."""
        if tensor.device.type == "cpu":
            return tensor
        copy = self.empty(tensor.shape, tensor.dtype)
        copy.copy_(tensor)
        return copy

    def on_device(self, tensor: Tensor, is_reused: bool) -> Tensor:
        """A copy of ``tensor`` on the device, or itself on a CPU.

        Args:
            tensor: on the host, or on the device already.
            is_reused: whether its memory is written again. If not, the copy need not be complete: torch keeps the
                memory until it is.
        """
        return tensor.to(self._device, non_blocking=not is_reused)
