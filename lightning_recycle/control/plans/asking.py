"""One question at a time, answered in another thread; a new one gives up on the one before.

Contract: used by the coordinator's thread. ``wake`` is called from another one when :meth:`Asking.take_answers` has
something.

Must not know: what is asked, and how long that takes.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Asking", "taken"]

_Answer = TypeVar("_Answer")

_END_SECONDS = 10.0  # for what is no longer wanted to end: its process, of the lowest priority, has to be reaped


def taken(waiting: queue.SimpleQueue[_Answer]) -> list[_Answer]:
    """All that is in ``waiting``, taken out of it."""
    found = []
    with contextlib.suppress(queue.Empty):
        while True:
            found.append(waiting.get_nowait())
    return found


class Asking(Generic[_Answer]):
    """Asks in a thread called ``name``."""

    def __init__(self, name: str, wake: Callable[[], None]) -> None:
        self._name, self._wake = name, wake
        self._answers: queue.SimpleQueue[_Answer] = queue.SimpleQueue()
        self._cancelled = threading.Event()
        self._threads: list[threading.Thread] = []  # that may not have ended

    def ask(self, find: Callable[[threading.Event], _Answer | None]) -> None:
        """Begins to look for an answer.

        Args:
            find: finds it; None if there is none. It ends soon after the event is set, and what it returns then is
                dropped.
        """
        self._cancelled.set()
        self._cancelled = threading.Event()
        arguments = (find, self._cancelled)
        thread = threading.Thread(target=self._look, args=arguments, name=self._name, daemon=True)
        self._threads = [*(earlier for earlier in self._threads if earlier.is_alive()), thread]
        thread.start()

    def answer(self, answer: _Answer) -> None:
        """Answers itself; gives up on what is being looked for."""
        self._cancelled.set()
        self._answers.put(answer)
        self._wake()

    def take_answers(self) -> list[_Answer]:
        """What has been found since the last call."""
        return taken(self._answers)

    def close(self) -> None:
        """Gives up, and waits for all that it has begun: no thread and no process is left behind."""
        self._cancelled.set()
        deadline = time.monotonic() + _END_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _look(self, find: Callable[[threading.Event], _Answer | None], cancelled: threading.Event) -> None:
        answer = find(cancelled)
        if answer is not None and not cancelled.is_set():
            self._answers.put(answer)
            self._wake()
