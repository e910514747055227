"""Measurements of a run's workers, and the assumptions of its plans.

*Measurements*: plans are made for the operation times of the first worker of each stage that applies a step. Layouts
are chosen by the *level* of a stage, the median over workers and steps, which may be wrong by four standard errors of a
median: on a busy machine equally slow stages seem to differ by as much.

*Assumptions*: all of a :class:`~lightning_recycle.planning.problem.Problem` but the failed workers. Costs come from a
profile, else from the run's measurements; after a plan for other times (:mod:`~lightning_recycle.control.plans.drift`)
from that plan. Memory is at first that of fault-free 1F1B in micro-batches, then measured bytes.

Contract: used in the coordinator's thread. Values of assumptions are replaced, never changed in place, so another
thread can read a :meth:`Assumptions.snapshot`.

Must not know: clocks, which plans are made, how and when.
"""

from __future__ import annotations

import copy
import logging
import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from statistics import median, stdev
from typing import TypeAlias

from lightning_recycle.control.protocol.messages import Applied, Profiled
from lightning_recycle.errors import PlanningError
from lightning_recycle.planning.costs import Costs, Footprint, Memory, Profile, memory_of
from lightning_recycle.planning.failure_distribution import usual_limit
from lightning_recycle.planning.grid import Grid, OpKind, Worker
from lightning_recycle.planning.heuristic_planner import HeuristicPlanner, VariedPlanner
from lightning_recycle.planning.planner import Planner, PlanningOptions
from lightning_recycle.planning.problem import Problem
from lightning_recycle.planning.schedule import Schedule
from lightning_recycle.planning.split_backward import SplitCosts, SplitTrial
from lightning_recycle.planning.timing import MicrobatchVariation, retime

OperationSeconds: TypeAlias = Mapping[int, Mapping[str, float]]
"""Mean seconds of each kind of operation, by stage and name; empty before the first step."""

_Factors: TypeAlias = tuple[tuple[Worker, float], ...]

log = logging.getLogger(__name__)


def costs_from(seconds: OperationSeconds, stages: int) -> Costs:
    """Costs in seconds from measured operations; slots while a stage lacks some.

    A fused backward (BW) counts as half B, half W.
    """
    needed = ({"F", "B", "W"}, {"F", "BW"})
    if any(not any(names <= seconds.get(stage, {}).keys() for names in needed) for stage in range(stages)):
        return Costs.uniform(stages)

    def of(name: str, fused_share: float = 0.0) -> tuple[float, ...]:
        return tuple(seconds[s].get(name, fused_share * seconds[s].get("BW", 0.0)) for s in range(stages))

    return Costs(of("F"), of("B", 0.5), of("W", 0.5), of("REDUCE"), of("STEP"))


# ---------------------------------------------------------------------- measurements

_SIGNIFICANCE = 4.0  # standard errors
_MEDIAN_ERROR_FACTOR = 1.2533  # times the standard error of a mean
_KINDS = ("F", "B", "W", "BW")
_WARM_UP_STEPS = 2
_LEAST = 4  # measurements from which a deviation says something
_MOST_MEASUREMENTS = 200  # measurements of a stage


class StageLevels:
    """Seconds by kind of operation, of each stage."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, str], deque[float]] = {}
        self._sums: dict[int, deque[float]] = {}  # logarithms of what a micro-batch takes altogether

    def observe(self, stage: int, seconds: Mapping[str, float]) -> None:
        """Adds a step's mean ``seconds`` by kind of operation, of a worker of ``stage``."""
        known = {kind: seconds[kind] for kind in _KINDS if seconds.get(kind, 0.0) > 0.0}
        backward = known.get("BW", known.get("B", 0.0) + known.get("W", 0.0))
        if "F" not in known or not backward:  # it ran nothing of one kind in this step
            return
        for kind, value in known.items():
            self._seconds.setdefault((stage, kind), deque(maxlen=_MOST_MEASUREMENTS)).append(value)
        self._sums.setdefault(stage, deque(maxlen=_MOST_MEASUREMENTS)).append(math.log(known["F"] + backward))

    def forget(self) -> None:
        self._seconds, self._sums = {}, {}

    def of(self, stage: int) -> dict[str, float]:
        """Median seconds by kind of operation, as far as they are known."""
        return {kind: median(values) for (place, kind), values in self._seconds.items() if place == stage}

    def doubt(self, stages: int) -> float:
        """Relative error of the times of ``stages`` stages; infinity if unknown."""
        series = [self._sums.get(stage, ()) for stage in range(stages)]
        if any(len(values) < _LEAST for values in series):
            return math.inf
        return max(_SIGNIFICANCE * _MEDIAN_ERROR_FACTOR * stdev(values) / math.sqrt(len(values)) for values in series)


