"""The tasks of ``recycle-simulate``: each returns a dictionary that is ready for ``json.dump``.

Concept: everything that is printed, drawn or reported is read from these dictionaries, so a figure on a page is the
figure in the file. Their contents are explained where they are read: ``visualize/report/records.py``.

Must not know: Hydra's run time, files, consoles.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any

from lightning_recycle.arguments import at_least, is_number
from lightning_recycle.commands.settings import grid_from, workers_from
from lightning_recycle.commands.simulation_settings import Scenario, scenario_from
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.planning import Costs, HeuristicPlanner, Problem, normalized_problem, solve
from lightning_recycle.simulation import Cause, SimulationResult, ablation, repeat
from lightning_recycle.visualize.report import SECTION_NAMES

__all__ = ["RESULT_SCHEMA", "run_task"]

RESULT_SCHEMA = 2


def run_task(config: Mapping[str, Any], command: str) -> dict[str, Any]:
    """Run the task named by ``config["task"]``.

    Args:
        config: resolved settings of ``conf/simulation/simulate.yaml``.
        command: command that repeats the task; stored in the result.

    Raises:
        ConfigurationError: when a value is impossible.
    """
    name = config["task"]["name"]
    if name not in _TASKS:
        raise ConfigurationError(f"unknown task {name!r}: choose one of {', '.join(_TASKS)}.")
    section = config["section"]
    if section is not None and section not in SECTION_NAMES:
        raise ConfigurationError(f"unknown section {section!r}: choose one of {', '.join(SECTION_NAMES)}.")
    head = {"schema": RESULT_SCHEMA, "task": name, "section": section, "command": command}
    return head | _TASKS[name](config)


def _training(config: Mapping[str, Any]) -> dict[str, Any]:
    scenario = scenario_from(config)
    started = time.perf_counter()
    found = repeat(
        scenario.model, scenario.cluster, scenario.policy, scenario.failures, scenario.duration, scenario.seeds
    )
    seconds = time.perf_counter() - started
    first = found.results[0]
    return {
        **_asked(scenario),
        "throughput": found.throughput,
        "fault_free_throughput": first.fault_free_throughput,
        "ratio": found.ratio,
        "ratio_per_gpu": found.ratio_per_gpu,
        "deviation": found.deviation,
        "fraction_of_ideal": found.fraction_of_ideal,
        "goodput": statistics.fmean(result.goodput for result in found.results),
        "ettr": statistics.fmean(result.ettr for result in found.results),
        "mfu": statistics.fmean(result.mfu for result in found.results),
        "cost": _cost(found.results, config["price"]),
        "node_failures": found.failures,
        "tainted": _tainted(found.results),
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
            "topology": None if cluster.topology is None else asdict(cluster.topology),
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


def _cost(results: tuple[SimulationResult, ...], prices: Mapping[str, Any]) -> dict[str, Any]:
    """Dollars of a run and of a thousand samples, for each price of a GPU hour."""
    samples = statistics.fmean(result.samples for result in results)
    found: dict[str, Any] = {}
    for name, price in prices.items():
        dollars = statistics.fmean(result.dollars(at_least("price", name, price)) for result in results)
        found[name] = {
            "per_gpu_hour": price,
            "dollars": dollars,
            "per_thousand_samples": 1000 * dollars / samples if samples else None,
        }
    return found


def _tainted(results: tuple[SimulationResult, ...]) -> float:
    """Part of the samples that rest on wrong results which nobody has found."""
    samples = sum(result.samples for result in results)
    return sum(result.tainted_samples for result in results) / samples if samples else 0.0


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


def _planner(config: Mapping[str, Any]) -> dict[str, Any]:
    task = config["task"]
    grid, failed = grid_from(task["grid"]), task["failed"]
    if not is_number(failed, 0) or failed >= 1:
        raise ConfigurationError(f"task.failed={failed!r}: give the failed fraction of the workers, from 0 to below 1.")
    planner = HeuristicPlanner(task["effort"])
    count = max(round(failed * grid.num_workers), int(failed > 0))
    started, begun = time.perf_counter(), time.process_time()
    problem = normalized_problem(Problem(grid, Costs.uniform(grid.stages)), count)
    result = solve(problem, planner)
    return {
        "grid": asdict(grid),
        "workers": grid.num_workers,
        "failed": failed,
        "failed_workers": count,
        "seconds": time.perf_counter() - started,
        "processor_seconds": time.process_time() - begun,
        "period": result.schedule.period,
        "lower_bound": result.lower_bound,
        "gap": result.gap,
    }


def _techniques(config: Mapping[str, Any]) -> dict[str, Any]:
    task = config["task"]
    grid, failed = grid_from(task["grid"]), workers_from("task.failed", task["failed"])
    found = ablation(grid, failed, effort=task["effort"])
    return {
        "grid": asdict(grid),
        "workers": grid.num_workers,
        "failed": [[worker.pipeline, worker.stage] for worker in sorted(failed)],
        "effort": task["effort"],
        "slots": asdict(found),
    }


_TASKS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "training": _training,
    "planner": _planner,
    "techniques": _techniques,
}
