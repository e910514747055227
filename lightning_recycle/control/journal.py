"""Journal: write-ahead log from which a restarted coordinator continues the run.

Concept: rare facts that decide who belongs to the run (:class:`JournaledState`, the processes of positions) replace the
file as a whole, on disk before they are announced. Workers keep the rest
(:class:`~lightning_recycle.control.protocol.member.MessageRecord`): questions without an answer, and the newest
answers, which the others may lack; workers are never more than one step and one control collective apart, so that is
bounded. They send it when they return (:class:`~lightning_recycle.control.protocol.messages.Returned`). Once all of the
roster have returned or are lost (:func:`revived_state`), :func:`~lightning_recycle.control.protocol.membership.rebuilt`
makes the rest and a new generation begins. Messages that some have received are repeated to the others unchanged; open
questions are asked anew: all have the same answers, whenever the coordinator died. It may die again at any moment.

Contract: one process at a time holds the lock of the file, also while stopped; others are refused. A file of another
key (known by a digest) is not believed. A file that cannot be written is removed, and the run goes on without it:
outdated state must not be believed. A known generation number is never used again; nothing is redone but by the rules
of :mod:`~lightning_recycle.control.protocol.recovery`.

Never kept: facts of one generation only, better plans, and the record except its counters.
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
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from lightning_recycle.control.protocol import messages
from lightning_recycle.control.protocol.messages import AfterStep, Process, StopReason
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
from lightning_recycle.processes import has_ended

log = logging.getLogger(__name__)

_LOCK_SECONDS = 5.0  # for a process that was killed a moment ago to let go


@dataclass(frozen=True, slots=True)
class Over:
    """Record of the end of a run, for workers that return afterwards.

    ``words``: for people. ``answer``: to the collective that delivered the results, which some may lack.
    """

    reason: StopReason
    words: str = ""
    answer: messages.Answer | None = None

    @property
    def outcome(self) -> Outcome:
        """The known part of the outcome: the results are with their reader."""
        if self.reason is StopReason.FINISHED:
            return Finished({})
        return Ended() if self.reason is StopReason.ENDED else Failed(self.words)


@dataclass(frozen=True, slots=True)
class JournaledState:
    """State that is in the journal before it is announced.

    Fields as in :class:`~lightning_recycle.control.protocol.state.MembershipState` and its parts. ``roster``: without
    changes at step boundaries. ``stop_round``: once it is over.
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


def journal_entry(state: MembershipState) -> JournaledState:
    """Entry for ``state``; written before its commands are obeyed."""
    stop, nobody = state.collectives.stop_round, frozenset[int]()
    return JournaledState(
        state.generation.number,
        state.roster.updated(joined=nobody, ready=nobody, leaving=nobody, ending=nobody),
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


@dataclass(frozen=True, slots=True)
class _Content:
    """Content of the file; ``proof``: digest of the key; ``statuses``: earlier runs'."""

    proof: str
    run: str
    statuses: tuple[int, ...] = ()
    kept: JournaledState | None = None
    processes: Mapping[int, Process] = field(default_factory=dict)


def default_path(address: tuple[str, int]) -> Path:
    """Default file of the coordinator at ``address``, in the user's folder for state.

    The name includes this machine's, as machines may share homes. Raises ConfigurationError if the folder cannot be
    made.
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

    Raises ConfigurationError if the file cannot be written, or belongs to a living coordinator.

    Attributes:
        run: a random name of the run.
        statuses: the outcomes of the runs before it.
        kept: the written state of the run; None at its beginning. ``processes``: the holders of positions then.
        is_continued: whether another coordinator has begun the run.
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
            begun = found or _Content(self._proof, os.urandom(8).hex())
            self.run, self.statuses, self.kept, self.processes = begun.run, begun.statuses, begun.kept, begun.processes
            self._replace()
        except BaseException:
            os.close(self._lock)
            raise

    def write(self, journaled: JournaledState, processes: Mapping[int, Process]) -> None:
        """Writes ``journaled`` and the holders of its roster's positions, if they changed."""
        if journaled != self.kept:
            self.kept = journaled
            self.processes = {rank: processes[rank] for rank in journaled.roster.ranks if rank in processes}
            self._replace()

    def begin(self, statuses: tuple[int, ...]) -> None:
        """Another run begins; ``statuses``: those of the runs before."""
        self._is_broken = self.is_continued = False
        self.run, self.statuses, self.kept, self.processes = os.urandom(8).hex(), statuses, None, {}
        self._replace()

    def leave(self) -> None:
        """Releases the file, and removes it unless a run could go on from it."""
        if self.kept is None or all(has_ended(process.pid, process.space) for process in self.processes.values()):
            for path in (self.path, self._lock_path):
                path.unlink(missing_ok=True)
        os.close(self._lock)

    def _take_lock(self) -> None:
        """Takes the file's lock, released by the kernel with this process; not inherited."""
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
        """Content of an earlier coordinator with the same key."""
        try:
            content = msgspec.json.decode(self.path.read_bytes(), type=_Content)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ConfigurationError(f"--state {self.path}: {error.strerror}.") from error
        except (ValueError, msgspec.MsgspecError):
            log.warning("%s is not a file of a coordinator: it begins anew.", self.path)
            return None
        if content.proof != self._proof:
            log.warning("%s was written by a coordinator of another run: it begins anew.", self.path)
            return None
        return content

    def _replace(self) -> None:
        if self._is_broken:
            return
        try:
            with replacing(self.path) as file:
                os.fchmod(file.fileno(), 0o600)
                content = _Content(self._proof, self.run, self.statuses, self.kept, self.processes)
                file.write(msgspec.json.encode(content))
        except OSError as error:
            self._is_broken = True
            log.warning("%s cannot be written (%s): this run does not survive its coordinator.", self.path, error)
            with contextlib.suppress(OSError):  # there is nothing else left to try
                self.path.unlink(missing_ok=True)
