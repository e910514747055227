"""That the imitation of NCCL gets its users into the troubles that NCCL does: each known trap is a test of it, but for
those that a mutation in test_nccl_histories.py needs to be noticed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import pytest
import torch
from support.fake_nccl import FakeComm, FakeDevice, FakeStream, LocalNetwork
from torch import Tensor

from lightning_recycle.runtime.nccl.nccl_library import NcclError

NUMBERS = torch.arange(10)


class Members:
    """Devices 0, 1, ... and communicators between them."""

    def __init__(self, size: int, room: int = 3) -> None:
        self.network = LocalNetwork()
        self.devices = [FakeDevice(self.network, room=room) for _ in range(size)]

    def connect(self, *members: int) -> list[FakeComm]:
        """A communicator of devices ``members``; its rank r is the r-th of them."""
        name = self.network.unique_id()
        comms = [self.devices[member].init(name, len(members), rank) for rank, member in enumerate(members)]
        self.run()
        return comms

    def run(self) -> None:
        """Until nothing happens any more."""
        while True:
            moved = [device.step() for device in self.devices]
            if not any(moved):
                return

    @property
    def violations(self) -> list[str]:
        return [violation for device in self.devices for violation in device.violations]


@pytest.fixture
def two() -> Iterator[Members]:
    return Members(2)


@pytest.fixture
def three() -> Iterator[Members]:
    return Members(3)


def empty() -> Tensor:
    return torch.full((10,), -1)


def connect_first(members: Members, comms: list[FakeComm]) -> None:
    """By a transfer from the first to the second of ``comms``, so that later ones are launched at once."""
    received = empty()
    sender, receiver = comms
    sender.device.send(sender, NUMBERS, receiver.rank, sender.device.current)
    receiver.device.receive(receiver, received, sender.rank, receiver.device.current)
    members.run()
    assert torch.equal(received, NUMBERS)


def test_a_send_is_done_only_with_its_receive_and_occupies_its_stream(two: Members) -> None:
    ours, theirs = comms = two.connect(0, 1)
    connect_first(two, comms)
    left, right = two.devices
    ran: list[bool] = []
    left.send(ours, NUMBERS, 1, left.current)
    left.current.compute(lambda: ran.append(True))
    two.run()
    assert not ran
    received = empty()
    right.receive(theirs, received, 0, right.current)
    two.run()
    assert ran


def test_there_are_no_tags(two: Members) -> None:
    ours, theirs = two.connect(0, 1)
    left, right = two.devices
    first, second = empty(), empty()
    sent = [NUMBERS, NUMBERS + 100]
    for place in (0, 1):
        left.send(ours, sent[place], 1, left.current)
        right.receive(theirs, (second, first)[place], 0, right.current)
        two.run()
    assert torch.equal(first, sent[1])
    assert torch.equal(second, sent[0])


def test_the_first_transfer_is_in_progress_until_the_other_side_has_called_too(two: Members) -> None:
    ours, theirs = two.connect(0, 1)
    left, right = two.devices
    received = empty()
    right.receive(theirs, received, 0, right.current)
    two.run()
    assert right.in_progress(theirs)
    too_early = right.current.record()
    with pytest.raises(NcclError, match="invalid usage"):
        right.receive(theirs, received, 0, right.current)
    two.run()
    assert too_early.query()
    assert not torch.equal(received, NUMBERS)
    left.send(ours, NUMBERS, 1, left.current)
    two.run()
    assert not right.in_progress(theirs)
    assert torch.equal(received, NUMBERS)


@pytest.mark.parametrize("peer_dies", [False, True])
def test_a_transfer_with_one_who_has_aborted_or_died_hangs_until_its_own_abort(two: Members, peer_dies: bool) -> None:
    """https://github.com/pytorch/pytorch/issues/113281"""
    comms = two.connect(0, 1)
    connect_first(two, comms)
    left, right = two.devices
    received = empty()
    right.receive(comms[1], received, 0, right.current)
    end = right.current.record()
    if peer_dies:
        two.devices = [right]
    else:
        left.abort(comms[0])
    two.run()
    assert not end.query()
    assert not right.in_progress(comms[1]), "there is no error either"
    right.abort(comms[1])
    two.run()
    assert end.query()


