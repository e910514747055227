"""Lanes: a pipeline's worth of live workers, and the one program that all lanes share.

Concept: D pipelines in which some workers have failed still have n whole *lanes*, n = min over the stages of the live
workers there: sets of one live worker of each stage. If the D * M micro-batches are dealt evenly to them and each stays
in its lane from the first stage to the last, all lanes do the same work in the same order at the same times: ceil(D * M
/ n) micro-batches, or one fewer. The plan of one lane, for a grid of one pipeline without failures, is then the plan of
all, whatever n is.

Which workers and micro-batches a lane has is a formula, so that no plan has to list them (:class:`LanePlaces`). In
files a lane is coded in runs: the steady state of a pipeline is one pattern many times, written as repeated words,
``"64F 130FBW B"``, and micro-batches come in the order of their numbers, written as runs, ``[[first, count], ...]``.

Contract: immutable. The kinds of a stage's operations, in order, with the numbers of their micro-batches within the
lane; times as the idle time before an operation, in the unit of the costs, where there is any. An operation takes what
the costs say. Decoding takes place by stage, when it is asked for. Damaged code raises ValueError, and decodes to no
more items than are asked for, so that a damaged file cannot take all memory.

Must not know: how a lane's plan was made.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain
from typing import Any

from lightning_recycle.errors import PlanningError
from lightning_recycle.planning.grid import Grid, Microbatch, Op, OpKind, ScheduledOp, Worker
from lightning_recycle.planning.problem import Problem
from lightning_recycle.planning.schedule import Schedule

__all__ = ["LETTERS", "Lane", "LaneOperations", "LanePlaces", "lane_problem", "lanes_of"]

_COLLECTIVE = (OpKind.REDUCE, OpKind.STEP)
LETTERS = {
    kind: kind.value if len(kind.value) == 1 else "X"  # BW
    for kind in OpKind
    if kind not in _COLLECTIVE
}
"""A letter for each kind of operation on a micro-batch: its name, and X for BW."""
_KINDS = {letter: kind for kind, letter in LETTERS.items()}
_DIGITS = 13  # of the makespan that an idle time keeps; what is beyond is rounding
# A letter five times or more; else a word of up to eight letters twice or more; else one letter.
_REPEATED = re.compile(r"([A-Z])\1{4,}|([A-Z]{2,8}?)\2+|[A-Z]")
_WORD = re.compile(r"([1-9][0-9]*)?([A-Z]+)")


def lanes_of(problem: Problem) -> int:
    """How many lanes there are: the live workers of the stage with the fewest."""
    return min(problem.live_counts())


def lane_problem(problem: Problem) -> Problem:
    """The problem of a lane: one pipeline without failures, with as many micro-batches as the fullest lane runs.

    Raises:
        PlanningError: when workers differ in speed; then their lanes do, too.
    """
    if problem.worker_factors:
        raise PlanningError("workers of unequal speed have no common plan: plan each operation on its own.")
    most = -(-problem.grid.global_microbatches // lanes_of(problem))
    return replace(problem, grid=Grid(1, problem.grid.stages, most), failed=frozenset())


@dataclass(frozen=True, slots=True)
class LaneOperations:
    """The operations on micro-batches of one stage of a lane, decoded, in order; then come REDUCE and STEP.

    Args:
        kinds: a letter each.
        numbers: of their micro-batches.
        of_kind: by letter, the numbers of the operations of that kind, in order.
        starts: times, as are ``ends``.
        ends: when they end.
        reduce: when REDUCE starts.
        step: when STEP starts.
        end: when STEP ends.
    """

    kinds: str
    numbers: list[int]
    of_kind: dict[str, list[int]]
    starts: list[float]
    ends: list[float]
    reduce: float
    step: float
    end: float


@dataclass(frozen=True)
class Lane:
    """One lane's part of a plan; see :meth:`of` and :meth:`from_json` for how to make one.

    Args:
        problem: see :func:`lane_problem`.
        kinds: by stage, the operations on micro-batches, a letter each.
        numbers: by stage and letter, the numbers of their micro-batches, as runs ``(first, count)``.
        idle: by stage, ``(position, time)`` for each operation before which the worker is idle.
        reduce: by stage, when REDUCE starts.
    """

    problem: Problem
    kinds: tuple[str, ...]
    numbers: tuple[tuple[tuple[str, tuple[tuple[int, int], ...]], ...], ...]
    idle: tuple[tuple[tuple[int, float], ...], ...]
    reduce: tuple[float, ...]

    @classmethod
    def of(cls, schedule: Schedule) -> Lane:
        """The lane's part of a plan for one pipeline. Its times may differ by rounding."""
        problem, stages = schedule.problem, range(schedule.grid.stages)
        digits = _DIGITS - max(0, math.ceil(math.log10(max(schedule.makespan, 1.0))))
        kinds, numbers, idle, reduce = [], [], [], []
        for stage in stages:
            scheduled = schedule.workers[Worker(0, stage)]
            own = [each for each in scheduled if each.op.microbatch is not None]
            letters = "".join(LETTERS[each.op.kind] for each in own)
            of_kind: dict[str, list[int]] = {}
            gaps, at = [], 0.0
            for position, (letter, each) in enumerate(zip(letters, own, strict=True)):
                of_kind.setdefault(letter, []).append(each.op.microbatch.index)  # type: ignore[union-attr]
                # Measured from the decoded time, so that rounding does not add up.
                gap = max(0.0, round(each.start - at, digits))
                if gap:
                    gaps.append((position, gap))
                at = at + gap + problem.costs.of(each.op.kind, stage)
            kinds.append(letters)
            runs = ((letter, _encode_numbers(found)) for letter, found in sorted(of_kind.items()))
            numbers.append(tuple((letter, tuple((first, count) for first, count in found)) for letter, found in runs))
            idle.append(tuple(gaps))
            started = next(each.start for each in scheduled if each.op.kind is OpKind.REDUCE)
            reduce.append(max(at, round(started, digits)))
        return cls(problem, tuple(kinds), tuple(numbers), tuple(idle), tuple(reduce))

    @property
    def microbatches(self) -> int:
        """How many micro-batches the lane runs."""
        return self.problem.grid.microbatches

    def operations(self, stage: int) -> LaneOperations:
        """What the lane's worker of ``stage`` runs."""
        found = self._decoded.get(stage)
        if found is None:
            found = self._decoded[stage] = self._decode(stage)
        return found

    @cached_property
    def _decoded(self) -> dict[int, LaneOperations]:
        return {}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_decoded"}

    def _decode(self, stage: int) -> LaneOperations:
        kinds, costs = self.kinds[stage], self.problem.costs
        of_kind = {letter: _decode_numbers(runs, len(kinds)) for letter, runs in self.numbers[stage]}
        following = {letter: iter(numbers) for letter, numbers in of_kind.items()}
        numbers = list(map(next, map(following.__getitem__, kinds)))
        durations = {letter: costs.of(kind, stage) for letter, kind in _KINDS.items()}
        gaps = [0.0] * len(kinds)
        for position, gap in self.idle[stage]:
            gaps[position] = gap
        # Idle, busy, idle, busy, ...: the running sum is start, end, start, end, ...
        times = list(accumulate(chain.from_iterable(zip(gaps, map(durations.__getitem__, kinds), strict=True))))
        reduce = self.reduce[stage]
        step = reduce + costs.of(OpKind.REDUCE, stage)
        end = step + costs.of(OpKind.STEP, stage)
        return LaneOperations(kinds, numbers, of_kind, times[0::2], times[1::2], reduce, step, end)

    def schedule(self) -> Schedule:
        """The plan for one pipeline."""
        stages = range(self.problem.grid.stages)
        names = [Microbatch(0, number) for number in range(self.microbatches)]
        workers = {Worker(0, stage): self.scheduled(stage, names) for stage in stages}
        return Schedule(self.problem, workers, self.period)

    def program(self, stage: int, names: Sequence[Microbatch]) -> tuple[Op, ...]:
        """What the worker of ``stage`` executes, in order.

        Args:
            stage: the stage.
            names: the lane's micro-batches; if they are fewer than the lane's program has, the rest is left out.
        """
        operations, count = self.operations(stage), len(names)
        pairs = zip(map(_KINDS.__getitem__, operations.kinds), operations.numbers, strict=True)
        own = [Op(kind, stage, names[number]) for kind, number in pairs if number < count]
        return *own, Op(OpKind.REDUCE, stage), Op(OpKind.STEP, stage)

    def scheduled(self, stage: int, names: Sequence[Microbatch]) -> tuple[ScheduledOp, ...]:
        """Like :meth:`program`, with times."""
        operations, count = self.operations(stage), len(names)
        times = zip(operations.starts, operations.ends, operations.numbers, strict=True)
        own = [(start, end) for start, end, number in times if number < count]
        reduce, step = (operations.reduce, operations.step), (operations.step, operations.end)
        program = self.program(stage, names)
        return tuple(ScheduledOp(op, *time) for op, time in zip(program, [*own, reduce, step], strict=True))

    @cached_property
    def period(self) -> float:
        """Time between two iterations of all lanes, whatever their number."""
        if not self.problem.technique.staggered:
            return self.makespan
        return max(operations.end - operations.starts[0] for operations in self._all())

    @cached_property
    def makespan(self) -> float:
        """From the first start to the last end of an iteration."""
        return max(each.end for each in self._all()) - min(each.starts[0] for each in self._all())

    def _all(self) -> Iterator[LaneOperations]:
        return map(self.operations, range(self.problem.grid.stages))

    # ------------------------------------------------------------------ files

    def to_json(self) -> dict[str, Any]:
        """The lane in plain data, without its problem."""
        return {
            "microbatches": self.microbatches,
            "stages": [
                {
                    "ops": _encode_letters(kinds),
                    "microbatch": {letter: [list(run) for run in runs] for letter, runs in numbers},
                    "idle": [[position for position, _ in idle], [gap for _, gap in idle]],
                    "reduce": reduce,
                }
                for kinds, numbers, idle, reduce in zip(self.kinds, self.numbers, self.idle, self.reduce, strict=True)
            ],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], problem: Problem) -> Lane:
        """The inverse of :meth:`to_json`; ``problem`` is the lane's.

        Raises:
            KeyError, TypeError, ValueError, PlanningError: when ``data`` is no lane for ``problem``.
        """
        grid = problem.grid
        most = len(OpKind) * grid.microbatches
        stages = data["stages"]
        if data["microbatches"] != grid.microbatches or len(stages) != grid.stages:
            raise PlanningError(f"its lane is not one of {grid.stages} stages and {grid.microbatches} micro-batches")
        kinds, numbers, idle, reduce = [], [], [], []
        for stage in stages:
            letters = _decode_letters(stage["ops"], most)
            runs = tuple(
                (letter, tuple((int(first), int(count)) for first, count in stage["microbatch"][letter]))
                for letter in sorted(stage["microbatch"])
            )
            positions, gaps = stage["idle"]
            counts = {letter: letters.count(letter) for letter in set(letters)}
            if counts != {letter: sum(count for _, count in of_letter) for letter, of_letter in runs}:
                raise PlanningError(f"its lane's operations and their micro-batches differ: {counts}")
            if not counts.keys() <= _KINDS.keys() or not all(0 <= position < len(letters) for position in positions):
                raise PlanningError(f"its lane has operations {sorted(counts)}, idle before one that it lacks")
            kinds.append(letters)
            numbers.append(runs)
            idle.append(tuple(zip(positions, map(float, gaps), strict=True)))
            reduce.append(float(stage["reduce"]))
        return cls(problem, tuple(kinds), tuple(numbers), tuple(idle), tuple(reduce))


