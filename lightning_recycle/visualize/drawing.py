"""Drawing: rectangles, lines and text in pixels, rendered to SVG or PNG.

Concept: a picture is laid out once, as a list of shapes, and written by either of two renderers: SVG and PNG show the
same. SVG needs only the standard library; PNG needs matplotlib (extra ``viz``).

Contract: coordinates in pixels from the upper left corner, colours as ``#rrggbb``.

Must not know: schedules.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias
from xml.sax.saxutils import escape, quoteattr

from lightning_recycle.errors import ConfigurationError
from lightning_recycle.files import replacing, write_atomically

__all__ = ["Drawing", "Group", "Line", "Rect", "Text", "write_drawing"]

_FONT = "DejaVu Sans, Verdana, Helvetica, Arial, sans-serif"
_DPI = 100


@dataclass(frozen=True, slots=True)
class Rect:
    """A filled rectangle; ``hatch`` is the colour of diagonal lines on it, ``tip`` appears under the mouse (SVG)."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    stroke: str | None = None
    stroke_width: float = 1.0
    hatch: str | None = None
    opacity: float = 1.0
    tip: str | None = None


@dataclass(frozen=True, slots=True)
class Line:
    """A straight line."""

    x1: float
    y1: float
    x2: float
    y2: float
    stroke: str
    width: float = 1.0
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Text:
    """One line of text; ``y`` is its vertical middle, ``anchor`` is start, middle or end."""

    x: float
    y: float
    text: str
    size: float = 11.0
    fill: str = "#222222"
    anchor: str = "start"
    bold: bool = False


Shape: TypeAlias = "Rect | Line | Text"


@dataclass(slots=True)
class Group:
    """Shapes that belong together; ``name`` becomes ``data-name`` in SVG."""

    name: str
    shapes: list[Shape] = field(default_factory=list)


@dataclass(slots=True)
class Drawing:
    """A page of ``width`` by ``height`` pixels."""

    width: float
    height: float
    groups: list[Group] = field(default_factory=list)


def write_drawing(drawing: Drawing, path: Path) -> None:
    """Write ``drawing`` to ``path``, as its suffix says.

    Raises:
        ConfigurationError: for a suffix other than .svg and .png, or for .png without matplotlib.
    """
    suffix = path.suffix.lower()
    if suffix not in (".svg", ".png"):
        raise ConfigurationError(f"cannot draw to {str(path)!r}: use a name that ends with .svg or .png.")
    if suffix == ".svg":
        write_atomically(path, to_svg(drawing))
    else:
        _write_png(drawing, path)


def to_svg(drawing: Drawing) -> str:
    """``drawing`` as an SVG document."""
    return "\n".join(_svg_lines(drawing)) + "\n"


def _svg_lines(drawing: Drawing) -> Iterator[str]:
    size = f'width="{drawing.width:g}" height="{drawing.height:g}" viewBox="0 0 {drawing.width:g} {drawing.height:g}"'
    yield f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{_FONT}">'
    hatches = {shape.hatch for group in drawing.groups for shape in group.shapes if isinstance(shape, Rect)} - {None}
    yield "<defs>"
    for color in sorted(hatch for hatch in hatches if hatch):
        yield (
            f'<pattern id="hatch-{color[1:]}" width="6" height="6" patternUnits="userSpaceOnUse" '
            f'patternTransform="rotate(45)"><path d="M0 0V6" stroke="{color}" stroke-width="2"/></pattern>'
        )
    yield "</defs>"
    yield f'<rect width="{drawing.width:g}" height="{drawing.height:g}" fill="#ffffff"/>'
    for group in drawing.groups:
        yield f"<g data-name={quoteattr(group.name)}>"
        for shape in group.shapes:
            yield from _svg_shape(shape)
        yield "</g>"
    yield "</svg>"


