"""Split backward: weight gradients after the input gradients.

Inside :class:`intercept_linear` every product with a trainable leaf weight (``F.linear``, or ``torch.addmm`` as in
Hugging Face's ``Conv1D``), or a part of one (``nn.MultiheadAttention``), becomes an autograd function that, while a
:class:`WeightGradQueue` is active, returns only the input gradient and queues the weight and bias gradients. Under
autocast the product is that of the cast tensors. Other parameters get their gradient from autograd at once; the values
are bit-identical either way. The active queue is global to the process, not thread-local: autograd runs the backward of
a device's operations in its own threads.

Inside ``torch.compile`` the compiled backward is a fixed graph, of which all weights' gradients are outputs. So two
opaque operations take part in it (``torch.library.custom_op``): ``linear`` is the product;
``offer``, in its backward, either computes the gradients of weight and bias, or queues them and returns zeros, negative
ones, which change not even a negative zero. Copies of input and output gradient wait: the compiler may reuse their
memory. The compiler does not know of the effect of ``offer``, so each call in a graph has a number, or equal ones would
be merged; and it is left out of CUDA graphs, which torch before 2.8 cannot do: its compiled backwards compute all
gradients.
"""

from __future__ import annotations

import inspect
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_recycle.devices import UNSAFE_IN_GRAPHS
from lightning_recycle.torch_internals import is_transforming

_linear = F.linear
_HAS_TAGS = "tags" in inspect.signature(torch.library.custom_op).parameters
_UNSAFE = UNSAFE_IN_GRAPHS if _HAS_TAGS else None


def _zeros(parameter: Tensor) -> Tensor:
    return torch.full_like(parameter, -0.0, requires_grad=False)


_active: WeightGradQueue | None = None
_HALVED = (torch.float32, torch.float16, torch.bfloat16)  # what autocast turns into its own dtype


class _ViewPart(NamedTuple):
    """The part of a contiguous parameter that a view of it is."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, tensor: Tensor) -> Tensor:
        """The same part of the contiguous ``tensor``, of the shape of the parameter."""
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)


class _QueuedGradient(NamedTuple):
    """A gradient yet to be computed, for all of ``parameter`` or a part of it.

    It is computed in the dtype of autocast, which gradients of a whole parameter with one common cast keep until they
    are added; others do not (``widened``).
    """

    parameter: nn.Parameter
    compute: Callable[[], Tensor]
    part: _ViewPart | None = None
    widened: bool = False

    @property
    def key(self) -> Any:
        """The same for gradients that are summed first."""
        return id(self.parameter) if self.part is None else (id(self.parameter), self.part)


class WeightGradQueue:
    """Weight gradients of one micro-batch that its B left for its W.

    Holds layer inputs and output gradients until :meth:`flush`: the price of deferring.
    """

    def __init__(self) -> None:
        self._pending: list[_QueuedGradient] = []

    def __len__(self) -> int:
        return len(self._pending)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """While active, :func:`defer_weight_grad` queues here instead of computing.

        Products stay intercepted, because activation checkpointing runs the forward again here.
        """
        global _active
        previous, _active = _active, self
        try:
            with intercept_linear():
                yield
        finally:
            _active = previous

    def add(self, gradient: _QueuedGradient) -> None:
        self._pending.append(gradient)

    def tensors(self) -> list[Tensor]:
        """Tensors held by queued computations, as variables of their functions."""
        cells = (cell for queued in self._pending for cell in getattr(queued.compute, "__closure__", None) or ())
        return [cell.cell_contents for cell in cells if isinstance(cell.cell_contents, Tensor)]

    def parameters(self) -> list[nn.Parameter]:
        """Parameters with waiting gradients, once for each gradient."""
        return [queued.parameter for queued in self._pending]

    @torch.no_grad()
    def flush(self, done: Callable[[nn.Parameter], None] | None = None) -> None:
        """Adds every queued gradient to ``parameter.grad``, in the order of the backward.

        Gradients of the same parameter, or part of it, are summed first, as in autograd: the bits depend on the order.
        ``done`` is called with each complete parameter.
        """
        remaining = Counter(queued.key for queued in self._pending)
        uses = Counter(id(queued.parameter) for queued in self._pending) if done is not None else Counter()
        partial: dict[Any, Tensor] = {}
        for queued in self._pending:
            parameter, key = queued.parameter, queued.key
            grad = queued.compute()
            if queued.widened:
                grad = grad.to(parameter.dtype)
            if key in partial:
                grad = partial.pop(key) + grad
            remaining[key] -= 1
            if remaining[key]:
                partial[key] = grad
            else:
                _accumulate(parameter, queued.part, grad)
            if done is not None:
                uses[id(parameter)] -= 1
                if not uses[id(parameter)]:
                    done(parameter)
        self._pending.clear()


def _accumulate(parameter: nn.Parameter, view_part: _ViewPart | None, grad: Tensor) -> None:
    """Adds ``grad``, perhaps in autocast's dtype, to the gradient of ``parameter``."""
    if parameter.grad is None:
        if view_part is None:
            parameter.grad = grad.to(parameter.dtype)
            return
        parameter.grad = torch.zeros_like(parameter)
    if view_part is None:
        parameter.grad += grad
    else:
        view_part.of(parameter.grad).add_(grad)


