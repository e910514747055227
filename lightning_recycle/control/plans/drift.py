"""Drift: do operations still take the plan's times, would another plan pay? Pure.

Reported operation times are the product of two estimates, each by medians over a window of steps:

- the *level* of a stage, by kind of operation, which moves with all peers alike, such as by long sequences;
- a worker's *factor* relative to its peers in the same step; 1 where noise could explain it.

When the estimate differs from the plan's by more than noise, and not by one factor for all operations (which changes no
plan), another window is measured. A difference that stays starts a search for a better plan in the background
(:meth:`DriftQuestion.answer`), which is taken if it saves ``threshold`` of a step, and within ``horizon_steps`` more
than its search and switch cost. From then on, also after a refusal, that estimate is the reference: no question is
asked twice. A worker without operations is not measured: after ``horizon_steps`` a plan is looked for in which it
counts as recovered.

Must not know: messages, processes; how plans are made.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any, TypeAlias

from lightning_recycle.arguments import Check, OptionGroup, integer, is_number, option
from lightning_recycle.planning.costs import Costs
from lightning_recycle.planning.grid import Worker
from lightning_recycle.planning.planner import Planner, plan
from lightning_recycle.planning.problem import Problem, lower_bound
from lightning_recycle.planning.schedule import Schedule
from lightning_recycle.planning.timing import retime

_SIGNIFICANCE = 4.0  # standard errors of a median; there are many workers and many windows
_SWAP_SECONDS = 0.1  # for switching to another plan, generously: a message to all and back
# Those that a plan has costs for. R is not among them: it gets the time of F, which its worker measures, too.
_KINDS = ("F", "B", "W", "BW")

_Frame: TypeAlias = dict[Worker, dict[str, float]]
"""Measurements of all workers in one step: logarithms of the seconds of F, B, W and BW, seconds of REDUCE and STEP."""

_Estimated: TypeAlias = Worker | tuple[int, str]
"""A worker, whose factor is estimated; or a stage and a kind of operation, whose level is."""


_SHARE_OF_STEP = Check(
    lambda value: is_number(value, 0, above=True) and value < 1,
    "give the fraction of a step that a change must save, e.g. 0.05",
)


@dataclass(frozen=True)
class DriftOptions(OptionGroup):
    """Thresholds above which a better plan replaces the one that runs.

    ``threshold``: the fraction of a step's time that it must save. ``window``: steps measured before a conclusion.
    ``horizon_steps``: steps within which the change must pay.
    """

    threshold: float = option(0.05, _SHARE_OF_STEP, shared="part of a step that another plan must save")
    window: int = option(20, integer(3), shared="steps that are measured before anything is concluded")
    horizon_steps: int = option(1000, integer(1), shared="steps within which the change must pay")

    _owner = "PlanMonitor"  # whose arguments they are


@dataclass(frozen=True, slots=True)
class Estimate:
    """Times of operations: ``costs`` in seconds and ``factors``, as in ``Problem``.

    ``doubt``: how far noise may have moved it, as logarithms: a worker's factor, a stage's level by operation kind.
    """

    costs: Costs
    factors: tuple[tuple[Worker, float], ...] = ()
    doubt: Mapping[_Estimated, float] = field(default_factory=dict, compare=False)

    def of(self, problem: Problem) -> Problem:
        return replace(problem, costs=self.costs, worker_factors=self.factors)


@dataclass(frozen=True, slots=True)
class Proposal:
    """Answer to a question: the best plan found; None if none can be good enough.

    ``before``: the period of the old plan with the estimated times, ``seconds``: of the search; both in seconds.
    """

    schedule: Schedule | None
    before: float
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class DriftQuestion:
    """Question whether ``planner`` finds a better plan for the times of ``estimate``.

    ``schedule``: the current plan. ``step_seconds``: the measured time of a step. ``threshold``: as in
    :class:`DriftOptions`.
    """

    schedule: Schedule
    estimate: Estimate
    step_seconds: float
    threshold: float
    planner: Planner

    def answer(self) -> Proposal:
        """The proposal, if the lower bound allows a gain; PlanningError without a plan."""
        started = time.monotonic()
        problem = self.estimate.of(self.schedule.problem)
        before = retime(self.schedule, self.estimate.costs, self.estimate.factors).period
        if before - lower_bound(problem) < self.threshold * max(before, self.step_seconds):
            return Proposal(None, before, time.monotonic() - started)
        found = plan(problem, self.planner)
        return Proposal(found, before, time.monotonic() - started)


class DriftMonitor:
    """Monitor of a run's plan against measured times.

    Use: :meth:`begin` with every new plan, :meth:`observe` what workers measured, :meth:`stepped` after every step;
    then :meth:`question`, and :meth:`accepts` its answer.
    """

    def __init__(self, options: DriftOptions, planner: Planner) -> None:
        self._options, self._planner = options, planner
        self._communication = 0.0
        self._schedule: Schedule | None = None
        self._first_step = 0
        self._assumed_estimate: Estimate | None = None  # differences are measured against it
        self._suspicious = False  # the previous window differed
        self._question: DriftQuestion | None = None
        self._steps = 0
        self._incomplete: dict[int, _Frame] = {}  # by step
        self._window: deque[_Frame] = deque(maxlen=options.window)
        self._step_seconds: deque[float] = deque(maxlen=options.window)

    def begin(self, schedule: Schedule, first_step: int, communication: float = 0.0) -> None:
        """The workers run ``schedule`` from ``first_step`` on.

        ``communication``: seconds of a message.
        """
        problem = schedule.problem
        self._schedule, self._first_step, self._communication = schedule, first_step, communication
        assumed = Estimate(problem.costs, problem.worker_factors)
        if assumed != self._assumed_estimate:  # else it was estimated here, and its doubt is known
            self._assumed_estimate = assumed
        self._steps = 0
        self._forget()

    def _forget(self) -> None:
        self._question, self._suspicious = None, False
        self._measure_anew()

    def _measure_anew(self) -> None:
        self._incomplete = {}
        self._window.clear()
        self._step_seconds.clear()

    def observe(self, worker: Worker, step: int, seconds: Mapping[str, float]) -> None:
        """The operations of ``worker`` took ``seconds`` on average in ``step``, by kind."""
        if self._schedule is None or step < self._first_step:
            return
        frame = self._incomplete.setdefault(step, {})
        measured = {kind: math.log(seconds[kind]) for kind in _KINDS if seconds.get(kind, 0.0) > 0.0}
        frame[worker] = {**measured, **{kind: seconds[kind] for kind in ("REDUCE", "STEP") if kind in seconds}}
        if frame.keys() >= self._schedule.workers.keys():
            self._window.append(frame)
            self._incomplete = {later: found for later, found in self._incomplete.items() if later > step}

    def stepped(self, seconds: float | None) -> None:
        """All have applied another step, ``seconds`` after the previous one."""
        self._steps += 1
        if seconds is not None:
            self._step_seconds.append(seconds)

    # ------------------------------------------------------------------ asking and deciding

    def question(self) -> DriftQuestion | None:
        """The question to ask now, if any; its answer goes to :meth:`accepts`."""
        full = len(self._window) == len(self._step_seconds) == self._options.window
        if self._schedule is None or self._assumed_estimate is None or self._question is not None or not full:
            return None
        if self._steps % max(1, self._options.window // 4):
            return None
        estimate = self._estimate(self._schedule, self._assumed_estimate)
        if not self._differs(estimate, self._assumed_estimate):
            self._suspicious = False
        elif not self._suspicious:
            self._suspicious = True
            self._measure_anew()
        else:
            seconds = median(self._step_seconds)
            self._question = DriftQuestion(self._schedule, estimate, seconds, self._options.threshold, self._planner)
        return self._question

    def accepts(self, question: DriftQuestion, proposal: Proposal | None) -> float | None:
        """Fraction of a step that the proposal saves; None if refused or missing."""
        if question is not self._question:
            return None  # the plan has changed since
        self._forget()
        self._assumed_estimate = question.estimate
        if proposal is None or proposal.schedule is None:
            return None
        saved = proposal.before - proposal.schedule.period
        gain = saved / max(proposal.before, question.step_seconds)
        pays = saved * self._options.horizon_steps > proposal.seconds + _SWAP_SECONDS
        return gain if gain >= self._options.threshold and pays else None

    def _differs(self, estimate: Estimate, assumed: Estimate) -> bool:
        """Whether operations no longer take the assumed times relative to each other."""
        assert self._schedule is not None

        def least(name: _Estimated) -> float:
            noise = math.hypot(estimate.doubt.get(name, 0.0), assumed.doubt.get(name, 0.0))
            return max(math.log1p(self._options.threshold), noise)

        new, old = dict(estimate.factors), dict(assumed.factors)
        for worker in self._schedule.problem.live_workers():
            change = abs(math.log(new.get(worker, 1.0) / old.get(worker, 1.0)))
            if change > least(worker):
                return True
        changes = {}
        for stage in range(assumed.costs.stages):
            before = _by_kind(assumed.costs, stage)
            for kind, seconds in _by_kind(estimate.costs, stage).items():
                if seconds > 0 and before[kind] > 0:
                    changes[stage, kind] = math.log(seconds / before[kind])
        usual = median(changes.values()) if changes else 0.0
        return any(abs(change - usual) > least(name) for name, change in changes.items())

    # ------------------------------------------------------------------ estimating

    def _estimate(self, schedule: Schedule, assumed: Estimate) -> Estimate:
        """Costs of the stages and factors of slow workers, by the steps in the window.

        ``assumed``: costs of the kinds of operations that nothing has measured.
        """
        problem = schedule.problem
        planned = dict(problem.worker_factors)
        recovered = self._steps >= self._options.horizon_steps
        doubt: dict[_Estimated, float] = {}
        factors: dict[Worker, float] = {}
        stages = [problem.live_workers(stage) for stage in range(problem.grid.stages)]
        for workers in stages:
            relative = self._relative(workers, doubt)
            for worker in workers:
                if worker in relative:
                    factors[worker] = math.exp(relative[worker])
                elif worker in planned and not recovered:
                    factors[worker] = planned[worker]  # a worker that has nothing to do is not measured
        levels = self._levels(stages, factors, doubt)
        costs = []
        for stage, workers in enumerate(stages):
            usual, backward, weight = _by_kind(assumed.costs, stage).values()
            share = backward / (backward + weight) if backward + weight else 0.5
            fused = levels.get((stage, "BW"), backward + weight)
            costs.append(
                (
                    levels.get((stage, "F"), usual),
                    levels.get((stage, "B"), share * fused),
                    levels.get((stage, "W"), (1 - share) * fused),
                    min(self._all("REDUCE", workers), default=0.0),  # the rest is waiting
                    median(self._all("STEP", workers) or [0.0]),
                )
            )
        slow = tuple(sorted((worker, factor) for worker, factor in factors.items() if factor != 1.0))
        forward, inputs, weights, reduce, step = zip(*costs, strict=True)
        return Estimate(Costs(forward, inputs, weights, reduce, step, self._communication), slow, doubt)

    def _all(self, kind: str, workers: Iterable[Worker]) -> list[float]:
        return [frame[worker][kind] for frame in self._window for worker in workers if kind in frame[worker]]

    def _relative(self, workers: Sequence[Worker], doubt: dict[_Estimated, float]) -> dict[Worker, float]:
        """Logarithms of workers' factors relative to peers; exactly 0 within noise."""
        series: dict[Worker, list[float]] = {worker: [] for worker in workers}
        measured = set()
        for frame in self._window:
            common = {}
            for kind in _KINDS:
                known = [frame[worker][kind] for worker in workers if kind in frame[worker]]
                if len(known) > 1:  # a kind that only one worker has says nothing about it
                    common[kind] = sum(known) / len(known)
            for worker in workers:
                times = frame[worker]
                if not times.keys().isdisjoint(_KINDS):
                    measured.add(worker)
                beside = [times[kind] - level for kind, level in common.items() if kind in times]
                if beside:
                    series[worker].append(sum(beside) / len(beside))
        medians = {worker: median(values) for worker, values in series.items() if values}
        doubt.update(_median_error({worker: series[worker] for worker in medians}, 2**0.5))
        usual = sorted(medians.values())[(len(medians) - 1) // 2] if medians else 0.0
        relative = dict.fromkeys(sorted(measured), 0.0)
        for worker, value in medians.items():
            if abs(value - usual) > max(math.log1p(self._options.threshold), doubt[worker]):
                relative[worker] = value - usual
        return relative

    def _levels(
        self,
        stages: Sequence[Sequence[Worker]],
        factors: Mapping[Worker, float],
        doubt: dict[_Estimated, float],
    ) -> dict[tuple[int, str], float]:
        """Seconds of each kind of operation of a stage on a worker of factor 1."""
        frames: list[dict[tuple[int, str], float]] = []
        log_factors = {worker: math.log(factor) for worker, factor in factors.items()}
        for frame in self._window:
            levels: dict[tuple[int, str], float] = {}
            for stage, workers in enumerate(stages):
                for kind in _KINDS:
                    logs = [frame[worker][kind] - log_factors[worker] for worker in workers if kind in frame[worker]]
                    if logs:
                        levels[stage, kind] = sum(logs) / len(logs)
            frames.append(levels)
        # What moves all levels of a step alike casts no doubt on one of them relative to the others.
        always = {name for name in frames[0] if all(name in frame for frame in frames)}
        common = [fmean(frame[name] for name in always) if always else 0.0 for frame in frames]
        series = {
            name: [frame[name] - shift for frame, shift in zip(frames, common, strict=True) if name in frame]
            for name in sorted({name for frame in frames for name in frame})
        }
        noise = _median_error(series)
        doubt.update(noise)
        for stage in range(len(stages)):  # where every backward is fused, B and W follow from BW
            for kind in ("B", "W"):
                if (stage, kind) not in noise and (stage, "BW") in noise:
                    doubt[stage, kind] = noise[stage, "BW"]
        return {name: math.exp(median(values) + median(common)) for name, values in series.items()}


def _by_kind(costs: Costs, stage: int) -> dict[str, float]:
    return {"F": costs.forward[stage], "B": costs.backward_input[stage], "W": costs.backward_weight[stage]}


def _median_error(series: Mapping[Any, list[float]], times: float = 1.0) -> dict[Any, float]:
    """Error of each median, multiplied by ``times`` (to compare two medians)."""
    errors = {}
    for name, values in series.items():
        middle = median(values)
        deviation = 1.4826 * median(abs(value - middle) for value in values)
        errors[name] = times * _SIGNIFICANCE * 1.2533 * deviation / math.sqrt(len(values))
    # One series is too short to show how noisy it is; all of them together are not.
    usual = fmean(errors.values()) if errors else 0.0
    return {name: max(error, usual) for name, error in errors.items()}
