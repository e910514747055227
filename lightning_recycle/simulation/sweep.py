"""The same simulation for several seeds: mean and spread.

A single run with a handful of failures says little: two runs of six hours with a failure every 30 minutes can differ by
a tenth of the throughput.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from lightning_recycle.errors import ConfigurationError
from lightning_recycle.simulation.cluster import Cluster
from lightning_recycle.simulation.engine import simulate
from lightning_recycle.simulation.failures import FailureSource
from lightning_recycle.simulation.policies.policy import Policy
from lightning_recycle.simulation.results import SimulationResult
from lightning_recycle.simulation.training_model import TrainingModel
from lightning_recycle.simulation.units import Duration

__all__ = ["Repetitions", "repeat"]


@dataclass(frozen=True)
class Repetitions:
    """Results that differ only in the seed."""

    results: tuple[SimulationResult, ...]

    @property
    def throughput(self) -> float:
        """Mean samples/s."""
        return statistics.fmean(result.throughput for result in self.results)

    @property
    def ratio(self) -> float:
        """Mean throughput relative to fault-free 1F1B."""
        return statistics.fmean(result.ratio for result in self.results)

    @property
    def ratio_per_gpu(self) -> float:
        """Mean of the same per GPU of the cluster."""
        return statistics.fmean(result.ratio_per_gpu for result in self.results)

    @property
    def fraction_of_ideal(self) -> float:
        """Mean throughput relative to what the live GPUs would achieve without bubbles and pauses."""
        return statistics.fmean(result.fraction_of_ideal for result in self.results)

    @property
    def error(self) -> float:
        """Half of the 95 % interval of the mean ratio (normal approximation); 0 for a single run."""
        return 1.96 * self.deviation / math.sqrt(len(self.results))

    @property
    def deviation(self) -> float:
        """Standard deviation of the ratio from run to run."""
        return statistics.stdev(result.ratio for result in self.results) if len(self.results) > 1 else 0.0

    @property
    def failures(self) -> float:
        """Mean number of nodes that failed."""
        return statistics.fmean(result.failures for result in self.results)


def repeat(
    model: TrainingModel,
    cluster: Cluster,
    policy: Policy,
    failures: FailureSource,
    duration: Duration = "1d",
    seeds: Iterable[int] = range(10),
) -> Repetitions:
    """:func:`simulate` for each seed.

    Raises:
        ConfigurationError: as for ``simulate``, or when there is no seed.
    """
    results = tuple(simulate(model, cluster, policy, failures, duration, seed) for seed in seeds)
    if not results:
        raise ConfigurationError("repeat(seeds=()): give at least one seed.")
    return Repetitions(results)
