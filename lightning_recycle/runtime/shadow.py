"""The parameters of the previous version, with which a stage that is ahead computes while others redo a step.

Only parameters: such a stage has already applied the step and will not step its optimizer again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

__all__ = ["Shadow"]


class Shadow:
    """A copy of ``parameters``, one version old; nothing before the first :meth:`update`.

    Args:
        parameters: parameters of the stage.
        on_host: whether the copy is kept in host instead of device memory, at the cost of a transfer per step.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], on_host: bool = False) -> None:
        self._parameters = list(parameters)
        pinned = on_host and any(p.device.type == "cuda" for p in self._parameters)
        self._copies: list[Tensor] = [
            torch.empty_like(p.detach(), device="cpu" if on_host else p.device, pin_memory=pinned)
            for p in self._parameters
        ]

    def on(self, device: torch.device) -> list[Tensor]:
        """The copies that are in the memory of ``device``."""
        return [copy for copy in self._copies if copy.device.type == device.type]

    @torch.no_grad()
    def update(self) -> None:
        """Copies the current parameters; called right before they change."""
        if self._copies:  # a stage may have layers without parameters only
            torch._foreach_copy_(self._copies, [p.detach() for p in self._parameters])

    @torch.no_grad()
    def restore(self) -> None:
        """Makes the current parameters those of the previous version again."""
        if self._copies:
            torch._foreach_copy_([p.detach() for p in self._parameters], self._copies)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within the block, the parameters hold the values of the previous version."""
        newest = [p.data for p in self._parameters]
        for parameter, copy in zip(self._parameters, self._copies, strict=True):
            parameter.data = copy.to(parameter.device)
        try:
            yield
        finally:
            for parameter, data in zip(self._parameters, newest, strict=True):
                parameter.data = data
