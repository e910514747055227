"""The recovery decision: from what survivors hold to what each of them does. A pure function.

Within step t a worker is RUNNING, then REDUCED (it holds its stage's complete reduced gradient), then APPLIED (its
parameters are of version t+1, which makes it RUNNING in step t+1). The highest version that a stage can reach is the
highest among its workers, plus one if a worker there of that version is REDUCED. The committed version v is the
minimum over the stages: below it nothing is redone, above it nothing is kept.

Who calls: the coordinator, once all survivors of a generation have reported. Who obeys: the executor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from lightning_recycle.errors import ReCycleError

__all__ = ["Action", "Decision", "WorkerStatus", "decide"]


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """What a survivor holds.

    Args:
        stage: its stage.
        version: optimizer steps applied to its parameters.
        reduced: whether it holds the complete reduced gradient of step ``version``.
    """

    stage: int
    version: int
    reduced: bool


class Action(Enum):
    """What a worker does before it goes on at the committed version."""

    KEEP = "keep"
    """Its parameters are of the committed version; a gradient of the step to come, partial or reduced, is dropped."""
    APPLY = "apply"
    """It steps its optimizer with the reduced gradient that it holds."""
    ADOPT = "adopt"
    """It receives the reduced gradient from a peer, then steps its optimizer."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What all survivors do.

    Args:
        version: the committed version v; training goes on with step v.
        actions: by rank.
        donors: for each stage with an ADOPT, the rank whose gradient its workers receive.
    """

    version: int
    actions: Mapping[int, Action]
    donors: Mapping[int, int]


def decide(statuses: Mapping[int, WorkerStatus]) -> Decision:
    """Computes the committed version and every survivor's action.

    Args:
        statuses: by rank; at least one worker of every stage.

    Raises:
        ReCycleError: if a stage is ahead of the committed version. With one commit point for all stages that cannot
            happen; were it to, going on would train on a mixture of versions.
    """
    stages = {status.stage for status in statuses.values()}

    def reachable(stage: int) -> int:
        return max(s.version + s.reduced for s in statuses.values() if s.stage == stage)

    version = min(reachable(stage) for stage in stages)
    actions: dict[int, Action] = {}
    donors: dict[int, int] = {}
    for rank, status in sorted(statuses.items()):
        if status.version == version:
            actions[rank] = Action.KEEP
        elif status.version == version - 1 and status.reduced:
            actions[rank] = Action.APPLY
        elif status.version == version - 1:
            donor = next(
                (
                    r
                    for r, s in sorted(statuses.items())
                    if s.stage == status.stage and s.version == version - 1 and s.reduced
                ),
                None,
            )
            if donor is None:
                raise ReCycleError(
                    f"No recovery: worker {rank} is at version {status.version} and nobody in stage {status.stage}"
                    " holds"
                    f" the reduced gradient that leads to version {version}."
                )
            actions[rank] = Action.ADOPT
            donors[status.stage] = donor
        else:
            raise ReCycleError(
                f"No recovery: worker {rank} of stage {status.stage} has applied {status.version} steps while the whole"
                f" can only agree on {version}: the commit point was violated."
            )
    return Decision(version, actions, donors)
