"""Layouts: the best layers of each stage after failures, and what a change costs.

A step is predicted by a plan for the layout. A layout is worth a change if the seconds that it saves until the next
change exceed the stall for it:

    (1 - period / period of reroute) x seconds until the next change  >  stall

*Next change*: failures come at an unknown rate per worker and second. With a Gamma prior of shape a and exposure b,
after k failures in E worker-seconds the rate has the mean (a + k) / (b + E). The prior's mean a / b is that of Llama 3
(arXiv 2407.21783, section 3.3.4: 419 unplanned interruptions in 54 days on 16,384 GPUs); its shape is small, as spot
instances fail four orders of magnitude more often. By the prior for the number of workers lost at once, three of four
failures take one worker, and each size is a quarter as likely as the one below it.

Three ways, each of which sends more state than the one before: ``reroute`` (peers run the micro-batches of the dead),
``layers`` (stages that lost workers give layers to their neighbours) and ``both`` (workers change stage, too).

Cuts and replicas are found exactly by the load of the slowest stage (:mod:`~lightning_recycle.planning.partition`). A
load is only a bound, so of each way the layouts with the least lower bounds are planned, and the period of the real
schedule decides. The result is never worse than re-routing by its own figures.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import pairwise, product
from typing import Literal, TypeAlias

from lightning_recycle.arguments import at_least, whole
from lightning_recycle.errors import ConfigurationError, PlanningError
from lightning_recycle.planning.grid import Grid, Worker
from lightning_recycle.planning.heuristic_planner import DEFAULT_EFFORT, heuristic, heuristic_with_variation
from lightning_recycle.planning.normalization import distribution_of, normalized_failures, roles
from lightning_recycle.planning.partition import (
    Bounds,
    Cut,
    LayerCosts,
    Stages,
    are_whole,
    check_cuts,
    fastest_cut,
    held_ranges,
    layer_moves,
    rounded,
    shared_layers,
    shares,
    smooth_counts,
    traffic,
)
from lightning_recycle.planning.problem import Problem, lower_bound, makespan_lower_bound
from lightning_recycle.planning.routing import COMPACT_FROM, CompactSchedule, lane_problem, worth_compacting
from lightning_recycle.planning.schedule import Schedule
from lightning_recycle.planning.timing import MicrobatchVariation

_LARGER_SIZE = 0.25  # by the prior, a failure of n + 1 workers at once is so much as likely as one of n
_LARGER = 8  # sizes of failures that are looked at beyond those that are needed or were seen

_PRIOR_EVENTS = 0.001  # failures that the prior of the rate counts for

LLAMA3_WORKER_SECONDS = 54 * 86400 * 16384 / 419
"""Between two failures of one GPU."""


@dataclass(frozen=True, slots=True)
class FailureRecord:
    """Record of failures, and the rate of changes that follows.

    Args:
        sizes: failures so far that took 1, 2, 3, ... workers at once; each makes one change.
        exposure: seconds that live workers have worked, added up over the workers.
    """

    sizes: tuple[int, ...] = ()
    exposure: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", tuple(whole("FailureRecord", "sizes", count) for count in self.sizes))
        at_least("FailureRecord", "exposure", self.exposure)

    def after(self, workers: int, seconds: float, lost: int = 0) -> FailureRecord:
        """The record after ``seconds``, at the end of which ``lost`` workers failed."""
        sizes = [*self.sizes, *(0,) * (lost - len(self.sizes))]
        if lost:
            sizes[lost - 1] += 1
        return replace(self, sizes=tuple(sizes), exposure=self.exposure + workers * seconds)

    @property
    def rate(self) -> float:
        """The mean rate, in failures per worker and second."""
        return (_PRIOR_EVENTS + sum(self.sizes)) / (_PRIOR_EVENTS * LLAMA3_WORKER_SECONDS + self.exposure)

    def next_change(self, workers: int) -> float:
        """Seconds expected until one of ``workers`` fails."""
        return 1.0 / (self.rate * workers) if workers else math.inf

    def loss_chance(self, owners: Iterable[int], workers: int) -> float:
        """Upper bound of the chance that the next failure takes all owners of a part.

        ``owners``: the number of owners of each part of the model, such as a stage.
        """
        alone = Counter(owners)
        return min(1.0, sum(count * self._takes_all(own, workers) for own, count in alone.items()))

    def _takes_all(self, own: int, workers: int) -> float:
        """Probability that the next failure takes these ``own`` of all workers."""
        total = sum(self.sizes) + 1
        chance = 0.0
        for size in range(own, min(workers, max(len(self.sizes), own + _LARGER)) + 1):
            seen = self.sizes[size - 1] if size <= len(self.sizes) else 0
            likely = (seen + (1 - _LARGER_SIZE) * _LARGER_SIZE ** (size - 1)) / total
            chance += likely * math.prod((size - n) / (workers - n) for n in range(own))
        return chance


_EFFORT = DEFAULT_EFFORT // 4
_LARGE_EFFORT = 120_000  # of a pipeline that stands for a large grid, whose plan is made again once it is chosen
_GOOD = 1.01  # of the lower bound, as in lane planning


@dataclass(frozen=True, order=True)
class Judgement:
    """Predicted seconds of a step; the least has the shortest period.

    ``fill``: extra seconds of the first step, which begins with empty pipelines. ``lead``: seconds by which the first
    worker begins the next step early; 0 without the staggered optimizer.
    """

    period: float
    fill: float = 0.0
    lead: float = 0.0
    schedule: Schedule | None = field(default=None, compare=False)


Judge: TypeAlias = Callable[[Problem, MicrobatchVariation | None], Judgement]


@lru_cache(maxsize=256)
def judged(problem: Problem, variation: MicrobatchVariation | None = None) -> Judgement:
    """The predicted step of ``problem``, which has the mean costs of micro-batches.

    Grids up to ``COMPACT_FROM`` operations are planned in full, larger ones by lanes where that is near the lower
    bound, without ``variation``. Else the lower bound is the prediction, because a lane per worker of the barest stage
    would waste other workers. Raises PlanningError when there is no plan.
    """
    if not worth_compacting(problem, COMPACT_FROM):
        return with_variation(judgement_of(heuristic(problem, _EFFORT)), variation, _EFFORT)
    lane, bound = lane_problem(problem), lower_bound(problem)
    if lower_bound(lane) <= _GOOD * bound:
        return replace(judgement_of(heuristic(lane, _LARGE_EFFORT)), schedule=None)
    return Judgement(bound, makespan_lower_bound(problem) - bound if problem.technique.staggered else 0.0)


def with_variation(judgement: Judgement, variation: MicrobatchVariation | None, effort: int) -> Judgement:
    """Predicted seconds of a step if micro-batches differ.

    Without a plan, or with a plan by lanes, the ``judgement`` stands.
    """
    schedule = judgement.schedule
    if variation is None or schedule is None or isinstance(schedule, CompactSchedule):
        return judgement
    schedule, timing = heuristic_with_variation(schedule, variation, effort)
    staggered = schedule.problem.technique.staggered
    period = timing.period if staggered else timing.makespan
    lead = max(timing.stage_end) - min(timing.stage_end) if staggered else 0.0
    return Judgement(period, timing.makespan - period, lead, schedule)


def judgement_of(schedule: Schedule) -> Judgement:
    """Predicted seconds of a step of a plan."""
    lane = schedule.lane.schedule() if isinstance(schedule, CompactSchedule) else schedule  # lanes are alike
    ends = [operations[-1].end for operations in lane.workers.values() if operations]
    lead = max(ends) - min(ends) if schedule.problem.technique.staggered else 0.0
    return Judgement(schedule.period, max(0.0, schedule.makespan - schedule.period), lead, schedule)


Way: TypeAlias = Literal["reroute", "layers", "both"]

LEAST_GAIN = 0.005  # of a period: less is within the error of what was measured


@dataclass(frozen=True, slots=True)
class Layout:
    """Layers of each stage, alike in all pipelines, and its number of live workers.

    Args:
        cuts: bounds of the stages: stage s holds the layers ``cuts[s]`` to ``cuts[s + 1] - 1``, at least one. Bounds
            within a layer: see :mod:`~lightning_recycle.planning.partition`.
        workers: live workers of each stage, at least one.

    Raises:
        ConfigurationError: when a stage has no layer, or no worker.
    """

    cuts: Bounds
    workers: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "cuts", check_cuts(self.cuts))
        object.__setattr__(self, "workers", tuple(self.workers))
        if len(self.workers) != len(self.cuts) - 1 or min(self.workers) < 1:
            raise ConfigurationError(
                f"Layout(workers={self.workers!r}): give the live workers of each of the {len(self.cuts) - 1} stages, "
                "at least one."
            )

    @property
    def sizes(self) -> tuple[float, ...]:
        """Layers of each stage; of one that it shares its part."""
        return tuple(rounded(end - begin) for begin, end in pairwise(self.cuts))

    def __str__(self) -> str:
        sizes = "/".join(map(str, self.sizes))
        return f"{sizes} layers on {'/'.join(map(str, self.workers))} workers"


@dataclass(frozen=True)
class Candidate:
    """One way to go on, in numbers.

    Args:
        way: which one.
        layout: cuts and workers by stage; of a refused way, the current ones.
        failed: vacant positions under it.
        roles: new positions of the workers that change theirs, as sorted pairs (before, after).
        period: predicted seconds of a step.
        bytes: sent in all.
        busiest: the most bytes that one worker sends or receives.
        stall: seconds without training for the change: the switch, the copies, and filling the pipelines again.
        saved: seconds of training saved until the next change, minus the stall; 0 for re-routing.
        refused: why this way is not gone; empty otherwise.
        judgement: the plan, if made, and how the period was found.
        problem: the problem to plan for it; None for a way that could not be gone.
    """

    way: Way
    layout: Layout
    failed: frozenset[Worker]
    period: float
    roles: tuple[tuple[Worker, Worker], ...] = ()
    bytes: float = 0.0
    busiest: float = 0.0
    stall: float = 0.0
    saved: float = 0.0
    refused: str = ""
    judgement: Judgement | None = field(default=None, compare=False, repr=False)
    problem: Problem | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        if self.refused:
            return f"{self.way}: {self.refused}"
        text = f"{self.way}: {self.layout}, a step of {shown(self.period)}"
        if self.way == "reroute":
            return text
        return (
            f"{text}; {self.bytes / 1e6:.4g} MB to send, a stall of {shown(self.stall)}, "
            f"saves {shown(self.saved)} until the next change"
        )


@dataclass(frozen=True)
class LayoutPlan:
    """Choice among the candidates.

    Args:
        chosen: the candidate with the most seconds saved.
        candidates: one for each way, re-routing first.
        next_change: seconds expected until the next change.
    """

    chosen: Candidate
    candidates: tuple[Candidate, ...]
    next_change: float

    @property
    def reroute(self) -> Candidate:
        """The candidate that moves nothing."""
        return self.candidates[0]

    @property
    def gain(self) -> float:
        """By how much steps are faster than with re-routing alone, as a fraction."""
        return 1.0 - self.chosen.period / self.reroute.period if self.reroute.period else 0.0

    def why(self) -> tuple[str, ...]:
        """The reasons in numbers: the choice first, then a line for each candidate."""
        moved = f" ({100 * self.gain:.1f} % faster steps)" if self.gain else ""
        until = f"{shown(self.next_change)} until the next change"
        return (f"{self.chosen.way}{moved}; expected: {until}", *map(str, self.candidates))


def chosen_of(candidates: Sequence[Candidate]) -> Candidate:
    """The candidate that saves most; of equal ones the first, which needs least."""
    best = max((each for each in candidates if not each.refused), key=lambda each: each.saved)
    return best if best.saved > 0 else candidates[0]


def is_better(one: Candidate, other: Candidate, sharing_gain: float) -> bool:
    """Whether ``one`` saves more; sharing layers must gain ``sharing_gain`` at least."""
    shared = [len(shared_layers(each.layout.cuts)) for each in (one, other)]
    if shared[0] != shared[1]:
        least = sharing_gain * (1 if shared[0] > shared[1] else -1)
        return one.period < other.period * (1 - least)
    return (one.saved, -one.bytes) > (other.saved, -other.bytes)


def shown(seconds: float) -> str:
    """A time as candidates show it."""
    return f"{seconds:.4g} s"


_TRIED = 4  # layouts of a way that are planned, with layers that stages share and without
_SLACKS = (0.0, 0.02, 0.05)  # of the least bottleneck: a slightly larger load may move far less
_SHARED_SLACK = 0.005  # of the least bottleneck: with a slightly larger load, stages may share fewer layers
_SHARING_GAIN = 0.1  # of the least gain of a layout, for which more layers are shared


def plan_layout(
    problem: Problem,
    layers: LayerCosts,
    cuts: Sequence[float],
    *,
    next_change: float,
    switch: float = 0.0,
    least_gain: float = LEAST_GAIN,
    fixed: str = "",
    whole: str = "",
    ways: Collection[Way] = ("layers", "both"),
    judge: Judge = judged,
) -> LayoutPlan:
    """The best layout for the workers that are left.

    Args:
        problem: grid, failed (vacant) and slow workers, technique, and limit in flight. Its costs and memory are not
            used: those of a layout follow from ``layers``.
        layers: what single layers cost.
        cuts: bounds of the stages now.
        next_change: seconds expected until the next change, e.g. of
            :meth:`~lightning_recycle.planning.layouts.FailureRecord.next_change`.
        switch: seconds that all stand still at a change, without copies: agreement, new communicators, optimizers that
            are built again.
        least_gain: the smallest part of a period that a layout must save.
        fixed: why layers cannot move, e.g. "layer 3 has no LayerSpec"; empty if they can.
        whole: why neighbouring stages cannot share a layer; empty if they can.
        ways: what to consider besides re-routing.
        judge: plans a problem; by default the heuristic, on large grids by lanes.

    Raises:
        ConfigurationError: when the cuts are none of these layers.
        PlanningError: when there is no plan that moves nothing.
    """
    change = next_change, at_least("", "switch", switch), at_least("", "least_gain", least_gain)
    search = _LayoutSearch(problem, layers, check_cuts(cuts, layers.layers), *change, judge, not whole)
    found = [search.first]
    for way in ways:
        try:
            found.append(search.cut(way, fixed))
        except PlanningError as error:
            found.append(search.refused(way, str(error)))
    return LayoutPlan(chosen_of(found), tuple(found), next_change)


class _LayoutSearch:
    """The candidates of one call."""

    def __init__(
        self,
        problem: Problem,
        layers: LayerCosts,
        cuts: Bounds,
        next_change: float,
        switch: float,
        least_gain: float,
        judge: Judge,
        shares_layers: bool,
    ) -> None:
        self.problem, self.layers, self.cuts, self.shares_layers = problem, layers, cuts, shares_layers
        self.next_change, self.switch, self.least_gain, self.judge = next_change, switch, least_gain, judge
        self.grid, self.live = problem.grid, problem.live_counts()
        self.split_backward = problem.technique.split_backward
        if len(cuts) != self.grid.stages + 1:
            raise ConfigurationError(f"cuts={cuts!r}: the grid {self.grid} has {self.grid.stages} stages.")
        stays = self.at(cuts, problem.failed)
        step = self.judged(cuts, stays)
        layout = Layout(cuts, self.live)
        self.first = Candidate("reroute", layout, stays.failed, step.period, judgement=step, problem=stays)
        """Nothing moves."""

    # -- candidates -----------------------------------------------------------------------------------------------

    def cut(self, way: Way, fixed: str) -> Candidate:
        """Layers move; with ``both``, workers too."""
        if fixed:
            return self.refused(way, f"layers do not move: {fixed}")
        if self.layers.layers == self.grid.stages:
            return self.refused(way, f"{self.layers.layers} layers on as many stages: there is one cut only")
        if way == "both" and not self.problem.failed:
            return self.refused(way, "no worker has failed")
        if way == "both" and self.problem.worker_factors:
            return self.refused(way, "workers of unequal speed keep their stages")
        rivals: dict[tuple[Bounds, tuple[int, ...]], None] = {}
        for spare in _spares(self.grid) if self.layers.memory_limit is not None else (_HARD,):
            goals = [self.live]
            if way == "both":
                best = fastest_cut(self.stages(self.tables, spare))
                if best is None:
                    continue
                goals = [self.spread(best, spare), self.live, *self.smooth]
            for goal in dict.fromkeys(goals):
                for cuts in self.cuts_for(goal, spare, near=goal == goals[0]):
                    if cuts != self.cuts or goal != self.live:
                        rivals[cuts, self.without(goal)] = None
        if not rivals and self.layers.memory_limit is not None:
            free = fastest_cut(self.stages(self.tables if way == "both" else self.fixed(self.live), None))
            if free is not None and free.cuts != self.cuts:
                return self.refused(way, "no faster cut leaves room for one micro-batch on a worker of every stage")
        return self.best(way, list(rivals))

    def cuts_for(self, goal: tuple[int, ...], spare: float, *, near: bool) -> Iterator[Bounds]:
        """The fastest cuts for these numbers of workers, with and without shared layers.

        ``near``: also whole-layer cuts that move the fewest bytes, or are the most even, near the least bottleneck.
        """
        options = self.fixed(goal)
        whole, sharing = self.stages(options, spare), self.stages(options, spare, shares_layers=True)
        best = fastest_cut(whole) if near else None
        if best is not None:
            yield best.cuts
            prices = (
                lambda stage, begin, end: self.moved(goal[stage], stage, begin, end),
                lambda stage, begin, end: whole.load(stage, begin, end, goal[stage]) ** 2,
            )
            for slack, price in product(_SLACKS, prices):
                found = whole.within(best.bottleneck * (1 + slack), price)
                if found is not None:
                    yield found.cuts
        best = fastest_cut(sharing) if self.shares_layers else None
        if best is not None:
            found = sharing.within(best.bottleneck * (1 + _SHARED_SLACK))
            assert found is not None
            yield found.cuts

    @cached_property
    def tables(self) -> list[Options]:
        """Any number of workers for each stage."""
        return [list(enumerate(self.shares))[1:]] * self.grid.stages

    def fixed(self, goal: tuple[int, ...]) -> list[Options]:
        """One number of workers for each stage; unchanged ones have their speeds."""
        if goal != self.live:
            return [[(count, self.shares[count])] for count in goal]
        factors = (sorted(self.problem.live_factors(stage), reverse=True) for stage in range(self.grid.stages))
        return [[(len(each), shares(self.grid.global_microbatches, each)[-1])] for each in factors]

    @cached_property
    def shares(self) -> tuple[float, ...]:
        """Micro-batches of the busiest of each number of workers of equal speed."""
        return shares(self.grid.global_microbatches, (1.0,) * self.grid.lanes)

    @cached_property
    def smooth(self) -> tuple[tuple[int, ...], ...]:
        """Numbers of workers that suit stages that share layers."""
        return smooth_counts(self.shares, self.grid.stages, sum(self.live)) if self.shares_layers else ()

    def best(self, way: Way, rivals: list[tuple[Bounds, tuple[int, ...]]]) -> Candidate:
        """The candidate that saves most, of the few with the least bounds."""
        ranked = []
        refused = ""
        for cuts, distribution in rivals:
            failed = self.failed(distribution)
            try:
                ranked.append((lower_bound(self.at(cuts, failed, distribution)), cuts, distribution))
            except PlanningError as error:
                refused = str(error)
        if not ranked:
            return self.refused(way, refused or "the present cut has the least load")
        ranked.sort()
        goal = self.first.period * (1 - self.least_gain)
        if ranked[0][0] >= goal:
            return self.refused(way, f"no cut is faster: {_at_least(ranked[0][0], self.first)}")
        few = 1 if worth_compacting(self.problem, COMPACT_FROM) else _TRIED
        kinds = [[each for each in ranked if are_whole(each[1]) is whole] for whole in (True, False)]
        best: Candidate | None = None
        refused = ""
        for bound, cuts, distribution in (each for kind in kinds for each in kind[:few]):
            if best is not None and bound > best.period:
                continue
            try:
                found = self.candidate(way, cuts, distribution)
            except PlanningError as error:
                refused = str(error)
                continue
            if best is None or is_better(found, best, _SHARING_GAIN * self.least_gain):
                best = found
        return self.refused(way, refused) if best is None else best

    def judged(self, cuts: Bounds, problem: Problem) -> Judgement:
        """A step of ``problem``, which has the mean costs under these cuts."""
        return self.judge(problem, self.layers.variation(cuts, self.grid, split_backward=self.split_backward))

    def candidate(self, way: Way, cuts: Bounds, distribution: tuple[int, ...]) -> Candidate:
        """A layout with its plan, traffic and savings; refused if it saves nothing."""
        taken = self.roles(distribution)
        problem = self.at(cuts, self.failed(distribution), distribution)
        judgement = self.judged(cuts, problem)
        state = self.layers.state_bytes
        sent = traffic(layer_moves(self.grid, self.problem.failed, self.cuts, cuts, taken, state), state)
        stall = self.switch + judgement.fill + sent.seconds(self.layers.bandwidth, self.layers.latency)
        gain = 1.0 - judgement.period / self.first.period
        saved = gain * self.next_change - stall
        refused = ""
        if gain < self.least_gain:
            refused = f"its step of {shown(judgement.period)} is not shorter than {shown(self.first.period)}"
        elif saved <= 0:
            refused = (
                f"a step is {100 * gain:.1f} % shorter, which in {shown(self.next_change)} does not pay for a stall "
                f"of {shown(stall)}"
            )
        return Candidate(
            way,
            Layout(cuts, self.without(distribution)),
            problem.failed,
            judgement.period,
            tuple(sorted((worker, place) for worker, place in taken.items() if worker != place)),
            sent.total,
            sent.busiest,
            stall,
            saved,
            refused,
            judgement=judgement,
            problem=problem,
        )

    def refused(self, way: Way, reason: str) -> Candidate:
        return Candidate(way, Layout(self.cuts, self.live), self.problem.failed, 0.0, refused=reason)

    # -- what they are made of -------------------------------------------------------------------------------------

    def at(self, cuts: Bounds, failed: frozenset[Worker], distribution: tuple[int, ...] | None = None) -> Problem:
        """The problem under a layout; its costs are the mean of all micro-batches."""
        factors = dict(self.problem.worker_factors)
        if factors and distribution is not None and distribution != distribution_of(self.grid, self.problem.failed):
            taken = self.roles(distribution)
            factors = {taken.get(worker, worker): factor for worker, factor in factors.items()}
        return replace(
            self.problem,
            costs=self.layers.costs(cuts, split_backward=self.split_backward),
            failed=failed,
            memory=self.layers.memory(cuts),
            worker_factors=tuple(factors.items()),
        )

    def without(self, counts: Sequence[int]) -> tuple[int, ...]:
        """Failures of each stage from its live workers, or the reverse."""
        return tuple(self.grid.lanes - count for count in counts)

    def failed(self, distribution: tuple[int, ...]) -> frozenset[Worker]:
        """Vacant positions; the current ones if each stage keeps its workers."""
        if distribution == distribution_of(self.grid, self.problem.failed):
            return self.problem.failed
        return normalized_failures(self.grid, distribution)

    def roles(self, distribution: tuple[int, ...]) -> Mapping[Worker, Worker]:
        """The positions of the live workers; empty if all stay."""
        if distribution == distribution_of(self.grid, self.problem.failed):
            return {}
        return roles(self.grid, self.problem.failed, distribution)

    def stages(self, options: list[Options], spare: float | None, *, shares_layers: bool = False) -> Stages:
        """Possible stages, with memory for ``spare`` times 1F1B's micro-batches.

        There is room for at least one. None: memory does not count.
        """
        layers = self.layers
        return Stages(
            layers.work(split_backward=self.split_backward),
            tuple(map(sum, zip(layers.reduce, layers.optimizer, strict=True))),
            options,
            sum(self.live),
            None if spare is None else self.fits(spare),
            shares_layers,
        )

    def fits(self, spare: float) -> Callable[[int, float, float], bool] | None:
        """Whether the layers between two bounds fit into a worker, with micro-batches."""
        layers, limit = self.layers, self.layers.memory_limit
        if limit is None:
            return None
        state, held = [0.0], [0.0]
        for own, each in zip(layers.state_bytes, layers.held_bytes, strict=True):
            state.append(state[-1] + own)
            held.append(held[-1] + each)
        stages = self.grid.stages

        def of_microbatches(bound: float) -> float:
            layer = math.floor(bound)
            return held[layer] + (bound - layer) * (layers.held_bytes[layer] if bound > layer else 0.0)

        def fits(stage: int, begin: float, end: float) -> bool:
            most = max(1.0, spare * min(stages - stage, self.grid.global_microbatches))
            first, last = math.floor(begin), math.ceil(end)
            needed = state[last] - state[first] + most * (of_microbatches(end) - of_microbatches(begin))
            needed += layers.held_bytes[first] if begin > first else 0.0
            needed += layers.held_bytes[last - 1] if end < last else 0.0
            return needed <= limit * (1 + 1e-9)

        return fits

    def spread(self, cut: Cut, spare: float) -> tuple[int, ...]:
        """Workers of each stage: all live ones, as many as possible where they are."""
        stages = self.stages(self.tables, spare)
        counts = [max(need, live) for need, live in zip(cut.workers, self.live, strict=True)]
        for _ in range(sum(counts) - sum(self.live)):
            givers = [stage for stage, need in enumerate(cut.workers) if counts[stage] > need]
            # The stage whose load stays least gives one.
            giver = min(
                givers, key=lambda s: (stages.load(s, cut.cuts[s], cut.cuts[s + 1], counts[s] - 1), counts[s], s)
            )
            counts[giver] -= 1
        return tuple(counts)

    def moved(self, workers: int, stage: int, begin: float, end: float) -> float:
        """Bytes that the workers of a stage get for these whole layers."""
        state, held = self.layers.state_bytes, held_ranges(self.cuts)[stage]
        layers = range(int(begin), int(end))
        lacking = sum(state[layer] for layer in layers if layer not in held)
        return self.live[stage] * lacking + max(0, workers - self.live[stage]) * sum(state[layer] for layer in layers)


Options: TypeAlias = list[tuple[int, float]]
"""Numbers of workers of a stage, each with the micro-batches of the busiest one."""

_HARD = 0.0


def _spares(grid: Grid) -> tuple[float, ...]:
    """Room for micro-batches that a cut leaves, relative to 1F1B, the least first."""
    return (_HARD, 1.0, 1.5, 2.0) if grid.stages > 1 else (_HARD,)


def _at_least(bound: float, first: Candidate) -> str:
    return f"at least {shown(bound)} a step, re-routing takes {shown(first.period)}"
