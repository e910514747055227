"""Workers that exchange payloads in a simulated world: which goes on next is drawn, so a history is its number.

Each worker has an imitated device, the real :class:`~lightning_recycle.runtime.payloads.Payloads`, and a *host*: a
program of computations, sends and receives, whose order comes from a random order of all messages, so that no correct
transport can deadlock. Headers (Gloo) and notes (links) arrive late but in order. Computations run on the device
when it comes to them. In some histories a worker dies, a communicator fails, a device is lost, or everybody is told to
abort, each at its own moment; the survivors then begin another generation with another plan.

``python tests/runtime/nccl_histories.py FIRST COUNT`` runs histories; a number alone runs one and prints it.
"""

from __future__ import annotations

import itertools
import random
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from support.fake_nccl import FakeDevice, HangError, LocalNetwork
from torch import Tensor

from lightning_recycle.runtime import payloads as product
from lightning_recycle.runtime.nccl import NcclError

PATIENCE = 15_000  # turns without which a world that goes on must not be; a history has some hundreds
CPU = torch.device("cpu")


class BrokenPromiseError(AssertionError):
    """A history in which the transport did what it must not."""


@dataclass
class Message:
    """One value from a worker to another: tensors of these numbers of items, under (channel, tag)."""

    source: int
    destination: int
    key: tuple[int, int]
    sizes: tuple[int, ...]
    content: int


@dataclass
class Worker:
    """What one worker is and holds in the current generation."""

    rank: int
    device: FakeDevice
    program: deque[tuple[str, Message]] = field(default_factory=deque)
    payloads: Any = None
    cancelled: bool = False
    ended: bool = False  # its courier has aborted
    failure: Exception | None = None
    waiting: tuple[Any, list[Tensor], Message] | None = None
    headers: dict[int, deque[Message]] = field(default_factory=dict)
    notes: dict[int, deque[bytes]] = field(default_factory=dict)
    done: bool = False


Turn: TypeAlias = tuple[Callable[[Any], bool], Worker]


