"""The validator: rules of a correct schedule, written from the definition alone.

A schedule may come from a heuristic, a solver or a file. Before it runs, it is checked against each rule of pipeline
training, in columns of numbers (:class:`OperationColumns`); all violations are reported. Lanes share no worker and
exchange no message but in REDUCE, so a compact schedule is checked on its fullest lane.

1. *Workers*: every live worker has a program and no other worker does; operations are listed in order of their starts.
2. *Once*: at every stage every micro-batch has one F and either one B and one W or one BW, all on the same live worker
   of that stage; every worker has one REDUCE and one STEP, in this order, at its end. Without split backwards there is
   only BW. There may be one R, if memory is limited in bytes with the size of a checkpoint; not at the last stage.
3. *Duration*: an operation takes what the costs say, times the worker's factor, and no time is before 0.
4. *Overlap*: a worker runs one operation at a time, also across consecutive iterations.
5. *Dependency*: F after F of the stage before plus communication; R after own F; B (BW) after own F, after own R if
   there is one, and after B (BW) of the next stage plus communication; W after own B; REDUCE after every W (BW) of the
   stage on all its workers; STEP after every REDUCE of the stage.
6. *Memory*: micro-batches in flight, from the start of F to the end of W (BW), never exceed the limit; nor do the bytes
   that a worker holds: what it needs without micro-batches, and for each in flight what it holds from the start of F
   (with an R: only a checkpoint from the end of F until the start of R) and, where its backward is split, from B on. B
   holds the larger of both.
7. *Period*: a stage begins the next iteration after its STEP; without the staggered optimizer the period is the
   makespan.
8. *Progress*: no cycle of operations that wait for one another. (Only operations without duration could form one.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from math import inf, nan

from lightning_recycle.errors import PlanningError
from lightning_recycle.planning.grid import Microbatch, Op, OpKind, Worker
from lightning_recycle.planning.problem import Problem
from lightning_recycle.planning.routing import CompactSchedule
from lightning_recycle.planning.schedule import KINDS, OperationColumns, Schedule, gc_paused

_SHOWN = 10
_ABSENT = -1
_F, _R, _B, _W, _BW, _REDUCE, _STEP = map(
    KINDS.index,
    (
        OpKind.FORWARD,
        OpKind.RECOMPUTE,
        OpKind.BACKWARD_INPUT,
        OpKind.BACKWARD_WEIGHT,
        OpKind.BACKWARD,
        OpKind.REDUCE,
        OpKind.STEP,
    ),
)
_ON_MICROBATCHES = range(5)
"""The numbers of F, R, B, W and BW."""


class InvalidScheduleError(PlanningError):
    """A schedule breaks the rules; ``violations`` has a line for each violation."""

    def __init__(self, violations: tuple[str, ...]) -> None:
        shown = "\n  ".join(violations[:_SHOWN])
        more = f"\n  ... and {len(violations) - _SHOWN} more" if len(violations) > _SHOWN else ""
        super().__init__(
            f"the schedule breaks {len(violations)} rule(s); do not run it, report the planner that made it:"
            f"\n  {shown}{more}"
        )
        self.violations = violations

    def __reduce__(self) -> tuple[type[InvalidScheduleError], tuple[tuple[str, ...]]]:
        # Exceptions cross process boundaries here; the default would call __init__ with the message.
        return type(self), (self.violations,)


def validate(schedule: Schedule) -> None:
    """Check every rule of this module's definition.

    Raises:
        InvalidScheduleError: with all violations.
    """
    with gc_paused():
        if isinstance(schedule, CompactSchedule):
            problem, lane = schedule.lane.problem, enumerate(schedule.lane.stages)
            programs, foreign = {Worker(0, stage): columns for stage, columns in lane}, []
        else:
            problem, foreign = schedule.problem, list(_foreign(schedule))
            programs = {worker: OperationColumns.of(operations) for worker, operations in schedule.workers.items()}
        violations = (*foreign, *_Check(problem, programs, schedule.period).violations())
    if violations:
        raise InvalidScheduleError(violations)


def _foreign(schedule: Schedule) -> Iterator[str]:
    for worker, operations in schedule.workers.items():
        for op in (scheduled.op for scheduled in operations if scheduled.op.stage != worker.stage):
            yield f"once: {worker} runs {op}, an operation of another stage"


class _Placed:
    """Operations of one kind at one stage; for none worker -1 and NaN as times."""

    def __init__(self, count: int) -> None:
        self.worker, self.place = [_ABSENT] * count, [_ABSENT] * count
        self.start, self.end = [nan] * count, [nan] * count

    def or_else(self, other: _Placed) -> _Placed:
        """These operations, and ``other``'s for micro-batches without one."""
        if max(other.worker, default=_ABSENT) == _ABSENT:
            return self
        both = _Placed(len(self.worker))
        for number, worker in enumerate(self.worker):
            one = other if worker == _ABSENT else self
            both.worker[number], both.place[number] = one.worker[number], one.place[number]
            both.start[number], both.end[number] = one.start[number], one.end[number]
        return both


