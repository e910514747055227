"""The gradients of several steps of the schedule that one step of the optimizer takes together.

With gradient accumulation Lightning counts batches, and so does the schedule: each batch is a step of it, with a
recovery of its own, and its reduced gradient is added here, on every worker of the stage alike. So a failure costs one
batch, however many are accumulated; what earlier batches have added is held by all peers.

The buffers of a step stay as REDUCE left them, since a peer may have to adopt them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn

from lightning_recycle.runtime.gradients import GradientBuffers

__all__ = ["AccumulatedGradients", "Share"]


@dataclass(frozen=True)
class Share:
    """What a batch is of the step of the optimizer that it belongs to.

    Args:
        batches: the number of batches by which the sum of their gradients is divided.
        begins: whether it is the first of them.
        ends: whether the optimizer steps after it.
    """

    batches: int = 1
    begins: bool = True
    ends: bool = True


class AccumulatedGradients:
    """What the batches since the newest step of the optimizer have added up to; nothing where none accumulates.

    Args:
        gradients: the gradients of each step of the schedule.
        parameters: the parameters of the stage.
        sums: what it begins with.
    """

    def __init__(
        self,
        gradients: GradientBuffers,
        parameters: Sequence[nn.Parameter],
        sums: Mapping[nn.Parameter, Tensor] = MappingProxyType({}),
    ) -> None:
        self._gradients = gradients
        self._parameters = list(parameters)
        self._sums: dict[nn.Parameter, Tensor] = dict(sums)

    @torch.no_grad()
    def add(self, step: int, share: Share) -> None:
        """Makes each ``parameter.grad`` what it is on one device after the backward of the batch of ``step``."""
        self._gradients.hand_over(step)
        if share.begins:
            self._sums = {}
        if share == Share():
            return
        found = {p: p.grad for p in self._parameters if p.grad is not None}
        known = [p for p in found if p in self._sums]
        if known:
            torch._foreach_add_([self._sums[p] for p in known], [found[p] for p in known], alpha=1 / share.batches)
        self._sums.update({p: grad / share.batches for p, grad in found.items() if p not in self._sums})
        self._attach()

    def attach(self, step: int) -> None:
        """Makes each ``parameter.grad`` again what it was after :meth:`add`, of which ``step`` was the newest."""
        self._gradients.hand_over(step, again=True)
        self._attach()

    def _attach(self) -> None:
        for parameter, total in self._sums.items():
            parameter.grad = total

    @torch.no_grad()
    def squared_norm(self, step: int, share: Share, without: Collection[nn.Parameter] = ()) -> float:
        """The sum of squares of all gradients that the optimizer gets if it steps after ``step``, except those of the
        parameters ``without``.
        """
        if share == Share():
            return self._gradients.squared_norm(step, without)
        left_out = {id(parameter) for parameter in without}
        counted = [total for parameter, total in self._totals(step, share).items() if id(parameter) not in left_out]
        return float(sum(float(norm) ** 2 for norm in torch._foreach_norm(counted))) if counted else 0.0

    @torch.no_grad()
    def is_finite(self, step: int, share: Share) -> bool:
        """Whether all gradients that the optimizer gets if it steps after ``step`` are finite."""
        whole = share == Share()
        found = self._gradients.of_step(step) if whole else list(self._totals(step, share).values())
        return not found or bool(torch.stack([torch.isfinite(tensor).all() for tensor in found]).all())

    def _totals(self, step: int, share: Share) -> dict[nn.Parameter, Tensor]:
        """The sums as they will be after the batch of ``step``."""
        totals = {} if share.begins else dict(self._sums)
        for parameter, gradient in self._gradients.by_parameter(step):
            part = gradient / share.batches
            totals[parameter] = totals[parameter] + part if parameter in totals else part
        return totals

    @property
    def sums(self) -> Mapping[nn.Parameter, Tensor]:
        """What they have added up to, by parameter."""
        return self._sums

    def state(self) -> dict[int, Tensor]:
        """For a worker that joins this stage, by the index of the parameter."""
        return {index: self._sums[p] for index, p in enumerate(self._parameters) if p in self._sums}

    def load_state(self, state: Mapping[int, Tensor]) -> None:
        known = ((self._parameters[index], total) for index, total in state.items())
        self._sums = {parameter: total.to(parameter.device) for parameter, total in known}
