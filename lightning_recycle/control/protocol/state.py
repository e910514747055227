"""What the coordinator knows of a run, which events can happen, and which commands follow. Frozen values, no logic.

:mod:`~lightning_recycle.control.protocol.membership` and :mod:`~lightning_recycle.control.protocol.step_commit` are the
functions over them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeAlias

from lightning_recycle.control.protocol import messages
from lightning_recycle.control.protocol.corruption import Checks
from lightning_recycle.control.protocol.fault_attribution import Pair, Remembered
from lightning_recycle.control.protocol.messages import AfterStep
from lightning_recycle.planning.grid import Grid
from lightning_recycle.planning.schedule import Schedule

MAX_OUTVOTED = 2
"""Evictions for other values, after which a position stays empty: each replacement would be evicted, too."""

RESULT = "result"
"""Name of the collective that delivers the results of the run; the coordinator keeps its payloads."""

ENDED = "ended"
"""Name of the collective at which a run ends that was told to: all workers have saved what was wanted."""


# ---------------------------------------------------------------------- events (besides the workers' messages)


@dataclass(frozen=True, slots=True)
class Joined:
    """Worker ``rank`` said hello before the training began."""

    rank: int


@dataclass(frozen=True, slots=True)
class Lost:
    """Worker ``rank`` is dead for certain, or declared so."""

    rank: int
    cause: str


@dataclass(frozen=True, slots=True)
class CandidateLost:
    """The process that was to join as ``rank`` ended before it was let in."""

    rank: int


@dataclass(frozen=True, slots=True)
class MovePlanned:
    """Worker ``mover`` leaves when the worker that joins as ``rank`` enters: they share a device."""

    rank: int
    mover: int


@dataclass(frozen=True, slots=True)
class PlanReady:
    """A better plan for the workers ``roster`` exists.

    Args:
        roster: the ranks that the plan is for; others have no use for it.
        schedule: the plan.
        details: why it is better, for the record.
        reconnects: whether it needs connections that these workers do not have.
    """

    roster: tuple[int, ...]
    schedule: Schedule
    details: Mapping[str, Any] = field(default_factory=dict)
    reconnects: bool = False


@dataclass(frozen=True, slots=True)
class LayoutReady:
    """The workers ``roster`` do better with another layout.

    Args:
        roster: the ranks that the layout is for; others have no use for it.
        cuts: the layout.
        details: why it is better, for the record.
    """

    roster: tuple[int, ...]
    cuts: messages.Cuts
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GraceElapsed:
    """Communication broke in ``generation`` a while ago; no death explains it yet."""

    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class EndWanted:
    """The run is to end at the next step boundary, so that a checkpoint can be written there."""


MembershipEvent: TypeAlias = (
    Joined
    | Lost
    | CandidateLost
    | MovePlanned
    | PlanReady
    | LayoutReady
    | GraceElapsed
    | EndWanted
    | messages.Report
    | messages.Broken
    | messages.Losses
    | messages.Passed
    | messages.Applied
    | messages.Commit
    | messages.Undo
    | messages.Arrive
    | messages.Heartbeat
    | messages.RequestStop
    | messages.GoesOn
    | messages.Raised
    | messages.Disputed
    | messages.Voted
    | messages.NotFinite
    | messages.Incomparable
    | messages.Crash
    | messages.LayoutWanted
    | messages.LayersHeld
    | messages.Ready
    | messages.Leave
    | messages.EndRun
    | messages.Paused
    | messages.AtBoundary
    | messages.Entered
    | messages.Restored
    | messages.Returned
)


# ---------------------------------------------------------------------- commands


@dataclass(frozen=True, slots=True)
class Send:
    """Send ``message`` to ``ranks``; with a ``schedule``, to each with its program of that schedule."""

    ranks: tuple[int, ...]
    message: Any
    schedule: Schedule | None = None


@dataclass(frozen=True, slots=True)
class Resend:
    """Send ``message``, which others were sent by an earlier coordinator, to ``ranks``: as it is."""

    ranks: tuple[int, ...]
    message: Any


@dataclass(frozen=True, slots=True)
class StartGrace:
    """Return :class:`GraceElapsed` after a while; until then a death may explain the broken connection."""

    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Evict:
    """End worker ``rank`` for good and return :class:`Lost`."""

    rank: int
    cause: str


@dataclass(frozen=True, slots=True)
class Record:
    """An entry for the history; the shell adds the time."""

    kind: str
    step: int
    rank: int | None = None
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Finished:
    """Every stage delivered its result: payloads by rank. Whoever opens one takes it out, as it may be large."""

    results: MutableMapping[int, Any]


@dataclass(frozen=True, slots=True)
class Ended:
    """The workers ended at a step boundary, as :class:`EndWanted` asked; before the first step they end at once."""


@dataclass(frozen=True, slots=True)
class StageLost:
    """All replicas of ``stage`` are dead; ``causes`` by rank."""

    stage: int
    causes: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class Crashed:
    """A worker raised the user's own exception: every worker would meet it."""

    crash: messages.Crash


