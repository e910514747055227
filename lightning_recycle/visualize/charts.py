"""Charts of the report: axes and shapes that the page's template writes as SVG.

A chart is as wide as a phone and has no colours of its own: shapes carry classes, which the page's style sheet colours
for light and dark. All shapes of a series have the class ``s-<key>``, by which the legend switches them on and off; the
page shows ``data-tip`` under the pointer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 420.0, 46.0, 12.0, 50.0, 42.0
_PLOT = 190.0
_MARKERS = {
    "circle": "M-3.6 0a3.6 3.6 0 1 0 7.2 0a3.6 3.6 0 1 0 -7.2 0z",
    "square": "M-3.2-3.2h6.4v6.4h-6.4z",
    "triangle": "M0-4.2L4 3.2H-4z",
    "diamond": "M0-4.6L4.2 0L0 4.6L-4.2 0z",
    "down": "M0 4.2L4-3.2H-4z",
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
    width: float = _WIDTH


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
        """Pixel of an x value."""
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
            found += [_path(f"M{self.left:.1f} {y:.1f}H{right:.1f}", kind), _text(text, self.left - 6, y + 3.5, "end")]
        found.append(_text(self.y.label, 4.0, self.top - 10, kind="label"))
        if self.y.low > 0:  # two strokes through the axis, and words above the plot
            cut = self.bottom - 9
            found += [_path(f"M{self.left - 5:.1f} {cut + shift:.1f}l10 -5", "axis cut") for shift in (0, 4)]
            found.append(_text("not from 0", right, self.top - 10, "end", "tick cut"))
        if x_labels:
            found.append(_path(f"M{self.left:.1f} {self.bottom:.1f}H{right:.1f}", "axis"))
            found += [_text(text, self.px(value), self.bottom + 16, "middle") for value, text in self.x.ticks]
            found.append(_text(self.x.label, self.left + self.width / 2, self.bottom + 34, "middle", "label"))
        return found


# -- shapes ------------------------------------------------------------------------------------------------------------


def _path(d: str, kind: str, **more: str) -> Shape:
    return Shape("path", {"d": d, "class": kind, **more})


def _text(text: str, x: float, y: float, anchor: str | None = None, kind: str = "tick") -> Shape:
    place: dict[str, str | float | None] = {"x": round(x, 1), "y": round(y, 1), "class": kind, "text-anchor": anchor}
    return Shape("text", place, text)


def _of(series: Series, kind: str) -> str:
    """The classes of a shape of ``series``."""
    return f"{kind} {series.color} series s-{series.key}"


def _stroke(series: Series, d: str) -> Shape:
    return _path(d, _of(series, "stroke dashed" if series.dashed else "stroke"))


def _mark(series: Series, x: float, y: float, **tip: str) -> Iterable[Shape]:
    if series.marker is not None:
        look = _of(series, "mark hollow" if series.dashed else "mark fill")
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
    """Lines with markers, and bands where points have a spread."""
    frame = _Frame(_LEFT, _TOP, _WIDTH - _LEFT - _RIGHT, _PLOT, x, y)
    shapes = frame.axes()
    for each in series:
        places = [(frame.px(point.x), frame.py(point.y)) for point in each.points]
        if len(places) > 1:
            shapes.append(_stroke(each, "M" + "L".join(f"{px:.1f} {py:.1f}" for px, py in places)))
        if any(point.spread for point in each.points):
            edges = [
                [(frame.px(point.x), frame.py(point.y + sign * point.spread)) for point in points]
                for sign, points in ((1, each.points), (-1, each.points[::-1]))
            ]
            outline = "L".join(f"{px:.1f} {py:.1f}" for px, py in (*edges[0], *edges[1]))
            shapes.append(_path(f"M{outline}z", _of(each, "band")))
        for point, (px, py) in zip(each.points, places, strict=True):
            shapes += _mark(each, px, py, **{"data-tip": point.tip})
    return Picture(title, _TOP + _PLOT + _BOTTOM, shapes)


def row_chart(title: str, rows: Sequence[tuple[str, Sequence[Segment]]], x: Axis) -> Picture:
    """Rows of segments, each below its name."""
    name, bar, gap, left = 15.0, 20.0, 6.0, 10.0
    frame = _Frame(left, 30.0, _WIDTH - left - 20, (name + bar + gap) * len(rows), x, Axis("", 0.0, 1.0, ()))
    shapes = frame.axes()
    for place, (row, segments) in enumerate(rows):
        floor = frame.top + place * (name + bar + gap) + name + bar
        shapes += [_text(row, left, floor - bar - 3, kind="name"), _path(f"M{left} {floor:.1f}h{frame.width}", "grid")]
        for each in segments:
            at, height = frame.px(each.begin), round(each.height * bar, 1)
            box = {"x": round(at, 1), "y": floor - height, "width": max(0.3, round(frame.px(each.end) - at, 1))}
            look = {"class": _of(each.series, "fill"), "data-tip": f"{row}: {each.tip}"}
            shapes.append(Shape("rect", {**box, "height": height, **look}))
    return Picture(title, frame.bottom + _BOTTOM, shapes)


def step_chart(title: str, above: Series, series: Sequence[Series], x: Axis, upper: Axis, lower: Axis) -> Picture:
    """Steps of ``above``, and below them steps of ``series``, on one x axis."""
    width, gap = _WIDTH - _LEFT - _RIGHT, 34.0
    first = _Frame(_LEFT, _TOP, width, 66.0, x, upper)
    second = _Frame(_LEFT, first.bottom + gap, width, 170.0, x, lower)
    floor = f"V{first.bottom:.1f}H{first.px(above.points[0].x):.1f}z"
    shapes = [*first.axes(x_labels=False), _path(_steps(first, above) + floor, _of(above, "area"))]
    shapes += [_stroke(above, _steps(first, above)), *second.axes()]
    shapes += [_stroke(each, _steps(second, each)) for each in series]
    return Picture(title, second.bottom + _BOTTOM, shapes)


def _steps(frame: _Frame, series: Series) -> str:
    """A value holds from its point's x to the next point's; the last point ends it."""
    points = series.points
    path = f"M{frame.px(points[0].x):.1f} {frame.py(points[0].y):.1f}"
    for before, point in pairwise(points):
        path += f"H{frame.px(point.x):.1f}"
        if point.y != before.y:
            path += f"V{frame.py(point.y):.1f}"
    return path
