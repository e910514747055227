"""Whose an exception is: a fault of the worker's machine, or the user's own. Pure.

Concept: an exception that a fault of a machine may explain is settled by experiment. The same work runs once more
elsewhere: the worker that raised is evicted, and a peer of its stage does what it did. If the exception follows the
work, it is the user's own; if it stays with the machine, the run goes on without that machine. The last holder of a
stage has no peer: it runs the work again itself, if that is exact.

Contract: :func:`judge` sees what was raised before, however long ago, and decides without clocks. It never spends the
replicas of a stage on one cause: a place (step and operation, or a line of code outside of steps) is tried
``retries`` times more, at most one worker of a stage is evicted in a step (a full disk and a storage that is gone
are common to all), and in one step a stage raises at most ``retries + 1`` times.

Must not know: which classes of exceptions are suspected
(:mod:`~lightning_recycle.runtime.machine_errors`), who is live.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from lightning_recycle.control.protocol.messages import Raised

__all__ = ["OUTSIDE", "Remembered", "Verdict", "judge", "remember"]

OUTSIDE = -1
"""The step of what is raised outside of steps: its operation names the code, and any step may meet it."""

_REMEMBERED_STEPS = 1000  # by then a hook that writes to a full disk has been called again, on whatever worker


class Verdict(Enum):
    """What follows for the worker that raised."""

    EVICT = "it is evicted, and a peer does its work"
    AGAIN = "all connect again, and it runs the work once more itself"
    OWN = "the exception is the user's own"


@dataclass(frozen=True, slots=True)
class Remembered:
    """An exception that was raised.

    Args:
        rank: the worker that raised it.
        generation: its generation then; a worker raises at most once in a generation.
        stage: its stage.
        place: the step (:data:`OUTSIDE` of steps) and the operation.
        version: the number of steps that all workers had applied then.
    """

    rank: int
    generation: int
    stage: int
    place: tuple[int, str]
    version: int


def judge(
    raised: Raised, stage: int, version: int, past: Sequence[Remembered], has_peer: bool, retries: int
) -> Verdict:
    """Decides about a suspected exception.

    Args:
        raised: the exception.
        stage: the stage of the worker that raised it.
        version: the number of steps that all workers have applied.
        past: what was raised before, without this one.
        has_peer: whether another live worker holds the state of the stage.
        retries: how often work that raised is run again.
    """
    of_stage = [one for one in past if one.stage == stage]
    at_place = sum(one.place == (raised.step, raised.operation) for one in of_stage)
    since_commit = sum(one.version == version for one in of_stage)
    if at_place >= retries or since_commit > retries:
        return Verdict.OWN
    # A lost device is no common cause, and its process cannot go on.
    if has_peer and (raised.sticky or not since_commit):
        return Verdict.EVICT
    return Verdict.AGAIN if raised.exact and not raised.sticky else Verdict.OWN


def remember(raised: Raised, stage: int, version: int, past: Sequence[Remembered]) -> tuple[Remembered, ...]:
    """``past`` with ``raised``, without what is long ago."""
    new = Remembered(raised.rank, raised.generation, stage, (raised.step, raised.operation), version)
    return (*(one for one in past if version - one.version <= _REMEMBERED_STEPS), new)
