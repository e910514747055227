"""The membership state machine: who is in, which generation it is, where all go on. Pure.

:func:`transition` takes a state and an event and returns the next state and the commands to carry out. It has no clock,
no socket and no process; the coordinator is the shell that feeds it and obeys.

A *generation* begins when all workers have joined and whenever the roster changes: all live workers are told to stop
(Regroup), report what they hold (Report), and go on together from one committed version (Resume).

A loss changes the roster at once, in the middle of a step. Everything else waits for a *step boundary*, so that nothing
is redone: workers that are ready to join, workers that want to leave, moves to another stage. The live workers are
asked where they are (Pause, Paused) and begin no further step; then they are told at which step to stop (Boundary); a
new generation begins when all are there (AtBoundary). A worker that joins gets the state of its stage from a peer
in that generation; until then it holds nothing and does not count as a replica.

If communication breaks and no death explains it (Broken, GraceElapsed), the same workers connect again. Each of them
first checks whom it can reach. If some cannot reach each other
(:mod:`~lightning_recycle.control.protocol.fault_attribution`), as few workers as possible are evicted so that all
others can, and treated as dead.

An exception that a fault of the machine may explain (Raised) is settled by running the same work again: on a peer, when
the worker that raised is evicted, or in place, when it is the last holder of its stage
(:mod:`~lightning_recycle.control.protocol.fault_attribution`).

A worker whose bits are wrong (:mod:`~lightning_recycle.control.protocol.corruption_response`) is evicted, or takes over
a peer's state in a generation that begins at a step boundary for it. A worker that joined while the training was going
on, and has other values than most (:mod:`~lightning_recycle.control.protocol.step_commit`), is evicted.

If a guess was wrong with which workers had stepped (Undo), the same workers connect again, too; it counts as no trouble
of the network.

Another plan for the same workers (PlanReady) also begins at a step boundary, but nobody stops there: the Boundary
carries the plan, and each worker switches to it when it reaches that step. If a generation begins before, its own plan
holds, which is the shell's business (Resume). A plan that needs other connections is such a generation's: all stop at
the boundary and connect what is missing.

Where all wait at a step boundary, or for each other's layers, nothing is under way between them. If they stay the same
workers, their connections stay as well (``Regroup.keeps_connections``).

Another layout of the layers (LayoutReady, LayoutWanted) takes two generations: in the first, at a step boundary,
workers get the layers that they lack; when all hold them (LayersHeld), the second begins with it
(:mod:`~lightning_recycle.control.protocol.layout_change`).

A coordinator that was killed and started again begins with what it had written down, and waits for the workers
(Returned); then the same workers connect again, without those that do not return
(:mod:`~lightning_recycle.control.protocol.coordinator_restart`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from lightning_recycle.control.protocol import (
    control_collectives,
    coordinator_restart,
    corruption_response,
    fault_attribution,
    layout_change,
    messages,
    step_commit,
)
from lightning_recycle.control.protocol import state as _state
from lightning_recycle.control.protocol.fault_attribution import Verdict
from lightning_recycle.control.protocol.messages import AfterStep
from lightning_recycle.control.protocol.recovery import WorkerStatus, decide
from lightning_recycle.control.protocol.state import (
    CandidateLost,
    Command,
    Crashed,
    Ended,
    EndWanted,
    Evict,
    Failed,
    GraceElapsed,
    Joined,
    LayoutReady,
    Lost,
    MembershipEvent,
    MembershipState,
    MovePlanned,
    PauseState,
    PlanReady,
    Record,
    Send,
    StageLost,
    StartGrace,
)
from lightning_recycle.control.protocol.step_commit import end
from lightning_recycle.errors import ReCycleError

__all__ = ["MAX_DISTURBANCES", "transition"]

MAX_DISTURBANCES = 3
"""Regroups in a row without a loss and without a committed step, after which the run is abandoned."""

_Next = tuple[MembershipState, tuple[Command, ...]]


def transition(state: MembershipState, event: MembershipEvent) -> _Next:
    """Returns the state after ``event`` and what to do. Events of a past generation or a lost worker change nothing."""
    if state.outcome is not None:
        return state, ()
    state, commands = _handle(state, event)
    if state.outcome is None:
        if state.ending >= state.live:  # nobody is left who would go on
            state = replace(state, after_step=AfterStep.END, leaving=frozenset(), ending=frozenset())
        state, pause = _pause_if_wanted(state)
        commands += pause
    return state, commands


def _handle(state: MembershipState, event: MembershipEvent) -> _Next:
    match event:
        case GraceElapsed():
            return _grace_elapsed(state, event)
        case messages.Ready():
            return (state, ()) if event.rank in state.live else (replace(state, ready=state.ready | {event.rank}), ())
        case CandidateLost():
            moves = {rank: mover for rank, mover in state.moves.items() if rank != event.rank}
            return replace(state, ready=state.ready - {event.rank}, moves=moves), ()
        case MovePlanned():
            return replace(state, moves={**state.moves, event.rank: event.mover}), ()
        case EndWanted():
            return end(state, Ended()) if state.generation < 0 else (replace(state, after_step=AfterStep.END), ())
        case PlanReady():
            fits = event.roster == state.roster and state.generation >= 0 and not state.regrouping
            return (replace(state, plan=event) if fits else state), ()
        case LayoutReady():
            return layout_change.wanted(state, event), ()
    if event.rank not in state.live:
        return state, ()
    match event:
        case Joined():
            return _begin_if_complete(state.updated(joined=state.joined | {event.rank}))
        case Lost():
            return _lose(state, event)
        case messages.Returned():
            return _returned(state, event)
        case messages.Raised():
            return _raised(state, event)
        case messages.Disputed():
            return _disputed(state, event)
        case messages.Voted():
            return _decided(state, corruption_response.add_vote(state, event))
        case messages.NotFinite():
            return _begin_unless_over(state, corruption_response.add_not_finite(state, event))
        case messages.Incomparable():
            return _give_up_comparing(state, event)
        case messages.Crash(fault=True):
            return _lose(state, Lost(event.rank, event.summary))
        case messages.Crash():
            return end(state, Crashed(event))
        case messages.Broken():
            return _broken(state, event)
        case messages.Report():
            return _report(state, event)
        case messages.Leave():
            ending = state.ending | ({event.rank} if event.with_run else set())
            return replace(state, leaving=state.leaving | {event.rank}, ending=ending), ()
        case messages.EndRun():  # also before the first step: whoever ends a job may run it again from what is saved
            return replace(state, after_step=AfterStep.END), ()
        case messages.Paused():
            return _paused(state, event)
        case messages.AtBoundary():
            return _at_boundary(state, event)
        case messages.Entered():
            return _entered(state, event)
        case messages.LayoutWanted():
            return layout_change.wanted(state, LayoutReady((), event.cuts)), ()
        case messages.LayersHeld():
            return _layers_held(state, event)
        case messages.Restored():
            if state.applied or event.version <= state.version:
                return state, ()
            return replace(state, version=event.version, passed=0, summed=event.version), ()
        case messages.Losses():
            return step_commit.add_losses(state, event)
        case messages.Passed():
            return step_commit.add_pass(state, event)
        case messages.Applied():
            return step_commit.add_applied(state, event)
        case messages.Commit():
            return step_commit.add_commit(state, event)
        case messages.Undo():
            return _undo(state, event)
        case messages.Arrive():
            return step_commit.add_arrival(state, event)
        case messages.Heartbeat():
            return step_commit.check_attendance(state, event)
        case messages.RequestStop():
            return control_collectives.add_request(state, event)
        case messages.GoesOn():
            return control_collectives.add_answer(state, event)


# ---------------------------------------------------------------------- generations


def _begin_if_complete(state: MembershipState) -> _Next:
    """Begins the first generation as soon as every live worker has joined."""
    if state.generation >= 0 or state.joined < state.live:
        return state, ()
    return _begin_generation(state)


def _begin_generation(state: MembershipState, becomes: messages.Cuts = (), idle: bool = False) -> _Next:
    """All live workers stop and report.

    Args:
        state: before.
        becomes: the layout that they then get ready for.
        idle: whether all of them have said in this generation that they wait for the next one, and nobody is new.
    """
    state = _with_leader(step_commit.forget_retracted(state))
    state = replace(
        state,
        generation=state.generation + 1,
        regrouping=True,
        reports={},
        commits={},
        committed=-1,
        passes=frozenset(),
        pause=None,
        pauses=0,
        plan=None,
        layout=state.layout if layout_change.is_for(state.layout, state.roster) else None,
        becomes=becomes,
        held=frozenset(),
        broken_pairs=frozenset(),
    )
    checks = state.disturbances > 0
    unproven = state.unproven if state.unproven >= state.summed else -1
    regroup = messages.Regroup(state.generation, state.roster, state.leader, checks, idle and not checks, unproven)
    return state, (Send(state.roster, regroup),)


def _layers_held(state: MembershipState, event: messages.LayersHeld) -> _Next:
    """A worker has what it needs of the layout to come; when all have, it holds, whoever is lost from now on."""
    if event.generation != state.generation or not state.becomes or state.regrouping:
        return state, ()
    state = state.updated(held=state.held | {event.rank})
    if state.held != state.live:
        return state, ()
    layout = state.layout
    details: dict[str, Any] = {"before": state.cuts, "cuts": state.becomes}
    if layout is not None and layout.cuts == state.becomes:
        details.update(layout.details)
        layout = None
    state = replace(state, cuts=state.becomes, layout=layout)
    return _with((Record("layers_moved", state.version, None, details),), _begin_generation(state, idle=True))


def _with_leader(state: MembershipState) -> MembershipState:
    """Returns ``state`` with a live leader: the current one if it lives."""
    if state.leader in state.live and state.leader not in state.joining:
        return state
    last = state.holders(state.grid.stages - 1) or state.live
    leader = _state.stage_leads(state.grid, last).get(state.grid.stages - 1, min(state.live))
    return replace(state, leader=leader)


def _remove(state: MembershipState, ranks: Collection[int]) -> MembershipState:
    """Returns ``state`` without the workers ``ranks``."""
    return replace(
        state,
        live=state.live.difference(ranks),
        joined=state.joined.difference(ranks),
        joining=state.joining.difference(ranks),
        newcomers=state.newcomers.difference(ranks),
        leaving=state.leaving.difference(ranks),
        ending=state.ending.difference(ranks),
        moves={rank: mover for rank, mover in state.moves.items() if mover not in ranks},
        checks=state.checks.without(ranks),
    )


def _lose(state: MembershipState, event: Lost) -> _Next:
    if event.rank in state.newcomers:
        state = step_commit.doubt(state)
    state = replace(_remove(state, {event.rank}), causes={**state.causes, event.rank: event.cause}, disturbances=0)
    commands: tuple[Command, ...] = (Record("failure", state.version, event.rank, {"cause": event.cause}),)
    stage = state.stage_of(event.rank)
    if all(state.stage_of(rank) != stage for rank in state.live):
        return _with(commands, _lose_stage(state, stage))
    if state.returned is not None:
        return _with(commands, _go_on_if_all_returned(state))
    state, settled = step_commit.settle(_with_leader(step_commit.forget_retracted(state)))
    commands += settled
    if state.outcome is not None:  # the loss has just completed the results
        return state, commands
    return _with(commands, _begin_generation(state) if state.generation >= 0 else _begin_if_complete(state))


def _returned(state: MembershipState, event: messages.Returned) -> _Next:
    """A worker has come back to a coordinator that was started again."""
    if state.returned is None:
        return state, ()
    return _go_on_if_all_returned(replace(state, returned={**state.returned, event.rank: event}))


def _go_on_if_all_returned(state: MembershipState) -> _Next:
    """Begins a generation of all who have returned once nobody is awaited any more."""
    assert state.returned is not None
    if not state.live <= state.returned.keys():
        return state, ()
    members = [state.returned[rank] for rank in state.roster]
    state, commands = coordinator_restart.rebuilt(state)
    state = _with_leader(state)
    # Everybody's word on one subject before anybody's on the next: it may complete what the next is judged by.
    for event in sorted(
        (event for member in members for event in coordinator_restart.events(member)), key=coordinator_restart.order
    ):
        if state.outcome is None:
            state, caused = _handle(state, event)
            commands += caused
    if state.outcome is not None:
        return state, commands
    state, regroup = _begin_generation(state)
    for member in members:
        if member.raised is not None and state.outcome is None:
            state, judged = _raised(state, member.raised)
            regroup += judged
    return state, commands + regroup


def _lose_stage(state: MembershipState, stage: int) -> _Next:
    causes = {rank: cause for rank, cause in state.causes.items() if state.stage_of(rank) == stage}
    return _with((Record("stage_lost", state.version, None, {"stage": stage}),), end(state, StageLost(stage, causes)))


def _with(before: tuple[Command, ...], then: _Next) -> _Next:
    return then[0], before + then[1]


def _report(state: MembershipState, event: messages.Report) -> _Next:
    if event.generation != state.generation or not state.regrouping:
        return state, ()
    state = state.updated(reports={**state.reports, event.rank: event})
    if state.reports.keys() != state.live:
        return state, ()
    joining = frozenset(rank for rank, report in state.reports.items() if report.status.version < 0)
    state = replace(step_commit.forget_unproven(state), joining=joining)
    for stage in range(state.grid.stages):
        if not state.holders(stage):
            return _lose_stage(state, stage)
    statuses = {rank: report.status for rank, report in state.reports.items() if rank not in joining}
    try:
        decision = decide(statuses, state.summed)
    except ReCycleError as error:
        return end(state, Failed(str(error)))
    donors: dict[int, int] = {}
    for rank in joining:
        holders = state.holders(state.stage_of(rank))
        if any(statuses[holder].version != decision.version for holder in holders):
            return end(state, Failed(f"A stage went on without worker {rank}, which had not entered yet."))
        donors[rank] = min(holders)
    commits: dict[int, Any] = {}
    for _, report in sorted(state.reports.items()):
        if report.status.tells_of == decision.version - 1:
            commits.setdefault(report.status.stage, report.commit)
    if state.answered[0] == decision.version - 1:
        commits.update(state.answered[1])
    answered = (decision.version - 1, commits) if commits else state.answered
    heals = corruption_response.choose_healers(state, statuses, decision.version)
    state, vote, excused = corruption_response.call_vote(state, statuses, decision.version)
    # A worker that applies what is answered need not send it again.
    state = replace(state, regrouping=False, has_resumed=True, answered=answered, checks=state.checks.without(heals))
    details = {
        "roster": state.roster,
        "ahead": tuple(sorted(decision.ahead)),
        "redone": any(report.begun >= decision.version for report in state.reports.values()),
    }
    strangers = tuple(sorted(rank for rank in joining if state.cuts and state.reports[rank].cuts != state.cuts))
    layers: dict[str, Any] = {"cuts": state.cuts, "becomes": state.becomes, "strangers": strangers}
    resume = Send(
        state.roster,
        messages.Resume(
            state.generation,
            state.roster,
            decision,
            None,
            commits,
            donors,
            heals=heals,
            vote=vote,
            inspects=state.checks.inspects,
            excused=state.checks.excused,
            **layers,
        ),
    )
    healed = tuple(Record("healed", decision.version, rank, {"donor": donor}) for rank, donor in sorted(heals.items()))
    state, known = _tell_what_is_settled(state, statuses, decision.version)
    return state, (resume, *known, Record("resumed", decision.version, None, details), *healed, *excused)


def _tell_what_is_settled(state: MembershipState, statuses: Mapping[int, WorkerStatus], step: int) -> _Next:
    """If a stage has applied ``step``, which others do again, and knows what all had told of it, that holds for all:
    nobody guesses again. Who is ahead would build on such a guess, and would not tell of the step any more.
    """
    ahead = [status for status in statuses.values() if status.version > step]
    known, payloads = state.answered
    if known != step or len(payloads) < state.grid.stages or not ahead or any(status.unsettled for status in ahead):
        return state, ()
    told = messages.Committed(state.generation, step, payloads, False)
    return replace(state, committed=step), (Send(state.roster, told),)


def _undo(state: MembershipState, event: messages.Undo) -> _Next:
    """A guess was wrong: all drop what was computed with it, and whoever made it corrects it."""
    if event.generation != state.generation or state.regrouping:
        return state, ()
    return _with((Record("undone", event.step),), _begin_generation(state))


# ---------------------------------------------------------------------- exceptions


def _raised(state: MembershipState, event: messages.Raised) -> _Next:
    """A worker raised a suspected exception: evicts it, or tells it to do the work again or that it is the user's."""
    if any((one.rank, one.generation) == (event.rank, event.generation) for one in state.raised):
        return state, ()  # said twice
    stage = state.stage_of(event.rank)
    if event.rank in state.joining:
        verdict = Verdict.EVICT  # no stage needs it yet, and no member has met this exception
    elif not state.has_resumed:
        verdict = Verdict.OWN
    else:
        has_peer = bool(state.holders(stage) - {event.rank})
        verdict = fault_attribution.judge(event, stage, state.version, state.raised, has_peer, state.retries)
    state = replace(state, raised=fault_attribution.remember(event, stage, state.version, state.raised))
    where = event.operation if event.step == fault_attribution.OUTSIDE else f"{event.operation} of step {event.step}"
    cause = f"it raised {event.summary} ({where})"
    if verdict is Verdict.EVICT:
        return state, (Evict(event.rank, cause),)
    judged = Send((event.rank,), messages.Judged(event.generation, verdict is Verdict.OWN))
    if verdict is Verdict.OWN:
        return state, (judged,)
    commands = (judged, Record("retried", state.version, event.rank, {"cause": cause}))
    if event.generation < state.generation:
        return state, commands  # the newer one waits for its report
    return _with(commands, _begin_generation(state))


