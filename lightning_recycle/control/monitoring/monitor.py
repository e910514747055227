"""A run as it is shown: the coordinator's view, and what is computed from it outside of the coordinator's thread.

Contract: callable from any thread; what takes long (times of the plan, its picture) is kept until the plan changes or
some seconds have passed, and left out where a plan is too large for that.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, TypeVar

from lightning_recycle.control.addresses import machine_name
from lightning_recycle.control.handshake import VERSION
from lightning_recycle.control.status import Place, Status
from lightning_recycle.control.views import RunView
from lightning_recycle.errors import ControlPlaneError, PlanningError
from lightning_recycle.planning.schedule import Schedule

__all__ = ["Monitor", "NothingToShow"]

_MOST_TIMED, _MOST_DRAWN = 20_000, 4_000  # operations: about 0.1 s of this process' interpreter
_KEPT_SECONDS = 5.0

Made = TypeVar("Made")


class NothingToShow(ControlPlaneError):
    """There is no run, no plan, or it is too large to be drawn."""


class Viewed(Protocol):
    """What a monitor asks of a coordinator."""

    def view(self, timeout: float = 2.0) -> RunView: ...


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
        self._place = Place(machine_name(), os.getpid())
        self._viewed: Viewed | None = None
        self._lock = threading.Lock()  # computing something twice at the same time is of no use
        self._kept: dict[str, tuple[int, float, object]] = {}  # by what it is: number of the plan, when, the value

    def show(self, viewed: Viewed | None) -> None:
        """From now on shows this run, which has been started; None between two runs."""
        self._viewed = viewed
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
        if self._viewed is None:
            why = "it waits for workers" if self.awaits_runs else "it is being started, or has ended"
            raise NothingToShow(f"No run is going on: {why}.")
        return self._viewed.view()

    def _of_plan(self, what: str, view: RunView, most: int, make: Callable[[Schedule], Made]) -> Made | None:
        """What follows from the plan with measured times; None without one, or if it is too large."""
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
