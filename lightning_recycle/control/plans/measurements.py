"""Measurements of the workers of one run: times of operations, memory, trials of split backwards.

Concept: the first worker of each stage that applies a step reports what its operations took; that is what plans are
made for. Whether another layout pays is decided by more: the median over workers and steps is the *level* of a stage.
It may be wrong by four standard errors of a median: on a machine that is busy with something else, stages that take
equally long seem to differ by as much.

Contract: pure; called from the coordinator's thread.

Must not know: clocks, how plans are made.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping
from statistics import median, stdev

from lightning_recycle.control.protocol.messages import Applied, Profiled
from lightning_recycle.planning.grid import Grid, OpKind, Worker
from lightning_recycle.planning.profile import Footprint, Profile
from lightning_recycle.planning.schedule import Schedule
from lightning_recycle.planning.splitting import SplitTrial

__all__ = ["Measurements", "StageLevels"]

_SIGNIFICANCE = 4.0  # standard errors
_OF_A_MEDIAN = 1.2533  # times the standard error of a mean
_KINDS = ("F", "B", "W", "BW")
_WARM_UP_STEPS = 2
_LEAST = 4  # measurements from which a deviation says something
_KEPT = 200  # measurements of a stage


class StageLevels:
    """Seconds by kind of operation, of each stage."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, str], deque[float]] = {}
        self._sums: dict[int, deque[float]] = {}  # logarithms of what a micro-batch takes altogether

    def observe(self, stage: int, seconds: Mapping[str, float]) -> None:
        """A worker of ``stage`` took ``seconds`` on average in a step, by kind of operation."""
        known = {kind: seconds[kind] for kind in _KINDS if seconds.get(kind, 0.0) > 0.0}
        backward = known.get("BW", known.get("B", 0.0) + known.get("W", 0.0))
        if "F" not in known or not backward:  # it ran nothing of one kind in this step
            return
        for kind, value in known.items():
            self._seconds.setdefault((stage, kind), deque(maxlen=_KEPT)).append(value)
        self._sums.setdefault(stage, deque(maxlen=_KEPT)).append(math.log(known["F"] + backward))

    def forget(self) -> None:
        """From now on operations are others."""
        self._seconds, self._sums = {}, {}

    def of(self, stage: int) -> dict[str, float]:
        """Median seconds by kind of operation, as far as they are known."""
        return {kind: median(values) for (place, kind), values in self._seconds.items() if place == stage}

    def doubt(self, stages: int) -> float:
        """By which fraction the time of one of ``stages`` stages may be another one relative to that of the others;
        infinity as long as too little is known.
        """
        series = [self._sums.get(stage, ()) for stage in range(stages)]
        if any(len(values) < _LEAST for values in series):
            return math.inf
        return max(_SIGNIFICANCE * _OF_A_MEDIAN * stdev(values) / math.sqrt(len(values)) for values in series)


class Measurements:
    """The newest measurements of a run on ``grid``.

    Attributes:
        operation_seconds: mean seconds of each kind of operation, by stage and name.
        levels: the levels of the stages.
        steps: steps that count, since the start of the run.
        profile: the profile of the model, once all stages have measured theirs.
        footprints: the memory of the workers that have measured it.
        trials: the trials of split backwards.
    """

    def __init__(self, grid: Grid) -> None:
        self.operation_seconds: dict[int, dict[str, float]] = {}
        self.levels = StageLevels()
        self.steps = 0
        self.profile: Profile | None = None
        self.footprints: dict[Worker, Footprint] = {}
        self.trials: dict[Worker, SplitTrial] = {}
        self._grid = grid
        self._profiled: dict[int, Profiled] = {}
        self._fused = False  # all backwards that run are
        self._recomputed: tuple[Schedule | None, Mapping[int, int]] = None, {}  # R in a step, by stage

    def begin(self, schedule: Schedule, *, other_technique: bool) -> None:
        """The workers run ``schedule`` from now on."""
        self._fused = not schedule.problem.technique.split_backward
        if other_technique:
            self.levels.forget()

    def relaid(self, seconds: dict[int, dict[str, float]]) -> None:
        """The layers lie in another way: operations take ``seconds``, and other memory."""
        self.operation_seconds, self.footprints = seconds, {}
        self.levels.forget()

    def applied(self, worker: Worker, message: Applied, leads: bool) -> None:
        """``worker`` has applied a step; ``leads``: its times are those of its stage."""
        if leads:
            self.took(worker.stage, message.operation_seconds)
        if self.steps >= _WARM_UP_STEPS:
            self.levels.observe(worker.stage, self._as_run(message.step_seconds))

    def took(self, stage: int, seconds: Mapping[str, float]) -> None:
        """The operations of ``stage`` take so many seconds."""
        self.operation_seconds[stage] = self._as_run(seconds)

    def profiled(self, stage: int, message: Profiled) -> Profile | None:
        """A stage was profiled; the profile of the model if it was the last one."""
        self._profiled.setdefault(stage, message)
        if len(self._profiled) < self._grid.stages:
            return None
        parts = [part for _, part in sorted(self._profiled.items())]
        links = [part for part in parts if part.bandwidth]
        self.profile = Profile(
            stages=tuple(part.stage for part in parts),
            latency=max((link.latency for link in links), default=0.0),
            bandwidth=min((link.bandwidth for link in links), default=0.0),
            steps=min(part.steps for part in parts),
        )
        self._profiled = {}
        return self.profile

    @property
    def link(self) -> tuple[float, float]:
        """Latency in seconds and bandwidth in bytes/s, 0 where nothing is measured."""
        return (0.0, 0.0) if self.profile is None else (self.profile.latency, self.profile.bandwidth)

    @property
    def known_seconds(self) -> dict[int, dict[str, float]]:
        """Seconds of operations in each stage, by all workers and steps where that is known."""
        return {stage: {**seconds, **self.levels.of(stage)} for stage, seconds in self.operation_seconds.items()}

    def computing_seconds(self, schedule: Schedule) -> tuple[float, float] | None:
        """Worker-seconds of F, B and W in a step of ``schedule``, and of forwards that run twice; None before all are
        measured.
        """
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
        """``seconds`` without those of B and W that are of an earlier plan, where all that run now are fused."""
        if not self._fused or "BW" not in seconds:
            return dict(seconds)
        return {name: value for name, value in seconds.items() if name not in ("B", "W")}
