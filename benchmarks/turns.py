"""Sides of a comparison that take turns within seconds, so that both meet the same load of a shared machine.

All sides run at the same time in processes of their own. A worker that reaches the end of its turn says so and blocks;
:meth:`Turns.play` lets one side go at a time. Named pipes carry both, since their paths can be passed to any process.
"""

from __future__ import annotations

import os
import select
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Gate", "Turn", "Turns"]

_ARRIVAL = struct.Struct("<d")


@dataclass(frozen=True)
class Turn:
    """What a side took for one turn.

    Args:
        seconds: from the start until the last of its workers was through.
        processor_seconds: of all its workers together.
    """

    seconds: float
    processor_seconds: float


@dataclass(frozen=True)
class Gate:
    """A side's end of the pipes, for its workers; can be pickled."""

    directory: str
    side: str

    def wait(self, rank: int) -> None:
        """Worker ``rank`` has ended its turn, and waits for the next one.

        Raises:
            OSError: if the referee is gone, as another side has failed.
        """
        # In this order: the referee closes the pipe of arrivals first, so whoever finds it open will see the other end.
        start = os.open(Path(self.directory) / f"{self.side}.{rank}", os.O_RDONLY | os.O_NONBLOCK)
        arrivals = os.open(Path(self.directory) / f"{self.side}.arrivals", os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(arrivals, _ARRIVAL.pack(time.process_time()))
            select.select([start], [], [])
            if not os.read(start, 1):
                raise BrokenPipeError("The comparison is over: another side has failed.")
        finally:
            os.close(arrivals)
            os.close(start)


class Turns:
    """The referee.

    Args:
        directory: where the pipes are made.
        sides: names of those that take turns, and the number of workers of each.
        check: called about once a second while waiting; raises if a side has failed.
    """

    def __init__(self, directory: str, sides: Mapping[str, int], check: Callable[[], None]) -> None:
        self._sides, self._check = tuple(sides), check
        self._arrivals: dict[str, int] = {}
        self._starts: dict[str, list[int]] = {}
        for side, workers in sides.items():
            self._arrivals[side] = _open_pipe(Path(directory) / f"{side}.arrivals")
            self._starts[side] = [_open_pipe(Path(directory) / f"{side}.{rank}") for rank in range(workers)]

    def play(self, count: int) -> dict[str, list[Turn]]:
        """Waits until all sides are at their gates, then gives each ``count`` turns, one side after the other."""
        spent = {side: self._await(side) for side in self._sides}
        turns: dict[str, list[Turn]] = {side: [] for side in self._sides}
        for number in range(count):
            for side in self._sides if number % 2 == 0 else reversed(self._sides):
                began = time.perf_counter()
                self._start(side)
                now_spent = self._await(side)
                turns[side].append(Turn(time.perf_counter() - began, now_spent - spent[side]))
                spent[side] = now_spent
        for side in self._sides:
            self._start(side)
        return turns

    def close(self) -> None:
        for fd in (*self._arrivals.values(), *(fd for fds in self._starts.values() for fd in fds)):
            os.close(fd)

    def _start(self, side: str) -> None:
        for fd in self._starts[side]:
            os.write(fd, b"x")

    def _await(self, side: str) -> float:
        """Waits for all workers of ``side``; returns their processor time so far, together."""
        fd, total = self._arrivals[side], 0.0
        for _ in self._starts[side]:
            while not select.select([fd], [], [], 1.0)[0]:
                self._check()
            total += _ARRIVAL.unpack(os.read(fd, _ARRIVAL.size))[0]
        return total


def _open_pipe(path: Path) -> int:
    """Makes a named pipe; opened for both directions, so that neither end ever blocks in ``open``."""
    os.mkfifo(path)
    return os.open(path, os.O_RDWR)
