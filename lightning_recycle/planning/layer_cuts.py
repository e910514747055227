"""Cuts of the layers into stages: bounds, costs, the fastest cut, transfers.

*Bounds*: stage s has the layers from ``bounds[s]`` up to ``bounds[s + 1]``. A bound of 4.25 means that both stages hold
layer 4, and that a quarter of the micro-batches run it on the earlier one; each micro-batch has whole bounds. Bounds
have at most two decimals, and each stage a layer of its own, so a layer has two holders at most.

*Costs*: a stage takes the sum of its layers' seconds, per micro-batch (F, B, W, BW) or per step (REDUCE, STEP). Where a
bound lies within a layer, each holder takes its part in the mean.

*Search*: a stage has the load ``micro-batches of its busiest worker x seconds of its layers for one micro-batch +
seconds of REDUCE and STEP``; the slowest stage decides the period. For a limit on the load, dynamic programming over
stages and bounds finds whether there is a cut; bisection finds the least limit. Within it the cut with the fewest
shared layers is taken.

*Transfers*: workers copy further layers from live holders at the same time. Each link sends and receives at once, so
the busiest direction of a link decides.

Source: PipeDream's partition (Narayanan et al., SOSP'19, section 3.1), for a fixed number of stages, memory by stage
and unequal speeds; the check of a limit is that of chains-on-chains partitioning (Pinar and Aykanat, 2004).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

from lightning_recycle.arguments import at_least, is_number
from lightning_recycle.errors import ConfigurationError, counted
from lightning_recycle.planning.costs import Costs, Memory
from lightning_recycle.planning.grid import Grid, OpKind, Worker
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
    share = round((bound - math.floor(bound)) * PARTS) * grid.microbatches
    if share < PARTS:
        return index >= last and (pipeline + 1) * share // PARTS > pipeline * share // PARTS
    if index >= last:
        return True
    turn = (index * _stride(last) + pipeline * last // pipelines) % last
    return turn * pipelines + pipeline < (share - PARTS) * pipelines // PARTS


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
        raise ConfigurationError(f"{counted(layers, 'layer')} cannot make {stages} stages: each holds at least one.")
    return (0, *accumulate(size + (stage >= stages - larger) for stage in range(stages)))


@dataclass(frozen=True)
class Cut:
    """A cut, and the largest load of its stages in seconds."""

    cuts: Bounds
    bottleneck: float


@dataclass(frozen=True)
class Stages:
    """Possible stages of a cut.

    Args:
        work: seconds of each layer for one micro-batch, forward and backward.
        once: seconds of each layer per step, REDUCE and STEP; a shared one takes them in both of its stages.
        busiest: for each stage, the micro-batches of its busiest worker, times the worker's factor.
        fits: whether a worker of a stage has memory for the layers between two bounds; monotone in the range.
        shares_layers: whether stages may share layers.
    """

    work: Sequence[float]
    once: Sequence[float]
    busiest: Sequence[float]
    fits: Callable[[int, float, float], bool] | None = None
    shares_layers: bool = False

    @cached_property
    def _before(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Running sums of ``work`` and ``once`` before each layer."""
        return tuple(accumulate(self.work, initial=0.0)), tuple(accumulate(self.once, initial=0.0))

    def least(self) -> float:
        """A lower bound of the load: all workers busy all the time."""
        return sum(self.work) / sum(1 / share for share in self.busiest)

    def most(self) -> float:
        """An upper bound of the load: all layers in one stage."""
        return max(self.load(stage, 0, len(self.work)) for stage in range(len(self.busiest)))

    def load(self, stage: int, begin: float, end: float) -> float:
        """Seconds of the busiest worker of a stage between these bounds."""
        first, last = math.floor(begin), math.ceil(end)
        of_microbatches, of_steps = self._before
        work = of_microbatches[last] - of_microbatches[first]
        if begin != first:
            work -= self.work[first] * (begin - first)
        if end != last:
            work -= self.work[last - 1] * (last - end)
        return self.busiest[stage] * work + of_steps[last] - of_steps[first]

    def within(self, limit: float) -> Cut | None:
        """The cut with the fewest shared layers and no load above ``limit``; None if none."""
        limit *= 1 + 1e-12  # sums are not exact
        count, stages = len(self.work), len(self.busiest)
        room = list(accumulate((limit / share for share in self.busiest[::-1]), initial=0.0))
        reached: dict[float, int] = {0: 0}  # by bound, the fewest shared layers before it
        back: list[dict[float, float]] = []
        for stage in range(stages):
            next_reached: dict[float, int] = {}
            chosen: dict[float, float] = {}
            later_room = room[stages - stage - 1] * (1 + 1e-9)  # what the later stages can take
            for begin, shared in reached.items():
                for end in self._ends(stage, begin, limit):
                    if self._before[0][count] - self._before[0][math.ceil(end)] > later_room:
                        continue
                    total = shared + (end != math.floor(end))
                    if end not in next_reached or total < next_reached[end]:
                        next_reached[end], chosen[end] = total, begin
            reached = _useful(next_reached)
            back.append(chosen)
        return self._traced(back) if count in reached else None

    def _ends(self, stage: int, begin: float, limit: float) -> Iterator[float]:
        """Whole ends of a stage, and the last within a layer."""
        later_stages = len(self.busiest) - stage - 1  # each of them needs a layer
        last = len(self.work) - later_stages
        first_end = end = math.ceil(begin) + 1

        def may_end(at: float) -> bool:
            return self.load(stage, begin, at) <= limit and (self.fits is None or self.fits(stage, begin, at))

        while end <= last and may_end(end):
            yield end
            end += 1
        if self.shares_layers and later_stages and first_end < end <= last:
            low, high = 0, PARTS  # parts of the layer before `end` that the stage may take, and may not
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if may_end(end - 1 + middle / PARTS) else (low, middle)
            if low:
                yield rounded(end - 1 + low / PARTS)

    def _traced(self, back: Sequence[dict[float, float]]) -> Cut:
        cuts: list[float] = [len(self.work)]
        for chosen in reversed(back):
            cuts.append(chosen[cuts[-1]])
        cuts.reverse()
        return Cut(tuple(cuts), max(self.load(stage, *ends) for stage, ends in enumerate(pairwise(cuts))))


