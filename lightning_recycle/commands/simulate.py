"""``recycle-simulate``: a simulated training run with failures, for any cluster.

    recycle-simulate model=gpt3_6_7b policy=recycle failures=mtbf failures.mtbf=30min
    recycle-simulate -m policy=recycle,oobleck,restart schedule=planned failures.mtbf=6h,2h,30min
    recycle-simulate failures=trace failures.trace=gcp-a100 policy=auto
    recycle-simulate -m policy=recycle,merge,auto model=gpt3_medium,gpt3_6_7b output=results

Prints throughput and losses by cause; with ``output=FOLDER``, writes ``result.json`` there.
``recycle-report`` turns a folder of results into a page. The configuration is ``conf/simulation/``, explained in
docs/simulation.md.
"""

from __future__ import annotations

import shlex
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from rich.console import Console, Group
from rich.table import Table

from lightning_recycle import simulation
from lightning_recycle.arguments import Check, choice, whole
from lightning_recycle.commands import Output, run_command, switch
from lightning_recycle.errors import ConfigurationError, counted
from lightning_recycle.files import refusing, write_json
from lightning_recycle.simulation.simulated_run import FIGURES
from lightning_recycle.simulation.training_model import GPUS
from lightning_recycle.traces import load_trace
from lightning_recycle.visualize.simulation_results import (
    RESULT_SCHEMA,
    assumptions_text,
    caution,
    cost_of,
    duration_text,
    failures_text,
    policy_text,
)

_USUAL_DURATION = 86400.0


@dataclass(frozen=True)
class Scenario:
    """The scenario to simulate: one training run per seed; ``duration`` in seconds."""

    model: simulation.TrainingModel
    cluster: simulation.Cluster
    policy: simulation.Policy
    failures: simulation.FailureSource
    duration: float
    seeds: range


def scenario_from(config: Mapping[str, Any]) -> Scenario:
    """The scenario for these settings; ConfigurationError for an impossible value."""
    model = model_from(config["model"])
    settings, schedule = config["policy"], config["schedule"]
    if schedule is not None and "schedule" in settings:
        settings = {**settings, "schedule": schedule}
    policy = _instance("policy", settings, simulation.Policy)
    failures = _instance("failures", config["failures"], simulation.FailureSource)
    if isinstance(failures, simulation.Scripted):
        example = "give [[begin, [nodes], end]], such as [[3600,[0],null]]: node 0 fails after an hour, for good"
        Check(bool, example).checked("", "failures.outages", list(failures.outages))
    extra = config["cluster"]["extra_nodes"]
    cluster = simulation.Cluster.of(
        model,
        gpus_per_node=config["cluster"]["gpus_per_node"],
        extra_nodes=getattr(policy, "spares", 0) if extra == "auto" else extra,
        price=config["cluster"]["price"],
    )
    random = not policy.ignores_failures and not isinstance(failures, (simulation.Scripted, simulation.TraceReplay))
    first, count = whole("", "first_seed", config["first_seed"]), whole("", "seeds", config["seeds"], 1)
    seeds = range(first, first + (count if random else 1))
    return Scenario(model, cluster, policy, failures, _duration(config["duration"], failures), seeds)


def model_from(settings: Mapping[str, Any]) -> simulation.TrainingModel:
    """The model, nulls from the catalogue; ConfigurationError for an impossible value."""
    changes = {name: value for name, value in settings.items() if value is not None}
    name = changes.pop("name")
    choice(*GPUS).checked("", "model.gpu", settings["gpu"])
    changes["transformer"] = simulation.Transformer(**settings["transformer"])
    if "efficiency" in changes:
        changes["throughput"] = None  # a known efficiency needs no calibration
    if name in simulation.available_models():
        return simulation.get_model(name, **changes)
    if "throughput" not in changes:
        raise ConfigurationError(f"the model {name} is not calibrated: give model.throughput or model.efficiency.")
    return simulation.TrainingModel(name=name, **changes)


def _instance(name: str, settings: Mapping[str, Any], kind: type) -> Any:
    found = instantiate(settings, _convert_="all")
    if not isinstance(found, kind) or not is_dataclass(found):
        raise ConfigurationError(
            f"{name}={type(found).__name__} is not a {kind.__name__} of lightning_recycle.simulation."
        )
    for item in fields(found):  # everything else is checked by the classes
        if isinstance(item.default, bool):
            switch(f"{name}.{item.name}", getattr(found, item.name))
    return found


