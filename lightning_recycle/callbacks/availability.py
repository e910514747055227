"""Faults at times instead of points: drawn at random, or replayed from an availability trace.

Concept: a source yields :class:`TimedFault` values, each a time, a rank and a kind. It is a pure function of its
arguments, so every process computes the same faults for the same rank without asking anybody. An :class:`Agenda` holds
those of one process against a clock.

Contract: times are seconds. Nothing here fails; it only says what is due.

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
    """The worker of ``rank`` is to fail at ``time`` seconds, in the way called ``kind``."""

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
    """The random faults of one process, at seconds since its first operation, the earliest first.

    The times between them are exponential with mean ``mtbf * num_workers``, drawn from (seed, rank, incarnation) and
    nothing else: a process fails when it would have failed, whatever happens to the others. After a fault from which a
    process does not go on (any but "slow") there are no more.

    Args:
        mtbf: mean seconds between two failures anywhere in a complete grid.
        num_workers: of the grid.
        kinds: each fault is one of them, with equal probability.
        seed: of the draws.
        rank: of the process.
        incarnation: 0 for the first process of a position, 1, 2, ... for its replacements.
        max_faults: only the first so many of all first processes' faults happen, and none in replacements: so there are
            never more, without any process having to know of another.
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
    """The faults of all workers while ``availability`` falls, at seconds since the run began, the earliest first.

    A grid seldom has as many workers as a trace has nodes, so the number of nodes is taken in proportion: at the
    trace's peak all W workers are available, at n nodes W * n / peak of them, rounded to the nearest. When that number
    falls, as many workers fail, drawn from (seed, index of the record) among those that have not failed before or whose
    place has been filled since. When it rises, as many failed places count as filled, the longest empty first. Whether
    a process really takes the place is up to ``ReCycleStrategy(restart_workers=...)``; without, the fault of an empty
    place hits nobody. A run begins with all workers, whatever the trace begins with.

    Args:
        availability: (time in seconds, nodes from then on), in order.
        num_workers: of the grid.
        kinds: each fault is one of them, with equal probability.
        seed: of the draws.
        time_scale: seconds of wall-clock for one second of the trace: 0.01 plays an hour in 36 s.
        max_faults: only the first so many.
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
    """What is due in one process, by its clock.

    What lies in the past at the first look never becomes due: it would have hit a process that was not there yet.

    Args:
        faults: of this process, the earliest first.
        clock: seconds, from anywhere.
        origin: where the clock stands when the times of ``faults`` begin; by default, at the first look.
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
