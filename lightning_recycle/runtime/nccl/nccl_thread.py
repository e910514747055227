"""The thread that owns NCCL in a worker: its operations, and links for its notes.

One thread per generation calls NCCL, exchanges notes with the neighbours and the leaders of groups, and launches
:class:`NcclOps`' decisions. So no two threads call NCCL at a time, a send leaves although the main thread is computing,
and an abort is not held up by its waits. The main thread hands over requests and waits; an aborted one counts as never
done, whatever the device reports.
"""

from __future__ import annotations

import contextlib
import select
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping

from lightning_recycle.runtime.groups import CommunicationError
from lightning_recycle.runtime.nccl.nccl_comms import Comms, Kept, Kind, Note, Place
from lightning_recycle.runtime.nccl.nccl_library import CudaStreams
from lightning_recycle.runtime.nccl.transfer_order import Collective, GroupPayloads, Payloads, Receiving, Sending


class NcclOps:
    """The communicators of one worker in one generation, and their traffic.

    Called by the thread alone. Results count once *finished*, confirmed by the device, and never after :meth:`abort`.
    Tensors live as long as the device may use them.
    """

    def __init__(self, comms: Comms, pairs: Payloads, groups: GroupPayloads) -> None:
        self._comms, self.pairs, self.groups = comms, pairs, groups
        self._aborted = False

    @property
    def connected(self) -> bool:
        """Whether something has gone over every communicator."""
        return self.pairs.connected and self.groups.connected

    @property
    def lost(self) -> set[int]:
        """Workers that can no longer be notified."""
        return self.pairs.lost

    def lose(self, rank: int) -> None:
        """Launches nothing more with worker ``rank``."""
        self.pairs.lost.add(rank)
        self.groups.lost.add(rank)

    def take_note(self, peer: int, note: Note) -> None:
        if note.kind is Kind.INVITE:
            self._comms.take_note(note)
        else:
            (self.pairs if note.kind in (Kind.OFFER, Kind.GO) else self.groups).take_note(peer, note)

    def advance(self) -> bool:
        """Does all possible work; returns whether to call it again soon."""
        self._comms.begin()
        pairs, groups = self.pairs.advance(), self.groups.advance()
        return pairs or groups

    def reserve(self, places: Iterable[Place]) -> None:
        """Begins communicators for the next generation, in the background. Called once."""
        self._comms.reserve(places)

    def abort(self) -> dict[Place, Kept]:
        """Ends everything once the device is done with it; returns the kept communicators.

        All workers must abort: a transfer with one that has aborted would otherwise never end.
        """
        if self._aborted:
            return {}
        self._aborted = True
        kept = self._comms.abort()
        self.pairs.drop()
        self.groups.drop()
        return kept


ABORT_SECONDS = 10.0  # what an abort may take; it waits for the device, which is asked to stop
_POLL_SECONDS = 50e-6, 500e-6  # between two looks at a device that is busy; one takes 36 us of Python's lock (measured)
_POLL_SHARE = 0.05  # of the time since something happened, in between: so little later is noticed what takes long
_MOST_SELECTED = 1024  # FD_SETSIZE
_LOOK_SECONDS = 0.1  # between checks of what nobody is woken up for


