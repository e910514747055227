"""How fast and how good plans are: large grids, the paper's models, and every solver on the running example.

    .venv/bin/python benchmarks/planner.py              # large grids and the paper's models, a few minutes
    .venv/bin/python benchmarks/planner.py --solvers    # the table of the running example with each installed solver
    .venv/bin/python benchmarks/planner.py --quick      # the paper's models only
    .venv/bin/python benchmarks/planner.py --optima 200 # the heuristic against proven optima of random small problems
    .venv/bin/python benchmarks/planner.py --hard       # problems with plans above the bound, by each solver
    .venv/bin/python benchmarks/planner.py --scale      # 1,536 to 16,384 workers: planning, storing, loading, using
    .venv/bin/python benchmarks/planner.py --layouts large # plan_layout for 2,048 workers (goal: 30 s); or small

Every plan is made in a process of its own, on one core, which also reports its peak memory; the time is that of
``solve``, validation included. The gap is to the proven lower bound: the optimum is at most that
far away.

For the solvers' table the heuristic's plan, which is optimal nearly everywhere there, is replaced by the worst schedule
that a machine can run: one micro-batch at a time. So the solver must find the optimum itself.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from planning_judge import HARD, judged, random_problem
from rich.console import Console
from rich.table import Table

from lightning_recycle.commands.plan import baselines
from lightning_recycle.planning import (
    Costs,
    ExactPlanner,
    Grid,
    LayerCosts,
    LayoutPlan,
    PlanLibrary,
    PlanResult,
    Problem,
    Schedule,
    Technique,
    Worker,
    even_cuts,
    heuristic,
    load_plan,
    lower_bound,
    normalized_problem,
    plan_layout,
    save_plan,
    solve,
    validate,
)
from lightning_recycle.planning.layouts import judged as judged_layout
from lightning_recycle.planning.routing import reroute
from lightning_recycle.planning.timing import BACKWARD, FORWARD, WEIGHT, Codes, assemble, best_timing

console = Console(width=120)

# Pipelines x stages x micro-batches, share of failed workers. The paper plans 1,536 GPUs in "under an hour".
LARGE = ((Grid(24, 64, 128), 0.05), (Grid(32, 64, 128), 0.25))
# The paper's three models on 32 workers, stages x pipelines 2 x 16, 4 x 8, 8 x 4, with at least 4 S micro-batches per
# pipeline.
PAPER = (("GPT-3 Medium", Grid(16, 2, 16)), ("GPT-3 3.35B", Grid(8, 4, 16)), ("GPT-3 6.7B", Grid(4, 8, 32)))
SCALE = ((Grid(24, 64, 128), (0.05,)), (Grid(32, 64, 128), (0.05,)), (Grid(256, 64, 256), (0.01, 0.05)))
SHARES = (0.0, 0.05, 0.10, 0.15, 0.20, 0.25)

EXAMPLE = Grid(3, 4, 6)
TECHNIQUES = {
    "fused": Technique(split_backward=False, staggered=False),
    "split_backward": Technique(split_backward=True, staggered=False),
    "staggered": Technique(split_backward=True, staggered=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--solvers", action="store_true", help="the running example with each installed solver")
    parser.add_argument("--optima", type=int, metavar="N", help="the heuristic's gap on N random small problems")
    parser.add_argument("--hard", action="store_true", help="each solver against the heuristic")
    parser.add_argument("--scale", action="store_true", help="plans for thousands of workers")
    parser.add_argument("--layouts", choices=("small", "large"), help="time and result of plan_layout")
    parser.add_argument("--quick", action="store_true", help="without the large grids")
    parser.add_argument("--time-limit", type=float, default=300.0, help="seconds for a solver (default: 300)")
    parser.add_argument("--backends", default="cbc,highs,gurobi", help="for --solvers")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        case = json.loads(arguments.case)
        (run_scale_case if "scale" in case else run_case)(case)
        return
    console.print(f"Python {platform.python_version()}, {platform.machine()}, {time.strftime('%Y-%m-%d')}")
    if arguments.solvers:
        for backend in arguments.backends.split(","):
            console.print(solver_table(backend, arguments.time_limit))
        return
    if arguments.scale:
        console.print(scale_table())
        return
    if arguments.layouts:
        console.print(layouts_table(small_layouts() if arguments.layouts == "small" else large_layouts()))
        return
    if arguments.optima:
        console.print(optima_table(range(arguments.optima), min(arguments.time_limit, 20.0)))
        return
    if arguments.hard:
        console.print(hard_table(arguments.backends.split(","), min(arguments.time_limit, 60.0)))
        return
    console.print(paper_table())
    if not arguments.quick:
        console.print(large_table())


def large_table() -> Table:
    table = plan_table("Large grids; unequal: F : B : W = 1 : 1.1 : 0.9, communication 0.1; heuristic, one core")
    for name, unequal in (("equal", False), ("unequal", True)):
        for grid, share in LARGE:
            for limit in (None, 2 * grid.stages - 1):
                add_row(table, name, grid, share, limit, unequal)
    return table


def paper_table() -> Table:
    table = plan_table("The paper's models, F : B : W = 1 : 1.1 : 0.9, communication 0.1, heuristic, one core")
    for name, grid in PAPER:
        for share in SHARES:
            for limit in (None, 2 * grid.stages - 1):
                add_row(table, name, grid, share, limit, unequal=True)
    return table


def plan_table(title: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in ("model", "grid", "failed", "limit"):
        table.add_column(name, no_wrap=True)
    for name in ("seconds", "cpu", "period", "bound", "gap", "/1F1B", "/ZB", "in flight", "MB"):
        table.add_column(name, justify="right", no_wrap=True)
    return table


def add_row(table: Table, name: str, grid: Grid, share: float, limit: int | None, unequal: bool = False) -> None:
    case = {
        "grid": [grid.pipelines, grid.stages, grid.microbatches],
        "failures": round(share * grid.num_workers),
        "limit": limit,
        "unequal": unequal,
    }
    command = [sys.executable, str(Path(__file__).resolve()), "--case", json.dumps(case)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        console.print(f"{grid}, {share:.0%} failed: {done.stderr.strip().splitlines()[-1]}")
        return
    found = json.loads(done.stdout)
    table.add_row(
        name,
        str(grid),
        f"{case['failures']} ({share:.0%})",
        "none" if limit is None else str(limit),
        f"{found['seconds']:.2f}",
        f"{found['cpu']:.2f}",
        f"{found['period']:.1f}",
        f"{found['bound']:.1f}",
        f"{100 * found['gap']:.2f}%",
        f"{found['usual'] / found['period']:.3f}",
        f"{found['zero_bubble'] / found['period']:.3f}",
        str(found["peak"]),
        f"{found['megabytes']:.0f}",
    )


def run_case(case: dict[str, object]) -> None:
    """In a process of its own: plan and print the numbers as JSON."""
    grid = Grid(*case["grid"])  # type: ignore[misc]
    costs = Costs.uniform(grid.stages)
    if case["unequal"]:
        costs = Costs.uniform(grid.stages, 1.0, 1.1, 0.9, communication=0.1)
    limit = None if case["limit"] is None else (case["limit"],) * grid.stages
    problem = normalized_problem(Problem(grid, costs, in_flight_limit=limit), case["failures"])  # type: ignore[arg-type]
    started, before = time.perf_counter(), time.process_time()
    result = solve(problem)
    seconds, cpu = time.perf_counter() - started, time.process_time() - before
    megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    usual, zero_bubble = baselines(problem)
    schedule = result.schedule
    print(
        json.dumps(
            {
                "seconds": seconds,
                "cpu": cpu,
                "period": schedule.period,
                "bound": result.lower_bound,
                "gap": result.gap,
                "usual": usual,
                "zero_bubble": zero_bubble,
                "peak": max(map(schedule.peak_in_flight, schedule.live_workers)),
                "megabytes": megabytes,
            }
        )
    )


def scale_table() -> Table:
    """Processor time of one core for all that a large plan goes through."""
    table = Table(title="Plans for thousands of workers, processor time of one core", title_justify="left", box=None)
    names = ("grid", "costs", "limit", "failed", "normalize s", "plan s", "again s", "library kB", "load ms")
    for name in (*names, "program ms", "period", "bound", "gap"):
        table.add_column(name, justify="right", no_wrap=True)
    for grid, shares in SCALE:
        for unequal in (False, True):
            for limit in (None, 2 * grid.stages - 1):
                for share in shares:
                    case = {
                        "scale": True,
                        "grid": [grid.pipelines, grid.stages, grid.microbatches],
                        "failures": round(share * grid.num_workers),
                        "limit": limit,
                        "unequal": unequal,
                    }
                    command = [sys.executable, str(Path(__file__).resolve()), "--case", json.dumps(case)]
                    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
                    table.add_row(
                        *(str(grid), "unequal" if unequal else "equal", "none" if limit is None else str(limit)),
                        *(f"{share:.0%}", f"{found['normalize']:.2f}", f"{found['plan']:.2f}", f"{found['again']:.2f}"),
                        *(f"{found['bytes'] / 1e3:.1f}", f"{1e3 * found['load']:.0f}"),
                        *(f"{1e3 * found['program']:.2f}", f"{found['period']:.1f}", f"{found['bound']:.1f}"),
                        f"{100 * (found['period'] / found['bound'] - 1):.2f}%",
                    )
    return table


def run_scale_case(case: dict[str, object]) -> None:
    """In a process of its own: a plan from nothing, then for one more failure; stored, loaded, used."""
    grid = Grid(*case["grid"])  # type: ignore[misc]
    unequal = Costs.uniform(grid.stages, 1.0, 1.1, 0.9, communication=0.1)
    limit = None if case["limit"] is None else (case["limit"],) * grid.stages
    problem = Problem(
        grid,
        unequal if case["unequal"] else Costs.uniform(grid.stages),
        in_flight_limit=limit,  # type: ignore[arg-type]
    )
    clock = time.process_time
    started = clock()
    problem = normalized_problem(problem, case["failures"])  # type: ignore[arg-type]
    normalized = clock()
    result = solve(problem)
    planned = clock()
    next_to_last = max(worker for worker in problem.live_workers(0))
    solve(replace(problem, failed=problem.failed | {next_to_last}))
    again = clock()
    with tempfile.TemporaryDirectory() as folder:
        size = PlanLibrary(folder).put(result).stat().st_size
        save_plan(Path(folder) / "plan.json", result)
        loading = clock()
        schedule = load_plan(Path(folder) / "plan.json").schedule
        loaded = clock()
    workers = schedule.live_workers[:: len(schedule.live_workers) // 100]
    extracting = clock()
    for worker in workers:
        schedule.program(worker)
    found = {
        "normalize": normalized - started,
        "plan": planned - normalized,
        "again": again - planned,
        "bytes": size,
        "load": loaded - loading,
        "program": (clock() - extracting) / len(workers),
        "period": schedule.period,
        "bound": result.lower_bound,
    }
    print(json.dumps(found))


def solver_table(backend: str, time_limit: float) -> Table:
    """The table of the running example, from the worst start."""
    title = f"Running example, {backend} alone: period (? not proven), seconds/processor seconds"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("technique, limit", no_wrap=True)
    for stage in ("no failure", "stage 0", "stage 1", "stage 2", "stage 3"):
        table.add_column(stage, no_wrap=True)
    for limit in (None, 4):
        for name, technique in TECHNIQUES.items():
            cells = []
            for stage in (None, 0, 1, 2, 3):
                failed = frozenset() if stage is None else frozenset({Worker(1, stage)})
                limits = None if limit is None else (limit,) * EXAMPLE.stages
                problem = Problem(EXAMPLE, Costs.uniform(EXAMPLE.stages), failed, technique, limits)
                cells.append(cell(backend, time_limit, problem))
                if "not available" in cells[-1]:
                    return Table(title=f"{backend}: not installed", title_justify="left")
            table.add_row(f"{name}, {limit or 'none'}", *cells)
    return table


def optima_table(seeds: Iterable[int], seconds: float) -> Table:
    """How far the heuristic is above the optimum; what proves the optimum, and where nothing does."""
    found: dict[str, list[float]] = {}
    for seed in seeds:
        problem = random_problem(seed)
        schedule = heuristic(problem)
        result = ExactPlanner("highs", time_limit=seconds, least_gap=0.0).improve(schedule)
        period, proof = result.schedule.period, "bound" if result.solver.calls == 0 else "HiGHS"
        if result.status != "optimal":
            judge, bound = judged(problem, seconds, schedule.period)
            period, proof = min(judge, period), "judge" if bound >= judge * (1 - 1e-9) else "none"
        found.setdefault(proof, []).append(schedule.period / period - 1)
    table = Table(title=f"The heuristic against optima, {seconds:g} s each", title_justify="left", box=None)
    for name in ("proven by", "problems", "optimal", "mean gap", "worst gap"):
        table.add_column(name, justify="right", no_wrap=True)
    found["all"] = [gap for gaps in found.values() for gap in gaps]
    for proof, gaps in found.items():
        exact = sum(gap < 1e-9 for gap in gaps)
        mean, worst = sum(gaps) / len(gaps), max(gaps)
        table.add_row(proof, str(len(gaps)), str(exact), f"{100 * mean:.2f}%", f"{100 * worst:.2f}%")
    return table


def most_in_flight(schedule: Schedule) -> float:
    """The most micro-batches that a worker holds at a time."""
    return max(schedule.peak_in_flight(worker) for worker in schedule.live_workers)


def hard_table(backends: Iterable[str], seconds: float) -> Table:
    """Period, and most micro-batches in flight of a worker, that each solver makes of the heuristic's."""
    table = Table(title=f"Solvers from the heuristic's plan, {seconds:g} s", title_justify="left", box=None)
    for name in ("problem", "planner", "heuristic", "found", "gain", "bound", "in flight", "calls", "seconds"):
        table.add_column(name, no_wrap=True)
    for name, problem in HARD.items():
        schedule = heuristic(problem)
        for backend in backends:
            result = ExactPlanner(backend, time_limit=seconds).improve(schedule)
            validate(result.schedule)
            period = result.schedule.period
            table.add_row(
                *(name, backend, f"{schedule.period:.6g}", f"{period:.6g}"),
                *(f"{100 * (schedule.period / period - 1):.2f}%", f"{result.lower_bound:.6g}"),
                f"{most_in_flight(schedule):g} -> {most_in_flight(result.schedule):g}",
                *(str(result.solver.calls), f"{result.seconds:.1f}"),
            )
    return table


