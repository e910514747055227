"""What each of the three techniques gains, in slots of a step and in simulated runs."""

from __future__ import annotations

from dataclasses import replace

from lightning_recycle.visualize.report.charts import Bar, Series, bar_chart, legend
from lightning_recycle.visualize.report.grouping import models_of, protocol_text, short_model
from lightning_recycle.visualize.report.markup import Cell, Markup, join, num, table
from lightning_recycle.visualize.report.names import failures_text, model_text
from lightning_recycle.visualize.report.paper import SOURCE, paper_slots
from lightning_recycle.visualize.report.records import Record, Results
from lightning_recycle.visualize.report.scales import linear
from lightning_recycle.visualize.report.sections.section import Section, charts, note, summary

__all__ = ["ablation_section"]

_STEPS = {
    "one_f_one_b": Series("1F1B, no failure", "one", "c-reference"),
    "zero_bubble": Series("zero-bubble, no failure", "zero", "c-zero"),
    "adaptive": Series("adaptive", "adaptive", "q-1"),
    "decoupled": Series("+ decoupled", "decoupled", "q-2"),
    "staggered": Series("+ staggered", "staggered", "q-3"),
}
_AXIS = ("1F1B", "zero-bubble", "adaptive", "decoupled", "staggered")
_NOTHING = Series("no re-routing", "nothing", "c-reference")


def ablation_section(results: Results) -> Section:
    """Steps of ``task=techniques``, and training runs marked as ablation."""
    runs = results.section("ablation")
    parts = []
    if results.techniques:
        parts.append(_slots(results.techniques))
    if runs:
        parts.append(_runs(runs))
    return Section(
        "ablation",
        "Ablation of the three techniques",
        "Adaptive pipelining, decoupled back-propagation and the staggered optimizer, switched on one after the other.",
        join(parts) if parts else None,
        "recycle-simulate experiment=ablation output=results",
    )


def _slots(records: list[Record]) -> Markup:
    pictures, rows, any_paper = [], [], False
    for record in records:
        grid, slots, paper = record["grid"], record["slots"], paper_slots(record)
        shape = f"{grid['stages']} x {grid['pipelines']} x {grid['microbatches']}"
        bars = [
            Bar(series, place, slots[name], f"{series.name}: {slots[name]:g} slots", f"{slots[name]:g}")
            for place, (name, series) in enumerate(_STEPS.items())
        ]
        y = linear("slots of a step", 1.06 * max(slots.values()))  # room for the text above a bar
        pictures.append(bar_chart(f"{shape}, {len(record['failed'])} failed", bars, _AXIS, "", y, one=True))
        any_paper |= bool(paper)
        row: list[Cell | str] = [shape, num(len(record["failed"]), 0)]
        for name in _STEPS:
            found = num(slots[name], 0, key=name)
            row.append(replace(found, text=f"{found.text} (paper {paper[name]:g})") if name in paper else found)
        row += [num(slots["one_f_one_b"] / slots["staggered"]), num(slots["zero_bubble"] / slots["staggered"])]
        rows.append(row)
    names = [series.name.removesuffix(", no failure") for series in _STEPS.values()]
    columns = ["grid", "failed", *names, "vs. 1F1B", "vs. zero-bubble"]
    text = (
        "Grid: stages x pipelines x micro-batches. F, B and W take one slot each. 1F1B and zero-bubble: without "
        "failures. The last columns are throughput with all techniques on."
    )
    text += f" Paper: {SOURCE}." if any_paper else ""
    return join((charts(*pictures), table(columns, rows, caption="Slots of a step"), note(text)))


def _runs(records: list[Record]) -> Markup:
    models = models_of(records)
    bars = []
    cells: dict[str, dict[str, Record]] = {model: {} for model in models}
    series = {each.key: each for each in (_NOTHING, *list(_STEPS.values())[2:])}
    for record in sorted(records, key=lambda record: list(series).index(_step(record))):
        each, model = series[_step(record)], record["model"]["name"]
        cells[model][each.key] = record
        bars.append(Bar(each, models.index(model), record["ratio"], summary(record, each.name)))
    y = linear("throughput / fault-free 1F1B", max(1.0, *(bar.value for bar in bars)))
    picture = bar_chart("In simulated runs", bars, [short_model(model) for model in models], "model", y)
    rows: list[list[Cell | str]] = []
    for model in models:
        found = [num(cells[model][key]["ratio"] if key in cells[model] else None, key="ratio") for key in series]
        rows.append([model_text(model), *found])
    return join(
        (
            legend(list(series.values()), bars=True),
            charts(picture),
            table(["model", *(each.name for each in series.values())], rows, caption="Relative to fault-free 1F1B"),
            note(f"Protocol: {failures_text(records[0])}, {protocol_text(records)}."),
        )
    )


def _step(record: Record) -> str:
    settings = record["policy"]["settings"]
    if not settings.get("adaptive", True):
        return _NOTHING.key
    if settings.get("staggered", True):
        return "staggered"
    return "decoupled" if settings.get("decoupled", True) else "adaptive"
