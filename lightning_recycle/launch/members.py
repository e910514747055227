"""The workers of a crew: which ones there are, and how all of them end. Wherever they run.

Contract: callable from any thread. Once :meth:`Members.end` has begun, nobody is welcome any more.

Must not know: how a worker is started.
"""

from __future__ import annotations

import threading
import time
from typing import Generic, Protocol, TypeVar

from lightning_recycle.control.joining.run_config import WorkerProcess

__all__ = ["Member", "Members"]

_EXIT_SECONDS = 10.0  # for a killed worker to be gone


class Member(WorkerProcess, Protocol):
    """What a crew must know of a worker, besides what the coordinator does."""

    @property
    def is_over(self) -> bool:
        """Whether it was released and has ended."""

    def close(self) -> None:
        """Frees what it takes of this process; it must have ended."""


_Member = TypeVar("_Member", bound=Member)


class Members(Generic[_Member]):
    """The workers of one crew.

    Attributes:
        lock: held by whoever changes who is in.
        closed: whether the crew has ended.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.closed = threading.Event()
        self._members: list[_Member] = []

    def add(self, member: _Member) -> bool:
        """Takes ``member`` in; returns whether it is welcome. If not, kill it; it is closed with all others."""
        with self.lock:
            if not self.closed.is_set():
                self.forget_over()
            self._members.append(member)
            return not self.closed.is_set()

    def forget_over(self) -> None:
        """Closes those that nobody asks about any more."""
        with self.lock:
            for over in [member for member in self._members if member.is_over]:
                self._members.remove(over)
                over.close()

    def living(self) -> list[_Member]:
        """Those that have not ended."""
        with self.lock:
            return [member for member in self._members if member.describe_exit(0.0) is None]

    def end(self, patience: float) -> None:
        """Waits ``patience`` seconds for all to end, then kills the rest."""
        with self.lock:
            self.closed.set()
            members = list(self._members)
        deadline = time.monotonic() + patience
        for member in members:
            member.describe_exit(max(0.0, deadline - time.monotonic()))
        for member in members:
            member.kill()
        for member in members:
            member.describe_exit(_EXIT_SECONDS)

    def close(self) -> None:
        """Ends and closes all of them."""
        self.end(0.0)
        for member in self._members:
            member.close()
