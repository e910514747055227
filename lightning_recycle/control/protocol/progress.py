"""Who holds everybody up: judges workers that send heartbeats but make no progress. Pure.

Concept: in a pipeline nearly everybody waits nearly always, and a wait says nothing about the worker that
waits. Where workers wait for each other the culprit is the one that does not: it has been inside one operation for
longer than that operation can take. So only workers that do *not* wait are judged, each by the usual time of its own
operation (as measured in this run), times a factor, with the heartbeat's timeout as a floor.

What has no usual time is given ``patience``, half an hour: the first steps, reading data, hooks and callbacks,
validation, checkpoints. A process that is being debugged is never judged.

If everybody waits and nobody works, a message was lost: nobody is to blame, and the same workers connect again. If all
wait for the coordinator, however, it is merely busy, for example with the parts of a large checkpoint.

Must not know: messages, sockets, clocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

__all__ = ["PATIENCE", "Observation", "Verdict", "judge"]

_FACTOR = 10.0  # times the usual duration of an operation
_RECOVERY_SECONDS = 5.0  # at least, for a worker's own work during a recovery
PATIENCE = 1800.0
"""Seconds for what has no usual duration."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What a worker's main thread does.

    Args:
        operation: its name, for people.
        kind: the operation's kind, if it has a usual duration: that of an operation of the schedule, or "RECOVER".
        waiting: whether it waits for another process.
        seconds: how long it has been doing so.
        debugged: whether a debugger may have stopped it.
        coordinated: whether it waits for the coordinator, not for another worker.
    """

    operation: str
    kind: str
    waiting: bool
    seconds: float
    debugged: bool = False
    coordinated: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is wrong, if anything.

    Args:
        stuck: for each rank that holds the others up, the reason to think so.
        deadlocked: whether all wait for each other.
    """

    stuck: Mapping[int, str]
    deadlocked: bool = False


def judge(
    observations: Mapping[int, Observation],
    usual: Callable[[int, str], float | None],
    timeout: float,
    patience: float = PATIENCE,
) -> Verdict:
    """Judges the workers of a generation.

    Args:
        observations: what each worker does, by rank.
        usual: (rank, kind) -> usual seconds of that kind of operation there, None if not known.
        timeout: seconds that every operation may take.
        patience: seconds for what has no usual duration.
    """
    stuck: dict[int, str] = {}
    for rank, seen in observations.items():
        if seen.waiting or seen.debugged:
            continue
        limit = _limit(seen.kind, usual(rank, seen.kind) if seen.kind else None, timeout, patience)
        if seen.seconds > limit:
            stuck[rank] = (
                f"it has been in {seen.operation!r} for {seen.seconds:.1f} s without waiting for anybody, more than the"
                f" {limit:.1f} s that it may take"
            )
    if stuck or not observations:
        return Verdict(stuck)
    times = [usual(rank, kind) or 0.0 for rank in observations for kind in ("F", "B", "W", "BW", "REDUCE", "STEP")]
    limit = max(2 * timeout, _FACTOR * max(times))
    waiting = all(seen.waiting and seen.seconds > limit for seen in observations.values())
    return Verdict({}, waiting and not all(seen.coordinated for seen in observations.values()))


def _limit(kind: str, usual: float | None, timeout: float, patience: float) -> float:
    if kind == "RECOVER":
        return max(timeout, _RECOVERY_SECONDS)
    return patience if usual is None else max(timeout, _FACTOR * usual)
