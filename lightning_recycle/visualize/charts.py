"""Charts as SVG: Gantt charts of schedules, and those of the report.

A Gantt chart has a row per worker and a box per operation. Colour is the kind of operation, the number in a box is the
micro-batch; a box with an orange frame and hatching is a dead worker's micro-batch that a peer adopted ("1.3" is
micro-batch 3 of pipeline 1); a dead worker has a grey row. The title of a box appears under the mouse.

A chart of the report is axes and shapes, which the page's template writes as SVG. It is as wide as a phone and has no
colours of its own: shapes carry classes, which the page's style sheet colours for light and dark. All shapes of a
series have the class ``s-<key>``, by which the legend switches them on and off; the page shows ``data-tip`` under the
pointer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape, quoteattr

from lightning_recycle.errors import ConfigurationError
from lightning_recycle.files import write_atomically
from lightning_recycle.planning.grid import OpKind, ScheduledOp, Worker
from lightning_recycle.planning.schedule import Schedule


class _Look(NamedTuple):
    """Colour, legend text and text colour of a kind of operation."""

    color: str
    meaning: str
    ink: str = "#ffffff"


_FONT = "DejaVu Sans, Verdana, Helvetica, Arial, sans-serif"
_INK, _MUTED, _FAINT, _DEAD, _END = "#222222", "#555555", "#d5d9de", "#c9c9c9", "#c92a2a"
_ADOPTED, _ADOPTED_HATCH, _DEAD_HATCH = "#d9480f", "#f6b48f", "#e2e2e2"
_LOOKS = {
    OpKind.FORWARD: _Look("#4a86c8", "F  forward"),
    OpKind.RECOMPUTE: _Look("#a9c8ea", "R  forward, again", _INK),
    OpKind.BACKWARD_INPUT: _Look("#3f9b66", "B  backward, inputs"),
    OpKind.BACKWARD_WEIGHT: _Look("#b5dcb9", "W  backward, weights", _INK),
    OpKind.BACKWARD: _Look("#6f9f3f", "BW  backward, fused"),
    OpKind.REDUCE: _Look("#f0b429", "REDUCE", _INK),
    OpKind.STEP: _Look("#8e5bb5", "STEP"),
}

_MARGIN, _LABELS, _ROW, _GAP, _PIPELINE_GAP = 16.0, 128.0, 22.0, 2.0, 9.0
_LEFT = _MARGIN + _LABELS
_TITLE, _AXIS, _PANEL_GAP = 34.0, 24.0, 18.0
_MARK = 4.0  # width of an operation that takes no time


def gantt_svg(
    schedules: Schedule | Sequence[Schedule],
    titles: Sequence[str] | None = None,
    *,
    unit: str = "slots",
    iterations: int = 1,
    width: float = 1200.0,
) -> str:
    """The chart as an SVG document.

    Args:
        schedules: one schedule, or several to stack on one time scale.
        titles: one per schedule; by default the grid and the failed workers.
        unit: the unit of the schedules' costs, for the axis.
        iterations: number of consecutive iterations to draw, each shifted by the period and paler than the one before.
        width: width of the picture in pixels.

    Raises:
        ConfigurationError: when there is nothing to draw, or the wrong number of titles.
    """
    panels = [schedules] if isinstance(schedules, Schedule) else list(schedules)
    if not panels:
        raise ConfigurationError("no schedule to draw: give at least one.")
    if iterations < 1:
        raise ConfigurationError(f"iterations={iterations}: give at least 1.")
    names = list(map(_default_title, panels)) if titles is None else list(titles)
    if len(names) != len(panels):
        raise ConfigurationError(f"{len(names)} titles for {len(panels)} schedules: give one title for each.")
    end = max(
        op.end + (iterations - 1) * schedule.period
        for schedule in panels
        for ops in schedule.workers.values()
        for op in ops
    )
    chart = _Chart(unit, iterations, width, end, (width - _LEFT - _MARGIN - 8) / (end or 1.0))
    y, groups = _MARGIN / 2, []
    for schedule, name in zip(panels, names, strict=True):
        panel, y = chart.panel(schedule, name, y)
        groups += panel
        y += _PANEL_GAP
    legend, y = chart.legend(panels, y)
    return _document([*groups, legend], width, y + _MARGIN / 2)


def save_gantt(
    path: str | PathLike[str],
    schedules: Schedule | Sequence[Schedule],
    titles: Sequence[str] | None = None,
    **options: Any,
) -> Path:
    """Write the chart to ``path``, which ends with .svg; see :func:`gantt_svg`.

    Raises:
        ConfigurationError: for another suffix, and as :func:`gantt_svg`.
    """
    target = Path(path)
    if target.suffix.lower() != ".svg":
        raise ConfigurationError(f"cannot draw to {str(target)!r}: use a name that ends with .svg.")
    write_atomically(target, gantt_svg(schedules, titles, **options))
    return target


# -- elements ----------------------------------------------------------------------------------------------------------


def _document(groups: Iterable[str], width: float, height: float) -> str:
    size = f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}"'
    hatches = "".join(
        f'<pattern id="hatch-{color[1:]}" width="6" height="6" patternUnits="userSpaceOnUse" '
        f'patternTransform="rotate(45)"><path d="M0 0V6" stroke="{color}" stroke-width="2"/></pattern>\n'
        for color in (_ADOPTED, _DEAD_HATCH)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{_FONT}">\n<defs>\n{hatches}</defs>\n'
        f'<rect width="{width:g}" height="{height:g}" fill="#ffffff"/>\n' + "".join(groups) + "</svg>\n"
    )


def _group(name: str, elements: Iterable[str]) -> str:
    return f"<g data-name={quoteattr(name)}>\n" + "".join(elements) + "</g>\n"


def _element(tag: str, content: str, **attributes: str | float) -> str:
    """An SVG element; in the names of attributes, underscores stand for dashes."""
    texts = {name: value if isinstance(value, str) else str(round(value, 2)) for name, value in attributes.items()}
    shown = "".join(f' {name.replace("_", "-")}="{text}"' for name, text in texts.items())
    return f"<{tag}{shown}>{content}</{tag}>\n"


def _rect(
    x: float, y: float, width: float, height: float, fill: str, *, hatch: str = "", tip: str = "", **look: Any
) -> str:
    """A filled rectangle; ``hatch`` is the colour of diagonal lines on it."""
    content = f"<title>{escape(tip)}</title>" if tip else ""
    fills = [fill, f"url(#hatch-{hatch[1:]})"] if hatch else [fill]
    box = {"x": x, "y": y, "width": width, "height": height}
    return "".join(_element("rect", content, **box, fill=each, **look) for each in fills)


def _line(x1: float, y1: float, x2: float, y2: float, stroke: str, width: float, **look: Any) -> str:
    return _element("path", "", d=f"M{x1:.2f} {y1:.2f}L{x2:.2f} {y2:.2f}", stroke=stroke, stroke_width=width, **look)


def _text(x: float, y: float, text: str, *, size: float = 11.0, fill: str = _INK, **look: Any) -> str:
    """One line of text with its vertical middle at ``y``."""
    # 0.35 em below the middle is the baseline; "dominant-baseline" is not supported everywhere.
    return _element("text", escape(text), x=x, y=y + 0.35 * size, font_size=size, fill=fill, **look)


# -- layout ------------------------------------------------------------------------------------------------------------


def _default_title(schedule: Schedule) -> str:
    failed = ", ".join(map(str, sorted(schedule.failed)))
    return f"{schedule.grid} {'without ' + failed if failed else 'fault-free'}"


def _tick(end: float) -> float:
    """Distance between the axis' labels: 1, 2 or 5 times a power of ten."""
    if end <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(end / 20))
    return next(step for step in (power, 2 * power, 5 * power, 10 * power) if end / step <= 20 + 1e-9)


