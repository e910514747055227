"""That the imitation of NCCL gets its users into the troubles that NCCL does: each known trap is a test of it, but for
those that a mutation in test_nccl_histories.py needs to be noticed, and those that follow from others, as circles do.
"""

from collections.abc import Iterator

import pytest
import torch
from support.fake_nccl import FakeComm, FakeDevice, FakeEvent, FakeStream, LocalNetwork
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


def empty() -> Tensor:
    return torch.full((10,), -1)


def launch(kind: str, comm: FakeComm, tensor: Tensor, stream: FakeStream | None = None) -> FakeEvent:
    """A sum, or a transfer from the first member to the second, or "back"; returns its end."""
    stream = stream or comm.device.current
    if kind == "sum":
        comm.device.all_reduce(comm, tensor, stream)
    else:
        call = comm.device.send if comm.rank == (kind == "back") else comm.device.receive
        call(comm, tensor, 1 - comm.rank, stream)
    return stream.record_event()


def connect(members: Members, *kinds: str) -> list[FakeComm]:
    """A communicator of the first two, which has done one of each kind, so that later ones are launched at once."""
    comms = members.connect(0, 1)
    for kind in kinds:
        tensors = [NUMBERS.clone(), NUMBERS.clone()]
        ends = [launch(kind, comm, tensor) for comm, tensor in zip(comms, tensors, strict=True)]
        members.run()
        assert all(end.query() for end in ends)
    return comms


def test_a_send_is_done_only_with_its_receive_and_occupies_its_stream(two):
    ours, theirs = connect(two, "transfer")
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


def test_there_are_no_tags(two):
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


def test_the_first_transfer_is_in_progress_until_the_other_side_has_called_too(two):
    ours, theirs = two.connect(0, 1)
    left, right = two.devices
    received = empty()
    right.receive(theirs, received, 0, right.current)
    two.run()
    assert right.in_progress(theirs)
    too_early = right.current.record_event()
    with pytest.raises(NcclError, match="invalid usage"):
        right.receive(theirs, received, 0, right.current)
    two.run()
    assert too_early.query()
    assert not torch.equal(received, NUMBERS)
    left.send(ours, NUMBERS, 1, left.current)
    two.run()
    assert not right.in_progress(theirs)
    assert torch.equal(received, NUMBERS)


def test_both_directions_over_one_communicator_wait_for_each_other_on_whatever_streams(two):
    comms, received = connect(two, "transfer", "back"), [empty(), empty()]
    for kind, comm in zip(("transfer", "back"), comms, strict=True):
        launch(kind, comm, NUMBERS, comm.device.create())
    two.run()
    ends = []
    for kind, comm, tensor in zip(("back", "transfer"), comms, received, strict=True):
        ends.append(launch(kind, comm, tensor, comm.device.create()))
    two.run()
    assert not any(end.query() for end in ends)


def test_transfers_of_different_size_are_noticed(two):
    ours, theirs = two.connect(0, 1)
    received = empty()
    two.devices[0].send(ours, short := NUMBERS[:5].clone(), 1, two.devices[0].current)
    two.devices[1].receive(theirs, received, 0, two.devices[1].current)
    two.run()
    assert two.violations == [f"a send of {short.nbytes} bytes met a receive of {received.nbytes}"]


def test_a_lost_device_says_so_whatever_is_asked(two):
    ours, _ = two.connect(0, 1)
    event = two.devices[0].current.record_event()
    two.devices[0].is_lost = True
    with pytest.raises(RuntimeError, match="CUDA error"):
        event.query()
    with pytest.raises(RuntimeError, match="CUDA error"):
        two.devices[0].send(ours, NUMBERS, 1, two.devices[0].current)


def test_a_sum_is_the_same_on_all_members_and_begins_when_all_have_called():
    three = Members(3)
    comms = three.connect(0, 1, 2)
    tensors = [NUMBERS * 10**rank for rank in range(3)]
    for comm, tensor in zip(comms[:2], tensors, strict=False):
        comm.device.all_reduce(comm, tensor, comm.device.current)
        three.run()
        assert comm.device.in_progress(comm), "the first one connects all members"
    comms[2].device.all_reduce(comms[2], tensors[2], comms[2].device.current)
    three.run()
    assert all(torch.equal(tensor, NUMBERS * 111) for tensor in tensors)


KINDS = pytest.mark.parametrize("kind", ["transfer", "sum"])


@KINDS
@pytest.mark.parametrize("peer_dies", [False, True])
def test_what_needs_one_who_has_aborted_or_died_hangs_until_its_own_abort(two, kind, peer_dies):
    """https://github.com/pytorch/pytorch/issues/113281"""
    (gone, left), received = connect(two, kind), empty()
    if peer_dies:
        two.devices.remove(gone.device)
    else:
        gone.device.abort(gone)
    end = launch(kind, left, received)
    two.run()
    assert not end.query()
    assert not left.device.in_progress(left), "there is no error either"
    left.device.abort(left)
    two.run()
    assert end.query()


@KINDS
def test_an_abort_may_leave_half_of_the_data(two, kind):
    comms, tensors = connect(two, kind), [torch.full((10,), 5), torch.zeros(10, dtype=torch.int64)]
    for comm, tensor in zip(comms, tensors, strict=True):
        launch(kind, comm, tensor)
    while not tensors[1].any():
        for device in two.devices:
            device.step()
    comms[1].device.abort(comms[1])
    assert tensors[1].tolist() == [5] * 5 + [0] * 5


def test_without_room_for_the_kernels_that_others_wait_for_nothing_goes_on():
    """NCCL's documentation: "Using multiple NCCL communicators concurrently"."""
    two, tensors, ends = Members(2, room=1), [], []
    groups = [connect(two, "sum"), connect(two, "sum")]
    for rank, device in enumerate(two.devices):
        for comms in groups[:: 1 if rank == 0 else -1]:
            tensors.append(NUMBERS.clone())
            ends.append(launch("sum", comms[rank], tensors[-1], device.create()))
            two.run()
    assert not any(end.query() for end in ends)


@pytest.mark.parametrize("other", ["size", "kind"])
def test_members_that_call_different_collectives_are_noticed(two, other):
    comms = two.connect(0, 1)
    tensors = [NUMBERS.clone(), (NUMBERS[:5] if other == "size" else NUMBERS).clone()]
    two.devices[0].all_reduce(comms[0], tensors[0], two.devices[0].current)
    if other == "size":
        two.devices[1].all_reduce(comms[1], tensors[1], two.devices[1].current)
    else:
        two.devices[1].broadcast(comms[1], tensors[1], 0, two.devices[1].current)
    two.run()
    assert set(two.violations) == {"members of a communicator have called different collectives"}
