"""A stage's layers, parameters, gradients and ties, replaced as a unit.

A *tie* is a weight that several stages hold (:mod:`~lightning_recycle.model.tying`). Its gradient is one sum over the
workers of all stages that hold it (:mod:`~lightning_recycle.runtime.stage.gradient_reduction`): the same bits
everywhere. A stage counts as REDUCED after that sum. When a step is run again, a stage may be *ahead*: REDUCED in an
attempt before, with the sum of that attempt. It gives that sum to the others, which take it unchanged, so the copies
stay equal.

The *shadow* has the parameters of the previous version, with which a stage that is ahead computes while others redo a
step. Only parameters: such a stage has already applied the step and will not step its optimizer again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lightning_recycle.model.tying import Tie
from lightning_recycle.runtime.stage.gradients import GradientBuffers
from lightning_recycle.runtime.stage.stage import Stage

__all__ = ["Shadow", "StageBundle", "StageTies"]


@dataclass(frozen=True)
class StageBundle:
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


@dataclass(frozen=True)
class StageTies:
    """The ties between stages of a run, as one worker sees them.

    Args:
        ties: those of its stage at least, in the same order on all workers of their stages.
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
    def holders(self) -> dict[nn.Parameter, tuple[int, ...]]:
        """For each of this stage's parameters that other stages hold as well, all stages that do."""
        return {
            self.parameters[name]: tie.stages for tie in self.ties for stage, name in tie.copies if stage == self.stage
        }

    @property
    def not_counted(self) -> tuple[nn.Parameter, ...]:
        """This stage's parameters that another stage counts."""
        return tuple(
            self.parameters[name] for tie in self.ties for stage, name in tie.copies[1:] if stage == self.stage
        )

    def givers(self, ahead: Collection[int]) -> dict[tuple[int, ...], int]:
        """For the stages of each tie of this stage that some of them, which are ``ahead``, have summed already, and
        others have not: the stage that gives them the sum.
        """
        of_ties = {tie.stages for tie in self.ties if self.stage in tie.stages}
        partly = [stages for stages in of_ties if not set(stages) <= set(ahead)]
        return {stages: min(have) for stages in partly if (have := set(stages).intersection(ahead))}


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
