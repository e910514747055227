"""The gradients of a stage as flat buffers, so REDUCE is one message per dtype.

``parameter.grad`` is a view into the buffer: backward accumulates in place and nothing is copied. There are two sets of
buffers, used by even and odd steps: the reduced gradient of a step is kept until the step after the next begins, so a
peer that lost its part of an all-reduce can adopt it.

Which parameters require a gradient may change between two steps. Each set is laid out for the step that begins in it,
so the older one is still what peers expect.

A parameter that no micro-batch used has no gradient (None), as on one device, so an optimizer leaves it alone. An empty
buffer holds negative zeros, to which nothing but negative zeros add up to a negative zero: what still holds only those
after the sum over all workers was never written, or is zero wherever it was.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor, nn

from lightning_recycle.errors import UnsupportedFeatureError

__all__ = ["GradientBuffers"]

_ALIGNMENT = 16  # elements; keeps every view as aligned as a separate tensor


class _Set:
    """Gradients of ``parameters`` in one flat buffer per dtype."""

    def __init__(self, parameters: Sequence[nn.Parameter], device: torch.device) -> None:
        self.holds = tuple(map(id, parameters))
        self.parameters: list[nn.Parameter] = []
        self.buffers: list[Tensor] = []
        self.views: list[Tensor] = []
        self.firsts: list[Tensor] = []  # per buffer, where each view begins
        for dtype in dict.fromkeys(p.dtype for p in parameters):
            mine = [p for p in parameters if p.dtype == dtype]
            sizes = [-(-p.numel() // _ALIGNMENT) * _ALIGNMENT for p in mine]
            buffer = torch.zeros(sum(sizes), dtype=dtype, device=device)
            self.parameters += mine
            self.buffers.append(buffer)
            self.firsts.append(torch.tensor([0, *itertools.accumulate(sizes[:-1])], device=device))
            offset = 0
            for parameter, size in zip(mine, sizes, strict=True):
                self.views.append(buffer[offset : offset + parameter.numel()].view(parameter.shape))
                offset += size


class GradientBuffers:
    """Flat gradients of those of ``parameters`` that require one when a step begins."""

    def __init__(self, parameters: Sequence[nn.Parameter], device: torch.device) -> None:
        self._all, self._device = list(parameters), device
        self._sets = [_Set(self._trained(), device) for _ in range(2)]
        self._attached = self._sets[0]

    def _trained(self) -> list[nn.Parameter]:
        return [p for p in self._all if p.requires_grad]

    def of_step(self, step: int) -> list[Tensor]:
        """The flat buffers of ``step``, one per dtype; none if nothing is trained."""
        return self._sets[step % 2].buffers

    def tensors(self) -> list[Tensor]:
        """All buffers."""
        return [buffer for each in self._sets for buffer in each.buffers]

    def begin(self, step: int) -> None:
        """Empties the buffers of ``step`` and makes each ``parameter.grad`` a view into them."""
        trained = self._trained()
        if self._sets[step % 2].holds != tuple(map(id, trained)):
            self._sets[step % 2] = _Set(trained, self._device)
        for buffer in self.of_step(step):
            buffer.fill_(complex(-0.0, -0.0) if buffer.is_complex() else -0.0)
        self.attach(step)

    def attach(self, step: int) -> None:
        """Makes each ``parameter.grad`` a view into the buffers of ``step``; what they do not hold has no gradient."""
        chosen = self._sets[step % 2]
        if chosen.holds != self._attached.holds:
            for parameter in self._attached.parameters:
                parameter.grad = None
        self._attached = chosen
        for parameter, view in zip(chosen.parameters, chosen.views, strict=True):
            parameter.grad = view

    def hand_over(self, step: int) -> None:
        """Makes each ``parameter.grad`` what it is on one device after a backward of the whole batch of ``step``."""
        self.attach(step)
        chosen = self._sets[step % 2]
        index = 0
        for buffer, firsts in zip(chosen.buffers, chosen.firsts, strict=True):
            for suspected in _is_empty(buffer[firsts]).tolist():
                if suspected and bool(_is_empty(chosen.views[index]).all()):
                    chosen.parameters[index].grad = None
                index += 1

    def check(self, step: int) -> None:
        """Raises UnsupportedFeatureError if a gradient left its buffer (sparse, or replaced by a hook)."""
        chosen = self._sets[step % 2]
        for parameter, view in zip(chosen.parameters, chosen.views, strict=True):
            if parameter.grad is not view:
                kind = "None" if parameter.grad is None else f"a separate {parameter.grad.layout} tensor"
                raise UnsupportedFeatureError(
                    f"The gradient of a parameter of shape {tuple(parameter.shape)} became {kind}; the strategy needs"
                    " dense gradients accumulated in place. Use sparse=False in embeddings and do not replace .grad in"
                    " hooks."
                )

    def of_parameter(self, parameter: nn.Parameter, step: int) -> Tensor:
        """The gradient of ``parameter`` in ``step``, in its buffer."""
        return next(view for p, view in self.by_parameter(step) if p is parameter)

    def by_parameter(self, step: int) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Each parameter, with its gradient in ``step``."""
        chosen = self._sets[step % 2]
        return zip(chosen.parameters, chosen.views, strict=True)

    def squared_norm(self, step: int, without: Collection[nn.Parameter] = ()) -> float:
        """The sum of squares of all gradients of ``step``, except those of the parameters ``without``."""
        left_out = {id(parameter) for parameter in without}
        views = [view for p, view in self.by_parameter(step) if id(p) not in left_out]
        return float(sum(float(norm) ** 2 for norm in torch._foreach_norm(views))) if views else 0.0


def _is_empty(values: Tensor) -> Tensor:
    """Which of ``values`` are negative zeros."""
    if values.is_complex():
        return _is_empty(torch.view_as_real(values)).all(-1)
    return (values == 0) & torch.signbit(values)
