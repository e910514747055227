"""Payloads over NCCL itself. One device is enough where NCCL lets several processes share it.

These tests have never run: there was no device. Their tasks have, over the imitation.
"""

import time
from collections.abc import Iterator

import communicator_team as tasks
import pytest
import torch
from communicator_team import Failure, Team

ROUNDS = 100  # kernels that are still to run when a payload is sent
SIZES = [20_000, 200_000, 30_000_000]
COUNT = 20  # payloads of which one is under way when their sender ends
ENDS_SECONDS = 15.0  # generous: what it takes is printed

KINDS = ["nccl", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=KINDS)
def three(request) -> Iterator[Team]:
    """Members 0 to 2."""
    team = Team(3, request.param)
    yield team
    team.close()


def exchange(team: Team, sender: int, receiver: int, size: int) -> list[float]:
    team.members[receiver].start(tasks.receive_computed, sender)
    team.members[sender].start(tasks.send_computed, size, ROUNDS, receiver)
    found: list[float] = team.collect([team.members[receiver], team.members[sender]])[0]
    return found


def test_a_payload_holds_what_was_computed_before_it(three):
    three.regroup(0, 1)
    for size in SIZES[:2]:
        assert exchange(three, 0, 1, size) == [float(ROUNDS)]
        assert exchange(three, 1, 0, size) == [float(ROUNDS)]


def test_a_payload_does_not_arrive_in_memory_that_is_computed_with(three):
    three.regroup(0, 1)
    rounds = 20
    three.members[1].start(tasks.receive_while_computing, 0, SIZES[1], rounds)
    three.members[0].start(tasks.send, [torch.full((SIZES[1],), -7.0)] * rounds, 1, range(rounds))
    assert three.collect([three.members[1], three.members[0]])[0] == [float(rounds)]


@pytest.mark.gpu
@pytest.mark.parametrize("end", ["kill", "stop"])
def test_a_survivor_goes_on_with_another_after_its_sender_has_ended(end):
    team = Team(3, "cuda")
    team.regroup(0, 1)
    assert exchange(team, 0, 1, SIZES[1]) == [float(ROUNDS)]
    team.members[1].start(tasks.receive_many, COUNT, 0)
    team.members[0].start(tasks.send_many, COUNT, 40_000_000, 1)
    time.sleep(0.05)  # in the middle of one of them, whichever
    getattr(team.members[0], end)()
    team.members[1].abort(team.generation)
    started = time.monotonic()
    with pytest.raises(Failure):
        team.members[1].result(ENDS_SECONDS)
    ended = time.monotonic()
    team.regroup(1, 2)
    connected = time.monotonic()
    assert exchange(team, 2, 1, SIZES[2]) == [float(ROUNDS)]
    print(f"{end}: the wait ended after {ended - started:.3f} s, connected {connected - ended:.3f} s later")
    team.close()
