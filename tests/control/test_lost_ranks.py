"""A worker remembers which others were lost, also if they have been replaced since."""

from lightning_recycle.control.protocol.member import Member
from lightning_recycle.control.protocol.messages import Regroup


def test_a_rank_that_was_replaced_was_lost_all_the_same() -> None:
    member = Member(0)
    member.receive(Regroup(0, (0, 1, 2)))
    member.enter()
    assert member.lost == {}
    member.receive(Regroup(1, (0, 2)))
    member.receive(Regroup(2, (0, 1)))  # before this worker has entered the one before
    assert member.lost == {1: 1, 2: 2}
    member.enter()
    assert member.lost == {1: 1, 2: 2}
