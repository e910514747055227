"""Checkpoints of one step boundary, written while the training goes on or waits.

They are a *batch*. One worker of each stage, its *holder*, writes a part in a thread; holders exchange messages. One of
them is the *writer*, which names each checkpoint once the coordinator knows that it is whole. The next batch, and the
end of the training, wait for it. The outcome comes with a message that all workers have
(:mod:`~lightning_recycle.control.protocol.control_collectives`), so all carry out the actions that follow at the same
place of their program. If the training goes on, holders copy their stage's state at the boundary, and checkpoints lost
with a holder are asked for again by the callbacks. If all wait, there are no copies, and the batch begins again with
other holders.

Contract: no wait of a thread outlives the worker that it waits for; an error in a thread becomes the outcome of its
checkpoint.
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
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_recycle.control.client import ControlClient
from lightning_recycle.control.protocol.control_collectives import batch_number
from lightning_recycle.control.protocol.member import Interrupted
from lightning_recycle.control.protocol.messages import SaveBegun, SaveEnded, SaveFailure, SaveStatus
from lightning_recycle.devices import DeviceThread, is_accelerator
from lightning_recycle.files import Pace, put_in_place_if_left, temporary_path
from lightning_recycle.planning.grid import Positions
from lightning_recycle.session.checkpoint_files import local_path
from lightning_recycle.session.optimizer_states import copied, fits
from lightning_recycle.session.worker_context import StageGroup, WorkerContext
from lightning_recycle.tensor_memory import has_plain_memory, to_cpu
from lightning_recycle.torch_internals import version_of

log = logging.getLogger(__name__)

_LARGE = 1 << 18  # bytes of a tensor whose copy is worth an entry in a list
_PIECE = 1 << 20  # bytes that are copied, or sent in one message, at once: other traffic waits meanwhile
_WINDOW = 4  # pieces under way
_FAILED = "failed"
_LOOK_SECONDS = 0.01
_LOW_PRIORITY = 10  # of a thread, as for nice: on a busy machine a writer with 19 may not finish before the next save


class StateCopies:
    """Copies of the tensors of one step boundary, on the CPU.

    Memory of the unused copies ``old`` of an earlier boundary is used again. Large tensors that only STEP writes are
    copied after the boundary, piece by piece, by the thread that writes them, and at the latest by the training before
    its next STEP. ``are_originals``: there is no memory for copies: they are the tensors themselves.
    """

    def __init__(self, old: StateCopies | None = None, are_originals: bool = False) -> None:
        self.are_originals = are_originals
        self._memory: dict[Any, Tensor] = {} if old is None else old._by_place
        self._by_place: dict[Any, Tensor] = {}
        self._copies: dict[Any, tuple[Tensor, Tensor]] = {}  # with the original, so that its address stays its own
        self._uncopied: deque[tuple[Tensor, Tensor, int]] = deque()  # pieces: original, copy, the original's version
        self._changed, self._under_way, self._is_torn = threading.Condition(), 0, False

    def limit(self, needed: int, free: float) -> bool:
        """Whether copies of ``needed`` bytes in all fit into ``free`` bytes of new memory."""
        copied_bytes = sum(
            copy.nbytes for copy in (*self._memory.values(), *(copy for _, copy in self._copies.values()))
        )
        self.are_originals = needed - copied_bytes > free
        if self.are_originals:
            self._memory.clear()
        return not self.are_originals

    def take(self, value: Any, place: tuple[Any, ...] = (), until_step: bool = False) -> Any:
        """A copy of ``value``.

        A tensor that was copied already, and not written since, has the same copy. ``place``: of ``value`` in the
        state, where its copy was at an earlier boundary. ``until_step``: whether nothing writes large tensors before
        the next STEP, so that :meth:`finish` copies them.
        """
        if isinstance(value, Tensor):
            return self._copy(value, place, until_step)
        if isinstance(value, Mapping):
            return {key: self.take(item, (*place, key), until_step) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self.take(item, (*place, n), until_step) for n, item in enumerate(value))
        return deepcopy(value)

    def finish(self) -> bool:
        """Makes the remaining copies, together with the other thread.

        Returns when all are made, and whether they are of the boundary: no original was written before.
        """
        while True:
            with self._changed:
                if not self._uncopied:
                    self._changed.wait_for(lambda: not self._under_way)
                    return not self._is_torn
                original, copy, version = self._uncopied.popleft()
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
        """The boundary is over: later copies are of another one."""
        self._copies.clear()

    def _copy(self, tensor: Tensor, place: tuple[Any, ...], until_step: bool) -> Tensor:
        if self.are_originals:
            return tensor.detach()
        is_plain = has_plain_memory(tensor) and not is_accelerator(tensor.device)
        if not is_plain or tensor.is_inference():  # which has no version
            return tensor.detach().clone().cpu()
        key = (tensor.data_ptr(), version_of(tensor), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        entry = self._copies.get(key)
        if entry is None:
            entry = self._copies[key] = (tensor, self._new_copy(tensor, self._memory.pop(place, None), until_step))
        self._by_place[place] = entry[1]
        return entry[1]

    @torch.no_grad()
    def _new_copy(self, tensor: Tensor, old: Tensor | None, until_step: bool) -> Tensor:
        if not (until_step and tensor.nbytes >= _LARGE and tensor.is_contiguous()):
            copy: Tensor = copied(tensor.detach(), old)
            return copy
        copy = old if old is not None and fits(old, tensor) and old.is_contiguous() else torch.empty_like(tensor)
        size = _PIECE // tensor.itemsize
        pieces = zip(tensor.detach().view(-1).split(size), copy.view(-1).split(size), strict=True)
        with self._changed:
            self._uncopied.extend((*piece, version_of(tensor)) for piece in pieces)
        return copy


class GivenUp(Exception):
    """Why a checkpoint cannot be completed."""


@dataclass
class HolderGroup(StageGroup):
    """Messages between the holders of one batch, from their threads.

    ``ranks``: the holder of each column; the first one of the last stage is the writer. ``since``: a generation in
    which they were alive. ``request``: the index of the checkpoint that is being written. ``is_wanted``: whether all
    others still wait for the batch.
    """

    client: ControlClient
    positions: Positions
    number: int
    version: int
    ranks: tuple[int, ...]
    since: int
    pace: Pace = field(default_factory=Pace)
    request: int = 0
    is_wanted: bool = True
    _messages: int = 0

    def __post_init__(self) -> None:
        self.rank, self.writer = self.client.rank, self.ranks[-self.positions.members]
        self._changes_before = self.client.coordinator_changes

    @property
    @override
    def is_leader(self) -> bool:
        return self.rank == self.writer

    @property
    @override
    def is_column_leader(self) -> bool:
        return self.rank in self.ranks

    @override
    def gather_all(self, name: str, value: Any) -> Mapping[int, Any]:
        """The values of all holders, by rank; raises GivenUp if one is lost."""
        others = [rank for rank in self.ranks if rank != self.rank]
        self._messages += 1
        question, answer = f"{name} {self._messages}", f"answer {self._messages}"
        if self.is_leader:
            contributions = {rank: self._take(rank, question) for rank in others}
            values = {rank: self._of_this_step(*part) for rank, part in contributions.items()}
            values[self.rank] = value
            for rank in others:
                self._give(rank, answer, values)
            return values
        self._give(self.writer, question, (self.version, value))
        return self._take(self.writer, answer)  # type: ignore[no-any-return]

    def _of_this_step(self, version: int, value: Any) -> Any:
        if version != self.version:
            raise GivenUp(f"a worker gave its state after {version} steps, and it is to hold {self.version}")
        return value

    def send(self, value: Any) -> None:
        """Sends ``value`` to the writer, in pieces, as the writer takes them."""
        pieces = _StreamedFile(self)
        try:
            stream = io.BufferedWriter(pieces, _PIECE)
            torch.save((self.version, value), stream)
            stream.close()
        except RuntimeError:  # torch ends its archive after an exception of the stream, too, and finds a part missing
            if pieces.given_up is not None:
                raise pieces.given_up from None
            raise

    def receive(self, rank: int, path: Any) -> Any:
        """The value that ``rank`` sends, its tensors in a nameless file beside ``path``.

        Or in TMPDIR if that is not on this machine.
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
            return self._of_this_step(*torch.load(spool, map_location="cpu", mmap=True, weights_only=False))
        finally:
            spool.unlink(missing_ok=True)

    def fail(self, why: str) -> None:
        """Lets all other holders know that this one has given up."""
        for rank in self.ranks:
            if rank != self.rank:
                self.client.send_parcel(rank, self.number, f"{self.request} {_FAILED}", why)

    def await_permission(self, temporary: Path | None = None) -> None:
        """Waits until this worker may write on; raises GivenUp if its part is not wanted.

        ``temporary``: the path of the whole file, which is announced: from then on it counts.
        """
        self._check()
        if temporary is None:
            self.client.await_membership()
        else:
            self.client.await_naming(self.number, self.request, os.path.abspath(temporary))

    def _check(self) -> None:
        if not self.is_wanted:
            raise GivenUp("workers were lost meanwhile, or do not wait for it any more")

    def end(self) -> None:
        """Makes this worker's thread give up its part, and drops parcels of the batch."""
        self.is_wanted = False
        self.client.forget_parcels(self.number)

    def _give(self, rank: int, key: str, value: Any) -> None:
        self._check()  # after ``value`` was made
        self.client.send_parcel(rank, self.number, f"{self.request} {key}", value)

    def _take(self, rank: int, key: str) -> Any:
        try:
            return self.client.receive_parcel(rank, self.number, f"{self.request} {key}", self.since, self._goes_on)
        except Interrupted:
            raise GivenUp(self._reason(rank)) from None

    def _goes_on(self) -> bool:
        return self.is_wanted and self.client.coordinator_changes == self._changes_before and self._failed() is None

    def _failed(self) -> int | None:
        failed = f"{self.request} {_FAILED}"
        return next((rank for rank in self.ranks if self.client.has_parcel(rank, self.number, failed)), None)

    def _reason(self, rank: int) -> str:
        failed = self._failed()
        if failed is not None:
            return str(
                self.client.receive_parcel(failed, self.number, f"{self.request} {_FAILED}", self.since, lambda: True)
            )
        if self.client.coordinator_changes != self._changes_before:
            return "the coordinator was started again, and parts of it were under way"
        return f"the worker of rank {rank} was lost, which had a part of it"


