"""The membership state machine: who is in, which generation it is, what everybody has agreed on. Pure.

:func:`transition` takes a state and an event and returns the next state and the commands to carry out. It has no clock,
no socket and no process; the coordinator is the shell that feeds it and obeys.

A *generation* begins when all workers have joined and whenever the roster changes: all live workers are told to stop
(Regroup), report what they hold (Report), and go on together from one committed version (Resume). A step counts as
committed once every live worker has applied it. Where stages must agree before they step (see Commit), they are
answered once every live worker is REDUCED. The losses of a step are collected by micro-batch, whoever computed them and
however often. Control collectives are numbered by the workers' own program order, outlive generations, and complete
when every live worker has arrived.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, TypeAlias

from lightning_recycle.errors import ReCycleError
from lightning_recycle.planning.grid import Grid
from lightning_recycle.resilience.messages import (
    Answer,
    Applied,
    Arrive,
    Broken,
    Commit,
    Committed,
    Crash,
    Losses,
    Regroup,
    Report,
    Resume,
    StepLoss,
)
from lightning_recycle.resilience.recovery import decide

__all__ = [
    "RESULT",
    "Command",
    "Crashed",
    "Failed",
    "Finished",
    "GraceElapsed",
    "Joined",
    "Lost",
    "MembershipState",
    "Outcome",
    "Record",
    "Send",
    "StageLost",
    "StartGrace",
    "initial_state",
    "leader",
    "stage_leads",
    "transition",
]

RESULT = "result"
"""Name of the collective that brings the results of the run; the coordinator keeps its payloads."""

MAX_DISTURBANCES = 3
"""Regroups in a row without a loss and without a committed step, after which the run is given up."""


# ---------------------------------------------------------------------- events (besides the workers' messages)


@dataclass(frozen=True, slots=True)
class Joined:
    """Worker ``rank`` said hello."""

    rank: int


@dataclass(frozen=True, slots=True)
class Lost:
    """Worker ``rank`` is dead for certain, or declared so."""

    rank: int
    cause: str


@dataclass(frozen=True, slots=True)
class GraceElapsed:
    """Communication broke in ``generation`` a while ago; no death explains it yet."""

    generation: int


Event: TypeAlias = Joined | Lost | GraceElapsed | Report | Broken | Losses | Applied | Commit | Arrive | Crash


# ---------------------------------------------------------------------- commands


@dataclass(frozen=True, slots=True)
class Send:
    """Send ``message`` to ``ranks``."""

    ranks: tuple[int, ...]
    message: Any


@dataclass(frozen=True, slots=True)
class StartGrace:
    """Come back with :class:`GraceElapsed` after a while, in case a death explains the broken connection."""

    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Record:
    """An entry for the history; the shell adds the time."""

    kind: str
    step: int
    rank: int | None = None
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Finished:
    """Every stage delivered its result: payloads by rank."""

    results: Mapping[int, Any]


@dataclass(frozen=True, slots=True)
class StageLost:
    """All replicas of ``stage`` are dead, for these causes by rank."""

    stage: int
    causes: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class Crashed:
    """A worker raised the user's own exception: every worker would meet it."""

    crash: Crash


@dataclass(frozen=True, slots=True)
class Failed:
    """The run cannot go on."""

    reason: str


Outcome: TypeAlias = Finished | StageLost | Crashed | Failed
Command: TypeAlias = Send | StartGrace | Record | Outcome


# ---------------------------------------------------------------------- state


@dataclass(frozen=True)
class MembershipState:
    """Everything the coordinator knows about the run.

    Args:
        grid: the positions.
        live: ranks not lost.
        joined: ranks that said hello.
        generation: -1 before the first.
        regrouping: whether the generation still waits for reports.
        reports: of the current generation, by rank.
        commits: of the current generation and the current step, by rank.
        answered: step and payloads, by stage, of the newest commit that was answered.
        applied: the newest step that each worker has applied, by rank; -1 before the first.
        losses: of the steps that are not complete: step -> global micro-batch -> loss.
        summed: steps whose loss is known.
        collectives: open control collectives: number -> rank -> contribution.
        causes: why workers were lost, by rank.
        version: steps that every live worker has applied.
        disturbances: regroups in a row without a loss or a commit.
        outcome: how the run ended, once it has.
    """

    grid: Grid
    live: frozenset[int]
    joined: frozenset[int] = frozenset()
    generation: int = -1
    regrouping: bool = False
    reports: Mapping[int, Report] = field(default_factory=dict)
    commits: Mapping[int, Commit] = field(default_factory=dict)
    answered: tuple[int, Mapping[int, Any]] = (-1, MappingProxyType({}))
    applied: Mapping[int, int] = field(default_factory=dict)
    losses: Mapping[int, Mapping[int, float]] = field(default_factory=dict)
    summed: int = 0
    collectives: Mapping[int, Mapping[int, Arrive]] = field(default_factory=dict)
    causes: Mapping[int, str] = field(default_factory=dict)
    version: int = 0
    disturbances: int = 0
    outcome: Outcome | None = None

    @property
    def roster(self) -> tuple[int, ...]:
        return tuple(sorted(self.live))