# ---------------------------------------------------------------------- wrong results


def _begin_unless_over(state: MembershipState, found: _Next | None) -> _Next:
    """Begins a generation after what was ``found``, unless it ended the run, or is nothing."""
    if found is None or found[0].outcome is not None:
        return (state, ()) if found is None else found
    return _with(found[1], _begin_generation(found[0]))


def _give_up_comparing(state: MembershipState, event: messages.Incomparable) -> _Next:
    if not state.checks.comparable:
        return state, ()
    found = corruption_response.give_up_comparing(state, event.cause)
    return found if state.regrouping else _begin_unless_over(state, found)


def _disputed(state: MembershipState, event: messages.Disputed) -> _Next:
    if event.other == event.rank and event.mine != event.theirs:
        return _decided(state, corruption_response.add_own_error(state, event))
    return _begin_unless_over(state, corruption_response.add_dispute(state, event))


def _decided(state: MembershipState, found: _Next | None) -> _Next:
    """Begins a generation after a vote, unless votes are missing, or a loss begins the one that the voters wait for."""
    is_open = found is not None and found[0].checks.dispute is not None
    if found is None or is_open or any(isinstance(command, Evict) for command in found[1]):
        return (state, ()) if found is None else found
    return _begin_unless_over(state, found)


# ---------------------------------------------------------------------- broken connections without a death


