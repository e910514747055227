"""What the record of a run amounts to so far: counts, the newest events, rates, and where the time went.

Concept: a run may record millions of steps, and whoever asks how it is wants an answer at once. So each event is added
up when it happens.

Contract: O(1) for each event, and bounded in size however long the run. No clock: events have their times.

Must not know: the coordinator, who asks.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from typing import TYPE_CHECKING

from lightning_recycle.control.goodput import Goodput, Phase

if TYPE_CHECKING:
    from lightning_recycle.control.history import Event

__all__ = ["Digest", "Rates"]

_EVENTS_KEPT, _FAILURES_KEPT = 200, 20
_STEPS_OF_A_RATE = 64


class Rates:
    """Steps per second over the whole run, in at most ``limit`` intervals of equal length, which grows with the run.

    Attributes:
        began: seconds since the epoch.
        width: the seconds of an interval.
    """

    def __init__(self, began: float, limit: int = 240) -> None:
        self.began = began
        self.width = 1.0
        self._limit = limit
        self._counts: list[int] = []

    def step(self, time: float) -> None:
        """A step was committed."""
        self._reach(time)
        self._counts[-1] += 1

    def series(self, now: float) -> tuple[float, ...]:
        """Steps per second in each interval up to now, the oldest first; the newest one is not over."""
        self._reach(now)
        rates = [count / self.width for count in self._counts]
        rates[-1] = self._counts[-1] / max(0.5, now - self.began - (len(rates) - 1) * self.width)
        return tuple(rates)

    def _reach(self, time: float) -> None:
        wanted = max(0.0, time - self.began)
        while wanted >= self._limit * self.width:
            self._counts += [0] * (len(self._counts) % 2)
            self._counts = [first + second for first, second in zip(self._counts[::2], self._counts[1::2], strict=True)]
            self.width *= 2
        self._counts += [0] * (int(wanted / self.width) + 1 - len(self._counts))


class Digest:
    """Adds up the events of a run on ``positions`` positions that began at ``now`` (seconds since the epoch).

    Attributes:
        counts: how many events of each kind there were.
        events: the newest ones that are no steps, the oldest first.
        failures: the newest failures, the oldest first.
        suspected: since when a worker that is waited for is silent or stuck, and why, by position.
        step: the newest committed step; -1 if there is none.
        loss: its mean loss, if it is known.
        rates: steps per second over the whole run.
        goodput: where the workers' time went.
        found_by: who found the plan that runs, if it changed within a generation.
    """

    def __init__(self, positions: int, now: float) -> None:
        self.began = now
        self.counts: Counter[str] = Counter()
        self.events: deque[Event] = deque(maxlen=_EVENTS_KEPT)
        self.failures: deque[Event] = deque(maxlen=_FAILURES_KEPT)
        self.suspected: dict[tuple[int, int], tuple[float, str]] = {}
        self.step = -1
        self.loss: float | None = None
        self.rates = Rates(now)
        self.goodput = Goodput(positions, now)
        self.found_by = ""
        self._durations: deque[float] = deque(maxlen=_STEPS_OF_A_RATE)  # of steps in a row that nothing disturbed
        self._follows = False  # the next step follows another one, and nothing happened in between

    @property
    def phase(self) -> Phase:
        return self.goodput.phase

    @property
    def step_seconds(self) -> float | None:
        """Mean seconds of the newest steps under the present plan; None if there are none."""
        return sum(self._durations) / len(self._durations) if self._durations else None

    def add(self, event: Event, live: int, joining: bool) -> None:
        """Something happened; ``live`` workers are in, and whether some of them are still given their state."""
        self.counts[event.kind] += 1
        details: Mapping[str, object] = event.details
        self.goodput.happened(
            event.kind,
            event.time,
            live,
            joining=joining,
            worker=event.worker,
            seconds=event.seconds,
            details=event.details,
        )
        if event.kind == "step":
            loss = details.get("loss")
            self.step, self.loss = event.step, loss if isinstance(loss, float) else None
            self.rates.step(event.time)
            if self._follows and event.seconds is not None:
                self._durations.append(event.seconds)
            self._follows = True
            return
        self.events.append(event)
        match event.kind:
            case "failure":
                self.failures.append(event)
            case "suspected" if "waits" in details and event.worker is not None:
                seconds = details.get("seconds")
                since = event.time - (seconds if isinstance(seconds, (int, float)) else 0.0)
                self.suspected[event.worker] = since, str(details.get("cause", ""))
            case "resumed" | "replanned":
                self.found_by = str(details.get("found_by", details.get("plan", "")))
                self._durations.clear()
        if event.kind in ("cleared", "failure", "left", "moved") and event.worker is not None:
            self.suspected.pop(event.worker, None)
        if event.kind in ("resumed", "paused", "cleared"):
            self._follows = False
