"""One pipeline stage: layers, run as F, R, B, W or BW on micro-batches.

The stage holds a micro-batch's needs between its operations: after F the inputs and the graph (or, before an R, the
inputs alone), after B the queued weight gradients. Before an R the first forward is a usual one, with autograd, so the
output is the same; but the tensors that autograd saves are dropped at once. The second run begins with the same *input*
(the first run gets copies, as layers may write into their inputs); *randomness*, autocast and
changing values of layers follow from the micro-batch. Hooks of layers run twice, as with ``torch.utils.checkpoint``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from lightning_recycle.devices import default_generator
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.randomness import microbatch_randomness
from lightning_recycle.runtime.deferred import WeightGradQueue, intercept_linear
from lightning_recycle.tensor_memory import whole
from lightning_recycle.torch_internals import drop_unsharded_gradients, hooks_outside_of_transforms, is_fsdp_root


def fully_sharded_modules(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """The ``modules`` that ``fully_shard`` was called for, each once."""
    kind = _fsdp_module()
    if kind is not None:
        yield from (module for module in dict.fromkeys(modules) if isinstance(module, kind))


def unsharded_class(kind: type[Any]) -> type[Any]:
    """The class of an object of ``kind`` before ``fully_shard`` changed it."""
    bases = kind.__bases__
    return bases[1] if len(bases) == 2 and bases[0] is _fsdp_module() else kind


def _fsdp_module() -> type[Any] | None:
    """FSDP's class of sharded modules, if it was imported; importing it takes long."""
    return getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)


def can_be_reset() -> bool:
    """Whether this torch can begin a step again after an aborted one: from 2.13 on."""
    from torch.distributed.fsdp import FSDPModule

    return hasattr(FSDPModule, "reset_iter_state")


Value = Tensor | tuple[Tensor | None, ...]
Sharing: TypeAlias = Callable[[Sequence[nn.Module], int | None], tuple[Sequence[nn.Module], int]]
"""(layers of a stage, micro-batch or None) -> (its layers there, offset).

The offset is the index of the first of these layers in the whole model.
"""

_NOTHING = nullcontext()


@dataclass
class _InFlight:
    """Values of a micro-batch of ``step`` that stay from its F to its B or W."""

    step: int
    input_grads: list[Tensor | None] = field(default_factory=list)
    outputs: tuple[Any, ...] = ()
    kept_input: Any = None  # if it is to be computed again
    queue: WeightGradQueue = field(default_factory=WeightGradQueue)


