"""Workers that exchange payloads, and sum in groups, in a simulated world: which goes on next is drawn, so a history is
its number.

Each worker has an imitated device, the real :class:`~lightning_recycle.runtime.nccl.nccl_transport.NcclOps`, and a
*host*: a program of computations, sends, receives, sums and broadcasts, whose order comes from a random order of them
all, so that no correct transport can deadlock. Headers (Gloo) and notes (links) arrive late but in order. Computations
run on the device when it comes to them. At some moment a worker begins what the next generation may need. In some
histories a worker dies, a communicator fails, a device is lost, or everybody is told to abort, each at its own moment;
the survivors then begin another generation with another plan.

``python tests/runtime/nccl_histories.py FIRST COUNT`` runs histories; a number alone runs one and prints it.
"""

from __future__ import annotations

import itertools
import random
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from support.fake_nccl import FakeDevice, HangError, LocalNetwork
from torch import Tensor

from lightning_recycle.runtime.nccl import nccl_comms, nccl_transport, transfer_order
from lightning_recycle.runtime.nccl.nccl_comms import Note
from lightning_recycle.runtime.nccl.nccl_library import NcclError

ROOM = 3  # kernels of NCCL that a device runs at a time
MOST_TURNS = 15_000  # turns without which a world that goes on must not be; a history has some hundreds
CPU = torch.device("cpu")
transfer_order._TRIAL_NUMBERS = 4  # the imitation does not care


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


@dataclass(eq=False)
class Joint:
    """A sum over workers ``ranks``, or a broadcast of ``root``."""

    group: int
    ranks: tuple[int, ...]
    root: int | None
    size: int
    content: int

    def fill(self, tensor: Tensor, rank: int) -> None:
        """What ``rank`` contributes."""
        tensor.copy_((torch.arange(self.size) + 1_000 * self.content) * (rank + 1))

    @property
    def result(self) -> Tensor:
        factor = sum(rank + 1 for rank in self.ranks) if self.root is None else self.root + 1
        return (torch.arange(self.size) + 1_000 * self.content) * factor


Item: TypeAlias = Message | Joint


@dataclass
class Worker:
    """What one worker is and holds in the current generation."""

    rank: int
    device: FakeDevice
    program: deque[tuple[str, Any]] = field(default_factory=deque)
    traffic: Any = None
    cancelled: bool = False
    ended: bool = False  # its thread has aborted
    failure: Exception | None = None
    waiting: tuple[Any, list[Tensor], Item] | None = None
    joints: dict[Joint, tuple[Any, Tensor]] = field(default_factory=dict)  # begun, and not waited for yet
    headers: dict[int, deque[Message]] = field(default_factory=dict)
    notes: dict[int, deque[bytes]] = field(default_factory=dict)
    kept: dict[Any, Any] = field(default_factory=dict)  # communicators for the next generation
    reserve: list[Any] = field(default_factory=list)  # what it may need there
    done: bool = False


Turn: TypeAlias = tuple[Callable[[Any], bool], Worker]


class Watched(FakeDevice):
    """A device that sees to it that no collective is launched before all members are ready for it."""

    def __init__(self, network: LocalNetwork, world: World, rank: int) -> None:
        super().__init__(network, room=ROOM)
        self._world, self._of = world, rank

    def all_reduce(self, comm: Any, tensor: Tensor, stream: Any) -> None:
        self._world.expect_all_ready(self._of, tensor)
        super().all_reduce(comm, tensor, stream)

    def broadcast(self, comm: Any, tensor: Tensor, root: int, stream: Any) -> None:
        self._world.expect_all_ready(self._of, tensor)
        super().broadcast(comm, tensor, root, stream)


