"""Drop the replica: a failure takes its whole pipeline out, and the batch shrinks.

Source: torchft (per-step fault tolerance of replica groups). Recovery from a SIGKILL was measured at 5.0 s with its
default settings and 1.05 s with a heartbeat timeout of 1 s (two CPU replicas).

Assumptions:

- The survivors' step is not committed, so it is lost.
- The samples of the missing pipeline are not trained: the step has fewer samples and takes as long.
- With ``relaunch`` a scheduler starts a new replica group on any S free workers, which joins at the end of a step and
  copies its state from a peer while the others wait; without it, a pipeline is out until its own nodes are back.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_recycle.simulation.policies.policy import Configuration, Context, Happening, Loss, Reaction
from lightning_recycle.simulation.policies.workers import Teams, assemble_teams, live_workers, pauses, whole_pipelines
from lightning_recycle.simulation.units import Duration, as_seconds

__all__ = ["DropReplica"]


@dataclass(frozen=True)
class DropReplica:
    """Drop the replica.

    Args:
        recovery: seconds from a failure until the survivors train again: detection and a new quorum.
        relaunch: seconds to start a replica group on free workers; None to never combine workers of different
            pipelines.
        join: seconds all wait when a replica group joins, besides copying its state.
        checkpoint_every: interval of background checkpoints, for the loss of all replica groups.
    """

    recovery: Duration = 5.0
    relaunch: Duration | None = 60.0
    join: Duration = 1.0
    checkpoint_every: Duration = "30min"

    def __post_init__(self) -> None:
        for name in ("recovery", "join", "checkpoint_every"):
            object.__setattr__(self, name, as_seconds(f"DropReplica({name})", getattr(self, name)))
        if self.relaunch is not None:
            object.__setattr__(self, "relaunch", as_seconds("DropReplica(relaunch)", self.relaunch))

    @property
    def ignores_failures(self) -> bool:
        """No."""
        return False

    def begin(self, context: Context, live: frozenset[int]) -> Reaction:
        """See :class:`Policy`."""
        teams, _ = assemble_teams((), live_workers(context, live), context.model.stages, context.model.pipelines)
        return Reaction(self._configuration(context, teams))

    def react(self, context: Context, current: Configuration, happening: Happening) -> Reaction | None:
        """See :class:`Policy`."""
        before = current.layout
        assert isinstance(before, tuple)
        workers = live_workers(context, happening.live)
        alive = set(workers)
        whole = tuple(team for team in before if alive.issuperset(team))
        more = self._more(context, whole, workers)
        grows = len(more) > len(whole)
        wait = (float(self.relaunch or 0.0) or 1e-3) if grows else None
        if len(whole) < len(before):
            found = self._configuration(context, whole)
            loss = Loss.STEP if whole else Loss.CHECKPOINT  # nobody is left to copy from
            return Reaction(found, pauses(recover=float(self.recovery)) if whole else (), loss, wake=wait)
        if not grows:
            return None
        if happening.woken or self.relaunch is None:
            transfer = context.model.transfer_seconds(1 / context.model.stages) if whole else 0.0
            found = self._configuration(context, more)
            return Reaction(found, pauses(join=float(self.join), transfer=transfer), at_boundary=True)
        return Reaction(current, wake=wait)

    def _more(self, context: Context, whole: Teams, workers: tuple[int, ...]) -> Teams:
        model = context.model
        if self.relaunch is not None:
            return assemble_teams(whole, workers, model.stages, model.pipelines, repair=False)[0]
        own = tuple(tuple(range(d * model.stages, (d + 1) * model.stages)) for d in range(model.pipelines))
        return tuple(team for team in own if team in whole or set(workers).issuperset(team))

    def _configuration(self, context: Context, teams: Teams) -> Configuration:
        return whole_pipelines(
            context, teams, "drop replica", keep_batch=False, checkpoint_every=float(self.checkpoint_every)
        )
