"""State of the coordinator, in parts; its events and commands. Frozen values.

:mod:`~lightning_recycle.control.protocol.membership` and its handlers are the functions over them.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import chain
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

from lightning_recycle.control.protocol import messages
from lightning_recycle.control.protocol.messages import AfterStep, Checked
from lightning_recycle.planning.grid import Grid, Positions, Worker
from lightning_recycle.planning.schedule import Schedule

VALIDATES = bool(os.environ.get("RECYCLE_VALIDATE"))
"""Whether the states of coordinator and workers are checked after each event: in tests, and to find an error."""

MAX_DISMISSED = 2
"""Dismissals for other values, after which a position stays empty: each replacement would be dismissed, too."""

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
class StartDue:
    """The wait for ``vacant`` ranks is over: begin if each stage has ``least`` others."""

    vacant: frozenset[int]
    least: int


@dataclass(frozen=True, slots=True)
class Lost:
    """Worker ``rank``, or the process that was to join as it, is dead or declared so."""

    rank: int
    cause: str


@dataclass(frozen=True, slots=True)
class PlanReady:
    """Event: a better plan is there for the workers ``roster``, and for no others.

    ``details``: why it is better, for the record. ``reconnects``: whether these workers lack connections for it.
    """

    roster: tuple[int, ...]
    schedule: Schedule
    details: Mapping[str, Any] = field(default_factory=dict)
    reconnects: bool = False


@dataclass(frozen=True, slots=True)
class LayoutReady:
    """Event: a better layout is there for the workers ``roster``, and for no others.

    ``details``: why it is better, for the record.
    """

    roster: tuple[int, ...]
    cuts: messages.Cuts
    details: Mapping[str, Any] = field(default_factory=dict)

    def is_for(self, roster: tuple[int, ...]) -> bool:
        """Whether workers ``roster`` are to have it; a user's layout is for all."""
        return self.roster in ((), roster)


@dataclass(frozen=True, slots=True)
class GraceElapsed:
    """Communication broke in ``generation`` a while ago; no death explains it yet."""

    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class EndWanted:
    """End the run at the next step boundary, where a checkpoint can be written."""


MembershipEvent: TypeAlias = (
    Joined | StartDue | Lost | PlanReady | LayoutReady | GraceElapsed | EndWanted | messages.FromWorker
)


# ---------------------------------------------------------------------- commands


@dataclass(frozen=True, slots=True)
class Send:
    """Send ``message`` to ``ranks``; each with its program of ``schedule``, if any."""

    ranks: tuple[int, ...]
    message: Any
    schedule: Schedule | None = None


@dataclass(frozen=True, slots=True)
class Resend:
    """Send ``message`` of an earlier coordinator to ``ranks``, unchanged."""

    ranks: tuple[int, ...]
    message: Any


@dataclass(frozen=True, slots=True)
class StartGrace:
    """Return :class:`GraceElapsed` later: a death may explain a broken connection."""

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
    """Every stage delivered its result: payloads by rank, taken out by the reader."""

    results: MutableMapping[int, Any]


@dataclass(frozen=True, slots=True)
class Ended:
    """The workers ended at a step boundary (:class:`EndWanted`), or before any step."""


@dataclass(frozen=True, slots=True)
class StageLost:
    """All replicas of ``stage`` are dead; ``causes`` by rank."""

    stage: int
    causes: Mapping[int, str]

    def causes_in(self, positions: Positions) -> str:
        """``causes`` for people, by position."""
        return "; ".join(f"worker {positions.name(rank)}: {cause}" for rank, cause in sorted(self.causes.items()))


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

POLICIES = ("evict", "raise")
"""Consequence for a worker that holds wrong bits."""

Sums: TypeAlias = Mapping[str, bytes]
"""Checksums of what a computation gave, by name."""


@dataclass(frozen=True, slots=True)
class Dispute:
    """Different bits for one micro-batch, which peers compute once more.

    ``recorder``: the worker that has the inputs, and got other bits than ``accused``, which it checked. ``claims``: the
    first results of both, by rank. ``votes``: by rank, the result and whether it was the same twice. ``devices``: by
    rank, as far as known. ``varies``: as in the newest vote with a second result that differed.
    """

    step: int
    microbatch: int
    recorder: int
    accused: int
    claims: Mapping[int, Sums]
    votes: Mapping[int, tuple[Sums, bool]] = field(default_factory=dict)
    devices: Mapping[int, str] = field(default_factory=dict)
    varies: str = ""


