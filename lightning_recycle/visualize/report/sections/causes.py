"""Where the GPU time went."""

from __future__ import annotations

from lightning_recycle.visualize.report.charts import Series, legend, row_chart
from lightning_recycle.visualize.report.grouping import Variants, by, models_of
from lightning_recycle.visualize.report.markup import Cell, Markup, join, num, table
from lightning_recycle.visualize.report.names import failures_text, model_text
from lightning_recycle.visualize.report.records import Record, Results
from lightning_recycle.visualize.report.sections.section import Section, charts, note

__all__ = ["causes_section"]

_CAUSES = {
    "useful": Series("useful", "useful", "u-useful"),
    "bubble": Series("bubble", "bubble", "u-bubble"),
    "slow": Series("slow", "slow", "u-slow"),
    "idle": Series("idle", "idle", "u-idle"),
    "redone": Series("redone", "redone", "u-redone"),
    "reconfiguring": Series("reconfiguring", "reconfiguring", "u-reconfiguring"),
    "failed": Series("failed", "failed", "u-failed"),
}


def causes_section(results: Results) -> Section:
    """Training runs with random failures."""
    found = results.section("intervals") + results.section("others")
    return Section(
        "causes",
        "GPU time by cause",
        "At any moment every GPU is in exactly one state; the parts add up to the whole time.",
        _body(found) if found else None,
        "recycle-simulate experiment=intervals output=results",
    )


def _body(records: list[Record]) -> Markup:
    variants = Variants(records)
    models = models_of(records)
    causes = [cause for cause in _CAUSES if cause != "slow" or any(record["fractions"]["slow"] for record in records)]
    groups = by(records, lambda record: (record["model"]["name"], failures_text(record), record["duration"]))
    pictures, rows = [], []
    for (model, failures, _), runs in sorted(groups.items(), key=lambda group: models.index(group[0][0])):
        shown = []
        latest = {variants.of(run).key: run for run in runs}
        for series in variants.all:
            if series.key not in latest or not latest[series.key]["throughput"]:
                continue
            run = latest[series.key]
            shown.append((_short(series.name), [_part(run, cause) for cause in causes]))
            row: list[Cell | str] = [model_text(model), failures, series.name]
            row += [num(run["gpu_seconds"][cause], 0, key=cause) for cause in causes]
            rows.append([*row, num(sum(run["gpu_seconds"].values()), 0)])
        if shown:
            pictures.append(row_chart(f"{model_text(model)}, {failures}", shown, "of all GPU time"))
    columns = ["model", "failures", "policy", *(_CAUSES[cause].name for cause in causes), "all"]
    return join(
        (
            legend([_CAUSES[cause] for cause in causes], bars=True),
            charts(*pictures),
            table(columns, rows, left=3, caption="GPU-seconds of a run, by cause"),
            note(
                "Useful: computing samples that count, once. Bubble: waiting within a step. Slow: steps that last "
                "longer because of slow nodes. Idle: alive, not part of training. Redone: lost steps, and what is "
                "computed twice. Reconfiguring: pauses. Failed: down."
            ),
        )
    )


def _part(run: Record, cause: str) -> tuple[Series, float, str]:
    series, part = _CAUSES[cause], run["fractions"][cause]
    return series, part, f"{series.name}: {100 * part:.1f} %, {run['gpu_seconds'][cause] / 3600:,.1f} GPU-hours"


def _short(name: str) -> str:
    return name if len(name) <= 20 else f"{name[:19].rstrip(' (,')}\N{HORIZONTAL ELLIPSIS}"
