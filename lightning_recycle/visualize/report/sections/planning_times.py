"""How long the planner takes, by size of the cluster."""

from __future__ import annotations

from lightning_recycle.visualize.report.charts import Point, Series, legend, line_chart
from lightning_recycle.visualize.report.markup import Cell, Markup, join, num, percent, table
from lightning_recycle.visualize.report.records import Record, Results
from lightning_recycle.visualize.report.scales import linear, logarithmic
from lightning_recycle.visualize.report.sections.section import Section, charts, note, with_points

__all__ = ["planner_section"]

_UNIT = "seconds of one core"


def planner_section(results: Results) -> Section:
    """Plans of ``task=planner``."""
    return Section(
        "planner",
        "Planner latency by cluster size",
        "Seconds of one core for one plan: the distribution of failures and the schedule of every worker.",
        _body(results.planner) if results.planner else None,
        "recycle-simulate experiment=planner output=results",
    )


def _body(records: list[Record]) -> Markup:
    parts = sorted({record["failed"] for record in records})
    lines = []
    for place, part in enumerate(parts):
        series = Series(f"{100 * part:g} % failed", f"part{place}", f"q-{1 + place % 4}", marker="circle")
        points = [Point(r["workers"], r["processor_seconds"], _tip(r, series)) for r in records if r["failed"] == part]
        lines.append(with_points(series, points))
    sizes = sorted({record["workers"] for record in records})
    x = logarithmic("GPUs", sizes, [f"{size:,}" for size in sizes])
    seconds = [record["processor_seconds"] for record in records]
    y = logarithmic(_UNIT, seconds) if min(seconds) > 0 else linear(_UNIT, max(seconds))
    rows: list[list[Cell | str]] = []
    for record in sorted(records, key=lambda r: (r["workers"], r["failed"])):
        grid = record["grid"]
        rows.append(
            [
                f"{grid['stages']} x {grid['pipelines']} x {grid['microbatches']}",
                num(record["workers"], 0),
                num(record["failed_workers"], 0),
                num(record["seconds"], 2, key="seconds"),
                num(record["processor_seconds"], 2, key="processor_seconds"),
                num(record["period"], 0, key="period"),
                percent(record["gap"], 2, key="gap"),
            ]
        )
    columns = ["grid", "GPUs", "failed", "seconds", "of the core", "period, slots", "from optimum"]
    return join(
        (
            legend(lines),
            charts(line_chart("Planner latency", lines, x, y)),
            table(columns, rows, caption="Plans"),
            note(
                "Grid: stages x pipelines x micro-batches. From optimum: how far the period can be from the best "
                "one at most, by a proven lower bound."
            ),
        )
    )


def _tip(record: Record, series: Series) -> str:
    return f"{record['workers']:,} GPUs, {series.name}: {record['processor_seconds']:.2f} s"
