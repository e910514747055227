"""Partition of layers into stages: bounds, costs of layers, the fastest cut, transfers.

*Bounds*: stage s has the layers from ``bounds[s]`` up to ``bounds[s + 1]``. A bound of 4.25 means that both stages hold
layer 4, and that a quarter of the micro-batches run it on the earlier one; each micro-batch has whole bounds. Bounds
have at most two decimals, and each stage a layer of its own, so a layer has two holders at most.

*Costs*: a stage takes the sum of its layers' seconds, per micro-batch (F, B, W, BW) or per step (REDUCE, STEP). Where a
bound lies within a layer, each holder takes its part in the mean.

*Search*: a stage with n live workers has the load ``share(n) x seconds of its layers for one micro-batch + seconds of
REDUCE and STEP``, where share(n) is the largest of n shares of the D M micro-batches; the slowest stage decides the
period. For a limit on the load, dynamic programming over stages and bounds finds whether the workers are enough;
bisection finds the least limit. Within it the cut with the fewest workers is taken, then the fewest shared layers, then
the least price, e.g. in bytes to move.

*Moves*: workers copy further layers from live holders at the same time. Each link sends and receives at once, so the
busiest direction of a link decides. Owners of a layer take turns, the one with the least to send so far first.

Source: PipeDream's partition (Narayanan et al., SOSP'19, section 3.1), for a fixed number of stages, memory by stage
and unequal speeds; the check of a limit is that of chains-on-chains partitioning (Pinar and Aykanat, 2004).
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

from lightning_recycle.arguments import at_least, is_number
from lightning_recycle.errors import ConfigurationError, PlanningError
from lightning_recycle.planning.costs import Costs, Memory, communication_seconds
from lightning_recycle.planning.grid import Grid, OpKind, Worker
from lightning_recycle.planning.problem import least_maximum
from lightning_recycle.planning.timing import MicrobatchVariation, SharedLayer

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


_SECONDS = ("forward", "backward_input", "backward_weight", "backward", "reduce", "optimizer")
_BYTES = ("output_bytes", "held_bytes", "waiting_bytes", "parameter_bytes", "optimizer_bytes")


@dataclass(frozen=True)
class LayerCosts:
    """Costs of each layer and of links; tuples have one value per layer.

    Args:
        forward: seconds of F of one micro-batch.
        backward_input: seconds of B, where the backward is split.
        backward_weight: seconds of W.
        backward: seconds of BW, the fused backward; empty: B + W.
        reduce: seconds of a step that its stage waits for the reduction of the layer's gradients; empty: 0.
        optimizer: seconds of STEP; empty: 0.
        output_bytes: activations of one micro-batch at its output, sent to the next stage where a cut is behind it;
            empty: 0.
        held_bytes: what one micro-batch holds from F to B; empty: ``output_bytes``.
        waiting_bytes: what one micro-batch holds from B to W; empty: ``held_bytes``.
        parameter_bytes: parameters, gradients and buffers; empty: 0.
        optimizer_bytes: state of the optimizer, and copies of the version before; empty: 0.
        memory_limit: bytes of a worker for all of this; None for no limit.
        bandwidth: bytes/s of the link of a worker, in each direction; 0 if unknown: then only the latency counts.
        latency: seconds for an empty message.

    Raises:
        ConfigurationError: when a value is negative, not finite or missing.
    """

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    backward: tuple[float, ...] = ()
    reduce: tuple[float, ...] = ()
    optimizer: tuple[float, ...] = ()
    output_bytes: tuple[float, ...] = ()
    held_bytes: tuple[float, ...] = ()
    waiting_bytes: tuple[float, ...] = ()
    parameter_bytes: tuple[float, ...] = ()
    optimizer_bytes: tuple[float, ...] = ()
    memory_limit: float | None = None
    bandwidth: float = 0.0
    latency: float = 0.0

    def __post_init__(self) -> None:
        count = len(tuple(self.forward))
        if not count:
            raise ConfigurationError("LayerCosts(forward=()): give the seconds of at least one layer.")
        for name in (*_SECONDS, *_BYTES):
            values = tuple(at_least("LayerCosts", name, value) for value in getattr(self, name))
            if not values:
                values = self._default(name, count)
            if len(values) != count:
                raise ConfigurationError(
                    f"LayerCosts({name}) has {len(values)} values for {count} layers: give one per layer."
                )
            object.__setattr__(self, name, values)
        for name in ("bandwidth", "latency"):
            object.__setattr__(self, name, at_least("LayerCosts", name, getattr(self, name)))
        if self.memory_limit is not None:
            at_least("LayerCosts", "memory_limit", self.memory_limit)

    def _default(self, name: str, count: int) -> tuple[float, ...]:
        if name == "backward":
            return tuple(map(sum, zip(self.backward_input, self.backward_weight, strict=True)))
        if name == "held_bytes":
            return self.output_bytes
        return self.held_bytes if name == "waiting_bytes" else (0.0,) * count

    @classmethod
    def from_stages(
        cls,
        costs: Costs,
        cuts: Sequence[float],
        weights: Sequence[float],
        *,
        backward: Sequence[float] = (),
        held_bytes: Sequence[float] = (),
        waiting_bytes: Sequence[float] = (),
        **known: Any,
    ) -> LayerCosts:
        """Layers of stages that were measured as a whole: each gets its weight's part.

        Args:
            costs: seconds by stage under the cuts.
            cuts: the bounds of the stages.
            weights: each layer's part, relative to others of its stage, e.g. its seconds or its parameters.
            backward: seconds of BW by stage, where it was measured.
            held_bytes, waiting_bytes: of one micro-batch, by stage.
            known: what else is known, by layer, as in the class; the latency is by default the costs' communication.
        """
        bounds = check_cuts(cuts)
        if costs.stages != len(bounds) - 1:
            raise ConfigurationError(
                f"costs are given for {costs.stages} stages, cuts={bounds!r} for {len(bounds) - 1}: "
                "give the cuts under which they were measured."
            )
        count = int(bounds[-1])
        by_layer = [at_least("", "weights", weight) for weight in weights]
        if len(by_layer) != count:
            raise ConfigurationError(f"weights has {len(by_layer)} values for {count} layers: give one per layer.")

        def spread(values: Sequence[float], held: bool = False) -> tuple[float, ...]:
            """Values by layer from values by stage, over micro-batches or ``held`` layers."""
            found: list[list[float]] = [[] for _ in range(count)]
            for parts, value in zip(parts_of(bounds), values, strict=True):
                own = {layer: by_layer[layer] * (1.0 if held else part) for layer, part in parts.items()}
                total = sum(own.values())
                for layer, weight in own.items():
                    found[layer].append(value * (weight / total if total else 1 / len(own)))
            return tuple(sum(each) / (len(each) if held else 1) for each in found)

        return cls(
            forward=spread(costs.forward),
            backward_input=spread(costs.backward_input),
            backward_weight=spread(costs.backward_weight),
            backward=spread(backward) if backward else (),
            reduce=spread([costs.of(OpKind.REDUCE, stage) for stage in range(costs.stages)], held=True),
            optimizer=spread(costs.optimizer, held=True),
            held_bytes=spread(held_bytes) if held_bytes else (),
            waiting_bytes=spread(waiting_bytes) if waiting_bytes else (),
            **{"latency": costs.communication, **known},
        )

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.forward)

    @cached_property
    def state_bytes(self) -> tuple[float, ...]:
        """Bytes of each layer's state: parameters and optimizer."""
        return tuple(map(sum, zip(self.parameter_bytes, self.optimizer_bytes, strict=True)))

    def work(self, *, split_backward: bool) -> tuple[float, ...]:
        """Seconds of each layer for forward and backward of one micro-batch."""
        if not split_backward:
            return tuple(map(sum, zip(self.forward, self.backward, strict=True)))
        return tuple(map(sum, zip(self.forward, self.backward_input, self.backward_weight, strict=True)))

    def costs(self, cuts: Sequence[float], *, split_backward: bool = True) -> Costs:
        """The planner's costs of the stages between ``cuts``, for the mean micro-batch.

        With ``split_backward=False`` they are those of fused backwards: B and W together take what BW takes. A layer
        that stages share is counted twice in REDUCE: its gradients are summed within each stage, then exchanged.

        Raises:
            ConfigurationError: when the cuts are none of these layers.
        """
        bounds = check_cuts(cuts, self.layers)
        forward, inputs, weights = (
            self._stages(values, bounds) for values in (self.forward, self.backward_input, self.backward_weight)
        )
        if not split_backward:
            fused = self._stages(self.backward, bounds)
            inputs, weights = fused, tuple(0.0 for _ in fused)
        return Costs(
            forward=forward,
            backward_input=inputs,
            backward_weight=weights,
            reduce=self._held(self.reduce, bounds),
            optimizer=self._held(self.optimizer, bounds),
            communication=self._communication(bounds),
        )

    def memory(self, cuts: Sequence[float]) -> Memory | None:
        """The memory of a worker of each stage between ``cuts``; None without a limit.

        Micro-batches count as the mean of all, with room for one more run of a shared layer.
        """
        if self.memory_limit is None:
            return None
        bounds = check_cuts(cuts, self.layers)
        return Memory(
            capacity=(self.memory_limit,) * (len(bounds) - 1),
            fixed=tuple(map(sum, zip(self._held(self.state_bytes, bounds), self._reserved(bounds), strict=True))),
            after_forward=self._stages(self.held_bytes, bounds),
            after_backward=self._stages(self.waiting_bytes, bounds),
        )

    def variation(
        self, cuts: Sequence[float], grid: Grid, *, split_backward: bool = True
    ) -> MicrobatchVariation | None:
        """Differences between micro-batches; None if no layer is shared."""
        cuts = check_cuts(cuts, self.layers)
        shared = shared_layers(cuts)
        if not shared:
            return None
        indices = [each.index * grid.pipelines + each.pipeline for each in grid.all_microbatches()]
        bounds = [bounds_of(cuts, index, grid) for index in indices]
        backward = self.backward_input if split_backward else self.backward
        layers = []
        for layer, (stage, _) in shared.items():
            earlier = tuple(number for number, own in enumerate(bounds) if own[stage + 1] > layer)
            later = tuple(number for number, own in enumerate(bounds) if own[stage + 1] <= layer)
            whole = self._held(self.reduce, cuts)[stage]
            layers.append(SharedLayer(stage, self.reduce[layer] / whole if whole else 0.0, earlier, later))

        def relative(values: Sequence[float]) -> tuple[tuple[float, ...], ...]:
            mean = self._stages(values, cuts)
            known = {
                own: tuple(
                    mine / usual if usual else 1.0 for mine, usual in zip(self._stages(values, own), mean, strict=True)
                )
                for own in set(bounds)
            }
            return tuple(known[own] for own in bounds)

        return MicrobatchVariation(
            relative(self.forward),
            relative(backward),
            relative(self.backward_weight),
            relative(self.held_bytes),
            relative(self.waiting_bytes),
            tuple(layers),
            self._reserved(cuts),
        )

    def _reserved(self, cuts: Sequence[float]) -> tuple[float, ...]:
        """Bytes by stage for running a shared layer once more than the mean."""
        return tuple(
            sum(self.held_bytes[layer] for layer, part in parts.items() if part < 1) for parts in parts_of(cuts)
        )

    def _communication(self, bounds: Bounds) -> float:
        sizes = [
            self.output_bytes[layer - 1] for bound in bounds[1:-1] for layer in {math.floor(bound), math.ceil(bound)}
        ]
        if not sizes:
            return 0.0
        if not self.bandwidth:
            return self.latency
        return communication_seconds(sizes, latency_seconds=self.latency, bandwidth_bytes_per_second=self.bandwidth)

    @staticmethod
    def _stages(values: Sequence[float], bounds: Bounds) -> tuple[float, ...]:
        return tuple(sum(values[layer] * part for layer, part in parts.items()) for parts in parts_of(bounds))

    @staticmethod
    def _held(values: Sequence[float], bounds: Bounds) -> tuple[float, ...]:
        return tuple(sum(values[held.start : held.stop]) for held in held_ranges(bounds))


