"""``recycle-plan``: plan an iteration on paper, for any cluster, on a laptop.

    recycle-plan grid.pipelines=3 grid.stages=4 grid.microbatches=6 'failures=[[1,2]]' output=plan.json
    recycle-plan -m planner=heuristic,cbc,highs failures=0,1,2
    recycle-plan library=plans failures=2 costs=profile costs.path=profile.json

Prints a table; with ``output=FILE``, writes the plan and a picture of it. The configuration is ``conf/plan.yaml``,
explained in docs/planner.md.

A plan is compared with two fault-free schedules of the same grid, costs and memory. Most systems run 1F1B; zero-bubble
(split backward, no more memory than 1F1B, one optimizer step for all stages) is the best they could run. A ratio of
1.0 means that the failures cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from lightning_recycle.commands.application import run_command
from lightning_recycle.commands.plan_settings import problem_from, problems_ahead
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.planning import (
    Grid,
    PlanLibrary,
    Planner,
    PlanResult,
    Problem,
    Schedule,
    Technique,
    distribution_of,
    heuristic,
    one_f_one_b,
    save_plan,
    solve,
)
from lightning_recycle.planning.plan_files import check_torch_runs, save_torch_csv
from lightning_recycle.visualize import save_gantt

__all__ = ["baselines", "main"]

_NAME = "recycle-plan"
_LARGEST_PICTURE = 20_000  # operations; beyond this an SVG takes tens of megabytes and shows nothing

_sweep: list[_Row] = []
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
    if settings["library"] is None:
        result = solve(problem, planner)
    else:
        library = PlanLibrary(_path(settings, "library") or ".", planner)
        results = library.compute(problems_ahead(settings), progress=errors.is_terminal)
        result = results[-1]
        console.print(_comparison([_row(each) for each in results], "Plan library", by_stage=True))
    _sweep.append(_row(result))
    unit = "s" if "path" in settings["costs"] else "slots"
    console.print(_single(result, _sweep[-1], unit))
    if result.warning is not None:
        errors.print(f"warning: {result.warning}", markup=False)
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
        lambda: _comparison(_sweep, "Sweep") if len(_sweep) > 1 else None,
    )


# -- what is printed ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Row:
    """One plan in numbers; times in the unit of the costs."""

    planner: str
    """The planner that was asked."""
    found_by: str
    """The planner whose plan it is."""
    solver: str | None
    """What the solver did, if the planner has one."""
    grid: str
    failures: tuple[int, ...]
    """Failed workers of each stage."""
    status: str
    period: float
    makespan: float
    lower_bound: float
    gap: float
    peaks: tuple[int, ...]
    """The most micro-batches a worker of each stage holds."""
    against_1f1b: float
    against_zero_bubble: float
    """Throughput divided by the baseline's."""
    seconds: float


def _row(result: PlanResult) -> _Row:
    """The numbers of ``result``."""
    schedule = result.schedule
    usual, zero_bubble = baselines(schedule.problem)
    peaks = [0] * schedule.grid.stages
    for worker in schedule.live_workers:
        peaks[worker.stage] = max(peaks[worker.stage], schedule.peak_in_flight(worker))
    return _Row(
        planner=result.backend,
        found_by=result.found_by,
        solver=_solver(result),
        grid=str(schedule.grid),
        failures=distribution_of(schedule.grid, schedule.failed),
        status=result.status,
        period=schedule.period,
        makespan=schedule.makespan,
        lower_bound=result.lower_bound,
        gap=result.gap,
        peaks=tuple(peaks),
        against_1f1b=usual / schedule.period if schedule.period else 1.0,
        against_zero_bubble=zero_bubble / schedule.period if schedule.period else 1.0,
        seconds=result.seconds,
    )


def baselines(problem: Problem) -> tuple[float, float]:
    """Periods of fault-free 1F1B and of the fault-free zero-bubble schedule with at most S micro-batches in flight."""
    # Without failures all pipelines are alike.
    one = Grid(1, problem.grid.stages, problem.grid.microbatches)
    return _baselines(replace(problem, grid=one, failed=frozenset(), worker_factors=(), technique=Technique()))


@lru_cache(maxsize=64)
def _baselines(problem: Problem) -> tuple[float, float]:
    usual = replace(problem, technique=Technique(split_backward=False, staggered=False))
    stages = problem.grid.stages
    limit = tuple(min(stages, n) for n in problem.in_flight_limit or (stages,) * stages)
    zero_bubble = replace(problem, technique=Technique(split_backward=True, staggered=False), in_flight_limit=limit)
    return one_f_one_b(usual).period, heuristic(zero_bubble).period


