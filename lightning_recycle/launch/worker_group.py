"""Worker group: all worker processes of one run, on any engine, and how they end.

Callable from any thread. Once :meth:`WorkerGroup.end` has begun, no new worker is taken.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from typing import Any

from typing_extensions import Self

from lightning_recycle.control.coordinator.coordinator import Coordinator
from lightning_recycle.control.joining.run_config import WorkerProcess

_EXIT_SECONDS = 10.0  # for a killed worker to be gone


class WorkerHandle(ABC):
    """A worker of a group; its ``sentinel`` becomes readable when it ends."""

    sentinel: int
    _released = False

    @abstractmethod
    def describe_exit(self, timeout: float) -> str | None:
        """How the worker ended, or None if it is alive after ``timeout`` seconds."""

    @abstractmethod
    def kill(self) -> None:
        """Ends the worker, if it is alive."""

    @abstractmethod
    def close(self) -> None:
        """Frees its descriptors in this process; it must have ended."""

    def release(self) -> None:
        """Lets the group close it once it has ended."""
        self._released = True

    @property
    def is_over(self) -> bool:
        return self._released and self.describe_exit(0.0) is not None


class WorkerGroup(ABC):
    """The worker processes of one run. A context manager: none survives it.

    ``payload`` is to be passed within the argument of each worker, ``host`` the address of this machine as the workers
    reach it, ``without_room`` the ranks of first workers that are not started, as there is no room yet.
    """

    payload: Any
    host: str
    without_room = frozenset[int]()

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.closed = threading.Event()
        self._workers: list[Any] = []

    @abstractmethod
    def start(self, argument: Any, name: str) -> WorkerHandle:
        """Starts a worker; callable from any thread.

        Raises:
            WorkerStartError: if the run is over, or workers cannot be started from here at all.
        """

    @abstractmethod
    def attend(self, coordinator: Coordinator) -> None:
        """The coordinator serves from now on, and may be asked to let workers leave."""

    def add(self, worker: WorkerHandle) -> bool:
        """Takes ``worker`` in; if it returns False, the run is over: kill the worker."""
        with self.lock:
            if not self.closed.is_set():
                for over in [worker for worker in self._workers if worker.is_over]:
                    self._workers.remove(over)
                    over.close()
            self._workers.append(worker)
            return not self.closed.is_set()

    def living(self) -> list[Any]:
        with self.lock:
            return [worker for worker in self._workers if worker.describe_exit(0.0) is None]

    def end(self, awaited: Collection[WorkerProcess] = (), patience: float = 0.0) -> None:
        """Ends all workers; ``awaited`` may take ``patience`` seconds to end themselves."""
        with self.lock:
            self.closed.set()
            workers = list(self._workers)
        for worker in workers:
            if worker not in awaited:
                worker.kill()
        _await_exits(awaited, patience)
        for worker in workers:
            worker.kill()
        _await_exits(workers, _EXIT_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        for worker in self._workers:
            worker.close()


def _await_exits(workers: Iterable[WorkerProcess], patience: float) -> None:
    deadline = time.monotonic() + patience
    for worker in workers:
        worker.describe_exit(max(0.0, deadline - time.monotonic()))
