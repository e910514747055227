"""A coordinator that was killed and is started again: its state, from what it wrote down and what all report. Pure.

Concept: what changes seldom, and decides who belongs to the run, is written down before anybody hears of it
(:class:`Kept`): the roster and its generation, the leader, what was raised, where all stop, how the run ended. All else
is known to the workers, who keep what others may lack (:mod:`~lightning_recycle.control.protocol.returning`). A revived
coordinator waits for its roster (:func:`revived`); once each of them has returned or is lost, :func:`rebuilt` makes the
state, and a new generation begins. What an earlier coordinator has told some, it tells the others first, word for word;
the questions that nobody has answered are asked anew. So all have the same answers, whenever it died.

Contract: a generation that anybody has heard of is never used again. Nothing is redone but what the rules of
:mod:`~lightning_recycle.control.protocol.recovery` redo after a loss. It may be killed again at any moment: until the
new generation is written down, nobody has been told anything that the workers did not know already.

If what was written down is lost, the workers know enough of it (:func:`adopted`) where all members of the newest
generation return. Whoever was given up before that generation is not in its roster, and generations that none of them
has heard of have had no effect. Missed are the exceptions that were raised before, reasons of losses, and how earlier
runs ended. A decision to stop that only some have heard cannot be found out, so such a run does not go on.

Not kept, and not missed: moves, which only a launching process plans, and it ends with its coordinator; pauses and
boundaries, commits, broken links and what else counts in one generation only, such as a layout that the workers were
getting ready for; a better plan; the record, which begins anew, but for its counters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_recycle.control.protocol import messages
from lightning_recycle.control.protocol.blame import Remembered
from lightning_recycle.control.protocol.messages import AfterStep, StopReason
from lightning_recycle.control.protocol.state import (
    Command,
    Ended,
    Failed,
    Finished,
    MembershipState,
    Outcome,
    Record,
    Resend,
    StopRound,
    initial_state,
)
from lightning_recycle.planning.grid import Grid

__all__ = ["Kept", "Over", "adopted", "durable", "events", "kept", "order", "rebuilt", "revived"]

_ORDER: tuple[type[Any], ...] = (
    messages.Restored,
    messages.Applied,
    messages.Losses,
    messages.RequestStop,
    messages.Arrive,
    messages.Ready,
    messages.Leave,
    messages.EndRun,
)


@dataclass(frozen=True, slots=True)
class Over:
    """How the run ended.

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
        """As far as it is known: the results are with whoever opened them."""
        if self.reason is StopReason.FINISHED:
            return Finished({})
        return Ended() if self.reason is StopReason.ENDED else Failed(self.words)


@dataclass(frozen=True, slots=True)
class Kept:
    """What a coordinator writes down before it tells anybody; the fields as in
    :class:`~lightning_recycle.control.protocol.state.MembershipState`.
    """

    generation: int
    live: tuple[int, ...]
    leader: int
    joining: tuple[int, ...] = ()
    causes: Mapping[int, str] = field(default_factory=dict)
    has_resumed: bool = False
    raised: tuple[Remembered, ...] = ()
    disturbances: int = 0
    stop_point: int = -1
    stop_agreed: bool = False
    after_step: AfterStep = AfterStep.GO_ON
    over: Over | None = None
    cuts: messages.Cuts = ()
    newcomers: tuple[int, ...] = ()
    outvoted: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


def durable(state: MembershipState) -> tuple[Any, ...]:
    """What :func:`kept` is made of: as long as these are the same objects, there is nothing new to write down."""
    return (
        state.generation,
        state.live,
        state.leader,
        state.joining,
        state.causes,
        state.has_resumed,
        state.raised,
        state.disturbances,
        state.stop_round,
        state.after_step,
        state.outcome,
        state.cuts,
        state.newcomers,
        state.outvoted,
    )


def kept(state: MembershipState) -> Kept:
    """What must be written down of ``state``, if it has changed, before the commands that came with it are obeyed."""
    stop = state.stop_round
    is_decided = stop is not None and stop.is_over
    return Kept(
        state.generation,
        state.roster,
        state.leader,
        tuple(sorted(state.joining)),
        state.causes,
        state.has_resumed,
        state.raised,
        state.disturbances,
        stop.point if stop is not None and is_decided else -1,
        stop is not None and is_decided and stop.agreed,
        state.after_step,
        None if state.outcome is None else _over(state, state.outcome),
        state.cuts,
        tuple(sorted(state.newcomers)),
        state.outvoted,
    )


def _over(state: MembershipState, outcome: Outcome) -> Over:
    answer = None
    if isinstance(outcome, Finished):
        delivered = {rank: rank in outcome.results for rank in state.roster}
        answer = messages.Answer(state.next_collective - 1, delivered, state.leader)
    words = outcome.reason if isinstance(outcome, Failed) else f"It ended before: {type(outcome).__name__}"
    return Over(StopReason.of(outcome), words, answer)


