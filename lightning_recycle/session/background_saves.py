"""Checkpoints that are written while the training goes on.

Concept: at the step boundary where a checkpoint is asked for, one worker of each stage, its *holder*, copies the
stage's state; all others go on at once. A thread of each holder then does what all workers do together otherwise, with
the same functions: messages between holders (:mod:`~lightning_recycle.session.holder_group`) replace the control
collectives. One holder is the *writer*, which gives the checkpoint its name.

All checkpoints of one boundary are a *batch*, and share the copies. There is one batch at a time: the next one, and the
end of the training, wait for it. No worker waits for others at the boundary: the holders were named by the last message
that all have had, and how a batch ended comes with one of the next
(:mod:`~lightning_recycle.control.protocol.saves`). So all take up what follows (the record of ``ModelCheckpoint``,
deletions, links, messages to loggers) after the same step. What all workers know of a batch is in
:class:`CommonState`, which a newcomer gets from its donor.

Contract: no wait of a thread outlives the worker that it waits for; whatever a thread meets becomes the outcome of its
checkpoint. A file gets its name only after the coordinator was told that it is whole.

Must not know: Lightning's callbacks, what a checkpoint is for.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from typing_extensions import override

from lightning_recycle.control.payload import pack, unpack
from lightning_recycle.control.protocol.messages import SaveBegun, SaveEnded, SaveFailure, SaveStatus
from lightning_recycle.control.protocol.saves import batch_number
from lightning_recycle.devices import DeviceThread
from lightning_recycle.files import Pace, put_in_place_if_left
from lightning_recycle.session.checkpoint_files import WriteFailure
from lightning_recycle.session.collectives import WorkerContext
from lightning_recycle.session.holder_group import GivenUp, HolderGroup
from lightning_recycle.session.state_copies import StateCopies
from lightning_recycle.tensor_memory import to_cpu

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.01
_LOW_PRIORITY = 10  # of a thread, as for nice: on a busy machine a writer with 19 may not finish before the next save


@dataclass
class SaveRequest:
    """One checkpoint of a batch.

    Args:
        write: writes it together with the other holders; None if this worker has no part in it.
        error: an exception of the user's code, such as of an object that cannot be pickled.
    """

    path: str
    write: Callable[[], WriteFailure | None] | None
    weights_only: bool = False
    is_new: bool = False
    failure: WriteFailure | None = None
    error: BaseException | None = None


@dataclass(frozen=True)
class Action:
    """What follows when checkpoints are complete, on all workers.

    Args:
        name: the name by which :attr:`BackgroundSaves.actions` has it.
        paths: the checkpoints of the batch on which it depends.
    """

    name: str
    paths: tuple[str, ...]
    arguments: tuple[Any, ...]


@dataclass
class Batch:
    """The checkpoints of one step boundary.

    Args:
        ended: called in the writer's thread when it is done with a checkpoint: its index, why there is none, and for
            how many seconds the thread has written.
    """

    version: int
    group: HolderGroup
    copies: StateCopies
    ended: Callable[[int, WriteFailure | None, float], None]
    requests: list[SaveRequest] = field(default_factory=list)
    actions: list[Action] = field(default_factory=list)
    is_sealed: bool = False
    _thread: threading.Thread | None = None
    _is_done: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        """Begins to write the batch, if this worker has a part in it."""
        self.is_sealed = True
        if self.group.is_column_leader:
            self._thread = DeviceThread(self._run, "recycle-checkpoint")
            self._thread.start()

    @property
    def is_written(self) -> bool:
        """Whether this worker has done its part."""
        return self.is_sealed and (self._thread is None or self._is_done.is_set())

    def _run(self) -> None:
        began = time.perf_counter()
        for index, request in enumerate(self.requests):
            self.group.request = index
            request.failure = self._write(request)
            if self.group.is_leader:
                self.ended(index, request.failure, time.perf_counter() - began)
        self._is_done.set()

    def _write(self, request: SaveRequest) -> WriteFailure | None:
        assert request.write is not None
        try:
            if not self.copies.finish():
                raise GivenUp("the optimizer's state was changed between two steps")
            if not self.copies.are_originals:  # for which the training waits
                self._yield()
            return request.write()
        except GivenUp as error:
            why = str(error)
        except BaseException as error:
            request.error = error
            why = f"{type(error).__name__}: {error}"
        with contextlib.suppress(Exception):  # the others wait no longer than this worker lives
            self.group.fail(why)
        return _given_up(request.path, why)

    @staticmethod
    def _yield() -> None:
        """From now on this thread has a low priority."""
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOW_PRIORITY)  # on Linux: of this thread

    def raise_error(self) -> None:
        """Raises what the user's code has raised in the thread."""
        for error in [request.error for request in self.requests if request.error is not None]:
            raise error


