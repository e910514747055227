"""Machines: nodes with GPUs, and the links that they share.

Concept: a node fails and comes back as a whole. Every worker has a link of its own (the model's
``network_bandwidth``); what leaves or enters a rack passes its uplink, which has as much bandwidth as the rack's links
together, divided by ``oversubscription``. Traffic that crosses it gets an equal share. Two kinds of traffic are
counted, because failures change them:

- copies of states after a failure, all of which come from elsewhere (the worst case), at once;
- messages between neighbours of a pipeline that are in different racks, or of which one is dead, so that the other
  exchanges with peers elsewhere. All messages of a step take as long as those over the most crowded link (the worst
  case: a schedule knows one duration for all).

REDUCE, checkpoints and the fault-free 1F1B that all is compared with are not slowed down: the measured throughput to
which a model is calibrated has them in it.

Must not know: models' contents, policies, time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from lightning_recycle.arguments import at_least, whole
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.simulation.training_model import TrainingModel

__all__ = ["Cluster", "Topology"]


@dataclass(frozen=True, slots=True)
class Topology:
    """Racks of nodes with an uplink each.

    Args:
        rack: nodes below a rack's switch.
        oversubscription: bandwidth of the links below a rack's switch over that of its uplink.

    Raises:
        ConfigurationError: when a value is impossible.
    """

    rack: int = 4
    oversubscription: float = 1.0

    def __post_init__(self) -> None:
        whole("Topology", "rack", self.rack, 1)
        at_least("Topology", "oversubscription", self.oversubscription, 1.0)

    def transfer(self, seconds: Mapping[int, float], workers_per_node: int) -> float:
        """Seconds until all copies have arrived.

        Args:
            seconds: for each receiving worker, what its copy takes over a link of its own.
            workers_per_node: workers of a node.
        """
        size, links = self._uplink(workers_per_node)
        through: dict[int, float] = {}
        for worker, each in seconds.items():
            through[worker // size] = through.get(worker // size, 0.0) + each
        return max(max(seconds.values(), default=0.0), max(through.values(), default=0.0) / links)

    def crowding(self, pipelines: Iterable[Sequence[int | None]], workers_per_node: int) -> float:
        """The factor by which messages take longer, at least 1.

        Args:
            pipelines: the workers of each pipeline by stage; None where one is dead.
            workers_per_node: workers of a node.
        """
        size, links = self._uplink(workers_per_node)
        flows: Counter[int] = Counter()
        for team in pipelines:
            racks = [None if worker is None else worker // size for worker in team]
            for pair in pairwise(racks):
                if pair[0] != pair[1]:
                    flows.update(rack for rack in pair if rack is not None)
        return max(1.0, max(flows.values(), default=0) / links)

    def _uplink(self, workers_per_node: int) -> tuple[int, float]:
        """Workers of a rack, and how many of their links its uplink is worth."""
        size = self.rack * workers_per_node
        return size, size / self.oversubscription


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
