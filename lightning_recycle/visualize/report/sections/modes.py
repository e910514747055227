"""What each policy does over time: the mode in which it trains, and its throughput."""

from __future__ import annotations

from lightning_recycle.visualize.report.charts import Series, legend
from lightning_recycle.visualize.report.grouping import Variants, by, models_of
from lightning_recycle.visualize.report.markup import Cell, Markup, join, num, percent, table
from lightning_recycle.visualize.report.names import assumptions_text, failures_text, model_text
from lightning_recycle.visualize.report.records import Record, Results
from lightning_recycle.visualize.report.scales import linear
from lightning_recycle.visualize.report.sections.section import Section, charts, note
from lightning_recycle.visualize.report.strips import Segment, columns, strip_chart

__all__ = ["modes_section"]

_COLUMNS = 199  # two pixels each
_MOST_PICTURES = 8
_AVAILABLE = Series("available GPUs", "available", "c-available")
_MODES = {
    "all": Series("all live GPUs train", "all", "u-useful"),
    "some": Series("some live GPUs idle", "some", "u-bubble"),
    "lost": Series("undone later", "lost", "u-redone"),
    "paused": Series("pause", "paused", "u-reconfiguring"),
    "stopped": Series("standing still", "stopped", "u-idle"),
}


def modes_section(results: Results) -> Section:
    """Runs of several policies with the same failures."""
    return Section(
        "modes",
        "Modes over time",
        "What each policy does while nodes fail: the colour says what the GPUs do, the height is the throughput.",
        _body(_chosen(results)),
        "recycle-simulate experiment=traces output=results",
    )


def _chosen(results: Results) -> list[list[Record]]:
    """Groups with the same failures and at least two runs: traces, then others; of the largest model there is."""
    found: list[list[Record]] = []
    for records in (results.section("traces"), results.section("others"), results.section("intervals")):
        order = models_of(records)
        groups = by(records, lambda r: (failures_text(r), r["duration"]))
        for own in groups.values():
            largest = max((r["model"]["name"] for r in own), key=order.index)
            runs = [r for r in own if r["model"]["name"] == largest and r["throughput"]]
            batches = {r["model"]["global_batch"] for r in runs}
            runs = [r for r in runs if r["model"]["global_batch"] == min(batches)]
            if len(runs) > 1 and any(_disturbed(run) for run in runs):
                found.append(runs)
    return found[:_MOST_PICTURES]


def _disturbed(run: Record) -> bool:
    return any(event["kind"] in ("failure", "slow", "wrong") for event in run["timeline"]["events"])


def _body(groups: list[list[Record]]) -> Markup | None:
    if not groups:
        return None
    pictures, rows, used = [], [], set()
    for runs in groups:
        variants = Variants(runs)
        first = runs[0]
        hours = first["duration"] / 3600
        gpus = first["cluster"]["gpus"]
        live = [_segment(each, each["live_gpus"] / gpus, _AVAILABLE, "") for each in first["timeline"]["intervals"]]
        available = [
            Segment(each.begin, each.end, each.value, each.series, f"{each.value * gpus:.0f} of {gpus} GPUs live")
            for each in live
        ]
        strips = [("available GPUs", columns(available, hours, _COLUMNS))]
        most = max(interval["throughput"] for run in runs for interval in run["timeline"]["intervals"])
        latest = {variants.of(run).key: run for run in runs}
        for series in variants.all:
            run = latest[series.key]
            segments = _segments(run, most)
            strips.append((series.name, columns(segments, hours, _COLUMNS)))
            row: list[Cell | str] = [failures_text(run), model_text(run["model"]["name"]), series.name]
            for key in _MODES:
                length = sum(each.end - each.begin for each in segments if each.series.key == key)
                row.append(percent(length / hours))
            labels = {each.label for each in segments if each.series.key in ("all", "some")}
            used |= {each.series.key for _, strip in strips for each in strip}
            rows.append([*row, num(len(labels), 0), num(run["runs"][0]["ratio"], key="ratio")])
        title = f"{model_text(first['model']['name'])}, {failures_text(first)}"
        x = linear("hours", hours, count=8, exact=True)
        pictures.append(strip_chart(title, strips, x, 1.0, "{:.0%} of the height"))
    heads = ["failures", "model", "policy", *(series.name for series in _MODES.values()), "modes", "of fault-free"]
    shown = [_AVAILABLE, *(series for key, series in _MODES.items() if key in used)]
    return join(
        (
            legend(shown, bars=True),
            charts(*pictures, wide=True),
            note(
                "The first run of each policy. Heights are relative to the fastest policy of a picture and averaged "
                "over columns of two pixels, so a pause of some seconds lowers its column and is not seen as such. "
                "Spares have more nodes, and hence other failures. " + _largest(groups[0][0])
            ),
            table(
                heads,
                rows,
                left=3,
                caption="Parts of the time, number of modes (placements of the work), and throughput of these runs",
            ),
        )
    )


def _largest(record: Record) -> str:
    return f"{model_text(record['model']['name'])}: {assumptions_text(record)}."


def _segments(run: Record, most: float) -> list[Segment]:
    intervals = run["timeline"]["intervals"]
    found = []
    for each in intervals:
        key = each["state"]
        if key == "training":
            key = "all" if each["gpus"] >= min(each["live_gpus"], run["model"]["gpus"]) else "some"
        found.append(_segment(each, each["throughput"] / most, _MODES[key], each["label"]))
    return found


def _segment(interval: Record, value: float, series: Series, label: str) -> Segment:
    return Segment(interval["begin"] / 3600, interval["end"] / 3600, value, series, label)
