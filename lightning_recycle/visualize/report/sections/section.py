"""The interface of the page's sections."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_recycle.visualize.report.charts import Point, Series
from lightning_recycle.visualize.report.markup import Markup, element
from lightning_recycle.visualize.report.records import Record

__all__ = ["REFERENCE", "Section", "charts", "note", "summary", "with_points"]

REFERENCE = Series("1F1B, no failures", "reference", "c-reference", marker=None, dashed=True, level=1.0)
"""The line of the value without failures."""


@dataclass(frozen=True)
class Section:
    """One section.

    Args:
        key: anchor of the section.
        title: its heading.
        lead: a sentence or two on what it shows.
        body: charts and tables; None when the results have nothing for it.
        command: command that makes the results for it.
    """

    key: str
    title: str
    lead: str
    body: Markup | None
    command: str


def charts(*pictures: Markup, wide: bool = False) -> Markup:
    """Pictures side by side, as many as fit."""
    return element("div", *pictures, class_="charts wide" if wide else "charts")


def note(*text: str) -> Markup:
    """A paragraph below a chart or table."""
    return element("p", *text, class_="note")


def summary(record: Record, name: str) -> str:
    """The tip of a training run."""
    return f"{name}: {record['throughput']:.2f} samples/s, {record['ratio']:.3f} of fault-free" + (
        f", from run to run {record['deviation']:.3f}" if len(record["runs"]) > 1 else ""
    )


def with_points(series: Series, points: list[Point]) -> Series:
    """The series with its points in the order of x."""
    return replace(series, points=tuple(sorted(points, key=lambda point: point.x)))