def _broken(state: MembershipState, event: messages.Broken) -> _Next:
    if event.generation != state.generation or state.regrouping:
        return state, ()
    pairs = {(min(event.rank, other), max(event.rank, other)) for other in event.unreachable}
    state = replace(state, broken_pairs=state.broken_pairs | pairs)
    return state, (StartGrace(event.generation, f"worker {state.grid.worker(event.rank)}: {event.reason}"),)


def _grace_elapsed(state: MembershipState, event: GraceElapsed) -> _Next:
    """A connection broke between two live workers: connects the same workers again, or evicts as few as possible."""
    if event.generation != state.generation or state.regrouping:
        return state, ()
    if state.broken_pairs:  # they were told to check their links: reconnecting has been tried
        holders = [state.holders(stage) for stage in range(state.grid.stages)]
        evicted = fault_attribution.choose_evictions(
            state.broken_pairs, holders, state.leader, partial(_can_recover, state)
        )
        if evicted is not None:
            return state, tuple(Evict(rank, _cut_off_from(state, rank)) for rank in evicted)
    if state.disturbances >= MAX_DISTURBANCES:
        return end(state, Failed(_why_given_up(state, event.reason)))
    pairs = tuple((_place(state, a), _place(state, b)) for a, b in sorted(state.broken_pairs))
    state = replace(state, disturbances=state.disturbances + 1)
    details: dict[str, Any] = {"cause": event.reason, **({"broken_pairs": pairs} if pairs else {})}
    if state.becomes:  # nobody needs another layout so much that what breaks it may end the run
        details["layers_stay"] = state.becomes
        state = replace(state, layout=None)
    record = Record("disturbance", state.version, None, details)
    return _with((record,), _begin_generation(state))


