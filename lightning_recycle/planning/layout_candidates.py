"""Candidates of a layout: predicted step, costs of a change, and the best.

A layout is worth a change if the seconds that it saves until the next change exceed the stall for it:

    (1 - period / period of reroute) x seconds until the next change  >  stall

*Next change*: failures come at an unknown rate per worker and second. With a Gamma prior of shape a and exposure b,
after k failures in E worker-seconds the rate has the mean (a + k) / (b + E). The prior's mean a / b is that of Llama 3
(arXiv 2407.21783, section 3.3.4: 419 unplanned interruptions in 54 days on 16,384 GPUs); its shape is small, as spot
instances fail four orders of magnitude more often. By the prior for the number of workers lost at once, three of four
failures take one worker, and each size is a quarter as likely as the one below it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from typing import Literal, TypeAlias

from lightning_recycle.arguments import at_least, whole
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.planning.compact_schedule import COMPACT_FROM, CompactSchedule, lane_problem, worth_compacting
from lightning_recycle.planning.cuts import Bounds, check_cuts, rounded, shared_layers
from lightning_recycle.planning.grid import Worker
from lightning_recycle.planning.heuristic_planner import DEFAULT_EFFORT, heuristic, heuristic_with_variation
from lightning_recycle.planning.problem import Problem, lower_bound, makespan_lower_bound
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
            within a layer: see :mod:`~lightning_recycle.planning.cuts`.
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