class _Chart(NamedTuple):
    """Measures of all panels: ``end`` in units of time, ``scale`` in pixels for each."""

    unit: str
    iterations: int
    width: float
    end: float
    scale: float

    def panel(self, schedule: Schedule, name: str, top: float) -> tuple[list[str], float]:
        """One schedule from ``top`` down, and its lower end."""
        grid = schedule.grid
        numbers = f"makespan {schedule.makespan:.4g}, period {schedule.period:.4g} {self.unit}"
        middle = top + _TITLE / 2
        heading = [
            _text(_MARGIN, middle, name, size=15.0, font_weight="bold"),
            _text(self.width - _MARGIN, middle, numbers, size=12.0, fill=_MUTED, text_anchor="end"),
        ]
        rows: list[str] = []
        y = first_row = top + _TITLE
        for pipeline in range(grid.lanes):
            middle = y + (grid.stages * (_ROW + _GAP) - _GAP) / 2
            label = _text(_MARGIN, middle, f"pipeline {pipeline}", fill=_MUTED, size=12.0)
            rows.append(_group(f"pipeline {pipeline}", [label]))
            for stage in range(grid.stages):
                worker = Worker(pipeline, stage)
                rows.append(_group(f"worker {worker}", self._row(schedule, worker, y)))
                y += _ROW + _GAP
            y += _PIPELINE_GAP
        bottom = y - _PIPELINE_GAP
        # A little longer than the boxes, so that ends of iterations can be compared between panels.
        x = _LEFT + schedule.makespan * self.scale
        makespan = _line(x, first_row - 5, x, bottom + 5, _END, 1.5, stroke_dasharray="5 4")
        axis = [_text(_LEFT - 8, bottom + 13, self.unit, size=10.0, fill=_MUTED, text_anchor="end")]
        step = _tick(self.end)
        for k in range(math.floor(self.end / step + 1e-9) + 1):
            x = _LEFT + k * step * self.scale
            axis.append(_line(x, first_row - 3, x, bottom + 4, _FAINT, 0.8))
            axis.append(_text(x, bottom + 13, f"{k * step:g}", size=10.0, fill=_MUTED, text_anchor="middle"))
        groups = [_group("title", heading), _group("axis", axis), *rows, _group("makespan", [makespan])]
        return groups, bottom + _AXIS

    def _row(self, schedule: Schedule, worker: Worker, y: float) -> Iterator[str]:
        dead = worker in schedule.failed
        fill = "#999999" if dead else _INK
        yield _text(_LEFT - 8, y + _ROW / 2, f"stage {worker.stage}", fill=fill, text_anchor="end")
        if dead:
            yield _rect(_LEFT, y, self.end * self.scale, _ROW, "#f3f3f3", stroke=_DEAD, hatch=_DEAD_HATCH)
            yield _text(_LEFT + 10, y + _ROW / 2, "failed", fill="#8a1f11", font_weight="bold")
        for iteration in range(self.iterations):
            pale: dict[str, Any] = {"opacity": 0.45} if iteration else {}
            for scheduled in schedule.workers.get(worker, ()):
                x = _LEFT + (scheduled.start + iteration * schedule.period) * self.scale
                yield from self._box(worker, scheduled, x, y, pale)

    def _box(
        self, worker: Worker, scheduled: ScheduledOp, x: float, y: float, pale: Mapping[str, Any]
    ) -> Iterator[str]:
        op, microbatch, look = scheduled.op, scheduled.op.microbatch, _LOOKS[scheduled.op.kind]
        tip = f"{op}: {scheduled.start:g} to {scheduled.end:g} {self.unit}"
        width = scheduled.duration * self.scale
        if width < _MARK and microbatch is None:
            # REDUCE and STEP without duration: REDUCE before, STEP after the moment they happen.
            offset = -_MARK if op.kind is OpKind.REDUCE else 0.0
            yield _rect(x + offset, y, _MARK, _ROW, look.color, tip=tip, **pale)
            return
        adopted = microbatch is not None and microbatch.pipeline != worker.pipeline
        if adopted:
            inset, height = max(width - 1.8, 0.5), _ROW - 1.8
            yield _rect(x + 0.9, y + 0.9, inset, height, look.color, tip=tip, stroke=_ADOPTED, stroke_width=1.8, **pale)
            # The hatch stays in a band at the bottom, where it does not make the number unreadable.
            yield _rect(x + 2, y + _ROW - 6, max(width - 4, 0.5), 4.0, _ADOPTED_HATCH, hatch=_ADOPTED, **pale)
        else:
            yield _rect(x, y, width, _ROW, look.color, tip=tip, stroke="#ffffff", stroke_width=0.8, **pale)
        if microbatch is None:
            label = op.kind.value
        else:
            label = f"{microbatch.pipeline}.{microbatch.index}" if adopted else f"{microbatch.index}"
        size = next((size for size in (10.5, 8.0) if len(label) * 0.65 * size <= width), None)
        if size is not None:
            middle = y + _ROW / 2 - (2.0 if adopted else 0.0)
            font: dict[str, Any] = {"font_weight": "bold"} if adopted else {}
            yield _text(x + width / 2, middle, label, size=size, fill=look.ink, text_anchor="middle", **font)

    def legend(self, panels: Sequence[Schedule], y: float) -> tuple[str, float]:
        """The legend from ``y`` down, in as many lines as it needs, and its lower end."""
        used = {op.op.kind for schedule in panels for ops in schedule.workers.values() for op in ops}
        entries = [(look.meaning, _rect(0, 0, 14, 14, look.color)) for kind, look in _LOOKS.items() if kind in used]
        if any(schedule.failed for schedule in panels):
            frame = _rect(1, 1, 12, 12, "#ffffff", stroke=_ADOPTED, stroke_width=1.8)
            entries.append(
                ("adopted (pipeline.micro-batch)", frame + _rect(2, 8, 10, 4, _ADOPTED_HATCH, hatch=_ADOPTED))
            )
        entries.append(("end of the iteration", _line(7, -1, 7, 15, _END, 1.5, stroke_dasharray="5 4")))
        elements, x = [], _LEFT
        for text, symbol in entries:
            extent = 40 + 5.5 * len(text)
            if x > _LEFT and x + extent > self.width:
                x, y = _LEFT, y + 20
            drawn = f'<svg x="{x:.2f}" y="{y:.2f}" overflow="visible">\n{symbol}</svg>\n'
            elements += [drawn, _text(x + 20, y + 7, text)]
            x += extent
        return _group("legend", elements), y + 20


