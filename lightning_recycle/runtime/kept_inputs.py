"""What a micro-batch keeps of its F when its forward is computed again: the input of the stage, and nothing else.

Concept: the first run is a usual one, with autograd, so the output is the same and knows whether it needs a gradient;
but whatever autograd saves in it is dropped at once. The second run, R, begins with what the first one began with:

- *the input*: the first run gets copies of the tensors, as layers may write into what they are given;
- *buffers*: those that the first run changed (running statistics, the vectors of spectral norm) are for the second one
  what they were, and afterwards what they are now: a forward changes them once, however often it runs;
- *randomness* and autocast are the caller's: both follow from the micro-batch, not from the moment.

Other attributes that a layer's forward changes are changed twice, and its hooks run twice, as with
``torch.utils.checkpoint``.

Knows tensors and modules, but neither stages nor schedules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

__all__ = ["Kept"]


class Kept:
    """What one micro-batch keeps.

    Args:
        value: the input of the layers: tensors in whatever Lightning moves to a device.
        layers: they are about to run for the first time.
    """

    def __init__(self, value: Any, layers: Sequence[nn.Module]) -> None:
        self._value = value
        copies: dict[int, Tensor] = {}  # a buffer may have several names
        self._buffers = [
            _Buffer(module._buffers, name, buffer, copies)
            for module in dict.fromkeys(module for layer in layers for module in layer.modules())
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    @contextmanager
    def first_run(self) -> Iterator[Any]:
        """The first run, on the input that it yields; autograd saves nothing in it."""
        with torch.autograd.graph.saved_tensors_hooks(_nothing, _never):
            yield apply_to_collection(self._value, Tensor, _copy)
        self.ran()

    def ran(self) -> None:
        """The first run is over: of the buffers, those that it changed are kept."""
        self._buffers = [buffer for buffer in self._buffers if buffer.has_changed()]

    @contextmanager
    def second_run(self) -> Iterator[Any]:
        """The second run, on the input that it yields; nothing is kept any more."""
        value, buffers = self._value, self._buffers
        self._value, self._buffers = None, []
        now = [buffer.swap() for buffer in buffers]
        try:
            yield value
        finally:
            for buffer, tensor in zip(buffers, now, strict=True):
                buffer.owner[buffer.name] = tensor

    def tensors(self) -> list[Tensor]:
        """The tensors that are kept."""
        found = [buffer.before for buffer in self._buffers]
        apply_to_collection(self._value, Tensor, found.append)
        return found


class _Buffer:
    """A buffer of a module, ``owner[name]``, and a copy of it.

    In the second run the copy takes its place, instead of its values: graphs of other micro-batches may have saved the
    buffer, and autograd refuses tensors that were written to since.
    """

    def __init__(self, owner: dict[str, Tensor | None], name: str, buffer: Tensor, copies: dict[int, Tensor]) -> None:
        self.owner, self.name = owner, name
        self._buffer = buffer
        if id(buffer) not in copies:
            copies[id(buffer)] = buffer.detach().clone()
        self.before = copies[id(buffer)]

    def has_changed(self) -> bool:
        # Not by its version: batch norm writes its running statistics without telling autograd.
        return self.owner.get(self.name) is not self._buffer or not torch.equal(self._buffer, self.before)

    def swap(self) -> Tensor | None:
        now = self.owner.get(self.name)
        self.owner[self.name] = self.before
        return now


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _nothing(tensor: Tensor) -> None:
    return None


def _never(_: None) -> NoReturn:
    raise RuntimeError("The graph of a forward that is computed again has no backward: its R must come first.")
