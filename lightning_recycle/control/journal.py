"""Journal: a small file from which another coordinator goes on with the run.

Concept: the file holds all that must be known
(:class:`~lightning_recycle.control.journal.JournaledState`, and which process holds which
position). It is replaced as a whole when the roster changes, when the run ends, and for a few other events that are as
rare; it is on the disk before anything is announced.

Contract: one process at a time has the file: it holds a lock as long as it lives, also while it is stopped, and whoever
finds the lock taken is refused. So there are never two coordinators of one run. A file that was written under another
key is not believed: it begins anew. If it cannot be written it is removed, and the run goes on without it: what is
outdated must not be believed.

The key of the run is not in the file, only a digest by which the same key is recognized.

Restart: what changes seldom, and decides who belongs to the run, is in the file before it is announced
(:class:`JournaledState`): the roster and its generation, the leader, what was raised, where all stop, how the run
ended. All else is known to the workers, each of which keeps what others may lack
(:class:`~lightning_recycle.control.protocol.member.MessageRecord`): questions without an answer, the newest answers,
and its messages about the newest steps. It sends all that when it returns
(:class:`~lightning_recycle.control.protocol.messages.Returned`). A revived coordinator waits for its roster
(:func:`revived_state`); once each of them has returned or is lost, the state machine rebuilds the rest
(:func:`~lightning_recycle.control.protocol.membership.rebuilt`), and a new generation begins. What an earlier
coordinator has sent to some, it sends to the others first, word for word; questions without an answer are asked anew.
So all have the same answers, whenever it died.

A generation that any worker has heard of is never used again. Nothing is redone but what the rules of
:mod:`~lightning_recycle.control.protocol.recovery` redo after a loss. The coordinator may be killed again at any
moment: until the new generation is in the journal, the workers have heard nothing that they did not know already. What
a worker keeps is bounded: workers are never more than one step and one control collective apart, so all of them have
older answers. What counts in one generation only is not kept: a revival begins another one.

If the journal is lost, the workers know enough of it (:func:`adopted_state`) where all members of the newest generation
return. A worker that was given up before that generation is not in its roster, and generations that none of them has
heard of have had no effect. Missed are the exceptions that were raised before, votes against newcomers, reasons of
losses, how earlier runs ended, and that a checkpoint is whole whose writer is lost, too.

Not kept, and not missed: moves, which only a launching process plans, and it ends with its coordinator; pauses and
boundaries, commits, broken links and what else counts in one generation only, such as a layout that the workers were
getting ready for; a better plan; the record, which begins anew, but for its counters.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hmac
import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from lightning_recycle.control.protocol import messages
from lightning_recycle.control.protocol.messages import AfterStep, StopReason
from lightning_recycle.control.protocol.state import (
    CollectivesState,
    Ended,
    Failed,
    Faults,
    Finished,
    Generation,
    LayoutState,
    MembershipState,
    Outcome,
    Roster,
    SaveState,
    Steps,
    StopRound,
    initial_state,
)
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.files import replacing
from lightning_recycle.planning.grid import Grid

log = logging.getLogger(__name__)

_LOCK_SECONDS = 5.0  # for a process that was killed a moment ago to let go


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


def journaled_parts(state: MembershipState) -> tuple[Any, ...]:
    """State that :func:`journal_entry` is made of; unchanged objects: no new entry."""
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


def journal_entry(state: MembershipState) -> JournaledState:
    """Entry for ``state`` if it changed; written before its commands are obeyed."""
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


def revived_state(grid: Grid, written: JournaledState, retries: int = 1, members: int = 1) -> MembershipState:
    """State of a restarted coordinator: it waits for the roster to return."""
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


def adopted_state(
    said: Collection[messages.Returned],
) -> tuple[JournaledState | None, dict[int, messages.Returned]] | str:
    """State and members of an earlier run without its file; or what is missing.

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


@dataclass(frozen=True, slots=True)
class Process:
    """Process at a position, with the fields of its first message.

    See :class:`~lightning_recycle.control.protocol.messages.Hello`.
    """

    token: str
    pid: int
    node: str
    space: str = ""
    incarnation: int = 0


@dataclass(frozen=True, slots=True)
class _Content:
    """Content of the file.

    ``proof``: a digest of the key; ``statuses``: those of the runs before this one.
    """

    proof: str
    run: str
    statuses: tuple[int, ...] = ()
    kept: JournaledState | None = None
    processes: Mapping[int, Process] = field(default_factory=dict)


