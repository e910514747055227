"""The interval of checkpoints, from their cost and the rate of failures.

Concept: Young's formula. Saving every sqrt(2 cost mtbf) seconds, ``mtbf`` being the mean time between failures, loses
the least time to checkpoints and to steps that are run again. The cost is the time for which a checkpoint holds up
training. An interval is never less than twice the time that writing takes, so that checkpoints do not pile up.

A lost worker counts as a failure, and so does each start from a checkpoint, as something has ended the run before. Most
lost workers need no checkpoint, but losses come together more often than by chance.

Contract: all workers follow the same facts, so they have the same interval.

Must not know: how a checkpoint is written.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

_WORKER_HOURS_PER_FAILURE = 50_700.0
"""Before the first failure: 419 unplanned interruptions in 54 days of 16,384 GPUs (Llama 3, arXiv 2407.21783)."""


@dataclass(frozen=True)
class SaveFacts:
    """A worker's measurements, in seconds.

    Args:
        stalled: for which the checkpoint has held up training.
        writing: that it took to be written meanwhile.
        step: from one step to the next, with all that comes between them.
        trained: of training, in runs before this one, too.
    """

    stalled: float
    writing: float
    step: float
    failures: int
    trained: float


def steps_between_saves(facts: Iterable[SaveFacts], workers: int) -> tuple[int, str]:
    """The best number of steps between checkpoints, and the reason in words."""
    facts = list(facts)
    longest = max(facts, key=lambda found: (found.trained, found.failures))
    cost, writing = max(found.stalled for found in facts), max(found.writing for found in facts)
    expected = 3600 * _WORKER_HOURS_PER_FAILURE / workers
    mtbf = longest.trained / longest.failures if longest.failures else max(expected, longest.trained)
    seconds = max(math.sqrt(2 * cost * mtbf), 2 * writing)
    why = (
        f"it holds up training for {cost:.3g} s and is written in {writing:.3g} s, a step takes {longest.step:.3g} s,"
        f" and there is a failure every {mtbf / 3600:.3g} hours ({longest.failures} so far)"
    )
    return max(1, round(seconds / longest.step)), why


class SaveInterval:
    """A worker's view of what decides on the interval of the run's checkpoints.

    Attributes:
        steps: the interval; 0 if it is that of the callbacks.
    """

    def __init__(self, count: Callable[[], float]) -> None:
        self.steps = 0
        self._count = count
        self._began, self._first_step = time.monotonic(), 0
        self._failures, self._trained = 0.0, 0.0  # before this worker began, less what ``count`` was then

    def begin(self, step: int) -> None:
        """The training of this worker begins with ``step``."""
        self._began, self._first_step = time.monotonic(), step

    def state(self) -> dict[str, float]:
        """Interval, failures and seconds of training, for a checkpoint or a replacement."""
        trained, counted = self._trained + time.monotonic() - self._began, self._count()
        failures = self._failures + counted
        return {"steps": self.steps, "failures": failures, "trained": trained, "counted": counted}

    def load(self, state: Mapping[str, float], of_peer: bool) -> None:
        """Takes over the state of a peer, or of an earlier run, which has ended."""
        self.steps, self._trained = int(state["steps"]), state["trained"]
        self._failures = state["failures"] + (-state["counted"] if of_peer else 1)

    def facts(self, stalled: float, writing: float, step: int) -> SaveFacts:
        """This worker's measurements after ``step`` steps."""
        seconds, state = time.monotonic() - self._began, self.state()
        per_step = seconds / max(1, step - self._first_step)
        return SaveFacts(stalled, writing, per_step, round(state["failures"]), state["trained"])
