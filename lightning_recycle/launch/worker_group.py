"""Worker group: all worker processes of one run, on any engine, and how they end.

Contract: callable from any thread. Once :meth:`WorkerHandles.end` has begun, no new worker is taken.

Must not know: how a worker is started.
"""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from lightning_recycle.control.coordinator.coordinator import Coordinator
from lightning_recycle.control.joining.run_config import WorkerProcess

__all__ = ["WorkerGroup", "WorkerHandle", "WorkerHandles"]

_EXIT_SECONDS = 10.0  # for a killed worker to be gone


class WorkerGroup(Protocol):
    """All worker processes that one run starts. A context manager: none survives it.

    Attributes:
        payload: to be passed as, or within, the argument of each worker.
        host: the address of this machine as the workers reach it.
        without_room: the ranks of the first workers that were not started, as there is no room for them yet.
    """

    payload: Any
    host: str
    without_room: frozenset[int]

    def start(self, argument: Any, name: str) -> WorkerProcess:
        """Starts a worker; callable from any thread.

        Raises:
            WorkerStartError: if the run is over, or workers cannot be started from here at all.
        """

    def attend(self, coordinator: Coordinator) -> None:
        """The coordinator serves from now on, and may be asked to let workers leave."""

    def end(self, patience: float) -> None:
        """Waits ``patience`` seconds for all workers to end, then kills the rest."""

    def __enter__(self) -> WorkerGroup: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None, /
    ) -> None: ...


class WorkerHandle(WorkerProcess, Protocol):
    """A worker of a group, which knows more of it than the coordinator."""

    @property
    def is_over(self) -> bool:
        """Whether it was released and has ended."""

    def close(self) -> None:
        """Frees its descriptors in this process; it must have ended."""


_Handle = TypeVar("_Handle", bound=WorkerHandle)


class WorkerHandles(Generic[_Handle]):
    """The workers of one group.

    Attributes:
        lock: held while members come and go.
        closed: whether the group has ended.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.closed = threading.Event()
        self._members: list[_Handle] = []

    def add(self, member: _Handle) -> bool:
        """Takes ``member`` in; returns whether it is welcome. If not, kill it; it is closed with all others."""
        with self.lock:
            if not self.closed.is_set():
                self.forget_over()
            self._members.append(member)
            return not self.closed.is_set()

    def forget_over(self) -> None:
        """Closes members that were released and have ended."""
        with self.lock:
            for over in [member for member in self._members if member.is_over]:
                self._members.remove(over)
                over.close()

    def living(self) -> list[_Handle]:
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