def defer_weight_grad(parameter: nn.Parameter, compute: Callable[[], Tensor]) -> Tensor | None:
    """Lets a custom layer split its backward.

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
    _active.add(_QueuedGradient(parameter, compute))
    return None


def _defer(ctx: Any, weight: Tensor, compute: Callable[[], Tensor]) -> Tensor | None:
    """As :func:`defer_weight_grad`, for a parameter or a part of one."""
    if _active is None:
        return compute()
    if isinstance(weight, nn.Parameter):
        _active.add(_QueuedGradient(weight, compute, widened=not ctx.shares_cast))
        return None
    base = weight._base
    assert isinstance(base, nn.Parameter)
    offset = int(weight.storage_offset() - base.storage_offset())
    part = _ViewPart(tuple(weight.shape), weight.stride(), offset)
    _active.add(_QueuedGradient(base, compute, part, widened=True))
    return None


class _Linear(torch.autograd.Function):
    """``F.linear`` that offers weight and bias gradients to :func:`defer_weight_grad`.

    ``x`` is (..., in), ``weight`` (out, in), or (in, out) if ``is_transposed``, as that of ``torch.addmm``; weight and
    ``bias`` are cast to the dtype of ``x``, as by autocast.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, is_transposed: bool) -> Tensor:
        ctx.weight, ctx.bias, ctx.is_transposed = weight, bias, is_transposed
        ctx.shares_cast = torch.is_autocast_cache_enabled()
        cast = weight.to(x.dtype)
        ctx.save_for_backward(x, *(() if cast is weight else (cast,)))
        return _linear(x, cast.t() if is_transposed else cast, None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad_output,) = grad_outputs
        x, *cast = ctx.saved_tensors  # if there is a cast weight, it is that
        weight, bias, is_transposed = ctx.weight, ctx.bias, ctx.is_transposed
        flat_grad = grad_output.reshape(-1, grad_output.shape[-1])
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            factor = cast[0] if cast else weight
            grad_x = flat_grad.mm(factor.t() if is_transposed else factor).view(x.shape)
        if ctx.needs_input_grad[1] and is_transposed:
            grad_weight = _defer(ctx, weight, lambda: x.t().mm(flat_grad))
        elif ctx.needs_input_grad[1]:
            grad_weight = _defer(ctx, weight, lambda: flat_grad.t().mm(x.reshape(-1, x.shape[-1])))
        if bias is not None and ctx.needs_input_grad[2]:
            grad_bias = _defer(ctx, bias, lambda: flat_grad.sum(0))
        return grad_x, grad_weight, grad_bias, None


# ``Function.apply`` asks whether functorch transforms are active, and takes apart what such have left behind: a fourth
# of what it takes. Here that is asked first, and a product within one is the ordinary one.
_apply_linear: Callable[[Tensor, Tensor, Tensor | None, bool], Tensor] = super(torch.autograd.Function, _Linear).apply
_is_cast: Callable[[], bool] = torch._C._is_any_autocast_enabled


def _deferrable(parameter: Tensor | None) -> bool:
    """Whether ``parameter`` is an unobserved leaf, or a part of one."""
    if parameter is None:
        return True
    leaf: Any = parameter
    if not isinstance(parameter, nn.Parameter):
        leaf = parameter._base
        if (
            not isinstance(leaf, nn.Parameter)
            or parameter.dtype != leaf.dtype
            or parameter._backward_hooks
            or parameter.retains_grad
            or not leaf.is_contiguous()
        ):
            return False
    return not leaf._backward_hooks and not getattr(leaf, "_post_accumulate_grad_hooks", None)


