"""From values to pixels: scales, round ticks, and the frame of a chart.

Must not know: what is drawn in a frame.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_recycle.visualize.report.markup import Markup, element

__all__ = ["Axis", "Frame", "categories", "linear", "logarithmic"]


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
    """From ``least`` to ``most`` or a little beyond, with about ``count`` round ticks.

    Args:
        label: label of the axis, with the unit.
        most, least: range of the values.
        count: approximate number of ticks.
        exact: whether to end at ``most``, which then need not be a tick.
    """
    span = (most - least) or 1.0
    raw = span / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    low = math.floor(least / step + 1e-9) * step
    high = math.ceil(most / step - 1e-9) * step if most > low else low + step
    digits = max(0, -math.floor(math.log10(step) + 1e-9) + (step / power == 2.5))
    ticks = [low + number * step for number in range(round((high - low) / step) + 1)]
    if exact and most > low:
        high, ticks = most, [tick for tick in ticks if tick <= most]
    return Axis(label, low, high, tuple((tick, f"{tick:,.{digits}f}") for tick in ticks))


def logarithmic(label: str, values: Sequence[float], texts: Sequence[str] | None = None) -> Axis:
    """Around ``values``; ticks at the values themselves with ``texts``, or at powers of ten."""
    least, most = min(values), max(values)
    if texts is not None:
        room = (most / least) ** 0.06 if most > least else 1.5
        return Axis(label, least / room, most * room, tuple(zip(values, texts, strict=True)), log=True)
    first, last = math.floor(math.log10(least)), math.ceil(math.log10(most))
    last += first == last
    ticks = [10.0**power for power in range(first, last + 1)]
    return Axis(label, ticks[0], ticks[-1], tuple((tick, f"{tick:,g}") for tick in ticks), log=True)


def categories(label: str, names: Sequence[str]) -> Axis:
    """Number i of ``names`` is at i, in the middle of a band of width 1."""
    return Axis(label, -0.5, len(names) - 0.5, tuple((float(place), name) for place, name in enumerate(names)))


@dataclass(frozen=True)
class Frame:
    """The area of a chart within its picture, in pixels, and its two axes."""

    left: float
    top: float
    width: float
    height: float
    x: Axis
    y: Axis

    def px(self, value: float) -> float:
        """Pixel of an x value."""
        return self.left + self.x.part(value) * self.width

    def py(self, value: float) -> float:
        """Pixel of a y value."""
        return self.top + (1 - self.y.part(value)) * self.height

    def axes(self, *, x_labels: bool = True) -> list[Markup]:
        """Grid lines, ticks and labels."""
        bottom, right = self.top + self.height, self.left + self.width
        found = []
        for value, text in self.y.ticks:
            y = self.py(value)
            kind = "axis" if value == self.y.low and not self.y.log else "grid"
            found.append(element("path", d=f"M{self.left:.1f} {y:.1f}H{right:.1f}", class_=kind))
            found.append(element("text", text, x=self.left - 6, y=y + 3.5, class_="tick", text_anchor="end"))
        found.append(element("text", self.y.label, x=4.0, y=self.top - 10, class_="label"))
        if self.y.low > 0 and not self.y.log:  # two strokes through the axis, and words
            cut = bottom - 9
            for shift in (0, 4):
                found.append(element("path", d=f"M{self.left - 5:.1f} {cut + shift:.1f}l10 -5", class_="axis cut"))
            text = "not from 0"
            found.append(element("text", text, x=right, y=bottom - 5, class_="tick cut", text_anchor="end"))
        if not x_labels:
            return found
        found.append(element("path", d=f"M{self.left:.1f} {bottom:.1f}H{right:.1f}", class_="axis"))
        for value, text in self.x.ticks:
            x = self.px(value)
            found.append(element("text", text, x=round(x, 1), y=bottom + 16, class_="tick", text_anchor="middle"))
        middle = self.left + self.width / 2
        found.append(element("text", self.x.label, x=middle, y=bottom + 34, class_="label", text_anchor="middle"))
        return found
