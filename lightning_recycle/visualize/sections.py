"""Sections of the report: functions from results to charts, tables and notes.

A :class:`Section` is a list of parts, which the page's template writes as HTML. A section without results is left out.
A numeric cell shows a rounded number and keeps the exact one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

from lightning_recycle.visualize.charts import (
    Axis,
    Picture,
    Point,
    Segment,
    Series,
    line_chart,
    linear,
    logarithmic,
    row_chart,
    step_chart,
)
from lightning_recycle.visualize.simulation_results import (
    LEAST_RUNS,
    Record,
    Variants,
    assumptions_text,
    caution,
    cost_of,
    duration_text,
    failures_text,
    group_by,
    half_interval,
    models_of,
    number,
    policy_text,
    protocol_text,
    same_schedules,
    schedule_of,
    setting_text,
)

_BINS = 72
_MOST_PICTURES = 8
_RATIO = "throughput / fault-free 1F1B"
_SETTINGS = ("model", "batch", "failures", "length", "runs")
_IDEAL = "Ideal: what the live GPUs would achieve without bubbles, pauses and anything done twice."


@dataclass(frozen=True, slots=True)
class Cell:
    """Content of a cell: text, exact ``value``, and its ``key`` for programs."""

    text: str
    value: float | None = None
    key: str | None = None


@dataclass(frozen=True)
class Legend:
    """Names and looks of series; a click switches one off and on."""

    kind: ClassVar[str] = "legend"
    series: Sequence[Series]
    bars: bool = False


@dataclass(frozen=True)
class Charts:
    """Pictures side by side, as many as fit."""

    kind: ClassVar[str] = "charts"
    pictures: Sequence[Picture]
    wide: bool = False


@dataclass(frozen=True)
class Table:
    """A table, whose first ``left`` columns are text, and the last one may wrap.

    ``common``: what holds for all rows.
    """

    kind: ClassVar[str] = "table"
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell | str]]
    left: int
    wraps: bool = False
    common: str = ""


@dataclass(frozen=True)
class Paragraph:
    """A paragraph beside a chart or table."""

    kind: ClassVar[str] = "note"
    text: str


Part = Legend | Charts | Table | Paragraph


@dataclass(frozen=True)
class Section:
    """A section: the anchor ``key``, its heading, a sentence, and its parts."""

    key: str
    title: str
    lead: str
    parts: Sequence[Part]


def sections_of(records: Sequence[Record]) -> list[Section]:
    """The sections for which there are results, in their order; no paragraph twice."""
    makers = (_by_interval, _gpu_time, _traces, _costs, _failed_fractions, _all_runs)
    said: list[Part] = []

    def once(parts: Sequence[Part]) -> Iterator[Part]:
        for part in parts:
            if part not in said:
                yield part
            if isinstance(part, Paragraph):
                said.append(part)

    found = [section for make in makers if (section := make(records)) is not None]
    return [replace(section, parts=[*once(section.parts)]) for section in found]


# -- parts of several sections -----------------------------------------------------------------------------------------


def _num(value: float | None, digits: int = 3, key: str | None = None) -> Cell:
    """A number with that many decimal places; a dash for None."""
    return Cell("\N{EN DASH}") if value is None else Cell(number(value, digits), value, key)


def _table(caption: str, columns: Sequence[str], rows: Sequence[Sequence[Cell | str]], left: int) -> Table:
    """A table; ``common``, not a column, has a setting that all rows share.

    Other failures stand under the policy, in the first column.
    """
    once = {
        place: content if isinstance(content, str) else content.text
        for place, content in enumerate(rows[0])
        if columns[place] in _SETTINGS and all(row[place] == content for row in rows)
    }
    under = next((n for n, name in enumerate(columns) if name == "failures" and n not in once), 0)
    kept = [place for place in range(1, len(columns)) if place not in once and place != under]
    return Table(
        caption,
        [f"{columns[0]}, {columns[under]}" if under else columns[0], *(columns[place] for place in kept)],
        [[f"{row[0]}\n{row[under]}" if under else row[0], *(row[place] for place in kept)] for row in rows],
        left=1 + sum(place < left for place in kept),
        wraps=columns[-1] == "command",
        common="; ".join(f"{columns[place]}: {text}" for place, text in once.items()),
    )


def _unbroken(text: str) -> str:
    """``text``, to be broken only behind its commas."""
    return text.replace(" ", "\N{NO-BREAK SPACE}").replace(",\N{NO-BREAK SPACE}", ", ")


def _tip(record: Record, name: str) -> str:
    spread = f", from run to run {record['deviation']:.3f}" if len(record["runs"]) > 1 else ""
    return f"{name}: {record['throughput']:.2f} samples/s, {record['ratio']:.3f} of fault-free{spread}"


def _with_failures(records: Iterable[Record], *sources: str) -> list[Record]:
    return [record for record in records if record["failures"]["name"] in sources]


class _Scene(NamedTuple):
    """Runs of one picture: a model, a batch, and a schedule ("" for several)."""

    model: str
    batch: int
    schedule: str

    @property
    def title(self) -> str:
        schedule = f", {setting_text('schedule', self.schedule)}" if self.schedule else ""
        return f"{self.model}, batch {self.batch:,}{schedule}"


def _scenes(records: Sequence[Record], apart: bool) -> list[tuple[_Scene, list[Record]]]:
    """Runs by scene, models by size; ``apart``: a picture for each schedule."""
    order = models_of(records)
    found = group_by(
        records,
        lambda r: _Scene(r["model"]["name"], r["model"]["global_batch"], schedule_of(r) if apart else ""),
    )
    return sorted(found.items(), key=lambda scene: (order.index(scene[0].model), scene[0][1:]))


def _failure_names(records: Iterable[Record]) -> Callable[[Record], str]:
    """A run's failures in words, with its length where such runs differ in it."""
    lengths = {text: {run["duration"] for run in runs} for text, runs in group_by(records, failures_text).items()}

    def named(record: Record) -> str:
        text = failures_text(record)
        return f"{text}, runs of {duration_text(record['duration'])}" if len(lengths[text]) > 1 else text

    return named


