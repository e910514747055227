"""Checkpoints that are written while the training goes on.

Concept: at the step boundary where a checkpoint is asked for, one worker of each stage, its *holder*, copies the
stage's state; all others go on at once. A thread of each holder then does what all workers do together otherwise, with
the same functions: messages between holders (:class:`HolderGroup`) replace the control collectives. One holder is the
*writer*, which gives the checkpoint its name.

All checkpoints of one boundary are a *batch*, and share the copies. There is one batch at a time: the next one, and the
end of the training, wait for it. At the boundary no worker waits for others: each works out the holders from the roster
and what all know. In each step after it all post what they know of the batch when they begin, and have the answers when
they have applied it. So all take up what follows from it (the record of ``ModelCheckpoint``, deletions, links, messages
to loggers) after the same step. It is given up if a holder is lost, as no other worker can make that version any more;
if a loss at the boundary made workers choose different holders; or if the coordinator is started again while parts are
under way.

Contract: no wait of a thread outlives the worker that it waits for; whatever a thread meets becomes the outcome of its
checkpoint. Only a member of the run names a file.

Must not know: Lightning's callbacks, what a checkpoint is for.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from typing_extensions import override

from lightning_recycle.control.client import ControlClient, Interrupted
from lightning_recycle.control.protocol.positions import Positions
from lightning_recycle.files import Pace, temporary_path
from lightning_recycle.session.checkpoint_files import WriteFailure, local_path
from lightning_recycle.session.collectives import WorkerContext
from lightning_recycle.session.optimizer_states import copied, fits
from lightning_recycle.tensor_memory import has_plain_memory
from lightning_recycle.torch_internals import version_of

__all__ = [
    "Action",
    "BackgroundSaves",
    "Batch",
    "CommonState",
    "Consequences",
    "HolderGroup",
    "SaveRequest",
    "StateCopies",
]

log = logging.getLogger(__name__)

_PIECE = 1 << 20  # bytes that are copied at once, or sent in one message: what else the connection carries waits
_LARGE = 1 << 18  # bytes of a tensor whose copy is worth an entry in a list
_WINDOW = 4  # pieces under way
_FAILED = "failed"
_LOOK_SECONDS = 0.01
_LOW_PRIORITY = 10  # of a thread, as for nice: on a busy machine a writer with 19 may not finish before the next save


# ---------------------------------------------------------------------- copies


class StateCopies:
    """Copies of the tensors of one step boundary, on the CPU. Memory of copies that are not needed any more is used
    again. Large tensors that only STEP writes are copied after the boundary, piece by piece, by the thread that writes
    them, and at the latest by the training before its next STEP.

    Args:
        old: the copies of an earlier boundary, which nobody reads any more.

    Attributes:
        are_originals: whether there is no memory for copies: then they are the tensors themselves.
    """

    def __init__(self, old: StateCopies | None = None) -> None:
        self.are_originals = False
        self._memory: dict[Any, Tensor] = {} if old is None else old._by_place
        self._by_place: dict[Any, Tensor] = {}
        self._made: dict[Any, tuple[Tensor, Tensor]] = {}  # with the original, so that its address stays its own
        self._owed: deque[tuple[Tensor, Tensor, int]] = deque()  # pieces: original, copy, the original's version
        self._changed, self._under_way, self._is_torn = threading.Condition(), 0, False

    def limit(self, needed: int, free: float) -> bool:
        """Whether copies of ``needed`` bytes in all fit into ``free`` ones more; otherwise none is made."""
        there = sum(copy.nbytes for copy in (*self._memory.values(), *(copy for _, copy in self._made.values())))
        self.are_originals = needed - there > free
        if self.are_originals:
            self._memory.clear()
        return not self.are_originals

    def take(self, value: Any, place: tuple[Any, ...] = (), until_step: bool = False) -> Any:
        """A copy of ``value``. A tensor that was copied already, and not written since, has the same copy.

        Args:
            value: a tensor, or dicts, lists and tuples with tensors; anything else is copied deeply.
            place: the place of ``value`` in the state, where its copy was at an earlier boundary.
            until_step: whether nothing writes large tensors before the next STEP, so that :meth:`finish` copies them.
        """
        if isinstance(value, Tensor):
            return self._copy(value, place, until_step)
        if isinstance(value, Mapping):
            return {key: self.take(item, (*place, key), until_step) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self.take(item, (*place, n), until_step) for n, item in enumerate(value))
        return deepcopy(value)

    def finish(self) -> bool:
        """Makes the copies that are left, together with the other thread; returns when all are made, and whether they
        are of the boundary: whether no original was written before.
        """
        while True:
            with self._changed:
                if not self._owed:
                    self._changed.wait_for(lambda: not self._under_way)
                    return not self._is_torn
                original, copy, version = self._owed.popleft()
                self._under_way += 1
            is_whole = False
            try:
                with torch.no_grad():
                    copy.copy_(original)
                is_whole = version_of(original) == version
            finally:
                with self._changed:
                    self._is_torn = self._is_torn or not is_whole
                    self._under_way -= 1
                    self._changed.notify_all()

    def forget_originals(self) -> None:
        """The boundary is over: what is copied from now on is of another one."""
        self._made.clear()

    def _copy(self, tensor: Tensor, place: tuple[Any, ...], until_step: bool) -> Tensor:
        if self.are_originals:
            return tensor.detach()
        if not has_plain_memory(tensor) or tensor.is_inference():  # which has no version
            return tensor.detach().clone().cpu()
        key = (tensor.data_ptr(), version_of(tensor), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        known = self._made.get(key)
        if known is None:
            known = self._made[key] = (tensor, self._new_copy(tensor, self._memory.pop(place, None), until_step))
        self._by_place[place] = known[1]
        return known[1]

    @torch.no_grad()
    def _new_copy(self, tensor: Tensor, old: Tensor | None, until_step: bool) -> Tensor:
        if not (until_step and tensor.nbytes >= _LARGE and tensor.is_contiguous()):
            copy: Tensor = copied(tensor.detach(), old)
            return copy
        copy = old if old is not None and fits(old, tensor) and old.is_contiguous() else torch.empty_like(tensor)
        size = _PIECE // tensor.itemsize
        pieces = zip(tensor.detach().view(-1).split(size), copy.view(-1).split(size), strict=True)
        with self._changed:
            self._owed.extend((*piece, version_of(tensor)) for piece in pieces)
        return copy


# ---------------------------------------------------------------------- holders


class GivenUp(Exception):
    """Why a checkpoint cannot be completed."""


@dataclass
class HolderGroup:
    """Messages between the holders of one batch, from their threads; in place of the collectives of all workers.

    Args:
        client: the connection to the coordinator.
        positions: which worker is which member of which position.
        number: the batch's number, the same on all workers.
        ranks: the holder of each stage.
        writer: the rank of the one that gives the checkpoint its name.
        pace: how fast each of them writes and sends.
        request: which checkpoint of the batch is being written.
        is_wanted: whether all others still wait for the batch.
    """

    client: ControlClient
    positions: Positions
    number: int
    ranks: tuple[int, ...]
    writer: int
    pace: Pace = field(default_factory=Pace)
    request: int = 0
    is_wanted: bool = True
    _messages: int = 0

    def __post_init__(self) -> None:
        self.rank = self.client.rank
        self._returns, self._since = self.client.returns, self.client.generation

    @property
    def is_leader(self) -> bool:
        """Whether this worker is the writer."""
        return self.rank == self.writer

    @property
    def is_column_leader(self) -> bool:
        """Whether this worker has a part of the state."""
        return self.rank in self.ranks

    def gather_all(self, name: str, value: Any) -> Mapping[int, Any]:
        """The values of all holders, by rank.

        Raises:
            GivenUp: if one is lost.
        """
        others = [rank for rank in self.ranks if rank != self.rank]
        self._messages += 1
        question, answer = f"{name} {self._messages}", f"answer {self._messages}"
        if self.is_leader:
            found = {rank: value if rank == self.rank else self._take(rank, question) for rank in self.ranks}
            for rank in others:
                self._give(rank, answer, found)
            return found
        self._give(self.writer, question, value)
        return self._take(self.writer, answer)  # type: ignore[no-any-return]

    def send(self, value: Any) -> None:
        """Sends ``value`` to the writer, in pieces, as the writer takes them."""
        pieces = _Pieces(self)
        try:
            stream = io.BufferedWriter(pieces, _PIECE)
            torch.save(value, stream)
            stream.close()
        except RuntimeError:  # torch ends its archive after an exception of the stream, too, and finds a part missing
            if pieces.given_up is not None:
                raise pieces.given_up from None
            raise

    def receive(self, rank: int, path: Any) -> Any:
        """The value that ``rank`` sends; its tensors lie in a nameless file beside ``path``, or in TMPDIR if that is
        not on this machine.
        """
        spool = temporary_path(local_path(path) or Path(tempfile.gettempdir()) / "part")
        spool.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(spool, "xb") as file:
                number = 0
                while piece := self._take(rank, f"piece {number}"):
                    file.write(piece)
                    number += 1
                    self._give(rank, f"taken {number}", None)
            return torch.load(spool, map_location="cpu", mmap=True, weights_only=False)
        finally:
            spool.unlink(missing_ok=True)

    def fail(self, why: str) -> None:
        """Lets all other holders know that this one has given up."""
        for rank in self.ranks:
            if rank != self.rank:
                self.client.give(rank, self.number, f"{self.request} {_FAILED}", why)

    def confirm(self) -> None:
        """Returns if this worker may name a checkpoint.

        Raises:
            GivenUp: if all have given it up.
        """
        self.client.confirm(in_background=True)
        self._check()

    def _check(self) -> None:
        if not self.is_wanted:
            raise GivenUp("workers were lost meanwhile, or do not wait for it any more")

    def end(self) -> None:
        """Nothing is taken any more."""
        self.is_wanted = False
        self.client.forget_parcels(self.number)

    def _give(self, rank: int, key: str, value: Any) -> None:
        self._check()  # after ``value`` was made
        self.client.give(rank, self.number, f"{self.request} {key}", value)

    def _take(self, rank: int, key: str) -> Any:
        try:
            return self.client.take(rank, self.number, f"{self.request} {key}", self._since, self._goes_on)
        except Interrupted:
            raise GivenUp(self._why(rank)) from None

    def _goes_on(self) -> bool:
        return self.is_wanted and self.client.returns == self._returns and self._failed() is None

    def _failed(self) -> int | None:
        failed = f"{self.request} {_FAILED}"
        return next((rank for rank in self.ranks if self.client.has_parcel(rank, self.number, failed)), None)

    def _why(self, rank: int) -> str:
        failed = self._failed()
        if failed is not None:
            return str(self.client.take(failed, self.number, f"{self.request} {_FAILED}", self._since, lambda: True))
        if self.client.returns != self._returns:
            return "the coordinator was started again, and parts of it were under way"
        return f"the worker of rank {rank} was lost, which had a part of it"


class _Pieces(io.RawIOBase):
    """A file whose content goes to the writer; :attr:`given_up` is why no more of it does."""

    def __init__(self, group: HolderGroup) -> None:
        self._group, self._number = group, 0
        self.given_up: GivenUp | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        piece = bytes(memoryview(data)[:_PIECE])  # a copy of a whole tensor would keep Python's lock for too long
        self._send(piece)
        return len(piece)

    def close(self) -> None:
        if not self.closed:
            self._send(b"")
            super().close()

    def _send(self, piece: bytes) -> None:
        group = self._group
        group.pace.spend(len(piece))
        try:
            group._give(group.writer, f"piece {self._number}", piece)
            self._number += 1
            if self._number > _WINDOW:
                group._take(group.writer, f"taken {self._number - _WINDOW}")
        except GivenUp as error:
            self.given_up = error
            raise


# ---------------------------------------------------------------------- batches


@dataclass
class SaveRequest:
    """One checkpoint of a batch.

    Args:
        path: where it is to be.
        write: writes it together with the other holders; None if this worker has no part in it.
        failure: why it was not written.
        error: an exception of the user's code, such as of an object that cannot be pickled.
    """

    path: str
    write: Callable[[], WriteFailure | None] | None
    failure: WriteFailure | None = None
    error: BaseException | None = None


@dataclass(frozen=True)
class Action:
    """What follows when checkpoints are complete, on all workers.

    Args:
        name: the name by which :attr:`BackgroundSaves.actions` has it.
        paths: the checkpoints of the batch on which it depends.
        arguments: its arguments.
    """

    name: str
    paths: tuple[str, ...]
    arguments: tuple[Any, ...]


@dataclass
class Batch:
    """The checkpoints of one step boundary.

    Args:
        version: the number of steps.
        group: the holders; on all workers.
        copies: this holder's copies.
        requests: the checkpoints, in order.
        actions: what follows, in order.
        writing_seconds: how long this worker's thread has written.
    """

    version: int
    group: HolderGroup
    copies: StateCopies
    requests: list[SaveRequest] = field(default_factory=list)
    actions: list[Action] = field(default_factory=list)
    writing_seconds: float = 0.0
    _written: int = 0
    _thread: threading.Thread | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, request: SaveRequest) -> None:
        """Has ``request`` written after those before it."""
        with self._lock:
            self.requests.append(request)
            if request.write is not None and self._thread is None:
                self._thread = threading.Thread(target=self._run, name="recycle-checkpoint", daemon=True)
                self._thread.start()

    @property
    def is_written(self) -> bool:
        """Whether this worker has done its part."""
        with self._lock:
            return self._thread is None

    def _run(self) -> None:
        began = time.perf_counter()
        while True:
            with self._lock:
                if self._written == len(self.requests):
                    self.writing_seconds += time.perf_counter() - began
                    self._thread = None
                    break
                request = self.requests[self._written]
                self.group.request = self._written
                self._written += 1
            assert request.write is not None
            try:
                if not self.copies.finish():
                    raise GivenUp("the optimizer's state was changed between two steps")
                if not self.copies.are_originals:  # for which the training waits
                    self._yield()
                request.failure = request.write()
                continue
            except GivenUp as error:
                why = str(error)
            except BaseException as error:
                request.error = error
                why = f"{type(error).__name__}: {error}"
            request.failure = _given_up(request.path, why)
            with contextlib.suppress(Exception):
                self.group.fail(why)

    @staticmethod
    def _yield() -> None:
        """From now on this thread has a low priority. The training may wait for copies, but not for files."""
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOW_PRIORITY)  # on Linux: of this thread

    def raise_error(self) -> None:
        """Raises what the user's code has raised in the thread."""
        for error in [request.error for request in self.requests if request.error is not None]:
            raise error

    def report(self) -> BatchReport:
        """This worker's report to all."""
        is_written, group = self.is_written, self.group
        failures = tuple(request.failure for request in self.requests)
        paths = tuple(request.path for request in self.requests)
        holders = (*group.ranks, group.writer)
        return BatchReport(group.is_leader, holders, is_written, self.version, paths, failures, tuple(self.actions))


