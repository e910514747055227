"""Monitor of a run: views of the coordinator, made in its thread and handed to others.

Concept: the coordinator's state belongs to its thread. A reader leaves a wish and wakes the loop, which makes an
immutable view between two messages, for a fiftieth of its time at most (:class:`Views`). Without readers nothing is
made. :class:`Monitor` computes what takes long (times of the plan, its picture) outside of that thread.

Contract: callable from any thread; what takes long is kept until the plan changes or some seconds have passed, and left
out where a plan is too large for that.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from lightning_recycle.control.monitoring.status import ProcessLocation, Status
from lightning_recycle.control.network.addresses import machine_name
from lightning_recycle.control.network.handshake import VERSION
from lightning_recycle.errors import ControlPlaneError, PlanningError
from lightning_recycle.planning.schedule import Schedule

log = logging.getLogger(__name__)

_MOST_TIMED, _MOST_DRAWN = 20_000, 4_000  # operations: about 0.1 s of this process' interpreter
_KEPT_SECONDS = 5.0

Made = TypeVar("Made")


class NothingToShow(ControlPlaneError):
    """There is no run, no plan, or it is too large to be drawn."""


class Monitor:
    """Shows the runs of this process, one after the other.

    Args:
        name: what they are called.
        samples_per_step: how many samples a step has, if that is known.
        awaits_runs: whether workers can come while there is no run.
    """

    def __init__(self, name: str, samples_per_step: int | None = None, awaits_runs: bool = False) -> None:
        self.awaits_runs = awaits_runs
        self._name = name
        self._samples = samples_per_step
        self._place = ProcessLocation(machine_name(), os.getpid())
        self._ask: Callable[[], RunView] | None = None  # how the run is
        self._lock = threading.Lock()  # computing something twice at the same time is of no use
        self._kept: dict[str, tuple[int, float, object]] = {}  # by what it is: number of the plan, when, the value

    def show(self, ask: Callable[[], RunView] | None) -> None:
        """From now on shows the run that ``ask`` asks, which has been started; None between two runs."""
        self._ask = ask
        with self._lock:
            self._kept.clear()

    def status(self) -> Status:
        """How the run is.

        Raises:
            NothingToShow: if there is none.
            ControlPlaneError: if its coordinator does not answer.
        """
        view = self._view()
        predicted = self._of_plan("period", view, _MOST_TIMED, lambda schedule: schedule.period)
        speed = view.status.throughput
        per_second = speed.steps_per_second
        samples = per_second * self._samples if per_second is not None and self._samples is not None else None
        return replace(
            view.status,
            throughput=replace(speed, predicted_step_seconds=predicted, samples_per_second=samples),
            name=self._name,
            coordinator=self._place,
            version=VERSION,
        )

    def schedule_svg(self) -> str:
        """The plan that runs, drawn with the times that its operations take.

        Raises:
            NothingToShow: if there is none yet, or it is too large.
            ControlPlaneError: if its coordinator does not answer.
        """
        from lightning_recycle.visualize.gantt import gantt_svg  # not needed to train

        drawn = self._of_plan("picture", self._view(), _MOST_DRAWN, lambda schedule: gantt_svg(schedule, unit="s"))
        if drawn is None:
            raise NothingToShow(f"No plan has been measured yet, or it has more than {_MOST_DRAWN:,} operations.")
        return drawn

    def _view(self) -> RunView:
        if self._ask is None:
            if self.awaits_runs:
                raise NothingToShow("No run is going on: it waits for workers.")
            raise NothingToShow("No run is going on: the workers are starting, or the run has ended.")
        return self._ask()

    def _of_plan(self, what: str, view: RunView, most: int, make: Callable[[Schedule], Made]) -> Made | None:
        """Predictions of the plan with measured times; None without one, or if it is too large."""
        plan, timed = view.status.plan, view.timed
        if plan is None or timed is None or plan.operations > most:
            return None
        with self._lock:
            number, made, value = self._kept.get(what, (-1, 0.0, None))
            if number != plan.number or time.monotonic() - made > _KEPT_SECONDS:
                try:
                    value = make(timed())
                except PlanningError:  # not all stages have measured all operations of this plan yet
                    value = None
                self._kept[what] = plan.number, time.monotonic(), value
            return value  # type: ignore[return-value]


_LEAST_SECONDS = 0.25  # between two views
_SHARE = 50  # between two views, times the seconds that one takes: with 2,000 workers some 10 ms

View = TypeVar("View")


@dataclass(frozen=True)
class RunView:
    """A run as its coordinator's thread sees it.

    Args:
        status: how it is; what takes long to compute is left out.
        timed: gives the plan that runs with the times that its operations take; for other threads, as it may take long.
            None if there is no plan, or nothing was measured.
    """

    status: Status
    timed: Callable[[], Schedule] | None


class Views(Generic[View]):
    """Hands out what ``make`` returns.

    Args:
        make: makes a view; called in the loop's thread alone.
        wake: lets the loop call :meth:`answer` soon; called in any thread.
    """

    def __init__(self, make: Callable[[], View], wake: Callable[[], None]) -> None:
        self._make = make
        self._wake = wake
        self._changed = threading.Condition()
        self._wanted = False
        self._closed = False
        self._newest: View | None = None
        self._error: Exception | None = None
        self._number, self._fresh_until = 0, 0.0

    def ask(self, timeout: float = 2.0) -> View:
        """A view that is about a quarter of a second old at most; after :meth:`close` the last one. In any thread.

        Raises:
            ControlPlaneError: if the loop does not answer within ``timeout`` seconds, or could not make a view.
        """
        with self._changed:
            if not self._closed and time.monotonic() >= self._fresh_until:
                number, wanted, self._wanted = self._number, self._wanted, True
                if not wanted:
                    self._wake()
                if not self._changed.wait_for(lambda: self._number > number, timeout):
                    raise ControlPlaneError(f"The coordinator does not answer: it was asked {timeout:g} s ago.")
            if self._error is not None or self._newest is None:
                raise ControlPlaneError(f"The coordinator could not say how it is: {self._error}")
            return self._newest

    def answer(self) -> None:
        """In the loop's thread: makes a view if one is wanted."""
        if self._wanted:
            self._publish()

    def close(self) -> None:
        """In the loop's thread: the loop ends."""
        self._publish()
        with self._changed:
            self._closed = True

    def _publish(self) -> None:
        began = time.monotonic()
        made, error = self._newest, None
        try:
            made = self._make()
        except Exception as problem:  # whoever only looks must not end a run
            log.exception("The status of the run could not be made")
            error = problem
        with self._changed:
            self._newest, self._error = made, error
            now = time.monotonic()
            self._number, self._wanted = self._number + 1, False
            self._fresh_until = now + max(_LEAST_SECONDS, _SHARE * (now - began))
            self._changed.notify_all()