@dataclass(frozen=True, slots=True)
class Failed:
    """The run cannot go on."""

    reason: str


Outcome: TypeAlias = Finished | Ended | StageLost | Crashed | Failed
Command: TypeAlias = Send | Resend | StartGrace | Evict | Record | Outcome


# ---------------------------------------------------------------------- state

Told: TypeAlias = tuple[int, Mapping[str, float]]
"""A rank, and values by name that it told after a step, and that others must hold as well."""


@dataclass(frozen=True, slots=True)
class PauseState:
    """The live workers are being stopped at a step boundary.

    Args:
        number: its number among the pauses of the generation.
        begun: the newest step that each worker has begun, by rank, as far as known.
        boundary: the step at whose beginning they stop, once all have answered.
        arrived: the ranks that wait there.
    """

    number: int = 0
    begun: Mapping[int, int] = field(default_factory=dict)
    boundary: int | None = None
    arrived: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class StopRound:
    """Some asked to stop training early at a stop point
    (:mod:`~lightning_recycle.control.protocol.control_collectives`).

    Args:
        point: the stop point.
        wanted: the ranks that did.
        is_over: whether those that asked were answered.
        agreed: whether they were told that all stop there.
    """

    point: int
    wanted: frozenset[int] = frozenset()
    is_over: bool = False
    agreed: bool = False


