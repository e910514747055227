"""Attribution of faults: to a machine, the user's code, or broken links. Pure.

Exceptions: an exception that a fault of a machine may explain is settled by experiment (:func:`judge`). The same work
runs once more elsewhere: the worker that raised is evicted, and a peer of its stage does what it did. If the exception
follows the work, it is the user's own; if it stays with the machine, the run goes on without that machine. The last
holder of a stage has no peer: it runs the work again itself, if that is exact. The replicas of a stage are never spent
on one cause: a place (step and operation, or a line of code outside of steps) is tried ``retries`` times more, at most
one worker of a stage is evicted in a step (a full disk and a storage that is gone are common to all), and in one step a
stage raises at most ``retries + 1`` times.

Links: the workers of a generation are all connected to each other, so one *broken pair* (two live workers of which one
cannot reach the other) stops all. Neither is to blame more than the other, but without one of the two the rest can go
on. So the workers to evict are the fewest that leave no broken pair behind (a vertex cover of the pairs), and never the
last one that holds the state of its stage: that state exists nowhere else (:func:`choose_evictions`).

Must not know: which classes of exceptions are suspected (:mod:`~lightning_recycle.runtime.machine_errors`), sockets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from lightning_recycle.control.protocol.messages import Raised

OUTSIDE = -1
"""The step of what is raised outside of steps: its operation names the code, and any step may meet it."""

_REMEMBERED_STEPS = 1000  # by then a hook that writes to a full disk has been called again, on whatever worker


class Verdict(Enum):
    """Verdict on a worker that raised."""

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


Pair: TypeAlias = tuple[int, int]
"""Two ranks, the lower one first."""

_MAX_TRIES = 2000  # sets tried; the coordinator must not think for long. Up to 20 broken pairs or so, a few dozen do


def choose_evictions(
    pairs: Collection[Pair],
    holders: Iterable[Collection[int]],
    leader: int,
    can_recover: Callable[[frozenset[int]], bool] = lambda evicted: True,
) -> tuple[int, ...] | None:
    """Chooses the workers without which no broken pair is left.

    Of the smallest sets it takes the one that repeatedly evicts the worker in most of the remaining pairs; among equals
    one that holds no state yet, then one that is not the leader, then the highest rank. With too many pairs to try all
    sets, the result may be larger than necessary.

    Args:
        pairs: the broken pairs; of a worker that must go whatever else does, with itself.
        holders: for each stage, the ranks that hold its state.
        leader: the rank that speaks for the run.
        can_recover: whether all others could go on together without these ranks, with what each of them holds.

    Returns:
        The ranks in order; None if there is no such set: some that cannot reach each other must stay.
    """
    stages = [frozenset(stage) for stage in holders]
    holding = frozenset[int]().union(*stages)
    best: frozenset[int] | None = None
    tries = 0

    def search(evicted: frozenset[int], left: frozenset[Pair]) -> None:
        """Tries all sets that contain ``evicted``; further evictions must repair the pairs ``left``."""
        nonlocal best, tries
        tries += 1
        if tries > _MAX_TRIES or not all(stage - evicted for stage in stages):
            return
        if best is not None and len(evicted) + _least(left) >= len(best):
            return
        if not left:
            best = evicted if can_recover(evicted) else best
            return
        broken = Counter(rank for pair in left for rank in pair)
        worst = max(broken, key=lambda rank: (broken[rank], rank not in holding, rank != leader, rank))
        partners = frozenset(rank for pair in left if worst in pair for rank in pair) - {worst}
        apart = () if (worst, worst) in left else (partners,)
        for gone in (frozenset({worst}), *apart):  # either it goes, or all that it cannot reach
            search(evicted | gone, frozenset(pair for pair in left if gone.isdisjoint(pair)))

    search(frozenset(), frozenset(pairs))
    return None if best is None else tuple(sorted(best))


def _least(pairs: Collection[Pair]) -> int:
    """How many evictions ``pairs`` take at least: pairs without a common worker take one each."""
    seen: set[int] = set()
    for pair in sorted(pairs):
        if seen.isdisjoint(pair):
            seen.update(pair)
    return len(seen) // 2
