"""Member: the worker's half of the protocol, as a pure state machine.

Concept: :class:`Member` takes the coordinator's messages (:meth:`Member.receive` returns the answers), makes those of
the main thread that need its state, and holds that: whether a generation was announced, whether a step may begin, the
answers that it waits for. :class:`~lightning_recycle.control.client.ControlClient` is the shell around it; simulated
histories drive it, too.

Contract: messages of one coordinator arrive in order; each may arrive twice. Nothing here waits: a query returns None
until the answer is there. Recovery is :func:`~lightning_recycle.control.protocol.recovery.actions`.

Must not know: locks, sockets, clocks, pickles.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, TypeAlias

from lightning_recycle.control.protocol import messages
from lightning_recycle.control.protocol.control_collectives import last_point
from lightning_recycle.control.protocol.state import VALIDATES
from lightning_recycle.planning.program import Program

_KEPT_STEPS = 2


# Who begins step b + 3 has applied b + 2; no worker can before all have begun step b + 1, and had what came before.
_STEPS_UNTIL_ALL_HAVE_AN_ANSWER = 3


class MessageRecord:
    """Messages that a worker has sent and received, and others may lack.

    ``returned``: the message with which it would return, without losses.
    """

    def __init__(self) -> None:
        self.returned = messages.Returned(-1, messages.Process("", -1), "")
        self._losses: dict[int, messages.Losses] = {}
        self._step_losses: dict[int, messages.StepLoss] = {}
        self._answered_at = -1  # the newest step that it had begun when the answer came

    def _keep(self, **changes: Any) -> None:
        self.returned = replace(self.returned, **changes)

    def record_sent(self, message: Any) -> None:
        """Keeps ``message``, about to be sent, if a new coordinator must get it again."""
        kept = self.returned
        match message:
            case messages.Applied():
                self._keep(facts=(*kept.facts, message)[-_KEPT_STEPS:], applied=message.step)
            case messages.Losses():
                before = self._losses.get(message.step)
                if before is not None:  # a step that is run again: what came first counts
                    losses, outputs = {**message.losses, **before.losses}, {**message.outputs, **before.outputs}
                    message = messages.Losses(message.rank, message.step, losses, outputs, message.generation)
                self._losses[message.step] = message
            case messages.Arrive(generation=None):
                self._keep(arrival=message)
            case messages.StopWish(stops=True):
                self._keep(request=message)
            case messages.Raised():
                self._keep(raised=message)
            case messages.MembershipQuery():
                self._keep(membership_query=message)
            case messages.SaveBegun():
                self._keep(save=message, announced=(), saves_ended=())
            case messages.SaveAnnounced():
                self._keep(announced=(*kept.announced, message))
            case messages.SaveEnded():
                self._keep(saves_ended=(*kept.saves_ended, message))
            case messages.Restored():
                self._keep(restored=message.version)
            case messages.Reached(milestone=messages.Milestone.ENTERED):
                self._keep(applied=kept.joins_after)
            case messages.Ready():
                self._keep(is_ready=True)
            case messages.Leave():
                self._keep(leave=message)
            case messages.EndRun():
                self._keep(ends_run=True)
            case messages.Measured():
                new = {f.name: value for f in fields(message) if (value := getattr(message, f.name)) is not None}
                self._keep(measured=replace(kept.measured or message, **new))

    def record_received(self, message: Any, rank: int, begun: int) -> None:
        """Drops what ``message`` answers; ``begun``: the newest step of this ``rank``."""
        kept = self.returned
        match message:
            case messages.Answer():
                if kept.arrival is not None and kept.arrival.number <= message.number:
                    self._keep(arrival=None)
                if kept.answer is None or message.number >= kept.answer.number:
                    self._keep(answer=message)
                    self._answered_at = begun
                self._forget_saves_before(message.saves)
            case messages.StepLoss():
                self._step_losses[message.step] = message
                for step in sorted(self._step_losses)[:-_KEPT_STEPS]:
                    del self._step_losses[step]
                self._losses = {step: losses for step, losses in self._losses.items() if step > message.step}
                self._forget_saves_before(message.saves)
            case messages.Committed():
                self._keep(newest_commit=message)
            case messages.Resume():
                if message.commits:
                    step = message.decision.version - (not message.confirmed)
                    self._keep(newest_commit=messages.Committed(message.generation, step, message.commits))
                if rank in message.donors:
                    self._keep(joins_after=message.decision.version - 1)
            case messages.StopVerdict():
                if kept.request is not None and kept.request.point == message.point:
                    self._keep(request=None)
            case messages.Judged():
                if kept.raised is not None and kept.raised.generation == message.generation:
                    self._keep(raised=None)
            case messages.MembershipConfirmed():
                if kept.membership_query is not None and kept.membership_query.number <= message.number:
                    self._keep(membership_query=None)

    def _forget_saves_before(self, saves: messages.SaveStatus) -> None:
        if self.returned.save is not None and saves.batch >= self.returned.save.batch:
            self._keep(save=None, announced=(), saves_ended=())

    def drop(self, announced: messages.Regroup) -> None:
        """Forgets the losses of the step whose results ``announced`` drops."""
        self._losses.pop(announced.unproven, None)

    def record_begun(self, step: int) -> None:
        if self.returned.answer is not None and step >= self._answered_at + _STEPS_UNTIL_ALL_HAVE_AN_ANSWER:
            self._keep(answer=None)  # it may be as large as a checkpoint

    def report_return(self, next_collective: int, **others: Any) -> messages.Returned:
        """The message with all that it holds; ``others``: the message's other fields.

        ``next_collective``: the first control collective to which this worker has not contributed.
        """
        arrival, answer = self.returned.arrival, self.returned.answer
        number = next_collective if arrival is None else arrival.number
        if answer is not None:
            number = max(number, answer.number + 1)
        losses, step_losses = tuple(self._losses.values()), tuple(self._step_losses.values())
        return replace(self.returned, next_collective=number, losses=losses, step_losses=step_losses, **others)


class Interrupted(Exception):
    """Ends a wait or an attempt: a new generation was announced, so stop and regroup.

    Also: the sender of a parcel was lost, a lookup was cancelled, or the run has ended.
    """


@dataclass(frozen=True, slots=True)
class Beginning:
    """Whether a step may begin; send ``replies``.

    ``program``: from now on, if any. ``pause``: if the step may not begin yet, as all stop at a step boundary because
    the roster, the layout, or a plan that needs other connections is about to change: ask again when
    :attr:`Member.pause` differs from it.
    """

    replies: tuple[Any, ...]
    program: Program | None = None
    pause: tuple[int, int | None] | None = None


Message: TypeAlias = Any
"""One of :mod:`~lightning_recycle.control.protocol.messages`."""


class Member:
    """Protocol state of one worker process.

    ``joining``: the training may have begun without this worker, which is alone until it enters.
    ``survives_coordinator_loss``: whether messages are kept that must be repeated to a new coordinator.

    Attributes:
        generation: the newest that it entered; -1 before the first. ``roster``: of that generation; ``leader``:
            as of that generation, or of a newer answer to a collective.
        lost: for each lost rank, the newest generation that was announced without it, after one with it.
        leader_applied: the newest step that the leader is known to have applied.
        counters: the run's counters as of the newest loss that was asked for.
        saves: checkpoints as of the newest loss or answer that was asked for: the same on all workers at each point of
            the program.
        begun: the newest step that it has begun.
        next_collective: the number of its next control collective.
        hook_count: how often it has run collectives of its position in hooks.
        in_hook: whether its siblings may be in a hook with it, in the connected generation.
        assignment: the position of a worker started by hand; ``unfit``: why it gets none.
        confirmed_query: the number of the newest answered
            :class:`~lightning_recycle.control.protocol.messages.MembershipQuery`.
    """

    def __init__(self, rank: int, joining: bool = False, survives_coordinator_loss: bool = True) -> None:
        self.rank = rank
        self.is_joining = joining
        self.generation = -1
        self.roster: tuple[int, ...] = ()
        self.lost: dict[int, int] = {}
        self.leader = -1
        self.leader_applied = -1
        self.counters: Mapping[str, float] = {}
        self.saves = messages.SaveStatus()
        self.begun = -1
        self.next_collective = 0
        self.hook_count = 0
        self.in_hook = False
        self.assignment: messages.Assign | None = None
        self.unfit: messages.Unfit | None = None
        self.confirmed_query = -1
        self.plans: list[messages.Boundary] = []  # of this generation, not begun yet
        self._message_record = MessageRecord() if survives_coordinator_loss else None
        self._announcement: messages.Regroup | None = None
        self._resume: messages.Resume | None = None
        self._hook: messages.HookEntered | None = None
        self._judged: messages.Judged | None = None
        self._committed: messages.Committed | None = None
        self._answers: dict[int, messages.Answer] = {}
        self._losses: dict[int, messages.StepLoss] = {}
        self._published: dict[str, bytes] = {}
        self._paused_generation = -1
        self._newest_pause = (-1, -1)  # generation and number
        self._boundary: int | None = None
        self._reached_boundary: tuple[int, int] | None = None  # generation and step of the boundary that it has reached
        self._newest_stop_point = -1  # at which it went on
        self._unanswered_stop_point = -1  # the newest one at which others wait for its answer whether it goes on
        self._verdicts: dict[int, messages.StopVerdict] = {}

    # ------------------------------------------------------------------ what the coordinator says

    def receive(self, message: Message) -> tuple[Message, ...]:
        """Takes in ``message``; returns the answers to send at once."""
        answers = self._receive(message)
        if VALIDATES:
            self.validate()
        return answers

    def _receive(self, message: Message) -> tuple[Message, ...]:
        """Takes in a ``message`` of the coordinator; returns the answers to send."""
        if self._message_record is not None:
            self._message_record.record_received(message, self.rank, self.begun)
        match message:
            case messages.Regroup():
                before = self.roster if self._announcement is None else self._announcement.roster
                self.lost.update(dict.fromkeys(set(before).difference(message.roster), message.generation))
                if self.is_interrupted:  # what the last one says is to be dropped stays so
                    assert self._announcement is not None
                    message = replace(message, unproven=max(message.unproven, self._announcement.unproven))
                self._announcement = message
            case messages.Resume():
                self._resume, self.in_hook = message, False
                if message.confirmed:
                    step = message.decision.version
                    self._committed = messages.Committed(message.generation, step, message.commits, False)
            case messages.StepLoss():
                self._losses[message.step] = message
                self.leader_applied = max(self.leader_applied, message.leader_applied)
            case messages.Pause():
                pause = (message.generation, message.number)
                if pause > self._newest_pause:
                    self._newest_pause = pause
                    self._paused_generation, self._boundary = message.generation, None
                return (messages.Paused(self.rank, message.generation, self.begun, message.number),)
            case messages.Boundary(program=None):
                if message.generation == self._paused_generation:
                    self._boundary = message.step
            case messages.Boundary():
                if message.generation == self._paused_generation:
                    self._paused_generation = -1  # nobody has to stop
                    self.plans.append(message)
            case messages.MembershipConfirmed():
                self.confirmed_query = max(self.confirmed_query, message.number)
            case messages.HookEntered():
                if (message.generation, message.number) == (self.generation, self.hook_count):
                    self._hook, self.in_hook = message, True
            case messages.Judged():
                self._judged = message
            case messages.StopRequested():
                self._unanswered_stop_point = max(self._unanswered_stop_point, message.point)
                return self._answer_stop_request()
            case messages.StopVerdict():
                self._verdicts[message.point] = message
            case messages.Unfit():
                self.unfit = message
            case messages.Assign():
                self.assignment = message
                self.rank, self.is_joining = message.rank, message.joining
            case messages.Committed():
                self._committed = message
            case messages.Found():
                if message.generation == self.generation:
                    self._published.update(message.values)
            case messages.Answer():
                self._answers[message.number] = message
        return ()

    # ------------------------------------------------------------------ a coordinator that was started again

    def record_sent(self, message: Message) -> None:
        """Keeps ``message``, about to be sent, if a new coordinator must get it again."""
        if self._message_record is not None:
            self._message_record.record_sent(message)

    def report_return(self, **sender: Any) -> messages.Returned:
        """First message to a restarted coordinator; ``sender``: fields on this process."""
        assert self._message_record is not None, "it ends with its coordinator"
        if self.in_hook:
            sender.update(hook=self._hook)
        if self._announcement is not None:
            sender.update(generation=self._announcement.generation)
        return self._message_record.report_return(self.next_collective, rank=self.rank, **sender)

    def validate(self) -> None:
        """Raises AssertionError with the violated rule of a member's states."""
        for rule, holds in self._rules():
            assert holds, f"worker {self.rank}: {rule}: {vars(self)}"

    def _rules(self) -> Iterator[tuple[str, bool]]:
        announced, resume = self._announcement, self._resume
        newest = -1 if announced is None else announced.generation
        yield "a generation is announced before it is entered", self.generation <= newest
        yield "a generation is announced before all resume in it", resume is None or resume.generation <= newest
        if announced is not None and self.generation == newest:
            yield "the roster is that of the generation", self.roster == announced.roster
        if resume is not None:
            yield "who resumes is in the roster", self.rank in resume.roster
            gives, gets = self.rank in resume.donors.values(), self.rank in resume.donors
            yield "only who joins gets a state", not (gives and gets)
        if self.is_paused and self._boundary is not None:
            yield "no step at or after a boundary is begun", self.begun < self._boundary
        yield "a boundary belongs to a pause", self._boundary is None or self._paused_generation >= 0
        yield "a pause is of a generation that was announced", self._paused_generation <= newest
        yield "plans follow each other", all(a.step <= b.step for a, b in pairwise(self.plans))
        yield "plans are of the generation", all(plan.generation == self.generation for plan in self.plans)
        yield "a passed stop point is answered", not 0 <= self._unanswered_stop_point <= self._newest_stop_point
        yield "who is in a hook was let in", not self.in_hook or self._hook is not None
        yield "published keys are of the generation", self.generation >= 0 or not self._published
        if self._message_record is not None:
            yield "a worker keeps facts of two steps", len(self._message_record.returned.facts) <= _KEPT_STEPS

    # ------------------------------------------------------------------ generations

    @property
    def is_interrupted(self) -> bool:
        """Whether a newer generation than the one that was entered is announced."""
        return self._announcement is not None and self._announcement.generation > self.generation

    def enter(self) -> messages.Regroup:
        """Enters the newest announced generation; returns its announcement."""
        announced = self._announcement
        assert announced is not None
        self.generation, self.roster, self.leader = announced.generation, announced.roster, announced.leader
        self._published.clear()
        self.plans.clear()
        if VALIDATES:
            self.validate()
        if self._message_record is not None:
            self._message_record.drop(announced)
        return announced

    def resume_message(self) -> messages.Resume | None:
        """The decision on how all go on in the entered generation; None before it came."""
        return self._resume if self._resume is not None and self._resume.generation == self.generation else None

    def publish(self, key: str, value: bytes) -> messages.Publish:
        self._published[key] = value
        return messages.Publish(self.rank, self.generation, key, value)

    def look_up(self, keys: Iterable[str]) -> messages.LookUp | None:
        """Question for values under ``keys`` of the generation; None if all are known."""
        unknown = tuple(key for key in keys if key not in self._published)
        return messages.LookUp(self.rank, self.generation, unknown) if unknown else None

    def published_value(self, key: str) -> bytes | None:
        """Value published under ``key`` in the generation, once the answer is there."""
        return self._published.get(key)

    # ------------------------------------------------------------------ steps

    @property
    def pause(self) -> tuple[int, int | None]:
        """Change at a step boundary: its generation (-1: none), and its step once known."""
        return self._paused_generation, self._boundary

    @property
    def is_paused(self) -> bool:
        """Whether the entered generation has announced a change at a step boundary."""
        return self._paused_generation == self.generation

    def begin(self, step: int) -> Beginning:
        """Whether ``step`` may begin; if so, it counts as begun. Raises Interrupted."""
        if self.is_interrupted:
            raise Interrupted
        replies = self.pass_stop_point(last_point(step))
        paused = self.is_paused and step > self.begun
        boundary = self._boundary if paused else None
        if not paused or (boundary is not None and step < boundary):
            self.begun = max(self.begun, step)
            if self._message_record is not None:
                self._message_record.record_begun(step)
            due = [plan for plan in self.plans if plan.step <= step]
            self.plans = self.plans[len(due) :]
            if VALIDATES:
                self.validate()
            return Beginning(replies, due[-1].program if due else None)
        reached = (self.generation, step)
        if boundary is not None and self._reached_boundary != reached:
            self._reached_boundary = reached
            replies += (messages.Reached(self.rank, self.generation, messages.Milestone.AT_BOUNDARY, step),)
        return Beginning(replies, pause=self.pause)

    def commit_answer(self, step: int) -> messages.Committed | None:
        """The answer that every live worker has contributed to the commit of ``step``."""
        found = self._committed
        return found if found is not None and (found.generation, found.step) == (self.generation, step) else None

    def knows_loss(self, step: int) -> bool:
        """Whether the loss of ``step`` is known; equal on all workers of a generation."""
        return step in self._losses

    def loss(self, step: int) -> messages.StepLoss | None:
        """The mean loss of ``step``; earlier ones are forgotten once it is there."""
        found = self._losses.get(step)
        if found is not None:
            self._losses = {other: value for other, value in self._losses.items() if other >= step}
            self.counters = found.counters
            self._adopt_save_status(found.saves)
        return found

    def _adopt_save_status(self, saves: messages.SaveStatus) -> None:
        """Adopts ``saves``; a restarted coordinator may not know the newest batch."""
        if saves.batch < self.saves.batch:
            saves = replace(self.saves, holders=saves.holders, generation=saves.generation)
        self.saves = saves

    # ------------------------------------------------------------------ collectives of its position in hooks

    def try_enter_hook(self) -> bool:
        """Enters the hook if all siblings have reached it; returns whether they have."""
        hook = self._hook
        entered = hook is not None and (hook.generation, hook.number) == (self.generation, self.hook_count)
        self.hook_count += entered
        return entered

    # ------------------------------------------------------------------ stopping early

    def pass_stop_point(self, point: int) -> tuple[Message, ...]:
        """Records that this worker trains on at ``point``; the answer, if one is due."""
        self._newest_stop_point = max(self._newest_stop_point, point)
        return self._answer_stop_request()

    def _answer_stop_request(self) -> tuple[Message, ...]:
        if not 0 <= self._unanswered_stop_point <= self._newest_stop_point:
            return ()
        point, self._unanswered_stop_point = self._unanswered_stop_point, -1
        return (messages.StopWish(self.rank, point, False),)

    def stop_verdict(self, point: int) -> messages.StopVerdict | None:
        """Whether all stop at ``point``, where this worker asked to."""
        return self._verdicts.get(point)

    def exception_verdict(self) -> messages.Judged | None:
        """The verdict on this worker's exception in this generation; None before it came."""
        return self._judged if self._judged is not None and self._judged.generation == self.generation else None

    # ------------------------------------------------------------------ control collectives

    def arrive(self, name: str, payload: Any) -> messages.Arrive:
        """Message that joins the next control collective, whatever generations come."""
        self.next_collective += 1
        return messages.Arrive(self.rank, self.next_collective - 1, name, payload, None, self.begun)

    def arrive_in_generation(self, name: str, payload: Any) -> messages.Arrive:
        """:meth:`arrive` for this generation: its number stays until it is answered."""
        return messages.Arrive(self.rank, self.next_collective, name, payload, self.generation, self.begun)

    def answer(self, number: int) -> messages.Answer | None:
        """The answer to collective ``number``; returned only once."""
        found = self._answers.pop(number, None)
        if found is not None:
            self.leader = found.leader
            self._adopt_save_status(found.saves)
            self.next_collective = max(self.next_collective, number + 1)
        return found
