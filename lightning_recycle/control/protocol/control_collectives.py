"""Control collectives, early stops, published keys, checkpoints. Pure.

Control collectives are numbered by the workers' program order, outlive generations, and complete when every live worker
has arrived. A worker that has begun a later step than the waiting ones has left one out: the run ends. Before
collectives of a position in a hook, which cannot run again, its members announce themselves (IN_HOOK); HookEntered
answers when all are there, and no new generation ends these collectives while the position is whole.

Early stops: ``trainer.should_stop`` is read at *stop points*, passed by all in the same order. Workers whose flag is
set ask and wait; the others go on silently, unless asked. If all ask at one point they stop there, like a single
device. Otherwise all stop after the next step whose losses are incomplete, by its StepLoss. All get the same answer,
and a run whose asker is not lost before stops at the latest after the step that follows the point.

Keys (:class:`PublishedKeys`): a question waits for all of its keys and is answered by one message, so traffic grows
with the number of neighbours, not with the square of workers. Only messages of the newest generation count.

Checkpoints of one step boundary are a *batch*; there is one at a time. A *holder* per stage has its state; the holder
of the last stage is the *writer*. Each checkpoint is decided once for all, whichever worker dies:

=========  ===================================================  ====================================================
state      meaning                                              cause
=========  ===================================================  ====================================================
begun      workers have come to the boundary                    the first SaveBegun
announced  the writer has the whole file under another name     SaveAnnounced
complete   the file has its name, or gets it from the leader    SaveEnded; loss of the writer after the announcement
given up   there is no file, nor will there be one              SaveEnded with a reason; loss of the writer before
=========  ===================================================  ====================================================

Every StepLoss and Answer has the outcome of the newest batch and the next holders (SaveStatus): all workers act on it
at the same point of their program. Given up for a loss, a checkpoint is asked for again at the next boundary.

Must not know: connections, the meaning of the keys, files.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum

from lightning_recycle.control.protocol import messages
from lightning_recycle.control.protocol.messages import (
    AfterStep,
    Found,
    LookUp,
    Publish,
    SaveFailure,
    SavePhase,
    SaveStatus,
)
from lightning_recycle.control.protocol.state import (
    ENDED,
    RESULT,
    Command,
    Ended,
    Failed,
    Finished,
    MembershipState,
    Next,
    Record,
    SaveState,
    Send,
    StopRound,
    end,
)

_REMEDY = (
    "Whatever waits for all workers (self(x) with several stages, all_gather, reduce, broadcast, barrier, saving a"
    " checkpoint) must be called on all of them, not behind trainer.is_global_zero or rank_zero_only"
)


def settle_collectives(state: MembershipState) -> Next:
    """Answers collectives and stop requests that waited only for a lost worker."""
    state, commands = _settle_stop(state)
    for number in sorted(state.collectives.open):
        state, answer = _answer_if_complete(state, number)
        commands += answer
    return state, commands


def forget_retracted(state: MembershipState) -> MembershipState:
    """Drops parts of collectives that no longer count when a generation begins.

    Parts for one generation only, and of lost workers, which may have gone on where all others stop.
    """
    live = state.roster.live
    still_open = {
        number: {rank: arrive for rank, arrive in arrived.items() if arrive.generation is None and rank in live}
        for number, arrived in state.collectives.open.items()
    }
    return state.with_collectives(open={number: arrived for number, arrived in still_open.items() if arrived})


def on_arrive(state: MembershipState, event: messages.Arrive) -> Next:
    """A worker has arrived at a control collective."""
    if event.number < state.collectives.next:
        return state, ()
    if event.generation is not None and not state.generation.runs(event.generation):
        return state, ()
    arrived = {**state.collectives.open.get(event.number, {}), event.rank: event}
    others = {arrive.name for arrive in arrived.values()}
    if len(others) > 1:
        return end(
            state,
            Failed(
                f"The workers disagree about what to do next: control collective {event.number} is called"
                f" {' and '.join(sorted(map(repr, others)))}. Hooks and callbacks must take the same decisions on all"
                f" workers; decide on values that are the same everywhere, such as trainer.callback_metrics. {_REMEDY}."
            ),
        )
    state = state.with_collectives(open={**state.collectives.open, event.number: arrived})
    return _answer_if_complete(state, event.number)


def on_heartbeat(state: MembershipState, event: messages.Heartbeat) -> Next:
    """A worker reports its begun step; ends the run if others wait for it before that."""
    for _, arrived in sorted(state.collectives.open.items()):
        waiting = next((arrive for rank, arrive in sorted(arrived.items()) if arrive.begun < event.begun), None)
        if event.rank in arrived or waiting is None:
            continue
        there, gone = state.positions.name(waiting.rank), state.positions.name(event.rank)
        return end(
            state,
            Failed(
                f"Worker {there} waits for all others in {waiting.name!r}, and worker {gone} does not come: it has gone"
                f" on to step {event.begun}. {_REMEDY}, nor where values decide that differ between them."
            ),
        )
    return state, ()


def _answer_if_complete(state: MembershipState, number: int) -> Next:
    """Answers a collective with the payloads of all live workers once complete."""
    arrived = state.collectives.open[number]
    if not state.roster.live <= arrived.keys():
        return state, ()
    payloads = {rank: arrived[rank].payload for rank in state.roster.ranks}
    others = {other: value for other, value in state.collectives.open.items() if other != number}
    state = state.with_collectives(open=others, next=number + 1)
    name = next(iter(arrived.values())).name
    if name == ENDED:
        return end(state, Ended())
    if name != RESULT:
        answer = messages.Answer(number, payloads, state.roster.leader, save_status(state))
        return state, (Send(state.roster.ranks, answer),)
    # The payloads stay here: the results are big, and only the supervisor wants them. Workers learn who delivered.
    delivered = {rank: payload is not None for rank, payload in payloads.items()}
    delivery = Send(state.roster.ranks, messages.Answer(number, delivered, state.roster.leader, save_status(state)))
    columns = {state.positions.column(rank) for rank, yes in delivered.items() if yes}
    if len(columns) < state.positions.columns:
        return state, (delivery,)  # a stage's speaker died meanwhile: the workers ask again with the new one
    state, stop = end(state, Finished({rank: p for rank, p in payloads.items() if p is not None}))
    return state, (delivery, *stop)


def on_in_hook(state: MembershipState, event: messages.Reached) -> Next:
    """Tells all members of a position at once when all are about to enter a hook."""
    hooks = state.generation.hooks
    if not state.generation.runs(event.generation) or hooks.get(event.rank, -1) >= event.step:
        return state, ()
    hooks = {**hooks, event.rank: event.step}
    members = tuple(sorted({event.rank, *state.positions.siblings(event.rank)}))
    entered = all(hooks.get(rank) == event.step for rank in members)
    answer = (Send(members, messages.HookEntered(event.generation, event.step)),) if entered else ()
    return state.with_generation(hooks=hooks), answer


class StopPlace(IntEnum):
    """Places of Lightning's loops that read ``trainer.should_stop``, in order."""

    STEP_END = 0
    EPOCH = 1
    START = 2
    FIT = 3
    EPOCH_START = 4