class _StreamedFile(io.RawIOBase):
    """A file object that streams a part of a checkpoint to the writer."""

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


@dataclass
class SaveRequest:
    """One checkpoint of a batch.

    ``write``: writes it together with the other holders; None if this worker can have no part in it. ``error``: an
    exception of the user's code, such as of an object that cannot be pickled.
    """

    path: str
    write: Callable[[], SaveFailure | None] | None
    weights_only: bool = False
    is_new: bool = False
    failure: SaveFailure | None = None
    error: BaseException | None = None


@dataclass(frozen=True)
class Action:
    """Action ``name`` of all workers once the checkpoints ``paths`` are complete."""

    name: str
    paths: tuple[str, ...]
    arguments: tuple[Any, ...]


def settle_files(actions: Iterable[Action], functions: Mapping[str, Callable[..., None]]) -> None:
    """Carries out actions on files by ``functions``, at the end of a run or after it."""
    for action in actions:
        if action.name in functions:
            try:
                functions[action.name](*action.arguments)
            except OSError as error:
                log.warning("After the last checkpoint of the run a file is not as it should be: %s.", error)


@dataclass
class CheckpointBatch:
    """The checkpoints of one step boundary.

    ``waits``: whether all workers wait for it. ``ended``: called in the writer's thread after each checkpoint with its
    index, and why there is none.
    """

    version: int
    group: HolderGroup
    copies: StateCopies
    waits: bool
    ended: Callable[[int, SaveFailure | None], None]
    requests: list[SaveRequest] = field(default_factory=list)
    actions: list[Action] = field(default_factory=list)
    refusals: dict[str, SaveFailure] = field(default_factory=dict)
    is_sealed: bool = False
    mid_step: bool = False
    is_written: bool = False
    """Whether this worker has done its part."""

    def start(self) -> None:
        """Begins to write the batch, if this worker has a part in it."""
        self.is_sealed, self.is_written = True, not self.group.is_column_leader
        if not self.is_written:
            DeviceThread(self._run, "recycle-checkpoint").start()

    def _run(self) -> None:
        for index, request in enumerate(self.requests):
            self.group.request = index
            request.failure = self._write(request)
            if self.group.is_leader:
                self.ended(index, request.failure)
        self.is_written = True

    def _write(self, request: SaveRequest) -> SaveFailure | None:
        assert request.write is not None
        try:
            if not self.copies.finish():
                raise GivenUp("the optimizer's state was changed between two steps")
            if not self.copies.are_originals:  # for which the training waits
                thread = threading.get_native_id()
                with contextlib.suppress(OSError):
                    os.setpriority(os.PRIO_PROCESS, thread, _LOW_PRIORITY)  # on Linux: of this thread
            return request.write()
        except GivenUp as error:
            why = str(error)
        except BaseException as error:
            request.error = error
            why = f"{type(error).__name__}: {error}"
        with contextlib.suppress(Exception):  # the others wait no longer than this worker lives
            self.group.fail(why)
        return SaveFailure(f"The checkpoint {request.path} is given up: {why}.")

    def raise_error(self) -> None:
        """Raises the exception of the user's code in the thread."""
        for error in [request.error for request in self.requests if request.error is not None]:
            raise error


