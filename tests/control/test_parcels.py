"""Data that one worker sends to another through the coordinator, beside the training."""

import pytest
from control_plane import die, in_thread
from support.waiting import PATIENCE

from lightning_recycle.control.client import Interrupted
from lightning_recycle.control.protocol.member import Member
from lightning_recycle.control.protocol.messages import Regroup


def test_a_rank_that_was_replaced_was_lost_all_the_same():
    member = Member(0)
    member.receive(Regroup(0, (0, 1, 2)))
    member.enter()
    assert member.lost == {}
    member.receive(Regroup(1, (0, 2)))
    member.receive(Regroup(2, (0, 1)))  # before this worker has entered the one before
    assert member.lost == {1: 1, 2: 2}
    member.enter()
    assert member.lost == {1: 1, 2: 2}


def test_a_parcel_reaches_the_one_that_it_is_for(plane):
    members = plane.members()
    taken = in_thread(members[2].client.receive_parcel, 0, 7, "part", 0, lambda: True)
    members[0].client.send_parcel(2, 7, "part", {"weights": bytes(3_000_000)})
    assert taken.result(PATIENCE) == {"weights": bytes(3_000_000)}
    members[0].client.send_parcel(2, 7, "more", None)
    plane.until(lambda: members[2].client.has_parcel(0, 7, "more"))
    assert not members[1].client.has_parcel(0, 7, "more")
    members[2].client.forget_parcels(6)
    assert members[2].client.receive_parcel(0, 7, "more", 0, lambda: True) is None


def test_who_waits_for_a_lost_worker_or_for_nothing_is_told(plane):
    members = plane.members()
    wanted = [True]
    of_lost = in_thread(members[2].client.receive_parcel, 1, 7, "part", 0, lambda: True)
    unwanted = in_thread(members[2].client.receive_parcel, 0, 7, "part", 0, lambda: wanted[0])
    die(plane, members[1])
    with pytest.raises(Interrupted):
        of_lost.result(PATIENCE)
    assert not unwanted.done()
    wanted[0] = False
    with pytest.raises(Interrupted):
        unwanted.result(PATIENCE)
