"""Restart: every failure ends the job, which starts again from the newest checkpoint on the remaining nodes.

Source: common practice; NVIDIA's resiliency extension shortens the start of the processes; the load and the lost work
remain.

Assumptions:

- After a restart the grid has as many whole pipelines as there are workers for; they share the global batch.
- When returned nodes complete another pipeline, the job writes a checkpoint and restarts with that pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_recycle.simulation.policies.common import CommonPolicy, pauses
from lightning_recycle.simulation.policies.policy import Configuration, Context, Happening, Loss, Reaction
from lightning_recycle.simulation.policies.workers import (
    Teams,
    assemble_teams,
    dealt_by_speed,
    live_workers,
    whole_pipelines,
)

__all__ = ["Restart"]


@dataclass(frozen=True)
class Restart(CommonPolicy):
    """Restart from the newest checkpoint. Takes the arguments of ``CommonPolicy``, and:

    Args:
        elastic: whether to continue with fewer pipelines instead of waiting for the whole grid.
    """

    elastic: bool = True

    def begin(self, context: Context, live: frozenset[int]) -> Reaction:
        """See :class:`Policy`."""
        return Reaction(self._configuration(context, self._teams(context, (), live)))

    def react(self, context: Context, current: Configuration, happening: Happening) -> Reaction | None:
        """See :class:`Policy`."""
        before = current.layout
        assert isinstance(before, tuple)
        alive = set(live_workers(context, happening.live))
        teams = self._teams(context, before, happening.live)
        found = self._configuration(context, teams)
        if not all(alive.issuperset(team) for team in before):
            return Reaction(found, self.restarting(context, broken=True) if found.running else (), Loss.CHECKPOINT)
        if len(teams) <= len(before):
            return None
        again = self.restarting(context, broken=False)
        if not before:
            return Reaction(found, again)
        costs = self.checkpoint_costs(context)
        steps = (*pauses(checkpoint=costs.stall + costs.writing), *again)
        return Reaction(found, steps, at_boundary=True, saved=True)

    def slowed(self, context: Context, current: Configuration, speeds: Mapping[int, float]) -> Configuration:
        """See :class:`Policy`. The pipelines share the batch by their speeds."""
        return dealt_by_speed(context, self, current, speeds)

    def _teams(self, context: Context, before: Teams, live: frozenset[int]) -> Teams:
        model = context.model
        teams, _ = assemble_teams(before, live_workers(context, live), model.stages, model.pipelines)
        return teams if self.elastic or len(teams) == model.pipelines else ()

    def _configuration(self, context: Context, teams: Teams) -> Configuration:
        return whole_pipelines(context, self, teams, "restart")