@dataclass
class PendingCheckpoints:
    """A batch without known outcome yet; ``new``: its paths that replace nothing."""

    number: int
    paths: tuple[str, ...]
    new: frozenset[str]
    actions: tuple[Action, ...]


@dataclass(frozen=True)
class CommonState:
    """State of background checkpoints that all workers have in common.

    ``given_up``: to be asked for again at the next boundary. ``unnamed``: temporary paths and names of whole files
    whose writer was lost. ``names``: of the checkpoints in each known folder.
    """

    status: SaveStatus
    batches: int
    pending: PendingCheckpoints | None
    given_up: tuple[Any, ...]
    unnamed: tuple[tuple[str, str], ...]
    names: Mapping[str, set[str]]


class CheckpointBatches:
    """This worker's part in the checkpoints of a run, batch by batch.

    ``actions``: consequences of checkpoints, by name; called on all workers with why a checkpoint is not complete, or
    None, and :attr:`Action.arguments`. ``by_writer``: those that the writer carries out where a run ends before all
    know the outcome. ``stalled``: returns for how many seconds checkpoints have held up this worker so far. ``failed``:
    called on all workers with the reason of each missing checkpoint. ``discard``: called on the leader with the path of
    a new checkpoint that was given up.

    The same on all workers: ``pending``: the batch that has begun and has no known outcome; ``given_up``: checkpoints
    to be asked for again at the next boundary; ``names``: of the checkpoints in each known folder.
    """

    def __init__(
        self,
        context: WorkerContext,
        actions: Mapping[str, Callable[..., None]],
        by_writer: Mapping[str, Callable[..., None]],
        stalled: Callable[[], float],
        failed: Callable[[SaveFailure], None],
        discard: Callable[[str], None],
    ) -> None:
        self._collectives, self._options = context.collectives, context.options.checkpoints
        self._client, self._actions, self._by_writer = context.client, actions, by_writer
        self._stalled, self._failed, self._discard = stalled, failed, discard
        self._patience = self._options.signal_timeout  # of the next checkpoint with the one before
        self._deferred: list[tuple[list[str], list[tuple[str, tuple[Any, ...]]]]] = []
        self.batch: CheckpointBatch | None = None
        self.pending: PendingCheckpoints | None = None
        self.given_up: tuple[Any, ...] = ()
        self.names: dict[str, set[str]] = {}
        self._deletions: list[Action] = []  # of the newest batch with a known outcome
        self._batches = 0
        self._unnamed: tuple[tuple[str, str], ...] = ()
        self._old_copies: StateCopies | None = None

    # ------------------------------------------------------------------ what follows

    @property
    def noted(self) -> list[Action]:
        """Consequences of the checkpoints that were asked for."""
        return [] if self.batch is None or self.batch.is_sealed else self.batch.actions

    @property
    def is_deferring(self) -> bool:
        """Whether consequences of checkpoints are noted, not carried out."""
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
        """Makes actions noted in the open blocks depend on the checkpoint ``path``."""
        for paths, _ in self._deferred:
            paths.append(path)

    def call_when_known(self, name: str, *arguments: Any) -> None:
        """Calls action ``name`` once the outcome of the checkpoints is known."""
        self._deferred[-1][1].append((name, arguments))

    def call_first_when_known(self, name: str, *arguments: Any) -> None:
        """As :meth:`call_when_known`, before all that was noted in the block."""
        self._deferred[-1][1].insert(0, (name, arguments))

    def _carry_out(self, actions: Iterable[Action], failures: Mapping[str, SaveFailure]) -> None:
        for action in actions:
            failure = next((failures[path] for path in action.paths if path in failures), None)
            self._actions[action.name](failure, *action.arguments)

    # ------------------------------------------------------------------ the next batch

    def begin(self, version: int, waits: bool) -> CheckpointBatch | None:
        """The batch of the boundary after ``version`` steps, which :meth:`seal` completes.

        None if the one before is not over in time. All call it; ``waits``: whether all wait for the new one.
        """
        if self.batch is not None and not self.batch.is_sealed:
            return self.batch
        self._await_outcome(None if waits else self._patience)
        if self.pending is not None:
            return None
        copies = StateCopies(None if waits else self._old_copies, are_originals=waits)
        self.batch = CheckpointBatch(version, self._new_group(version, waits), copies, waits, self._ended)
        if not waits:
            self._old_copies = None
        return self.batch

    def _new_group(self, version: int, waits: bool) -> HolderGroup:
        while not self._client.member.saves.holders:  # before the first step
            self._collectives.barrier("checkpoint")
        self._collectives.confirm_step()
        status, bandwidth = self._client.member.saves, None if waits else self._options.bandwidth
        number, pace = batch_number(status, self._batches), Pace(None if bandwidth is None else 1e6 * bandwidth)
        holders = (status.holders, status.generation)
        return HolderGroup(self._client, self._collectives.positions, number, version, *holders, pace)

    def seal(self, mid_step: bool) -> None:
        """Begins to write the checkpoints asked for since :meth:`begin`; all call it.

        ``mid_step``: before the end of the step.
        """
        batch = self.batch
        if batch is None or batch.is_sealed:
            return
        if not batch.requests:
            self.batch = None
            self._use_memory_of(batch)
            self._carry_out(batch.actions, {})
            return
        batch.mid_step = mid_step
        self._start(batch)
        if batch.waits:
            self._await_outcome(None)

    def _start(self, batch: CheckpointBatch) -> None:
        paths = tuple(request.path for request in batch.requests)
        new = frozenset(request.path for request in batch.requests if request.is_new)
        self.pending = PendingCheckpoints(batch.group.number, paths, new, tuple(batch.actions))
        self._batches += 1
        weights_only = tuple(request.weights_only for request in batch.requests)
        facts = (batch.version, batch.group.writer, paths, weights_only, batch.mid_step, not batch.waits)
        self._client.send(SaveBegun(self._client.rank, self.pending.number, *facts, self._stalled()))
        batch.start()

    def _use_memory_of(self, batch: CheckpointBatch) -> None:
        if not batch.waits:
            self._old_copies = batch.copies

    def _ended(self, index: int, failure: SaveFailure | None) -> None:
        batch = self.batch
        assert batch is not None
        self._client.send(SaveEnded(self._client.rank, batch.group.number, index, failure, self._stalled()))

    # ------------------------------------------------------------------ the batch before

    def finish_copies(self) -> None:
        """Finishes the copies before STEP writes the tensors."""
        if self.batch is not None:
            self.batch.copies.finish()

    def apply_outcome(self) -> None:
        """Carries out a batch's actions after the step that came with its outcome."""
        if self.batch is not None:
            self.batch.raise_error()
        self._apply_outcome()

    def state(self) -> CommonState:
        pending, status = self.pending, self._client.member.saves
        if pending is not None:
            actions = (replace(action, arguments=to_cpu(action.arguments)) for action in pending.actions)
            pending = replace(pending, actions=tuple(actions))
        return CommonState(status, self._batches, pending, to_cpu(self.given_up), self._unnamed, self.names)

    def enter(self, state: CommonState) -> None:
        """This worker enters a running training, with the ``state`` of its donor."""
        self._client.member.saves = state.status
        self._batches, self.pending, self.given_up = state.batches, state.pending, state.given_up
        self._unnamed, self.names = state.unnamed, dict(state.names)

    def complete(self) -> None:
        """Waits for the batch and carries out its actions; all workers call it."""
        self._await_outcome(None)

    def await_originals(self) -> None:
        """Waits until the thread has written tensors of which there are no copies.

        Or until a generation is announced in which they may change: then the checkpoint is given up.
        """
        batch, client = self.batch, self._client
        if batch is not None and batch.copies.are_originals:
            with client.busy("writing a checkpoint"):
                while not (batch.is_written or client.is_interrupted):
                    time.sleep(_LOOK_SECONDS)
            batch.group.is_wanted = batch.is_written

    def await_thread(self) -> None:
        """Waits at the end of the run until this worker has done its part.

        For as long as the next checkpoint would wait. The writer carries out the actions on files.
        """
        deadline = time.monotonic() + self._patience
        while (batch := self.batch) is not None and batch.is_sealed and not batch.is_written:
            if time.monotonic() >= deadline:
                break
            time.sleep(_LOOK_SECONDS)
        if batch is None or not (batch.group.is_leader and batch.is_written):
            return
        written = {request.path for request in batch.requests if request.failure is None}
        settle_files([action for action in batch.actions if written.issuperset(action.paths)], self._by_writer)

    def take_over(self) -> None:
        """The next leader names and deletes the files that the lost one may have left."""
        self.name_files()
        written = () if self.pending is None else self.pending.paths
        settle_files([action for action in self._deletions if action.arguments[0] not in written], self._by_writer)

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

    def _await_outcome(self, patience: float | None) -> None:
        """Waits for the pending batch, for ``patience`` seconds or without limit."""
        end = float("inf") if patience is None else time.monotonic() + patience
        while self.pending is not None:
            if (batch := self.batch) is not None:
                self._client.await_background_work(
                    lambda batch=batch: batch.is_written or time.monotonic() > end,  # type: ignore[misc]
                    "writing a checkpoint",
                )
                batch.raise_error()
            self._collectives.barrier("checkpoint")
            self._apply_outcome()
            if patience is not None:
                return

    def _apply_outcome(self) -> None:
        """Carries out the batch's actions, if the newest status has its outcome."""
        status, pending = self._client.member.saves, self.pending
        if pending is None or status.batch != pending.number:
            return
        batch, self.batch, self.pending = self.batch, None, None
        outcomes = zip(pending.paths, status.failures, strict=True)
        failed = {path: why for path, why in outcomes if why is not None}
        self._unnamed = tuple((temporary, pending.paths[index]) for index, temporary in status.unnamed.items())
        self.name_files()
        for path in pending.new & failed.keys() if self._collectives.is_leader else ():
            self._discard(path)
        if batch is not None:
            batch.group.end()
            if batch.waits and self._begin_again(batch, failed):
                return
            failed |= batch.refusals
            if batch.is_written:
                self._use_memory_of(batch)
                batch.copies.forget_originals()
        self._deletions = [a for a in pending.actions if a.name == "remove" and failed.keys().isdisjoint(a.paths)]
        self._carry_out(pending.actions, failed)
        for failure in failed.values():
            self._failed(failure)

    def _begin_again(self, batch: CheckpointBatch, failed: Mapping[str, SaveFailure]) -> bool:
        """Begins with checkpoints given up for lost workers, if there are any."""
        batch.refusals |= {path: why for path, why in failed.items() if why.is_refusal}
        requests = [request for request in batch.requests if request.path in failed.keys() - batch.refusals.keys()]
        if requests:
            self.batch, batch.requests = batch, requests
            batch.group = self._new_group(batch.version, waits=True)
            self._start(batch)
        return bool(requests)
