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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from lightning_recycle import planning
from lightning_recycle.arguments import Check, integer, is_integer, is_number, number
from lightning_recycle.commands import Output, run_command, switch
from lightning_recycle.errors import ConfigurationError, counted
from lightning_recycle.files import check_ending, check_writable, refusing
from lightning_recycle.planning.costs import Memory
from lightning_recycle.planning.failure_distribution import contingencies, usual_limit
from lightning_recycle.visualize import save_gantt

_PER_STAGE = ("forward", "backward_input", "backward_weight", "reduce", "optimizer")


def problem_from(config: Mapping[str, Any]) -> planning.Problem:
    """The problem for the settings of ``conf/plan.yaml``.

    Raises:
        ConfigurationError: when a value is impossible.
        PlanningError: when there can be no plan.
    """
    base = _without_failures(config)
    failures = config["failures"]
    if is_integer(failures):
        return planning.normalized_problem(base, failures)
    return replace(base, failed=_failures(config))


def problems_ahead(config: Mapping[str, Any]) -> list[planning.Problem]:
    """The problems for a plan library: none failed, and the given failures.

    For a number, each distribution of 0, 1, ... failures over the stages, as far as ``library_plans`` allows, the
    likeliest first and those after normalization always. Each is there twice, within the limits that a run asks for
    before and after it has measured its memory.
    """
    base = _without_failures(config)
    failures, most = config["failures"], config["library_plans"]
    if not is_integer(most, 1):
        raise ConfigurationError(f"library_plans={most!r}: give an integer of at least 1.")
    if is_integer(failures):
        normalized = [planning.normalized_problem(base, count) for count in (*range(failures), failures)]
        found = dict.fromkeys(normalized)
        for count in range(1, failures + 1):
            found |= dict.fromkeys(contingencies(base, count, most))
        # The plan after normalization is the last one.
        problems = sorted(list(found)[: max(most, len(normalized))], key=lambda p: (len(p.failed), p == normalized[-1]))
    else:
        problems = [base, replace(base, failed=_failures(config))]
    return list(dict.fromkeys(_limited(problem, measured) for problem in problems for measured in (False, True)))


def _limited(problem: planning.Problem, measured: bool) -> planning.Problem:
    """``problem`` within the limits of a run, too."""
    usual, given = usual_limit(problem.grid, problem.failed, measured=measured), problem.in_flight_limit
    if usual is None or given is None:
        return replace(problem, in_flight_limit=given if usual is None else usual)
    return replace(problem, in_flight_limit=tuple(map(min, given, usual)))


def _without_failures(config: Mapping[str, Any]) -> planning.Problem:
    grid = planning.Grid(*(config["grid"][name] for name in ("pipelines", "stages", "microbatches")))
    costs, profile = _costs(config["costs"], grid)
    technique = planning.Technique(
        **{name: switch(f"technique.{name}", config["technique"][name]) for name in ("split_backward", "staggered")}
    )
    limit, memory = config["memory"]["in_flight"], _bytes(config["memory"], profile)
    if limit is not None:
        limit = _per_stage("memory.in_flight", limit, grid, integer(1, otherwise="for no limit"))
    checkpoint = config["memory"].get("checkpoint")
    if checkpoint is not None:
        if (limit is None and memory is None) or not is_number(checkpoint, 0):
            raise ConfigurationError(
                f"memory.checkpoint={checkpoint!r}: with memory.in_flight or memory.bytes, give the size of a"
                " stage's input as a fraction of a micro-batch's activations, e.g. 0.1, or null to compute nothing"
                " again."
            )
        if memory is None:
            memory, limit = Memory.counting(limit), None
        memory = replace(memory, checkpoint=tuple(checkpoint * held for held in memory.after_forward))
    return planning.Problem(grid, costs, technique=technique, in_flight_limit=limit, memory=memory)


