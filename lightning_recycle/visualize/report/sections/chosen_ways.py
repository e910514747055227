"""What a policy that chooses among several ways went on with after every change, and when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lightning_recycle.visualize.report.charts import Series, legend
from lightning_recycle.visualize.report.markup import Cell, Markup, join, num, percent, table
from lightning_recycle.visualize.report.names import assumptions_text, failures_text, model_text, number, policy_text
from lightning_recycle.visualize.report.records import Record, Results
from lightning_recycle.visualize.report.scales import linear
from lightning_recycle.visualize.report.sections.section import Section, charts, note
from lightning_recycle.visualize.report.strips import Segment, columns, strip_chart

__all__ = ["choices", "choices_section"]

_COLUMNS = 199  # two pixels each
_MOST_PICTURES = 6
_WAYS = {
    "": Series("all workers there", "whole", "u-useful"),
    "reroute": Series("re-routing", "reroute", "p-recycle"),
    "workers": Series("workers moved", "workers", "p-merge"),
    "layers": Series("layers moved", "layers", "p-elasticlayers"),
    "both": Series("workers and layers moved", "both", "p-dropreplica"),
}
_OTHER = Series("another way", "other", "c-reference")
_STATES = {
    "lost": Series("undone later", "undone", "u-redone"),
    "paused": Series("pause", "pause", "u-reconfiguring"),
    "stopped": Series("standing still", "still", "u-idle"),
}
_AVAILABLE = Series("available GPUs", "available", "c-available")


class Choice(NamedTuple):
    """From ``begin`` on (seconds) ``gpus`` GPUs went on in the way ``text``, until the next one."""

    begin: float
    gpus: int
    live: int
    text: str
    throughput: float


def choices_section(results: Results) -> Section:
    """Runs of a policy that chooses."""
    return Section(
        "choices",
        "The way chosen over time",
        "What the policy that chooses went on with after every failure and return: the colour says which way, the "
        "height is the throughput.",
        _body([run for run in results.training if choices(run)]),
        "recycle-simulate experiment=choices output=results",
    )


def choices(run: Record) -> list[Choice]:
    """The ways of the first run, one for each change; empty for policies that have only one way."""
    found: list[Choice] = []
    for each in run["timeline"]["intervals"]:
        if not each.get("choice") or each["state"] not in ("training", "lost"):
            continue
        text = str(each["choice"])
        if _way(run, each) in _WAYS and not text.startswith("pipelines"):  # which tell how many and how deep
            text = _WAYS[_way(run, each)].name
        if found and (found[-1].text, found[-1].gpus) == (text, each["gpus"]):
            continue
        found.append(Choice(each["begin"], each["gpus"], each["live_gpus"], text, each["throughput"]))
    return found if len(found) > 1 else []


def _way(run: Record, interval: Record) -> str:
    """The key of the way of an interval."""
    if interval["choice"] == "reroute" and interval["gpus"] == run["model"]["gpus"]:
        return ""
    return str(interval["choice"]).split(" ")[0]


def _body(runs: Sequence[Record]) -> Markup | None:
    if not runs:
        return None
    pictures, rows, parts, seen = [], [], [], set()
    timelines = [_segments(run) for run in runs[:_MOST_PICTURES]]
    used = {each.series.key for segments in timelines for each in segments}
    shown = [each for each in (*_WAYS.values(), _OTHER, *_STATES.values()) if each.key in used]
    for run, segments in zip(runs, timelines, strict=False):
        hours = run["duration"] / 3600
        gpus = run["cluster"]["gpus"]
        live = [
            Segment(each["begin"] / 3600, each["end"] / 3600, each["live_gpus"] / gpus, _AVAILABLE,
                    f"{each['live_gpus']} of {gpus} GPUs live")
            for each in run["timeline"]["intervals"]
        ]  # fmt: skip
        name = policy_text(run)
        strips = [(_AVAILABLE.name, columns(live, hours, _COLUMNS)), (name, columns(segments, hours, _COLUMNS))]
        seen |= {each.series.key for _, strip in strips for each in strip}  # the others are too short to be seen
        title = f"{model_text(run['model']['name'])}, batch {run['model']['global_batch']:,}, {failures_text(run)}"
        x = linear("hours", hours, count=8, exact=True)
        pictures.append(strip_chart(title, strips, x, 1.0, "{:.0%} of the height"))
        head: list[Cell | str] = [failures_text(run), model_text(run["model"]["name"]), name]
        shares: list[Cell | str] = [
            percent(sum(each.end - each.begin for each in segments if each.series is series) / hours)
            for series in shown
        ]
        found = choices(run)
        parts.append([*head, *shares, num(len(found) - 1, 0), num(run["runs"][0]["ratio"], key="ratio")])
        rows += [
            [*head, number(each.begin / 3600, 2), each.text, num(each.live, 0), num(each.gpus, 0),
             num(each.throughput / run["fault_free_throughput"] or None)]
            for each in found
        ]  # fmt: skip
    heads = ["failures", "model", "policy"]
    assumed = sorted({f"{model_text(run['model']['name'])}: {assumptions_text(run)}" for run in runs[:_MOST_PICTURES]})
    names = [series.name for series in shown]
    return join(
        (
            legend([each for each in (_AVAILABLE, *shown) if each.key in seen], bars=True),
            charts(*pictures, wide=True),
            note(
                "The first run of each. Re-routing, moving workers, layers or both are chosen by the planner that a "
                "real run asks. "
                f"Heights are relative to the fastest moment of a run. {'. '.join(assumed)}."
            ),
            table([*heads, *names, "changes", "of fault-free"], parts, left=3, caption="Parts of the time"),
            table(
                [*heads, "hours", "chosen", "GPUs live", "GPUs used", "of fault-free"], rows, left=5,
                caption="What was chosen, and when",
            ),
        )
    )  # fmt: skip


def _segments(run: Record) -> list[Segment]:
    intervals = run["timeline"]["intervals"]
    most = max(each["throughput"] for each in intervals) or 1.0
    found = []
    for each in intervals:
        series, label = _STATES.get(each["state"]), each["label"]
        if series is None:
            series, label = _WAYS.get(_way(run, each), _OTHER), each["choice"] or each["label"]
        found.append(Segment(each["begin"] / 3600, each["end"] / 3600, each["throughput"] / most, series, label))
    return found
