"""Tables that ``recycle-plan`` prints: the quality of a plan against baselines, and layouts after the next failure.

Concept: a plan is compared with two fault-free schedules of the same grid, costs and memory. Most systems run 1F1B;
zero-bubble (decoupled backward, no more memory than 1F1B, one optimizer step for all stages) is the best they could
run. A ratio of 1.0 means that the failures cost nothing.

Must not know: Hydra, files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from rich.table import Table

from lightning_recycle.arguments import at_least
from lightning_recycle.planning import (
    Changing,
    Grid,
    LayerCosts,
    LayoutPlan,
    PlanResult,
    Problem,
    Schedule,
    Technique,
    Worker,
    distribution_of,
    heuristic,
    one_f_one_b,
)
from lightning_recycle.planning.layouts.layout_search import layouts_ahead

__all__ = ["Row", "baselines", "comparison", "layout_table", "layouts_of", "row", "single"]


@dataclass(frozen=True, slots=True)
class Row:
    """One plan in numbers; times in the unit of the costs."""

    planner: str
    """The planner that was asked."""
    found_by: str
    """The planner whose plan it is."""
    solver: str
    """What the solver did."""
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


def row(result: PlanResult) -> Row:
    """The numbers of ``result``."""
    schedule = result.schedule
    usual, zero_bubble = baselines(schedule.problem)
    peaks = [0] * schedule.grid.stages
    for worker in schedule.live_workers:
        peaks[worker.stage] = max(peaks[worker.stage], schedule.peak_in_flight(worker))
    return Row(
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
    usual = replace(problem, technique=Technique(decoupled=False, staggered=False))
    stages = problem.grid.stages
    limit = tuple(min(stages, n) for n in problem.in_flight_limit or (stages,) * stages)
    decoupled = replace(problem, technique=Technique(decoupled=True, staggered=False), in_flight_limit=limit)
    return one_f_one_b(usual).period, heuristic(decoupled).period


def single(result: PlanResult, numbers: Row) -> Table:
    """One plan, one number per line."""
    problem = result.schedule.problem
    table = Table("", "", show_header=False, title="Plan", title_justify="left")
    failed = ", ".join(str(worker) for worker in sorted(problem.failed)[:8])
    more = f" and {len(problem.failed) - 8} more" if len(problem.failed) > 8 else ""
    switches = [name for name in ("decoupled", "staggered") if getattr(problem.technique, name)]
    limits = problem.in_flight_limit
    may_repeat = problem.memory is not None and problem.memory.checkpoint is not None
    again = sum(len(result.schedule.recomputed(w)) for w in result.schedule.live_workers) if may_repeat else 0
    for name, value in (
        ("pipelines x stages x micro-batches", numbers.grid),
        ("failed", f"{len(problem.failed)}: {failed}{more}" if problem.failed else "none"),
        ("technique", ", ".join(["adaptive", *switches])),
        ("planner", f"{numbers.planner}, {numbers.seconds:.2f} s"),
        ("found by", numbers.found_by),
        ("solver", numbers.solver),
        ("period", f"{numbers.period:g}"),
        ("makespan", f"{numbers.makespan:g}"),
        ("lower bound", f"{numbers.lower_bound:g}"),
        ("gap", f"{_percent(numbers.gap)} ({numbers.status})"),
        ("peak memory", f"{_short(numbers.peaks)} micro-batches" + (f" of {_short(limits)}" if limits else "")),
        *([("peak memory, bytes", _bytes(result.schedule))] if problem.memory is not None else []),
        *([("forwards computed again", f"{again}")] if again else []),
        ("throughput / 1F1B fault-free", f"{numbers.against_1f1b:.3f}"),
        ("throughput / zero-bubble fault-free", f"{numbers.against_zero_bubble:.3f}"),
    ):
        table.add_row(name, value)
    return table


def comparison(rows: Sequence[Row], title: str, *, by_stage: bool = False) -> Table:
    """Several plans, one per line; ``by_stage``: how many workers of each stage have failed, not how many in all."""
    grids = {each.grid for each in rows}
    if len(grids) == 1:
        title += f", {grids.pop()}"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in (*(["grid"] if grids else []), "planner"):
        table.add_column(name, no_wrap=True)
    for name in ("failed", "period", "span", "bound", "gap", "peak", "/1F1B", "/ZB", "s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("found by", no_wrap=True)
    for each in rows:
        table.add_row(
            *([each.grid] if grids else []),
            each.planner,
            _failures(each.failures) if by_stage else str(sum(each.failures)),
            f"{each.period:.5g}",
            f"{each.makespan:.5g}",
            f"{each.lower_bound:.5g}",
            _percent(each.gap),
            str(max(each.peaks)),
            f"{each.against_1f1b:.3f}",
            f"{each.against_zero_bubble:.3f}",
            f"{each.seconds:.2f}",
            each.found_by,
        )
    return table


def _failures(counts: Sequence[int]) -> str:
    """Failed workers by stage; only the stages that have any if there are many stages."""
    if len(counts) <= 8:
        return "/".join(map(str, counts))
    return ", ".join(f"{count} in {stage}" for stage, count in enumerate(counts) if count) or "0"


def _solver(result: PlanResult) -> str:
    use = result.solver
    if use.calls:
        return f"{use.calls} calls, {use.seconds:.2f} s"
    return f"not asked: {use.reason}" if use.reason else "none"


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


def layouts_of(
    settings: Mapping[str, Any], problem: Problem, layers: LayerCosts, cuts: tuple[int, ...]
) -> list[tuple[Worker, LayoutPlan]]:
    """The best layout after each next failure of ``problem``.

    Raises:
        ConfigurationError: when a value is impossible.
    """
    changing = Changing(switch=at_least("", "layers.switch", settings["switch"]))
    return list(layouts_ahead(problem, layers, cuts, changing=changing))


def layout_table(found: Iterable[tuple[Worker, LayoutPlan]]) -> Table:
    """One line for each next failure."""
    table = Table(title="Layouts after the next failure", title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("lost", no_wrap=True)
    table.add_column("way", no_wrap=True)
    table.add_column("layers by stage", overflow="fold")
    table.add_column("workers by stage", overflow="fold")
    for name in ("period", "/re-routing", "bytes", "stall"):
        table.add_column(name, justify="right", no_wrap=True)
    for worker, plan in found:
        chosen = plan.chosen
        table.add_row(
            str(worker),
            chosen.way,
            _runs(chosen.layout.sizes),
            _runs(chosen.layout.workers),
            f"{chosen.period:.5g}",
            f"{plan.reroute.period / chosen.period:.3f}" if chosen.period else "1.000",
            f"{chosen.bytes:.4g}",
            f"{chosen.stall:.4g}",
        )
    return table


def _runs(values: Sequence[float]) -> str:
    """All values, or runs of equal ones if there are many."""
    if len(values) <= 12:
        return "/".join(map(str, values))
    runs: list[tuple[float, int]] = []
    for value in values:
        if runs and runs[-1][0] == value:
            runs[-1] = value, runs[-1][1] + 1
        else:
            runs.append((value, 1))
    return "/".join(f"{value}" if times == 1 else f"{times} x {value}" for value, times in runs)
