"""The simulator against the paper's table over many seeds: cells, order of systems, speed-ups, a null model.

    .venv/bin/python benchmarks/calibration.py [--seeds 400]

A calibration that cannot fail says nothing, so everything is compared with a null model that knows neither model nor
policy: one constant per failure interval, fitted to the same cells.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace

from rich.console import Console
from rich.table import Table
from simulation import assumptions, new_table

from lightning_recycle.simulation import (
    Bamboo,
    Cluster,
    FailedFraction,
    FaultFree,
    Gpu,
    Oobleck,
    Poisson,
    Policy,
    Recycle,
    Regular,
    Scripted,
    TrainingModel,
    Transformer,
    Varuna,
    as_seconds,
    get_model,
    simulate,
)

INTERVALS = ("6h", "2h", "30min")
DURATION = "6h"
SEEDS = 400
POINTS = 5.0

# Samples/s by failure interval on 32 A100; None: out of memory. ReCycle, SOSP'24 (arXiv 2405.14009).
FAULT_FREE = {"gpt3_medium": 27.58, "gpt3_3_35b": 14.87, "gpt3_6_7b": 5.33}
THROUGHPUT: dict[str, dict[str, tuple[float, ...] | None]] = {
    "gpt3_medium": {
        "Bamboo": (19.47, 18.98, 15.24),
        "Oobleck": (27.26, 25.37, 19.47),
        "Recycle": (27.27, 25.42, 22.27),
    },
    "gpt3_3_35b": {"Bamboo": None, "Oobleck": (14.55, 13.44, 9.78), "Recycle": (14.59, 14.17, 12.63)},
    "gpt3_6_7b": {"Bamboo": None, "Oobleck": (4.98, 4.65, 2.78), "Recycle": (5.17, 4.85, 3.53)},
}

# samples/s of Oobleck on 30 down to 15 nodes; its artifact (SymbioticLab/Oobleck, branch sosp23-artifact,
# tools/simulator/oobleck_simulator.py). 0: cannot run. 26 to 29 nodes are on a straight line to the origin there.
OOBLECK: dict[str, tuple[float, ...]] = {
    "GPT-3 Medium": (
        38.468, 37.186, 35.904, 34.622, 33.339, 31.666, 30.241, 28.964, 27.775, 26.685, 25.689, 23.825, 23.034, 21.577,
        20.865, 19.103,
    ),
    "GPT-3 2.7B": (
        9.214, 8.907, 8.600, 8.293, 7.986, 7.627, 7.512, 7.435, 7.053, 6.705, 6.797, 6.105, 6.115, 5.631, 5.631, 5.131,
    ),
    "GPT-3 6.7B": (
        5.508, 5.324, 5.141, 4.957, 4.773, 4.809, 4.330, 4.185, 3.947, 4.011, 4.154, 3.712, 3.593, 3.284, 3.531, 0.0,
    ),
}  # fmt: skip
# Varuna on 30 nodes in the same artifact (varuna_simulator.py).
VARUNA = {"GPT-3 Medium": 41.998, "GPT-3 6.7B": 5.241}
# Ours: a node is one GPU with 48 GB; the grid of 30 and the batch, a multiple of the pipelines near 1,024, are assumed.
A40 = Gpu("A40-48GB", 149.7e12, 48e9, 0.696e12)
LAYOUTS = {
    "GPT-3 Medium": (Transformer(24, 1024, 16), 15, 2, 1020),
    "GPT-3 2.7B": (Transformer(32, 2560, 32), 6, 5, 1020),
    "GPT-3 6.7B": (Transformer(32, 4096, 32), 6, 5, 1020),
}

# samples/s at a failure after each 6 h, 1 h and 10 min, from 30 nodes until 15 are left: what the same artifact
# computes (tools/simulator of commit 103c477, for its paper's figure 9). Bamboo: 0 is out of memory.
CONTROLLED = ("6h", "1h", "10min")
ARTIFACT: dict[str, dict[str, tuple[float, float, float]]] = {
    "BERT-Large": {
        "Oobleck": (287.101, 286.280, 282.108), "Varuna": (260.113, 246.031, 173.521),
        "Bamboo": (77.038, 75.599, 69.837),
    },
    "GPT-2": {
        "Oobleck": (85.588, 85.420, 84.807), "Varuna": (86.512, 85.171, 76.394), "Bamboo": (17.467, 17.127, 16.010),
    },
    "GPT-3 Medium": {
        "Oobleck": (29.305, 29.205, 28.700), "Varuna": (29.504, 28.493, 20.189), "Bamboo": (0.0, 0.0, 0.0),
    },
    "GPT-3 2.7B": {"Oobleck": (7.290, 7.229, 6.890), "Varuna": (7.270, 6.536, 1.757), "Bamboo": (0.0, 0.0, 0.0)},
    "GPT-3 6.7B": {"Oobleck": (4.329, 4.223, 3.546), "Varuna": (4.145, 2.688, 0.255), "Bamboo": (0.0, 0.0, 0.0)},
}  # fmt: skip
# On 30 nodes there; shapes and batches of these two are assumptions, the latter near the artifact's 8,192 and 1,024.
SMALL = {
    "BERT-Large": (Transformer(24, 1024, 16, 512, 30522), 15, 2, 8190, 368.246),
    "GPT-2": (Transformer(24, 1024, 16, 1024), 15, 2, 1020, 110.006),
}

Samples = Mapping[tuple[str, str, str], list[float]]
"""Ratios to fault-free by (model, policy, interval), one per seed; all policies have the same failures for a seed."""


def systems(effort: int) -> dict[str, Policy]:
    """As published: 1F1B, until something fails under ReCycle."""
    return {"Bamboo": Bamboo(), "Oobleck": Oobleck(), "Recycle": Recycle(fault_free="1f1b", effort=effort)}


def measured(
    seeds: Iterable[int], effort: int = 100_000, duration: str = DURATION, batch: int = 128, **recovery: float
) -> dict[tuple[str, str, str], list[float]]:
    """Simulate all cells; ``recovery``: settings of all policies that are not the defaults."""
    chosen = tuple(seeds)
    found = {}
    for name in THROUGHPUT:
        model = get_model(name, global_batch=batch)
        cluster = Cluster.of(model)
        for label, usual in systems(effort).items():
            policy = replace(usual, **recovery)  # type: ignore[type-var]
            for interval in INTERVALS:
                runs = (simulate(model, cluster, policy, Poisson(interval), duration, seed) for seed in chosen)
                found[name, label, interval] = [run.ratio for run in runs]
    return found


def paper_ratios() -> dict[tuple[str, str, str], float]:
    """Of the 21 cells, those with a throughput; out of memory is 0."""
    return {
        (name, label, interval): (values[place] if values else 0.0) / FAULT_FREE[name]
        for name, rows in THROUGHPUT.items()
        for label, values in rows.items()
        for place, interval in enumerate(INTERVALS)
    }


def half_width(values: list[float]) -> float:
    """Half of the 95 % interval of the mean."""
    return 1.96 * statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf


def quantiles(values: list[float]) -> tuple[float, float]:
    """Where 95 % of single runs are."""
    ordered = sorted(values)
    edge = 0.025 * (len(ordered) - 1)
    return ordered[round(edge)], ordered[round(len(ordered) - 1 - edge)]


def ratio_interval(ours: list[float], theirs: list[float]) -> tuple[float, float]:
    """The ratio of the means, and half of its 95 % interval (linearized, with the seeds paired)."""
    top, bottom = statistics.fmean(ours), statistics.fmean(theirs)
    found = top / bottom
    return found, half_width([(a - found * b) / bottom for a, b in zip(ours, theirs, strict=True)])


def order_of(values: Mapping[str, float]) -> tuple[str, ...]:
    """The systems from the fastest to the slowest; one out of memory is last."""
    return tuple(sorted(values, key=lambda label: -values[label]))


def null_model(paper: Mapping[tuple[str, str, str], float]) -> dict[str, float]:
    """One constant per interval: the mean of the paper's ratios of Oobleck and ReCycle."""
    return {
        interval: statistics.fmean(
            value for (_, label, when), value in paper.items() if when == interval and label != "Bamboo"
        )
        for interval in INTERVALS
    }