def _assumed(records: Iterable[Record]) -> str:
    texts = sorted({f"{r['model']['name']}: {assumptions_text(r)}" for r in records})
    return ". ".join(texts) + "."


def _ratio_lines(
    records: Sequence[Record], x: Axis, x_of: Callable[[Record], float], heads: dict[float, str], apart_by: str = ""
) -> list[Part]:
    """Charts of the ratio to fault-free over ``x``, and a table by ``heads``."""
    unaffected = [record for record in records if record["policy"]["name"] == "FaultFree"]
    failing = [record for record in records if record["policy"]["name"] != "FaultFree"] or unaffected
    apart = same_schedules(failing)
    variants = Variants(records, with_schedule=not apart)
    drawn: list[tuple[_Scene, list[Series]]] = []
    rows: list[list[Cell | str]] = []
    for scene, own in _scenes(failing, apart):
        lines = []
        for series in variants.all:
            runs = {x_of(run): run for run in own if variants.of(run) is series}
            for run in unaffected:  # the same everywhere
                if variants.of(run) is series and run["model"] == own[0]["model"]:
                    runs |= dict.fromkeys(heads, run)
            if not runs:
                continue
            points = [
                Point(at, run["ratio"], _tip(run, series.name), half_interval(run))
                for at, run in sorted(runs.items())
                if run["throughput"]
            ]
            lines.append(replace(series, points=points))
            row: list[Cell | str] = [series.name, scene.title]
            for at in heads:
                if at not in runs:
                    row += [_num(None)] * 2
                elif not runs[at]["throughput"]:
                    row += [runs[at]["note"] or "none", _num(None)]
                else:
                    row.append(_num(runs[at]["ratio"], key="ratio"))
                    row.append(_num(runs[at]["fraction_of_ideal"], key="fraction_of_ideal"))
            rows.append(row)
        drawn.append((scene, [line for line in lines if line.points]))
    points = [point for _, lines in drawn for line in lines for point in line.points]
    pictures = []
    if points and len(heads) > 1:
        most, least = max(point.y + point.spread for point in points), min(point.y - point.spread for point in points)
        y = linear(_RATIO, most, least=0.98 * least if least > most / 2 else 0.0)
        pictures = [line_chart(f"{scene.title}{apart_by}", lines, x, y) for scene, lines in drawn if lines]
    columns = ["policy", "model"]
    for head in heads.values():
        columns += [f"{head}: of fault-free", f"{head}: of ideal"]
    caption = f"Throughput relative to fault-free 1F1B, and to the ideal{apart_by}"
    shown: list[Part] = [Legend(variants.all), Charts(pictures)] if pictures else []
    return [*map(Paragraph, caution(records)), *shown, _table(caption, columns, rows, left=2)]


