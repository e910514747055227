"""How a device computes or remembers wrong things without failing: bits that flip.

Concept: one bit of one number changes, once, in what the worker holds, computes or sends; or arithmetic is wrong from
then on, in every n-th matrix product. Nothing raises, and nothing else changes.

Contract: which number it is follows from the fault alone, so the same fault does the same in every run.

Must not know: faults of processes, schedules, who looks for the difference.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["WrongArithmetic", "flip", "flip_in_next_output", "flipped"]

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MANTISSA = {torch.float64: 52, torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}
_PRODUCTS = {
    op for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv") for op in (getattr(torch.ops.aten, name).default,)
}


@torch.no_grad()
def flip(tensors: Iterable[Any], bit: int | None, draw: random.Random) -> bool:
    """Flips a bit of one number of the floating-point tensors among ``tensors``, in place.

    Args:
        tensors: where; others than floating-point tensors are left alone.
        bit: its place, from the lowest, 0; None for the lowest bit of the exponent, which doubles or halves the number.
        draw: draws the number.

    Returns:
        Whether there was one.
    """
    found = [t for t in tensors if isinstance(t, Tensor) and t.is_floating_point() and t.numel()]
    if not found:
        return False
    place = draw.randrange(sum(tensor.numel() for tensor in found))
    for tensor in found:
        if place < tensor.numel():
            _flip_at(tensor.detach(), place, bit)
            break
        place -= tensor.numel()
    return True


def _flip_at(tensor: Tensor, place: int, bit: int | None) -> None:
    width = 8 * tensor.element_size()
    chosen = _MANTISSA[tensor.dtype] if bit is None else bit % width
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(place), tensor.shape))
    number = tensor[index].reshape(1).contiguous()
    mask = 1 << chosen if chosen < width - 1 else -(1 << chosen)
    wrong = number.view(_INTEGERS[tensor.element_size()]) ^ mask
    tensor[index] = wrong.view(tensor.dtype)[0]


def flipped(value: Any, bit: int | None, draw: random.Random) -> Any:
    """A copy of ``value``, a tensor or a tuple of tensors and None, with a flipped bit."""
    several = value if isinstance(value, tuple) else (value,)
    copies = tuple(None if t is None else t.detach().clone().requires_grad_(t.requires_grad) for t in several)
    flip([None if t is None else t.detach() for t in copies], bit, draw)
    return copies if isinstance(value, tuple) else copies[0]


def flip_in_next_output(modules: Sequence[nn.Module], bit: int | None, draw: random.Random) -> None:
    """Flips a bit in the first tensor that one of ``modules`` returns from now on, in place."""
    handles: list[Any] = []

    def on_output(module: nn.Module, inputs: Any, output: Any) -> None:
        if not handles:
            return
        if flip(output if isinstance(output, tuple) else (output,), bit, draw):
            for handle in handles:
                handle.remove()
            handles.clear()

    handles += [module.register_forward_hook(on_output) for module in modules]


class WrongArithmetic(TorchDispatchMode):
    """Within the block, every ``every``-th matrix product has a flipped bit; the count goes on from block to block.

    Args:
        every: n of every n-th.
        bit: see :func:`flip`; 0 is an error of one unit in the last place.
        draw: draws the numbers.
    """

    def __init__(self, every: int, bit: int | None, draw: random.Random) -> None:
        super().__init__()
        self._every, self._bit, self._draw = every, bit, draw
        self._count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _PRODUCTS and result.is_floating_point():
            self._count += 1
            if self._count % self._every == 0:
                flip([result], self._bit, self._draw)
        return result
