"""NCCL and a device, imitated on the CPU, as far as its users get into trouble with them.

What is imitated: there are no tags, a transfer belongs to the next one of the other side on the same communicator. A
transfer is a kernel: it occupies its stream until it is done, what is behind it waits, and it does nothing before the
other side's has started. Kernels of one communicator run in the order of their launches, on whatever streams; groups
are for aborts. Communicators begin in the background, and so does the first transfer between two members, which is on
its stream only when both have called. The same holds for sums and broadcasts, which all members must call in one
order, with one size. A device has room for some kernels at a time; further ones do not start. A transfer whose other
side has aborted, or died, hangs until it is aborted itself, and then leaves half of the data. An abort waits for the
device, that is, for the kernels of all communicators that are not aborted yet; a destroy waits for the others' destroy.
Memory is read and written when a kernel runs, not when it is launched.

Two drivers: a test calls :meth:`FakeDevice.step` of one device or another, in an order that it draws (nothing else
makes progress, so a history is its seed); or each process has a device and a thread that steps it, and communicators
are sockets (:class:`SocketNetwork`).

What no user should do is a *violation*, which the device remembers: a call on a communicator in progress, a call that
never returns, a tensor that is gone when its kernel runs, calls that do not belong together.
"""

from __future__ import annotations

import contextlib
import pickle
import random
import select
import socket
import struct
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_recycle.runtime.nccl.nccl_library import UNIQUE_ID_BYTES, NcclError

Message: TypeAlias = tuple[Any, ...]
Lane: TypeAlias = tuple[int, int]
"""(sender, receiver) of what goes over a communicator."""

_ALL = -2  # the receiver of what goes to all members


class HangError(Exception):
    """A call that never returns."""


# ---------------------------------------------------------------------- streams


class FakeEvent:
    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self.done = False

    def query(self) -> bool:
        with self._device.lock:
            self._device.check()
            return self.done

    def proceed(self) -> bool:
        self.done = True
        return True


class _Computation:
    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self.done = False

    def proceed(self) -> bool:
        self._function()
        self.done = True
        return True


class _Wait:
    def __init__(self, event: FakeEvent) -> None:
        self._event = event

    @property
    def done(self) -> bool:
        return self._event.done

    def proceed(self) -> bool:
        return False


class FakeStream:
    cuda_stream = 0

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self.queue: deque[Any] = deque()

    def enqueue(self, work: Any) -> None:
        with self._device.lock:
            self.queue.append(work)
        self._device.stir()

    def record_event(self) -> FakeEvent:
        event = FakeEvent(self._device)
        self.enqueue(event)
        return event

    def compute(self, function: Callable[[], None]) -> None:
        """``function`` runs when the stream comes to it."""
        self.enqueue(_Computation(function))

    def wait(self, event: FakeEvent) -> None:
        """What is enqueued from now on runs after ``event``."""
        self.enqueue(_Wait(event))


# ---------------------------------------------------------------------- kernels


class _Work:
    """What a kernel does with its tensor."""

    done = False

    def __init__(self, comm: FakeComm, tensor: Tensor) -> None:
        self._comm, self._tensor, self._bytes = comm, weakref.ref(tensor), tensor.nbytes
        self._turn = 0

    def _memory(self) -> Any:
        tensor = self._tensor()
        if tensor is None:
            self._comm.device.violate("a kernel ran after its tensor was freed")
            return bytearray(self._bytes)
        return tensor.view(-1).view(torch.uint8).numpy()

    @property
    def greetings(self) -> list[tuple[int, Lane, Lane]]:
        """What connects it: with whom, the lane of what is told, and of what is heard."""
        raise NotImplementedError

    def proceed(self) -> bool:
        """Takes one turn, if it is its own; half of the data is written in each of two turns."""
        raise NotImplementedError


