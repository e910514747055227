"""Positions of several processes: ranks and places, the roster, what is left of broken positions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from membership_feed import feed

from lightning_recycle.control.coordinator.failure_detector import DetectionState, Sign, WorkerSigns, review
from lightning_recycle.control.options import difference, settle
from lightning_recycle.control.protocol import messages
from lightning_recycle.control.protocol import state as s
from lightning_recycle.control.protocol.messages import WorkerStatus
from lightning_recycle.planning.grid import Grid, Positions

GRID = Grid(2, 1, 1)  # with two members, ranks 0 and 1 are position (0, 0), ranks 2 and 3 position (1, 0)


# ---------------------------------------------------------------------- ranks and places


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
def test_each_rank_is_one_member_of_one_position(pipelines, stages, members):
    positions = Positions(Grid(pipelines, stages, 1), members)
    places = [(positions.position(rank), positions.member(rank)) for rank in range(positions.num_workers)]
    assert len(set(places)) == len(places) == pipelines * stages * members
    assert [positions.rank(*place) for place in places] == list(range(len(places)))
    assert all(positions.column(rank) == rank % (stages * members) for rank in range(len(places)))


# ---------------------------------------------------------------------- the state machine


def report(rank: int, generation: int) -> messages.Report:
    return messages.Report(rank, generation, WorkerStatus(rank % 2, 0, False))


def running() -> s.MembershipState:
    start = s.initial_state(GRID, members=2)
    state, _ = feed(start, *map(s.Joined, range(4)), *(report(rank, 0) for rank in range(4)))
    return state


def test_a_link_within_a_position_costs_one_of_its_members():
    _, commands = feed(running(), messages.Broken(0, 0, "reset", (1,)), s.GraceElapsed(0, "reset"))
    assert [c.rank for c in commands if isinstance(c, s.Evict)] == [1]


# ---------------------------------------------------------------------- who is given up


@pytest.mark.parametrize(("silent", "given_up"), [({1}, {1}), ({1, 3}, set()), ({0, 1}, {0, 1})])
def test_a_worker_is_given_up_while_all_members_of_another_position_are_well(silent, given_up):
    silences = [Sign("it was silent", 6.0 if rank in silent else 0.0, 5.0, 60.0) for rank in range(4)]
    standings = {rank: WorkerSigns(silence) for rank, silence in enumerate(silences)}
    _, ruling = review(DetectionState(), 100.0, standings, range(4), Positions(GRID, 2), 7)
    assert set(ruling.evict) == given_up


# ---------------------------------------------------------------------- the request


def test_the_workers_say_how_many_processes_a_position_has():
    wants = messages.RunRequest("fit", GRID, True, members=2)
    terms = settle({}, wants)
    assert (terms.positions.members, terms.positions.num_workers) == (2, 4)
    other = difference({}, terms, messages.RunRequest("fit", GRID, True))
    assert "The number of processes of a position is 1 in this script, and 2 in the run" in other.why
