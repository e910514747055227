"""Workers of a run by position: connections, processes, vacancies.

Table: a position has a connection once its worker has said hello, and a process if it was started on this machine. A
worker that cannot take a message is remembered, as its loss may not be handled in the middle of a command.
:meth:`WorkerTable.drop` makes sure of an end: a lost worker must not return and write.

Vacancies: waiting spares come first, then replacements are started, with growing pauses after failures.

Must not know: messages of members, the state of the protocol.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from lightning_recycle.control.network.connection import NonBlockingConnection, encode
from lightning_recycle.control.network.listener import EventLoop
from lightning_recycle.control.options import CoordinatorOptions, WorkerProcess
from lightning_recycle.control.protocol import messages
from lightning_recycle.control.protocol.messages import Process, StopReason
from lightning_recycle.planning.grid import Positions
from lightning_recycle.processes import thread_states

log = logging.getLogger(__name__)

_FAREWELL_SECONDS = 0.1  # for a worker that leaves at a step boundary
_EXIT_SECONDS = 0.02  # for the exit status of a process that has closed its connection


class WorkerTable:
    """Connections, processes started here, and newest processes of workers, by rank.

    ``on_messages``: called with a rank whose inbox may hold messages. ``on_lost``: called with the rank of a lost
    worker, and why. ``last_known_processes``: newest known process of each rank, also from before a restart.
    """

    def __init__(
        self,
        loop: EventLoop,
        on_messages: Callable[[int], None],
        on_lost: Callable[[int, str], None],
        last_known_processes: Mapping[int, Process],
    ) -> None:
        self.connections: dict[int, NonBlockingConnection] = {}
        self.processes: dict[int, WorkerProcess] = {}
        self.last_known_processes: dict[int, Process] = dict(last_known_processes)
        self._loop = loop
        self._on_messages, self._on_lost = on_messages, on_lost
        self._unreachable: dict[int, NonBlockingConnection] = {}
        self._loses_unreachable = False
        self._being_lost: set[int] = set()  # whose last messages are being read

    def has(self, rank: int) -> bool:
        return rank in self.connections or rank in self.processes

    def thread_states(self, rank: int) -> str:
        """Stacks of the threads of a worker's process, if it is on this machine."""
        process = self.last_known_processes.get(rank)
        return "" if process is None else thread_states(process.pid, process.space)

    # ------------------------------------------------------------------ coming

    def connect(self, rank: int, connection: NonBlockingConnection, process: Process, *first_messages: Any) -> None:
        """Gives a worker the position, and sends it ``first_messages``."""
        connection.inbox.expects = messages.FROM_WORKERS
        self.connections[rank] = connection
        self.last_known_processes[rank] = process
        with contextlib.suppress(OSError):  # whoever reads from it sees that it is gone
            for message in first_messages:
                connection.send(message)
        self._loop.watch(connection, partial(self._on_readable, rank))
        self._loop.watch_unsent(connection)

    def watch_exit(self, rank: int, process: WorkerProcess) -> None:
        """Adds a process that was started here, whose end is a loss."""
        self.processes[rank] = process
        self._loop.watch(process.sentinel, partial(self._on_exit, rank))

    # ------------------------------------------------------------------ messages

    def _on_readable(self, rank: int) -> None:
        try:
            self.connections[rank].read()
        except (EOFError, OSError):
            self._lose(rank)
        else:
            self._on_messages(rank)

    def post(self, ranks: Iterable[int], frame: bytes | bytearray) -> None:
        """Sends ``frame`` to ``ranks``; see :meth:`lose_unreachable`."""
        for rank in ranks:
            connection = self.connections.get(rank)
            if connection is None:
                continue
            try:
                connection.send_frame(frame)
            except OSError:
                self._unreachable[rank] = connection
            else:
                self._loop.watch_unsent(connection)

    def post_to_all(self, message: Any, others: Iterable[NonBlockingConnection]) -> None:
        """Sends ``message`` to all workers and to ``others``, as far as they live."""
        frame = encode(message)
        for connection in (*self.connections.values(), *others):
            with contextlib.suppress(OSError):  # whoever reads from it sees that it is gone
                connection.send_frame(frame)
                self._loop.watch_unsent(connection)

    def lose_unreachable(self) -> None:
        """Workers that could not be sent a message are lost, one after the other."""
        if self._loses_unreachable:
            return  # a loss, which is told to others that cannot be reached either: the loop goes on with them
        self._loses_unreachable = True
        try:
            while self._unreachable:
                connection = self._unreachable.pop(rank := next(iter(self._unreachable)))
                if self.connections.get(rank) is connection and rank not in self._being_lost:
                    self._lose(rank)
        finally:
            self._loses_unreachable = False

    def restart_send_timers(self, now: float) -> None:
        """Restarts the clocks of unsent frames: this process could not send until now."""
        for connection in self.connections.values():
            connection.restart_send_timer(now)

    # ------------------------------------------------------------------ going

    def describe_exit(self, rank: int) -> str | None:
        """The end of the position's process, in words; None if alive, or not started here."""
        process = self.processes.get(rank)
        return None if process is None else process.describe_exit(timeout=_EXIT_SECONDS)

    def _on_exit(self, rank: int) -> None:
        if self.describe_exit(rank) is not None:
            self._lose(rank)

    def _lose(self, rank: int) -> None:
        """Reads what a dead worker had sent, then reports its loss.

        That may be the exception that ended it, read already with a message to which it got no answer.
        """
        connection, process = self.connections.get(rank), self.processes.get(rank)
        cause = self.describe_exit(rank) or "its connection to the coordinator broke"
        self._being_lost.add(rank)
        with contextlib.suppress(EOFError, OSError):
            while connection is not None and self.connections.get(rank) is connection:
                self._on_messages(rank)
                if not connection.read():
                    break
        self._being_lost.discard(rank)
        if self.connections.get(rank) is connection and self.processes.get(rank) is process:
            self._on_lost(rank, cause)

    def drop(self, rank: int) -> bool:
        """Ends process and connection of the position; returns whether there were any."""
        process = self.processes.pop(rank, None)
        if process is not None:
            if self._loop.watches(process.sentinel):
                self._loop.forget(process.sentinel)
            process.kill()
            process.release()
        connection = self.connections.pop(rank, None)
        if connection is not None:
            self._loop.forget(connection)
            connection.close()
        return process is not None or connection is not None

    def let_leave(self, rank: int) -> None:
        """Lets a worker leave at a step boundary: its process ends by itself."""
        connection = self.connections.pop(rank, None)
        if connection is not None:
            self._loop.forget(connection)
            connection.part(messages.Stop(StopReason.LEFT), seconds=_FAREWELL_SECONDS)
        process = self.processes.pop(rank, None)
        if process is not None:
            self._loop.forget(process.sentinel)
            process.release()


