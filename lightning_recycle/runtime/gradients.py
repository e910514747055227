"""The gradients of a stage as flat buffers, so that REDUCE is one message per dtype.

``parameter.grad`` is a view into the buffer: backward accumulates in place and nothing is copied. One buffer carries a
few extra numbers (the loss sum of the last stage), so that they travel in the same all-reduce.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_recycle.errors import UnsupportedFeatureError

__all__ = ["GradientBuffers"]

_ALIGNMENT = 16  # elements; keeps every view as aligned as a tensor of its own would be


class GradientBuffers:
    """Flat gradients of ``parameters`` (those that require one), and ``num_extras`` further numbers to sum."""

    def __init__(self, parameters: Sequence[nn.Parameter], device: torch.device, num_extras: int = 0) -> None:
        self.buffers: list[Tensor] = []
        self._views: list[tuple[nn.Parameter, Tensor]] = []
        trainable = [p for p in parameters if p.requires_grad]
        dtypes = list(dict.fromkeys(p.dtype for p in trainable))
        wide = [dtype for dtype in dtypes if dtype in (torch.float32, torch.float64)]
        extras_dtype = wide[0] if wide else torch.float32  # a loss summed in half precision would be useless
        if num_extras and extras_dtype not in dtypes:
            dtypes.append(extras_dtype)
        self.extras = torch.zeros(num_extras, dtype=extras_dtype, device=device)
        for dtype in dtypes:
            mine = [p for p in trainable if p.dtype == dtype]
            sizes = [-(-p.numel() // _ALIGNMENT) * _ALIGNMENT for p in mine]
            tail = num_extras if dtype == extras_dtype else 0
            buffer = torch.zeros(sum(sizes) + tail, dtype=dtype, device=device)
            offset = 0
            for parameter, size in zip(mine, sizes, strict=True):
                self._views.append((parameter, buffer[offset : offset + parameter.numel()].view(parameter.shape)))
                offset += size
            if tail:
                self.extras = buffer[offset:]
            self.buffers.append(buffer)

    def begin(self) -> None:
        """Zeroes everything and makes each ``parameter.grad`` a view into its buffer."""
        for buffer in self.buffers:
            buffer.zero_()
        self.attach()

    def attach(self) -> None:
        for parameter, view in self._views:
            parameter.grad = view

    def check(self) -> None:
        """Raises UnsupportedFeatureError if a gradient left its buffer (a sparse gradient, or code that replaced
        it).
        """
        for parameter, view in self._views:
            if parameter.grad is not view:
                kind = "None" if parameter.grad is None else f"a {parameter.grad.layout} tensor of its own"
                raise UnsupportedFeatureError(
                    f"The gradient of a parameter of shape {tuple(parameter.shape)} became {kind}; the strategy"
                    " needs dense"
                    " gradients accumulated in place. Use sparse=False in embeddings and do not replace .grad in hooks."
                )

    def squared_norm(self) -> float:
        """The sum of squares of all gradients."""
        if not self._views:
            return 0.0
        norms = torch._foreach_norm([view for _, view in self._views])
        return float(sum(float(norm) ** 2 for norm in norms))
