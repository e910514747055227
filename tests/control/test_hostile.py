"""Strangers, damaged workers and slow readers: whatever they say costs them their connection, and the run goes on."""

import logging
import math
import os
import re
import socket
import threading
import time
from typing import Any

import pytest
from control_plane import ControlPlane, in_thread, together
from control_worker import Member
from hypothesis import HealthCheck, Phase, given, settings
from support.hostile import assault, hostile_inputs
from support.waiting import PATIENCE, wait_for

from lightning_recycle.control.coordinator import coordinator as coordinator_module
from lightning_recycle.control.network.connection import (
    BadMessageError,
    FrameBuffer,
    MessageConnection,
    NonBlockingConnection,
    encode,
)
from lightning_recycle.control.options import HeartbeatTimeouts
from lightning_recycle.control.protocol import messages
from lightning_recycle.control.protocol.messages import WorkerStatus

_HEARTBEAT = messages.Heartbeat(3, 0, messages.Activity(0, "F"))
_IMPOSSIBLE: dict[str, tuple[Any, str]] = {
    "noise": (b"\xff" * 64, "message type 65535 does not exist"),
    "a message without a body": (bytes(encode(_HEARTBEAT))[:2] + bytes(8), "no Heartbeat"),
    "a wrong type": (bytes(encode(_HEARTBEAT)).replace(b"\xa4rank\x03", b"\xa4rank\xc3"), "Heartbeat"),
    "what only the coordinator says": (messages.Regroup(1, (0, 1, 2, 3)), "Regroup may not be sent here"),
    "a second hello": (messages.Hello(3, messages.Process("", 1)), "Hello may not be sent here"),
    "a part of a message": (messages.Facts(), "Facts may not be sent here"),
    "another rank": (messages.Leave(0), "it speaks for rank 0"),
    "a crash of another rank": (messages.Crash(2, False, "", None, ""), "it speaks for rank 2"),
    "a future generation": (messages.Reached(3, 7, messages.Milestone.CONNECTED), "generation 7 has not begun"),
}


def say(member: Member, what: Any) -> None:
    """Sends a message, or bytes, in the name of ``member``."""
    member.client._connection.send_bytes(what if isinstance(what, bytes) else encode(what))


@pytest.mark.parametrize("name", _IMPOSSIBLE)
def test_a_message_that_no_worker_sends_costs_its_sender_and_nobody_else(plane, name):
    what, why = _IMPOSSIBLE[name]
    members = plane.members()
    say(members[3], what)
    together(*(member.step for member in members[:3]))
    (failure,) = plane.events("failure")
    assert failure.worker == (1, 1)
    assert re.search(why, failure.details["cause"])
    assert plane.processes[3].killed.is_set()
    assert plane.coordinator.wait(0) is None


def test_a_checkpoint_is_no_news_after_a_generation_that_began_while_it_was_read(plane):
    members = plane.members()
    for member in members:
        say(member, messages.Restored(member.client.rank, 6))
    assert wait_for(lambda: plane.coordinator._state.steps.version == 6, PATIENCE)
    assert not plane.events("failure")


def test_a_loss_that_is_no_number_is_the_users_business(plane):
    members = plane.members()
    waiting = in_thread(members[0].client.await_loss, 0)
    members[1].client.send(messages.Losses(1, 0, {0: 1.0, 1: math.nan}))
    assert math.isnan(waiting.result(PATIENCE).loss)
    assert not plane.events("failure")


