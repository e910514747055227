"""Scenarios of ``recycle-simulate``: from the configuration to training runs, and their result as a dictionary.

Concept: everything that is printed, drawn or reported is read from these dictionaries, which are ready for
``json.dump``, so a figure on a page is the figure in the file. Their contents are explained where they are read:
``visualize/records.py``.

Contract: every mistake raises an error that names the value and the remedy.

Must not know: Hydra's run time, files, consoles.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any

from hydra.utils import instantiate

from lightning_recycle.arguments import whole
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.simulation import (
    Cause,
    Cluster,
    FailureSource,
    Policy,
    Scripted,
    SimulationResult,
    TraceReplay,
    TrainingModel,
    Transformer,
    as_seconds,
    available_models,
    get_model,
    repeat,
)
from lightning_recycle.simulation.results import FIGURES
from lightning_recycle.traces import load_trace
from lightning_recycle.visualize.records import RESULT_SCHEMA

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
        price=config["cluster"]["price"],
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


def _duration(value: Any, failures: FailureSource) -> float:
    if value != "auto":
        return as_seconds("duration", value, positive=True)
    if not isinstance(failures, TraceReplay):
        return _USUAL_DURATION
    trace = load_trace(failures.trace)
    left = trace.duration - float(failures.start)
    if left <= 0:
        raise ConfigurationError(
            f"failures.start={failures.start:g} s: the trace {failures.trace} ends after {trace.duration:g} s."
        )
    return left


# -- the result --------------------------------------------------------------------------------------------------------


def result_of(scenario: Scenario, command: str) -> dict[str, Any]:
    """The training runs of a scenario.

    Args:
        scenario: the scenario.
        command: command that repeats the runs; stored in the result.
    """
    started = time.perf_counter()
    found = repeat(
        scenario.model, scenario.cluster, scenario.policy, scenario.failures, scenario.duration, scenario.seeds
    )
    seconds = time.perf_counter() - started
    first = found.results[0]
    return {
        "schema": RESULT_SCHEMA,
        "command": command,
        **_asked(scenario),
        **{name: found.mean(name) for name in FIGURES},
        "fault_free_throughput": first.fault_free_throughput,
        "deviation": found.deviation,
        "node_failures": found.mean("failures"),
        "note": _note(found.results),
        "losses": _means(result.losses() for result in found.results),
        "fractions": _means(result.accounting.fractions() for result in found.results),
        "gpu_seconds": _means(
            {cause.value: result.accounting.seconds(cause) for cause in Cause} for result in found.results
        ),
        "runs": [
            {"seed": seed, "throughput": run.throughput, "ratio": run.ratio, "node_failures": run.failures}
            for seed, run in zip(scenario.seeds, found.results, strict=True)
        ],
        "timeline": _timeline(first),
        "seconds": seconds,
    }


def _asked(scenario: Scenario) -> dict[str, Any]:
    model, cluster = scenario.model, scenario.cluster
    return {
        "model": {
            "name": model.name,
            "parameters": model.transformer.parameters,
            "gpus": model.gpus,
            "gpu": model.device.name,
            "pipelines": model.grid.pipelines,
            "stages": model.grid.stages,
            "microbatches": model.grid.microbatches,
            "global_batch": model.global_batch,
            "microbatch": model.microbatch,
            "efficiency": model.efficiency,
            "network_bandwidth": model.network_bandwidth,
            "recompute": model.recompute,
        },
        "cluster": {
            "nodes": cluster.nodes,
            "gpus_per_node": cluster.gpus_per_node,
            "gpus": cluster.gpus,
            "price": cluster.price,
        },
        "policy": _described(scenario.policy),
        "failures": _described(scenario.failures),
        "duration": scenario.duration,
    }


def _described(instance: Any) -> dict[str, Any]:
    """Name and settings; ``changed`` names those that differ from the defaults."""
    settings, usual = asdict(instance), asdict(type(instance)())
    changed = [name for name in settings if settings[name] != usual[name]]
    return {"name": type(instance).__name__, "settings": settings, "changed": changed}


def _note(results: tuple[SimulationResult, ...]) -> str | None:
    """A few words on why nothing was trained."""
    if any(result.samples for result in results):
        return None
    return results[0].intervals[0].label


def _means(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    found = list(parts)
    return {name: statistics.fmean(each[name] for each in found) for name in found[0]}


def _timeline(result: SimulationResult) -> dict[str, Any]:
    data = result.to_dict()
    return {"intervals": data["intervals"], "events": data["events"]}
