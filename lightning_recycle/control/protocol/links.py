"""Whom to evict when live workers cannot reach each other. Pure.

Concept: the workers of a generation are all connected to each other, so one *broken pair* (two live workers of
which one cannot reach the other) stops everybody. Neither is to blame more than the other, but without one of the two
the rest can go on. So the workers to evict are the fewest that leave no broken pair behind (a vertex cover of the
pairs), and never the last one that holds the state of its stage: that state exists nowhere else.

Must not know: messages, generations, sockets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import TypeAlias

__all__ = ["Pair", "choose_evictions"]

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
        pairs: the broken pairs.
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
        for gone in (frozenset({worst}), partners):  # either it goes, or all that it cannot reach
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
