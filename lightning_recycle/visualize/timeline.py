"""Timelines of schedules, measurements and simulated runs: traces for https://ui.perfetto.dev, and a picture.

Concept: a *track* is a list of operations with times in seconds, each on a worker; planned schedules and the
executor's measurements have the same shape, so one file can show both, one below the other. A pipeline is a process of
the trace, a stage one of its threads. The picture of a simulated run is three rows on one time axis: available GPUs,
throughput, and what training is doing (training, training that is lost later, a pause, standing still).

Contract: pure conversion; times in seconds in, microseconds in a trace as the format demands. A simulated run is the
dictionary of a training result (``result.json`` of ``recycle-simulate``).

Must not know: how times were planned, measured or simulated.

Source: "Trace Event Format" (Google): complete ("X"), counter ("C"), instant ("i") and metadata ("M") events.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

from lightning_recycle.files import write_atomically
from lightning_recycle.planning.grid import Op, Worker
from lightning_recycle.planning.schedule import Schedule
from lightning_recycle.visualize.drawing import Drawing, Group, Line, Rect, Text, write_drawing
from lightning_recycle.visualize.report.wording import duration_text, failures_text, policy_text

__all__ = ["TimedOp", "chrome_trace", "save_timeline", "save_trace", "timed_ops", "timeline_drawing", "timeline_trace"]


TimedOp: TypeAlias = tuple[Worker, Op, float, float]
"""(worker, operation, start, end), times in seconds."""


def timed_ops(schedule: Schedule, *, iterations: int = 1, seconds_per_unit: float = 1.0) -> list[TimedOp]:
    """The operations of a schedule in the shape of measurements.

    Args:
        schedule: the schedule to convert.
        iterations: number of consecutive iterations, each shifted by the period.
        seconds_per_unit: length of a slot if the costs are not in seconds.
    """
    return [
        (
            worker,
            scheduled.op,
            (scheduled.start + iteration * schedule.period) * seconds_per_unit,
            (scheduled.end + iteration * schedule.period) * seconds_per_unit,
        )
        for iteration in range(iterations)
        for worker, ops in schedule.workers.items()
        for scheduled in ops
    ]


def chrome_trace(tracks: Mapping[str, Schedule | Iterable[TimedOp]]) -> dict[str, Any]:
    """The trace of named tracks, ready for ``json.dump``.

    Args:
        tracks: for example ``{"planned": schedule, "measured": timed_ops}``; a schedule's costs must be in seconds, or
            use :func:`timed_ops`.
    """
    events: list[dict[str, Any]] = []
    first_process = 0
    for name, track in tracks.items():
        ops = timed_ops(track) if isinstance(track, Schedule) else list(track)
        for worker in sorted({worker for worker, *_ in ops}):
            process = first_process + worker.pipeline
            if not events or events[-1]["pid"] != process:
                events.append(_metadata(process, None, "process_name", {"name": f"{name}: pipeline {worker.pipeline}"}))
                events.append(_metadata(process, None, "process_sort_index", {"sort_index": process}))
            events.append(_metadata(process, worker.stage, "thread_name", {"name": f"stage {worker.stage}"}))
            events.append(_metadata(process, worker.stage, "thread_sort_index", {"sort_index": worker.stage}))
        events += [_event(first_process, *timed) for timed in ops]
        first_process += 1 + max((worker.pipeline for worker, *_ in ops), default=-1)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def save_trace(path: str | PathLike[str], tracks: Mapping[str, Schedule | Iterable[TimedOp]]) -> Path:
    """Write :func:`chrome_trace` of ``tracks`` to ``path``; open the file in https://ui.perfetto.dev."""
    target = Path(path)
    write_atomically(target, json.dumps(chrome_trace(tracks)))
    return target


def _metadata(process: int, thread: int | None, name: str, args: dict[str, Any]) -> dict[str, Any]:
    event: dict[str, Any] = {"ph": "M", "name": name, "pid": process, "args": args}
    if thread is not None:
        event["tid"] = thread
    return event


