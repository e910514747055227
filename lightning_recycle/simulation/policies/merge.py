"""Merge: broken pipelines are merged into whole ones, which share the global batch.

Concept: k dead workers leave D S - k live ones, enough for D - ceil(k / S) whole pipelines, which is as much capacity
as re-routing has with failures spread evenly over the stages: nothing of ReCycle is needed but a state to copy.

Source: common practice; the obvious rival of re-routing, since it changes neither the batch nor the schedule.

Assumptions:

- Live workers of the pipelines that lost most fill the gaps of the others, first workers of the same stage, which have
  its state; another one copies it from a peer, all in parallel. The rest waits.
- The micro-batches of the global batch are dealt out evenly to the whole pipelines; where they do not divide, some
  have one more, and a step takes as long as those.
- A failure loses the step in progress. Returned nodes wait, or fill a gap at the end of the step.
- When all replicas of a stage fail at once, training restarts from the newest checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_recycle.simulation.policies.common import CommonPolicy
from lightning_recycle.simulation.policies.policy import Configuration, Context, Happening, Loss, Reaction
from lightning_recycle.simulation.policies.workers import (
    assemble_teams,
    dealt_by_speed,
    live_workers,
    received,
    shared_transfer,
    whole_pipelines,
)

__all__ = ["Merge"]


@dataclass(frozen=True)
class Merge(CommonPolicy):
    """Merge broken pipelines at a constant global batch. Takes the arguments of ``CommonPolicy``."""

    def begin(self, context: Context, live: frozenset[int]) -> Reaction:
        """See :class:`Policy`."""
        return Reaction(self._configuration(context, (), live)[0])

    def react(self, context: Context, current: Configuration, happening: Happening) -> Reaction | None:
        """See :class:`Policy`."""
        before = current.layout
        assert isinstance(before, tuple)
        alive = set(live_workers(context, happening.live))
        stages = context.model.stages
        found, copied = self._configuration(context, before, happening.live)
        if found.layout == before:
            return None
        if any(all(team[stage] not in alive for team in before) for stage in range(stages)):
            broken = not all(alive.issuperset(team) for team in before)
            steps = self.restarting(context, broken=broken) if found.running else ()
            return Reaction(found, steps, Loss.CHECKPOINT if before else Loss.NOTHING)
        assert isinstance(found.layout, tuple)
        usual = context.model.transfer_seconds(1 / stages) if copied else 0.0
        transfer = shared_transfer(context, received(before, found.layout), usual)
        if all(alive.issuperset(team) for team in before):
            return Reaction(found, self.regrouping(len(alive), broken=False, transfer=transfer), at_boundary=True)
        return Reaction(found, self.regrouping(len(alive), broken=True, transfer=transfer), Loss.STEP)

    def slowed(self, context: Context, current: Configuration, speeds: Mapping[int, float]) -> Configuration:
        """See :class:`Policy`. The pipelines share the batch by their speeds."""
        return dealt_by_speed(context, self, current, speeds)

    def _configuration(self, context: Context, before: tuple, live: frozenset[int]) -> tuple[Configuration, int]:
        workers = live_workers(context, live)
        teams, copied = assemble_teams(before, workers, context.model.stages, context.model.pipelines)
        return whole_pipelines(context, self, teams, type(self).__name__.lower()), copied
