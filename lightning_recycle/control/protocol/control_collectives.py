"""Agreements of the workers through the coordinator: early stops, and keys to connect. Pure.

Early stops: Lightning looks at ``trainer.should_stop`` at a few places after each step, its *stop points*, which all
workers pass in the same order. A worker whose flag is set there asks and waits (RequestStop). A worker whose flag is
not set goes on silently, unless another has asked about that point (StopRequested, GoesOn). If all live workers ask at
the same point, as after a decision on values that all have, they stop right there, like a single device. Else some have
begun what they cannot undo: all stop after the next step whose losses are not complete yet. Its StepLoss says so. Every
RequestStop is answered as soon as all live workers have asked at its point, or one has gone on there, and all get the
same answer. If a worker asks that is not lost before the answer, the run stops, at the latest after the step that
follows the point.

Keys to connect (:class:`Rendezvous`): before the workers of a generation are connected, some publish keys and some look
them up. A question waits until all that it asks for is there, and is then answered by one message. So the traffic is
proportional to the number of a worker's neighbours, and not to the square of the number of workers. Values are passed
on unread. A new generation forgets those of the one before; a message of any other generation than the newest changes
nothing.

Must not know: connections, the meaning of the keys.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from enum import IntEnum

from lightning_recycle.control.protocol import messages
from lightning_recycle.control.protocol.messages import AfterStep, Found, LookUp, Publish
from lightning_recycle.control.protocol.state import Command, MembershipState, Record, Send, StopRound

__all__ = [
    "Rendezvous",
    "StopPlace",
    "add_answer",
    "add_request",
    "last_point",
    "settle_stop",
    "stop_point",
]

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


@dataclass(eq=False)
class _Question:
    """One that cannot be answered yet; ``missing``: how many of its keys are not published."""

    message: LookUp
    missing: int


class Rendezvous:
    """The keys of the newest generation."""

    def __init__(self) -> None:
        self._generation = -1
        self._values: dict[str, bytes] = {}
        self._awaited: dict[str, list[_Question]] = defaultdict(list)
        self._published: dict[int, int] = defaultdict(int)

    def begin(self, generation: int) -> None:
        """From now on only ``generation`` counts."""
        self._generation = generation
        self._values.clear()
        self._awaited.clear()
        self._published.clear()

    def publish(self, message: Publish) -> list[tuple[int, Found]]:
        """The answers that are complete with it, by rank. A key that is published again has its newest value."""
        if message.generation != self._generation:
            return []
        self._published[message.rank] += len(message.key) + len(message.value)
        self._values[message.key] = message.value
        answers = []
        for question in self._awaited.pop(message.key, ()):
            question.missing -= 1
            if not question.missing:
                answers.append((question.message.rank, self._answer(question.message)))
        return answers

    def look_up(self, message: LookUp) -> list[tuple[int, Found]]:
        """The answer, if it is complete already."""
        if message.generation != self._generation:
            return []
        missing = [key for key in set(message.keys) if key not in self._values]
        if not missing:
            return [(message.rank, self._answer(message))]
        question = _Question(message, len(missing))
        for key in missing:
            self._awaited[key].append(question)
        return []

    def published_bytes(self, rank: int) -> int:
        """How much worker ``rank`` has published in the generation."""
        return self._published.get(rank, 0)

    def _answer(self, message: LookUp) -> Found:
        return Found(self._generation, {key: self._values[key] for key in message.keys})