_CHART_WIDTH, _PLOT_LEFT, _PLOT_RIGHT, _PLOT_TOP, _PLOT_BOTTOM = 420.0, 46.0, 12.0, 50.0, 42.0
_PLOT_HEIGHT = 190.0
_MARKERS = {
    "circle": "M-3.6 0a3.6 3.6 0 1 0 7.2 0a3.6 3.6 0 1 0 -7.2 0z",
    "square": "M-3.2-3.2h6.4v6.4h-6.4z",
    "triangle": "M0-4.2L4 3.2H-4z",
    "diamond": "M0-4.6L4.2 0L0 4.6L-4.2 0z",
    "down": "M0 4.2L4-3.2H-4z",
    "left": "M-4.2 0L3.2-4V4z",
    "right": "M4.2 0L-3.2-4V4z",
    "hexagon": "M-2.1-3.6h4.2L4.2 0L2.1 3.6h-4.2L-4.2 0z",
    "star": "M0-4.8L1.2-1.6L4.6-1.5L1.9 .6L2.8 3.9L0 2L-2.8 3.9L-1.9 .6L-4.6-1.5L-1.2-1.6z",
    "plus": "M-1.2-4h2.4v2.8h2.8v2.4h-2.8v2.8h-2.4v-2.8h-2.8v-2.4h2.8z",
    "cross": "M-3.4-2.2l1.2-1.2L0-1.2l2.2-2.2l1.2 1.2L1.2 0l2.2 2.2l-1.2 1.2L0 1.2l-2.2 2.2l-1.2-1.2L-1.2 0z",
}


