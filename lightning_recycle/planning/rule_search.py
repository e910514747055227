"""The search for a good rule of list scheduling.

A hill climb finds up to which stage forwards go first (*split*: early stages feed the pipeline, late stages the
gradients), how many micro-batches the other stages have under way before they prefer backwards (*keep*), whether a
worker waits for a backward about to arrive (*patience*), and whether the first gradient and the last micro-batches wait
at any stage (*express*). Random changes of single stages and micro-batches follow, kept if not worse, by a seeded
generator, until the goal is met or the effort is spent.

*Memory descent*: an eager plan holds many times the micro-batches that its period needs, so it is searched again under
less and less memory (``Problem.measure``): first the tightest worker, by bisection over a fraction of every worker's
memory; then the sum, stage by stage from the one that holds most. It takes at most an eighth of the effort and makes
neither period nor makespan more than 0.1 % longer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from random import Random
from typing import NamedTuple

from lightning_recycle.errors import PlanningError
from lightning_recycle.planning.child_process import check_cancelled
from lightning_recycle.planning.costs import Costs
from lightning_recycle.planning.list_scheduling import NO_EXPRESS, Express, Rule, play_list_schedule
from lightning_recycle.planning.problem import Problem, lower_bound
from lightning_recycle.planning.schedule import EQUALLY_FAST
from lightning_recycle.planning.timing import BACKWARD, FORWARD, Codes, Timing, best_timing

_SEED = 1
# Instead of beginning a W, or an F or W. With F : B : W = 1 : 1.1 : 0.9, 0.25 and 1 are worse, any cost is far worse.
_PATIENCES = ((0.0, 0.0), (0.5, 0.5))
_EXPRESS_PATIENCE = (0.3, 0.7)  # the same where forwards are awaited too
# Of the micro-batches that a stage can send out until its first gradient comes back. 24 x 64 x 128 with 5 % failed and
# F : B : W = 1 : 1.1 : 0.9: 3.5 % above the lower bound instead of 4.5 %.
_KEEP = 0.85
# What is express, of the micro-batches of a pipeline, and what is kept then, of those in a round trip. The same grid
# with S in flight: 2.8 % above the lower bound instead of 6.2 %.
_EXPRESS_BACKWARDS, _EXPRESS_FORWARDS, _AWAITED_FORWARDS, _AWAITING = 1 / 32, 0.3, 0.5, 1.6
_EXPRESS_KEEP = 0.6087
_FEWEST_PLAYS, _FEWEST_PATIENT_PLAYS = 3, 2  # however large the grid; those with patience take longer
_MOST_FRUITLESS = 400  # plays in a row without a better schedule


@dataclass(frozen=True, slots=True)
class Solution:
    """An order of operations, its times, and its rule; a smaller ``score`` is better."""

    score: tuple[float, float, int]
    rule: Rule | None
    sequence: list[int]
    timing: Timing
    plays: int = 0

    @classmethod
    def of(cls, codes: Codes, rule: Rule | None, sequence: list[int], timing: Timing, peaks: int = 0) -> Solution:
        """The solution with its score: period (else makespan), makespan, ``peaks``.

        ``peaks``: the sum of the workers' peaks of micro-batches; fewer leave more freedom to change the order.
        """
        length = timing.period if codes.problem.technique.staggered else timing.makespan
        # Rounding must not decide between equally good schedules.
        return cls((round(length, 9), round(timing.makespan, 9), peaks), rule, sequence, timing)


class _Point(NamedTuple):
    """A position of the hill climb: a number of stages, and indices of the rest."""

    split: int = 0
    patience: int = 0
    keep: int = 0
    express: int = 0


def search(
    codes: Codes,
    effort: int,
    starts: Iterable[list[int]] = (),
    *,
    goal: Sequence[float] | None = None,
    first: Rule | None = None,
) -> Solution:
    """The best list schedule that ``effort`` operations buy; 0: the plain rule's.

    Args:
        starts: other valid orders of all operations to try after the first rule.
        goal: sufficient period (without the staggered optimizer makespan) and makespan; by default a period at the
            lower bound.
        first: a rule to begin with, as far as the limits of the problem admit it.
    """
    return _RuleSearch(codes, effort, goal).run(starts, first)


class _RuleSearch:
    def __init__(self, codes: Codes, effort: int, goal: Sequence[float] | None) -> None:
        problem, grid = codes.problem, codes.problem.grid
        self.codes = codes
        self.stages = grid.stages
        # Where micro-batches differ, fewer or more of them fit into memory than of the mean one.
        bounded = problem if codes.variation is None else replace(problem, memory=None)
        self.goal = goal or (lower_bound(bounded) * (1 + 1e-9), inf)
        operations = (2 if codes.fused else 3) * grid.stages * grid.global_microbatches
        self.has_few_plays = 0 < effort < 10 * operations
        self.fruitless = 0
        self.best: Solution | None = None
        self.best_by_rule: Solution | None = None
        """The best one from a rule, which the search varies."""
        # Random.random() gives the same numbers in every Python version; its other methods need not.
        self.draw = Random(_SEED).random

        self.ages = tuple(microbatch.index for microbatch in grid.all_microbatches())
        self.limit = _most_held(codes)
        # At equal durations all operations begin and end together: nothing is ever in the way of a backward.
        costs = problem.costs
        work = {*costs.forward, *costs.backward_input, *(() if codes.fused else costs.backward_weight)}
        uneven = len(work) > 1 or costs.communication or problem.worker_factors
        self.patiences: tuple[tuple[float, float], ...] = _PATIENCES if uneven else _PATIENCES[:1]
        self.keeps: list[tuple[int, ...]] = [(0,) * self.stages]
        self.expresses = [NO_EXPRESS]
        if uneven and self.stages > 1:
            trips = _round_trips(problem.costs, codes.durations)
            self.keeps.append(tuple(round(_KEEP * trip) for trip in trips))
            own, counts = _round_trips(problem.costs, codes.durations, itself=True), problem.live_counts()
            share = _EXPRESS_KEEP * grid.pipelines
            self.keeps.append(tuple(int(share * trip / live) for trip, live in zip(own, counts, strict=True)))
            self.patiences = (*_PATIENCES, _EXPRESS_PATIENCE)
            backwards = max(1, round(_EXPRESS_BACKWARDS * grid.microbatches))
            forwards, awaited = (int(share * grid.microbatches) for share in (_EXPRESS_FORWARDS, _AWAITED_FORWARDS))
            self.expresses += [
                Express(backwards, backwards),
                Express(1, backwards, forwards, awaited, _AWAITING),
            ]
        fewest = _FEWEST_PATIENT_PLAYS if uneven else _FEWEST_PLAYS
        self.plays_left = max(1 if goal else fewest, effort // operations) if effort else 1
        self.plays = 0

    def run(self, starts: Iterable[list[int]], first_rule: Rule | None) -> Solution:
        first = _Point()
        if self.has_few_plays and len(self.keeps) > 1:  # the better guess then; patience alone comes second
            short = self.limit[0] < self.keeps[1][0]
            limited = int(self.limit[0] < self.codes.n)  # without a limit the first gradient is in time anyway
            patient = first._replace(patience=len(_PATIENCES) - 1, keep=1, express=limited)
            first = self._awaiting_point if short else patient
        if first_rule is not None:
            self._try(first_rule)
        if not self._is_finished:
            self._try(self._template(first))
        for sequence in starts:
            # The goal is no bound where micro-batches differ: a given order may be faster.
            if not self._is_finished or self.codes.variation is not None:
                self._judge(sequence, None)  # of equally fast orders a given one is preferred
        self._climb(first)
        current = self.best_by_rule
        assert current is not None  # the first rule's
        while not self._is_finished:
            assert current.rule is not None
            solution = self._try(self._changed(current.rule))
            if solution.score <= current.score:
                current = solution
        assert self.best is not None
        return replace(self.best, plays=self.plays)

    @property
    def _is_finished(self) -> bool:
        met = self.best is not None and self.best.score[0] <= self.goal[0] and self.best.score[1] <= self.goal[1]
        return met or self.plays_left <= 0 or self.fruitless >= _MOST_FRUITLESS

    def _try(self, rule: Rule) -> Solution:
        sequence, sum_of_peaks = play_list_schedule(self.codes, rule, self.limit)
        solution = self._judge(sequence, rule, sum_of_peaks)
        if self.best_by_rule is None or solution.score < self.best_by_rule.score:
            self.best_by_rule = solution
        return solution

    def _judge(self, sequence: list[int], rule: Rule | None, sum_of_peaks: int = 0) -> Solution:
        check_cancelled()
        self.plays_left -= 1
        self.plays += 1
        # The exact period of a schedule that cannot become the start of further changes does not matter.
        hopeless = self.best_by_rule.score[0] + 1e-9 if self.best_by_rule else None
        solution = Solution.of(self.codes, rule, sequence, best_timing(self.codes, sequence, hopeless), sum_of_peaks)
        self.fruitless += 1
        if self.best is None or solution.score < self.best.score:
            self.best, self.fruitless = solution, 0
        return solution

    @property
    def _awaiting_point(self) -> _Point:
        """Where forwards are awaited: best where memory holds them back."""
        return _Point(0, len(self.patiences) - 1, len(self.keeps) - 1, len(self.expresses) - 1)

    def _template(self, point: _Point) -> Rule:
        forward_first = self.limit[: point.split] + self.keeps[point.keep][point.split :]
        return Rule(self.ages, forward_first, self.patiences[point.patience], self.expresses[point.express])

    def _climb(self, current: _Point) -> None:
        """Improves the numbers of a point, already played, one by one from a few starts."""
        seen = {current}

        def better(point: _Point) -> bool:
            nonlocal current
            if point in seen or self._is_finished:
                return False
            seen.add(point)
            before = self.best_by_rule
            self._try(self._template(point))
            if self.best_by_rule is not before:
                current = point
            return self.best_by_rule is not before

        stages = self.stages
        patient = range(1, min(len(self.patiences), len(_PATIENCES)))
        for start in (
            *(_Point(patience=patience) for patience in reversed(patient)),
            *(_Point(split) for split in (0, stages // 2, stages, 1)),
            # The last: where memory is short, keeping changes nothing, and plays are better spent on the others.
            *(_Point(patience=patient[-1], keep=keep) for keep in range(1, len(self.keeps))),
            *((self._awaiting_point,) if len(self.expresses) > 1 else ()),
        ):
            better(start)
        while any(better(point) for point in self._neighbours(current)):
            pass

    def _neighbours(self, point: _Point) -> Iterator[_Point]:
        stages = self.stages
        splits = range(stages + 1) if stages <= 8 else sorted({0, 1, *(stages * k // 8 for k in range(9))})
        yield from (point._replace(split=split) for split in sorted(splits, key=lambda split: abs(split - point.split)))
        yield from (point._replace(patience=patience) for patience in range(len(self.patiences)))
        yield from (point._replace(keep=keep) for keep in range(len(self.keeps)))
        yield from (point._replace(express=express) for express in range(len(self.expresses)))

    def _changed(self, rule: Rule) -> Rule:
        """``rule`` with random changes, or a random template, or micro-batches shuffled."""
        draw, stages = self.draw, self.stages
        kind = draw()
        if kind < 0.15:
            return self._template(_Point(int(draw() * (stages + 1))))
        if kind < 0.3:
            spread = 4.0 if kind < 0.2 else 1.5
            return replace(rule, ages=_ranks([age + draw() * spread for age in self.ages]))
        first, ages = list(rule.forward_first), [float(age) for age in rule.ages]
        for _ in range(1 + int(draw() * 2)):
            stage, choice = int(draw() * stages), draw()
            if choice < 0.2:
                first[stage] = 0 if first[stage] else self.limit[stage]
            elif choice < 0.7:
                # Beyond twice the number of stages, a count has no effect worth searching.
                first[stage] = int(draw() * (min(self.limit[stage], 2 * stages + 1) + 1))
            else:
                ages[int(draw() * len(ages))] += (draw() - 0.5) * 4.0
        return replace(rule, ages=_ranks(ages), forward_first=tuple(first))


def _most_held(codes: Codes) -> tuple[int, ...]:
    """Per stage, the most micro-batches that a worker can hold at any moment."""
    grid = codes.problem.grid
    most = [float(grid.global_microbatches)] * grid.stages
    for memory in codes.problem.memories:
        for stage, after_forward in enumerate(memory.after_forward):
            each = after_forward if codes.fused else min(after_forward, memory.after_backward[stage])
            if codes.variation is not None and memory is codes.problem.memory:
                least = (
                    min(ratios[stage] for ratios in part) for part in (codes.variation.held, codes.variation.waiting)
                )
                each *= min(least)
            most[stage] = min(most[stage], memory.most(stage, each))
    return tuple(map(int, most))


def _round_trips(costs: Costs, durations: Sequence[float], itself: bool = False) -> tuple[float, ...]:
    """Per stage, the forwards that fit until the gradient of the first one arrives.

    ``itself``: count F and B of the stage itself, too.
    """
    stages, trip, trips = costs.stages, 0.0, []
    for stage in reversed(range(stages)):
        forward, backward = durations[FORWARD * stages + stage], durations[BACKWARD * stages + stage]
        own = forward + backward + 2 * costs.communication
        trips.append((trip + own * itself) / forward if forward else 0.0)
        trip += own
    return tuple(reversed(trips))


def _ranks(values: list[float]) -> tuple[int, ...]:
    """For each value, the number of distinct smaller ones."""
    rank = {value: number for number, value in enumerate(sorted(set(values)))}
    return tuple(rank[value] for value in values)


_DESCENT_SHARE = 8  # the effort of the search is so many times that of the descent
_LEVEL_PLAYS = 60  # for one level of all workers
_STAGE_PLAYS = 2  # for one level of a stage
_FINENESS = 4  # levels in bytes for each micro-batch


def with_least_memory(codes: Codes, solution: Solution, effort: int) -> Solution:
    """A solution as fast, with the least memory found; ``effort``: that of the search."""
    return _Descent(codes, solution, effort).run()


class _Descent:
    def __init__(self, codes: Codes, solution: Solution, effort: int) -> None:
        self.codes, self.best = codes, solution
        self.memory = codes.problem.measure
        self.goal = tuple(length * (1 + EQUALLY_FAST) for length in solution.score[:2])
        self.operations = (2 if codes.fused else 3) * codes.stages * codes.n
        self.plays = effort // _DESCENT_SHARE // self.operations
        self.peaks = codes.peaks(solution.sequence, self.memory)
        largest = [max(of_stage) for of_stage in codes.bytes_of(self.memory)[0]]
        self.least = [fixed + each for fixed, each in zip(self.memory.fixed, largest, strict=True)]
        fineness = 1 if codes.problem.memory is None else _FINENESS
        self.step = min(each / all for each, all in zip(largest, self.memory.capacity, strict=True)) / fineness

    def run(self) -> Solution:
        """The best solution once no level is left, or no play."""
        capacity, stages = self.memory.capacity, range(self.codes.stages)
        low = max(self.least[s] / capacity[s] for s in stages) - self.step
        while self.plays > 0 and self.level - low > self.step * (1 + 1e-9):
            middle = (low + self.level) / 2
            if not self.found([middle * each for each in capacity], _LEVEL_PLAYS):
                low = middle
        for stage in sorted(stages, key=lambda s: -self.peaks[s] / capacity[s]):
            lowest, step = self.least[stage] - self.step * capacity[stage], self.step * capacity[stage]
            while self.plays > 0 and self.peaks[stage] - lowest > step * (1 + 1e-9):
                middle = (lowest + self.peaks[stage]) / 2
                if not self.found([middle if s == stage else self.peaks[s] for s in stages], _STAGE_PLAYS):
                    lowest = middle
        return self.best

    @property
    def level(self) -> float:
        """The peak on the tightest worker, as a fraction of what it has."""
        return max(peak / all for peak, all in zip(self.peaks, self.memory.capacity, strict=True))

    def found(self, limits: Sequence[float], plays: int) -> bool:
        """Whether a plan is as fast within these peaks; keeps it."""
        plays = min(plays, self.plays)
        try:
            problem = self.limited(limits)
            if self.codes.variation is None and lower_bound(problem) > self.goal[0]:
                return False
            found = search(self.codes.under(problem), plays * self.operations, goal=self.goal, first=self.best.rule)
        except PlanningError:  # not even one micro-batch
            return False
        self.plays -= found.plays
        if found.score[0] > self.goal[0] or found.score[1] > self.goal[1]:
            return False
        self.best = found
        self.peaks = self.codes.peaks(found.sequence, self.memory)
        return True

    def limited(self, limits: Sequence[float]) -> Problem:
        """The problem limited to these peaks; PlanningError if a micro-batch exceeds them."""
        problem = self.codes.problem
        if problem.memory is not None:
            return replace(problem, memory=replace(problem.memory, capacity=tuple(limits)))
        whole = [int(limit + 1e-9) for limit in limits]
        if min(whole) < 1:
            raise PlanningError("a worker cannot hold one micro-batch.")
        limit = problem.in_flight_limit or whole
        return replace(problem, in_flight_limit=tuple(map(min, whole, limit)))