def _given_up(path: str, why: str) -> WriteFailure:
    return WriteFailure(f"The checkpoint {path} is given up: {why}.", is_refusal=False)


@dataclass
class PendingBatch:
    """A batch that has begun and whose outcome is not known yet.

    Args:
        new: those of them that replace nothing.
    """

    number: int
    version: int
    paths: tuple[str, ...]
    new: frozenset[str]
    actions: tuple[Action, ...]


@dataclass(frozen=True)
class CommonState:
    """State of background checkpoints that all workers have in common.

    Args:
        given_up: what is to be asked for again at the next boundary.
        unnamed: temporary paths and names of whole files whose writer was lost.
        names: of folders with checkpoints, the names in them.
    """

    status: SaveStatus
    batches: int
    pending: PendingBatch | None
    given_up: tuple[Any, ...]
    unnamed: tuple[tuple[str, str], ...]
    names: Mapping[str, set[str]]


class Consequences:
    """Actions that follow from checkpoints once their outcome is known.

    Attributes:
        actions: what may follow, by name. Called on all workers with why a checkpoint is not complete, or None, and
            :attr:`Action.arguments`.
        given_up: what is to be asked for again at the next boundary; the same on all workers.
    """

    def __init__(self) -> None:
        self.given_up: tuple[Any, ...] = ()
        self.actions: dict[str, Callable[..., None]] = {}
        self._noted: list[Action] = []
        self._deferred: list[tuple[list[str], list[tuple[str, tuple[Any, ...]]]]] = []

    @property
    def noted(self) -> list[Action]:
        """What follows from the checkpoints that were asked for."""
        return self._noted

    @property
    def is_deferring(self) -> bool:
        """Whether what follows from checkpoints is noted now."""
        return bool(self._deferred)

    @contextlib.contextmanager
    def deferring(self) -> Iterator[None]:
        """Actions noted in the block depend on all checkpoints that it asks for."""
        paths: list[str] = []
        actions: list[tuple[str, tuple[Any, ...]]] = []
        self._deferred.append((paths, actions))
        try:
            yield
        finally:
            self._deferred.pop()
            self.noted.extend(Action(name, tuple(paths), arguments) for name, arguments in actions)

    def asked(self, path: str) -> None:
        """A checkpoint at ``path`` is asked for."""
        for paths, _ in self._deferred:
            paths.append(path)

    def follow(self, name: str, *arguments: Any) -> None:
        """Calls action ``name`` when the outcome of the checkpoints is known."""
        self._deferred[-1][1].append((name, arguments))

    def follow_first(self, name: str, *arguments: Any) -> None:
        """As :meth:`follow`, before all that was noted in the block."""
        self._deferred[-1][1].insert(0, (name, arguments))

    def settle(self, failures: Mapping[str, WriteFailure]) -> None:
        """Takes up what follows."""
        noted, self._noted = self._noted, []
        self._carry_out(noted, failures)

    def _carry_out(self, actions: Iterable[Action], failures: Mapping[str, WriteFailure]) -> None:
        for action in actions:
            failure = next((failures[path] for path in action.paths if path in failures), None)
            self.actions[action.name](failure, *action.arguments)


