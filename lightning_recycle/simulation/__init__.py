"""Simulated training runs with failures, under ReCycle and other policies.

>>> from lightning_recycle.simulation import Cluster, Poisson, Recycle, get_model, simulate
>>> model = get_model("gpt3_medium")
>>> result = simulate(model, Cluster.of(model), Recycle(), Poisson(mtbf="2h"), duration="6h", seed=1)
>>> round(sum(result.accounting.fractions().values()), 9)
1.0
"""

from lightning_recycle.simulation.auto_policy import Auto
from lightning_recycle.simulation.failures import (
    FailedFraction,
    FailureRate,
    FailureSource,
    Outage,
    Poisson,
    Regular,
    Scripted,
    TraceReplay,
    as_seconds,
)
from lightning_recycle.simulation.policy import Policy
from lightning_recycle.simulation.published_policies import Bamboo, Oobleck, Varuna
from lightning_recycle.simulation.recycle_and_common_policies import (
    DropReplica,
    Elastic,
    FaultFree,
    Merge,
    Recycle,
    Restart,
    Spares,
)
from lightning_recycle.simulation.simulated_run import Cause, SimulationResult, State, repeat, simulate
from lightning_recycle.simulation.training_model import (
    Cluster,
    Gpu,
    MeasuredModel,
    TrainingModel,
    Transformer,
    available_models,
    get_model,
)

__all__ = [
    "Auto",
    "Bamboo",
    "Cause",
    "Cluster",
    "DropReplica",
    "Elastic",
    "FailedFraction",
    "FailureRate",
    "FailureSource",
    "FaultFree",
    "Gpu",
    "MeasuredModel",
    "Merge",
    "Oobleck",
    "Outage",
    "Poisson",
    "Policy",
    "Recycle",
    "Regular",
    "Restart",
    "Scripted",
    "SimulationResult",
    "Spares",
    "State",
    "TraceReplay",
    "TrainingModel",
    "Transformer",
    "Varuna",
    "as_seconds",
    "available_models",
    "get_model",
    "repeat",
    "simulate",
]
