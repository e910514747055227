"""The recovery decision: from what survivors hold to where they go on. A pure function.

Within step t a worker is RUNNING, then REDUCED (it holds its stage's complete reduced gradient), then APPLIED: its
parameters are of version t+1, and it is RUNNING in step t+1. With the staggered optimizer stages apply at their own
time, but step t+1 cannot be REDUCED anywhere before every worker has applied t: its micro-batches flow through all
workers, and where one has none, its peers wait for it before they begin. So versions differ by at most one.

A stage can reach the highest version among its workers, plus one if a worker of that version is REDUCED. The committed
version v is the minimum over the stages: step v runs again. A stage that can reach v+1 is *ahead*: its part of step v
is done. It computes the forward and the input gradients of step v for the others, with its parameters of version v,
but neither reduces nor steps again, so its optimizer and Lightning's hooks see every step once, and nothing that was
reduced is ever dropped.

A step whose loss is not known cannot be committed: losses travel apart from the gradients and can die with a worker.
Where all stages hold the gradient of such a step, all are ahead, and compute it once more for its losses.

A worker that lacks a gradient which a peer holds adopts it. A worker keeps the gradient of a step until it begins the
step after the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_recycle.errors import ReCycleError

__all__ = ["Adoption", "Decision", "WorkerStatus", "decide"]


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


@dataclass(frozen=True, slots=True)
class Adoption:
    """In ``stage``, whoever lacks the reduced gradient of ``step`` gets it from rank ``donor``; all of it take part."""

    stage: int
    step: int
    donor: int


@dataclass(frozen=True, slots=True)
class Decision:
    """Where all survivors go on.

    Args:
        version: the committed version v; whoever is below applies what it holds or adopts, then step v runs.
        ahead: the stages whose part of step v is done.
        adoptions: in the order in which a stage carries them out.
    """

    version: int
    ahead: frozenset[int]
    adoptions: tuple[Adoption, ...]


def decide(statuses: Mapping[int, WorkerStatus], known_losses: int | None = None) -> Decision:
    """Computes the decision from the statuses of all survivors, by rank; every stage has at least one.

    Args:
        statuses: by rank.
        known_losses: the number of steps whose loss is known; by default as many as are wanted.

    Raises:
        ReCycleError: for statuses that the commit protocol cannot produce. Going on would train on a mixture.
    """
    by_stage: dict[int, dict[int, WorkerStatus]] = {}
    for rank, status in sorted(statuses.items()):
        by_stage.setdefault(status.stage, {})[rank] = status
    reachable = {stage: max(s.version + s.reduced for s in workers.values()) for stage, workers in by_stage.items()}
    version = min(reachable.values())
    if known_losses is not None:
        version = min(version, known_losses)
    adoptions: list[Adoption] = []
    for stage, workers in sorted(by_stage.items()):
        if reachable[stage] > version + 1 or any(s.version < version - 1 for s in workers.values()):
            raise ReCycleError(
                f"No recovery: stage {stage} spans versions {sorted({s.version for s in workers.values()})} while the"
                f" whole can only agree on {version}: the commit protocol was violated."
            )
        for step in (version - 1, version) if reachable[stage] > version else (version - 1,):
            has = {r for r, s in workers.items() if s.version == step + 1 or (s.version == step and s.reduced)}
            past = {r for r, s in workers.items() if s.version > step + 1}
            if len(has) + len(past) == len(workers):
                continue
            if not has:
                raise ReCycleError(
                    f"No recovery: nobody in stage {stage} holds the reduced gradient of step {step}, which workers"
                    f" {sorted(workers.keys() - has - past)} lack."
                )
            adoptions.append(Adoption(stage, step, min(has)))
    ahead = frozenset(stage for stage, best in reachable.items() if best > version)
    return Decision(version, ahead, tuple(adoptions))
