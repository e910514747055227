"""A lower bound from three stages at once: none of them can have all that suits it.

Concept: consider an early stage e, a middle stage a and a late stage l, and the moment that is ``delta`` before the
STEP of stage e ends. The later that moment is,

- the more forwards must have passed a: those that have not have all of their work at l still to come;
- the more backwards must have passed a: those that have not have their backward at e still to come;
- but a, which has had only so much time, has had to run both.

Where a has lost more workers than e and l, this exceeds what each of the stages enforces on its own.

Contract: valid for any routing; pure. The proof is in ``docs/planner.md`` ("Lower bounds").

Must not know: problems, schedules.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

__all__ = ["StageWork", "flow_bound"]

_MOST_CHOICES = 6  # of early stages, and of late ones: the bound holds for any choice, and costs S times their product


@dataclass(frozen=True, slots=True)
class StageWork:
    """What a stage has to do for each micro-batch, in the unit of the costs.

    Args:
        workers: how many workers the stage has.
        forward: shortest duration of an F.
        backward: shortest duration of a B, or of a BW if the backward is not decoupled.
        weight: shortest duration of a W; 0 if the backward is not decoupled.
        closing: from the end of the last gradient to the end of STEP.
        held: the most micro-batches that a worker holds at once.
    """

    workers: int
    forward: float
    backward: float
    weight: float
    closing: float
    held: int


def flow_bound(stages: Sequence[StageWork], communication: float, microbatches: int, *, staggered: bool) -> float:
    """A lower bound of the period, or, without the staggered optimizer, of the makespan; 0 for fewer than 3 stages."""
    to = list(accumulate((s.forward + communication for s in stages), initial=0.0))  # from stage 0 forward to s
    back = list(accumulate((s.backward + communication for s in stages), initial=0.0))  # and back
    best, count = 0.0, float(microbatches)
    for a in range(1, len(stages) - 1):
        middle = stages[a]
        for e in _spread(range(a)):
            early = stages[e]
            # From the end of B at a until that micro-batch's B at e can start, and from the last gradient to the end.
            from_middle = back[a] - back[e] - early.backward + early.closing
            arrival = to[a] - (to[e] if staggered else 0.0)
            for late in _spread(range(a + 1, len(stages))):
                # From the end of F at a until that of l can start; from the last B at l through e to the end.
                way = to[late] - to[a] - middle.forward + back[late] - back[e] + early.weight + early.closing
                forwards = _Rest(stages[late], way, count, first=False)
                backwards = _Rest(early, from_middle, count, first=True)
                for delta in (*forwards.corners(), *backwards.corners()):
                    passed, returned = forwards.passed(delta), backwards.passed(delta)
                    work = middle.forward * passed + middle.backward * returned
                    work += middle.weight * max(0.0, passed - middle.workers * middle.held)
                    if work > 0.0:
                        best = max(best, arrival + delta + work / middle.workers)
    return best


class _Rest:
    """How many micro-batches a stage can still deal with in the last ``delta``: what it needs for one of them, and what
    it needs in addition for each beyond those that its memory holds.

    Args:
        stage: the stage.
        lost: the part of ``delta`` in which it cannot.
        count: of all micro-batches.
        first: whether their B and W are to come, and beyond memory their F; or F and B, and beyond memory their W.
    """

    __slots__ = ("_beyond", "_count", "_each", "_lost", "_room", "_workers")

    def __init__(self, stage: StageWork, lost: float, count: float, *, first: bool) -> None:
        self._each = stage.backward + (stage.weight if first else stage.forward)
        self._beyond = stage.forward if first else stage.weight
        self._room = float(stage.workers * stage.held)
        self._workers, self._lost, self._count = stage.workers, lost, count

    def passed(self, delta: float) -> float:
        """The least number of micro-batches that must be past the middle stage, ``delta`` before the end."""
        time = self._workers * max(0.0, delta - self._lost)
        if time <= self._room * self._each:
            rest = time / self._each if self._each else self._count
        else:
            both = self._each + self._beyond
            rest = (time + self._room * self._beyond) / both if both else self._count
        return max(0.0, self._count - rest)

    def corners(self) -> Iterator[float]:
        """Where the slope of :meth:`passed` changes."""
        beyond = max(0.0, self._count - self._room)
        yield self._lost
        yield self._lost + (self._count * self._each + beyond * self._beyond) / self._workers
        if beyond:
            yield self._lost + self._room * self._each / self._workers


def _spread(stages: range) -> Iterable[int]:
    """At most ``_MOST_CHOICES`` of them, at even distances, the first and the last included."""
    if len(stages) <= _MOST_CHOICES:
        return stages
    return sorted({stages[i * (len(stages) - 1) // (_MOST_CHOICES - 1)] for i in range(_MOST_CHOICES)})
