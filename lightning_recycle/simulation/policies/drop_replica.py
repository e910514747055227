"""Drop the replica: a failure takes its whole pipeline out, and the batch shrinks.

Source: torchft (per-step fault tolerance of replica groups). Its recovery from a SIGKILL was measured at 5.0 s with the
default settings and 1.05 s with a heartbeat timeout of 1 s (two CPU replicas over Gloo); here it has the recovery of
all policies, with communicators for GPUs.

Assumptions:

- The survivors' step is not committed, so it is lost.
- The samples of the missing pipeline are not trained: the step has fewer samples and takes as long. Every sample of the
  smaller batches counts in full.
- With ``relaunch`` a scheduler starts a new replica group on any S free workers, which joins at the end of a step and
  copies its state from a peer while the others wait; without it, a pipeline is out until its own nodes are back.
- When all replica groups are lost, nobody is left to copy from: training restarts from the newest checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_recycle.simulation.policies.common import CommonPolicy
from lightning_recycle.simulation.policies.policy import Configuration, Context, Happening, Loss, Reaction
from lightning_recycle.simulation.policies.workers import (
    Teams,
    assemble_teams,
    live_workers,
    received,
    shared_transfer,
    whole_pipelines,
)
from lightning_recycle.simulation.units import Duration, as_seconds

__all__ = ["DropReplica"]


@dataclass(frozen=True)
class DropReplica(CommonPolicy):
    """Drop the replica. Takes the arguments of ``CommonPolicy``, and:

    Args:
        relaunch: seconds to start a replica group on free workers, while the others train; None to never combine
            workers of different pipelines.
    """

    relaunch: Duration | None = 60.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.relaunch is not None:
            object.__setattr__(self, "relaunch", as_seconds("DropReplica(relaunch)", self.relaunch))

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
        if grows and not whole:
            wait = 1e-3  # a restart of the whole job, which has its own time
        taking_part = len(whole) * context.model.stages
        if len(whole) < len(before):
            found = self._configuration(context, whole)
            steps = self.regrouping(taking_part, broken=True) if whole else ()
            return Reaction(found, steps, Loss.STEP if whole else Loss.CHECKPOINT, wake=wait)
        if not grows:
            return None
        if happening.woken or self.relaunch is None:
            found = self._configuration(context, more)
            if not whole:
                return Reaction(found, self.restarting(context, broken=False))
            usual = context.model.transfer_seconds(1 / context.model.stages)
            transfer = shared_transfer(context, received(whole, more), usual)
            steps = self.regrouping(len(more) * context.model.stages, broken=False, transfer=transfer)
            return Reaction(found, steps, at_boundary=True)
        return Reaction(current, wake=wait)

    def _more(self, context: Context, whole: Teams, workers: tuple[int, ...]) -> Teams:
        model = context.model
        if self.relaunch is not None:
            return assemble_teams(whole, workers, model.stages, model.pipelines, repair=False)[0]
        own = tuple(tuple(range(d * model.stages, (d + 1) * model.stages)) for d in range(model.pipelines))
        return tuple(team for team in own if team in whole or set(workers).issuperset(team))

    def _configuration(self, context: Context, teams: Teams) -> Configuration:
        return whole_pipelines(context, self, teams, "drop replica", keep_batch=False)
