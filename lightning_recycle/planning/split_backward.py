"""Splitting backwards: its measured costs, and whether it pays.

A trial runs micro-batches with fused and with split backwards side by side. Splitting is more work (a larger F, more
nodes of autograd, kept inputs), which a schedule hides in idle slots, but only where the processor is idle: workers
that share cores compute while others wait. So two times count: of the operations without waiting for a core, from which
a schedule follows, and of keeping each machine busy, a lower bound. Fused backwards are kept unless a split plan is
shorter by 0.5 %.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

from lightning_recycle.arguments import at_least
from lightning_recycle.errors import ConfigurationError, PlanningError
from lightning_recycle.planning.costs import Costs
from lightning_recycle.planning.grid import Grid, OpKind, Worker
from lightning_recycle.planning.problem import Problem, lower_bound
from lightning_recycle.planning.schedule import PlanResult, Schedule

_MOST_LONGER = 1e6  # times BW that B and W take; what is more was not measured


@dataclass(frozen=True, slots=True)
class SplitTrial:
    """Seconds of micro-batches with fused and split backwards, in pairs.

    Args:
        fused: seconds of F and BW.
        split: seconds of F, B and W.
        busy_fused: seconds for which a micro-batch with a fused backward keeps the machine's processors busy.
        busy_split: the same with a split backward.
        place: the processors; workers of the same place share them.
        processors: how many there are.
        waited: the part of an operation's time spent waiting for a processor, not in ``fused`` and ``split``.
    """

    fused: tuple[float, float]
    split: tuple[float, float, float]
    busy_fused: float
    busy_split: float
    place: str
    processors: float = 1.0
    waited: float = 0.0

    def __post_init__(self) -> None:
        for name, values in (("fused", self.fused), ("split", self.split)):
            for value in values:
                at_least("SplitTrial", name, value)
        for name in ("busy_fused", "busy_split", "processors", "waited"):
            at_least("SplitTrial", name, getattr(self, name))
        if len(self.fused) != 2 or len(self.split) != 3 or self.processors <= 0 or self.waited > 1:
            raise ConfigurationError(f"{self}: give F and BW, F, B and W, and some processors.")
        if self.longer > _MOST_LONGER:
            raise ConfigurationError(f"{self}: a split backward cannot take {self.longer:g} times as long.")

    @property
    def longer(self) -> float:
        """F + B + W, less the F of a fused backward, relative to BW."""
        forward, fused = self.fused
        return max(1.0, (sum(self.split) - forward) / fused) if fused else 1.0

    @property
    def input_share(self) -> float:
        """The part of B in B and W."""
        _, b, w = self.split
        return b / (b + w) if b + w else 0.5

    def divided(self, seconds: Mapping[str, float]) -> dict[str, float]:
        """``seconds`` of operations by name, with BW divided into B and W."""
        if "BW" not in seconds or {"B", "W"} <= seconds.keys():
            return dict(seconds)
        both = seconds["BW"] * self.longer
        return {**seconds, "B": both * self.input_share, "W": both * (1 - self.input_share)}


@dataclass(frozen=True)
class SplitCosts:
    """Costs of splitting backwards in each stage: medians of its workers' trials."""

    grid: Grid
    trials: Mapping[Worker, SplitTrial]

    def __post_init__(self) -> None:
        missing = set(range(self.grid.stages)) - {worker.stage for worker in self.trials}
        if missing:
            raise ConfigurationError(f"SplitCosts: no worker of the stages {sorted(missing)} has tried to split.")

    def _of(self, stage: int) -> list[SplitTrial]:
        return [trial for worker, trial in self.trials.items() if worker.stage == stage]

    def of_split(self, costs: Costs, fused: Sequence[bool]) -> Costs:
        """Costs of operations whose backwards are split.

        ``fused``: for each stage, whether ``costs`` are of fused backwards: B + W is BW.
        """
        backward, weight = [], []
        for stage, both in enumerate(_both(costs)):
            trials = self._of(stage)
            if not fused[stage]:
                backward.append(costs.backward_input[stage])
                weight.append(costs.backward_weight[stage])
                continue
            longer = both * median(trial.longer for trial in trials)
            share = median(trial.input_share for trial in trials)
            backward.append(longer * share)
            weight.append(longer * (1 - share))
        return replace(costs, backward_input=tuple(backward), backward_weight=tuple(weight))

    def of_fused(self, problem: Problem) -> Problem:
        """``problem`` with fused backwards: half of BW counts as B, half as W."""
        half = tuple(
            both / median(trial.longer for trial in self._of(stage)) / 2
            for stage, both in enumerate(_both(problem.costs))
        )
        costs = replace(problem.costs, backward_input=half, backward_weight=half)
        return replace(problem, costs=costs, technique=replace(problem.technique, split_backward=False))

    @property
    def computing(self) -> float:
        """The mean part of an operation's time spent computing."""
        return 1.0 - fmean(trial.waited for trial in self.trials.values())

    def least_seconds(self, problem: Problem) -> float:
        """A lower bound of a step: its operations keep the busiest machine busy."""
        live, split = problem.live_counts(), problem.technique.split_backward
        busy: dict[str, float] = defaultdict(float)
        processors: dict[str, float] = {}
        usual = [
            (fmean(trial.busy_fused for trial in trials), fmean(max(t.busy_fused, t.busy_split) for t in trials))
            for trials in map(self._of, range(self.grid.stages))
        ]
        for worker in problem.live_workers():
            trial = self.trials.get(worker)
            if trial is not None:
                count = self.grid.global_microbatches / live[worker.stage]
                busy[trial.place] += count * usual[worker.stage][split]
                processors[trial.place] = trial.processors
        return max((seconds / processors[place] for place, seconds in busy.items()), default=0.0)