def _as_computed(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """``input`` in the product's dtype; None if undecided here."""
    dtype = input.dtype
    if not _is_cast() or not torch.is_autocast_enabled(device := input.device.type):
        return input if dtype is weight.dtype and (bias is None or dtype is bias.dtype) else None
    if input.is_leaf and input.requires_grad:  # autocast casts it once for all uses, and adds their gradients first
        return None
    if dtype in _HALVED and weight.dtype in _HALVED and (bias is None or bias.dtype in _HALVED):
        return input.to(torch.get_autocast_dtype(device))
    return None


_addmm = torch.addmm


def _defer_compiled(weight: Tensor, bias: Tensor | None, x: Tensor, grad: Tensor) -> bool:
    """Queues the gradients of a compiled product, if they can wait."""
    parameters = (weight,) if bias is None else (weight, bias)
    if _active is None or not all(isinstance(p, nn.Parameter) and _deferrable(p) for p in parameters):
        return False
    x, grad = x.clone(), grad.clone()
    assert isinstance(weight, nn.Parameter)
    _active.add(_QueuedGradient(weight, lambda: grad.t().mm(x), widened=True))
    if isinstance(bias, nn.Parameter):
        _active.add(_QueuedGradient(bias, lambda: grad.sum(0), widened=True))
    return True


def _define_linear() -> Callable[[Tensor, Tensor, Tensor | None], Tensor] | None:
    """The product for compiled graphs; None if torch is too old.

    ``x`` (..., in), weight (out, in) and bias (out,) or None; both are cast to the dtype of ``x``.
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
        if _defer_compiled(weight, bias, flat_x, flat_grad):
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
        x, weight, *biases = ctx.saved_tensors
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = grad.reshape(-1, grad.shape[-1]).mm(weight.to(grad.dtype)).view(x.shape)
        wants_bias = ctx.has_bias and ctx.needs_input_grad[2]
        grad_weight, grad_bias = offer(grad, x, weight, biases[0] if wants_bias else None, next(numbers))
        return grad_x, grad_weight, grad_bias if wants_bias else None

    linear.register_autograd(backward, setup_context=setup_context)
    return linear


_compiled_linear = _define_linear()


def _linear_in_graph(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``F.linear`` for ``torch.compile``."""
    kind, dtypes = input.device.type, (input.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype)
    if _compiled_linear is not None and isinstance(weight, nn.Parameter) and torch.is_grad_enabled():
        if torch.is_autocast_enabled(kind):
            if all(dtype in _HALVED for dtype in dtypes):
                return _compiled_linear(input.to(torch.get_autocast_dtype(kind)), weight, bias)
        elif dtypes[0] == dtypes[1] == dtypes[2]:
            return _compiled_linear(input, weight, bias)
    return _linear(input, weight, bias)


def _deferrable_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear``, through :class:`_Linear` where possible."""
    if torch.compiler.is_compiling():
        in_graph = weight.requires_grad and input.dim() >= 2
        return _linear_in_graph(input, weight, bias) if in_graph else _linear(input, weight, bias)
    if (
        weight.requires_grad
        and torch.is_grad_enabled()
        and not is_transforming()
        and _deferrable(weight)
        and _deferrable(bias)
        and input.dim() >= 2
        and (x := _as_computed(input, weight, bias)) is not None
    ):
        return _apply_linear(x, weight, bias, False)
    return _linear(input, weight, bias)


def _deferrable_addmm(*args: Any, **options: Any) -> Tensor:
    """``torch.addmm``, through :class:`_Linear` where it is a layer. Not compiled."""
    is_plain = not torch.compiler.is_compiling() and torch.is_grad_enabled() and not is_transforming()
    if len(args) == 3 and not options and is_plain:
        bias, input, weight = args
        if (
            weight.requires_grad
            and isinstance(weight, nn.Parameter)
            and isinstance(bias, nn.Parameter)
            and bias.shape == weight.shape[1:]
            and _deferrable(weight)
            and _deferrable(bias)
            and (x := _as_computed(input, weight, bias)) is not None
        ):
            return _apply_linear(x, weight, bias, True)
    return _addmm(*args, **options)


# A compiler that is first used within the block calls torch's functions by these names, also in code that it caches for
# processes in which it was loaded before.
_deferrable_linear.__name__, _deferrable_addmm.__name__ = _linear.__name__, _addmm.__name__


class intercept_linear:
    """The context in which ``F.linear`` and ``torch.addmm`` are deferrable.

    The functions are replaced in their modules, where ``nn.Linear``, ``nn.MultiheadAttention`` and ``Conv1D`` look them
    up at each call; code that imported one by name is not intercepted, but still correct. A ``TorchFunctionMode`` would
    catch that too, but sends every torch function through Python (measured: 5 to 18 % of a transformer block of width
    128 to 64).
    """

    __slots__ = ("_previous",)

    def __enter__(self) -> None:
        self._previous = F.linear, torch.addmm
        F.linear, torch.addmm = _deferrable_linear, _deferrable_addmm

    def __exit__(self, *_: object) -> None:
        F.linear, torch.addmm = self._previous
