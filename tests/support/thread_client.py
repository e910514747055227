"""A worker's connection to the coordinator in a thread of the test."""

import contextlib
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from lightning_recycle.control.client import ControlClient


class _ThreadEnds(BaseException):
    """In the place of the end of the process."""


class ThreadClient(ControlClient):
    """A client whose end is the end of its threads, not of the process."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.exit_code: int | None = None
        self.exited = threading.Event()
        self._exiting = threading.Lock()
        super().__init__(*args, **options)

    def _guarded(self, target: Callable[[], None]) -> None:
        with contextlib.suppress(_ThreadEnds):
            super()._guarded(target)

    def _exit(self, why: str, code: int) -> NoReturn:
        with self._exiting:
            if not self.exited.is_set():  # several threads may find out; the first one says why
                self.exit_code = self._status if self._leaving else code
                self.leave()  # the other threads end, too
                self.exited.set()
        raise _ThreadEnds
