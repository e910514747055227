"""Where all stop training early, if a callback sets ``trainer.should_stop``. Pure.

Concept: Lightning looks at ``trainer.should_stop`` at a few places after each step, its *stop points*, which all
workers pass in the same order. Whose flag is set there asks and waits (RequestStop). Whose flag is not set goes on and
says nothing, unless somebody has asked about that point (StopRequested, GoesOn). If all live workers ask at the same
point, as after a decision on values that all have, they stop right there, like a single device. Else some have begun
what they cannot undo: all stop after the next step whose losses are not complete yet. Its StepLoss says so.

Contract: every RequestStop is answered as soon as all live workers have asked at its point, or one has gone on there.
All are told the same about a point. If a worker asks that is not lost before the answer, the run stops, at the latest
after the step that follows the point.
"""

from __future__ import annotations

from dataclasses import replace
from enum import IntEnum

from lightning_recycle.control.protocol import messages
from lightning_recycle.control.protocol.messages import AfterStep
from lightning_recycle.control.protocol.state import Command, MembershipState, Record, Send, StopRound

__all__ = ["StopPlace", "add_answer", "add_request", "last_point", "settle_stop", "stop_point"]

_Next = tuple[MembershipState, tuple[Command, ...]]


class StopPlace(IntEnum):
    """Where Lightning looks at ``trainer.should_stop`` between two steps, in this order."""

    STEP_END = 0
    EPOCH = 1
    START = 2
    FIT = 3
    EPOCH_START = 4


def stop_point(steps: int, place: StopPlace) -> int:
    """The number of a stop point: it grows along the way of every worker. ``steps``: how many are applied."""
    return steps * len(StopPlace) + place


def last_point(step: int) -> int:
    """The last stop point before ``step``."""
    return stop_point(step, max(StopPlace))


def add_request(state: MembershipState, event: messages.RequestStop) -> _Next:
    """A worker wants to stop at ``event.point`` and waits."""
    stop = state.stop_round
    if state.after_step is AfterStep.STOP or (stop is not None and event.point < stop.point):
        return _stop_later(state, event.point, event.rank)  # somebody is past this point
    ask: tuple[Command, ...] = ()
    if stop is None or event.point > stop.point:
        if stop is not None and not stop.is_over:  # this worker is past that point
            state, earlier = _stop_later(state, stop.point, min(stop.wanted))
            state, own = _stop_later(state, event.point, event.rank)
            return state, earlier + own
        stop = StopRound(event.point)
        ask = (Send(state.roster, messages.StopRequested(event.point)),)
    state, verdict = settle_stop(replace(state, stop_round=replace(stop, wanted=stop.wanted | {event.rank})))
    return state, ask + verdict


def add_answer(state: MembershipState, event: messages.GoesOn) -> _Next:
    """A worker is past ``event.point``, where another one wants to stop."""
    stop = state.stop_round
    if stop is None or stop.is_over or stop.point != event.point:
        return state, ()
    return _stop_later(state, stop.point, min(stop.wanted))


def settle_stop(state: MembershipState) -> _Next:
    """Ends the round if all want to stop; forgets it if those that do are lost: the others want what they want."""
    stop = state.stop_round
    if stop is None or stop.is_over:
        return state, ()
    if not stop.wanted & state.live:
        return replace(state, stop_round=None), ()
    if not state.live <= stop.wanted:
        return state, ()
    state = replace(state, stop_round=replace(stop, is_over=True, agreed=True))
    return state, (Send(state.roster, messages.StopVerdict(stop.point, True)),)


def _stop_later(state: MembershipState, point: int, rank: int) -> _Next:
    """Nobody stops at ``point``, where ``rank`` wants to, but all after a later step."""
    stop = state.stop_round
    if stop is not None and stop.point <= point:
        state = replace(state, stop_round=replace(stop, is_over=True))
    commands: tuple[Command, ...] = (Send(state.roster, messages.StopVerdict(point, False)),)
    if state.after_step is AfterStep.GO_ON:
        commands += (Record("stop_requested", state.version, rank),)
        state = replace(state, after_step=AfterStep.STOP)
    return state, commands
