"""Which of the stages have more workers, and which fewer.

Concept: where stages share layers the load is the same in every order, but the schedule is not: stages with few workers
have few layers, hold many micro-batches, and pass gradients on more slowly. No bound tells which order is good, so
short searches for a schedule (*drafts*) do: a hill climb over exchanges of two stages, the farthest apart first.

Contract: pure, deterministic if drafts are; no more drafts than asked for.

Must not know: layers, schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TypeAlias

__all__ = ["Draft", "better_orders"]

Draft: TypeAlias = Callable[[tuple[int, ...]], float]
"""Seconds of a step with so many workers in each stage, about; infinity where there is no plan."""


def better_orders(starts: Iterable[tuple[int, ...]], draft: Draft, most: int) -> list[tuple[int, ...]]:
    """Numbers of workers, those with the shortest draft first: ``starts``, and what is found from the best of them.

    Args:
        starts: workers of each stage; of all workers as many in each.
        draft: see :data:`Draft`.
        most: drafts at most.
    """
    found = {counts: draft(counts) for counts in islice(dict.fromkeys(starts), most)}
    best = min(found, key=lambda counts: found[counts], default=())
    others = _exchanges(best)
    while len(found) < most and (other := next((each for each in others if each not in found), None)):
        found[other] = draft(other)
        if found[other] < found[best]:
            best, others = other, _exchanges(other)
    return sorted(found, key=lambda counts: found[counts])


def _exchanges(counts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """All orders in which two stages of different numbers have changed places."""
    stages = range(len(counts))
    pairs = [(one, other) for one in stages for other in stages if one < other and counts[one] != counts[other]]
    for one, other in sorted(pairs, key=lambda pair: (pair[0] - pair[1], pair)):
        found = list(counts)
        found[one], found[other] = counts[other], counts[one]
        yield tuple(found)
