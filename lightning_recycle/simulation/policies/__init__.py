"""Policies: ways to handle failures, one module each."""

from lightning_recycle.simulation.policies.auto import Auto
from lightning_recycle.simulation.policies.bamboo import Bamboo
from lightning_recycle.simulation.policies.common import CommonPolicy
from lightning_recycle.simulation.policies.drop_replica import DropReplica
from lightning_recycle.simulation.policies.elastic_layers import ElasticLayers
from lightning_recycle.simulation.policies.fault_free import FaultFree
from lightning_recycle.simulation.policies.merge import Merge
from lightning_recycle.simulation.policies.oobleck import Oobleck
from lightning_recycle.simulation.policies.policy import (
    Configuration,
    Context,
    Happening,
    Loss,
    Pause,
    Policy,
    Reaction,
)
from lightning_recycle.simulation.policies.recycle import Recycle
from lightning_recycle.simulation.policies.restart import Restart
from lightning_recycle.simulation.policies.spares import Spares
from lightning_recycle.simulation.policies.varuna import Varuna

__all__ = [
    "Auto",
    "Bamboo",
    "CommonPolicy",
    "Configuration",
    "Context",
    "DropReplica",
    "ElasticLayers",
    "FaultFree",
    "Happening",
    "Loss",
    "Merge",
    "Oobleck",
    "Pause",
    "Policy",
    "Reaction",
    "Recycle",
    "Restart",
    "Spares",
    "Varuna",
]
