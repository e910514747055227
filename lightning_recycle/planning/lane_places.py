"""Places in lanes: which workers a lane has, and which micro-batches. A formula, so that no plan has to list them.

Concept: with n lanes, the first n pipelines are the lanes, in their order; the others give their workers. Lane l runs
its home's micro-batches, (l, 0) to (l, M - 1), and then as many of those of the others as are its share. If worker
(l, s) has failed, the lane's worker of stage s is one of the others' that are alive: there are enough, because stage s
has at least n live workers. Who is left over has nothing to do but REDUCE and STEP.

The (D - n) M micro-batches of the others are numbered by pipeline and index and dealt in runs: with q, r = divmod(D M,
n), lane l gets q - M of them, and one more if l < r, so that

    number x of the others is in lane  x // (q - M + 1)                        if x < r (q - M + 1)
                                       r + (x - r (q - M + 1)) // (q - M)      otherwise.

That the first pipelines stay keeps the leaders of stages at work, and as pipelines are given up from the last on, one
failure more changes few lanes.

Contract: pure, deterministic; O(D S) to make, O(1) to ask.

Must not know: time, what a lane's program is.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property

from lightning_recycle.planning.grid import Grid, Microbatch, Worker

__all__ = ["LanePlaces"]


class LanePlaces:
    """The lanes of ``grid`` without ``failed``; ``lanes`` is their number, at most the live workers of any stage."""

    def __init__(self, grid: Grid, failed: Collection[Worker], lanes: int) -> None:
        self.grid = grid
        self.lanes = lanes
        self._failed = frozenset(failed)
        self._share, self._longer = divmod(grid.global_microbatches, lanes)
        self._extra = self._share - grid.microbatches  # of the micro-batches of the others, at least

    @cached_property
    def _adopted(self) -> dict[Worker, int]:
        """The lanes of the workers outside their home, and by (lane, stage) who replaces the failed worker there."""
        return {worker: place.pipeline for place, worker in self._substitutes.items()}

    @cached_property
    def _substitutes(self) -> dict[Worker, Worker]:
        """For each failed worker of a lane's home, who is in its place."""
        found = {}
        free = [self.lanes] * self.grid.stages
        for place in sorted(self._failed):
            if place.pipeline >= self.lanes:
                break
            stage = place.stage
            while Worker(free[stage], stage) in self._failed:
                free[stage] += 1
            found[place] = Worker(free[stage], stage)
            free[stage] += 1
        return found

    def lane(self, worker: Worker) -> int | None:
        """The lane of a live worker; None if it is in none."""
        return worker.pipeline if worker.pipeline < self.lanes else self._adopted.get(worker)

    def worker(self, lane: int, stage: int) -> Worker:
        """The worker of ``stage`` of a lane."""
        home = Worker(lane, stage)
        return self._substitutes.get(home, home)

    def count(self, lane: int) -> int:
        """How many micro-batches a lane runs."""
        return self._share + (lane < self._longer)

    def microbatches(self, lane: int) -> list[Microbatch]:
        """The micro-batches of a lane, in the order of their numbers within it."""
        own = self.grid.microbatches
        first = lane * self._extra + min(lane, self._longer)
        others = range(first, first + self.count(lane) - own)
        return [
            *(Microbatch(lane, index) for index in range(own)),
            *(Microbatch(self.lanes + number // own, number % own) for number in others),
        ]

    def lane_of(self, microbatch: Microbatch) -> int:
        """The lane that runs a micro-batch."""
        if microbatch.pipeline < self.lanes:
            return microbatch.pipeline
        number = (microbatch.pipeline - self.lanes) * self.grid.microbatches + microbatch.index
        in_longer = self._longer * (self._extra + 1)
        if number < in_longer:
            return number // (self._extra + 1)
        return self._longer + (number - in_longer) // self._extra
