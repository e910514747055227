"""The tables of benchmarks/SIMULATED.md: policies with the same schedule, checkpoints and recovery.

    .venv/bin/python benchmarks/simulation.py             # everything, hours on one core
    .venv/bin/python benchmarks/simulation.py same day    # some of: same auto ideal spares checkpoints layers
                                                          #          ablation spot day

Every row is one policy. The only things that differ are who does a dead worker's work, and how fast that is. The
paper's own table, with systems as published, is printed by ``calibration.py``.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from lightning_recycle.planning import Costs, Grid, Problem, Technique, Worker
from lightning_recycle.simulation import (
    Auto,
    Bamboo,
    Cause,
    Cluster,
    DropReplica,
    Elastic,
    FailedFraction,
    FailureRate,
    FailureSource,
    Merge,
    Oobleck,
    Poisson,
    Policy,
    Recycle,
    Restart,
    Spares,
    TraceReplay,
    TrainingModel,
    Varuna,
    get_model,
    repeat,
    simulate,
)
from lightning_recycle.simulation.policy import planned_step
from lightning_recycle.simulation.training_model import one_f_one_b_seconds
from lightning_recycle.traces import load_trace

console = Console(width=120)

MODELS = ("gpt3_medium", "gpt3_3_35b", "gpt3_6_7b")
BATCHES = (128, 1024)
SCHEDULES = ("1f1b", "planned")
POLICIES: dict[str, type[Policy]] = {
    "auto": Auto,
    "re-routing (ReCycle)": Recycle,
    "merge": Merge,
    "drop the replica": DropReplica,
    "Oobleck": Oobleck,
    "two spares, per GPU": Spares,
    "restart": Restart,
    "Varuna": Varuna,
    "Bamboo": Bamboo,
}
SEEDS = range(20)
_MEDIUM = get_model("gpt3_medium")
RIVALS = ("re-routing (ReCycle)", "merge", "drop the replica", "Oobleck")
"""Policies that come near ``Auto`` anywhere."""


@dataclass(frozen=True)
class Scene:
    """Failures, for how long, and how often."""

    name: str
    source: FailureSource
    duration: float
    seeds: range


def scenes() -> tuple[Scene, ...]:
    random = (
        Scene("6 h", Poisson("6h"), 21600.0, SEEDS),
        Scene("2 h", Poisson("2h"), 21600.0, SEEDS),
        Scene("30 min", Poisson("30min"), 21600.0, SEEDS),
        Scene("2 h, repair", Poisson("2h", repair="4h"), 3 * 86400.0, range(5)),
    )
    # The first minutes, in which the clusters come up, are left out.
    traces = {"aws-g4dn": 600.0, "aws-p2": 1200.0, "aws-p3": 600.0, "gcp-a100": 600.0, "gcp-v100": 600.0}
    return random + tuple(
        Scene(name, TraceReplay(name, start), load_trace(name).duration - start, range(1))
        for name, start in traces.items()
    )


def ratio(model: TrainingModel, policy: Policy, scene: Scene) -> float:
    """Relative to fault-free 1F1B, per GPU of the cluster."""
    cluster = Cluster.of(model, extra_nodes=getattr(policy, "spares", 0))
    return repeat(model, cluster, policy, scene.source, scene.duration, scene.seeds).mean("ratio_per_gpu")


def policy_of(kind: type[Policy], schedule: str) -> Policy:
    return kind(schedule=schedule, **({"spares": 2} if kind is Spares else {}))  # type: ignore[arg-type]


def assumptions(model: TrainingModel) -> str:
    """What decides a result besides policy and failures."""
    return (
        f"{model.name}: {model.pipelines} x {model.stages}, global batch {model.global_batch}, "
        f"{100 * model.efficiency:.1f} % of the peak of an {model.device.name} while computing, "
        f"{model.network_bandwidth * 8e-9:g} Gb/s"
    )


def new_table(title: str, *columns: str, left: int = 1) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < left else "right", no_wrap=True)
    return table


def model_of(name: str, batch: int) -> TrainingModel:
    """The model with another global batch; throughput follows from its efficiency."""
    return get_model(name, throughput=None, efficiency=get_model(name).efficiency, global_batch=batch)


def settings() -> Iterable[tuple[TrainingModel, str]]:
    """Each model with each batch, under each schedule."""
    for batch, name, schedule in itertools.product(BATCHES, MODELS, SCHEDULES):
        yield model_of(name, batch), schedule


def same_table() -> Iterable[Table]:
    """All policies under the same schedule: three models, two batches, nine kinds of failures."""
    chosen = scenes()
    for model, schedule in settings():
        table = new_table(
            f"Schedule {schedule}; throughput relative to fault-free 1F1B. {assumptions(model)}",
            "policy", *(scene.name for scene in chosen),
        )  # fmt: skip
        for label, kind in POLICIES.items():
            found = [ratio(model, policy_of(kind, schedule), scene) for scene in chosen]
            table.add_row(label, *(f"{value:.3f}" if value else "OOM" for value in found))
        yield table


def auto_table() -> Iterable[Table]:
    """The policy that chooses, against the best single policy in every cell: 1 means as fast."""
    chosen = scenes()
    for model, schedule in settings():
        table = new_table(
            f"Auto and the best single policy, schedule {schedule}. {assumptions(model)}",
            "", *(scene.name for scene in chosen),
        )  # fmt: skip
        found = {
            label: [ratio(model, policy_of(POLICIES[label], schedule), scene) for scene in chosen] for label in RIVALS
        }
        auto = [ratio(model, policy_of(Auto, schedule), scene) for scene in chosen]
        best = [max(RIVALS, key=lambda label, n=n: found[label][n]) for n in range(len(chosen))]
        table.add_row("auto", *(f"{value:.3f}" for value in auto))
        table.add_row("best", *(f"{found[label][n]:.3f}" for n, label in enumerate(best)))
        table.add_row("which", *best)
        table.add_row("auto / best", *(f"{auto[n] / found[label][n]:.3f}" for n, label in enumerate(best)))
        yield table


def ideal(model: TrainingModel, policy: Policy) -> list[float]:
    """Throughput relative to live GPUs times the bubble-free rate, with 1 to 12 of 32 nodes gone for good."""
    cluster = Cluster.of(model)
    return [
        simulate(model, cluster, policy, FailedFraction(k / cluster.nodes), "1h", 0).fraction_of_ideal
        for k in range(1, 13)
    ]


def ideal_table() -> Iterable[Table]:
    """Fraction of ideal: mean and least over 1 to 12 lost of 32."""
    columns = [f"{name.removeprefix('gpt3_')}, {batch}" for name in MODELS for batch in BATCHES]
    for schedule in SCHEDULES:
        table = new_table(
            f"Fraction of ideal, schedule {schedule}: throughput / (live GPUs x bubble-free rate), mean and least "
            "over 1 to 12 of 32 GPUs lost",
            "policy", *columns,
        )  # fmt: skip
        for label, kind in POLICIES.items():
            if kind is Spares:
                continue  # without spares it is merge
            cells = []
            for name, batch in itertools.product(MODELS, BATCHES):
                found = ideal(model_of(name, batch), kind(schedule=schedule, checkpoint="memory"))  # type: ignore[arg-type]
                cells.append(f"{statistics.fmean(found):.3f} {min(found):.3f}" if any(found) else "OOM")
            table.add_row(label, *cells)
        yield table


def checkpoint_table() -> Iterable[Table]:
    """How much of the distance to restarting is the checkpoints and the start of the job."""
    intervals = ("96h", "24h", "6h", "2h")
    rows = {
        "synchronous, Daly; restart 300 s": {"checkpoint": "synchronous", "checkpoint_every": "daly"},
        "synchronous, Daly; restart 60 s": {"checkpoint": "synchronous", "checkpoint_every": "daly", "restart": 60.0},
        "background, 5 min; restart 300 s": {},
        "background, 5 min; restart 60 s": {"restart": 60.0},
        "sharded, Daly; restart 60 s": {"checkpoint": "sharded", "checkpoint_every": "daly", "restart": 60.0},
        "memory, 1 min; restart 60 s": {"checkpoint": "memory", "checkpoint_every": 60.0, "restart": 60.0},
    }
    for schedule in SCHEDULES:
        table = new_table(
            f"How far re-routing is ahead of restarting, in points of fault-free 1F1B (schedule {schedule} for both; "
            "3 days, back after 4 h, 5 seeds)",
            "model", "checkpoints of restart", *intervals, left=2,
        )  # fmt: skip
        for name in MODELS:
            model = get_model(name)
            ours = [
                ratio(model, Recycle(schedule=schedule), _days(interval))  # type: ignore[arg-type]
                for interval in intervals
            ]
            for label, settings in rows.items():
                policy = Restart(schedule=schedule, **settings)  # type: ignore[arg-type]
                theirs = [ratio(model, policy, _days(interval)) for interval in intervals]
                ahead = (f"{100 * (a - b):+.1f}" for a, b in zip(ours, theirs, strict=True))
                table.add_row(name, label, *ahead)
        yield table


def _days(interval: str) -> Scene:
    return Scene(interval, Poisson(interval, repair="4h"), 3 * 86400.0, range(5))


def spares_table() -> Iterable[Table]:
    for schedule in ("1f1b", "planned"):
        table = new_table(
            f"How many hot spares equal ReCycle? Schedule {schedule} for both; 3 days, back after 4 h, 5 seeds; per "
            "GPU: spares are paid for",
            "model", "failure every", "ReCycle", "0 spares", "1", "2", "4", "8", "equal", "best per GPU", left=2,
        )  # fmt: skip
        for name in MODELS:
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
                best = max(found, key=lambda n: found[n].mean("ratio_per_gpu"))
                per_gpu = f"{found[best].mean('ratio_per_gpu'):.3f} ({best} spares)"
                cells = (f"{found[n].ratio:.3f}" for n in (0, 1, 2, 4, 8))
                table.add_row(name, interval, f"{goal:.3f}", *cells, equal, per_gpu)
        yield table


def layers_table() -> Iterable[Table]:
    table = new_table(
        "When does re-routing alone fall behind moving layers? Steady state with k failed workers, ratio to 1F1B",
        "model", "k failed", "Recycle", "Auto", "gain",
    )  # fmt: skip
    for name in MODELS:
        model = get_model(name)
        cluster = Cluster.of(model)
        for failed in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 16):
            if failed > model.stages * (model.pipelines - 1):
                continue
            source = FailedFraction(failed / cluster.nodes)
            plain, moved = (simulate(model, cluster, policy, source, "1h").ratio for policy in (Recycle(), Auto()))
            table.add_row(name, str(failed), f"{plain:.3f}", f"{moved:.3f}", f"{100 * (moved / plain - 1):+.1f}%")
    yield table


def ablation(grid: Grid, failed: Worker, effort: int) -> list[float]:
    """Slots of a step: fault-free 1F1B and zero bubble, then with the failure and the techniques one by one."""
    costs, limit = Costs.uniform(grid.stages), (grid.stages,) * grid.stages
    one = Grid(1, grid.stages, grid.microbatches)
    # The baseline is planned as well as possible, whatever the effort for the plans compared with it.
    zero_bubble = planned_step(Problem(one, costs, frozenset(), Technique(True, False), limit)).period
    steps = ((False, False), (True, False), (True, True))
    plans = (Problem(grid, costs, frozenset([failed]), Technique(*step)) for step in steps)
    usual = one_f_one_b_seconds(costs, grid.microbatches)
    return [usual, zero_bubble, *(planned_step(problem, effort).period for problem in plans)]


def ablation_table() -> Iterable[Table]:
    table = new_table(
        "Ablation, one worker failed, F = B = W = 1 slot: slots of a step",
        "stages x pipelines x micro-batches", "planner", "1F1B", "zero bubble", "adaptive", "+ split backward",
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
        "model", "no re-routing", "adaptive", "+ split backward", "+ staggered",
    )  # fmt: skip
    for name in MODELS:
        model = get_model(name)
        cells = []
        for adaptive, split_backward, staggered in ((0, 0, 0), (1, 0, 0), (1, 1, 0), (1, 1, 1)):
            policy = Recycle(
                adaptive=bool(adaptive),
                split_backward=bool(split_backward),
                staggered=bool(staggered),
                fault_free="1f1b",
            )
            cells.append(repeat(model, Cluster.of(model), policy, Poisson("2h"), "6h", SEEDS).ratio)
        table.add_row(name, *(f"{cell:.3f}" for cell in cells))
    yield table


ON_DEMAND, SPOT = 1.0, 0.3  # prices of a GPU-hour
SPOT_NODES = (4, 8, 16)
SPOT_POLICIES: dict[str, type[Policy]] = {
    "elastic, the batch stays": Elastic,
    "re-routing (ReCycle)": Recycle,
    "drop the replica, the batch shrinks": DropReplica,
    "restart": Restart,
}


def spot_table() -> Iterable[Table]:
    """What a sample costs on spot nodes that come and go, against as many nodes on demand that never fail."""
    chosen = [scene for scene in scenes() if isinstance(scene.source, TraceReplay)]
    for nodes in SPOT_NODES:
        model = get_model("gpt3_medium", pipelines=nodes // 2, throughput=None, efficiency=_MEDIUM.efficiency)
        table = new_table(
            f"Cost of a sample on up to {nodes} spot nodes at {SPOT:g} of the price on demand, relative to that on"
            f" {nodes} nodes on demand. {assumptions(model)}",
            "policy", *(scene.name for scene in chosen),
        )  # fmt: skip
        usual = ON_DEMAND * model.gpus / (model.global_batch / model.fault_free_seconds()) / 3600
        half = get_model("gpt3_medium", pipelines=nodes // 4, throughput=None, efficiency=_MEDIUM.efficiency)
        runs = [(label, model, kind(schedule="planned"), 0) for label, kind in SPOT_POLICIES.items()]
        runs.insert(1, ("... of half as many pipelines", half, Elastic(schedule="planned"), nodes // 2))
        for label, own, policy, extra in runs:
            costs = []
            for scene in chosen:
                cluster = Cluster.of(own, extra_nodes=extra, price=SPOT)
                result = simulate(own, cluster, policy, scene.source, scene.duration)
                costs.append(result.cost / result.samples / usual if result.samples else math.inf)
            table.add_row(label, *(f"{cost:.3f}" for cost in costs))
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
                *(f"{100 * parts[cause.value]:.1f}%" for cause in Cause),
            )  # fmt: skip
    yield table


SECTIONS: dict[str, Callable[[], Iterable[Table]]] = {
    "same": same_table,
    "auto": auto_table,
    "ideal": ideal_table,
    "spares": spares_table,
    "checkpoints": checkpoint_table,
    "layers": layers_table,
    "ablation": ablation_table,
    "spot": spot_table,
    "day": day_table,
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
            for model in MODELS:
                console.print(f"[dim]{assumptions(get_model(model))}[/dim]")
        for table in SECTIONS[name]():
            console.print(table)
        console.print(f"[dim]{name}: {time.perf_counter() - started:.0f} s[/dim]\n")


if __name__ == "__main__":
    main()
