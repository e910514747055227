"""Who is given up because others of the same machine connected long ago."""

import pytest

from lightning_recycle.control.coordinator.failure_detector import StartupTimeouts, late_to_connect
from lightning_recycle.planning.grid import Grid

GRID = Grid(2, 2, 4)  # ranks 0, 2 hold stage 0; 1, 3 stage 1


@pytest.mark.parametrize(
    ("waits", "took", "late"),
    [
        ({3: 31.0}, {0: 1.0, 1: 2.0, 2: 3.0}, {3}),
        ({3: 29.0}, {0: 1.0, 1: 2.0, 2: 3.0}, set()),  # imports take what they take
        ({3: 49.0}, {0: 1.0, 1: 2.0, 2: 10.0}, set()),  # on a slow machine everything takes longer
        ({3: 51.0}, {0: 1.0, 1: 2.0, 2: 10.0}, {3}),
        ({2: 99.0, 3: 99.0}, {0: 1.0, 1: 1.0}, set()),  # not one process hangs, the machine is slow
        ({3: 99.0}, {}, set()),
    ],
)
def test_who_takes_much_longer_than_the_others_is_late(
    waits: dict[int, float], took: dict[int, float], late: set[int]
) -> None:
    assert late_to_connect(GRID, waits, took).keys() == late


def test_whom_a_stage_cannot_do_without_is_not_given_up() -> None:
    assert late_to_connect(Grid(1, 3, 4), {2: 1000.0}, {0: 1.0, 1: 1.0}) == {}


def test_the_reason_names_the_times() -> None:
    starts = StartupTimeouts(GRID)
    for rank in range(4):
        starts.began(rank, 100.0)
    for rank in (0, 1, 2):
        starts.connected(rank, 102.5)
    assert starts.late(130.0, (0, 1, 2)) == {}
    expected = {3: "it did not connect within 30 s, though the slowest of 3 others took 2.5 s"}
    assert starts.late(131.0, (0, 1, 2)) == expected
    assert starts.late(131.0, (0, 2)) == {}, "no other of its stage lives"
    starts.forget(3)
    assert starts.late(1000.0, (0, 1, 2)) == {}


def test_a_replacement_is_measured_by_those_that_live() -> None:
    starts = StartupTimeouts(GRID)
    for rank in range(4):
        starts.began(rank, 0.0)
        starts.connected(rank, 8.0)
    starts.began(1, 100.0)
    assert starts.late(139.0, (0, 2, 3)) == {}
    assert starts.late(141.0, (0, 2, 3)).keys() == {1}
