"""Policies with the same schedule: who does a dead worker's work, and nothing else."""

from __future__ import annotations

import math

from lightning_recycle.visualize.report.charts import Point, Series, legend, line_chart
from lightning_recycle.visualize.report.grouping import Variants, by, models_of, protocol_text
from lightning_recycle.visualize.report.markup import Cell, Markup, element, join, num, table
from lightning_recycle.visualize.report.names import assumptions_text, duration_text, model_text, setting_text
from lightning_recycle.visualize.report.records import Record, Results
from lightning_recycle.visualize.report.scales import linear, logarithmic
from lightning_recycle.visualize.report.sections.section import Section, charts, note, summary, with_points

__all__ = ["error", "same_section", "schedule_of"]

_QUANTILES = dict(
    enumerate(
        (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10,
         2.09, 2.09, 2.08, 2.07, 2.07, 2.06, 2.06, 2.06, 2.05, 2.05, 2.05), 2,
    )
)  # fmt: skip
"""By the number of runs: Student's 97.5 % quantile with one degree of freedom less."""


def same_section(results: Results) -> Section:
    """Runs of several policies with one schedule after the other."""
    found, traces = (results.section("same", kind) for kind in ("Poisson", "TraceReplay"))
    parts = [*([_body(found)] if found else ()), *([_traces(traces)] if traces else ())]
    return Section(
        "same",
        "Policies with the same schedule",
        "All policies have the same schedule, checkpoints and recovery: what differs is who does a dead worker's work.",
        join(parts) if parts else None,
        "recycle-simulate experiment=same output=results",
    )


def schedule_of(record: Record) -> str | None:
    """The schedule of whole pipelines, where the policy has one."""
    found = record["policy"]["settings"].get("schedule")
    return None if found is None else str(found)


def error(record: Record) -> float:
    """Half of the 95 % interval of the mean ratio, by Student's distribution."""
    runs = len(record["runs"])
    return _QUANTILES.get(runs, 1.96) * float(record["deviation"]) / math.sqrt(runs) if runs > 1 else 0.0


def _mtbf(record: Record) -> float:
    return float(record["failures"]["settings"]["mtbf"])


def _body(records: list[Record]) -> Markup:
    variants = Variants(records, ignore=("schedule",))
    order = models_of(records)
    groups = by(records, lambda r: (r["model"]["name"], r["model"]["global_batch"], schedule_of(r)))
    intervals = sorted({_mtbf(record) for record in records}, reverse=True)
    texts = [duration_text(interval) for interval in intervals]
    x = logarithmic("mean time between failures", [1 / interval for interval in intervals], texts)
    pictures, rows = [], []
    for (model, batch, schedule), own in sorted(
        groups.items(), key=lambda group: (order.index(group[0][0]), group[0][1], str(group[0][2]))
    ):
        title = f"{model_text(model)}, batch {batch:,}, {setting_text('schedule', schedule)}"
        lines: list[Series] = []
        for series in variants.all:
            runs = [run for run in own if variants.of(run) is series and run["throughput"]]
            points = [Point(1 / _mtbf(r), r["ratio"], summary(r, series.name), error(r)) for r in runs]
            if not points:
                continue
            lines.append(with_points(series, points))
            found = {_mtbf(run): run for run in runs}
            row: list[Cell | str] = [model_text(model), f"{batch:,}", setting_text("schedule", schedule), series.name]
            for interval in intervals:
                run = found.get(interval)
                row += [
                    num(None if run is None else run["ratio"], key="ratio"),
                    num(None if run is None else run["fraction_of_ideal"], key="fraction_of_ideal"),
                ]
            rows.append(row)
        if lines:
            places = [point for line in lines for point in line.points]
            most = max(point.y + point.spread for point in places)
            least = 0.98 * min(point.y - point.spread for point in places)
            pictures.append(line_chart(title, lines, x, linear("throughput / fault-free 1F1B", most, least=least)))
    columns = ["model", "batch", "schedule", "policy"]
    for text in texts:
        columns += [f"{text}: of fault-free", "of ideal"]
    assumed = sorted({f"{model_text(r['model']['name'])}: {assumptions_text(r)}" for r in records})
    return join(
        (
            note(
                f"Protocol: {protocol_text(records)}. Bands: 95 % interval of the mean; as all have the "
                f"same failures, differences are surer. {'. '.join(assumed)}."
            ),
            legend(variants.all),
            charts(*pictures),
            table(columns, rows, left=4, caption="Throughput relative to fault-free 1F1B, and to the ideal"),
            element(
                "p",
                "Ideal: what the live GPUs would achieve without bubbles, pauses and anything done twice.",
                class_="note",
            ),
        )
    )


def _traces(records: list[Record]) -> Markup:
    """The same policies on traces: one row each, one column for each trace."""
    variants = Variants(records, ignore=("schedule",))
    order = models_of(records)
    names = sorted({record["failures"]["settings"]["trace"] for record in records})
    groups = by(records, lambda r: (r["model"]["name"], r["model"]["global_batch"], schedule_of(r)))
    rows = []
    for (model, batch, schedule), own in sorted(
        groups.items(), key=lambda group: (order.index(group[0][0]), group[0][1], str(group[0][2]))
    ):
        for series in variants.all:
            found = {r["failures"]["settings"]["trace"]: r["ratio"] for r in own if variants.of(r) is series}
            row: list[Cell | str] = [model_text(model), f"{batch:,}", setting_text("schedule", schedule), series.name]
            rows.append([*row, *(num(found.get(name), key="ratio") for name in names)])
    heads = ["model", "batch", "schedule", "policy", *names]
    return table(
        heads, rows, left=4, caption="The same on traces of public clouds: throughput relative to fault-free 1F1B"
    )
