"""Refinement of an order of operations: local search, less memory, fused backwards.

*Local search*: what a priority rule cannot say, small changes of the order can. The length of a plan is that of a
critical path, so only a change on it helps: where an operation waits for the one before it on its worker, it goes
before that one or a few others. A change is kept if the plan is not longer: the walk along equally long plans is what
leads out of dead ends. It re-routes nothing, and stops at the goal or when its effort is spent.

*Memory descent*: the search for a fast plan ends when nothing is faster, and an eager plan holds many times the
micro-batches that its period needs. So it is searched again under less and less memory, with the known period and
makespan as the goal, which few rules then miss: first the tightest worker, by bisection for the least level, a fraction
of every worker's memory, under which a plan is still as fast (levels that the lower bound excludes cost no play); then
the sum, by bisection stage by stage, while no other stage may hold more than it does, from the stage that holds most.
Memory is that of :func:`~lightning_recycle.planning.result.measure_of`. A limit of the problem is tightened, so slow
workers, re-routing, and micro-batches that differ need nothing of their own. It takes at most an eighth of the effort:
hundreds of plays for small grids, three for a lane of 64 stages and 128 micro-batches, and none for a plan that lists
more than an eighth of the effort in operations.

*Fusion*: a backward is split so that the stage before gets its gradient early. Where that stage is busy until after the
W anyway, or where there is no stage before, one BW does the same work in one pass over the graph: it is a little
cheaper than B + W, and holds less in between. So the search splits every backward that memory allows, and this pass
takes back what brought nothing: at stage 0, where no stage waits, B and W become BW at the place of B if no F comes in
between, which others wait for; elsewhere if W directly follows B and the stage before does not begin its own backward
until W has ended.

Contract: deterministic (a seeded generator). Local search and fusion never make the period longer, the descent by at
most 0.1 % (nor the makespan), and none of them takes more memory on the tightest worker.

Must not know: how the order was found. Internal to ``planning``.

Source: critical-path neighbourhoods of job-shop scheduling (Nowicki and Smutnicki, Management Science 42, 1996), with
a walk over plateaus.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random

from lightning_recycle.errors import PlanningError
from lightning_recycle.planning import cancellation
from lightning_recycle.planning.bounds import lower_bound
from lightning_recycle.planning.heuristic.rule_search import Solution, search
from lightning_recycle.planning.problem import Problem
from lightning_recycle.planning.result import EQUALLY_FAST, measure_of
from lightning_recycle.planning.timing import BACKWARD, FORWARD, FUSED, WEIGHT, Codes, Timing, best_timing, interleave

__all__ = ["coupled", "local_search", "with_least_memory"]


def coupled(codes: Codes, sequence: list[int], timing: Timing) -> tuple[list[int], Timing]:
    """The sequence with such pairs fused, and its times.

    Args:
        codes: the operations.
        sequence: all operations in an order that respects their dependencies.
        timing: its times.
    """
    if codes.fused:
        return sequence, timing
    pairs = _idle_splits(codes, sequence, timing.starts)
    if not pairs:
        return sequence, timing
    to_fused, to_weight = (FUSED - BACKWARD) * codes.stages * codes.n, (WEIGHT - BACKWARD) * codes.stages * codes.n
    weights = {code + to_weight for code in pairs}
    fused = [code + to_fused if code in pairs else code for code in sequence if code not in weights]
    moved = _moved(codes, fused, timing, {code + to_fused: timing.starts[code] for code in pairs})
    again = best_timing(codes, fused)  # what ends earlier now may let a stage begin later
    lengths = [each.period if codes.problem.technique.staggered else each.makespan for each in (moved, again)]
    # Rounding must not decide between equally good schedules.
    return fused, again if round(lengths[1], 9) < round(lengths[0], 9) else moved


def _moved(codes: Codes, sequence: Sequence[int], timing: Timing, fused: Mapping[int, float]) -> Timing:
    """The times after coupling: the same, but for backwards of stage 0 that follow one; no stage waits for those."""
    n, stages, ranks, times = codes.n, codes.stages, codes.ranks, codes.times
    starts = timing.starts.copy()
    for code, start in fused.items():
        starts[code] = start
    free = dict.fromkeys((codes.problem.grid.rank(worker) for worker in codes.problem.live_workers(0)), 0.0)
    for code in sequence:
        key, number = divmod(code, n)
        if not key % stages:
            rank = ranks[key][number]
            starts[code] = max(starts[code], free[rank])
            free[rank] = starts[code] + times[key][number]
    end = max(free.values()) + codes.closing[0]
    return replace(timing, starts=starts, stage_end=[min(end, timing.stage_end[0]), *timing.stage_end[1:]])


def _idle_splits(codes: Codes, sequence: Sequence[int], starts: Sequence[float]) -> set[int]:
    """The codes of those B that may as well be BW."""
    n, stages, ranks, times = codes.n, codes.stages, codes.ranks, codes.times
    communication = codes.problem.costs.communication
    to_weight, to_fused = (WEIGHT - BACKWARD) * stages * n, (FUSED - BACKWARD) * stages * n
    previous = [-1] * codes.problem.grid.num_workers  # the last operation of each worker so far
    since_forward: list[set[int]] = [set() for _ in previous]  # at stage 0: the B since the last F
    found: set[int] = set()
    for code in sequence:
        key, number = divmod(code, n)
        kind, stage = divmod(key, stages)
        rank = ranks[key][number]
        if kind == WEIGHT:
            backward = code - to_weight
            if stage == 0:
                if backward in since_forward[rank]:
                    found.add(backward)
            elif previous[rank] == backward:
                # The operation of the stage before that waits, which is either B or BW; the other one has no start.
                waiting = max(starts[backward - n], starts[backward - n + to_fused])
                if starts[code] + times[key][number] + communication <= waiting:
                    found.add(backward)
        elif stage == 0:
            if kind == FORWARD:
                since_forward[rank].clear()
            else:
                since_forward[rank].add(code)
        previous[rank] = code
    return found


_SEED = 2
_MOST_FRUITLESS = 1_200  # changes in a row without a shorter plan
_FARTHEST = 4  # places that an operation goes ahead at once


def local_search(
    codes: Codes, sequence: list[int], timing: Timing, goal: float, tries: int
) -> tuple[list[int], Timing]:
    """A plan that is at least as good: the order of its operations, and its times.

    Args:
        codes: the operations.
        sequence: an order of all of them that respects dependencies and memory.
        timing: its times.
        goal: a length that is good enough: a lower bound.
        tries: number of changes to try.
    """
    return _Search(codes, sequence, timing, goal).run(tries)


class _Search:
    def __init__(self, codes: Codes, sequence: list[int], timing: Timing, goal: float) -> None:
        self.staggered = codes.problem.technique.staggered
        self.codes = codes
        self.start = sequence, timing
        self.goal = goal
        # Random.random() gives the same numbers in every Python version; its other methods need not.
        self.draw = Random(_SEED).random
        self.programs: dict[int, list[int]] = {}
        for code in sequence:
            self.programs.setdefault(codes.rank(code), []).append(code)
        self.timing = timing
        self.length = self._length(timing)
        self.memories = [(memory.room, codes.bytes_of(memory)) for memory in codes.problem.memories]
        """For each limit: what there is by stage, and what an operation takes by kind, stage and micro-batch."""

    def run(self, tries: int) -> tuple[list[int], Timing]:
        first = best = self.length
        fruitless = 0
        while tries > 0 and fruitless < _MOST_FRUITLESS and best > self.goal:
            cancellation.check()
            tries -= 1
            fruitless += 1
            self._advance()
            if self.length < best:
                best, fruitless = self.length, 0
        if best >= first:
            return self.start
        sequence = interleave(self.codes, self.programs)
        return sequence, best_timing(self.codes, sequence)

    def _length(self, timing: Timing) -> float:
        return round(timing.period if self.staggered else timing.makespan, 9)

    def _advance(self) -> None:
        """Let an operation of the critical path go before those that it waits for on its worker."""
        arcs = self._critical_arcs()
        if not arcs:
            return
        rank, at = arcs[int(self.draw() * len(arcs))]
        program = self.programs[rank]
        code = program[at]
        to = max(0, at - 1 - int(self.draw() ** 2 * _FARTHEST))
        if self.draw() < 0.3:  # instead, the one before goes behind it and maybe others
            moved = list(program)
            moved.insert(min(len(program) - 1, at + int(self.draw() ** 2 * _FARTHEST)), moved.pop(at - 1))
        else:
            moved = [*program[:to], code, *program[to:at], *program[at + 1 :]]
        if self._possible(rank, moved):
            self._adopt({**self.programs, rank: moved})

    def _adopt(self, programs: dict[int, list[int]]) -> None:
        """Take these programs if the plan is not longer with them."""
        try:
            sequence = interleave(self.codes, programs)
        except PlanningError:  # workers would wait for one another
            return
        timing = best_timing(self.codes, sequence, self.length + 1e-9)
        length = self._length(timing)
        if length <= self.length:
            self.programs, self.timing, self.length = programs, timing, length

    def _possible(self, rank: int, program: Sequence[int]) -> bool:
        """Whether each micro-batch has F, B and W, or F and BW, in this order, and memory suffices."""
        n, stages = self.codes.n, self.codes.stages
        stage = rank % stages
        limits = [(room(stage), [of_kind[stage] for of_kind in taken]) for room, taken in self.memories]
        held = [0.0] * len(limits)
        done: dict[int, int] = {}
        for code in program:
            key, number = divmod(code, n)
            kind = key // stages
            if done.get(number, -1) != (FORWARD if kind == FUSED else kind - 1):
                return False
            done[number] = kind
            for at, (room, delta) in enumerate(limits):
                held[at] += delta[kind][number]
                if held[at] > room:
                    return False
        return True

    def _critical_arcs(self) -> list[tuple[int, int]]:
        """(rank, position) of the operations on a critical path that start when their worker becomes free."""
        codes, timing, programs = self.codes, self.timing, self.programs
        stages, n, comm = codes.stages, codes.n, codes.problem.costs.communication
        position = {code: at for program in programs.values() for at, code in enumerate(program)}
        starts = timing.starts

        def end(code: int) -> float:
            return starts[code] + codes.times[code // n][code % n]

        lengths = [timing.stage_end[s] - (timing.stage_begin[s] if self.staggered else 0.0) for s in range(stages)]
        longest = max(lengths)
        worst = [s for s in range(stages) if lengths[s] >= longest - 1e-9]
        stage = worst[int(self.draw() * len(worst))]
        rank = max(
            (rank for rank in programs if rank % stages == stage and programs[rank]),
            key=lambda rank: (end(programs[rank][-1]), -rank),
        )
        code = programs[rank][-1]
        arcs = []
        while True:
            rank = codes.rank(code)
            at = position[code]
            start = starts[code]
            tolerance = 1e-9 * max(1.0, start)
            offset = codes.input_offset[code // n]
            by_worker = at > 0 and end(programs[rank][at - 1]) >= start - tolerance
            source = code + offset
            if source not in position:  # a backward that is fused
                source -= codes.to_backward
            by_source = bool(offset) and end(source) + comm >= start - tolerance
            if by_worker and not (by_source and self.draw() < 0.5):
                arcs.append((rank, at))
                code = programs[rank][at - 1]
            elif by_source:
                code = source
            elif at > 0 and self.staggered:
                code = programs[rank][at - 1]  # delayed; whatever comes before may begin earlier
            else:
                return arcs


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
        self.goal = tuple(length * (1 + EQUALLY_FAST) for length in solution.score[:2])
        self.operations = (2 if codes.fused else 3) * codes.stages * codes.n
        self.plays = effort // _SHARE // self.operations
        self.peaks = codes.peaks(solution.sequence, self.memory)
        one = [max(of_stage) for of_stage in codes.bytes_of(self.memory)[0]]
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
        self.peaks = self.codes.peaks(found.sequence, self.memory)
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
