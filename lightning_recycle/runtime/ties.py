"""The sum of the gradients of tied weights across the stages that hold copies: see :mod:`~.tying` for why.

Each stage's reduced gradient is given to the others by one of its live workers, and everybody adds them in the order of
the stages: the same bits everywhere. A stage counts as REDUCED after that sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from lightning_recycle.model.tying import Tie
from lightning_recycle.runtime.communicator import Communicator
from lightning_recycle.runtime.gradients import GradientBuffers

__all__ = ["TieExchange"]


@dataclass(frozen=True)
class TieExchange:
    """The ties between stages of a run, as one worker sees them.

    Args:
        ties: all of them, in the same order on all workers.
        stage: of this worker.
        parameters: this stage's, by name.
    """

    ties: tuple[Tie, ...] = ()
    stage: int = 0
    parameters: Mapping[str, nn.Parameter] = field(default_factory=dict)

    @property
    def copies(self) -> dict[tuple[int, str], str]:
        """For the stage and the name of each copy but the owner's: the owner's name."""
        return {copy: tie.copies[0][1] for tie in self.ties for copy in tie.copies[1:]}

    @property
    def not_counted(self) -> tuple[nn.Parameter, ...]:
        """This stage's parameters that another stage counts."""
        return tuple(
            self.parameters[name] for tie in self.ties for stage, name in tie.copies[1:] if stage == self.stage
        )

    def sum_gradients(
        self, communicator: Communicator, gradients: GradientBuffers, step: int, leads: Mapping[int, int]
    ) -> None:
        """Replaces the gradient of each copy by the sum over all copies; all live workers of those stages take part.

        Args:
            communicator: with a group for each tie.
            gradients: of this stage, reduced.
            step: whose.
            leads: for each stage, the rank that gives its gradient.
        """
        for index, tie in enumerate(self.ties):
            mine = next((self.parameters[name] for stage, name in tie.copies if stage == self.stage), None)
            if mine is None or not mine.requires_grad:
                continue
            own = gradients.of_parameter(mine, step)
            parts: list[torch.Tensor] = []
            for stage in tie.stages:
                part = own.clone() if stage == self.stage else torch.empty_like(own)
                communicator.broadcast_tied(index, part, leads[stage])
                parts.append(part)
            own.copy_(parts[0])
            for part in parts[1:]:
                own.add_(part)