def error(pairs: Iterable[tuple[float, float]]) -> float:
    """Root mean square of the differences, in points."""
    return 100 * math.sqrt(statistics.fmean((a - b) ** 2 for a, b in pairs))


def calibration_tables(seeds: int = SEEDS) -> Iterable[Table]:
    """Everything."""
    found, paper = measured(range(seeds)), paper_ratios()
    yield _cells(found, paper, seeds)
    yield _orders(found, paper)
    yield _speed_ups(found, paper)
    yield _against_null(found, paper)
    yield protocol_table()
    yield published_table()
    yield controlled_table()


def _cells(found: Samples, paper: Mapping[tuple[str, str, str], float], seeds: int) -> Table:
    table = new_table(
        f"The paper's cells: ratio to fault-free, {seeds} seeds, mean with its 95 % interval, and where 95 % of single "
        f"runs are. {'; '.join(assumptions(get_model(name)) for name in THROUGHPUT)}",
        "model", "policy", "interval", "paper", "ours", "single runs", "points", left=3,
    )  # fmt: skip
    for key, values in found.items():
        mean = statistics.fmean(values)
        points = 100 * (mean - paper[key])
        low, high = quantiles(values)
        inside = "" if low <= paper[key] <= high else " outside"
        text = ("OOM", "OOM") if not paper[key] else (f"{paper[key]:.3f}", f"{mean:.3f} +-{half_width(values):.3f}")
        mark = " !" if abs(points) > POINTS else ""
        spread = f"{low:.3f} to {high:.3f}{inside}" if mean else ""
        table.add_row(*key, *text, spread, f"{points:+.1f}{mark}" if paper[key] else "as in the paper")
    return table