@dataclass(frozen=True, slots=True)
class Checks:
    """State of the checks of a run.

    Args:
        policy: the response to a culprit, one of :data:`POLICIES`.
        every: steps between two checks; 0 for as many as the workers ask for.
        checksums: not compared yet: step -> rank -> checksums.
        planned: the step after which workers check next; -1 if undecided.
        agreed: the newest step after which all reporting workers held the same bits as their peers; -1 for none.
        comparable: whether computations can be compared bit by bit in this run.
        inspects: the step in which workers look for the origin of values that are not finite; -1 for none.
        excused: the step up to which such values are the model's; ``excuses``: the number of such steps.
    """

    policy: str = "evict"
    every: int = 0
    checksums: Mapping[int, Mapping[int, Checked]] = field(default_factory=dict)
    planned: int = -1
    agreed: int = -1
    dispute: Dispute | None = None
    comparable: bool = True
    inspects: int = -1
    excused: int = -1
    excuses: int = 0

    def add(self, rank: int, step: int, checked: Checked) -> Checks:
        of_step = {**self.checksums.get(step, {}), rank: checked}
        return replace(self, checksums={**self.checksums, step: of_step})

    def due(self, version: int) -> bool:
        """Whether a check is over: all participants have reported and applied ``version``."""
        return bool(self.checksums) and min(self.checksums) < version

    def plan(self, step: int, summed: int, checked: Mapping[int, Checked]) -> Checks:
        """These checks, with the next one planned after that of ``step``.

        It is the step after the next whose loss is complete (``summed``) at the earliest: only that can be announced to
        all workers before any of them is in it.
        """
        asked = max((one.interval for one in checked.values()), default=1)
        return replace(self, planned=max(step + (self.every or asked), summed + 1))

    def is_announced_by(self, step: int) -> bool:
        """Whether the loss of ``step`` announces a check at the end of the next step."""
        return self.planned == step + 1


Pair: TypeAlias = tuple[int, int]
"""Two ranks, the lower one first."""


@dataclass(frozen=True, slots=True)
class Remembered:
    """Record of a worker's exception, by which later ones are judged.

    ``generation``: its worker's; a worker raises at most once in each. ``place``: the step (:data:`~.messages.OUTSIDE`
    of steps) and the operation. ``version``: the number of steps that all workers had applied.
    """

    rank: int
    generation: int
    stage: int
    place: tuple[int, str]
    version: int


_Part = TypeVar("_Part", bound="_Updatable")

Reported: TypeAlias = tuple[int, Mapping[str, float]]
"""A rank, and values by name that it reported after a step, and that others must hold as well."""


class _Updatable:
    """Parts of the state: frozen dataclasses without slots, replaced at each message."""

    def updated(self: _Part, **changes: Any) -> _Part:
        """``dataclasses.replace``, ten times faster."""
        assert changes.keys() <= self.__dict__.keys()
        part = object.__new__(type(self))
        part.__dict__.update(self.__dict__, **changes)
        return part


