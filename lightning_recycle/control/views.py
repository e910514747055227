"""What other threads see of the coordinator: made in its thread, when somebody asks, and for a fiftieth of its time.

Concept: the coordinator's state belongs to its thread. Whoever wants to look leaves a wish and wakes the loop, which
makes an immutable view between two messages. Nobody asks: nothing is made.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from lightning_recycle.control.status import Status
from lightning_recycle.errors import ControlPlaneError
from lightning_recycle.planning.schedule import Schedule

__all__ = ["RunView", "Views"]

log = logging.getLogger(__name__)

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
        """In the loop's thread: makes a view if somebody wants one."""
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
