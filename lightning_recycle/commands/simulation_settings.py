"""From the configuration of ``recycle-simulate`` to a scenario for the simulator.

Contract: every mistake raises an error that names the value and the remedy.

Must not know: what is done with the scenario.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from hydra.utils import instantiate

from lightning_recycle.arguments import whole
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.simulation import (
    Cluster,
    FailureSource,
    Policy,
    Scripted,
    Topology,
    TraceReplay,
    TrainingModel,
    Transformer,
    as_seconds,
    available_models,
    get_model,
)
from lightning_recycle.traces import load_trace

__all__ = ["Scenario", "model_from", "scenario_from"]

_USUAL_DURATION = 86400.0


@dataclass(frozen=True)
class Scenario:
    """The scenario to simulate: one training run per seed; ``duration`` in seconds."""

    model: TrainingModel
    cluster: Cluster
    policy: Policy
    failures: FailureSource
    duration: float
    seeds: range


def scenario_from(config: Mapping[str, Any]) -> Scenario:
    """The scenario for the settings of ``conf/simulation/simulate.yaml``.

    Raises:
        ConfigurationError: when a value is impossible.
    """
    model = model_from(config["model"])
    policy = _instance("policy", _scheduled(config["policy"], config["schedule"]), Policy)
    failures = _instance("failures", config["failures"], FailureSource)
    extra = config["cluster"]["extra_nodes"]
    cluster = Cluster.of(
        model,
        gpus_per_node=config["cluster"]["gpus_per_node"],
        extra_nodes=getattr(policy, "spares", 0) if extra == "auto" else extra,
        topology=_topology(config["cluster"]["topology"]),
    )
    random = not policy.ignores_failures and not isinstance(failures, (Scripted, TraceReplay))
    first, count = whole("", "first_seed", config["first_seed"]), whole("", "seeds", config["seeds"], 1)
    seeds = range(first, first + (count if random else 1))
    return Scenario(model, cluster, policy, failures, _duration(config["duration"], failures), seeds)


def model_from(settings: Mapping[str, Any]) -> TrainingModel:
    """The model for the settings of ``conf/simulation/model``; the catalogue fills in what is null.

    Raises:
        ConfigurationError: when a value is impossible.
    """
    changes = {name: value for name, value in settings.items() if value is not None}
    name = changes.pop("name")
    changes["transformer"] = Transformer(**settings["transformer"])
    if "efficiency" in changes:
        changes["throughput"] = None  # a known efficiency needs no calibration
    if name in available_models():
        return get_model(name, **changes)
    if "throughput" not in changes:
        raise ConfigurationError(f"the model {name} is not calibrated: give model.throughput or model.efficiency.")
    return TrainingModel(name=name, **changes)


def _scheduled(policy: Mapping[str, Any], schedule: Any) -> Mapping[str, Any]:
    """The policy's settings with the schedule for all policies, where one is given."""
    return policy if schedule is None or "schedule" not in policy else {**policy, "schedule": schedule}


def _instance(name: str, settings: Mapping[str, Any], kind: type) -> Any:
    found = instantiate(settings, _convert_="all")
    if not isinstance(found, kind) or not is_dataclass(found):
        raise ConfigurationError(
            f"{name}={type(found).__name__} is not a {kind.__name__} of lightning_recycle.simulation."
        )
    for item in fields(found):  # everything else is checked by the classes
        value = getattr(found, item.name)
        if isinstance(item.default, bool) and not isinstance(value, bool):
            raise ConfigurationError(f"{name}.{item.name}={value!r}: give true or false.")
    return found


def _topology(settings: Any) -> Topology | None:
    if settings is None:
        return None
    known = [item.name for item in fields(Topology)]
    if not isinstance(settings, Mapping) or not set(settings) <= set(known):
        raise ConfigurationError(f"cluster.topology={settings!r}: give null, or some of {', '.join(known)}.")
    return Topology(**settings)


def _duration(value: Any, failures: FailureSource) -> float:
    if value != "auto":
        return as_seconds("duration", value, positive=True)
    if not isinstance(failures, TraceReplay):
        return _USUAL_DURATION
    trace = load_trace(failures.trace)
    left = (trace.duration - float(failures.start)) / failures.speed
    if left <= 0:
        raise ConfigurationError(
            f"failures.start={failures.start:g} s: the trace {failures.trace} ends after {trace.duration:g} s."
        )
    return left
