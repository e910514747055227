"""Grid of workers, micro-batches, operations: the vocabulary of a schedule.

D identical pipelines of S stages train together; each pipeline splits its batch into M micro-batches. The worker at
(pipeline d, stage s) has the same parameters as its *peers*, the workers at stage s of the other pipelines. Planner,
executor, simulator and pictures share these immutable types; the terms are those of ReCycle (SOSP'24, arXiv
2405.14009).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from lightning_recycle.arguments import whole
from lightning_recycle.errors import ConfigurationError


@dataclass(frozen=True, order=True, slots=True)
class Worker:
    """Place in the grid: stage ``stage`` of pipeline, or lane, ``pipeline``."""

    pipeline: int
    stage: int

    def __str__(self) -> str:
        return f"({self.pipeline}, {self.stage})"


@dataclass(frozen=True, order=True, slots=True)
class Microbatch:
    """Micro-batch ``index`` of the batch of ``pipeline``, its *home*; both from 0.

    Re-routing changes the worker, never the micro-batch.
    """

    pipeline: int
    index: int

    def __str__(self) -> str:
        return f"({self.pipeline}, {self.index})"


@dataclass(frozen=True, slots=True)
class Grid:
    """D pipelines of S stages with M micro-batches each, run by workers of L lanes.

    A *lane* is a place for one worker of each stage. Pipeline d has lane d; lanes from D on have no micro-batches of
    their own, and take some of all others.

    Args:
        pipelines: D, the data-parallel size.
        stages: S, the pipeline-parallel size.
        microbatches: M, micro-batches per pipeline in one iteration.
        lanes: L; by default D.

    Raises:
        ConfigurationError: when one of them is not a positive integer, or there are lanes for fewer pipelines, or for
            more micro-batches, than there are.
    """

    pipelines: int
    stages: int
    microbatches: int
    lanes: int = 0

    def __post_init__(self) -> None:
        for name in ("pipelines", "stages", "microbatches"):
            whole("Grid", name, getattr(self, name), 1)
        if not self.lanes:
            object.__setattr__(self, "lanes", self.pipelines)
        whole("Grid", "lanes", self.lanes, self.pipelines)
        if self.lanes > max(self.pipelines, self.global_microbatches):
            raise ConfigurationError(
                f"Grid(lanes={self.lanes}): there are {self.global_microbatches} micro-batches for them: give at most"
                " that many lanes, or more micro-batches."
            )

    def __str__(self) -> str:
        lanes = "" if self.lanes == self.pipelines else f" on {self.lanes} lanes"
        return f"{self.pipelines} x {self.stages} x {self.microbatches}{lanes}"

    def __contains__(self, worker: object) -> bool:
        return isinstance(worker, Worker) and 0 <= worker.pipeline < self.lanes and 0 <= worker.stage < self.stages

    @property
    def num_workers(self) -> int:
        """L * S."""
        return self.lanes * self.stages

    @property
    def global_microbatches(self) -> int:
        """D * M, the fixed divisor of every gradient, whichever workers survive."""
        return self.pipelines * self.microbatches

    def workers(self) -> tuple[Worker, ...]:
        """All workers in rank order."""
        return tuple(self.worker(rank) for rank in range(self.num_workers))

    def rank(self, worker: Worker) -> int:
        """The rank, d * S + s: neighbouring ranks belong to different stages."""
        return worker.pipeline * self.stages + worker.stage

    def worker(self, rank: int) -> Worker:
        """The inverse of :meth:`rank`."""
        if not 0 <= rank < self.num_workers:
            raise ConfigurationError(f"rank {rank} is outside the grid {self}: give one of 0..{self.num_workers - 1}.")
        return _worker(rank, self.stages)

    def all_microbatches(self) -> Iterator[Microbatch]:
        """The D * M micro-batches of one iteration, by pipeline, then index."""
        return (Microbatch(d, m) for d in range(self.pipelines) for m in range(self.microbatches))


@lru_cache(maxsize=8192)
def _worker(rank: int, stages: int) -> Worker:
    return Worker(*divmod(rank, stages))


def global_index(grid: Grid, microbatch: Microbatch) -> int:
    """The micro-batch's index in the global batch."""
    return microbatch.index * grid.pipelines + microbatch.pipeline


