"""Cuts of the layers into stages, exact, by dynamic programming.

*Whole layers*: a stage with n of the live workers runs the largest of n shares of the D M micro-batches, so it needs

    load = share(n) x seconds of its layers for one micro-batch + seconds of REDUCE and STEP

and the slowest stage decides the period. For a limit T on the load, the fewest workers for a stage that holds
layers i .. j - 1 follow from the shares, and the fewest for all layers up to j on the stages up to s from

    fewest[s][j] = min over i < j of fewest[s - 1][i] + need(s, i, j, T)

A cut with no load above T exists if and only if fewest[S][L] is at most the number of live workers. Bisection over T,
each feasible T lowered to the largest load that its cut has, finds the least T: the partition and the replicas of each
stage at once. Among all cuts within a limit, :func:`cheapest` finds the one of least additive cost, e.g. bytes to move.

*Shared layers*, exact to a hundredth of a layer: the workers of a stage can run a part of a layer
(:mod:`~lightning_recycle.planning.layouts.fractional_cuts`), so for a limit T on the load the first stage takes as much
as T allows, the second as much of the rest, and so on; T is feasible if all layers are taken, and bisection finds the
least one. A shared layer costs memory, one more step of the optimizer and an exchange of its gradients. So among the
cuts within a little more than the least T the one with the fewest shared layers is chosen: dynamic programming over
stages and bounds, where a stage ends at a whole bound or as far as it can.

Contract: pure, deterministic; with whole layers O(S L l) for each T, where l is the most layers that a stage can take.

Must not know: schedules (a load is a lower bound of a period), which worker goes where.

Source: the partition of PipeDream (Narayanan et al., SOSP'19, section 3.1), contiguous layers and replicas per stage by
dynamic programming; here for a fixed number of stages, memory that differs by stage, and workers of unequal speed. The
check of a limit from left to right is that of chains-on-chains partitioning (Pinar and Aykanat, "Fast optimal load
balancing algorithms for 1D partitioning", 2004); here a part may have a piece of an item.

Units: seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heapreplace
from itertools import accumulate

from lightning_recycle.planning.layouts.fractional_cuts import PARTS, Bounds, rounded

__all__ = ["Cut", "SharedStages", "Stages", "cheapest", "fastest", "fastest_shared", "shares", "smooth_counts"]

_PRECISION = 1e-9  # relative: two bottlenecks that are closer are equal
_LABELS = 64  # numbers of workers that are told apart for a stage and a bound in `cheapest`


def shares(microbatches: int, factors: Sequence[float]) -> tuple[float, ...]:
    """``shares[n]``: the least possible largest load of n workers, in micro-batches at factor 1; infinite for n = 0.

    Args:
        microbatches: all micro-batches of a step.
        factors: by how much longer each worker takes than its stage's costs, those that stay longest first.
    """
    found = [math.inf]
    equal = not factors or min(factors) == max(factors)
    for count in range(1, len(factors) + 1):
        if equal:
            found.append(-(-microbatches // count) * factors[0])
            continue
        queue = [(factor, 1, factor) for factor in factors[:count]]
        heapify(queue)
        worst = 0.0
        for _ in range(microbatches):
            worst, held, factor = queue[0]
            heapreplace(queue, ((held + 1) * factor, held + 1, factor))
        found.append(worst)
    return tuple(found)


@dataclass(frozen=True)
class Cut:
    """A cut, the workers that each of its stages needs, and the largest load of a stage, in seconds."""

    cuts: tuple[int, ...]
    needs: tuple[int, ...]
    bottleneck: float


class Stages:
    """Possible stages of a cut with whole layers.

    Args:
        work: seconds of each layer for one micro-batch, forward and backward.
        once: seconds of each layer per step, REDUCE and STEP.
        overhead: seconds of a stage for one micro-batch besides its layers.
        options: for each stage, the numbers of workers that it may have, with the share of the busiest one as
            :func:`shares` gives it; the smallest number first.
        workers: the live workers of all stages.
        fits: whether a worker of a stage has memory for the layers of a range (stage, first, last + 1); once a range
            does not fit, none that contains it does.
    """

    def __init__(
        self,
        work: Sequence[float],
        once: Sequence[float],
        options: Sequence[Sequence[tuple[int, float]]],
        workers: int,
        fits: Callable[[int, int, int], bool] | None = None,
        overhead: float = 0.0,
    ) -> None:
        self.count, self.stages, self.workers = len(work), len(options), workers
        self._options = [tuple(each) for each in options]
        self._fits, self._overhead = fits, overhead
        self._work, self._once = [0.0], [0.0]
        for seconds, closing in zip(work, once, strict=True):
            self._work.append(self._work[-1] + seconds)
            self._once.append(self._once[-1] + closing)

    def least(self) -> float:
        """Below this no cut exists: all workers busy all the time, or one layer on all workers of a stage."""
        share = min(options[-1][1] for options in self._options)
        layer = max(self._load(share, begin, begin + 1) for begin in range(self.count))
        return max(layer, self._load(share, 0, self.count) / self.stages)

    def most(self) -> float:
        """Above this the load of no stage matters: all layers on one worker."""
        return max(self._load(options[0][1], 0, self.count) for options in self._options)

    def load(self, stage: int, begin: int, end: int, workers: int) -> float:
        """Seconds of the busiest worker of ``stage`` with these layers and that many workers."""
        share = next(share for count, share in self._options[stage] if count == workers)
        return self._load(share, begin, end)

    def _load(self, share: float, begin: int, end: int) -> float:
        seconds = self._work[end] - self._work[begin] + self._overhead
        return share * seconds + self._once[end] - self._once[begin]

    def ranges(self, limit: float) -> list[list[list[tuple[int, int]]]]:
        """For each stage and first layer, the possible ends within ``limit``, each with the fewest workers."""
        limit *= 1 + 1e-12  # sums are not exact
        alike: dict[tuple[tuple[int, float], ...], list[list[tuple[int, int]]]] = {}
        found = []
        for stage, options in enumerate(self._options):
            table = alike.get(options)
            if table is None:
                table = alike[options] = [self._ends(options, begin, limit) for begin in range(self.count)]
            found.append(table if self._fits is None else self._fitting(stage, table))
        return found

    def _ends(self, options: tuple[tuple[int, float], ...], begin: int, limit: float) -> list[tuple[int, int]]:
        """The ends that are possible by the load, for any stage with these options."""
        ends = []
        at = 0  # more layers never need fewer workers
        for end in range(begin + 1, self.count - self.stages + 2 + begin):
            if end > self.count:
                break
            while at < len(options) and self._load(options[at][1], begin, end) > limit:
                at += 1
            if at == len(options):
                break
            ends.append((end, options[at][0]))
        return ends

    def _fitting(self, stage: int, table: list[list[tuple[int, int]]]) -> list[list[tuple[int, int]]]:
        """The ends that leave room in a worker of ``stage``."""
        assert self._fits is not None
        found: list[list[tuple[int, int]]] = []
        for begin, ends in enumerate(table):
            if not stage <= begin <= self.count - (self.stages - stage):
                found.append([])
                continue
            found.append([])
            for end, need in ends:
                if not self._fits(stage, begin, end):
                    break
                found[-1].append((end, need))
        return found

    def within(self, limit: float) -> Cut | None:
        """A cut of the fewest workers with no load above ``limit``; None if there are not enough workers."""
        fewest: dict[int, int] = {0: 0}
        back: list[dict[int, tuple[int, int]]] = []
        for stage, table in enumerate(self.ranges(limit)):
            last = self.count - (self.stages - stage - 1)  # each of the stages behind needs a layer
            after: dict[int, int] = {}
            chosen: dict[int, tuple[int, int]] = {}
            for begin, used in fewest.items():
                if begin >= self.count:
                    continue
                for end, need in table[begin]:
                    if end > last:
                        break
                    if used + need < after.get(end, self.workers + 1):
                        after[end], chosen[end] = used + need, (begin, need)
            fewest = after
            back.append(chosen)
        return self._traced(back) if self.count in fewest else None

    def _traced(self, back: list[dict[int, tuple[int, int]]]) -> Cut:
        cuts, needs = [self.count], []
        for chosen in reversed(back):
            begin, need = chosen[cuts[-1]]
            cuts.append(begin)
            needs.append(need)
        return self.cut(cuts[::-1], needs[::-1])

    def cut(self, cuts: Sequence[int], needs: Sequence[int]) -> Cut:
        """The cut with its bottleneck."""
        loads = [self.load(s, cuts[s], cuts[s + 1], need) for s, need in enumerate(needs)]
        return Cut(tuple(cuts), tuple(needs), max(loads))


def fastest(stages: Stages) -> Cut | None:
    """The cut with the least bottleneck (to 1e-9); None if memory or the number of layers admits none."""
    best, low, limit = None, 0.0, stages.least()
    while best is None:
        best = stages.within(limit)
        if best is None:
            if limit == math.inf:
                return None
            low, limit = limit, limit * 1.25 if limit < stages.most() else math.inf
    while best.bottleneck - low > _PRECISION * best.bottleneck:
        middle = (low + best.bottleneck) / 2
        found = stages.within(middle)
        if found is None:
            low = middle
        else:
            best = found
    return best


def cheapest(stages: Stages, limit: float, cost: Callable[[int, int, int, int], float]) -> Cut | None:
    """The cut with no load above ``limit`` whose sum of ``cost(stage, begin, end, workers)`` is least; None if there is
    none.

    Every stage has the fewest workers that the limit allows. Exact while at most 64 numbers of workers have to be told
    apart for a stage; of more, those with the least cost so far are kept.
    """
    tables = stages.ranges(limit)
    remaining = _remaining(stages, tables)
    labels: dict[int, dict[int, float]] = {0: {0: 0.0}}  # by bound and workers used
    back: list[dict[tuple[int, int], tuple[int, int]]] = []
    for stage, table in enumerate(tables):
        after: dict[int, dict[int, float]] = {}
        chosen: dict[tuple[int, int], tuple[int, int]] = {}
        for begin, spent in labels.items():
            if begin >= stages.count:
                continue
            for end, need in table[begin]:
                room = stages.workers - remaining[stage + 1].get(end, math.inf) - need
                price = cost(stage, begin, end, need)
                there = after.setdefault(end, {})
                for used, so_far in spent.items():
                    if used <= room and so_far + price < there.get(used + need, math.inf):
                        there[used + need] = so_far + price
                        chosen[end, used + need] = (begin, used)
        labels = {end: _undominated(there) for end, there in after.items() if there}
        back.append(chosen)
    ends = labels.get(stages.count)
    if not ends:
        return None
    at = stages.count, min(ends, key=lambda used: (ends[used], used))
    cuts, needs = [stages.count], []
    for chosen in reversed(back):
        before = chosen[at]
        cuts.append(before[0])
        needs.append(at[1] - before[1])
        at = before
    return stages.cut(cuts[::-1], needs[::-1])


def _remaining(stages: Stages, tables: list[list[list[tuple[int, int]]]]) -> list[dict[int, float]]:
    """The fewest workers that the stages from s on need for the layers from each bound on."""
    found: list[dict[int, float]] = [{stages.count: 0.0}]
    for table in reversed(tables):
        behind, here = found[-1], {}
        for begin, ends in enumerate(table):
            least = min((behind[end] + need for end, need in ends if end in behind), default=math.inf)
            if least < math.inf:
                here[begin] = least
        found.append(here)
    return found[::-1]


def _undominated(labels: dict[int, float]) -> dict[int, float]:
    """Without labels that use more workers and cost no less; at most ``_LABELS``, the cheapest."""
    kept: dict[int, float] = {}
    least = math.inf
    for used in sorted(labels):
        if labels[used] < least:
            kept[used] = least = labels[used]
    if len(kept) > _LABELS:
        fewest = min(kept)
        cheap = sorted(kept, key=lambda used: kept[used])[: _LABELS - 1]
        kept = {used: kept[used] for used in sorted({fewest, *cheap})}
    return kept


_SHARED_PRECISION = 1e-6  # relative: two loads that are closer are equal


@dataclass(frozen=True)
class SharedStages:
    """Possible stages of a cut with shared layers.

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
        """Seconds of all layers before each one, for a micro-batch and once in a step."""
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
        """Possible ends of the stage within ``limit``: all whole bounds, and the last one that is not."""
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
    low = sum(stages.work) / sum(1 / share for share in stages.shares)  # all workers busy all the time
    high = low * 1.01
    while stages.within(high) is None:
        if high > most:
            return None
        low, high = high, high * 1.25
    while high - low > _SHARED_PRECISION * high:
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