class _Check:
    """The rules, for the programs of all workers."""

    def __init__(self, problem: Problem, programs: Mapping[Worker, OperationColumns], period: float) -> None:
        self.problem, self.grid, self.period = problem, problem.grid, period
        self.given = programs
        self.programs = {worker: columns for worker, columns in programs.items() if worker in problem.grid}
        self.workers = list(self.programs)
        latest = max((columns.ends[-1] for columns in programs.values() if columns.kinds), default=0.0)
        self.tolerance = 1e-9 * max(1.0, latest)
        count = problem.grid.global_microbatches
        self.placed = {
            (kind, stage): _Placed(count) for kind in _ON_MICROBATCHES for stage in range(problem.grid.stages)
        }

    def violations(self) -> Iterator[str]:
        broken = False
        for rule in (
            self._live,
            self._once,
            self._times,
            self._dependencies,
            self._closing,
            self._memory,
            self._period,
        ):
            for violation in rule():
                broken = True
                yield violation
        costs = self.problem.costs
        weights = costs.backward_weight if self.problem.technique.split_backward else (1.0,)
        if not broken and min(*costs.forward, *costs.backward_input, *weights) == 0.0:
            yield from self._progress()

    def _name(self, worker: Worker, place: int) -> str:
        columns = self.programs[worker]
        index = columns.indices[place]
        microbatch = None if index < 0 else Microbatch(columns.pipelines[place], index)
        return str(Op(KINDS[columns.kinds[place]], worker.stage, microbatch))

    def _live(self) -> Iterator[str]:
        live = set(self.problem.live_workers())
        for worker in sorted(live - self.given.keys()):
            yield f"workers: live worker {worker} has no program"
        for worker in sorted(self.given.keys() - live):
            yield f"workers: {worker} has a program but is not a live worker"

    def _once(self) -> Iterator[str]:
        """Rule 2; fills ``placed``."""
        grid, memory = self.grid, self.problem.memory
        recomputes = memory is not None and memory.checkpoint is not None
        splits = self.problem.technique.split_backward
        for number, (worker, columns) in enumerate(self.programs.items()):
            placed = [self.placed[kind, worker.stage] for kind in _ON_MICROBATCHES]
            allowed = (True, recomputes and worker.stage < grid.stages - 1, splits, splits, True)  # by kind
            closing = []
            rows = zip(columns.kinds, columns.pipelines, columns.indices, columns.starts, columns.ends, strict=True)
            for place, (kind, pipeline, index, start, end) in enumerate(rows):
                if kind not in _ON_MICROBATCHES:
                    closing.append(kind)
                    if index >= 0:
                        yield f"once: {self._name(worker, place)} on {worker} names a micro-batch"
                    continue
                own, microbatch = placed[kind], pipeline * grid.microbatches + index
                inside = 0 <= pipeline < grid.pipelines and 0 <= index < grid.microbatches
                if inside and allowed[kind] and own.worker[microbatch] == _ABSENT:
                    own.worker[microbatch], own.place[microbatch] = number, place
                    own.start[microbatch], own.end[microbatch] = start, end
                    continue
                if index < 0:
                    problem = f"on {worker} names no micro-batch"
                elif not inside:
                    problem = f"on {worker} names a micro-batch outside the grid"
                elif allowed[kind]:
                    problem = f"runs on {worker} and on {self.workers[own.worker[microbatch]]}"
                elif kind != _R:
                    problem = f"on {worker}, but the backward is not split"
                elif recomputes:
                    problem = f"on {worker}, at the last stage"
                else:
                    problem = f"on {worker}, but the problem has no size of a checkpoint"
                yield f"once: {self._name(worker, place)} {problem}"
            if closing != [_REDUCE, _STEP] or list(columns.kinds[-2:]) != closing:
                yield f"once: {worker} must have one REDUCE and one STEP, in this order, at its end"
        for stage in range(grid.stages):
            yield from self._complete(stage)

    def _complete(self, stage: int) -> Iterator[str]:
        """Whether each micro-batch has F+B+W or F+BW at a stage, on one worker."""
        hosts = zip(*(self.placed[kind, stage].worker for kind in _ON_MICROBATCHES), strict=True)
        for number, (f, again, b, w, fused) in enumerate(hosts):
            backward = (b == f and w == f and fused == _ABSENT) or (fused == f and b == w == _ABSENT)
            if f != _ABSENT and backward and again in (f, _ABSENT):
                continue
            microbatch = Microbatch(*divmod(number, self.grid.microbatches))
            found = [kind for kind, host in ((_F, f), (_B, b), (_W, w), (_BW, fused)) if host != _ABSENT]
            if found not in ([_F, _B, _W], [_F, _BW]):
                names = "+".join(str(KINDS[kind]) for kind in found) or "nothing"
                yield f"once: micro-batch {microbatch} at stage {stage} has {names}, not F+B+W or F+BW"
            workers = {self.workers[host] for host in (f, again, b, w, fused) if host != _ABSENT}
            if len(workers) > 1:
                names = ", ".join(map(str, sorted(workers)))
                yield f"once: micro-batch {microbatch} at stage {stage} is split between {names}"

    def _times(self) -> Iterator[str]:
        """Rules 3 and 4, and the order of rule 1."""
        costs, factors, tolerance = self.problem.costs, dict(self.problem.worker_factors), self.tolerance
        for worker, columns in self.programs.items():
            stage = worker.stage
            expected = [costs.of(kind, stage) * factors.get(worker, 1.0) for kind in KINDS]
            expected[_REDUCE] = costs.reduce[stage]
            before, busy = -inf, -inf
            for place, (kind, start, end) in enumerate(zip(columns.kinds, columns.starts, columns.ends, strict=True)):
                # "not <=" instead of ">": NaN must not pass.
                if not abs(end - start - expected[kind]) <= tolerance:
                    name = self._name(worker, place)
                    yield f"duration: {name} on {worker} takes {end - start:g} instead of {expected[kind]:g}"
                if not start >= -tolerance:
                    yield f"duration: {self._name(worker, place)} on {worker} starts at {start:g}, before the iteration"
                if start < before - tolerance:
                    one, other = self._name(worker, place), self._name(worker, place - 1)
                    yield f"workers: on {worker}, {one} is listed after {other} but starts before it"
                elif start < busy - tolerance:
                    one, other = self._name(worker, place), self._name(worker, place - 1)
                    yield f"overlap: {one} on {worker} starts at {start:g}, before {other} ends at {busy:g}"
                before, busy = start, end
            if columns.kinds and not columns.starts[0] + self.period >= busy - tolerance:
                busy_times = f"from {columns.starts[0]:g} to {busy:g}"
                yield (
                    f"overlap: {worker} is busy {busy_times}, longer than the period {self.period:g}: "
                    "two iterations overlap"
                )

    def _dependencies(self) -> Iterator[str]:
        stages, communication = self.grid.stages, self.problem.costs.communication
        forwards = [self.placed[_F, stage] for stage in range(stages)]
        backwards = [self.placed[_B, stage].or_else(self.placed[_BW, stage]) for stage in range(stages)]
        for stage in range(stages):
            again, weights = self.placed[_R, stage], self.placed[_W, stage]
            yield from self._after(again, forwards[stage])
            yield from self._after(backwards[stage], forwards[stage])
            yield from self._after(backwards[stage], again)
            yield from self._after(weights, self.placed[_B, stage])
            if stage > 0:
                yield from self._after(forwards[stage], forwards[stage - 1], communication)
            if stage < stages - 1:
                yield from self._after(backwards[stage], backwards[stage + 1], communication)

    def _after(self, own: _Placed, source: _Placed, lag: float | None = None) -> Iterator[str]:
        """Operations that start before their source has ended, plus ``lag`` of a message."""
        if max(own.worker, default=_ABSENT) == _ABSENT:  # none is split, or computed again
            return
        early = (lag or 0.0) - self.tolerance
        found = {n for n, (start, end) in enumerate(zip(own.start, source.end, strict=True)) if start < end + early}
        if lag is None:  # for operations without duration, the order is that of the program, not of the times
            rows = enumerate(zip(own.worker, source.worker, own.place, source.place, strict=True))
            found.update(n for n, (worker, other, place, before) in rows if worker == other and place < before)
        for number in sorted(found):
            one, other = self.workers[own.worker[number]], self.workers[source.worker[number]]
            name, needed = self._name(one, own.place[number]), self._name(other, source.place[number])
            yield (
                f"dependency: {name} on {one} starts at {own.start[number]:g}, before the result of {needed} on "
                f"{other} arrives at {source.end[number] + (lag or 0.0):g}"
            )

    def _closing(self) -> Iterator[str]:
        """REDUCE and STEP wait for all workers of the stage."""
        ready: dict[tuple[int, int], float] = {}
        for worker, columns in self.programs.items():
            for kind, ends in ((_REDUCE, columns.ends[:-2]), (_STEP, columns.ends[-2:-1])):
                key = worker.stage, kind
                ready[key] = max(ready.get(key, 0.0), max(ends, default=0.0))
        for worker, columns in self.programs.items():
            for place in range(max(0, len(columns.kinds) - 2), len(columns.kinds)):
                kind, start = columns.kinds[place], columns.starts[place]
                needed = ready.get((worker.stage, kind), 0.0)
                if start < needed - self.tolerance:
                    what = "REDUCE" if kind == _STEP else "last gradient"
                    yield (
                        f"dependency: {self._name(worker, place)} on {worker} starts at {start:g}, before the stage's "
                        f"{what} ends at {needed:g}"
                    )

    def _memory(self) -> Iterator[str]:
        """Rule 6; the first operation of a worker that exceeds a limit."""
        for memory in self.problem.memories:
            unit = "bytes" if memory is self.problem.memory else "micro-batches"
            for worker, columns in self.programs.items():
                stage = worker.stage
                before, after = memory.after_forward[stage], memory.after_backward[stage]
                kept = before if memory.checkpoint is None else memory.checkpoint[stage]
                # By kind, what is held more while an operation runs, and after it.
                changes = [(0.0, 0.0)] * len(KINDS)
                changes[_F], changes[_R] = (before, before), (before - kept, before - kept)
                changes[_B] = max(0.0, after - before), after - before
                changes[_W], changes[_BW] = (0.0, -after), (0.0, -before)
                rows = list(zip(columns.kinds, columns.pipelines, columns.indices, strict=True))
                again = {(pipeline, index) for kind, pipeline, index in rows if kind == _R}
                held, capacity = memory.fixed[stage], memory.capacity[stage]
                for place, (kind, pipeline, index) in enumerate(rows):
                    during, change = changes[kind]
                    if kind == _F and (pipeline, index) in again:
                        during, change = max(before, kept), kept
                    if held + during > capacity * (1 + 1e-9):
                        name, start = self._name(worker, place), columns.starts[place]
                        yield (
                            f"memory: {worker} holds {held + during:,.0f} {unit} in {name} at {start:g}, "
                            f"it has {capacity:,.0f}"
                        )
                        break
                    held += change

    def _period(self) -> Iterator[str]:
        period, tolerance = self.period, self.tolerance
        if not self.problem.technique.staggered:
            timed = [columns for columns in self.programs.values() if columns.kinds]
            makespan = max((max(each.ends) for each in timed), default=0.0)
            makespan -= min((min(each.starts) for each in timed), default=0.0)
            if not abs(period - makespan) <= tolerance:
                yield f"period: {period:g}, but without the staggered optimizer it is the makespan, {makespan:g}"
        begin: dict[int, float] = {}
        stepped: dict[int, float] = {}
        for worker, columns in self.programs.items():
            if columns.kinds:
                stage, first, last = worker.stage, min(columns.starts), max(columns.ends)
                begin[stage], stepped[stage] = min(begin.get(stage, first), first), max(stepped.get(stage, last), last)
        for stage in sorted(begin.keys() & stepped.keys()):
            if not begin[stage] + period >= stepped[stage] - tolerance:
                yield (
                    f"period: the next iteration begins stage {stage} at {begin[stage] + period:g}, before the "
                    f"stage's STEP ends at {stepped[stage]:g}"
                )

    def _progress(self) -> Iterator[str]:
        """A cycle in the graph of all operations, by dependencies and programs."""
        stages = self.grid.stages
        graph: TopologicalSorter[tuple[int, int]] = TopologicalSorter()
        for number, worker in enumerate(self.workers):
            for place in range(1, len(self.programs[worker].kinds)):
                graph.add((number, place), (number, place - 1))
        for (kind, stage), placed in self.placed.items():
            needed = {_F: [(_F, stage - 1)], _R: [(_F, stage)], _W: [(_B, stage)]}.get(
                kind, [(_F, stage), (_R, stage), (_B, stage + 1), (_BW, stage + 1)]
            )
            for source in (self.placed[key] for key in needed if 0 <= key[1] < stages):
                for own, at, other, before in zip(
                    placed.worker, placed.place, source.worker, source.place, strict=True
                ):
                    if own != _ABSENT and other != _ABSENT:
                        graph.add((own, at), (other, before))
        try:
            graph.prepare()
        except CycleError as error:
            number, place = error.args[1][0]
            yield f"progress: {self.workers[number]} waits forever before {self._name(self.workers[number], place)}"