def _event(first_process: int, worker: Worker, op: Op, start: float, end: float) -> dict[str, Any]:
    args: dict[str, Any] = {"stage": op.stage}
    name = op.kind.value
    if op.microbatch is not None:
        name += f" {op.microbatch.pipeline}.{op.microbatch.index}"
        args["pipeline"] = op.microbatch.pipeline
        args["microbatch"] = op.microbatch.index
        args["adopted"] = op.microbatch.pipeline != worker.pipeline
    return {
        "ph": "X",
        "name": name,
        "cat": op.kind.value,
        "pid": first_process + worker.pipeline,
        "tid": worker.stage,
        "ts": start * 1e6,
        "dur": (end - start) * 1e6,
        "args": args,
    }


Result = Mapping[str, Any]

_COLORS = {"training": "#3f9b66", "lost": "#f0b429", "paused": "#8e5bb5", "stopped": "#c9c9c9"}
_MEANING = {
    "training": "training",
    "lost": "training, undone later",
    "paused": "pause",
    "stopped": "standing still",
}
_INK, _MUTED, _FAINT, _USUAL = "#222222", "#555555", "#d5d9de", "#4a86c8"
_WIDTH, _LEFT, _RIGHT = 1200.0, 92.0, 24.0
_HEAD, _ROW, _GAP, _STRIP, _FOOT = 60.0, 130.0, 34.0, 24.0, 64.0


def save_timeline(folder: Path, result: Result) -> list[Path]:
    """Write ``timeline.svg`` and ``timeline.json`` to ``folder``; the latter is for https://ui.perfetto.dev."""
    picture, trace = folder / "timeline.svg", folder / "timeline.json"
    write_drawing(timeline_drawing(result), picture)
    write_atomically(trace, json.dumps(timeline_trace(result)))
    return [picture, trace]


def timeline_trace(result: Result) -> dict[str, Any]:
    """The run in the Chrome trace format, ready for ``json.dump``."""
    intervals, end = result["timeline"]["intervals"], result["duration"]
    events: list[dict[str, Any]] = [_named(0, "run"), _named(1, "nodes that are down"), _named(0, "what happens", 0)]
    for interval in intervals:
        args = {"state": interval["state"], "gpus": interval["gpus"], "live_gpus": interval["live_gpus"]}
        events.append(_slice(0, 0, interval["label"], interval["state"], interval["begin"], interval["end"], args))
        for name, unit, key in (("available", "GPUs", "live_gpus"), ("throughput", "samples/s", "throughput")):
            events.append(
                {"ph": "C", "name": name, "pid": 0, "ts": interval["begin"] * 1e6, "args": {unit: interval[key]}}
            )
    for event in result["timeline"]["events"]:
        events.append(
            {
                "ph": "i",
                "s": "p",
                "name": event["kind"],
                "pid": 0,
                "tid": 0,
                "ts": event["time"] * 1e6,
                "args": {"nodes": list(event["nodes"])},
            }
        )
    for node, begin, until in _outages(result):
        events.append(_slice(1, node, "down", "failed", begin, end if until is None else until, {"node": node}))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _outages(result: Result) -> Iterator[tuple[int, float, float | None]]:
    """(node, begin, end) of each outage; None if it lasts until the end."""
    since: dict[int, float] = {}
    for event in result["timeline"]["events"]:
        for node in event["nodes"]:
            if event["kind"] == "failure":
                since[node] = event["time"]
            elif event["kind"] == "repair":
                yield node, since.pop(node), event["time"]
    for node, begin in since.items():
        yield node, begin, None