def initial_state(grid: Grid) -> MembershipState:
    """The state before anybody has joined."""
    return MembershipState(grid=grid, live=frozenset(range(grid.num_workers)))


def leader(grid: Grid, roster: tuple[int, ...]) -> int:
    """The rank that speaks for the run: the live last-stage worker of the lowest pipeline (it owns loss and
    metrics).
    """
    return stage_leads(grid, roster)[grid.stages - 1]


def stage_leads(grid: Grid, roster: tuple[int, ...]) -> dict[int, int]:
    """For each stage with a live worker, the rank that speaks for it: the one of the lowest pipeline."""
    leads: dict[int, int] = {}
    for rank in sorted(roster):
        leads.setdefault(grid.worker(rank).stage, rank)
    return leads


def transition(state: MembershipState, event: Event) -> tuple[MembershipState, tuple[Command, ...]]:
    """Returns the state after ``event`` and what to do. Events of a past generation or a lost worker change nothing."""
    if state.outcome is not None:
        return state, ()
    if isinstance(event, GraceElapsed):
        return _regroup_undisturbed(state, event)
    if event.rank not in state.live:
        return state, ()
    match event:
        case Joined():
            state = replace(state, joined=state.joined | {event.rank})
            return _begin_if_complete(state)
        case Lost():
            return _lose(state, event)
        case Crash(fault=True):
            return _lose(state, Lost(event.rank, event.summary))
        case Crash():
            return _stop(state, Crashed(event))
        case Broken():
            current = event.generation == state.generation and not state.regrouping
            return state, ((StartGrace(event.generation, event.reason),) if current else ())
        case Report():
            return _report(state, event)
        case Losses():
            return _losses(state, event)
        case Applied():
            return _applied(state, event)
        case Commit():
            return _commit(state, event)
        case Arrive():
            return _arrive(state, event)


def _stop(state: MembershipState, outcome: Outcome) -> tuple[MembershipState, tuple[Command, ...]]:
    return replace(state, outcome=outcome), (outcome,)


def _begin_if_complete(state: MembershipState) -> tuple[MembershipState, tuple[Command, ...]]:
    """Begins the first generation as soon as every live worker has joined."""
    if state.generation >= 0 or state.joined < state.live:
        return state, ()
    return _begin_generation(state)


def _begin_generation(state: MembershipState) -> tuple[MembershipState, tuple[Command, ...]]:
    state = replace(state, generation=state.generation + 1, regrouping=True, reports={}, commits={})
    return state, (Send(state.roster, Regroup(state.generation, state.roster)),)


def _lose(state: MembershipState, event: Lost) -> tuple[MembershipState, tuple[Command, ...]]:
    state = replace(
        state,
        live=state.live - {event.rank},
        joined=state.joined - {event.rank},
        causes={**state.causes, event.rank: event.cause},
        disturbances=0,
    )
    commands: list[Command] = [Record("failure", state.version, event.rank, {"cause": event.cause})]
    stage = state.grid.worker(event.rank).stage
    if all(state.grid.worker(rank).stage != stage for rank in state.live):
        causes = {rank: cause for rank, cause in state.causes.items() if state.grid.worker(rank).stage == stage}
        commands.append(Record("stage_lost", state.version, None, {"stage": stage}))
        state, stop = _stop(state, StageLost(stage, causes))
        return state, (*commands, *stop)
    state, steps = _advance(state)
    commands.extend(steps)
    for number in sorted(state.collectives):
        state, answer = _answer_if_complete(state, number)
        commands.extend(answer)
    if state.outcome is None:  # the loss may just have completed the results
        state, begin = _begin_generation(state) if state.generation >= 0 else _begin_if_complete(state)
        commands.extend(begin)
    return state, tuple(commands)


def _regroup_undisturbed(state: MembershipState, event: GraceElapsed) -> tuple[MembershipState, tuple[Command, ...]]:
    """Connects the same workers again: a connection broke between two that are both alive."""
    if event.generation != state.generation or state.regrouping:
        return state, ()
    if state.disturbances >= MAX_DISTURBANCES:
        return _stop(
            state,
            Failed(
                f"Communication between live workers failed {MAX_DISTURBANCES + 1} times in a row at step"
                f" {state.version}."
                " Check the network between the workers; the workers' logs above name the connections."
            ),
        )
    state, commands = _begin_generation(replace(state, disturbances=state.disturbances + 1))
    return state, (Record("disturbance", state.version), *commands)


