"""Policies with the same schedule, the same checkpoints and the same recovery; sections of ``simulation.py``.

Every row is one policy. The only things that differ are who does a dead worker's work, and how fast that is.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rich.table import Table

from lightning_recycle.simulation import (
    Auto,
    Bamboo,
    Cluster,
    CommonPolicy,
    DropReplica,
    ElasticLayers,
    FailedFraction,
    FailureSource,
    Merge,
    Oobleck,
    Poisson,
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
from lightning_recycle.traces import load_trace

__all__ = ["Scene", "assumptions", "auto_table", "batch_table", "checkpoint_table", "ideal_table", "same_table"]

MODELS = ("gpt3_medium", "gpt3_3_35b", "gpt3_6_7b")
SCHEDULES = ("1f1b", "planned")
POLICIES: dict[str, type[CommonPolicy]] = {
    "auto": Auto,
    "re-routing (ReCycle)": Recycle,
    "... and moving layers": ElasticLayers,
    "merge": Merge,
    "drop the replica": DropReplica,
    "Oobleck": Oobleck,
    "two spares, per GPU": Spares,
    "restart": Restart,
    "Varuna": Varuna,
    "Bamboo": Bamboo,
}
SEEDS = range(20)
RIVALS = ("re-routing (ReCycle)", "... and moving layers", "merge", "drop the replica", "Oobleck")
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


def ratio(model: TrainingModel, policy: CommonPolicy, scene: Scene) -> float:
    """Relative to fault-free 1F1B, per GPU of the cluster."""
    cluster = Cluster.of(model, extra_nodes=getattr(policy, "spares", 0))
    return repeat(model, cluster, policy, scene.source, scene.duration, scene.seeds).ratio_per_gpu


def policy_of(kind: type[CommonPolicy], schedule: str) -> CommonPolicy:
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


def same_rows(name: str, batch: int, schedule: str, chosen: tuple[Scene, ...]) -> Iterator[tuple[str, list[float]]]:
    model = get_model(name, throughput=None, efficiency=get_model(name).efficiency, global_batch=batch)
    for label, kind in POLICIES.items():
        yield label, [ratio(model, policy_of(kind, schedule), scene) for scene in chosen]


def same_table() -> Iterable[Table]:
    """All policies under the same schedule: three models, two batches, nine kinds of failures."""
    chosen = scenes()
    for batch in (128, 1024):
        for name in MODELS:
            model = get_model(name, throughput=None, efficiency=get_model(name).efficiency, global_batch=batch)
            for schedule in SCHEDULES:
                table = new_table(
                    f"Schedule {schedule}; throughput relative to fault-free 1F1B. {assumptions(model)}",
                    "policy", *(scene.name for scene in chosen),
                )  # fmt: skip
                for label, found in same_rows(name, batch, schedule, chosen):
                    table.add_row(label, *(f"{value:.3f}" if value else "OOM" for value in found))
                yield table


def auto_table(schedules: Iterable[str] = ("planned",), names: Iterable[str] = MODELS) -> Iterable[Table]:
    """The policy that chooses, against the best single policy in every cell: 1 means as fast."""
    chosen = scenes()
    for batch in (128, 1024):
        for name in names:
            model = get_model(name, throughput=None, efficiency=get_model(name).efficiency, global_batch=batch)
            for schedule in schedules:
                table = new_table(
                    f"Auto and the best single policy, schedule {schedule}. {assumptions(model)}",
                    "", *(scene.name for scene in chosen),
                )  # fmt: skip
                found = {
                    label: [ratio(model, policy_of(POLICIES[label], schedule), scene) for scene in chosen]
                    for label in RIVALS
                }
                auto = [ratio(model, policy_of(Auto, schedule), scene) for scene in chosen]
                best = [max(RIVALS, key=lambda label, n=n: found[label][n]) for n in range(len(chosen))]
                table.add_row("auto", *(f"{value:.3f}" for value in auto))
                table.add_row("best", *(f"{found[label][n]:.3f}" for n, label in enumerate(best)))
                table.add_row("which", *best)
                table.add_row("auto / best", *(f"{auto[n] / found[label][n]:.3f}" for n, label in enumerate(best)))
                yield table


def ideal(model: TrainingModel, policy: CommonPolicy) -> list[float]:
    """Throughput relative to live GPUs times the bubble-free rate, with 1 to 12 of 32 nodes gone for good."""
    cluster = Cluster.of(model)
    return [
        simulate(model, cluster, policy, FailedFraction(k / cluster.nodes), "1h", 0).fraction_of_ideal
        for k in range(1, 13)
    ]


def ideal_table() -> Iterable[Table]:
    """Fraction of ideal: mean and least over 1 to 12 lost of 32."""
    columns = [f"{name.removeprefix('gpt3_')}, {batch}" for name in MODELS for batch in (128, 1024)]
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
            for name in MODELS:
                for batch in (128, 1024):
                    usual = get_model(name)
                    model = get_model(name, throughput=None, efficiency=usual.efficiency, global_batch=batch)
                    found = ideal(model, kind(schedule=schedule, checkpoint="memory"))  # type: ignore[arg-type]
                    cells.append(f"{statistics.fmean(found):.3f} {min(found):.3f}" if any(found) else "OOM")
            table.add_row(label, *cells)
        yield table


def batch_table() -> Iterable[Table]:
    """How the global batch decides the ranking."""
    batches = (128, 256, 512, 1024, 2048)
    for schedule in SCHEDULES:
        for name in MODELS:
            usual = get_model(name)
            table = new_table(
                f"Schedule {schedule}, {name}: ratio to fault-free 1F1B with the same batch, 6 h / 2 h / 30 min, by "
                "global batch",
                "policy", *map(str, batches),
            )  # fmt: skip
            for label, kind in POLICIES.items():
                cells = []
                for batch in batches:
                    model = get_model(name, throughput=None, efficiency=usual.efficiency, global_batch=batch)
                    found = [ratio(model, policy_of(kind, schedule), scene) for scene in scenes()[:3]]
                    cells.append(" ".join(f"{value:.3f}" for value in found) if any(found) else "OOM")
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
