"""Copies of layers that follow the steps of the optimizer on another worker.

Concept: parameters and the states of optimizers change in steps alone, and by what a step uses: the gradients, and the
options of the groups. So a copy of them, and what each step has used since, make the same state elsewhere, by the same
code. What else a layer has (buffers, whatever its module keeps) is small and changes when it likes; it comes at the end
(:class:`Rest`), with a checksum of what was not sent again. An optimizer that does more than that, such as one that
draws random numbers, or a callback that changes parameters between steps, leads to another checksum.

Method: migration by copying ahead ("pre-copy", Clark et al., NSDI 2005), with steps instead of pages.
"""

from __future__ import annotations

import copy
import logging
import pickle
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_recycle.model.apart import put_together, take_apart
from lightning_recycle.runtime.checksums import checksum
from lightning_recycle.runtime.layer_streams import Parcel

__all__ = ["FollowedLayers", "Rest", "follow", "travels"]

log = logging.getLogger(__name__)

_KEPT_STEPS = 3  # that a receiver may lack at the end


@dataclass(frozen=True)
class _Step:
    """What a step of an optimizer has used of the parameters that are copied.

    Args:
        optimizer: its number.
        groups: of each the options, and the gradients by the number of the parameter.
    """

    optimizer: int
    groups: list[tuple[dict[str, Any], dict[int, Tensor]]]


@dataclass(frozen=True)
class Rest:
    """What a receiver lacks of layers that it has a copy of.

    Args:
        skeleton: of the layers, without their tensors, as they are now.
        tensors: those; a number stands for one of the copy.
        steps: those that the copy has to make.
        checksum: of the tensors of the copy that are used.
        facts: what else belongs to the layers.
    """

    skeleton: bytes
    tensors: list[Any]
    steps: list[tuple[bytes, list[Tensor]]]
    checksum: bytes
    facts: Mapping[str, Any] = field(default_factory=dict)


