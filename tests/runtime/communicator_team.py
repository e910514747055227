"""Processes with a communicator each, driven from a test through pipes.

A member runs one task after another in its main thread. Aborts are carried out by its second thread at once, as the
watcher of a worker does.
"""

import os
import pickle
import queue
import random
import shutil
import signal
import tempfile
import threading
import time
import unittest.mock
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch
from support.imitated_transport import Required, imitated
from support.waiting import PATIENCE

from lightning_recycle.callbacks.faults import flipped
from lightning_recycle.control.client import Interrupted
from lightning_recycle.launch.worker_group import process_context
from lightning_recycle.runtime import communicator as communicator_module
from lightning_recycle.runtime.communicator import Communicator, receive_object, send_object
from lightning_recycle.runtime.nccl.nccl_library import CudaStreams, NcclLibrary
from lightning_recycle.runtime.nccl.nccl_transport import NcclTransport
from lightning_recycle.runtime.wire import Channel, HostMemory

HOST = "127.0.0.1"
KEY = b"the key of a team"
FORWARD = Channel.ACTIVATIONS


class Failure(Exception):
    """A task of a member raised; ``kind`` is the name of the exception's class."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class Meeting:
    """A rendezvous in a directory; :meth:`interrupt` ends the waiting, as the announcement of a generation does."""

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)
        self._interrupted = -1
        self.generation = -1
        self.hidden = False

    def publish(self, key: str, value: bytes) -> None:
        if self.hidden and "gate" in key:
            value = b"127.0.0.1 1"
        path = self._directory / key.replace("/", "_")
        path.with_suffix(f".{os.getpid()}").write_bytes(value)
        path.with_suffix(f".{os.getpid()}").rename(path)

    def lookup(self, keys: Sequence[str], cancelled: threading.Event) -> list[bytes]:
        return [self._look_up(key, cancelled) for key in keys]

    def _look_up(self, key: str, cancelled: threading.Event) -> bytes:
        path = self._directory / key.replace("/", "_")
        while not path.exists():
            if self._interrupted >= self.generation or cancelled.is_set():
                raise Interrupted
            time.sleep(0.001)
        return path.read_bytes()

    def interrupt(self, generation: int) -> None:
        self._interrupted = max(self._interrupted, generation)


class Member:
    """One process."""

    def __init__(self, rank: int, directory: str, transport: str) -> None:
        context = process_context()
        self.rank, self.transport = rank, transport
        self._connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(rank, directory, transport, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def start(self, task: Callable[..., Any], *args: Any) -> None:
        """Lets the member begin ``task(communicator, *args)`` and returns when it is about to."""
        self._send(("task", task, args))
        assert self._receive(PATIENCE) == ("started",)

    def result(self, timeout: float = PATIENCE) -> Any:
        kind, *content = self._receive(timeout)
        if kind == "failed":
            raise Failure(*content)
        return content[0]

    def abort(self, generation: int) -> None:
        self._send(("abort", generation))

    def stop(self) -> None:
        """SIGSTOP, and waits until it has taken effect."""
        os.kill(self.process.pid, signal.SIGSTOP)
        _await_stopped(self.process.pid)

    def go_on(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        if self.process.pid is not None:
            self.process.kill()  # a stopped process dies of it too
            self.process.join(10)
        self._connection.close()

    def _send(self, message: Any) -> None:
        self._connection.send_bytes(pickle.dumps(message))

    def _receive(self, timeout: float) -> Any:
        if not self._connection.poll(timeout):
            raise TimeoutError(f"member {self.rank} said nothing for {timeout} s")
        return pickle.loads(self._connection.recv_bytes())


class Team:
    """``size`` members and the directory in which they meet.

    ``transport``: "gloo"; "nccl" for NCCL as imitated by tests/support/fake_nccl.py; "cuda" for itself.
    """

    def __init__(self, size: int, transport: str = "gloo") -> None:
        self._directory = tempfile.mkdtemp(prefix="recycle_team_")
        self.members = [Member(rank, self._directory, transport) for rank in range(size)]
        self.generation = -1

    def run(self, task: Callable[..., Any], *args: Any, ranks: Sequence[int] | None = None) -> list[Any]:
        """Runs ``task`` in several members at once; returns their results by position in ``ranks``."""
        members = self.members if ranks is None else [self.members[rank] for rank in ranks]
        for member in members:
            member.start(task, *args)
        return self.collect(members)

    def collect(self, members: Sequence[Member]) -> list[Any]:
        """The results of ``members``; when one failed, the others are interrupted instead of waiting for it."""
        results: list[Any] = []
        failure: Exception | None = None
        for member in members:
            try:
                results.append(member.result())
            except (Failure, TimeoutError) as error:
                failure = failure or error
                for other in members:
                    other.abort(self.generation)
        if failure is not None:
            raise failure
        return results

    def regroup(self, *ranks: int, stages: int = 1, check_links: bool = False) -> None:
        """Connects ``ranks`` in a new generation; rank r is in stage r modulo ``stages``."""
        self.generation += 1
        self.run(configure, self.generation, ranks, stages, check_links, ranks=ranks)

    def close(self) -> None:
        for member in self.members:
            member.kill()
        shutil.rmtree(self._directory, ignore_errors=True)


def _await_stopped(pid: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if psutil.Process(pid).status() == psutil.STATUS_STOPPED:
            return
    raise TimeoutError(f"process {pid} did not stop")


def real_transport(rank: int) -> tuple[NcclTransport, torch.device]:
    """Payloads by NCCL; where there are more members than devices, several share one."""
    if torch.cuda.nccl.version() >= (2, 30):
        os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"  # for all who share one
    elif rank >= torch.cuda.device_count():
        os.environ["NCCL_HOSTID"] = f"member{rank}"  # a device of another machine is another one
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return Required(rank, device, NcclLibrary(), CudaStreams(device), f"member {rank}"), device


def _serve(rank: int, directory: str, transport: str, connection: Connection) -> None:
    torch.set_num_threads(1)
    meeting = Meeting(directory)
    device, chosen = torch.device("cpu"), None
    if transport == "nccl":
        chosen = imitated(rank, device)
    elif transport == "cuda":
        chosen, device = real_transport(rank)
    communicator = Communicator(rank, HOST, device, meeting, KEY, timeout=60.0, transport=chosen)
    communicator.meeting = meeting
    tasks: queue.Queue[Any] = queue.Queue()

    def read() -> None:
        while True:
            try:
                kind, *content = pickle.loads(connection.recv_bytes())
            except EOFError:
                os._exit(0)
            if kind == "abort":
                meeting.interrupt(content[0])
                communicator.abort(content[0])
            else:
                tasks.put(content)

    threading.Thread(target=read, daemon=True).start()
    while True:
        task, args = tasks.get()
        connection.send_bytes(pickle.dumps(("started",)))
        try:
            answer = ("done", task(communicator, *args))
        except Exception as error:  # told to the test
            answer = ("failed", type(error).__name__, str(error))
        connection.send_bytes(pickle.dumps(answer))


# ---------------------------------------------------------------------- tasks


def configure(
    communicator: Communicator, generation: int, ranks: Sequence[int], stages: int, check_links: bool = False
) -> None:
    mine = [rank for rank in ranks if rank % stages == communicator.rank % stages]
    communicator.meeting.generation = generation
    communicator.configure(generation, ranks, mine, check_links=check_links)


def configure_tied(
    communicator: Communicator, generation: int, ranks: Sequence[int], stages: int, ties: Sequence[tuple[int, ...]]
) -> None:
    """As :func:`configure`; ``ties``: the stages that hold each."""
    rank = communicator.rank
    mine = [other for other in ranks if other % stages == rank % stages]
    rosters = {tie: [other for other in ranks if other % stages in tie] for tie in ties if rank % stages in tie}
    communicator.meeting.generation = generation
    communicator.configure(generation, ranks, mine, rosters)


def hide(communicator: Communicator, hidden: bool) -> None:
    """From now on no member that dials this one reaches it, or again all do."""
    communicator.meeting.hidden = hidden


def send(communicator: Communicator, values: Sequence[Any], destination: int, tags: Sequence[int]) -> None:
    for value, tag in zip(values, tags, strict=True):
        communicator.send(FORWARD, _moved(value, communicator.device), destination, tag)
    communicator.end_step()


def send_damaged(communicator: Communicator, value: Any, destination: int, tag: int) -> None:
    """Sends ``value`` with a bit that flips on the way."""
    communicator.alter_next = lambda sent: flipped(sent, None, random.Random(0))
    communicator.send(FORWARD, value, destination, tag)


def send_unusual(communicator: Communicator, kind: str) -> None:
    """Tries to send what cannot be sent."""
    unusual: dict[str, Any] = {
        "too many tensors": lambda: (torch.zeros(1),) * 32,
        "unknown dtype": lambda: torch.zeros(2, dtype=torch.uint16),
        "too many dimensions": lambda: (torch.zeros([1] * 60),) * 20,
    }
    communicator.send(FORWARD, unusual[kind](), 1, 0)


def receive(communicator: Communicator, source: int, posted: Sequence[int], wanted: Sequence[int]) -> list[Any]:
    """Posts receives for all tags, then waits for them in the order ``wanted``."""
    incoming = {tag: communicator.post_receive(FORWARD, source, tag) for tag in posted}
    values = [communicator.receive(incoming[tag]) for tag in wanted]
    return [_copy(value) for value in values]


def ping_pong(communicator: Communicator, sizes: Sequence[int]) -> list[Any]:
    """Activations from 0 to 1 and gradients back, step by step, with the same tags and sizes that change."""
    me, found = communicator.rank, []
    channel, back = (Channel.ACTIVATIONS, Channel.GRADIENTS) if me == 0 else (Channel.GRADIENTS, Channel.ACTIVATIONS)
    for number, size in enumerate(sizes):
        incoming = communicator.post_receive(back, 1 - me, 0)
        mine = torch.full((size,), float(10 * number + me), device=communicator.device)
        if me == 0:
            communicator.send(channel, mine, 1 - me, 0)
        value = communicator.receive(incoming)
        assert isinstance(value, torch.Tensor)
        if me == 1:
            communicator.send(channel, mine, 1 - me, 0)
        found.append((len(value), set(value.unique().tolist())))
        communicator.end_step()
    return found


def all_reduce(communicator: Communicator, size: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(communicator.rank)
    tensor = torch.randn(size, generator=generator).mul(1e3 ** (communicator.rank - 1)).to(dtype)
    tensor = tensor.to(communicator.device)
    communicator.all_reduce(tensor)
    return tensor.cpu()


def all_reduce_zeros(communicator: Communicator, size: int) -> None:
    communicator.all_reduce(torch.zeros(size, device=communicator.device))


def broadcast(communicator: Communicator, source: int, size: int = 1000) -> torch.Tensor:
    tensor = torch.full((size,), float(communicator.rank), device=communicator.device)
    communicator.end_collective(communicator.begin_collective(tensor, source=source))
    return tensor[:1000].cpu()


def broadcast_tied(
    communicator: Communicator, ties: Sequence[tuple[int, ...]], sources: Sequence[int], size: int
) -> list[float]:
    """What each tie's source has."""
    found = []
    for tie, source in zip(ties, sources, strict=True):
        tensor = torch.full((size,), float(10 * len(tie) + communicator.rank), device=communicator.device)
        communicator.end_collective(communicator.begin_collective(tensor, tie, source))
        (value,) = tensor.unique().tolist()
        found.append(value)
    return found