def _can_recover(state: MembershipState, evicted: frozenset[int]) -> bool:
    """Whether the others could go on from what they reported; without a connection nobody has moved on since."""
    statuses = {
        r: report.status for r, report in state.reports.items() if r not in evicted and report.status.version >= 0
    }
    try:
        decide(statuses, state.summed)
    except ReCycleError:
        return False
    return True


def _place(state: MembershipState, rank: int) -> tuple[int, int]:
    worker = state.grid.worker(rank)
    return worker.pipeline, worker.stage


def _cut_off_from(state: MembershipState, rank: int) -> str:
    """Why ``rank`` is evicted, in words."""
    others = sorted({other for pair in state.broken_pairs if rank in pair for other in pair} - {rank})
    names = " and ".join(str(state.grid.worker(other)) for other in others)
    return f"it and worker{'s' if len(others) > 1 else ''} {names} cannot reach each other"


def _why_given_up(state: MembershipState, last: str) -> str:
    times, step = MAX_DISTURBANCES + 1, state.version
    reason = f"Communication between live workers failed {times} times in a row at step {step}, "
    reason += f"at last because: {last.rstrip('.')}. "
    if state.broken_pairs:
        pairs = ", ".join(f"{state.grid.worker(a)} and {state.grid.worker(b)}" for a, b in sorted(state.broken_pairs))
        reason += f"These cannot reach each other, and the others cannot go on without one of each two: {pairs}. "
    return reason + "Check the network between the workers; the warnings above say what went wrong before."