class Measurements:
    """The newest measurements of a run on ``grid``.

    Attributes:
        operation_seconds: mean seconds of each kind of operation, by stage and name.
        steps: steps that count, since the start of the run.
        profile: the profile of the model, once all stages have measured theirs.
        footprints: by worker, measured memory; ``trials``: of split backwards.
    """

    def __init__(self, grid: Grid) -> None:
        self.operation_seconds: dict[int, dict[str, float]] = {}
        self.levels = StageLevels()
        self.steps = 0
        self.profile: Profile | None = None
        self.footprints: dict[Worker, Footprint] = {}
        self.trials: dict[Worker, SplitTrial] = {}
        self._grid = grid
        self._profiles: dict[int, Profiled] = {}
        self._runs_fused = False  # all backwards that run are
        self._recomputed: tuple[Schedule | None, Mapping[int, int]] = None, {}  # R in a step, by stage

    def begin(self, schedule: Schedule) -> None:
        were_fused, self._runs_fused = self._runs_fused, not schedule.problem.technique.split_backward
        if self._runs_fused is not were_fused:
            self.levels.forget()

    def relaid(self, seconds: dict[int, dict[str, float]]) -> None:
        """The layout has changed: operations take ``seconds``, and other memory."""
        self.operation_seconds, self.footprints = seconds, {}
        self.levels.forget()

    def applied(self, worker: Worker, message: Applied, is_stage_leader: bool) -> None:
        """Takes in the times of a step; those of a stage leader count for its stage."""
        if is_stage_leader:
            self.took(worker.stage, message.operation_seconds)
        if self.steps >= _WARM_UP_STEPS:
            self.levels.observe(worker.stage, self._as_run(message.step_seconds))

    def took(self, stage: int, seconds: Mapping[str, float]) -> None:
        self.operation_seconds[stage] = self._as_run(seconds)

    def profiled(self, stage: int, message: Profiled) -> Profile | None:
        """A stage was profiled; the profile of the model if it was the last one."""
        self._profiles.setdefault(stage, message)
        if len(self._profiles) < self._grid.stages:
            return None
        reports = [report for _, report in sorted(self._profiles.items())]
        links = [report for report in reports if report.bandwidth]
        self.profile = Profile(
            stages=tuple(report.stage for report in reports),
            latency=max((link.latency for link in links), default=0.0),
            bandwidth=min((link.bandwidth for link in links), default=0.0),
            steps=min(report.steps for report in reports),
        )
        self._profiles = {}
        return self.profile

    @property
    def known_seconds(self) -> dict[int, dict[str, float]]:
        """Seconds of operations by stage, from all workers and steps where known."""
        return {stage: {**seconds, **self.levels.of(stage)} for stage, seconds in self.operation_seconds.items()}

    def computing_seconds(self, schedule: Schedule) -> tuple[float, float] | None:
        """Worker-seconds of F, B, W in a step, and of forwards run twice; None if unknown."""
        times = self.operation_seconds
        if len(times) < self._grid.stages:
            return None
        once = sum(
            t.get("F", 0.0) + (t["B"] + t["W"] if {"B", "W"} <= t.keys() else t.get("BW", 0.0)) for t in times.values()
        )
        again = 0.0
        if any("R" in t for t in times.values()):
            if self._recomputed[0] is not schedule:
                ops = (s.op for operations in schedule.workers.values() for s in operations)
                self._recomputed = schedule, Counter(op.stage for op in ops if op.kind is OpKind.RECOMPUTE)
            again = sum(count * times[stage].get("R", 0.0) for stage, count in self._recomputed[1].items())
        return once * self._grid.pipelines * self._grid.microbatches, again

    def _as_run(self, seconds: Mapping[str, float]) -> dict[str, float]:
        """``seconds`` without B and W of an earlier plan, where all that run are fused."""
        if not self._runs_fused or "BW" not in seconds:
            return dict(seconds)
        return {name: value for name, value in seconds.items() if name not in ("B", "W")}


# ---------------------------------------------------------------------- assumptions


