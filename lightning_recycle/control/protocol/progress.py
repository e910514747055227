"""Who holds everybody up: what speaks against workers that send heartbeats but make no progress. Pure.

Concept: in a pipeline nearly everybody waits nearly always, and a wait says nothing about the worker that
waits. Where workers wait for each other the culprit is the one that does not: it has been inside one operation for
longer than that operation can take. So only workers that do *not* wait are suspected, each by the usual time of its own
operation (as measured in this run), times a factor, with the heartbeat's timeout as a floor. Whether a suspected worker
is given up is decided elsewhere (:mod:`~lightning_recycle.control.protocol.suspicion`).

What has no usual time is given ``patience``, half an hour: the first steps, reading data, the optimizer, hooks and
callbacks, validation, checkpoints. A process that is being debugged is never suspected.

If everybody waits and nobody works, a message was lost: nobody is to blame, and the same workers connect again. If all
wait for the coordinator, however, it is merely busy, for example with the parts of a large checkpoint.

Must not know: messages, sockets, clocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lightning_recycle.control.protocol.suspicion import Place, Sign
from lightning_recycle.planning.ops import OpKind

__all__ = ["PATIENCE", "Observation", "everybody_waits", "sign_of_work"]

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
        place: what it is at, the same for all that do the same work; None if that is not known.
    """

    operation: str
    kind: str
    waiting: bool
    seconds: float
    debugged: bool = False
    coordinated: bool = False
    place: Place | None = None


def sign_of_work(seen: Observation, usual: float | None, timeout: float, patience: float = PATIENCE) -> Sign | None:
    """For how long a worker has been at the same work; None if it waits for others or is being debugged.

    Args:
        seen: what the worker does.
        usual: usual seconds of that kind of operation there; None if not known, or if there are none.
        timeout: seconds that every operation may take.
        patience: seconds for what has no usual duration.
    """
    if seen.waiting or seen.debugged:
        return None
    limit = _limit(seen.kind, usual, timeout, patience)
    cause = (
        f"it has been in {seen.operation!r} for {seen.seconds:.1f} s without waiting for anybody, more than the"
        f" {limit:.1f} s that it may take"
    )
    return Sign(cause, seen.seconds, limit, patience, seen.place)


def everybody_waits(
    observations: Mapping[int, Observation], usual: Callable[[int, str], float | None], timeout: float
) -> bool:
    """Whether all workers wait for each other for longer than any operation can take.

    Args:
        observations: what each worker does, by rank.
        usual: (rank, kind) -> usual seconds of that kind of operation there, None if not known.
        timeout: seconds that every operation may take.
    """
    if not observations:
        return False
    times = [usual(rank, kind) or 0.0 for rank in observations for kind in map(str, OpKind)]
    limit = max(2 * timeout, _FACTOR * max(times))
    waiting = all(seen.waiting and seen.seconds > limit for seen in observations.values())
    return waiting and not all(seen.coordinated for seen in observations.values())


def _limit(kind: str, usual: float | None, timeout: float, patience: float) -> float:
    if kind == "RECOVER":
        return max(timeout, _RECOVERY_SECONDS)
    return patience if usual is None else max(timeout, _FACTOR * usual)