@dataclass(frozen=True)
class Roster(_Updatable):
    """Workers by position: present, entering and leaving.

    Args:
        joined: the ranks that said hello, before the first generation.
        live: ranks in the roster, whose :class:`Standing` is AWAITED, LIVE or JOINING.
        leader: speaks for the run; unchanged while that worker lives and has its stage's state.
        joining: live ranks that do not have the state of their stage yet.
        newcomers: live ranks that joined during the training -> steps applied before that.
        ready: ranks of workers that wait to enter.
        leaving: live ranks that want to leave; ``ending``: those that end the run once all live ranks are among them.
        dismissed: position -> steps after which newcomers were dismissed for other values.
        causes: why workers were lost, by rank.
    """

    live: frozenset[int]
    joined: frozenset[int] = frozenset()
    leader: int = -1
    joining: frozenset[int] = frozenset()
    newcomers: Mapping[int, int] = field(default_factory=dict)
    ready: frozenset[int] = frozenset()
    leaving: frozenset[int] = frozenset()
    ending: frozenset[int] = frozenset()
    dismissed: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    causes: Mapping[int, str] = field(default_factory=dict)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(self.live))

    @property
    def barred(self) -> frozenset[int]:
        """Positions that stay empty: their workers were wrong again and again."""
        return frozenset(rank for rank, steps in self.dismissed.items() if len(steps) >= MAX_DISMISSED)

    def without(self, ranks: Collection[int]) -> Roster:
        return self.updated(
            live=self.live.difference(ranks),
            joined=self.joined.difference(ranks),
            joining=self.joining.difference(ranks),
            newcomers={rank: since for rank, since in self.newcomers.items() if rank not in ranks},
            leaving=self.leaving.difference(ranks),
            ending=self.ending.difference(ranks),
        )


@dataclass(frozen=True)
class PauseState:
    """Pause ``number`` of a generation, of live workers at a step boundary.

    ``begun``: by rank, the newest step begun. ``boundary``: the step at whose beginning they stop, once all have
    answered. ``arrived``: the ranks that wait there.
    """

    number: int = 0
    begun: Mapping[int, int] = field(default_factory=dict)
    boundary: int | None = None
    arrived: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Generation(_Updatable):
    """State of one generation alone; each new one begins with a new value.

    Args:
        number: -1 before the first.
        regrouping: whether reports are missing; ``reports``: by rank.
        commits: of the current step, by rank.
        commit_answered: the newest step whose commit was answered; -1 if there is none.
        passes: the ranks that have passed step :attr:`Steps.summed`.
        broken_pairs: live workers of which one reported that it cannot reach the other.
        pause: the current pause; ``pauses``: the number of earlier ones.
        plan: what all are to run from a step boundary on.
        becomes: the layout that all get ready for; empty if no layers move. ``layers_held``: the ranks
            that are ready.
        hooks: by rank, how often it has announced collectives of its position in hooks.
    """

    number: int = -1
    regrouping: bool = False
    reports: Mapping[int, messages.Report] = field(default_factory=dict)
    commits: Mapping[int, messages.Commit] = field(default_factory=dict)
    commit_answered: int = -1
    passes: frozenset[int] = frozenset()
    broken_pairs: frozenset[Pair] = frozenset()
    pause: PauseState | None = None
    pauses: int = 0
    plan: PlanReady | None = None
    becomes: messages.Cuts = ()
    layers_held: frozenset[int] = frozenset()
    hooks: Mapping[int, int] = field(default_factory=dict)

    def runs(self, number: int) -> bool:
        """Whether values of generation ``number`` count: all have resumed in it."""
        return number == self.number and not self.regrouping


@dataclass(frozen=True)
class Steps(_Updatable):
    """Losses, commits and applied steps.

    Args:
        version: the number of steps that every live worker has applied.
        applied_below: all live workers of ranks below this have applied step ``version``.
        applied: the newest step that each worker has applied, by rank; -1 before the first.
        answered: step and payloads, by column, of the newest answered commit.
        facts: for steps that not every live worker has applied: step -> stage, or None for facts that are equal on all
            -> values by reporting rank; only the first of equal values, while there are no newcomers.
        losses: for incomplete steps: step -> global micro-batch -> loss; ``outputs`` likewise: records of hooks.
        summed: the number of steps whose loss is known.
        unproven: the newest step with losses that count once all live workers have passed it, or that a worker with
            wrong values took part in; -1 for none.
        after_step: the action of all after the next step whose losses become complete.
    """

    version: int = 0
    applied_below: int = 0
    applied: Mapping[int, int] = field(default_factory=dict)
    answered: tuple[int, Mapping[int, Any]] = (-1, MappingProxyType({}))
    facts: Mapping[int, Mapping[int | None, tuple[Reported, ...]]] = field(default_factory=dict)
    losses: Mapping[int, Mapping[int, float]] = field(default_factory=dict)
    outputs: Mapping[int, Mapping[int, bytes]] = field(default_factory=dict)
    summed: int = 0
    unproven: int = -1
    after_step: AfterStep = AfterStep.GO_ON