_FIRST_DELAY, _LONGEST_DELAY = 0.5, 30.0  # seconds between a replacement's failure to start and the next try


class Vacancies:
    """Starts first workers and replacements, each in a thread, and keeps the spares.

    ``start_worker``: starts the process for a rank, given its incarnation. ``wake``: called when :meth:`take_started`
    has something to return.

    Attributes:
        spares: connections and processes of the workers that wait for a position.
        incarnations: the newest one of each rank that has had a replacement.
    """

    def __init__(
        self,
        options: CoordinatorOptions,
        start_worker: Callable[[int, int], WorkerProcess] | None,
        wake: Callable[[], None],
        positions: Positions,
    ) -> None:
        self.spares: list[tuple[NonBlockingConnection, Process]] = []
        self._positions = positions
        self._nodes: dict[int, str] = {}  # machines of the spares that were placed, by rank
        self._counts: defaultdict[tuple[str, int], Counter[str]] = defaultdict(Counter)  # of each machine, by place
        self._options = options
        self._start_worker = start_worker
        self._wake = wake
        self._started_processes: queue.SimpleQueue[tuple[int, WorkerProcess | None]] = queue.SimpleQueue()
        self._starting: set[int] = set()
        self._restarts = 0
        self.incarnations: dict[int, int] = {}
        self._failures: dict[int, int] = {}
        self._not_before: dict[int, float] = {}
        self._stopped = False

    # ------------------------------------------------------------------ spares

    def place_spare(
        self, free: Collection[int], workers_by_column: Mapping[int, int]
    ) -> tuple[int, NonBlockingConnection, Process] | None:
        """A place of ``free`` for the longest-waiting spare, with connection and process.

        It is of a column with the fewest workers, by ``workers_by_column``. None without a spare or place.
        """
        if not free or not self.spares:
            return None
        connection, process = self.spares.pop(0)
        lowest: dict[int, int] = {}  # free place of each position, or of each pipeline if members need not be together
        members, columns = self._positions.members, self._positions.columns
        fewest = min(workers_by_column.get(rank % columns, 0) for rank in free)
        for rank in free:
            if workers_by_column.get(rank % columns, 0) == fewest:
                group = rank // (members if members > 1 else columns)
                lowest[group] = min(rank, lowest.get(group, rank))
        rank = min(lowest.values(), key=lambda rank: (*self._placement_cost(rank, process.node), rank))
        self._take_node(rank, process.node)
        return rank, connection, process

    def _take_node(self, rank: int, node: str) -> None:
        self._nodes[rank] = node
        for counter in self._counters(rank):
            counter[node] += 1

    def _counters(self, rank: int) -> tuple[Counter[str], Counter[str]]:
        """Counts of workers by machine, in the position and in the pipeline of ``rank``."""
        members, columns = self._positions.members, self._positions.columns
        return self._counts["position", rank // members], self._counts["pipeline", rank // columns]

    def record_earlier_process(self, rank: int, process: Process) -> None:
        """Records that ``process`` held the position before this coordinator."""
        self._take_node(rank, process.node)
        self.incarnations[rank] = max(process.incarnation, self.incarnations.get(rank, 0))

    def _placement_cost(self, rank: int, node: str) -> tuple[bool, bool, bool, bool]:
        """Sort key of ``rank`` as a place for a spare of ``node``; the lowest is best.

        Best is a position with members on this node alone, which the collectives of its layers do not leave, next an
        empty one. Of these the best is in a pipeline with others of its node, so that loss of the node hits different
        stages, next in an empty one.
        """
        position, pipeline = self._counters(rank)
        return bool(position.keys() - {node}), not position, node not in pipeline, bool(pipeline.keys() - {node})

    def leave_node(self, rank: int) -> None:
        if (node := self._nodes.pop(rank, None)) is not None:
            for counter in self._counters(rank):
                counter[node] -= 1
                if not counter[node]:
                    del counter[node]

    def forget_spare(self, connection: NonBlockingConnection) -> None:
        self.spares = [spare for spare in self.spares if spare[0] is not connection]

    # ------------------------------------------------------------------ replacements

    def next_incarnation(self, rank: int) -> int:
        self.incarnations[rank] = self.incarnations.get(rank, 0) + 1
        return self.incarnations[rank]

    def is_starting(self, rank: int) -> bool:
        return rank in self._starting

    def may_start(self, rank: int, now: float, is_first: bool = False) -> bool:
        """Whether a process may start for ``rank`` now; ``is_first``: it replaces none."""
        if self._start_worker is None or (not is_first and self._restarts >= self._options.recovery.most_starts):
            return False
        return now >= self._not_before.get(rank, now)

    def start(self, rank: int, is_first: bool = False) -> None:
        assert self._start_worker is not None
        self._restarts += not is_first
        self._starting.add(rank)
        incarnation = self.next_incarnation(rank)
        start_worker, name = self._start_worker, f"worker {self._positions.name(rank)}"

        def run() -> None:
            process: WorkerProcess | None = None
            try:
                process = start_worker(rank, incarnation)
            except Exception as error:
                if not self._stopped:  # otherwise it was refused, because the run is over
                    log.warning("A process for %s could not be started: %s", name, error)
            self._started_processes.put((rank, process))
            self._wake()

        log.info("Starting %s.", name if is_first else f"a replacement of {name}")
        threading.Thread(target=run, name="recycle-start-worker", daemon=True).start()

    def take_started(self) -> Iterator[tuple[int, WorkerProcess | None]]:
        """Processes started since the last call, as (rank, process); None for failures."""
        while not self._started_processes.empty():
            rank, process = self._started_processes.get()
            self._starting.discard(rank)
            yield rank, process

    def record_success(self, rank: int) -> None:
        self._failures.pop(rank, None)

    def record_failure(self, rank: int, now: float) -> None:
        """The replacement ended before it entered: the next try waits longer."""
        failures = self._failures[rank] = self._failures.get(rank, 0) + 1
        self._not_before[rank] = now + min(_LONGEST_DELAY, _FIRST_DELAY * 2 ** (failures - 1))
        if self._restarts >= self._options.recovery.most_starts:
            log.warning("No more replacements: max_restarts=%d are used up.", self._options.recovery.most_starts)

    def stop(self) -> None:
        """The run is over: processes that are being started are not wanted any more."""
        self._stopped = True

    def close(self) -> None:
        """Kills processes never taken, waiting 5 s at most for starts; closes spares."""
        deadline = time.monotonic() + 5.0
        while self._starting and time.monotonic() < deadline:
            for _, process in self.take_started():
                if process is not None:
                    process.kill()
            time.sleep(0.01)
        for connection, _ in self.spares:
            connection.close()
