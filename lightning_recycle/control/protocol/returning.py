"""What a worker keeps for a coordinator that is started again: what only it knows. Pure.

Concept: a coordinator that dies takes along what it was told and had not yet passed on, and leaves what it had told to
some and not to others. Both are still known to the workers. So each keeps the questions that nobody has answered, the
newest answers, and what it said of the newest steps; it says all that when it returns
(:class:`~lightning_recycle.control.protocol.messages.Returned`), and
:mod:`~lightning_recycle.control.protocol.revival` makes the coordinator's state of it.

Contract: what is kept is bounded. The workers are never more than one step and one control collective apart
(:mod:`~lightning_recycle.control.protocol.recovery`), so older answers are with everybody. What counts in one
generation only is not kept: a revival begins another one.
"""

from __future__ import annotations

from typing import Any

from lightning_recycle.control.protocol import messages

__all__ = ["Memory"]

_STEPS = 2
_STEPS_UNTIL_ALL_HAVE_AN_ANSWER = 3
"""Who begins step b + 3 has applied b + 2; no worker can before all have begun step b + 1, and had what came before."""


class Memory:
    """What one worker has said and heard that others may lack."""

    def __init__(self) -> None:
        self._facts: tuple[messages.Applied, ...] = ()
        self._losses: dict[int, messages.Losses] = {}
        self._told: dict[int, messages.StepLoss] = {}
        self._arrival: messages.Arrive | None = None
        self._answer: messages.Answer | None = None
        self._answered_at = -1  # the newest step that it had begun when the answer came
        self._known: messages.Known | None = None
        self._request: messages.RequestStop | None = None
        self._raised: messages.Raised | None = None
        self._confirm: messages.Confirm | None = None
        self._profiled: messages.Profiled | None = None
        self._measured: messages.Measured | None = None
        self._layers: messages.LayerFacts | None = None
        self._tried: messages.Tried | None = None
        self._applied = -1
        self._restored = 0
        self._joins_after = -1  # the step after which it gets its state
        self._is_ready = False
        self._leave: messages.Leave | None = None
        self._ends_run = False

    def said(self, message: Any) -> None:
        """The worker sends ``message``, or tries to."""
        match message:
            case messages.Applied():
                self._facts = (*self._facts, message)[-_STEPS:]
                self._applied = message.step
            case messages.Losses():
                before = self._losses.get(message.step)
                if before is not None:  # a step that is run again: what came first counts
                    losses, outputs = {**message.losses, **before.losses}, {**message.outputs, **before.outputs}
                    message = messages.Losses(message.rank, message.step, losses, outputs, message.generation)
                self._losses[message.step] = message
            case messages.Arrive(generation=None):
                self._arrival = message
            case messages.RequestStop():
                self._request = message
            case messages.Raised():
                self._raised = message
            case messages.Confirm():
                self._confirm = message
            case messages.Restored():
                self._restored = message.version
            case messages.Entered():
                self._applied = self._joins_after
            case messages.Ready():
                self._is_ready = True
            case messages.Leave():
                self._leave = message
            case messages.EndRun():
                self._ends_run = True
            case messages.Profiled():
                self._profiled = message
            case messages.Measured():
                self._measured = message
            case messages.LayerFacts():
                self._layers = message
            case messages.Tried():
                self._tried = message

    def heard(self, message: Any, rank: int, begun: int) -> None:
        """The coordinator said ``message`` to worker ``rank``, whose newest step is ``begun``."""
        match message:
            case messages.Answer():
                if self._arrival is not None and self._arrival.number <= message.number:
                    self._arrival = None
                if self._answer is None or message.number >= self._answer.number:
                    self._answer, self._answered_at = message, begun
            case messages.StepLoss():
                self._told[message.step] = message
                for step in sorted(self._told)[:-_STEPS]:
                    del self._told[step]
                self._losses = {step: one for step, one in self._losses.items() if step > message.step}
            case messages.Committed():
                self._known = messages.Known(message.generation, message.step, message.payloads)
            case messages.Resume():
                if message.commits:
                    self._known = messages.Known(message.generation, message.decision.version - 1, message.commits)
                if rank in message.donors:
                    self._joins_after = message.decision.version - 1
            case messages.StopVerdict():
                if self._request is not None and self._request.point == message.point:
                    self._request = None
            case messages.Judged():
                if self._raised is not None and self._raised.generation == message.generation:
                    self._raised = None
            case messages.Confirmed():
                if self._confirm is not None and self._confirm.number <= message.number:
                    self._confirm = None

    def entered(self, announced: messages.Regroup) -> None:
        """The worker enters a generation."""
        self._losses.pop(announced.unproven, None)

    def began(self, step: int) -> None:
        """The worker begins ``step``."""
        if self._answer is not None and step >= self._answered_at + _STEPS_UNTIL_ALL_HAVE_AN_ANSWER:
            self._answer = None  # it may be as large as a checkpoint

    def returned(self, generation: int, next_collective: int, **who: Any) -> messages.Returned:
        """All that it holds.

        Args:
            generation: the newest that was announced to it.
            next_collective: the first control collective that it has taken no answer to, nor has arrived at.
            who: the other fields of the message.
        """
        number = next_collective if self._arrival is None else self._arrival.number
        if self._answer is not None:
            number = max(number, self._answer.number + 1)
        return messages.Returned(
            generation=generation,
            applied=self._applied,
            joins_after=self._joins_after,
            restored=self._restored,
            next_collective=number,
            facts=self._facts,
            losses=tuple(self._losses.values()),
            told=tuple(self._told.values()),
            arrival=self._arrival,
            answer=self._answer,
            known=self._known,
            request=self._request,
            raised=self._raised,
            confirm=self._confirm,
            is_ready=self._is_ready,
            leave=self._leave,
            ends_run=self._ends_run,
            profiled=self._profiled,
            measured=self._measured,
            layers=self._layers,
            tried=self._tried,
            **who,
        )
