"""Positions of several processes: which rank is which member of which position.

Concept: a position (pipeline d, stage s) is held by T processes, its *members*. Rank (d * S + s) * T + t is started as
member t of position (d, s). *Plane* t is member t of all positions: a D x S grid that follows the plan. *Column*
(s, t), numbered s * T + t, is member t of stage s in all pipelines: its workers hold the same parameters and optimizer
state. With T = 1 a column is a stage.

A worker keeps its rank and its column for life. It may hold the position of another pipeline than its rank says, if
what is left of several positions was put together (:mod:`~lightning_recycle.control.protocol.parking`):
:attr:`Positions.moved`.

Must not know: who is alive.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from lightning_recycle.planning.grid import Grid, Worker


@dataclass(frozen=True, slots=True)
class Positions:
    """Map from ranks to positions.

    Args:
        grid: the positions.
        members: T, the processes of a position.
        moved: the pipelines of ranks that do not hold the position that they were started for; a permutation within
            each column.
    """

    grid: Grid
    members: int = 1
    moved: Mapping[int, int] = field(default_factory=dict)

    @property
    def num_workers(self) -> int:
        """The grid's workers, times T."""
        return self.grid.num_workers * self.members

    @property
    def columns(self) -> int:
        """S * T."""
        return self.grid.stages * self.members

    def column(self, rank: int) -> int:
        return rank % self.columns

    def stage(self, rank: int) -> int:
        return rank % self.columns // self.members

    def member(self, rank: int) -> int:
        return rank % self.members

    def pipeline(self, rank: int) -> int:
        return self.moved.get(rank, rank // self.columns)

    def position(self, rank: int) -> Worker:
        """The position of which ``rank`` is a member."""
        return Worker(self.pipeline(rank), self.stage(rank))

    def rank(self, position: Worker, member: int = 0) -> int:
        """The inverse of :meth:`position` and :meth:`member`."""
        column = position.stage * self.members + member
        home = position.pipeline * self.columns + column
        if not self.moved:
            return home
        there = (r for r, d in self.moved.items() if d == position.pipeline and self.column(r) == column)
        return next(there, home)

    def ranks(self, position: Worker) -> tuple[int, ...]:
        """The members of ``position``, in order."""
        return tuple(self.rank(position, member) for member in range(self.members))

    def siblings(self, rank: int) -> frozenset[int]:
        """The other members of the position of ``rank``."""
        return frozenset(self.ranks(self.position(rank))) - {rank}

    def expand(self, ranks: Iterable[int]) -> frozenset[int]:
        """All members of the positions of ``ranks``."""
        if self.members == 1:
            return frozenset(ranks)
        return frozenset(member for rank in ranks for member in self.ranks(self.position(rank)))

    def whole(self, ranks: Collection[int]) -> frozenset[Worker]:
        """The positions of which all members are among ``ranks``."""
        firsts = (self.position(rank) for rank in ranks if self.member(rank) == 0)
        return frozenset(position for position in firsts if all(rank in ranks for rank in self.ranks(position)))

    def column_leaders(self, ranks: Iterable[int]) -> dict[int, int]:
        """For each column with a worker among ``ranks``, the one that speaks for it: that of the lowest pipeline."""
        found: dict[int, int] = {}
        for rank in sorted(ranks, key=self.pipeline):
            found.setdefault(self.column(rank), rank)
        return found

    def exchanged(self, rank: int, pipeline: int) -> Mapping[int, int]:
        """:attr:`moved` once ``rank`` and the worker of its column in ``pipeline`` have changed places."""
        other = self.rank(Worker(pipeline, self.stage(rank)), self.member(rank))
        moved = {**self.moved, other: self.pipeline(rank), rank: pipeline}
        return {one: place for one, place in sorted(moved.items()) if place != one // self.columns}

    def name(self, rank: int) -> str:
        """``rank`` in words: "(pipeline, stage)", and the member where positions have several."""
        return f"({', '.join(map(str, self.place(rank)))})"

    def place(self, rank: int) -> tuple[int, ...]:
        """Pipeline and stage, and the member where positions have several."""
        place = (self.pipeline(rank), self.stage(rank), self.member(rank))
        return place if self.members > 1 else place[:2]