def stop_point(steps: int, place: StopPlace) -> int:
    """Numbers the places where workers may stop, in the order of the training."""
    return steps * len(StopPlace) + place


def last_point(step: int) -> int:
    """The last stop point before ``step``."""
    return stop_point(step, max(StopPlace))


def on_stop_wish(state: MembershipState, event: messages.StopWish) -> Next:
    """A worker wants to stop at a stop point, or is past it."""
    return _add_request(state, event) if event.stops else _add_answer(state, event)


def _add_request(state: MembershipState, event: messages.StopWish) -> Next:
    stop = state.collectives.stop_round
    if state.steps.after_step is AfterStep.STOP or (stop is not None and event.point < stop.point):
        return _stop_later(state, event.point, event.rank)  # somebody is past this point
    ask: tuple[Command, ...] = ()
    if stop is None or event.point > stop.point:
        if stop is not None and not stop.is_over:  # this worker is past that point
            state, earlier = _stop_later(state, stop.point, min(stop.wanted))
            state, own = _stop_later(state, event.point, event.rank)
            return state, earlier + own
        stop = StopRound(event.point)
        ask = (Send(state.roster.ranks, messages.StopRequested(event.point)),)
    state, verdict = _settle_stop(state.with_collectives(stop_round=replace(stop, wanted=stop.wanted | {event.rank})))
    return state, ask + verdict


