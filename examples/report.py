"""Used by train_gpt.py and train_vision.py: the report at the end of a run, what failed and what it cost.

Everything is computed from two records that the launching process has after ``trainer.fit``: the strategy's history (a
list of events) and the schedules it planned, one per generation, i.e. per set of live workers. The functions that
compute are pure; :func:`render` makes tables of what they return. A run without failure, or with another strategy (no
history at all), gives a shorter report.
"""

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from rich.console import Group, RenderableType
from rich.table import Table

from lightning_recycle import Event
from lightning_recycle.planning import Schedule
from lightning_recycle.visualize import save_gantt

WINDOW = 5
"""Steps whose mean loss is shown."""


@dataclass(frozen=True)
class Failure:
    """A worker's end and what followed, in seconds since the failure; None: it did not happen in this run."""

    worker: tuple[int, int] | None
    kind: str
    cause: str
    step: int
    detected_after: float | None
    regrouped_after: float | None
    recovered_after: float | None


@dataclass(frozen=True)
class Phase:
    """The steps of one generation.

    Args:
        generation: Its number.
        live_workers: How many workers it had, if that was recorded.
        steps: Number of committed steps.
        step_seconds: Median duration of a step, the first one left out (it holds start-up or recovery).
        planned_seconds: Duration of a step in the schedule.
    """

    generation: int
    live_workers: int | None
    steps: int
    step_seconds: float | None
    planned_seconds: float | None


@dataclass(frozen=True)
class Losses:
    """Training loss at the first step, and at the end (mean of a few steps)."""

    first: float
    last: float


def find_failures(history: Sequence[Event]) -> list[Failure]:
    """Each failure, with the first regrouping and the first recovery that came after it."""
    failures = []
    for index, event in enumerate(history):
        if event.kind != "failure":
            continue
        died = event.time - (event.seconds or 0.0)
        failures.append(
            Failure(
                worker=event.worker,
                kind=str(event.details.get("kind", "unknown")),
                cause=str(event.details.get("cause", "unknown")),
                step=event.step,
                detected_after=event.seconds,
                regrouped_after=_seconds_until("regrouped", died, history[index + 1 :]),
                recovered_after=_seconds_until("recovered", died, history[index + 1 :]),
            )
        )
    return failures


def _seconds_until(kind: str, since: float, later: Iterable[Event]) -> float | None:
    return next((event.time - since for event in later if event.kind == kind), None)


def find_phases(history: Sequence[Event], schedules: Sequence[Schedule]) -> list[Phase]:
    """The generations that committed steps, each with the last of ``schedules`` that was planned for its workers."""
    planned = {
        frozenset(schedule.grid.rank(worker) for worker in schedule.live_workers): schedule for schedule in schedules
    }
    rosters = {event.generation: event.details["roster"] for event in history if event.kind == "regrouped"}
    phases = []
    for generation in sorted({event.generation for event in history if event.kind == "step"}):
        durations = [event.seconds for event in history if event.kind == "step" and event.generation == generation]
        steady = [seconds for seconds in durations[1:] if seconds is not None]
        roster = rosters.get(generation)
        schedule = None if roster is None else planned.get(frozenset(roster))
        phases.append(
            Phase(
                generation=generation,
                live_workers=None if roster is None else len(roster),
                steps=len(durations),
                step_seconds=median(steady) if steady else None,
                planned_seconds=schedule.period if schedule else None,
            )
        )
    return phases


def read_losses(path: Path, column: str = "train_loss") -> dict[int, float]:
    """The loss of each step from a CSVLogger's ``metrics.csv``; empty when there is no such file or column."""
    if not path.is_file():
        return {}
    with path.open(newline="") as file:
        return {int(row["step"]): float(row[column]) for row in csv.DictReader(file) if row.get(column)}


def summarize_losses(losses: Mapping[int, float], window: int = WINDOW) -> Losses | None:
    """Loss of the first step, and the mean of up to ``window`` last ones; None without any loss."""
    if not losses:
        return None
    steps = sorted(losses)
    return Losses(first=losses[steps[0]], last=fmean(losses[step] for step in steps[-window:]))


def render(
    losses: Losses | None,
    failures: Sequence[Failure],
    phases: Sequence[Phase],
    units_per_step: int,
    *,
    loss_unit: str = "nats per byte",
    unit: str = "tokens",
) -> RenderableType:
    """Tables of loss, failures and generations; those without data are left out.

    Args:
        losses: Losses of the run.
        failures: Failures of the run.
        phases: Phases of the run.
        units_per_step: What a step processes, counted in ``unit``.
        loss_unit: Unit of the loss.
        unit: Unit of what is processed.
    """
    tables: list[RenderableType] = []
    if losses:
        table = Table("first step", f"mean of the last {WINDOW}", title=f"Loss ({loss_unit})")
        table.add_row(f"{losses.first:.3f}", f"{losses.last:.3f}")
        tables.append(table)
    if failures:
        table = Table("worker", "kind", "cause", "step", "detected", "regrouped", "next commit", title="Failures")
        for failure in failures:
            table.add_row(
                "-" if failure.worker is None else f"pipeline {failure.worker[0]}, stage {failure.worker[1]}",
                failure.kind,
                failure.cause,
                str(failure.step),
                *(
                    _milliseconds(seconds)
                    for seconds in (failure.detected_after, failure.regrouped_after, failure.recovered_after)
                ),
            )
        table.caption = "times since the failure"
        tables.append(table)
    if phases:
        table = Table(
            "generation",
            "workers",
            "steps",
            "measured step",
            "planned step",
            "steps/s",
            f"{unit}/s",
            title="Throughput",
        )
        for phase in phases:
            rate = 1 / phase.step_seconds if phase.step_seconds else math.nan
            table.add_row(
                str(phase.generation),
                "-" if phase.live_workers is None else str(phase.live_workers),
                str(phase.steps),
                _milliseconds(phase.step_seconds),
                _milliseconds(phase.planned_seconds),
                "-" if math.isnan(rate) else f"{rate:.2f}",
                "-" if math.isnan(rate) else f"{rate * units_per_step:,.0f}",
            )
        table.caption = "medians without the first step of a generation"
        tables.append(table)
    return Group(*tables)


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:,.0f} ms"


def write_pictures(schedules: Sequence[Schedule], directory: Path) -> list[Path]:
    """Write a Gantt chart of the first and the last schedule, on one time scale."""
    if not schedules:
        return []
    chosen = {"fault-free": schedules[0]}
    if schedules[-1].failed:
        chosen[f"without {', '.join(map(str, sorted(schedules[-1].failed)))}"] = schedules[-1]
    titles = [f"{schedule.grid}, {name}" for name, schedule in chosen.items()]
    return [save_gantt(directory / "schedules.svg", list(chosen.values()), titles, unit="s")]