def _given_up(path: str, why: str) -> WriteFailure:
    return WriteFailure(f"The checkpoint {path} is given up: {why}.", is_refusal=False)


@dataclass(frozen=True)
class BatchReport:
    """What a worker knows of a batch.

    Args:
        writes: whether it is the writer.
        holders: who is to write.
        is_written: whether it has done its part.
        version: the number of steps.
        paths: the checkpoints.
        failures: why each was not written; None for one that was, or with which this worker had nothing to do.
        actions: what follows.
        facts: what it has measured.
    """

    writes: bool
    holders: tuple[int, ...]
    is_written: bool
    version: int
    paths: tuple[str, ...]
    failures: tuple[WriteFailure | None, ...]
    actions: tuple[Action, ...]
    facts: Any = None


CommonState: TypeAlias = tuple[bool, Mapping[int, int], dict[str, set[str]]]
"""Whether a batch is pending, how busy each worker is, and the names in folders: the same on all workers."""


class Consequences:
    """What follows from checkpoints that are asked for, when it is known whether they are complete.

    Attributes:
        actions: what may follow, by name. Called on all workers with why a checkpoint is not complete, or None, and
            :attr:`Action.arguments`.
    """

    def __init__(self) -> None:
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
        """What :meth:`follow` is called with within the block depends on all checkpoints that the block asks for."""
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
        """Has action ``name`` called with ``arguments`` when it is known whether the checkpoints are complete."""
        self._deferred[-1][1].append((name, arguments))

    def follow_first(self, name: str, *arguments: Any) -> None:
        """As :meth:`follow`, before all that was noted in the block."""
        self._deferred[-1][1].insert(0, (name, arguments))

    def settle(self, failures: Mapping[str, WriteFailure]) -> None:
        """Takes up what follows; ``failures``: of the checkpoints that were not written, by path."""
        noted, self._noted = self._noted, []
        for action in noted:
            failure = next((failures[path] for path in action.paths if path in failures), None)
            self.actions[action.name](failure, *action.arguments)


