"""Memory descent: from a good plan to one that is as fast and asks for less memory.

Concept: the search for a fast plan ends when nothing is faster, and an eager plan holds many times the micro-batches
that its period needs. So it is searched again under less and less memory, with the known period and makespan as the
goal, which few rules then miss:

1. *the tightest worker*: bisection for the least level, a fraction of every worker's memory, under which a plan is
   still as fast. Levels that the lower bound excludes cost no play;
2. *the sum*: bisection stage by stage, while no other stage may hold more than it does, from the stage that holds most.

Memory is that of :func:`~lightning_recycle.planning.preference.measure_of`: bytes, or micro-batches in flight. A limit
of the problem is tightened, so slow workers, re-routing, and micro-batches that differ need nothing of their own.

Contract: deterministic; never slower by more than 0.1 %, in period and makespan; never more memory on the tightest
worker; at most an eighth of the effort. That is hundreds of plays for small grids, three for a lane of 64 stages and
128 micro-batches, and none for a plan that lists more than an eighth of the effort in operations.

Must not know: how the plan was found; how a play works. Internal to ``planning``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_recycle.errors import PlanningError
from lightning_recycle.planning.bounds import lower_bound
from lightning_recycle.planning.preference import EQUALLY_FAST, measure_of
from lightning_recycle.planning.problem import Problem
from lightning_recycle.planning.rule_search import Solution, search
from lightning_recycle.planning.timing import Codes

__all__ = ["with_least_memory"]

_SHARE = 8  # the effort of the search is so many times that of the descent
_LEVEL_PLAYS = 60  # for one level of all workers
_STAGE_PLAYS = 2  # for one level of a stage
_FINENESS = 4  # levels in bytes for each micro-batch


def with_least_memory(codes: Codes, solution: Solution, effort: int) -> Solution:
    """A solution as fast as ``solution``, with the least memory that the descent finds.

    Args:
        codes: the operations.
        solution: a good one.
        effort: number of operations to play in the search for it.
    """
    return _Descent(codes, solution, effort).run()


class _Descent:
    def __init__(self, codes: Codes, solution: Solution, effort: int) -> None:
        self.codes, self.best = codes, solution
        self.memory = measure_of(codes.problem)
        self.taken = codes.bytes_of(self.memory)
        self.goal = tuple(length * (1 + EQUALLY_FAST) for length in solution.score[:2])
        self.operations = (2 if codes.fused else 3) * codes.stages * codes.n
        self.plays = effort // _SHARE // self.operations
        self.peaks = self.peaks_of(solution.sequence)
        one = [max(of_stage) for of_stage in self.taken[0]]
        self.least = [fixed + each for fixed, each in zip(self.memory.fixed, one, strict=True)]
        fineness = 1 if codes.problem.memory is None else _FINENESS
        self.step = min(each / all for each, all in zip(one, self.memory.capacity, strict=True)) / fineness

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
        """Whether there is a plan that is as fast, with these peaks at most; it becomes the best one."""
        plays = min(plays, self.plays)
        try:
            problem = self.limited(limits)
            if self.codes.turns is None and lower_bound(problem) > self.goal[0]:
                return False
            found = search(self.codes.under(problem), plays * self.operations, goal=self.goal, first=self.best.rule)
        except PlanningError:  # not even one micro-batch
            return False
        self.plays -= found.plays
        if found.score[0] > self.goal[0] or found.score[1] > self.goal[1]:
            return False
        self.best = found
        self.peaks = self.peaks_of(found.sequence)
        return True

    def limited(self, limits: Sequence[float]) -> Problem:
        """The problem with these peaks at most.

        Raises:
            PlanningError: when a worker cannot hold one micro-batch.
        """
        problem = self.codes.problem
        if problem.memory is not None:
            return replace(problem, memory=replace(problem.memory, capacity=tuple(limits)))
        whole = [int(limit + 1e-9) for limit in limits]
        if min(whole) < 1:
            raise PlanningError("a worker cannot hold one micro-batch.")
        given = problem.in_flight_limit or whole
        return replace(problem, in_flight_limit=tuple(map(min, whole, given)))

    def peaks_of(self, sequence: Sequence[int]) -> list[float]:
        """By stage, the most that a worker holds at once."""
        codes, stages, n = self.codes, self.codes.stages, self.codes.n
        held = [self.memory.fixed[rank % stages] for rank in range(codes.problem.grid.num_workers)]
        peaks = list(self.memory.fixed)
        for code in sequence:
            key, number = divmod(code, n)
            kind, stage = divmod(key, stages)
            rank = codes.ranks[key][number]
            held[rank] += self.taken[kind][stage][number]
            peaks[stage] = max(peaks[stage], held[rank])
        return peaks
