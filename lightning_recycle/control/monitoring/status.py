"""Status of a run as one immutable value, as JSON and as metrics for Prometheus.

``recycle-status``, the page and the metrics are functions of it.

Contract: immutable, and JSON by :func:`~lightning_recycle.control.monitoring.logs.plain`; ``schema`` grows when a
field changes its meaning or goes, not when one is added. Times are in seconds since the epoch, durations in seconds,
steps count from 0 (-1: none yet). Names of metrics begin with ``recycle_``, and counters count from the coordinator's
start; unknown values have no sample. They need ``prometheus-client`` (the extra ``metrics``).

Must not know: sockets, threads, clocks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from lightning_recycle.arguments import install_command
from lightning_recycle.control.monitoring.history import Digest, Event, History, Phase
from lightning_recycle.control.protocol.state import MembershipState
from lightning_recycle.planning.schedule import Schedule

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

SCHEMA = 1
"""Version of :class:`Status`."""


class PositionState(str, Enum):
    """State of a position."""

    STARTING = "starting"
    """Its process is expected for the first roster."""
    LIVE = "live"
    JOINING = "joining"
    """A new process is set up, or is given the state of its stage."""
    SUSPECTED = "suspected"
    """Silent or stuck, and waited for."""
    """It is well, and another process of its position is lost."""
    LOST = "lost"
    """Its worker is out, and nobody has come for it."""
    VACANT = "vacant"
    """Its worker left, and nobody has come for it."""


@dataclass(frozen=True)
class ProcessLocation:
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
        member: which of the processes that hold the position together.
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
    member: int = 0


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
    """Throughput of a run.

    Args:
        step_seconds: mean seconds of the newest steps under the present plan.
        predicted_step_seconds: those that follow from the plan and the times that its operations take.
        steps_per_second, samples_per_second: from ``step_seconds``; samples if it is known how many a step has.
    """

    step_seconds: float | None
    predicted_step_seconds: float | None
    steps_per_second: float | None
    samples_per_second: float | None


@dataclass(frozen=True)
class Status:
    """Status of a run.

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
            :mod:`~lightning_recycle.control.monitoring.history`.
        failures: the newest failures, the oldest first; of their details the cause.
        events: the newest events that are no steps, likewise.
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
    spares: tuple[ProcessLocation, ...]
    plan: Plan | None
    throughput: Throughput
    counts: Mapping[str, int]
    recovery_seconds: float
    worker_seconds: Mapping[str, Mapping[str, float]]
    failures: tuple[Event, ...]
    events: tuple[Event, ...]
    name: str = ""
    coordinator: ProcessLocation = field(default_factory=lambda: ProcessLocation(None, None))
    version: str = ""
    schema: int = SCHEMA


def status_of(
    now: float,
    state: MembershipState,
    history: History,
    schedule: tuple[int, Schedule] | None,
    incarnations: Mapping[int, int],
    connected: Collection[int],
    candidates: frozenset[int],
    activities: Mapping[int, tuple[str, str]],
    spares: tuple[ProcessLocation, ...],
) -> Status:
    """The status of a run.

    ``schedule``: the current plan and its number. ``incarnations``: of the newest process of each rank, where not 0.
    ``candidates``: ranks whose process exists or is being started. ``activities``: by rank, the main thread's activity
    and what it waits for.
    """
    grid, digest, counts = state.positions.grid, history.digest, history.digest.counts
    leads = (
        state.positions.position(state.roster.leader)
        if state.generation.number >= 0 and state.roster.leader in state.roster.live
        else None
    )
    positions = []
    ranks = state.positions
    for rank in range(state.positions.num_workers):
        worker = ranks.position(rank)
        kind = _state_of(rank, state, digest, candidates)
        since, cause = digest.suspected.get((worker.pipeline, worker.stage), (None, None))
        if kind is PositionState.LOST:
            cause = state.roster.causes.get(rank)
        elif kind is not PositionState.SUSPECTED:
            since, cause = None, None
        is_awaited = rank in candidates and rank not in connected  # another process than that which was known
        host, pid = (None, None) if is_awaited else history.processes.get(rank, (None, None))
        doing, waiting = activities.get(rank, ("", ""))
        step = state.steps.applied.get(rank, -1)
        positions.append(
            Position(
                *(worker.pipeline, worker.stage, rank, kind, host or None, pid, incarnations.get(rank, 0), step),
                *(since, cause, doing, waiting, history.peaks.get(rank), ranks.member(rank)),
            )
        )
    per_step = digest.step_seconds
    return Status(
        time=now,
        began=digest.began,
        phase="over" if state.outcome is not None else digest.goodput.phase.value,
        outcome=None if state.outcome is None else type(state.outcome).__name__,
        grid={"pipelines": grid.pipelines, "stages": grid.stages, "microbatches": grid.microbatches},
        generation=state.generation.number,
        leader=None if leads is None else (leads.pipeline, leads.stage),
        step=digest.step,
        loss=digest.loss,
        positions=tuple(positions),
        spares=spares,
        plan=None if schedule is None else _plan(*schedule, digest.found_by),
        throughput=Throughput(per_step, None, 1 / per_step if per_step else None, None),
        counts={name: counts[kind] for name, (kind, _) in _COUNTERS.items()},
        recovery_seconds=digest.recovery_seconds,
        worker_seconds=digest.goodput.seconds(now),
        failures=tuple(map(_shown, digest.failures)),
        events=tuple(map(_shown, digest.events)),
    )


