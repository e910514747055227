"""``recycle-simulate``: how a training run copes with failures, for any cluster, on a laptop.

    recycle-simulate model=gpt3_6_7b policy=recycle failures=mtbf failures.mtbf=30min
    recycle-simulate -m policy=recycle,oobleck,restart failures.mtbf=6h,2h,30min
    recycle-simulate failures=trace failures.trace=gcp-a100 policy=elastic_layers
    recycle-simulate experiment=paper output=results

Prints throughput and losses by cause; with ``output=FOLDER``, writes ``result.json`` and a timeline there.
``recycle-report`` turns a folder of results into a page. The configuration is ``conf/simulation/``, explained in
docs/simulation.md.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from lightning_recycle.commands.application import run_command
from lightning_recycle.commands.experiments import Point, points_of
from lightning_recycle.commands.simulation_tables import line, overview, single
from lightning_recycle.commands.simulation_tasks import run_task
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.files import write_atomically
from lightning_recycle.visualize.timeline import save_timeline

__all__ = ["main"]

_NAME = "recycle-simulate"
_ROOT, _CONFIG = str(resources.files("lightning_recycle.conf") / "simulation"), "simulate"

_sweep: list[dict[str, Any]] = []
"""One for each job of this process, for the table at the end of a sweep."""


def simulate_and_show(config: DictConfig) -> float:
    """Run one job; returns a value for sweepers to optimize: throughput, seconds of the planner, or slots of a step."""
    job = HydraConfig.get()
    folder = Path(job.runtime.output_dir)
    console = Console()
    given = [override for override in job.overrides.task if not override.startswith("output=")]
    if config.get("experiment") and config.output is None:
        raise ConfigurationError("an experiment is for recycle-report: give output=FOLDER for its results.")
    if config.get("experiment"):
        return _experiment(OmegaConf.to_container(config.experiment), given, folder, console)  # type: ignore[arg-type]
    result, written = _point(config, given, folder)
    if job.mode is RunMode.MULTIRUN:
        console.print(f"{job.job.num:>4}  {line(result)}", soft_wrap=True, highlight=False, markup=False)
    else:
        console.print(single(result))
        if written:
            console.print(f"\nwrote {', '.join(written)}", soft_wrap=True, highlight=False, markup=False)
    _sweep.append(result)
    return _objective(result)


def _experiment(sections: Mapping[str, Any], given: Sequence[str], folder: Path, console: Console) -> float:
    """All points of an experiment, each in a folder of its own; returns their number."""
    points = points_of(sections, given)
    for number, point in enumerate(points):
        target = folder / point.section / f"{number:03d}"
        result, _ = _point(_composed(point), list(point.overrides), target)
        progress = f"{number + 1:>4}/{len(points)}  {point.section:<10} {line(result)}"
        console.print(progress, soft_wrap=True, highlight=False, markup=False)
    console.print(f"\nwrote {len(points)} results to {folder}", soft_wrap=True, highlight=False, markup=False)
    console.print(f"recycle-report {shlex.quote(str(folder))} -o report.html", soft_wrap=True, highlight=False)
    return float(len(points))


def _composed(point: Point) -> DictConfig:
    overrides = [*point.overrides, f"section={point.section}", "timeline=false", "output=."]
    return hydra.compose(_CONFIG, overrides=overrides)


def _point(config: DictConfig, overrides: Sequence[str], folder: Path) -> tuple[dict[str, Any], list[str]]:
    settings: dict[str, Any] = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)  # type: ignore[assignment]
    if not isinstance(settings["timeline"], bool):
        raise ConfigurationError(f"timeline={settings['timeline']!r}: give true or false.")
    result = run_task(settings, shlex.join([_NAME, *overrides]))
    if settings["output"] is None:
        return result, []
    file = folder / "result.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(result, indent=1) + "\n")
        written = [file]
        if settings["timeline"] and result["task"] == "training":
            written += save_timeline(folder, result)
    except OSError as error:
        raise ConfigurationError(f"cannot write to {folder}: {error.strerror or error}.") from error
    return result, list(map(str, written))


def _objective(result: Mapping[str, Any]) -> float:
    if result["task"] == "planner":
        return float(result["seconds"])
    return float(result["slots"]["staggered"] if result["task"] == "techniques" else result["throughput"])


def main() -> None:
    """The console script."""
    _sweep.clear()
    run_command(_NAME, _ROOT, _CONFIG, simulate_and_show, lambda: overview(_sweep) if len(_sweep) > 1 else None)


if __name__ == "__main__":
    main()