@pytest.mark.parametrize("culprit", ["membership", "history"])
def test_a_defect_of_the_coordinator_costs_the_worker_whose_message_shows_it_and_is_logged(
    plane, culprit, monkeypatch, caplog
):
    members = plane.members()
    original = coordinator_module.membership.transition

    def transition(state: Any, event: Any) -> Any:
        if isinstance(event, messages.MembershipQuery | messages.Reached):
            raise KeyError("a defect")
        return original(state, event)

    def fault_injected(message: Any) -> None:
        raise KeyError("a defect")

    monkeypatch.setattr(coordinator_module.membership, "transition", transition)
    monkeypatch.setattr(plane.coordinator._history, "fault_injected", fault_injected)
    message = (
        messages.Reached(3, 0, messages.Milestone.ENTERED)
        if culprit == "membership"
        else messages.FaultInjected(3, "kill", "F", 1.0)
    )
    members[3].client.send(message)
    together(*(member.step for member in members[:3]))
    (failure,) = plane.events("failure")
    assert failure.worker == (1, 1)
    assert "could not handle its message (KeyError: 'a defect')" in failure.details["cause"]
    assert any(record.exc_info and record.levelno == logging.ERROR for record in caplog.records)
    assert plane.coordinator.wait(0) is None


# ---------------------------------------------------------------------- who is slow


@pytest.mark.parametrize("introduced", [False, True], ids=["before its hello", "as a spare"])
def test_who_stops_in_the_middle_of_a_message_holds_up_nobody(introduced):
    with ControlPlane(heartbeat=HeartbeatTimeouts(600.0)) as plane:
        slow = plane.connection()
        if introduced:
            slow.send(messages.Hello(None, messages.Process("", 1)))
        half = bytes(
            encode(
                messages.Heartbeat(-1, -1, _HEARTBEAT.activity)
                if introduced
                else messages.Hello(None, messages.Process("", 1))
            )
        )
        slow.send_bytes(half[:-3])
        time.sleep(0.3)  # so that it has been read, or is being read
        members = plane.members()
        together(*(member.step for member in members))


def await_generation(connection: Any) -> None:
    """Takes messages until the first generation begins; until then they are signs of life."""
    while not isinstance(connection.receive(), messages.Regroup):
        pass


def test_who_takes_no_messages_is_lost_after_the_timeout_and_holds_up_nobody():
    with ControlPlane(heartbeat=HeartbeatTimeouts(5.0)) as plane:
        deaf = plane.connection()
        deaf.send(messages.Hello(3, messages.Process("", os.getpid())))
        joining = [in_thread(Member(plane.client(rank), 2).join) for rank in range(3)]
        await_generation(deaf)  # from now on it takes nothing
        deaf.send(messages.Report(3, 0, WorkerStatus(1, 0, False)))
        members = [found.result(PATIENCE) for found in joining]
        stop = threading.Event()

        def live() -> None:
            while not stop.wait(0.2):
                deaf.send(messages.Heartbeat(3, 0, messages.Activity(0, "F")))

        beating = in_thread(live)
        large = os.urandom(20_000_000)
        deaf.send(messages.Arrive(3, 0, "state", None))
        parts = together(*(lambda w=w: w.client.arrive("state", (w.client.rank, large)) for w in members))
        assert [sorted(part) for part in parts] == [[0, 1, 2, 3]] * 3, "it was there when all arrived"
        plane.until(lambda: plane.events("failure"))
        stop.set()
        (failure,) = plane.events("failure")
        assert failure.details["cause"] == "it took no message for more than 5 s"
        together(*(member.step for member in members))
        assert isinstance(beating.exception(PATIENCE), OSError | None)


def test_what_a_slow_reader_has_not_taken_arrives_later_in_order():
    ours, theirs = socket.socketpair()
    sender, reader = (
        NonBlockingConnection(ours, FrameBuffer(())),
        MessageConnection(theirs, FrameBuffer((messages.Publish,))),
    )
    sent = [messages.Publish(0, number, "key", os.urandom(300_000)) for number in range(5)]
    for message in sent:
        sender.send(message)
    assert sender.unsent_since is not None
    received = in_thread(lambda: [reader.receive() for _ in sent])
    sender.flush_within(PATIENCE)
    assert received.result(PATIENCE) == sent
    assert sender.unsent_since is None
    sender.close()
    reader.close()


