"""How long operations take in each stage, and how exactly that is known. Pure.

Concept: each worker tells with each step how long its operations took in it. The median over workers and steps is the
level of a stage. It may be wrong by four standard errors of a median: on a machine that is busy with something else,
stages that take equally long seem to differ by as much.

Must not know: clocks, messages, plans.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import median, stdev

__all__ = ["StageLevels"]

_SIGNIFICANCE = 4.0  # standard errors
_OF_A_MEDIAN = 1.2533  # times the standard error of a mean
_KINDS = ("F", "B", "W", "BW")
_LEAST = 4  # measurements from which a deviation says something
_KEPT = 200  # measurements of a stage


class StageLevels:
    """Seconds by kind of operation, of each stage."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, str], deque[float]] = {}
        self._sums: dict[int, deque[float]] = {}  # logarithms of what a micro-batch takes altogether

    def observe(self, stage: int, seconds: Mapping[str, float]) -> None:
        """A worker of ``stage`` took ``seconds`` on average in a step, by kind of operation."""
        known = {kind: seconds[kind] for kind in _KINDS if seconds.get(kind, 0.0) > 0.0}
        backward = known.get("BW", known.get("B", 0.0) + known.get("W", 0.0))
        if "F" not in known or not backward:  # it ran nothing of one kind in this step
            return
        for kind, value in known.items():
            self._seconds.setdefault((stage, kind), deque(maxlen=_KEPT)).append(value)
        self._sums.setdefault(stage, deque(maxlen=_KEPT)).append(math.log(known["F"] + backward))

    def forget(self) -> None:
        """From now on operations are others."""
        self._seconds, self._sums = {}, {}

    def of(self, stage: int) -> dict[str, float]:
        """Median seconds by kind of operation, as far as they are known."""
        return {kind: median(values) for (place, kind), values in self._seconds.items() if place == stage}

    def doubt(self, stages: int) -> float:
        """By which fraction the time of one of ``stages`` stages may be another one relative to that of the others;
        infinity as long as too little is known.
        """
        series = [self._sums.get(stage, ()) for stage in range(stages)]
        if any(len(values) < _LEAST for values in series):
            return math.inf
        return max(_SIGNIFICANCE * _OF_A_MEDIAN * stdev(values) / math.sqrt(len(values)) for values in series)
