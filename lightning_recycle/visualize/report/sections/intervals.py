"""Throughput by failure interval, with the paper's figures beside it."""

from __future__ import annotations

from dataclasses import replace

from lightning_recycle.visualize.report.charts import Point, Series, legend, line_chart
from lightning_recycle.visualize.report.grouping import Variants, by, models_of, protocol_text
from lightning_recycle.visualize.report.markup import Cell, Markup, element, join, num, table
from lightning_recycle.visualize.report.names import duration_text, model_text
from lightning_recycle.visualize.report.paper import SOURCE, paper_throughput
from lightning_recycle.visualize.report.records import Record, Results
from lightning_recycle.visualize.report.scales import linear, logarithmic
from lightning_recycle.visualize.report.sections.equal_schedules import error
from lightning_recycle.visualize.report.sections.section import (
    REFERENCE,
    Section,
    charts,
    note,
    summary,
    with_points,
)

__all__ = ["intervals_section"]

_OFF = 0.05  # of fault-free throughput: further from the paper than this is marked
_SHIFT = 4.0  # pixels
_PAPER = Series("paper", "paper", "c-paper", marker="dash", line=False)


def intervals_section(results: Results) -> Section:
    """Runs with a mean time between failures."""
    found = results.section("intervals", "Poisson")
    groups = by(found, lambda record: (record["duration"], record["failures"]["settings"]["repair"]))
    return Section(
        "intervals",
        "Throughput by failure interval",
        "A node of the cluster fails at this interval on average; more failures to the right.",
        join(_group(group) for group in groups.values()) if groups else None,
        "recycle-simulate experiment=intervals output=results",
    )


def _group(records: list[Record]) -> Markup:
    variants = Variants(records)
    intervals = sorted({_interval(record) for record in records}, reverse=True)
    texts = [duration_text(interval) for interval in intervals]
    x = logarithmic("mean time between failures", [1 / interval for interval in intervals], texts)
    pictures, any_paper = [], False
    for model in models_of(records):
        runs = [record for record in records if record["model"]["name"] == model and record["throughput"]]
        if not runs:
            continue
        usual = runs[0]["fault_free_throughput"]
        lines, papers = [replace(REFERENCE, level=usual)], []
        for place, series in enumerate(variants.all):
            shift = _SHIFT * (place - (len(variants.all) - 1) / 2)
            own = [record for record in runs if variants.of(record) is series]
            points = [Point(1 / _interval(r), r["throughput"], summary(r, series.name), error(r) * usual) for r in own]
            lines.append(replace(with_points(series, points), shift=shift))
            papers += [
                replace(_PAPER, key=f"paper s-{series.key}", color=series.color, points=(point,), shift=shift)
                for record in own
                if (value := _paper(record, variants, records))
                for point in [Point(1 / _interval(record), value, f"{series.name} in the paper: {value:.2f} samples/s")]
            ]
        any_paper |= bool(papers)
        values = [point.y for line in (*lines, *papers) for point in line.points]
        y = linear("samples/s", max(usual, *values))
        pictures.append(line_chart(model_text(model), [*lines, *papers], x, y))
    shown = [*variants.all, REFERENCE, *([_PAPER] if any_paper else [])]
    parts = [note(f"Protocol: {protocol_text(records)}. Bands: 95 % interval of the mean.")]
    parts += [legend(shown), charts(*pictures)]
    if any_paper:
        parts.append(_beside_the_paper(records, variants, intervals))
    parts.append(_everything(records, variants, intervals))
    return element("div", *parts, class_="group")


def _interval(record: Record) -> float:
    return float(record["failures"]["settings"]["mtbf"])


def _paper(record: Record, variants: Variants, records: list[Record]) -> float | None:
    """The paper's figure, for the variant that matches the paper's system: 1F1B until something fails."""
    value = paper_throughput(record)
    if record["policy"]["name"] == "Recycle" and record["policy"]["settings"]["fault_free"] != "1f1b":
        others = {other["policy"]["settings"].get("fault_free") for other in records}
        return None if "1f1b" in others else value
    return value


def _cells(records: list[Record], model: str, series: Series, variants: Variants) -> dict[float, Record]:
    return {
        _interval(record): record
        for record in records
        if record["model"]["name"] == model and variants.of(record) is series
    }


def _beside_the_paper(records: list[Record], variants: Variants, intervals: list[float]) -> Markup:
    rows = []
    for model in models_of(records):
        for series in variants.all:
            found = _cells(records, model, series, variants)
            papers = {interval: _paper(record, variants, records) for interval, record in found.items()}
            if any(value is not None for value in papers.values()):
                row: list[Cell | str] = [model_text(model), series.name]
                for interval in intervals:
                    row += _comparison(found.get(interval), papers.get(interval))
                rows.append(row)
    columns = ["model", "policy"]
    for interval in intervals:
        columns += [f"{duration_text(interval)}: paper", "ours", "points"]
    caption = "Beside the paper, samples/s"
    return join(
        (
            table(columns, rows, left=2, caption=caption),
            note(
                f"Paper: {SOURCE}. Points: ours minus the paper\N{RIGHT SINGLE QUOTATION MARK}s, both relative to "
                "fault-free, in hundredths; more than 5 are marked."
            ),
        )
    )


def _comparison(record: Record | None, paper: float | None) -> list[Cell | str]:
    if record is None:
        return [num(None)] * 3
    ours = _throughput(record)
    if not paper or not record["throughput"]:
        return [num(None) if paper is None else Cell("out of memory"), ours, num(None)]
    points = record["ratio"] - paper / record["fault_free_throughput"]
    sign = "+" if points > 0 else ""
    shown = num(100 * points, 1)
    return [num(paper, 2), ours, Cell(sign + shown.text, shown.value, "off" if abs(points) > _OFF else None)]


def _throughput(record: Record) -> Cell:
    return num(record["throughput"], 2, key="throughput") if record["throughput"] else Cell(record["note"] or "none")


def _everything(records: list[Record], variants: Variants, intervals: list[float]) -> Markup:
    rows = []
    for model in models_of(records):
        for series in variants.all:
            found = _cells(records, model, series, variants)
            if found:
                row: list[Cell | str] = [model_text(model), series.name]
                for interval in intervals:
                    record = found.get(interval)
                    nothing = record is None or not record["throughput"]
                    row += [
                        num(None) if record is None else _throughput(record),
                        num(None if nothing or record is None else record["ratio"], key="ratio"),
                    ]
                rows.append(row)
    columns = ["model", "policy"]
    for interval in intervals:
        columns += [f"{duration_text(interval)}: samples/s", "of fault-free"]
    return table(columns, rows, left=2, caption="All policies: samples/s, and relative to fault-free 1F1B")