class BackgroundSaves(Consequences):
    """This worker's part in checkpoints that are written in the background.

    Args:
        context: the context of the worker.
        load: how busy this worker is with the current plan; the least busy one of a stage is its holder.

    Attributes:
        on_failures: called on all workers with the steps of a batch and why its checkpoints were not written, by path.
        measure: returns what this worker has measured, if its thread has written for so many seconds.
        on_facts: called on all workers with what those measured that took part in a batch.
        by_writer: what the writer does of them where a run ends before all know the outcome, by name.
        is_pending: whether a batch was begun whose outcome is not known yet; the same on all workers.
        names: of folders with checkpoints, the names in them; the same on all workers.
    """

    def __init__(self, context: WorkerContext, load: Callable[[], int]) -> None:
        super().__init__()
        self._collectives, self._options, self._load = context.collectives, context.options.checkpoints, load
        self._patience = self._options.signal_timeout  # of the next checkpoint with the one before
        self.on_failures: Callable[[int, Mapping[str, WriteFailure]], None] = lambda version, failures: None
        self.measure: Callable[[float], Any] = lambda seconds: None
        self.on_facts: Callable[[list[Any]], None] = lambda facts: None
        self.by_writer: dict[str, Callable[..., None]] = {}
        self.batch: Batch | None = None
        self.is_pending = False
        self.names: dict[str, set[str]] = {}
        self._loads: Mapping[int, int] = {}
        self._posted: Callable[[], Mapping[int, Any]] | None = None
        self._old_copies: StateCopies | None = None

    # ------------------------------------------------------------------ the next batch

    def begin(self, version: int) -> Batch | None:
        """The batch of the boundary after ``version`` steps; None if the one before is not complete. All call it."""
        if self.batch is not None and self.batch.version == version:
            return self.batch
        collectives = self._collectives
        # Who has just answered is newer than the generation, which this worker may not have entered yet.
        live = self._agree(self._patience) or collectives.live_workers
        if self.is_pending:
            return None
        collectives.settle()
        positions = collectives.positions
        ranks = [
            min((self._loads.get(rank, 0), rank) for rank in live if positions.stage(rank) == stage)[1]
            for stage in range(collectives.grid.stages)
        ]
        writer = ranks[-1]
        if not self._options.save_distributed_checkpoint:  # a file of the whole model
            writer = collectives.leader
            ranks[positions.stage(writer)] = writer
        number, bandwidth = collectives.client.member.next_collective, self._options.bandwidth
        pace = Pace(None if bandwidth is None else 1e6 * bandwidth)
        group = HolderGroup(collectives.client, positions, number, tuple(ranks), writer, pace)
        self.batch = Batch(version, group, StateCopies(self._old_copies))
        self.is_pending, self._old_copies = True, None
        return self.batch

    @property
    @override
    def noted(self) -> list[Action]:
        return [] if self.batch is None else self.batch.actions

    # ------------------------------------------------------------------ the batch before

    def finish_copies(self) -> None:
        """STEP is about to write what is still to be copied."""
        if self.batch is not None:
            self.batch.copies.finish()

    def post(self) -> None:
        """Early in a step: lets all others know what this worker knows of the batch, if there is one. They have posted
        theirs when this one has applied the step, as all have begun it.
        """
        if self.is_pending and self._posted is None:
            self._posted = self._collectives.client.post("checkpoint", self._known())

    @property
    def has_posted(self) -> bool:
        """Whether this worker has, in the current step."""
        return self._posted is not None

    def take_up(self) -> None:
        """After a step: takes up what follows from the batch, if it was complete when all began the step."""
        self.post()  # if a recovery has applied the step in this worker
        if self.batch is not None:
            self.batch.raise_error()
        if self._posted is not None:
            posted, self._posted = self._posted, None
            self._hear(posted())

    def state(self) -> CommonState:
        """The state that all workers have in common."""
        return self.is_pending, self._loads, self.names

    def enter(self, state: CommonState) -> None:
        """This worker enters a running training; ``state``: of its donor."""
        (self.is_pending, self._loads, self.names), self._posted = state, None

    def complete(self) -> None:
        """Waits for the batch, and takes up what follows from it; all workers call it."""
        self._agree(None)

    def await_originals(self) -> None:
        """Waits until the thread has written what it has no copies of, or a generation is announced in which they may
        change: then it is given up.
        """
        batch, client = self.batch, self._collectives.client
        if batch is not None and batch.copies.are_originals:
            with client.busy("writing a checkpoint"):
                while not (batch.is_written or client.interrupted):
                    time.sleep(_LOOK_SECONDS)
            batch.group.is_wanted = batch.is_written

    def await_thread(self) -> None:
        """The run is over: waits until this worker has done its part, as long as the next checkpoint would. The writer
        takes up what follows for the files.
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

    def _agree(self, patience: float | None) -> tuple[int, ...]:
        """At a boundary, if a batch is pending: waits for it, for ``patience`` seconds or without limit, and for all
        others, whose ranks it returns. They are asked first: a holder may wait for one that chose others.
        """
        batch = self.batch
        live: tuple[int, ...] = ()
        end = float("inf") if patience is None else time.monotonic() + patience
        for waits in (False, True):
            if not self.is_pending:
                break
            if batch is not None and waits:
                self._collectives.client.await_thread(
                    lambda: batch.is_written or time.monotonic() > end, "writing a checkpoint"
                )
            if batch is not None:
                batch.raise_error()
            found = self._collectives.gather_all("checkpoint", self._known())
            self._hear(found)
            live = tuple(found)
        return live

    def _known(self) -> tuple[int, BatchReport | None]:
        """What this worker lets all others know: its load, and its report."""
        if (batch := self.batch) is None:
            return self._load(), None
        return self._load(), replace(batch.report(), facts=self.measure(batch.writing_seconds))

    def _hear(self, found: Mapping[int, tuple[int, BatchReport | None]]) -> None:
        self._loads = {rank: load for rank, (load, _) in found.items()}
        reports = [one for _, (_, one) in sorted(found.items()) if one is not None]
        writers = [one for one in reports if one.writes]
        writer = next((one for one in writers if one.is_written and not any(one.failures)), None)
        if writer is None and len({one.holders for one in reports}) == 1 and writers:
            (writer,) = writers  # otherwise some did not know of a loss yet when they chose the holders
            if not writer.is_written:
                return
        self.is_pending = False
        if reports:
            self._end(reports[0], writer)
            self.on_facts([one.facts for one in reports])

    def _end(self, known: BatchReport, writer: BatchReport | None) -> None:
        """All know the outcome of the batch, those that came since it began, too."""
        batch, self.batch = self.batch, None
        if batch is not None:
            batch.group.end()
            if batch.is_written:
                self._old_copies = batch.copies
                batch.copies.forget_originals()
        lost = "the worker that wrote it was lost"
        failures = {
            path: _given_up(path, lost) if writer is None else failure
            for path, failure in zip(known.paths, (writer or known).failures, strict=True)
        }
        failed = {path: failure for path, failure in failures.items() if failure is not None}
        for action in known.actions:
            failure = next((failed[path] for path in action.paths if path in failed), None)
            self.actions[action.name](failure, *action.arguments)
        if failed:
            self.on_failures(known.version, failed)
