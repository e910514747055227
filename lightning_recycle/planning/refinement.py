"""Refinement of plans: less memory, fused backwards, forwards computed again.

*Memory descent*: an eager plan holds many times the micro-batches that its period needs. So it is searched again under
less and less memory (``Problem.measure``), with the known period and makespan as the goal: first the tightest worker,
by bisection for the least fraction of every worker's memory under which a plan is still as fast; then the sum, by
bisection stage by stage, from the stage that holds most. It takes at most an eighth of the effort, and makes neither
period nor makespan more than 0.1 % longer.

*Fusion*: one BW is a little cheaper than B + W, and holds less in between. The search splits every backward that memory
allows, and this pass fuses those that brought nothing: at stage 0, where no stage waits, at the place of B if no F
comes in between; elsewhere if W directly follows B and the stage before does not begin its own backward until W has
ended.

*Recomputation* (activation checkpointing, arXiv 1604.06174): a micro-batch whose F keeps only its input leaves room for
others; R, the same forward again, takes what its backward needs. It costs an F, so it is used only where memory makes
the plan slow, and for as few micro-batches as possible:

1. plan without it, and without the limit in bytes. Where the first is as short as the second, it is the answer;
2. the stages whose workers hold more in the second than they have are *tight*. Plan as if every F of a tight stage kept
   a checkpoint only, every backward took an F longer, and there were always room for one R;
3. put an R before each of these backwards. It waits for nothing, so it can run while its worker waits for the gradient;
4. take it back for every micro-batch whose activations fit into memory from F on.

At the last stage there is never an R: an F at the place of its R is as early for all workers, and needs no F before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from lightning_recycle.errors import PlanningError
from lightning_recycle.planning.costs import Memory
from lightning_recycle.planning.grid import Microbatch, Op, OpKind, ScheduledOp, Worker
from lightning_recycle.planning.problem import Problem, lower_bound
from lightning_recycle.planning.rule_search import Solution, search
from lightning_recycle.planning.schedule import EQUALLY_FAST, Schedule
from lightning_recycle.planning.timing import BACKWARD, FORWARD, FUSED, WEIGHT, Codes, Timing, best_timing, retime


def with_fused_backwards(codes: Codes, sequence: list[int], timing: Timing) -> tuple[list[int], Timing]:
    """The sequence with the backwards fused that were split for nothing; its times."""
    if codes.fused:
        return sequence, timing
    pairs = _idle_splits(codes, sequence, timing.starts)
    if not pairs:
        return sequence, timing
    to_fused, to_weight = (FUSED - BACKWARD) * codes.stages * codes.n, (WEIGHT - BACKWARD) * codes.stages * codes.n
    weights = {code + to_weight for code in pairs}
    fused = [code + to_fused if code in pairs else code for code in sequence if code not in weights]
    again = best_timing(codes, fused)
    staggered = codes.problem.technique.staggered
    before, after = (each.period if staggered else each.makespan for each in (timing, again))
    # With very many operations, times are not always those of the smallest period.
    return (fused, again) if after <= before * (1 + 1e-9) else (sequence, timing)


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


_DESCENT_SHARE = 8  # the effort of the search is so many times that of the descent
_LEVEL_PLAYS = 60  # for one level of all workers
_STAGE_PLAYS = 2  # for one level of a stage
_FINENESS = 4  # levels in bytes for each micro-batch


def with_least_memory(codes: Codes, solution: Solution, effort: int) -> Solution:
    """A solution as fast as ``solution``, with the least memory that is found.

    ``effort`` is the number of operations that were played in the search for it.
    """
    return _Descent(codes, solution, effort).run()


class _Descent:
    def __init__(self, codes: Codes, solution: Solution, effort: int) -> None:
        self.codes, self.best = codes, solution
        self.memory = codes.problem.measure
        self.goal = tuple(length * (1 + EQUALLY_FAST) for length in solution.score[:2])
        self.operations = (2 if codes.fused else 3) * codes.stages * codes.n
        self.plays = effort // _DESCENT_SHARE // self.operations
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
        """Whether there is a plan that is as fast within these peaks; keeps it."""
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


_AGAIN_SHARE = 0.25  # of the effort of a plan, for each plan with and without a limit in bytes
_BACKWARDS = (OpKind.BACKWARD_INPUT, OpKind.BACKWARD)


def with_recomputation(problem: Problem, plan: Callable[[Problem, float], Schedule]) -> Schedule:
    """The best of the plans with and without recomputation.

    ``plan`` makes a plan of a problem in which nothing may be computed again, with a share of the usual effort.
    """
    memory = problem.memory
    if memory is None or memory.checkpoint is None:
        return plan(problem, 1.0)
    best = plan(replace(problem, memory=replace(memory, checkpoint=None)), 1.0).under(problem)
    saves = [s for s in range(problem.grid.stages - 1) if memory.checkpoint[s] < memory.after_forward[s]]
    if not saves or _met(best, lower_bound(problem)):
        return best
    free = plan(replace(problem, memory=None), _AGAIN_SHARE).under(problem)
    if _met(best, free.period):
        return best
    if free.fits(problem):
        return free
    tight = frozenset(
        stage for stage in saves if max(map(free.peak_memory, problem.live_workers(stage))) > memory.capacity[stage]
    )
    reduced = _reduced(problem, memory, tight)
    if not tight or _met(best, lower_bound(reduced)):
        return best
    found = _with_room(_expanded(plan(reduced, _AGAIN_SHARE), problem, tight), memory)
    return best if _met(best, found.period) else found


def _met(schedule: Schedule, period: float) -> bool:
    return schedule.period <= period * (1 + 1e-9)


def _reduced(problem: Problem, memory: Memory, stages: frozenset[int]) -> Problem:
    """The problem with an R, and memory for it, in each backward of ``stages``."""
    assert memory.checkpoint is not None
    costs = problem.costs
    backward, capacity, held = list(costs.backward_input), list(memory.capacity), list(memory.after_forward)
    for stage in stages:
        backward[stage] += costs.forward[stage]
        capacity[stage] -= memory.after_forward[stage] - memory.checkpoint[stage]
        held[stage] = memory.checkpoint[stage]
    reduced = replace(memory, capacity=tuple(capacity), after_forward=tuple(held), checkpoint=None)
    return replace(problem, costs=replace(costs, backward_input=tuple(backward)), memory=reduced)


def _expanded(schedule: Schedule, problem: Problem, stages: frozenset[int]) -> Schedule:
    """A schedule of the reduced problem as one of ``problem``, with R before B."""

    def operations(worker: Worker) -> Iterator[Op]:
        for op in schedule.program(worker):
            if op.kind in _BACKWARDS and worker.stage in stages:
                yield Op(OpKind.RECOMPUTE, op.stage, op.microbatch)
            yield op

    technique = schedule.problem.technique  # 1F1B never splits
    programs = {worker: list(operations(worker)) for worker in schedule.live_workers}
    return _timed(replace(problem, technique=technique), programs)


def _with_room(schedule: Schedule, memory: Memory) -> Schedule:
    """The schedule without the R of micro-batches that fit into memory from F on."""
    programs = {}
    for worker in schedule.live_workers:
        program = schedule.program(worker)
        spared = _spared(program, memory, worker.stage)
        programs[worker] = [op for op in program if op.kind is not OpKind.RECOMPUTE or op.microbatch not in spared]
    return _timed(schedule.problem, programs)


def _spared(program: Sequence[Op], memory: Memory, stage: int) -> set[Microbatch | None]:
    """The micro-batches of one worker that need no R.

    The first R is taken back first, which is best for their number: each takes the same memory for an interval.
    """
    again = {op.microbatch: position for position, op in enumerate(program) if op.kind is OpKind.RECOMPUTE}
    forwards = {op.microbatch: position for position, op in enumerate(program) if op.kind is OpKind.FORWARD}
    room, more = memory.room(stage), memory.delta(OpKind.RECOMPUTE, stage, recomputed=True)
    held, now = [], 0.0  # in each operation; after the newest
    for op in program:
        before, now = now, now + memory.delta(op.kind, stage, op.microbatch in again)
        held.append(before + memory.needed(op.kind, stage))
    spared: set[Microbatch | None] = set()
    for microbatch, position in again.items():
        between = range(forwards[microbatch] + 1, position)  # F itself needs the same either way
        if all(held[at] + more <= room for at in between):
            spared.add(microbatch)
            for at in between:
                held[at] += more
    return spared


def _timed(problem: Problem, programs: dict[Worker, list[Op]]) -> Schedule:
    """The schedule of these programs, each operation as early as possible."""
    untimed = {worker: tuple(ScheduledOp(op, 0.0, 0.0) for op in ops) for worker, ops in programs.items()}
    return retime(Schedule(problem, untimed, 0.0), problem.costs)
