"""Coordinator: the one authority over membership, in a thread of the supervisor.

A thin shell around the pure state machine of :mod:`~lightning_recycle.control.protocol.membership`: it turns
connections, process exits and clocks into events, and carries out the commands. It asks
:mod:`~lightning_recycle.control.coordinator.failure_detector` who is silent or stuck,
:mod:`~lightning_recycle.control.coordinator.worker_table` who fills an empty position, and
:mod:`~lightning_recycle.control.plans.run_plans` what all run.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import chain
from types import MappingProxyType
from typing import Any

from lightning_recycle.control.coordinator.admission import Admission, Readmission, Reception, ReturnStanding
from lightning_recycle.control.coordinator.failure_detector import FailureDetector
from lightning_recycle.control.coordinator.worker_table import Vacancies, WorkerTable
from lightning_recycle.control.journal import Journal, journal_entry
from lightning_recycle.control.monitoring.history import Event, History
from lightning_recycle.control.monitoring.monitor import RunView, Views
from lightning_recycle.control.monitoring.status import ProcessLocation, status_of
from lightning_recycle.control.network.addresses_and_keys import check_key, shown
from lightning_recycle.control.network.connection import SIGN_SECONDS, BadMessageError, NonBlockingConnection, encode
from lightning_recycle.control.options import CoordinatorOptions, WorkerProcess
from lightning_recycle.control.plans.plan_provider import PlanProvider
from lightning_recycle.control.plans.run_plans import RunPlans
from lightning_recycle.control.protocol import membership, messages
from lightning_recycle.control.protocol import state as protocol
from lightning_recycle.control.protocol.control_collectives import PublishedKeys
from lightning_recycle.control.protocol.messages import Process, StopReason
from lightning_recycle.control.protocol.state import BrokenRuleError, Checks
from lightning_recycle.planning.costs import Profile
from lightning_recycle.planning.grid import Grid, Worker
from lightning_recycle.planning.program import Programs
from lightning_recycle.planning.schedule import Schedule

log = logging.getLogger(__name__)

_STOP_SECONDS = 1.0  # for the loop to end; it may be telling the workers its last words
_ALIVES_PER_TIMEOUT = 4  # of life, in the time after which workers give this coordinator up
_TICK_SECONDS = 0.1  # seconds between two looks at the clock; everything else is event-driven
_REVIEW_SECONDS = 0.0004  # between two looks at all workers, for each; a look at one takes a thirtieth of that
_MAX_WRONG_STATES = 2  # at a position, before its device is given up: a bit of a good memory flips now and then
_LAST_CALL_SECONDS = 5.0  # without a further worker, until a run begins that has enough
_MAX_SHOWN_POSITIONS = 8  # of those that are vacant
_FLUSH_SECONDS = 3.0  # at the end, for what the workers have not taken yet


class Coordinator:
    """Serves the control plane of one run.

    Args:
        host, port: the interface to listen on; port 0 for a free one.
        authkey: the key that workers must know, at least 16 bytes; random by default.
        on_profile: called in the coordinator's thread with the model's profile once all stages have measured.
        start_worker: starts a replacement for a rank, given its incarnation; None without replacements.
        setup, staggered: passed on, with its position, to a worker that was started by hand.
        reception: where workers have come already, instead of ``host`` and ``port``; it stays open.
        objection: why a worker cannot take part in this run; None if it can.
        journal: the log from which another coordinator can go on; None if the run ends with this one.
        takes_results: whether the results are taken from the outcome of the run.
        members: processes per position.
        grows: whether ``start_worker`` finds devices for positions that were vacant at the start, or that a worker left
            on purpose, however late.

    Use: create, start the workers with :attr:`address` and :attr:`authkey`, then :meth:`start`, :meth:`wait`,
    :meth:`close`.
    """

    def __init__(
        self,
        grid: Grid,
        planner: PlanProvider,
        options: CoordinatorOptions | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        authkey: bytes | None = None,
        on_profile: Callable[[Profile], None] = lambda _: None,
        start_worker: Callable[[int, int], WorkerProcess] | None = None,
        setup: messages.Payload | None = None,
        reception: Reception | None = None,
        objection: Callable[[messages.Hello], messages.Unfit | None] = lambda hello: None,
        staggered: bool = True,
        journal: Journal | None = None,
        takes_results: bool = True,
        members: int = 1,
        grows: bool = False,
    ) -> None:
        self.grid = grid
        self.members = members
        self.options = options or CoordinatorOptions()
        self.authkey = os.urandom(32) if authkey is None else check_key(authkey, "authkey")
        workers = grid.num_workers * members
        self._history = History(grid, members)
        self.history: list[Event] = self._history.events
        self._owns_reception = reception is None
        self._is_open = reception is not None or authkey is not None  # to workers that somebody else starts
        self._reception = reception or Reception((host, port), self.authkey, workers)
        self._loop, self.address = self._reception.loop, self._reception.listener.address
        # Layers do not move where positions have several members.
        self._layers_move = self.options.recovery.rebalance if members == 1 else "never"
        self._plans = RunPlans(grid, planner, self.options.drift, on_profile, self._loop.wake, self._layers_move)
        self.schedules: list[Schedule] = self._plans.schedules
        self._setup, self._staggered, self._takes_results = setup, staggered, takes_results
        self._journal = journal
        self._readmission = (
            None if journal is None else Readmission(journal, grid, self.options, time.monotonic(), members)
        )
        holders = {} if journal is None else journal.processes
        self._workers = WorkerTable(self._loop, self._on_messages, self._lose_worker, holders)
        self._state = protocol.initial_state(grid, self.options.recovery.machine_error_retries, members)
        if self._readmission is not None:
            self._state = self._readmission.state()
        self._state = self._state.updated(
            checks=Checks(self.options.verification.on_corruption, self.options.verification.steps_asked_for or 0)
        )
        self._ranks_to_read: list[int] = []  # whose inbox may hold messages that came before they had a position
        self._failure_detector = FailureDetector(self._state.positions, self.options, self._workers.thread_states)
        self._published_keys = PublishedKeys()
        self._vacancies = Vacancies(self.options, start_worker, self._loop.wake, self._state.positions)
        self._admission = Admission(
            state=lambda: self._state,
            workers=self._workers,
            admit=self._admit,
            readmit=self._readmit,
            loop=self._loop,
            vacancies=self._vacancies,
            objection=objection,
            readmission=self._readmission,
        )
        self._connected_ranks: set[int] = set()
        self._grace_deadlines: dict[int, tuple[float, str]] = {}
        self._pending_evictions: list[protocol.Evict] = []
        self._postponed_event: protocol.MembershipEvent | None = None  # it leads to a Resume whose plan is being made
        self._next_review = 0.0
        self._review_seconds = max(_TICK_SECONDS, workers * _REVIEW_SECONDS)
        self._filled_for: tuple[frozenset[int], int] | None = None  # workers and spares when vacancies were last filled
        self._ranks_by_stage = sorted(range(workers), key=lambda rank: (self._state.positions.stage(rank), rank))
        self._alive_interval = min(SIGN_SECONDS, self.options.heartbeat.coordinator_timeout / _ALIVES_PER_TIMEOUT)
        self._next_alive = 0.0
        self._views = Views(self._view, self._loop.wake)
        self._done = threading.Event()
        self._is_closing = False
        self._is_deserted = False
        self._wrong_counts = Counter[int]()  # wrong states at each position; one wrong result counts as several
        self._first_processes: dict[int, WorkerProcess] = {}  # the first at each position that were started here
        self._grows = grows
        self._vacated_ranks: set[int] = set()  # positions that are empty because their worker was asked to leave
        self._last_call_end = 0.0  # when no further worker of the first roster is expected
        self._is_end_wanted = False
        self._hosts_to_leave: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="recycle-coordinator", daemon=True)

    @property
    def roster(self) -> tuple[int, ...]:
        return self._state.roster.ranks

    def view(self, timeout: float = 2.0) -> RunView:
        """State of the started run, at most a quarter of a second old; from any thread.

        Raises ControlPlaneError if the coordinator's thread does not answer within ``timeout`` seconds.
        """
        return self._views.ask(timeout)

    def start(self, processes: Mapping[int, WorkerProcess]) -> None:
        """Begins to serve and watches ``processes``, by rank, for their exit.

        Workers started by hand take positions without a process.
        """
        self._first_processes = dict(processes)
        if processes:
            self._failure_detector.begin_start(time.monotonic())
        if self._owns_reception:
            self._reception.listener.start()
        self._thread.start()

    def wait(self, timeout: float | None = None) -> protocol.Outcome | None:
        """Waits for the end of the run; None if ``timeout`` seconds pass first.

        A run that had ended under an earlier coordinator ends again when workers that may not know it have had time to
        return.
        """
        return self._state.outcome if self._done.wait(timeout) else None

    def member_processes(self) -> list[WorkerProcess]:
        """Processes of the roster that were started here; callable from any thread."""
        processes = (self._workers.processes.get(rank) for rank in sorted(self._state.roster.live))
        return [process for process in processes if process is not None]

    def writer_processes(self) -> list[WorkerProcess]:
        """The local process that completes a checkpoint, if any; callable from any thread.

        It is the writer's, which has all parts or cannot complete it any more.
        """
        saves, live = self._state.saves, self._state.roster.live
        writer = self._workers.processes.get(saves.writer) if saves.writer in live and not saves.is_over else None
        return [] if writer is None else [writer]

    @property
    def has_begun(self) -> bool:
        """Whether the workers have met; callable from any thread."""
        return self._state.generation.number >= 0

    @property
    def is_deserted(self) -> bool:
        """Whether all left before the run began, so that none may enter; thread-safe."""
        return self._is_deserted

    def _all_have_left(self) -> bool:
        """Whether all workers have gone before the run began, and none is about to come."""
        present = self._workers.connections or self._vacancies.spares or self._reception.has_strangers
        return not self._owns_reception and self._admission.has_met and not self.has_begun and not present

    def end_at_boundary(self) -> None:
        """Asks the workers to end after their present step and its checkpoints.

        See :meth:`wait`. Callable from any thread, but not from a signal handler.
        """
        self._is_end_wanted = True
        self._loop.wake()

    def ask_to_leave(self, host: str) -> None:
        """Asks the workers of machine ``host`` to leave at the next step boundary.

        The machine is about to go; no step is redone. Callable from any thread.
        """
        self._hosts_to_leave.put(host)
        self._loop.wake()

    def stop(self, patience: float = _STOP_SECONDS) -> None:
        """Stops serving: the end of a worker is not a loss any more; connections stay."""
        self._is_closing = True
        self._vacancies.stop()
        self._loop.wake()
        if self._thread.is_alive():
            self._thread.join(patience)

    def close(self) -> None:
        self.stop(patience=_FLUSH_SECONDS + 5.0)
        self._plans.close()
        if self._owns_reception:
            self._reception.close()
        else:
            self._reception.take_back()
        self._vacancies.close()

    # ------------------------------------------------------------------ the loop

    def _serve(self) -> None:
        """The coordinator's thread: handles messages and clocks until it is closed."""
        try:
            for rank, process in self._first_processes.items():
                self._workers.watch_exit(rank, process)
            self._reception.serve(self._admission.greet, self._on_wake)
            last_tick = time.monotonic()
            if self._admission.has_ended_before:
                threading.Timer(_FLUSH_SECONDS, self._done.set).start()
            while not self._is_closing and not self._is_deserted:
                ready = self._loop.select(_TICK_SECONDS)
                self._loop.dispatch(ready)
                now = time.monotonic()
                if now - last_tick > 10 * _TICK_SECONDS:  # this process itself was suspended: nobody's silence counts
                    self._failure_detector.restart_timers(now)
                    self._workers.restart_send_timers(now)
                last_tick = now
                self._on_tick(now)
                while self._ranks_to_read:
                    self._on_messages(self._ranks_to_read.pop())
                self._is_deserted = self._all_have_left()
            self._loop.flush_all(_FLUSH_SECONDS)  # the answer with the results, and that the run is over
        except Exception as error:
            self._fail(error)
        finally:
            self._views.close()

    def _fail(self, error: Exception) -> None:
        log.error("The coordinator failed", exc_info=error)
        self._finish(protocol.Failed(f"The coordinator failed: {type(error).__name__}: {error}"))

    def _on_tick(self, now: float) -> None:
        """Does what is due by the clock: signs of life, reviews, deadlines, replacements."""
        if self._state.outcome is not None:
            return
        if now >= self._next_alive:
            self._next_alive = now + self._alive_interval
            self._send_to_all(messages.Alive(self.options.heartbeat.coordinator_timeout))
        if self._state.returned is not None:  # those that do not return are given up
            assert self._readmission is not None
            for rank, cause in self._readmission.late(now, self._state).items():
                self._lose_worker(rank, cause)
            return
        if now >= self._next_review:  # not after every message: it looks at all workers
            self._next_review = now + self._review_seconds
            self._review(now)
            self._filled_for = None
            if self._state.generation.number < 0 and (self._first_processes or now > self._last_call_end):
                self._begin_with_fewer()
        for generation, (deadline, reason) in list(self._grace_deadlines.items()):
            if now > deadline:
                del self._grace_deadlines[generation]
                self._handle(protocol.GraceElapsed(generation, reason))
        if self._filled_for != (self._state.roster.live, len(self._vacancies.spares)):
            self._fill_vacancies(now)
            self._filled_for = (self._state.roster.live, len(self._vacancies.spares))

    def _begin_with_fewer(self) -> None:
        """Lets the run begin without absent workers, where options and stages allow it."""
        vacant = frozenset(rank for rank in self._state.roster.live if not self._workers.has(rank))
        if vacant:
            self._handle(protocol.StartDue(vacant, self.options.recovery.least(self.grid.pipelines)))
            if vacant.isdisjoint(self._state.roster.live):
                self._log_vacant(sorted(vacant))

    def _log_vacant(self, vacant: list[int]) -> None:
        """Logs which positions are vacant at the start, and how they are filled."""
        names = ", ".join(map(self._state.positions.name, vacant[:_MAX_SHOWN_POSITIONS]))
        if (others := len(vacant) - _MAX_SHOWN_POSITIONS) > 0:
            names += f" and {others} others"
        if self._grows:
            remedy = "workers are started there as soon as there is room"
        elif self._is_open:
            remedy = f"workers that are started with RECYCLE_COORDINATOR={shown(self.address)} join at a step boundary"
        else:
            remedy = "for other workers to join, give the launching process an address in RECYCLE_LISTEN"
        log.warning(
            "The run begins with %d of %d workers. Vacant: %s; %s.",
            *(len(self._state.roster.live), self._state.positions.num_workers, names, remedy),
        )

    def _review(self, now: float) -> None:
        """Reviews which workers are late, silent or make no progress, and acts on it."""
        detector = self._failure_detector
        for rank, cause in (detector.late_members(now, self._state) | detector.late_candidates(now)).items():
            self._evict(rank, cause)
        connected, are_launched = self._workers.connections, bool(self._first_processes)
        if notice := detector.start_notice(now, self._state, connected, are_launched):
            log.warning("%s", notice)
        seconds = self._plans.operation_seconds
        stalled = {rank: connection.stalled(now) for rank, connection in self._workers.connections.items()}
        ruling = detector.review(now, self._state, stalled, seconds)
        for rank, overdue in ruling.waits.items():
            self._history.suspect(rank, overdue.cause, overdue.seconds, overdue.limit, overdue.reason, self._state)
        for rank, seconds_waited in ruling.cleared.items():
            self._history.clear(rank, seconds_waited, self._state)
        for rank, overdue in ruling.evict.items():
            self._evict(rank, overdue.cause, {"seconds": overdue.seconds, "limit": overdue.limit})
        self._history.digest.goodput.spares_are(len(self._vacancies.spares), time.time())
        if detector.all_wait(now, self._state, seconds):
            reason = "a message was lost: all workers wait for each other."
            self._handle(protocol.GraceElapsed(self._state.generation.number, reason))

    # ------------------------------------------------------------------ workers come and go

    def _on_wake(self) -> None:
        """Handles what other threads have left: started processes, plans, requests."""
        for rank, process in self._vacancies.take_started():
            if process is None:
                self._lose_candidate(rank, "it could not be started")
            else:
                self._first_processes.setdefault(rank, process)
                self._workers.watch_exit(rank, process)
        event, self._postponed_event = self._postponed_event, None
        if event is not None:
            self._handle(event)
        for plan in self._plans.better():
            self._handle(self._with_ranks(plan))
        for kind, details in self._plans.take_notes():
            self._history.add(kind, self._state, details=details)
        if self._is_end_wanted:
            self._handle(protocol.EndWanted())
        self._views.answer()
        while not self._hosts_to_leave.empty():
            host = self._hosts_to_leave.get()
            for rank in [rank for rank in self._workers.connections if self._history.processes[rank][0] == host]:
                self._on_leave(messages.Leave(rank))

    def _readmit(
        self, connection: NonBlockingConnection, returned: messages.Returned, standing: ReturnStanding
    ) -> None:
        """A worker takes the position again that it had under an earlier coordinator."""
        rank, is_member = returned.rank, standing is ReturnStanding.MEMBER
        self._vacancies.record_earlier_process(rank, returned.process)
        if is_member:
            self._failure_detector.record_report(rank)
        if self._is_first_member(rank):
            self._plans.returned(self._position(rank), returned)
        self._admit(rank, connection, returned.process, standing is ReturnStanding.CANDIDATE, returned)
        for message in () if is_member else chain.from_iterable(membership.returned_events(returned)):
            self._on_message(rank, message)

    def _admit(
        self,
        rank: int,
        connection: NonBlockingConnection,
        process: Process,
        joining: bool,
        returned: messages.Returned | None = None,
    ) -> None:
        """A worker takes its position; ``returned``: what it reports of an earlier one."""
        self._history.introduce(rank, process.node, process.pid)
        self._ranks_to_read.append(rank)
        self._failure_detector.record_message(rank, time.monotonic())
        if joining:
            self._failure_detector.expect_candidate(rank, time.monotonic())
        elif self._state.generation.number < 0:
            self._failure_detector.begin_start(time.monotonic())
            self._last_call_end = time.monotonic() + _LAST_CALL_SECONDS
        # The sign of life has the limit of the coordinator's silence.
        self._workers.connect(rank, connection, process, messages.Alive(self.options.heartbeat.coordinator_timeout))
        if returned is not None and self._state.returned is not None and rank in self._state.roster.live:
            self._handle(returned)
            if self._state.returned is None:  # what they have said meanwhile
                self._ranks_to_read.extend(self._workers.connections)
        elif not joining:
            self._handle(protocol.Joined(rank))

    def _place_spares(self) -> None:
        """Gives spares positions: of the first roster, or of lost workers."""
        if not self._vacancies.spares:
            return
        if self._readmission is not None and not self._readmission.may_place(time.monotonic()):
            return
        joining = self._state.generation.number >= 0
        if joining:
            free = [rank for rank in self._state.vacant if not self._has_candidate(rank)]
        else:
            free = [rank for rank in self._state.roster.ranks if not self._workers.has(rank)]
        taken = filter(self._has_candidate, range(self._state.positions.num_workers))
        workers_by_column = Counter(map(self._state.positions.column, taken))
        while placed := self._vacancies.place_spare(free, workers_by_column):
            rank, connection, process = placed
            free.remove(rank)
            workers_by_column[self._state.positions.column(rank)] += 1
            self._loop.forget(connection)
            incarnation = self._vacancies.next_incarnation(rank) if joining else 0
            try:
                connection.send(self._assignment(rank, incarnation, joining))
            except OSError:
                self._vacancies.leave_node(rank)
                connection.close()
                continue
            self._admit(rank, connection, replace(process, incarnation=incarnation), joining)

    def _assignment(self, rank: int, incarnation: int, joining: bool) -> messages.Assign:
        """The message that gives a spare its position."""
        run_settings = self._setup, self._staggered, self._takes_results
        return messages.Assign(rank, incarnation, joining, self.grid, *run_settings, self.members)

    def _has_candidate(self, rank: int) -> bool:
        """Whether a worker has the position, or a process is being started for it."""
        return self._workers.has(rank) or self._vacancies.is_starting(rank)

    def _fill_vacancies(self, now: float) -> None:
        """Finds workers for empty positions: spares or replacements."""
        self._place_spares()
        if self._state.generation.number < 0:
            return
        for rank in self._state.vacant:
            is_growth, members = self._is_growth(rank), self._state.positions.all_members({rank})
            is_faulty = any(self._wrong_counts[member] >= _MAX_WRONG_STATES for member in members)
            if self._has_candidate(rank) or is_faulty or not self._vacancies.may_start(rank, now, is_growth):
                continue
            if self._grows if is_growth else self.options.recovery.max_restarts:
                self._history.add("restarting" if not is_growth else "growing", self._state, rank)
                self._vacancies.start(rank, is_growth)
                self._failure_detector.expect_candidate(rank, now)

    def _is_growth(self, rank: int) -> bool:
        """Whether a start at ``rank`` is growth: no worker started here was lost there."""
        return rank not in self._first_processes or (self._grows and rank in self._vacated_ranks)

    def _on_messages(self, rank: int) -> None:
        """Handles a worker's inbox; a bad message costs its sender, and no other worker."""
        connection = self._workers.connections.get(rank)
        if self._state.returned is not None:
            return  # it waits until all have returned: before, nothing is known by which to judge it
        try:
            while connection is not None and self._workers.connections.get(rank) is connection:
                message = connection.inbox.take()
                if message is None:
                    return
                why = membership.objection(self._state, rank, message)
                if why is not None:
                    raise BadMessageError(f"{type(message).__name__}: {why}")
                self._on_message(rank, message)
        except BadMessageError as error:
            log.warning("Closed the connection of worker %s: %s.", self._state.positions.name(rank), error)
            self._lose_worker(rank, f"it sent a message that no worker sends ({error})")
        except BrokenRuleError:  # nobody's message: the state cannot be trusted
            raise
        except Exception as error:  # a defect of this package: the others go on, and the traceback says where it is
            log.exception("The coordinator could not handle a message of worker %s", self._state.positions.name(rank))
            self._lose_worker(rank, f"the coordinator could not handle its message ({type(error).__name__}: {error})")

    def _lose_worker(self, rank: int, cause: str) -> None:
        """Drops a lost worker or candidate, which must not return and write."""
        was_connected = self._workers.drop(rank)
        self._failure_detector.forget(rank)
        self._vacancies.leave_node(rank)
        if rank in self._state.roster.live:
            self._handle(protocol.Lost(rank, cause))
        elif was_connected:
            self._lose_candidate(rank, cause)

    def _lose_candidate(self, rank: int, cause: str) -> None:
        self._vacancies.record_failure(rank, time.monotonic())
        self._handle(protocol.Lost(rank, cause))

    def _evict(self, rank: int, cause: str, details: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Declares a worker dead that did not end by itself: evicted, then lost."""
        self._history.add("suspected", self._state, rank, {"cause": cause, **details})
        if rank in self._state.roster.live:
            self._history.add("evicted", self._state, rank, {"cause": cause, **details})
        self._lose_worker(rank, cause)

    def _dismiss(self, rank: int) -> None:
        """Dismisses a worker that leaves at a step boundary, or with its position."""
        self._workers.let_leave(rank)
        self._failure_detector.forget(rank)

    # ------------------------------------------------------------------ messages

    def _on_message(self, rank: int, message: Any) -> None:
        """Handles a worker's ``message``; what decides something becomes an event."""
        now = time.monotonic()
        self._failure_detector.record_message(rank, now)
        if not isinstance(message, messages.FromAnyThread):
            self._failure_detector.record_activity(rank, now)
        match message:
            case messages.Heartbeat():
                self._failure_detector.record_heartbeat(rank, message, now)
                if not self._state.collectives.open:
                    return
            case messages.Reached(milestone=messages.Milestone.CONNECTED):
                self._on_connected(message)
                return
            case messages.Measured():
                if self._is_first_member(rank):
                    self._plans.take(self._position(rank), message)
                return
            case messages.Publish():
                self._send_answers(self._published_keys.publish(message))
                return
            case messages.LookUp():
                self._send_answers(self._published_keys.look_up(message))
                return
            case messages.FaultInjected():
                self._history.fault_injected(message)
                return
            case messages.SaveBegun() | messages.SaveEnded():
                self._history.stalled(message.stalled)
            case messages.Parcel():
                if message.to in self._state.roster.live:
                    self._send_answers([(message.to, message)])
                return
            case messages.MembershipQuery():
                if rank in self._state.roster.live:
                    self._send_answers([(rank, messages.MembershipConfirmed(message.number))])
                return
            case messages.Report():
                self._failure_detector.record_report(rank)
            case messages.Ready():
                self._vacancies.record_success(rank)
                self._failure_detector.record_ready(rank)
            case messages.Leave():
                self._on_leave(message)
                return
            case messages.Applied():
                self._failure_detector.record_applied(rank)
                self._history.held(rank, message.peak_bytes)
                if self._is_first_member(rank):
                    worker = self._position(rank)
                    self._plans.applied(worker, message, rank == self._state.stage_leader(worker.stage))
            case messages.Broken():
                log.debug("Worker %s: %s", self._state.positions.name(rank), message)
            case messages.Raised():
                name, text = self._state.positions.name(rank), message.traceback.rstrip()
                log.warning("Worker %s raised an exception that may be a fault of its machine:\n%s", name, text)
            case messages.Crash():
                log.debug("Worker %s: %s", self._state.positions.name(rank), message)
                if message.fault:
                    if rank not in self._state.roster.live:
                        name, text = self._state.positions.name(rank), message.traceback.rstrip() or message.summary
                        log.warning("A new worker %s failed before it could join:\n%s", name, text)
                    self._lose_worker(rank, message.summary)
                    return
        self._handle(message)

    def _on_leave(self, wish: messages.Leave) -> None:
        """A worker or a joining process asks to leave."""
        if wish.rank in self._state.roster.live:
            self._handle(wish)
        else:
            self._dismiss(wish.rank)
            self._lose_candidate(wish.rank, "it left")

    def _send_answers(self, answers: Iterable[tuple[int, Any]]) -> None:
        for rank, message in answers:
            self._workers.post((rank,), encode(message))
        self._workers.lose_unreachable()

    def _on_connected(self, message: messages.Reached) -> None:
        if message.generation != self._state.generation.number:
            return
        self._connected_ranks.add(message.rank)
        if self._connected_ranks >= self._state.roster.live:
            self._history.connected(self._state)

    # ------------------------------------------------------------------ commands

    def _handle(self, event: protocol.MembershipEvent) -> None:
        self._apply(event)
        while self._pending_evictions:
            command = self._pending_evictions.pop(0)
            self._evict(command.rank, command.cause)
        self._workers.lose_unreachable()

    def _send_to_all(self, message: Any) -> None:
        self._workers.post_to_all(message, (spare for spare, _ in self._vacancies.spares))

    def _apply(self, event: protocol.MembershipEvent) -> None:
        """Applies ``event`` to the state, journals it, and carries out the commands.

        A ``Resume`` without a plan yet is held back: the state stays as it was, and :meth:`_on_wake` repeats the event
        once there is news of a plan.
        """
        state, commands = membership.transition(self._state, event)
        resumes = any(isinstance(c, protocol.Send) and isinstance(c.message, messages.Resume) for c in commands)
        if resumes and not self._plan_is_ready(state):
            # As if the last report had been under way for longer; whatever comes before it is handled as ever.
            self._postponed_event = event
            self._failure_detector.end_regroup()  # everybody has reported
            return
        if state is not self._state:
            self._state = state
            self._write_journal()
        for command in commands:
            if isinstance(command, protocol.Send):
                self._send(command)
            elif isinstance(command, protocol.Resend):
                self._workers.post(command.ranks, encode(command.message))
            elif isinstance(command, protocol.StartGrace):
                deadline = time.monotonic() + self.options.grace
                self._grace_deadlines.setdefault(command.generation, (deadline, command.reason))
            elif isinstance(command, protocol.Evict):
                self._pending_evictions.append(command)
            elif isinstance(command, protocol.Record):
                self._record(command)
            else:
                self._finish(command)

    def _write_journal(self) -> None:
        """Writes to the journal what another coordinator must know, before announcing it."""
        if self._journal is not None:
            self._journal.write(journal_entry(self._state), self._workers.last_known_processes)

    def _send(self, command: protocol.Send) -> None:
        """Completes a message with what the state machine does not know, and posts it.

        A ``Resume`` begins the generation's plan; each rank gets its own program.
        """
        message, schedule = command.message, command.schedule
        if isinstance(message, messages.Resume):
            self._account_time()
            joining = self._state.positions.whole(self._state.roster.joining)
            try:
                schedule = self._plans.plan_generation(self._failed_positions(), joining, self._state.steps.version)
            except Exception as error:  # whoever sent the last report is not to blame
                self._fail(error)
                return
            self._failure_detector.end_regroup()
            self._connected_ranks = set()
        elif isinstance(message, messages.Boundary) and schedule is not None:
            self._account_time()
            self._plans.change(schedule, message.step)
        elif isinstance(message, messages.Regroup):
            self._failure_detector.begin_regroup(time.monotonic())
            self._published_keys.begin(message.generation)
            self._plan_is_ready(self._state)  # if not, it is made while the workers stop and report
        elif isinstance(message, messages.StepLoss):
            counters = {"live_workers": float(len(self._state.roster.live)), **self._history.counters}
            newest = self._state.steps.applied.get(self._state.roster.leader, -1)
            message = replace(message, counters=counters, leader_applied=newest)
            self._history.add_loss(message.step, message.loss)
        verify = self.options.verification.verify if self._state.checks.comparable else 0.0
        programs = None if schedule is None else Programs(schedule, verify)
        frame = encode(message) if programs is None else bytearray()
        # Stage 0 first: a step begins there, and with many workers on few cores the last to be told is late.
        ranks = frozenset(command.ranks)
        for rank in command.ranks if len(ranks) == 1 else (rank for rank in self._ranks_by_stage if rank in ranks):
            if programs is not None:
                frame = encode(replace(message, program=programs.of(self._position(rank))))
            self._workers.post((rank,), frame)

    def _plan_is_ready(self, state: protocol.MembershipState) -> bool:
        """Whether there is a plan for the present roster; if not, it is being made."""
        joining = state.positions.whole(state.roster.joining)
        try:
            return self._plans.request_plan(self._failed_positions(state), joining)
        except Exception:  # whoever asks for the plan itself meets the same error, and tells it
            log.debug("No plan can be made ready", exc_info=True)
            return True

    def _failed_positions(self, state: protocol.MembershipState | None = None) -> frozenset[Worker]:
        """Positions without all of their members."""
        state = state or self._state
        return frozenset(self.grid.workers()) - state.positions.whole(state.roster.live)

    def _position(self, rank: int) -> Worker:
        return self._state.positions.position(rank)

    def _is_first_member(self, rank: int) -> bool:
        """Whether ``rank`` is the first member of its position, measuring for all of them."""
        return self._state.positions.member(rank) == 0

    def _with_ranks(self, ready: protocol.PlanReady | protocol.LayoutReady) -> protocol.MembershipEvent:
        """``ready``, whose roster is of positions, for the workers that hold these."""
        positions = map(self.grid.worker, ready.roster)
        ranks = (rank for position in positions for rank in self._state.positions.ranks(position))
        return replace(ready, roster=tuple(sorted(ranks)))

    def _account_time(self) -> None:
        """Accounts for the time of the steps until now: another plan takes other times."""
        if (computing := self._plans.computing_seconds) is not None:
            self._history.digest.goodput.divide(*computing)

    def _view(self) -> RunView:
        self._account_time()
        spares = tuple(ProcessLocation(process.node or None, process.pid) for _, process in self._vacancies.spares)
        schedules = self._plans.schedules
        status = status_of(
            time.time(),
            self._state,
            self._history,
            (self._plans.number, schedules[-1]) if schedules else None,
            self._vacancies.incarnations,
            self._workers.connections.keys(),
            frozenset(filter(self._has_candidate, range(self._state.positions.num_workers))),
            self._failure_detector.activities,
            spares,
        )
        return RunView(status, self._plans.timed)

    def _record(self, record: protocol.Record) -> None:
        """Adds ``record`` to the history, and does what follows from it here."""
        if record.kind == "revived":
            self._history.continue_from(record.details["counters"])
            if self._state.layout.cuts:
                self._plans.layouts.cuts = self._state.layout.cuts
        if record.kind in ("left", "released") and record.rank is not None:
            self._dismiss(record.rank)
        if record.rank is not None:
            (self._vacated_ranks.add if record.kind == "left" else self._vacated_ranks.discard)(record.rank)
        if record.kind == "layers_moved":
            self._plans.layouts.relaid(record.details["cuts"], self.grid)
        if record.kind == "resumed" and not self._history.digest.counts["step"]:
            self._plans.plan_ahead()
        if record.kind == "resumed":
            record = replace(record, details={**record.details, **self._plans.origin()})
        self._history.record(record, self._state)
        if record.kind == "corruption" and record.rank is not None:
            self._wrong_counts[record.rank] += _MAX_WRONG_STATES if record.details["proof"] == "computation" else 1
        if record.kind == "step":
            self._plans.stepped(self._history.step_seconds)

    def _finish(self, outcome: protocol.Outcome) -> None:
        if self._state.outcome is None:
            self._state = self._state.updated(outcome=outcome)
            self._write_journal()
        self._history.ended(self._state)
        # Also after a success: a worker may be waiting for a generation that nobody needs any more.
        self._send_to_all(messages.Stop(StopReason.of(outcome)))
        self._done.set()