# ---------------------------------------------------------------------- changes at a step boundary


def _wanted(state: MembershipState) -> tuple[frozenset[int], frozenset[int]]:
    """Who enters and who leaves at the next step boundary. No stage is left without a worker that has its state."""
    enter = state.ready - state.live
    wanted = state.leaving | {mover for rank, mover in state.moves.items() if rank in enter}
    leave: set[int] = set()
    for rank in sorted(wanted & state.live):
        if state.holders(state.stage_of(rank)) - leave - {rank}:
            leave.add(rank)
    # A worker that moves must be able to leave; else its device would hold two workers.
    enter = frozenset(rank for rank in enter if state.moves.get(rank, -1) in leave or rank not in state.moves)
    return enter, frozenset(leave)


def _pause_if_wanted(state: MembershipState) -> _Next:
    if state.generation < 0 or state.regrouping or state.pause is not None or state.joining or state.becomes:
        return state, ()
    if not any(_wanted(state)) and state.plan is None and state.layout is None and not state.checks.healing:
        return state, ()
    pause = PauseState(state.pauses)
    return replace(state, pause=pause), (Send(state.roster, messages.Pause(state.generation, pause.number)),)


def _paused(state: MembershipState, event: messages.Paused) -> _Next:
    pause = state.pause
    if pause is None or (event.generation, event.number) != (state.generation, pause.number):
        return state, ()
    if pause.boundary is not None:
        return state, ()
    pause = replace(pause, begun={**pause.begun, event.rank: event.step})
    state = state.updated(pause=pause)
    if pause.begun.keys() != state.live:
        return state, ()
    boundary = max(pause.begun.values()) + 1
    plan = state.plan
    if plan is not None and not plan.reconnects and state.layout is None and not any(_wanted(state)):
        return _change_plan(state, plan, boundary)
    state = replace(state, pause=replace(pause, boundary=boundary))
    return state, (Send(state.roster, messages.Boundary(state.generation, boundary, None, pause.number)),)