class OpKind(str, Enum):
    """Kind of operation: per micro-batch (F, R, B, W, BW) or iteration (REDUCE, STEP)."""

    FORWARD = "F"
    RECOMPUTE = "R"
    """The same forward again before the backward, where F kept only its input."""
    BACKWARD_INPUT = "B"
    """Gradient with respect to the stage's input: the stage before waits for it."""
    BACKWARD_WEIGHT = "W"
    """Gradient for the stage's parameters, on which only REDUCE waits."""
    BACKWARD = "BW"
    """B and W fused."""
    REDUCE = "REDUCE"
    """All-reduce of the stage's gradients: the part that the last W does not hide."""
    STEP = "STEP"
    """Optimizer step of the stage."""
    CHECK = "C"
    """A peer's micro-batch once more, to compare the results.

    In no schedule: a pass puts it into the program of a worker (:mod:`~lightning_recycle.planning.program`).
    """

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class Op:
    """One operation at ``stage``; ``microbatch`` is None for REDUCE and STEP."""

    kind: OpKind
    stage: int
    microbatch: Microbatch | None = None

    def __str__(self) -> str:
        return f"{self.kind}{'' if self.microbatch is None else self.microbatch}@{self.stage}"


@dataclass(frozen=True, slots=True)
class ScheduledOp:
    """An operation with its planned times, from the start of the iteration."""

    op: Op
    start: float
    end: float

    @property
    def duration(self) -> float:
        """``end - start``."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Positions:
    """Map from ranks to positions of several processes, alive or not.

    A position (pipeline d, stage s) is held by T processes, its *members*: rank (d * S + s) * T + t starts as member t.
    *Plane* t is member t of all positions, a D x S grid that follows the plan. *Column* (s, t), numbered s * T + t, is
    member t of stage s in all pipelines, with the same parameters and optimizer state.

    Args:
        members: T.
    """

    grid: Grid
    members: int = 1

    @property
    def num_workers(self) -> int:
        return self.grid.num_workers * self.members

    @property
    def columns(self) -> int:
        return self.grid.stages * self.members

    def column(self, rank: int) -> int:
        return rank % self.columns

    def stage(self, rank: int) -> int:
        return rank % self.columns // self.members

    def member(self, rank: int) -> int:
        return rank % self.members

    def pipeline(self, rank: int) -> int:
        return rank // self.columns

    def position(self, rank: int) -> Worker:
        return Worker(self.pipeline(rank), self.stage(rank))

    def rank(self, position: Worker, member: int = 0) -> int:
        """The inverse of :meth:`position` and :meth:`member`."""
        return position.pipeline * self.columns + position.stage * self.members + member

    def ranks(self, position: Worker) -> tuple[int, ...]:
        return tuple(self.rank(position, member) for member in range(self.members))

    def siblings(self, rank: int) -> frozenset[int]:
        return frozenset(self.ranks(self.position(rank))) - {rank}

    def all_members(self, ranks: Iterable[int]) -> frozenset[int]:
        if self.members == 1:
            return frozenset(ranks)
        return frozenset(member for rank in ranks for member in self.ranks(self.position(rank)))

    def whole(self, ranks: Collection[int]) -> frozenset[Worker]:
        """The positions of which all members are among ``ranks``."""
        firsts = (self.position(rank) for rank in ranks if self.member(rank) == 0)
        return frozenset(position for position in firsts if all(rank in ranks for rank in self.ranks(position)))

    def column_leaders(self, ranks: Iterable[int]) -> dict[int, int]:
        """By column with a worker among ``ranks``, the one of the lowest pipeline."""
        found: dict[int, int] = {}
        for rank in sorted(ranks, key=self.pipeline):
            found.setdefault(self.column(rank), rank)
        return found

    def name(self, rank: int) -> str:
        """As text: "(pipeline, stage)", and the member where positions have several."""
        return f"({', '.join(map(str, self.place(rank)))})"

    def place(self, rank: int) -> tuple[int, ...]:
        """Pipeline and stage, and the member where positions have several."""
        place = (*divmod(rank // self.members, self.grid.stages), rank % self.members)
        return place if self.members > 1 else place[:2]
