"""Replay of availability traces: available GPUs, and the throughput of each policy."""

from __future__ import annotations

from dataclasses import replace

from lightning_recycle.visualize.report.charts import Point, Series, legend, replay_chart
from lightning_recycle.visualize.report.grouping import Variants, by, models_of
from lightning_recycle.visualize.report.markup import Cell, Markup, join, num, percent, table
from lightning_recycle.visualize.report.names import duration_text, model_text
from lightning_recycle.visualize.report.records import Record, Results
from lightning_recycle.visualize.report.scales import linear
from lightning_recycle.visualize.report.sections.section import Section, charts, note, with_points

__all__ = ["averaged", "traces_section"]

_BINS = 72
_AVAILABLE = Series("available GPUs", "available", "c-available", marker=None)


def traces_section(results: Results) -> Section:
    """Runs that follow a trace."""
    found = results.section("traces", "TraceReplay")
    return Section(
        "traces",
        "Trace replay",
        "Nodes come and go as they did in a public cloud: availability above, throughput below.",
        _body(found) if found else None,
        "recycle-simulate experiment=traces output=results",
    )


def _body(records: list[Record]) -> Markup:
    variants = Variants(records)
    order = models_of(records)
    groups = by(records, lambda r: (r["failures"]["settings"]["trace"], r["model"]["name"], r["duration"]))
    pictures, rows = [], []
    for (trace, model, duration), runs in sorted(groups.items(), key=lambda g: (g[0][0], order.index(g[0][1]))):
        latest = {variants.of(run).key: run for run in runs}
        pictures.append(_picture(f"{trace}, {model_text(model)}", latest, variants, duration))
        first = runs[0]
        row: list[Cell | str] = [trace, model_text(model), duration_text(duration), percent(_available(first), 0)]
        row += [
            num(latest[series.key]["ratio"], key="ratio") if series.key in latest else num(None)
            for series in variants.all
        ]
        rows.append(row)
    bin_text = duration_text(max(record["duration"] for record in records) / _BINS)
    columns = ["trace", "model", "length", "available", *(series.name for series in variants.all)]
    return join(
        (
            legend([replace(series, marker=None) for series in (*variants.all, _AVAILABLE)]),
            charts(*pictures, wide=True),
            note(f"Throughput is averaged over {_BINS} equal parts of the time, of up to {bin_text}."),
            table(columns, rows, left=2, caption="Throughput relative to fault-free 1F1B"),
        )
    )


def _available(record: Record) -> float:
    """Mean fraction of the GPUs available."""
    return 1.0 - float(record["fractions"]["failed"])


def _picture(title: str, runs: dict[str, Record], variants: Variants, duration: float) -> Markup:
    hours = duration / 3600
    x = linear("hours", hours, count=8, exact=True)
    first = next(iter(runs.values()))
    steps = [(interval["begin"] / 3600, interval["live_gpus"]) for interval in first["timeline"]["intervals"]]
    points = [Point(at, count, "") for at, count in (*steps, (hours, steps[-1][1]))]
    lines = []
    for series in reversed(variants.all):  # the first is drawn last, above the others
        if series.key in runs:
            means = averaged(runs[series.key], _BINS)
            ends = [*means, means[-1]]
            width = hours / _BINS
            lines.append(with_points(series, [Point(place * width, mean, "") for place, mean in enumerate(ends)]))
    most = max(first["fault_free_throughput"], *(point.y for line in lines for point in line.points))
    upper = linear("available GPUs", first["cluster"]["gpus"], count=2)
    return replay_chart(title, with_points(_AVAILABLE, points), lines, x, upper, linear("samples/s", most))


def averaged(record: Record, count: int) -> list[float]:
    """Mean samples/s in each of ``count`` equal parts of the run."""
    width = record["duration"] / count
    sums = [0.0] * count
    for interval in record["timeline"]["intervals"]:
        if not interval["throughput"]:
            continue
        for place in range(int(interval["begin"] / width), count):
            begin, end = max(interval["begin"], place * width), min(interval["end"], (place + 1) * width)
            if begin >= end:
                break
            sums[place] += interval["throughput"] * (end - begin)
    return [total / width for total in sums]