def _orders(found: Samples, paper: Mapping[tuple[str, str, str], float]) -> Table:
    table = new_table("Order of the systems, fastest first", "model", "interval", "paper", "ours", left=4)
    for name in THROUGHPUT:
        for interval in INTERVALS:
            theirs = order_of({label: paper[name, label, interval] for label in THROUGHPUT[name]})
            ours = order_of({label: statistics.fmean(found[name, label, interval]) for label in THROUGHPUT[name]})
            table.add_row(name, interval, " > ".join(theirs), "the same" if ours == theirs else " > ".join(ours))
    return table


def _speed_ups(found: Samples, paper: Mapping[tuple[str, str, str], float]) -> Table:
    table = new_table(
        "Speed-up of ReCycle, 95 % interval of the ratio of means", "model", "over", "interval", "paper", "ours", left=3
    )
    for name in THROUGHPUT:
        for rival in ("Oobleck", "Bamboo"):
            for interval in INTERVALS:
                if not paper[name, rival, interval]:
                    continue
                claimed = paper[name, "Recycle", interval] / paper[name, rival, interval]
                ours, width = ratio_interval(found[name, "Recycle", interval], found[name, rival, interval])
                mark = "" if abs(ours - claimed) <= width else " !"
                table.add_row(name, rival, interval, f"{claimed:.3f}", f"{ours:.3f} +-{width:.3f}{mark}")
    return table


