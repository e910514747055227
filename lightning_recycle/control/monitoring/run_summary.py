"""Summary of a run in a few lines, from its record."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_recycle.control.monitoring.history import Event
from lightning_recycle.planning.grid import Positions

_CAUSES_SHOWN = 5


def summary(history: Sequence[Event], positions: Positions) -> list[str]:
    """The lines on a run with this record, on the grid of ``positions``; none if it made no step."""
    steps = [event for event in history if event.kind == "step"]
    if not steps:
        return []
    begin = next(event for event in history if event.kind in ("resumed", "step"))
    done, seconds = steps[-1].step + 1, steps[-1].time - begin.time
    lines = [
        f"Run: at step {done:,} after {seconds:.1f} s{_loss(steps)}, {_workers(history, positions)}{_memory(history)}."
    ]
    counts = [
        _count(number, name)
        for kind, name in (("failure", "failure"), ("redone", "redone step"), ("rejoined", "replacement"))
        if (number := sum(event.kind == kind for event in history))
    ]
    lost = sorted(_lost(history).items(), key=lambda entry: -entry[1])
    if counts or lost:
        total = sum(seconds for _, seconds in lost)
        lines.append(f"{', '.join(counts) or 'No failures'}; {total:.1f} s lost{':' if lost else '.'}")
    lines += [f"  {seconds:.1f} s: {cause}" for cause, seconds in lost[:_CAUSES_SHOWN]]
    if others := lost[_CAUSES_SHOWN:]:
        lines.append(f"  {sum(seconds for _, seconds in others):.1f} s: {_count(len(others), 'other cause')}")
    return lines + _backwards(history)


def _memory(history: Sequence[Event]) -> str:
    """The most that a worker has held, and of which stage it was."""
    told = [event.details["peak_bytes"] for event in history if event.kind == "memory"]
    peaks = [(peak, stage) for stages in told for stage, peak in enumerate(stages) if peak is not None]
    if not peaks:
        return ""
    most, stage = max(peaks)
    return f", the largest with {most / 1e9:.3g} GB of memory (stage {stage})"


def _loss(steps: Sequence[Event]) -> str:
    first, last = (step.details.get("loss") for step in (steps[0], steps[-1]))
    if last is None or math.isnan(last):  # a step that optimizes by itself need not return one
        return ""
    if first is None or math.isnan(first) or steps[0].step:
        return f", loss {last:.4g}"
    return f", loss {first:.4g} at first and {last:.4g} now"


def _workers(history: Sequence[Event], positions: Positions) -> str:
    rosters = [event.details["roster"] for event in history if event.kind == "regrouped"]
    alive = len(rosters[-1]) if rosters else positions.num_workers
    if alive == positions.num_workers:
        return _count(alive, "worker")
    left = " left" if any(event.kind in ("failure", "left") for event in history) else ""  # others never came
    return f"{alive} of {positions.num_workers} workers{left}"


def _backwards(history: Sequence[Event]) -> list[str]:
    """The effect of splitting backwards, if the newest plan does so by choice."""
    chosen = [event.details if event.kind == "chosen" else event.details.get("backward") for event in history]
    newest = next((facts for facts in reversed(chosen) if facts), None)
    if newest is None or not newest["split"]:
        return []
    cost, wins = 100 * newest["cost"], 100 * (newest["wins"] or 0.0)
    return [f"The backward pass is split in two, for {cost:.1f} % more computing time and {wins:.1f} % shorter steps."]


def _lost(history: Sequence[Event]) -> dict[str, float]:
    """Seconds by cause."""
    lost: dict[str, float] = {}
    causes: list[str] = []  # of failures that are not recovered from
    stage_lost: Event | None = None

    def add(cause: str, seconds: float) -> None:
        lost[cause] = lost.get(cause, 0.0) + seconds

    for event in history:
        seconds = event.seconds or 0.0
        if event.kind == "failure":
            causes.append(f"worker {event.worker}: {event.details['cause']}")
        elif event.kind == "recovered" and causes:
            add("; ".join(causes), seconds)
            causes = []
        elif event.kind == "rejoined":
            add("replacements were given their state", seconds)
        elif event.kind == "cleared":
            add(f"worker {event.worker} was silent or stuck, and came back", seconds)
        elif event.kind == "stage_lost":
            stage_lost, causes = event, []
        elif event.kind == "step" and stage_lost is not None:
            add(f"stage lost at step {stage_lost.step}, and started again", event.time - stage_lost.time)
            stage_lost = None
    return lost


def _count(number: int, name: str) -> str:
    return f"{number:,} {name}{'' if number == 1 else 's'}"