class LanePlaces:
    """Which workers a lane has, and which micro-batches: O(D S) to make, O(1) to ask.

    With n lanes, the first n pipelines are the lanes, in their order; the others give their workers. Lane l runs
    its home's micro-batches, (l, 0) to (l, M - 1), and then as many of those of the others as are its share. If worker
    (l, s) has failed, the lane's worker of stage s is one of the others' that are alive: there are enough, because
    stage s has at least n live workers. Workers that are left over have nothing to do but REDUCE and STEP.

    The (D - n) M micro-batches of the others are numbered by pipeline and index and dealt in runs: with q, r =
    divmod(D M, n), lane l gets q - M of them, and one more if l < r, so that

        number x of the others is in lane  x // (q - M + 1)                        if x < r (q - M + 1)
                                           r + (x - r (q - M + 1)) // (q - M)      otherwise.

    That the first pipelines stay keeps the leaders of stages at work, and as pipelines are given up from the last on,
    one failure more changes few lanes.

    Args:
        grid: the grid.
        failed: the dead workers.
        lanes: the number of lanes, at most the live workers of any stage.
    """

    def __init__(self, grid: Grid, failed: Collection[Worker], lanes: int) -> None:
        self.grid = grid
        self.lanes = lanes
        self._failed = frozenset(failed)
        self._share, self._longer = divmod(grid.global_microbatches, lanes)
        self._extra = self._share - grid.microbatches  # of the micro-batches of the others, at least

    @cached_property
    def _adopted(self) -> dict[Worker, int]:
        """The lanes of the workers outside their home, and by (lane, stage) who replaces the failed worker there."""
        return {worker: place.pipeline for place, worker in self._substitutes.items()}

    @cached_property
    def _substitutes(self) -> dict[Worker, Worker]:
        """For each failed worker of a lane's home, who is in its place."""
        found = {}
        free = [self.lanes] * self.grid.stages
        for place in sorted(self._failed):
            if place.pipeline >= self.lanes:
                break
            stage = place.stage
            while Worker(free[stage], stage) in self._failed:
                free[stage] += 1
            found[place] = Worker(free[stage], stage)
            free[stage] += 1
        return found

    def lane(self, worker: Worker) -> int | None:
        """The lane of a live worker; None if it is in none."""
        return worker.pipeline if worker.pipeline < self.lanes else self._adopted.get(worker)

    def worker(self, lane: int, stage: int) -> Worker:
        """The worker of ``stage`` of a lane."""
        home = Worker(lane, stage)
        return self._substitutes.get(home, home)

    def count(self, lane: int) -> int:
        """How many micro-batches a lane runs."""
        return self._share + (lane < self._longer)

    def microbatches(self, lane: int) -> list[Microbatch]:
        """The micro-batches of a lane, in the order of their numbers within it."""
        own = self.grid.microbatches
        first = lane * self._extra + min(lane, self._longer)
        others = range(first, first + self.count(lane) - own)
        return [
            *(Microbatch(lane, index) for index in range(own)),
            *(Microbatch(self.lanes + number // own, number % own) for number in others),
        ]

    def lane_of(self, microbatch: Microbatch) -> int:
        """The lane that runs a micro-batch."""
        if microbatch.pipeline < self.lanes:
            return microbatch.pipeline
        number = (microbatch.pipeline - self.lanes) * self.grid.microbatches + microbatch.index
        in_longer = self._longer * (self._extra + 1)
        if number < in_longer:
            return number // (self._extra + 1)
        return self._longer + (number - in_longer) // self._extra


def _encode_letters(letters: str) -> str:
    """Words and how often each comes, e.g. ``"FFFFFBWBWB"`` as ``"5F 2BW B"``."""
    words: list[str] = []
    literal = ""
    for match in _REPEATED.finditer(letters):
        word = match.group(1) or match.group(2)
        if word is None:
            literal += match.group()
            continue
        if literal:
            words.append(literal)
            literal = ""
        words.append(f"{len(match.group()) // len(word)}{word}")
    return " ".join([*words, literal] if literal else words)


def _decode_letters(text: str, most: int) -> str:
    """The inverse of :func:`_encode_letters`.

    Raises:
        ValueError: when ``text`` is no such code, or stands for more than ``most`` letters.
    """
    parts, left = [], most
    for word in text.split():
        match = _WORD.fullmatch(word)
        if match is None or len(word) > most + 20:
            raise ValueError(f"{word[:40]!r} is no repeated word")
        count, unit = int(match.group(1) or 1), match.group(2)
        left -= count * len(unit)
        if left < 0:
            raise ValueError(f"{text[:40]!r}... stands for more than {most} letters")
        parts.append(unit * count)
    return "".join(parts)


def _encode_numbers(numbers: Iterable[int]) -> list[list[int]]:
    """Runs of consecutive numbers, as ``[first, count]``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][0] + runs[-1][1]:
            runs[-1][1] += 1
        else:
            runs.append([number, 1])
    return runs


def _decode_numbers(runs: Sequence[Sequence[int]], most: int) -> list[int]:
    """The inverse of :func:`_encode_numbers`.

    Raises:
        ValueError: when a run is none, or there are more than ``most`` numbers.
    """
    numbers: list[int] = []
    for first, count in runs:
        if count < 1 or len(numbers) + count > most:
            raise ValueError(f"the run [{first}, {count}] is empty or leads to more than {most} numbers")
        numbers += range(first, first + count)
    return numbers