@dataclass(frozen=True, slots=True)
class StopRound:
    """Stop point at which the ranks ``wanted`` asked to stop training early.

    ``is_over``: whether they were answered; ``agreed``: whether the answer was that all stop there.
    """

    point: int
    wanted: frozenset[int] = frozenset()
    is_over: bool = False
    agreed: bool = False


@dataclass(frozen=True)
class CollectivesState(_Updatable):
    """Control collectives, and the newest question for an early stop.

    ``open``: number -> rank -> contribution. ``next``: the lowest number that is not answered yet.
    """

    open: Mapping[int, Mapping[int, messages.Arrive]] = field(default_factory=dict)
    next: int = 0
    stop_round: StopRound | None = None


@dataclass(frozen=True)
class LayoutState(_Updatable):
    """Layout of the layers; ``wanted``: the next one, from a step boundary on."""

    cuts: messages.Cuts = ()
    wanted: LayoutReady | None = None


@dataclass(frozen=True)
class Faults(_Updatable):
    """Faults that may be a machine's, the network's or the user's.

    ``retries``: how often work with a suspected exception runs again. ``raised``: oldest first. ``disturbances``:
    regroups in a row without a loss or a commit.
    """

    retries: int = 1
    raised: tuple[Remembered, ...] = ()
    disturbances: int = 0


_NONE: Mapping[int, Any] = {}  # one object, and of a type that the journal can hold


@dataclass(frozen=True)
class SaveState(_Updatable):
    """The newest batch of checkpoints.

    ``batch``: -1 before the first. ``announced``: by index, temporary paths of whole files. ``ended``: by index, the
    finished checkpoints, with the reason if there is none. ``unnamed``: by index, complete files that their lost writer
    may not have named.  ``last``: the batch before, if it is over: some workers
    may not know how it ended. Others: see :class:`~lightning_recycle.control.protocol.messages.SaveBegun`.
    """

    batch: int = -1
    version: int = 0
    writer: int = -1
    paths: tuple[str, ...] = ()
    weights_only: tuple[bool, ...] = ()
    mid_step: bool = False
    announced: Mapping[int, str] = field(default_factory=lambda: _NONE)
    ended: Mapping[int, messages.SaveFailure | None] = field(default_factory=lambda: _NONE)
    unnamed: Mapping[int, str] = field(default_factory=lambda: _NONE)
    last: SaveState | None = None

    @property
    def is_over(self) -> bool:
        """Whether the outcome of each checkpoint is known."""
        return len(self.ended) == len(self.paths)


class Standing(Enum):
    """State of a rank, as :meth:`MembershipState.standing` derives it.

    Events change it:

    - AWAITED: `Joined`: LIVE; `Returned`: LIVE or JOINING, as before the restart; `StartDue` (each stage has enough
      others), `Lost`: VACANT
    - LIVE: `Lost` (its own or a sibling's): BARRED if a member of its position was dismissed twice, else VACANT;
      `Leave` (its own or a sibling's), then `Reached` AT_BOUNDARY of the last live rank: VACANT, but LIVE in the last
      position with the state of its stage; `Restart`: AWAITED
    - JOINING: `Reached` ENTERED, or `Report` of the last live rank (its own has a version): LIVE; else as LIVE
    - READY: `Reached` AT_BOUNDARY of the last live rank: JOINING, with its whole position; `Lost`, `Restart`: VACANT
    - BARRED: none
    - VACANT: `Ready`: READY
    """

    AWAITED = "its worker is to join before generation 0, or to return to a coordinator that was started again"
    LIVE = "its worker is in the roster, and from generation 0 on holds the state of its stage"
    JOINING = "its worker is in the roster, and gets that state from a peer"
    READY = "a worker is set up for it, and waits to be let in at a step boundary"
    BARRED = "it is empty and stays so: two of its workers held other values and were dismissed"
    VACANT = "it is empty, or its next worker is setting up; after wrong bits only a spare may come, no new process"