def _add_answer(state: MembershipState, event: messages.StopWish) -> Next:
    """A worker is past ``event.point``, and so past all earlier points."""
    stop = state.collectives.stop_round
    if stop is None or stop.is_over or event.point < stop.point:
        return state, ()
    return _stop_later(state, stop.point, min(stop.wanted))


def _settle_stop(state: MembershipState) -> Next:
    """Ends the round if all want to stop; forgets it if the askers are lost."""
    stop = state.collectives.stop_round
    if stop is None or stop.is_over:
        return state, ()
    if not stop.wanted & state.roster.live:
        return state.with_collectives(stop_round=None), ()
    if not state.roster.live <= stop.wanted:
        return state, ()
    state = state.with_collectives(stop_round=replace(stop, is_over=True, agreed=True))
    verdict = Send(state.roster.ranks, messages.StopVerdict(stop.point, True))
    return state, (verdict,)


def _stop_later(state: MembershipState, point: int, rank: int) -> Next:
    """No worker stops at ``point``, which ``rank`` wants; all do after a later step."""
    stop = state.collectives.stop_round
    if stop is not None and stop.point <= point:
        state = state.with_collectives(stop_round=replace(stop, is_over=True))
    commands: tuple[Command, ...] = (Send(state.roster.ranks, messages.StopVerdict(point, False)),)
    if state.steps.after_step is AfterStep.GO_ON:
        commands += (Record("stop_requested", state.steps.version, rank),)
        state = state.with_steps(after_step=AfterStep.STOP)
    return state, commands


@dataclass(eq=False)
class _Question:
    message: LookUp
    missing: int


class PublishedKeys:
    """The keys of the newest generation."""

    def __init__(self) -> None:
        self._generation = -1
        self._values: dict[str, bytes] = {}
        self._questions: dict[str, list[_Question]] = defaultdict(list)

    def begin(self, generation: int) -> None:
        self._generation = generation
        self._values.clear()
        self._questions.clear()

    def publish(self, message: Publish) -> list[tuple[int, Found]]:
        """The answers that it completes, by rank; the newest value of a key counts."""
        if message.generation != self._generation:
            return []
        self._values[message.key] = message.value
        answers = []
        for question in self._questions.pop(message.key, ()):
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
            self._questions[key].append(question)
        return []

    def _answer(self, message: LookUp) -> Found:
        return Found(self._generation, {key: self._values[key] for key in message.keys})


# ---------------------------------------------------------------------- background checkpoints


_COUNTS = 1 << 32  # more batches than a run has


def batch_number(status: SaveStatus, count: int) -> int:
    """Number of the batch after ``status``, when there were ``count`` before.

    It includes the generation: if all that began a batch are lost, their successors, with other holders, begin another.
    """
    return status.generation * _COUNTS + count


def save_status(state: MembershipState) -> SaveStatus:
    """Status of saves for all workers, also of a writer whose loss is being handled."""
    saves = settle_saves(state)[0].saves
    holders, generation = _holders(state), state.generation.number
    over = saves if saves.is_over else saves.last
    if over is None or over.batch < 0:
        return SaveStatus(holders, generation)
    failures = tuple(over.ended[index] for index in range(len(over.paths)))
    return SaveStatus(holders, generation, over.batch, failures, dict(over.unnamed))