def test_an_aborted_receive_may_leave_half_of_the_data(two: Members) -> None:
    comms = two.connect(0, 1)
    connect_first(two, comms)
    left, right = two.devices
    received = empty()
    left.send(comms[0], NUMBERS, 1, left.current)
    right.receive(comms[1], received, 0, right.current)
    while received[0] == -1:
        left.step()
        right.step()
    right.abort(comms[1])
    assert received.tolist() == [0, 1, 2, 3, 4, -1, -1, -1, -1, -1]


def test_pairs_that_are_connected_one_after_the_other_in_different_orders_wait_for_each_other(three: Members) -> None:
    pairs = [(0, 1), (1, 2), (2, 0)]
    names = {pair: three.network.unique_id() for pair in pairs}
    begun = {}

    def begin(member: int, pair: tuple[int, int]) -> None:
        begun[member, pair] = three.devices[member].init(names[pair], 2, pair.index(member))

    for member in range(3):
        begin(member, (member, (member + 1) % 3))
    three.run()
    assert all(comm.in_progress for comm in begun.values()), "each waits for one who begins another pair first"
    for member in range(3):
        begin(member, ((member + 2) % 3, member))
    three.run()
    assert not any(comm.in_progress for comm in begun.values())


def test_both_directions_over_one_communicator_wait_for_each_other_on_whatever_streams(two: Members) -> None:
    comms = two.connect(0, 1)
    received = [empty(), empty()]
    ends = []
    connect_first(two, comms)
    connect_first(two, comms[::-1])
    for rank, device in enumerate(two.devices):
        device.send(comms[rank], NUMBERS, 1 - rank, device.create())
    two.run()
    for rank, device in enumerate(two.devices):
        stream = device.create()
        device.receive(comms[rank], received[rank], 1 - rank, stream)
        ends.append(stream.record())
    two.run()
    assert not any(end.query() for end in ends)


def test_receives_of_two_senders_in_two_orders_wait_in_a_circle() -> None:
    four = Members(4)
    b_a, b_c, d_a, d_c = (four.connect(*pair) for pair in ((1, 0), (1, 2), (3, 0), (3, 2)))
    a, b, c, d = four.devices
    received = [empty() for _ in range(4)]
    kept = []
    # A receives from B and then from D, C from D and then from B; B sends to C first, and D to A.
    launches = [
        (a, b_a[1], received[0], False), (c, d_c[1], received[1], False),
        (b, b_c[0], NUMBERS, True), (d, d_a[0], NUMBERS, True),
        (a, d_a[1], received[2], False), (c, b_c[1], received[3], False),
        (b, b_a[0], NUMBERS, True), (d, d_c[0], NUMBERS, True),
    ]  # fmt: skip
    for comms in (b_a, b_c, d_a, d_c):
        connect_first(four, comms)
    for device, comm, tensor, sends in launches:
        call = device.send if sends else device.receive
        call(comm, tensor, 1 - comm.rank, device.current)
        kept.append(device.current.record())
    four.run()
    assert not any(end.query() for end in kept)


def test_transfers_of_different_size_are_noticed(two: Members) -> None:
    ours, theirs = two.connect(0, 1)
    received = empty()
    two.devices[0].send(ours, short := NUMBERS[:5].clone(), 1, two.devices[0].current)
    two.devices[1].receive(theirs, received, 0, two.devices[1].current)
    two.run()
    assert two.violations == [f"a send of {short.nbytes} bytes met a receive of {received.nbytes}"]


def test_a_lost_device_says_so_whatever_is_asked(two: Members) -> None:
    ours, _ = two.connect(0, 1)
    event = two.devices[0].current.record()
    two.devices[0].is_lost = True
    with pytest.raises(RuntimeError, match="CUDA error"):
        event.query()
    with pytest.raises(RuntimeError, match="CUDA error"):
        two.devices[0].send(ours, NUMBERS, 1, two.devices[0].current)


def sum_over(members: Members, comms: list[FakeComm], tensors: list[Tensor], streams: list[FakeStream]) -> list[bool]:
    """Launches a sum on each member, and returns where it has ended once nothing happens any more."""
    ends = []
    for comm, tensor, stream in zip(comms, tensors, streams, strict=True):
        comm.device.all_reduce(comm, tensor, stream)
        members.run()
        ends.append(stream.record())
    members.run()
    return [end.query() for end in ends]


