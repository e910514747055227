"""Availability traces of public clouds: how many nodes were up, and when.

Two of the files name their nodes, three only count them; where nodes are only counted, those that left last are the
first to return. Times are seconds from the first record. The data and their licence (MIT, Bamboo project) lie beside
this file, see README.md there.

>>> trace = load_trace("aws-p3")
>>> trace.peak, round(trace.duration / 3600, 1)
(32, 11.4)
"""

from __future__ import annotations

import csv
import datetime
from dataclasses import dataclass
from importlib import resources
from os import PathLike, fspath
from pathlib import Path

from lightning_recycle.errors import ConfigurationError, choose_from

__all__ = ["NodeEvent", "Trace", "available_traces", "load_trace"]

_FILES = {
    "aws-g4dn": "aws-g4dn-trace.csv",
    "aws-p2": "aws-p2-trace.csv",
    "aws-p3": "aws-p3-trace.csv",
    "gcp-a100": "gcp-a100x1-east1b.txt",
    "gcp-v100": "gcp-v100x1-east1c.txt",
}


@dataclass(frozen=True, slots=True)
class NodeEvent:
    """At ``time`` (seconds) the node ``node`` (from 0) comes (``up``) or goes.

    A node number stands for a place in the cluster, not for a machine: it is reused when a new machine replaces one
    that has left.
    """

    time: float
    node: int
    up: bool


@dataclass(frozen=True, slots=True)
class Trace:
    """One trace.

    Args:
        name: name from :func:`available_traces`, or the file's path.
        events: arrivals and departures in time order, departures first at equal times.
        duration: time of the last record, in seconds.
    """

    name: str
    events: tuple[NodeEvent, ...]
    duration: float

    @property
    def availability(self) -> tuple[tuple[float, int], ...]:
        """(seconds, available nodes from then on), for each change of the number."""
        found: list[tuple[float, int]] = []
        count = 0
        for event in self.events:
            count += 1 if event.up else -1
            if found and found[-1][0] == event.time:
                found.pop()
            if not found or found[-1][1] != count:
                found.append((event.time, count))
        return tuple(found)

    @property
    def peak(self) -> int:
        """The largest number of nodes available at once."""
        return max((count for _, count in self.availability), default=0)

    @property
    def mean(self) -> float:
        """Mean number of available nodes over the duration."""
        steps = self.availability
        ends = [time for time, _ in steps[1:]] + [self.duration]
        total = sum(count * (end - time) for (time, count), end in zip(steps, ends, strict=True))
        return total / self.duration if self.duration else 0.0


def available_traces() -> tuple[str, ...]:
    """The names that :func:`load_trace` knows."""
    return tuple(sorted(_FILES))


def load_trace(name: str | PathLike[str], owner: str = "") -> Trace:
    """The shipped trace called ``name``, or the trace in a file of the same formats.

    Args:
        name: one of :func:`available_traces`, or a path. The file's rows are (milliseconds, "add" or "remove", node's
            name), (date, time of day, instances up), or (hours, instances up).
        owner: the class whose option ``trace`` it is, for errors.

    Raises:
        ConfigurationError: when there is no such trace or file, or the file cannot be parsed.
    """
    name = fspath(name)
    try:
        if name in _FILES:
            text = resources.files(__name__).joinpath(_FILES[name]).read_text(encoding="utf-8")
        else:
            text = Path(name).read_text(encoding="utf-8")
    except (OSError, ValueError):
        remedy = f"there is no such trace: {choose_from(available_traces())}, or give the path of a file"
        raise ConfigurationError.for_option(owner, "trace", name, remedy, available_traces()) from None
    rows = [[cell.strip() for cell in row] for row in csv.reader(text.splitlines()) if row]
    try:
        if rows[0][1] in ("add", "remove"):
            return _named(name, rows)
        return _counted(name, _dated(rows) if len(rows[0]) == 3 else _timed(rows))
    except (ValueError, IndexError) as error:
        raise ConfigurationError(
            f"the trace {name} cannot be parsed ({error}): each row must be 'milliseconds,add or remove,node', "
            "'date, time, instances up' or 'hours,instances up'."
        ) from error


def _named(name: str, rows: list[list[str]]) -> Trace:
    """Rows of (milliseconds, "add" or "remove", node's name)."""
    records = sorted(((int(time) / 1e3, action == "add", who) for time, action, who in rows), key=lambda r: r[:2])
    places: dict[str, int] = {}
    events = []
    for time, up, who in records:
        if up and who not in places:
            taken = set(places.values())
            places[who] = next(place for place in range(len(taken) + 1) if place not in taken)
            events.append(NodeEvent(time, places[who], True))
        elif not up and who in places:
            events.append(NodeEvent(time, places.pop(who), False))
    return Trace(name, tuple(events), records[-1][0])


def _dated(rows: list[list[str]]) -> list[tuple[float, int]]:
    """(seconds, instances up) of rows of (date, time, instances up), unordered."""
    records = sorted((datetime.datetime.fromisoformat(f"{date} {time}"), int(count)) for date, time, count in rows)
    return [((moment - records[0][0]).total_seconds(), count) for moment, count in records]


def _timed(rows: list[list[str]]) -> list[tuple[float, int]]:
    """(seconds, instances up) of rows of (hours, instances up); the last one counts."""
    counts = {float(hours): int(count) for hours, count in rows}
    begin = min(counts)
    return [(round(3600 * (hours - begin), 3), counts[hours]) for hours in sorted(counts)]


def _counted(name: str, records: list[tuple[float, int]]) -> Trace:
    """Of (seconds, instances up) in the order of time."""
    up = 0
    events = []
    for seconds, count in records:
        events += [NodeEvent(seconds, node, True) for node in range(up, count)]
        events += [NodeEvent(seconds, node, False) for node in reversed(range(count, up))]
        up = count
    return Trace(name, tuple(events), records[-1][0])
