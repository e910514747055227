"""The weights that several stages hold, as one worker sees them: see :mod:`~.tying` for why.

The gradient of such a weight is one sum over the workers of all stages that hold it
(:mod:`~lightning_recycle.runtime.buckets`): the same bits everywhere. A stage counts as REDUCED after that sum.

When a step is run again, a stage may be *ahead*: REDUCED in an attempt before, with the sum of then. It gives that sum
to the others, which take it as it is, so the copies stay equal.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from torch import nn

from lightning_recycle.model.tying import Tie

__all__ = ["StageTies"]


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