def sum_within_and_over_stages(
    communicator: Communicator, ties: Sequence[tuple[int, ...]], size: int, count: int
) -> list[torch.Tensor]:
    """The sums of ``count`` tensors over the stage, and then over each tie, all of them begun before the first ends."""
    generator = torch.Generator().manual_seed(communicator.rank)
    groups = [(), *ties]
    tensors = [torch.randn(size, generator=generator).to(communicator.device) for _ in range(count * len(groups))]
    begun = [communicator.begin_collective(tensor, groups[number // count]) for number, tensor in enumerate(tensors)]
    for one in reversed(begun):
        communicator.end_collective(one)
    return [tensor.cpu() for tensor in tensors]


def sum_of_negative_zeros(communicator: Communicator, size: int, dtype: torch.dtype) -> bool:
    """Whether it is negative zeros, by which a parameter that nothing used is known."""
    tensor = torch.full((size,), -0.0, dtype=dtype, device=communicator.device)
    communicator.all_reduce(tensor)
    return bool(torch.signbit(tensor).all()) and not tensor.any()


def send_many(communicator: Communicator, count: int, size: int, peer: int) -> None:
    """Sends ``count`` values of ``size`` bytes and waits until each has been answered."""
    answers = [communicator.post_receive(Channel.GRADIENTS, peer, tag) for tag in range(count)]
    for tag in range(count):
        communicator.send(FORWARD, torch.zeros(size, dtype=torch.uint8, device=communicator.device), peer, tag)
    for answer in answers:
        communicator.receive(answer)


def receive_many(communicator: Communicator, count: int, peer: int) -> None:
    """The counterpart of :func:`send_many`."""
    posted = [communicator.post_receive(FORWARD, peer, tag) for tag in range(count)]
    for tag, incoming in enumerate(posted):
        communicator.receive(incoming)
        communicator.send(Channel.GRADIENTS, torch.zeros(1, device=communicator.device), peer, tag)


def give(communicator: Communicator, size: int, destination: int) -> None:
    send_object(communicator, torch.zeros(size, dtype=torch.uint8, device=communicator.device), destination)


def take(communicator: Communicator, size: int, source: int) -> None:
    assert receive_object(communicator, source).nbytes == size


def exchange_state(communicator: Communicator, sizes: Sequence[int], part_bytes: int) -> tuple[int, bool]:
    """Rank 0 sends an object to rank 1 in parts of ``part_bytes``: how many parts it has sent, and whether what has
    come is whole.
    """
    tensors = [torch.arange(size) for size in sizes]
    value = {"tensors": tensors, "parameter": torch.nn.Parameter(torch.ones(3)), "step": 7, "view": tensors[-1][::2]}
    before, communicator_module._PART_BYTES = communicator_module._PART_BYTES, part_bytes
    try:
        if communicator.rank == 0:
            here = [tensor.to(communicator.device) for tensor in tensors]
            with unittest.mock.patch.object(communicator, "send", side_effect=communicator.send) as sent:
                send_object(communicator, {**value, "tensors": here, "view": here[-1][::2]}, 1)
            return sent.call_count, True
        found = receive_object(communicator, 0)
    finally:
        communicator_module._PART_BYTES = before
    same = all(torch.equal(a, b) for a, b in zip(found["tensors"], tensors, strict=True))
    is_whole = same and found["step"] == 7 and torch.equal(found["view"], value["view"])
    return 0, is_whole and isinstance(found["parameter"], torch.nn.Parameter)


def count_allocations(communicator: Communicator, sizes: Sequence[int], steps: int) -> list[int]:
    """For each of ``steps``, how much memory of the host was taken for values of these sizes to and fro."""
    taken: list[int] = []
    real = HostMemory.empty

    def empty(memory: HostMemory, shape: Sequence[int], dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        taken[-1] += 1
        return real(memory, shape, dtype)

    HostMemory.empty = empty
    for _ in range(steps):
        taken.append(0)
        ping_pong(communicator, sizes)
    HostMemory.empty = real
    return taken


def bound_connecting(communicator: Communicator, seconds: float) -> None:
    from lightning_recycle.runtime import groups_and_transports as module

    module._CONNECT_SECONDS = seconds


def count_descriptors(communicator: Communicator) -> int:
    return len(os.listdir("/proc/self/fd"))


def receive_while_computing(communicator: Communicator, source: int, size: int, rounds: int) -> list[float]:
    """Receives values of ``size`` numbers into memory of the size of what is still being computed with; returns the
    distinct numbers that were computed.
    """
    found: set[float] = set()
    incoming = [communicator.post_receive(FORWARD, source, tag) for tag in range(rounds)]
    for one in incoming:
        value = torch.ones(size, device=communicator.device)
        total = torch.zeros(size, device=communicator.device)
        for _ in range(rounds):
            total = total + value
        del value  # its memory is free for what is computed next, and for nothing else yet
        communicator.receive(one)
        found.update(total.unique().tolist())
    return sorted(found)


def send_computed(communicator: Communicator, size: int, rounds: int, destination: int) -> None:
    """Sends ``size`` numbers that the device is still computing when it is asked to: each is ``rounds``."""
    value = torch.zeros(size, device=communicator.device)
    for _ in range(rounds):
        value = value + 1
    communicator.send(FORWARD, value, destination, 0)
    communicator.receive(communicator.post_receive(Channel.GRADIENTS, destination, 0))


def receive_computed(communicator: Communicator, source: int) -> list[float]:
    """The distinct numbers that :func:`send_computed` has sent, after they were answered."""
    value = communicator.receive(communicator.post_receive(FORWARD, source, 0))
    assert isinstance(value, torch.Tensor)
    assert value.device == communicator.device
    communicator.send(Channel.GRADIENTS, torch.zeros(1, device=communicator.device), source, 0)
    return value.unique().tolist()


def foreign_socket_survives_abort(communicator: Communicator, generation: int) -> bytes:
    """A socket of the process's own, opened before and after the groups, is not theirs to shut down."""
    import socket

    before = socket.socketpair()
    communicator.close()
    communicator.configure(generation, [communicator.rank], [communicator.rank])
    after = socket.socketpair()
    communicator.abort(generation)
    received = b""
    for left, right in (before, after):
        left.sendall(b"x")
        received += right.recv(1)
        left.close()
        right.close()
    return received


def _moved(value: Any, device: torch.device) -> Any:
    """``value``, a tensor or a tuple, on ``device``."""
    if isinstance(value, tuple):
        return tuple(_moved(item, device) for item in value)
    return None if value is None else value.to(device)


def _copy(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_copy(item) for item in value)
    return None if value is None else value.to("cpu", copy=True)
