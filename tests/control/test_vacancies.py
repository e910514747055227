"""Vacancies: how empty positions are filled."""

import threading
from collections import Counter

import pytest
from support.waiting import wait_for

from lightning_recycle.control.coordinator.worker_table import Vacancies
from lightning_recycle.control.options import CoordinatorOptions, RecoveryOptions
from lightning_recycle.control.protocol.messages import Process as ProcessRecord
from lightning_recycle.planning.grid import Grid, Positions

ONE = Positions(Grid(1, 1, 1))


class Process:
    sentinel = -1

    def __init__(self) -> None:
        self.killed = False

    def describe_exit(self, timeout: float) -> str | None:
        return None

    def kill(self) -> None:
        self.killed = True


class Starter:
    """Starts processes, or fails to; remembers them."""

    def __init__(self, error: Exception | None = None) -> None:
        self.processes: list[Process] = []
        self.error = error
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def __call__(self, rank: int, incarnation: int) -> Process:
        assert self.may_go_on.wait(10.0)
        if self.error is not None:
            raise self.error
        self.processes.append(Process())
        return self.processes[-1]


def vacancies(start: Starter | None, max_restarts: int = 10) -> Vacancies:
    options = CoordinatorOptions(recovery=RecoveryOptions(max_restarts=max_restarts))
    return Vacancies(options, start, lambda: None, ONE)


def taken(found: Vacancies, number: int = 1) -> list[tuple[int, object]]:
    """What was started, once it is."""
    started: list[tuple[int, object]] = []
    assert wait_for(lambda: started.extend(found.take_started()) or len(started) >= number)
    return started


def test_a_position_is_being_filled_from_the_request_until_the_process_is_taken():
    start = Starter()
    start.may_go_on.clear()
    found = vacancies(start)
    found.start(3)
    assert found.is_starting(3)
    assert not found.is_starting(2)
    assert list(found.take_started()) == [], "starting takes its time, and nobody waits for it"
    start.may_go_on.set()
    taken(found)
    assert not found.is_starting(3)


def test_a_process_that_cannot_be_started_is_told_as_none_and_its_reason_is_logged(caplog):
    found = vacancies(Starter(OSError("no more processes")))
    found.start(3)
    assert taken(found) == [(3, None)]
    assert "worker (3, 0) could not be started: no more processes" in caplog.text


def test_without_a_way_to_start_processes_none_is_started():
    assert not vacancies(None).may_start(0, now=0.0)


def test_no_more_than_max_restarts_are_started_in_a_run():
    found = vacancies(Starter(), max_restarts=2)
    for _ in range(2):
        assert found.may_start(0, now=0.0)
        found.start(0)
    assert not found.may_start(0, now=0.0)
    assert not found.may_start(1, now=1e9)
    taken(found, 2)


def test_after_each_failure_the_next_try_waits_twice_as_long_up_to_half_a_minute():
    found = vacancies(Starter())
    waits = []
    for _ in range(9):
        found.record_failure(3, now=100.0)
        waits.append(next(seconds for seconds in (0.5, 1, 2, 4, 8, 16, 30) if found.may_start(3, 100.0 + seconds)))
        assert not found.may_start(3, 100.0 + waits[-1] - 0.01)
    assert waits == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    assert found.may_start(2, 100.0), "other positions do not wait"


def test_a_replacement_that_was_ready_begins_a_new_count_of_failures():
    found = vacancies(Starter())
    for _ in range(4):
        found.record_failure(3, now=0.0)
    found.record_success(3)
    found.record_failure(3, now=100.0)
    assert found.may_start(3, now=100.5)


def test_the_user_is_told_when_the_restarts_are_used_up(caplog):
    found = vacancies(Starter(), max_restarts=1)
    found.record_failure(3, now=0.0)
    assert caplog.text == ""
    found.start(3)
    taken(found)
    found.record_failure(3, now=0.0)
    assert "max_restarts=1 are used up" in caplog.text


def test_closing_ends_what_was_started_and_never_taken():
    start = Starter()
    start.may_go_on.clear()
    found = vacancies(start)
    found.start(0)
    found.start(1)
    threading.Timer(0.05, start.may_go_on.set).start()  # one that is still starting is waited for
    found.close()
    assert [process.killed for process in start.processes] == [True, True]


def test_the_members_of_a_position_are_on_one_node_if_spares_allow_it():
    positions = Positions(Grid(2, 2, 1), 2)

    def placed(nodes: str) -> dict[int, str]:
        found = Vacancies(CoordinatorOptions(), None, lambda: None, positions)
        free, at, held = set(range(positions.num_workers)), {}, Counter[int]()
        for node in nodes:
            found.spares.append((NotImplemented, ProcessRecord("", 0, node, "", 0)))
            rank, _, process = found.place_spare(free, held) or pytest.fail("there is room")
            held[positions.column(rank)] += 1
            free.discard(rank)
            at[rank] = process.node
        return at

    for nodes in ("aabbccdd", "abcdabcd", "aaaabbbb", "abababab", "abbaabba"):
        at = placed(nodes)
        assert all(len({at[rank] for rank in positions.ranks(position)}) == 1 for position in positions.grid.workers())
    for nodes in ("aaaabbbb", "abababab"):  # a pipeline is on one node, too
        at = placed(nodes)
        assert [len({at[rank] for rank in range(first, first + 4)}) for first in (0, 4)] == [1, 1]
