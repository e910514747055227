"""How long it takes to plan a layout, and what it predicts: small grids, and 2,048 workers.

    .venv/bin/python benchmarks/layouts_planning.py              # 2,048 workers, a minute or two
    .venv/bin/python benchmarks/layouts_planning.py --small      # the grids of benchmarks/layouts.py

One call of ``plan_layout`` with all ways, nothing planned before; seconds of processor time of one core. The goal for
2,048 workers is 30 s.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from random import Random

from rich.console import Console
from rich.table import Table

from lightning_recycle.planning import Changing, Grid, LayerCosts, LayoutPlan, Problem, Worker, even_cuts, plan_layout
from lightning_recycle.planning.layouts.layout_candidates import _judged

console = Console(width=150)


@dataclass(frozen=True)
class Case:
    """A grid, its layers, and who has failed."""

    name: str
    grid: Grid
    layers: int
    failed: frozenset[Worker]
    unequal: bool = False
    limit: bool = False

    def plan(self) -> tuple[LayoutPlan, float]:
        """The plan and the seconds of processor time that it took, so that other work on the machine does not count."""
        draw = Random(self.name)

        def seconds() -> tuple[float, ...]:
            return tuple(0.01 * (draw.uniform(0.8, 1.2) if self.unequal else 1.0) for _ in range(self.layers))

        layers = LayerCosts(seconds(), seconds(), seconds(), parameter_bytes=(1e8,) * self.layers, bandwidth=12.5e9)
        cuts = even_cuts(self.layers, self.grid.stages)
        limit = (2 * self.grid.stages - 1,) * self.grid.stages if self.limit else None
        problem = Problem(self.grid, layers.costs(cuts), self.failed, in_flight_limit=limit)
        _judged.cache_clear()
        started = time.process_time()
        found = plan_layout(problem, layers, cuts, next_change=3600.0, changing=Changing(switch=2.0))
        return found, time.process_time() - started


def spread(grid: Grid, count: int) -> frozenset[Worker]:
    """``count`` random workers."""
    return frozenset(Random(count).sample(grid.workers(), count))


def column(stage: int, count: int) -> frozenset[Worker]:
    """The first workers of a stage."""
    return frozenset(Worker(pipeline, stage) for pipeline in range(count))


def large() -> list[Case]:
    found = []
    for grid, layers in ((Grid(32, 64, 128), 256), (Grid(16, 128, 256), 256), (Grid(128, 16, 64), 96)):
        half = column(5, grid.pipelines // 2)
        found += [
            Case(f"{grid}, {layers} layers, one lost", grid, layers, spread(grid, 1)),
            Case(f"{grid}, {layers} layers, 5 % lost", grid, layers, spread(grid, grid.num_workers // 20)),
            Case(f"{grid}, {layers} layers, half a stage lost", grid, layers, half),
            Case(f"{grid}, {layers} unequal layers, half a stage lost", grid, layers, half, unequal=True),
            Case(f"{grid}, {layers} unequal layers, 2 S - 1 in flight, 5 %", grid, layers,
                 spread(grid, grid.num_workers // 20), unequal=True, limit=True),
        ]  # fmt: skip
    return found


def small() -> list[Case]:
    found = []
    for layers in (8, 16):
        grid, count = Grid(4, 4, 16), 4 * layers
        found += [
            Case(f"{grid}, {layers} layers a stage, one lost", grid, count, column(2, 1)),
            Case(f"{grid}, {layers} layers a stage, half a stage lost", grid, count, column(1, 2)),
        ]
    return found


def table(cases: list[Case]) -> Table:
    found = Table(title="plan_layout, one core", title_justify="left", box=None, padding=(0, 2, 0, 0))
    found.add_column("case", no_wrap=True)
    columns = ("CPU s", "re-routing", "workers", "layers", "both", "chosen", "gain", "bound", "GB sent", "stall")
    for name in columns:
        found.add_column(name, justify="right", no_wrap=True)
    for case in cases:
        plan, seconds = case.plan()
        chosen = plan.chosen
        found.add_row(
            case.name,
            f"{seconds:.1f}",
            *(f"{each.period:.4g}" if each.period else "-" for each in plan.candidates),
            chosen.way,
            f"{100 * (plan.reroute.period / chosen.period - 1):+.1f} %",
            f"{100 * (chosen.period / chosen.bound - 1):.1f} %",
            f"{chosen.bytes / 1e9:.3g}",
            f"{chosen.stall:.1f} s",
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="small grids")
    arguments = parser.parse_args()
    console.print(table(small() if arguments.small else large()))


if __name__ == "__main__":
    main()