def test_a_coordinator_that_says_nothing_is_given_up_and_one_that_shows_life_is_not():
    ours, theirs = socket.socketpair()
    coordinator = NonBlockingConnection(ours, FrameBuffer(()))
    worker = MessageConnection(theirs, FrameBuffer(messages.TO_WORKERS), quiet=1.0)
    for _ in range(6):
        time.sleep(0.25)
        coordinator.send(messages.Alive())
        assert worker.receive() == messages.Alive()
    with pytest.raises(TimeoutError, match="was silent for 1 s"):
        worker.receive()
    worker.close()
    coordinator.close()


def test_the_coordinator_shows_life_to_all(monkeypatch):
    monkeypatch.setattr(coordinator_module, "SIGN_SECONDS", 0.2)
    with ControlPlane() as plane:
        plane.coordinator._next_alive = 0.0
        for rank in (3, None):  # a member and a spare
            connection = plane.connection()
            connection.send(messages.Hello(rank, messages.Process("", os.getpid())))
            while connection.receive() != messages.Alive():
                pass


def test_a_worker_hears_at_once_for_how_long_the_coordinator_may_be_silent():
    with ControlPlane(
        heartbeat=HeartbeatTimeouts(coordinator_timeout=1000.0)
    ) as plane:  # the next sign of life comes in 10 s
        plane.connection().send(messages.Hello(0, messages.Process("", os.getpid())))
        time.sleep(0.5)
        connection = plane.connection()
        connection.send(messages.Hello(3, messages.Process("", os.getpid())))
        asked = time.monotonic()
        assert connection.receive() == messages.Alive(1000.0)
        assert time.monotonic() - asked < 5.0


def test_an_announced_length_costs_no_memory():
    inbox = FrameBuffer((messages.Arrive,))
    inbox.feed(bytes(encode(messages.Arrive(0, 0, "", None)))[:2] + (1 << 39).to_bytes(8, "big") + b"x" * 100)
    assert inbox.take() is None
    assert len(inbox._buffer) == 100
    inbox = FrameBuffer((messages.Hello,))
    inbox.feed(bytes(encode(messages.Arrive(0, 0, "", None)))[:2] + (1 << 39).to_bytes(8, "big"))
    with pytest.raises(BadMessageError, match="Arrive may not be sent here"):
        inbox.take()


# ---------------------------------------------------------------------- anything, in any order


class Attack:
    """A run of four workers, which take steps all the time, and a stranger who says things to its coordinator."""

    def __init__(self, plane: ControlPlane) -> None:
        self.plane = plane
        self.members = plane.members()
        self._until = math.inf
        self._steps = [in_thread(self._work, member) for member in self.members]

    def _work(self, member: Member) -> None:
        while member.version < self._until:
            member.step()
            time.sleep(0.02)

    def say(self, hostile: tuple[list[Any], bool, bool]) -> None:
        assault(self.plane.coordinator.address, self.plane.coordinator.authkey, hostile)

    def check_that_it_goes_on(self) -> None:
        before = self.members[0].version
        self.plane.until(lambda: self.members[0].version > before + 2)
        assert self.plane.coordinator.wait(0) is None
        assert not [event for event in self.plane.coordinator.history if event.kind not in _PEACEFUL]

    def end(self) -> None:
        self._until = max(member.version for member in self.members) + 2
        for steps in self._steps:
            steps.result(PATIENCE)


_PEACEFUL = ("resumed", "regrouped", "step")


def seeded(examples: int) -> settings:
    """So many examples, the same each time; a failure is not made smaller, as that would take as long again."""
    return settings(
        max_examples=examples, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip


def attack(plane: ControlPlane, examples: int) -> None:
    siege = Attack(plane)
    said = 0

    @seeded(examples)
    @given(hostile=hostile_inputs())
    def besiege(hostile: tuple[list[Any], bool, bool]) -> None:
        nonlocal said
        siege.say(hostile)
        said += 1
        if said % 50 == 0:
            siege.check_that_it_goes_on()

    besiege()
    siege.check_that_it_goes_on()
    assert said >= examples
    siege.end()


def test_the_run_goes_on_whatever_strangers_say_to_its_port(plane):
    attack(plane, 200)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_the_run_goes_on_after_10_000_hostile_inputs(plane):
    attack(plane, 10_000)