class Assumptions:
    """The assumptions of a run on ``grid``.

    Args:
        costs: of the operations, in seconds; None to measure them (one slot each before anything is measured).
        chooses_split: whether plans split backwards only where trials show that it is faster, if ``planning`` leaves it
            open; else they split wherever they may.

    Attributes:
        costs: the given or adopted costs; None while measured ones count.
        splitting: the costs of splitting backwards, once they are tried and if that is a choice.
    """

    def __init__(self, grid: Grid, planning: PlanningOptions, costs: Costs | None, chooses_split: bool) -> None:
        self.costs = costs
        self.technique = planning.technique
        self.splitting: SplitCosts | None = None
        self._grid, self._planning = grid, planning
        self._chooses_split = chooses_split and planning.split_backward == "auto"
        self._costs_fused = False  # whether they are of fused backwards
        self._factors: _Factors = ()
        self._footprints: Mapping[Worker, Footprint] = {}
        self._predicted: Memory | None = None  # of another layout, until it is measured
        # How micro-batches differ, with split and with fused backwards.
        self._variation: tuple[MicrobatchVariation, MicrobatchVariation] | None = None
        self._refused: set[str] = set()  # why there is no plan within memory, as far as it was logged

    def snapshot(self) -> Assumptions:
        """A copy that later changes leave alone."""
        return copy.copy(self)

    # ------------------------------------------------------------------ changes

    def adopt(self, schedule: Schedule) -> None:
        """The times that ``schedule`` assumes count from now on."""
        problem = schedule.problem
        self.costs, self._factors = problem.costs, problem.worker_factors
        self._costs_fused = not problem.technique.split_backward

    def relaid(
        self,
        seconds: OperationSeconds,
        memory: Memory | None,
        variation: tuple[MicrobatchVariation, MicrobatchVariation] | None,
    ) -> None:
        """The layout has changed.

        ``memory``: predicted, until it is measured; None if unknown. ``variation``: how micro-batches differ where
        backwards may be split, and where they are fused; None if they do not.
        """
        self._variation, self._footprints, self._predicted = variation, {}, memory
        if self.costs is not None:
            self.costs = replace(costs_from(seconds, self._grid.stages), communication=self.costs.communication)

    def measured(self, footprints: Mapping[Worker, Footprint]) -> None:
        """These workers have measured their memory, at least one of each stage."""
        self._footprints = dict(footprints)

    def tried(self, trials: Mapping[Worker, SplitTrial]) -> None:
        """These workers have tried to split backwards, at least one of each stage."""
        if self._chooses_split:
            self.splitting = SplitCosts(self._grid, dict(trials))

    def forget(self, workers: Iterable[Worker]) -> None:
        """New processes hold the positions ``workers``: nothing is known of their speed."""
        gone = frozenset(workers)
        self._factors = tuple((worker, factor) for worker, factor in self._factors if worker not in gone)

    # ------------------------------------------------------------------ consequences

    @property
    def communication(self) -> float:
        """Seconds that a message between neighbouring stages takes, as far as known."""
        return self.costs.communication if self.costs is not None else 0.0

    def planner(self, planner: Planner) -> Planner:
        """``planner``, for micro-batches that differ if they do."""
        if self._variation is not None and isinstance(planner, HeuristicPlanner):
            return VariedPlanner(planner, *self._variation)
        return planner

    def retime(self, schedule: Schedule, seconds: OperationSeconds) -> Schedule:
        """``schedule`` with the times that follow from the measured operations."""
        if not seconds:
            return schedule
        problem, measured = schedule.problem, {}
        for stage, by_name in seconds.items():
            lead = min(problem.live_workers(stage))  # the worker that measured them
            factor = problem.factor(lead)
            measured[stage] = {name: value if name == "REDUCE" else value / factor for name, value in by_name.items()}
        return retime(schedule, replace(costs_from(measured, self._grid.stages), communication=self.communication))

    def problem(self, failed: frozenset[Worker], seconds: OperationSeconds) -> Problem:
        """The problem if ``failed`` have failed, and operations take ``seconds``."""
        stages = self._grid.stages
        problem = Problem(
            grid=self._grid,
            costs=self.costs or costs_from(seconds, stages),
            failed=failed,
            technique=self.technique,
            worker_factors=tuple((worker, factor) for worker, factor in self._factors if worker not in failed),
        )
        if self._chooses_split:
            problem = self._with_technique(problem, seconds)
        if (most := self._planning.in_flight_limit) is not None:
            return replace(problem, in_flight_limit=(most,) * stages)
        measured = bool(self._footprints) or self._predicted is not None
        limit = usual_limit(self._grid, failed, measured=measured)
        if not self._footprints:
            return replace(problem, in_flight_limit=limit, memory=self._predicted)
        try:
            recompute = self._planning.activation_checkpointing == "auto"
            memory = memory_of(self._grid, failed, self._footprints, self._planning.memory_limit, recompute=recompute)
            return replace(problem, in_flight_limit=limit, memory=memory)
        except PlanningError as error:
            if (reason := str(error)) not in self._refused:
                self._refused.add(reason)
                log.warning(
                    "No plan for the failure of %s fits into memory: %s Going on with one micro-batch at a time.",
                    names_of(failed),
                    reason,
                )
            return replace(problem, in_flight_limit=(1,) * stages)

    def _with_technique(self, problem: Problem, seconds: OperationSeconds) -> Problem:
        """``problem`` with fused backwards before the trial, else with split costs."""
        if self.splitting is None:
            return replace(problem, technique=replace(problem.technique, split_backward=False))
        fused = tuple({"B", "W"} > seconds.get(stage, {}).keys() & {"B", "W"} for stage in range(self._grid.stages))
        if self.costs is not None:
            fused = (self._costs_fused,) * self._grid.stages
        technique = replace(problem.technique, split_backward=True)
        return replace(problem, technique=technique, costs=self.splitting.of_split(problem.costs, fused))


def names_of(workers: Iterable[Worker]) -> str:
    """Workers in words."""
    return ", ".join(map(str, sorted(workers))) or "no worker"
