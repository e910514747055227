"""Questions about crossovers: spares that equal ReCycle, the rate at which restart falls behind, layers that move."""

from __future__ import annotations

from dataclasses import replace

from lightning_recycle.visualize.report.charts import Point, Series, legend, line_chart
from lightning_recycle.visualize.report.grouping import Variants, models_of, protocol_text, short_model
from lightning_recycle.visualize.report.markup import Cell, Markup, join, num, table
from lightning_recycle.visualize.report.names import duration_text, failures_text, model_text, setting_text
from lightning_recycle.visualize.report.records import Record, Results
from lightning_recycle.visualize.report.scales import linear, logarithmic
from lightning_recycle.visualize.report.sections.equal_schedules import schedule_of
from lightning_recycle.visualize.report.sections.section import Section, charts, note, summary, with_points

__all__ = ["layers_section", "restart_section", "spares_section"]

_EQUAL = 0.001
"""Throughputs relative to fault-free that differ by less count as equal."""
_AXIS = "throughput / fault-free 1F1B"


def spares_section(results: Results) -> Section:
    """Runs with different numbers of spares, and of ReCycle, under the same failures."""
    found = results.section("spares", "Poisson")
    kinds = {record["policy"]["name"] for record in found}
    return Section(
        "spares",
        "How many hot spares equal ReCycle?",
        "Spares are extra GPUs. The broken lines are ReCycle, which has none, with the same schedule.",
        _spares(found) if {"Spares", "Recycle"} <= kinds else None,
        "recycle-simulate experiment=spares output=results",
    )


def _mtbf(record: Record) -> float:
    return float(record["failures"]["settings"]["mtbf"])


def _spares(records: list[Record]) -> Markup:
    intervals = sorted({_mtbf(record) for record in records}, reverse=True)
    looks = {
        interval: Series(failures_text(_first(records, interval)), f"every{place}", f"q-{1 + place % 4}")
        for place, interval in enumerate(intervals)
    }
    most = max(_number(record) for record in records)
    ratios = [record["ratio"] for record in records]
    x = linear("spares", float(most), count=min(most, 8) or 1)
    y = linear(_AXIS, max(ratios), least=0.95 * min(ratios))
    pictures = []
    rows: list[list[Cell | str]] = []
    schedules = sorted({str(schedule_of(record)) for record in records})
    for model, schedule in ((model, schedule) for model in models_of(records) for schedule in schedules):
        lines = []
        own = [r for r in records if r["model"]["name"] == model and str(schedule_of(r)) == schedule]
        for interval in intervals:
            runs = [run for run in own if _mtbf(run) == interval]
            recycle = next((run for run in runs if run["policy"]["name"] == "Recycle"), None)
            spares = sorted((run for run in runs if run["policy"]["name"] == "Spares"), key=_number)
            if recycle is None or not spares:
                continue
            look = looks[interval]
            points = [Point(_number(run), run["ratio"], summary(run, f"{_number(run)} spares")) for run in spares]
            lines.append(with_points(look, points))
            lines.append(replace(look, level=recycle["ratio"], dashed=True, marker=None))
            shown = setting_text("schedule", schedule)
            rows.append([model_text(model), shown, duration_text(interval), *_spares_row(recycle, spares)])
        if lines:
            title = f"{model_text(model)}, {setting_text('schedule', schedule)}"
            pictures.append(line_chart(title, lines, x, y))
    columns = ["model", "schedule", "failure every", "ReCycle", "equal with", "best per GPU: spares", "ratio per GPU"]
    return join(
        (
            legend(list(looks.values())),
            charts(*pictures),
            table(columns, rows, left=3, caption="Spares that equal ReCycle"),
            note(
                f"Protocol: {protocol_text(records)}. Equal: within {100 * _EQUAL:g} points of throughput. Per GPU: "
                "spares count too."
            ),
        )
    )


def _number(record: Record) -> int:
    return int(record["policy"]["settings"].get("spares", 0))


def _first(records: list[Record], interval: float) -> Record:
    return next(record for record in records if _mtbf(record) == interval)


def _spares_row(recycle: Record, spares: list[Record]) -> list[Cell | str]:
    enough = next((run for run in spares if run["ratio"] >= recycle["ratio"] - _EQUAL), None)
    best = max(spares, key=lambda run: run["ratio_per_gpu"])
    return [
        num(recycle["ratio"], key="ratio"),
        Cell(f"more than {_number(spares[-1])}") if enough is None else num(_number(enough), 0),
        num(_number(best), 0),
        num(best["ratio_per_gpu"], key="ratio_per_gpu"),
    ]