class BackgroundSaves(Consequences):
    """This worker's part in checkpoints that are written in the background.

    Attributes:
        on_failures: called on all workers with why checkpoints were not written, by path.
        discard: called on the leader with the path of a new checkpoint that was given up.
        measure: returns what this worker has measured, if its thread has written for so many seconds.
        by_writer: what the writer does of them where a run ends before all know the outcome, by name.
        pending: the batch that has begun and whose outcome is not known; the same on all workers.
        names: of folders with checkpoints, the names in them; the same on all workers.
    """

    def __init__(self, context: WorkerContext) -> None:
        super().__init__()
        self._collectives, self._options = context.collectives, context.options.checkpoints
        self._client = context.client
        self._patience = self._options.signal_timeout  # of the next checkpoint with the one before
        self.on_failures: Callable[[Mapping[str, WriteFailure]], None] = lambda failures: None
        self.discard: Callable[[str], None] = lambda path: None
        self.measure: Callable[[float], Any] = lambda seconds: None
        self.on_facts: Callable[[Any], None] = lambda facts: None
        self.stalled: Callable[[], float] = lambda: 0.0
        self.by_writer: dict[str, Callable[..., None]] = {}
        self.batch: Batch | None = None
        self.pending: PendingBatch | None = None
        self.names: dict[str, set[str]] = {}
        self._batches = 0
        self._unnamed: tuple[tuple[str, str], ...] = ()
        self._old_copies: StateCopies | None = None

    # ------------------------------------------------------------------ the next batch

    def begin(self, version: int) -> Batch | None:
        """The batch of the boundary after ``version`` steps, which :meth:`seal` completes.

        None if the one before is not over. All call it.
        """
        if self.batch is not None and not self.batch.is_sealed:
            return self.batch
        self._agree(self._patience)
        if self.pending is not None:
            return None
        status = self._client.member.saves
        if not status.holders:  # before the first step
            self._collectives.barrier("checkpoint")
            status = self._client.member.saves
        self._collectives.settle()
        bandwidth = self._options.bandwidth
        pace = Pace(None if bandwidth is None else 1e6 * bandwidth)
        number = batch_number(status, self._batches)
        holders = (status.holders, status.generation)
        group = HolderGroup(self._client, self._collectives.positions, number, version, *holders, pace)
        self.batch = Batch(version, group, StateCopies(self._old_copies), self._ended)
        self._old_copies = None
        return self.batch

    def seal(self, mid_step: bool) -> None:
        """What was asked for since :meth:`begin` is written from now on.

        All call it; ``mid_step``: before the end of the step.
        """
        batch = self.batch
        if batch is None or batch.is_sealed:
            return
        if not batch.requests:
            self.batch, self._old_copies = None, batch.copies
            self._carry_out(batch.actions, {})
            return
        paths = tuple(request.path for request in batch.requests)
        new = frozenset(request.path for request in batch.requests if request.is_new)
        self.pending = PendingBatch(batch.group.number, batch.version, paths, new, tuple(batch.actions))
        self._batches += 1
        weights_only = tuple(request.weights_only for request in batch.requests)
        facts = (batch.version, batch.group.writer, paths, weights_only, mid_step, self.stalled())
        self._client.send(SaveBegun(self._client.rank, self.pending.number, *facts))
        batch.start()

    def _ended(self, index: int, failure: WriteFailure | None, seconds: float) -> None:
        """Called in the thread of the writer, which is done with a checkpoint."""
        why = None if failure is None else SaveFailure(failure.text, failure.is_refusal)
        assert self.batch is not None
        facts = pack(self.measure(seconds))
        number = self.batch.group.number
        self._client.send(SaveEnded(self._client.rank, number, index, why, self.stalled(), facts))

    @property
    @override
    def noted(self) -> list[Action]:
        return [] if self.batch is None or self.batch.is_sealed else self.batch.actions

    # ------------------------------------------------------------------ the batch before

    def finish_copies(self) -> None:
        """STEP is about to write what is still to be copied."""
        if self.batch is not None:
            self.batch.copies.finish()

    def take_up(self) -> None:
        """Carries out a batch's actions after the step whose losses came with its outcome."""
        if self.batch is not None:
            self.batch.raise_error()
        self._hear()

    def state(self) -> CommonState:
        """The state that all workers have in common."""
        pending, status = self.pending, self._client.member.saves
        if pending is not None:
            actions = (replace(action, arguments=to_cpu(action.arguments)) for action in pending.actions)
            pending = replace(pending, actions=tuple(actions))
        return CommonState(status, self._batches, pending, to_cpu(self.given_up), self._unnamed, self.names)

    def enter(self, state: CommonState) -> None:
        """This worker enters a running training; ``state``: of its donor."""
        self._client.member.saves = state.status
        self._batches, self.pending, self.given_up = state.batches, state.pending, state.given_up
        self._unnamed, self.names = state.unnamed, dict(state.names)

    def complete(self) -> None:
        """Waits for the batch, and takes up what follows from it; all workers call it."""
        self._agree(None)

    def await_originals(self) -> None:
        """Waits until the thread has written tensors of which there are no copies.

        Or until a generation is announced in which they may change: then the checkpoint is given up.
        """
        batch, client = self.batch, self._client
        if batch is not None and batch.copies.are_originals:
            with client.busy("writing a checkpoint"):
                while not (batch.is_written or client.interrupted):
                    time.sleep(_LOOK_SECONDS)
            batch.group.is_wanted = batch.is_written

    def await_thread(self) -> None:
        """Waits at the end of the run until this worker has done its part.

        As long as the next checkpoint would. The writer carries out the actions on files.
        """
        deadline = time.monotonic() + self._patience
        while (batch := self.batch) is not None and not batch.is_written and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
        if batch is None or not (batch.group.is_leader and batch.is_written):
            return
        written = {request.path for request in batch.requests if request.failure is None}
        for action in batch.actions:
            if action.name in self.by_writer and written.issuperset(action.paths):
                try:
                    self.by_writer[action.name](*action.arguments)
                except OSError as error:
                    log.warning("After the last checkpoint of the run a file is not as it should be: %s.", error)

    def name_files(self) -> None:
        """The leader gives complete files of lost writers their names."""
        if not self._collectives.is_leader:
            return
        unnamed, self._unnamed = self._unnamed, ()
        for temporary, path in unnamed:
            try:
                put_in_place_if_left(temporary, path)
            except OSError as error:
                log.warning("The checkpoint %s is complete, but its name is refused: %s.", path, error)

    def _agree(self, patience: float | None) -> None:
        """Waits for the pending batch, for ``patience`` seconds or without limit."""
        end = float("inf") if patience is None else time.monotonic() + patience
        while self.pending is not None:
            if (batch := self.batch) is not None:
                self._client.await_thread(
                    lambda batch=batch: batch.is_written or time.monotonic() > end,  # type: ignore[misc]
                    "writing a checkpoint",
                )
                batch.raise_error()
            self._collectives.barrier("checkpoint")
            self._hear()
            if patience is not None:
                return

    def _hear(self) -> None:
        """Takes up what follows from the batch, if the newest status says how it ended."""
        status, pending = self._client.member.saves, self.pending
        if pending is None or status.batch != pending.number:
            return
        batch, self.batch, self.pending = self.batch, None, None
        if batch is not None:
            batch.group.end()
            if batch.is_written:
                self._old_copies = batch.copies
                batch.copies.forget_originals()
        self._unnamed = tuple((temporary, pending.paths[index]) for index, temporary in status.unnamed.items())
        self.name_files()
        outcomes = zip(pending.paths, status.failures, strict=True)
        failed = {path: WriteFailure(why.text, why.is_refusal) for path, why in outcomes if why is not None}
        if self._collectives.is_leader:
            for path in pending.new & failed.keys():
                self.discard(path)
        self._carry_out(pending.actions, failed)
        if failed:
            self.on_failures(failed)
        if status.facts is not None:
            self.on_facts(unpack(status.facts))