def _change_plan(state: MembershipState, plan: PlanReady, boundary: int) -> _Next:
    """All run ``plan`` from ``boundary`` on, without stopping there."""
    message = messages.Boundary(state.generation, boundary, None, state.pauses)
    state = replace(state, pause=None, pauses=state.pauses + 1, plan=None)
    return state, (Send(state.roster, message, plan.schedule), Record("replanned", boundary, None, plan.details))


def _at_boundary(state: MembershipState, event: messages.AtBoundary) -> _Next:
    pause = state.pause
    if pause is None or event.generation != state.generation or event.step != pause.boundary:
        return state, ()
    pause = replace(pause, arrived=pause.arrived | {event.rank})
    state = state.updated(pause=pause)
    if pause.arrived != state.live:
        return state, ()
    enter, leave = _wanted(state)
    commands: list[Command] = [Record("paused", event.step)]
    layout = state.layout
    if layout is not None and not (enter or leave or state.checks.healing):
        return _with(tuple(commands), _begin_generation(state, layout.cuts, idle=True))
    if state.plan is not None and not (enter or leave):
        commands.append(Record("replanned", event.step, None, state.plan.details))
    moved = {mover: rank for rank, mover in state.moves.items() if rank in enter}
    for rank in sorted(leave):
        if rank in moved:
            target = state.grid.worker(moved[rank])
            details = {"to": (target.pipeline, target.stage)}
            commands.append(Record("moved", event.step, rank, details))
        else:
            commands.append(Record("left", event.step, rank))
    state = _remove(state, leave)
    state = replace(
        state,
        live=state.live | enter,
        joined=state.joined | enter,
        joining=enter,
        newcomers=state.newcomers | enter,
        ready=state.ready - enter,
        passed=0,
        applied={**state.applied, **dict.fromkeys(enter, event.step - 1)},
        moves={rank: mover for rank, mover in state.moves.items() if rank not in enter},
    )
    return _with(tuple(commands), _begin_generation(state, idle=not (enter or leave)))


def _entered(state: MembershipState, event: messages.Entered) -> _Next:
    if event.rank not in state.joining:
        return state, ()
    return replace(state, joining=state.joining - {event.rank}), (Record("rejoined", state.version, event.rank),)
