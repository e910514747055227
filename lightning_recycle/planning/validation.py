"""The validator: what a correct schedule is, written from the definition alone.

Concept: a schedule is data that anyone may produce: a heuristic, a solver, a file. Before it runs, it is
checked against each rule of pipeline training. All violations are reported, not only the first.

Contract: linear in the number of operations. Accepts exactly the schedules that follow the rules:

1. *Workers*: every live worker has a program and no other worker does; operations are listed in order of their starts.
2. *Once*: at every stage every micro-batch has one F and either one B and one W or one BW, all on the same live worker
   of that stage; every worker has one REDUCE and one STEP, in this order, at its end. Without decoupling there is only
   BW. There it may have one R, if memory is limited in bytes that say what a checkpoint takes; not at the last stage.
3. *Duration*: an operation takes what the costs say, times the worker's factor, and no time is before 0.
4. *Overlap*: a worker runs one operation at a time, also across consecutive iterations.
5. *Dependency*: F after F of the stage before plus communication; R after own F; B (BW) after own F, after own R if
   there is one, and after B (BW) of the next stage plus communication; W after own B; REDUCE after every W (BW) of the
   stage on all its workers; STEP after every REDUCE of the stage. REDUCE lasts until every bucket has been summed, one
   after the other, each after the part of the last W that completes it.
6. *Memory*: micro-batches in flight, from the start of F to the end of W (BW), never exceed the limit; nor do the bytes
   that a worker holds: what it needs without micro-batches, and for each in flight what it holds from the start of F
   (with an R: only a checkpoint from the end of F until the start of R) and, where its backward is split, from B on. B
   holds the larger of both.
7. *Period*: a stage begins the next iteration after its STEP; without the staggered optimizer the period is the
   makespan.
8. *Progress*: no cycle of operations that wait for one another. (Only operations without duration could form one.)

Must not know: any scheduler; it does not even use the schedule's own route and makespan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import TypeAlias

from lightning_recycle.errors import PlanningError
from lightning_recycle.planning.compact_schedule import CodedSchedule
from lightning_recycle.planning.costs import bucket_times
from lightning_recycle.planning.grid import OpKind, ScheduledOp, Worker
from lightning_recycle.planning.lane_validation import covers, lane_violations
from lightning_recycle.planning.schedule import Schedule, gc_paused

__all__ = ["InvalidScheduleError", "validate"]

_SHOWN = 10
_F, _B, _W, _BW = OpKind.FORWARD, OpKind.BACKWARD_INPUT, OpKind.BACKWARD_WEIGHT, OpKind.BACKWARD
_R = OpKind.RECOMPUTE
_KINDS = (_F, _B, _W, _BW, _R)
_COLLECTIVE = (OpKind.REDUCE, OpKind.STEP)

_Placed: TypeAlias = "dict[int, tuple[Worker, ScheduledOp, int]]"
"""Each operation on a micro-batch, by number: its worker, its times, its position in the worker's program.

