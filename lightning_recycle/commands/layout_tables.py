"""What ``recycle-plan`` shows of layouts: the best one after each next failure.

Contract: every mistake in the settings raises an error with the value and the name of its setting.

Must not know: Hydra, files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table

from lightning_recycle.arguments import at_least, is_integer
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.planning import Changing, LayerCosts, LayoutPlan, Problem, Worker, even_cuts
from lightning_recycle.planning.layouts.layout_search import layouts_ahead

__all__ = ["layers_from", "layout_table", "layouts_of"]


def layers_from(settings: Mapping[str, Any], problem: Problem) -> tuple[LayerCosts, tuple[int, ...]] | None:
    """The costs of layers for the group ``layers`` of ``conf/plan.yaml`` and their cut; None if it is not asked for.

    Raises:
        ConfigurationError: when a value is impossible.
    """
    count = settings["count"]
    if count is None:
        return None
    if not is_integer(count, problem.grid.stages):
        raise ConfigurationError(
            f"layers.count={count!r}: give the number of layers, at least one for each of the {problem.grid.stages} "
            "stages, or null."
        )
    cuts = even_cuts(count, problem.grid.stages)

    def number(name: str) -> float:
        return at_least("", f"layers.{name}", settings[name])

    memory = settings["memory"]
    layers = LayerCosts.from_stages(
        problem.costs,
        cuts,
        held_bytes=(number("activation_bytes"),) * problem.grid.stages,
        parameter_bytes=(number("state_bytes"),) * count,
        memory_limit=None if memory is None else number("memory"),
        bandwidth=number("bandwidth"),
    )
    return layers, cuts


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
            _short(chosen.layout.sizes),
            _short(chosen.layout.workers),
            f"{chosen.period:.5g}",
            f"{plan.reroute.period / chosen.period:.3f}" if chosen.period else "1.000",
            f"{chosen.bytes:.4g}",
            f"{chosen.stall:.4g}",
        )
    return table


def _short(values: Sequence[float]) -> str:
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