class _Enter(torch.autograd.Function):
    """Entry of a received tensor into this stage's graph, and exit of its gradient.

    A leaf that requires a gradient would do, except for in-place layers such as ``nn.ReLU(inplace=True)``, which
    autograd forbids on leaves and their views. ``anchor``: a scalar that requires a gradient, and passes this on.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, received: Tensor, grads: list[Tensor | None], index: int) -> Tensor:
        ctx.grads, ctx.index = grads, index
        entered = torch.empty(0, dtype=received.dtype, device=received.device)
        entered.set_(received)  # type: ignore[call-overload]
        return entered

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[None, None, None, None]:
        ctx.grads[ctx.index] = grad_outputs[0]
        return None, None, None, None


class Stage:
    """The layers of one stage.

    Args:
        loss: on the last stage, maps (output, target) to the scalar mean over the micro-batch; else None.
        evaluation_layers: layers for :meth:`evaluate`, if different.
        loss_is_optional: whether a micro-batch may have no loss (None); then it adds nothing to the gradient.
        takes_target: whether the layers take the previous stage's message as one argument, and the target behind it.
        sharing: which layers a micro-batch runs here, if neighbouring stages share some; None: all.

    Attributes:
        seed: seed of the run, for the micro-batches that begin from now on.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        first_layer: int,
        seed: int,
        device: torch.device,
        loss: Callable[[Any, Any], Tensor | None] | None = None,
        forward_context: Callable[[], AbstractContextManager[Any]] = lambda: _NOTHING,
        evaluation_layers: Sequence[nn.Module] | None = None,
        forward_layers: Sequence[nn.Module] | None = None,
        loss_name: str = "loss",
        loss_backward: Callable[[Tensor], None] | None = None,
        loss_is_optional: bool = False,
        takes_target: bool = False,
        scale_loss: Callable[[Tensor], Tensor] | None = None,
        sharing: Sharing | None = None,
    ) -> None:
        self._scale_loss = scale_loss
        self._sharing = sharing
        self._takes_target = takes_target
        self._layers = list(layers)
        self._evaluation_layers = self._layers if evaluation_layers is None else list(evaluation_layers)
        self._forward_layers = self._layers if forward_layers is None else list(forward_layers)
        self._first_layer = first_layer
        self.seed = seed
        self._device = device
        self._loss = loss
        self._loss_name = loss_name
        self._loss_backward = loss_backward
        self._loss_is_optional = loss_is_optional
        self._forward_context = forward_context
        self._in_flight: dict[int, _InFlight] = {}
        self._modes: list[tuple[nn.Module, bool]] = []
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        self._generator = default_generator(device)
        self._fully_sharded = list(fully_sharded_modules(self.modules()))

    @property
    def layers(self) -> Sequence[nn.Module]:
        return self._layers

    def remember_modes(self) -> None:
        """Records which modules are in training mode, for :meth:`as_in_training`."""
        self._modes = [(module, module.training) for layer in self._layers for module in layer.modules()]

    @contextmanager
    def as_in_training(self) -> Iterator[None]:
        """The context with gradients on and the modules in their recorded modes.

        A training step can be redone during validation.
        """
        now = [(module, module.training) for module, _ in self._modes]
        self._set_modes(self._modes)
        try:
            with torch.enable_grad():
                yield
        finally:
            self._set_modes(now)

    def _set_modes(self, modes: list[tuple[nn.Module, bool]]) -> None:
        for module, training in modes:
            module.training = training

    def clear(self) -> None:
        """Drops every micro-batch in flight, and whatever layers keep of it.

        Layers of FSDP2 gather parameters, which later changes of the shards do not reach, and sum gradients over the
        position's members after each backward, to which the next backward would add.
        """
        self._in_flight.clear()
        for module in self._fully_sharded:
            if is_fsdp_root(module):  # known from the first forward on
                module.reset_iter_state()
            drop_unsharded_gradients(module)

    def forward(
        self,
        step: int,
        microbatch: int,
        value: Any,
        target: Any = None,
        *,
        split_backward: bool,
        recomputed: bool = False,
    ) -> Value:
        """F: runs the layers on ``value`` and keeps the graph; the output, detached.

        ``value``: input of the first layer, or the message of the previous stage; gradients that it requires are sent
        back. ``recomputed``: :meth:`recompute` will make the graph, so only ``value`` is kept; not on the last stage,
        where :meth:`loss` follows.
        """
        state = self._in_flight[microbatch] = _InFlight(step)
        if recomputed:
            state.kept_input, copy = value, apply_to_collection(value, Tensor, _copy)
            nothing = torch.autograd.graph.saved_tensors_hooks(_nothing, _never)
            with hooks_outside_of_transforms(nothing):  # autograd saves nothing
                output = self._with_graph(_InFlight(step), microbatch, copy, target, split_backward)
        else:
            output = self._with_graph(state, microbatch, value, target, split_backward)
        if self._loss is not None:
            return output  # type: ignore[no-any-return]
        self._check_output(output)
        return tuple(_detached(item) for item in output) if isinstance(output, tuple) else _detached(output)  # type: ignore[return-value]

    def recompute(self, microbatch: int, *, split_backward: bool) -> None:
        """R: the forward again, which keeps the graph."""
        state = self._in_flight[microbatch]
        kept, state.kept_input = state.kept_input, None
        self._with_graph(state, microbatch, kept, None, split_backward)

    def _with_graph(self, state: _InFlight, microbatch: int, value: Any, target: Any, split_backward: bool) -> Any:
        """Runs the layers; ``state`` gets the beginning of the backward."""
        inputs = value if isinstance(value, tuple) else (value,)
        state.input_grads = [None] * len(inputs)
        if self._first_layer > 0:
            inputs = tuple(
                _Enter.apply(self._anchor, t.detach(), state.input_grads, i) if t is not None and t.requires_grad else t
                for i, t in enumerate(inputs)
            )
        if self._takes_target:
            inputs = (inputs, *target)
        defers = split_backward and not self._fully_sharded  # FSDP sums gradients at the end of each backward
        with self._forward_context(), intercept_linear() if defers else _NOTHING:
            output = whole(self._run(self._layers, state.step, microbatch, inputs))
        state.outputs = output if isinstance(output, tuple) else (output,)
        return output

    def _check_output(self, output: Any) -> None:
        """Raises ConfigurationError for values that cannot be sent to the next stage."""
        for item in output if isinstance(output, tuple) else (output,):
            if not (isinstance(item, Tensor) or (item is None and isinstance(output, tuple))):
                raise ConfigurationError(
                    f"Layer {self._first_layer + len(self._layers) - 1} ({type(self._layers[-1]).__name__}) is the"
                    f" last of its stage and returned an object of type {type(item).__name__}; between stages"
                    " only tensors and tuples of tensors and None can be passed."
                )

    def evaluate(self, step: int, microbatch: int, value: Any, target: Any = None) -> Value:
        """Runs the layers without gradients; arguments as of :meth:`forward`."""
        with self._forward_context():
            return self._without_backward(self._evaluation_layers, step, microbatch, value, target)

    def run(self, step: int, draw: int, value: Any, target: Any = None) -> Value:
        """Runs the layers for a hook of the user's, in the context of the caller."""
        return self._without_backward(self._forward_layers, step, draw, value, target, is_one=False)

    def _without_backward(
        self, layers: Sequence[nn.Module], step: int, draw: int, value: Any, target: Any, is_one: bool = True
    ) -> Value:
        inputs = value if isinstance(value, tuple) else (value,)
        output = whole(self._run(layers, step, draw, (inputs, *target) if self._takes_target else inputs, is_one))
        if self._loss is None:
            self._check_output(output)
        return output  # type: ignore[no-any-return]

    def _run(
        self, layers: Sequence[nn.Module], step: int, microbatch: int, inputs: tuple[Any, ...], is_one: bool = True
    ) -> Any:
        """Runs the layers that ``microbatch`` runs here; not ``is_one``: all of them."""
        value: Any = inputs
        first = self._first_layer
        if self._sharing is not None:
            layers, first = self._sharing(layers, microbatch if is_one else None)
        with microbatch_randomness(self._generator, self.seed, step, microbatch) as draw_for:
            try:
                for index, layer in enumerate(layers, first):
                    draw_for(index)
                    value = layer(*value) if isinstance(value, tuple) else layer(value)
            except Exception as error:
                users = not type(layer).__module__.startswith("lightning_recycle.")  # the step of a whole module is not
                if users and hasattr(error, "add_note"):  # Python 3.11
                    error.add_note(f"In layers[{index}], {layer}, for {_in_words(value)}.")
                raise
        return value

    def loss(self, step: int, microbatch: int, output: Any, target: Any, divisor: int) -> Tensor:
        """Computes a micro-batch's loss and ends the graph with its share of the mean.

        Returns the loss, detached, 0-dimensional; zero if it has none. Raises ConfigurationError if the module's loss
        is not a scalar tensor that depends on the parameters.
        """
        assert self._loss is not None
        with self._forward_context(), microbatch_randomness(self._generator, self.seed, step, microbatch) as draw_for:
            draw_for(self._first_layer + len(self._layers))
            loss = whole(self._loss(output, target))
        if loss is None and self._loss_is_optional:
            self._in_flight[microbatch].outputs = ()
            return torch.zeros((), device=self._device)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got, remedy = f"a {type(loss).__name__}", ""
            if isinstance(loss, Tensor):
                got, remedy = f"a tensor of shape {tuple(loss.shape)}", " Add .mean()."
            elif isinstance(loss, (int, float)):
                remedy = " Return the tensor itself instead of .item()."
            in_dict = ", or a dict with it as 'loss'" if self._loss_is_optional else ""
            raise ConfigurationError(
                f"{self._loss_name}() returned {got}; it must return a scalar tensor, the mean over the"
                f" micro-batch{in_dict}.{remedy}"
            )
        if not loss.requires_grad:
            raise ConfigurationError(
                f"{self._loss_name}() returned a tensor without a gradient: compute it with differentiable"
                " operations, outside torch.no_grad()."
            )
        share = loss / divisor
        self._in_flight[microbatch].outputs = (share if self._scale_loss is None else self._scale_loss(share),)
        return loss.detach() if loss.dim() == 0 else loss.detach().reshape(())

    def backward(self, microbatch: int, grads: Value | None) -> Value | None:
        """BW: gradients of the inputs from ``grads`` of the outputs; None at either end."""
        state = self._in_flight.pop(microbatch)
        # Activation checkpointing runs layers again.
        with microbatch_randomness(self._generator, self.seed, state.step, microbatch):
            self._differentiate(state, grads)
        return self._input_grads(state)

    def backward_input(self, microbatch: int, grads: Value | None) -> Value | None:
        """B: gradients of the inputs; those of weights wait for :meth:`backward_weight`."""
        state = self._in_flight[microbatch]
        with state.queue.collecting(), microbatch_randomness(self._generator, self.seed, state.step, microbatch):
            self._differentiate(state, grads)
        result = self._input_grads(state)
        state.outputs, state.input_grads = (), []  # the graph is consumed; only the queue holds memory
        return result

    def forget(self, microbatch: int) -> None:
        """Drops the rest of a micro-batch whose B is done and whose W will not come."""
        self._in_flight.pop(microbatch, None)

    def backward_weight(self, microbatch: int, done: Callable[[nn.Parameter], None] | None = None) -> None:
        """W: the queued weight gradients; ``done`` is called with each complete parameter."""
        self._in_flight.pop(microbatch).queue.flush(done)

    def waiting_parameters(self, microbatch: int) -> list[nn.Parameter]:
        """The parameters whose gradients W of ``microbatch`` completes."""
        return self._in_flight[microbatch].queue.parameters()

    def untouched(self, microbatch: int) -> set[int]:
        """Ids of parameters whose layers a neighbour runs for ``microbatch`` instead."""
        if self._sharing is None:
            return set()
        run, _ = self._sharing(self._layers, microbatch)
        here, all_here = ({id(p) for layer in layers for p in layer.parameters()} for layers in (run, self._layers))
        return all_here - here

    @property
    def differentiates_itself(self) -> bool:
        """Whether a micro-batch's backward is autograd's, and not the user's."""
        return self._loss_backward is None

    @property
    def has_loss(self) -> bool:
        return self._loss is not None

    def modules(self) -> Iterator[nn.Module]:
        yield from dict.fromkeys(module for layer in self._layers for module in layer.modules())

    def named_leaves(self) -> Iterator[tuple[str, nn.Module]]:
        """The modules without children in its layers, with names for people."""
        for index, layer in enumerate(self._layers, self._first_layer):
            for name, module in layer.named_modules():
                if not any(module.children()):
                    path = f"{index}.{name}" if name else str(index)
                    yield f"layer {path} ({type(module).__name__})", module

    def waiting(self, microbatch: int) -> list[Tensor]:
        """Tensors that W of ``microbatch`` needs, between its B and its W."""
        return self._in_flight[microbatch].queue.tensors()

    def _differentiate(self, state: _InFlight, grads: Value | None) -> None:
        """Runs the backward from ``grads`` of the outputs; without them, from the loss."""
        if grads is None:
            if not state.outputs:
                pass  # this micro-batch has no loss
            elif self._loss_backward is not None:
                self._loss_backward(state.outputs[0])
            else:
                torch.autograd.backward(state.outputs)
            return
        received = grads if isinstance(grads, tuple) else (grads,)
        pairs = [
            (output, grad)
            for output, grad in zip(state.outputs, received, strict=True)
            if output is not None and grad is not None and output.requires_grad
        ]
        if pairs:
            outputs, gradients = zip(*pairs, strict=True)
            torch.autograd.backward(outputs, gradients)

    def _input_grads(self, state: _InFlight) -> Value | None:
        return tuple(state.input_grads) if self._first_layer > 0 else None


def _detached(item: Tensor | None) -> Tensor | None:
    """A tensor out of this stage's graph; it may want its gradient back."""
    return None if item is None else item.detach().requires_grad_(item.requires_grad)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in a stage's input."""
    found: list[Tensor] = []
    apply_to_collection(value, Tensor, found.append)
    return found


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _nothing(tensor: Tensor) -> None:
    return None


def _never(_: None) -> NoReturn:
    raise RuntimeError("The graph of a forward that is computed again has no backward: its R must come first.")


def _in_words(value: Any) -> str:
    """The shapes and types of a layer's arguments."""
    values = value if isinstance(value, tuple) else (value,)
    shown = (f"{tuple(v.shape)} {v.dtype}" if isinstance(v, Tensor) else type(v).__name__ for v in values)
    return f"an input of {', '.join(shown)}"
