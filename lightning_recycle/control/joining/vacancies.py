"""Vacancies: how empty positions are filled.

Spares that wait come first, then replacements are started, with growing pauses after failures.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping

from lightning_recycle.control.joining.run_config import CoordinatorOptions, WorkerProcess
from lightning_recycle.control.journal import Process
from lightning_recycle.control.network.connection import NonBlockingConnection
from lightning_recycle.planning.grid import Positions

log = logging.getLogger(__name__)

_FIRST_DELAY, _LONGEST_DELAY = 0.5, 30.0  # seconds between a replacement's failure to start and the next try


class Vacancies:
    """Starts replacements, each in a thread of its own, and keeps the spares.

    Args:
        options: how many replacements may be started.
        start_worker: starts the process for a rank, given its incarnation and the rank whose device it runs on.
        wake: called when :meth:`take_started` has something to return.
        positions: the positions of the run.

    Attributes:
        spares: connections of the workers that wait for a position, with the process of each.
        incarnations: the newest one of each rank that has had a replacement.
        may_move: whether a worker of another stage may take a position: once per failure, because measurements differ a
            little afterwards.
    """

    def __init__(
        self,
        options: CoordinatorOptions,
        start_worker: Callable[[int, int, int], WorkerProcess] | None,
        wake: Callable[[], None],
        positions: Positions,
    ) -> None:
        self.spares: list[tuple[NonBlockingConnection, Process]] = []
        self.may_move = options.recovery.move_workers
        self._positions = positions
        self._nodes: dict[int, str] = {}  # machines of the spares that were placed, by rank
        self._counts: defaultdict[tuple[str, int], Counter[str]] = defaultdict(Counter)  # of each machine, by place
        self._options = options
        self._start_worker = start_worker
        self._wake = wake
        self._started: queue.SimpleQueue[tuple[int, WorkerProcess | None]] = queue.SimpleQueue()
        self._starting: set[int] = set()
        self._restarts = 0
        self.incarnations: dict[int, int] = {}
        self._failures: dict[int, int] = {}
        self._not_before: dict[int, float] = {}
        self._stopped = False

    # ------------------------------------------------------------------ spares

    def place_spare(
        self, free: Collection[int], held: Mapping[int, int]
    ) -> tuple[int, NonBlockingConnection, Process] | None:
        """Chooses one of the places ``free`` for the spare that has waited longest, if there is one: of a column of
        which the fewest are ``held``, by column. Returns it with the connection and the process of the spare.
        """
        if not free or not self.spares:
            return None
        connection, process = self.spares.pop(0)
        lowest: dict[int, int] = {}  # free place of each position, or of each pipeline if members need not be together
        members, columns = self._positions.members, self._positions.columns
        fewest = min(held.get(rank % columns, 0) for rank in free)
        for rank in free:
            if held.get(rank % columns, 0) == fewest:
                place = rank // (members if members > 1 else columns)
                lowest[place] = min(rank, lowest.get(place, rank))
        rank = min(lowest.values(), key=lambda rank: (*self._strangeness(rank, process.node), rank))
        self._take_node(rank, process.node)
        return rank, connection, process

    def _take_node(self, rank: int, node: str) -> None:
        self._nodes[rank] = node
        for counter in self._counters(rank):
            counter[node] += 1

    def _counters(self, rank: int) -> tuple[Counter[str], Counter[str]]:
        """How many workers of each machine are in the position and in the pipeline of ``rank``."""
        members, columns = self._positions.members, self._positions.columns
        return self._counts["position", rank // members], self._counts["pipeline", rank // columns]

    def held_before(self, rank: int, node: str, incarnation: int) -> None:
        """A worker of ``node`` holds position ``rank`` since before this coordinator was started again."""
        self._take_node(rank, node)
        self.incarnations[rank] = max(incarnation, self.incarnations.get(rank, 0))

    def _strangeness(self, rank: int, node: str) -> tuple[bool, bool, bool, bool]:
        """How badly a worker of ``node`` fits the place ``rank``. Best is a position with members on this node alone,
        which the collectives of its layers do not leave, next an empty one. Of these the best is in a pipeline with
        others of its node, so that loss of the node hits different stages, next in an empty one.
        """
        position, pipeline = (+counter for counter in self._counters(rank))
        return bool(position.keys() - {node}), not position, node not in pipeline, bool(pipeline.keys() - {node})

    def leave_node(self, rank: int) -> None:
        """The worker at ``rank`` is gone."""
        if (node := self._nodes.pop(rank, None)) is not None:
            for counter in self._counters(rank):
                counter[node] -= 1

    def forget_spare(self, connection: NonBlockingConnection) -> None:
        """The spare behind ``connection`` is gone."""
        self.spares = [spare for spare in self.spares if spare[0] is not connection]

    # ------------------------------------------------------------------ replacements

    def next_incarnation(self, rank: int) -> int:
        self.incarnations[rank] = self.incarnations.get(rank, 0) + 1
        return self.incarnations[rank]

    def is_starting(self, rank: int) -> bool:
        return rank in self._starting

    def may_start(self, rank: int, now: float, is_first: bool = False) -> bool:
        """Whether a process may be started for ``rank`` now; the first one of a position replaces none."""
        if self._start_worker is None or (not is_first and self._restarts >= self._options.recovery.most_starts):
            return False
        return now >= self._not_before.get(rank, now)

    def start(self, rank: int, on: int | None = None, is_first: bool = False) -> None:
        """Starts a process for ``rank``, on the device of rank ``on`` (by default its own)."""
        assert self._start_worker is not None
        self._restarts += not is_first
        self._starting.add(rank)
        incarnation = self.next_incarnation(rank)
        start_worker = self._start_worker

        def run() -> None:
            process: WorkerProcess | None = None
            try:
                process = start_worker(rank, incarnation, rank if on is None else on)
            except Exception as error:
                if not self._stopped:  # otherwise it was refused, because the run is over
                    log.warning("A replacement for rank %d could not be started: %s", rank, error)
            self._started.put((rank, process))
            self._wake()

        what = "worker" if is_first else "replacement"
        log.info("Starting a %s for rank %d%s.", what, rank, "" if on is None else f" on the device of rank {on}")
        threading.Thread(target=run, name="recycle-start-worker", daemon=True).start()

    def take_started(self) -> Iterator[tuple[int, WorkerProcess | None]]:
        """The processes started since the last call, as (rank, process); None for one that could not be started."""
        while not self._started.empty():
            rank, process = self._started.get()
            self._starting.discard(rank)
            yield rank, process

    def succeeded(self, rank: int) -> None:
        """The replacement is ready."""
        self._failures.pop(rank, None)

    def failed(self, rank: int, now: float) -> None:
        """The replacement ended before it was let in: the next try waits longer."""
        failures = self._failures[rank] = self._failures.get(rank, 0) + 1
        self._not_before[rank] = now + min(_LONGEST_DELAY, _FIRST_DELAY * 2 ** (failures - 1))
        if self._restarts >= self._options.recovery.most_starts:
            log.warning("No more replacements: max_restarts=%d are used up.", self._options.recovery.most_starts)

    def stop(self) -> None:
        """The run is over: who is being started is not wanted any more."""
        self._stopped = True

    def close(self) -> None:
        """Ends the processes that were started and never taken."""
        deadline = time.monotonic() + 5.0
        while self._starting and time.monotonic() < deadline:
            for _, process in self.take_started():
                if process is not None:
                    process.kill()
            time.sleep(0.01)
        for connection, _ in self.spares:
            connection.close()
