"""Giving up on a plan that nobody wants any more.

Concept: who makes plans in a thread says with :func:`cancelled_by` what cancels them; what takes long in making one
asks :func:`check` now and then. A planner that never asks is waited for.

Must not know: threads, planners.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["Cancelled", "cancelled_by", "check", "current"]

_current: ContextVar[threading.Event | None] = ContextVar("cancelled", default=None)


class Cancelled(BaseException):
    """The plan is not wanted any more. No error: whoever handles errors of planners must let it pass."""


@contextmanager
def cancelled_by(event: threading.Event) -> Iterator[None]:
    """What is planned in the block, in this thread, is given up once ``event`` is set."""
    token = _current.set(event)
    try:
        yield
    finally:
        _current.reset(token)


def current() -> threading.Event | None:
    """What cancels the plan that is being made, if anything does."""
    return _current.get()


def check() -> None:
    """Raises :class:`Cancelled` if the plan that is being made is not wanted any more."""
    event = _current.get()
    if event is not None and event.is_set():
        raise Cancelled