@dataclass(frozen=True)
class Shape:
    """An SVG element with its attributes, and its text."""

    tag: str
    attributes: Mapping[str, str | float | None]
    text: str = ""


@dataclass(frozen=True)
class Picture:
    """A chart: its title, its size in pixels, and its shapes."""

    title: str
    height: float
    shapes: Sequence[Shape]
    width: float = _CHART_WIDTH

    @property
    def is_dotted(self) -> bool:
        """Whether a line lies along another one."""
        return any(" along " in str(shape.attributes.get("class")) for shape in self.shapes)


@dataclass(frozen=True)
class Point:
    """A value of a series; ``spread`` is drawn up and down."""

    x: float
    y: float
    tip: str = ""
    spread: float = 0.0


@dataclass(frozen=True)
class Series:
    """Points that belong together, in the order of x.

    ``key`` is the same in all charts of a section; ``color`` is a class. ``dashed``: whether lines are dashed and
    markers hollow, unlike those of another series of the same colour.
    """

    name: str
    key: str
    color: str
    points: Sequence[Point] = field(default=())
    marker: str | None = "circle"
    dashed: bool = False


@dataclass(frozen=True)
class Segment:
    """Part of a row on the x axis; ``height`` is a fraction of the row's."""

    series: Series
    begin: float
    end: float
    tip: str
    height: float = 1.0