class _Part(_Work):
    """One transfer, over the lane (sender, receiver) of its communicator."""

    def __init__(self, comm: FakeComm, tensor: Tensor, peer: int, sends: bool) -> None:
        super().__init__(comm, tensor)
        self._peer, self._sends = peer, sends
        self.lane = (comm.rank, peer) if sends else (peer, comm.rank)

    @property
    def greetings(self) -> list[tuple[int, Lane, Lane]]:
        return [(self._peer, self.lane, self.lane)]

    def proceed(self) -> bool:
        turn = self._turn
        if self._sends:
            if turn == 0:
                self._put("here", self._bytes)
            elif turn == 1 and self._get():
                data, half = bytes(self._memory()), self._bytes // 2
                self._put("data", data[:half])
                self._put("data", data[half:])
            elif turn != 2 or not self._get():
                return False
            else:
                self.done = True
        else:
            if turn == 0:
                message = self._get()
                if not message:
                    return False
                if message[1] != self._bytes:
                    self._comm.device.violate(f"a send of {message[1]} bytes met a receive of {self._bytes}")
                self._put("pull")
            else:
                message = self._get()
                if not message:
                    return False
                memory, data = self._memory(), message[1]
                start = 0 if turn == 1 else len(memory) - len(data)
                memory[start : start + len(data)] = memoryview(data)[: len(memory) - start]
                if turn == 2:
                    self._put("got")
                    self.done = True
        self._turn += 1
        return True

    def _put(self, *message: Any) -> None:
        self._comm.wires[self._peer].put((self.lane, *message))

    def _get(self) -> Message | None:
        return self._comm.take(self._peer, self.lane)