def _against_null(found: Samples, paper: Mapping[tuple[str, str, str], float]) -> Table:
    constants = null_model(paper)
    table = new_table(
        "Against a null model: one constant per interval ("
        + ", ".join(f"{interval} {value:.3f}" for interval, value in constants.items())
        + "), fitted to the cells of Oobleck and ReCycle",
        "cells", "number", "ours within 5 points", "null", "ours, points (RMS)", "null",
    )  # fmt: skip
    groups = {
        "Oobleck and ReCycle": [key for key in found if key[1] != "Bamboo"],
        "... at 6 h": [key for key in found if key[1] != "Bamboo" and key[2] == "6h"],
        "... at 2 h": [key for key in found if key[1] != "Bamboo" and key[2] == "2h"],
        "... at 30 min": [key for key in found if key[1] != "Bamboo" and key[2] == "30min"],
        "with Bamboo": [key for key in found if paper[key]],
    }
    for label, keys in groups.items():
        ours = [(statistics.fmean(found[key]), paper[key]) for key in keys]
        null = [(constants[key[2]], paper[key]) for key in keys]
        near = [sum(abs(a - b) <= POINTS / 100 for a, b in pairs) for pairs in (ours, null)]
        table.add_row(
            label, str(len(keys)), str(near[0]), str(near[1]), f"{error(ours):.1f}", f"{error(null):.1f}"
        )  # fmt: skip
    pairs = [
        (found[name, "Recycle", interval], found[name, "Oobleck", interval], name, interval)
        for name, interval in ((name, interval) for name in THROUGHPUT for interval in INTERVALS)
    ]
    claimed = [paper[name, "Recycle", when] / paper[name, "Oobleck", when] for _, _, name, when in pairs]
    ours = [(ratio_interval(a, b)[0], goal) for (a, b, _, _), goal in zip(pairs, claimed, strict=True)]
    table.add_row(
        "speed-up over Oobleck (null: 1)", str(len(pairs)), *(
            str(sum(abs(a - b) <= POINTS / 100 for a, b in both)) for both in (ours, [(1.0, goal) for goal in claimed])
        ), f"{error(ours):.1f}", f"{error((1.0, goal) for goal in claimed):.1f}",
    )  # fmt: skip
    return table


def protocol_table(seeds: int = 60) -> Table:
    """Which assumption about what the paper does not say would bring us nearer."""
    paper = paper_ratios()
    table = new_table(
        f"What the paper does not say, one at a time ({seeds} seeds, plans without effort): 18 cells of Oobleck and "
        "ReCycle, and 9 speed-ups over Oobleck",
        "assumed", "within 5 points", "RMS, points", "RMS of the speed-ups", "order of the two as in the paper",
    )  # fmt: skip
    assumed: dict[str, dict[str, object]] = {
        "the table's: 6 h, batch 128, 5 + 5 s": {},
        "runs of 8 h": {"duration": "8h"},
        "runs of 10 h": {"duration": "10h"},
        "runs of 12 h": {"duration": "12h"},
        "global batch 256": {"batch": 256},
        "global batch 1,024": {"batch": 1024},
        "60 s to regroup": {"regroup": 60.0},
        "180 s to regroup": {"regroup": 180.0},
        "180 s to regroup, runs of 8 h": {"regroup": 180.0, "duration": "8h"},
    }
    for label, settings in assumed.items():
        found = measured(range(seeds), 0, **settings)  # type: ignore[arg-type]
        means = {key: statistics.fmean(values) for key, values in found.items()}
        cells = [(means[key], paper[key]) for key in found if key[1] != "Bamboo"]
        both = [
            [values[name, "Recycle", when] / values[name, "Oobleck", when] for name in THROUGHPUT for when in INTERVALS]
            for values in (means, paper)
        ]
        near = sum(abs(a - b) <= POINTS / 100 for a, b in cells)
        right = sum((a > 1) == (b > 1) for a, b in zip(*both, strict=True))
        table.add_row(
            label, f"{near} of 18", f"{error(cells):.1f}", f"{error(zip(*both, strict=True)):.1f}", f"{right} of 9"
        )
    null = null_model(paper)
    cells = [(null[key[2]], value) for key, value in paper.items() if key[1] != "Bamboo"]
    near = sum(abs(a - b) <= POINTS / 100 for a, b in cells)
    claimed = [paper[name, "Recycle", when] / paper[name, "Oobleck", when] for name in THROUGHPUT for when in INTERVALS]
    table.add_row(
        "null model: one constant per interval",
        f"{near} of 18", f"{error(cells):.1f}", f"{error((1.0, goal) for goal in claimed):.1f}", "none",
    )  # fmt: skip
    return table


def published_model(name: str) -> TrainingModel:
    """One of Oobleck's models on 30 nodes, as fast as published there."""
    *layout, batch, throughput = SMALL[name] if name in SMALL else (*LAYOUTS[name], OOBLECK[name][0])
    return TrainingModel(name, *layout, global_batch=batch, throughput=throughput, gpu=A40)  # type: ignore[arg-type]