Numbers, (kind * S + stage) * D * M + micro-batch, because hashing dataclasses takes most of the time otherwise.
"""


class InvalidScheduleError(PlanningError):
    """A schedule breaks the rules. ``violations`` has a line for each violation."""

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
        if isinstance(schedule, CodedSchedule) and covers(schedule.lane):
            violations = tuple(lane_violations(schedule))
        elif isinstance(schedule, CodedSchedule):
            violations = tuple(_violations(replace(schedule.lane.schedule(), period=schedule.period)))
        else:
            violations = tuple(_violations(schedule))
    if violations:
        raise InvalidScheduleError(violations)


def _violations(schedule: Schedule) -> Iterator[str]:
    ends = [ops[-1].end for ops in schedule.workers.values() if ops]
    tolerance = 1e-9 * max(1.0, *ends) if ends else 0.0
    placed: _Placed = {}
    broken = False
    for check in (
        _workers(schedule, tolerance),
        _once(schedule, placed),
        _times(schedule, tolerance),
        _dependencies(schedule, placed, tolerance),
        _stage_collectives(schedule, tolerance),
        _in_flight(schedule),
        _memory(schedule),
        _period(schedule, tolerance),
    ):
        for violation in check:
            broken = True
            yield violation
    if not broken and _has_instant_operations(schedule):
        yield from _progress(schedule, placed)


def _workers(schedule: Schedule, tolerance: float) -> Iterator[str]:
    live = set(schedule.problem.live_workers())
    for worker in sorted(live - set(schedule.workers)):
        yield f"workers: live worker {worker} has no program"
    for worker in sorted(set(schedule.workers) - live):
        yield f"workers: {worker} has a program but is not a live worker"
    for worker, ops in schedule.workers.items():
        for before, after in pairwise(ops):
            if after.start < before.start - tolerance:
                yield f"workers: on {worker}, {after.op} is listed after {before.op} but starts before it"


def _once(schedule: Schedule, placed: _Placed) -> Iterator[str]:
    """Rule 2; fills ``placed``."""
    grid, decoupled = schedule.grid, schedule.problem.technique.decoupled
    n, per_pipeline, pipelines, stages = grid.global_microbatches, grid.microbatches, grid.pipelines, grid.stages
    memory = schedule.problem.memory
    recomputes = memory is not None and memory.checkpoint is not None
    first_of = {kind: number * stages * n for number, kind in enumerate(_KINDS)}
    for worker, ops in schedule.workers.items():
        collectives = []
        for position, scheduled in enumerate(ops):
            op = scheduled.op
            kind, microbatch = op.kind, op.microbatch
            if op.stage != worker.stage or not 0 <= op.stage < stages:
                yield f"once: {worker} runs {op}, an operation of another stage"
            elif kind is OpKind.REDUCE or kind is OpKind.STEP:
                collectives.append(kind)
                if microbatch is not None:
                    yield f"once: {op} on {worker} names a micro-batch"
            elif microbatch is None:
                yield f"once: {op} on {worker} names no micro-batch"
            elif not (0 <= microbatch.pipeline < pipelines and 0 <= microbatch.index < per_pipeline):
                yield f"once: {op} on {worker} names a micro-batch outside the grid"
            elif not decoupled and (kind is _B or kind is _W):
                yield f"once: {op} on {worker}, but the backward is not decoupled"
            elif kind is _R and not (recomputes and op.stage < stages - 1):
                why = "at the last stage" if recomputes else "but the problem does not say what a checkpoint takes"
                yield f"once: {op} on {worker}, {why}"
            else:
                number = microbatch.pipeline * per_pipeline + microbatch.index
                code = first_of[kind] + op.stage * n + number
                if code in placed:
                    yield f"once: {op} runs on {worker} and on {placed[code][0]}"
                else:
                    placed[code] = worker, scheduled, position
        if tuple(collectives) != _COLLECTIVE or tuple(scheduled.op.kind for scheduled in ops[-2:]) != _COLLECTIVE:
            yield f"once: {worker} must have one REDUCE and one STEP, in this order, at its end"
    step = grid.stages * n  # from the number of an operation to the same of the next kind
    for forward, microbatch in enumerate(list(grid.all_microbatches()) * grid.stages):
        found = [code for code in range(forward, len(_KINDS) * step, step) if code in placed]
        computed = [code for code in found if code < 4 * step]  # it may be computed again as well
        if computed != [forward, forward + step, forward + 2 * step] and computed != [forward, forward + 3 * step]:
            names = "+".join(_KINDS[code // step] for code in computed) or "nothing"
            yield f"once: micro-batch {microbatch} at stage {forward // n} has {names}, not F+B+W or F+BW"
        hosts = {placed[code][0] for code in found}
        if len(hosts) > 1:
            names = ", ".join(map(str, sorted(hosts)))
            yield f"once: micro-batch {microbatch} at stage {forward // n} is split between {names}"


def _times(schedule: Schedule, tolerance: float) -> Iterator[str]:
    costs, period = schedule.problem.costs, schedule.period
    factors = dict(schedule.problem.worker_factors)
    for worker, ops in schedule.workers.items():
        expected = {}
        if 0 <= worker.stage < costs.stages:
            for kind in OpKind:
                expected[kind] = costs.of(kind, worker.stage) * factors.get(worker, 1.0)
            number = costs.buckets_of(worker.stage)
            sums = bucket_times(costs.reduce[worker.stage], costs.backward_weight[worker.stage], number)
            expected[OpKind.REDUCE] = sums[-1][1]
        previous: ScheduledOp | None = None
        for scheduled in ops:
            op, start = scheduled.op, scheduled.start
            if not start >= -tolerance:
                yield f"duration: {op} on {worker} starts at {start:g}, before the iteration"
            duration = scheduled.end - start
            # An operation of another stage breaks rule 2; its duration does not matter then.
            cost = expected[op.kind] if op.stage == worker.stage and expected else duration
            # "not <=" instead of ">": NaN must not pass.
            if not abs(duration - cost) <= tolerance:
                yield f"duration: {op} on {worker} takes {duration:g} instead of {cost:g}"
            if previous is not None and start < previous.end - tolerance:
                yield f"overlap: {op} on {worker} starts at {start:g}, before {previous.op} ends at {previous.end:g}"
            previous = scheduled
        if ops and not ops[0].start + period >= ops[-1].end - tolerance:
            busy = f"from {ops[0].start:g} to {ops[-1].end:g}"
            yield f"overlap: {worker} is busy {busy}, longer than the period {period:g}: two iterations overlap"


def _needs(grid: tuple[int, int], placed: _Placed, code: int) -> list[int]:
    """The operations (by number, present or not) whose results operation ``code`` needs; ``grid`` is (S, D * M)."""
    stages, n = grid
    step = stages * n
    kind, at = divmod(code, step)
    stage = at // n
    if kind == 0:
        return [at - n] if stage else []
    if kind == 2:
        return [at + step]
    if kind == 4:
        return [at]
    own = [at, at + 4 * step] if at + 4 * step in placed else [at]
    if stage == stages - 1:
        return own
    fused = at + n + 3 * step
    return [*own, fused if fused in placed else at + n + step]


def _dependencies(schedule: Schedule, placed: _Placed, tolerance: float) -> Iterator[str]:
    communication = schedule.problem.costs.communication
    grid = schedule.grid.stages, schedule.grid.global_microbatches
    for code, (worker, scheduled, position) in placed.items():
        for needed in _needs(grid, placed, code):
            source = placed.get(needed)
            if source is None:
                continue  # rule 2 has reported it
            source_worker, source_scheduled, source_position = source
            ready = source_scheduled.end
            if source_scheduled.op.stage != scheduled.op.stage:
                ready += communication
            # For operations without duration, the order is that of the program, not of the times.
            backwards = source_worker == worker and position < source_position
            if scheduled.start < ready - tolerance or backwards:
                yield (
                    f"dependency: {scheduled.op} on {worker} starts at {scheduled.start:g}, "
                    f"before the result of {source_scheduled.op} on {source_worker} arrives at {ready:g}"
                )


def _stage_collectives(schedule: Schedule, tolerance: float) -> Iterator[str]:
    gradients: dict[int, float] = {}
    reduced: dict[int, float] = {}
    for worker, ops in schedule.workers.items():
        stage = worker.stage
        for scheduled in ops:
            if scheduled.op.kind is _W or scheduled.op.kind is _BW:
                gradients[stage] = max(gradients.get(stage, 0.0), scheduled.end)
            elif scheduled.op.kind is OpKind.REDUCE:
                reduced[stage] = max(reduced.get(stage, 0.0), scheduled.end)
    for worker, ops in schedule.workers.items():
        for scheduled in ops[-2:]:
            for kind, ready, what in (
                (OpKind.REDUCE, gradients.get(worker.stage, 0.0), "last gradient"),
                (OpKind.STEP, reduced.get(worker.stage, 0.0), "REDUCE"),
            ):
                if scheduled.op.kind is kind and scheduled.start < ready - tolerance:
                    yield (
                        f"dependency: {scheduled.op} on {worker} starts at {scheduled.start:g}, "
                        f"before the stage's {what} ends at {ready:g}"
                    )


def _in_flight(schedule: Schedule) -> Iterator[str]:
    limits = schedule.problem.in_flight_limit
    if limits is None:
        return
    for worker, ops in schedule.workers.items():
        limit = limits[worker.stage] if 0 <= worker.stage < len(limits) else 0
        held = 0
        # One operation at a time (rule 4), so the order of the program is the order of the events.
        for scheduled in ops:
            if scheduled.op.kind is _F:
                held += 1
                if held > limit:
                    yield f"memory: {worker} holds {held} micro-batches at {scheduled.start:g}, its limit is {limit}"
            elif scheduled.op.kind is _W or scheduled.op.kind is _BW:
                held -= 1


def _memory(schedule: Schedule) -> Iterator[str]:
    memory = schedule.problem.memory
    if memory is None:
        return
    for worker, ops in schedule.workers.items():
        stage = worker.stage
        if not 0 <= stage < memory.stages:
            continue  # rule 2 has reported it
        capacity, before, after = memory.capacity[stage], memory.after_forward[stage], memory.after_backward[stage]
        checkpoint = 0.0 if memory.checkpoint is None else memory.checkpoint[stage]
        recomputed = {scheduled.op.microbatch for scheduled in ops if scheduled.op.kind is _R}
        # Micro-batches between the end of F and R, between the start of F or R and B, and between B and W.
        checkpoints = forwards = backwards = 0
        for scheduled in ops:
            kind = scheduled.op.kind
            forwards += kind is _F or kind is _R
            checkpoints -= kind is _R
            held = memory.fixed[stage] + checkpoints * checkpoint + forwards * before + backwards * after
            if kind is _B:
                held += max(0.0, after - before)
            drops = kind is _F and scheduled.op.microbatch in recomputed
            if drops:
                held += max(0.0, checkpoint - before)
            if held > capacity * (1 + 1e-9):
                yield (
                    f"memory: {worker} holds {held:,.0f} bytes in {scheduled.op} at {scheduled.start:g}, "
                    f"it has {capacity:,.0f}"
                )
            forwards -= kind is _B or kind is _BW or drops
            checkpoints += drops
            backwards += (kind is _B) - (kind is _W)


def _period(schedule: Schedule, tolerance: float) -> Iterator[str]:
    period = schedule.period
    if not schedule.problem.technique.staggered:
        times = [time for ops in schedule.workers.values() for op in ops for time in (op.start, op.end)]
        makespan = max(times) - min(times) if times else 0.0
        if not abs(period - makespan) <= tolerance:
            yield f"period: {period:g}, but without the staggered optimizer it is the makespan, {makespan:g}"
    begin: dict[int, float] = {}
    stepped: dict[int, float] = {}
    for worker, ops in schedule.workers.items():
        stage = worker.stage
        for scheduled in ops:
            if scheduled.op.kind is OpKind.STEP:
                stepped[stage] = max(stepped.get(stage, scheduled.end), scheduled.end)
            elif scheduled.op.kind is _F:
                begin[stage] = min(begin.get(stage, scheduled.start), scheduled.start)
    for stage in sorted(begin.keys() & stepped.keys()):
        if not begin[stage] + period >= stepped[stage] - tolerance:
            yield (
                f"period: the next iteration begins stage {stage} at {begin[stage] + period:g}, "
                f"before the stage's STEP ends at {stepped[stage]:g}"
            )


def _has_instant_operations(schedule: Schedule) -> bool:
    costs = schedule.problem.costs
    durations = [*costs.forward, *costs.backward_input]
    if schedule.problem.technique.decoupled:
        durations += costs.backward_weight
    return min(durations) == 0.0


def _progress(schedule: Schedule, placed: _Placed) -> Iterator[str]:
    """Run the programs without a clock: each worker proceeds until its next operation lacks an input."""
    grid = schedule.grid.stages, schedule.grid.global_microbatches
    programs: dict[Worker, list[int]] = {worker: [] for worker in schedule.workers}
    for code, (worker, _, _) in placed.items():
        programs[worker].append(code)  # `placed` was filled in the order of the programs
    done: set[int] = set()
    position = dict.fromkeys(programs, 0)
    waiting: dict[int, list[Worker]] = {}
    runnable = list(programs)
    while runnable:
        worker = runnable.pop()
        program = programs[worker]
        while position[worker] < len(program):
            code = program[position[worker]]
            missing = next((needed for needed in _needs(grid, placed, code) if needed not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(worker)
                break
            done.add(code)
            position[worker] += 1
            runnable += waiting.pop(code, [])
    for worker, program in programs.items():
        if position[worker] < len(program):
            yield f"progress: {worker} waits forever before {placed[program[position[worker]]][1].op}"
