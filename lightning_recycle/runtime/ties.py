"""The sum of the gradients of weights that several stages hold: see :mod:`~.tying` for why.

Each stage's reduced gradient is given to the others by one of its live workers, and everybody adds them in the order of
the stages: the same bits everywhere. A stage counts as REDUCED after that sum.

When a step is run again, a stage may be *ahead*: REDUCED in an attempt before, with the sum of then. It gives that sum
to the others, which take it as it is, so the copies stay equal.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lightning_recycle.model.tying import Tie
from lightning_recycle.runtime.communicator import Communicator
from lightning_recycle.runtime.gradients import GradientBuffers

__all__ = ["TieExchange"]

_MOST_BYTES = 32 * 1024 * 1024  # that are added up at once: memory besides the gradients


@dataclass(frozen=True)
class TieExchange:
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
    def not_counted(self) -> tuple[nn.Parameter, ...]:
        """This stage's parameters that another stage counts."""
        return tuple(
            self.parameters[name] for tie in self.ties for stage, name in tie.copies[1:] if stage == self.stage
        )

    def sum_gradients(
        self,
        communicator: Communicator,
        gradients: GradientBuffers,
        step: int,
        leads: Mapping[int, int],
        ahead: Collection[int] = (),
    ) -> None:
        """Replaces the gradient of each copy by the sum over all copies; all live workers of those stages take part.

        Args:
            communicator: with a group for the stages of each tie.
            gradients: of this stage, reduced.
            step: whose.
            leads: for each stage, the rank that gives its gradient.
            ahead: the stages whose gradients are the sum already.
        """
        for stages, parts in self._parts(gradients, step):
            have_sums = [stage for stage in stages if stage in ahead]
            if len(have_sums) == len(stages):
                continue
            own = torch.cat([part.reshape(-1) for part in parts])
            givens: list[Tensor] = []
            for stage in have_sums[:1] or stages:
                givens.append(own if stage == self.stage else torch.empty_like(own))
                communicator.broadcast_tied(stages, givens[-1], leads[stage])
            if self.stage in ahead:
                continue
            total = givens[0]
            for given in givens[1:]:
                total.add_(given)
            for part, summed in zip(parts, total.split([part.numel() for part in parts]), strict=True):
                part.copy_(summed.view_as(part))

    def _parts(self, gradients: GradientBuffers, step: int) -> Iterator[tuple[tuple[int, ...], Sequence[Tensor]]]:
        """The gradients of this stage's copies that are added up together, with the stages that hold them.

        Stages come in their order: an earlier one, whose gradient is often complete before, is not held up by those
        behind the next.
        """
        by_stages: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for tie in self.ties:
            name = next((name for stage, name in tie.copies if stage == self.stage), None)
            if name is not None and self.parameters[name].requires_grad:
                by_stages.setdefault(tie.stages, []).append(self.parameters[name])
        views = {id(parameter): view for parameter, view in gradients.by_parameter(step)} if by_stages else {}
        for stages, parameters in sorted(by_stages.items()):
            found: list[Tensor] = []
            for view in (views[id(parameter)] for parameter in parameters):
                if found and (view.dtype != found[0].dtype or sum(each.nbytes for each in found) > _MOST_BYTES):
                    yield stages, found
                    found = []
                found.append(view)
            if found:
                yield stages, found
