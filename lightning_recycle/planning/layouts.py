"""Layouts: the layers of each stage after failures, and whether moving them pays.

Stages that lost workers may give layers to their neighbours. That is worth a change if the seconds that it saves until
the next change exceed the stall for it:

    (1 - period / period of re-routing) x seconds until the next change  >  stall

Cuts are found exactly by the load of the slowest stage (:mod:`~lightning_recycle.planning.layer_cuts`). A load is only
a bound, so the cuts with the least lower bounds are planned, and the period of the real schedule decides. The result is
never worse than re-routing by its own figures.

*Next change*: failures come at an unknown rate per worker and second. With a Gamma prior of shape a and exposure b,
after k failures in E worker-seconds the rate has the mean (a + k) / (b + E). The prior's mean a / b is that of Llama 3
(arXiv 2407.21783, section 3.3.4: 419 unplanned interruptions in 54 days on 16,384 GPUs); its shape is small, as spot
instances fail four orders of magnitude more often.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Literal, TypeAlias

from lightning_recycle.arguments import at_least, whole
from lightning_recycle.errors import ConfigurationError, PlanningError
from lightning_recycle.planning.heuristic_planner import DEFAULT_EFFORT, heuristic, heuristic_with_variation
from lightning_recycle.planning.layer_cuts import (
    Bounds,
    LayerCosts,
    Stages,
    are_whole,
    check_cuts,
    fastest_cut,
    rounded,
    shared_layers,
    traffic,
    transfers,
)
from lightning_recycle.planning.problem import Problem, least_maximum, lower_bound, makespan_lower_bound
from lightning_recycle.planning.routing import COMPACT_FROM, CompactSchedule, lane_problem, worth_compacting
from lightning_recycle.planning.schedule import Schedule
from lightning_recycle.planning.timing import MicrobatchVariation

_PRIOR_EVENTS = 0.001  # failures that the prior of the rate counts for

LLAMA3_WORKER_SECONDS = 54 * 86400 * 16384 / 419
"""Between two failures of one GPU."""


@dataclass(frozen=True, slots=True)
class FailureRecord:
    """Record of failures, and the rate of changes that follows.

    Args:
        failures: changes so far, each the loss of one worker or of several at once.
        exposure: seconds that live workers have worked, added up over the workers.
    """

    failures: int = 0
    exposure: float = 0.0

    def __post_init__(self) -> None:
        whole("FailureRecord", "failures", self.failures)
        at_least("FailureRecord", "exposure", self.exposure)

    def after(self, workers: int, seconds: float, failed: bool = False) -> FailureRecord:
        """The record after ``seconds``, at the end of which workers ``failed``."""
        return FailureRecord(self.failures + failed, self.exposure + workers * seconds)

    def next_change(self, workers: int) -> float:
        """Seconds expected until one of ``workers`` fails, at the mean rate."""
        rate = (_PRIOR_EVENTS + self.failures) / (_PRIOR_EVENTS * LLAMA3_WORKER_SECONDS + self.exposure)
        return 1.0 / (rate * workers) if workers else math.inf


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


Way: TypeAlias = Literal["reroute", "layers"]

LEAST_GAIN = 0.005  # of a period: less is within the error of what was measured


@dataclass(frozen=True)
class Candidate:
    """One way to go on, in numbers.

    Args:
        cuts: bounds of the stages; of a refused way, the current ones.
        problem: the problem to plan for it; of a refused way, that of re-routing.
        period: predicted seconds of a step.
        bytes: sent in all.
        busiest: the most bytes that one worker sends or receives.
        stall: seconds without training for the change: the switch, the copies, and filling the pipelines again.
        saved: seconds of training saved until the next change, minus the stall; 0 for re-routing.
        refused: why this way is not gone; empty otherwise.
        judgement: the plan, if made, and how the period was found.
    """

    way: Way
    cuts: Bounds
    problem: Problem = field(compare=False, repr=False)
    period: float = 0.0
    bytes: float = 0.0
    busiest: float = 0.0
    stall: float = 0.0
    saved: float = 0.0
    refused: str = ""
    judgement: Judgement | None = field(default=None, compare=False, repr=False)

    @property
    def sizes(self) -> tuple[float, ...]:
        """Layers of each stage; of one that it shares its part."""
        return tuple(rounded(end - begin) for begin, end in pairwise(self.cuts))

    def __str__(self) -> str:
        if self.refused:
            return f"{self.way}: {self.refused}"
        text = f"{self.way}: {'/'.join(map(str, self.sizes))} layers, a step of {_shown(self.period)}"
        if self.way == "reroute":
            return text
        return (
            f"{text}; {self.bytes / 1e6:.4g} MB to send, a stall of {_shown(self.stall)}, "
            f"saves {_shown(self.saved)} until the next change"
        )


@dataclass(frozen=True)
class LayoutPlan:
    """Re-routing alone or moving layers, for the next ``next_change`` seconds."""

    reroute: Candidate
    layers: Candidate
    next_change: float

    @property
    def chosen(self) -> Candidate:
        """The candidate that saves more."""
        return self.reroute if self.layers.refused else self.layers

    @property
    def gain(self) -> float:
        """By how much steps are faster than with re-routing alone, as a fraction."""
        return 1.0 - self.chosen.period / self.reroute.period if self.reroute.period else 0.0

    def why(self) -> tuple[str, ...]:
        """The reasons in numbers: the choice first, then a line for each candidate."""
        moved = f" ({100 * self.gain:.1f} % faster steps)" if self.gain else ""
        until = f"{_shown(self.next_change)} until the next change"
        return (f"{self.chosen.way}{moved}; expected: {until}", str(self.reroute), str(self.layers))


def _shown(seconds: float) -> str:
    return f"{seconds:.4g} s"


_TRIED = 4  # cuts that are planned, with layers that stages share and without
_SHARED_SLACK = 0.005  # of the least bottleneck: with a slightly larger load, stages may share fewer layers
_SHARING_GAIN = 0.1  # of the least gain of a layout, for which more layers are shared
_SPARES = (0.0, 1.0, 1.5, 2.0)
"""Room for micro-batches that a cut leaves, relative to 1F1B; the first: for one micro-batch alone."""


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
    judge: Judge = judged,
) -> LayoutPlan:
    """The best layout for the workers that are left.

    Args:
        problem: grid, failed (vacant) and slow workers, technique, and limit in flight. Its costs and memory are not
            used: those of a layout follow from ``layers``.
        layers: what single layers cost.
        cuts: bounds of the stages now.
        next_change: seconds expected until the next change, e.g. of :meth:`FailureRecord.next_change`.
        switch: seconds that all stand still at a change, without copies: agreement, new communicators, optimizers that
            are built again.
        least_gain: the smallest part of a period that a layout must save.
        fixed: why layers cannot move, e.g. "layer 3 has no LayerSpec"; empty if they can.
        whole: why neighbouring stages cannot share a layer; empty if they can.
        judge: plans a problem; by default the heuristic, on large grids by lanes.

    Raises:
        ConfigurationError: when the cuts are none of these layers.
        PlanningError: when there is no plan that moves nothing.
    """
    change = next_change, at_least("", "switch", switch), at_least("", "least_gain", least_gain)
    search = _LayoutSearch(problem, layers, check_cuts(cuts, layers.layers), *change, judge, shares_layers=not whole)
    try:
        moved = search.moved(fixed)
    except PlanningError as error:
        moved = search.refused(str(error))
    return LayoutPlan(search.first, moved, next_change)


@dataclass
class _LayoutSearch:
    """The candidates of one call."""

    problem: Problem
    layers: LayerCosts
    cuts: Bounds
    next_change: float
    switch: float
    least_gain: float
    judge: Judge
    shares_layers: bool

    def __post_init__(self) -> None:
        self.grid, self.split_backward = self.problem.grid, self.problem.technique.split_backward
        if len(self.cuts) != self.grid.stages + 1:
            raise ConfigurationError(f"cuts={self.cuts!r}: the grid {self.grid} has {self.grid.stages} stages.")
        stays = self.at(self.cuts)
        step = self.judged(self.cuts, stays)
        self.first = Candidate("reroute", self.cuts, stays, step.period, judgement=step)
        """Nothing moves."""

    # -- candidates -----------------------------------------------------------------------------------------------

    def moved(self, fixed: str) -> Candidate:
        """The best other cut, or why there is none."""
        if fixed:
            return self.refused(f"layers do not move: {fixed}")
        if self.layers.layers == self.grid.stages:
            return self.refused(f"{self.layers.layers} layers on as many stages: there is one cut only")
        rivals = {
            cuts: None
            for spare in (_SPARES if self.layers.memory_limit is not None and self.grid.stages > 1 else _SPARES[:1])
            for cuts in self.fast_cuts(spare)
            if cuts != self.cuts
        }
        if not rivals and self.layers.memory_limit is not None:
            free = fastest_cut(self.stages(None))
            if free is not None and free.cuts != self.cuts:
                return self.refused("no faster cut leaves room for one micro-batch on a worker of every stage")
        return self.best(list(rivals))

    def fast_cuts(self, spare: float) -> Iterator[Bounds]:
        """The fastest cuts with shared layers and without."""
        whole, sharing = self.stages(spare), self.stages(spare, shares_layers=True)
        best = fastest_cut(whole)
        if best is not None:
            yield best.cuts
        best = fastest_cut(sharing) if self.shares_layers else None
        if best is not None:
            found = sharing.within(best.bottleneck * (1 + _SHARED_SLACK))
            assert found is not None
            yield found.cuts

    def best(self, rivals: list[Bounds]) -> Candidate:
        """The candidate that saves most, of the few with the least bounds."""
        ranked = []
        refused = ""
        for cuts in rivals:
            try:
                ranked.append((lower_bound(self.at(cuts)), cuts))
            except PlanningError as error:
                refused = str(error)
        if not ranked:
            return self.refused(refused or "the present cut has the least load")
        ranked.sort()
        if ranked[0][0] >= self.first.period * (1 - self.least_gain):
            least, now = _shown(ranked[0][0]), _shown(self.first.period)
            return self.refused(f"no cut is faster: at least {least} a step, re-routing takes {now}")
        few = 1 if worth_compacting(self.problem, COMPACT_FROM) else _TRIED
        kinds = [[each for each in ranked if are_whole(each[1]) is whole] for whole in (True, False)]
        best: Candidate | None = None
        for bound, cuts in (each for kind in kinds for each in kind[:few]):
            if best is not None and bound > best.period:
                continue
            try:
                found = self.candidate(cuts)
            except PlanningError as error:
                refused = str(error)
                continue
            if best is None or _is_better(found, best, _SHARING_GAIN * self.least_gain):
                best = found
        return self.refused(refused) if best is None else best

    def judged(self, cuts: Bounds, problem: Problem) -> Judgement:
        """A step of ``problem``, which has the mean costs under these cuts."""
        return self.judge(problem, self.layers.variation(cuts, self.grid, split_backward=self.split_backward))

    def candidate(self, cuts: Bounds) -> Candidate:
        """A layout with its plan, traffic and savings; refused if it saves nothing."""
        problem = self.at(cuts)
        judgement = self.judged(cuts, problem)
        roster = [self.grid.rank(worker) for worker in problem.live_workers()]
        total, busiest = traffic(transfers(self.grid, roster, self.cuts, cuts), self.layers.state_bytes)
        stall = self.switch + judgement.fill + (self.layers.copy_seconds(busiest) if total else 0.0)
        gain = 1.0 - judgement.period / self.first.period
        saved = gain * self.next_change - stall
        refused = ""
        if gain < self.least_gain:
            refused = f"its step of {_shown(judgement.period)} is not shorter than {_shown(self.first.period)}"
        elif saved <= 0:
            refused = (
                f"a step is {100 * gain:.1f} % shorter, which in {_shown(self.next_change)} does not pay for a stall "
                f"of {_shown(stall)}"
            )
        numbers = judgement.period, total, busiest, stall, saved, refused
        return Candidate("layers", cuts, problem, *numbers, judgement=judgement)

    def refused(self, reason: str) -> Candidate:
        return Candidate("layers", self.cuts, self.first.problem, refused=reason)

    # -- what they are made of -------------------------------------------------------------------------------------

    def at(self, cuts: Bounds) -> Problem:
        """The problem under a layout; its costs are the mean of all micro-batches."""
        costs = self.layers.costs(cuts, split_backward=self.split_backward)
        return replace(self.problem, costs=costs, memory=self.layers.memory(cuts))

    def stages(self, spare: float | None, *, shares_layers: bool = False) -> Stages:
        """Possible stages, with memory for ``spare`` times 1F1B's micro-batches.

        There is room for at least one. None: memory does not count.
        """
        layers, microbatches = self.layers, self.grid.global_microbatches
        busiest = [
            least_maximum(operator.mul, microbatches, self.problem.live_factors(stage))
            for stage in range(self.grid.stages)
        ]
        return Stages(
            layers.work(split_backward=self.split_backward),
            tuple(map(sum, zip(layers.reduce, layers.optimizer, strict=True))),
            busiest,
            None if spare is None else self.fits(spare),
            shares_layers,
        )

    def fits(self, spare: float) -> Callable[[int, float, float], bool] | None:
        """Whether the layers between two bounds fit into a worker, with micro-batches."""
        layers, limit = self.layers, self.layers.memory_limit
        if limit is None:
            return None
        state, held = (list(accumulate(each, initial=0.0)) for each in (layers.state_bytes, layers.held_bytes))
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


def _is_better(one: Candidate, other: Candidate, sharing_gain: float) -> bool:
    """Whether ``one`` saves more; sharing layers must gain ``sharing_gain`` at least."""
    shared = [len(shared_layers(each.cuts)) for each in (one, other)]
    if shared[0] != shared[1]:
        least = sharing_gain * (1 if shared[0] > shared[1] else -1)
        return one.period < other.period * (1 - least)
    return (one.saved, -one.bytes) > (other.saved, -other.bytes)