class World:
    """One history."""

    def __init__(self, seed: int, verbose: bool = False) -> None:
        self.rng = random.Random(seed)
        self.verbose = verbose
        self.network = LocalNetwork()
        self.published: dict[str, bytes] = {}  # by key; what was published stays
        self.met: Counter[str] = Counter()
        size = self.rng.choice([2, 2, 3, 3, 4, 5])
        self.workers = [Worker(rank, FakeDevice(self.network)) for rank in range(size)]
        self.alive = list(self.workers)
        self.generation = -1

    def say(self, *what: Any) -> None:
        if self.verbose:
            print(*what)

    # a plan

    def plan(self) -> list[Message]:
        """Messages in an order in which they can be exchanged one after the other."""
        count = self.rng.randint(1, 12)
        messages = []
        for number in range(count):
            source, destination = self.rng.sample([worker.rank for worker in self.alive], 2)
            sizes = tuple(self.rng.randint(1, 6) for _ in range(self.rng.choice([1, 1, 2, 3])))
            messages.append(Message(source, destination, (self.rng.randint(0, 1), number), sizes, self.content()))
        return messages

    def content(self) -> int:
        self.met["messages"] += 1
        return self.met["messages"]

    def begin(self) -> None:
        """A new generation."""
        self.generation += 1
        messages = self.plan()
        pairs = {(m.source, m.destination) for m in messages}
        pairs |= {(b, a) for a, b in pairs}
        self.say(f"generation {self.generation}:", [w.rank for w in self.alive], messages)
        for worker in self.alive:
            me = worker.rank
            for a, b in sorted(pairs):
                if a == me:
                    self.published[self.name_of(a, b)] = worker.device.unique_id()
        for worker in self.alive:
            me = worker.rank
            outgoing = {b: self.published[self.name_of(a, b)] for a, b in sorted(pairs) if a == me}
            incoming = {a: self.published[self.name_of(a, b)] for a, b in sorted(pairs) if b == me}
            program: deque[tuple[str, Message]] = deque()
            postponed: list[Message] = []
            for message in messages:
                if message.source == me:
                    program.append(("send", message))
                if message.destination == me:
                    postponed.append(message)
                # Receives may be waited for later, in another order, but not behind what depends on nothing else.
                if postponed and self.rng.random() < 0.6:
                    self.rng.shuffle(postponed)
                    program.extend(("receive", message) for message in postponed)
                    postponed.clear()
            self.rng.shuffle(postponed)
            program.extend(("receive", message) for message in postponed)
            worker.program, worker.cancelled, worker.ended, worker.failure = program, False, False, None
            worker.waiting, worker.done = None, False
            worker.headers = {other.rank: deque() for other in self.workers}
            worker.notes = {other.rank: deque() for other in self.workers}

            def tell(peer: int, note: product.Note, me: int = me) -> None:
                self.workers[peer].notes[me].append(note.encode())

            worker.payloads = product.Payloads(
                me, self.generation, worker.device, worker.device, outgoing, incoming, CPU, tell
            )

    def name_of(self, source: int, destination: int) -> str:
        return f"generation{self.generation}/{source}-{destination}"

    # turns: each returns whether something happened

    def host(self, worker: Worker) -> bool:
        """The main thread of ``worker``."""
        if worker.done:
            return False
        if worker.waiting is not None:
            receiving, tensors, message = worker.waiting
            there = receiving.finished
            if worker.cancelled or worker.failure is not None:
                return self.stop(worker)
            if not there:
                return False
            worker.waiting = None
            self.check(worker, message, tensors)
            return True
        if worker.cancelled or worker.failure is not None:
            return self.stop(worker)
        if not worker.payloads.connected:
            return False
        if not worker.program:
            worker.done = True
            return True
        kind, message = worker.program[0]
        if kind == "send":
            worker.program.popleft()
            tensors = [torch.zeros(size, dtype=torch.int64) for size in message.sizes]
            worker.device.current.compute(lambda: fill(tensors, message))
            ready = worker.device.current.record()
            self.workers[message.destination].headers[worker.rank].append(message)
            worker.payloads.send(
                product.Sending(message.destination, message.key, digest(message), list(tensors), ready)
            )
            return True
        arrived = worker.headers[message.source]
        if message not in arrived:
            return False
        arrived.remove(message)
        worker.program.popleft()
        tensors = self.buffers(worker, message)
        free = worker.device.current.record()
        receiving = product.Receiving(message.source, message.key, digest(message), tensors, free)
        worker.payloads.receive(receiving)
        worker.waiting = receiving, tensors, message
        return True

    def buffers(self, worker: Worker, message: Message) -> list[Tensor]:
        """Memory that the device may still be using for something older, which writes to it."""
        tensors = [torch.full((size,), -1, dtype=torch.int64) for size in message.sizes]

        def scribble() -> None:
            for tensor in tensors:
                tensor.fill_(-2)

        if self.rng.random() < 0.5:
            worker.device.current.compute(scribble)
        return tensors

    def check(self, worker: Worker, message: Message, tensors: list[Tensor]) -> None:
        expected = [torch.zeros(size, dtype=torch.int64) for size in message.sizes]
        fill(expected, message)
        if any(not torch.equal(a, b) for a, b in zip(tensors, expected, strict=True)):
            raise BrokenPromiseError(f"worker {worker.rank} received {tensors} instead of {expected}")
        self.met["received"] += 1

    def stop(self, worker: Worker) -> bool:
        worker.done, worker.waiting = True, None
        worker.program.clear()
        return True

    def courier(self, worker: Worker) -> bool:
        """The other thread of ``worker``."""
        if worker.ended:
            return False
        if worker.cancelled or worker.failure is not None:
            try:
                worker.payloads.abort()
            except HangError as error:
                raise BrokenPromiseError(str(error)) from error
            except (NcclError, RuntimeError) as error:
                worker.failure = worker.failure or error
            worker.ended = True
            return True
        try:
            worker.payloads.advance()
        except (NcclError, RuntimeError) as error:
            if isinstance(error, NcclError) and str(error) != "injected":
                raise BrokenPromiseError(f"worker {worker.rank}: {error}") from error
            worker.failure = error
            self.met["noticed"] += 1
        return True

    def deliver(self, worker: Worker) -> bool:
        for peer, notes in worker.notes.items():
            if notes and not worker.ended and self.rng.random() < 0.5:
                try:
                    worker.payloads.hear(peer, product.Note.decode(notes.popleft()))
                except NcclError as error:
                    raise BrokenPromiseError(str(error)) from error
                return True
        return False

    # a generation

    def run(self) -> Counter[str]:
        """Runs the history.

        Raises:
            BrokenPromiseError: if a promise is broken.
        """
        for trouble in self.troubles():
            self.begin()
            self.play(trouble)
            if len(self.alive) < 2:
                break
        self.met["histories"] += 1
        return self.met

    def troubles(self) -> Iterator[str]:
        for _ in range(self.rng.choice([1, 2, 3])):
            yield self.rng.choice(["", "abort", "death", "error", "lost", "late abort"])
        yield ""

    def play(self, trouble: str) -> None:
        victim = self.rng.choice(self.alive)
        moment = self.rng.randint(1, self.rng.choice([100, 400, 1_200]))
        self.met[trouble or "quiet"] += 1
        told: dict[int, int] = {}  # when who hears of the end
        turns: list[Turn] = [
            (turn, worker) for worker in self.alive for turn in (self.host, self.courier, self.deliver, self.step)
        ]
        order = self.order(turns)
        for turn_number in range(PATIENCE):
            if trouble and turn_number == moment:
                self.say(turn_number, trouble, victim.rank)
                told = self.strike(trouble, victim, turn_number)
                order = self.order([pair for pair in turns if pair[1] in self.alive])
            if told:
                for rank in [rank for rank, moment_told in told.items() if moment_told <= turn_number]:
                    self.workers[rank].cancelled = True
            turn, worker = next(order)
            turn(worker)
            if worker.device.violations:
                raise BrokenPromiseError(f"worker {worker.rank}: {worker.device.violations}")
            if turn_number % 16 == 0 and self.is_over(bool(told)):
                if told or turn_number > moment or not trouble:
                    break
                trouble = ""  # too late: the generation ends without
        else:
            self.fail_to_end()
        for worker in self.alive:
            if not worker.ended:  # as when a generation ends at a step boundary
                worker.cancelled = True
                self.courier(worker)
                if worker.device.violations:
                    raise BrokenPromiseError(f"worker {worker.rank}: {worker.device.violations}")
            if worker.device.comms:
                raise BrokenPromiseError(f"worker {worker.rank} has left a communicator behind")
        lost = [worker for worker in self.alive if worker.device.is_lost]
        for worker in lost:
            self.alive.remove(worker)

    def order(self, turns: list[Turn]) -> Iterator[Turn]:
        """Whose turn it is, for ever; some are slower than others."""
        weights = list(itertools.accumulate(self.rng.choice([1, 1, 1, 4]) for _ in turns))
        while True:
            yield from self.rng.choices(turns, cum_weights=weights, k=128)

    def strike(self, trouble: str, victim: Worker, now: int) -> dict[int, int]:
        """What goes wrong; returns when each survivor is told to abort."""
        if trouble == "death":
            self.alive.remove(victim)
        elif trouble == "lost":
            victim.device.is_lost = True
        elif trouble == "error" and victim.device.comms:
            self.rng.choice(victim.device.comms).error = NcclError("injected")
        spread = 400 if trouble == "late abort" else 60
        return {worker.rank: now + self.rng.randint(1, spread) for worker in self.alive}

    def step(self, worker: Worker) -> bool:
        return worker.device.step(self.rng)

    def is_over(self, ended: bool) -> bool:
        if ended:
            return all(worker.done and worker.ended for worker in self.alive)
        return all(worker.done for worker in self.alive)

    def fail_to_end(self) -> None:
        states = {w.rank: (w.done, w.ended, w.waiting and w.waiting[2], list(w.program)[:1]) for w in self.alive}
        raise BrokenPromiseError(f"after {PATIENCE} turns there still wait {states}")


def fill(tensors: list[Tensor], message: Message) -> None:
    """The content of ``message``."""
    for place, tensor in enumerate(tensors):
        tensor.copy_(torch.arange(len(tensor)) + 1_000 * message.content + 100 * place)


def digest(message: Message) -> int:
    return hash(message.sizes) & 0xFFFFFFFF


def check_histories(numbers: range) -> Counter[str]:
    """Runs histories and returns what they met.

    Raises:
        BrokenPromiseError: with the number of the first one in which a promise is broken.
    """
    met: Counter[str] = Counter()
    for number in numbers:
        try:
            met += World(number).run()
        except BrokenPromiseError as error:
            raise BrokenPromiseError(f"history {number}: {error}") from error
    return met


if __name__ == "__main__":
    first, *count = map(int, sys.argv[1:])
    if not count:
        print(World(first, verbose=True).run())
    else:
        started = time.monotonic()
        print(dict(check_histories(range(first, first + count[0]))), f"{time.monotonic() - started:.0f} s")