def _single(result: PlanResult, numbers: _Row, unit: str) -> Table:
    """One plan, one number per line; times in ``unit``."""
    problem = result.schedule.problem
    table = Table("", "", show_header=False, title="Plan", title_justify="left")
    failed = ", ".join(str(worker) for worker in sorted(problem.failed)[:8])
    more = f" and {len(problem.failed) - 8} more" if len(problem.failed) > 8 else ""
    switches = [name for name in ("split_backward", "staggered") if getattr(problem.technique, name)]
    limits = problem.in_flight_limit
    may_repeat = problem.memory is not None and problem.memory.checkpoint is not None
    again = sum(len(result.schedule.recomputed(w)) for w in result.schedule.live_workers) if may_repeat else 0
    for name, value in (
        ("pipelines x stages x micro-batches", numbers.grid),
        ("failed (pipeline, stage)", f"{failed}{more}" if problem.failed else "none"),
        ("technique", ", ".join(["adaptive", *switches])),
        ("planner", _planner(numbers)),
        ("period", f"{numbers.period:g} {unit}"),
        ("makespan", f"{numbers.makespan:g} {unit}"),
        ("lower bound of the period", f"{numbers.lower_bound:g} {unit}"),
        ("gap", f"{_percent(numbers.gap)} ({numbers.status})"),
        ("peak memory", f"{_short(numbers.peaks)} micro-batches" + (f" of {_short(limits)}" if limits else "")),
        *([("peak memory, bytes", _bytes(result.schedule))] if problem.memory is not None else []),
        *([("forwards computed again", f"{again}")] if again else []),
        ("throughput / 1F1B fault-free", f"{numbers.against_1f1b:.3f}"),
        ("throughput / zero-bubble fault-free", f"{numbers.against_zero_bubble:.3f}"),
    ):
        table.add_row(name, value)
    return table


def _planner(numbers: _Row) -> str:
    """The planner, what its solver did, and the planner whose plan it is if that is another one."""
    text = f"{numbers.planner}, {numbers.seconds:.2f} s"
    if numbers.solver is not None:
        text += f"; solver: {numbers.solver}"
    return text if numbers.found_by == numbers.planner else f"{text}; found by {numbers.found_by}"


def _comparison(rows: Sequence[_Row], title: str, *, by_stage: bool = False) -> Table:
    """Several plans, one per line; ``by_stage``: how many workers of each stage have failed, not how many in all. Of
    what is less important, what is the same in all of them has no column.
    """
    grids = {each.grid for each in rows}
    if len(grids) == 1:
        title += f", {grids.pop()}"
    columns = {
        "grid": [each.grid for each in rows],
        "planner": [each.planner for each in rows],
        "failed": [_failures(each.failures) if by_stage else str(sum(each.failures)) for each in rows],
        "period": [f"{each.period:.5g}" for each in rows],
        "span": [f"{each.makespan:.5g}" for each in rows],
        "bound": [f"{each.lower_bound:.5g}" for each in rows],
        "gap": [_percent(each.gap) for each in rows],
        "peak": [str(max(each.peaks)) for each in rows],
        "/1F1B": [f"{each.against_1f1b:.3f}" for each in rows],
        "/ZB": [f"{each.against_zero_bubble:.3f}" for each in rows],
        "s": [f"{each.seconds:.2f}" for each in rows],
        "found by": [each.found_by for each in rows],
    }
    same = [] if grids else ["grid"]
    if len(rows) > 1:
        same += [name for name in ("span", "gap", "peak", "/ZB") if len(set(columns[name])) == 1]
    if columns["found by"] == columns["planner"]:
        same.append("found by")
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in (shown := [name for name in columns if name not in same]):
        left = name in ("grid", "planner", "found by")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    for row in zip(*(columns[name] for name in shown), strict=True):
        table.add_row(*row)
    return table


def _failures(counts: Sequence[int]) -> str:
    """Failed workers by stage; only the stages that have any if there are many stages."""
    if len(counts) <= 8:
        return "/".join(map(str, counts))
    return ", ".join(f"{count} in {stage}" for stage, count in enumerate(counts) if count) or "0"


def _solver(result: PlanResult) -> str | None:
    use = result.solver
    if use.calls:
        return f"{use.calls} call{'' if use.calls == 1 else 's'}, {use.seconds:.2f} s"
    return f"not asked: {use.reason}" if use.reason else None


def _bytes(schedule: Schedule) -> str:
    """By stage, the most that a worker holds, and what it has."""
    memory = schedule.problem.memory
    assert memory is not None
    peaks = [0.0] * schedule.grid.stages
    for worker in schedule.live_workers:
        peaks[worker.stage] = max(peaks[worker.stage], schedule.peak_memory(worker))
    return f"{_short([f'{peak:.4g}' for peak in peaks])} of {_short([f'{most:.4g}' for most in memory.capacity])}"


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.2f}%" if fraction else "0%"


def _short(values: Sequence[int] | Sequence[str]) -> str:
    """Values by stage; the least and the greatest if there are many."""
    if len(set(values)) == 1:
        return str(values[0])
    return "/".join(map(str, values)) if len(values) <= 8 else f"{min(values, key=float)} to {max(values, key=float)}"


if __name__ == "__main__":
    main()
