"""The coordinator's state machine: events to next states and commands. Pure.

:func:`transition` has no clock, socket or process; the coordinator is its shell, and posts each ``Send``
(:class:`~lightning_recycle.control.coordinator.worker_table.WorkerTable`). The tables :data:`_HANDLERS` and
:data:`_MEMBER_HANDLERS` name the handler of each event, in the module of its subject:

- :mod:`~lightning_recycle.control.protocol.recovery`: a new generation, and the step at which it goes on;
- :mod:`~lightning_recycle.control.protocol.step_commit`: losses, commits, changes at a step boundary;
- :mod:`~lightning_recycle.control.protocol.fault_attribution`: wrong bits, suspected exceptions, broken links;
- :mod:`~lightning_recycle.control.protocol.control_collectives`: control collectives, early stops, checkpoints.

Here: workers that join before the training, losses, reports, and workers that return to a restarted coordinator
(:mod:`~lightning_recycle.control.journal`), which then connect again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

from lightning_recycle.control.protocol import control_collectives, fault_attribution, messages, recovery, step_commit
from lightning_recycle.control.protocol.messages import AfterStep, Decision, Milestone, WorkerStatus
from lightning_recycle.control.protocol.recovery import decide
from lightning_recycle.control.protocol.state import (
    VALIDATES,
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
    Next,
    PlanReady,
    Record,
    Resend,
    Send,
    StageLost,
    StartDue,
    after,
    end,
    validate,
)
from lightning_recycle.errors import ReCycleError


def objection(state: MembershipState, rank: int, message: Any) -> str | None:
    """Why the worker at ``rank`` cannot have sent ``message``; None if it can.

    Never objects to a worker that follows the protocol, however late its messages arrive.
    """
    if message.rank != rank and not (isinstance(message, messages.Heartbeat) and message.rank == -1):
        return f"it speaks for rank {message.rank}"  # a heartbeat may be older than its position
    if not isinstance(message, messages.FromNonMember) and rank not in state.roster.live:
        return "it is not a member"
    generation = getattr(message, "generation", None)
    if generation is not None and not -1 <= generation <= state.generation.number:
        return f"generation {generation} has not begun"
    return None


def transition(state: MembershipState, event: MembershipEvent) -> Next:
    """Next state and commands; most late events of lost workers change nothing."""
    if state.outcome is not None:
        return state, ()
    previous = state
    state, commands = _handle(state, event)
    if state.returned is not None and state.outcome is None and state.roster.live <= state.returned.keys():
        state, went_on = _go_on_with_returned(state, state.returned)
        commands += went_on
    if state.outcome is None:
        if state.roster.ending >= state.roster.live:  # no worker is left that would go on
            state = state.with_steps(after_step=AfterStep.END)
            state = state.with_roster(leaving=frozenset(), ending=frozenset())
        state, given_up = control_collectives.settle_saves(state)
        state, pause = step_commit.pause_if_wanted(state)
        commands += given_up + pause
    if VALIDATES and state.outcome is None:
        validate(previous, state)
    return state, commands


def _handle(state: MembershipState, event: Any) -> Next:
    kind = type(event)
    if kind in _HANDLERS:
        return _HANDLERS[kind](state, event)
    return _MEMBER_HANDLERS[kind](state, event) if event.rank in state.roster.live else (state, ())


# ---------------------------------------------------------------------- workers come and go


def _on_joined(state: MembershipState, event: Joined) -> Next:
    """A worker has joined; the first generation begins once all have."""
    if state.generation.number >= 0:
        return state, ()
    return recovery.begin_generation(state.with_roster(joined=state.roster.joined | {event.rank}))


def _on_start_due(state: MembershipState, event: StartDue) -> Next:
    """Begins without missing workers if each stage has enough; theirs are vacant."""
    expected = state.roster.live - (event.vacant - state.roster.joined)
    in_stage, stages = Counter(map(state.positions.stage, expected)), range(state.positions.grid.stages)
    if state.generation.number >= 0 or any(in_stage[stage] < event.least for stage in stages):
        return state, ()
    return _settle_and_regroup(state.with_roster(live=expected))


def _lose(state: MembershipState, event: Lost) -> Next:
    """A worker and its siblings leave; ends the run if they were the last of a stage.

    Where all others of the stage are JOINING, it counts as lost once they report that they have no state.
    """
    if event.rank not in state.roster.live:
        return state.with_roster(ready=state.roster.ready - {event.rank}), ()
    if state.positions.all_members({event.rank}) & state.roster.newcomers.keys():
        state = fault_attribution.doubt(state)
    commands: tuple[Command, ...] = (Record("failure", state.steps.version, event.rank, {"cause": event.cause}),)
    state, released = recovery.without_positions(state, {event.rank})
    commands += released
    state = state.with_faults(disturbances=0)
    state = state.with_roster(causes={**state.roster.causes, event.rank: event.cause})
    stage = state.positions.stage(event.rank)
    if state.stage_leader(stage) is None:
        return after(commands, _lose_stage(state, stage))
    if state.returned is not None:
        return state, commands  # the others are awaited
    return after(commands, _settle_and_regroup(state))


def _settle_and_regroup(state: MembershipState) -> Next:
    """Counts steps, answers collectives that waited for lost workers, and regroups."""
    state, settled = step_commit.settle_steps(recovery.with_leader(control_collectives.forget_retracted(state)))
    if state.outcome is not None:  # the loss has just completed the results
        return state, settled
    state, begins = recovery.begin_generation(state)
    # Whoever hears what the loss has settled has heard of the loss, also if this coordinator dies between the two.
    return state, begins + settled


def _lose_stage(state: MembershipState, stage: int) -> Next:
    causes = {rank: cause for rank, cause in state.roster.causes.items() if state.positions.stage(rank) == stage}
    record = Record("stage_lost", state.steps.version, None, {"stage": stage})
    return after((record,), end(state, StageLost(stage, causes)))


def _on_crash(state: MembershipState, event: messages.Crash) -> Next:
    return _lose(state, Lost(event.rank, event.summary)) if event.fault else end(state, Crashed(event))


def _on_end_wanted(state: MembershipState, event: EndWanted) -> Next:
    if state.generation.number < 0:
        return end(state, Ended())
    return state.with_steps(after_step=AfterStep.END), ()


def _on_end_run(state: MembershipState, event: messages.EndRun) -> Next:
    """Ends after the present step; also before the first: a new job may go on from it."""
    return state.with_steps(after_step=AfterStep.END), ()


# ---------------------------------------------------------------------- reports


def _on_report(state: MembershipState, event: messages.Report) -> Next:
    """A worker reports; when all have, they resume, or the roster changes again."""
    if event.generation != state.generation.number or not state.generation.regrouping:
        return state, ()
    reports = {**state.generation.reports, event.rank: event}
    state = state.with_generation(reports=reports)
    if reports.keys() != state.roster.live:
        return state, ()
    joining = frozenset(rank for rank, report in reports.items() if report.status.version < 0)
    state = step_commit.forget_unproven(state).with_roster(joining=joining)
    statuses = {rank: report.status for rank, report in reports.items() if rank not in joining}
    for column in range(state.positions.columns):
        if not state.holders(column):
            return _lose_stage(state, column // state.positions.members)
    if state.roster.leader in joining:  # chosen when nobody was known to have a state; whoever has one leads
        return recovery.begin_generation(state)
    return _decide(state, statuses)


def _decide(state: MembershipState, statuses: Mapping[int, WorkerStatus]) -> Next:
    """Resumes all at the step of :func:`~.recovery.decide`, unless there is none."""
    try:
        decision = decide(statuses, state.steps.summed)
    except ReCycleError as error:
        return end(state, Failed(str(error)))
    for rank in state.roster.joining:
        if any(statuses[holder].version != decision.version for holder in state.holders(state.positions.column(rank))):
            return end(state, Failed(f"A stage went on without worker {rank}, which had not entered yet."))
    commits, confirmed = _known_commits(state, statuses, decision.version)
    return _resume(state, statuses, decision, commits, confirmed)


def _resume(
    state: MembershipState, statuses: Mapping[int, WorkerStatus], decision: Decision, commits: Any, confirmed: bool
) -> Next:
    """Sends ``Resume``, by which all connect, carry out ``decision``, and go on."""
    reports, roster, joining = state.generation.reports, state.roster.ranks, state.roster.joining
    cuts = state.layout.cuts
    state, vote, excused = fault_attribution.call_vote(state, statuses, decision.version)
    # A worker that applies what is answered need not send it again.
    step = decision.version if confirmed else decision.version - 1
    answered = (step, commits) if commits else state.steps.answered
    state = state.with_generation(regrouping=False, commit_answered=step if confirmed else -1)
    state = state.with_steps(answered=answered).updated(has_resumed=True)
    resume = messages.Resume(
        state.generation.number,
        roster,
        decision,
        None,
        commits,
        confirmed,
        donors={rank: min(state.holders(state.positions.column(rank))) for rank in joining},
        cuts=cuts,
        becomes=state.generation.becomes,
        strangers=tuple(sorted(rank for rank in joining if cuts and reports[rank].cuts != cuts)),
        vote=vote,
        inspects=state.checks.inspects,
        excused=state.checks.excused,
    )
    redone = any(report.begun >= decision.version for report in reports.values())
    details = {"roster": roster, "ahead": tuple(sorted(decision.ahead)), "redone": redone}
    return state, (Send(roster, resume), Record("resumed", decision.version, None, details), *excused)


def _known_commits(state: MembershipState, statuses: Mapping[int, WorkerStatus], version: int) -> tuple[Any, bool]:
    """The contributions to a commit, by column, and whether they confirm ``version``.

    - Step ``version`` was applied by a worker, and its commit was answered: the contributions to it, True. That worker
      may have gone on from them and does not send its Commit again, so they hold for all, also speculative ones.
    - Otherwise: the contributions to step ``version - 1``, as far as reported or answered, False.
    """
    answered, payloads = state.steps.answered
    is_whole = len(payloads) == state.positions.columns
    if answered == version and is_whole and any(s.version > version for s in statuses.values()):
        return payloads, True
    commits: dict[int, Any] = {}
    for _, report in sorted(state.generation.reports.items()):
        if report.status.commit_step == version - 1:
            commits.setdefault(report.status.column, report.commit)
    return {**commits, **(payloads if answered == version - 1 else {})}, False


# ---------------------------------------------------------------------- a coordinator that was started again


def rebuilt(state: MembershipState) -> Next:
    """The state made from what all returned, and messages for those that missed them.

    :func:`returned_events` are not in it: they are handled after it.
    """
    assert state.returned is not None
    returned = state.returned
    members, roster = {rank: returned[rank] for rank in state.roster.ranks}, state.roster
    next_collective = max(each.next_collective for each in members.values())
    answers = (each.answer for each in members.values() if each.answer is not None)
    answer = next((answer for answer in answers if answer.number == next_collective - 1), None)
    generation = max(state.generation.number, *(member.generation for member in members.values()))
    applied = {rank: each.applied - len(each.facts) for rank, each in members.items() if each.applied >= 0}
    live = {rank: members[rank].applied for rank in roster.ranks}
    newest = [step for rank, step in live.items() if rank not in roster.joining or step >= 0]
    for rank in roster.joining - applied.keys():
        # The others cannot go on without it. If they are lost, what it was about to get may have arrived.
        applied[rank] = min(newest, default=members[rank].joins_after)
    restored = max(each.restored for each in members.values())
    version = max(restored, 1 + min(applied.get(rank, -1) for rank in roster.live))
    losses = {loss.step: loss for each in members.values() for loss in each.step_losses}
    newest_commit = max(
        (each.newest_commit for each in members.values() if each.newest_commit is not None),
        key=lambda each: (each.generation, each.step),
        default=None,
    )
    summed = max([version, *(step + 1 for step in losses), *(each.applied + 1 for each in members.values())])
    doubted = max((steps[-1] + 1 for steps in roster.dismissed.values()), default=-1)
    unanswered = {(each.raised.rank, each.raised.generation) for each in members.values() if each.raised is not None}
    state = state.updated(
        generation=state.generation.updated(number=generation),
        steps=state.steps.updated(
            version=version,
            applied_below=0,
            applied=applied,
            answered=state.steps.answered if newest_commit is None else (newest_commit.step, newest_commit.payloads),
            summed=summed,
            unproven=summed if state.steps.unproven >= 0 else doubted,
        ),
        collectives=state.collectives.updated(next=next_collective),
        faults=state.faults.updated(
            raised=tuple(each for each in state.faults.raised if (each.rank, each.generation) not in unanswered)
        ),
        saves=control_collectives.batch_begun_by(members.values(), state.saves),
        returned=None,
    )
    counters = losses[max(losses)].counters if losses else {}
    record = Record("revived", version, None, {"roster": state.roster.ranks, "counters": counters})
    return state, (record, *_resend_missed(state, members, losses, answer))


def _resend_missed(
    state: MembershipState,
    members: Mapping[int, messages.Returned],
    losses: Mapping[int, messages.StepLoss],
    answer: messages.Answer | None,
) -> Iterator[Command]:
    """Messages that an earlier coordinator has sent to some, for the others."""
    if answer is not None:
        receivers = tuple(rank for rank, each in members.items() if each.next_collective <= answer.number)
        yield Resend(receivers, answer)
    for step, loss in sorted(losses.items()):
        receivers = tuple(
            r for r, each in members.items() if each.applied < step and step not in {s.step for s in each.step_losses}
        )
        yield Resend(receivers, loss)
    stop = state.collectives.stop_round
    if stop is not None:  # also to those that will ask
        yield Resend(state.roster.ranks, messages.StopVerdict(stop.point, stop.agreed))
    for rank, each in members.items():
        if each.membership_query is not None:
            yield Resend((rank,), messages.MembershipConfirmed(each.membership_query.number))
        if each.hook is not None:  # not told by all, or they may not know
            yield Resend(tuple(sorted(state.positions.siblings(rank) & members.keys())), each.hook)


def returned_events(member: messages.Returned) -> tuple[tuple[Any, ...], ...]:
    """Messages of ``member`` without an answer, as it sent them, by kind."""

    def one(message: Any) -> tuple[Any, ...]:
        return () if message is None else (message,)

    return (
        one(messages.Restored(member.rank, member.restored) if member.restored else None),
        member.facts,
        member.losses,
        one(member.request),
        one(member.save),
        member.announced if member.save is not None else (),
        member.saves_ended if member.save is not None else (),
        one(member.arrival),
        one(messages.Ready(member.rank) if member.is_ready else None),
        one(member.leave),
        one(messages.EndRun(member.rank) if member.ends_run else None),
    )


def _on_returned(state: MembershipState, event: messages.Returned) -> Next:
    """A worker has returned to a restarted coordinator, with all that it holds."""
    if state.returned is None:
        return state, ()
    return state.updated(returned={**state.returned, event.rank: event}), ()


def _go_on_with_returned(state: MembershipState, returned: Mapping[int, messages.Returned]) -> Next:
    """Begins a generation of the returned workers: no other is awaited."""
    state, commands = rebuilt(state)
    members = [returned[rank] for rank in state.roster.ranks]
    state = recovery.with_leader(state)
    # The words of all on one subject before any on the next: it may complete what the next is judged by.
    for of_kind in zip(*map(returned_events, members), strict=True):
        for event in sorted(chain.from_iterable(of_kind), key=lambda event: getattr(event, "step", 0)):
            if state.outcome is None:
                state, caused = _handle(state, event)
                commands += caused
    if state.outcome is not None:
        return state, commands
    state, regroup = recovery.begin_generation(state)
    gone = {command.rank for command in commands if isinstance(command, Evict)}
    for member in members:
        if member.raised is not None and member.rank not in gone and state.outcome is None:
            state, judged = fault_attribution.on_raised(state, member.raised)
            regroup += judged
    return state, commands + regroup


# ---------------------------------------------------------------------- who handles what

_Handler = Callable[[MembershipState, Any], Next]


# Events of the shell, and of workers that are about to join.
_HANDLERS: Mapping[type[Any], _Handler] = {
    StartDue: _on_start_due,
    GraceElapsed: fault_attribution.on_grace_elapsed,
    EndWanted: _on_end_wanted,
    Lost: _lose,
    PlanReady: step_commit.on_plan_ready,
    LayoutReady: step_commit.on_layout_ready,
    messages.Ready: step_commit.on_ready,
}


# Milestones of members; only the shell needs to know when they are connected.
_MILESTONE_HANDLERS: Mapping[Milestone, _Handler] = {
    Milestone.ENTERED: step_commit.on_entered,
    Milestone.AT_BOUNDARY: step_commit.on_at_boundary,
    Milestone.LAYERS_HELD: step_commit.on_layers_held,
    Milestone.PASSED: step_commit.on_passed,
    Milestone.IN_HOOK: control_collectives.on_in_hook,
}


def _on_reached(state: MembershipState, event: messages.Reached) -> Next:
    return _MILESTONE_HANDLERS[event.milestone](state, event)


# Events that count only while their worker is live.
_MEMBER_HANDLERS: Mapping[type[Any], _Handler] = {
    Joined: _on_joined,
    messages.Crash: _on_crash,
    messages.EndRun: _on_end_run,
    messages.Report: _on_report,
    messages.Returned: _on_returned,
    messages.Undo: step_commit.on_undo,
    messages.Raised: fault_attribution.on_raised,
    messages.Broken: fault_attribution.on_broken,
    messages.Leave: step_commit.on_leave,
    messages.Paused: step_commit.on_paused,
    messages.Differs: fault_attribution.on_differs,
    messages.Reached: _on_reached,
    messages.LayoutWanted: step_commit.on_layout_wanted,
    messages.Restored: step_commit.on_restored,
    messages.Losses: step_commit.on_losses,
    messages.Applied: step_commit.on_applied,
    messages.Commit: step_commit.on_commit,
    messages.Arrive: control_collectives.on_arrive,
    messages.Heartbeat: control_collectives.on_heartbeat,
    messages.StopWish: control_collectives.on_stop_wish,
    messages.SaveBegun: control_collectives.on_save_begun,
    messages.SaveAnnounced: control_collectives.on_save_announced,
    messages.SaveEnded: control_collectives.on_save_ended,
    messages.Disputed: fault_attribution.on_disputed,
    messages.Voted: fault_attribution.on_voted,
    messages.NotFinite: fault_attribution.on_not_finite,
    messages.Incomparable: fault_attribution.on_incomparable,
}
