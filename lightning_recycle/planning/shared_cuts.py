"""Where to cut if neighbouring stages may share a layer: exact to a hundredth of a layer.

Concept: the workers of a stage can run a part of a layer (:mod:`~lightning_recycle.planning.fractional_cuts`), so for a
limit T on the load the first stage takes as much as T allows, the second as much of the rest, and so on; T is feasible
if all layers are taken, and bisection finds the least one. A shared layer costs memory, one more step of the optimizer
and an exchange of its gradients. So among the cuts within a little more than the least T the one with the fewest shared
layers is chosen: dynamic programming over stages and bounds, where a stage ends at a whole bound or as far as it can.

Contract: pure, deterministic.

Must not know: schedules, which worker goes where.

Source: the check of a limit from left to right is that of chains-on-chains partitioning (Pinar and Aykanat, "Fast
optimal load balancing algorithms for 1D partitioning", 2004); here a part may have a piece of an item.

Units: seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from lightning_recycle.planning.fractional_cuts import PARTS, Bounds, rounded

__all__ = ["SharedStages", "fastest_shared", "smooth_counts"]

_PRECISION = 1e-6  # relative: two loads that are closer are equal


@dataclass(frozen=True)
class SharedStages:
    """What stages may be.

    Args:
        work: seconds of each layer for one micro-batch, forward and backward.
        reduce: seconds of REDUCE for each layer, per step; a shared one takes them in both of its stages.
        optimizer: seconds of STEP for each layer.
        overhead: seconds of a stage for one micro-batch besides its layers.
        shares: of each stage, the micro-batches of its busiest worker.
        fits: whether a worker of a stage has memory for the layers between two bounds.
    """

    work: Sequence[float]
    reduce: Sequence[float]
    optimizer: Sequence[float]
    overhead: float
    shares: Sequence[float]
    fits: Callable[[int, float, float], bool] | None = None

    @cached_property
    def _before(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """What all layers before each one take, for a micro-batch and once in a step."""
        once = map(sum, zip(self.reduce, self.optimizer, strict=True))
        return tuple(accumulate(self.work, initial=0.0)), tuple(accumulate(once, initial=0.0))

    def load(self, stage: int, begin: float, end: float) -> float:
        """Seconds of the busiest worker of ``stage`` between these bounds."""
        first, last = math.floor(begin), math.ceil(end)
        of_microbatches, of_steps = self._before
        work = of_microbatches[last] - of_microbatches[first] - self.work[first] * (begin - first)
        work -= self.work[last - 1] * (last - end)
        return self.shares[stage] * (work + self.overhead) + of_steps[last] - of_steps[first]

    def ends(self, stage: int, begin: float, limit: float) -> list[float]:
        """Where the stage may end within ``limit``: at all whole bounds, and at the last one that is not."""
        found: list[float] = []
        count, own = len(self.work), math.ceil(begin) + 1
        behind = len(self.shares) - stage - 1  # each of them needs a layer
        end = own
        while end <= count - behind and self._may(stage, begin, end, limit):
            found.append(end)
            end += 1
        if behind and own < end <= count - behind:
            low, high = 0, PARTS  # parts of the layer before `end` that the stage may take, and may not
            while high - low > 1:
                middle = (low + high) // 2
                may = self._may(stage, begin, end - 1 + middle / PARTS, limit)
                low, high = (middle, high) if may else (low, middle)
            if low:
                found.append(rounded(end - 1 + low / PARTS))
        return found

    def _may(self, stage: int, begin: float, end: float, limit: float) -> bool:
        has_room = self.fits is None or self.fits(stage, begin, end)
        return has_room and self.load(stage, begin, end) <= limit

    def within(self, limit: float) -> Bounds | None:
        """The bounds with the fewest shared layers among those with no load above ``limit``; None if there are none."""
        limit *= 1 + 1e-12  # sums are not exact
        count, stages, before = len(self.work), len(self.shares), self._before[0]
        room = [0.0]  # for work of a micro-batch, in the stages from each one on
        for share in reversed(self.shares):
            room.append(room[-1] + limit / share - self.overhead)
        room = [each * (1 + 1e-9) for each in reversed(room)]
        reached: dict[float, tuple[int, Bounds]] = {0: (0, (0,))}
        for stage in range(stages):
            after: dict[float, tuple[int, Bounds]] = {}
            for begin, (shared, bounds) in reached.items():
                for end in self.ends(stage, begin, limit):
                    if before[count] - before[math.ceil(end)] > room[stage + 1]:
                        continue  # too much is left for the stages behind
                    cost = shared + (end != math.floor(end))
                    if end not in after or (cost, bounds) < (after[end][0], after[end][1][:-1]):
                        after[end] = cost, (*bounds, end)
            reached = _useful(after)
        return reached[count][1] if count in reached else None


def _useful(reached: dict[float, tuple[int, Bounds]]) -> dict[float, tuple[int, Bounds]]:
    """Of the bounds within each layer those with fewer shared layers than any further one."""
    kept: dict[float, tuple[int, Bounds]] = {}
    for end in sorted(reached, reverse=True):
        further = [other for other in kept if math.floor(other) == math.floor(end) and other != math.floor(other)]
        if end == math.floor(end) or all(reached[end][0] < kept[other][0] for other in further):
            kept[end] = reached[end]
    return kept


def fastest_shared(stages: SharedStages, slack: float = 0.0) -> tuple[Bounds, float] | None:
    """The bounds with the fewest shared layers whose largest load is at most ``1 + slack`` times the least possible
    one, and that load; None if memory or the number of layers admits none.
    """
    count = len(stages.shares)
    most = max(stages.load(stage, 0, len(stages.work)) for stage in range(count))
    low = sum(stages.work) / sum(1 / share for share in stages.shares)  # everybody busy all the time
    high = low * 1.01
    while stages.within(high) is None:
        if high > most:
            return None
        low, high = high, high * 1.25
    while high - low > _PRECISION * high:
        middle = (low + high) / 2
        if stages.within(middle) is None:
            low = middle
        else:
            high = middle
    found = stages.within(high * (1 + slack))
    assert found is not None
    return found, max(stages.load(stage, found[stage], found[stage + 1]) for stage in range(count))


def smooth_counts(table: Sequence[float], stages: int, workers: int) -> tuple[tuple[int, ...], ...]:
    """Numbers of workers of the stages with which parts of layers even out most: where loads are equal, a step takes
    the work over the sum of 1 / ``table[n]`` of all stages.

    Args:
        table: ``table[n]``: the micro-batches of the busiest of n workers.
        stages: the number of stages.
        workers: of all stages.

    Returns:
        The best of those whose stages are nearly alike, and of those that differ more. Stages with few workers come
        first: they get the fewest layers, and hold the most micro-batches.
    """
    found: dict[tuple[int, ...], None] = {}
    mean = workers / stages
    for reach in (1.0, 2.0, 3.0, float(workers)):
        allowed = [n for n in range(1, len(table)) if abs(n - mean) <= reach]
        best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
        for _ in range(stages):
            after: dict[int, tuple[float, tuple[int, ...]]] = {}
            for taken, (speed, counts) in best.items():
                for n in allowed:
                    if taken + n <= workers:
                        candidate = round(speed + 1 / table[n], 12), (*counts, n)
                        after[taken + n] = max(after.get(taken + n, candidate), candidate)
            best = after
        if workers in best:
            found[tuple(sorted(best[workers][1]))] = None
    return tuple(found)
