"""Local search over orders: the last per cent of a heuristic plan.

Concept: what a priority rule cannot say, small changes of the order can. The length of a plan is that of a critical
path, so only a change on it helps: where an operation waits for the one before it on its worker, it goes before that
one or a few others; now and then a re-routed micro-batch goes to another peer as a whole, or two change places. A
change is kept if the plan is not longer, or hardly: the walk along equally long plans is what leads out of dead ends.

Contract: deterministic (a seeded generator); never worse than its start; respects memory, and moves only micro-batches
without a home; stops at the goal or when its effort is spent.

Must not know: how the start was found. Internal to ``planning``.

Source: critical-path neighbourhoods of job-shop scheduling (Nowicki and Smutnicki, Management Science 42, 1996), with
a walk over plateaus.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from random import Random

from lightning_recycle.errors import PlanningError
from lightning_recycle.planning import cancellation
from lightning_recycle.planning.grid import Worker
from lightning_recycle.planning.timing import BACKWARD, FORWARD, FUSED, WEIGHT, Codes, Timing, best_timing, interleave

__all__ = ["local_search"]

_SEED = 2
_MOST_FRUITLESS = 2_000  # changes in a row without a shorter plan, with each slack

_SLACKS = (0.01, 0.05)  # of the length: how much longer than the best a plan may be on the way; the second when stuck
_FARTHEST = 4  # places that an operation goes ahead at once
_REROUTED = 0.15  # share of changes that are other peers


def local_search(
    codes: Codes, sequence: list[int], timing: Timing, goal: float, tries: int
) -> tuple[Codes, list[int], Timing]:
    """A plan that is at least as good: its operations with their routes, their order, and its times.

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
        self.codes = codes.routed([dict(route) for route in codes.routes])
        self.start = codes, sequence, timing
        self.goal = goal
        # Random.random() gives the same numbers in every Python version; its other methods need not.
        self.draw = Random(_SEED).random
        self.programs: dict[int, list[int]] = {}
        for code in sequence:
            self.programs.setdefault(codes.rank(code), []).append(code)
        self.timing = timing
        self.score = self._score(timing)
        self.allowed = self.score[0]
        """The length up to which the next change is kept."""
        self.kinds = (FORWARD, BACKWARD) if codes.fused else (FORWARD, BACKWARD, WEIGHT, FUSED)
        self.memories = [(memory.room, codes.bytes_of(memory)) for memory in codes.problem.memories]
        """For each limit: what there is by stage, and what an operation takes by kind, stage and micro-batch."""
        self.movable = self._movable()
        self.movers = set(self.movable)

    def run(self, tries: int) -> tuple[Codes, list[int], Timing]:
        first = best = self.score
        found = {rank: list(program) for rank, program in self.programs.items()}
        ranks = [list(row) for row in self.codes.ranks[: self.codes.stages]]
        fruitless = 0
        while tries > 0 and fruitless < len(_SLACKS) * _MOST_FRUITLESS and best[0] > self.goal:
            cancellation.check()
            slack = _SLACKS[fruitless // _MOST_FRUITLESS]
            tries -= 1
            fruitless += 1
            self.allowed = max(self.score[0], best[0] * (1 + slack * self.draw() ** 3))
            if not (self._reroute() if self.movable and self.draw() < _REROUTED else self._advance()):
                continue
            if self.score < best:
                if self.score[0] < best[0]:
                    fruitless = 0
                best = self.score
                found = {rank: list(program) for rank, program in self.programs.items()}
                ranks = [list(row) for row in self.codes.ranks[: self.codes.stages]]
        if best[0] >= first[0]:
            return self.start
        codes = self._routed(ranks)
        sequence = interleave(codes, found)
        return codes, sequence, best_timing(codes, sequence)

    def _routed(self, ranks: list[list[int]]) -> Codes:
        grid = self.codes.problem.grid
        microbatches = self.codes.microbatches
        routes = [dict(zip(microbatches, map(grid.worker, row), strict=True)) for row in ranks]
        return self.codes.routed(routes)

    def _score(self, timing: Timing) -> tuple[float, float]:
        """Length, then the sum of the stages' lengths: plans that leave room elsewhere lead further."""
        if self.staggered:
            spans = [end - begin for begin, end in zip(timing.stage_begin, timing.stage_end, strict=True)]
            return round(max(spans), 9), round(sum(spans), 9)
        return round(timing.makespan, 9), round(sum(timing.stage_end), 9)

    def _movable(self) -> list[tuple[int, int]]:
        """(stage, micro-batch) of those that run away from home because it is dead, where peers are equally fast."""
        problem, codes = self.codes.problem, self.codes
        alike = [len(set(problem.live_factors(s))) == 1 for s in range(codes.stages)]
        return [
            (stage, number)
            for stage in range(codes.stages)
            if alike[stage] and len(problem.live_workers(stage)) > 1
            for number, microbatch in enumerate(codes.microbatches)
            if Worker(microbatch.pipeline, stage) in problem.failed
        ]

    def _advance(self) -> bool:
        """Let an operation of the critical path go before those that it waits for on its worker."""
        arcs = self._critical_arcs()
        if not arcs:
            return False
        rank, at = arcs[int(self.draw() * len(arcs))]
        program = self.programs[rank]
        code = program[at]
        to = max(0, at - 1 - int(self.draw() ** 2 * _FARTHEST))
        if self.draw() < 0.3:  # instead, the one before goes behind it and maybe others
            moved = list(program)
            moved.insert(min(len(program) - 1, at + int(self.draw() ** 2 * _FARTHEST)), moved.pop(at - 1))
        else:
            moved = [*program[:to], code, *program[to:at], *program[at + 1 :]]
        return self._adopt({rank: moved})

    def _reroute(self) -> bool:
        """Give a re-routed micro-batch to another peer, at the same moments."""
        codes, n = self.codes, self.codes.n
        stage, number = self.movable[int(self.draw() * len(self.movable))]
        peers = [codes.problem.grid.rank(worker) for worker in codes.problem.live_workers(stage)]
        old = codes.ranks[stage][number]
        others = [rank for rank in peers if rank != old]
        new = others[int(self.draw() * len(others))]
        mine = self._operations(old, stage, number)
        moved = {old: [code for code in self.programs[old] if code not in mine], new: list(self.programs.get(new, ()))}
        back = None
        if self.draw() < 0.7:  # an exchange leaves the loads as they are
            guests = [code % n for code in moved[new] if code // n == stage and (stage, code % n) in self.movers]
            if not guests:
                return False
            back = guests[int(self.draw() * len(guests))]
            theirs = self._operations(new, stage, back)
            moved[new] = [code for code in moved[new] if code not in theirs]
            for code in theirs:
                self._insert(moved[old], code)
        for code in mine:
            self._insert(moved[new], code)
        codes.ranks[stage][number] = new
        if back is not None:
            codes.ranks[stage][back] = old
        if self._adopt(moved):
            return True
        codes.ranks[stage][number] = old
        if back is not None:
            codes.ranks[stage][back] = new
        return False

    def _operations(self, rank: int, stage: int, number: int) -> list[int]:
        """Those of a micro-batch on a worker."""
        codes = {self.codes.code(kind, stage, number) for kind in self.kinds}
        return [code for code in self.programs[rank] if code in codes]

    def _insert(self, program: list[int], code: int) -> None:
        starts = self.timing.starts
        program.insert(bisect(program, starts[code], key=starts.__getitem__), code)

    def _adopt(self, changed: dict[int, list[int]]) -> bool:
        """Take the changed programs if they are possible and not longer."""
        if not all(self._possible(rank, program) for rank, program in changed.items()):
            return False
        programs = {**self.programs, **changed}
        try:
            sequence = interleave(self.codes, programs)
        except PlanningError:  # workers would wait for one another
            return False
        timing = best_timing(self.codes, sequence, self.allowed + 1e-9)
        score = self._score(timing)
        if score[0] > self.allowed:
            return False
        self.programs, self.timing, self.score = programs, timing, score
        return True

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
