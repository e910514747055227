"""The paper's tables, with the simulator's numbers beside them, and the questions that users ask.

    .venv/bin/python benchmarks/simulation.py                # everything, some minutes on one core
    .venv/bin/python benchmarks/simulation.py table day      # some of: table pauses ablation day fractions
                                                             #          spares layers sensitivity
                                                             #          ideal auto same batch checkpoints calibration
                                                             #          slow wrong links

``ideal``, ``same``, ``batch`` and ``checkpoints`` compare policies with the same schedule, checkpoints and recovery
(``same_schedule.py``), and so do ``slow``, ``wrong`` and ``links`` (``slow_and_wrong.py``); ``calibration`` is the
paper's table over 400 seeds, against a null model (``calibration.py``).
The other sections run policies as published: ReCycle with planned schedules, all others with 1F1B, unless they say so.

``table`` is the paper's table of throughput by failure interval. Protocol: failures are a Poisson process of the whole
cluster, nobody comes back, a run lasts 6 h (the longest interval), mean of 20 seeds. It is the same for every cell, and
so are all constants. Neither the length of the runs nor what comes back is in the material that we have.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from functools import partial

from calibration import THROUGHPUT as PAPER
from calibration import calibration_tables
from rich.console import Console
from rich.table import Table
from same_schedule import assumptions, auto_table, batch_table, checkpoint_table, ideal_table, same_table
from slow_and_wrong import links_table, slow_table, wrong_table

from lightning_recycle.planning import Costs, Grid, Problem, Technique, Worker
from lightning_recycle.simulation import (
    Bamboo,
    Cause,
    Cluster,
    DropReplica,
    ElasticLayers,
    FailedFraction,
    FailureRate,
    FailureSource,
    FaultFree,
    Merge,
    Oobleck,
    Poisson,
    Policy,
    Recycle,
    Regular,
    Restart,
    Spares,
    TrainingModel,
    Varuna,
    get_model,
    repeat,
    simulate,
)
from lightning_recycle.simulation.step_times import planned_seconds, planned_step
from lightning_recycle.simulation.training_model import one_f_one_b_seconds

console = Console(width=120)

INTERVALS = ("6h", "2h", "30min")
DURATION = "6h"
SEEDS = range(20)
PAPER_RECYCLE = Recycle(fault_free="1f1b")  # the paper's system runs 1F1B until something fails

CAUSES = tuple(cause.value for cause in Cause)
LARGE = ("megatron_18_4b", "megatron_39_1b", "megatron_76_1b", "megatron_145_6b")


def new_table(title: str, *columns: str, left: int = 1) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < left else "right", no_wrap=True)
    return table


def policies() -> dict[str, Policy]:
    return {"Bamboo": Bamboo(), "Oobleck": Oobleck(), "Recycle": PAPER_RECYCLE}


def throughput_table() -> Iterable[Table]:
    table = new_table(
        f"Throughput by failure interval: samples/s, {DURATION} runs, mean of {len(SEEDS)} seeds",
        "model", "policy", "interval", "paper", "ours", "paper/ff", "ours/ff", "spread", "points", left=2,
    )  # fmt: skip
    for name, rows in PAPER.items():
        model = get_model(name)
        free = model.global_batch / model.fault_free_seconds()
        for label, policy in policies().items():
            paper = rows[label]
            for number, interval in enumerate(INTERVALS):
                found = repeat(model, Cluster.of(model), policy, Poisson(interval), DURATION, SEEDS)
                ours = f"{found.throughput:.2f}" if found.throughput else "OOM"
                if paper is None:
                    table.add_row(name, label, interval, "OOM", ours, "", "", "", "")
                    continue
                points = 100 * (found.ratio - paper[number] / free)
                mark = f"[bold]{points:+.1f}[/bold] !" if abs(points) > 5 else f"{points:+.1f}"
                table.add_row(
                    name, label, interval, f"{paper[number]:.2f}", ours, f"{paper[number] / free:.3f}",
                    f"{found.ratio:.3f}", f"{found.deviation:.3f}", mark,
                )  # fmt: skip
    yield table
    table = new_table(
        "The other policies under the same protocol: ratio to fault-free 1F1B", "model", "policy", *INTERVALS, left=2
    )
    others: dict[str, tuple[Policy, int]] = {
        "Recycle, planned from the start": (Recycle(), 0),
        "ElasticLayers": (ElasticLayers(), 0),
        "Merge": (Merge(), 0),
        "DropReplica": (DropReplica(), 0),
        "Spares(2)": (Spares(2), 2),
        "Restart": (Restart(), 0),
        "Varuna": (Varuna(), 0),
        "FaultFree, zero-bubble": (FaultFree("zero_bubble"), 0),
    }
    for name in PAPER:
        model = get_model(name)
        for label, (policy, extra) in others.items():
            ratios = [
                repeat(model, Cluster.of(model, extra_nodes=extra), policy, Poisson(interval), DURATION, SEEDS).ratio
                for interval in INTERVALS
            ]
            table.add_row(name, label, *(f"{ratio:.3f}" for ratio in ratios))
    yield table


def pause_table() -> Iterable[Table]:
    """What a failure would have to cost for the paper's number to come out, all else as it is."""
    table = new_table(
        "Seconds that training would have to stand still per failure to give the paper's throughput, all else as is",
        "model", "policy", "interval", "paper/ff", "ours/ff", "ours, s", "needed, s", left=2,
    )  # fmt: skip
    for name, rows in PAPER.items():
        model = get_model(name)
        free = model.global_batch / model.fault_free_seconds()
        for label in ("Oobleck", "Recycle"):
            paper = rows[label]
            assert paper is not None
            for value, interval in zip(paper, INTERVALS, strict=True):
                ratio, usual = value / free, 10.0
                found = with_pause(model, label, interval, usual)
                needed = solve(partial(with_pause, model, label, interval), ratio, 7200.0)
                table.add_row(
                    name, label, interval, f"{ratio:.3f}", f"{found:.3f}", f"{usual:.0f}",
                    "none is too much" if needed is None else f"{needed:.0f}",
                )  # fmt: skip
    yield table