def _costs(settings: Mapping[str, Any], grid: planning.Grid) -> tuple[planning.Costs, planning.Profile | None]:
    if "path" in settings:
        path = settings["path"]
        remedy = "give a file that PlanningOptions(profile=...) wrote, e.g. costs.path=profile.json"
        Check(lambda value: isinstance(value, str) and value != "", remedy).checked("", "costs.path", path)
        profile = planning.load_profile(path)
        if len(profile.stages) != grid.stages:
            raise ConfigurationError(
                f"{path} is the profile of {counted(len(profile.stages), 'stage')}: give"
                f" grid.stages={len(profile.stages)}, or a profile of {grid.stages}."
            )
        return profile.costs(), profile
    values = {name: _per_stage(f"costs.{name}", settings.get(name), grid, number()) for name in _PER_STAGE}
    return planning.Costs(**values, communication=settings.get("communication")), None  # type: ignore[arg-type]


def _per_stage(name: str, value: Any, grid: planning.Grid, check: Check) -> tuple[Any, ...]:
    """One value for all stages, or a list of one for each, that ``check`` accepts."""
    values = tuple(value) if isinstance(value, list) else (value,) * grid.stages
    remedy = f"{check.remedy}, or a list of {grid.stages}, one for each stage"
    right = len(values) == grid.stages and all(map(check.accepts, values))
    Check(lambda _: right, remedy).checked("", name, value)
    return values


def _bytes(memory: Mapping[str, Any], profile: planning.Profile | None) -> Memory | None:
    size = memory["bytes"]
    if size is None:
        return None
    if profile is None:
        raise ConfigurationError("memory.bytes needs costs=profile, which has the size of a micro-batch.")
    return profile.memory(size)


def _failures(config: Mapping[str, Any]) -> frozenset[planning.Worker]:
    pairs = config["failures"]
    fine = isinstance(pairs, list) and all(
        isinstance(pair, list) and len(pair) == 2 and all(map(is_integer, pair)) for pair in pairs
    )
    if not fine:
        raise ConfigurationError(
            f"failures={pairs!r}: give the number of failed workers, or a list of [pipeline,stage], e.g. "
            "'failures=[[1,2]]'."
        )
    return frozenset(planning.Worker(*pair) for pair in pairs)


_NAME = "recycle-plan"
_LARGEST_PICTURE = 20_000  # operations; beyond this an SVG takes tens of megabytes and shows nothing

_sweep: list[dict[str, str]] = []
"""The cells of each job of this process, for the table at the end of a sweep."""


def _checked(config: DictConfig) -> tuple[dict[str, Any], planning.Problem, planning.Planner]:
    settings: dict[str, Any] = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)  # type: ignore[assignment]
    return settings, problem_from(settings), instantiate(settings["planner"], _convert_="all")


def plan_and_show(config: DictConfig) -> float:
    """Run one job; returns the period, which a sweeper can minimize."""
    settings, problem, planner = _checked(config)
    output = _path(settings, "output", ".json")
    picture = _picture(settings, output)
    written = []
    console, errors = Output(), Console(stderr=True, soft_wrap=True, highlight=False)
    if settings["library"] is None:
        result = planning.solve(problem, planner)
    else:
        folder = _path(settings, "library") or Path()
        library = planning.PlanLibrary(folder, planner)
        written.append(f"{folder} (the library)")
        results = library.compute(problems_ahead(settings), progress=errors.is_terminal)
        result = results[-1]
        console.print(_comparison([_cells(each, by_stage=True) for each in results], "Plan library"))
    _sweep.append(_cells(result))
    unit = "s" if "path" in settings["costs"] else "slots"
    console.print(_single(result, unit))
    if result.warning is not None:
        errors.print(f"warning: {result.warning}", markup=False)
    if output is not None:
        planning.save_plan(output, result)
        written.append(str(output))
    written += _drawn(result, picture, automatic=settings["picture"] == "auto", unit=unit)
    if written:
        console.print("wrote " + ", ".join(written), soft_wrap=True, highlight=False, markup=False)
    return result.schedule.period