class World:
    """One history."""

    def __init__(self, seed: int, verbose: bool = False) -> None:
        self.rng = random.Random(seed)
        self.verbose = verbose
        self.network = LocalNetwork()
        self.met: Counter[str] = Counter()
        size = self.rng.choice([2, 2, 3, 3, 4, 5])
        self.workers = [Worker(rank, Watched(self.network, self, rank)) for rank in range(size)]
        self.alive = list(self.workers)
        self.generation = -1
        self.last_groups: dict[int, tuple[int, ...]] = {}

    def say(self, *what: Any) -> None:
        if self.verbose:
            print(*what)

    # a plan

    def plan(self, groups: Mapping[int, tuple[int, ...]]) -> list[Item]:
        """Messages and sums in an order in which they can be done one after the other."""
        count = self.rng.randint(1, 12)
        items: list[Item] = []
        for number in range(count):
            if groups and self.rng.random() < 0.4:
                group = self.rng.choice(list(groups))
                root = self.rng.choice([None, None, self.rng.choice(groups[group])])
                items.append(Joint(group, groups[group], root, self.rng.choice([4, 4, 5]), self.content()))
                continue
            source, destination = self.rng.sample([worker.rank for worker in self.alive], 2)
            sizes = tuple(self.rng.randint(1, 6) for _ in range(self.rng.choice([1, 1, 2, 3])))
            items.append(Message(source, destination, (self.rng.randint(0, 1), number), sizes, self.content()))
        return items

    def groups(self) -> dict[int, tuple[int, ...]]:
        """Groups of workers, by number; often those of the generation before, as far as they are alive."""
        ranks = [worker.rank for worker in self.alive]
        left = {n: tuple(rank for rank in roster if rank in ranks) for n, roster in self.last_groups.items()}
        left = {number: roster for number, roster in left.items() if len(roster) > 1}
        if not left or self.rng.random() < 0.4:
            left = {
                number: tuple(sorted(self.rng.sample(ranks, self.rng.randint(2, len(ranks)))))
                for number in self.rng.sample(range(100), self.rng.choice([0, 1, 1, 2]))
            }
        self.last_groups = left
        return left

    def content(self) -> int:
        self.met["items"] += 1
        return self.met["items"]

    def begin(self) -> None:
        """A new generation."""
        self.generation += 1
        groups = self.groups()
        items = self.plan(groups)
        pairs = {(m.source, m.destination) for m in items if isinstance(m, Message)}
        pairs |= {(b, a) for a, b in pairs}
        self.say(f"generation {self.generation}:", [w.rank for w in self.alive], groups, items)
        told = {worker.rank: {place.name: kept.digest for place, kept in worker.kept.items()} for worker in self.alive}
        for worker in self.alive:
            me = worker.rank
            peers = {b for a, b in pairs if a == me}
            rosters = {str(group): ranks for group, ranks in groups.items() if me in ranks}
            mine = {int(name): place for name, place in nccl_comms.group_places(rosters).items()}
            wanted = {place for peer in peers for place in (nccl_comms.pair(me, peer), nccl_comms.pair(peer, me))}
            wanted |= set(mine.values())
            used = nccl_comms.kept_by_all(sorted(wanted), worker.kept, told)
            outdated = [kept for place, kept in worker.kept.items() if place not in used]
            self.met["kept"] += len(used)
            worker.kept = {}
            worker.reserve = nccl_comms.successors(me, peers, rosters)
            worker.program = self.program_of(me, items)
            if self.rng.random() < 0.7:
                worker.program.insert(self.rng.randint(0, len(worker.program)), ("reserve", None))
            worker.cancelled, worker.ended, worker.failure = False, False, None
            worker.waiting, worker.done = None, False
            worker.joints = {}
            worker.headers = {other.rank: deque() for other in self.workers}
            worker.notes = {other.rank: deque() for other in self.workers}

            def tell(peer: int, note: Note, me: int = me) -> None:
                self.workers[peer].notes[me].append(note.encode())

            device = worker.device
            comms = nccl_comms.Comms(me, device, tell, wanted, used, outdated)
            side = transfer_order.Side(me, self.generation, device, device, comms, CPU, tell)
            worker.traffic = nccl_transport.NcclOps(
                comms, transfer_order.Payloads(side, peers), transfer_order.GroupPayloads(side, mine)
            )

    def program_of(self, me: int, items: Sequence[Item]) -> deque[tuple[str, Any]]:
        """What worker ``me`` does of ``items``."""
        program: deque[tuple[str, Any]] = deque()
        postponed: list[tuple[str, Item]] = []
        for item in items:
            if isinstance(item, Joint):
                if me in item.ranks:
                    program.append(("begin", item))
                    postponed.append(("end", item))
            else:
                if item.source == me:
                    program.append(("send", item))
                if item.destination == me:
                    postponed.append(("receive", item))
            # They may be waited for later, in another order, but not behind what depends on nothing else.
            if postponed and self.rng.random() < 0.6:
                self.rng.shuffle(postponed)
                program.extend(postponed)
                postponed.clear()
        self.rng.shuffle(postponed)
        program.extend(postponed)
        return program

    # turns: each returns whether something happened

    def host(self, worker: Worker) -> bool:
        """The main thread of ``worker``."""
        if worker.done:
            return False
        if worker.waiting is not None:
            awaited, tensors, item = worker.waiting
            there = awaited.finished
            if worker.cancelled or worker.failure is not None:
                return self.stop(worker)
            if not there:
                return False
            worker.waiting = None
            self.check(worker, item, tensors)
            return True
        if worker.cancelled or worker.failure is not None:
            return self.stop(worker)
        if not worker.traffic.connected:
            return False
        if not worker.program:
            worker.done = True
            return True
        kind, item = worker.program[0]
        if kind == "reserve":
            worker.program.popleft()
            try:
                worker.traffic.reserve(worker.reserve)
            except RuntimeError as error:  # the device is lost
                worker.failure = error
            return True
        if kind == "begin":
            worker.program.popleft()
            self.begin_joint(worker, item)
            return True
        if kind == "end":
            worker.program.popleft()
            collective, tensor = worker.joints.pop(item)
            worker.waiting = collective, [tensor], item
            return True
        message = item
        if kind == "send":
            worker.program.popleft()
            tensors = [torch.zeros(size, dtype=torch.int64) for size in message.sizes]
            worker.device.current.compute(lambda: fill(tensors, message))
            ready = worker.device.current.record_event()
            self.workers[message.destination].headers[worker.rank].append(message)
            worker.traffic.pairs.send(
                transfer_order.Sending(message.destination, message.key, digest(message), list(tensors), ready)
            )
            return True
        arrived = worker.headers[message.source]
        if message not in arrived:
            return False
        arrived.remove(message)
        worker.program.popleft()
        tensors = [worker.device.empty((size,), torch.int64) for size in message.sizes]
        receiving = transfer_order.Receiving(message.source, message.key, digest(message), tensors)
        worker.traffic.pairs.receive(receiving)
        worker.waiting = receiving, tensors, message
        return True

    def begin_joint(self, worker: Worker, joint: Joint) -> None:
        tensor = torch.full((joint.size,), -1, dtype=torch.int64)
        worker.device.current.compute(lambda: joint.fill(tensor, worker.rank))
        collective = transfer_order.Collective(joint.group, tensor, joint.root, worker.device.current.record_event())
        worker.joints[joint] = collective, tensor
        worker.traffic.groups.begin(collective)

    def expect_all_ready(self, rank: int, tensor: Tensor) -> None:
        """Worker ``rank`` launches the collective of ``tensor``."""
        known = self.joints_of(self.workers[rank])
        joint = next((joint for joint, (_, held) in known.items() if held is tensor), None)
        for member in joint.ranks if joint is not None else ():
            other = self.workers[member]
            if other not in self.alive or other.cancelled or other.failure is not None:
                continue
            found = self.joints_of(other).get(joint)
            if (found is not None and not found[0].ready.done) or (found is None and ("begin", joint) in other.program):
                raise BrokenPromiseError(f"worker {rank} launches {joint}, for which worker {member} is not ready")

    def joints_of(self, worker: Worker) -> dict[Joint, tuple[Any, Tensor]]:
        """What ``worker`` has begun, and what it waits for."""
        known = dict(worker.joints)
        if worker.waiting is not None and isinstance(worker.waiting[2], Joint):
            known[worker.waiting[2]] = worker.waiting[0], worker.waiting[1][0]
        return known

    def check(self, worker: Worker, item: Item, tensors: list[Tensor]) -> None:
        if isinstance(item, Joint):
            expected = [item.result]
        else:
            expected = [torch.zeros(size, dtype=torch.int64) for size in item.sizes]
            fill(expected, item)
        if any(not torch.equal(a, b) for a, b in zip(tensors, expected, strict=True)):
            raise BrokenPromiseError(f"worker {worker.rank} received {tensors} instead of {expected}")
        self.met["summed" if isinstance(item, Joint) else "received"] += 1

    def stop(self, worker: Worker) -> bool:
        worker.done, worker.waiting = True, None
        worker.joints = {}
        worker.program.clear()
        return True

    def nccl_thread(self, worker: Worker) -> bool:
        """The other thread of ``worker``."""
        if worker.ended:
            return False
        if worker.cancelled or worker.failure is not None:
            try:
                worker.kept = worker.traffic.abort()
            except HangError as error:
                raise BrokenPromiseError(str(error)) from error
            except (NcclError, RuntimeError) as error:
                worker.failure = worker.failure or error
            worker.ended = True
            return True
        try:
            worker.traffic.advance()
        except HangError as error:
            raise BrokenPromiseError(str(error)) from error
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
                    (note,) = Note.decode_all(bytearray(notes.popleft()))
                    worker.traffic.take_note(peer, note)
                except NcclError as error:
                    raise BrokenPromiseError(str(error)) from error
                except RuntimeError as error:  # the device is lost
                    worker.failure = error
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
        for worker in self.alive:
            nccl_comms.abort_together(worker.device, [kept.comm for kept in worker.kept.values()])
            self.check_devices(worker, {})
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
            (turn, worker) for worker in self.alive for turn in (self.host, self.nccl_thread, self.deliver, self.step)
        ]
        order = self.order(turns)
        for turn_number in range(MOST_TURNS):
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
                self.nccl_thread(worker)
            self.check_devices(worker, worker.kept)
        lost = [worker for worker in self.alive if worker.device.is_lost]
        for worker in lost:
            self.alive.remove(worker)

    def check_devices(self, worker: Worker, kept: Mapping[Any, Any]) -> None:
        """Only ``kept`` is left on the device of ``worker``, and nothing was done with it."""
        if worker.device.violations:
            raise BrokenPromiseError(f"worker {worker.rank}: {worker.device.violations}")
        comms = [each.comm for each in kept.values()]
        if len(worker.device.comms) != len(comms) or not all(comm in comms for comm in worker.device.comms):
            raise BrokenPromiseError(f"worker {worker.rank} has left a communicator behind")
        if any(comm.in_progress or comm.newest is not None or comm.aborted for comm in comms):
            raise BrokenPromiseError(f"worker {worker.rank} keeps a communicator that is not complete, or not unused")

    def order(self, turns: list[Turn]) -> Iterator[Turn]:
        """Whose turn it is, for ever; some are slower than others."""
        weights = list(itertools.accumulate(self.rng.choice([1, 1, 1, 4]) for _ in turns))
        while True:
            yield from self.rng.choices(turns, cum_weights=weights, k=128)

    def strike(self, trouble: str, victim: Worker, now: int) -> dict[int, int]:
        """What goes wrong; returns when each survivor is told to abort."""
        if trouble == "death":
            self.alive.remove(victim)
            for worker in self.alive:
                if self.rng.random() < 0.5:  # its link has ended
                    worker.traffic.lose(victim.rank)
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
        raise BrokenPromiseError(f"after {MOST_TURNS} turns there still wait {states}")


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