def with_pause(model: TrainingModel, label: str, interval: str, seconds: float) -> float:
    policy: Policy
    if label == "Oobleck":
        policy = Oobleck(detection=0.0, regroup=seconds)
    else:
        policy = Recycle(fault_free="1f1b", detection=0.0, regroup=seconds)
    return repeat(model, Cluster.of(model), policy, Poisson(interval), DURATION, SEEDS).ratio


def solve(falling: Callable[[float], float], goal: float, most: float) -> float | None:
    """The argument in 0..``most`` at which a falling function reaches ``goal``; None when it starts below."""
    if falling(0.0) < goal:
        return None
    low, high = 0.0, most
    while high - low > 1.0:
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > goal else (low, middle)
    return high


def ablation(grid: Grid, failed: Worker, effort: int) -> list[float]:
    """Slots of a step: fault-free 1F1B and zero bubble, then with the failure and the techniques one by one."""
    costs, limit = Costs.uniform(grid.stages), (grid.stages,) * grid.stages
    one = Grid(1, grid.stages, grid.microbatches)
    # The baseline is planned as well as possible, whatever the effort for the plans compared with it.
    zero_bubble = planned_seconds(Problem(one, costs, frozenset(), Technique(True, False), limit))
    steps = ((False, False), (True, False), (True, True))
    plans = (Problem(grid, costs, frozenset([failed]), Technique(*step)) for step in steps)
    usual = one_f_one_b_seconds(costs, grid.microbatches)
    return [usual, zero_bubble, *(planned_seconds(problem, effort) for problem in plans)]


def ablation_table() -> Iterable[Table]:
    table = new_table(
        "Ablation, one worker failed, F = B = W = 1 slot: slots of a step",
        "stages x pipelines x micro-batches", "planner", "1F1B", "zero bubble", "adaptive", "+ decoupled",
        "+ staggered", "/1F1B", "/ZB", left=2,
    )  # fmt: skip
    for grid, failed in ((Grid(3, 4, 6), 2), (Grid(4, 8, 32), 4), (Grid(24, 64, 96), 32), (Grid(24, 64, 256), 32)):
        for rule, effort in (("plain rule", 0), ("default", 100_000)):
            if grid.num_workers > 1000 and effort:
                continue
            slots = ablation(grid, Worker(1, failed), effort)
            usual, zero_bubble, *_, staggered = slots
            table.add_row(
                f"{grid.stages} x {grid.pipelines} x {grid.microbatches}, stage {failed}", rule,
                *(f"{value:g}" for value in slots),
                f"{usual / staggered:.3f}", f"{zero_bubble / staggered:.3f}",
            )  # fmt: skip
    yield table
    table = new_table(
        "The same in simulated runs: ratio to fault-free 1F1B, failure every 2 h on average, 6 h, 20 seeds",
        "model", "no re-routing", "adaptive", "+ decoupled", "+ staggered",
    )  # fmt: skip
    for name in PAPER:
        model = get_model(name)
        cells = []
        for adaptive, decoupled, staggered in ((0, 0, 0), (1, 0, 0), (1, 1, 0), (1, 1, 1)):
            policy = Recycle(
                adaptive=bool(adaptive), decoupled=bool(decoupled), staggered=bool(staggered), fault_free="1f1b"
            )
            cells.append(repeat(model, Cluster.of(model), policy, Poisson("2h"), DURATION, SEEDS).ratio)
        table.add_row(name, *(f"{cell:.3f}" for cell in cells))
    yield table