def _svg_shape(shape: Shape) -> Iterator[str]:
    if isinstance(shape, Line):
        dash = ' stroke-dasharray="5 4"' if shape.dashed else ""
        yield (
            f'<path d="M{shape.x1:.2f} {shape.y1:.2f}L{shape.x2:.2f} {shape.y2:.2f}" '
            f'stroke="{shape.stroke}" stroke-width="{shape.width:g}"{dash}/>'
        )
    elif isinstance(shape, Text):
        weight = ' font-weight="bold"' if shape.bold else ""
        # 0.35 em below the middle is the baseline; "dominant-baseline" is not supported everywhere.
        yield (
            f'<text x="{shape.x:.2f}" y="{shape.y + 0.35 * shape.size:.2f}" font-size="{shape.size:g}" '
            f'fill="{shape.fill}" text-anchor="{shape.anchor}"{weight}>{escape(shape.text)}</text>'
        )
    else:
        box = f'x="{shape.x:.2f}" y="{shape.y:.2f}" width="{shape.width:.2f}" height="{shape.height:.2f}"'
        opacity = f' opacity="{shape.opacity:g}"' if shape.opacity < 1 else ""
        stroke = f' stroke="{shape.stroke}" stroke-width="{shape.stroke_width:g}"' if shape.stroke else ""
        tip = f"<title>{escape(shape.tip)}</title>" if shape.tip else ""
        yield f'<rect {box} fill="{shape.fill}"{opacity}{"" if shape.hatch else stroke}>{tip}</rect>'
        if shape.hatch:
            yield f'<rect {box} fill="url(#hatch-{shape.hatch[1:]})"{opacity}{stroke}>{tip}</rect>'


def _write_png(drawing: Drawing, path: Path) -> None:
    try:
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D
        from matplotlib.patches import Rectangle
    except ImportError as error:
        raise ConfigurationError(
            f"writing {str(path)!r} needs matplotlib: pip install 'lightning-recycle[viz]', or write .svg."
        ) from error
    figure = Figure(figsize=(drawing.width / _DPI, drawing.height / _DPI), dpi=_DPI, facecolor="white")
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0), xlim=(0, drawing.width), ylim=(drawing.height, 0))
    axes.set_axis_off()
    points = 72 / _DPI  # matplotlib measures lines and text in points
    for order, shape in enumerate(shape for group in drawing.groups for shape in group.shapes):
        if isinstance(shape, Line):
            axes.add_line(
                Line2D(
                    (shape.x1, shape.x2),
                    (shape.y1, shape.y2),
                    color=shape.stroke,
                    linewidth=shape.width * points,
                    linestyle=(0, (5, 4)) if shape.dashed else "solid",
                    zorder=order,
                )
            )
        elif isinstance(shape, Text):
            axes.text(
                shape.x,
                shape.y,
                shape.text,
                fontsize=shape.size * points,
                color=shape.fill,
                ha={"start": "left", "middle": "center", "end": "right"}[shape.anchor],
                va="center_baseline",
                weight="bold" if shape.bold else "normal",
                zorder=order,
            )
        else:
            corner, extent = (shape.x, shape.y), (shape.width, shape.height)
            axes.add_patch(
                Rectangle(corner, *extent, facecolor=shape.fill, edgecolor="none", alpha=shape.opacity, zorder=order)
            )
            if shape.hatch:
                axes.add_patch(
                    Rectangle(
                        corner,
                        *extent,
                        facecolor="none",
                        edgecolor=shape.hatch,
                        linewidth=0,
                        hatch="////",
                        alpha=shape.opacity,
                        zorder=order,
                    )
                )
            if shape.stroke:
                axes.add_patch(
                    Rectangle(
                        corner,
                        *extent,
                        facecolor="none",
                        edgecolor=shape.stroke,
                        linewidth=shape.stroke_width * points,
                        alpha=shape.opacity,
                        zorder=order,
                    )
                )
    with matplotlib.rc_context({"hatch.linewidth": 1.2}), replacing(path) as file:
        figure.savefig(file, dpi=2 * _DPI, format="png")