def _holders(state: MembershipState) -> tuple[int, ...]:
    """Holders of the next batch by column: its first worker, or the leader."""
    found = state.positions.column_leaders(state.roster.live - state.roster.joining)
    if len(found) < state.positions.columns:
        return ()
    found[state.positions.column(state.roster.leader)] = state.roster.leader
    return tuple(found[column] for column in range(state.positions.columns))


def on_save_begun(state: MembershipState, event: messages.SaveBegun) -> Next:
    """A worker has come to the boundary of a batch; the first one begins it.

    The batch begins anew if all that began it with another writer are lost, as after a restart of the coordinator.
    """
    before = state.saves
    if event.batch < before.batch or (event.batch, event.writer) == (before.batch, before.writer):
        return state, ()
    begun = SaveState(event.batch, event.version, event.writer, event.paths, event.weights_only, event.mid_step)
    state = state.updated(saves=begun.updated(last=before.updated(last=None) if before.is_over else before.last))
    shown = range(len(begun.paths) if event.in_background else 0)
    return state, tuple(_save_record(state, SavePhase.BEGUN, index) for index in shown)


def batch_begun_by(members: Collection[messages.Returned], saves: SaveState) -> SaveState:
    """The batch that counts for ``members``, which have all returned.

    It is ``saves``, or the one before if only lost workers have begun ``saves`` and some members do not know how that
    one ended.
    """
    begun = max((member.save.batch for member in members if member.save is not None), default=-1)
    return saves.last if saves.last is not None and saves.last.batch == begun >= 0 else saves


def on_save_announced(state: MembershipState, event: messages.SaveAnnounced) -> Next:
    """A whole checkpoint file counts from now on; writer or leader names it."""
    answer = Send((event.rank,), messages.MembershipConfirmed(event.number))
    if event.batch == state.saves.batch and event.index not in state.saves.ended:
        state = state.with_saves(announced={**state.saves.announced, event.index: event.temporary})
    return state, (answer,)


def on_save_ended(state: MembershipState, event: messages.SaveEnded) -> Next:
    """The writer is done with a checkpoint."""
    if event.batch != state.saves.batch or event.rank != state.saves.writer or event.index in state.saves.ended:
        return state, ()
    return _saves_ended(state, {event.index: event.failure})


def settle_saves(state: MembershipState) -> Next:
    """Decides on the checkpoints of a writer that is gone."""
    saves = state.saves
    if saves.is_over or saves.writer in state.roster.live or state.returned is not None:
        return state, ()
    ended: dict[int, SaveFailure | None] = {}
    for index, path in enumerate(saves.paths):
        if index not in saves.ended:
            lost = SaveFailure(f"The checkpoint {path} is given up: the worker that wrote it was lost.")
            ended[index] = None if index in saves.announced else lost
    unnamed = {index: path for index, path in saves.announced.items() if index in ended}
    return _saves_ended(state.with_saves(unnamed=unnamed), ended)


def _saves_ended(state: MembershipState, ended: Mapping[int, SaveFailure | None]) -> Next:
    state = state.with_saves(ended={**state.saves.ended, **ended})
    return state, tuple(
        _save_record(state, SavePhase.COMPLETE if failure is None else SavePhase.GIVEN_UP, index)
        for index, failure in ended.items()
    )


def _save_record(state: MembershipState, phase: SavePhase, index: int) -> Record:
    saves = state.saves
    details: dict[str, object] = {"path": saves.paths[index]}
    if saves.weights_only[index]:
        details["weights_only"] = True
    if saves.mid_step:
        details["mid_step"] = True
    if (failure := saves.ended.get(index)) is not None:
        details["cause"] = failure.text
    if index in saves.unnamed:
        details["temporary"] = saves.unnamed[index]
    return Record(phase.value, saves.version, saves.writer, details)
