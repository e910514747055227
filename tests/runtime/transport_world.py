"""Workers that exchange payloads by the imitated NCCL, as threads of this process."""

import socket
import threading
import time
from collections.abc import Collection, Sequence
from itertools import combinations

import torch
from support.fake_nccl import FakeDevice, LocalNetwork
from support.meeting import Meeting
from support.waiting import PATIENCE

from lightning_recycle.runtime.groups_and_transports import Group, Rosters
from lightning_recycle.runtime.nccl import nccl_transport as module
from lightning_recycle.runtime.nccl.nccl_comms import successors
from lightning_recycle.runtime.nccl.nccl_transport import NcclTransport
from lightning_recycle.runtime.wire import Channel, ValueLayout

CPU = torch.device("cpu")
LATE_SECONDS = 0.1  # for which a call may wait for the others before it fails
VALUE = torch.arange(20_000.0)
ALL = {"stage0": (0, 2), "stage1": (1, 3), "tie1": (0, 1, 3)}


class World:
    """Workers that are all neighbours of each other: by default four, two stages of two and a tie of three.

    Args:
        rosters: the groups of workers that sum.
        size: how many workers there are.
        reserves: whether they make communicators for the next generation.
        names: those of their devices.
        without_nccl: the workers that have no library.
    """

    def __init__(
        self,
        rosters: Rosters = ALL,
        size: int = 4,
        reserves: bool = True,
        names: Sequence[str] = ("first", "second", "third", "fourth"),
        without_nccl: Collection[int] = (),
    ) -> None:
        self.rosters, self.alive = dict(rosters), list(range(size))
        network, self.meeting, self.generation = LocalNetwork(), Meeting(), -1
        self.devices = [FakeDevice(network, threaded=True) for _ in self.alive]
        libraries = ["there is no NCCL here" if rank in without_nccl else self.devices[rank] for rank in self.alive]
        self.transports = [
            NcclTransport(rank, CPU, library, device, names[rank], reserves)
            for rank, (library, device) in enumerate(zip(libraries, self.devices, strict=True))
        ]
        self.cancelled = [threading.Event() for _ in self.alive]
        self.links: list[dict[int, socket.socket]] = []

    def of(self, rank: int) -> Rosters:
        return {name: roster for name, roster in self.rosters.items() if rank in roster}

    def lose(self, rank: int) -> None:
        """Worker ``rank`` is not there any more; who is left connects in the next generation without it."""
        self.alive.remove(rank)
        left = {name: tuple(other for other in roster if other != rank) for name, roster in self.rosters.items()}
        self.rosters = {name: roster for name, roster in left.items() if roster}

    def connect(self, abort_after: float | None = None) -> list[Exception]:
        """A new generation, aborted after so many seconds or once worker 0 is done; returns what was raised."""
        if self.generation >= 0:
            self.end_generation()
        self.generation += 1
        self.cancelled = [threading.Event() for _ in self.transports]
        links = self.links = [{} for _ in self.transports]
        for a, b in combinations(self.alive, 2):
            links[a][b], links[b][a] = socket.socketpair()
            links[a][b].setblocking(False)
            links[b][a].setblocking(False)
        errors: list[Exception] = []

        def connect(rank: int) -> None:
            group, channel = Group(), Group()
            group.links = links[rank]
            channel.places = {other: (None, other) for other in self.alive}
            groups = {module._LINKS: group, **{each.value: channel for each in Channel}}
            transport, cancelled = self.transports[rank], self.cancelled[rank]
            try:
                transport.connect(self.generation, self.of(rank), groups, self.meeting, cancelled)
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=connect, args=(rank,)) for rank in self.alive]
        for thread in threads:
            thread.start()
        if abort_after is not None:
            threads[0].join(abort_after)
            self.abort()
        for thread in threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()
        return errors

    def prepare(self, ranks: Collection[int], seconds: float = PATIENCE) -> None:
        """``ranks`` begin what the next generation may need; returns when they are done, or after ``seconds``."""
        for rank in ranks:
            self.transports[rank].prepare()
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not all(self.is_prepared(rank) for rank in ranks):
            time.sleep(0.001)

    def is_prepared(self, rank: int) -> bool:
        """Whether all that worker ``rank`` may need has begun."""
        transport = self.transports[rank]
        thread, usable = transport._thread, transport._usable
        if thread is None:
            return True
        begun = thread._traffic._comms._reserve.comms
        wanted = successors(rank, usable.neighbours, usable.rosters)
        return len(begun) == len(wanted) and not any(each.comm.in_progress for each in list(begun.values()))

    def abort(self, *ranks: int) -> None:
        """All of them, or ``ranks`` alone."""
        for rank in ranks or range(len(self.transports)):
            self.cancelled[rank].set()
            self.transports[rank].abort()

    def end_generation(self) -> None:
        self.abort()
        for transport in self.transports:
            transport.close()
        for device, transport in zip(self.devices, self.transports, strict=True):
            assert set(device.comms) == {each.comm for each in transport._kept.values()}, "nothing else is left"
        assert not any(device.violations for device in self.devices)

    def await_connected(self, seconds: float) -> None:
        """Until some worker is connected, if one can be."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if any(thread is not None and thread.connected for thread in (t._thread for t in self.transports)):
                return
            time.sleep(0.001)

    def end(self) -> None:
        """There is no further generation."""
        self.abort()
        for transport in self.transports:
            transport.end()
        assert not any(device.violations or device.comms for device in self.devices)

    def stop(self) -> None:
        """Whatever has become of them."""
        self.abort()
        for transport in self.transports:
            transport.close()
        for device in self.devices:
            device.stop()

    def assert_agreed(self) -> None:
        """All mean the same, and what they mean works."""
        for a, b in combinations(self.alive, 2):
            assert (b in self.transports[a]._usable.neighbours) == (a in self.transports[b]._usable.neighbours)
        for name, roster in self.rosters.items():
            if len(roster) == 1:
                continue
            takes = {self.transports[rank].takes(name, VALUE) for rank in roster}
            assert len(takes) == 1
            if takes == {True}:
                begun = [
                    (transport, value, transport.begin_collective(name, value))
                    for transport, value in ((self.transports[rank], VALUE.clone()) for rank in roster)
                ]
                for transport, value, one in begun:
                    transport.end_collective(one)
                    assert torch.equal(value, VALUE * len(roster))
        layout = ValueLayout.of(VALUE)
        for a, b in combinations(self.alive, 2):
            if b in self.transports[a]._usable.neighbours:
                self.transports[a].send(Channel.ACTIVATIONS, layout, [VALUE], b, 1)
                (received,) = self.transports[b].receive(Channel.ACTIVATIONS, layout, a, 1)
                assert received is not None
                assert torch.equal(received, VALUE)

    @property
    def usable(self) -> int:
        found = [transport._usable for transport in self.transports]
        return sum(len(usable.neighbours) + len(usable.rosters) for usable in found)