def day_table() -> Iterable[Table]:
    model = get_model("megatron_145_6b")
    table = new_table(
        f"One simulated day of {model.gpus} GPUs ({model.name}, {model.grid}), one core, nothing planned before",
        "failures", "policy", "seconds", "failed", "ratio", "useful", "bubble", "idle", "redone", "reconf.", "down",
        left=2,
    )  # fmt: skip
    sources: dict[str, FailureSource] = {
        "Llama 3, 8 GPUs a node, 4 h": FailureRate("llama3", repair="4h"),
        "RSC-1, 8 GPUs a node, 4 h": FailureRate("rsc1", repair="4h"),
        "every 2 h, 1 GPU, back after 4 h": Poisson("2h", repair="4h"),
        "every 30 min, 1 GPU, back after 2 h": Poisson("30min", repair="2h"),
    }
    for label, source in sources.items():
        cluster = Cluster.of(model, gpus_per_node=8 if "8 GPUs" in label else 1)
        for policy in (Recycle(), Oobleck(), Restart()):
            planned_step.cache_clear()
            started = time.process_time()
            result = simulate(model, cluster, policy, source, "1d", seed=1)
            seconds = time.process_time() - started
            parts = result.accounting.fractions()
            assert result.accounting.total == cluster.gpus * 86_400_000_000_000
            table.add_row(
                label, type(policy).__name__, f"{seconds:.1f}", str(result.failures), f"{result.ratio:.3f}",
                *(f"{100 * parts[cause]:.1f}%" for cause in CAUSES),
            )  # fmt: skip
    yield table


def fraction_table() -> Iterable[Table]:
    table = new_table(
        "Throughput with 1, 5, 10 % of the GPUs failed: ratio to fault-free 1F1B (and to zero-bubble), GPUs taken",
        "model", "GPUs", "policy", "1 %", "5 %", "10 %", left=3,
    )  # fmt: skip
    for name in (*PAPER, *LARGE):
        model = get_model(name)
        cluster = Cluster.of(model)
        zero = simulate(model, cluster, FaultFree("zero_bubble"), FailedFraction(0.0), "1h").ratio
        for schedule in ("1f1b", "planned"):
            for kind in (Recycle, Merge, DropReplica, Oobleck):
                policy = kind(schedule=schedule, effort=0, checkpoint="memory")  # type: ignore[arg-type]
                cells = []
                for part in (0.01, 0.05, 0.1):
                    source = FailedFraction(part)
                    ratio = simulate(model, cluster, policy, source, "1h").ratio
                    cells.append(f"{ratio:.3f} ({ratio / zero:.3f}), {source.count(model.gpus)}")
                table.add_row(name, str(model.gpus), f"{kind.__name__}, {schedule}", *cells)
    yield table


