"""Simulated training runs with failures, under ReCycle and other policies.

>>> from lightning_recycle.simulation import Cluster, Poisson, Recycle, get_model, simulate
>>> model = get_model("gpt3_medium")
>>> result = simulate(model, Cluster.of(model), Recycle(), Poisson(mtbf="2h"), duration="6h", seed=1)
>>> round(sum(result.accounting.fractions().values()), 9)
1.0
"""

from lightning_recycle.simulation.auto_policy import Auto as Auto
from lightning_recycle.simulation.failures import FailedFraction as FailedFraction
from lightning_recycle.simulation.failures import FailureRate as FailureRate
from lightning_recycle.simulation.failures import FailureSource as FailureSource
from lightning_recycle.simulation.failures import Outage as Outage
from lightning_recycle.simulation.failures import Poisson as Poisson
from lightning_recycle.simulation.failures import Regular as Regular
from lightning_recycle.simulation.failures import Scripted as Scripted
from lightning_recycle.simulation.failures import TraceReplay as TraceReplay
from lightning_recycle.simulation.failures import as_seconds as as_seconds
from lightning_recycle.simulation.policy import Policy as Policy
from lightning_recycle.simulation.published_policies import Bamboo as Bamboo
from lightning_recycle.simulation.published_policies import Oobleck as Oobleck
from lightning_recycle.simulation.published_policies import Varuna as Varuna
from lightning_recycle.simulation.recycle_and_common_policies import DropReplica as DropReplica
from lightning_recycle.simulation.recycle_and_common_policies import Elastic as Elastic
from lightning_recycle.simulation.recycle_and_common_policies import FaultFree as FaultFree
from lightning_recycle.simulation.recycle_and_common_policies import Merge as Merge
from lightning_recycle.simulation.recycle_and_common_policies import Recycle as Recycle
from lightning_recycle.simulation.recycle_and_common_policies import Restart as Restart
from lightning_recycle.simulation.recycle_and_common_policies import Spares as Spares
from lightning_recycle.simulation.simulated_run import Cause as Cause
from lightning_recycle.simulation.simulated_run import SimulationResult as SimulationResult
from lightning_recycle.simulation.simulated_run import State as State
from lightning_recycle.simulation.simulated_run import repeat as repeat
from lightning_recycle.simulation.simulated_run import simulate as simulate
from lightning_recycle.simulation.training_model import Cluster as Cluster
from lightning_recycle.simulation.training_model import Gpu as Gpu
from lightning_recycle.simulation.training_model import MeasuredModel as MeasuredModel
from lightning_recycle.simulation.training_model import TrainingModel as TrainingModel
from lightning_recycle.simulation.training_model import Transformer as Transformer
from lightning_recycle.simulation.training_model import available_models as available_models
from lightning_recycle.simulation.training_model import get_model as get_model