@dataclass(frozen=True)
class MembershipState(_Updatable):
    """State of the coordinator, in parts.

    ``has_resumed``: whether a generation has been resumed; before, code runs that only one worker runs, such as
    ``prepare_data``. ``returned``: after a restart of the coordinator, until all live workers have returned or are
    lost, their reports by rank; None otherwise. ``outcome``: None during the run.
    """

    positions: Positions
    roster: Roster
    generation: Generation = Generation()
    steps: Steps = Steps()
    collectives: CollectivesState = CollectivesState()
    layout: LayoutState = LayoutState()
    faults: Faults = Faults()
    checks: Checks = field(default_factory=Checks)
    saves: SaveState = SaveState()
    has_resumed: bool = False
    returned: Mapping[int, messages.Returned] | None = None
    outcome: Outcome | None = None

    def with_roster(self, **changes: Any) -> MembershipState:
        return self.updated(roster=self.roster.updated(**changes))

    def with_generation(self, **changes: Any) -> MembershipState:
        return self.updated(generation=self.generation.updated(**changes))

    def with_steps(self, **changes: Any) -> MembershipState:
        return self.updated(steps=self.steps.updated(**changes))

    def with_collectives(self, **changes: Any) -> MembershipState:
        return self.updated(collectives=self.collectives.updated(**changes))

    def with_checks(self, **changes: Any) -> MembershipState:
        return self.updated(checks=replace(self.checks, **changes))

    def with_saves(self, **changes: Any) -> MembershipState:
        return self.updated(saves=self.saves.updated(**changes))

    def with_layout(self, **changes: Any) -> MembershipState:
        return self.updated(layout=self.layout.updated(**changes))

    def with_faults(self, **changes: Any) -> MembershipState:
        return self.updated(faults=self.faults.updated(**changes))

    def standing(self, rank: int) -> Standing:
        """The state of ``rank``; the events that change it are in :class:`Standing`."""
        roster = self.roster
        if rank in roster.live:
            if rank not in (
                roster.joined if self.generation.number < 0 else roster.live if self.returned is None else self.returned
            ):
                return Standing.AWAITED
            return Standing.JOINING if rank in roster.joining else Standing.LIVE
        if rank in roster.ready:
            return Standing.READY
        return Standing.BARRED if rank in self.positions.all_members(roster.barred) else Standing.VACANT

    @property
    def vacant(self) -> tuple[int, ...]:
        """Ranks that no worker holds and none is ready to take, and that may be taken."""
        return tuple(rank for rank in range(self.positions.num_workers) if self.standing(rank) is Standing.VACANT)

    def without(self, ranks: Collection[int]) -> MembershipState:
        return self.updated(roster=self.roster.without(self.positions.all_members(ranks)))

    def stage_leader(self, stage: int) -> int | None:
        """First live member of the lowest pipeline in ``stage``; None if there is none."""
        positions = self.positions
        of_column = range(stage * positions.members, positions.num_workers, positions.columns)
        return next((rank for rank in of_column if rank in self.roster.live), None)

    def holders(self, column: int) -> frozenset[int]:
        """The live ranks that have the state of ``column``."""
        with_state, positions = self.roster.live - self.roster.joining, self.positions
        return frozenset(rank for rank in with_state if positions.column(rank) == column)

    def holding(self, stage: int, without: Collection[int] = ()) -> frozenset[Worker]:
        """Live positions of ``stage`` whose members hold their state, minus ``without``."""
        positions = self.positions
        of_stage = (rank for rank in self.roster.live - self.roster.joining if positions.stage(rank) == stage)
        return positions.whole(frozenset(of_stage)) - {positions.position(rank) for rank in without}


Next: TypeAlias = tuple[MembershipState, tuple[Command, ...]]
"""The state after an event, and the commands that follow from it."""


def end(state: MembershipState, outcome: Outcome) -> Next:
    """The run is over."""
    return state.updated(outcome=outcome), (outcome,)


def after(commands: tuple[Command, ...], then: Next) -> Next:
    """Puts ``commands`` before those of ``then``."""
    return then[0], commands + then[1]


