"""Throughput with part of the GPUs gone, by model size."""

from __future__ import annotations

from lightning_recycle.visualize.report.charts import Bar, bar_chart, legend
from lightning_recycle.visualize.report.grouping import Variants, models_of, short_model
from lightning_recycle.visualize.report.markup import Cell, Markup, join, num, table
from lightning_recycle.visualize.report.names import model_text
from lightning_recycle.visualize.report.records import Record, Results
from lightning_recycle.visualize.report.scales import linear
from lightning_recycle.visualize.report.sections.section import Section, charts, note, summary

__all__ = ["fractions_section"]


def fractions_section(results: Results) -> Section:
    """Runs in which a fraction of the nodes has failed."""
    found = results.section("fractions", "FailedFraction")
    return Section(
        "fractions",
        "Throughput with part of the GPUs failed",
        "Steady state with 1, 5 or 10 % of the GPUs gone for good, by model size.",
        _body(found) if found else None,
        "recycle-simulate experiment=fractions output=results",
    )


def _part(record: Record) -> float:
    return float(record["failures"]["settings"]["part"])


def _body(records: list[Record]) -> Markup:
    # A policy without failures is the same for every fraction and is shown beside each.
    unaffected = [record for record in records if record["policy"]["name"] == "FaultFree"]
    failing = [record for record in records if record["policy"]["name"] != "FaultFree"]
    variants, models = Variants(records), models_of(records)
    parts = sorted({_part(record) for record in failing})
    most = max(1.0, *(record["ratio"] for record in records))
    y = linear("throughput / fault-free 1F1B", most)
    names = [short_model(model) for model in models]
    pictures = []
    for part in parts:
        runs = [record for record in failing if _part(record) == part] + unaffected
        order = {series.key: place for place, series in enumerate(variants.all)}
        runs.sort(key=lambda run: order[variants.of(run).key])
        bars = [
            Bar(series, models.index(run["model"]["name"]), run["ratio"], summary(run, series.name))
            for run in runs
            for series in [variants.of(run)]
        ]
        pictures.append(bar_chart(f"{100 * part:g} % failed", bars, names, "model", y))
    rows = []
    for model in models:
        for series in variants.all:
            own = [r for r in records if r["model"]["name"] == model and variants.of(r) is series]
            if own:
                ratios = {_part(record): record["ratio"] for record in own}
                if own[0]["policy"]["name"] == "FaultFree":
                    ratios = dict.fromkeys(parts, own[0]["ratio"])
                cells = [num(ratios.get(part), key="ratio") for part in parts]
                row: list[Cell | str] = [model_text(model), series.name, num(own[0]["model"]["gpus"], 0), *cells]
                rows.append(row)
    columns = ["model", "policy", "GPUs", *(f"{100 * part:g} % failed" for part in parts)]
    above = (
        "Above 1: a schedule with decoupled back-propagation and staggered optimizer is faster than the 1F1B schedule "
        "that everything is compared with; the difference grows with the number of stages."
    )
    found = [legend(variants.all, bars=True), charts(*pictures)]
    if most > 1.02:
        found.append(note(above))
    return join((*found, table(columns, rows, left=2, caption="Throughput relative to fault-free 1F1B")))