def restart_section(results: Results) -> Section:
    """Restart under different failure rates, with the best of the checkpoint intervals, and ReCycle."""
    found = results.section("restart", "Poisson")
    kinds = {record["policy"]["name"] for record in found}
    return Section(
        "restart",
        "At which failure rate does restart fall behind?",
        "For each failure rate, restart has the best of the checkpoint intervals tried.",
        _restart(found) if {"Restart", "Recycle"} <= kinds else None,
        "recycle-simulate experiment=restart output=results",
    )


def _restart(records: list[Record]) -> Markup:
    variants = Variants(records, ignore=("checkpoint_every",))
    intervals = sorted({_mtbf(record) for record in records}, reverse=True)
    texts = [duration_text(interval) for interval in intervals]
    x = logarithmic("mean time between failures", [1 / interval for interval in intervals], texts)
    ratios = [record["ratio"] for record in records]
    pictures = []
    rows: list[list[Cell | str]] = []
    best: dict[tuple[str, str, float], Record] = {}
    for record in records:
        key = (record["model"]["name"], variants.of(record).key, _mtbf(record))
        if key not in best or record["ratio"] > best[key]["ratio"]:
            best[key] = record
    y = linear(_AXIS, max(ratios), least=0.95 * min(record["ratio"] for record in best.values()))
    for model in models_of(records):
        lines = []
        for series in variants.all:
            own = [record for (m, key, _), record in best.items() if (m, key) == (model, series.key)]
            points = [Point(1 / _mtbf(r), r["ratio"], f"{summary(r, series.name)}{_checkpoints(r)}") for r in own]
            lines.append(with_points(series, points))
        pictures.append(line_chart(model_text(model), lines, x, y))
        for interval in intervals:
            row: list[Cell | str] = [model_text(model), duration_text(interval)]
            for series in variants.all:
                run = best.get((model, series.key, interval))
                row.append(num(None if run is None else run["ratio"], key="ratio"))
                if series.color == "p-restart":
                    row.append(duration_text(_every(run)) if run else num(None))
            rows.append(row)
    columns = ["model", "failure every"]
    for series in variants.all:
        columns += [series.name, "checkpoint every"] if series.color == "p-restart" else [series.name]
    return join(
        (
            legend(variants.all),
            charts(*pictures),
            table(columns, rows, left=2, caption="Throughput relative to fault-free 1F1B"),
            note(f"Protocol: {protocol_text(records)}."),
        )
    )


def _every(record: Record) -> float:
    return float(record["policy"]["settings"]["checkpoint_every"])


def _checkpoints(record: Record) -> str:
    if record["policy"]["name"] != "Restart":
        return ""
    return f", a checkpoint every {duration_text(_every(record))}"


def layers_section(results: Results) -> Section:
    """ReCycle and Elastic layers with one failed GPU after the other."""
    found = results.section("layers", "FailedFraction")
    return Section(
        "layers",
        "When does re-routing alone fall behind moving layers?",
        "Steady state with some GPUs failed: re-routing alone, and moving layers between stages on top of it.",
        _layers(found) if found else None,
        "recycle-simulate experiment=layers output=results",
    )


def _layers(records: list[Record]) -> Markup:
    variants = Variants(records)
    ratios = [record["ratio"] for record in records]
    x = linear("failed GPUs", max(_failed(record) for record in records), count=8)
    y = linear(_AXIS, max(ratios), least=0.95 * min(ratios))
    pictures = []
    for model in models_of(records):
        own = [record for record in records if record["model"]["name"] == model]
        lines = []
        for series in variants.all:
            points = [Point(_failed(r), r["ratio"], summary(r, series.name)) for r in own if variants.of(r) is series]
            lines.append(with_points(series, points))
        pictures.append(line_chart(model_text(model), lines, x, y))
    found = {(r["model"]["name"], variants.of(r).key, _failed(r)): r["ratio"] for r in records}
    pairs = [(model, series) for model in models_of(records) for series in variants.all]
    rows: list[list[Cell | str]] = []
    for count in sorted({_failed(record) for record in records}):
        cells = [num(found.get((model, series.key, count)), key="ratio") for model, series in pairs]
        rows.append([num(count, 0), *cells])
    columns = ["failed GPUs", *(f"{short_model(model)}: {series.name}" for model, series in pairs)]
    caption = "Throughput relative to fault-free 1F1B"
    return join((legend(variants.all), charts(*pictures), table(columns, rows, left=0, caption=caption)))


def _failed(record: Record) -> int:
    """Number of GPUs, constant within a run."""
    return round(float(record["fractions"]["failed"]) * int(record["cluster"]["gpus"]))
