"""HTML and SVG from Python: elements, escaped; and tables whose cells carry the exact numbers.

Contract: :class:`Markup` is finished, everything else is text and is escaped. A numeric cell shows a rounded number and
has the exact one in ``data-value``.

Must not know: simulations.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from lightning_recycle.visualize.report.names import number

__all__ = ["Cell", "Markup", "element", "join", "num", "percent", "table"]

_LONG = 30  # rows
_VOID = frozenset({"br", "hr", "meta", "link"})
_SVG_LEAVES = frozenset({"path", "line", "rect", "circle"})


class Markup(str):
    """Finished HTML."""

    __slots__ = ()


def join(parts: Iterable[str], between: str = "") -> Markup:
    """All parts one after the other."""
    return Markup(between.join(part if isinstance(part, Markup) else escape(part) for part in parts))


def element(tag: str, /, *children: str, **attributes: str | float | bool | None) -> Markup:
    """One element.

    Args:
        tag: name of the element.
        children: text or elements.
        attributes: ``class_`` becomes class, ``data_value`` data-value; None and False are left out, True has no value.
    """
    text = ""
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        shown = f"{value:.6g}" if isinstance(value, float) and key != "data-value" else str(value)
        text += f" {key}" if value is True else f' {key}="{escape(shown)}"'
    if tag in _VOID:
        return Markup(f"<{tag}{text}>")
    if tag in _SVG_LEAVES and not children:
        return Markup(f"<{tag}{text}/>")
    return Markup(f"<{tag}{text}>{join(children)}</{tag}>")


@dataclass(frozen=True, slots=True)
class Cell:
    """Content of a cell; ``value`` is the exact number behind it, ``emphasis`` a class."""

    text: str
    value: float | None = None
    emphasis: str | None = None
    key: str | None = None
    """Name of the number, for programs that read the page."""


def num(value: float | None, digits: int = 3, *, key: str | None = None, emphasis: str | None = None) -> Cell:
    """A number with that many decimal places; a dash for None."""
    return Cell("\N{EN DASH}") if value is None else Cell(number(value, digits), value, emphasis, key)


def percent(fraction: float, digits: int = 1, *, key: str | None = None) -> Cell:
    """A fraction in percent."""
    return Cell(f"{number(100 * fraction, digits)} %", fraction, None, key)


def table(columns: Sequence[str], rows: Iterable[Sequence[Cell | str]], *, left: int = 1, caption: str = "") -> Markup:
    """A table that scrolls sideways if it does not fit.

    Args:
        columns: column headings.
        rows: cells; cells without a number are aligned like their column.
        left: number of left-aligned columns.
        caption: caption above the table; a long table is collapsed under it.
    """
    head = [
        element("th", name, scope="col", class_=None if place < left else "num") for place, name in enumerate(columns)
    ]
    body = [element("tr", *(_cell(cell, place < left) for place, cell in enumerate(row))) for row in rows]
    parts = [element("thead", element("tr", *head)), element("tbody", *body)]
    long = len(body) > _LONG
    if caption and not long:
        parts.insert(0, element("caption", caption))
    found = element(
        "div", element("table", *parts), class_="table", tabindex="0", role="region", aria_label=caption or None
    )
    if not long:
        return found
    return element("details", element("summary", f"{caption or 'Table'} ({len(body)} rows)"), found)


def _cell(cell: Cell | str, left: bool) -> Markup:
    if isinstance(cell, str):
        return element("td", cell, class_=None if left else "num")
    classes = " ".join(filter(None, ("" if left else "num", cell.emphasis)))
    value = None if cell.value is None else repr(cell.value)
    return element("td", cell.text, class_=classes or None, data_value=value, data_key=cell.key)