# -- axes --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Axis:
    """Values from ``low`` to ``high``, with ticks (value, text)."""

    label: str
    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    log: bool = False

    def part(self, value: float) -> float:
        """Where ``value`` is between ``low`` (0) and ``high`` (1)."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def linear(label: str, most: float, *, least: float = 0.0, count: int = 5, exact: bool = False) -> Axis:
    """A scale from ``least`` to ``most`` or beyond, with about ``count`` round ticks.

    ``exact``: whether to end at ``most``, which then need not be a tick.
    """
    raw = ((most - least) or 1.0) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    low = math.floor(least / step + 1e-9) * step
    high = math.ceil(most / step - 1e-9) * step if most > low else low + step
    digits = max(0, -math.floor(math.log10(step) + 1e-9) + (step / power == 2.5))
    ticks = [low + number * step for number in range(round((high - low) / step) + 1)]
    if exact and most > low:
        high, ticks = most, [tick for tick in ticks if tick <= most]
    return Axis(label, low, high, tuple((tick, f"{tick:,.{digits}f}") for tick in ticks))


def logarithmic(label: str, values: Sequence[float], texts: Sequence[str]) -> Axis:
    """Around ``values``, which are the ticks, with ``texts``."""
    least, most = min(values), max(values)
    room = (most / least) ** 0.06 if most > least else 1.5
    return Axis(label, least / room, most * room, tuple(zip(values, texts, strict=True)), log=True)


@dataclass(frozen=True)
class _Frame:
    """The area of a chart within its picture, in pixels, and its two axes."""

    left: float
    top: float
    width: float
    height: float
    x: Axis
    y: Axis

    @property
    def bottom(self) -> float:
        return self.top + self.height

    def px(self, value: float) -> float:
        return self.left + self.x.part(value) * self.width

    def py(self, value: float) -> float:
        """Pixel of a y value, which is kept within the frame."""
        return self.top + (1 - self.y.part(min(max(value, self.y.low), self.y.high))) * self.height

    def axes(self, *, x_labels: bool = True) -> list[Shape]:
        """Grid lines, ticks and labels."""
        right = self.left + self.width
        found = []
        for value, text in self.y.ticks:
            y = self.py(value)
            kind = "axis" if value == self.y.low and not self.y.log else "grid"
            found += [_path(f"M{self.left:.1f} {y:.1f}H{right:.1f}", kind), _label(text, self.left - 6, y + 3.5, "end")]
        found.append(_label(self.y.label, 4.0, self.top - 10, kind="label"))
        if self.y.low > 0:  # two strokes through the axis, and words above the plot
            cut = self.bottom - 9
            found += [_path(f"M{self.left - 5:.1f} {cut + shift:.1f}l10 -5", "axis cut") for shift in (0, 4)]
            found.append(_label("not from 0", right, self.top - 10, "end", "tick cut"))
        if x_labels:
            found.append(_path(f"M{self.left:.1f} {self.bottom:.1f}H{right:.1f}", "axis"))
            found += [_label(text, self.px(value), self.bottom + 16, "middle") for value, text in self.x.ticks]
            found.append(_label(self.x.label, self.left + self.width / 2, self.bottom + 34, "middle", "label"))
        return found


# -- shapes ------------------------------------------------------------------------------------------------------------


def _path(d: str, kind: str, **more: str) -> Shape:
    return Shape("path", {"d": d, "class": kind, **more})


def _label(text: str, x: float, y: float, anchor: str | None = None, kind: str = "tick") -> Shape:
    place: dict[str, str | float | None] = {"x": round(x, 1), "y": round(y, 1), "class": kind, "text-anchor": anchor}
    return Shape("text", place, text)


def _series_classes(series: Series, kind: str) -> str:
    """The classes of a shape of ``series``."""
    return f"{kind} {series.color} series s-{series.key}"


def _stroke(series: Series, d: str, along: bool = False) -> Shape:
    look = " along" if along else " dashed" if series.dashed else ""
    return _path(d, _series_classes(series, f"stroke{look}"))


def _along(places: Sequence[tuple[float, float]], drawn: set[Any]) -> bool:
    """Whether half of a line through ``places`` covers those ``drawn``; adds it."""
    segments = set(pairwise((round(x), round(y)) for x, y in places))
    hidden = len(drawn & segments)
    drawn |= segments
    return 2 * hidden >= max(1, len(segments))


def _mark(series: Series, x: float, y: float, look: str = "", **tip: str) -> Iterable[Shape]:
    if series.marker is not None:
        look = _series_classes(series, f"mark {look or ('hollow' if series.dashed else 'fill')}")
        yield _path(_MARKERS[series.marker], look, transform=f"translate({x:.1f} {y:.1f})", **tip)


def swatch(series: Series, *, bars: bool = False) -> list[Shape]:
    """The look of a series in the legend, 18 by 12 pixels; ``bars``: a filled area."""
    if bars:
        return [Shape("rect", {"x": 3, "y": 1, "width": 12, "height": 10, "rx": 2, "class": f"fill {series.color}"})]
    look = f"stroke {series.color}{' dashed' if series.dashed else ''}"
    mark = [] if series.marker is None else list(_mark(series, 9, 6))
    return [_path("M0 6H18", look), *mark]


# -- charts ------------------------------------------------------------------------------------------------------------


def line_chart(title: str, series: Sequence[Series], x: Axis, y: Axis) -> Picture:
    """Lines with markers, dotted along earlier ones; bands where points have a spread."""
    frame = _Frame(_PLOT_LEFT, _PLOT_TOP, _CHART_WIDTH - _PLOT_LEFT - _PLOT_RIGHT, _PLOT_HEIGHT, x, y)
    shapes, drawn = frame.axes(), set[Any]()
    for each in series:
        places = [(frame.px(point.x), frame.py(point.y)) for point in each.points]
        along = _along(places, drawn)
        if len(places) > 1:
            shapes.append(_stroke(each, "M" + "L".join(f"{px:.1f} {py:.1f}" for px, py in places), along))
        if any(point.spread for point in each.points):
            edges = [
                [(frame.px(point.x), frame.py(point.y + sign * point.spread)) for point in points]
                for sign, points in ((1, each.points), (-1, each.points[::-1]))
            ]
            outline = "L".join(f"{px:.1f} {py:.1f}" for px, py in (*edges[0], *edges[1]))
            shapes.append(_path(f"M{outline}z", _series_classes(each, "band")))
        for point, (px, py) in zip(each.points, places, strict=True):
            shapes += _mark(each, px, py, "ring" if along else "", **{"data-tip": point.tip})
    return Picture(title, _PLOT_TOP + _PLOT_HEIGHT + _PLOT_BOTTOM, shapes)


def row_chart(title: str, rows: Sequence[tuple[str, Sequence[Segment]]], x: Axis) -> Picture:
    """Rows of segments, each below its name."""
    name, bar, gap, left = 15.0, 20.0, 6.0, 10.0
    frame = _Frame(left, 30.0, _CHART_WIDTH - left - 20, (name + bar + gap) * len(rows), x, Axis("", 0.0, 1.0, ()))
    shapes = frame.axes()
    for place, (row, segments) in enumerate(rows):
        floor = frame.top + place * (name + bar + gap) + name + bar
        shapes += [_label(row, left, floor - bar - 3, kind="name"), _path(f"M{left} {floor:.1f}h{frame.width}", "grid")]
        for each in segments:
            at, height = frame.px(each.begin), round(each.height * bar, 1)
            box = {"x": round(at, 1), "y": floor - height, "width": max(0.3, round(frame.px(each.end) - at, 1))}
            look = {"class": _series_classes(each.series, "fill"), "data-tip": f"{row}: {each.tip}"}
            shapes.append(Shape("rect", {**box, "height": height, **look}))
    return Picture(title, frame.bottom + _PLOT_BOTTOM, shapes)


def step_chart(title: str, above: Series, series: Sequence[Series], x: Axis, upper: Axis, lower: Axis) -> Picture:
    """Steps of ``above``, and below them steps of ``series``, on one x axis."""
    width, gap = _CHART_WIDTH - _PLOT_LEFT - _PLOT_RIGHT, 34.0
    first = _Frame(_PLOT_LEFT, _PLOT_TOP, width, 66.0, x, upper)
    second = _Frame(_PLOT_LEFT, first.bottom + gap, width, 170.0, x, lower)
    floor = f"V{first.bottom:.1f}H{first.px(above.points[0].x):.1f}z"
    shapes = [*first.axes(x_labels=False), _path(_steps(first, above) + floor, _series_classes(above, "area"))]
    shapes += [_stroke(above, _steps(first, above)), *second.axes()]
    drawn = set[Any]()
    for each in series:
        along = _along([(second.px(point.x), second.py(point.y)) for point in each.points], drawn)
        shapes.append(_stroke(each, _steps(second, each), along))
    return Picture(title, second.bottom + _PLOT_BOTTOM, shapes)


def _steps(frame: _Frame, series: Series) -> str:
    """A value holds from its point's x to the next point's; the last point ends it."""
    points = series.points
    path = f"M{frame.px(points[0].x):.1f} {frame.py(points[0].y):.1f}"
    for before, point in pairwise(points):
        path += f"H{frame.px(point.x):.1f}"
        if point.y != before.y:
            path += f"V{frame.py(point.y):.1f}"
    return path
