"""What workers and coordinator say to each other: frozen values, pickled onto one connection per worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_recycle.planning.profile import StageProfile
from lightning_recycle.resilience.recovery import Decision, WorkerStatus

__all__ = [
    "Activity",
    "Answer",
    "Applied",
    "Arrive",
    "Broken",
    "Commit",
    "Committed",
    "Connected",
    "Crash",
    "Event",
    "FaultInjected",
    "Heartbeat",
    "Hello",
    "Losses",
    "Profiled",
    "Publish",
    "Regroup",
    "Report",
    "Resume",
    "StepLoss",
    "Stop",
]


# ---------------------------------------------------------------------- worker -> coordinator


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message on a connection."""

    rank: int
    pid: int


@dataclass(frozen=True, slots=True)
class Activity:
    """What a worker's main thread is doing; ``since`` is the worker's monotonic clock in seconds."""

    step: int
    operation: str
    waiting_for: str
    since: float


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A sign of life, with what the main thread does."""

    rank: int
    generation: int
    activity: Activity


@dataclass(frozen=True, slots=True)
class Report:
    """A survivor stopped for ``generation`` and says what it holds.

    ``commit`` is what it would bring to the commit of its step if it is REDUCED and commits are asked for.
    """

    rank: int
    generation: int
    status: WorkerStatus
    commit: Any = None


@dataclass(frozen=True, slots=True)
class Broken:
    """Communication failed in ``generation`` though no failure was announced."""

    rank: int
    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Losses:
    """Losses of micro-batches of ``step``, by their global index; sent before any gradient of the last of them."""

    rank: int
    step: int
    losses: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Applied:
    """The worker has applied ``step``. ``operation_seconds``: its mean time by kind of operation, without waiting."""

    rank: int
    step: int
    operation_seconds: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Profiled:
    """What a worker measured of its stage in ``steps`` steps, and of the link to the next stage (0: there is none)."""

    rank: int
    stage: StageProfile
    latency: float
    bandwidth: float
    steps: int


@dataclass(frozen=True, slots=True)
class Commit:
    """The worker is REDUCED in ``step`` and waits for all others to be; ``payload`` reaches everybody with the answer.

    Only where a stage must know something of the others before it steps, or the optimizer is not staggered.
    """

    rank: int
    generation: int
    step: int
    payload: Any


@dataclass(frozen=True, slots=True)
class Arrive:
    """The worker's part of control collective ``number``; ``name`` is what all must agree on."""

    rank: int
    number: int
    name: str
    payload: Any


@dataclass(frozen=True, slots=True)
class Crash:
    """The worker ends with an exception.

    ``fault`` tells an infrastructure failure, which peers survive, from the user's own exception, which ends the run.
    """

    rank: int
    fault: bool
    summary: str
    exception: bytes | None
    traceback: str


@dataclass(frozen=True, slots=True)
class Connected:
    """The worker's communicator of ``generation`` is complete."""

    rank: int
    generation: int


@dataclass(frozen=True, slots=True)
class Publish:
    """What a worker wants all others of ``generation`` to know, so that they can connect; passed on as it is."""

    rank: int
    generation: int
    key: str
    value: bytes


@dataclass(frozen=True, slots=True)
class FaultInjected:
    """An injected fault is about to happen in this worker; ``time`` in seconds since the epoch."""

    rank: int
    kind: str
    operation: str
    time: float


# ---------------------------------------------------------------------- coordinator -> worker


@dataclass(frozen=True, slots=True)
class Regroup:
    """Stop what you do and report: ``generation`` begins, with ``roster`` (the ranks of the live workers)."""

    generation: int
    roster: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Resume:
    """All survivors reported; connect, do your action, and go on with the plan."""

    generation: int
    roster: tuple[int, ...]
    decision: Decision
    schedule: Any
    commits: Mapping[int, Any]
    """What the stages brought to the commit of step ``decision.version - 1``, by stage, as far as known."""


@dataclass(frozen=True, slots=True)
class Committed:
    """Everybody is REDUCED in ``step``: apply it. ``payloads``: one of each stage, by stage."""

    generation: int
    step: int
    payloads: Mapping[int, Any]


@dataclass(frozen=True, slots=True)
class StepLoss:
    """All losses of ``step`` are known; ``loss`` is their mean, summed in the order of the micro-batches."""

    step: int
    loss: float


@dataclass(frozen=True, slots=True)
class Answer:
    """Control collective ``number`` is complete: the payloads of the live workers by rank, the same for all."""

    number: int
    payloads: Mapping[int, Any]


@dataclass(frozen=True, slots=True)
class Stop:
    """The run is over; leave."""

    reason: str


# ---------------------------------------------------------------------- record


@dataclass(frozen=True, slots=True)
class Event:
    """One entry of ``strategy.history``.

    Args:
        kind: what happened. "resumed": all workers agreed on where to go on (first generation included).
            "regrouped": all are connected. "step": a step was committed; ``seconds`` since the one before. "failure":
            a worker was declared dead; ``seconds`` from its death, as far as known, to the declaration. "recovered":
            the first commit after a failure. "disturbance": connections broke though nobody died. "stage_lost".
            Where a failure is being recovered, ``seconds`` of "resumed", "regrouped" and "recovered" count from it.
        time: seconds since the epoch.
        generation: at that time.
        step: the optimizer step concerned.
        worker: (pipeline, stage), where one is concerned.
        details: further facts by name.
    """

    kind: str
    time: float
    generation: int
    step: int
    worker: tuple[int, int] | None = None
    seconds: float | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