# -- the sections ------------------------------------------------------------------------------------------------------


def _by_interval(records: Sequence[Record]) -> Section | None:
    """Runs with a mean time between failures of the cluster."""

    def interval(record: Record) -> float:
        return float(record["failures"]["settings"]["mtbf"])

    parts: list[Part] = []
    found = _with_failures(records, "Poisson")
    groups = group_by(found, lambda r: (r["duration"], r["failures"]["settings"]["repair"]))
    lengths, repairs = ({key[place] for key in groups} for place in (0, 1))
    for (length, repair), own in groups.items():
        apart_by = f", runs of {duration_text(length)}" if len(lengths) > 1 else ""
        if len(repairs) > 1:
            apart_by += f", back after {duration_text(repair)}" if repair is not None else ", never back"
        intervals = sorted({interval(record) for record in own}, reverse=True)
        heads = {1 / each: duration_text(each) for each in intervals}
        x = logarithmic("mean time between failures", list(heads), list(heads.values()))
        many = any(len(record["runs"]) >= LEAST_RUNS for record in own)
        bands = f" Bands, from {LEAST_RUNS} runs on: 95 % interval of the mean." if many else ""
        parts.append(Paragraph(f"Protocol: {protocol_text(own)}.{bands} {_assumed(own)}"))
        parts += _ratio_lines(own, x, lambda record: 1 / interval(record), heads, apart_by)
    lead = f"In each interval a node of the cluster fails, on average. {_IDEAL}"
    return Section("intervals", "Throughput by failure interval", lead, parts) if parts else None


def _failed_fractions(records: Sequence[Record]) -> Section | None:
    own = _with_failures(records, "FailedFraction")
    fractions = sorted({float(record["failures"]["settings"]["part"]) for record in own}.difference({0.0}))
    if not fractions:
        return None
    x = linear("failed, %", 100 * fractions[-1])
    heads = {100 * part: f"{100 * part:g} %" for part in fractions}
    parts = _ratio_lines(own, x, lambda record: 100 * float(record["failures"]["settings"]["part"]), heads)
    lead = f"Steady state with part of the GPUs gone for good, at least one where the part is above 0. {_IDEAL}"
    return Section("fractions", "Throughput with part of the GPUs failed", lead, parts)


_CAUSES = {
    name: Series(name, name, f"u-{name}") for name in ("useful", "bubble", "idle", "redone", "reconfiguring", "failed")
}