def test_a_sum_is_the_same_on_all_members_and_begins_when_all_have_called(three: Members) -> None:
    comms = three.connect(0, 1, 2)
    tensors = [NUMBERS * 10**rank for rank in range(3)]
    for comm, tensor in zip(comms[:2], tensors, strict=False):
        comm.device.all_reduce(comm, tensor, comm.device.current)
        three.run()
        assert comm.device.in_progress(comm), "the first one connects all members"
    comms[2].device.all_reduce(comms[2], tensors[2], comms[2].device.current)
    three.run()
    assert all(torch.equal(tensor, NUMBERS * 111) for tensor in tensors)


@pytest.mark.parametrize("peer_dies", [False, True])
def test_a_sum_with_one_who_has_aborted_or_died_hangs_until_its_own_abort(three: Members, peer_dies: bool) -> None:
    comms = three.connect(0, 1, 2)
    assert all(sum_over(three, comms, [empty() for _ in comms], [device.current for device in three.devices]))
    if peer_dies:
        del three.devices[2]
    else:
        three.devices[2].abort(comms[2])
    tensors = [empty(), empty()]
    streams = [device.create() for device in three.devices[:2]]
    assert sum_over(three, comms[:2], tensors, streams) == [False, False]
    assert not any(device.in_progress(comm) for device, comm in zip(three.devices, comms[:2], strict=False))
    three.devices[0].abort(comms[0])
    three.run()
    assert streams[0].queue == deque()


def test_an_aborted_sum_may_leave_half_of_it(two: Members) -> None:
    comms = two.connect(0, 1)
    assert all(sum_over(two, comms, [empty(), empty()], [device.current for device in two.devices]))
    tensors = [NUMBERS.clone(), NUMBERS.clone()]
    for comm, tensor in zip(comms, tensors, strict=True):
        comm.device.all_reduce(comm, tensor, comm.device.current)
    while tensors[0][1] == 1:
        for device in two.devices:
            device.step()
    two.devices[0].abort(comms[0])
    assert tensors[0].tolist() == [0, 2, 4, 6, 8, 5, 6, 7, 8, 9]


def test_sums_of_two_groups_in_two_orders_wait_in_a_circle_on_one_stream_and_not_on_two(two: Members) -> None:
    for streams_of_their_own in (False, True):
        two = Members(2)
        groups = [two.connect(0, 1), two.connect(0, 1)]
        for comms in groups:
            assert all(sum_over(two, comms, [empty(), empty()], [device.current for device in two.devices]))
        tensors, ends = [], []
        for rank, device in enumerate(two.devices):
            stream = device.create()
            for comms in groups[:: 1 if rank == 0 else -1]:
                if streams_of_their_own:
                    stream = device.create()
                tensors.append(NUMBERS.clone())
                device.all_reduce(comms[rank], tensors[-1], stream)
                ends.append(stream.record())
        two.run()
        assert all(end.query() for end in ends) is streams_of_their_own


def test_without_room_for_the_kernels_that_others_wait_for_nothing_goes_on() -> None:
    """NCCL's documentation: "Using multiple NCCL communicators concurrently"."""
    two = Members(2, room=1)
    groups = [two.connect(0, 1), two.connect(0, 1)]
    for comms in groups:
        assert all(sum_over(two, comms, [empty(), empty()], [device.current for device in two.devices]))
    tensors, streams = [], []
    for rank, device in enumerate(two.devices):
        for comms in groups[:: 1 if rank == 0 else -1]:
            tensors.append(NUMBERS.clone())
            streams.append(device.create())
            device.all_reduce(comms[rank], tensors[-1], streams[-1])
            two.run()
    ends = [stream.record() for stream in streams]
    two.run()
    assert not any(end.query() for end in ends)


@pytest.mark.parametrize("other", ["size", "kind"])
def test_members_that_call_different_collectives_are_noticed(two: Members, other: str) -> None:
    comms = two.connect(0, 1)
    tensors = [NUMBERS.clone(), (NUMBERS[:5] if other == "size" else NUMBERS).clone()]
    two.devices[0].all_reduce(comms[0], tensors[0], two.devices[0].current)
    if other == "size":
        two.devices[1].all_reduce(comms[1], tensors[1], two.devices[1].current)
    else:
        two.devices[1].broadcast(comms[1], tensors[1], 0, two.devices[1].current)
    two.run()
    assert set(two.violations) == {"members of a communicator have called different collectives"}