class NcclThread:
    """The thread that owns the communicators of one generation.

    ``traffic`` makes the operations, given callbacks for notes and for finished work. ``kept``: communicators for the
    next generation, complete after the end.
    """

    def __init__(
        self,
        traffic: Callable[[Callable[[int, Note], None], Callable[[], None]], NcclOps],
        generation: int,
        streams: CudaStreams,
        links: Mapping[int, socket.socket],
        cancelled: threading.Event,
    ) -> None:
        self._generation, self._cancelled, self._streams = generation, cancelled, streams
        self.linked = frozenset(links)
        self._links = {peer: _Link(sock) for peer, sock in links.items()}
        self._traffic = traffic(self._send_note, self._notify)
        self.kept: dict[Place, Kept] = {}
        self._is_over = threading.Event()
        self._asked: deque[Callable[[], None]] = deque()  # by the main thread
        self._changed = threading.Condition()
        self._moved = time.monotonic()  # when something happened
        self._failure: Exception | None = None
        self._selector = selectors.EpollSelector()
        self._alarm, self._bell = socket.socketpair()
        self._bell.setblocking(False)
        self._alarm.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="recycle-nccl", daemon=True)

    @property
    def connected(self) -> bool:
        """Whether something has gone over all communicators."""
        return self._traffic.connected

    def start(self) -> None:
        self._thread.start()

    # the main thread

    def members(self, group: int) -> Collection[int]:
        return self._traffic.groups.members(group)

    def begin(self, collective: Collective) -> None:
        self._ask(lambda: self._traffic.groups.begin(collective))

    def send(self, sending: Sending) -> None:
        self._ask(lambda: self._traffic.pairs.send(sending))

    def receive(self, receiving: Receiving) -> None:
        """Returns when ``receiving`` is there."""
        self._ask(lambda: self._traffic.pairs.receive(receiving))
        self.wait_for(lambda: receiving.finished, (receiving.peer,))

    def reserve(self, places: Iterable[Place]) -> None:
        """See :meth:`NcclOps.reserve`."""
        self._ask(lambda: self._traffic.reserve(places))

    def _ask(self, request: Callable[[], None]) -> None:
        self._asked.append(request)
        self.wake()

    def wake(self) -> None:
        """Has the thread look for changes."""
        with contextlib.suppress(OSError):  # full, so it has been rung; or closed, as the thread has ended
            self._bell.send(b"!")
        self._notify()

    def wait_for(
        self, condition: Callable[[], bool], peers: Collection[int] = (), timeout: float | None = None
    ) -> None:
        """Waits for ``condition``, for which workers ``peers`` must stay connected.

        Raises CommunicationError after an abort or the loss of a peer, TimeoutError after ``timeout`` seconds, and
        RuntimeError for NCCL or a lost device.
        """
        began = time.monotonic()
        with self._changed:
            while True:
                # In this order: what an abort ends is not there, whatever the device says.
                is_met = condition()
                if self._cancelled.is_set():
                    raise CommunicationError(f"Generation {self._generation} was aborted.")
                if self._failure is not None:
                    raise self._failure
                if is_met:
                    return
                for peer in peers:
                    if peer in self._traffic.lost:
                        raise CommunicationError(f"Generation {self._generation}: the link to worker {peer} has ended.")
                if timeout is not None and time.monotonic() - began > timeout:
                    raise TimeoutError(f"not all communicators were connected after {timeout:g} s")
                self._changed.wait(_LOOK_SECONDS)

    def _notify(self) -> None:
        self._moved = time.monotonic()
        with self._changed:
            self._changed.notify_all()

    def end(self) -> None:
        self._is_over.set()
        self.wake()
        if self._thread.ident is not None:
            self._thread.join(ABORT_SECONDS)
        if self._thread.is_alive():
            raise RuntimeError(
                f"CUDA error, presumably: NCCL has not aborted generation {self._generation} within"
                f" {ABORT_SECONDS:.0f} s, so this process cannot use its device any more."
            )

    # its own thread

    def _run(self) -> None:
        try:
            self._streams.use()
            self._selector.register(self._alarm, selectors.EVENT_READ, None)
            for peer, link in self._links.items():
                self._selector.register(link.socket, selectors.EVENT_READ, peer)
            while not (self._cancelled.is_set() or self._is_over.is_set()):
                while self._asked:
                    self._asked.popleft()()
                busy = self._traffic.advance()
                self._listen(_poll_seconds(time.monotonic() - self._moved) if busy else _LOOK_SECONDS)
        except Exception as error:  # the main thread raises it
            self._failure = error
        finally:
            self._notify()
            self._end()

    def _end(self) -> None:
        try:
            self.kept = self._traffic.abort()
        except Exception as error:  # of a device that is lost; what failed first says more
            self._failure = self._failure or error
        finally:
            self._selector.close()
            for sock in (self._alarm, self._bell, *(link.socket for link in self._links.values())):
                sock.close()
            self._notify()

    def _listen(self, timeout: float) -> None:
        for link in self._links.values():
            link.flush()
        for key, _ in self._select(timeout):
            self._moved = time.monotonic()
            if key.data is None:
                self._alarm.recv(4096)
                continue
            link = self._links[key.data]
            for note in link.notes():
                self._traffic.take_note(key.data, note)
            if link.ended:
                self._selector.unregister(link.socket)
                self._traffic.lose(key.data)
                self._notify()

    def _select(self, timeout: float) -> list[tuple[selectors.SelectorKey, int]]:
        """Ready connections, after ``timeout`` seconds at most.

        epoll counts milliseconds; ``select`` does not, and takes the epoll instance for one descriptor, if its number
        is small.
        """
        descriptor = self._selector.fileno()
        if timeout >= 1e-3 or descriptor >= _MOST_SELECTED:
            return self._selector.select(timeout)
        select.select([descriptor], [], [], timeout)
        return self._selector.select(0)

    def _send_note(self, peer: int, note: Note) -> None:
        self._links[peer].put(note)


class _Link:
    """Notes over a connection that does not block."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.ended = False
        self._outgoing, self._incoming = bytearray(), bytearray()

    def put(self, note: Note) -> None:
        self._outgoing += note.encode()
        self.flush()

    def flush(self) -> None:
        """Sends without blocking; the rest leaves with the next look."""
        if not self._outgoing or self.ended:
            return
        try:
            del self._outgoing[: self.socket.send(self._outgoing)]
        except BlockingIOError:
            pass
        except OSError:  # reading tells
            self._outgoing.clear()

    def notes(self) -> list[Note]:
        try:
            data = self.socket.recv(64 * 1024)
        except BlockingIOError:
            return []
        except OSError:  # ended by the other side, or cut off by an abort
            data = b""
        self.ended = not data
        self._incoming += data
        return Note.decode_all(self._incoming)


def _poll_seconds(waited: float) -> float:
    """Interval between looks at the device after ``waited`` seconds without events."""
    return min(max(_POLL_SHARE * waited, _POLL_SECONDS[0]), _POLL_SECONDS[1])
