"""Cuts of the layers into stages: bounds, shared layers, and the fastest cut.

*Bounds*: stage s has the layers from ``bounds[s]`` up to ``bounds[s + 1]``. A bound of 4.25 means that both stages hold
layer 4, and that a quarter of the micro-batches run it on the earlier one; each micro-batch has whole bounds. Bounds
have at most two decimals, and each stage a layer of its own, so a layer has two holders at most.

*Search*: a stage with n live workers has the load ``share(n) x seconds of its layers for one micro-batch + seconds of
REDUCE and STEP``, where share(n) is the largest of n shares of the D M micro-batches; the slowest stage decides the
period. For a limit on the load, dynamic programming over stages and bounds finds whether the workers are enough;
bisection finds the least limit. Within it the cut with the fewest workers is taken, then the fewest shared layers, then
the least price, e.g. in bytes to move.

Source: PipeDream's partition (Narayanan et al., SOSP'19, section 3.1), for a fixed number of stages, memory by stage
and unequal speeds; the check of a limit is that of chains-on-chains partitioning (Pinar and Aykanat, 2004).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import TypeAlias

from lightning_recycle.arguments import is_number
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.planning.grid import Grid, Worker
from lightning_recycle.planning.problem import least_maximum

Bounds: TypeAlias = tuple[float, ...]
"""Stage s has the layers from ``bounds[s]`` up to ``bounds[s + 1]``."""

PARTS = 100
"""Parts into which the micro-batches of a layer can be divided."""


def are_bounds(bounds: Sequence[float]) -> bool:
    """Whether these are bounds of stages that each have a layer of their own."""
    if len(bounds) < 2 or not all(is_number(bound, 0) and rounded(bound) == bound for bound in bounds):
        return False
    own = all(math.ceil(begin) < math.floor(end) for begin, end in pairwise(bounds))
    return own and bounds[0] == 0 and bounds[-1] == math.floor(bounds[-1])


def rounded(bound: float) -> float:
    """The nearest possible bound; whole ones are integers."""
    hundredths = round(bound * PARTS)
    return hundredths // PARTS if hundredths % PARTS == 0 else hundredths / PARTS


def are_whole(bounds: Sequence[float]) -> bool:
    """Whether no layer is shared."""
    return all(bound == math.floor(bound) for bound in bounds)


def held_ranges(bounds: Sequence[float]) -> tuple[range, ...]:
    """The layers that each stage holds; neighbours overlap where they share one."""
    return tuple(range(math.floor(begin), math.ceil(end)) for begin, end in pairwise(bounds))


def shared_layers(bounds: Sequence[float]) -> dict[int, tuple[int, float]]:
    """Shared layers: the earlier stage, and the part of micro-batches it runs there."""
    return {
        math.floor(bound): (stage, bound - math.floor(bound))
        for stage, bound in enumerate(bounds[1:-1])
        if bound != math.floor(bound)
    }


def parts_of(bounds: Sequence[float]) -> tuple[dict[int, float], ...]:
    """For each stage, by layer, the part of the micro-batches that run it there."""
    found = []
    for begin, end in pairwise(bounds):
        parts = dict.fromkeys(range(math.floor(begin), math.ceil(end)), 1.0)
        if begin != math.floor(begin):
            parts[math.floor(begin)] = math.ceil(begin) - begin
        if end != math.floor(end):
            parts[math.floor(end)] = end - math.floor(end)
        found.append(parts)
    return tuple(found)


def bounds_of(bounds: Sequence[float], microbatch: int, grid: Grid) -> tuple[int, ...]:
    """The whole bounds of one micro-batch, by its index m * D + d.

    The last micro-batch of each pipeline runs a shared layer on the earlier stage: then the later one has the layer's
    gradients before its last W. Each other one has a place in [0, 1), the same at all bounds, and runs a layer on the
    earlier stage if that is less than its part. Multiples of the golden section spread the places over the step, and
    shifts by 1 / D over the pipelines. Where the part is less than one micro-batch per pipeline, the last ones of some
    pipelines run it there.
    """
    index, pipeline = divmod(microbatch, grid.pipelines)
    return tuple(
        math.floor(bound) + (bound != math.floor(bound) and _is_earlier(bound, index, pipeline, grid))
        for bound in bounds
    )


def _is_earlier(bound: float, index: int, pipeline: int, grid: Grid) -> bool:
    last, pipelines = grid.microbatches - 1, grid.pipelines
    # How many of the pipeline's micro-batches, and of all pipelines', in units of 1 / PARTS: whole numbers are exact.
    mine = round((bound - math.floor(bound)) * PARTS) * grid.microbatches
    if mine < PARTS:
        return index >= last and (pipeline + 1) * mine // PARTS > pipeline * mine // PARTS
    if index >= last:
        return True
    place = (index * _stride(last) + pipeline * last // pipelines) % last
    return place * pipelines + pipeline < (mine - PARTS) * pipelines // PARTS


@lru_cache(maxsize=64)
def _stride(count: int) -> int:
    """The number nearest the golden section of ``count`` that is prime to it."""
    golden = count * (math.sqrt(5) - 1) / 2
    candidates = (each for each in range(1, count + 1) if math.gcd(each, count) == 1)
    return min(candidates, key=lambda each: abs(each - golden))


def check_cuts(cuts: Sequence[float], layers: int | None = None) -> Bounds:
    """``cuts`` as a tuple; ConfigurationError unless they are bounds of all layers."""
    found = tuple(cuts)
    if not are_bounds(found) or (layers is not None and found[-1] != layers):
        end = "the number of layers" if layers is None else str(layers)
        raise ConfigurationError(
            f"cuts={found!r}: give the first layer of each stage and {end} at the end, e.g. (0, 3, 6), so that every "
            "stage holds at least one layer. Where stages share a layer, as in (0, 3.25, 6), each has another of its "
            "own, and a part is a whole number of hundredths."
        )
    return found


def even_cuts(layers: int, stages: int) -> tuple[int, ...]:
    """Cuts with numbers of layers that differ by at most one; later stages get more.

    Raises:
        ConfigurationError: when there are fewer layers than stages.
    """
    size, larger = divmod(layers, stages)
    if size < 1:
        raise ConfigurationError(f"{layers} layers cannot make {stages} stages: each holds at least one.")
    return (0, *accumulate(size + (stage >= stages - larger) for stage in range(stages)))


@dataclass(frozen=True)
class Cut:
    """A cut, the workers that its stages need, and the largest load in seconds."""

    cuts: Bounds
    workers: tuple[int, ...]
    bottleneck: float


Price: TypeAlias = Callable[[int, float, float], float]
"""Price of a stage between two bounds: (stage, begin, end)."""


@dataclass(frozen=True)
class Stages:
    """Possible stages of a cut.

    Args:
        work: seconds of each layer for one micro-batch, forward and backward.
        once: seconds of each layer per step, REDUCE and STEP; a shared one takes them in both of its stages.
        options: for each stage, possible numbers of workers with the share of the busiest (:func:`shares`), ascending.
        workers: the live workers of all stages.
        fits: whether a worker of a stage has memory for the layers between two bounds; monotone in the range.
        shares_layers: whether stages may share layers; each has one number of workers then.
    """

    work: Sequence[float]
    once: Sequence[float]
    options: Sequence[Sequence[tuple[int, float]]]
    workers: int
    fits: Callable[[int, float, float], bool] | None = None
    shares_layers: bool = False

    @cached_property
    def _before(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Running sums of ``work`` and ``once`` before each layer."""
        return tuple(accumulate(self.work, initial=0.0)), tuple(accumulate(self.once, initial=0.0))

    def least(self) -> float:
        """A lower bound of the load: all workers busy all the time."""
        return sum(self.work) / sum(1 / options[-1][1] for options in self.options)

    def most(self) -> float:
        """An upper bound of the load: all layers on one worker."""
        return max(self._load(options[0][1], 0, len(self.work)) for options in self.options)

    def load(self, stage: int, begin: float, end: float, workers: int) -> float:
        """Seconds of the busiest of ``workers`` workers of a stage between these bounds."""
        return self._load(next(share for count, share in self.options[stage] if count == workers), begin, end)

    def _load(self, share: float, begin: float, end: float) -> float:
        first, last = math.floor(begin), math.ceil(end)
        of_microbatches, of_steps = self._before
        work = of_microbatches[last] - of_microbatches[first]
        if begin != first:
            work -= self.work[first] * (begin - first)
        if end != last:
            work -= self.work[last - 1] * (last - end)
        return share * work + of_steps[last] - of_steps[first]

    def within(self, limit: float, price: Price | None = None) -> Cut | None:
        """The best cut with no load above ``limit``, in the module's order; else None."""
        limit *= 1 + 1e-12  # sums are not exact
        count = len(self.work)
        room = list(accumulate((limit / options[-1][1] for options in self.options[::-1]), initial=0.0))
        reached: dict[float, tuple[int, int, float]] = {0: (0, 0, 0.0)}
        back: list[dict[float, tuple[float, int]]] = []
        for stage in range(len(self.options)):
            after: dict[float, tuple[int, int, float]] = {}
            chosen: dict[float, tuple[float, int]] = {}
            behind = room[len(self.options) - stage - 1] * (1 + 1e-9)  # what the later stages can take
            for begin, (used, shared, paid) in reached.items():
                for end, need in self._ends(stage, begin, limit):
                    if used + need > self.workers or self._before[0][count] - self._before[0][math.ceil(end)] > behind:
                        continue
                    cost = paid + (price(stage, begin, end) if price is not None else 0.0)
                    found = used + need, shared + (end != math.floor(end)), cost
                    if end not in after or found < after[end]:
                        after[end], chosen[end] = found, (begin, need)
            reached = _useful(after)
            back.append(chosen)
        return self._traced(back) if count in reached else None

    def _ends(self, stage: int, begin: float, limit: float) -> Iterator[tuple[float, int]]:
        """Whole ends of a stage, and the last within a layer, with their fewest workers."""
        options, at = self.options[stage], 0  # more layers never need fewer workers
        behind = len(self.options) - stage - 1  # each of them needs a layer
        last = len(self.work) - behind
        own = end = math.ceil(begin) + 1
        while end <= last:
            while at < len(options) and self._load(options[at][1], begin, end) > limit:
                at += 1
            if at == len(options) or not (self.fits is None or self.fits(stage, begin, end)):
                break
            yield end, options[at][0]
            end += 1
        if self.shares_layers and behind and own < end <= last:
            low, high = 0, PARTS  # parts of the layer before `end` that the stage may take, and may not
            while high - low > 1:
                middle = (low + high) // 2
                part = end - 1 + middle / PARTS
                has_room = self.fits is None or self.fits(stage, begin, part)
                may = has_room and self._load(options[-1][1], begin, part) <= limit
                low, high = (middle, high) if may else (low, middle)
            if low:
                yield rounded(end - 1 + low / PARTS), options[-1][0]

    def _traced(self, back: Sequence[dict[float, tuple[float, int]]]) -> Cut:
        cuts: list[float] = [len(self.work)]
        workers: list[int] = []
        for chosen in reversed(back):
            begin, need = chosen[cuts[-1]]
            cuts.append(begin)
            workers.append(need)
        cuts.reverse()
        workers.reverse()
        loads = [self.load(stage, cuts[stage], cuts[stage + 1], need) for stage, need in enumerate(workers)]
        return Cut(tuple(cuts), tuple(workers), max(loads))


