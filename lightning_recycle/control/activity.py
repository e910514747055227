"""Activity of a worker's main thread, for its heartbeats.

Concept: the main thread records what it does or waits for before it does so; the heartbeat thread reads the newest
record and sends it with its age. The coordinator judges by it which worker holds up the others
(:mod:`~lightning_recycle.control.coordinator.detection`).

Contract: written by the main thread, read by any; a record is immutable.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager

from lightning_recycle.control.protocol.messages import Activity


class ActivityRecorder:
    """Records what the main thread does.

    Attributes:
        activity: the newest record.
    """

    def __init__(self) -> None:
        self.activity = Activity(0, "start", "", time.monotonic())

    def doing(self, step: int, operation: str, kind: str = "", microbatch: int = -1) -> None:
        """Records what the main thread does from now on; without a ``kind`` its usual duration is unknown.

        Args:
            step: the optimizer step.
            operation: its name, for people.
            kind: the kind of operation, if it has a usual duration. No hook of the user's may run in it.
            microbatch: the index in the global batch of the micro-batch that it is for; -1 for none.
        """
        self.activity = Activity(step, operation, "", time.monotonic(), kind, microbatch=microbatch)

    def busy(self, operation: str, kind: str = "") -> AbstractContextManager[None]:
        """Records that the main thread does something else within the block; then times afresh what it did before."""
        return _Within(self, Activity(self.activity.step, operation, "", time.monotonic(), kind))

    def waiting(self, what: str, coordinated: bool = False) -> AbstractContextManager[None]:
        """Records that the main thread waits for ``what`` within the block; then times afresh what it did before, as
        waiting does not count. ``coordinated``: what it waits for comes from the coordinator.
        """
        was = self.activity
        now = Activity(was.step, was.operation, what, time.monotonic(), "", coordinated, was.microbatch)
        return _Within(self, now)

    def progressed(self) -> None:
        """Records progress in what the main thread does or waits for."""
        self.activity = _resumed(self.activity)


class _Within:
    """Within the block the main thread does what ``activity`` says."""

    __slots__ = ("_activity", "_before", "_recorder")

    def __init__(self, recorder: ActivityRecorder, activity: Activity) -> None:
        self._recorder, self._activity, self._before = recorder, activity, recorder.activity

    def __enter__(self) -> None:
        self._recorder.activity = self._activity

    def __exit__(self, *_: object) -> None:
        self._recorder.activity = _resumed(self._before)


def _resumed(before: Activity) -> Activity:
    """``before``, timed afresh; by itself, as ``dataclasses.replace`` takes several times as long."""
    return Activity(
        before.step,
        before.operation,
        before.waiting_for,
        time.monotonic(),
        before.kind,
        before.coordinated,
        before.microbatch,
    )
