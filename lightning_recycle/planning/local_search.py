"""Local search over orders: the last per cent of a heuristic plan.

Concept: what a priority rule cannot say, small changes of the order can. The length of a plan is that of a critical
path, so only a change on it helps: where an operation waits for the one before it on its worker, it goes before that
one or a few others. A change is kept if the plan is not longer: the walk along equally long plans is what leads out of
dead ends.

Contract: deterministic (a seeded generator); never worse than its start; respects memory; re-routes nothing; stops at
the goal or when its effort is spent.

Must not know: how the start was found. Internal to ``planning``.

Source: critical-path neighbourhoods of job-shop scheduling (Nowicki and Smutnicki, Management Science 42, 1996), with
a walk over plateaus.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from lightning_recycle.errors import PlanningError
from lightning_recycle.planning import cancellation
from lightning_recycle.planning.timing import FORWARD, FUSED, Codes, Timing, best_timing, interleave

__all__ = ["local_search"]

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