def _useful(reached: dict[float, tuple[int, int, float]]) -> dict[float, tuple[int, int, float]]:
    """Of the bounds within each layer, those that share fewer layers than later ones."""
    kept: dict[float, tuple[int, int, float]] = {}
    fewest: dict[int, int] = {}  # shared layers, by the layer in which the bound lies
    for end in sorted(reached, reverse=True):
        layer = math.floor(end)
        if end != layer:
            if reached[end][1] >= fewest.get(layer, math.inf):
                continue
            fewest[layer] = reached[end][1]
        kept[end] = reached[end]
    return kept


_PRECISION = 1e-6  # relative: two loads that are closer are equal


def fastest_cut(stages: Stages) -> Cut | None:
    """The cut with the least bottleneck; None if memory or layers admit none."""
    best, low, limit = None, 0.0, stages.least()
    while best is None:
        best = stages.within(limit)
        if best is None:
            if limit == math.inf:
                return None
            low, limit = limit, limit * 1.25 if 0 < limit < stages.most() else math.inf
    while best.bottleneck - low > _PRECISION * best.bottleneck:
        middle = (low + best.bottleneck) / 2
        found = stages.within(middle)
        if found is None:
            low = middle
        else:
            best = found
    return best


def shares(microbatches: int, factors: Sequence[float]) -> tuple[float, ...]:
    """``shares[n]``: the least largest load of n workers, in micro-batches.

    Infinite for n = 0. ``factors``: the workers' slowness, those that stay longest first.
    """
    counts = range(1, len(factors) + 1)
    return (math.inf, *(least_maximum(operator.mul, microbatches, factors[:count]) for count in counts))


