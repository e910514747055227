"""Charts as inline SVG: lines, grouped bars, stacked rows, and steps below steps.

Concept: a chart is as wide as a phone (its picture scales, its text stays readable) and has no colours of its own:
shapes carry classes, which the page's style sheet colours for light and dark. All parts of a series have the class
``s-<key>``, by which the legend switches them on and off; the page shows ``data-tip`` under the pointer.

Must not know: simulations, pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from lightning_recycle.visualize.report.markup import Markup, element, join
from lightning_recycle.visualize.report.scales import Axis, Frame, categories

__all__ = ["Bar", "Point", "Series", "bar_chart", "legend", "line_chart", "picture", "replay_chart", "row_chart"]

_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 420.0, 46.0, 12.0, 50.0, 42.0
_PLOT = 190.0
_MARKERS = {
    "dash": "M-7-1.3h14v2.6h-14z",
    "circle": "M-3.6 0a3.6 3.6 0 1 0 7.2 0a3.6 3.6 0 1 0 -7.2 0z",
    "square": "M-3.2-3.2h6.4v6.4h-6.4z",
    "triangle": "M0-4.2L4 3.2H-4z",
    "diamond": "M0-4.6L4.2 0L0 4.6L-4.2 0z",
    "down": "M0 4.2L4-3.2H-4z",
    "cross": "M-3.4-2.2l1.2-1.2L0-1.2l2.2-2.2l1.2 1.2L1.2 0l2.2 2.2l-1.2 1.2L0 1.2l-2.2 2.2l-1.2-1.2L-1.2 0z",
}


@dataclass(frozen=True)
class Point:
    """One value; ``spread`` is drawn up and down, as a band where points are connected, else as a bar."""

    x: float
    y: float
    tip: str
    spread: float = 0.0


@dataclass(frozen=True)
class Series:
    """Points that belong together.

    Args:
        name: name in the legend.
        key: key of the series, the same in all charts of a section.
        color: class that sets the colour.
        points: points in the order of x.
        marker: shape of the markers; None for none.
        dashed, hollow: how it differs from a series of the same colour.
        line: whether points are connected.
        level: a horizontal line at this y instead of points.
        shift: pixels to the right, to tell series at the same x apart.
    """

    name: str
    key: str
    color: str
    points: Sequence[Point] = field(default=())
    marker: str | None = "circle"
    dashed: bool = False
    hollow: bool = False
    line: bool = True
    level: float | None = None
    shift: float = 0.0


@dataclass(frozen=True)
class Bar:
    """One bar of a series in a category, with a value, a tip and a text above it."""

    series: Series
    place: int
    value: float
    tip: str
    text: str = ""


def legend(series: Sequence[Series], *, bars: bool = False) -> Markup:
    """Names and looks of the series; a click switches one off and on."""
    items = []
    for each in series:
        if bars:
            look = element("rect", x=3.0, y=1.0, width=12.0, height=10.0, rx=2.0, class_=f"fill {each.color}")
        else:
            look = join([*_stroke(each, "M0 6H18"), *_mark(each, 9, 6)])
        swatch = element("svg", look, viewBox="0 0 18 12", width="18", height="12", aria_hidden="true")
        items.append(element("button", swatch, each.name, type="button", data_series=each.key, aria_pressed="true"))
    return element("div", *items, class_="legend")


def line_chart(title: str, series: Sequence[Series], x: Axis, y: Axis) -> Markup:
    """Lines with markers; series with a ``level`` are horizontal lines."""
    frame = Frame(_LEFT, _TOP, _WIDTH - _LEFT - _RIGHT, _PLOT, x, y)
    return picture(title, _TOP + _PLOT + _BOTTOM, [*frame.axes(), *(_series(frame, each) for each in series)])


def _series(frame: Frame, series: Series) -> Markup:
    shapes: list[Markup] = []
    if series.level is not None:
        shapes += _stroke(series, f"M{frame.left} {frame.py(series.level):.1f}H{frame.left + frame.width}")
    places = [(frame.px(point.x) + series.shift, frame.py(point.y)) for point in series.points]
    if series.line and len(places) > 1:
        shapes += _stroke(series, "M" + "L".join(f"{px:.1f} {py:.1f}" for px, py in places))
    band = series.line and len(places) > 1 and any(point.spread for point in series.points)
    if band:
        edges = [
            [
                f"{px:.1f} {frame.py(min(max(point.y + sign * point.spread, frame.y.low), frame.y.high)):.1f}"
                for point, (px, _) in zip(series.points, places, strict=True)
            ]
            for sign in (1, -1)
        ]
        outline = "L".join([*edges[0], *reversed(edges[1])])
        shapes.append(element("path", d=f"M{outline}z", class_=f"band {series.color}"))
    for point, (px, _) in zip(series.points, places, strict=True):
        if point.spread and not band:
            low, high = (min(max(point.y + sign * point.spread, frame.y.low), frame.y.high) for sign in (-1, 1))
            shapes.append(element("path", d=f"M{px:.1f} {frame.py(low):.1f}V{frame.py(high):.1f}", class_="spread"))
    for point, (px, py) in zip(series.points, places, strict=True):
        shapes += _mark(series, px, py, point.tip)
    return element("g", *shapes, class_=f"series {series.color} s-{series.key}")


def _stroke(series: Series, path: str) -> list[Markup]:
    if not series.line and series.level is None:
        return []
    return [element("path", d=path, class_=f"stroke {series.color}{' dashed' if series.dashed else ''}")]


def _mark(series: Series, x: float, y: float, tip: str | None = None) -> list[Markup]:
    if series.marker is None:
        return []
    look = "hollow" if series.hollow else "fill"
    path, place = _MARKERS[series.marker], f"translate({x:.1f} {y:.1f})"
    return [element("path", d=path, transform=place, class_=f"mark {look} {series.color}", data_tip=tip)]


def bar_chart(
    title: str, bars: Sequence[Bar], names: Sequence[str], x_label: str, y: Axis, one: bool = False
) -> Markup:
    """Bars in groups, one group for each of ``names``; ``one``: a single bar in each, whatever its series."""
    frame = Frame(_LEFT, _TOP, _WIDTH - _LEFT - _RIGHT, _PLOT, categories(x_label, names), y)
    order = list(dict.fromkeys(bar.series.key for bar in bars))
    slots = 1 if one else len(order)
    width = min(34.0, frame.width / len(names) * 0.8 / slots)
    shapes = []
    for bar in bars:
        offset = 0.0 if one else (order.index(bar.series.key) - (slots - 1) / 2) * width
        left, top = frame.px(bar.place) + offset - width / 2, frame.py(bar.value)
        parts = [
            element(
                "rect", x=round(left + 0.5, 1), y=round(top, 1), width=round(max(1.0, width - 1), 1),
                height=round(max(0.0, frame.py(y.low) - top), 1), rx=1.5, class_=f"fill {bar.series.color}",
                data_tip=bar.tip,
            )
        ]  # fmt: skip
        if bar.text:
            middle = round(left + width / 2, 1)
            parts.append(element("text", bar.text, x=middle, y=top - 4, class_="value", text_anchor="middle"))
        shapes.append(element("g", *parts, class_=f"series s-{bar.series.key}"))
    return picture(title, _TOP + _PLOT + _BOTTOM, [*frame.axes(), *shapes])


def row_chart(title: str, rows: Sequence[tuple[str, Sequence[tuple[Series, float, str]]]], label: str) -> Markup:
    """Rows of 100 %, divided into (series, part, tip)."""
    row, left = 24.0, 134.0
    height = row * len(rows)
    ticks = tuple((number / 4, f"{25 * number} %") for number in range(5))
    frame = Frame(left, 34.0, _WIDTH - left - 20, height, Axis(label, 0.0, 1.0, ticks), Axis("", 0.0, 1.0, ()))
    shapes = frame.axes()
    for place, (name, parts) in enumerate(rows):
        top, begin = frame.top + place * row, 0.0
        shapes.append(element("text", name, x=left - 8, y=top + row / 2 + 4, class_="name", text_anchor="end"))
        for series, part, tip in parts:
            if part > 0:
                x, width = frame.px(begin), part * frame.width
                box = {"x": round(x, 1), "y": top + 3, "width": round(width, 1), "height": row - 6}
                shapes.append(element("rect", **box, class_=f"fill {series.color} series s-{series.key}", data_tip=tip))
            begin += part
    return picture(title, frame.top + height + _BOTTOM, shapes)


def replay_chart(title: str, available: Series, series: Sequence[Series], x: Axis, upper: Axis, lower: Axis) -> Markup:
    """Steps of ``available`` above, steps of ``series`` below, on one time axis."""
    width, gap = _WIDTH - _LEFT - _RIGHT, 34.0
    above = Frame(_LEFT, _TOP, width, 66.0, x, upper)
    below = Frame(_LEFT, _TOP + above.height + gap, width, 170.0, x, lower)
    shapes = [*above.axes(x_labels=False), _steps(above, available, area=True), *below.axes()]
    shapes += [_steps(below, each) for each in series]
    return picture(title, below.top + below.height + _BOTTOM, shapes)


def _steps(frame: Frame, series: Series, *, area: bool = False) -> Markup:
    """A value holds from its point's x to the next point's; the last point ends it."""
    points = series.points
    path = f"M{frame.px(points[0].x):.1f} {frame.py(points[0].y):.1f}"
    for before, point in pairwise(points):
        path += f"H{frame.px(point.x):.1f}"
        if point.y != before.y:
            path += f"V{frame.py(point.y):.1f}"
    shapes = _stroke(series, path)
    if area:
        bottom = frame.py(frame.y.low)
        closed = f"{path}V{bottom:.1f}H{frame.px(points[0].x):.1f}z"
        shapes.insert(0, element("path", d=closed, class_=f"area {series.color}"))
    return element("g", *shapes, class_=f"series {series.color} s-{series.key}")


def picture(title: str, height: float, shapes: Sequence[Markup]) -> Markup:
    """A chart of these shapes below its title."""
    heading = element("text", title, x=4.0, y=16.0, class_="title")
    box = f"0 0 {_WIDTH:g} {height:g}"
    return element("figure", element("svg", heading, *shapes, viewBox=box, role="img", aria_label=title))
