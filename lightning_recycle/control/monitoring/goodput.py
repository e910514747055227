"""Goodput: a run's worker-seconds by the simulator's causes.

Between two entries of the record the run is in one *phase*, and each position spends the time on one cause of
:class:`lightning_recycle.simulation.Cause`:

============== =============================================================================================
useful         F, B and W of steps that count, each once: the steps times the mean seconds of their operations
bubble         the rest of training time: pipeline bubbles, communication, REDUCE, STEP, hooks, checkpoints
idle           alive without taking part: until all are connected for the first time ("starting"), and spares
redone         computations of a step that runs again ("interrupted"), forwards run twice ("recomputation")
reconfiguring  from a death until all are connected again ("recovering"), waits for roster changes ("joining")
failed         vacant positions ("vacant")
============== =============================================================================================

Contract: pure, no clock: times are arguments, in seconds since the epoch. All seconds are worker-seconds, never shrink,
and add up to (positions + spares) times the time up to the newest commit, or up to now outside of training. O(1) for
each event.

Must not know: the simulator, which takes a moment to import. A test compares the names.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_recycle.control.monitoring.history import Event

PARTS: Mapping[str, tuple[str, ...]] = {
    "useful": ("training",),
    "bubble": ("training",),
    "idle": ("starting", "spare"),
    "redone": ("interrupted", "recomputation"),
    "reconfiguring": ("recovering", "joining"),
    "failed": ("vacant",),
}
"""The values of :class:`lightning_recycle.simulation.Cause`, and what they are divided into."""


class Phase(str, Enum):
    """Phase of a run."""

    STARTING = "starting"
    TRAINING = "training"
    RECOVERING = "recovering"
    JOINING = "joining"
    """All wait at a step boundary for a change of the roster."""


class Goodput:
    """The account of a run with ``positions`` workers that began at ``now``."""

    def __init__(self, positions: int, now: float) -> None:
        self.phase = Phase.STARTING
        self._positions = positions
        self._live = positions
        self._spares = 0
        self._spares_since = now
        self._mark = now  # everything before is accounted for
        self._seconds: dict[tuple[str, str], float] = {}
        self._training = 0.0  # that is not divided into useful time and bubbles yet
        self._steps = 0  # in it
        self._interrupted = 0.0  # of a step of which nobody knows yet whether it runs again
        self._silent_since: dict[tuple[int, int] | None, float] = {}

    def seconds(self, now: float) -> dict[str, dict[str, float]]:
        """Worker-seconds by cause and phase; all of them are there."""
        if self.phase is not Phase.TRAINING:  # otherwise a failure may still show that the step is lost
            self._pass(now)
        self.spares_are(self._spares, now)
        return {
            cause: {phase: self._seconds.get((cause, phase), 0.0) for phase in phases}
            for cause, phases in PARTS.items()
        }

    def spares_are(self, count: int, now: float) -> None:
        """Sets the number of waiting spares; called again and again."""
        self._add("idle", "spare", self._spares * max(0.0, now - self._spares_since))
        self._spares, self._spares_since = count, now

    def divide(self, useful: float, again: float = 0.0) -> None:
        """Divides the steps since the previous call.

        ``useful``: worker-seconds of F, B and W in a step, each once. ``again``: worker-seconds of repeated
        computations in a step.
        """
        if not self._steps:
            return
        useful = min(self._training, self._steps * useful)
        again = min(self._training - useful, self._steps * again)
        self._add("useful", "training", useful)
        self._add("redone", "recomputation", again)
        self._add("bubble", "training", self._training - useful - again)
        self._training, self._steps = 0.0, 0

    def happened(self, event: Event, live: int, joining: bool) -> None:
        """Takes in an event; ``live`` workers are in, some perhaps still ``joining``."""
        time, worker, details, seconds = event.time, event.worker, event.details, event.seconds or 0.0
        match event.kind:
            case "step":
                self._pass(time)
                self._steps += 1
            case "suspected" | "evicted" if "seconds" in details:
                self._silent_since[worker] = time - details["seconds"]
            case "cleared":
                self._silent_since.pop(worker, None)
                if self.phase is Phase.TRAINING:  # all have waited for it
                    self._pass(time - seconds)
                    self.phase = Phase.RECOVERING
                    self._pass(time)
                    self.phase = Phase.TRAINING
            case "failure":
                died = min(time - seconds, self._silent_since.pop(worker, time))
                self._interrupt(died)
                self._live = live
                self._pass(time)
            case "disturbance":
                self._interrupt(time)
            case "paused":
                self._pass(time)
                self.phase = Phase.JOINING
            case "resumed":
                if details.get("redone"):
                    self._add("redone", "interrupted", self._interrupted)
                else:
                    self._training += self._interrupted
                self._interrupted = 0.0
            case "regrouped" | "rejoined" | "replanned" if not joining:
                self._pass(time)
                self.phase = Phase.TRAINING
        if live != self._live:
            self._pass(time)
            self._live = live

    def _interrupt(self, time: float) -> None:
        """Training stops at ``time``; work since the newest commit may be lost."""
        if self.phase is Phase.TRAINING:
            trained = self._training
            self._pass(time)
            self._interrupted += self._training - trained
            self._training = trained
            self.phase = Phase.RECOVERING
        else:
            self._pass(time)

    def _pass(self, time: float) -> None:
        """Accounts for the time up to ``time``, spent in one phase by the same workers."""
        passed = max(0.0, time - self._mark)  # a clock may have been set back
        self._mark = max(self._mark, time)
        self._add("failed", "vacant", (self._positions - self._live) * passed)
        spent = self._live * passed
        if self.phase is Phase.TRAINING:
            self._training += spent
        else:
            self._add("idle" if self.phase is Phase.STARTING else "reconfiguring", self.phase.value, spent)

    def _add(self, cause: str, phase: str, seconds: float) -> None:
        if seconds:
            self._seconds[cause, phase] = self._seconds.get((cause, phase), 0.0) + seconds