def _state_of(rank: int, state: MembershipState, digest: Digest, candidates: frozenset[int]) -> PositionState:
    worker = state.positions.position(rank)
    if rank in state.roster.live:
        if (worker.pipeline, worker.stage) in digest.suspected:
            return PositionState.SUSPECTED
        if rank in state.roster.joining:
            return PositionState.JOINING
        return PositionState.STARTING if digest.goodput.phase is Phase.STARTING else PositionState.LIVE
    if rank in candidates or rank in state.roster.ready:
        return PositionState.JOINING
    return PositionState.LOST if rank in state.roster.causes else PositionState.VACANT


def _plan(number: int, schedule: Schedule, found_by: str) -> Plan:
    technique = schedule.problem.technique
    techniques = [
        *(["adaptive pipelining"] if schedule.failed else []),
        *(["split backward"] if technique.split_backward else []),
        *(["staggered optimizer"] if technique.staggered else []),
    ]
    failed = tuple((worker.pipeline, worker.stage) for worker in sorted(schedule.failed))
    return Plan(number, found_by, tuple(techniques), schedule.num_operations, failed)


def _shown(event: Event) -> Event:
    """``event`` with the cause alone of its details: others may be long."""
    cause = event.details.get("cause")
    return replace(event, details={} if cause is None else {"cause": str(cause)})


_REMEDY = f"Metrics need the package prometheus-client: {install_command('metrics')}."
_PHASES = ("starting", "training", "recovering", "joining", "over")
_SERVING = (PositionState.LIVE, PositionState.SUSPECTED)

_COUNTERS = {
    "steps": ("step", "Steps that were committed"),
    "failures": ("failure", "Workers that were lost"),
    "redone_steps": ("redone", "Steps that ran again"),
    "rejoined_workers": ("rejoined", "Replacements that joined"),
    "disturbances": ("disturbance", "Times that connections broke although no worker died"),
    "replans": ("replanned", "Changes of the plan within a generation"),
    "checkpoints": ("saved", "Checkpoints that were completed"),
}
"""Kind of event and text of each counter."""


def metrics(status: Status | None, accept: str) -> tuple[bytes, str]:
    """The metrics in the format that the header ``accept`` asks for, and content type.

    ``status``: None for no run. Raises ModuleNotFoundError, with the remedy, without prometheus-client.
    """
    try:
        from prometheus_client import CollectorRegistry
        from prometheus_client.exposition import choose_encoder
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(_REMEDY, name=error.name) from error
    registry = CollectorRegistry()
    registry.register(_Collector(status))
    encode, kind = choose_encoder(accept)
    return encode(registry), kind


class _Collector:
    def __init__(self, status: Status | None) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

        def gauge(name: str, text: str, value: float | None) -> Iterator[Any]:
            if value is not None:
                yield GaugeMetricFamily(f"recycle_{name}", text, value=value)

        status = self._status
        yield from gauge("up", "Whether there is a run at the moment", status is not None and status.outcome is None)
        if status is None:
            return
        speed, grid = status.throughput, status.grid
        about = {"name": status.name, "version": status.version, **{key: str(value) for key, value in grid.items()}}
        yield InfoMetricFamily("recycle_run", "The run", value=about)
        yield from gauge("start_time_seconds", "When the coordinator was made, since the epoch", status.began)
        phases = GaugeMetricFamily("recycle_phase", "Whether the run is in this phase", labels=["phase"])
        for phase in _PHASES:
            phases.add_metric([phase], phase == status.phase)
        yield phases

        states = GaugeMetricFamily("recycle_workers", "Positions of the grid by state", labels=["state"])
        for state in PositionState:
            states.add_metric([state.value], sum(position.state is state for position in status.positions))
        yield states
        names = ["pipeline", "stage", *(["member"] if any(p.member for p in status.positions) else [])]
        lives = GaugeMetricFamily("recycle_worker_live", "Whether a position is held", labels=names)
        newest = GaugeMetricFamily("recycle_worker_step", "Steps that a position applied", labels=names)
        text = "The most memory that a worker's process has held"
        peaks = GaugeMetricFamily("recycle_worker_peak_bytes", text, labels=names)
        for position in status.positions:
            labels = [str(getattr(position, name)) for name in names]
            lives.add_metric(labels, position.state in _SERVING)
            newest.add_metric(labels, position.step + 1)
            if position.peak_bytes is not None:
                peaks.add_metric(labels, position.peak_bytes)
        yield lives
        yield newest
        yield peaks
        yield from gauge("spares", "Workers that wait for a position", len(status.spares))
        yield from gauge("generation", "The number of the current generation", status.generation)

        yield from gauge("step", "Steps that the training has made, also in earlier runs", status.step + 1)
        yield from gauge("loss", "Mean loss of the newest step", status.loss)
        yield from gauge("step_seconds", "Mean seconds of a step under the present plan", speed.step_seconds)
        text = "Seconds of a step that follow from the plan and the times of its operations"
        yield from gauge("predicted_step_seconds", text, speed.predicted_step_seconds)
        yield from gauge("samples_per_second", "Samples per second, if a step's are known", speed.samples_per_second)

        for name, (_, text) in _COUNTERS.items():
            yield CounterMetricFamily(f"recycle_{name}", text, value=status.counts[name])
        text = "Seconds from failures to the next commit"
        yield CounterMetricFamily("recycle_recovery_seconds", text, value=status.recovery_seconds)
        failed = status.failures[-1].time if status.failures else None
        yield from gauge("last_failure_time_seconds", "When a worker was last lost, since the epoch", failed)

        text = "Where the workers' time went, by the simulator's causes"
        spent = CounterMetricFamily("recycle_worker_seconds", text, labels=["cause", "phase"])
        for cause, by_phase in status.worker_seconds.items():
            for phase, seconds in by_phase.items():
                spent.add_metric([cause, phase], seconds)
        yield spent