def _both(costs: Costs) -> tuple[float, ...]:
    return tuple(b + w for b, w in zip(costs.backward_input, costs.backward_weight, strict=True))


@dataclass(frozen=True)
class TechniqueChoice:
    """The choice between split and fused backwards, and its comparison.

    ``splitting``: extra time of B + W of all stages over BW, as a fraction of F + BW. ``fused_seconds`` and
    ``split_seconds``: predicted steps, the latter at least, and infinite without split backwards in a plan.
    """

    splits: bool
    splitting: float
    fused_seconds: float
    split_seconds: float

    @property
    def gain(self) -> float:
        """The part of a step that is saved; 0 where that is not known."""
        own, other = self.fused_seconds, self.split_seconds
        if self.splits:
            own, other = other, own
        return 1.0 - own / other if 0.0 < other < math.inf else 0.0

    @property
    def facts(self) -> dict[str, Any]:
        """The choice in numbers, for the record of a run.

        ``cost``: extra time of split backwards, as a fraction of F and BW. ``wins``: the part of a step that the split
        plan saves, below 0 where it loses. ``fused_seconds`` and ``split_seconds``: the least time of a step, as far as
        the plans differ.
        """
        found = {"split": self.splits, "cost": self.splitting, "wins": 0.0, "fused_seconds": self.fused_seconds}
        if self.split_seconds < math.inf:
            found["split_seconds"] = self.split_seconds
            found["wins"] = 1.0 - self.split_seconds / self.fused_seconds if self.fused_seconds else 0.0
        return found


_LEAST_GAIN = 0.005  # of a period


def choose_technique(
    problem: Problem, known: SplitCosts, plan: Callable[[Problem], PlanResult]
) -> tuple[PlanResult, TechniqueChoice]:
    """The plan with split backwards if its step is shorter, else the fused one.

    ``problem`` has the seconds of split B and W. Raises PlanningError when there is no plan with fused backwards.
    """

    def seconds(asked: Problem, period: float) -> float:
        return max(known.least_seconds(asked), known.computing * period)

    fused = known.of_fused(problem)
    best, splits = plan(fused), False
    least = seconds(fused, best.schedule.period)
    predicted = seconds(problem, lower_bound(problem))
    if predicted < least:  # else no plan can be better
        try:
            split = plan(problem)
            predicted = seconds(problem, split.schedule.period) if _splits(split.schedule) else math.inf
            if predicted < least * (1 - _LEAST_GAIN):
                best, splits = split, True
        except PlanningError:
            predicted = math.inf  # what waits between B and W has no room
    backward = sum(_both(fused.costs))
    work = sum(problem.costs.forward) + backward
    longer = (sum(_both(problem.costs)) - backward) / work if work else 0.0
    return best, TechniqueChoice(splits, longer, least, predicted)


def _splits(schedule: Schedule) -> bool:
    programs = map(schedule.program, schedule.live_workers)
    return any(op.kind is OpKind.BACKWARD_WEIGHT for program in programs for op in program)