def _gpu_time(records: Sequence[Record]) -> Section | None:
    """Training runs with random failures, by what their GPUs did."""
    own = [
        record
        for record in records
        if record["failures"]["name"] not in ("TraceReplay", "FailedFraction") and record["throughput"]
    ]
    if not own:
        return None
    variants, models = Variants(own), models_of(own)
    named = _failure_names(own)
    groups = group_by(own, lambda r: (r["model"]["name"], r["model"]["global_batch"], named(r)))
    batches = len({batch for _, batch, _ in groups})
    pictures: list[Picture] = []
    for (model, batch, failures), runs in sorted(groups.items(), key=lambda group: models.index(group[0][0])):
        shown = []
        latest = {variants.of(run).key: run for run in runs}
        for series in variants.all:
            if (run := latest.get(series.key)) is None:
                continue
            segments, begin = [], 0.0
            for cause in _CAUSES:
                part = run["fractions"][cause]
                tip = f"{cause} {100 * part:.1f} %, {run['gpu_seconds'][cause] / 3600:,.1f} GPU-hours"
                segments += [Segment(_CAUSES[cause], begin, begin + part, tip)] if part > 0 else []
                begin += part
            shown.append((series.name, segments))
        ticks = tuple((place / 4, f"{25 * place} %") for place in range(5))
        title = f"{model}, {f'batch {batch:,}, ' if batches > 1 else ''}{failures}"
        pictures.append(row_chart(title, shown, Axis("of all GPU time", 0.0, 1.0, ticks)))
    rows: list[list[Cell | str]] = [
        [
            variants.of(run).name,
            run["model"]["name"],
            f"{run['model']['global_batch']:,}",
            _unbroken(named(run)),
            *(_num(100 * run["fractions"][cause], 1, cause) for cause in _CAUSES),
            _num(sum(run["gpu_seconds"].values()) / 3600, 0),
        ]
        for run in own
    ]
    columns = ["policy", "model", "batch", "failures", *_CAUSES, "GPU-hours"]
    parts: list[Part] = [
        *map(Paragraph, caution(own)),
        Legend([*_CAUSES.values()], bars=True),
        Charts(pictures),
        _table("GPU time of a run by cause, %", columns, rows, left=4),
        Paragraph(
            "Useful: computing samples that count, once. Bubble: waiting within a step. Idle: alive, not part of "
            "training. Redone: lost steps, and what is computed twice. Reconfiguring: pauses, also of checkpoints. "
            "Failed: down."
        ),
    ]
    lead = "At any moment every GPU is in exactly one state; the parts add up to the whole time."
    return Section("causes", "GPU time by cause", lead, parts)


_AVAILABLE = Series("available GPUs", "available", "c-available", marker=None)


def _traces(records: Sequence[Record]) -> Section | None:
    """Runs that follow a trace: pictures of the first ones, a table of all."""
    own = _with_failures(records, "TraceReplay")
    if not own:
        return None
    apart = same_schedules(own)
    variants = Variants(own, with_schedule=not apart)
    traces = sorted({record["failures"]["settings"]["trace"] for record in own})
    pictures: list[Picture] = []
    rows: list[list[Cell | str]] = []
    for scene, runs in _scenes(own, apart):
        for trace in traces:
            latest = {variants.of(r).key: r for r in runs if r["failures"]["settings"]["trace"] == trace}
            if latest:
                pictures.append(_replayed(f"{trace}, {scene.title}", latest, variants))
        for series in variants.all:
            ratios = {r["failures"]["settings"]["trace"]: r["ratio"] for r in runs if variants.of(r) is series}
            if ratios:
                cells = [_num(ratios.get(trace), key="ratio") for trace in traces]
                rows.append([series.name, scene.title, *cells])
    bin_text = duration_text(max(record["duration"] for record in own) / _BINS)
    some = f" The first {_MOST_PICTURES} of {len(pictures)} pictures." if len(pictures) > _MOST_PICTURES else ""
    parts: list[Part] = [
        *map(Paragraph, caution(own)),
        Legend([replace(series, marker=None) for series in (*variants.all, _AVAILABLE)]),
        Charts(pictures[:_MOST_PICTURES], wide=True),
        Paragraph(f"Throughput is averaged over {_BINS} equal parts of the time, of up to {bin_text}.{some}"),
        _table("Throughput relative to fault-free 1F1B", ["policy", "model", *traces], rows, left=2),
    ]
    lead = "Nodes come and go as they did in a public cloud: availability above, throughput below."
    return Section("traces", "Trace replay", lead, parts)


