"""Communicators that are begun for the next generation: which, who uses them, what an abort leaves."""

from collections.abc import Iterator

import pytest
from support.fake_nccl import FakeComm
from transport_world import ALL, World

from lightning_recycle.runtime.groups_and_transports import CommunicationError
from lightning_recycle.runtime.nccl import nccl_transport as module
from lightning_recycle.runtime.nccl.nccl_comms import Kind, Note, Place, group_places, pair, successors
from lightning_recycle.runtime.nccl.nccl_library import NcclError

EVERYBODY = {"stage0": (0, 1, 2, 3)}


@pytest.fixture
def world(request) -> Iterator[World]:
    world = World(getattr(request, "param", ALL))
    assert not world.connect()
    yield world
    world.end()
    world.stop()


def count_inits(world: World) -> list[int]:
    """How many communicators each worker begins from now on."""
    counts = [0] * 4
    for rank, device in enumerate(world.devices):
        real = device.init

        def init(unique_id: bytes, size: int, member: int, rank: int = rank, real: object = real) -> FakeComm:
            counts[rank] += 1
            return real(unique_id, size, member)

        device.init = init
    return counts


# ---------------------------------------------------------------------- which


def test_members_of_every_communicator_expect_it_whoever_is_lost():
    rosters = {"stage0": (0, 2, 4), "stage1": (1, 3, 5), "tie0": (0, 1, 2, 3, 4, 5), "tie1": (0, 2, 4)}
    of = {rank: {name: roster for name, roster in rosters.items() if rank in roster} for rank in range(6)}
    wanted = {rank: set(successors(rank, {r for r in range(6) if (r - rank) % 2}, of[rank])) for rank in range(6)}
    for rank, places in wanted.items():
        for place in places:
            assert rank in place.ranks
            assert all(place in wanted[member] for member in place.ranks)
        for lost in set(range(6)) - {rank}:
            left = {name: tuple(r for r in roster if r != lost) for name, roster in of[rank].items()}
            assert set(group_places(left).values()) <= places


def test_groups_with_the_same_members_have_communicators_of_their_own():
    places = group_places({"stage0": (0, 2), "tie3": (0, 2), "tie1": (0, 1, 2)})
    assert len(set(places.values())) == 3
    assert pair(0, 2) not in places.values()


def test_large_groups_have_a_reserve_for_the_loss_of_others_only():
    roster = tuple(range(9))
    assert successors(4, (), {"stage0": roster}) == [Place(roster, 0)]


def test_notes_come_in_pieces():
    notes = [
        Note(Kind.OFFER, (0, 5), 1, 2),
        Note(Kind.INVITE, (253, 77), 0, 0, bytes(range(128))),
        Note(Kind.GO, (1, 9), 3, 4),
    ]
    found, data = [], bytearray()
    for byte in b"".join(note.encode() for note in notes):
        data.append(byte)
        found += Note.decode_all(data)
    assert found == notes
    assert not data


# ---------------------------------------------------------------------- who uses them


@pytest.mark.parametrize("world", [ALL, EVERYBODY], indirect=True)
@pytest.mark.parametrize("lost", range(4))
def test_after_a_loss_nothing_is_begun_that_is_there_already(world, lost):
    world.prepare(range(4))
    world.lose(lost)
    counts = count_inits(world)
    assert not world.connect()
    world.assert_agreed()
    assert counts == [0] * 4


def test_who_has_not_begun_them_is_connected_afresh(world):
    world.prepare([0, 1, 2], 0.05)
    counts = count_inits(world)
    assert not world.connect()
    world.assert_agreed()
    # 3 was told to begin and had none: its four with 0, 1 and 2, its stage and its tie are new.
    assert counts[3] == 2 * 3 + 2
    assert counts[2] == 2


# ---------------------------------------------------------------------- what goes wrong


def test_a_reserve_that_cannot_begin_harms_nobody(world):
    real = world.devices[1].init

    def fail(*given: object) -> FakeComm:
        raise NcclError("no memory")

    world.devices[1].init = fail
    world.prepare(range(4), 0.05)
    world.assert_agreed()
    world.devices[1].init = real
    assert not world.connect()
    world.assert_agreed()
    assert world.usable == 4 * 3 + 2 + 2 + 3


@pytest.mark.parametrize("how", ["fails", "hangs"])
def test_all_connect_afresh_if_what_was_kept_does_not_work(how, monkeypatch):
    monkeypatch.setattr(module, "_KEPT_SECONDS", 0.3)
    world = World()
    assert not world.connect()
    world.prepare(range(4))
    world.end_generation()
    broken = world.transports[0]._kept[pair(0, 1)].comm
    if how == "fails":
        broken.error = NcclError("the network is down")
    else:
        real = world.devices[0].in_progress
        world.devices[0].in_progress = lambda comm: comm is broken or real(comm)
    errors = world.connect()
    assert errors
    assert {type(error) for error in errors} == {CommunicationError}
    assert any("begun earlier do not work" in str(error) for error in errors)
    assert not world.connect()
    world.assert_agreed()
    assert world.usable == 4 * 3 + 2 + 2 + 3, "NCCL is not given up"
    world.end()
    world.stop()


def test_who_comes_too_late_does_not_take_what_the_next_generation_needs(world):
    world.prepare(range(4))
    world.end_generation()
    kept = dict(world.transports[0]._kept)
    assert kept
    world.generation += 1
    errors = world.connect(abort_after=0.05)
    assert all(isinstance(error, CommunicationError) for error in errors)
    assert not world.connect()
    world.assert_agreed()