@dataclass(frozen=True, order=True, slots=True)
class LayerMove:
    """A layer that a worker gets.

    Args:
        layer: its index.
        source: the worker that sends it, by its position before the change.
        receiver: the worker that gets it, by its position before the change.
    """

    layer: int
    source: Worker
    receiver: Worker


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of several moves: of all, the most on a link, and the number of moves."""

    total: float = 0.0
    busiest: float = 0.0
    copied: int = 0

    def seconds(self, bandwidth: float, latency: float) -> float:
        """Seconds until the last copy has arrived; by latency alone if 0 bandwidth."""
        if not self.copied:
            return 0.0
        return latency + (self.busiest / bandwidth if bandwidth else 0.0)


def layer_moves(
    grid: Grid,
    failed: Collection[Worker],
    before: Sequence[float],
    after: Sequence[float],
    roles: Mapping[Worker, Worker] | None = None,
    state_bytes: Sequence[float] | None = None,
) -> tuple[LayerMove, ...]:
    """The copies that take all live workers from one cut to another.

    Args:
        failed: vacant positions before the change.
        before, after: bounds of the stages, as in :mod:`~lightning_recycle.planning.partition`.
        roles: the new position of each live worker; by default all stay.
        state_bytes: bytes of each layer, by which owners share the sends; by default all are equal.

    Raises:
        PlanningError: when a layer has no live owner.
    """
    gone = set(failed)
    owners: list[list[Worker]] = [[] for _ in range(grid.stages)]
    for worker in grid.workers():
        if worker not in gone:
            owners[worker.stage].append(worker)
    had, gets = held_ranges(before), held_ranges(after)
    sent: defaultdict[Worker, float] = defaultdict(float)
    found = []
    for stage in range(grid.stages):
        for worker in owners[stage]:
            target = (roles or {}).get(worker, worker).stage
            for layer in gets[target]:
                if layer in had[stage]:
                    continue
                stages = [other for other in range(grid.stages) if layer in had[other]]
                holders = [holder for other in stages for holder in owners[other]]
                if not holders:
                    raise PlanningError(
                        f"layer {layer} has no live owner: all {grid.lanes} replicas of stage "
                        f"{' and '.join(map(str, stages))} have failed. Restart from a checkpoint."
                    )
                source = min(holders, key=lambda holder: (sent[holder], holder))
                sent[source] += 1 if state_bytes is None else state_bytes[layer]
                found.append(LayerMove(layer, source, worker))
    return tuple(found)


def traffic(moves: Collection[LayerMove], state_bytes: Sequence[float]) -> Traffic:
    """The bytes of ``moves``, given those of each layer."""
    sent: defaultdict[Worker, float] = defaultdict(float)
    received: defaultdict[Worker, float] = defaultdict(float)
    for move in moves:
        sent[move.source] += state_bytes[move.layer]
        received[move.receiver] += state_bytes[move.layer]
    return Traffic(sum(received.values()), max([0.0, *received.values(), *sent.values()]), len(moves))
