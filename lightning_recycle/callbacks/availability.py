"""Faults at times instead of points: drawn at random, or replayed from an availability trace.

Concept: a source yields :class:`TimedFault` values, each a time, a rank and a kind. It is a pure function of its
arguments, so all processes agree on the faults of a rank without communicating. An :class:`Agenda` compares those of
one process with a clock.

Contract: times are seconds. Nothing here makes anything fail; it only says what is due.

Must not know: how a failure is made, Lightning.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

__all__ = ["Agenda", "TimedFault", "random_faults", "trace_faults"]


@dataclass(frozen=True, order=True, slots=True)
class TimedFault:
    """The worker of ``rank`` is to fail at ``time`` seconds in the way ``kind``."""

    time: float
    rank: int
    kind: str


def random_faults(
    mtbf: float,
    num_workers: int,
    kinds: Sequence[str],
    seed: int,
    rank: int,
    incarnation: int = 0,
    max_faults: int | None = None,
) -> Iterator[TimedFault]:
    """The random faults of one process in time order, in seconds since its first operation.

    The times between them are exponential with mean ``mtbf * num_workers``, drawn from (seed, rank, incarnation) and
    nothing else, so other processes do not affect them. A fault that a process does not survive (any but "slow") is its
    last.

    Args:
        mtbf: mean seconds between two failures anywhere in a complete grid.
        num_workers: number of workers in the grid.
        kinds: kinds of faults, drawn with equal probability.
        seed: seed of the draws.
        rank: rank of the process.
        incarnation: 0 for the first process of a position, 1, 2, ... for its replacements.
        max_faults: only this many faults happen, the first among those of all original processes, and none in
            replacements: a limit that no process needs others to keep.
    """
    if max_faults is None:
        return _arrivals(mtbf * num_workers, kinds, seed, rank, incarnation)
    if incarnation > 0:
        return iter(())
    everybody = (_arrivals(mtbf * num_workers, kinds, seed, other, 0) for other in range(num_workers))
    allowed = itertools.islice(heapq.merge(*everybody), max_faults)
    return (fault for fault in allowed if fault.rank == rank)


def _arrivals(mean: float, kinds: Sequence[str], seed: int, rank: int, incarnation: int) -> Iterator[TimedFault]:
    rng = random.Random(f"{seed}/{rank}/{incarnation}")
    moment = 0.0
    while True:
        moment += rng.expovariate(1 / mean)
        kind = rng.choice(kinds)
        yield TimedFault(moment, rank, kind)
        if kind != "slow":
            return


def trace_faults(
    availability: Sequence[tuple[float, int]],
    num_workers: int,
    kinds: Sequence[str],
    seed: int,
    time_scale: float = 1.0,
    max_faults: int | None = None,
) -> tuple[TimedFault, ...]:
    """The faults of all workers while ``availability`` falls, in time order, in seconds since the run began.

    A grid seldom has as many workers as a trace has nodes, so nodes are scaled to workers: at the
    trace's peak all W workers are available, at n nodes W * n / peak of them, rounded to the nearest. When that number
    falls, as many workers fail, drawn from (seed, index of the record) among those that have not failed, or whose place
    has been filled since. When it rises, as many failed places count as filled, the longest empty first. Whether a
    process really fills the place depends on ``ReCycleStrategy(restart_workers=...)``; without it, a fault of an empty
    place has no effect. A run begins with all workers, however the trace begins.

    Args:
        availability: (time in seconds, nodes from then on), in order.
        num_workers: number of workers in the grid.
        kinds: kinds of faults, drawn with equal probability.
        seed: seed of the draws.
        time_scale: wall-clock seconds per second of the trace: 0.01 plays an hour in 36 s.
        max_faults: only this many faults, the first ones.
    """
    peak = max((nodes for _, nodes in availability), default=0)
    if peak == 0:
        return ()
    targets = [int(num_workers * nodes / peak + 0.5) for _, nodes in availability]
    filled = list(range(num_workers))
    empty: list[int] = []
    faults: list[TimedFault] = []
    for index, (before, target) in enumerate(itertools.pairwise(targets), start=1):
        if target > before:
            returning = empty[: target - before]
            del empty[: target - before]
            filled = sorted(filled + returning)
        elif target < before:
            rng = random.Random(f"{seed}/{index}")
            moment = availability[index][0] * time_scale
            for rank in rng.sample(filled, min(before - target, len(filled))):
                filled.remove(rank)
                empty.append(rank)
                faults.append(TimedFault(moment, rank, rng.choice(kinds)))
    return tuple(faults[:max_faults])


class Agenda:
    """The faults that are due in one process, by its clock.

    Faults already past at the first look never become due: they would have hit a process that did not exist yet.

    Args:
        faults: the faults of this process in time order.
        clock: returns seconds, from any origin.
        origin: the clock's value at time 0 of ``faults``; by default, that of the first look.
    """

    def __init__(self, faults: Iterable[TimedFault], clock: Callable[[], float], origin: float | None = None) -> None:
        self._faults = iter(faults)
        self._origin = origin
        self._clock = clock
        self._looked = False
        self._next = next(self._faults, None)

    def take_due(self) -> TimedFault | None:
        """The earliest fault that is due and has not been taken, if any."""
        if self._next is None:
            return None
        if self._origin is None:
            self._origin = self._clock()
        now = self._clock() - self._origin
        if not self._looked:
            self._looked = True
            while self._next is not None and self._next.time < now:
                self._next = next(self._faults, None)
        if self._next is None or self._next.time > now:
            return None
        due, self._next = self._next, next(self._faults, None)
        return due
