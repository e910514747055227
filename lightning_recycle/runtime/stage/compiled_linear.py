"""``F.linear`` for ``torch.compile``, with weight gradients that can wait.

Concept: the compiled backward asks at run time whether a weight gradient can wait. A compiled backward is a fixed
graph, of which the gradients of all weights are outputs. So two operations take part in it that no compiler looks into
(``torch.library.custom_op``). ``linear`` is the product. ``offer``, in its backward, either computes the gradients of
weight and bias, or lets somebody compute them later and returns zeros in their place, which autograd adds. Both are
opaque, so a graph needs no break (``fullgraph=True``).

What waits are copies of the layer's input and of the gradient of its output: the compiler may use their memory for
something else as soon as the operation has returned. The zeros are negative ones, which change nothing that they are
added to, not even a negative zero.

``offer`` has an effect that a compiler does not know of. So each call in a graph has a number, as two calls with the
same arguments would be made once (common subexpressions); and it is left out of CUDA graphs, which would repeat what
the device did and not what this operation did. torch without a way to say the latter (before 2.8, by
``Tag.cudagraph_unsafe``) has no such product: its compiled backwards compute all gradients.

Must not know: who lets gradients wait, and when they are computed.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Defer", "define_linear"]

Defer = Callable[[Tensor, Tensor | None, Tensor, Tensor], bool]
"""(weight, bias, x, gradient of the output) -> whether the gradients of weight and bias are computed later, from the
tensors ``x`` (rows, in) and gradient (rows, out)."""

_linear = F.linear
_HAS_TAGS = "tags" in inspect.signature(torch.library.custom_op).parameters
_UNSAFE = getattr(torch.Tag, "cudagraph_unsafe", None) if _HAS_TAGS else None


def define_linear(defer: Defer) -> Callable[[Tensor, Tensor, Tensor | None], Tensor] | None:
    """The product; None if torch is too old. Called once in a process.

    Its arguments are ``x`` (..., in), a weight (out, in) and a bias (out,) or None, which are cast to the dtype of
    ``x``.
    """
    if _UNSAFE is None:
        return None
    numbers = itertools.count()

    # torch reads these annotations to know the schema, and does not understand `X | None` in all versions.
    @torch.library.custom_op("lightning_recycle::linear", mutates_args=())
    def linear(x: Tensor, weight: Tensor, bias: Optional[Tensor]) -> Tensor:  # noqa: UP045
        return _linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    @linear.register_fake
    def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return x.new_empty(*x.shape[:-1], weight.shape[0])

    @torch.library.custom_op("lightning_recycle::offer", mutates_args=(), tags=(_UNSAFE,))
    def offer(
        grad: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Optional[Tensor],  # noqa: UP045
        number: int,
    ) -> tuple[Tensor, Tensor]:
        flat_grad, flat_x = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        if defer(weight, bias, flat_x, flat_grad):
            return _zeros(weight), grad.new_empty(0) if bias is None else _zeros(bias)
        return (
            flat_grad.t().mm(flat_x).to(weight.dtype),
            grad.new_empty(0) if bias is None else flat_grad.sum(0).to(bias.dtype),
        )

    @offer.register_fake
    def _(grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, number: int) -> tuple[Tensor, Tensor]:
        return weight.new_empty(weight.shape), grad.new_empty(0) if bias is None else bias.new_empty(bias.shape)

    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
        x, weight, bias = inputs
        ctx.has_bias = bias is not None
        ctx.save_for_backward(x, weight, *(() if bias is None else (bias,)))

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *rest = ctx.saved_tensors
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = grad.reshape(-1, grad.shape[-1]).mm(weight.to(grad.dtype)).view(x.shape)
        wants_bias = ctx.has_bias and ctx.needs_input_grad[2]
        of_weight, of_bias = offer(grad, x, weight, rest[0] if wants_bias else None, next(numbers))
        return grad_x, of_weight, of_bias if wants_bias else None

    linear.register_autograd(backward, setup_context=setup_context)
    return linear


def _zeros(parameter: Tensor) -> Tensor:
    return torch.full_like(parameter, -0.0, requires_grad=False)
