"""Table of the workers of a run: connections and processes by position.

Concept: a position has a connection once its worker has said hello, and a process if this machine's launching process
started it. Messages go to positions; a worker that cannot take one is remembered, as its loss may not be handled in the
middle of a command. :meth:`WorkerTable.drop` makes sure of an end: a lost worker must not return and write.

Must not know: messages of members, the state of the protocol.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from lightning_recycle.control.joining.run_config import WorkerProcess
from lightning_recycle.control.journal import Process
from lightning_recycle.control.network.connection import EventLoop, NonBlockingConnection
from lightning_recycle.control.network.encoding import encode
from lightning_recycle.control.protocol import messages
from lightning_recycle.control.protocol.messages import StopReason
from lightning_recycle.processes import thread_states

_FAREWELL_SECONDS = 0.1  # for a worker that leaves at a step boundary
_EXIT_SECONDS = 0.02  # for the exit status of a process that has closed its connection


class WorkerTable:
    """Connections and processes of workers, by rank.

    Args:
        loop: waits for them.
        on_messages: called with a rank whose inbox may hold messages.
        on_lost: called with the rank of a lost worker, and why.
        holders: the processes that held the positions under an earlier coordinator.

    Attributes:
        connections: of all workers with a position.
        processes: those that were started here.
        holders: the newest process at each position.
    """

    def __init__(
        self,
        loop: EventLoop,
        on_messages: Callable[[int], None],
        on_lost: Callable[[int, str], None],
        holders: Mapping[int, Process],
    ) -> None:
        self.connections: dict[int, NonBlockingConnection] = {}
        self.processes: dict[int, WorkerProcess] = {}
        self.holders: dict[int, Process] = dict(holders)
        self._loop = loop
        self._on_messages, self._on_lost = on_messages, on_lost
        self._unreachable: list[tuple[int, NonBlockingConnection]] = []
        self._being_lost: set[int] = set()  # their last words are heard

    def has(self, rank: int) -> bool:
        """Whether the position has a connection or a process."""
        return rank in self.connections or rank in self.processes

    def thread_states(self, rank: int) -> str:
        """Stacks of the threads of a worker's process, if it is on this machine."""
        holder = self.holders.get(rank)
        return "" if holder is None else thread_states(holder.pid, holder.space)

    # ------------------------------------------------------------------ coming

    def connect(self, rank: int, connection: NonBlockingConnection, holder: Process, *words: Any) -> None:
        """The worker behind ``connection`` takes the position, and gets ``words``."""
        connection.inbox.expects = messages.FROM_WORKERS
        self.connections[rank] = connection
        self.holders[rank] = holder
        with contextlib.suppress(OSError):  # whoever reads from it sees that it is gone
            for message in words:
                connection.send(message)
        self._loop.watch(connection, partial(self._on_readable, rank))
        self._loop.watch_unsent(connection)

    def watch_exit(self, rank: int, process: WorkerProcess) -> None:
        """``process`` was started for the position."""
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
                self._unreachable.append((rank, connection))
            else:
                self._loop.watch_unsent(connection)

    def post_to_all(self, message: Any, others: Iterable[NonBlockingConnection]) -> None:
        """Sends ``message`` to all workers and to ``others``; one that is gone needs none."""
        frame = encode(message)
        for connection in (*self.connections.values(), *others):
            with contextlib.suppress(OSError):  # whoever reads from it sees that it is gone
                connection.send_frame(frame)
                self._loop.watch_unsent(connection)

    def lose_unreachable(self) -> None:
        """Workers that could not be sent a message are lost."""
        while self._unreachable:
            rank, connection = self._unreachable.pop(0)
            if self.connections.get(rank) is connection and rank not in self._being_lost:
                self._lose(rank)

    def forgive(self, now: float) -> None:
        """This process could send nothing until now."""
        for connection in self.connections.values():
            connection.forgive(now)

    # ------------------------------------------------------------------ going

    def describe_exit(self, rank: int) -> str | None:
        """How the process of the position ended; None if it is alive, or was not started here."""
        process = self.processes.get(rank)
        return None if process is None else process.describe_exit(timeout=_EXIT_SECONDS)

    def _on_exit(self, rank: int) -> None:
        if self.describe_exit(rank) is not None:
            self._lose(rank)

    def _lose(self, rank: int) -> None:
        """What the worker said before it was gone still counts: its last words may be the exception that ended it. They
        may have been read already, with a message to which it got no answer.
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
        """Ends whatever is at the position; whether there was something."""
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

    def dismiss(self, rank: int) -> None:
        """Lets a worker go that leaves at a step boundary: it ends by itself."""
        connection = self.connections.pop(rank, None)
        if connection is not None:
            self._loop.forget(connection)
            connection.part(messages.Stop(StopReason.LEFT), seconds=_FAREWELL_SECONDS)
        process = self.processes.pop(rank, None)
        if process is not None:
            self._loop.forget(process.sentinel)
            process.release()