def cell(backend: str, time_limit: float, problem: Problem) -> str:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result: PlanResult = ExactPlanner(backend, time_limit=time_limit).improve(one_at_a_time(problem))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    validate(result.schedule)
    if result.warning is not None:
        console.print(result.warning, markup=False)
        if "not available" in result.warning:
            return "not available"
    mark = "" if result.status == "optimal" else "?"
    return f"{result.schedule.period:g}{mark} {result.seconds:.1f}/{cpu:.1f}"


def one_at_a_time(problem: Problem) -> Schedule:
    """Each micro-batch after the previous one has finished: feasible under any memory limit."""
    codes = Codes(problem, reroute(problem.grid, problem.failed), fused=not problem.technique.split_backward)
    stages = range(problem.grid.stages)
    sequence = []
    for number in range(codes.n):
        sequence += [codes.code(FORWARD, stage, number) for stage in stages]
        sequence += [codes.code(BACKWARD, stage, number) for stage in reversed(stages)]
        if problem.technique.split_backward:
            sequence += [codes.code(WEIGHT, stage, number) for stage in stages]
    schedule = assemble(codes, sequence, best_timing(codes, sequence))
    return replace(schedule, problem=problem)


@dataclass(frozen=True)
class LayoutCase:
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
        judged_layout.cache_clear()
        started = time.process_time()
        found = plan_layout(problem, layers, cuts, next_change=3600.0, switch=2.0)
        return found, time.process_time() - started


