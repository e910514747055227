"""The machines: nodes with GPUs. A node fails and comes back as a whole.

Must not know: models, policies, time.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_recycle.arguments import whole
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.simulation.topology import Topology
from lightning_recycle.simulation.training_model import TrainingModel

__all__ = ["Cluster"]


@dataclass(frozen=True, slots=True)
class Cluster:
    """``nodes`` nodes with ``gpus_per_node`` GPUs each; with a ``topology``, they share links.

    When one GPU fails, its node is taken out until it is repaired, as schedulers do. Use ``gpus_per_node=1`` where
    single GPUs fail.
    """

    nodes: int
    gpus_per_node: int = 1
    topology: Topology | None = None

    def __post_init__(self) -> None:
        whole("Cluster", "nodes", self.nodes, 1)
        whole("Cluster", "gpus_per_node", self.gpus_per_node, 1)

    @classmethod
    def of(
        cls,
        model: TrainingModel,
        *,
        gpus_per_node: int | None = None,
        extra_nodes: int = 0,
        topology: Topology | None = None,
    ) -> Cluster:
        """The nodes that the model's fault-free grid needs, plus ``extra_nodes``.

        Raises:
            ConfigurationError: when the grid does not fill whole nodes.
        """
        size = model.tensor_parallel if gpus_per_node is None else gpus_per_node
        if model.gpus % whole("Cluster", "gpus_per_node", size, 1):
            raise ConfigurationError(
                f"Cluster(gpus_per_node={size}): {model.name} needs {model.gpus} GPUs, not a whole number of nodes."
            )
        return cls(model.gpus // size + whole("Cluster", "extra_nodes", extra_nodes), size, topology)

    @property
    def gpus(self) -> int:
        """All GPUs."""
        return self.nodes * self.gpus_per_node

    def workers_per_node(self, model: TrainingModel) -> int:
        """Workers (grid positions) per node.

        Raises:
            ConfigurationError: when nodes do not hold whole workers.
        """
        if self.gpus_per_node % model.tensor_parallel:
            raise ConfigurationError(
                f"{model.name} has {model.tensor_parallel} GPUs per worker, which do not fill nodes of "
                f"{self.gpus_per_node}: use gpus_per_node={model.tensor_parallel} or a multiple."
            )
        return self.gpus_per_node // model.tensor_parallel