@dataclass(frozen=True)
class MembershipState:
    """Everything the coordinator knows about the run.

    Args:
        grid: the positions.
        live: the ranks that are not lost.
        joined: the ranks that said hello.
        generation: the current generation; -1 before the first.
        leader: the rank that speaks for the run; it does not change while that worker lives.
        regrouping: whether the generation still waits for reports.
        reports: the reports of the current generation, by rank.
        joining: live ranks that do not have the state of their stage yet.
        newcomers: live ranks that joined while the training was going on.
        outvoted: by position, the steps after which workers were evicted because most others held other values.
        ready: ranks of workers that wait to be let in.
        leaving: live ranks that want to leave.
        ending: those of them after which the run may end: once all live ranks are among them, it does.
        moves: for each rank that is to join, the live rank that leaves for it.
        pause: the pause for a change at a step boundary, if one is under way.
        pauses: how many earlier ones the generation had.
        plan: what all are to run from a step boundary on.
        cuts: the layout with which all train.
        layout: the one that all are to have from a step boundary on.
        becomes: the layout that they get ready for in the current generation; empty in any other.
        held: the ranks that have the layers that they need for it.
        commits: the commits of the current generation and step, by rank.
        committed: the newest step whose commit was answered in the current generation; -1 if there is none.
        answered: step and payloads, by stage, of the newest commit that was answered.
        applied: the newest step that each worker has applied, by rank; -1 before the first.
        facts: for steps that not every live worker has applied: step -> stage, or None for what must be the same on
            all -> who told what; only who told something first, while there are no newcomers.
        losses: for steps that are not complete: step -> global micro-batch -> loss.
        outputs: for the same steps: step -> global micro-batch -> what hooks did with its output.
        summed: the number of steps whose loss is known.
        unproven: the newest step with losses that count once all live workers have passed it, or that a worker with
            wrong values has taken part in; -1 for none.
        passes: the ranks that have passed step ``summed`` in the current generation.
        collectives: open control collectives: number -> rank -> contribution.
        next_collective: the lowest number that is not answered yet.
        causes: why workers were lost, by rank.
        version: the number of steps that every live worker has applied.
        passed: all live workers of lower ranks have applied step ``version``.
        has_resumed: whether a generation has been resumed. Before, code runs that only one worker runs, such as
            ``prepare_data``.
        retries: how often work that raised a suspected exception is run again.
        raised: the suspected exceptions, the oldest first.
        disturbances: regroups in a row without a loss or a commit.
        broken_pairs: live workers of which one reported, in the current generation, that it cannot reach the other.
        stop_round: the newest stop point at which some asked to stop.
        after_step: what all are to do after the next step whose losses become complete.
        returned: after the coordinator was started again, until all live workers have returned or are lost: what each
            of them holds, by rank; None otherwise.
        checks: the checks of what workers hold.
        outcome: how the run ended, once it has.
    """

    grid: Grid
    live: frozenset[int]
    joined: frozenset[int] = frozenset()
    generation: int = -1
    leader: int = -1
    regrouping: bool = False
    reports: Mapping[int, messages.Report] = field(default_factory=dict)
    joining: frozenset[int] = frozenset()
    newcomers: frozenset[int] = frozenset()
    outvoted: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    ready: frozenset[int] = frozenset()
    leaving: frozenset[int] = frozenset()
    ending: frozenset[int] = frozenset()
    moves: Mapping[int, int] = field(default_factory=dict)
    pause: PauseState | None = None
    pauses: int = 0
    plan: PlanReady | None = None
    cuts: messages.Cuts = ()
    layout: LayoutReady | None = None
    becomes: messages.Cuts = ()
    held: frozenset[int] = frozenset()
    commits: Mapping[int, messages.Commit] = field(default_factory=dict)
    committed: int = -1
    answered: tuple[int, Mapping[int, Any]] = (-1, MappingProxyType({}))
    applied: Mapping[int, int] = field(default_factory=dict)
    facts: Mapping[int, Mapping[int | None, tuple[Told, ...]]] = field(default_factory=dict)
    losses: Mapping[int, Mapping[int, float]] = field(default_factory=dict)
    outputs: Mapping[int, Mapping[int, bytes]] = field(default_factory=dict)
    summed: int = 0
    unproven: int = -1
    passes: frozenset[int] = frozenset()
    collectives: Mapping[int, Mapping[int, messages.Arrive]] = field(default_factory=dict)
    next_collective: int = 0
    causes: Mapping[int, str] = field(default_factory=dict)
    version: int = 0
    passed: int = 0
    has_resumed: bool = False
    retries: int = 1
    raised: tuple[Remembered, ...] = ()
    disturbances: int = 0
    broken_pairs: frozenset[Pair] = frozenset()
    stop_round: StopRound | None = None
    after_step: AfterStep = AfterStep.GO_ON
    returned: Mapping[int, messages.Returned] | None = None
    checks: Checks = field(default_factory=Checks)
    outcome: Outcome | None = None

    def updated(self, **changes: Any) -> MembershipState:
        """``dataclasses.replace``, ten times faster, for what every message of every worker changes."""
        assert changes.keys() <= self.__dict__.keys()
        state = object.__new__(MembershipState)
        state.__dict__.update(self.__dict__, **changes)
        return state

    @property
    def roster(self) -> tuple[int, ...]:
        return tuple(sorted(self.live))

    @property
    def vacant(self) -> tuple[int, ...]:
        """Ranks that no worker holds and none is ready to take, and that may be taken."""
        out = self.live | self.ready | self.barred
        return tuple(rank for rank in range(self.grid.num_workers) if rank not in out)

    @property
    def barred(self) -> frozenset[int]:
        """Positions that stay empty: their workers were wrong again and again."""
        return frozenset(rank for rank, steps in self.outvoted.items() if len(steps) >= MAX_OUTVOTED)

    def stage_of(self, rank: int) -> int:
        return self.grid.worker(rank).stage

    def lead_of(self, stage: int) -> int | None:
        """The live rank that speaks for ``stage``, see :func:`stage_leads`; None if there is none."""
        ranks = range(stage, self.grid.num_workers, self.grid.stages)
        return next((rank for rank in ranks if rank in self.live), None)

    def holders(self, stage: int) -> frozenset[int]:
        """The live ranks that have the state of ``stage``."""
        with_state = self.live - self.joining - self.checks.healing
        return frozenset(rank for rank in with_state if self.stage_of(rank) == stage)


def initial_state(grid: Grid, retries: int = 1) -> MembershipState:
    """The state before anybody has joined; ``retries``: see :class:`MembershipState`."""
    live = frozenset(range(grid.num_workers))
    return MembershipState(grid=grid, live=live, leader=leader(grid, live), retries=retries)


def leader(grid: Grid, roster: Iterable[int]) -> int:
    """The rank that speaks for the run at its start and after the leader's death: the live last-stage worker of the
    lowest pipeline (it owns loss and metrics).
    """
    return stage_leads(grid, roster)[grid.stages - 1]


def stage_leads(grid: Grid, roster: Iterable[int]) -> dict[int, int]:
    """For each stage with a live worker, the rank that speaks for it: the one of the lowest pipeline."""
    leads: dict[int, int] = {}
    for rank in sorted(roster):
        leads.setdefault(grid.worker(rank).stage, rank)
    return leads
