"""The parameters of the version before: what a stage that is ahead computes with when others redo a step.

Only parameters: such a stage has applied the step already and will not step its optimizer again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

__all__ = ["Shadow"]


class Shadow:
    """A copy of ``parameters`` of one version back, on their device."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._copies: list[Tensor] = [p.detach().clone() for p in self._parameters]

    @torch.no_grad()
    def update(self) -> None:
        """Copies the parameters as they are now; called right before they change."""
        torch._foreach_copy_(self._copies, [p.detach() for p in self._parameters])

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within the block the parameters hold the values of the version before."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for i, parameter in enumerate(self._parameters):
            parameter.data, self._copies[i] = self._copies[i], parameter.data
