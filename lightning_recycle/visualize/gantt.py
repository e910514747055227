"""Gantt charts of schedules: one row per worker, one box per operation, several schedules on the same time scale.

Concept: the picture shows at a glance what ReCycle does. Colour is the kind of operation, the number in a box is the
micro-batch; a box with an orange frame and hatching is a dead worker's micro-batch that a peer adopted ("1.3" is
micro-batch 3 of pipeline 1); a dead worker has a grey row.

Contract: reads schedules, changes nothing. SVG needs only the standard library, PNG the extra ``viz``.

Must not know: planners, the runtime.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path

from lightning_recycle.errors import ConfigurationError
from lightning_recycle.planning.costs import bucket_times
from lightning_recycle.planning.grid import OpKind, ScheduledOp, Worker
from lightning_recycle.planning.schedule import Schedule
from lightning_recycle.visualize.drawing import Drawing, Group, Line, Rect, Text, to_svg, write_drawing

__all__ = ["gantt_svg", "save_gantt"]

_COLORS = {
    OpKind.FORWARD: "#4a86c8",
    OpKind.RECOMPUTE: "#a9c8ea",
    OpKind.BACKWARD_INPUT: "#3f9b66",
    OpKind.BACKWARD_WEIGHT: "#b5dcb9",
    OpKind.BACKWARD: "#6f9f3f",
    OpKind.REDUCE: "#f0b429",
    OpKind.STEP: "#8e5bb5",
}
_MEANING = {
    OpKind.FORWARD: "F  forward",
    OpKind.RECOMPUTE: "R  forward, again",
    OpKind.BACKWARD_INPUT: "B  backward, inputs",
    OpKind.BACKWARD_WEIGHT: "W  backward, weights",
    OpKind.BACKWARD: "BW  backward, fused",
    OpKind.REDUCE: "REDUCE",
    OpKind.STEP: "STEP",
}
_ADOPTED, _ADOPTED_HATCH = "#d9480f", "#f6b48f"
_DARK_TEXT = {OpKind.RECOMPUTE, OpKind.BACKWARD_WEIGHT, OpKind.REDUCE}
_INK, _FAINT, _DEAD, _END = "#222222", "#d5d9de", "#c9c9c9", "#c92a2a"

_MARGIN, _LABELS, _ROW, _GAP, _PIPELINE_GAP = 16.0, 128.0, 22.0, 2.0, 9.0
_TITLE, _AXIS, _PANEL_GAP = 34.0, 24.0, 18.0
_MARK = 4.0  # width of an operation that takes no time
_BUCKET = 5.0  # height of a bucket's reduction


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
        iterations: number of consecutive iterations to draw, each shifted by the period and paler than the previous
            one.
        width: width of the picture in pixels.

    Raises:
        ConfigurationError: when there is nothing to draw, or the wrong number of titles.
    """
    return to_svg(_layout(schedules, titles, unit, iterations, width))


def save_gantt(
    path: str | PathLike[str],
    schedules: Schedule | Sequence[Schedule],
    titles: Sequence[str] | None = None,
    *,
    unit: str = "slots",
    iterations: int = 1,
    width: float = 1200.0,
) -> Path:
    """Write the chart to ``path``, which ends with .svg or .png; arguments as for :func:`gantt_svg`.

    Raises:
        ConfigurationError: for another suffix, for .png without matplotlib, and as :func:`gantt_svg`.
    """
    target = Path(path)
    write_drawing(_layout(schedules, titles, unit, iterations, width), target)
    return target


def _layout(
    schedules: Schedule | Sequence[Schedule], titles: Sequence[str] | None, unit: str, iterations: int, width: float
) -> Drawing:
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
    left = _MARGIN + _LABELS
    scale = (width - left - _MARGIN - 8) / (end or 1.0)
    drawing = Drawing(width, 0.0)
    y = _MARGIN / 2
    for schedule, name in zip(panels, names, strict=True):
        y = _panel(drawing, schedule, name, unit, iterations, end, left, scale, y) + _PANEL_GAP
    drawing.height = _legend(drawing, panels, left, y) + _MARGIN / 2
    return drawing


