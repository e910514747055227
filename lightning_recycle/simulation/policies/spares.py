"""Hot spares: extra nodes wait, replace failed ones and copy their state from a peer.

Source: common practice (e.g. Llama 3's and MegaScale's backup machines); the detection and regrouping times are those
of the ReCycle policy, so the two differ only in the idea.

Assumptions:

- A spare is warm: process started, libraries loaded. It copies parameters and optimizer state from a peer.
- A failure loses the step in progress.
- When no spare is left, live workers of broken pipelines fill one another's gaps; the rest waits, and the complete
  pipelines share the global batch.
- Repaired nodes become spares, or fill the gap of a broken pipeline at the end of the step.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_recycle.arguments import whole
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.simulation.policies.policy import Configuration, Context, Happening, Loss, Reaction
from lightning_recycle.simulation.policies.workers import assemble_teams, live_workers, pauses, whole_pipelines
from lightning_recycle.simulation.units import Duration, as_seconds

__all__ = ["Spares"]


@dataclass(frozen=True)
class Spares:
    """Hot spares.

    Args:
        spares: nodes beyond the fault-free grid; the cluster must have them (``Cluster.of(model, extra_nodes=n)``).
        detection: seconds from a failure to its detection.
        regroup: seconds for new communicators.
        checkpoint_every: interval of checkpoints, for the loss of all replicas of a stage.
        restart: seconds to restart from a checkpoint.
    """

    spares: int = 1
    detection: Duration = 5.0
    regroup: Duration = 5.0
    checkpoint_every: Duration = "30min"
    restart: Duration = 300.0

    def __post_init__(self) -> None:
        whole("Spares", "spares", self.spares)
        for name in ("detection", "regroup", "checkpoint_every", "restart"):
            object.__setattr__(self, name, as_seconds(f"Spares({name})", getattr(self, name)))

    @property
    def ignores_failures(self) -> bool:
        """No."""
        return False

    def begin(self, context: Context, live: frozenset[int]) -> Reaction:
        """See :class:`Policy`."""
        have = context.cluster.nodes - context.model.gpus // context.cluster.gpus_per_node
        if have < self.spares:
            raise ConfigurationError(
                f"Spares(spares={self.spares}): the cluster has {have} nodes more than {context.model.name} needs; "
                f"use Cluster.of(model, extra_nodes={self.spares})."
            )
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
        lost_stage = any(all(team[stage] not in alive for team in before) for stage in range(stages))
        if lost_stage:
            detection = float(self.detection) if happening.down else 0.0
            restart = pauses(detect=detection, restart=float(self.restart)) if found.running else ()
            return Reaction(found, restart, Loss.CHECKPOINT)
        transfer = context.model.transfer_seconds(1 / stages) if copied else 0.0
        if all(alive.issuperset(team) for team in before):
            return Reaction(found, pauses(regroup=float(self.regroup), transfer=transfer), at_boundary=True)
        steps = pauses(detect=float(self.detection), regroup=float(self.regroup), transfer=transfer)
        return Reaction(found, steps, Loss.STEP)

    def _configuration(self, context: Context, before: tuple, live: frozenset[int]) -> tuple[Configuration, int]:
        workers = live_workers(context, live)
        teams, copied = assemble_teams(before, workers, context.model.stages, context.model.pipelines)
        every = float(self.checkpoint_every)
        return whole_pipelines(context, teams, "spares", checkpoint_every=every), copied