def _drawn(result: planning.PlanResult, picture: Path | None, automatic: bool, unit: str) -> list[str]:
    operations = result.schedule.num_operations
    if picture is not None and automatic and operations > _LARGEST_PICTURE:
        return [f"no picture of {operations:,} operations (picture=FILE forces it)"]
    if picture is not None:
        title = f"{result.schedule.grid}, {len(result.schedule.failed)} failed, {result.backend} ({result.status})"
        iterations = 2 if result.schedule.problem.technique.staggered else 1
        with refusing(f"write the picture to {picture}"):
            save_gantt(picture, result.schedule, [title], iterations=iterations, unit=unit)
        return [str(picture)]
    return []


def _path(settings: dict[str, Any], name: str, ending: str | None = None) -> Path | None:
    value = settings[name]
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        raise ConfigurationError(f"{name}={value!r}: give a path, or null.")
    if ending is not None:
        check_ending(name, value, ending, "null")
    # Jobs of a sweep would overwrite one another's files; a library is shared.
    if name != "library" and HydraConfig.get().mode is RunMode.MULTIRUN:
        return Path(HydraConfig.get().runtime.output_dir) / value
    check_writable(name, value, is_folder=name == "library")
    return Path(value)


def _picture(settings: dict[str, Any], output: Path | None) -> Path | None:
    if settings["picture"] == "auto":
        return None if output is None else output.with_suffix(".svg")
    return _path(settings, "picture", ".svg")


def main() -> None:
    """The console script."""
    _sweep.clear()
    run_command(
        _NAME,
        "pkg://lightning_recycle.conf",
        "plan",
        _checked,
        plan_and_show,
        lambda: _comparison(_sweep, "Sweep") if len(_sweep) > 1 else None,
    )


# -- what is printed ---------------------------------------------------------------------------------------------------


def _cells(result: planning.PlanResult, *, by_stage: bool = False) -> dict[str, str]:
    """A plan's cells of a table, by column; ``by_stage``: failed workers by stage."""
    schedule = result.schedule
    failed = planning.distribution_of(schedule.grid, schedule.failed)
    usual, zero_bubble = _ratios(schedule)
    limits = schedule.problem.in_flight_limit
    return {
        "grid": str(schedule.grid),
        "planner": result.backend,
        "failed": _failures_by_stage(failed) if by_stage else str(sum(failed)),
        "in flight": "any" if limits is None else _short(limits),
        "period": f"{schedule.period:.5g}",
        "span": f"{schedule.makespan:.5g}",
        "bound": f"{result.lower_bound:.5g}",
        "gap": _percent(result.gap),
        "peak": str(max(_peaks(schedule, schedule.peak_in_flight))),
        "/1F1B": f"{usual:.3f}",
        "/ZB": f"{zero_bubble:.3f}",
        "s": f"{result.seconds:.2f}",
        "found by": result.found_by,
    }


def _peaks(schedule: planning.Schedule, peak: Callable[[planning.Worker], Any]) -> list[Any]:
    return [max(map(peak, schedule.problem.live_workers(stage))) for stage in range(schedule.grid.stages)]


def _ratios(schedule: planning.Schedule) -> tuple[float, float]:
    usual, zero_bubble = baselines(schedule.problem)
    return (usual / schedule.period, zero_bubble / schedule.period) if schedule.period else (1.0, 1.0)


def baselines(problem: planning.Problem) -> tuple[float, float]:
    """Periods of fault-free 1F1B and of fault-free zero-bubble on the same problem."""
    # Without failures all pipelines are alike.
    one = planning.Grid(1, problem.grid.stages, problem.grid.microbatches)
    return _baselines(replace(problem, grid=one, failed=frozenset(), worker_factors=(), technique=planning.Technique()))


@lru_cache(maxsize=64)
def _baselines(problem: planning.Problem) -> tuple[float, float]:
    usual = replace(problem, technique=planning.Technique(split_backward=False, staggered=False))
    stages = problem.grid.stages
    limit = tuple(min(stages, n) for n in problem.in_flight_limit or (stages,) * stages)
    zero_bubble = replace(
        problem, technique=planning.Technique(split_backward=True, staggered=False), in_flight_limit=limit
    )
    return planning.one_f_one_b(usual).period, planning.heuristic(zero_bubble).period