class _Collective(_Work):
    """A sum, or a broadcast of member ``root``: everybody tells everybody, and adds in the order of the members."""

    def __init__(self, comm: FakeComm, tensor: Tensor, root: int | None) -> None:
        super().__init__(comm, tensor)
        self._root, self._dtype = root, tensor.dtype
        self.lane = (comm.rank, _ALL)
        self._others = [peer for peer in range(comm.size) if peer != comm.rank]
        self._contributions: dict[int, bytes] = {}
        self._result = b""

    @property
    def greetings(self) -> list[tuple[int, Lane, Lane]]:
        return [(peer, self.lane, (peer, _ALL)) for peer in self._others]

    def proceed(self) -> bool:
        if self._turn == 0:
            mine = bytes(self._memory())
            self._contributions[self._comm.rank] = mine
            for peer in self._others:
                self._comm.wires[peer].put((self.lane, "data", mine, self._root, str(self._dtype)))
        elif self._turn == 1:
            if not self._hear():
                return False
        elif not all(self._comm.wires[peer].flush() for peer in self._others):
            return False
        elif self._turn == 2:
            self._write(0, self._bytes // 2)
        else:
            self._write(self._bytes // 2, self._bytes)
            self.done = True
        self._turn += 1
        return True

    def _hear(self) -> bool:
        """Whether all contributions are here."""
        for peer in self._others:
            if peer in self._contributions:
                continue
            message = self._comm.take(peer, (peer, _ALL))  # which also sends on what is left for that peer
            if not message:
                continue
            _, data, root, dtype = message
            if (len(data), root, dtype) != (self._bytes, self._root, str(self._dtype)):
                self._comm.device.violate("members of a communicator have called different collectives")
                data = bytes(self._bytes)
            self._contributions[peer] = data
        if len(self._contributions) < self._comm.size:
            return False
        self._result = self._contributions[self._root] if self._root is not None else self._sum()
        return True

    def _sum(self) -> bytes:
        parts = [
            torch.frombuffer(bytearray(data), dtype=torch.uint8).view(self._dtype)
            for _, data in sorted(self._contributions.items())
        ]
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total.view(torch.uint8).numpy().tobytes()

    def _write(self, start: int, end: int) -> None:
        self._memory()[start:end] = memoryview(self._result)[start:end]


class _Kernel:
    def __init__(self, comm: FakeComm, work: _Work) -> None:
        self.comm, self.work = comm, work
        self.previous = comm.newest
        comm.newest = self
        self.started = self.done = False

    def touch(self) -> None:
        """Sees to it that its memory is there."""
        if not self.work.done:
            self.work._memory()

    def proceed(self) -> bool:
        if self.comm.aborted:  # with half of the data, perhaps
            self.done = True
            return True
        if self.previous is not None and not self.previous.done:
            return False
        if not self.started and not self.comm.device.has_room():
            return False
        self.previous = None
        moved, self.started = not self.started, True
        moved |= self.work.proceed()
        self.done = self.work.done
        return moved


class FakeComm:
    """One member's side of a communicator."""

    def __init__(self, device: FakeDevice, unique_id: bytes, size: int, rank: int) -> None:
        self.device, self.size, self.rank = device, size, rank
        self.meeting = device.network.join(unique_id, size, rank)
        self.wires: dict[int, _LocalWire | _SocketWire] = {}
        self.begun = self.aborted = False
        self.error: Exception | None = None
        self.newest: _Kernel | None = None
        self._inboxes: dict[tuple[int, Lane], deque[Message]] = {}
        self._connected: set[tuple[int, Lane]] = set()
        self._greeted: set[tuple[int, Lane]] = set()
        self._launching: tuple[_Kernel, FakeStream] | None = None
        self.gone: set[int] = set()  # members that have aborted

    @property
    def in_progress(self) -> bool:
        return not self.begun or self._launching is not None

    def take(self, peer: int, lane: Lane) -> Message | None:
        """The next message for ``lane``, without it."""
        while (message := self.wires[peer].get()) is not None:
            self._inboxes.setdefault((peer, message[0]), deque()).append(message[1:])
        inbox = self._inboxes.get((peer, lane))
        return inbox.popleft() if inbox else None

    def launch(self, work: _Work, stream: FakeStream) -> None:
        self._launching = (_Kernel(self, work), stream)
        self._connect()

    def _connect(self) -> bool:
        """Puts what is being launched on its stream once both sides have asked for it; whether it did something."""
        if self._launching is None:
            return False
        kernel, stream = self._launching
        moved = False
        greetings = kernel.work.greetings
        for peer, told, heard in greetings:
            if (peer, told) not in self._greeted:
                self._greeted.add((peer, told))
                self.wires[peer].put((told, "connect"))
                moved = True
            if (peer, heard) not in self._connected and self.take(peer, heard) is not None:
                self._connected.add((peer, heard))
                moved = True
        if all((peer, heard) in self._connected for peer, _, heard in greetings):
            self._launching = None
            stream.enqueue(kernel)
            moved = True
        return moved

    def proceed(self) -> bool:
        """What goes on in the background."""
        if self.aborted:
            return False
        if not self.begun:
            wires = self.meeting.wires()
            if wires is None:
                return False
            self.wires, self.begun = wires, True
            return True
        return self._connect()


# ---------------------------------------------------------------------- the device and its library


class FakeDevice:
    """A device, its streams, and what runs on them. It is all three of them: ``Streams``, ``NcclLibrary``, and the
    device that they belong to. ``room``: how many of NCCL's kernels can run at a time.
    """

    def __init__(self, network: LocalNetwork | SocketNetwork, threaded: bool = False, room: int = 3) -> None:
        self.network, self._room = network, room
        self.lock = threading.RLock()
        self.streams: list[FakeStream] = []
        self.comms: list[FakeComm] = []
        self.violations: list[str] = []
        self.is_lost = False
        self.computing = FakeStream(self)
        self.streams.append(self.computing)
        self._group: list[FakeComm] | None = None  # those that are aborted together
        self._threaded = threaded
        self._stirred = threading.Event()
        self._is_stopped = False
        if threaded:
            threading.Thread(target=self._run, daemon=True).start()

    # streams

    def use(self) -> None:
        pass

    @property
    def current(self) -> FakeStream:
        return self.computing

    def create(self) -> FakeStream:
        stream = FakeStream(self)
        with self.lock:
            self.streams.append(stream)
        return stream

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.full(tuple(shape), -1, dtype=dtype)

    # driving

    def step(self, rng: random.Random | None = None) -> bool:
        """Lets something that can proceed do so; returns whether there was anything."""
        with self.lock:
            what = [stream for stream in self.streams if stream.queue]
            waiting = [comm for comm in self.comms if comm.in_progress and not comm.aborted]
            everything: list[Any] = [*what, *waiting]
            if rng is not None:
                rng.shuffle(everything)
            for one in everything:
                if isinstance(one, FakeComm):
                    if one.proceed():
                        return True
                    continue
                head = one.queue[0]
                moved = head.proceed()
                if head.done:
                    one.queue.popleft()
                    moved = True
                if moved:
                    return True
            return False

    def stir(self) -> None:
        self._stirred.set()

    def stop(self) -> None:
        """Ends its thread."""
        self._is_stopped = True
        self.stir()

    def _run(self) -> None:
        while not self._is_stopped:
            if self.step():
                continue
            with self.lock:
                busy = any(stream.queue for stream in self.streams) or any(
                    comm.in_progress and not comm.aborted for comm in self.comms
                )
            self._stirred.wait(0.0005 if busy else 0.05)
            self._stirred.clear()

    @property
    def running(self) -> list[_Kernel]:
        """The kernels that occupy the device."""
        heads = [stream.queue[0] for stream in self.streams if stream.queue]
        return [head for head in heads if isinstance(head, _Kernel) and head.started and not head.comm.aborted]

    def has_room(self) -> bool:
        """Whether another kernel can start."""
        return len(self.running) < self._room

    # trouble

    def violate(self, what: str) -> None:
        self.violations.append(what)

    def check(self) -> None:
        if self.is_lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def _hang(self, what: str, over: Callable[[], bool]) -> None:
        """The caller waits until ``over``; where nobody else can do anything meanwhile, that is for ever."""
        if not self._threaded:
            self.violate(what)
            raise HangError(what)
        self.lock.release()  # held once by the caller
        try:
            while True:
                with self.lock:
                    if over():
                        return
                time.sleep(0.0005)
        finally:
            self.lock.acquire()

    # NCCL

    def unique_id(self) -> bytes:
        return self.network.unique_id()

    def init(self, unique_id: bytes, size: int, rank: int) -> FakeComm:
        with self.lock:
            self.check()
            comm = FakeComm(self, unique_id, size, rank)
            self.comms.append(comm)
        self.stir()
        return comm

    def in_progress(self, comm: FakeComm) -> bool:
        with self.lock:
            self.check()
            if comm.error is not None:
                raise comm.error
            return comm.in_progress

    def send(self, comm: FakeComm, tensor: Tensor, peer: int, stream: FakeStream) -> None:
        self._call(comm, _Part(comm, tensor, peer, sends=True), stream)

    def receive(self, comm: FakeComm, tensor: Tensor, peer: int, stream: FakeStream) -> None:
        self._call(comm, _Part(comm, tensor, peer, sends=False), stream)

    def all_reduce(self, comm: FakeComm, tensor: Tensor, stream: FakeStream) -> None:
        self._call(comm, _Collective(comm, tensor, None), stream)

    def broadcast(self, comm: FakeComm, tensor: Tensor, root: int, stream: FakeStream) -> None:
        self._call(comm, _Collective(comm, tensor, root), stream)

    def _call(self, comm: FakeComm, work: _Work, stream: FakeStream) -> None:
        with self.lock:
            self.check()
            if comm.in_progress or comm.aborted or comm.error is not None:
                self.violate("a call on a communicator that is in progress, aborted, or in error")
                raise NcclError("invalid usage")
            assert self._group is None
            comm.launch(work, stream)
        self.stir()

    def group_start(self) -> None:
        assert self._group is None
        self._group = []

    def group_end(self) -> None:
        with self.lock:
            aborted, self._group = self._group, None
            if aborted:
                self._await_device("an abort")
        self.stir()

    def abort(self, comm: FakeComm) -> None:
        with self.lock:
            if comm.aborted:
                self.violate("a communicator was aborted twice")
                return
            for kernel in self.running:
                if kernel.comm is comm:
                    kernel.touch()  # until then it may write
            comm.aborted = True  # in a group, too: its kernels end at once
            for peer in range(comm.size):
                if peer != comm.rank and peer in comm.wires:
                    with contextlib.suppress(OSError):
                        comm.wires[peer].put(((-1, -1), "aborted"))
            comm.meeting.close()
            self.comms.remove(comm)
            if self._group is None:
                self._await_device("an abort")
            else:
                self._group.append(comm)
        self.stir()

    def destroy(self, comm: FakeComm) -> None:
        """What nobody should call after a failure."""
        with self.lock:
            gone = any(comm.take(peer, (-1, -1)) is not None for peer in comm.wires)
            if gone or comm.in_progress or (comm.newest is not None and not comm.newest.done):
                self._hang("a destroy waits for a member that has aborted, or for a kernel", lambda: False)

    def _await_device(self, what: str) -> None:
        """Frees memory, for which CUDA waits until nothing runs."""
        for stream in self.streams:
            head = stream.queue[0] if stream.queue else None
            if isinstance(head, _Kernel) and head.comm.aborted:
                head.proceed()
                stream.queue.popleft()
        running = self.running
        if running:
            self._hang(
                f"{what} waits for a kernel of another communicator, which waits for its other side",
                lambda: all(kernel.done or kernel.comm.aborted for kernel in running),
            )


# ---------------------------------------------------------------------- networks


class _LocalWire:
    def __init__(self, outgoing: deque[Message], incoming: deque[Message]) -> None:
        self._outgoing, self._incoming = outgoing, incoming

    def put(self, message: Message) -> None:
        self._outgoing.append(message)

    def get(self) -> Message | None:
        return self._incoming.popleft() if self._incoming else None

    def flush(self) -> bool:
        return True


class LocalNetwork:
    """All members in this process, each with a device of its own."""

    def __init__(self) -> None:
        self._ids = 0
        self.members: dict[bytes, set[int]] = {}
        self._lanes: dict[tuple[bytes, int, int], deque[Message]] = {}

    def lane(self, unique_id: bytes, source: int, destination: int) -> deque[Message]:
        return self._lanes.setdefault((unique_id, source, destination), deque())

    def unique_id(self) -> bytes:
        self._ids += 1
        return self._ids.to_bytes(UNIQUE_ID_BYTES, "big")

    def join(self, unique_id: bytes, size: int, rank: int) -> _LocalMeeting:
        self.members.setdefault(unique_id, set()).add(rank)
        return _LocalMeeting(self, unique_id, size, rank)


class _LocalMeeting:
    """One member on its way into a communicator; there are no wires as long as others are missing."""

    def __init__(self, network: LocalNetwork, unique_id: bytes, size: int, rank: int) -> None:
        self._network, self._id, self._size, self._rank = network, unique_id, size, rank

    def wires(self) -> dict[int, _LocalWire] | None:
        if len(self._network.members[self._id]) < self._size:
            return None
        lane, others = self._network.lane, set(range(self._size)) - {self._rank}
        return {peer: _LocalWire(lane(self._id, self._rank, peer), lane(self._id, peer, self._rank)) for peer in others}

    def close(self) -> None:
        pass


class _SocketWire:
    """Messages over a socket that does not block. Whoever ends falls silent, as NCCL's peers do."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._outgoing, self._incoming = bytearray(), bytearray()

    def put(self, message: Message) -> None:
        data = pickle.dumps(message)
        self._outgoing += struct.pack("=Q", len(data)) + data
        self.flush()

    def flush(self) -> bool:
        with contextlib.suppress(OSError):
            while self._outgoing:
                sent = self._socket.send(self._outgoing[: 1 << 20])
                del self._outgoing[:sent]
        return not self._outgoing

    def get(self) -> Message | None:
        self.flush()
        with contextlib.suppress(OSError):
            while chunk := self._socket.recv(1 << 20):
                self._incoming += chunk
        if len(self._incoming) < 8:
            return None
        (size,) = struct.unpack_from("=Q", self._incoming)
        if len(self._incoming) < 8 + size:
            return None
        message: Message = pickle.loads(bytes(self._incoming[8 : 8 + size]))
        del self._incoming[: 8 + size]
        return message


class SocketNetwork:
    """Each member in a process: it listens at an address of its own, and connects to those of lower rank.

    The addresses are abstract ones of Linux, which are gone with their process, also with a killed one.
    """

    def unique_id(self) -> bytes:
        return f"\0fake-nccl-{uuid.uuid4().hex}".encode().ljust(UNIQUE_ID_BYTES, b"\0")

    def join(self, unique_id: bytes, size: int, rank: int) -> _SocketMeeting:
        return _SocketMeeting(unique_id.rstrip(b"\0").decode(), size, rank)


class _SocketMeeting:
    def __init__(self, address: str, size: int, rank: int) -> None:
        self._address, self._size, self._rank = address, size, rank
        self._sockets: dict[int, socket.socket] = {}
        self._unnamed: list[socket.socket] = []  # accepted, and yet to say their rank
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"{address}.{rank}")
        self._listener.listen(size)
        self._listener.setblocking(False)

    def wires(self) -> dict[int, _SocketWire] | None:
        for peer in range(self._rank):
            if peer not in self._sockets:
                self._connect(peer)
        with contextlib.suppress(BlockingIOError):
            while True:
                self._unnamed.append(self._listener.accept()[0])
        for sock in list(self._unnamed):
            if select.select([sock], [], [], 0)[0]:
                self._unnamed.remove(sock)
                if name := sock.recv(1):
                    self._sockets[name[0]] = sock
        if len(self._sockets) < self._size - 1:
            return None
        self._listener.close()
        return {peer: _SocketWire(sock) for peer, sock in self._sockets.items()}

    def _connect(self, peer: int) -> None:
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(f"{self._address}.{peer}")
            sock.send(bytes([self._rank]))
        except OSError:  # it is not there yet, or has ended
            sock.close()
        else:
            self._sockets[peer] = sock

    def close(self) -> None:
        for sock in (*self._sockets.values(), *self._unnamed):
            sock.close()
        self._listener.close()