def _default_title(schedule: Schedule) -> str:
    failed = ", ".join(map(str, sorted(schedule.failed)))
    return f"{schedule.grid} {'without ' + failed if failed else 'fault-free'}"


def _panel(
    drawing: Drawing,
    schedule: Schedule,
    name: str,
    unit: str,
    iterations: int,
    end: float,
    left: float,
    scale: float,
    top: float,
) -> float:
    """Draw one schedule from ``top`` down; returns its lower end."""
    grid = schedule.grid
    numbers = f"makespan {schedule.makespan:.4g}, period {schedule.period:.4g} {unit}"
    heading = Group("title", [Text(_MARGIN, top + _TITLE / 2, name, size=15.0, bold=True)])
    heading.shapes.append(
        Text(drawing.width - _MARGIN, top + _TITLE / 2, numbers, size=12.0, fill="#555555", anchor="end")
    )
    grid_lines = Group("axis")
    drawing.groups += [heading, grid_lines]
    y = first_row = top + _TITLE
    for pipeline in range(grid.pipelines):
        middle = y + (grid.stages * (_ROW + _GAP) - _GAP) / 2
        label = Text(_MARGIN, middle, f"pipeline {pipeline}", fill="#555555", size=12.0)
        drawing.groups.append(Group(f"pipeline {pipeline}", [label]))
        for stage in range(grid.stages):
            worker = Worker(pipeline, stage)
            row = Group(f"worker {worker}")
            dead = worker in schedule.failed
            row.shapes.append(
                Text(left - 8, y + _ROW / 2, f"stage {stage}", anchor="end", fill="#999999" if dead else _INK)
            )
            if dead:
                row.shapes.append(Rect(left, y, end * scale, _ROW, "#f3f3f3", _DEAD, hatch="#e2e2e2"))
                row.shapes.append(Text(left + 10, y + _ROW / 2, "failed", fill="#8a1f11", bold=True))
            for iteration in range(iterations):
                opacity = 1.0 if iteration == 0 else 0.45
                for scheduled in schedule.workers.get(worker, ()):
                    x = left + (scheduled.start + iteration * schedule.period) * scale
                    row.shapes += _box(worker, scheduled, unit, x, y, scale, opacity)
                    if scheduled.op.kind is OpKind.REDUCE:
                        row.shapes += _buckets(schedule, stage, unit, x, y, scale, opacity)
            drawing.groups.append(row)
            y += _ROW + _GAP
        y += _PIPELINE_GAP
    bottom = y - _PIPELINE_GAP
    marks = Group("makespan")
    drawing.groups.append(marks)
    # A little longer than the boxes, so that ends of iterations can be compared between panels.
    x = left + schedule.makespan * scale
    marks.shapes.append(Line(x, first_row - 5, x, bottom + 5, _END, 1.5, dashed=True))
    step = _tick(end)
    for k in range(math.floor(end / step + 1e-9) + 1):
        x = left + k * step * scale
        grid_lines.shapes.append(Line(x, first_row - 3, x, bottom + 4, _FAINT, 0.8))
        grid_lines.shapes.append(Text(x, bottom + 13, f"{k * step:g}", size=10.0, fill="#555555", anchor="middle"))
    grid_lines.shapes.append(Text(left - 8, bottom + 13, unit, size=10.0, fill="#555555", anchor="end"))
    return bottom + _AXIS