def _report(state: MembershipState, event: Report) -> tuple[MembershipState, tuple[Command, ...]]:
    if event.generation != state.generation or not state.regrouping:
        return state, ()
    state = replace(state, reports={**state.reports, event.rank: event})
    if state.reports.keys() != state.live:
        return state, ()
    try:
        decision = decide({rank: report.status for rank, report in state.reports.items()})
    except ReCycleError as error:
        return _stop(state, Failed(str(error)))
    commits: dict[int, Any] = {}
    for _, report in sorted(state.reports.items()):
        if report.status.version == decision.version - 1 and report.status.reduced:
            commits.setdefault(report.status.stage, report.commit)
    if state.answered[0] == decision.version - 1:
        commits.update(state.answered[1])
    answered = (decision.version - 1, commits) if commits else state.answered
    state = replace(state, regrouping=False, answered=answered)  # who applies it need not bring it again
    return state, (
        Send(state.roster, Resume(state.generation, state.roster, decision, None, commits)),
        Record("resumed", decision.version, None, {"roster": state.roster, "ahead": tuple(sorted(decision.ahead))}),
    )


def _losses(state: MembershipState, event: Losses) -> tuple[MembershipState, tuple[Command, ...]]:
    if event.step < state.summed:
        return state, ()  # a redone step, computed again
    known = {**event.losses, **state.losses.get(event.step, {})}
    state = replace(state, losses={**state.losses, event.step: known})
    if len(known) < state.grid.global_microbatches:
        return state, ()
    loss = sum(known[index] for index in sorted(known)) / len(known)
    losses = {step: value for step, value in state.losses.items() if step > event.step}
    state = replace(state, losses=losses, summed=event.step + 1)
    return state, (Send(state.roster, StepLoss(event.step, loss)),)


def _applied(state: MembershipState, event: Applied) -> tuple[MembershipState, tuple[Command, ...]]:
    applied = {**state.applied, event.rank: event.step}
    return _advance(replace(state, applied=applied))


def _advance(state: MembershipState) -> tuple[MembershipState, tuple[Command, ...]]:
    """Counts the steps that every live worker has applied."""
    version = min(state.applied.get(rank, -1) for rank in state.live) + 1
    if version <= state.version:
        return state, ()
    records = tuple(Record("step", step) for step in range(state.version, version))
    return replace(state, version=version, disturbances=0), records


def _commit(state: MembershipState, event: Commit) -> tuple[MembershipState, tuple[Command, ...]]:
    if event.generation != state.generation or state.regrouping:
        return state, ()
    state = replace(state, commits={**state.commits, event.rank: event})
    if state.commits.keys() != state.live:
        return state, ()
    steps = {commit.step for commit in state.commits.values()}
    if len(steps) > 1:
        return _stop(state, Failed(f"The workers asked to commit different steps: {sorted(steps)}."))
    payloads: dict[int, Any] = {}
    for rank, commit in sorted(state.commits.items()):
        payloads.setdefault(state.grid.worker(rank).stage, commit.payload)
    state = replace(state, commits={}, answered=(event.step, payloads))
    return state, (Send(state.roster, Committed(state.generation, event.step, payloads)),)


def _arrive(state: MembershipState, event: Arrive) -> tuple[MembershipState, tuple[Command, ...]]:
    arrived = {**state.collectives.get(event.number, {}), event.rank: event}
    others = {arrive.name for arrive in arrived.values()}
    if len(others) > 1:
        return _stop(
            state,
            Failed(
                f"The workers disagree about what to do next: control collective {event.number} is called"
                f" {' and '.join(sorted(map(repr, others)))}. Hooks and callbacks must take the same decisions on"
                " all workers;"
                " decide on values that are the same everywhere, such as trainer.callback_metrics."
            ),
        )
    state = replace(state, collectives={**state.collectives, event.number: arrived})
    return _answer_if_complete(state, event.number)


def _answer_if_complete(state: MembershipState, number: int) -> tuple[MembershipState, tuple[Command, ...]]:
    """Answers a collective with the payloads of the live workers once all of them have arrived."""
    arrived = state.collectives[number]
    if not state.live <= arrived.keys():
        return state, ()
    payloads = {rank: arrived[rank].payload for rank in state.roster}
    collectives = {other: value for other, value in state.collectives.items() if other != number}
    state = replace(state, collectives=collectives)
    if next(iter(arrived.values())).name != RESULT:
        return state, (Send(state.roster, Answer(number, payloads)),)
    # The payloads stay here: the results are big, and only the supervisor wants them. The workers learn who delivered.
    delivered = {rank: payload is not None for rank, payload in payloads.items()}
    answer = Send(state.roster, Answer(number, delivered))
    stages = {state.grid.worker(rank).stage for rank, yes in delivered.items() if yes}
    if len(stages) < state.grid.stages:
        return state, (answer,)  # a stage's speaker died on the way: the workers ask again with the new one
    state, stop = _stop(state, Finished({rank: p for rank, p in payloads.items() if p is not None}))
    return state, (answer, *stop)
