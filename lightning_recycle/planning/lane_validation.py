"""The validator of coded schedules: the rules of :mod:`~lightning_recycle.planning.validation`, checked on one lane.

Concept: lanes share no worker and exchange no message but in REDUCE, so a coded schedule follows the rules exactly if
its fullest lane does and its lanes hold every micro-batch and live worker once. The latter is a formula
(:class:`~lightning_recycle.planning.replicated_pipelines.LanePlaces`), the former is checked on columns of numbers:
50,000 operations take 20 ms, a tenth of what the validator needs for them. A lane that is one micro-batch shorter
leaves out operations for which no other waits, and holds no more.

Durations and the order of a worker's operations need no check: times are decoded from durations and idle times, which
are not negative.

Contract: accepts a coded schedule if and only if the validator accepts what it expands to. That holds where
:func:`covers` says so; other lanes are for the validator itself: those with operations that take no time, which may
wait for one another, and with other kinds of operations than F, B, W and BW.

Must not know: any scheduler.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from operator import lt

from lightning_recycle.planning.compact_schedule import CodedSchedule
from lightning_recycle.planning.grid import OpKind
from lightning_recycle.planning.memory import Memory
from lightning_recycle.planning.replicated_pipelines import LETTERS, Lane, LaneOperations

__all__ = ["covers", "lane_violations"]

_F, _B, _W, _BW = (
    LETTERS[kind] for kind in (OpKind.FORWARD, OpKind.BACKWARD_INPUT, OpKind.BACKWARD_WEIGHT, OpKind.BACKWARD)
)


def covers(lane: Lane) -> bool:
    """Whether these rules are all that ``lane`` has to follow."""
    costs = lane.problem.costs
    weights = costs.backward_weight if lane.problem.technique.decoupled else (1.0,)
    instant = min(*costs.forward, *costs.backward_input, *weights) == 0.0
    return not instant and set().union(*lane.kinds) <= {_F, _B, _W, _BW}


def lane_violations(schedule: CodedSchedule) -> Iterator[str]:
    """A line for each rule that ``schedule`` breaks, at the least one if it breaks any."""
    lane = schedule.lane
    stages = [lane.operations(stage) for stage in range(lane.problem.grid.stages)]
    tolerance = 1e-9 * max(1.0, *(stage.end for stage in stages))
    memories = lane.problem.memories
    complete = True
    for stage, operations in enumerate(stages):
        for violation in _once(lane, stage, operations):
            complete = False
            yield violation
    if not complete:  # times of operations that are not there cannot be compared
        return
    for stage, operations in enumerate(stages):
        yield from _idle(lane, stage, tolerance)
        yield from _memory(memories, stage, operations)
        if not operations.reduce >= operations.ends[-1] - tolerance:
            yield f"dependency: REDUCE@{stage} starts at {operations.reduce:g}, before the stage's last gradient"
    yield from _dependencies(lane, stages, tolerance)
    yield from _period(schedule, stages, tolerance)


def _once(lane: Lane, stage: int, operations: LaneOperations) -> Iterator[str]:
    """Each micro-batch has one F, and one B and one W or one BW, in this order."""
    everything = list(range(lane.microbatches))
    placed = {letter: _by_number(operations, letter) for letter in operations.of_kind}
    forwards, split, weights, fused = (placed.get(letter, ([], [])) for letter in (_F, _B, _W, _BW))
    backwards = sorted(split[0] + fused[0]) if fused[0] else split[0]
    if forwards[0] != everything or backwards != everything or split[0] != weights[0]:
        yield f"once: not every micro-batch of stage {stage} has one F+B+W or F+BW"
        return
    if split[0] and not lane.problem.technique.decoupled:
        yield f"once: stage {stage} splits a backward, but the backward is not decoupled"
    for letter, (numbers, places), before in (
        (_B, split, map(forwards[1].__getitem__, split[0])),
        (_BW, fused, map(forwards[1].__getitem__, fused[0])),
        (_W, weights, split[1]),
    ):
        for number, place, needed in zip(numbers, places, before, strict=True):
            if place < needed:
                yield f"dependency: {letter} of micro-batch {number} at stage {stage} comes before what it needs"


def _by_number(operations: LaneOperations, letter: str) -> tuple[list[int], list[int]]:
    """The micro-batches that have an operation of this kind, in order, and its places in the program."""
    numbers = operations.of_kind[letter]
    places = [place for place, kind in enumerate(operations.kinds) if kind == letter]
    ordered = sorted(numbers)
    if numbers != ordered:
        places = [place for _, place in sorted(zip(numbers, places, strict=True))]
    return ordered, places


def _idle(lane: Lane, stage: int, tolerance: float) -> Iterator[str]:
    for position, gap in lane.idle[stage]:
        # "not >=" instead of "<": NaN must not pass.
        if not gap >= -tolerance:
            yield f"overlap: stage {stage} is idle for {gap:g} before operation {position}"


def _dependencies(lane: Lane, stages: Sequence[LaneOperations], tolerance: float) -> Iterator[str]:
    communication = lane.problem.costs.communication
    forwards = [_times(stage, _F) for stage in stages]
    backwards = [_times(stage, _B, _BW) for stage in stages]
    pairs = [(stage - 1, stage, forwards, "F") for stage in range(1, len(stages))]
    pairs += [(stage + 1, stage, backwards, "B") for stage in range(len(stages) - 1)]
    for source, target, times, name in pairs:
        earliest = [end + communication - tolerance for end in times[source][1]]
        if any(map(lt, times[target][0], earliest)):
            number = next(
                n for n, (start, ready) in enumerate(zip(times[target][0], earliest, strict=True)) if start < ready
            )
            yield (
                f"dependency: {name} of micro-batch {number} at stage {target} starts at "
                f"{times[target][0][number]:g}, before the result of stage {source} arrives"
            )


def _times(operations: LaneOperations, *letters: str) -> tuple[list[float], list[float]]:
    """Starts and ends of the operations of these kinds, by micro-batch."""
    found = [_by_number(operations, letter) for letter in letters if letter in operations.of_kind]
    places = found[0][1]
    if len(found) > 1:
        places = [place for numbers, at in found for place in at]
        numbers = [number for numbers, _ in found for number in numbers]
        places = [place for _, place in sorted(zip(numbers, places, strict=True))]
    return [operations.starts[place] for place in places], [operations.ends[place] for place in places]


def _memory(memories: Sequence[Memory], stage: int, operations: LaneOperations) -> Iterator[str]:
    for memory in memories:
        held = accumulate(map(_deltas(memory, stage).__getitem__, operations.kinds))
        if not max(held, default=0.0) <= memory.room(stage):
            yield f"memory: a worker of stage {stage} holds more than it has, {memory.capacity[stage]:,.0f}"


def _deltas(memory: Memory, stage: int) -> dict[str, float]:
    return {letter: memory.delta(kind, stage) for kind, letter in LETTERS.items()}


def _period(schedule: CodedSchedule, stages: Sequence[LaneOperations], tolerance: float) -> Iterator[str]:
    period = schedule.period
    if not schedule.problem.technique.staggered and not abs(period - schedule.makespan) <= tolerance:
        yield f"period: {period:g}, but without the staggered optimizer it is the makespan, {schedule.makespan:g}"
    for stage, operations in enumerate(stages):
        if not operations.starts[0] + period >= operations.end - tolerance:
            yield (
                f"period: the next iteration begins stage {stage} at {operations.starts[0] + period:g}, before the "
                f"stage's STEP ends at {operations.end:g}"
            )