def _box(
    worker: Worker, scheduled: ScheduledOp, unit: str, x: float, y: float, scale: float, opacity: float
) -> Iterator[Rect | Text]:
    op, kind, microbatch = scheduled.op, scheduled.op.kind, scheduled.op.microbatch
    color = _COLORS[kind]
    tip = f"{op}: {scheduled.start:g} to {scheduled.end:g} {unit}"
    width = scheduled.duration * scale
    if width < _MARK and microbatch is None:
        # REDUCE and STEP without duration: REDUCE before, STEP after the moment they happen.
        offset = -_MARK if kind is OpKind.REDUCE else 0.0
        yield Rect(x + offset, y, _MARK, _ROW, color, opacity=opacity, tip=tip)
        return
    adopted = microbatch is not None and microbatch.pipeline != worker.pipeline
    if adopted:
        inset = 0.9
        yield Rect(
            x + inset,
            y + inset,
            max(width - 2 * inset, 0.5),
            _ROW - 2 * inset,
            color,
            _ADOPTED,
            1.8,
            None,
            opacity,
            tip,
        )
        # The hatch stays in a band at the bottom, where it does not make the number unreadable.
        yield Rect(x + 2, y + _ROW - 6, max(width - 4, 0.5), 4.0, _ADOPTED_HATCH, None, 1.0, _ADOPTED, opacity)
    else:
        yield Rect(x, y, width, _ROW, color, "#ffffff", 0.8, None, opacity, tip)
    if microbatch is None:
        label = kind.value
    else:
        label = f"{microbatch.pipeline}.{microbatch.index}" if adopted else f"{microbatch.index}"
    size = 10.5
    if len(label) * 0.65 * size > width:
        size = 8.0
    if len(label) * 0.65 * size <= width:
        ink = _INK if kind in _DARK_TEXT else "#ffffff"
        yield Text(x + width / 2, y + _ROW / 2 - (2.0 if adopted else 0.0), label, size, ink, "middle", adopted)


def _buckets(
    schedule: Schedule, stage: int, unit: str, x: float, y: float, scale: float, opacity: float
) -> Iterator[Rect]:
    """The reductions of the buckets of a stage whose last W ends at ``x``, one bar each, below the operations."""
    costs = schedule.problem.costs
    number = costs.buckets_of(stage)
    if number > 1 and costs.reduce[stage]:
        for index, (start, end) in enumerate(bucket_times(costs.reduce[stage], costs.backward_weight[stage], number)):
            tip = f"bucket {index} of stage {stage}: {end - start:g} {unit}"
            at, width = x + start * scale, max((end - start) * scale, 0.5)
            yield Rect(
                at, y + _ROW - _BUCKET, width, _BUCKET, _COLORS[OpKind.REDUCE], "#ffffff", 0.5, None, opacity, tip
            )


def _legend(drawing: Drawing, panels: Sequence[Schedule], left: float, y: float) -> float:
    """Draw the legend from ``y`` down, in as many lines as it needs; returns its lower end."""
    legend = Group("legend")
    drawing.groups.append(legend)
    used = {op.op.kind for schedule in panels for ops in schedule.workers.values() for op in ops}
    entries: list[tuple[str, list[Rect | Line]]] = [
        (_MEANING[kind], [Rect(0, 0, 14, 14, _COLORS[kind])]) for kind in OpKind if kind in used
    ]
    if any(schedule.failed for schedule in panels):
        frame = [Rect(1, 1, 12, 12, "#ffffff", _ADOPTED, 1.8), Rect(2, 8, 10, 4, _ADOPTED_HATCH, hatch=_ADOPTED)]
        entries.append(("adopted (pipeline.micro-batch)", [*frame]))
    entries.append(("end of the iteration", [Line(7, -1, 7, 15, _END, 1.5, dashed=True)]))
    x = left
    for text, symbol in entries:
        extent = 40 + 5.5 * len(text)
        if x > left and x + extent > drawing.width:
            x, y = left, y + 20
        for shape in symbol:
            if isinstance(shape, Line):
                legend.shapes.append(replace(shape, x1=shape.x1 + x, x2=shape.x2 + x, y1=shape.y1 + y, y2=shape.y2 + y))
            else:
                legend.shapes.append(replace(shape, x=shape.x + x, y=shape.y + y))
        legend.shapes.append(Text(x + 20, y + 7, text))
        x += extent
    return y + 20


def _tick(end: float) -> float:
    """Distance between the axis' labels: 1, 2 or 5 times a power of ten, at most about 20 labels."""
    if end <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(end / 20))
    return next(step for step in (power, 2 * power, 5 * power, 10 * power) if end / step <= 20 + 1e-9)
