"""When a process is started again, and what follows for the exit status of all: tables."""

import os

import pytest

from lightning_recycle.engines.agent import (
    Agent,
    FinalStatus,
    Printer,
    ProcessCommand,
    RestartRecord,
    decide_restart,
    describe_end,
    exit_status,
    verdict,
)


@pytest.mark.parametrize(("status", "again"), [
    (0, False),
    (1, False),
    (2, False),
    (75, False),
    (130, False),
    (143, False),
    (255, False),
    (69, True),
    (-9, True),
    (-15, True),
    (-11, True),
    (137, True),  # a shell between the two
    (134, True),
])  # fmt: skip
def test_only_who_lost_its_coordinator_or_was_killed_is_started_again(status, again):
    assert isinstance(decide_restart(RestartRecord(), status, 100.0, False, 10), RestartRecord) is again
    assert decide_restart(RestartRecord(), status, 100.0, True, 10) == FinalStatus(status)


def test_pauses_grow_while_a_process_dies_at_once_and_it_is_given_up():
    slot, pauses = RestartRecord(), []
    while isinstance(decision := decide_restart(slot, -9, 0.1, False, 10), RestartRecord):
        slot = decision
        pauses.append(decision.pause)
    assert pauses == [0.0, 1.0, 2.0, 4.0]
    assert decision == FinalStatus(-9, "it ended 5 times in a row within 20 s")


def test_a_process_that_lasted_begins_anew():
    assert decide_restart(RestartRecord(2, 3, 2.0), -9, 30.0, False, 10) == RestartRecord(3, 0, 0.0)


def test_restarts_have_a_bound():
    assert decide_restart(RestartRecord(10, 0), -9, 100.0, False, 10) == FinalStatus(
        -9, "it was restarted 10 times (--max-restarts)"
    )
    assert isinstance(decide_restart(RestartRecord(), -9, 100.0, False, 0), FinalStatus)


@pytest.mark.parametrize(("statuses", "asked", "expected"), [
    ([0, 0, 0, 0], None, 0),
    ([0, -9, 0, 0], None, 0),  # one was killed, the others finished the training
    ([0, 69, 75, 143], None, 0),
    ([1, 75, 75, 75], None, 1),
    ([75, 1, 75], None, 1),
    ([0, 0, 1, 0], None, 1),  # after the training
    ([75, 75], None, 75),
    ([-9, 75], None, 75),
    ([69, 69], None, 69),
    ([-9, -9], None, 137),
    ([-6], None, 134),
    ([2, 2], None, 2),
    ([143, 143], 15, 143),
    ([-9, 143], 15, 143),
    ([130, 130], 2, 130),
    ([0, 0], 15, 0),  # it was at its end
    ([1, 143], 15, 1),
    ([143, 143], None, 143),
    ([], 15, 143),
])  # fmt: skip
def test_the_exit_status_of_all_tells_the_truth(statuses, asked, expected):
    assert verdict([(status, True) for status in statuses], asked) == expected


def test_a_replacement_that_fails_costs_nothing_if_the_others_finish():
    assert verdict([(0, True), (1, False)], None) == 0
    assert verdict([(69, True), (1, False)], None) == 1


@pytest.mark.parametrize(("status", "words"), [
    (-9, "killed by SIGKILL"),
    (137, "killed by SIGKILL"),
    (1, "exit status 1"),
    (69, "lost its coordinator"),
    (190, "signal 62"),
])  # fmt: skip
def test_an_end_is_told_in_words(status, words):
    assert words in describe_end(status)
    assert 0 <= exit_status(status) < 256


def test_a_coordinator_that_waits_for_its_next_start_is_not_started_once_the_run_ends(tmp_path):
    starts, seen = tmp_path / "starts", tmp_path / "seen"
    starts.touch()
    count = f"wc -l < {starts}"

    def command(name: str, script: str) -> ProcessCommand:
        return ProcessCommand(name, ("sh", "-c", script), os.environ)

    coordinator = command(
        "coordinator", f"echo >> {starts}; exit 1"
    )  # its third start is due a second after the second
    failing = command("failing", f"while [ $({count}) -lt 2 ]; do sleep 0.01; done; {count} > {seen}; exit 1")
    agent = Agent([failing, command("lasting", "sleep 2.5")], 10, Printer(False), 10.0, coordinator)
    assert agent.run() == 1
    assert len(starts.read_text()) == int(seen.read_text())
