"""Workers that try NCCL, where something fails on some of them or a generation is aborted meanwhile: whatever happens,
those who are connected afterwards mean the same. Threads in this process, imitated devices.
"""

import random

import pytest
from support.fake_nccl import FakeComm, FakeStream
from torch import Tensor
from transport_world import LATE_SECONDS, World

from lightning_recycle.runtime.groups_and_transports import CommunicationError
from lightning_recycle.runtime.nccl.nccl_library import NcclError

CALLS = ["unique_id", "init", "send", "receive", "all_reduce", "in_progress"]
HISTORIES = 40


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
            return real(*given)

        setattr(device, call, fail)
    return broken


@pytest.mark.parametrize("seed", range(HISTORIES))
def test_all_who_are_connected_mean_the_same(seed, request):
    rng, world = random.Random(seed), World()
    request.addfinalizer(world.stop)
    broken = break_some(world, rng)
    for _ in range(3):
        aborts = rng.random() < 0.3
        errors = world.connect(rng.random() * 0.1 if aborts else None)
        if aborts:
            assert all(isinstance(error, CommunicationError) for error in errors)
            continue
        assert not errors
        world.assert_agreed()
        assert broken or world.usable == 4 * 3 + 2 + 2 + 3
        if rng.random() < 0.7:
            world.prepare(rng.sample(range(4), rng.choice([3, 4, 4])), LATE_SECONDS * (rng.random() < 0.5))
    world.end_generation()


def test_a_group_is_not_used_if_a_member_has_failed_with_others():
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
        thread = world.transports[2]._thread
        if thread is not None and thread.connected:
            raise NcclError("broken")
        return True

    device.all_reduce, device.in_progress = all_reduce, in_progress
    assert not world.connect()
    world.assert_agreed()
    world.stop()
