"""Decoupled back-propagation: weight gradients computed later than input gradients.

Inside :class:`intercept_linear` every ``F.linear`` on a trainable leaf weight becomes an autograd function that, while
a :class:`WeightGradQueue` is active, returns only the input gradient and queues the weight and bias gradients.
Parameters that are not captured get their gradient from autograd at once, so every module stays correct; the values are
bit-identical either way, because the queued computation is the one autograd would have done.

The active queue is global to the process, not thread-local: autograd runs the backward of CUDA operations in its own
threads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["WeightGradQueue", "defer_weight_grad", "intercept_linear"]

_active: WeightGradQueue | None = None


class WeightGradQueue:
    """The weight gradients that one micro-batch's backward left for later.

    Holds the layer inputs and output gradients until :meth:`flush`; that memory is the price of deferring.
    """

    def __init__(self) -> None:
        self._pending: list[tuple[nn.Parameter, Callable[[], Tensor]]] = []

    def __len__(self) -> int:
        return len(self._pending)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """While active, :func:`defer_weight_grad` queues here instead of computing.

        ``F.linear`` stays intercepted, because activation checkpointing runs the forward again here.
        """
        global _active
        previous, _active = _active, self
        try:
            with intercept_linear():
                yield
        finally:
            _active = previous

    def add(self, parameter: nn.Parameter, compute: Callable[[], Tensor]) -> None:
        self._pending.append((parameter, compute))

    def tensors(self) -> list[Tensor]:
        """The tensors that the queued computations hold, as far as they are variables of the functions."""
        cells = (cell for _, compute in self._pending for cell in getattr(compute, "__closure__", None) or ())
        return [cell.cell_contents for cell in cells if isinstance(cell.cell_contents, Tensor)]

    def parameters(self) -> list[nn.Parameter]:
        """Those whose gradients wait, once for each gradient."""
        return [parameter for parameter, _ in self._pending]

    @torch.no_grad()
    def flush(self, done: Callable[[nn.Parameter], None] | None = None) -> None:
        """Computes every queued gradient, in the order of the backward, and adds it to ``parameter.grad``.

        Gradients of the same parameter are summed first, as in autograd: the bits depend on the order. ``done`` is
        called with each parameter as soon as it has all of them.
        """
        uses = Counter(id(parameter) for parameter, _ in self._pending)
        partial: dict[int, Tensor] = {}
        for parameter, compute in self._pending:
            key = id(parameter)
            grad = partial.pop(key) + compute() if key in partial else compute()
            uses[key] -= 1
            if uses[key]:
                partial[key] = grad
                continue
            if parameter.grad is None:
                parameter.grad = grad
            else:
                parameter.grad += grad
            if done is not None:
                done(parameter)
        self._pending.clear()


def defer_weight_grad(parameter: nn.Parameter, compute: Callable[[], Tensor]) -> Tensor | None:
    """Lets a custom layer take part in decoupled back-propagation.

    Call it in the ``backward`` of a :class:`torch.autograd.Function`, and return its result as the gradient of
    ``parameter``. In a fused backward it computes the gradient now; in a split one it queues ``compute`` and returns
    ``None``, and the gradient is added to ``parameter.grad`` in the W operation. A frozen parameter gets none.

    Args:
        parameter: leaf parameter without hooks, which would not see a deferred gradient.
        compute: returns the gradient, in the shape of ``parameter``; must hold everything it needs.

    Example::

        @staticmethod
        def backward(ctx, grad_output):
            x, = ctx.saved_tensors
            return grad_output * ctx.scale, defer_weight_grad(ctx.scale, lambda: (grad_output * x).sum(0))
    """
    if not parameter.requires_grad:
        return None
    if _active is None:
        return compute()
    _active.add(parameter, compute)
    return None


class _Linear(torch.autograd.Function):
    """``F.linear`` whose backward offers the weight and bias gradients to :func:`defer_weight_grad`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias = weight, bias
        return _linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad_output,) = grad_outputs
        (x,) = ctx.saved_tensors
        weight, bias = ctx.weight, ctx.bias
        flat_grad = grad_output.reshape(-1, grad_output.shape[-1])
        grad_x = flat_grad.mm(weight).view(x.shape) if ctx.needs_input_grad[0] else None
        grad_weight = grad_bias = None
        if ctx.needs_input_grad[1]:
            grad_weight = defer_weight_grad(weight, lambda: flat_grad.t().mm(x.reshape(-1, x.shape[-1])))
        if bias is not None and ctx.needs_input_grad[2]:
            grad_bias = defer_weight_grad(bias, lambda: flat_grad.sum(0))
        return grad_x, grad_weight, grad_bias


def _deferrable(parameter: Tensor | None) -> bool:
    """Whether a gradient of ``parameter`` may be added behind autograd's back: an unobserved leaf."""
    return parameter is None or (
        isinstance(parameter, nn.Parameter)
        and not parameter._backward_hooks
        and not getattr(parameter, "_post_accumulate_grad_hooks", None)
    )


_linear = F.linear


def _deferrable_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear``, through :class:`_Linear` where possible."""
    if (
        weight.requires_grad
        and not torch.compiler.is_compiling()  # the compiled backward has no W: the detour would only be traced too
        and torch.is_grad_enabled()
        and _deferrable(weight)
        and _deferrable(bias)
        and input.dim() >= 2
        and input.dtype == weight.dtype
        and not torch.is_autocast_enabled(input.device.type)
    ):
        return _Linear.apply(input, weight, bias)  # type: ignore[no-any-return]
    return _linear(input, weight, bias)


@contextmanager
def intercept_linear() -> Iterator[None]:
    """Within the block, ``torch.nn.functional.linear`` on trainable parameters is deferrable.

    The function is replaced in its module, where ``nn.Linear`` and ``nn.MultiheadAttention`` look it up at each call;
    code that imported it by name is not intercepted, but still correct. A ``TorchFunctionMode`` would catch that
    too, but sends every torch function through Python (measured: 5 to 18 % of a transformer block of width 128
    to 64).
    """
    previous, F.linear = F.linear, _deferrable_linear
    try:
        yield
    finally:
        F.linear = previous
