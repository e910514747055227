"""Restart of a coordinator, from its journal and its workers' memory. Pure.

Concept: what changes seldom, and decides who belongs to the run, is written to the journal before it is announced
(:class:`JournaledState`): the roster and its generation, the leader, what was raised, where all stop, how the run
ended. All else is known to the workers, each of which keeps what others may lack (:class:`MessageRecord`): questions
without an answer, the newest answers, and its messages about the newest steps. It sends all that when it returns
(:class:`~lightning_recycle.control.protocol.messages.Returned`). A revived coordinator waits for its roster
(:func:`revived`); once each of them has returned or is lost, :func:`rebuilt` makes the state, and a new generation
begins. What an earlier coordinator has sent to some, it sends to the others first, word for word; questions without an
answer are asked anew. So all have the same answers, whenever it died.

Contract: a generation that any worker has heard of is never used again. Nothing is redone but what the rules of
:mod:`~lightning_recycle.control.protocol.recovery` redo after a loss. The coordinator may be killed again at any
moment: until the new generation is in the journal, the workers have heard nothing that they did not know already. What
a worker keeps is bounded: workers are never more than one step and one control collective apart, so all of them have
older answers. What counts in one generation only is not kept: a revival begins another one.

If the journal is lost, the workers know enough of it (:func:`adopted`) where all members of the newest generation
return. A worker that was given up before that generation is not in its roster, and generations that none of them has
heard of have had no effect. Missed are the exceptions that were raised before, votes against newcomers, reasons of
losses, how earlier runs ended, and that a checkpoint is whole whose writer is lost, too.

Not kept, and not missed: moves, which only a launching process plans, and it ends with its coordinator; pauses and
boundaries, commits, broken links and what else counts in one generation only, such as a layout that the workers were
getting ready for; a better plan; the record, which begins anew, but for its counters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_recycle.control.protocol import messages, saves
from lightning_recycle.control.protocol.messages import AfterStep, StopReason
from lightning_recycle.control.protocol.parking import release
from lightning_recycle.control.protocol.state import (
    CollectivesState,
    Command,
    Ended,
    Failed,
    Faults,
    Finished,
    Generation,
    LayoutState,
    MembershipState,
    Next,
    Outcome,
    Record,
    Resend,
    Roster,
    SaveState,
    Steps,
    StopRound,
    initial_state,
)
from lightning_recycle.planning.grid import Grid

_ORDER: tuple[type[Any], ...] = (
    messages.Restored,
    messages.Applied,
    messages.Losses,
    messages.StopWish,
    messages.SaveBegun,
    messages.SaveAnnounced,
    messages.SaveEnded,
    messages.Arrive,
    messages.Ready,
    messages.Leave,
    messages.EndRun,
)


@dataclass(frozen=True, slots=True)
class Over:
    """End of a run.

    Args:
        reason: what the workers are told.
        words: for people.
        answer: the answer to the collective that delivered the results, which some may lack.
    """

    reason: StopReason
    words: str = ""
    answer: messages.Answer | None = None

    @property
    def outcome(self) -> Outcome:
        """As far as it is known: the results are with their reader."""
        if self.reason is StopReason.FINISHED:
            return Finished({})
        return Ended() if self.reason is StopReason.ENDED else Failed(self.words)


@dataclass(frozen=True, slots=True)
class JournaledState:
    """State that is in the journal before it is announced; the fields as in
    :class:`~lightning_recycle.control.protocol.state.MembershipState` and its parts.

    ``roster``: without who comes and goes at a step boundary. ``stop_round``: once it is over.
    """

    generation: int
    roster: Roster
    has_resumed: bool = False
    faults: Faults = field(default_factory=Faults)
    stop_round: StopRound | None = None
    after_step: AfterStep = AfterStep.GO_ON
    over: Over | None = None
    cuts: messages.Cuts = ()
    saves: SaveState = field(default_factory=SaveState)


def durable(state: MembershipState) -> tuple[Any, ...]:
    """Parts that :func:`kept` is made of: as long as these are the same objects, there is nothing new to write down."""
    faults = state.faults
    return (
        state.generation.number,
        state.roster,
        state.has_resumed,
        faults.raised,
        faults.disturbances,
        state.collectives.stop_round,
        state.steps.after_step,
        state.layout.cuts,
        state.saves.announced,
        state.saves.ended,
        state.outcome,
    )


def kept(state: MembershipState) -> JournaledState:
    """Journal entry for ``state``, if it has changed; written before the commands that came with it are obeyed."""
    stop, nobody = state.collectives.stop_round, frozenset[int]()
    return JournaledState(
        state.generation.number,
        state.roster.updated(joined=nobody, ready=nobody, leaving=nobody, ending=nobody, moves={}),
        state.has_resumed,
        state.faults,
        replace(stop, wanted=nobody) if stop is not None and stop.is_over else None,
        state.steps.after_step,
        None if state.outcome is None else _over(state, state.outcome),
        state.layout.cuts,
        state.saves,
    )


def _over(state: MembershipState, outcome: Outcome) -> Over:
    answer = None
    if isinstance(outcome, Finished):
        delivered = {rank: rank in outcome.results for rank in state.roster.ranks}
        answer = messages.Answer(state.collectives.next - 1, delivered, state.roster.leader)
    words = outcome.reason if isinstance(outcome, Failed) else f"It ended before: {type(outcome).__name__}"
    return Over(StopReason.of(outcome), words, answer)


def revived(grid: Grid, written: JournaledState, retries: int = 1, members: int = 1) -> MembershipState:
    """The state of a coordinator that is started again: it waits for all workers of the roster to return."""
    state, roster, number = initial_state(grid, retries, members), written.roster, written.generation
    if written.over is not None:
        return state.with_generation(number=number).updated(outcome=written.over.outcome)
    state = state.updated(roster=roster, steps=Steps(after_step=written.after_step))
    if number < 0:
        return state
    return state.updated(
        generation=Generation(number, regrouping=True),
        collectives=CollectivesState(stop_round=written.stop_round),
        layout=LayoutState(cuts=written.cuts),
        saves=written.saves,
        faults=written.faults.updated(retries=retries),
        has_resumed=written.has_resumed,
        returned={},
    )


def adopted(said: Collection[messages.Returned]) -> tuple[JournaledState | None, dict[int, messages.Returned]] | str:
    """State of an earlier coordinator, without its file, and its members by rank; or what is missing.

    Args:
        said: what workers of one run say that have lost their coordinator.

    Returns:
        None instead of :class:`JournaledState` if the run has not begun.
    """
    if not said:
        return "they have gone again"
    newest = max(said, key=lambda one: one.generation)
    if newest.generation < 0:
        if newest.wants is None:
            return "some have not returned"
        grid, wanted = newest.wants.grid, newest.wants.settings.get("recovery.min_pipelines")
        least = wanted if isinstance(wanted, int) else grid.pipelines
        columns = grid.stages * max(one.wants.members for one in said if one.wants)
        there = Counter(rank % columns for rank in {one.rank for one in said})
        is_whole = all(there[column] >= least for column in range(columns))
        return (None, {}) if is_whole else "some have not returned"
    # Whoever is more than one behind was given up, or so many were announced in a row that nobody can tell.
    current = [one for one in said if one.rank in newest.roster and one.generation >= newest.generation - 1]
    if newest.generation == 0:  # all members began with it: whoever is to join replaces one that is lost
        current = [one for one in current if not one.joining]
    members = {one.rank: one for one in sorted(current, key=lambda one: (one.incarnation, one.generation))}
    missing = [rank for rank in newest.roster if rank not in members]
    if missing:
        return f"the workers of ranks {', '.join(map(str, missing))} have not returned"
    knows = max(members.values(), key=lambda one: one.resumed)
    # A decision to stop that nobody has heard is made again.
    verdicts = (one.verdict for one in members.values() if one.verdict is not None)
    verdict = max(verdicts, key=lambda one: one.point, default=None)
    roster = Roster(
        frozenset(newest.roster),
        leader=newest.leader,
        joining=frozenset(rank for rank, one in members.items() if one.joining and not one.entered),
        newcomers={rank: one.joins_after + 1 for rank, one in members.items() if one.joining},
        moved=newest.moved,
        assembled=frozenset(rank for rank, one in members.items() if one.was_parked),
    )
    return JournaledState(
        newest.generation,
        roster,
        has_resumed=knows.resumed >= 0,
        stop_round=None if verdict is None else StopRound(verdict.point, is_over=True, agreed=verdict.agreed),
        after_step=AfterStep.GO_ON if verdict is None or verdict.agreed else AfterStep.STOP,
        cuts=knows.cuts,
    ), members


def rebuilt(state: MembershipState) -> Next:
    """All have returned: the state without what :func:`events` adds, and what some were told and others not."""
    assert state.returned is not None
    there = state.returned
    late = {rank for rank in state.roster.parked if rank not in there}
    state = state.updated(roster=state.roster.without_parked(late))  # they have missed something
    next_collective = max(there[rank].next_collective for rank in state.heard)
    answer = _newest_answer({rank: there[rank] for rank in state.heard}, next_collective)
    oldest = next_collective if answer is None else answer.number  # that may still be answered
    state, released = release(state, {r for r in state.roster.parked if there[r].next_collective < oldest})
    members, roster = {rank: there[rank] for rank in state.heard}, state.roster
    generation = max(state.generation.number, *(member.generation for member in members.values()))
    applied = {rank: one.applied - len(one.facts) for rank, one in members.items() if one.applied >= 0}
    live = {rank: members[rank].applied for rank in roster.ranks}
    newest = [step for rank, step in live.items() if rank not in roster.joining or step >= 0]
    for rank in roster.joining - applied.keys():
        # The others cannot go on without it. If they are lost, what it was about to get may have arrived.
        applied[rank] = min(newest, default=members[rank].joins_after)
    restored = max(one.restored for one in members.values())
    version = max(restored, 1 + min(applied.get(rank, -1) for rank in roster.live))
    told = {loss.step: loss for one in members.values() for loss in one.told}
    known = max(
        (one.known for one in members.values() if one.known is not None),
        key=lambda one: (one.generation, one.step),
        default=None,
    )
    summed = max([version, *(step + 1 for step in told), *(one.applied + 1 for one in members.values())])
    doubted = max((steps[-1] + 1 for steps in roster.dismissed.values()), default=-1)
    unanswered = {(one.raised.rank, one.raised.generation) for one in members.values() if one.raised is not None}
    state = state.updated(
        generation=state.generation.updated(number=generation),
        steps=state.steps.updated(
            version=version,
            passed=0,
            applied=applied,
            answered=state.steps.answered if known is None else (known.step, known.payloads),
            summed=summed,
            unproven=summed if state.steps.unproven >= 0 else doubted,
        ),
        collectives=state.collectives.updated(next=next_collective),
        faults=state.faults.updated(
            raised=tuple(one for one in state.faults.raised if (one.rank, one.generation) not in unanswered)
        ),
        saves=saves.begun_by(members.values(), state.saves),
        returned=None,
    )
    counters = told[max(told)].counters if told else {}
    record = Record("revived", version, None, {"roster": state.roster.ranks, "counters": counters})
    return state, (record, *released, *_repeated(state, members, told, answer))


def _newest_answer(members: Mapping[int, messages.Returned], next_collective: int) -> messages.Answer | None:
    """The answer to the collective before ``next_collective``, if one of ``members`` keeps it."""
    answers = (one.answer for one in members.values() if one.answer is not None)
    return next((answer for answer in answers if answer.number == next_collective - 1), None)


def _repeated(
    state: MembershipState,
    members: Mapping[int, messages.Returned],
    told: Mapping[int, messages.StepLoss],
    answer: messages.Answer | None,
) -> Iterator[Command]:
    """Messages that an earlier coordinator has sent to some, for the others."""
    if answer is not None:
        lack = tuple(rank for rank, one in members.items() if one.next_collective <= answer.number)
        yield Resend(lack, answer)
    for step, loss in sorted(told.items()):
        lack = tuple(r for r, one in members.items() if one.applied < step and step not in {s.step for s in one.told})
        yield Resend(lack, loss)
    stop = state.collectives.stop_round
    if stop is not None:
        asked = {r for r, one in members.items() if one.request is not None and one.request.point == stop.point}
        yield Resend(tuple(sorted(asked)), messages.StopVerdict(stop.point, stop.agreed))
    for rank, one in members.items():
        if one.confirm is not None:
            yield Resend((rank,), messages.Confirmed(one.confirm.number))
        if one.hook is not None:  # not told by all, or they may not know
            yield Resend(tuple(sorted(state.positions.siblings(rank) & members.keys())), one.hook)


def events(member: messages.Returned) -> Iterator[Any]:
    """Messages of ``member`` without an answer, as it sent them."""
    if member.restored:
        yield messages.Restored(member.rank, member.restored)
    yield from member.facts
    yield from member.losses
    if member.request is not None:
        yield member.request
    if member.save is not None:
        yield member.save
        yield from member.announced
        yield from member.saves_ended
    if member.arrival is not None:
        yield member.arrival
    if member.is_ready:
        yield messages.Ready(member.rank)
    if member.leave is not None:
        yield member.leave
    if member.ends_run:
        yield messages.EndRun(member.rank)


def order(event: Any) -> tuple[int, int]:
    """The place of one of :func:`events` among those of all workers."""
    return _ORDER.index(type(event)), getattr(event, "step", 0)


_STEPS = 2
_STEPS_UNTIL_ALL_HAVE_AN_ANSWER = 3
"""Who begins step b + 3 has applied b + 2; no worker can before all have begun step b + 1, and had what came before."""


class MessageRecord:
    """Messages that a worker has sent and received, and others may lack."""

    def __init__(self) -> None:
        # Named as the fields of Returned, which are told as they are:
        self.facts: tuple[messages.Applied, ...] = ()
        self.arrival: messages.Arrive | None = None
        self.answer: messages.Answer | None = None
        self.known: messages.Committed | None = None
        self.request: messages.StopWish | None = None
        self.raised: messages.Raised | None = None
        self.confirm: messages.Confirm | None = None
        self.save: messages.SaveBegun | None = None
        self.announced: tuple[messages.SaveAnnounced, ...] = ()
        self.saves_ended: tuple[messages.SaveEnded, ...] = ()
        self.applied = self.joins_after = -1
        self.restored = 0
        self.is_ready = self.entered = self.ends_run = False
        self.leave: messages.Leave | None = None
        self.measured: messages.Measured | None = None
        self._losses: dict[int, messages.Losses] = {}
        self._told: dict[int, messages.StepLoss] = {}
        self._answered_at = -1  # the newest step that it had begun when the answer came

    def said(self, message: Any) -> None:
        """The worker sends ``message``, or tries to."""
        match message:
            case messages.Applied():
                self.facts = (*self.facts, message)[-_STEPS:]
                self.applied = message.step
            case messages.Losses():
                before = self._losses.get(message.step)
                if before is not None:  # a step that is run again: what came first counts
                    losses, outputs = {**message.losses, **before.losses}, {**message.outputs, **before.outputs}
                    message = messages.Losses(message.rank, message.step, losses, outputs, message.generation)
                self._losses[message.step] = message
            case messages.Arrive(generation=None):
                self.arrival = message
            case messages.StopWish(stops=True):
                self.request = message
            case messages.Raised():
                self.raised = message
            case messages.Confirm():
                self.confirm = message
            case messages.SaveBegun():
                self.save, self.announced, self.saves_ended = message, (), ()
            case messages.SaveAnnounced():
                self.announced = (*self.announced, message)
            case messages.SaveEnded():
                self.saves_ended = (*self.saves_ended, message)
            case messages.Restored():
                self.restored = message.version
            case messages.Reached(milestone=messages.Milestone.ENTERED):
                self.applied = self.joins_after
                self.entered = True
            case messages.Ready():
                self.is_ready = True
            case messages.Leave():
                self.leave = message
            case messages.EndRun():
                self.ends_run = True
            case messages.Measured():
                new = {name: value for name in message.__slots__ if (value := getattr(message, name)) is not None}
                self.measured = replace(self.measured or message, **new)

    def heard(self, message: Any, rank: int, begun: int) -> None:
        """The coordinator said ``message`` to worker ``rank``, whose newest step is ``begun``."""
        match message:
            case messages.Answer():
                if self.arrival is not None and self.arrival.number <= message.number:
                    self.arrival = None
                if self.answer is None or message.number >= self.answer.number:
                    self.answer, self._answered_at = message, begun
                self._heard_of(message.saves)
            case messages.StepLoss():
                self._told[message.step] = message
                for step in sorted(self._told)[:-_STEPS]:
                    del self._told[step]
                self._losses = {step: one for step, one in self._losses.items() if step > message.step}
                self._heard_of(message.saves)
            case messages.Committed():
                self.known = message
            case messages.Resume():
                if message.commits:
                    step = message.decision.version - (not message.settled)
                    self.known = messages.Committed(message.generation, step, message.commits)
                if rank in message.donors:
                    self.joins_after = message.decision.version - 1
            case messages.StopVerdict():
                if self.request is not None and self.request.point == message.point:
                    self.request = None
            case messages.Judged():
                if self.raised is not None and self.raised.generation == message.generation:
                    self.raised = None
            case messages.Confirmed():
                if self.confirm is not None and self.confirm.number <= message.number:
                    self.confirm = None

    def _heard_of(self, saves: messages.SaveStatus) -> None:
        if self.save is not None and saves.batch >= self.save.batch:
            self.save, self.announced, self.saves_ended = None, (), ()

    def drop(self, announced: messages.Regroup) -> None:
        """The worker enters a generation."""
        self._losses.pop(announced.unproven, None)

    def began(self, step: int) -> None:
        """The worker begins ``step``."""
        if self.answer is not None and step >= self._answered_at + _STEPS_UNTIL_ALL_HAVE_AN_ANSWER:
            self.answer = None  # it may be as large as a checkpoint

    def returned(self, generation: int, next_collective: int, **who: Any) -> messages.Returned:
        """All that it holds.

        Args:
            generation: the newest that was announced to it.
            next_collective: the first control collective that it has taken no answer to, nor has arrived at.
            who: the other fields of the message.
        """
        number = next_collective if self.arrival is None else self.arrival.number
        if self.answer is not None:
            number = max(number, self.answer.number + 1)
        held = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return messages.Returned(
            generation=generation,
            next_collective=number,
            losses=tuple(self._losses.values()),
            told=tuple(self._told.values()),
            **held,
            **who,
        )