def _duration(value: Any, failures: simulation.FailureSource) -> float:
    if value != "auto":
        return simulation.as_seconds("duration", value, positive=True)
    if not isinstance(failures, simulation.TraceReplay):
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
    """The training runs of a scenario, with the ``command`` that repeats them."""
    started = time.perf_counter()
    found = simulation.repeat(
        scenario.model, scenario.cluster, scenario.policy, scenario.failures, scenario.duration, scenario.seeds
    )
    seconds = time.perf_counter() - started
    first = found.results[0]
    return {
        "schema": RESULT_SCHEMA,
        "command": command,
        **_scenario_settings(scenario),
        **{name: found.mean(name) for name in FIGURES},
        "fault_free_throughput": first.fault_free_throughput,
        "deviation": found.deviation,
        "node_failures": found.mean("failures"),
        "note": _note(found.results),
        "losses": _means(result.losses() for result in found.results),
        "fractions": _means(result.accounting.fractions() for result in found.results),
        "gpu_seconds": _means(
            {cause.value: result.accounting.seconds(cause) for cause in simulation.Cause} for result in found.results
        ),
        "runs": [
            {"seed": seed, "throughput": run.throughput, "ratio": run.ratio, "node_failures": run.failures}
            for seed, run in zip(scenario.seeds, found.results, strict=True)
        ],
        "timeline": {"intervals": list(map(asdict, first.intervals)), "events": list(map(asdict, first.events))},
        "seconds": seconds,
    }


_OF_MODEL = (
    "name", "gpus", "pipelines", "stages", "global_batch", "microbatch",
    "efficiency", "network_bandwidth", "recompute",
)  # fmt: skip


def _scenario_settings(scenario: Scenario) -> dict[str, Any]:
    model, cluster = scenario.model, scenario.cluster
    return {
        "model": {
            **{name: getattr(model, name) for name in _OF_MODEL},
            "parameters": model.transformer.parameters,
            "gpu": model.device.name,
            "microbatches": model.grid.microbatches,
        },
        "cluster": {**asdict(cluster), "gpus": cluster.gpus},
        "policy": _described(scenario.policy),
        "failures": _described(scenario.failures),
        "duration": scenario.duration,
    }


def _described(instance: Any) -> dict[str, Any]:
    """Name and settings; ``changed``: not the defaults; ``durations``: in seconds."""
    settings, usual = asdict(instance), asdict(type(instance)())
    changed = [name for name in settings if settings[name] != usual[name]]
    durations = [item.name for item in fields(instance) if "Duration" in str(item.type)]
    return {"name": type(instance).__name__, "settings": settings, "changed": changed, "durations": durations}


def _note(results: tuple[simulation.SimulationResult, ...]) -> str | None:
    if any(result.samples for result in results):
        return None
    first = results[0].intervals[0]
    return first.label if first.state is simulation.State.STOPPED else "a failure undid every step"