def spares_table() -> Iterable[Table]:
    for schedule in ("1f1b", "planned"):
        table = new_table(
            f"How many hot spares equal ReCycle? Schedule {schedule} for both; 3 days, back after 4 h, 5 seeds; per "
            "GPU: spares are paid for",
            "model", "failure every", "ReCycle", "0 spares", "1", "2", "4", "8", "equal", "best per GPU", left=2,
        )  # fmt: skip
        for name in PAPER:
            model = get_model(name)
            for interval in ("24h", "6h", "2h", "1h"):
                source = Poisson(interval, repair="4h")
                ours = Recycle(schedule=schedule)  # type: ignore[arg-type]
                goal = repeat(model, Cluster.of(model), ours, source, "3d", range(5)).ratio
                found = {}
                for spares in (0, 1, 2, 3, 4, 6, 8):
                    policy = Spares(spares, schedule=schedule)  # type: ignore[arg-type]
                    found[spares] = repeat(model, Cluster.of(model, extra_nodes=spares), policy, source, "3d", range(5))
                equal = next((str(n) for n, result in found.items() if result.ratio >= goal - 0.001), "more than 8")
                best = max(found, key=lambda n: found[n].ratio_per_gpu)
                per_gpu = f"{found[best].ratio_per_gpu:.3f} ({best} spares)"
                cells = (f"{found[n].ratio:.3f}" for n in (0, 1, 2, 4, 8))
                table.add_row(name, interval, f"{goal:.3f}", *cells, equal, per_gpu)
        yield table


def layers_table() -> Iterable[Table]:
    table = new_table(
        "When does re-routing alone fall behind moving layers? Steady state with k failed workers, ratio to 1F1B",
        "model", "k failed", "Recycle", "ElasticLayers", "gain",
    )  # fmt: skip
    for name in PAPER:
        model = get_model(name)
        cluster = Cluster.of(model)
        for failed in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 16):
            if failed > model.stages * (model.pipelines - 1):
                continue
            source = FailedFraction(failed / cluster.nodes)
            plain, moved = (
                simulate(model, cluster, policy, source, "1h").ratio for policy in (Recycle(), ElasticLayers())
            )
            table.add_row(name, str(failed), f"{plain:.3f}", f"{moved:.3f}", f"{100 * (moved / plain - 1):+.1f}%")
    yield table


def sensitivity_table() -> Iterable[Table]:
    table = new_table(
        "How much the unknown protocol matters: Recycle's ratio, intervals 6 h / 2 h / 30 min",
        "protocol", *PAPER,
    )  # fmt: skip
    table.add_row(
        "paper", *(" ".join(f"{v / get_model(n).throughput:.3f}" for v in PAPER[n]["Recycle"]) for n in PAPER)
    )  # type: ignore[operator, union-attr]

    def add(label: str, source: Callable[[str], FailureSource], duration: str, **changes: int) -> None:
        cells = []
        for name in PAPER:
            model = get_model(name, **changes)
            found = [
                repeat(model, Cluster.of(model), PAPER_RECYCLE, source(i), duration, SEEDS).ratio for i in INTERVALS
            ]
            cells.append(" ".join(f"{ratio:.3f}" for ratio in found))
        table.add_row(label, *cells)

    add("Poisson, 6 h (the table's)", Poisson, "6h")
    add("Poisson, 8 h", Poisson, "8h")
    add("Poisson, 12 h", Poisson, "12h")
    add("one after each interval, 6 h", Regular, "6h")
    add("one after each interval, 8 h", Regular, "8h")
    add("Poisson, back after 2 h, 24 h", lambda interval: Poisson(interval, repair="2h"), "24h")
    add("Poisson, 6 h, global batch 256", Poisson, "6h", global_batch=256)
    add("Poisson, 6 h, global batch 1024", Poisson, "6h", global_batch=1024)
    yield table


SECTIONS: dict[str, Callable[[], Iterable[Table]]] = {
    "table": throughput_table,
    "pauses": pause_table,
    "ablation": ablation_table,
    "day": day_table,
    "fractions": fraction_table,
    "spares": spares_table,
    "layers": layers_table,
    "sensitivity": sensitivity_table,
    "ideal": ideal_table,
    "auto": auto_table,
    "same": same_table,
    "batch": batch_table,
    "slow": slow_table,
    "wrong": wrong_table,
    "links": links_table,
    "checkpoints": checkpoint_table,
    "calibration": calibration_tables,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="section", help=", ".join(SECTIONS))
    chosen = parser.parse_args().sections or list(SECTIONS)
    if unknown := set(chosen).difference(SECTIONS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; choose from {', '.join(SECTIONS)}")
    for name in chosen:
        started = time.perf_counter()
        if name == chosen[0]:
            for model in (*PAPER, *LARGE):
                console.print(f"[dim]{assumptions(get_model(model))}[/dim]")
        for table in SECTIONS[name]():
            console.print(table)
        console.print(f"[dim]{name}: {time.perf_counter() - started:.0f} s[/dim]\n")


if __name__ == "__main__":
    main()
