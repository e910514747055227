"""Failure sources: seeded streams of nodes that fail, come back, get slow or compute wrong results."""

from lightning_recycle.simulation.failures.degraded import CorruptNodes, SlowNodes
from lightning_recycle.simulation.failures.fractions import FailedFraction
from lightning_recycle.simulation.failures.poisson import Poisson
from lightning_recycle.simulation.failures.rates import LLAMA3_PER_GPU_DAY, RSC1_PER_GPU_DAY, FailureRate
from lightning_recycle.simulation.failures.regular import Regular
from lightning_recycle.simulation.failures.replayed import Scripted, TraceReplay
from lightning_recycle.simulation.failures.source import Change, Corruption, FailureSource, Outage, Slowdown

__all__ = [
    "LLAMA3_PER_GPU_DAY",
    "RSC1_PER_GPU_DAY",
    "Change",
    "CorruptNodes",
    "Corruption",
    "FailedFraction",
    "FailureRate",
    "FailureSource",
    "Outage",
    "Poisson",
    "Regular",
    "Scripted",
    "SlowNodes",
    "Slowdown",
    "TraceReplay",
]