def initial_state(grid: Grid, retries: int = 1, members: int = 1) -> MembershipState:
    """The state before any worker has joined; ``retries``: see :class:`Faults`."""
    live = frozenset(range(grid.num_workers * members))
    roster = Roster(live, leader=(grid.stages - 1) * members)
    return MembershipState(Positions(grid, members), roster, faults=Faults(retries))


# ---------------------------------------------------------------------- rules that every state keeps


class BrokenRuleError(AssertionError):
    """A state of the protocol that cannot be, whoever sent the message that led to it."""


def validate(before: MembershipState, state: MembershipState) -> None:
    """Raises BrokenRuleError with the violated rule of a state, or of the step to it."""
    of_roster = [_place_rules] if state.roster is not before.roster else []
    for part in (*of_roster, _roster_rules, _generation_rules, _step_rules, _agreement_rules):
        for rule, holds in part(state):
            if not holds:
                raise BrokenRuleError(f"{rule}: {state}")
    for rule, holds in _rules_of_change(before, state):
        if not holds:
            raise BrokenRuleError(f"{rule}: {before} -> {state}")


def _place_rules(state: MembershipState) -> Iterator[tuple[str, bool]]:
    """Rules of the roster alone."""
    roster, positions, ranks = state.roster, state.positions, range(state.positions.num_workers)
    yield "ranks are those of the grid", roster.live.union(roster.ready, roster.newcomers) <= set(ranks)
    yield "who waits to be let in is out of the roster", roster.ready.isdisjoint(roster.live)
    of_live = roster.joined | roster.joining | roster.leaving | roster.ending
    yield "who joins, leaves or ends is live", of_live <= roster.live
    yield "a newcomer is live", roster.newcomers.keys() <= roster.live
    yield "no stage is lost", set(map(positions.stage, roster.live)) == set(range(state.positions.grid.stages))


def _roster_rules(state: MembershipState) -> Iterator[tuple[str, bool]]:
    roster, has_begun, has_all = state.roster, state.generation.number >= 0, state.returned is None
    if has_begun:
        yield "the roster has whole positions", state.positions.all_members(roster.live) == roster.live
    if has_begun and has_all:
        yield "the leader is live", roster.leader in roster.live
        if not state.generation.regrouping:
            yield "each column has a worker with its state", all(map(state.holders, range(state.positions.columns)))
            yield "the leader has a state", roster.leader not in roster.joining


def _generation_rules(state: MembershipState) -> Iterator[tuple[str, bool]]:
    now, live, pause = state.generation, state.roster.live, state.generation.pause
    if now.number < 0 or now.regrouping:
        began = (now.commits, now.passes, now.broken_pairs, now.plan, now.layers_held, now.hooks, pause)
        yield "nothing of a generation counts before all have reported", not any(began)
    if now.number < 0:
        yield "nobody reports before the first generation", not now.regrouping and not now.reports
    elif not now.regrouping:
        yield "all have reported", now.reports.keys() == live
        yield "a generation has been resumed", state.has_resumed
    else:
        yield "a report is awaited", now.reports.keys() < live
    yield "live workers commit", now.commits.keys() < live
    yield "a commit that was answered is over", all(one.step > now.commit_answered for one in now.commits.values())
    yield "live workers pass steps and hold layers", now.passes | now.layers_held <= live
    yield "layers are held when they are to move", bool(now.becomes) >= bool(now.layers_held)
    yield "no step runs while layers are under way", not (now.becomes and (pause or now.commits))
    yield "broken pairs are of live workers, in order", all(a < b and {a, b} <= live for a, b in now.broken_pairs)
    yield "members of live positions are in hooks", now.hooks.keys() <= live
    if pause is not None:
        yield "pauses are counted", pause.number == now.pauses
        yield "live workers pause, and one has not arrived", pause.begun.keys() <= live and pause.arrived < live
        yield "all are asked before the boundary is known", (pause.boundary is not None) == (pause.begun.keys() == live)
        if pause.boundary is not None:
            yield "none has begun the step at the boundary", pause.boundary > max(pause.begun.values())
            yield "the losses before the boundary are known or to come", pause.boundary >= state.steps.summed - 1
        else:
            yield "nobody is at a boundary that is not known", not pause.arrived


