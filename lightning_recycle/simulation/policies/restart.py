"""Restart: every failure ends the job, which starts again from the newest checkpoint on the remaining nodes.

Source: common practice; NVIDIA's resiliency extension shortens the start of the processes; the load and the lost work
remain.

Assumptions:

- Checkpoints are written while training waits, at ``storage`` bytes/s per GPU. (The default is 1 GB/s for 32 GPUs,
  which gives 107 s for the 6.7B model and 5.7 s for GPT-3 Medium; Oobleck's public simulator has 120 s and 11 s.)
- After a restart the grid has as many whole pipelines as there are workers for; they share the global batch.
- When returned nodes complete another pipeline, the job writes a checkpoint and restarts with that pipeline.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_recycle.arguments import at_least
from lightning_recycle.simulation.policies.policy import Configuration, Context, Happening, Loss, Reaction
from lightning_recycle.simulation.policies.workers import Teams, assemble_teams, live_workers, pauses, whole_pipelines
from lightning_recycle.simulation.units import Duration, as_seconds

__all__ = ["Restart"]


@dataclass(frozen=True)
class Restart:
    """Restart from the newest checkpoint.

    Args:
        checkpoint_every: time between two checkpoints.
        storage: bytes/s for writing and reading, per GPU of the fault-free grid.
        detection: seconds from a failure to its detection.
        restart: seconds to restart the job, besides reading the checkpoint.
        elastic: whether to continue with fewer pipelines instead of waiting for the whole grid.
    """

    checkpoint_every: Duration = "30min"
    storage: float = 1e9 / 32
    detection: Duration = 5.0
    restart: Duration = 300.0
    elastic: bool = True

    def __post_init__(self) -> None:
        name = type(self).__name__
        for setting in ("checkpoint_every", "detection", "restart"):
            object.__setattr__(self, setting, as_seconds(f"{name}({setting})", getattr(self, setting)))
        at_least(name, "checkpoint_every", self.checkpoint_every, above=True)
        at_least(name, "storage", self.storage, above=True)

    @property
    def ignores_failures(self) -> bool:
        """No."""
        return False

    def checkpoint_seconds(self, context: Context) -> float:
        """Seconds to write or read one checkpoint."""
        return context.model.transformer.state_bytes() / (self.storage * context.model.gpus)

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
        files = self.checkpoint_seconds(context)
        if not all(alive.issuperset(team) for team in before):
            steps = pauses(detect=float(self.detection), restart=float(self.restart), load=files)
            return Reaction(found, steps if found.running else (), Loss.CHECKPOINT)
        if len(teams) <= len(before):
            return None
        if not before:
            return Reaction(found, pauses(restart=float(self.restart), load=files))
        steps = pauses(checkpoint=files, restart=float(self.restart), load=files)
        return Reaction(found, steps, at_boundary=True)

    def _teams(self, context: Context, before: Teams, live: frozenset[int]) -> Teams:
        model = context.model
        teams, _ = assemble_teams(before, live_workers(context, live), model.stages, model.pipelines)
        return teams if self.elastic or len(teams) == model.pipelines else ()

    def _configuration(self, context: Context, teams: Teams) -> Configuration:
        return whole_pipelines(
            context,
            teams,
            "restart",
            checkpoint_every=float(self.checkpoint_every),
            checkpoint_seconds=self.checkpoint_seconds(context),
        )
