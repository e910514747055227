"""Which processes are late to connect, measured by those that have.

Processes of one machine that are started for the same run import the same modules, so one that takes much longer than
the others hangs: in the user's imports, at a file system, or because somebody stopped it. It has not said anything yet
and holds nothing, so giving it up costs its replica, no more. Whoever a stage cannot do without gets all the time
that there is, and so do several at once: then the machine is slow.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from lightning_recycle.planning.grid import Grid

__all__ = ["Starts", "late_to_connect"]

_FACTOR = 5.0  # times the slowest of the others
_LEAST_SECONDS = 30.0


def late_to_connect(grid: Grid, waits: Mapping[int, float], took: Mapping[int, float]) -> dict[int, str]:
    """Who is given up, with the reason, by rank.

    Args:
        grid: the grid of the run.
        waits: for each process that has not connected, how long ago it was started, in seconds.
        took: for each worker that lives, the seconds that it took to connect.
    """
    if len(waits) >= len(took):
        return {}
    slowest = max(took.values())
    limit = max(_LEAST_SECONDS, _FACTOR * slowest)
    stages = {grid.worker(rank).stage for rank in took}
    return {
        rank: f"it did not connect within {limit:.0f} s, though the slowest of {len(took)} others took {slowest:.1f} s"
        for rank, seconds in waits.items()
        if seconds > limit and grid.worker(rank).stage in stages
    }


class Starts:
    """When processes were started and connected. All times are in seconds of one monotonic clock."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._began: dict[int, float] = {}
        self._took: dict[int, float] = {}

    def began(self, rank: int, now: float) -> None:
        """A process for ``rank`` was started."""
        self._began[rank] = now

    def connected(self, rank: int, now: float) -> None:
        """It has connected; one that was started elsewhere says nothing about those here."""
        if rank in self._began:
            self._took[rank] = now - self._began.pop(rank)

    def forget(self, rank: int) -> None:
        """The process is gone."""
        self._began.pop(rank, None)

    def late(self, now: float, live: Collection[int]) -> dict[int, str]:
        """Who is late, with the reason, by rank; ``live``: the ranks that are not lost."""
        waits = {rank: now - began for rank, began in self._began.items()}
        return late_to_connect(self._grid, waits, {rank: took for rank, took in self._took.items() if rank in live})
