"""A worker's side of the control plane.

Threads share one connection: the main thread asks and waits; a receiver takes the coordinator's messages and interrupts
the data plane the moment a new generation is announced; a heartbeat thread reports that the process lives and what it
does; connecting and checkpoint threads ask, too. Without a coordinator the worker ends, unless another one may take
over (:class:`~lightning_recycle.control.protocol.messages.Enrolled`): then the receiver looks for it and reports this
worker's state, while the main thread merely waits.

A worker that joins a running training is alone at first: its control collectives are answered with its own part. Once
it is set up it announces so (:meth:`ControlClient.wait_to_enter`) and becomes a member at the next step boundary.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import pickle
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

from lightning_recycle.control.network.addresses_and_keys import shown
from lightning_recycle.control.network.connection import SIGN_SECONDS, BadMessageError, connect, connections
from lightning_recycle.control.protocol import messages
from lightning_recycle.control.protocol.member import Interrupted, Member
from lightning_recycle.control.protocol.messages import Activity, Payload, StopReason, WorkerStatus
from lightning_recycle.errors import ConfigurationError, ControlPlaneError
from lightning_recycle.planning.program import Program
from lightning_recycle.processes import process_space

log = logging.getLogger(__name__)

EXIT_RAISED = 1  # the same as for an exception in the main thread
EXIT_STOPPED = 75  # told to leave; BSD's EX_TEMPFAIL
EXIT_LOST_COORDINATOR = 69  # BSD's EX_UNAVAILABLE
EXIT_INTERRUPTED = 130  # by Ctrl-C, as shells count: 128 + its number
EXIT_LEFT = 143  # left at a step boundary because SIGTERM asked for it: 128 + its number

_POLL_SECONDS = 0.1  # between two checks of conditions whose change notifies no waiting thread
_QUIET_SECONDS = 2 * SIGN_SECONDS  # of a silent coordinator; longer silence does not count as waiting for its answers
_LOSS_TIMEOUT = 300.0  # seconds; it is sent before the gradients that lead to a step

_T = TypeVar("_T")


class _RunIsOver(BaseException):
    """Ends a wait of the main thread: the run is over, so no answer will come."""


class ActivityRecorder:
    """Record of the main thread's activity or wait, sent by the heartbeat thread.

    The coordinator judges by it which worker holds up the others
    (:mod:`~lightning_recycle.control.coordinator.failure_detector`). Written by the main thread before it acts, read
    by any; a record is immutable.
    """

    def __init__(self) -> None:
        self._activity = Activity(0, "start"), time.monotonic()
        self._outer: list[Activity] = []  # those around the present one
        self._block = _Block(self)

    @property
    def activity(self) -> Activity:
        return self._activity[0]

    def doing(self, step: int, operation: str, kind: str = "", microbatch: int = -1) -> None:
        """Records what the main thread does from now on.

        ``operation``: for people. ``kind``: set if it has a usual duration; no user's hook may run in it.
        ``microbatch``: index in the global batch; -1 for none.
        """
        self._activity = Activity(step, operation, "", kind, microbatch=microbatch), time.monotonic()

    def busy(self, operation: str, kind: str = "") -> AbstractContextManager[None]:
        """Records another activity until the ``with`` block of this call ends.

        The earlier one is timed afresh after it.
        """
        outer = self._activity[0]
        self._outer.append(outer)
        self._activity = Activity(outer.step, operation, "", kind), time.monotonic()
        return self._block

    def waiting(self, what: str, coordinated: bool = False) -> AbstractContextManager[None]:
        """As :meth:`busy`, for a wait in the present activity.

        ``coordinated``: the coordinator is waited for.
        """
        outer = self._activity[0]
        self._outer.append(outer)
        activity = Activity(outer.step, outer.operation, what, "", coordinated, outer.microbatch)
        self._activity = activity, time.monotonic()
        return self._block

    def progressed(self) -> None:
        """Records progress in the current activity or wait."""
        self._activity = self._activity[0], time.monotonic()


class _Block:
    """Context manager that ends the innermost activity of a recorder; shared by all."""

    def __init__(self, recorder: ActivityRecorder) -> None:
        self._recorder = recorder

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._recorder._activity = self._recorder._outer.pop(), time.monotonic()


class ControlClient(ActivityRecorder):
    """A worker's connection to the coordinator.

    Args:
        rank: None if the coordinator assigns it (:meth:`await_assignment`).
        address: (host, port) of the coordinator.
        heartbeat_interval: seconds.
        joining: whether the training may have begun.
        survives: whether the process goes on once the results of the run are delivered.
        node: this machine; by default its host name.
        wants: the run that this worker's script asks for, if it was started by hand.
        patience: seconds for which the successor of a lost coordinator is looked for.

    Callbacks: ``on_interrupt``, which the executor sets to ``Communicator.abort``, runs in the receiver thread when a
    generation is announced, with the number of the one that ends and the workers with which this one may be in a hook
    that must not end. ``regroup`` runs in the main thread while it waits in :meth:`arrive`, ``on_leader`` when the
    leader may have changed, ``complete_saves`` in the thread that ends this process without a result.
    """

    def __init__(
        self,
        rank: int | None,
        address: tuple[str, int],
        authkey: bytes,
        heartbeat_interval: float,
        joining: bool = False,
        survives: bool = False,
        node: str = "",
        wants: messages.RunRequest | None = None,
        patience: float = 0.0,
    ) -> None:
        self.member = Member(-1 if rank is None else rank, joining, survives_coordinator_loss=patience > 0)
        self._survives = survives
        super().__init__()
        self.on_interrupt: Callable[[int, Collection[int]], None] | None = None
        self.regroup: Callable[[], None] | None = None
        self.on_leader: Callable[[], None] = lambda: None
        self.heartbeat_interval = heartbeat_interval
        self._address, self._authkey, self._patience = address, authkey, patience
        self._enrolled: messages.Enrolled | None = None
        self._is_reconnecting, self._reconnected_at = False, 0.0  # time.monotonic()
        self._connection = connect(address, authkey)
        self._changed = threading.Condition()
        self._leaving = False
        self._status = 0  # of a process that leaves
        self._was_asked_to_leave = False
        self._is_over = False  # the run has finished, and this process goes on
        self.complete_saves: Callable[[], None] | None = None
        self._is_finishing_saves = False  # after a run that ended otherwise
        self._parcels: dict[tuple[int, int, str], messages.Payload | None] = {}  # by batch, sender and key
        self._newest_query = -1  # number of the newest question whether this worker is a member
        self._is_in_hook = False
        self.coordinator_changes = 0  # parcels are lost with a coordinator
        self._wake_heartbeat = threading.Event()
        self._requests: deque[messages.Leave | messages.EndRun] = deque()  # of signal handlers
        self.node = node or socket.gethostname()
        process = messages.Process(os.urandom(8).hex(), os.getpid(), self.node, process_space())
        self._hello = messages.Hello(rank, process, joining, wants)
        self.send(self._hello)
        for target in (self._receive, self._beat):
            name = f"recycle-{target.__name__.strip('_')}"
            threading.Thread(target=self._guarded, args=(target,), name=name, daemon=True).start()

    # ------------------------------------------------------------------ what is known

    @property
    def rank(self) -> int:
        return self.member.rank

    @property
    def is_joining(self) -> bool:
        """Whether this worker has yet to enter a training that may have begun."""
        return self.member.is_joining

    @property
    def generation(self) -> int:
        return self.member.generation

    @property
    def is_interrupted(self) -> bool:
        """Whether a newer generation than the entered one is announced."""
        return self.member.is_interrupted

    @property
    def local_host(self) -> str:
        """The address of this machine as the coordinator reaches it."""
        return self._connection.local_host

    def key_for(self, purpose: str) -> bytes:
        """A key for ``purpose`` that only workers of this run can derive."""
        return hmac.digest(self._authkey, purpose.encode(), "sha256")

    # ------------------------------------------------------------------ main thread

    def send(self, message: Any) -> None:
        """Sends ``message``; lost without a coordinator.

        Messages that must arrive are repeated to the next one (:mod:`~lightning_recycle.control.journal`).
        """
        with self._changed:
            if self._is_finishing_saves:
                return  # nobody listens any more
            self.member.record_sent(message)
            connection = self._connection
        try:
            connection.send(message)
        except OSError:
            if not self._may_reconnect:
                self._exit("lost its connection to the coordinator", EXIT_LOST_COORDINATOR)
            # The receiver thread sees it, too, and looks for the next one.

    def enter_generation(self) -> messages.Regroup:
        with self._changed:
            return self.member.enter()

    def begin_step(self, step: int) -> Program | None:
        """Begins ``step``; waits if all stop at its beginning, for a change of any kind.

        Returns this worker's program if all switch to another schedule with this step, None otherwise. Raises
        Interrupted when a generation was announced.
        """
        while True:
            with self._changed:
                answer = self.member.begin(step)
            for reply in answer.replies:
                self.send(reply)
            if answer.pause is None:
                return answer.program
            self._wait(
                lambda pause=answer.pause: self.member.pause != pause or None,  # type: ignore[misc]
                "the change at a step boundary",
                interruptible=True,
            )

    def wait_to_enter(self) -> None:
        """Reports that this worker is set up, and waits until it may enter."""
        self.send(messages.Ready(self.rank))
        self._wait(lambda: self.is_interrupted or None, "a step boundary to enter at")
        self.member.is_joining = False

    def request_leave(self, with_run: bool = False) -> None:
        """Asks to leave at the next step boundary; callable from a signal handler.

        ``with_run``: see :class:`~lightning_recycle.control.protocol.messages.Leave`.
        """
        self._was_asked_to_leave = True
        self._requests.append(messages.Leave(self.rank, with_run))
        self._wake_heartbeat.set()

    def request_end(self) -> None:
        """Asks that all end after the present step; callable from a signal handler."""
        self._requests.append(messages.EndRun(self.rank))
        self._wake_heartbeat.set()

    def await_membership(self) -> None:
        """Waits for confirmation that this worker is a member; else ends the process.

        Called, beside the training thread, before anything that only a member may do.
        """
        self._await_confirmation(lambda number: messages.MembershipQuery(self.rank, number))

    def await_naming(self, batch: int, index: int, temporary: str) -> None:
        """Announces a whole checkpoint file; waits until this member may give it its name.

        Ends the process otherwise, like :meth:`await_membership`. Arguments as of :class:`.SaveAnnounced`.
        """
        self._await_confirmation(lambda number: messages.SaveAnnounced(self.rank, number, batch, index, temporary))

    def _await_confirmation(self, question: Callable[[int], Any]) -> None:
        with self._changed:
            self._newest_query = number = max(self._newest_query, self.member.confirmed_query) + 1
        self.send(question(number))
        what = "confirmation that it is a member"
        self._wait(lambda: self.member.confirmed_query >= number or self._is_finishing_saves or None, what, shown=False)

    def await_assignment(self) -> messages.Assign:
        """Waits for a position to become free and takes it.

        Raises ConfigurationError if the run is another one than this worker's script wants.
        """
        self._wait(lambda: self.member.assignment or self.member.unfit, "a free position")
        if self.member.assignment is not None:
            return self.member.assignment
        unfit = self.member.unfit
        assert unfit is not None
        if unfit.late:
            log.warning("This worker came too late and ends: %s", unfit.why)
            self._exit("came too late", EXIT_STOPPED)
        raise ConfigurationError(unfit.why)

    def await_announcement(self, timeout: float | None) -> None:
        """Waits for a newer generation; raises ControlPlaneError after ``timeout`` s."""
        self._wait(lambda: self.is_interrupted or None, "a new generation", timeout=timeout)

    def await_verdict(self, step: int, operation: str, error: Exception, exact: bool, sticky: bool) -> bool:
        """Reports a suspected exception and waits; whether it is the user's own.

        If not, this worker repeats the work in a newer generation. Does not return if this worker is evicted. Arguments
        as in :class:`~lightning_recycle.control.protocol.messages.Raised`.
        """
        summary, text = describe_error(error)
        self.send(messages.Raised(self.rank, self.generation, step, operation, summary, text, exact, sticky))
        return self._wait(self.member.exception_verdict, "a verdict on its exception").own

    def report_and_wait(self, status: WorkerStatus, payload: Any = None, cuts: messages.Cuts = ()) -> messages.Resume:
        """Reports for the entered generation; waits for the decision on how all go on.

        ``payload``: the contribution to the commit of its step, if REDUCED. ``cuts``: its layout. Raises Interrupted
        when a newer generation was announced meanwhile.
        """
        self.send(messages.Report(self.rank, self.generation, status, pack(payload), self.member.begun, cuts))
        return self._wait(self.member.resume_message, "the others to report", interruptible=True)

    def commit(self, step: int, payload: Any) -> dict[int, Any]:
        """Contributes to the commit of ``step``, and waits; returns payloads by column.

        Raises Interrupted when a generation was announced before that.
        """
        self.send_commit(step, payload, speculative=False)
        return unpack_all(self.await_committed(step).payloads)

    def send_commit(self, step: int, payload: Any, speculative: bool) -> None:
        """As :meth:`commit`, without waiting; ``speculative``: does not wait later either."""
        self.send(messages.Commit(self.rank, self.generation, step, pack(payload), speculative))

    def commit_answer(self, step: int) -> messages.Committed | None:
        """The answer that every live worker has contributed to ``step``; None before."""
        return self.member.commit_answer(step)

    def await_committed(self, step: int) -> messages.Committed:
        """Waits for :meth:`commit_answer`; raises Interrupted at a new generation."""
        return self._wait(lambda: self.member.commit_answer(step), "the commit", interruptible=True)

    def undo(self, step: int, timeout: float) -> NoReturn:
        """Reports a wrong speculation in ``step``; raises Interrupted when it is dropped."""
        self.send(messages.Undo(self.rank, self.generation, step))
        self.await_announcement(timeout)
        raise Interrupted

    def knows_loss(self, step: int) -> bool:
        """Whether :meth:`await_loss` would return at once; equal on all workers."""
        with self._changed:
            return self.member.knows_loss(step)

    def await_loss(self, step: int) -> messages.StepLoss:
        """Waits for the mean loss of ``step`` and the records sent with the losses.

        Raises Interrupted when a generation was announced first, ControlPlaneError if the loss does not come although
        all micro-batches were computed.
        """
        return self._wait(lambda: self.member.loss(step), "the loss", timeout=_LOSS_TIMEOUT, interruptible=True)

    def publish(self, key: str, value: bytes) -> None:
        """Makes ``value`` known to those workers of the generation that look ``key`` up."""
        with self._changed:
            message = self.member.publish(key, value)
        self.send(message)

    def lookup(self, keys: Sequence[str], cancelled: threading.Event) -> list[bytes]:
        """Waits, in a connecting thread, for values published in the generation.

        Raises Interrupted when ``cancelled`` is set, or a newer generation was announced before all came.
        """
        with self._changed:
            question = None if self.is_interrupted or cancelled.is_set() else self.member.look_up(keys)
        if question is not None:
            self.send(question)
        with self._changed:
            while None in (found := [self.member.published_value(key) for key in keys]):
                if self.is_interrupted or self._is_over or cancelled.is_set():
                    raise Interrupted
                self._changed.wait(_POLL_SECONDS)
        return [value for value in found if value is not None]

    def arrive(self, name: str, payload: Any = None) -> Mapping[int, Any]:
        """Takes part in the next control collective; returns payloads by live rank.

        Hides failures of others: a regroup that is announced meanwhile is carried out here.
        """
        if self.is_joining:
            return {self.rank: payload}
        arrival = self.member.arrive(name, pack(payload))
        self.send(arrival)
        return self._hiding_failures(lambda interruptible: self._await_answer(arrival, interruptible))

    def _hiding_failures(self, wait: Callable[[bool], _T]) -> _T:
        """The result of ``wait`` (interruptible), with regroups carried out meanwhile."""
        self._is_in_hook = False
        while True:
            # Before the executor exists there is nothing to regroup: the announcement waits for it.
            ready = self.regroup is not None
            try:
                return wait(ready)
            except Interrupted:
                assert self.regroup is not None
                with contextlib.suppress(_RunIsOver):  # the answer came before that
                    self.regroup()

    def arrive_in_generation(self, name: str, payload: Any) -> Mapping[int, Any]:
        """:meth:`arrive` for the current generation only; regroups are the caller's.

        Raises Interrupted when a generation was announced first: no worker has an answer. Recompute ``payload`` and
        arrive again.
        """
        message = self.member.arrive_in_generation(name, pack(payload))
        self.send(message)
        return self._await_answer(message, interruptible=True)

    def enter_hook(self) -> None:
        """Waits until all siblings are about to run collectives of a hook.

        Returns at once if they are in it together. Ends with :meth:`leave_hook`, or the next wait that hides failures.
        """
        if self._is_in_hook:
            return

        what = "the other members of its position, in a hook"

        def wait(interruptible: bool) -> bool:
            number = self.member.hook_count
            self.send(messages.Reached(self.rank, self.generation, messages.Milestone.IN_HOOK, number))
            with self.waiting(what):  # for them, and not for the coordinator
                return self._wait(lambda: self.member.try_enter_hook() or None, what, None, interruptible, shown=False)

        self._is_in_hook = self._hiding_failures(wait)

    def leave_hook(self, together: bool = False) -> None:
        """Ends a hook; ``together``: its siblings have left it, too."""
        self._is_in_hook = False
        if together:
            self.member.in_hook = False

    def resign(self, why: str) -> NoReturn:
        """Ends this process, which is lost to the run."""
        self.send(messages.Crash(self.rank, True, why, None, ""))
        self._exit(why, EXIT_RAISED)

    def _await_answer(self, arrival: messages.Arrive, interruptible: bool) -> dict[int, Any]:
        what = f"collective {arrival.name!r}"
        if self._leaving and self._status:
            raise ControlPlaneError(f"Worker {self.rank} has reported its end by an error: no one answers {what}.")
        leader = self.member.leader
        answer = self._wait(lambda: self.member.answer(arrival.number), what, interruptible=interruptible)
        if self.member.leader != leader:
            with self.busy("taking over from the last leader"):  # loggers and progress bars are the user's
                self.on_leader()
        return unpack_all(answer.payloads)

    # ------------------------------------------------------------------ beside the training

    def send_parcel(self, to: int, batch: int, key: str, value: Any) -> None:
        self.send(messages.Parcel(self.rank, to, batch, key, pack((value,))))

    def receive_parcel(self, sender: int, batch: int, key: str, since: int, is_wanted: Callable[[], bool]) -> Any:
        """Waits, beside the training, for the parcel of ``sender`` under ``key``.

        Raises Interrupted when ``sender`` was lost after generation ``since``, or ``is_wanted`` has become false.
        """
        name = (batch, sender, key)
        with self._changed:
            while name not in self._parcels:
                is_lost = self.member.lost.get(sender, -1) > since
                if is_lost or self._is_over or self._is_finishing_saves or not is_wanted():
                    raise Interrupted
                self._changed.wait(_POLL_SECONDS)
            payload = self._parcels.pop(name)
        return unpack(payload)[0]

    def has_parcel(self, sender: int, batch: int, key: str) -> bool:
        """Whether :meth:`receive_parcel` would return at once."""
        return (batch, sender, key) in self._parcels

    def forget_parcels(self, batch: int) -> None:
        """Drops parcels of ``batch`` and earlier ones that were not taken."""
        with self._changed:
            self._parcels = {name: value for name, value in self._parcels.items() if name[0] > batch}

    def await_background_work(self, is_done: Callable[[], bool], what: str) -> bool:
        """Waits for work of another thread here; returns whether it is done.

        Regroups that are announced meanwhile are carried out. At the end of the run the work may be undone.
        """
        self._is_in_hook = False
        with self.busy(what):
            while not (is_done() or self._is_over):
                if self.is_interrupted and self.regroup is not None:
                    with contextlib.suppress(_RunIsOver):
                        self.regroup()
                with self._changed:
                    if not is_done():
                        self._changed.wait(_POLL_SECONDS)
        return is_done()

    def pass_stop_point(self, point: int) -> None:
        """Records that this worker trains on at ``point``; answers requests to stop there."""
        with self._changed:
            replies = self.member.pass_stop_point(point)
        for reply in replies:
            self.send(reply)

    def request_stop_and_wait(self, point: int) -> bool:
        """Asks all to stop at stop point ``point``; waits, and returns whether they do.

        Hides failures of others, like :meth:`arrive`.
        """
        self.send(messages.StopWish(self.rank, point))
        what = "the others, to stop training"
        verdict = self._hiding_failures(
            lambda interruptible: self._wait(lambda: self.member.stop_verdict(point), what, interruptible=interruptible)
        )
        return verdict.agreed

    def leave(self, status: int = 0) -> None:
        """Ends the heartbeat; from now on a closed connection is not a failure.

        ``status``: the exit status of this process if one of these threads ends it.
        """
        if status or not self._leaving:  # an exception after the run is one, too
            self._status = status
        self._leaving = True
        self._wake_heartbeat.set()

    def _wait(
        self,
        ready: Callable[[], _T | None],
        what: str,
        timeout: float | None = None,
        interruptible: bool = False,
        shown: bool = True,
    ) -> _T:
        """Waits until ``ready`` returns a value other than None, and returns that.

        ``what``: what it waits for, in words, reported to the coordinator if ``shown``. ``timeout``: seconds; those
        without a coordinator do not count. Raises ControlPlaneError after it, Interrupted at a new generation if
        ``interruptible``, and _RunIsOver once the run has ended.
        """
        began = time.monotonic()
        with self.waiting(what, coordinated=True) if shown else contextlib.nullcontext(), self._changed:
            while True:
                found = ready()
                if found is not None:
                    return found
                if self._is_over:
                    raise _RunIsOver
                if interruptible and self.is_interrupted:
                    raise Interrupted
                # The time without a coordinator does not count.
                deadline = None if timeout is None else max(began, self._reconnected_at) + timeout
                if deadline is not None and time.monotonic() > deadline and not self._lacks_coordinator:
                    raise ControlPlaneError(f"Worker {self.rank} waited {timeout:g} s for {what} without success.")
                self._changed.wait(None if deadline is None else max(_POLL_SECONDS, deadline - time.monotonic()))

    @property
    def _lacks_coordinator(self) -> bool:
        """Whether the coordinator is looked for, or silent."""
        return self._is_reconnecting or time.monotonic() - self._connection.heard > _QUIET_SECONDS

    # ------------------------------------------------------------------ threads

    def _guarded(self, target: Callable[[], None]) -> None:
        """Runs ``target`` in a thread; an error in it ends the process."""
        try:
            target()
        except Exception as error:
            if self._leaving:
                return  # the main thread ends the process, and needs this one no more
            name, (summary, text) = threading.current_thread().name, describe_error(error)
            log.exception("Worker %d: an error ended its thread %s", self.rank, name)
            with contextlib.suppress(Exception):  # what is left of this process may not even be able to say so
                what = f"its thread {name} raised {summary}"
                self._connection.send(messages.Crash(self.rank, True, what, None, text))
            self._exit(f"lost its thread {name} ({summary})", EXIT_RAISED)

    def _receive(self) -> None:
        """The receiver thread: takes the coordinator's messages until the run is over.

        Stops end this process, except where it survives a finished run; all other messages go to :attr:`member`, and
        its replies back. A lost connection is made again if the coordinator may return.
        """
        while True:
            heard = self._connection.heard
            try:
                message = self._connection.receive()
                if self._connection.heard - heard > _QUIET_SECONDS:
                    self._reconnected_at = self._connection.heard
            except (EOFError, OSError) as error:
                if self._leaving and self._survives:
                    return  # it has all that it needs, and its process has more to do
                if not self._reconnect():
                    why = f" ({error})" if str(error) else ""
                    self._exit(f"lost its connection to the coordinator{why}", EXIT_LOST_COORDINATOR)
                continue
            except BadMessageError as error:
                self._exit(f"got a message that is none from the coordinator ({error})", EXIT_LOST_COORDINATOR)
            if isinstance(message, messages.Stop):
                if message.reason is StopReason.FINISHED:
                    self.leave()  # the results are delivered
                if message.reason is StopReason.LEFT:  # others go on; without its own wish another may take its place
                    self.leave(EXIT_LEFT if self._was_asked_to_leave else EXIT_LOST_COORDINATOR)
                spare = self.rank < 0  # it has nothing to continue with
                if self._survives and not spare and message.reason is StopReason.FINISHED:
                    with self._changed:
                        self._is_over = True
                        self._changed.notify_all()
                    self._connection.close()
                    return
                if message.reason is StopReason.LOST:
                    if self._leaving and self._survives:
                        return
                    self._exit("lost its place in the run", EXIT_LOST_COORDINATOR)
                if message.reason in (StopReason.STAGE_LOST, StopReason.CRASHED, StopReason.FAILED):
                    self.finish_saves()
                self._exit(f"was told to stop ({message.reason.value})", EXIT_STOPPED)
            if isinstance(message, messages.Unfit):
                # The coordinator closes the connection; the main thread says why.
                self.leave(EXIT_STOPPED if message.late else EXIT_RAISED)
            if isinstance(message, messages.Enrolled):
                if self._enrolled is None or self.member.assignment is None:
                    self._enrolled = message  # a coordinator of another run will tell this worker to end
                continue
            if isinstance(message, messages.Alive):
                self._connection.limit_quiet(message.timeout)
                continue
            if isinstance(message, messages.Parcel):
                with self._changed:
                    self._parcels[message.batch, message.rank, message.key] = message.payload
                    self._changed.notify_all()
                continue
            with self._changed:
                replies = self.member.receive(message)
                self._changed.notify_all()
            for reply in replies:
                self.send(reply)
            if isinstance(message, messages.Unfit):
                return
            if isinstance(message, messages.Regroup) and self.on_interrupt is not None:
                self.on_interrupt(message.generation - 1, message.roster if self.member.in_hook else ())

    def finish_saves(self) -> None:
        """Completes a checkpoint, if this process can, after a run that ended otherwise."""
        with self._changed:
            self._is_finishing_saves = True
            self._changed.notify_all()
        if self.complete_saves is not None:
            self.complete_saves()

    @property
    def _may_reconnect(self) -> bool:
        return self._enrolled is not None and self._patience > 0 and not self._leaving

    def _reconnect(self) -> bool:
        """Looks for a lost coordinator's successor; False if this process must end."""
        if not self._may_reconnect:
            return False
        where = self.rank, shown(self._address), self._patience
        log.warning("Worker %d lost its coordinator, and looks for another one at %s for %g s.", *where)
        self._is_reconnecting = True
        for connection in connections(self._address, self._authkey, self._patience, lambda: not self._leaving):
            self._connection.abandon()
            with self._changed:  # no message is sent in between: it would be sent twice, or not at all
                self._connection = connection
                try:
                    connection.send(self._first_message())
                except OSError:
                    continue  # it is gone again
                self._is_reconnecting, self._reconnected_at = False, time.monotonic()
                self.coordinator_changes += 1
                self._changed.notify_all()
            return True
        return self._leaving and self._survives

    def _first_message(self) -> messages.Hello | messages.Returned:
        """The first message to the successor of a lost coordinator."""
        assigned, enrolled = self.member.assignment, self._enrolled
        if assigned is None or enrolled is None:
            return self._hello  # a spare holds nothing
        wants = self._hello.wants
        return self.member.report_return(
            process=replace(self._hello.process, incarnation=assigned.incarnation),
            run=enrolled.run,
            joining=assigned.joining,
            wants=None if wants is None else replace(wants, grid=assigned.grid),
        )

    def _beat(self) -> None:
        """The heartbeat thread: sends heartbeats, and the requests of signal handlers."""
        while not self._leaving:
            try:
                while self._requests:
                    self.send(self._requests.popleft())
                activity, since = self._activity
                seconds = time.monotonic() - since
                beat = messages.Heartbeat(self.rank, self.generation, activity, seconds, self.member.begun)
                self._connection.send(beat)
            except OSError:
                if not self._may_reconnect:
                    return  # the receiver sees it too, and ends the process
            self._wake_heartbeat.wait(self.heartbeat_interval)
            self._wake_heartbeat.clear()

    def _exit(self, why: str, code: int) -> NoReturn:
        """Ends the process at once, wherever its main thread is blocked."""
        if not self._leaving:  # perhaps nobody else notices this end: the supervisor died, or evicted this worker
            level = logging.WARNING if code == EXIT_LOST_COORDINATOR else logging.INFO
            text = "Worker %d %s and ends. Either the run is over, or this worker was declared dead."
            log.log(level, text, self.rank, why)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(self._status if self._leaving else code)