def revived(grid: Grid, written: Kept, retries: int = 1) -> MembershipState:
    """The state of a coordinator that is started again: it waits for all workers of the roster to return."""
    state = initial_state(grid, retries)
    if written.over is not None:
        return replace(state, generation=written.generation, outcome=written.over.outcome)
    if written.generation < 0:
        return replace(state, live=frozenset(written.live), causes=written.causes, after_step=written.after_step)
    return replace(
        state,
        live=frozenset(written.live),
        joined=frozenset(written.live),
        generation=written.generation,
        leader=written.leader,
        regrouping=True,
        joining=frozenset(written.joining),
        causes=written.causes,
        has_resumed=written.has_resumed,
        raised=written.raised,
        disturbances=written.disturbances,
        stop_round=StopRound(written.stop_point, is_over=True, agreed=written.stop_agreed)
        if written.stop_point >= 0
        else None,
        after_step=written.after_step,
        cuts=written.cuts,
        newcomers=frozenset(written.newcomers),
        outvoted=written.outvoted,
        returned={},
    )


def adopted(said: Collection[messages.Returned]) -> tuple[Kept | None, dict[int, messages.Returned]] | str:
    """What an earlier coordinator of a run knew, without its file, and its members by rank; or what is missing.

    Args:
        said: what workers of one run say that have lost their coordinator.

    Returns:
        None instead of :class:`Kept` if the run has not begun.
    """
    newest = max(said, key=lambda one: one.generation)
    if newest.generation < 0:
        return None, {}
    # Whoever is more than one behind was given up, or so many were announced in a row that nobody can tell.
    current = (one for one in said if one.rank in newest.roster and one.generation >= newest.generation - 1)
    members = {one.rank: one for one in sorted(current, key=lambda one: (one.incarnation, one.generation))}
    missing = [rank for rank in newest.roster if rank not in members]
    if missing:
        return f"the workers of ranks {', '.join(map(str, missing))} have not returned"
    wishes = {one.request.point if one.request is not None else -1 for one in members.values()}
    if len(wishes) > 1:
        return "some workers wait to stop early, and nobody knows what the others were told"
    knows = max(members.values(), key=lambda one: one.resumed)
    return Kept(
        newest.generation,
        newest.roster,
        newest.leader,
        joining=tuple(rank for rank, one in sorted(members.items()) if one.joining and one.applied < 0),
        has_resumed=any(one.applied >= 0 for one in members.values()),
        cuts=knows.cuts,
        newcomers=tuple(rank for rank, one in sorted(members.items()) if one.incarnation > 0),
    ), members


def rebuilt(state: MembershipState) -> tuple[MembershipState, tuple[Command, ...]]:
    """All have returned: the state without what :func:`events` adds, and what some were told and others not."""
    assert state.returned is not None
    members = {rank: state.returned[rank] for rank in state.roster}
    generation = max(state.generation, *(member.generation for member in members.values()))
    applied = {rank: one.applied - len(one.facts) for rank, one in members.items() if one.applied >= 0}
    newest = [one.applied for rank, one in members.items() if rank not in state.joining or one.applied >= 0]
    for rank in state.joining - applied.keys():
        # The others cannot go on without it. If they are lost, what it was about to get may have arrived.
        applied[rank] = min(newest, default=members[rank].joins_after)
    restored = max(one.restored for one in members.values())
    version = max(restored, 1 + min(applied.get(rank, -1) for rank in members))
    told = {loss.step: loss for one in members.values() for loss in one.told}
    known = max(
        (one.known for one in members.values() if one.known is not None),
        key=lambda one: (one.generation, one.step),
        default=None,
    )
    summed = max([version, *(step + 1 for step in told), *(one.applied + 1 for one in members.values())])
    unanswered = {(one.raised.rank, one.raised.generation) for one in members.values() if one.raised is not None}
    state = replace(
        state,
        generation=generation,
        applied=applied,
        version=version,
        passed=0,
        summed=summed,
        next_collective=max(one.next_collective for one in members.values()),
        unproven=summed if state.unproven >= 0 else max((s[-1] + 1 for s in state.outvoted.values()), default=-1),
        answered=state.answered if known is None else (known.step, known.payloads),
        raised=tuple(one for one in state.raised if (one.rank, one.generation) not in unanswered),
        returned=None,
    )
    counters = told[max(told)].counters if told else {}
    record = Record("revived", version, None, {"roster": state.roster, "counters": counters})
    return state, (record, *_repeated(state, members, told))


def _repeated(
    state: MembershipState, members: Mapping[int, messages.Returned], told: Mapping[int, messages.StepLoss]
) -> Iterator[Command]:
    """What an earlier coordinator has told some, for the others."""
    answers = {one.answer.number: one.answer for one in members.values() if one.answer is not None}
    newest = answers.get(state.next_collective - 1)
    if newest is not None:
        lack = tuple(rank for rank, one in members.items() if one.next_collective <= newest.number)
        yield Resend(lack, newest)
    for step, loss in sorted(told.items()):
        lack = tuple(r for r, one in members.items() if one.applied < step and step not in {s.step for s in one.told})
        yield Resend(lack, loss)
    stop = state.stop_round
    if stop is not None:
        asked = {r for r, one in members.items() if one.request is not None and one.request.point == stop.point}
        yield Resend(tuple(sorted(asked)), messages.StopVerdict(stop.point, stop.agreed))
    for rank, one in members.items():
        if one.confirm is not None:
            yield Resend((rank,), messages.Confirmed(one.confirm.number))


def events(member: messages.Returned) -> Iterator[Any]:
    """What ``member`` had said and nobody has answered, as it said it."""
    if member.restored:
        yield messages.Restored(member.rank, member.restored)
    yield from member.facts
    yield from member.losses
    if member.request is not None:
        yield member.request
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