def smooth_counts(table: Sequence[float], stages: int, workers: int) -> tuple[tuple[int, ...], ...]:
    """Numbers of workers of the stages with which parts of layers even out most.

    Where loads are equal, a step takes the work over the sum of 1 / ``table[n]`` of all stages; ``table[n]`` is the
    micro-batches of the busiest of n workers. Returns the best of nearly equal numbers, and of others. Stages with few
    workers come first: they get the fewest layers, and hold the most micro-batches.
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


def is_layout(cuts: Bounds, stages: int) -> bool:
    """Whether ``cuts`` gives each of ``stages`` stages at least one part of its own."""
    return len(cuts) == stages + 1 and are_bounds(cuts)


def has_ties(groups: Iterable[Iterable[int]], cuts: Bounds) -> bool:
    """Whether a group of parts that share a weight lies on several stages."""
    stages: dict[int, set[int]] = {}
    for stage, parts in enumerate(held_ranges(cuts)):
        for part in parts:
            stages.setdefault(part, set()).add(stage)
    return any(len(set().union(*(stages[part] for part in group))) > 1 for group in groups)


@dataclass(frozen=True, slots=True)
class Transfer:
    """Rank ``donor`` gives the parts ``layers`` to rank ``receiver``."""

    donor: int
    receiver: int
    layers: tuple[int, ...]


def transfers(grid: Grid, roster: Collection[int], before: Bounds, after: Bounds) -> tuple[Transfer, ...]:
    """Transfers of layers, in the order in which every worker sends and receives.

    The order excludes waits in a cycle. A worker gets layers from its own pipeline where it can, else from the workers
    of the other stage in turn.
    """
    workers: Mapping[int, list[int]] = {
        stage: sorted(rank for rank in roster if grid.worker(rank).stage == stage) for stage in range(grid.stages)
    }
    had = held_ranges(before)
    giver_of = {layer: giver for giver, layers in reversed(list(enumerate(had))) for layer in layers}
    found = []
    for giver in range(grid.stages):
        for taker, gets in enumerate(held_ranges(after)):
            layers = tuple(layer for layer in gets if giver_of[layer] == giver and layer not in had[taker])
            if not layers:
                continue
            for turn, receiver in enumerate(workers[taker]):
                own = grid.rank(Worker(grid.worker(receiver).pipeline, giver))
                donor = own if own in workers[giver] else workers[giver][turn % len(workers[giver])]
                found.append(Transfer(donor, receiver, layers))
    return tuple(found)