# ---------------------------------------------------------------------- payloads


_PIECE = 1 << 30  # bytes; msgpack has no byte string of 4 GiB or more


def pack(value: Any) -> Payload | None:
    """Pickles ``value``, with its tensors on the host; None stays None.

    torch's own reducers might pass tensors as descriptors of this process, which die with it.
    """
    if value is None:
        return None
    # Processes that pack have torch; others import this module, too.
    from lightning_recycle.tensor_memory import pack_tensors

    data = memoryview(pack_tensors(value))
    return tuple(bytes(data[begin : begin + _PIECE]) for begin in range(0, len(data), _PIECE))


def unpack(payload: Payload | bool | None) -> Any:
    """Inverse of :func:`pack`; other values stay unchanged."""
    if not isinstance(payload, tuple):
        return payload
    return pickle.loads(payload[0] if len(payload) == 1 else b"".join(payload))


def unpack_all(payloads: Mapping[int, Payload | None] | Mapping[int, Payload | bool | None]) -> dict[int, Any]:
    """The values of payloads by rank or by column."""
    return {key: unpack(payload) for key, payload in payloads.items()}


def describe_error(error: BaseException, shown: str | None = None) -> tuple[str, str]:
    """Class, message and traceback of ``error``, without characters that UTF-8 lacks.

    ``shown``: the traceback, if it is not to be the whole one.
    """
    texts = (
        f"{type(error).__name__}: {error}".removesuffix(": "),
        "".join(traceback.format_exception(error)) if shown is None else shown,
    )
    summary, text = (text.encode(errors="backslashreplace").decode() for text in texts)
    return summary, text
