"""Timelines of schedules, measurements and simulated runs: traces for https://ui.perfetto.dev.

Concept: a *track* is a list of operations with times in seconds, each on a worker; planned schedules and the
executor's measurements have the same shape, so one file can show both, one below the other. A pipeline is a process of
the trace, a stage one of its threads.

Contract: pure conversion; times in seconds in, microseconds in a trace as the format demands. A simulated run is the
dictionary of a training result (``result.json`` of ``recycle-simulate``).

Must not know: how times were planned, measured or simulated.

Source: "Trace Event Format" (Google): complete ("X"), counter ("C"), instant ("i") and metadata ("M") events.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

from lightning_recycle.files import write_atomically
from lightning_recycle.planning.grid import Op, Worker
from lightning_recycle.planning.schedule import Schedule

__all__ = ["TimedOp", "chrome_trace", "save_trace", "timed_ops", "timeline_trace"]


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
