"""Hot spares: extra nodes wait, replace failed ones and copy their state from a peer.

Source: common practice (e.g. Llama 3's and MegaScale's backup machines).

Assumptions:

- A spare is warm: process started, libraries loaded. It copies parameters and optimizer state from a peer.
- When no spare is left, broken pipelines are merged as in the ``merge`` policy.
- Repaired nodes become spares, or fill the gap of a broken pipeline at the end of the step.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_recycle.arguments import whole
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.simulation.policies.merge import Merge
from lightning_recycle.simulation.policies.policy import Context, Reaction

__all__ = ["Spares"]


@dataclass(frozen=True)
class Spares(Merge):
    """Hot spares. Takes the arguments of ``CommonPolicy``, and:

    Args:
        spares: nodes beyond the fault-free grid; the cluster must have them (``Cluster.of(model, extra_nodes=n)``).
    """

    spares: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        whole("Spares", "spares", self.spares)

    def begin(self, context: Context, live: frozenset[int]) -> Reaction:
        """See :class:`Policy`."""
        have = context.cluster.nodes - context.model.gpus // context.cluster.gpus_per_node
        if have < self.spares:
            raise ConfigurationError(
                f"Spares(spares={self.spares}): the cluster has {have} nodes more than {context.model.name} needs; "
                f"use Cluster.of(model, extra_nodes={self.spares})."
            )
        return super().begin(context, live)
