"""Simulated runs: a model on a cluster under a policy while nodes fail, once or for several seeds.

A single run with a handful of failures says little: two runs of six hours with a failure every 30 minutes can differ by
a tenth of the throughput.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from lightning_recycle.errors import ConfigurationError
from lightning_recycle.simulation.cluster import Cluster
from lightning_recycle.simulation.engine import Run
from lightning_recycle.simulation.failures import FailureSource
from lightning_recycle.simulation.policies.policy import Context, Policy
from lightning_recycle.simulation.results import Interval, SimulationResult, Span, State, account, samples_of
from lightning_recycle.simulation.training_model import TrainingModel
from lightning_recycle.simulation.units import TICKS_PER_SECOND, Duration, as_seconds, as_ticks

__all__ = ["Repetitions", "mean_time_between_failures", "repeat", "simulate"]

_SAMPLES = 8


def simulate(
    model: TrainingModel,
    cluster: Cluster,
    policy: Policy,
    failures: FailureSource,
    duration: Duration = "1d",
    seed: int = 0,
) -> SimulationResult:
    """Train ``model`` on ``cluster`` for ``duration`` while nodes fail.

    Args:
        model: the model to train.
        cluster: the machines.
        policy: how failures are handled.
        failures: the source of failures.
        duration: seconds, or text such as "6h".
        seed: seed of the failures.

    Raises:
        ConfigurationError: when the arguments do not fit together.
    """
    seconds = as_seconds("simulate(duration)", duration, positive=True)
    workers = cluster.workers_per_node(model)
    if cluster.nodes * workers < model.pipelines * model.stages:
        raise ConfigurationError(
            f"{model.name} needs {model.gpus} GPUs, the cluster has {cluster.gpus}: use Cluster.of(model)."
        )
    changes = () if policy.ignores_failures else failures.changes(cluster, seconds, seed)
    mtbf = None if policy.ignores_failures else mean_time_between_failures(failures, cluster, seconds)
    run = Run(Context(model, cluster, mtbf), policy, changes, as_ticks(seconds))
    run.play()
    return SimulationResult(
        model=model.name,
        policy=type(policy).__name__,
        duration=seconds,
        gpus=cluster.gpus,
        samples=samples_of(run.spans),
        fault_free_throughput=model.global_batch / model.fault_free_seconds(),
        fault_free_gpus=model.gpus,
        bubble_free_throughput=model.global_batch / model.useful_gpu_seconds,
        flops_per_sample=sum(model.transformer.flops()),
        peak_flops=model.device.peak_flops,
        accounting=account(run.spans, cluster.gpus),
        intervals=tuple(map(_interval, run.spans)),
        events=tuple(run.health.events),
        tainted_samples=run.tainted_samples(),
    )


def mean_time_between_failures(failures: FailureSource, cluster: Cluster, duration: float) -> float | None:
    """Seconds between two failures of the cluster on average; None when nothing fails after the beginning.

    What an operator knows from the past: the mean of eight runs with other seeds, where the source is random.
    """
    try:
        return _counted(failures, cluster, duration)  # type: ignore[arg-type]
    except TypeError:  # a source that cannot be hashed
        return _counted.__wrapped__(failures, cluster, duration)


@lru_cache(maxsize=1024)
def _counted(failures: FailureSource, cluster: Cluster, duration: float) -> float | None:
    count = sum(
        bool(change.down) and change.tick > 0
        for seed in range(_SAMPLES)
        for change in failures.changes(cluster, duration, 1_000_000 + seed)
    )
    return _SAMPLES * duration / count if count else None


def _interval(span: Span) -> Interval:
    training = span.state is State.TRAINING
    return Interval(
        span.begin / TICKS_PER_SECOND,
        span.end / TICKS_PER_SECOND,
        span.state,
        span.label,
        span.gpus,
        span.live_gpus,
        span.configuration.throughput if training else 0.0,
        span.configuration.choice,
    )


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