def _costs(records: Sequence[Record]) -> Section | None:
    """Runs whose GPUs have a price, by what fails."""
    own = [record for record in records if cost_of(record) is not None]
    if not own:
        return None
    variants = Variants(own)
    named = _failure_names(own)
    heads = list(group_by(own, named))
    rows: list[list[Cell | str]] = []
    for scene, runs in group_by(own, _priced).items():
        for series in variants.all:
            found = {named(run): cost_of(run) for run in runs if variants.of(run) is series}
            if found:
                rows.append([series.name, scene, *(_num(found.get(head), 4, "cost") for head in heads)])
    lead = "Nodes are paid for while they are up, whatever they do; prices are those of a GPU-hour."
    table = _table("Cost of 1,000 samples", ["policy", "model", *heads], rows, left=2)
    return Section("costs", "What a sample costs", lead, [*map(Paragraph, caution(own)), table])


def _priced(record: Record) -> str:
    model, cluster = record["model"], record["cluster"]
    grid = f"{model['pipelines']} x {model['stages']}, batch {model['global_batch']:,}"
    return f"{model['name']}, {grid}, {cluster['gpus']} GPUs at {cluster['price']:g}"


def _replayed(title: str, runs: dict[str, Record], variants: Variants) -> Picture:
    first = next(iter(runs.values()))
    hours = first["duration"] / 3600
    x = linear("hours", hours, count=8, exact=True)
    steps = [(each["begin"] / 3600, each["live_gpus"]) for each in first["timeline"]["intervals"]]
    live = replace(_AVAILABLE, points=[Point(*step) for step in (*steps, (hours, steps[-1][1]))])
    lines = []
    for series in reversed(variants.all):  # the first is drawn last, above the others
        if series.key in runs:
            means = averaged(runs[series.key], _BINS)
            points = [Point(place * hours / _BINS, mean) for place, mean in enumerate((*means, means[-1]))]
            lines.append(replace(series, points=points))
    most = max(first["fault_free_throughput"], *(point.y for line in lines for point in line.points))
    upper = linear("available GPUs", first["cluster"]["gpus"], count=2)
    return step_chart(title, live, lines, x, upper, linear("samples/s", most))


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


def _all_runs(records: Sequence[Record]) -> Section | None:
    """Every training run, and the commands that repeat them."""
    rows: list[list[Cell | str]] = []
    commands: list[list[Cell | str]] = []
    for record in records:
        names = [policy_text(record), record["model"]["name"], _unbroken(failures_text(record))]
        commands.append([*names, record["command"]])
        rows.append(
            [
                *names,
                *(_num(record[key], key=key) for key in ("ratio", "goodput", "ettr")),
                _num(record["throughput"], 2, "throughput"),
                *(_num(record[key], key=key) for key in ("fraction_of_ideal", "ratio_per_gpu", "mfu", "deviation")),
                _num(record["node_failures"], 1, "node_failures"),
                duration_text(record["duration"]),
                _num(len(record["runs"]), 0),
            ]
        )
    columns = ["policy", "model", "failures", "of fault-free", "goodput", "ETTR", "samples/s", "of ideal", "per GPU"]
    columns += ["MFU", "spread", "node failures", "length", "runs"]
    lead = (
        "Per GPU: of the cluster, spares included. Spread: standard deviation of the ratio from run to run. Of ideal: "
        "of what the live GPUs could do. Goodput: part of all GPU time spent on samples that count. ETTR (effective "
        "training time ratio): part of the time in which kept steps were trained. MFU: model FLOPs utilization."
    )
    results = _table("Results", columns, rows, left=3)
    repeats = _table("Commands that repeat them", [*columns[:3], "command"], commands, left=4)
    return Section("runs", "All training runs", lead, [results, repeats])