def _step_rules(state: MembershipState) -> Iterator[tuple[str, bool]]:
    steps, live, checks = state.steps, state.roster.live, state.checks
    yield "losses and outputs are of the same steps", steps.losses.keys() == steps.outputs.keys()
    yield "losses that are known are not collected", all(step >= steps.summed for step in steps.losses)
    yield "facts are of steps that not all have applied", all(step >= steps.version for step in steps.facts)
    # After a dismissal, which has other bits, it is compared with the next step.
    first = min(chain.from_iterable(state.roster.dismissed.values()), default=steps.version)
    is_compared = all(step >= min(first, steps.version) for step in checks.checksums)
    yield "a check is compared once it is over", is_compared
    yield "an inspection ends with its step", checks.inspects == -1 or checks.inspects >= steps.version
    yield "a commit has a contribution of each column at most", len(steps.answered[1]) <= state.positions.columns
    if state.returned is None:
        yield "no step is applied before its loss is known", max(steps.applied.values(), default=-1) < steps.summed
        yield "no step counts before its loss is known", steps.version <= steps.summed
        applied = {rank: steps.applied.get(rank, -1) + 1 for rank in live}
        yield "a step counts once all have applied it", not steps.applied or min(applied.values()) <= steps.version
        applied_all = all(not count or count >= steps.version for count in applied.values())
        yield "all have applied the steps that count", applied_all
        below = (rank for rank in range(steps.applied_below) if rank in live)
        have_applied = all(applied[rank] > steps.version for rank in below)
        yield "those that are passed by have applied the newest step", have_applied


def _agreement_rules(state: MembershipState) -> Iterator[tuple[str, bool]]:
    open_ones, stop, saves = state.collectives.open, state.collectives.stop_round, state.saves
    yield "a collective that was answered is over", all(number >= state.collectives.next for number in open_ones)
    for arrived in open_ones.values():
        yield "all do the same in a collective", len({arrival.name for arrival in arrived.values()}) == 1
        yield "a collective is answered once all have arrived", not state.roster.live <= arrived.keys()
        generations = {arrival.generation for arrival in arrived.values()} - {None}
        yield "what counts in one generation is of this one", generations <= {state.generation.number}
    if stop is not None and not stop.is_over:
        asked = stop.wanted & state.roster.live
        yield "some have asked to stop, and not all", bool(asked) and asked != state.roster.live
        yield "all that ask are answered alike", not stop.agreed
    indices = set(range(len(saves.paths)))
    yield "checkpoints are those of the batch", saves.announced.keys() | saves.ended.keys() <= indices
    complete = saves.announced.keys() & saves.ended.keys()
    yield "a checkpoint without a name was announced, and is complete", saves.unnamed.keys() <= complete
    if state.returned is None:
        yield "the writer of a checkpoint lives", saves.is_over or saves.writer in state.roster.live
    cuts, wanted = state.layout.cuts, state.layout.wanted
    yield "another layout is wanted", wanted is None or wanted.cuts != cuts
    lengths = {len(cuts), len(state.generation.becomes)}
    yield "each stage has layers", lengths <= {0, state.positions.grid.stages + 1}


def _rules_of_change(before: MembershipState, state: MembershipState) -> Iterator[tuple[str, bool]]:
    yield "the run was not over", before.outcome is None
    yield "generations are numbered upwards", state.generation.number >= before.generation.number
    yield "a step stays committed", state.steps.version >= before.steps.version
    yield "a training loss stays known", state.steps.summed >= before.steps.summed
    yield "an answer stays given", state.collectives.next >= before.collectives.next
    after_step, ended = state.steps.after_step, AfterStep.END
    yield "a stop stays decided", after_step is ended or before.steps.after_step is not ended
    if state.generation.number == before.generation.number:
        may_change = state.generation.number < 0 or state.returned is not None
        yield "the roster changes with a generation", may_change or state.roster.live == before.roster.live
        yield "who has resumed has resumed", state.generation.regrouping <= before.generation.regrouping
    if before.returned is None and before.roster.leader in state.roster.live - state.roster.joining:
        is_same = state.roster.leader == before.roster.leader
        yield "the leader stays while it lives", is_same or before.generation.number < 0
