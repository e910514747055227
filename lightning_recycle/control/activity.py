"""Activity of a worker's main thread, for its heartbeats.

Concept: the main thread records what it does or waits for before it does so; the heartbeat thread reads the newest
record and sends it with its age. The coordinator judges by it which worker holds up the others
(:mod:`~lightning_recycle.control.protocol.detection`).

Contract: written by the main thread, read by any; a record is immutable.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_recycle.control.protocol.messages import Activity

__all__ = ["ActivityRecorder"]


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

    @contextmanager
    def busy(self, operation: str, kind: str = "") -> Iterator[None]:
        """Records that the main thread does something else within the block; then times afresh what it did before."""
        before = self.activity
        self.doing(before.step, operation, kind)
        try:
            yield
        finally:
            self.activity = _resumed(before)

    @contextmanager
    def waiting(self, what: str, coordinated: bool = False) -> Iterator[None]:
        """Records that the main thread waits for ``what`` within the block; then times afresh what it did before, as
        waiting does not count. ``coordinated``: what it waits for comes from the coordinator.
        """
        before = self.activity
        self.activity = Activity(
            before.step, before.operation, what, time.monotonic(), coordinated=coordinated, microbatch=before.microbatch
        )
        try:
            yield
        finally:
            self.activity = _resumed(before)

    def progressed(self) -> None:
        """Records progress in what the main thread does or waits for."""
        self.activity = _resumed(self.activity)


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