def _named(process: int, name: str, thread: int | None = None) -> dict[str, Any]:
    event = {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
    return event if thread is None else {**event, "name": "thread_name", "tid": thread}


def _slice(
    process: int, thread: int, name: str, category: str, begin: float, end: float, args: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": process,
        "tid": thread,
        "ts": begin * 1e6,
        "dur": (end - begin) * 1e6,
        "args": args,
    }


def timeline_drawing(result: Result) -> Drawing:
    """The run as a picture: availability above, throughput below it, and a strip of what happens."""
    hours = result["duration"] / 3600
    scale = (_WIDTH - _LEFT - _RIGHT) / result["duration"]
    title = f"{result['model']['name']}, {policy_text(result)}, {failures_text(result)}"
    numbers = f"{result['runs'][0]['throughput']:.2f} samples/s, {result['runs'][0]['ratio']:.3f} of fault-free"
    head = Group(
        "title",
        [
            Text(16, 22, title, size=15.0, bold=True),
            Text(_WIDTH - _RIGHT, 22, numbers, size=12.0, fill=_MUTED, anchor="end"),
        ],
    )
    drawing = Drawing(_WIDTH, _HEAD + 2 * (_ROW + _GAP) + _STRIP + _FOOT, [head])
    intervals = result["timeline"]["intervals"]
    top = _HEAD
    drawing.groups.append(_row(intervals, "live_gpus", "available GPUs", _INK, top, scale, result["cluster"]["gpus"]))
    top += _ROW + _GAP
    usual = result["fault_free_throughput"]
    drawing.groups.append(_row(intervals, "throughput", "samples/s", _COLORS["training"], top, scale, usual))
    top += _ROW + _GAP
    strip = Group("states", [Text(_LEFT - 8, top + _STRIP / 2, "state", fill=_MUTED, anchor="end")])
    for interval in intervals:
        tip = f"{interval['label']}: {duration_text(interval['end'] - interval['begin'])}"
        width = max(0.5, (interval["end"] - interval["begin"]) * scale)
        color = _COLORS[interval["state"]]
        strip.shapes.append(Rect(_LEFT + interval["begin"] * scale, top, width, _STRIP, color, tip=tip))
    drawing.groups += [strip, _time_axis(hours, top + _STRIP, scale), _legend(top + _STRIP + _FOOT - 18)]
    return drawing


def _row(intervals: Any, key: str, label: str, color: str, top: float, scale: float, usual: float) -> Group:
    """A step line of ``key``; the dashed line is its value without failures."""
    most = max([usual, *(interval[key] for interval in intervals)]) * 1.05
    group = Group(label, [Text(_LEFT, top - 10, label, fill=_MUTED)])
    bottom = top + _ROW
    for value in (0.0, usual):
        y = bottom - value / most * _ROW
        group.shapes += [
            Line(_LEFT, y, _WIDTH - _RIGHT, y, _FAINT if not value else _USUAL, dashed=bool(value)),
            Text(_LEFT - 8, y, f"{value:.4g}", anchor="end", fill=_MUTED),
        ]
    before = None
    for interval in intervals:
        x1, x2 = _LEFT + interval["begin"] * scale, _LEFT + interval["end"] * scale
        y = bottom - interval[key] / most * _ROW
        if before is not None and before != y:
            group.shapes.append(Line(x1, before, x1, y, color, 1.2))
        group.shapes.append(Line(x1, y, x2, y, color, 1.6))
        before = y
    return group


def _time_axis(hours: float, y: float, scale: float) -> Group:
    step = next(s for s in (0.1, 0.25, 0.5, 1, 2, 3, 6, 12, 24, 48, 168, math.inf) if hours / s <= 12)
    group = Group("axis", [])
    for number in range(int(hours / step) + 1):
        x = _LEFT + number * step * 3600 * scale
        group.shapes += [
            Line(x, y, x, y + 5, _MUTED),
            Text(x, y + 15, f"{number * step:g} h", fill=_MUTED, anchor="middle"),
        ]
    return group


def _legend(y: float) -> Group:
    group, x = Group("legend", []), _LEFT
    for state, color in _COLORS.items():
        group.shapes += [Rect(x, y - 6, 12, 12, color), Text(x + 18, y, _MEANING[state], fill=_MUTED)]
        x += 46 + 6 * len(_MEANING[state])
    group.shapes += [Line(x, y, x + 20, y, _USUAL, dashed=True), Text(x + 26, y, "without failures", fill=_MUTED)]
    return group
