"""Workers that try NCCL, where something fails on some of them or a generation is aborted meanwhile: whatever happens,
those who are connected afterwards mean the same. Threads in this process, imitated devices.
"""

from __future__ import annotations

import random
import socket
import threading
import time
from datetime import timedelta
from itertools import combinations

import pytest
import torch
from support.fake_nccl import FakeComm, FakeDevice, FakeStream, LocalNetwork
from support.meeting import Meeting
from torch import Tensor

from lightning_recycle.runtime import nccl_transport as module
from lightning_recycle.runtime.groups import CommunicationError, Group
from lightning_recycle.runtime.nccl import NcclError
from lightning_recycle.runtime.nccl_transport import NcclTransport
from lightning_recycle.runtime.staging import HostMemory
from lightning_recycle.runtime.transports import Channel, GlooTransport, Rosters
from lightning_recycle.runtime.wire import Layout

CPU = torch.device("cpu")
CALLS = ["unique_id", "init", "send", "receive", "all_reduce", "in_progress"]
HISTORIES = 40
PATIENCE = 30.0
LATE_SECONDS = 0.1  # for which a call may wait for the others before it fails
VALUE = torch.arange(20_000.0)


class World:
    """Four workers: two stages of two, a tie of three, everybody a neighbour of everybody."""

    def __init__(self) -> None:
        self.rosters: Rosters = {"stage0": (0, 2), "stage1": (1, 3), "tie1": (0, 1, 3)}
        network, self.meeting, self.generation = LocalNetwork(), Meeting(), -1
        self.devices = [FakeDevice(network, threaded=True) for _ in range(4)]
        self.transports = [
            NcclTransport(
                rank, CPU, device, device, f"device {rank}", GlooTransport(timedelta(seconds=1), HostMemory(CPU))
            )
            for rank, device in enumerate(self.devices)
        ]
        self.cancelled = [threading.Event() for _ in range(4)]

    def of(self, rank: int) -> Rosters:
        return {name: roster for name, roster in self.rosters.items() if rank in roster}

    def connect(self, rng: random.Random, aborts: bool) -> list[Exception]:
        """A new generation; ``aborts``: which is aborted at some moment. Returns what was raised."""
        self.end_generation()
        self.generation += 1
        self.cancelled = [threading.Event() for _ in range(4)]
        links: list[dict[int, socket.socket]] = [{} for _ in range(4)]
        for a, b in combinations(range(4), 2):
            links[a][b], links[b][a] = socket.socketpair()
            links[a][b].setblocking(False)
            links[b][a].setblocking(False)
        errors: list[Exception] = []

        def connect(rank: int) -> None:
            group, channel = Group(), Group()
            group.links = links[rank]
            channel.places = {other: (None, other) for other in range(4)}
            groups = {module._LINKS: group, **{each.value: channel for each in Channel}}
            transport, cancelled = self.transports[rank], self.cancelled[rank]
            try:
                transport.connect(self.generation, self.of(rank), groups, self.meeting, cancelled)
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(4)]
        for thread in threads:
            thread.start()
        if aborts:
            threads[0].join(rng.random() * 0.1)
            self.abort()
        for thread in threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()
        return errors

    def abort(self) -> None:
        for cancelled, transport in zip(self.cancelled, self.transports, strict=True):
            cancelled.set()
            transport.abort()

    def end_generation(self) -> None:
        self.abort()
        for transport in self.transports:
            transport.close()
        assert not any(device.violations or device.comms for device in self.devices)

    def await_connected(self, seconds: float) -> None:
        """Until some worker is connected, if one can be."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if any(courier is not None and courier.connected for courier in (t._courier for t in self.transports)):
                return
            time.sleep(0.001)

    def stop(self) -> None:
        self.abort()
        for device in self.devices:
            device.stop()

    def assert_agreed(self) -> None:
        """All mean the same, and what they mean works."""
        for a, b in combinations(range(4), 2):
            assert (b in self.transports[a]._usable[0]) == (a in self.transports[b]._usable[0])
        for name, roster in self.rosters.items():
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
        layout = Layout.of(VALUE)
        for a, b in combinations(range(4), 2):
            if b in self.transports[a]._usable[0]:
                self.transports[a].send(Channel.ACTIVATIONS, layout, [VALUE], b, 1)
                (received,) = self.transports[b].receive(Channel.ACTIVATIONS, layout, a, 1)
                assert received is not None
                assert torch.equal(received, VALUE)

    @property
    def usable(self) -> int:
        return sum(len(peers) + len(groups) for peers, groups in (t._usable for t in self.transports))


def break_some(world: World, rng: random.Random) -> set[int]:
    """Lets a call fail on some workers, from its first or an early time on; returns their ranks."""
    broken = set(rng.sample(range(4), rng.choice([0, 1, 1, 2])))
    for rank in broken:
        device, call = world.devices[rank], rng.choice(CALLS)
        # Late only where it is met while they connect: all but rank 2 sum in two groups.
        choices = [0, 0, 1, 2] if call in ("unique_id", "init") else [0]
        if call == "all_reduce" and len(broken) == 1 and rank != 2:
            choices = [0, 1]
        left = [rng.choice(choices)]
        real = getattr(device, call)

        is_late = rng.random() < 0.7

        def fail(*given: object, left: list[int] = left, real: object = real, is_late: bool = is_late) -> object:
            left[0] -= 1
            if left[0] < 0:
                if is_late:
                    world.await_connected(LATE_SECONDS)
                raise NcclError("broken")
            return real(*given)  # type: ignore[operator]

        setattr(device, call, fail)
    return broken


@pytest.mark.parametrize("seed", range(HISTORIES))
def test_all_who_are_connected_mean_the_same(seed: int, request: pytest.FixtureRequest) -> None:
    rng, world = random.Random(seed), World()
    request.addfinalizer(world.stop)
    broken = break_some(world, rng)
    for _ in range(3):
        aborts = rng.random() < 0.3
        errors = world.connect(rng, aborts)
        if aborts:
            assert all(isinstance(error, CommunicationError) for error in errors)
            continue
        assert not errors
        world.assert_agreed()
        assert broken or world.usable == 4 * 3 + 2 + 2 + 3
    world.end_generation()


def test_a_group_is_not_used_if_a_member_has_failed_with_others() -> None:
    """Worker 2 has nothing to complain of: it has exchanged something with everybody, and its stage has summed."""
    world = World()
    device = world.devices[0]
    launch, ask = device.all_reduce, device.in_progress
    launched: list[FakeComm] = []

    def all_reduce(comm: FakeComm, tensor: Tensor, stream: FakeStream) -> None:
        launched.append(comm)
        launch(comm, tensor, stream)

    def in_progress(comm: FakeComm) -> bool:
        """That of the tie is until worker 2 is connected, and then fails."""
        if comm.size < 3 or comm not in launched:
            return ask(comm)
        courier = world.transports[2]._courier
        if courier is not None and courier.connected:
            raise NcclError("broken")
        return True

    device.all_reduce, device.in_progress = all_reduce, in_progress  # type: ignore[method-assign]
    assert not world.connect(random.Random(0), aborts=False)
    world.assert_agreed()
    world.stop()
