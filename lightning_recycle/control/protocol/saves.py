"""Checkpoints that are written while the training goes on, as the coordinator knows them. Pure.

All checkpoints of one step boundary are a *batch*; there is one at a time. A worker of each stage, its *holder*, has
copied the stage's state; the holder of the last stage is the *writer*. Each checkpoint is in one of these states:

=========  ===================================================  ====================================================
state      what is so                                           what led to it
=========  ===================================================  ====================================================
begun      workers have come to the boundary                    the first SaveBegun
announced  the writer has the whole file under another name     SaveAnnounced
complete   the file has its name, or gets it from the leader    SaveEnded; loss of the writer after the announcement
given up   there is no file, nor will there be one              SaveEnded with a reason; loss of the writer before
=========  ===================================================  ====================================================

So a checkpoint is complete once for all, whichever worker dies. Every StepLoss and every Answer says how the newest
batch ended (SaveStatus), and who would hold the next one. These messages are the same for all workers, which read them
at the same points of their program: all take up what follows after the same step, and choose the same holders without
asking. A checkpoint that was given up for the loss of a worker is asked for again at the next boundary; a newcomer
learns of that with its peer's state.

Must not know: files, what a checkpoint holds, what follows from it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from lightning_recycle.control.protocol import messages
from lightning_recycle.control.protocol.messages import SaveFailure, SavePhase, SaveStatus
from lightning_recycle.control.protocol.state import MembershipState, Next, Record, SaveState, Send

_COUNTS = 1 << 32  # more batches than a run has


def batch_number(status: SaveStatus, count: int) -> int:
    """The number of the batch that begins after ``status``, when there were ``count`` before. If all are lost who began
    it, those that take their place begin one of another number, as in another generation they have other holders.
    """
    return status.generation * _COUNTS + count


def status(state: MembershipState) -> SaveStatus:
    """The status for a message to all workers; of a writer whose loss is being handled, too."""
    saves = settle(state)[0].saves
    holders, generation = _holders(state), state.generation.number
    over = saves if saves.is_over else saves.last
    if over is None or over.batch < 0:
        return SaveStatus(holders, generation)
    failures = tuple(over.ended[index] for index in range(len(over.paths)))
    return SaveStatus(holders, generation, over.batch, failures, dict(over.unnamed), over.facts)


def _holders(state: MembershipState) -> tuple[int, ...]:
    """By stage, the holder of the next batch; the leader in its own, which is the last one."""
    if state.members > 1:
        return ()  # all wait for checkpoints there
    found = state.positions.column_leaders(state.roster.live - state.roster.joining)
    if len(found) < state.columns:
        return ()
    found[state.column_of(state.roster.leader)] = state.roster.leader
    return tuple(found[stage] for stage in range(state.columns))


def begin(state: MembershipState, event: messages.SaveBegun) -> Next:
    """A worker has come to the boundary of a batch; the first one begins it. If all that had begun it with another
    writer are lost, as an earlier coordinator was, those that are left begin it anew.
    """
    before = state.saves
    if event.batch < before.batch or (event.batch, event.writer) == (before.batch, before.writer):
        return state, ()
    begun = SaveState(event.batch, event.version, event.writer, event.paths, event.weights_only, event.mid_step)
    state = state.updated(saves=begun.updated(last=before.updated(last=None) if before.is_over else before.last))
    return state, tuple(_record(state, SavePhase.BEGUN, index) for index in range(len(begun.paths)))


def begun_by(members: Collection[messages.Returned], saves: SaveState) -> SaveState:
    """The batch that counts for ``members``, which have all returned: ``saves``, or the one before it if only lost
    workers have begun ``saves``, and some members have not heard how that one ended.
    """
    begun = max((member.save.batch for member in members if member.save is not None), default=-1)
    return saves.last if saves.last is not None and saves.last.batch == begun >= 0 else saves


def announce(state: MembershipState, event: messages.SaveAnnounced) -> Next:
    """The writer has a whole file: from now on it counts, and the writer or the leader gives it its name."""
    answer = Send((event.rank,), messages.Confirmed(event.number))
    if event.batch == state.saves.batch and event.index not in state.saves.ended:
        state = state.with_saves(announced={**state.saves.announced, event.index: event.temporary})
    return state, (answer,)


def end_one(state: MembershipState, event: messages.SaveEnded) -> Next:
    """The writer is done with a checkpoint."""
    if event.batch != state.saves.batch or event.rank != state.saves.writer or event.index in state.saves.ended:
        return state, ()
    return _ended(state.with_saves(facts=event.facts), {event.index: event.failure})


def settle(state: MembershipState) -> Next:
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
    return _ended(state.with_saves(unnamed=unnamed), ended)


def _ended(state: MembershipState, ended: Mapping[int, SaveFailure | None]) -> Next:
    state = state.with_saves(ended={**state.saves.ended, **ended})
    return state, tuple(
        _record(state, SavePhase.COMPLETE if failure is None else SavePhase.GIVEN_UP, index)
        for index, failure in ended.items()
    )


def _record(state: MembershipState, phase: SavePhase, index: int) -> Record:
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
