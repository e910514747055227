"""Signals to the launching process that end a run.

They end it like exceptions, so that its workers are ended too. A run that is to be saved ends gracefully: the
first signal is only noted, and the main thread, which waits for the run, acts upon it; a second one ends it at once.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

__all__ = ["EndSignals"]


class EndSignals:
    """Listens to SIGTERM and Ctrl-C, and if ``gracefully`` to SIGUSR1, within the block; in the main thread only.

    Ctrl-C is left alone if it is ignored, as in a background job, or has a handler of the user's.

    Args:
        gracefully: whether the first signal is only noted.

    Attributes:
        received: the first signal; None before.
    """

    def __init__(self, gracefully: bool) -> None:
        self.gracefully = gracefully
        self.received: signal.Signals | None = None
        self._shielded = False
        self._before: dict[signal.Signals, Any] = {}

    def error(self) -> BaseException:
        """The exception that ends this process because of :attr:`received`: KeyboardInterrupt, which Lightning handles,
        or SystemExit with the status of Unix, 128 + the signal's number.
        """
        assert self.received is not None
        return KeyboardInterrupt() if self.received == signal.SIGINT else SystemExit(128 + self.received)

    @contextlib.contextmanager
    def shielded(self) -> Iterator[None]:
        """Cleaning up is not cut short: within the block, which takes seconds at most, signals are only noted."""
        self._shielded = True
        try:
            yield
        finally:
            self._shielded = False

    def _receive(self, signum: int, frame: Any) -> None:
        first = self.received is None
        if first:
            self.received = signal.Signals(signum)
        if not self._shielded and not (first and self.gracefully):
            raise self.error()

    def __enter__(self) -> EndSignals:
        if threading.current_thread() is threading.main_thread():
            wanted = [signal.SIGTERM]
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                wanted.append(signal.SIGINT)
            if self.gracefully:
                wanted.append(signal.SIGUSR1)
            self._before = {signum: signal.signal(signum, self._receive) for signum in wanted}
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