def random_workers(grid: Grid, count: int) -> frozenset[Worker]:
    """``count`` random workers."""
    return frozenset(Random(count).sample(grid.workers(), count))


def column(stage: int, count: int) -> frozenset[Worker]:
    """The first workers of a stage."""
    return frozenset(Worker(pipeline, stage) for pipeline in range(count))


def large_layouts() -> list[LayoutCase]:
    found = []
    for grid, layers in ((Grid(32, 64, 128), 256), (Grid(16, 128, 256), 256), (Grid(128, 16, 64), 96)):
        half, some = column(5, grid.pipelines // 2), random_workers(grid, grid.num_workers // 20)
        found += [
            LayoutCase(f"{grid}, {layers} layers, one lost", grid, layers, random_workers(grid, 1)),
            LayoutCase(f"{grid}, {layers} layers, 5 % lost", grid, layers, some),
            LayoutCase(f"{grid}, {layers} layers, half a stage lost", grid, layers, half),
            LayoutCase(f"{grid}, {layers} unequal layers, half a stage lost", grid, layers, half, unequal=True),
            LayoutCase(f"{grid}, {layers} unequal layers, 2 S - 1 in flight, 5 %", grid, layers, some,
                 unequal=True, limit=True),
        ]  # fmt: skip
    return found


def small_layouts() -> list[LayoutCase]:
    found = []
    for layers in (8, 16):
        grid, count = Grid(4, 4, 16), 4 * layers
        found += [
            LayoutCase(f"{grid}, {layers} layers a stage, one lost", grid, count, column(2, 1)),
            LayoutCase(f"{grid}, {layers} layers a stage, half a stage lost", grid, count, column(1, 2)),
        ]
    return found


def layouts_table(cases: list[LayoutCase]) -> Table:
    found = Table(title="plan_layout, one core", title_justify="left", box=None, padding=(0, 2, 0, 0))
    found.add_column("case", no_wrap=True)
    columns = ("CPU s", "re-routing", "layers", "chosen", "gain", "bound", "GB sent", "stall")
    for name in columns:
        found.add_column(name, justify="right", no_wrap=True)
    for case in cases:
        plan, seconds = case.plan()
        chosen = plan.chosen
        found.add_row(
            case.name,
            f"{seconds:.1f}",
            *(f"{each.period:.4g}" if each.period else "-" for each in (plan.reroute, plan.layers)),
            chosen.way,
            f"{100 * (plan.reroute.period / chosen.period - 1):+.1f} %",
            f"{100 * (chosen.period / lower_bound(chosen.problem) - 1):.1f} %",
            f"{chosen.bytes / 1e9:.3g}",
            f"{chosen.stall:.1f} s",
        )
    return found


if __name__ == "__main__":
    main()
