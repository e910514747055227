"""``recycle-plan``: plan an iteration on paper, for any cluster, on a laptop.

    recycle-plan grid.pipelines=3 grid.stages=4 grid.microbatches=6 'failures=[[1,2]]' output=plan.json
    recycle-plan -m planner=heuristic,cbc,highs failures=0,1,2
    recycle-plan library=plans failures=2 costs=profile costs.path=profile.json

Prints a table; with ``output=FILE``, writes the plan and a picture of it. The configuration is ``conf/plan.yaml``,
explained in docs/planner.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from lightning_recycle.commands.application import run_command
from lightning_recycle.commands.plan_settings import layers_from, problem_from, problems_ahead
from lightning_recycle.commands.plan_tables import Row, comparison, layout_table, layouts_of, row, single
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.planning import PlanLibrary, Planner, PlanResult, Problem, save_plan, solve
from lightning_recycle.planning.plan_files import check_torch_runs, save_torch_csv
from lightning_recycle.visualize import save_gantt

__all__ = ["main"]

_NAME = "recycle-plan"
_LARGEST_PICTURE = 20_000  # operations; beyond this an SVG takes tens of megabytes and shows nothing

_sweep: list[Row] = []
"""One for each job of this process, for the table at the end of a sweep."""


def plan_and_show(config: DictConfig) -> float:
    """Run one job; returns the period, which a sweeper can minimize."""
    settings: dict[str, Any] = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)  # type: ignore[assignment]
    problem = problem_from(settings)
    planner: Planner = instantiate(settings["planner"], _convert_="all")
    output = _path(settings, "output")
    _check_format(settings["format"], output, problem)
    picture = _picture(settings, output)
    console, errors = Console(), Console(stderr=True, soft_wrap=True, highlight=False)
    movable = layers_from(settings["layers"], problem)
    if settings["library"] is None:
        result = solve(problem, planner)
    else:
        library = PlanLibrary(_path(settings, "library") or ".", planner)
        results = library.compute(problems_ahead(settings), progress=errors.is_terminal)
        result = results[-1]
        console.print(comparison([row(each) for each in results], "Plan library", by_stage=True))
    if result.log:
        console.print(result.log, markup=False, highlight=False, soft_wrap=True)
    _sweep.append(row(result))
    console.print(single(result, _sweep[-1]))
    if movable is not None:
        found = layouts_of(settings["layers"], problem, *movable)
        console.print(layout_table(found))
        if settings["library"] is not None:
            kept = [plan.chosen.problem for _, plan in found if plan.chosen.problem is not None]
            library.compute(kept, progress=errors.is_terminal)
    if result.warning is not None:
        errors.print(f"warning: {result.warning}", markup=False)
    unit = "s" if "path" in settings["costs"] else "slots"
    written = []
    if output is not None and settings["format"] == "csv":
        save_torch_csv(output, result.schedule)
        written.append(str(output))
    elif output is not None:
        save_plan(output, result)
        written.append(str(output))
    written += _drawn(result, picture, automatic=settings["picture"] == "auto", unit=unit)
    if written:
        console.print("wrote " + ", ".join(written), soft_wrap=True, highlight=False, markup=False)
    return result.schedule.period


def _check_format(name: Any, output: Path | None, problem: Problem) -> None:
    if name not in ("json", "csv"):
        raise ConfigurationError(f"format={name!r}: give json or csv.")
    if name == "csv":
        if output is None:
            raise ConfigurationError("format=csv is for a file: give its name, e.g. output=schedule.csv.")
        check_torch_runs(problem)


def _drawn(result: PlanResult, picture: Path | None, automatic: bool, unit: str) -> list[str]:
    """The picture that was written, or why it was not, for the last line."""
    operations = result.schedule.num_operations
    if picture is not None and automatic and operations > _LARGEST_PICTURE:
        return [f"no picture of {operations:,} operations (picture=FILE forces it)"]
    if picture is not None:
        title = f"{result.schedule.grid}, {len(result.schedule.failed)} failed, {result.backend} ({result.status})"
        iterations = 2 if result.schedule.problem.technique.staggered else 1
        try:
            picture.parent.mkdir(parents=True, exist_ok=True)
            save_gantt(picture, result.schedule, [title], iterations=iterations, unit=unit)
        except OSError as error:
            raise ConfigurationError(f"cannot write the picture to {picture}: {error.strerror or error}.") from error
        return [str(picture)]
    return []


def _path(settings: dict[str, Any], name: str) -> Path | None:
    value = settings[name]
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        raise ConfigurationError(f"{name}={value!r}: give a path, or null.")
    # Jobs of a sweep would overwrite one another's files; a library is shared.
    if name != "library" and HydraConfig.get().mode is RunMode.MULTIRUN:
        return Path(HydraConfig.get().runtime.output_dir) / value
    return Path(value)


def _picture(settings: dict[str, Any], output: Path | None) -> Path | None:
    if settings["picture"] == "auto":
        return None if output is None else output.with_suffix(".svg")
    picture = _path(settings, "picture")
    if picture is not None and picture.suffix != ".svg":
        raise ConfigurationError(f"picture={settings['picture']!r}: give a name that ends with .svg, or null.")
    return picture


def main() -> None:
    """The console script."""
    _sweep.clear()
    run_command(
        _NAME,
        "pkg://lightning_recycle.conf",
        "plan",
        plan_and_show,
        lambda: comparison(_sweep, "Sweep") if len(_sweep) > 1 else None,
    )


if __name__ == "__main__":
    main()
