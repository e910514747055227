"""How a run is, as one value: what ``recycle-status``, the page, and the metrics show.

Concept: the coordinator's state, the digest of its record and its plan become one snapshot, which holds nothing but
numbers, texts and tuples of them. Everything that shows a run is a function of it.

Contract: immutable, and JSON by :func:`as_json`; ``schema`` grows when a field changes its meaning or goes, not when
one is added. Times are in seconds since the epoch, durations in seconds, steps count from 0 (-1: none yet).

Must not know: sockets, threads, clocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from lightning_recycle.control.digest import Digest
from lightning_recycle.control.goodput import Phase
from lightning_recycle.control.history import Event
from lightning_recycle.control.plain_values import plain
from lightning_recycle.control.protocol.state import MembershipState
from lightning_recycle.planning.schedule import Schedule

__all__ = ["SCHEMA", "Occurrence", "Place", "Plan", "Position", "PositionState", "Status", "as_json", "status_of"]

SCHEMA = 1
"""Version of :class:`Status`."""


class PositionState(str, Enum):
    """What is known of a position."""

    STARTING = "starting"
    """Its process is expected for the first roster."""
    LIVE = "live"
    JOINING = "joining"
    """A new process is set up, or is given the state of its stage."""
    SUSPECTED = "suspected"
    """Silent or stuck, and waited for."""
    LOST = "lost"
    """Its worker is out, and nobody has come for it."""
    VACANT = "vacant"
    """Its worker left, and nobody has come for it."""


@dataclass(frozen=True)
class Place:
    """A process: its machine, by the name it gave, and its process id there."""

    host: str | None
    pid: int | None


@dataclass(frozen=True)
class Position:
    """A position of the grid and who holds it.

    Args:
        pipeline, stage, rank: which position.
        state: what is known of it.
        host, pid: its newest process.
        incarnation: 0 for the first process of this position, 1 for the next one, ...
        step: the newest step that it has applied.
        since: when it was last heard, if it is suspected.
        cause: why it is suspected or lost.
        activity: what its main thread did at its newest heartbeat.
        waiting_for: what it waited for then; empty while it worked.
        peak_bytes: the most memory that its process has held: of tensors on CUDA, else of all; None if unknown.
    """

    pipeline: int
    stage: int
    rank: int
    state: PositionState
    host: str | None
    pid: int | None
    incarnation: int
    step: int
    since: float | None = None
    cause: str | None = None
    activity: str = ""
    waiting_for: str = ""
    peak_bytes: int | None = None


@dataclass(frozen=True)
class Occurrence:
    """An event of the record, see :class:`~lightning_recycle.control.history.Event`."""

    kind: str
    time: float
    generation: int
    step: int
    worker: tuple[int, int] | None
    seconds: float | None
    cause: str | None
    host: str | None
    pid: int | None


@dataclass(frozen=True)
class Plan:
    """The plan that runs.

    Args:
        number: it differs from plan to plan of a run.
        found_by: where it is from: "library", "ahead", "made", "better", "drift", or the name of a planner.
        techniques: which of ReCycle's techniques it uses.
        operations: the number of operations in a step.
        failed: the positions that it goes without.
    """

    number: int
    found_by: str
    techniques: tuple[str, ...]
    operations: int
    failed: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Throughput:
    """How fast the run is.

    Args:
        step_seconds: mean seconds of the newest steps under the present plan.
        predicted_step_seconds: those that follow from the plan and the times that its operations take.
        steps_per_second, samples_per_second: from ``step_seconds``; samples if it is known how many a step has.
        began, width, series: steps per second over the whole run, in intervals of ``width`` seconds from ``began`` on.
    """

    step_seconds: float | None
    predicted_step_seconds: float | None
    steps_per_second: float | None
    samples_per_second: float | None
    began: float
    width: float
    series: tuple[float, ...]


@dataclass(frozen=True)
class Status:
    """How a run is.

    Args:
        time: when this was so.
        began: when its coordinator was made.
        phase: "starting", "training", "recovering", "joining" (all wait for a change of the roster), or "over".
        outcome: how it ended: "Finished", "Ended", "StageLost", "Crashed" or "Failed".
        grid: ``pipelines``, ``stages``, ``microbatches``.
        generation: the current generation; -1 before the first.
        leader: the position that speaks for the run.
        step: the newest committed step.
        loss: its mean loss.
        positions: all positions, in rank order.
        spares: who waits for a position.
        plan: what all run; None before the first generation.
        throughput: how fast it is.
        counts: ``steps``, ``failures``, ``redone_steps``, ``rejoined_workers``, ``disturbances``, ``replans``,
            ``checkpoints``: how often that happened.
        recovery_seconds: from failures to the next commit, in all.
        worker_seconds: where the workers' time went: seconds by cause and phase, see
            :mod:`~lightning_recycle.control.goodput`.
        failures: the newest failures, the oldest first.
        events: the newest events that are no steps, the oldest first.
        name: what the run is called: its script.
        coordinator: the process that hosts the coordinator.
        version: of this package.
        schema: the version of this format.
    """

    time: float
    began: float
    phase: str
    outcome: str | None
    grid: Mapping[str, int]
    generation: int
    leader: tuple[int, int] | None
    step: int
    loss: float | None
    positions: tuple[Position, ...]
    spares: tuple[Place, ...]
    plan: Plan | None
    throughput: Throughput
    counts: Mapping[str, int]
    recovery_seconds: float
    worker_seconds: Mapping[str, Mapping[str, float]]
    failures: tuple[Occurrence, ...]
    events: tuple[Occurrence, ...]
    name: str = ""
    coordinator: Place = field(default_factory=lambda: Place(None, None))
    version: str = ""
    schema: int = SCHEMA

    @property
    def live(self) -> int:
        """How many workers train, or are suspected and waited for."""
        return sum(position.state in (PositionState.LIVE, PositionState.SUSPECTED) for position in self.positions)


def status_of(
    now: float,
    state: MembershipState,
    digest: Digest,
    schedule: tuple[int, Schedule] | None,
    processes: Mapping[int, tuple[str, int]],
    incarnations: Mapping[int, int],
    candidates: frozenset[int],
    activities: Mapping[int, tuple[str, str]],
    peaks: Mapping[int, int],
    spares: tuple[Place, ...],
    recovery_seconds: float,
) -> Status:
    """The status of a run.

    Args:
        now: the time.
        state: who is in, and what they have done.
        digest: what happened.
        schedule: the plan that runs and its number.
        processes: host and process id of the newest process of each rank.
        incarnations: their incarnations, where that is not 0.
        candidates: ranks for which a process is there or being started.
        activities: what main threads do, and what they wait for, by rank.
        peaks: the most bytes of memory that they have held, likewise.
        spares: who waits for a position.
        recovery_seconds: see :class:`Status`.
    """
    grid, counts = state.grid, digest.counts
    leads = grid.worker(state.leader) if state.generation >= 0 and state.leader in state.live else None
    positions = []
    for rank in range(grid.num_workers):
        worker = grid.worker(rank)
        kind = _state_of(rank, state, digest, candidates)
        since, cause = digest.suspected.get((worker.pipeline, worker.stage), (None, None))
        if kind is PositionState.LOST:
            cause = state.causes.get(rank)
        elif kind is not PositionState.SUSPECTED:
            since, cause = None, None
        host, pid = processes.get(rank, (None, None))
        doing, waiting = activities.get(rank, ("", ""))
        step = state.applied.get(rank, -1)
        positions.append(
            Position(
                *(worker.pipeline, worker.stage, rank, kind, host or None, pid, incarnations.get(rank, 0), step),
                *(since, cause, doing, waiting, peaks.get(rank)),
            )
        )
    per_step = digest.step_seconds
    return Status(
        time=now,
        began=digest.began,
        phase="over" if state.outcome is not None else digest.phase.value,
        outcome=None if state.outcome is None else type(state.outcome).__name__,
        grid={"pipelines": grid.pipelines, "stages": grid.stages, "microbatches": grid.microbatches},
        generation=state.generation,
        leader=None if leads is None else (leads.pipeline, leads.stage),
        step=digest.step,
        loss=digest.loss,
        positions=tuple(positions),
        spares=spares,
        plan=None if schedule is None else _plan(*schedule, digest.found_by),
        throughput=Throughput(
            *(per_step, None, 1 / per_step if per_step else None, None),
            *(digest.rates.began, digest.rates.width, digest.rates.series(now)),
        ),
        counts={
            "steps": counts["step"],
            "failures": counts["failure"],
            "redone_steps": counts["redone"],
            "rejoined_workers": counts["rejoined"],
            "disturbances": counts["disturbance"],
            "replans": counts["replanned"],
            "checkpoints": counts["saved"],
        },
        recovery_seconds=recovery_seconds,
        worker_seconds=digest.goodput.seconds(now),
        failures=tuple(map(_occurrence, digest.failures)),
        events=tuple(map(_occurrence, digest.events)),
    )


def _state_of(rank: int, state: MembershipState, digest: Digest, candidates: frozenset[int]) -> PositionState:
    worker = state.grid.worker(rank)
    if rank in state.live:
        if (worker.pipeline, worker.stage) in digest.suspected:
            return PositionState.SUSPECTED
        if rank in state.joining:
            return PositionState.JOINING
        return PositionState.STARTING if digest.phase is Phase.STARTING else PositionState.LIVE
    if rank in candidates or rank in state.ready:
        return PositionState.JOINING
    return PositionState.LOST if rank in state.causes else PositionState.VACANT


def _plan(number: int, schedule: Schedule, found_by: str) -> Plan:
    technique = schedule.problem.technique
    techniques = [
        *(["adaptive pipelining"] if schedule.failed else []),
        *(["decoupled back-propagation"] if technique.decoupled else []),
        *(["staggered optimizer"] if technique.staggered else []),
    ]
    failed = tuple((worker.pipeline, worker.stage) for worker in sorted(schedule.failed))
    return Plan(number, found_by, tuple(techniques), schedule.num_operations, failed)


def _occurrence(event: Event) -> Occurrence:
    cause = event.details.get("cause")
    return Occurrence(
        *(event.kind, event.time, event.generation, event.step, event.worker, event.seconds),
        *(None if cause is None else str(cause), event.host, event.pid),
    )


def as_json(status: Status) -> dict[str, Any]:
    """``status`` as what JSON has: objects, lists, texts, finite numbers and null."""
    found = plain(status)
    assert isinstance(found, dict)
    return found
