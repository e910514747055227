"""Strips: what each of several runs does over the same time, one below the other.

Concept: a strip is divided into segments; the colour says what happens, the height how fast training is. Segments of
less than a pixel cannot be seen, so time is cut into columns, each of which shows what takes most of it.

Must not know: simulations, pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_recycle.visualize.report.charts import Series, picture
from lightning_recycle.visualize.report.markup import Markup, element
from lightning_recycle.visualize.report.scales import Axis, Frame

__all__ = ["Segment", "columns", "strip_chart"]

_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 420.0, 10.0, 12.0, 30.0, 42.0
_NAME, _STRIP, _GAP = 15.0, 26.0, 6.0


@dataclass(frozen=True)
class Segment:
    """From ``begin`` to ``end`` the strip has the colour of ``series`` and the height ``value``.

    Args:
        begin, end: on the chart's x axis.
        value: height, at most that of the chart.
        series: what happens.
        label: what happens, in words.
    """

    begin: float
    end: float
    value: float
    series: Series
    label: str


def columns(segments: Sequence[Segment], most: float, count: int) -> list[Segment]:
    """At most ``count`` segments from 0 to ``most``, as wide as whole columns.

    A column shows the series and the label that take most of it; the height is the mean over the columns of a segment.
    """
    width = most / count
    times: list[dict[tuple[str, str], float]] = [{} for _ in range(count)]
    areas = [0.0] * count
    looks: dict[tuple[str, str], Series] = {}
    for segment in segments:
        look = (segment.series.key, segment.label)
        looks[look] = segment.series
        for place in range(int(segment.begin / width), count):
            begin, end = max(segment.begin, place * width), min(segment.end, (place + 1) * width)
            if begin >= end:
                break
            times[place][look] = times[place].get(look, 0.0) + end - begin
            areas[place] += segment.value * (end - begin)
    found: list[Segment] = []
    first = 0
    shown = [max(each, key=lambda look: each[look]) if each else None for each in times]
    for place in range(1, count + 1):
        if place < count and shown[place] == shown[first]:
            continue
        taken = shown[first]
        if taken is not None:
            mean = sum(areas[first:place]) / (place - first) / width
            found.append(Segment(first * width, place * width, mean, looks[taken], taken[1]))
        first = place
    return found


def strip_chart(
    title: str, rows: Sequence[tuple[str, Sequence[Segment]]], x: Axis, most: float, value_text: str
) -> Markup:
    """One strip for each of ``rows`` below its name.

    Args:
        title: title of the chart.
        rows: names and segments.
        x: the common axis.
        most: value of a segment that fills its strip's height.
        value_text: format of a value in the tips, e.g. ``"{:.2f} samples/s"``.
    """
    row = _NAME + _STRIP + _GAP
    height = row * len(rows)
    frame = Frame(_LEFT, _TOP, _WIDTH - _LEFT - _RIGHT, height, x, Axis("", 0.0, 1.0, ()))
    shapes = frame.axes()
    for place, (name, segments) in enumerate(rows):
        top = _TOP + place * row + _NAME
        shapes.append(element("text", name, x=_LEFT, y=top - 3, class_="name"))
        floor = top + _STRIP
        shapes.append(element("path", d=f"M{_LEFT} {floor:.1f}H{_WIDTH - _RIGHT:.1f}", class_="grid"))
        for segment in segments:
            # What does not train is as high as a quarter of the strip, so that it can be seen.
            part = min(1.0, segment.value / most) if segment.value else 0.25
            left, right = frame.px(segment.begin), frame.px(segment.end)
            shapes.append(
                element(
                    "rect", x=round(left, 1), y=round(floor - part * _STRIP, 1), width=round(right - left, 1),
                    height=round(part * _STRIP, 1),
                    class_=f"fill {segment.series.color} series s-{segment.series.key}",
                    data_tip=f"{name}: {segment.label}, {x.label} {segment.begin:.2f} to {segment.end:.2f}, "
                    + value_text.format(segment.value),
                )
            )  # fmt: skip
    return picture(title, _TOP + height + _BOTTOM, shapes)