def published_rows() -> dict[str, list[tuple[int, float, float]]]:
    """(nodes, published, ours), relative to 30 nodes, for each of Oobleck's models."""
    found = {}
    for name, values in OOBLECK.items():
        model = published_model(name)
        cluster, rows = Cluster.of(model), []
        free = simulate(model, cluster, FaultFree(), Scripted(), "1h").throughput
        for gone, value in enumerate(values[1:], 1):
            if value:
                run = simulate(model, cluster, Oobleck(checkpoint="memory"), FailedFraction(gone / 30), "1h")
                rows.append((30 - gone, value / values[0], run.throughput / free))
        found[name] = rows
    return found


def published_table() -> Table:
    """Oobleck's own table: throughput by number of nodes."""
    found = published_rows()
    table = new_table(
        "Oobleck's published throughput on fewer nodes, relative to 30: published, ours, and n / 30. Assumed: "
        + "; ".join(assumptions(published_model(name)) for name in found),
        "nodes", *found,
    )  # fmt: skip
    for nodes in range(29, 14, -1):
        cells = []
        for rows in found.values():
            row = next((row for row in rows if row[0] == nodes), None)
            if row is None:
                cells.append("cannot run")
                continue
            mark = " !" if abs(row[1] - row[2]) > 0.03 else ""
            cells.append(f"{row[1]:.3f} {row[2]:.3f} {nodes / 30:.3f}{mark}")
        table.add_row(str(nodes), *cells)
    within, errors = [], []
    for rows in found.values():
        near = [sum(abs(p - o) <= 0.03 for _, p, o in rows), sum(abs(p - n / 30) <= 0.03 for n, p, _ in rows)]
        within.append(f"{near[0]} and {near[1]} of {len(rows)}")
        errors.append(f"{error((o, p) for _, p, o in rows):.1f} and {error((n / 30, p) for n, p, _ in rows):.1f}")
    table.add_row("within 3 points: ours, n / 30", *within)
    table.add_row("RMS, points", *errors)
    varuna = []
    for name in found:
        if name not in VARUNA:
            varuna.append("")
            continue
        model = published_model(name)
        run = simulate(model, Cluster.of(model), Varuna(checkpoint="memory"), Scripted(), "1h")
        varuna.append(f"{VARUNA[name] / OOBLECK[name][0]:.3f} {run.throughput / OOBLECK[name][0]:.3f}")
    table.add_row("Varuna on 30 nodes over Oobleck", *varuna)
    return table


def controlled_rows() -> dict[tuple[str, str], list[tuple[float, float]]]:
    """(artifact's, ours) in samples/s at each interval of ``CONTROLLED``, by model and policy."""
    policies = {"Oobleck": Oobleck(checkpoint="memory"), "Varuna": Varuna(), "Bamboo": Bamboo()}
    found = {}
    for name, rows in ARTIFACT.items():
        model = published_model(name)
        for label, values in rows.items():
            runs = (
                simulate(model, Cluster.of(model), policies[label], Regular(every), 15 * as_seconds("", every))
                for every in CONTROLLED
            )
            found[name, label] = [(value, run.throughput) for value, run in zip(values, runs, strict=True)]
    return found


def controlled_table() -> Table:
    """Oobleck's controlled failures."""
    table = new_table(
        "Oobleck's controlled failures, samples/s: its artifact's simulator, ours. Nodes go from 30 to 15. Assumed: "
        + "; ".join(assumptions(published_model(name)) for name in ARTIFACT),
        "model", "policy", *CONTROLLED,
    )  # fmt: skip
    for (name, label), row in controlled_rows().items():
        cells = [f"{theirs:.2f} {ours:.2f}" + (f" {ours / theirs:.2f}" if theirs else "") for theirs, ours in row]
        table.add_row(name, label, *cells)
    return table


def main() -> None:
    """The tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    arguments = parser.parse_args()
    console, started = Console(width=140), time.perf_counter()
    for table in calibration_tables(arguments.seeds):
        console.print(table)
    console.print(f"{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