def _means(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    found = list(parts)
    return {name: statistics.fmean(each[name] for each in found) for name in found[0]}


Result = Mapping[str, Any]

_NAME = "recycle-simulate"
_ROOT, _CONFIG = str(resources.files("lightning_recycle.conf") / "simulation"), "simulate"

_sweep: list[Result] = []
"""One for each job of this process, for the table at the end of a sweep."""

_written: list[Path] = []
"""Files of the jobs of a sweep."""


def _checked(config: DictConfig) -> Scenario:
    return scenario_from(OmegaConf.to_container(config, resolve=True, throw_on_missing=True))  # type: ignore[arg-type]


def simulate_and_show(config: DictConfig) -> float:
    """Run one job; returns the throughput, which a sweeper can optimize."""
    job = HydraConfig.get()
    folder = Path(job.runtime.output_dir)
    console = Output()
    given = [override for override in job.overrides.task if not override.startswith("output=")]
    scenario, errors = _checked(config), Console(stderr=True, soft_wrap=True, highlight=False)
    errors.print(f"simulating {_announcement(scenario)}", markup=False)
    with errors.status("Planning and simulating"):  # nothing where that is not a terminal
        result = result_of(scenario, shlex.join([_NAME, *given]))
    file = None if config.output is None else folder / "result.json"
    if file is not None:
        with refusing(f"write to {folder}"):
            write_json(file, result)
    if job.mode is RunMode.MULTIRUN:
        _written.extend(filter(None, [file]))
        console.print(f"{job.job.num:>4}  {_line(result)}", soft_wrap=True, highlight=False, markup=False)
    else:
        console.print(Group(_summary(result), "", _losses(result), "", _gpu_time(result)))
        if file is not None:
            console.print(f"\nwrote {file}", soft_wrap=True, highlight=False, markup=False)
    _sweep.append(result)
    return float(result["throughput"])


def main() -> None:
    """The console script."""
    _sweep.clear()
    _written.clear()
    run_command(_NAME, _ROOT, _CONFIG, _checked, simulate_and_show, _sweep_summary)


def _sweep_summary() -> Group | None:
    if len(_sweep) < 2:
        return None
    files = [f"\nwrote {len(_written)} results to {_written[0].parents[1]}, each in a folder"] if _written else []
    return Group(_overview(_sweep), *(f"\n{text}" for text in caution(_sweep)), *files)


# -- what is printed ---------------------------------------------------------------------------------------------------


def _announcement(scenario: Scenario) -> str:
    length = duration_text(scenario.duration)
    return f"{_title(_scenario_settings(scenario))}: {counted(len(scenario.seeds), 'run')} of {length}"


def _title(result: Result) -> str:
    return f"{result['model']['name']}, {policy_text(result)}, {failures_text(result)}"


def _line(result: Result) -> str:
    figures = f"{result['throughput']:.2f} samples/s, {100 * result['ratio']:.1f} % of fault-free 1F1B"
    return f"{_title(result)}: {result['note'] or figures}"


def _overview(results: Sequence[Result]) -> Table:
    table = Table(title="Sweep", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in ("model", "policy", "failures"):
        table.add_column(name)
    for name in ("samples/s", "/1F1B", "spread"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in results:
        numbers = (f"{each['throughput']:.2f}", f"{each['ratio']:.3f}", f"{each['deviation']:.3f}")
        table.add_row(each["model"]["name"], policy_text(each), failures_text(each), *numbers)
    return table


def _summary(result: Result) -> Table:
    model, cluster, runs = result["model"], result["cluster"], len(result["runs"])
    table = Table("", "", show_header=False, title="Simulation", title_justify="left")
    grid = f"{counted(model['pipelines'], 'pipeline')} of {counted(model['stages'], 'stage')}"
    grid += f", {counted(model['microbatches'], 'micro-batch')} each"
    spread = f" (from run to run {result['deviation'] * result['fault_free_throughput']:.2f})" if runs > 1 else ""
    ratio = f"{result['ratio']:.3f}"
    if cluster["gpus"] != model["gpus"]:
        ratio += f"; {result['ratio_per_gpu']:.3f} per GPU of the cluster"
    for name, value in (
        ("model", f"{model['name']}, {model['parameters'] / 1e9:.3g} billion parameters; {grid}"),
        ("cluster", f"{counted(cluster['nodes'], 'node')} of {cluster['gpus_per_node']} {model['gpu']}"),
        ("assumed", assumptions_text(result)),
        ("policy", policy_text(result)),
        ("failures", f"{failures_text(result)}; {result['node_failures']:.1f} node failures in a run"),
        ("runs", f"{runs} of {duration_text(result['duration'])}"),
        ("throughput", f"{result['throughput']:.2f} samples/s{spread}"),
        ("throughput / 1F1B fault-free", ratio),
        ("of what live GPUs could do", f"{result['fraction_of_ideal']:.3f}"),
        ("goodput, ETTR, MFU", f"{result['goodput']:.3f}, {result['ettr']:.3f}, {result['mfu']:.3f}"),
    ):
        table.add_row(name, value)
    if (cost := cost_of(result)) is not None:
        table.add_row("cost of 1,000 samples", f"{cost:.4g}")
    if result["note"]:
        table.add_row("note", f"nothing was trained: {result['note']}")
    return table


_ROWS = {"reconfiguring": "reconfiguring, checkpoints"}


def _losses(result: Result) -> Table:
    total = result["fault_free_throughput"] * result["cluster"]["gpus"] / result["model"]["gpus"]
    table = _by_cause("Throughput lost, by cause", "samples/s", "of 1F1B fault-free")
    for cause, lost in sorted(result["losses"].items(), key=lambda item: -item[1]):
        gained = " (negative: faster)" if round(lost, 3) < 0 else ""
        table.add_row(f"{_ROWS.get(cause, cause)}{gained}", *_lost(lost, total))
    table.add_row("all", *_lost(sum(result["losses"].values()), total), style="bold")
    return table


def _lost(amount: float, total: float) -> tuple[str, str]:
    """Samples/s, and their share of ``total``; rounding errors are shown as 0."""
    return f"{round(amount, 3) + 0.0:.3f}", f"{round(100 * amount / total, 1) + 0.0:.1f} %"


def _gpu_time(result: Result) -> Table:
    table = _by_cause("GPU time, by cause", "GPU-hours", "of all")
    for cause, part in result["fractions"].items():
        hours = result["gpu_seconds"][cause] / 3600
        table.add_row(_ROWS.get(cause, cause), f"{hours:,.2f}", f"{100 * part:.1f} %")
    return table


def _by_cause(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("", min_width=14)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


if __name__ == "__main__":
    main()