def _single(result: planning.PlanResult, unit: str) -> Table:
    schedule, problem = result.schedule, result.schedule.problem
    table = Table("", "", show_header=False, title="Plan", title_justify="left")
    failed = ", ".join(str(worker) for worker in sorted(problem.failed)[:8])
    more = f" and {len(problem.failed) - 8} more" if len(problem.failed) > 8 else ""
    switches = [name for name in ("split_backward", "staggered") if getattr(problem.technique, name)]
    limits, memory = problem.in_flight_limit, problem.memory
    may_repeat = memory is not None and memory.checkpoint is not None
    again = sum(len(schedule.recomputed(w)) for w in schedule.live_workers) if may_repeat else 0
    held = _short(_peaks(schedule, schedule.peak_in_flight))
    usual, zero_bubble = _ratios(schedule)
    table.add_row("pipelines x stages x micro-batches", str(schedule.grid))
    table.add_row("failed (pipeline, stage)", f"{failed}{more}" if problem.failed else "none")
    table.add_row("technique", ", ".join(["adaptive", *switches]))
    table.add_row("planner", _planner(result))
    table.add_row("period", f"{schedule.period:g} {unit}")
    table.add_row("makespan", f"{schedule.makespan:g} {unit}")
    table.add_row("lower bound of the period", f"{result.lower_bound:g} {unit}")
    table.add_row("gap", f"{_percent(result.gap)} ({result.status})")
    table.add_row("peak memory, micro-batches", held + (f" of {_short(limits)}" if limits else ""))
    if memory is not None:
        peaks = [f"{peak:.4g}" for peak in _peaks(schedule, schedule.peak_memory)]
        table.add_row("peak memory, bytes", f"{_short(peaks)} of {_short([f'{most:.4g}' for most in memory.capacity])}")
    if again:
        table.add_row("forwards computed again", f"{again}")
    table.add_row("throughput / 1F1B fault-free", f"{usual:.3f}")
    table.add_row("throughput / zero-bubble fault-free", f"{zero_bubble:.3f}")
    return table


def _planner(result: planning.PlanResult) -> str:
    """The planner, its solver's calls, and the planner whose plan it is."""
    text, use = f"{result.backend}, {result.seconds:.2f} s", result.solver
    if use.calls:
        text += f"; solver: {counted(use.calls, 'call')}, {use.seconds:.2f} s"
    elif use.reason:
        text += f"; solver: not asked: {use.reason}"
    return text if result.found_by == result.backend else f"{text}; found by {result.found_by}"


def _comparison(rows: Sequence[dict[str, str]], title: str) -> Table:
    """Several plans, one per line, without columns that are equal throughout."""
    for name in ("grid", "planner"):
        title += f", {rows[0][name]}" if len({each[name] for each in rows}) == 1 else ""
    less = {"grid", "planner"} | ({"in flight", "span", "gap", "peak", "/ZB"} if len(rows) > 1 else set())
    same = {name for name in less if len({each[name] for each in rows}) == 1}
    if all(each["found by"] == each["planner"] for each in rows):
        same.add("found by")
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in (shown := [name for name in rows[0] if name not in same]):
        left = name in ("grid", "planner", "found by")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    for each in rows:
        table.add_row(*(each[name] for name in shown))
    return table


def _failures_by_stage(counts: Sequence[int]) -> str:
    if len(counts) <= 8:
        return "/".join(map(str, counts))
    return ", ".join(f"{count} in {stage}" for stage, count in enumerate(counts) if count) or "0"


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.2f}%" if fraction else "0%"


def _short(values: Sequence[int] | Sequence[str]) -> str:
    """Values by stage; the least and the greatest if there are many."""
    if len(set(values)) == 1:
        return str(values[0])
    return "/".join(map(str, values)) if len(values) <= 8 else f"{min(values, key=float)} to {max(values, key=float)}"


if __name__ == "__main__":
    main()