def default_path(address: tuple[str, int]) -> Path:
    """Default file of the coordinator at ``address``, in the user's folder for state.

    The name has this machine's in it, as machines may share the user's home.

    Raises:
        ConfigurationError: if that folder cannot be made.
    """
    folder = Path(os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")) / "lightning_recycle"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"{folder}: {error.strerror}. Give --state another file, or --state none.") from error
    machine = f"{socket.gethostname()}-{address[0]}"
    name = "".join(letter if letter.isalnum() or letter in ".-" else "_" for letter in machine)
    return folder / f"coordinator-{name}-{address[1]}.json"


class Journal:
    """The file of one coordinator.

    Attributes:
        run: a random name of the run.
        statuses: how the runs before it have ended.
        kept: what was written down of the run; None at its beginning.
        processes: who held which position then.
        is_continued: whether another coordinator has begun the run.

    Raises:
        ConfigurationError: if the file cannot be written, or belongs to a coordinator that lives.
    """

    def __init__(self, path: Path, key: bytes) -> None:
        self.path = path
        self._proof = hmac.digest(key, b"recycle journal", "sha256").hex()[:32]
        self._lock_path = path.with_name(f"{path.name}.lock")
        try:
            self._lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigurationError(f"--state {path}: {error.strerror}.") from error
        self._is_broken = False
        try:
            self._take_lock()
            found = self._read()
            self.is_continued = found is not None
            self._content = _Content(self._proof, os.urandom(8).hex()) if found is None else found
            self._replace()
        except BaseException:
            os.close(self._lock)
            raise

    @property
    def run(self) -> str:
        return self._content.run

    @property
    def statuses(self) -> tuple[int, ...]:
        return self._content.statuses

    @property
    def kept(self) -> JournaledState | None:
        return self._content.kept

    @property
    def processes(self) -> Mapping[int, Process]:
        return self._content.processes

    def write(self, kept: JournaledState, processes: Mapping[int, Process]) -> None:
        """Writes down ``kept`` and who holds the positions of its roster, if that is news."""
        if kept != self._content.kept:
            holders = {rank: processes[rank] for rank in (*kept.roster.ranks, *kept.roster.parked) if rank in processes}
            self._content = replace(self._content, kept=kept, processes=holders)
            self._replace()

    def adopt(self, run: str, kept: JournaledState | None, processes: Mapping[int, Process]) -> None:
        """Goes on with ``run``, of which this file does not know."""
        self.is_continued = True
        self._content = replace(self._content, run=run, kept=kept, processes=processes)
        self._replace()

    def begin(self, statuses: tuple[int, ...]) -> None:
        """Another run begins; ``statuses``: those of the runs before."""
        self._is_broken = self.is_continued = False
        self._content = _Content(self._proof, os.urandom(8).hex(), statuses)
        self._replace()

    def remove(self) -> None:
        """Nothing is left to be continued."""
        for path in (self.path, self._lock_path):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        os.close(self._lock)

    def _take_lock(self) -> None:
        """Takes the file's lock, which the kernel releases when this process ends.

        Processes forked from it have none.
        """
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    return  # a file system without locks
            if time.monotonic() > deadline:
                raise ConfigurationError(
                    f"--state {self.path}: another coordinator has this file, and lives, or is stopped. Kill it first,"
                    " or give another file."
                )
            time.sleep(0.05)

    def _read(self) -> _Content | None:
        """Journal of an earlier coordinator with the same key."""
        try:
            found = msgspec.json.decode(self.path.read_bytes(), type=_Content)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ConfigurationError(f"--state {self.path}: {error.strerror}.") from error
        except (ValueError, msgspec.MsgspecError):
            log.warning("%s is no file of a coordinator: it begins anew.", self.path)
            return None
        if found.proof != self._proof:
            log.warning("%s was written by a coordinator of another run: it begins anew.", self.path)
            return None
        return found

    def _replace(self) -> None:
        if self._is_broken:
            return
        try:
            with replacing(self.path) as file:
                os.fchmod(file.fileno(), 0o600)
                file.write(msgspec.json.encode(self._content))
        except OSError as error:
            self._is_broken = True
            log.warning("%s cannot be written (%s): this run does not survive its coordinator.", self.path, error)
            with contextlib.suppress(OSError):  # there is nothing else left to try
                self.path.unlink(missing_ok=True)
