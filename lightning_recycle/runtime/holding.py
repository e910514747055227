"""The layers that a worker has, and what belongs to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from lightning_recycle.runtime.gradients import GradientBuffers
from lightning_recycle.runtime.stage import Stage
from lightning_recycle.runtime.ties import StageTies

__all__ = ["Holding"]


@dataclass(frozen=True)
class Holding:
    """What changes when a worker gets other layers.

    Args:
        stage: runs the layers.
        parameters: their parameters.
        gradients: the gradients of these.
        ties: weights that several stages hold.
        accumulated: what the batches since the newest step of the optimizer have added up to.
    """

    stage: Stage
    parameters: Sequence[nn.Parameter]
    gradients: GradientBuffers
    ties: StageTies
    accumulated: Mapping[nn.Parameter, Tensor] = field(default_factory=dict)
