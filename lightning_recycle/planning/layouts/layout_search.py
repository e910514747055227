"""Search for the best layout after failures: layers and workers of each stage.

Concept: after a failure there are four ways to go on, of which each needs more state to be sent than the one before:

- ``reroute``: nothing moves; the peers of the dead run their micro-batches;
- ``workers``: workers change their stage (failure normalization);
- ``layers``: stages that lost workers give layers to their neighbours;
- ``both``.

Cuts and replicas are found exactly (:mod:`~lightning_recycle.planning.layouts.cuts`), by the load of the slowest stage.
A load is only a bound, so of each way a few layouts, those with the least lower bounds, are planned, and the period of
the real schedule decides. Whether a layout is worth a change: see
:mod:`~lightning_recycle.planning.layouts.layout_candidates`.

Contract: pure, deterministic. ``plan_layout`` never returns a layout that is worse than re-routing by its own figures;
a way that cannot be gone is refused in one line, never with an exception, as long as re-routing has a plan.

Must not know: how state is copied, who decides when, torch.

Units: seconds, bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from lightning_recycle.errors import ConfigurationError, PlanningError
from lightning_recycle.planning.bounds import lower_bound
from lightning_recycle.planning.compact_schedule import COMPACT_FROM, worth_compacting
from lightning_recycle.planning.grid import Grid, Worker
from lightning_recycle.planning.layouts.cuts import (
    Cut,
    SharedStages,
    Stages,
    cheapest,
    fastest,
    fastest_shared,
    shares,
    smooth_counts,
)
from lightning_recycle.planning.layouts.fractional_cuts import Bounds, are_whole, held_ranges
from lightning_recycle.planning.layouts.layer_costs import LayerCosts, Traffic, check_cuts, layer_moves, traffic
from lightning_recycle.planning.layouts.layout_candidates import (
    Candidate,
    Changing,
    Judge,
    Judgement,
    Layout,
    LayoutPlan,
    Way,
    chosen_of,
    is_better,
    judged,
    shown,
    weighed,
)
from lightning_recycle.planning.normalization import (
    distribution_of,
    normalize,
    normalized_failures,
    roles,
)
from lightning_recycle.planning.problem import Problem
from lightning_recycle.planning.timing import Turns

__all__ = ["next_losses", "plan_layout"]

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
    changing: Changing | None = None,
    fixed: str = "",
    whole: str = "",
    ways: Collection[Way] = ("workers", "layers", "both"),
    judge: Judge = judged,
) -> LayoutPlan:
    """The best layout for the workers that are left.

    Args:
        problem: grid, failed (vacant) and slow workers, technique, and limit in flight. Its costs and memory are not
            used: those of a layout follow from ``layers``.
        layers: what single layers cost.
        cuts: bounds of the stages now.
        next_change: seconds expected until the next change, e.g. of
            :meth:`~lightning_recycle.planning.layouts.layout_candidates.FailureRecord.next_change`.
        changing: what a change costs besides its copies.
        fixed: why layers cannot move, e.g. "layer 3 has no LayerSpec"; empty if they can.
        whole: why neighbouring stages cannot share a layer; empty if they can.
        ways: what to consider besides re-routing.
        judge: plans a problem; by default the heuristic, on large grids by lanes.

    Raises:
        ConfigurationError: when the cuts are none of these layers.
        PlanningError: when there is no plan that moves nothing.
    """
    changing = changing or Changing()
    search = _Search(problem, layers, check_cuts(cuts, layers.layers), changing, next_change, judge, not whole)
    first = search.reroute()
    found = [first]
    makers: dict[Way, Callable[[], Candidate]] = {
        "workers": search.workers,
        "layers": lambda: search.cut("layers", fixed),
        "both": lambda: search.cut("both", fixed),
    }
    for way, make in makers.items():
        if way in ways:
            try:
                found.append(search.weighed(make()))
            except PlanningError as error:
                found.append(search.refused(way, str(error)))
    return LayoutPlan(chosen_of(found), tuple(found), next_change)


class _Search:
    """The candidates of one call."""

    def __init__(
        self,
        problem: Problem,
        layers: LayerCosts,
        cuts: Bounds,
        changing: Changing,
        next_change: float,
        judge: Judge,
        shares_layers: bool,
    ) -> None:
        self.problem, self.layers, self.cuts, self.shares_layers = problem, layers, cuts, shares_layers
        self.changing, self.next_change, self.judge = changing, next_change, judge
        self.grid, self.live = problem.grid, problem.live_counts()
        self.decoupled = problem.technique.decoupled
        self.first: Candidate | None = None  # re-routing
        if len(cuts) != self.grid.stages + 1:
            raise ConfigurationError(f"cuts={cuts!r}: the grid {self.grid} has {self.grid.stages} stages.")

    # -- candidates -----------------------------------------------------------------------------------------------

    def reroute(self) -> Candidate:
        """Nothing moves."""
        problem = self.at(self.cuts, self.problem.failed)
        judgement = self.judged(self.cuts, problem)
        layout = Layout(self.cuts, self.live)
        self.first = Candidate(
            "reroute",
            layout,
            problem.failed,
            judgement.period,
            lower_bound(problem),
            judgement=judgement,
            problem=problem,
        )
        return self.first

    def workers(self) -> Candidate:
        """Failure normalization: the cuts stay."""
        failures = len(self.problem.failed)
        if not failures:
            return self.refused("workers", "no worker has failed")
        if self.problem.worker_factors:
            return self.refused("workers", "workers of unequal speed keep their stages")
        costs, memory = self.layers.costs(self.cuts, decoupled=self.decoupled), self.layers.memory(self.cuts)
        small = 3 * self.grid.global_microbatches * self.grid.stages <= 20_000
        goal = normalize(
            self.grid,
            costs,
            failures,
            technique=self.problem.technique,
            in_flight_limit=self.problem.in_flight_limit,
            memory=memory,
            period=(
                lambda spread: self.judged(self.cuts, self.at(self.cuts, normalized_failures(self.grid, spread))).period
            )
            if small
            else None,
        )
        if goal == distribution_of(self.grid, self.problem.failed):
            return self.refused("workers", "the failures are where they cost least")
        assert self.first is not None
        bound = lower_bound(self.at(self.cuts, self.failed(goal), goal))
        if bound >= self.first.period * (1 - self.changing.least_gain):
            return self.refused("workers", f"no other stages carry them better: {_at_least(bound, self.first)}")
        return self.candidate("workers", self.cuts, goal)

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
            stages = self.stages(way, spare)
            best = fastest(stages)
            if best is None:
                if spare == _HARD and not rivals:
                    return self.refused(way, "no cut leaves room for one micro-batch on a worker of every stage")
                continue
            for cut in (best, *self.near(stages, best)):
                goal = self.live if way == "layers" else self.spread(stages, cut)
                if cut.cuts != self.cuts or (way == "both" and goal != self.live):
                    rivals[cut.cuts, self.without(goal)] = None
            goals = [self.live] if way == "layers" else [self.live, self.spread(stages, best), *self.smooth]
            for cuts, goal in self.shared(goals, spare) if self.shares_layers else ():
                if cuts != self.cuts or goal != self.live:
                    rivals[cuts, self.without(goal)] = None
        if not rivals and self.layers.memory_limit is not None:
            free = fastest(self.stages(way, None))
            if free is not None and free.cuts != self.cuts:
                return self.refused(way, "no faster cut leaves room for one micro-batch on a worker of every stage")
        return self.best(way, list(rivals))

    def near(self, stages: Stages, best: Cut) -> Iterator[Cut]:
        """Cuts that move the fewest bytes, or are the most even, within a little more than the least bottleneck."""
        for slack in _SLACKS:
            for cost in (self.moved, self.squares):
                found = cheapest(stages, best.bottleneck * (1 + slack), lambda *range, cost=cost: cost(stages, *range))
                if found is not None:
                    yield found

    @cached_property
    def smooth(self) -> tuple[tuple[int, ...], ...]:
        """Numbers of workers that suit stages that share layers."""
        table = shares(self.grid.global_microbatches, (1.0,) * self.grid.pipelines)
        return smooth_counts(table, self.grid.stages, sum(self.live))

    def shared(self, goals: Sequence[tuple[int, ...]], spare: float) -> Iterator[tuple[Bounds, tuple[int, ...]]]:
        """Cuts in which stages share layers, for these numbers of workers in the stages."""
        layers, total = self.layers, self.grid.global_microbatches
        for goal in dict.fromkeys(goals):
            if goal == self.live:
                factors = [sorted(self.problem.live_factors(stage), reverse=True) for stage in range(self.grid.stages)]
            else:
                factors = [[1.0] * count for count in goal]
            stages = SharedStages(
                layers.work(decoupled=self.decoupled),
                layers.reduce,
                layers.optimizer,
                layers.overhead * (3 if self.decoupled else 2),
                [shares(total, each)[len(each)] for each in factors],
                self.fits(spare),
            )
            found = fastest_shared(stages, _SHARED_SLACK)
            if found is not None:
                yield found[0], goal

    def best(self, way: Way, rivals: list[tuple[Bounds, tuple[int, ...]]]) -> Candidate:
        """The one that saves most, of the few with the least bounds."""
        assert self.first is not None
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
        goal = self.first.period * (1 - self.changing.least_gain)
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
                found = self.weighed(self.candidate(way, cuts, distribution))
            except PlanningError as error:
                refused = str(error)
                continue
            if best is None or is_better(found, best, _SHARING_GAIN * self.changing.least_gain):
                best = found
        return self.refused(way, refused) if best is None else best

    def judged(self, cuts: Bounds, problem: Problem) -> Judgement:
        """A step of ``problem``, which has the mean costs of micro-batches under these cuts."""
        return self.judge(problem, self.turns(cuts))

    def turns(self, cuts: Bounds) -> Turns | None:
        """Differences between micro-batches under these cuts."""
        return self.layers.turns(cuts, self.grid, decoupled=self.decoupled)

    def bound(self, cuts: Bounds, problem: Problem) -> float:
        """A step is no shorter: where stages share layers, than the work of all micro-batches over the workers. For
        plans whose operations are not listed, those of the mean micro-batch.
        """
        turns = self.turns(cuts)
        if turns is None or worth_compacting(problem, COMPACT_FROM):
            return lower_bound(problem)
        costs, loads = problem.costs, [0.0]
        parts = zip(
            (costs.forward, costs.backward_input, costs.backward_weight),
            (turns.forward, turns.backward_input, turns.backward_weight),
            strict=True,
        )
        ratios = [(usual, [sum(column) for column in zip(*each, strict=True)]) for usual, each in parts]
        for stage in range(self.grid.stages):
            work = sum(usual[stage] * total[stage] for usual, total in ratios)
            loads.append(work / sum(1 / factor for factor in problem.live_factors(stage)))
        return max(loads)

    def candidate(self, way: Way, cuts: Bounds, distribution: tuple[int, ...]) -> Candidate:
        """A layout with its plan, and what has to be sent for it."""
        taken = self.roles(distribution)
        problem = self.at(cuts, self.failed(distribution), distribution)
        judgement = self.judged(cuts, problem)
        bound = self.bound(cuts, problem)
        state = self.layers.state_bytes
        sent = traffic(layer_moves(self.grid, self.problem.failed, self.cuts, cuts, taken, state), state)
        return Candidate(
            way,
            Layout(cuts, self.without(distribution)),
            problem.failed,
            judgement.period,
            bound,
            tuple(sorted((worker, place) for worker, place in taken.items() if worker != place)),
            sent.total,
            sent.busiest,
            self.stall(sent, judgement),
            judgement=judgement,
            problem=problem,
        )

    def refused(self, way: Way, reason: str) -> Candidate:
        """A way that is not gone."""
        return Candidate(way, Layout(self.cuts, self.live), self.problem.failed, 0.0, refused=reason)

    def weighed(self, candidate: Candidate) -> Candidate:
        """The candidate with what it saves; refused if that is nothing."""
        assert self.first is not None
        if candidate.refused:
            return candidate
        risk = self.changing.risk(candidate.layout.workers) - self.changing.risk(self.live)
        return weighed(replace(candidate, risk=risk), self.first, self.next_change, self.changing.least_gain)

    # -- what they are made of -------------------------------------------------------------------------------------

    def at(self, cuts: Bounds, failed: frozenset[Worker], distribution: tuple[int, ...] | None = None) -> Problem:
        """The problem under a layout; its costs are the mean of all micro-batches."""
        factors = dict(self.problem.worker_factors)
        if factors and distribution is not None and distribution != distribution_of(self.grid, self.problem.failed):
            taken = self.roles(distribution)
            factors = {taken.get(worker, worker): factor for worker, factor in factors.items()}
        return replace(
            self.problem,
            costs=self.layers.costs(cuts, decoupled=self.decoupled),
            failed=failed,
            memory=self.layers.memory(cuts),
            worker_factors=tuple(factors.items()),
        )

    def without(self, counts: Sequence[int]) -> tuple[int, ...]:
        """The failures of each stage by its live workers, or the other way round."""
        return tuple(self.grid.pipelines - count for count in counts)

    def failed(self, distribution: tuple[int, ...]) -> frozenset[Worker]:
        """The vacant positions; those of now if each stage keeps its workers."""
        if distribution == distribution_of(self.grid, self.problem.failed):
            return self.problem.failed
        return normalized_failures(self.grid, distribution)

    def roles(self, distribution: tuple[int, ...]) -> Mapping[Worker, Worker]:
        """The positions of the live workers; empty if all stay."""
        if distribution == distribution_of(self.grid, self.problem.failed):
            return {}
        return roles(self.grid, self.problem.failed, distribution)

    def stages(self, way: Way, spare: float | None) -> Stages:
        """Possible stages; each has memory for ``spare`` times the micro-batches that 1F1B holds there, and for
        one. None: memory does not count.
        """
        total = self.grid.global_microbatches
        if way == "layers":
            options = []
            for stage, live in enumerate(self.live):
                factors = sorted(self.problem.live_factors(stage), reverse=True)
                options.append([(live, shares(total, factors)[live])])
        else:
            table = shares(total, (1.0,) * self.grid.pipelines)
            options = [[(count, table[count]) for count in range(1, self.grid.pipelines + 1)]] * self.grid.stages
        layers = self.layers
        once = tuple(map(sum, zip(layers.reduce, layers.optimizer, strict=True)))
        overhead = layers.overhead * (3 if self.decoupled else 2)
        fits = None if spare is None else self.fits(spare)
        return Stages(layers.work(decoupled=self.decoupled), once, options, sum(self.live), fits, overhead)

    def fits(self, spare: float) -> Callable[[int, float, float], bool] | None:
        """Whether the layers between two bounds fit into a worker of a stage, with some micro-batches."""
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

    def spread(self, stages: Stages, cut: Cut) -> tuple[int, ...]:
        """Workers of each stage: all live ones, at least those needed, and as many as possible stay where they are."""
        counts = [max(need, live) for need, live in zip(cut.needs, self.live, strict=True)]
        for _ in range(sum(counts) - sum(self.live)):
            givers = [stage for stage, need in enumerate(cut.needs) if counts[stage] > need]
            # The stage whose load stays least gives one.
            giver = min(
                givers, key=lambda s: (stages.load(s, cut.cuts[s], cut.cuts[s + 1], counts[s] - 1), counts[s], s)
            )
            counts[giver] -= 1
        return tuple(counts)

    def moved(self, stages: Stages, stage: int, begin: int, end: int, workers: int) -> float:
        """Bytes that the workers of a stage get for these layers."""
        state, held = self.layers.state_bytes, held_ranges(self.cuts)[stage]
        whole = sum(state[begin:end])
        kept = sum(state[layer] for layer in range(begin, end) if layer in held)
        return self.live[stage] * (whole - kept) + max(0, workers - self.live[stage]) * whole

    def squares(self, stages: Stages, stage: int, begin: int, end: int, workers: int) -> float:
        """The square of the load: the sum over the stages is least where they are even."""
        return stages.load(stage, begin, end, workers) ** 2

    def stall(self, sent: Traffic, judgement: Judgement) -> float:
        """Seconds that training stands still for the change."""
        copying = sent.seconds(self.layers.bandwidth, self.layers.latency)
        return copying if self.changing.stopped else self.changing.switch + judgement.fill + copying


_HARD = 0.0


def _spares(grid: Grid) -> tuple[float, ...]:
    """Room for micro-batches that a cut leaves, relative to 1F1B: the least room has the least load."""
    return (_HARD, 1.0, 1.5, 2.0) if grid.stages > 1 else (_HARD,)


def _at_least(bound: float, first: Candidate) -> str:
    return f"at least {shown(bound)} a step, re-routing takes {shown(first.period)}"


def next_losses(problem: Problem) -> Iterator[Worker]:
    """For each stage with at least two live workers, one that stands for all that may fail next."""
    slow = dict(problem.worker_factors)
    for stage in range(problem.grid.stages):
        live = problem.live_workers(stage)
        if len(live) > 1:
            yield next((worker for worker in live if worker not in slow), live[0])