def _useful(reached: dict[float, int]) -> dict[float, int]:
    """Of the bounds within each layer, those that share fewer layers than later ones."""
    useful: dict[float, int] = {}
    fewest: dict[int, int] = {}  # shared layers, by the layer in which the bound lies
    for end in sorted(reached, reverse=True):
        layer = math.floor(end)
        if end != layer:
            if reached[end] >= fewest.get(layer, math.inf):
                continue
            fewest[layer] = reached[end]
        useful[end] = reached[end]
    return useful


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
    moves = []
    for giver in range(grid.stages):
        for taker, gets in enumerate(held_ranges(after)):
            layers = tuple(layer for layer in gets if giver_of[layer] == giver and layer not in had[taker])
            if not layers:
                continue
            for turn, receiver in enumerate(workers[taker]):
                nearest = grid.rank(Worker(grid.worker(receiver).pipeline, giver))
                donor = nearest if nearest in workers[giver] else workers[giver][turn % len(workers[giver])]
                moves.append(Transfer(donor, receiver, layers))
    return tuple(moves)


def traffic(moves: Collection[Transfer], state_bytes: Sequence[float]) -> tuple[float, float]:
    """Bytes of all ``moves``, and the most that one worker sends or receives."""
    sent: defaultdict[int, float] = defaultdict(float)
    received: defaultdict[int, float] = defaultdict(float)
    for move in moves:
        size = sum(state_bytes[layer] for layer in move.layers)
        sent[move.donor] += size
        received[move.receiver] += size
    return sum(received.values()), max([0.0, *received.values(), *sent.values()])


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
            pieces: list[list[float]] = [[] for _ in range(count)]
            for parts, value in zip(parts_of(bounds), values, strict=True):
                shares = {layer: by_layer[layer] * (1.0 if held else part) for layer, part in parts.items()}
                total = sum(shares.values())
                for layer, weight in shares.items():
                    pieces[layer].append(value * (weight / total if total else 1 / len(shares)))
            return tuple(sum(each) / (len(each) if held else 1) for each in pieces)

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

    def copy_seconds(self, size: float) -> float:
        """Seconds for ``size`` bytes over one link; by latency alone if 0 bandwidth."""
        return self.latency + (size / self.bandwidth if self.bandwidth else 0.0)

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
            earlier = tuple(number for number, layout in enumerate(bounds) if layout[stage + 1] > layer)
            later = tuple(number for number, layout in enumerate(bounds) if layout[stage + 1] <= layer)
            total = self._held(self.reduce, cuts)[stage]
            layers.append(SharedLayer(stage, self.reduce[layer] / total if total else 0.0, earlier, later))

        def relative(values: Sequence[float]) -> tuple[tuple[float, ...], ...]:
            means = self._stages(values, cuts)
            ratios = {
                layout: tuple(
                    cost / mean if mean else 1.0 for cost, mean in zip(self._stages(values, layout), means, strict=True)
                )
                for layout in set(bounds)
            }
            return tuple(ratios[layout] for layout in bounds)

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
        return self.copy_seconds(max(sizes)) if sizes else 0.0

    @staticmethod
    def _stages(values: Sequence[float], bounds: Bounds) -> tuple[float, ...]:
        return tuple(sum(values[layer] * part for layer, part in parts.items()) for parts in parts_of(bounds))

    @staticmethod
    def _held(values: Sequence[float], bounds: Bounds) -> tuple[float, ...]:
        return tuple(sum(values[held.start : held.stop]) for held in held_ranges(bounds))