def travels(tensor: Tensor) -> bool:
    """Whether a tensor goes apart from what is pickled around it."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided


class FollowedLayers:
    """The parameters of some layers, as they are copied; a :class:`~lightning_recycle.runtime.layers_ahead.LayerCopy`.

    Args:
        parameters: those, each once.
        optimizers: all of this worker.
        receivers: how many get the copy.
        tell: gets the parcels.
        apart: takes the layers apart as they are now: (skeleton, tensors, facts).
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        optimizers: Sequence[Optimizer],
        receivers: int,
        tell: Callable[[Parcel], None],
        apart: Callable[[], tuple[bytes, list[Tensor], Mapping[str, Any]]],
    ) -> None:
        self._numbers = {parameter: number for number, parameter in enumerate(parameters)}
        self._tell, self._apart, self._receivers = tell, apart, receivers
        self._steps: deque[Parcel] = deque(maxlen=_KEPT_STEPS)
        self._count = 0
        states = [
            {number: optimizer.state[p] for p, number in self._numbers.items() if p in optimizer.state}
            for optimizer in optimizers
        ]
        skeleton, tensors = take_apart((list(parameters), states), travels)
        self._copied = tensors  # kept, so that nothing else gets their identities
        self._places = {id(tensor): place for place, tensor in enumerate(tensors)}
        self._beginning = Parcel(_head(skeleton, tensors), [tensor.detach() for tensor in tensors], receivers)
        self._handles = [
            handle
            for number, optimizer in enumerate(optimizers)
            for handle in (
                optimizer.register_step_pre_hook(lambda *_: self._beginning.secure()),
                optimizer.register_step_post_hook(lambda one, *_, number=number: self._follow(number, one)),
            )
        ]
        tell(self._beginning)

    def rest(self, steps: int) -> Rest | None:
        lacks = self._count - steps
        if lacks > len(self._steps):
            return None
        skeleton, tensors, facts = self._apart()
        known = [self._places.get(id(tensor)) for tensor in tensors]
        used = [tensor for tensor, number in zip(tensors, known, strict=True) if number is not None]
        sent = [t.detach() if number is None else number for t, number in zip(tensors, known, strict=True)]
        missing = [(parcel.skeleton, parcel.tensors) for parcel in self._steps][len(self._steps) - lacks :]
        return Rest(skeleton, sent, missing, checksum(used), facts)

    def end(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._beginning = Parcel(b"", [])

    @torch.no_grad()
    def _follow(self, number: int, optimizer: Optimizer) -> None:
        groups = []
        for group in optimizer.param_groups:
            members = [p for p in group["params"] if p in self._numbers and p.grad is not None]
            options = {key: value for key, value in group.items() if key != "params"}
            groups.append((copy.deepcopy(options), {self._numbers[p]: p.grad.detach().clone() for p in members}))
        skeleton, tensors = take_apart(_Step(number, groups), travels)
        step = Parcel(_head(skeleton, tensors), tensors, self._receivers + 1)  # this worker keeps it, too
        self._steps.append(step)
        self._count += 1
        self._tell(step)


def follow(
    parcels: Sequence[Parcel], rest: Rest, optimizers: Sequence[Optimizer], device: torch.device
) -> list[Tensor] | None:
    """The tensors of the layers whose copy is ``parcels`` and ``rest``; None if they are not what they should be.

    Args:
        parcels: the beginning, and steps; their tensors are used up.
        rest: what came at the end.
        optimizers: as those that have made the steps; they stay as they are.
        device: where tensors were that were not on the CPU.
    """
    begun, *steps = [(parcel.skeleton, parcel.tensors) for parcel in parcels] + rest.steps
    (plain, states), copied = _together(*begun, device)
    parameters = [nn.Parameter(parameter) for parameter in plain]
    try:
        for one in steps:
            step: _Step = _together(*one, device)[0]
            _make(step, optimizers[step.optimizer], parameters, states[step.optimizer])
    except Exception as error:  # of an optimizer of the user's, which need not take part in this
        log.info("Layers come whole: %s cannot follow its steps (%r).", type(optimizers[0]).__name__, error)
        return None
    tensors = [copied[tensor] if isinstance(tensor, int) else tensor for tensor in rest.tensors]
    used = [tensor for tensor, number in zip(tensors, rest.tensors, strict=True) if isinstance(number, int)]
    if checksum(used) == rest.checksum:
        return tensors
    log.info("Layers come whole: their copy has come to other bits.")
    return None


def _head(skeleton: bytes, tensors: Sequence[Tensor]) -> bytes:
    """A skeleton, and which of its tensors are not on the CPU."""
    return pickle.dumps((skeleton, [tensor.device.type != "cpu" for tensor in tensors]))


def _together(head: bytes, tensors: Sequence[Tensor], device: torch.device) -> tuple[Any, list[Tensor]]:
    """What was taken apart, and its tensors."""
    skeleton, on_device = pickle.loads(head)
    placed = [tensor.to(device) if there else tensor for tensor, there in zip(tensors, on_device, strict=True)]
    return put_together(skeleton, placed), placed


def _make(
    step: _Step, optimizer: Optimizer, parameters: Sequence[nn.Parameter], states: dict[int, dict[str, Any]]
) -> None:
    """Makes ``step`` with ``parameters``, and ``states`` by number of the parameter; ``optimizer`` stays as it is."""
    twin = copy.copy(optimizer)  # without its hooks, and what schedulers have made of its step
    for name, value in vars(optimizer).items():
        if name not in vars(twin) and name != "step":
            setattr(twin, name, value)
    twin.state = defaultdict(dict, {parameters[number]: state for number, state in states.items()})
    twin.param_groups = [{**options, "params": [parameters[n] for n in grads]} for options, grads in step.groups]
    for _, grads in step.groups:
        for number, grad in grads.items():
            parameters[number].grad = grad
    type(optimizer).step(twin)
    for parameter in parameters:
        parameter.grad = None
    states.update({number: twin.state[p] for number, p in enumerate(parameters) if p in twin.state})
